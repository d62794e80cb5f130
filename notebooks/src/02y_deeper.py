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
# # 02y. Going deeper: Hopper in CUDA C++
#
# *Which ideas make rung `hopper` fast, what does each of them bring, and which ideas brought nothing?*
#
# - **Before you start:** notebooks 02d and 02e; a section's first line says which part. Each section can be read alone.
# - **Time:** about 75 minutes to read, 60 minutes more with the exercise; stop for today after section 3 or 6. Nothing here needs a GPU. Speeds are an H200's.
# - **Code:** [`fwd_8_hopper.cu`](../steps/step02_fa2_cuda/fwd_8_hopper.cu),
#   [`bwd_3_hopper.cu`](../steps/step02_fa2_cuda/bwd_3_hopper.cu), and what draws,
#   [`n02y_deeper.py`](../steps/course/figures/n02y_deeper.py).
# - **Tests:** `pytest tests/test_step02_fa2_cuda.py`.
#
# 1. Where wgmma finds a number (02d): exercise 02.9, hunt 02.bug3
# 2. Registers that change hands (02d)
# 3. Persistent blocks (02d)
# 4. Where the clocks of rung 8 go (02d)
# 5. The order of dQ on Hopper (02e)
# 6. Two tricks of FlashAttention-4 (02d)
# 7. What was tried, and what it brought (02d, 02e)
# 8. What the parts of rung 3's backward cost (02e)
# 9. Stage 02 beside FlashAttention-4 and cuDNN, at every size (02d, 02e)
# 10. Stage 02 beside FlashAttention-3, at every size (02d)

# %% jupyter={"source_hidden": true} slideshow={"slide_type": "skip"}
import steps  # first: it chooses the engine
import torch
from steps.course.figures import measured, n02d_hopper, n02e_hopper_backward
from steps.course.figures import n02y_deeper as figures
from steps.course.workbook import Blank, check, show
print(steps.engine.describe())

# %% [markdown] slideshow={"slide_type": "slide"}
# ## 1. Where wgmma finds a number
#
# **You need:** notebook 02d, parts TMA and wgmma.
#
# A wgmma reads its operands from shared memory. A *descriptor* of 64 bits tells it where. (TMA's tensor descriptor, which
# describes a tensor in device memory, is another thing of the same name.) A wgmma descriptor holds
#
# - *start*: the byte at which the operand begins,
# - *stride*: how far the next 8 rows are,
# - *leading*: how far the next slab of 64 columns is,
# - and that the rows are swizzled.
#
# Addresses are stored divided by 16. So the next instruction's descriptor is this one plus a small number.
#
# A tile lies in rows of 128 bytes, 64 numbers. For S = Q Kᵀ the sum runs along a row: the next instruction starts 32
# bytes further, *inside* a row. For P V the sum runs down the rows: the next instruction starts 16 rows further, and
# nobody has to transpose V. How can one rule find the numbers in both?
#
# **Claim.** The swizzle is applied to the address, not to the operand: bits 4 to 6 of an address, which number the 16-byte
# chunk of a row, are XORed with bits 7 to 9, which number the row modulo 8. So an operand may start anywhere in the
# pattern. But a tile must start at a multiple of 1024 bytes, which is 8 rows. Otherwise bits 7 to 9 give another row than
# TMA counted when it stored the tile.

# %% slideshow={"slide_type": "fragment"}
figures.read_by_wgmma()

# %% [markdown] slideshow={"slide_type": "subslide"}
# **Exercise 02.9: where wgmma finds a number.** From start, leading and stride to the byte of the number (k, i) of the
# second operand, 16 x N. k counts what is summed over. `check` compares with what the emulated instruction reads.

# %% slideshow={"slide_type": "fragment"}
def operand_address(start, leading, stride, k, i, runs_down):
    """The byte at which wgmma finds the number (k, i). runs_down: as for V."""
    raise Blank


check("02.9", operand_address)

# %% [markdown] slideshow={"slide_type": "subslide"}
# **Bug hunt 02.bug3.** In this rung 6, `show("02.bug3")`, lse is right, and so are the columns 0 to 63 of out. At D =
# 128 the columns from 64 on are wrong, the same in every run. At D = 64 nothing is wrong. Find the cause, and write a
# test that fails on it and passes on the stage's own forward.

