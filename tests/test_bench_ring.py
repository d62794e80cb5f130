"""The plan `ring` on the CPU: its tasks in two real ranks over gloo, what only a GPU has replaced by stand-ins."""

import contextlib
import importlib
import itertools
import math
from collections import Counter
from dataclasses import replace
from functools import partial
from types import SimpleNamespace
from unittest.mock import patch

import numpy as np
import pytest
import torch
import torch.distributed as dist
from typer.testing import CliRunner

import steps
from reference import error
from steps import engine
from steps.__main__ import app
from steps.bench import (
    fingerprint,
    grid,
    plans,
    plots,
    report,
    ring_calls,
    ring_plan,
    ring_report,
    ring_trace,
    ring_variants,
    rows,
    timing,
)
from steps.bench.ring_calls import FETCH, GRAPH, ONE, PEERS, QUERY_PARALLEL, RELAY, STAR, STRATEGIES, ULYSSES, turned
from steps.step04_ring import Layout, comm, entry, launch, merge, simulate, watch
from steps.step04_ring.strategies import account, team
from steps.workbook.case_on_ranks import PlainBlock

pytestmark = pytest.mark.skipif(engine.name != "cpu", reason="stands in for GPUs")

ORIGIN = {
    "run": "r1", "commit": "c", "date": "2026-01-31", "gpu": "NVIDIA H200", "n_gpus": 2, "driver": "580",
    "cuda": "13.0", "torch": "2.11.0", "triton": "3.6.0",
}  # fmt: skip
LENGTHS = {1048576: 64, 131072: 96, 32768: 48, 8192: 32, 1: 1}


def small(case):
    """The case with few positions and heads; two query heads share a K/V head where several do so in the case."""
    sizes = {"H": 4, "Hk": {32: 4, 8: 2}[case.point.Hk], "N": LENGTHS[case.point.N], "D": 64}
    return replace(case, point=replace(case.point, **sizes, Nk=case.point.Nk and LENGTHS[case.point.Nk]))


SMALL = small(ring_plan.CASES["32k"][0])
GROUPED = small(ring_plan.CASES["32k"][1])


# --- what stands in for GPUs, in the processes of the ranks -----------------------------------------------------

OF_02 = SimpleNamespace(
    forward=lambda q, k, v, rung, causal: PlainBlock.forward(q, k, v, causal=causal),
    backward=lambda *tensors, rung, causal: PlainBlock.backward(*tensors, causal=causal),
)


class Carrying(PlainBlock):
    """Stands in for stage 03, whose forward also adds to the out and lse of other keys."""

    @staticmethod
    def forward(q, k, v, *, out=None, lse=None, **options):
        part = PlainBlock.forward(q, k, v, **options)
        if out is None:
            return part
        merge.merge(out, lse, *part)
        return out, lse


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
        return [event(name, s, 100 * n + a, 100 * n + b) for n in range(ring_trace.CALLS) for name, s, a, b in one]


def event(name, stream, start, end, device="CUDA"):
    kind = getattr(torch.autograd.DeviceType, device)
    when = SimpleNamespace(start=start, end=end)
    return SimpleNamespace(name=name, device_type=kind, device_resource_id=stream, time_range=when)


def few_calls():
    ring_calls.WORTH_MS, ring_calls.MOST_CALLS = 1.0, 2


def in_rank(task, *args):
    """The task in a rank, where the first one replaces what only a GPU has."""
    if ring_calls.kernels is not OF_02:
        few_calls()
        ring_calls.LAST, watch.PERIOD = 8, 0.05
        ring_calls.kernels, ring_calls.Hopper = OF_02, lambda persistent, deterministic: PlainBlock
        entry.default_block = team.default_block = lambda *q, **how: PlainBlock
        steps.step03_triton = Carrying
        torch.cuda.CUDAGraph, torch.cuda.graph = Graph, lambda graph, capture_error_mode: contextlib.nullcontext()
        torch.cuda.synchronize = torch.cuda.reset_peak_memory_stats = lambda *device: None
        torch.cuda.memory_allocated, torch.cuda.max_memory_allocated = lambda: 100, lambda: 1100
        torch.profiler.profile = Profiler
    return task(*args)


class OnCpu(ring_plan.Team):
    """Two ranks over gloo. Those of one test go on to the next."""

    kept = None

    def __init__(self):
        super().__init__()
        self.size, self.ranks = 2, OnCpu.kept

    def run(self, task, *args):
        try:
            return super().run(in_rank, task, *args)
        finally:
            OnCpu.kept = self.ranks

    def close(self):
        pass


@pytest.fixture(scope="module", autouse=True)
def end_of_ranks():
    yield
    if OnCpu.kept:
        OnCpu.kept.close()


@pytest.fixture
def fewer(monkeypatch):
    """Small sizes, and ranks on the CPU."""
    for name in ("WORTH_MS", "MOST_CALLS"):
        monkeypatch.setattr(ring_calls, name, getattr(ring_calls, name))
    few_calls()
    monkeypatch.setattr(ring_plan, "Team", OnCpu)
    monkeypatch.setattr(rows, "provenance", lambda device, commit, n_gpus: ORIGIN | {"n_gpus": n_gpus})
    monkeypatch.setattr(ring_plan, "CASES", {name: tuple(map(small, some)) for name, some in ring_plan.CASES.items()})
    monkeypatch.setattr(ring_plan, "TRACED", small(ring_plan.TRACED))
    monkeypatch.setattr(ring_plan, "WATCHED_AT", small(ring_plan.WATCHED_AT))
    monkeypatch.setattr(ring_plan, "HOPS", (4096, 2**16))
    monkeypatch.setattr(ring_plan, "WATCH_MS", 1)


def recorded(*names):
    """(rows, records, what was said) of parts of the plan."""
    said = []
    found = list(ring_plan.RingPart(names).record(say=said.append, commit="c"))
    return [x for x in found if "kind" not in x], [x for x in found if "kind" in x], said


# --- every part of the plan -----------------------------------------------------------------------------------


