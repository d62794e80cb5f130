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
# ![Three patches of scores, one step along d. Scalar: one number is fetched from shared memory for one multiply-add.
# Warp: twelve for 32. Mma: eight for 128, with the queries in registers.](../notebooks/figures/question_02b.png)
#
# - **Before you start:** notebook 02a: the scalar kernel, warps and lanes, the emulation. No GPU: speeds are recorded.
# - **Time:** about 45 minutes to read, 120 minutes more with the exercises.
# - **Code:** [`fwd_2_mma.cu`](../steps/step02_fa2_cuda/fwd_2_mma.cu) to
#   [`fwd_5_fa2.cu`](../steps/step02_fa2_cuda/fwd_5_fa2.cu). **Tests:** `pytest tests/test_step02_fa2_cuda.py`.

# %% jupyter={"source_hidden": true} slideshow={"slide_type": "skip"}
import steps  # first: it chooses the engine
import torch
from steps.course.bench import cost
from steps.course.figures import measured, n02b_tensor_cores as figures, planted
from steps.course.workbook import Blank, check, exercises, hint, show, solution  # noqa: F401
gpu = cost.GPUS["NVIDIA H200"]
print(steps.engine.describe())

# %% [markdown] slideshow={"slide_type": "slide"}
# ## 1. The problem, counted
#
# A kernel that keeps its tiles on the chip hardly waits for device memory: a number from there serves additions and
# multiplications (FLOP) in proportion to N. But its inner loop reads **shared memory**.
#
# Shared memory gives each multiprocessor one **wavefront** a cycle: a 4-byte word from each of its 32 banks. In a cycle
# the tensor cores do 4096 FLOP (NVIDIA's Hopper whitepaper). The emulation counts wavefronts.

# %% slideshow={"slide_type": "fragment"}
wavefronts = gpu.half_tflops / 4096  # of all multiprocessors, 10^12 a second
for units, peak in (("float32 units", gpu.fp32_tflops), ("tensor cores", gpu.half_tflops)):
    print(f"{units}: {peak} TFLOP/s need {peak / wavefronts:.0f} FLOP a wavefront")
figures.ceiling("scalar")

# %% [markdown] slideshow={"slide_type": "fragment"}
# In `scalar` one feeds 62 FLOP. Times the wavefronts a second, that is its **ceiling**, 15 TFLOP/s: less than a quarter of
# the float32 units' peak. It was measured at 17.5, *above* its ceiling, because the emulation counts word by word, while
# the compiler joins four words into one load. From rung 2 on the kernels ask for wide loads themselves.
#
# **Predict 1.** In rung 1, `warp`, a lane fetches 4 + 8 numbers for 32 multiply-adds. What does its wavefront feed?
#
# <details><summary>Answer</summary>
#
# Three times as many, 195.
#
# </details>

# %% slideshow={"slide_type": "fragment"}
figures.ceiling("warp")

# %% [markdown] slideshow={"slide_type": "slide"}
# ## 2. The idea: a warp holds a matrix
#
# The instruction `mma.m16n8k16` multiplies A (16 x 16) with B (16 x 8) and adds the product to C (16 x 8), for a whole
# warp. The matrices lie in the registers of its lanes. A lane's share is a **fragment**: 8 numbers of A, 4 of B, 4 of C.
#
# **Claim.** Two C fragments side by side are an A fragment. So S = Q Kᵀ, in registers, becomes the operand of P V where it
# lies.
#
# This kernel loads X as A and as B, and multiplies it by the identity, so that C holds X, too. The numbers of X name their
# place: 16 times the row, plus the column.

