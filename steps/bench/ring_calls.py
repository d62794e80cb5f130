"""Who is compared in the plan `ring`, how each is called, and how a rank tries and times the calls.

Everything below `Case` runs in the process of a rank; ring_plan.py starts the ranks and writes the rows. The device is
the engine's, so that all but CUDA graphs and the peers' kernels runs on the CPU, too, over gloo.
"""

import contextlib
from dataclasses import dataclass, replace
from functools import cache, partial

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from steps import engine, step04_ring
from steps.bench import ring_variants, timing
from steps.bench.feature_plan import peak_bytes
from steps.bench.grid import Point, make_inputs, sample_error, sample_truth
from steps.step02_fa2_cuda import launch as kernels
from steps.step04_ring import Layout
from steps.step04_ring.block import Hopper

DTYPE, LAST = "bf16", 128  # so many of the last queries are compared with float64
ROUNDS, WORTH_MS, MOST_CALLS = 5, 20, 20  # a round calls so often that it takes about so long, and not more often


@dataclass(frozen=True)
class Who:
    """A candidate. kernel: files of stage 04, such as "ring+fetch", or stage 02's. options: as the row has them."""

    kernel: str | None = None
    peer: str | None = None
    options: tuple = ()  # pairs, so that it can be a key

    def __str__(self):
        turned = " ".join(f"{name}={value}" for name, value in self.options)
        return " ".join(filter(None, (self.peer or self.kernel, turned)))

    @property
    def strategy(self):
        """The name of a lesson of stage 04 that shares the sequence in another way than the ring, or None."""
        return dict(self.options)["strategy"] if self.kernel and self.kernel.startswith("strategies/") else None

    @property
    def passes(self):
        """Those in which it differs from others, or that it has."""
        only_backward = {"deterministic", "dkv"} & dict(self.options).keys()
        only_forward = self.strategy == "star" or ("merge", "carried") in self.options
        return ("fwd+bwd",) if only_backward else ("fwd",) if only_forward else ("fwd", "fwd+bwd")


def turned(who, **options):
    return replace(who, options=tuple(options.items()))


def lesson(strategy, file):
    return Who(f"strategies/{file}+strategies/team", options=(("strategy", strategy),))


ONE, FETCH, RELAY = Who("fwd_8_hopper"), Who("ring+fetch"), Who("ring+relay")
PEERS = Who(peer="context-parallel-allgather"), Who(peer="context-parallel-alltoall")
GRAPH = turned(FETCH, graph=True)
QUERY_PARALLEL = lesson("query_parallel", "lesson_3_query_parallel")
STAR, ULYSSES = lesson("star", "lesson_4_star"), lesson("ulysses", "lesson_5_ulysses")
STRATEGIES = QUERY_PARALLEL, STAR, ULYSSES, turned(FETCH, strategy="ring"), turned(RELAY, strategy="ring")
PLAIN = turned(FETCH, changed="nothing"), turned(RELAY, changed="nothing")
WATCHED, UNWATCHED = turned(FETCH, watch=True), turned(FETCH, watch=False)
ABLATIONS = (
    *PLAIN,
    turned(FETCH, overlap=False), turned(FETCH, merge="eager"), turned(FETCH, persistent=True),
    turned(FETCH, deterministic=False), turned(FETCH, dkv="fp32"), turned(RELAY, persistent=True),
    turned(RELAY, block="stage 03"), turned(FETCH, block="stage 03"), turned(FETCH, merge="carried"),
)  # fmt: skip


@dataclass(frozen=True)
class Case:
    """What is compared at one size. Nk > N: few queries that every rank has, over keys that the ranks share."""

    point: Point
    layout: str = "zigzag"
    passes: tuple[str, ...] = ("fwd", "fwd+bwd")
    who: tuple[Who, ...] = (ONE, FETCH, RELAY, *PEERS)
    checked: bool = True  # whether results are compared with those of one GPU, which have to be computed for that

    @property
    def positions(self):
        """How many the ranks share."""
        return self.point.Nk or self.point.N

    def entrants(self, pass_):
        return [who for who in self.who if pass_ in who.passes]


