"""The plan `ring`: stage 04 on all GPUs of this machine beside one GPU and torch's context_parallel.

    python -m steps.course.bench ring --record           everything, what matters most first
    python -m steps.course.bench ring-32k                one part of it
    CUDA_VISIBLE_DEVICES=0,1 python -m steps ...  on two GPUs

One process a GPU. Everybody who is compared at one size takes turns, five rounds; a round's time is that of the slowest
rank, and a row has the median and the worst round. "One GPU" is stage 02 on the whole sequence, on all GPUs at once, as
their clocks depend on how many of them work. TFLOP/s are those of each GPU. Who fails is left out with the reason; who
dies or hangs ends its part of the plan. All but the peers' kernels runs on the CPU, too, over gloo.
"""

import contextlib
import math
import statistics
from dataclasses import dataclass, replace
from functools import partial

import torch
import torch.distributed as dist
from torch.nn.attention import SDPBackend

from steps import engine, step04_ring
from steps.course.bench import grid, peers, rows, timing
from steps.course.bench.cost import Point
from steps.step04_ring import Layout, launch, strategies
from steps.step04_ring.block import Hopper

DTYPE, D, LAST = "bf16", 128, grid.LAST
ROUNDS, WORTH_MS, MOST_CALLS = 5, 20, 20  # a round takes about so long, and has no more calls
PATIENCE, LIMIT = 45, 600  # seconds that ranks wait for each other, and that one case may take
PROFILED = 6  # calls that are profiled, one after the other

# Candidates are called by their kernel files, peers by their names, and lessons by their strategies.
ONE, FETCH, RELAY = "fwd_8_hopper", "ring+fetch", "ring+relay"
# In forward + backward the ring adds to dQ in a fixed order, one GPU in any; here each of them does as the other.
IN_ORDER, ANY_ORDER, GRAPH = f"{ONE}, in order", f"{FETCH}, any order", f"{FETCH}, in a graph"
OPTIONS = {IN_ORDER: {"deterministic": True}, ANY_ORDER: {"deterministic": False}, GRAPH: {"graph": True}}
PEERS = "context-parallel-allgather", "context-parallel-alltoall"
LESSONS = "query_parallel", "star", "ulysses"
ALONE = ONE, IN_ORDER


@dataclass(frozen=True)
class Case:
    """What is compared at one size."""

    point: Point
    layout: str = "zigzag"
    passes: tuple[str, ...] = ("fwd", "fwd+bwd")
    who: tuple[str, ...] = (ONE, FETCH, RELAY, *PEERS)
    traced: bool = False  # timed by a profiler, one after the other

    def options(self, who):
        """What a row says was asked for. Where lessons are compared, the ring is one of the strategies."""
        strategy = {"strategy": who if who in LESSONS else "ring"} if "star" in self.who else {}
        return OPTIONS.get(who, strategy)


def cases(*lengths, Hk=(32, 8), causal=True, **how):
    return tuple(Case(Point(1, 32, N, D, causal, heads), **how) for N in lengths for heads in Hk)


CASES = {  # what matters most first
    "32k": (
        *cases(32768),
        *cases(32768, Hk=(32,), causal=False),
        *cases(32768, Hk=(32,), layout="contiguous", who=(ONE, FETCH, RELAY)),
    ),
    "8k": cases(8192),
    "trace": cases(32768, Hk=(32,), who=(FETCH, RELAY), traced=True),
    "128k": cases(131072) + cases(131072, Hk=(32,), causal=False, passes=("fwd",)),
    "strategies": cases(32768, 8192, 131072, who=(*LESSONS, FETCH, RELAY)),
    "order": cases(32768, 131072, passes=("fwd+bwd",), who=(ONE, IN_ORDER, FETCH, ANY_ORDER)),
    "graph": cases(8192, who=(FETCH, GRAPH)),
    "1m": (Case(Point(1, 8, 2**20, D, True, 2), who=(FETCH,)),),
}


# --- who takes part -------------------------------------------------------------------------------------------


def entrant(case, who):
    """Somebody as one of grid.py's entrants: one GPU on the whole sequence, or a rank on its shards."""
    if who in ALONE:
        one = grid.candidate("02", "hopper")
        return replace(one, attention=partial(one.attention, deterministic=True)) if who == IN_ORDER else one
    if who in PEERS:
        return grid.a_peer(who, partial(context_parallel, who.rpartition("-")[2]))
    if who in LESSONS:
        kernel, attention = f"strategies/{strategies.LESSONS[who]}+strategies/team", strategies.load(who)
    else:
        kernel = who.partition(",")[0]  # without what OPTIONS adds
        how = {"block": Hopper(persistent=False, deterministic=False)} if who == ANY_ORDER else {}
        attention = partial(step04_ring.attention, transport=kernel.removeprefix("ring+"), **how)
    attention = partial(attention, layout=case.layout, S=case.point.N)
    return grid.Entrant("04_ring", kernel, bwd_kernel=kernel, attention=attention)


def captured(call):
    """The same call as a CUDA graph, which is replayed without Python."""
    for _ in range(2):
        call()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):
        results = call()
    return lambda: graph.replay() or results


