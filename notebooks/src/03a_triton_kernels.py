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
# # 03a. Triton: a kernel written in tiles
#
# *What does a tile language take over, what stays yours, and how far does that reach?*
#
# ![Five decisions in CUDA C++, Gluon and Triton: owners, tiles and masks are always yours, copies and barriers not in
# Triton, which lane has which number in all but Triton.](../notebooks/figures/question_03a.png)
#
# - **Before you start:** notebook 00 (tiles, online softmax, lse, delta); what a block and shared memory are. Linux.
# - **Time:** about 55 minutes to read, 60 minutes more with the exercises. To stop for today: before part 4.
# - **Code:** [`steps/step03_triton`](../steps/step03_triton/README.md),
#   [figures](../steps/course/figures/n03a_triton_kernels.py).
# - **Tests:** `pytest tests/test_step03_triton.py`.

# %% jupyter={"source_hidden": true} slideshow={"slide_type": "skip"}
import steps  # comes first, because it chooses the engine
import torch, triton
import triton.language as tl
from reference import attention
from steps.course.figures import measured, n03a_triton_kernels as figures
from steps.step03_triton import backward, forward, fwd_0_fused
from steps.course.workbook import Blank, check, hint, show, solution
print(steps.engine.describe())

# %% [markdown] slideshow={"slide_type": "slide"}
# ## 1. The problem, measured
#
# How much of a fast kernel's text is about the machine? A line is counted if it names threads, warps, barriers, copies,
# shared memory or layouts; comments are left out. Speeds are shares of the speed of cuDNN, NVIDIA's library, on an H100
# (D = 128, N = 16384, bfloat16, no mask).

# %% slideshow={"slide_type": "fragment"}
figures.text_and_speed()

# %% [markdown] slideshow={"slide_type": "slide"}
# The short Triton kernel beats 209 lines of CUDA C++. The last quarter of the speed needs much text again, also in
# Gluon, the language below Triton.
#
# ## 2. The idea: programs instead of threads
#
# A CUDA block becomes a **program** without threads, which works on *tiles*: `tl.arange(0, 4)` is a tile of four
# numbers, `x + tl.arange(0, 4)` a tile of four pointers. The compiler decides which thread holds which number.
#
# The launch `add[(2,)](...)` starts a **grid** of two programs, and `tl.program_id(0)` tells each which one it is. A
# `tl.constexpr` argument is known to the compiler, which makes a kernel for each of its values. The size of a tile is
# such an argument, and a power of two. So the last tile may hang over the edge, here by two numbers:

# %% slideshow={"slide_type": "fragment"}
@triton.jit
def add(x, y, out, N, MASKED: tl.constexpr, BLOCK: tl.constexpr):
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)  # this program's BLOCK positions
    inside = i < N if MASKED else i >= 0
    total = tl.load(x + i, mask=inside, other=0.0) + tl.load(y + i, mask=inside, other=0.0)
    tl.store(out + i, total, mask=inside)

device = steps.engine.device
x, y = torch.arange(8.0).to(device), torch.full((8,), 10.0).to(device)
for masked in (False, True):
    memory = torch.full((8,), -1.0).to(device)  # 6 numbers of out, 2 of somebody else
    add[(2,)](x, y, memory, 6, MASKED=masked, BLOCK=4)
    print("masked", masked, memory[:6].tolist(), "its neighbours", memory[6:].tolist())

# %% [markdown] slideshow={"slide_type": "slide"}
# Without a mask the neighbours became 16 and 17, and no error was raised. What was `if (i < N)` in CUDA is a **mask**.
# `other` is what a masked load yields: 0 before a sum, -inf before a maximum.
#
# ### What the interpreter shows, and what it hides
#
# Without a GPU, Triton's **interpreter** runs a kernel's Python text with numpy, one program after the other. Each of
# these kernels has a common fault. **Which of them does the interpreter refuse?**

# %% slideshow={"slide_type": "fragment"}
@triton.jit
def odd_tile(x, out):  # copies a tile of 48 numbers
    tl.store(out + tl.arange(0, 48), tl.load(x + tl.arange(0, 48)))

@triton.jit
def count(x, out):  # counts the programs
    tl.store(out, tl.load(out) + 1.0)

# %% slideshow={"slide_type": "fragment"}
@triton.jit
def largest(x, out):  # finds the largest of 9 numbers
    m = 0
    for j in range(0, 9):
        m = tl.maximum(m, tl.load(x + j))
    tl.store(out, m)

figures.interpreted_and_compiled(odd_tile, count, largest)

