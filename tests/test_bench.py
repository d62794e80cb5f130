"""The measuring tools, on the CPU: costs worked by hand, rows, hashes, the order of calls, the report."""

import contextlib
import itertools
import json
import math
import os
import re
import subprocess
import sys
import time
from collections import Counter
from dataclasses import replace
from datetime import datetime, timedelta
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import typer
from rich.console import Console
from torch.nn.attention import SDPBackend
from typer.testing import CliRunner

from reference import attention
from steps import catalogue, engine
from steps.__main__ import app
from steps.bench import (
    cost,
    feature_plan,
    fingerprint,
    grid,
    launch_cost,
    peers,
    plans,
    plots,
    profile,
    report,
    rows,
    sign,
    sustained,
    timing,
    tune,
)
from steps.step02_fa2_cuda import launch
from steps.step04_ring import simulate

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


LOAD = {"timing": "sustained", "clock_mhz": 1600, "watts": 700.0}  # what a sustained row has


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
    # A new token reads k and v, 2 x 8 x 1000 x 4 elements of 2 bytes, in 2 ms; a copy of k reads and writes as much.
    token = row(B=2, H=2, Hk=1, N=1, Nk=4000, D=4, ms_median=2.0)
    assert cost.bandwidth(token) == pytest.approx((2 * 64000 + 2 * 32 + 16) / 2e-3 / 1e12)
    assert cost.bandwidth(token | {"pass": "copy"}) == pytest.approx(2 * 64000 / 2e-3 / 1e12)
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


def test_a_single_call_is_timed_from_an_idle_device_to_its_result(monkeypatch):
    order = []
    monkeypatch.setattr(timing, "synchronize", lambda device: order.append(f"{device} has done all"))
    monkeypatch.setattr(timing.time, "perf_counter", lambda: order.append("clock") or len(order))
    assert timing.one_call(lambda: order.append("call"), device="cuda") == 3000
    assert order == ["cuda has done all", "clock", "call", "cuda has done all", "clock"]


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


def test_the_matrix_form_is_aligned_at_the_bottom_right():
    q, k, v = (torch.randn(1, H, N, 8, dtype=torch.float64) for H, N in ((4, 20), (2, 30), (2, 30)))
    want, _ = attention.forward(q, k, v, causal=True)
    torch.testing.assert_close(peers.matrix_form(q, k, v, causal=True), want)


@pytest.mark.parametrize("heads", [4, 2])
def test_masks_of_sdpa_are_those_of_the_contract(heads):
    q, k, v = (torch.randn(1, n, 24, 16) for n in (4, heads, heads))
    for mask in (torch.randn(1, 1, 24, 24), torch.ones(1, 1, 24, 24, dtype=torch.bool).tril()):
        want, _ = attention.forward(q, k, v, mask=mask)
        assert (peers.sdpa(SDPBackend.MATH, q, k, v, mask=mask) - want).abs().max() < 1e-5


@pytest.mark.long  # imports torch's compiler, though it does not use it
@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
def test_masks_of_flex_are_those_of_the_contract(monkeypatch):
    monkeypatch.setattr(peers, "compiled", lambda function: function)
    q, k, v = (torch.randn(1, n, 24, 16) for n in (4, 2, 2))
    want, _ = attention.forward(q, k, v, window=(5, 0))
    assert (peers.flex(q, k, v, seen=lambda b, h, i, j: (j <= i) & (j >= i - 5)) - want).abs().max() < 1e-5
    want, _ = attention.forward(q, k, v, softcap=1.5)
    assert (peers.flex(q, k, v, change=lambda s, *_: 1.5 * torch.tanh(s / 1.5)) - want).abs().max() < 1e-5
    want, _ = attention.forward(q[:, :, :9], k, v, causal=True)
    assert (peers.flex(q[:, :, :9], k, v, causal=True) - want).abs().max() < 1e-5


TUTORIAL = """
import torch

class _attention(torch.autograd.Function):
    @staticmethod
    def forward(ctx, q, k, v, causal, sm_scale{switch}):
        pass

def attention(q, k, v, causal, scale{switch}):
    assert not {value}
    S = (q @ k.mT * scale).float()
    return (S + torch.full(S.shape[-2:], -torch.inf).triu(1) * causal if causal else S).softmax(-1).to(q.dtype) @ v
"""


@pytest.mark.parametrize("switch, value", [(", warp_specialize=True", "warp_specialize"), ("", "False")])
def test_the_tutorial_is_loaded_from_the_file_that_is_named(monkeypatch, tmp_path, switch, value):
    peers.load_tutorial.cache_clear()
    monkeypatch.delenv("STEPS_TUTORIAL", raising=False)
    assert "STEPS_TUTORIAL names no file" in peers.absent("tutorial")
    file = tmp_path / "06-fused-attention.py"
    monkeypatch.setenv("STEPS_TUTORIAL", str(file))
    assert "No such file" in peers.absent("tutorial")
    file.write_text("1 / 0")
    assert "ZeroDivisionError" in peers.absent("tutorial")
    file.write_text(TUTORIAL.format(switch=switch, value=value))
    assert peers.absent("tutorial") is None
    q, k, v = torch.randn(3, 1, 2, 128, 16, dtype=torch.float16)
    for causal in (False, True):
        want, _ = attention.forward(q, k, v, causal=causal)
        assert (peers.tutorial(q, k, v, causal) - want).abs().max() < 1e-2
    for bad in ((q.float(), k, v), (q[:, :, :100], k[:, :, :100], v), (q, k[:, :1], v)):
        with pytest.raises(ValueError, match="the tutorial takes"):
            peers.tutorial(*bad)
    peers.load_tutorial.cache_clear()


@pytest.mark.parametrize("with_lse", [False, True])
def test_flash_attention_4_takes_heads_after_rows(monkeypatch, with_lse):
    def flash_attn_func(q, k, v, causal):
        out, lse = matrix(*(x.transpose(1, 2) for x in (q, k, v)), causal=causal)
        return (out.transpose(1, 2), lse) if with_lse else out.transpose(1, 2)

    peers.load_fa4.cache_clear()
    monkeypatch.setitem(sys.modules, "flash_attn", None)
    assert "ImportError" in peers.absent("fa4") or "ModuleNotFoundError" in peers.absent("fa4")
    monkeypatch.setitem(sys.modules, "flash_attn", SimpleNamespace())
    monkeypatch.setitem(sys.modules, "flash_attn.cute", SimpleNamespace(flash_attn_func=flash_attn_func))
    assert peers.absent("fa4") is None
    q, k, v = torch.randn(3, 1, 2, 24, 16)
    assert (peers.fa4(q, k, v, True) - attention.forward(q, k, v, causal=True)[0]).abs().max() < 1e-5
    peers.load_fa4.cache_clear()


def test_an_absent_peer_is_said_once_and_the_others_are_measured(monkeypatch):
    def missing():
        raise ModuleNotFoundError("No module named 'flash_attn'")

    monkeypatch.setitem(peers.FOUND_ELSEWHERE, "fa4", missing)
    found, said = measured([candidate()], SMALL * 2, peers=("fa4", "sdpa-math"), passes=("fwd", "bwd"))
    assert said == ["left out: fa4: ModuleNotFoundError: No module named 'flash_attn'"]
    assert Counter(r["peer"] for r in found) == {None: 4, "sdpa-math": 4}


@pytest.mark.gpu
@pytest.mark.parametrize("name", peers.PEERS)
def test_peers_on_the_gpu(name):
    if reason := peers.absent(name):
        pytest.skip(f"{name} is absent: {reason}")
    N, dtype = (128, "fp16") if name == "tutorial" else (100, "bf16")
    inputs = grid.make_inputs(grid.Point(1, 2, N, 64, causal=True), dtype, "cuda")
    truth = grid.sample_truth(inputs, True)
    for pass_, names in grid.RESULTS.items():
        got = dict(zip(names, grid.Beside(name).call(inputs, True, pass_)(), strict=True))
        assert grid.sample_error(got, truth) < 0.05
    if name in ("sdpa-flash", "sdpa-cudnn"):
        with pytest.raises(RuntimeError):
            peers.PEERS[name](*(x.float() for x in inputs[1:]))


# --- rows ---------------------------------------------------------------------------------------------------


def test_rows_survive_writing_and_reading(tmp_path):
    written = [row(options={"window": 128}), peer_row(), row(gpu="Tesla T4")]
    written[1:1] = [row(peak_bytes=2**40), peer_row(peer="copy", tflops=0.0, **{"pass": "copy"})]
    files = rows.append(written, tmp_path)
    assert {file.name for file in files} == {"nvidia-h200.jsonl", "tesla-t4.jsonl"}
    assert rows.read(tmp_path) == written and rows.read(tmp_path / "missing") == []
    assert rows.validate(row() | rows.provenance("cpu", commit="abc123"))["commit"] == "abc123"
    with files[0].open("a") as file:
        file.write(json.dumps({name: value for name, value in row().items() if name != "options"}))
    with pytest.raises(ValueError, match=r"h200\.jsonl:5: .*options is missing"):
        rows.read(tmp_path)


