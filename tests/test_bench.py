"""The measuring tools, on the CPU: costs worked by hand, rows, hashes, the order of calls, the report."""

import json
import math
import re
import shutil
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

import sanitized as sanitized_kernels
from reference import attention, error
from reference.bench import cost, gpu_check, grid, peers, plans, plots, profile, report, rows, source, timing
from steps import bench, compare, launch_cost


def row(**changes):
    """A valid row of a kernel, with some fields changed."""
    good = dict(
        run="r1", commit="abc", date="2026-01-31", gpu="NVIDIA H200", n_gpus=1, driver="580", cuda="13.0",
        torch="2.11.0", triton="3.6.0", stage="01_fa1_numba", kernel="fwd_0_scalar", peer=None,
        source="0" * 12, dtype="bf16", B=1, H=2, Hk=2, N=512, D=64, causal=False, layout=None,
        ms_median=2.0, ms_p20=1.5, ms_p80=2.5, reps=30, tflops=3.0, error=1e-3,
    )  # fmt: skip
    return {**good, "pass": "fwd", **changes}


def peer_row(**changes):
    return row(stage=None, kernel=None, source=None, peer="sdpa-flash", **changes)


# --- cost ---------------------------------------------------------------------------------------------------


def test_flops_by_the_papers_convention():
    assert cost.flops(2, 3, 10, 4) == 4 * 2 * 3 * 10 * 10 * 4
    assert cost.flops(2, 3, 10, 4, Nk=5) == 4 * 2 * 3 * 10 * 5 * 4
    assert cost.flops(1, 1, 8, 2, causal=True) == 256
    assert cost.flops(1, 1, 8, 2, pass_="bwd") == 1280
    assert cost.flops(1, 1, 8, 2, pass_="fwd+bwd") == 1792
    with pytest.raises(ValueError, match="fwd, bwd"):
        cost.flops(1, 1, 8, 2, pass_="forward")


def test_compulsory_bytes_count_each_tensor_once():
    # q, k, v, out: 4 x 10 x 4 elements of 2 bytes; lse: 10 of 4.
    assert cost.compulsory_bytes(1, 1, 10, 4, dtype="bf16") == 4 * 80 + 40
    assert cost.compulsory_bytes(1, 1, 10, 4, dtype="bf16", pass_="bwd") == 8 * 80 + 40
    assert cost.compulsory_bytes(1, 1, 10, 4, dtype="bf16", pass_="fwd+bwd") == 12 * 80 + 80
    assert cost.compulsory_bytes(1, 4, 10, 4, Hk=2, dtype="fp32") == (4 + 2 + 2 + 4) * 160 + 160
    assert cost.compulsory_bytes(1, 1, 10, 4, Nk=5, dtype="fp64") == 2 * 320 + 2 * 160 + 80


def test_shared_memory_and_registers_of_a_tile():
    # FlashAttention-2 on Hopper, 128 x 128, D = 128, bf16, two stages of K and V: 32 + 4 x 32 KB.
    assert cost.shared_bytes(128, 128, 128, "bf16", stages=2) == 160 * 1024
    assert cost.shared_bytes(16, 32, 64, "fp32", tiles="QKVOS") == 4 * (16 * 64 * 2 + 32 * 64 * 2 + 16 * 32)
    assert cost.shared_bytes(16, 32, 64, "bf16", tiles="OS") == 4 * (16 * 64 + 16 * 32)
    # O 64, S 64, P 32 registers for each of 256 threads.
    assert cost.accumulator_registers(128, 128, 128, "bf16", threads=256) == 160
    assert cost.accumulator_registers(128, 128, 128, "fp32", threads=256) == 128


def test_occupancy_names_the_resource_that_runs_out():
    sm90 = (9, 0)
    assert cost.occupancy(sm90, threads=1024) == cost.Occupancy(2, "threads", 1.0)
    assert cost.occupancy(sm90, threads=32) == cost.Occupancy(32, "blocks", 0.5)
    assert cost.occupancy(sm90, threads=128, shared=113 * 1024).limited_by == "shared memory"
    assert cost.occupancy(sm90, threads=128, shared=113 * 1024).blocks == 2  # each takes 1 KB more: 2 x 114 = 228
    assert cost.occupancy(sm90, threads=128, shared=113 * 1024 + 1).blocks == 1
    assert cost.occupancy(sm90, threads=128, shared=227 * 1024 + 1).blocks == 0  # more than a block may have
    assert cost.occupancy(sm90, threads=384, registers=168) == cost.Occupancy(1, "registers", 384 / 2048)
    assert cost.occupancy(sm90, threads=256, registers=128).blocks == 2
    assert cost.occupancy(sm90, threads=256, registers=129).blocks == 1  # 136 after rounding up
    assert cost.occupancy(sm90, threads=32, registers=96).blocks == 20  # 5 in each of 4 register files, not 21
    with pytest.raises(ValueError, match="compute capability"):
        cost.occupancy((1, 0), threads=32)


def test_roofline_turns_at_the_ridge():
    h200 = cost.GPUS["NVIDIA H200"]
    assert cost.roofline_tflops(10, h200, "bf16") == pytest.approx(48)
    assert cost.roofline_tflops(1000, h200, "bf16") == h200.half_tflops
    assert cost.ridge(h200, "bf16") == pytest.approx(206.1, abs=0.1)
    assert cost.peak_tflops(h200, "fp32") == 66.9
    with pytest.raises(ValueError, match="bf16"):
        cost.peak_tflops(cost.GPUS["Tesla T4"], "bf16")
    assert all(name == gpu.name and gpu.multiprocessor for name, gpu in cost.GPUS.items())


# --- timing -------------------------------------------------------------------------------------------------


def test_candidates_take_turns_and_each_comes_first():
    called = []
    calls = {name: lambda name=name: called.append(name) for name in "abc"}
    times = timing.interleaved(calls, reps=4, warmup=2)
    assert "".join(called) == "abcbcacababcbcacab"
    assert {name: t.reps for name, t in times.items()} == {"a": 4, "b": 4, "c": 4}
    assert timing.interleaved({}) == {}


def test_times_are_milliseconds_without_the_warm_up(monkeypatch):
    now = iter([0.0, 100.0, 200.0, 200.004, 300.0, 300.006, 400.0, 400.005])
    monkeypatch.setattr(timing.time, "perf_counter", lambda: next(now))
    assert timing.interleaved({"a": lambda: None}, reps=3, warmup=1)["a"].ms_median == pytest.approx(5.0)


def test_summary_is_the_median_and_percentiles():
    assert timing.summary([float(i) for i in range(100, -1, -1)]) == timing.Timing(50.0, 20.0, 80.0, 101)


