"""Runs the kernels of a file at small sizes and compares them with the reference, as a command for a sanitizer.

    python -m tests.support.sanitized fwd_5_fa2            prints "4 passed"
    python -m tests.support.sanitized fwd_5_fa2 --planted  stage 02, with a race in the kernel; nothing is compared
    python -m tests.support.sanitized tma_store            prints "1 passed"; initcheck wrongly reports this one

Each tensor is an allocation of its own, so that an access one element too far is outside of it. Inputs and reference
are computed on the CPU, so that the sanitizers watch hardly anything but our kernels. A persistent kernel gets 3
blocks, so that each block computes several tiles. The kernels of stage 03 have the tiles of their tables. Two query
heads share a key head.
"""

import contextlib
import importlib
import itertools
import re
import shutil
import sys
import tempfile
from functools import partial
from pathlib import Path
from unittest import mock

import torch

from reference import error, feature_cases
from steps import engine
from steps.step02_fa2_cuda import calls, ladder, launches, plan


def inputs(D, dtype, N):
    """q (1, 2, N, D), k and v (1, 1, N, D), and dout like q."""
    generator = torch.Generator().manual_seed(D)
    return [torch.randn(1, heads, N, D, generator=generator).to(dtype) for heads in (2, 1, 1, 2)]


def check(kernel, planted=False, **sizes):
    """How many runs of the file's kernels were right, or 0 with a planted race."""
    runs, passed = of_features if kernel in FEATURES else of_triton if kernel in TRITON else of_cuda, 0
    with planted_race(kernel) if planted else contextlib.nullcontext():
        for about, got, want in runs(kernel, **sizes):
            if not planted:
                bad = error.failures({name: x.cpu() for name, x in got.items()}, want())
                assert not bad, f"{kernel}, {about}: {bad}"
                passed += 1
    return passed


# --- stage 02 ---------------------------------------------------------------------------------------------------------

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


def of_cuda(kernel, N=261, head_dims=(64, 128)):
    """Yields (what is run, results, expected): each head_dim, causal and not, a backward also in a fixed order.

    Persistent blocks have several tiles; those of a backward are persistent if there is a mask and no fixed order.
    """
    (row,) = (row for row in (*ladder.ROWS, *ladder.BACKWARD_ROWS) if row.file == f"{kernel}.cu")
    orders = (False, True) if row in ladder.BACKWARD_ROWS and row.in_order else (False,)
    head_dims = [D for D in head_dims if D in row.head_dims]
    two = mock.patch.object(launches, "processors", lambda device: 2)
    for D, causal, ordered in itertools.product(head_dims, (False, True), orders):
        on_cpu = inputs(D, row.dtypes[0], N)
        q, k, v, dout = (x.to(engine.device) for x in on_cpu)
        with two, mock.patch.object(ladder, "persistent_pays", lambda problem: problem.causal):
            out, lse = calls.forward(q, k, v, rung=row.word, causal=causal)
            got = {"out": out, "lse": lse}
            if row not in ladder.ROWS:
                assert ladder.backward_row(row.word, q.dtype, D) is row
                options = dict(rung=row.word, causal=causal, deterministic=ordered)
                got = dict(zip(("dq", "dk", "dv"), calls.backward(dout, q, k, v, out, lse, **options), strict=True))
        yield f"D={D}, causal={causal}, in order: {ordered}", got, partial(error.expected, *on_cpu, causal=causal)


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


# --- stage 03 ---------------------------------------------------------------------------------------------------------

HALVES = torch.float16, torch.bfloat16
ALL = torch.float32, *HALVES
# Of each file the dtypes, which take turns, and the head_dims. Rows of 20 numbers do not begin at multiples of 16
# bytes, so that rungs tma and roles take pointers. Rung gluon takes no such rows.
TRITON = {
    "fwd_0_fused": (ALL, (64, 20)),
    "fwd_1_tma": (HALVES, (64, 20)),
    "fwd_2_roles": (HALVES, (64, 20)),
    "fwd_3_gluon": (HALVES, (64, 72)),
    "bwd_0_fused": (ALL, (64, 20)),
    "bwd_1_tma": (HALVES, (64, 20)),
    "bwd_2_gluon": (HALVES, (64, 128)),
}
# Of the files with features the cases of feature_cases.py, and how many times as long as there with which head_dim.
# decode has a few splits. Of more than 8, all warps hold the sums over the splits, and each stores them to the same
# place to lay them out anew: racecheck calls that a race.
COMBINED = [names for names in feature_cases.COMBINED if "lengths" not in names]
FEATURES = {
    "flash": (COMBINED, 1, 24),
    "decode": ([names for names in feature_cases.CASES if "lengths" in names], 5, 24),
    "flash_gluon": ([("left window", "causal", "sinks"), ("packed", "window"), ("sinks",)], 10, 72),
    "flash_gluon_backward": (
        [("left window", "causal", "dropout"), ("packed", "softcap"), ("window",), ("sinks",)], 10, 72
    ),
}


