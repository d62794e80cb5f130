"""The plan `ring`: stage 04 on all GPUs of this machine beside one GPU and torch's context_parallel.

    python -m steps bench --plan ring             everything but 1m, what matters most first
    python -m steps bench --plan ring-32k         one part of it
    CUDA_VISIBLE_DEVICES=0,1 python -m steps ...  on two GPUs

One process a GPU. Everybody who is compared at one size takes turns, five rounds; a round's time is that of the slowest
rank, and a row has the median and the worst round. "One GPU" is stage 02 on the whole sequence, on all GPUs at once, as
their clocks depend on how many of them work. TFLOP/s are those of each GPU. Who fails is left out with the reason, and
who hangs is stopped after a limit, which costs the others a new start and nothing else.

Beside the sizes there are parts of their own: `hops` of a single message, for simulate.py; the profiler's `trace`;
`strategies`, the lessons of stage 04 beside the ring; `ablations`; and `watch`, what the watching threads cost.
ring_calls.py has what a rank does.
"""

import contextlib
import itertools
import math
import time
from collections import Counter
from dataclasses import dataclass

import torch

from steps import engine
from steps.bench import fingerprint, ring_calls, ring_trace, rows, timing
from steps.bench.grid import HOW, Point
from steps.bench.ring_calls import DTYPE, FETCH, GRAPH, ONE, PEERS, RELAY, STRATEGIES, WATCHED, Case, turned
from steps.bench.ring_variants import HOP_DTYPE, D
from steps.step04_ring import Layout, launch
from steps.step04_ring.block import Hopper
from steps.step04_ring.strategies import account

PATIENCE, LIMIT = 45, 240  # seconds that ranks wait for each other, and that one task may take


def causal(N, Hk, **how):
    return Case(Point(1, 32, N, 128, True, Hk), **how)


FEW = Case(  # one new token
    Point(1, 32, 1, 128, False, 8, Nk=131072), passes=("fwd",), checked=False,
    who=tuple(who for who in STRATEGIES if who.strategy != "ulysses"),
)  # fmt: skip
CASES = {
    "32k": (
        *(causal(32768, Hk) for Hk in (32, 8)),
        Case(Point(1, 32, 32768, 128, False, 32)),
        causal(32768, 32, layout="contiguous", who=(ONE, FETCH, RELAY)),
    ),
    "8k": tuple(causal(8192, Hk, who=(ONE, FETCH, GRAPH, RELAY, *PEERS)) for Hk in (32, 8)),
    "128k": (*(causal(131072, Hk) for Hk in (32, 8)), Case(Point(1, 32, 131072, 128, False, 32), passes=("fwd",))),
    "strategies": (
        *(causal(N, Hk, who=STRATEGIES) for N in (32768, 8192) for Hk in (32, 8)),
        FEW,
        *(causal(131072, Hk, who=STRATEGIES) for Hk in (32, 8)),
    ),
    "ablations": (causal(32768, 32, who=ring_calls.ABLATIONS),),
    "1m": (causal(1048576, 8, who=(FETCH,), checked=False),),
}
HOPS = tuple(2**n for n in range(12, 29, 2))  # bytes, 4 KB to 256 MB
TRACED, WATCHED_AT = CASES["32k"][0], causal(8192, 8, passes=("fwd",), who=(WATCHED,))
WATCH_MS = 800  # of a round, in which the watching threads wake up three times


class Team:
    """The ranks, which are started again after one has hung or died."""

    def __init__(self):
        self.size, self.ranks, self.failures = torch.cuda.device_count(), None, Counter()

    def run(self, task, *args):
        self.ranks = self.ranks or launch.Ranks(self.size, timeout=PATIENCE)
        try:
            return self.ranks.run(task, *args, limit=LIMIT)
        except launch.RankError:
            self.ranks = None
            raise

    def close(self):
        if self.ranks:
            self.ranks.close(kill=True)


