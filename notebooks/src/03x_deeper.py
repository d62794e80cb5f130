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
# # 03x. Going deeper: what Triton decides
#
# *What does a compiler make of a kernel in Triton, where does rounding change a result, and what can other compilers do?*
#
# ![Ladders of stage 03's kernels, forward and backward, beside cuDNN and FlashAttention-2, -3 and -4 on an H100: in
# both rung gluon is the highest of ours.](../notebooks/figures/ladder_triton.png)
#
# - **Before you start:** notebook 03a, and 03b for sections 3 and 6. Each section can be read alone.
# - **Time:** about 40 minutes to read, six sections. Nothing here needs a GPU. Speeds are an H100's where nothing else
#   is said.
# - **Code:** [`steps/step03_triton`](../steps/step03_triton/README.md), and what compiles,
#   [`n03x_deeper.py`](../steps/course/figures/n03x_deeper.py).
# - **Tests:** `pytest tests/test_step03_triton.py tests/test_step03_features.py`.
#
# 1. What tensor descriptors save
# 2. One rounding instead of two
# 3. A mask that swallows the scores
# 4. The formula under `torch.compile`
# 5. Roles by one argument, and their trap
# 6. The same scores in FlexAttention
#
# The highest rung, in Gluon, has a notebook of its own, [03y_deeper.ipynb](03y_deeper.ipynb).

# %% jupyter={"source_hidden": true} slideshow={"slide_type": "skip"}
import steps  # comes first, because it chooses the engine
import torch
from torch.nn.attention import flex_attention as flex
from reference import attention
from steps import step03_triton as step03
from steps.course.figures import measured, n03x_deeper as figures
from steps.course.workbook import show
print(steps.engine.describe())

# %% [markdown] slideshow={"slide_type": "slide"}
# ## 1. What tensor descriptors save
#
# Rung `fused` computes an address for each number that it loads. Rung `tma` has a *tensor descriptor*, the one of TMA: it
# says once where a tensor lies, and how large a **box** is, the part that one copy brings. A copy then names the
# **coordinates** of the box: the batch entry, the head and the first row. (wgmma's descriptor of an operand in shared
# memory is another one. Triton makes it unseen.)
#
# Both rungs are compiled here for an H100 with the same tile, 64 x 64 at D = 128, and their machine instructions are
# counted. **Predict:** which groups of instructions shrink?

# %% slideshow={"slide_type": "fragment"}
figures.descriptors()

# %% [markdown] slideshow={"slide_type": "subslide"}
# Products and exponentials are the same. Two thirds of the integer work goes, and most of the copies' instructions, and
# the registers that held pointers. Register counts belong to a compiler: these are Triton 3.7.1's. And the speed, where `fa3` is
# FlashAttention-3:

# %% slideshow={"slide_type": "fragment"}
for kernel in ("fwd_0_fused", "fwd_1_tma"):
    print(measured.rung(kernel, gpu=measured.H100))

# %% [markdown] slideshow={"slide_type": "slide"}
# ## 2. One rounding instead of two
#
# A kernel computes P = 2^(c S - c m), where c is scale · log₂(e). The compiler makes one *fused multiply-add* of c S - c m,
# which rounds once, at the end: c S enters exactly. But c m was computed before, and is rounded. So at S = m, where the
# exponent should be 0, it is the rounding error of c m.
#
# **Predict:** how large can P become at S = m, for scores of 10⁸? Numbers in float64 stand for the exact product.

# %% slideshow={"slide_type": "fragment"}
c = torch.tensor(1.4426950408889634 / 128**0.5)  # log2(e), and the scale of D = 128
power_of_two = c.log2().floor().exp2()  # the next one below c
for size in (1e2, 1e5, 1e8, 1e11):
    m = size * (1 + torch.rand(1000, generator=torch.Generator().manual_seed(0)))
    for name, factor in {"c": c, "power of two": power_of_two}.items():
        exponent = m.double() * factor.double() - (m * factor).double()
        P = exponent.max().exp2().float()
        print(f"m about {size:.0e}, factor {name:12}: largest P at S = m is {P:.6g}")