def test_in_a_group_the_slowest_rank_counts(monkeypatch):
    def all_reduce(mine, op):
        assert op == torch.distributed.ReduceOp.MAX
        mine.copy_(torch.maximum(mine, torch.tensor([2.0, 2.0], dtype=torch.float64)))

    monkeypatch.setattr(timing.dist, "is_initialized", lambda: True)
    monkeypatch.setattr(timing.dist, "all_reduce", all_reduce)
    assert timing._slowest_rank([1.0, 3.0], "cpu") == [2.0, 3.0]


def test_backward_alone_can_be_repeated():
    x = torch.tensor([3.0], requires_grad=True)
    call = timing.backward_call(x * x, (x,), torch.ones(1))
    assert [call()[0].item() for _ in range(3)] == [6.0] * 3 and x.grad is None


@pytest.mark.gpu
def test_events_measure_the_gpu_and_not_the_launch():
    x = torch.randn(4096, 4096, device="cuda")
    few, many = (lambda: x @ x), (lambda: [x @ x for _ in range(8)])
    times = timing.interleaved({"few": few, "many": many}, device="cuda")
    assert 5 < times["many"].ms_median / times["few"].ms_median < 11


# --- peers --------------------------------------------------------------------------------------------------


def test_peers_compute_attention():
    q, k, v = (torch.randn(1, 4, 40, 32) for _ in range(3))
    for name in ("sdpa-flash", "sdpa-math"):
        assert peers.why_not(name, torch.float32, 32, "cpu") is None
        for heads in (4, 2):
            want, _ = attention.forward(q, k[:, :heads], v[:, :heads], causal=True)
            assert (peers.PEERS[name](q, k[:, :heads], v[:, :heads], True) - want).abs().max() < 1e-5


def test_a_peer_says_why_not_and_never_falls_back():
    assert "GPU" in peers.why_not("sdpa-cudnn", torch.bfloat16, 64, "cpu")
    x = torch.randn(1, 1, 8, 32)
    with pytest.raises(RuntimeError):
        peers.PEERS["sdpa-cudnn"](x, x, x)
    with pytest.raises(ValueError, match="as many queries as keys"):
        peers.PEERS["sdpa-math"](x[:, :, 1:], x, x, causal=True)


def test_a_refusal_is_told_from_torchs_remarks_on_other_backends():
    messages = [
        "Memory efficient kernel not used because: (Triggered internally at /pytorch/sdp_utils.cpp:1.)",
        "Memory Efficient attention has been runtime disabled. (Triggered internally at /py/sdp.h:2.)",
        "Flash attention kernel not used because: (Triggered internally at /pytorch/sdp_utils.cpp:3.)",
        "Expected query to be Half,\n but got Float. (Triggered internally at /pytorch/sdp_utils.h:4.)",
    ]
    assert peers._reason(messages, RuntimeError("No kernel.")) == "Expected query to be Half, but got Float."
    assert peers._reason([], RuntimeError("No kernel.")) == "No kernel."


@pytest.mark.gpu
@pytest.mark.parametrize("name", peers.PEERS)
def test_peers_on_the_gpu(name):
    assert peers.why_not(name, torch.bfloat16, 64) is None
    dout, *qkv = grid.make_inputs(grid.Point(1, 2, 100, 64, causal=True), "bf16", "cuda")
    truth = grid.sample_truth((dout, *qkv), True)
    got = grid._peer_call(peers.PEERS[name])((dout, *qkv), True, "fwd+bwd")()
    assert grid.sample_error(dict(zip(("out", "dq", "dk", "dv"), got, strict=True)), truth) < 0.05
    if name in ("sdpa-flash", "sdpa-cudnn"):
        assert peers.why_not(name, torch.float32, 64)


# --- rows ---------------------------------------------------------------------------------------------------


def test_rows_survive_writing_and_reading(tmp_path):
    written = [row(), peer_row(), row(gpu="Tesla T4")]
    files = rows.append(written[:1], tmp_path) + rows.append(written[1:], tmp_path)
    assert {file.name for file in files} == {"nvidia-h200.jsonl", "tesla-t4.jsonl"}
    assert rows.read(tmp_path) == written
    assert rows.read(tmp_path / "missing") == []
    assert list(json.loads(files[0].read_text().splitlines()[0])) == list(rows.FIELDS)


@pytest.mark.parametrize(
    "changes, word",
    [
        ({"extra": 1}, "extra is not a field"),
        ({"N": 512.0}, "N is 512.0"),
        ({"N": True}, "N is True"),
        ({"causal": 0}, "causal is 0"),
        ({"error": math.nan}, "error is nan"),
        ({"pass": "forward"}, "pass is"),
        ({"dtype": "float32"}, "dtype is"),
        ({"layout": "ring"}, "layout is"),
        ({"stage": "step01_fa1_numba"}, "stage is"),
        ({"peer": "sdpa-math"}, "a peer's row"),
        ({"source": None}, "needs stage, kernel and source"),
        ({"ms_p20": 2.1}, "ms_p20 <= ms_median"),
        ({"reps": 29}, "fewer than 30"),
        ({"tflops": 0.0}, "tflops must be"),
        ({"pass": "matmul"}, "the pass matmul"),
    ],
)
def test_a_bad_row_is_refused(tmp_path, changes, word):
    with pytest.raises(ValueError, match=re.escape(word)):
        rows.append([row(**changes)], tmp_path)
    assert not list(tmp_path.iterdir())


def test_a_row_that_lacks_a_field_is_refused_by_file_and_line(tmp_path):
    lacking = {name: value for name, value in row().items() if name != "error"}
    file = tmp_path / "x.jsonl"
    file.write_text(json.dumps(row()) + "\n" + json.dumps(lacking) + "\n")
    with pytest.raises(ValueError, match=r"x\.jsonl:2: .*error is missing"):
        rows.read(file)


def test_provenance_fills_its_fields_and_takes_a_commit():
    found = rows.provenance("cpu", commit="abc123")
    assert found["commit"] == "abc123" and found["gpu"] == "CPU" and found["n_gpus"] == 0
    assert rows.validate({**row(), **found})


def test_rows_with_a_switch_turned_are_read_only_when_asked_for(tmp_path):
    """With all of their run: what stood beside them would replace what others were compared with."""
    rows.append([row(run="r1"), row(run="r2"), peer_row(run="r2"), row(kernel="fwd_0_scalar:LAZY=0", run="r2")], tmp_path)
    assert [r["run"] for r in rows.read(tmp_path)] == ["r1"]
    assert [r["kernel"] for r in rows.read(tmp_path, switched=True)][-1] == "fwd_0_scalar:LAZY=0"


