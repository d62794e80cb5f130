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
# # 03x. Going deeper: what Triton decides, and Gluon, where it no longer does
#
# *How close does a kernel in Python come to one in CUDA C++, and what is in the way?*
#
# ![Ladders of stage 03's kernels, forward and backward, beside cuDNN and FlashAttention-2, -3 and -4 on an H100: in
# both rung gluon is the highest of ours.](../notebooks/figures/ladder_triton.png)
#
# - **Before you start:** notebook 03a, for sections 13 and 14 also 03b. Sections 7 to 12 want what tensor cores,
#   warpgroups and TMA are.
# - **Time:** each section takes five minutes and can be read alone. Speeds are an H100's where nothing else is said.
# - **Code:** [`steps/step03_triton`](../steps/step03_triton/README.md), [figures](../steps/course/figures/n03x_deeper.py).
# - **Tests:** `pytest tests/test_step03_triton.py tests/test_step03_features.py`.

# %% jupyter={"source_hidden": true} slideshow={"slide_type": "skip"}
import steps  # comes first, because it chooses the engine
import itertools, math, torch  # noqa: E401
from torch.nn.attention import flex_attention as flex
from reference import attention
from steps import step03_triton as step03
from steps.course.figures import measured, n03x_deeper as figures
from steps.course.workbook import show
print(steps.engine.describe())

# %% [markdown] slideshow={"slide_type": "slide"}
# ## 1. What descriptors save
#
# Rung `fused` computes an address for each number that it loads. Rung `tma` has a *descriptor*: it says once where a
# tensor lies, and how large a **box** is, the part that one copy brings. A copy then names the **coordinates** of the
# box, which are the batch entry, the head and the first row.
#
# Both rungs are compiled here for an H100 with the same tile, 64 x 64 at D = 128, and their machine instructions are
# counted. Which groups should shrink?

# %% slideshow={"slide_type": "fragment"}
figures.descriptors()

# %% [markdown] slideshow={"slide_type": "subslide"}
# Products and exponentials are the same. What goes is two thirds of the integer work, most of the copies' instructions,
# and the registers that held pointers. Register counts belong to a compiler: these are Triton 3.7.1's.

# %% slideshow={"slide_type": "fragment"}
for kernel in ("fwd_0_fused", "fwd_1_tma"):
    print(measured.rung(kernel, gpu=measured.H100))

# %% [markdown] slideshow={"slide_type": "slide"}
# ## 2. One rounding instead of two
#
# A kernel computes P = 2^(c S - c m), and the compiler makes one *fused multiply-add* of c S - c m. It rounds once: c S
# enters exactly. But c m was computed before, and rounded. So at S = m, where the exponent should be 0, it is the
# rounding error of c m.
#
# How large can P become there? Predict for scores of 10⁸. Numbers in float64 stand for the exact product.

# %% slideshow={"slide_type": "fragment"}
c = torch.tensor(math.log2(math.e) / math.sqrt(128))
power_of_two = (c.view(torch.int32) & 0x7F800000).view(torch.float32)
for size in (1e2, 1e5, 1e8, 1e11):
    m = size * (1 + torch.rand(1000, generator=torch.Generator().manual_seed(0)))
    for name, factor in {"c": c, "power of two": power_of_two}.items():
        exponent = m.double() * factor.double() - (m * factor).double()
        P = exponent.max().exp2().float()
        print(f"m about {size:.0e}, factor {name:12}: largest P at S = m is {P:.6g}")

# %% [markdown] slideshow={"slide_type": "subslide"}
# At 10⁸ P may be 2 instead of 1. But so is all of its row, l included, and out is right. At 10¹¹ P is infinite, and out
# is NaN. So from c m = 2²⁶ on the kernels take the power of two below c, whose products are exact. The interpreter
# rounds twice, and shows nothing of this.

# %% slideshow={"slide_type": "fragment"}
show("step03_triton/fwd_0_fused", "factor_and_shift")

# %% [markdown] slideshow={"slide_type": "slide"}
# ## 3. A mask that swallows the scores
#
# Many libraries hide keys with the most negative finite number instead of -inf. In a row of nothing else it swallows
# the scores: their sum with the mask rounds to the mask, and all keys count alike. torch's SDPA returns the mean of V
# there.
#
# A kernel that stores lse = m + log l meets a second rounding. log l is lost beside m, so in the backward
# P = exp(S - lse) would add up to the number of keys:

# %% slideshow={"slide_type": "fragment"}
torch.manual_seed(0)
lowest = torch.finfo(torch.float32).min
S_row = torch.tensor([0.3, -1.2, 2.0, 0.5]) + lowest
P = (S_row - S_row.logsumexp(0)).exp()
print(f"{len(S_row.unique())} different score of 4; P adds up to {P.sum():.0f}")
q, dout = torch.randn(2, 1, 1, 3, 16).to(steps.engine.device)
k, v = torch.randn(2, 1, 1, 4, 16).to(q)
mask = torch.zeros(3, 4).to(q)
mask[1], mask[2] = lowest, -math.inf
out, lse = step03.forward(q, k, v, mask=mask)
dv = step03.backward(dout, q, k, v, out, lse, mask=mask)[2]
want = attention.backward(dout, q, k, v, mask=mask)[2]
print("rows of 0, of finfo.min and of -inf: lse", [f"{x:.3g}" for x in lse[0, 0].tolist()])
print("dv as in float64:", torch.allclose(dv.double(), want, atol=1e-5))

# %% [markdown] slideshow={"slide_type": "subslide"}
# The kernel counts such a mask as -2¹⁰¹ (`MASK_FLOOR`). In such a row it stores m · l instead of m + log l: four keys at
# -2¹⁰¹ give -2¹⁰³, or -1.01e+31. The backward divides by -2¹⁰¹ and has l. Only -inf hides a key for certain: then out is
# 0 and lse -inf.

# %% [markdown] slideshow={"slide_type": "slide"}
# ## 4. The formula under torch.compile
#
# What does `torch.compile` make of plain attention, the formula with its N x N matrix? These are rows of one run on an
# H200, bfloat16, D = 128, N = 16384. Predict before you look: is it nearer to cuDNN without or with a causal mask?

# %% slideshow={"slide_type": "fragment"}
for causal in (False, True):
    names = "compiled", "sdpa-cudnn", "fwd_1_tma"
    found = measured.of_one_run(*names, N=16384, causal=causal)
    speeds = ", ".join(f"{name} {tflops:.0f}" for name, tflops in found.items())
    print(f"causal {causal!s:5} TFLOP/s: {speeds or 'not measured as it is now'}")

# %% [markdown] slideshow={"slide_type": "subslide"}
# Its compiler, Inductor, knows the plain formula as a pattern, and calls torch's SDPA in its place. A mask by
# `masked_fill` fits no pattern. Then both products are calls of a library, and Triton gets what lies between them, a
# whole row at a time. S and P go through memory, and no tile above the diagonal is skipped. `TORCH_LOGS=output_code
# python FILE.py` shows what it writes.

# %% [markdown] slideshow={"slide_type": "slide"}
# ## 5. Roles by one argument, and their trap
#
# While a warp computes exponentials it does not multiply. Rung `roles` gives the warps of one program different work:
# `tl.range(..., warp_specialize=True)` around the loop over keys is all its text says of it. The compiler divides the
# program into **partitions**: a warp that copies K and V, and two groups of four warps that compute, with 64 rows of
# the tile each.
#
# It does so on conditions that it does not name. Descriptors must be made in the kernel, and there may be one loop
# only, so a causal mask has no place. Where can this rung not be better than `tma`?

# %% slideshow={"slide_type": "fragment"}
print(figures.shares("fwd_2_roles", "fwd_1_tma"))

# %% [markdown] slideshow={"slide_type": "subslide"}
# With a causal mask, and at D = 64, the program is not divided. Then the rung is `tma`, but every program makes its
# descriptors anew, so it is slower.
#
# Now the trap. The compiler works in steps, and each is a text that can be read. In **TTGIR**, Triton's text for GPUs,
# a line gives a name to the result of one operation: `%row = tt.make_range {start = 64, end = 128}` are the numbers
# from 64 to 127. Out of the second group's partition come the lines that add 64 to a part of the address of lse, first
# of the file as it is, then of one that computes that address as `fwd_1_tma.py` does.

# %% slideshow={"slide_type": "fragment"}
figures.roles()

# %% [markdown] slideshow={"slide_type": "subslide"}
# The second group gets its rows by adding 64 to two kinds of numbers. One is a tile of row numbers, `row`. The other is
# `i`, because `i` is a coordinate of Q's descriptor (the line is named after `Q_i`). Where an address has both in a sum,
# it moves twice: rows i + 64 to i + 127 of lse are never written. No message says so. Therefore this file keeps `i` in
# the address, where it is not moved, and `row` counts from the tile.

# %% [markdown] slideshow={"slide_type": "slide"}
# ## 6. The forward in Gluon, beside `fwd_8_hopper.cu`
#
# Triton waits for a `tl.dot` as soon as the same iteration uses its result. So no group of warps multiplies under its
# own exponentials. `fwd_3_gluon.py` is written in **Gluon**, the layer below Triton: still tiles, but you say who
# copies, when a product starts and who waits.
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
# A barrier in shared memory counts **phases**: it flips from 0 to 1 and back each time a tile has arrived, and who
# waits says for which phase. A **layout** says which thread holds which number; `convert_layout` moves numbers until
# they lie as the next operation wants them. The swizzle, a permutation of a tile in shared memory against conflicts, is
# part of a layout and not written by hand.
#
# In the listing S of tile n starts, then P V of tile n - 1, and only S is waited for. The exponentials run beside P V.
# Because K_n and V_(n-1) are used together, they are loaded as a pair: a step waits once, and releases its stage once.

