"""Measuring stages and peers: tasks, what is done with them, and the plans of what is recorded.

A task is one size at which candidates and peers are compared. All get the same random normal inputs (a GPU consumes
less power on zeros, and would run faster than on real data), are checked against float64, and are then timed: in turn,
or one after the other for a second each. Tasks of one group take turns with each other, too.
"""

import itertools
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import cache, partial
from pathlib import Path

import torch

from reference import attention, philox
from steps import catalogue, engine
from steps.course.bench import ablations, peers, rows, timing
from steps.course.bench.cost import Point


def sizes(*lengths, D=(64, 128)):
    """Points of the FlashAttention papers' grid: 16k tokens in every batch, hidden size H D = 2048."""
    return tuple(Point(16384 // N, 2048 // d, N, d, causal) for d in D for causal in (False, True) for N in lengths)


STANDARD_GRID = sizes(512, 1024, 2048, 4096, 8192, 16384)
# Under a minute, and small enough for a laptop's GPU and a first kernel.
QUICK_GRID = tuple(Point(2, 8, N, 64, causal) for causal in (False, True) for N in (512, 1024, 2048))
GRIDS = {"standard": STANDARD_GRID, "quick": QUICK_GRID}
RESULTS = {"fwd": ("out",), "bwd": ("dq", "dk", "dv"), "fwd+bwd": ("out", "dq", "dk", "dv")}
MATMUL_SIZE = 8192
SHORT_MS = 1.0  # of a shorter call the CPU's time is measured, too
LIMIT_MS = 3000.0  # whose call takes longer does not take part
HOW = dict(layout=None, options={}, timing="interleaved", clock_mhz=None, watts=None)


# --- who takes part -----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Entrant:
    """A stage's kernel, or a peer, as functions that refuse what they do not take.

    stage "02_fa2_cuda"; fwd_kernel, bwd_kernel: stems of the kernel files; or else the peer's name. forward, backward:
    with the contract's signatures. attention: differentiable, and all that a peer has.
    """

    stage: str | None = None
    fwd_kernel: str | None = None
    forward: Callable | None = None
    bwd_kernel: str | None = None
    backward: Callable | None = None
    attention: Callable | None = None
    peer: str | None = None

    def __str__(self):
        return self.peer or f"{self.stage} {self.fwd_kernel}"

    def subject(self, where):
        """The fields of a row that say what was measured. where: the row's other fields."""
        who = {"stage": self.stage, "kernel": None, "peer": self.peer, "source": None}
        if self.peer:
            return {**who, "peer_version": peers.version(self.peer, where.get("pass", "fwd"))}
        if where["pass"] != "fwd" and self.bwd_kernel is None:
            raise NotImplementedError("has no backward")
        kernels = {"fwd": self.fwd_kernel, "bwd": self.bwd_kernel}
        who["kernel"] = "+".join(dict.fromkeys(kernels[name] for name in where["pass"].split("+")))
        who["source"] = rows.row_hash({**where, **who})
        if who["source"] is None:
            raise NotImplementedError(f"steps/step{self.stage} has no kernel of this name, or none for this size")
        return who

    def call(self, inputs, pass_, causal):
        """The function to be timed: without arguments, it gives the results of the pass as a tuple."""
        dout, *qkv = inputs
        by_autograd = self.attention and (self.forward is None or pass_ == "fwd+bwd")
        if by_autograd and pass_ != "fwd":
            qkv = [x.detach().requires_grad_() for x in qkv]

        def forward():
            """What the backward needs, first of all out."""
            return (self.attention(*qkv, causal=causal),) if by_autograd else self.forward(*qkv, causal=causal)

        def backward(saved):
            if by_autograd:  # Not out.backward(), which would also add each result to the .grad of the one before.
                return torch.autograd.grad(*saved, qkv, dout, retain_graph=pass_ == "bwd")
            return tuple(self.backward(dout, *qkv, *saved, causal=causal))

        def both():
            saved = forward()
            return saved[0].detach(), *backward(saved)

        if pass_ == "bwd":
            return partial(backward, forward())
        return both if pass_ == "fwd+bwd" else lambda: forward()[:1]


def a_peer(name, function=None):
    """A peer as an entrant. function: if it is not the one of this name in PEERS."""
    return Entrant(peer=name, attention=function or peers.PEERS.get(name))


def graphed(entrant):
    """The entrant as CUDA graphs, one of each pass: a call replays them, and runs hardly any Python."""

    @cache  # It is captured at the first call.
    def captured(*qkv, causal):
        like = tuple(x.detach().clone().requires_grad_() for x in qkv)  # A call copies its inputs here.
        return torch.cuda.make_graphed_callables(partial(entrant.attention, causal=causal), like)

    return replace(entrant, attention=lambda *qkv, causal: captured(*qkv, causal=causal)(*qkv))


def candidate(number, word):
    """A stage's rung. A backward belongs to the rung that has a file of its own for it."""
    module = catalogue.stage(number)
    folder = Path(module.__file__).parent
    found = {prefix: path.stem for prefix in ("fwd", "bwd") for path in folder.glob(f"{prefix}_*_{word}.*")}
    forward, *both = (partial(getattr(module, name), rung=word) for name in ("forward", "backward", "attention"))
    stage = module.SUPPORTS["stage"].removeprefix("step")
    return Entrant(stage, found.get("fwd"), forward, found.get("bwd"), *(both if "bwd" in found else ()))


def kernel_files():
    """{"fwd_8_hopper": ("02", "hopper")}: stage and rung of every kernel file of stages 00 to 03 that can run here."""
    numbers = [number for number in ("00", "01", "02", "03") if catalogue.unavailable(number) is None]
    rungs = [(number, word) for number in numbers for word in catalogue.stage(number).SUPPORTS["rungs"]]
    found = {rung: candidate(*rung) for rung in rungs}
    return {file: rung for rung, one in found.items() for file in (one.fwd_kernel, one.bwd_kernel) if file}


def switched(candidate, passes):
    """The candidate as it is, and with one switch turned at a time; a backward with a fixed order of dq."""
    if "fwd" not in passes:
        backward = partial(candidate.backward, deterministic=True)
        return [candidate, replace(candidate, bwd_kernel=f"{candidate.bwd_kernel}:DETERMINISTIC=1", backward=backward)]
    found = ablations.forwards(candidate.fwd_kernel).items()
    return [Entrant(candidate.stage, kernel, forward) for kernel, forward in found]


# --- measuring ----------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Task:
    """What is compared at one size.

    options: what the rows say was asked for. share: of all scores, those whose operations are counted. reference: its
    options for the last head. last: only so many of the last queries are compared with float64. ceiling(inputs) gives
    what is timed beside them: (fields of its row, call, operations, error).
    """

    point: Point
    dtype: str
    passes: tuple[str, ...]
    entrants: tuple
    options: dict = field(default_factory=dict)
    share: float = 1.0
    reference: dict = field(default_factory=dict)
    last: int | None = None
    ceiling: Callable | None = None


def measure(groups, timed="interleaved"):
    """Yields a valid results row for everybody at every task of the groups, which are lists of tasks.

    Who cannot take part (dtype, head_dim, out of memory, a result that is not finite, a call longer than LIMIT_MS) is
    left out, and the reason is printed once. The rows of one call share one `run`. timed: "interleaved" or "sustained".
    """
    origin, say = {**rows.provenance(engine.device), **HOW, "timing": timed}, cache(print)
    take_times = {"interleaved": timing.interleaved, "sustained": timing.sustained}[timed]
    for group in groups:
        taking_part = {}  # {pass: [(the row without its times, call, operations)]}
        for task in group:
            for pass_, found in who_takes_part(task, origin, say):
                taking_part.setdefault(pass_, []).extend(found)
        for found in taking_part.values():
            calls = {n: one[1] for n, one in enumerate(found)}
            times = take_times(calls, device=engine.device)
            short = {n: calls[n] for n in calls if times[n]["ms_median"] < SHORT_MS}
            host = timing.host_us(short) if engine.device == "cuda" and timed == "interleaved" else {}
            for n, (row, call, flops) in enumerate(found):
                row |= times[n] | {"tflops": flops / times[n]["ms_median"] / 1e9}
                if row["pass"] == "fwd+bwd" and engine.device == "cuda":
                    row["peak_bytes"] = peak_bytes(call)
                if n in host:
                    row["host_us"] = host[n]
                yield rows.validate(row)
        taking_part, found, call = {}, [], None  # A backward holds its forward's results; this makes room for the next.


def who_takes_part(task, origin, say):
    """Yields of each pass of a task (pass, [(the row without its times, call, operations)])."""
    inputs = make_inputs(task.point, task.dtype, engine.device)
    how = dict(backward=task.passes != ("fwd",), last=task.last, options=task.reference)
    truth = sample_truth(inputs, task.point.causal, **how)
    for pass_ in task.passes:
        where = {**origin, **task.point.sizes, "pass": pass_, "dtype": task.dtype, "options": task.options}
        found = []
        for entrant in task.entrants:
            try:
                row = where | entrant.subject(where)
                call = entrant.call(inputs, pass_, task.point.causal)
                ms, row["error"] = tried(call, pass_, truth)
                if ms > LIMIT_MS:
                    raise RuntimeError(f"one call takes more than the limit of {LIMIT_MS:g} ms")
                found.append((row, call, task.share * task.point.flops(pass_)))
            except Exception as problem:  # whatever one kernel raises, the others are still to be measured
                say(f"left out: {entrant}, {pass_} {task.options.get('feature', task.dtype)}: {in_words(problem)}")
        if task.ceiling and found:
            fields, call, flops, error = task.ceiling(inputs)
            found.append((where | fields | {"error": error}, call, flops))
        yield pass_, found


def tried(call, pass_, truth):
    """(milliseconds of the second call, error of the third); ValueError if a result is not finite."""
    call()
    ms = timing.one_call(call, device=engine.device)
    return ms, sample_error(dict(zip(RESULTS[pass_], call(), strict=True)), truth)


def in_words(problem):
    return f"{type(problem).__name__}: {(str(problem).splitlines() or [''])[0]}"


def make_inputs(point, dtype, device):
    """(dout, q, k, v), random normal, the same at every call on one kind of device."""
    generator = torch.Generator(device).manual_seed(0)
    B, H, Hk, N, Nk, D = (point.sizes[name] for name in ("B", "H", "Hk", "N", "Nk", "D"))
    shapes = ((B, H, N, D), (B, H, N, D), (B, Hk, Nk, D), (B, Hk, Nk, D))
    normal = (torch.randn(shape, generator=generator, device=device) for shape in shapes)
    return tuple(x.to(rows.DTYPES[dtype]) for x in normal)


def peak_bytes(call):
    """How much device memory a call holds at most, beyond what was taken before; its results count."""
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    call()
    torch.cuda.synchronize()
    return torch.cuda.max_memory_allocated() - before


def sample_truth(inputs, causal, *, backward=True, last=None, options=None):
    """{name: float64 result} for the last batch and its last K/V head, with its query heads.

    The reference holds several N x N matrices in float64, 2 GB each at N = 16k. Therefore it computes a sample, and on
    the CPU where the GPU's memory does not suffice. It is the last head, where a wrong stride has the largest effect.

    last: only so many of the last queries, with out and dq, because dk and dv would need all of them.
    options: further ones of the reference, for these heads.
    """
    dout, q, k, v = inputs
    heads, queries = slice(-(q.shape[1] // k.shape[1]), None), slice(-(last or 0), None)
    sample = dout[-1:, heads, queries], q[-1:, heads, queries], k[-1:, -1:], v[-1:, -1:]

    def computed(device):
        how = {name: x.to(device) if isinstance(x, torch.Tensor) else x for name, x in (options or {}).items()}
        dout, *qkv = (x.to(device) for x in sample)
        out, _ = attention.forward(*qkv, causal=causal, **how)
        return out, *(attention.backward(dout, *qkv, causal=causal, **how) if backward else ())

    try:
        found = computed(q.device)
    except torch.OutOfMemoryError:
        found = [x.to(q.device) for x in computed("cpu")]
    names = RESULTS["fwd+bwd" if backward else "fwd"]  # with sinks the reference has one more result
    return {name: x for name, x in zip(names, found, strict=False) if not last or name in ("out", "dq")}


def sample_error(got, truth):
    """The largest absolute difference of `got` from `truth` in the sample; ValueError if a result is not finite."""
    largest = 0.0
    for name, result in got.items():
        if not bool(torch.isfinite(result).all()):
            raise ValueError("its result is not finite")
        if name in truth:
            want = truth[name]
            sample = result[-1:, -want.shape[1] :, -want.shape[2] :]
            largest = max(largest, float((sample.double() - want).abs().max()))
    return largest


# --- rungs over a grid --------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Part:
    """A part of a plan: rungs, pairs of stage and word, beside peers over a grid. All of it is one run."""

    rungs: tuple[tuple[str, str], ...]
    grid: tuple[Point, ...] = STANDARD_GRID
    passes: tuple[str, ...] = ("fwd",)
    dtypes: tuple[str, ...] = ("bf16",)
    peers: tuple[str, ...] = ("sdpa-flash", "sdpa-cudnn")
    switches: bool = False  # also with one switch turned at a time; a backward also with a fixed order of dq
    timed: str = "interleaved"  # or "sustained"

    def __call__(self):
        """Yields the rows. A matrix product is measured beside interleaved rungs of 16 bits."""
        who = [candidate(*rung) for rung in self.rungs]
        if self.switches:
            who = [turned for one in who for turned in switched(one, self.passes)]
        entrants, tasks = (*who, *map(a_peer, self.peers)), []
        for dtype, point in itertools.product(self.dtypes, self.grid):
            product = partial(matrix_product, dtype) if self.timed == "interleaved" and dtype != "fp32" else None
            tasks.append(Task(point, dtype, self.passes, entrants, ceiling=product))
        return measure(([task] for task in tasks), self.timed)


def matrix_product(dtype, inputs):
    """A Task's ceiling: a product of two large matrices, at the tensor cores' full speed."""
    N = MATMUL_SIZE
    generator = torch.Generator(inputs[0].device).manual_seed(0)
    a, b = torch.randn(2, N, N, generator=generator, device=inputs[0].device).to(rows.DTYPES[dtype])
    out = a @ b
    error = float((out[-1].double() - a[-1].double() @ b.double()).abs().max())  # in the last row
    fields = {**Point(1, 1, N, N).sizes, "pass": rows.MATMUL, **a_peer(rows.MATMUL).subject({})}
    return fields, lambda: torch.mm(a, b, out=out), 2 * N**3, error


def copied_keys(inputs):
    """A Task's ceiling: a copy of k, which reads and writes as much as reading k and v takes."""
    out = inputs[2].clone()
    return {"pass": rows.COPY, **a_peer(rows.COPY).subject({})}, lambda: out.copy_(inputs[2]), 0, 0.0


# --- features -----------------------------------------------------------------------------------------------

SEQUENCES, SOFTCAP, DROPOUT, SEED = 8, 50.0, 0.1, 2**35 + 11
LAST = 128  # so many of the last queries are compared with float64, where all would take too long
ANY = "sdpa-cudnn", "sdpa-flash", "flex", "fa4"


def feature(name, point, options, beside=(), share=1.0, passes=("fwd", "bwd"), last=None):
    """The task of a feature: options of the kernel, and the peers. Rows tell the options that are no tensors."""
    from steps.step03_triton import features  # imported here because Triton is not available everywhere

    q = torch.empty(1, 1, point.N, point.D, dtype=torch.bfloat16, device=engine.device)
    own = {"causal": False, "scale": None, "tile": None, "rung": None, "deterministic": False}
    f = own | features.DEFAULTS | options
    f["asked"] = features.options.asked(f)
    of_flash = features.flash.forward, None  # also measured without a feature
    forward, _ = features.forward_kernel(q, q, f, gradient=True) or of_flash
    of_backward, _ = features.backward_kernel(q, q, f, ()) or (features.flash.backward, None)
    stems = [launcher.__module__.rpartition(".")[2] for launcher in (forward, of_backward)]

    def backward(*tensors, causal):
        return of_backward(*tensors, causal=causal, **options)[:3]  # with sinks there is one more result

    entrants = Entrant("03_triton", stems[0], partial(forward, **options), stems[1], backward), *beside
    told = {"feature": name} | {name: x for name, x in options.items() if not isinstance(x, torch.Tensor)}
    if "cu_seqlens_q" in options:
        told = {"feature": name, "sequences": len(options["cu_seqlens_q"]) - 1}
    return Task(point, "bf16", passes, entrants, told, share, reference_options(options, point, last), last)


def asked(how):
    """Peers as entrants. how: {name: what this one is asked for}."""
    return [a_peer(name, partial(peers.PEERS[name], **options)) for name, options in how.items()]


def a_new_token(B, cache):
    """The task of decoding for B sequences; four query heads share a key head."""
    from steps.step03_triton.features import decode

    entrants = Entrant("03_triton", "decode", decode.forward), *map(a_peer, ANY)
    point = Point(B, 32, 1, 128, Hk=8, Nk=cache)
    # Decoding reads k and v, and little else.
    return Task(point, "bf16", ("fwd",), entrants, {"feature": "decode"}, ceiling=copied_keys)


def small_calls():
    """Groups of calls that are lost in Python: of rungs, also as graphs, of a feature, and of one new token."""
    rungs = [candidate(*rung) for rung in of("02", "hopper") + of("03", "gluon tma fused")]
    for N in (256, 1024):
        who = *rungs, *map(a_peer, BEST)
        usual = Task(Point(1, 16, N, 128), "bf16", ("fwd", "fwd+bwd"), who, {"feature": "small call"})
        graphs = tuple(map(graphed, who))
        yield [usual, replace(usual, passes=("fwd+bwd",), entrants=graphs, options=usual.options | {"graph": True})]
    yield [feature("soft-cap", Point(1, 16, 256, 128), {"softcap": SOFTCAP}, passes=("fwd",))]
    yield [a_new_token(1, 4096)]
    yield [a_new_token(64, 2048)]


def reference_options(options, point, last):
    """The kernel's options as the reference takes them, for the last head."""
    alike = "window", "softcap", "mask", "cu_seqlens_q", "cu_seqlens_k"
    found = {name: options[name] for name in alike if name in options}
    found |= {name: options[name][-1:] for name in ("alibi_slopes", "sinks") if name in options}
    if "dropout_p" in options:
        first = point.N - last
        keep = philox.keep_mask(SEED, 1, point.H, last, point.N, options["dropout_p"], first_query=first)
        found["dropout_mask"] = keep[:, -1:].to(options["seed"].device)
        found["dropout_p"] = philox.rounded(options["dropout_p"])
    return found


def features_at(N, H, D):
    """The features of flash.py, each by itself, and one pair that models use. N is a multiple of SEQUENCES.

    They take turns, and the peers that have the same feature take turns with them, so that each can be compared with
    each. The operations are those of the scores that the positions leave visible: half of them if causal, fewer in a
    window, an eighth in a pack of eight sequences. A mask hides nothing from the count.
    """
    device, point, left, length = engine.device, Point(1, H, N, D), N // 8, N // SEQUENCES
    generator = torch.Generator(device).manual_seed(1)
    added = torch.randn(1, 1, N, N, generator=generator, device=device).to(torch.bfloat16)
    slopes = 2.0 ** (-8 * torch.arange(1, H + 1, device=device) / H)  # those of the ALiBi paper
    sinks = torch.randn(H, generator=generator, device=device).to(torch.bfloat16)
    starts = torch.arange(0, N + 1, length, dtype=torch.int32, device=device)
    masks = ("additive mask", {"mask": added}), ("boolean mask", {"mask": added > -0.5})
    dropout = {"dropout_p": DROPOUT, "seed": torch.tensor(SEED, device=device)}
    packed = dict(cu_seqlens_q=starts, cu_seqlens_k=starts, max_seqlen_q=length, max_seqlen_k=length)
    varlen, fa4 = partial(peers.varlen, starts, length), partial(peers.fa4_packed, **packed)
    of_packed = a_peer("varlen", varlen), a_peer("fa4", fa4)
    window, of_window, softcap = {"window": (left, 0)}, {"window_size": (left, 0)}, {"softcap": SOFTCAP}
    in_window = (left + 1) * (N - left / 2) / N**2  # query i sees min(i, left) + 1 keys

    # What FlexAttention is asked for:
    capped = {"change": lambda score, b, h, i, j: SOFTCAP * torch.tanh(score / SOFTCAP)}
    slanted = {"change": lambda score, b, h, i, j: score - slopes[h] * (i - j).abs()}
    near = {"seen": lambda b, h, i, j: (j <= i) & (j >= i - left)}
    together = {"seen": lambda b, h, i, j: i // length == j // length}
    of_pair = {"flex": capped | near, "fa4": of_window | softcap}
    return [
        feature("none", point, {}, map(a_peer, ANY)),
        feature("causal", replace(point, causal=True), {}, map(a_peer, ANY)),
        *(feature(name, point, mask, asked({"sdpa-cudnn": mask, "sdpa-efficient": mask})) for name, mask in masks),
        feature("ALiBi", point, {"alibi_slopes": slopes}, asked({"flex": slanted})),
        feature("soft-cap", point, softcap, asked({"flex": capped, "fa4": softcap})),
        feature("dropout", point, dropout, last=min(LAST, N)),
        feature("sinks", point, {"sinks": sinks}, asked({"fa4": {"learnable_sink": sinks}})),
        feature("window", point, window, asked({"flex": near, "fa4": of_window}), in_window),
        feature("soft-cap + window", point, softcap | window, asked(of_pair), in_window),
        feature("packed", point, packed, [*asked({"flex": together}), *of_packed], 1 / SEQUENCES),
        feature("padded", Point(SEQUENCES, H, length, D), {}),  # the same work as a batch
    ]


def features(N=16384, cache=32768, longest=65536):
    """Groups: the features of two head_dims, a new token over a cache of keys, and memory at a great length."""
    yield features_at(N, 16, 128)
    yield features_at(N, 32, 64)
    yield [a_new_token(8, cache)]
    causal = Point(1, 16, longest, 128, causal=True)  # as models are, which takes half the time
    yield [feature("memory", causal, {}, [a_peer("sdpa-cudnn")], passes=("fwd+bwd",), last=min(LAST, longest))]


# --- plans --------------------------------------------------------------------------------------------------


def of(number, words):
    return tuple((number, word) for word in words.split())


BEST = "sdpa-flash", "sdpa-cudnn", "fa4", "fa3"  # the fastest that others have, where they are found
BOTH = ("fwd", "bwd")
FLOAT32 = dict(passes=BOTH, dtypes=("fp32",), peers=("sdpa-efficient",))
# What is recorded of stages 02 and 03: parts of a few minutes, which yield rows when they are called. The slow rungs
# are measured at 4k alone.
PLANS = {
    "fast": (Part(of("02", "hopper roles wgmma fa2 cp_async ldmatrix"), peers=BEST),),
    "slow": (Part(of("02", "mma warp"), sizes(4096)), Part(of("02", "scalar warp"), sizes(4096), **FLOAT32)),
    "bwd": (Part(of("02", "hopper wgmma fa2") + of("03", "gluon"), passes=("bwd",), peers=BEST),),
    "more": (
        Part(of("02", "hopper fa2"), sizes(4096, 16384, D=(256,))),
        Part(of("02", "hopper fa2"), sizes(4096), BOTH, ("fp16",)),
    ),
    "switches": (
        Part(of("02", "hopper fa2"), sizes(512, 4096, 16384), switches=True),
        Part(of("02", "hopper"), sizes(4096, 16384), ("bwd",), switches=True),
    ),
    "triton": (
        Part(of("03", "gluon tma roles fused"), peers=BEST),
        Part(of("03", "gluon tma fused"), passes=("bwd",), peers=BEST),
    ),
    "float32": (Part(of("03", "fused"), sizes(512, 4096, 16384), **FLOAT32),),
    "compilers": (Part(of("03", "gluon tma"), sizes(16384), BOTH, peers=("flex", "compiled", "fa4", "sdpa-cudnn")),),
    "features": (lambda: measure(features()),),
    "host": (lambda: measure(small_calls()),),
}
LONG = 16384  # A call has to take milliseconds, or else a second of calls measures how fast they are launched.


def sustained(parts):
    """Those of the parts that have N = 16k, as they are under sustained load; D = 128 comes first."""
    for part in parts:
        if long := sorted((p for p in getattr(part, "grid", ()) if p.N == LONG), key=lambda p: p.D != 128):
            yield replace(part, grid=tuple(long), timed="sustained")
