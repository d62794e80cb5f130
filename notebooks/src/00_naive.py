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
# # 00. Attention, from three loops to tiles
#
# *What does attention compute, what does it cost, and how can it be done without ever storing the N x N matrix?*
#
# ![Left, the 48 x 48 weights of 48 tokens. Right, tiles of 16 x 16 are visited row by row; m, l and O of their queries
# are carried along.](../notebooks/figures/question_00.png)
#
# - **Before you start:** matrix products, `exp` and `log`, a first idea of gradients. No GPU. (The **engine**, named by
#   the first cell, runs **kernels**, a GPU's programs.)
# - **Time:** about 55 minutes to read, 60 minutes more with the exercises. A good place to stop for today: after part 4.
# - **Code:** [`steps/step00_naive`](../steps/step00_naive/__init__.py), the first of five **stages**. Each version, or
#   **rung**, adds one idea.
# - **Tests:** `pytest tests/test_step00_naive.py`. **Symbols:** [reference/symbols.md](../reference/symbols.md).
#   **Terms:** [reference/glossary.md](../reference/glossary.md).

# %% jupyter={"source_hidden": true} slideshow={"slide_type": "skip"}
import steps  # comes first, because it chooses the engine
import math
import torch
from steps.course.figures import n00_naive as figures
from steps.step00_naive import fwd_0_loops, fwd_1_matrix, fwd_2_online, fwd_3_tiled
from steps.course.workbook import Blank, check, hint, show, solution  # noqa: F401

print(steps.engine.describe())

# %% [markdown] slideshow={"slide_type": "slide"}
# ## 1. A soft lookup
#
# A dictionary returns the value whose key equals the query. Attention returns a mean of *all* values, weighted by how
# well their keys match the query:
#
# $$S = \mathit{scale}\; Q K^\top \qquad P_{ij} = \frac{e^{S_{ij}}}{\sum_{j'} e^{S_{ij'}}} \qquad O = P V$$
#
# The rows of Q, K and V are queries, keys and values, each with d numbers. The **score** $S_{ij}$ says how well query i
# matches key j, and **softmax** turns a row of scores into weights that add up to 1. The scale, by default $1/\sqrt d$,
# keeps scores from growing with d.
#
# In self-attention all three come from the same N **tokens**, the pieces of a text: a token has a query, a key and a
# value of its own. Here the tokens are 6 animals, d = 2, and the values are points in the plane. (In a classifier's
# last layer the keys would be the **class embeddings**, and P the probabilities.)

# %% slideshow={"slide_type": "fragment"}
torch.set_printoptions(precision=2, sci_mode=False)
names = ["sparrow", "frog", "eagle", "gull", "trout", "mole"]
# How much each animal is at home in (water, air).
K = torch.tensor([[0.0, 1], [1, 0], [-1, 1], [1, 2], [2, 0], [0, -1]])
V = torch.tensor([[0.0, 6], [2, 0], [4, 6], [6, 4], [8, 0], [10, 6]])
Q = torch.tensor([[1.0, 2], [0, 1], [-1, 0], [2, -1], [1, 1], [3, 1]])
scale = 1 / math.sqrt(2)
S = scale * Q @ K.T  # (N, N)
P = S.exp() / S.exp().sum(-1, keepdim=True)  # (N, N)
O = P @ V  # (N, d)
for j, name in enumerate(names):
    print(f"key {j} {name:8} q5 . k{j} = {Q[5] @ K[j]:2.0f}", end="   ")
    print(f"S[5,{j}] = {S[5, j]:5.2f}   P[5,{j}] = {P[5, j]:.2f}")
print(f"O[5] = {O[5]}; S[5,4] - S[5,3] = {S[5, 4] - S[5, 3]:.2f}", end=", ")
print(f"P[5,4] / P[5,3] = {P[5, 4] / P[5, 3]:.2f}")

# %% slideshow={"slide_type": "subslide"}
figures.soft_lookup(names, Q, K, V)

# %% [markdown] slideshow={"slide_type": "subslide"}
# ### What the numbers say
#
# Query 5, the mole's, is (3, 1): it asks for much water and some air. The trout fits it best, with a score of 4.24,
# then the gull with 3.54. A difference of 0.71 between scores is a factor of $e^{0.71} = 2.03$ between weights. The
# result is (6.83, 1.34).
#
# ### Number by number
#
# The matrix products hide three loops: over queries, keys, and the d numbers of a row. Rung 0,
# [`fwd_0_loops.py`](../steps/step00_naive/fwd_0_loops.py), has them in plain Python.