# %% slideshow={"slide_type": "fragment"}
show("step03_triton/fwd_3_gluon", "step")

# %% [markdown] slideshow={"slide_type": "subslide"}
# `wait_turn` and `pass_turn` are named barriers of the hardware. Gluon has none, so a line of PTX makes them. With them
# the products of one group of warps run while another group computes its exponentials.
#
# Programs are **persistent**: there is one for each multiprocessor, which takes tile after tile, and loads the next one
# while it computes. But who has the longer tiles of a causal mask ends later. So `scheduler.py` deals every other round
# in reverse. That is not enough: 128 heads of 2,048 queries, 132 programs. For which share of the time do they work, if
# the tiles of 8, 16 or 32 heads are dealt out together? And if every other of these sections begins with its shortest
# tiles? Predict how bad the worst of the six is. The launch counts, and takes the first section with equal work.

# %% slideshow={"slide_type": "fragment"}
scheduler = step03.scheduler
for section, alternate in itertools.product((8, 16, 32), (0, 1)):
    work = scheduler.work_in_order(128, 2048, 2048, 128, 128, section, alternate)
    print(f"{section:2} heads, alternate = {alternate}: {scheduler.busy(work, 132):.2f}")
print("taken:", scheduler.order_of(128, 2048, 2048, 128, 128, 128, 132))
print(measured.rung("fwd_3_gluon", gpu=measured.H100))

# %% [markdown] slideshow={"slide_type": "subslide"}
# What `fwd_8_hopper.cu` has beyond this: K, V and Q have a producer each, the last product of a tile runs beside the
# first one of the next tile, and O is only rescaled where it must be.

# %% [markdown] slideshow={"slide_type": "slide"}
# ## 7. Five products where seven were
#
# The backward has five matrix products for each pair of tiles: S, dP, dV, dK and dQ. The rungs `fused` and `tma` run
# two kernels, one that owns keys and one that owns queries. Each of them needs S and dP for itself, so that they
# compute seven products.
#
# `bwd_2_gluon.py` is one kernel that owns keys. Its part of dQ belongs to other programs, too, so it is added to
# memory. If products were all that counts, the gain would be 7 / 5. Predict the measured gain before you run the cell.

# %% slideshow={"slide_type": "fragment"}
print("7 / 5 =", 7 / 5)
print(figures.shares("bwd_2_gluon", "bwd_1_tma"))

# %% [markdown] slideshow={"slide_type": "slide"}
# The gain is smaller. Additions to memory take time, and dq must be set to zero before and put in order after. That
# weighs most where sequences are short, because the two products that are saved are then a smaller part of the whole.
#
# The additions also come in any order, and floating-point addition is not associative. So dq differs in its last bits
# from run to run. `backward(..., deterministic=True)` takes rung `tma`'s backward instead, at its price.

# %% [markdown] slideshow={"slide_type": "slide"}
# ## 8. Beside `bwd_3_hopper.cu`, line by line
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
# ## 9. Where the clocks go
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
# Shared memory is busy for nearly as long as the tensor cores, without lse and delta, which 02e counts. So each operand
# that moves to registers counts, and `bwd_3_hopper.cu` keeps K_j there at both head_dims.
#
# In Gluon a tensor of 16-bit numbers that goes around a loop is unpacked: ptxas moves every half of every register in
# each step, and then runs the products one after the other. A tensor of 32-bit numbers has no halves. So `load_pairs`
# carries K_j as pairs, and `out_of_pairs` names their halves just before the product.

# %% [markdown] slideshow={"slide_type": "slide"}
# ## 10. One number rounded, or two
#
# P has two uses: it is an operand in 16 bits, and dS is computed from it. In such a place the compiler rounds one
# number at a time (`F2F.BF16` in the machine code). That instruction runs on the unit of the exponentials, at its
# speed. Two numbers at a time (`F2FP.BF16`) run on the units of additions. At head_dim 64 the one-by-one rounding of P
# takes as many clocks as its exponentials, 1,024 a step, beside products of 2,560.
#
# The cure is a line of PTX, `cvt.rn.bf16x2.f32`, in `rounded`. Nothing in the Python text shows the trouble: it was
# found by counting instructions in the machine code.

