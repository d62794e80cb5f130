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
# ## 1. The question
#
# *What does attention compute, what does it cost, and how can it be done without ever storing the N x N matrix?*
#
# - **Before you start:** matrix products, `exp` and `log`, a first idea of gradients. No GPU programming.
# - **Time:** about 45 minutes to read, an hour more with the exercises.
# - **Hardware:** any. This stage is plain Python and torch on the CPU; a GPU changes nothing here.
# - **Code:** `steps/step00_naive/`, one file a rung. **Tests:** `pytest tests/test_step00_naive.py`.
# - **Symbols** are the papers'; `reference/symbols.md` lists them all.

# %% slideshow={"slide_type": "skip"}
import steps  # first: it chooses the engine
import math
import time
import weakref
from unittest.mock import patch

import matplotlib
import matplotlib.pyplot as plt
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from reference import cases, error, mutants
from reference.bench.plots import COLOURS, FAINT, INK, style
from steps import step00_naive as step00
from steps.step00_naive import bwd_1_matrix, fwd_1_matrix, fwd_2_online, fwd_3_tiled
from steps.workbook import picture, show

torch.set_num_threads(1)  # small tensors: one thread is faster, and its times are steadier
torch.set_printoptions(precision=2, sci_mode=False)
style()
print(steps.engine.describe())
print("matplotlib", matplotlib.__version__)

# %% [markdown] slideshow={"slide_type": "slide"}
# ## 2. The problem, measured
#
# ### A soft lookup
#
# A dictionary returns the value whose key equals the query. Attention returns a mean of *all* values, weighted by how
# well each key matches:
#
# $$S = \mathit{scale}\; Q K^\top \qquad P_{ij} = \frac{e^{S_{ij}}}{\sum_{j'} e^{S_{ij'}}} \qquad O = P V$$
#
# Q, K and V have one row of d numbers for each token. The score $S_{ij}$ compares query i with key j; softmax turns a
# row of scores into positive weights that add up to 1. The scale, by default $1/\sqrt d$, keeps scores from growing
# with d. Here are N = 6 tokens with d = 2.

# %% slideshow={"slide_type": "fragment"}
N, d = 6, 2
Q = torch.tensor([[1.0, 2], [0, 1], [-1, 0], [2, -1], [1, 1], [3, 1]])
K = torch.tensor([[0.0, 1], [1, 0], [-1, 1], [1, 2], [2, 0], [0, -1]])
V = torch.tensor([[0.0, 6], [2, 0], [4, 6], [6, 4], [8, 0], [10, 6]])
scale = 1 / math.sqrt(d)

S = fwd_1_matrix.scores(Q, K, False, scale)  # (N, N)
P, lse = fwd_1_matrix.softmax(S)  # (N, N), (N,)
O = P @ V  # (N, d)
print("q_5 . k_j ", Q[5] @ K.T)
print("S[5]      ", S[5])
print("P[5]      ", P[5], " sum", P[5].sum())
print("S[5,4] - S[5,3] =", S[5, 4] - S[5, 3], " P[5,4] / P[5,3] =", P[5, 4] / P[5, 3])
print("O[5]      ", O[5])

# %% [markdown] slideshow={"slide_type": "subslide"}
# Follow query 5, which is (3, 1). It matches key 4 best, with a scalar product of 6, then key 3 with 5; scaled, 4.24 and
# 3.54. A difference of 0.71 between scores is a factor of 2.03 between weights: 0.61 and 0.30. The result (6.83, 1.34)
# lies between V[4] = (8, 0) and V[3] = (6, 4), drawn a little towards the others. The scale decides how soft the lookup
# is: at 0 all weights are equal, and as it grows the best key takes all.

# %% slideshow={"slide_type": "fragment"}
fig, (left, right) = plt.subplots(1, 2, figsize=(7.6, 3.4))
for j in range(N):
    left.annotate("", K[j].tolist(), (0, 0), arrowprops={"arrowstyle": "->", "color": COLOURS[0], "lw": 1.6})
    x, y = (K[j] + 0.25 * K[j] / K[j].norm()).tolist()
    left.text(x, y - 0.25 * (j == 1), f"k{j}", color=COLOURS[0], ha="center", va="center")
left.annotate("", Q[5].tolist(), (0, 0), arrowprops={"arrowstyle": "->", "color": COLOURS[1], "lw": 2.5})
left.text(3.05, 1.12, "q5", color=COLOURS[1])
left.set(xlim=(-1.6, 3.6), ylim=(-1.6, 2.8), title="keys, and query 5", aspect="equal")
path = torch.stack([fwd_1_matrix.softmax(Q[5] @ K.T * s)[0] @ V for s in torch.linspace(0, 8, 400)])
right.scatter(*V.T, s=1500 * P[5] + 6, color=COLOURS[0], alpha=0.5, lw=0)
right.plot(*path.T, color=INK, lw=1.2, label="O[5] as the scale goes from 0 to 8")
for j in range(N):
    right.text(V[j, 0], V[j, 1] + (-1.7 if j == 4 else 0.7), f"v{j}: {P[5, j]:.2f}", ha="center", fontsize=9)
