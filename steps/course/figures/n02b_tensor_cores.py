"""What notebook 02b shows: wavefronts of shared memory and the ceilings they set, fragments, banks."""

import functools
import itertools
import re
from collections import defaultdict

import matplotlib.pyplot as plt
import torch

from steps.course.figures import measured, planted
from steps.course.figures.picture import picture
from steps.course.figures.planted import GPU
from steps.course.figures.plots import COLOURS, FAINT, INK, PALE, cells, colour_of, subplots
from steps.course.workbook import edited, show
from steps.step02_fa2_cuda import calls, emulator, ladder, launches

WAVEFRONTS = GPU.half_tflops / 4096  # of all multiprocessors, 10^12 a second: one a cycle, as 4096 FLOP in bf16
RUNGS = {"scalar": 64, "warp": 64, "mma": 128, "ldmatrix": 128, "cp_async": 128, "fa2": 128}  # with a head_dim
WHO = """
extern "C" __global__ void who_holds_what(
    Global<const T> x, Global<const T> one, Global<uint32_t> pairs, Global<float> sums) {
  SharedMemory smem;
  Shared<T> X = smem.array<T>(256), I = smem.array<T>(256);
  load_tile(X, x, 16, 16, 16);
  load_tile(I, one, 16, 16, 16);
  __syncthreads();
  int t = threadIdx.x;
  uint32_t A[1][4];  // a register holds a pair of 16-bit numbers
  load_Q(A, X);
  for (int i = 0; i < 4; i++) pairs[6 * t + i] = A[0][i];
  Shared<T> B = X + (t / 4 * 16 + t % 4 * 2);  // as `scores` does it
  for (int i = 0; i < 2; i++) pairs[6 * t + 4 + i] = load_pair(B + 8 * i);
  float S[2][4];
  scores(S, A, I);  // X times the identity, by mma: two C fragments
  for (int i = 0; i < 8; i++) sums[8 * t + i] = S[i / 4][i % 4];
}"""
MISTAKES = {  # of fwd_4_cp_async
    "no swizzle in the tile": ("tile + at(size, row, slab + column)", "tile + (row * D + slab + column)"),
    "one shuffle for the max": ("fmaxf(x, __shfl_xor_sync(~0u, x, 2));", "x;"),
    "m starts at -infinity": ("LOWEST = -3.4e38f;", "LOWEST = -INFINITY;"),
    "no wait for K": ("cp_async_wait<0>();\n    __syncthreads();  // K", "__syncthreads();  // K"),
    "no mask unless causal": ("    mask(S, j, seen);", "    if (causal) mask(S, j, seen);"),
    "a tile too many fetched": ("    if (j + Bc < keys) load_tile", "    load_tile"),
}
AT = "__device__ int at(int rows, int row, int column) {\n"


@functools.cache
def wavefronts(rung, D=None):
    """{function: [accesses, wavefronts]} of a block at shared memory for one more tile of keys, by the emulation.

    An access is one instruction of a warp.
    """
    D = D or RUNGS[rung]
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


def per_wavefront(rung, D=None):
    """FLOP that one wavefront of shared memory feeds."""
    D = D or RUNGS[rung]
    Br, Bc = ladder.FORWARD[rung].tiles[0][D]
    return 4 * Br * Bc * D / sum(n for _, n in wavefronts(rung, D).values())


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
        print(f"{rung:9} x {counted:.2f} counted, x {gain(before, rung):.2f} measured at D = {RUNGS[before]}")


def feeds(rung):
    """Prints what a wavefront feeds in a rung, and where its wavefronts go."""
    print(f"{rung}, D = {RUNGS[rung]}: {per_wavefront(rung):.0f} FLOP a wavefront")
    print_wavefronts(rung, wavefronts(rung))


def ceiling(rung):
    """Prints a rung's ceiling beside its measured speed, and where its wavefronts go."""
    D, feeds = RUNGS[rung], per_wavefront(rung)
    most, got = WAVEFRONTS * feeds, speed(rung, D)
    print(f"{rung}, D = {D}: {feeds:.0f} FLOP a wavefront, ceiling {most:.0f} TFLOP/s;", end=" ")
    print(f"measured {got:.3g}, {got / most:.0%} of it")
    print_wavefronts(rung, wavefronts(rung))


