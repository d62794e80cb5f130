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
# # 02x. Going deeper: CUDA C++
#
# *What do compilers, rounding and the order of blocks do to the kernels of stage 02?*
#
# Each section can be read alone; its first line says what you need before. No GPU is needed.
#
# 1. Three ways to lose the registers (02a)
# 2. A multiply-add that harms a softmax (02b)
# 3. What each idea of rung `fa2` brings (02b)
# 4. Grouped heads in the backward (02c)
# 5. Bit by bit: `deterministic=True` (02c)
# 6. Where wgmma finds a number (02d): exercise 02.9, hunt 02.bug3
# 7. Registers that change hands (02d)
# 8. Persistent blocks (02d)
# 9. Where the clocks of rung 8 go (02d)
# 10. The order of dQ on Hopper (02e)
# 11. Two tricks of FlashAttention-4 (02d)
# 12. What the power limit does
# 13. What was tried, and what is open (02d, 02e)
# 14. Cooperative groups, or shuffles (02a)
#
# **Time:** about 80 minutes to read, 60 minutes more with the exercise.
# **Code:** [`steps/step02_fa2_cuda/ladder.py`](../steps/step02_fa2_cuda/ladder.py) and the kernels that it names.
# **Tests:** `pytest tests/test_step02_fa2_cuda.py`.

# %% jupyter={"source_hidden": true} slideshow={"slide_type": "skip"}
import steps  # first: it chooses the engine
import torch
from reference import error
from steps.course.figures import n02d_hopper, n02x_deeper as figures, planted
from steps.step02_fa2_cuda import calls
from steps.course.workbook import Blank, check, show
print(steps.engine.describe())

# %% [markdown] slideshow={"slide_type": "slide"}
# ## 1. Three ways to lose the registers
#
# **You need:** notebook 02a, rung 0, `scalar`: a thread keeps a row of Q and a row of O in its registers.
#
# NVRTC, NVIDIA's run-time compiler, turns CUDA C++ into **PTX**, an assembly language with as many registers as it
# likes. `ptxas` then makes machine code of one architecture and assigns the real registers, at most 255 a thread. A
# number that finds no register is **spilled**: it goes to the thread's *local memory*, which lies in device memory,
# behind the caches. Neither tool needs a GPU. For a kernel without includes the page
# [Compiler Explorer](https://godbolt.org) shows PTX and machine code beside the source.
#
# A C++ template is compiled anew for each set of its arguments: FlashAttention-2, templates on NVIDIA's CUTLASS, takes 3
# to 5 minutes on 64 cores by its own README, and two hours on one. Here sizes are macros, and a call compiles the one
# kernel that it needs.
#
# There are three ways to lose.
#
# - **Too many numbers.** q and O take 2 D registers, and addresses and counters come on top. At D = 128 that is over 255.
# - **An index that is not constant.** Registers have no addresses, so the compiler must know every index of an array
#   that it keeps in them. Hence `#pragma unroll`, which writes a loop out in full; `#pragma unroll 8` keeps a loop.
# - **A promise.** `__launch_bounds__(Br, blocks)` says how many blocks are to share a multiprocessor's 65,536
#   registers. More blocks leave fewer registers to each thread.
#
# **Predict.** Which of the three is reported as spilled bytes, and which is not?

# %% slideshow={"slide_type": "fragment"}
loop = "#pragma unroll\n"
print("as it is         ", figures.registers(D=64))
print("too many numbers ", figures.registers(D=128))
print("an index         ", figures.registers(D=64, old=loop, new="#pragma unroll 8\n"))
for blocks in (6, 7, 8, 16):
    promise = figures.registers(old="_bounds__(Br)", new=f"_bounds__(Br, {blocks})")
    print(f"{blocks:2} blocks promised", promise)

# %% [markdown] slideshow={"slide_type": "fragment"}
# The index is easily missed: the kernel has the fewest registers of all, and not a byte is *spilled*. But `stack` is the
# thread's local memory, 512 bytes: all of q and O. So look at the stack, too, not only at registers and spills.
#
# Six blocks of 64 threads can be promised, seven cannot. The stage's loader refuses a kernel that spills more than the
# header of its file allows.

