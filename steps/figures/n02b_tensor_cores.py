"""What notebook 02b shows: wavefronts of shared memory and the ceilings they set, fragments, banks, counters."""

import difflib
import functools
import itertools
import re

import matplotlib.pyplot as plt
import torch

from steps.bench import cost, profile, rows
from steps.figures import measured
from steps.figures.picture import picture
from steps.figures.planted import behind, block, emulated, mistake
from steps.figures.plots import COLOURS, FAINT, INK, style
from steps.step02_fa2_cuda import calls, emulator, ladder, works
from steps.workbook import show
from steps.workbook.listing import Source

GPU = cost.GPUS["NVIDIA H200"]
WAVEFRONTS = GPU.half_tflops / 4096  # of all multiprocessors, 10^12 a second: one a cycle, as 4096 FLOP in bf16
RUNGS = {"scalar": 64, "warp": 64, "mma": 128, "ldmatrix": 128, "cp_async": 128, "fa2": 128}  # with a head_dim
ROW_BY_ROW = "__device__ int at(int rows, int row, int column) {\n"
PLAIN = (ROW_BY_ROW, ROW_BY_ROW + "  return row * D + column;\n")  # an edit of rung 3: no swizzle
POSITIONS = """
extern "C" __global__ void positions(Global<int> position) {
  for (int e = threadIdx.x; e < Bc * D; e += THREADS) position[e] = at(Bc, e / D, e % D);
}
"""


@functools.cache
def wavefronts(rung):
    """{function: [accesses of a warp, wavefronts]} of shared memory for one more tile of keys, by the emulation."""
    D = RUNGS[rung]
    Br, Bc = ladder.FORWARD[rung].tiles[0][D]
    dtype = torch.float32 if rung == "scalar" else torch.bfloat16
    total = {}
    for sign, Nk in ((1, 2 * Bc), (-1, Bc)):
        q, k, v = (torch.zeros(1, 1, N, D, dtype=dtype) for N in (Br, Nk, Nk))
        with emulator.count_conflicts() as counted:
            calls.forward(q, k, v, rung=rung, tile=(Br, Bc))
        for site, found in counted.items():
            before = total.setdefault(function_at(*site.split(":")), [0, 0])
            before[:] = [a + sign * b for a, b in zip(before, found, strict=True)]
    return {name: found for name, found in total.items() if any(found)}


def function_at(file, line):
    """The name of the function that this line of a kernel file is in."""
    before = (works.HERE / file).read_text().splitlines()[: int(line)]
    return re.findall(r"^__device__ .*?(\w+)\(", "\n".join(before), re.M)[-1]


def per_wavefront(rung):
    """FLOP that one wavefront of shared memory feeds."""
    Br, Bc = ladder.FORWARD[rung].tiles[0][RUNGS[rung]]
    return 4 * Br * Bc * RUNGS[rung] / sum(n for _, n in wavefronts(rung).values())


@functools.cache
def speeds(at_D=None):
    """{rung: TFLOP/s} of the forwards on an H200 at N = 4096, not causal; scalar in float32, the others in bf16.

    At each rung's head_dim in RUNGS, or all at another one, if they were measured there.
    """
    fresh = rows.fresh(rows.read())
    found = {}
    for rung, D in RUNGS.items():
        kernel, dtype = ladder.FORWARD[rung].file.removesuffix(".cu"), "fp32" if rung == "scalar" else "bf16"
        if chosen := measured.rung_row(kernel, fresh, D=at_D or D, dtype=dtype):
            found[rung] = chosen[0]["tflops"]
    return found


def gain(before, rung):
    """How many times as fast a rung is as the one before, at the head_dim of the one before."""
    at = speeds(RUNGS[before])
    return at[rung] / at[before] if {before, rung} <= at.keys() else float("nan")


def gains():
    """Prints what each rung gained over the one before, in the speed measured and in what a wavefront feeds."""
    for before, rung in itertools.pairwise(RUNGS):
        counted = per_wavefront(rung) / per_wavefront(before)
        print(f"{rung:9} x {gain(before, rung):.2f} measured, x {counted:.2f} counted")


def ceilings(last):
    """Prints the ceilings of the rungs so far and their measured speeds, and where the last one's wavefronts go."""
    print("rung        D  FLOP a wavefront  ceiling  measured TFLOP/s")
    for rung in list(RUNGS)[: list(RUNGS).index(last) + 1]:
        most, got = WAVEFRONTS * per_wavefront(rung), speeds().get(rung)
        says = f"{got:8.3g} ({got / most:.0%})" if got else "  no row yet"
        print(f"{rung:9} {RUNGS[rung]:3}  {per_wavefront(rung):16.0f} {most:8.0f} {says}")
    places = ", ".join(f"{name} {n}/{a}" for name, (a, n) in wavefronts(last).items())
    print(f"wavefronts/accesses: {places}")
    print("its block:", block(ladder.FORWARD[last].file.removesuffix(".cu"), RUNGS[last]))