# %% slideshow={"slide_type": "fragment"}
WHO = """
extern "C" __global__ void who_holds_what(
    Global<const T> x, Global<const T> one, Global<uint32_t> pairs, Global<float> sums) {
  SharedMemory smem;
  Shared<T> X = smem.array<T>(256), I = smem.array<T>(256);
  load_tile(X, x, 16, 16, 16);
  load_tile(I, one, 16, 16, 16);
  __syncthreads();
  int t = threadIdx.x;
  uint32_t A[1][4];  // a register holds a pair of 16-bit numbers
  load_Q(A, X);
  for (int i = 0; i < 4; i++) pairs[6 * t + i] = A[0][i];
  Shared<T> B = X + (t / 4 * 16 + t % 4 * 2);  // as `scores` does it
  for (int i = 0; i < 2; i++) pairs[6 * t + 4 + i] = load_pair(B + 8 * i);
  float S[2][4];
  scores(S, A, I);  // X times the identity, by mma: two C fragments
  for (int i = 0; i < 8; i++) sums[8 * t + i] = S[i / 4][i % 4];
}"""
X = torch.arange(256.0).view(16, 16).bfloat16()
pairs, S = torch.zeros(32, 6).int(), torch.zeros(32, 8)
launch = dict(grid=1, block=32, shared_bytes=1024, T="bf16", D=16, Br=16, Bc=16)
arguments = [X, torch.eye(16).bfloat16(), pairs, S]
planted.emulated(show("fwd_2_mma") + WHO, "who_holds_what", arguments, **launch)
A, B = pairs.view(torch.bfloat16).split((8, 4), 1)
for name, fragment in (("A", A), ("B", B), ("two C", S)):
    print(f"lane 5 holds of {name:5}:", *(f"{n:3.0f}" for n in fragment[5].tolist()))
print("two C fragments of S are the A fragment:", torch.equal(A.float(), S))

# %% slideshow={"slide_type": "fragment"}
figures.fragments(A, B)

# %% [markdown] slideshow={"slide_type": "fragment"}
# A colour is a pair, in one register. Lane 5 holds 18 and 19 (row 1, columns 2 and 3), 146 and 147 (row 9), and the pairs
# 8 columns to the right. After exp it rounds its pairs and has its share of P: **no number moves to another lane**. Only
# the maximum of a row, which lies in four neighbouring lanes, needs two shuffles.

# %% [markdown] slideshow={"slide_type": "slide"}
# ## 3. From algorithm to code
#
# All rungs compute FlashAttention-2's Algorithm 1 (without [the misprint of line 10](../papers/errata.md)).
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
# **Predict 2.** The tensor cores are 15 times as fast as the float32 units. Will rung 2 be 15 times as fast as rung 1?
#
# <details><summary>Answer</summary>
#
# No. `scores` needs 8 wavefronts for each access, where 1 would do. So a wavefront feeds 248 FLOP, only 1.27 times rung
# 1's 195. The tensor cores wait for shared memory.
#
# </details>

# %% slideshow={"slide_type": "fragment"}
figures.ceiling("mma")
print(measured.rung("fwd_2_mma", D=64))
show("fwd_2_mma", "scores")

# %% [markdown] slideshow={"slide_type": "slide"}
# ### Rung 3, `ldmatrix`: no two rows in one bank
#
# Why 8 wavefronts? A warp reads 8 rows of K at once. Rows of 128 or 256 bytes all begin in the same bank, which gives one
# word a cycle: a **bank conflict**.
#
# **Claim.** Let row r keep its 16-byte chunk c at position c XOR (r mod 8), a **swizzle**. Then any 8 neighbouring rows
# have it at 8 different positions, and 8 positions are all 32 banks.
#
# `ldmatrix` fetches four matrices of 8 rows of one chunk, and deals them out as fragments; with `.trans` transposed, as V
# wants it. First without the swizzle, which gains nothing: an access, 32 rows, takes 32 wavefronts.

# %% slideshow={"slide_type": "fragment"}
figures.banks()

# %% [markdown] slideshow={"slide_type": "subslide"}
# **Predict 3.** The ceiling rises from 60 to 396 TFLOP/s, 6.6 times. Will the speed?
#
# <details><summary>Answer</summary>
#
# Less: four times. No count tells of waiting, and all warps of a block wait for each K_j and V_j.
#
# </details>

# %% slideshow={"slide_type": "fragment"}
figures.ceiling("ldmatrix")
print(measured.rung("fwd_3_ldmatrix"))

