"""What notebook 02b shows: wavefronts of shared memory and the ceilings they set, fragments, banks."""

import functools
import itertools
import re
from collections import defaultdict

import matplotlib.pyplot as plt
import torch

from steps.course.figures import measured
from steps.course.figures.picture import picture
from steps.course.figures.planted import GPU
from steps.course.figures.plots import COLOURS, FAINT, INK, PALE, cells, subplots
from steps.course.workbook import edited
from steps.step02_fa2_cuda import calls, emulator, ladder, launches

WAVEFRONTS = GPU.half_tflops / 4096  # of all multiprocessors, 10^12 a second: one a cycle, as 4096 FLOP in bf16
RUNGS = {"scalar": 64, "warp": 64, "mma": 128, "ldmatrix": 128, "cp_async": 128, "fa2": 128}  # with a head_dim
AT = "__device__ int at(int rows, int row, int column) {\n"


@functools.cache
def wavefronts(rung):
    """{function: [accesses of a warp, wavefronts]} of shared memory for one more tile of keys, by the emulation."""
    D = RUNGS[rung]
    Br, Bc = ladder.FORWARD[rung].tiles[0][D]
    dtype = torch.float32 if rung == "scalar" else torch.bfloat16
    total = defaultdict(lambda: torch.zeros(2).int())
    for sign, Nk in ((1, 2 * Bc), (-1, Bc)):
        q, k, v = (torch.zeros(1, 1, N, D, dtype=dtype) for N in (Br, Nk, Nk))
        with emulator.count_conflicts() as counted:
            calls.forward(q, k, v, rung=rung, tile=(Br, Bc))
        for site, found in counted.items():
            total[function_at(*site.split(":"))] += sign * torch.tensor(found)
    return {name: found.tolist() for name, found in total.items() if found.any()}


def function_at(file, line):
    """The name of the function that this line of a kernel file is in."""
    before = (launches.HERE / file).read_text().splitlines()[: int(line)]
    return re.findall(r"^__device__ .*?(\w+)\(", "\n".join(before), re.M)[-1]


def per_wavefront(rung):
    """FLOP that one wavefront of shared memory feeds."""
    Br, Bc = ladder.FORWARD[rung].tiles[0][RUNGS[rung]]
    return 4 * Br * Bc * RUNGS[rung] / sum(n for _, n in wavefronts(rung).values())


@functools.cache
def speed(rung, D):
    """TFLOP/s of a forward on an H200, N = 4096, not causal; nan without a row."""
    file, dtype = ladder.FORWARD[rung].file, "fp32" if rung == "scalar" else "bf16"
    return (measured.rung_row(file.removesuffix(".cu"), D=D, dtype=dtype) or [{"tflops": float("nan")}])[0]["tflops"]


def gain(before, rung):
    """How many times as fast a rung is as the one before, at the head_dim of the one before."""
    return speed(rung, RUNGS[before]) / speed(before, RUNGS[before])


def gains():
    """Prints what each rung gained over the one before, in the speed measured and in what a wavefront feeds."""
    for before, rung in itertools.pairwise(RUNGS):
        counted = per_wavefront(rung) / per_wavefront(before)
        print(f"{rung:9} x {gain(before, rung):.2f} measured, x {counted:.2f} counted")


def ceiling(rung):
    """Prints a rung's ceiling beside its measured speed, and where its wavefronts go."""
    D, feeds = RUNGS[rung], per_wavefront(rung)
    most, got = WAVEFRONTS * feeds, speed(rung, D)
    print(f"{rung}, D = {D}: {feeds:.0f} FLOP a wavefront, ceiling {most:.0f} TFLOP/s;", end=" ")
    print(f"measured {got:.3g}, {got / most:.0%} of it")
    print_wavefronts(rung, wavefronts(rung))


def print_wavefronts(name, found):
    print(f"{name} wavefronts/accesses: {', '.join(f'{at} {n}/{a}' for at, (a, n) in found.items())}")