# %% slideshow={"slide_type": "fragment"}
rows = (x.tolist() for x in (Q, K, V))
by_loops, _ = fwd_0_loops.attend(*rows, causal=False, scale=scale)
torch_own = torch.nn.functional.scaled_dot_product_attention(Q[None], K[None], V[None])[0]
print("row 5:", torch.tensor(by_loops[5]), end="  ")
print("as torch's own:", torch.allclose(torch.tensor(by_loops), torch_own))

# %% [markdown] slideshow={"slide_type": "slide"}
# ## 2. What it costs
#
# Q, K, V and O have $N d$ numbers each, S and P have $N^2$. A model computes many such attentions side by side, H
# **heads** for each of B sequences.
#
# Rung 1, `fwd_1_matrix.py`, is the matrix form. Its **peak memory** is what all tensors that it makes take together at
# the worst moment; its inputs are not counted. **By which factor does the peak grow when N doubles?**

# %% slideshow={"slide_type": "fragment"}
for N in (128, 256, 512, 1024, 2048):
    MiB = figures.peak_bytes(fwd_1_matrix.forward, N) / 2**20
    print(f"N = {N:4}: {MiB:6.2f} MiB = {MiB * 2**18 / N**2:.2f} N^2 floats", end="; ")
    print(f"q, k, v and out: {16 * N * 64 / 2**20:.2f} MiB")
print(f"S of one head at N = 16384: {4 * 16384**2 / 2**30:.0f} GiB")

# %% [markdown] slideshow={"slide_type": "slide"}
# ## 3. A softmax that never sees its whole row
#
# The peak grows by 4, as $N^2$ does. At the worst moment four N x N matrices exist: S, its exponentials, these divided
# by their row's sum, and P, in which rows that see no key are 0. The $N^2$ *operations* are attention itself and stay.
# The
# $N^2$ *memory* can go, if softmax can do without its whole row of scores, and the backward without P.
#
# ### First, it must not overflow
#
# As the formula stands, softmax fails for large scores: exp becomes inf, and inf / inf is NaN.
#
# **Claim 1.** Softmax does not change when all scores of a row are reduced by the same number m: the factor $e^{-m}$
# cancels. Let m be the row's maximum. Then nothing overflows, and the sum $l = \sum e^{s_j - m}$ is at least 1.
#
# **Claim 2.** $P_{ij} = e^{S_{ij} - \mathit{lse}_i}$ with the row's **log-sum-exp**,
# $\mathit{lse} = \log \sum_j e^{s_j} = m + \log l$. One number for each row gives back any weight from its score alone.

# %% slideshow={"slide_type": "fragment"}
def naive_softmax(s):
    return s.exp() / s.exp().sum()


s = S[5]
print("naive, scores x 50:", naive_softmax(50 * s))
print("safe,  scores x 50:", naive_softmax(50 * s - (50 * s).max()))
m = s.max()
l = (s - m).exp().sum()
lse = m + l.log()
print("claim 1:", torch.allclose(naive_softmax(s - m), naive_softmax(s)))
print(f"l = {l:.3f}, lse = m + log l = {lse:.3f}")
print("claim 2:", torch.allclose((s - lse).exp(), naive_softmax(s)))
print(f"P[5,4] alone: exp({s[4]:.3f} - {lse:.3f}) = {(s[4] - lse).exp():.3f}")

# %% [markdown] slideshow={"slide_type": "subslide"}
# ### Exercise 00.1: a softmax that cannot overflow
#
# Write softmax by both claims, for all rows at once, in place of `raise Blank`, and run the cell: `check` names what
# fails. A key that a query may not see has the score -inf. In some rows all keys have it.
#
# `hint("00.1")` helps, `hint("00.1", 3)` helps most, and `solution("00.1")` shows the function.

# %% slideshow={"slide_type": "fragment"}
def softmax(S):
    """(P, lse) over the last dimension of S, which lse lacks: S and P (..., N), lse (...).

    A row of -inf has P = 0 and lse = -inf, no NaN.
    """
    raise Blank


check("00.1", softmax)

# %% [markdown] slideshow={"slide_type": "subslide"}
# ### Then, m must not be needed in advance
#
# Scores arrive one by one. Let m be the maximum *so far*, and l the sum of $e^{s_j - m}$ so far. When a larger score
# comes, m moves, and the terms already in l are wrong.
#
# **Claim 3.** One factor corrects them all: $\sum e^{s_j - m_{new}} = \alpha \sum e^{s_j - m}$ with
# $\alpha = e^{m - m_{new}} \le 1$.
#
# **Claim 4.** The same factor corrects the sum of values $O = \sum e^{s_j - m} v_j$, which is not divided by l yet. At
# the end O / l is exactly the row of the result, and no row of S or P was stored. We start with m = -inf, l = O = 0.
# This is rung 2: one key at a time.

