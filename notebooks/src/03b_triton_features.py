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
# ## 1. The question
#
# *How do masks, biases, windows, dropout, packed sequences and decoding fit into one kernel, and what does each of
# them cost?*
#
# ![Squares of queries against keys: a window is a band, packed sequences are triangles, ALiBi fades with distance, a mask
# or bias is any pattern, dropout has holes; decoding is one row.](../notebooks/figures/question_03b.png)

# %% jupyter={"source_hidden": true} slideshow={"slide_type": "skip"}
import steps  # comes first, because it chooses the engine
import importlib
import itertools
import json
import math
import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path

import matplotlib
import matplotlib.pyplot as plt
import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

# %% jupyter={"source_hidden": true} slideshow={"slide_type": "skip"}
from reference import attention, error, philox
from steps.bench import cost, rows
from steps.figures.plots import COLOURS, FAINT, INK, style
from steps import step03_triton as step03
from steps.step03_triton import decode, features, flash, flash_kernels
from steps.figures.picture import unchecked as picture
from steps.workbook import show
from steps.workbook import Blank, check, hint, solution  # noqa: F401  They are for part 5.

torch.manual_seed(0)
torch.set_num_threads(1)
torch.set_printoptions(precision=2, sci_mode=False)
style()
device, h200 = steps.engine.device, cost.GPUS["NVIDIA H200"]
print(steps.engine.describe())
print(f"triton {triton.__version__}, matplotlib {matplotlib.__version__}")


def bare(ax):
    """Takes the grid, the ticks and the frame away."""
    ax.grid(False)
    ax.tick_params(length=0)
    ax.spines[:].set_visible(False)

# %% [markdown] slideshow={"slide_type": "subslide"}
# - **Before you start:** notebook 03a (a kernel in tiles), and of notebook 00 lse and delta.
# - **Time:** about an hour to read, an hour more with the exercises.
# - **Hardware:** Linux. Without a GPU the kernels run in Triton's interpreter, and are compiled for a Hopper GPU that
#   need not be there. Speeds are recorded rows.
# - **Code:** `steps/step03_triton/`: `flash.py`, `flash_kernels.py`, `features.py`, `tiles.py` and `decode.py`.
#   **Tests:** `pytest tests/test_step03_features.py tests/test_step03_decode.py`. **Symbols:** `reference/symbols.md`.

# %% slideshow={"slide_type": "skip"}
COMPILE = r"""
import collections, json, re, subprocess, sys
import steps, torch, triton
from triton.backends.compiler import GPUTarget
from triton.runtime.jit import JITFunction
from steps.step03_triton import flash
class Driver:  # stands in for an H100
    def get_current_device(self): return 0
    def get_current_stream(self, device): return 0
    def get_current_target(self): return GPUTarget("cuda", 90, 32)
def compile_only(kernel, *args, grid, warmup, **options):
    made = launch(kernel, *args, grid=grid, warmup=True, **options)
    with open(f"{sys.argv[2]}/kernel.cubin", "wb") as file:
        file.write(made.asm["cubin"])
    tool = triton.knobs.nvidia.cuobjdump.path, "-sass", file.name
    text = subprocess.run(tool, capture_output=True, text=True, check=True).stdout
    found = re.findall(r"/\*[0-9a-f]{4,}\*/ +(?:@!?\w+ )?([\w.]+)", text)
    print(json.dumps([name, collections.Counter(found)]), flush=True)
launch, JITFunction.run = JITFunction.run, compile_only
torch.cuda.get_device_capability = lambda device=None: (9, 0)
triton.runtime.driver.set_active(Driver())
"""

# %% slideshow={"slide_type": "skip"}
# A second process compiles the forward with one feature at a time. Part 7 reads what it finds.
COMPILE += r"""
x, mask = torch.zeros(1, 2, 256, 128).bfloat16(), torch.zeros(256, 256)
jobs = {"none": {}, "additive mask": {"mask": mask.bfloat16()}}
jobs |= {"boolean mask": {"mask": mask > 0}, "ALiBi": {"alibi_slopes": torch.ones(2)}}
jobs |= {"soft-cap": {"softcap": 50.0}}
jobs |= {"dropout": {"dropout_p": 0.1, "seed": torch.tensor(3)}}
for name, options in jobs.items():
    flash.forward(x, x, x, tile=json.loads(sys.argv[1]), **options)
"""
TILE, THREADS = (64, 64), 128  # of the compiled kernels
folder = tempfile.TemporaryDirectory()
found_by_compiler = Path(folder.name, "found")
root = Path(steps.__file__).parents[1]
environment = os.environ | {"STEPS_ENGINE": "compile", "PYTHONPATH": str(root)}
environment.pop("TRITON_INTERPRET", None)  # set by the engine of this process
command = [sys.executable, "-c", COMPILE, json.dumps(TILE), folder.name]
with found_by_compiler.open("w") as file:
    compiler = subprocess.Popen(command, env=environment, stdout=file)

# %% [markdown] slideshow={"slide_type": "slide"}
# ## 2. The problem, measured
#
# The plain kernel computes softmax(Q Kᵀ) V, with at most a causal mask. Published models put more in between:
#
# | what | who uses it |
# |---|---|
# | window: only near keys | Mistral 7B, 4,096 tokens; Gemma 2, in every other layer |
# | soft-cap: scores bounded by tanh | Gemma 2, at ±50 |
# | ALiBi: less weight with distance | BLOOM, MPT-7B |
# | additive mask, with a gradient | T5: a learned bias for each head and range of distances |
# | boolean mask | BERT and others: batches padded to one length |
# | dropout of P | BERT and GPT-2 in training, p = 0.1 |
# | fewer key heads | Llama 3 8B, 8 for 32 query heads |
# | packed sequences | Llama 3 in training: no token sees another document |
# | one query, many keys | every model that generates text |
#
# torch's `scaled_dot_product_attention` (SDPA) takes several of these. What does its plain path allocate, for 8 heads
# of 512 tokens in float32?

# %% slideshow={"slide_type": "fragment"}
class Allocations(TorchDispatchMode):
    """Notes how many MiB each operation of torch allocates."""

    def __init__(self, *inputs):
        super().__init__()
        self.found, self.storages = [], [x.untyped_storage() for x in inputs]

    def __torch_dispatch__(self, operation, types, args=(), kwargs=None):
        result = operation(*args, **(kwargs or {}))
        for storage in (x.untyped_storage() for x in tree_leaves(result)):
            if storage.data_ptr() not in [s.data_ptr() for s in self.storages]:
                self.storages.append(storage)
                name = str(operation).split(".")[1]
                self.found.append((name, storage.nbytes() / 2**20))
        return result


q, k, v = torch.randn(3, 1, 8, 512, 64, device=device)
seen = torch.rand(512, 512, device=device) > 0.5
with sdpa_kernel(SDPBackend.MATH), Allocations(q, k, v, seen) as allocations:
    F.scaled_dot_product_attention(q, k, v, attn_mask=seen, dropout_p=0.1)
