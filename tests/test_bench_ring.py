"""The plan `ring` on the CPU: its tasks in two real ranks over gloo, what only a GPU has replaced by stand-ins."""

import contextlib
import itertools
import math
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist

import steps
from steps import engine
from steps.bench import ring, rows, timing
from steps.bench.cost import Point
from steps.bench.ring import FETCH, GRAPH, ONE, PEERS, RELAY, STRATEGIES
from steps.step04_ring import Layout, launch, simulate
from steps.step04_ring.strategies import team
from steps.workbook.case_on_ranks import PlainBlock
from support.made_rows import LARGE, ORIGIN

pytestmark = pytest.mark.skipif(engine.name != "cpu", reason="stands in for GPUs")

SMALL = replace(LARGE, point=Point(1, 4, 32, 64, True, 2))  # two query heads share a K/V head


# --- what stands in for GPUs, in the processes of the ranks -----------------------------------------------------

OF_02 = SimpleNamespace(
    forward=lambda q, k, v, rung, causal: PlainBlock.forward(q, k, v, causal=causal),
    backward=lambda *tensors, rung, causal: PlainBlock.backward(*tensors, causal=causal),
)


class Graph:
    def replay(self):
        pass


class Profiler:
    """Stands in for torch's: has seen in each call two kernels and a copy that is half beside the first one."""

    def __init__(self, activities):
        assert activities == [torch.profiler.ProfilerActivity.CUDA]

    def __enter__(self):
        return self

    def __exit__(self, *error):
        pass

    def events(self):
        one = ("attention_forward", 7, 0, 60), ("Memcpy PtoP", 20, 40, 80), ("merge_kernel", 7, 90, 100)
        return [event(name, s, 100 * n + a, 100 * n + b) for n in range(ring.PROFILED) for name, s, a, b in one]


def event(name, stream, start, end, device="CUDA"):
    kind = getattr(torch.autograd.DeviceType, device)
    when = SimpleNamespace(start=start, end=end)
    return SimpleNamespace(name=name, device_type=kind, device_resource_id=stream, time_range=when)


def in_rank(task, *args):
    """The task in a rank, where the first one replaces what only a GPU has."""
    if ring.kernels is not OF_02:
        ring.WORTH_MS, ring.MOST_CALLS, ring.LAST = 1.0, 2, 8
        ring.kernels = OF_02
        steps.step04_ring.entry.default_block = team.default_block = lambda *q, **how: PlainBlock
        torch.cuda.CUDAGraph, torch.cuda.graph = Graph, lambda graph, capture_error_mode: contextlib.nullcontext()
        torch.cuda.synchronize = torch.cuda.reset_peak_memory_stats = lambda *device: None
        torch.cuda.memory_allocated, torch.cuda.max_memory_allocated = lambda: 100, lambda: 1100
        torch.profiler.profile = Profiler
    return task(*args)


class OnCpu:
    """Two ranks over gloo. Those of one test go on to the next."""

    kept = None

    def __init__(self, size, timeout):
        OnCpu.kept = OnCpu.kept or launch.Ranks(2, timeout)

    def run(self, task, *args, limit=60):
        return OnCpu.kept.run(in_rank, task, *args, limit=limit)

    def __enter__(self):
        return self

    def __exit__(self, *error):
        pass


@pytest.fixture(scope="module", autouse=True)
def end_of_ranks():
    yield
    if OnCpu.kept:
        OnCpu.kept.close()


def stand_in(monkeypatch, ranks=OnCpu, gpus=2):
    monkeypatch.setattr(ring, "launch", SimpleNamespace(Ranks=ranks, RankError=launch.RankError))
    monkeypatch.setattr(torch.cuda, "device_count", lambda: gpus)
    monkeypatch.setattr(rows, "provenance", lambda device, commit, n_gpus: ORIGIN | {"n_gpus": n_gpus})


def recorded(monkeypatch, *names):
    """(rows, records, what was said) of parts of the plan in two ranks on the CPU."""
    said = []
    stand_in(monkeypatch)
    found = list(ring.RingPart(names).record(say=said.append, commit="c"))
    assert all(rows.validate(row) for row in found if "kind" not in row)
    return [x for x in found if "kind" not in x], [x for x in found if "kind" in x], said