# --- inputs, and what the results are compared with -----------------------------------------------------------


@cache
def of_case(case):
    """(inputs of the whole sequence, this rank's shards, its Layout)."""
    inputs = make_inputs(case.point, DTYPE, engine.device)
    whole = Layout(case.layout, case.positions, dist.get_world_size(), case.point.causal)
    shards = (whole.shard(x, dist.get_rank()) if x.shape[2] == whole.S else x for x in inputs)
    return inputs, tuple(shards), whole


@cache
def truth(case, backward):
    """float64 results of the last queries."""
    return sample_truth(of_case(case)[0], case.point.causal, backward=backward, last=LAST)


@cache
def one_gpu(case):
    """(out, dq, dk, dv) by stage 02 on one GPU, this rank's shards of them."""
    inputs, _, whole = of_case(case)
    return [whole.shard(x, dist.get_rank()) for x in alone(*inputs, case.point.causal, "fwd+bwd")]


def forget():
    """Frees what was kept for the cases before."""
    for kept in (of_case, truth, one_gpu, call_of):
        kept.cache_clear()
    torch.cuda.empty_cache()


# --- calls ----------------------------------------------------------------------------------------------------


@cache
def call_of(case, who, pass_):
    """The function to be timed: without arguments, it gives this rank's results of the pass as a tuple."""
    inputs, shards, whole = of_case(case)
    causal, how = case.point.causal, dict(who.options)
    if who.peer:
        return partial(context_parallel, causal, who.peer.rpartition("-")[2], pass_, *shards)
    if who.kernel == ONE.kernel:
        return partial(alone, *inputs, causal, pass_)
    if case.point.N < whole.S:
        way = who.strategy or who.kernel.removeprefix("ring+")
        return partial(ring_variants.few_queries, way, *shards[1:], whole)
    options = dict(causal=causal, layout=case.layout, S=whole.S)
    if who.strategy:
        return partial(ring_variants.by_strategy, who.strategy, pass_, *shards, **options)
    options["transport"] = who.kernel.removeprefix("ring+")
    if "persistent" in how or "deterministic" in how:
        options["block"] = Hopper(how.get("persistent", False), how.get("deterministic", True))
    if how.get("block") == "stage 03" or how.get("merge") == "carried":
        from steps import step03_triton

        options["block"] = step03_triton
    call = partial(ring, pass_, *shards, **options)
    if how.get("graph"):
        return captured(call)
    change = next((ring_variants.CHANGES[one] for one in who.options if one in ring_variants.CHANGES), None)
    return partial(ring_variants.instead, *change, call) if change else call


def alone(dout, q, k, v, causal, pass_):
    out, lse = kernels.forward(q, k, v, rung="hopper", causal=causal)
    return (out,) if pass_ == "fwd" else (out, *kernels.backward(dout, q, k, v, out, lse, rung="hopper", causal=causal))


def ring(pass_, dout, q, k, v, **options):
    if pass_ == "fwd":
        return step04_ring.forward(q, k, v, **options)[:1]
    return ring_variants.both(step04_ring.attention, dout, q, k, v, **options)


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


def in_context_parallel(balanced):
    """Puts torch's context_parallel around all later calls of SDPA in this process. It is one context at a time."""
    from torch.distributed.tensor.experimental import context_parallel as context

    if _balanced == [balanced]:
        return
    _context.close()
    _balanced[:] = []
    N = dist.get_world_size()
    mesh = torch.distributed.init_device_mesh(engine.device, (N,))
    # It cuts `buffers` by itself, and takes their length as the sign whether to balance. The inputs are cut already.
    buffer = torch.zeros(1, 1, 2 * N if balanced else N, 1, device=engine.device)
    _context.enter_context(context(mesh, buffers=[buffer], buffer_seq_dims=[2]))
    _balanced[:] = [balanced]


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
        return ring_variants.both(F.scaled_dot_product_attention, dout, q, k, v, **how)


# --- trying and timing ----------------------------------------------------------------------------------------


