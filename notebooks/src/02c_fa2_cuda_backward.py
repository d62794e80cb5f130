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
# # 02c. The backward pass in CUDA C++
#
# ## 1. The question
#
# *The gradients need P, and P was never stored. What is kept instead, who adds up which gradient, and why are two runs
# not equal to the last bit?*
#
# ![Left, P as a dashed square, never stored; beside it lse, one number a row. Right, four blocks walk down their columns
# of P: each owns its dK and dV, all add to dQ.](../notebooks/figures/question_02c.png)

# %% jupyter={"source_hidden": true} slideshow={"slide_type": "skip"}
import steps  # first: it chooses the engine
import functools
import heapq
import itertools
import math
import re
import tempfile
import textwrap
from pathlib import Path

import matplotlib.pyplot as plt
import torch
from IPython.display import display

from reference import cases, error, mutants
from steps import checks
from steps import step02_fa2_cuda as step02
from steps.bench import cost, rows, timing
from steps.figures.plots import COLOURS, FAINT, GREYS, INK, style
from steps.step02_fa2_cuda import calls, emulator, ladder, nvrtc, works
from steps.figures.picture import unchecked as picture
from steps.workbook import check, edited, one_rung, show
from steps.workbook import hint, solution  # noqa: F401  for you, in part 5
from steps.workbook.listing import Source

# %% [markdown] slideshow={"slide_type": "subslide"}
# - **Before you start:** notebook 00, *The backward, by hand*; 02a (a kernel in CUDA C++, the emulation); for rung 1 also
#   02b (`mma`, `ldmatrix`).
# - **Time:** about an hour to read, an hour more with the exercises.
# - **Hardware:** any computer with Linux (or WSL2) and g++; on a GPU the cells that say "engine" run on it.
# - **Code:** `steps/step02_fa2_cuda/`, rungs `bwd_0_scalar.cu` and `bwd_1_fa2.cu`.
#   **Tests:** `pytest tests/test_step02_fa2_cuda.py`.
# - **Paper:** FlashAttention-2 (2307.08691), restated in `papers/flash_attention_2.md`. Words: `reference/glossary.md`.

# %% slideshow={"slide_type": "skip"}
torch.set_num_threads(1)  # small tensors: one thread is faster
torch.set_printoptions(precision=2, sci_mode=False)
style()
gpu = cost.GPUS["NVIDIA H200"]
print(steps.engine.describe())


def code(file, *parts):
    """Functions of a kernel's file as one block; of (function, first, last) only the lines
    from the one that contains the text `first` to the one that contains `last`."""
    texts = []
    for part in parts:
        function, first, last = part if isinstance(part, tuple) else (part, "", None)
        lines = show(file, function).splitlines()
        begin = next(n for n, line in enumerate(lines) if first in line)
        end = len(lines)
        if last:
            end = next(n for n, line in enumerate(lines) if n >= begin and last in line)
        texts.append(textwrap.dedent("\n".join(lines[begin : end + 1])))
    block = Source("\n\n".join(texts))
    block.language = "cpp"
    return block


# %% [markdown] slideshow={"slide_type": "slide"}
# ## 2. The problem, measured
#
# Between forward and backward, autograd keeps what the gradients will need. For standard attention that includes P, N x
# N numbers a head. The next cell adds up the bytes of all that autograd saves.


# %% slideshow={"slide_type": "fragment"}
def standard(q, k, v):
    return torch.softmax(q @ k.mT / math.sqrt(q.shape[-1]), -1) @ v


def kept_bytes(attention, N, D=32):
    """KiB that autograd keeps for the backward of one head."""
    options = {"device": steps.engine.device, "requires_grad": True}
    q, k, v = (torch.randn(1, 1, N, D, **options) for _ in range(3))
    kept = {}

    def note(x):
        kept[x.untyped_storage().data_ptr()] = x.untyped_storage().nbytes()
        return x

    with torch.autograd.graph.saved_tensors_hooks(note, lambda x: x):
        attention(q, k, v)
    return sum(kept.values()) / 1024


lengths = (64, 128, 256, 512, 1024)
kept = {"standard": [kept_bytes(standard, N) for N in lengths]}
kept["attention"] = [kept_bytes(step02.attention, N) for N in lengths]
for N, most, least in zip(lengths, *kept.values(), strict=True):
    print(f"N = {N:4}: standard keeps {most:5.0f} KiB, stage 02 {least:4.0f}")
print("of which lse at N = 1024: 4 KiB, and P would be", f"{4 * 1024**2 / 1024:.0f} KiB")

# %% jupyter={"source_hidden": true} slideshow={"slide_type": "subslide"}
fig, ax = plt.subplots(figsize=(6.4, 3.3), layout="constrained")
for name, look, colour, says in (
    ("standard", "o-", COLOURS[1], "standard: q, k, v and P"),
    ("attention", "D-", COLOURS[0], "stage 02: q, k, v, out and lse"),
):
    ax.loglog(lengths, kept[name], look, color=colour, label=says)
lse_alone = [4 * N / 1024 for N in lengths]
ax.loglog(lengths, lse_alone, ":", color=INK, label="lse alone: one number a row")
ax.set(xlabel="N", title="kept for the backward, one head of D = 32, KiB")
ax.set_xticks(lengths, lengths)
ax.set_yticks((1, 10, 100, 1000), (1, 10, 100, 1000))
ax.minorticks_off()
ax.legend(fontsize=8)
picture(fig, """Bytes kept for the backward against N on log-log axes. Standard attention
bends up to slope 2, stage 02 rises with slope 1 and stays below throughout. A dotted line
for lse alone lies far under both.""")

# %% [markdown] slideshow={"slide_type": "fragment"}
# At N = 1024 standard attention keeps 4480 KiB for one head and stage 02 keeps 516. What replaces P is lse: 4 KiB. The
# price is arithmetic: S has to be multiplied out again.

# %% [markdown] slideshow={"slide_type": "slide"}
# ## 3. The idea: recompute P, and let each gradient be a sum over tiles
#
# **Claim.** With lse kept, every entry of P can be made again alone, and all gradients are sums over entries:
#
# $$P_{ij} = e^{S_{ij} - \mathit{lse}_i} \qquad dV = P^\top dO \qquad dP = dO\, V^\top$$
#
# $$\mathit{delta}_i = \sum_x dO_{ix} O_{ix} \qquad dS = P \circ (dP - \mathit{delta}) \qquad
# dQ = \mathit{scale}\, dS\, K \qquad dK = \mathit{scale}\, dS^\top Q$$
#
# **Why lse suffices.** Softmax is $e^{S - m} / l$; as $m + \log l = \mathit{lse}$, one number a row does for the two:
# $e^{S - \mathit{lse}}$. And lse is final, so nothing is rescaled.
#
# **Why delta.** Raising one score takes weight from the whole row in proportion to P. A unit of such weight is worth
# $\sum_j P_{ij} dP_{ij}$, and as $dP = dO\,V^\top$ this is $dO_i \cdot O_i$, which needs no P.
#
# Notebook 00 derives each line. Here each is checked against autograd on its six tokens, the tempting one without delta
# first.