# %% [markdown] slideshow={"slide_type": "slide"}
# ## 2. A multiply-add that harms a softmax
#
# **You need:** notebook 02b, the softmax of rungs 2 to 5: P = 2^(c S - m), where c = scale log₂ e and m is the largest
# c S of the row so far.
#
# A GPU has a **fused multiply-add** (FMA): it computes a b - c and rounds once, at the end. A compiler makes one of
# `c * S - m` unasked, and usually that is a gain: one instruction fewer and one rounding fewer.
#
# Here the missing rounding does harm. m is the *rounded* product c S. At the largest score the exponent should be
# exactly 0. With an FMA it is the exact product less the rounded one, which is the rounding error of m.
#
# For ordinary scores this error is tiny. But the neighbours of a float32 number of size 1.44 x 10¹¹ are 16,384 apart,
# so that the rounding error can be 8,192. Then P is infinite or 0.

# %% slideshow={"slide_type": "fragment"}
c = torch.tensor(1.4426950408889634)  # log2(e), for a scale of 1
S = torch.tensor([1.0e11, 1.1e11, 1.2e11])
m = c * S  # each is the maximum of a row of its own
exact = c.double() * S.double()
print("neighbours of m are apart by", torch.nextafter(m, m + m) - m)
print("c * S - m, rounded twice:   ", (c * S - m).tolist())
print("c * S - m, by an FMA:       ", (exact - m.double()).tolist())

# %% [markdown] slideshow={"slide_type": "fragment"}
# `__fmul_rn(scale_log2, S[n][i])` in `fwd_4_cp_async.cu` rounds the product by itself, so that the compiler may not
# fuse it. Section 3 shows its cost, as `LARGE_SCORES`. Let us plant the FMA. g++ fuses as NVRTC does, if this processor
# has an FMA; otherwise the cell shows nothing.

# %% slideshow={"slide_type": "fragment"}
fused = {"c * S - m as one FMA": ("__fmul_rn(scale_log2, S[n][i])", "scale_log2 * S[n][i]")}
cases = ["scores_200", "large_scores"]
for (_, case), (verdict,) in planted.killed("cp_async", fused, cases, [{}]).items():
    print(f"{case:13} {verdict}")

# %% [markdown] slideshow={"slide_type": "fragment"}
# Scores of 200 do not notice; only the contract's case of very large scores does. Hopper's rungs round c to a power of
# two where scores are so large: multiplying by a power of two is exact, fused or not (`exponent_factor` in `ptx.cuh`).

# %% [markdown] slideshow={"slide_type": "slide"}
# ## 3. What each idea of rung `fa2` brings
#
# **You need:** notebook 02b, rung 5, `fa2`.
#
# ### Exponentials between products
#
# Rung 5 computes the exponentials of 16 keys while `mma` works on the 16 keys before. Whether the compiler keeps this
# order is in the machine code: `HMMA` is `mma`, and `MUFU.EX2` is an exponential.

# %% slideshow={"slide_type": "fragment"}
figures.products_and_exponentials()

# %% [markdown] slideshow={"slide_type": "fragment"}
# A warp issues an `HMMA` and goes on. Only an instruction that needs the result has to wait, and the exponentials of
# the next 16 keys do not need it.
#
# ### Ideas that can be switched off
#
# - `FEW_MASKS`: only tiles at the end of the keys or on the diagonal are masked.
# - `LONGEST_FIRST`: with a causal mask the blocks of the last queries have the most keys. They start first, because a
#   long block that starts last runs alone.
# - `SECTIONS`: heads come in groups whose K and V fit into the L2 cache.
# - `LARGE_SCORES`: the product c S is rounded by itself (section 2). This one costs time and buys correctness.
#
# **Predict.** Which of the four brings nothing, and why? A plus means: the kernel is slower with the idea switched off.
#
# <details><summary>Answer</summary>
#
# `SECTIONS`: device memory is no limit here, so an L2 cache that hits more often changes nothing beyond noise. (Rung 8,
# which the limit of power slows down, is another case: section 8.) Without a causal mask `LONGEST_FIRST` is noise, too,
# since all blocks are equally long.
#
# </details>

