"""Measuring stages and peers over a grid of sizes: `measure` yields results rows.

For every size, dtype and pass, all candidates get the same random normal inputs (a GPU consumes less power on zeros,
and would run faster than on real data), are checked against float64, and are then timed beside the peers: in turn, or
one after the other for a second each (sustained.py).
"""

import time
from collections.abc import Callable, Container
from dataclasses import dataclass

import torch

from reference import attention
from steps.bench import cost, fingerprint, rows, sustained, timing
from steps.bench.peers import MATMUL_SIZE, PEERS, absent, matmul


@dataclass(frozen=True)
class Point:
    """One size: q (B, H, N, D), k and v (B, Hk, Nk, D). Hk is H and Nk is N unless given."""

    B: int
    H: int
    N: int
    D: int
    causal: bool = False
    Hk: int | None = None
    Nk: int | None = None

    @property
    def sizes(self):
        """The fields of a results row."""
        return {**vars(self), "Hk": self.Hk or self.H, "Nk": self.Nk or self.N}

    def flops(self, pass_):
        return cost.flops(self.B, self.H, self.N, self.D, Nk=self.Nk, causal=self.causal, pass_=pass_)

    def __str__(self):
        return " ".join(f"{name}={value}" for name, value in self.sizes.items())


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

    stage "02_fa2_cuda"; fwd_kernel, bwd_kernel: stems of the kernel files, for the rows. Without backward (and
    bwd_kernel) only "fwd" is measured. dtypes: names out of rows.DTYPES. Whatever else a kernel does
    not take, it refuses itself with an exception.
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
        return {**who, "source": fingerprint.row_hash({**where, **who})}

    def refusal(self, point, where):
        """Why it does not take part at this point, or None. where: as for `subject`."""
        if where["pass"] != "fwd" and self.backward is None:
            return "has no backward"
        if where["dtype"] not in self.dtypes:
            return f"does not take {where['dtype']}"
        if self.subject(where)["source"] is None:
            return f"steps/step{self.stage} has no kernel of this name, or none for this size"
        return None

    def call(self, inputs, causal, pass_):
        """The function to be timed: without arguments, it gives the results of the pass as a tuple."""
        dout, q, k, v = inputs
        if pass_ == "fwd":
            return lambda: self.forward(q, k, v, causal=causal)[:1]
        if pass_ == "fwd+bwd":
            return lambda: self._both(*inputs, causal)
        out, lse = self.forward(q, k, v, causal=causal)
        return lambda: tuple(self.backward(dout, q, k, v, out, lse, causal=causal))

    def _both(self, dout, q, k, v, causal):
        out, lse = self.forward(q, k, v, causal=causal)
        return out, *self.backward(dout, q, k, v, out, lse, causal=causal)


@dataclass(frozen=True)
class Beside:
    """A peer, which takes part as a Candidate does. function: if it is not the one of this name in PEERS."""

    peer: str
    function: Callable | None = None

    def name(self, pass_):
        return self.peer

    def subject(self, where):
        return {"stage": None, "kernel": None, "peer": self.peer, "source": None}

    def refusal(self, point, where):
        return None  # what it does not take, it refuses itself

    def call(self, inputs, causal, pass_):
        dout, *qkv = inputs
        attend = self.function or PEERS[self.peer]
        if pass_ == "fwd":
            return lambda: (attend(*qkv, causal),)
        leaves = [x.detach().requires_grad_() for x in qkv]
        if pass_ == "fwd+bwd":
            return lambda: self._both(attend, dout, leaves, causal)
        out = attend(*leaves, causal)
        # Not out.backward(), which would also add each result to the .grad of the one before.
        return lambda: torch.autograd.grad(out, leaves, dout, retain_graph=True)

    def _both(self, attend, dout, leaves, causal):
        out = attend(*leaves, causal)
        return out.detach(), *torch.autograd.grad(out, leaves, dout)


