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
# # 01. FlashAttention-1, kernels in Numba
#
# ## 1. The question
#
# *How does a GPU hold attention's tiles on the chip, what does FlashAttention-1's loop order cost, and what belongs in
# registers?*
#
# ![Three boxes: device memory with Q, K, V and O; shared memory with tiles of Q, K, V and S, at 4.8 TB/s on an H200;
# registers with 8 x 8 numbers of S and of O, at 33.5 TB/s.](../notebooks/figures/question_01.png)

# %% jupyter={"source_hidden": true} slideshow={"slide_type": "skip"}
import steps  # comes first: it chooses the engine, and tells Numba whether to simulate
import math
import os
import subprocess
import sys
import textwrap
import timeit
from concurrent.futures import ThreadPoolExecutor
from unittest.mock import patch

import matplotlib.pyplot as plt
import numba
import numpy as np
import torch
from matplotlib.collections import PatchCollection
from numba import cuda

from reference import cases, error
from steps.bench import cost, rows
from steps.figures import numba_resources
from steps.figures.plots import COLOURS, FAINT, GREYS, INK, ink_on, style
from steps import step01_fa1_numba as step01
from steps.step00_naive import fwd_1_matrix, io_count

# %% jupyter={"source_hidden": true} slideshow={"slide_type": "skip"}
from steps.step01_fa1_numba import fwd_0_published as fwd
from steps.step01_fa1_numba import fwd_1_loops_swapped, fwd_2_registers
from steps.figures.picture import unchecked as picture
from steps.workbook import Blank, check, exercises, show
from steps.workbook import hint, solution  # noqa: F401  They are for part 5.

torch.set_num_threads(1)  # small tensors are faster on one thread, and the times steadier
torch.set_printoptions(precision=2, sci_mode=False)
style()
# Compiling takes some seconds, so it starts here; part 4 asks for the result.
compiling = ThreadPoolExecutor().submit(numba_resources.table, 64)
print(steps.engine.describe())
print(f"numba {numba.__version__}, numpy {np.__version__}; simulated: {fwd.SIMULATED}")

# %% [markdown] slideshow={"slide_type": "subslide"}
# - **Before you start:** notebook 00: tiles, the running maximum, l, lse. No GPU programming.
# - **Time:** about an hour to read, two hours more with the exercises.
# - **Hardware:** any. Without a GPU the kernels run in Numba's simulator: the same source, slowly, on tiny sizes.
# - **Code:** [`steps/step01_fa1_numba/__init__.py`](../steps/step01_fa1_numba/__init__.py) lists the rungs, one file
#   each. **Tests:** `pytest tests/test_step01_fa1_numba.py`.
# - **Paper:** FlashAttention (2205.14135), restated in [papers/flash_attention.md](../papers/flash_attention.md).
#   **Terms:** [reference/glossary.md](../reference/glossary.md).

# %% [markdown] slideshow={"slide_type": "slide"}
# ## 2. The problem, measured
#
# ### Where numbers live
#
# A GPU consists of streaming multiprocessors (SMs), which run threads in **warps** of 32. A thread computes with the
# numbers in its **registers**. Threads are grouped in **blocks**. The threads of a block also share a piece of
# **shared memory** on their SM, which the program fills itself. Shared memory has 32 **banks**, and each gives out
# one number a cycle. The **L2** cache serves all SMs. Behind it lies **device memory**, where tensors are stored.

# %% slideshow={"slide_type": "fragment"}
gpu = cost.GPUS["NVIDIA H200"]
sm = gpu.multiprocessor
BANKS = 32  # the numbers that shared memory delivers to an SM in a cycle
LANES = 128  # the float32 multiply-adds that an SM does in a cycle
multiply_adds = gpu.fp32_tflops / 2  # in 10^12 a second, all SMs together
# What each memory delivers, in 10^12 numbers a second.
delivers = {
    "shared memory": multiply_adds * BANKS / LANES,
    "device memory": gpu.bandwidth / 4,
}
print(f"{gpu.name}: {gpu.sms} SMs,", end=" ")
print(f"{multiply_adds:.1f} x 10^12 multiply-adds a second in float32")
for name, size in (("registers", 4 * sm.registers), ("shared memory", sm.shared)):
    in_all = size * gpu.sms / 2**20
    print(f"{name:13}  {size / 2**10:.0f} KiB an SM, {in_all:.1f} MiB in all")
for name, numbers in delivers.items():
    times = multiply_adds / numbers
    print(f"{name:13}  {4 * numbers:4.1f} TB/s:", end=" ")
    print(f"one number in the time of {times:2.0f} multiply-adds")
tensor_cores = gpu.half_tflops / 2 / (gpu.bandwidth / 2)
print("in fp16 on tensor cores (stage 02), device memory:", end=" ")
print(f"one number in the time of {tensor_cores:.0f}")

# %% [markdown] slideshow={"slide_type": "subslide"}
# ### Two bottlenecks
#
# Device memory is the first, shared memory the second. Standard attention, rung 1 of stage 00, meets the first: it
# writes S, reads it for the softmax, writes P, and reads it for P V. On an H200 this traffic takes about as long as
# the arithmetic in float32, and 6.5 times as long in fp16. FlashAttention computes a tile of S, uses it and discards
# it, all on the chip.
#
# The softmax is a small part of the operations, but it passes over all $N^2$ numbers several times. Its share of the
# time on a CPU:

# %% slideshow={"slide_type": "fragment"}
N, D = 1024, 64
q, k, v = torch.randn(3, N, D)
S = q @ k.mT
P = fwd_1_matrix.softmax(S)[0]
parts = {"Q Kᵀ": lambda: q @ k.mT, "softmax": lambda: fwd_1_matrix.softmax(S),
         "P V": lambda: P @ v, "one pass": lambda: S.softmax(-1)}  # fmt: skip
taken = {name: min(timeit.repeat(part, number=1, repeat=7)) for name, part in parts.items()}
one_pass = taken.pop("one pass")
softmax = 4 * N * N  # the maximum, exp(S - m), the sum and the division
operations = [2 * N * N * D, softmax, 2 * N * N * D]
print(f"softmax: {softmax / sum(operations):.1%} of the operations,", end=" ")
print(f"{taken['softmax'] / sum(taken.values()):.0%} of the time on this CPU;", end=" ")
print(f"torch's own softmax would take {one_pass / taken['softmax']:.0%} of that")
n, moved = 4096, sum(io_count.standard_count(4096, D))
print(f"N = {n}: {moved / (4 * n * D + n):.0f} times the least traffic.", end=" ")
print("On an H200, in times of the arithmetic:")
for dtype, size, rate in (("float32", 4, multiply_adds), ("fp16", 2, gpu.half_tflops / 2)):
    print(f"    {dtype}: {moved / (gpu.bandwidth / size) / (2 * n * n * D / rate):.1f}")

