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
# # 02a. CUDA C++: the first kernels
#
# *How does attention look in CUDA C++, and who should own a row of S: one thread, or some of the 32 threads of a warp?*
#
# ![A tile of S twice. Left, a thread owns a whole row. Right, a thread of a warp (a lane) owns every eighth number of
# four rows.](../notebooks/figures/question_02a.png)
#
# - **Before you start:** notebooks 00 and 01; reading C (part 3 has the C++). No GPU: g++ runs the kernels.
# - **Time:** about 60 minutes to read, 60 minutes more with the exercises. A good place to stop for today: before
#   `warp`.
# - **Code:** [`fwd_0_scalar.cu`](../steps/step02_fa2_cuda/fwd_0_scalar.cu),
#   [`fwd_1_warp.cu`](../steps/step02_fa2_cuda/fwd_1_warp.cu). **Tests:** `pytest tests/test_step02_fa2_cuda.py`.

# %% jupyter={"source_hidden": true} slideshow={"slide_type": "skip"}
import steps  # first: it chooses the engine
import torch
from steps.course.figures import measured, n02a_first_kernels as figures, planted
from steps.course.workbook import check, hint, show, solution  # noqa: F401
torch.set_printoptions(precision=2, sci_mode=False)
print(steps.engine.describe())

# %% [markdown] slideshow={"slide_type": "slide"}
# ## 1. The problem, measured
#
# In notebook 01's last kernel, `registers`, a block has a *query tile*, and a thread keeps a patch of 8 x 8 scores.
#
# How fast is that? Below are 01's kernels, this page's, and a **peer**, a kernel of others: PyTorch's. The last column
# is the share of what an H200's float32 units can do. D is the d of notebooks 00 and 01; *full* means not causal:

# %% slideshow={"slide_type": "fragment"}
print(figures.rungs())

# %% [markdown] slideshow={"slide_type": "slide"}
# ## 2. The idea: owners who agree on m
#
# **Claim.** In exact arithmetic take *any* number m, and use the same m in the numerator and in the denominator. Then
#
# $$O_i = \frac{\sum_j e^{S_{ij} - m}\, V_j}{\sum_j e^{S_{ij} - m}}$$
#
# because e^-m cancels. No other row occurs in it, so rows can be divided freely among workers. The *keys* of a row can
# be divided, too, if all its workers use one m: then their parts of both sums add up.
#
# Take notebook 00's six tokens, and two workers with three keys each. First each uses its own maximum, then both one:

# %% slideshow={"slide_type": "fragment"}
Q = torch.tensor([[1.0, 2], [0, 1], [-1, 0], [2, -1], [1, 1], [3, 1]])
K = torch.tensor([[0.0, 1], [1, 0], [-1, 1], [1, 2], [2, 0], [0, -1]])
V = torch.tensor([[0.0, 6], [2, 0], [4, 6], [6, 4], [8, 0], [10, 6]])
S = Q[5] @ K.T / 2**0.5  # row 5 of the scores

def part(keys, m):
    """(l, O) over some keys, both divided by e^m."""
    P = (S[keys] - m).exp()
    return P.sum(), P @ V[keys]

first, second = slice(0, 3), slice(3, 6)
for m1, m2 in ((S[first].max(), S[second].max()), (S.max(), S.max())):
    (l1, O1), (l2, O2) = part(first, m1), part(second, m2)
    print(f"m = {m1:.2f} and {m2:.2f}: the second alone {O2 / l2},",
          f"added {(O1 + O2) / (l1 + l2)}")

# %% [markdown] slideshow={"slide_type": "subslide"}
# Row 5 of the output should be (6.83, 1.34), and is with one m. With two different m the parts are scaled differently,
# and their sum gives the wrong (4.74, 1.32).
#
# Rows or keys? A block, too, has to choose. It consists of **warps**: 32 threads that run together, called **lanes**.
# FlashAttention-1's own code gave each warp some keys of every row, so warps had to add up O through shared memory.
# FlashAttention-2 gives each warp some rows (section 3.3 of the paper).

# %% slideshow={"slide_type": "fragment"}
figures.owners()

