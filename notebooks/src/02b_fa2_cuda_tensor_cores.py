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
# *Why can the scalar kernel never be fast, and what does each of five changes remove from its way?*
#
# ![What one wavefront of shared memory brings and feeds. Scalar: 1 word, 32 multiply-adds. Warp: 4 or 8, 85. Mma: 4, 128.
# Ldmatrix: 32, 1,024.](../notebooks/figures/question_02b.png)
#
# - **Before you start:** notebook 02a: the scalar kernel, warps and lanes, the emulation. No GPU: speeds are recorded.
# - **Time:** about 55 minutes to read, 120 minutes more with the exercises. A good place to stop for today: after
#   `ldmatrix`.
# - **Code:** [`fwd_2_mma.cu`](../steps/step02_fa2_cuda/fwd_2_mma.cu) to
#   [`fwd_5_fa2.cu`](../steps/step02_fa2_cuda/fwd_5_fa2.cu). **Tests:** `pytest tests/test_step02_fa2_cuda.py`.
#
# The table has all nine forward kernels, or **rungs**; here are 2 to 5. (*Few masks*: only tiles at an edge are masked.
# TMA, a copy engine, comes in 02d.) Its last column is the yardstick of 02b to 02e: the share of the speed of
# **cuDNN**, NVIDIA's library, in the same run. `bf16` is a 16-bit float with 8 bits of precision.

# %% jupyter={"source_hidden": true} slideshow={"slide_type": "skip"}
import steps  # first: it chooses the engine
import torch
from steps.course.figures import measured, n02b_tensor_cores as figures, planted
from steps.course.workbook import Blank, check, exercises, hint, show, solution  # noqa: F401
print(steps.engine.describe())

# %% slideshow={"slide_type": "fragment"}
print(measured.rungs("fwd"))

# %% [markdown] slideshow={"slide_type": "slide"}
# ## 1. The problem, counted
#
# The inner loop of these kernels reads **shared memory**, which has 32 banks on each multiprocessor (SM). In one clock
# cycle a bank gives one word of 4 bytes. These 32 words are a **wavefront**.
#
# An addition or a multiplication is one FLOP. The H200 is of NVIDIA's **Hopper** generation. By its whitepaper, the
# float32 units of an SM do 256 FLOP a cycle, and the tensor cores 4096. How many does a wavefront *feed*? The emulation
# counts, for one block and one tile of keys, and prints for each function wavefronts / accesses (an access is one
# instruction of a warp). The tiles, queries x keys, are 64 x 32 in `scalar`, 128 x 64 in `fa2`, and 64 x 64 between:

# %% slideshow={"slide_type": "fragment"}
figures.feeds("scalar")

# %% [markdown] slideshow={"slide_type": "fragment"}
# In `scalar` one wavefront feeds 62 FLOP, less than a quarter of what the float32 units can do. Times the wavefronts of
# 132 SMs a second, that is the kernel's **ceiling** in TFLOP/s: it cannot be faster, unless the compiler saves
# accesses. The clock is 1.83 GHz, at which the tensor cores reach the datasheet's 989.4 TFLOP/s. (01 took that of the
# float32 peak, 1.98 GHz.)
#
# **Predict 1.** In `warp` a lane fetches 4 + 8 numbers for 32 multiply-adds of S, and 8 numbers for 32 of O; in
# `scalar` one number for each. What does a wavefront of `warp` feed?
#
# <details><summary>Answer</summary>
#
# Three times as many, 195: 20 numbers serve 64 multiply-adds, and tiles have to be stored. The ceiling is 47 TFLOP/s.
#
# </details>

# %% slideshow={"slide_type": "fragment"}
figures.ceiling("warp")

# %% [markdown] slideshow={"slide_type": "slide"}
# ## 2. The idea: a warp holds a matrix
#
# The instruction `mma.m16n8k16` (matrix multiply-accumulate) multiplies A (16 x 16) with B (16 x 8) and adds the
# product to C (16 x 8), for a whole warp. A lane's share, in its registers, is a **fragment**: 8 numbers of A, 4 of B,
# 4 of C.
#
# **Claim.** Two C fragments side by side are an A fragment. So P, made of S = Q Kᵀ and rounded, is an A operand of P V:
# no number changes lanes.
#
# A small kernel loads X (16 x 16) as A and Xᵀ as B, as later Kᵀ. It also multiplies X by the identity, so that C holds
# X, too. The numbers of X name their place: 16 times the row, plus the column.

