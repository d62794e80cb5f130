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
# # 02x. Going deeper: compiler, memory and the order of blocks
#
# *What do compilers, rounding and the order of blocks do to the kernels of stage 02?*
#
# - **Before you start:** what a section's first line says. Each section can be read alone.
# - **Time:** about 65 minutes to read, eight sections. Nothing here needs a GPU.
# - **Code:** [`ladder.py`](../steps/step02_fa2_cuda/ladder.py) and the kernels that it names; what compiles and counts,
#   [`n02x_deeper.py`](../steps/course/figures/n02x_deeper.py).
# - **Tests:** `pytest tests/test_step02_fa2_cuda.py`.
#
# 1. Three ways to lose the registers (02a)
# 2. A multiply-add that harms a softmax (02b)
# 3. What each idea of rung `fa2` brings (02b)
# 4. Grouped heads in the backward (02c)
# 5. Bit by bit: `deterministic=True` (02c)
# 6. Cooperative groups, or shuffles (02a)
# 7. What the power limit does
# 8. Past one kernel
#
# Hopper's kernels have a notebook of their own, [02y_deeper.ipynb](02y_deeper.ipynb).

# %% jupyter={"source_hidden": true} slideshow={"slide_type": "skip"}
import steps  # first: it chooses the engine
import torch
from reference import error
from steps.course.figures import measured, n02x_deeper as figures
from steps.step02_fa2_cuda import calls
from steps.course.workbook import show
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
# **Predict.** Of the three ways, which is reported as spilled bytes, and which is not?

# %% slideshow={"slide_type": "fragment"}
figures.lost_registers()

# %% [markdown] slideshow={"slide_type": "fragment"}
# The index is easily missed. That kernel has few registers, and not a byte is *spilled*. But `stack` is the thread's local
# memory: its 512 bytes are all of q and O. So look at the stack, too, not only at registers and spills.
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
# exactly 0. With an FMA it is the exact product minus the rounded one, which is the rounding error of m.
#
# For ordinary scores this error is tiny. But two neighbouring float32 numbers near 1.44 x 10¹¹ are 16,384 apart, so that
# the rounding error can be 8,192. Then P is infinite or 0.

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
# fuse it. Section 3 shows its cost, as `LARGE_SCORES`. The next cell plants the FMA. g++ fuses as NVRTC does if
# this processor has an FMA; on a processor without one no case sees the mistake.

# %% slideshow={"slide_type": "fragment"}
figures.plant_the_fma()

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
# Rung 5 computes the exponentials of 16 keys while `mma` works on the 16 keys before. The machine code tells whether the
# compiler keeps this order: `HMMA` is `mma`, and `MUFU.EX2` is an exponential.

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
# A percent or two is noise.
#
# <details><summary>Answer</summary>
#
# `SECTIONS`. The speed of device memory does not limit this rung, so it does not matter how often the L2 cache is hit.
# (Rung 8 is limited by power, and there it matters: [02y](02y_deeper.ipynb), section 3.) Without a causal mask
# `LONGEST_FIRST` brings nothing either, since all blocks are equally long.
#
# </details>

# %% slideshow={"slide_type": "fragment"}
measured.ideas("fwd_5_fa2", "FEW_MASKS", "LONGEST_FIRST", "SECTIONS", "LARGE_SCORES")

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
# With few key heads there are few blocks, perhaps too few to fill a GPU. Then rung 1, too, gives each query head blocks of
# its own (`HEADS_APART`), and adds up their dk and dv afterwards.

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
# Eight key heads still make 256 blocks, about two for each of an H200's 132 multiprocessors. One key head makes 32 blocks:
# three of four multiprocessors would have none, so there rung 1 gives each query head its own.

