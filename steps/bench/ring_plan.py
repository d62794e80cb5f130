"""The plan `ring`: stage 04 on all GPUs of this machine beside one GPU and torch's context_parallel.

    python -m steps bench --plan ring-32k         one size; `ring` is all of them but 1m
    CUDA_VISIBLE_DEVICES=0,1 python -m steps ...  on two GPUs

One process a GPU. Everybody who is compared at one size takes turns, five rounds; a round's time is that of the slowest
rank, and a row has the median and the worst round. "One GPU" is stage 02 on the whole sequence, on all GPUs at once, as
their clocks depend on how many of them work. TFLOP/s are those of each GPU. Who fails is left out with the reason, and
who hangs is stopped after a limit, which costs the others a new start and nothing else.
"""

import contextlib
import math
import time
from dataclasses import dataclass, replace
from functools import cache, partial

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from steps import step04_ring
from steps.bench import fingerprint, rows, timing
from steps.bench.feature_plan import peak_bytes
from steps.bench.grid import HOW, Point, make_inputs, sample_error, sample_truth
from steps.step02_fa2_cuda import launch as kernels
from steps.step04_ring import Layout, launch, merge, side
from steps.step04_ring.block import Hopper

DTYPE, LAST = "bf16", 128  # so many of the last queries are compared with float64
ROUNDS, WORTH_MS = 5, 20  # a round calls so often that it takes about this long
PATIENCE, START_LIMIT = 60, 180  # seconds that ranks wait for each other, and that one trial may take


@dataclass(frozen=True)
class Who:
    """A candidate. kernel: "ring+fetch" or "ring+relay" of stage 04, or stage 02's. options: as the row has them."""

    kernel: str | None = None
    peer: str | None = None
    options: tuple = ()  # pairs, so that it can be a key

    def __str__(self):
        turned = " ".join(f"{name}={value}" for name, value in self.options)
        return " ".join(filter(None, (self.peer or self.kernel, turned)))


ONE, FETCH, RELAY = Who("fwd_8_hopper"), Who("ring+fetch"), Who("ring+relay")
PEERS = Who(peer="context-parallel-allgather"), Who(peer="context-parallel-alltoall")


def turned(who, **options):
    return replace(who, options=tuple(options.items()))


GRAPH = turned(FETCH, graph=True)
ABLATIONS = (
    turned(FETCH, overlap=False), turned(FETCH, merge="eager"), turned(FETCH, persistent=False),
    turned(FETCH, deterministic=False), turned(RELAY, persistent=True), turned(RELAY, block="stage 03"),
)  # fmt: skip


@dataclass(frozen=True)
class Case:
    """What is compared at one size."""

    point: Point
    layout: str = "zigzag"
    passes: tuple[str, ...] = ("fwd", "fwd+bwd")
    who: tuple[Who, ...] = (ONE, FETCH, RELAY, *PEERS)


def causal(N, Hk, **how):
    return Case(Point(1, 32, N, 128, True, Hk), **how)


CASES = {
    "8k": tuple(causal(8192, Hk, who=(ONE, FETCH, GRAPH, RELAY, *PEERS)) for Hk in (32, 8)),
    "32k": (
        *(causal(32768, Hk) for Hk in (32, 8)),
        Case(Point(1, 32, 32768, 128, False, 32)),
        causal(32768, 32, layout="contiguous", who=(ONE, FETCH, RELAY)),
    ),
    "128k": (*(causal(131072, Hk) for Hk in (32, 8)), Case(Point(1, 32, 131072, 128, False, 32), passes=("fwd",))),
    "1m": (causal(1048576, 8, who=(FETCH,)),),
    "ablations": (causal(32768, 32, who=(ONE, FETCH, RELAY, *ABLATIONS)),),
}


# --- in the process of a rank ---------------------------------------------------------------------------------


