"""What measures, on the CPU: costs worked by hand, rows, hashes, the order of calls, plans, the report, commands."""

import contextlib
import itertools
import json
import math
import os
import re
import sys
import time
from dataclasses import replace
from datetime import datetime
from functools import partial
from importlib import metadata
from types import SimpleNamespace

import pytest
import torch
import typer
from typer.testing import CliRunner

from reference import attention
from steps import __main__, catalogue, engine
from steps.course.bench import __main__ as measuring
from steps.course.bench import ablations, cost, fa3_jax, grid, peers, profile, report, rows, timing, tune
from steps.course.bench.cost import Point
from steps.step02_fa2_cuda import calls, emulator, ladder
from support.made_rows import LOAD, of_02, peer_row, row

needs_triton = pytest.mark.skipif(bool(catalogue.unavailable("03")), reason="there is no Triton")
cpu_only = pytest.mark.skipif(engine.name == "cuda", reason="its kernels are measured on the CPU")
needs_emulator = pytest.mark.skipif(not emulator.available(), reason="needs g++")


def test_costs_worked_by_hand():
    assert Point(2, 3, 10, 4, Nk=5).flops() == 4 * 2 * 3 * 10 * 5 * 4 and Point(1, 1, 8, 2, True).flops() == 256
    assert [Point(1, 1, 8, 2).flops(pass_) for pass_ in ("bwd", "fwd+bwd")] == [1280, 1792]
    # A new token reads k and v, 2 x 8 x 1000 x 4 elements of 2 bytes, in 2 ms; a copy of k reads and writes as much.
    token = row(B=2, H=2, Hk=1, N=1, Nk=4000, D=4, ms_median=2.0)
    assert cost.bandwidth(token) == pytest.approx((2 * 64000 + 2 * 32 + 16) / 2e-3 / 1e12)
    assert cost.bandwidth(token | {"pass": "copy"}) == pytest.approx(2 * 64000 / 2e-3 / 1e12)


@pytest.mark.parametrize("threads, shared, registers, expected", [
    (1024, 0, 0, (2, "threads")), (128, 113 * 1024, 0, (2, "shared memory")),  # each takes 1 KB more
    (128, 227 * 1024 + 1, 0, (0, "shared memory")), (128, 46336, 168, (3, "registers")),  # 3.05
    (256, 0, 129, (1, "registers")),  # 136 after rounding up
    (32, 0, 96, (20, "registers")),  # 5 in each of 4 register files, not 21
])  # fmt: skip
def test_occupancy_names_the_resource_that_runs_out(threads, shared, registers, expected):
    assert cost.occupancy((9, 0), threads=threads, shared=shared, registers=registers) == expected


# --- timing -------------------------------------------------------------------------------------------------


def test_candidates_take_turns_and_times_are_milliseconds_without_the_warm_up(monkeypatch):
    called = []
    calls = {name: lambda name=name: called.append(name) for name in "abc"}
    times = timing.interleaved(calls, reps=4, warmup=2)
    rounds = ["".join(called[n : n + 3]) for n in range(0, 18, 3)]
    assert {*map("".join, map(sorted, rounds))} == {"abc"} and len({*rounds}) > 3, "each round has an order of its own"
    assert list(timing.turns(list("abc"), 6)) == called and [t["reps"] for t in times.values()] == [4] * 3
    assert timing.interleaved({}) == {}
    now = iter([0.0, 100.0, 200.0, 200.004, 300.0, 300.006, 400.0, 400.005])
    monkeypatch.setattr(timing.time, "perf_counter", lambda: next(now))
    assert timing.interleaved({"a": lambda: None}, reps=3, warmup=1)["a"]["ms_median"] == pytest.approx(5.0)
    taken = {"ms_median": 50.0, "ms_p20": 20.0, "ms_p80": 80.0, "reps": 101}
    assert timing.summary([float(i) for i in range(100, -1, -1)]) == taken


def test_the_host_s_time_begins_with_an_idle_gpu_and_ends_before_the_gpu_does_and_calls_take_turns(monkeypatch):
    order = []
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: order.append("wait") or time.sleep(1e-3))
    calls = {name: lambda name=name: order.append(name) or time.sleep(2e-5) for name in "ab"}
    taken = timing.host_us(calls)
    assert taken.keys() == calls.keys() and all(20 < us < 1000 for us in taken.values())
    assert order == [x for name in timing.turns(["a", "b"], 50) for x in ["wait"] + [name] * 20]
    assert 2 < timing.one_call(lambda: time.sleep(2e-3), device="cpu") < 2000


@pytest.mark.parametrize("device", ["cuda", torch.device("cuda", 0)])
def test_the_gpu_pauses_before_a_call_that_the_host_launches_more_slowly_than_it_computes(device, monkeypatch):
    gpu, done = SimpleNamespace(now=0.0, busy=0.0), []

    def call(name, launch, work):
        gpu.now, gpu.busy = gpu.now + launch, gpu.busy + work
        done.append(name)

    def wait(device):
        gpu.now, gpu.busy = gpu.now + gpu.busy, 0.0
        done.append("wait")

    monkeypatch.setattr(timing, "time", SimpleNamespace(perf_counter=lambda: gpu.now))
    monkeypatch.setattr(timing, "clock", lambda device: (lambda: done.append("mark"), lambda a, b: 1.0))
    monkeypatch.setattr(torch.cuda, "synchronize", wait)
    monkeypatch.setattr(torch.cuda, "_sleep", done.append)
    sizes = {"short": (2**-12, 2**-13), "long": (2**-12, 2**-11), "a": (2**-13, 0.0)}  # seconds
    calls = {name: partial(call, name, *size) for name, size in sizes.items()}
    timing.interleaved(calls, reps=4, warmup=1, device=device)
    assert done[:15] == [x for name in sizes for x in ("wait", name, "wait", name, "wait")], "each is measured first"
    pauses = {"short": [976_562], "long": [], "a": [488_281]}  # cycles: twice the time of the launch, at 2 GHz
    turns = timing.turns(list(sizes), 5)
    assert done[15:-1] == [x for name in turns for x in (*pauses[name], "mark", name, "mark")]


