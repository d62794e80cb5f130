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
# # 02d. Hopper: nobody waits
#
# *An H100 or H200 copies, multiplies and computes exponentials in three different units. How does a kernel keep all
# three at work, and stay right?*
#
# ![A sketch over time, with two products a tile, S and P V, and exponentials between. Above, units take turns; below they
# run side by side.](../notebooks/figures/question_02d.png)
#
# - **Before you start:** 02b, tensor cores. Hopper is emulated here; speeds were measured on an H200.
# - **Time:** about 50 minutes to read, 60 minutes more with the exercises. To stop for today: after part 2.
# - **Code:** `fwd_6_wgmma.cu`, `fwd_7_roles.cu` and `fwd_8_hopper.cu` in `steps/step02_fa2_cuda/`.
# - **Tests:** `pytest tests/test_step02_fa2_cuda.py tests/test_emulator_hopper.py`.

# %% jupyter={"source_hidden": true} slideshow={"slide_type": "skip"}
import steps  # first: it chooses the engine
import torch
from steps.course.figures import measured, planted
from steps.course.figures import n02d_hopper as figures
from steps.course.workbook import Blank, check, show
from steps.course.workbook import hint, solution  # noqa: F401  for you, when you are stuck

print(steps.engine.describe())

# %% [markdown] slideshow={"slide_type": "slide"}
# ## 1. The problem, counted
#
# How much of the chip can 02b's last kernel, `fwd_5_fa2`, use on Hopper?
#
# Count the clocks that a tile of 128 x 128 scores takes on one multiprocessor (SM). The two products take 4 x 128 x 128
# x D FLOP on the tensor cores. Each score also needs an exponential, from the special-function units, and about four
# float32 instructions. O is rescaled, too. The rates are from NVIDIA's H100 whitepaper and CUDA C++ Programming Guide.

# %% slideshow={"slide_type": "fragment"}
TENSOR, EXP, FP32 = 4096, 16, 128  # FLOP, exponentials, instructions: a clock and SM


def tile_clocks(D, Br=128, Bc=128):
    """Clocks of tensor cores, special-function units and float32 units for a tile."""
    return 4 * Br * Bc * D // TENSOR, Br * Bc // EXP, (4 * Br * Bc + Br * D) // FP32


for D in (64, 128, 256):
    products, exp, fp32 = tile_clocks(D)
    busy = products / (products + exp + fp32)
    print(f"D = {D:3}: products {products}, exp {exp}, float32 {fp32} clocks;",
          f"in sequence, products {busy:.0%}")
print(measured.rung("fwd_5_fa2", peer="sdpa-cudnn"))

# %% [markdown] slideshow={"slide_type": "slide"}
# ## 2. The idea: start, go on, and know when
#
# At D = 128 exponentials take half as long as the products, at D = 64 just as long. If each unit waits for the others,
# the tensor cores work 55 % of the time, or 39 %. The datasheet, NVIDIA's table of the chip's peak speeds, says 989
# TFLOP/s. `fa2` reaches only 35 % of that: its `mma` reaches two thirds of the peak (02b), and its threads also copy
# tiles.
#
# On Hopper copies and products are *asynchronous*: a thread starts them and goes on. **TMA**, the *Tensor Memory
# Accelerator*, is a copy engine that fetches whole tiles. **wgmma** multiplies for a *warpgroup*, four warps.
#
# **Claim 1.** If two warpgroups take turns at the tensor cores (**ping-pong**), one's softmax can hide under the
# other's products. If both do the same at the same time (*lockstep*), each has half of a unit, and nothing hides. In a
# model, where each group has 64 of the 128 rows, so half of the clocks:

# %% slideshow={"slide_type": "fragment"}
figures.lockstep_and_ping_pong(tile_clocks)

# %% [markdown] slideshow={"slide_type": "subslide"}
# ### TMA: one thread asks for a box
#
# The host, the CPU's program, describes the tensor in a *tensor map*: where it lies, its strides, the size of a box. In
# the kernel one thread asks for a box, and names a *barrier* in shared memory, which counts the bytes that come
# (`mbarrier` in PTX, NVIDIA's assembly language). Outside the tensor it finds zeros.
#
# This kernel copies 16 rows of x (21 x 128), from row 13 on, and writes to y what it finds in shared memory. The first
# time nobody waits before reading. **Predict** what y holds each time.

