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
# *Two kernels of the backward do the same arithmetic, `bwd_1` with `mma` and `bwd_2` with Hopper's wgmma. The second is
# more than twice as fast. What changed, and what is the next limit?*
#
# ![The operands of the backward's five products, with their names. In bwd_1 warps fetch all ten. In bwd_2 the tensor cores
# read eight from shared memory; Pᵀ and dSᵀ lie in registers.](../notebooks/figures/question_02e.png)
#
# - **Before you start:** 02c (the backward's five products) and 02d (TMA, wgmma, schedules). Hopper is emulated here;
#   speeds were measured on an H200.
# - **Time:** about 50 minutes to read, 60 minutes more with the exercises.
# - **Code:** `bwd_1_fa2.cu`, `bwd_2_wgmma.cu` and `bwd_3_hopper.cu` in `steps/step02_fa2_cuda/`.
# - **Tests:** `pytest tests/test_step02_fa2_cuda.py`.

# %% jupyter={"source_hidden": true} slideshow={"slide_type": "skip"}
import steps  # first: it chooses the engine
import torch
from steps.course.figures import n02d_hopper, measured, planted
from steps.course.figures import n02e_hopper_backward as figures
from steps.course.workbook import Blank, check, show
from steps.course.workbook import hint, solution  # noqa: F401  for you, when you are stuck

print(steps.engine.describe())

# %% [markdown] slideshow={"slide_type": "slide"}
# ## 1. The problem, measured
#
# `bwd_1` is 02c's `bwd_1_fa2`. `bwd_2` has the same tiles and loops with TMA and wgmma. The shares are of cuDNN's
# backward in the same run, as in 02b:

# %% slideshow={"slide_type": "fragment"}
print(measured.rungs("bwd"))

# %% [markdown] slideshow={"slide_type": "fragment"}
# In `bwd_1` warps fetch every operand by `ldmatrix`, and shared memory is the limit: it gives 128 bytes a clock. wgmma
# reads shared memory without `ldmatrix`. How high is the new *roof*, the speed if the busiest unit never rests? (02b's
# ceiling is the same, counted for shared memory alone.)

# %% [markdown] slideshow={"slide_type": "slide"}
# ## 2. The idea: bytes a clock
#
# A wgmma multiplies 64 x 16 numbers by 16 x n. A multiprocessor (SM) does 4096 FLOP a clock, so that takes n / 2
# clocks. The instruction reads its second operand, 32 n bytes, from shared memory. Its first operand, 2048 bytes, comes
# from there or from registers.
#
# **Claim 1.** With n = 64 and both operands in shared memory, a product needs *all* of that memory's bandwidth. A first
# operand in registers, or a wider n, leaves some for others.

# %% slideshow={"slide_type": "fragment"}
def bytes_a_clock(n, first_in_registers):
    """What one wgmma reads from shared memory, 64 x 16 numbers times 16 x n, a clock."""
    first = 0 if first_in_registers else 64 * 16 * 2
    clocks = 2 * 64 * 16 * n / 4096
    return (first + 16 * n * 2) / clocks


for n in (64, 128):
    for where in ("shared memory", "registers"):
        print(f"n = {n:3}, first operand in {where:13}:",
              f"{bytes_a_clock(n, where == 'registers'):.0f} of 128 bytes a clock")

# %% [markdown] slideshow={"slide_type": "subslide"}
# ### Which operand can stay in registers?
#
# A product leaves its result in registers. It can stay there as the first operand of a product with the same rows. A
# block owns keys. It can compute S, with a query a row, or Sᵀ = K_j Q_iᵀ, with a key a row.
#
# | product | sums over | rows of its result | first operand, with S | with Sᵀ |
# |---|---|---|---|---|
# | S, dP (or Sᵀ, dPᵀ) | d | queries (keys) | Q_i, dO_i | K_j, V_j |
# | dV_j += Pᵀ dO_i | queries | keys | Pᵀ, from shared memory | Pᵀ, **as it lies** |
# | dK_j += dSᵀ Q_i | queries | keys | dSᵀ, from shared memory | dSᵀ, **as it lies** |
# | dQ_i = dS K_j | keys | queries | dS, as it lies | dS, from shared memory |
#
# **Claim 2.** With Sᵀ two products take their first operand from registers, and P is never stored. dS goes to shared
# memory either way: it is summed over queries for dK, and over keys for dQ.
#
# Here are four queries and six keys. Two warpgroups have three keys each, and only their own rows of Pᵀ and dSᵀ. Is
# that enough for dV, dK and dQ?

