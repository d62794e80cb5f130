"""The measuring tools, on the CPU: costs worked by hand, rows, hashes, the order of calls, the report."""

import json
import math
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import typer

from reference import attention, error
from steps import catalogue, engine
from steps.bench import (
    cost,
    fingerprint,
    gpu_check,
    grid,
    launch_cost,
    peers,
    plans,
    plots,
    profile,
    report,
    resources,
    rows,
    sign,
    timing,
)
from support import sanitized_kernels

STAGE_02 = rows.ROOT / "steps" / "step02_fa2_cuda"


def row(**changes):
    """A valid row of a kernel, with some fields changed."""
    good = dict(
        run="r1", commit="abc", date="2026-01-31", gpu="NVIDIA H200", n_gpus=1, driver="580", cuda="13.0",
        torch="2.11.0", triton="3.6.0", stage="01_fa1_numba", kernel="fwd_0_scalar", peer=None, source="0" * 12,
        dtype="bf16", B=1, H=2, Hk=2, N=512, Nk=512, D=64, causal=False, layout=None, options={}, timing="interleaved",
        clock_mhz=None, watts=None, ms_median=2.0, ms_p20=1.5, ms_p80=2.5, reps=30, tflops=3.0, error=1e-3,
    )  # fmt: skip
    return {**good, "pass": "fwd", **changes}


def peer_row(**changes):
    return row(stage=None, kernel=None, source=None, **{"peer": "sdpa-flash", **changes})


def of_02(kernel="fwd_5_fa2", **changes):
    return row(stage="02_fa2_cuda", kernel=kernel, **changes)


def exit_code(main, **options):
    """Of a command that is called as a function."""
    try:
        main(**options)
    except typer.Exit as end:
        return end.exit_code
    return 0


# --- cost ---------------------------------------------------------------------------------------------------


def test_operations_bytes_and_rates_worked_by_hand():
    assert cost.flops(2, 3, 10, 4) == 4 * 2 * 3 * 10 * 10 * 4
    assert cost.flops(2, 3, 10, 4, Nk=5) == 4 * 2 * 3 * 10 * 5 * 4
    assert cost.flops(1, 1, 8, 2, causal=True) == 256
    assert cost.flops(1, 1, 8, 2, pass_="bwd") == 1280
    assert cost.flops(1, 1, 8, 2, pass_="fwd+bwd") == 1792
    # q, k, v, out: 4 x 10 x 4 elements of 2 bytes; lse: 10 of 4.
    assert cost.compulsory_bytes(1, 1, 10, 4, dtype="bf16") == 4 * 80 + 40
    assert cost.compulsory_bytes(1, 1, 10, 4, dtype="bf16", pass_="bwd") == 8 * 80 + 40
    assert cost.compulsory_bytes(1, 1, 10, 4, dtype="bf16", pass_="fwd+bwd") == 12 * 80 + 80
    assert cost.compulsory_bytes(1, 4, 10, 4, Hk=2, dtype="fp32") == (4 + 2 + 2 + 4) * 160 + 160
    assert cost.compulsory_bytes(1, 1, 10, 4, Nk=5, dtype="fp64") == 2 * 320 + 2 * 160 + 80
    h200 = cost.GPUS["NVIDIA H200"]
    assert cost.peak_tflops(h200, "fp32") == 66.9 and cost.ridge(h200, "bf16") == pytest.approx(206.1, abs=0.1)
    assert all(name == gpu.name and gpu.multiprocessor for name, gpu in cost.GPUS.items())
    with pytest.raises(ValueError, match="bf16"):
        cost.peak_tflops(cost.GPUS["Tesla T4"], "bf16")


def test_shared_memory_and_registers_of_a_tile():
    # FlashAttention-2 on Hopper, 128 x 128, D = 128, bf16, two stages of K and V: 32 + 4 x 32 KB.
    assert cost.shared_bytes(128, 128, 128, "bf16", stages=2) == 160 * 1024
    assert cost.shared_bytes(16, 32, 64, "fp32", tiles="QKVOS") == 4 * (16 * 64 * 2 + 32 * 64 * 2 + 16 * 32)
    assert cost.shared_bytes(16, 32, 64, "bf16", tiles="OS") == 4 * (16 * 64 + 16 * 32)
    # O 64, S 64, P 32 registers for each of 256 threads.
    assert cost.accumulator_registers(128, 128, 128, "bf16", threads=256) == 160
    assert cost.accumulator_registers(128, 128, 128, "fp32", threads=256) == 128


@pytest.mark.parametrize(
    "block, expected",
    [
        (dict(threads=1024), (2, "threads", 1.0)),
        (dict(threads=32), (32, "blocks", 0.5)),
        (dict(threads=128, shared=113 * 1024), (2, "shared memory", 0.125)),  # each takes 1 KB more: 2 x 114 = 228
        (dict(threads=128, shared=113 * 1024 + 1), (1, "shared memory", 0.0625)),
        (dict(threads=128, shared=227 * 1024 + 1), (0, "shared memory", 0.0)),  # more than a block may have
        (dict(threads=128, shared=46336, registers=168), (3, "registers", 0.1875)),  # 65536 / (128 * 168) = 3.05
        (dict(threads=256, registers=129), (1, "registers", 0.125)),  # 136 after rounding up
        (dict(threads=32, registers=96), (20, "registers", 0.3125)),  # 5 in each of 4 register files, not 21
    ],
)
def test_occupancy_names_the_resource_that_runs_out(block, expected):
    assert cost.occupancy((9, 0), **block) == cost.Occupancy(*expected)
    with pytest.raises(ValueError, match="compute capability"):
        cost.occupancy((1, 0), **block)


# --- timing and peers ---------------------------------------------------------------------------------------


def test_candidates_take_turns_and_each_comes_first():
    called = []
    calls = {name: lambda name=name: called.append(name) for name in "abc"}
    times = timing.interleaved(calls, reps=4, warmup=2)
    assert "".join(called) == "abcbcacababcbcacab" and [t.reps for t in times.values()] == [4] * 3


