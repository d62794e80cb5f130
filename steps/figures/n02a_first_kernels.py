"""What notebook 02a shows: speeds, owners of a row, the order of threads, lanes that agree, mistakes that are seen."""

import math
import re

import matplotlib.pyplot as plt
import torch
from matplotlib.colors import ListedColormap

from reference import attention
from steps.bench import cost, rows
from steps.figures import measured
from steps.figures.picture import picture
from steps.figures.planted import emulated, mistake, outputs, prepared, wrapped
from steps.figures.plots import COLOURS, FAINT, INK, style
from steps.step02_fa2_cuda import calls, emulator

GPU = cost.GPUS["NVIDIA H200"]
STAGE_01 = ("fwd_0_published", "fwd_1_loops_swapped", "fwd_2_registers")
COUNTED = """#include "ptx.cuh"
extern "C" __global__ void counted(Global<int> order, Global<int> counter) {
  order[threadIdx.x] = atomicAdd(&counter[0], 1);
  __syncthreads();
  order[blockDim.x + threadIdx.x] = atomicAdd(&counter[0], 1);
}"""


def float32_speeds(*kernels):
    """TFLOP/s of stage 01's forwards and of these kernels in float32, beside PyTorch's, on an H200."""
    found = rows.latest(rows.fresh(rows.read()))
    at = {"gpu": GPU.name, "dtype": "fp32", "pass": "fwd", "N": 4096, "D": 64, "causal": False, "options": {}}
    found = [row for row in found if all(row[name] == at[name] for name in at)]
    found = [r for r in found if r["peer"] == "sdpa-efficient" or r["kernel"] in (*STAGE_01, *kernels)]
    told = ", ".join(f"{r['peer'] or r['kernel']} {r['tflops']:.3g}" for r in found)
    return picture(measured.speed_bars(found), f"TFLOP/s of the forward in float32 as bars: {told}.")


def owners():
    """A tile of S, coloured by who computes it: FlashAttention-1's warps, FlashAttention-2's, rung 0's threads."""
    style()
    row, key = torch.meshgrid(torch.arange(64), torch.arange(64), indexing="ij")
    panels = {
        "FlashAttention-1:\na warp, some keys": key // 16,
        "FlashAttention-2:\na warp, some rows": row // 16,
        "rung 0:\na thread, a row": row % 6,
    }
    fig, axes = plt.subplots(1, 3, figsize=(8.4, 3.3), layout="constrained", sharey=True)
    for ax, (title, owner) in zip(axes, panels.items(), strict=True):
        colours = ListedColormap(COLOURS[: owner.max() + 1])
        ax.imshow(owner, cmap=colours, extent=(0, 64, 64, 0), interpolation="nearest")
        ax.set(title=title, xlabel="key", xticks=range(0, 65, 16), yticks=range(0, 65, 16))
        ax.grid(False)
    axes[0].set_ylabel("query")
    return picture(fig, """A tile of S, 64 queries by 64 keys, coloured by owner, three times. FlashAttention-1: four
    bands of keys, one for each warp, so that every row has four owners. FlashAttention-2: four bands of rows, one owner
    each. Rung 0: every row is a band of its own.""")


def order_of_threads():
    """When each of eight threads comes before a barrier and after it, in the emulation's three orders."""
    style()
    fig, axes = plt.subplots(1, 3, figsize=(8, 3.0), sharey=True, layout="constrained")
    for ax, threads in zip(axes, emulator.ORDERS, strict=True):
        order = torch.zeros(2, 8).int()
        with emulator.schedule(threads=threads, seed=1):
            emulated(COUNTED, "counted", [order, torch.zeros(1).int()], grid=1, block=8)
        for t in range(8):
            ax.plot(order[:, t], [t, t], color=FAINT, lw=1.5, zorder=1)
        for times, look, colour, says in zip(order, "os", COLOURS[1::-1], ("before", "after"), strict=True):
            ax.plot(times, range(8), look, color=colour, label=f"{says} the barrier")
        ax.axvline(7.5, color=INK, ls="--", lw=1)
        ax.set(title=f"threads {threads}", xlabel="order in time", yticks=range(8))
    axes[0].set_ylabel("thread")
    fig.legend(*axes[0].get_legend_handles_labels(), fontsize=9, ncols=2, loc="outside lower center")
    return picture(fig, """When each of eight threads comes to run, in three orders. In each, all eight run up to the
    barrier before any goes on after it; the orders differ in who comes first. Grey lines are the times a thread waits.
    """)