@dataclass(frozen=True)
class RingPart:
    """Parts of the plan, keys of CASES or PARTS, with the methods of plans.Part. All of it is one run."""

    names: tuple[str, ...]

    def record(self, *, device="cuda", warmup=3, limit_ms=1000.0, until=math.inf, commit=None, say=print):
        """Yields the rows, and one record, a dict with the key "kind"; options as for grid.measure."""
        team = Team()
        origin = rows.provenance(device, commit=commit, n_gpus=team.size)
        if team.size < 2:
            say("left out: the ring, which needs two GPUs or more")
            return
        try:
            for name in self.names:
                begin = time.monotonic()
                if begin > until:
                    say(f"out of time before {name}")
                    continue
                yield from kept(PARTS.get(name) or cases_of(name), name, (team, origin, until, say))
                say(f"{name} took {time.monotonic() - begin:.0f} s")
        finally:
            team.close()

    def jobs(self):
        """What has to be compiled: stage 02's kernels, with and without a mask, and stage 03's where it is a block."""
        yield from (("hopper", causal, persistent) for causal in (True, False) for persistent in (True, False))
        yield from (("stage 03", causal) for causal in (True, False) if "ablations" in self.names)
        yield from (("decode",) for name in self.names if name == "strategies")

    def compile(self, block, causal=False, persistent=True):
        """Calls a block forward and backward, with and without grouped heads. decode: forward, with one query."""
        blocks = [Hopper(persistent, deterministic) for deterministic in (True, False)] if block == "hopper" else []
        if not blocks:
            from steps import step03_triton

            blocks = [step03_triton]
        for block_, heads in itertools.product(blocks, (8, 32)):
            n = 1 if block == "decode" else 256
            q, k, v = (torch.zeros(1, *shape, 128) for shape in ((heads, n), (8, 256), (8, 256)))
            q, k, v = (x.to(engine.device, rows.DTYPES[DTYPE]) for x in (q, k, v))
            out, lse = block_.forward(q, k, v, causal=causal, scale=1.0)
            if block == "stage 03":  # the sum that ring_variants.carried passes through the forward
                sums = q.new_zeros(q.shape, dtype=torch.float32), lse.new_full(lse.shape, -math.inf)
                block_.forward(q, k, v, causal=causal, scale=1.0, out=sums[0], lse=sums[1])
            if block != "decode":
                block_.backward(q, q, k, v, out, lse, causal=causal, scale=1.0)


def kept(part, name, arguments):
    """Yields what a part yields. What is wrong with one row, or one part, costs no other; it is said."""
    *_, say = arguments
    try:
        for found in part(*arguments):
            try:
                found = found if "kind" in found else rows.validate(found)
            except ValueError as problem:
                say(f"{name}: {problem}")
                continue
            yield found
    except Exception as problem:
        say(f"{name} ended early: {type(problem).__name__}: {problem}")


# --- parts ----------------------------------------------------------------------------------------------------


def cases_of(name):
    """The part that measures CASES[name]."""

    def part(team, origin, until, say):
        for case in CASES[name]:
            for pass_ in case.passes:
                if time.monotonic() > until:
                    say(f"out of time before {case.point} {pass_}")
                    return
                yield from measure(team, case, pass_, origin, say)
            done(team)

    return part


def measure(team, case, pass_, origin, say):
    """Yields the rows of those who take turns."""
    found = {}
    for who in case.entrants(pass_):
        one = tried(team, case, who, pass_, case.checked and (ONE not in case.who or ONE in found), say)
        found |= {who: one} if one else {}
    ms = {who: one["ms"] for who, one in found.items()}
    times = asked(team, say, f"not measured: {pass_} {case.point}", ring_calls.race, case, pass_, ms) if found else None
    if times is None and found:  # The failure has ended the ranks. Perhaps new ones fare better.
        times = asked(team, say, f"not measured again: {pass_} {case.point}", ring_calls.race, case, pass_, ms)
    for who, of_who in (times[0] if times else {}).items():
        calls = ring_calls.calls_of_a_round(ms[who])
        yield row_of(case, who, pass_, of_who, calls, found[who], origin)


def tried(team, case, who, pass_, beside_one, say):
    """What `trial` finds, of each number the largest of all ranks; None for who fails, which is said."""
    what = f"left out: {who}, {pass_} {case.point}"
    if team.failures[who] >= 2:
        say(f"{what}: has ended the ranks twice")
        return None
    if (found := asked(team, say, what, ring_calls.trial, case, who, pass_, beside_one)) is None:
        team.failures[who] += 1
        return None
    if wrong := next((one for one in found if isinstance(one, str)), None):
        say(f"{what}: {wrong}")
        return None
    return {name: max(one[name] for one in found) for name in found[0]}


def asked(team, say, what, task, *args):
    """What the ranks answer, or None if the task ends them, which is said."""
    try:
        return team.run(task, *args)
    except launch.RankError as problem:
        first, *others = str(problem).splitlines()[: team.size + 1]
        say(f"{what}: {first} {'; '.join(line.strip() for line in others)}")
        return None


def done(team):
    """Frees what the ranks hold for a case."""
    with contextlib.suppress(launch.RankError):
        team.run(ring_calls.forget)


def measure_hops(team, origin, until, say):
    """Yields the rows of single messages, as simulate.read_link reads them: copies of k to the next rank."""
    for transport in ("fetch", "relay"):
        times = asked(team, say, f"no hops of {transport}", ring_calls.hops, transport, HOPS)
        for nbytes, ms in (times[0] if times else {}).items():
            n = nbytes // (D * rows.DTYPES[HOP_DTYPE].itemsize)
            row = {**origin, **Point(1, 1, n, D).sizes, **HOW, "pass": rows.COPY, "dtype": HOP_DTYPE}
            row |= {"stage": None, "kernel": None, "peer": rows.COPY, "source": None}
            row |= {"options": {"transport": transport}, "tflops": 0.0, "error": 0.0}
            yield row | speed(ms, ring_calls.MOST_CALLS)


