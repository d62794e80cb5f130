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
# # 03y. Going deeper: Gluon for Hopper
#
# *How close does a kernel in Python come to one in CUDA C++, and what is in the way?*
#
# - **Before you start:** notebook 03a, and what tensor cores, warpgroups and TMA are (02d). Section 7 also needs
#   packed sequences (03b). Each section can be read alone.
# - **Time:** about 60 minutes to read, eight sections. Nothing here needs a GPU. Speeds are an H100's.
# - **Code:** [`fwd_3_gluon.py`](../steps/step03_triton/fwd_3_gluon.py),
#   [`bwd_2_gluon.py`](../steps/step03_triton/bwd_2_gluon.py), and what draws,
#   [`n03y_deeper.py`](../steps/course/figures/n03y_deeper.py).
# - **Tests:** `pytest tests/test_step03_roles.py tests/test_step03_backward_roles.py tests/test_step03_flash_gluon.py`.
#
# 1. The forward in Gluon, beside `fwd_8_hopper.cu`
# 2. Five products where seven were
# 3. Beside `bwd_3_hopper.cu`, line by line
# 4. Where the clocks go
# 5. One number rounded, or two
# 6. Three consumers at head_dim 64
# 7. A tensor that ends where a sequence ends
# 8. What was tried, and what it brought

# %% jupyter={"source_hidden": true} slideshow={"slide_type": "skip"}
import steps  # comes first, because it chooses the engine
from steps import step03_triton as step03
from steps.course.figures import measured, n03y_deeper as figures
from steps.course.workbook import show
print(steps.engine.describe())

# %% [markdown] slideshow={"slide_type": "slide"}
# ## 1. The forward in Gluon, beside `fwd_8_hopper.cu`
#
# Triton waits for a `tl.dot` as soon as the same iteration uses its result. So no group of warps computes exponentials
# while its own products run. `fwd_3_gluon.py` is written in **Gluon**, the layer below Triton. A kernel in Gluon still
# computes with tiles, but it says who copies, when a product starts and who waits.
#
# | | `fwd_3_gluon.py` | `fwd_8_hopper.cu` of stage 02 |
# |---|---|---|
# | stages, barriers | `allocate_shared_memory`, `mbarrier.init` | `struct Ring`, `barrier_init` |
# | a copy | `async_load` | `Ring::load`: `tma_load` |
# | start S, O | `warpgroup_mma(..., is_async=True)` | `wgmma_fence`, `wgmma_ss`, `wgmma_commit` |
# | wait for S, not O | `warpgroup_mma_wait(1, (S,))` | `wgmma_wait<...>()` |
# | P as an operand | `convert_layout(P, DotOperandLayout(...))` | `to_operand`, `pack` |
# | roles, registers | `gl.warp_specialize([...], [4, 1], [240, 24])` | `if (threadIdx.x < 128)` |
#
# A **layout** in Gluon says which thread holds which number of a tile. (In stage 04 the word means something else:
# which tokens lie on which rank.) `convert_layout` moves numbers until they lie as the next operation wants them. A
# layout of shared memory contains the swizzle, a permutation of a tile against bank conflicts, which is not written by
# hand.
#
# **Roles.** One warp, the *producer*, loads tiles. The *consumers*, groups of four warps, compute. Tiles pass through
# two *stages* in shared memory. A barrier of a stage counts **phases**: phase 0 ends when the stage is filled for the
# first time, phase 1 when it is filled for the second time, and so on. Who waits says for which phase.

# %% slideshow={"slide_type": "fragment"}
figures.phases_and_roles()

# %% [markdown] slideshow={"slide_type": "subslide"}
# Follow consumer 0. S of tile 1 starts, and behind it P V of tile 0, which gives O. Only S is waited for. The softmax
# of tile 1 then runs beside O. K_1 and V_0 are used together, so they are loaded as a pair: a step waits once, and
# releases one stage. The listing is one such step.