@cache
def of_case(case):
    """(inputs of the whole sequence, this rank's shards, its Layout); only the last case's are kept."""
    inputs = make_inputs(case.point, DTYPE, "cuda")
    whole = Layout(case.layout, case.point.N, dist.get_world_size(), case.point.causal)
    return inputs, tuple(whole.shard(x, dist.get_rank()) for x in inputs), whole


@cache
def truth(case, backward):
    """float64 results of the last queries."""
    return sample_truth(of_case(case)[0], case.point.causal, backward=backward, last=LAST)


@cache
def one_gpu(case):
    """(out, dq, dk, dv) by stage 02 on one GPU, this rank's shards of them."""
    inputs, _, whole = of_case(case)
    return [whole.shard(x, dist.get_rank()) for x in alone(*inputs, case.point.causal, "fwd+bwd")]


def forget(case=None):
    """Frees what was kept for the cases before."""
    for kept in (of_case, truth, one_gpu, call_of):
        kept.cache_clear()
    torch.cuda.empty_cache()


def alone(dout, q, k, v, causal, pass_):
    out, lse = kernels.forward(q, k, v, rung="hopper", causal=causal)
    return (out,) if pass_ == "fwd" else (out, *kernels.backward(dout, q, k, v, out, lse, rung="hopper", causal=causal))


@cache
def call_of(case, who, pass_):
    """The function to be timed: without arguments, it gives this rank's results of the pass as a tuple."""
    inputs, shards, whole = of_case(case)
    how = dict(who.options)
    if who.peer:
        return partial(context_parallel, case.point.causal, who.peer.rpartition("-")[2], pass_, *shards)
    if not who.kernel.startswith("ring"):
        return partial(alone, *inputs, case.point.causal, pass_)
    options = dict(causal=case.point.causal, layout=case.layout, S=case.point.N)
    options["transport"] = who.kernel.removeprefix("ring+")
    if "persistent" in how or "deterministic" in how:
        relay = options["transport"] == "relay"
        options["block"] = Hopper(how.get("persistent", not relay), how.get("deterministic", True))
    if how.get("block") == "stage 03":
        from steps import step03_triton

        options["block"] = step03_triton
    call = partial(ring, pass_, *shards, **options)
    if how.get("graph"):
        return captured(call)
    if how.get("merge") == "eager":
        return partial(instead, merge, "KERNELS", False, call)
    return partial(instead, side.Side, "copy", copy_in_turn, call) if "overlap" in how else call


def ring(pass_, dout, q, k, v, **options):
    if pass_ == "fwd":
        return step04_ring.forward(q, k, v, **options)[:1]
    leaves = [x.detach().requires_grad_() for x in (q, k, v)]
    out = step04_ring.attention(*leaves, **options)
    return out.detach(), *torch.autograd.grad(out, leaves, dout)


def captured(call):
    """The call as a CUDA graph."""
    for _ in range(3):  # compiles, and shares memory
        call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):
        results = call()

    def replay():
        graph.replay()
        return results

    return replay


def instead(owner, name, value, call):
    """The call with another value of the owner's attribute."""
    usual = getattr(owner, name)
    setattr(owner, name, value)
    try:
        return call()
    finally:
        setattr(owner, name, usual)


def copy_in_turn(self, *pairs, copy=side.Side.copy):
    """Side.copy without overlap: it waits for the computation, and the computation for it."""
    self.follow()
    copy(self, *pairs)
    self.lead(self.mark())


def in_context_parallel(balanced):
    """Puts torch's context_parallel around all later calls of SDPA in this process. It is one context at a time."""
    from torch.distributed.tensor.experimental import context_parallel as context

    if _balanced == [balanced]:
        return
    _context.close()
    _balanced[:] = [balanced]
    N = dist.get_world_size()
    mesh = torch.distributed.init_device_mesh("cuda", (N,))
    # It cuts `buffers` by itself, and takes their length as the sign whether to balance. The inputs are cut already.
    buffer = torch.zeros(1, 1, 2 * N if balanced else N, 1, device="cuda")
    _context.enter_context(context(mesh, buffers=[buffer], buffer_seq_dims=[2]))


