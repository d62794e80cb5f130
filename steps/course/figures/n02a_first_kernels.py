"""What notebook 02a shows: speeds, owners of a row, and its first exercise."""

import math
import textwrap

import torch
from matplotlib.patches import Rectangle

from steps.course.bench import rows
from steps.course.figures import measured
from steps.course.figures.picture import picture
from steps.course.figures.planted import GPU, changed_lines, report
from steps.course.figures.plots import COLOURS, cells, subplots
from steps.step02_fa2_cuda import emulator

LOADS = {  # numbers from shared memory for a multiply-add, at D = 64
    "fwd_0_published": 2, "fwd_1_loops_swapped": 2, "fwd_2_registers": 0.25, "fwd_0_scalar": 1, "fwd_1_warp": 0.31,
}  # fmt: skip
IDEAS = {  # of stage 01
    "fwd_0_published": "tiles, keys outside", "fwd_1_loops_swapped": "queries outside",
    "fwd_2_registers": "patches of 8 x 8 in registers",
} | measured.IDEAS  # fmt: skip

MISTAKES = {  # of fwd_0_scalar
    "idle threads return early": ("  float Q_i[D], O_i", "  if (i >= Nq) return;\n  float Q_i[D], O_i"),
    "no barrier before the loads": ("    __syncthreads();  // no ", "    // no "),
    "V loaded beyond the last key": (
        "load_tile(V, v + j * v_row, v_row, min(Bc, keys - j)", "load_tile(V, v + j * v_row, v_row, Bc"
    ),
    "m starts at 0": ("m = -INFINITY, l = 0;", "m = 0, l = 0;"),
    "l = 0 is divided by": ("l == 0 ? 0 : O[d] / l", "O[d] / l"),
    "one column of S for all": ("<float>(Bc * Br) + threadIdx.x", "<float>(Bc * Br)"),
}
OF_MIRROR = {
    "one place too far": ("tile[n - 1 - t]", "tile[n - t]"),
    "no barrier": ("  __syncthreads();\n", ""),
    "thread 5 returns": ("  __syncthreads", "  if (t == 5) return;\n  __syncthreads"),
}


def break_mirror(text, x):
    """Plants three mistakes in the kernel `mirror` and prints each, with y or what the emulation complains of."""
    for says, edit in OF_MIRROR.items():
        y = torch.zeros(len(x))
        complaint = report(text.replace(*edit), "mirror", [x, y], grid=1, block=8, shared_bytes=8 * 4)
        print(says, *changed_lines(text, *edit), complaint or f"    y = {y.tolist()}", sep="\n")


def in_float32():
    """The rows of stage 01's forwards, of rungs 0 and 1 and of PyTorch's kernel in float32, on an H200."""
    at = {"gpu": GPU.name, "dtype": "fp32", "pass": "fwd", "N": 4096, "D": 64, "causal": False, "options": {}}
    found = [row for row in rows.latest(rows.fresh(rows.read())) if at.items() <= row.items()]
    return [row for row in found if row["peer"] == "sdpa-efficient" or row["kernel"] in LOADS]


def rungs():
    """These rows as a table in words: what each kernel adds, its TFLOP/s, and the share of the float32 units' speed."""
    lines = [("kernel", "adds", "TFLOP/s", f"of {GPU.fp32_tflops}")]
    order = [*LOADS, None]
    for row in sorted(in_float32(), key=lambda row: order.index(row["kernel"])):
        speed = f"{row['tflops']:.3g}", f"{row['tflops'] / GPU.fp32_tflops:.0%}"
        lines.append((rows.label(row), IDEAS.get(row["kernel"], "the peer"), *speed))
    a, b, c, d = (max(map(len, column)) for column in zip(*lines, strict=True))
    shown = [f"{w:{a}}  {x:{b}}  {y:>{c}}  {z:>{d}}" for w, x, y, z in lines]
    return "\n".join([*shown, f"({GPU.name}, fp32, D = 64, N = 4096, full)"])


def float32_speeds():
    """These rows as bars, with the loads of each kernel."""
    found = sorted(in_float32(), key=lambda row: row["tflops"])
    told = ", ".join(f"{r['peer'] or r['kernel']} {r['tflops']:.3g}" for r in found)
    bars = measured.speed_bars(found, grey=[name for name in LOADS if name not in measured.IDEAS])
    loads = [f"\nloads a multiply-add: {LOADS[row['kernel']]:g}" if row["kernel"] else "" for row in found]
    names = [rows.label(row) + words for row, words in zip(found, loads, strict=True)]
    bars.axes[0].set_yticks(range(len(found)), names)
    return picture(bars, f"""TFLOP/s of the forward in float32 as bars, rungs 0 and 1 of stage 02 in colour: {told}.
    Beside each name stand its loads a multiply-add: {", ".join(f"{name} {n:g}" for name, n in LOADS.items())}.""")


def owners():
    """A tile of S, coloured by the warp that computes it: in FlashAttention-1 and in FlashAttention-2."""
    panels = {
        "FlashAttention-1: a warp has\nsome keys of every row": lambda i, j: j // 4,
        "FlashAttention-2: a warp has\nall keys of some rows": lambda i, j: i // 4,
    }
    fig, axes = subplots(1, 2, figsize=(7, 3.9), sharey=True)
    for ax, (title, owner) in zip(axes, panels.items(), strict=True):
        colours = [[COLOURS[owner(i, j)] for j in range(16)] for i in range(16)]
        cells(ax, colours, title=title, xlabel="key", xticks=range(0, 16, 4), yticks=range(0, 16, 4))
    axes[0].set_ylabel("query")
    handles = [Rectangle((0, 0), 1, 1, fc=colour, label=f"warp {n}") for n, colour in enumerate(COLOURS[:4])]
    fig.legend(handles=handles, loc="outside lower center", ncols=4)
    return picture(fig, """A tile of S, 16 queries by 16 keys, coloured by warp. FlashAttention-1: bands of keys, so
    that every row has four owners. FlashAttention-2: bands of rows, one owner each.""")


def try_differences(text, index, barrier, grid, shared_bytes):
    """Runs `differences` so launched, with its threads in two orders; prints what is wrong."""
    x = torch.arange(20.0) ** 2
    want = torch.diff(x, prepend=torch.zeros(1))
    launch = dict(grid=grid, block=8, shared_bytes=shared_bytes, N=20)
    for threads in ("forward", "reverse"):
        y = torch.full((20,), math.nan)
        with emulator.schedule(threads=threads):
            says = report(text.replace("INDEX", index).replace("BARRIER", barrier), "differences", [x, y], **launch)
        wrong, unwritten = ((y != want).nonzero().flatten().tolist(), y.isnan().nonzero().flatten().tolist())
        found = f"y is wrong at {wrong}, and nan at {unwritten}" if wrong else "right"
        print(f"threads {threads}:\n{says[:400]}" if says else textwrap.fill(f"threads {threads}: {found}", 88))
        if says:
            return
