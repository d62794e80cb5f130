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
# *How does a GPU hold attention's tiles on the chip, what does FlashAttention-1's loop order cost, and what must a thread
# keep to itself?*
#
# - **Before you start:** notebook 00: tiles, the running maximum, l, lse. No GPU programming.
# - **Time:** about 45 minutes to read, two hours more with the exercises.
# - **Hardware:** any. Without a GPU the kernels run in Numba's simulator: the same source, slowly, on tiny sizes.
# - **Code:** `steps/step01_fa1_numba/`, one file a rung. **Tests:** `pytest tests/test_step01_fa1_numba.py`.
# - **Paper:** FlashAttention (2205.14135), restated in `papers/flash_attention.md`. Words: `reference/glossary.md`.

# %% slideshow={"slide_type": "skip"}
import steps  # first: it chooses the engine, and tells Numba whether to simulate
import inspect
import math
import os
import subprocess
import sys
import textwrap
import time
from concurrent.futures import ThreadPoolExecutor
from unittest.mock import patch

import matplotlib.pyplot as plt
import numba
import numpy as np
import torch
from matplotlib.colors import ListedColormap
from numba import cuda

from reference import cases, error
from reference.bench import cost, rows
from reference.bench.plots import COLOURS, FAINT, GREYS, INK, style
from steps import step01_fa1_numba as step01
from steps.step00_naive import fwd_1_matrix, io_count

# %% slideshow={"slide_type": "skip"}
from steps.step01_fa1_numba import bwd_0_published, bwd_2_registers, fwd_1_loops_swapped, fwd_2_registers, resources
from steps.step01_fa1_numba import fwd_0_published as fwd
from steps.workbook import Blank, check, exercises, hint, picture, show, solution  # noqa: F401  for part 5

torch.set_num_threads(1)  # small tensors: one thread is faster, and its times are steadier
torch.set_printoptions(precision=2, sci_mode=False)
style()
compiling = ThreadPoolExecutor().submit(resources.table, 64, only="fwd")  # takes some seconds; part 4 asks for it
print(steps.engine.describe())
print(f"numba {numba.__version__}, numpy {np.__version__}; simulated: {fwd.SIMULATED}")

# %% [markdown] slideshow={"slide_type": "slide"}
# ## 2. The problem, measured
#
# ### Where numbers live
#
# A GPU is a set of streaming multiprocessors (SMs), each of which runs threads in **warps** of 32. What a thread computes
# with lies in its **registers**. The threads of one block also reach a piece of **shared memory** on their SM, which the
# program fills by hand; it has 32 banks, and each gives out one number a cycle. Behind the **L2** cache, common to all
# SMs, lies **device memory**, where tensors live.

# %% slideshow={"slide_type": "fragment"}
gpu, BANKS, LANES = cost.GPUS["NVIDIA H200"], 32, 128  # numbers, and float32 multiply-adds, of an SM in a cycle
sm, multiply_adds = gpu.multiprocessor, gpu.fp32_tflops / 2  # in 10^12 a second, all SMs together
delivers = {"shared memory": multiply_adds * BANKS / LANES, "device memory": gpu.bandwidth / 4}  # 10^12 numbers a second
print(f"{gpu.name}: {gpu.sms} SMs, {multiply_adds:.1f} x 10^12 multiply-adds a second in float32")
for name, size in (("registers", 4 * sm.registers), ("shared memory", sm.shared)):
    print(f"{name:13}  {size / 2**10:.0f} KiB an SM, {size * gpu.sms / 2**20:.1f} MiB in all")
for name, numbers in delivers.items():
    print(f"{name:13}  {4 * numbers:4.1f} TB/s: one number in the time of {multiply_adds / numbers:2.0f} multiply-adds")
tensor_cores = gpu.half_tflops / 2 / (gpu.bandwidth / 2)
print(f"in fp16 on tensor cores (stage 02), device memory: one number in the time of {tensor_cores:.0f}")

# %% [markdown] slideshow={"slide_type": "fragment"}
# So there are two fences. A number from device memory costs as much as 28 multiply-adds, one from shared memory as much
# as 4. The first fence is FlashAttention's subject; what rung 2 does about the second is how any matrix product is made
# fast.

# %% [markdown] slideshow={"slide_type": "subslide"}
# ### What standard attention spends its time on
#
# Rung 1 of stage 00 writes S, reads it for the softmax, writes P, reads it for P V: four times $N^2$ numbers beyond inputs
# and output. Below, its operations and its time on the machine that ran this.

# %% slideshow={"slide_type": "skip"}
def seconds(function, *arguments):
    """The shortest of seven runs."""
    times = []
    for _ in range(7):
        start = time.perf_counter()
        function(*arguments)
        if steps.engine.device == "cuda":
            torch.cuda.synchronize()
        times.append(time.perf_counter() - start)
    return min(times)


N, D = 1024, 64
q, k, v = torch.randn(3, N, D, device=steps.engine.device)
S = q @ k.mT
P = fwd_1_matrix.softmax(S)[0]
taken = [seconds(torch.matmul, q, k.mT), seconds(fwd_1_matrix.softmax, S), seconds(torch.matmul, P, v)]
operations = [2 * N * N * D, 4 * N * N, 2 * N * N * D]  # softmax: maximum, exp(S - m), sum, division

# %% slideshow={"slide_type": "fragment"}
n, moved = 4096, sum(io_count.standard_count(4096, D))
print(f"N = {n}: {moved / (4 * n * D + n):.0f} times the least traffic. On an H200, in times of the arithmetic:")
for dtype, rate, numbers in (("float32", multiply_adds, gpu.bandwidth / 4), ("fp16", gpu.half_tflops / 2, gpu.bandwidth / 2)):
    print(f"    {dtype}: {moved / numbers / (2 * n * n * D / rate):.1f}")
fig, ax = plt.subplots(figsize=(7.2, 2.2), layout="constrained")
for y, what in enumerate((operations, taken)):
    start = 0
    for x, name, colour in zip(what, ("Q Kᵀ", "softmax", "P V"), COLOURS[:3], strict=True):
        percent = 100 * x / sum(what)
        ax.barh(y, percent, left=start, color=colour, height=0.5, label=name if y == 0 else None)
        start += percent