def print_wavefronts(name, found):
    print(f"{name} wavefronts/accesses: {', '.join(f'{at} {n}/{a}' for at, (a, n) in found.items())}")


def who_holds_what():
    """(A, B, two C fragments), (32 lanes, numbers): what lanes hold of X, whose numbers are 16 times row plus column.

    A kernel of `fwd_2_mma`'s functions loads X as A and as B, and multiplies it by the identity, so that C holds X.
    """
    X = torch.arange(256.0).view(16, 16).bfloat16()
    pairs, S = torch.zeros(32, 6).int(), torch.zeros(32, 8)
    launch = dict(grid=1, block=32, shared_bytes=1024, T="bf16", D=16, Br=16, Bc=16)
    planted.emulated(show("fwd_2_mma") + WHO, "who_holds_what", [X, torch.eye(16).bfloat16(), pairs, S], **launch)
    return *pairs.view(torch.bfloat16).split((8, 4), 1), S


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
        ax.set(xlabel="column", ylabel="row")
    return picture(fig, """Grids of lane numbers, coloured by pair, lane 5 framed. In A, 16 x 16, it has columns 2, 3,
    10 and 11 of rows 1 and 9. In B, 16 x 8, it has rows 2, 3, 10 and 11 of column 1.""")


def dealt():
    """Which lane gets which number of an 8 x 8 matrix in shared memory, by ldmatrix and by ldmatrix.trans."""
    fig, axes = subplots(1, 2, figsize=(7, 3.6))
    row, column = torch.meshgrid(torch.arange(8), torch.arange(8), indexing="ij")
    panels = {
        "ldmatrix: pairs along a row": row * 4 + column // 2,
        "ldmatrix.trans: pairs down a column": column * 4 + row // 2,
    }
    for ax, (title, lanes) in zip(axes, panels.items(), strict=True):
        colours = [[COLOURS[4] if lane == 5 else PALE[(5, 0)[lane % 2]] for lane in line] for line in lanes.tolist()]
        cells(ax, colours, lanes.tolist(), title=title, aspect=1, xticks=range(8), yticks=range(8))
        ax.set(xlabel="column: numbers of 16 bits")
    axes[0].set_ylabel("row in shared memory")
    return picture(fig, """An 8 x 8 matrix twice, with the number of the lane that gets each number; lane 5 is orange.
    By ldmatrix lane 5 gets columns 2 and 3 of row 1. By ldmatrix.trans it gets rows 2 and 3 of column 1.""")


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
    fig, ax = subplots(figsize=(7.6, 4.2))
    ax.loglog([32, 4096, 8192], [32 * WAVEFRONTS, GPU.half_tflops, GPU.half_tflops], color=INK, lw=1.4)
    for (rung, D), mark in zip(RUNGS.items(), "osD^vP", strict=True):
        x, got = per_wavefront(rung), speed(rung, D)
        colour = colour_of(ladder.FORWARD[rung].file)
        ax.plot([x, x], [got, WAVEFRONTS * x], ":", color=colour, lw=1)
        ax.plot(x, WAVEFRONTS * x, mark, color=colour, ms=10, mfc="white")
        ax.plot(x, got, mark, color=colour, ms=10, label=rung + (f" (D = {D})" if D != 128 else ""))
    ax.set(xlabel="FLOP a wavefront of shared memory", ylabel="TFLOP/s", ylim=(3, 2000))
    ax.set_title("D = 128, or 64 for rungs 0 and 1, which take no 128")
    ax.set_xticks([2**e for e in range(5, 14)], [2**e for e in range(5, 14)])
    ax.set_yticks([10, 100, 1000], [10, 100, 1000])
    ax.minorticks_off()
    rungs = ax.legend(fontsize=9, loc="lower right")
    marks = [plt.Line2D([], [], marker="o", ls="", color=INK, mfc=fill, ms=10) for fill in ("white", INK)]
    ax.legend(marks, ["open: the ceiling, counted", "full: measured"], fontsize=9, loc="upper left")
    ax.add_artist(rungs)
    return picture(fig, """The roofline for shared memory with an open mark, the ceiling, and a full mark, the measured
    speed, for each rung: scalar, warp and mma low on the slope; ldmatrix and cp_async six times further right; fa2
    beyond them. Measured speeds lie below the slope, except scalar's.""")
