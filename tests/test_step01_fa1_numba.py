"""Stage 01: the contract, what the kernels compile to, and what only a GPU can show."""

import os
import shutil
import subprocess
import sys
from importlib import metadata
from pathlib import Path

import pytest
import torch

import steps.step01_fa1_numba as step01
from reference import error
from steps.step01_fa1_numba import bwd_0_published, fwd_0_published, fwd_1_loops_swapped, fwd_2_registers, resources
from suite import Contract


class TestContract(Contract):
    stage = step01


def package(tmp_path):
    """The kernel files alone: `steps` would choose the simulator, which cannot compile."""
    folder = tmp_path / "kernels"
    folder.mkdir()
    for file in Path(step01.__file__).parent.glob("?wd_*.py"):
        shutil.copy(file, folder)
    path = os.pathsep.join([str(tmp_path), os.environ.get("PYTHONPATH", "")])
    return os.environ | {"NUMBA_ENABLE_CUDASIM": "0", "PYTHONPATH": path}


COMPILE = """
from types import SimpleNamespace
from numba import cuda, float32, types
from numba.cuda import dispatcher, types as cuda_types
from kernels import bwd_0_published as b0, bwd_2_registers as b2, fwd_0_published as f0, fwd_1_loops_swapped as f1
from kernels import fwd_2_registers as f2

f3, f2D, size = types.Array(float32, 3, "C"), types.Array(float32, 2, "C"), types.int64
for cc, dtype, first in ((8, 0), float32, 3), ((9, 0), cuda_types.float16, 0):
    dispatcher.get_current_device = lambda: SimpleNamespace(compute_capability=cc)  # asked for each device function
    x, x1 = types.Array(dtype, 3, "C"), types.Array(dtype, 1, "C")
    for kernel, arrays in (
        (f0.forward_kernel(16, 32, 64), (x, x, x, f3, f2D, f2D)),
        (f1.forward_kernel(16, 32, 64), (x, x, x, x, f2D)),
        (f2.forward_kernel(128, 64, 64), (x1, x1, x1, x1, f2D, size, size)),
        (f2.forward_kernel(64, 128, 128), (x1, x1, x1, x1, f2D, size, size)),
        (b0.backward_kernel(16, 32, 64), (x, x, x, x, x, f2D, f2D, f3, x, x)),
        (b2.queries_kernel(64, 64, 128), (x1, x1, x1, x1, x1, f2D, f2D, x1, size, size)),
        (b2.keys_kernel(64, 64, 128), (x1, x1, x1, x1, f2D, f2D, x1, x1, size, size)),
    )[first : 7 - first]:
        ptx, _ = cuda.compile_ptx(kernel.py_func, (*arrays, types.boolean, float32), cc=cc)
        print(ptx.count(".f64"), ptx.count(".local"), ptx.count("sm_%d%d" % cc))
"""


@pytest.mark.compile
def test_no_float64_and_no_local_memory_in_the_compiled_kernels(tmp_path):
    """Local memory would mean that patches lie in device memory instead of registers."""
    environment = package(tmp_path)
    done = subprocess.run([sys.executable, "-c", COMPILE], env=environment, cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    rows = [tuple(map(int, line.split())) for line in done.stdout.splitlines()]
    assert len(rows) == 8
    for doubles, local, target in rows:
        assert doubles == 0 and local == 0 and target > 0


@pytest.mark.compile
def test_resources_of_a_compiled_kernel():
    (row,) = resources.table(64, only="fwd_1_loops_swapped")
    words = 2 * 16 * 65 + 2 * 32 * 65 + 16 * 33 + 3 * 16  # Q, O; K, V; S; m, l, alpha
    assert row["threads"] == 256 and row["shared"] == 4 * words and row["spilled"] == 0 and 32 <= row["registers"] <= 255
    kept = resources.recorded()
    before = next(x for x in kept["kernels"] if (x["kernel"], x["D"]) == (row["kernel"], 64))
    assert all(before[name] == row[name] for name in ("tile", "threads", "shared"))
    here = {d.name: d.version for d in metadata.distributions()}
    if kept["versions"].items() <= here.items():  # another compiler, other registers
        assert before == {"D": 64} | row


@pytest.mark.parametrize(
    "threads, registers, shared, expected",
    [
        (128, 168, 46336, (3, "registers", 3 * 4 / 64)),  # 65536 / (4 warps * 168 * 32) = 3.05
        (128, 40, 46336, (4, "shared memory", 4 * 4 / 64)),  # 233472 / (46336 + 1024) = 4.9
        (256, 32, 0, (8, "registers", 1.0)),
        (32, 16, 0, (32, "blocks", 0.5)),
    ],
)
def test_occupancy(threads, registers, shared, expected):
    assert resources.occupancy(threads, registers, shared) == expected


@pytest.mark.parametrize(
    "rung, tile, D, words",
    [
        (fwd_0_published, (128, 128), 64, ("Q 128 x 65 + K 128 x 65", "166,912 bytes", "49,152")),
        (fwd_1_loops_swapped, (64, 64), 128, ("O 64 x 129", "49,152")),
        (fwd_2_registers, (16, 1024), 32, ("numbers in registers, and a thread has 255", "no side may exceed 16")),
        (bwd_0_published, (64, 64), 64, ("dV 64 x 65", "49,152")),
    ],
)
def test_an_impossible_tile_raises_with_the_sum(rung, tile, D, words):
    x = torch.zeros(1, 1, 4, D)
    with pytest.raises(ValueError) as raised:
        rung.forward(x, x, x, tile=tile) if hasattr(rung, "forward") else rung.backward(x, x, x, x, x, x[..., 0], tile=tile)
    for word in words:
        assert word in str(raised.value)


def test_a_tile_that_the_threads_cannot_share_out_raises():
    x = torch.zeros(1, 1, 4, 32)
    with pytest.raises(ValueError, match="multiple of"):
        fwd_2_registers.forward(x, x, x, tile=(7, 8))


def test_too_many_numbers_for_the_registers_raise_with_the_sum():
    with pytest.raises(ValueError, match=r"8 x 16 \+ 8 x 16 = 256 numbers in registers, and a thread has 255"):
        fwd_2_registers.check_registers("tile (128, 128), head_dim 128", (8, 16), (8, 16))


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
    """Forward and backward of all, of which the given heads are compared with the reference."""
    out, lse = step01.forward(q, k, v)
    grads = step01.backward(q, q, k, v, out, lse)  # dout = q
    got = dict(zip(error.NAMES, (x[:, heads] for x in (out, lse, *grads)), strict=True))
    q, k, v = (x[:, heads] for x in (q, k, v))
    assert not error.failures(got, error.expected(q, k, v, q))