def test_a_sustained_time_is_that_under_the_clock_that_the_power_limit_leaves(monkeypatch):
    """A GPU whose power limit acts after 0.2 s of calls: then its clock falls, and calls take a quarter longer."""
    gpu = SimpleNamespace(now=0.0, begun=0.0, samples=[], done=[])

    def pass_time(name, seconds, *clock_and_power):
        gpu.now += seconds
        gpu.samples.append((gpu.now, *clock_and_power))
        gpu.done.append(name)

    def pause(seconds):
        for _ in range(400):
            pass_time("pause", seconds / 400, 345, 100)
        gpu.begun = gpu.now

    def call(name, ms, mhz):
        limited = gpu.now > gpu.begun + 0.2
        watts = 700 + 9 * (len(gpu.done) % 3 == 0)
        pass_time(name, 1.25e-3 * ms, mhz, watts) if limited else pass_time(name, 1e-3 * ms, 1980, 650)

    @contextlib.contextmanager
    def watched(device):
        yield gpu.samples
        pause(9.0)

    monkeypatch.setattr(timing, "time", SimpleNamespace(sleep=pause, perf_counter=lambda: gpu.now))
    monkeypatch.setattr(timing, "datetime", SimpleNamespace(now=lambda: gpu.now))
    monkeypatch.setattr(timing, "watched", watched)
    asked = {"a": (4.0, 1600), "b": (8.0, 1700), "c": (100.0, 1600)}
    found = timing.sustained({name: partial(call, name, *how) for name, how in asked.items()}, device="cpu")
    for name, (ms, mhz) in asked.items():
        load = found[name]
        assert (load["ms_p20"], load["ms_median"], load["ms_p80"]) == pytest.approx([1.25 * ms] * 3)
        # Neither idle samples count, nor those before the clock fell.
        assert (load["clock_mhz"], load["watts"]) == (mhz, 700)
    # As many calls as seemed to take 0.75 s, but 30 for a row.
    assert found["c"]["reps"] == timing.MIN_REPS and 0.7 < 4e-3 * found["a"]["reps"] < 0.8
    turns = [name for name, _ in itertools.groupby(gpu.done)]
    assert turns[::2] == ["pause"] * 4 and sorted(turns[1::2]) == ["a", "b", "c"], "each alone, after a pause"


def test_clock_and_power_are_read_from_nvidia_smi_while_the_block_runs(monkeypatch, tmp_path):
    smi = tmp_path / "nvidia-smi"
    lines = "2026/01/31 12:00:00.500, 1650, [N/A]", "2026/01/31 12:00:01.500, 1650, 690.50"
    smi.write_text(f"#!/bin/bash\necho $@ > {tmp_path}/asked; echo '{lines[0]}'; echo '{lines[1]}'; exec sleep 60")
    smi.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: SimpleNamespace(uuid="12-34"))
    with timing.watched("cuda") as samples:
        time.sleep(0.2)
    assert "-i GPU-12-34 --query-gpu=timestamp,clocks.sm,power.draw.instant " in (tmp_path / "asked").read_text()
    assert samples == [(datetime(2026, 1, 31, 12, 0, 1, 500000), 1650, 690.5)]
    with pytest.raises(RuntimeError, match="clock and power 0 times"):
        timing.sustained({"a": lambda: time.sleep(0.01)}, device=engine.device)


@pytest.mark.gpu
def test_on_a_gpu_events_clock_and_power_are_those_of_the_work():
    x = torch.randn(4096, 4096, device="cuda")
    few, many = (lambda: x @ x), (lambda: [x @ x for _ in range(8)])
    times = timing.interleaved({"few": few, "many": many}, device="cuda")
    assert 5 < times["many"]["ms_median"] / times["few"]["ms_median"] < 11
    slow = timing.interleaved({"slow": lambda: time.sleep(1e-3) or x[0].add_(1)}, device="cuda")["slow"]
    assert slow["ms_median"] < 0.1, "what the host does is no part of it"
    load = timing.sustained({"product": few})["product"]
    assert 300 < load["clock_mhz"] < 5000 and 5 < load["watts"] < 3000 and load["reps"] >= timing.MIN_REPS
    assert 2 * x.nbytes <= grid.peak_bytes(lambda: (x + 1) * 2) <= 2 * x.nbytes + 2**21


# --- peers --------------------------------------------------------------------------------------------------


@pytest.fixture
def packages(monkeypatch):
    """Stand-ins for the packages of FlashAttention, whose tensors are (B, N, H, D), or (N, H, D) if they are packed."""

    def dense(q, k, v, causal=False, window_size=None, softcap=0.0, learnable_sink=None):
        how = {"window": window_size, "softcap": softcap or None, "sinks": learnable_sink}
        out, lse = attention.forward(*(x.transpose(1, 2) for x in (q, k, v)), causal=causal, **how)
        return out.to(q.dtype).transpose(1, 2), lse

    def packed(q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k):
        how = {"cu_seqlens_q": cu_seqlens_q, "cu_seqlens_k": cu_seqlens_k}
        out, _ = attention.forward(*(x.transpose(0, 1)[None] for x in (q, k, v)), **how)
        return out[0].to(q.dtype).transpose(0, 1)

    dense_alone = SimpleNamespace(flash_attn_func=lambda *qkv, causal: dense(*qkv, causal)[0])
    monkeypatch.setitem(sys.modules, "flash_attn", SimpleNamespace())
    cute = SimpleNamespace(flash_attn_func=dense, flash_attn_varlen_func=packed)
    monkeypatch.setitem(sys.modules, "flash_attn.cute", cute)
    monkeypatch.setitem(sys.modules, "fa3_fwd_interface", dense_alone)

    def from_dlpack(x):
        assert x.is_contiguous() and not x.requires_grad
        return x

    def vjp(function, *inputs):
        with torch.enable_grad():
            leaves = [x.clone().requires_grad_() for x in inputs]
            out = function(*leaves)
        return out.detach(), lambda dout: torch.autograd.grad(out, leaves, dout, retain_graph=True)

    stand_in = SimpleNamespace(jit=lambda function: function, vjp=vjp, dlpack=SimpleNamespace(from_dlpack=from_dlpack))
    monkeypatch.setitem(sys.modules, "jax", stand_in)
    of_jax = SimpleNamespace(flash_mha=lambda *qkv, is_causal: dense(*qkv, is_causal)[0])
    monkeypatch.setitem(sys.modules, "flash_attn3_jax", of_jax)
    monkeypatch.setattr(fa3_jax, "compiled", fa3_jax.compiled.__wrapped__)


