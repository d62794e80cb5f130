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
# ## 1. The question
#
# *The gradients need P, and P was never stored. What is kept instead, who adds up which gradient, and why are two runs
# not equal to the last bit?*
#
# - **Before you start:** notebook 00, part 4 (the derivation at length), and 02a (the forward kernel, the emulation).
# - **Time:** about 40 minutes to read, an hour more with the exercise.
# - **Hardware:** any computer with Linux (or WSL2) and g++; a GPU adds the runs marked "engine".
# - **Code:** `steps/step02_fa2_cuda/bwd_0_scalar.cu`. **Tests:** `pytest tests/test_step02_fa2_cuda.py`.

# %% slideshow={"slide_type": "skip"}
import steps  # first: it chooses the engine
import math
import re
import tempfile
from contextlib import contextmanager
from pathlib import Path
from unittest.mock import patch

import matplotlib
import matplotlib.pyplot as plt
import torch

from reference import cases, error, mutants
from reference.bench import plots, rows
from reference.bench.plots import COLOURS, FAINT, INK
from steps import contract
from steps import step02_fa2_cuda as step02
from steps.step02_fa2_cuda import emulator, kernels, nvrtc
from steps.workbook import check, hint, picture, rungs, show, solution  # noqa: F401  for part 5

torch.set_num_threads(1)
torch.set_printoptions(precision=2, sci_mode=False)
plots.style()
print(steps.engine.describe())
print("matplotlib", matplotlib.__version__)

# %% [markdown] slideshow={"slide_type": "slide"}
# ## 2. The problem, measured
#
# Between forward and backward, autograd keeps what the gradients will need. For standard attention that includes P,
# N x N numbers a head. The next cell asks autograd for every tensor that it saves, and adds up their bytes.


# %% slideshow={"slide_type": "fragment"}
def standard(q, k, v):
    return torch.softmax(q @ k.mT / math.sqrt(q.shape[-1]), -1) @ v


def kept_bytes(attention, N, D=32):
    """Bytes that autograd keeps for the backward of one head."""
    q, k, v = (torch.randn(1, 1, N, D, device=steps.engine.device, requires_grad=True) for _ in range(3))
    kept = {}

    def note(x):
        kept[x.untyped_storage().data_ptr()] = x.untyped_storage().nbytes()
        return x

    with torch.autograd.graph.saved_tensors_hooks(note, lambda x: x):
        attention(q, k, v)
    return sum(kept.values())


lengths = (64, 128, 256, 512, 1024)
kept = {f.__name__: [kept_bytes(f, N) / 1024 for N in lengths] for f in (standard, step02.attention)}
for n, N in enumerate(lengths):
    print(f"N = {N:4}: standard keeps {kept['standard'][n]:5.0f} KiB, stage 02 {kept['attention'][n]:4.0f}")
print(f"of which lse at N = 1024: {4 * 1024 / 1024:.0f} KiB, and P would be {4 * 1024**2 / 1024:.0f} KiB")

# %% slideshow={"slide_type": "fragment"}
fig, ax = plt.subplots(figsize=(6.4, 3.3), layout="constrained")
ax.loglog(lengths, kept["standard"], "o-", color=COLOURS[1], label="standard: q, k, v and P")
ax.loglog(lengths, kept["attention"], "D-", color=COLOURS[0], label="stage 02: q, k, v, out and lse")
ax.loglog(lengths, [4 * N / 1024 for N in lengths], ":", color=INK, label="lse alone: one number a row")
ax.set(xlabel="N", title="kept for the backward, one head of D = 32, KiB")
ax.set_xticks(lengths, lengths)
ax.minorticks_off()
ax.legend(fontsize=8)
picture(fig, """Bytes kept for the backward against N on log-log axes. Standard attention bends
up to slope 2, stage 02 rises with slope 1 and stays below from N = 128 on. A dotted line for
lse alone lies far under both.""")

# %% [markdown] slideshow={"slide_type": "subslide"}
# At N = 1024 standard attention keeps 4480 KiB for one head and stage 02 keeps 516. What replaces P is lse: 4 KiB. The
# price is arithmetic: S has to be multiplied out again.