def test_the_latest_row_of_a_subject_wins():
    assert rows.latest([row(run="r1"), peer_row(), row(run="r2")]) == [row(run="r2"), peer_row()]


def test_a_peer_s_row_is_the_last_of_the_runs_that_measured_most():
    beside_two = [row(run="r1"), row(kernel="other", run="r1"), peer_row(run="r1")]
    again = [{**one, "run": "r2"} for one in beside_two]
    beside_one = [row(kernel="third", run="r3"), peer_row(run="r3")]
    found = rows.latest(beside_two + again + beside_one)
    assert [(r["kernel"], r["run"]) for r in found] == [("fwd_0_scalar", "r2"), ("other", "r2"), (None, "r2"), ("third", "r3")]


# --- source -------------------------------------------------------------------------------------------------

PYTHON = '''"""What it does."""
def f(x):  # why
    """Says so."""
    if x:
        y = f"{x} {{}}"
        y += "#1"
    return y
'''


@pytest.mark.parametrize(
    "old, new, same",
    [
        ("  # why", "  # because of this", True),
        ('"""Says so."""', '"""Says it better."""', True),
        ("def f(x):", "\n\ndef f( x ):", True),
        ("    return y", "        return y", False),
        ("#1", "#2", False),
        ("if x", "if not x", False),
    ],
)
def test_a_python_hash_follows_the_code_only(tmp_path, old, new, same):
    assert old in PYTHON
    (tmp_path / "f.py").write_text(PYTHON)
    before = source.source_hash([tmp_path / "f.py"])
    (tmp_path / "f.py").write_text(PYTHON.replace(old, new))
    assert (source.source_hash([tmp_path / "f.py"]) == before) == same


def test_python_code_is_the_same_text_for_every_python_version():
    assert source.python_code(PYTHON) == 'deff(x):;»ifx:;»y=f"{x}{}";y+="#1";«returny;«'


CUDA = '// says\nint f(int x) { /* why\n */ return x + 1; }  const char *s = "a // b";\n'


@pytest.mark.parametrize(
    "old, new, same",
    [
        ("// says", "// says more\n// than one line", True),
        ("why", 'it\'s "why"', True),
        ("x + 1", "x+1", True),
        ("x + 1", "x + 2", False),
        ("a // b", "a // c", False),
    ],
)
def test_a_cuda_hash_follows_the_code_only(tmp_path, old, new, same):
    assert old in CUDA
    (tmp_path / "f.cu").write_text(CUDA)
    before = source.source_hash([tmp_path / "f.cu"])
    (tmp_path / "f.cu").write_text(CUDA.replace(old, new))
    assert (source.source_hash([tmp_path / "f.cu"]) == before) == same


def a_stage(root):
    """A stage with two kernels under root; returns the hash of the first."""
    folder = root / "steps" / "step01_fa1_numba"
    folder.mkdir(parents=True)
    names = (
        "fwd_0_scalar.py",
        "fwd_0_scalar.cu",
        "fwd_1_warp.py",
        "bwd_0_scalar.py",
        "common.cuh",
        "cache.py",
        "other.py",
        "__init__.py",
    )
    for name in names:
        (folder / name).write_text("x = 1\n")
    (folder / "build.py").write_text('from . import cache\nfiles = "fwd_0_scalar.cu", "bwd_0_scalar.cu"\n')
    return source.source_hash(source.source_files("01_fa1_numba", "fwd_0_scalar", root))


def test_a_kernel_is_its_stem_and_in_cuda_the_headers_and_its_host_side(tmp_path):
    a_stage(tmp_path)

    def names(kernel):
        return {path.name for path in source.source_files("01_fa1_numba", kernel, tmp_path)}

    assert names("fwd_0_scalar") == {"fwd_0_scalar.py", "fwd_0_scalar.cu", "common.cuh", "build.py", "cache.py"}
    assert names("fwd_1_warp+bwd_0_scalar") == {"fwd_1_warp.py", "bwd_0_scalar.py"}
    assert names("fwd_0_scalar:LAZY=0") == names("fwd_0_scalar")
    assert names("build") == {"common.cuh", "build.py"}
    files = source.source_files("02_fa2_cuda", "fwd_8_hopper")
    assert {path.name for path in files} == {"fwd_8_hopper.cu", "ptx.cuh", "hopper.py", "nvrtc.py", "cache.py", "wgmma.py"}
    assert names("fwd_0") == names("fwd_1_warp+bwd_9_none") == set()


def test_to_a_kernel_in_python_belongs_what_it_imports_from_beside_it():
    files = source.source_files("01_fa1_numba", "bwd_2_registers")
    assert {path.name for path in files} == {"bwd_2_registers.py", "fwd_2_registers.py", "fwd_0_published.py"}


# --- measure ------------------------------------------------------------------------------------------------


def matrix(q, k, v, *, causal=False, scale=None):
    out, lse = attention.forward(q, k, v, causal=causal, scale=scale)
    return out.to(q.dtype), lse.float()


def matrix_backward(dout, q, k, v, out, lse, *, causal=False, scale=None):
    return tuple(x.to(q.dtype) for x in attention.backward(dout, q, k, v, causal=causal, scale=scale))


def candidate(**changes):
    kernels = dict(stage="00_naive", fwd_kernel="fwd_1_matrix", bwd_kernel="bwd_1_matrix")
    return grid.Candidate(**{**kernels, "forward": matrix, "backward": matrix_backward, **changes})


@pytest.fixture
def hashed(monkeypatch):
    """Every kernel name has a file."""
    monkeypatch.setattr(source, "source_files", lambda *_: [Path(__file__)])


SMALL = (grid.Point(2, 4, 20, 8, causal=True, Hk=2),)


def measured(candidates, points=SMALL, **options):
    said = []
    options = {
        "peers": ("sdpa-math",),
        "dtypes": ("fp32",),
        "device": "cpu",
        "warmup": 0,
        "commit": "c",
        **options,
    }
    return list(grid.measure(candidates, grid=points, say=said.append, **options)), said


def test_measure_yields_a_row_for_each_pass_with_the_peer_in_the_same_run(hashed):
    found, said = measured([candidate()], passes=rows.PASSES)
    assert [(r["kernel"], r["peer"], r["pass"]) for r in found] == [
        ("fwd_1_matrix", None, "fwd"), (None, "sdpa-math", "fwd"),
        ("bwd_1_matrix", None, "bwd"), (None, "sdpa-math", "bwd"),
        ("fwd_1_matrix+bwd_1_matrix", None, "fwd+bwd"), (None, "sdpa-math", "fwd+bwd"),
    ]  # fmt: skip
    assert len({r["run"] for r in found}) == 1 and not said
    for r in found:
        assert r["error"] < 1e-5 and r["commit"] == "c"
        flops = cost.flops(2, 4, 20, 8, causal=True, pass_=r["pass"])
        assert r["tflops"] == pytest.approx(flops / (r["ms_median"] * 1e-3) / 1e12)