# %% [markdown] slideshow={"slide_type": "slide"}
# ## 5. Bit by bit: `deterministic=True`
#
# **You need:** notebook 02c, rung 1: a block owns a tile of keys, and all blocks of a head add to dQ.
#
# Floating-point addition is not associative, so the last bits of dQ depend on the order in which blocks add. The cure
# is an order. Each dQ_i takes the key tiles one after the other, and a counter in device memory says whose turn it is.
#
# There is a trap. Suppose that all blocks on the GPU wait for the turn of a block that has not started. It cannot start
# before one of them ends, so they wait for ever. Nothing promises that blocks start in the order of `blockIdx.x`.
# Therefore a block draws its number when it starts: a block with a smaller number has then started, too.

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
# still differs in reverse order. If the blocks take turns, every bit stays. dk and dv never change, since one block owns
# each of their tiles.

# %% [markdown] slideshow={"slide_type": "slide"}
# ## 6. Cooperative groups, or shuffles
#
# **You need:** notebook 02a, "Eight lanes agree".
#
# The kernels of this course include none of CUDA's headers. So g++ can compile them, too, and NVRTC needs no path. Is
# something lost by that? `cg::reduce` of `cooperative_groups/reduce.h` takes the maximum of a tile of lanes. The pinned
# packages have the header, and NVRTC finds it if it is told the folder.
#
# **Predict:** does it become the same instructions as rung 1's `row_max`, or better ones? The cell prints them as PTX,
# without moves, loads and stores; `ours` is `row_max`.

# %% slideshow={"slide_type": "fragment"}
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
figures.instructions(GROUPS)

# %% [markdown] slideshow={"slide_type": "fragment"}
# The same three shuffles. `cg::reduce` also works out the mask of its eight lanes, each time (`and`, `shl`), and compares
# and selects (`setp`, `selp`) where we have one `max`. Only integers of a whole warp have an instruction of their own,
# `redux`; scores are no integers. So only a comfort is lost: a group is a value with a type, and nobody has to write a mask
# by hand.
# %% [markdown] slideshow={"slide_type": "slide"}
# ## 7. What the power limit does
#
# **You need:** nothing.
#
# The datasheet's TFLOP/s belong to a clock that the chip does not always hold. Near its limit of 700 W it lowers the
# clock. **Predict:** the same product, once on random normal numbers and once on zeros. Same time?

# %% slideshow={"slide_type": "fragment"}
figures.power()

# %% [markdown] slideshow={"slide_type": "fragment"}
# No. A circuit consumes much of its power when bits change, and between zeros none do. So on zeros the clock falls less,
# and the same kernel gets "faster" on data that nobody has. (The forward is an earlier version of rung 8. Why the clock
# falls at all for a product at 409 W, we do not know.) All rows of this course are of random normal numbers.
# [The table of sustained load](../steps/course/bench/results/README.md) has the clock and the energy of each kernel.

# %% [markdown] slideshow={"slide_type": "slide"}
# ## 8. Past one kernel
#
# **You need:** nothing.
#
# **May the products that make Q, K and V be fused with attention?** A kernel that owns a tile of queries can make its Q_i
# out of the tokens X_i at no extra work. But it needs K_j and V_j of *all* keys, and every tile of queries would make them
# anew out of X_j. X has `width` numbers a token:

# %% slideshow={"slide_type": "fragment"}
Br, Bc, D, width = 128, 128, 128, 2048
attention = 2 * 2 * Br * Bc * D  # the products Q_i K_j^T and P V_j
anew = 2 * 2 * Bc * width * D  # the products X_j W_k and X_j W_v
print(f"K_j and V_j made anew: {anew // attention} times attention's own operations")

# %% [markdown] slideshow={"slide_type": "fragment"}
# So it pays where there is a single tile of queries and a launch counts. That is decoding, where K and V of one new token
# are made once. In training we know of nobody who does it: the backward needs Q, K and V, too, so that they have to be
# written, or made once more. What is usual is one product with W_q, W_k and W_v side by side, of whose result attention
# reads its parts by strides (`qkv` in 03b, part 7).
#
# Two more ways past one kernel:
#
# - **A ring over GPUs from inside a kernel.** NVSHMEM lets a thread write to another GPU's memory and raise a flag there.
# - **A whole network as one persistent kernel.** *Look Ma, No Bubbles!* (Hazy Research, May 2025) runs Llama-1B's forward
#   so.
