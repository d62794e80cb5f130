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
# # 01. FlashAttention-1, a kernel in Numba
#
# ## 1. The question
#
# *How does a GPU hold attention's tiles on the chip, and what does FlashAttention-1's loop order cost?*
#
# - **Before you start:** notebook 00: tiles, the running maximum, l, lse. No GPU programming.
# - **Time:** about 45 minutes to read, an hour more with the exercise.
# - **Hardware:** any. Without a GPU the kernels run in Numba's simulator: the same source, slowly, on tiny sizes.
# - **Code:** `steps/step01_fa1_numba/`. **Tests:** `pytest tests/test_step01_fa1_numba.py`.
# - **Paper:** FlashAttention (2205.14135), restated in `papers/flash_attention.md`. Words: `reference/glossary.md`.

# %% slideshow={"slide_type": "skip"}
import steps  # first: it chooses the engine, and tells Numba whether to simulate
import inspect
import math
import os
import subprocess
import sys
import time
import warnings
from unittest.mock import patch

import matplotlib.pyplot as plt
import numba
import numpy as np
import torch
from numba import cuda

from reference import attention, cases, error, mutants
from reference.bench import cost, plots, rows
from reference.bench.plots import COLOURS, FAINT, INK, style
from steps import step01_fa1_numba as step01
from steps.step00_naive import fwd_1_matrix
from steps.step01_fa1_numba import fwd_0_published as fwd
from steps.workbook import picture, show

# %% slideshow={"slide_type": "skip"}
torch.set_num_threads(1)  # small tensors: one thread is faster, and its times are steadier
torch.set_printoptions(precision=2, sci_mode=False)
style()
print(steps.engine.describe())
print(f"numba {numba.__version__}, numpy {np.__version__}; simulated: {fwd.SIMULATED}")

# %% [markdown] slideshow={"slide_type": "slide"}
# ## 2. The problem, measured
#
# ### Where numbers live
#
# A GPU is a set of streaming multiprocessors (SMs). What a thread computes with lies in its **registers**. The threads
# of one block can also reach a piece of **shared memory** on their SM, which the program fills by hand. Behind the
# **L2** cache, common to all SMs, lies **device memory** (HBM on data-centre GPUs), where tensors live.

# %% slideshow={"slide_type": "fragment"}
for gpu in (cost.GPUS["NVIDIA H200"], cost.GPUS["Tesla T4"]):
    sm = gpu.multiprocessor
    print(f"{gpu.name}, {gpu.sms} SMs")
    for name, size in (("registers", 4 * sm.registers), ("shared memory", sm.shared)):
        print(f"  {name:13}  {size / 2**10:4.0f} KiB an SM   {size * gpu.sms / 2**20:4.1f} MiB in all")
    per_byte = [round(cost.ridge(gpu, dtype)) for dtype in ("fp32", "fp16")]
    print(f"  device memory  {gpu.bandwidth:4.2f} TB/s; in the time of one byte: ", end="")
    print("{} float32 operations, {} on fp16 tensor cores".format(*per_byte))

# %% [markdown] slideshow={"slide_type": "subslide"}
# While one byte arrives from device memory, an H200 can do 14 float32 operations, or 206 on tensor cores. Numbers that
# are fetched for one or two operations each leave the arithmetic idle.
#
# Standard attention, rung 1 of stage 00, writes S, reads it for the softmax, writes P, reads it for P V: four times
# $N^2$ numbers beyond the inputs and the output. Left: rung 1 on the machine this ran on, its operations and its time.
# Right, calculated for an H200: what arithmetic and traffic take at the datasheet's rates.

# %% slideshow={"slide_type": "fragment"}
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


# %% slideshow={"slide_type": "fragment"}
N, D = 1024, 64
q, k, v = torch.randn(3, N, D, device=steps.engine.device)
S = q @ k.mT
P = fwd_1_matrix.softmax(S)[0]
taken = [seconds(torch.matmul, q, k.mT), seconds(fwd_1_matrix.softmax, S), seconds(torch.matmul, P, v)]
operations = [2 * N * N * D, 4 * N * N, 2 * N * N * D]  # softmax: maximum, exp(S - m), sum, division