@pytest.mark.parametrize("pass_, name", [("fwd", "forward"), ("bwd", "backward")])
def test_the_error_is_the_kernels_own(hashed, pass_, name):
    def off(*args, **options):
        first, *others = (matrix if name == "forward" else matrix_backward)(*args, **options)
        first[-1, -1, -1, -1] += 0.25
        return first, *others

    found, _ = measured([candidate(**{name: off})], passes=(pass_,))
    assert found[0]["error"] == pytest.approx(0.25, abs=1e-4) and found[1]["error"] < 1e-5


def test_who_cannot_take_part_is_left_out_with_a_reason(hashed):
    def broken(*args, **options):
        raise RuntimeError("out of paper\nsecond line")

    def nan(*args, **options):
        out, lse = matrix(*args, **options)
        return out * math.nan, lse

    candidates = [
        candidate(fwd_kernel="fwd_a", dtypes=("bf16",)),
        candidate(fwd_kernel="fwd_b", head_dims=(64,)),
        candidate(fwd_kernel="fwd_c", gqa=False),
        candidate(fwd_kernel="fwd_d", forward=broken),
        candidate(fwd_kernel="fwd_e", forward=nan),
    ]
    found, said = measured(candidates, points=SMALL * 2, peers=("sdpa-cudnn",))
    reasons = (
        "take fp32",
        "head_dim 8",
        "K/V heads",
        "RuntimeError: out of paper",
        "not finite",
        "NVIDIA GPU",
    )
    assert not found and len(said) == len(reasons)
    assert all(reason in line for reason, line in zip(reasons, said, strict=True))
    assert "has no backward" in measured([candidate(backward=None)], passes=("bwd",))[1][0]


def test_a_kernel_without_files_is_left_out():
    assert "no files" in measured([candidate(fwd_kernel="fwd_9_none")])[1][0]


def test_who_is_too_slow_is_not_tried_at_larger_sizes(hashed):
    tried = []

    def slow(q, k, v, *, causal=False):
        tried.append(q.shape[2])
        return matrix(q, k, v, causal=causal)

    points = [grid.Point(1, 1, N, 8) for N in (16, 32, 8)]
    found, said = measured([candidate(forward=slow)], points, peers=(), limit_ms=0.0)
    assert not found and tried == [16, 16, 8, 8]
    assert "more than the limit" in said[0] and "too slow at a smaller size" in said[1]


def test_a_matrix_product_is_measured_with_every_group(hashed, monkeypatch):
    monkeypatch.setattr(peers, "MATMUL_SIZE", 48)
    monkeypatch.setattr(grid, "MATMUL_SIZE", 48)
    found, _ = measured([candidate()], points=SMALL * 2, peers=(), with_matmul=True)
    product = [r for r in found if r["peer"] == "matmul"]
    assert [r["kernel"] for r in found] == ["fwd_1_matrix", None] * 2 and len({r["run"] for r in found}) == 1
    assert all((r["pass"], r["N"], r["D"], r["causal"]) == ("matmul", 48, 48, False) for r in product)
    assert product[0]["tflops"] == pytest.approx(2 * 48**3 / product[0]["ms_median"] / 1e9) and product[0]["error"] < 1e-4


def test_no_point_is_begun_when_the_time_is_up(hashed):
    found, said = measured([candidate()], until=0.0)
    assert not found and "out of time" in said[0]


def test_inputs_are_random_and_repeatable():
    first, again = (grid.make_inputs(SMALL[0], "bf16", "cpu", seed=1) for _ in range(2))
    assert all(torch.equal(a, b) for a, b in zip(first, again, strict=True))
    assert [tuple(x.shape) for x in first] == [(2, 4, 20, 8)] * 2 + [(2, 2, 20, 8)] * 2
    assert all(abs(x.float().std() - 1) < 0.1 for x in first) and not torch.equal(first[0], first[1])


def test_the_standard_grid_is_the_papers():
    assert len(grid.STANDARD_GRID) == 24
    assert {(p.B * p.N, p.H * p.D) for p in grid.STANDARD_GRID} == {(16384, 2048)}
    assert {p.N for p in grid.STANDARD_GRID} == {512, 1024, 2048, 4096, 8192, 16384}


# --- report and plots ---------------------------------------------------------------------------------------

README = """# Title
<!-- results: gpu=nvidia-h200 pass=fwd dtype=bf16 D=64 causal=false -->
old
<!-- /results -->
end
"""


@pytest.fixture
def repository(tmp_path):
    fresh = a_stage(tmp_path)
    (tmp_path / "README.md").write_text(README)
    kernels = [row(source=fresh, N=N, tflops=tflops) for N, tflops in ((512, 100.0), (1024, 123.4))]
    stale = row(kernel="fwd_1_warp", source="f" * 12, tflops=777.0)
    others = [
        peer_row(N=512, tflops=200.0),
        peer_row(N=1024, tflops=246.8),
        row(source=fresh, dtype="fp32", tflops=5.5),
    ]
    rows.append([*kernels, stale, *others], tmp_path / "reference" / "bench" / "results")
    return tmp_path


def test_the_report_fills_readme_from_fresh_rows_only(repository, capsys):
    assert report.main(["--root", str(repository), "--check"]) == 1
    assert (repository / "README.md").read_text() == README
    assert report.main(["--root", str(repository)]) == 0
    text = (repository / "README.md").read_text()
    assert "| 01 fwd_0_scalar | 100 | 123 | 50% | 1.0e-03 |" in text
    assert "| sdpa-flash | 200 | 247 | – | 1.0e-03 |" in text
    assert "777" not in text and "5.5" not in text and "\nold\n" not in text
    assert "Changed since it was measured, and not shown: 01 fwd_1_warp." in text
    assert text.startswith("# Title\n<!-- results:") and text.endswith("<!-- /results -->\nend\n")
    assert "fwd_1_warp" in (said := capsys.readouterr().out) and "1 of them stale" in said
    assert report.main(["--root", str(repository), "--check"]) == 0


def test_a_changed_kernel_leaves_readme(repository):
    report.main(["--root", str(repository)])
    (repository / "steps" / "step01_fa1_numba" / "fwd_0_scalar.cu").write_text("x = 2\n")
    report.main(["--root", str(repository)])
    text = (repository / "README.md").read_text()
    assert "| 01 fwd_0_scalar" not in text and "sdpa-flash" in text
    assert "\nChanged since it was measured, and not shown: 01 fwd_0_scalar, 01 fwd_1_warp.\n" in text