def test_a_row_tells_where_and_when_it_was_measured(monkeypatch):
    here = rows.provenance("cpu")
    assert (here["gpu"], here["n_gpus"], here["driver"], here["cuda"]) == ("CPU", 0, None, None)
    told = {"nvidia-smi": "580.1\n580.1", "git": "abc"}  # nvidia-smi has a line for each GPU
    monkeypatch.setattr(rows, "_output", lambda command, *_: told[command])
    monkeypatch.setattr(rows, "datetime", SimpleNamespace(now=lambda zone: datetime(2026, 1, 31, 23, tzinfo=zone)))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: f"the GPU {device}")
    there = rows.provenance("cuda:1", n_gpus=2)
    assert [there[name] for name in ("gpu", "n_gpus", "driver", "commit")] == ["the GPU cuda:1", 2, "580.1", "abc"]
    assert there["date"] == "2026-01-31" and there["run"].startswith("20260131T230000Z-")


@pytest.mark.parametrize("script, says", [("echo yes", "yes"), ("echo no; exit 1", None), ("true", None)])
def test_what_a_command_says_counts_if_it_succeeds(script, says):
    assert rows._output("sh", "-c", script) == says and rows._output("there-is-no-such-command") is None


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
        ({"peak_bytes": 1.5}, "peak_bytes is 1.5"),
        ({"peak_bytes": None}, "peak_bytes is None"),
        ({"pass": "copy"}, "the pass copy"),
        ({**dict.fromkeys(("stage", "kernel", "source")), "peer": "copy", "pass": "copy"}, "but 0 of a copy"),
        ({"pass": "matmul"}, "the pass matmul"),
        ({"timing": "sustained"}, "sustained rows alone"),
        ({"timing": "sustained", "clock_mhz": 1500}, "sustained rows alone"),
        ({"watts": 700.0}, "sustained rows alone"),
        ({**LOAD, "watts": 0.0}, "watts > 0"),
        ({**LOAD, "n_gpus": 2}, "sustained on one GPU"),
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


def test_the_latest_row_of_the_runs_that_measured_most_wins():
    others = [peer_row(), row(options={"window": 64}), row(timing="sustained"), row(Nk=256), row(layout="zigzag")]
    others = [{**one, "run": "r2"} for one in others]
    assert rows.latest([row(run="r1"), *others, row(run="r3")]) == [row(run="r3"), *others]
    beside_two = [row(run="r1"), row(kernel="other", run="r1"), peer_row(run="r1")]
    again = [{**one, "run": "r2"} for one in beside_two]
    beside_one = [row(run="r3"), peer_row(run="r3")]
    assert rows.latest(beside_two + again + beside_one) == again


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


def test_a_launch_has_the_row_s_sizes(monkeypatch):
    monkeypatch.setattr(launch, "geometry", lambda stem, **how: how)
    of_row = of_02("fwd_8_hopper:LAZY=0", B=2, H=12, Hk=4, N=100, Nk=200, D=64, causal=True)
    assert fingerprint.launches(of_row)["fwd_8_hopper"] == dict(
        B=2, H=12, Hk=4, Nq=100, Nk=200, D=64, causal=True, dtype=torch.bfloat16, processors=132,
        shared_limit=227 * 1024, LAZY=0,
    )  # fmt: skip


def test_what_is_gone_or_has_changed_is_stale():
    assert not fingerprint.is_stale(of_02(source=fingerprint.row_hash(of_02())))
    assert fingerprint.fresh([peer_row(), of_02()]) == [peer_row()] and fingerprint.is_stale(of_02())
    for gone in (of_02(D=7), of_02("fwd_9_none"), row(kernel="fwd_9_none"), row(stage="09_none")):
        assert fingerprint.row_hash(gone) is None and fingerprint.is_stale(gone)
    beside_a_ring = of_02("fwd_9_none", n_gpus=2)  # shown as long as the ring's own code is as it was
    assert not fingerprint.is_stale(beside_a_ring) and fingerprint.fresh([beside_a_ring]) == [beside_a_ring]
    assert fingerprint.is_stale(row(stage="04_ring", kernel="ring+none", n_gpus=2))


def test_a_record_is_signed_only_if_it_was_fresh_and_launches_and_compiles_alike(monkeypatch):
    def record(**changes):
        return {name: of_02()[name] for name in sign.FIELDS} | changes

    cases = [
        (record(), None),
        (record(D=128), "other machine code"),  # compiled() below
        (record(D=32), "other machine code"),  # neither text compiles
        (record(D=96), "stale in the old tree, too"),
        (record(dtype="fp16"), "another launch"),
        (record(D=7), "other code"),
        (record(stage="03_triton"), "other code"),
    ]
    tried = [one for one, _ in cases]
    launched = [json.loads(json.dumps(fingerprint.launches(one))) for one in tried[:3]] + [None, {}, {}, {}]
    monkeypatch.setattr(sign, "inside", lambda tree, *_: (launched, {"fwd_5_fa2": tree}))
    code = {"128": lambda text: text, "32": lambda text: None, "64": lambda text: b"the same"}
    monkeypatch.setattr(sign, "compiled", lambda text, macros, arch: code[dict(macros)["D"]](text))
    assert sign.verdicts(tried, "old tree") == [reason for _, reason in cases]
    made = iter([b"1", b"2", b"3", b"3"])
    monkeypatch.setattr(sign, "compiled", lambda *_: next(made))
    assert sign.compile_alike("old", "new", (), "sm_90a"), "NVRTC may make other machine code the next time"


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
    found, said = measured([candidate()], passes=("fwd", "bwd", "fwd+bwd"))
    who = [("fwd_1_matrix", "fwd"), ("sdpa-math", "fwd"), ("bwd_1_matrix", "bwd"), ("sdpa-math", "bwd")]
    who += [("fwd_1_matrix+bwd_1_matrix", "fwd+bwd"), ("sdpa-math", "fwd+bwd")]
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


@pytest.mark.parametrize("pass_", ["fwd", "bwd", "fwd+bwd"])
@pytest.mark.parametrize("name", ["forward", "backward"])
def test_the_error_is_the_kernels_own(pass_, name):
    def off(*args, **options):
        first, *others = (matrix if name == "forward" else matrix_backward)(*args, **options)
        first[-1, -1, -1, -1] += 0.25
        return first, *others

    found, _ = measured([candidate(**{name: off})], passes=(pass_,))
    wrong = 0.25 if {"forward": "fwd", "backward": "bwd"}[name] in pass_ else 0
    assert found[0]["error"] == pytest.approx(wrong, abs=1e-4) and found[1]["error"] < 1e-5


def test_a_peer_may_have_a_function_of_its_own():
    dout, q, k, v = inputs = grid.make_inputs(SMALL[0], "fp32", "cpu")
    other = grid.Beside("sdpa-math", lambda q, k, v, causal: 3 * q + causal)
    assert torch.equal(other.call(inputs, True, "fwd")()[0], 3 * q + 1)
    for pass_ in ("bwd", "fwd+bwd"):
        with pytest.raises(RuntimeError, match="not have been used"):  # k, without which it can do
            other.call(inputs, False, pass_)()
    assert not any(x.requires_grad for x in inputs), "others are measured on them, too"


def test_a_sample_is_of_the_last_heads_and_if_asked_of_the_last_queries():
    inputs = grid.make_inputs(SMALL[0], "fp32", "cpu")
    dout, q, k, v = inputs
    out, _ = attention.forward(q, k, v, causal=True)
    names = dict(zip(grid.RESULTS["bwd"], attention.backward(dout, q, k, v, causal=True), strict=True)) | {"out": out}
    whole, part = (grid.sample_truth(inputs, True, kv_heads=1, last=last) for last in (None, 5))
    assert set(whole) == set(names) and set(part) == {"out", "dq"}
    for name, want in names.items():
        assert (whole[name] - want[-1:, -whole[name].shape[1] :]).abs().max() < 1e-12
        assert whole[name].shape[1] == (1 if name in ("dk", "dv") else 2)
    for name in part:
        assert (part[name] - whole[name][:, :, -5:]).abs().max() < 1e-12
        wrong = names[name].clone()
        wrong[0], wrong[:, :2], wrong[:, :, :-5] = 9, 9, 9  # all outside the sample
        assert grid.sample_error({name: wrong}, part) < 1e-12
        wrong[-1, -2, -5] += 0.5
        assert grid.sample_error({name: wrong}, part) == pytest.approx(0.5)
    mine = []
    grid.sample_truth(inputs, True, options=lambda heads: mine.append(heads) or {})
    assert mine == [slice(0, 2), slice(2, 4)]


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
    for pass_ in ("bwd", "fwd+bwd"):
        assert "has no backward" in measured([candidate(backward=None)], passes=(pass_,))[1][0]


def test_who_is_too_slow_is_not_tried_at_larger_sizes():
    tried = []

    def slow(q, k, v, *, causal=False):
        tried.append(q.shape[2])
        return matrix(q, k, v, causal=causal)

    points = [grid.Point(1, 1, N, D) for N, D in ((16, 8), (32, 8), (16, 8), (8, 8), (32, 4))]
    found, said = measured([candidate(forward=slow)], points, peers=(), limit_ms=0.0)
    assert not found and tried == [16, 16, 8, 8, 32, 32]
    assert "more than the limit" in said[0] and "too slow at a smaller size" in said[1]
    assert measured([candidate()], until=0.0)[0] == [], "no point is begun when the time is up"