# %% jupyter={"source_hidden": true} slideshow={"slide_type": "fragment"}
fig, ax = plt.subplots(figsize=(7.2, 2.2), layout="constrained")
bars = operations, list(taken.values())
percents = np.array([[100 * x / sum(what) for x in what] for what in bars]).T
left = percents.cumsum(0) - percents
for i, name in enumerate(taken):
    ax.barh((0, 1), percents[i], left=left[i], color=COLOURS[i], height=0.5, label=name)
ax.set_yticks([0, 1], ["operations", "time, CPU"])
ax.set(xlabel="%", title="standard attention, N = 1024, d = 64", ylim=(-0.5, 1.9))
ax.legend(ncols=3, loc="upper left", fontsize=8)
picture(fig, """Two bars split into Q K transposed, softmax and P V. Softmax is a very small
part of the operations and a far larger part of the time.""")

# %% [markdown] slideshow={"slide_type": "fragment"}
# The CPU's bar shows neither the price of arithmetic nor a slow memory: S has 4 MiB, which fits into most caches. Our
# softmax writes S - m, its exp, the quotient and P, each as a new N x N matrix, for which the operating system has to
# find pages. Torch's own softmax passes over each row once, in a small part of the time. So the intermediate
# matrices cost the time. FlashAttention has none.

# %% [markdown] slideshow={"slide_type": "slide"}
# ## 3. The idea: O is finished after every visit
#
# FlashAttention-1 loads a tile of keys *once*, and every tile of queries visits it. Then it loads the next tile of
# keys. Between two visits a row's O, l and m wait in device memory.
#
# **Claim.** Keep O *normalised*. If a row has O, l, m from the keys so far, and the new tile alone gives
# $m_b = \max S$, $P = e^{S - m_b}$, $l_b = \sum P$, then with $m_{new} = \max(m, m_b)$, $\alpha = e^{m - m_{new}}$,
# $\beta = e^{m_b - m_{new}}$
#
# $$l_{new} = \alpha\, l + \beta\, l_b \qquad O_{new} = \frac{\alpha\, l}{l_{new}}\, O + \frac{\beta}{l_{new}}\, P V_j$$
#
# is the attention over the old and the new keys together.
#
# **Why.** By notebook 00 the sum $\sum e^{s - m} v$ over the old keys is $l\, O$, in the unit $e^m$; over the new ones
# it is $P V_j$, in the unit $e^{m_b}$. $\alpha$ and $\beta$ change both to the unit $e^{m_{new}}$. Then
# divide by $l_{new}$.
#
# Below are notebook 00's numbers in three tiles of two keys; we follow query 5. First an easy mistake: O is rescaled
# by $\alpha$ as in notebook 00, although this O has been divided by l.

# %% slideshow={"slide_type": "fragment"}
Q = torch.tensor([[1.0, 2], [0, 1], [-1, 0], [2, -1], [1, 1], [3, 1]])
K = torch.tensor([[0.0, 1], [1, 0], [-1, 1], [1, 2], [2, 0], [0, -1]])
V = torch.tensor([[0.0, 6], [2, 0], [4, 6], [6, 4], [8, 0], [10, 6]])
s = Q[5] @ K.T / math.sqrt(2)
exact = [torch.softmax(s[:n], 0) @ V[:n] for n in (2, 4, 6)]


def visits(undo_division):
    """[(m, l, share of the old O, O of the tile alone, O)] of query 5 after each tile."""
    m, l, O = -math.inf, 0.0, torch.zeros(2)
    trace = []
    for j in (0, 2, 4):
        m_b = s[j : j + 2].max().item()
        P = (s[j : j + 2] - m_b).exp()
        m_new = max(m, m_b)
        alpha, beta = math.exp(m - m_new), math.exp(m_b - m_new)
        l_new = alpha * l + beta * P.sum().item()
        old = (alpha * l if undo_division else alpha) / l_new
        O = old * O + beta / l_new * (P @ V[j : j + 2])
        m, l = m_new, l_new
        trace.append((m, l, old, P @ V[j : j + 2] / P.sum(), O))
    return trace

# %% slideshow={"slide_type": "fragment"}
print("forgotten l:", visits(undo_division=False)[-1][-1], " should be", exact[-1])
trace = visits(undo_division=True)
for (m, l, old, _, O), want in zip(trace, exact, strict=True):
    print(f"m {m:.2f}  l {l:.2f}  share of the old O {old:.2f}  O {O}", end="  ")
    print("attention so far:", torch.allclose(O, want))

# %% jupyter={"source_hidden": true} slideshow={"slide_type": "subslide"}
fig, axes = plt.subplots(1, 3, figsize=(8.4, 3.0), layout="constrained", sharey=True)
for n, ax in enumerate(axes):
    for j in range(6):
        colour, fade = (INK, 1) if j < 2 * n + 2 else (FAINT, 0.6)
        ax.plot(*V[j], "o", color=colour, ms=4)
        ax.text(V[j, 0], V[j, 1] + 0.45, f"v{j}", ha="center", fontsize=8, alpha=fade)
    O_b, O = trace[n][3], trace[n][4]
    if n:
        ends = torch.stack([trace[n - 1][4], O_b])
        ax.plot(*ends.T, color=FAINT, lw=1.5, zorder=0)
        ax.plot(*ends[0], "s", color=COLOURS[5], ms=8, label="old O")
    ax.plot(*O_b, "D", color=COLOURS[4], ms=8, label="the tile alone")
    ax.plot(*O, "X", color=COLOURS[1], ms=10, label="new O")
    ax.set(title=f"visit {n + 1}: keys {2 * n}, {2 * n + 1}", xlim=(-1, 11), ylim=(-1, 7.6))
entries = axes[2].get_legend_handles_labels()
fig.legend(*entries, loc="outside lower center", ncols=3, fontsize=8)
picture(fig, """Three plots of the six values, one for each visit. At the first, O is the
attention over the first tile. At visits 2 and 3 the new O lies on the line from the old O
to the attention over the new tile alone, nearer to the tile's.""")