gpu, H = cost.GPUS["NVIDIA H200"], 16
lengths = [512 * 2**x for x in range(6)]
least = [cost.compulsory_bytes(1, H, n, D, dtype="fp16") for n in lengths]
standard = [b + 4 * H * n * n * cost.BYTES["fp16"] for b, n in zip(least, lengths, strict=True)]
flops = [cost.flops(1, H, n, D) for n in lengths]
peak = cost.peak_tflops(gpu, "fp16")
print(f"N = 4096: standard moves {standard[3] / least[3]:.0f} times the least; its traffic takes", end=" ")
print(f"{standard[3] / gpu.bandwidth / (flops[3] / peak):.1f} times as long as the arithmetic")

# %% slideshow={"slide_type": "fragment"}
fig, (left, right) = plt.subplots(1, 2, figsize=(8.4, 3.3), layout="constrained")
for y, what in enumerate((operations, taken)):
    start = 0
    for x, name, colour in zip(what, ("Q Kᵀ", "softmax", "P V"), COLOURS[:3], strict=True):
        percent = 100 * x / sum(what)
        left.barh(y, percent, left=start, color=colour, height=0.5, label=name if y == 0 else None)
        start += percent
left.set_yticks([0, 1], ["operations", "time"])
left.set(xlabel="%", title="rung 1, N = 1024, d = 64", ylim=(-0.5, 2))
left.legend(ncols=3, loc="upper left", fontsize=8)
curves = (("standard: traffic", [b / gpu.bandwidth / 1e9 for b in standard], COLOURS[1], "o-"),
          ("arithmetic", [f / peak / 1e9 for f in flops], INK, "--"),
          ("q, k, v, out once: traffic", [b / gpu.bandwidth / 1e9 for b in least], COLOURS[0], "s-"))  # fmt: skip
for name, ms, colour, look in curves:
    right.loglog(lengths, ms, look, color=colour, label=name)
right.set(xlabel="N", title="H200, 16 heads, d = 64, fp16: ms, calculated")
right.set_xticks(lengths, lengths)
right.minorticks_off()
right.legend(fontsize=8)
picture(fig, """Left: two bars split into Q K transposed, softmax and P V. Softmax is a sliver of the
operations and a far larger part of the time. Right: calculated times on an H200 against N on log
axes. The traffic of standard attention lies above the arithmetic at every N; reading the inputs and
writing the output once lies far below both for long sequences.""")

# %% [markdown] slideshow={"slide_type": "fragment"}
# Softmax is a sliver of the operations and a large part of the time: each of its steps passes over all $N^2$ numbers
# once more, and exp is no cheap operation. At N = 4096 standard attention moves 65 times the least, and its traffic
# takes 6.5 times as long as the arithmetic. FlashAttention's answer: a tile of S is made, used and forgotten in shared
# memory.

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
#
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
# every visit, and ends at (6.83, 1.34) as in notebook 00. The shares of the old O and of the tile alone add up to 1, so the
# new O lies between the two: at visit 2 the old O keeps 0.23, at visit 3 0.39.

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
# The simulator starts a Python thread for each GPU thread and runs one block after the other. `print` and the debugger
# work in a kernel, and reading or writing past an array's end is an error that says which thread did it (a GPU would
# read or overwrite whatever lies there). Three blocks are one too many:

# %% slideshow={"slide_type": "fragment"}
if fwd.SIMULATED:
    try:
        launch(backwards, 3, 3)
    except IndexError as mistake:
        print("IndexError:", mistake)
else:
    print("not tried: on a GPU nothing checks the index")

# %% [markdown] slideshow={"slide_type": "fragment"}
# `ctaid` is the block: number 2 starts at index 6, past the end. `tid` is the thread that was the first to fall. What
# is missing is `if n < x.shape[0]`.
#
# **What the simulator cannot show.** Two kernels that are wrong on a GPU: one has no barrier, in the other only three
# of six threads reach it. The simulator reports neither.

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

# %% [markdown] slideshow={"slide_type": "fragment"}
# The counts change from run to run: a right result proves nothing here. The simulator also knows no warps and no types,
# and says nothing about speed. NVIDIA's `compute-sanitizer` looks for races, on a GPU.
#
# ### Algorithm 1, line by line
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
# First the budget, before any launch: which tiles fit in shared memory, and how many blocks an SM then holds.