def test_times_are_milliseconds_without_the_warm_up(monkeypatch):
    now = iter([0.0, 100.0, 200.0, 200.004, 300.0, 300.006, 400.0, 400.005])
    monkeypatch.setattr(timing.time, "perf_counter", lambda: next(now))
    assert timing.interleaved({"a": lambda: None}, reps=3, warmup=1)["a"].ms_median == pytest.approx(5.0)
    assert timing.summary([float(i) for i in range(100, -1, -1)]) == timing.Timing(50.0, 20.0, 80.0, 101)


def test_in_a_group_the_slowest_rank_counts(monkeypatch):
    def all_reduce(mine, op):
        assert op == torch.distributed.ReduceOp.MAX
        mine.copy_(torch.maximum(mine, torch.tensor([2.0, 2.0], dtype=torch.float64)))

    monkeypatch.setattr(timing.dist, "is_initialized", lambda: True)
    monkeypatch.setattr(timing.dist, "all_reduce", all_reduce)
    assert timing._slowest_rank([1.0, 3.0], "cpu") == [2.0, 3.0]


@pytest.mark.gpu
def test_events_measure_the_gpu_and_not_the_launch():
    x = torch.randn(4096, 4096, device="cuda")
    few, many = (lambda: x @ x), (lambda: [x @ x for _ in range(8)])
    times = timing.interleaved({"few": few, "many": many}, device="cuda")
    assert 5 < times["many"].ms_median / times["few"].ms_median < 11


@pytest.mark.skipif(bool(catalogue.unavailable("03")), reason="there is no Triton")
def test_the_recorded_launch_takes_at_most_15_microseconds():
    recorded = rows.read_record("host")["microseconds"]
    assert 0 < recorded["02 launch.forward"] <= 15
    assert set(recorded) == set(launch_cost.calls(*torch.zeros(3, 1, 1, 1, 1)))


def test_peers_compute_attention_and_never_fall_back():
    q, k, v = (torch.randn(1, 4, 40, 32) for _ in range(3))
    for peer in (peers.PEERS["sdpa-flash"], peers.PEERS["sdpa-math"], peers.matrix_form):
        for heads in (4, 2):
            want, _ = attention.forward(q, k[:, :heads], v[:, :heads], causal=True)
            assert (peer(q, k[:, :heads], v[:, :heads], True) - want).abs().max() < 1e-5
    with pytest.raises(RuntimeError):
        peers.PEERS["sdpa-cudnn"](q, k, v)


@pytest.mark.gpu
@pytest.mark.parametrize("name", peers.PEERS)
def test_peers_on_the_gpu(name):
    inputs = grid.make_inputs(grid.Point(1, 2, 100, 64, causal=True), "bf16", "cuda")
    truth = grid.sample_truth(inputs, True)
    for pass_, names in grid.RESULTS.items():
        got = dict(zip(names, grid.Beside(name).call(inputs, True, pass_)(), strict=True))
        assert grid.sample_error(got, truth) < 0.05
    if name in ("sdpa-flash", "sdpa-cudnn"):
        with pytest.raises(RuntimeError):
            peers.PEERS[name](*(x.float() for x in inputs[1:]))


# --- rows ---------------------------------------------------------------------------------------------------


def test_rows_survive_writing_and_reading(tmp_path):
    written = [row(options={"window": 128}), peer_row(), row(gpu="Tesla T4", timing="sustained", watts=70.5)]
    files = rows.append(written, tmp_path)
    assert {file.name for file in files} == {"nvidia-h200.jsonl", "tesla-t4.jsonl"}
    assert rows.read(tmp_path) == written and rows.read(tmp_path / "missing") == []
    assert rows.validate(row() | rows.provenance("cpu", commit="abc123"))["commit"] == "abc123"
    with files[0].open("a") as file:
        file.write(json.dumps({name: value for name, value in row().items() if name != "options"}))
    with pytest.raises(ValueError, match=r"h200\.jsonl:3: .*options is missing"):
        rows.read(tmp_path)


@pytest.mark.parametrize(
    "changes, word",
    [
        ({"extra": 1}, "extra is not a field"),
        ({"N": 512.0}, "N is 512.0"),
        ({"Nk": True}, "Nk is True"),
        ({"causal": 0}, "causal is 0"),
        ({"error": math.nan}, "error is nan"),
        ({"options": None}, "options is None"),
        ({"pass": "forward"}, "pass is"),
        ({"stage": "step01_fa1_numba"}, "rule: stage like"),
        ({"peer": "sdpa-math"}, "either a peer, or stage"),
        ({"source": None}, "either a peer, or stage"),
        ({"ms_p20": 2.1}, "ms_p20 <= ms_median"),
        ({"reps": 29}, "reps >= 30"),
        ({"tflops": 0.0}, "tflops > 0"),
        ({"error": -1}, "error >= 0"),
        ({"pass": "matmul"}, "the pass matmul"),
    ],
)
def test_a_bad_row_is_refused(tmp_path, changes, word):
    with pytest.raises(ValueError, match=re.escape(word)):
        rows.append([row(**changes)], tmp_path)
    assert not list(tmp_path.iterdir())


def test_rows_with_a_switch_turned_are_read_only_when_asked_for(tmp_path):
    """With all of their run: what stood beside them would replace what others were compared with."""
    turned = row(kernel="fwd_0_scalar:LAZY=0", run="r2")
    rows.append([row(run="r1"), row(run="r2"), peer_row(run="r2"), turned], tmp_path)
    assert [r["run"] for r in rows.read(tmp_path)] == ["r1"] and rows.read(tmp_path, switched=True)[-1] == turned