@pytest.mark.parametrize("heads", [4, 2])
def test_peers_compute_attention_and_never_fall_back(packages, heads):
    q, k, v = (torch.randn(1, n, 40, 32) for n in (4, heads, heads))
    names = "sdpa-flash", "sdpa-math", "fa4", "fa3"
    for peer in (peers.matrix_form, *(peers.PEERS[name] for name in names)):
        assert (peer(q, k, v, causal=True) - attention.forward(q, k, v, causal=True)[0]).abs().max() < 1e-5
    few = q[:, :, :9]  # aligned at the bottom right
    assert (peers.matrix_form(few, k, v, True) - attention.forward(few, k, v, causal=True)[0]).abs().max() < 1e-5
    with pytest.raises(ValueError, match="as many queries as keys"):
        peers.PEERS["sdpa-math"](few, k, v, True)
    with pytest.raises(RuntimeError):
        peers.PEERS["sdpa-cudnn"](q, k, v)
    wide = [torch.randn(1, n, 40, 128) for n in (4, 4, heads, heads)]
    fa3, want = grid.a_peer("fa3"), attention.backward(*wide, causal=True)
    for tensors, causal in (((q, q, k, v), True), (wide, False)):
        with pytest.raises(NotImplementedError, match="with a causal mask and head_dim 128 alone"):
            fa3.call(tensors, "bwd", causal)
    backward = fa3.call(wide, "bwd", True)
    for _ in range(2):
        assert all((x - y).abs().max() < 1e-5 for x, y in zip(backward(), want, strict=True))


def test_a_peer_is_named_with_its_version(monkeypatch):
    installed = {"torch": "2.11.0", "flash-attn-4": "4.0.0b36", "fa3-fwd": "0.0.3", "flash-attn3-jax": "0.2.3"}
    installed |= {"jax": "0.11.2"}
    monkeypatch.setattr(peers.metadata, "version", installed.get)
    monkeypatch.setattr(torch.backends.cudnn, "version", lambda: 91900)
    found = [peers.version(name) for name in ("matmul", "fa4", "fa3", "sdpa-cudnn", "context-parallel-alltoall")]
    assert found == ["torch 2.11.0", "flash-attn-4 4.0.0b36", "fa3-fwd 0.0.3", "cudnn 9.19.0", "cudnn 9.19.0"]
    found = [peers.version(name, pass_) for name in ("fa3", "fa4") for pass_ in ("bwd", "fwd+bwd")]
    assert found == 2 * ["flash-attn3-jax 0.2.3, jax 0.11.2"] + 2 * ["flash-attn-4 4.0.0b36"]
    found = [grid.a_peer("fa3").subject({"pass": pass_})["peer_version"] for pass_ in ("fwd", "bwd")]
    assert found == ["fa3-fwd 0.0.3", "flash-attn3-jax 0.2.3, jax 0.11.2"]


# --- rows ---------------------------------------------------------------------------------------------------


def test_rows_survive_and_those_of_another_kind_are_read_only_when_asked_for(tmp_path, monkeypatch):
    """Of a run with a switch turned, all rows: what stood beside it would replace what others were compared with."""
    turned, load, ring = row(kernel="fwd_0_scalar:LAZY=0", run="r2"), row(**LOAD), row(n_gpus=2, reps=5)
    plain = [row(options={"window": 1}), row(peak_bytes=2**40, host_us=9.5), peer_row(), row(gpu="Tesla T4")]
    plain.insert(3, peer_row(peer="copy", tflops=0.0, peer_version="torch 2.11.0", **{"pass": "copy"}))
    write([row(run="r2"), peer_row(run="r2"), turned, load, ring, *plain], tmp_path)
    assert {file.name for file in tmp_path.iterdir()} == {"nvidia-h200.jsonl", "tesla-t4.jsonl"}
    assert rows.read(tmp_path) == plain and rows.read(tmp_path / "missing") == []
    assert turned in rows.read(tmp_path, switched=True) and rows.read(tmp_path, several_gpus=True) == [ring]
    assert rows.read(tmp_path, timing="sustained") == [load]
    monkeypatch.setenv("STEPS_COMMIT", "abc123")
    assert rows.validate(row() | rows.provenance("cpu"))["commit"] == "abc123"
    with (tmp_path / "nvidia-h200.jsonl").open("a") as file:
        file.write(json.dumps({name: value for name, value in row().items() if name != "options"}))
    with pytest.raises(ValueError, match=r"h200\.jsonl:10: .*options is missing"):
        rows.read(tmp_path)


def write(found, folder):
    for one in found:
        rows.append(one, folder)


@pytest.mark.parametrize("changes, word", [
    ({"extra": 1}, "extra is not a field"), ({"N": 512.0}, "N is 512.0"), ({"causal": 1}, "causal is 1"),
    ({"reps": True}, "reps is True"), ({"error": math.nan}, "error is nan"), ({"pass": "forward"}, "pass is"),
    ({"peer": "sdpa-math"}, "either a peer, or stage"), ({"source": None}, "either a peer, or stage"),
    ({"ms_p20": 2.1}, "ms_p20 <= ms_median"), ({"reps": 29}, "reps >= 30"), ({"tflops": 0.0}, "tflops > 0"),
    ({"peer_version": None}, "peer_version is None"), ({"pass": "copy"}, "the passes matmul and copy"),
    ({"watts": 700.0}, "sustained rows alone"),
    ({**LOAD, "clock_mhz": None}, "sustained rows alone"), ({**LOAD, "n_gpus": 2}, "sustained on one GPU"),
])  # fmt: skip
def test_a_bad_row_is_refused(tmp_path, changes, word):
    with pytest.raises(ValueError, match=re.escape(word)):
        rows.append(row(**changes), tmp_path)
    assert not list(tmp_path.iterdir())


def test_the_latest_row_of_a_subject_at_a_setting_wins():
    others = [peer_row(), row(options={"window": 64}), row(timing="sustained"), row(Nk=256), row(layout="zigzag")]
    others = [{**one, "run": "r2"} for one in others]
    assert rows.latest([row(run="r1"), *others, row(run="r3")]) == [row(run="r3"), *others]


OTHER = {
    "gpu": "NVIDIA H100", "n_gpus": 2, "pass": "bwd", "dtype": "fp16", "B": 2, "H": 4, "Hk": 1, "N": 256, "Nk": 256,
    "D": 128, "causal": True, "options": {"window": 64}, "timing": "sustained",
}  # fmt: skip