# %% [markdown] slideshow={"slide_type": "slide"}
# ## 3. From algorithm to code
#
# In our first kernel, `scalar` (**rung** 0 of a ladder of kernels), a *thread* owns a row. In `warp` eight lanes own
# four rows together, and have to agree on m.
#
# ### CUDA C++ for those who know Numba
#
# | Numba | here | meaning |
# |---|---|---|
# | `@cuda.jit` | `extern "C" __global__ void` | a kernel |
# | `@cuda.jit(device=True)` | `__device__` | a function of a kernel |
# | `cuda.threadIdx.x`, `cuda.blockIdx.x` | `threadIdx.x`, `blockIdx.x` | who am I |
# | an array `x` | `Global<const float> x` | memory of the GPU |
# | `cuda.shared.array(n, float32)` | `smem.array<float>(n)`, a `Shared<float>` | shared memory |
# | `cuda.local.array(n, float32)` | `float O[n]` | registers |
# | an array as an argument | `float (&O)[n]`; a number: `float& m` | the caller's own, not a copy |
# | `cuda.syncthreads()` | `__syncthreads()` | the barrier of a block |
# | `Br`, `Bc`, `D`, fixed when the kernel is made | macros `Br`, `Bc`, `D` | known to the compiler |
#
# On a GPU `Global` and `Shared` are plain pointers; under g++ they know their bounds. A pointer plus t points t numbers
# further, `= {}` fills an array with 0, and `#pragma unroll` asks the compiler to write a loop out. A first kernel
# reverses an array:

# %% slideshow={"slide_type": "fragment"}
MIRROR = """#include "ptx.cuh"
extern "C" __global__ void mirror(Global<const float> x, Global<float> y) {
  SharedMemory smem;
  Shared<float> tile = smem.array<float>(blockDim.x);
  int t = threadIdx.x, n = blockDim.x;
  tile[t] = x[t];
  __syncthreads();
  y[t] = tile[n - 1 - t];  // written by another thread
}"""
x, y = torch.arange(8.0), torch.zeros(8)
planted.emulated(MIRROR, "mirror", [x, y], grid=1, block=8, shared_bytes=8 * 4)
print(y)

# %% [markdown] slideshow={"slide_type": "subslide"}
# ### The same text on a CPU
#
# g++ compiles the text unchanged, with an **emulation** of CUDA behind it, whose shared memory starts as NaN. A thread
# runs alone until it has to wait. The threads come in an order that we choose: forward, reverse or random.
#
# Three mistakes in `mirror`, each with the old line (-) and the new one (+), and what the emulation says:

# %% slideshow={"slide_type": "fragment"}
figures.break_mirror(MIRROR, x)

# %% [markdown] slideshow={"slide_type": "subslide"}
# A GPU says nothing. In the third mistake its barrier waits for all threads of the block *that have not returned* (01),
# and the block goes on without the number of thread 5. The emulation stops there and complains.
#
# ### An order that hides a mistake
#
# The kernel `differences` computes $y_n = x_n - x_{n-1}$ for 20 numbers, with $x_{-1} = 0$. Each thread leaves its
# number in shared memory for its right neighbour. **Without the barrier, in which order of the threads is all well?**
#
# <details><summary>Answer</summary>
#
# Forward, where the left neighbour has come before. A test in this order alone would pass.
#
# </details>

# %% slideshow={"slide_type": "fragment"}
DIFFERENCES = """#include "ptx.cuh"
extern "C" __global__ void differences(Global<const float> x, Global<float> y) {
  SharedMemory smem;
  Shared<float> tile = smem.array<float>(blockDim.x);
  int t = threadIdx.x, n = INDEX;
  if (n < N) tile[t] = x[n];
  BARRIER
  if (n < N) y[n] = x[n] - (t > 0 ? tile[t - 1] : n > 0 ? x[n - 1] : 0);
}"""
launch = dict(index="blockIdx.x * blockDim.x + threadIdx.x", grid=3, shared_bytes=8 * 4)
for barrier in ("", "__syncthreads();"):
    print("barrier:", barrier or "none")
    figures.try_differences(DIFFERENCES, barrier=barrier, **launch)

