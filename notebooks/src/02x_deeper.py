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
# Each section takes about ten minutes and can be read alone; its first line says what you need before. No GPU is needed.
#
# 1. Three ways to lose the registers (02a)
# 2. A multiply-add that harms a softmax (02b)
# 3. What each idea of rung `fa2` brings (02b)
# 4. Grouped heads in the backward (02c)
# 5. Bit by bit: `deterministic=True` (02c)
# 6. What turns cost, by a model (section 5)
#
# **Code:** [`steps/step02_fa2_cuda/ladder.py`](../steps/step02_fa2_cuda/ladder.py) and the kernels that it names.
# **Tests:** `pytest tests/test_step02_fa2_cuda.py`.

# %% jupyter={"source_hidden": true} slideshow={"slide_type": "skip"}
import steps  # first: it chooses the engine
import torch
from reference import error
from steps.figures import n02x_deeper as figures, planted
from steps.step02_fa2_cuda import calls
from steps.workbook import show
print(steps.engine.describe())

# %% [markdown] slideshow={"slide_type": "slide"}
# ## 1. Three ways to lose the registers
#
# **You need:** notebook 02a, rung 0, `scalar`: a thread keeps a row of Q and a row of O in its registers.
#
# NVRTC, NVIDIA's run-time compiler, turns CUDA C++ into **PTX**, an assembly language with as many registers as it
# likes. `ptxas` then makes machine code of one architecture and assigns the real registers, at most 255 a thread. A
# number that finds no register is **spilled**: it goes to the thread's *local memory*, which lies in device memory,
# behind the caches. Neither tool needs a GPU.
#
# There are three ways to lose.
#
# - **Too many numbers.** q and O take 2 D registers, addresses and counters some 70 more. At D = 128 that is over 255.
# - **An index that is not constant.** Registers have no addresses, so the compiler must know every index of an array
#   that it keeps in them. Hence `#pragma unroll`, which writes a loop out in full; `#pragma unroll 8` keeps a loop.
# - **A promise.** `__launch_bounds__(Br, blocks)` says how many blocks are to share a multiprocessor's 65,536
#   registers. More blocks leave fewer registers to each thread.
#
# **Predict.** Which of the three is reported as spilled bytes, and which is not?

# %% slideshow={"slide_type": "fragment"}
for says, change in figures.WAYS.items():
    print(f"{says:17}", figures.registers(*change))
for blocks in (6, 7, 8, 16):
    print(f"{blocks:2} blocks promised", figures.promised(blocks))

# %% [markdown] slideshow={"slide_type": "fragment"}
# The index is the treacherous one: fewest registers of all, and not a byte *spilled*. But `stack` is the thread's local
# memory, 512 bytes: all of q and O. Read the stack frame, too, whenever you read how many registers a kernel has.
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
figures.products_and_exponentials("fa2")

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
# A model of the second: each block takes the slot that is free first.

# %% slideshow={"slide_type": "fragment"}
for N, heads in ((4096, 16), (4096, 64), (16384, 16)):
    lengths = heads * [(i + 1) * 2 for i in range(N // 128)]  # in tiles of 64 keys
    ideal = sum(lengths) / (2 * figures.GPU.sms)  # two blocks on a multiprocessor
    by_head = figures.finished(lengths)
    longest_first = figures.finished(sorted(lengths)[::-1])
    print(f"N = {N:5}, {heads} heads, of the ideal time:",
          f"{by_head / ideal:.2f} head by head, {longest_first / ideal:.2f} longest first")

# %% [markdown] slideshow={"slide_type": "fragment"}
# **Predict.** Which of the four brings nothing, and why? A + says that the kernel is slower with the idea off.
#
# <details><summary>Answer</summary>
#
# `SECTIONS`: device memory is no limit here, so an L2 cache that hits more often changes nothing beyond noise. Without
# a causal mask `LONGEST_FIRST` is noise, too, since all blocks are equally long.
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
    print(figures.grouped(H=32, Hk=Hk))

# %% [markdown] slideshow={"slide_type": "fragment"}
# Eight key heads still make 256 blocks, about two for each of the 132 multiprocessors. One key head makes 32 blocks, so
# rung 1 takes the query heads apart.

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
# ## 6. What turns cost, by a model
#
# **You need:** section 5.
#
# All blocks of a head start at the same dQ_i, and have to queue. Take as a model that a step takes time 1, of which the
# turn (the additions and one product of five) takes 0.2. A multiprocessor takes the next block when it is free.

# %% slideshow={"slide_type": "fragment"}
figures.turns()

# %% slideshow={"slide_type": "fragment"}
for N in (512, 1024, 2048, 4096):
    full, causal = (figures.price_of_turns(N, causal) for causal in (False, True))
    print(f"N = {N:4}: in turn over in any order: full {full:.3f}, causal {causal:.3f}")

# %% [markdown] slideshow={"slide_type": "fragment"}
# The queue forms once; then each block runs one turn behind the block before it. That matters where blocks have few
# steps, which is where sequences are short.
#
# The model leaves out what else a turn costs: two barriers a step, and additions that must have arrived before the
# counter moves. On a GPU you can measure the whole: run `backward` of rung `fa2` with `deterministic=True` and without.
#
# **Challenge** ★★ (1 hour). Let each block start at another dQ_i, and let the turns of dQ_i begin with another tile. Try
# it in `run` of [`n02x_deeper.py`](../steps/figures/n02x_deeper.py). Which order is free of waiting? And with a causal
# mask?