right.plot(*V.mean(0), "s", color=COLOURS[2], label="scale 0: the mean")
right.plot(*O[5], "X", color=COLOURS[1], ms=10, label="scale 1/sqrt(2)")
right.set(xlim=(-1.5, 11.5), ylim=(-5.5, 7.6), title="values; area: the weight", yticks=range(-4, 8, 2))
right.legend(loc="lower left", fontsize=8)
picture(fig, """Left: six key arrows and query 5; its scalar products with the long keys 3 and 4 are
the largest. Right: the six values as discs whose areas are their weights, 0.61 for v4 and 0.30 for
v3. The output moves from the mean of all values at scale 0 past its place at scale 1/sqrt(2) to v4
as the scale grows.""")

# %% [markdown] slideshow={"slide_type": "subslide"}
# Rung 0 is the definition, number by number; `show` prints a function from its file, so what you read is what runs.
# Rung 1 is what you just called: the loops as two matrix products, which hardware is good at.

# %% slideshow={"slide_type": "fragment"}
show("fwd_0_loops", "attend")

# %% slideshow={"slide_type": "fragment"}
loops, _ = step00.forward(Q, K, V, rung="loops")
torch_own = torch.nn.functional.scaled_dot_product_attention(Q[None], K[None], V[None])[0]
print("loops and matrix agree:", torch.allclose(loops, O))
print("matrix and torch's own agree:", torch.allclose(O, torch_own))

# %% [markdown] slideshow={"slide_type": "subslide"}
# ### What it costs
#
# Inputs and output have 4 N d numbers; S and P have $N^2$ each, and each of the two products takes $2 N^2 d$
# operations. The next cell counts the bytes of all tensors alive at once (you may skip how); then rung 1 meets longer
# and longer sequences.

# %% slideshow={"slide_type": "skip"}
class AliveBytes(TorchDispatchMode):
    """`with AliveBytes(q, k, v) as memory`: memory.peak is the most bytes of new tensors alive at once."""

    def __init__(self, *inputs):
        super().__init__()
        self.now, self.peak, self.known = 0, 0, weakref.WeakSet(x.untyped_storage() for x in inputs)

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        storage = result.untyped_storage() if isinstance(result, torch.Tensor) else None
        if storage is not None and storage not in self.known:  # not a view of a tensor seen before
            self.known.add(storage)
            self.change(storage.nbytes())
            weakref.finalize(storage, self.change, -storage.nbytes())
        return result

    def change(self, count):
        self.now += count
        self.peak = max(self.peak, self.now)


# %% slideshow={"slide_type": "subslide"}
def peak_bytes(function, n, d=64):
    """The most bytes that function(q, k, v) has in use beyond its inputs, one head of n tokens."""
    q, k, v = torch.randn(3, 1, 1, n, d)
    with AliveBytes(q, k, v) as memory:
        function(q, k, v)
    return memory.peak


def seconds(function, n, d=64):
    """The shortest of three runs."""
    q, k, v = torch.randn(3, 1, 1, n, d)
    starts = [(time.perf_counter(), function(q, k, v))[0] for _ in range(3)] + [time.perf_counter()]
    return min(b - a for a, b in zip(starts, starts[1:], strict=False))


lengths = (128, 256, 512, 1024, 2048)
peaks = [peak_bytes(fwd_1_matrix.forward, n) for n in lengths]
times = [seconds(fwd_1_matrix.forward, n) for n in lengths]
for n, peak in zip(lengths, peaks, strict=True):
    print(f"N = {n:4}: peak {peak / 2**20:6.2f} MiB = {peak / (4 * n * n):.2f} N^2 floats")
print(f"one head's S at N = 16384: {4 * 16384**2 / 2**30:.0f} GiB of float32")

# %% slideshow={"slide_type": "fragment"}
fig, axes = plt.subplots(1, 2, figsize=(7.6, 3.2), layout="constrained")
for ax, y, title in zip(axes, (times, peaks), ("time, ms", "peak memory, MiB"), strict=True):
    y = [value * (1e3 if y is times else 2**-20) for value in y]
    square = [y[-1] * (n / lengths[-1]) ** 2 for n in lengths]
    ax.loglog(lengths, y, "o-", color=COLOURS[1], label="rung 1, matrix")
    ax.loglog(lengths, square, "--", color=INK, lw=1, label="$N^2$ line")
    ax.set_title(title)
linear = [16 * n * 64 / 2**20 for n in lengths]
axes[1].loglog(lengths, linear, ":", color=COLOURS[0], label="q, k, v and out")
for ax in axes:
    ax.set(xlabel="N")
    ax.set_xticks(lengths, lengths)
    ax.minorticks_off()
    ax.legend(fontsize=8)
picture(fig, """Two log-log plots of the matrix rung against N from 128 to 2048, each with a line of
slope N squared through its last point. Time climbs with that line, less smoothly. Peak memory lies
on it, and leaves the dotted line of inputs and output, which has slope N, further and further
below.""")

