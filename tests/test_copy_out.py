"""Each advertised set of files, copied alone into an empty folder, computes attention without the rest of the course."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from steps import compare, engine

STEPS = Path(__file__).parents[1] / "steps"
# What to copy, and the file and function names of its forward and backward. README advertises the same sets.
SETS = {
    "00 matrix": (["step00_naive/fwd_1_matrix.py", "step00_naive/bwd_1_matrix.py"],
                  "fwd_1_matrix.forward", "bwd_1_matrix.backward"),
    "00 tiled": (["step00_naive/fwd_3_tiled.py", "step00_naive/bwd_3_tiled.py"], "fwd_3_tiled.forward", "bwd_3_tiled.backward"),
    "01 published": (["step01_fa1_numba/fwd_0_published.py", "step01_fa1_numba/bwd_0_published.py"],
                     "fwd_0_published.forward", "bwd_0_published.backward"),
    "01 loops_swapped": ([f"step01_fa1_numba/{f}.py" for f in ("fwd_0_published", "fwd_1_loops_swapped", "bwd_0_published")],
                         "fwd_1_loops_swapped.forward", "bwd_0_published.backward"),
    "01 registers": ([f"step01_fa1_numba/{f}.py" for f in ("fwd_0_published", "fwd_2_registers", "bwd_2_registers")],
                     "fwd_2_registers.forward", "bwd_2_registers.backward"),
    "02 scalar": ([f"step02_fa2_cuda/{file}" for file in ("kernels.py", "cache.py", "nvrtc.py", "ptx.cuh", "emulator",
                                                          "fwd_0_scalar.cu", "bwd_0_scalar.cu")],
                  "kernels.scalar_forward", "kernels.scalar_backward"),
    "03 fused": (["step03_triton/fwd_0_fused.py", "step03_triton/bwd_0_fused.py"], "fwd_0_fused.forward", "bwd_0_fused.backward"),
}  # fmt: skip
USE = """
import importlib, sys
sys.modules["steps"] = sys.modules["reference"] = None  # importing them is an error now
import torch
import torch.nn.functional as F
function = lambda path: getattr(importlib.import_module("lifted." + path.split(".")[0]), path.split(".")[1])
forward, backward = function("{forward}"), function("{backward}")
q, k, v, dout = (torch.randn(1, 2, 19, 32, device="{device}") for _ in range(4))
out, lse = forward(q, k, v, causal=True)
leaves = [x.clone().requires_grad_() for x in (q, k, v)]
sdpa = F.scaled_dot_product_attention(*leaves, is_causal=True)
torch.testing.assert_close(out, sdpa, rtol=1e-4, atol=1e-5)
for mine, its in zip(backward(dout, q, k, v, out, lse, causal=True), torch.autograd.grad(sdpa, leaves, dout)):
    torch.testing.assert_close(mine, its, rtol=1e-4, atol=1e-5)
"""


@pytest.mark.parametrize("name", SETS)
def test_copied_files_work_alone(name, tmp_path):
    if reason := compare.unavailable(name[:2]):
        pytest.skip(reason)
    files, forward, backward = SETS[name]
    (tmp_path / "lifted").mkdir()
    for file in files:
        copy = shutil.copytree if (STEPS / file).is_dir() else shutil.copy
        copy(STEPS / file, tmp_path / "lifted" / Path(file).name)
    simulated = "1" if engine.name == "cpu" else "0"
    path = os.pathsep.join([str(tmp_path), os.environ.get("PYTHONPATH", "")])
    environment = os.environ | {"PYTHONPATH": path, "NUMBA_ENABLE_CUDASIM": simulated}
    environment |= {"TRITON_INTERPRET": simulated, "OMP_NUM_THREADS": "1"}  # small tensors: one thread is faster
    code = USE.format(forward=forward, backward=backward, device=engine.device)
    done = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
