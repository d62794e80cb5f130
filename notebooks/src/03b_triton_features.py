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
# # 03b. Triton: what a transformer needs
#
# *How do masks, biases, windows, dropout, packed sequences and decoding fit into one kernel, and what does each of
# them cost?*
#
# ![Queries against keys: a window is a band, packed sequences are triangles, decoding is one row.](../notebooks/figures/question_03b.png)
#
# - **Before you start:** notebook 03a (a kernel in tiles), and of notebook 00 lse and delta. Linux.
# - **Time:** about 55 minutes to read, 60 minutes more with the exercises. To stop for today: before part 4.
# - **Code:** [`steps/step03_triton`](../steps/step03_triton/README.md): `features/`, with `flash*.py`, `scores.py`, `decode.py`;
#   [figures](../steps/course/figures/n03b_triton_features.py).
# - **Tests:** `pytest tests/test_step03_features.py tests/test_step03_decode.py`.

# %% jupyter={"source_hidden": true} slideshow={"slide_type": "skip"}
import steps  # comes first, because it chooses the engine
import math, torch, triton
import triton.language as tl
from reference import attention, philox
from steps import step03_triton as step03
from steps.course.figures import n03b_triton_features as figures
from steps.course.workbook import Blank, check, hint, show, solution
print(steps.engine.describe())

# %% [markdown] slideshow={"slide_type": "slide"}
# ## 1. The problem, measured
#
# Models ask for more than a causal mask:
#
# | what | who uses it |
# |---|---|
# | window: only near keys | Mistral 7B; half of Gemma 2's layers |
# | soft-cap: scores bounded by tanh | Gemma 2, at ±50 |
# | ALiBi: less weight with distance | BLOOM, MPT-7B |
# | additive mask, with a gradient | T5: a learned bias |
# | boolean mask | BERT: batches padded to one length |
# | dropout of P | GPT-2 |
# | sinks: one more key, of learned score and value 0 | gpt-oss |
# | packed sequences | Llama 3 |
# | one query, many keys | every model that writes text |
#
# May any of these be a tensor of the size of S? On an H200 a causal call with both passes was measured, with H = 16,
# N = 65536 and D = 128. `sdpa-cudnn` is a **peer**, another implementation on the same inputs: cuDNN, by torch's
# `scaled_dot_product_attention` (SDPA).

# %% slideshow={"slide_type": "fragment"}
figures.memory()

# %% [markdown] slideshow={"slide_type": "slide"}
# So a mask must never be expanded to all heads, and dropout must not be stored.
#
# ## 2. The idea: one function of the scores, for both directions
#
# **Claim.** Masks, windows, soft-cap and ALiBi change the scores, and nothing else. With X = Q Kᵀ, not scaled,
#
# $$S = \mathit{cap} \tanh\!\big(\tfrac{\mathit{scale}}{\mathit{cap}} X\big) + M - \mathit{slope}\,|i - j|
# \qquad\text{and } -\infty \text{ where key } j \text{ is hidden}$$
#
# with the soft-cap's bound cap and the additive mask M; without a cap it begins with scale · X. The backward needs S
# again, and its derivative:
#
# $$dX = dS \circ \Big(1 - \tanh^2\big(\tfrac{\mathit{scale}}{\mathit{cap}} X\big)\Big) \qquad dQ = \mathit{scale}\; dX\, K
# \qquad dM = dS$$
#
# The mask is added after the scale, so its gradient is dS itself, summed over whatever the mask was broadcast to.
#
# The example is notebook 00's six tokens, causal, with cap = 1.5, a slope of 0.25 and M = 0.5 for key 0.