def test_everybody_in_two_ranks(monkeypatch):
    """The numbers of rows are right, and everybody computes attention."""
    from steps.figures import ring_tables  # imported here because it draws, and the ranks import this file

    whos = {"8k": (ONE, FETCH, GRAPH, RELAY, *PEERS), "strategies": STRATEGIES}
    monkeypatch.setattr(ring, "CASES", {name: (replace(SMALL, who=who),) for name, who in whos.items()})
    found, _, said = recorded(monkeypatch, *whos)
    reasons = [line.partition(": RuntimeError")[0] for line in said]
    assert reasons == [f"left out: {who}, {p} {SMALL.point}" for p in ("fwd", "fwd+bwd") for who in PEERS]
    plain = {(ring_tables.who(row), row["pass"]): row for row in found if row["options"] in ({}, {"graph": True})}
    assert set(plain) == set(itertools.product(ring_tables.ORDER, ("fwd", "fwd+bwd")))
    assert all(row["error"] < 0.02 and row["reps"] >= 5 and row["ms_worst"] >= row["ms_median"] for row in found)
    assert plain["one GPU", "fwd"]["layout"] is None and plain["relay", "fwd"]["layout"] == "zigzag"
    assert "peak_bytes" not in plain["fetch, graph", "fwd"] and plain["relay", "fwd"]["peak_bytes"] == 1000
    for (who, pass_), row in plain.items():
        shared = 1 if who == "one GPU" else 2
        assert row["tflops"] == pytest.approx(SMALL.point.flops(pass_) / shared / row["ms_median"] / 1e9)
    asked = [(str(who), pass_) for who in STRATEGIES for pass_ in SMALL.passes if who.takes(pass_)]
    others = [row for row in found if row["options"] and row["options"] != {"graph": True}]
    names = [(str(ring.Who(row["kernel"], options=tuple(row["options"].items()))), row["pass"]) for row in others]
    assert sorted(names) == sorted(asked)


def test_bytes_sent_and_shared_are_those_that_were_counted_on_two_gpus():
    """The rows were measured by counting; over relay ranks also compare their calls, 16 bytes at a time."""
    counted = [row for row in rows.read(several_gpus=True) if "strategy" in row["options"] and row["N"] > 1]
    assert len(counted) > 40
    for row in counted:
        case = ring.Case(Point(*(row[name] for name in ("B", "H", "N", "D", "causal", "Hk"))), row["layout"])
        who = ring.Who(row["kernel"], options=tuple(row["options"].items()))
        found = ring.moved(case, who, row["pass"], row["n_gpus"])
        assert row["sent_bytes"] - found["sent_bytes"] in (0, 16, 32) and found["shared_bytes"] == row["shared_bytes"]


def test_hops_in_two_ranks_are_what_the_simulator_reads(monkeypatch):
    monkeypatch.setattr(ring, "HOPS", (4096, 2**16))
    monkeypatch.setattr(ring, "MOST_CALLS", 2)
    found, _, said = recorded(monkeypatch, "hops")
    assert not said and [2 * row["Nk"] * row["D"] for row in found] == [4096, 2**16] * 2
    assert all(row["pass"] == row["peer"] == "copy" and row["reps"] == 10 for row in found)
    assert [row["options"]["transport"] for row in found] == ["fetch", "fetch", "relay", "relay"]
    assert OnCpu(2, 60).run(arrived) == [[[1.0] * 2] * 2, [[0.0] * 2] * 2]
    for n, row in enumerate(found):  # 370 GB/s and 8 us: exact times give exactly these back
        row["ms_median"] = 1e3 * ((4096, 2**16)[n % 2] / 370e9 + 8e-6)
    for transport in simulate.TRANSPORTS:
        assert simulate.read_link(found, transport) == pytest.approx((370e9, 8e-6))


def arrived():
    """What each transport's messages of two sizes bring: the numbers of the rank before."""
    some = [ring.messages(transport, (256, 512)) for transport in ("fetch", "relay")]
    return [[float(call().unique()) for call in calls] for calls in some]


