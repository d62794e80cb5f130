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
# ![Two pictures of the weights of 48 tokens. Left, all 48 x 48 of them at once. Right, the same, but only one tile of 16 x 16
# is there; an arrow points to the next.](../notebooks/figures/question_00.png)

# %% jupyter={"source_hidden": true} slideshow={"slide_type": "skip"}
import steps  # comes first, because it chooses the engine
import math
import textwrap
import timeit
import weakref
from functools import partial
from unittest.mock import patch

import matplotlib
import matplotlib.pyplot as plt
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from reference import cases, error, mutants
from steps.bench import cost
from steps.figures.plots import COLOURS, FAINT, INK, style
from steps import step00_naive as step00
from steps.step00_naive import bwd_1_matrix, fwd_1_matrix, fwd_2_online
from steps.step00_naive import fwd_3_tiled, io_count
from steps.figures.picture import unchecked as picture
from steps.workbook import Blank, check, exercises, show
from steps.workbook import hint, solution  # noqa: F401  They are for part 5.

torch.set_num_threads(1)  # small tensors are faster on one thread, and the times steadier
torch.set_printoptions(precision=2, sci_mode=False)
style()
print(f"{steps.engine.describe()}\nmatplotlib {matplotlib.__version__}")

# %% [markdown] slideshow={"slide_type": "subslide"}
# - **Before you start:** matrix products, `exp` and `log`, a first idea of gradients. No GPU programming.
# - **Time:** about 45 minutes to read, an hour more with the exercises.
# - **Hardware:** any; a GPU changes nothing here.
# - **Code:** [`steps/step00_naive/__init__.py`](../steps/step00_naive/__init__.py) lists the **rungs**: a file each,
#   with one idea more. **Tests:** `pytest tests/test_step00_naive.py`.
# - **Symbols** are the papers': [reference/symbols.md](../reference/symbols.md). **Terms:**
#   [reference/glossary.md](../reference/glossary.md).
# - In JupyterLab code that only imports or draws is folded.

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
# Read it as a classifier: row $K_j$ is the **embedding of class j**, the score $S_{ij}$ says how well query i fits
# it, and softmax turns a row of scores into probabilities; $O_i$ is the expected value. The scale, by default
# $1/\sqrt d$, keeps scores from growing with d (last lines printed below). Here are six animals in d = 2 dimensions,
# water and air; their values are points in the plane. In self-attention the rows of Q, K and V are made from the same
# N tokens: here N = 6.

# %% slideshow={"slide_type": "fragment"}
N, d = 6, 2
names = ["sparrow", "frog", "eagle", "gull", "trout", "mole"]
# How much each animal is at home in (water, air).
K = torch.tensor([[0.0, 1], [1, 0], [-1, 1], [1, 2], [2, 0], [0, -1]])
V = torch.tensor([[0.0, 6], [2, 0], [4, 6], [6, 4], [8, 0], [10, 6]])
Q = torch.tensor([[1.0, 2], [0, 1], [-1, 0], [2, -1], [1, 1], [3, 1]])
scale = 1 / math.sqrt(d)

S = fwd_1_matrix.scores(Q, K, False, scale)  # (N, N)
P, lse = fwd_1_matrix.softmax(S)  # (N, N), (N,)
O = P @ V  # (N, d)
for j, name in enumerate(names):
    print(f"k{j} {name:7} q5 . k{j} = {Q[5] @ K[j]:2.0f}", end="   ")
    print(f"S[5,{j}] = {S[5, j]:5.2f}   P[5,{j}] = {P[5, j]:.2f}")
print("S[5,4] - S[5,3] =", S[5, 4] - S[5, 3], end="  ")
print("P[5,4] / P[5,3] =", P[5, 4] / P[5, 3], " sum of P[5] =", P[5].sum())
print("O[5] =", O[5])
for n in (16, 256):
    seeded = torch.Generator().manual_seed(0)
    spread = torch.randn(2, 1000, n, generator=seeded).prod(0).sum(1).std()
    print(f"random q, k with d = {n:3}: products spread by {spread:.1f}", end=", ")
    print(f"scaled by {spread / n**0.5:.1f}")

# %% [markdown] slideshow={"slide_type": "subslide"}
# Query 5 is (3, 1): much water, some air. It fits the trout best, with a scalar product of 6, then the gull with 5;
# scaled, 4.24 and 3.54. A difference of 0.71 between scores is a factor of 2.03 between probabilities: 0.61 and 0.30.
# The result (6.83, 1.34) lies between the trout's value (8, 0) and the gull's (6, 4), drawn a little towards the
# others. The scale decides how soft the lookup is: at 0 all keys count the same, and as it grows the best key takes
# all the weight.
#
# Below the picture is rung 0: the definition, computed number by number (`show` prints a function from its file).
# Rung 1, which you just called, uses two matrix products instead of the loops.

# %% jupyter={"source_hidden": true} slideshow={"slide_type": "fragment"}
fig, (left, right) = plt.subplots(1, 2, figsize=(7.6, 3.4))
arrow = {"arrowstyle": "->", "color": COLOURS[0], "lw": 1.6}
for j, name in enumerate(names):
    left.annotate("", K[j].tolist(), (0, 0), arrowprops=arrow)
    x, y = (K[j] + torch.tensor([0.42, 0.25]) * K[j] / K[j].norm()).tolist()
    left.text(x, y - 0.25 * (j == 1), name, color=COLOURS[0], ha="center", va="center")
    x, y = V[j, 0], V[j, 1] + (-1.7 if j == 4 else 0.7)
    right.text(x, y, f"{name} {P[5, j]:.2f}", ha="center", fontsize=8)