# %% [markdown] slideshow={"slide_type": "fragment"}
# With l forgotten the row ends at (6.35, 1.01) instead of (6.83, 1.34). Done right, O is the attention over the keys
# seen so far (black) after every visit. The grey keys are still to come.

# %% [markdown] slideshow={"slide_type": "slide"}
# ## 4. From algorithm to code
#
# ### Numba CUDA in one page
#
# A **kernel** is launched as a **grid** of **blocks** of threads: `kernel[blocks, threads](arguments)`. Every thread
# runs the same function. Its number in the block is `threadIdx`, the number of its block is `blockIdx`, and
# `cuda.grid(1)` is its number in the whole grid.
#
# A block runs on one SM. Its threads share `cuda.shared.array`s, whose sizes the compiler must know.
# `cuda.syncthreads()` is a barrier: no thread goes on before all threads of the block have arrived.

# %% slideshow={"slide_type": "fragment"}
@cuda.jit
def backwards(x, out):
    tile = cuda.shared.array(3, np.float32)
    t, n = cuda.threadIdx.x, cuda.grid(1)
    tile[t] = x[n]
    cuda.syncthreads()  # tile[2 - t] is written by another thread
    out[n] = tile[2 - t]


def launch(kernel, blocks, threads):
    """What kernel(x, out) leaves in out, for x = 0, 1, ... 5."""
    x = cuda.to_device(np.arange(6, dtype=np.float32))
    out = cuda.to_device(np.zeros(6, np.float32))
    kernel[blocks, threads](x, out)
    return out.copy_to_host()


print(launch(backwards, 2, 3))

# %% [markdown] slideshow={"slide_type": "subslide"}
# ### What the simulator shows, and what not
#
# The simulator starts a Python thread for each GPU thread and runs one block after the other. An index past an
# array's end is an error; a GPU would read or overwrite whatever lies there. Below, three blocks are one too many.
# The message names the block, `ctaid`, and the thread, `tid`. What is missing is `if n < x.shape[0]`.
#
# The simulator does not show the race of `no_barrier`, so a right result proves nothing. Nor does it model warps,
# types or speed. On a GPU `compute-sanitizer` finds races; you find one in 01.bug1.

# %% slideshow={"slide_type": "fragment"}
@cuda.jit
def no_barrier(x, out):
    tile = cuda.shared.array(6, np.float32)
    t = cuda.threadIdx.x
    tile[t] = x[t]
    out[t] = tile[max(t - 1, 0)]  # has the neighbour written yet?


if fwd.SIMULATED:  # on a GPU nothing checks the index
    try:
        launch(backwards, 3, 3)
    except IndexError as mistake:
        print("IndexError:", mistake)
right = sum(launch(no_barrier, 1, 6).tolist() == [0, 0, 1, 2, 3, 4] for _ in range(20))
print(f"no_barrier: right in {right} of 20 runs")

# %% [markdown] slideshow={"slide_type": "subslide"}
# ### Rung 0: Algorithm 1, line by line
#
# In brackets the paper's lines; scale and mask come from its Algorithm 2. One block handles one head.
#
# | line | what it does | in `fwd_0_published.py` |
# |---|---|---|
# | [2] | O = 0, l = 0, m = -inf in device memory | `forward` |
# | [5–6] | for each tile of Bc keys: K_j, V_j to shared memory | `forward_kernel`, `load_tile` |
# | [7–8] | for each tile of Br queries: Q_i | `forward_kernel`, `first_query_tile`, `load_tile` |
# | [9] | S = scale Q_i K_jᵀ, masked | `scores`, `keys_seen` |
# | [10–11], l, m of [13] | P, m_new, l_new; reads and writes l_i, m_i | `online_update` (yours, in part 5) |
# | [12] | O_i, read and written | `update_output` |
#
# In the kernel, read the barriers first: the comment at each says which threads wait for what.

# %% slideshow={"slide_type": "subslide"}
show("fwd_0_published", "kernel")

# %% [markdown] slideshow={"slide_type": "subslide"}
# ### The budget, before any launch
#
# Arrays of a fixed size may take 48 KiB of a block's shared memory. `check_shared` adds up a kernel's arrays, and
# refuses a tile that does not fit. The paper's line 1 gives all the room to K, V, Q and O, and none to S
# ([papers/errata.md](../papers/errata.md), E4).

# %% slideshow={"slide_type": "fragment"}
def shared_bytes(Br, Bc, D):
    """What rung 0 hands to check_shared: Q_i, K_j, V_j and S, and two factors a row."""
    # Each of the four has a spare column.
    return 4 * ((Br + 2 * Bc) * (D + 1) + Br * (Bc + 1) + 2 * Br)


for tile in ((16, 16), (16, 32), (32, 64), (64, 64)):
    need = shared_bytes(*tile, 64)
    fits = cost.occupancy((9, 0), threads=256, shared=need)
    blocks = f"{fits.blocks} blocks an SM" if need <= fwd.SHARED_BYTES else ""
    print(f"tile {str(tile):8}  {need / 1024:4.1f} KiB", blocks)
try:
    fwd.forward_kernel(64, 64, 64)
except ValueError as refusal:
    print(textwrap.fill(f"ValueError: {refusal}", 110))
for d in (64, 128):  # Alg. 1, line 1, with all that a block of an H200 can ask for
    Bc = math.ceil(sm.shared_per_block / 4 / (4 * d))
    Br = min(Bc, d)
    KVQO = cost.shared_bytes(Br, Bc, d, tiles="QKVO") / sm.shared_per_block
    with_S = cost.shared_bytes(Br, Bc, d, tiles="QKVOS") / sm.shared_per_block
    print(f"line 1, d = {d}: Br {Br}, Bc {Bc}: K, V, Q, O take {KVQO:.0%}", end=" ")
    print(f"of a block's limit, with S {with_S:.0%}")

# %% [markdown] slideshow={"slide_type": "subslide"}
# ### The order of the visits
#
# FlashAttention-1 goes through S column by column, FlashAttention-2 row by row. In the second order the sums of a
# query tile stay on the chip until they are complete. O is divided once, and notebook 00's update is enough: one
# $\alpha$ and no $\beta$.
#
# Below, the order of the visits, and when each row of O is written. A colour is a tile of queries.

# %% jupyter={"source_hidden": true} slideshow={"slide_type": "fragment"}
# (i, j) of the 3 x 4 tiles of S, in the order of the visits.
orders = {"FA1: keys outside": [(i, j) for j in range(4) for i in range(3)],
          "FA2: queries outside": [(i, j) for i in range(3) for j in range(4)]}  # fmt: skip