# %% slideshow={"slide_type": "fragment"}
m, l = -math.inf, 0.0
for s_j in s.tolist():
    m = max(m, s_j)
    l = l + math.exp(s_j - m)  # wrong: the terms that are already in l used an older m
print(f"l without alpha: {l:.2f}, should be {(s - s.max()).exp().sum():.2f}")

m, l, o = torch.tensor(-math.inf), torch.tensor(0.0), torch.zeros(2)
trace = []
for s_j, v_j in zip(s, V, strict=True):
    before = m
    m, l, o = fwd_2_online.online_update(m, l, o, s_j, v_j)
    trace.append((m, l, o))
    print(f"m {m:.2f}  alpha {(before - m).exp():.2f}  l {l:.2f}  O/l {o / l}")
print("O / l is row 5 of the result:", torch.allclose(o / l, O[5]))

# %% slideshow={"slide_type": "subslide"}
figures.running_maximum(s, trace)

# %% [markdown] slideshow={"slide_type": "subslide"}
# ### Exercise 00.2: add one key to m, l and O
#
# m moves at keys 0, 1, 3 and 4. After every key O / l *is* the attention over the keys so far.
#
# Write claims 3 and 4 for all queries, heads and sequences at once. Beware of a query that has seen no key yet: its m
# is -inf, and -inf - (-inf) is NaN.

# %% slideshow={"slide_type": "fragment"}
def online_update(m, l, O, s, v_j):
    """(m, l, O) after a key. m, l, s (B, H, Nq), O (B, H, Nq, D), v_j (B, H, 1, D)."""
    raise Blank


check("00.2", online_update)

# %% [markdown] slideshow={"slide_type": "slide"}
# ## 4. Tile by tile
#
# **Claim 5.** Keys may come in groups. Bc keys move m once, add a sum to l, and a matrix product to O. Their scores
# with Br queries are a **tile** of S, and only one tile exists at a time. This is rung 3, Algorithm 1 of
# FlashAttention-2. There P of a tile is $e^{S - m}$, not yet divided by l.
#
# | line | what it does | in `fwd_3_tiled.py` |
# |---|---|---|
# | [3–5] | for each tile of Br queries: Q_i; m = -inf, l = 0, O = 0 | `forward`, outer loop |
# | [6–7] | for each tile of Bc keys: K_j, V_j | inner loop |
# | [8] | S = scale Q_i K_jᵀ (Br, Bc) | `mask` when causal |
# | [9–10] | m_new, P, alpha; new l and O | `online_update`, for a tile |
# | [12–15] | O / l and lse, written once | end of the outer loop |
#
# Line [10] of the paper multiplies by 1 / alpha. This is a misprint ([erratum E12](../papers/errata.md)): it must be
# alpha. [See the tiles move](../notebooks/site/player.md).

# %% slideshow={"slide_type": "subslide"}
for tile in ((1, 1), (2, 3), (4, 2), (6, 6)):
    out, lse = fwd_3_tiled.forward(Q, K, V, tile=tile)
    print("tile", tile, "gives the same:", torch.allclose(out, O))
d = 64
for Br, Bc in ((16, 16), (64, 64), (128, 128)):
    numbers = 2 * Br * d + 2 * Bc * d + Br * Bc + 2 * Br  # Q_i, O; K_j, V_j; S; m, l
    print(f"tile ({Br}, {Bc}), d = 64: {4 * numbers / 1024:.1f} KiB, for any N")
show("fwd_3_tiled", "forward")

# %% [markdown] slideshow={"slide_type": "subslide"}
# ### The causal mask
#
# **Causal**: a query sees keys up to its own position. There may be Nq queries and Nk keys, as in a chat whose last
# tokens are new. Then the *last* query sees every key: the diagonal ends at the bottom right.
#
# With more queries than keys the first queries see no key. Their sums are empty, so `out` is 0 and `lse` is log 0 =
# -inf. The code knows such a row by l = 0. The loop over keys ends at `last_key`, behind the last key that a query of
# the tile sees, so white tiles are never visited.

# %% slideshow={"slide_type": "fragment"}
figures.tiles_visited()