ax.set_yticks([0, 1], ["operations", "time"])
ax.set(xlabel="%", title="standard attention, N = 1024, d = 64", ylim=(-0.5, 1.9))
ax.legend(ncols=3, loc="upper left", fontsize=8)
picture(fig, """Two bars split into Q K transposed, softmax and P V. Softmax is a sliver of the operations
and a far larger part of the time.""")

# %% [markdown] slideshow={"slide_type": "fragment"}
# Softmax is a sliver of the operations and a large part of the time: each of its steps passes over all $N^2$ numbers once
# more. On an H200 the traffic takes about as long as the arithmetic in float32, and 6.5 times as long in fp16.
# FlashAttention's answer: a tile of S is made, used and forgotten on the chip.

# %% [markdown] slideshow={"slide_type": "slide"}
# ## 3. The idea: O is finished after every visit
#
# FlashAttention-1 loads a tile of keys *once* and lets all queries visit it; then the next tile of keys. Between two
# visits a row's O, l and m wait in device memory.
#
# **Claim.** Keep O *normalised*. If a row has O, l, m from the keys so far, and the new tile alone gives
# $m_b = \max S$, $P = e^{S - m_b}$, $l_b = \sum P$, then with $m_{new} = \max(m, m_b)$,
# $\alpha = e^{m - m_{new}}$, $\beta = e^{m_b - m_{new}}$
#
# $$l_{new} = \alpha\, l + \beta\, l_b \qquad O_{new} = \frac{\alpha\, l}{l_{new}}\, O + \frac{\beta}{l_{new}}\, P V_j$$
#
# is the attention over the old and the new keys together.
#
# **Why.** By notebook 00 the sum $\sum e^{s - m} v$ over the old keys is $l\, O$, in the unit $e^m$; over the new ones
# it is $P V_j$, in the unit $e^{m_b}$. $\alpha$ and $\beta$ change both to the unit $e^{m_{new}}$; divide by all of $l$.

# %% [markdown] slideshow={"slide_type": "subslide"}
# The numbers of notebook 00, N = 6 and d = 2, three tiles of two keys; we follow query 5. First with a mistake that is
# easy to make: O rescaled by $\alpha$ as in notebook 00, though this O has been divided by l.

# %% slideshow={"slide_type": "fragment"}
Q = torch.tensor([[1.0, 2], [0, 1], [-1, 0], [2, -1], [1, 1], [3, 1]])
K = torch.tensor([[0.0, 1], [1, 0], [-1, 1], [1, 2], [2, 0], [0, -1]])
V = torch.tensor([[0.0, 6], [2, 0], [4, 6], [6, 4], [8, 0], [10, 6]])
s = Q[5] @ K.T / math.sqrt(2)
exact = [torch.softmax(s[:n], 0) @ V[:n] for n in (2, 4, 6)]


def visits(undo_division):
    """[(m, l, share of the old O, O of the tile alone, O)] of query 5 after each tile of two keys."""
    m, l, O, trace = -math.inf, 0.0, torch.zeros(2), []
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
    same = torch.allclose(O, want)
    print(f"m {m:.2f}  l {l:.2f}  share of the old O {old:.2f}  O {O}  attention so far: {same}")

# %% slideshow={"slide_type": "subslide"}
fig, axes = plt.subplots(1, 3, figsize=(8.4, 3.0), layout="constrained", sharey=True)
for n, ax in enumerate(axes):
    for j in range(6):
        seen = j < 2 * n + 2
        ax.plot(*V[j], "o", color=INK if seen else FAINT, ms=4)
        ax.text(V[j, 0], V[j, 1] + 0.45, f"v{j}", ha="center", fontsize=8, alpha=1 if seen else 0.6)
    O_b, O = trace[n][3], trace[n][4]
    if n:
        ends = torch.stack([trace[n - 1][4], O_b])
        ax.plot(*ends.T, color=FAINT, lw=1.5, zorder=0)
        ax.plot(*ends[0], "s", color=COLOURS[5], ms=8, label="old O")
    ax.plot(*O_b, "D", color=COLOURS[4], ms=8, label="the tile alone")
    ax.plot(*O, "X", color=COLOURS[1], ms=10, label="new O")
    ax.set(title=f"visit {n + 1}: keys {2 * n}, {2 * n + 1}", xlim=(-1, 11), ylim=(-1, 7.6))
fig.legend(*axes[2].get_legend_handles_labels(), loc="outside lower center", ncols=3, fontsize=8)
picture(fig, """Three plots of the six values, one for each visit. At the first, O is the attention over
the first tile. At visits 2 and 3 the new O lies on the line from the old O to the attention over
the new tile alone, nearer to the tile's.""")

# %% [markdown] slideshow={"slide_type": "fragment"}
# With l forgotten the row ends at (6.35, 1.01). Done right, O equals the attention over the keys seen so far after
# every visit, and ends at (6.83, 1.34) as in notebook 00. The new O lies between the old O and the tile alone: at
# visit 2 the old O keeps a share of 0.23, at visit 3 one of 0.39.

# %% [markdown] slideshow={"slide_type": "slide"}
# ## 4. From algorithm to code
#
# ### Numba CUDA in one page
#
# A **kernel** is launched as a **grid** of **blocks**, each of some **threads**: `kernel[blocks, threads](arguments)`.
# Every thread runs the same function and asks where it is: `threadIdx` in its block, `blockIdx` in the grid,
# `cuda.grid(1)` counted over all. A block runs on one SM; its threads share `cuda.shared.array`s, whose sizes the
# compiler must know. `cuda.syncthreads()` is a barrier: no thread passes before all of the block have arrived.
# Below, each of two blocks of three threads writes its three numbers backwards.

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
# ### An index out of bounds
#
# The simulator starts a Python thread for each GPU thread and runs one block after the other. `print` and the debugger
# work in a kernel, and an index past an array's end is an error; a GPU would read or overwrite whatever lies there. Three
# blocks are one too many. The message says who did it: `ctaid` is the block, `tid` the thread. Block 2 starts at index 6,
# past the end: what is missing is `if n < x.shape[0]`.