def try_differences(text, index, barrier, grid, shared_bytes):
    """Runs the reader's first kernel with four answers, its threads in two orders; prints what is wrong."""
    answers = {"index": index, "barrier": barrier, "grid": grid, "shared_bytes": shared_bytes}
    if blank := [name for name, answer in answers.items() if answer is ...]:
        print("still blank:", ", ".join(blank))
        return
    x = torch.arange(20.0) ** 2
    want = torch.diff(x, prepend=torch.zeros(1))
    text = text.replace("INDEX", index).replace("BARRIER", barrier)
    for threads in ("forward", "reverse"):
        y = torch.full((20,), math.nan)
        try:
            with emulator.schedule(threads=threads):
                emulated(text, "differences", [x, y], grid=grid, block=8, shared_bytes=shared_bytes, N=20)
        except RuntimeError as complaint:
            print(f"threads {threads}:\n{wrapped(str(complaint)[:400])}")
            return
        wrong, unwritten = ((y != want).nonzero().flatten().tolist(), y.isnan().nonzero().flatten().tolist())
        says = f"y is wrong at {wrong}, and nan at {unwritten}" if wrong else "right"
        print(f"threads {threads}: {says}")


def warp_owners(a=1, b=2):
    """What one lane of rung 1 owns of its warp's 16 rows of S and of O, and what the seven others of its rows own."""
    style()
    S, O = torch.zeros(16, 64), torch.zeros(16, 64)
    S[a::4], O[a::4] = 1, 1
    for i in range(a, 16, 4):
        S[i, b::8] = O[i, 4 * b : 4 * b + 4] = O[i, 32 + 4 * b : 36 + 4 * b] = 2
    fig, axes = plt.subplots(1, 2, figsize=(8.4, 2.6), layout="constrained", sharey=True)
    colours = ListedColormap(["white", COLOURS[5], COLOURS[0]])
    for ax, title, owner, xlabel in ((axes[0], "S", S, "key of the tile"), (axes[1], "O", O, "column")):
        ax.pcolormesh(owner, cmap=colours, edgecolors=FAINT, linewidth=0.3)
        ax.set(title=title, xlabel=xlabel, ylim=(16, 0), xticks=range(0, 65, 8), yticks=range(0, 17, 4))
        ax.grid(False)
    axes[0].set_ylabel("row of the warp")
    handles = [plt.Rectangle((0, 0), 1, 1, color=colour) for colour in (COLOURS[0], COLOURS[5])]
    labels = [f"lane (a, b) = ({a}, {b})", f"the other lanes of a = {a}"]
    fig.legend(handles, labels, fontsize=9, ncols=2, loc="outside lower center")
    return picture(fig, """A warp's 16 rows of S and of O at D = 64. Lane (1, 2) owns the rows 1, 5, 9 and 13: of S the
    keys 2, 10, 18 and so on, eight of them; of O the columns 8 to 11 and 40 to 43. The rest of these four rows belongs
    to the seven other lanes of a = 1.""")


def stuck(rung, edit):
    """Prints what the emulation says of a rung with this edit, on a case with a ragged last tile, and the line."""
    x, _ = prepared("ragged", rung, tile=(16, 16))
    with mistake(rung, edit) as lines:
        try:
            outputs(x, rung)
        except RuntimeError as complaint:
            line = int(re.search(r"\.cu:(\d+)", str(complaint))[1])
            print(f"{wrapped(complaint)}\nline {line}:\n    {lines[line - 1].strip()}")


def rows_right(edit, threads):
    """(rows that are right, rows that are NaN) of rung 0 with this edit: D = 1, twelve causal tokens, one tile."""
    q, k, v = torch.randn(3, 1, 1, 12, 1, generator=torch.Generator().manual_seed(0))
    with mistake("scalar", edit), emulator.schedule(threads=threads, seed=1):
        out, _ = calls.forward(q, k, v, rung="scalar", causal=True)
    want = attention.forward(q, k, v, causal=True)[0]
    return int(torch.isclose(out.double(), want).sum()), int(out.isnan().sum())