# %% slideshow={"slide_type": "fragment"}
Q = torch.tensor([[1.0, 2], [0, 1], [-1, 0], [2, -1]])
K = torch.tensor([[0.0, 1], [1, 0], [-1, 1], [1, 2], [2, 0], [0, -1]])
V, dO = torch.arange(12.0).view(6, 2) / 4, torch.tensor([[1.0, 0], [0, 1], [1, 1], [2, 0]])
P = (Q @ K.T).softmax(-1)
dS = P * (dO @ V.T - (dO * (P @ V)).sum(-1, keepdim=True))  # (queries, keys)
dV, dK, dQ = P.T @ dO, dS.T @ Q, dS @ K
for keys in (slice(0, 3), slice(3, 6)):
    P_t, dS_t = P.T[keys], dS.T[keys]
    alone = torch.allclose(P_t @ dO, dV[keys]), torch.allclose(dS_t @ Q, dK[keys])
    part = (dS_t.T @ K[keys])[0]
    print(f"keys {keys.start} to {keys.stop - 1}: dV and dK are right: {alone};",
          f"dQ's row 0: {part[0]:.2f} {part[1]:.2f}")
print(f"dQ's row 0 over all keys: {dQ[0, 0]:.2f} {dQ[0, 1]:.2f}")

# %% [markdown] slideshow={"slide_type": "subslide"}
# dV and dK need no exchange, dQ does: each warpgroup has only a part of the sum (-0.01 and 0.11 make 0.10). So the two
# exchange dSᵀ through shared memory, and each computes one half of dQ_i over all keys.
#
# The block goes through the tiles of queries, one **step** for each. What does each product of a step read, and what
# else passes through shared memory (grey)?

# %% slideshow={"slide_type": "fragment"}
figures.five_products()

# %% [markdown] slideshow={"slide_type": "fragment"}
# At D = 128 three of five products still take all of the bandwidth. With Sᵀ, dV and dK read 16 KiB less each, dQ 32
# more: only P's store is saved.

# %% [markdown] slideshow={"slide_type": "slide"}
# ## 3. From algorithm to code
#
# FlashAttention-2's Algorithm 2, by the lines of [our page on the paper](../papers/flash_attention_2.md).
#
# | line | what | in `bwd_2_wgmma.cu` |
# |---|---|---|
# | 4 | delta; lse times log2(e), for powers of two (02b); dq = 0 | `attention_delta`, a kernel of its own |
# | 5–7 | K_j, V_j by TMA; dK_j = dV_j = 0 | before the loop |
# | 8–9 | Q_i, dO_i, lse_i, delta_i, one tile ahead | `load_queries`, thread 0 |
# | 10, 13 | Sᵀ = K_j Q_iᵀ, dPᵀ = V_j dO_iᵀ | `start_product`, two groups |
# | 11 | Pᵀ, while dPᵀ is computed | `wgmma_wait<1>`, `mask`, `probabilities` |
# | 14 | dSᵀ, also to shared memory | `wgmma_wait<0>`, `score_gradients`, `store_tile` |
# | 15 | dQ_i: each warpgroup 64 rows (D = 64) or 64 columns (D = 128) | `start_dQ`, `add_dQ` |
# | 12, 16 | dV_j, dK_j, under `add_dQ` | `start_product`, from registers |
# | 18 | dK_j, dV_j, written once | `store_rows` |
#
# Each `start_product` starts one group (02d). `wgmma_wait<1>` waits for the older of two, so Pᵀ is computed while
# the tensor cores compute dPᵀ:

# %% slideshow={"slide_type": "fragment"}
step = "barrier_wait(queries_full + stage"
show("bwd_2_wgmma", step, until="Global<float> dq_i = dq")

# %% [markdown] slideshow={"slide_type": "subslide"}
# There is one barrier a step, where the warpgroups exchange dSᵀ. `fence_async` before it makes the stores visible to
# wgmma, which reads shared memory by another path. dSᵀ has two buffers, which are used in turn: a warpgroup that is
# already in the next step writes the other one.
#
# Then `wgmma_wait<2>` waits for dQ_i alone: its additions to memory run while dV_j and dK_j are computed.

