"""Stage 01: the contract, what the kernels compile to, and what only a GPU can show."""

import contextlib
import math
import subprocess
import sys
import threading
import time
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
import torch

import steps.step01_fa1_numba as step01
from reference import error
from steps import engine
from steps.course.figures import n01x_deeper
from steps.step01_fa1_numba import (
    bwd_0_published,
    bwd_2_registers,
    fwd_0_published,
    fwd_1_loops_swapped,
    fwd_2_registers,
    limits,
)
from support.contract_suite import Contract
from support.operands import PLACES


@pytest.mark.skipif(engine.name != "cpu", reason="kernels are not simulated")
def test_the_simulator_s_threads_compute_while_they_are_waited_for(monkeypatch):
    """Otherwise its main thread asks them 40,000 times whether they are alive, and not 250 times."""
    asked, is_alive = [], threading.Thread.is_alive
    monkeypatch.setattr(threading.Thread, "is_alive", lambda thread: asked.append(thread) or is_alive(thread))
    step01.forward(*torch.randn(3, 1, 2, 11, 16), rung="published")
    assert 8 <= len(asked) < 10_000


WITHOUT_NUMBA_CUDA = """
import sys
sys.meta_path = [finder for finder in sys.meta_path if type(finder).__name__ != "NumbaCudaFinder"]
import torch
from steps import step01_fa1_numba as step01
from numba import cuda
assert "numba_cuda" not in cuda.__file__, cuda.__file__
x = torch.randn(4, 1, 1, 11, 8)

def results(attention, **options):
    q, k, v = x[:3].clone().requires_grad_()
    out = attention(q, k, v, **options)
    return out, *torch.autograd.grad(out, (q, k, v), x[3])

right = results(torch.nn.functional.scaled_dot_product_attention, is_causal=True)
for rung in step01.RUNGS:
    for _ in range(3):
        torch.testing.assert_close(results(step01.attention, causal=True, rung=rung), right, rtol=1e-4, atol=1e-5)
"""


