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
# # 03. Triton: a kernel written in tiles
#
# ## 1. The question
#
# *What does a tile language take over, and what stays yours?*
#
# - **Before you start:** notebook 00 (tiles, lse, delta), and of 02a what a block and shared memory are. No Triton.
# - **Time:** about 45 minutes to read, an hour more with the exercises.
# - **Hardware:** Linux. Without a GPU the kernels run in Triton's interpreter, slowly, and are compiled for two GPUs
#   that need not be there; with one they run compiled.
# - **Code:** `steps/step03_triton/`. **Tests:** `pytest tests/test_step03_triton.py`. **Symbols:**
#   `reference/symbols.md`.

# %% slideshow={"slide_type": "skip"}
import steps  # comes first, because it chooses the engine
import importlib.util
import itertools
import json
import math
import os
import re
import subprocess
import sys
import tempfile
import warnings
from dataclasses import replace
from pathlib import Path

import matplotlib.pyplot as plt
import torch
import triton
import triton.language as tl
from torch.nn.functional import scaled_dot_product_attention

from reference import attention, cases, error, mutants
from steps.bench import cost, fingerprint, plots, rows
from steps.bench.plots import COLOURS, FAINT, INK
from steps import step00_naive as step00, step03_triton as step03
from steps.step00_naive import fwd_3_tiled

# %% slideshow={"slide_type": "skip"}
import matplotlib

from steps.step03_triton import fwd_0_fused
from steps.workbook import Blank, check, picture, show
from steps.workbook import hint, solution  # noqa: F401  They are for part 5.

torch.set_num_threads(1)
torch.set_printoptions(precision=2, sci_mode=False)
plots.style()
device = steps.engine.device
print(steps.engine.describe())
print(f"triton {triton.__version__}, matplotlib {matplotlib.__version__}")


def box(ax, x, y, text, colour, ink=INK):
    """A unit square with a text in it."""
    ax.add_patch(plt.Rectangle((x, y), 1, 1, facecolor=colour, edgecolor="white", lw=1.5))
    ax.text(x + 0.5, y + 0.5, text, ha="center", va="center", color=ink, fontsize=9)


def bare(ax):
    """Takes the grid, the ticks and the frame away."""
    ax.grid(False)
    ax.tick_params(length=0)
    ax.spines[:].set_visible(False)


# %% [markdown] slideshow={"slide_type": "skip"}
# Triton decides at import whether it interprets or compiles, for the whole process. So a second process compiles: it
# starts here, and part 4 reads what it prints. It needs no GPU, only something that answers when Triton asks for one.

# %% slideshow={"slide_type": "skip"}
COMPILE = """
import json, torch, triton, fwd_0_fused
from triton.backends.compiler import GPUTarget

class Driver:  # stands in for a GPU
    def get_current_device(self): return arch
    def get_current_stream(self, device): return 0
    def get_current_target(self): return GPUTarget("cuda", arch, 32)

triton.runtime.driver.set_active(Driver())
x, lse = torch.zeros(1, 1, 64, 64, dtype=torch.bfloat16), torch.zeros(1, 1, 64)
for arch in (80, 90):
    kernel = fwd_0_fused.forward_kernel.warmup(  # it compiles, and does not launch
        x, x, x, x, lse, *[x.stride()[:3]] * 4, 1, 1, 64, 64, 0.125, grid=(1,),
        CAUSAL=True, D=64, D_pad=64, Br=64, Bc=32, num_warps=4, num_stages=3)
    names = ("mma.sync", "wgmma.mma_async", "cp.async.cg")
    counts = {name: kernel.asm["ptx"].count(name) for name in names}
    print(json.dumps({"arch": f"sm_{arch}", "shared": kernel.metadata.shared, **counts}))
"""
here = str(Path(fwd_0_fused.__file__).parent)
environment = os.environ | {"TRITON_INTERPRET": "0", "PYTHONPATH": here}
command = [sys.executable, "-c", COMPILE]
compiler = subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True)

# %% [markdown] slideshow={"slide_type": "slide"}
# ## 2. The problem, counted
#
# Stage 02's scalar kernel never uses the tensor cores. The chip's two ceilings, and how much of the kernel's text
# speaks of threads, barriers and shared memory rather than of attention:

# %% slideshow={"slide_type": "fragment"}
h200 = cost.GPUS["NVIDIA H200"]
print(f"H200, TFLOP/s: {h200.fp32_tflops} in float32,", end=" ")
print(f"{h200.half_tflops} in 16 bit on the tensor cores,", end=" ")
print(f"{h200.half_tflops / h200.fp32_tflops:.1f} times as much")
HARDWARE = r"threadIdx|blockIdx|program_id|__syncthreads|Shared|smem|unroll"
HARDWARE += r"|__launch_bounds__|num_warps|num_stages"
counted = {}
for file in ("fwd_0_scalar", "fwd_0_fused"):
    text = re.sub(r'""".*?"""', "", str(show(file)), flags=re.S)  # without docstrings
    lines = [line for line in text.splitlines() if line.strip()]
    lines = [line for line in lines if not re.match(r"\s*(//|# )", line)]  # nor comments
    about = sum(bool(re.search(HARDWARE, line)) for line in lines)
    counted[file] = about, len(lines) - about
    print(f"{file}: {about} of {len(lines)} lines", end=" ")
    print("are about threads, barriers or shared memory")


# %% slideshow={"slide_type": "fragment"}
fig, (left, right) = plt.subplots(1, 2, figsize=(8.6, 2.8), layout="constrained")
lengths = [2**i for i in range(9, 18)]
lines = {"fp32": ("float32", COLOURS[1]), "bf16": ("bfloat16, tensor cores", COLOURS[0])}
for dtype, (name, colour) in lines.items():
    peak = 1e12 * cost.peak_tflops(h200, dtype)
    ms = [1e3 * cost.flops(1, 16, N, 128) / peak for N in lengths]
    left.loglog(lengths, ms, "o-", color=colour, label=name)