# %% slideshow={"slide_type": "fragment"}
def shared_bytes(Br, Bc, D):
    """Q_i, K_j, V_j and S, each with a spare column, and two numbers a row: as in forward_kernel."""
    return 4 * ((Br + 2 * Bc) * (D + 1) + Br * (Bc + 1) + 2 * Br)


STATIC = 48 * 1024  # the most that arrays of a fixed size may take in a block
for tile in ((16, 16), (16, 32), (32, 16), (32, 64), (64, 64)):
    need = shared_bytes(*tile, 64)
    fits = cost.occupancy((9, 0), threads=256, shared=need)
    verdict = f"{fits.blocks} blocks an SM, limited by {fits.limited_by}" if need <= STATIC else "too much"
    print(f"tile {str(tile):8}  d = 64: {need / 1024:4.1f} KiB  {verdict}")

sm = cost.GPUS["NVIDIA H200"].multiprocessor
for d in (64, 128):  # Alg. 1, line 1, for all that a block of an H200 can ask for
    limit = sm.shared_per_block
    Bc = math.ceil(limit / 4 / (4 * d))
    Br = min(Bc, d)
    KVQO, with_S = (cost.shared_bytes(Br, Bc, d, tiles=t) / limit for t in ("QKVO", "QKVOS"))
    print(f"paper, d = {d}: Br {Br}, Bc {Bc}: K, V, Q, O take {KVQO:.0%} of a block's limit, with S {with_S:.0%}")

# %% [markdown] slideshow={"slide_type": "fragment"}
# The paper's line 1 chooses Br and Bc so that K, V, Q and O fit, and counts no room for S: at d = 128 the sum comes to
# 123% of the limit. This rung keeps no O in shared memory (each thread updates its numbers in place) and stays below
# 48 KiB.

# %% slideshow={"slide_type": "subslide"}
show("fwd_0_published", "forward_kernel")

# %% slideshow={"slide_type": "subslide"}
show("fwd_0_published", "scores")

# %% slideshow={"slide_type": "fragment"}
show("fwd_0_published", "update_output")

# %% [markdown] slideshow={"slide_type": "subslide"}
# Read the barriers first: each says which threads wait for what. In `scores`, x runs along a row, so neighbouring
# threads touch neighbouring addresses; the spare column D + 1 shifts each row of K_j by one bank.
#
# ### The order of the visits
#
# Tiles of 8 for 24 queries and 32 keys: FlashAttention-1 goes through S column by column, FlashAttention-2 row by row.
# Below, when each row of O is written.

# %% slideshow={"slide_type": "fragment"}
Tr, Tc = 3, 4
orders = {"FA1: keys outside": [(i, j) for j in range(Tc) for i in range(Tr)],
          "FA2: queries outside": [(i, j) for i in range(Tr) for j in range(Tc)]}  # fmt: skip
fig, axes = plt.subplots(2, 2, figsize=(8, 4.8), layout="constrained", height_ratios=(1.1, 1))
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
# Count elements moved between device memory and the chip for one head, with $T_r = N_q / B_r$ and $T_c = N_k / B_c$
# rounded up:
#
# | | read | written |
# |---|---|---|
# | FA1 | $2 N_k d$ (K, V once) $+\; T_c N_q (2 d + 2)$ (Q, O, l, m) | $T_c N_q (d + 2)$ (O, l, m) |
# | FA2 | $N_q d$ (Q once) $+\; 2\, T_r N_k d$ (K, V) | $N_q d + N_q$ (O, lse) |
# | standard | $3 N d + 2 N^2$ | $N d + 2 N^2$ |
#
# In the simulator the first line can be checked: the kernel takes anything that can be indexed, so we hand it arrays
# that count.

# %% slideshow={"slide_type": "fragment"}
class Counted:
    """An array for the simulator that counts the elements read and written."""

    def __init__(self, *shape, value=None):
        self.data = torch.randn(shape).numpy() if value is None else np.full(shape, value, np.float32)
        self.shape, self.read, self.written = shape, 0, 0

    def __getitem__(self, index):
        self.read += 1
        return self.data[index]

    def __setitem__(self, index, value):
        self.written += 1
        self.data[index] = value