def written(size, alignment, stream):
    """Memory for the descriptors that rung roles makes, filled with zeros.

    A descriptor is stored by `tensormap.cp_fenceproxy`, of which ptxas makes an atomic exchange (ATOMG.EXCH), whose old
    value nobody uses. initcheck takes the exchange for a read.
    """
    return torch.zeros(size, dtype=torch.int8, device="cuda")


def few(device, tiles):
    """How many programs of Gluon's forwards there are, so that each computes several tiles."""
    return min(tiles, 2)


def of_triton(kernel, N=261):
    """The same of a file of stage 03; of a backward for the reference's out and lse."""
    from steps.step03_triton import fwd_2_roles, fwd_3_gluon

    module, (dtypes, head_dims) = importlib.import_module(f"steps.step03_triton.{kernel}"), TRITON[kernel]
    runs = [(N, D, causal) for D in head_dims for causal in (False, True)]
    if kernel == "fwd_2_roles":
        runs.append((256, 128, False))  # Its warps have roles at such sizes only.
    for (n, D, causal), dtype in zip(runs, itertools.cycle(dtypes), strict=False):
        on_cpu = inputs(D, dtype, n)
        want = error.expected(*on_cpu, causal=causal)
        saved = want.value["out"].to(dtype), want.value["lse"].float()
        q, k, v, dout, *saved = (x.to(engine.device) for x in (*on_cpu, *saved))
        if hasattr(module, "backward"):
            names, got = ("dq", "dk", "dv"), module.backward(dout, q, k, v, *saved, causal=causal)
        else:
            patch = mock.patch.multiple(fwd_3_gluon, SHORT=0, programs_for=few)
            with patch, mock.patch.object(fwd_2_roles, "allocate", written):
                names, got = ("out", "lse"), module.forward(q, k, v, causal=causal)
        about = f"N={n}, D={D}, {dtype}, causal={causal}"
        yield about, dict(zip(names, got, strict=True)), lambda want=want: want


def of_features(kernel):
    """The same of a file with features. flash alone has both passes; a backward gets the reference's out and lse."""
    from steps.step03_triton.features import flash_gluon

    module, (cases, n, D) = importlib.import_module(f"steps.step03_triton.features.{kernel}"), FEATURES[kernel]
    for names, dtype in zip(cases, itertools.cycle(HALVES if "gluon" in kernel else ALL), strict=False):
        *on_cpu, options = feature_cases.inputs(names, dtype, n=n, D=D)
        want = feature_cases.expected(*on_cpu, options)
        options = {x: y.to(engine.device) if isinstance(y, torch.Tensor) else y for x, y in options.items()}
        q, k, v, dout = (x.to(engine.device) for x in on_cpu)
        with mock.patch.object(flash_gluon, "programs_for", few):
            if kernel == "flash":
                got = feature_cases.run(module, q, k, v, dout, options)
            elif hasattr(module, "forward"):
                got = dict(zip(("out", "lse"), module.forward(q, k, v, **options), strict=True))
            else:
                out, lse = (want.value[name].to(q.device) for name in ("out", "lse"))
                grads = module.backward(dout, q, k, v, out.to(dtype), lse.float(), **options)
                got = dict(zip(("dq", "dk", "dv", "dsinks"), grads, strict=False))
        yield f"{names}, {dtype}", got, lambda want=want: want


if __name__ == "__main__":
    # Under a sanitizer the CPU's threads would wait for each other, half a minute for one small reference.
    torch.set_num_threads(1)
    what = sys.argv[1]
    print(f"{tma_store() if what == 'tma_store' else check(what, '--planted' in sys.argv[2:])} passed")