@pytest.mark.parametrize("name", OTHER)
def test_rows_of_two_settings_stay_apart(name):
    """Whatever it is that the settings differ in."""
    assert OTHER.keys() >= set(rows.SETTING)
    both = [row(), row(**{name: OTHER[name]})]
    assert rows.latest(both) == both


# --- what is stale ------------------------------------------------------------------------------------------


def test_a_row_is_stale_once_its_kernel_or_its_launch_at_the_row_s_own_sizes_has_changed(monkeypatch):
    """That hashes are of the right files, code and launches, the pages show: a committed row would be stale."""
    text = '#include "a.cuh"\nint f(int x) { /* why\n * or how */ return x; }'
    assert rows.cuda_code(text) == ["intf(intx){returnx;}"]
    ((*_, macros),) = rows.launched_by(of_02("fwd_8_hopper:PERSISTENT=0"))["fwd_8_hopper"]
    small, large = (rows.launched_by(of_02("bwd_1_fa2", D=128, gpu=gpu)) for gpu in ("Tesla T4", "not listed"))
    assert macros["PERSISTENT"] == 0 and small != large
    as_it_is = of_02(source=rows.row_hash(of_02()))
    assert rows.fresh([peer_row(), of_02(), as_it_is]) == [peer_row(), as_it_is]
    for gone in (of_02(D=7), of_02("fwd_9_none"), row(kernel="fwd_9_none"), row(stage="09_none")):
        assert rows.row_hash(gone) is None and rows.is_stale(gone)
    ordered, full = of_02("fwd_8_hopper", causal=True), of_02("fwd_8_hopper")
    before = [rows.row_hash(one) for one in (ordered, full)]
    monkeypatch.setattr(rows.launches, "order_of_tiles", lambda _: (1, False))
    after = [rows.row_hash(one) for one in (ordered, full)]
    assert before[0] != after[0] and before[1] == after[1], "a mask makes the order of the tiles count"
    text = 'from .tiles import get\n@jit\ndef f(x):\n    """Why."""\n    return x\n\n\nSIZE = 4  # how many\n'
    code = ["@jit;deff(x):;»returnx;«", "SIZE=4;"]
    assert rows.python_code(text) == code, "a moved function keeps its hash: no import, no docstring, no comment counts"
    beside_a_ring = of_02("fwd_9_none", n_gpus=2)  # shown as long as the ring's own code is as it was
    assert rows.fresh([beside_a_ring, row(stage="04_ring", kernel="ring+none", n_gpus=2)]) == [beside_a_ring]


# --- measuring ----------------------------------------------------------------------------------------------


def matrix(q, k, v, *, causal=False):
    out, lse = attention.forward(q, k, v, causal=causal)
    return out.to(q.dtype), lse.float()


def matrix_backward(dout, q, k, v, out, lse, *, causal=False):
    return tuple(x.to(q.dtype) for x in attention.backward(dout, q, k, v, causal=causal))


SMALL = Point(2, 4, 20, 8, causal=True, Hk=2)


def task(passes=("fwd",), beside=(), point=SMALL, dtype="fp32", how=None, **changes):
    kernels = dict(stage="00_naive", fwd_kernel="fwd_1_matrix", bwd_kernel="bwd_1_matrix", forward=matrix)
    who = grid.Entrant(**{**kernels, "backward": matrix_backward, **changes})
    return grid.Task(point, dtype, passes, (who, *map(grid.a_peer, beside)), **(how or {}))


def measured(*groups, **how):
    return list(grid.measure(groups, **how))


@cpu_only
@pytest.mark.parametrize("off", [None, "forward", "backward"])
def test_measure_yields_a_row_for_each_pass_with_the_peer_in_the_same_run_and_the_kernel_s_own_error(off):
    def wrong(*args, **options):
        first, *others = (matrix if off == "forward" else matrix_backward)(*args, **options)
        first[-1, -1, -1, -1] += 0.25
        return first, *others

    found = measured([task(("fwd", "bwd", "fwd+bwd"), ("sdpa-math",), **({off: wrong} if off else {}))])
    who = ["fwd_1_matrix", "sdpa-math", "bwd_1_matrix", "sdpa-math", "fwd_1_matrix+bwd_1_matrix", "sdpa-math"]
    assert [r["kernel"] or r["peer"] for r in found] == who and len({r["run"] for r in found}) == 1
    for r in found:
        tflops = SMALL.flops(r["pass"]) / (r["ms_median"] * 1e-3) / 1e12
        assert r["tflops"] == pytest.approx(tflops) and r["timing"] == "interleaved"
        is_off = r["kernel"] and {"forward": "fwd", "backward": "bwd", None: "no"}[off] in r["pass"]
        assert r["error"] == pytest.approx(0.25 if is_off else 0, abs=1e-4)
        assert r.get("peer_version") == (f"torch {metadata.version('torch')}" if r["peer"] else None)


def test_a_forward_alone_is_called_without_autograd():
    who = grid.Entrant(forward=lambda causal: ("out", "lse"), attention=lambda causal: "by autograd")
    assert who.call([None], "fwd", False)() == ("out",)


def test_a_graph_is_captured_once_and_of_inputs_of_its_own(monkeypatch):
    captured, q = [], torch.ones(1, 1, 2, 4)
    monkeypatch.setattr(torch.cuda, "make_graphed_callables", lambda call, like: captured.append(like) or call)
    entrant = grid.graphed(grid.a_peer("sdpa-math"))
    call = entrant.call((q, q, q, q), "fwd+bwd", False)
    for _ in range(2):
        assert torch.equal(call()[0], q)
    assert all(x.requires_grad and x.data_ptr() != q.data_ptr() for x in captured.pop()) and not captured