def test_calls_to_warm_up_are_as_many_as_asked_for():
    called = []
    counting = candidate(forward=lambda *args, **how: called.append(1) or matrix(*args, **how))
    measured([counting], peers=(), warmup=5)
    assert len(called) == 2 + 5 + timing.MIN_REPS, "the first two decide who takes part"


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
    parts = [part for parts in plans.PLANS.values() for part in parts if isinstance(part, plans.Part)]
    others = [part for parts_ in plans.PLANS.values() for part in parts_ if part not in parts]
    assert {type(part) for part in others} == {plans.FeaturePart, plans.GroupedPart, plans.ring_plan.RingPart}
    for part in parts:
        assert set(part.peers) <= set(peers.PEERS) and set(part.dtypes) <= set(rows.DTYPES)
        assert {(p.B * p.N, p.H * p.D) for p in part.grid} == {(16384, 2048)}, "the papers'"
    for number, files in (("02", STAGE_02.glob("fwd_*.cu")), ("03", (STAGE_02.parent / "step03_triton").glob("fwd_*"))):
        of_stage = [part for part in parts if part.stage == number and "fwd" in part.passes]
        assert {rung for part in of_stage for rung in part.rungs} == {path.stem.split("_", 2)[2] for path in files}


@pytest.mark.parametrize("name", ["fast", "bwd"])
def test_flash_attention_4_is_a_peer_of_the_main_plans(name):
    assert plans.PLANS[name] and all("fa4" in part.peers for part in plans.PLANS[name])


def test_a_backward_is_measured_only_under_the_rung_that_owns_it():
    found = {c.fwd_kernel: c for c in plans.entrants("02")}
    assert found["fwd_5_fa2"].bwd_kernel == "bwd_1_fa2" and found["fwd_2_mma"].backward is None
    (scalar,) = plans.entrants("02", "scalar")
    assert scalar.dtypes == ["fp32"] and scalar.kernel("bwd") == "bwd_0_scalar"


def test_switches_are_the_macros_that_are_0_or_1_or_an_expression_unless_defined():
    shapes = "#ifndef A\n#define A 1\n", "#ifndef B  // why\n#define B 0\n", "#ifndef N\n#define N 2\n"
    text = "#endif\n".join([*shapes, "#ifndef WIDE\n#define WIDE (D > 1)\n"])
    assert plans.switches(text) == {"A": (0,), "B": (1,), "WIDE": (0, 1)}
    some = {"fwd_8_hopper": ("PINGPONG=0", "LAZY=0"), "fwd_5_fa2": ("FEW_MASKS=0", "SECTIONS=0")}
    for kernel, wanted in some.items():
        rung = kernel.split("_")[-1]
        (whole,) = plans.entrants("02", rung)
        same, *turned, _ = plans.switched(whole)
        assert same.fwd_kernel == kernel and {f"{kernel}:{one}" for one in wanted} <= {c.fwd_kernel for c in turned}
        q, k, v = torch.zeros(3, 1, 1, 0, 64, dtype=torch.bfloat16)
        for c in turned:
            ((name, value),) = re.findall(r"(\w+)=(\d)", c.fwd_kernel)
            assert c.forward.keywords == {"rung": rung, name: int(value)} and c.backward is None
            c.forward(q, k, v, causal=True)  # takes the switch; without queries nothing is compiled
            assert fingerprint.row_hash(of_02(c.fwd_kernel)) not in (None, fingerprint.row_hash(of_02(kernel)))


@pytest.mark.parametrize("kernel", plans.SEPARATE)
def test_what_large_scores_cost_is_measured_with_a_kernel_that_is_wrong_for_them_alone(kernel):
    (whole,) = plans.entrants("02", kernel.split("_")[-1])
    *_, fused = plans.switched(whole)
    assert fused.fwd_kernel == f"{kernel}:LARGE_SCORES=0" and fused.backward is None
    assert fingerprint.row_hash(of_02(fused.fwd_kernel)) not in (None, fingerprint.row_hash(of_02(kernel)))
    separate, fma = plans.SEPARATE[kernel]
    own = (plans.launch.HERE / f"{kernel}.cu").read_text()
    assert Path(fused.forward.keywords["rung"].file).read_text() == own.replace(separate, fma) != own
    q, k, v = (torch.randn(1, 1, 150, 32, generator=torch.Generator().manual_seed(n)) for n in range(3))
    q, k, v = (x.to(engine.device, torch.bfloat16) for x in (q, k, v))
    for found, expected in zip(fused.forward(q, k, v), whole.forward(q, k, v), strict=True):
        torch.testing.assert_close(found, expected)


def test_flash_attention_4_is_beside_whatever_a_table_shows_in_16_bits():
    for name in ("fast", "bwd", "triton", "compilers"):
        assert all("fa4" in part.peers for part in plans.PLANS[name] if "bf16" in part.dtypes), name


def test_a_backward_that_adds_in_order_is_another_kernel():
    backwards = [part for part in plans.PLANS["switches"] if part.passes == ("bwd",)]
    any_order, ordered = (c for part in backwards for c in part.candidates())
    assert ordered.bwd_kernel == f"{any_order.bwd_kernel}:DETERMINISTIC=1"
    hashes = [fingerprint.row_hash(of_02(c.bwd_kernel)) for c in (any_order, ordered)]
    assert None not in hashes and len(set(hashes)) == 2
    assert ordered.backward.keywords == {"rung": "hopper", "deterministic": True}
    launched = fingerprint.launches(of_02(ordered.bwd_kernel))["bwd_3_hopper"]
    assert {macros["DETERMINISTIC"] for *_, macros in launched} == {1}


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
    assert ahead[0] == (part, 0, "fp32", grid.Point(1, 1, 128, 32))


def test_peers_that_take_long_to_compile_are_compiled_ahead_at_their_own_sizes(monkeypatch):
    called = []
    points = grid.Point(2, 1, 16, 8), grid.Point(1, 1, 24, 8)
    part = plans.Part(("scalar",), points, ("fwd", "bwd"), ("fp32",), ("sdpa-math", "flex", "compiled"))
    monkeypatch.setattr(plans.Part, "candidates", lambda self: [candidate()])
    monkeypatch.setitem(peers.PEERS, "flex", lambda q, k, v, causal: called.append(tuple(q.shape)) or q + k + v)
    jobs = list(part.jobs())
    assert [job[0] for job in jobs] == [0, 1, 1, 2, 2] and [job[2] for job in jobs[1:]] == [*points, *points]
    monkeypatch.setattr(engine, "device", "cpu")
    for job in jobs[:3]:
        part.compile(*job)
    assert called == [(2, 1, 16, 8)] * 2 + [(1, 1, 24, 8)] * 2


def test_float32_has_the_time_that_its_longest_backward_takes(monkeypatch):
    limits = {}

    def note(candidates, peers, points, *, dtypes, limit_ms, **_):
        limits.setdefault(dtypes, set()).add(limit_ms)
        return ()

    monkeypatch.setattr(plans, "measure", note)
    monkeypatch.setattr(plans, "entrants", lambda *_: ())
    monkeypatch.setattr(plans, "compile_ahead", lambda jobs: None)
    assert not list(plans.record_parts(plans.PLANS["triton"] + plans.PLANS["float32"], limit_ms=1000))
    longest = cost.flops(1, 16, 16384, 128, pass_="bwd") / 4e12 * 1e3  # at 4 TFLOP/s
    assert limits == {("bf16",): {1000}, ("fp32",): {3000}} and 1000 < longest < 3000


# --- the plan of the features -------------------------------------------------------------------------------

needs_triton = pytest.mark.skipif(bool(catalogue.unavailable("03")), reason="there is no Triton")
FEATURES = [feature.name for feature in feature_plan.features(8, 1, 16, "cpu")]


def errors_of(feature, passes):
    """{(who, pass): largest error} of those who can run here."""
    inputs, found = grid.make_inputs(feature.point, "bf16", engine.device), {}
    truth = feature.truth(inputs)
    for entrant in feature.entrants():
        for pass_ in passes:
            try:
                results = entrant.call(inputs, feature.point.causal, pass_)()
            except (RuntimeError, NotImplementedError):  # a backend that needs a GPU
                continue
            results = dict(zip(grid.RESULTS[pass_], results, strict=True))
            found[entrant.name(pass_), pass_] = grid.sample_error(results, truth)
    return found


@needs_triton
@pytest.mark.parametrize("name", FEATURES)
def test_a_feature_computes_what_the_reference_does(monkeypatch, name):
    monkeypatch.setattr(feature_plan, "SOFTCAP", 1.0)  # 50 hardly changes scores as small as these
    (feature,) = (one for one in feature_plan.features(16, 2, 16, engine.device) if one.name == name)
    found = errors_of(replace(feature, peers={}), ["fwd"])
    assert list(found) == [("03_triton flash", "fwd")] and found["03_triton flash", "fwd"] < 0.02


@needs_triton
def test_decoding_and_long_contexts_compute_what_the_reference_does():
    token = replace(feature_plan.decoding(40), point=grid.Point(2, 4, 1, 16, Hk=2, Nk=40), peers={})
    long = replace(feature_plan.long_context(20), point=grid.Point(1, 1, 20, 16, causal=True), last=5, peers={})
    assert "decode" in token.entrants()[0].forward.__module__
    errors = errors_of(token, token.passes) | errors_of(long, long.passes)
    assert list(errors) == [("03_triton decode", "fwd"), ("03_triton flash", "fwd+bwd")]
    assert max(errors.values()) < 0.03