# %% slideshow={"slide_type": "subslide"}
N, d = 6, 2
Q = torch.tensor([[1.0, 2], [0, 1], [-1, 0], [2, -1], [1, 1], [3, 1]])
K = torch.tensor([[0.0, 1], [1, 0], [-1, 1], [1, 2], [2, 0], [0, -1]])
V = torch.tensor([[0.0, 6], [2, 0], [4, 6], [6, 4], [8, 0], [10, 6]])
dO = torch.tensor([[1.0, 0], [0, 1], [1, 1], [2, 0], [0, -1], [1, -1]])
scale, close = 1 / math.sqrt(d), functools.partial(torch.allclose, atol=1e-5)

leaves = [x.clone().requires_grad_() for x in (Q, K, V)]
want_dQ, want_dK, want_dV = torch.autograd.grad(standard(*leaves), leaves, dO)
S = scale * Q @ K.T  # (N, N)
lse = S.logsumexp(-1)  # (N,), kept by the forward
O = S.softmax(-1) @ V  # (N, d), kept too

P = (S - lse[:, None]).exp()  # recomputed
dV, dP = P.T @ dO, dO @ V.T  # (N, d), (N, N)
print("P:", close(P, S.softmax(-1)), " dV:", close(dV, want_dV))
tempting = scale * (P * dP) @ K
print("dQ without delta:", close(tempting, want_dQ), end="; ")
print(f"row 5 is {tempting[5]}, should be {want_dQ[5]}")
delta = (dO * O).sum(-1)  # (N,)
dS = P * (dP - delta[:, None])  # (N, N)
dQ, dK = scale * dS @ K, scale * dS.T @ Q
print("dQ:", close(dQ, want_dQ), " dK:", close(dK, want_dK), end="  ")
print("delta = rowsum(P dP):", close(delta, (P * dP).sum(-1)))
print("delta:", delta, " row sums of dS are 0:", close(dS.sum(-1), torch.zeros(N)))

# %% jupyter={"source_hidden": true} slideshow={"slide_type": "subslide"}
fig, axes = plt.subplots(1, 3, figsize=(8.4, 3.0), layout="constrained")
panels = {"P": P, "dP - delta": dP - delta[:, None], "dS = P (dP - delta)": dS}
for ax, (title, matrix) in zip(axes, panels.items(), strict=True):
    limit = matrix.abs().max()
    ax.imshow(matrix, cmap=plt.get_cmap("RdBu", 13), vmin=-limit, vmax=limit)
    for i in range(N):
        for j in range(N):
            dark = matrix[i, j].abs() > 0.6 * limit
            ink = {"ha": "center", "va": "center", "color": "white" if dark else INK}
            ax.text(j, i, f"{matrix[i, j]:.2f}", fontsize=7, **ink)
    ax.set(title=title, xlabel="key j", xticks=range(N), yticks=range(N))
    ax.grid(False)
axes[0].set_ylabel("query i")
picture(fig, """Three 6 x 6 tables of numbers on blue for positive and red for negative: P,
dP minus delta, and their product dS. dS is large only where P is not small: in row 5,
+1.52 at key 4 and -1.04 at key 3.""")

# %% [markdown] slideshow={"slide_type": "fragment"}
# Row 5 of dS: a larger score of key 4 raises the loss (1.52), a larger one of key 3 takes weight from it and lowers the
# loss (-1.04). The row adds up to 0, since weights are only moved.

# %% [markdown] slideshow={"slide_type": "subslide"}
# ### Whose gradient stays on the chip?
#
# A tile of P and dS adds to dV_j and dK_j (a sum over queries) *and* to dQ_i (a sum over keys). Whichever loop is
# outside, one of the sums crosses blocks.

# %% jupyter={"source_hidden": true} slideshow={"slide_type": "fragment"}
fig, axes = plt.subplots(1, 2, figsize=(8, 3.6), layout="constrained")
for ax, by_keys in zip(axes, (True, False), strict=True):
    own, shared = ("dK dV", "dQ +=") if by_keys else ("dQ", "dK dV\n+=")
    looks = {"fontsize": 8, "ha": "center", "va": "center"}
    for n in range(4):
        box = {"facecolor": COLOURS[n], "alpha": 0.5, "edgecolor": "white"}
        for m in range(4):
            corner = (n, m) if by_keys else (m, n)
            ax.add_patch(plt.Rectangle(corner, 1, 1, lw=2, **box))
        ends = ((n + 0.5, 3.9), (n + 0.5, 0.1))
        ends = ends if by_keys else [end[::-1] for end in ends]
        ax.annotate("", *ends, arrowprops={"arrowstyle": "->", "color": INK})
        side, below = (4.4, n + 0.5), (n + 0.5, 4.35)
        ax.text(*(below if by_keys else side), own, bbox=box, **looks)
        ax.text(*(side if by_keys else below), shared, **looks)
    ax.set(xlim=(0, 5), ylim=(4.7, 0), aspect="equal", xticks=[], yticks=[])
    ax.set_ylabel("query tiles i")
    ax.set_title("key tiles outside" if by_keys else "query tiles outside")
    ax.grid(False)
    ax.spines[:].set_visible(False)
picture(fig, """Two grids of four query tiles by four key tiles. Left: a colour a column,
one block each, walking down; dK and dV stand below each column on its colour, and dQ += at
the end of each row on white, since all four blocks add to it. Right: a colour a row; dQ on
its colour at the end of each row, dK dV += on white below.""")

# %% [markdown] slideshow={"slide_type": "subslide"}
# On its colour: kept in the block's registers, written once. On white: added to by *all* blocks, which needs **atomic
# additions**: in a plain `dq[e] += x` another block may write between the read and the write. Key tiles outside is
# cheaper: blocks add to one matrix, not two. A third way, that of stages 01 and 03, is both orders, in two kernels.