@cpu_only
def test_a_group_takes_turns_as_a_whole_beside_its_ceiling(monkeypatch):
    rounds, taken = [], timing.summary([1.0, 2.0, 3.0] * 10)
    monkeypatch.setattr(timing, "interleaved", lambda c, **_: rounds.append(len(c)) or dict.fromkeys(c, taken))
    monkeypatch.setattr(timing, "sustained", lambda c, **_: dict.fromkeys(c, taken | {"clock_mhz": 1600, "watts": 700}))
    monkeypatch.setattr(grid, "MATMUL_SIZE", 48)
    whole, share = task(), task(how=dict(share=0.5, options={"feature": "half"}))
    product = task(dtype="bf16", how={"ceiling": partial(grid.matrix_product, "bf16")})
    plain, half, _, copy, _, matmul = measured([whole, share, task(how={"ceiling": grid.copied_keys})], [product])
    assert [n for n in rounds if n > 1] == [4, 2]
    assert half["tflops"] == plain["tflops"] / 2 and half["options"] == {"feature": "half"}
    assert (copy["peer"], copy["pass"], copy["tflops"]) == ("copy", "copy", 0)
    assert (matmul["peer"], matmul["N"], matmul["D"], matmul["tflops"]) == ("matmul", 48, 48, 2 * 48**3 / 2 / 1e9)
    (one,) = measured([whole], timed="sustained")
    assert (one["clock_mhz"], one["watts"], one["timing"]) == (1600, 700, "sustained")


def test_a_sample_is_of_the_last_head_and_if_asked_of_the_last_queries():
    inputs = grid.make_inputs(SMALL, "fp32", "cpu")
    assert all(map(torch.equal, inputs, grid.make_inputs(SMALL, "fp32", "cpu")))
    assert all(abs(x.std() - 1) < 0.1 for x in inputs) and not torch.equal(inputs[0], inputs[1])
    results = attention.forward(*inputs[1:], causal=True)[0], *attention.backward(*inputs, causal=True)
    whole, part = (grid.sample_truth(inputs, True, last=last) for last in (None, 5))
    assert set(part) == {"out", "dq"}
    for name, want in zip(grid.RESULTS["fwd+bwd"], results, strict=True):
        assert (whole[name] - want[-1:, -1 if name in ("dk", "dv") else -2 :]).abs().max() < 1e-12
        if name in part:
            wrong = want.clone()
            wrong[0], wrong[:, :2], wrong[:, :, :-5] = 9, 9, 9  # all outside the sample
            assert grid.sample_error({name: wrong}, part) < 1e-12
            wrong[-1, -2, -5] += 0.5
            assert grid.sample_error({name: wrong}, part) == pytest.approx(0.5)


@cpu_only
@pytest.mark.parametrize("reason, changes", [
    ("TypeError: 'NoneType' object is not callable", {"forward": None}),
    ("not finite", {"forward": lambda *args, **options: (matrix(*args, **options)[0] * math.nan, None)}),
    ("no kernel of this name", {"fwd_kernel": "fwd_9_none"}), ("more than the limit of 0 ms", {}),
    ("has no backward", {"passes": ("bwd",), "bwd_kernel": None}),
])  # fmt: skip
def test_who_cannot_take_part_is_left_out_with_a_reason_given_once(monkeypatch, capsys, reason, changes):
    monkeypatch.setattr(grid, "LIMIT_MS", 1000 if changes else 0)
    assert not measured([task(**changes)], [task(**changes)])
    (said,) = capsys.readouterr().out.splitlines()
    assert reason in said


# --- plans --------------------------------------------------------------------------------------------------


def test_the_plans_name_rungs_and_peers_that_there_are(monkeypatch):
    parts = [part for some in grid.PLANS.values() for part in some if isinstance(part, grid.Part)]
    for part in parts:
        assert set(part.peers) <= set(peers.PEERS) and set(part.dtypes) <= set(rows.DTYPES)
    for number in ("02", "03"):
        (folder,) = (rows.ROOT / "steps").glob(f"step{number}_*")
        files = {path.stem.split("_", 2)[2] for path in folder.glob("fwd_*")}
        assert {word for part in parts if "fwd" in part.passes for n, word in part.rungs if n == number} == files
    fa2, mma = (grid.candidate("02", word) for word in ("fa2", "mma"))
    assert (fa2.fwd_kernel, fa2.bwd_kernel, mma.backward) == ("fwd_5_fa2", "bwd_1_fa2", None)
    (long,) = grid.sustained(grid.PLANS["fast"])
    assert [(p.N, p.D) for p in long.grid] == [(16384, 128)] * 2 + [(16384, 64)] * 2 and long.timed == "sustained"
    assert not list(grid.sustained(grid.PLANS["slow"] + grid.PLANS["features"]))
    monkeypatch.setattr(grid, "measure", lambda groups, timed: list(groups))
    ((one,), *_) = grid.PLANS["switches"][1]()
    assert [who.bwd_kernel for who in one.entrants][:2] == ["bwd_3_hopper", "bwd_3_hopper:DETERMINISTIC=1"]


@pytest.mark.skipif(bool(catalogue.unavailable("02")), reason="stage 02 cannot run here")
def test_a_part_of_a_plan_gives_the_rows_of_its_rungs_in_the_dtypes_that_they_take(monkeypatch):
    monkeypatch.setattr(grid, "LIMIT_MS", 1e5)
    monkeypatch.setattr(grid, "MATMUL_SIZE", 48)
    part = grid.Part((("02", "scalar"),), (Point(1, 1, 40, 32),), grid.BOTH, ("fp32", "bf16"), ("sdpa-math",))
    found = [(r["dtype"], r["pass"], r["kernel"] or r["peer"]) for r in part() if r["error"] < 1e-4 or not r["kernel"]]
    kernels = [("fp32", "fwd", "fwd_0_scalar"), ("fp32", "bwd", "bwd_0_scalar")]
    others = [(dtype, pass_, "sdpa-math") for dtype in part.dtypes for pass_ in grid.BOTH]
    assert sorted(found) == sorted(kernels + others + [("bf16", "matmul", "matmul")] * 2)


def error_of(task, who=0):
    """The error of one who takes part, forward."""
    inputs = grid.make_inputs(task.point, "bf16", engine.device)
    truth = grid.sample_truth(inputs, task.point.causal, last=task.last, options=task.reference)
    return grid.sample_error({"out": task.entrants[who].call(inputs, "fwd", task.point.causal)()[0]}, truth)