# %% slideshow={"slide_type": "fragment"}
Q = torch.tensor([[1.0, 2], [0, 1], [-1, 0], [2, -1], [1, 1], [3, 1]])
K = torch.tensor([[0.0, 1], [1, 0], [-1, 1], [1, 2], [2, 0], [0, -1]])
V = torch.tensor([[0.0, 6], [2, 0], [4, 6], [6, 4], [8, 0], [10, 6]])
dO = torch.tensor([[1.0, 0], [0, 1], [1, 1], [2, 0], [0, -1], [1, -1]])
scale, cap, slope = 1 / math.sqrt(2), 1.5, 0.25
M = torch.tensor([0.5, 0, 0, 0, 0, 0]).expand(6, 6)
distance = (torch.arange(6)[:, None] - torch.arange(6)).abs()

def scores(X, M, slope):
    """(S, dS/dX), where dS/dX leaves out the factor scale."""
    t = torch.tanh(scale / cap * X)
    S = cap * t + M - slope * distance
    return S.where(attention.visible(6, 6, causal=True), -torch.inf), 1 - t * t

# %% slideshow={"slide_type": "fragment"}
X = Q @ K.T
S, derivative = scores(X, M, slope)
lse, O = S.logsumexp(-1), S.softmax(-1) @ V
delta = (dO * O).sum(-1)

def gradients(S, derivative):
    """(P, dQ, dM) by the formulas."""
    P = (S - lse[:, None]).exp()
    dS = P * (dO @ V.T - delta[:, None])
    return P, scale * (dS * derivative) @ K, dS

# %% slideshow={"slide_type": "fragment"}
Q_leaf, M_leaf = Q.clone().requires_grad_(), M.clone().requires_grad_()
P = scores(Q_leaf @ K.T, M_leaf, slope)[0].softmax(-1)
want = torch.autograd.grad(P @ V, (Q_leaf, M_leaf), dO)
print("derivative forgotten:  row 5 of dQ", gradients(S, 1.0)[1][5], "not", want[0][5])
print("ALiBi forward only:    rows of P sum to", gradients(*scores(X, M, 0))[0].sum(-1))
_, dQ, dM = gradients(S, derivative)
right = torch.allclose(dQ, want[0], atol=1e-5), torch.allclose(dM, want[1], atol=1e-5)
print("one function for both: dQ and dM as autograd's", right)
figures.row_of_scores(5, scale * X, cap, M, S, derivative)

# %% [markdown] slideshow={"slide_type": "slide"}
# The cap brings the scores of keys 3 and 4 from 3.54 and 4.24 to 1.47 and 1.49. There the derivative is 0.04 and 0.01:
# whoever forgets it gets a dQ that is far too large.
#
# ## 3. From algorithm to code
#
# `flash_kernels.py` is 03a's rung `tma` with calls of `scores.py`, the same in both directions: `tile_ranges` says
# which tiles are visited, `scores` gives S and dS/dX, `kept` says which P dropout keeps.
#
# In the listing `f` holds the features. One that is off is `None`, and the compiler leaves its branch out. `f.policy`
# holds what the launcher chose, such as a fast tanh for 16-bit tensors. exp becomes 2^(c S - c m); without features c
# is 03a's scale · log2(e). `seq.shift` is Nk - Nq. A finite entry of the mask below `MASK_FLOOR`, -2¹⁰¹, counts as that
# number ([03x](03x_deeper.ipynb), section 3).

# %% slideshow={"slide_type": "fragment"}
show("step03_triton/features/scores", "scores")

# %% [markdown] slideshow={"slide_type": "slide"}
# ### A window is no mask
#
# With `window=(left, right)` query i sees the keys from i - left to i + right. Causal is right = 0. A tile that no row
# sees is not visited (white). One that *every* row sees whole needs no comparison (blue), the others do (orange). With
# a window, work grows like N and not like N².

# %% slideshow={"slide_type": "fragment"}
figures.windows()