# %% slideshow={"slide_type": "fragment"}
COPY = r"""#include "ptx.cuh"
extern "C" __global__ void copied(const __grid_constant__ TensorMap x, Global<T> y,
                                  int first, int waits) {
  SharedMemory smem;
  Shared<T> tile = smem.array<T>(16 * 128);
  Shared<Barrier> full = smem.array<Barrier>(1);
  if (threadIdx.x == 0) {
    barrier_init(full, 1);                    // one arrival, and the bytes expected
    barrier_init_fence();                     // the copy engine sees the barrier
    barrier_expect(full, 16 * 128 * sizeof(T));  // the arrival; so many bytes
    tma_load(tile, x, full, 0, first, 0, 0, 0);  // column, row, slab, head, batch
  }
  __syncthreads();  // the barrier exists
  if (waits) barrier_wait(full, 0);
  for (int e = threadIdx.x; e < 16 * 128; e += blockDim.x) y[e] = tile[e];
  barrier_wait(full, 0);
}"""

x, y = torch.ones(21, 128).bfloat16(), torch.empty(16, 128).bfloat16()
for waits in (0, 1):
    figures.emulate(COPY, "copied", figures.tensor_map(x, rows=16), y, 13, waits)
    print(f"waits: {bool(waits)!s:5} of {y.numel()} numbers {y.isnan().sum()} are NaN,",
          f"{(y == 1).sum()} are 1, {(y == 0).sum()} are 0")

# %% [markdown] slideshow={"slide_type": "fragment"}
# Without the wait the threads read what nobody has written yet: NaN here, anything on a GPU. With it eight rows of x
# are there, and eight of zeros. A tile lies in *slabs*: its columns 0 to 63, then 64 to 127, each swizzled as in 02b.

# %% [markdown] slideshow={"slide_type": "subslide"}
# ### How to wait: phases
#
# A barrier counts arrivals and bytes. When all have come, its **phase** ends and the next begins. Phases 0, 1, 2, 3
# have the *parities* 0, 1, 0, 1. A wait for parity p, a single bit, ends when the running phase has the other parity.
#
# **Claim 2.** A waiting thread has to tell two phases apart: the one that is running now and the one before. For that
# one bit is enough, as long as no thread is two or more phases behind. This kernel ends some phases, then waits:

# %% slideshow={"slide_type": "fragment"}
PHASES = r"""#include "ptx.cuh"
extern "C" __global__ void passes(int ended, int parity) {
  SharedMemory smem;
  Shared<Barrier> b = smem.array<Barrier>(1);
  barrier_init(b, 1);
  for (int i = 0; i < ended; i++) barrier_arrive(b);  // ends a phase
  barrier_wait(b, parity);
}"""
print(figures.phases(PHASES))

# %% [markdown] slideshow={"slide_type": "fragment"}
# At a new barrier, line 0, a wait for parity 1 goes on at once, as if a phase had ended before. Line 2 looks like line
# 0: a thread that is two phases behind is misled.

# %% [markdown] slideshow={"slide_type": "subslide"}
# ### A ring of stages
#
# One thread, the **producer**, copies tiles into a ring of **stages**, here places for a tile. The **consumers**
# compute with them. A stage has two barriers: `full` says that the bytes have come, `empty` that all consumers are
# done. A copy needs an empty stage, a use a full one. In the figure the consumer waits for each tile:

# %% slideshow={"slide_type": "fragment"}
def ring(stages, tiles=6, copy=3, use=2):
    """[(start, end)] of each tile's copy, and of its use, in clocks."""
    copies, uses = [], []
    for n in range(tiles):
        begin = max(copies[-1][1] if n else 0, uses[n - stages][1] if n >= stages else 0)
        copies.append((begin, begin + copy))
        begin = max(copies[n][1], uses[-1][1] if n else 0)
        uses.append((begin, begin + use))
    return copies, uses


ends = [ring(stages)[1][-1][1] for stages in (1, 2, 3)]
print("clocks for 6 tiles with 1, 2 and 3 stages:", *ends)
figures.ring_of_stages(*ring(2))

# %% [markdown] slideshow={"slide_type": "subslide"}
# **Exercise 02.8: place and parity.** In which stage is tile n = 0, 1, 2 ...? For which parity does the consumer wait
# on `full`, and the producer on `empty`?

# %% slideshow={"slide_type": "fragment"}
def stage_and_parity(n, stages):
    """(stage, the consumer's parity, the producer's parity) of tile n."""
    raise Blank


check("02.8", stage_and_parity)

# %% [markdown] slideshow={"slide_type": "subslide"}
# ### wgmma: one product for 128 threads
#
# An `mma` wants both operands in registers, so threads fetch them. A wgmma multiplies 64 x 16 numbers by 16 x n, and
# reads them from shared memory; the first may also come from registers, as P does. The result lies in registers, 16
# rows a warp.
#
# `wgmma_fence` says that the registers are ready. `wgmma_commit` closes a *group* of started products. `wgmma_wait<N>`
# waits until at most N groups are under way. Nobody may touch the registers of a product before it has ended.