# %% slideshow={"slide_type": "fragment"}
if fwd.SIMULATED:
    try:
        launch(backwards, 3, 3)
    except IndexError as mistake:
        print("IndexError:", mistake)
else:
    print("not tried: on a GPU nothing checks the index")

# %% [markdown] slideshow={"slide_type": "subslide"}
# ### What the simulator cannot show
#
# Two kernels that are wrong on a GPU: one has no barrier, in the other only three of six threads reach it. The simulator
# reports neither, and a right result proves nothing. It knows no warps and no types either, and says nothing about speed.
# NVIDIA's `compute-sanitizer` finds races, on a GPU; so do you, in 01.bug1.

# %% slideshow={"slide_type": "fragment"}
@cuda.jit
def no_barrier(x, out):
    tile = cuda.shared.array(6, np.float32)
    t = cuda.threadIdx.x
    tile[t] = x[t]
    out[t] = tile[max(t - 1, 0)]  # a race: has the neighbour written yet?


@cuda.jit
def divergent_barrier(x, out):
    tile = cuda.shared.array(6, np.float32)
    t = cuda.threadIdx.x
    tile[t] = x[t]
    if t < 3:
        cuda.syncthreads()  # undefined on a GPU: it may hang
    out[t] = tile[max(t - 1, 0)]


for kernel in (no_barrier, divergent_barrier) if fwd.SIMULATED else ():
    right = sum(launch(kernel, 1, 6).tolist() == [0, 0, 1, 2, 3, 4] for _ in range(20))
    print(f"{kernel.__name__}: right in {right} of 20 runs")

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

# %% [markdown] slideshow={"slide_type": "subslide"}
# ### The budget, before any launch
#
# Arrays of a fixed size may take 48 KiB of a block's shared memory. `check_shared` adds up those of a kernel, and refuses
# a tile that does not fit while there is still a message to read. The paper's line 1 gives K, V, Q and O all the room and
# S none (`papers/errata.md`, E4).

# %% slideshow={"slide_type": "fragment"}
def shared_bytes(Br, Bc, D):
    """Q_i, K_j, V_j and S, each with a spare column, and two factors a row: what rung 0 hands to check_shared."""
    return 4 * ((Br + 2 * Bc) * (D + 1) + Br * (Bc + 1) + 2 * Br)


for tile in ((16, 16), (16, 32), (32, 64), (64, 64)):
    need = shared_bytes(*tile, 64)
    fits = cost.occupancy((9, 0), threads=256, shared=need)
    print(f"tile {str(tile):8}  {need / 1024:4.1f} KiB", f"{fits.blocks} blocks an SM" * (need <= fwd.SHARED_BYTES))
try:
    fwd.forward_kernel(64, 64, 64)
except ValueError as refusal:
    print(textwrap.fill(f"ValueError: {refusal}", 110))
for d in (64, 128):  # Alg. 1, line 1, for all that a block of an H200 can ask for
    Bc = math.ceil(sm.shared_per_block / 4 / (4 * d))
    Br = min(Bc, d)
    KVQO, with_S = (cost.shared_bytes(Br, Bc, d, tiles=t) / sm.shared_per_block for t in ("QKVO", "QKVOS"))
    print(f"line 1, d = {d}: Br {Br}, Bc {Bc}: K, V, Q, O take {KVQO:.0%} of a block's limit, with S {with_S:.0%}")

# %% [markdown] slideshow={"slide_type": "subslide"}
# Read the barriers first: each says which threads wait for what. Of a tile's numbers each thread (x, y) takes those of
# rows y, y + 16, … and columns x, x + 16, …; neighbours in x touch neighbouring addresses.

# %% slideshow={"slide_type": "fragment"}
show("fwd_0_published", "kernel")

# %% [markdown] slideshow={"slide_type": "subslide"}
# ### The order of the visits
#
# Tiles of 8 for 24 queries and 32 keys: FlashAttention-1 goes through S column by column, FlashAttention-2 row by row.
# In rows, what a query tile adds up can stay on the chip until it is finished; O need not be divided on every visit, and
# notebook 00's update, one $\alpha$ and no $\beta$, is enough. Below, when each row of O is written.

# %% slideshow={"slide_type": "fragment"}
Tr, Tc = 3, 4
orders = {"FA1: keys outside": [(i, j) for j in range(Tc) for i in range(Tr)],
          "FA2: queries outside": [(i, j) for i in range(Tr) for j in range(Tc)]}  # fmt: skip
fig, axes = plt.subplots(2, 2, figsize=(8, 4.4), layout="constrained", height_ratios=(1.1, 1))
for (name, order), top, bottom in zip(orders.items(), *axes, strict=True):
    for visit, (i, j) in enumerate(order, 1):
        top.add_patch(plt.Rectangle((8 * j, 8 * i), 8, 8, facecolor=COLOURS[i], edgecolor="white", lw=2))
        top.text(8 * j + 4, 8 * i + 4, visit, color="white", ha="center", va="center", fontweight="bold")
        if name.startswith("FA1") or j == Tc - 1:
            bottom.add_patch(plt.Rectangle((visit - 0.4, 8 * i), 0.8, 8, facecolor=COLOURS[i]))
    top.set(xlim=(0, 32), ylim=(24, 0), title=name, xlabel="key", ylabel="query")
    bottom.set(xlim=(0.4, 12.6), ylim=(24, 0), xlabel="visit", ylabel="row of O written")
    bottom.set_xticks(range(1, 13))
    for ax in (top, bottom):
        ax.set_yticks(range(0, 25, 8))
        ax.grid(False)
    top.set_xticks(range(0, 33, 8))
picture(fig, """Top: S as 3 by 4 tiles with the number of the visit. FA1 numbers them down the columns,
FA2 along the rows. Bottom: the rows of O written at each visit. FA1 writes a tile of rows at every
one of the 12 visits, so each row four times; FA2 writes each row once, at visits 4, 8 and 12.""")

# %% [markdown] slideshow={"slide_type": "subslide"}
# ### What the order costs
#
# Notebook 00 counted both orders in torch. The kernels themselves can be counted, too: the simulator takes anything that
# can be indexed, so we hand them arrays that count.

