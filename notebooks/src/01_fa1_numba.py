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
# *How does a GPU hold attention's tiles on the chip, what does FlashAttention-1's loop order cost, and what belongs in
# registers?*
#
# ![Device memory, shared memory and registers of an H200. In FlashAttention-1 Q_i, O_i, l and m pass at each visit, in
# FlashAttention-2 K_j and V_j.](../notebooks/figures/question_01.png)
#
# - **Before you start:** notebook 00: tiles, the running maximum, l, lse. No GPU programming.
# - **Time:** about 60 minutes to read, 120 minutes more with the exercises. A good place to stop for today: after part 3.
# - **Code:** [`steps/step01_fa1_numba`](../steps/step01_fa1_numba/__init__.py), three rungs.
# - **Tests:** `pytest tests/test_step01_fa1_numba.py`.
# - **Paper:** [papers/flash_attention.md](../papers/flash_attention.md).

# %% jupyter={"source_hidden": true} slideshow={"slide_type": "skip"}
import steps  # comes first: it chooses the engine, and tells Numba whether to simulate
import numpy as np
import torch
from numba import cuda
from steps.course.figures import n01_fa1_numba as figures
from steps.step01_fa1_numba import fwd_0_published as fwd
from steps.course.workbook import Blank, check, hint, show, solution  # noqa: F401
print(steps.engine.describe())

# %% [markdown] slideshow={"slide_type": "slide"}
# ## 1. The problem, measured
#
# A GPU consists of streaming multiprocessors (**SMs**). A **block** of threads stays on one SM, and shares a piece of
# the SM's **shared memory**. Each thread computes in its own **registers**. Tensors lie in **device memory**, outside
# the chip.
#
# **In 16 bits (fp16) device memory is the bottleneck** of standard attention, which writes S and P there and reads each
# once, as the paper counts. FlashAttention computes a tile of S, uses it and discards it, on the chip. In float32, as
# here, the slower arithmetic takes at least as long.
#
# **Shared memory is the next bottleneck.** While it delivers one number, the SM can do four
# **multiply-adds**, a b + c. The memories of an H200, on which the course was measured:

# %% slideshow={"slide_type": "fragment"}
print(figures.memories(N=4096, d=64))

# %% [markdown] slideshow={"slide_type": "slide"}
# ## 2. The idea: O is right after every visit
#
# FlashAttention-1 loads a tile of keys *once*, and every tile of queries visits it. Between two visits a row's O, l and
# m wait in device memory, with O already divided by l.
#
# **Claim.** A row has O, l, m from the keys so far. The new tile alone gives $m_b = \max S$, $P = e^{S - m_b}$,
# $l_b = \sum P$. Then with $m_{new} = \max(m, m_b)$, $\alpha = e^{m - m_{new}}$, $\beta = e^{m_b - m_{new}}$
#
# $$l_{new} = \alpha\, l + \beta\, l_b \qquad O_{new} = \frac{\alpha\, l}{l_{new}}\, O + \frac{\beta}{l_{new}}\, P V_j$$
#
# is the attention over all keys so far. The reason: $l\, O$ is the sum $\sum e^{s - m} v$ over the old keys.
# Multiplying it by $\alpha$ replaces m by $m_{new}$, and multiplying $P V_j$ by $\beta$ replaces $m_b$.

# %% slideshow={"slide_type": "fragment"}
torch.set_printoptions(precision=2, sci_mode=False)
Q = torch.tensor([[1.0, 2], [0, 1], [-1, 0], [2, -1], [1, 1], [3, 1]])
K = torch.tensor([[0.0, 1], [1, 0], [-1, 1], [1, 2], [2, 0], [0, -1]])
V = torch.tensor([[0.0, 6], [2, 0], [4, 6], [6, 4], [8, 0], [10, 6]])
s = Q[5] @ K.T / 2**0.5
print("over 2, 4, 6 keys:", *(s[:n].softmax(0) @ V[:n] for n in (2, 4, 6)))

# %% slideshow={"slide_type": "fragment"}
def visits():
    """[(O of the tile alone, O, the tile's weight)] of query 5 after each tile of keys."""
    m, l, O, trace = torch.tensor(-np.inf), torch.tensor(0.0), torch.zeros(2), []
    for j in (0, 2, 4):
        m_b = s[j : j + 2].max()
        P = (s[j : j + 2] - m_b).exp()
        m_new = torch.maximum(m, m_b)
        alpha, beta = (m - m_new).exp(), (m_b - m_new).exp()
        l_new = alpha * l + beta * P.sum()
        O = alpha * l / l_new * O + beta / l_new * P @ V[j : j + 2]
        trace.append((P @ V[j : j + 2] / P.sum(), O, beta * P.sum() / l_new))
        m, l = m_new, l_new
    return trace