# %% [markdown] slideshow={"slide_type": "subslide"}
# Memory lies on the $N^2$ line: four N x N matrices are alive at the peak (scores, exponentials, quotient, P). Inputs
# and output, dotted, only grow like N. Time climbs along the line less smoothly: caches and fixed costs show.
#
# The $N^2$ *products* are attention itself and stay. The $N^2$ *memory* can go, and with it most of the traffic to
# memory. Two obstacles: softmax needs the whole row before it can give out a weight, and the backward pass seems to
# need P.

# %% [markdown] slideshow={"slide_type": "slide"}
# ## 3. The idea: a softmax that never sees its whole row
#
# ### First, it must not overflow
#
# Softmax, typed in as the formula stands:

# %% slideshow={"slide_type": "fragment"}
def naive_softmax(s):
    return s.exp() / s.exp().sum()


s = S[5]
print("naive:     ", naive_softmax(s))
print("naive, x50:", naive_softmax(50 * s))
print("exp(50 s): ", "  ".join(f"{e:.0e}" for e in (50 * s).exp()))
print(f"float32 ends at exp({math.log(torch.finfo(torch.float32).max):.1f}), ", end="")
print(f"float16 at exp({math.log(torch.finfo(torch.float16).max):.1f})")

# %% [markdown] slideshow={"slide_type": "fragment"}
# Scores above 88.7 overflow float32 to inf, and inf / inf is nan.
#
# **Claim 1.** Softmax does not change when one constant c is subtracted from all scores:
# $e^{s_j - c} / \sum e^{s_{j'} - c} = e^{-c} e^{s_j} / (e^{-c} \sum e^{s_{j'}})$. Choose c = m, the row's maximum: the largest
# exponent is 0, nothing overflows, and the sum is at least 1.

# %% slideshow={"slide_type": "fragment"}
m = s.max()
print("claim 1:  ", torch.allclose(naive_softmax(s - m), naive_softmax(s)))
print("safe, x50:", naive_softmax(50 * s - (50 * s).max()))

# %% [markdown] slideshow={"slide_type": "subslide"}
# ### Then, m must not be needed in advance
#
# Scores arrive one by one. Let m be the maximum *so far* and $l = \sum e^{s_j - m}$. When a larger score comes, m moves.
# Just going on with the new m is wrong:

# %% slideshow={"slide_type": "fragment"}
m, l = -math.inf, 0.0
for s_j in s.tolist():
    m = max(m, s_j)
    l = l + math.exp(s_j - m)  # what was summed before used an older m
print(f"l without correction: {l:.2f}, should be {(s - s.max()).exp().sum():.2f}")

# %% [markdown] slideshow={"slide_type": "fragment"}
# **Claim 2.** When m moves to m_new, one factor mends the whole sum: $\sum e^{s_j - m_{new}} = \alpha \sum e^{s_j - m}$ with
# $\alpha = e^{m - m_{new}} \le 1$. Think of $e^m$ as the unit that l is counted in: a larger unit, a smaller count.
#
# **Claim 3.** The output is a sum of the same kind, $O = \sum e^{s_j - m} v_j$, so the same factor mends it. At the end
# O / l is the row of the result, exactly, and no row of S or P was stored.
#
# At the start m = -inf and l = O = 0. The first $\alpha$ is then $e^{-\infty} = 0$: there is nothing to rescale.

# %% slideshow={"slide_type": "fragment"}
old, new = s[:3].max(), s[:4].max()
alpha = (old - new).exp()
print("claim 2:", torch.allclose((s[:3] - new).exp().sum(), alpha * (s[:3] - old).exp().sum()))

m, l, o = -math.inf, 0.0, torch.zeros(d)
trace = []
for s_j, v_j in zip(s.tolist(), V, strict=True):
    m_new = max(m, s_j)
    alpha = math.exp(m - m_new)
    l = alpha * l + math.exp(s_j - m_new)
    o = alpha * o + math.exp(s_j - m_new) * v_j
    m = m_new
    trace.append((m, alpha, l, o / l))
    print(f"m {m:.2f}  alpha {alpha:.2f}  l {l:.2f}  O/l ({o[0] / l:.2f}, {o[1] / l:.2f})")
print("claim 3:", torch.allclose(o / l, O[5]))

# %% slideshow={"slide_type": "subslide"}
fig, axes = plt.subplots(3, 1, figsize=(7, 5.2), sharex=True, layout="constrained")
ms, alphas, ls, rows = zip(*trace, strict=True)
axes[0].bar(range(N), s, width=0.35, color=COLOURS[5], label="score s_j")
axes[0].plot(range(N), ms, "o-", drawstyle="steps-post", color=COLOURS[0], label="running maximum m")
axes[0].legend(fontsize=8, loc="upper left")
axes[0].set_title("m follows the largest score")
axes[1].plot(range(N), ls, "o-", color=COLOURS[1])
for j in (j for j in range(1, N) if alphas[j] < 1):
    text = f"x {alphas[j]:.2f}, then + 1"
    axes[1].annotate(text, (j, ls[j]), (j, max(ls) + 0.15), ha="center", fontsize=8,
                     arrowprops={"arrowstyle": "-", "color": FAINT})  # fmt: skip
axes[1].set(ylim=(0.9, max(ls) + 0.4), title="l, and its factor alpha where m moves")
for c in range(d):
    colour = COLOURS[2 + c]
    axes[2].plot(range(N), [row[c] for row in rows], "os"[c] + "-", color=colour, label=f"component {c}")
    axes[2].axhline(O[5, c], color=colour, lw=1, ls="--")