left.annotate("", Q[5].tolist(), (0, 0), arrowprops=arrow | dict(color=COLOURS[1], lw=2.5))
left.text(3.05, 1.12, "q5", color=COLOURS[1])
left.set(xlim=(-2, 3.6), ylim=(-1.6, 2.8), xlabel="water", ylabel="air", aspect="equal")
left.set(title="keys, and query 5")
right.scatter(*V.T, s=1500 * P[5] + 6, color=COLOURS[0], alpha=0.5, lw=0)
path = fwd_1_matrix.softmax(torch.linspace(0, 8, 400)[:, None] * (Q[5] @ K.T))[0] @ V
right.plot(*path.T, color=INK, lw=1.2, label="O[5] as the scale goes from 0 to 8")
right.plot(*V.mean(0), "s", color=COLOURS[2], label="scale 0: the mean")
right.plot(*O[5], "X", color=COLOURS[1], ms=10, label="scale 1/sqrt(2)")
right.set(xlim=(-2.6, 12), ylim=(-5.5, 7.6), yticks=range(-4, 8, 2))
right.set_title("values; area: the probability")
right.legend(loc="lower left", fontsize=8)
picture(fig, """Left: six key arrows and query 5 on the axes water and air; the query points
between the trout and the gull, whose keys are long. Right: the six values as discs whose
areas are their probabilities, 0.61 for the trout and 0.30 for the gull. The output moves
from the mean of all values at scale 0 past its place at scale 1/sqrt(2) to the trout's
value as the scale grows.""")

# %% slideshow={"slide_type": "subslide"}
loops, _ = step00.forward(Q, K, V, rung="loops")
torch_own = torch.nn.functional.scaled_dot_product_attention(Q[None], K[None], V[None])[0]
print("loops and matrix agree:", torch.allclose(loops, O))
print("matrix and torch's own agree:", torch.allclose(O, torch_own))
show("fwd_0_loops", "attend")

# %% [markdown] slideshow={"slide_type": "subslide"}
# ### What it costs
#
# Inputs and output have 4 N d numbers; S and P have $N^2$ each, and each of the two products takes $2 N^2 d$
# operations. `AliveBytes`, folded, adds up the bytes of all tensors alive at every call to torch: an exact
# count, the same on any machine. Rung 1 gets longer and longer sequences.

# %% jupyter={"source_hidden": true} slideshow={"slide_type": "skip"}
class AliveBytes(TorchDispatchMode):
    """Counts the bytes of new tensors: `with AliveBytes(q, k, v) as memory`.

    memory.peak is the most bytes alive at once. The inputs q, k and v do not count.
    """

    def __init__(self, *inputs):
        super().__init__()
        self.now = self.peak = 0
        self.known = weakref.WeakSet(x.untyped_storage() for x in inputs)

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        storage = result.untyped_storage() if isinstance(result, torch.Tensor) else None
        # If the storage is known, the result is a view of an earlier tensor.
        if storage is not None and storage not in self.known:
            self.known.add(storage)
            self.change(storage.nbytes())
            weakref.finalize(storage, self.change, -storage.nbytes())
        return result

    def change(self, count):
        self.now += count
        self.peak = max(self.peak, self.now)

# %% slideshow={"slide_type": "subslide"}
def peak_bytes(function, n, d=64):
    """The most bytes that function(q, k, v) uses beyond its inputs, one head, n tokens."""
    q, k, v = torch.randn(3, 1, 1, n, d)
    with AliveBytes(q, k, v) as memory:
        function(q, k, v)
    return memory.peak


def seconds(function, n, d=64):
    """The shortest of three runs."""
    q, k, v = torch.randn(3, 1, 1, n, d)
    return min(timeit.repeat(lambda: function(q, k, v), number=1, repeat=3))


lengths = (128, 256, 512, 1024, 2048)
peaks = [peak_bytes(fwd_1_matrix.forward, n) for n in lengths]
times = [seconds(fwd_1_matrix.forward, n) for n in lengths]
for n, peak in zip(lengths, peaks, strict=True):
    print(f"N = {n:4}: peak {peak / 2**20:6.2f} MiB = {peak / (4 * n * n):.2f} N^2 floats")
factors = [f"x {b / a:.1f}" for a, b in zip(times[:-1], times[1:], strict=True)]
print("time, as N doubles:", *factors)
print(f"one head's S at N = 16384: {4 * 16384**2 / 2**30:.0f} GiB of float32")

# %% jupyter={"source_hidden": true} slideshow={"slide_type": "fragment"}
fig, axes = plt.subplots(1, 2, figsize=(7.6, 3.2), layout="constrained")
ms = [1e3 * t for t in times]
mib = [peak / 2**20 for peak in peaks]
for ax, y, title in zip(axes, (ms, mib), ("time, ms", "peak memory, MiB"), strict=True):
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
picture(fig, """Two log-log plots of the matrix rung against N from 128 to 2048, each with a
line of slope N squared through its last point. Time climbs slowly at first, then at least
as steeply as that line. Peak memory lies on it, and leaves the dotted line of inputs and
output, which has slope N, further and further below.""")

# %% [markdown] slideshow={"slide_type": "subslide"}
# Memory lies on the $N^2$ line: at the peak four N x N matrices are alive (scores, exponentials, quotient, P). Inputs
# and output, dotted, only grow like N.
#
# Time climbs slowly at first, where fixed costs count. Then it can jump by much more than 4, in some runs by 16, from
# one N to the next. The arithmetic is not the reason, as it grows by 4. At these N the four matrices no longer fit
# into a processor's cache (64 MiB at N = 2048), and the operating system hands out new pages of memory for them at
# every call.
#
# The $N^2$ *products* are attention itself and stay. The $N^2$ *memory* can go. Two obstacles: softmax needs the whole
# row before it can give out a probability, and the backward seems to need P.

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
# $e^{s_j - c} / \sum e^{s_{j'} - c} = e^{-c} e^{s_j} / (e^{-c} \sum e^{s_{j'}})$. Choose c = m, the row's maximum: the
# largest exponent is 0, nothing overflows, and the sum is at least 1.