def ladder_rows(root, tflops=50.0):
    """Rows of three rungs of a stage 02 under root, with their peers and a matrix product."""
    folder = root / "steps" / "step02_fa2_cuda"
    folder.mkdir(parents=True, exist_ok=True)
    found = []
    for kernel, changes in {
        "fwd_0_scalar": dict(tflops=4.0, dtype="fp32", D=64),
        "fwd_2_mma": dict(tflops=tflops, D=128),
        "bwd_0_scalar": {"tflops": 1.5, "dtype": "fp32", "D": 64, "pass": "bwd"},
    }.items():
        (folder / f"{kernel}.cu").write_text("x = 1\n")
        hash = source.source_hash(source.source_files("02_fa2_cuda", kernel, root))
        found.append(row(stage="02_fa2_cuda", kernel=kernel, source=hash, N=4096, **changes))
    product = row(stage=None, kernel=None, source=None, peer="matmul", N=8192, D=8192, H=1, Hk=1, tflops=800.0)
    return [*found, peer_row(N=4096, D=128, tflops=340.0), {**product, "pass": "matmul"}]


def test_the_ladder_shows_each_rung_once_and_says_what_differs(tmp_path):
    more = [
        row(stage="02_fa2_cuda", kernel="fwd_2_mma", N=4096, D=64, tflops=1.0),  # D=128 there is
        row(stage="02_fa2_cuda", kernel="fwd_2_mma", N=512, D=128, tflops=2.0),
        row(stage="02_fa2_cuda", kernel="fwd_2_mma", N=4096, D=128, causal=True, tflops=3.0),
        row(stage="03_triton", kernel="fwd_0_fused", N=4096, D=128, tflops=5.0),
        peer_row(N=4096, D=64, tflops=6.0),
        row(gpu="Tesla T4", stage="02_fa2_cuda", kernel="fwd_2_mma", N=4096, D=128, tflops=7.0),
    ]
    some = [*more, *ladder_rows(tmp_path)]
    numbers = plots.ladder_numbers(some)
    assert numbers == {
        "gpu": "NVIDIA H200",
        "matmul": 800.0,
        "fwd": {"rungs": [("scalar", 4.0, "fp32\nD=64"), ("mma", 50.0, "")], "peers": {"sdpa-flash": 340.0}},
        "bwd": {"rungs": [("scalar", 1.5, "fp32\nD=64")], "peers": {}},
    }
    forward, backward = plots.ladder(some).axes
    assert [bar.get_height() for bar in forward.patches] == [4.0, 50.0] and [line.get_ydata()[0] for line in forward.lines] == [
        340
    ]
    assert [bar.get_height() for bar in backward.patches] == [1.5] and forward.get_ylim()[1] >= 800
    assert plots.ladder_numbers(more) is None
    with pytest.raises(ValueError, match="forward and backward"):
        plots.ladder(more)


def test_readme_shows_the_ladder_only_of_the_rows_that_there_are(tmp_path):
    readme, picture = tmp_path / "README.md", tmp_path / report.PICTURE
    marked = README + "<!-- ladder -->\nold\n<!-- /ladder -->\n"
    readme.write_text(marked)
    report.main(["--root", str(tmp_path)])
    assert not picture.exists() and f"<!-- ladder -->\n{report.EMPTY}<!-- /ladder -->" in readme.read_text()

    results = tmp_path / "reference" / "bench" / "results"
    rows.append(ladder_rows(tmp_path), results)
    assert report.main(["--root", str(tmp_path), "--check"]) == 1 and not picture.exists()
    assert report.main(["--root", str(tmp_path)]) == 0 and picture.exists()
    assert f"({report.PICTURE})" in readme.read_text() and report.main(["--root", str(tmp_path), "--check"]) == 0

    rows.append(ladder_rows(tmp_path, tflops=60.0), results)  # README says the same, the picture does not
    assert report.main(["--root", str(tmp_path), "--check"]) == 1
    report.main(["--root", str(tmp_path)])
    assert json.loads(report.ladder_in(picture))["fwd"]["rungs"][1][1] == 60.0

    (tmp_path / "steps" / "step02_fa2_cuda" / "bwd_0_scalar.cu").write_text("x = 2\n")
    report.main(["--root", str(tmp_path)])
    assert not picture.exists() and "ladder.png" not in readme.read_text()


def test_the_share_of_a_peer_is_taken_within_one_run():
    everything = [
        row(run="r1", tflops=50.0),
        peer_row(run="r1", tflops=100.0),
        peer_row(run="r2", tflops=400.0),
    ]
    assert "| 50 | 50% |" in report.markdown(everything)


def test_the_caption_names_a_machine_once_with_all_commits_and_days():
    later = row(N=1024, commit="b" * 12, date="2026-02-01")
    shown = report.markdown([row(N=512, commit="a" * 40), later, row(N=2048, commit="a" * 40)])
    assert shown.count("NVIDIA H200") == 1 and shown.endswith("commits aaaaaaa (2026-01-31), bbbbbbb (2026-02-01).\n")
    assert shown.count("\n\n") == 1 and report.markdown([row()]).endswith("triton 3.6.0, commit abc (2026-01-31).\n")


def test_a_readme_without_sections_is_left_alone(tmp_path, capsys):
    (tmp_path / "README.md").write_text("nothing")
    assert report.main(["--root", str(tmp_path)]) == 0
    assert "nothing to write" in capsys.readouterr().out


def test_a_section_without_rows_says_so_and_an_unknown_field_raises():
    assert report.EMPTY in report.render(README, [])
    with pytest.raises(ValueError, match="no such field: head"):
        report.render(README.replace("D=64", "head=64"), [])


def test_figures_show_every_kernel_and_peer():
    some = [row(N=512), row(N=1024, tflops=4.0), peer_row(N=512), peer_row(N=1024)]
    lines = plots.speed_lines(some).axes[0]
    assert [line.get_label() for line in lines.lines] == ["01 fwd_0_scalar", "sdpa-flash"]
    assert list(lines.lines[0].get_ydata()) == [3.0, 4.0]
    with pytest.raises(ValueError, match="one GPU, pass"):
        plots.speed_lines([row(), row(causal=True)])
    bars = plots.speed_bars([row(), peer_row(tflops=9.0)]).axes[0]
    assert [bar.get_width() for bar in bars.patches] == [3.0, 9.0]
    with pytest.raises(ValueError, match="one row for each"):
        plots.speed_bars(some)
    roof = plots.roofline(some, cost.GPUS["NVIDIA H200"]).axes[0]
    # causal=False, H=Hk: 4 N^2 D FLOPs over 8 N D + 4 N bytes.
    assert list(roof.lines[1].get_xdata()) == pytest.approx([4 * 64 * N / (8 * 64 + 4) for N in (512, 1024)])
    with pytest.raises(ValueError, match="no results rows"):
        plots.speed_lines([])