# %% [markdown] slideshow={"slide_type": "subslide"}
# ### Query 5, over three tiles of two keys
#
# The new O lies between the old one and what the tile alone gives, $P V_j / l_b$. The numbers are their weights,
# $\alpha\,l / l_{new}$ and $\beta\,l_b / l_{new}$. At the end O is (6.83, 1.34).

# %% slideshow={"slide_type": "fragment"}
print("O after each tile:", *(O for _, O, _ in visits()))
figures.visits_of_O(V, visits())

# %% [markdown] slideshow={"slide_type": "slide"}
# ## 3. From algorithm to code
#
# ### Numba CUDA in one page
#
# A **kernel** is a function that every thread runs. It is launched as a **grid** of blocks,
# `kernel[blocks, threads](arguments)`. `threadIdx` is a thread's number in its block, `blockIdx` the block's number, and
# `cuda.grid(1)` the thread's number in the whole grid. A kernel may call functions marked `cuda.jit(device=True)`.
#
# `cuda.shared.array` lies in shared memory, one for each block. `cuda.syncthreads()` is a **barrier**: no thread goes
# on until all threads of the block that still run have come. `cuda.to_device` copies an array to device memory.

# %% slideshow={"slide_type": "fragment"}
@cuda.jit
def backwards(x, out):
    tile = cuda.shared.array(3, np.float32)
    t, n = cuda.threadIdx.x, cuda.grid(1)
    tile[t] = x[n]
    cuda.syncthreads()  # tile[2 - t] is written by another thread
    out[n] = tile[2 - t]


x, out = (cuda.to_device(np.arange(6, dtype=np.float32)) for _ in range(2))
backwards[2, 3](x, out)  # two blocks of three threads
print(out.copy_to_host())

# %% [markdown] slideshow={"slide_type": "subslide"}
# ### What the simulator shows
#
# Without a GPU the same source runs in Numba's simulator, a Python thread for each GPU thread. It need not show
# **races**, where two threads need an order that no barrier gives them. This kernel lacks a barrier, and its result is
# right all the same. So the tests also run the threads in order, and in reverse.

# %% slideshow={"slide_type": "fragment"}
@cuda.jit
def no_barrier(x, out):
    tile = cuda.shared.array(6, np.float32)
    t = cuda.threadIdx.x
    tile[t] = x[t]
    out[t] = tile[max(t - 1, 0)]  # has the neighbour written yet?


no_barrier[1, 6](x, out)
print(out.copy_to_host())

# %% [markdown] slideshow={"slide_type": "subslide"}
# ### Four puzzles of one line
#
# Write a line for each `...`, and run the cell.
#
# 1. **An index.** Blocks of `size` threads copy x to y, one number a thread. Which number does a thread of a block
#    take?
# 2. **A guard.** x has N numbers, and there are more threads. When does the thread with number n of the grid have work?
# 3. **A barrier.** After which of these lines must `cuda.syncthreads()` stand, 1, 2 or 3?
#
#    ```python
#    t = cuda.threadIdx.x               # line 1
#    tile[t] = x[t]                     # line 2
#    neighbour = tile[max(t - 1, 0)]    # line 3
#    out[t] = x[t] - neighbour          # line 4
#    ```
#
# 4. **Rows.** A block may have two dimensions. Its T threads are numbered along x first, t = y * width + x, as in the
#    picture. The Br rows of a tile are dealt out in turn. Which `range` of rows does thread t compute?
#
# <details><summary>Answers</summary>
#
# ```python
# index = lambda block, size, thread: block * size + thread
# guard = lambda n, N: n < N
# barrier = 2
# rows = lambda t, T, Br: range(t, Br, T)
# ```
#
# </details>

# %% slideshow={"slide_type": "fragment"}
index = lambda block, size, thread: ...
guard = lambda n, N: ...
barrier = ...
rows = lambda t, T, Br: ...
figures.puzzles(index, guard, barrier, rows)