# %% slideshow={"slide_type": "fragment"}
def test(forward):
    """Asserts what must hold of (out, lse) = forward(q, k, v, causal=..., scale=...)."""
    raise Blank


check("02.bug3", test)

# %% [markdown] slideshow={"slide_type": "slide"}
# ## 2. Registers that change hands
#
# **You need:** notebook 02d, rung 7: a producer that loads, and consumers that compute.
#
# At the launch all threads of a block get equally many registers. A producer needs few. It gives some back by
# `setmaxnreg.dec`. Consumers take more by `setmaxnreg.inc`, and *wait* until enough are free. If they ask for more than
# there are, they wait for ever, and no compiler says so.
#
# The 128 threads of a consumer share 64 rows of S and of O, and P in 16 bits beside S. For addresses and the like each
# thread needs some 30 registers more:

# %% slideshow={"slide_type": "fragment"}
for D in (64, 128, 256):
    print(figures.registers_of_the_roles(D))

# %% [markdown] slideshow={"slide_type": "fragment"}
# At D = 128 a consumer needs 160 + 30 registers a thread, more than the 168 of the launch. At D = 64 a third consumer fits.
# Registers are given out in steps of 8 a thread. With two consumers 1,024 of 65,536 remain, and one more step for their
# 256 threads would take 2,048.
#
# **A wait that is left out.** What does the compiler say if a kernel reads S before `wgmma_wait`? The emulation refuses
# it. `ptxas` repairs it: it inserts a wait at a place of its own choice. Then the kernel is no longer the one that was
# written, so the loader of this course treats the warning as an error:

# %% slideshow={"slide_type": "fragment"}
print(figures.without_the_wait())

# %% [markdown] slideshow={"slide_type": "slide"}
# ## 3. Persistent blocks
#
# **You need:** notebook 02d, rung 8.
#
# A block of rung 8 takes nearly all registers of an SM, so one block runs there at a time. When it ends, the next one
# begins with empty stages, and the tensor cores wait. So the launch starts one block an SM, which takes tile after tile
# (switch PERSISTENT): the producers load the next tile while the consumers store this one.
#
# Now the kernel deals out the tiles, and causal tiles differ in length. Which block takes which tile is fixed before the
# launch: the tiles are sorted from long to short and dealt out in rounds, one tile a block. **Predict:** which block ends
# last, and how busy are the others?

# %% slideshow={"slide_type": "fragment"}
def busy(lengths, reverse, sms=132):
    """The share of the time for which SMs work, until the last one ends."""
    work = [0] * sms
    for n, length in enumerate(lengths):
        round, block = divmod(n, sms)
        if reverse and round % 2:
            block = sms - 1 - block
        work[block] += length
    return sum(work) / sms / max(work)


# The tiles of 16 heads of 16,384 tokens. A tile's length is its number of blocks of 128 keys.
together = sorted(16 * list(range(1, 129)), reverse=True)
print(f"16 heads together, every round in the same order: busy {busy(together, False):.0%}")
print(f"every other round in reverse: {busy(together, True):.0%}")

# %% slideshow={"slide_type": "fragment"}
show("fwd_8_hopper", "tile_number")

# %% [markdown] slideshow={"slide_type": "subslide"}
# Block 0 gets the longest tile of every round, unless every other round runs in reverse.
#
# The heads whose tiles are sorted together are a *section*. In a small section more blocks read the same K and V at the
# same time, so that these stay in the L2 cache. The GPU's memory is read less, and that saves power. **Predict:** how busy
# are the SMs if sections of 4 heads come one after the other?

# %% slideshow={"slide_type": "fragment"}
four = sorted(4 * list(range(1, 129)), reverse=True)
print(f"sections of 4 heads: busy {busy(4 * four, True):.0%}")
print(f"every other one shortest first: {busy(2 * (four[::-1] + four), True):.0%}")