def test_the_trace_in_two_ranks(monkeypatch):
    monkeypatch.setattr(ring, "TRACED", SMALL)
    found, (record,), _ = recorded(monkeypatch, "trace")
    assert [(row["kernel"], row["pass"]) for row in found] == [
        ("ring+fetch", "fwd"), ("ring+relay", "fwd"), ("ring+fetch", "fwd+bwd"), ("ring+relay", "fwd+bwd"),
    ]  # fmt: skip
    for row in found:
        assert (row["hidden"], row["launches"], row["reps"]) == (0.5, 3, ring.PROFILED)
        assert row["idle"] == pytest.approx(0.3) and row["options"] == {"profiler": True}
        assert row["ms_median"] == pytest.approx(0.1)
    assert record["kind"] == "trace" and record["source"]["ring+fetch"] == rows.code_hash("04_ring", "ring+fetch")
    spans = [["computes", "attention_forward", 0, 60], ["moves", "Memcpy PtoP", 40, 80]]
    assert record["calls"][0]["spans"] == [*spans, ["computes", "merge_kernel", 90, 100]]


def test_spans_are_sorted_into_lanes_by_stream_and_name():
    seen = [
        event("attention_backward", 7, 10, 20), event("Memcpy DtoD", 7, 20, 21), event("void add()", 7, 21, 22),
        event("ncclDevKernel_SendRecv", 9, 12, 18), event("Memcpy PtoP", 20, 13, 15), event("nccl:coalesced", 9, 1, 99),
        event("barrier_kernel", 20, 15, 16), event("aten::add", 1, 0, 50, "CPU"), event("Memset", 7, 30, 30),
        event("ncclDevKernel_AllGather", 7, 22, 24),
    ]  # fmt: skip
    spans = ring.spans_of(seen)
    assert [(lane, name.split()[0]) for lane, _, name, *_ in spans] == [
        ("computes", "attention_backward"), ("moves", "ncclDevKernel_SendRecv"), ("moves", "Memcpy"),
        ("waits", "barrier_kernel"), ("computes", "Memcpy"), ("computes", "void"), ("moves", "ncclDevKernel_AllGather"),
    ]  # fmt: skip
    assert ring.shares(spans[:-1], 2) == {"ms": 0.006, "hidden": 1.0, "idle": 0.0, "launches": 3.0}
    with pytest.raises(ValueError, match="has seen no block"):
        ring.spans_of(seen[1:])
    with pytest.raises(ValueError, match="nothing moves"):
        ring.shares(spans[:1], 1)


def test_what_overlaps_counts_once_and_the_last_call_is_cut_out_stream_by_stream():
    assert ring.length([(5, 6), (0, 2), (1, 3), (3, 4)]) == 5 and ring.length([]) == 0
    spans = [("computes", 7, "a", 0, 10), ("computes", 7, "a", 14, 20)]
    found = ring.shares([*spans, ("moves", 9, "b", 8, 12), ("moves", 8, "c", 9, 11)], 1)
    assert found["hidden"] == 0.5 and found["idle"] == pytest.approx(4 / 20)
    calls = [
        [("computes", 7, f"a{n}", 10 * n, 10 * n + 6), ("moves", 9, "b", 10 * n + 5, 10 * n + 12)] for n in range(3)
    ]
    once = ("computes", 3, "once", 0, 1)  # a stream that is not in every call
    assert ring.last_call([once, *sum(calls, [])], 3) == [["computes", "a2", 0, 6], ["moves", "b", 5, 12]]


def test_a_round_is_that_of_the_slowest_rank_and_everybody_comes_first_once():
    for called, slowest in OnCpu(2, 60).run(three_in_turn):
        assert called == "abc" + "aabbbcc" + "bbbccaa" + "ccaabbb" + "aabbbcc" + "bbbccaa"
        assert slowest == [2.0, 7.0]
    assert [ring.calls_of_a_round(x) for x in (0.01, 1, 6, 13, 15, 500)] == [20, 20, 3, 2, 1, 1]


def three_in_turn():
    """(the order of calls of a, b twice and c, what the ranks make of 1 + rank and 7 - rank)."""
    called = []
    calls = {name: (lambda name=name: called.append(name), n) for name, n in (("a", 1), ("b", 2), ("c", 1))}
    ring.take_turns(calls)
    return "".join(called), timing.slowest_rank([1.0 + dist.get_rank(), 7.0 - dist.get_rank()], "cpu")


# --- failures -------------------------------------------------------------------------------------------------