# --- gpu_check ----------------------------------------------------------------------------------------------

CLEAN = "========= COMPUTE-SANITIZER\n12 passed, 3 deselected in 9.1s\n========= ERROR SUMMARY: 0 errors\n"


@pytest.mark.parametrize(
    "output, code, status",
    [
        (CLEAN, 0, "clean"),
        (CLEAN.replace("0 errors", "1 error"), 0, "problems"),
        (CLEAN + "========= ERROR SUMMARY: 4 errors\n", 0, "problems"),
        (
            CLEAN.replace("ERROR SUMMARY: 0 errors", "RACECHECK SUMMARY: 0 hazards displayed (0 errors, 0 warnings)"),
            0,
            "clean",
        ),
        (
            CLEAN.replace("ERROR SUMMARY: 0 errors", "RACECHECK SUMMARY: 2 hazards displayed (0 errors, 2 warnings)"),
            0,
            "problems",
        ),
        (CLEAN.replace("12 passed", "12 skipped"), 0, "nothing ran"),
        (CLEAN.replace("12 passed", "1 failed, 11 passed"), 1, "tests failed"),
        ("Segmentation fault", 139, "no summary"),
    ],
)
def test_a_sanitizer_is_clean_only_if_it_finished_and_tests_ran(output, code, status):
    assert gpu_check.verdict(gpu_check.parse_sanitizer(output), code) == status


RACE = """========= COMPUTE-SANITIZER
========= Error: Race reported between Write access at attention_backward+0x430 in ptx.cuh:7
=========     and Read access at attention_backward+0x770 in bwd_2_wgmma.cu:55 [248 hazards]
=========
========= Warning: Race reported between Read access at attention_backward+0x70 in bwd_2_wgmma.cu:55
=========     and Write access at attention_backward+0x90 in ptx.cuh:7 [8 hazards]
4 passed
========= ERROR SUMMARY: 669 errors were not printed. Use --print-limit option to adjust the number of printed errors
========= RACECHECK SUMMARY: 2 hazards displayed (1 error, 1 warning)
"""


def test_reports_are_kept_without_addresses_and_counts():
    found = gpu_check.parse_sanitizer(RACE)
    assert found["problems"] == 2 and found["passed"] == 4 and len(found["summaries"]) == 1
    assert found["reports"][0] == (
        "Error: Race reported between Write access at attention_backward in ptx.cuh:7 "
        "and Read access at attention_backward in bwd_2_wgmma.cu:55"
    )
    assert len(found["reports"]) == 2 and "+0x" not in str(found)


def sanitized(monkeypatch, output, planted="", tool="racecheck", what="02_fa2_cuda/bwd_2_wgmma"):
    """The outcome if the tool prints `output`, and `planted` for the copy with a race."""
    monkeypatch.setattr(gpu_check.shutil, "which", lambda *_, **__: "compute-sanitizer")
    run = lambda command, limit, **_: (0, planted if "--planted" in command else output, 1.0)  # noqa: E731
    monkeypatch.setattr(gpu_check, "run_limited", run)
    return gpu_check.sanitize(tool, what, 300)


HOST = """========= Host API memory access error at host access to 0x7f11cc884200 of size 33,408 bytes
=========     Uninitialized access to 0x7f11cc884200 on access by cudaMemcpy source
4 passed
========= ERROR SUMMARY: 1 error
"""


def test_a_report_is_listed_only_if_it_is_of_a_known_kind_and_kernel(monkeypatch):
    known = sanitized(monkeypatch, HOST, tool="initcheck")
    assert known["status"] == "listed" and "tma_store" in known["listed"] and known["problems"] == 1
    unknown = "========= Uninitialized __global__ memory read of size 4 bytes\n"
    assert sanitized(monkeypatch, unknown + HOST, tool="initcheck")["status"] == "problems"
    assert sanitized(monkeypatch, HOST, tool="memcheck")["status"] == "problems"
    assert sanitized(monkeypatch, HOST, tool="initcheck", what="02_fa2_cuda/bwd_1_fa2")["status"] == "problems"


def test_a_planted_race_is_seen_only_if_it_adds_a_report(monkeypatch):
    clean = CLEAN.replace("ERROR SUMMARY: 0 errors", "RACECHECK SUMMARY: 0 hazards displayed (0 errors, 0 warnings)")
    assert sanitized(monkeypatch, clean, planted=RACE)["planted"] == "seen"
    assert sanitized(monkeypatch, clean, planted=clean)["planted"] == "not seen"
    assert sanitized(monkeypatch, RACE, planted=RACE)["planted"] == "not seen"
    assert sanitized(monkeypatch, clean, planted="Traceback: it does not compile")["planted"] == "failed"
    assert "planted" not in sanitized(monkeypatch, CLEAN, tool="memcheck")
    assert "planted" not in sanitized(monkeypatch, clean, what="03_triton")


def test_a_time_limit_is_recorded_as_a_time_limit(monkeypatch):
    assert gpu_check.run_limited([sys.executable, "-c", "print('x'); import time; time.sleep(60)"], 0.5)[0] is None
    monkeypatch.setattr(gpu_check, "run_limited", lambda *_, **__: (None, CLEAN, 300.0))
    monkeypatch.setattr(gpu_check.shutil, "which", lambda *_, **__: "compute-sanitizer")
    assert gpu_check.sanitize("memcheck", "03_triton", 300)["status"] == "timeout"
    assert gpu_check.run_suite("suite", 300, 2)["status"] == "timeout"


def test_junit_counts():
    xml = """<testsuites><testsuite><testcase classname="a" name="t1"/>
    <testcase classname="a" name="t2"><failure/></testcase>
    <testcase classname="a" name="t3"><error/></testcase>
    <testcase classname="a" name="t4"><skipped message="needs a GPU"/></testcase></testsuite></testsuites>"""
    found = gpu_check.parse_junit(xml)
    assert (found["passed"], found["failed"], found["skipped"]) == (1, 2, 1)
    assert found["failures"] == ["a::t2", "a::t3"] and found["skips"] == {"needs a GPU": 1}