# %% slideshow={"slide_type": "fragment"}
class Counted:
    """Stands for an array in the simulator, and counts the numbers loaded from it and stored to it."""

    def __init__(self, *shape, value=1):
        self.data, self.shape, self.loads, self.stores = np.full(shape, value, np.float32), shape, 0, 0

    def __getitem__(self, index):
        self.loads += 1
        return self.data[index]

    def __setitem__(self, index, value):
        self.stores += 1
        self.data[index] = value


def counted(rung, blocks, N, D, B):
    """(loads, stores) of device memory by a rung's kernel, one head, tiles (B, B)."""
    arrays = [Counted(1, N, D) for _ in "qkv"] + [Counted(1, N, D, value=0), Counted(1, N, value=0)]
    arrays += [Counted(1, N, value=-math.inf)] if rung is fwd else []  # q, k, v, O, l, m; in rung 1 out, lse
    rung.forward_kernel(B, B, D)[blocks, fwd.THREADS](*arrays, False, np.float32(1))
    return sum(a.loads for a in arrays), sum(a.stores for a in arrays)


# %% slideshow={"slide_type": "subslide"}
N, D, B = 16, 4, 8
for name, rung, blocks, expected in (("rung 0", fwd, 1, io_count.fa1_count), ("rung 1", fwd_1_loops_swapped, N // B,
                                                                             io_count.fa2_count)) * fwd.SIMULATED:  # fmt: skip
    print(f"{name}: loads, stores {counted(rung, blocks, N, D, B)}, notebook 00 expects {expected(N, D, B, B)}")
