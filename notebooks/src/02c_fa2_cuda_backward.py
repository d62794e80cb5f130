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
# # 02c. The backward pass in CUDA C++
#
# *The gradients need P, and P was never stored. What is kept instead, who adds up which gradient, and why are two runs
# not equal to the last bit?*
#
# ![Left, P, never stored; beside it lse, one number a row. Right, four blocks walk down their columns of P: each owns its
# dK and dV, and arrows from all four lead to one dQ.](../notebooks/figures/question_02c.png)
#
# - **Before you start:** notebook 00, its backward; 02a, a kernel in CUDA C++; for `bwd_1_fa2` also 02b, `mma`,
#   `ldmatrix`.
# - **Time:** about 50 minutes to read, 60 minutes more with the exercises. A good place to stop for today: before
#   `bwd_1_fa2`.
# - **Code:** [`bwd_0_scalar.cu`](../steps/step02_fa2_cuda/bwd_0_scalar.cu),
#   [`bwd_1_fa2.cu`](../steps/step02_fa2_cuda/bwd_1_fa2.cu). **Tests:** `pytest tests/test_step02_fa2_cuda.py`.

# %% jupyter={"source_hidden": true} slideshow={"slide_type": "skip"}
import steps  # first: it chooses the engine
import torch
from steps import step02_fa2_cuda as step02
from steps.course.figures import measured, n02c_backward as figures, planted
from steps.course.workbook import check, hint, show, solution  # noqa: F401
torch.set_num_threads(1)  # small tensors: one thread is faster
torch.set_printoptions(precision=2, sci_mode=False)
print(steps.engine.describe())

# %% [markdown] slideshow={"slide_type": "slide"}
# ## 1. The problem, measured
#
# Between forward and backward, autograd keeps what the gradients will need. For standard attention that includes P, N x
# N numbers a head. All that it saves for one head with D = 32:

# %% slideshow={"slide_type": "fragment"}
def standard(q, k, v):
    return torch.softmax(q @ k.mT / q.shape[-1] ** 0.5, -1) @ v

for N in (64, 256, 1024):
    most, least = (figures.kept_kib(f, N) for f in (standard, step02.attention))
    print(f"N = {N:4}: standard keeps {most:5.0f} KiB, stage 02 {least:4.0f}")

# %% [markdown] slideshow={"slide_type": "fragment"}
# At N = 1024 stage 02 keeps 516 KiB instead of 4480: q, k, v, out and lse. What replaces P is lse, 4 KiB. The price is
# arithmetic: S has to be multiplied out again.

# %% [markdown] slideshow={"slide_type": "slide"}
# ## 2. The idea: recompute P, and let each gradient be a sum over tiles
#
# Notebook 00 derives the backward. In three lines:
#
# $$P_{ij} = e^{S_{ij} - \mathit{lse}_i} \qquad dV = P^\top dO \qquad dP = dO\, V^\top$$
#
# $$\mathit{delta}_i = \sum_x dO_{ix} O_{ix} \qquad dS = P \circ (dP - \mathit{delta})$$
#
# $$dQ = \mathit{scale}\; dS\, K \qquad dK = \mathit{scale}\; dS^\top Q$$
#
# **Claim.** With lse kept, every entry of P can be made again alone, and all gradients are sums over entries. lse is
# final, so nothing is rescaled. On the six tokens, first with a dS that lacks delta:

# %% slideshow={"slide_type": "fragment"}
Q = torch.tensor([[1.0, 2], [0, 1], [-1, 0], [2, -1], [1, 1], [3, 1]])
K = torch.tensor([[0.0, 1], [1, 0], [-1, 1], [1, 2], [2, 0], [0, -1]])
V = torch.tensor([[0.0, 6], [2, 0], [4, 6], [6, 4], [8, 0], [10, 6]])
dO = torch.tensor([[1.0, 0], [0, 1], [1, 1], [2, 0], [0, -1], [1, -1]])
scale = 2**-0.5
leaves = [x.clone().requires_grad_() for x in (Q, K, V)]
want = torch.autograd.grad(standard(*leaves), leaves, dO)
S = scale * Q @ K.T
O, lse = S.softmax(-1) @ V, S.logsumexp(-1)  # what the forward keeps
P, dP = (S - lse[:, None]).exp(), dO @ V.T
delta = (dO * O).sum(-1)
for says, dS in (("without", P * dP), ("with", P * (dP - delta[:, None]))):
    dQ = scale * dS @ K
    print(f"{says:7} delta: row 5 of dQ is {dQ[5]}, should be {want[0][5]}")