@needs_triton
@pytest.mark.long
@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
@pytest.mark.parametrize("name", FEATURES)
def test_a_feature_s_peers_and_backward_compute_what_the_reference_does(monkeypatch, name):
    monkeypatch.setattr(peers, "compiled", lambda function: function)
    monkeypatch.setattr(feature_plan, "SOFTCAP", 1.0)
    (feature,) = (one for one in feature_plan.features(64, 2, 16, engine.device) if one.name == name)
    found = errors_of(feature, ["fwd", "bwd", "fwd+bwd"])
    own = {("03_triton flash", pass_) for pass_ in ("fwd", "bwd")} | {("03_triton flash", "fwd+bwd")}
    assert own | {("flex", "fwd") for name in feature.peers if name == "flex"} <= set(found)
    assert max(found.values()) < 0.03


def test_a_feature_counts_the_scores_that_positions_leave_visible():
    found = feature_plan.features(16, 2, 16, "cpu")
    for feature in found:
        point = feature.point
        options = feature_plan.reference_options(feature, slice(1, 2))
        by_position = {name: options[name] for name in options if "mask" not in name}
        seen = point.B * int(attention.Features(**by_position).seen(point.N, point.N).sum())
        counted = feature.share * point.flops("fwd") / (4 * point.H * point.D)
        assert counted == (seen / 2 if point.causal else seen), feature.name
        numbers = {"window": [2, 0], "softcap": 50.0, "dropout_p": 0.1}
        assert {name: numbers[name] for name in feature.options if name in numbers}.items() <= feature.told.items()
    assert len({json.dumps(feature.where("fwd")["options"]) for feature in found}) == len(found)


TIMING = timing.Timing(2.0, 1.0, 3.0, 30)
called = []


class Noted(grid.Beside):
    """Notes in `called` that it is called, and computes nothing."""

    def call(self, inputs, causal, pass_):
        names = {"out": 1, "dq": 1, "dk": 2, "dv": 3}
        return lambda: called.append((self.peer, pass_)) or tuple(inputs[names[x]] for x in grid.RESULTS[pass_])


def test_all_features_of_a_pass_take_turns_in_one_run(monkeypatch):
    def turns(calls, warmup, device):
        called.clear()
        for call in calls.values():
            call()
        rounds.append([pass_ for _, pass_ in called])
        return dict.fromkeys(calls, TIMING)

    rounds, copied = [], []
    monkeypatch.setattr(feature_plan.timing, "interleaved", turns)
    monkeypatch.setattr(feature_plan.Feature, "entrants", lambda self: [Noted(self.kernel), *map(Noted, self.peers)])
    monkeypatch.setattr(feature_plan, "peak_bytes", lambda call: 7)
    monkeypatch.setattr(feature_plan, "copy", lambda x: copied.append(tuple(x.shape)) or peers.copy(x))
    part = feature_plan.FeaturePart(16, ((2, 16), (1, 8)), 32, 16)
    how = dict(device="cpu", commit="c", say=print)
    found = list(part.record(**how))
    assert [set(one) for one in rounds] == [{"fwd"}, {"bwd"}] * 2 + [{"fwd"}, {"fwd+bwd"}]
    assert len({r["run"] for r in found}) == 1
    for (name, D, pass_), count in Counter((r["options"]["feature"], r["D"], r["pass"]) for r in found).items():
        (feature,) = (one for group in part.groups("cpu") for one in group if (one.name, one.point.D) == (name, D))
        assert count == (1 if pass_ == "copy" else 1 + len(feature.peers))
    assert {r["options"]["feature"] for r in found if r["pass"] == "bwd"} == set(FEATURES)
    assert {(r["options"]["feature"], r.get("peak_bytes")) for r in found if "peak_bytes" in r} == {("memory", 7)}
    (copy,) = (r for r in found if r["pass"] == "copy")
    assert copied == [(8, 8, 32, 128)] and copy["tflops"] == copy["error"] == 0
    assert cost.bandwidth(copy) == pytest.approx(2 * 8 * 8 * 32 * 128 * 2 / 2e-3 / 1e12)
    assert {r["D"] for r in found if r["peer"] == "flex" and r["N"] == 16} == {16}, "only beside the first size"
    for r in found:
        if r["options"]["feature"] == "window":
            assert r["options"]["window"] == [2, 0]
            flops = 4 * r["H"] * r["D"] * 45  # 1 + 2 + 14 * 3 scores
            assert r["tflops"] == pytest.approx(flops * (1 if r["pass"] == "fwd" else 2.5) / 2e9)
    assert list(part.record(**how, until=0.0)) == []


@needs_triton
def test_grouped_heads_take_turns_with_heads_of_their_own(monkeypatch):
    monkeypatch.setattr(
        feature_plan, "make_inputs", lambda point, *_: grid.make_inputs(replace(point, N=8), "bf16", "cpu")
    )
    monkeypatch.setattr(feature_plan.timing, "interleaved", lambda calls, **_: dict.fromkeys(calls, TIMING))
    own = [f.entrants()[0] for group in feature_plan.GroupedPart().groups("cpu") for f in group]
    assert {one.kernel("bwd") for one in own} == {"bwd_3_hopper"} and {one.stage for one in own} == {"02_fa2_cuda"}
    monkeypatch.setattr(feature_plan.Feature, "entrants", lambda self: [Noted(self.kernel), *map(Noted, self.peers)])
    found = list(feature_plan.GroupedPart().record(device="cpu", commit="c"))
    assert [(r["options"]["feature"], r["causal"], r["Hk"]) for r in found if r["peer"] == "hopper"] == [
        ("own heads", False, 8),
        ("grouped heads", False, 1),
        ("own heads, causal", True, 8),
        ("grouped heads, causal", True, 1),
    ]


@needs_triton
def test_every_entrant_of_the_features_is_compiled_ahead(monkeypatch):
    part = feature_plan.FeaturePart(16, ((2, 16), (1, 8)), 32, 16)
    groups, jobs = list(part.groups("cpu")), list(part.jobs())
    assert len(set(jobs)) == len(jobs) == sum(len(one.entrants()) for group in groups for one in group)
    monkeypatch.setattr(engine, "device", "cpu")
    numbered = lambda self: [Noted(f"{self.name} {n}") for n in range(1 + len(self.peers))]  # noqa: E731
    monkeypatch.setattr(feature_plan.Feature, "entrants", numbered)
    for g, f, n in jobs:
        called.clear()
        part.compile(g, f, n)
        assert called == [(f"{groups[g][f].name} {n}", pass_) for pass_ in groups[g][f].passes]


@pytest.mark.gpu
def test_peak_memory_counts_results_and_not_the_inputs():
    x = torch.zeros(2**20, device="cuda")
    assert 2 * x.nbytes <= feature_plan.peak_bytes(lambda: (x + 1) * 2) <= 2 * x.nbytes + 2**21


# --- tune ---------------------------------------------------------------------------------------------------


def test_neighbours_are_a_step_away_and_the_row_itself_comes_first():
    near = tune.neighbours((64, 128, 4, 2))
    assert near[0] == (64, 128, 4, 2) and len(near) == len(set(near)) == 3 * 3 * 2 * 3
    assert {row[0] for row in near} == {32, 64, 128} and {row[1] for row in near} == {64, 128, 256}
    assert {row[2] for row in near} == {4, 8} and {row[3] for row in near} == {1, 2, 3}
    assert {row[0] for row in tune.neighbours((16, 32, 16, 1))} == {16, 32}, "tensor cores take 16 rows"
    assert {row[2:] for row in tune.neighbours((16, 32, 16, 1))} == {(w, s) for w in (4, 8, 16) for s in (1, 2)}


def test_registers_are_those_of_sums_and_scores():
    # The forward keeps O (128 x 128) and S (128 x 64), with 128 threads.
    assert tune.registers(tune.Target("tma", "forward"), (128, 64, 4, 2)) == 128 + 64
    # dK and dV (64 x 128 each), S and dP (32 x 64 each); dQ (32 x 128), S and dP.
    assert tune.registers(tune.Target("tma", "keys"), (32, 64, 4, 2)) == 64 + 64 + 16 + 16
    assert tune.registers(tune.Target("tma", "queries"), (32, 64, 8, 2)) == 16 + 8 + 8


FAST, OWN = (32, 64, 4, 2), (64, 64, 4, 2)


class Stage:
    """A module whose kernel takes a time of its own for each row, on a clock of its own."""

    def __init__(self):
        self.now, self.launched = 0.0, []
        self.TILES = {64: (1, 1, 1, 1), 128: OWN}
        self.forward_kernel = self
        self.milliseconds = {OWN: 1.0, FAST: 0.5}

    def __getitem__(self, blocks):
        return self.launch

    def launch(self, row):
        self.launched.append(row)
        self.now += self.milliseconds.get(row, 2.0)

    def forward(self, q, k, v):
        row, self.now = self.TILES[128], self.now + 100.0  # The launcher also does other things.
        self.forward_kernel["blocks"](row)
        return (q * (math.nan if row[3] == 3 and row[2] == 8 else 1),)


@pytest.fixture
def stage(monkeypatch):
    """A `Stage` in the place of rung tma's forward. Rows of one stage do not fit, and 32x32 with 8 warps takes long."""
    stage = Stage()
    stage.milliseconds |= {(32, 32, 8, n): 3.5 for n in (1, 2, 3)}
    monkeypatch.setattr(tune, "module", lambda file: stage)
    monkeypatch.setattr(timing, "clock", lambda device: (lambda: stage.now, lambda a, b: b - a))
    monkeypatch.setattr(tune.Target, "point", grid.Point(1, 1, 16, 128))
    monkeypatch.setattr(engine, "device", "cpu")
    reason = "does not fit: shared memory"
    monkeypatch.setattr(tune, "failures", lambda target, rows: [reason if row[3] == 1 else None for row in rows])
    return stage