# %% slideshow={"slide_type": "fragment"}
A, B, two_C = figures.who_holds_what()
for name, fragment in (("A", A), ("B", B), ("two C", two_C)):
    print(f"lane 5 holds of {name:5}:", *(f"{n:3.0f}" for n in fragment[5].tolist()))
print("two C fragments of S are the A fragment:", torch.equal(A.float(), two_C))
figures.fragments(A, B)

# %% [markdown] slideshow={"slide_type": "fragment"}
# The numbers in the picture are lanes. A colour is one register of A or B, which holds a pair; in C, which is float32,
# it is two registers. Of A lane 5 holds 18 and 19 (row 1, columns 2 and 3), 146 and 147 (row 9), and the pairs 8
# columns to the right. After exp it rounds its pairs and has its share of P. Only the maximum of a row, which lies in
# four neighbouring lanes, needs two shuffles.

# %% [markdown] slideshow={"slide_type": "slide"}
# ## 3. From algorithm to code
#
# All rungs compute FlashAttention-2's Algorithm 1, [corrected](../papers/errata.md).
#
# | line | what it does | in `fwd_2_mma.cu` |
# |---|---|---|
# | [3–5] | a block a query tile, a warp 16 rows; Q_i, O, m, l in registers | `load_tile`, `load_Q` |
# | [6–7] | for each tile of keys that is seen: K_j, V_j to shared memory | `keys_seen` (02.6), `load_tile` |
# | [8] | S = Q_i K_jᵀ, masked | `scores`, `mask` |
# | [9] | m_new, P, l; O times alpha | `online_update`, `row_max` |
# | [10] | O += P V_j | `to_operand` (02.5), `add_PV` |
# | [12–15] | O / l and lse, written once | `store_rows` |

# %% [markdown] slideshow={"slide_type": "slide"}
# ### Rung 2, `mma`: tensor cores
#
# **Claim.** Q, S, P and O live in fragments. Only B, which is K or V, comes from shared memory.
#
# **Predict 2.** By the datasheet the tensor cores are 15 times as fast as the float32 units. `mma` is only twice as
# fast as `warp`. What do its tensor cores wait for?
#
# <details><summary>Answer</summary>
#
# For shared memory. `scores` needs 8 wavefronts for each access, where 1 would do. So a wavefront feeds 248 FLOP, only
# 1.27 times `warp`'s 195 (at D = 64 the count is the same).
#
# </details>

# %% slideshow={"slide_type": "fragment"}
figures.ceiling("mma")
show("fwd_2_mma", "scores")

# %% [markdown] slideshow={"slide_type": "subslide"}
# `g` and `c` are the row and the first column that this lane has of a C fragment. `load_tile` moves 16 bytes a lane,
# 512 a warp: that takes 4 wavefronts without any conflict.
#
# Now line [9]. Of the four numbers in S[n], two belong to row g and two to row g + 8. The hardware computes 2ˣ and not
# eˣ, so the scale contains log2(e). After these lines l and O are multiplied by alpha, and S becomes P.

# %% slideshow={"slide_type": "fragment"}
show("fwd_2_mma", "for (int r = 0; r < 2; r++) {  // the rows g", until="l[r] *= alpha;")

# %% [markdown] slideshow={"slide_type": "subslide"}
# **Exercise 02.5: from accumulator to operand.** An *accumulator* is a C fragment. `near` is what this lane has of P
# for 8 keys, `far` for the next 8: each in float32. `pack<T>(low, high)` rounds two numbers into one register;
# [`ptx.cuh`](../steps/step02_fa2_cuda/ptx.cuh), which wraps instructions of PTX, NVIDIA's assembly language, says above
# `mma` what A wants where.

# %% slideshow={"slide_type": "fragment"}
to_operand = r"""
__device__ void to_operand(uint32_t (&A)[4], const float (&near)[4],
                           const float (&far)[4]) {
#error Blank 02.5
}"""

check("02.5", to_operand)

# %% [markdown] slideshow={"slide_type": "subslide"}
# **Exercise 02.6: tiles of keys that no query sees.** The block has the rows from `tile * Br` on, at most Br, none
# beyond Nq. How many keys must it visit, from key 0 on? Causal is aligned at the bottom right; with Nq > Nk some blocks
# see nothing.

