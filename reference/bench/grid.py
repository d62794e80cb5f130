"""Measuring stages and peers over a grid of sizes: `measure` yields results rows.

For every size, dtype and pass, all candidates get the same random-normal inputs (zeros would run faster than
real data: they draw less power), are checked against float64, and are then timed interleaved with the peers.
"""

import time
from collections.abc import Callable, Container
from dataclasses import dataclass

import torch

from reference.bench import cost, rows, source, timing
from reference.bench.peers import MATMUL_SIZE, PEERS, matmul, why_not


@dataclass(frozen=True)
class Point:
    """One size of self-attention: q (B, H, N, D), k and v (B, Hk, N, D). Hk is H unless given."""

    B: int
    H: int
    N: int
    D: int
    causal: bool = False
    Hk: int | None = None

    @property
    def sizes(self):
        """The fields of a results row."""
        return dict(B=self.B, H=self.H, Hk=self.Hk or self.H, N=self.N, D=self.D, causal=self.causal)

    def flops(self, pass_):
        return cost.flops(self.B, self.H, self.N, self.D, causal=self.causal, pass_=pass_)

    def __str__(self):
        return f"B={self.B} H={self.H} N={self.N} D={self.D}{' causal' if self.causal else ''}"


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


@dataclass(frozen=True)
class Candidate:
    """A stage's kernel as plain functions with the contract's signatures.

    stage "02_fa2_cuda"; fwd_kernel, bwd_kernel: stems of the kernel files, for the rows. Without backward
    (and bwd_kernel) only "fwd" is measured. dtypes: names out of rows.DTYPES; head_dims: anything that
    answers `D in head_dims`, None for all.
    """

    stage: str
    fwd_kernel: str
    forward: Callable
    bwd_kernel: str | None = None
    backward: Callable | None = None
    dtypes: Container[str] = tuple(rows.DTYPES)
    head_dims: Container[int] | None = None
    gqa: bool = True

    def kernel(self, pass_):
        """The name of what runs in this pass, as a row's `kernel`."""
        both = f"{self.fwd_kernel}+{self.bwd_kernel}"
        return {"fwd": self.fwd_kernel, "bwd": self.bwd_kernel, "fwd+bwd": both}[pass_]


@dataclass(frozen=True)
class _Entrant:
    """Somebody taking part at one point: its row's subject, and how to make the function to be timed."""

    name: str
    subject: dict
    refusal: str | None
    prepare: Callable  # (inputs, causal, pass_) -> call; call() -> the pass's results, a tuple of tensors


_NOBODY = dict(stage=None, kernel=None, peer=None, source=None, layout=None)


def measure(
    candidates,
    peers=tuple(PEERS),
    grid=STANDARD_GRID,
    *,
    passes=("fwd",),
    dtypes=("bf16",),
    device="cuda",
    reps=timing.MIN_REPS,
    warmup=3,
    limit_ms=1000.0,
    seed=0,
    with_matmul=False,
    until=float("inf"),
    commit=None,
    say=print,
):
    """Yields a valid results row for every candidate and peer (names out of PEERS) at every point.

    Who cannot take part at a point (dtype, head_dim, out of memory, a result that is not finite, a call
    longer than limit_ms) is left out there, and `say` is called with one line that gives the reason. Larger
    points are not even tried for who was too slow at a smaller one. The rows of one call share one `run`.

    with_matmul: a plain matrix product is timed with every group, and has a row each time. until: the moment on
    time.monotonic()'s clock after which no more points are begun.
    """
    origin = rows.provenance(device, commit=commit)
    guard = _Guard(limit_ms, device, say)
    for dtype in dtypes:
        product = matmul(rows.DTYPES[dtype], device, seed) if with_matmul else None
        for point in grid:
            if time.monotonic() > until:
                say(f"out of time before {dtype} {point}")
                return
            inputs = make_inputs(point, dtype, device, seed)
            truth = sample_truth(inputs, point.causal, backward=any("bwd" in pass_ for pass_ in passes))
            for pass_ in passes:
                entrants = _entrants(candidates, peers, point, dtype, pass_, device)
                admitted = guard.admit(entrants, inputs, truth, point, dtype, pass_)
                calls = {entrant.name: call for entrant, call, _ in admitted}
                if product and calls:
                    calls[rows.MATMUL] = product[0]
                times = timing.interleaved(calls, reps=reps, warmup=warmup, device=device)
                for entrant, _, error in admitted:
                    setting = {**point.sizes, "pass": pass_, "dtype": dtype}
                    speed = _speed(times[entrant.name], point.flops(pass_), error)
                    yield rows.validate({**origin, **entrant.subject, **setting, **speed})
                if rows.MATMUL in calls:
                    n = MATMUL_SIZE
                    setting = {**Point(1, 1, n, n).sizes, "pass": rows.MATMUL, "dtype": dtype}
                    speed = _speed(times[rows.MATMUL], 2 * n**3, product[1])
                    yield rows.validate({**origin, **_NOBODY, "peer": rows.MATMUL, **setting, **speed})
                del admitted, calls  # a backward holds its forward's results: make room for the next