# %% [markdown] slideshow={"slide_type": "subslide"}
# ### Rung 0: Algorithm 1, line by line
#
# Here is the whole kernel for six tokens and tiles of 2 x 2: each thread computes one number of S. In brackets: lines
# of the paper's Algorithm 1. Read the barriers first.
#
# A block handles one head. Its Q_i, K_j, V_j and S have to fit into the 48 KiB of shared memory that a block has
# without asking for more; O, l and m stay outside. At d = 64 tiles of 64 x 64 would take
# $4\,(3 \cdot 64 \cdot 64 + 64 \cdot 64)$ bytes = 64 KiB. Rung 0's, 16 x 16 on a GPU, take 13 KiB.

# %% slideshow={"slide_type": "subslide"}
N, d, Br, Bc = 6, 2, 2, 2


@cuda.jit
def forward(q, k, v, O, l, m, scale):
    Q_i = cuda.shared.array((Br, d), np.float32)
    K_j = cuda.shared.array((Bc, d), np.float32)
    V_j = cuda.shared.array((Bc, d), np.float32)
    S = cuda.shared.array((Br, Bc), np.float32)  # P overwrites it
    old = cuda.shared.array(Br, np.float32)  # the factor of the old O
    new = cuda.shared.array(Br, np.float32)  # the factor of P V_j
    x, y, head = cuda.threadIdx.x, cuda.threadIdx.y, cuda.blockIdx.x  # x: a key in S, elsewhere a column
    for j in range(0, N, Bc):  # [5] tiles of keys
        cuda.syncthreads()  # the last V_j has been read
        K_j[y, x] = k[head, j + y, x]  # [6]
        V_j[y, x] = v[head, j + y, x]
        for i in range(0, N, Br):  # [7] visited by all tiles of queries
            Q_i[y, x] = q[head, i + y, x]  # [8]
            cuda.syncthreads()  # Q_i, K_j and V_j are complete
            S[y, x] = scale * fwd.dot(Q_i, y, K_j, x, d)  # [9] row y of Q_i times row x of K_j
            cuda.syncthreads()  # S is complete
            fwd.online_update(S, old, new, l, m, head, i, Bc)  # [10-11] and l, m of [13]
            cuda.syncthreads()  # P, old and new are complete
            PV = np.float32(0)
            for c in range(Bc):
                PV += S[y, c] * V_j[c, x]
            O[head, i + y, x] = old[y] * O[head, i + y, x] + new[y] * PV  # [12]


q, k, v = (cuda.to_device(x[None].numpy()) for x in (Q, K, V))  # one head
O = cuda.to_device(np.zeros((1, N, d), np.float32))
l = cuda.to_device(np.zeros((1, N), np.float32))
m = cuda.to_device(np.full((1, N), -np.inf, np.float32))
forward[1, (2, 2)](q, k, v, O, l, m, np.float32(2**-0.5))  # one block of 2 x 2 threads
print("row 5:", O.copy_to_host()[0, 5].round(2))

# %% [markdown] slideshow={"slide_type": "subslide"}
# ### Exercise 01.1: one tile of keys, with O kept normalised
#
# Part 2's claim, one thread a row, with the rows of puzzle 4: thread t of T computes rows t, t + T, and so on, with
# t = `cuda.threadIdx.y * cuda.blockDim.x + cuda.threadIdx.x`.
#
# | argument | what it is |
# |---|---|
# | `S` (Br, at least Bc), shared | arrives as scores, leaves as $P = e^{S - m_b}$ |
# | `old`, `new` (Br,), shared | you write the factors of O and of P V_j |
# | `l`, `m` (heads, Nq), device memory | read and written anew; row r of the tile is `l[head, i + r]`. Beyond Nq there is none: skip it |
#
# `exp_difference(x, m)` is exp(x - m), and 0 for x = -inf. In a row that has seen no key l_new and both factors are 0.
# Write `ZERO`, `np.float32(0)`, for 0, as 0.0 is float64 for Numba.

# %% slideshow={"slide_type": "fragment"}
@cuda.jit(device=True)
def online_update(S, old, new, l, m, head, i, Bc):
    """Turns S into P, updates l and m, sets O's factors old and new. Nq is l.shape[1]."""
    raise Blank


check("01.1", online_update)

# %% [markdown] slideshow={"slide_type": "slide"}
# ## 4. What the order costs
#
# ### The order of the visits
#
# In FlashAttention-2's order O stays on the chip until its rows are complete.