def test_a_sweep_times_the_kernel_alone_and_all_take_turns(stage):
    tracked = []

    def track(items, total, description):
        tracked.append((description, total, len(list(items := list(items)))))
        return items

    found = tune.sweep(tune.Target("tma", "forward"), track, reps=4, warmup=1)
    assert isinstance(stage.forward_kernel, Stage) and stage.TILES == {64: (1, 1, 1, 1), 128: OWN}
    times = {tuple(one["row"]): one["ms_median"] for one in found["candidates"]}
    assert times[OWN] == 1.0 and times[FAST] == 0.5 and set(times.values()) == {0.5, 1.0, 2.0}
    assert [*times][:2] == [FAST, OWN] and all(one["reps"] == 4 for one in found["candidates"])
    flops = 4 * 16 * 16 * 128
    assert found["candidates"][0]["tflops"] == pytest.approx(flops / 0.5e-3 / 1e12)
    reasons = {tuple(one["row"]): one["reason"] for one in found["left_out"]}
    assert times.keys() | reasons.keys() == set(tune.neighbours(OWN)) and not times.keys() & reasons.keys()
    for row, reason in reasons.items():
        Br, Bc, warps, stages = row
        if (Br * 128 + Br * Bc) / (32 * warps) > 255:
            assert reason == "needs more than 255 registers a thread"
        elif stages == 1:
            assert reason == "does not fit: shared memory"
        elif (warps, stages) == (8, 3):
            assert reason == "computes something else"
        else:
            assert row[:3] == (32, 32, 8) and reason == "more than 3 times as slow"
    rounds = stage.launched[-5 * len(times) :]
    for n in range(5):
        turn = rounds[n * len(times) : (n + 1) * len(times)]
        assert set(turn) == set(times) and turn[0] == [row for row in tune.neighbours(OWN) if row in times][n]
    assert [total for _, total, count in tracked] == [count for _, total, count in tracked] and tracked[1][1] == 5
    assert found["source"] == fingerprint.code_hash("03_triton", "fwd_1_tma") and found["N"] == 16
    assert json.loads(json.dumps(found)) == found


def test_a_sweep_leaves_everything_as_it_was_when_something_fails(stage, monkeypatch):
    before = vars(stage).copy()

    def broken(q, k, v):
        raise RuntimeError("no memory")

    stage.forward = broken
    with pytest.raises(RuntimeError, match="no memory"):
        tune.sweep(tune.Target("tma", "forward"))
    assert stage.TILES[128] == OWN and stage.forward_kernel is before["forward_kernel"]
    monkeypatch.setattr(tune, "failures", lambda target, rows: ["does not fit: shared memory"] * len(rows))
    with pytest.raises(RuntimeError, match="the table's own row, 64x64, 4 warps, 2 stages, does not fit"):
        tune.sweep(tune.Target("tma", "forward"))


def test_a_neighbour_is_faster_only_by_more_than_the_noise(stage):
    found = tune.sweep(tune.Target("tma", "forward"))
    best, own = found["candidates"][:2]
    assert tune.verdict(found).startswith("32x64, 4 warps, 2 stages is 2.00 times as fast here as the table's 64x64")
    console = Console(width=80)
    with console.capture() as shown:
        console.print(tune.table(found))
    lines = [line.split() for line in shown.get().splitlines()]
    assert ["32x64", "4", "2", f"{best['tflops']:.4g}", "2.00"] in lines
    assert ["64x64", "4", "2", f"{own['tflops']:.4g}", "its", "row"] in lines
    assert tune.left_out(found).startswith("Left out: ") and " does not fit: shared memory" in tune.left_out(found)
    assert tune.left_out(found | {"left_out": []}) == ""
    best |= {"ms_p80": 1.05}
    own |= {"ms_p20": 1.0, "ms_p80": 1.1}
    assert tune.verdict(found).startswith("No neighbour is faster")


def test_the_sweep_s_figure_has_a_point_for_each_candidate_and_a_ring_around_the_table_s_row(stage):
    found = tune.sweep(tune.Target("tma", "forward")) | {"gpu": "NVIDIA H200"}
    ax = plots.tiles(found).axes[0]
    *points, line, ring = ax.lines
    drawn = sorted(y for one in points for y in one.get_ydata())
    assert drawn == sorted(one["tflops"] for one in found["candidates"])
    own = tune.own_row(found)["tflops"]
    assert list(line.get_ydata()) == [own, own] and list(ring.get_ydata()) == [own]
    (same,) = (one for one in points if one.get_label() == "4 warps, 2 stages")
    assert ring.get_xdata()[0] in list(same.get_xdata())
    labels = [text.get_text() for text in ax.get_xticklabels()]
    assert labels[round(ring.get_xdata()[0])] == "64x64" and "NVIDIA H200, fwd_1_tma" in ax.get_title("left")


@needs_triton
@pytest.mark.parametrize("rung", tune.FILES)
@pytest.mark.parametrize("kernel", tune.KERNELS)
def test_the_tables_of_the_stage_are_those_that_the_launchers_read(rung, kernel):
    for D, dtype in ((128, "bf16"), (65, "fp16"), (64, "bf16"), (256, "fp16")):
        target = tune.Target(rung, kernel, D, dtype)
        assert target.key == max(64, 1 << (D - 1).bit_length()) and len(target.row) == 4
        assert tune.registers(target, target.row) <= 255
    target, launched = tune.Target(rung, kernel, 16, "fp32" if rung == "fused" else "fp16"), []
    other, before = (32, 16, 8, 5), dict(target.table)
    stage, name = vars(tune.module(target.file)), tune.KERNELS[kernel][2]
    timed = tune.Timed(stage[name], lambda: len(launched))

    class Watched:
        def __getitem__(self, blocks):
            return lambda *x, **options: launched.append(options) or timed[blocks](*x, **options)

    inputs = target.inputs(grid.Point(1, 1, 32, 16))
    with tune.replaced(stage, name, Watched()):
        results = target.run(inputs, other)
    (how,) = launched
    assert (how["Br"], how["Bc"], how["num_warps"], how["num_stages"]) == other and timed.moments == (1, 1)
    assert stage[name] is timed.kernel and target.table == before
    assert len(results) == (2 if kernel == "forward" else 3) and all(bool(x.isfinite().all()) for x in results)


def test_results_are_alike_but_for_rounding():
    x, y = torch.randn(2, 100, dtype=torch.bfloat16)
    assert tune.is_alike((x, y), (x * 1.004, y)) and not tune.is_alike((x, y), (x, y * 1.02))
    assert not tune.is_alike((x * math.nan, y), (x, y))


class OutOfResources(Exception):
    name = "shared memory"


def test_why_a_row_cannot_run_is_told_in_words(monkeypatch):
    def run(target, inputs, row):
        if row != OWN:
            raise row

    monkeypatch.setattr(tune.Target, "inputs", lambda self, point: ())
    monkeypatch.setattr(tune.Target, "run", run)
    monkeypatch.setattr(engine, "device", "cpu")
    told = {OWN: None, OutOfResources(): "does not fit: shared memory", ValueError("x"): "does not compile: ValueError"}
    for row, reason in told.items():
        assert tune.failure(tune.Target("tma", "keys"), row) == reason


def test_a_compiler_that_crashes_is_the_fault_of_one_row(monkeypatch):
    class Pool:
        """All results are lost with a process that ends in the middle."""

        def __init__(self, workers, context):
            self.asked, self.alone = [], workers == 1

        def submit(self, function, target, row):
            self.asked.append(row)
            return SimpleNamespace(result=lambda: self.result(row))

        def result(self, row):
            if FAST in self.asked:
                raise tune.BrokenProcessPool
            assert self.alone
            return f"{row} was tried alone"

        def __enter__(self):
            return self

        def __exit__(self, *problem):
            pass

    monkeypatch.setattr(tune, "ProcessPoolExecutor", Pool)
    monkeypatch.setattr(tune.os, "cpu_count", lambda: 8)
    found = list(tune.failures(tune.Target("tma", "keys"), [OWN, FAST, (32, 32, 4, 2)]))
    assert found == [f"{OWN} was tried alone", "ends the compiler", "(32, 32, 4, 2) was tried alone"]


def invoke(*words):
    return CliRunner().invoke(app, ["bench", *words])


def test_tune_says_that_it_needs_a_gpu_and_what_there_is(monkeypatch):
    monkeypatch.setattr(engine, "name", "cpu")
    done = invoke("--tune")
    assert done.exit_code == 1 and done.output == "--tune needs a GPU, because simulators say nothing about speed.\n"
    for words in (["--table", "key"], ["--kernel", "gluon"], ["--dtype", "fp8"], ["--head-dim", "257"]):
        assert invoke("--tune", *words).exit_code == 2


