# ---
# jupyter:
#   jupytext:
#     text_representation:
#       extension: .py
#       format_name: percent
#       format_version: '1.3'
#   kernelspec:
#     display_name: Python 3
#     language: python
#     name: python3
# ---

# %% [markdown] slideshow={"slide_type": "slide"}
# # 02b. Tensor cores: who holds which number
#
# ## 1. The question
#
# *Why can the scalar kernel never be fast, and what does each of five changes remove from its way?*
#
# ![Three patches of scores, one step along d. Scalar: one number is fetched from shared memory for one multiply-add.
# Warp: twelve for 32. Mma: eight for 128, with the queries in registers.](../notebooks/figures/question_02b.png)

# %% jupyter={"source_hidden": true} slideshow={"slide_type": "skip"}
import steps  # first: it chooses the engine
import difflib
import functools
import heapq
import importlib.util
import itertools
import re
import shlex
import subprocess
import sys
import tempfile
import textwrap
from pathlib import Path

import matplotlib.pyplot as plt
import torch

from reference import cases, error
from steps import checks
from steps import step02_fa2_cuda as step02
from steps.bench import cost, profile, rows
from steps.figures import plots
from steps.figures.plots import COLOURS, FAINT, INK
from steps.step02_fa2_cuda import calls, emulator, ladder, nvrtc, works

# %% jupyter={"source_hidden": true} slideshow={"slide_type": "skip"}
from steps.figures.picture import unchecked as picture
from steps.workbook import Blank, check, edited, exercises, show
from steps.workbook import diff, hint, solution  # noqa: F401  for you, in parts 4 and 5
from steps.workbook.listing import Source

torch.set_num_threads(1)
plots.style()
gpu = cost.GPUS["NVIDIA H200"]
with_switches = rows.fresh(rows.read(switched=True))
print(steps.engine.describe())
print(f"torch {torch.__version__.split('+')[0]};",
      f"rungs of stage 02: {', '.join(step02.SUPPORTS['rungs'])}")

# %% [markdown] slideshow={"slide_type": "subslide"}
# - **Before you start:** 02a, the scalar kernel and the emulation. **Time:** about an hour to read, two hours more with the exercises.
# - **Hardware:** any computer with Linux (or WSL2) and g++. Speeds are recorded rows.
# - **Code:** `steps/step02_fa2_cuda/fwd_1_warp.cu` to `fwd_5_fa2.cu`. **Tests:** `pytest tests/test_step02_fa2_cuda.py`.
# - **Paper:** FlashAttention-2 (2307.08691), restated in `papers/flash_attention_2.md`. Words: `reference/glossary.md`.

# %% [markdown] slideshow={"slide_type": "slide"}
# ## 2. The problem, counted
#
# ### Which memory is the bottleneck?
#
# A roofline: at x FLOP for each byte moved, a kernel can do bandwidth times x at most. Attention moves q, k, v and out
# at least once. Shared memory gives each multiprocessor (SM) one **wavefront** a cycle: a 4-byte word from each of its
# 32 banks. The clock follows from the peak: 4096 FLOP a cycle and SM in bf16 (NVIDIA's Hopper whitepaper).

# %% slideshow={"slide_type": "fragment"}
for N in (512, 4096, 16384):
    needs = cost.flops(1, 16, N, 128) / cost.compulsory_bytes(1, 16, N, 128)
    print(f"N = {N:5}: {needs:5.0f} FLOP a byte of device memory;",
          f"the H200's corner is at {cost.ridge(gpu, 'bf16'):.0f}")
CYCLES = gpu.half_tflops / 4096  # of all SMs, 10^12 a second
clock = 1e3 * CYCLES / gpu.sms
print(f"{gpu.sms} SMs at {clock:.2f} GHz: {CYCLES:.3f} x 10^12 wavefronts a second")
peaks = {"float32 units": gpu.fp32_tflops, "tensor cores": gpu.half_tflops}
for name, peak in peaks.items():
    print(f"{name}: {peak} TFLOP/s need {peak / CYCLES:.0f} FLOP from each wavefront")

# %% [markdown] slideshow={"slide_type": "subslide"}
# ### Counted
#
# Long sequences lie right of the corner: device memory is no limit for a kernel that keeps its tiles on the chip. The
# bottleneck is what its inner loop takes from shared memory.
#
# `emulator.count_conflicts()` logs every access of a warp to shared memory: from which line, and how many wavefronts
# the banks need for it. A tile costs what a run with two tiles of keys needs, less what one with one tile needs.
#
# `scalar` and `warp` read word by word. A compiler may join four neighbouring words into one load, and then they do
# better than counted.

# %% slideshow={"slide_type": "fragment"}
RUNGS = ("scalar", "warp", "mma", "ldmatrix", "cp_async", "fa2")


def tile_of(rung, D):
    """(Br, Bc) on a GPU."""
    return ladder.FORWARD[rung].tiles[0][D]


@functools.cache
def tile_cost(rung, D):
    """({function: [accesses, wavefronts]}, FLOP) of one more tile of keys for a block."""
    Br, Bc = tile_of(rung, D)
    dtype = torch.float32 if rung == "scalar" else torch.bfloat16
    total = {}
    for sign, Nk in ((1, 2 * Bc), (-1, Bc)):
        q, k, v = (torch.zeros(1, 1, N, D, dtype=dtype) for N in (Br, Nk, Nk))
        with emulator.count_conflicts() as counted:
            calls.forward(q, k, v, rung=rung, tile=(Br, Bc))
        for site, found in counted.items():
            function = function_at(*site.split(":"))
            before = total.get(function, (0, 0))
            total[function] = [a + sign * b for a, b in zip(before, found, strict=True)]
    return {name: found for name, found in total.items() if any(found)}, 4 * Br * Bc * D


# %% slideshow={"slide_type": "subslide"}
def function_at(file, line):
    """The name of the function that this line of a kernel file is in."""
    before = (works.HERE / file).read_text().splitlines()[: int(line)]
    return re.findall(r"^__device__ .*?(\w+)\(", "\n".join(before), re.M)[-1]


def per_wavefront(rung, D):
    """FLOP that one wavefront feeds."""
    found, flop = tile_cost(rung, D)
    return flop / sum(wavefronts for _, wavefronts in found.values())


def ceiling(rung, D):
    """TFLOP/s that shared memory allows on the H200."""
    return CYCLES * per_wavefront(rung, D)