_context, _balanced = contextlib.ExitStack(), []


def context_parallel(causal, rotation, pass_, dout, q, k, v):
    """torch's context_parallel over cuDNN, on shards that are cut as its own are."""
    from torch.distributed.tensor.experimental._attention import set_rotate_method

    in_context_parallel(causal)
    set_rotate_method(rotation)
    how = dict(is_causal=causal, enable_gqa=q.shape[1] != k.shape[1])
    with sdpa_kernel(SDPBackend.CUDNN_ATTENTION):
        if pass_ == "fwd":
            with torch.no_grad():
                return (F.scaled_dot_product_attention(q, k, v, **how),)
        leaves = [x.detach().requires_grad_() for x in (q, k, v)]
        out = F.scaled_dot_product_attention(*leaves, **how)
        return out.detach(), *torch.autograd.grad(out, leaves, dout)


def trial(case, who, pass_, beside_one):
    """What this rank finds when it calls somebody twice: a dict, or in words why it cannot.

    beside_one: whether the results are also compared with those of one GPU, which holds dk and dv too.
    """
    try:
        call = call_of(case, who, pass_)
        call()
        found = {"ms": timing.one_call(call, device="cuda")}
        if pass_ == "fwd+bwd" and who.kernel != ONE.kernel and not dict(who.options).get("graph"):
            found["peak"] = peak_bytes(call)
            found["shared"] = shared_bytes() if who == FETCH else 0
        results = call()  # Behind this one rank may find something wrong, and the others nothing.
        return found | {"error": error_of(case, who, results, pass_, beside_one)}
    except Exception as problem:  # whatever one of them raises, the others are still to be measured
        return f"{type(problem).__name__}: {(str(problem).splitlines() or [''])[0]}"


def shared_bytes():
    """Bytes of the memory that this process has shared with the others."""
    sides = [one for of_group in side._sides.values() for one in of_group.values() if not isinstance(one, str)]
    return sum(nbytes for one in sides for by_size in one.memories.values() for nbytes in by_size)


def error_of(case, who, results, pass_, beside_one):
    """max |result - float64| of the last queries, on the rank that has them, otherwise 0. ValueError if it is wrong."""
    whole, alone_ = of_case(case)[2], who.kernel == ONE.kernel
    names = ("out",) if pass_ == "fwd" else ("out", "dq")
    error = 0.0
    if alone_ or whole.positions(dist.get_rank())[-1] == case.point.N - 1:
        error = sample_error(dict(zip(names, results, strict=False)), truth(case, pass_ != "fwd"))
    if error is None:
        raise ValueError("its result is not finite")
    for got, want in zip(results, one_gpu(case) if beside_one and not alone_ else (), strict=False):
        if not (got - want).abs().max() <= 0.02 * want.abs().max():
            raise ValueError(f"its result differs by {(got - want).abs().max():.2g} from that of one GPU")
    return error


def race(case, pass_, ms):
    """{who: [milliseconds of a call in each round]} of the slowest rank. ms: {who: about how long a call takes}."""
    found = {who: [] for who in ms}
    for who in ms:  # in case that the ranks have been started again
        call_of(case, who, pass_)()
    for n in range(ROUNDS):
        order = list(ms)[n % len(ms) :] + list(ms)[: n % len(ms)]
        for who in order:
            found[who].append(one_round(call_of(case, who, pass_), calls_of_a_round(ms[who])))
    slowest = torch.tensor(list(found.values()), device="cuda")
    dist.all_reduce(slowest, op=dist.ReduceOp.MAX)
    return dict(zip(found, slowest.tolist(), strict=True))


def calls_of_a_round(ms):
    return max(1, min(20, round(WORTH_MS / ms)))