def test_tune_sweeps_every_table_and_writes_what_it_finds(monkeypatch, tmp_path):
    def sweep(target, track):
        list(track([1], total=1, description="x"))
        if target.kernel == "keys":
            raise RuntimeError("the table's own row does not fit")
        timed = [{"row": list(row), "tflops": 9.0, "ms_median": ms, "ms_p20": ms, "ms_p80": ms} for row, ms in times]
        about = {name: getattr(target, name) for name in ("file", "kernel", "D", "dtype", "rung")}
        return about | {"row": list(OWN), "candidates": timed, "left_out": []}

    times = (FAST, 0.5), (OWN, 1.0)
    supports = {"rungs": ("gluon", "tma", "roles", "fused")}
    monkeypatch.setattr(engine, "name", "cuda")
    monkeypatch.setattr(catalogue, "stage", lambda number: SimpleNamespace(SUPPORTS=supports))
    monkeypatch.setattr(tune, "sweep", sweep)
    monkeypatch.setattr(rows, "provenance", lambda commit: {"gpu": "NVIDIA H200", "commit": commit})
    out = tmp_path / "sweep.json"
    words = "--tune --head-dim 64 --dtype fp16 --dtype fp32 --commit c --out".split()
    done = invoke(*words, str(out))
    assert done.exit_code == 0 and done.output.count("is 2.00 times as fast") == 4
    assert done.output.count("the table's own row does not fit") == 2
    found = json.loads(out.read_text())
    assert [(one["rung"], one["kernel"], one["dtype"], one["D"]) for one in found] == [
        ("tma", "forward", "fp16", 64), ("tma", "queries", "fp16", 64),
        ("fused", "forward", "fp32", 64), ("fused", "queries", "fp32", 64),
    ]  # fmt: skip
    assert all(one["gpu"] == "NVIDIA H200" and one["commit"] == "c" for one in found)
    done = invoke("--tune", "--kernel", "fused", "--table", "forward")
    assert done.exit_code == 0 and "fwd_0_fused, forward kernel, D = 128, bf16" in done.output
    assert invoke("--tune", "--kernel", "tma", "--dtype", "fp32").exit_code == 2
    supports["rungs"] = ("fused",)
    assert invoke("--tune", "--kernel", "tma").exit_code == 2 and "fwd_0_fused" in invoke("--tune").output


# --- report and plots ---------------------------------------------------------------------------------------

README = """# Title
<!-- results: gpu=nvidia-h200 pass=fwd dtype=bf16 D=64 causal=false -->
old
<!-- /results -->
<!-- ladder 02_fa2_cuda -->
old
<!-- /ladder -->
"""


def write_pages(root, text):
    """Both pages that the report fills, with the same text; returns their paths."""
    pages = [root / page for page in report.PAGES]
    for page in pages:
        page.parent.mkdir(parents=True, exist_ok=True)
        page.write_text(text)
    return pages


def test_the_report_fills_both_pages_from_fresh_rows_only(tmp_path):
    folder = tmp_path / "steps" / "step01_fa1_numba"
    folder.mkdir(parents=True)
    (folder / "fwd_0_scalar.py").write_text("x = 1\n")
    readme, page = write_pages(tmp_path, README)
    fresh = row(source=fingerprint.code_hash("01_fa1_numba", "fwd_0_scalar", tmp_path))
    others = ({"dtype": "fp32"}, {"options": {"window": 64}}, LOAD, {"kernel": "fwd_1_warp"})
    found = [fresh | other | {"tflops": 888.0} for other in others]
    found += [fresh | dict(N=512, tflops=100.0), fresh | dict(N=1024, tflops=123.4)]
    # The peer's row at N = 1024 is of another run, and its row with another Nk of another setting.
    found += [peer_row(tflops=200.0), peer_row(N=1024, tflops=150.0, run="r2"), peer_row(tflops=400.0, Nk=9, D=80)]
    rows.append(found, tmp_path / "steps" / "bench" / "results")

    assert exit_code(report.main, check=True, root=tmp_path) == 1 and readme.read_text() == README
    assert exit_code(report.main, root=tmp_path) == 0 == exit_code(report.main, check=True, root=tmp_path)
    text = readme.read_text()
    assert page.read_text() == text
    page.write_text(README)
    assert exit_code(report.main, check=True, root=tmp_path) == 1, "only README is up to date"
    assert "| 01 fwd_0_scalar | 100 | 123 | 50% | 1.0e-03 |\n| sdpa-flash | 200 | – | – | 1.0e-03 |" in text
    assert "Changed since it was measured, and not shown: 01 fwd_1_warp." in text
    assert not re.search("888|\nold\n", text) and f"<!-- ladder 02_fa2_cuda -->\n{report.EMPTY}" in text

    (folder / "fwd_0_scalar.py").write_text("x = 2\n")
    report.main(root=tmp_path)
    table, _, rest = readme.read_text().partition("<!-- /results -->")
    assert "and not shown: 01 fwd_0_scalar, 01 fwd_1_warp." in table and rest
    assert "|" not in table, "a table of peers alone"
    with pytest.raises(ValueError, match="no such field: head"):
        report.render(README.replace("D=64", "head=64"), [])
    own = [one for one in report.select(found, "N=512 without=sdpa-flash") if not one["peer"]]
    assert own and own == report.select(found, "N=512 without=sdpa-flash")


def test_a_table_has_the_median_share_of_the_fastest_peer_and_the_largest_error():
    found = []
    for N, speed, others, off in ((512, 20, (100, 80), 1e-3), (1024, 50, (70, 100), 5e-3), (2048, 60, (100, 90), 2e-3)):
        found.append(row(N=N, Nk=N, tflops=float(speed), error=off))
        names = "sdpa-flash", "sdpa-cudnn"
        found += [peer_row(N=N, Nk=N, peer=peer, tflops=float(x)) for peer, x in zip(names, others, strict=True)]
    assert "| 01 fwd_0_scalar | 20 | 50 | 60 | 50% | 5.0e-03 |" in report.markdown(found)


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
    picture, results = tmp_path / path, tmp_path / "steps/bench/results"
    readme, page = write_pages(tmp_path, README)
    rows.append(ladder_rows(), results)
    report.main(root=tmp_path)
    assert f"(../../../{path})" in page.read_text()
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


@pytest.mark.parametrize("stage", report.PICTURES)
def test_the_ladders_legend_hides_no_line(stage):
    figure = plots.ladder(fingerprint.fresh(rows.read()), stage)
    figure.canvas.draw()
    for ax in figure.axes[:2]:
        names = [text.get_text().rsplit(" ", 1)[0] for text in ax.get_legend().get_texts()]
        assert names == ["FlashAttention-2", "cuDNN", "FlashAttention-4"]
        highest = max(line.get_ydata()[0] for line in ax.lines)
        assert ax.get_legend().get_window_extent().y0 > ax.transData.transform((0, highest))[1]


def test_another_stage_has_a_ladder_of_its_own():
    both = [*ladder_rows(), *(one | {"run": "r3"} for one in ladder_rows())]
    for one in both[5:]:
        if one["stage"]:
            one |= {"stage": "03_triton", "kernel": one["kernel"].replace("scalar", "fused"), "tflops": 70.0}
    assert plots.ladder_numbers(both, "03_triton")["fwd"]["rungs"][0][:2] == ["fused", 70.0]
    assert plots.ladder_numbers(both)["fwd"]["rungs"][0][:2] == ["scalar", 4.0]
    with pytest.raises(ValueError, match="no rows of 03_triton"):
        plots.ladder(ladder_rows(), "03_triton")


def test_ink_is_the_one_of_higher_contrast():
    inks = {colour: plots.ink_on(colour) for colour in plots.COLOURS}
    assert inks.pop("#0072b2") == plots.ink_on("black") == plots.ink_on("navy") == "white"
    assert set(inks.values()) == {plots.ink_on("white")} == {plots.INK}


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
    assert ", soft-cap: " in report.line(row(options={"feature": "soft-cap", "softcap": 50.0}))
    assert "causal, {'window': 64}: " in report.line(row(causal=True, options={"window": 64}))
    assert "3 TFLOP/s, 1.5 GiB, error" in report.line(row(peak_bytes=3 * 2**29))
    assert "±25.0%, 0.0671 TB/s, error" in report.line(row(N=1, Nk=2**18))


# --- sustained ----------------------------------------------------------------------------------------------


def of_load(**changes):
    """A valid sustained row of a kernel."""
    return of_02(**{**LOAD, **changes})


def peer_of_load(**changes):
    return peer_row(**{**LOAD, "peer": "fa4", **changes})


class Machine:
    """A GPU whose power limit acts after 0.2 s of calls: then its clock falls, and calls take a quarter longer."""

    def __init__(self, monkeypatch):
        self.now, self.load, self.samples, self.calls, self.pauses = 0.0, 0.0, [], [], []
        monkeypatch.setattr(sustained, "time", SimpleNamespace(sleep=self.sleep))
        monkeypatch.setattr(sustained, "datetime", SimpleNamespace(now=self.moment))
        monkeypatch.setattr(sustained, "watched", self.watched)
        monkeypatch.setattr(timing, "time", SimpleNamespace(perf_counter=lambda: self.now))
        self.measure = sustained.sustained

    def moment(self):
        return datetime(2026, 1, 31) + timedelta(seconds=self.now)

    def pass_by(self, seconds, mhz, watts):
        self.now += seconds
        self.samples.append((self.moment(), mhz, watts))

    def sleep(self, seconds):
        self.pauses.append((seconds, len(self.calls)))
        self.load = 0.0
        self.pass_by(seconds, 345, 100)

    def call(self, name, ms, mhz=1600.0):
        def call():
            limited = self.load > 0.2
            self.calls.append(name)
            self.pass_by(1e-3 * ms * (1.25 if limited else 1), *((mhz, 700.0) if limited else (1980.0, 650.0)))
            self.load += 1e-3 * ms

        return call

    @contextlib.contextmanager
    def watched(self, device):
        first, samples = len(self.samples), []
        yield samples
        self.pass_by(9.0, 345, 100)
        samples += self.samples[first:]