for function, (accesses, wavefronts) in tile_cost("scalar", 64)[0].items():
    print(f"{function:13} {accesses} accesses of a warp, {wavefronts} wavefronts")
print(f"scalar: {per_wavefront('scalar', 64):.0f} FLOP a wavefront,",
      f"at most {ceiling('scalar', 64):.0f} TFLOP/s")

# %% jupyter={"source_hidden": true} slideshow={"slide_type": "subslide"}
def shared_roof(ax):
    """The H200's roofline for shared memory."""
    xs = [2 ** (e / 4) for e in range(20, 53)]
    ax.loglog(xs, [min(CYCLES * x, gpu.half_tflops) for x in xs], color=INK, lw=1.4)
    ax.axhline(gpu.fp32_tflops, color=INK, lw=1, ls="--")
    for name, peak in peaks.items():
        ax.text(xs[-1], 1.1 * peak, f"{name} {peak}", ha="right", fontsize=8)
    ax.set(xlabel="FLOP a wavefront of shared memory", ylabel="TFLOP/s", ylim=(3, 2000))
    ax.set_xticks([2**e for e in range(5, 14)], [2**e for e in range(5, 14)])
    ax.set_yticks([10, 100, 1000], [10, 100, 1000])
    ax.minorticks_off()


fig, ax = plt.subplots(figsize=(6.6, 3.2), layout="constrained")
shared_roof(ax)
found = per_wavefront("scalar", 64), ceiling("scalar", 64)
ax.plot(*found, "o", ms=9, color=COLOURS[1], label="scalar, at its ceiling")
ax.legend(fontsize=8, loc="upper left")
picture(fig, """Roofline of an H200 for shared memory, log axes: a slope up to the tensor
cores' peak at 4096 FLOP a wavefront, with the float32 units' peak as a dashed line. The
scalar kernel's ceiling lies at the slope's foot, below the peak of the float32 units and
far below the tensor cores'.""")

# %% [markdown] slideshow={"slide_type": "slide"}
# ## 3. The idea: a warp holds a matrix
#
# Two things must change: more work for each wavefront, and units that can do it.
#
# `mma.m16n8k16` multiplies A (16 x 16) with B (16 x 8) and adds the product to C (16 x 8), for a whole warp. The
# matrices lie in the registers of its 32 threads, its **lanes**. A lane's share is a **fragment**: 8 numbers of A, 4 of
# B, 4 of C.
#
# **Claim.** Two C fragments side by side are an A fragment: what S leaves in registers is the operand of P V.
#
# We append a kernel of our own to the text of `fwd_2_mma.cu`, which calls its functions. X holds numbers that name
# their place, X[r][c] = 16 r + c, and X times the identity is X again.

# %% slideshow={"slide_type": "fragment"}
WHO = """
extern "C" __global__ void who_holds_what(Global<const T> x, Global<const T> one,
                                          Global<float> held) {
  SharedMemory smem;
  Shared<T> X = smem.array<T>(256), I = smem.array<T>(256);
  load_tile(X, x, 16, 16, 16);
  load_tile(I, one, 16, 16, 16);
  __syncthreads();
  uint32_t A[1][4];
  float S[2][4], product[4] = {};
  load_Q(A, X);
  scores(S, A, I);  // X times the identity, by mma
  Shared<T> B = X + (threadIdx.x / 4 * 16 + threadIdx.x % 4 * 2);  // as `scores` does it
  uint32_t pairs[6] = {A[0][0], A[0][1], A[0][2], A[0][3], load_pair(B), load_pair(B + 8)};
  mma<T>(product, A[0], pairs[4], pairs[5]);
  held += 24 * threadIdx.x;
  for (int i = 0; i < 12; i++)
    held[i] = to_float(T{uint16_t(pairs[i / 2] >> 16 * (i % 2))});
  for (int i = 0; i < 8; i++) held[12 + i] = S[i / 4][i % 4];
  for (int i = 0; i < 4; i++) held[20 + i] = product[i];
}
"""


# %% slideshow={"slide_type": "subslide"}
def probe(file, kernel, text, *arguments, block=32, **macros):
    """Runs a kernel written behind a file's text, in the emulation."""
    shape = {"grid": 1, "block": block, "shared_bytes": 1024}
    with tempfile.TemporaryDirectory() as folder:
        copy = Path(folder) / f"{file}.cu"
        copy.write_text((works.HERE / copy.name).read_text() + text)
        emulator.launch(copy, kernel, arguments, macros={"T": "bf16"} | macros, **shape)


X, held = torch.arange(256.0).view(16, 16), torch.zeros(32, 24)
arguments = X.bfloat16(), torch.eye(16).bfloat16(), held
probe("fwd_2_mma", "who_holds_what", WHO, *arguments, D=16, Br=16, Bc=16)
A, B, S, product = held.int().split((8, 4, 8, 4), 1)
for name, fragment in (("A", A), ("two C", S), ("B", B)):
    print(f"lane 5 holds of {name:5}:", *(f"{n:3}" for n in fragment[5].tolist()))