axes[2].legend(fontsize=8)
axes[2].set(xlabel="key j", xticks=range(N), title="O / l, over the keys so far; dashed: the final row")
picture(fig, """Three plots over keys 0 to 5. The running maximum steps up at keys 1, 3 and 4; the
sum l is multiplied by alpha, 0.24, 0.24 and 0.49, there; the two components of O / l move from the
first value to the final row of the output and end on it.""")

# %% [markdown] slideshow={"slide_type": "subslide"}
# m moves at keys 1, 3 and 4, where alpha is 0.24, 0.24 and 0.49; elsewhere, after the first key, alpha is 1. At every
# key O / l *is* the attention over the keys seen so far, and the last one, (6.83, 1.34), is the value from above.
#
# **Claim 4.** Keys may come in groups: a group of Bc keys moves m to its largest score if that is larger, and adds a
# sum to l and a matrix product to O. The size of the groups does not matter, and Br queries can go side by side. The
# piece of S for Br queries and Bc keys is a **tile**, the only piece that ever exists.

# %% slideshow={"slide_type": "fragment"}
for tile in ((1, 1), (2, 3), (4, 2), (6, 6)):
    tiled_out, tiled_lse = fwd_3_tiled.forward(Q, K, V, tile=tile)
    print("tile", tile, torch.allclose(tiled_out, O), torch.allclose(tiled_lse, lse))

# %% [markdown] slideshow={"slide_type": "subslide"}
# ### The one number a row worth keeping
#
# In the end m and l belong together: $m + \log l = \log \sum_j e^{s_j}$ is the **log-sum-exp** of the row, `lse`.
#
# **Claim 5.** $P_{ij} = e^{S_{ij} - \mathit{lse}_i}$. With lse, any entry of P can be made again from q and k, in any order,
# without a sum over the row. The backward pass will live on this.

# %% slideshow={"slide_type": "fragment"}
print(f"row 5: m + log l = {m + math.log(l):.2f}, lse = {lse[5]:.2f}")
print("claim 5:", torch.allclose((S - lse[:, None]).exp(), P))
print(f"P[5, 4] alone: exp({S[5, 4]:.2f} - {lse[5]:.2f}) = {(S[5, 4] - lse[5]).exp():.2f}")
print(f"kept for N = 16384: lse {4 * 16384 / 2**10:.0f} KiB, P {4 * 16384**2 / 2**20:.0f} MiB")

# %% [markdown] slideshow={"slide_type": "slide"}
# ## 4. From algorithm to code
#
# ### The forward, tile by tile
#
# FlashAttention-2, Algorithm 1; in brackets the paper's lines. Line 10 is printed with an inverse,
# $\mathrm{diag}(e^{m - m_{new}})^{-1} O$; by claim 2 there is none.
#
# | line | what it does | in `fwd_3_tiled.py` |
# |---|---|---|
# | [3–5] | for each tile of Br queries: Q_i; m = -inf, l = 0, O = 0 | `forward`, outer loop |
# | [6–7] | for each tile of Bc keys: K_j, V_j | `forward`, inner loop, up to `last_key` |
# | [8] | S = scale Q_i K_jᵀ (Br, Bc) | `forward`; then `mask` when causal |
# | [9–10] | m_new, P, alpha; new l and O | `online_update` (yours, in part 5) |
# | [12–15] | O / l and lse = m + log l, written once | `forward`, last two lines of the loop |
#
# First the budget: what one round of the inner loop needs at hand. Later stages keep just this in the fast memory on the
# GPU's chip.

# %% slideshow={"slide_type": "fragment"}
def tile_bytes(Br, Bc, d, size=4):
    """Bytes of Q_i, O, K_j, V_j, one tile of S, and m, l."""
    return size * (2 * Br * d + 2 * Bc * d + Br * Bc + 2 * Br)


for b in (16, 64, 128):
    print(f"tile ({b}, {b}), d = 64: {tile_bytes(b, b, 64) / 1024:.1f} KiB, for any N")

# %% slideshow={"slide_type": "subslide"}
show("fwd_3_tiled", "forward")

# %% [markdown] slideshow={"slide_type": "subslide"}
# ### Causal tiles
#
# Causal means that a query sees keys up to its own position. If Nq and Nk differ, the *last* query sees every key: the
# diagonal (dashed below) is aligned at the bottom right. `last_key` ends the inner loop where all further tiles would be
# masked throughout (white). `mask` matters only in tiles that the diagonal crosses (orange); blue ones are whole.