@needs_triton
def test_a_feature_computes_what_the_reference_does_and_counts_the_scores_that_positions_leave_visible(monkeypatch):
    monkeypatch.setattr(grid, "SOFTCAP", 1.0)  # 50 hardly changes scores as small as these
    first, second, (decode,), (memory,) = grid.features(16, 40, 24)
    assert [one.options for one in first] == [one.options for one in second] and len(first) == 12
    told = {name: more for one in first for name, *more in [[*one.options.values()]] if more}
    cap, left = grid.SOFTCAP, (2, 0)
    of_window = {"window": [left], "soft-cap + window": [cap, left]}
    assert told == {"soft-cap": [cap], "packed": [grid.SEQUENCES], "dropout": [grid.DROPOUT]} | of_window
    small = list(grid.small_calls())
    both = [("small call",), ("small call", True)]
    told = [[tuple(one.options.values()) for one in group] for group in small]
    assert told == [both, both, [("soft-cap", cap)], [("decode",)], [("decode",)]]
    for usual, graphs in small[:2]:
        assert graphs.passes == ("fwd+bwd",) and list(map(str, graphs.entrants)) == list(map(str, usual.entrants))
        assert not {one.attention for one in graphs.entrants} & {one.attention for one in usual.entrants}
    assert decode.ceiling and decode.passes == ("fwd",) and memory.passes == ("fwd+bwd",)
    assert error_of(replace(decode, point=Point(2, 4, 1, 16, Hk=2, Nk=40))) < 0.03
    for one in grid.features_at(16, 2, 16):
        by_position = {name: x for name, x in one.reference.items() if "mask" not in name}
        seen = one.point.B * int(attention.Features(**by_position).seen(one.point.N, one.point.N, engine.device).sum())
        counted = one.share * one.point.flops("fwd") / (4 * one.point.H * one.point.D)
        assert counted == (seen / 2 if one.point.causal else seen) and error_of(one) < 0.03, one.options


@needs_triton
def test_features_are_compared_with_a_backward_of_the_same_file(monkeypatch):
    """Without a feature that file's, though a call would take a rung's; with sinks the one that such a call takes."""
    from steps.step03_triton import bwd_2_gluon

    monkeypatch.setattr(bwd_2_gluon, "refusal", lambda q: None)
    found = {one.options["feature"]: one.entrants[0].bwd_kernel for one in grid.features_at(16, 2, 64)}
    assert (found["none"], found["causal"], found["sinks"]) == ("flash", "flash", "flash_gluon_backward")


@needs_triton
@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
@pytest.mark.parametrize("name, features", [
    ("fa4", ["none", "causal", "soft-cap", "sinks", "window", "soft-cap + window", "packed"]),
    pytest.param("flex", ["none", "causal", "ALiBi", "soft-cap", "window", "soft-cap + window", "packed"],
                 marks=pytest.mark.long),
])  # fmt: skip
def test_a_peer_of_features_computes_the_same(packages, monkeypatch, name, features):
    monkeypatch.setattr(peers, "compiled", lambda function: function)
    monkeypatch.setattr(grid, "SOFTCAP", 1.0)
    tasks = [one for one in grid.features_at(32, 2, 16) if name in map(str, one.entrants)]
    assert [one.options["feature"] for one in tasks] == features
    for one in tasks:
        assert error_of(one, [str(who) for who in one.entrants].index(name)) < 0.03, one.options


# --- ablations, profile, tune -------------------------------------------------------------------------------


@pytest.mark.parametrize("kernel", ablations.SEPARATE)
def test_a_turned_switch_is_another_kernel_and_large_scores_alone_need_the_separate_exponent(kernel):
    shapes = "#ifndef A\n#define A 1\n", "#ifndef B  // why\n#define B 0\n", "#ifndef N\n#define N 2\n"
    text = "#endif\n".join([*shapes, "#ifndef WIDE\n#define WIDE (D > 1)\n"])
    assert ablations.switches(text) == {"A": (0,), "B": (1,), "WIDE": (0, 1)}
    whole = grid.candidate("02", kernel.split("_")[-1])
    same, *turned, fused = grid.switched(whole, ("fwd",))
    _, ordered = grid.switched(grid.candidate("02", "hopper"), ("bwd",))
    assert same.fwd_kernel == kernel and len(turned) >= 3 and fused.fwd_kernel == f"{kernel}:LARGE_SCORES=0"
    launched = [launch[-1] for launch in rows.launched_by(of_02(ordered.bwd_kernel))["bwd_3_hopper"]]
    assert ordered.backward.keywords["deterministic"] and {macros["DETERMINISTIC"] for macros in launched} == {1}
    hashes = [rows.row_hash(of_02(one.fwd_kernel)) for one in (same, *turned, fused)]
    assert None not in hashes and hashes[0] not in hashes[1:]
    q, k, v = (torch.randn(1, 1, 150, 32, generator=torch.Generator().manual_seed(n)) for n in range(3))
    q, k, v = (x.to(engine.device, torch.bfloat16) for x in (q, k, v))
    for found, expected in zip(fused.forward(q, k, v), whole.forward(q, k, v), strict=True):
        torch.testing.assert_close(found, expected)


@needs_emulator
def test_clocks_go_forward_and_change_nothing():
    q, k, v = torch.randn(3, 1, 1, 512, 128, generator=torch.Generator().manual_seed(0)).bfloat16()
    assert ladder.FORWARD["hopper"].tile(ablations.AT.D, 227 * 1024)[0] == 2 * 64, "marks have room for two warpgroups"
    run, out, lse, marks = ablations.timed_launch(q, k, v, {}, first=2, steps=8)
    run()
    assert all(map(torch.equal, calls.forward(q, k, v, rung="hopper"), (out, lse)))
    # Block 0 of 3 has the first and the last of 4 tiles of queries, with 4 blocks of keys each: steps 0 to 7, the last
    # unwritten.
    assert (marks[:5] > 0).all() and (marks[5:] == 0).all()
    times = marks[:5].transpose(0, 1).flatten(1)
    assert (times[:, 1:] >= times[:, :-1]).all()
    for edits in ablations.LEFT_OUT.values():
        ablations.changed(ablations.FORWARD, ablations.clocks() | edits)
    with pytest.raises(ValueError, match="0 times, not once"):
        ablations.changed("fwd_5_fa2", {"no such text": "y"})