# %% slideshow={"slide_type": "fragment"}
figures.order_of_visits()

# %% [markdown] slideshow={"slide_type": "subslide"}
# ### Numbers that pass between device memory and the chip
#
# - *standard* writes and reads S and P, $4N^2$, beside q, k, v and out, $4Nd$;
# - *fa1*: each key tile reads Q and O and writes O, with l and m: about $(3d+4)N^2/B_c$;
# - *fa2*: each query tile reads K and V: about $2dN^2/B_r$.
#
# **From which Bc on does FA1's order move less than standard attention, at d = 64?**
#
# <details><summary>Answer</summary>
#
# $(3d+4)/B_c < 4$ for $B_c > 49$.
#
# </details>
#
# Below, only rung 2's tile is large enough to save traffic.

# %% slideshow={"slide_type": "fragment"}
print(figures.traffic(N=1024, d=64))

# %% [markdown] slideshow={"slide_type": "subslide"}
# ### Who works
#
# If the loop over key tiles is the outer one, two key tiles may not update one row of O at the same time. So a head
# stays in one block: 16 heads keep 16 of an H200's 132 SMs busy. With queries outside, every query tile can be a block:
# at N = 4096 and rung 2's tiles of 128 queries these are 512 blocks.

# %% [markdown] slideshow={"slide_type": "subslide"}
# ### Exercise 01.2: the same tile, with O not divided
#
# Rung 1 has the loops swapped. A block owns one tile of queries, with O_i, l and m in shared memory. P is exp(S -
# m_new) at once; `alpha` (Br,) receives what O is multiplied with. See `show("fwd_1_loops_swapped", "kernel")`.

# %% slideshow={"slide_type": "fragment"}
@cuda.jit(device=True)
def online_update(S, alpha, l, m, Bc):  # noqa: F811
    """Turns S (Br, Bc) into P = exp(S - m_new), and updates l and m (Br,) with it."""
    raise Blank


check("01.2", online_update)

# %% [markdown] slideshow={"slide_type": "slide"}
# ## 5. What belongs in registers
#
# In rungs 0 and 1 `dot` fetches both factors of every product from shared memory: 2 loads a multiply-add. In rung 2 a
# thread computes a **patch** of 8 x 8 numbers of S. For each of the d columns it fetches 8 numbers of Q_i and 8 of K_j,
# and multiplies each with each: 16 loads for 64 multiply-adds. The sums stay in its registers, of which it can have
# 255. A TFLOP/s is $10^{12}$ operations a second, and a multiply-add counts as two.

# %% slideshow={"slide_type": "fragment"}
for name, loads, products in (("dot", 2, 1), ("a patch of 8 x 8", 16, 64)):
    TFLOPs = 2 * figures.DELIVERS["shared memory"] * products / loads  # 2 a multiply-add
    print(f"{name}: {loads / products} loads a multiply-add", end="; ")
    print(f"shared memory allows {TFLOPs:.1f} TFLOP/s")

# %% [markdown] slideshow={"slide_type": "subslide"}
# ### Exercise 01.3: the gradient of the scores
#
# Rung 0's backward has P of a tile and needs dS = P (dP - delta), as in notebook 00.
#
# dO_i is (Br, D), V_j (Bc, D), delta (heads, Nq) in device memory. Row r of the tile is `delta[head, i + r]`; beyond Nq
# there is none. The threads divide the tile among themselves, as in `show("fwd_0_published", "scores")`. There is no
# barrier before: a thread may read only those entries of P that it has written itself.

# %% slideshow={"slide_type": "fragment"}
@cuda.jit(device=True)
def score_gradients(dS, P, dO_i, V_j, delta, head, i, Bc, D):
    """dS (Br, Bc) from P (Br, Bc), dO_i, V_j and delta."""
    raise Blank


check("01.3", score_gradients)

# %% [markdown] slideshow={"slide_type": "slide"}
# ## 6. Check it, then break it
#
# Every rung has to pass the contract, stage 00's list of inputs; here are three. Then we break rung 0. When causal, its
# inner loop starts at `first_query_tile`: key j is first seen by query j - (Nk - Nq). Suppose we forget Nk - Nq.
# **Which causal input fails: as many queries as keys, fewer, or more?**
#
# <details><summary>Answer</summary>
#
# Fewer. There the loop starts too late, and rows miss keys. With more queries it starts too early, which only costs
# time.
#
# </details>