# %% [markdown] slideshow={"slide_type": "subslide"}
# ### Whose gradient stays on the chip?
#
# A tile of P and dS adds to dV_j and dK_j (sums over queries) *and* to dQ_i (a sum over keys). Whichever loop is
# outside, one of these sums gets parts from several blocks:
#
# | outside | a block owns, in registers | all blocks add to |
# |---|---|---|
# | key tiles (the picture above) | dK_j and dV_j | dQ |
# | query tiles | dQ_i | dK and dV |
#
# They have to add **atomically**: in a plain `dq[e] += x` another block may write between the read and the write. Key
# tiles outside is cheaper, because one matrix is added to, not two. Stage 01's rung 2 and stage 03 avoid atomic
# additions: a kernel for each order, and each computes S and dP.

# %% [markdown] slideshow={"slide_type": "subslide"}
# ### What atomics cost: the last bits
#
# Atomic additions happen in their order of arrival, and in floating point the order counts. The emulation runs one
# block after the other in an order that we choose, here for two heads of 67 tokens:

# %% slideshow={"slide_type": "fragment"}
large, one = torch.tensor(1e8), torch.tensor(1.0)
print("(1e8 + 1) - 1e8 =", large + one - large, " (1e8 - 1e8) + 1 =", large - large + one)
first = figures.gradients(67, "forward")
for blocks, seed in (("reverse", 0), ("random", 1), ("random", 2)):
    other = figures.gradients(67, blocks, seed)
    changed = [int((a != b).sum()) for a, b in zip(other, first, strict=True)]
    print(f"blocks {blocks:7}: other bits in {changed} numbers of dq, dk, dv")
print(f"dq by at most {(other[0] - first[0]).abs().max():.1e}")

# %% [markdown] slideshow={"slide_type": "fragment"}
# dk and dv keep every bit: each is summed by one thread, in one order. About half of dq's 4288 numbers change in their
# last bits. `deterministic=True` of `bwd_1_fa2` lets blocks take turns ([02x](02x_deeper.ipynb), section 5).

# %% [markdown] slideshow={"slide_type": "slide"}
# ## 3. From algorithm to code
#
# ### Rung 0, `scalar`: a thread owns a key row
#
# FlashAttention-2's Algorithm 2; in brackets the paper's lines, corrected ([papers/errata.md](../papers/errata.md)).
#
# | line | what it does | in the kernel |
# |---|---|---|
# | [4] | delta = rowsum(dO ∘ O) | a kernel of its own, before; `row_delta` (02.3) |
# | [5–7] | for each tile of keys: K_j, V_j; dK_j = dV_j = 0 | the grid; `load_tile`; registers |
# | [8–9] | for each tile of queries: Q_i, dO_i, lse_i, delta_i | the loop over `i`; `load_column` |
# | [10–11] | S, then P = exp(S - lse_i) | `dot`, `expf` |
# | [12–14] | dV_j += Pᵀ dO_i; dP = dO_i V_jᵀ; dS | the loop over `r` |
# | [15] | dQ_i += scale dS K_j, atomically | `add_dQ` (02.2) |
# | [16–18] | dK_j += scale dSᵀ Q_i; dK_j, dV_j written once | `store_row` |
#
# dK_j and dV_j take 2 D registers of a thread, so all else lies in shared memory. Thread t reads *its own* row of K.
# Rows have a spare word, `STRIDE = D + 1`: so a warp's 32 rows begin in different **banks** of shared memory, which can
# be read at once.
#
# A block owns dK_j and knows when its sum is complete, so `store_row` multiplies it by the scale once. No block knows
# when dQ_i is complete, so each multiplies its own part.

