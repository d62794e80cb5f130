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
# # 02e. Hopper's backward: who reads from where
#
# ## 1. The question
#
# *From `bwd_1` to `bwd_2` the backward of 4,096 tokens becomes more than twice as fast. The arithmetic is the same. What
# changed, and what is the next limit?*
#
# ![The operands of the backward's five products. In bwd_1 warps fetch all ten. In bwd_2 the tensor cores read eight from
# shared memory; the first of dV and of dK lie in registers.](../notebooks/figures/question_02e.png)

# %% jupyter={"source_hidden": true} slideshow={"slide_type": "skip"}
import steps  # first: it chooses the engine
import itertools
import math
import operator
import textwrap
from collections import Counter

import matplotlib
import matplotlib.pyplot as plt
import torch

from reference import error
from steps.bench import ablations, cost, rows, timing
from steps.figures import measured, plots
from steps.figures.plots import COLOURS, GREYS, INK
from steps.step02_fa2_cuda import calls, emulator, ladder, nvrtc, works
from steps.figures.picture import unchecked as picture
from steps.workbook import Blank, check, edited, exercises, show
from steps.workbook import hint, solution  # noqa: F401  for you, in part 5
from steps.workbook.listing import Source

plots.style()
torch.set_num_threads(1)
h200 = cost.GPUS["NVIDIA H200"]
print(steps.engine.describe())
print(f"torch {torch.__version__}, matplotlib {matplotlib.__version__}")

# %% jupyter={"source_hidden": true} slideshow={"slide_type": "skip"}
fresh = rows.fresh(rows.read())  # of the files as they are
loads = rows.fresh(rows.read(timing="sustained"))
recorded = [row for row in rows.latest(fresh) if row["gpu"] == h200.name]
clocked = ablations.read("timeline")


def row_of(name, which="bwd", D=128, N=4096, causal=False):
    """The recorded row of a kernel ("bwd_1_fa2") or a peer, or None."""
    at = {"pass": which, "D": D, "N": N, "causal": causal, "dtype": "bf16"}
    at |= {"options": {}, "timing": "interleaved"}
    found = (r for r in recorded if name in (r["kernel"], r["peer"]))
    return next((r for r in found if at.items() <= r.items()), None)


def excerpt(file, *parts):
    """Parts of a kernel file, each from the line that contains one text to the line before
    the next that contains another."""
    lines, found = show(file).splitlines(), []
    for first, last in parts:
        begin = next(n for n, line in enumerate(lines) if first in line)
        end = next(n for n, line in enumerate(lines) if n > begin and last in line)
        found.append(textwrap.dedent("\n".join(lines[begin:end])).rstrip())
    result = Source("\n\n".join(found))
    result.language = "cpp"
    return result


# %% [markdown] slideshow={"slide_type": "subslide"}
# - **Before you start:** 02c (the backward's five products) and 02d (TMA, wgmma, descriptors).
# - **Time:** about an hour to read, an hour more with the exercises.
# - **Hardware:** any computer with Linux (or WSL2) and g++; Hopper is emulated. Speeds and watts are recordings from an
#   H200.
# - **Code:** `steps/step02_fa2_cuda/`, `bwd_1_fa2.cu`, `bwd_2_wgmma.cu`, `bwd_3_hopper.cu`. **Tests:**
#   `pytest tests/test_step02_fa2_cuda.py`.

# %% [markdown] slideshow={"slide_type": "slide"}
# ## 2. The problem, measured
#
# Three rungs of the backward, and PyTorch's two kernels. `bwd_1` is FlashAttention-2's design on `mma`; `bwd_2` has the
# same tiles and loops with TMA and wgmma.

# %% jupyter={"source_hidden": true} slideshow={"slide_type": "fragment"}
NAMES = "bwd_1_fa2 bwd_2_wgmma bwd_3_hopper sdpa-flash sdpa-cudnn".split()
NAMES = [name for name in NAMES if row_of(name)]  # a kernel that has changed has no row
LOOKS = {64: (COLOURS[5], GREYS[3], -0.2), 128: (COLOURS[0], GREYS[1], 0.2)}  # ours, theirs
matmul = (plots.ladder_numbers(fresh) or {}).get("matmul")


def draw_ladder(N=4096):
    fig, ax = plt.subplots(figsize=(7.4, 3.2), layout="constrained")
    for D, (ours, theirs, shift) in LOOKS.items():
        heights = [row_of(name, D=D)["tflops"] for name in NAMES]
        colours = [theirs if "sdpa" in name else ours for name in NAMES]
        x = [n + shift for n in range(len(NAMES))]
        bars = ax.bar(x, heights, width=0.38, color=colours, label=f"D = {D}")
        ax.bar_label(bars, fmt="%.0f", fontsize=8)
    ax.set_xticks(range(len(NAMES)), NAMES)
    ax.set_title(f"backward, N = {N}, not causal, bf16, TFLOP/s")
    ax.axhline(matmul, color=INK, ls="--", lw=1, label=f"matrix product: {matmul:.0f}")
    ax.set_ylim(0, 1.25 * matmul)
    ax.grid(axis="x", visible=False)
    ax.legend(fontsize=8, loc="upper left", ncols=3)
    return picture(fig, """Bars of TFLOP/s of the backward at D = 64 and 128. wgmma is about
    twice as high as fa2, and hopper a little higher. PyTorch's FlashAttention-2 is as high
    as fa2, cuDNN lower than wgmma.""")


# %% slideshow={"slide_type": "fragment"}
if matmul and {"bwd_1_fa2", "bwd_2_wgmma"} <= set(NAMES):
    for D in LOOKS:
        old, new = (row_of(name, D=D)["tflops"] for name in NAMES[:2])
        print(f"D = {D:3}: bwd_1 {old:.0f}, bwd_2 {new:.0f} TFLOP/s: x {new / old:.2f}")
    result = draw_ladder()
else:
    result = print("rows are missing: on an H200, python -m steps.bench bwd")
result

# %% [markdown] slideshow={"slide_type": "fragment"}
# 02c put a roof over `bwd_1`: its warps fetch every operand by `ldmatrix`, and shared memory gives one wavefront a clock.
# wgmma reads shared memory without `ldmatrix`. So how high is the new roof, and does the kernel come nearer to it?

