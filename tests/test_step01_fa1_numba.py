"""Stage 01: the contract, what the kernels compile to, and what only a GPU can show."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import steps.step01_fa1_numba as step01
from reference import error
from suite import Contract


class TestContract(Contract):
    stage = step01


COMPILE = """
import re
from types import SimpleNamespace
from numba import cuda, float32, types
from numba.cuda import dispatcher, types as cuda_types
from kernels import bwd_0_published, fwd_0_published

for cc in (8, 0), (9, 0):
    dispatcher.get_current_device = lambda: SimpleNamespace(compute_capability=cc)  # asked for each device function
    for dtype in float32, cuda_types.float16:
        x, f3, f2 = types.Array(dtype, 3, "C"), types.Array(float32, 3, "C"), types.Array(float32, 2, "C")
        for kernel, arrays in (
            (fwd_0_published.forward_kernel(16, 32, 64), (x, x, x, f3, f2, f2)),
            (bwd_0_published.backward_kernel(16, 32, 64), (x, x, x, x, x, f2, f2, f3, x, x)),
        ):
            ptx, _ = cuda.compile_ptx(kernel.py_func, (*arrays, types.boolean, float32), cc=cc)
            shared = sum(map(int, re.findall(r"\\.shared .*\\[(\\d+)\\];", ptx)))
            print(ptx.count(".f64"), ptx.count(".local"), shared, ptx.count("sm_%d%d" % cc))
"""


@pytest.mark.compile
def test_no_float64_in_the_compiled_kernels(tmp_path):
    """In a process of its own, because this one simulates; the kernel files alone, because `steps` would choose the simulator."""
    package = tmp_path / "kernels"
    package.mkdir()
    for name in ("fwd_0_published.py", "bwd_0_published.py"):
        shutil.copy(Path(step01.__file__).with_name(name), package)
    path = os.pathsep.join([str(tmp_path), os.environ.get("PYTHONPATH", "")])
    environment = os.environ | {"NUMBA_ENABLE_CUDASIM": "0", "PYTHONPATH": path}
    done = subprocess.run([sys.executable, "-c", COMPILE], env=environment, cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    rows = [tuple(map(int, line.split())) for line in done.stdout.splitlines()]
    assert len(rows) == 8
    for doubles, local, shared, target in rows:
        assert doubles == 0 and local == 0 and target > 0
        assert shared <= 48 * 1024  # the largest tile and head_dim that SUPPORTS offers on a GPU


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