# %% [markdown] slideshow={"slide_type": "slide"}
# ## 3. From algorithm to code
#
# FlashAttention-3's Algorithms 1 and 2; the lines are those of [our page on the paper](../papers/flash_attention_3.md).
#
# | lines | what | `roles` | `hopper` |
# |---|---|---|---|
# | 2–5 | Q_i, K_j, V_j on their way | `Ring::load`, one producer | a producer each for Q, K and V |
# | 7, 10 | S = Q_i K_jᵀ | `start_scores`, wait | `start` |
# | 13, 14 | m, l, P, alpha | `online_softmax` | same, under line 11 |
# | 11, 15 | O = alpha O + P V | `rescale`, `start_output`, wait | `start`; `rescale` later |
# | 16 | the stage is empty | `Ring::release` | same |

# %% [markdown] slideshow={"slide_type": "subslide"}
# ### Rung 6, `wgmma`: no thread fetches an operand
#
# The loop of `fa2` with the new instructions. A wait follows every start, so nothing overlaps yet.

# %% slideshow={"slide_type": "fragment"}
print(measured.rung("fwd_6_wgmma", peer="sdpa-cudnn"))
show("fwd_6_wgmma", "wgmma_fence();", until="int64_t first =")

# %% [markdown] slideshow={"slide_type": "subslide"}
# ### Rung 7, `roles`: a producer
#
# In `wgmma` all warpgroups wait for the slowest one, so that thread 0 can ask for the next tiles. In `roles` one thread
# of an additional warpgroup does nothing but load. The consumers call `get` before a product, which waits on `full`,
# and `release` after it, which arrives at `empty`. None waits for another. (A copy brings `BOX` slabs: all `SLABS` of a
# tile, or one where D is no multiple of 64.)

# %% slideshow={"slide_type": "fragment"}
print(measured.rung("fwd_7_roles", peer="sdpa-cudnn"))
show("fwd_7_roles", "__device__ void load(const", until="// The consumers: waits")

# %% [markdown] slideshow={"slide_type": "subslide"}
# ### Rung 8, `hopper`: overlap and turns
#
# *Within* a warpgroup (switch OVERLAP): two products start together: S of the next tile of keys, and P V of the tile
# before, whose P is known. The softmax of the new S then runs while O is computed. *Between* warpgroups (PINGPONG):
# `ping_pong.wait` lets one group at a time start its products, `ping_pong.pass` lets the other one start behind them.
#
# Blocks are *persistent*: each SM runs one block, which takes one tile of queries after the other. So the next tile of
# queries is loaded while the consumers finish this one.
#
# K, V and Q have a producer each, the first threads of three warps (question 4).

# %% [markdown] slideshow={"slide_type": "subslide"}
# **Exercise 02.10: the order of two waits.** In which order does a warpgroup do the nine operations of a step? Ask of
# each what it touches, and who still uses that.

# %% slideshow={"slide_type": "fragment"}
def order_of_step():
    """A list: "start S", "start O", "wait for S" (at most one group is left), "release K",
    "wait for all", "release V", "softmax", "pack P", "rescale O", each once, in your order.
    """
    raise Blank


check("02.10", order_of_step)

# %% [markdown] slideshow={"slide_type": "subslide"}
# And here is how a consumer starts its products. `beside` is false where no O is left to compute, as at the start of a
# block. Keys come from the last to the first. A later tile of queries begins beside the last O of the one before,
# unless a causal mask lets it skip keys. A *block of keys* in the comments is a tile of keys.

# %% slideshow={"slide_type": "fragment"}
print(measured.rung("fwd_8_hopper", peer="sdpa-cudnn"))
show("fwd_8_hopper", "// Starts S of one block of keys,", until="auto finish_output")

# %% [markdown] slideshow={"slide_type": "slide"}
# ## 4. Check it, then break it
#
# No line of such a kernel says *when* a copy or a product happens. In the emulation a *schedule* decides:
#
# - *copies late*: a copy happens when somebody waits for it, a product as soon as it is started;
# - *products late*: a product happens when somebody waits for it, a copy as soon as it is started;
# - *random*: the order of copies, products and threads is drawn by lot.

# %% [markdown] slideshow={"slide_type": "subslide"}
# ### Stuck
#
# The producer of `roles` waits on `empty` for the other parity (`^ 1`), in the new line (+) not. **Who waits for
# whom?**
#
# <details><summary>Answer</summary>
#
# Thread 0, the producer, waits until the consumers empty a stage that nobody has filled. They wait for its tile.
#
# </details>