_context, _balanced = contextlib.ExitStack(), []


def context_parallel(rotation, q, k, v, causal):
    """torch's context_parallel over cuDNN, on shards that are cut as its own are."""
    from torch.distributed.tensor.experimental import context_parallel as context
    from torch.distributed.tensor.experimental._attention import set_rotate_method

    if _balanced != [causal]:  # It is one context at a time, around all later calls of SDPA in this process.
        _context.close()
        N = dist.get_world_size()
        # It cuts `buffers` by itself, and takes their length as the sign whether to balance. Ours are cut already.
        buffer = torch.zeros(1, 1, 2 * N if causal else N, 1, device=engine.device)
        mesh = dist.init_device_mesh(engine.device, (N,))
        _context.enter_context(context(mesh, buffers=[buffer], buffer_seq_dims=[2]))
        _balanced[:] = [causal]
    set_rotate_method(rotation)
    return peers.sdpa(SDPBackend.CUDNN_ATTENTION, q, k, v, causal)


# --- in a rank ------------------------------------------------------------------------------------------------


def measure(case, origin):
    """What every rank answers, all the same: rows of those who take turns, and in words why the others are left out.

    It calls `race` on those whom no rank refuses, or `traced`. Their errors are those of the last queries, which see
    all keys: a block that is missing or comes twice shows there.
    """
    torch.cuda.empty_cache()  # of what the case before has left
    inputs = grid.make_inputs(case.point, DTYPE, engine.device)
    whole = Layout(case.layout, case.point.N, dist.get_world_size(), case.point.causal)
    shards = tuple(whole.shard(x, dist.get_rank()) for x in inputs)
    has_last = whole.positions(dist.get_rank())[-1] == whole.S - 1
    found, left_out = [], []
    for pass_ in case.passes:
        truth = grid.sample_truth(inputs, case.point.causal, backward=pass_ != "fwd", last=LAST)
        calls, ms, errors = {}, {}, {}  # numbers of the worst rank
        for who in case.who:
            alone = who in ALONE
            call, mine = tried(case, who, pass_, inputs if alone else shards, truth if alone or has_last else {})
            every = gathered(mine)
            if reasons := [one for one in every if isinstance(one, str)]:
                left_out.append(f"left out: {who}, {pass_} {case.point}: {reasons[0]}")
            else:
                calls[who], (ms[who], errors[who]) = call, map(max, zip(*every, strict=True))
        for who, times, count, seen in traced(calls) if case.traced else race(calls, ms):
            found.append(row_of(case, who, pass_, times, count, errors[who], origin) | seen)
    return left_out + found + ([trace_of(case, found, origin)] if case.traced and found else [])


def tried(case, who, pass_, tensors, truth):
    """(its call, (ms, error) in this rank), or (None, in words why it cannot)."""
    try:
        call = entrant(case, who).call(tensors, pass_, case.point.causal)
        call = captured(call) if who == GRAPH else call
        # One rank may find its results wrong, and the others nothing: after the last call, so that nobody waits for it.
        return call, grid.tried(call, pass_, truth)
    except Exception as problem:  # whatever one of them raises, the others are still to be measured
        timing.synchronize(engine.device)  # A GPU that has failed raises here again, and this ends the ranks.
        return None, grid.in_words(problem)


def gathered(mine):
    """What each rank has."""
    every = [None] * dist.get_world_size()
    dist.all_gather_object(every, mine)
    return every


def race(calls, ms):
    """Yields (who, milliseconds of a call in each round in the slowest rank, calls of a round, {}).

    ms: {who: of a single call}, so that a round takes about WORTH_MS.
    """
    counts = {who: max(1, min(MOST_CALLS, round(WORTH_MS / ms[who]))) for who in calls}
    rounds = {who: [] for who in calls}
    for who in timing.turns(list(calls), ROUNDS):
        rounds[who].append(one_round(calls[who], counts[who]))
    every = gathered(rounds)
    for who in calls:
        yield who, list(map(max, *(of_rank[who] for of_rank in every))), counts[who], {}


def one_round(call, count):
    """Milliseconds of a call, the mean of so many that follow each other."""
    dist.barrier()
    call()  # The queue is then full, and the ranks are in step.
    return statistics.mean(timing.back_to_back(call, count, engine.device))


def traced(calls):
    """Yields the same as `race`, of calls under a profiler: (who, [milliseconds], calls, what else the row has)."""
    for who, call in calls.items():
        every = gathered(trace(call))
        idlest = max(every, key=lambda of_rank: of_rank["idle"])
        seen = {name: idlest[name] for name in ("hidden", "idle", "launches", "spans")}
        yield who, [max(of_rank["ms"] for of_rank in every)], PROFILED, seen | {"options": {"profiler": True}}


