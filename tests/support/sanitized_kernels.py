"""Runs one kernel of stage 02 at small sizes and compares it with the reference, as a command for NVIDIA's sanitizers.

    python -m tests.support.sanitized_kernels fwd_5_fa2            prints "4 passed"
    python -m tests.support.sanitized_kernels fwd_5_fa2 --planted  with a race in the kernel; results are not compared
    python -m tests.support.sanitized_kernels tma_store            prints "1 passed"; initcheck wrongly reports this one

Each tensor is an allocation of its own, so that an access one element too far is outside of it. Inputs and reference
are computed on the CPU, so that the sanitizers watch hardly anything but our kernels. A persistent kernel gets 3
blocks, so that each block computes several tiles.
"""

import contextlib
import itertools
import re
import shutil
import sys
import tempfile
from pathlib import Path
from unittest import mock

import torch

from reference import error
from steps import engine
from steps.step02_fa2_cuda import calls, ladder, launches, plan

STAGE = launches.HERE
EVERY_ROW = "__syncthreads();  // every thread reads rows that other threads have loaded"
V_IS_THERE = "__syncthreads();  // V_j is there, and no thread still reads K_j"
# In rungs 6 to 8 only the copy engine and wgmma access tiles in shared memory. racecheck attributes the copy engine's
# stores (cp.async.bulk.tensor) to no thread and does not see wgmma's reads (flash-attention,
# AI/RACECHECK_TMA_HAZARD.md). It cannot find a missing wait there; tests/test_emulator.py does. Two warps that store to
# one address only show that racecheck looks at these kernels at all.
BARRIERS = "__syncthreads();  // the barriers exist"
TWO_STORE = "__syncthreads(), {}[threadIdx.x % 32] = T{{uint16_t(threadIdx.x)}};"
PLANTED = {  # kernel: (a line of its file, what replaces it); "//" removes a barrier, so that threads no longer wait
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
    """The kernel's text with its line of PLANTED replaced. ValueError unless the text has exactly one such line."""
    line, planted = PLANTED[kernel]
    if text.count(line) != 1:
        raise ValueError(f"{kernel}.cu has {text.count(line)} lines with {line!r}, not one")
    # Without the barrier more values may be alive at once, so that the kernel spills more registers.
    return re.sub(r"Spill budget: \d+", "Spill budget: 999", text.replace(line, planted))


@contextlib.contextmanager
def planted_race(kernel):
    """Inside `with`, stage 02 compiles its kernels from a copy of its .cu files in which `kernel` has a race."""
    with tempfile.TemporaryDirectory() as folder:
        for path in STAGE.glob("*.cu"):
            shutil.copy(path, folder)
        file = Path(folder) / f"{kernel}.cu"
        file.write_text(with_a_race(file.read_text(), kernel))
        with mock.patch.object(launches, "HERE", Path(folder)), mock.patch.dict(calls.plans, clear=True):
            yield


def inputs(D, dtype, N):
    """q (1, 2, N, D), k and v (1, 1, N, D), and dout like q."""
    generator = torch.Generator().manual_seed(D)
    return [torch.randn(1, heads, N, D, generator=generator).to(dtype) for heads in (2, 1, 1, 2)]


def results(row, q, k, v, dout, causal, deterministic):
    """{name: tensor}: the results of the row's kernel; a backward's are those for what the rung's forward returns.

    Persistent blocks have several tiles; those of a backward are persistent if there is a mask and no fixed order.
    """
    two = mock.patch.object(launches, "processors", lambda device: 2)
    with two, mock.patch.object(ladder, "persistent_pays", lambda problem: problem.causal):
        out, lse = calls.forward(q, k, v, rung=row.word, causal=causal)
        if row in ladder.ROWS:
            return {"out": out, "lse": lse}
        assert ladder.backward_row(row.word, q.dtype, q.shape[-1]) is row
        options = dict(rung=row.word, causal=causal, deterministic=deterministic)
        gradients = calls.backward(dout, q, k, v, out, lse, **options)
    return dict(zip(("dq", "dk", "dv"), gradients, strict=True))


def check(kernel, planted=False, N=261, head_dims=(64, 128)):
    """Runs the kernel with these head_dims, causal and not, a backward also with dq in a fixed order where it can.

    Returns how many runs were right, or 0 with a planted race.
    """
    (row,) = (row for row in (*ladder.ROWS, *ladder.BACKWARD_ROWS) if row.file == f"{kernel}.cu")
    dtype = row.dtypes[0]
    orders = (False, True) if row.in_order else (False,)
    passed = 0
    with planted_race(kernel) if planted else contextlib.nullcontext():
        for D in [D for D in head_dims if D in row.head_dims]:
            for causal, ordered in itertools.product((False, True), orders):
                on_cpu = inputs(D, dtype, N)
                got = results(row, *(x.to(engine.device) for x in on_cpu), causal, ordered)
                got = {name: x.cpu() for name, x in got.items()}
                if not planted:
                    bad = error.failures(got, error.expected(*on_cpu, causal=causal))
                    assert not bad, f"{kernel}, D={D}, causal={causal}, in order: {ordered}: {bad}"
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
    """1 if a tile that the copy engine stores arrives in a tensor that nothing has written before, otherwise 0."""
    ones = torch.ones(1, 1, 16, 64, dtype=torch.bfloat16).to(engine.device)
    stored = torch.empty_like(ones)
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "store.cu"
        file.write_text(TMA_STORE)
        arguments = launches.Box("stored", 16), "ones"
        how = dict(grid=1, block=32, shared_bytes=2048 + 128, macros={"T": "bf16"})
        spec = launches.LaunchSpec(file, "store", arguments, **how)
        plan.launch_all([spec], {"stored": stored, "ones": ones})
    return int(torch.equal(stored.cpu(), ones.cpu()))


if __name__ == "__main__":
    # Under a sanitizer the CPU's threads would wait for each other, half a minute for one small reference.
    torch.set_num_threads(1)
    what = sys.argv[1]
    print(f"{tma_store() if what == 'tma_store' else check(what, '--planted' in sys.argv[2:])} passed")