@pytest.mark.long
def test_the_whole_plan(fewer):
    found, (record,), said = recorded(*ring_plan.NAMES)
    expected = Counter()
    for cases in ring_plan.CASES.values():
        for case, pass_ in ((one, pass_) for one in cases for pass_ in one.passes):
            expected.update((str(who), pass_) for who in case.entrants(pass_) if not who.peer)
    expected.update((str(turned(who, profiler=True)), pass_) for who in (FETCH, RELAY) for pass_ in ("fwd", "fwd+bwd"))
    expected.update((str(who), "fwd") for who in (ring_calls.WATCHED, ring_calls.UNWATCHED))
    expected.update({("copy transport=fetch", "copy"): 2, ("copy transport=relay", "copy"): 2})

    def name(row):
        options = " ".join(f"{name}={value}" for name, value in row["options"].items())
        return f"{row['peer'] or row['kernel'].removesuffix('+bwd_3_hopper')} {options}".strip(), row["pass"]

    assert Counter(map(name, found)) == expected
    assert all("context-parallel" in line or "took" in line for line in said), said  # its kernels run on GPUs only
    assert {row["run"] for row in found} == {"r1"} and record["kind"] == "trace"


def test_the_ring_and_its_strategies_in_two_ranks(fewer, monkeypatch):
    """One case of each sort: the numbers of rows are right, and everybody computes attention."""
    cases = {
        "8k": (replace(GROUPED, who=(ONE, FETCH, GRAPH, RELAY, *PEERS)),),
        "strategies": (replace(GROUPED, who=STRATEGIES), ring_plan.CASES["strategies"][4]),
    }
    monkeypatch.setattr(ring_plan, "CASES", cases)
    found, _, said = recorded("8k", "strategies")
    reasons = [line.partition(": RuntimeError")[0] for line in said if "took" not in line]
    assert reasons == [f"left out: {who}, {p} {GROUPED.point}" for p in ("fwd", "fwd+bwd") for who in PEERS]
    plain = {(ring_report.who(row), row["pass"]): row for row in found if "strategy" not in row["options"]}
    assert set(plain) == set(itertools.product((ring_report.ONE, "fetch", "fetch, graph", "relay"), ("fwd", "fwd+bwd")))
    assert all(row["error"] < 0.02 and row["reps"] >= 5 and row["ms_worst"] >= row["ms_median"] for row in found)
    assert plain["one GPU", "fwd"]["layout"] is None and plain["relay", "fwd"]["layout"] == "zigzag"
    assert "peak_bytes" not in plain["fetch, graph", "fwd"] and plain["relay", "fwd"]["shared_bytes"] == 0
    for who, pass_ in plain:
        row, shared = plain[who, pass_], 1 if who == ring_report.ONE else 2
        assert row["tflops"] == pytest.approx(GROUPED.point.flops(pass_) / shared / row["ms_median"] / 1e9)

    n, kv = 24, 2 * 2 * 24 * 64 * 2  # positions of a rank; bytes of its keys and values
    assert plain["fetch", "fwd"]["sent_bytes"] == kv and plain["fetch", "fwd"]["shared_bytes"] == kv
    assert plain["fetch", "fwd+bwd"]["sent_bytes"] == 2 * kv
    assert plain["fetch", "fwd+bwd"]["shared_bytes"] == 2 * kv  # its own, and a slot for dK and dV
    assert plain["fetch", "fwd+bwd"]["predicted_bytes"] == ring_plan.predicted_fetch(GROUPED.point, 2)
    of_lessons = {(row["N"], ring_report.who(row), row["pass"]): row for row in found if "strategy" in row["options"]}
    whole, sizes = Layout("zigzag", 48, 2, True), dict(B=1, H=4, Hk=2, D=64, e=2)
    for name, who in (("query_parallel",) * 2, ("star",) * 2, ("ulysses",) * 2, ("ring", "ring, relay")):
        forward, backward = account.sent_bytes(name, whole, 0, **sizes)
        row = of_lessons[48, who, "fwd"]
        assert row["sent_bytes"] == forward and row["options"] == {"strategy": name}
        assert row["predicted_bytes"] == max(account.memory_bytes(name, whole, rank, **sizes) for rank in (0, 1))
        if name != "star":
            assert of_lessons[48, who, "fwd+bwd"]["sent_bytes"] == forward + backward
    assert (48, "star", "fwd+bwd") not in of_lessons and (48, "ring, fetch", "fwd+bwd") in of_lessons
    few = {who: row for (N, who, _), row in of_lessons.items() if N == 1}
    assert set(few) == {"query_parallel", "star", "ring, fetch", "ring, relay"}
    assert few["star"]["sent_bytes"] == 4 * 4 * (64 + 1) < few["query_parallel"]["sent_bytes"] == 2 * kv
    assert few["star"]["Nk"] == 96 and few["star"]["Hk"] == 2 and n == whole.size(0)


def test_changed_parts_of_the_ring_in_two_ranks(fewer, monkeypatch):
    monkeypatch.setattr(ring_plan, "CASES", {"ablations": (replace(GROUPED, who=ring_calls.ABLATIONS),)})
    found, _, said = recorded("ablations", "watch")
    assert not [line for line in said if "took" not in line], said
    lines = {(line[1], line[2]): line[3:] for line in ring_report.changes(found)[1:]}
    assert len(lines) == len(ring_calls.ABLATIONS) + 2 and lines["fetch", "as it is"][0].endswith("(1.000)")
    assert lines["fetch", "dQ summed in any order"][0] == "–" and lines["fetch", "no overlap"][0] != "–"
    assert lines["fetch", "stage 03's block, sum carried in it"][1] == "–" != lines["fetch", "stage 03's block"][1]
    by_option = {ring_report.changed(row): row for row in found if row["pass"] == "fwd+bwd"}
    kv = 2 * 2 * 24 * 64 * 2
    wide, usual = by_option["dkv=fp32"], by_option["changed=nothing"]
    assert wide["sent_bytes"] == 3 * kv and ("relay", "stage 03's block") in lines
    assert usual["kernel"] == "ring+relay" and usual["sent_bytes"] == 4 * kv  # the later of two; float32, too


def test_hops_in_two_ranks_are_what_the_simulator_reads(fewer):
    found, _, said = recorded("hops")
    assert [line for line in said if "took" not in line] == []
    for transport in simulate.TRANSPORTS:
        own = [row for row in found if row["options"] == {"transport": transport}]
        assert [2 * row["Nk"] * row["D"] for row in own] == [4096, 2**16] and all(row["reps"] == 10 for row in own)
        assert all(row["pass"] == row["peer"] == "copy" and row["ms_median"] > 0 for row in own)
        with contextlib.suppress(ZeroDivisionError):  # On a busy machine the larger one may take less time.
            simulate.read_link(found, transport)


