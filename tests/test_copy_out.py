"""Each advertised set of files, copied alone into an empty folder, computes attention without the rest of the course."""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from steps import compare, engine

STEPS = Path(__file__).parents[1] / "steps"
HOST = ("cache.py", "nvrtc.py", "ptx.cuh", "emulator")
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
    "02 scalar": ([f"step02_fa2_cuda/{file}" for file in ("fwd_0_scalar.cu", "bwd_0_scalar.cu", "kernels.py", *HOST)],
                  "kernels.scalar_forward", "kernels.scalar_backward"),
    "02 fa2": ([f"step02_fa2_cuda/{file}" for file in ("fwd_5_fa2.cu", "bwd_1_fa2.cu", "kernels.py", *HOST)],
               "kernels.fa2_forward", "kernels.fa2_backward"),
    "02 hopper": ([f"step02_fa2_cuda/{file}" for file in ("fwd_8_hopper.cu", "bwd_3_hopper.cu", "hopper.py", "wgmma.py", *HOST)],
                  "hopper.hopper_forward", "hopper.hopper_backward"),
    "03 fused": (["step03_triton/fwd_0_fused.py", "step03_triton/bwd_0_fused.py"], "fwd_0_fused.forward", "bwd_0_fused.backward"),
}  # fmt: skip
TENSOR_CORES = ("02 fa2", "02 hopper")  # bfloat16, head_dim 64; the others float32 and 32
USE = """
import importlib, sys
sys.modules["steps"] = sys.modules["reference"] = None  # importing them is an error now
import torch
import torch.nn.functional as F
function = lambda path: getattr(importlib.import_module("lifted." + path.split(".")[0]), path.split(".")[1])
forward, backward = function("{forward}"), function("{backward}")
q, k, v, dout = torch.randn(4, 1, 1, 19, {D}, device="{device}").to(torch.{dtype})
out, lse = forward(q, k, v, causal=True)
leaves = [x.float().requires_grad_() for x in (q, k, v)]
sdpa = F.scaled_dot_product_attention(*leaves, is_causal=True)
near = dict(rtol=1e-4, atol=1e-5) if out.dtype == torch.float32 else dict(rtol=0.03, atol=0.03)
torch.testing.assert_close(out.float(), sdpa, **near)
for mine, its in zip(backward(dout, q, k, v, out, lse, causal=True), torch.autograd.grad(sdpa, leaves, dout.float())):
    torch.testing.assert_close(mine.float(), its, **near)
"""


@pytest.mark.parametrize("name", SETS)
def test_copied_files_work_alone(name, tmp_path):
    if reason := compare.unavailable(name[:2]):
        pytest.skip(reason)
    if name == "02 hopper" and engine.name == "cuda" and torch.cuda.get_device_capability() < (9, 0):
        pytest.skip("needs a GPU of Hopper's kind, or none")
    files, forward, backward = SETS[name]
    (tmp_path / "lifted").mkdir()
    for file in files:
        copy = shutil.copytree if (STEPS / file).is_dir() else shutil.copy
        copy(STEPS / file, tmp_path / "lifted" / Path(file).name)
    simulated = "1" if engine.name == "cpu" else "0"
    path = os.pathsep.join([str(tmp_path), os.environ.get("PYTHONPATH", "")])
    environment = os.environ | {"PYTHONPATH": path, "NUMBA_ENABLE_CUDASIM": simulated}
    environment |= {"TRITON_INTERPRET": simulated, "OMP_NUM_THREADS": "1"}  # small tensors: one thread is faster
    D, dtype = (64, "bfloat16") if name in TENSOR_CORES else (32, "float32")
    code = USE.format(forward=forward, backward=backward, device=engine.device, D=D, dtype=dtype)
    done = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_a_cuda_file_needs_no_other_than_ptx_cuh():
    """So that the other rungs lift out with the same helpers as those of SETS."""
    files = sorted((STEPS / "step02_fa2_cuda").glob("*.cu"))
    assert files
    for file in files:
        assert set(re.findall(r'#include [<"](.+)[>"]', file.read_text())) <= {"ptx.cuh"}, file


@pytest.mark.parametrize("name", ["00 tiled", "01 registers", "02 scalar", "02 fa2", "02 hopper", "03 fused"])
def test_readme_names_the_files_of_a_set(name):
    files, forward, _ = SETS[name]
    readme = (STEPS.parent / "README.md").read_text()
    (line,) = [line for line in readme.splitlines() if line.startswith("|") and f"`{forward}(" in line]
    named = {Path(file).name for file in re.findall(r"`([^`]+)`", line.split("|")[2])}
    assert named - {file.split("/")[0] for file in files} == {Path(file).name for file in files}