# %% slideshow={"slide_type": "fragment"}
KERNEL = """
extern "C" __global__ void one_head(
    Global<const float> dout, Global<const float> q, Global<const float> k,
    Global<const float> v, Global<const float> lse, Global<const float> delta,
    Global<float> dq, Global<float> dk, Global<float> dv, int N, float scale) {
  SharedMemory smem;
  Shared<float> K = smem.array<float>(Bc * STRIDE), V = smem.array<float>(Bc * STRIDE);
  Shared<float> Q = smem.array<float>(Br * D), dO = smem.array<float>(Br * D);
  Shared<float> dS = smem.array<float>(Br * Bc);
  Shared<float> lse_i = smem.array<float>(Br), delta_i = smem.array<float>(Br);
  int t = threadIdx.x, j = blockIdx.x * Bc, keys = min(Bc, N - j);       // [5]
  load_tile(K, STRIDE, k + j * D, D, keys);                              // [6]
  load_tile(V, STRIDE, v + j * D, D, keys);
  float dK_j[D] = {}, dV_j[D] = {};                                      // [7]
  for (int i = 0; i < N; i += Br) {                                      // [8]
    int rows = min(Br, N - i);
    load_tile(Q, D, q + i * D, D, rows);                                 // [9]
    load_tile(dO, D, dout + i * D, D, rows);
    load_column(lse_i, lse + i, rows);
    load_column(delta_i, delta + i, rows);
    __syncthreads();  // every thread reads rows that others have loaded
    for (int r = 0; r < rows && t < keys; r++) {
      float S = scale * dot(Q + r * D, K + t * STRIDE);                  // [10]
      float P = expf(S - lse_i[r]);                                      // [11]
      float dP = dot(dO + r * D, V + t * STRIDE);                        // [13]
      dS[r * Bc + t] = P * (dP - delta_i[r]);                            // [14]
      for (int d = 0; d < D; d++) dV_j[d] += P * dO[r * D + d];          // [12]
      for (int d = 0; d < D; d++) dK_j[d] += dS[r * Bc + t] * Q[r * D + d];  // [16]
    }
    __syncthreads();  // dS is complete
    add_dQ(dq + i * D, dS, K, rows, keys, scale);                        // [15]
  }
  if (t < keys) store_row(dk + (j + t) * D, dK_j, scale);                // [18]
  if (t < keys) store_row(dv + (j + t) * D, dV_j, 1);
}"""
N, D, Br, Bc = 6, 2, 2, 3
got = [torch.zeros(N, D) for _ in range(3)]
arguments = [dO, Q, K, V, lse, delta, *got, N, scale]
shared = (2 * Bc * (D + 1) + 2 * Br * D + Br * Bc + 2 * Br) * 4
launch = dict(grid=N // Bc, block=Bc, shared_bytes=shared, D=D, Br=Br, Bc=Bc)
planted.emulated(show("bwd_0_scalar") + KERNEL, "one_head", arguments, **launch)
for name, a, b in zip(("dq", "dk", "dv"), got, want, strict=True):
    print(name, torch.allclose(a, b, atol=1e-5))

# %% [markdown] slideshow={"slide_type": "subslide"}
# That is the whole kernel for one head, in two blocks of three keys. `add_dQ` needs the second barrier: it sums over
# the keys of the *block*, and every key belongs to another thread.
#
# At D = 128 dK_j and dV_j alone would take 256 registers, and a thread has at most 255. NVIDIA's library **cuDNN**, the
# yardstick from 02b on, takes no float32. So `bwd_0_scalar` is compared with PyTorch's `sdpa-efficient`:

# %% slideshow={"slide_type": "fragment"}
print("D=96:", planted.block("bwd_0_scalar", 96))
print(measured.rung("bwd_0_scalar", D=64, dtype="fp32"))

# %% [markdown] slideshow={"slide_type": "subslide"}
# **Exercise 02.2: the gradient that all blocks add to.** Line [15] for one tile, by all Bc threads of the block: dQ_i
# (rows, D) += scale dS (rows, keys) K_j (keys, D). Read `dS[r * Bc + j]` and `K[j * STRIDE + d]`; `dq` points at the
# tile's first row, and its rows are D apart. Of the rows x D elements thread t = `threadIdx.x` takes e = t, t + Bc, t +
# 2 Bc and so on, each in row e / D and column e % D. `atomicAdd(&dq[e], x)` adds x to `dq[e]` atomically. About five
# lines.

# %% slideshow={"slide_type": "fragment"}
add_dQ = r"""
__device__ void add_dQ(Global<float> dq, Shared<float> dS, Shared<float> K, int rows,
                       int keys, float scale) {
#error Blank 02.2
}"""

check("02.2", add_dQ)

# %% [markdown] slideshow={"slide_type": "subslide"}
# **Exercise 02.3: one number a query.** It is delta, line [4], of one row, whose numbers begin at dO and O, by one
# thread.

# %% slideshow={"slide_type": "fragment"}
row_delta = r"""
__device__ float row_delta(Global<const float> dO, Global<const float> O) {
#error Blank 02.3
}"""

check("02.3", row_delta)

# %% [markdown] slideshow={"slide_type": "slide"}
# ### Rung 1, `fa2`: five products on tensor cores
#
# Operands have 16 bits, so a register holds a *pair* of them. `mma` multiplies the pair of A with the pair of B, number
# by number, and adds both products to one sum. So a pair must be neighbours along the index that is summed.
#
# For S = Q_i K_jᵀ that index is d: a pair lies side by side in a row of Q_i or K_j. For dV_j = Pᵀ dO_i it is the query,
# and a pair of P lies in *two rows*. There `ldmatrix.trans` gives a lane a pair of a column (02b):
#
# | product | sums over | first operand | second operand |
# |---|---|---|---|
# | S = Q_i K_jᵀ, dP = dO_i V_jᵀ | d | Q_i, dO_i | K_j, V_j |
# | dV_j += Pᵀ dO_i, dK_j += dSᵀ Q_i | queries | P, dS `.trans` | dO_i, Q_i `.trans` |
# | dQ_i += dS K_j | keys | dS | K_j `.trans` |

# %% [markdown] slideshow={"slide_type": "subslide"}
# ### Where a lane finds its row
#
# Whether `.trans` is used is one question, where a lane points is another. One `ldmatrix` fetches four matrices, a
# piece of 16 x 16: lane t gives the address of row t % 8 of matrix t / 8. `mma` wants them in the order top left,
# bottom left, top right, bottom right. dO_i is *stored like* the operand of dV. But S needs K_jᵀ, and dV needs Pᵀ: the
# tiles of K_j and P *store the transpose*. There the four lie elsewhere:

# %% slideshow={"slide_type": "fragment"}
figures.addresses()

# %% [markdown] slideshow={"slide_type": "subslide"}
# Here is the address for a tile stored like the operand. `template <int WIDTH>` makes a function for each length WIDTH
# of the tile's rows. `swizzle<WIDTH>(r)` is the number with which the columns of row r are XORed (02b).

# %% slideshow={"slide_type": "fragment"}
show("bwd_1_fa2", "lane_row(Shared", until="lane_row_transposed(Shared")

# %% [markdown] slideshow={"slide_type": "subslide"}
# **Exercise 02.7: the address that a lane gives for a transposed operand.** Which address does this lane give for the
# 16 x 16 piece at (row, column) of a tile that stores the *transpose* of the operand? Find its matrix t / 8 in the
# right picture, and the row r and column c at which the lane's 8 numbers begin.

# %% slideshow={"slide_type": "fragment"}
lane_row_transposed = r"""
template <int WIDTH>
__device__ Shared<T> lane_row_transposed(Shared<T> tile, int row, int column) {
#error Blank 02.7
}"""

check("02.7", lane_row_transposed)

# %% [markdown] slideshow={"slide_type": "slide"}
# ### What stays in registers, what goes through shared memory
#
# In the forward P never left the registers: the warp that made 16 rows of S multiplied them with V. Here the sum of
# dV_j runs over queries, and that of dQ_i over keys. The block's warps divide the queries *and* the keys of S. So for
# both sums other warps hold some terms: P and dS go to shared memory in 16 bits, and each step needs a second barrier.
# dK_j and dV_j stay in registers throughout.
#
# dq is added up in float32 and rounded to 16 bits once, at the end.

# %% [markdown] slideshow={"slide_type": "slide"}
# ## 4. Check it, then break it
#
# Some cases of the contract (02a). In `grouped_heads` several query heads share the keys and values of one head:

# %% slideshow={"slide_type": "fragment"}
names = ["ragged", "ragged_causal", "fewer_queries_causal", "scores_200", "grouped_heads"]
for rung in ("scalar", "fa2"):
    planted.on_cases(rung, names, results=figures.results)

# %% [markdown] slideshow={"slide_type": "subslide"}
# Now five mistakes, each with the old line (-) and the new one (+). `true` and `false` of `add_product` say whether the
# tile stores the transpose of the first operand, and of the second. **Which gradients will each spoil, and which of two
# cases notice?** In the picture green is noticed, grey is not.

# %% slideshow={"slide_type": "fragment"}
print(figures.diffs())

# %% [markdown] slideshow={"slide_type": "fragment"}
# <details><summary>Answer</summary>
#
# dv needs neither delta nor a scale, but a wrong P spoils it. The diagonal is wrong only in a causal case with Nq !=
# Nk. Without the barrier a warp reads what others have yet to write. (In the emulation's usual order only the first
# product, dv, comes too early. On a GPU any of the three may.)
#
# </details>

# %% slideshow={"slide_type": "fragment"}
figures.spoilt(figures.MISTAKES, ["ragged", "fewer_queries_causal"])

# %% [markdown] slideshow={"slide_type": "slide"}
# ## 5. Predict, then measure
#
# **Question 1.** From how many key tiles on do the bits of dq depend on the order of the blocks?
#
# <details><summary>Answer</summary>
#
# Three. dq starts at 0, and a + b = b + a in floating point, too: two tiles give the same bits in either order. But
# (a + b) + c and (c + b) + a may differ.
#
# </details>

# %% slideshow={"slide_type": "fragment"}
for tiles in (1, 2, 3, 4, 8):
    orders = (figures.gradients(16 * tiles, blocks)[0] for blocks in ("forward", "reverse"))
    changed = torch.ne(*orders).float().mean()
    print(f"{tiles} key tiles: {changed:.0%} of dq changes when the blocks run backwards")

# %% [markdown] slideshow={"slide_type": "subslide"}
# **Question 2.** `bwd_1_fa2` is FlashAttention-2's design, as 02b's `fwd_5_fa2`, which reached 0.54 of the speed of
# cuDNN's forward. Which share of the speed of cuDNN's backward does it reach?
#
# <details><summary>Answer</summary>
#
# Half, a little less than in the forward. At two barriers a step all warps wait for the last one, and every operand
# passes through `ldmatrix`.
#
# </details>

# %% slideshow={"slide_type": "fragment"}
print(measured.rung("bwd_1_fa2", peer="sdpa-cudnn"))

# %% [markdown] slideshow={"slide_type": "slide"}
# ## 6. Summary
#
# - The forward keeps lse instead of P, one number a row. The backward makes P again from it, tile by tile, and rescales
#   nothing.
# - One gradient crosses blocks: with key tiles outside dq, added to atomically, in float32. From three key tiles on its
#   last bits depend on the order.
# - Three of the five products read an operand with `.trans`. P and dS go through shared memory.
#
# **Ask yourself**
#
# 1. Suppose the warps of `bwd_1_fa2` divided only the queries of S. Which gradient could a warp sum up alone?
#    <details><summary>Answer</summary>
#
#    dQ = dS K: it has all keys of its rows of dS, as in the forward. dV and dK sum over queries.
#    </details>
# 2. Suppose `scalar` left dq out. Why must both barriers of its loop stay all the same?
#    <details><summary>Answer</summary>
#
#    Each iteration overwrites the tiles of Q and dO, which the threads load together and read together.
#    </details>
# 3. Why must dq be zero at the start, while dk and dv may hold anything?
#    <details><summary>Answer</summary>
#
#    dq is added to; dk and dv are stored once.
#    </details>
# 4. P and dS are rounded to 16 bits, too. Why does that harm less than a dq in bf16?
#    <details><summary>Answer</summary>
#
#    They are rounded once, and a sum in float32 follows. dq would be rounded at every key tile.
#    </details>
# 5. Suppose `bwd_1_fa2` computed Sᵀ = K_j Q_iᵀ, each warp with its own keys. Which product could take its operand
#    straight from registers?
#    <details><summary>Answer</summary>
#
#    dV = Pᵀ dO and dK = dSᵀ Q: what Sᵀ and dPᵀ leave in registers is their first operand, as P in 02b.
#    </details>
#
# **Go further**
#
# - ★★★ (a weekend) Do as stage 03: write a second kernel with query tiles outside that computes dq alone.
#
# **Read:** [papers/flash_attention_2.md](../papers/flash_attention_2.md), Algorithm 2;
# [02x_deeper.ipynb](02x_deeper.ipynb), sections 4 and 5.
#
# **Next:** [02d_fa2_cuda_hopper.ipynb](02d_fa2_cuda_hopper.ipynb), or
# [03a_triton_kernels.ipynb](03a_triton_kernels.ipynb).