# %% slideshow={"slide_type": "fragment"}
show("bwd_2_wgmma", "start_dQ(dQ, dS_t", until="__syncthreads();  // nobody still")

# %% [markdown] slideshow={"slide_type": "subslide"}
# ### The new roof
#
# The grey accesses have to fit under the dashed line, beside the products. TMA writes Q_i and dO_i, and `store_tile`
# dSᵀ. But every warp reads all of lse and delta, four words at a time: that takes twice as long as dSᵀ. At D = 64 the
# grey ones need 1,024 clocks, and 768 are free. Counted together:

# %% slideshow={"slide_type": "fragment"}
roofs = {}
for D in (64, 128):
    roofs["wgmma", D], words = figures.roof("wgmma", D)
    print(words)

# %% [markdown] slideshow={"slide_type": "subslide"}
# Products and shared memory need nearly the same time. A clock in which one waits for the other is lost.
#
# ### Rung 3, `hopper`: K_j stays in registers
#
# A warpgroup multiplies the same 64 rows of K_j by every Q_iᵀ, so `bwd_3` loads them into registers once, before the
# loop. V_j could stay there, too.
#
# **Predict.** A thread has 255 registers. dK_j and dV_j take D of them for the whole loop, Sᵀ and dPᵀ take Br, the
# queries of a tile: 128 at D = 64, and 64 at D = 128. (Later Pᵀ, dSᵀ and dQ_i reuse these.) The rows of K_j take D / 4,
# those of V_j as many. Where do both fit, and where only K_j?

# %% slideshow={"slide_type": "fragment"}
for D, Br in ((64, 128), (128, 64)):
    print(f"D = {D:3}: {D + Br} registers, with K_j {D + Br + D // 4},",
          f"with V_j, too, {D + Br + D // 2}")
for D in (64, 128):
    roofs["hopper", D], words = figures.roof("hopper", D)
    print(words)
for D in (64, 128):
    old, new = roofs["wgmma", D], roofs["hopper", D]
    print(figures.gained("bwd_3_hopper", old, new, D))

# %% [markdown] slideshow={"slide_type": "fragment"}
# `bwd_3` keeps both at D = 64, and K_j alone at D = 128. By the roofs D = 64 should become 1.10 times as fast and D =
# 128 1.05 times; measured were 1.01 and 1.08. So bytes are not the only limit. Tensor cores also rest while both
# warpgroups compute their P and dS. So `bwd_3` also starts dV_j, which needs no exchange, before the barrier. The roof
# knows nothing of that, so it foresees neither 1.01 nor 1.08. With a causal mask, at D = 128, `bwd_3` has 1.04 to 1.08 of
# the speed of FlashAttention-3's own backward ([02y](02y_deeper.ipynb), section 10).
#
# **A fixed order.** The blocks add to dq in the order in which they come, so its last bits vary. With
# `deterministic=True` they take turns. What that costs, and what else `bwd_3` does, stands in [02y](02y_deeper.ipynb),
# sections 5 and 8.

# %% [markdown] slideshow={"slide_type": "subslide"}
# ### The order of dQ
#
# A warp adds its 1,024 numbers of dQ_i to memory, 32 a lane. If it added them row by row, the lanes of a warp would
# write to scattered places. But dq may have any layout, as long as *every* block uses the same one. So
# four registers at a time go to memory, lane beside lane (`atomic_add_4` adds four neighbours at once):

# %% slideshow={"slide_type": "fragment"}
show("bwd_2_wgmma", "add_dQ")

# %% [markdown] slideshow={"slide_type": "subslide"}
# **Exercise 02.11: which rows of dQ a warp owns.** A last, separate kernel rounds dq to 16 bits and restores rows and
# columns. Where does (row, column) lie among the 8192 numbers of a tile?
#
# - Warp w has 16 x 64 numbers, from place 1024 w on. At D = 64 a tile has 128 rows: warp 0 has the first 16, and so on
#   to warp 7. At D = 128 it has 64 rows: warps 0 to 3 have 16 rows each of columns 0 to 63, warps 4 to 7 of columns 64
#   to 127.
# - Within the warp they lie as 02b's C fragments: fragment i has columns 8 i to 8 i + 7, in registers 4 i to 4 i + 3 of
#   each lane: of lane t two neighbours in row t / 4, then two in row t / 4 + 8.
# - `add_dQ` above says where these registers go.