# %% [markdown] slideshow={"slide_type": "slide"}
# The interpreter refuses one, the compiler (for an H100) two. All numbers of x are -1, and eight programs ran.
#
# - `odd_tile`: take a tile of 64, and a mask.
# - `count`: reading, adding and writing are three steps, and not one **atomic** step. On a GPU all eight programs may
#   read 0, and leave 1.
# - `largest`: m begins as an integer and becomes a float. Begin with `float("-inf")`; the 0 is wrong, too.
#
# ## 3. From algorithm to code
#
# FlashAttention-2's Algorithm 1 (line [10] corrected as in notebook 00):
#
# | line | what it does | in the kernel |
# |---|---|---|
# | [3–4] | a program takes Br queries; Q_i stays | `tl.program_id`, first `tl.load` |
# | [5] | m = -inf, l = 0, O = 0 | `tl.full`, `tl.zeros` |
# | [6–7] | for each tile of keys: K_j and V_j | the loop, two `tl.load` |
# | [8] | S = Q_i K_jᵀ, not scaled yet | `tl.dot`; what is hidden: `mask` |
# | [9–10] | m, l and O take in the tile | `online_update` |
# | [12–15] | out = O / l, lse = scale · m + log l | two `tl.store` |
#
# GPUs have an instruction for 2ˣ and none for eˣ. With c = scale · log2(e), exp(scale · S - scale · m) = 2^(c S - c m).
# So the kernel never scales S: it holds the bare products Q_i K_jᵀ, and m is the largest of these. Only lse has the
# scale in it, and is a natural logarithm.
#
# In this stage S are scores and N tokens. You will write `mask` and `online_update` in part 5.

# %% [markdown] slideshow={"slide_type": "slide"}
# ### A whole forward
#
# The grid has a program for each tile of queries and each head; `group` query
# heads share a key head. The **strides** are the tensors' own, so a transposed view needs no copy. Two arguments are
# for the compiler: a program has `num_warps` warps, and with `num_stages=2` the next tiles of K and V are copied while
# it computes with these.
#
# It is tried with 70 queries and 50 keys, whose last tiles are ragged, then with notebook 00's six tokens, D filled up
# with zeros. Row 5 ends at (6.83, 1.34), as there.

# %% slideshow={"slide_type": "fragment"}
@triton.jit
def attention_kernel(
    q, k, v, out, lse, q_strides, k_strides, H, group, Nq, Nk, scale,
    CAUSAL: tl.constexpr, D: tl.constexpr, Br: tl.constexpr, Bc: tl.constexpr,
):
    i, bh = tl.program_id(0) * Br, tl.program_id(1)  # the first query; batch entry and head
    b, h = bh // H, bh % H
    row, column = i + tl.arange(0, Br)[:, None], tl.arange(0, D)[None, :]
    at_q = b * q_strides[0] + h * q_strides[1] + row * q_strides[2] + column  # (Br, D)
    at_k = b * k_strides[0] + h // group * k_strides[1] + column  # (1, D)
    scale_log2 = scale * 1.4426950408889634

    Q_i = tl.load(q + at_q, mask=row < Nq, other=0.0)  # (Br, D)
    m, l = tl.full((Br,), float("-inf"), tl.float32), tl.zeros((Br,), tl.float32)
    O = tl.zeros((Br, D), tl.float32)
    end = tl.minimum(Nk, i + Br + Nk - Nq) if CAUSAL else Nk  # nor does a query see a later key
    for j in range(0, end, Bc):
        key = j + tl.arange(0, Bc)[:, None]
        K_j = tl.load(k + at_k + key * k_strides[2], mask=key < Nk, other=0.0)  # (Bc, D)
        V_j = tl.load(v + at_k + key * k_strides[2], mask=key < Nk, other=0.0)
        S = tl.dot(Q_i, tl.trans(K_j), input_precision="ieee")  # TF32 keeps 11 of 24 bits
        S = fwd_0_fused.mask(S, i, j, Nq, Nk, CAUSAL, Br, Bc)
        m, l, O = fwd_0_fused.online_update(m, l, O, S, V_j, scale_log2, "ieee")
    l = tl.where(l == 0, 1.0, l)  # a query that saw no key gets out = 0 / 1
    tl.store(out + at_q, O / l[:, None], mask=row < Nq)
    row = i + tl.arange(0, Br)
    tl.store(lse + bh * Nq + row, scale * m + tl.log(l), mask=row < Nq)