# %% [markdown] slideshow={"slide_type": "slide"}
# ## 3. The idea: recompute P, and let each gradient be a sum over tiles
#
# **Claim.** With lse kept, every entry of P can be made again alone, and all gradients are sums over entries:
#
# $$P_{ij} = e^{S_{ij} - \mathit{lse}_i} \qquad dV = P^\top dO \qquad dP = dO\, V^\top$$
#
# $$\mathit{delta}_i = \sum_x dO_{ix} O_{ix} \qquad dS = P \circ (dP - \mathit{delta}) \qquad
# dQ = \mathit{scale}\, dS\, K \qquad dK = \mathit{scale}\, dS^\top Q$$
#
# In short: O = P V gives dV and dP as products. In the softmax, raising one score lowers every other weight of the row,
# and delta is the row's share in that. S = scale Q Kᵀ is a product again. Notebook 00 derives each line; here each is
# checked against autograd on its six tokens, the tempting one, without delta, first.

# %% slideshow={"slide_type": "fragment"}
N, d = 6, 2
Q = torch.tensor([[1.0, 2], [0, 1], [-1, 0], [2, -1], [1, 1], [3, 1]])
K = torch.tensor([[0.0, 1], [1, 0], [-1, 1], [1, 2], [2, 0], [0, -1]])
V = torch.tensor([[0.0, 6], [2, 0], [4, 6], [6, 4], [8, 0], [10, 6]])
dO = torch.tensor([[1.0, 0], [0, 1], [1, 1], [2, 0], [0, -1], [1, -1]])
scale = 1 / math.sqrt(d)

leaves = [x.clone().requires_grad_() for x in (Q, K, V)]
want_dQ, want_dK, want_dV = torch.autograd.grad(standard(*leaves), leaves, dO)
S = scale * Q @ K.T  # (N, N)
lse = S.logsumexp(-1)  # (N,), kept by the forward
O = S.softmax(-1) @ V  # (N, d), kept too

P = (S - lse[:, None]).exp()  # recomputed
dV, dP = P.T @ dO, dO @ V.T  # (N, d), (N, N)
print("dV:", torch.allclose(dV, want_dV))
print("dQ without delta:", torch.allclose(scale * (P * dP) @ K, want_dQ, atol=1e-5), end="; ")
print(f"row 5 is {(scale * (P * dP) @ K)[5]}, should be {want_dQ[5]}")
delta = (dO * O).sum(-1)  # (N,)
dS = P * (dP - delta[:, None])  # (N, N)
dQ, dK = scale * dS @ K, scale * dS.T @ Q
print("dQ:", torch.allclose(dQ, want_dQ, atol=1e-5), " dK:", torch.allclose(dK, want_dK, atol=1e-5))
print("delta:", delta, " row sums of dS are 0:", torch.allclose(dS.sum(-1), torch.zeros(N), atol=1e-5))

# %% slideshow={"slide_type": "subslide"}
fig, axes = plt.subplots(1, 3, figsize=(8.4, 3.0), layout="constrained")
panels = {"P": P, "dP - delta": dP - delta[:, None], "dS = P (dP - delta)": dS}
for ax, (title, matrix) in zip(axes, panels.items(), strict=True):
    limit = matrix.abs().max()
    ax.imshow(matrix, cmap=plt.get_cmap("RdBu", 13), vmin=-limit, vmax=limit)
    for i in range(N):
        for j in range(N):
            dark = matrix[i, j].abs() > 0.6 * limit
            ink = {"ha": "center", "va": "center", "color": "white" if dark else INK}
            ax.text(j, i, f"{matrix[i, j]:.2f}", fontsize=7, **ink)
    ax.set(title=title, xlabel="key j", xticks=range(N), yticks=range(N))
    ax.grid(False)
axes[0].set_ylabel("query i")
picture(fig, """Three 6 x 6 tables of numbers on blue for positive and red for negative: P, dP
minus delta, and their product dS. dS is large only where P is not small: in row 5, +1.52 at key
4 and -1.04 at key 3.""")