def test_outcomes_are_kept_only_for_the_same_code():
    machine = dict(gpu="g", driver="d", cuda="c", torch="t", triton="x", python="p")
    old = {**machine, "sources": {"k": "1"}, "outcomes": {"suite": "old", "memcheck a": "old"}}
    new = {**machine, "sources": {"k": "1"}, "outcomes": {"suite": "new"}}
    assert gpu_check.merge(old, new)["outcomes"] == {"suite": "new", "memcheck a": "old"}
    assert gpu_check.merge(old, {**new, "sources": {"k": "2"}})["outcomes"] == {"suite": "new"}
    assert gpu_check.merge({}, new) == new


def test_without_a_gpu_nothing_is_written(tmp_path, monkeypatch):
    monkeypatch.setattr(gpu_check, "torch", SimpleNamespace(cuda=SimpleNamespace(is_available=lambda: False)))
    assert gpu_check.main(["--folder", str(tmp_path)]) == 1
    assert not list(tmp_path.iterdir())


def test_the_outcomes_are_written_and_decide_the_exit_code(tmp_path, monkeypatch, capsys):
    status = dict.fromkeys(gpu_check.TOOLS, "clean")
    machine = rows.provenance("cpu", commit="c") | {"gpu": "NVIDIA H200"}
    monkeypatch.setattr(gpu_check, "torch", SimpleNamespace(cuda=SimpleNamespace(is_available=lambda: True)))
    monkeypatch.setattr(rows, "provenance", lambda **_: machine)
    monkeypatch.setattr(gpu_check, "kernel_hashes", lambda: {"02_fa2_cuda/fwd_0_scalar": "1" * 12})
    monkeypatch.setattr(gpu_check, "run_suite", lambda name, limit, jobs: {"status": "passed", "passed": 7, "seconds": 1})
    monkeypatch.setattr(gpu_check, "sanitize", lambda tool, what, limit: {"status": status[tool]})
    assert gpu_check.main(["--folder", str(tmp_path)]) == 0
    status["racecheck"] = "timeout"
    assert gpu_check.main(["--folder", str(tmp_path), "--only", "racecheck", "--stages", "03_triton"]) == 1
    written = json.loads((tmp_path / "nvidia-h200.checks.json").read_text())
    assert len(written["outcomes"]) == len(gpu_check.SUITES) + 4 * len(gpu_check.SANITIZED)
    assert written["outcomes"]["racecheck 03_triton"] == {"status": "timeout"}
    assert written["outcomes"]["suite"]["passed"] == 7 and "timeout" in capsys.readouterr().out
    assert written["sources"] == gpu_check.kernel_hashes() and written["commit"] == "c"
    status["racecheck"] = "listed"
    assert gpu_check.main(["--folder", str(tmp_path), "--only", "racecheck"]) == 0
    assert gpu_check.main(["--folder", str(tmp_path), "--minutes", "0"]) == 1
    assert "no time for: suite" in capsys.readouterr().out


def test_every_kernel_of_the_gpu_stages_is_sanitized_alone_or_with_its_stage():
    for what, arguments in gpu_check.SANITIZED.items():
        stage, _, kernel = what.partition("/")
        assert (rows.ROOT / "steps" / f"step{stage}").is_dir() and stage in gpu_check.STAGES
        assert arguments[2] == kernel if kernel else f"tests/test_step{stage}.py" in arguments
    folder = rows.ROOT / "steps" / "step02_fa2_cuda"
    assert {f"02_fa2_cuda/{path.stem}" for path in folder.glob("*.cu")} <= set(gpu_check.SANITIZED)
    assert set(sanitized_kernels.PLANTED) == {path.stem for path in folder.glob("*.cu")}


@pytest.mark.parametrize("kernel", sanitized_kernels.PLANTED)
def test_the_planted_copy_has_one_other_line(kernel):
    text = (sanitized_kernels.STAGE / f"{kernel}.cu").read_text()
    planted = sanitized_kernels.with_a_race(text, kernel)
    changed = [(a, b) for a, b in zip(text.splitlines(), planted.splitlines(), strict=True) if a != b]
    assert len([a for a, _ in changed if "Spill budget" not in a]) == 1 and re.search("barrier|syncthreads", changed[-1][0])
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


def test_every_kernel_in_the_course_has_a_hash():
    hashes = gpu_check.kernel_hashes()
    assert "00_naive/fwd_3_tiled" in hashes and all(re.fullmatch("[0-9a-f]{12}", value) for value in hashes.values())


def test_the_reference_imports_nothing_of_steps():
    for path in (rows.ROOT / "reference").rglob("*.py"):
        assert not re.search(r"^\s*(from|import) steps", path.read_text(), re.M), path


# --- profile and plans --------------------------------------------------------------------------------------

NCU = """==PROF== Connected to process 4242 (/usr/bin/python3)
==PROF== Profiling "attention_forward" - 2: 0%....50%....100% - 8 passes
"ID","Process ID","Kernel Name","Block Size","sm__pipe_tensor_cycles_active.avg.pct","l1tex__conflicts.sum","launch__registers"
"","","","","%","","register/thread"
"0","4242","attention_forward","(128, 1, 1)","41.25","1,234,567","n/a"
==PROF== Disconnected
"""
METRICS = {
    "tensor_pipe": "sm__pipe_tensor_cycles_active.avg.pct",
    "bank_conflicts": "l1tex__conflicts.sum",
    "registers": "launch__registers",
    "missing": "not__there.sum",
}


def test_ncus_table_is_parsed_without_its_units_and_what_has_no_value():
    assert profile.parse(NCU, METRICS) == {"tensor_pipe": 41.25, "bank_conflicts": 1234567.0}
    line = next(line for line in NCU.splitlines() if line.startswith('"0"'))
    for output in (NCU.replace(line, f"{line}\n{line}"), NCU.replace(line + "\n", ""), "==ERROR== no device"):
        with pytest.raises(ValueError, match="kernels, not 1"):
            profile.parse(output, METRICS)


def test_the_first_counter_that_ncu_knows_is_read():
    chosen = profile.choose(
        {"sm__pipe_tensor_op_gmma_cycles_active", "sm__pipe_tensor_op_hmma_cycles_active", "dram__throughput"}
    )
    assert chosen == {
        "tensor_pipe": "sm__pipe_tensor_op_gmma_cycles_active.avg.pct_of_peak_sustained_active",
        "dram_throughput": "dram__throughput.avg.pct_of_peak_sustained_elapsed",
        "registers": "launch__registers_per_thread",
    }
    command = profile.command("ncu", "fa2", chosen)
    assert ",".join(chosen.values()) in command and command[-1] == "fa2" and "none" == command[2]