def test_the_latest_row_wins_and_a_peer_s_of_the_runs_that_measured_most():
    others = [peer_row(), row(options={"window": 64}), row(timing="sustained"), row(Nk=256)]
    assert rows.latest([row(run="r1"), *others, row(run="r2")]) == [row(run="r2"), *others]
    beside_two = [row(run="r1"), row(kernel="other", run="r1"), peer_row(run="r1")]
    again = [{**one, "run": "r2"} for one in beside_two]
    beside_one = [row(kernel="third", run="r3"), peer_row(run="r3")]
    assert rows.latest(beside_two + again + beside_one) == [*again, beside_one[0]]


# --- fingerprint and sign -----------------------------------------------------------------------------------

PYTHON = '''"""What it does."""
def f(x):  # why
    """Says so."""
    if x:
        y = f"{x} {{}}"
        y += "#1"
    return y
'''
CUDA = '// says\nint f(int x) { /* why\n */ return x + 1; }  const char *s = "a // b";\n'


@pytest.mark.parametrize(
    "code, text, old, new, same",
    [
        (fingerprint.python_code, PYTHON, "  # why", "  # because of this", True),
        (fingerprint.python_code, PYTHON, '"""Says so."""', '"""Says it better."""', True),
        (fingerprint.python_code, PYTHON, "def f(x):", "\n\ndef f( x ):", True),
        (fingerprint.python_code, PYTHON, "    return y", "        return y", False),
        (fingerprint.python_code, PYTHON, "#1", "#2", False),
        (fingerprint.cuda_code, CUDA, "// says", "// says more\n// than one line", True),
        (fingerprint.cuda_code, CUDA, "why", 'it\'s "why"', True),
        (fingerprint.cuda_code, CUDA, "x + 1", "x+1", True),
        (fingerprint.cuda_code, CUDA, "x + 1", "x + 2", False),
        (fingerprint.cuda_code, CUDA, "a // b", "a // c", False),
    ],
)
def test_only_code_counts(code, text, old, new, same):
    assert old in text and (code(text.replace(old, new)) == code(text)) == same
    # The same text for every version of Python.
    assert fingerprint.python_code(PYTHON) == 'deff(x):;»ifx:;»y=f"{x}{}";y+="#1";«returny;«'


@pytest.mark.parametrize(
    "stage, kernel, files",
    [
        ("01_fa1_numba", "bwd_2_registers", {"bwd_2_registers.py", "fwd_2_registers.py", "fwd_0_published.py"}),
        ("02_fa2_cuda", "fwd_8_hopper:LAZY=0", {"fwd_8_hopper.cu", "ptx.cuh", "wgmma.py"}),
        ("02_fa2_cuda", "fwd_0_scalar+bwd_0_scalar", {"fwd_0_scalar.cu", "bwd_0_scalar.cu", "ptx.cuh"}),
        ("02_fa2_cuda", "fwd_5_fa2+bwd_9_none", set()),
    ],
)
def test_a_kernel_s_files_are_its_own_and_what_they_include_or_import(stage, kernel, files):
    assert {path.name for path in fingerprint.source_files(stage, kernel)} == files


def test_a_hash_follows_the_launch_at_the_row_s_own_sizes(monkeypatch):
    before = {D: fingerprint.row_hash(of_02(D=D)) for D in (64, 128)}
    usual = fingerprint.launch.geometry

    def other_tile_for_64(stem, **how):
        return [(*rest, macros | ({"Br": 32} if how["D"] == 64 else {})) for *rest, macros in usual(stem, **how)]

    monkeypatch.setattr(fingerprint.launch, "geometry", other_tile_for_64)
    assert fingerprint.row_hash(of_02(D=64)) != before[64] != before[128] == fingerprint.row_hash(of_02(D=128))
    assert fingerprint.fresh([of_02(D=D, source=before[D]) for D in (64, 128)]) == [of_02(D=128, source=before[128])]
    assert fingerprint.code_hash("02_fa2_cuda", "fwd_5_fa2") not in before.values()