@pytest.mark.skipif(engine.name != "cpu", reason="kernels are not simulated")
def test_where_numba_cuda_is_not_installed_numba_s_own_simulator_runs_all_rungs():
    """As on macOS. Its threads shared `cuda` wrongly, so that most calls failed."""
    done = subprocess.run([sys.executable, "-c", WITHOUT_NUMBA_CUDA], capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")


class TestContract(Contract):
    """The simulator runs a Python thread for each CUDA thread, so there most tests compute with smaller tensors."""

    stage = step01
    own_lse = ("published", "loops_swapped", "registers")
    several_tiles = 24
    places = PLACES.keys() - {"negated"}  # Numba refuses such tensors.

    def test_case(self, case, dtype, rung):
        if engine.name == "cpu" and case.D == 32:
            case = replace(case, D=16)
        if engine.name == "cpu" and case.place != "contiguous":
            case = replace(case, Nq=lambda T: T + 3)  # Two tiles: the strides are read in each alike.
        super().test_case(case, dtype, rung)

    def example(self, N=None, D=None, rung=None):
        small = engine.name == "cpu" and (rung or N)
        N = min(N or 11, 11) if small else N or 19  # 11 are two tiles, the second one ragged.
        return super().example(N, D or (16 if small else 32), rung)

    @contextlib.contextmanager
    def without_launches(self, monkeypatch):
        with monkeypatch.context() as patch:
            for module in (fwd_0_published, fwd_1_loops_swapped, fwd_2_registers, bwd_0_published, bwd_2_registers):
                patch.setattr(module, "launch", lambda *_: None)
            yield


@pytest.mark.compile
@pytest.mark.parametrize(
    "D, dtype, cc",
    [
        (64, "float32", (9, 0)),
        pytest.param(128, "float32", (9, 0), marks=pytest.mark.long),
        pytest.param(64, "float16", (8, 0), marks=pytest.mark.long),
    ],
)
def test_no_float64_and_no_local_memory_in_the_compiled_kernels(D, dtype, cc):
    """With local memory the patches would not lie in registers."""
    found = {row["kernel"]: row for row in n01x_deeper.compiled(D, dtype, cc)}
    assert len(found) == 6 and all(row["float64"] == row["local"] == 0 for row in found.values())
    assert all(32 <= row["registers"] <= 255 for row in found.values())
    swapped = found["fwd_1_loops_swapped"]
    words = 2 * 16 * (D + 1) + 2 * 32 * (D + 1) + 16 * 33 + 3 * 16  # Q, O; K, V; S; m, l, alpha
    if D == 64 and dtype == "float32":
        assert swapped["shared"] == 4 * words and swapped["threads"] == 256 and swapped["spilled"] == 0


@pytest.mark.parametrize(
    "kernels, tile, D, words",
    [
        (fwd_0_published, (128, 128), 64, ("Q 128 x 65 + K 128 x 65", "166,912 bytes", "49,152")),
        (fwd_1_loops_swapped, (64, 64), 128, ("O 64 x 129", "49,152")),
        (fwd_2_registers, (16, 1024), 32, ("numbers in registers, and a thread has 255", "no side may exceed 16")),
        (bwd_0_published, (64, 64), 64, ("dV 64 x 65", "49,152")),
    ],
)
def test_an_impossible_tile_raises_with_the_sum(kernels, tile, D, words):
    x = torch.zeros(1, 1, 4, D)
    with pytest.raises(ValueError) as raised:
        if hasattr(kernels, "forward"):
            kernels.forward(x, x, x, tile=tile)
        else:
            kernels.backward(x, x, x, x, x, x[..., 0], tile=tile)
    for word in words:
        assert word in str(raised.value)


def test_the_limits_are_those_of_every_rung():
    assert limits.KERNELS.keys() == step01.RUNGS.keys()
    assert limits.tile_fits("registers", 64, (8, 8) if engine.name == "cpu" else (128, 64))
    assert not limits.tile_fits("published", 128, (128, 64))


def test_a_tile_that_the_threads_cannot_share_out_raises():
    x, (X, Y) = torch.zeros(1, 1, 4, 32), fwd_2_registers.threads(32)
    columns = math.lcm(X, fwd_2_registers.STEP)
    with pytest.raises(ValueError, match=f"so the rows must be a multiple of {Y} and the columns of {columns}."):
        fwd_2_registers.forward(x, x, x, tile=(7, 8))


def test_a_block_s_shared_memory_may_be_full_and_no_fuller():
    fwd_0_published.check_shared("a tile", Q=(96, 128))
    words = r"Q 96 x 128 \+ l 1 = 12,289 float32 = 49,156 bytes of .* a block has 49,152\."
    with pytest.raises(ValueError, match=words):
        fwd_0_published.check_shared("a tile", Q=(96, 128), l=(1,))


@pytest.mark.parametrize("rung", step01.RUNGS)
def test_the_tiles_that_nobody_names_fit_on_a_gpu(rung, monkeypatch):
    """Into a block's shared memory and a thread's registers, at every head_dim. Kernels are made, and not run."""
    for module in (fwd_0_published, fwd_1_loops_swapped, bwd_0_published, fwd_2_registers, bwd_2_registers):
        monkeypatch.setattr(module, "SIMULATED", False, raising=False)
    for make in limits.KERNELS[rung]:
        default_tile = sys.modules[make.__module__].default_tile
        for D in (1, 64, 65, 96, 97, 128):
            make.__wrapped__(*default_tile(D), D)  # not through the cache, where the simulator's kernels are


@pytest.mark.parametrize("rung", step01.RUNGS)
def test_tiles_that_are_longer_one_way(rung):
    """Forward and backward, with several ragged tiles each way."""
    q, dout, k, v = (torch.randn(1, 1, N, 16, device=engine.device) for N in (21, 21, 19, 19))
    want = error.expected(q, k, v, dout, causal=True)
    for tile in ((8, 16), (16, 8)) if engine.name == "cpu" else ((16, 32), (32, 16)):
        how = {"rung": rung, "tile": tile, "causal": True}
        saved = step01.forward(q, k, v, **how)
        got = *saved, *step01.backward(dout, q, k, v, *saved, **how)
        assert not error.failures(dict(zip(error.NAMES, got, strict=True)), want), tile


def test_too_many_numbers_for_the_registers_raise_with_the_sum():
    with pytest.raises(ValueError, match=r"8 x 16 \+ 8 x 16 = 256 numbers in registers, and a thread has 255"):
        fwd_2_registers.check_registers("tile (128, 128), head_dim 128", (8, 16), (8, 16))
    fwd_2_registers.check_registers("of 255, all but 60", (15, 13))
    with pytest.raises(ValueError, match="14 x 14 = 196 numbers"):
        fwd_2_registers.check_registers("one more", (14, 14))


@pytest.mark.parametrize("rung", step01.RUNGS)
def test_float16_is_computed_in_float32_and_rounded_once(rung):
    """O too, which rung published keeps in memory from one tile of keys to the next."""
    q, k, v = torch.randn(3, 1, 1, 24, 16, device=engine.device, dtype=torch.float16)
    options = {"rung": rung, "tile": (8, 8) if engine.name == "cpu" else (16, 16)}
    in_float32, _ = step01.forward(q.float(), k.float(), v.float(), **options)
    assert torch.equal(step01.forward(q, k, v, **options)[0], in_float32.half())


def test_the_simulator_s_turns_end_with_the_call():
    """It changes how often Python's threads take turns, for itself only."""
    before = sys.getswitchinterval()
    try:
        sys.setswitchinterval(0.02)
        step01.forward(*torch.randn(3, 1, 1, 3, 8, device=engine.device), rung="published")
        assert sys.getswitchinterval() == pytest.approx(0.02)
    finally:
        sys.setswitchinterval(before)


def run_one_by_one(monkeypatch, backwards):
    """Lets the simulator's threads run one after the other from barrier to barrier, not side by side."""
    from numba.cuda.simulator import kernel as simulator

    def to_the_next_barrier(thread):
        while thread.is_alive() and not thread.syncthreads_blocked:
            time.sleep(0)

    class Turn(threading.Event):
        """What a thread waits for at a barrier. Who sets it goes on when the thread has come to the next one."""

        def set(self):
            super().set()
            to_the_next_barrier(self.thread)

    def start(thread):
        thread.syncthreads_event = Turn()
        thread.syncthreads_event.thread = thread
        threading.Thread.start(thread)
        to_the_next_barrier(thread)

    def in_order(*sizes):
        return sorted(np.ndindex(*sizes), reverse=backwards)

    def place(thread):  # The simulator goes through a set of threads, and a set is in the order of small hashes.
        number = getattr(thread, "thread_id", 0)
        return 255 - number if backwards else number

    monkeypatch.setattr(simulator.BlockThread, "__hash__", place)
    monkeypatch.setattr(simulator.BlockThread, "start", start)
    monkeypatch.setattr(simulator, "np", SimpleNamespace(**vars(np) | {"ndindex": in_order}))


@pytest.mark.skipif(engine.name == "cuda", reason="the simulator's threads")
@pytest.mark.parametrize("backwards", [False, True])
@pytest.mark.parametrize("rung", step01.RUNGS)
def test_the_order_of_threads_does_not_matter(monkeypatch, rung, backwards):
    """Where a barrier is missing, a thread reads in one of the orders what another one writes later."""
    run_one_by_one(monkeypatch, backwards)
    q, dout = torch.randn(2, 1, 1, 17, 8, generator=torch.Generator().manual_seed(0))
    k, v = torch.randn(2, 1, 1, 9, 8, generator=torch.Generator().manual_seed(1))
    out, lse = step01.forward(q, k, v, rung=rung, causal=True)
    grads = step01.backward(dout, q, k, v, out, lse, rung=rung, causal=True)
    got = dict(zip(error.NAMES, (out, lse, *grads), strict=True))
    assert not error.failures(got, error.expected(q, k, v, dout, causal=True))


def test_a_patch_that_is_too_long_for_the_registers_raises():
    tile = (8, 8) if engine.name == "cpu" else (16, 512)  # 24 columns of O, or 32 of S
    with pytest.raises(ValueError, match="no side may exceed 16"):
        fwd_2_registers.forward(*torch.zeros(3, 1, 1, 4, 96, device=engine.device), tile=tile)


@pytest.mark.gpu
@pytest.mark.multigpu
def test_a_device_that_is_not_current():
    assert torch.cuda.current_device() == 0
    q, k, v = (torch.randn(2, 3, 53, 32, device="cuda:1") for _ in range(3))
    check(q, k, v)
    assert torch.cuda.current_device() == 0
    check(*(x.to("cuda:0") for x in (q, k, v)))


@pytest.mark.gpu
def test_launches_on_the_current_stream():
    q, k, v = (torch.zeros(2, 3, 53, 32, device="cuda") for _ in range(3))
    torch.cuda.synchronize()
    with torch.cuda.stream(torch.cuda.Stream()):
        torch.cuda._sleep(10**8)  # a launch on another stream would see the zeros
        for x in (q, k, v):
            x.normal_()
        check(q, k, v)


@pytest.mark.gpu
def test_more_than_2_to_the_31_elements():
    if torch.cuda.mem_get_info()[0] < 60 * 2**30:
        pytest.skip("needs 60 GiB of free GPU memory")
    H, Nq, Nk, D = 2**19 + 16, 64, 16, 64
    q = torch.randn(1, H, Nq, D, device="cuda", dtype=torch.float16)
    k, v = (torch.randn(1, H, Nk, D, device="cuda", dtype=torch.float16) for _ in range(2))
    assert q[:, :-16].numel() >= 2**31
    check(q, k, v, heads=slice(-4, None))


def check(q, k, v, heads=slice(None)):
    """Runs forward and backward of all heads, and compares the given heads with the reference."""
    out, lse = step01.forward(q, k, v)
    grads = step01.backward(q, q, k, v, out, lse)  # dout = q
    got = dict(zip(error.NAMES, (x[:, heads] for x in (out, lse, *grads)), strict=True))
    q, k, v = (x[:, heads] for x in (q, k, v))
    assert not error.failures(got, error.expected(q, k, v, q))