# %% slideshow={"slide_type": "fragment"}
show("step03_triton/fwd_3_gluon", "step")

# %% [markdown] slideshow={"slide_type": "subslide"}
# `wait_turn` and `pass_turn` are named barriers of the hardware. Gluon has none, so a line of PTX makes them. They let
# the consumers start their products one after the other: one computes its exponentials during the products of the
# other.
#
# ### Persistent programs
#
# There is one program for each multiprocessor. It takes tile after tile, and loads the next one while it computes. With
# a causal mask tiles differ in length. `scheduler.py` sorts them from long to short, and deals every other round in
# reverse.
#
# That is not enough. Take 128 heads of 2,048 queries, and 132 programs. A *section* is 8, 16 or 32 heads whose tiles
# are sorted together. With `alternate` every other section begins with its shortest tiles. **Predict:** for which share
# of the time do the programs work in the worst of the six cases? The launch counts, and takes the first case in which
# they work for more than 95 % of the time.

# %% slideshow={"slide_type": "fragment"}
scheduler = step03.scheduler
for section in (8, 16, 32):
    for alternate in (0, 1):
        work = scheduler.work_in_order(128, 2048, 2048, 128, 128, section, alternate)
        share = scheduler.busy(work, programs=132)
        print(f"{section:2} heads, alternate = {alternate}: {share:.2f}")
print("taken:", scheduler.order_of(128, 2048, 2048, 128, 128, 128, 132))
print(measured.rung("fwd_3_gluon", gpu=measured.H100))

# %% [markdown] slideshow={"slide_type": "subslide"}
# (`fa3` is FlashAttention-3.) `fwd_8_hopper.cu` does three things more. K, V and Q have a producer each. The last
# product of a tile runs beside the first one of the next tile. And O is rescaled only where it must be.

# %% [markdown] slideshow={"slide_type": "slide"}
# ## 2. Five products where seven were
#
# The backward has five matrix products for each pair of tiles: S, dP, dV, dK and dQ. The rungs `fused` and `tma` run
# two kernels. In one a program owns a tile of keys, in the other a tile of queries. Each kernel needs S and dP for
# itself, so together they compute seven products.
#
# `bwd_2_gluon.py` is one kernel that owns keys. Several programs have a part of the same dQ_i, so they add their parts
# to memory. If products were all that counts, the gain would be 7 / 5. **Predict** the measured gain.

# %% slideshow={"slide_type": "fragment"}
print("7 / 5 =", 7 / 5)
print(figures.shares("bwd_2_gluon", "bwd_1_tma"))

# %% [markdown] slideshow={"slide_type": "slide"}
# The gain is smaller. Additions to memory take time. And dq must be set to zero before, and brought into the order of
# rows after. That weighs most where sequences are short, because the products are a smaller part of the time there.
#
# The additions also come in any order, and floating-point addition is not associative. So dq differs in its last bits
# from run to run. `backward(..., deterministic=True)` takes rung `tma`'s backward instead, at its price.

# %% [markdown] slideshow={"slide_type": "slide"}
# ## 3. Beside `bwd_3_hopper.cu`, line by line
#
# | step | `bwd_3_hopper.cu` | `bwd_2_gluon.py` |
# |---|---|---|
# | load a tile | one thread calls `tma_load` | a warp of its own: `produce` |
# | place of a number in a tile | `at`, permuted by hand | `NVMMASharedLayout` |
# | S^T, dP^T | `start_product` from wgmma's descriptors | `warpgroup_mma(..., is_async=True)` |
# | wait for all products but one | `wgmma_wait<1>` | `warpgroup_mma_wait(1, ...)` |
# | P^T as an operand | `pack`, in registers | `rounded`, then `convert_layout` |
# | meet the other warpgroup | `__syncthreads`, one a step | the compiler's: three a step |
# | add dQ_i to memory | `atomic_add_4` | a line of PTX: `red.global.add.v4.f32` |
# | K_j in registers | at both head_dims | at head_dim 64, as pairs of numbers |
# | S^T of the next tile | after this tile has ended | beside dK and the additions |
#
# Gluon decides where a number lies: it makes the layouts of products and wgmma's descriptors. It leaves to you who does
# what, when a product starts and who waits. One thing cannot be said in it: that a barrier is not needed.