# %% slideshow={"slide_type": "fragment"}
show("bwd_2_gluon", "rounded")

# %% [markdown] slideshow={"slide_type": "slide"}
# ## 11. Three consumers at head_dim 64
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
# ## 12. What was measured
#
# Shares of FlashAttention-4's and cuDNN's speed in the backward, in one run. Losses are shown like wins.

# %% slideshow={"slide_type": "fragment"}
for peer in ("fa4", "sdpa-cudnn"):
    print(figures.shares("bwd_2_gluon", peer), end="\n\n")

# %% [markdown] slideshow={"slide_type": "slide"}
# ## 13. The same scores in FlexAttention
#
# torch's FlexAttention takes two functions of 03b's kind: `score_mod` changes a score, `mask_mod` hides pairs and says
# which tiles to skip. `torch.compile` makes a kernel of them. Called plainly, as here, it makes the whole matrix. Here
# both compute a soft-cap, a bias with a gradient, and a window.

# %% slideshow={"slide_type": "fragment"}
torch.manual_seed(0)
q, k, v = torch.randn(3, 1, 2, 24, 16).to(steps.engine.device)
bias = torch.randn(2, 24, 24).to(q).requires_grad_()
def score_mod(score, b, h, i, j):
    return 1.5 * torch.tanh(score / 1.5) + bias[h, i, j]
def mask_mod(b, h, i, j):
    return (j <= i) & (i - j < 10)
block_mask = flex.create_block_mask(mask_mod, None, None, 24, 24, device=q.device)
theirs = flex.flex_attention(q, k, v, score_mod, block_mask)
ours = step03.attention(q, k, v, window=(9, 0), softcap=1.5, mask=bias)
pairs = (theirs, ours), [torch.autograd.grad(x.sum(), bias)[0] for x in (theirs, ours)]
print("apart: out and dbias", [f"{(a - b).abs().max():.0e}" for a, b in pairs])

# %% [markdown] slideshow={"slide_type": "subslide"}
# FlexAttention takes any formula of the scores, but no dropout, which comes after the softmax. On a GPU it adds up the
# bias's gradient by atomics, in any order; in stage 03 each entry has one owner.

# %% [markdown] slideshow={"slide_type": "slide"}
# ## 14. A tensor that ends where a sequence ends
#
# `flash_gluon.py` gives windows and packed sequences the roles of section 6. With a window it begins and ends at other
# tiles. Packed sequences ask for more: the copy engine reads zeros beyond the end of a *tensor*, but beyond the end of a
# sequence lie the rows of the next one. Their keys can be masked. Their values cannot: P = 0 times a NaN of a neighbour
# is NaN. And a store would overwrite the neighbour's rows of out.
#
# The trick of Triton's `ragged_tma`: the descriptor has a dimension of 2³⁰ rows, in which a sequence of n rows gets the
# **last** n, so that it ends where the dimension does. Two further dimensions bring each row to its place. The rows
# of the tensor begin s numbers of 2 bytes apart. A step in the first dimension is 2³⁴ - s numbers long, and the kernel
# takes 2³⁰ of them: 2⁶⁵ bytes forward, of which an address of 64 bits keeps nothing, and 2³⁰ rows **back**. A step in
# the second is one row, and the kernel takes as many as there are up to the sequence's end. Is row r of a sequence then
# the right one?

# %% slideshow={"slide_type": "fragment"}
s, start, n = 128, 700, 300  # the sequence begins at row 700
for r in (0, 299, 300):
    first, second, row = 2**30, start + n, 2**30 - n + r
    address = 2 * (first * (2**34 - s) + second * s + row * s) % 2**64
    seen = "read" if row < 2**30 else "beyond the end: reads as zeros, is not written"
    print(f"row {r}: row {address // (2 * s)} of the tensor,", seen)

# %% [markdown] slideshow={"slide_type": "slide"}
# ## 15. Check yourself
#
# **Ask yourself**
#
# 1. Why do half of the rows of lse stay unwritten if `i` is a part of `row` in rung roles?
#    <details><summary>Answer</summary>
#
#    `i` is a coordinate of Q's descriptor, and `row` a tile of row numbers. The compiler adds 64 to both for the second
#    group.
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
#    It runs on the unit of the exponentials, 16 a clock, and these have that unit busy already.
#    </details>
# 5. Why does a third consumer need P in 16 bits?
#    <details><summary>Answer</summary>
#
#    Three consumers have 160 registers a thread. S, P in 32 bits and O alone would need all of them.
#    </details>
#
# **Read on:** `fwd_3_gluon.py` and `bwd_2_gluon.py` say in their heads what was tried and was slower. Triton's own
# tutorials have a series on Gluon. FlashAttention-3 (section 3) has the ideas of roles and of two products in flight.