# %% [markdown] slideshow={"slide_type": "slide"}
# ### A mask is read by its strides
#
# A padding mask (8, 1, 1, 24), expanded to (8, 4, 24, 24), has the strides (24, 0, 0, 1): 0 where it was broadcast.
# That takes no memory.
#
# ### Dropout without memory: Philox
#
# The backward must drop what the forward dropped, in tiles of another shape. **Philox** has no state: it turns a
# *counter* of four numbers and a seed into sixteen random bytes. Here the counter is (key div 16, query, head, batch),
# and each byte decides for one key: keep (x) where it is less than t = round(256 (1 - p)), with p the share that is
# dropped.

# %% slideshow={"slide_type": "fragment"}
seed, p, t = 7, 0.3, philox.threshold(0.3)
for counter in ((0, 5, 0, 0), (1, 5, 0, 0), (0, 6, 0, 0)):
    words = philox.philox(counter, key=(seed, 0))
    numbers = b"".join(int(word).to_bytes(4, "little") for word in words)
    print(counter, numbers.hex(" "), "".join(".x"[byte < t] for byte in numbers))

# %% [markdown] slideshow={"slide_type": "slide"}
# Counted from the tile, keys 16 to 31 would repeat the first line, and the backward, with other tiles, would draw
# another mask. Dropout comes **after** the sum l, since it is defined on the finished softmax. What is kept is
# multiplied by 256/t, about 1/(1 - p), so that out keeps its mean.
#
# ### Packed sequences
#
# Sequences of unequal length lie behind each other in one tensor with B = 1. `cu_seqlens`, the cumulative sum of their
# lengths, says where each begins; positions count from there. The grid is made for the longest, `max_seqlen`.

# %% slideshow={"slide_type": "fragment"}
torch.manual_seed(0)
device = steps.engine.device
q, k, v = torch.randn(3, 1, 2, 24, 16).to(device)
cu = torch.tensor([0, 7, 7, 19, 24], dtype=torch.int32).to(device)  # lengths 7, 0, 12, 5
packed = dict(cu_seqlens_q=cu, cu_seqlens_k=cu, max_seqlen_q=12, max_seqlen_k=12)
out, _ = step03.forward(q, k, v, causal=True, **packed)
for start, end in ((0, 7), (7, 19), (19, 24)):
    alone, _ = step03.forward(*(x[:, :, start:end] for x in (q, k, v)), causal=True)
    away = (out[:, :, start:end] - alone).abs().max()
    print(f"rows {start:2} to {end - 1:2}: {away:.0e} from the sequence alone")

# %% [markdown] slideshow={"slide_type": "slide"}
# ### A part of the keys at a time, and sinks
#
# `out` and `lse` of earlier calls can be handed in, and are overwritten. What they stand for counts as **one key of
# score lse and value out**, which the online softmax takes in like any other. A **sink** is such a key, too, with value
# 0: a row may give weight to nothing. Here it is handed in as the first part. The mask is causal, so a row is finished
# as soon as its own key has come:

# %% slideshow={"slide_type": "fragment"}
sinks = torch.tensor([-1.0, 2.0], device=device)  # one of each head
whole, _ = step03.forward(q, k, v, causal=True, sinks=sinks)
out, lse = torch.zeros_like(q), sinks[:, None].expand(q.shape[:3]).contiguous()
for first, end in ((0, 5), (5, 16), (16, 24)):
    part = dict(causal=True, first_query=0, first_key=first, out=out, lse=lse)
    step03.forward(q, k[:, :, first:end], v[:, :, first:end], **part)
    away = (out - whole).abs().amax((0, 1, 3))
    print(f"keys to {end:2}: {(away < 1e-5).sum()} of 24 rows are as with sinks=")

# %% [markdown] slideshow={"slide_type": "slide"}
# ### Decoding with a KV cache
#
# To write a token, each head has one query and reads all of its K and V. In `decode.py` the query heads that share a
# key head are *one* tile (of 16 rows at least, which a tensor core wants), so K and V are read once. Reading them is
# what takes the time, so that empty rows of the tile cost nothing.
#
# The keys are **split** over the multiprocessors, and a second kernel **merges** the parts, each with the weight
# exp(lse of the part - lse of all).
#
# The cache is allocated once, and `lengths_k` says how much of it each sequence has filled.