# %% slideshow={"slide_type": "fragment"}
show("bwd_2_gluon", "step", "add_products")

# %% [markdown] slideshow={"slide_type": "slide"}
# ## 4. Where the clocks go
#
# A step of the backward has Br queries and 128 keys. In one clock a multiprocessor of Hopper makes 2,048 multiply-adds
# of 16 bits, reads 128 bytes of shared memory, and computes 16 exponentials. A `wgmma` instruction whose left operand
# is in shared memory reads both its tiles. With 64 x 64 results these are 4 KiB in 32 clocks, all that shared memory
# delivers.

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
# Shared memory is busy for nearly as long as the tensor cores. (lse and delta come on top; 02e counts them.) So it
# helps to keep an operand in registers, and `bwd_3_hopper.cu` keeps K_j there at both head_dims.
#
# Gluon has an obstacle. If a tensor of 16-bit numbers is kept from one step of a loop to the next, the compiler unpacks
# it: in each step every half of every register is moved, and then ptxas runs the products one after the other. A tensor
# of 32-bit numbers has no halves. So `load_pairs` keeps two numbers of K_j in one of 32 bits, and `out_of_pairs` takes
# them apart just before the product.

# %% [markdown] slideshow={"slide_type": "slide"}
# ## 5. One number rounded, or two
#
# P has two uses: it is an operand in 16 bits, and dS is computed from it. In such a place the compiler rounds one
# number at a time (`F2F.BF16` in the machine code). That instruction runs on the unit of the exponentials, at its
# speed. An instruction that rounds two numbers at a time (`F2FP.BF16`) runs on the units of additions. At head_dim 64
# the rounding one by one takes as many clocks as the exponentials, 1,024 a step. The products of a step take 2,560
# (section 4).
#
# The cure is a line of PTX in `rounded`, `cvt.rn.bf16x2.f32`. Nothing in the Python text shows the trouble. Count the
# instructions in the machine code to find it.

# %% slideshow={"slide_type": "fragment"}
show("bwd_2_gluon", "rounded")

# %% [markdown] slideshow={"slide_type": "slide"}
# ## 6. Three consumers at head_dim 64
#
# In the forward at head_dim 64 the exponentials of a tile take as long as its products. While one of two consumers has
# its exponentials, and the other its maxima and sums, nobody multiplies. With a third consumer somebody nearly always
# does. In the model of 02d, part 2:

# %% slideshow={"slide_type": "fragment"}
figures.two_or_three_consumers()

# %% [markdown] slideshow={"slide_type": "subslide"}
# But a multiprocessor has 65,536 registers for all of them. **Predict:** does a thread of a consumer have enough for
# its part of S, P and O?