@needs_emulator
def test_what_the_backward_computes_without_a_part():
    tensors = ablations.tensors_at(Point(1, 1, 200, 128), "cpu")

    def results(without=None):
        for name in ("dq_sum", "dk", "dv"):
            tensors[name].zero_()
        ablations.backward_call(tensors, without)()
        return [tensors[name].clone() for name in ("dq_sum", "dk", "dv")]

    whole = dq_sum, dk, dv = results()
    inputs = (tensors[name] for name in ("dout", "q", "k", "v", "out", "lse"))
    assert dq_sum.any() and all(map(torch.equal, calls.backward(*inputs, rung="hopper")[1:], (dk, dv)))
    for without, changed in (("delta", [True, True, False]), ("additions to dq", [True, False, False])):
        found = results(without)
        assert [not torch.equal(*pair) for pair in zip(found, whole, strict=True)] == changed
    assert not found[0].any() and ablations.changed(ablations.BACKWARD, ablations.PARTS["all four"])


NCU = f"""==PROF== Profiling "attention_forward" - 2: 0%....50%....100% - 8 passes
"ID","Kernel Name","{profile.METRICS["tensor_pipe"]}","{profile.METRICS["bank_conflicts"]}","gpu__time_duration.sum"
"","","%","","ns"
"0","attention_forward","41.25","1,234,567","n/a"
==PROF== Disconnected
"""


def test_a_record_is_shown_as_long_as_its_kernel_is_as_it_was(tmp_path, monkeypatch, capsys):
    for kind in ("left_out", "timeline"):
        record = ablations.read(kind)
        assert [len(record[name]) for name in ("times", "timelines") if name in record] in ([2 * 6], [4 + 2])
        rows.write_record(kind, record | {"source": "of another kernel"}, tmp_path)
        assert ablations.read(kind, tmp_path) == {}
    monkeypatch.setattr(profile.subprocess, "check_output", lambda words, **_: "" if words[-1] == "mma" else NCU)
    found = profile.profiled("ncu", {"gpu": "NVIDIA H200"})
    assert set(found["rungs"]) == set(profile.RUNGS) - {"mma"} and "0 kernels, not 1" in capsys.readouterr().out
    found["rungs"]["hopper"]["source"] = "0" * 12
    rows.write_record("profile", found, tmp_path)
    counted = {"tensor_pipe": 41.25, "bank_conflicts": 1234567.0}
    assert profile.read(tmp_path) == dict.fromkeys(("ldmatrix", "fa2"), counted)


def test_a_sweep_times_a_row_of_a_table_and_its_neighbours_and_puts_the_row_back(capsys):
    assert {one[0] for one in tune.neighbours((16, 32, 16, 1))} == {16, 32}, "tensor cores take 16 rows"
    own, table = (64, 128, 4, 2), {64: (1, 1, 1, 1), 128: (64, 128, 4, 2)}

    def plan():
        if table[128][3] == 1:
            raise RuntimeError("shared memory")
        return lambda: None

    found = list(tune.sweep(table, 128, plan, reps=3, warmup=0))
    assert table == {64: (1, 1, 1, 1), 128: own} and found[0] == own and len(set(found)) == 3 * 3 * 2 * 2
    assert capsys.readouterr().out.count("shared memory") == 3 * 3 * 2


# --- report ------------------------------------------------------------------------------------------------

PAGE = """# Title
<!-- results: gpu=nvidia-h200 pass=fwd dtype=bf16 D=64 causal=false -->
old
<!-- /results -->
<!-- results: gpu=tesla-t4 pass=fwd -->
old
<!-- /results -->
<!-- profile -->
<!-- /profile -->
<!-- small calls -->
old
<!-- /small calls -->
"""


def test_the_report_fills_both_pages_from_fresh_rows_only(tmp_path, monkeypatch):
    kernel = tmp_path / "steps/step01_fa1_numba/fwd_0_scalar.py"
    readme, page = (tmp_path / name for name in report.PAGES)
    for file, text in ((kernel, "x = 1\n"), (readme, PAGE), (page, PAGE)):
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)
    fresh = row(source=rows.code_hash("01_fa1_numba", "fwd_0_scalar", tmp_path))
    others = ({"dtype": "fp32"}, {"options": {"window": 64}}, LOAD, {"kernel": "fwd_1_warp"})
    write([fresh, *(fresh | other | {"tflops": 888.0} for other in others), peer_row()], page.parent)
    text, same = report.pages(tmp_path).values()
    assert "| 01 fwd_0_scalar | 3 | 100% | 1.0e-03 |\n| sdpa-flash | 3 | – | 1.0e-03 |" in text
    assert "Changed since it was measured, and not shown: 01 fwd_1_warp." in text
    assert not re.search("888|\nold\n", text) and text.count(report.EMPTY) == 3 and text == same
    monkeypatch.setattr(report, "pages", lambda: {"README.md": text})
    monkeypatch.setattr(rows, "ROOT", tmp_path)
    report.main()
    assert readme.read_text() == text and page.read_text() == PAGE
    monkeypatch.undo()
    kernel.write_text("x = 2\n")
    table, _, rest = report.pages(tmp_path)["README.md"].partition("<!-- /results -->")
    assert "and not shown: 01 fwd_0_scalar, 01 fwd_1_warp." in table and rest and "|" not in table
    with pytest.raises(ValueError, match="no such field: head"):
        report.render(PAGE.replace("D=64", "head=64"), [])


def test_small_calls_are_told_in_microseconds_of_the_newest_run():
    call = {"N": 256, "options": {"feature": "small call"}}
    graph = {"options": call["options"] | {"graph": True}}
    both = call | {"pass": "fwd+bwd", "kernel": "fwd_0_scalar+bwd_0_scalar", "ms_median": 0.034}
    of_peer = both | {"kernel": None, "stage": None, "source": None, "peer": "fa4", "host_us": 41.0}
    found = [row(**call, host_us=9.4), row(**both, host_us=31.0), row(**both | graph, host_us=12.0), row(**of_peer)]
    others = row(**call | {"run": "r0"}, host_us=7.0), row(**call | {"N": 1024}, host_us=6.0), row(host_us=8.0)
    text = report.small_calls([*others, row(**of_peer), *found])
    assert text.splitlines()[2:4] == ["| 01 fwd_0_scalar | 9 | 31 | 12 | 34 |", "| fa4 | – | 41 | – | 34 |"]
    assert "B = 1, H = 2, N = 256, D = 64, bfloat16. NVIDIA H200" in text and report.small_calls([]) == report.EMPTY