def fragments(A, B):
    """Grids of lane numbers, coloured by pair. A, B: (32 lanes, numbers), numbers that name their place."""
    fig, axes = subplots(1, 2, figsize=(6.4, 4), width_ratios=(2, 1))
    panels = ("A, or two C side by side", A // 16, A % 16), ("B", B % 16, B // 16)
    for ax, (title, down, across) in zip(axes, panels, strict=True):
        lanes, pairs = torch.zeros(2, 16, int(across.max()) + 1).int()
        lanes[down.long(), across.long()] = torch.arange(32).int()[:, None].expand(down.shape)
        pairs[down.long(), across.long()] = (torch.arange(down.shape[1]).int() // 2).expand(down.shape)
        colours = [[PALE[(0, 4, 2, 3)[pair]] for pair in row] for row in pairs.tolist()]
        cells(ax, colours, lanes.tolist(), title=title, aspect=1, yticks=(0, 8), xticks=range(0, len(lanes[0]), 8))
        for i, j in (lanes == 5).nonzero().tolist():
            ax.add_patch(plt.Rectangle((j - 0.5, i - 0.5), 1, 1, edgecolor=INK, fill=False, lw=2))
    return picture(fig, """Grids of lane numbers, coloured by pair, lane 5 framed. In A, 16 x 16, it has columns 2, 3,
    10 and 11 of rows 1 and 9. In B, 16 x 8, it has rows 2, 3, 10 and 11 of column 1.""")


def banks():
    """Where the chunks of eight rows lie, plain and swizzled; prints the wavefronts of rung 3 without its swizzle."""
    fig, axes = subplots(1, 2, figsize=(7, 3.2))
    for ax, (title, mask) in zip(axes, {"plain": 0, "swizzled": 7}.items(), strict=True):
        chunks = [[position ^ (row & mask) for position in range(8)] for row in range(8)]
        colours = [[COLOURS[1] if chunk == 2 else FAINT for chunk in row] for row in chunks]
        cells(ax, colours, chunks, title=f"chunks, {title}", xlabel="first of four banks", ylabel="row")
        ax.set(xticks=range(8), xticklabels=range(0, 32, 4), yticks=range(8))
    with edited("fwd_3_ldmatrix.cu", (AT, AT + "  return row * D + column;\n")):
        print_wavefronts("plain", wavefronts.__wrapped__("ldmatrix"))
    return picture(fig, """8 rows of 8 chunks against the banks. Plain, chunk 2 of every row stands in the same four
    banks; swizzled, at eight different positions.""")


def roofline():
    """The rungs on an H200's roofline for shared memory: open marks are counted ceilings, full ones were measured."""
    fig, ax = subplots(figsize=(7.4, 4))
    ax.loglog([32, 4096, 8192], [32 * WAVEFRONTS, GPU.half_tflops, GPU.half_tflops], color=INK, lw=1.4)
    for (rung, D), mark, colour in zip(RUNGS.items(), "osD^vP", COLOURS, strict=True):
        x, got = per_wavefront(rung), speed(rung, D)
        ax.plot([x, x], [got, WAVEFRONTS * x], ":", color=colour, lw=1)
        ax.plot(x, WAVEFRONTS * x, mark, color=colour, ms=8, mfc="white")
        ax.plot(x, got, mark, color=colour, ms=8, label=f"{rung}, D = {D}")
    ax.set(xlabel="FLOP a wavefront of shared memory", ylabel="TFLOP/s", ylim=(3, 2000))
    ax.set_xticks([2**e for e in range(5, 14)], [2**e for e in range(5, 14)])
    ax.set_yticks([10, 100, 1000], [10, 100, 1000])
    ax.minorticks_off()
    ax.legend(fontsize=9, loc="lower right")
    return picture(fig, """The roofline for shared memory with a mark for each rung: scalar, warp and mma low on the
    slope; ldmatrix and cp_async six times further right; fa2 beyond them. Measured speeds lie below the slope, except
    scalar's.""")