def test_a_profile_is_shown_only_for_files_as_they_were(tmp_path):
    fresh = {"kernel": "fwd_5_fa2", "source": source.source_hash(source.source_files("02_fa2_cuda", "fwd_5_fa2"))}
    rungs = {
        "fa2": {**fresh, "counters": {"tensor_pipe": 40.0}},
        "mma": {"kernel": "fwd_2_mma", "source": "0" * 12, "counters": {"tensor_pipe": 9.0}},
    }
    (tmp_path / "x.profile.json").write_text(json.dumps({"rungs": rungs}))
    assert profile.read(tmp_path / "x.profile.json") == {"fa2": {"tensor_pipe": 40.0}}
    assert profile.read(tmp_path / "missing.json") == {}
    assert all(name in (*profile.RUNGS,) for name in profile.read()), "the committed file"


def test_a_rung_that_ncu_fails_on_is_left_out_with_the_reason(monkeypatch):
    def run(words, limit):
        if "--version" in words:
            return "Version 2025.3.1.0"
        if "--query-metrics" in words:
            return "sm__pipe_tensor_cycles_active   Counter   cycle   # of cycles"
        if words[-1] == "mma":
            raise RuntimeError("ncu ... failed")
        return NCU.replace("active.avg.pct", "active.avg.pct_of_peak_sustained_active")

    said = []
    monkeypatch.setattr(profile, "run", run)
    found = profile.profile("ncu", ("mma", "fa2"), 9, said.append)
    assert list(found["rungs"]) == ["fa2"] and said == ["mma: ncu ... failed"] and found["ncu"] == "2025.3.1.0"
    assert found["rungs"]["fa2"]["counters"] == {"tensor_pipe": 41.25} and found["rungs"]["fa2"]["kernel"] == "fwd_5_fa2"


def test_the_plan_names_rungs_and_peers_that_there_are():
    folder = rows.ROOT / "steps" / "step02_fa2_cuda"
    for parts in plans.PLANS.values():
        for part in parts:
            assert set(part.peers) <= set(peers.PEERS) and set(part.dtypes) <= set(rows.DTYPES)
            for rung in part.rungs:
                assert list(folder.glob(f"fwd_*_{rung}.cu"))
                assert "bwd" not in part.passes or list(folder.glob(f"bwd_*_{rung}.cu"))
    measured_forward = {rung for parts in plans.PLANS.values() for part in parts if "fwd" in part.passes for rung in part.rungs}
    assert measured_forward == {path.stem.split("_", 2)[2] for path in folder.glob("fwd_*.cu")}


def test_a_backward_is_measured_only_under_the_rung_that_owns_it():
    forward = {c.fwd_kernel for c in bench.entrants("02")}
    backward = {c.bwd_kernel for c in bench.entrants("02") if c.backward}
    folder = rows.ROOT / "steps" / "step02_fa2_cuda"
    there = {path.stem for path in folder.glob("?wd_*.cu")}
    assert forward | backward <= there and {"fwd_0_scalar", "bwd_0_scalar", "bwd_1_fa2"} <= forward | backward
    (scalar,) = bench.entrants("02", "scalar")
    assert scalar.dtypes == ["fp32"] and 128 not in scalar.head_dims and scalar.kernel("bwd") == "bwd_0_scalar"
    (mma,) = bench.entrants("02", "mma")
    assert mma.bwd_kernel is None and mma.backward is None and "fp32" not in mma.dtypes


def test_switches_are_the_macros_that_are_0_or_1_or_an_expression_unless_defined():
    text = "#ifndef LAZY\n#define LAZY 1\n#endif\n#ifndef LATE  // why\n#define LATE 0\n#endif\n#ifndef N\n#define N 2\n#endif\n"
    text += "#ifndef WIDE\n#define WIDE (D > 1)\n#endif\n"
    assert bench.switches(text) == {"LAZY": (0,), "LATE": (1,), "WIDE": (0, 1)}
    hopper = grid.Candidate("02_fa2_cuda", "fwd_8_hopper", None)
    found = bench.switches((rows.ROOT / "steps" / "step02_fa2_cuda" / "fwd_8_hopper.cu").read_text())
    settings = [(name, value) for name, values in found.items() for value in values]
    assert {"OVERLAP", "PINGPONG", "PERSISTENT", "LAZY", "SKIP", "WIDE_STORES"} == set(found)
    turned = list(bench.switched(hopper))
    assert [c.fwd_kernel for c in turned] == [f"fwd_8_hopper:{name}={value}" for name, value in settings]
    assert [c.forward.keywords for c in turned] == [{name: value} for name, value in settings]
    assert all(c.backward is None and source.source_files(c.stage, c.fwd_kernel) for c in turned)


@pytest.mark.skipif(bool(compare.unavailable("02")), reason="stage 02 cannot run here")
def test_a_part_of_the_plan_gives_the_rows_of_its_rungs(monkeypatch):
    part = plans.Part(("scalar",), (grid.Point(1, 1, 40, 32),), ("fwd", "bwd"), ("fp32",), ("sdpa-math",))
    assert len(list(bench._jobs(part))) == 1
    ahead = []
    monkeypatch.setattr(bench, "compile_ahead", ahead.extend)
    found = list(bench.record_parts([part, part], device=bench.engine.device, commit="c", warmup=0, limit_ms=1e5))
    assert [r["kernel"] or r["peer"] for r in found] == ["fwd_0_scalar", "sdpa-math", "bwd_0_scalar", "sdpa-math"] * 2
    assert len(ahead) == 1 and all(r["error"] < 1e-4 for r in found)
    bench._compile(ahead[0])


# --- what a launch costs the host ---------------------------------------------------------------------------


def test_a_launch_is_measured_in_rounds_in_turns(monkeypatch, capsys):
    asked = []
    times = {name: iter(range(launch_cost.ROUNDS + 2)) for name in "ab"}  # two to warm up
    monkeypatch.setattr(launch_cost, "microseconds", lambda name: asked.append(name) or next(times[name]))
    assert launch_cost.measure({"a": "a", "b": "b"}) == dict.fromkeys("ab", [*range(2, launch_cost.ROUNDS + 2)])
    assert asked[:4] == ["a", "b", "a", "b"]
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert launch_cost.main([]) == 1 and "needs a GPU" in capsys.readouterr().out


@pytest.mark.skipif(bool(compare.unavailable("03")), reason="there is no Triton")
def test_the_recorded_launch_takes_at_most_15_microseconds():
    recorded = json.loads((rows.COMMITTED / "nvidia-h200.host.json").read_text())["microseconds"]
    assert 0 < recorded["02 hopper_forward"] <= 15 and set(recorded) == set(launch_cost.calls(*torch.zeros(3, 1, 1, 1, 1)))