N, D = 4096, 64
TILES = {"published": (16, 16), "loops_swapped": (16, 32), "registers": (128, 64)}  # the defaults on a GPU, d = 64
moves = {"published": io_count.fa1_count(N, D, *TILES["published"])}
moves |= {name: io_count.fa2_count(N, D, *TILES[name]) for name in ("loops_swapped", "registers")}
loads, stores = moves["registers"]
moves["registers"] = loads + (N // TILES["registers"][1] - 1) * N * D, stores  # it reads Q_i again for each key tile
print(f"million numbers at N = {N}, d = {D}; standard attention: {sum(io_count.standard_count(N, D)) / 1e6:.0f}")
for name, (loads, stores) in moves.items():
    print(f"{name:13} tile {str(TILES[name]):9}  loads {loads / 1e6:5.1f}  stores {stores / 1e6:5.2f}")

# %% [markdown] slideshow={"slide_type": "fragment"}
# Rung 1 agrees to the number. Rung 0 looks at m twice (a compiler loads it once), and its first zeros are written by
# torch. At N = 4096 swapping the loops makes 69.48 million stores 0.27 million. The loads fall less: with tiles of 16 both
# orders ask for more than standard attention does, and only rung 2's large tiles end that. A part is answered by L2.

# %% [markdown] slideshow={"slide_type": "subslide"}
# ### Who works
#
# With keys outside, two key tiles may not update one row of O at the same time: a head stays in one block, and a block
# stays on one SM. With queries outside every query tile can be a block. Below, what `forward` asks for when it launches,
# and the first wave of blocks on the SMs.

# %% slideshow={"slide_type": "fragment"}
def grid(rung, tile, B, H, N=4096, D=1):
    """The number of blocks that the rung's forward launches."""
    asked, x = [], torch.empty(B, H, N, D)
    no_launch = {"forward_kernel": lambda *sizes: None, "launch": lambda _, blocks, *rest: asked.append(blocks)}
    with patch.multiple(rung, **no_launch):
        rung.forward(x, x, x, tile=tile)
    return asked[0]


forwards = dict(zip(TILES, (fwd, fwd_1_loops_swapped, fwd_2_registers), strict=True))
for batch, H in ((1, 16), (4, 16), (4, 32)):
    asked = {name: grid(rung, TILES[name], batch, H) for name, rung in forwards.items()}
    busy = (f"{name} {n} blocks, {min(1, n / gpu.sms):.0%} of the SMs" for name, n in asked.items())
    print(f"{batch} x {H} heads:", "; ".join(busy))

# %% slideshow={"slide_type": "subslide"}
fig, axes = plt.subplots(1, 2, figsize=(8.4, 3.7), layout="constrained")
for ax, (name, resident) in zip(axes, (("published", 1), ("registers", 2)), strict=True):
    blocks = grid(forwards[name], TILES[name], 1, 16)
    heads = np.arange(gpu.sms * resident) * 16 // blocks  # of the blocks of the first wave
    places = np.ma.masked_greater(heads, 15).reshape(resident, 11, 12).transpose(1, 0, 2).reshape(-1, 12)
    ax.pcolormesh(places % 6, cmap=ListedColormap(COLOURS), vmin=0, vmax=5, edgecolors=FAINT, lw=0.8)
    ax.hlines(range(0, 11 * resident + 1, resident), 0, 12, color="white", lw=4)
    for head in range(min(16, heads[-1] + 1)):
        y, x = np.argwhere((places == head).filled(False))[0]
        ax.text(x + 0.5, y + 0.5, f"{head}", ha="center", va="center", fontsize=8, color="white")
    ax.set(title=f"{name}: {blocks} blocks", ylim=(11 * resident, 0), xticks=[], yticks=[])
    ax.spines[:].set_visible(False)
picture(fig, """The 132 multiprocessors of an H200 as a grid of 11 by 12, for one sequence of 4096 tokens with
16 heads. Published: 16 are coloured, one for each head, the others are empty. Registers: each has two
blocks; the first wave is heads 0 to 8.""")

# %% [markdown] slideshow={"slide_type": "fragment"}
# White SMs have nothing to do. On the right each SM has two blocks (why two: below), and a later wave brings the other
# heads. A number is where a head begins. Which block goes where is the GPU's business; the drawing deals them out in turn.

# %% [markdown] slideshow={"slide_type": "subslide"}
# ### Rung 1: the loops swapped

# %% slideshow={"slide_type": "fragment"}
show("fwd_1_loops_swapped", "kernel")

# %% [markdown] slideshow={"slide_type": "subslide"}
# ### Rung 2: what a thread keeps to itself
#
# The second fence. `dot`, in rungs 0 and 1, fetches both factors of every product from shared memory. In rung 2 a thread
# owns a **patch** of 8 x 8 numbers of S, in its registers: for each column it fetches 8 numbers of Q_i and 8 of K_j, and
# multiplies each with each, an outer product. Counted in one thread:

# %% slideshow={"slide_type": "fragment"}
Q_i, K_j, A, B, S = Counted(16, 65), Counted(32, 65), Counted(128, 17), Counted(64, 17), Counted(8, 8)


@cuda.jit
def one_thread():
    fwd.dot(Q_i, 0, K_j, 0, 64)
    fwd_2_registers.add_products(S, A, 0, B, 8, 16)


loads_each = {"dot": 2.0, "add_products": 0.25}
if fwd.SIMULATED:
    one_thread[1, 1]()
    loads_each = {"dot": (Q_i.loads + K_j.loads) / 64, "add_products": (A.loads + B.loads) / S.stores}
for name, each in loads_each.items():
    print(f"{name}: {each} loads a multiply-add; shared memory allows {delivers['shared memory'] * 2 / each:.1f} TFLOP/s")

# %% slideshow={"slide_type": "subslide"}
show("fwd_2_registers", "add_products")

# %% [markdown] slideshow={"slide_type": "subslide"}
# ### A patch, and the banks that a warp asks
#
# Thread (x, y) owns every 16th row from y on and every 8th column from x on, so that neighbours fetch neighbouring rows of
# a tile. Address a lies in bank a mod 32. Different addresses in one bank are served one after the other: with rows of 16
# numbers every other row begins in the same bank. A spare column makes the width 17, and all rows differ.

# %% slideshow={"slide_type": "fragment"}
fig, (left, *bars) = plt.subplots(1, 3, figsize=(8.6, 3.3), layout="constrained")
owners = np.full((128, 64), np.nan)
for index, (x, y) in enumerate(((0, 0), (1, 0), (3, 9))):
    owners[y::16, x::8] = index
    left.plot([], [], "s", color=COLOURS[index], label=f"thread {x, y}")
left.imshow(owners, cmap=ListedColormap(COLOURS[:3]), aspect="auto", interpolation="nearest", extent=(0, 64, 128, 0))
left.set(title="patches on S", xlabel="64 keys", ylabel="128 queries")
left.set_xticks(range(0, 65, 8))
left.set_yticks(range(0, 129, 16))
left.legend(fontsize=7, loc="upper center", bbox_to_anchor=(0.5, -0.2), ncols=3, handletextpad=0, columnspacing=0.6)
for ax, width in zip(bars, (16, 17), strict=True):
    addresses = {(0 * 8 + x) * width + 3 for x in range(8)}  # a warp's B[c * X + x, d] for c = 0, d = 3
    asked = [sum(a % BANKS == bank for a in addresses) for bank in range(BANKS)]
    ax.bar(range(BANKS), asked, color=[COLOURS[1] if n > 1 else COLOURS[0] for n in asked])
    ax.set(title=f"rows of {width}: {max(asked)} in turn", xlabel="bank", ylim=(0, 4.4))
bars[0].set(ylabel="addresses asked of a bank")
picture(fig, """Left: the numbers of S that three threads own, each a regular grid of 8 by 8 points, 16
rows and 8 columns apart. Right: addresses asked of each of the 32 banks when a warp fetches one
column of B. With rows of 16 two banks are asked for four addresses each; with rows of 17 eight
banks for one each.""")

# %% [markdown] slideshow={"slide_type": "subslide"}
# ### What it takes: registers
#
# The patches of S and O, m and l are $8 \cdot 8 + 8 \cdot 8 + 8 \cdot 2 = 144$ of the 255 registers that a thread can have; the
# rest is for factors and addresses. `check_registers` counts. What the compiler then makes of a kernel needs no GPU:

# %% slideshow={"slide_type": "fragment"}
try:
    fwd_2_registers.check_registers("tile (128, 128), head_dim 128", (8, 16), (8, 16), (8, 2))
except ValueError as refusal:
    print(textwrap.fill(f"ValueError: {refusal}", 110))
try:
    compiled = compiling.result()
except RuntimeError:
    compiled = print("this installation of Numba has no CUDA compiler") or []
for row in compiled:
    assert tuple(row["tile"]) == TILES[row["kernel"].removeprefix("fwd_")[2:]]
    print(f"{row['kernel']:19}  {row['registers']:3} registers, {row['spilled']} bytes spilled, {row['shared'] / 1024:.0f} KiB:",
          f"{row['blocks']} blocks of {row['threads']} threads an SM ({row['limit']}), occupancy {row['occupancy']:.0%}")  # fmt: skip

# %% [markdown] slideshow={"slide_type": "fragment"}
# Rung 2 fills an eighth of the places for warps, the least of the three, and part 7 shows that it is the fastest. A second
# warp helps while the first waits; a warp with 64 independent sums has work of its own.

# %% [markdown] slideshow={"slide_type": "subslide"}
# ### The float64 trap, and signed indices
#
# A Python number in a Numba kernel is a float64, and turns the arithmetic around it into float64. The simulator computes
# with NumPy, where float32 wins, and cannot show it. And of a signed index Numba asks each time whether it is negative,
# as in x[-1]. We compile four functions to PTX, in a process that does not simulate.

# %% slideshow={"slide_type": "fragment"}
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


# %% slideshow={"slide_type": "fragment"}
program = "import re\nimport numpy as np\nfrom numba import cuda, float32\n"
program += "".join(map(inspect.getsource, (plain, with_casts, signed, unsigned)))
program += """
for f in plain, with_casts, signed, unsigned:
    ptx, _ = cuda.compile_ptx(f, (float32[::1], float32[::1]), cc=(8, 0))
    lines = re.findall(r"^\\t((?:fma|cvt.*f32|mul.f|setp|ld.global)\\S*\\s.*);", ptx, re.M)
    print(f"{f.__name__:10}", " | ".join(re.sub(r"\\s+", " ", line) for line in lines))
"""
environment = os.environ | {"NUMBA_ENABLE_CUDASIM": "0"}
done = subprocess.run([sys.executable, "-c", program], env=environment, capture_output=True, text=True)
print(done.stdout if done.returncode == 0 else "this installation of Numba has no CUDA compiler")
print("with a Python number, NumPy (and so the simulator) gives", type(np.float32(1) * 0.5).__name__)

# %% [markdown] slideshow={"slide_type": "fragment"}
# `plain` converts to float64 and back around a float64 multiply-add; hence `ZERO` and `np.float32(scale)` in the module, and
# a test that finds no `.f64` in any kernel. `signed` asks twice (`setp`) and needs an address for each load; `unsigned` has
# one address, and `+64` for the other number. A patch of constant distances wants the latter: `unsigned` in rung 2.

# %% [markdown] slideshow={"slide_type": "subslide"}
# ### A multiply-add too many
#
# GPUs compute $2^x$. Fast kernels therefore write $e^{x - m}$ as $2^{x c - m c}$ with $c = \log_2 e$: m c is there once for
# a row, and x c - m c is one fused multiply-add, which does not round x c. But m c *has* been rounded, so the two no longer
# cancel at x = m. Below, all else in float64: 256 rows of 4096 scores of about ±200, in tiles of 64.

# %% slideshow={"slide_type": "fragment"}
c = np.float32(math.log2(math.e))
exact = lambda x, m: np.exp(np.float64(x) - np.float64(m))  # noqa: E731
plain = lambda x, m: np.exp(np.float64(x - m))  # noqa: E731
fused = lambda x, m: np.exp2(np.float64(np.float32(np.float64(x) * c - np.float64(m * c))))  # noqa: E731


def online(in_alpha, in_P, x, v):
    """(P at the maximum, out, lse) of rows of scores x (rows, N) in float32, and values v (N,), by tiles of 64."""
    m, l, O = np.full(len(x), -np.inf, np.float32), 0, 0
    for j in range(0, x.shape[1], 64):
        m_new = np.maximum(m, x[:, j : j + 64].max(1))
        alpha, P = in_alpha(m, m_new), in_P(x[:, j : j + 64], m_new[:, None])
        m, l, O = m_new, alpha * l + P.sum(1), alpha * O + P @ v[j : j + 64]
    return in_P(m, m), O / l, m + np.log(l)


random = np.random.default_rng(0)
x, v = random.normal(0, 55, (256, 4096)).astype(np.float32), random.normal(0, 1, 4096)
right = online(exact, exact, x, v)
for name, functions in {"exp(x - m)": (plain, plain), "fused, P": (plain, fused), "fused, alpha too": (fused, fused)}.items():
    worst = (abs(a - b).max() for a, b in zip(online(*functions, x, v), right, strict=True))
    print(f"{name:17} largest error: ", "  ".join(f"{what} {e:.1e}" for what, e in zip(("P at m", "out", "lse"), worst, strict=True)))
print(f"float32's own rounding of a score of 200: {np.spacing(np.float32(200)) / 2:.1e}")

# %% [markdown] slideshow={"slide_type": "fragment"}
# Near the maximum x - m is exact. Fused, P is off at the very maximum by as much again as a score's own rounding. All of
# a tile's P is off by one factor, most of which cancels in O / l; lse keeps it, and the backward takes every P from lse.
# With alpha written alike it is worse: alpha is no longer 1 where m stands still, and each of 64 tiles adds to the error.
# FlashAttention-2's code fuses P only. Stage 01 pays a few instructions a score for exp(x - m).

# %% [markdown] slideshow={"slide_type": "subslide"}
# ### The backward, in short
#
# Rung 0 is Algorithm 4: keys outside, so that dK_j and dV_j are finished in one visit, and dQ plays O's part, read and
# written $T_c$ times. dQ adds up over keys, dK and dV over queries; registers can hold only what the outer loop stands
# still for. So rung 2 has two kernels, each in the order that suits it:
#
# | kernel | outer loop | in registers | products |
# |---|---|---|---|
# | `queries_kernel` | queries | dQ_i | S, dP, dQ |
# | `keys_kernel` | keys | dK_j, dV_j | Sᵀ, dPᵀ, dV, dK |
#
# Seven products instead of five, since S and dP are computed twice. In return nothing in device memory is added to, no
# addition is atomic, and every run gives the same bits. All seven are `add_products`.

# %% slideshow={"slide_type": "fragment"}
q, k, v, dout = torch.randn(4, 1, 1, 9, 4, device=steps.engine.device)
out, lse = step01.forward(q, k, v)
for rung in (bwd_0_published, bwd_2_registers):
    first, second = (rung.backward(dout, q, k, v, out, lse) for _ in range(2))
    same = all(torch.equal(a, b) for a, b in zip(first, second, strict=True))
    print(f"{rung.__name__.rsplit('.')[-1]}: the same bits twice: {same}")

# %% [markdown] slideshow={"slide_type": "slide"}
# ## 5. Write it yourself
#
# Write the body in place of `raise Blank` and run the cell: `check` puts your function in the place of the stage's, runs
# some of the contract's cases, and names what fails. `hint("01.1")` asks a question, `hint("01.1", 2)` gives the formula,
# `hint("01.1", 3)` pseudo-code, `solution("01.1")` the stage's function. Whatever the stage's file defines can be used:
# `ZERO`, `MINUS_INF`, `dot`, and `exp_difference(x, m)`, which is exp(x - m), and 0 for x = -inf even where m is -inf too.
#
# **Exercise 01.1: one tile of keys, with O kept normalised.** Part 3's claim, one thread a row. S arrives as scores and
# leaves as $P = e^{S - m_b}$; l and m of this head are updated; `old` and `new` receive the two factors of O. Mind rows
# past the end, and rows that have seen no key.

# %% slideshow={"slide_type": "fragment"}
@cuda.jit(device=True)
def online_update(S, old, new, l, m, head, i, Bc):
    """S (Br, Bc), scores, then P, and old, new (Br,) in shared memory; l, m (heads, Nq) in device memory; i: first row."""
    raise Blank


check("01.1", online_update)

# %% [markdown] slideshow={"slide_type": "subslide"}
# **Exercise 01.2: the same tile, with O not divided.** Rung 1: P is born in the unit of m_new, and `alpha` is O's factor.
# l, m and alpha are in shared memory and have a place for every row of the tile.

# %% slideshow={"slide_type": "fragment"}
@cuda.jit(device=True)
def online_update(S, alpha, l, m, Bc):  # noqa: F811
    """Turns S (Br, Bc) into P = exp(S - m_new) and takes it into l, m (Br,); alpha (Br,) is what O is multiplied with."""
    raise Blank


check("01.2", online_update)

# %% [markdown] slideshow={"slide_type": "subslide"}
# **Exercise 01.3: the gradient of the scores.** Rung 0's backward has P of a tile; dS is wanted. Now all threads share
# the tile: thread (x, y) takes rows y, y + blockDim.y, … and columns x, x + blockDim.x, …

# %% slideshow={"slide_type": "fragment"}
@cuda.jit(device=True)
def score_gradients(dS, P, dO_i, V_j, delta, head, i, Bc, D):
    """dS (Br, Bc) from P (Br, Bc), dO_i (Br, D), V_j (Bc, D) in shared memory and delta (heads, Nq); i: first row."""
    raise Blank


check("01.3", score_gradients)

# %% [markdown] slideshow={"slide_type": "subslide"}
# **Bug hunt 01.bug1.** What was reported about `steps/step01_fa1_numba/broken/bug1.py` is printed below. Find the cause,
# and write the test that would have caught it: it has to fail on the broken forward and pass on the stage's own.

# %% slideshow={"slide_type": "fragment"}
print(textwrap.fill(exercises.find("01.bug1").symptom, 110))


def test(forward):
    """Asserts what must hold of (out, lse) = forward(q, k, v, causal=..., scale=...), whoever wrote it."""
    raise Blank


check("01.bug1", test)

# %% [markdown] slideshow={"slide_type": "subslide"}
# **Bug hunt 01.bug2.** The same for `bug2.py`, which has no barrier, and needs none.

# %% slideshow={"slide_type": "fragment"}
print(textwrap.fill(exercises.find("01.bug2").symptom, 110))


def test(forward):
    """Asserts what must hold of (out, lse) = forward(q, k, v, causal=..., scale=...), whoever wrote it."""
    raise Blank


check("01.bug2", test)

# %% [markdown] slideshow={"slide_type": "slide"}
# ## 6. Check it, then break it
#
# Three of the contract's cases, the forward of every rung (`pytest tests/test_step01_fa1_numba.py` runs all).

# %% slideshow={"slide_type": "fragment"}
def prepared(*names):
    """(case, its inputs for this stage, what is expected) for the named cases."""
    for case in (c for c in cases.CASES if c.name in names):
        x = cases.build(case, step01.SUPPORTS, torch.float32, steps.engine.device)
        yield case, x, error.expected(x.q, x.k, x.v, x.dout, causal=x.causal, scale=x.scale)


for case, x, want in prepared("more_queries_causal", "no_key", "rising"):
    print(case.says)
    for rung in TILES:
        got = dict(zip(("out", "lse"), step01.forward(x.q, x.k, x.v, **x.options, rung=rung), strict=True))
        share = max(e / (want.tolerance[name] or 1) for name, e in error.errors(got, want).items())
        print(f"    {rung:13} {'wrong' if error.failures(got, want) else 'ok'}; largest error: {share:.2f} of its tolerance")

# %% [markdown] slideshow={"slide_type": "subslide"}
# Now flip one thing. `first_query_tile` skips the query tiles above the diagonal: key j is first seen by query
# j - (Nk - Nq). Suppose we forget Nk - Nq. **Which of the three causal cases fails: as many queries as keys, fewer, or
# more?**
#
# <details><summary>Answer</summary>
#
# Only the one with fewer queries. There the loop starts too late, and rows miss keys they should see. With more queries
# it starts too early: those tiles are masked throughout, and change nothing but the time.
#
# </details>

# %% slideshow={"slide_type": "fragment"}
@cuda.jit(device=True)
def shift_forgotten(j, Nq, Nk, Br, causal):
    return j // Br * Br if causal else 0


fwd.forward_kernel.cache_clear()  # compiled kernels are forgotten
for case, x, want in prepared("ragged_causal", "fewer_queries_causal", "more_queries_causal"):
    with patch.object(fwd, "first_query_tile", shift_forgotten):
        out, lse = step01.forward(x.q, x.k, x.v, **x.options, rung="published")
    print("fails: " if error.failures({"out": out, "lse": lse}, want) else "passes:", case.says)
fwd.forward_kernel.cache_clear()

# %% [markdown] slideshow={"slide_type": "slide"}
# ## 7. Predict, then measure
#
# The rows were measured at N = 4096, not causal, with 4 x 32 heads at d = 64 and 4 x 16 at d = 128.
#
# **Question 1.** Rung 1 fills the GPU whatever the batch is. Is it faster than rung 0 by the same factor at d = 64 and at
# d = 128? And what does rung 2 gain?
#
# <details><summary>Answer</summary>
#
# No: 128 heads already occupy 128 of 132 SMs, and little is gained; 64 heads leave half of them idle. Swapping the loops
# alone makes no fast kernel. Eight times fewer loads from shared memory do.
#
# </details>

# %% slideshow={"slide_type": "fragment"}
measured = {}  # {(pass, d): {kernel or peer: row}}
for r in rows.latest(rows.read()):
    if (r["gpu"], r["dtype"], r["N"], r["causal"]) == (gpu.name, "fp32", 4096, False) and (r["stage"] or "01")[:2] == "01":
        measured.setdefault((r["pass"], r["D"]), {})[r["kernel"] or r["peer"]] = r


def ladder(which):
    """TFLOP/s of this stage's kernels and of PyTorch's, what that is of sdpa-efficient, and the error."""
    print(f"{which}, TFLOP/s: ", *(f"d = {d:3}, of sdpa-efficient, error     " for d in (64, 128)))
    for name in sorted(measured[which, 64]):
        pair = [(measured[which, d][name], measured[which, d]["sdpa-efficient"]) for d in (64, 128)]
        print(f"{name:20}", *(f"{r['tflops']:5.1f}  {r['tflops'] / best['tflops']:5.2f}  {r['error']:.0e}       " for r, best in pair))


ladder("fwd")
speed = {name: {d: measured["fwd", d][f"fwd_{n}_{name}"]["tflops"] for d in (64, 128)} for n, name in enumerate(TILES)}
print("swapping the loops:", *(f"d = {d}: x {speed['loops_swapped'][d] / speed['published'][d]:.1f}" for d in (64, 128)))

# %% [markdown] slideshow={"slide_type": "subslide"}
# **Question 2.** Three roofs: float32 arithmetic, device memory, shared memory. Which is the lowest over each rung at
# d = 64? Intensities are FLOPs for a byte that the kernel asks for, as counted in part 4.
#
# <details><summary>Answer</summary>
#
# Shared memory over rungs 0 and 1: two loads a multiply-add. Over rung 2 shared memory and arithmetic meet, by design:
# a quarter of a load costs one multiply-add. Device memory over none, even with tiles of 16.
#
# </details>

# %% slideshow={"slide_type": "fragment"}
flops = 4 * 4096**2 * 64
intensity = {name: (flops / (4 * sum(moves[name])), 2 / (4 * loads_each[how]))
             for name, how in zip(TILES, ("dot", "dot", "add_products"), strict=True)}  # fmt: skip
fig, axes = plt.subplots(1, 2, figsize=(8.6, 3.8), layout="constrained", sharey=True)
for side, (ax, (memory, numbers), ends) in enumerate(zip(axes, delivers.items(), ((0.1, 20), (1, 200)), strict=True)):
    side = 1 - side  # shared memory is drawn first
    xs = np.geomspace(*ends, 200)
    ax.loglog(xs, np.minimum(4 * numbers * xs, gpu.fp32_tflops), color=INK, lw=1.2)
    for name, colour, marker in zip(TILES, COLOURS, "osD", strict=False):
        at, roof = intensity[name][side], min(4 * numbers * intensity[name][side], gpu.fp32_tflops)
        ax.plot(at, speed[name][64], marker, color=colour, label=name)
        if side == 1 or name != "loops_swapped":
            ax.plot([at, at], [speed[name][64], roof], ":", color=colour, lw=1)
        print(f"{name:13} {memory}: {at:5.2f} FLOPs a byte, roof {roof:4.1f}, measured {speed[name][64]:4.1f} TFLOP/s")
    for look, peer in zip(("--", ":"), ("sdpa-efficient", "sdpa-math"), strict=True):
        ax.axhline(measured["fwd", 64][peer]["tflops"], color=GREYS[1], ls=look, lw=1.2, label=peer)
    ax.set(xlabel=f"FLOPs a byte of {memory}", title=memory)
axes[0].set(ylabel="TFLOP/s")
axes[1].legend(fontsize=8, loc="lower right")
picture(fig, """Two rooflines of an H200 in float32.""")

# %% [markdown] slideshow={"slide_type": "subslide"}
# **Question 3.** TFLOP/s of the backward count five products, and rung 2 computes seven. If each product went as fast as in
# the forward, what would the backward reach?
#
# <details><summary>Answer</summary>
#
# 5/7 of the forward's speed. It stays below that: three patches at a time leave fewer registers.
#
# </details>

# %% slideshow={"slide_type": "fragment"}
ladder("bwd")
for d in (64, 128):
    b = measured["bwd", d]["bwd_2_registers"]["tflops"]
    print(f"d = {d}: 5/7 of the forward would be {5 / 7 * speed['registers'][d]:.1f}; measured {b:.1f}")

# %% [markdown] slideshow={"slide_type": "fragment"}
# The honest lines. Swapping the loops gains little at d = 64, where the published order almost fills the machine. All rungs
# stay well below their roofs: a roof knows nothing of waiting, and in rungs 0 and 1 `online_update` keeps 16 of 256 threads
# busy. Rung 2 reaches about half of PyTorch's memory-efficient kernel, its backward a third. The keys kernel spills
# registers (`resources.table(64, only="keys")`) and was still the fastest of the tiles tried.

# %% [markdown] slideshow={"slide_type": "slide"}
# ## 8. Summary
#
# - Two fences: device memory, which tiles keep S away from, and shared memory, which patches of registers keep factors
#   away from.
# - FlashAttention-1 keeps O normalised: after every visit it is the attention over the keys so far.
# - Keys outside: O, l, m come and go at every visit, and a head is bound to one block. Queries outside: written once, a
#   block for each query tile.
# - Budgets of shared memory and registers are computed before the launch; low occupancy can be fast.
# - The simulator checks indices and arithmetic, not races, barriers, types or speed.
#
# **Ask yourself**
#
# 1. Why must every thread of a block reach each barrier, even one that has no row?
# 2. What would be saved by storing O undivided between visits? What would be lost?
# 3. Why is O float32 between rung 0's visits when q, k and v are float16?
# 4. Which loads a multiply-add would a patch of 4 x 4 need, and of 16 x 16? What forbids the latter?
# 5. Why does the backward of rung 2 need no atomic addition, and what does that cost?
#
# **Go further**
#
# - ★ (15 minutes) Draw the banks that a warp asks in `store_transposed`. Which width would serve both it and
#   `add_products`?
# - ★★ (1 hour) In a copy of rung 1, let query i see only the last w keys. Which visits can now be skipped? Check against
#   `reference.attention.forward(..., causal=True, window=(w - 1, 0))`.
# - ★★★ (a weekend) Give rung 2 other tiles and patches, and predict from `resources.table` and the roofs which is the
#   fastest; on a GPU, `python -m steps bench --stage 01` tells.
#
# **Read:** `papers/flash_attention.md`; Numba's pages on the CUDA simulator.
#
# **Next:** [02a_fa2_cuda_first_kernels.ipynb](02a_fa2_cuda_first_kernels.ipynb). The order of rung 1 again, in CUDA C++.