# %% slideshow={"slide_type": "fragment"}
def dq_position(row, column, D):
    """The index of the number (row, column) of a tile of dQ_i among its 8192 numbers."""
    raise Blank


check("02.11", dq_position)

# %% [markdown] slideshow={"slide_type": "slide"}
# ## 4. Check it, then break it
#
# Six mistakes in `bwd_2_wgmma.cu`, each with the old line (-) and the new one (+). They run in the three schedules of
# 02d. **Which one is seen only when threads come in another order?**

# %% slideshow={"slide_type": "fragment"}
print(planted.diffs("bwd_2_wgmma", figures.MISTAKES))

# %% [markdown] slideshow={"slide_type": "subslide"}
# <details><summary>Answer</summary>
#
# Without the barrier, a warpgroup may compute dQ_i before the other one has stored its dSᵀ. In the emulation's usual
# order both have stored by then. A thread that *reads* registers which a product may still write gets NaN in the
# emulation, so a dPᵀ used too early spoils dq and dk. A thread that *writes* them is *refused*, as `mask` that writes
# Sᵀ. So is a block that ends before its products or copies.
#
# </details>

# %% slideshow={"slide_type": "fragment"}
print(n02d_hopper.outcomes("wgmma", mistakes=figures.MISTAKES, backward=True))

# %% [markdown] slideshow={"slide_type": "slide"}
# ## 5. Predict, then measure
#
# **Predict.** The first table has `bwd_2` 2.1 times as fast as `bwd_1`. Is that what the roofs foresee?

# %% slideshow={"slide_type": "fragment"}
for D in (64, 128):
    before, words = figures.roof("fa2", D)
    print(words, figures.gained("bwd_2_wgmma", before, roofs["wgmma", D], D), sep="\n  ")

# %% [markdown] slideshow={"slide_type": "slide"}
# ## 6. Summary
#
# If you write such a kernel yourself:
#
# - Count bytes a clock first: of the products, and of all else that passes through shared memory.
# - Let a block own keys, and compute Sᵀ. Then Pᵀ and dSᵀ lie where they are needed, and only dS is exchanged.
# - Keep in registers what does not change, K_j first. Start what needs no exchange, dV_j, before the barrier.
#
# **Ask yourself**
#
# 1. Why does a wider n help the first two products, and what forbids n = 128 at D = 128?
#    <details><summary>Answer</summary>
#
#    The first operand is read once for n columns, so a wider n reads fewer bytes a clock. n = 128 is a tile of 128
#    queries. Sᵀ and dPᵀ would take 128 registers, and dK and dV take another 128. A thread has 255.
#    </details>
# 2. Why does dQ read both operands from shared memory, although its first operand was in registers?
#    <details><summary>Answer</summary>
#
#    It sums over keys, and a warpgroup has only half of them. What lies in its registers is dSᵀ, not dS.
#    </details>
# 3. Why is one barrier a step enough, given that dSᵀ has two buffers?
#    <details><summary>Answer</summary>
#
#    A warpgroup that is ahead writes the other buffer. To write this one again it must pass the next barrier, where all
#    arrive only after `wgmma_wait<0>`: they have finished reading it.
#    </details>
# 4. Why do lse and delta take more time of shared memory than dSᵀ, which has 32 times as many bytes?
#    <details><summary>Answer</summary>
#
#    dSᵀ is written once, 128 bytes a clock. Each of eight warps reads all of lse and delta, four words at a time.
#    </details>
# 5. Why may `add_dQ` use the order of registers, and `store_rows` not?
#    <details><summary>Answer</summary>
#
#    All blocks add to dq in this same order, and a last kernel has to round the sums anyway: it also restores the rows.
#    dK and dV are complete in their block, and are written once, as rows.
#    </details>
#
# **Go further**
#
# - ★ (15 minutes) `figures.step_of(128, 128)`: what would a tile of 128 queries read?
# - ★★ (1 hour) Count `bwd_1` in the same way: how many bytes does `ldmatrix` fetch for each product?
# - ★★★ (a weekend) A warp that sends dQ_i: an open problem of [02y](02y_deeper.ipynb), section 7.
#
# **Read:** [FlashAttention-3](../papers/flash_attention_3.md) and [FlashAttention-4](../papers/flash_attention_4.md).
#
# **Next:** [03a_triton_kernels.ipynb](03a_triton_kernels.ipynb). A compiler decides most of this for you.