# %% [markdown] slideshow={"slide_type": "slide"}
# ## 3. The idea: bytes a clock
#
# A wgmma multiplies 64 x 16 numbers by 16 x n. At the datasheet's rate, 4096 FLOP a clock and multiprocessor (SM), that takes
# n / 2 clocks. It reads its second operand, 32 n bytes, from shared memory, and its first, 2048 bytes, from there or from
# registers. Shared memory delivers 128 bytes a clock.
#
# **Claim 1.** With n = 64 and both operands in shared memory, a product needs *all* of its bandwidth. Nothing else can
# be read or written meanwhile. Only a first operand in registers, or a wider n, leaves bandwidth for others.

# %% slideshow={"slide_type": "fragment"}
BANDWIDTH, TENSOR = 128, 4096  # bytes, FLOP: a clock and SM


def wgmma(n, first_in_registers):
    """(clocks, bytes of shared memory) of one instruction, 64 x 16 times 16 x n."""
    first = 0 if first_in_registers else 64 * 16 * 2
    return 2 * 64 * 16 * n // TENSOR, first + 16 * n * 2


for n in (64, 128):
    for registers in (False, True):
        clocks, bytes_ = wgmma(n, registers)
        where = "registers    " if registers else "shared memory"
        print(f"n = {n:3}, first operand in {where}: {clocks} clocks, {bytes_} bytes,",
              f"{bytes_ / clocks:.0f} bytes a clock")

# %% [markdown] slideshow={"slide_type": "subslide"}
# ### Which operand can stay in registers?
#
# What a product leaves in registers is the first operand of the next one if both have the same rows (02b: two C
# fragments are an A fragment). A block owns keys. So it can compute S, with a query a row, or Sᵀ = K_j Q_iᵀ, with a key
# a row.
#
# | product | sums over | rows of its result | first operand, with S | with Sᵀ |
# |---|---|---|---|---|
# | S, dP (or Sᵀ, dPᵀ) | d | queries (keys) | Q_i, dO_i | K_j, V_j |
# | dV_j += Pᵀ dO_i | queries | keys | Pᵀ, from shared memory | Pᵀ, **as it lies** |
# | dK_j += dSᵀ Q_i | queries | keys | dSᵀ, from shared memory | dSᵀ, **as it lies** |
# | dQ_i = dS K_j | keys | queries | dS, as it lies | dS, from shared memory |
#
# **Claim 2.** With Sᵀ two products take their first operand from registers, and P is never stored. dS goes to shared
# memory either way: one sum over dS runs along its rows, the other down its columns.
#
# Four queries and six keys, of which two *warpgroups* have three each. A warpgroup's dV and dK need only its own rows of Pᵀ
# and dSᵀ. Its share of dQ is only a part of the sum:

# %% slideshow={"slide_type": "fragment"}
Q = torch.tensor([[1.0, 2], [0, 1], [-1, 0], [2, -1]])
K = torch.tensor([[0.0, 1], [1, 0], [-1, 1], [1, 2], [2, 0], [0, -1]])
V, dO = torch.arange(12.0).view(6, 2) / 4, torch.tensor([[1.0, 0], [0, 1], [1, 1], [2, 0]])
P = (Q @ K.T).softmax(-1)
delta = (dO * (P @ V)).sum(-1, keepdim=True)
dS = P * (dO @ V.T - delta)  # (queries, keys)
dV, dK, dQ = P.T @ dO, dS.T @ Q, dS @ K
share = []
for keys in (slice(0, 3), slice(3, 6)):
    P_t, dS_t = P.T[keys], dS.T[keys]  # the rows that this warpgroup has in registers
    alone = torch.allclose(P_t @ dO, dV[keys]), torch.allclose(dS_t @ Q, dK[keys])
    share.append(dS_t.T @ K[keys])
    print(f"keys {keys.start} to {keys.stop - 1}: dV, dK right: {alone};",
          f"its share of dQ's row 0: {[round(x, 2) for x in share[-1][0].tolist()]}")
print("dQ's row 0:", [round(x, 2) for x in dQ[0].tolist()],
      "is the sum of both:", torch.allclose(sum(share), dQ))

# %% [markdown] slideshow={"slide_type": "fragment"}
# So the two warpgroups exchange dSᵀ, and each computes one half of dQ_i over all keys: 64 of its 128 rows (D = 64), or
# 64 of its 128 columns (D = 128). Below, a step (one tile of queries) is counted for both choices. (With S at D = 128
# each warpgroup adds its share of dQ_i, from its own 64 keys, to memory itself.)

