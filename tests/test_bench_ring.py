"""The plan `ring` on the CPU: its tasks in two real ranks over gloo, what only a GPU has replaced by stand-ins."""

import contextlib
from dataclasses import replace
from functools import partial
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist

import steps
from steps import engine, step00_naive
from steps.course.bench import grid, ring, rows, timing
from steps.course.bench.cost import Point
from steps.course.bench.ring import ANY_ORDER, FETCH, GRAPH, IN_ORDER, LESSONS, ONE, PEERS, RELAY
from steps.course.workbook.case_on_ranks import PlainBlock
from steps.step04_ring import launch
from steps.step04_ring.strategies import team
from support.made_rows import ORIGIN

pytestmark = pytest.mark.skipif(engine.name != "cpu", reason="stands in for GPUs")

LARGE = ring.CASES["32k"][0]
SMALL = replace(LARGE, point=Point(1, 4, 32, 64, True, 2))  # two query heads share a K/V head


def of_02(q, k, v, *, causal, deterministic=False):
    """Stands in for stage 02, and is less exact where dq may be added in any order."""
    q, k, v = (x.float().repeat_interleave(q.shape[1] // x.shape[1], dim=1) for x in (q, k, v))
    out = step00_naive.attention(q, k, v, causal=causal, rung="matrix").bfloat16()
    return out if deterministic else out * 1.01


OF_02 = grid.Entrant("02_fa2_cuda", ONE, PlainBlock.forward, "bwd_3_hopper", PlainBlock.backward, of_02)


def event(name, stream, start, end, device="CUDA"):
    kind, when = getattr(torch.autograd.DeviceType, device), SimpleNamespace(start=start, end=end)
    return SimpleNamespace(name=name, device_type=kind, device_resource_id=stream, time_range=when)


def profiler(activities):
    """Stands in for torch's: has seen in each call two kernels and a copy that is half beside the first one."""
    one = ("attention_forward", 7, 0, 60), ("Memcpy PtoP", 20, 40, 80), ("merge_kernel", 7, 90, 100)
    seen = [event(name, s, 100 * n + a, 100 * n + b) for n in range(ring.PROFILED) for name, s, a, b in one]
    return contextlib.nullcontext(SimpleNamespace(events=lambda: seen))


@pytest.fixture(scope="module")
def ranks():
    """Two ranks over gloo, for all tests of this file."""
    with launch.Ranks(2) as two:
        two.run(replace_what_only_a_gpu_has)
        yield two


def replace_what_only_a_gpu_has():
    ring.WORTH_MS, ring.MOST_CALLS, ring.LAST, grid.candidate = 1.0, 2, 8, lambda *rung: OF_02
    ring.Hopper = lambda **how: PlainBlock if how == {"persistent": False, "deterministic": False} else None
    steps.step04_ring.plan.default_block = team.default_block = lambda *q, **how: PlainBlock
    torch.profiler.profile = profiler
    torch.cuda.CUDAGraph = lambda: SimpleNamespace(replay=lambda: None)
    torch.cuda.graph = lambda graph, capture_error_mode: contextlib.nullcontext()


def recorded(monkeypatch, ranks, cases, *names, gpus=2):
    """What parts of the plan yield on the CPU."""
    monkeypatch.setattr(ring, "CASES", cases)
    monkeypatch.setattr(launch, "Ranks", lambda size, timeout: contextlib.nullcontext(ranks))
    monkeypatch.setattr(torch.cuda, "device_count", lambda: gpus)
    monkeypatch.setattr(rows, "provenance", lambda n_gpus: ORIGIN)
    return [row if "kind" in row else rows.validate(row) for row in ring.record(*names)]


def test_everybody_computes_attention_in_two_ranks_and_has_rows_of_its_own(monkeypatch, capsys, ranks):
    whos = {"sizes": (ONE, IN_ORDER, FETCH, ANY_ORDER, GRAPH, RELAY, *PEERS), "strategies": (*LESSONS, FETCH, RELAY)}
    found = recorded(monkeypatch, ranks, {name: (replace(SMALL, who=who),) for name, who in whos.items()}, *whos)
    reasons = [line.partition(f" {SMALL.point}: ")[0] for line in capsys.readouterr().out.splitlines()]
    peers = [f"left out: {who}, {p}" for p in ("fwd", "fwd+bwd") for who in PEERS]
    assert reasons == [*peers, "left out: star, fwd+bwd"], "cuDNN needs a GPU, and star has no backward"
    assert all(0 < row["error"] < 0.04 and row["reps"] >= 5 and row["ms_worst"] >= row["ms_median"] for row in found)
    assert all(rows.source_files(row["stage"], row["kernel"]) for row in found)
    first, second = ([row for row in found if ("strategy" in row["options"]) == x] for x in (False, True))
    options = [{}, {"deterministic": True}, {}, {"deterministic": False}, {"graph": True}, {}] * 2
    assert [row["options"] for row in first] == options
    whole, both = [ONE] * 2 + [FETCH] * 3 + [RELAY], [f"{ONE}+bwd_3_hopper"] * 2 + [FETCH] * 3 + [RELAY]
    assert [row["kernel"] for row in first] == whole + both
    assert [row["layout"] for row in first] == ([None] * 2 + ["zigzag"] * 4) * 2
    for row in first:  # A rank computes half of what one GPU does; TFLOP/s are those of a GPU.
        shared = 2 if row["layout"] else 1
        assert row["tflops"] == pytest.approx(SMALL.point.flops(row["pass"]) / shared / row["ms_median"] / 1e9)
    assert first[6]["error"] > first[7]["error"], "this one was not asked for a fixed order"
    asked = [(row["options"]["strategy"], row["pass"]) for row in second]
    both = [(name, p) for name in ("query_parallel", "ulysses", "ring", "ring") for p in ("fwd", "fwd+bwd")]
    assert sorted(asked) == sorted([*both, ("star", "fwd")])


def test_a_graph_is_captured_after_two_calls_and_then_only_replayed(monkeypatch):
    done = []

    def capture(graph, capture_error_mode):
        return contextlib.nullcontext(done.append("capture"))

    monkeypatch.setattr(torch.cuda, "CUDAGraph", lambda: SimpleNamespace(replay=lambda: done.append("replay")))
    monkeypatch.setattr(torch.cuda, "graph", capture)
    monkeypatch.setattr(grid.Entrant, "call", lambda *asked: lambda: done.append("call") or (torch.ones(1),))
    calls = [ring.tried(SMALL, who, "fwd", (), {})[0] for who in (FETCH, GRAPH)]
    assert done == ["call"] * 3 + ["call", "call", "capture", "call"] + ["replay"] * 3
    assert [ring.entrant(SMALL, who).attention.keywords["transport"] for who in (GRAPH, RELAY)] == ["fetch", "relay"]
    assert [call() for call in calls] == [(torch.ones(1),)] * 2 and done[-2:] == ["call", "replay"]


def test_the_trace_has_shares_of_time_and_the_spans_of_one_call(monkeypatch, ranks):
    assert [case for some in ring.CASES.values() for case in some if case.traced] == list(ring.CASES["trace"]) != []
    parts = {"trace": (replace(SMALL, who=(FETCH, RELAY), traced=True),)}
    *found, record = recorded(monkeypatch, ranks, parts, "trace")
    assert [row["kernel"] for row in found] == [FETCH, RELAY] * 2 and found[2]["pass"] == "fwd+bwd"
    for row in found:
        assert (row["hidden"], row["launches"], row["options"]) == (0.5, 3, {"profiler": True})
        assert row["idle"] == pytest.approx(0.3) and row["ms_median"] == pytest.approx(0.1)
    assert record["kind"] == "trace" and record["source"]["ring+fetch"] == rows.code_hash("04_ring", "ring+fetch")
    spans = [["computes", "attention_forward", 0, 60], ["moves", "Memcpy PtoP", 40, 80]]
    assert record["calls"][0]["spans"] == [*spans, ["computes", "merge_kernel", 90, 100]]
    seen = [
        event("attention_backward", 7, 10, 20), event("Memcpy DtoD", 7, 20, 21), event("barrier_kernel", 20, 15, 16),
        event("ncclDevKernel_SendRecv", 9, 12, 18), event("Memcpy PtoP", 20, 13, 15), event("nccl:coalesced", 9, 1, 99),
        event("aten::add", 1, 0, 50, "CPU"), event("Memset", 7, 30, 30), event("ncclDevKernel_AllGather", 7, 22, 24),
    ]  # fmt: skip
    assert [lane for lane, *_ in ring.spans_of(seen)] == ["computes", "moves", "moves", "waits", "computes", "moves"]
    assert ring.length([(5, 6), (0, 2), (1, 3), (3, 4)]) == 5, "what overlaps counts once"


def test_the_call_that_is_shown_hides_about_as_much_as_the_mean(monkeypatch):
    spans = []
    for n, hidden in enumerate((0, 40, 100)):  # of the 100 microseconds that each call moves
        begin = 1000 * n
        spans += [("computes", 7, "attention_forward", begin, begin + 100)]
        spans += [("moves", 9, "Memcpy PtoP", begin + 100 - hidden, begin + 200 - hidden)]
    monkeypatch.setattr(ring, "PROFILED", 3)
    monkeypatch.setattr(ring, "profiled", lambda call, times: None)
    monkeypatch.setattr(ring, "spans_of", lambda events: sorted(spans, key=lambda one: one[3]))
    found = ring.trace(lambda: None)
    assert found["hidden"] == pytest.approx(140 / 300)
    assert found["spans"] == [["computes", "attention_forward", 0, 100], ["moves", "Memcpy PtoP", 60, 160]]


@pytest.fixture
def in_rank_0(monkeypatch):
    """Stands in for the first of two ranks."""
    monkeypatch.setattr(dist, "get_rank", lambda: 0)
    monkeypatch.setattr(dist, "get_world_size", lambda: 2)
    monkeypatch.setattr(dist, "barrier", lambda: None)


def test_a_round_is_that_of_the_slowest_rank(monkeypatch, in_rank_0):
    called, usual = [], ring.one_round
    monkeypatch.setattr(ring, "one_round", lambda call, count: usual(call, count) * 0 + count)
    monkeypatch.setattr(ring, "gathered", lambda mine: [mine, dict.fromkeys(mine, [1.5] * 5)])
    found = ring.race({who: partial(called.append, who) for who in "abc"}, {"a": 20.0, "b": 11.0, "c": 99.0})
    assert list(found) == [("a", [1.5] * 5, 1, {}), ("b", [2.0] * 5, 2, {}), ("c", [1.5] * 5, 1, {})]
    in_turn = ring.timing.turns(list("abc"), ring.ROUNDS)
    assert called == [who for who in in_turn for _ in range(3 if who == "b" else 2)]


def test_who_cannot_take_part_in_one_rank_takes_part_in_none_and_the_worst_rank_counts(monkeypatch, in_rank_0):
    other = {FETCH: "RuntimeError: no kernel", RELAY: (2.0, 0.0)}
    monkeypatch.setattr(ring, "tried", lambda case, who, *rest: (who, (who, (1.0, 0.5))))
    monkeypatch.setattr(ring, "gathered", lambda mine: [mine[1], other[mine[0]]])
    monkeypatch.setattr(ring, "race", lambda calls, ms: [(who, [ms[who]], 1, {}) for who in calls])
    reason, row = ring.measure(replace(SMALL, passes=("fwd",), who=(FETCH, RELAY)), ORIGIN)
    assert reason == f"left out: {FETCH}, fwd {SMALL.point}: RuntimeError: no kernel"
    assert (row["kernel"], row["ms_median"], row["error"]) == (RELAY, 2.0, 0.5)


def test_who_dies_ends_the_part_and_one_gpu_has_no_ring(monkeypatch, capsys, ranks):
    def dies_in_a_large_case(task, case, origin, limit):
        if case is LARGE:
            raise launch.RankError("rank 1 of 2 failed.\n  rank 0: fine\n  rank 1: died: SIGABRT\nmore", {})
        return ranks.run(task, case, origin)

    some = SimpleNamespace(run=dies_in_a_large_case)
    parts = {"32k": (LARGE,), "8k": (replace(SMALL, passes=("fwd",), who=(FETCH,)), LARGE, SMALL)}
    assert [row["kernel"] for row in recorded(monkeypatch, some, parts, *parts)] == [FETCH]
    ended = " ended early: rank 1 of 2 failed.;   rank 0: fine;   rank 1: died: SIGABRT"
    assert capsys.readouterr().out.splitlines() == [name + ended for name in parts]
    assert recorded(monkeypatch, some, parts, *parts, gpus=1) == []
    row = ring.row_of(LARGE, FETCH, "fwd", [30.0 * n for n in (1.0, 1.1, 1.2, 1.5, 1.0)], 3, 0.01, ORIGIN)
    assert (row["ms_median"], row["ms_worst"], row["reps"], row["error"]) == (pytest.approx(33), 45, 15, 0.01)


def test_a_broken_device_ends_the_rank(monkeypatch):
    def broken(*args):
        raise RuntimeError("no kernel\nfor this")

    monkeypatch.setattr(ring, "entrant", broken)
    assert ring.tried(SMALL, FETCH, "fwd", (), {}) == (None, "RuntimeError: no kernel")
    monkeypatch.setattr(timing, "synchronize", broken)
    with pytest.raises(RuntimeError, match="no kernel"):
        ring.tried(SMALL, FETCH, "fwd", (), {})