def attend(q, k, v, causal=False, Br=16, Bc=16):
    """(out, lse) for q (B, H, Nq, D), k and v (B, Hk, Nk, D) with equal strides."""
    (B, H, Nq, D), (Hk, Nk) = q.shape, k.shape[1:3]
    out, lse = torch.empty_like(q), q.new_empty(B, H, Nq, dtype=torch.float32)
    attention_kernel[triton.cdiv(Nq, Br), B * H](
        q, k, v, out, lse, q.stride(), k.stride(), H, H // Hk, Nq, Nk, D**-0.5,
        CAUSAL=causal, D=D, Br=Br, Bc=Bc, num_warps=4, num_stages=2,
    )
    return out, lse

# %% slideshow={"slide_type": "subslide"}
torch.manual_seed(0)
q, (k, v) = torch.randn(2, 4, 70, 16).to(device), torch.randn(2, 2, 2, 50, 16).to(device)
for causal in (False, True):
    want_out, _ = attention.forward(q, k, v, causal=causal)
    out, lse = attend(q, k, v, causal)
    away, unseen = (out - want_out).abs().max(), (lse[0, 0] == -float("inf")).sum()
    print(f"causal {causal!s:5}: {away:.0e} from float64, {unseen} queries see no key")

# %% slideshow={"slide_type": "fragment"}
Q = torch.tensor([[1.0, 2], [0, 1], [-1, 0], [2, -1], [1, 1], [3, 1]])
K = torch.tensor([[0.0, 1], [1, 0], [-1, 1], [1, 2], [2, 0], [0, -1]])
V = torch.tensor([[0.0, 6], [2, 0], [4, 6], [6, 4], [8, 0], [10, 6]])
q, k, v = (torch.nn.functional.pad(x, (0, 14))[None, None].to(device) for x in (Q, K, V))
q *= (16 / 2) ** 0.5  # the kernel scales by 1/sqrt(16), the example by 1/sqrt(2)
for seen in (3, 6):
    out, lse = attend(q, k[:, :, :seen], v[:, :, :seen])
    row = "({:.2f}, {:.2f})".format(*out[0, 0, 5, :2])
    print(f"keys 0 to {seen - 1}: row 5 of out {row}, lse {lse[0, 0, 5]:.2f}")

# %% [markdown] slideshow={"slide_type": "slide"}
# ### Which tiles are visited, and which need a mask
#
# A mask costs comparisons, and most tiles need none. So the stage makes **two passes** over the keys: up to `full`
# without a mask (blue), then up to `end` with one (orange). White tiles are never visited. The last query sees the last
# key.

# %% slideshow={"slide_type": "fragment"}
figures.tiles_visited()

# %% [markdown] slideshow={"slide_type": "slide"}
# ### The real kernel
#
# `fwd_0_fused.py` is that kernel with what use demands. The loop is a function, `visit_keys`, called twice; its
# constexpr MASKED makes two loops of it. `Rows` says where the rows of one head lie. `pointers` computes in 64 bits,
# since row 2²⁵ of 64 numbers begins at element 2³¹. A head_dim of 80 lies in tiles of `D_pad` = 128 columns.
#
# **Autotuning** times a kernel with several tiles, warps and stages, and keeps the fastest. `triton.autotune` does so
# in a call with new sizes. That call is slow, and another Bc changes the last bits of the result. So here the tables
# `TILES` hold what was fastest on an H200; `python -m steps.course.bench.tune` looks for better ones on your GPU.

# %% slideshow={"slide_type": "subslide"}
show("step03_triton/fwd_0_fused", "key_ranges", "forward_kernel")

# %% [markdown] slideshow={"slide_type": "slide"}
# ### What the compiler made of it
#
# The compiler needs no GPU: here it is given `fwd_0_fused.py` for an A100 (sm_80) and an H100 (sm_90), in bfloat16 with
# D = 64. The same text becomes `mma.sync`, a product by one warp, or `wgmma`, by four. `cp.async` copies tiles ahead.

# %% slideshow={"slide_type": "fragment"}
figures.instructions()

# %% [markdown] slideshow={"slide_type": "slide"}
# ### Descriptors: a box instead of pointers
#
# The stage's files are rungs of a ladder: each adds an idea. In `fwd_1_tma.py` a **tensor descriptor** says once where
# a tensor lies and how large a tile is. (`wgmma`'s descriptors in stage 02 are something else.) Then one thread asks
# Hopper's copy engine, the Tensor Memory Accelerator (TMA), for the tile at some row. Rows beyond the tensor come as
# zeros. Where address or strides are no multiples of 16 bytes, the `else` below loads by pointers.
#
# In two more rungs some warps multiply while others compute exponentials: `roles` by an argument to the compiler,
# `gluon` in Gluon; see [03x](03x_deeper.ipynb) and [03y](03y_deeper.ipynb).