# %% [markdown] slideshow={"slide_type": "subslide"}
# Row 5 of dS: a larger score of key 4 raises the loss (1.52), a larger one of key 3 takes weight from it and lowers the
# loss (-1.04). The row adds up to 0, since weights are only moved.
#
# ### Whose gradient stays on the chip?
#
# A tile of P and dS adds to dV_j and dK_j (a sum over queries) *and* to dQ_i (a sum over keys). Whichever loop is
# outside, one of the sums crosses blocks.

# %% slideshow={"slide_type": "fragment"}
fig, axes = plt.subplots(1, 2, figsize=(8, 3.6), layout="constrained")
for ax, by_keys in zip(axes, (True, False), strict=True):
    for i in range(4):
        for j in range(4):
            colour = COLOURS[j if by_keys else i]
            ax.add_patch(plt.Rectangle((j, i), 1, 1, facecolor=colour, alpha=0.5, edgecolor="white", lw=2))
    for n in range(4):
        ends = ((n + 0.5, 3.9), (n + 0.5, 0.1)) if by_keys else ((3.9, n + 0.5), (0.1, n + 0.5))
        ax.annotate("", *ends, arrowprops={"arrowstyle": "->", "color": INK})
        side, below = (4.4, n + 0.5), (n + 0.5, 4.35)
        own, shared = ("dK dV", "dQ +=") if by_keys else ("dQ", "dK dV\n+=")
        looks = {"fontsize": 8, "ha": "center", "va": "center"}
        ax.text(*(below if by_keys else side), own, color=COLOURS[n], weight="bold", **looks)
        ax.text(*(side if by_keys else below), shared, color=INK, **looks)
    ax.set(xlim=(0, 5), ylim=(4.7, 0), aspect="equal", xticks=[], yticks=[], ylabel="query tiles i")
    ax.set_title("key tiles outside" if by_keys else "query tiles outside")
    ax.grid(False)
    ax.spines[:].set_visible(False)
picture(fig, """Two grids of four query tiles by four key tiles. Left: a colour a column, one
block each, walking down; dK and dV stand below each column in its colour, and dQ += stands at
the end of each row in black, since all four blocks add to it. Right: a colour a row; dQ in its
colour at the end of each row, dK dV += below the columns.""")

# %% [markdown] slideshow={"slide_type": "subslide"}
# In its own colour: kept in the block's registers, written once. In black: added to by *all* blocks, which needs
# **atomic additions**, since a plain `dq[e] += x` reads, adds and writes, and another block may write in between. Key
# tiles outside is cheaper: one matrix is added to instead of two. A third way is both orders, in two kernels, without any
# atomics.