def test_a_trial_says_what_is_wrong_and_a_broken_device_ends_the_rank(monkeypatch):
    def broken(*args):
        raise RuntimeError("no kernel\nfor this")

    out = torch.full((1, 4, 48, 64), 0.5)
    result = [out]
    monkeypatch.setattr(ring, "of_case", lambda case: (None, None, Layout("zigzag", 48, 1, True)))
    monkeypatch.setattr(ring, "truth", lambda case, backward: {"out": out[:, :, -8:].double()})
    monkeypatch.setattr(ring, "call_of", lambda *_: lambda: result)
    monkeypatch.setattr(dist, "get_rank", lambda: 0)
    assert ring.trial(SMALL, ONE, "fwd")["error"] == ring.trial(SMALL, GRAPH, "fwd")["error"] == 0
    result[0] = out + 0.25
    assert ring.trial(SMALL, ONE, "fwd")["error"] == 0.25
    result[0] = out * math.nan
    assert ring.trial(SMALL, ONE, "fwd") == "ValueError: its result is not finite"
    monkeypatch.setattr(ring, "call_of", broken)
    assert ring.trial(SMALL, FETCH, "fwd") == "RuntimeError: no kernel"
    monkeypatch.setattr(timing, "synchronize", broken)
    with pytest.raises(RuntimeError, match="no kernel"):
        ring.trial(SMALL, FETCH, "fwd")


class Some(OnCpu):
    """Ranks in which peers have no forward, and the relay dies in its backward."""

    def __init__(self, size, timeout):
        pass

    def run(self, task, *args, limit):
        if task is ring.race:
            return [{who: [n * ms for n in (1.0, 1.1, 1.2, 1.5, 1.0)] for who, ms in args[2].items()}] * 2
        if task is ring.trial and args[1:] == (RELAY, "fwd+bwd"):
            raise launch.RankError("rank 1 of 2 failed.\n  rank 0: fine\n  rank 1: died: SIGABRT\nmore", {})
        if task is ring.trial and args[1].peer and args[2] == "fwd":
            return [{}, "RuntimeError: no kernel"]
        return [{"error": 0.01, "ms": 30.0, "peak_bytes": 10 * rank} for rank in range(2)]


def test_who_fails_is_left_out_and_who_dies_ends_the_part(monkeypatch):
    said = []
    stand_in(monkeypatch, Some)
    monkeypatch.setattr(ring, "CASES", {"32k": (LARGE,)})
    found = list(map(rows.validate, ring.RingPart(("32k", "32k")).record(say=said.append)))
    assert [row["kernel"] for row in found] == ["fwd_8_hopper", "ring+fetch", "ring+relay"] * 2
    one, fetch, *_ = found
    # A rank computes half of what one GPU does, and TFLOP/s are those of a GPU.
    assert one["tflops"] == pytest.approx(2 * fetch["tflops"]) == pytest.approx(4 * 32768**2 * 32 * 128 / 2 / 33 / 1e9)
    assert (one["layout"], fetch["layout"], fetch["ms_worst"]) == (None, "zigzag", pytest.approx(45))
    assert (fetch["reps"], fetch["stage"], one["stage"], fetch["peak_bytes"]) == (5, "04_ring", "02_fa2_cuda", 10)
    reasons = [f"left out: {who}, fwd {LARGE.point}: RuntimeError: no kernel" for who in PEERS]
    assert said == [*reasons, "32k ended early: rank 1 of 2 failed.;   rank 0: fine;   rank 1: died: SIGABRT"] * 2


def test_one_gpu_has_no_ring(monkeypatch):
    stand_in(monkeypatch, ranks=None, gpus=1)
    assert list(ring.RingPart(("32k",)).record()) == []


def test_every_candidate_is_a_kernel_that_there_is_and_has_rows_of_its_own():
    whos = {who for cases in ring.CASES.values() for case in cases for who in case.who}
    for kernel in {who.kernel for who in whos if who.kernel}:
        assert rows.source_files("02_fa2_cuda" if kernel == ONE.kernel else "04_ring", kernel), kernel
    assert all(str(a) != str(b) for a in whos for b in whos if a is not b)
    assert set(ring.PLANS) == {"ring", "ring-hops", "ring-trace", *(f"ring-{name}" for name in ring.CASES)}