# %% [markdown] slideshow={"slide_type": "subslide"}
# **Exercise 02.4: where a chunk goes.** A tile of `rows` rows lies in **slabs** of W columns, one slab after the other. W is
# 64, or 32 where D is no multiple of 64; then two rows share the banks. Return where the element (row, column) lies,
# counted in elements. Of eight rows, 8 n to 8 n + 7, a chunk must have 8 different positions. `check` also counts
# wavefronts; `hint("02.4")` and `solution("02.4")` help.

# %% slideshow={"slide_type": "fragment"}
at = r"""
__device__ int at(int rows, int row, int column) {
#error Blank 02.4
}"""

check("02.4", at)

# %% [markdown] slideshow={"slide_type": "slide"}
# ### Rung 4, `cp_async`: the next tile travels meanwhile
#
# **Claim.** K_j is needed in S, V_j in P V; while one is used the other can come. `load_tile` now starts copies from device
# to shared memory, and the thread goes on. `cp_async_wait<0>` waits for the thread's *own* copies; only the barrier after
# it says that all threads' copies are there.
#
# **Predict 4.** Its wavefronts are exactly rung 3's. How much can rung 4 gain?
#
# <details><summary>Answer</summary>
#
# At most the time that rung 3 waits for tiles. It became 1.36 times as fast, so this was at least 1 - 1/1.36 = 26%.
#
# </details>

# %% slideshow={"slide_type": "fragment"}
print(measured.rung("fwd_4_cp_async"))
show("fwd_4_cp_async", "  for (int j = 0; j < keys", until="  int64_t row = int64_t")

# %% [markdown] slideshow={"slide_type": "slide"}
# ### Rung 5, `fa2`: 32 rows a warp, and nothing needless
#
# **Claim.** If a warp owns two tiles of 16 rows, each B operand feeds two `mma`. The price is registers, so Q goes back to
# shared memory. Besides, exponentials are computed while `mma` works on other keys, and with a causal mask the longest
# blocks start first, lest one runs on alone at the end.
#
# **Predict 5.** A wavefront feeds 1.67 times as many FLOP. Will the speed follow?
#
# <details><summary>Answer</summary>
#
# Not nearly. The ceiling, 660 TFLOP/s, is now about what `mma` itself reaches on Hopper: two thirds of 989.4, by
# FlashAttention-3's authors.
#
# </details>

# %% slideshow={"slide_type": "fragment"}
figures.ceiling("fa2")
print(measured.rung("fwd_5_fa2"))

# %% [markdown] slideshow={"slide_type": "subslide"}
# **Exercise 02.5: from S to an A operand.** `near` is what this lane has of P for 8 keys, `far` for the next 8: each a C
# fragment in float32. `pack<T>(low, high)` rounds two numbers into one register;
# [`ptx.cuh`](../steps/step02_fa2_cuda/ptx.cuh) says above `mma` what A wants where.

# %% slideshow={"slide_type": "fragment"}
to_operand = r"""
__device__ void to_operand(uint32_t (&A)[4], const float (&near)[4],
                           const float (&far)[4]) {
#error Blank 02.5
}"""

check("02.5", to_operand)

# %% [markdown] slideshow={"slide_type": "subslide"}
# **Exercise 02.6: how far the loop runs.** The block has the rows from `tile * Br` on, at most Br of them, none beyond Nq.
# How many keys must it visit? Causal is aligned at the bottom right; with more queries than keys some blocks see nothing.

# %% slideshow={"slide_type": "fragment"}
keys_seen = r"""
__device__ int keys_seen(int tile, int Nq, int Nk, int causal) {
#error Blank 02.6
}"""

check("02.6", keys_seen)

# %% [markdown] slideshow={"slide_type": "slide"}
# ## 4. Check it, then break it
#
# Three of the contract's cases, each rung:

# %% slideshow={"slide_type": "fragment"}
for rung in ("warp", "mma", "ldmatrix", "cp_async", "fa2"):
    names = ["ragged", "more_queries_causal", "scores_200"]
    planted.on_cases(rung, names, torch.bfloat16)

# %% [markdown] slideshow={"slide_type": "subslide"}
# A copy may land at any moment between its start and its wait. The emulation performs it late, at the wait, or eagerly,
# at the start. Of six edits of `fwd_4_cp_async.cu` **one does no harm. One is seen only if copies are late. Which?**
#
# <details><summary>Answer</summary>
#
# A tile too many: beyond the last key nothing is read. A missing wait: eager copies are there in time.
#
# </details>