# %% [markdown] slideshow={"slide_type": "subslide"}
# At 10⁸ P may be 2 instead of 1. Then all of its row is twice as large, and l, too, so that out is right. At 10¹¹ P is
# infinite, and out is NaN. So from c m = 2²⁶ on the kernels take the power of two below c. A product with a power of two
# is exact. The interpreter rounds twice, and shows nothing of this.

# %% slideshow={"slide_type": "fragment"}
show("step03_triton/fwd_0_fused", "factor_and_shift")

# %% [markdown] slideshow={"slide_type": "slide"}
# ## 3. A mask that swallows the scores
#
# Many libraries hide keys by adding the most negative finite number to their scores, instead of -inf. If a whole row is
# masked so, the mask swallows the scores: score + mask rounds to the mask, and all keys count alike. torch's SDPA returns
# the mean of V there.
#
# A kernel that stores lse = m + log l meets a second rounding. log l is lost beside m, so in the backward
# P = exp(S - lse) would add up to the number of keys instead of 1:

# %% slideshow={"slide_type": "fragment"}
torch.manual_seed(0)
lowest = torch.finfo(torch.float32).min
S_row = torch.tensor([0.3, -1.2, 2.0, 0.5]) + lowest
P = (S_row - S_row.logsumexp(0)).exp()
print(f"{len(S_row.unique())} different score of 4; P adds up to {P.sum():.0f}")

# %% [markdown] slideshow={"slide_type": "fragment"}
# Three queries and four keys in the stage's kernels. The mask of the first query is 0, that of the second is the lowest
# number, and that of the third -inf:

# %% slideshow={"slide_type": "fragment"}
q, dout = torch.randn(2, 1, 1, 3, 16).to(steps.engine.device)
k, v = torch.randn(2, 1, 1, 4, 16).to(q)
mask = torch.zeros(3, 4).to(q)
mask[1], mask[2] = lowest, -torch.inf
out, lse = step03.forward(q, k, v, mask=mask)
dv = step03.backward(dout, q, k, v, out, lse, mask=mask)[2]
want = attention.backward(dout, q, k, v, mask=mask)[2]
print("lse of the three queries", [f"{x:.3g}" for x in lse[0, 0].tolist()])
print("dv as in float64:", torch.allclose(dv.double(), want, atol=1e-5))

# %% [markdown] slideshow={"slide_type": "subslide"}
# The kernel counts such a mask as -2¹⁰¹ (`MASK_FLOOR`). In such a row it stores m · l instead of m + log l: four keys at
# -2¹⁰¹ give -2¹⁰³, or -1.01e+31. The backward divides by -2¹⁰¹ and has l. Only -inf hides a key for certain: then out is
# 0 and lse -inf.

# %% [markdown] slideshow={"slide_type": "slide"}
# ## 4. The formula under torch.compile
#
# What does `torch.compile` make of plain attention, the formula with its N x N matrix? These are rows of one run on an
# H200, bfloat16, D = 128, N = 16384. **Predict:** is it nearer to cuDNN without or with a causal mask?

# %% slideshow={"slide_type": "fragment"}
figures.compiled_formula()

# %% [markdown] slideshow={"slide_type": "subslide"}
# Inductor, the compiler behind `torch.compile`, knows the plain formula as a pattern, and calls torch's SDPA in its place.
# A mask by `masked_fill` fits no pattern. Then both products are calls of a library. What lies between them becomes a
# kernel in Triton, which takes a whole row at a time. S and P go through memory, and no tile above the diagonal is
# skipped. `TORCH_LOGS=output_code python FILE.py` shows what Inductor writes.

# %% [markdown] slideshow={"slide_type": "slide"}
# ## 5. Roles by one argument, and their trap
#
# While a warp computes exponentials it does not multiply. Rung `roles` gives the warps of one program different work. Its
# text says so in one place: the loop over keys is `tl.range(..., warp_specialize=True)`. The compiler divides the program
# into **partitions**: a warp that copies K and V, and two groups of four warps that compute, with 64 rows of the tile each.
#
# The compiler does so on conditions that it does not name. The tensor descriptors must be made in the kernel. And there may
# be one loop only, so a causal mask, which takes a second loop, is no option. **Predict:** where can this rung not be
# better than `tma`?

