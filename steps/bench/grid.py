"""Measuring stages and peers: tasks, what is done with them, and the plans of what is recorded.

A task is one size at which candidates and peers are compared. All get the same random normal inputs (a GPU consumes
less power on zeros, and would run faster than on real data), are checked against float64, and are then timed: in turn,
or one after the other for a second each. Tasks of one group take turns with each other, too.
"""

import itertools
from collections.abc import Callable, Container
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path

import torch
from torch.nn.attention import SDPBackend

from reference import attention, philox
from steps import catalogue, checks
from steps.bench import ablations, rows, timing
from steps.bench.cost import Point
from steps.bench.peers import MATMUL_SIZE, PEERS, copy, flex, matmul, sdpa, varlen

# The FlashAttention papers': 16k tokens in every batch, hidden size H D = 2048.
STANDARD_GRID = tuple(
    Point(B, 2048 // D, N, D, causal)
    for D in (64, 128)
    for causal in (False, True)
    for B, N in ((32, 512), (16, 1024), (8, 2048), (4, 4096), (2, 8192), (1, 16384))
)
# Under a minute, and small enough for a laptop's GPU and a first kernel.
QUICK_GRID = tuple(Point(2, 8, N, 64, causal) for causal in (False, True) for N in (512, 1024, 2048))
GRIDS = {"standard": STANDARD_GRID, "quick": QUICK_GRID}
RESULTS = {"fwd": ("out",), "bwd": ("dq", "dk", "dv"), "fwd+bwd": ("out", "dq", "dk", "dv")}
HOW = dict(layout=None, options={}, timing="interleaved", clock_mhz=None, watts=None)


# --- who takes part -----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Candidate:
    """A stage's kernel as plain functions with the contract's signatures.

    stage "02_fa2_cuda"; fwd_kernel, bwd_kernel: stems of the kernel files, for the rows. Without backward (and
    bwd_kernel) only "fwd" is measured. dtypes: names out of rows.DTYPES. Whatever else a kernel does not take, it
    refuses itself with an exception.
    """

    stage: str
    fwd_kernel: str
    forward: Callable
    bwd_kernel: str | None = None
    backward: Callable | None = None
    dtypes: Container[str] = tuple(rows.DTYPES)

    def kernel(self, pass_):
        both = "+".join(dict.fromkeys((self.fwd_kernel, self.bwd_kernel))) if self.bwd_kernel else None
        return {"fwd": self.fwd_kernel, "bwd": self.bwd_kernel, "fwd+bwd": both}[pass_]

    def name(self, pass_):
        return f"{self.stage} {self.kernel(pass_)}"

    def subject(self, where):
        """The fields of a row that say what was measured. where: the row's other fields."""
        who = {"stage": self.stage, "kernel": self.kernel(where["pass"]), "peer": None}
        return {**who, "source": rows.row_hash({**where, **who})}

    def refusal(self, where):
        """Why it does not take part, or None. where: as for `subject`."""
        if where["pass"] != "fwd" and self.backward is None:
            return "has no backward"
        if where["dtype"] not in self.dtypes:
            return f"does not take {where['dtype']}"
        if self.subject(where)["source"] is None:
            return f"steps/step{self.stage} has no kernel of this name, or none for this size"
        return None

    def call(self, inputs, causal, pass_):
        """The function to be timed: without arguments, it gives the results of the pass as a tuple."""
        dout, *qkv = inputs

        def forward():
            return self.forward(*qkv, causal=causal)

        def backward(out, lse):
            return tuple(self.backward(dout, *qkv, out, lse, causal=causal))

        def both():
            saved = forward()
            return saved[0], *backward(*saved)

        if pass_ != "bwd":
            return both if pass_ == "fwd+bwd" else lambda: forward()[:1]
        return partial(backward, *forward())


@dataclass(frozen=True)
class Beside:
    """A peer, which takes part as a Candidate does. function: if it is not the one of this name in PEERS."""

    peer: str
    function: Callable | None = None

    def name(self, pass_):
        return self.peer

    def subject(self, where):
        return {"stage": None, "kernel": None, "peer": self.peer, "source": None}

    def refusal(self, where):
        return None  # what it does not take, it refuses itself; a peer that is not installed, too

    def call(self, inputs, causal, pass_):
        dout, *qkv = inputs
        attend = self.function or PEERS[self.peer]
        if pass_ == "fwd":
            return lambda: (attend(*qkv, causal),)
        leaves = [x.detach().requires_grad_() for x in qkv]

        def backward(out):
            # Not out.backward(), which would also add each result to the .grad of the one before.
            return torch.autograd.grad(out, leaves, dout, retain_graph=pass_ == "bwd")

        def both():
            out = attend(*leaves, causal)
            return out.detach(), *backward(out)

        return both if pass_ == "fwd+bwd" else partial(backward, attend(*leaves, causal))


def entrants(number, rung=None):
    """The stage's rungs, or one of them, as candidates. A backward belongs to the rung that has one of its own."""
    module = catalogue.stage(number)
    for word in module.SUPPORTS["rungs"]:
        if rung in (None, word):
            own = checks.supports_of(module.SUPPORTS, word)
            backward = stem(module, "bwd", word)
            yield Candidate(
                module.SUPPORTS["stage"].removeprefix("step"),
                stem(module, "fwd", word),
                partial(module.forward, rung=word),
                backward,
                backward and partial(module.backward, rung=word),
                dtypes=[name for name, dtype in rows.DTYPES.items() if dtype in own["dtypes"]],
            )


def stem(module, prefix, word):
    """The name of the rung's file, "fwd_5_fa2" for ("fwd", "fa2"), or None if it has none of its own."""
    return next((path.stem for path in Path(module.__file__).parent.glob(f"{prefix}_*_{word}.*")), None)


def kernel_files():
    """{"fwd_8_hopper": ("02", "hopper")}: stage and rung of every kernel file of stages 00 to 03 that can run here."""
    found = {}
    for number in filter(lambda number: catalogue.unavailable(number) is None, ("00", "01", "02", "03")):
        module = catalogue.stage(number)
        for word, prefix in itertools.product(module.SUPPORTS["rungs"], ("fwd", "bwd")):
            if name := stem(module, prefix, word):
                found[name] = number, word
    return found


def switched(candidate, passes):
    """The candidate as it is, and with one switch turned at a time; a backward with a fixed order of dq."""
    if "fwd" not in passes:
        backward = partial(candidate.backward, deterministic=True)
        return [candidate, replace(candidate, bwd_kernel=f"{candidate.bwd_kernel}:DETERMINISTIC=1", backward=backward)]
    found = ablations.forwards(candidate.fwd_kernel).items()
    return [Candidate(candidate.stage, kernel, forward, dtypes=candidate.dtypes) for kernel, forward in found]


# --- measuring ----------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Task:
    """What is compared at one size.

    options: what the rows say was asked for. share: of all scores, those whose operations are counted. reference(heads)
    gives the reference's options for a slice of the query heads. last: only so many of the last queries are compared
    with float64. ceiling(inputs) gives what is timed beside them: (fields of its row, call, operations, error).
    with_host: whether the CPU's time is measured, too.
    """

    point: Point
    dtype: str
    passes: tuple[str, ...]
    entrants: tuple
    options: dict = field(default_factory=dict)
    share: float = 1.0
    reference: Callable = lambda heads: {}
    last: int | None = None
    ceiling: Callable | None = None
    with_host: bool = False


def measure(groups, *, device="cuda", timed="interleaved", warmup=3, limit_ms=3000.0, commit=None, say=print):
    """Yields a valid results row for everybody at every task of the groups, which are lists of tasks.

    Who cannot take part (dtype, head_dim, out of memory, a result that is not finite, a call longer than limit_ms) is
    left out, and `say` is called with one line that gives the reason. Who was too slow at a size is not tried at larger
    ones. The rows of one call share one `run`. timed: "interleaved" or "sustained".
    """
    origin = rows.provenance(device, commit=commit)
    guard = Guard(limit_ms, device, say)
    take_times = {"interleaved": timing.interleaved, "sustained": timing.sustained}[timed]
    for group in groups:
        admitted = {}  # {pass: [(the row without its times, call, operations, error, task)]}
        for task in group:
            inputs = make_inputs(task.point, task.dtype, device)
            how = dict(backward=task.passes != ("fwd",), last=task.last, options=task.reference)
            truth = sample_truth(inputs, task.point.causal, **how)
            for pass_ in task.passes:
                where = {**origin, **task.point.sizes, "pass": pass_, "dtype": task.dtype, **HOW}
                where |= {"options": task.options, "timing": timed}
                found = guard.admit(task, inputs, truth, where)
                if task.ceiling and found:
                    fields, *measured = task.ceiling(inputs)
                    found.append((where | fields, *measured, task))
                admitted.setdefault(pass_, []).extend(found)
        for found in admitted.values():
            times = take_times({n: one[1] for n, one in enumerate(found)}, warmup=warmup, device=device)
            for n, (row, call, flops, worst, task) in enumerate(found):
                row |= {**vars(times[n]), "tflops": flops / times[n].ms_median / 1e9, "error": worst}
                if row["pass"] == "fwd+bwd" and device == "cuda":
                    row["peak_bytes"] = peak_bytes(call)
                if task.with_host:
                    row["host_us"] = timing.host_us(call, device=device)
                yield rows.validate(row)
        admitted, found, call = {}, [], None  # A backward holds its forward's results; this makes room for the next.


class Guard:
    """Decides who takes part, says who does not, and remembers who was too slow."""

    def __init__(self, limit_ms, device, say):
        self.limit_ms, self.device, self.say = limit_ms, device, say
        self.too_slow = {}  # (name, pass, dtype, D) -> the operations at which it was
        self.said = set()

    def admit(self, task, inputs, truth, where):
        """[(the row without its times, call, operations, error, task)] of those who can run the pass in time."""
        admitted, flops = [], task.share * task.point.flops(where["pass"])
        for entrant in task.entrants:
            who = entrant.name(where["pass"]), where["pass"], where["dtype"], task.point.D
            call, worst, reason = self._try(entrant, who, inputs, truth, task.point, where)
            if reason is None:
                admitted.append((where | entrant.subject(where), call, flops, worst, task))
            elif (who, reason) not in self.said:  # the same at every N: once is enough
                self.said.add((who, reason))
                about = task.options.get("feature") or f"{where['dtype']} {task.point}"
                self.say(f"left out: {who[0]}, {where['pass']} {about}: {reason}")
        return admitted

    def _try(self, entrant, who, inputs, truth, point, where):
        """(call, error, None), or (None, None, why it does not take part). The second call is timed."""
        pass_ = where["pass"]
        if reason := entrant.refusal(where):
            return None, None, reason
        if point.flops(pass_) >= self.too_slow.get(who, float("inf")):
            return None, None, "too slow at a smaller size"
        try:
            call = entrant.call(inputs, point.causal, pass_)
            worst = sample_error(dict(zip(RESULTS[pass_], call(), strict=True)), truth)
            ms = timing.one_call(call, device=self.device)
        except Exception as problem:  # whatever one kernel raises, the others are still to be measured
            return None, None, f"{type(problem).__name__}: {(str(problem).splitlines() or [''])[0]}"
        if worst is None:
            return None, None, "its result is not finite"
        if ms > self.limit_ms:
            self.too_slow[who] = point.flops(pass_)
            return None, None, f"one call takes {ms:.0f} ms, more than the limit of {self.limit_ms:g} ms"
        return call, worst, None


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


def sample_truth(inputs, causal, *, backward=True, kv_heads=2, last=None, options=lambda heads: {}):
    """{name: float64 result} for the last batch and its last K/V heads, with their query heads.

    The reference holds several N x N matrices in float64, 2 GB each at N = 16k. Therefore it computes a sample, one K/V
    head at a time, and on the CPU where the GPU's memory does not suffice. The sample is the last heads, because there
    a wrong stride has the largest effect.

    last: only so many of the last queries, with out and dq, because dk and dv would need all of them.
    options(heads): further options of the reference, for a slice of the query heads.
    """
    dout, q, k, v = (x[-1:] for x in inputs)
    group = q.shape[1] // k.shape[1]
    if last:
        dout, q = dout[:, :, -last:], q[:, :, -last:]
    parts = {name: [] for name in (*RESULTS["fwd"], *(RESULTS["bwd"] if backward else ()))}
    for head in range(max(0, k.shape[1] - kv_heads), k.shape[1]):
        queries, keys = slice(head * group, (head + 1) * group), slice(head, head + 1)
        head_inputs = dout[:, queries], q[:, queries], k[:, keys], v[:, keys]
        how = dict(causal=causal, **options(queries))
        try:
            results = _float64(head_inputs, backward, **how)
        except torch.OutOfMemoryError:
            how = {name: x.cpu() if isinstance(x, torch.Tensor) else x for name, x in how.items()}
            on_cpu = _float64([x.cpu() for x in head_inputs], backward, **how)
            results = [x.to(q.device) for x in on_cpu]
        for name, result in zip(parts, results, strict=True):
            parts[name].append(result)
    return {name: torch.cat(part, dim=1) for name, part in parts.items() if not last or name in ("out", "dq")}


def _float64(inputs, backward, **how):
    out, _ = attention.forward(*inputs[1:], **how)
    return (out, *attention.backward(*inputs, **how)) if backward else (out,)


def sample_error(got, truth):
    """The largest absolute difference of `got` from `truth` in the sample; None if a result is not finite."""
    largest = 0.0
    for name, result in got.items():
        if not bool(torch.isfinite(result).all()):
            return None
        if name in truth:
            want = truth[name]
            sample = result[-1:, -want.shape[1] :, -want.shape[2] :]
            largest = max(largest, float((sample.double() - want).abs().max()))
    return largest


# --- rungs over a grid --------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Part:
    """A part of a plan: these rungs of a stage beside these peers, over a grid. All of it is one run."""

    rungs: tuple[str, ...]
    grid: tuple[Point, ...] = STANDARD_GRID
    passes: tuple[str, ...] = ("fwd",)
    dtypes: tuple[str, ...] = ("bf16",)
    peers: tuple[str, ...] = ("sdpa-flash", "sdpa-cudnn")
    switches: bool = False  # also with one switch turned at a time; a backward also with a fixed order of dq
    stage: str = "02"
    timed: str = "interleaved"  # or "sustained"
    with_host: bool = False  # whether the CPU's time is measured, too

    def groups(self, device="cuda"):
        """Each task is a group of its own. A matrix product is measured beside interleaved ones of 16 bits."""
        candidates = [candidate for rung in self.rungs for candidate in entrants(self.stage, rung)]
        if self.switches:
            candidates = [one for candidate in candidates for one in switched(candidate, self.passes)]
        how = dict(with_matmul=self.timed == "interleaved", with_host=self.with_host)
        return over(self.grid, candidates, self.peers, self.passes, self.dtypes, device, **how)


def over(grid, candidates, peers, passes, dtypes, device, with_matmul=False, with_host=False):
    """Groups of one task for each size and dtype."""
    for dtype in dtypes:
        product = partial(matrix_product, dtype, device) if with_matmul and dtype != "fp32" else None
        for point in grid:
            who = *candidates, *map(Beside, peers)
            yield [Task(point, dtype, passes, who, ceiling=product, with_host=with_host)]


def matrix_product(dtype, device, inputs):
    """A Task's ceiling: a product of two large matrices, at the tensor cores' full speed."""
    call, worst = matmul(rows.DTYPES[dtype], device)
    fields = {**Point(1, 1, MATMUL_SIZE, MATMUL_SIZE).sizes, "pass": rows.MATMUL}
    return fields | Beside(rows.MATMUL).subject(fields), call, 2 * MATMUL_SIZE**3, worst


def copied_keys(inputs):
    """A Task's ceiling: a copy of k, which reads and writes as much as reading k and v takes."""
    call, worst = copy(inputs[2])
    return {"pass": rows.COPY} | Beside(rows.COPY).subject({}), call, 0, worst


def record(parts, *, device="cuda", say=print, **options):
    """Yields the rows of parts of plans: of a Part, or of groups that a function lists."""
    for part in parts:
        if isinstance(part, Part):
            yield from measure(part.groups(device), device=device, timed=part.timed, say=say, **options)
        else:
            yield from measure(part(device=device), device=device, say=say, **options)


# --- features -----------------------------------------------------------------------------------------------

SEQUENCES, SOFTCAP, DROPOUT, SEED = 8, 50.0, 0.1, 2**35 + 11
LAST = 128  # so many of the last queries are compared with float64, where all would take too long
ANY = "sdpa-cudnn", "sdpa-flash", "flex"


def of_stage_03(kernel, options):
    """flash.py with these options, or decode.py, as a candidate."""
    from steps.step03_triton import decode, flash  # imported here because Triton is not available everywhere

    if kernel == "decode":
        return Candidate("03_triton", "decode", decode.forward)
    forward, backward = (partial(function, **options) for function in (flash.forward, flash.backward))
    return Candidate("03_triton", "flash", forward, "flash", backward)


def feature(name, point, options=(), told=(), share=1.0, peers=(), *, kernel="flash", passes=("fwd", "bwd"), last=None):
    """The task of a feature: options of the kernel, what rows tell besides the name, peers' names or functions."""
    options, peers = dict(options), peers if isinstance(peers, dict) else dict.fromkeys(peers)
    who = of_stage_03(kernel, options), *(Beside(peer, function) for peer, function in peers.items())
    reference = partial(reference_options, options, point, last)
    ceiling = copied_keys if kernel == "decode" else None  # Decoding reads k and v, and little else.
    return Task(point, "bf16", passes, who, {"feature": name, **dict(told)}, share, reference, last, ceiling)


def reference_options(options, point, last, heads):
    """The kernel's options as the reference takes them, for a slice of the query heads."""
    alike = "window", "softcap", "mask", "cu_seqlens_q", "cu_seqlens_k"
    found = {name: options[name] for name in alike if name in options}
    if "alibi_slopes" in options:
        found["alibi_slopes"] = options["alibi_slopes"][heads]
    if "dropout_p" in options:
        first = point.N - last
        keep = philox.keep_mask(SEED, 1, point.H, last, point.N, options["dropout_p"], first_query=first)
        found["dropout_mask"] = keep[:, heads].to(options["seed"].device)
        found["dropout_p"] = philox.rounded(options["dropout_p"])
    return found


def features_at(N, H, D, device):
    """The features of flash.py, each by itself, and one pair that models use. N is a multiple of SEQUENCES.

    They take turns, and the peers that have the same feature take turns with them, so that each can be compared with
    each. The operations are those of the scores that the positions leave visible: half of them if causal, fewer in a
    window, an eighth in a pack of eight sequences. A mask hides nothing from the count.
    """
    point, left, length = Point(1, H, N, D), N // 8, N // SEQUENCES
    generator = torch.Generator(device).manual_seed(1)
    added = torch.randn(1, 1, N, N, generator=generator, device=device).to(torch.bfloat16)
    seen = added > -0.5
    slopes = 2.0 ** (-8 * torch.arange(1, H + 1, device=device) / H)  # those of the ALiBi paper
    starts = torch.arange(0, N + 1, length, dtype=torch.int32, device=device)

    def capped(score, b, h, i, j):
        return SOFTCAP * torch.tanh(score / SOFTCAP)

    def slanted(score, b, h, i, j):
        return score - slopes[h] * (i - j).abs()

    def near(b, h, i, j):
        return (j <= i) & (j >= i - left)

    def together(b, h, i, j):
        return i // length == j // length

    def with_mask(mask):
        backends = {"sdpa-cudnn": SDPBackend.CUDNN_ATTENTION, "sdpa-efficient": SDPBackend.EFFICIENT_ATTENTION}
        return {name: partial(sdpa, backend, mask=mask) for name, backend in backends.items()}

    def by_flex(**options):
        return {"flex": partial(flex, **options)}

    window, softcap, told_window = {"window": (left, 0)}, {"softcap": SOFTCAP}, {"window": [left, 0]}
    in_window = (left + 1) * (N - left / 2) / N**2  # query i sees min(i, left) + 1 keys
    dropout = {"dropout_p": DROPOUT, "seed": torch.tensor(SEED, device=device)}
    packed = dict(cu_seqlens_q=starts, cu_seqlens_k=starts, max_seqlen_q=length, max_seqlen_k=length)
    of_packed = by_flex(seen=together) | {"varlen": partial(varlen, starts, length)}
    of_pair = by_flex(change=capped, seen=near)
    return [
        feature("none", point, peers=ANY),
        feature("causal", replace(point, causal=True), peers=ANY),
        feature("additive mask", point, {"mask": added}, peers=with_mask(added)),
        feature("boolean mask", point, {"mask": seen}, peers=with_mask(seen)),
        feature("ALiBi", point, {"alibi_slopes": slopes}, peers=by_flex(change=slanted)),
        feature("soft-cap", point, softcap, softcap, peers=by_flex(change=capped)),
        feature("dropout", point, dropout, {"dropout_p": DROPOUT}, last=min(LAST, N)),
        feature("window", point, window, told_window, in_window, by_flex(seen=near)),
        feature("soft-cap + window", point, softcap | window, softcap | told_window, in_window, of_pair),
        feature("packed", point, packed, {"sequences": SEQUENCES}, 1 / SEQUENCES, of_packed),
        feature("padded", Point(SEQUENCES, H, length, D)),  # the same work as a batch
    ]


def features(N=16384, cache=32768, longest=65536, *, device):
    """Groups: the features of two head_dims, a new token over a cache of keys, and memory at a great length."""
    yield features_at(N, 16, 128, device)
    yield features_at(N, 32, 64, device)
    # 8 sequences; four query heads share a key head.
    yield [feature("decode", Point(8, 32, 1, 128, Hk=8, Nk=cache), peers=ANY, kernel="decode", passes=("fwd",))]
    causal = Point(1, 16, longest, 128, causal=True)  # as models are, which takes half the time
    yield [feature("memory", causal, peers=("sdpa-cudnn",), passes=("fwd+bwd",), last=min(LAST, longest))]


def grouped(*, device):
    """Groups: stage 02's backward where all 8 query heads share one K/V head, beside heads of their own.

    The keys of one K/V head alone give a GPU too few blocks.
    """
    (hopper,) = entrants("02", "hopper")
    for causal in (False, True):
        names = {8: "own heads" + ", causal" * causal, 1: "grouped heads" + ", causal" * causal}
        points = {Hk: Point(1, 8, 4096, 128, causal, Hk=Hk) for Hk in names}
        who = hopper, Beside("sdpa-cudnn")
        yield [Task(points[Hk], "bf16", ("bwd",), who, {"feature": name}) for Hk, name in names.items()]


# --- plans --------------------------------------------------------------------------------------------------


def _at(*lengths, D=(64, 128)):
    return tuple(Point(16384 // N, 2048 // d, N, d, causal) for d in D for causal in (False, True) for N in lengths)


BEST = "sdpa-flash", "sdpa-cudnn", "fa4"  # the fastest that others have, where they are found
PLANS = {  # What is recorded of stages 02 and 03, in parts of a few minutes. The slow rungs are measured at 4k alone.
    "fast": (Part(("hopper", "roles", "wgmma", "fa2", "cp_async", "ldmatrix"), peers=BEST),),
    "slow": (
        Part(("mma", "warp"), _at(4096)),
        Part(("scalar", "warp"), _at(4096), ("fwd", "bwd"), ("fp32",), ("sdpa-efficient",)),
    ),
    "bwd": (Part(("hopper", "wgmma", "fa2"), passes=("bwd",), peers=BEST),),
    "more": (
        Part(("hopper", "fa2"), _at(4096, 16384, D=(256,))),
        Part(("hopper", "fa2"), _at(4096), ("fwd", "bwd"), ("fp16",)),
    ),
    "switches": (
        Part(("hopper", "fa2"), _at(512, 4096, 16384), switches=True),
        Part(("hopper",), _at(4096, 16384), ("bwd",), switches=True),
    ),
    "triton": (
        Part(("gluon", "tma", "roles", "fused"), peers=BEST, stage="03"),
        Part(("tma", "fused"), passes=("bwd",), peers=BEST, stage="03"),
    ),
    "float32": (
        Part(("fused",), _at(512, 4096, 16384), ("fwd", "bwd"), ("fp32",), ("sdpa-efficient",), stage="03"),
    ),
    "compilers": (
        Part(("gluon", "tma"), _at(16384), ("fwd", "bwd"), peers=("flex", "compiled", "fa4", "sdpa-cudnn"), stage="03"),
    ),
    "features": (features,),
    "grouped": (grouped,),
    "launches": (  # what a call costs the CPU; a kernel at this size is shorter than its launch
        Part(("hopper", "fa2"), (Point(1, 1, 128, 64),), with_host=True),
        Part(("gluon", "tma"), (Point(1, 1, 128, 64),), stage="03", with_host=True),
    ),
}
LONG = 16384  # A call has to take milliseconds, or else a second of calls measures how fast they are launched.


def sustained(parts=None, number="02", rung=None):
    """The parts as they are under sustained load: at N = 16k, and D = 128 first.

    Without parts it is one: a rung of the stage, by default the first, beside the fastest peers.
    """
    if parts is None:
        rung = rung or catalogue.stage(number).SUPPORTS["rungs"][0]
        parts = [Part((rung,), passes=("fwd", "bwd"), peers=BEST, stage=number)]
    long = {part: sorted((p for p in part.grid if p.N == LONG), key=lambda p: p.D != 128) for part in parts}
    return [replace(part, grid=tuple(points), timed="sustained") for part, points in long.items() if points]