left.set(xlabel="N", title="16 heads, D = 128, at an H200's peak, ms")
left.set_xticks(lengths[::2], [f"{N // 1024}k" if N >= 1024 else N for N in lengths[::2]])
left.minorticks_off()
left.legend(fontsize=8)
names = ["stage 02, CUDA C++", "stage 03, Triton"]
about, other = zip(*counted.values(), strict=True)
right.barh(names, about, color=COLOURS[1], label="about threads, barriers, shared memory")
rest = "the rest; in stage 03 with its launcher"
right.barh(names, other, left=about, color=COLOURS[5], label=rest)
right.set(title="lines of code", ylim=(2.6, -0.6))
right.grid(axis="y", visible=False)
right.legend(fontsize=8, loc="lower left")
picture(fig, """Left: time of the forward at an H200's peak against N; float32 and bfloat16
on tensor cores are parallel lines of slope two, more than a factor of ten apart. Right:
about a quarter of the lines of stage 02's kernel are about threads, barriers or shared
memory, and few of stage 03's.""")

# %% [markdown] slideshow={"slide_type": "subslide"}
# To use the tensor cores in CUDA C++ you say which thread holds which number (02b), and differently for each generation
# of GPUs. In Triton you say what is done to *tiles*. The compiler decides who holds what.

# %% [markdown] slideshow={"slide_type": "slide"}
# ## 3. The idea: programs instead of threads
#
# A CUDA block becomes a **program**, and there are no threads in it: `tl.arange(0, 4)` is a tile of four numbers, `x +
# i` a tile of four pointers. What was `if (i < N)` becomes a **mask**. Sizes of tiles are powers of two, and N is not,
# so the last tile hangs over the edge. Without a mask:

# %% slideshow={"slide_type": "fragment"}
@triton.jit
def add(x, y, out, N, MASKED: tl.constexpr, BLOCK: tl.constexpr):
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)  # this program's BLOCK positions
    inside = i < N if MASKED else i >= 0
    x_i = tl.load(x + i, mask=inside, other=0.0)
    y_i = tl.load(y + i, mask=inside, other=0.0)
    tl.store(out + i, x_i + y_i, mask=inside)


x, y = torch.arange(8.0).to(device), torch.full((8,), 10.0).to(device)
for masked in (False, True):
    memory = torch.full((8,), -1.0).to(device)  # 6 numbers of out, 2 of somebody else
    add[(2,)](x, y, memory, 6, MASKED=masked, BLOCK=4)
    result, neighbours = memory[:6].tolist(), memory[6:].tolist()
    print(f"masked {masked!s:5}: out {result}, its neighbours {neighbours}")

# %% [markdown] slideshow={"slide_type": "fragment"}
# Nobody complained: the neighbours became 16 and 17, the sum is right, and the fault shows elsewhere or never. Masks
# are yours, and so is `other`, what a masked load yields. A softmax over the scores of notebook 00, 6 keys in a tile of
# 8:

# %% slideshow={"slide_type": "fragment"}
@triton.jit
def row_softmax(S, P, N, other, BLOCK: tl.constexpr):
    row, j = tl.program_id(0), tl.arange(0, BLOCK)
    s = tl.load(S + row * N + j, mask=j < N, other=other)  # a row, filled up to BLOCK
    e = tl.exp(s - tl.max(s, 0))
    tl.store(P + row * N + j, e / tl.sum(e, 0), mask=j < N)


Q = torch.tensor([[1.0, 2], [0, 1], [-1, 0], [2, -1], [1, 1], [3, 1]]).to(device)
K = torch.tensor([[0.0, 1], [1, 0], [-1, 1], [1, 2], [2, 0], [0, -1]]).to(device)
V = torch.tensor([[0.0, 6], [2, 0], [4, 6], [6, 4], [8, 0], [10, 6]]).to(device)
scale = 1 / math.sqrt(2)
S = scale * Q @ K.T
for other in (0.0, -math.inf):
    P = torch.empty_like(S)
    row_softmax[(6,)](S, P, 6, other, BLOCK=8)
    print(f"other = {other}: P[5]", P[5].cpu(), end=" ")
    print(f"sums {P[5].sum():.2f} and {P[2].sum():.2f} (rows 5 and 2)")

# %% [markdown] slideshow={"slide_type": "fragment"}
# With 0 the two missing keys score 0 like real ones: row 5, whose best score is 4.24, hardly shows it, row 2 loses
# more. The neutral element depends on what follows: 0 for a sum, -inf for a maximum and an exp.
#
# In two dimensions `[:, None]` and `[None, :]` broadcast. This stage's `load_tile`:

# %% slideshow={"slide_type": "subslide"}
show("step03_triton/fwd_0_fused", "load_tile")

# %% [markdown] slideshow={"slide_type": "fragment"}
# Below, a matrix (6, 2) lies in memory with a stride of 3: every third number belongs to somebody else. A tile of (4,
# 4) begins at row 4. Memory holds its own addresses, so that what the load returns says what it touched.

# %% slideshow={"slide_type": "fragment"}
@triton.jit
def fetch(
    x, tile, first, N, stride, ROWS: tl.constexpr, D: tl.constexpr, D_pad: tl.constexpr
):
    at = tl.arange(0, ROWS)[:, None] * D_pad + tl.arange(0, D_pad)[None, :]
    tl.store(tile + at, fwd_0_fused.load_tile(x, first, N, stride, ROWS, D, D_pad))


memory = torch.arange(24.0).to(device)
tile = torch.empty(4, 4).to(device)
fetch[(1,)](memory, tile, 4, 6, 3, ROWS=4, D=2, D_pad=4)
asked = 3 * torch.arange(4, 8)[:, None] + torch.arange(4)[None, :]
print("addresses asked for:", asked.tolist(), "\nreturned:           ", tile.int().tolist())


def kind(address):
    """What lies at an address, and whether the load touched it."""
    if address and address in tile:  # address 0 is not asked for; masked entries are 0
        return "touched"
    if address >= 18:
        return "beyond the end"
    return "somebody else's" if address % 3 == 2 else "the matrix"

