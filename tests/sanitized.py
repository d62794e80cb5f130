"""One kernel of stage 02 at small sizes, compared with the reference: what runs under NVIDIA's sanitizers.

    python -m tests.sanitized fwd_5_fa2              prints "4 passed"
    python -m tests.sanitized fwd_5_fa2 --planted    the same with a race, in a copy; what it computes does not count
    python -m tests.sanitized tma_store              the least that initcheck reports, wrongly, of bwd_2 and bwd_3: "1 passed"

Plain tensors, each an allocation of its own, so that one element too far is outside. Inputs and reference are computed on the
CPU, so that next to nothing but our kernels is watched. Hopper's persistent kernel gets 3 blocks: each takes several tiles.
"""

import importlib
import re
import shutil
import sys
import tempfile
from pathlib import Path
from unittest import mock

import torch

from reference import error
from steps import engine

STAGE = Path(__file__).parents[1] / "steps" / "step02_fa2_cuda"
EVERY_ROW = "__syncthreads();  // every thread reads rows that other threads have loaded"
V_IS_THERE = "__syncthreads();  // V_j is there, and no thread still reads K_j"
# Rungs 6 to 8 touch shared memory by the copy engine and wgmma only. racecheck gives no thread the former's stores
# (cp.async.bulk.tensor) and does not see the latter's reads (flash-attention, AI/RACECHECK_TMA_HAZARD.md), so that a missing wait
# is for tests/test_emulator.py to find. That it looks at these kernels at all, two warps that store to one place can show.
BARRIERS = "__syncthreads();  // the barriers exist"
TWO_STORE = "__syncthreads(), {}[threadIdx.x % 32] = T{{uint16_t(threadIdx.x)}};"
# By kernel: its line, and what is there in the planted copy. Without a barrier, who waits there no longer does.
PLANTED = {
    "fwd_0_scalar": (EVERY_ROW, "//"),
    "fwd_1_warp": (EVERY_ROW, "//"),
    "fwd_2_mma": (EVERY_ROW, "//"),
    "fwd_3_ldmatrix": (EVERY_ROW, "//"),
    "fwd_4_cp_async": (V_IS_THERE, "//"),
    "fwd_5_fa2": (V_IS_THERE, "//"),
    "fwd_6_wgmma": (BARRIERS, TWO_STORE.format("Q")),
    "fwd_7_roles": (BARRIERS, TWO_STORE.format("Q.tiles")),
    "fwd_8_hopper": (BARRIERS, TWO_STORE.format("Q.tiles")),
    "bwd_0_scalar": ("__syncthreads();  // dS is complete", "//"),
    "bwd_1_fa2": ("__syncthreads();  // P and dS are complete", "//"),
    "bwd_2_wgmma": ("__syncthreads();  // both warpgroups have written dS^T", "//"),
    "bwd_3_hopper": ("__syncthreads();  // both warpgroups have written dS^T", "//"),
}


def with_a_race(text, kernel):
    """The kernel's text with its line of PLANTED changed; ValueError if it has not exactly one such line."""
    line, planted = PLANTED[kernel]
    if text.count(line) != 1:
        raise ValueError(f"{kernel}.cu has {text.count(line)} lines with {line!r}, not one")
    return re.sub(r"Spill budget: \d+", "Spill budget: 999", text.replace(line, planted))  # more may be alive without a barrier


def package(kernel, planted):
    """The stage's modules: its own, or those of a copy of its files in which `kernel` has a race."""
    if not planted:
        return "steps.step02_fa2_cuda"
    folder = Path(tempfile.mkdtemp()) / "planted"
    shutil.copytree(STAGE, folder, ignore=shutil.ignore_patterns("__pycache__"))
    (folder / "__init__.py").unlink()  # it needs the rest of the course
    file = folder / f"{kernel}.cu"
    file.write_text(with_a_race(file.read_text(), kernel))
    sys.path.insert(0, str(folder.parent))
    return "planted"


def inputs(D, dtype, N):
    """q (1, 2, N, D), k and v (1, 1, N, D), dout like q."""
    generator = torch.Generator().manual_seed(D)
    return [torch.randn(1, heads, N, D, generator=generator).to(dtype) for heads in (2, 1, 1, 2)]


def check(kernel, planted=False, N=261, head_dims=(64, 128)):
    """Runs the kernel for these head_dims, causal and not; how often its results were right, or 0 for a planted copy."""
    rungs = importlib.import_module(f"{package(kernel, planted)}.rungs")
    word = kernel.split("_", 2)[2]
    forward, backward = rungs.LADDER[word]
    own = rungs.limits(engine.name)[word]
    dtype, passed = own.get("dtypes", (torch.bfloat16,))[0], 0
    for D in [D for D in head_dims if D in own["head_dims"]]:
        for causal in (False, True):
            on_cpu = inputs(D, dtype, N)
            q, k, v, dout = (x.to(engine.device) for x in on_cpu)
            with mock.patch.object(rungs.hopper, "multiprocessors", lambda device: 3):
                out, lse = forward(q, k, v, causal=causal)
                got = {"out": out, "lse": lse}
                if kernel.startswith("bwd"):
                    got = dict(zip(("dq", "dk", "dv"), backward(dout, q, k, v, out, lse, causal=causal), strict=True))
            if not planted:
                bad = error.failures({name: x.cpu() for name, x in got.items()}, error.expected(*on_cpu, causal=causal))
                assert not bad, f"{kernel}, D={D}, causal={causal}: {bad}"
                passed += 1
    return passed


TMA_STORE = """#include "ptx.cuh"
extern "C" __global__ void store(const __grid_constant__ TensorMap map, Global<const T> ones) {
  SharedMemory smem;
  Shared<T> tile = smem.array<T>(16 * 64);
  for (int e = threadIdx.x; e < 16 * 64; e += 32) tile[e] = ones[e];
  fence_async();
  __syncwarp();  // all lanes' numbers are there, for the copy engine too
  if (threadIdx.x == 0) tma_store(map, tile, 0, 0, 0, 0, 0), bulk_commit(), bulk_wait_read<0>();
}
"""


def tma_store():
    """1, if a tile that the copy engine has stored arrives in a tensor that nobody had written."""
    hopper, kernels = (importlib.import_module(f"steps.step02_fa2_cuda.{name}") for name in ("hopper", "kernels"))
    file = Path(tempfile.mkdtemp()) / "store.cu"
    file.write_text(TMA_STORE)
    ones = torch.ones(1, 1, 16, 64, dtype=torch.bfloat16).to(engine.device)
    stored = torch.empty_like(ones)
    arguments = hopper.tensor_map(stored, 16), ones
    kernels._launch(file, "store", arguments, grid=1, block=32, shared_bytes=2048 + 128, macros={"T": "bf16"})
    return int(torch.equal(stored.cpu(), ones.cpu()))


if __name__ == "__main__":
    torch.set_num_threads(1)  # under a sanitizer the CPU's threads wait for each other, half a minute for one small reference
    print(f"{tma_store() if sys.argv[1] == 'tma_store' else check(sys.argv[1], '--planted' in sys.argv[2:])} passed")