# %% slideshow={"slide_type": "fragment"}
for switch in ("FEW_MASKS=0", "LONGEST_FIRST=0", "SECTIONS=0", "LARGE_SCORES=0"):
    figures.without(switch)

# %% [markdown] slideshow={"slide_type": "slide"}
# ## 4. Grouped heads in the backward
#
# **You need:** notebook 02c, rungs 0 and 1.
#
# With Hk < H several query heads share one head of K and V (grouped-query attention). Then dK and dV are sums over
# those query heads, too.
#
# Rung 0 copies k and v for every query head and adds up dk and dv afterwards. Rung 1 has a block for each tile of a
# *key* head, and its loop runs over all query heads of the group: no copies and no second pass.
#
# With few key heads there are few blocks, perhaps too few to fill a GPU. Then a block takes one query head after all
# (`HEADS_APART`), and the parts of dk and dv are added afterwards.

# %% slideshow={"slide_type": "fragment"}
generator = torch.Generator().manual_seed(0)
q, dout = torch.randn(2, 1, 8, 40, 32, generator=generator).bfloat16()
k, v = torch.randn(2, 1, 2, 40, 32, generator=generator).bfloat16()
out, lse = calls.forward(q, k, v, rung="fa2")
dq, dk, dv = calls.backward(dout, q, k, v, out, lse, rung="fa2")
print("dq", tuple(dq.shape), "dk", tuple(dk.shape), "dv", tuple(dv.shape))
wrong = error.failures({"dq": dq, "dk": dk, "dv": dv}, error.expected(q, k, v, dout))
print("wrong:", wrong or "none")
for Hk in (32, 8, 1):
    print(f"Hk = {Hk:2}, 4,096 keys in tiles of 128: {Hk * 4096 // 128:4} blocks")

# %% [markdown] slideshow={"slide_type": "fragment"}
# Eight key heads still make 256 blocks, about two for each of an H200's 132 multiprocessors. One key head makes 32 blocks,
# so that rung 1 takes the query heads apart.

# %% [markdown] slideshow={"slide_type": "slide"}
# ## 5. Bit by bit: `deterministic=True`
#
# **You need:** notebook 02c, rung 1: a block owns a tile of keys, and all blocks of a head add to dQ.
#
# Floating-point addition is not associative, so the last bits of dQ depend on the order in which blocks add. The cure
# is an order. Each dQ_i takes the key tiles one after the other, and a counter in device memory says whose turn it is.
#
# There is a trap. Suppose a GPU is full of blocks that wait for the turn of a block that has not started: they wait for
# ever. Nothing promises that blocks start in the order of `blockIdx.x`. So a block draws its number when it starts, and
# a block with a smaller number is always there already.

# %% slideshow={"slide_type": "fragment"}
show("bwd_1_fa2", "wait_for_turn")

# %% slideshow={"slide_type": "fragment"}
show("bwd_1_fa2", "pass_turn_on")

# %% slideshow={"slide_type": "fragment"}
show("bwd_1_fa2", "block_number")

# %% [markdown] slideshow={"slide_type": "fragment"}
# The emulation runs one block after the other in an order that we choose. We compare blocks in order with other orders,
# and count how many of 10,240 numbers get other bits. (The waiting itself cannot be seen here.)

# %% slideshow={"slide_type": "fragment"}
for deterministic in (False, True):
    print(f"deterministic={deterministic}; of dq's float32 sum, dq, dk, dv change:")
    for blocks, seed in (("reverse", 0), ("random", 1), ("random", 2)):
        print(f"    {blocks:7} {seed}", figures.changed_bits(blocks, seed, deterministic))

# %% [markdown] slideshow={"slide_type": "fragment"}
# By default about half of the float32 sums change. Rounding to 16 bits hides nearly all of it, but one number of dq
# still differs in reverse order. In turn every bit stays. dk and dv never change, since one block owns each.