# %% [markdown] slideshow={"slide_type": "subslide"}
# A section may end in the middle of a round. Then some blocks get a short tile, the last of this section, and others a long
# one, the first of the next. No later round makes up for that. So sections *alternate*: every other section is dealt out
# from its shortest tile to its longest. Then the tiles before and after a border are equally long.
#
# That does not suit every number of heads. So the launch counts, as `busy` does. It tries sections of as many heads as fit
# into the L2 cache, then of twice as many, and takes the first with which the SMs are busy for 99 % of the time. If
# neither is, or below 4,096 keys, sections are larger (half as many heads as SMs, at D > 64 a quarter) and do not alternate.
#
# The backward is persistent, too, where heads are short, and counts in the same way. If some block would have 5 % more than
# its share, each block computes one tile. The hardware shares those well: it starts the next block where one has ended.
#
# **Rows that see nothing.** A tile of queries needs a block of keys if *one* of its rows sees a key of it. At D = 64 a tile
# has 192 rows, three warpgroups. With a causal mask the first warpgroup sees nothing of the last block of keys. And in a
# head's last tile a warpgroup may have no rows at all. With SKIP such a warpgroup gives the stage back at once, and the
# next warpgroup can start. At D = 128 hardly anything is skipped.
#
# **Predict:** for which N does each of the two switches matter?

# %% slideshow={"slide_type": "fragment"}
measured.ideas("fwd_8_hopper", "PERSISTENT", "SKIP")

# %% [markdown] slideshow={"slide_type": "fragment"}
# PERSISTENT hides each tile's beginning and end. Without it the kernel is slower by 23 to 49 % at N = 512, and by 1 to
# 3 % at N = 16384. SKIP brings 4 to 13 % at D = 64 with a causal mask. Elsewhere SKIP is within a percent or
# two, which is noise.

# %% [markdown] slideshow={"slide_type": "slide"}
# ## 4. Where the clocks of rung 8 go
#
# **You need:** notebook 02d, parts 2 and 5.
#
# A copy of the kernel notes the clock in each step, at D = 128, N = 4096. With *turns* (switch PINGPONG) the warpgroups start
# their products one after the other. **Predict:** without turns, will the two compute their softmax at the same time? (A
# bar of products ends when the group has waited for O. The product itself may have ended before.)

# %% slideshow={"slide_type": "fragment"}
figures.timelines()

# %% [markdown] slideshow={"slide_type": "subslide"}
# For less than a third of their softmax. The tensor cores serve both groups, and the group that asks second gets its S later.
# So the groups drift apart by themselves, and turns gain next to nothing here.
#
# The products of a step take 2,048 clocks by the datasheet. A kernel without exponentials, or without the whole softmax,
# computes nonsense, but its time shows what they cost. **Predict:** which cost more, the exponentials or the rest?

# %% slideshow={"slide_type": "fragment"}
for changed, clocks, _ in figures.recorded():
    print(f"{changed:27}{clocks:6.0f} clocks a step")

# %% [markdown] slideshow={"slide_type": "fragment"}
# Of the 520 clocks beyond the products 340 vanish with the exponentials and 120 with the rest of the softmax. The last
# 60 are unexplained. OVERLAP gains 10 %.
#
# **Predict:** is that so at D = 64, too, where the exponentials of a step take as many clocks as its products?

# %% slideshow={"slide_type": "fragment"}
measured.ideas("fwd_8_hopper", "OVERLAP", "PINGPONG")

# %% [markdown] slideshow={"slide_type": "fragment"}
# The two ideas change places. From N = 4096 on OVERLAP brings 10 to 14 % at D = 128, and 2 to 4 % at D = 64. PINGPONG
# brings 8 to 18 % at D = 64, and nothing at D = 128. Both put products beside the exponentials: OVERLAP those of the same
# warpgroup, PINGPONG those of another one. At D = 64 there are three warpgroups, so that another one nearly always has some.

# %% [markdown] slideshow={"slide_type": "slide"}
# ## 5. The order of dQ on Hopper
#
# **You need:** notebook 02e, and [02x](02x_deeper.ipynb), section 5: the turns.
#
# With `deterministic=True` the blocks of `bwd_3`, too, add to a dQ_i one after the other. A block may pass the turn on when
# its additions have arrived in the L2 cache. Not every warp waits for that: one thread waits for the whole block, and then
# passes the turn on.
#
# **In which order should the blocks add?** With a causal mask block j of the keys is seen by the queries i ≥ j. All blocks
# of a head start together. With one order they wait, with another one they do not:

# %% slideshow={"slide_type": "fragment"}
def waited(keys, queries):
    """Steps that blocks wait in all. keys: who adds first; queries(j): block j's way."""
    added, steps = {}, 0  # added[i]: when the last block has added to dQ_i
    for j in keys:
        now = 0
        for i in queries(j):
            steps += max(0, added.get(i, 0) - now)
            now = added[i] = max(now, added.get(i, 0)) + 1
    return steps


T = 16  # tiles of keys, and of queries
for keys, queries, words in (
    (range(T), lambda j: reversed(range(j, T)), "first keys first, from the last queries"),
    (reversed(range(T)), lambda j: range(j, T), "last keys first, from the diagonal"),
):
    print(f"{words}: {waited(keys, queries)} steps of waiting, {T * (T + 1) // 2} of work")

# %% [markdown] slideshow={"slide_type": "subslide"}
# The second order has a price. Block j has more steps than block j + 1, so with many tiles the blocks drift apart: they
# read other queries at the same time, and need more and more of the L2 cache. When it is full, the memory is the limit.
# Above 16k keys, and with grouped heads, the launch therefore takes the first order, and lets the blocks wait.
#
# Without a mask all blocks of a head begin with the same queries, and each runs one step behind the block before it. While
# blocks wait, others of a second head can run, but only as many heads as fit into the cache.
#
# The share of the speed in any order:

# %% slideshow={"slide_type": "fragment"}
print(n02d_hopper.beside("bwd_3_hopper", "bwd_3_hopper:DETERMINISTIC=1", switched=True))

# %% slideshow={"slide_type": "subslide"}
show("bwd_3_hopper", "struct DqSemaphore {", until="// The n-th tile")

# %% [markdown] slideshow={"slide_type": "slide"}
# ## 6. Two tricks of FlashAttention-4
#
# **You need:** the online softmax; notebook 02d, part 1.
#
# **Conditional rescaling** ([FlashAttention-4](../papers/flash_attention_4.md), in rung 8 the switch LAZY). O and l may
# keep an old maximum m, as long as 2^(S - m) cannot overflow. So O is rescaled only if the maximum has grown by more than 8
# in log2 in one of a warp's 16 rows. **In how many steps is that?** The scores here are random; three standard deviations,
# in log2, are tried:

# %% slideshow={"slide_type": "fragment"}
for scale in (1, 5, 20):
    S = scale * torch.randn(64, 16, 32, 128, generator=torch.Generator().manual_seed(0))
    best = S.amax(-1)  # of 64 warps, 16 rows, 32 tiles of 128 keys
    true = used = best[:, :, 0]
    grows = rescales = 0
    for j in range(1, 32):
        new = torch.maximum(true, best[:, :, j])
        grows += (new > true).any(1).float().mean() / 31
        far = (new - used > 8).any(1, keepdim=True)
        rescales += far.float().mean() / 31
        true, used = new, torch.where(far, new, used)
    print(f"deviation {scale:2}: a maximum grows in {grows:.0%} of the steps,",
          f"O is rescaled in {rescales:.0%}")

# %% [markdown] slideshow={"slide_type": "subslide"}
# With ordinary scores some maximum grows in two of three steps, but never by 8. With very large scores O is rescaled where
# it must be. On an H200 this brings 1 to 3 % at D = 128.
#
# **A polynomial for exp2.** At D = 64 exponentials take as long as products. 2^x is 2^⌊x⌋ times 2^f with f in [0, 1).
# The first factor only moves exponent bits. The second can be a polynomial: a few multiply-adds on other units. P is
# rounded to bf16 anyway. **Which degree is enough?**