print(", ".join(f"{name} {size:.0f}" for name, size in allocations.found if size > 0.1))
total, own = sum(size for _, size in allocations.found), (q.nbytes + q.nbytes // 64) / 2**20
print(f"together {total:.0f} MiB; S has {8 * 512**2 * 4 / 2**20:.0f},", end=" ")
print(f"the mask {seen.nbytes / 2**20}; out and lse have {own:.1f}")

# %% jupyter={"source_hidden": true} slideshow={"slide_type": "fragment"}
lengths = [2**n for n in range(10, 18)]
shape = dict(B=8, H=32, D=128)
looks = {
    "q, k, v, out, lse": ("o-", COLOURS[0], lambda N: cost.compulsory_bytes(N=N, **shape)),
    "one boolean mask, shared": ("s-", COLOURS[2], lambda N: N * N),
    "one bfloat16 mask, shared": ("D-", COLOURS[4], lambda N: 2 * N * N),
    "a bfloat16 mask of each head": ("^-", COLOURS[1], lambda N: 2 * 8 * 32 * N * N),
}
fig, ax = plt.subplots(figsize=(7.2, 3.2), layout="constrained")
for name, (look, colour, size) in looks.items():
    ax.loglog(lengths, [size(N) / 1e9 for N in lengths], look, color=colour, label=name)
    print(f"{name:29} N = 8k: {size(8192) / 1e9:6.2f} GB, 64k: {size(65536) / 1e9:8.1f} GB")
ax.axhline(141, color=INK, lw=0.8, ls="--")
ax.text(1100, 175, "memory of an H200, 141 GB", fontsize=8)
ax.set_xticks(lengths, [f"{N // 1024}k" for N in lengths])
ax.minorticks_off()
ax.set(xlabel="N", title="one layer, B = 8, H = 32, D = 128: GB")
ax.legend(fontsize=8, loc="center left", bbox_to_anchor=(1, 0.5))
picture(fig, """Gigabytes against N on log-log axes. q, k, v, out and lse rise with slope 1,
the masks with slope 2. A mask of each head passes the memory of an H200 between 16k and 32k
tokens, a shared boolean mask not until far beyond 128k.""")

# %% [markdown] slideshow={"slide_type": "fragment"}
# Five tensors of the size of S: the scores, the sum with the mask, the softmax, what dropout keeps, and the product.
# Expanded for each head, a mask of 16-bit numbers has the size of S itself. So a mask
# must be **broadcast and never expanded**, dropout must not be stored, and what follows from positions alone should
# not be a mask at all.

# %% [markdown] slideshow={"slide_type": "slide"}
# ## 3. The idea: one function of the scores, for both directions
#
# **Claim.** Masks, windows, soft-cap and ALiBi change the scores, and nothing else. With X = Q Kᵀ,
#
# $$S = \mathit{cap} \tanh\!\big(\tfrac{\mathit{scale}}{\mathit{cap}} X\big) + M - \mathit{slope}\,|\,\mathit{pos}_i - j\,|
# \qquad\text{and } -\infty \text{ where key } j \text{ is hidden}$$
#
# in this order, with the soft-cap's cap and the additive mask M. The forward is notebook 00's, with this S. The
# backward computes S again, and needs one thing more, the derivative:
#
# $$dX = dS \circ \Big(1 - \tanh^2\big(\tfrac{\mathit{scale}}{\mathit{cap}} X\big)\Big) \qquad dQ = \mathit{scale}\; dX\, K \qquad
# dK = \mathit{scale}\; dX^\top Q \qquad dM = dS$$
#
# The mask is added after the scale, so its gradient is dS itself, summed over what the mask was broadcast to.
#
# Here are notebook 00's six tokens, causal, with cap = 1.5, a slope of 0.25 and a bonus of 0.5 for key 0. First two
# mistakes that come from writing the scores twice.

# %% slideshow={"slide_type": "fragment"}
Q = torch.tensor([[1.0, 2], [0, 1], [-1, 0], [2, -1], [1, 1], [3, 1]])
K = torch.tensor([[0.0, 1], [1, 0], [-1, 1], [1, 2], [2, 0], [0, -1]])
V = torch.tensor([[0.0, 6], [2, 0], [4, 6], [6, 4], [8, 0], [10, 6]])
dO = torch.tensor([[1.0, 0], [0, 1], [1, 1], [2, 0], [0, -1], [1, -1]])
N, scale, softcap, slope = 6, 1 / math.sqrt(2), 1.5, 0.25
M = torch.zeros(N, N)
M[:, 0] = 0.5
distance = (torch.arange(N)[:, None] - torch.arange(N)).abs()
visible = attention.visible(N, N, causal=True)


def scores(X, slope=slope):
    """(S, dS/dX), where dS/dX leaves out the factor scale."""
    t = torch.tanh(scale / softcap * X)
    S = softcap * t + M - slope * distance
    return S.where(visible, -torch.inf), 1 - t * t


def gradients(S, derivative):
    """(P, dQ, dM) by the formulas above."""
    P = (S - lse[:, None]).exp()
    dS = P * (dO @ V.T - delta[:, None])
    return P, scale * (dS * derivative) @ K, dS

# %% slideshow={"slide_type": "subslide"}
X = Q @ K.T
S, derivative = scores(X)
lse, O = S.logsumexp(-1), S.softmax(-1) @ V
delta = (dO * O).sum(-1)

leaf, bonus = Q.clone().requires_grad_(), M.clone().requires_grad_()
P = (scores(leaf @ K.T)[0] - M + bonus).softmax(-1)
want_dQ, want_dM = torch.autograd.grad(P @ V, (leaf, bonus), dO)

_, dQ, _ = gradients(S, 1.0)
print(f"derivative forgotten:     row 5 of dQ {dQ[5]}, should be {want_dQ[5]}")
P, _, _ = gradients(*scores(X, slope=0.0))
print(f"ALiBi in one pass only:   rows of P add up to {P.sum(-1)}")
P, dQ, dM = gradients(*scores(X))
right = torch.allclose(dQ, want_dQ, atol=1e-5), torch.allclose(dM, want_dM, atol=1e-5)
print(f"one function for both:    dQ, dM as autograd's {right}; rows of P {P.sum(-1)}")

leaves = [x[None, None].to(device).requires_grad_() for x in (Q, K, V, M)]
options = dict(causal=True, softcap=softcap, alibi_slopes=torch.tensor([slope]).to(device))
out = step03.attention(*leaves[:3], mask=leaves[3], **options)
theirs = torch.autograd.grad(out, leaves, dO[None, None].to(device))
pairs = zip((theirs[0], theirs[3]), (want_dQ, want_dM), strict=True)
same = [torch.allclose(a[0, 0].cpu(), b, atol=1e-5) for a, b in pairs]
print("stage 03, dQ and dM:     ", same)

# %% jupyter={"source_hidden": true} slideshow={"slide_type": "subslide"}
tables = {"scale X": scale * X, "soft-cap": softcap * torch.tanh(scale * X / softcap)}
tables["+ M"] = tables["soft-cap"] + M
tables["- slope |pos - j|"] = tables["+ M"] - slope * distance
tables |= {"hidden: S": S, "dS/dX": derivative}
fig, axes = plt.subplots(2, 3, figsize=(9, 5.8), layout="constrained", sharey=True)
for ax, (title, matrix) in zip(axes.flat, tables.items(), strict=True):
    shown = matrix.where(matrix.isfinite(), torch.nan)
    limit = 1 if title == "dS/dX" else 3
    ax.imshow(shown, cmap=plt.get_cmap("RdBu", 13), vmin=-limit, vmax=limit)
    for i, j in itertools.product(range(N), range(N)):
        number = f"{matrix[i, j]:.2f}" if matrix[i, j].isfinite() else "-inf"
        ink = "white" if 0.6 * limit < abs(matrix[i, j]) < math.inf else INK
        ax.text(j, i, number, ha="center", va="center", fontsize=8, color=ink)
    ax.set_title(title, fontsize=10)
    ax.set(xticks=range(N), yticks=range(N))
    ax.grid(False)
for ax in axes[:, 0]:
    ax.set_ylabel("query i")
for ax in axes[1]:
    ax.set_xlabel("key j")
picture(fig, """Six tables of 6 by 6 numbers: the scaled products; after the soft-cap, where
none is beyond 1.5; with 0.5 added in column 0; less a quarter for each step of distance;
with -inf above the diagonal; and the derivative, which is small where the scaled product
was large.""", dpi=85)

# %% [markdown] slideshow={"slide_type": "fragment"}
# In row 5 the cap brings the scores of keys 3 and 4 from 3.54 and 4.24 to 1.47 and 1.49, and there the derivative is
# 0.04 and 0.01. Without it dQ of row 5 is (2.00, -1.39) and not (0.02, -0.61). And
# without ALiBi in the backward, the P of that row add up to 1.83.

# %% [markdown] slideshow={"slide_type": "slide"}
# ## 4. From algorithm to code
#
# `flash_kernels.py` is `fwd_1_tma.py` and `bwd_1_tma.py` with calls of `features.py` in between. Both directions call
# the same functions, the keys' kernel of the backward on transposed tiles:
#
# | function | what it says |
# |---|---|
# | `find_tile`, `find_sequence` | whose tile this program owns |
# | `tile_ranges`, `jump` | which tiles it visits |
# | `load_mask` | the mask's tile |
# | `scores` | S and dS/dX |
# | `kept` | which P dropout keeps |
#
# Features come as a tuple `f` with a field for each. A field that is `None` is a constant for the compiler, which
# leaves its branch out: a kernel is compiled for each *set* of features, and pays for no other.
#
# **In which unit is S?** P is $2^{cS - cm}$, one multiply-add (03a), in any unit, as long as c fits. So each set of
# features takes the unit that saves work. Without features S is X itself; with a soft-cap it is the bare tanh, whose
# factor goes into c. With an additive mask it is natural, as scale · X + M is one multiply-add; in another unit each
# *entry of the mask* would need one more. ALiBi's slope is divided by the unit, once a head.

# %% slideshow={"slide_type": "fragment"}
show("step03_triton/features", "scores")

# %% slideshow={"slide_type": "fragment"}
@triton.jit
def unit_kernel(found, N, f):
    seq = features.find_sequence(tl.program_id(0), N, N, f)
    head = features.find_head(tl.program_id(0), 0, None, f, seq)
    tl.store(found, seq.c)
    tl.store(found + 1, head.slope)


slopes = torch.tensor([0.25]).to(device)
settings = {"no feature": {}, "soft-cap 50": {"softcap": 50.0}, "mask": {"added": 1}}
settings["soft-cap 50 and mask"] = settings["soft-cap 50"] | settings["mask"]
for name, options in settings.items():
    found = torch.zeros(2).to(device)
    alibi = {"slopes": slopes, "slope_strides": (0, 1)}
    unit_kernel[(1,)](found, 6, features.Features(128**-0.5, **alibi, **options))
    c, slope_in_units = found.tolist()
    print(f"{name:21} one unit of S is {c * math.log(2):7.4f};", end=" ")
    print(f"a slope of 0.25 becomes {slope_in_units:.4f}")

# %% [markdown] slideshow={"slide_type": "subslide"}
# ### Which tiles are visited
#
# A window is no mask to be read: query i sees the keys from i - left to i + right. A tile that no row sees is not
# visited, and one that *every* row sees whole needs no comparison. `tile_ranges` returns the two ranges, and `jump`
# leads over the whole tiles from one edge of the window to the other (exercise 03.4):

# %% slideshow={"slide_type": "fragment"}
@triton.jit
def visit(tiles, count, Nq, Nk, LEFT, RIGHT, Br: tl.constexpr, Bc: tl.constexpr):
    """tiles (tiles of queries, count): 1 where one is visited, 2 where with a mask."""
    tiles += tl.program_id(0) * count
    i = tl.program_id(0) * Br
    r = features.tile_ranges(i, Nk - Nq, LEFT, RIGHT, Nk, False, Br, Bc)
    for j in range(r.whole, r.full, Bc):
        tl.store(tiles + j // Bc, 1)
    for n in range(r.begin, r.end, Bc):
        tl.store(tiles + features.jump(n, r, LEFT) // Bc, 2)


def visited(Nq, Nk, left, right, Br=4, Bc=4):
    """{(tile of queries, tile of keys): whether with a mask} of those visited."""
    size = triton.cdiv(Nq, Br), triton.cdiv(Nk, Bc)
    tiles = torch.zeros(size, dtype=torch.int32, device=device)
    visit[size[:1]](tiles, size[1], Nq, Nk, left, right, Br=Br, Bc=Bc)
    return {tuple(at): tiles[*at].item() == 2 for at in tiles.nonzero().tolist()}

# %% jupyter={"source_hidden": true} slideshow={"slide_type": "fragment"}
def draw_tiles(ax, tiles, seen, start=0):
    """The tiles of a sequence that begins at `start`, and a dot for each pair."""
    for (n, j), masked in tiles.items():
        width, height = min(4, seen.shape[1] - 4 * j), min(4, seen.shape[0] - 4 * n)
        look = {"facecolor": COLOURS[4 if masked else 5], "edgecolor": "white", "lw": 2}
        at = start + 4 * j, start + 4 * n
        ax.add_patch(plt.Rectangle(at, width, height, **look))
    i, j = seen.nonzero(as_tuple=True)
    ax.plot(start + j + 0.5, start + i + 0.5, ".", color=INK, ms=3)
    frame = {"fill": False, "edgecolor": INK, "lw": 1}
    ax.add_patch(plt.Rectangle((start, start), *seen.shape[::-1], **frame))


def by_counting(seen):
    """(tiles without a mask, with one, not visited), by looking at each pair."""
    share = seen.unflatten(1, (-1, 4)).unflatten(0, (-1, 4)).float().mean((1, 3))
    counts = share == 1, (share > 0) & (share < 1), share == 0
    return tuple(count.sum().item() for count in counts)


# %% jupyter={"source_hidden": true} slideshow={"slide_type": "fragment"}
N, windows = 24, {"causal": (None, 0), "window (11, 0)": (11, 0), "window (5, 5)": (5, 5)}
fig, axes = plt.subplots(1, 3, figsize=(9, 3.3), layout="constrained", sharey=True)
for ax, (name, window) in zip(axes, windows.items(), strict=True):
    tiles, pairs = visited(N, N, *window), attention.visible(N, N, window=window)
    draw_tiles(ax, tiles, pairs)
    ticks = range(0, N + 1, 4)
    ax.set(xlim=(-0.5, N + 0.5), ylim=(N + 0.5, -0.5), aspect="equal", xlabel="key")
    ax.set(xticks=ticks, yticks=ticks, title=name)
    masked = sum(tiles.values())
    ours = len(tiles) - masked, masked, (N // 4) ** 2 - len(tiles)
    print(f"{name:15} without a mask, with one, skipped: {ours};", end=" ")
    print(f"by looking at each pair {by_counting(pairs)}")
axes[0].set_ylabel("query")
picture(fig, """Three squares of 24 queries by 24 keys in tiles of 4 by 4. Causal: blue
tiles below the diagonal, orange ones on it, none above. Window (11, 0): from the third row
of tiles on, a band of an orange, two blue and an orange tile. Window (5, 5): a band around
the diagonal, with a blue tile in each row and orange ones on both sides.""")

# %% [markdown] slideshow={"slide_type": "subslide"}
# Blue tiles need no mask, orange ones do, white ones are never loaded: with a window, work grows like N.
#
# ### A mask is read by its strides
#
# A tensor that was expanded has a stride of 0 where it was broadcast. So `mask.expand(B, H, Nq, Nk).stride()` costs no
# memory, and says all that a kernel needs. For Hopper's copy engine a stride of 0 becomes the coordinate 0.

# %% slideshow={"slide_type": "fragment"}
for shape in ((24, 24), (8, 1, 1, 24), (1, 4, 24, 24)):
    mask = torch.zeros(shape, dtype=torch.bool)
    strides = mask.expand(8, 4, 24, 24).stride()
    print(f"{str(shape):15} as (8, 4, 24, 24): strides {strides}")
show("step03_triton/features", "load_mask")

# %% [markdown] slideshow={"slide_type": "subslide"}
# ### Heads that share a mask are neighbours
#
# For long sequences a shared mask of N x N is far larger than the K and V of a head. If neighbouring programs take the
# tiles of one head, each head fetches the whole mask again. So `find_tile` gives neighbours the
# same tile of all heads, and they find the mask's tile in the L2 cache.

# %% slideshow={"slide_type": "fragment"}
N, H, D = 16384, 16, 128
seconds = cost.flops(1, H, N, D) / (1e12 * h200.half_tflops)
print(f"H = {H}, N = {N}, D = {D}, on an H200 at its peak:")
print(f"the products take {1e3 * seconds:.1f} ms")
for name, size in {"additive, bfloat16": 2, "boolean": 1}.items():
    once = 1e3 * size * N * N / (1e12 * h200.bandwidth)
    print(f"{name:18} mask: read once {once:.2f} ms, by each head {H * once:.2f} ms")
show("step03_triton/flash_kernels", "find_tile")

# %% jupyter={"source_hidden": true} slideshow={"slide_type": "fragment"}
@triton.jit
def places(found, tiles, heads, f):
    n, _, h = flash_kernels.find_tile(tiles, heads, f)
    tl.store(found + 2 * tl.program_id(0), h)
    tl.store(found + 2 * tl.program_id(0) + 1, n)


fig, axes = plt.subplots(1, 2, figsize=(9, 2.9), layout="constrained", sharey=True)
for ax, first in zip(axes, (None, 1), strict=True):
    found = torch.zeros(16, 2, dtype=torch.int32, device=device)
    f = features.Features(1.0, policy=features.Policy(heads_first=first))
    places[(16,)](found, 4, 4, f)
    for program, (h, n) in enumerate(found.tolist()):
        y, x = divmod(program, 4)
        ax.add_patch(plt.Rectangle((x, y), 1, 1, fc=COLOURS[2 + n], ec="white", lw=2))
        says = f"program {program}\nhead {h}, tile {n}"
        ax.text(x + 0.5, y + 0.5, says, ha="center", va="center", fontsize=8)
    title = "all heads of a tile" if first else "one head after the other"
    ax.set(xlim=(0, 4), ylim=(4, 0), title=title)
    ax.set_xticks([n + 0.5 for n in range(4)], [f"SM {n}" for n in range(4)])
    ax.set_yticks([n + 0.5 for n in range(4)], ["first", "second", "third", "fourth"])
    bare(ax)
picture(fig, """Sixteen programs on four multiprocessors, four at a time, coloured by the
tile of the mask. Left: at each time all four colours, of one head. Right: at each time one
colour, of all four heads.""", dpi=90)

# %% [markdown] slideshow={"slide_type": "subslide"}
# ### A mask that swallows the scores
#
# Many libraries hide keys with the most negative finite number. In a row of nothing else it swallows the scores, and
# all keys count alike. SDPA returns the mean of V there. But lse = m + log l has no room for log l, and the backward's
# P would be wrong:

# %% slideshow={"slide_type": "fragment"}
lowest = torch.finfo(torch.float32).min
S_row = torch.tensor([0.3, -1.2, 2.0, 0.5]) + lowest
lost = (S_row.logsumexp(0) == lowest).item()
print("scores that differ after the mask:", len(S_row.unique()), " lse == m:", lost)
print("P = exp(S - lse) adds up to", (S_row - S_row.logsumexp(0)).exp().sum().item())
q, dout = torch.randn(2, 1, 1, 3, 16).to(device)
k, v = torch.randn(2, 1, 1, 4, 16).to(device)
mask = torch.zeros(3, 4).to(device)
mask[1], mask[2] = lowest, -math.inf
out, lse = step03.forward(q, k, v, mask=mask)
_, _, dv = step03.backward(dout, q, k, v, out, lse, mask=mask)
_, _, want_dv = attention.backward(dout, q, k, v, mask=mask)
with sdpa_kernel(SDPBackend.MATH):
    sdpa = F.scaled_dot_product_attention(q, k, v, attn_mask=mask)
same = torch.allclose(out, sdpa, atol=1e-5)
print("rows of 0, of finfo.min and of -inf: out as SDPA's", same)
print("lse", [f"{x:.3g}" for x in lse[0, 0].tolist()], end="; ")
print("dv as in float64", torch.allclose(dv.double(), want_dv, atol=1e-5))

# %% [markdown] slideshow={"slide_type": "subslide"}
# The kernel counts such a mask as -2¹⁰¹, and stores not m + log l but m · l, from which the backward gets l. Only -inf
# hides a key for certain: then out is 0 and lse -inf.
#
# ### Dropout without memory: Philox
#
# The backward must drop what the forward dropped, in tiles of another shape, and nothing may be stored. Philox is a
# random generator without a state: it turns a *counter* of four numbers and a seed into sixteen bytes. Here it
# is (key div 16, query, head, batch), and each byte decides for one key: keep where it is less than t =
# round(256 (1 - p)). In the listing `permute` is for transposed tiles; what is left out is for keys that do not begin
# at a multiple of 16.

# %% slideshow={"slide_type": "fragment"}
seed, p = 7, 0.3
t = philox.threshold(p)
for counter in ((0, 5, 0, 0), (1, 5, 0, 0), (0, 6, 0, 0)):
    words = philox.philox(counter, key=(seed, 0))
    numbers = b"".join(int(word).to_bytes(4, "little") for word in words)
    kept = "".join(".x"[byte < t] for byte in numbers)
    print(f"(key div 16, query, head, batch) = {counter}: {numbers.hex(' ')}   {kept}")
print(f"p = {p}: t = {t}, so p is {philox.rounded(p):.4f}; kept is times {256 / t:.4f}")
source = show("step03_triton/features", "kept")
type(source)(source.partition("    else:")[0] + "    ...")

# %% jupyter={"source_hidden": true} slideshow={"slide_type": "fragment"}
# With q = 0 and V the identity, out shows which P were kept; with dO the identity dv does.
zero = torch.zeros(1, 2, 32, 32).to(device)
eye = torch.eye(32).to(device).expand(1, 2, 32, 32)
keep = philox.keep_mask(seed, 1, 2, 32, 32, p).to(device)
for tile in ((16, 32), (32, 16), (16, 16)):
    options = dict(dropout_p=p, seed=seed, tile=tile)
    out, lse = step03.forward(zero, eye, eye, **options)
    _, _, dv = step03.backward(eye, zero, eye, eye, out, lse, **options)
    same = torch.equal(out != 0, keep), torch.equal(dv.mT != 0, keep)
    print(f"tiles {tile}: numpy's mask in the forward, backward: {same}")
fig, axes = plt.subplots(1, 3, figsize=(8.6, 3), layout="constrained", sharey=True)
shown = {"by query and key, head 0": (keep[0, 0], (32, 32))}
for Br, Bc in ((16, 16), (8, 16)):
    wrong = keep[0, 0, :Br, :Bc].tile(32 // Br, 32 // Bc)
    shown[f"wrong: counted from the tile\ntiles of {Br} x {Bc}"] = wrong, (Br, Bc)
for ax, (name, (entries, (Br, Bc))) in zip(axes, shown.items(), strict=True):
    ax.imshow(entries.cpu(), cmap=matplotlib.colors.ListedColormap(["white", COLOURS[0]]))
    ax.vlines([x - 0.5 for x in range(Bc, 32, Bc)], -0.5, 31.5, color=COLOURS[1])
    ax.hlines([y - 0.5 for y in range(Br, 32, Br)], -0.5, 31.5, color=COLOURS[1])
    ax.set_title(name, fontsize=9)
    ax.set(xlabel="key", xticks=range(0, 32, 8), yticks=range(0, 32, 8))
    ax.grid(False)
picture(fig, """Three squares of 32 by 32 entries, blue where one is kept. Left: no pattern.
The other two repeat themselves in every tile, and differ from each other.""")

# %% [markdown] slideshow={"slide_type": "subslide"}
# A mask that depends on the tile repeats itself, and the backward, whose tiles are others, draws another one.
#
# **Dropout comes after the sum.** It is defined on the finished softmax. Were P dropped before it is added to l, each
# row would be divided by what was kept, and be wrong on average too. Row 5 of the tiny example, over 20,000 masks:

# %% slideshow={"slide_type": "fragment"}
P_5 = S[5].softmax(-1)
Z = torch.rand(20000, 6, generator=torch.Generator().manual_seed(0)) < 0.5
after = (2 * Z * P_5) @ V
before = (Z * P_5) @ V / (Z * P_5).sum(-1, keepdim=True).clamp(min=1e-9)
print("without dropout  ", P_5 @ V)
print("dropped after l  ", after.mean(0), " on average")
print("dropped before l ", before[Z.any(-1)].mean(0), " on average")

# %% [markdown] slideshow={"slide_type": "subslide"}
# ### Packed sequences
#
# Sequences lie behind each other in one tensor with B = 1, and `cu_seqlens`, the cumulative sum of their lengths, says
# where each begins. A program counts positions, tiles and random numbers from its sequence's start. The grid is made
# for the longest (`max_seqlen`, which the caller knows), and surplus programs return at once, so the host never waits
# for the GPU to read `cu_seqlens`.

# %% jupyter={"source_hidden": true} slideshow={"slide_type": "fragment"}
lengths = [7, 0, 12, 5]
starts = [0, *itertools.accumulate(lengths)]
print(f"cu_seqlens {starts}: {sum(lengths)} rows instead of {4 * max(lengths)}")
how = dict(width_ratios=[1.5, 1], layout="constrained")
fig, (left, right) = plt.subplots(1, 2, figsize=(9, 3.4), **how)
for s, (start, n) in enumerate(zip(starts, lengths, strict=False)):
    left.barh(s, n, color=COLOURS[s])
    left.barh(s, max(lengths) - n, left=n, color=FAINT)
    left.barh(5.5, n, left=start, color=COLOURS[s], edgecolor="white")
    pairs = attention.visible(n, n, causal=True)
    draw_tiles(right, visited(n, n, None, 0) if n else {}, pairs, start)
names = [f"sequence {s}" for s in range(4)]
left.set_yticks([*range(4), 5.5], [*names, "packed"])
left.set_xticks([0, 7, 19, 24], ["0", "7, 7", "19", "24"])
left.set(xlabel="cu_seqlens", ylim=(6.2, -0.6), title="grey is padding")
left.grid(False)
right.set(xlim=(-0.5, 24.5), ylim=(24.5, -0.5), aspect="equal", title="visited, causal")
right.set(xticks=sorted({*starts}), yticks=sorted({*starts}), xlabel="key", ylabel="query")
right.grid(False)
picture(fig, """Left: four bars of 7, 0, 12 and 5 tokens, padded with grey to 12; below
them one bar of 24 tokens without grey, with marks at 0, 7, 19 and 24. Right: a square of
24 by 24 with a causal triangle of tiles for each sequence, and nothing else.""")

# %% slideshow={"slide_type": "fragment"}
H, D = 2, 16
q, k, v = torch.randn(3, 1, H, 24, D).to(device)
cu_seqlens = torch.tensor(starts, dtype=torch.int32).to(device)
packed = dict(cu_seqlens_q=cu_seqlens, cu_seqlens_k=cu_seqlens)
packed |= dict(max_seqlen_q=12, max_seqlen_k=12)
out, _ = flash.forward(q, k, v, causal=True, tile=(16, 16), **packed)
for start, end in ((0, 7), (7, 19), (19, 24)):
    own = (x[:, :, start:end] for x in (q, k, v))
    alone, _ = flash.forward(*own, causal=True, tile=(16, 16))
    same = torch.equal(out[:, :, start:end], alone)
    print(f"rows {start:2} to {end - 1:2}: the same bits as alone: {same}")

# %% [markdown] slideshow={"slide_type": "subslide"}
# ### A part of the keys at a time
#
# `out` and `lse` of earlier calls can be handed in, in float32: what they stand for counts as **one key of score lse
# and value out**, which the online softmax takes in like any other. `first_key` says where the new keys stand. So a
# sequence can be divided among calls, or among GPUs (notebook 04a). gpt-oss's **sinks** are one key more, of a learned
# score and value 0:

# %% slideshow={"slide_type": "fragment"}
options = dict(causal=True, dropout_p=p, seed=seed, first_query=0, tile=(16, 16))
whole, lse_of_all = step03.forward(q, k, v, **options)
out, lse = torch.zeros_like(q), q.new_full(q.shape[:3], -math.inf)
for first, end in ((0, 5), (5, 16), (16, 24)):
    part = k[:, :, first:end], v[:, :, first:end]
    step03.forward(q, *part, out=out, lse=lse, first_key=first, **options)
    away = (out - whole).abs().amax((0, 1, 3))
    print(f"keys to {end:2}: {(away < 1e-5).sum()} of 24 rows are finished")
print(f"largest difference: out {away.max():.0e}, lse {(lse - lse_of_all).abs().max():.0e}")

sinks = torch.linspace(-1, 2, q.shape[1], device=device)  # one of each head
with_sinks, _ = step03.forward(q, k, v, sinks=sinks, **options)
out, lse = torch.zeros_like(q), sinks[:, None].expand(q.shape[:3]).contiguous()
step03.forward(q, k, v, out=out, lse=lse, **options)
apart = (out - with_sinks).abs().max()
print(f"sinks= and the carried out = 0, lse = sink: {apart:.0e} apart")

# %% [markdown] slideshow={"slide_type": "subslide"}
# ### Decoding: one query, many keys
#
# To generate a token, each head has one query and reads all of its K and V, and a program a head would leave
# multiprocessors idle. In `decode.py` the query heads that share a key head are the rows of
# *one* tile, so that K and V are read once; the keys are **split** over the multiprocessors; and a second kernel
# **merges** the parts, each with the weight exp(lse of the part - lse of all).

# %% jupyter={"source_hidden": true} slideshow={"slide_type": "fragment"}
fig, ax = plt.subplots(figsize=(9, 2.3), layout="constrained")
for hk, share in itertools.product(range(2), range(3)):
    look = {"facecolor": COLOURS[3 * hk + share], "edgecolor": "white", "lw": 2}
    for tile in range(4):
        ax.add_patch(plt.Rectangle((4 * share + tile, 1.5 * hk), 1, 1, **look))
    plain = {"facecolor": "white", "edgecolor": "none", "pad": 2}
    text = {"ha": "center", "va": "center", "fontsize": 9, "bbox": plain}
    ax.text(4 * share + 2, 1.5 * hk + 0.5, f"SM {3 * hk + share}: m, l, O", **text)
arrow = {"arrowstyle": "->", "color": INK}
for hk in range(2):
    y = 1.5 * hk + 0.5
    ax.annotate("", (13.2, y), (12.1, y), arrowprops=arrow)
    text = f"merge: out of\nheads {4 * hk} to {4 * hk + 3}"
    ax.text(13.3, y, text, va="center", fontsize=9)
ax.set(xlim=(0, 15.6), ylim=(2.6, -0.1), xticks=[])
ax.set_xlabel("tiles of keys", loc="left")
ax.set_yticks([0.5, 2], ["heads 0 to 3,\nkey head 0", "heads 4 to 7,\nkey head 1"])
bare(ax)
picture(fig, """Two rows of twelve tiles of keys, one for each key head and its four query
heads. Each row is divided into three shares in colours of their own, one for each of six
multiprocessors, which end in m, l and O. An arrow leads from each row to its merge.""")

# %% slideshow={"slide_type": "fragment"}
shape = dict(B=8, H=32, N=1, D=128, Nk=32768)
reads = {"K and V of 8 key heads, once": 8, "if each query head read its own": 32}
for name, Hk in reads.items():
    size = cost.compulsory_bytes(Hk=Hk, **shape)
    print(f"{name}: {size / 1e9:.2f} GB, {size / h200.bandwidth / 1e6:.0f} us")
print(f"the products at peak: {cost.flops(**shape) / h200.half_tflops / 1e6:.1f} us")
print(f"a program for each key head: {8 * 8} programs for {h200.sms} SMs")
q = torch.randn(1, 8, 1, 16).to(device)
k, v = torch.randn(2, 1, 2, 192, 16).to(device)
want, want_lse = attention.forward(q, k, v)
for splits in (1, 2, 3, 6):
    out, lse = decode.forward(q, k, v, splits=splits)
    away = (out - want).abs().max(), (lse - want_lse).abs().max()
    print(f"{splits} splits: out is {away[0]:.0e} from float64, lse {away[1]:.0e}")

# %% [markdown] slideshow={"slide_type": "slide"}
# ## 5. Write it yourself
#
# Four functions that the features need, with `hint` and `solution`:
#
# - **03.4, the tiles that a sliding window visits.** The last query stands at the last key. Tiles begin ... whole - 1
#   and full ... end - 1 need a mask, the tiles whole ... full - 1 between them do not. No other is visited.
# - **03.5, the same dropout mask from every tile.** `tl.philox(seed, c0, c1, c2, c3)` gives the four words of each
#   counter. row and column count from i and j, as (Br, 1) and (1, Bc) or, if the tile is transposed, the other way.
# - **03.6, the gradient of a mask that many share.** The mask has Bm x Hm entries, where Bm is B or 1 and Hm is H
#   or 1, and M belongs to entry (bm, hm). `products(q, k, v, dout, b * H + h, i, j, Nq, Nk, Br, Bc, D)` gives
#   (Q K^T, dP) of a head, `load_numbers(lse, b * H + h, i, Nq, Br)` its lse, and the same of delta.
# - **03.7, one result from many parts of the keys.** A part without a key has out_s = 0 and lse_s = -inf.
#
# **Bug hunt 03.bug2:** the dropout is right on average, and the training fails. `python -m steps check 03.bug2` tells
# the rest; you write the test that catches it.

# %% slideshow={"slide_type": "fragment"}
@triton.jit
def window_tiles(i, left, right, Nq, Nk, Br: tl.constexpr, Bc: tl.constexpr):
    """(begin, whole, full, end): which tiles of Bc keys the queries from i on visit."""
    raise Blank


check("03.4", window_tiles)

# %% slideshow={"slide_type": "fragment"}
@triton.jit
def kept(seed, i, j, row, column, head, batch, threshold):
    """Which entries of the tile at query i and key j dropout keeps, transposed or not."""
    raise Blank


check("03.5", kept)

# %% slideshow={"slide_type": "fragment"}
@triton.jit
def mask_gradient(
    M, i, j, bm, hm, Bm, Hm, q, k, v, dout, lse, delta, B, H, Nq, Nk, scale,
    Br: tl.constexpr, Bc: tl.constexpr, D: tl.constexpr
):  # fmt: skip
    """The gradient (Br, Bc) of the mask's tile M, summed over all who share the tile."""
    raise Blank


check("03.6", mask_gradient)

# %% slideshow={"slide_type": "fragment"}
@triton.jit
def merge_parts(out_s, lse_s):
    """(out (D,), lse) of one query, from out_s (parts, D) and lse_s (parts,)."""
    raise Blank


check("03.7", merge_parts)

# %% slideshow={"slide_type": "fragment"}
# When 03.4 passes, compare: the stage counts in keys, and visits both edges in one loop.
show("step03_triton/features", "tile_ranges")

# %% [markdown] slideshow={"slide_type": "slide"}
# ## 6. Check it, then break it
#
# One head of 32 tokens, each feature by itself, both directions: the error as a share of its tolerance. Then six
# mistakes, each planted in a copy of the files, two of them in two settings. **Which of out, lse,
# dq, dk, dv and dmask notices which? Which mistake does only lse see? Where does one live?**

# %% slideshow={"slide_type": "fragment"}
N, D = 32, 16
generator = torch.Generator().manual_seed(1)
q, k, v, dout = torch.randn(4, 1, 1, N, D, generator=generator).to(device)
q, away = 3 * q, (torch.arange(N)[:, None] - torch.arange(N)).abs().to(device)
settings = {
    "window (9, 0)": {"window": (9, 0)},
    "window (40, 0)": {"window": (40, 0)},
    "mask": {"mask": torch.randn(N, N, generator=generator).to(device)},
    "mask of |i - j|": {"mask": -0.3 * away},
    "soft-cap": {"softcap": 1.5},
    "causal ALiBi": {"alibi_slopes": slopes, "causal": True},
    "dropout": {"dropout_p": p, "seed": seed},
}
wanted = {}
for name, options in settings.items():
    of_reference = dict(options, mask_gradient="mask" in options)
    if of_reference.pop("seed", None):
        of_reference["dropout_mask"] = philox.keep_mask(seed, 1, 1, N, N, p).to(device)
        of_reference["dropout_p"] = philox.rounded(p)
    wanted[name] = error.expected(q, k, v, dout, **of_reference)

# %% slideshow={"slide_type": "fragment"}
def shares(kernels, name):
    """{result: error / tolerance} of a flash.py with the options of that name."""
    options = settings[name] | {"tile": (16, 16)}
    out, lse = kernels.forward(q, k, v, **options)
    options["mask_gradient"] = "mask" in options
    results = out, lse, *kernels.backward(dout, q, k, v, out, lse, **options)
    results = dict(zip((*error.NAMES, "dmask"), results, strict=False))
    errors = error.errors(results, wanted[name])
    return {result: e / wanted[name].tolerance[result] for result, e in errors.items()}


def planted(number, file, before, after):
    """flash.py and its files as a package, with `after` for `before`."""
    package = Path(folder.name, f"planted_{number}")
    package.mkdir()
    for stem in ("flash", "flash_kernels", "features", "tiles", "replay"):
        text = Path(flash.__file__).with_name(f"{stem}.py").read_text()
        assert stem != file or text.count(before) == 1
        text = text.replace(before, after) if stem == file else text
        Path(package, f"{stem}.py").write_text(text)
    return importlib.import_module(f"planted_{number}.flash")


for name in settings:
    print(f"{name:16} largest share {max(shares(flash, name).values()):.2f}")
# %% slideshow={"slide_type": "fragment"}
sys.path.insert(0, folder.name)
window = "features", "(seq.shift - f.left)", "(seq.shift - f.left - 1)"
transposed = "flash", "expand(B, H, Nq, Nk).stride()", "expand(B, H, Nq, Nk).mT.stride()"
mistakes = {
    "window one key too wide": ("window (9, 0)", *window),
    "the same, wider than N": ("window (40, 0)", *window),
    "mask transposed": ("mask", *transposed),
    "the same, symmetric mask": ("mask of |i - j|", *transposed),
    "soft-cap without derivative": ("soft-cap", "features", "1 - S * S", "1.0"),
    "ALiBi of the key alone": (
        "causal ALiBi", "features",
        "S -= head.slope * tl.abs(first - column.to(tl.float32))",
        "S += (j + column).to(tl.float32) * head.slope"),
    "keys counted from the tile": (
        "dropout", "features", "(j >> 4) + tl.arange", "tl.arange"),
    "dP not scaled": ("dropout", "flash_kernels", "dP * f.kept_scale", "dP"),
}  # fmt: skip
found = {}
for number, (says, (name, *change)) in enumerate(mistakes.items()):
    found[says] = shares(planted(number, *change), name)

# %% jupyter={"source_hidden": true} slideshow={"slide_type": "fragment"}
names = (*error.NAMES, "dmask")
fig, ax = plt.subplots(figsize=(8.6, 3.4), layout="constrained")
for (row, says), (column, name) in itertools.product(enumerate(found), enumerate(names)):
    ratio = found[says].get(name)
    if ratio is None:
        continue
    dies = ratio > 1
    look = {"facecolor": COLOURS[0 if dies else 4], "edgecolor": "white", "lw": 1.5}
    ax.add_patch(plt.Rectangle((column, row), 1, 1, **look))
    text = f"{ratio:,.0f}" if dies else "lives"
    ink = {"color": "white" if dies else INK, "ha": "center", "va": "center", "fontsize": 8}
    ax.text(column + 0.5, row + 0.5, text, **ink)
ax.set(xlim=(0, len(names)), ylim=(len(found), 0))
ax.set_title("blue: dies, with error / tolerance")
ax.set_xticks([c + 0.5 for c in range(len(names))], names)
ax.set_yticks([r + 0.5 for r in range(len(found))], found)
bare(ax)
picture(fig, """A table of mistakes against results. Everything dies of a window that is too
wide and of a transposed mask, nothing if the window exceeds N or the mask is symmetric. Of
a forgotten derivative and of an unscaled dP only dq and dk die, of ALiBi without the
query's part only lse, of keys counted from the tile all but lse.""")

# %% [markdown] slideshow={"slide_type": "fragment"}
# The derivative and the scale of dP are seen by dq and dk alone, so a test of the forward passes. `ALiBi of the key
# alone` adds slope · j instead of -slope · (pos - j): the same number more for a whole row, which the softmax removes,
# and lse does not. Dropout comes after l, so lse never sees it. And a symmetric mask cannot show a transposition, nor
# a window wider than N its edge: both lived.

# %% [markdown] slideshow={"slide_type": "slide"}
# ## 7. Predict, then measure
#
# **Question 1.** By 02d's count tensor cores need an eighth of a clock for a score at D = 128. In that time an SM has
# room for 16 instructions on one number each, but only for 2 of exp2 or tanh. Order by what they cost in the forward:
# an additive mask, a boolean one, ALiBi, the soft-cap, dropout. Below is what the compiler adds for each.
#
# <details><summary>Answer</summary>
#
# Dropout first: ten rounds of integer products for sixteen scores, and then bytes to be taken apart. Then the masks,
# which cost both: instructions to unpack and apply each entry, and N² numbers through the L2 cache for each head. The
# soft-cap adds fewer instructions than ALiBi, but one is a tanh, in the unit that exp2 alone keeps busy for half of the
# products' time. At D = 64 the products take half the time, and in the forward each feature weighs more.
#
# </details>

# %% jupyter={"source_hidden": true} slideshow={"slide_type": "fragment"}
assert compiler.wait() == 0
lines = found_by_compiler.read_text().splitlines()
compiled = dict(json.loads(line) for line in lines)
KINDS = {"integer product": r"IMAD(\.HI\.U32|\.WIDE\.U32)?$", "exp2, tanh": r"MUFU",
         "floating point": r"F|HSETP2", "other": r""}  # fmt: skip


def per_score(operations):
    """Instructions of each kind for a score. A kernel has its loop's text twice (03a)."""
    each = dict.fromkeys(KINDS, 0.0)
    for name, count in operations.items():
        kind = next(kind for kind, pattern in KINDS.items() if re.match(pattern, name))
        each[kind] += count / (2 * TILE[0] * TILE[1] / THREADS)
    return each


plain = per_score(compiled.pop("none"))
clocks = 128 / 1024  # of tensor cores, for a score at D = 128
print(f"room: {128 * clocks:.0f} instructions a score, {16 * clocks:.0f} of exp2 or tanh")
print(f"no feature: {sum(plain.values()):.1f}, with what is outside the loops; more with")
more = {}
for feature, operations in compiled.items():
    more[feature] = {kind: n - plain[kind] for kind, n in per_score(operations).items()}
    shown = ", ".join(f"{kind} {round(n, 1) + 0:.1f}" for kind, n in more[feature].items())
    print(f"{feature:13} {sum(more[feature].values()):4.1f}: {shown}")

# %% jupyter={"source_hidden": true} slideshow={"slide_type": "fragment"}
fresh = rows.fresh(rows.read())  # what was measured of the kernels as they are
BASES = dict.fromkeys(more, "none") | {"window": "causal", "soft-cap + window": "causal"}
BASES["packed"] = "padded"  # the same work as a batch
NOTHING = "No rows of these features yet. On a GPU: python -m steps.bench features"


def last_run(wanted, **at):
    """Rows of the wanted features, of the last run that measured our kernel."""
    found = [row for row in fresh if row["options"].get("feature") in wanted]
    at["gpu"] = h200.name
    found = [row for row in found if all(row[name] == at[name] for name in at)]
    ours = [row["run"] for row in found if row["stage"]]
    return [row for row in found if row["run"] == ours[-1]] if ours else []


def times(D, which):
    """{feature: ms of flash.py}"""
    run = last_run({*BASES, *BASES.values()}, D=D, **{"pass": which})
    return {row["options"]["feature"]: row["ms_median"] for row in run if row["stage"]}


# %% jupyter={"source_hidden": true} slideshow={"slide_type": "fragment"}
def draw_costs():
    fig, ax = plt.subplots(figsize=(9.4, 3.4), layout="constrained")
    settings = itertools.product((128, 64), ("fwd", "bwd"))
    for n, (D, which) in enumerate(settings):
        ms, name = times(D, which), f"D = {D}, {which}"
        there = [x for x in enumerate(BASES.items()) if {*x[1]} <= ms.keys()]
        ratios = {feature: ms[feature] / ms[base] for _, (feature, base) in there}
        at = [place + 0.2 * (n - 1.5) for place, _ in there]
        bars = ax.bar(at, ratios.values(), width=0.18, color=COLOURS[n], label=name)
        ax.bar_label(bars, fmt="%.2f", fontsize=6.5, padding=2)
        shown = ", ".join(f"{feature} {ratio:.2f}" for feature, ratio in ratios.items())
        print(f"{name}: {shown}")
    ax.axhline(1, color=INK, lw=1)
    names = [f"{feature}\nto {base}" for feature, base in BASES.items()]
    ax.set_xticks(range(len(names)), names, fontsize=8)
    ax.grid(axis="x", visible=False)
    ax.set_title("flash.py on an H200: time with a feature to time without it")
    ax.legend(fontsize=8, loc="upper right")
    return picture(fig, """Bars of the time with each feature, as a multiple of the time
without it, at D = 128 and 64, forward and, where measured, backward. A window is compared
with causal attention, packed sequences with the same sequences as a batch.""")


draw_costs() if times(128, "fwd") else print(NOTHING)

# %% [markdown] slideshow={"slide_type": "subslide"}
# **Question 2.** A window of N/8 to the left at N = 16k: at most how many times faster than causal attention?
#
# **Question 3.** Which limit does decoding meet, and how fast can it be with a cache of 32k keys (part 4)? What is a
# fair peer for it?
#
# <details><summary>Answers</summary>
#
# 2. The count below. Less will arrive: two of the 33 tiles of a row need a mask, and a program also begins and ends.
# 3. Memory: each number of K and V is used for four queries only. The fair peer is a copy of as many bytes in the same
#    run.
#
# </details>

# %% slideshow={"slide_type": "fragment"}
n_tiles, in_window = 16384 // 64, 16384 // 8 // 64 + 1
causal_tiles = sum(range(1, n_tiles + 1))
window_tiles = sum(min(n, in_window) for n in range(1, n_tiles + 1))
print(f"tiles of 64 x 64: causal {causal_tiles}, window of N/8 {window_tiles}:", end=" ")
print(f"{causal_tiles / window_tiles:.2f} times fewer")
for D in (128, 64):
    ms = times(D, "fwd")
    if {"causal", "window"} <= ms.keys():
        print(f"measured at D = {D}: {ms['causal'] / ms['window']:.2f} times faster")
for row in last_run({"decode"}):
    who, rate = row["kernel"] or row["peer"], cost.bandwidth(row)
    print(f"decode, {who:10}: {1e3 * row['ms_median']:5.0f} us, {rate:.2f} TB/s")
for row in last_run({"memory"}):
    held, S_size = row["peak_bytes"] / 1e9, 2 * row["H"] * row["N"] ** 2 / 1e9
    who = row["kernel"] or row["peer"]
    print(f"N = {row['N']}, both passes, {who}: {held:.2f} GB; S: {S_size:.0f} GB")
if not last_run({"decode"}):
    print(NOTHING)

# %% [markdown] slideshow={"slide_type": "slide"}
# ## 8. In people's models
#
# `sdpa` has torch's signature and semantics, causal at the top left included. A model that calls
# `F.scaled_dot_product_attention` needs one other name. Below, T5's learned bias with its gradient, and a padded batch
# with fewer key heads, against torch.

# %% slideshow={"slide_type": "fragment"}
B, H, N, D = 2, 4, 20, 16
q, dout = torch.randn(2, B, H, N, D).to(device)
k, v = torch.randn(2, B, 2, N, D).to(device)
bias = torch.randn(1, H, N, N).to(device).requires_grad_()
real = torch.arange(N).to(device) < torch.tensor([20, 13]).to(device)[:, None]
gradients_of = {}
functions = {"torch": F.scaled_dot_product_attention, "ours": step03.sdpa}
for name, function in functions.items():
    with sdpa_kernel(SDPBackend.MATH):
        out = function(q, k, v, attn_mask=bias, enable_gqa=True)
        of_bias = torch.autograd.grad(out, bias, dout)[0]
        padded = function(q, k, v, attn_mask=real[:, None, None], enable_gqa=True)
    gradients_of[name] = out.detach(), of_bias, padded
names = "out", "gradient of the bias", "out of the padded batch"
for says, theirs, ours in zip(names, *gradients_of.values(), strict=True):
    print(f"{says:24} {tuple(ours.shape)}: at most {(ours - theirs).abs().max():.0e} apart")

# %% [markdown] slideshow={"slide_type": "subslide"}
# ### Without a change to the model
#
# Within `use_in_sdpa()` torch's `scaled_dot_product_attention` computes with these kernels, and with it
# `nn.Transformer`, a model under `torch.compile`, and `nn.MultiheadAttention`, but only with `need_weights=False`:
# by default it computes P itself. The table in `steps/step03_triton/models.py` says which calls go on to torch. In
# Hugging Face's transformers `register_with_transformers()` gives a name for `attn_implementation=`, for models that
# also take `"sdpa"`. It registers a mask function too: without one transformers silently drops a padding mask.
#
# GPU MODE's lecture 12 registers a kernel with lightning-thunder as an *executor*: an operator, and a *checker* that
# says for each call whether the operator takes it. Here the operator is `aten::scaled_dot_product_attention`, and the
# checker is `takes` in `models.py`. lightning-thunder 0.2.6 does not import with torch 2.13
# (`Tensor.align_as` is missing), and is not shown.

# %% slideshow={"slide_type": "fragment"}
layer = torch.nn.MultiheadAttention(32, 4, batch_first=True, device=device)
tokens = torch.randn(2, 20, 32, device=device)
padding = torch.arange(20, device=device) >= torch.tensor([[20], [13]], device=device)
options = dict(key_padding_mask=padding, need_weights=False)
by_torch, _ = layer(tokens, tokens, tokens, **options)
with step03.use_in_sdpa():
    by_ours, _ = layer(tokens, tokens, tokens, **options)
apart = (by_ours - by_torch).abs().max()
print(f"a padded batch through nn.MultiheadAttention: at most {apart:.0e} apart")

# %% [markdown] slideshow={"slide_type": "slide"}
# ### Summary
#
# - One function, `scores`, for both directions. What is off is compiled away.
# - Positions decide which tiles are visited. A window, packing and causal need no mask in memory.
# - A mask is read by strides, never expanded, and heads that share it run side by side.
# - Dropout is a function of seed, batch, head, query and key, so no tile can change it. It comes after l.
# - out and lse stand for all keys they were made of. Carrying them, splitting keys and the ring are one idea.
#
# **Which file do I take?**
#
# | you need | take |
# |---|---|
# | full or causal attention in float32, or on another GPU than Hopper (before Ampere float32 only) | `fwd_0_fused.py`, `bwd_0_fused.py` |
# | the same on Hopper, in 16 bits | `fwd_1_tma.py`, `bwd_1_tma.py` |
# | the same, head_dim 64, 72, ... 128, and Triton 3.6.0 or 3.7.1 | `fwd_3_gluon.py`, `bwd_2_gluon.py`, `bwd_1_tma.py` |
# | any feature of this notebook | `flash.py`, `flash_kernels.py`, `features.py`, `tiles.py`, `replay.py`, in one folder |
# | one query and many keys | `decode.py` |
# | torch's function for a whole model | `steps.step03_triton.sdpa` |
#
# **Ask yourself**
#
# 1. transformers' Mistral has `sliding_window=4096`. Which `window` is that?
# 2. Why has the gradient of the mask no factor scale, and that of q one?
# 3. A row's mask is finfo.min throughout. Why is out not 0?
# 4. Dropout counts keys from the tile. Why does it pass a test in which forward and backward have equal tiles?
# 5. `decode.py` computes at least 16 rows, for 4 query heads a key head. Why do the other 12 cost nothing?
#
# <details><summary>Answers</summary>
#
# 1. `(4095, 0)`: the query's own key counts.
# 2. The mask is added after the scale.
# 3. All scores are equal there, so out is the mean of V. Only -inf hides.
# 4. Both draw the same wrong mask.
# 5. Tensor cores take 16 rows anyway, and wait for K and V.
#
# </details>
#
# **Go further**
#
# - ★ (15 minutes) What is the gradient of a sink, by the formula of dS and from lse and delta alone? Compare with
#   `step03.backward(..., sinks=sinks)`, whose last result it is.
# - ★★ (2 hours) Block-sparse: a table says which tiles of keys a tile of queries visits. What replaces `tile_ranges`?
# - ★★★ (a weekend, GPU) Paged K and V: a sequence's keys lie in pages of 64, anywhere. Give `decode.py` a page table.
#   Which loads change?
#
# **Read:** Gemma 2 (2408.00118); ALiBi (2108.12409); Longformer (2004.05150); T5 (1910.10683); Llama 3 (2407.21783);
# Salmon and others, "Parallel Random Numbers: As Easy as 1, 2, 3".
#
# **Next:** [04a_ring.ipynb](04a_ring.ipynb), where the keys are divided among GPUs, and merged by lse.