def _speed(timing, flops, error):
    return {**vars(timing), "tflops": flops / timing.ms_median / 1e9, "error": error}


def make_inputs(point, dtype, device, seed=0):
    """(dout, q, k, v), random normal, the same for the same seed on one kind of device."""
    generator = torch.Generator(device).manual_seed(seed)
    B, H, Hk, N, D = (point.sizes[name] for name in ("B", "H", "Hk", "N", "D"))
    shapes = ((B, H, N, D), (B, H, N, D), (B, Hk, N, D), (B, Hk, N, D))
    normal = (torch.randn(shape, generator=generator, device=device) for shape in shapes)
    return tuple(x.to(rows.DTYPES[dtype]) for x in normal)


def _entrants(candidates, peers, point, dtype, pass_, device):
    """Everybody for this point and pass, with a refusal for who does not take it. Stages first."""
    for c in candidates:
        kernel = c.kernel(pass_)
        subject = {**_NOBODY, "stage": c.stage, "kernel": kernel}
        refusal = _refusal(c, point, dtype, pass_)
        if not refusal:
            files = source.source_files(c.stage, kernel)
            subject["source"] = source.source_hash(files)
            refusal = None if files else f"no files of this name in steps/step{c.stage}"
        yield _Entrant(f"{c.stage} {kernel}", subject, refusal, _stage_call(c))
    for name in peers:
        refusal = why_not(name, rows.DTYPES[dtype], point.D, torch.device(device).type)
        yield _Entrant(name, {**_NOBODY, "peer": name}, refusal, _peer_call(PEERS[name]))


def _refusal(candidate, point, dtype, pass_):
    if "bwd" in pass_ and candidate.backward is None:
        return "has no backward"
    if dtype not in candidate.dtypes:
        return f"does not take {dtype}"
    if candidate.head_dims is not None and point.D not in candidate.head_dims:
        return f"does not take head_dim {point.D}"
    if not candidate.gqa and point.sizes["Hk"] != point.H:
        return "does not take fewer K/V heads than query heads"
    return None


def _stage_call(candidate):
    def prepare(inputs, causal, pass_):
        dout, q, k, v = inputs

        def forward():
            return candidate.forward(q, k, v, causal=causal)

        def both():
            out, lse = forward()
            return out, *candidate.backward(dout, q, k, v, out, lse, causal=causal)

        if pass_ == "fwd":
            return lambda: forward()[:1]
        if pass_ == "fwd+bwd":
            return both
        out, lse = forward()
        return lambda: tuple(candidate.backward(dout, q, k, v, out, lse, causal=causal))

    return prepare


def _peer_call(peer):
    def prepare(inputs, causal, pass_):
        dout, *qkv = inputs
        if pass_ == "fwd":
            return lambda: (peer(*qkv, causal),)
        leaves = [x.detach().requires_grad_() for x in qkv]

        def both():
            out = peer(*leaves, causal)
            return out.detach(), *torch.autograd.grad(out, leaves, dout)

        return both if pass_ == "fwd+bwd" else timing.backward_call(peer(*leaves, causal), leaves, dout)

    return prepare


class _LeftOut(Exception):
    """Why somebody does not take part at a point."""


