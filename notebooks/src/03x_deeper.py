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
# # 03x. Going deeper: Gluon, where the compiler no longer decides
#
# *How close does a kernel in Python come to one in CUDA C++, and what is in the way?*
#
# ![A ladder of stage 03's forward kernels beside cuDNN and FlashAttention-4 on an H200: rung gluon is the
# highest of ours.](../notebooks/figures/ladder_triton.png)
#
# **Before this:** notebooks 02e and 03a. **Time:** about half an hour. Each section can be read alone. A GPU is not
# needed: what only a GPU shows stands here as rows that were measured on an H200.

# %% jupyter={"source_hidden": true} slideshow={"slide_type": "skip"}
import steps  # comes first, because it chooses the engine
from steps.bench import rows
from steps.figures import measured
from steps.workbook import show

fresh = rows.fresh(rows.read())  # what was measured of the kernels as they are
print(steps.engine.describe())

# %% [markdown] slideshow={"slide_type": "slide"}
# ## 1. Five products where seven were
#
# The backward has five matrix products for each pair of tiles: S, dP, dV, dK and dQ. The rungs `fused` and `tma` run
# two kernels, one that owns keys and one that owns queries. Each of them needs S and dP for itself, so that they
# compute seven products.
#
# `bwd_2_gluon.py` is one kernel that owns keys. Its part of dQ belongs to other programs, too, so it is added to
# memory. If products were all that counts, the gain would be 7 / 5. Predict the measured gain before you run the cell.

# %% slideshow={"slide_type": "fragment"}
print("7 / 5 =", 7 / 5)
print(measured.shares(fresh, ["bwd_2_gluon"], "bwd_1_tma"))

# %% [markdown] slideshow={"slide_type": "slide"}
# The gain is smaller. Additions to memory take time, and dq must be set to zero before and put in order after. That
# weighs most where sequences are short, because the two products that are saved are then a smaller part of the whole.
#
# The additions also come in any order, and floating-point addition is not associative. So dq differs in its last bits
# from run to run. `backward(..., deterministic=True)` takes rung `tma`'s backward instead, at its price.

# %% [markdown] slideshow={"slide_type": "slide"}
# ## 2. Beside `bwd_3_hopper.cu`, line by line
#
# | step | `bwd_3_hopper.cu` | `bwd_2_gluon.py` |
# |---|---|---|
# | load a tile | one thread calls `tma_load` | a warp of its own: `produce` |
# | place of a number in a tile | `at`, permuted by hand | `NVMMASharedLayout` |
# | S^T, dP^T | `start_product` from descriptors | `warpgroup_mma(..., is_async=True)` |
# | wait for all products but one | `wgmma_wait<1>` | `warpgroup_mma_wait(1, ...)` |
# | P^T as an operand | `pack`, in registers | `rounded`, then `convert_layout` |
# | meet the other warpgroup | `__syncthreads`, one a step | the compiler's: three a step |
# | add dQ_i to memory | `atomic_add_4` | a line of PTX: `red.global.add.v4.f32` |
# | K_j in registers | at both head_dims | at head_dim 64, as pairs of numbers |
# | S^T of the next tile | after this tile has ended | beside dK and the additions |
#
# Gluon takes over where a number lies: layouts of tiles and of products, and the descriptors. It leaves to you who
# does what, when a product starts and who waits. What it cannot say: which barrier is not needed.

# %% slideshow={"slide_type": "fragment"}
show("bwd_2_gluon", "step")

# %% [markdown] slideshow={"slide_type": "slide"}
# ## 3. Where the clocks go
#
# A step handles Br queries and 128 keys. A multiprocessor of an H200 makes 2,048 multiply-adds of 16 bits a clock,
# reads 128 bytes of shared memory, and computes 16 exponentials. A `wgmma` instruction whose left operand is in shared
# memory reads both its tiles: with 64 x 64 results that is 4 KiB for 32 clocks of work, all that shared memory gives.

# %% slideshow={"slide_type": "fragment"}
def clocks(D, Br, left_in_registers):
    """Of one step with 128 keys: products, shared memory, exponentials."""
    products = 5 * Br * 128 * D / 2048
    keys = 0 if left_in_registers else 128 * D  # numbers of K_j that S^T reads
    S = keys + 2 * Br * D  # each of two warpgroups reads all queries
    dP = 128 * D + 2 * Br * D
    dQ = 2 * (64 + 64) * 128  # 64 x 64 results a warpgroup, over 128 keys
    dV_dK = 2 * 2 * Br * D  # P and dS are in registers
    copies = 2 * Br * D + 128 * Br  # Q_i and dO_i come, dS is stored
    return products, 2 * (S + dP + dQ + dV_dK + copies) / 128, 128 * Br / 16