# %% slideshow={"slide_type": "fragment"}
print(planted.diffs("fwd_7_roles", figures.STUCK))
print(figures.report_of(figures.STUCK))

# %% [markdown] slideshow={"slide_type": "subslide"}
# ### Wrong, and not always
#
# Five more mistakes in `roles`. **One of them gives right results in the first schedule, copies late. Which, and why?**

# %% slideshow={"slide_type": "fragment"}
print(planted.diffs("fwd_7_roles", figures.MISTAKES))

# %% [markdown] slideshow={"slide_type": "subslide"}
# <details><summary>Answer</summary>
#
# K released before its products have ended. In the first schedule a product ends as soon as it is started. With late
# products and early copies the producer overwrites a tile that is still read.
#
# </details>
#
# A kernel *lives* if all its numbers are right. *Refused* is a misuse that the emulation reports.

# %% slideshow={"slide_type": "fragment"}
print(figures.outcomes("wgmma", "hopper", "roles", mistakes=figures.MISTAKES))

# %% [markdown] slideshow={"slide_type": "subslide"}
# **Bug hunt 02.bug2.** A kernel with roles and persistent blocks, `show("02.bug2")`, is right for 64 heads of 4,096
# tokens, and never returns for 64 heads of 1,000. With one head it is always right. (An H200 gets 132 blocks, the
# emulation 4.) Write a test that only the repaired kernel passes.

# %% slideshow={"slide_type": "fragment"}
def test(forward):
    """Asserts what must hold of (out, lse) = forward(q, k, v, causal=..., scale=...)."""
    raise Blank


check("02.bug2", test)

# %% [markdown] slideshow={"slide_type": "slide"}
# ## 5. Predict, then measure
#
# In part 2's model the tensor cores work 100 % of the time at D = 128. `hopper` reaches 713 of 989 TFLOP/s, 72 %. Where
# the rest goes stands in [02y](02y_deeper.ipynb), section 4.
#
# **Predict.** With a causal mask half of the FLOP are counted, and tiles that no query sees are left out. Will TFLOP/s
# stay the same?
#
# <details><summary>Answer</summary>
#
# No, all get slower. Tiles on the diagonal are computed whole, then half masked. And a tile of queries has fewer tiles
# of keys, so that loading Q and storing O count for more.
#
# </details>
#
# FlashAttention-3's own kernel has OVERLAP and PINGPONG, too. All bars are of one run. Dashed: the datasheet's peak.

# %% slideshow={"slide_type": "fragment"}
figures.rungs_on_hopper()

# %% [markdown] slideshow={"slide_type": "slide"}
# ## 6. Summary
#
# - Exponentials need half of the products' clocks at D = 128, as many at D = 64: they must run beside them.
# - TMA and wgmma are started, and waited for. In between nobody may touch what they use.
# - Producers load, consumers compute.
#
# **Ask yourself**
#
# 1. Which line of part 1's count would a cheaper exp change, and for which D should it pay?
#    <details><summary>Answer</summary>
#
#    That of the exponentials. It pays at D = 64; at D = 128 they fit beside the products.
#    </details>
# 2. Why is one parity bit enough although a barrier goes through many phases?
#    <details><summary>Answer</summary>
#
#    No thread falls two phases behind: a stage is filled again only after its release, and released only when filled.
#    </details>
# 3. What does a third stage gain in the ring of part 2? And if a copy takes 2 clocks and a use 3?
#    <details><summary>Answer</summary>
#
#    Nothing in either case: with two stages the slower side already works without a pause.
#    </details>
# 4. What would one producer for K and V have to wait for?
#    <details><summary>Answer</summary>
#
#    For a free stage of V, before it could load the next K.
#    </details>
# 5. Why does `hopper` release K before O is there, and V after?
#    <details><summary>Answer</summary>
#
#    K is read by S, which has ended before the softmax. V is read until O is there.
#    </details>
#
# **Go further**
#
# - ★ (15 minutes) Give `ring` copies that take 2 or 4 clocks in turn. From how many stages on is nothing lost?
# - ★★ (1 hour) Give `fwd_7_roles.cu` three stages. For which D do they fit?
#
# **Read:** [FlashAttention-3](../papers/flash_attention_3.md); the PTX ISA on `mbarrier` and `wgmma`; sections 1 to 4
# of [02y_deeper.ipynb](02y_deeper.ipynb).
#
# **Next:** [02e_fa2_cuda_hopper_backward.ipynb](02e_fa2_cuda_hopper_backward.ipynb), Hopper's backward.