def counted(N, D, B):
    """{name: (read, written)} of the forward kernel, one head, tiles (B, B)."""
    arrays = {name: Counted(1, N, D) for name in "qkv"}
    arrays |= {"O": Counted(1, N, D, value=0), "l": Counted(1, N, value=0), "m": Counted(1, N, value=-math.inf)}
    fwd.forward_kernel(B, B, D)[1, fwd.THREADS](*arrays.values(), False, np.float32(1))
    return {name: (a.read, a.written) for name, a in arrays.items()}


# %% slideshow={"slide_type": "fragment"}
def fa1(N, D, Br, Bc):
    """(read, written): elements of device memory, one head, Nq = Nk = N."""
    Tc = math.ceil(N / Bc)
    return 2 * N * D + Tc * N * (2 * D + 2), Tc * N * (D + 2)


def fa2(N, D, Br, Bc):
    return N * D + 2 * math.ceil(N / Br) * N * D, N * D + N


def standard_attention(N, D):
    return 3 * N * D + 2 * N * N, N * D + 2 * N * N


for n in (16, 32) if fwd.SIMULATED else ():
    each = counted(n, 4, 8)
    print(f"N = {n}, d = 4, tiles (8, 8)", *(f"{name} {moved}" for name, moved in each.items()))
    print("    sum", tuple(map(sum, zip(*each.values(), strict=True))), " formula", fa1(n, 4, 8, 8))

# %% [markdown] slideshow={"slide_type": "fragment"}
# Reads exceed the formula by the second read of m in the source, 2 N at N = 16 and 4 N at N = 32, which a compiler
# keeps in a register; writes agree. Now larger sizes.

# %% slideshow={"slide_type": "subslide"}
D, B = 64, 128
lengths = [2**x for x in range(9, 15)]
lines = {"standard": ([standard_attention(n, D) for n in lengths], COLOURS[1], "o-"),
         "FA1 order": ([fa1(n, D, B, B) for n in lengths], COLOURS[0], "s-"),
         "FA2 order": ([fa2(n, D, B, B) for n in lengths], COLOURS[2], "D-")}  # fmt: skip
fig, axes = plt.subplots(1, 2, figsize=(8.4, 3.4), layout="constrained", sharey=True)
for side, (ax, title) in enumerate(zip(axes, ("elements read", "elements written"), strict=True)):
    for name, (moved, colour, look) in lines.items():
        ax.loglog(lengths, [x[side] for x in moved], look, color=colour, label=name)
    ax.set(xlabel="N", title=f"{title}, d = {D}, tiles ({B}, {B})")
    ax.set_xticks(lengths, lengths)
    ax.minorticks_off()
axes[0].legend(fontsize=8)
for name, (moved, _, _) in lines.items():
    read, written = (count / 1e6 for count in moved[lengths.index(4096)])
    print(f"N = 4096, {name:9}: {read:4.1f} million read, {written:5.2f} million written")
picture(fig, """Elements read and written against N on log axes. Read: the two orders lie together,
below standard attention by a factor of about two. Written: FA1's order has the slope of standard
attention, N squared, a factor of about four below it; FA2's order has slope 1 and lies far below.""")

# %% [markdown] slideshow={"slide_type": "fragment"}
# Reads are alike. Writes are not: 8.65 million against 0.27 million at N = 4096, because FA1's O comes and
# goes $T_c$ times. In float16 the gap widens, as O stays float32 between visits. The second cost is not in this table:
# two key tiles may not update one row of O at the same time, so a head stays in one block.
#
# ### The float64 trap
#
# A Python number in a Numba kernel is a float64, and turns the arithmetic around it into float64. We compile two
# functions to PTX, for which no GPU is needed, in a process that does not simulate.

# %% slideshow={"slide_type": "fragment"}
def plain(x, y):
    n = cuda.grid(1)
    y[n] = 0.5 * x[n] + 1.0


def with_casts(x, y):
    n = cuda.grid(1)
    y[n] = np.float32(0.5) * x[n] + np.float32(1.0)


program = "import re\nimport numpy as np\nfrom numba import cuda, float32\n"
program += inspect.getsource(plain) + inspect.getsource(with_casts)
program += """
for f in plain, with_casts:
    ptx, _ = cuda.compile_ptx(f, (float32[::1], float32[::1]), cc=(8, 0))
    print(f"{f.__name__}: .f64 occurs {ptx.count('.f64')} times")
    print(*re.findall(r"^\\t(?:fma|cvt|mul|add).*f(?:32|64).*;", ptx, re.M), sep="\\n")
"""
environment = os.environ | {"NUMBA_ENABLE_CUDASIM": "0"}
done = subprocess.run([sys.executable, "-c", program], env=environment, capture_output=True, text=True)
print(done.stdout if done.returncode == 0 else "this installation of Numba has no CUDA compiler")
print("with a Python number, NumPy (and so the simulator) gives", type(np.float32(1) * 0.5).__name__)