# %% slideshow={"slide_type": "fragment"}
keys_seen = r"""
__device__ int keys_seen(int tile, int Nq, int Nk, int causal) {
#error Blank 02.6
}"""

check("02.6", keys_seen)

# %% [markdown] slideshow={"slide_type": "slide"}
# ### Rung 3, `ldmatrix`: no two rows in one bank
#
# Why 8 wavefronts? A warp reads 8 rows of K at once. Rows of 128 or 256 bytes all begin in the same bank, which gives
# one word a cycle: a **bank conflict**.
#
# **Claim.** Cut each row into chunks of 16 bytes. Let row r keep its chunk c at position c XOR (r mod 8), a
# **swizzle**. Then chunk c of any 8 neighbouring rows uses each of the 32 banks once. `plain` counts without a swizzle,
# four matrices an access.

# %% slideshow={"slide_type": "fragment"}
figures.banks()

# %% [markdown] slideshow={"slide_type": "subslide"}
# The instruction `ldmatrix` fetches four matrices of 8 x 8 numbers at once, 512 bytes, in 4 wavefronts. Lane t gives
# the address of row t % 8 of matrix t / 8. Then each matrix is dealt out to the 32 lanes, with `.trans` transposed, as
# V needs it. Numbers are lanes:

# %% slideshow={"slide_type": "fragment"}
figures.dealt()

# %% [markdown] slideshow={"slide_type": "subslide"}
# **Predict 3.** With the swizzle the ceiling rises from 60 to 396 TFLOP/s, 6.6 times, and the speed only four times.
# What does the count leave out?
#
# <details><summary>Answer</summary>
#
# Waiting: all warps of a block wait for each K_j and V_j.
#
# </details>

# %% slideshow={"slide_type": "fragment"}
figures.ceiling("ldmatrix")

# %% [markdown] slideshow={"slide_type": "subslide"}
# **Exercise 02.4: eight rows without a bank conflict.** A tile of `rows` rows is cut into **slabs** of W columns,
# stored one after the other. W is 64, or 32 where D is no multiple of 64: then two rows cover the banks once. Return
# where the element (row, column) lies, counted in elements. Chunk c of rows 8 n to 8 n + 7 must meet each of the 32
# banks once. `check` also counts wavefronts.

# %% slideshow={"slide_type": "fragment"}
at = r"""
__device__ int at(int rows, int row, int column) {
#error Blank 02.4
}"""

check("02.4", at)

# %% [markdown] slideshow={"slide_type": "slide"}
# ### Rung 4, `cp_async`: the next tile travels meanwhile
#
# **Claim.** K_j is needed in S, V_j in P V; while one is used the other can come. `load_tile` now starts copies from
# device to shared memory, and the thread goes on. `cp_async_wait<0>` waits for the thread's *own* copies; only after
# the barrier are all threads' copies there.
#
# **Predict 4.** Its wavefronts are exactly those of `ldmatrix`. It became 1.36 times as fast. For which share of its
# time, at least, did `ldmatrix` wait for tiles?
#
# <details><summary>Answer</summary>
#
# 1 - 1/1.36, more than 26%, if nothing but waiting was saved.
#
# </details>

# %% slideshow={"slide_type": "fragment"}
print(measured.rung("fwd_4_cp_async", peer="sdpa-cudnn"))
show("fwd_4_cp_async", "  for (int j = 0; j < keys", until="  int64_t row = int64_t")

# %% [markdown] slideshow={"slide_type": "slide"}
# ### Rung 5, `fa2`: 32 rows a warp
#
# **Claim.** In `cp_async` a warp uses each fragment of K or V once, for its 16 rows. If it owns 32 rows, it uses each
# twice. The price is registers, so Q goes back to shared memory.
#
# A wavefront feeds 1.67 times as many FLOP; the speed does not follow, for reasons beyond this count. At 660 TFLOP/s
# `mma` itself would be the limit: on Hopper it reaches two thirds of 989.4, by FlashAttention-3's authors.

# %% slideshow={"slide_type": "fragment"}
figures.ceiling("fa2")
print(measured.rung("fwd_5_fa2", peer="sdpa-cudnn"))

# %% [markdown] slideshow={"slide_type": "slide"}
# ## 4. Check it, then break it
#
# Three cases of the contract (02a):