def changed(old, new, function):
    """What changes in one function from a kernel file to another, as a diff."""
    before, after = (show(file, function).splitlines() for file in (old, new))
    result = Source("\n".join([f"@@ {function} @@", *list(difflib.unified_diff(before, after, lineterm="", n=2))[2:]]))
    result.language = "diff"
    return result


def fragments(A, B, S):
    """Grids of lane numbers, coloured by pair. A, B, S: (32 lanes, numbers), numbers that name their place."""
    style()
    fig, axes = plt.subplots(1, 3, figsize=(8.5, 4), width_ratios=(2, 2, 1), layout="constrained")
    panels = ("S: two C fragments", S // 16, S % 16), ("P: an A fragment", A // 16, A % 16)
    for ax, (title, down, across) in zip(axes, (*panels, ("K$^T$ or V: B", B % 16, B // 16)), strict=True):
        for t, n in itertools.product(range(32), range(down.shape[1])):
            x, y = across[t, n].item(), down[t, n].item()
            colour = COLOURS[(0, 4, 2, 3)[n // 2]]
            ax.add_patch(plt.Rectangle((x, y), 1, 1, edgecolor="white", facecolor=colour, alpha=0.5))
            ax.text(x + 0.5, y + 0.52, t, ha="center", va="center", fontsize=9)
            if t == 5:
                ax.add_patch(plt.Rectangle((x, y), 1, 1, edgecolor=INK, fill=False, lw=2, zorder=3))
        width = across.max().item() + 1
        ax.set(xlim=(0, width), ylim=(16, 0), aspect="equal", title=title)
        for axis, most in ((ax.xaxis, width), (ax.yaxis, 16)):
            marks = [m for m in (0, 7, 8, 15) if m < most]
            axis.set_ticks([m + 0.5 for m in marks], marks)
        ax.grid(False)
    axes[0].axvline(8, color=INK, lw=2)
    return picture(fig, """Grids of lane numbers, coloured by pair, lane 5 framed. Two neighbouring 16 x 8 C
    fragments of S and the 16 x 16 A fragment look exactly alike: lane 5 has columns 2, 3, 10 and 11 of rows 1 and 9.
    In B, 16 x 8, lane 5 has rows 2, 3, 10 and 11 of column 1.""")


def chunk_positions(*edits):
    """(8, 8): of rows 0 to 7 of rung 3's tile, at which of 8 positions each chunk of 16 bytes lies."""
    found = torch.zeros(64, 64, dtype=torch.int32)
    text = behind("fwd_3_ldmatrix", POSITIONS)
    for old, new in edits:
        text = text.replace(old, new)
    emulated(text, "positions", [found], grid=1, block=128, T="bf16", D=64, Br=64, Bc=64)
    return found[:8, ::8] // 8 % 8


def banks():
    """Where the chunks of eight rows lie, plain and swizzled; wavefronts of a tile by rung 2, by rung 3 both ways."""
    style()
    fig, axes = plt.subplots(1, 3, figsize=(8.5, 3), width_ratios=(2, 2, 3), layout="constrained")
    for ax, title, edits in ((axes[0], "plain", [PLAIN]), (axes[1], "swizzled", [])):
        positions = chunk_positions(*edits)
        for row, chunk in itertools.product(range(8), range(8)):
            x = positions[row, chunk].item()
            colour, ink = (COLOURS[1], "white") if chunk == 2 else (FAINT, INK)
            ax.add_patch(plt.Rectangle((x, row), 1, 1, facecolor=colour, edgecolor="white"))
            ax.text(x + 0.5, row + 0.52, chunk, ha="center", va="center", color=ink, fontsize=9)
        ax.set(xlim=(0, 8), ylim=(8, 0), aspect="equal", title=f"chunks, {title}", xlabel="bank", ylabel="row")
        ax.set_xticks(range(9), range(0, 33, 4))
        ax.set_yticks([y + 0.5 for y in range(8)], range(8))
        ax.grid(False)
    found = {"mma": wavefronts("mma")}
    with mistake("ldmatrix", PLAIN):
        found["ldmatrix,\nplain"] = wavefronts.__wrapped__("ldmatrix")
    found["ldmatrix"] = wavefronts("ldmatrix")
    bottom = torch.zeros(3)
    for function, colour in zip(("load_tile", "scores", "add_PV"), COLOURS, strict=False):
        counts = torch.tensor([functions[function][1] for functions in found.values()])
        axes[2].bar(range(3), counts, 0.6, bottom=bottom, color=colour, label=function)
        bottom += counts
    axes[2].set_xticks(range(3), found)
    axes[2].set_title("wavefronts a tile")
    axes[2].grid(axis="x", visible=False)
    axes[2].legend(fontsize=9)
    return picture(fig, """Left and middle: 8 rows of 8 chunks against the banks. Plain, chunk 2 of every row stands
    in the same four banks; swizzled, at eight different positions. Right: wavefronts a tile: mma and ldmatrix with
    plain rows need more than 8000, nearly all in scores and add_PV; ldmatrix with swizzled rows about 1300.""")


def roofline():
    """All rungs on the H200's roofline for shared memory: open marks are counted ceilings, full ones were measured."""
    style()
    fig, ax = plt.subplots(figsize=(7.4, 4), layout="constrained")
    xs = [2 ** (e / 4) for e in range(20, 53)]
    ax.loglog(xs, [min(WAVEFRONTS * x, GPU.half_tflops) for x in xs], color=INK, lw=1.4)
    ax.axhline(GPU.fp32_tflops, color=INK, lw=1, ls="--")
    for name, peak in (("float32 units", GPU.fp32_tflops), ("tensor cores", GPU.half_tflops)):
        ax.text(xs[-1], 1.1 * peak, f"{name} {peak}", ha="right", fontsize=9)
    for n, (rung, D) in enumerate(RUNGS.items()):
        x, colour = per_wavefront(rung), COLOURS[n]
        most, got = min(WAVEFRONTS * x, GPU.half_tflops), speeds().get(rung)
        ax.plot(x, most, "osD^vP"[n], color=colour, ms=8, mfc="white")
        if got:
            ax.plot([x, x], [got, most], ":", color=colour, lw=1)
            ax.plot(x, got, "osD^vP"[n], color=colour, ms=8, ls="", label=f"{rung}, D = {D}")
    ax.set(xlabel="FLOP a wavefront of shared memory", ylabel="TFLOP/s", ylim=(3, 2000))
    ax.set_xticks([2**e for e in range(5, 14)], [2**e for e in range(5, 14)])
    ax.set_yticks([10, 100, 1000], [10, 100, 1000])
    ax.minorticks_off()
    ax.legend(fontsize=9, loc="lower right")
    return picture(fig, """The roofline for shared memory with a mark for each rung: scalar, warp and mma on the
    slope, below the float32 units' peak or near it; ldmatrix and cp_async together, six times further right; fa2
    beyond them. At the end of a dotted line what was measured: below the ceiling, except scalar, whose loads the
    compiler has joined.""")


def counters(*rungs):
    """Five hardware counters of the profiled rungs as bars, and in words for what their warps wait most."""
    style()
    counted, size = profile.read(), profile.SIZE
    fig, ax = plt.subplots(figsize=(8.4, 3.4), layout="constrained")
    for n, rung in enumerate(rungs):
        c = counted[rung]
        Br, Bc = ladder.FORWARD[rung].tiles[0][size["D"]]
        tiles = size["B"] * size["H"] * (size["N"] // Br) * (size["N"] // Bc)
        expected, got = tiles * sum(n for _, n in wavefronts(rung).values()), c["shared_wavefronts"]
        print(f"{rung:9} million wavefronts: {expected / 1e6:.1f} expected, {got / 1e6:.1f} by the hardware")
        print("  a warp's time:", ", ".join(f"{x:.0%} {why}" for why, x in list(profile.waits(c).items())[:4]))
        busy = 100 * got / (1e3 * WAVEFRONTS * c["nanoseconds"])
        shares = c["tensor_pipe"], busy, 100 * c["bank_conflicts"] / got, c["issue_slots"], c["dram_throughput"]
        at = [i + (n - (len(rungs) - 1) / 2) * 0.25 for i in range(5)]
        colour = COLOURS[list(RUNGS).index(rung)]
        ax.bar_label(ax.bar(at, shares, 0.24, color=colour, label=rung), fmt="%.0f", fontsize=9)
    names = "tensor cores,work", "shared memory,wavefronts", "of them,conflicts", "issue slots,used", "device,memory"
    ax.set_xticks(range(5), [name.replace(",", "\n") for name in names])
    ax.set(ylabel="%", ylim=(0, 105), title=f"{GPU.name}: 1 x 16 heads, N = {size['N']}, D = {size['D']}")
    ax.grid(axis="x", visible=False)
    ax.legend(fontsize=9, ncols=3)
    return picture(fig, """Five counters in % for the rungs mma, ldmatrix and fa2. mma: wavefronts of shared memory
    are the highest, most of them conflicts. fa2: the tensor cores. Device memory is low in all.""")