# %% slideshow={"slide_type": "subslide"}
def products(D, Br, swapped=True, kept=()):
    """{product: (n, how many instructions, first operand in registers)} of a warpgroup,
    which has 64 of the block's 128 keys; dQ_i is shared equally. kept: those of S^T and
    dP^T whose first operand stays in registers."""
    t = "^T" if swapped else ""  # without it 64 queries and Br keys
    own = {f"{x}{t}": (Br, D // 16, f"{x}{t}" in kept) for x in ("S", "dP")}
    own |= {"dV": (D, Br // 16, swapped), "dK": (D, Br // 16, swapped)}
    if not swapped and Br == 64:  # its share of the whole dQ_i, over its own 64 keys
        return own | {"dQ": (128, 64 // 16, True)}
    return own | {"dQ": (64, 128 // 16, not swapped)}


def step_of(D, Br, swapped=True, kept=()):
    """(clocks of the tensor cores, bytes that wgmma reads) of a block's step."""
    clocks, bytes_ = 0, 0
    for n, count, registers in products(D, Br, swapped, kept).values():
        c, b = wgmma(n, registers)
        clocks, bytes_ = clocks + 2 * count * c, bytes_ + 2 * count * b  # two warpgroups
    return clocks, bytes_


# %% slideshow={"slide_type": "fragment"}
TILES = ladder.BACKWARD["wgmma"].tiles[0]  # {D: (Br, Bc)}
for D, (Br, Bc) in TILES.items():
    for swapped in (False, True):
        clocks, bytes_ = step_of(D, Br, swapped)
        stored = 2 * Br * Bc * (1 if swapped else 2)  # dS, and P unless swapped
        added = 4 * Br * D * (2 if not swapped and D == 128 else 1)  # to dq, in float32
        print(f"D = {D:3}, {'S^T' if swapped else 'S  '}: {clocks} clocks of products;",
              f"wgmma reads {bytes_ // 1024} KiB = {bytes_ // BANDWIDTH} clocks; stored:",
              f"{stored // 1024} KiB of P and dS; added to dq: {added // 1024} KiB")

# %% jupyter={"source_hidden": true} slideshow={"slide_type": "subslide"}
fig, axes = plt.subplots(1, 2, figsize=(8.6, 3.1), sharey=True, layout="constrained")
for ax, (D, (Br, _)) in zip(axes, TILES.items(), strict=True):
    start = 0
    for name, (n, count, registers) in products(D, Br).items():
        clocks, bytes_ = (2 * count * x for x in wgmma(n, registers))
        look = {"color": COLOURS[0 if registers else 1], "edgecolor": "white"}
        ax.bar(start, bytes_ / clocks, width=clocks, align="edge", **look)
        ax.text(start + clocks / 2, bytes_ / clocks + 3, name, ha="center", fontsize=9)
        start += clocks
    ax.axhline(BANDWIDTH, color=INK, ls="--", lw=1)
    ax.set(title=f"D = {D}, tile {Br} x 128", xlabel="clocks of the tensor cores, a step")
    ax.set(ylim=(0, 150), xlim=(0, start))
    ax.grid(axis="x", visible=False)
axes[0].set_ylabel("bytes a clock")
boxes = [plt.Rectangle((0, 0), 1, 1, color=c) for c in (COLOURS[1], COLOURS[0])]
labels = ["both operands from shared memory", "the first from registers"]
boxes.append(plt.Line2D([], [], color=INK, ls="--"))
labels.append("its bandwidth")
fig.legend(boxes, labels, ncols=3, loc="outside lower center", fontsize=8)
picture(fig, """Bytes of shared memory a clock that each of the five products reads. At D =
128, S^T, dP^T and dQ reach the dashed line of 128 bytes, dV and dK half of it. At D = 64
only dQ reaches it; S^T and dP^T read 96, dV and dK 64 bytes a clock.""")

# %% [markdown] slideshow={"slide_type": "fragment"}
# At D = 64 wgmma reads less with Sᵀ. At D = 128 it reads just as much, since dQ costs what dV and dK save. There Sᵀ saves the
# store of P, and half of the additions to dq. Three of five products leave shared memory no time for anything else.

# %% [markdown] slideshow={"slide_type": "slide"}
# ## 4. From algorithm to code
#
# FlashAttention-3, Algorithm 3. Lines in brackets are those of FlashAttention-2's Algorithm 2
# (`papers/flash_attention_2.md`).
#
# | line | what | in `bwd_2_wgmma.cu` |
# |---|---|---|
# | [4] | delta, lse in base 2; dq = 0 | `attention_delta`, a kernel of its own |
# | [5–7] | K_j, V_j by TMA; dK_j = dV_j = 0 | before the loop; `keys_full` |
# | [8–9] | Q_i, dO_i, lse_i, delta_i, one tile ahead | lambda `load_queries`, thread 0; `queries_full` |
# | [10] | Sᵀ = K_j Q_iᵀ, and at once dPᵀ = V_j dO_iᵀ [13] | `start_product`, two groups |
# | [11] | Pᵀ, while dPᵀ is computed | `wgmma_wait<1>`, `mask`, `probabilities` |
# | [14] | dSᵀ, also to shared memory | `wgmma_wait<0>`, `score_gradients`, `store_tile` |
# | [15] | dQ_i, its half | `start_dQ`, `add_dQ` |
# | [12, 16] | dV_j, dK_j, under `add_dQ` | `start_product` from registers |
# | [18] | dK_j, dV_j, written once | `store_rows` |

# %% slideshow={"slide_type": "subslide"}
step = "barrier_wait(queries_full + stage", "__syncthreads();  // nobody still"
excerpt("bwd_2_wgmma", step)

# %% [markdown] slideshow={"slide_type": "subslide"}
# Two groups are started, and `wgmma_wait<1>` waits for the older one: Pᵀ is computed under dPᵀ's product. The one
# barrier of a step stands where the warpgroups exchange dSᵀ. `fence_async` before it makes the stores visible to wgmma,
# which reads by another path. dQ_i, dV_j and dK_j are three groups; `wgmma_wait<2>` waits for dQ_i alone, so that its
# additions run under the other two.
#
# dSᵀ lies with a key a row; dQ_i sums over keys, so the descriptor of the *first* operand
# says that the sum runs down the rows, too (TRANS_A = 1).
#
# **The budget.** dK_j and dV_j stay in registers for the whole loop, Sᵀ and dPᵀ for a step. P is packed, and takes half of S:

# %% slideshow={"slide_type": "fragment"}
sizes = {"B": 1, "H": 1, "Hk": 1, "Nq": 4096, "Nk": 4096, "dtype": torch.bfloat16}
sizes |= {"shared_limit": h200.multiprocessor.shared_per_block, "processors": h200.sms}
for D, (Br, Bc) in TILES.items():
    launches = rows.geometry("bwd_2_wgmma", D=D, causal=False, **sizes)
    kernel, _, threads, shared, macros = next(x for x in launches if "backward" in x[0])
    usage = nvrtc.compile(works.HERE / "bwd_2_wgmma.cu", macros, "sm_90a").usage[kernel]
    parts = {"dK, dV": 2 * 64 * D // 128, "S, dP": 2 * 64 * Br // 128}
    parts |= {"P, dS": 2 * 64 * Br // 256, "dQ": 64 * 64 // 128}
    says = ", ".join(f"{name} {n}" for name, n in parts.items())
    print(f"D = {D:3}, tile {Br:3} x {Bc}: {says}; ptxas: {usage.registers} of 255",
          f"registers, {usage.spills} bytes spilled; {shared / 1024:.0f} KiB,",
          f"{threads} threads")

# %% [markdown] slideshow={"slide_type": "subslide"}
# They are not all needed at once: dQ_i uses the registers of Sᵀ and dPᵀ again.
#
# ### Count everything
#
# Beside wgmma, TMA writes Q_i and dO_i; `store_tile` writes dSᵀ, and all lanes read lse and delta. The emulation counts
# the text's own loads and stores; the rest is arithmetic.

# %% slideshow={"slide_type": "fragment"}
def counted_wavefronts(rung, D):
    """Wavefronts of one more tile of queries: the text's own accesses to shared memory."""
    Br, Bc = TILES[D]
    total = Counter()
    for sign, N in ((1, 3 * Br), (-1, 2 * Br)):
        q, dout, k, v = torch.randn(4, 1, 1, max(N, Bc), D).bfloat16()
        q, dout, k, v = q[:, :, :N], dout[:, :, :N], k[:, :, :Bc], v[:, :, :Bc]
        out, lse = calls.forward(q, k, v, rung="wgmma")
        with emulator.count_conflicts() as counted:
            sums = calls.start_gradients(dout, out, lse, rung=rung)
            calls.add_gradients(sums, dout, q, k, v)
        for site, (_, wavefronts) in counted.items():
            total[site] += sign * wavefronts
    return sum(total.values())


# %% slideshow={"slide_type": "fragment"}
KEPT = {"wgmma": {64: (), 128: ()}, "hopper": {64: ("S^T", "dP^T"), 128: ("S^T",)}}


def roof(rung, D):
    """TFLOP/s on an H200 if the busier of tensor cores and shared memory never rests."""
    Br, Bc = TILES[D]
    clocks, bytes_ = step_of(D, Br, kept=KEPT[rung][D])
    bytes_ += 2 * 2 * Br * D  # Q_i and dO_i come
    shared = bytes_ / BANDWIDTH + counted_wavefronts(rung, D)
    tflops = h200.half_tflops * clocks / max(clocks, shared)
    print(f"bwd {rung:6} D = {D:3}: products {clocks}, shared memory {shared:.0f} clocks a",
          f"step; roof {tflops:.0f} TFLOP/s")
    return tflops


roofs = {("wgmma", D): roof("wgmma", D) for D in TILES}

# %% [markdown] slideshow={"slide_type": "fragment"}
# Both units need nearly the same time. That makes this kernel hard: a wait for one of them also stops the other.
#
# ### Rung 3, `hopper`: K_j stays in registers
#
# Claim 1 names a way out: a first operand in registers. A warpgroup multiplies the same rows of K_j by every Q_iᵀ, so `bwd_3`
# loads them once, before the loop. **Predict.** A thread has 255 registers. For which rows do they suffice at D = 128
# and at D = 64: K_j's, or V_j's, too?

# %% slideshow={"slide_type": "fragment"}
def gained(D):
    """By how much bwd_3 is faster than bwd_2, from N = 4096 on; its share of the roof."""
    at = [{"D": D, "N": N, "causal": c} for N in (4096, 8192, 16384) for c in (False, True)]
    both = [[row_of(name, **x) for name in ("bwd_2_wgmma", "bwd_3_hopper")] for x in at]
    if not all(map(all, both)):
        return "not yet"
    x = sorted(new["tflops"] / old["tflops"] for old, new in both)
    share = both[0][1]["tflops"] / roofs["hopper", D]
    return f"x {x[0]:.2f} to {x[-1]:.2f}; {share:.0%} of the roof at N = 4096, full"


for D in TILES:
    launches = rows.geometry("bwd_3_hopper", D=D, causal=False, **sizes)
    kernel, *_, macros = next(x for x in launches if "backward" in x[0])
    used = nvrtc.compile(works.HERE / "bwd_3_hopper.cu", macros, "sm_90a").usage[kernel]
    print(f"D = {D:3}: 64 rows of K_j take {D // 4} registers; bwd_3 keeps the first",
          f"operand of {' and '.join(KEPT['hopper'][D])};",
          f"ptxas: {used.registers}, {used.spills} bytes spilled")
    roofs["hopper", D] = roof("hopper", D)
    foreseen = roofs["hopper", D] / roofs["wgmma", D]
    print(f"    foreseen x {foreseen:.2f}, measured", gained(D))

# %% [markdown] slideshow={"slide_type": "subslide"}
# At D = 128 the gain is what was foreseen, and more; at D = 64 it is less. Bytes are not the only limit: tensor cores
# rest while both warpgroups compute their softmax. So `bwd_3` also starts dV_j before the barrier, because dV_j needs
# only what its own warpgroup has.
#
# **A fixed order.** Sums of float32 depend on the order, and the blocks add to dq as they come. If DETERMINISTIC, they
# take turns to add to a dQ_i, in the order of their keys. Passing a turn on takes long, because the additions must
# first arrive in the L2 cache. So a turn covers 4 tiles of queries and is passed on once. A warp does this after it has
# started the next step's first products, which run meanwhile. dV_j starts after dQ_i, so that it runs while the warp
# waits for its turn.
#
# A block begins one turn later than the block before it in its head. So blocks that run at the same time belong to
# several heads, but to few, because blocks of one head share Q, dO and dq in the L2 cache.

# %% slideshow={"slide_type": "subslide"}
turns = "struct Turns {", "// The block that a block"
loop = "barrier_wait(queries_full + stage", "__syncthreads();  // nobody still reads K"
excerpt("bwd_3_hopper", turns, loop)

# %% slideshow={"slide_type": "fragment"}
generator = torch.Generator().manual_seed(0)
q, k, v, dout = torch.randn(4, 1, 1, 512, 64, generator=generator).bfloat16()
out, lse = calls.forward(q, k, v, rung="hopper")
want = error.expected(q, k, v, dout)
for deterministic in (False, True):
    options = {"rung": "hopper", "deterministic": deterministic}
    found = []
    for blocks in emulator.ORDERS:
        with emulator.schedule(blocks=blocks, threads="random", copies="random", seed=3):
            grads = calls.backward(dout, q, k, v, out, lse, **options)
        found.append(dict(zip(("dq", "dk", "dv"), grads, strict=True)))
    failed = sum(bool(error.failures(g, want)) for g in found)
    same = {x: all(torch.equal(g[x], found[0][x]) for g in found) for x in found[0]}
    print(f"deterministic={deterministic!s:5}: bit-equal in three orders: {same};",
          f"failures: {failed}")

# %% jupyter={"source_hidden": true} slideshow={"slide_type": "fragment"}
switched = [r for r in rows.fresh(rows.read(switched=True)) if r["gpu"] == h200.name]
speeds = {(r["run"], r["D"], r["N"], r["causal"], r["kernel"]): r["tflops"]
          for r in switched if r["pass"] == "bwd" and r["dtype"] == "bf16"}
for (run, D, N, causal, kernel), tflops in speeds.items():
    if kernel == "bwd_3_hopper:DETERMINISTIC=1":
        share = tflops / speeds[run, D, N, causal, "bwd_3_hopper"]
        print(f"D = {D:3}, N = {N:5}, {'causal' if causal else 'full':6}:",
              f"{share:.2f} of the speed in any order")

# %% [markdown] slideshow={"slide_type": "slide"}
# ## 5. Write it yourself
#
# **Exercise 02.11: which rows of dQ a warp owns.** A warp adds its part of dQ_i to memory in the order of its
# registers, which saves all arithmetic of addresses. The last kernel restores rows and columns. `check("02.11")` writes
# a file whose docstring says how the registers hold dQ_i.
#
# `hint("02.11")` to `hint("02.11", 3)` help.

# %% slideshow={"slide_type": "fragment"}
def dq_position(row, column, D):
    """The index of the number (row, column) of a tile of dQ_i among its 8192 numbers."""
    raise Blank


check("02.11", dq_position)

# %% [markdown] slideshow={"slide_type": "subslide"}
# **Bug hunt 02.bug3**, in rung 6, `show("02.bug3")`. Find the cause, and write a test that fails on it and passes on the
# stage's own forward.

# %% slideshow={"slide_type": "fragment"}
print(textwrap.fill(exercises.find("02.bug3").symptom, 110))


def test(forward):
    """Asserts what must hold of (out, lse) = forward(q, k, v, causal=..., scale=...)."""
    raise Blank


check("02.bug3", test)

# %% [markdown] slideshow={"slide_type": "slide"}
# ## 6. Check it, then break it
#
# Six mistakes of one line each in `bwd_2_wgmma.cu`, in three schedules of the emulation. **Which are seen at once, and which
# one only when threads come in another order?**
#
# <details><summary>Answer</summary>
#
# Without the barrier, the first warpgroup computes dQ_i before the other one has stored its dSᵀ. In the emulation's
# default order both have stored by then. A register that is written under way is refused in every schedule, and so is a
# block that ends before its products. dPᵀ is only read too early, which the emulation cannot see, but the numbers are
# wrong. The last two spoil dq alone.
#
# </details>

# %% slideshow={"slide_type": "fragment"}
SCHEDULES = {
    "copies late": {},
    "products late": {"copies": "eager", "wgmma": "late"},
    "random": {"threads": "random", "copies": "random", "wgmma": "random", "seed": 1},
}
S_wait, dP_wait = "wgmma_wait<1>();                  // S^T", "wgmma_wait<0>();  // dP^T is"
barrier = "    __syncthreads();  // both warpgroups have written dS^T"
added = "add_dQ(dq_i, dQ);"
loop = "for (int j = 0; j < Bc / 16; j++)\n    wgmma_ss<T, 64, 1, 1>"
mistakes = {
    "S^T used before its wait": (S_wait, S_wait.replace("1", "2")),
    "dP^T used before its wait": (dP_wait, "// dP^T is"),
    "no barrier after dS^T is stored": (barrier, "    // both have written dS^T"),
    "no wait for dV and dK": (f"{added}\n    wgmma_wait<0>();", added),
    "both compute the same half of dQ": ("D == 64 ? warpgroup * Bc * 64 : 0", "0"),
    "dQ sums over half of the keys": (loop, loop.replace("Bc / 16", "Bc / 32")),
}

# %% slideshow={"slide_type": "fragment"}
q, k, v, dout = torch.randn(4, 1, 1, 400, 64, generator=generator).bfloat16()
out, lse = calls.forward(q, k, v, rung="wgmma")
want = error.expected(q, k, v, dout)


def outcome(how):
    try:
        with emulator.schedule(**how):
            grads = calls.backward(dout, q, k, v, out, lse, rung="wgmma")
    except RuntimeError as report:
        return "stuck" if "stuck" in str(report) else "refused"
    spoilt = error.failures(dict(zip(("dq", "dk", "dv"), grads, strict=True)), want)
    return f"spoils {', '.join(spoilt)}" if spoilt else "lives"


print(f"{'':34}", *(f"{name:15}" for name in SCHEDULES))
print(f"{'as it is':34}", *(f"{outcome(how):15}" for how in SCHEDULES.values()))
for name, change in mistakes.items():
    with edited("bwd_2_wgmma.cu", change):
        print(f"{name:34}", *(f"{outcome(how):15}" for how in SCHEDULES.values()))

# %% [markdown] slideshow={"slide_type": "slide"}
# ## 7. Predict, then measure
#
# **Question 1.** The cell counts 02c's roof over `bwd_1` once more. By how much should `bwd_2` be faster, if it stays
# equally far below its own roof?
#
# <details><summary>Answer</summary>
#
# By the ratio of the roofs. At D = 128 that is what was measured; at D = 64 less was measured. And both stay far below
# their roofs: a step of `bwd_2` takes many more clocks than its products.
#
# </details>

# %% slideshow={"slide_type": "fragment"}
def roof_of_fa2(D, N=256):
    """TFLOP/s on an H200 if its shared memory never rests, by one head's wavefronts."""
    random = torch.randn(4, 1, 1, N, D, generator=torch.Generator().manual_seed(0))
    q, k, v, dout = random.bfloat16()
    out, lse = calls.forward(q, k, v, rung="fa2")
    tile = ladder.BACKWARD["fa2"].tiles[0][D]
    with emulator.count_conflicts() as counted:
        calls.backward(dout, q, k, v, out, lse, rung="fa2", backward_tile=tile)
    wavefronts = sum(wavefronts for _, wavefronts in counted.values())
    return h200.half_tflops / TENSOR * 10 * N * N * D / wavefronts


for D, (Br, Bc) in TILES.items():
    old, new = row_of("bwd_1_fa2", D=D), row_of("bwd_2_wgmma", D=D)
    if old and new:
        old, new = old["tflops"], new["tflops"]
        before, after = roof_of_fa2(D), roofs["wgmma", D]
        print(f"D = {D:3}: roofs {before:.0f} and {after:.0f}: foreseen x",
              f"{after / before:.2f}, measured x {new / old:.2f};",
              f"{old / before:.0%} and {new / after:.0%} of the roofs")
        clocks, _ = step_of(D, Br)
        took = clocks * h200.half_tflops / new
        print(f"    a step took {took:.0f} clocks of the datasheet's,",
              f"{took - clocks:.0f} more than its products;",
              f"exponentials need {Br * Bc // 16}")

# %% [markdown] slideshow={"slide_type": "subslide"}
# `steps/bench/ablations.py` times `bwd_3` without some of its parts. Which cost most?

# %% slideshow={"slide_type": "fragment"}
parts = ablations.read("left_out")
product = [row["tflops"] for row in fresh
           if row["peer"] == rows.MATMUL and row["gpu"] == parts.get("gpu")]
for point in ablations.POINTS if parts else ():
    took = {t["without"]: t["ms_median"] for t in parts["times"] if t["D"] == point.D}
    for name, ms in took.items():
        speed = point.flops("bwd") / ms / 1e9
        print(f"D = {point.D:3}, {f'without {name}' if name else 'the whole kernel':24}",
              f"{ms:.2f} ms, {ms / took[None] - 1:+6.1%}; {speed:.0f} TFLOP/s")
if product:
    print(f"{parts['gpu']}; a matrix product:",
          f"{sorted(product)[len(product) // 2]:.0f} TFLOP/s")

# %% [markdown] slideshow={"slide_type": "fragment"}
# At D = 128 the exponentials cost nothing, since dPᵀ is computed meanwhile; additions to dq cost most. Without all four
# the kernel has 95 % of the matrix product's speed.

# %% [markdown] slideshow={"slide_type": "subslide"}
# ### Beside FlashAttention-4
#
# FlashAttention-4 (`papers/flash_attention_4.md`) was designed for Blackwell, and its package has kernels for Hopper.
# Each pass was measured in one run with ours, cuDNN's and FlashAttention-2's. **Question 2.** Where are we behind, forward
# or backward?
#
# <details><summary>Answer</summary>
#
# At D = 64 and 128, full and causal: from N = 4096 on in neither, as both have 0.98 to 1.06 of its speed (under load, at
# N = 16384, 0.99 to 1.01). Below, our forward leads by up to 38 %, and our backward is mostly behind, by up to 7 %.
#
# </details>

# %% slideshow={"slide_type": "fragment"}
RACE = {"fwd": "fwd_8_hopper", "bwd": "bwd_3_hopper"}
LENGTHS = (512, 1024, 2048, 4096, 8192, 16384)
THEIRS = {"fa4": (COLOURS[1], "s"), "sdpa-cudnn": (GREYS[1], "^")}
THEIRS |= {"sdpa-flash": (GREYS[2], "v")}


def race():
    """{(pass, D, causal, N): {name: TFLOP/s}}, each of one run in which FlashAttention-4
    and our kernel were measured."""
    runs = {}
    for row in fresh:
        if row["stage"] in (None, "02_fa2_cuda") and row["gpu"] == h200.name:
            at = row["run"], row["pass"], row["D"], row["causal"], row["N"]
            runs.setdefault(at, {})[row["kernel"] or row["peer"]] = row["tflops"]
    found = {}
    for (_, *at), names in sorted(runs.items()):
        if at[0] in RACE and {"fa4", RACE[at[0]]} <= names.keys() and at[3] in LENGTHS:
            found[tuple(at)] = names
    return found


# %% slideshow={"slide_type": "fragment"}
raced = race()
in_bf16 = [row for row in fresh if row["dtype"] == "bf16" and row["gpu"] == h200.name]
print(measured.shares(in_bf16, tuple(RACE.values()), "fa4"))

# %% slideshow={"slide_type": "fragment"}
VALUES = operator.itemgetter("tflops"), timing.work_a_clock, timing.energy
for which, D, causal in itertools.product(RACE, (64, 128), (False, True)):
    found = {}  # of each run
    for r in loads:
        if (which, D, causal, h200.name) == (r["pass"], r["D"], r["causal"], r["gpu"]):
            found.setdefault(r["run"], {})[r["kernel"] or r["peer"]] = r
    pairs = [(names[RACE[which]], names["fa4"]) for _, names in sorted(found.items())
             if {RACE[which], "fa4"} <= names.keys()]
    speed, work, joules = ([x(ours) / x(fa4) for ours, fa4 in pairs] for x in VALUES)
    if pairs:  # The power is a sensor's reading, and scatters.
        print(f"{which} under load, D = {D:3}, {'causal' if causal else 'full':6}:",
              f"{speed[-1]:.3f} of fa4's TFLOP/s, {work[-1]:.3f} of its work a clock,",
              f"{min(joules):.2f} to {max(joules):.2f} of its joules a TFLOP, by run")
if not loads:
    print("not measured under load yet: on an H200, python -m steps bench --sustained")

# %% jupyter={"source_hidden": true} slideshow={"slide_type": "subslide"}
def draw_race():
    settings = [x for x in SETTINGS if all((*x, N) in raced for N in LENGTHS)]
    size = {"figsize": (9.4, 0.6 + 2 * -(-len(settings) // 4)), "sharey": True}
    fig, axes = plt.subplots(-(-len(settings) // 4), 4, layout="constrained", **size)
    for n, (ax, (which, D, causal)) in enumerate(zip(axes.flat, settings, strict=False)):
        ours = {RACE[which]: (COLOURS[0], "o")}
        for name, (colour, marker) in (ours | THEIRS).items():
            values = [raced[which, D, causal, N].get(name) for N in LENGTHS]
            label = "ours (fwd_8, bwd_3)" if name in ours else name
            look = {"color": colour, "marker": marker, "label": None if n else label}
            ax.plot(LENGTHS, values, **look)
        ax.set_xscale("log", base=2)
        ax.set_xticks(LENGTHS, ("512", "", "2k", "", "8k", ""))
        ax.minorticks_off()
        ax.set_title(f"{which}, D = {D}, {'causal' if causal else 'full'}", fontsize=10)
        ax.set_ylim(0, 800)
    fig.supylabel("TFLOP/s, bf16, 16k tokens, H200", fontsize=9)
    fig.legend(loc="outside lower center", ncols=4, fontsize=8)
    return picture(fig, """TFLOP/s against N, forward above, backward below, D = 64 and 128.
    From 4k on ours and FlashAttention-4 nearly lie on each other, above cuDNN and
    FlashAttention-2. Below, ours is above it forward, mostly a bit below it backward.""")


SETTINGS = [*itertools.product(RACE, (64, 128), (False, True))]
draw_race() if raced else print("no runs: python -m steps.bench fast bwd")

# %% [markdown] slideshow={"slide_type": "subslide"}
# ### Grouped heads
#
# One K/V head for 8 query heads, N = 4096: with a block for 128 keys of each K/V head most SMs would idle. So a block takes one
# query head alone (HEADS_APART), and dk and dv are added up afterwards:

# %% slideshow={"slide_type": "fragment"}
blocks = 4096 // 128
print(f"for {h200.sms} SMs: {blocks} blocks; {8 * blocks} if a block takes one query head")
for row in recorded:
    feature = row["options"].get("feature", "")
    if "heads" in feature:
        print(f"{feature:21} {row['kernel'] or row['peer']:12} {row['tflops']:.0f} TFLOP/s")

# %% [markdown] slideshow={"slide_type": "subslide"}
# ### Two tricks of FlashAttention-4
#
# **Conditional rescaling** (2603.05451), which the forward's rung 8 has, too: the switch LAZY. O and l may stay in the
# units of an old maximum as long as 2^(S - m) cannot overflow. So O is rescaled only if m has grown by more than 8 in
# log2 in one of a warp's 16 rows. **Question 3. In how many steps does a warp rescale?**
#
# **A polynomial for exp2**, which rung 8 has not. At D = 64 exponentials take as long as products (02d). 2^x is 2^⌊x⌋
# times 2^f with f in [0, 1). The first factor only moves exponent bits. The second can be a polynomial, a few fused
# multiply-adds on other units. P is rounded to bf16 anyway. **Which degree is enough?**

# %% slideshow={"slide_type": "fragment"}
def warps_that_rescale(scale, tiles=32, Bc=128, lazy=8.0):
    """Shares of (warp, tile) in which O is rescaled: if m has grown at all; by more than
    `lazy`. A warp has 16 rows of random scores with this standard deviation, in log2."""
    S = torch.randn(64, 16, tiles, Bc, generator=torch.Generator().manual_seed(0)) * scale
    m, grown, counts = S[:, :, 0].amax(-1), None, torch.zeros(2)
    true = m.clone()
    for j in range(1, tiles):
        new = torch.maximum(true, S[:, :, j].amax(-1))
        counts[0] += (new > true).any(1).float().mean()
        true = new
        grown = (new - m > lazy).any(1)  # of each warp
        m = torch.where(grown[:, None], new, m)
        counts[1] += grown.float().mean()
    return (counts / (tiles - 1)).tolist()


for scale in (1, 5, 20, 100):
    always, lazily = warps_that_rescale(scale)
    print(f"scores with standard deviation {scale:3} in log2: a maximum of the warp's rows",
          f"grows in {always:.0%} of the steps, O is rescaled in {lazily:.0%}")

# %% slideshow={"slide_type": "subslide"}
generator = torch.Generator().manual_seed(0)
x = -16 * torch.rand(200_000, generator=generator, dtype=torch.float64)
exact = x.exp2()
nodes = (torch.cos(math.pi * (torch.arange(64.0) + 0.5) / 64).double() + 1) / 2  # in (0, 1)
rounded = ((exact.bfloat16().double() - exact) / exact).abs().max().item()
print(f"rounding to bf16: largest relative error {rounded:.1e}")
for degree in range(1, 6):
    powers = nodes[:, None] ** torch.arange(degree + 1)  # fitted for the relative error
    weights = 1 / nodes.exp2()[:, None]
    fitted = torch.linalg.lstsq(powers * weights, torch.ones(64, 1).double()).solution[:, 0]
    fraction = (x - x.floor()).float()
    y = torch.zeros_like(fraction)
    for coefficient in fitted.flip(0):  # Horner: a fused multiply-add each
        y = y * fraction + coefficient.float()
    y = torch.ldexp(y, x.floor().int())
    error_ = ((y.double() - exact) / exact).abs().max().item()
    other = (y.bfloat16() != exact.float().bfloat16()).float().mean().item()
    print(f"degree {degree}: largest relative error {error_:.1e} before rounding;",
          f"{other:.2%} of P are another bf16 number")

# %% [markdown] slideshow={"slide_type": "fragment"}
# With scores of ordinary size (the first line) some maximum of the warp's 16 rows grows in two of three steps, but
# never by 8. Rescaling is frequent only where weights differ by 2^20 and more. At degree 3, which FlashAttention-4
# takes, the polynomial's error is far below that of rounding P: less than one P in a hundred becomes another number.
# But rung 8 became slower with it (open problem 7).

# %% [markdown] slideshow={"slide_type": "subslide"}
# ### What a launch costs
#
# As long as a launch takes the host less time than the kernel runs, the GPU is never idle. `calls.forward` allocates
# out and lse, finds its plan for inputs of this layout and calls the driver; `forward` checks its arguments first. *Elsewhere*: every call has its tensors at other addresses, so
# that three tensor maps change. Printed: the lowest of 50 rounds.

# %% slideshow={"slide_type": "fragment"}
host = rows.read_record("host")
for name, us in host.get("microseconds", {}).items():
    print(f"{name:27} {us:5.1f} us of the host's time a call,",
          f"in the median round {host['medians'][name]:5.1f}")
of_hopper = [row for row in recorded if row["kernel"] == "fwd_8_hopper"]
if of_hopper:
    row = min(of_hopper, key=lambda row: row["ms_median"])
    print(f"the shortest hopper forward of the tables: {1e3 * row['ms_median']:.0f} us,",
          "at B = {B}, H = {H}, N = {N}, D = {D}, causal = {causal}".format(**row))

# %% [markdown] slideshow={"slide_type": "subslide"}
# ### What the power limit does
#
# The datasheet's TFLOP/s belong to a clock that the chip does not always hold. Near its power limit it lowers the clock.
# **Question 4.** The same matrix product, once on random normal numbers, once on zeros. Same time?
#
# <details><summary>Answer</summary>
#
# No. A circuit consumes much of its power when bits change, and between zeros none do. So the clock falls less, and the
# same kernel gets "faster" on data that nobody has. Everything else here is measured on random normal numbers.
#
# </details>

# %% jupyter={"source_hidden": true} slideshow={"slide_type": "fragment"}
def draw_power(loads):
    fig, axes = plt.subplots(1, 3, figsize=(9.4, 2.5), sharey=True, layout="constrained")
    labels = [f"{one['load']},\n{one['data']}" for one in loads]
    colours = [GREYS[3] if one["data"] == "zeros" else COLOURS[0] for one in loads]
    panels = {"tflops": "TFLOP/s", "sm_mhz": "clock, MHz", "watts": "power, W"}
    for ax, (field, title) in zip(axes, panels.items(), strict=True):
        values = [one[field] or 0 for one in loads]
        bars = ax.barh(labels, values, height=0.65, color=colours)
        ax.bar_label(bars, fmt="%.0f", padding=3)
        ax.set_title(title)
        ax.margins(x=0.2)
        ax.grid(axis="y", visible=False)
    axes[0].invert_yaxis()
    return picture(fig, """TFLOP/s, clock and power of an 8192 cubed matrix product and of
    the hopper forward, each on random normal numbers and on zeros.""")


for one in clocked.get("power", ()):
    there = h200.sms * TENSOR * (one["sm_mhz"] or float("nan")) / 1e6
    share = one["tflops"] / h200.half_tflops
    print(f"{one['load']:14} {one['data']:13}: {share:.0%} of the datasheet's TFLOP/s,",
          f"{one['tflops'] / there:.0%} of what {one['sm_mhz']:.0f} MHz allow;",
          f"{one['watts']:.0f} W of {one['limit_watts']:.0f}")
NO_CLOCKS = "no recording: on an H200, python -m steps.bench.ablations"
draw_power(clocked["power"]) if clocked else print(NO_CLOCKS)

# %% [markdown] slideshow={"slide_type": "slide"}
# ## 8. Summary
#
# - A 64 x 64 x 16 wgmma with both operands in shared memory needs its whole bandwidth: 4 KB in 32 clocks.
# - Sᵀ puts Pᵀ and dSᵀ into the registers of those who own the keys. P is never stored.
# - dS alone is exchanged, through shared memory, at one barrier a step. dQ_i is divided between the warpgroups.
# - Tensor cores and shared memory need nearly equal time, so that every wait costs both. An operand kept in registers
#   saves bytes.
#
# **Ask yourself**
#
# 1. Why does a wider n help the first two products, and what forbids n = 128 at D = 128?
# 2. Why does dQ read both operands from shared memory, although its first operand was in registers?
# 3. Why is one barrier a step enough, given that dSᵀ has two buffers?
# 4. What would change if the block owned queries instead of keys?
# 5. Why may `add_dQ` use the order of registers, and `store_rows` not?

# %% [markdown] slideshow={"slide_type": "subslide"}
# ### Open problems
#
# FlashAttention-4's Hopper backward does the first five; part 7 has its speed. The prizes, printed below, are the most
# that each may bring. *Slower* means: at most sizes, than the kernel as it was then.
#
# 1. **A producer warp**, with barriers of its own for Q_i with lse and for dO_i with delta. Without K_j in registers: no faster
#    at D = 128, slower at D = 64. With it registers run out.
# 2. **A warp that sends dQ_i**. Not tried; part 7 shows what the additions cost.
# 3. **80 queries a tile, and dQ_iᵀ instead of dQ_i**: wider products read less (counted below). Faster only at N = 16384, and
#    without K_j in registers, for which no room is left.
# 4. **lse and delta read before Sᵀ is there**: slower.
# 5. **The three kernels overlapped** by programmatic dependent launch. Not tried.
# 6. **D = 32, 96 and 256**: there the backward is still `bwd_1`.
# 7. **The forward at D = 64**: a polynomial for 1 to 6 of 16 exponentials: slower, at D = 128, too, as it adds more instructions
#    than it saves. Tiles of 128 x 160, 128 x 192, 192 x 96 or 192 x 112: slower. Four stages of K and V: no faster.
# 8. **The forward at D = 128**: exponentials before and after the wait for O, in FlashAttention-4's order: slower. A tile of
#    128 x 176 with one place for Q: slower. Q in registers: slower. The next tile's number by an atomic addition: slower.

# %% slideshow={"slide_type": "fragment"}
def prize(which, says, best, now):
    best, now = (x["tflops"] if isinstance(x, dict) else x for x in (best, now))
    found = f"x {best / now:.2f}" if best and now else "not recorded yet"
    print(f"{which:6} {says:39} {found}")


for D in TILES:
    reached = row_of("bwd_3_hopper", D=D)
    prize("1 to 5", f"part 4's roof over bwd_3, D = {D}:", roofs["hopper", D], reached)
prize("6", "bwd_3 over bwd_1, D = 128:", row_of("bwd_3_hopper"), row_of("bwd_1_fa2"))
wide, narrow = (row_of("fwd_8_hopper", "fwd", D=D, N=16384) for D in (128, 64))
prize("7", "fwd_8 at D = 128 over fwd_8 at D = 64:", wide, narrow)
leads = [x["fa4"] / x[RACE["fwd"]] for at, x in raced.items() if at[:2] == ("fwd", 128)]
prize("8", "fa4 over fwd_8, D = 128, at most:", max(leads, default=0), 1)

# %% slideshow={"slide_type": "fragment"}
for Br, what in ((64, "64 queries, dQ"), (80, "80 queries, dQ^T")):
    clocks = bytes_ = 0
    own = products(128, Br)
    if Br == 80:  # dQ^T = K^T dS^T: 64 of the 128 columns are the rows, 80 queries n
        own["dQ"] = (80, 128 // 16, False)
    for n, count, registers in own.values():
        c, b = wgmma(n, registers)
        clocks, bytes_ = clocks + 2 * count * c, bytes_ + 2 * count * b
    print(f"D = 128, {what:16}: wgmma reads {bytes_ / clocks:.1f} bytes a clock")

# %% [markdown] slideshow={"slide_type": "subslide"}
# ### Past one kernel
#
# **Fusing the Q, K and V projections.** Three products of the same tokens are one with a wider matrix (`Wqkv` in
# `flash_attn/modules/mha.py` of Dao-AILab/flash-attention). If it went on into the attention kernel, Q, K and V would not be
# written, but every tile of queries would compute all of K and V again.
#
# **Several streams and heads in flight.** Kernels too small for the chip can run side by side. Programmatic dependent
# launch starts a kernel's preamble before its predecessor ends (CUDA Programming Guide, 4.5).
#
# **Between GPUs, from inside a kernel.** NVSHMEM lets a thread write to another GPU's memory and raise a flag there
# (`nvshmem_putmem_signal`, NVSHMEM's API). A ring as in stage 04 then needs no host between its steps.
#
# **A whole network as one persistent kernel.** *Look Ma, No Bubbles!* (Hazy Research, May 2025) runs Llama-1B's
# forward, with an interpreter on each SM.
#
# **Blackwell.** Tensor cores are twice as fast, exponentials and shared memory are not: 02d's and 02e's limits move.
# FlashAttention-4 (2603.05451) answers with accumulators in a memory of their own, a polynomial exp2, and products that
# two SMs share.

# %% [markdown] slideshow={"slide_type": "subslide"}
# **Go further**
#
# - ★ (15 minutes) `step_of` for a tile of 128 queries at D = 128: what would it read, and why does it not fit?
# - ★★ (1 hour) Count `bwd_1` with `products`-like arithmetic: how many bytes does `ldmatrix` fetch for each product?
# - ★★★ (a weekend) Number 2 of the list, in the emulation first.
#
# **Read:** `papers/flash_attention_3.md`, `papers/flash_attention_4.md`; the PTX ISA on `wgmma`, `ld.acquire` and `red.release`.
#
# **Next:** [03a_triton_kernels.ipynb](03a_triton_kernels.ipynb). A compiler decides most of this for you.