# %% slideshow={"slide_type": "fragment"}
for rung in ("warp", "mma", "ldmatrix", "cp_async", "fa2"):
    names = ["ragged", "more_queries_causal", "scores_200"]
    planted.on_cases(rung, names, torch.bfloat16)

# %% [markdown] slideshow={"slide_type": "subslide"}
# A copy may land at any moment: in the emulation late, at its wait, or eagerly, at its start. Here are six edits. **One
# does no harm. One is seen only if copies are late. Which?**

# %% slideshow={"slide_type": "fragment"}
print(planted.diffs("fwd_4_cp_async", figures.MISTAKES))
names = """one_key ragged scores_200 ragged_causal fewer_queries_causal
    more_queries_causal large_scores""".split()
orders = {order: {"copies": order} for order in ("late", "eager")}
harmless = ["a tile too many fetched"]
planted.seen_by("cp_async", figures.MISTAKES, names, harmless=harmless, **orders)

# %% [markdown] slideshow={"slide_type": "subslide"}
# <details><summary>Answer</summary>
#
# A tile too many: beyond the last key nothing is read. A missing wait: eager copies are in time.
#
# </details>
#
# **Bug hunt 02.bug1.** A report on a broken kernel, `show("02.bug1")`. Write a test that fails on it and passes on the
# repaired one.

# %% slideshow={"slide_type": "fragment"}
print(planted.wrapped(exercises.find("02.bug1").symptom))

def test(forward):
    """Asserts what must hold of (out, lse) = forward(q, k, v, causal=..., scale=...)."""
    raise Blank

check("02.bug1", test)

# %% [markdown] slideshow={"slide_type": "slide"}
# ## 5. Predict, then measure
#
# **Predict 5.** Two of the five steps gained more than their count. Which, and how can that be?
#
# <details><summary>Answer</summary>
#
# `cp_async`, which waits less, and `mma`: `warp` reached only 56% of its ceiling, and `mma` 90%.
#
# </details>
#
# The picture is a **roofline**. `scalar` was measured at 17.5 TFLOP/s, above its ceiling of 15: the compiler joins four
# of its loads into one.

# %% slideshow={"slide_type": "fragment"}
figures.gains()
figures.roofline()

# %% [markdown] slideshow={"slide_type": "slide"}
# ## 6. Summary
#
# - Count what a wavefront of shared memory feeds. That gives a ceiling before any GPU has run the kernel.
# - A fragment is a matrix dealt to 32 lanes. Two C fragments of S are, as they lie, an A fragment of P.
# - With a swizzle, eight rows of one column meet all banks once.
# - Copies in the background need the thread's own wait, then everybody's barrier.
#
# **Ask yourself**
#
# 1. Which lanes hold row 9 of S?
#    <details><summary>Answer</summary>
#
#    Lanes 4 to 7, each two of every eight columns.
#    </details>
# 2. Why may P and V both have their keys in another order, as long as it is the same one?
#    <details><summary>Answer</summary>
#
#    P V sums over the keys. Each number of P must only meet its own row of V.
#    </details>
# 3. Why does `cp_async` need no second buffer for K?
#    <details><summary>Answer</summary>
#
#    K is not needed after S, so the next K comes during softmax and P V.
#    </details>
# 4. What does `fa2` pay for 32 rows a warp?
#    <details><summary>Answer</summary>
#
#    Registers. So Q lies in shared memory, and is read again for every tile.
#    </details>
# 5. Why can `ldmatrix` without a swizzle not be faster than plain loads?
#    <details><summary>Answer</summary>
#
#    The eight rows of a matrix begin in the same bank: eight wavefronts, as before.
#    </details>
#
# **Go further**
#
# - ★ (15 minutes) Count `fa2` with tiles (64, 64) and (128, 128) at D = 64. Which has the higher ceiling?
#
# **Read:** [papers/flash_attention_2.md](../papers/flash_attention_2.md); what the hardware counted, [a profile of
# four kernels](../steps/course/bench/results/README.md#a-profile-of-four-kernels); each idea of `fa2` alone,
# [02x_deeper.ipynb](02x_deeper.ipynb).
#
# **Next:** [02c_fa2_cuda_backward.ipynb](02c_fa2_cuda_backward.ipynb), the backward pass.