# %% slideshow={"slide_type": "fragment"}
for kernel in ("fwd_0_fused", "fwd_1_tma", "fwd_2_roles", "fwd_3_gluon"):
    print(measured.rung(kernel, gpu=measured.H100, peer="sdpa-cudnn"))
show("fwd_1_tma", "load_tile")

# %% [markdown] slideshow={"slide_type": "slide"}
# ## 4. The backward: two passes and no atomics
#
# The backward makes five products for each pair of tiles: S, dP, dV, dK and dQ. If a program owns a tile of keys, dK_j
# and dV_j stay with it. But dQ_i gets a part from every program, and they come in any order. A floating-point sum
# depends on the order:

# %% slideshow={"slide_type": "fragment"}
torch.manual_seed(0)
q, k, v, dout = torch.randn(4, 1, 1, 64, 16).to(device)
out, lse = forward(q, k, v)
tiles = [(k[:, :, j : j + 16], v[:, :, j : j + 16]) for j in range(0, 64, 16)]
parts = [backward(dout, q, *tile, out, lse)[0] for tile in tiles]
same = torch.equal(sum(parts), sum(reversed(parts)))
print("dQ from 4 tiles of keys, from the first or from the last: the same bits", same)
runs = [backward(dout, q, k, v, out, lse, rung="fused")[0] for _ in range(2)]
print("rung fused, twice: the same bits", torch.equal(*runs))

# %% [markdown] slideshow={"slide_type": "subslide"}
# So rungs `fused` and `tma` have two kernels, and each result has one owner:
#
# | kernel | a program owns | it visits, in order | products |
# |---|---|---|---|
# | `dkdv_kernel` | a tile of keys, dK_j and dV_j | queries, of all heads with these keys | S, dP, dV, dK: 4 |
# | `dq_kernel` | a tile of queries, dQ_i | keys | S, dP, dQ: 3 |
#
# Both compute S and dP, so these are made twice: 4 + 3 = 7 products instead of 5, and no atomics. Rung `gluon` makes
# five and adds dQ up in memory. (In the lines below `full` means without a mask.)

# %% slideshow={"slide_type": "fragment"}
for kernel in ("bwd_0_fused", "bwd_1_tma", "bwd_2_gluon"):
    print(measured.rung(kernel, gpu=measured.H100, peer="sdpa-cudnn"))

# %% [markdown] slideshow={"slide_type": "slide"}
# ## 5. Write it yourself
#
# Write the body in place of `raise Blank`. `check` names what fails; `hint("03.1")` to `hint("03.1", 3)` help.
#
# **Exercise 03.1: the scores that are hidden**, where there is no key or, if CAUSAL, it stands after the query.

# %% slideshow={"slide_type": "fragment"}
@triton.jit
def mask(S, i, j, Nq, Nk, CAUSAL: tl.constexpr, Br: tl.constexpr, Bc: tl.constexpr):
    """S (Br, Bc) from query i and key j on, with -inf where it is hidden.

    Query i stands at position i + Nk - Nq.
    """
    raise Blank

check("03.1", mask)

# %% [markdown] slideshow={"slide_type": "subslide"}
# **Exercise 03.2: P and dS of one tile.** `dkdv_kernel` calls it with Sᵀ and dPᵀ. You need not transpose: `lse_2`,
# `delta`, `query` and `key` (positions) come as a column or a row that fits. S is not scaled, `scale_log2` is c of part
# 3, and `lse_2` is lse · log2(e), or +inf for a query that sees no key.

# %% slideshow={"slide_type": "fragment"}
@triton.jit
def tile_gradients(
    S, dP, lse_2, delta, query, key, Nq, Nk, scale_log2,
    MASKED: tl.constexpr, CAUSAL: tl.constexpr,
):
    """(P, dS) of one tile, from S and dP, the gradient of P; also with all transposed.

    If MASKED, P is 0 where the key is hidden. No P is above 1, but for huge scores rounding
    can make its exponent positive: limit the exponent to 0.
    """
    raise Blank

check("03.2", tile_gradients)

# %% [markdown] slideshow={"slide_type": "subslide"}
# **Exercise 03.3: one tile of keys, in base 2.** P = 2^(f S - f m), and `factor_and_shift(m, scale_log2)` gives f and f
# m of each row. Mostly f is c. But for scores of 10¹¹ the rounding of c m alone would make P infinite. So from c m =
# 2²⁶ on f is the power of two below c: then f m is exact ([03x](03x_deeper.ipynb), section 2).
#
# In a row that has seen no key m is -inf. `tl.dot` wants P in the dtype of V_j (Bc, D), and PRECISION as
# `input_precision`.