# %% slideshow={"slide_type": "fragment"}
S, P, O = 64 * 128 // 128, 64 * 128 // 128, 64 * 64 // 128  # numbers a thread, of 128
for consumers in (2, 3):
    room = min(240, (65536 - 32 * 128) // (consumers * 128) // 8 * 8)
    print(f"{consumers} consumers: {room} registers a thread; S, P and O need {S + P + O},")
    print(f"   with P in 16 bits {S + P // 2 + O}")

# %% [markdown] slideshow={"slide_type": "slide"}
# Addresses and the like need registers, too. So with three consumers P is kept in pairs of 16 bits from one step to the
# next. With a causal mask short sequences gain nothing, because more of their tiles need a mask. There, below 2,048
# queries, rung `gluon` has two consumers.

# %% [markdown] slideshow={"slide_type": "slide"}
# ## 7. A tensor that ends where a sequence ends
#
# `flash_gluon.py` gives windows and packed sequences the roles of section 1. A window only changes at which tiles of
# keys a program begins and ends. Packed sequences are harder. TMA reads zeros beyond the end of a *tensor*, and writes
# nothing there. But beyond the end of a *sequence* lie the rows of the next one.
#
# - Its keys can be masked. Its values cannot: P = 0 times a NaN of a neighbour is NaN.
# - A store would overwrite the neighbour's rows of out.

# %% slideshow={"slide_type": "fragment"}
figures.ragged()

# %% [markdown] slideshow={"slide_type": "subslide"}
# **The trick** is that of Triton's `ragged_tma`. The tensor descriptor gets a dimension of 2³⁰ rows. In it a sequence
# of n rows has the **last** n, so that the dimension ends where the sequence ends. But the address of such a row is far
# too large. Two more dimensions bring it back. The rows of the tensor begin s numbers of 2 bytes apart.
#
# 1. *Back by 2³⁰ rows.* A step in the first dimension is 2³⁴ - s numbers, and the kernel asks for step 2³⁰. That adds
#    2³⁰ · (2³⁴ - s) · 2 = 2⁶⁵ - 2³⁰ · 2s bytes. An address has 64 bits, so adding 2⁶⁵ changes nothing. What is left is
#    2³⁰ rows back.
# 2. *Forward to the sequence.* A step in the second dimension is one row. The kernel asks for as many steps as there
#    are rows of the tensor up to the sequence's end.
#
# Does row r of a sequence now have the address of the right row?

# %% slideshow={"slide_type": "fragment"}
s, start, n = 128, 700, 300  # the sequence begins at row 700
for r in (0, 299, 300):
    first, second, row = 2**30, start + n, 2**30 - n + r
    address = 2 * (first * (2**34 - s) + second * s + row * s) % 2**64  # has 64 bits
    seen = "read" if row < 2**30 else "beyond the end: reads as zeros, is not written"
    print(f"row {r}: row {address // (2 * s)} of the tensor,", seen)

# %% [markdown] slideshow={"slide_type": "subslide"}
# ### The same for a backward, and dropout
#
# `flash_gluon_backward.py` is section 2's sweep with these descriptors, with windows, soft-cap and dropout. Dropout is
# the hard one: the random bytes have to be made where P already fills the registers. A call of Philox gives 16 keys of
# one query, and wgmma gives a warp 16 keys. So no call is made by two warps. A lane holds two of these keys for 16
# queries, and its warp needs 64 calls. **Predict:** how many calls does a lane make if it makes its own, and how many
# if lanes share?

# %% slideshow={"slide_type": "fragment"}
keys, queries, lanes = 16, 64, 32  # of a warp's part of S^T at head_dim 128
print("each lane its own:", queries // 4, "calls of a lane; shared:", queries // lanes)

# %% [markdown] slideshow={"slide_type": "slide"}
# Four lanes have different queries, and eight have the same. So a lane makes the calls of two queries, turns each
# call's 16 bytes into 16 bits, kept or not, and `convert_layout` brings the bits of a query to its eight lanes.

# %% slideshow={"slide_type": "fragment"}
show("step03_triton/features/flash_gluon_backward", "bytes_below", "kept")

# %% [markdown] slideshow={"slide_type": "slide"}
# ## 8. What was tried, and what it brought
#
# First the result: rung `gluon` beside the fastest libraries on an H100, in one run. Losses are shown like wins.

# %% slideshow={"slide_type": "fragment"}
figures.beside_peers()

# %% [markdown] slideshow={"slide_type": "subslide"}
# From N = 4096 on the forward has 1.08 to 1.20 of cuDNN's speed and 0.96 to 1.03 of FlashAttention-4's; the backward
# has 1.07 to 1.18 and 0.89 to 0.93.
#
# **What was kept in the forward.** These are the notes in the head of `fwd_3_gluon.py`, from H100 and H200.
#
# | idea | gain, from 4k queries on |
# |---|---|
# | several tiles a program, if all programs get equal work | 2 to 8 %; below 4k queries up to 23 % |
# | the same with a mask, if programs get unequal work | a loss of up to 14 % |
# | the consumers take turns (ping-pong) | 3 to 5 % at D = 64, about 1 % at D = 128 |
# | a consumer skips tiles of keys that its own rows do not see | 1 to 5 % at D = 64 |
# | one sum of l, at the end | 0 to 3 % |
# | K_n and V_(n-1) as a pair: one wait and one arrival a step, not two | 1 % |

# %% [markdown] slideshow={"slide_type": "subslide"}
# **What was not kept.** Of some only the direction is noted.
#
# | forward | it was |
# |---|---|
# | the wait for O after the exponentials | 2 to 5 % slower; the compiler has to be forced to it |
# | a third tile of K and V; a producer each for K, V and Q; turns by mbarriers, not named barriers | no faster |
# | O rescaled only where a maximum has grown | no faster |
#
# | backward | it was |
# |---|---|
# | no producer; dV after the barrier; two consumers of 64 keys each | slower |
# | tiles of queries from the first to the last | slower with a causal mask |
# | P rounded one by one | slower (section 5) |
# | dK before the barrier, so that a product runs there | 10 to 15 % slower at D = 128, 3 % at D = 64 |
# | dK a step later, during the exponentials, with dSᵀ from shared memory | 5 to 18 % slower |
# | several tiles of keys a program | 12 to 20 % slower at D = 128, level at D = 64; causal up to 80 % slower |
# | 64 queries a tile at D = 64 | 6 to 8 % slower |
# | both edges of a window in one loop | 3 to 9 % slower |
# | a polynomial for one exp2 of four; the last heads first, for the L2 cache; one barrier as a named one | no faster |
# | V_j in pairs in registers at D = 64 | no room: 20 words spilled a step |
# | dK still running in the next step | no room: ptxas runs all products in sequence |
#
# **Lessons.** The largest gain came from equal work for all programs, and the largest loss from unequal work. What did
# not help mostly took registers or waits where a step has none to spare. And two ideas of `fwd_8_hopper.cu`, the lazy
# rescaling and three producers, did not help here: an idea belongs to its surroundings.

# %% [markdown] slideshow={"slide_type": "slide"}
# ## 9. Check yourself
#
# **Ask yourself**
#
# 1. Stage 0 is filled for the third time. Which phase of its barrier ends, and which pair is in it?
#    <details><summary>Answer</summary>
#
#    Phase 2. Stage 0 takes every other pair: 0, 2, then 4.
#    </details>
# 2. Why does one kernel that owns keys compute five products, and two kernels seven?
#    <details><summary>Answer</summary>
#
#    S and dP are needed for dK and dV, and again for dQ. Two kernels compute them twice.
#    </details>
# 3. Which of the five products reads fewer bytes when K_j is in registers?
#    <details><summary>Answer</summary>
#
#    Sᵀ = K_j Q_iᵀ. K_j is its left operand, and only a left operand may come from registers.
#    </details>
# 4. Why is a rounding of one number at a time slow, although it is one instruction like any other?
#    <details><summary>Answer</summary>
#
#    It runs on the unit of the exponentials, which is busy already.
#    </details>
# 5. Why does a third consumer need P in 16 bits?
#    <details><summary>Answer</summary>
#
#    With three a thread has 160 registers. S, P in 32 bits and O need all of them.
#    </details>
# 6. Why is it not enough to mask the keys of the next packed sequence?
#    <details><summary>Answer</summary>
#
#    A NaN in its V survives P = 0. And a store must not reach its rows of out.
#    </details>
#
# **Read on:** `fwd_3_gluon.py` and `bwd_2_gluon.py`. Triton's own tutorials have a series on Gluon. FlashAttention-3
# (section 3) has the ideas of roles and of two products in flight.