def test_a_launch_is_that_of_the_row_s_switches_and_gpu():
    sizes = dict(B=4, H=16, Hk=16, N=4096, Nk=4096, D=128)
    turned = fingerprint.launches(of_02("fwd_8_hopper:PERSISTENT=0", **sizes))
    ((_, blocks, threads, _, macros),) = turned["fwd_8_hopper"]
    assert (blocks, threads, macros["PERSISTENT"]) == (4 * 16 * 4096 // 128, 384, 0)
    small, large = (fingerprint.launches(of_02("bwd_1_fa2", **sizes, gpu=gpu)) for gpu in ("Tesla T4", "not listed"))
    assert small != large


def test_what_is_gone_or_has_changed_is_stale(monkeypatch):
    assert not fingerprint.is_stale(of_02(source=fingerprint.row_hash(of_02())))
    assert fingerprint.fresh([peer_row(), of_02()]) == [peer_row()] and fingerprint.is_stale(of_02())
    for gone in (of_02(D=7), of_02("fwd_9_none"), row(kernel="fwd_9_none"), row(stage="09_none")):
        assert fingerprint.row_hash(gone) is None and fingerprint.is_stale(gone)
    monkeypatch.setattr(resources, "sources", dict)
    with pytest.raises(RuntimeError, match="have changed"):
        resources.recorded()


def test_a_record_is_signed_only_if_it_was_fresh_and_launches_and_compiles_alike(monkeypatch):
    def record(**changes):
        return {name: of_02()[name] for name in sign.FIELDS} | changes

    cases = [
        (record(), None),
        (record(D=128), "other machine code"),  # compiled() below
        (record(D=96), "stale in the old tree, too"),
        (record(dtype="fp16"), "another launch"),
        (record(D=7), "other code"),
        (record(stage="03_triton"), "other code"),
    ]
    tried = [one for one, _ in cases]
    launched = [json.loads(json.dumps(fingerprint.launches(one))) for one in tried[:2]] + [None, {}, {}, {}]
    monkeypatch.setattr(sign, "inside", lambda tree, *_: (launched, {"fwd_5_fa2": tree}))
    monkeypatch.setattr(sign, "compiled", lambda text, macros, arch: text if ("D", "128") in macros else b"the same")
    assert sign.verdicts(tried, "old tree") == [reason for _, reason in cases]


@pytest.mark.compile
def test_machine_code_depends_on_code_and_macros_only():
    pytest.importorskip("cuda.core", reason="cuda.core is not installed")
    text = '__device__ int before[2] = {1, 2}; extern "C" __global__ void f(int* x) { x[0] = before[x[1]] + N; }'
    one, two = (sign.compiled(text, (("N", n),), "sm_80") for n in "12")
    reworded = "// says\n" + text.replace("before", "after")
    assert ".text.f" in one and one == sign.compiled(reworded, (("N", "1"),), "sm_80") != two
    assert one != sign.compiled(text.replace("{1, 2}", "{1, 3}"), (("N", "1"),), "sm_80")
    assert sign.compiled(text, (), "sm_80") is None and sign.compiled(None, (), "sm_80") is None


# --- measure and plans --------------------------------------------------------------------------------------


def matrix(q, k, v, *, causal=False):
    out, lse = attention.forward(q, k, v, causal=causal)
    return out.to(q.dtype), lse.float()


def matrix_backward(dout, q, k, v, out, lse, *, causal=False):
    return tuple(x.to(q.dtype) for x in attention.backward(dout, q, k, v, causal=causal))


def candidate(**changes):
    kernels = dict(stage="00_naive", fwd_kernel="fwd_1_matrix", bwd_kernel="bwd_1_matrix")
    return grid.Candidate(**{**kernels, "forward": matrix, "backward": matrix_backward, **changes})


SMALL = (grid.Point(2, 4, 20, 8, causal=True, Hk=2),)


def measured(candidates, points=SMALL, **options):
    """(rows, what was said)."""
    said = []
    how = dict(peers=("sdpa-math",), dtypes=("fp32",), device="cpu", warmup=0, commit="c")
    return list(grid.measure(candidates, grid=points, say=said.append, **{**how, **options})), said


def test_measure_yields_a_row_for_each_pass_with_the_peer_in_the_same_run():
    found, said = measured([candidate()], passes=("fwd", "bwd"))
    who = [("fwd_1_matrix", "fwd"), ("sdpa-math", "fwd"), ("bwd_1_matrix", "bwd"), ("sdpa-math", "bwd")]
    assert [(r["kernel"] or r["peer"], r["pass"]) for r in found] == who
    assert len({r["run"] for r in found}) == 1 and not said
    for r in found:
        assert r["error"] < 1e-5 and r["commit"] == "c" and r["timing"] == "interleaved"
        flops = cost.flops(2, 4, 20, 8, causal=True, pass_=r["pass"])
        assert r["tflops"] == pytest.approx(flops / (r["ms_median"] * 1e-3) / 1e12)


def test_keys_may_be_more_or_fewer_than_queries():
    points = [grid.Point(1, 2, 20, 8, Nk=30), grid.Point(1, 2, 20, 8, causal=True, Nk=30)]
    found, said = measured([candidate()], points)
    assert [(r["peer"], r["N"], r["Nk"]) for r in found] == [(None, 20, 30), ("sdpa-math", 20, 30), (None, 20, 30)]
    assert found[0]["tflops"] == pytest.approx(4 * 2 * 20 * 30 * 8 / found[0]["ms_median"] / 1e9)
    assert all(r["error"] < 1e-5 for r in found) and "as many queries as keys" in said[0]


@pytest.mark.parametrize("pass_, name", [("fwd", "forward"), ("bwd", "backward")])
def test_the_error_is_the_kernels_own(pass_, name):
    def off(*args, **options):
        first, *others = (matrix if name == "forward" else matrix_backward)(*args, **options)
        first[-1, -1, -1, -1] += 0.25
        return first, *others

    found, _ = measured([candidate(**{name: off})], passes=(pass_,))
    assert found[0]["error"] == pytest.approx(0.25, abs=1e-4) and found[1]["error"] < 1e-5


def test_who_cannot_take_part_is_left_out_with_a_reason_given_once():
    def broken(*args, **options):
        raise RuntimeError("out of paper\nsecond line")

    def nan(*args, **options):
        out, lse = matrix(*args, **options)
        return out * math.nan, lse

    wrong = {
        "take fp32": dict(dtypes=("bf16",)),
        "RuntimeError: out of paper": dict(forward=broken),
        "not finite": dict(forward=nan),
        "no kernel of this name": dict(fwd_kernel="fwd_9_none"),
    }
    for reason, changes in wrong.items():
        found, said = measured([candidate(**changes)], points=SMALL * 2, peers=())
        assert not found and len(said) == 1 and reason in said[0]
    assert "has no backward" in measured([candidate(backward=None)], passes=("bwd",))[1][0]


def test_who_is_too_slow_is_not_tried_at_larger_sizes():
    tried = []

    def slow(q, k, v, *, causal=False):
        tried.append(q.shape[2])
        return matrix(q, k, v, causal=causal)

    points = [grid.Point(1, 1, N, 8) for N in (16, 32, 8)]
    found, said = measured([candidate(forward=slow)], points, peers=(), limit_ms=0.0)
    assert not found and tried == [16, 16, 8, 8]
    assert "more than the limit" in said[0] and "too slow at a smaller size" in said[1]
    assert measured([candidate()], until=0.0)[0] == [], "no point is begun when the time is up"


def test_a_matrix_product_is_measured_with_every_group(monkeypatch):
    monkeypatch.setattr(peers, "MATMUL_SIZE", 48)
    monkeypatch.setattr(grid, "MATMUL_SIZE", 48)
    found, _ = measured([candidate()], points=SMALL * 2, peers=(), with_matmul=True)
    assert [r["kernel"] or r["peer"] for r in found] == ["fwd_1_matrix", "matmul"] * 2
    product = found[1]
    assert product["run"] == found[0]["run"] and [product[name] for name in ("N", "Nk", "D")] == [48] * 3
    assert product["tflops"] == pytest.approx(2 * 48**3 / product["ms_median"] / 1e9) and product["error"] < 1e-4


def test_inputs_are_random_and_repeatable():
    first, again = (grid.make_inputs(SMALL[0], "bf16", "cpu") for _ in range(2))
    assert all(torch.equal(a, b) for a, b in zip(first, again, strict=True))
    assert [tuple(x.shape) for x in first] == [(2, 4, 20, 8)] * 2 + [(2, 2, 20, 8)] * 2
    assert all(abs(x.float().std() - 1) < 0.1 for x in first) and not torch.equal(first[0], first[1])


def test_the_plan_names_rungs_and_peers_that_there_are():
    parts = [part for parts in plans.PLANS.values() for part in parts]
    for part in parts:
        assert set(part.peers) <= set(peers.PEERS) and set(part.dtypes) <= set(rows.DTYPES)
        assert {(p.B * p.N, p.H * p.D) for p in part.grid} == {(16384, 2048)}, "the papers'"
    for number, files in (("02", STAGE_02.glob("fwd_*.cu")), ("03", (STAGE_02.parent / "step03_triton").glob("fwd_*"))):
        of_stage = [part for part in parts if part.stage == number and "fwd" in part.passes]
        assert {rung for part in of_stage for rung in part.rungs} == {path.stem.split("_", 2)[2] for path in files}


def test_a_backward_is_measured_only_under_the_rung_that_owns_it():
    found = {c.fwd_kernel: c for c in plans.entrants("02")}
    assert found["fwd_5_fa2"].bwd_kernel == "bwd_1_fa2" and found["fwd_2_mma"].backward is None
    (scalar,) = plans.entrants("02", "scalar")
    assert scalar.dtypes == ["fp32"] and scalar.kernel("bwd") == "bwd_0_scalar"


def test_switches_are_the_macros_that_are_0_or_1_or_an_expression_unless_defined():
    shapes = "#ifndef A\n#define A 1\n", "#ifndef B  // why\n#define B 0\n", "#ifndef N\n#define N 2\n"
    text = "#endif\n".join([*shapes, "#ifndef WIDE\n#define WIDE (D > 1)\n"])
    assert plans.switches(text) == {"A": (0,), "B": (1,), "WIDE": (0, 1)}
    turned = list(plans.switched(candidate(stage="02_fa2_cuda", fwd_kernel="fwd_8_hopper")))
    assert {"fwd_8_hopper:PINGPONG=0", "fwd_8_hopper:LAZY=0", "fwd_8_hopper:LAZY=1"} <= {c.fwd_kernel for c in turned}
    for c in turned:
        ((name, value),) = re.findall(r"(\w+)=(\d)", c.fwd_kernel)
        assert c.forward.keywords == {"rung": "hopper", name: int(value)} and c.backward is None
        assert fingerprint.row_hash(of_02(c.fwd_kernel)) not in (None, fingerprint.row_hash(of_02("fwd_8_hopper")))


@pytest.mark.skipif(bool(catalogue.unavailable("02")), reason="stage 02 cannot run here")
def test_a_part_of_the_plan_gives_the_rows_of_its_rungs(monkeypatch):
    part = plans.Part(("scalar",), (grid.Point(1, 1, 40, 32),), ("fwd", "bwd"), ("fp32",), ("sdpa-math",))
    ahead = []
    monkeypatch.setattr(plans, "compile_ahead", ahead.extend)
    found = list(plans.record_parts([part, part], device=engine.device, commit="c", warmup=0, limit_ms=1e5))
    names = ["fwd_0_scalar", "sdpa-math", "bwd_0_scalar", "sdpa-math"]
    assert [r["kernel"] or r["peer"] for r in found] == names * 2 and all(r["error"] < 1e-4 for r in found)
    assert len(ahead) == 1
    plans._compile(ahead[0])


# --- report and plots ---------------------------------------------------------------------------------------

README = """# Title
<!-- results: gpu=nvidia-h200 pass=fwd dtype=bf16 D=64 causal=false -->
old
<!-- /results -->
<!-- ladder 02_fa2_cuda -->
old
<!-- /ladder -->
"""


def test_the_report_fills_readme_from_fresh_rows_only(tmp_path):
    folder, readme = tmp_path / "steps" / "step01_fa1_numba", tmp_path / "README.md"
    folder.mkdir(parents=True)
    (folder / "fwd_0_scalar.py").write_text("x = 1\n")
    readme.write_text(README)
    fresh = row(source=fingerprint.code_hash("01_fa1_numba", "fwd_0_scalar", tmp_path))
    others = ({"dtype": "fp32"}, {"options": {"window": 64}}, {"timing": "sustained"}, {"kernel": "fwd_1_warp"})
    found = [fresh | other | {"tflops": 888.0} for other in others]
    found += [fresh | dict(N=512, tflops=100.0), fresh | dict(N=1024, tflops=123.4)]
    # The peer's row at N = 1024 is of another run, and its row with another Nk of another setting.
    found += [peer_row(tflops=200.0), peer_row(N=1024, tflops=150.0, run="r2"), peer_row(tflops=400.0, Nk=9, D=80)]
    rows.append(found, tmp_path / "steps" / "bench" / "results")

    assert exit_code(report.main, check=True, root=tmp_path) == 1 and readme.read_text() == README
    assert exit_code(report.main, root=tmp_path) == 0 == exit_code(report.main, check=True, root=tmp_path)
    text = readme.read_text()
    assert "| 01 fwd_0_scalar | 100 | 123 | 50% | 1.0e-03 |\n| sdpa-flash | 200 | 150 | – | 1.0e-03 |" in text
    assert "Changed since it was measured, and not shown: 01 fwd_1_warp." in text
    assert not re.search("888|\nold\n", text) and f"<!-- ladder 02_fa2_cuda -->\n{report.EMPTY}" in text

    (folder / "fwd_0_scalar.py").write_text("x = 2\n")
    report.main(root=tmp_path)
    assert "and not shown: 01 fwd_0_scalar, 01 fwd_1_warp." in readme.read_text()
    with pytest.raises(ValueError, match="no such field: head"):
        report.render(README.replace("D=64", "head=64"), [])


def ladder_rows(tflops=50.0):
    """Rows of three rungs of stage 02, with their peers and a matrix product."""
    at = dict(N=4096, Nk=4096)
    return [
        of_02("fwd_0_scalar", tflops=4.0, dtype="fp32", **at),
        of_02("fwd_2_mma", tflops=tflops, D=128, **at),
        of_02("bwd_0_scalar", tflops=1.5, dtype="fp32", **at, **{"pass": "bwd"}),
        peer_row(**at, D=128, tflops=340.0),
        peer_row(N=8192, Nk=8192, D=8192, tflops=800.0, peer="matmul", **{"pass": "matmul"}),
    ]


def test_the_ladder_shows_each_rung_once_and_says_what_differs():
    more = [
        of_02("fwd_2_mma", N=4096, D=64, tflops=1.0),  # there is one with D=128
        of_02("fwd_2_mma", N=512, D=128, tflops=2.0),
        of_02("fwd_2_mma", N=4096, D=128, causal=True, tflops=3.0),
        row(stage="03_triton", kernel="fwd_0_fused", N=4096, D=128, tflops=5.0),
        peer_row(N=4096, D=64, tflops=6.0),
        of_02("fwd_2_mma", gpu="Tesla T4", N=4096, D=128, tflops=7.0),
        peer_row(N=4096, Nk=4096, D=128, tflops=9.0, run="another"),  # beside other kernels
    ]
    some = [*ladder_rows(), *more, *ladder_rows(), of_02("fwd_2_mma", N=4096, D=128, tflops=8.0, timing="sustained")]
    assert plots.ladder_numbers(more) is None and plots.ladder_numbers(some) == {
        "gpu": "NVIDIA H200",
        "matmul": 800.0,
        "fwd": {"rungs": [["scalar", 4.0, "fp32\nD=64"], ["mma", 50.0, ""]], "peers": {"sdpa-flash": 340.0}},
        "bwd": {"rungs": [["scalar", 1.5, "fp32\nD=64"]], "peers": {}},
    }


def test_the_picture_is_drawn_again_when_only_its_numbers_change(tmp_path, monkeypatch):
    monkeypatch.setattr(report, "fresh", lambda found, root: found)
    path = report.PICTURES["02_fa2_cuda"]
    readme, picture, results = (tmp_path / x for x in ("README.md", path, Path("steps/bench/results")))
    readme.write_text(README)
    rows.append(ladder_rows(), results)
    report.main(root=tmp_path)
    assert f"({path})" in readme.read_text() and not exit_code(report.main, check=True, root=tmp_path)
    rows.append(ladder_rows(tflops=60.0), results)  # README says the same, the picture does not
    assert exit_code(report.main, check=True, root=tmp_path) == 1
    report.main(root=tmp_path)
    assert report.ladder_in(picture)["fwd"]["rungs"][1][1] == 60.0
    monkeypatch.setattr(report, "fresh", lambda found, root: found[:1])
    report.main(root=tmp_path)
    assert not picture.exists() and "ladder.png" not in readme.read_text()


def test_the_ladders_peers_are_those_of_the_run_with_most_rungs():
    at = dict(N=4096, Nk=4096, D=128)
    first = [of_02("fwd_3_ldmatrix", tflops=60.0, **at), *ladder_rows()]
    later = [one | {"run": "r9"} for one in (of_02("fwd_7_roles", tflops=90.0, **at), peer_row(**at, tflops=999.0))]
    for found in (first + later, later + first):
        assert plots.ladder_numbers(found)["fwd"]["peers"] == {"sdpa-flash": 340.0}


def test_another_stage_has_a_ladder_of_its_own():
    both = [*ladder_rows(), *(one | {"run": "r3"} for one in ladder_rows())]
    for one in both[5:]:
        if one["stage"]:
            one |= {"stage": "03_triton", "kernel": one["kernel"].replace("scalar", "fused"), "tflops": 70.0}
    assert plots.ladder_numbers(both, "03_triton")["fwd"]["rungs"][0][:2] == ["fused", 70.0]
    assert plots.ladder_numbers(both)["fwd"]["rungs"][0][:2] == ["scalar", 4.0]
    with pytest.raises(ValueError, match="no rows of 03_triton"):
        plots.ladder(ladder_rows(), "03_triton")


def test_figures_show_every_number_and_mix_no_settings():
    some = [row(N=512), row(N=1024, tflops=4.0), peer_row(N=512), peer_row(N=1024)]
    lines = plots.speed_lines(some).axes[0].lines
    assert [line.get_label() for line in lines] == ["01 fwd_0_scalar", "sdpa-flash"]
    assert list(lines[0].get_ydata()) == [3.0, 4.0]
    for other in ({"causal": True}, {"options": {"window": 64}}, {"timing": "sustained"}):
        with pytest.raises(ValueError, match="one GPU, pass"):
            plots.speed_lines([row(), row(**other)])
    bars = plots.speed_bars([row(), peer_row(tflops=9.0)]).axes[0]
    assert [bar.get_width() for bar in bars.patches] == [3.0, 9.0]
    with pytest.raises(ValueError, match="one row for each"):
        plots.speed_bars(some)
    forward, backward = plots.ladder(ladder_rows()).axes
    assert [bar.get_height() for bar in forward.patches] == [4.0, 50.0] and forward.lines[0].get_ydata()[0] == 340
    assert [bar.get_height() for bar in backward.patches] == [1.5] and forward.get_ylim()[1] >= 800


def test_a_line_of_text_shows_the_speed_its_spread_and_the_error():
    assert report.line(row()).endswith("2 ms ±25.0%, 3 TFLOP/s, error 1e-03")


# --- gpu_check ----------------------------------------------------------------------------------------------

CLEAN = "========= COMPUTE-SANITIZER\n12 passed, 3 deselected in 9.1s\n========= ERROR SUMMARY: 0 errors\n"
NO_RACE = CLEAN.replace("ERROR SUMMARY: 0 errors", "RACECHECK SUMMARY: 0 hazards displayed (0 errors, 0 warnings)")
RACE = """========= COMPUTE-SANITIZER
========= Error: Race reported between Write access at attention_backward+0x430 in ptx.cuh:7
=========     and Read access at attention_backward+0x770 in bwd_2_wgmma.cu:55 [248 hazards]
4 passed
========= ERROR SUMMARY: 669 errors were not printed. Use --print-limit option to adjust the number of printed errors
========= RACECHECK SUMMARY: 1 hazard displayed (1 error, 0 warnings)
"""
HOST = """========= Host API memory access error at host access to 0x7f11cc884200 of size 33,408 bytes
=========     Uninitialized access to 0x7f11cc884200 on access by cudaMemcpy source
4 passed
========= ERROR SUMMARY: 1 error
"""
UNKNOWN = "========= Uninitialized __global__ memory read of size 4 bytes\n"
READER = "02_fa2_cuda/bwd_2_wgmma"


@pytest.mark.parametrize(
    "output, code, status",
    [
        (CLEAN, 0, "clean"),
        (NO_RACE, 0, "clean"),
        (CLEAN + "========= ERROR SUMMARY: 4 errors\n", 0, "problems"),
        (NO_RACE.replace("0 hazards displayed (0 errors, 0", "2 hazards displayed (0 errors, 2"), 0, "problems"),
        (CLEAN.replace("12 passed", "12 skipped"), 0, "nothing ran"),
        (CLEAN.replace("12 passed", "1 failed, 11 passed"), 1, "tests failed"),
        ("Segmentation fault", 139, "no summary"),
    ],
)
def test_a_sanitizer_is_clean_only_if_it_finished_and_tests_ran(output, code, status):
    assert gpu_check.verdict(gpu_check.parse_sanitizer(output), code) == status


@pytest.mark.parametrize(
    "tool, what, output, with_a_race, outcome",
    [
        ("initcheck", READER, HOST, "", {"status": "listed", "problems": 1}),  # a known report of a known kernel
        ("initcheck", READER, UNKNOWN + HOST, "", {"status": "problems"}),
        ("initcheck", "02_fa2_cuda/bwd_1_fa2", HOST, "", {"status": "problems"}),
        ("memcheck", READER, HOST, "", {"status": "problems"}),
        ("racecheck", READER, NO_RACE, RACE, {"planted": "seen"}),  # a planted race has to add a report
        ("racecheck", READER, NO_RACE, NO_RACE, {"planted": "not seen"}),
        ("racecheck", READER, RACE, RACE, {"planted": "not seen", "problems": 1, "passed": 4}),
        ("racecheck", READER, NO_RACE, "Traceback: it does not compile", {"planted": "failed"}),
    ],
)
def test_what_is_known_is_listed_and_what_is_planted_is_seen(monkeypatch, tool, what, output, with_a_race, outcome):
    def run(command, limit, **_):
        return 0, with_a_race if "--planted" in command else output, 1.0

    monkeypatch.setattr(gpu_check.shutil, "which", lambda *_, **__: "compute-sanitizer")
    monkeypatch.setattr(gpu_check, "run_limited", run)
    found = gpu_check.sanitize(tool, what, 300)
    assert found | outcome == found and ("planted" in found) == (tool == "racecheck")
    if output == RACE:  # without addresses and counts, which differ from run to run
        where = "Write access at attention_backward in ptx.cuh:7 and Read access at attention_backward in bwd_2_wgmma"
        assert found["reports"] == [f"Error: Race reported between {where}.cu:55"]


def test_a_time_limit_is_recorded_as_a_time_limit(monkeypatch):
    assert gpu_check.run_limited([sys.executable, "-c", "print('x'); import time; time.sleep(60)"], 0.5)[0] is None
    monkeypatch.setattr(gpu_check, "run_limited", lambda *_, **__: (None, CLEAN, 300.0))
    monkeypatch.setattr(gpu_check.shutil, "which", lambda *_, **__: "compute-sanitizer")
    assert gpu_check.sanitize("memcheck", "03_triton", 300)["status"] == "timeout"
    assert gpu_check.run_suite("suite", 2, 300)["status"] == "timeout"


def test_a_suite_passes_only_if_tests_passed_and_none_failed(monkeypatch):
    ends = "FAILED a.py::t[a b] - assert 0\nERROR a.py::u\nSKIPPED [3] a.py:9: needs a GPU: yes\n1 passed in 1s"
    found = {"passed": 1, "failed": 2, "skipped": 3, "failures": ["a.py::t[a b]", "a.py::u"]}
    assert gpu_check.parse_suite(ends) == {**found, "skips": {"needs a GPU: yes": 3}}
    for code, output, status in ((0, "1 passed", "passed"), (0, "1 skipped", "failed"), (1, ends, "failed")):
        monkeypatch.setattr(gpu_check, "run_limited", lambda *_, end=(code, output, 1.0): end)
        assert gpu_check.run_suite("suite", 2, 300)["status"] == status


def test_outcomes_are_kept_only_for_the_same_code_and_machine():
    machine = dict(gpu="g", driver="d", cuda="c", torch="t", triton="x", python="p")
    sources = {"01/a": "1", "01/b": "1", "02/c": "1"}
    names = "suite", "suite 02", "memcheck 01", "racecheck 02/c"
    old = {**machine, "sources": sources, "outcomes": dict.fromkeys(names, "old")}

    def kept(**other):
        new = {**machine, "sources": sources, "outcomes": {"suite": "new"}} | other
        merged = gpu_check.merge(old, new)["outcomes"]
        assert merged.pop("suite") == "new" and set(merged.values()) <= {"old"}
        return set(merged)

    assert kept() == set(names[1:])
    assert kept(sources=sources | {"01/b": "2"}) == {"racecheck 02/c"}
    assert kept(sources=sources | {"02/c": "2"}) == {"memcheck 01"}
    assert kept(sources=sources | {"01/new": "1"}) == {"racecheck 02/c"}
    assert kept(driver="e") == set()
    new = {**machine, "sources": sources, "outcomes": {}}
    assert gpu_check.merge({}, new) == new


def test_the_outcomes_are_written_and_decide_the_exit_code(tmp_path, monkeypatch, capsys):
    status = dict.fromkeys(gpu_check.TOOLS, "clean")
    machine = rows.provenance("cpu", commit="c")
    monkeypatch.setattr(rows, "provenance", lambda **_: machine)
    monkeypatch.setattr(gpu_check, "run_suite", lambda *_: {"status": "passed", "passed": 7, "seconds": 1})
    monkeypatch.setattr(gpu_check, "sanitize", lambda tool, what, *_: {"status": status[tool]})
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(SystemExit, match="needs a GPU"):
        gpu_check.main(out=tmp_path)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    assert exit_code(gpu_check.main, out=tmp_path) == 0
    status["racecheck"] = "timeout"
    assert exit_code(gpu_check.main, out=tmp_path, only="racecheck 03_triton") == 1
    written = rows.read_record("checks", "CPU", tmp_path)
    assert len(written["outcomes"]) == len(gpu_check.SUITES) + 4 * len(gpu_check.SANITIZED)
    assert written["outcomes"]["racecheck 03_triton"] == {"status": "timeout"} and written["commit"] == "c"
    assert written["sources"]["00_naive/fwd_3_tiled"] == fingerprint.code_hash("00_naive", "fwd_3_tiled")
    status["racecheck"] = "listed"
    assert exit_code(gpu_check.main, out=tmp_path, only="racecheck") == 0
    assert exit_code(gpu_check.main, out=tmp_path, only="no such check") == 1
    assert exit_code(gpu_check.main, out=tmp_path, minutes=0) == 1
    assert "suite: no time left" in capsys.readouterr().out
    monkeypatch.setattr(gpu_check, "run_all", lambda *_: [("suite", {"status": "passed"}), ("racecheck a", None)])
    assert exit_code(gpu_check.main, out=tmp_path) == 1


def test_every_kernel_is_sanitized_and_each_of_stage_02_has_a_planted_race():
    kernels = {path.stem for path in STAGE_02.glob("*.cu")}
    assert {f"02_fa2_cuda/{kernel}" for kernel in kernels} | {"01_fa1_numba", "03_triton"} == set(gpu_check.SANITIZED)
    assert set(sanitized_kernels.PLANTED) == kernels
    for kernel in kernels:
        text = (STAGE_02 / f"{kernel}.cu").read_text()
        planted = sanitized_kernels.with_a_race(text, kernel)
        changed = [a for a, b in zip(text.splitlines(), planted.splitlines(), strict=True) if a != b]
        (line,) = (a for a in changed if "Spill budget" not in a)
        assert re.search("barrier|syncthreads", line)
        with pytest.raises(ValueError, match="0 lines"):
            sanitized_kernels.with_a_race(planted, kernel)


@pytest.mark.skipif(not shutil.which("g++"), reason="without a GPU stage 02 needs g++, and there is none")
def test_what_runs_under_the_sanitizers_checks_its_results(monkeypatch):
    assert sanitized_kernels.check("fwd_0_scalar", N=40, head_dims=(64, 128)) == 2  # scalar takes no head_dim 128
    assert sanitized_kernels.check("fwd_0_scalar", planted=True, N=40, head_dims=(64,)) == 0
    assert sanitized_kernels.tma_store() == 1
    monkeypatch.setattr(error, "failures", lambda got, want: {"out": (1.0, 0.1)} if list(got) == ["out", "lse"] else {})
    with pytest.raises(AssertionError, match="fwd_0_scalar, D=64, causal=False"):
        sanitized_kernels.check("fwd_0_scalar", N=40, head_dims=(64,))


# --- profile ------------------------------------------------------------------------------------------------

NCU = """==PROF== Profiling "attention_forward" - 2: 0%....50%....100% - 8 passes
"ID","Kernel Name","sm__pipe_tensor_cycles_active.avg.pct_of_peak_sustained_active","l1.sum","launch__registers"
"","","%","","register/thread"
"0","attention_forward","41.25","1,234,567","n/a"
==PROF== Disconnected
"""


def test_ncus_table_is_parsed_without_its_units_and_what_has_no_value():
    metrics = {"bank_conflicts": "l1.sum", "registers": "launch__registers", "missing": "not__there.sum"}
    assert profile.parse(NCU, metrics) == {"bank_conflicts": 1234567.0}
    line = '"0","attention_forward","41.25","1,234,567","n/a"\n'
    for output in (NCU.replace(line, 2 * line), NCU.replace(line, ""), "==ERROR== no device"):
        with pytest.raises(ValueError, match="kernels, not 1"):
            profile.parse(output, metrics)


def test_a_profile_is_of_the_rungs_that_ncu_read_and_shown_while_they_are_as_they_were(tmp_path, monkeypatch, capsys):
    def run(words):
        if words[-1] == "mma":
            raise subprocess.CalledProcessError(1, "ncu", "==ERROR== no permission")
        return NCU if "--metrics" in words else "Version 2025.3.1.0"

    monkeypatch.setattr(profile, "run", run)
    found = profile.profile("ncu", "NVIDIA H200")
    assert set(found["rungs"]) == set(profile.RUNGS) - {"mma"} and "no permission" in capsys.readouterr().out
    found["rungs"]["hopper"]["source"] = "0" * 12
    rows.write_record("profile", found, tmp_path)
    assert profile.read(tmp_path) == dict.fromkeys(("ldmatrix", "fa2"), {"tensor_pipe": 41.25})
    assert profile.read(tmp_path / "missing") == {}