# %% [markdown] slideshow={"slide_type": "slide"}
# ## 6. Where wgmma finds a number
#
# **You need:** notebook 02d, parts TMA and wgmma.
#
# A wgmma reads its operands from shared memory. A *descriptor* of 64 bits tells it where. In it are the byte where the
# operand *starts*; *stride*, how far the next 8 rows are; *leading*, how far the next slab of 64 columns is; and that
# the rows are swizzled. Addresses are stored divided by 16, so that moving on is an addition to the lowest bits.
#
# A tile lies in rows of 128 bytes, 64 numbers. For S = Q Kᵀ the sum runs along a row: the next instruction starts 32
# bytes further, *inside* a row. For P V it runs down the rows: the next instruction starts 16 rows further, and no one
# has to transpose V. How can one rule find the numbers in both?
#
# **Claim.** The swizzle is applied to the address, not to the operand: bits 4 to 6 of an address, the chunk, are XORed
# with bits 7 to 9, the row modulo 8. So it does not matter where in the pattern an operand starts. But a tile must
# start at a multiple of 1024 bytes, 8 rows, or the bits say another row than the one that TMA had in mind.

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
# ## 7. Registers that change hands
#
# **You need:** notebook 02d, rung 7: a producer that loads, and consumers that compute.
#
# At the launch all threads of a block get equally many registers. A producer needs few. `setmaxnreg.dec` gives some
# back; by `setmaxnreg.inc` consumers take more, and *wait* until enough are free. If the sum is too large, they wait for
# ever, and no compiler says so. A consumer's 128 threads share 64 rows of S and O, with P packed beside S, and each
# needs some 30 registers besides:

# %% slideshow={"slide_type": "fragment"}
for D in (64, 128, 256):
    print(figures.registers_of_the_roles(D))

# %% [markdown] slideshow={"slide_type": "fragment"}
# At D = 128 the 168 registers of the launch would not do for 160 + 30. At D = 64 a third consumer fits. Registers are
# given out in eights: what 240 and 24 leave is too little for 8 more a thread of two consumers.
#
# **A wait that is left out.** What does the compiler say, if a kernel reads S before `wgmma_wait`? The emulation refuses
# it. `ptxas` repairs it: it inserts a wait at a place of its own choice. The loader of this course takes the warning
# for an error, since the kernel is no longer the one that was written:

# %% slideshow={"slide_type": "fragment"}
print(figures.without_the_wait())

# %% [markdown] slideshow={"slide_type": "slide"}
# ## 8. Persistent blocks
#
# **You need:** notebook 02d, rung 8.
#
# A block of rung 8 takes nearly all registers of an SM, so that one runs at a time. When it ends, the next begins with
# empty stages, and the tensor cores wait. So the launch starts one block an SM, which takes tile after tile (switch
# PERSISTENT): the producers load the next tile while the consumers store this one.
#
# Now the kernel deals out tiles, and causal tiles differ in length. Which block takes which tile is fixed before the
# launch: in each round block b takes the b-th of the longest tiles that are left. **Predict:** which block ends last,
# and how busy are the others?