# %% [markdown] slideshow={"slide_type": "subslide"}
# ### Exercise 00.3: the causal mask of one tile
#
# Set to -inf the scores that the queries of a tile may not see; `shift` is Nk - Nq.

# %% slideshow={"slide_type": "fragment"}
def mask(S, i, j, shift):
    """S (..., Br, Bc), with -inf where the key lies after the query.

    The tile starts at query i and key j; query i stands at position i + shift.
    """
    raise Blank


check("00.3", mask)

# %% [markdown] slideshow={"slide_type": "slide"}
# ## 5. The backward, by hand
#
# dX is the gradient of the loss with respect to X. Given dO, we need dQ, dK and dV. O = P V and S are products, and a
# factor's gradient is a product with the other factor:
#
# $$dV = P^\top dO \qquad dP = dO\, V^\top \qquad dQ = \mathit{scale}\; dS\, K \qquad dK = \mathit{scale}\; dS^\top Q$$
#
# **Between them, the softmax.** From claim 2 and $\partial\,\mathit{lse}_i/\partial S_{ik}=P_{ik}$ follows
# $\partial P_{ij}/\partial S_{ik}=P_{ij}([j=k]-P_{ik})$, where $[j=k]$ is 1 if j = k, else 0. Therefore
#
# $$dS_{ik} = \sum_j dP_{ij}\, P_{ij} ([j = k] - P_{ik}) = P_{ik}\, (dP_{ik} - \mathit{delta}_i), \qquad
# \mathit{delta}_i = \sum_j P_{ij}\, dP_{ij}.$$
#
# delta seems to need whole rows of P and dP. Exchange the sums, and it needs two rows of length d:
#
# $$\mathit{delta}_i = \sum_j P_{ij} \sum_x dO_{ix} V_{jx} = \sum_x dO_{ix} \sum_j P_{ij} V_{jx} = \sum_x dO_{ix}\, O_{ix}$$

# %% slideshow={"slide_type": "subslide"}
q, k, v = (x.clone().requires_grad_() for x in (Q, K, V))
S = fwd_1_matrix.scores(q, k, causal=True, scale=scale)  # a causal example
P, lse = fwd_1_matrix.softmax(S)
O = P @ v
dO = torch.tensor([[1.0, 0], [0, 1], [1, 1], [2, 0], [0, -1], [1, -1]])
by_autograd = torch.autograd.grad(O, (q, k, v), dO)

q, k, v, P, O, lse = (x.detach() for x in (q, k, v, P, O, lse))  # the rest is done by hand
dV, dP = P.T @ dO, dO @ v.T  # (N, d), (N, N)
delta = (dO * O).sum(-1)  # (N,)
dS = P * (dP - delta[:, None])  # (N, N)
dQ, dK = scale * dS @ k, scale * dS.T @ q  # (N, d)
for name, own, auto in zip(("dQ", "dK", "dV"), (dQ, dK, dV), by_autograd, strict=True):
    print(f"{name}: {torch.allclose(own, auto, atol=1e-5)}", end="; ")
print("delta, two ways:", torch.allclose(delta, (P * dP).sum(-1), atol=1e-5))

# %% [markdown] slideshow={"slide_type": "subslide"}
# ### The backward, tile by tile
#
# Every formula works on one tile at a time, and nothing is rescaled, because lse is final. P need not be stored: the
# backward *recomputes* it. In Algorithm 2 of FlashAttention-2, below, the outer loop goes over key tiles, so that dK_j
# and dV_j are finished in one visit.

# %% slideshow={"slide_type": "fragment"}
show("bwd_3_tiled", "backward")

# %% [markdown] slideshow={"slide_type": "subslide"}
# ### Exercise 00.4: one tile of the backward
#
# Recompute P of a tile from q, k and lse, and find its dS. `q[..., rows, :]` is Q_i. Do not forget the mask.

# %% slideshow={"slide_type": "fragment"}
def tile_gradients(dout, q, k, v, lse, delta, rows, keys, causal, scale):
    """(P, dS) of one tile, both (B, H, Br, Bc)."""
    raise Blank


check("00.4", tile_gradients)

# %% [markdown] slideshow={"slide_type": "slide"}
# ## 6. Check it, then break it
#
# The **contract** is a list of inputs for which every stage has to be right, compared with a reference in float64.
# Allowed is twice the error of the matrix form in the same precision, plus a few roundings.
#
# Now break one thing: `forward` passes 0 to `mask` instead of Nk - Nq. **Which kind of input will fail?**
#
# <details><summary>Answer</summary>
#
# Only causal inputs in which Nq and Nk differ.
#
# </details>