# %% slideshow={"slide_type": "fragment"}
m = s.max()
print("claim 1:  ", torch.allclose(naive_softmax(s - m), naive_softmax(s)))
print("safe, x50:", naive_softmax(50 * s - (50 * s).max()))

# %% [markdown] slideshow={"slide_type": "subslide"}
# ### Then, m must not be needed in advance
#
# Scores arrive one by one. Let m be the maximum *so far* and $l = \sum e^{s_j - m}$. When a larger score comes, m
# moves. Just going on with the new m is wrong:

# %% slideshow={"slide_type": "fragment"}
m, l = -math.inf, 0.0
for s_j in s.tolist():
    m = max(m, s_j)
    l = l + math.exp(s_j - m)  # the terms summed before used an older m
print(f"l without correction: {l:.2f}, should be {(s - s.max()).exp().sum():.2f}")

# %% [markdown] slideshow={"slide_type": "fragment"}
# **Claim 2.** When m moves to m_new, one factor corrects the whole sum:
# $\sum e^{s_j - m_{new}} = \alpha \sum e^{s_j - m}$ with $\alpha = e^{m - m_{new}} \le 1$. Think of $e^m$ as the unit
# that l is counted in: a larger unit, a smaller count.
#
# **Claim 3.** The output is a sum of the same kind, $O = \sum e^{s_j - m} v_j$, so the same factor corrects it. At
# the end O / l is the row of the result, exactly, and no row of S or P was stored.
#
# At the start m = -inf and l = O = 0. The first $\alpha$ is then $e^{-\infty} = 0$: there is nothing to rescale. Below,
# key 3 moves the maximum of row 5; then rung 2's `online_update` (yours to write in part 5) goes through all keys.

# %% slideshow={"slide_type": "fragment"}
old, new = s[:3].max(), s[:4].max()
alpha = (old - new).exp()
before = (s[:3] - old).exp()  # the first three terms, in the old unit
after = (s[:3] - new).exp()  # the same terms, in the new unit
print(f"m {old:.2f} -> {new:.2f}, alpha {alpha:.2f}", end="; ")
print(f"l over three keys: {before.sum():.2f} -> {after.sum():.2f}")
print("claim 2:", torch.allclose(alpha * before.sum(), after.sum()))
print("claim 3:", torch.allclose(alpha * (before @ V[:3]), after @ V[:3]))

m, l, o = torch.tensor(-math.inf), torch.tensor(0.0), torch.zeros(d)
trace = []
for s_j, v_j in zip(s, V, strict=True):
    before = m
    m, l, o = fwd_2_online.online_update(m, l, o, s_j, v_j)
    alpha = (before - m).exp()
    trace.append((m, alpha, l, o / l))
    print(f"m {m:.2f}  alpha {alpha:.2f}  l {l:.2f}  O/l ({o[0] / l:.2f}, {o[1] / l:.2f})")
print("O / l is row 5 of the result:", torch.allclose(o / l, O[5]))

# %% jupyter={"source_hidden": true} slideshow={"slide_type": "subslide"}
fig, axes = plt.subplots(3, 1, figsize=(7, 5.2), sharex=True, layout="constrained")
ms, alphas, ls, rows = zip(*trace, strict=True)
axes[0].bar(range(N), s, width=0.35, color=COLOURS[5], label="score s_j")
axes[0].step(range(N), ms, "o-", where="post", color=COLOURS[0], label="running maximum m")
axes[0].legend(fontsize=8, loc="upper left")
axes[0].set_title("m follows the largest score")
axes[1].plot(range(N), ls, "o-", color=COLOURS[1])
line = {"arrowstyle": "-", "color": FAINT}
for j in range(1, N):
    if alphas[j] < 1:
        text, above = f"x {alphas[j]:.2f}, then + 1", (j, max(ls) + 0.15)
        axes[1].annotate(text, (j, ls[j]), above, ha="center", fontsize=8, arrowprops=line)
axes[1].set(ylim=(0.9, max(ls) + 0.4), title="l, and its factor alpha where m moves")
for c in range(d):
    colour, so_far = COLOURS[2 + c], [row[c] for row in rows]
    axes[2].plot(range(N), so_far, "os"[c] + "-", color=colour, label=f"component {c}")
    axes[2].axhline(O[5, c], color=colour, lw=1, ls="--")
axes[2].legend(fontsize=8)
axes[2].set_title("O / l, over the keys so far; dashed: the final row")
axes[2].set(xlabel="key j", xticks=range(N))
picture(fig, """Three plots over keys 0 to 5. The running maximum steps up at keys 1, 3 and
4; the sum l is multiplied by alpha, 0.24, 0.24 and 0.49, there; the two components of O / l
move from the first value to the final row of the output and end on it.""")

# %% [markdown] slideshow={"slide_type": "subslide"}
# m moves at keys 1, 3 and 4, where alpha is 0.24, 0.24 and 0.49. At every key O / l *is* the attention over the keys
# seen so far; the last, (6.83, 1.34), is the value from above.
#
# **Claim 4.** Keys may come in groups of any size. Bc keys move m to their largest score if that is larger, add a sum
# to l, and add a matrix product to O. Br queries are computed side by side. The part of S that belongs to Br queries
# and Bc keys is a **tile**. Only one tile exists at a time.

# %% slideshow={"slide_type": "fragment"}
for tile in ((1, 1), (2, 3), (4, 2), (6, 6)):
    tiled_out, tiled_lse = fwd_3_tiled.forward(Q, K, V, tile=tile)
    print("tile", tile, torch.allclose(tiled_out, O), torch.allclose(tiled_lse, lse))