# %% slideshow={"slide_type": "fragment"}
print(figures.shares("fwd_2_roles", "fwd_1_tma"))

# %% [markdown] slideshow={"slide_type": "subslide"}
# With a causal mask, and at D = 64, the program is not divided. Then the rung does what `tma` does, but every program makes
# its descriptors anew. So it is slower.
#
# ### The trap
#
# The compiler works in steps, and each step gives a text that can be read. **TTGIR** is Triton's text for GPUs. One line of
# it names the result of one operation: `%row = tt.make_range {start = 64, end = 128}` are the numbers from 64 to 127.
#
# The second group has the rows i + 64 to i + 127 of Q, and must write these rows of lse. The cell prints the lines of its
# partition that add 64 to a part of lse's address: first of the file as it is, then of a copy that computes the address
# as `fwd_1_tma.py` does. **Predict:** how many such lines should there be?

# %% slideshow={"slide_type": "fragment"}
figures.roles()

# %% [markdown] slideshow={"slide_type": "subslide"}
# One line is right, two are wrong. To make the second group, the compiler adds 64 in two places:
#
# - to `row`, because it is a tile of row numbers;
# - to `i`, where `i` is a coordinate of Q's tensor descriptor. The text names that sum `%Q_i`, after the tile that is loaded.
#
# In the copy `row` is i + 0, i + 1 and so on, so that both places change it. The second group writes to rows i + 128 to
# i + 191, and nobody writes rows i + 64 to i + 127. No message says so. In the file as it is, `row` counts from the tile's
# beginning, and `i` is added to the pointer, where the compiler leaves it as it is.

# %% [markdown] slideshow={"slide_type": "slide"}
# ## 6. The same scores in FlexAttention
#
# torch's FlexAttention takes two functions, as stage 03 takes options (03b): `score_mod` changes a score, and `mask_mod`
# hides pairs, from which follows which tiles are skipped. `torch.compile` makes one kernel of them. Called without it, as
# here, FlexAttention makes the whole matrix. The cell computes a soft-cap, a bias with a gradient, and a window, by
# FlexAttention and by stage 03.

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
print(f"out is apart by {(theirs - ours).abs().max():.0e}")
gradients = [torch.autograd.grad(out.sum(), bias)[0] for out in (theirs, ours)]
print(f"dbias is apart by {(gradients[0] - gradients[1]).abs().max():.0e}")

# %% [markdown] slideshow={"slide_type": "subslide"}
# FlexAttention takes any formula of the scores. It has no dropout, which comes after the softmax. On a GPU it adds up the
# bias's gradient by atomics, in any order. In stage 03 one program owns each entry of it.

# %% [markdown] slideshow={"slide_type": "slide"}
# ## 7. Check yourself
#
# **Ask yourself**
#
# 1. Why does a tensor descriptor save registers?
#    <details><summary>Answer</summary>
#
#    With pointers a thread keeps an address for each number that it loads. With a descriptor it names the first row of a box.
#    </details>
# 2. P is 2 instead of 1 at the largest score. Why is out right all the same?
#    <details><summary>Answer</summary>
#
#    All of the row's P are twice as large, and so is l. out is their quotient.
#    </details>
# 3. All scores of a row are masked by the lowest finite number. Why can the backward not use lse = m + log l?
#    <details><summary>Answer</summary>
#
#    m + log l rounds to m. Then exp(S - lse) is 1 for each key, and P adds up to their number.
#    </details>
# 4. Why is plain attention with `masked_fill` slow under `torch.compile`?
#    <details><summary>Answer</summary>
#
#    Inductor does not know it as attention. S and P go through memory, and hidden tiles are computed, too.
#    </details>
# 5. Why do half of the rows of lse stay unwritten if `i` is a part of `row` in rung `roles`?
#    <details><summary>Answer</summary>
#
#    The compiler adds 64 to `row` and to the coordinate `i`. So the second group's rows move by 128.
#    </details>
#
# **Read on:** [03y_deeper.ipynb](03y_deeper.ipynb), a kernel that decides more of this itself.