def test_link_and_latency_come_from_the_rows_of_hops():
    """370 GB/s and 8 us: exact times give exactly these back."""

    class Linear:
        size = 2

        def run(self, task, transport, sizes):
            assert task is ring_calls.hops
            return [{n: [1e3 * (n / 370e9 + 8e-6)] * 5 for n in sizes}] * 2

    found = list(ring_plan.kept(ring_plan.measure_hops, "hops", (Linear(), ORIGIN, math.inf, pytest.fail)))
    assert len(found) == 2 * len(ring_plan.HOPS) and min(ring_plan.HOPS) == 4096 and max(ring_plan.HOPS) == 2**28
    for transport in simulate.TRANSPORTS:
        assert simulate.read_link(found, transport) == pytest.approx((370e9, 8e-6))


def test_a_message_that_arrives_changed_is_noticed(fewer):
    found = OnCpu().run(broken_hops)
    assert all("keys arrive changed" in line for line in found)


def broken_hops():
    """Each rank's hops if every message comes from the rank itself."""
    usual = comm.Comm.post
    comm.Comm.post = lambda ring, x, shape, towards: SimpleNamespace(wait=lambda: x)
    try:
        ring_variants.hops("relay", (4096,), "cpu")
    except ValueError as problem:
        return str(problem)
    finally:
        comm.Comm.post = usual
        dist.barrier()
    return "nothing noticed"


def test_the_trace_in_two_ranks(fewer, tmp_path):
    found, (record,), _ = recorded("trace")
    assert [(row["kernel"], row["pass"]) for row in found] == [
        ("ring+fetch", "fwd"), ("ring+relay", "fwd"), ("ring+fetch", "fwd+bwd"), ("ring+relay", "fwd+bwd"),
    ]  # fmt: skip
    for row in found:
        assert (row["hidden"], row["launches"], row["reps"]) == (0.5, 3, ring_trace.CALLS)
        assert row["idle"] == pytest.approx(0.3) and row["options"] == {"profiler": True}
        assert row["ms_median"] == pytest.approx(0.1)
    path = rows.write_record(record.pop("kind"), record, tmp_path, indent=None)
    assert path.name == "nvidia-h200.trace.json"
    read = rows.read_record("trace", folder=tmp_path)
    assert read["n_gpus"] == 2 and read["source"]["ring+fetch"] == fingerprint.code_hash("04_ring", "ring+fetch")
    spans = [["computes", "attention_forward", 0, 60], ["moves", "Memcpy PtoP", 40, 80]]
    assert read["calls"][0]["spans"] == [*spans, ["computes", "merge_kernel", 90, 100]]
    assert ring_report.recorded_trace(tmp_path) == read and not ring_report.recorded_trace(tmp_path / "elsewhere")
    rows.write_record("trace", read | {"source": {"ring+fetch": "of another version"}}, tmp_path)
    assert ring_report.recorded_trace(tmp_path) == {}
    words = plots.trace_in_words(read)
    assert "2 GPUs" in words and words.count("50% of the moving beside a kernel, 30.0% of the time without one") == 2
    axes = plots.trace(read, "fwd").axes
    assert [ax.get_title("left").split(":")[0] for ax in axes] == ["relay", "fetch"]
    assert [bar.get_width() for bar in axes[0].patches] == pytest.approx([0.06, 0.04, 0.01])
    assert [round(bar.get_y() + 0.35) for bar in axes[0].patches] == [0, 1, 0]
    assert len({bar.get_facecolor() for bar in axes[0].patches}) == 3
    assert "50% of the moving hidden, no kernel in 30.0% of the time" in axes[1].get_title("left")
    assert tuple(plots.LANES) == ring_trace.LANES
    with pytest.raises(ValueError, match="no trace of fwd"):
        plots.trace({}, "fwd")


# --- single parts of a rank's work ----------------------------------------------------------------------------


def test_spans_are_sorted_into_lanes_by_stream_and_name():
    seen = [
        event("attention_backward", 7, 10, 20), event("Memcpy DtoD", 7, 20, 21), event("void add()", 7, 21, 22),
        event("ncclDevKernel_SendRecv", 9, 12, 18), event("Memcpy PtoP", 20, 13, 15), event("nccl:coalesced", 9, 1, 99),
        event("barrier_kernel", 20, 15, 16), event("aten::add", 1, 0, 50, "CPU"), event("Memset", 7, 30, 30),
        event("ncclDevKernel_AllGather", 7, 22, 24),
    ]  # fmt: skip
    spans = ring_trace.spans_of(seen)
    assert [(lane, name.split()[0]) for lane, _, name, *_ in spans] == [
        ("computes", "attention_backward"), ("moves", "ncclDevKernel_SendRecv"), ("moves", "Memcpy"),
        ("waits", "barrier_kernel"), ("computes", "Memcpy"), ("computes", "void"), ("moves", "ncclDevKernel_AllGather"),
    ]  # fmt: skip
    assert ring_trace.shares(spans[:-1], 2) == {"ms": 0.006, "hidden": 1.0, "idle": 0.0, "launches": 3.0}
    with pytest.raises(ValueError, match="has seen no block"):
        ring_trace.spans_of(seen[1:])
    with pytest.raises(ValueError, match="nothing moves"):
        ring_trace.shares(spans[:1], 1)


def test_what_overlaps_counts_once():
    assert ring_trace.length([(5, 6), (0, 2), (1, 3), (3, 4)]) == 5 and ring_trace.length([]) == 0
    spans = [
        ("computes", 7, "a", 0, 10),
        ("computes", 7, "a", 14, 20),
        ("moves", 9, "b", 8, 12),
        ("moves", 8, "c", 9, 11),
    ]
    found = ring_trace.shares(spans, 1)
    assert found["hidden"] == 0.5 and found["idle"] == pytest.approx(4 / 20)


def test_the_last_call_is_cut_out_stream_by_stream():
    calls = [
        [("computes", 7, f"a{n}", 10 * n, 10 * n + 6), ("moves", 9, "b", 10 * n + 5, 10 * n + 12)] for n in range(3)
    ]
    once = ("computes", 3, "once", 0, 1)  # a stream that is not in every call
    assert ring_trace.last_call([once, *sum(calls, [])], 3) == [["computes", "a2", 0, 6], ["moves", "b", 5, 12]]


def test_copies_in_turn_wait_for_the_computation_and_it_for_them():
    done = []
    here = SimpleNamespace(follow=lambda: done.append("follow"), mark=lambda: "m", lead=lambda mark: done.append(mark))
    ring_variants.copy_in_turn(here, "pair", copy=lambda self, *pairs: done.append(pairs))
    assert done == ["follow", ("pair",), "m"]
    owner = SimpleNamespace(x=1)
    assert ring_variants.instead(owner, "x", 2, lambda: owner.x) == 2 and owner.x == 1
    with pytest.raises(ZeroDivisionError):
        ring_variants.instead(owner, "x", 2, lambda: 1 / 0)
    assert owner.x == 1