# %% slideshow={"slide_type": "fragment"}
fig, (left, right) = plt.subplots(1, 2, figsize=(9, 2.6), width_ratios=(4, 13))
for r, c in itertools.product(range(4), range(4)):
    fill, ink = (COLOURS[0], "white") if tile[r, c] > 0 else (FAINT, INK)
    box(left, c, r, asked[r, c].item(), fill, ink)
colours = {"touched": COLOURS[0], "the matrix": COLOURS[5],
           "somebody else's": COLOURS[4], "beyond the end": "#ededed"}  # fmt: skip
for address in range(24):
    what = kind(address)
    ink = "white" if what == "touched" else INK
    box(right, address % 12, 1.5 * (address // 12), address, colours[what], ink)
left.set(xlim=(0, 4), ylim=(4, 0), title="asked for", aspect="equal", xticks=[])
left.set_yticks([r + 0.5 for r in range(4)], [f"row {4 + r}" for r in range(4)])
right.set(xlim=(0, 12), ylim=(3.6, -0.1), title="memory, 24 numbers", aspect="equal")
right.set(xticks=[], yticks=[])
squares = [plt.Rectangle((0, 0), 1, 1, color=c) for c in colours.values()]
below = {"loc": "lower center", "bbox_to_anchor": (0.5, -0.25), "ncols": 4}
right.legend(squares, colours, fontsize=8, **below)
for ax in (left, right):
    bare(ax)
picture(fig, """Left: a tile of 4 by 4 entries with the address that each asks for; only 12,
13, 15 and 16, the two columns of rows 4 and 5, are loaded, the other twelve are masked.
Right: memory as 24 cells, with those four marked; the masked addresses lie in the gaps of
the stride, in another row, or beyond the end.""")

# %% [markdown] slideshow={"slide_type": "subslide"}
# Of 16 addresses 4 are touched. The others yield 0 without a visit: they lie in the gaps (14, 17), in the next row (15
# again, as column 3 of row 4), or beyond the end.
#
# ### What the interpreter is, and what it cannot show
#
# It runs the Python text of a kernel with numpy, one program after the other. Two experiments: eight programs add 1 to
# the same number without an atomic addition; and a program adds bfloat16 numbers.

# %% slideshow={"slide_type": "fragment"}
@triton.jit
def count(total):
    tl.store(total, tl.load(total) + 1.0)


@triton.jit
def double(x, out):
    i = tl.arange(0, 4)
    tl.store(out + i, tl.load(x + i) + tl.load(x + i))


total = torch.zeros(1).to(device)
count[(8,)](total)
print("eight programs have counted to", total.item())
for dtype in (torch.float16, torch.bfloat16):
    x = torch.tensor([1, 1.5, 2, 3], dtype=dtype, device=device)
    out = torch.zeros_like(x)
    double[(1,)](x, out)
    print(f"{x.tolist()} doubled in {dtype}: {out.tolist()}")

# %% [markdown] slideshow={"slide_type": "fragment"}
# The race on `total` is invisible: 8.0, as nobody else runs. On a GPU all eight may read 0. And numpy has no bfloat16:
# the interpreter adds the bit patterns as integers, and the result is nonsense without a warning (a GPU gives 2, 3, 4,
# 6). So this stage's launchers go through float32 for bfloat16 when interpreted. In short:
#
# | shows | does not show |
# |---|---|
# | formulas, masks, indices, edges, NaN in the wrong place | races, missing atomics |
# | any program's values: `print` works | bfloat16; the tensor cores' rounding |
# | | that a store goes out of bounds; registers, shared memory, speed |
# | | tiles that the compiler refuses (a `tl.dot` over fewer than 16 products) |

# %% [markdown] slideshow={"slide_type": "slide"}
# ## 4. From algorithm to code
#
# FlashAttention-2's Algorithm 1; in brackets the paper's lines, [10] corrected as in notebook 00. All of it is in
# `fwd_0_fused.py`, and every name on the right is a function there.
#
# | line | what it does | function |
# |---|---|---|
# | [3–4] | a program takes Br queries; Q_i stays | `forward_kernel`, `load_tile` |
# | [5] | m = -inf, l = 0, O = 0 | `forward_kernel` |
# | [6] | for each tile of keys | `key_ranges`, `visit_keys` |
# | [7] | K_j and V_j | `load_tile` |
# | [8] | S = scale · Q_i K_jᵀ | `visit_keys`; what is hidden: `mask` (yours, in part 5) |
# | [9–10] | m, l and O take in the tile | `online_update` |
# | [12–15] | out = O / l, lse = m + log l | `forward_kernel`, `store_tile` |
#
# The budget first: the compiler spreads a program's tiles over its warps, and what does not fit spills.

# %% slideshow={"slide_type": "fragment"}
for size, dtype in ((2, "bf16"), (4, "fp32")):
    for D, (Br, Bc, warps, stages) in fwd_0_fused.TILES[size].items():
        registers = cost.accumulator_registers(Br, Bc, D, dtype, threads=32 * warps)
        shared = cost.shared_bytes(Br, Bc, D, dtype, stages=stages) / 1024
        print(f"{dtype} D <= {D:3}: tile {Br:3} x {Bc}, {warps} warps,", end=" ")
        print(f"{stages} stages: O, S, P {registers:3.0f} of 255 registers;", end=" ")
        print(f"Q, K, V at most {shared:3.0f} KiB")

# %% [markdown] slideshow={"slide_type": "subslide"}
# ### One tile's update
#
# Compare with notebook 00's `online_update`, line by line.

# %% slideshow={"slide_type": "fragment"}
show("step03_triton/fwd_0_fused", "online_update")

# %% [markdown] slideshow={"slide_type": "subslide"}
# Here it is on fixed numbers: notebook 00's six tokens in tiles of 16 x 16, keys 0 to 2 first and 3 to 5 second.
# Whatever is not there is loaded as 0, and `mask` hides it as a key.

# %% slideshow={"slide_type": "fragment"}
@triton.jit
def visit(m, l, O, q, k, v, scale, j, end, D: tl.constexpr, SIDE: tl.constexpr):
    """m, l (SIDE,) and O (SIDE, SIDE) after keys j to end - 1 too; q, k, v are (6, D)."""
    i = tl.arange(0, SIDE)
    at = i[:, None] * SIDE + i[None, :]
    Q_i = fwd_0_fused.load_tile(q, 0, 6, D, SIDE, D, SIDE)
    K_j = fwd_0_fused.load_tile(k, j, end, D, SIDE, D, SIDE)
    V_j = fwd_0_fused.load_tile(v, j, end, D, SIDE, D, SIDE)
    S = scale * tl.dot(Q_i, tl.trans(K_j), input_precision="ieee")
    S = fwd_0_fused.mask(S, 0, j, 6, end, False, SIDE, SIDE)
    m_i, l_i, O_i = tl.load(m + i), tl.load(l + i), tl.load(O + at)
    m_new, l_new, O_new = fwd_0_fused.online_update(m_i, l_i, O_i, S, V_j)
    tl.store(m + i, m_new)
    tl.store(l + i, l_new)
    tl.store(O + at, O_new)


# %% slideshow={"slide_type": "fragment"}
m = torch.full((16,), -math.inf).to(device)
l = torch.zeros(16).to(device)
O = torch.zeros(16, 16).to(device)
want = m[:6].clone(), l[:6].clone(), O[:6, :2].clone()
for j in (0, 3):
    visit[(1,)](m, l, O, Q, K, V, scale, j, j + 3, D=2, SIDE=16)
    want = fwd_3_tiled.online_update(*want, scale * Q @ K[j : j + 3].T, V[j : j + 3])
    pairs = zip((m[:6], l[:6], O[:6, :2]), want, strict=True)
    same = [torch.allclose(a, b) for a, b in pairs]
    print(f"keys to {j + 2}: row 5 has m {m[5]:.2f}, l {l[5]:.2f},", end=" ")
    print(f"O / l ({O[5, 0] / l[5]:.2f}, {O[5, 1] / l[5]:.2f});", end=" ")
    print(f"m, l, O as stage 00's: {same}")


# %% [markdown] slideshow={"slide_type": "subslide"}
# Row 5 ends at (6.83, 1.34), as in notebook 00.
#
# ### Which tiles are visited, and which need a mask
#
# A mask costs comparisons on every score, and most tiles need none. So there are **two loops** over the same text: the
# constant `MASKED` makes the compiler write `visit_keys` twice. Between them is `full`, and after `end` nothing.

# %% slideshow={"slide_type": "fragment"}
show("step03_triton/fwd_0_fused", "key_ranges")

# %% slideshow={"slide_type": "fragment"}
@triton.jit
def ranges(result, Nq, Nk, CAUSAL: tl.constexpr, Br: tl.constexpr, Bc: tl.constexpr):
    full, end = fwd_0_fused.key_ranges(tl.program_id(0) * Br, Nq, Nk, CAUSAL, Br, Bc)
    tl.store(result + 2 * tl.program_id(0), full)
    tl.store(result + 2 * tl.program_id(0) + 1, end)


def tiles(Nq, Nk, causal, Br, Bc):
    """[(i, j, masked)] of the tiles that are visited, in a program's order."""
    found = torch.zeros(triton.cdiv(Nq, Br), 2, dtype=torch.int32, device=device)
    ranges[(len(found),)](found, Nq, Nk, CAUSAL=causal, Br=Br, Bc=Bc)
    visited = []
    for n, (full, end) in enumerate(found.tolist()):
        visited += [(n * Br, j, False) for j in range(0, full, Bc)]
        visited += [(n * Br, j, True) for j in range(full, end, Bc)]
    return visited


# %% slideshow={"slide_type": "fragment"}
shapes = {"not causal": (14, 14, False), "causal": (14, 14, True),
          "causal, fewer queries": (10, 18, True),
          "causal, more queries": (18, 10, True)}  # fmt: skip
fig, axes = plt.subplots(1, 4, figsize=(9.6, 3.2))
for ax, (name, (Nq, Nk, causal)) in zip(axes, shapes.items(), strict=True):
    visited = tiles(Nq, Nk, causal, 4, 4)
    for i, j, masked in visited:
        colour = COLOURS[4 if masked else 5]
        ax.add_patch(plt.Rectangle((j, i), 4, 4, facecolor=colour, edgecolor="white", lw=2))
    i, j = attention.visible(Nq, Nk, causal).nonzero(as_tuple=True)
    ax.plot(j + 0.5, i + 0.5, ".", color=INK, ms=3)
    ax.add_patch(plt.Rectangle((0, 0), Nk, Nq, fill=False, edgecolor=INK, lw=1))
    ax.set(xlim=(-0.5, 20.5), ylim=(20.5, -0.5), aspect="equal", xlabel="key")
    ax.set_title(f"{name}\n{Nq} x {Nk}", fontsize=9)
    ax.set(xticks=range(0, 21, 4), yticks=range(0, 21, 4))
    masked = sum(tile[2] for tile in visited)
    print(f"{name:22}: {len(visited) - masked} tiles without a mask,", end=" ")
    print(f"{masked} with one, of {triton.cdiv(Nq, 4) * triton.cdiv(Nk, 4)}")
axes[0].set_ylabel("query")
picture(fig, """Four drawings of queries against keys in tiles of 4 by 4; dots are the pairs
that are seen. Not causal: only the last, ragged column of tiles is masked. Causal: tiles on
the diagonal are masked, those below it are not, and those above it are not visited. With 10
queries and 18 keys the diagonal ends in the lower right corner; with 18 queries and 10 keys
the first 8 queries see nothing and their tiles are not visited.""")

# %% [markdown] slideshow={"slide_type": "subslide"}
# Blue tiles are the first loop, orange ones the second, dots the pairs to be seen. The diagonal ends at the bottom
# right: query i stands at position i + Nk - Nq, and with more queries than keys the first ones see nothing.

# %% slideshow={"slide_type": "fragment"}
show("step03_triton/fwd_0_fused", "visit_keys")

# %% slideshow={"slide_type": "subslide"}
show("step03_triton/fwd_0_fused", "forward_kernel")

# %% [markdown] slideshow={"slide_type": "subslide"}
# ### Who reads what
#
# `head` turns (b, h) into a pointer with the tensor's own strides, so that a transposed (B, N, H, D) needs no copy. The
# product is taken in 64 bits: row 2²⁵ of 64 numbers begins at element 2³¹, one too many for 32. With grouped heads
# `h // group` is the key head. Let every value of key head n be n; then `out` tells which head a program has read:

# %% slideshow={"slide_type": "fragment"}
in_32_bits = torch.tensor(2**25, dtype=torch.int32).mul(64).item()
print("2^25 * 64 in 32 bits:", in_32_bits, " in 64 bits:", 2**25 * 64)
H, Hk, N = 4, 2, 40
q, k = (torch.randn(1, N, heads, 16).to(device).transpose(1, 2) for heads in (H, Hk))
v = torch.arange(Hk).to(q)[None, :, None, None].expand(1, Hk, N, 16)
out, _ = step03.forward(q, k, v, causal=True, tile=(16, 16))
heads_read = out[0, :, -1, 0].round().int().tolist()
print("strides of q:", q.stride(), " key head read by query heads 0 to 3:", heads_read)
fig, ax = plt.subplots(figsize=(5.6, 2.3))
count_tiles = triton.cdiv(N, 16)
for program in range(H * count_tiles):
    i = count_tiles - 1 - program % count_tiles  # numbered as in forward_kernel
    h = program // count_tiles
    box(ax, i, h, f"program {program}", COLOURS[(5, 4)[heads_read[h]]])
ax.set(xlim=(0, count_tiles), ylim=(H, 0), title="blue reads key head 0, orange key head 1")
names = [f"queries from {16 * i}" for i in range(count_tiles)]
ax.set_xticks([i + 0.5 for i in range(count_tiles)], names)
ax.set_yticks([h + 0.5 for h in range(H)], [f"head {h}" for h in range(H)])
bare(ax)
picture(fig, """Four heads by three tiles of queries: twelve programs. Program 0 has the
last queries of head 0, program 2 the first. Heads 0 and 1 read key head 0, heads 2 and 3
key head 1.""")

# %% [markdown] slideshow={"slide_type": "subslide"}
# Programs with neighbouring numbers run at about the same time: they share a key head, which then is in the cache, and
# the last queries, which see most keys, go first.
#
# ### What the compiler made of it
#
# The process from the beginning has compiled this file for an A100 (sm_80) and an H100 (sm_90): bfloat16, D = 64, tiles
# of 64 x 32.

# %% slideshow={"slide_type": "fragment"}
for line in compiler.communicate()[0].splitlines():
    print(*(f"{name} {value}  " for name, value in json.loads(line).items()))
print("exit code", compiler.returncode)
KV_bytes = cost.shared_bytes(64, 32, 64, "bf16", tiles="KV", stages=3)
Q_bytes = cost.shared_bytes(64, 32, 64, "bf16", tiles="Q")
print(f"K and V, three stages: {KV_bytes} bytes; Q: {Q_bytes} bytes")

# %% [markdown] slideshow={"slide_type": "subslide"}
# The same text became `mma.sync` on one GPU and `wgmma` on the other, instructions that differ in who holds what (02b,
# 02d). `cp.async` copies K and V ahead of their use. No line of code mentions any of it: `num_stages=3` asked for the
# copies, and the shared memory follows. The difference of the two is Q, which `wgmma` reads from there.
#
# | Triton's | yours |
# |---|---|
# | which thread holds which entry; registers; shared memory; barriers | tile sizes, `num_warps`, `num_stages` |
# | instructions, copies ahead of their use | pointers, strides, masks, 64 bits |
# | | which program owns what; races between programs; accumulating in float32 |
#
# ### float32 that is float32
#
# A tensor core takes float32 only after rounding it to tf32: 10 bits of mantissa instead of 23. `tl.dot` does so unless
# told `input_precision="ieee"`. Simulated in torch, on random q and k with D = 64:

# %% slideshow={"slide_type": "fragment"}
def tf32(x):
    """x rounded to 10 bits of mantissa."""
    return ((x.view(torch.int32) + 0x1000) & ~0x1FFF).view(torch.float32)


a, b = torch.randn(2, 256, 64, generator=torch.Generator().manual_seed(0))
exact = a.double() @ b.double().T
roundings = {"ieee": lambda x: x, "tf32": tf32, "bfloat16": lambda x: x.bfloat16().float()}
for name, rounded in roundings.items():
    product = rounded(a) @ rounded(b).T
    print(f"{name:8}: largest error of q k^T {(product - exact).abs().max():.1e}")


# %% [markdown] slideshow={"slide_type": "subslide"}
# ### The backward: three kernels and no atomics
#
# One pass over the tiles computes five products in each: S, dP, dV, dK, dQ. If a program owns a tile of keys, dK_j and
# dV_j stay with it, but every dQ_i gets parts from many programs, added by atomics in whatever order they come. Here
# two passes have one owner for each result.

# %% slideshow={"slide_type": "fragment"}
fig, axes = plt.subplots(1, 2, figsize=(7.4, 3.2), layout="constrained")
for ax, by_keys in zip(axes, (True, False), strict=True):
    for i, j in itertools.product(range(4), range(4)):
        if j <= i:
            owner = j if by_keys else i
            box(ax, j, i, owner, COLOURS[2 + owner])
    for n in range(4):
        if by_keys:
            begin, end = (n + 0.15, n + 0.08), (n + 0.15, 3.92)
        else:
            begin, end = (0.08, n + 0.85), (n + 0.92, n + 0.85)
        ax.annotate("", end, begin, arrowprops={"arrowstyle": "->", "color": INK})
    ax.set(xlim=(0, 4), ylim=(4, 0), aspect="equal", xticks=[], yticks=[])
    ax.set(xlabel="tiles of keys", ylabel="tiles of queries")
    ax.grid(False)
axes[0].set_title("keys_kernel: dK_j, dV_j\nS, dP, dV, dK: 4 products", fontsize=10)
axes[1].set_title("queries_kernel: dQ_i\nS, dP, dQ: 3 products", fontsize=10)
picture(fig, """Two causal triangles of tiles. Left: each column has one colour, the program
that owns those keys and walks down the queries. Right: each row has one colour, the program
that owns those queries and walks along the keys.""")

# %% slideshow={"slide_type": "fragment"}
products = {}
for name in ("visit_queries", "visit_keys"):
    products[name] = str(show("step03_triton/bwd_0_fused", name)).count("tl.dot(")
print("matrix products a tile:", products, "together", sum(products.values()))
seeded = torch.Generator().manual_seed(0)
q, k, v, dout = torch.randn(4, 1, 1, 64, 16, generator=seeded).to(device)
out, lse = step03.forward(q, k, v)
parts = []
for j in range(0, 64, 16):
    k_j, v_j = k[:, :, j : j + 16], v[:, :, j : j + 16]
    parts.append(step00.backward(dout, q, k_j, v_j, out, lse, rung="matrix")[0])
sums = set()
for order in itertools.permutations(parts):
    sums.add(sum(order[1:], order[0]).cpu().numpy().tobytes())
print(f"dQ from 4 tiles of keys, added in 24 orders: {len(sums)} different results")
runs = [step03.backward(dout, q, k, v, out, lse, tile=(32, 32)) for _ in range(2)]
same = all(torch.equal(a, b) for a, b in zip(*runs, strict=True))
print("stage 03 twice, the same bits:", same)

# %% slideshow={"slide_type": "subslide"}
show("step03_triton/bwd_0_fused", "visit_queries")

# %% [markdown] slideshow={"slide_type": "subslide"}
# `tile_gradients`, which makes P and dS, is yours in part 5. S and dP are computed twice: 7 products instead of 5, for
# the same bits on every run. And grouped heads come for free: the owner of a key tile visits the queries of all heads
# that share it, instead of summing their results later.
#
# ### sdpa: torch's function, and torch's diagonal
#
# `sdpa` takes the arguments of `torch.nn.functional.scaled_dot_product_attention`. One thing differs from the contract:
# torch aligns `is_causal` at the *top left*. Values that are the identity make P visible:

# %% slideshow={"slide_type": "fragment"}
fig, axes = plt.subplots(1, 4, figsize=(9, 2.7), layout="constrained")
for n, (Nq, Nk) in enumerate(((4, 7), (7, 4))):
    q, k = torch.zeros(1, 1, Nq, 16).to(device), torch.zeros(1, 1, Nk, 16).to(device)
    v = torch.eye(Nk, 16).to(device)[None, None]
    ours = step03.sdpa(q, k, v, is_causal=True)
    contract = step03.attention(q, k, v, causal=True)
    theirs = scaled_dot_product_attention(q, k, v, is_causal=True)
    print(f"Nq {Nq}, Nk {Nk}: sdpa as torch: {torch.allclose(ours, theirs)}", end=", ")
    print(f"as attention: {torch.allclose(ours, contract)}")
    panels = {"sdpa": ours, "attention": contract}
    for ax, (name, P) in zip(axes[2 * n :], panels.items(), strict=False):
        for i, j in itertools.product(range(Nq), range(Nk)):
            box(ax, j, i, "", COLOURS[0] if P[0, 0, i, j] > 0 else FAINT)
        ax.set(xlim=(0, 7), ylim=(7, 0), aspect="equal", xticks=[], yticks=[])
        ax.set_title(f"{name}, {Nq} x {Nk}", fontsize=10)
        bare(ax)
fig.supxlabel("rows: queries, columns: keys; blue: seen", fontsize=9)
picture(fig, """Which keys a query sees. With 4 queries and 7 keys, sdpa's first query sees
key 0 alone, attention's sees keys 0 to 3. With 7 queries and 4 keys, sdpa's last queries
see all keys from query 3 on, while attention's first three queries see none.""")

# %% [markdown] slideshow={"slide_type": "slide"}
# ## 5. Write it yourself
#
# Write the body in place of `raise Blank` and run the cell: `check` puts your function in the place of the stage's,
# runs some of the contract's cases, and names what fails. `hint("03.1")` asks a question, `hint("03.1", 2)` gives the
# formula, `hint("03.1", 3)` pseudo-code, `solution("03.1")` the stage's function.
#
# **Exercise 03.1: the scores that are hidden.** The orange tiles of part 4: no key, or, if CAUSAL, one after the query.
#
# **Exercise 03.2: P and dS of one tile or of its transpose.** Both kernels of the backward call it: `queries_kernel`
# with queries down and keys across, `keys_kernel` with everything transposed. `lse`, `delta`, `query` and `key` come as
# a column or a row to match, and `query` and `key` are positions in q and k.

# %% slideshow={"slide_type": "fragment"}
@triton.jit
def mask(S, i, j, Nq, Nk, CAUSAL: tl.constexpr, Br: tl.constexpr, Bc: tl.constexpr):
    """S (Br, Bc), with -inf where there is no key, or where it lies after the query.

    The tile starts at query i and key j.
    """
    raise Blank


check("03.1", mask)

# %% slideshow={"slide_type": "fragment"}
@triton.jit
def tile_gradients(
    S, dP, lse, delta, query, key, Nq, Nk, MASKED: tl.constexpr, CAUSAL: tl.constexpr
):
    """(P, dS) of one tile, from S and dP, the gradient of P; also with all transposed."""
    raise Blank


check("03.2", tile_gradients)

# %% [markdown] slideshow={"slide_type": "slide"}
# ## 6. Check it, then break it
#
# Five of the contract's cases, cut to one to three tiles each way to be quick, and the backward only for grouped heads
# (`pytest tests/test_step03_triton.py` runs all, whole, in three dtypes):

# %% slideshow={"slide_type": "fragment"}
# T is the longer side of the stage's smallest tile.
cut = {
    "ragged": dict(H=1, Nq=lambda T: T + 5),
    "fewer_queries_causal": dict(H=1, Nq=lambda T: T + 5, Nk=lambda T: 2 * T + 3),
    "more_queries_causal": dict(H=1, Nq=lambda T: 2 * T + 3, Nk=lambda T: T + 5),
    "head_dim_odd": dict(H=1, Nq=lambda T: 5),
    "grouped_heads": dict(H=4, Hk=2, Nq=lambda T: 5),
}
built, worst = {}, {}
for case in (replace(case, **cut[case.name]) for case in cases.CASES if case.name in cut):
    x = cases.build(case, step03.SUPPORTS, torch.float32)
    want = error.expected(x.q, x.k, x.v, x.dout, causal=x.causal, scale=x.scale)
    q, k, v, dout = (t.to(device) for t in (x.q, x.k, x.v, x.dout))
    results = step03.forward(q, k, v, **x.options)
    if case.name == "grouped_heads":
        results += step03.backward(dout, q, k, v, *results, **x.options)
    named = zip(error.NAMES, results, strict=False)
    errors = error.errors({name: r.cpu() for name, r in named}, want)
    worst[case.name] = max(e / want.tolerance[name] for name, e in errors.items())
    built[case.name] = x, want
failed = sum(ratio > 1 for ratio in worst.values())
print(f"engine {steps.engine.name}: {len(worst)} cases, {failed} failed,", end=" ")
print(f"largest error {max(worst.values()):.2f} of the tolerance")

# %% [markdown] slideshow={"slide_type": "subslide"}
# Five mistakes now, each planted in a copy of the file and run by the same engine. Where a case dies, its `out` is
# compared with the forward's mutants in `reference/mutants.py`, run with this stage's tiles and its loop order,
# `SUPPORTS["order"]`. **Which mistake lives through everything? Which dies only with grouped heads?**

# %% slideshow={"slide_type": "fragment"}
mistakes = {
    "full rounded up": ("full // Bc * Bc, end", "tl.cdiv(full, Bc) * Bc, end"),
    "end aligned at the top left": ("i + Br + Nk - Nq", "i + Br"),
    "key head h % Hk": ("h // group", "h % (H // group)"),
    "columns not masked": ("mask=(row < N) & (column < D), other", "mask=row < N, other"),
    "offsets in 32 bits": (".to(tl.int64)", ""),
}
folder = tempfile.TemporaryDirectory()


def planted(before, after):
    """A copy of the stage's forward, as a module, with `after` in place of `before`."""
    text = Path(fwd_0_fused.__file__).read_text()
    assert before in text, before
    # Triton reads a kernel's text from its file, so the copy is a file too.
    file = Path(folder.name) / f"planted_{len(os.listdir(folder.name))}.py"
    file.write_text(text.replace(before, after))
    spec = importlib.util.spec_from_file_location(file.stem, file)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


# %% slideshow={"slide_type": "subslide"}
def diagnosis(out, x, want):
    """The names of the mutants of the forward that give this out."""
    found = []
    for mutant in (m for m in mutants.MUTANTS if issubclass(m.kind, mutants.Forward)):
        try:
            theirs = mutant.run(x, x.tile, step03.SUPPORTS["order"])["out"]
        except mutants.NotApplicable:
            continue
        if torch.allclose(out, theirs, atol=2 * want.tolerance["out"], equal_nan=True):
            found.append(mutant.name)
    return "\n".join(found) or "dies"


verdicts = {}
# numpy warns where the interpreter meets the NaN that we look for.
warnings.filterwarnings("ignore", message="All-NaN")
for says, change in mistakes.items():
    broken = planted(*change)
    for name, (x, want) in built.items():
        out, lse = broken.forward(*(t.to(device) for t in (x.q, x.k, x.v)), **x.options)
        wrong = error.failures({"out": out.cpu(), "lse": lse.cpu()}, want)
        verdicts[says, name] = diagnosis(out.cpu(), x, want) if wrong else "lives"


# %% slideshow={"slide_type": "fragment"}
fig, ax = plt.subplots(figsize=(9.6, 3.2))
for (row, says), (column, name) in itertools.product(enumerate(mistakes), enumerate(built)):
    word = verdicts[says, name]
    lives = word == "lives"
    box(ax, column, row, word, COLOURS[4 if lives else 0], INK if lives else "white")
for text in ax.texts:
    text.set_fontsize(7.5)
ax.set(xlim=(0, len(built)), ylim=(len(mistakes), 0))
ax.set_xticks([c + 0.5 for c in range(len(built))], built, fontsize=8)
ax.set_yticks([r + 0.5 for r in range(len(mistakes))], mistakes, fontsize=8)
ax.set_title("blue: dies; with a mutant's name where out equals that mutant's")
bare(ax)
picture(fig, """Five mistakes against five cases. full rounded up dies in all of them, and
in ragged equals the mutant tail_not_masked. end aligned at the top left dies only with
fewer queries than keys, key head h % Hk only with grouped heads, where it equals
heads_interleaved, and columns not masked only where head_dim is no power of two. Offsets in
32 bits live everywhere.""")

# %% [markdown] slideshow={"slide_type": "fragment"}
# `full rounded up` leaves the ragged tile without its mask, which is `tail_not_masked`; when causal the diagonal loses
# its mask too, and that no mutant does. `end aligned at the top left` lives with more queries than keys, where it
# visits masked tiles in vain: too many visits cost time, too few the result. `key head h % Hk` needs grouped heads to
# die. `offsets in 32 bits` lives: it takes 2³¹ elements, so the stage has a test of that size for GPUs.

# %% [markdown] slideshow={"slide_type": "slide"}
# ## 7. Predict, then measure
#
# **Question 1.** Let q and k be rounded to tf32 before their product. How does the error of out grow with the size of
# the scores, from 2 to 200?
#
# <details><summary>Answer</summary>
#
# tf32's error is relative, so a score's error grows with the score; and exp turns an error of 0.01 in a score into one
# percent of a weight. float32 makes the same climb, two to three decimal digits lower.
#
# </details>

# %% slideshow={"slide_type": "fragment"}
sizes = (2, 5, 10, 20, 50, 100, 200)
q, k, v = torch.randn(3, 1, 1, 256, 64, generator=torch.Generator().manual_seed(0))
largest = (q @ k.mT / 8).abs().max()
found = {"float32 (ieee)": [], "tf32": []}
for size in sizes:
    gain = (size / largest).sqrt()
    exact, _ = attention.forward(gain * q, gain * k, v)
    for name, rounded in zip(found, (lambda x: x, tf32), strict=True):
        out, _ = step00.forward(rounded(gain * q), rounded(gain * k), v, rung="matrix")
        found[name].append((out - exact).abs().max().item())
fig, ax = plt.subplots(figsize=(6.2, 3.2))
for (name, errors), colour, look in zip(found.items(), COLOURS, ("o-", "s-"), strict=False):
    ax.loglog(sizes, errors, look, color=colour, label=name)
    at_2, at_200 = errors[0], errors[-1]
    print(f"{name:14}: error of out at scores of 2 {at_2:.1e}, at 200 {at_200:.1e}")
ax.set(xlabel="largest score", title="largest error of out")
ax.set_xticks(sizes, sizes)
ax.minorticks_off()
ax.legend(fontsize=8)
picture(fig, """Largest error of out against the largest score from 2 to 200, log-log: both
lines climb, that of tf32 two to three decimal digits above that of float32.""")

# %% [markdown] slideshow={"slide_type": "subslide"}
# **Question 2.** A causal mask hides half of the scores. With the default tile for D = 64, which part of the tiles is
# visited at N = 512, and at 4096? Which part of these needs the mask?
#
# <details><summary>Answer</summary>
#
# A little more than half: tiles on the diagonal are visited whole. Each row of tiles has two of them, 64 keys each
# under 128 queries, however long the row; so their share shrinks like 1 / N.
#
# </details>

# %% slideshow={"slide_type": "fragment"}
Br, Bc = fwd_0_fused.TILES[2][64][:2]
for N in (512, 2048, 4096):
    visited = tiles(N, N, True, Br, Bc)
    share = len(visited) / (N // Br * (N // Bc))
    masked = sum(tile[2] for tile in visited) / len(visited)
    print(f"N = {N:4}: {share:.1%} visited, of these {masked:.1%} with the mask")


# %% [markdown] slideshow={"slide_type": "subslide"}
# **Question 3.** On a GPU, in bfloat16 with D = 128: which of torch's own kernels does the forward come near? And the
# backward, with its 7 products where 5 are counted?
#
# <details><summary>Answer</summary>
#
# An expectation for the forward: above `sdpa-flash`, FlashAttention-2 in CUDA C++ with `mma.sync` on every GPU, as on an H200
# Triton multiplies with `wgmma` (part 4); and well below `sdpa-cudnn`, whose kernels let some warps only copy and others only
# compute. The backward does 7 / 5 of the counted work, so it can show at most 5 / 7 of the speed at which it multiplies: beside
# `sdpa-flash` it should do worse than the forward. The last line over each picture says how it came out.
#
# </details>

# %% slideshow={"slide_type": "fragment"}
def measured_speed(kernel, pass_):
    """TFLOP/s of a kernel and its peers in one run of the committed measurements."""
    at = {"pass": pass_, "dtype": "bf16", "D": 128, "causal": False, "n_gpus": 1}
    at |= {"options": {}, "timing": "interleaved"}
    fresh = fingerprint.fresh(rows.read())
    found = [r for r in fresh if all(r[name] == value for name, value in at.items())]
    own = [r for r in found if r["kernel"] == kernel]
    if not own:
        return print("no rows yet")
    last = max(own, key=lambda r: (r["run"], r["N"]))
    found = [r for r in found if r["run"] == last["run"] and r["kernel"] in (kernel, None)]
    at_longest = [r for r in found if r["N"] == last["N"]]
    tflops = {r["kernel"] or r["peer"]: r["tflops"] for r in at_longest}
    print(f"N = {last['N']}, TFLOP/s:", {name: round(x) for name, x in tflops.items()})
    for peer in ("sdpa-flash", "sdpa-cudnn"):
        if peer in tflops:
            print(f"{tflops[kernel] / tflops[peer]:.2f} of {peer}", end="  ")
    alt = f"TFLOP/s against N of {kernel} and its peers on {last['gpu']}."
    return picture(plots.speed_lines(found), alt)


measured_speed("fwd_0_fused", "fwd")

# %% slideshow={"slide_type": "fragment"}
measured_speed("bwd_0_fused", "bwd")

# %% [markdown] slideshow={"slide_type": "slide"}
# ## 8. Summary
#
# - A program works on tiles. Threads, registers, shared memory, barriers and instructions are the compiler's; pointers,
#   masks, tile sizes, and who owns which result are yours.
# - Masks keep a tile inside its tensor, and `other` must be neutral for what follows. Nobody checks a store.
# - Two loops over one text: only tiles on the diagonal, and the ragged last one, pay for a mask.
# - Two passes in the backward: 7 products instead of 5, no atomics, the same bits each time, grouped heads for free.
# - The interpreter proves formulas and edges. Races, bfloat16 and speed need the GPU.
#
# **Ask yourself**
#
# 1. Why may `load_tile` fill K_j beyond the last key with 0, though a softmax needs -inf there?
# 2. What does `full // Bc * Bc` do at a ragged end when there is no causal mask?
# 3. Which results would change if two programs of `forward_kernel` ran in the other order?
# 4. Why is `CAUSAL` a constant of the compiler and Nk an argument?
# 5. With 8 query heads a key head, how many programs write dK_j, and how many query tiles does each visit?
#
# **Go further**
#
# - ★ (15 minutes) Fold log2(e) into the scale and use `tl.exp2` in `online_update`, with lse turned back at the end.
#   Then run the case `scores_200`: what does one more rounding of scale cost in float32 when scores are 200, and when
#   only the forward does it?
# - ★★ (1 hour, GPU) `@triton.autotune` over tiles, `num_warps` and `num_stages`. What must be in `key`,
#   and why not N?
# - ★★★ (a weekend, GPU) Load K_j and V_j by tensor descriptors (`tl.make_tensor_descriptor`), so that an H100
#   copies tiles by TMA. Which masks become needless, and what does a descriptor demand of the strides?
#
# **Read:** `papers/flash_attention_2.md`; Triton's tutorial on fused attention.
#
# **Next:** [04_ring.ipynb](04_ring.ipynb), where this kernel is the block that every rank computes.