def trace_of(case, found, origin):
    """A record of kind "trace": the spans of these rows, which are then no longer in them."""
    about = {**case.point.sizes, "dtype": DTYPE, "layout": case.layout, "stage": "04_ring"}
    about["source"] = {row["kernel"]: rows.code_hash("04_ring", row["kernel"]) for row in found}
    calls = [{name: row[name] for name in ("kernel", "pass", "hidden")} | {"spans": row.pop("spans")} for row in found]
    return {"kind": "trace", **origin, **about, "calls": calls}


def trace(call):
    """What `shares` says of this rank, and {"spans": [[lane, name, start, end]] of a typical call}, by a profiler."""
    profiled(call, 1)  # A process's first profiler stops the GPU for a second while it starts.
    spans = spans_of(profiled(call, PROFILED))
    mean = shares(spans, PROFILED)
    typical = min(each_call(spans, PROFILED), key=lambda one: abs(shares(one, 1)["hidden"] - mean["hidden"]))
    first = typical[0][3]
    shown = [[lane, name[:40], round(a - first, 1), round(b - first, 1)] for lane, _, name, a, b in typical]
    return mean | {"spans": shown}


def profiled(call, times):
    """The events of so many calls on this GPU."""
    dist.barrier()
    timing.synchronize(engine.device)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profiler:
        for _ in range(times):
            call()
        timing.synchronize(engine.device)
    return profiler.events()


def spans_of(events):
    """[(lane, stream, name, start, end)] in microseconds of a profiler's events on the GPU, in the order of start.

    Lane "computes" has the kernels on the stream of the blocks, "waits" the barriers of all ranks, and "moves" NCCL's
    kernels and the copies on other streams, which are those between GPUs.
    """
    on_gpu = [event for event in events if event.device_type == torch.autograd.DeviceType.CUDA]
    blocks = [event.device_resource_id for event in on_gpu if "attention" in event.name]
    blocks_on, spans = max(set(blocks), key=blocks.count), []
    for event in sorted(on_gpu, key=lambda event: event.time_range.start):
        stream, name, span = event.device_resource_id, event.name, event.time_range
        lane = "computes" if stream == blocks_on else "moves"
        lane = "moves" if "nccl" in name.lower() else "waits" if "barrier" in name.lower() else lane
        if span.end > span.start and not name.startswith("nccl:"):  # torch's words around NCCL's kernels
            spans.append((lane, stream, name, span.start, span.end))
    return spans


def shares(spans, calls):
    """{"ms": of a call, "hidden", "idle", "launches"}.

    hidden: the share of the time of moving in which a kernel computes. idle: the share of all time in which none does.
    """
    computing, moving = ([one[3:] for one in spans if one[0] == name] for name in ("computes", "moves"))
    whole = max(one[4] for one in spans) - min(one[3] for one in spans)
    both = length(computing) + length(moving) - length(computing + moving)
    found = {"ms": whole / calls / 1e3, "hidden": both / length(moving)}
    return found | {"idle": 1 - length(computing) / whole, "launches": len(spans) / calls}


def length(spans):
    """How long at least one of the spans (start, end) lasts."""
    total, until = 0.0, -math.inf
    for start, end in sorted(spans):
        total += max(0.0, end - max(start, until))
        until = max(until, end)
    return total


def each_call(spans, calls):
    """The spans of each of so many equal calls, in the order of start."""
    of_call = [[] for _ in range(calls)]
    for stream in {one[1] for one in spans}:
        some = [one for one in spans if one[1] == stream]  # A stream does the same in every call, in the same order.
        size = len(some) // calls
        for n, found in enumerate(of_call):
            found += some[n * size : (n + 1) * size]
    return [sorted(found, key=lambda one: one[3]) for found in of_call]


# --- the plan -------------------------------------------------------------------------------------------------


def record(*names):
    """Yields the rows of parts of the plan, keys of CASES, and of the trace one record with a "kind": all one run."""
    size, origin = torch.cuda.device_count(), rows.provenance(n_gpus=torch.cuda.device_count())
    for name in names if size > 1 else ():
        try:
            with launch.Ranks(size, timeout=PATIENCE) as ranks:
                for case in CASES[name]:
                    for found in ranks.run(measure, case, origin, limit=LIMIT)[0]:
                        if isinstance(found, str):
                            print(found)
                        else:
                            yield found
        except launch.RankError as problem:
            print(f"{name} ended early: {'; '.join(str(problem).splitlines()[: size + 1])}")


def row_of(case, who, pass_, ms, count, error, origin):
    """One row. ms: of a call in each round of so many calls."""
    row = {**origin, **case.point.sizes, "pass": pass_, "dtype": DTYPE, **grid.HOW, "options": case.options(who)}
    if who not in ALONE:
        row["layout"] = "contiguous" if who in PEERS and not case.point.causal else case.layout
    row |= entrant(case, who).subject(row)
    row |= timing.summary(ms) | {"reps": len(ms) * count, "ms_worst": max(ms), "error": error}
    gpus = 1 if who in ALONE else origin["n_gpus"]
    row["tflops"] = case.point.flops(pass_) / gpus / row["ms_median"] / 1e9  # of one GPU
    return row


PLANS = {"ring": (partial(record, *CASES),), **{f"ring-{name}": (partial(record, name),) for name in CASES}}