# %% slideshow={"slide_type": "fragment"}
q, (k, v) = torch.randn(2, 4, 8, 16).to(device), torch.randn(2, 2, 2, 8, 16).to(device)
cache_k, cache_v = torch.zeros(2, 2, 2, 64, 16).to(device)  # room for 64 tokens
lengths = torch.zeros(2, dtype=torch.int32, device=device)
tokens = []
for t in range(8):
    cache_k[:, :, t], cache_v[:, :, t] = k[:, :, t], v[:, :, t]
    lengths += 1
    tokens += [step03.attention(q[:, :, t : t + 1], cache_k, cache_v, lengths_k=lengths)]
away = (torch.cat(tokens, 2) - step03.attention(q, k, v, causal=True)).abs().max()
print(f"8 tokens one by one: {away:.0e} from all at once")

# %% [markdown] slideshow={"slide_type": "slide"}
# ## 4. Write it yourself
#
# **Exercise 03.4: the tiles that a sliding window visits.** The last query stands at the last key. Visit the tiles from
# `begin` on and before `whole` with a mask, then those before `full` without one, then those before `end` with one.

# %% slideshow={"slide_type": "fragment"}
@triton.jit
def window_tiles(i, left, right, Nq, Nk, Br: tl.constexpr, Bc: tl.constexpr):
    """(begin, whole, full, end): which tiles of Bc keys the Br queries from i on visit.

    They are numbers of tiles: tile t has the keys t Bc to t Bc + Bc - 1. left, right >= 0.
    If no tile is seen whole, as in a window narrower than a tile, full = whole.
    """
    raise Blank

check("03.4", window_tiles)

# %% [markdown] slideshow={"slide_type": "subslide"}
# **Exercise 03.5: the same dropout mask from every tile.** `tl.philox(seed, c0, c1, c2, c3)` gives the four words of
# each counter. `row` and `column` count from i and j. Their shapes are (Br, 1) and (1, Bc), or (1, Br) and (Bc, 1) if
# the tile is transposed.

# %% slideshow={"slide_type": "fragment"}
@triton.jit
def kept(seed, i, j, row, column, head, batch, threshold):
    """Which entries of the tile at query i and key j dropout keeps, transposed or not.

    Key k takes byte k mod 16: of word (k div 4) mod 4 byte k mod 4, the lowest one first.
    It is kept where that byte is less than threshold.
    """
    raise Blank

check("03.5", kept)

# %% [markdown] slideshow={"slide_type": "subslide"}
# **Exercise 03.6: the gradient of a mask that many heads share** has no cell, since it calls other functions of its
# file. `python -m steps check 03.6` writes that file.
#
# **Exercise 03.7: one result from many parts of the keys.** A part without a key has out_s = 0 and lse_s = -inf.

# %% slideshow={"slide_type": "fragment"}
@triton.jit
def merge_parts(out_s, lse_s):
    """(out (D,), lse) of one query, from out_s (parts, D) and lse_s (parts,)."""
    raise Blank

check("03.7", merge_parts)

# %% [markdown] slideshow={"slide_type": "slide"}
# **Bug hunt 03.bug2:** dropout is right on average, and training fails: `python -m steps check 03.bug2`.
#
# ## 5. Check it, then break it
#
# Six mistakes are planted in turn. A line says which results are wrong; below stands the change. **Which mistake shows
# in lse alone?**

# %% slideshow={"slide_type": "fragment"}
figures.mistakes_against_results()