def trial(case, who, pass_, beside_one):
    """What this rank finds when it calls somebody a few times: a dict, or in words why it cannot.

    beside_one: whether the results are also compared with those of one GPU, which holds dk and dv too.
    """
    try:
        call = call_of(case, who, pass_)
        call()
        found = {"ms": timing.one_call(call, device=engine.device)}
        if who.kernel != ONE.kernel and not dict(who.options).get("graph"):
            found["peak"] = peak_bytes(lambda: found.update(ring_variants.moved(call)) if who.kernel else call())
        results = call()  # Behind this one rank may find something wrong, and the others nothing.
        return found | {"error": error_of(case, who, results, pass_, beside_one)}
    except Exception as problem:  # whatever one of them raises, the others are still to be measured
        # A GPU that has failed raises here again. This ends the ranks, and the next trial starts new ones.
        timing.synchronize(engine.device)
        return f"{type(problem).__name__}: {(str(problem).splitlines() or [''])[0]}"


def error_of(case, who, results, pass_, beside_one):
    """max |result - float64| of the last queries, on the ranks that have them, otherwise 0. ValueError if wrong."""
    whole, alone_ = of_case(case)[2], who.kernel == ONE.kernel
    names = ("out",) if pass_ == "fwd" else ("out", "dq")
    error = 0.0
    if alone_ or case.point.N < whole.S or whole.positions(dist.get_rank())[-1] == whole.S - 1:
        error = sample_error(dict(zip(names, results, strict=False)), truth(case, pass_ != "fwd"))
    if error is None:
        raise ValueError("its result is not finite")
    for got, want in zip(results, one_gpu(case) if beside_one and not alone_ else (), strict=False):
        if not (got - want).abs().max() <= 0.02 * want.abs().max():
            raise ValueError(f"its result differs by {(got - want).abs().max():.2g} from that of one GPU")
    return error


def race(case, pass_, ms):
    """{who: [milliseconds of a call in each round]} of the slowest rank. ms: {who: about how long a call takes}."""
    calls = {who: (call_of(case, who, pass_), calls_of_a_round(one)) for who, one in ms.items()}
    return take_turns(calls)


def take_turns(calls):
    """{name: [milliseconds of a call in each round]} of the slowest rank. calls: {name: (call, calls of a round)}."""
    found, names = {name: [] for name in calls}, list(calls)
    for call, _ in calls.values():  # in case that the ranks have been started again
        call()
    for n in range(ROUNDS):
        first = n % len(names)
        for name in names[first:] + names[:first]:
            found[name].append(one_round(*calls[name]))
    return slowest(found)


def slowest(found):
    """{name: [milliseconds]} with the longest time of any rank in the place of each of this rank's."""
    longest = torch.tensor(list(found.values()), dtype=torch.float64, device=engine.device)
    dist.all_reduce(longest, op=dist.ReduceOp.MAX)
    return dict(zip(found, longest.tolist(), strict=True))


def calls_of_a_round(ms):
    return max(1, min(MOST_CALLS, round(WORTH_MS / ms)))


def one_round(call, calls):
    """Milliseconds of a call, over so many calls that follow each other."""
    mark, milliseconds = timing.clock(engine.device)
    dist.barrier()
    call()  # The queue is then full, and the ranks are in step.
    start = mark()
    for _ in range(calls):
        call()
    end = mark()
    timing.synchronize(engine.device)
    return milliseconds(start, end) / calls


def hops(transport, sizes):
    """{bytes: [milliseconds in each round]} of a message to the next rank, while all ranks send one."""
    calls = ring_variants.hops(transport, sizes, engine.device)
    return take_turns({nbytes: (call, MOST_CALLS) for nbytes, call in zip(sizes, calls, strict=True)})


def watch_cost(case, calls):
    """{WATCHED, UNWATCHED: [milliseconds of a call in each round]}. A round is that of many calls, in which the
    watching threads wake up several times."""
    call, found = call_of(case, WATCHED, "fwd"), {WATCHED: [], UNWATCHED: []}
    call()
    for _ in range(ROUNDS):
        found[WATCHED].append(one_round(call, calls))
        with ring_variants.unwatched():
            found[UNWATCHED].append(one_round(call, calls))
    return slowest(found)