def one_round(call, calls):
    """Milliseconds of a call, over so many calls that follow each other."""
    mark, milliseconds = timing.clock("cuda")
    dist.barrier()
    if calls > 1:
        call()  # The queue is then full, and the ranks are in step.
    start = mark()
    for _ in range(calls):
        call()
    end = mark()
    torch.cuda.synchronize()
    return milliseconds(start, end) / calls


def trace(case, who, pass_, calls=3):
    """Of one call on this rank: {"ms", "hidden", "idle"}, and the spans of its last call for a figure.

    hidden: the share of the time of copies between GPUs during which a kernel computes. idle: that without a kernel.
    """
    call = call_of(case, who, pass_)
    for _ in range(2):
        call()
    dist.barrier()
    torch.cuda.synchronize()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profiler:
        for _ in range(calls):
            call()
        torch.cuda.synchronize()
    spans = {True: [], False: []}  # of what moves data between GPUs, and of the rest
    named = []
    for event in profiler.events():
        if event.device_type == torch.autograd.DeviceType.CUDA and event.time_range.elapsed_us() > 0:
            moves = any(word in event.name for word in ("nccl", "Memcpy", "barrier"))
            spans[moves].append((event.time_range.start, event.time_range.end))
            named.append((event.name[:40], moves, event.time_range.start, event.time_range.end))
    moving, computing = union(spans[True]), union(spans[False])
    start, end = min(computing[0][0], moving[0][0]), max(computing[-1][1], moving[-1][1])
    both = length(moving) + length(computing) - length(union(spans[True] + spans[False]))
    last = [one for one in named if one[2] >= end - (end - start) / calls]
    idle = 1 - length(computing) / (end - start)
    shares = {"ms": (end - start) / calls / 1e3, "hidden": both / length(moving), "idle": idle}
    spans = [(name, moves, a - start, b - start) for name, moves, a, b in last]
    return shares | {"launches": len(named) / calls, "spans": spans}


def union(spans):
    """The spans (start, end), joined where they overlap."""
    joined = []
    for a, b in sorted(spans):
        if joined and a <= joined[-1][1]:
            joined[-1][1] = max(b, joined[-1][1])
        else:
            joined.append([a, b])
    return joined


def length(spans):
    return sum(b - a for a, b in spans)


# --- in the process that starts them --------------------------------------------------------------------------


class Team:
    """The ranks, which are started again after one has hung or died."""

    def __init__(self):
        self.size, self.ranks, self.failures = torch.cuda.device_count(), None, 0

    def run(self, *task, limit=START_LIMIT):
        self.ranks = self.ranks or launch.Ranks(self.size, timeout=PATIENCE)
        try:
            return self.ranks.run(*task, limit=limit)
        except launch.RankError:
            self.ranks = None
            raise

    def close(self):
        if self.ranks:
            self.ranks.close(kill=True)


@dataclass(frozen=True)
class RingPart:
    """The cases of some sizes, names out of CASES, as a part of a plan with the methods of plans.Part."""

    sizes: tuple[str, ...]

    def record(self, *, device="cuda", warmup=3, limit_ms=1000.0, until=math.inf, commit=None, say=print):
        """Yields the rows; options as for grid.measure."""
        team = Team()
        origin = rows.provenance(device, commit=commit, n_gpus=team.size)
        if team.size < 2:
            say("left out: the ring, which needs two GPUs or more")
            return
        try:
            for size in self.sizes:
                for case in CASES[size]:
                    for pass_ in case.passes:
                        if time.monotonic() > until:
                            say(f"out of time before {case.point} {pass_}")
                            return
                        yield from measure(team, case, pass_, origin, say)
                        if size == "32k" and case.point.causal and case.layout == "zigzag":
                            say_trace(team, case, pass_, say)
                    with contextlib.suppress(launch.RankError):
                        team.run(forget)
        finally:
            team.close()

    def jobs(self):
        """What has to be compiled: stage 02's kernels, with and without a mask."""
        yield from ((causal, persistent) for causal in (True, False) for persistent in (True, False))

    def compile(self, causal, persistent):
        """Calls the Hopper block once."""
        x = torch.zeros(1, 1, 128, 128, dtype=rows.DTYPES[DTYPE], device="cuda")
        for deterministic in (True, False):
            block = Hopper(persistent, deterministic)
            out, lse = block.forward(x, x, x, causal=causal, scale=1.0)
            block.backward(x, x, x, x, out, lse, causal=causal, scale=1.0)