# %% slideshow={"slide_type": "fragment"}
@triton.jit
def online_update(m, l, O, S, V_j, scale_log2, PRECISION: tl.constexpr):
    """(m, l, O) after one more tile of keys, with S = Q_i K_j^T (Br, Bc), not scaled.

    factor_and_shift gets the new m, or 0 where that is -inf. l sums P before P is rounded
    to the dtype of V_j; O stays float32.
    """
    raise Blank

check("03.3", online_update)

# %% [markdown] slideshow={"slide_type": "slide"}
# ## 6. Check it, then break it
#
# Five mistakes are planted in `fwd_0_fused.py`, one at a time. Each meets five cases of the **contract**, which is what
# every stage promises. **Which mistake lives through all five? Which dies only with grouped heads?**
#
# A line names the cases that fail, and the mistake in `reference/mutants.py` that fails alike. "Beside
# the tensor" means that a load outside of it was stopped. Below stands what was changed.

# %% slideshow={"slide_type": "fragment"}
figures.mistakes_against_cases()

# %% [markdown] slideshow={"slide_type": "slide"}
# <details><summary>Answer</summary>
#
# 32-bit offsets live: only a tensor of 2³¹ elements would show them. `h % Hk` dies only with grouped heads.
#
# </details>
#
# **Bug hunt 03.bug1:** in each tile lse is wrong for the second half of the queries. `python -m steps check 03.bug1`
# tells the rest.
#
# ## 7. Predict, then measure
#
# **Question 1.** Which of the four forwards loses most by a causal mask?
#
# **Question 2.** A backward's TFLOP/s are counted as if it made five products for each pair of tiles. The kernels
# `fused` and `tma` make seven. Suppose they ran as fast as a plain matrix product: which share of its speed would their
# bars show? Whose bars may be higher?
#
# <details><summary>Answers</summary>
#
# 1. `roles`. With a mask its kernel has two loops, and the compiler divides a program's warps only if there is one.
# 2. 5/7 of it, which is printed above the bars. Kernels with five products may be higher: `gluon`, FlashAttention-4 and
#    cuDNN.
#
# </details>

# %% slideshow={"slide_type": "fragment"}
figures.speeds("forward")

# %% slideshow={"slide_type": "subslide"}
figures.speeds("backward")

# %% [markdown] slideshow={"slide_type": "slide"}
# **Where it stands** on an H100 from N = 4096 on: `gluon` is faster than cuDNN in both passes. Of FlashAttention-4's
# speed it has 0.96 to 1.03 in the forward, and 0.89 to 0.93 in the backward.
#
# ## 8. Summary
#
# - Threads, registers and barriers are the compiler's. Pointers, masks, tiles and owners stay yours.
# - The interpreter proves formulas and edges, nothing else.
# - Two kernels in the backward: seven products, no atomics, the same bits each time.
#
# **Ask yourself**
#
# 1. Why may a load fill K_j beyond the last key with 0, though a softmax needs -inf there?
#    <details><summary>Answer</summary>
#
#    `mask` sets those scores to -inf. The 0 keeps what lies beside the tensor out of the product.
#    </details>
# 2. What does `full // Bc * Bc`, at the end of `key_ranges`, do at a ragged end when there is no causal mask?
#    <details><summary>Answer</summary>
#
#    It rounds Nk down to whole tiles. The ragged tile is left to the second pass, which has the mask.
#    </details>
# 3. In what do the stage's two calls of `visit_keys` differ?
#    <details><summary>Answer</summary>
#
#    In the range of keys and in MASKED, a constexpr. The first pass compares no positions.
#    </details>
# 4. The interpreter leaves 8 in `count`. Why is that no proof?
#    <details><summary>Answer</summary>
#
#    It runs one program after the other. On a GPU several may read before one writes.
#    </details>
# 5. With 8 query heads a key head, how many programs write dK_j, and how many query tiles does each visit?
#    <details><summary>Answer</summary>
#
#    One. It visits all tiles of queries that see it, of each of the 8 heads.
#    </details>
#
# **Capstone: the forward from an empty file**, in four steps: `python -m steps check 03.capstone.1` and on.
#
# **Go further**
#
# - ★ (15 minutes, GPU) Let `triton.autotune` choose Br and Bc.
#
# **Read:** `papers/flash_attention_2.md`; Triton's tutorial.
#
# **Next:** [03b_triton_features.ipynb](03b_triton_features.ipynb): masks, windows, dropout, decoding.