in_A = A.flatten().sort().values
print("each number of X once in A:", torch.equal(in_A, torch.arange(256).int()))
print("two C fragments of S are the A fragment:", torch.equal(A, S))
C = S[:, :4]
right = torch.equal(product, (X @ X.T)[C // 16, C % 16].int())
print("A times B from these numbers is X times X transposed:", right)

# %% jupyter={"source_hidden": true} slideshow={"slide_type": "subslide"}
def draw_fragment(ax, rows_, columns, title):
    """Each entry: the number of its lane; the colour tells which of the lane's pairs."""
    for t in range(32):
        looks = {"weight": "bold", "fontsize": 8} if t == 5 else {"fontsize": 6.5}
        for n, (y, x) in enumerate(torch.stack((rows_[t], columns[t]), 1).tolist()):
            looks_of_pair = {"facecolor": COLOURS[(0, 4, 2, 3)[n // 2]], "alpha": 0.55}
            ax.add_patch(plt.Rectangle((x, y), 1, 1, edgecolor="white", **looks_of_pair))
            ax.text(x + 0.5, y + 0.52, t, ha="center", va="center", **looks)
    width = columns.max().item() + 1
    marks = [m for m in (0, 7, 8, 15) if m < width]
    ax.set(xlim=(0, width), ylim=(16, 0), aspect="equal", title=title)
    ax.set_xticks([m + 0.5 for m in marks], marks)
    ax.set_yticks([m + 0.5 for m in (0, 7, 8, 15)], (0, 7, 8, 15))
    ax.grid(False)


fig, axes = plt.subplots(1, 3, figsize=(9, 4), width_ratios=(2, 2, 1), layout="constrained")
draw_fragment(axes[0], S // 16, S % 16, "S: two C fragments")
axes[0].axvline(8, color=INK, lw=2)
draw_fragment(axes[1], A // 16, A % 16, "P: an A fragment")
draw_fragment(axes[2], B % 16, B // 16, "K$^T$ or V: B")
picture(fig, """Grids of lane numbers, coloured by pair, lane 5 in bold. Two neighbouring
16 x 8 C fragments of S and the 16 x 16 A fragment look exactly alike: lane 5 has columns
2, 3, 10 and 11 of rows 1 and 9. In B, 16 x 8, lane 5 has rows 2, 3, 10 and 11 of column
1.""")

# %% [markdown] slideshow={"slide_type": "fragment"}
# Lane 5 holds 18, 19 (row 1, columns 2 and 3), 146, 147 (row 9), and both again 8 columns on. A colour is a pair; as 16-bit
# numbers, a pair is one register. After exp, a lane rounds its pairs and has its share of P: **no number moves to another lane**.
#
# Four neighbouring lanes hold a row, so its maximum needs all four. `__shfl_xor_sync(~0u, x, 1)` hands a lane the x of
# lane ^ 1. One shuffle, then a second:

# %% slideshow={"slide_type": "fragment"}
lane = torch.arange(32)
maximum = S[:, [0, 1, 4, 5]].amax(1)  # of the lane's numbers of row lane / 4
for distance in (1, 2):
    maximum = torch.maximum(maximum, maximum[lane ^ distance])
    right = (maximum == X.int().amax(1)[lane // 4]).sum()
    print(f"after the shuffle with lane ^ {distance}: lanes 4 to 7 say",
          f"{maximum[4:8].tolist()}; right in {right} of 32 lanes")

# %% [markdown] slideshow={"slide_type": "slide"}
# ## 4. From algorithm to code
#
# ### Algorithm 1, and where it is
#
# All rungs compute Algorithm 1 of FlashAttention-2 (line 10 without its misprinted inverse, `papers/errata.md`).
#
# | line | what it does | in `fwd_2_mma.cu` |
# |---|---|---|
# | [3–5] | a block a query tile, a warp 16 rows of it; Q_i, O, m, l in registers | `load_tile`, `load_Q` |
# | [6–7] | for each tile of Bc keys that is seen: K_j, V_j to shared memory | `keys_seen` (yours, in part 5), `load_tile` |
# | [8] | S = Q_i K_jᵀ, masked | `scores`, `mask` |
# | [9] | m_new, P, l; O times alpha | `online_update`, `row_max` |
# | [10] | O += P V_j | `to_operand` (yours), `add_PV` |
# | [12–15] | O / l and lse, written once | `store_rows` |

# %% jupyter={"source_hidden": true} slideshow={"slide_type": "skip"}
ALL = [("scalar", 64), ("warp", 64), *((rung, 128) for rung in RUNGS[2:])]  # rung, head_dim
SIZES = {"B": 1, "H": 1, "Hk": 1, "Nq": 4096, "Nk": 4096, "causal": False}
SIZES |= {"processors": gpu.sms, "shared_limit": gpu.multiprocessor.shared_per_block}


def compiled(rung, D):
    """(threads, shared bytes, registers) of a block on an H200, and NVRTC's result."""
    file = works.HERE / ladder.FORWARD[rung].file
    dtype = torch.float32 if rung == "scalar" else torch.bfloat16
    (launched,) = rows.geometry(file.stem, D=D, dtype=dtype, **SIZES)
    kernel, _, threads, shared, macros = launched
    made = nvrtc.compile(file, macros, "sm_90a")  # needs no GPU
    registers = made.usage[kernel].registers  # a thread
    return {"threads": threads, "shared": shared, "registers": registers}, made


recorded = rows.fresh(rows.read())  # of the files as they are
measured, run_of = {}, {}  # {(rung, D, causal): TFLOP/s} at N = 4096, and its run
for r in rows.latest(recorded):
    at = r["gpu"], r["stage"], r["pass"], r["N"], r["options"], r["timing"]
    if at == (gpu.name, "02_fa2_cuda", "fwd", 4096, {}, "interleaved"):
        rung = re.sub(r"^fwd_\d_", "", r["kernel"])
        if r["dtype"] == ("fp32" if rung == "scalar" else "bf16"):
            where = rung, r["D"], r["causal"]
            measured[where], run_of[where] = r["tflops"], r["run"]


# %% slideshow={"slide_type": "skip"}
def account(rung, D=128):
    """Prints the rung's budget on an H200, and what it takes from shared memory."""
    block, _ = compiled(rung, D)
    fit = cost.occupancy(gpu.capability, **block)
    print(f"{rung}, D = {D}: tile {tile_of(rung, D)},",
          f"{block['threads']} threads of {block['registers']} registers,",
          f"{block['shared'] / 1024:.0f} KiB shared: {fit.blocks} blocks an SM,",
          f"limited by {fit.limited_by}")
    counts = tile_cost(rung, D)[0].items()
    says = ", ".join(f"{name} {n} for {a} accesses" for name, (a, n) in counts)
    print(f"  wavefronts a tile: {says}")
    print(f"  {per_wavefront(rung, D):.0f} FLOP a wavefront:",
          f"at most {ceiling(rung, D):.0f} TFLOP/s")


def changes(old, new, *functions):
    """diff(old, new), of these functions only."""
    lines = []
    for name in functions:
        before, after = (show(file, name).splitlines() for file in (old, new))
        lines.append(f"@@ {name} @@")
        lines += list(difflib.unified_diff(before, after, lineterm="", n=2))[2:]
    result = Source("\n".join(lines))
    result.language = "diff"
    return result


# %% slideshow={"slide_type": "skip"}
def ratio(before, rung, *at):
    """The gain as text, which says so if the two speeds are of two runs."""
    old, new = (before, *at), (rung, *at)
    two_runs = "" if run_of[old] == run_of[new] else " (of two runs)"
    return f"x {measured[new] / measured[old]:.2f}{two_runs}"


def step(before, rung):
    """Prints what a rung gained over the one before, and how far the count foresaw it."""
    D = 64 if before in ("scalar", "warp") else 128  # which they do not take
    for causal in (False, True):
        missing = [name for name in (before, rung) if (name, D, causal) not in measured]
        if missing:
            print(f"no row yet of {' and '.join(missing)} at N = 4096, D = {D};",
                  "on an H200: python -m steps bench --stage 02")
            return
        old, new = (measured[name, D, causal] for name in (before, rung))
        print(f"D = {D}, {'causal' if causal else 'not causal'}:",
              f"{old:.3g} -> {new:.3g} TFLOP/s, {ratio(before, rung, D, causal)}")
        if not causal:
            roof, higher = ceiling(before, D), ceiling(rung, D)
            share = new / old / (higher / roof)
            print(f"    the count foresaw x {higher / roof:.2f}: measured over foreseen",
                  f"{share:.2f}. Of its ceiling {before} reached {old / roof:.0%},",
                  f"{rung} {new / higher:.0%}")


# %% [markdown] slideshow={"slide_type": "slide"}
# ### Rung 1, `warp`: a value serves a row of products
#
# **Claim.** A lane that owns a x b scores fetches a + b numbers for a · b multiply-adds. So each warp owns 16 rows, and
# each lane 4 x 4 or 4 x 8 scores in registers. No row is shared by two warps, so none waits for another between the
# barriers of a tile. (FlashAttention-1 dealt out the *keys*, and added up O through shared memory.)

# %% slideshow={"slide_type": "fragment"}
account("warp", 64)
show("fwd_1_warp", "scores")

# %% [markdown] slideshow={"slide_type": "subslide"}
# **Predict 1.** At D = 64, what do the counts allow `warp` over `scalar`, and which roof comes next?
#
# <details><summary>Answer</summary>
#
# Three times: FLOP a wavefront grow from 62 to 195. The next roof is close: the float32 units, 66.9 TFLOP/s. And the
# count leaves out that `add_PV` hands P round by shuffles, which compete with the loads.
#
# </details>

# %% slideshow={"slide_type": "fragment"}
step("scalar", "warp")

# %% [markdown] slideshow={"slide_type": "slide"}
# ### Rung 2, `mma`: tensor cores
#
# **Claim.** Q, S, P and O live in fragments; only B operands come from shared memory. One `mma` is 4096 FLOP for the
# two registers of B that each lane fetches. A pair from a row of K is one load, one from a column of V two loads and a
# packing.

# %% slideshow={"slide_type": "fragment"}
account("mma")
show("fwd_2_mma", "scores")

# %% [markdown] slideshow={"slide_type": "subslide"}
# **Predict 2.** The tensor cores are 15 times as fast as the float32 units. Will rung 2 be 15 times as fast as rung 1?
#
# <details><summary>Answer</summary>
#
# No. `scores` needs 4096 wavefronts for 512 accesses: 8 for each, where 1 would do. `add_PV` needs 4 for each. So a
# wavefront feeds 248 FLOP, only 1.27 times rung 1's 195 (D = 64). The tensor cores wait for shared memory.
#
# </details>

# %% slideshow={"slide_type": "fragment"}
step("warp", "mma")

# %% [markdown] slideshow={"slide_type": "slide"}
# ### Rung 3, `ldmatrix`: no two rows in one bank
#
# Why 8 wavefronts? A warp reads 8 rows of K at once, and rows of 128 or 256 bytes begin in the same bank.
#
# **Claim.** Let row r keep its 16-byte chunk c at position c XOR (r mod 8). Then any 8 neighbouring rows have it at 8 different
# positions, and 8 positions are all 32 banks.
#
# `ldmatrix` fetches 8 x 8 numbers, as 8 rows of one chunk. It takes four such matrices at once, and deals them out as
# fragments. With `.trans` it transposes on the way, as V wants it. Below, the kernel with its swizzle and without:

# %% slideshow={"slide_type": "fragment"}
POSITIONS = """
extern "C" __global__ void positions(Global<int> position) {
  for (int e = threadIdx.x; e < Bc * D; e += THREADS) position[e] = at(Bc, e / D, e % D);
}
"""


head = "__device__ int at(int rows, int row, int column) {\n"
plain = ("fwd_3_ldmatrix.cu", (head, head + "  return row * D + column;\n"))

# %% slideshow={"slide_type": "subslide"}
def positions():
    """The bytes at which rung 3 puts the elements (64 x 64) of a tile."""
    found = torch.zeros(64, 64, dtype=torch.int32)
    probe("fwd_3_ldmatrix", "positions", POSITIONS, found, block=128, D=64, Br=64, Bc=64)
    return 2 * found


layouts, found = {"swizzled": positions()}, {"mma": tile_cost("mma", 128)[0]}
with edited(*plain):
    layouts["plain"] = positions()
    found["ldmatrix, plain"] = tile_cost.__wrapped__("ldmatrix", 128)[0]
found["ldmatrix"] = tile_cost("ldmatrix", 128)[0]
for name, layout in layouts.items():
    assert layout.unique().numel() == layout.numel()  # every element at one of its own
    banks = layout[:8, 16] // 4 % 32
    print(f"{name:8}: bank in which chunk 2 begins, rows 0 to 7:", banks.tolist())
for name, functions in found.items():
    each = [f"{f} {n} wavefronts, {n / a:g} each" for f, (a, n) in functions.items()]
    print(f"{name:15}", "; ".join(each))

# %% jupyter={"source_hidden": true} slideshow={"slide_type": "subslide"}
fig, axes = plt.subplots(1, 3, figsize=(9, 3), width_ratios=(2, 2, 3), layout="constrained")
for ax, name in zip(axes, ("plain", "swizzled"), strict=False):
    for row, chunk in itertools.product(range(8), range(8)):
        x = layouts[name][row, 8 * chunk].item() // 16 % 8
        colour, ink = (COLOURS[1], "white") if chunk == 2 else (FAINT, INK)
        ax.add_patch(plt.Rectangle((x, row), 1, 1, facecolor=colour, edgecolor="white"))
        ax.text(x + 0.5, row + 0.52, chunk, ha="center", va="center", color=ink, fontsize=9)
    ax.set(xlim=(0, 8), ylim=(8, 0), aspect="equal", title=f"chunks, {name}")
    ax.set(xlabel="bank", ylabel="row")
    ax.set_xticks(range(9), range(0, 33, 4))
    ax.set_yticks([y + 0.5 for y in range(8)], range(8))
    ax.grid(False)
bottom = torch.zeros(3)
for function, colour in zip(("load_tile", "scores", "add_PV"), COLOURS, strict=False):
    counts = torch.tensor([functions[function][1] for functions in found.values()])
    axes[2].bar(range(3), counts, 0.6, bottom=bottom, color=colour, label=function)
    bottom += counts
axes[2].set_xticks(range(3), [name.replace(", ", ",\n") for name in found])
axes[2].set_title("wavefronts a tile")
axes[2].grid(axis="x", visible=False)
axes[2].legend(fontsize=8)
picture(fig, """Left and middle: 8 rows of 8 chunks against the banks. Plain, chunk 2 of
every row stands in the same four banks; swizzled, at eight different positions. Right:
wavefronts a tile: mma and ldmatrix with plain rows need more than 8000, nearly all in
scores and add_PV; ldmatrix with swizzled rows about 1300.""")

# %% slideshow={"slide_type": "subslide"}
account("ldmatrix")
changes("fwd_2_mma", "fwd_3_ldmatrix", "scores")

# %% [markdown] slideshow={"slide_type": "subslide"}
# Alone, `ldmatrix` gains nothing: four matrices of 8 rows at one position take 32 wavefronts. Swizzled they take 4, as
# few as 32 banks need for 512 bytes.
#
# **Predict 3.** The ceiling rises from 60 to 396 TFLOP/s, 6.6 times. Will the speed?
#
# <details><summary>Answer</summary>
#
# Less, since no count says anything of waiting. In every tile all warps of a block wait until K_j and V_j have come
# from device memory or L2. Only the SM's other blocks go on meanwhile. And while a warp computes exponentials, its
# tensor cores wait.
#
# </details>

# %% slideshow={"slide_type": "fragment"}
step("mma", "ldmatrix")

# %% [markdown] slideshow={"slide_type": "slide"}
# ### Rung 4, `cp_async`: the next tile travels meanwhile
#
# **Claim.** K_j is needed in S, V_j in P V; while one is used the other can come. `cp_async_16` starts a copy from
# device to shared memory, past the registers, and the thread goes on. `cp_async_wait<0>` waits for the thread's *own*
# copies; only the barrier after it says that all threads' copies are there.

# %% slideshow={"slide_type": "fragment"}
account("cp_async")
changes("fwd_3_ldmatrix", "fwd_4_cp_async", "attention_forward")

# %% [markdown] slideshow={"slide_type": "subslide"}
# **Predict 4.** The wavefronts are rung 3's to the last one. How much can rung 4 gain?
#
# <details><summary>Answer</summary>
#
# Whatever rung 3 spent waiting for tiles, less what the SM's other block already filled in. If the speed grows by x, at
# least 1 - 1/x of rung 3's time was waiting.
#
# </details>

# %% slideshow={"slide_type": "fragment"}
step("ldmatrix", "cp_async")

# %% [markdown] slideshow={"slide_type": "slide"}
# ### Rung 5, `fa2`: 32 rows a warp, and nothing needless
#
# **Claim.** What `ldmatrix` brings for 16 rows serves 32 just as well. A warp owns two tiles of 16 rows; each B operand
# feeds two `mma`. The price is registers: the fragments of S and O double, so Q goes back to shared memory. Besides,
# exponentials of 16 keys are computed while `mma` works on the 16 before. The loop computes no addresses. These three
# cannot be switched off, because the registers are laid out for them. Only tiles at the end or on the diagonal are masked.

# %% slideshow={"slide_type": "fragment"}
account("fa2")
accumulators = cost.accumulator_registers(128, 64, 128, "fp32", threads=128)
print(f"  S and O alone: {accumulators} of the 255 registers that a thread can have")
changes("fwd_4_cp_async", "fwd_5_fa2", "scores")

# %% slideshow={"slide_type": "fragment"}
def instructions(rung, D=128):
    """A rung's machine code for an H200; empty without nvdisasm, which Triton brings."""
    triton = importlib.util.find_spec("triton")
    tool = triton and Path(triton.origin).parent / "backends/nvidia/bin/nvdisasm"
    if not (tool and tool.exists()):
        return []
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        Path(file.name).write_bytes(compiled(rung, D)[1].cubin)
        ran = subprocess.run([tool, "-c", file.name], capture_output=True, text=True)
    return re.findall(r"/\*[0-9a-f]{4}\*/ +(.*?) *;", ran.stdout)


code = instructions("fa2")
kinds = "".join("m" if "HMMA" in x else "e" if "MUFU.EX2" in x else "." for x in code)
near = [("m" in kinds[max(0, n - 10) : n], "m" in kinds[n : n + 11])
        for n, kind in enumerate(kinds) if kind == "e"]
if code:
    print(f"{kinds.count('m')} HMMA and {kinds.count('e')} MUFU.EX2;",
          f"{near.count((True, True))} of them have HMMAs close by, both before and after")
    both = [min(kinds.count(k, n, n + 14) for k in "me") for n in range(len(code))]
    print("...", *code[both.index(max(both)) :][:14], "...", sep="\n")
else:
    print("there is no nvdisasm here, so the machine code is not shown")

# %% [markdown] slideshow={"slide_type": "subslide"}
# `HMMA` is `mma`, and `MUFU.EX2` is an exponential. The warp issues an `mma` and goes on; only an instruction that
# needs the result has to wait, and the exponentials of the next 16 keys do not need it.
#
# Causal blocks are unequal. Where long ones start last, a few SMs still work when all others are done. So here they go
# first. Heads come in sections whose K and V fit into the L2 cache. In the last lines one idea at a time is off: + is
# slower. Without a causal mask `LONGEST_FIRST` and `SECTIONS` show noise. Part 6 explains `LARGE_SCORES=0`.
#
# **Predict 5.** A wavefront feeds 1.67 times as many FLOP. Will the speed follow? Which mask gains more? Which idea brings
# nothing?
#
# <details><summary>Answer</summary>
#
# Not nearly: shared memory is no longer the lowest roof. Its ceiling is 660 TFLOP/s now, about what `mma` itself can reach on
# Hopper: two thirds of 989.4, by FlashAttention-3's authors. Causal should gain more: the order of the blocks helps only
# there; skipped masks help both. Sections bring nothing beyond noise: device memory is no limit (part 2).
#
# </details>

# %% slideshow={"slide_type": "fragment"}
def finished(blocks, slots):
    """When the last block ends, if each takes its tiles in the slot that is free first."""
    free = [0] * slots
    for length in blocks:
        heapq.heappush(free, heapq.heappop(free) + length)
    return max(free)


Br, Bc = tile_of("fa2", 128)
slots = 2 * gpu.sms  # two blocks on an SM
for N, heads in ((4096, 16), (4096, 64), (16384, 16)):
    lengths = heads * [(i + 1) * Br // Bc for i in range(N // Br)]  # in tiles of keys
    ideal = sum(lengths) / slots
    up, down = (finished(x, slots) / ideal for x in (lengths, sorted(lengths)[::-1]))
    print(f"N = {N:5}, {heads} heads: {up:.2f} of the ideal time head by head,",
          f"{down:.2f} with the longest first")
step("cp_async", "fa2")
times = {(r["run"], r["kernel"], r["D"], r["causal"], r["N"]): r["ms_median"]
         for r in with_switches if r["gpu"] == gpu.name}
switches = "FEW_MASKS=0", "LONGEST_FIRST=0", "SECTIONS=0", "LARGE_SCORES=0"
for switch, D, causal in itertools.product(switches, (128, 64), (True, False)):
    slower = [f"{ms / times[run, 'fwd_5_fa2', *at] - 1:+.1%} at N = {at[2]}"
              for (run, name, *at), ms in times.items()
              if name == f"fwd_5_fa2:{switch}" and at[:2] == [D, causal]]
    print(f"{switch:15} D {D:3}, causal {causal!s:5}:", ", ".join(slower) or "no rows yet")

# %% [markdown] slideshow={"slide_type": "slide"}
# ## 5. Write it yourself
#
# As in 02a, write the body in place of the line with `#error`. `check` compiles the kernel with it and runs some of the
# contract's cases; for 02.4 and 02.6 it also counts wavefronts. `hint("02.4")` and `solution("02.4")` help.
#
# **Exercise 02.4: where a chunk goes.** A tile of `rows` rows lies in slabs of W columns, one after the other: 64 columns, 128
# bytes a row, or 32 columns where D is no multiple of 64. Return where the element (row, column) lies, counted in elements, such
# that rows 8 n to 8 n + 7 have a chunk at 8 different positions. With W = 32 two rows share the banks, and c XOR (r mod 8) would
# leave the row.

# %% slideshow={"slide_type": "fragment"}
at = r"""
__device__ int at(int rows, int row, int column) {
#error Blank 02.4
}"""

check("02.4", at)

# %% [markdown] slideshow={"slide_type": "subslide"}
# **Exercise 02.5: from S to an A operand.** `near` is what this lane has of P for 8 keys, `far` for the next 8: each a C fragment
# in float32. `pack<T>(low, high)` rounds two numbers into one register; above `mma`, `ptx.cuh` says what A wants where.

# %% slideshow={"slide_type": "fragment"}
to_operand = r"""
__device__ void to_operand(uint32_t (&A)[4], const float (&near)[4],
                           const float (&far)[4]) {
#error Blank 02.5
}"""

check("02.5", to_operand)

# %% [markdown] slideshow={"slide_type": "subslide"}
# **Exercise 02.6: how far the loop runs.** The block has the rows from `tile * Br` on, at most Br of them, and none beyond Nq.
# How many keys does it visit, so that every row gets all that it sees, and no tile comes for nothing? Causal is aligned at the
# bottom right; with more queries than keys some blocks see nothing.

# %% slideshow={"slide_type": "fragment"}
keys_seen = r"""
__device__ int keys_seen(int tile, int Nq, int Nk, int causal) {
#error Blank 02.6
}"""

check("02.6", keys_seen)

# %% [markdown] slideshow={"slide_type": "subslide"}
# **Bug hunt 02.bug1.** Below is what was reported about a broken kernel, `show("02.bug1")`. Find the cause, and write a
# test that fails on it and passes on the repaired one. `check` then asks for the cause.

# %% slideshow={"slide_type": "fragment"}
print(textwrap.fill(exercises.find("02.bug1").symptom, 110))


def test(forward):
    """Asserts what must hold of (out, lse) = forward(q, k, v, causal=..., scale=...)."""
    raise Blank


check("02.bug1", test)

# %% [markdown] slideshow={"slide_type": "slide"}
# ## 6. Check it, then break it
#
# Three of the contract's cases, each rung:

# %% slideshow={"slide_type": "fragment"}
def prepared(rung, names, device="cpu"):
    """(case, its inputs for this rung, what is expected) for the named cases."""
    limits = checks.supports_of(step02.SUPPORTS, rung)
    for case in (c for c in cases.CASES if c.name in names):
        x = cases.build(case, limits, torch.bfloat16, device)
        yield case, x, error.expected(x.q, x.k, x.v, x.dout, causal=x.causal, scale=x.scale)


names = "ragged", "more_queries_causal", "scores_200"
for rung in RUNGS[1:]:
    says = []
    for case, x, want in prepared(rung, names, steps.engine.device):
        out, lse = step02.forward(x.q, x.k, x.v, **x.options, rung=rung)
        got = {"out": out, "lse": lse}
        errors = error.errors(got, want).items()
        share = max(e / (want.tolerance[name] or 1) for name, e in errors)
        verdict = "wrong" if error.failures(got, want) else "ok"
        says.append(f"{case.name} {verdict}, {share:.2f} of its tolerance")
    print(f"{rung:9}", "; ".join(says))

# %% [markdown] slideshow={"slide_type": "subslide"}
# A copy may land at any moment between its start and its wait. The emulation performs it as late as it can, or eagerly.
# Eight edits of `fwd_4_cp_async.cu`, on seven cases, in both orders. **One edit does no harm. One is never seen in a
# causal case, two in a single case only, one in all cases but one, one never with eager copies. Which?**
#
# <details><summary>Answer</summary>
#
# No harm: beyond the last tile `inside` is false, zeros come, nothing is read. Never causal: zeros after the last key
# have scores of 0, and a causal mask hides them anyway. A single case: with m = -infinity, m - m is NaN in rows that
# see no key. All but one: over a single key four lanes cannot disagree. Not with eager copies: K was there in time.
#
# The other one with a single case is **an FMA that harms a softmax**. A compiler makes `c * S - m` one fused
# multiply-add, which does not round the product. But m is the *rounded* product at the maximum. The exponent there
# should be 0, and is the rounding error of m. Neighbours among float32 numbers of that size, 1.44 x 10^11, are 2^14
# apart, so the error is up to 2^13 = 8,192. Then P is infinite or 0, O NaN. `__fmul_rn` rounds the product by
# itself; part 4 shows its cost. Hopper's rungs multiply such scores by a power of two: an exact product
# (`exponent_factor` in `ptx.cuh`). The emulation fuses as NVRTC does if this processor has an FMA; otherwise the column
# shows nothing.
#
# </details>

# %% slideshow={"slide_type": "fragment"}
mistakes = {
    "tile written without the swizzle": (
        "tile + at(size, row, slab + column)", "tile + (row * D + slab + column)"
    ),
    "Q fetched by K's addresses": (
        "row + lane % 16, 16 * d + lane / 16 * 8)",
        "row + lane / 16 * 8 + lane % 8, 16 * d + lane / 8 % 2 * 8)",
    ),
    "one shuffle for the maximum": (
        "  return fmaxf(x, __shfl_xor_sync(~0u, x, 2));", "  return x;"
    ),
    "m starts at -infinity": ("LOWEST = -3.4e38f;", "LOWEST = -INFINITY;"),
    "S * c - m as one FMA": ("__fmul_rn(scale_log2, S[n][i])", "scale_log2 * S[n][i]"),
    "no wait for K": (
        "    cp_async_wait<0>();\n    __syncthreads();  // K", "    __syncthreads();  // K"
    ),
    "no mask unless causal": ("    mask(S, j, seen);", "    if (causal) mask(S, j, seen);"),
    "a tile fetched beyond the last": ("    if (j + Bc < keys) load_tile", "    load_tile"),
}
inputs = ["one_key", "ragged", "scores_200"]
inputs += ["ragged_causal", "fewer_queries_causal", "more_queries_causal", "large_scores"]


# %% slideshow={"slide_type": "subslide"}
def verdict(x, want):
    """Of the kernel as it is now: in which order of copies it is wrong."""
    wrong = []
    for copies in ("late", "eager"):
        with emulator.schedule(copies=copies):
            out, lse = calls.forward(
                x.q, x.k, x.v, rung="cp_async", causal=x.causal, scale=x.scale
            )
        if error.failures({"out": out, "lse": lse}, want):
            wrong.append(copies)
    return "wrong" if len(wrong) == 2 else f"if {wrong[0]}" if wrong else "lives"


verdicts, ready = {}, list(prepared("cp_async", inputs))
for says, edit in mistakes.items():
    with edited("fwd_4_cp_async.cu", edit):
        verdicts |= {(says, case.name): verdict(x, want) for case, x, want in ready}
print(" " * 33, *inputs)
for says in mistakes:
    print(f"{says:33}", *(verdicts[says, name].ljust(len(name)) for name in inputs))

# %% [markdown] slideshow={"slide_type": "slide"}
# ## 7. Predict, then measure
#
# ### The ladder
#
# **Predict 6.** Order the five steps by what each brought.
#
# <details><summary>Answer</summary>
#
# By the counts: `ldmatrix` 6.6, `warp` 3.1, `fa2` 1.67, `mma` 1.27, `cp_async` 1.
#
# </details>
#
# After the ladder, all rungs on part 2's roofline: open marks are counted ceilings, full ones were measured.

# %% jupyter={"source_hidden": true} slideshow={"slide_type": "fragment"}
gains = {}
for before, rung in itertools.pairwise(RUNGS):
    D = 64 if before in ("scalar", "warp") else 128
    old, new = measured.get((before, D, False)), measured.get((rung, D, False))
    if old and new:
        gains[rung] = new / old, ratio(before, rung, D, False)
ordered = sorted(gains, key=gains.get, reverse=True)
print("measured:", ", ".join(f"{r} {gains[r][1]}" for r in ordered) or "nothing yet")
if gains and plots.ladder_numbers(recorded):
    result = picture(plots.ladder(recorded), """The ladder of stage 02, rung by rung,
    forward and backward: TFLOP/s and the share of a measured matrix product, with
    FlashAttention-2, cuDNN and FlashAttention-4 as lines.""")
else:
    result = print("no rows yet of stage 02's ladder: on an H200, python -m steps bench",
                   "--plan fast, then --plan slow")
result

# %% jupyter={"source_hidden": true} slideshow={"slide_type": "fragment"}
fig, ax = plt.subplots(figsize=(7.2, 3.8), layout="constrained")
shared_roof(ax)
print("FLOP a wavefront, ceiling and measured TFLOP/s, not causal")
for n, (rung, D) in enumerate(ALL):
    x, most = per_wavefront(rung, D), min(ceiling(rung, D), gpu.half_tflops)
    got, name = measured.get((rung, D, False)), f"{rung}, D = {D}"
    looks = {"marker": "osD^vP*"[n], "color": (*COLOURS, INK)[n], "ls": "", "ms": 8}
    ax.plot(x, most, mfc="white", **looks, label=None if got else name)
    if got:
        ax.plot([x, x], [got, most], ":", color=looks["color"], lw=1)
        ax.plot(x, got, **looks, label=name)
    says = f"{got:6.1f}  {got / most:.0%}" if got else "  no row yet"
    print(f"{rung:9} D = {D:3}: {x:5.0f} {most:6.0f} ", says)
ax.legend(fontsize=8, loc="lower right")
picture(fig, """The roofline for shared memory with a mark for each rung: scalar, warp and
mma on the slope, below the float32 units' peak or near it; ldmatrix and cp_async together,
six times further right; fa2 beyond them. At the end of a dotted line what was measured:
below the ceiling, except scalar, whose loads the compiler has joined.""")

# %% [markdown] slideshow={"slide_type": "slide"}
# ### Profile a rung
#
# A rung near its open mark is bound by shared memory: only layout or reuse helps. One far below waits; for what, the
# hardware's counters tell.
#
# Nsight Compute's `ncu` reads the counters. Below: one rung's command (`python -m steps.bench.profile` runs
# more), then the wavefronts that the emulation expects and those that the hardware counted.

# %% slideshow={"slide_type": "fragment"}
FIVE = "tensor_pipe issue_slots shared_wavefronts bank_conflicts dram_throughput".split()
command = profile.command("ncu", "fa2", {name: profile.COUNTERS[name] for name in FIVE})
command = shlex.join("python" if word == sys.executable else word for word in command)
wrap = {"break_long_words": False, "break_on_hyphens": False}
command, program = command.split(" python ", 1)
print(" \\\n".join(textwrap.wrap(command, 100, **wrap)).replace(",", ",\\\n"), "\\")
print("python", program.replace("; ", ";\n"), "\n")  # a counter a line, a statement a line
needed = {*FIVE, "nanoseconds"}
counters = {rung: c for rung, c in profile.read().items() if needed <= set(c)}
size = profile.SIZE
for rung in ("mma", "ldmatrix", "fa2"):
    found, _ = tile_cost(rung, size["D"])
    Br, Bc = tile_of(rung, size["D"])
    tiles = size["B"] * size["H"] * (size["N"] // Br) * (size["N"] // Bc)
    expected = tiles * sum(wavefronts for _, wavefronts in found.values()) / 1e6
    says = f"{rung:9} {tiles} tiles; million wavefronts: expected {expected:.1f}"
    if rung in counters:
        print(f"{says}, hardware {counters[rung]['shared_wavefronts'] / 1e6:.1f}")
        longest = list(profile.waits(counters[rung]).items())[:4]
        print("          a warp's time:", ", ".join(f"{x:.0%} {why}" for why, x in longest))
    else:
        print(f"{says}, no profile yet")

# %% [markdown] slideshow={"slide_type": "subslide"}
# For `fa2` the hardware counts fewer wavefronts: the emulation takes `cp.async` for stores of 16 bytes a lane.
#
# | counter | says | conclude |
# |---|---|---|
# | `tensor_pipe` | cycles in which tensor cores work | the goal; high: only other instructions help (02d) |
# | `shared_wavefronts` | wavefronts of shared memory | near one a cycle: shared memory is the bottleneck |
# | `bank_conflicts` | wavefronts that only conflicts cost | many: first of all change the layout |
# | `issue_slots` | cycles in which an instruction is issued | high: too many instructions; low: warps wait, so overlap |
# | `dram_throughput` | share of device memory's bandwidth | high: larger tiles; low: leave the traffic alone |
#
# Few issue slots mean that warps wait; the *stall reasons* above say for what: `short_scoreboard` and `mio_throttle`
# are shared memory (or exp), `long_scoreboard` device memory, `wait` the latency of the instruction before. `selected`
# is no wait: an instruction is issued. With `math_pipe_throttle` its unit is busy, here the tensor cores. `mma` needs
# another layout; `fa2` hardly waits for memory.
#
# **Predict 7.** For `mma`, `ldmatrix` and `fa2`: which counter is the highest in each?
#
# <details><summary>Answer</summary>
#
# By the counts: in `mma` the wavefronts, most of them conflicts; in `ldmatrix` still the wavefronts, but nothing near
# its limit: it waits; in `fa2` the tensor cores. Device memory should be low in all.
#
# </details>

# %% jupyter={"source_hidden": true} slideshow={"slide_type": "fragment"}
def shares(rung):
    """The five counters in %, of the rung's time or of its wavefronts."""
    c = counters[rung]
    wavefronts = 100 * c["shared_wavefronts"] / (1e3 * CYCLES * c["nanoseconds"])
    conflicts = 100 * c["bank_conflicts"] / c["shared_wavefronts"]
    return [c["tensor_pipe"], wavefronts, conflicts, c["issue_slots"], c["dram_throughput"]]


names = "tensor cores\nwork", "shared memory\nwavefronts", "of them\nconflicts"
names += "issue slots\nused", "device memory\nbandwidth"
if counters:
    fig, ax = plt.subplots(figsize=(8.4, 3.4), layout="constrained")
    for n, rung in enumerate(counters):
        x = [i + (n - (len(counters) - 1) / 2) * 0.2 for i in range(5)]
        bars = ax.bar(x, shares(rung), 0.19, color=COLOURS[n], label=rung)
        ax.bar_label(bars, fmt="%.0f", fontsize=8)
    ax.set_xticks(range(5), names)
    ax.set(ylabel="%", ylim=(0, 105))
    ax.set_title(gpu.name + ": {B} x {H} heads, N = {N}, D = {D}".format(**profile.SIZE))
    ax.grid(axis="x", visible=False)
    ax.legend(fontsize=8, ncols=4)
    result = picture(fig, f"Bars, in %: {[(n, *map(round, shares(n))) for n in counters]}.")
else:
    result = print("no profile yet: on a GPU with ncu, python -m steps.bench.profile")
result

# %% [markdown] slideshow={"slide_type": "slide"}
# ## 8. Summary
#
# - Count wavefronts of shared memory: what one feeds bounds the speed, before any GPU has run the kernel.
# - A fragment is a matrix dealt to the 32 lanes of a warp. Two C fragments of S are, as they lie, an A fragment of P.
# - Eight rows in one column collide in a plain tile. Chunk c of row r at c XOR (r mod 8) makes them hit all banks once.
# - Copies in the background need two things: the thread's own wait, then everybody's barrier.
# - When no unit is near its limit, a kernel waits: overlap. When shared memory is, reuse. When the tensor cores are,
#   stop.
#
# **Ask yourself**
#
# 1. Which lanes hold row 9 of S, and how many of its numbers has each?
# 2. Why may P and V both have their keys in another order, as long as it is the same one?
# 3. Why does rung 4 need no second buffer for K, and what would one be good for?
# 4. Why must the sum l not be combined among four lanes in every tile, and the maximum must?
# 5. Why do the longest blocks of a causal mask start first?
#
# **Go further**
#
# - ★ (15 minutes) Count `fa2` with tiles (64, 64) and (128, 128) at D = 64. Which feeds more FLOP a wavefront, and what does it
#   cost in registers?
# - ★★ (1 hour) Pad the rows of `fwd_2_mma.cu` by 8 numbers instead of swizzling, and count. Where do conflicts remain?
# - ★★★ (a weekend) Give rung 4 a second buffer for K and V and one barrier a tile. Predict what that gains and costs.
#
# **Read:** `papers/flash_attention_2.md` (sections 3.1 and 3.3 of the paper); the PTX ISA on `mma` and `ldmatrix`.
#
# **Next:** [02c_fa2_cuda_backward.ipynb](02c_fa2_cuda_backward.ipynb), the backward pass. Hopper's own tensor cores are in
# [02d](02d_fa2_cuda_hopper.ipynb).