def test_gradients_in_float32_are_the_same_numbers(fewer):
    usual, wide = (OnCpu().run(results, SMALL, who) for who in (FETCH, turned(FETCH, dkv="fp32")))
    assert OnCpu().run(dtype_of_a_slot) == [torch.float32] * 2
    for rank in range(2):
        for name, a, b in zip(("out", "dq", "dk", "dv"), usual[rank], wide[rank], strict=True):
            assert np.array_equal(a, b), name


def dtype_of_a_slot():
    """Of dK and dV on their way to another rank."""
    made = []
    to_slot = ring_variants.WideTrip.slot
    ring_variants.WideTrip.slot = lambda *place: made.append(to_slot(*place)) or made[-1]
    results(SMALL, turned(FETCH, dkv="fp32"))
    ring_variants.WideTrip.slot = to_slot
    return made[0].dtype


def results(case, who):
    found = [x.float().numpy() for x in ring_calls.call_of(case, who, "fwd+bwd")()]
    ring_calls.forget()
    return found


def test_the_forward_s_kernel_is_persistent_only_where_an_ablation_asks_for_it(fewer):
    for asked in OnCpu().run(asked_of_hopper, SMALL):
        assert asked == [("ring+fetch", True, True), ("ring+fetch", False, False), ("ring+relay", True, True)]


def asked_of_hopper(case):
    """With what stage 02's block is made for the ablations: [(kernel, persistent, deterministic)]."""
    made, usual = [], ring_calls.Hopper
    for who in ring_calls.ABLATIONS:
        ring_calls.Hopper = lambda *how, who=who: made.append((who.kernel, *how)) or PlainBlock
        ring_calls.call_of(case, who, "fwd")
    ring_calls.forget()
    ring_calls.Hopper = usual
    return made


@pytest.mark.parametrize("transport", ["relay", "fetch"])
def test_a_sum_carried_in_the_kernel_is_attention(fewer, transport):
    """With stage 03's own kernel: float32 within the reference's tolerance, and no result is merged behind it."""
    assert OnCpu().run(carried, transport) == [[]] * 2


def carried(transport):
    """What is wrong in this rank."""
    block, rank, wrong = importlib.import_module("steps.step03_triton"), dist.get_rank(), []
    call = partial(ring_variants.instead, *ring_variants.CHANGES["merge", "carried"])
    no_merge = patch.object(merge, "merge", side_effect=AssertionError("a result was merged"))
    cases = ((37, "zigzag", True), (37, "zigzag", False), (22, "contiguous", True), (1, "zigzag", True))
    for S, layout, causal in cases:
        q, k, v = (torch.randn(1, h, S, 16, generator=torch.Generator().manual_seed(h)) for h in (4, 2, 2))
        want, whole = error.expected(q, k, v, q, causal=causal, scale=0.3), Layout(layout, S, 2)
        shards = [whole.shard(x, rank) for x in (q, k, v)]
        how = dict(causal=causal, scale=0.3, layout=layout, S=S, transport=transport, block=block)
        with no_merge:
            got = call(lambda shards=shards, how=how: entry.forward(*shards, **how))
        for name, x in zip(("out", "lse"), got, strict=True):
            distance = (x.double() - whole.shard(want.value[name], rank, dim=2)).abs()
            if not bool((distance <= want.tolerance[name]).all()):
                wrong.append((S, layout, causal, name, distance.max().item()))
    return wrong


def test_without_watching_nothing_is_noted_and_the_threads_rest(fewer):
    for before, after, beats, later in OnCpu().run(unwatched_call, SMALL):
        assert after[0] == before[0] and beats == 0 and later > 0  # the calls; the notes published meanwhile, and later


def unwatched_call(case):
    call = ring_calls.call_of(case, ring_calls.WATCHED, "fwd")
    call()
    note = watch.note(dist.group.WORLD)
    with ring_variants.unwatched():
        before, beats = note.now, watch._watch.beats
        call()
        ring_variants.time.sleep(2 * watch.PERIOD)
        after, meanwhile = note.now, watch._watch.beats - beats
    beats = watch._watch.beats
    ring_variants.time.sleep(3 * watch.PERIOD)
    later = watch._watch.beats - beats
    ring_calls.forget()
    return before[:2], after[:2], meanwhile, later


def test_without_watching_no_event_is_recorded():
    note, recorded = SimpleNamespace(), []
    usual = watch.Note.passed, watch.Watch._alive
    watch.Note.passed = lambda note: recorded.append(note)
    try:
        with ring_variants.unwatched():
            watch.Note.begin(note, {}, b"signature", 3)
            assert watch.Note.begin_hop(note) == 1 and watch.Note.passed(note) is None
        assert not recorded and (note.signature, note.number) == (b"signature", 3)
        assert watch.Watch._alive is usual[1]
    finally:
        watch.Note.passed = usual[0]


def test_a_round_is_that_of_the_slowest_rank_and_everybody_comes_first_once(fewer):
    for called, slowest in OnCpu().run(three_in_turn):
        assert called == "abc" + "aabbbcc" + "bbbccaa" + "ccaabbb" + "aabbbcc" + "bbbccaa"
        assert slowest == {"x": [2.0, 7.0]}


def three_in_turn():
    """(the order of calls of a, b twice and c, what `slowest` makes of 1 + rank and 7 - rank)."""
    called = []
    calls = {name: (lambda name=name: called.append(name), n) for name, n in (("a", 1), ("b", 2), ("c", 1))}
    ring_calls.take_turns(calls)
    return "".join(called), ring_calls.slowest({"x": [1.0 + dist.get_rank(), 7.0 - dist.get_rank()]})


def test_a_round_has_about_the_same_length_for_everybody():
    assert [ring_calls.calls_of_a_round(x) for x in (0.01, 1, 6, 13, 15, 500)] == [20, 20, 3, 2, 1, 1]


# --- failures -------------------------------------------------------------------------------------------------


def test_a_trial_that_fails_says_so_and_a_broken_device_ends_the_rank(monkeypatch):
    def fails(*args):
        raise RuntimeError("no kernel\nfor this")

    monkeypatch.setattr(ring_calls, "call_of", fails)
    assert ring_calls.trial(SMALL, FETCH, "fwd", False) == "RuntimeError: no kernel"

    def broken(device):
        raise RuntimeError("unspecified launch failure")

    monkeypatch.setattr(timing, "synchronize", broken)
    with pytest.raises(RuntimeError, match="launch failure"):
        ring_calls.trial(SMALL, FETCH, "fwd", False)