# %% [markdown] slideshow={"slide_type": "slide"}
# The derivative and the scale of dP show in dq and dk alone, so a test of the forward passes. Where the mask is causal,
# ALiBi of the key alone adds one number to a whole row: the softmax removes it, lse does not. A symmetric mask cannot
# show a transposition.
#
# ## 6. Predict, then measure
#
# **Question 1.** Which costs most: an additive mask, ALiBi, a soft-cap or dropout?
#
# **Question 2.** A window of N/8 to the left: at most how many times faster than causal attention?
#
# <details><summary>Answers</summary>
#
# 1. Dropout: Philox makes ten rounds of integer products. Then the mask, whose entries are loaded. The soft-cap adds a
#    tanh.
# 2. Causal visits 1/2 of all tiles, the window 1/8 less the 1/128 that its first rows lack, and more where tiles of 64
#    hang over its edges: a factor of 4.2. Measured were 3.7 and 4.2 in the forward, and 4.3 and 4.2 in the backward
#    (head_dim 64 and 128), with another kernel for the window than for causal.
#
# </details>
#
# In the first picture `a / b` is a's time divided by b's, and a alone is divided by the time without features. `packed`
# are 8 sequences of equal length, and `padded` the same 8 as a batch (H200, bfloat16, N = 16384). The pink bars are of
# faster kernels, in Gluon ([03y](03y_deeper.ipynb), section 7). How much that saves the bar of sinks shows, which by
# themselves cost next to nothing. In the backward Gluon also makes one sweep of five products, with dropout too; in
# Triton there are seven.
#
# The second compares with FlashAttention-4 and with torch's FlexAttention, which compiles a Python function of the
# scores into a kernel. `causal` alone is not in it: 03a's rungs compute that. (No bar: not measured. For head_dim 64:
# `costs(64)`, `beside_peers(64)`.)

# %% slideshow={"slide_type": "fragment"}
figures.costs()

# %% slideshow={"slide_type": "fragment"}
figures.beside_peers()

# %% [markdown] slideshow={"slide_type": "subslide"}
# FlashAttention-4 is faster with windows and with sinks. It is slower with a soft-cap, and with packed sequences,
# except in the forward of packed sequences at head_dim 64, where it is 1 % faster.
#
# In decoding memory is the limit: a copy of as many bytes takes as long.

# %% slideshow={"slide_type": "fragment"}
figures.decoding()

# %% [markdown] slideshow={"slide_type": "slide"}
# Decoding is as fast as cuDNN's, within 1 %.
#
# ## 7. In your training loop
#
# A layer over packed documents, with three things to know:
#
# - `cu_seqlens` is int32 and lies where q does. `max_seqlen` is a Python number, since reading it back would wait for
#   the GPU.
# - A window of W keys is `(W - 1, 0)`: the query's own key counts.
# - The layout is (B, H, N, D), and not flash_attn's (B, N, H, D).

# %% slideshow={"slide_type": "subslide"}
class Attention(torch.nn.Module):  # 4 query heads and 2 key heads of 16 numbers
    def __init__(self, width=64, window=16):
        super().__init__()
        self.qkv, self.window = torch.nn.Linear(width, 8 * 16), (window - 1, 0)

    def forward(self, x, cu, n):  # x (tokens, width); the longest sequence has n tokens
        heads = self.qkv(x).unflatten(-1, (8, 16)).transpose(0, 1)[None]  # (1, 8, tokens, 16)
        q, k, v = heads.split((4, 2, 2), dim=1)
        how = dict(causal=True, window=self.window, dropout_p=0.1 if self.training else 0.0)
        how |= dict(cu_seqlens_q=cu, cu_seqlens_k=cu, max_seqlen_q=n, max_seqlen_k=n)
        out = step03.attention(q, k, v, **how)
        return x + out[0].transpose(0, 1).flatten(1)