# %% slideshow={"slide_type": "fragment"}
def count(Nq, Nk, D, Br, Bc):
    """{order: (products of Br x Bc x D, atomic additions)} of one head."""
    tiles = -(-Nq // Br) * -(-Nk // Bc)
    return {
        "key tiles outside": (5 * tiles, -(-Nk // Bc) * Nq * D),  # S, dP, dV, dK, dQ; dQ is added to
        "query tiles outside": (5 * tiles, -(-Nq // Br) * 2 * Nk * D),  # dK and dV are
        "both, one after the other": (7 * tiles, 0),  # S and dP are needed twice
    }


for order, (products, atomics) in count(4096, 4096, 64, 64, 64).items():
    print(f"{order:26} {products:6} tile products, {atomics / 1e6:5.1f} million atomic additions")

# %% [markdown] slideshow={"slide_type": "subslide"}
# ### What atomics cost: the last bits
#
# An atomic addition loses nothing, but the order is whoever comes first, and in floating point the order counts:

# %% slideshow={"slide_type": "fragment"}
large, one = torch.tensor(1e8), torch.tensor(1.0)
print("(1e8 + 1) - 1e8 =", ((large + one) - large).item(), end="    ")
print("(1e8 - 1e8) + 1 =", ((large - large) + one).item())
terms = torch.randn(5, 2000, generator=torch.Generator().manual_seed(0))
forwards, backwards = terms[0], terms[4]
for n in range(1, 5):
    forwards, backwards = forwards + terms[n], backwards + terms[4 - n]
print(f"2000 sums of five terms, forwards and backwards: {(forwards != backwards).sum()} differ", end=", ")
print(f"by at most {(forwards - backwards).abs().max():.1e}")

# %% [markdown] slideshow={"slide_type": "fragment"}
# The emulation runs one block after the other in an order that we choose. So we can do what a GPU does by itself, and
# watch:


# %% slideshow={"slide_type": "fragment"}
def gradients(n, blocks, seed=0):
    """(dq, dk, dv) of two heads of n tokens, D = 32, in the emulation, tile (16, 16)."""
    q, k, v, dout = torch.randn(4, 1, 2, n, 32, generator=torch.Generator().manual_seed(0))
    out, lse = kernels.scalar_forward(q, k, v)
    with emulator.schedule(blocks=blocks, seed=seed):
        return kernels.scalar_backward(dout, q, k, v, out, lse)


first = gradients(67, "forward")
orders = {"forward again": ("forward", 0), "reverse": ("reverse", 0)}
orders |= {f"random {seed}": ("random", seed) for seed in range(1, 5)}
changed = {}
for says, order in orders.items():
    changed[says] = [int((x != y).sum()) for x, y in zip(gradients(67, *order), first, strict=True)]
print(f"elements whose bits change, of {first[0].numel()}, against blocks in order:")
for says, (dq, dk, dv) in changed.items():
    print(f"  {says:14} dq {dq:5}   dk {dk}   dv {dv}")
difference = first[0] - gradients(67, "reverse")[0]
print(f"dq, forward against reverse: at most {difference.abs().max():.1e},", end=" ")
print(f"largest entry {first[0].abs().max():.2f}")

# %% slideshow={"slide_type": "fragment"}
fig, (left, right) = plt.subplots(1, 2, figsize=(8, 3.3), layout="constrained", width_ratios=(1, 1.4))
for n, name in enumerate(("dq", "dk", "dv")):
    places = [y + 0.25 * (n - 1) for y in range(len(orders))]
    left.barh(places, [c[n] for c in changed.values()], 0.25, color=COLOURS[n], label=name)
left.set_yticks(range(len(orders)), orders, fontsize=8)
left.set(
    title="elements with other bits", xlim=(0, 3400), xticks=(0, 1000, 2000), ylim=(len(orders) - 0.4, -0.6)
)
left.grid(axis="y", visible=False)
left.legend(fontsize=8, loc="upper right")
limit = difference.abs().max()
shown = right.imshow(
    difference[0, 0].T, cmap=plt.get_cmap("RdBu", 9), vmin=-limit, vmax=limit, aspect="auto"
)
right.set(title="dq forward minus dq reverse, head 0", xlabel="query", ylabel="column of dq")
right.grid(False)
fig.colorbar(shown, ax=right, format=lambda x, _: f"{x:.0e}")
picture(fig, """Left: bars for six orders of blocks. Forward again changes nothing, reverse and
random orders change about half of dq's elements and none of dk and dv. Right: the difference of
dq between forward and reverse as a map, specks of blue and red without a pattern.""")

# %% [markdown] slideshow={"slide_type": "subslide"}
# dk and dv keep every bit: each is summed by one thread, in one order. In dq about half of the elements change, by at
# most 1.2e-07 where the largest entry is 1.04. For training that is noise; for finding a bug it can be a plague. That is
# why the contract asks a stage to say:

# %% slideshow={"slide_type": "fragment"}
print('step02.SUPPORTS["deterministic"] =', step02.SUPPORTS["deterministic"])

# %% [markdown] slideshow={"slide_type": "slide"}
# ## 4. From algorithm to code
#
# FlashAttention-2, Algorithm 2; in brackets the paper's lines, with scale put back. In the forward a thread owned a query
# row. Now it owns a key row.
#
# | line | what it does | in `bwd_0_scalar.cu` |
# |---|---|---|
# | [4] | delta = rowsum(dO ∘ O) | `attention_delta`, a kernel of its own |
# | [5–7] | for each tile of Bc keys: K_j, V_j; dK_j = dV_j = 0 | the launch; `load_tile`; registers `dK_j`, `dV_j` |
# | [8–9] | for each tile of Br queries: Q_i, dO_i, lse_i, delta_i | the loop over `i`; `load_tile`, `load_column` |
# | [10–11] | S, then P = exp(S - lse_i) | `dot`, `expf` |
# | [12–14] | dV_j += Pᵀ dO_i; dP = dO_i V_jᵀ; dS | `attention_backward`, the loop over `r` |
# | [15] | dQ_i += scale dS K_j, atomically | `add_dQ` (yours, in part 5) |
# | [16] | dK_j += scale dSᵀ Q_i | the same loop; scale once, in `store_row` |
# | [18] | dK_j, dV_j, written once | `store_row` |
#
# First the budget: dK_j and dV_j take 2 D registers, so that Q_i, dO_i, K_j, V_j and dS have to lie in shared memory.

# %% slideshow={"slide_type": "fragment"}
BACKWARD, Br, Bc = kernels.HERE / "bwd_0_scalar.cu", 32, 64  # the tile that a GPU gets by default
for D in (32, 64, 96, 128):
    shared = 4 * (2 * Bc * (D + 1) + 2 * Br * D + Br * Bc + 2 * Br)
    try:
        usage = nvrtc.compile(BACKWARD, {"D": D, "Br": Br, "Bc": Bc}, "sm_90a").usage
        says = f"{usage['attention_backward'].registers} registers"
    except RuntimeError as refused:
        says = "refused: " + re.search(r"spills \d+ bytes", str(refused))[0]
    print(f"D = {D:3}: 2 D = {2 * D:3}, ptxas for sm_90a: {says:27} shared memory {shared} bytes")

# %% [markdown] slideshow={"slide_type": "fragment"}
# D = 96 is the end here too. Above 48 KiB a launch must ask for shared memory expressly; `nvrtc.py` does.
#
# ### delta, before everything
#
# Every block of keys needs delta of all queries. Computed once, it costs one pass over dO and O, and then one number is
# loaded for each row where O would have been.

# %% slideshow={"slide_type": "fragment"}
show("bwd_0_scalar", "attention_delta")

# %% slideshow={"slide_type": "subslide"}
show("bwd_0_scalar", "load_tile")

# %% slideshow={"slide_type": "fragment"}
show("bwd_0_scalar", "load_column")

# %% slideshow={"slide_type": "fragment"}
show("bwd_0_scalar", "dot")

# %% [markdown] slideshow={"slide_type": "subslide"}
# In the forward all threads read the same key. Here thread t reads *its own* row of K, at `t * K_row + d`. Shared memory
# has 32 banks, each serving one word at a time. The spare word in `K_row = D + 1` is there for this:

# %% slideshow={"slide_type": "fragment"}
for K_row in (64, 65):
    banks = {(t * K_row + 5) % 32 for t in range(32)}
    print(f"rows of {K_row} words: the 32 threads of a warp meet {len(banks)} of the 32 banks")

# %% slideshow={"slide_type": "subslide"}
show("bwd_0_scalar", "attention_backward")

# %% [markdown] slideshow={"slide_type": "fragment"}
# Nothing is rescaled: lse is final. `seen_from` is the causal diagonal seen from the key: query i sees key j if
# i >= j - (Nk - Nq). A row that sees no key has lse = -inf, but then no thread computes its P. The second barrier is what
# `add_dQ` needs: it sums over the keys of the *block*, and every key belongs to another thread.

# %% slideshow={"slide_type": "fragment"}
show("bwd_0_scalar", "store_row")

# %% slideshow={"slide_type": "fragment"}
q, k, v, dout = (x[None, None] for x in (Q, K, V, dO))  # on the CPU: emulated on any machine
out, lse = kernels.scalar_forward(q, k, v, tile=(2, 3))
got = kernels.scalar_backward(dout, q, k, v, out, lse, tile=(2, 3))  # two blocks of three keys
same = [torch.allclose(a[0, 0], b, atol=1e-5) for a, b in zip(got, (dQ, dK, dV), strict=True)]
print("six tokens, dq dk dv:", same)

# %% [markdown] slideshow={"slide_type": "slide"}
# ## 5. Write it yourself
#
# Write the body in place of the line with `#error`, and run the cell: `check` compiles the kernel with your text in the
# place of the stage's function, runs some of the contract's cases, and names what fails. `hint("02.2")` asks a question,
# `hint("02.2", 2)` gives the formula, `hint("02.2", 3)` pseudo-code, `solution("02.2")` the stage's function.
#
# **Exercise 02.2: one gradient that all blocks add to.** Line [15] for one tile, by all Bc threads of the block, in about
# five lines: dQ_i (rows, D) += scale dS (rows, keys) K_j (keys, D). `dS[r * Bc + j]` and `K[j * K_row + d]` lie in shared
# memory; `dq` points at the tile's first row, and its rows are D apart.

# %% slideshow={"slide_type": "fragment"}
add_dQ = r"""
__device__ void add_dQ(Global<float> dq, Shared<float> dS, Shared<float> K, int rows, int keys, float scale) {
#error Blank 02.2
}"""

check("02.2", add_dQ)

# %% [markdown] slideshow={"slide_type": "slide"}
# ## 6. Check it, then break it
#
# The contract's cases, as far as they use head_dim 32 and square tiles, on this process's engine:

# %% slideshow={"slide_type": "fragment"}
ran, failed, worst = 0, [], dict.fromkeys(("dq", "dk", "dv"), 0.0)
scalar = contract.limits(step02.SUPPORTS, "scalar")
for case, dtype, reason in cases.select(scalar):
    if reason is None and (case.D, case.tile) == (32, "square"):
        x = cases.build(case, scalar, dtype, steps.engine.device)
        want = error.expected(x.q, x.k, x.v, x.dout, causal=x.causal, scale=x.scale)
        got = rungs.results(step02, "scalar", case, x)
        ran, failed = ran + 1, failed + [case.name] * bool(error.failures(got, want))
        for name in worst:
            worst[name] = max(worst[name], error.errors(got, want)[name] / (want.tolerance[name] or 1))
print(f"engine {steps.engine.name}: {ran} cases, {len(failed)} failed")
print("largest error in units of the tolerance:", {name: round(w, 2) for name, w in worst.items()})

# %% slideshow={"slide_type": "skip"}
@contextmanager
def planted(before, after):
    """Inside `with`, the backward kernel comes from a copy of its file with `after` for `before`."""
    text = BACKWARD.read_text()
    assert text.count(before) == 1, before
    with tempfile.TemporaryDirectory() as folder, patch.object(kernels, "HERE", Path(folder)):
        (Path(folder) / BACKWARD.name).write_text(text.replace(before, after))
        yield


SMALL = scalar | {"tiles": ((16, 16),)}  # sizes for the emulation, also on a machine with a GPU


def prepared(name):
    """(inputs, what is expected, out, lse) of one of the contract's cases, on the CPU."""
    case = next(c for c in cases.CASES if c.name == name)
    x = cases.build(case, SMALL, torch.float32)
    want = error.expected(x.q, x.k, x.v, x.dout, causal=x.causal, scale=x.scale)
    return (x, want, *kernels.scalar_forward(x.q, x.k, x.v, causal=x.causal, scale=x.scale, tile=(16, 16)))


# %% slideshow={"slide_type": "skip"}
def grads(x, out, lse):
    """The emulated kernel's gradients by name, with whatever is planted in it."""
    options = {"causal": x.causal, "scale": x.scale, "tile": (16, 16)}
    got = kernels.scalar_backward(x.dout, x.q, x.k, x.v, out, lse, **options)
    return dict(zip(("dq", "dk", "dv"), got, strict=True))


def misconceptions(x, want, got):
    """Which of the reference's mutants give these wrong gradients."""
    found = []
    for m in (m for m in mutants.MUTANTS if issubclass(m.kind, mutants.Backward)):
        try:
            wrong = m.run(x, (16, 16), "fa2")
        except mutants.NotApplicable:
            continue
        if all((got[name] - wrong[name]).abs().max() <= 2 * want.tolerance[name] for name in got):
            found.append(m.says)
    return found


# %% [markdown] slideshow={"slide_type": "subslide"}
# Now three mistakes of one line each, planted in the CUDA text. **Which gradients will each spoil?** Then the reference's
# mutants, the same mistakes in plain torch, are asked whether they recognise the result.
#
# <details><summary>Answer</summary>
#
# dv needs neither delta nor a scale of its own, so only a wrong P can spoil it: of the three, the diagonal. Without delta
# dS is wrong, and with it dq and dk. A scale left out touches its own gradient alone.
#
# </details>

# %% slideshow={"slide_type": "fragment"}
mistakes = {
    "delta left out": ("P * (dP - delta_i[r])", "P * dP"),
    "dq without scale": ("dS, K, rows, keys, scale);", "dS, K, rows, keys, 1);"),
    "diagonal at the top left": ("max(0, tile * Bc + t - (Nk - Nq))", "tile * Bc + t"),
}
x, want, out, lse = prepared("fewer_queries_causal")
for says, change in mistakes.items():
    with planted(*change):
        got = grads(x, out, lse)
    print(f"{says}: spoils {', '.join(error.failures(got, want))}")
    print("    recognised:", "; ".join(misconceptions(x, want, got)))

# %% [markdown] slideshow={"slide_type": "subslide"}
# All of the backward's mutants against some cases: which input notices what?

# %% slideshow={"slide_type": "fragment"}
inputs = """ragged ragged_causal fewer_queries_causal one_key explicit_scale
    scores_200 falling negative_row""".split()
backward_mutants = [m for m in mutants.MUTANTS if issubclass(m.kind, mutants.Backward)]
backward_mutants = [m for m in backward_mutants if m.name != "heads_not_summed"]  # needs grouped heads
verdicts = {}
for name in inputs:
    case = next(c for c in cases.CASES if c.name == name)
    x = cases.build(case, SMALL, torch.float32)
    want = error.expected(x.q, x.k, x.v, x.dout, causal=x.causal, scale=x.scale)
    for m in backward_mutants:
        try:
            spoilt = error.failures(m.run(x, (16, 16), "fa2"), want)
            verdicts[m.name, name] = " ".join(spoilt) or "lives"
        except mutants.NotApplicable:
            verdicts[m.name, name] = ""

# %% slideshow={"slide_type": "fragment"}
fig, ax = plt.subplots(figsize=(8.2, 4.4), layout="constrained")
for y, m in enumerate(backward_mutants):
    for c, name in enumerate(inputs):
        found = verdicts[m.name, name]
        colour = {"": FAINT, "lives": COLOURS[4]}.get(found, COLOURS[0])
        ax.add_patch(plt.Rectangle((c, y), 1, 1, facecolor=colour, edgecolor="white"))
        ink = INK if found == "lives" else "white"
        ax.text(c + 0.5, y + 0.5, found, color=ink, ha="center", va="center", fontsize=7)
ax.set_title("what is spoilt    lives: not noticed    grey: cannot matter here")
ax.set(xlim=(0, len(inputs)), ylim=(len(backward_mutants), 0))
slanted = {"rotation": 20, "ha": "right", "rotation_mode": "anchor", "fontsize": 8}
names = [m.name for m in backward_mutants]
ax.set_xticks([c + 0.5 for c in range(len(inputs))], inputs, **slanted)
ax.set_yticks([y + 0.5 for y in range(len(names))], names, fontsize=8)
ax.grid(False)
ax.tick_params(length=0)
ax.spines[:].set_visible(False)
picture(fig, """A table of the backward's mistakes against eight cases, naming the gradients
that each spoils. In most cases most are noticed. With one key most of those in dq and dk live. A
mask aligned at the top left is noticed in one case only, causal with fewer queries than keys.""")

# %% [markdown] slideshow={"slide_type": "fragment"}
# With a single key P is 1 and dS is 0, so that most mistakes in dq and dk have nothing to work on: look down the column
# `one_key`. And `top_left_in_backward` is seen by one column only, the one where causal and Nq != Nk meet.

# %% [markdown] slideshow={"slide_type": "slide"}
# ## 7. Predict, then measure
#
# **Question 1.** With one key tile, one block adds to dq, and its bits cannot depend on the order of blocks. From how
# many key tiles on do they?
#
# <details><summary>Answer</summary>
#
# Three. Floating-point addition is commutative, a + b = b + a, and dq starts at 0, so that two tiles give the same bits
# in either order. It is not associative: (a + b) + c and (c + b) + a may differ.
#
# </details>

# %% slideshow={"slide_type": "fragment"}
tiles = (1, 2, 3, 4, 6, 8)
shares = []
for n in tiles:
    dq_forward, dq_reverse = (gradients(16 * n, blocks)[0] for blocks in ("forward", "reverse"))
    shares.append((dq_forward != dq_reverse).float().mean().item())
fig, ax = plt.subplots(figsize=(6.0, 2.8), layout="constrained")
bars = ax.bar([str(n) for n in tiles], shares, color=COLOURS[0], width=0.6)
ax.bar_label(bars, [f"{share:.0%}" for share in shares], padding=2, fontsize=8)
ax.set(title="share of dq that changes when blocks run backwards", ylim=(0, 0.8), yticks=[])
ax.set_xlabel("key tiles of 16")
ax.grid(False)
picture(fig, """Bars: with one and with two key tiles no element of dq changes when the blocks
run in reverse; from three tiles on a share that grows to well over half at eight tiles.""")

# %% [markdown] slideshow={"slide_type": "subslide"}
# **Question 2.** On a GPU, does running the same backward twice give the same dq? And how does its speed compare with
# torch's?
#
# <details><summary>Answer</summary>
#
# Not the same dq, as soon as three blocks meet: there the order is the hardware's. In the emulation it is the schedule's,
# so two runs agree. As for speed, this kernel has the forward's walls, and its threads read their own rows of K and V
# where the forward's shared one.
#
# </details>

# %% slideshow={"slide_type": "fragment"}
q, k, v, dout = torch.randn(4, 1, 4, 300, 32).to(steps.engine.device)
out, lse = step02.forward(q, k, v)
once, again = (step02.backward(dout, q, k, v, out, lse) for _ in range(2))
differ = [int((x != y).sum()) for x, y in zip(once, again, strict=True)]
print(f"engine {steps.engine.name}, two runs: elements of dq, dk, dv that differ: {differ}")


def measured_speed(kernel, pass_):
    """TFLOP/s of a kernel and its peers, from the committed measurements."""
    at = {"pass": pass_, "dtype": "fp32", "D": 64, "causal": False, "n_gpus": 1}
    found = [r for r in rows.latest(rows.read()) if all(r[name] == value for name, value in at.items())]
    gpus = [r["gpu"] for r in found if r["kernel"] == kernel]
    found = [r for r in found if gpus and r["gpu"] == gpus[0] and (r["kernel"] == kernel or r["peer"])]
    if not found:
        return print("no rows yet")
    return picture(plots.speed_lines(found), f"TFLOP/s against N of {kernel} and its peers on {gpus[0]}.")


measured_speed("bwd_0_scalar", "bwd")

# %% [markdown] slideshow={"slide_type": "slide"}
# ## 8. Summary
#
# - The forward keeps lse, one number a row; the backward makes P again from it, tile by tile, and rescales nothing.
# - delta, one number a row, is dO times O, computed by a kernel of its own before the rest.
# - One of the three gradients crosses blocks. With key tiles outside it is dq, added to atomically.
# - Atomic additions come in any order. From three key tiles on the last bits of dq depend on it; dk and dv keep theirs.
# - A suite needs causal cases with Nq != Nk in the backward too.
#
# **Ask yourself**
#
# 1. Why is dk multiplied by the scale once at the end, and dq at every visit?
# 2. Which barrier of `attention_backward` would be superfluous if dq were left out?
# 3. Why must dq be zero at the start, while dk and dv may hold anything?
# 4. With query tiles outside, what would a thread own, and what would lie in its registers?
# 5. The loop has no barrier at its end. Why can no thread load the next Q_i too early?
#
# **Go further**
#
# - ★ (15 minutes) Plant a `dq[e] +=` instead of the atomic addition. No schedule of the emulation notices. Why?
# - ★★ (1 hour) Write delta's row sum with a warp a row instead of a thread a row, with `__shfl_xor_sync`. What changes
#   in how dO and O are read?
# - ★★★ (a weekend) Write the third way: a second kernel with query tiles outside that computes dq alone. Check that it
#   is bit-equal under every schedule.
#
# **Read:** `papers/flash_attention_2.md`, Algorithm 2 and question 2 of the discussion.
#
# **Next:** [02d_fa2_cuda_hopper.ipynb](02d_fa2_cuda_hopper.ipynb); or on to Triton in [03_triton.ipynb](03_triton.ipynb).