def test_a_sustained_time_is_that_under_the_clock_that_the_power_limit_leaves(monkeypatch):
    machine = Machine(monkeypatch)
    calls = {"a": machine.call("a", 4.0), "b": machine.call("b", 8.0, mhz=1700.0), "c": machine.call("c", 100.0)}
    found = machine.measure(calls, warmup=2, device="cpu")
    times = {name: (load.ms_p20, load.ms_median, load.ms_p80) for name, load in found.items()}
    assert all(times[name] == pytest.approx([ms] * 3) for name, ms in (("a", 5.0), ("b", 10.0), ("c", 125.0)))
    assert {name: (load.clock_mhz, load.watts) for name, load in found.items()} == {
        "a": (1600, 700), "b": (1700, 700), "c": (1600, 700),
    }  # fmt: skip
    # As many calls as seemed to take 0.75 s, but 30 for a row.
    assert found["c"].reps == timing.MIN_REPS and 0.7 < 4e-3 * found["a"].reps < 0.8
    one_at_a_time = [name for name, _ in itertools.groupby(machine.calls)]
    assert sorted(one_at_a_time) == ["a", "b", "c"], "nobody is called between the calls of another"
    begins = [machine.calls.index(name) for name in one_at_a_time]
    assert machine.pauses == [(sustained.IDLE, begin) for begin in begins], "each begins after a pause"


def test_the_order_of_sustained_candidates_differs_from_group_to_group(monkeypatch):
    machine, orders = Machine(monkeypatch), set()
    for _ in range(20):
        machine.calls.clear()
        machine.measure({name: machine.call(name, 50.0) for name in "abcd"}, device="cpu")
        orders.add("".join(name for name, _ in itertools.groupby(machine.calls)))
    assert len(orders) > 3


def test_samples_outside_the_measured_calls_do_not_count():
    moments = [datetime(2026, 1, 31, 12, 0, n) for n in range(10)]
    samples = [(moment, 100.0 + n**2, 10.0 * n**2) for n, moment in enumerate(moments)]
    assert sustained.medians(samples, moments[2], moments[6]) == (116, 160)
    with pytest.raises(RuntimeError, match="gave 2 of at least 3 samples in 1.00 s"):
        sustained.medians(samples, moments[2], moments[3])


SMI = """#!/bin/bash
echo "$@" > {folder}/asked
sleep {start}
trap 'echo "2026/01/31 11:00:00.000, 7, 7.0, 7.0"; echo ended > {folder}/ended; exit' TERM
while true; do echo "$(date '+%Y/%m/%d %H:%M:%S.%3N'), {sample}"; sleep 0.02; done
"""


def fake_smi(monkeypatch, folder, sample, start=0):
    (folder / "nvidia-smi").write_text(SMI.format(folder=folder, sample=sample, start=start))
    (folder / "nvidia-smi").chmod(0o755)
    monkeypatch.setenv("PATH", f"{folder}:{os.environ['PATH']}")
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: SimpleNamespace(uuid="12-34"))


def test_clock_and_power_are_read_from_nvidia_smi_while_the_block_runs(monkeypatch, tmp_path):
    fake_smi(monkeypatch, tmp_path, "1650, 690.50, 400.00", start=0.2)
    with sustained.watched("cuda") as samples:
        start = datetime.now()
        time.sleep(0.5)
        end = datetime.now()
    assert (tmp_path / "ended").exists(), "nvidia-smi does not run on"
    asked = (tmp_path / "asked").read_text()
    assert "-i GPU-12-34 " in asked and "--query-gpu=timestamp,clocks.sm,power.draw.instant,power.draw " in asked
    assert sustained.medians(samples, start, end) == (1650, 690.5)
    assert asked.endswith(" -lms 20\n"), "in 0.75 s there are many samples"
    assert samples[0][0] < start, "the block begins when nvidia-smi has begun"
    assert samples[-1][1] == 7, "what it prints at its end is read too"
    with pytest.raises(ZeroDivisionError), sustained.watched("cuda"):
        1 / 0  # noqa: B018


def test_power_that_nvidia_smi_does_not_know_is_no_number(monkeypatch, tmp_path):
    lines = "1600, [N/A], 250.5", "1600, [N/A], [N/A]", "[N/A], 3.0, 250.5", "1600"
    lines = [f"2026/01/31 12:00:00.250, {line}" for line in lines] + ["No devices were found", ""]
    assert sustained.parsed("\n".join(lines)) == [(datetime(2026, 1, 31, 12, 0, 0, 250000), 1600, 250.5)]
    fake_smi(monkeypatch, tmp_path, "1650, [N/A], [N/A]")
    (tmp_path / "nvidia-smi").write_text("#!/bin/bash\necho No devices were found\n")
    with pytest.raises(RuntimeError, match="no clock or no power here: No devices were found"):
        with sustained.watched("cuda"):
            pass


@pytest.mark.gpu
def test_a_gpu_under_load_has_a_clock_and_a_power():
    x = torch.randn(4096, 4096, device="cuda")
    load = sustained.sustained({"product": lambda: x @ x})["product"]
    assert 300 < load.clock_mhz < 5000 and 5 < load.watts < 3000 and load.reps >= timing.MIN_REPS


def test_a_group_of_candidates_gives_sustained_rows(monkeypatch):
    for name in ("IDLE", "SETTLE", "MEASURED"):
        monkeypatch.setattr(sustained, name, 0.001)
    loads = iter([(1600.0, 700.0), (1700.0, 650.0)] * 2)
    monkeypatch.setattr(sustained, "watched", lambda device: contextlib.nullcontext([]))
    monkeypatch.setattr(sustained, "medians", lambda samples, start, end: next(loads))
    monkeypatch.setattr(sustained.random, "sample", lambda names, count: names)
    found, said = measured([candidate()], passes=("fwd", "bwd"), timed="sustained")
    who = [("fwd_1_matrix", "fwd", 1600), ("sdpa-math", "fwd", 1700)]
    who += [("bwd_1_matrix", "bwd", 1600), ("sdpa-math", "bwd", 1700)]
    assert [(r["kernel"] or r["peer"], r["pass"], r["clock_mhz"]) for r in found] == who and not said
    assert {r["timing"] for r in found} == {"sustained"} and {r["watts"] for r in found} == {700, 650}
    for r in found:
        flops = cost.flops(2, 4, 20, 8, causal=True, pass_=r["pass"])
        assert r["tflops"] == pytest.approx(flops / r["ms_median"] / 1e9) and r["error"] < 1e-5 and r["reps"] >= 30


def test_when_the_time_is_up_whole_groups_have_been_measured(monkeypatch):
    now = iter([1.0, 9.0])
    monkeypatch.setattr(grid, "time", SimpleNamespace(monotonic=lambda: next(now)))
    found, said = measured([candidate()], SMALL * 2, passes=("fwd", "bwd"), until=5.0)
    assert Counter(r["pass"] for r in found) == {"fwd": 2, "bwd": 2} and said == [f"out of time before fp32 {SMALL[0]}"]


def test_sustained_parts_are_of_long_sequences_and_the_most_important_comes_first(monkeypatch):
    monkeypatch.setattr(catalogue, "stage", lambda number: SimpleNamespace(SUPPORTS={"rungs": ("best", "other")}))
    (part,) = plans.sustained()
    settings = [(p.D, p.causal) for p in part.grid]
    assert settings == [(128, False), (128, True), (64, False), (64, True)] and {p.N for p in part.grid} == {16384}
    assert (part.rungs, part.stage, part.passes, part.peers) == (("best",), "02", ("fwd", "bwd"), plans.BEST)
    seconds = sustained.IDLE + sustained.SETTLE + sustained.MEASURED
    assert len(part.grid) * len(part.passes) * (1 + len(part.peers)) * seconds <= 42, "as plans.py says"
    (other,) = plans.sustained(number="03", rung="tma")
    assert (other.rungs, other.stage) == (("tma",), "03")
    assert [len(plans.sustained([name])) for name in ("fast", "slow", "features", "ring")] == [1, 0, 0, 0]
    of_plan = plans.sustained(["fast", "compilers"])
    assert [one.rungs for one in of_plan] == [one.rungs for name in ("fast", "compilers") for one in plans.PLANS[name]]
    assert {one.timed for one in (part, other, *of_plan)} == {"sustained"}
    assert {one.timed for parts in plans.PLANS.values() for one in parts if isinstance(one, plans.Part)} == {
        "interleaved"
    }


def test_a_part_hands_on_how_it_is_timed(monkeypatch):
    asked = []
    monkeypatch.setattr(plans, "measure", lambda *_, **how: asked.append((how["timed"], how["with_matmul"])) or ())
    monkeypatch.setattr(plans, "entrants", lambda *_: ())
    for part in (*plans.PLANS["fast"], *plans.sustained(["fast"])):
        list(part.record())
    assert asked == [("interleaved", True), ("sustained", False)]