# %% slideshow={"slide_type": "fragment"}
def top_left(S, i, j, shift, mask=fwd_3_tiled.mask):  # the right one, kept before it is replaced
    return mask(S, i, j, 0)


print(figures.contract())
print("\nwith the shift forgotten:")
print(figures.contract(mask=top_left))

# %% [markdown] slideshow={"slide_type": "subslide"}
# ### Which inputs show which mistakes
#
# Rows are planted mistakes, columns kinds of input. In all of them the keys end inside the last tile (**ragged**); the
# code above shortens that tile. Later stages have tiles of a fixed size, and mask what lies behind the last key.
#
# A white cell gives the right result: ordinary random scores do not show that the maximum is missing.

# %% slideshow={"slide_type": "fragment"}
figures.mistakes_seen()

# %% [markdown] slideshow={"slide_type": "subslide"}
# ### Bug hunt 00.bug1
#
# `show("00.bug1")` is a broken forward; the cell prints what users report. Write a test that fails on the broken
# forward and passes on the right one. `check` then asks which of four causes it is.

# %% slideshow={"slide_type": "fragment"}
print(figures.symptom("00.bug1"))


def test(forward):
    """Asserts what must hold of (out, lse) = forward(q, k, v, causal=..., scale=...)."""
    raise Blank


check("00.bug1", test)

# %% [markdown] slideshow={"slide_type": "slide"}
# ## 7. Predict, then measure
#
# **When N doubles, by how much does the peak memory of rung 2 grow, and that of rung 3 with tiles of (64, 64)? Is rung
# 3 faster than rung 1 on this CPU?**
#
# <details><summary>Answer</summary>
#
# Rung 2: by 2. Rung 3: by less, as only out and lse grow with N, not the tile. It is slower: calling torch for each
# tile takes longer than the arithmetic.
#
# </details>

# %% slideshow={"slide_type": "fragment"}
rungs = {"rung 1": fwd_1_matrix.forward, "rung 2": fwd_2_online.forward}
rungs["rung 3"] = lambda q, k, v: fwd_3_tiled.forward(q, k, v, tile=(64, 64))
for name, forward in rungs.items():
    small, large = (figures.peak_bytes(forward, N) for N in (256, 512))
    print(f"{name}: peak memory x {large / small:.2f}", end="; ")
    print(f"N = 512 takes {figures.milliseconds(forward, 512):.1f} ms")

# %% [markdown] slideshow={"slide_type": "slide"}
# ## 8. Summary
#
# - A running maximum keeps exp in range, if alpha rescales l and O whenever it moves.
# - O / l is exact, whatever the tiles; only one tile of S exists at a time.
# - lse gives back P, and with delta the backward works tile by tile too.
# - Small random scores and square shapes hide real mistakes.
#
# **Ask yourself**
#
# 1. Why is l never below 1 once a row has seen a key?
#    <details><summary>Answer</summary>
#
#    The largest score so far adds exp(0) = 1.
#    </details>
# 2. In which order of scores is alpha always 1 after the first key?
#    <details><summary>Answer</summary>
#
#    In falling order: the first stays the maximum.
#    </details>
# 3. What would go wrong if m started at -100?
#    <details><summary>Answer</summary>
#
#    If all scores of a row are far below -100, every exp(s + 100) is rounded to 0, and so is l: the code takes the row
#    for one that sees no key.
#    </details>
# 4. Why does the backward need no running maximum?
#    <details><summary>Answer</summary>
#
#    lse is final, so P = exp(S - lse) at once, and never above 1.
#    </details>
# 5. What does the forward keep for the backward beside its inputs, and how many numbers a row?
#    <details><summary>Answer</summary>
#
#    out, d numbers, and lse, one.
#    </details>

# %% [markdown] slideshow={"slide_type": "subslide"}
# ### Go further
#
# - ★ (15 minutes) A safe softmax reads a vector three times: for m, for l, for P. Write one that reads it twice.
# - ★★ (1 hour) Give rung 2 a sliding window: query i sees the last w keys. Check against
#   `reference.attention.forward(..., causal=True, window=(w - 1, 0))`.
#
# **Read:** [papers/attention.md](../papers/attention.md) and [papers/online_softmax.md](../papers/online_softmax.md).
#
# **Next:** [01_fa1_numba.ipynb](01_fa1_numba.ipynb). The tiles move into a GPU's shared memory.