def test_each_form_of_a_cell_of_the_tables_of_speeds_and_of_loads():
    """Numbers of three digits, what was not measured, a kernel that no peer was measured beside, a peer."""
    at_1k = {"N": 1024, "Nk": 1024, "reps": 33}
    other = {"kernel": "fwd_1_warp", "tflops": 0.01234}
    rows = [row(), row(**at_1k, tflops=1234.5, error=2e-3), row(**at_1k, **other), peer_row(tflops=2.0)]
    rows.append(peer_row(peer="fa4", tflops=4.0, error=0.0))
    text = report.markdown(rows)
    assert text.splitlines()[2:6] == [
        "| 01 fwd_0_scalar | 3 | 1.23e+03 | 75% | 2.0e-03 |",
        "| 01 fwd_1_warp | – | 0.0123 | – | 1.0e-03 |",
        "| fa4 | 4 | – | – | 0.0e+00 |",
        "| sdpa-flash | 2 | – | – | 1.0e-03 |",
    ]
    assert "\n| kernel | N=512 | N=1024 | of the best peer | error |\n" in f"\n{text}" and "at least 30 " in text
    of_load = [row(**LOAD, causal=True), peer_row(**LOAD, causal=True), row(**LOAD, **{"pass": "bwd"})]
    assert report.markdown(of_load).splitlines()[2:5] == [
        "| fwd, D=64, causal | 01 fwd_0_scalar | 3 | 1600 | 700 | 1.88 | 233 |",
        "| fwd, D=64, causal | sdpa-flash | 3 | 1600 | 700 | 1.88 | 233 |",
        "| bwd, D=64, full | 01 fwd_0_scalar | 3 | 1600 | 700 | 1.88 | 233 |",
    ]


def test_what_was_not_measured_beside_a_kernel_is_not_compared_with_it():
    """The numbers of a table are those of the page of results."""
    for how in ({}, LOAD):
        text = report.markdown([row(**how), peer_row(**how), peer_row(**how, run="r2", peer="fa4")])
        assert "sdpa-flash" in text and "fa4" not in text
    assert report.select([row(), row(n_gpus=2), row(**LOAD), row(options={"window": 1})], "D=64") == [row()]


def test_a_row_is_told_in_a_line():
    assert report.line(row()).endswith("2 ms ±25.0%, 3 TFLOP/s, error 1e-03")
    assert ", soft-cap: " in report.line(row(options={"feature": "soft-cap", "softcap": 50.0}))
    assert "±25.0%, 0.0671 TB/s, error" in report.line(row(N=1, Nk=2**18))
    assert "3 TFLOP/s at 1600 MHz and 700 W, error" in report.line(row(**LOAD))


# --- commands -----------------------------------------------------------------------------------------------


def invoke(*words):
    return CliRunner().invoke(__main__.app, ["bench", *words])


@pytest.mark.parametrize("name", ["fwd_1_matrix", "fwd_1_loops_swapped", "bwd_0_scalar", "fwd_0_fused"])
def test_one_command_checks_a_kernel_file(name, monkeypatch):
    files = grid.kernel_files()
    if name not in files:
        pytest.skip("its stage cannot run here")
    monkeypatch.setattr(engine, "name", "cpu")
    done = invoke(f"{name}.cu")
    assert done.exit_code == 0 and done.output.count("right: ") == 4, done.output
    usual = catalogue.stage(files[name][0]).forward

    def off(*args, **how):
        out, lse = usual(*args, **how)
        return out + 1, lse

    monkeypatch.setattr(catalogue.stage(files[name][0]), "forward", off)
    monkeypatch.setattr(__main__, "CASES_OF_A_FILE", ("ragged_causal",))
    done = invoke(name)
    assert done.exit_code == 1 and "wrong: " in done.output and "'out': (1" in done.output


def test_the_commands_refuse_what_there_is_not_and_write_rows_beside_what_is_committed(monkeypatch, tmp_path, capsys):
    monkeypatch.setattr(engine, "name", "cpu")
    assert invoke("--sustained").exit_code == 1 and "bench needs a GPU" in invoke().output
    assert "(did you mean 'fwd_1_matrix'?); there are fwd_3_tiled" in " ".join(invoke("fwd_1_matricx").output.split())
    with monkeypatch.context() as without_kernels:
        without_kernels.setattr(grid, "kernel_files", dict)
        told = " ".join(invoke("fwd_3_gluon.py").output.split())
        assert "no rung that can run here has the file fwd_3_gluon" in told, "and not that there is none"
    with pytest.raises(SystemExit, match="needs a GPU"):
        measuring.main(["fast"])
    monkeypatch.setattr(engine, "name", "cuda")
    unknown = ["--grid", "huge"], ["--peer", "nobody"], ["--stage", "09"], ["--dtype", "fp8"], ["--kernel", "fusedd"]
    for words in (["no_kernel"], *unknown, ["--stage", "02", "--kernel", "fused"]):
        assert invoke(*words).exit_code == 2
    with pytest.raises(typer.BadParameter, match="there is no 'nothing'"):
        measuring.main(["nothing"])
    asked, read = [], rows.read
    write([of_02(**LOAD, tflops=600.0), of_02(tflops=700.0), of_02(**LOAD, N=9)], tmp_path / "committed")
    monkeypatch.setattr(rows, "read", lambda **how: read(tmp_path / "committed", **how))
    measuring.show([of_02(**LOAD, tflops=500.0)], tmp_path / "own", beside=True)
    first, second = capsys.readouterr().out.splitlines()
    assert "500 TFLOP/s at 1600 MHz" in first and second.startswith("committed:") and "600 TFLOP/s" in second
    assert read(tmp_path / "own", timing="sustained") == [of_02(**LOAD, tflops=500.0)]
    monkeypatch.setattr(grid.Part, "__call__", lambda part: asked.append(part) or [])
    assert invoke("--sustained", "--kernel", "fa2").exit_code == 0 == invoke("--stage", "02").exit_code
    assert (asked[0].rungs, asked[0].timed, len(asked[0].grid)) == ((("02", "fa2"),), "sustained", 4)
    assert asked[1].grid == grid.QUICK_GRID and asked[1].dtypes == ("bf16", "fp32") and len(asked[1].rungs) == 9
    folders = []
    monkeypatch.setattr(measuring, "show", lambda found, folder: folders.append(folder))
    measuring.main(["fast", "bwd"], record=False, sustained=False)
    assert asked[2:] == [*grid.PLANS["fast"], *grid.PLANS["bwd"]]
    measuring.main(["fast"], record=True, sustained=False)
    assert folders == [rows.OWN, rows.OWN, rows.COMMITTED]