class _Guard:
    """Decides who takes part, says who does not, and remembers who was too slow."""

    def __init__(self, limit_ms, device, say):
        self.limit_ms, self.device, self.say = limit_ms, device, say
        self.too_slow = {}  # (name, pass, dtype, D) -> the FLOPs of the point at which it was
        self.said = set()

    def admit(self, entrants, inputs, truth, point, dtype, pass_):
        """[(entrant, call, error)] of those who can run this pass in time."""
        admitted = []
        for entrant in entrants:
            key = (entrant.name, pass_, dtype, point.D)
            try:
                admitted.append((entrant, *self._try(entrant, key, inputs, truth, point, pass_)))
            except _LeftOut as reason:
                if (key, str(reason)) not in self.said:  # the same at every N: once is enough
                    self.said.add((key, str(reason)))
                    self.say(f"left out: {entrant.name}, {pass_} {dtype} {point}: {reason}")
        return admitted

    def _try(self, entrant, key, inputs, truth, point, pass_):
        """(call, error). The first call compiles and is checked, the second is timed."""
        if entrant.refusal:
            raise _LeftOut(entrant.refusal)
        if point.flops(pass_) >= self.too_slow.get(key, float("inf")):
            raise _LeftOut("too slow at a smaller size")
        try:
            call = entrant.prepare(inputs, point.causal, pass_)
            results = dict(zip(_results(pass_), call(), strict=True))
            error = sample_error(results, truth)
            ms = timing.one_call(call, device=self.device)
        except Exception as problem:  # whatever one kernel raises, the others are still to be measured
            raise _LeftOut(f"{type(problem).__name__}: {(str(problem).splitlines() or [''])[0]}") from problem
        if error is None:
            raise _LeftOut("its result is not finite")
        if ms > self.limit_ms:
            self.too_slow[key] = point.flops(pass_)
            raise _LeftOut(f"one call takes {ms:.0f} ms, more than the limit of {self.limit_ms:g} ms")
        return call, error


def _results(pass_):
    """The names of what a pass computes."""
    return {"fwd": ("out",), "bwd": ("dq", "dk", "dv"), "fwd+bwd": ("out", "dq", "dk", "dv")}[pass_]


# --- the error column ---------------------------------------------------------------------------------------


def sample_truth(inputs, causal, *, backward=True, kv_heads=2):
    """{name: float64 result} for the last batch and its last K/V heads, with their query heads.

    The reference holds several N x N matrices in float64, 2 GB each at N = 16k: so a sample, one K/V head at
    a time, and on the CPU where the GPU's memory does not suffice. The last ones, because a wrong stride
    shows there first.
    """
    from reference import attention

    dout, q, k, v = (x[-1:] for x in inputs)
    group = q.shape[1] // k.shape[1]
    parts = {name: [] for name in (("out", "dq", "dk", "dv") if backward else ("out",))}
    for head in range(max(0, k.shape[1] - kv_heads), k.shape[1]):
        queries, keys = slice(head * group, (head + 1) * group), slice(head, head + 1)
        head_inputs = dout[:, queries], q[:, queries], k[:, keys], v[:, keys]
        try:
            results = _float64(attention, head_inputs, causal, backward)
        except torch.OutOfMemoryError:
            on_cpu = _float64(attention, [x.cpu() for x in head_inputs], causal, backward)
            results = [x.to(q.device) for x in on_cpu]
        for name, result in zip(parts, results, strict=True):
            parts[name].append(result)
    return {name: torch.cat(part, dim=1) for name, part in parts.items()}


def _float64(attention, inputs, causal, backward):
    _, q, k, v = inputs
    out, _ = attention.forward(q, k, v, causal=causal)
    return (out, *attention.backward(*inputs, causal=causal)) if backward else (out,)


def sample_error(got, truth):
    """The largest absolute difference of `got` from `truth` in the sample; None if a result is not finite."""
    largest = 0.0
    for name, result in got.items():
        if not bool(torch.isfinite(result).all()):
            return None
        want = truth[name]
        largest = max(largest, float((result[-1:, -want.shape[1] :].double() - want).abs().max()))
    return largest