# %% slideshow={"slide_type": "fragment"}
def draw_tiles(ax, Nq, Nk, Br, Bc):
    """Each tile of S: visited whole, visited and masked in part, or never visited."""
    count = 0
    for i in range(0, Nq, Br):
        end = fwd_3_tiled.last_key(i + Br, Nq, Nk, True)
        for j in range(0, Nk, Bc):
            height, width = min(Br, Nq - i), min(Bc, Nk - j)
            crossed = fwd_3_tiled.mask(torch.zeros(height, width), i, j, Nk - Nq).isinf().any()
            colour = "white" if j >= end else COLOURS[4] if crossed else COLOURS[0]
            count += j < end
            ax.add_patch(plt.Rectangle((j, i), width, height, facecolor=colour, edgecolor=INK, lw=0.8))
    ax.plot([Nk - Nq, Nk], [0, Nq], color=INK, lw=1.5, ls="--")
    tiles = -(-Nq // Br) * -(-Nk // Bc)
    ax.set(xlim=(0, Nk), ylim=(Nq, 0), aspect="equal", xlabel=f"{Nk} keys", ylabel=f"{Nq} queries")
    ax.set_title(f"tile ({Br}, {Bc}): {count} of {tiles}")
    ax.grid(False)


fig, axes = plt.subplots(1, 3, figsize=(8.4, 3.2), layout="constrained")
for ax, sizes in zip(axes, ((80, 80, 16, 16), (56, 88, 8, 16), (88, 56, 16, 8)), strict=True):
    draw_tiles(ax, *sizes)
picture(fig, """Three maps of S cut into tiles. Nq = Nk: the lower left triangle is visited, its
tiles on the diagonal masked in part. Fewer queries than keys: the diagonal ends at the bottom
right, so a block of early keys is visited by all. More queries than keys: the first queries see no
key, and their tiles are never visited.""")

# %% [markdown] slideshow={"slide_type": "fragment"}
# On the right, the first queries see no key at all. Their result is defined as `out = 0` and `lse = -inf`: the value and
# the logarithm of an empty sum, never a nan.

# %% [markdown] slideshow={"slide_type": "slide"}
# ### The backward, by hand
#
# Write dX for the gradient of the loss with respect to X. Given dO, we need dQ, dK and dV. Autograd, in float64 and
# with the causal mask, gives every gradient on the way for comparison.
#
# **O = P V.** In $O_{ix} = \sum_j P_{ij} V_{jx}$ each $V_{jx}$ has the factor $P_{ij}$, and each $P_{ij}$ the factor
# $V_{jx}$. So
#
# $$dV = P^\top dO \qquad\qquad dP = dO\, V^\top$$

# %% slideshow={"slide_type": "fragment"}
q, k, v = (x.double().requires_grad_() for x in (Q, K, V))
S = fwd_1_matrix.scores(q, k, True, scale)
P, lse = fwd_1_matrix.softmax(S)
O = P @ v
S.retain_grad()
P.retain_grad()
dO = torch.tensor([[1.0, 0], [0, 1], [1, 1], [2, 0], [0, -1], [1, -1]], dtype=torch.float64)
O.backward(dO)
want = {"dQ": q.grad, "dK": k.grad, "dV": v.grad, "dP": P.grad, "dS": S.grad}
q, k, v, P, O, lse = (x.detach() for x in (q, k, v, P, O, lse))  # from here on by hand

dV = P.mT @ dO  # (N, d)
dP = dO @ v.mT  # (N, N)
print("dV:", torch.allclose(dV, want["dV"]), " dP:", torch.allclose(dP, want["dP"]))

# %% [markdown] slideshow={"slide_type": "subslide"}
# **P = softmax(S).** From $P_{ij} = e^{S_{ij} - \mathit{lse}_i}$ and
# $\partial\, \mathit{lse}_i / \partial S_{ik} = P_{ik}$ follows
# $\partial P_{ij} / \partial S_{ik} = P_{ij} ([j = k] - P_{ik})$, where $[j = k]$ is 1 if j = k, else 0. Therefore
#
# $$dS_{ik} = \sum_j dP_{ij}\, P_{ij} ([j = k] - P_{ik}) = P_{ik}\, (dP_{ik} - \mathit{delta}_i), \qquad
# \mathit{delta}_i = \sum_j P_{ij}\, dP_{ij}.$$
#
# delta looks like a sum over a row of two N x N matrices. Two lines make it a scalar product of two rows of length d:
#
# $$\begin{aligned} \mathit{delta}_i &= \sum_j P_{ij} \sum_x dO_{ix} V_{jx} \\
# &= \sum_x dO_{ix} \sum_j P_{ij} V_{jx} = \sum_x dO_{ix}\, O_{ix} \end{aligned}$$

# %% slideshow={"slide_type": "fragment"}
delta = (dO * O).sum(-1)  # (N,)
dS = P * (dP - delta[:, None])  # (N, N)
print("delta:", torch.allclose(delta, (P * dP).sum(-1)), delta)
print("dS:", torch.allclose(dS, want["dS"]))
print("each row of dS adds up to 0:", torch.allclose(dS.sum(-1), torch.zeros_like(delta)))

# %% [markdown] slideshow={"slide_type": "subslide"}
# **S = scale Q Kᵀ.** A product again, so
#
# $$dQ = \mathit{scale}\; dS\, K \qquad\qquad dK = \mathit{scale}\; dS^\top Q$$
#
# (FlashAttention-2, section 2.2, prints $dK = Q\, dS^\top$: the shapes do not fit.)

# %% slideshow={"slide_type": "fragment"}
dQ, dK = scale * dS @ k, scale * dS.mT @ q
print("dQ:", torch.allclose(dQ, want["dQ"]), " dK:", torch.allclose(dK, want["dK"]))
module = bwd_1_matrix.backward(dO, q, k, v, O, lse, causal=True)
same = [torch.allclose(a, b) for a, b in zip(module, (dQ, dK, dV), strict=True)]
print("bwd_1_matrix gives the same:", all(same))

# %% [markdown] slideshow={"slide_type": "subslide"}
# Every formula works on one tile at a time: P from lse (claim 5), dP from dO and V, dS from delta. Nothing is rescaled,
# because lse is final. So the backward keeps q, k, v, out and lse, and *recomputes* S. Rung 3 is FlashAttention-2's
# Algorithm 2: key tiles outside, so that dK_j and dV_j are finished in one visit.

# %% slideshow={"slide_type": "fragment"}
show("bwd_3_tiled", "backward")

# %% [markdown] slideshow={"slide_type": "slide"}
# ## 5. Write it yourself
#
# **Exercise 00.1: one tile.** Claims 2 to 4 for Br rows at once, lines [9–10] of the algorithm, in about five lines.
# Replace `return None`; the next cell checks. Mind a row that has seen no key yet.
#
# <details><summary>Hint 1: a question</summary>
#
# Which of m, l, O, alpha and P have one entry a row, and which have a second axis? Where does that ask for `[..., None]`?
#
# </details>
# <details><summary>Hint 2: the formula</summary>
#
# The loop of claim 3, with a row's largest score for s_j, a row's sum for one exponential, and a matrix product for one
# weighted value. (FlashAttention-2, Algorithm 1, lines 9 and 10.)
#
# </details>
# <details><summary>Hint 3: the trap</summary>
#
# If m and all scores of the tile are -inf, exp(m - m_new) is exp(-inf + inf) = nan. Subtract 0 instead of m_new in such
# a row, but return the true m_new.
#
# </details>

# %% slideshow={"slide_type": "fragment"}
def my_online_update(m, l, O, S, V_j):
    """(m, l, O) after one more tile: S (Br, Bc), V_j (Bc, d); m, l (Br,); O (Br, d), not divided by l."""
    return None  # yours


# %% slideshow={"slide_type": "fragment"}
def check_update(mine):
    """Runs mine beside the module's function over three tiles of four keys, and names what differs."""
    scores = torch.randn(4, 12, generator=torch.Generator().manual_seed(0))
    values, keys = torch.arange(36.0).reshape(12, 3), torch.arange(12)
    tests = {
        "a maximum that never moves after the first tile": scores - 9 * keys,
        "a maximum that moves in every tile": scores + keys,
        "scores in the hundreds": 100 * scores,
        "a tile masked throughout, then scores near -200": (scores - 200).masked_fill(keys < 4, -math.inf),
    }
    for says, S in tests.items():
        got = want = (torch.full((4,), -math.inf), torch.zeros(4), torch.zeros(4, 3))
        for j in range(0, 12, 4):
            got = mine(*got, S[:, j : j + 4], values[j : j + 4])
            if got is None:
                return print("not written yet")
            want = fwd_3_tiled.online_update(*want, S[:, j : j + 4], values[j : j + 4])
        same = [torch.allclose(a, b, rtol=1e-4) for a, b in zip(got, want, strict=True)]
        print("ok:" if all(same) else f"wrong (m, l, O right: {same}):", says)


check_update(my_online_update)

# %% [markdown] slideshow={"slide_type": "subslide"}
# **Exercise 00.2: merge.** Two workers have attended with the same queries to different parts of the keys; each has its
# (out, lse). Combine them into the result over all keys, without the scores. Stage 04 does this between GPUs.
#
# <details><summary>Hint 1: a question</summary>
#
# lse is the logarithm of a sum. What is the sum over both parts, and which share of it is each part's?
#
# </details>
# <details><summary>Hint 2: where to look</summary>
#
# `papers/online_softmax.md`, the paragraph below the merge. `torch.logaddexp` does not overflow.
#
# </details>
# <details><summary>Hint 3: the trap</summary>
#
# A row that sees no key in either part has lse = -inf twice, and -inf - (-inf) is nan. Its out is 0.
#
# </details>

# %% slideshow={"slide_type": "fragment"}
def my_merge(out_a, lse_a, out_b, lse_b):
    """(out, lse) over both sets of keys: out_a, out_b (N, d), lse_a, lse_b (N,)."""
    return None  # yours


def check_merge(mine):
    """Merges attention over parts of the six keys, and compares with attention over all."""
    over = {n: step00.forward(Q, K[:n], V[:n]) for n in (0, 1, 3, 6)}  # no key at all gives out 0, lse -inf
    rest = {n: step00.forward(Q, K[n:], V[n:]) for n in (0, 1, 3, 6)}
    tests = {"3 keys and 3": (over[3], rest[3]), "1 key and 5": (over[1], rest[1]),
             "none and 6": (over[0], rest[0]), "none and none": (over[0], rest[6])}  # fmt: skip
    for says, (a, b) in tests.items():
        got, want = mine(*a, *b), over[0] if says == "none and none" else over[6]
        if got is None:
            return print("not written yet")
        same = all(torch.allclose(x, y) for x, y in zip(got, want, strict=True))
        print("ok:" if same else "wrong:", says)


check_merge(my_merge)

# %% [markdown] slideshow={"slide_type": "slide"}
# ## 6. Check it, then break it
#
# All stages answer to one contract: named cases, compared with a float64 reference. The tolerance is computed from the
# inputs: twice the error of plain attention in the same precision, plus what rounding may add. Here is stage 00 on
# every case.

# %% slideshow={"slide_type": "fragment"}
def run_case(case, dtype=torch.float32):
    """(the stage's results, what is expected) on one of the contract's cases."""
    x = cases.build(case, step00.SUPPORTS, dtype)
    want = error.expected(x.q, x.k, x.v, x.dout, causal=x.causal, scale=x.scale)
    return cases.run(step00, case, x), want


runs, failed, worst = 0, [], dict.fromkeys(error.NAMES, 0.0)
for case, dtype, reason in cases.select(step00.SUPPORTS):
    if reason:
        print(f"not run: {case.name} ({reason})")
        continue
    got, want = run_case(case, dtype)
    runs += 1
    failed += [case.name] if error.failures(got, want) else []
    for name, e in error.errors(got, want).items():
        worst[name] = max(worst[name], e / (want.tolerance[name] or 1))
print(f"{runs} runs, {len(failed)} failed")
print("largest error in units of the tolerance:", {name: round(ratio, 2) for name, ratio in worst.items()})

# %% [markdown] slideshow={"slide_type": "subslide"}
# Now flip one thing. `forward` tells `mask` where the diagonal lies by `Nk - Nq`. Suppose someone passes 0: the diagonal
# starts at the top left. **Which kind of case will fail?**
#
# <details><summary>Answer</summary>
#
# Only causal cases in which Nq and Nk differ; for Nq = Nk the shift is 0 anyway. A suite with square shapes alone would
# never notice.
#
# </details>

# %% slideshow={"slide_type": "fragment"}
right_mask = fwd_3_tiled.mask
with patch.object(fwd_3_tiled, "mask", lambda S, i, j, shift: right_mask(S, i, j, 0)):
    for case, dtype, reason in cases.select(step00.SUPPORTS):
        if reason is None and dtype == torch.float32 and error.failures(*run_case(case)):
            print("fails:", case.name, "-", case.says)

# %% [markdown] slideshow={"slide_type": "subslide"}
# `reference/mutants.py` holds such mistakes ready made. A test suite is as good as the mutants it kills. Below, a row
# is a mistake, a column one of the contract's cases.

# %% slideshow={"slide_type": "fragment"}
mistakes = """no_rescale_of_o inverse_alpha first_maximum_kept no_maximum maximum_starts_at_zero
    tile_local_mask top_left tail_not_masked hard_coded_scale delta_missing dq_scale_missing""".split()
inputs = """ragged ragged_causal fewer_queries_causal more_queries_causal one_key head_dim_64
    scores_200 rising falling negative_row""".split()
verdicts = {}
for case in (c for c in cases.CASES if c.name in inputs):
    x = cases.build(case, step00.SUPPORTS, torch.float32)
    want = error.expected(x.q, x.k, x.v, x.dout, causal=x.causal, scale=x.scale)
    for mutant in (m for m in mutants.MUTANTS if m.name in mistakes):
        try:
            got = mutant.run(x, x.tile, step00.SUPPORTS["order"])
            verdicts[mutant.name, case.name] = "killed" if error.failures(got, want) else "survives"
        except mutants.NotApplicable:
            verdicts[mutant.name, case.name] = "n/a"

# %% slideshow={"slide_type": "fragment"}
looks = {"killed": (COLOURS[0], "x", "white"), "survives": (COLOURS[4], "lives", INK),
         "n/a": (FAINT, "", INK)}  # fmt: skip
fig, ax = plt.subplots(figsize=(8, 4.2), layout="constrained")
for row, mutant in enumerate(mistakes):
    for column, case in enumerate(inputs):
        colour, text, ink = looks[verdicts[mutant, case]]
        ax.add_patch(plt.Rectangle((column, row), 1, 1, facecolor=colour, edgecolor="white"))
        ax.text(column + 0.5, row + 0.5, text, color=ink, ha="center", va="center", fontsize=8)
ax.set_title("x: killed    lives: not noticed    grey: cannot matter here")
ax.set(xlim=(0, len(inputs)), ylim=(len(mistakes), 0))
slanted = {"rotation": 35, "ha": "right", "rotation_mode": "anchor", "fontsize": 8}
ax.set_xticks([c + 0.5 for c in range(len(inputs))], inputs, **slanted)
ax.set_yticks([r + 0.5 for r in range(len(mistakes))], mistakes, fontsize=8)
ax.grid(False)
ax.tick_params(length=0)
ax.spines[:].set_visible(False)
picture(fig, """A table of eleven mistakes against ten cases. Several die almost everywhere. Leaving
out the maximum lives through all cases but those with scores of 100 and more; starting the maximum
at zero dies only in the case with a row of very negative scores; the top-left mask only where Nq
and Nk differ.""")

# %% [markdown] slideshow={"slide_type": "fragment"}
# Look at two rows. `no_maximum` never subtracts m, and lives through every case with ordinary random scores.
# `maximum_starts_at_zero` (m = 0 instead of -inf) dies in one case alone, where a row's scores are all very negative:
# there every exponential underflows, and the row becomes an empty sum.

# %% [markdown] slideshow={"slide_type": "slide"}
# ## 7. Predict, then measure
#
# **Question 1.** When N doubles, the peak memory of rung 1 is multiplied by 4. By how much is that of rung 2 (key by
# key, all rows together), and that of rung 3 with tiles of (64, 64)?
#
# <details><summary>Answer</summary>
#
# Rung 2: by 2, as all it holds are a few tensors like O. Rung 3: by less. Only out and lse grow with N; what a tile
# needs does not, and is the larger part at first. At N = 64 there is one tile, and nothing is saved.
#
# </details>

# %% slideshow={"slide_type": "fragment"}
def tiled(b):
    return lambda q, k, v: fwd_3_tiled.forward(q, k, v, tile=(b, b))


rungs = {"rung 1, matrix": (fwd_1_matrix.forward, COLOURS[1], "o-"),
         "rung 2, online": (fwd_2_online.forward, COLOURS[2], "s-"),
         "rung 3, (64, 64)": (tiled(64), COLOURS[0], "D-")}  # fmt: skip
short = (64, 128, 256, 512)
fig, ax = plt.subplots(figsize=(6.4, 3.4))
for name, (function, colour, look) in rungs.items():
    mib = [peak_bytes(function, n) / 2**20 for n in short]
    ax.loglog(short, mib, look, color=colour, label=name)
    print(f"{name}: from N = 256 to 512 by {mib[3] / mib[2]:.2f}")
ax.set(xlabel="N", title="peak memory beyond q, k and v, MiB")
ax.set_xticks(short, short)
ax.minorticks_off()
ax.legend(fontsize=8)
picture(fig, """Peak memory against N on log-log axes: the matrix rung rises with slope 2, the
online rung with slope 1, and the tiled rung, highest at N = 64 where one tile is all, lies lowest
from N = 256 on with a slope below 1.""")

# %% [markdown] slideshow={"slide_type": "subslide"}
# **Question 2.** At N = 512, on this CPU, is rung 3 faster than rung 1? What do larger tiles do to its time?
#
# <details><summary>Answer</summary>
#
# With small tiles it is far slower. The multiplications are the same, but (16, 16) means 1024 rounds of small torch
# calls, and each call costs more than its arithmetic. Larger tiles mean fewer rounds. The algorithm saves memory traffic;
# to turn that into time, a round must cost little more than its arithmetic. That takes a kernel.
#
# </details>

# %% slideshow={"slide_type": "fragment"}
sizes = (16, 32, 64, 128, 256)
fig, ax = plt.subplots(figsize=(6.4, 3.2))
ms = [1e3 * seconds(tiled(b), 512) for b in sizes]
ax.loglog(sizes, ms, "D-", color=COLOURS[0], label="rung 3, tiles of (b, b)")
ax.axhline(1e3 * seconds(fwd_1_matrix.forward, 512), color=COLOURS[1], ls="--", label="rung 1, matrix")
ax.set(xlabel="b", title="time at N = 512, ms")
ax.set_xticks(sizes, sizes)
ax.minorticks_off()
ax.legend(fontsize=8)
print("rounds of the inner loop:", {b: (512 // b) ** 2 for b in sizes})
picture(fig, """Time of the tiled rung at N = 512 against its tile size, falling as the tiles grow
from 16; the matrix rung's time, a horizontal line, is far below that of small tiles.""")

# %% [markdown] slideshow={"slide_type": "slide"}
# ## 8. Summary
#
# - Attention is a mean of values, weighted by the softmax of scaled scores: $N^2$ scores, N d results.
# - Subtracting the row's maximum keeps exp in range; a running maximum does as well, if alpha rescales l and O.
# - O / l at the end is exact, whatever the tiles; only one tile of S exists at a time.
# - lse, one number a row, gives back P. With delta, one more, the backward works tile by tile too.
# - Tests with small random scores and square shapes miss real mistakes.
#
# **Ask yourself**
#
# 1. Why is l never below 1 once a row has seen a key?
# 2. For which order of the scores is alpha always 1 after the first key?
# 3. What would go wrong if m started at -100?
# 4. Why does the backward need no running maximum?
# 5. delta comes from dO and out. What else could it come from, and at what cost?
#
# **Go further**
#
# - ★ (15 minutes) Write the softmax of a vector with two passes over it instead of three. Test at scores of ±200.
# - ★★ (1 hour) Give rung 2 a sliding window: query i sees the last w keys. Check against
#   `reference.attention.forward(..., causal=True, window=(w - 1, 0))`.
# - ★★★ (a weekend) Write the tiled forward with key tiles *outside*. What must be kept for all rows between visits?
#   Compare with stage 01.
#
# **Read:** `papers/attention.md`, `papers/online_softmax.md`, `papers/memory_efficient_attention.md`.
#
# **Next:** [01_fa1_numba.ipynb](01_fa1_numba.ipynb). The tiles move to where they pay: a GPU's shared memory.