@pytest.mark.parametrize(
    "result, reason",
    [(lambda out: out * math.nan, "not finite"), (lambda out: out + 1.0, "differs by 1 from that of one GPU")],
)
def test_a_wrong_result_is_no_row(monkeypatch, result, reason):
    out = torch.full((1, 4, 48, 64), 0.5)
    out[..., -1, 0] = 1.0
    monkeypatch.setattr(ring_calls, "of_case", lambda case: (None, None, Layout("zigzag", 48, 1, True)))
    monkeypatch.setattr(ring_calls, "truth", lambda case, backward: {"out": out.double()})
    monkeypatch.setattr(ring_calls, "one_gpu", lambda case: (out,))
    monkeypatch.setattr(dist, "get_rank", lambda: 0)
    assert ring_calls.error_of(SMALL, FETCH, (out,), "fwd", True) == 0
    with pytest.raises(ValueError, match=reason):
        ring_calls.error_of(SMALL, FETCH, (result(out),), "fwd", True)


class FakeTeam:
    """Answers what ranks would. ends: what ends the ranks, candidates or the number of a race."""

    size = 2

    def __init__(self, ends=()):
        self.ends, self.races, self.failures, self.tried = ends, 0, Counter(), []

    def run(self, task, *args):
        if task is ring_calls.forget:
            return [None] * 2
        if task is ring_calls.race:
            self.races += 1
            if self.races in self.ends:
                raise launch.RankError("rank 0 of 2 failed.\n  rank 0: died\n  rank 1: fine\nrank 0:\nTrace", {})
            return [{who: [n * ms for n in (1.0, 1.1, 1.2, 1.5, 1.0)] for who, ms in args[2].items()}] * 2
        case, who, pass_, beside_one = args
        self.tried.append((who, beside_one))
        if who in self.ends:
            raise launch.RankError("rank 1 of 2 failed.\n  rank 0: fine\n  rank 1: died: SIGABRT\nmore", {})
        if who.peer and pass_ == "fwd":
            return [{}, "RuntimeError: no kernel"]
        found = {"error": 0.01, "ms": 30.0, "sent": 7}
        return [found | ({"peak": 10 * rank, "shared": 5} if pass_ != "fwd" else {}) for rank in range(2)]


def measured(ranks, case):
    said = []
    found = [row for p in case.passes for row in ring_plan.measure(ranks, case, p, ORIGIN, said.append)]
    return list(map(rows.validate, found)), said


def test_rows_of_a_case():
    found, said = measured(FakeTeam(ends=[RELAY]), ring_plan.CASES["32k"][0])
    both = [who.peer for who in PEERS]
    kernels = [row["kernel"] or row["peer"] for row in found]
    assert kernels == ["fwd_8_hopper", "ring+fetch", "fwd_8_hopper+bwd_3_hopper", "ring+fetch", *both]
    one, ring, *_ = found
    # A rank computes half of what one GPU does, and TFLOP/s are those of a GPU.
    assert one["tflops"] == pytest.approx(2 * ring["tflops"]) == pytest.approx(4 * 32768**2 * 32 * 128 / 2 / 33 / 1e9)
    assert (one["layout"], ring["layout"]) == (None, "zigzag") and ring["ms_worst"] == pytest.approx(45)
    assert (ring["reps"], ring["stage"], one["stage"]) == (5, "04_ring", "02_fa2_cuda") and ring["source"]
    assert found[3]["peak_bytes"] == 10 and found[3]["shared_bytes"] == 5 and found[3]["sent_bytes"] == 7
    reasons = [line.partition(": ")[2] for line in said]
    assert [reason.split(",")[0] for reason in reasons] == ["ring+relay", *both, "ring+relay"]
    assert "RuntimeError: no kernel" in reasons[1]
    assert "rank 1 of 2 failed. rank 0: fine; rank 1: died: SIGABRT" in reasons[0] and "more" not in reasons[0]


def test_a_race_is_run_again_by_new_ranks_once():
    case = ring_plan.CASES["32k"][0]
    found, said = measured(FakeTeam(ends=[1]), case)
    assert len(found) == 3 + 5 and [line.split(":")[0] for line in said][-1] == "not measured"
    found, said = measured(FakeTeam(ends=[1, 2]), case)
    assert len(found) == 5 and "not measured again" in said[-1] and "rank 0: died; rank 1: fine" in said[-1]


def test_who_has_ended_the_ranks_twice_is_not_tried_again():
    ranks = FakeTeam(ends=[RELAY])
    for case in ring_plan.CASES["32k"][:2]:
        said = measured(ranks, case)[1]
    assert sum(who == RELAY for who, _ in ranks.tried) == 2 and "has ended the ranks twice" in said[-1]


def test_results_are_compared_with_one_gpu_unless_it_failed_or_takes_too_long():
    for case, ranks, expected in (
        (ring_plan.CASES["32k"][0], FakeTeam(), True),
        (ring_plan.CASES["32k"][0], FakeTeam(ends=[ONE]), False),
        (ring_plan.CASES["strategies"][0], FakeTeam(), True),
        (ring_plan.CASES["1m"][0], FakeTeam(), False),
        (ring_plan.FEW, FakeTeam(), False),
    ):
        measured(ranks, case)
        assert {beside for who, beside in ranks.tried if who != ONE} == {expected}, case


def test_a_row_or_a_part_that_is_wrong_costs_no_other():
    good = ring_plan.row_of(SMALL, FETCH, "fwd", [1.0] * 5, 1, {"error": 0.0}, ORIGIN)
    said = []

    def part(*arguments):
        yield good
        yield good | {"ms_median": -1.0}
        yield {"kind": "trace"}
        raise RuntimeError("a mistake")

    found = list(ring_plan.kept(part, "part", (None, ORIGIN, math.inf, said.append)))
    assert found == [good, {"kind": "trace"}] and "against the rule" in said[0]
    assert said[1] == "part ended early: RuntimeError: a mistake"


def test_no_time_and_too_few_gpus_are_said(fewer, monkeypatch):
    said = []
    assert list(ring_plan.RingPart(("32k", "hops")).record(say=said.append, until=-1.0)) == []
    assert said == ["out of time before 32k", "out of time before hops"]
    assert list(ring_plan.cases_of("32k")(FakeTeam(), ORIGIN, -1.0, said.append)) == [] and "N=48" in said[-1]
    monkeypatch.setattr(OnCpu, "__init__", lambda self: setattr(self, "size", 1))
    assert list(ring_plan.RingPart(("32k",)).record(say=said.append)) == [] and "two GPUs or more" in said[-1]