# %% [markdown] slideshow={"slide_type": "slide"}
# ### Rung 0, `scalar`, line by line
#
# A thread owns a query row, a block Br of them. In brackets stand the lines of FlashAttention-2's Algorithm 1,
# corrected ([papers/errata.md](../papers/errata.md)).
#
# | line | what it does | in the kernel |
# |---|---|---|
# | [3] | for each tile of Br queries | the grid: a block a tile |
# | [4–5] | Q_i; m = -inf, l = 0, O = 0, on the chip | registers of a thread |
# | [6] | for each tile of Bc keys | the loop over `j` |
# | [7] | K_j, V_j to shared memory | `load_tile`, between two barriers |
# | [8] | S = scale Q_i K_jᵀ, Bc numbers a thread | `scores`, which finds max S as well |
# | [9–10] | m_new, P, alpha; new l and O | `online_update`, yours in exercise 02.1 |
# | [12–15] | O / l and lse, written once | `store_row` |
#
# **The budget.** q and O take 2 D of a thread's at most 255 registers, so D ends at 96, and S lies in shared memory.
# All threads of a warp read the same `K[j * D + d]` at once, and one read serves them all. But each number serves one
# multiply-add of a thread: by 01's formula this allows 16.7 TFLOP/s. (Measured are 17.5, as the compiler joins four
# loads into one.) *Banks*, in a comment below, are channels of shared memory.

# %% slideshow={"slide_type": "fragment"}
show("fwd_0_scalar", "scores")

# %% [markdown] slideshow={"slide_type": "subslide"}
# The whole kernel for one head: three blocks of two threads, tiles of three keys. The functions that it calls stand in
# `fwd_0_scalar.cu`. The file's own kernel adds batches, heads, strides and the causal mask.