def measure(
    candidates,
    peers=tuple(PEERS),
    grid=STANDARD_GRID,
    *,
    passes=("fwd",),
    dtypes=("bf16",),
    device="cuda",
    warmup=3,
    limit_ms=1000.0,
    with_matmul=False,
    timed="interleaved",
    until=float("inf"),
    commit=None,
    say=print,
):
    """Yields a valid results row for every candidate and peer (names out of PEERS) at every point.

    Who cannot take part at a point (dtype, head_dim, out of memory, a result that is not finite, a call longer than
    limit_ms) is left out there, and `say` is called with one line that gives the reason. Who was too slow at a point is
    not tried at larger ones. The rows of one call share one `run`.

    with_matmul: a plain matrix product is timed with every group, and has a row each time. timed: "interleaved" or
    "sustained". until: the moment on time.monotonic()'s clock after which no more points are begun.
    """
    origin = rows.provenance(device, commit=commit)
    entrants = [*candidates, *map(Beside, present(peers, say))]
    guard = Guard(limit_ms, device, say)
    take_times = {"interleaved": timing.interleaved, "sustained": sustained.sustained}[timed]
    for dtype in dtypes:
        product, product_error = matmul(rows.DTYPES[dtype], device) if with_matmul else (None, None)
        for point in grid:
            if time.monotonic() > until:
                say(f"out of time before {dtype} {point}")
                return
            inputs = make_inputs(point, dtype, device)
            truth = sample_truth(inputs, point.causal, backward=set(passes) != {"fwd"})
            for pass_ in passes:
                where = {**origin, **point.sizes, "pass": pass_, "dtype": dtype, **HOW, "timing": timed}
                admitted = guard.admit(entrants, inputs, truth, point, where)
                calls = {entrant.name(pass_): call for entrant, call, _ in admitted}
                if product and calls:
                    calls[rows.MATMUL] = product
                times = take_times(calls, warmup=warmup, device=device)
                for entrant, _, error in admitted:
                    speed = speed_of(times[entrant.name(pass_)], point.flops(pass_), error)
                    yield rows.validate({**where, **entrant.subject(where), **speed})
                if rows.MATMUL in calls:
                    n = MATMUL_SIZE
                    of_product = {**where, **Point(1, 1, n, n).sizes, "pass": rows.MATMUL}
                    speed = speed_of(times[rows.MATMUL], 2 * n**3, product_error)
                    yield rows.validate({**of_product, **Beside(rows.MATMUL).subject(where), **speed})
                del admitted, calls  # A backward holds its forward's results; this makes room for the next.


HOW = dict(layout=None, options={}, timing="interleaved", clock_mhz=None, watts=None)
RESULTS = {"fwd": ("out",), "bwd": ("dq", "dk", "dv"), "fwd+bwd": ("out", "dq", "dk", "dv")}


def present(peers, say):
    """Those of the peers that are on this machine; of the others `say` gets the reason."""
    reasons = {peer: absent(peer) for peer in peers}
    for peer in filter(reasons.get, peers):
        say(f"left out: {peer}: {reasons[peer]}")
    return [peer for peer in peers if reasons[peer] is None]


def speed_of(timing, flops, error):
    """The fields of a row that say how fast and how exact it was."""
    return {**vars(timing), "tflops": flops / timing.ms_median / 1e9, "error": error}


def make_inputs(point, dtype, device):
    """(dout, q, k, v), random normal, the same at every call on one kind of device."""
    generator = torch.Generator(device).manual_seed(0)
    B, H, Hk, N, Nk, D = (point.sizes[name] for name in ("B", "H", "Hk", "N", "Nk", "D"))
    shapes = ((B, H, N, D), (B, H, N, D), (B, Hk, Nk, D), (B, Hk, Nk, D))
    normal = (torch.randn(shape, generator=generator, device=device) for shape in shapes)
    return tuple(x.to(rows.DTYPES[dtype]) for x in normal)


class Guard:
    """Decides who takes part, says who does not, and remembers who was too slow."""

    def __init__(self, limit_ms, device, say):
        self.limit_ms, self.device, self.say = limit_ms, device, say
        self.too_slow = {}  # (name, pass, dtype, D) -> the FLOPs of the point at which it was
        self.said = set()

    def admit(self, entrants, inputs, truth, point, where):
        """[(entrant, call, error)] of those who can run the pass of `where` in time."""
        admitted = []
        for entrant in entrants:
            who = entrant.name(where["pass"]), where["pass"], where["dtype"], point.D
            call, error, reason = self._try(entrant, who, inputs, truth, point, where)
            if reason is None:
                admitted.append((entrant, call, error))
            elif (who, reason) not in self.said:  # the same at every N: once is enough
                self.said.add((who, reason))
                self.say(f"left out: {who[0]}, {where['pass']} {where['dtype']} {point}: {reason}")
        return admitted

    def _try(self, entrant, who, inputs, truth, point, where):
        """(call, error, None), or (None, None, why it does not take part). The second call is timed."""
        pass_ = where["pass"]
        if reason := entrant.refusal(point, where):
            return None, None, reason
        if point.flops(pass_) >= self.too_slow.get(who, float("inf")):
            return None, None, "too slow at a smaller size"
        try:
            call = entrant.call(inputs, point.causal, pass_)
            error = sample_error(dict(zip(RESULTS[pass_], call(), strict=True)), truth)
            ms = timing.one_call(call, device=self.device)
        except Exception as problem:  # whatever one kernel raises, the others are still to be measured
            return None, None, f"{type(problem).__name__}: {(str(problem).splitlines() or [''])[0]}"
        if error is None:
            return None, None, "its result is not finite"
        if ms > self.limit_ms:
            self.too_slow[who] = point.flops(pass_)
            return None, None, f"one call takes {ms:.0f} ms, more than the limit of {self.limit_ms:g} ms"
        return call, error, None


# --- the error column ---------------------------------------------------------------------------------------


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