# %% slideshow={"slide_type": "fragment"}
torch.manual_seed(0)
parts = torch.nn.Embedding(32, 64), Attention(), torch.nn.Linear(64, 32)
embed, attend, head = model = torch.nn.ModuleList(parts).to(device)
documents = [torch.arange(n) ** 2 % 31 for n in (20, 33, 9)]
tokens, lengths = torch.cat(documents).to(device), [len(one) for one in documents]
cu_seqlens = torch.tensor([0, *lengths]).cumsum(0).to(device, torch.int32)
labels = tokens.roll(-1).index_fill(0, cu_seqlens[1:].long() - 1, -100)  # the last has no next
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
for step in range(5):
    logits = head(attend(embed(tokens), cu_seqlens, max(lengths)))
    loss = torch.nn.functional.cross_entropy(logits, labels)  # leaves out -100
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    print(f"step {step}: loss {loss.item():.2f}")

# %% [markdown] slideshow={"slide_type": "slide"}
# ### In a model that exists
#
# Within `step03.use_in_sdpa()` torch's own `scaled_dot_product_attention` computes with these kernels. In transformers
# `register_with_transformers()` gives a name for `attn_implementation=`.
#
# **At which level is an operation replaced?** Here torch's operator is: a **checker** (`takes` in `models.py`) says for
# each call whether these kernels compute it, else torch does. Lightning Thunder calls kernels with their checker an
# **executor**. One level lower torch has already chosen its kernel; one higher, each model must be edited.
#
# **Which of these calls does the checker refuse?** Refused means that torch computes it, if it can. No kernel takes
# float64 or a head_dim above 256.

# %% slideshow={"slide_type": "fragment"}
x = torch.ones(1, 2, 8, 64, device=device)
mask = torch.ones(8, 8, dtype=torch.bool, device=device)
for call, q, arguments in (  # attn_mask, dropout_p, is_causal
    ("a mask and dropout", x, (mask, 0.1, False)),
    ("a mask, and is_causal", x, (mask, 0.0, True)),
    ("float64", x.double(), (None, 0.0, True)),
    ("head_dim 512", x.repeat(1, 1, 1, 8), (None, 0.0, True)),
):
    ours = step03.features.models.takes(q, q, q, *arguments, scale=None)
    print(f"{call:22} computed by {'our kernels' if ours else 'torch'}")

# %% [markdown] slideshow={"slide_type": "slide"}
# ## 8. Summary
#
# - One function, `scores`, for both directions. A mask is read by strides, never expanded.
# - Dropout is a function of seed, batch, head, query and key.
# - out and lse stand for all their keys: parts of keys, sinks and splitting are one idea.
#
# **Ask yourself**
#
# 1. transformers' Mistral has `sliding_window=4096`. Which `window` is that?
#    <details><summary>Answer</summary>
#
#    `(4095, 0)`: the query's own key counts.
#    </details>
# 2. Why has the gradient of the mask no factor scale, and that of q one?
#    <details><summary>Answer</summary>
#
#    The mask is added after the scale.
#    </details>
# 3. How does a sink change lse, and out?
#    <details><summary>Answer</summary>
#
#    lse becomes log(exp(lse) + exp(sink)), and out is multiplied by exp(old lse - new lse): it shrinks.
#    </details>
# 4. Dropout counts keys from the tile. Why does it pass a test in which forward and backward have equal tiles?
#    <details><summary>Answer</summary>
#
#    Both draw the same wrong mask.
#    </details>
# 5. `decode.py` computes at least 16 rows, for 4 query heads a key head. Why do the other 12 cost nothing?
#    <details><summary>Answer</summary>
#
#    Tensor cores take 16 rows anyway, and wait for K and V.
#    </details>
#
# **Go further**
#
# - ★ (15 minutes) What is the gradient of a sink, from lse and delta alone? Compare with the last of
#   `step03.backward(..., sinks=sinks)`.
#
# **Read:** Gemma 2 (2408.00118); ALiBi (2108.12409); Philox: Salmon and others, SC 2011.
#
# **Next:** [04a_ring.ipynb](04a_ring.ipynb), where the keys are divided among GPUs, and merged by lse.