white = {"color": "white", "ha": "center", "va": "center"}
fig, axes = plt.subplots(2, 2, figsize=(8, 4.4), height_ratios=(1.1, 1))
fig.set_layout_engine("constrained")
for (name, order), top, bottom in zip(orders.items(), *axes, strict=True):
    for visit, (i, j) in enumerate(order, 1):
        top.add_patch(plt.Rectangle((8 * j, 8 * i), 8, 8, fc=COLOURS[i], ec="white", lw=2))
        ink = white | {"color": ink_on(COLOURS[i])}
        top.text(8 * j + 4, 8 * i + 4, visit, fontweight="bold", **ink)
        if name.startswith("FA1") or j == 3:
            bottom.add_patch(plt.Rectangle((visit - 0.4, 8 * i), 0.8, 8, fc=COLOURS[i]))
    top.set(xlim=(0, 32), ylim=(24, 0), title=name, xlabel="key", ylabel="query")
    bottom.set(xlim=(0.4, 12.6), ylim=(24, 0), xlabel="visit", ylabel="row of O written")
    bottom.set_xticks(range(1, 13))
    for ax in (top, bottom):
        ax.set_yticks(range(0, 25, 8))
        ax.grid(False)
    top.set_xticks(range(0, 33, 8))
picture(fig, """Top: S as 3 by 4 tiles with the number of the visit. FA1 numbers them down
the columns, FA2 along the rows. Bottom: the rows of O written at each visit. FA1 writes a
tile of rows at every one of the 12 visits, so each row four times; FA2 writes each row
once, at visits 4, 8 and 12.""")

# %% [markdown] slideshow={"slide_type": "subslide"}
# ### What the order costs
#
# Notebook 00 counted both orders in torch. The simulator accepts anything that can be indexed, so we pass arrays that
# count. Rung 1 agrees exactly. Rung 0 differs in two points: the kernel reads m twice, which a compiler turns into
# one load; and torch, not the kernel, writes the first O, l and m.

# %% slideshow={"slide_type": "fragment"}
class Counted:
    """Stands for an array in the simulator, and counts the numbers loaded and stored."""

    def __init__(self, *shape, value=1):
        self.data = np.full(shape, value, np.float32)
        self.shape = shape
        self.loads = self.stores = 0

    def __getitem__(self, index):
        self.loads += 1
        return self.data[index]

    def __setitem__(self, index, value):
        self.stores += 1
        self.data[index] = value


def counted(rung, blocks, N, D, B):
    """(loads, stores) of device memory by a rung's kernel, one head, tiles (B, B)."""
    arrays = [Counted(1, N, D) for _ in "qkv"]
    arrays += [Counted(1, N, D, value=0), Counted(1, N, value=0)]  # O, l; rung 1: out, lse
    if rung is fwd:
        arrays.append(Counted(1, N, value=-math.inf))  # m
    rung.forward_kernel(B, B, D)[blocks, fwd.THREADS](*arrays, False, np.float32(1))
    return sum(a.loads for a in arrays), sum(a.stores for a in arrays)

