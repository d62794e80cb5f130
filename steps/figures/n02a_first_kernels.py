"""What notebook 02a shows: speeds, owners of a row, the order of threads, a lane's share."""

import math

import torch

from steps.bench import rows
from steps.figures import measured
from steps.figures.picture import picture
from steps.figures.planted import GPU, emulated, report
from steps.figures.plots import COLOURS, FAINT, cells, subplots
from steps.step02_fa2_cuda import emulator

KERNELS = "fwd_0_published", "fwd_1_loops_swapped", "fwd_2_registers", "fwd_0_scalar", "fwd_1_warp"
COUNTED = """#include "ptx.cuh"
extern "C" __global__ void counted(Global<int> order, Global<int> counter) {
  order[threadIdx.x] = atomicAdd(&counter[0], 1);
  __syncthreads();
  order[blockDim.x + threadIdx.x] = atomicAdd(&counter[0], 1);
}"""


def float32_speeds():
    """TFLOP/s of stage 01's forwards, of rungs 0 and 1 and of PyTorch's kernel in float32, on an H200."""
    at = {"gpu": GPU.name, "dtype": "fp32", "pass": "fwd", "N": 4096, "D": 64, "causal": False, "options": {}}
    found = [row for row in rows.latest(rows.fresh(rows.read())) if at.items() <= row.items()]
    found = [row for row in found if row["peer"] == "sdpa-efficient" or row["kernel"] in KERNELS]
    told = ", ".join(f"{r['peer'] or r['kernel']} {r['tflops']:.3g}" for r in found)
    return picture(measured.speed_bars(found), f"TFLOP/s of the forward in float32 as bars: {told}.")


def owners():
    """A tile of S, coloured by who computes it: FlashAttention-1's warps, FlashAttention-2's, rung 0's threads."""
    panels = {
        "FlashAttention-1:\na warp, some keys": lambda i, j: j // 4,
        "FlashAttention-2:\na warp, some rows": lambda i, j: i // 4,
        "rung 0:\na thread, a row": lambda i, j: i,
    }
    fig, axes = subplots(1, 3, figsize=(8.4, 3.3), sharey=True)
    for ax, (title, owner) in zip(axes, panels.items(), strict=True):
        colours = [[COLOURS[owner(i, j) % 6] for j in range(16)] for i in range(16)]
        cells(ax, colours, title=title, xlabel="key", xticks=range(0, 16, 4), yticks=range(0, 16, 4))
    axes[0].set_ylabel("query")
    return picture(fig, """A tile of S, 16 queries by 16 keys, coloured by owner, three times. FlashAttention-1: four
    bands of keys, one for each warp, so that every row has four owners. FlashAttention-2: four bands of rows, one owner
    each. Rung 0: every row has an owner of its own.""")


def order_of_threads():
    """Prints in which order eight threads come to a barrier and go on after it, for the emulation's three orders."""
    for threads in emulator.ORDERS:
        order = torch.zeros(2, 8).int()
        with emulator.schedule(threads=threads, seed=1):
            emulated(COUNTED, "counted", [order, torch.zeros(1).int()], grid=1, block=8)
        before, after = (" ".join(map(str, line)) for line in order.argsort(1).tolist())
        print(f"{threads:7}  to the barrier: {before}   on after it: {after}")


def try_differences(text, index, barrier, grid, shared_bytes):
    """Runs the reader's first kernel with four answers, its threads in two orders; prints what is wrong."""
    answers = {"index": index, "barrier": barrier, "grid": grid, "shared_bytes": shared_bytes}
    if blank := [name for name, answer in answers.items() if answer is ...]:
        print("still blank:", ", ".join(blank))
        return
    x = torch.arange(20.0) ** 2
    want = torch.diff(x, prepend=torch.zeros(1))
    launch = dict(grid=grid, block=8, shared_bytes=shared_bytes, N=20)
    for threads in ("forward", "reverse"):
        y = torch.full((20,), math.nan)
        with emulator.schedule(threads=threads):
            says = report(text.replace("INDEX", index).replace("BARRIER", barrier), "differences", [x, y], **launch)
        wrong, unwritten = ((y != want).nonzero().flatten().tolist(), y.isnan().nonzero().flatten().tolist())
        found = f"y is wrong at {wrong}, and nan at {unwritten}" if wrong else "right"
        print(f"threads {threads}:", f"\n{says[:400]}" if says else found)
        if says:
            return


def warp_owners(a=1, b=2):
    """What one lane of rung 1 owns of its warp's 16 rows of S and of O, and what the seven others of its rows own."""
    fig, axes = subplots(1, 2, figsize=(8.4, 2.4), sharey=True)
    lanes = {"S": ("key", lambda j: j % 8), "O": ("column", lambda j: j % 32 // 4)}
    for ax, (title, (xlabel, lane)) in zip(axes, lanes.items(), strict=True):
        shares = [COLOURS[1] if lane(j) == b else COLOURS[5] for j in range(64)]
        colours = [shares if i % 4 == a else ["white"] * 64 for i in range(16)]
        cells(ax, colours, edge=FAINT, title=title, xlabel=xlabel, xticks=range(0, 64, 8), yticks=range(0, 16, 4))
    axes[0].set_ylabel("row of the warp")
    return picture(fig, """A warp's 16 rows of S and of O at D = 64. Lane (1, 2), orange, owns the rows 1, 5, 9 and 13:
    of S the keys 2, 10, 18 and so on, eight of them; of O the columns 8 to 11 and 40 to 43. The rest of these four
    rows, light blue, belongs to the seven other lanes of a = 1.""")