# %% slideshow={"slide_type": "fragment"}
swizzle = "tile + at(size, row, slab + column)", "tile + (row * D + slab + column)"
mistakes = {
    "no swizzle in the tile": swizzle,
    "one shuffle for the max": ("fmaxf(x, __shfl_xor_sync(~0u, x, 2));", "x;"),
    "m starts at -infinity": ("LOWEST = -3.4e38f;", "LOWEST = -INFINITY;"),
    "no wait for K": (
        "cp_async_wait<0>();\n    __syncthreads();  // K", "__syncthreads();  // K"
    ),
    "no mask unless causal": ("    mask(S, j, seen);", "    if (causal) mask(S, j, seen);"),
    "a tile too many fetched": ("    if (j + Bc < keys) load_tile", "    load_tile"),
}
names = """one_key ragged scores_200 ragged_causal fewer_queries_causal
    more_queries_causal large_scores""".split()
orders = {order: {"copies": order} for order in ("late", "eager")}
planted.seen_by("cp_async", mistakes, names, harmless=["a tile too many fetched"], **orders)

# %% [markdown] slideshow={"slide_type": "subslide"}
# **Bug hunt 02.bug1.** A report on a broken kernel, `show("02.bug1")`. Write a test that fails on it and passes on the
# repaired one. `check` then asks for the cause.

# %% slideshow={"slide_type": "fragment"}
print(planted.wrapped(exercises.find("02.bug1").symptom))

def test(forward):
    """Asserts what must hold of (out, lse) = forward(q, k, v, causal=..., scale=...)."""
    raise Blank

check("02.bug1", test)

# %% [markdown] slideshow={"slide_type": "slide"}
# ## 5. Predict, then measure
#
# **Predict 6.** Order the five steps by what each brought.
#
# <details><summary>Answer</summary>
#
# By the counts: `ldmatrix` 6.6, `warp` 3.1, `fa2` 1.67, `mma` 1.27, `cp_async` 1. Measured, `fa2` comes last. `cp_async`
# removes waiting, which no count shows.
#
# </details>
#
# The picture is a **roofline**: its line is the ceiling. Open marks are counted, full ones were measured.

# %% slideshow={"slide_type": "fragment"}
figures.gains()
figures.roofline()

# %% [markdown] slideshow={"slide_type": "slide"}
# ## 6. Summary
#
# - What a wavefront of shared memory feeds bounds the speed, before any GPU has run the kernel.
# - A fragment is a matrix dealt to 32 lanes. Two C fragments of S are, as they lie, an A fragment of P.
# - Chunk c of row r at c XOR (r mod 8) makes eight rows of one column hit all banks once.
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
# 3. Why does rung 4 need no second buffer for K?
#    <details><summary>Answer</summary>
#
#    K is not needed after S, so the next K comes during softmax and P V.
#    </details>
# 4. Why must the sum l not be combined among four lanes in every tile, and the maximum must?
#    <details><summary>Answer</summary>
#
#    Parts of l can be added at the end. All four lanes need the same maximum for alpha and P.
#    </details>
# 5. Why do the longest blocks of a causal mask start first?
#    <details><summary>Answer</summary>
#
#    A long block that starts last runs alone.
#    </details>
#
# **Go further**
#
# - ★ (15 minutes) Count `fa2` with tiles (64, 64) and (128, 128) at D = 64. Which has the higher ceiling?
# - ★★ (1 hour) Pad the rows of `fwd_2_mma.cu` by 8 numbers instead of swizzling. Where do conflicts remain?
#
# **Read:** [papers/flash_attention_2.md](../papers/flash_attention_2.md); what the hardware counted,
# [a profile of four kernels](../steps/course/bench/results/README.md#a-profile-of-four-kernels); each idea of rung 5 alone,
# [02x_deeper.ipynb](02x_deeper.ipynb).
#
# **Next:** [02c_fa2_cuda_backward.ipynb](02c_fa2_cuda_backward.ipynb), the backward pass.