# %% slideshow={"slide_type": "subslide"}
N, D, B = 16, 4, 8
rungs = {
    "rung 0": (fwd, 1, io_count.fa1_count),
    "rung 1": (fwd_1_loops_swapped, N // B, io_count.fa2_count),
}
for name, (rung, blocks, expected) in rungs.items() if fwd.SIMULATED else ():
    print(f"{name}: loads, stores {counted(rung, blocks, N, D, B)}", end=", ")
    print(f"notebook 00 expects {expected(N, D, B, B)}")
N, D = 4096, 64
# The tiles that the stage takes on a GPU at d = 64.
TILES = {"published": (16, 16), "loops_swapped": (16, 32), "registers": (128, 64)}
moves = {"published": io_count.fa1_count(N, D, *TILES["published"])}
for name in ("loops_swapped", "registers"):
    moves[name] = io_count.fa2_count(N, D, *TILES[name])
loads, stores = moves["registers"]
again = (N // TILES["registers"][1] - 1) * N * D  # it reads Q_i again for each key tile
moves["registers"] = loads + again, stores
standard = sum(io_count.standard_count(N, D))
print(f"million numbers at N = {N}, d = {D}; standard attention: {standard / 1e6:.0f}")
for name, (loads, stores) in moves.items():
    print(f"{name:13} tile {str(TILES[name]):9}", end="  ")
    print(f"loads {loads / 1e6:5.1f}  stores {stores / 1e6:5.2f}")

# %% [markdown] slideshow={"slide_type": "fragment"}
# Swapping the loops reduces 69.48 million stores to 0.27 million. The loads hardly change: with tiles of 16 both
# orders ask for more than standard attention does (the L2 cache serves a part). Only rung 2's large tiles need fewer.

# %% [markdown] slideshow={"slide_type": "subslide"}
# ### Who works
#
# With keys outside, two key tiles may not update one row of O at the same time. So a head stays in one block, and a
# block on one SM. With queries outside, every query tile can be a block.
#
# Below are the blocks that `forward` launches, the first of them dealt out to the SMs in order; rung 2 has two on
# each SM. A box is room for one block, white if it stays empty. Neighbouring heads differ in colour; a head's number
# stands in its first block.

# %% slideshow={"slide_type": "fragment"}
def grid(rung, tile, B, H, N=4096, D=1):
    """The number of blocks that the rung's forward launches."""
    asked = []
    x = torch.empty(B, H, N, D)
    no_launch = {
        "forward_kernel": lambda *sizes: None,
        "launch": lambda _, blocks, *rest: asked.append(blocks),
    }
    with patch.multiple(rung, **no_launch):
        rung.forward(x, x, x, tile=tile)
    return asked[0]


forwards = dict(zip(TILES, (fwd, fwd_1_loops_swapped, fwd_2_registers), strict=True))
for batch, H in ((1, 16), (4, 16), (4, 32)):
    asked = {name: grid(rung, TILES[name], batch, H) for name, rung in forwards.items()}
    busy = (f"{name} {n}, {min(1, n / gpu.sms):.0%}" for name, n in asked.items())
    print(f"{batch} x {H} heads, blocks and SMs at work:", "; ".join(busy))

# %% jupyter={"source_hidden": true} slideshow={"slide_type": "subslide"}
fig, axes = plt.subplots(1, 2, figsize=(8.4, 3.7), layout="constrained")
for ax, (name, resident) in zip(axes, (("published", 1), ("registers", 2)), strict=True):
    blocks = grid(forwards[name], TILES[name], 1, 16)
    boxes, colours = [], []
    for slot in range(gpu.sms * resident):
        y, x = divmod(slot % gpu.sms, 12)
        y = y + 0.88 / resident * (slot // gpu.sms)
        head = slot * 16 // blocks
        boxes.append(plt.Rectangle((x, y), 0.88, 0.88 / resident))
        colours.append(COLOURS[head % 6] if head < 16 else "white")
        if head < 16 and slot * 16 % blocks < 16:
            look = white | {"color": ink_on(colours[-1]), "fontsize": 8}
            ax.text(x + 0.44, y + 0.44 / resident, head, **look)
    ax.add_collection(PatchCollection(boxes, facecolor=colours, edgecolor=FAINT, lw=0.8))
    ax.set(title=f"{name}: {blocks} blocks", xlim=(-0.1, 12), ylim=(11, -0.1))
    ax.set(xticks=[], yticks=[])
    ax.grid(False)
    ax.spines[:].set_visible(False)
picture(fig, """The 132 multiprocessors of an H200 as a grid of 11 by 12, for one sequence
of 4096 tokens with 16 heads. Published: 16 are coloured, one for each head, the others are
empty. Registers: each has two blocks; the first wave is heads 0 to 8.""")

# %% slideshow={"slide_type": "subslide"}
show("fwd_1_loops_swapped", "kernel")

# %% [markdown] slideshow={"slide_type": "subslide"}
# ### Rung 2: what a thread keeps to itself
#
# `dot`, in rungs 0 and 1, fetches both factors of every product from shared memory, the second bottleneck.
#
# In rung 2 a thread owns a **patch** of 8 x 8 numbers of S, in its registers. For each of the d columns it fetches 8
# numbers of Q_i and 8 of K_j: 64 products for 16 numbers. (The 8 threads of a row exchange their maxima through
# shared memory.) Counted in one thread:

# %% slideshow={"slide_type": "fragment"}
Q_i, K_j = Counted(16, 65), Counted(32, 65)
A, B, S = Counted(128, 17), Counted(64, 17), Counted(8, 8)


@cuda.jit
def one_thread():
    fwd.dot(Q_i, 0, K_j, 0, 64)
    fwd_2_registers.add_products(S, A, 0, B, 8, 16)


loads_each = {"dot": 2.0, "add_products": 0.25}
if fwd.SIMULATED:
    one_thread[1, 1]()
    loads_each["dot"] = (Q_i.loads + K_j.loads) / 64
    loads_each["add_products"] = (A.loads + B.loads) / S.stores
for name, each in loads_each.items():
    allowed = delivers["shared memory"] * 2 / each
    print(f"{name}: {each} loads a multiply-add;", end=" ")
    print(f"shared memory allows {allowed:.1f} TFLOP/s")
# FLOPs for each byte that a rung asks of a memory; part 7 needs them.
of_shared = {name: 2 / (4 * loads_each["dot"]) for name in ("published", "loops_swapped")}
of_shared["registers"] = 2 / (4 * loads_each["add_products"])
of_device = {name: 4 * N * N * D / (4 * sum(moves[name])) for name in TILES}
show("fwd_2_registers", "add_products")

# %% [markdown] slideshow={"slide_type": "subslide"}
# ### A patch, and the banks that a warp asks
#
# Thread (x, y) owns every 16th row from y on and every 8th column from x on; a warp is 8 x 4 neighbours.
#
# Address a lies in bank a mod 32. A bank serves different addresses one after the other, each in a **wavefront**.
# With rows of 16 numbers every other row begins in the same bank, and the warp waits (orange bars). With a spare
# column, width 17, the rows are spread over the banks (blue bars).

# %% jupyter={"source_hidden": true} slideshow={"slide_type": "fragment"}
fig, (left, *bars) = plt.subplots(1, 3, figsize=(8.6, 3.6), layout="constrained")
threads = {"the first warp": ((0, 1, 2, 3), range(8), FAINT),
           "thread (0, 0)": ((0,), (0,), COLOURS[0]),
           "thread (2, 3)": ((3,), (2,), COLOURS[1])}  # fmt: skip
for name, (ys, xs, colour) in threads.items():
    queries = [r for y in ys for r in range(y, 48, 16)]
    keys = [c for x in xs for c in range(x, 24, 8)]
    boxes = [plt.Rectangle((c, r), 1, 1) for r in queries for c in keys]
    left.add_collection(PatchCollection(boxes, facecolor=colour, edgecolor="white", lw=0.4))
    left.plot([], [], "s", color=colour, label=name)
left.set(title="a corner of S", xlabel="key", ylabel="query", xlim=(0, 24), ylim=(48, 0))
left.set(xticks=range(0, 25, 8), yticks=range(0, 49, 16))
below = {"loc": "upper center", "bbox_to_anchor": (0.4, -0.17), "ncols": 3}
left.legend(fontsize=7, handletextpad=0, columnspacing=0.5, **below)
for ax, width in zip(bars, (16, 17), strict=True):
    addresses = {(0 * 8 + x) * width + 3 for x in range(8)}  # B[c * X + x, d], c = 0, d = 3
    asked = [sum(a % BANKS == bank for a in addresses) for bank in range(BANKS)]
    ax.bar(range(BANKS), asked, color=[COLOURS[1] if n > 1 else COLOURS[0] for n in asked])
    ax.set(title=f"rows of {width}, wavefronts: {max(asked)}", xlabel="bank")
    ax.set(ylim=(0, 4.4), xticks=range(0, 33, 8), yticks=range(5))
bars[0].set(ylabel="addresses asked of a bank")
picture(fig, """Left: a corner of S, 48 queries by 24 keys. A thread owns single numbers 16
rows and 8 columns apart, a warp bands of 4 rows. Right: addresses asked of each of the 32
banks when a warp fetches one column of B. With rows of 16 two banks are asked for four
addresses each; with rows of 17 eight banks for one each.""")

# %% [markdown] slideshow={"slide_type": "subslide"}
# ### Rung 2's registers
#
# The patches of S and O, m and l take $8 \cdot 8 + 8 \cdot 8 + 8 \cdot 2 = 144$ of a thread's 255 registers at d =
# 64, as `check_registers` counts. The table has just been compiled, for an H200.
#
# An SM holds two blocks of rung 2, an eighth of the warps that it has room for. That is enough: a thread has 64
# independent sums, so it need not wait for one.

# %% slideshow={"slide_type": "fragment"}
NO_COMPILER = "this installation of Numba has no CUDA compiler"
patches = (8, 16), (8, 16), (8, 2)
try:
    fwd_2_registers.check_registers("tile (128, 128), head_dim 128", *patches)
except ValueError as refusal:
    print(textwrap.fill(f"ValueError: {refusal}", 110))
try:
    columns = ("registers", "spilled", "shared", "threads", "blocks", "occupancy", "limit")
    print(f"{'d = 64':25}", *(f"{name:>9}" for name in columns))
    for row in compiling.result():
        print(f"{row['kernel']:25}", *(f"{row[name]:>9}" for name in columns))
except RuntimeError:
    print(NO_COMPILER)

# %% [markdown] slideshow={"slide_type": "subslide"}
# ### The backward, in short
#
# Rung 0 is Algorithm 4: keys outside, so that dK_j and dV_j are finished in one visit. dQ is loaded and stored at
# every visit, as O was. A sum can stay in registers only while the outer loop stays at its tile. So rung 2 has two
# kernels:
#
# | kernel | outer loop | in registers | products |
# |---|---|---|---|
# | `queries_kernel` | queries | dQ_i | S, dP, dQ |
# | `keys_kernel` | keys | dK_j, dV_j | Sᵀ, dPᵀ, dV, dK |
#
# Seven products instead of five, as S and dP are computed twice. In return no two blocks add to one number (no atomic
# additions), and every run gives the same bits.

# %% [markdown] slideshow={"slide_type": "subslide"}
# ### The float64 trap, and signed indices
#
# A Python number in a Numba kernel is a float64, and turns the arithmetic around it into float64. The simulator
# cannot show this: it computes with NumPy, which stays in float32. So we compile to PTX, NVIDIA's assembly language:
# `plain` converts to float64 and back. Hence `ZERO` in the module, and a test that searches for `.f64`.
#
# For a signed index Numba's code tests each time whether it is negative, as in x[-1]: two `setp` below, and two
# addresses. `unsigned` has one, and reaches the other number at the constant distance `+64`.

# %% slideshow={"slide_type": "subslide"}
program = """
import re
import numpy as np
from numba import cuda, float32
def plain(x, y):
    y[0] = 0.5 * x[0] + 1.0
def with_casts(x, y):
    y[0] = np.float32(0.5) * x[0] + np.float32(1.0)
def signed(x, y):
    t = cuda.threadIdx.x
    y[t] = x[t] + x[t + 16]
def unsigned(x, y):
    t = np.uint32(cuda.threadIdx.x)
    y[t] = x[t] + x[t + 16]
for f in plain, with_casts, signed, unsigned:
    ptx, _ = cuda.compile_ptx(f, (float32[::1], float32[::1]), cc=(8, 0))
    lines = re.findall(r"^\\t((?:fma|cvt.*f32|setp|ld.global)\\S*)\\s+(.*);", ptx, re.M)
    print(f"{f.__name__:10}", " | ".join(" ".join(line) for line in lines))
"""
environment = os.environ | {"NUMBA_ENABLE_CUDASIM": "0"}
command = [sys.executable, "-c", program]
done = subprocess.run(command, env=environment, capture_output=True, text=True)
print(done.stdout if done.returncode == 0 else NO_COMPILER)
numpys = type(np.float32(1) * 0.5).__name__
print("with a Python number, NumPy (and so the simulator) gives", numpys)

# %% [markdown] slideshow={"slide_type": "subslide"}
# ### A multiply-add too many
#
# GPUs compute $2^x$. Fast kernels therefore write $e^{x - m}$ as $2^{x c - m c}$ with $c = \log_2 e$: m c once a row,
# then a fused multiply-add, which does not round x c. But m c *was* rounded, so at x = m the difference is not 0.
# Below, everything else is in float64; scores are about ±200.

# %% slideshow={"slide_type": "subslide"}
c = np.float32(math.log2(math.e))


def exact(x, m):
    return np.exp(np.float64(x) - np.float64(m))


def plain(x, m):
    return np.exp(np.float64(x - m))


def fused(x, m):
    return np.exp2(np.float64(np.float32(np.float64(x) * c - np.float64(m * c))))


def online(in_alpha, in_P, x, v):
    """(P at the maximum, out, lse) of scores x (rows, N) and values v (N,); tiles of 64."""
    m, l, O = np.full(len(x), -np.inf, np.float32), 0, 0
    for j in range(0, x.shape[1], 64):
        m_new = np.maximum(m, x[:, j : j + 64].max(1))
        alpha, P = in_alpha(m, m_new), in_P(x[:, j : j + 64], m_new[:, None])
        m, l, O = m_new, alpha * l + P.sum(1), alpha * O + P @ v[j : j + 64]
    return in_P(m, m), O / l, m + np.log(l)

# %% slideshow={"slide_type": "fragment"}
random = np.random.default_rng(0)
x = random.normal(0, 55, (256, 4096)).astype(np.float32)
v = random.normal(0, 1, 4096)
right = online(exact, exact, x, v)
forms = {
    "exp(x - m)": (plain, plain),
    "fused, P": (plain, fused),
    "fused, alpha too": (fused, fused),
}
print("largest error        P at m      out      lse")
for name, (in_alpha, in_P) in forms.items():
    got = online(in_alpha, in_P, x, v)
    errors = (abs(a - b).max() for a, b in zip(got, right, strict=True))
    print(f"{name:18}", *(f"{e:8.1e}" for e in errors))
print(f"float32's own rounding of a score of 200: {np.spacing(np.float32(200)) / 2:.1e}")

# %% [markdown] slideshow={"slide_type": "fragment"}
# Near the maximum x - m is exact. Fused, all of a tile's P are wrong by one factor, about as much as by a score's own
# rounding. Most of this cancels in O / l; lse keeps it, and the backward computes P from lse. A fused alpha is not
# exactly 1 even where m stays the same, and the errors of 64 tiles add up. FlashAttention-2's code fuses P only,
# stage 01 neither.

# %% [markdown] slideshow={"slide_type": "slide"}
# ## 5. Write it yourself
#
# As in notebook 00, write the body in place of `raise Blank`. `hint("01.1")` to `hint("01.1", 3)` and
# `solution("01.1")` help. The stage's file offers `ZERO` (see part 4), `MINUS_INF`, `dot`, and
# `exp_difference(x, m)`: exp(x - m), and 0 for x = -inf even where m is -inf.
#
# **Exercise 01.1: one tile of keys, with O kept normalised.** Part 3's claim, one thread a row. S arrives as scores and
# leaves as $P = e^{S - m_b}$; `old` and `new` receive the two factors of O. Mind rows past the end, and rows that
# have seen no key. Threads are numbered by `cuda.threadIdx.y * cuda.blockDim.x + cuda.threadIdx.x`.

# %% slideshow={"slide_type": "fragment"}
@cuda.jit(device=True)
def online_update(S, old, new, l, m, head, i, Bc):
    """Turns the scores S (Br, Bc) into P, updates l and m, sets O's factors old and new.

    S and old, new (Br,) are in shared memory, l and m (heads, Nq) in device memory; i is
    the tile's first row.
    """
    raise Blank


check("01.1", online_update)

# %% [markdown] slideshow={"slide_type": "subslide"}
# **Exercise 01.2: the same tile, with O not divided.** Rung 1: P is born in the unit of m_new. l, m and alpha are in
# shared memory.

# %% slideshow={"slide_type": "fragment"}
@cuda.jit(device=True)
def online_update(S, alpha, l, m, Bc):  # noqa: F811
    """Turns S (Br, Bc) into P = exp(S - m_new) and updates l and m (Br,) with it.

    alpha (Br,) receives what O is multiplied with.
    """
    raise Blank


check("01.2", online_update)

# %% [markdown] slideshow={"slide_type": "subslide"}
# **Exercise 01.3: the gradient of the scores.** Rung 0's backward has P of a tile; dS is wanted. All threads share the
# tile, by rows and columns as in `show("fwd_0_published", "scores")`.

# %% slideshow={"slide_type": "fragment"}
@cuda.jit(device=True)
def score_gradients(dS, P, dO_i, V_j, delta, head, i, Bc, D):
    """dS (Br, Bc) from P (Br, Bc), dO_i (Br, D), V_j (Bc, D) and delta (heads, Nq).

    All but delta are in shared memory; i is the tile's first row.
    """
    raise Blank


check("01.3", score_gradients)

# %% [markdown] slideshow={"slide_type": "subslide"}
# **Bug hunt 01.bug1.** The report about `show("01.bug1")` is printed below. Write the test that would have caught it.
#
# **Bug hunt 01.bug2.** The same for `show("01.bug2")`.

# %% slideshow={"slide_type": "fragment"}
print(textwrap.fill(exercises.find("01.bug1").symptom, 110))


def test(forward):
    """Asserts what must hold of (out, lse) = forward(q, k, v, causal=..., scale=...).

    forward may be the stage's own or a broken one.
    """
    raise Blank


check("01.bug1", test)

# %% slideshow={"slide_type": "fragment"}
print(textwrap.fill(exercises.find("01.bug2").symptom, 110))


def test(forward):
    """Asserts what must hold of (out, lse) = forward(q, k, v, causal=..., scale=...).

    forward may be the stage's own or a broken one.
    """
    raise Blank


check("01.bug2", test)

# %% [markdown] slideshow={"slide_type": "slide"}
# ## 6. Check it, then break it
#
# Three of the contract's cases on every rung:

# %% slideshow={"slide_type": "fragment"}
def prepared(*names):
    """(case, its inputs for this stage, what is expected) for the named cases."""
    for case in (c for c in cases.CASES if c.name in names):
        x = cases.build(case, step01.SUPPORTS, torch.float32, steps.engine.device)
        yield case, x, error.expected(x.q, x.k, x.v, x.dout, causal=x.causal, scale=x.scale)


for case, x, want in prepared("more_queries_causal", "no_key", "rising"):
    print(case.says)
    for rung in TILES:
        out, lse = step01.forward(x.q, x.k, x.v, **x.options, rung=rung)
        got = {"out": out, "lse": lse}
        verdict = "wrong" if error.failures(got, want) else "ok"
        errors = error.errors(got, want)
        share = max(e / (want.tolerance[name] or 1) for name, e in errors.items())
        print(f"    {rung:13} {verdict}; largest error: {share:.2f} of its tolerance")

# %% [markdown] slideshow={"slide_type": "subslide"}
# `first_query_tile` skips query tiles above the diagonal: key j is first seen by query j - (Nk - Nq).
# Suppose we forget Nk - Nq. **Which causal case fails: as many queries as keys, fewer, or more?**
#
# <details><summary>Answer</summary>
#
# Fewer. There the loop starts too late, and rows miss keys. With more queries it starts too early: those tiles are
# masked throughout, and only cost time.
#
# </details>

# %% slideshow={"slide_type": "fragment"}
@cuda.jit(device=True)
def shift_forgotten(j, Nq, Nk, Br, causal):
    return j // Br * Br if causal else 0


fwd.forward_kernel.cache_clear()  # the kernels compiled so far are forgotten
causal = "ragged_causal", "fewer_queries_causal", "more_queries_causal"
for case, x, want in prepared(*causal):
    with patch.object(fwd, "first_query_tile", shift_forgotten):
        out, lse = step01.forward(x.q, x.k, x.v, **x.options, rung="published")
    wrong = error.failures({"out": out, "lse": lse}, want)
    print("fails: " if wrong else "passes:", case.says)
fwd.forward_kernel.cache_clear()

# %% [markdown] slideshow={"slide_type": "slide"}
# ## 7. Predict, then measure
#
# Rows measured at N = 4096, not causal. Of PyTorch's kernels `sdpa-math` is standard attention, `sdpa-efficient`
# works by tiles; the shares are of its speed.
#
# **Question 1.** Rung 1 fills the GPU at any batch. Is it faster than rung 0 by the same factor at both d?
#
# **Question 2.** TFLOP/s of the backward count five products, and rung 2 computes seven. If each went as fast as in the
# forward, what would the backward reach?
#
# <details><summary>Answers</summary>
#
# 1: no. At d = 64 there are 128 heads, so even the published order has 128 blocks for 132 SMs. At d = 128 there are
# 64, and half of the SMs are idle. 2: 5/7 of the forward's speed. It stays below: three patches at a time leave fewer
# registers.
#
# </details>

# %% jupyter={"source_hidden": true} slideshow={"slide_type": "subslide"}
measured = {}  # {(pass, d): {kernel or peer: row}}
at = {"gpu": gpu.name, "dtype": "fp32", "N": 4096, "causal": False, "options": {}}
at["timing"] = "interleaved"
for r in rows.latest(rows.fresh(rows.read())):
    ours = r["stage"] in ("01_fa1_numba", None)  # PyTorch's kernels have no stage
    if ours and all(r[name] == value for name, value in at.items()):
        measured.setdefault((r["pass"], r["D"]), {})[r["kernel"] or r["peer"]] = r
for which in ("fwd", "bwd"):
    best = [measured[which, d]["sdpa-efficient"] for d in (64, 128)]
    head = "| d = {D}, {B} x {H} heads: TFLOP/s, share, error"
    print(which, *(head.format(**e) for e in best))
    for name in sorted(measured[which, 64]):
        print(f"{name:20}", end="")
        for e in best:
            r = measured[which, e["D"]][name]
            share = r["tflops"] / e["tflops"]
            print(f" {r['tflops']:17.1f}     {share:4.2f}   {r['error']:.0e}  ", end="")
        print()
speed, gains = {}, []
for d in (64, 128):
    speed[d] = {name: r["tflops"] for name, r in measured["fwd", d].items()}
    gain = speed[d]["fwd_1_loops_swapped"] / speed[d]["fwd_0_published"]
    gains.append(f"d = {d}: x {gain:.1f}")
print("swapping the loops:", *gains, end="  ")
print(f"5/7 of the forward: {5 / 7 * speed[64]['fwd_2_registers']:.1f}")

# %% [markdown] slideshow={"slide_type": "subslide"}
# **Question 3.** Arithmetic, device memory and shared memory each limit the speed: three roofs. Which is the lowest
# over each rung at d = 64? (Bytes are those that a kernel asks for, by part 4; a dotted line leads to the roof.)
#
# <details><summary>Answer</summary>
#
# Over rungs 0 and 1 it is shared memory: two loads a multiply-add. Over rung 2 shared memory and arithmetic meet, by
# design. Device memory is the lowest over none, even with tiles of 16.
#
# </details>

# %% jupyter={"source_hidden": true} slideshow={"slide_type": "fragment"}
fig, axes = plt.subplots(1, 2, figsize=(8.6, 3.8), layout="constrained", sharey=True)
panels = (("shared memory", of_shared, (0.25, 0.5, 1, 2, 4, 8)),
          ("device memory", of_device, (4, 8, 16, 32, 64)))  # fmt: skip
speeds = (1, 2, 5, 10, 20, 50, 100)
for ax, (memory, at, ticks) in zip(axes, panels, strict=True):
    rate = 4 * delivers[memory]  # TB/s
    xs = np.geomspace(min(at.values()) / 2, 6 * gpu.fp32_tflops / rate, 200)
    ax.loglog(xs, np.minimum(rate * xs, gpu.fp32_tflops), color=INK, lw=1.2)
    ax.text(xs[-1], 1.1 * gpu.fp32_tflops, f"{gpu.fp32_tflops} TFLOP/s", ha="right")
    for (n, name), marker, colour in zip(enumerate(TILES), "osD", COLOURS, strict=False):
        reached, roof = speed[64][f"fwd_{n}_{name}"], min(rate * at[name], gpu.fp32_tflops)
        ax.plot([at[name]] * 2, [reached, roof], ":", color=colour, lw=1)
        ax.plot(at[name], reached, marker, color=colour, label=name)
        print(f"{name:13} {memory}: {at[name]:5.2f} FLOPs a byte", end=", ")
        print(f"roof {roof:4.1f}, measured {reached:4.1f} TFLOP/s")
    for look, peer in (("--", "sdpa-efficient"), ("-.", "sdpa-math")):
        ax.axhline(speed[64][peer], color=GREYS[1], ls=look, lw=1, label=peer)
    ax.set(title=f"{memory}, {rate:.1f} TB/s", xlabel="FLOPs a byte", ylim=(0.9, 110))
    ax.set(xticks=ticks, xticklabels=ticks)
    ax.minorticks_off()
axes[0].set(ylabel="TFLOP/s", yticks=speeds, yticklabels=speeds)
axes[1].legend(fontsize=8, loc="lower right")
picture(fig, """Two rooflines of an H200 in float32, log axes, with the three rungs as
marks. Shared memory: rungs 0 and 1 under its slope, the registers rung under the corner.
Device memory: all far below the roof.""")

# %% [markdown] slideshow={"slide_type": "fragment"}
# Swapping the loops gains little where the published order almost fills the GPU. All rungs stay well below their
# roofs: a roof assumes that nothing waits, and in rungs 0 and 1 `online_update` keeps 16 of 256 threads busy. Rung 2
# reaches half of the speed of `sdpa-efficient`, its backward a third. Even standard attention is faster at d = 128
# and in the backward: in float32 traffic decides little (part 2), and cuBLAS multiplies faster.

# %% [markdown] slideshow={"slide_type": "slide"}
# ## 8. Summary
#
# - Two bottlenecks: tiles save traffic to device memory, patches in registers save loads from shared memory.
# - FlashAttention-1 keeps O normalised: after every visit it is the attention over the keys so far.
# - Keys outside: O, l, m are loaded and stored at every visit, and a head has one block. Queries outside: they are
#   written once, and a query tile has one block.
# - The simulator checks indices and arithmetic, not races, types or speed.
#
# **Ask yourself**
#
# 1. Why must every thread of a block reach each barrier, even one that has no row?
# 2. What would be saved by storing O undivided between rung 0's visits? What would be lost?
# 3. Why is that O float32 when q, k and v are float16?
# 4. How many loads a multiply-add does a patch of 4 x 4 need, and of 16 x 16? What forbids the latter?
# 5. Why does rung 2's backward need no atomic addition, and what does that cost?
#
# **Go further**
#
# - ★ (15 minutes) Draw the banks that a warp asks in `store_transposed`. Is 17 the right width for it?
# - ★★ (1 hour) Put all threads to work in rung 1's `online_update`: several share a row and exchange their maxima.
# - ★★★ (a weekend) Give rung 2 other tiles and patches. Predict the fastest from `numba_resources.table`.
#
# **Read:** [papers/flash_attention.md](../papers/flash_attention.md). **Next:**
# [02a_fa2_cuda_first_kernels.ipynb](02a_fa2_cuda_first_kernels.ipynb). Rung 1's order, in CUDA C++.