# --- what is compared -----------------------------------------------------------------------------------------


def test_every_candidate_is_a_kernel_that_there_is_and_has_rows_of_its_own():
    whos = {who for cases in ring_plan.CASES.values() for case in cases for who in case.who}
    for kernel in {who.kernel for who in whos if who.kernel}:
        assert fingerprint.source_files("02_fa2_cuda" if kernel == ONE.kernel else "04_ring", kernel), kernel
    assert all(str(a) != str(b) for a in whos for b in whos if a is not b)
    assert ULYSSES.strategy == "ulysses" and FETCH.strategy is None
    merging, handed = {"layout", "merge", "merge_kernels"}, {"block", "comm", "side"}
    for who, files in {
        FETCH: {"ring", "fetch"} | merging | handed, RELAY: {"ring", "relay"} | merging | handed,
        STAR: {"lesson_4_star", "team", "cuts", "block"} | merging,
        ULYSSES: {"lesson_5_ulysses", "team", "block", "layout"},
    }.items():  # fmt: skip
        assert {path.stem for path in fingerprint.source_files("04_ring", who.kernel)} == files
    assert not fingerprint.source_files("04_ring", "lesson_4_star") and QUERY_PARALLEL.passes == ("fwd", "fwd+bwd")
    plain = Counter((case.point, case.layout, who) for n in ring_plan.ALL for case in ring_plan.CASES.get(n, ())
                    for who in case.who if not who.options and who != ONE)  # fmt: skip
    assert set(plain.values()) == {1}, "two rows with the same subject and setting in one run"


def test_the_plan_has_every_part_once_and_what_matters_most_first():
    assert sorted(ring_plan.NAMES) == sorted([*ring_plan.CASES, *ring_plan.PARTS])
    assert plans.PLANS["ring"] == (ring_plan.RingPart(ring_plan.ALL),) and "1m" not in ring_plan.ALL
    assert ring_plan.ALL[:5] == ("32k", "8k", "hops", "trace", "128k")


def test_all_that_is_compiled_ahead_is_called(monkeypatch):
    called = []

    class Block:
        @staticmethod
        def forward(q, k, v, **options):
            called.append(("carried" if "out" in options else "forward", q.shape[1], q.shape[2], options["causal"]))
            return Carrying.forward(q, k, v, **options)

        @staticmethod
        def backward(*tensors, **options):
            called.append(("backward", tensors[0].shape[1], tensors[0].shape[2], options["causal"]))

    monkeypatch.setattr(ring_plan, "Hopper", lambda persistent, deterministic: Block)
    monkeypatch.setattr(steps, "step03_triton", Block, raising=False)
    part = ring_plan.RingPart(("strategies", "ablations"))
    assert Counter(job[0] for job in part.jobs()) == {"hopper": 4, "stage 03": 2, "decode": 1}
    assert {job[0] for job in ring_plan.RingPart(("32k",)).jobs()} == {"hopper"}
    for job in (("hopper", True, False), ("stage 03", False), ("decode",)):
        part.compile(*job)
    heads = [("forward", 8), ("backward", 8), ("forward", 32), ("backward", 32)]
    assert called[:8] == [(*one, 256, True) for one in heads * 2]
    carrying = [(name, h) for h in (8, 32) for name in ("forward", "carried", "backward")]
    assert called[8:] == [(*one, 256, False) for one in carrying] + [("forward", h, 1, False) for h in (8, 32)]


def test_memory_of_a_backward_by_hand():
    point = grid.Point(1, 4, 64, 8, True, 2)
    q, kv = 4 * 16 * 8 * 2, 2 * 2 * 16 * 8 * 2  # shards of 4 ranks, in 16 bits
    assert ring_plan.predicted_fetch(point, 4) == 4 * q + 7 * kv
    assert ring_plan.predicted_fetch(point, 2) == 2 * (4 * q + 4 * kv)  # nothing but the kept K and V is needed
    assert ring_plan.predicted(ring_plan.CASES["32k"][0], RELAY, "fwd+bwd", 4) is None
    assert ring_plan.predicted(ring_plan.FEW, STAR, "fwd", 4) is None


# --- tables ---------------------------------------------------------------------------------------------------


def made(case, who, ms, pass_="fwd", n_gpus=2, run="r1", **more):
    found = {"error": 0.0, "peak": 10**6, "shared": 2 * 10**6, "sent": 5 * 10**6}
    row = ring_plan.row_of(
        case, who, pass_, [ms, ms, ms, ms, 1.5 * ms], 1, found, ORIGIN | {"n_gpus": n_gpus, "run": run}
    )
    return row | more