# %% [markdown] slideshow={"slide_type": "fragment"}
# Two conversions and a float64 multiply-add, where one float32 multiply-add would do; a float64 also takes two
# registers. The simulator computes with NumPy, where the float32 wins, and cannot show it. Hence `ZERO` and
# `np.float32(scale)` in the module, and a test that counts `.f64` in both kernels.
#
# ### The backward, in short
#
# Algorithm 4 keeps the loops: key tiles outside, so that dK_j and dV_j are finished in one visit. dQ now plays O's
# part, and is read and written $T_c$ times. Nothing is rescaled, as lse is final.

# %% slideshow={"slide_type": "fragment"}
show("bwd_0_published", "backward_kernel")

# %% [markdown] slideshow={"slide_type": "slide"}
# ## 5. Write it yourself
#
# **Exercise 01.1: the online update.** Part 3's claim, up to the two factors of O, for the rows of a tile: about
# fifteen lines, one thread a row. `S` arrives as scores and leaves as $P = e^{S - m_b}$; `l` and `m` of rows i, i + 1,
# … of this head are updated; `old` and `new` receive the factors for `update_output`. Replace `pass`; the next cell
# runs the stage's kernel with your function in it.
#
# <details><summary>Hint 1: a question</summary>
#
# The block has blockDim.x times blockDim.y threads, perhaps fewer or more than Br. Which rows does a thread take so
# that each row is taken once? Which of them lie past the end of l?
#
# </details>
# <details><summary>Hint 2: the formula</summary>
#
# The claim in part 3; Algorithm 1, lines 10 to 13. Read l and m of the row before you overwrite them.
#
# </details>
# <details><summary>Hint 3: the trap</summary>
#
# A row that has seen no key has m = -inf and l_new = 0: use `exp_difference` instead of a subtraction in exp, and let
# both factors be 0. Start sums at ZERO and maxima at MINUS_INF, or you get float64.
#
# </details>

# %% slideshow={"slide_type": "skip"}
def replaced(**functions):
    """Puts functions in place of the forward module's own; compiled kernels are forgotten."""
    fwd.forward_kernel.cache_clear()
    return patch.multiple(fwd, **functions)


# %% slideshow={"slide_type": "fragment"}
ZERO, MINUS_INF, exp_difference = fwd.ZERO, fwd.MINUS_INF, fwd.exp_difference


@cuda.jit(device=True)
def my_online_update(S, old, new, l, m, head, i, Bc):
    """S (Br, Bc), scores, then P, and old, new (Br,) in shared memory; l, m (heads, Nq) in device memory."""
    pass  # yours


# %% slideshow={"slide_type": "fragment"}
def check_update(mine):
    """Runs the kernel with mine on four inputs, and names those that differ from the float64 reference."""
    n = 2 * fwd.TILE[0] + 3
    q, k, v = torch.randn(3, 1, 1, n, 4, generator=torch.Generator().manual_seed(0))
    rising = torch.linspace(-10, 10, n)[:, None] * torch.ones(4)
    tests = {"three tiles, the last one ragged": (q, k, False),
             "scores that rise along the keys": (1 + 0 * q, k + rising, False),
             "scores in the hundreds": (20 * q, 10 * k, False),
             "rows that see no key": (q, k[..., :9, :], True)}  # fmt: skip
    for says, (q_, k_, causal) in tests.items():
        inputs = [x.to(steps.engine.device) for x in (q_, k_, v[..., : k_.shape[-2], :])]
        with replaced(online_update=mine), warnings.catch_warnings(action="ignore"):  # of NaN
            got = step01.forward(*inputs, causal=causal)
        want = attention.forward(*inputs, causal=causal)
        if got[1].isneginf().all():
            return print("not written yet")
        same = all(torch.allclose(a.double(), b, atol=1e-4) for a, b in zip(got, want, strict=True))
        print("ok:" if same else "wrong:", says)