# %% slideshow={"slide_type": "fragment"}
def busy(lengths, reverse, sms=132):
    """The share of the time for which SMs work, until the last one ends."""
    work = [0] * sms
    for n, length in enumerate(lengths):
        block = n % sms
        work[sms - 1 - block if reverse and n // sms % 2 else block] += length
    return sum(work) / sms / max(work)


# in blocks of 128 keys: the tiles of 16 heads of 16,384 tokens
together = sorted(16 * list(range(1, 129)), reverse=True)
print(f"16 heads together, every round in the same order: busy {busy(together, False):.0%}")
print(f"every other round in reverse: {busy(together, True):.0%}")

# %% slideshow={"slide_type": "fragment"}
show("fwd_8_hopper", "tile_number")

# %% [markdown] slideshow={"slide_type": "subslide"}
# Block 0 gets the longest tile of every round, unless every other round runs in reverse.
#
# The heads whose tiles are taken together are a *section*. If it is small, more blocks read the same K and V, which then
# stay in the L2 cache. The GPU's memory is read less, and that saves power. **Predict:** how busy are the SMs if sections
# of 4 heads come one after the other?

# %% slideshow={"slide_type": "fragment"}
four = sorted(4 * list(range(1, 129)), reverse=True)
print(f"sections of 4 heads: busy {busy(4 * four, True):.0%}")
print(f"every other one shortest first: {busy(2 * (four[::-1] + four), True):.0%}")

# %% [markdown] slideshow={"slide_type": "subslide"}
# A section may end in the middle of a round. Then some blocks get its shortest tiles and the others the longest ones of
# the next section, and no later round makes up for that. So sections *alternate*: where one ends with its shortest tiles,
# the next begins with them, and lengths change slowly from round to round.
#
# That does not suit every length. So the launch counts, as `busy` does, and takes the heads that fit into the cache, or
# twice as many, if SMs are then busy for 99 % of the time. Otherwise, and below 4,096 keys, a section has half as many
# heads as there are SMs, or a quarter if D > 64, and none alternates.
#
# Where heads are short, the backward is persistent, too. It deals head by head, so that few heads are in the cache at a
# time, and ends with a section of the last heads. If a block had 5 % more than its share then, each block computes one
# tile. The hardware shares those well: it starts the next block where one has ended.
#
# A tile needs a block of keys if *one* of its rows sees it. At D = 64 a tile has 192 rows, three warpgroups. With a
# causal mask the first warpgroup sees nothing of the last block, and in the last tile a warpgroup may have no rows at
# all. With SKIP it gives such a stage back at once, and lets the next warpgroup start. At D = 128 hardly anything is skipped.
#
# **Predict:** for which N does each switch matter? + is how much slower the kernel is without it.

# %% slideshow={"slide_type": "fragment"}
for switch in ("PERSISTENT=0", "SKIP=0", "PINGPONG=0", "OVERLAP=0"):
    figures.without(switch, "fwd_8_hopper")

# %% [markdown] slideshow={"slide_type": "fragment"}
# PERSISTENT hides each tile's beginning and end. Without it the kernel is slower by 23 to 49 % at N = 512, and by 1 to
# 3 % at N = 16384. PINGPONG pays at D = 64 from N = 4096 on, where exponentials take as many clocks as products. What is
# within a percent or two is noise.

# %% [markdown] slideshow={"slide_type": "slide"}
# ## 9. Where the clocks of rung 8 go
#
# **You need:** notebook 02d, parts 2 and 5.
#
# A copy of the kernel notes the clock in each step, at D = 128, N = 4096. **Predict:** without turns, will the two
# warpgroups compute their softmax at the same time? (A bar of products ends when the group begins to wait for O.)

# %% slideshow={"slide_type": "fragment"}
figures.timelines()

# %% [markdown] slideshow={"slide_type": "subslide"}
# For less than a third of it. The tensor cores serve both groups, and whoever comes second gets its S later: they drift
# apart by themselves. So turns gain next to nothing here.
#
# The products of a step take 2,048 clocks by the datasheet. Without exponentials, or without the whole softmax, the
# kernel computes nonsense, but shows what they cost. Which costs more, the exponentials or the rest?

# %% slideshow={"slide_type": "fragment"}
for changed, clocks, _ in figures.recorded():
    print(f"{changed:27}{clocks:6.0f} clocks a step")

# %% [markdown] slideshow={"slide_type": "fragment"}
# Of the 530 clocks beyond the products 340 vanish with the exponentials and 130 with the rest of the softmax. The last
# 60 are unexplained. OVERLAP gains 9 %.

# %% [markdown] slideshow={"slide_type": "subslide"}
# ### Two waits in the wrong place, and a queue
#
# A version of rung 8 was slower than FlashAttention-3 at D = 128 with a causal mask. **Guess:** is it the order in
# which tiles are dealt out? A table of equal loads and an atomic counter changed nothing. Then the hardware's counters
# showed as many products in both kernels, and more clocks in ours. So it was the loop.
#
# Side by side, the machine code of the two loops differed in two waits. Ours waited for V in front of S, although only O
# reads V. And one line kept the wait for O behind all exponentials; it had helped an earlier version of the kernel. Now
# `ptxas` puts that wait behind some of the exponentials, and conversions to 16 bits run beside the others.
#
# A part of the gap was left. So clocks were noted where one tile follows another: the next tile's first product came late,
# because its Q was not there. One producer loaded K, V and Q in one queue, and waited for room for V while there was room
# for K and Q. With a thread for each the loop became faster, too.
#
# Then the order of tiles mattered after all, not for equal work but for the L2 cache (section 8). A trick has to be
# measured again whenever what surrounds it has changed.

# %% [markdown] slideshow={"slide_type": "slide"}
# ## 10. The order of dQ on Hopper
#
# **You need:** section 5, and notebook 02e.
#
# In `bwd_3` it takes longer to pass a turn on than in rung 1, because the additions must first arrive in the L2 cache.
# A warp that passes on its own turn has to wait for that. So one thread waits and releases for its whole block.
#
# **In which order?** With a causal mask block j of the keys has the queries i ≥ j. All blocks of a head start together.
# One order lets them wait, the other one does not:

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
# Without a mask all blocks begin with the same queries, and each runs a step behind the one before. So blocks that run at
# the same time belong to several heads. But these should have their Q, dO and dq in the L2 cache, or else the memory is
# the limit. That is the price of the second order: block j has more steps than block j + 1, so that with many tiles
# the blocks drift apart. Above 16k keys, and with grouped heads, bwd_3 therefore takes the first order, and lets them
# wait. The share of the speed in any order, on an H200:

# %% slideshow={"slide_type": "fragment"}
print(n02d_hopper.beside("bwd_3_hopper", "bwd_3_hopper:DETERMINISTIC=1", switched=True))

# %% slideshow={"slide_type": "subslide"}
show("bwd_3_hopper", "struct DqSemaphore {", until="// The n-th tile")

# %% [markdown] slideshow={"slide_type": "slide"}
# ## 11. Two tricks of FlashAttention-4
#
# **You need:** the online softmax; notebook 02d, part 1.
#
# **Conditional rescaling** ([FlashAttention-4](../papers/flash_attention_4.md), in rung 8 the switch LAZY). O and l may
# stay in the units of an old maximum, as long as 2^(S - m) cannot overflow. So O is rescaled only if m has grown by more
# than 8 in log2 in one of a warp's 16 rows. **In how many steps is that?** Scores are random here, with three standard
# deviations in log2:

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
# With ordinary scores some maximum grows in two of three steps, but never by 8. The rescaling is needed rarely, and then
# it is done.
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

# %% [markdown] slideshow={"slide_type": "slide"}
# ## 12. What the power limit does
#
# **You need:** nothing.
#
# The datasheet's TFLOP/s belong to a clock that the chip does not always hold. Near its limit of 700 W it lowers the
# clock. **Predict:** the same product, once on random normal numbers and once on zeros. Same time?

# %% slideshow={"slide_type": "fragment"}
figures.power()

# %% [markdown] slideshow={"slide_type": "fragment"}
# No. A circuit consumes much of its power when bits change, and between zeros none do. So the clock falls less, and the
# same kernel gets "faster" on data that nobody has. (The forward is an earlier version of rung 8. Why the clock falls at
# all for a product at 409 W, we do not know.) All rows of this course are of random normal numbers.
# [The table of sustained load](../steps/course/bench/results/README.md) has the clock and the energy of each kernel.

# %% [markdown] slideshow={"slide_type": "slide"}
# ## 13. What was tried, and what is open
#
# **You need:** notebooks 02d and 02e. *Slower* means: at most sizes, than the kernel as it was then.
#
# 1. **A producer warp in the backward**: no faster at D = 128, slower at D = 64. Beside K_j in registers there is no room.
# 2. **A warp that sends dQ_i**, as FlashAttention-3 has it: not tried. 02e has what the additions cost.
# 3. **80 queries a tile, and dQ_iᵀ instead of dQ_i**: wider products read less. Faster only at N = 16384, and without K_j
#    in registers.
# 4. **lse and delta read before Sᵀ is there**: slower.
# 5. **The backward's three kernels overlapped** by programmatic dependent launch: a little faster at D = 128 with few
#    queries, no faster at D = 64 or with persistent blocks. **Persistent blocks** where heads are long: no faster.
# 6. **D = 32, 96 and 256 in the backward**: still `bwd_1`.
# 7. **The forward at D = 64**: a polynomial for 1 to 6 of 16 exponentials: slower. Tiles of 128 x 160, 128 x 192, 192 x 96
#    or 192 x 112: slower. Four stages: no faster.
# 8. **The forward at D = 128**: the wait for O behind all exponentials, or in front of them, or the wait for V in front of
#    S: slower. The softmax of one row after the other: slower. 128 x 176 with one place for Q: slower. Q in registers:
#    slower. Tiles dealt out by an atomic addition or by a table of equal loads: no faster.
#
# ### Past one kernel
#
# **May the products that make Q, K and V be fused with attention?** A tile of queries can make its Q_i out of the tokens
# X_i at no extra work. But it needs K_j and V_j of *all* keys, and would make them anew out of X_j. X has `width` numbers
# a token:

# %% slideshow={"slide_type": "fragment"}
Br, Bc, D, width = 128, 128, 128, 2048
attention = 2 * 2 * Br * Bc * D  # the products Q_i K_j^T and P V_j
anew = 2 * 2 * Bc * width * D  # the products X_j W_k and X_j W_v
print(f"K_j and V_j made anew: {anew // attention} times attention's own operations")

# %% [markdown] slideshow={"slide_type": "fragment"}
# So it pays where there is a single tile of queries and a launch counts: in decoding, where K and V of one new token are
# made, once. In training we know of nobody who does it. The backward needs Q, K and V, too, so that they have to be
# written, or made once more. What is usual is one product with W_q, W_k and W_v side by side, of whose result
# attention reads its parts by strides (`qkv` in 03b, part 7).
#
# **A ring over GPUs from inside a kernel.** NVSHMEM lets a thread write to another GPU's memory and raise a flag there.
#
# **A whole network as one persistent kernel.** *Look Ma, No Bubbles!* (Hazy Research, May 2025) runs Llama-1B's forward
# so.
#
# **Blackwell.** Tensor cores are twice as fast; exponentials and shared memory are not, so that all limits of 02d and 02e
# move. FlashAttention-4 answers with accumulators in a memory of their own, and with products that two SMs share.

# %% [markdown] slideshow={"slide_type": "slide"}
# ## 14. Cooperative groups, or shuffles
#
# **You need:** notebook 02a, "Eight lanes agree".
#
# The kernels of this course include none of CUDA's headers: so g++ can compile them, too, and NVRTC needs no path. Do we
# miss something? `cg::reduce` of `cooperative_groups/reduce.h` takes the maximum of a tile of lanes. The pinned packages
# have the header, and NVRTC finds it if it is told the folder.
#
# **Predict:** is it the same as rung 1's `row_max`, or something better? Below are the instructions in PTX, without moves,
# loads and stores.

# %% slideshow={"slide_type": "fragment"}
OURS = f"""{show("fwd_1_warp", "row_max")}
extern "C" __global__ void ours(float* x) {{ x[threadIdx.x] = row_max(x[threadIdx.x]); }}
"""
GROUPS = """#include <cooperative_groups/reduce.h>
namespace cg = cooperative_groups;
template <int lanes, class T> __device__ void largest(T* x) {
  auto tile = cg::tiled_partition<lanes>(cg::this_thread_block());
  x[threadIdx.x] = cg::reduce(tile, x[threadIdx.x], cg::greater<T>());
}
extern "C" __global__ void eight_lanes(float* x) { largest<8>(x); }
extern "C" __global__ void warp(float* x) { largest<32>(x); }
extern "C" __global__ void warp_of_int(int* x) { largest<32>(x); }
"""
figures.instructions(OURS + GROUPS)

# %% [markdown] slideshow={"slide_type": "fragment"}
# The same three shuffles. `cg::reduce` also works out the mask of its eight lanes, each time (`and`, `shl`), and compares
# and selects (`setp`, `selp`) where we have one `max`. Only integers of a whole warp have an instruction of their own,
# `redux`; scores are no integers. So nothing is missed but a comfort: the group is a value with a type, and no mask has to
# be written by hand.