# %% slideshow={"slide_type": "fragment"}
x = -16 * torch.rand(200_000, generator=torch.Generator().manual_seed(0)).double()
exact, f = x.exp2(), (x - x.floor()).float()
nodes = (torch.cos(torch.pi * (torch.arange(64) + 0.5) / 64).double() + 1) / 2  # in (0, 1)
print(f"rounding to bf16: error {((exact.bfloat16() - exact) / exact).abs().max():.1e}")
for degree in range(1, 5):
    powers = nodes[:, None] ** torch.arange(degree + 1) / nodes.exp2()[:, None]  # relative
    weights = torch.linalg.lstsq(powers, torch.ones(64, 1).double()).solution[:, 0]
    y = torch.zeros_like(f)
    for weight in weights.flip(0):
        y = y * f + weight.float()  # a multiply-add
    y = torch.ldexp(y, x.floor().int())
    other = (y.bfloat16() != exact.float().bfloat16()).float().mean()
    print(f"degree {degree}: error {((y - exact) / exact).abs().max():.1e};",
          f"{other:.2%} of P are another bf16 number")

# %% [markdown] slideshow={"slide_type": "fragment"}
# At degree 3, which FlashAttention-4 takes, less than one P in a hundred becomes another number. But rung 8 became
# slower with it: on Hopper it adds more instructions than it saves.
#
# **Why Blackwell needs both.** Its tensor cores are twice as fast as Hopper's. Its exponentials and its shared memory are
# not, so that all limits of 02d and 02e move. FlashAttention-4 also has its accumulators in a memory of their own, and
# products that two SMs share.

# %% [markdown] slideshow={"slide_type": "slide"}
# ## 7. What was tried, and what it brought
#
# **You need:** notebooks 02d and 02e.
#
# **What was kept.** Each idea of rung 8 is a switch. `WIDE_STORES` stores a row in pieces of 16 bytes instead of 4.
# `LARGE_SCORES` is the rounding of [02x](02x_deeper.ipynb), section 2. What is within a percent or two is noise.

# %% slideshow={"slide_type": "fragment"}
ideas = "PERSISTENT", "OVERLAP", "PINGPONG", "SKIP", "LAZY", "WIDE_STORES", "LARGE_SCORES"
measured.ideas("fwd_8_hopper", *ideas)

# %% [markdown] slideshow={"slide_type": "subslide"}
# **What was not kept,** beside the kernel of that day on an H200. Of these versions no rows are kept, so the table has no
# numbers. *Slower* means: at most sizes.
#
# | forward | D | it was |
# |---|---|---|
# | tiles of 128 x 160, 128 x 192, 192 x 96 or 192 x 112 | 64 | slower |
# | a polynomial for 1 to 6 of 16 exponentials | 64 | slower |
# | four stages | 64 | no faster |
# | a tile of 128 x 176, with room for one tile of Q | 128 | slower |
# | Q in registers | 128 | slower |
# | softmax of one row after the other | 128 | slower |
# | the wait for V in front of S | 128 | slower |
# | the wait for O in front of all exponentials, or behind them | 128 | slower |
# | one producer for K, V and Q, not three | 128 | slower |
# | tiles dealt out by an atomic addition, or by a table of equal loads | 128, causal | no faster |
#
# | backward | D | it was |
# |---|---|---|
# | a producer warp | 128 | no faster |
# | | 64 | slower: beside K_j in registers it has no room |
# | 80 queries a tile, and dQ_iᵀ instead of dQ_i | 128 | faster at N = 16384 alone, and without K_j in registers |
# | lse and delta read before Sᵀ is there | both | slower |
# | the three kernels overlapped (programmatic dependent launch) | 128 | a little faster with few queries |
# | | 64 | no faster |
# | persistent blocks where heads are long | both | no faster |
# | a polynomial for one exponential of four | 64 | slower |
# | for one of eight | 64 | a little faster |

# %% [markdown] slideshow={"slide_type": "subslide"}
# **Three lessons.**
#
# - *Find the part that is slow before you mend one.* A version of rung 8 was behind FlashAttention-3 with a causal mask, and
#   the order of tiles was suspected. Equal loads changed nothing. Then the hardware's counters showed equally many products
#   in both kernels, and more clocks in ours. So the loop was slow. In its machine code two waits stood in the wrong place.
# - *Note the clock where one thing ends and the next begins.* A part of the gap was left, and it was not in the loop. The
#   first product of a tile came late, because Q was not there: one producer loaded K, V and Q in one queue, and waited
#   for room for V while there was room for Q.
# - *Measure an idea again when its surroundings have changed.* The wait for O behind all exponentials had helped an earlier
#   version. And at last the order of tiles did matter, for the L2 cache instead of equal loads (section 3).
#
# **Open.** A warp that sends dQ_i to memory, as FlashAttention-3 has it (02e says what the additions cost). A backward with
# wgmma for D = 32, 96 and 256, which still take `bwd_1`.