def measure(team, case, pass_, origin, say):
    """Yields the rows of those who take turns."""
    found = {}
    for who in case.who:
        try:
            tried = team.run(trial, case, who, pass_, ONE in found)
        except launch.RankError as problem:
            tried = [f"{str(problem).splitlines()[0]}"]
        if wrong := next((one for one in tried if isinstance(one, str)), None):
            say(f"left out: {who}, {pass_} {case.point}: {wrong}")
        else:
            found[who] = {name: max(one[name] for one in tried) for name in tried[0]}
    try:
        times = team.run(race, case, pass_, {who: one["ms"] for who, one in found.items()})[0] if found else {}
    except launch.RankError as problem:
        say(f"not measured: {pass_} {case.point}: {str(problem).splitlines()[0]}")
        return
    for who, ms in times.items():
        yield rows.validate(row_of(case, who, pass_, ms, found[who], origin))


def row_of(case, who, pass_, ms, found, origin):
    """One row. ms: of each round."""
    where = {**origin, **case.point.sizes, "pass": pass_, "dtype": DTYPE, **HOW, "options": dict(who.options)}
    ring_or_peer = who.kernel is None or who.kernel.startswith("ring")
    where["layout"] = (case.layout if case.point.causal or not who.peer else "contiguous") if ring_or_peer else None
    if who.peer:
        where |= {"stage": None, "kernel": None, "peer": who.peer, "source": None}
    else:
        kernel = who.kernel if ring_or_peer or pass_ == "fwd" else f"{who.kernel}+bwd_3_hopper"
        where |= {"stage": "04_ring" if ring_or_peer else "02_fa2_cuda", "kernel": kernel, "peer": None}
        where["source"] = fingerprint.row_hash(where)
    summary = timing.summary(ms)
    where |= vars(summary) | {"reps": len(ms) * calls_of_a_round(found["ms"]), "error": found["error"]}
    share = origin["n_gpus"] if ring_or_peer else 1  # of the whole attention, what one GPU computes
    where |= {"tflops": case.point.flops(pass_) / share / summary.ms_median / 1e9, "ms_worst": max(ms)}
    if "peak" in found:
        where |= {"peak_bytes": found["peak"]}
        if who == FETCH:
            where |= {"shared_bytes": found["shared"], "predicted_bytes": predicted(case.point, origin["n_gpus"])}
    return where


def predicted(point, N):
    """Bytes that the transport fetch holds in a backward, beyond the inputs and what is shared; in 16 bits.

    A shard of queries is kept as out, summed as dq in float32 and written as dq. Of a shard of K and V there are the
    one that the forward kept, two buffers, three times dK and dV on their way, and the results.
    """
    queries, keys = (2 * point.B * H * point.N // N * point.D for H in (point.H, 2 * (point.Hk or point.H)))
    return (1 + 2 + 1) * queries + (1 + 2 + 3 + 1) * keys


def say_trace(team, case, pass_, say):
    """Says how much of the communication is hidden, and how long the GPU computes nothing."""
    for who in (FETCH, RELAY):
        try:
            worst = max(team.run(trace, case, who, pass_), key=lambda one: one["idle"])
            shares = f"{worst['hidden']:.0%} of the communication hidden, {worst['idle']:.1%} of the time no kernel"
            say(f"trace: {who} {pass_} {case.point}: {worst['ms']:.2f} ms, {shares}, {worst['launches']:.0f} launches")
        except launch.RankError as problem:
            say(f"no trace of {who}: {str(problem).splitlines()[0]}")