# %% slideshow={"slide_type": "fragment"}
@cuda.jit(device=True)
def shift_forgotten(j, Nq, Nk, Br, causal):
    return j // Br * Br if causal else 0


print(figures.cases_of_the_contract("more_queries_causal", "no_key", "rising"))
print("\nwith the shift forgotten:")
causal = "ragged_causal", "fewer_queries_causal", "more_queries_causal"
print(figures.cases_of_the_contract(*causal, first_query_tile=shift_forgotten))

# %% [markdown] slideshow={"slide_type": "subslide"}
# ### Bug hunts 01.bug1 and 01.bug2
#
# `show("01.bug1")` and `show("01.bug2")` are broken kernels. Write a test for each, as in notebook 00.

# %% slideshow={"slide_type": "fragment"}
print(figures.symptom("01.bug1"))


def test(forward):
    """Asserts what must hold of (out, lse) = forward(q, k, v, causal=..., scale=...)."""
    raise Blank


check("01.bug1", test)

# %% slideshow={"slide_type": "fragment"}
print(figures.symptom("01.bug2"))


def test(forward):
    """Asserts what must hold of (out, lse) = forward(q, k, v, causal=..., scale=...)."""
    raise Blank


check("01.bug2", test)

# %% [markdown] slideshow={"slide_type": "slide"}
# ## 7. Predict, then measure
#
# Recorded on an H200 in float32, at N = 4096, not causal, with 128 heads at d = 64 and 64 at d = 128. PyTorch's
# `sdpa-math` is standard attention, its `sdpa-efficient` works by tiles. Shares are of the latter's speed, errors the
# largest differences from float64.
#
# **Rung 1 has enough blocks for all SMs. Is it faster than rung 0 by the same factor at both d?**
#
# <details><summary>Answer</summary>
#
# No. At d = 64 rung 0 has 128 blocks for 132 SMs. At d = 128 it has 64, and half of the SMs are idle.
#
# </details>

# %% slideshow={"slide_type": "fragment"}
print(figures.speeds())

# %% [markdown] slideshow={"slide_type": "subslide"}
# ### What the rows say
#
# Patches in registers bring more than the order of the loops: from 1.7 to 20 TFLOP/s at d = 64.
# `sdpa-efficient` is faster: rung 2 has about half of its speed, the backward a third.
#
# In the backward `sdpa-math` is ahead. Five products are counted for all, but it has stored P, and computes four. That alone makes it 25 % faster in this count; we did not look for more.

# %% [markdown] slideshow={"slide_type": "slide"}
# ## 8. Summary
#
# - Large tiles save traffic to device memory, patches loads from shared memory.
# - FlashAttention-1 keeps O divided by l: after every visit it is the attention over the keys so far.
# - Keys outside: one block a head, and O comes and goes. Queries outside: one block a query tile, and O is written
#   once.
# - The simulator checks indices and arithmetic, not races, types or speed.
#
# **Ask yourself**
#
# 1. May a thread without a row skip a barrier, and wait at the next one?
#    <details><summary>Answer</summary>
#
#    No: all running threads have to come to the same one. It skips the work only.
#    </details>
# 2. Does rung 0 save traffic to device memory?
#    <details><summary>Answer</summary>
#
#    No. With Bc = 16 O comes and goes too often.
#    </details>
# 3. q, k and v may be float16. Why is rung 0's O float32 between two visits?
#    <details><summary>Answer</summary>
#
#    It is stored at each visit, and would be rounded each time.
#    </details>
# 4. How many loads a multiply-add does a patch of 4 x 4 need, and of 16 x 16? What forbids the latter?
#    <details><summary>Answer</summary>
#
#    8 loads for 16 multiply-adds, 0.5 each, and 32 for 256, 0.125. 16 x 16 numbers do not fit into 255 registers.
#    </details>
# 5. Why may rung 0 not give the key tiles of a head to several blocks?
#    <details><summary>Answer</summary>
#
#    They update the same O, l and m.
#    </details>

# %% [markdown] slideshow={"slide_type": "subslide"}
# ### Go further
#
# - ★★ (1 hour) Put all threads of a block to work in `online_update`.
#
# **Deeper:** [01x_deeper.ipynb](01x_deeper.ipynb).
#
# **Next:** [02a_fa2_cuda_first_kernels.ipynb](02a_fa2_cuda_first_kernels.ipynb). Rung 1's order, in CUDA C++.