# %% [markdown] slideshow={"slide_type": "slide"}
# ## 8. What the parts of rung 3's backward cost
#
# **You need:** notebook 02e.
#
# Which part of `bwd_3` costs most? On an H200 a copy of it was timed without some of its parts. What comes out is wrong
# then, but it shows what a part costs. Read this table alone: it is of another run than the table of rungs, where the
# whole kernel reached 630 TFLOP/s at D = 128. **Predict** which part costs most at D = 128, and which at D = 64.
#
# <details><summary>Answer</summary>
#
# At D = 128 the additions to dq, 2.2 %, and delta as much. The exponentials cost nothing there, because dPᵀ is computed meanwhile. At D = 64
# the exponentials cost most, and then delta. Without all four parts the kernel of D = 128 has nine tenths of the speed of
# a matrix product.
#
# </details>

# %% slideshow={"slide_type": "fragment"}
print(n02e_hopper_backward.parts_left_out())

# %% [markdown] slideshow={"slide_type": "subslide"}
# ### Buffers, and blocks that go on
#
# Three things in `bwd_3` are about the beginning and the end of a block.
#
# - A block with few steps should not wait for its second tile of queries. So up to 1,024 queries (2,048 at D = 64) there
#   is a third buffer for Q_i and dO_i.
# - A new block waits for its first tiles. So with few queries blocks are *persistent*: while a block computes one tile of
#   keys, the next keys and their first queries come. Before the launch the host counts how much work each block would
#   get. If it is not nearly equal, each block computes one tile of keys (section 3).
# - With a causal mask the first keys have the most queries. Their blocks start first, up to 8,192 keys in eight heads at
#   a time. So the last blocks of all are short, and no multiprocessor works long after the others.

# %% [markdown] slideshow={"slide_type": "slide"}
# ## 9. Stage 02 beside FlashAttention-4 and cuDNN, at every size
#
# **You need:** notebooks 02d and 02e.
#
# FlashAttention-4 (`fa4`) has a kernel of its own for Hopper. The tables have our share of a peer's speed in the same
# run: above 1 we are faster. **Where are we behind?**
#
# <details><summary>Answer</summary>
#
# Beside FlashAttention-4, from N = 4096 on: nowhere by more than 2 %. There both have 0.98 to 1.09 of its speed (in a
# second of calls without a pause, at N = 16384, 1.00 to 1.03). At smaller N our forward leads by up to 40 %, and our
# backward has 0.99 to 1.10 of its speed. Beside cuDNN we are behind once. In one forward at N = 512 we have 0.98 of
# cuDNN's speed.
#
# </details>

# %% slideshow={"slide_type": "fragment"}
for other in ("fa4", "sdpa-cudnn"):
    print(n02d_hopper.beside(other, "fwd_8_hopper", "bwd_3_hopper"))

# %% [markdown] slideshow={"slide_type": "slide"}
# ## 10. Stage 02 beside FlashAttention-3, at every size
#
# **You need:** notebooks 02d and 02e.
#
# `fa3` is FlashAttention-3's own kernel. The table has our share of its speed in the same run: above 1 we are faster.
# For its backward we have a package that is right only with the causal mask.
# **Predict:** at which head_dim and mask is `fwd_8_hopper` nearest to it?
#
# <details><summary>Answer</summary>
#
# At D = 128 with a causal mask. We are level with it there from N = 1024 on, where `hopper` has 0.99 to 1.01 of its speed.
# Without a mask `hopper` has 1.01 to 1.08 of it, and at D = 64 1.02 to 1.25. Two switches of `hopper` at D = 128, N = 4096:
# `hopper` without turns has 1.00 to 1.01 of its speed, and without OVERLAP 0.89 to 0.91. The backward has 1.04 to 1.08 of
# FlashAttention-3's speed (causal, D = 128).
#
# </details>

# %% slideshow={"slide_type": "fragment"}
print(n02d_hopper.beside("fa3", "fwd_7_roles", "fwd_8_hopper", "bwd_3_hopper"))