print("head_dim  K_j in       products  shared memory  exponentials")
for D, Br in ((128, 64), (64, 128)):
    for left, where in ((False, "shared memory"), (True, "registers")):
        print(f"{D:8}  {where:13}" + "{:8.0f}{:15.0f}{:14.0f}".format(*clocks(D, Br, left)))

# %% [markdown] slideshow={"slide_type": "slide"}
# Shared memory is busy for nearly as long as the tensor cores. So each operand that moves to registers counts, and
# `bwd_3_hopper.cu` keeps K_j there at both head_dims.
#
# In Gluon a tensor of 16-bit numbers that goes around a loop is unpacked: ptxas moves every half of every register in
# each step, and then runs the products one after the other. A tensor of 32-bit numbers has no halves. So `load_pairs`
# carries K_j as pairs, and `out_of_pairs` names their halves just before the product.

# %% [markdown] slideshow={"slide_type": "slide"}
# ## 4. One number rounded, or two
#
# P has two uses: it is an operand in 16 bits, and dS is computed from it. In such a place the compiler rounds one number
# at a time (`F2F.BF16` in the machine code). That instruction runs on the unit of the exponentials, at its speed. Two
# numbers at a time (`F2FP.BF16`) run on the units of additions. At head_dim 64 the one-by-one rounding of P takes as
# many clocks as its exponentials, 1,024 a step, beside products of 2,560.
#
# The cure is a line of PTX, `cvt.rn.bf16x2.f32`, in `rounded`. Nothing in the Python text shows the trouble: it was
# found by counting instructions in the machine code.

# %% slideshow={"slide_type": "fragment"}
show("bwd_2_gluon", "rounded")

# %% [markdown] slideshow={"slide_type": "slide"}
# ## 5. Three consumers at head_dim 64
#
# In the forward at head_dim 64 the exponentials of a tile take as long as its products. Two warpgroups can then hide
# either behind the other only if they are exactly half a step apart. With three there is always one that multiplies.
#
# A multiprocessor has 65,536 registers. What does a thread of a consumer need for its 64 x 128 scores?

# %% slideshow={"slide_type": "fragment"}
S, P, O = 64 * 128 // 128, 64 * 128 // 128, 64 * 64 // 128  # numbers a thread
for consumers in (2, 3):
    room = min(240, (65536 - 32 * 128) // (consumers * 128) // 8 * 8)
    print(f"{consumers} consumers: {room} registers a thread; S, P and O need {S + P + O},")
    print(f"   with P in 16 bits {S + P // 2 + O}")

# %% [markdown] slideshow={"slide_type": "slide"}
# So three consumers keep P in pairs of 16 bits from one step to the next. Short sequences gain nothing, because the
# last of a head's tiles of 192 queries is mostly empty there: below 2,048 queries rung `gluon` has two consumers.

# %% [markdown] slideshow={"slide_type": "slide"}
# ## 6. What was measured
#
# Shares of FlashAttention-4's and cuDNN's speed in the backward, in one run. Losses are shown like wins.

# %% slideshow={"slide_type": "fragment"}
for peer in ("fa4", "sdpa-cudnn"):
    print(measured.shares(fresh, ["bwd_2_gluon"], peer), end="\n\n")

# %% [markdown] slideshow={"slide_type": "slide"}
# ## 7. Check yourself
#
# **Ask yourself**
#
# 1. Why does one kernel that owns keys compute five products, and two kernels seven?
# 2. Why does `deterministic=True` choose another kernel?
# 3. Which of the five products reads fewer bytes when K_j is in registers?
# 4. Why is a rounding of one number at a time slow, although it is one instruction like any other?
# 5. Why does a third consumer need P in 16 bits?
#
# <details><summary>Answers</summary>
#
# 1. S and dP are needed for dK and dV, and again for dQ. Two kernels compute them twice, one computes them once.
# 2. Its additions to dq come in any order. Rung `tma` has a kernel that owns queries and sums dQ in registers.
# 3. S^T = K_j Q_i^T. K_j is its left operand, and only a left operand may come from registers.
# 4. It runs on the unit of the exponentials, 16 a clock, and these have that unit busy already.
# 5. Three consumers have 160 registers a thread. S, P in 32 bits and O alone would need all of them.
#
# </details>
#
# **Read on:** `fwd_3_gluon.py` and `bwd_2_gluon.py` say in their heads what was tried and was slower. Triton's own
# tutorials have a series on Gluon. FlashAttention-3 (section 3) has the ideas of roles and of two products in flight.