check_update(my_online_update)
fwd.forward_kernel.cache_clear()  # the stage's own functions again

# %% [markdown] slideshow={"slide_type": "slide"}
# ## 6. Check it, then break it
#
# Four of the contract's cases, forward and backward (`pytest tests/test_step01_fa1_numba.py` runs all of them).

# %% slideshow={"slide_type": "fragment"}
def prepared(*names):
    """(case, its inputs for this stage, what is expected) for the named cases."""
    for case in (c for c in cases.CASES if c.name in names):
        x = cases.build(case, step01.SUPPORTS, torch.float32, steps.engine.device)
        yield case, x, error.expected(x.q, x.k, x.v, x.dout, causal=x.causal, scale=x.scale)


for case, x, want in prepared("ragged", "more_queries_causal", "no_key", "rising"):
    got = cases.run(step01, case, x)
    shares = [e / (want.tolerance[name] or 1) for name, e in error.errors(got, want).items()]
    verdict = "wrong" if error.failures(got, want) else "ok"
    print(f"{verdict}: {case.says}; largest error: {max(shares):.2f} of its tolerance")

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


for case, x, want in prepared("ragged_causal", "fewer_queries_causal", "more_queries_causal"):
    with replaced(first_query_tile=shift_forgotten):
        out, lse = step01.forward(x.q, x.k, x.v, **x.options)
    print("fails: " if error.failures({"out": out, "lse": lse}, want) else "passes:", case.says)
fwd.forward_kernel.cache_clear()

# %% [markdown] slideshow={"slide_type": "subslide"}
# The planted mistakes of `reference/mutants.py` follow a stage's loop order. Here are some in FA1's, which keeps O
# normalised, and which of four cases notice them.

# %% slideshow={"slide_type": "fragment"}
mistakes = """no_rescale_of_o no_rescale_of_l tile_maximum first_maximum_kept normalised_twice no_maximum
    no_guard dq_overwritten delta_of_the_tile stale_lse""".split()
inputs = ("ragged", "more_queries_causal", "scores_200", "falling")
noticed = {name: [] for name in mistakes}
for case in (c for c in cases.CASES if c.name in inputs):
    x = cases.build(case, step01.SUPPORTS, torch.float32)  # mutants are plain torch, on the CPU
    want = error.expected(x.q, x.k, x.v, x.dout, causal=x.causal, scale=x.scale)
    for mutant in (m for m in mutants.MUTANTS if m.name in mistakes):
        try:
            wrong = error.failures(mutant.run(x, x.tile, step01.SUPPORTS["order"]), want)
        except mutants.NotApplicable:
            continue
        noticed[mutant.name] += [case.name] if wrong else []
for name, by in noticed.items():
    print(f"{name:19} {', '.join(by)}")

# %% [markdown] slideshow={"slide_type": "fragment"}
# `first_maximum_kept` and `no_guard` are noticed by one case each. `falling` misses both kinds of forgotten rescaling:
# there the first tile has the largest scores, and m never moves again.

# %% [markdown] slideshow={"slide_type": "slide"}
# ## 7. Predict, then measure
#
# **Question 1.** At N = 4096 and d = 64, from which tile size b = Br = Bc on does FA1's order move fewer elements, read
# and written together, than standard attention? And FA2's?
#
# <details><summary>Answer</summary>
#
# For long sequences FA1 moves about 3 N² d / b elements (Q and O read, O written) and FA2 about 2 N² d / b (K and V
# read), against 4 N². So b must be about 3 d / 4 = 48, or d / 2 = 32. This rung's tiles of 16 are too small: the L2
# cache has to help. Larger tiles need more than 48 KiB of shared memory, or registers: the next stage.
#
# </details>

# %% slideshow={"slide_type": "fragment"}
N, D = 4096, 64
sizes = range(8, 257)
limit = sum(standard_attention(N, D)) / 1e6
fig, ax = plt.subplots(figsize=(6.4, 3.4))
for name, count, colour in (("FA1 order", fa1, COLOURS[0]), ("FA2 order", fa2, COLOURS[2])):
    moved = [sum(count(N, D, b, b)) / 1e6 for b in sizes]
    ax.loglog(sizes, moved, color=colour, label=name)
    first = next(b for b, x in zip(sizes, moved, strict=True) if x < limit)
    print(f"{name}: fewer than standard attention from b = {first}")