def hop(transport, nbytes, ms, **more):
    row = {**ORIGIN, **grid.Point(1, 1, nbytes // 256, 128).sizes, **grid.HOW, "pass": "copy", "dtype": "bf16"}
    row |= {"stage": None, "kernel": None, "peer": "copy", "source": None, "options": {"transport": transport}}
    return row | ring_plan.speed([ms] * 5, 20) | {"tflops": 0.0, "error": 0.0} | more


LARGE = ring_plan.CASES["32k"][0]


def test_the_table_of_speed_compares_within_one_race():
    contiguous = ring_plan.CASES["32k"][3]
    race = [made(LARGE, ONE, 20.0), made(LARGE, RELAY, 12.5), made(LARGE, FETCH, 10.0), made(LARGE, PEERS[0], 16.0)]
    later = [made(contiguous, ONE, 30.0), made(contiguous, FETCH, 20.0), made(LARGE, turned(FETCH, dkv="fp32"), 1.0)]
    other = [
        made(LARGE, FETCH, 99.0, run="r2"),
        made(ring_plan.CASES["8k"][0], GRAPH, 1.0),
        made(LARGE, RELAY, 8.0, n_gpus=4),
    ]
    other += [made(LARGE, ONE, 40.0, n_gpus=4), made(LARGE, FETCH, 20.0, n_gpus=4)]
    other.append(made(LARGE, FETCH, 77.0, gpu="NVIDIA H100 80GB HBM3"))
    head, *lines = ring_report.speed(race + later + other)
    assert head == ["GPUs", "computed", "Hk", "by", "8k", "32k"]
    found = {(line[0], line[1], line[3]): line[4:] for line in lines}
    tflops = LARGE.point.flops("fwd") / 2 / 10e-3 / 1e12
    assert found["2 H200", "fwd, causal", "fetch"] == ["–", f"10 to 15 (1.00, {tflops:.0f})"]
    assert "(0.80, " in found["2 H200", "fwd, causal", "relay"][1]
    assert "(0.62, " in found["2 H200", "fwd, causal", PEERS[0].peer][1]
    assert found["2 H200", "fwd, causal, contiguous", "fetch"][1].startswith("20 to 30 (0.75, ")
    assert found["2 H200", "fwd, causal", "fetch, graph"][0].startswith("1 to 1.5 (")
    assert found["4 H200", "fwd, causal", "relay"]
    assert "(0.50, " in found["4 H200", "fwd, causal", "fetch"][-1]
    assert lines[0][:5] == ["2 H100", "fwd, causal", "32", "fetch", "–"] and lines[0][5].startswith("77 to ")
    assert [line[3] for line in lines][1:5] == ["one GPU", "fetch", "fetch, graph", "relay"]
    assert not ring_report.speed([made(LARGE, ONE, 1.0, n_gpus=1)])


def test_the_table_of_strategies_has_time_memory_and_bytes():
    strategies = ring_plan.CASES["strategies"][0]
    found = [made(strategies, who, 2.0 + n) for n, who in enumerate(STRATEGIES)]
    found += [made(ring_plan.FEW, STAR, 0.05), made(strategies, ULYSSES, 9.0, "fwd+bwd")]
    head, *lines = ring_report.strategies(found)
    assert head[-1] == "32k" and lines[0] == [
        "2 H200",
        "fwd, causal",
        "32",
        "query_parallel",
        "layout not striped",
        "2 / 3 / 5",
    ]
    assert [line[3] for line in lines] == ["query_parallel", "star", "ulysses", "ring, fetch", "ring, relay", "ulysses"]
    assert ring_report.token(found)[1:] == [["2 H200", "128k", "8", "star", "50", "5"]]


def of_one_gpu():
    """Blocks as fast as 100 TFLOP/s at all sizes."""
    plain = dict(n_gpus=1, layout=None, kernel="fwd_8_hopper", tflops=100.0)
    small = replace(LARGE, point=grid.Point(1, 16, 4096, 128))
    sizes = itertools.product((False, True), ("fwd", "bwd"))
    return [made(small, ONE, 1.0, **plain) | {"causal": causal, "pass": pass_} for causal, pass_ in sizes]


FREE = [hop(t, n, 1e3 * (n / 1e15 + 1e-9)) for t in simulate.TRANSPORTS for n in (4096, 2**20, 2**28)]


def test_predictions_stand_beside_what_was_measured():
    seconds = LARGE.point.flops("fwd") / 2 / 100e12
    merged = 3 * 32 * 16384 * 128 * 2 / 4.8e12  # two parts of out read and one written, with an H200's memory
    found = of_one_gpu() + FREE + [made(LARGE, FETCH, 1e3 * seconds), made(LARGE, RELAY, 2e3 * seconds, n_gpus=4)]
    head, line = ring_report.predictions(found)  # there are no hops of four GPUs
    assert head[-1] == "32k" and line == [
        "2 H200",
        "fwd, causal",
        "32",
        "fetch",
        f"{1e3 * (seconds + merged):.3g} / {1e3 * seconds:.3g} (+0%)",
    ]
    found.append(made(LARGE, FETCH, 1e3 * seconds, "fwd+bwd"))
    assert ring_report.predictions(found)[2][-1].endswith("(+250%)")
    without = [row for row in found if row["pass"] != "bwd"]
    assert len(ring_report.predictions(without)) == 2, "a forward is predicted without rows of backwards"
    assert ring_report.predictions([row for row in found if row["n_gpus"] > 1]) == []
    elsewhere = [row | {"gpu": "NVIDIA H100 80GB HBM3"} for row in found if row["n_gpus"] == 1]
    assert ring_report.predictions(elsewhere + [row for row in found if row["n_gpus"] > 1]) == []


def test_blocks_are_not_faster_than_one_gpu_while_all_compute():
    """Half as fast while all GPUs compute: 50 TFLOP/s, and so twice the time. In a causal block as before."""
    slow = replace(LARGE, point=replace(LARGE.point, causal=False))
    ms = 1e3 * slow.point.flops("fwd") / 50e12
    together = [made(slow, ONE, ms), made(slow, ONE, 3 * ms, "fwd+bwd")]
    speeds = ring_report.speeds([*of_one_gpu(), *together], 2)
    assert speeds["fwd", False] == [(4096**2, pytest.approx(50e12)), (32768**2, pytest.approx(50e12))]
    assert speeds["bwd", False][-1] == (32768**2, pytest.approx(50e12 * 2.5 / 2))
    assert speeds["fwd", True] == [(4096**2, 100e12)]
    # Of three races at one size the median counts; on longer sequences clocks may be lower still.
    longer = replace(slow, point=replace(slow.point, N=131072))
    together += [made(slow, ONE, 0.9 * ms), made(slow, ONE, 2 * ms), made(longer, ONE, 20 * ms)]
    points = ring_report.speeds([*of_one_gpu(), *together], 2)["fwd", False]
    assert [n for n, _ in points] == [4096**2, 32768**2, 131072**2]
    assert [speed for _, speed in points] == pytest.approx([50e12, 50e12, 40e12])


def test_what_was_not_hidden_is_added_to_a_prediction():
    """Hops of 16 ms a shard of K and V, which a block of 22 ms hides. The profiler has seen a quarter hidden."""
    hops = [hop("relay", n, 1e3 * n / (2**28 / 16e-3)) for n in (4096, 2**28)]
    plain, traced = made(LARGE, RELAY, 60.0), made(LARGE, turned(RELAY, profiler=True), 60.0, hidden=0.25)
    other = [made(LARGE, turned(FETCH, profiler=True), 60.0, hidden=0.9)]
    other += [made(LARGE, turned(RELAY, profiler=True), 60.0, n_gpus=4, hidden=0.9)]
    before, after = (
        float(ring_report.predictions([*of_one_gpu(), *hops, plain, *more])[1][-1].split()[0])
        for more in (other, [traced, *other])
    )
    assert after - before == pytest.approx(0.75 * 16, abs=0.2)
    both = made(LARGE, turned(RELAY, profiler=True), 60.0, "fwd+bwd", hidden=0.8)
    assert ring_report.hidden([traced, both, *other], plain) == {"fwd": 0.25, "bwd": 0.8}


def test_the_price_of_the_order_is_measured_in_the_ring():
    changes = [
        made(LARGE, turned(FETCH, changed="nothing"), 7.0),
        made(LARGE, turned(FETCH, changed="nothing"), 32.0, "fwd+bwd"),
        made(LARGE, turned(FETCH, deterministic=False), 27.0, "fwd+bwd"),
        made(LARGE, turned(RELAY, changed="nothing"), 99.0, "fwd+bwd"),
    ]
    assert ring_report.price_of_the_order(changes, 2) == pytest.approx(25 / 20)
    assert ring_report.price_of_the_order(changes[:2], 2) == ring_report.price_of_the_order(changes, 4) == 1.0
    fetch = ring_report.machines([*of_one_gpu(), *FREE, *changes], "NVIDIA H200", 2)["fetch"]
    assert (fetch.ordered, fetch.memory) == (pytest.approx(1.25), 4.8e12)


def test_the_tables_of_changes_trace_and_hops():
    found = [made(LARGE, turned(FETCH, changed="nothing"), 4.0), made(LARGE, turned(FETCH, overlap=False), 5.0)]
    found += [made(LARGE, turned(RELAY, persistent=True), 5.0)]
    traced = made(LARGE, turned(RELAY, profiler=True), 4.0, hidden=0.876, idle=0.0123, launches=33.0)
    found += [traced, hop("fetch", 2**20, 0.01), hop("relay", 4096, 0.025)]
    assert ring_report.changes(found)[1:] == [
        ["2 H200", "fetch", "as it is", "4 (1.000)", "–"], ["2 H200", "fetch", "no overlap", "5 (1.250)", "–"],
        ["2 H200", "relay", "kernel persistent for short tiles", "5", "–"],
    ]  # fmt: skip
    assert ring_report.trace(found)[1] == ["2 H200", "fwd, causal", "32", "relay", "4", "88%", "1.2%", "33"]
    assert ring_report.hops(found)[1:] == [["2 H200", "4 KiB", "–", "0.164 (25)"], ["2 H200", "1 MiB", "105 (10)", "–"]]
    every = {
        ring_report.changed(made(LARGE, who, 1.0))
        for who in (*ring_calls.ABLATIONS, ring_calls.WATCHED, ring_calls.UNWATCHED)
    }
    former = {"persistent=False"}  # in the rows of a run in which fetch's kernel was persistent
    assert every == set(ring_report.CHANGES) - former
    assert {ring_report.who(made(LARGE, one, 1.0)) for one in STRATEGIES} == set(ring_report.LIMITS)


def test_rows_of_the_persistent_kernel_say_so():
    """Of a run in which it was the default over fetch, and could be turned off; and of one in which it is not."""
    changes = [dict(changed="nothing"), dict(overlap=False), dict(persistent=False), dict(block="stage 03")]
    rows = [made(LARGE, turned(FETCH, **change), 4.0 + n) for n, change in enumerate(changes)]
    rows += [made(LARGE, turned(RELAY, changed="nothing"), 8.0), made(LARGE, turned(RELAY, persistent=True), 9.0)]
    assert [line[1:4] for line in ring_report.changes(rows)[1:]] == [
        ["fetch", "as it is, kernel persistent", "4 (1.000)"],
        ["fetch", "no overlap, kernel persistent", "5 (1.250)"],
        ["fetch", "kernel not persistent", "6 (1.500)"], ["fetch", "stage 03's block", "7 (1.750)"],
        ["relay", "as it is", "8 (1.000)"], ["relay", "kernel persistent for short tiles", "9 (1.125)"],
    ]  # fmt: skip
    later = [made(LARGE, turned(FETCH, changed="nothing"), 3.0, run="r2") for _ in range(9)]
    later += [made(LARGE, turned(FETCH, persistent=True), 3.3, run="r2")]
    assert [line[2:4] for line in ring_report.changes(rows + later)[1:]] == [
        ["as it is", "3 (1.000)"], ["kernel persistent for short tiles", "3.3 (1.100)"],
    ]  # fmt: skip


def test_tables_stand_in_readme_and_in_the_notebook():
    found = [hop("fetch", 2**20, 0.01)]
    text = "<!-- ring hops -->\nold\n<!-- /ring -->\n<!-- ring speed -->\nold\n<!-- /ring -->\n"
    filled = report.render(text, found)
    table = "| GPUs | message | fetch | relay |\n| --- | --- | --- | --- |\n| 2 H200 | 1 MiB | 105 (10) | – |"
    assert f"<!-- ring hops -->\n{table}" in filled
    assert (
        "NVIDIA H200, driver 580" in filled and f"<!-- ring speed -->\n{report.EMPTY}" in filled and "old" not in filled
    )
    assert ring_report.TABLES.keys() == ring_report.NOTES.keys()
    assert ring_report.shown("hops", found).startswith(
        "GPUs    message  fetch     relay\n2 H200  1 MiB    105 (10)  –\n\nGB/s"
    )
    for name in ring_report.TABLES:
        assert ring_report.shown(name, of_one_gpu()).startswith("Not recorded yet.")
    assert "105 GB/s" in report.line(found[0]) and "causal, zigzag:" in report.line(made(LARGE, FETCH, 1.0))


def test_rows_of_several_gpus_are_read_and_shown_apart(tmp_path):
    alone, together = of_one_gpu()[0], made(LARGE, ONE, 1.0)
    rows.append([alone | {"reps": 30}, together], tmp_path)
    assert [row["n_gpus"] for row in rows.read(tmp_path)] == [1]
    assert rows.read(tmp_path, several_gpus=True) == [together]
    assert report.select([alone, together], "pass=fwd") == [alone]
    assert report.select([alone, together], "pass=fwd n_gpus=2") == [together]


def test_the_command_writes_rows_and_the_record(tmp_path, monkeypatch):
    row = made(LARGE, FETCH, 1.0)
    said = "left out: [kernel.cu] " + "a long reason, " * 20

    def record_parts(parts, say, **options):
        say(said)
        yield from (row, {"kind": "trace", **ORIGIN, "calls": []})

    monkeypatch.setattr(engine, "name", "cuda")
    monkeypatch.setattr(plans, "record_parts", record_parts)
    done = CliRunner().invoke(app, ["bench", "--plan", "ring-trace", "--out", str(tmp_path)])
    assert done.exit_code == 0 and said.strip() in done.output, done.output
    assert rows.read(tmp_path, several_gpus=True) == [row] and rows.read_record("trace", folder=tmp_path)["calls"] == []
    assert "kind" not in rows.read_record("trace", folder=tmp_path)