# %% [markdown] slideshow={"slide_type": "subslide"}
# ### What is kept: one number per row
#
# In the end m and l belong together: $m + \log l = \log \sum_j e^{s_j}$ is the **log-sum-exp** of the row, `lse`.
#
# **Claim 5.** $P_{ij} = e^{S_{ij} - \mathit{lse}_i}$. With lse, any entry of P can be made again from q and k, in any
# order, without a sum over the row. The backward uses this.

# %% slideshow={"slide_type": "fragment"}
print(f"row 5: m + log l = {m + l.log():.2f}, lse = {lse[5]:.2f}")
print("claim 5:", torch.allclose((S - lse[:, None]).exp(), P))
print(f"P[5, 4] alone: exp({S[5, 4]:.2f} - {lse[5]:.2f}) = {(S[5, 4] - lse[5]).exp():.2f}")
print(f"kept for N = 16384: lse {4 * 16384 / 2**10:.0f} KiB", end=", ")
print(f"P {4 * 16384**2 / 2**20:.0f} MiB")

# %% [markdown] slideshow={"slide_type": "slide"}
# ## 4. From algorithm to code
#
# ### The forward, tile by tile
#
# FlashAttention-2, Algorithm 1; in brackets the paper's lines. Line 10 is printed with an inverse,
# $\mathrm{diag}(e^{m-m_{new}})^{-1}O$; by claim 2 there is none ([papers/errata.md](../papers/errata.md), E12).
#
# | line | what it does | in `fwd_3_tiled.py` |
# |---|---|---|
# | [3–5] | for each tile of Br queries: Q_i; m = -inf, l = 0, O = 0 | `forward`, outer loop |
# | [6–7] | for each tile of Bc keys: K_j, V_j | `forward`, inner loop, up to `last_key` |
# | [8] | S = scale Q_i K_jᵀ (Br, Bc) | `forward`; then `mask` when causal |
# | [9–10] | m_new, P, alpha; new l and O | `online_update` (yours, in part 5) |
# | [12–15] | O / l and lse = m + log l, written once | `forward`, last two lines of the loop |
#
# First the budget: the memory that one round of the inner loop needs. Later stages keep exactly this on the GPU's
# chip.

# %% slideshow={"slide_type": "fragment"}
def tile_bytes(Br, Bc, d, size=4):
    """Bytes of Q_i, O, K_j, V_j, one tile of S, and m, l."""
    return size * (2 * Br * d + 2 * Bc * d + Br * Bc + 2 * Br)


for b in (16, 64, 128):
    print(f"tile ({b}, {b}), d = 64: {tile_bytes(b, b, 64) / 1024:.1f} KiB, for any N")
show("fwd_3_tiled", "forward")

# %% [markdown] slideshow={"slide_type": "subslide"}
# ### Causal tiles
#
# Causal: a query sees keys up to its own position. If Nq and Nk differ, the *last* query sees every key: the diagonal
# (dashed below) is aligned at the bottom right.
#
# - White tiles would be masked throughout: `last_key` ends the inner loop before them.
# - Orange tiles are crossed by the diagonal: only there does `mask` matter.
# - Blue tiles are seen whole.
#
# With more queries than keys, on the right, the first queries see no key: `out = 0` and `lse = -inf`, the value and the
# logarithm of an empty sum.