ax.axhline(limit, color=COLOURS[1], label="standard")
ax.axvline(16, color=INK, ls=":", lw=1.2, label="this rung's tile on a GPU")
ax.set(xlabel="tile size b", title=f"million elements read and written, N = {N}, d = {D}")
ax.set_xticks([8, 16, 32, 64, 128, 256], [8, 16, 32, 64, 128, 256])
ax.minorticks_off()
ax.legend(fontsize=8)
picture(fig, """Elements moved against the tile size on log axes. FA1's and FA2's orders fall with slope
-1, FA2's below FA1's by a constant factor. Both start above the horizontal line of standard
attention and cross it between 32 and 64; this rung's tile of 16 lies left of both crossings.""")

# %% [markdown] slideshow={"slide_type": "subslide"}
# **Question 2.** One block a head: what share of an H200's SMs works on a batch of 1, 2, 4 and 8 with 16 heads? What
# if a block took a tile of 64 queries of a head instead, N = 4096?
#
# <details><summary>Answer</summary>
#
# With B H blocks at most B H SMs work, whatever N is. FlashAttention-2's order makes the rows of O independent, so that
# every query tile can be a block of its own, and even a batch of 1 fills the GPU.
#
# </details>

# %% slideshow={"slide_type": "fragment"}
sms = cost.GPUS["NVIDIA H200"].sms
for batch in (1, 2, 4, 8):
    blocks = {"one block a head": batch * 16, "one a query tile": batch * 16 * 4096 // 64}
    busy = (f"{name}: {n} blocks, {min(1, n / sms):.0%} of the SMs " for name, n in blocks.items())
    print(f"batch {batch}: ", *busy)

# %% [markdown] slideshow={"slide_type": "fragment"}
# **Question 3.** How fast is this rung on a GPU, beside PyTorch's own attention? The recorded rows:

# %% slideshow={"slide_type": "fragment"}
recorded = [r for r in rows.latest(rows.read()) if r["pass"] == "fwd" and not r["causal"] and r["D"] == 64]
own = [r for r in recorded if r["stage"] == "01_fa1_numba"]
beside = [r for r in recorded if r["peer"] and all(r[x] == own[0][x] for x in ("gpu", "dtype"))] if own else []
own = [r for r in own if all(r[x] == own[0][x] for x in ("gpu", "dtype"))]
picture(plots.speed_lines(own + beside), """TFLOP/s of this stage's forward against the sequence length
N, with PyTorch's own kernels as dashed grey lines.""") if own else print("no rows yet")

# %% [markdown] slideshow={"slide_type": "slide"}
# ## 8. Summary
#
# - Attention as three tensor operations is bound by the traffic of S and P; in tiles, S stays in shared memory.
# - A block is a group of threads with shared memory and a barrier. Its budget is computed before the launch.
# - FlashAttention-1 keeps O normalised: after every visit it is the attention over the keys so far.
# - Keys outside: K and V are read once; O, l, m are read and written at every visit, and a head is bound to one block.
# - The simulator checks indices and arithmetic, not races, barriers, types or speed.
#
# **Ask yourself**
#
# 1. Why must every thread of a block reach each barrier, even one that has no row?
# 2. What would be saved by storing O undivided between visits? What would be lost?
# 3. Which barrier may go if each row of S were computed and used by one thread?
# 4. Why is O float32 between visits when q, k and v are float16?
# 5. Why does FA1's read count depend on Bc, and FA2's on Br?
#
# **Go further**
#
# - ★ (15 minutes) Extend `Counted` to the backward: which array is written most?
# - ★★ (1 hour) In a copy of the kernel, let query i see only the last w keys. Which visits at the end of the inner loop
#   can now be skipped? Check against `reference.attention.forward(..., causal=True, window=(w - 1, 0))`.
# - ★★★ (a weekend) Swap the loops: a block for each query tile, O and l in shared memory. Compare the counts with
#   `fa2` above, then with stage 02.
#
# **Read:** `papers/flash_attention.md`; Numba's pages on the CUDA simulator.
#
# **Next:** [02a_fa2_cuda_first_kernels.ipynb](02a_fa2_cuda_first_kernels.ipynb). The loops change places, in CUDA C++.