def measure_watch(team, origin, until, say):
    """Yields two rows of the same call: as it is, and without notes and watching threads."""
    if one := tried(team, WATCHED_AT, WATCHED, "fwd", True, say):
        calls = max(1, round(WATCH_MS / one["ms"]))
        times = asked(team, say, "watching not measured", ring_calls.watch_cost, WATCHED_AT, calls)
        for who, ms in (times[0] if times else {}).items():
            yield row_of(WATCHED_AT, who, "fwd", ms, calls, one, origin)
    done(team)


def measure_trace(team, origin, until, say):
    """Yields rows of the profiler's shares, and then the record of kind "trace" with the spans of one rank's call."""
    of_calls = []
    for pass_ in TRACED.passes:
        for who in (FETCH, RELAY):
            if not (one := tried(team, TRACED, who, pass_, False, say)):
                continue
            found = asked(team, say, f"no trace of {who}, {pass_}", ring_trace.trace, TRACED, who, pass_)
            if found:
                worst = max(found, key=lambda of_rank: of_rank["idle"])
                shares = {name: worst[name] for name in ("hidden", "idle", "launches")}
                ms = [max(of_rank["ms"] for of_rank in found)]
                yield row_of(TRACED, turned(who, profiler=True), pass_, ms, ring_trace.CALLS, one, origin) | shares
                of_calls.append({"kernel": who.kernel, "pass": pass_, "ms": ms[0], **shares, "spans": worst["spans"]})
    if of_calls:
        about = {**TRACED.point.sizes, "dtype": DTYPE, "layout": TRACED.layout, "stage": "04_ring"}
        about["source"] = {one["kernel"]: fingerprint.code_hash("04_ring", one["kernel"]) for one in of_calls}
        yield {"kind": "trace", **origin, **about, "calls": of_calls}
    done(team)


PARTS = {"hops": measure_hops, "trace": measure_trace, "watch": measure_watch}
ALL = "32k", "8k", "hops", "trace", "128k", "strategies", "ablations", "watch"  # what matters most first
NAMES = (*ALL, "1m")


# --- rows -----------------------------------------------------------------------------------------------------


def row_of(case, who, pass_, ms, calls, found, origin):
    """One row. ms: of a call in each round of so many calls. found: what `tried` has."""
    point, N = case.point, origin["n_gpus"]
    where = {**origin, **point.sizes, "pass": pass_, "dtype": DTYPE, **HOW, "options": dict(who.options)}
    shared = who.kernel != ONE.kernel  # the sequence among the ranks
    where["layout"] = (case.layout if point.causal or not who.peer else "contiguous") if shared else None
    if who.peer:
        where |= {"stage": None, "kernel": None, "peer": who.peer, "source": None}
    else:
        kernel = who.kernel if shared or pass_ == "fwd" else f"{who.kernel}+bwd_3_hopper"
        where |= {"stage": "04_ring" if shared else "02_fa2_cuda", "kernel": kernel, "peer": None}
        where["source"] = fingerprint.row_hash(where)
    where |= speed(ms, calls) | {"error": found["error"]}
    where["tflops"] = point.flops(pass_) / (N if shared else 1) / where["ms_median"] / 1e9  # of one GPU
    names = {"peak_bytes": "peak", "shared_bytes": "shared", "sent_bytes": "sent"}
    where |= {name: found[short] for name, short in names.items() if short in found}
    if (expected := predicted(case, who, pass_, N)) is not None:
        where["predicted_bytes"] = expected
    return where


def speed(ms, calls):
    """The fields of a row that say how long it took, from the milliseconds of a call in each round of so many calls."""
    return vars(timing.summary(ms)) | {"reps": len(ms) * calls, "ms_worst": max(ms)}


def predicted(case, who, pass_, N):
    """What peak_bytes should be, or None where there is no formula. 16 bits an element."""
    point, options = case.point, dict(who.options)
    if who.kernel == "ring+fetch" and pass_ == "fwd+bwd" and options in ({}, {"strategy": "ring"}):
        return predicted_fetch(point, N)
    if "strategy" in options and who.kernel != "ring+fetch" and pass_ == "fwd" and point.N == case.positions:
        whole = Layout(case.layout, point.N, N, point.causal)
        sizes = dict(B=point.B, H=point.H, Hk=point.sizes["Hk"], D=point.D, e=2)
        return max(account.memory_bytes(options["strategy"], whole, rank, **sizes) for rank in range(N))
    return None


def predicted_fetch(point, N):
    """Bytes that the transport fetch holds in a backward, beyond the inputs and what is shared; in 16 bits.

    A shard of queries is kept as out, summed as dq in float32 and written as dq. Of a shard of K and V there are the
    one that the forward kept, two buffers, three times dK and dV on their way, and the results; fewer on two or three
    GPUs, where nothing else has to be fetched.
    """
    queries, keys = (2 * point.B * H * point.N // N * point.D for H in (point.H, 2 * (point.Hk or point.H)))
    return (1 + 2 + 1) * queries + (1 + min(2, N - 2) + min(3, N) + 1) * keys