# %% jupyter={"source_hidden": true} slideshow={"slide_type": "fragment"}
def draw_tiles(ax, Nq, Nk, Br, Bc):
    """Each tile of S: visited whole, visited and masked in part, or never visited."""
    count = 0
    for i in range(0, Nq, Br):
        end = fwd_3_tiled.last_key(i + Br, Nq, Nk, True)
        for j in range(0, Nk, Bc):
            height, width = min(Br, Nq - i), min(Bc, Nk - j)
            S = torch.zeros(height, width)
            crossed = fwd_3_tiled.mask(S, i, j, Nk - Nq).isinf().any()
            colour = "white" if j >= end else COLOURS[4] if crossed else COLOURS[0]
            look = {"facecolor": colour, "edgecolor": INK, "lw": 0.8, "clip_on": False}
            ax.add_patch(plt.Rectangle((j, i), width, height, **look))
            count += j < end
    ax.plot([Nk - Nq, Nk], [0, Nq], color=INK, lw=1.5, ls="--")
    tiles = -(-Nq // Br) * -(-Nk // Bc)
    ax.set_title(f"tile ({Br}, {Bc}): {count} of {tiles}")
    ax.set(xlim=(0, Nk), ylim=(Nq, 0), aspect="equal")
    ax.set(xlabel=f"{Nk} keys", ylabel=f"{Nq} queries")
    ax.grid(False)

# %% jupyter={"source_hidden": true} slideshow={"slide_type": "fragment"}
fig, axes = plt.subplots(1, 3, figsize=(8.4, 3.2), layout="constrained")
draw_tiles(axes[0], 80, 80, 16, 16)
draw_tiles(axes[1], 56, 88, 8, 16)
draw_tiles(axes[2], 88, 56, 16, 8)
picture(fig, """Three maps of S cut into tiles. Nq = Nk: the lower left triangle is visited,
its tiles on the diagonal masked in part. Fewer queries than keys: the diagonal ends at the
bottom right, so a block of early keys is visited by all. More queries than keys: the first
queries see no key, and their tiles are never visited.""")

# %% [markdown] slideshow={"slide_type": "slide"}
# ### The backward, by hand
#
# dX is the gradient of the loss with respect to X. Given dO, we need dQ, dK and dV. For comparison, autograd
# computes all gradients, in float64 and with the causal mask.
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
q, k, v, P, O, lse = (x.detach() for x in (q, k, v, P, O, lse))  # the rest is done by hand

dV = P.mT @ dO  # (N, d)
dP = dO @ v.mT  # (N, N)
print("dV:", torch.allclose(dV, want["dV"]), " dP:", torch.allclose(dP, want["dP"]))

# %% [markdown] slideshow={"slide_type": "subslide"}
# **P = softmax(S).** From $P_{ij}=e^{S_{ij}-\mathit{lse}_i}$ and $\partial\,\mathit{lse}_i/\partial S_{ik}=P_{ik}$
# follows $\partial P_{ij}/\partial S_{ik}=P_{ij}([j=k]-P_{ik})$, where $[j=k]$ is 1 if j = k, else 0. Therefore
#
# $$dS_{ik} = \sum_j dP_{ij}\, P_{ij} ([j = k] - P_{ik}) = P_{ik}\, (dP_{ik} - \mathit{delta}_i), \qquad
# \mathit{delta}_i = \sum_j P_{ij}\, dP_{ij}.$$
#
# delta looks like a sum over rows of two N x N matrices. Two lines make it a scalar product of length d:
#
# $$\begin{aligned} \mathit{delta}_i &= \sum_j P_{ij} \sum_x dO_{ix} V_{jx} \\
# &= \sum_x dO_{ix} \sum_j P_{ij} V_{jx} = \sum_x dO_{ix}\, O_{ix} \end{aligned}$$
#
# **S = scale Q Kᵀ.** This is a product again, so
#
# $$dQ = \mathit{scale}\; dS\, K \qquad\qquad dK = \mathit{scale}\; dS^\top Q$$
#
# (FlashAttention-2, section 2.2, prints $dK=Q\,dS^\top$: the shapes do not fit, E8.)

# %% slideshow={"slide_type": "fragment"}
x = S.detach().requires_grad_()
(d_lse,) = torch.autograd.grad(x.logsumexp(-1).sum(), x)
print("d lse / d S is P:", torch.allclose(d_lse, P))
delta = (dO * O).sum(-1)  # (N,)
dS = P * (dP - delta[:, None])  # (N, N)
print("delta:", torch.allclose(delta, (P * dP).sum(-1)), delta)
print("dS:", torch.allclose(dS, want["dS"]))
print("each row of dS adds up to 0:", torch.allclose(dS.sum(-1), torch.zeros_like(delta)))
dQ, dK = scale * dS @ k, scale * dS.mT @ q
print("dQ:", torch.allclose(dQ, want["dQ"]), " dK:", torch.allclose(dK, want["dK"]))
module = bwd_1_matrix.backward(dO, q, k, v, O, lse, causal=True)
same = [torch.allclose(a, b) for a, b in zip(module, (dQ, dK, dV), strict=True)]
print("bwd_1_matrix gives the same:", all(same))

# %% [markdown] slideshow={"slide_type": "subslide"}
# Every formula works on one tile at a time: P from lse (claim 5), dP from dO and V, dS from delta. Nothing is rescaled,
# because lse is final. So the backward needs q, k, v, out and lse, and *recomputes* S. Rung 3 is FlashAttention-2's
# Algorithm 2: the loop over key tiles is outside, so that dK_j and dV_j are finished in one visit.

# %% slideshow={"slide_type": "fragment"}
show("bwd_3_tiled", "backward")

# %% [markdown] slideshow={"slide_type": "slide"}
# ## 5. Write it yourself
#
# Write the body in place of `raise Blank` and run the cell: `check` puts your function in the place of the module's,
# runs some of the contract's cases, and names what fails. `hint("00.1")` asks a question, `hint("00.1", 2)` gives the
# formula, `hint("00.1", 3)` pseudo-code, `solution("00.1")` the module's function.
#
# **Exercise 00.1: a softmax that cannot overflow.** Claims 1 and 5 for all rows of S at once. Take care of a row that
# is masked throughout.

# %% slideshow={"slide_type": "fragment"}
def softmax(S):
    """(P, lse) over the last dimension of S.

    A row that is masked throughout gets P = 0 and lse = -inf, not NaN.
    """
    raise Blank


check("00.1", softmax)

# %% [markdown] slideshow={"slide_type": "subslide"}
# **Exercise 00.2: add one key to m, l and O.** Claims 2 and 3 for all queries at once, each with its own m. Take care
# of a query that has seen no key yet.

# %% slideshow={"slide_type": "fragment"}
def online_update(m, l, O, s, v_j):
    """(m, l, O) after one more key, with scores s (B, H, Nq) and value v_j (B, H, 1, D).

    m and l are (B, H, Nq), O is (B, H, Nq, D).
    """
    raise Blank


check("00.2", online_update)

# %% [markdown] slideshow={"slide_type": "subslide"}
# **Exercise 00.3: mask a tile.** Make -inf what the queries of one tile may not see: the orange tiles of part 4.

# %% slideshow={"slide_type": "fragment"}
def mask(S, i, j, shift):
    """S (..., Br, Bc), with -inf where the key lies after the query.

    The tile starts at query i and key j; query i stands at position i + shift.
    """
    raise Blank


check("00.3", mask)

# %% [markdown] slideshow={"slide_type": "subslide"}
# **Exercise 00.4: one tile of the backward.** Recompute P from lse and find dS, as the loop above asks for them. `rows`
# and `keys` are slices. Do not forget the mask.

# %% slideshow={"slide_type": "fragment"}
def tile_gradients(dout, q, k, v, lse, delta, rows, keys, causal, scale):
    """(P, dS) of one tile, both (B, H, Br, Bc)."""
    raise Blank


check("00.4", tile_gradients)

# %% [markdown] slideshow={"slide_type": "subslide"}
# **Bug hunt 00.bug1.** What was reported about `show("00.bug1")` is printed below. Find the cause, and write the test
# that would have caught it: it has to fail on the broken forward and pass on the stage's own. `check` then asks which
# of four causes it is.

# %% slideshow={"slide_type": "fragment"}
print(textwrap.fill(exercises.find("00.bug1").symptom, 110))


def test(forward):
    """Asserts what must hold of (out, lse) = forward(q, k, v, causal=..., scale=...).

    forward may be the stage's own or a broken one.
    """
    raise Blank


check("00.bug1", test)

# %% [markdown] slideshow={"slide_type": "slide"}
# ## 6. Check it, then break it
#
# All stages fulfil one contract: named cases, compared with a float64 reference. The tolerance follows from the
# inputs: twice plain attention's error in the same precision, plus what rounding may add. Here is stage 00 on every
# case.

# %% slideshow={"slide_type": "fragment"}
def run_case(case, dtype=torch.float32):
    """(the stage's results, what is expected) on one of the contract's cases."""
    x = cases.build(case, step00.SUPPORTS, dtype)
    want = error.expected(x.q, x.k, x.v, x.dout, causal=x.causal, scale=x.scale)
    return cases.run(step00, case, x), want


runs, failed = 0, []
worst = dict.fromkeys(error.NAMES, 0.0)
for case, dtype, reason in cases.select(step00.SUPPORTS):
    if reason:
        print(f"not run: {case.name} ({reason})")
        continue
    got, want = run_case(case, dtype)
    runs += 1
    if error.failures(got, want):
        failed.append(case.name)
    for name, e in error.errors(got, want).items():
        worst[name] = max(worst[name], e / (want.tolerance[name] or 1))
print(f"{runs} runs, {len(failed)} failed")
in_units = {name: round(ratio, 2) for name, ratio in worst.items()}
print("largest error in units of the tolerance:", in_units)

# %% [markdown] slideshow={"slide_type": "subslide"}
# Now change one thing. `forward` passes `Nk - Nq` to `mask`, which says where the diagonal lies. Suppose someone
# passes 0: then the diagonal starts at the top left. **Which kind of case will fail?**
#
# <details><summary>Answer</summary>
#
# Only causal cases in which Nq and Nk differ; for Nq = Nk the shift is 0 anyway.
#
# </details>

# %% slideshow={"slide_type": "fragment"}
right_mask = fwd_3_tiled.mask
with patch.object(fwd_3_tiled, "mask", lambda S, i, j, shift: right_mask(S, i, j, 0)):
    for case, dtype, reason in cases.select(step00.SUPPORTS):
        if reason is None and dtype == torch.float32 and error.failures(*run_case(case)):
            print("fails:", case.name, "-", case.says)

# %% [markdown] slideshow={"slide_type": "subslide"}
# [reference/mutants.py](../reference/mutants.py) contains such mistakes, called mutants: a test suite is as good as
# the mutants it kills. Below, a row is a mistake, a column one of the contract's cases. `no_maximum` never subtracts
# m, and survives every case with ordinary random scores. `maximum_starts_at_zero` (m = 0 instead of -inf) dies in one
# case alone, where a row's scores are all very negative: every exponential underflows.

# %% slideshow={"slide_type": "fragment"}
mistakes = """no_rescale_of_o inverse_alpha first_maximum_kept no_maximum
    maximum_starts_at_zero tile_local_mask top_left tail_not_masked hard_coded_scale
    delta_missing dq_scale_missing""".split()
inputs = """ragged ragged_causal fewer_queries_causal more_queries_causal one_key
    head_dim_64 scores_200 rising falling negative_row""".split()
verdicts = {}
for case in (c for c in cases.CASES if c.name in inputs):
    x = cases.build(case, step00.SUPPORTS, torch.float32)
    want = error.expected(x.q, x.k, x.v, x.dout, causal=x.causal, scale=x.scale)
    for mutant in (m for m in mutants.MUTANTS if m.name in mistakes):
        try:
            got = mutant.run(x, x.tile, step00.SUPPORTS["order"])
            verdict = "killed" if error.failures(got, want) else "survives"
        except mutants.NotApplicable:
            verdict = "n/a"
        verdicts[mutant.name, case.name] = verdict

# %% jupyter={"source_hidden": true} slideshow={"slide_type": "fragment"}
looks = {"killed": (COLOURS[0], "x", "white"),
         "survives": (COLOURS[4], "lives", INK),
         "n/a": (FAINT, "", INK)}  # fmt: skip
fig, ax = plt.subplots(figsize=(8, 4.2), layout="constrained")
for r, mutant in enumerate(mistakes):
    for c, case in enumerate(inputs):
        colour, text, ink = looks[verdicts[mutant, case]]
        ax.add_patch(plt.Rectangle((c, r), 1, 1, facecolor=colour, edgecolor="white"))
        ax.text(c + 0.5, r + 0.5, text, color=ink, ha="center", va="center", fontsize=8)
ax.set_title("blue, x: killed    orange, lives: not noticed    grey: cannot matter here")
ax.set(xlim=(0, len(inputs)), ylim=(len(mistakes), 0))
slanted = {"rotation": 35, "ha": "right", "rotation_mode": "anchor", "fontsize": 8}
ax.set_xticks([c + 0.5 for c in range(len(inputs))], inputs, **slanted)
ax.set_yticks([r + 0.5 for r in range(len(mistakes))], mistakes, fontsize=8)
ax.grid(False)
ax.tick_params(length=0)
ax.spines[:].set_visible(False)
picture(fig, """A table of eleven mistakes against ten cases. Several die almost everywhere.
Leaving out the maximum lives through all cases but those with scores of 100 and more;
starting the maximum at zero dies only in the case with a row of very negative scores; the
top-left mask only where Nq and Nk differ.""")

# %% [markdown] slideshow={"slide_type": "slide"}
# ## 7. Predict, then measure
#
# **Question 1.** When N doubles, the peak memory of rung 1 grows by a factor of 4. By which factor does it grow for
# rung 2 (key by key, all rows together), and for rung 3 with tiles of (64, 64)? Is rung 3 faster than rung 1 on this
# CPU?
#
# <details><summary>Answer</summary>
#
# Rung 2: by 2, as it holds a few tensors like O. Rung 3: by less. Only out and lse grow with N, and at first one tile
# needs more than they do. Faster: not with small tiles. The products are the same, but $32^2$ tiles of (16, 16) mean
# as many rounds of torch calls, and a call takes longer than its arithmetic. Only a kernel turns saved memory into
# saved time.
#
# </details>

# %% slideshow={"slide_type": "fragment"}
rungs = {"rung 1, matrix": fwd_1_matrix.forward, "rung 2, online": fwd_2_online.forward,
         "rung 3, (64, 64)": partial(fwd_3_tiled.forward, tile=(64, 64))}  # fmt: skip
short, sizes = (64, 128, 256, 512), (16, 32, 64, 128, 256)
memory = {name: [peak_bytes(f, n) / 2**20 for n in short] for name, f in rungs.items()}
for name, mib in memory.items():
    print(f"{name}: from N = 256 to 512 by {mib[3] / mib[2]:.2f}")
ms = [1e3 * seconds(partial(fwd_3_tiled.forward, tile=(b, b)), 512) for b in sizes]
matrix_ms = 1e3 * seconds(fwd_1_matrix.forward, 512)

# %% jupyter={"source_hidden": true} slideshow={"slide_type": "fragment"}
looks = (COLOURS[1], "o-"), (COLOURS[2], "s-"), (COLOURS[0], "D-")
fig, (left, right) = plt.subplots(1, 2, figsize=(8, 3.2), layout="constrained")
for (name, mib), (colour, look) in zip(memory.items(), looks, strict=True):
    left.loglog(short, mib, look, color=colour, label=name)
right.loglog(sizes, ms, "D-", label="rung 3, tiles of (b, b)")
right.axhline(matrix_ms, color=COLOURS[1], ls="--", label="rung 1, matrix")
left.set(xlabel="N", title="peak memory, MiB")
right.set(xlabel="b", title="time at N = 512, ms")
for ax, ticks in ((left, short), (right, sizes)):
    ax.set_xticks(ticks, ticks)
    ax.minorticks_off()
    ax.legend(fontsize=8)
picture(fig, """Left: peak memory against N on log-log axes: the matrix rung rises with
slope 2, the online rung with slope 1, and the tiled rung, highest at N = 64 where one tile
is all, lies lowest from N = 256 on with a slope below 1. Right: time of the tiled rung at N
= 512 against its tile size, falling as the tiles grow from 16; the matrix rung's time is
far below that of small tiles.""")

# %% [markdown] slideshow={"slide_type": "subslide"}
# ### The traffic, counted
#
# A GPU's chip has little memory of its own. Tensors lie beside it, in **device memory**, and fetching a number from
# there takes as long as many operations (printed below). So the papers count what passes between the two.
# `io_count.py` does so on any machine: `memory.put` makes an array, `x[rows]` counts as a load, `x[rows] = tile` as a
# store; what happens on the chip is not counted. With $T_c=\lceil N/B_c\rceil$ tiles of keys and
# $T_r=\lceil N/B_r\rceil$ of queries:
#
# | order | loads | stores |
# |---|---|---|
# | standard: S, P, O in three steps | Q, K, V; S, P: $3Nd+2N^2$ | S, P; O; lse: $2N^2+Nd+N$ |
# | FA1: keys outside | K, V; Q, O, l, m for each tile: $2Nd+T_cN(2d+2)$ | O, l, m at first and for each: $(1+T_c)N(d+2)$ |
# | FA2: queries outside | Q; K, V for each tile: $Nd+2NdT_r$ | O, lse: $Nd+N$ |
#
# A short last tile changes nothing: all tiles' rows add up to N. FA2's order is rung 3's; here is FA1's:

# %% slideshow={"slide_type": "fragment"}
gpu = cost.GPUS["NVIDIA H200"]
each = 4 * gpu.fp32_tflops / gpu.bandwidth
print(f"{gpu.name}: {each:.0f} float32 operations for each float32 from device memory")
show("io_count", "fa1")

# %% [markdown] slideshow={"slide_type": "subslide"}
# **Question 2.** Let d = 64 and N be large. From which Bc on does FA1's order move less than standard attention?
#
# <details><summary>Answer</summary>
#
# Compare the terms with $N^2$: $T_cN(3d+4)\approx N^2(3d+4)/B_c$ against $4N^2$. FA1 wins for $B_c>(3d+4)/4=49$. With
# smaller tiles, O going back and forth costs more than S and P did.
#
# </details>

# %% slideshow={"slide_type": "fragment"}
def moved(order, N, *tile, d=64):
    """Elements that one run loads and stores: counted, and equal to the formula."""
    memory = io_count.Memory()
    run, formula = getattr(io_count, order), getattr(io_count, order + "_count")
    run(memory, *torch.randn(3, N, d), **({"tile": tile} if tile else {}))
    assert (memory.loads, memory.stores) == formula(N, d, *tile)
    return memory.loads + memory.stores


def all_three(N, M, d=64):
    """The counts of the three orders. M numbers fit on the chip: Q_i, O_i, K_j, V_j."""
    Bc = M // (4 * d)
    fa1, fa2 = moved("fa1", N, min(Bc, d), Bc), moved("fa2", N, Bc, Bc)
    return {"standard": moved("standard", N), "fa1": fa1, "fa2": fa2}


by_length = {N: all_three(N, 16384) for N in (100, 200, 500, 1000)}
by_memory = {M: all_three(500, M) for M in (4096, 8192, 16384, 32768)}
for N, counts in by_length.items():
    ratios = (f"{order} {c} = {c / N**2:.2f} N^2 " for order, c in counts.items())
    print(f"N = {N:4}, M = 16384:", *ratios)
print("d (3 d + 4) =", 64 * (3 * 64 + 4))
for M, counts in by_memory.items():
    ratios = (f"{name} {counts[name] / counts['standard']:.2f}" for name in ("fa1", "fa2"))
    print(f"N = 500, M = {M:5}:", *ratios, "times standard")

# %% jupyter={"source_hidden": true} slideshow={"slide_type": "skip"}
def formula(order, N, M):
    """What the table's formula says, with the tile of all_three."""
    Bc = M // (4 * d)
    tile = {"standard": (), "fa1": (min(Bc, d), Bc), "fa2": (Bc, Bc)}[order]
    return sum(getattr(io_count, order + "_count")(N, d, *tile))


def draw_counts(ax, counts, arguments):
    """Counts as marks on their formula's line, and the paper's expression, dashed."""
    for (order, (text, paper, colour)), marker in zip(papers.items(), "osD", strict=True):
        xs = range(min(counts), max(counts) + 1, 4)
        exact = [formula(order, *arguments(x)) for x in xs]
        ax.plot(xs, exact, color=colour, lw=1, label=f"{order}: formula")
        about = [paper(*arguments(x)) for x in xs]
        ax.plot(xs, about, "--", color=colour, lw=1, label=text)
        marks = [count[order] for count in counts.values()]
        ax.plot(list(counts), marks, marker, color=colour, label=f"{order}: counted")
    ax.set(xscale="log", yscale="log", ylim=(2e4, 6e6))
    ax.set_xticks(list(counts), list(counts))
    ax.xaxis.minorticks_off()

# %% jupyter={"source_hidden": true} slideshow={"slide_type": "subslide"}
d = 64
papers = {
    "standard": ("4 (N d + N^2)", lambda N, M: 4 * (N * d + N * N), COLOURS[1]),
    "fa1": ("12 N^2 d^2 / M", lambda N, M: 12 * N**2 * d**2 / M, COLOURS[2]),
    "fa2": ("2 N d ceil(N / Br)", lambda N, M: 2 * N * d * -(-4 * d * N // M), COLOURS[0]),
}
fig, (left, right) = plt.subplots(1, 2, figsize=(8.6, 3.9), layout="constrained")
draw_counts(left, by_length, lambda N: (N, 16384))
draw_counts(right, by_memory, lambda M: (500, M))
right.axvline(d * (3 * d + 4), color=INK, lw=1, ls=":")
left.set(xlabel="N, with M = 16384", title="elements moved")
right.set(xlabel="M, with N = 500")
handles = left.get_legend_handles_labels()
fig.legend(*handles, fontsize=8, ncols=3, loc="outside lower center")
picture(fig, """Elements moved on log-log axes, counts as marks on the solid lines of their
formulas; dashed, somewhat below, the papers' expressions. Left, against N: all three rise
with a slope near 2, standard attention highest, FA1 a little below, FA2 lowest. Right,
against M: standard is flat; FA1 and FA2 fall like 1 / M, FA1 from far above standard to
below it near the dotted line at M = 12544.""")

# %% [markdown] slideshow={"slide_type": "fragment"}
# Every count equals its formula to the element: the marks lie on the solid lines. The dashed lines are the papers'
# expressions, with $M=4dB_c$, room for Q_i, O_i, K_j and V_j:
#
# - standard: $\Theta(Nd+N^2)$ with the constant 4 (S and P, written and read);
# - FA1: $\Theta(N^2d^2/M)$ with 12 (Q and O loaded, O stored, $4Nd/M$ times);
# - FA2: $NdT_r$ with 2 (K and V).
#
# The distance between a dashed line and a solid one is the terms of lower order.
#
# All grow like $N^2$; the tile decides the factor. With tiles of 64, at N = 1000, FA1's order saves little: 3.33 N²
# against 4.26 N²; FA2's moves 2.18 N². Left of M = d (3d + 4) = 12544, dotted, FA1 is no better than standard
# attention: it moves 1.48 times as much at M = 8192. At M = 32768 it moves 0.43 times as much, and FA2 0.28. The
# theorem promises an order of growth, not the constant. The count for standard attention assumes that each of its
# steps has all the memory on the chip that it wants.

# %% [markdown] slideshow={"slide_type": "slide"}
# ## 8. Summary
#
# - Attention is a mean of values under the softmax of scores: $N^2$ scores, N d results.
# - Subtracting the row's maximum keeps exp in range; so does a running maximum, if alpha rescales l and O.
# - O / l at the end is exact, whatever the tiles; only one tile of S exists at a time.
# - lse, one number a row, gives back P; with delta, one more, the backward works tile by tile too.
# - Larger tiles move less; small ones can move more than standard attention.
# - Tests with small random scores and square shapes miss real mistakes.
#
# **Ask yourself**
#
# 1. Why is l never below 1 once a row has seen a key?
# 2. In which order of scores is alpha always 1 after the first key?
# 3. What would go wrong if m started at -100?
# 4. Why does the backward need no running maximum?
# 5. Does Br or Bc decide the traffic of FA1's order, and of FA2's? Why not the other?
#
# **Go further**
#
# - ★ (15 minutes) Write the softmax of a vector in two passes instead of three. Test at scores of ±200.
# - ★★ (1 hour) Give rung 2 a sliding window: query i sees the last w keys. Check against
#   `reference.attention.forward(..., causal=True, window=(w - 1, 0))`.
# - ★★★ (a weekend) Write the backward, Algorithm 2, against `io_count.Memory`, derive its formula, then swap its loops.
#   Which order moves less, and when?
#
# **Read:** [papers/attention.md](../papers/attention.md), [papers/online_softmax.md](../papers/online_softmax.md),
# and the traffic count in [papers/flash_attention.md](../papers/flash_attention.md).
#
# **Next:** [01_fa1_numba.ipynb](01_fa1_numba.ipynb). The tiles move to where they pay: a GPU's shared memory.