def test_flashattention_4_keeps_on_disk_what_is_compiled_ahead(monkeypatch):
    found = {}

    class Pool:
        def __init__(self, workers, context):
            found.update(os.environ)

        def map(self, function, jobs):
            return ()

        def __enter__(self):
            return self

        def __exit__(self, *problem):
            pass

    monkeypatch.setattr(plans, "ProcessPoolExecutor", Pool)
    monkeypatch.setenv("FLASH_ATTENTION_CUTE_DSL_CACHE_ENABLED", "0")
    plans.compile_ahead([])
    assert found["FLASH_ATTENTION_CUTE_DSL_CACHE_ENABLED"] == "0", "who asks for something else gets it"
    monkeypatch.delenv("FLASH_ATTENTION_CUTE_DSL_CACHE_ENABLED")
    plans.compile_ahead([])
    assert found["FLASH_ATTENTION_CUTE_DSL_CACHE_ENABLED"] == "1"


def test_the_command_measures_parts_under_load_and_shows_the_committed_rows_of_their_kind(monkeypatch, tmp_path):
    def record_parts(parts, **options):
        asked.append((parts, options["until"] - now))
        yield of_load(tflops=500.0)

    asked, now = [], grid.time.monotonic()
    rows.append([of_load(tflops=600.0), of_02(tflops=700.0), of_load(tflops=650.0, N=9)], tmp_path / "committed")
    read = rows.read
    monkeypatch.setattr(rows, "read", lambda **how: read(tmp_path / "committed", **how))
    monkeypatch.setattr(plans, "record_parts", record_parts)
    monkeypatch.setattr(engine, "name", "cpu")
    assert "bench needs a GPU" in invoke("--sustained").output
    monkeypatch.setattr(engine, "name", "cuda")
    done = invoke("--sustained", "--runs", "2", "--minutes", "1", "--kernel", "fa2", "--out", str(tmp_path / "own"))
    assert done.exit_code == 0 and read(tmp_path / "own", timing="sustained") == [of_load(tflops=500.0)]
    lines = done.output.splitlines()
    assert len(lines) == 2 and "500 TFLOP/s at 1600 MHz and 700 W" in lines[0]
    assert lines[1].startswith("committed:") and "600 TFLOP/s at 1600 MHz and 700 W" in lines[1]
    ((parts, left),) = asked
    assert parts == plans.sustained(rung="fa2") * 2 and 60 <= left < 120
    assert invoke("--sustained", "--plan", "bwd", "--out", str(tmp_path / "own")).exit_code == 0
    assert asked[1][0] == plans.sustained(["bwd"])
    for plan in ("features", "ring", "slow", "none"):
        assert invoke("--sustained", "--plan", plan).exit_code == 2
    assert invoke("--sustained", "--stage", "07").exit_code == 2


def mixed():
    """(interleaved rows that every reader understands, and sustained ones of the same subjects)."""
    at = dict(N=4096, Nk=4096, D=128, Hk=2, causal=True)
    hop = dict(peer="copy", n_gpus=4, options={"transport": "fetch"}, tflops=0.0, **{"pass": "copy"})
    some = [*ladder_rows(), of_02("fwd_8_hopper", tflops=600.0, **at), peer_row(tflops=650.0, **at)]
    some += [peer_row(**hop | {"Nk": n, "ms_median": 1.0 + n, "ms_p20": 1.0, "ms_p80": 1e6}) for n in (1024, 4096)]
    return some, [one | LOAD | {"tflops": 1e6, "ms_median": 9.0} for one in some]


READERS = {
    "the table of README": lambda found: report.render(README.replace("D=64", "D=128"), found),
    "the ladder": plots.ladder_numbers,
    "the speeds of blocks": simulate.read_flops,
    "the link": lambda found: simulate.read_link(found, "fetch"),
    "the latest": lambda found: [r for r in rows.latest(found) if r["timing"] == "interleaved"],
    "the peers beside a kernel": lambda found: report._of_best_peer(mixed()[0][5:6], found),
}


@pytest.mark.parametrize("reader", READERS)
def test_no_reader_of_rows_takes_a_sustained_one_for_an_interleaved_one(reader):
    interleaved, under_load = mixed()
    want = READERS[reader](interleaved)
    assert want and READERS[reader](interleaved + under_load) == want == READERS[reader](under_load + interleaved)


def test_rows_of_the_two_kinds_are_read_apart_and_never_drawn_together(tmp_path):
    both = [of_02(), peer_row(), of_load(), peer_of_load()]
    rows.append(both, tmp_path)
    assert rows.read(tmp_path) == both[:2] and rows.read(tmp_path, timing="sustained") == both[2:]
    for draw in (report.markdown, plots.speed_lines):
        with pytest.raises(ValueError, match="choose first"):
            draw(both)
    with pytest.raises(ValueError, match="one row for each"):
        plots.speed_bars([of_02(), of_load()])


def test_a_sustained_row_is_signed_like_others():
    record = of_load()
    ((signed, subject),) = sign.recorded_in([record])
    assert signed is record and fingerprint.row_hash(subject) == fingerprint.row_hash(of_02())
    record["source"] = fingerprint.row_hash(record)
    assert fingerprint.fresh([record, of_load(), peer_of_load()]) == [record, peer_of_load()]


LOADED = """# Title
<!-- results: gpu=nvidia-h200 timing=sustained dtype=bf16 D=128 causal=true -->
old
<!-- /results -->
"""


def test_the_table_of_sustained_rows_is_of_one_run_and_has_clock_and_power():
    at, backward = dict(D=128, causal=True, N=16384, Nk=16384), {"pass": "bwd"}
    old = [of_load(**at, tflops=1.0, run="r0", **backward), peer_of_load(**at, tflops=2.0, run="r0", **backward)]
    old += [peer_of_load(**at, tflops=3.0, run="r0", peer="flex")]
    own = [of_load(**at, tflops=560.0, clock_mhz=1750, watts=700.0, **backward), of_load(**at, tflops=620.0)]
    peers_ = [peer_of_load(**at, tflops=600.0, **backward), peer_of_load(**at, tflops=640.0)]
    others = [of_load(**at | {"D": 64}, tflops=9.0), of_02(**at, tflops=8.0), peer_row(**at, tflops=7.0)]
    shown = report.render(LOADED, old + own + others + peers_)
    lines = [line for line in shown.splitlines() if line.startswith("| ")]
    assert lines == [
        "| measured | kernel | TFLOP/s | MHz | W | TFLOP/s a GHz | J/TFLOP |",
        "| --- | --- | ---: | ---: | ---: | ---: | ---: |",
        "| fwd, D=128, causal | 02 fwd_5_fa2 | 620 | 1600 | 700 | 388 | 1.13 |",
        "| fwd, D=128, causal | fa4 | 640 | 1600 | 700 | 400 | 1.09 |",
        "| bwd, D=128, causal | 02 fwd_5_fa2 | 560 | 1750 | 700 | 320 | 1.25 |",
        "| bwd, D=128, causal | fa4 | 600 | 1600 | 700 | 375 | 1.17 |",
    ]
    assert "N = 16384; about a second of calls of one candidate" in shown and "driver 580" in shown
    assert report.EMPTY in report.render(LOADED, others) and report.EMPTY in report.render(LOADED, peers_)
    assert "and not shown: 02 fwd_5_fa2." in report.render(LOADED, peers_, old)


def test_the_report_reads_sustained_rows_too(tmp_path, monkeypatch):
    monkeypatch.setattr(report, "fresh", lambda found, root: found)
    write_pages(tmp_path, LOADED)
    rows.append([of_load(D=128, causal=True), of_02(D=128, causal=True)], tmp_path / "steps" / "bench" / "results")
    assert exit_code(report.main, check=True, root=tmp_path) == 1
    report.main(root=tmp_path)
    assert "| fwd, D=128, causal | 02 fwd_5_fa2 | 3 | 1600 | 700 |" in (tmp_path / "README.md").read_text()


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


def test_stall_reasons_are_shares_of_a_warps_time():
    found = profile.waits({"tensor_pipe": 40.0, "stalled_wait": 1.5, "stalled_selected": 1.0, "stalled_gmma": 2.5})
    assert list(found.items()) == [("gmma", 0.5), ("wait", 0.3), ("selected", 0.2)] and profile.waits({}) == {}


def test_a_profile_is_of_the_rungs_that_ncu_read_and_shown_while_they_are_as_they_were(tmp_path, monkeypatch, capsys):
    def run(words):
        if words[-1] == "mma":
            raise subprocess.CalledProcessError(1, "ncu", "==ERROR== no permission")
        name = words[words.index("--kernel-name") + 1] if "--metrics" in words else None
        assert name in (None, words[-1] if words[-1] in profile.TRITON else "attention_forward")
        return NCU if name else "Version 2025.3.1.0"

    monkeypatch.setattr(profile, "run", run)
    found = profile.profile("ncu", "NVIDIA H200")
    assert set(found["rungs"]) == set(profile.RUNGS) - {"mma"} and "no permission" in capsys.readouterr().out
    assert found["triton"]["keys_kernel"]["source"] == fingerprint.code_hash("03_triton", "bwd_1_tma")
    found["rungs"]["hopper"]["source"] = found["triton"]["forward_kernel"]["source"] = "0" * 12
    rows.write_record("profile", found, tmp_path)
    assert profile.read(tmp_path) == dict.fromkeys(("ldmatrix", "fa2"), {"tensor_pipe": 41.25})
    assert set(profile.read(tmp_path, "triton")) == {"keys_kernel", "queries_kernel"}
    assert profile.read(tmp_path / "missing") == {}