# %% slideshow={"slide_type": "fragment"}
KERNEL = """
extern "C" __global__ void one_head(
    Global<const float> q, Global<const float> k, Global<const float> v,
    Global<float> out, Global<float> lse, int N, float scale) {
  SharedMemory smem;
  Shared<float> K = smem.array<float>(Bc * D);
  Shared<float> V = smem.array<float>(Bc * D);
  Shared<float> S = smem.array<float>(Bc * Br) + threadIdx.x;
  int i = blockIdx.x * Br + threadIdx.x;                         // [3] this thread's query
  float Q_i[D], O_i[D] = {}, m = -INFINITY, l = 0;               // [4-5]
  for (int d = 0; d < D; d++) Q_i[d] = i < N ? q[i * D + d] : 0;

  for (int j = 0; j < N; j += Bc) {                              // [6]
    int n = min(Bc, N - j);
    __syncthreads();  // no thread still reads the tile that is overwritten now
    load_tile(K, k + j * D, D, n);                               // [7]
    load_tile(V, v + j * D, D, n);
    __syncthreads();  // every thread reads rows that others have loaded
    float max_S = scores(S, Q_i, K, n, scale);                   // [8]
    online_update(m, l, O_i, S, max_S, V, n);                    // [9-10]
  }
  if (i < N) {
    store_row(out + i * D, O_i, l);                              // [12-15]
    lse[i] = m + logf(l);
  }
}"""
N, D, Br, Bc = 6, 2, 2, 3
out, lse = torch.zeros(N, D), torch.zeros(N)
text = show("fwd_0_scalar") + KERNEL
arguments = [Q, K, V, out, lse, N, D**-0.5]
shared = (2 * Bc * D + Bc * Br) * 4
launch = dict(grid=N // Br, block=Br, shared_bytes=shared, D=D, Br=Br, Bc=Bc)
planted.emulated(text, "one_head", arguments, **launch)
print("out[5] =", out[5])
print("at D = 96:", planted.block("fwd_0_scalar", 96))
print(measured.rung("fwd_0_scalar", D=64, dtype="fp32", peer="sdpa-efficient"))

# %% [markdown] slideshow={"slide_type": "slide"}
# ### Exercise 02.1: add a tile of keys to m, l and O, in registers
#
# Lines [9–10] in about ten lines. `S[j * Br]` is this thread's score of key j, and row j of V begins at `V[j * D]`.
# `max_S` is the largest of the n scores. `expf(x)` is e^x. O is not divided by l.
#
# Write the body in place of `#error`: `check` runs some of the contract's cases. `hint("02.1")` and `solution("02.1")`
# help.

# %% slideshow={"slide_type": "fragment"}
online_update = r"""
__device__ void online_update(float& m, float& l, float (&O)[D], Shared<float> S,
                              float max_S, Shared<float> V, int n) {
#error Blank 02.1
}"""

check("02.1", online_update)

# %% [markdown] slideshow={"slide_type": "slide"}
# ### Rung 1, `warp`: a warp owns 16 rows
#
# `warp` gives each lane a patch of scores, so that a number fetched from shared memory serves a whole row or column of
# the patch.
#
# Lane t is called (a, b), with a = t / 8 and b = t % 8. It owns the rows a, a + 4, a + 8 and a + 12 of the warp. So
# the eight lanes with the same a own the same four rows. They divide the keys of S: lane (a, b) has the keys b, b + 8,
# b + 16 and so on. They also divide the columns of O, eight for each lane at D = 64. In the picture at the top lane
# (1, 2) is orange, the others with a = 1 are blue. It has 32 keys, so a lane has 4 x 4 scores; with 64 keys, as below,
# 4 x 8.
#
# In the code Q points at the lane's first row, row a, and K at its first key, key b. The next row is four rows further,
# the next key eight rows further. `STRIDE` is the length of a row in shared memory:

# %% slideshow={"slide_type": "fragment"}
show("fwd_1_warp", "scores")

# %% [markdown] slideshow={"slide_type": "subslide"}
# How many numbers does a lane fetch? Take D = 64 and tiles of 64 keys. For S, each step along d takes 4 numbers of Q
# and 8 of K, for 32 multiply-adds. For O, each key takes 8 numbers of V, for 32 more; P comes from other lanes'
# registers.

# %% slideshow={"slide_type": "fragment"}
ROWS, KEYS, COLUMNS, D, Bc = 4, 8, 8, 64, 64
multiply_adds = D * ROWS * KEYS + Bc * ROWS * COLUMNS  # S, and O, for a tile of keys
fetched = D * (ROWS + KEYS) + Bc * COLUMNS
each = fetched / multiply_adds
print(f"warp: {fetched} numbers for {multiply_adds} multiply-adds, {each:.2f} each")
print("scalar: 1 each")

# %% [markdown] slideshow={"slide_type": "subslide"}
# ### Eight lanes agree
#
# A **shuffle**, `__shfl_xor_sync(who, x, 4)`, gives a lane the x of the lane whose number differs in the bit of value
# 4, from register to register. After 4, 2 and 1 every lane has met all eight. `who` names the lanes that take part,
# `~0u` all 32, and all of them must come. At first half of the warp stays away; then all come.

# %% slideshow={"slide_type": "fragment"}
BUTTERFLY = """#include "ptx.cuh"
extern "C" __global__ void butterfly(Global<float> x) {
  if (threadIdx.x >= TAKE_PART) return;
  float m = x[threadIdx.x];
  for (int step = 1, lanes = 4; lanes > 0; lanes /= 2, step++) {
    m = fmaxf(m, __shfl_xor_sync(~0u, m, lanes));
    x[32 * step + threadIdx.x] = m;
  }
}"""
x = torch.zeros(4, 32)
x[0] = torch.tensor([3, 7, 1, 5, 0, 6, 4, 2]).repeat(4)
print(planted.report(BUTTERFLY, "butterfly", [x], grid=1, block=32, TAKE_PART=16))
planted.emulated(BUTTERFLY, "butterfly", [x], grid=1, block=32, TAKE_PART=32)
print(x[:, :8].int())  # of eight lanes: at first, after 4, after 2, after 1

# %% [markdown] slideshow={"slide_type": "slide"}
# ## 4. Check it, then break it
#
# Some cases of the **contract** (00). In `scores_200` scores reach ±200, where exp overflows; in `negative_row` all
# scores of one row are near -200.

# %% slideshow={"slide_type": "fragment"}
names = """one_key ragged ragged_causal fewer_queries_causal more_queries_causal
    scores_200 negative_row""".split()
for rung in ("scalar", "warp"):
    planted.on_cases(rung, names, torch.float32)

# %% [markdown] slideshow={"slide_type": "subslide"}
# ### The mistake that lives
#
# Six mistakes in `scalar`. **One mistake survives everything. Which, and why?** In the table each case has a verdict:
# *wrong* numbers; *stuck*, nobody can go on; *outside*, an access beyond an array; *lives*, all right (grey). Green:
# this case sees the mistake. Orange: no case does.

# %% slideshow={"slide_type": "fragment"}
print(planted.diffs("fwd_0_scalar", figures.MISTAKES))

# %% [markdown] slideshow={"slide_type": "subslide"}
# <details><summary>Answer</summary>
#
# With one column of S for all, threads overwrite each other's scores on a GPU, where they run at the same time. The
# emulation changes to another thread only where one waits, and between `scores` and `online_update` none does. On a GPU
# `compute-sanitizer --tool racecheck` finds it.
#
# </details>

# %% slideshow={"slide_type": "fragment"}
planted.seen_by("scalar", figures.MISTAKES, names, tile=(16, 16))

# %% [markdown] slideshow={"slide_type": "slide"}
# ## 5. Predict, then measure
#
# **A thread or eight lanes for a row?** By the counts above, how many times as fast is `warp`? And in which order do
# the counts put all five kernels: 2, 2 and 0.25 loads a multiply-add in 01, 1 and 0.31 here?
#
# <details><summary>Answer</summary>
#
# 1 / 0.31 = 3.2 times; measured 1.5 times: the compiler joins four loads of `scalar` into one, and `warp` also has its
# shuffles. By the counts `registers` should be first, and is behind `warp`; `loops_swapped` should have half of the
# speed of `scalar`, and has a tenth. The count leaves out the compiler, and what else a kernel does.
#
# </details>
#
# In colour: the kernels of this notebook.

# %% slideshow={"slide_type": "fragment"}
print(measured.rung("fwd_1_warp", D=64, dtype="fp32", peer="sdpa-efficient"))
figures.float32_speeds()

# %% [markdown] slideshow={"slide_type": "slide"}
# ## 6. Summary
#
# - Rows can be divided freely, and a row's keys among those who agree on m. Eight lanes do, with three shuffles.
# - Barriers and shuffles stand where all come. Another order of threads may show what one hides; some races stay
#   hidden.
# - A number that is fetched serves more than one multiply-add if a warp, not a thread, owns the rows.
#
# **Ask yourself**
#
# 1. Why does the loop of `scalar` need two barriers a tile, and not one?
#    <details><summary>Answer</summary>
#
#    One before the tile is read, so that all of it is there; one before it is overwritten, so that nobody still reads
#    it.
#    </details>
# 2. Which of Br and Bc of `scalar` can be made larger without more registers? What would it cost instead?
#    <details><summary>Answer</summary>
#
#    Bc. It costs shared memory, for K_j, V_j and S. A larger Br is more threads, each with its registers.
#    </details>
# 3. What goes wrong if a thread without a query returns at once?
#    <details><summary>Answer</summary>
#
#    Its rows of K_j and V_j are not loaded, so the others compute with wrong numbers.
#    </details>
# 4. Why may l stay divided among eight lanes until the end, and m not?
#    <details><summary>Answer</summary>
#
#    Parts of a sum that are rescaled by the same alpha may be added at any time. alpha and P are made of m.
#    </details>
# 5. In `scalar` the last key that a row sees differs from thread to thread. Why is that no danger for the barriers?
#    <details><summary>Answer</summary>
#
#    The loop with the barriers ends at the block's last key. The row's own end limits only what happens between them.
#    </details>
#
# **Go further**
#
# - ★ (15 minutes) Give `scalar` four sums in `scores` instead of one. Do the registers still suffice at D = 64?
#
# **Read:** [papers/flash_attention_2.md](../papers/flash_attention_2.md). **Deeper:**
# [02x_deeper.ipynb](02x_deeper.ipynb).
#
# **Next:** [02b_fa2_cuda_tensor_cores.ipynb](02b_fa2_cuda_tensor_cores.ipynb), or first the backward,
# [02c_fa2_cuda_backward.ipynb](02c_fa2_cuda_backward.ipynb).