# %% slideshow={"slide_type": "fragment"}
def count(Nq, Nk, D, Br, Bc):
    """{order: (products of Br x Bc x D, atomic additions)} of one head."""
    query_tiles, key_tiles = -(-Nq // Br), -(-Nk // Bc)
    tiles = query_tiles * key_tiles
    return {
        # S, dP, dV, dK and dQ; blocks add to dQ, or else to dK and dV
        "key tiles outside": (5 * tiles, key_tiles * Nq * D),
        "query tiles outside": (5 * tiles, query_tiles * 2 * Nk * D),
        "both, one after the other": (7 * tiles, 0),  # S and dP are needed twice
    }


for order, (products, atomics) in count(4096, 4096, 64, 64, 64).items():
    print(f"{order:26} {products:6} tile products,",
          f"{atomics / 1e6:5.1f} million numbers added atomically")

# %% [markdown] slideshow={"slide_type": "subslide"}
# ### What atomics cost: the last bits
#
# An atomic addition loses nothing, but additions happen in their order of arrival, and in floating point the order
# counts. The emulation runs one block after the other in an order that we choose, so we can watch:


# %% slideshow={"slide_type": "fragment"}
def gradients(n, blocks, seed=0):
    """(dq, dk, dv) of two heads of n tokens, D = 32, in the emulation, tile (16, 16)."""
    q, k, v, dout = torch.randn(4, 1, 2, n, 32, generator=torch.Generator().manual_seed(0))
    out, lse = calls.forward(q, k, v, rung="scalar")
    with emulator.schedule(blocks=blocks, seed=seed):
        return calls.backward(dout, q, k, v, out, lse, rung="scalar")


large, one = torch.tensor(1e8), torch.tensor(1.0)
print(f"(1e8 + 1) - 1e8 = {large + one - large:.0f}   ",
      f"(1e8 - 1e8) + 1 = {large - large + one:.0f}")
first = gradients(67, "forward")
orders = {"forward again": ("forward", 0), "reverse": ("reverse", 0)}
orders |= {f"random {seed}": ("random", seed) for seed in range(1, 4)}
print(f"elements whose bits change, of {first[0].numel()}, against blocks in order:")
for says, order in orders.items():
    pairs = zip(gradients(67, *order), first, strict=True)
    dq, dk, dv = (int((x != y).sum()) for x, y in pairs)
    print(f"  {says:14} dq {dq:5}   dk {dk}   dv {dv}")
difference = (first[0] - gradients(67, "reverse")[0]).abs().max()
largest = first[0].abs().max()
print(f"dq, forward against reverse: at most {difference:.1e}, largest entry {largest:.2f}")

# %% [markdown] slideshow={"slide_type": "fragment"}
# dk and dv keep every bit: each is summed by one thread, in one order. In dq about half of the elements change, by at
# most 1.2e-07 where the largest entry is 1.04: noise for training, but a nuisance in debugging. Part 4 ends with the
# cure.

# %% [markdown] slideshow={"slide_type": "slide"}
# ## 4. From algorithm to code
#
# ### Rung 0, `scalar`: a thread owns a key row
#
# FlashAttention-2, Algorithm 2; in brackets the paper's lines, corrected (`papers/errata.md`, E14: delta has N entries, not
# d; E15: the scale is put back).
#
# | line | what it does | in `bwd_0_scalar.cu` |
# |---|---|---|
# | [4] | delta = rowsum(dO ∘ O) | `attention_delta`, a kernel of its own; `row_delta` (yours, in part 5) |
# | [5–7] | for each tile of Bc keys: K_j, V_j; dK_j = dV_j = 0 | the launch; `load_tile`; registers `dK_j`, `dV_j` |
# | [8–9] | for each tile of Br queries: Q_i, dO_i, lse_i, delta_i | the loop over `i`; `load_tile`, `load_column` |
# | [10–11] | S, then P = exp(S - lse_i) | `dot`, `expf` |
# | [12–14] | dV_j += Pᵀ dO_i; dP = dO_i V_jᵀ; dS | `attention_backward`, the loop over `r` |
# | [15] | dQ_i += scale dS K_j, atomically | `add_dQ` (yours, in part 5) |
# | [16] | dK_j += scale dSᵀ Q_i | the same loop; scale once, in `store_row` |
# | [18] | dK_j, dV_j, written once | `store_row` |
#
# First the budget: dK_j and dV_j take 2 D registers, so that Q_i, dO_i, K_j, V_j and dS have to lie in shared memory.

# %% slideshow={"slide_type": "fragment"}
scalar = ladder.BACKWARD["scalar"]  # its row in the ladder
SCALAR = works.HERE / scalar.file
Br, Bc = scalar.tiles[0][64]  # the tile that a GPU gets by default
for D in (32, 64, 96, 128):
    block = {"threads": scalar.threads(D, Br, Bc), "shared": scalar.shared_bytes(D, Br, Bc)}
    try:
        usage = nvrtc.compile(SCALAR, {"D": D, "Br": Br, "Bc": Bc}, "sm_90a").usage
        block["registers"] = usage["attention_backward"].registers
        blocks = cost.occupancy(gpu.capability, **block).blocks
        says = f"{block['registers']} registers, {blocks} blocks of {Bc // 32} warps an SM"
    except RuntimeError as refused:
        says = "refused: " + re.search(r"spills \d+ bytes", str(refused))[0]
    print(f"D = {D:3}: 2 D = {2 * D:3}; shared memory {block['shared'] / 1024:5.1f} KiB;",
          f"ptxas for sm_90a: {says}")

# %% [markdown] slideshow={"slide_type": "subslide"}
# D = 96 is the end here. Every block of keys needs delta of all queries. Computed once, before everything, it costs one
# pass over dO and O. Then a tile loads one number a row in place of O.
#
# Thread t reads *its own* row of K, where in the forward all read the same. The spare word in `STRIDE = D + 1` spreads
# a warp's 32 rows over the 32 banks, as in stage 01. `seen_from` is the causal diagonal, seen from the key: query i
# sees key j if i >= j - (Nk - Nq).

# %% slideshow={"slide_type": "subslide"}
setup = ("attention_backward", "int tiles =", "float dK_j[D]")
loop = ("attention_backward", "for (int i = first", "add_dQ(")
code("bwd_0_scalar", "load_tile", "load_column", "dot", "store_row", setup, loop)

# %% [markdown] slideshow={"slide_type": "subslide"}
# A row that sees no key has lse = -inf, but then no thread computes its P. The second barrier is what `add_dQ` needs: it sums
# over the keys of the *block*, and every key belongs to another thread. On our six tokens, two blocks of three keys:

# %% slideshow={"slide_type": "fragment"}
q, k, v, dout = (x[None, None] for x in (Q, K, V, dO))  # on the CPU, so it is emulated
out, lse = calls.forward(q, k, v, rung="scalar", tile=(2, 3))
got = calls.backward(dout, q, k, v, out, lse, rung="scalar", tile=(2, 3))
right = [close(a[0, 0], b) for a, b in zip(got, (dQ, dK, dV), strict=True)]
print("six tokens, dq dk dv:", right)

# %% [markdown] slideshow={"slide_type": "subslide"}
# ### Rung 1, `fa2`: five products on tensor cores
#
# 16-bit operands, sums in float32, as in 02b. A register of an `mma` operand holds two numbers that are neighbours along the
# index that is *summed*. In shared memory Q_i, dO_i, K_j and V_j have a token a row, P and dS a query a row. Where the
# summed index runs down the columns, the operand has to be transposed on its way:
#
# | product | sums over | first operand | second operand |
# |---|---|---|---|
# | S = Q_i K_jᵀ | d | Q_i as stored | K_j as stored |
# | dP = dO_i V_jᵀ | d | dO_i as stored | V_j as stored |
# | dV_j += Pᵀ dO_i | queries | P transposed | dO_i transposed |
# | dQ_i += dS K_j | keys | dS as stored | K_j transposed |
# | dK_j += dSᵀ Q_i | queries | dS transposed | Q_i transposed |
#
# K_j, Q_i, dO_i and dS are needed both ways, from one copy each: `ldmatrix.trans` hands out the transpose of each 8 x 8
# piece. With it a lane of P has two neighbouring queries of one key, as dV_j, a sum over queries, asks for. Below, a
# tile that counts 0, 1, 2, ...; then `add_product`, which serves all five.

# %% slideshow={"slide_type": "fragment"}
PIECES = """#include "ptx.cuh"
extern "C" __global__ void pieces(Global<const bf16> x, Global<uint32_t> stored,
                                  Global<uint32_t> transposed) {
  SharedMemory smem;
  Shared<bf16> tile = smem.array<bf16>(32 * 8);  // four pieces of 8 x 8, in a column
  int t = threadIdx.x;
  copy_16(tile + 8 * t, x + 8 * t, true);
  __syncthreads();  // a lane gets numbers of rows that others have copied
  uint32_t r[4];
  ldmatrix_x4(r, tile + 8 * t);
  stored[t] = r[0];  // of the first piece
  ldmatrix_x4_trans(r, tile + 8 * t);
  transposed[t] = r[0];
}"""
x, held = torch.arange(256.0).bfloat16(), torch.zeros(2, 32, dtype=torch.int32)
with tempfile.TemporaryDirectory() as folder:
    file = Path(folder) / "pieces.cu"
    file.write_text(PIECES)
    shape = {"grid": 1, "block": 32, "shared_bytes": 512, "macros": {}}
    emulator.launch(file, "pieces", [x, *held], **shape)
numbers = held.view(torch.bfloat16).reshape(2, 32, 2).int()  # two in each lane's register
as_stored, transposed = numbers.tolist()
for t in (0, 1, 4):
    print(f"lane {t}: {as_stored[t]} as stored, {transposed[t]} transposed")

# %% jupyter={"source_hidden": true} slideshow={"slide_type": "subslide"}
fig, axes = plt.subplots(1, 2, figsize=(7.4, 3.7), layout="constrained")
panels = {"ldmatrix": as_stored, "ldmatrix.trans": transposed}
for ax, (title, held) in zip(axes, panels.items(), strict=True):
    for t, pair in enumerate(held):
        look = {"facecolor": COLOURS[t] if t < 4 else FAINT, "edgecolor": "white"}
        for number in pair:
            i, j = divmod(number, 8)
            ax.add_patch(plt.Rectangle((j, i), 1, 1, alpha=0.7, **look))
            ax.text(j + 0.5, i + 0.5, t, ha="center", va="center", fontsize=9, color=INK)
    ax.set(xlim=(0, 8), ylim=(8, 0), aspect="equal", xticks=[], yticks=[])
    ax.set(title=f"{title}: which lane gets it", xlabel="key", ylabel="query")
    ax.grid(False)
picture(fig, """An 8 x 8 piece of P, a query a row, with the number of the lane that gets
each entry. By ldmatrix lanes 0 to 3 share the first row, two neighbouring keys each. By
ldmatrix.trans they share the first column, two neighbouring queries each.""")

# %% slideshow={"slide_type": "subslide"}
show("bwd_1_fa2", "add_product")

# %% [markdown] slideshow={"slide_type": "subslide"}
# ### What stays in registers, what goes through shared memory
#
# In the forward P never left the registers: the warp that made 16 rows of S multiplied them with V. Here dV_j sums over
# queries, and dQ_i over keys, that *other warps* hold. So P and dS go to shared memory in 16 bits, and all read them
# back: hence a second barrier a step. dK_j and dV_j stay in registers throughout; dQ_i takes its own when S and dP are
# done with. The budget, with FlashAttention-2's tiles:


# %% slideshow={"slide_type": "fragment"}
def piece(M, N, warps):
    """Rows and columns of an M x N product that a warp has: Part<M, N> of bwd_1_fa2.cu."""
    down = max(1, M // 32)
    while N % (warps // down * 16):
        down *= 2
    return M // down, N // (warps // down)


FA2 = works.HERE / "bwd_1_fa2.cu"
sizes = {"B": 1, "H": 1, "Hk": 1, "Nq": 4096, "Nk": 4096, "dtype": torch.bfloat16}
sizes |= {"shared_limit": gpu.multiprocessor.shared_per_block, "processors": gpu.sms}
for D in ladder.BACKWARD["fa2"].head_dims:
    _, launched, _ = rows.geometry(FA2.stem, D=D, causal=False, **sizes)
    kernel, _, threads, shared, macros = launched
    Br, Bc, warps = macros["Br"], macros["Bc"], threads // 32
    S, dV, dQ_i = (math.prod(piece(*x, warps)) // 32 for x in ((Br, Bc), (Bc, D), (Br, D)))
    usage = nvrtc.compile(FA2, macros, "sm_90a").usage[kernel]
    block = {"threads": threads, "shared": shared, "registers": usage.registers}
    blocks = cost.occupancy(gpu.capability, **block).blocks
    print(f"D = {D:3}, tile {Br:3} x {Bc:3}: registers: S, dP {2 * S:3},",
          f"dV, dK {2 * dV:3}, dQ {dQ_i}; ptxas {usage.registers}, spills {usage.spills:2}",
          f"bytes; {shared / 1024:.0f} KiB; {blocks} block an SM")
print(f"a warp's piece at D = 64: {piece(128, 128, 8)} of S, {piece(128, 64, 8)} of dV")

# %% slideshow={"slide_type": "subslide"}
code("bwd_1_fa2", ("attention_backward", "Part<Bc, D> dK", "i = next_i"))

# %% [markdown] slideshow={"slide_type": "subslide"}
# ### Before and after: delta, lse, dq
#
# In `attention_delta` D / 8 lanes share a row and add up by shuffles. The kernel also multiplies lse by log₂ e, since
# the chip computes 2ˣ. For a row that sees no key or lies past the end it stores lse = +inf: then P = 0 without a test
# in the loop.
#
# dq is added up in float32. Of 16 columns a lane owns c, c + 1, c + 8, c + 9; stored side by side they are one addition
# of 16 bytes on Hopper. Afterwards `attention_dq` restores the order, multiplies by the scale and rounds, once.

# %% slideshow={"slide_type": "fragment"}
in_order = ("attention_dq", "uint32_t x[4]", "store_pair(to + 8")
display(code("bwd_1_fa2", "add_dQ", in_order))
generator = torch.Generator().manual_seed(0)
terms = torch.randn(32, 4000, generator=generator).bfloat16()  # of 32 key tiles: N = 4096
in_bf16 = torch.zeros(4000, dtype=torch.bfloat16)
for term in terms:
    in_bf16 += term
exact = terms.double().sum(0)
sums = {"rounded once": terms.float().sum(0).bfloat16(), "rounded 32 times": in_bf16}
for says, total in sums.items():
    largest = (total.double() - exact).abs().max()
    print(f"sums of 32 in bf16, {says:16}: largest error {largest:.3f}")
numbers = 4096 // 128 * 4096 * 64 / 1e6
print(f"a head of N = 4096, D = 64: {numbers:.1f} million numbers",
      f"in {numbers / 4:.1f} million additions of 16 bytes")

# %% [markdown] slideshow={"slide_type": "subslide"}
# ### What it buys: shared memory
#
# The emulation counts **wavefronts**: what the 32 banks deliver in one cycle (a compiler that joins loads needs fewer).
# Multiply-adds a wavefront, times the wavefronts a second of all SMs, is a roof over a rung. One `ldmatrix` feeds
# several `mma`s, a scalar load one multiply-add a lane.


# %% slideshow={"slide_type": "fragment"}
def roof(rung, D, N):
    """TFLOP/s on an H200 if its shared memory never rests, by one head's wavefronts."""
    dtype = torch.float32 if rung == "scalar" else torch.bfloat16
    generator = torch.Generator().manual_seed(0)
    q, k, v, dout = torch.randn(4, 1, 1, N, D, generator=generator).to(dtype)
    out, lse = calls.forward(q, k, v, rung=rung)
    tile = ladder.BACKWARD[rung].tiles[0][D]  # on a GPU
    with emulator.count_conflicts() as counted:
        calls.backward(dout, q, k, v, out, lse, rung=rung, backward_tile=tile)
    wavefronts = sum(wavefronts for _, wavefronts in counted.values())
    multiply_adds = 5 * N * N * D / wavefronts
    # An SM does 4096 bf16 operations, or 1 wavefront, a cycle.
    tflops = gpu.half_tflops / 4096 * 2 * multiply_adds
    print(f"{rung:6} D = {D:3}: {multiply_adds:3.0f} multiply-adds a wavefront,",
          f"roof {tflops:5.1f} TFLOP/s")
    return tflops


roofs = {("scalar", 64): roof("scalar", 64, 64)}
roofs |= {("fa2", D): roof("fa2", D, 256) for D in (64, 128)}

# %% [markdown] slideshow={"slide_type": "subslide"}
# ### Grouped heads
#
# With Hk < H, several query heads share a key head, and dK, dV are sums over them too. Rung 0 copies k and v for every
# query head and adds up afterwards. Rung 1 has a block for each tile of a *key* head, and its loop runs over the
# group's query heads. But where so few blocks would not fill a GPU, a block takes one query head (HEADS_APART), and the
# parts of dk and dv are added afterwards.

# %% slideshow={"slide_type": "fragment"}
one, two = (torch.Generator().manual_seed(seed) for seed in (0, 1))
q, dout = torch.randn(2, 1, 8, 40, 32, generator=one).bfloat16()
k, v = torch.randn(2, 1, 2, 40, 32, generator=two).bfloat16()
out, lse = calls.forward(q, k, v, rung="fa2")
want = error.expected(q, k, v, dout)
got = calls.backward(dout, q, k, v, out, lse, rung="fa2")
got = dict(zip(("dq", "dk", "dv"), got, strict=True))
shapes = {name: tuple(x.shape) for name, x in got.items()}
print("8 query heads, 2 key heads:", shapes, "wrong:", error.failures(got, want))
for H, Hk in ((32, 32), (32, 8), (32, 1)):
    copies = 4 * H * 4096 * 64 * 4 / 2**20 if H > Hk else 0  # k, v, dk, dv in float32
    grouped = sizes | {"H": H, "Hk": Hk}
    _, launched, _ = rows.geometry(FA2.stem, D=64, causal=False, **grouped)
    blocks, apart = launched[1], launched[-1]["HEADS_APART"]
    parts = 2 * H * 4096 * 64 * 2 / 2**20 if apart else 0  # dk and dv in bf16
    print(f"H = {H}, Hk = {Hk:2}, N = 4096, D = 64: rung 0 adds {copies:3.0f} MiB,",
          f"rung 1 {parts:2.0f} MiB, in {blocks:4} blocks")

# %% [markdown] slideshow={"slide_type": "subslide"}
# ### Bit by bit: `deterministic=True`
#
# The cure for the last bits is an order: each dQ_i takes the key tiles one after the other, and a counter says whose turn
# it is. A GPU full of blocks that wait for one that has not started would wait for ever, and nothing promises that blocks
# start in the order of `blockIdx.x`. So a block takes its number when it starts.
#
# Below: by default the float32 sums depend on the order, as in rung 0; rounding to 16 bits hides most of it, not all. In
# turn every bit stays. (The waiting itself cannot be seen here, as emulated blocks never run at the same time.)

# %% slideshow={"slide_type": "fragment"}
code("bwd_1_fa2", "wait_for_turn", "pass_turn_on", "block_number")


# %% slideshow={"slide_type": "subslide"}
def fa2_gradients(blocks, seed=0, deterministic=False):
    """(dq before its rounding, dq, dk, dv) of two heads of 160 tokens in fp16, five key
    tiles, in the emulation: the three kernels of the backward, called one by one."""
    generator = torch.Generator().manual_seed(0)
    q, k, v, dout = torch.randn(4, 1, 2, 160, 32, generator=generator).half()
    out, lse = calls.forward(q, k, v, rung="fa2")
    with emulator.schedule(blocks=blocks, seed=seed):
        sums = calls.start_gradients(dout, out, lse, deterministic=deterministic)
        dk, dv = calls.add_gradients(sums, dout, q, k, v)
        return sums.dq_sum, calls.finish_dq(sums), dk, dv


for deterministic in (False, True):
    first = fa2_gradients("forward", deterministic=deterministic)
    print(f"deterministic={deterministic}: elements with other bits,",
          f"of {first[0].numel()}; dq's sum in float32, dq, dk, dv")
    for order in (("reverse", 0), ("random", 1), ("random", 2)):
        other = fa2_gradients(*order, deterministic=deterministic)
        changed = [int((a != b).sum()) for a, b in zip(other, first, strict=True)]
        print(f"    {order[0]:7} {order[1] or ' '}", changed)

# %% [markdown] slideshow={"slide_type": "subslide"}
# **What do turns cost?** All blocks of a head start at the same dQ_i, and have to queue. A model: a step takes time 1, and of
# that the turn, the additions and one product of five, takes 0.2. An SM takes the next block when it is free.


# %% slideshow={"slide_type": "subslide"}
def run(in_turn, tiles, heads, sms, causal):
    """(time until all is done, [(tile, i, start, wait from, turn from)] of every step) of
    heads of tiles x tiles."""
    free, done, visits = [0.0] * sms, {}, []
    for head, tile in itertools.product(range(heads), range(tiles)):
        now = heapq.heappop(free)
        last = tile if causal else 0
        for i in range(tiles - 1, last - 1, -1):  # from the last queries to the first
            ready = now + 0.8
            begin = max(ready, done.get((head, i), 0)) if in_turn else ready
            visits.append((tile, i, now, ready, begin))
            now = done[head, i] = begin + 0.2
        heapq.heappush(free, now)
    return max(free), visits

# %% jupyter={"source_hidden": true} slideshow={"slide_type": "subslide"}
fig = plt.figure(figsize=(8.6, 3), layout="constrained")
axes = fig.subplots(1, 2, sharex=True, sharey=True)
for ax, causal in zip(axes, (False, True), strict=True):
    for tile, i, start, ready, begin in run(True, 6, 1, 6, causal)[1]:
        for what, a, b, colour in (
            ("own work", start, ready, COLOURS[0]),
            ("waiting", ready, begin, COLOURS[1]),
            ("its turn", begin, begin + 0.2, INK),
        ):
            label = what if (tile, i) == (1, 5) else None
            ax.barh(tile, b - a, left=a, height=0.7, color=colour, label=label)
    ax.set(title="causal" if causal else "not causal", xlabel="time, in steps")
    ax.set(ylim=(5.6, -0.6), yticks=range(6))
axes[0].set_ylabel("key tile")
handles = axes[0].get_legend_handles_labels()
fig.legend(*handles, loc="outside lower center", ncols=3, fontsize=8)
picture(fig, """Six blocks of one head over time. Not causal: in its first step block j
waits j fifths of a step, later none; the last ends one step late. Causal: the same queue,
bars that get shorter with j.""")

# %% slideshow={"slide_type": "subslide"}
print("time in turn, of the time in any order, by the model: 16k tokens, 32 heads,",
      "tiles of 128, an H200's SMs")
for N in (512, 1024, 2048, 4096):
    time = functools.partial(run, tiles=N // 128, heads=32 * 16384 // N, sms=gpu.sms)
    ratios = [time(True, causal=c)[0] / time(False, causal=c)[0] for c in (False, True)]
    print(f"N = {N:4}: not causal x {ratios[0]:.2f}, causal x {ratios[1]:.2f}")
print(f"counters: {32 * 16384 // 128}, one for each dQ_i")
if steps.engine.name == "cuda":
    for causal in (False, True):
        q, k, v, dout = torch.randn(4, 4, 32, 4096, 64, device="cuda").bfloat16()
        options = {"causal": causal, "rung": "fa2"}
        out, lse = step02.forward(q, k, v, **options)
        call = functools.partial(step02.backward, dout, q, k, v, out, lse, **options)
        timed = {d: functools.partial(call, deterministic=d) for d in (False, True)}
        ms = {d: t.ms_median for d, t in timing.interleaved(timed, device="cuda").items()}
        print(f"measured here, N = 4096, causal {causal}: x {ms[True] / ms[False]:.2f}")
else:
    print("measured here: nothing, without a GPU")

# %% [markdown] slideshow={"slide_type": "fragment"}
# The queue forms once; then each block runs one turn behind the block before. That matters where blocks have few steps.
# The model leaves out what else a turn costs: two barriers a step, and additions that must have arrived before the
# counter moves.

# %% [markdown] slideshow={"slide_type": "slide"}
# ## 5. Write it yourself
#
# As in 02a, write the body in place of the line with `#error`: `check` compiles the kernel with it and runs some of the
# contract's cases. `hint("02.3")` to `hint("02.3", 3)` help, `solution("02.3")` is the stage's function.
#
# **Exercise 02.3: delta of one query.** Line [4] for one row, by one thread, in about three lines: dO and O point at the
# row's first number.
#
# **Exercise 02.2: one gradient that all blocks add to.** Line [15] for one tile, by all Bc threads of the block, in about
# five lines: dQ_i (rows, D) += scale dS (rows, keys) K_j (keys, D). `dS[r * Bc + j]` and `K[j * STRIDE + d]` lie in shared
# memory; `dq` points at the tile's first row, and its rows are D apart.

# %% slideshow={"slide_type": "fragment"}
row_delta = r"""
__device__ float row_delta(Global<const float> dO, Global<const float> O) {
#error Blank 02.3
}"""

check("02.3", row_delta)

# %% slideshow={"slide_type": "fragment"}
add_dQ = r"""
__device__ void add_dQ(Global<float> dq, Shared<float> dS, Shared<float> K, int rows,
                       int keys, float scale) {
#error Blank 02.2
}"""

check("02.2", add_dQ)

# %% [markdown] slideshow={"slide_type": "subslide"}
# **Exercise 02.7: an operand that is stored transposed** (rung 1). Which address does this lane give to `ldmatrix` for the 16 x
# 16 piece at (row, column) of a tile, if the *transpose* of the tile is the operand? Lane t gives row t % 8 of matrix t / 8, and
# `mma` wants the four matrices down the columns of the operand. The tile is swizzled: `swizzle<WIDTH>(r)`, XORed with a column.
# `show("bwd_1_fa2", "lane_row")` does it for an operand that is stored as it is multiplied. About four lines.

# %% slideshow={"slide_type": "fragment"}
lane_row_transposed = r"""
template <int WIDTH>
__device__ Shared<T> lane_row_transposed(Shared<T> tile, int row, int column) {
#error Blank 02.7
}"""

check("02.7", lane_row_transposed)

# %% [markdown] slideshow={"slide_type": "slide"}
# ## 6. Check it, then break it
#
# The contract's cases for rung 0, as far as they use head_dim 32 and square tiles, and some for rung 1:

# %% slideshow={"slide_type": "fragment"}
SOME = ("ragged_causal", "scores_200", "grouped_heads")
NAMES = "dq", "dk", "dv"
own = {rung: checks.supports_of(step02.SUPPORTS, rung) for rung in ("scalar", "fa2")}
for rung, supports in own.items():
    ran, failed, worst = 0, 0, dict.fromkeys(NAMES, 0.0)
    for case, dtype, reason in cases.select(supports):
        chosen = (case.D, case.tile) == (32, "square")
        if rung == "fa2":
            chosen = case.name in SOME
        if reason is None and chosen and dtype != torch.float16:
            x = cases.build(case, supports, dtype, steps.engine.device)
            want = error.expected(x.q, x.k, x.v, x.dout, causal=x.causal, scale=x.scale)
            got = one_rung.results(step02, rung, case, x)
            ran += 1
            failed += bool(error.failures(got, want))
            errors = error.errors(got, want)
            for name in NAMES:
                worst[name] = max(worst[name], errors[name] / (want.tolerance[name] or 1))
    worst = {name: round(x, 2) for name, x in worst.items()}
    print(f"{rung}, engine {steps.engine.name}: {ran} cases, {failed} failed;",
          "largest errors in units of the tolerance:", worst)


# %% slideshow={"slide_type": "skip"}
TILE = {"scalar": (16, 16), "fa2": (32, 32)}  # small, also on a machine with a GPU


def prepared(rung, name):
    """(inputs, what is expected, out, lse) of one of the contract's cases, on the CPU."""
    case, dtype = next(c for c in cases.CASES if c.name == name), own[rung]["dtypes"][0]
    x = cases.build(case, own[rung] | {"tiles": (TILE[rung],)}, dtype)
    want = error.expected(x.q, x.k, x.v, x.dout, causal=x.causal, scale=x.scale)
    out, lse = calls.forward(x.q, x.k, x.v, rung=rung, causal=x.causal, scale=x.scale)
    return x, want, out, lse


# %% slideshow={"slide_type": "skip"}
def grads(rung, x, out, lse):
    """The emulated kernel's gradients by name, with whatever is planted in it."""
    options = {"causal": x.causal, "scale": x.scale, "backward_tile": TILE[rung]}
    got = calls.backward(x.dout, x.q, x.k, x.v, out, lse, rung=rung, **options)
    return dict(zip(NAMES, got, strict=True))


def misconceptions(rung, x, want, got):
    """Which of the reference's mutants give these wrong gradients."""
    found = []
    for m in (m for m in mutants.MUTANTS if issubclass(m.kind, mutants.Backward)):
        try:
            wrong = m.run(x, TILE[rung], "fa2")
        except mutants.NotApplicable:
            continue
        distances = {name: (got[name] - wrong[name]).abs().max() for name in got}
        if all(distances[name] <= 2 * want.tolerance[name] for name in got):
            found.append(m.says)
    return found


# %% [markdown] slideshow={"slide_type": "subslide"}
# Now mistakes of one line each, planted in the CUDA text. **Which gradients will each spoil, and which of three cases
# notice?** Then the reference's mutants, the same mistakes in plain torch, are compared with the result.
#
# <details><summary>Answer</summary>
#
# dv needs neither delta nor a scale, but a wrong P spoils it; the diagonal is wrong only in a causal case with Nq !=
# Nk. A scale left out spoils its own gradient, P not transposed spoils dv. Without the barrier a warp reads what others
# have yet to write: P at once, for dv; whether dS comes in time depends on the order of the threads (try
# `emulator.schedule(threads="random")` around `grads`). Only a case with groups notices a mistake about groups.
# "Recognised by none": no mutant makes this mistake.
#
# </details>

# %% slideshow={"slide_type": "subslide"}
mistakes = {
    ("scalar", "delta left out"): ("P * (dP - delta_i[r])", "P * dP"),
    ("scalar", "dq without scale"): ("K, rows, keys, scale);", "K, rows, keys, 1);"),
    ("scalar", "diagonal at the top left"): ("tile * Bc + t - (Nk - Nq)", "tile * Bc + t"),
    ("fa2", "second barrier left out"): ("__syncthreads();  // P and dS are complete", ""),
    ("fa2", "P not transposed"): ("true, false>(dV, P_i", "false, false>(dV, P_i"),
    ("fa2", "one head of the group"): (" / Br + 1) * own", " / Br + 1)"),
}
names = ("ragged", "fewer_queries_causal", "grouped_heads")
inputs = {(rung, name): prepared(rung, name) for rung in TILE for name in names}
for (rung, says), change in mistakes.items():
    recognised = None
    print(f"{rung}: {says}")
    for name in names:
        x, want, out, lse = inputs[rung, name]
        with edited(ladder.BACKWARD[rung].file, change):
            got = grads(rung, x, out, lse)
        spoilt = error.failures(got, want)
        if spoilt and recognised is None:
            recognised = misconceptions(rung, x, want, got)
        verdict = f"spoils {', '.join(spoilt)}" if spoilt else "does not notice"
        print(f"    {name:21}{verdict}")
    print("    recognised:", "; ".join(recognised or ()) or "by none")

# %% [markdown] slideshow={"slide_type": "slide"}
# ## 7. Predict, then measure
#
# **Question 1.** With one key tile, one block adds to dq, and its bits cannot depend on the order of blocks. From how
# many key tiles on do they?
#
# <details><summary>Answer</summary>
#
# Three. Floating-point addition is commutative, a + b = b + a, and dq starts at 0, so that two tiles give the same bits
# in either order. It is not associative: (a + b) + c and (c + b) + a may differ.
#
# </details>

# %% jupyter={"source_hidden": true} slideshow={"slide_type": "fragment"}
tiles = (1, 2, 3, 4, 6, 8)
shares = []
for n in tiles:
    dq = [gradients(16 * n, blocks)[0] for blocks in ("forward", "reverse")]
    shares.append((dq[0] != dq[1]).float().mean().item())
fig, ax = plt.subplots(figsize=(6.0, 2.8), layout="constrained")
bars = ax.bar([str(n) for n in tiles], shares, color=COLOURS[0], width=0.6)
ax.bar_label(bars, [f"{share:.0%}" for share in shares], padding=2, fontsize=8)
ax.set(title="rung 0: share of dq that changes when blocks run backwards")
ax.set(xlabel="key tiles of 16", ylim=(0, 0.8), yticks=[])
ax.grid(False)
picture(fig, """Bars: with one and with two key tiles no element of dq changes when the
blocks run in reverse; from three tiles on a share that grows to well over half at eight
tiles.""")

# %% [markdown] slideshow={"slide_type": "subslide"}
# **Question 2.** On a GPU, does the same backward, run twice, give the same dq? Rung 0, rung 1, and rung 1 with
# `deterministic=True`; three key tiles and more.
#
# <details><summary>Answer</summary>
#
# Rung 0: no, the order is the hardware's. Rung 1: rounding hides most, so that single elements differ, or none. In turn:
# yes. In the emulation the order is the schedule's, so that two runs always agree.
#
# </details>

# %% slideshow={"slide_type": "fragment"}
ways = {
    "scalar": (torch.float32, {}),
    "fa2": (torch.float16, {}),
    "fa2, in turn": (torch.float16, {"deterministic": True}),
}
for says, (dtype, options) in ways.items():
    random = torch.randn(4, 1, 1, 400, 32, generator=torch.Generator().manual_seed(0))
    q, k, v, dout = random.to(steps.engine.device, dtype)
    rung = says.split(",")[0]
    out, lse = step02.forward(q, k, v, rung=rung)
    call = functools.partial(step02.backward, dout, q, k, v, out, lse, rung=rung, **options)
    differ = [int((x != y).sum()) for x, y in zip(call(), call(), strict=True)]
    print(f"engine {steps.engine.name}, two runs of {says}:",
          f"elements of dq, dk, dv that differ: {differ}")
in_float32 = [x.float() for x in (dout, q, k, v, out)]
try:
    step02.backward(*in_float32, lse, rung="scalar", deterministic=True)
except NotImplementedError as refusal:
    print(textwrap.fill(f"NotImplementedError: {refusal}", 110))

# %% [markdown] slideshow={"slide_type": "subslide"}
# **Question 3.** Part 4 put a roof over each rung. Which of them comes near its roof? And where do PyTorch's kernels lie,
# `sdpa-flash` (FlashAttention-2) and `sdpa-cudnn`: which may pass the roof over rung 1?
#
# <details><summary>Answer</summary>
#
# Rung 0 does, though an SM holds only three blocks of two warps (D = 64): its loads do not depend on each other, and
# many are under way at once. Rung 1 and `sdpa-flash` are one design and should lie together, below the roof: at two
# barriers a step all wait for the last. cuDNN can use Hopper's own tensor-core instruction, which takes operands from
# shared memory without `ldmatrix`: this roof is not over it, nor over `bwd_2` and `bwd_3`. Their own roof is counted in 02e.
#
# </details>

# %% jupyter={"source_hidden": true} slideshow={"slide_type": "fragment"}
WHO = {name: "bf16" for name in ("bwd_0_scalar", "bwd_1_fa2", "sdpa-flash", "sdpa-cudnn")}
WHO["bwd_0_scalar"] = "fp32"
measured = {who: {} for who in WHO}  # {who: {(D, causal, N): row}}, of files as they are
for r in rows.latest(rows.fresh(rows.read())):
    who = r["peer"] or r["kernel"]
    at = r["gpu"], r["n_gpus"], r["pass"], r["B"] * r["N"], r["options"], r["timing"]
    standard_grid = at == (gpu.name, 1, "bwd", 16384, {}, "interleaved")
    if standard_grid and r["dtype"] == WHO.get(who):
        measured[who][r["D"], r["causal"], r["N"]] = r
for who, of in measured.items():
    if not of:
        print(f"no rows of {who}, {WHO[who]}: on a GPU, python -m steps bench --stage 02")
    for D, causal in itertools.product((64, 128), (False, True)):
        r, roof_of_it = of.get((D, causal, 4096)), roofs.get((who.split("_")[-1], D))
        if r:
            share = f", {r['tflops'] / roof_of_it:4.0%} of its roof" if roof_of_it else ""
            print(f"{who:12} {WHO[who]} D = {D:3}, {'causal' if causal else 'full':6}",
                  f"{r['tflops']:6.1f} TFLOP/s, error {r['error']:.0e}{share}")

# %% jupyter={"source_hidden": true} slideshow={"slide_type": "subslide"}
fig, axes = plt.subplots(1, 2, figsize=(8.6, 3.5), layout="constrained", sharey=True)
looks = {
    "bwd_0_scalar": {"marker": "D", "color": COLOURS[1]},
    "bwd_1_fa2": {"marker": "o", "color": COLOURS[0]},
    "sdpa-flash": {"marker": "s", "color": GREYS[1], "ls": "--"},
    "sdpa-cudnn": {"marker": "^", "color": GREYS[2], "ls": "--"},
}
for ax, D in zip(axes, (64, 128), strict=True):
    for who in [who for who, of in measured.items() if of]:
        at = {N: r["tflops"] for (*at, N), r in measured[who].items() if at == [D, False]}
        ordered = sorted(at)
        ax.plot(ordered, [at[N] for N in ordered], label=f"{who}, {WHO[who]}", **looks[who])
    ax.axhline(roofs["fa2", D], color=INK, lw=1, ls=":")
    says = f"roof over rung 1: {roofs['fa2', D]:.0f}"
    ax.text(17000, roofs["fa2", D] - 8, says, fontsize=8, ha="right", va="top")
    ax.set_xscale("log", base=2)
    ax.set_xticks([512 * 2**n for n in range(6)], ("512", "1k", "2k", "4k", "8k", "16k"))
    ax.set(title=f"backward, D = {D}, not causal", xlabel="N", ylim=(0, 700))
axes[0].set_ylabel("TFLOP/s, H200")
handles = axes[0].get_legend_handles_labels()
fig.legend(*handles, loc="outside lower center", ncols=4, fontsize=8)
picture(fig, """TFLOP/s of the backward against N on an H200 for D = 64 and 128: the
measured kernels as lines, the roof that shared memory puts over rung 1 as a dotted
line.""")

# %% [markdown] slideshow={"slide_type": "slide"}
# ## 8. Summary
#
# - The forward keeps lse, one number a row; the backward makes P again from it, tile by tile, and rescales nothing.
# - delta, one number a row, is dO times O, computed by a kernel of its own before the rest.
# - One of the three gradients crosses blocks. With key tiles outside it is dq, added to atomically, in float32.
# - Tensor cores want operands along the summed index; three of the five products transpose. P and dS go through shared
#   memory, since the sums run over what other warps hold.
# - Atomic additions come in any order: from three key tiles on the last bits of dq depend on it. Turns fix them.
#
# **Ask yourself**
#
# 1. Why is dk multiplied by the scale once at the end, and dq, in rung 0, at every visit?
# 2. Suppose rung 0 left dq out. Why must both barriers of its loop stay all the same?
# 3. Why must dq be zero at the start, while dk and dv may hold anything?
# 4. With query tiles outside, what would a block own, and what would lie in its registers?
# 5. Suppose rung 1 computed Sᵀ = K_j Q_iᵀ, each warp with its own keys. Which product could take its operand straight from
#    registers? (Rung 2 does this.)
#
# **Go further**
#
# - ★ (15 minutes) Plant a `dq[e] +=` in rung 0 instead of the atomic addition. What does the emulation report, though it runs
#   one block after the other? What would a GPU compute?
# - ★★ (1 hour) Blocks queue because all start at the last dQ_i. Let each start at another one, and let the turns of dQ_i
#   begin with another tile. Try it in `run`; which order is free of waiting? What about a causal mask?
# - ★★★ (a weekend) Write the third way: a second kernel with query tiles outside that computes dq alone. Check that it
#   is bit-equal under every schedule, and count its products.
#
# **Read:** `papers/flash_attention_2.md`, Algorithm 2 and question 2 of the discussion.
#
# **Next:** [02d_fa2_cuda_hopper.ipynb](02d_fa2_cuda_hopper.ipynb), and Hopper's backward in
# [02e](02e_fa2_cuda_hopper_backward.ipynb); or on to Triton in [03a_triton_kernels.ipynb](03a_triton_kernels.ipynb).
