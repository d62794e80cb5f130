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
# # 04. Ring attention
#
# ## 1. The question
#
# *How do several GPUs share one sequence, and who waits for whom?*
#
# - **Before you start:** notebook 00 (tiles, lse, delta). No experience with distributed programs.
# - **Time:** about an hour to read, an hour more with the exercises.
# - **Hardware:** any. Without GPUs the ranks are processes that talk over sockets (gloo), and here compute with stage
#   00's tiles, to be quick. With a GPU for each rank the same files use NCCL and stage 03's kernels.
# - **Code:** `steps/step04_ring/`. **Tests:** `pytest tests/test_step04_ring.py`. **Symbols:** `reference/symbols.md`.

# %% slideshow={"slide_type": "skip"}
import steps  # comes first, because it chooses the engine
import itertools
import math
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from queue import Queue
from types import SimpleNamespace
from unittest.mock import patch
import matplotlib
import matplotlib.pyplot as plt
import torch
import torch.distributed as dist
from reference import attention, cases, error
from steps.bench import cost, fingerprint, rows
from steps.bench.plots import COLOURS, GREYS, INK, style
from steps import step00_naive as step00, step04_ring as step04
from steps.step04_ring import Layout, demo, launch, ring
from steps.step04_ring.merge import merge as merge_parts
from steps.workbook import Blank, check, picture, show
from steps.workbook import hint, solution  # noqa: F401  They are for part 5.

torch.set_num_threads(1)  # the ranks below are threads or processes themselves
torch.set_printoptions(precision=2, sci_mode=False)
style()
print(f"{steps.engine.describe()}\nmatplotlib {matplotlib.__version__}")

# %% slideshow={"slide_type": "skip"}
RANK = (*COLOURS[:3], GREYS[1])  # a colour for each of four ranks
WHITE = {"ha": "center", "va": "center", "color": "white"}  # text in the middle of a box


def bare(ax):
    """Takes the grid, the ticks and the frame away."""
    ax.grid(False)
    ax.tick_params(length=0)
    ax.spines[:].set_visible(False)


# %% [markdown] slideshow={"slide_type": "slide"}
# ## 2. The problem: the memory of one device
#
# The stages so far never store the N x N matrix. What is left grows only like N: q, k, v, out and lse, which every
# layer keeps until its backward. Take the shape of a common model: 32 layers, H = 32, Hk = 8, D = 128, bfloat16.

# %% slideshow={"slide_type": "fragment"}
shape, layers = dict(B=1, H=32, D=128, Hk=8), 32
h200 = cost.GPUS["NVIDIA H200"]


def kept(N):
    """Bytes of q, k, v, out and lse of all layers; the forward moves each of them once."""
    return layers * cost.compulsory_bytes(N=N, **shape)


def at_peak(N):
    """Seconds of all layers' causal attention, both passes, at an H200's datasheet peak."""
    operations = cost.flops(1, shape["H"], N, shape["D"], causal=True, pass_="fwd+bwd")
    return layers * operations / (1e12 * h200.half_tflops)


for N in (2**13, 2**17, 2**20):
    one_head = 2 * N * N / 1e9
    print(f"N = {N:9,}: kept {kept(N) / 1e9:5.1f} GB,", end=" ")
    print(f"S of one head {one_head:7,.1f} GB, at peak {at_peak(N):6.1f} s")


# %% slideshow={"slide_type": "fragment"}
lengths = [2**i for i in range(12, 23)]
fig, axes = plt.subplots(1, 2, figsize=(8.6, 3.2))
looks = {1: ("o-", COLOURS[1]), 8: ("s-", COLOURS[0]), 64: ("D-", COLOURS[2])}
for ranks, (look, colour) in looks.items():
    name = "on 1 device" if ranks == 1 else f"on {ranks} devices"
    gigabytes = [kept(N) / ranks / 1e9 for N in lengths]
    seconds = [at_peak(N) / ranks for N in lengths]
    axes[0].loglog(lengths, gigabytes, look, color=colour, label=name)
    axes[1].loglog(lengths, seconds, look, color=colour, label=name)
for memory, name in ((16, "T4"), (141, "H200")):
    axes[0].axhline(memory, color=INK, lw=0.8, ls="--")
    axes[0].text(4500, memory * 1.08, f"{name}, {memory} GB", fontsize=8)
axes[0].set_title("q, k, v, out, lse of all layers, GB a device")
axes[1].set_title("attention of a training step at peak, s")
names = [f"{N // 1024}k" if N < 2**20 else f"{N // 2**20}M" for N in lengths[::2]]
for ax in axes:
    ax.set(xlabel="N")
    ax.set_xticks(lengths[::2], names)
    ax.minorticks_off()
axes[1].legend(fontsize=8)
picture(fig, """Left: what attention keeps, in gigabytes a device, rises with slope 1
against N; on one device it passes the memory of an H200 between 128k and 256k tokens, on 8
and 64 devices 8 and 64 times later. Right: the seconds of a step at peak rise with slope 2
and fall with the number of devices.""")

# %% [markdown] slideshow={"slide_type": "fragment"}
# At a million tokens the layers keep 691.5 GB, several times the H200's memory; and attention alone takes 1019.6 s a
# step, even at the datasheet's peak. So deal the *sequence* out: each of N devices (each a **rank**) holds S / N of S
# positions. (From here on N counts ranks, and S positions.) But a query needs the keys of all earlier positions, those
# on other ranks included.

# %% [markdown] slideshow={"slide_type": "slide"}
# ## 3. The idea: the keys travel
#
# ### Merging two results
#
# Rank 0 has attended to keys A, rank 1 to keys B, with the same query. All that is kept of each part is (out, lse).
# Write $\ell$ for lse and $o$ for out. Since $\ell_A = \log \sum_A e^{s_j}$, the product
# $e^{\ell_A} o_A = \sum_A e^{s_j} v_j$ is the sum before division. Add the products of A and B, and divide by
# $e^{\ell_A} + e^{\ell_B}$:
#
# $$\ell = \log(e^{\ell_A} + e^{\ell_B}) \qquad w = e^{\ell_B - \ell} \qquad o = (1 - w)\, o_A + w\, o_B$$
#
# **Claim 1.** This is exactly attention over A and B. Six tokens and d = 2, the numbers of notebook 00, query 5:

# %% slideshow={"slide_type": "fragment"}
Q = torch.tensor([[1.0, 2], [0, 1], [-1, 0], [2, -1], [1, 1], [3, 1]])
K = torch.tensor([[0.0, 1], [1, 0], [-1, 1], [1, 2], [2, 0], [0, -1]])
V = torch.tensor([[0.0, 6], [2, 0], [4, 6], [6, 4], [8, 0], [10, 6]])
want, want_lse = step00.forward(Q[5:], K, V)
out_A, lse_A = step00.forward(Q[5:], K[:3], V[:3])
out_B, lse_B = step00.forward(Q[5:], K[3:], V[3:])
lse = (lse_A.exp() + lse_B.exp()).log()
w = (lse_B - lse).exp()
out = (1 - w) * out_A + w * out_B
print(f"A   lse {lse_A.item():.2f}  out {out_A[0]}")
print(f"B   lse {lse_B.item():.2f}  out {out_B[0]}")
print(f"w = {w.item():.2f}: lse {lse.item():.2f}  out {out[0]}")
print("claim 1:", torch.allclose(out, want), torch.allclose(lse, want_lse))
print("the plain mean of both:", (out_A[0] + out_B[0]) / 2)

# %% [markdown] slideshow={"slide_type": "subslide"}
# B has 0.91 of the sum, so the result lies near out_B: (6.83, 1.34), as in notebook 00.
#
# A row that has seen no key yet has out = 0 and lse = -inf, the natural start of a sum. There, and at large lse, forms
# that are equal on paper differ:

# %% slideshow={"slide_type": "fragment"}
def typed_in(lse, block):
    new = (lse.exp() + block.exp()).log()
    return (block - new).exp(), new


def sigmoid(lse, block):  # as some ring implementations have it
    return torch.sigmoid(block - lse), lse - torch.nn.functional.logsigmoid(lse - block)


def stable_log(lse, block):
    new = torch.logaddexp(lse, block)
    return (block - new).exp(), new


inf = math.inf
pairs = [(0.0, 1.0), (100.0, 100.0), (-inf, 1.0), (1.0, -inf), (-inf, -inf)]
print("(lse, lse_block)  ", "".join(f"{f'({a:g}, {b:g})':>16}" for a, b in pairs))
for form in (typed_in, sigmoid, stable_log):
    answers = [form(torch.tensor(a), torch.tensor(b)) for a, b in pairs]
    texts = [f"{w:.2f}, {l:.2f}" for w, l in answers]
    print(f"{form.__name__:11} w, lse", "".join(f"{text:>16}" for text in texts))

# %% [markdown] slideshow={"slide_type": "fragment"}
# `typed_in` overflows. `sigmoid` breaks at the very first merge, (-inf, 1). `stable_log` fails only where both are
# -inf, as -inf - (-inf) is nan. The stage's `merge`, yours to write in part 5, guards that one case:

# %% slideshow={"slide_type": "fragment"}
for a, b in pairs:
    o, l = torch.zeros(1, 1), torch.tensor([a])
    # With out = 0 and out_block = 1 the result is w.
    merge_parts(o, l, torch.ones(1, 1), torch.tensor([b]))
    print(f"merge ({a:g}, {b:g}): w {o.item():.2f}, lse {l.item():.2f}")
parts = [step00.forward(Q, K[i : i + 2], V[i : i + 2]) for i in (0, 2, 4)]
results = []
for order in itertools.permutations(parts):
    o, l = torch.zeros(6, 2), torch.full((6,), -inf)
    for part in order:
        merge_parts(o, l, *part)
    results.append(o)
largest = max((o - results[0]).abs().max() for o in results)
print(f"6 orders of 3 parts, largest difference: {largest:.1e}")

# %% [markdown] slideshow={"slide_type": "subslide"}
# **Claim 2.** Parts may be merged in any order, up to rounding. So no rank needs the keys in sequence order, and each
# may start with its own.
#
# ### The ring, in one process
#
# Every rank keeps its queries. In each of N steps it attends to the keys at hand, merges, and hands the keys to
# rank + 1: a **hop**. Here the ranks are entries of lists. `Layout` says which positions a rank holds. Its `work` says
# which rows and keys of the block there are to compute, and whether under a causal diagonal; None means nothing.

# %% slideshow={"slide_type": "fragment"}
def ring_in_lists(q, k, v, layout, holds=None):
    """(out, lse) of shards q, k, v (n, D); each of the five is a list by rank.

    If holds is a list, it receives for each step whose keys each rank holds.
    """
    out = [torch.zeros_like(x) for x in q]
    lse = [x.new_full((len(x),), -inf) for x in q]
    # Every rank starts with its own keys.
    at_hand = [(src, k[src], v[src]) for src in range(layout.N)]
    for _ in range(layout.N):
        if holds is not None:
            holds.append([src for src, _, _ in at_hand])
        for me, (src, K, V) in enumerate(at_hand):  # real devices do this at the same time
            if work := layout.work(me, src):
                rows, keys, causal = work
                options = {"causal": causal, "rung": "matrix"}
                part = step00.forward(q[me][rows], K[keys], V[keys], **options)
                merge_parts(out[me][rows], lse[me][rows], *part)
        at_hand = at_hand[-1:] + at_hand[:-1]  # in the hop rank r gets what r - 1 had
    return out, lse


# %% slideshow={"slide_type": "fragment"}
device = steps.engine.device
S, D = 53, 16  # 53 is prime, so the shards differ in length


def random_inputs(*shape):
    """q, k, v and dout of one shape, the same numbers in every call."""
    seeded = [torch.Generator().manual_seed(i) for i in range(4)]
    return [torch.randn(shape, generator=generator).to(device) for generator in seeded]


q, k, v, dout = random_inputs(S, D)
for kind in step04.SUPPORTS["layouts"]:
    worst = 0
    for N, causal in itertools.product((1, 2, 4, 7), (False, True)):
        layout = Layout(kind, S, N, causal)
        shards = [[layout.shard(x, rank) for rank in range(N)] for x in (q, k, v)]
        out, lse = (layout.unshard(x, dim=0) for x in ring_in_lists(*shards, layout))
        want, want_lse = step00.forward(q, k, v, causal=causal)
        for difference in (out - want, lse - want_lse):
            worst = max(worst, difference.abs().max().item())
    print(f"{kind:10} 1, 2, 4 and 7 ranks, causal or not:", end=" ")
    print(f"largest difference to one device {worst:.0e}")


# %% slideshow={"slide_type": "subslide"}
N, forward_holds = 4, []
layout = Layout("zigzag", 16, N)
shards = [[layout.shard(x[:16], rank) for rank in range(N)] for x in (q, k, v)]
ring_in_lists(*shards, layout, forward_holds)
# The backward's order is explained in part 4.
backward_holds = [[(rank + 1 + step) % N for rank in range(N)] for step in range(N)]
holds = {"forward: keys go to rank + 1": forward_holds,
         "backward: they return to rank - 1": backward_holds}  # fmt: skip
fig, axes = plt.subplots(1, 2, figsize=(8, 2.6))
for ax, (name, sources) in zip(axes, holds.items(), strict=True):
    for step, rank in itertools.product(range(N), range(N)):
        src, corner = sources[step][rank], (step + 0.05, rank + 0.05)
        ax.add_patch(plt.Rectangle(corner, 0.9, 0.9, facecolor=RANK[src]))
        ax.text(step + 0.5, rank + 0.5, f"K{src} V{src}", weight="bold", **WHITE)
    ax.set(xlim=(0, N), ylim=(N, 0), xlabel="step", title=name)
    ax.set_xticks([i + 0.5 for i in range(N)], range(N))
    ax.set_yticks([i + 0.5 for i in range(N)], [f"rank {i}" for i in range(N)])
    bare(ax)
picture(fig, """Two tables of 4 ranks by 4 steps that say whose K and V a rank holds.
Forward: rank 0 holds those of rank 0, 3, 2, 1; each colour moves down one rank a step.
Backward: rank 0 begins with those of rank 1, where the forward ended, then has 2, 3, and
last its own 0; each colour moves up.""")

# %% [markdown] slideshow={"slide_type": "slide"}
# ## 4. From algorithm to code
#
# First the budget: what a rank holds, of one layer. Of all K and V it needs the pair at hand and the one that is
# arriving, 2 / N. In the backward, dK and dV exist three times: computed, on the way out, and arriving.

# %% slideshow={"slide_type": "fragment"}
S, N, H, Hk, D = 2**20, 8, 32, 8, 128
row = S // N * D  # elements of one head's shard
budget = {
    "q, k, v, out in bfloat16": 2 * (2 * H + 2 * Hk) * row,
    "K, V at hand and arriving": 2 * 2 * (2 * Hk) * row,
    "out in float32 (forward), or dq (backward)": 4 * H * row,
    "dK, dV in float32, three times": 3 * 4 * (2 * Hk) * row,
}
print(f"S = {S:,} on {N} ranks, one layer")
print("\n".join(f"  {name:44} {size / 2**30:5.2f} GiB" for name, size in budget.items()))
print(f"  {'all of K and V would be':44} {2 * 2 * Hk * S * D / 2**30:5.2f} GiB")

# %% [markdown] slideshow={"slide_type": "subslide"}
# Ring Attention's Algorithm 1 prints N - 1 rounds, which leaves one block out. There are N blocks and N - 1 hops.
# `papers/ring_attention.md` restates it, with these lines:
#
# | line | what it does | in `step04_ring/` |
# |---|---|---|
# | 1 | out = 0, lse = -inf, float32 | `ring.forward` |
# | 4, 9 | post the hop, later wait for it | `comm.py`: `post`, `wait` |
# | 5 | the block: any kernel that gives (out, lse) | the argument `block`, with `Layout.work` |
# | 6–8 | merge | `merge.py` (yours, in part 5) |
# | 10–17 | the backward | `ring.backward` |
#
# The hop is posted *before* the block is computed and waited for after it: if it is the shorter of the two, it is free.

# %% slideshow={"slide_type": "fragment"}
show("step04_ring/ring", "forward")

# %% [markdown] slideshow={"slide_type": "subslide"}
# ### The backward
#
# Notebook 00: $P_{ij} = e^{S_{ij} - \mathit{lse}_i}$ and $dS_{ij} = P_{ij}\,(dP_{ij} - \mathit{delta}_i)$. Besides row
# i of q and dO and row j of k and v, an entry needs two numbers, and these belong to the *whole row* of scores: lse and
# $\mathit{delta}_i = dO_i \cdot O_i$.
#
# **Claim 3.** With the final lse and out every block's gradients are right, and are simply added: no merge. With a
# block's own lse they are wrong:

# %% slideshow={"slide_type": "fragment"}
dO = torch.tensor([[1.0, 0], [0, 1], [1, 1], [2, 0], [0, -1], [1, -1]])
out, lse = step00.forward(Q, K, V)
dq, dk, dv = step00.backward(dO, Q, K, V, out, lse)
halves = [(K[:3], V[:3]), (K[3:], V[3:])]
own = [step00.forward(Q, *half) for half in halves]
for name, saved in (("own lse", own), ("final lse", [(out, lse), (out, lse)])):
    blocks = [step00.backward(dO, Q, *kv, *s) for kv, s in zip(halves, saved, strict=True)]
    dq_sum = blocks[0][0] + blocks[1][0]
    same_dq = torch.allclose(dq_sum, dq)
    same_dk = torch.allclose(torch.cat([blocks[0][1], blocks[1][1]]), dk)
    print(f"{name:9}  dq right: {same_dq}, dk right: {same_dk};  dq of query 5", dq_sum[5])
print("all keys at once                   dq of query 5", dq[5])

# %% [markdown] slideshow={"slide_type": "fragment"}
# dQ stays with its rank. dK and dV are sums over *all* ranks' queries, so they travel with their K and V, and must end
# at their owner. Turning the ring round does that without an extra hop: the backward starts with the keys that the
# forward ended with, those of rank + 1, and ends with the rank's own (the figure's right half).

# %% slideshow={"slide_type": "fragment"}
show("step04_ring/ring", "backward")

# %% [markdown] slideshow={"slide_type": "subslide"}
# Now let the module's own two loops run. They need only `rank`, `size` and `post` of their communicator, so threads and
# queues will do, and can write down what is sent.

# %% slideshow={"slide_type": "fragment"}
class Wire:
    """Stands in for comm.Comm where ranks are threads: a hop is a queue.

    `log` lists (rank, what was sent).
    """

    def __init__(self, rank, size, queues, log):
        self.rank, self.size = rank, size
        self.queues, self.log = queues, log

    def post(self, x, shape, towards):
        self.log.append((self.rank, x))
        self.queues[(self.rank + towards) % self.size, towards].put(x.clone())
        arriving = self.queues[self.rank, towards]
        return SimpleNamespace(wait=partial(arriving.get, timeout=30))


# %% slideshow={"slide_type": "fragment"}
class Plain:
    """Stage 00 as the block, in float32; the results have the type of q, as a kernel's."""

    @staticmethod
    def forward(q, *kv, **options):
        out, lse = step00.forward(*(x.float() for x in (q, *kv)), rung="matrix", **options)
        return out.to(q.dtype), lse

    @staticmethod
    def backward(dout, q, *rest, **options):
        inputs = (x.float() for x in (dout, q, *rest))
        grads = step00.backward(*inputs, rung="matrix", **options)
        return [x.to(q.dtype) for x in grads]


# %% slideshow={"slide_type": "fragment"}
def dry_run(q, k, v, dout, layout, block=Plain, scale=None):
    """({name: result of the whole sequence}, log) by ring.py's loops; ranks are threads."""
    queues = {(rank, way): Queue() for rank in range(layout.N) for way in (1, -1)}
    log = []

    def life(rank):
        q_r, k_r, v_r, dout_r = (layout.shard(x, rank) for x in (q, k, v, dout))
        comm = Wire(rank, layout.N, queues, log)
        options = dict(layout=layout, comm=comm, block=block, scale=scale)
        out, lse, kv = ring.forward(q_r, k_r, v_r, **options)
        return out, lse, *ring.backward(dout_r, q_r, kv, out, lse, **options)

    with ThreadPoolExecutor(layout.N) as pool:
        shards = zip(*pool.map(life, range(layout.N)), strict=True)
        results = zip(error.NAMES, shards, strict=True)
        return {name: layout.unshard(x, dim=2) for name, x in results}, log


four = [x[None, None] for x in (q, k, v, dout)]  # (B, H, S, D)
want = error.expected(*four, causal=True)
for N in (4, 16):
    got, log = dry_run(*four, Layout("zigzag", len(q), N, causal=True))
    errors = {name: f"{e:.0e}" for name, e in error.errors(got, want).items()}
    print(f"{N:2} ranks:", errors, f"{len(log)} messages")


# %% [markdown] slideshow={"slide_type": "subslide"}
# ### Who waits for whom
#
# Under a causal mask, late positions see much and early ones little. Three ways to deal 8 positions to 4 ranks:

# %% slideshow={"slide_type": "fragment"}
def owners(layout):
    """(S, S) tensors: the rank that computes each score, and the step; -1 where masked."""
    who, when = (torch.full((layout.S, layout.S), -1) for _ in range(2))
    for me, step in itertools.product(range(layout.N), range(layout.N)):
        src = (me - step) % layout.N
        if work := layout.work(me, src):
            rows, keys = layout.positions(me)[work[0]], layout.positions(src)[work[1]]
            for i, j in itertools.product(range(len(rows)), range(len(keys))):
                if not work[2] or j <= i:  # causal scores end at the block's diagonal
                    assert who[rows[i], keys[j]] == -1  # nothing is computed twice
                    who[rows[i], keys[j]], when[rows[i], keys[j]] = me, step
    return who, when


kinds = ("contiguous", "zigzag", "striped")
for kind in kinds:
    layout = Layout(kind, 8, 4, causal=True)
    who, _ = owners(layout)
    held = [next(r for r in range(4) if i in layout.positions(r)) for i in range(8)]
    triangle = torch.equal(who >= 0, torch.ones(8, 8).tril().bool())
    print(f"{kind:10} positions 0..7 on ranks", "".join(map(str, held)), end="; ")
    print("every visible score once:", triangle)


# %% slideshow={"slide_type": "fragment"}
fig, axes = plt.subplots(1, 3, figsize=(9, 2.9))
for ax, kind in zip(axes, kinds, strict=True):
    who, when = owners(Layout(kind, 8, 4, causal=True))
    for i, j in (who >= 0).nonzero().tolist():
        look = {"facecolor": RANK[who[i, j]], "edgecolor": "white", "lw": 0.5}
        ax.add_patch(plt.Rectangle((j, i), 1, 1, **look))
        ax.text(j + 0.5, i + 0.54, when[i, j].item(), fontsize=9, **WHITE)
    ax.set(xlim=(0, 8), ylim=(8, 0), aspect="equal", xlabel="keys", title=kind)
    ax.set_xticks([i + 0.5 for i in range(8)], range(8))
    ax.set_yticks([i + 0.5 for i in range(8)], range(8))
    ax.grid(False)
axes[0].set_ylabel("queries")
handles = [plt.Rectangle((0, 0), 1, 1, facecolor=RANK[r]) for r in range(4)]
below = {"loc": "lower center", "bbox_to_anchor": (0.5, -0.13), "ncols": 4, "fontsize": 9}
fig.legend(handles, [f"rank {r}" for r in range(4)], **below)
title = "who computes which score; the number is the step"
fig.suptitle(title, x=0.12, y=1.06, ha="left", fontsize=11)
picture(fig, """The causal triangle of 8 by 8 scores for three layouts, coloured by the rank
that computes a score and numbered with the step. Contiguous: four bands of rows, the last
much larger than the first, and step 3 is a block of rank 3 alone. Zigzag: rank 0 has the
first and the last band. Striped: rows alternate between the ranks.""")

# %% [markdown] slideshow={"slide_type": "subslide"}
# A rank's *total* is only half of the matter. In every step each rank waits for a neighbour's keys, so the slowest rank
# of the step sets the pace. Work is counted in units of c², c = S / N, and a square on the diagonal as half:

# %% slideshow={"slide_type": "fragment"}
def area(part, c):
    """The work of one block in units of c^2."""
    if part is None:
        return 0.0
    rows, keys, causal = part
    return (rows.stop - rows.start) * (keys.stop - keys.start) / c**2 / (2 if causal else 1)


def work_table(kind, N, c=1024):
    """Each rank's work (row) in each step (column), from the table that the ring uses."""
    layout = Layout(kind, N * c, N, causal=True)
    parts = [[layout.work(me, (me - step) % N) for step in range(N)] for me in range(N)]
    return torch.tensor([[area(part, c) for part in row] for row in parts])


def efficiency(table):
    """The mean rank's work over the ring's time; a step takes its slowest rank's time."""
    return (table.sum(1).mean() / table.max(0).values.sum()).item()


for N in (2, 4, 8, 64):
    values = "  ".join(f"{kind} {efficiency(work_table(kind, N)):.4f}" for kind in kinds)
    print(f"{N:2} ranks: {values}   N / (2N - 1) = {N / (2 * N - 1):.4f}")


# %% [markdown] slideshow={"slide_type": "subslide"}
# Contiguous: rank N - 1 does N - 1/2 units, the mean is N / 2. Their ratio, N / (2N - 1), is 0.5714 for four ranks and
# tends to a half. Zigzag is at 1: every rank does half a unit in every step. Striped is a little below, as its
# triangles with the keys of later ranks have one row and one column less.
#
# Here is the waiting as a timeline, in a model: a hop starts when both its ends have posted it; the next step starts
# when the block is done and the hops in and out are through.

# %% slideshow={"slide_type": "fragment"}
def timeline(kind, N, hop):
    """[(rank, step, begin, end)] of all blocks, in units of c^2 work; a hop lasts `hop`."""
    table = work_table(kind, N)
    ready, bars = [0.0] * N, []
    for step in range(N):
        end = [ready[r] + table[r, step].item() for r in range(N)]
        bars += [(r, step, ready[r], end[r]) for r in range(N)]
        if step < N - 1:
            # The time at which the hop from rank r - 1 to rank r is through.
            arrived = [max(ready[r], ready[r - 1]) + hop for r in range(N)]
            ready = [max(end[r], arrived[r], arrived[(r + 1) % N]) for r in range(N)]
    return bars


# %% slideshow={"slide_type": "fragment"}
fig, axes = plt.subplots(3, 1, figsize=(8, 5.2), sharex=True, gridspec_kw={"hspace": 0.4})
runs = ("contiguous", 0.3), ("zigzag", 0.3), ("zigzag", 0.8)
for ax, (kind, hop) in zip(axes, runs, strict=True):
    bars = timeline(kind, 4, hop)
    for r, step, begin, end in bars:
        src = (r - step) % 4
        ax.barh(r, end - begin, left=begin, height=0.8, color=RANK[src], edgecolor="white")
        if end > begin:
            ax.text((begin + end) / 2, r, f"K{src}", fontsize=8, **WHITE)
    last = max(end for *_, end in bars)
    ax.set_yticks(range(4), [f"rank {r}" for r in range(4)])
    ax.set(ylim=(3.6, -0.6), xlim=(0, 3.6))
    share = 2 / last
    ax.set_title(f"{kind}, a hop lasts {hop}: done at {last:.1f}, efficiency {share:.2f}")
    busy = sum(end - begin for r, _, begin, end in bars if r == 0)
    print(f"{kind}, hop {hop}: rank 0 works {busy:.1f} of {last:.1f}")
axes[-1].set_xlabel("time, in blocks of c²")
picture(fig, """Three timelines of four ranks. Contiguous: rank 0 works half a unit and then
idles to the end at 3.5, rank 3 works throughout. Zigzag with a hop of 0.3: all ranks work
without a gap and end at 2.0. Zigzag with a hop of 0.8, longer than a step's half unit: all
ranks wait after every step.""")

# %% [markdown] slideshow={"slide_type": "subslide"}
# ### What travels, and when it is free
#
# Contiguous: rank 0 works 0.5 of 3.5 and waits for the rest. Zigzag hides a hop of 0.3 behind a block of half a unit,
# but not one of 0.8. So how long is a hop? First, what is sent; the log of a dry run in bfloat16 knows:

# %% slideshow={"slide_type": "fragment"}
N, c = 4, 16
half = [torch.randn(1, 2, N * c, 32, device=device).bfloat16() for _ in range(4)]
_, log = dry_run(*half, Layout("zigzag", N * c, N, causal=True))
from_0 = [x for rank, x in log if rank == 0]
sent = [(tuple(x.shape), str(x.dtype).removeprefix("torch."), x.nbytes) for x in from_0]
for message in dict.fromkeys(sent):
    print(f"{sent.count(message)} x shape {message[0]} {message[1]}: {message[2]:,} bytes")
kv, dkv = (2 * 2 * c * 32 * size for size in (2, 4))  # K and V, H c D each
print(f"formula: K, V {kv:,}; dK, dV in float32 {dkv:,}")


# %% slideshow={"slide_type": "fragment"}
def break_even(F, W, share=1.0, pass_="fwd"):
    """Tokens a rank, c, from which zigzag's hops are hidden, in bfloat16.

    F is in FLOP/s, W in bytes/s each way, and share is Hk / H.
    """
    # The operations of a step, in units of H c^2 D.
    operations = cost.flops(1, 1, 1, 1, causal=True, pass_=pass_)
    # The bytes of K and V, and in the backward of dK and dV, in units of Hk c D.
    sent = {"fwd": 2 * 2, "bwd": 2 * 2 + 2 * 4}[pass_]
    return sent / operations * share * F / W


peak = 1e12 * h200.half_tflops
links = {  # bytes/s each way: two measured between 4 H200, and two datasheets'
    "copy engine, 370 GB/s": 370e9, "NCCL, 155 GB/s": 155e9,
    "network, 400 Gb/s": 50e9, "Ethernet, 10 Gb/s": 1.25e9,
}  # fmt: skip
for name, W in links.items():
    fwd, bwd = break_even(peak, W), break_even(peak, W, pass_="bwd")
    grouped = break_even(peak, W, share=1 / 4)
    print(f"{name:21} fwd {fwd:11,.0f}   bwd {bwd:11,.0f}", end="   ")
    print(f"fwd with Hk = H / 4 {grouped:9,.0f} tokens a rank")


# %% [markdown] slideshow={"slide_type": "fragment"}
# Work grows like c², bytes like c, so there is a c from which the hop is hidden: $c \ge 2\,(F/W)\,(H_k/H)$ forward,
# with 12/5 in place of 2 backward. B, D and N cancel. F is the datasheet's peak here; a kernel below it needs fewer tokens.
# W is not the datasheet's 450 GB/s of NVLink: between the 4 H200 of one machine we have measured 155 GB/s each way with
# NCCL, which `ring.py` sends with, and 370 with the GPUs' copy engines. (Of this there is no recorded row yet.) So NVLink
# hides hops from the second line's c on, and could from the first line's. Fewer K/V heads help in proportion.

# %% slideshow={"slide_type": "fragment"}
tokens = [2**i for i in range(8, 23)]
fig, ax = plt.subplots(figsize=(7.2, 3.6))
step_ms = [1e3 * cost.flops(1, 32, c, 128, causal=True) / peak for c in tokens]
ax.loglog(tokens, step_ms, "o-", color=COLOURS[1], label="a step's block, at peak")
looks = (COLOURS[0], "-"), (COLOURS[4], "-."), (COLOURS[2], "--"), (COLOURS[3], ":")
for (name, W), (colour, look) in zip(links.items(), looks, strict=True):
    hop_ms = [1e3 * 2 * 2 * 32 * 128 * c / W for c in tokens]
    ax.loglog(tokens, hop_ms, look, color=colour, label=f"hop: {name}")
    c = break_even(peak, W)
    ax.plot(c, 1e3 * 2 * 2 * 32 * 128 * c / W, "X", color=INK, ms=8)
ax.set_title("ms; H = Hk = 32, D = 128, zigzag, forward. X: break-even")
ax.set(xlabel="c, tokens a rank")
ax.minorticks_off()
ax.legend(fontsize=8)
picture(fig, """Milliseconds against tokens a rank on log-log axes. The step's block rises
with slope 2, the hop over each of four links with slope 1; they cross further to the right
the slower the link is: at about 5, 13 and 40 thousand, and beyond a million tokens.""")

# %% [markdown] slideshow={"slide_type": "subslide"}
# ### Real processes
#
# `launch.Ranks` starts processes in one process group. Each looks the worker up by name in an importable module, so it
# cannot be typed in here. The demo's worker, `report`, makes the same random input on every rank, runs the ring on this
# rank's shard forward and backward, and compares with one device.

# %% slideshow={"slide_type": "fragment"}
# When this runs as a plain script, the new processes must not run the file again.
globals().pop("__file__", None)
for size, chosen in ((2, ("zigzag",)), (4, kinds)):
    with launch.Ranks(size) as ranks:
        print("ranks", ranks.run(dist.get_rank))
        for kind in chosen:
            arguments = 259, 32, 2, True, kind, "float32"  # S, D, H, causal, layout, dtype
            lines = ranks.run(demo.report, *arguments)[0]
            print(f"  {kind:10}", lines[-1].removeprefix("largest "))


# %% [markdown] slideshow={"slide_type": "fragment"}
# All five results agree with one device to float32 rounding. And when a rank dies? Its neighbours might wait for ever.
# So every wait has a limit, and the caller learns at which rank it began:

# %% slideshow={"slide_type": "fragment"}
x = torch.zeros(1, 1, 3, 16, device=device)
with launch.Ranks(2, timeout=10) as ranks:
    ranks.run(dist.get_rank)
    ranks.processes[1].kill()
    try:
        ranks.run(step04.forward, x, x, x)
    except launch.RankError as problem:
        for line in str(problem).splitlines()[:3]:
            print(line.split(" [")[0])  # without the backend's own words

# %% [markdown] slideshow={"slide_type": "slide"}
# ## 5. Write it yourself
#
# Write the body in place of `raise Blank` and run the cell: `check` puts your function in the place of the stage's,
# runs some of the contract's cases on 2 to 4 processes, and names what fails. `hint("04.1")` asks a question,
# `hint("04.1", 2)` gives the formula, `hint("04.1", 3)` pseudo-code, `solution("04.1")` the stage's function.
#
# **Exercise 04.1: merge the results of two blocks of keys.** Claim 1, stable and in place. Mind rows where one lse or
# both are -inf, and blocks whose out is not float32.

# %% slideshow={"slide_type": "fragment"}
def merge(out, lse, out_block, lse_block):
    """Merges a block's result into out (..., N, D) and lse (..., N), float32, in place."""
    raise Blank


check("04.1", merge)

# %% [markdown] slideshow={"slide_type": "subslide"}
# **Exercise 04.2: which part each rank computes.** The table behind `Layout.work`, for one pair of ranks: the ranges of
# rank me's q queries and of rank src's k keys, and whether there is a diagonal. The figure *who computes which score*
# has the answer for 4 ranks and 8 positions; in general chunks differ in length, so that q and k need not be equal.

# %% slideshow={"slide_type": "fragment"}
def visible_part(kind, me, src, q, k, early_q, early_k):
    """(q_start, q_stop, k_start, k_stop, causal) for the queries of me and the keys of src.

    It says which of rank me's q queries see which of rank src's k keys. kind is a layout
    under a causal mask, or "full" without a mask. causal says whether a diagonal hides part
    of what is named; a block with one is square. In zigzag, the early chunks are the first
    early_q of the queries and early_k of the keys. If nothing is seen, start = stop.
    """
    raise Blank


check("04.2", visible_part)

# %% [markdown] slideshow={"slide_type": "slide"}
# ## 6. Check it, then break it
#
# The contract's cases, those with Nq = Nk and without grouped heads, through the module's loops on 4 threads; the
# causal ones in every layout. (The stage's tests run all of its cases on 1 to 4 real ranks.)

# %% slideshow={"slide_type": "fragment"}
def failures(case, kind, block=Plain, N=4):
    """What is out of tolerance on one of the contract's cases: {} or names with errors."""
    x = cases.build(case, step04.SUPPORTS, torch.float32, device)
    want = error.expected(x.q, x.k, x.v, x.dout, causal=x.causal, scale=x.scale)
    layout = Layout(kind, x.q.shape[2], N, x.causal)
    got, _ = dry_run(x.q, x.k, x.v, x.dout, layout, block, x.scale)
    return error.failures(got, want)


chosen = []
for case, dtype, reason in cases.select(step04.SUPPORTS):
    if dtype == torch.float32 and reason is None and case.Hk in (None, case.H):
        chosen.append(case)
runs = [(case, kind) for case in chosen for kind in (kinds if case.causal else ("zigzag",))]
failed = [(case.name, kind) for case, kind in runs if failures(case, kind)]
print(f"{len(chosen)} cases, {len(runs)} runs, failed: {failed}")

# %% [markdown] slideshow={"slide_type": "subslide"}
# Now seven mistakes, one at a time: three merges, two tables of work, two backwards. **Which of them would live through
# tests without a causal mask? Which needs one particular layout?**
#
# <details><summary>Answer</summary>
#
# The two tables: `no_diagonal`, which loses the causal flag, and `striped_leak`, which lets the query in row i see key
# i of a *later* rank. The latter dies in the striped layout alone.
#
# </details>

# %% slideshow={"slide_type": "fragment"}
def mean(out, lse, out_block, lse_block):
    out.copy_(torch.where(lse[..., None] == -inf, out_block, (out + out_block) / 2))
    lse.copy_(torch.logaddexp(lse, lse_block))


def sigmoid_merge(out, lse, out_block, lse_block):
    w, new = sigmoid(lse, lse_block)
    out.lerp_(out_block, w[..., None])
    lse.copy_(new)


def bfloat16_merge(out, lse, *part):
    merge_parts(out, lse, *part)
    out.copy_(out.bfloat16())


def own_lse(dout, q, k, v, out, lse, **options):
    _, lse_block = Plain.forward(q, k, v, **options)
    return Plain.backward(dout, q, k, v, out, lse_block, **options)


def own_delta(dout, q, k, v, out, lse, **options):
    out_block, _ = Plain.forward(q, k, v, **options)
    return Plain.backward(dout, q, k, v, out_block, lse, **options)


# %% slideshow={"slide_type": "skip"}
right_work = Layout.work


def no_diagonal(layout, me, src):
    work = right_work(layout, me, src)
    return work and (*work[:2], False)


def striped_leak(layout, me, src):
    work = right_work(layout, me, src)
    if not (layout.causal and layout.kind == "striped" and src > me and work):
        return work
    n = min(layout.size(me), layout.size(src))
    return slice(0, n), slice(0, n), True


# %% slideshow={"slide_type": "skip"}
mistaken = mean, sigmoid_merge, bfloat16_merge
changes = {f.__name__: (step04.merge, "merge", f) for f in mistaken}
changes |= {f.__name__: (Layout, "work", f) for f in (no_diagonal, striped_leak)}
blocks = {}
for f in (own_lse, own_delta):
    blocks[f.__name__] = SimpleNamespace(forward=Plain.forward, backward=f)
columns = [("ragged", "zigzag"), *(("ragged_causal", kind) for kind in kinds)]
for name in ("one_token", "scores_200", "rising", "negative_row"):
    columns.append((name, "zigzag"))
named = {case.name: case for case in chosen}
died = {}
for name, block in blocks.items():
    died |= {(name, c): failures(named[c[0]], c[1], block) for c in columns}
for name, change in changes.items():
    with patch.object(*change):
        died |= {(name, c): failures(named[c[0]], c[1]) for c in columns}


# %% slideshow={"slide_type": "fragment"}
fig, ax = plt.subplots(figsize=(8.4, 3))
names = (*changes, *blocks)
for row, name in enumerate(names):
    for column, c in enumerate(columns):
        wrong = died[name, c]
        colour, ink = (COLOURS[0], "white") if wrong else (COLOURS[4], INK)
        corner = column, row
        ax.add_patch(plt.Rectangle(corner, 1, 1, facecolor=colour, edgecolor="white"))
        text = "all" if len(wrong) == 5 else " ".join(wrong) if wrong else "lives"
        ax.text(column + 0.5, row + 0.5, text, fontsize=7.5, **WHITE | {"color": ink})
ax.set_title("blue: killed, and what was out of tolerance")
ax.set(xlim=(0, len(columns)), ylim=(len(names), 0))
slanted = {"rotation": 30, "ha": "right", "rotation_mode": "anchor", "fontsize": 8}
labels = [f"{case}, {kind}" for case, kind in columns]
ax.set_xticks([i + 0.5 for i in range(len(columns))], labels, **slanted)
ax.set_yticks([i + 0.5 for i in range(len(names))], names)
bare(ax)
picture(fig, """A table of seven mistakes against eight pairs of case and layout. The wrong
merges die everywhere, except that the plain mean lives with one token. no_diagonal lives in
every case without a causal mask, striped_leak in all but the striped causal one. A wrong
lse or delta in the backward spoils gradients only, and lives with one token; the wrong
delta also in the case with rising scores.""")

# %% [markdown] slideshow={"slide_type": "slide"}
# ## 7. Predict, then measure
#
# **Question 1.** Suppose out is rounded to bfloat16 after every merge, or dK and dV travel in bfloat16, half the bytes.
# Does the error grow with the number of ranks? Is it worse than if only each *block's* result comes rounded?
#
# <details><summary>Answer</summary>
#
# A block's rounding enters with the block's weight, and the weights add up to 1: the error stays level. An accumulator
# is rounded as a whole and once a step, so its error grows with the number of ranks. Rounding lse too is worse, as an
# error in lse is a *relative* error of the weights. Hence `ring.py` sums, and sends dK and dV, in float32.
#
# </details>

# %% slideshow={"slide_type": "fragment"}
S, ranks = 1024, (1, 2, 4, 8, 16, 32, 64)
q, k, v, dout = random_inputs(1, 1, S, 64)
exact, exact_lse = attention.forward(q, k, v)
# What is rounded to bfloat16: b a block's out, o the merged out, l the merged lse.
forms = {"float32 throughout": "", "blocks rounded": "b",
         "out rounded each step": "o", "out and lse each step": "ol"}  # fmt: skip
out_error = {name: [] for name in forms}


def rounded(x):
    return x.bfloat16().float()


for N in ranks:
    parts = [Plain.forward(q, *kv) for kv in zip(k.chunk(N, 2), v.chunk(N, 2), strict=True)]
    for name, what in forms.items():
        out, lse = torch.zeros_like(q), q.new_full(q.shape[:-1], -inf)
        for o, l in parts:
            merge_parts(out, lse, rounded(o) if "b" in what else o, l)
            if "o" in what:
                out = rounded(out)
            if "l" in what:
                lse = rounded(lse)
        out_error[name].append(((out - exact).abs().max() / exact.abs().max()).item())

# %% slideshow={"slide_type": "fragment"}
exact_dk = attention.backward(dout, q, k, v)[1]
dk_error = {"float32 throughout": [], "blocks rounded": [], "dK rounded each step": []}
for N in ranks:
    chunks = (x.chunk(N, 2) for x in (dout, q, exact.float(), exact_lse.float()))
    parts = []
    for dout_r, q_r, out_r, lse_r in zip(*chunks, strict=True):
        parts.append(Plain.backward(dout_r, q_r, k, v, out_r, lse_r)[1])
    for name, errors in dk_error.items():
        dk = torch.zeros_like(k)
        for part in parts:
            dk += rounded(part) if name == "blocks rounded" else part
            if name == "dK rounded each step":
                dk = rounded(dk)
        errors.append(((dk - exact_dk).abs().max() / exact_dk.abs().max()).item())


# %% slideshow={"slide_type": "fragment"}
fig, axes = plt.subplots(1, 2, figsize=(9, 3.2), sharey=True, gridspec_kw={"wspace": 0.1})
looks = (INK, "o-"), (COLOURS[0], "s-"), (COLOURS[1], "D-"), (COLOURS[2], "^-")
for ax, found, title in zip(axes, (out_error, dk_error), ("out", "dK"), strict=True):
    for (name, values), (colour, look) in zip(found.items(), looks, strict=False):
        ax.loglog(ranks, values, look, color=colour, label=name)
        print(f"{title:3} {name:26} 1 rank {values[0]:.1e}, 64 ranks {values[-1]:.1e}")
    ax.set(xlabel="ranks", title=f"error of {title}, relative to its largest entry")
    ax.set_xticks(ranks, ranks)
    ax.minorticks_off()
    ax.legend(fontsize=8)
picture(fig, """Errors against 1 to 64 ranks, log-log. With float32 throughout, below 2e-6
and level. With blocks rounded to bfloat16, level at about 2e-3. With the accumulator
rounded in each step the error climbs with the number of ranks, for out and for dK, and most
where lse is rounded too.""")

# %% [markdown] slideshow={"slide_type": "subslide"}
# On 64 ranks, out is off by 1.7e-02 of its largest entry if rounded each step, by 1.7e-03 if only the blocks are.
#
# **Question 2.** On real GPUs with a causal mask, how far apart are the three layouts at long sequences, and at short?
#
# <details><summary>Answer</summary>
#
# At long ones contiguous should come near N / (2N - 1) of the other two. At short ones all three wait for hops and
# launches, and balance matters less.
#
# </details>

# %% slideshow={"slide_type": "fragment"}
recorded = rows.latest(fingerprint.fresh(rows.read()))
ring_rows = [row for row in recorded if row["stage"] == "04_ring" and row["layout"]]


def draw_rows(all_rows):
    """TFLOP/s a GPU against the length, one line a layout, at the last row's setting."""
    last = all_rows[-1]
    same = [name for name in rows.SETTING if name not in ("N", "Nk")]
    own = [row for row in all_rows if all(row[name] == last[name] for name in same)]
    fig, ax = plt.subplots()
    for kind, colour in zip(kinds, COLOURS, strict=False):
        line = [(r["N"], r["tflops"] / r["n_gpus"]) for r in own if r["layout"] == kind]
        lengths, speeds = [N for N, _ in sorted(line)], [speed for _, speed in sorted(line)]
        ax.semilogx(lengths, speeds, "o-", base=2, color=colour, label=kind)
    where = f"{last['n_gpus']} x {last['gpu']}"
    ax.set_title(f"{where}, {last['pass']}, {last['dtype']}, D = {last['D']}")
    ax.set(xlabel="S", ylabel="TFLOP/s a GPU")
    ax.legend()
    return picture(fig, "TFLOP/s a GPU against the sequence length, one line a layout.")


nothing = "no rows yet: this stage has not been measured on GPUs"
draw_rows(ring_rows) if ring_rows else print(nothing)

# %% [markdown] slideshow={"slide_type": "slide"}
# ## 8. Summary
#
# - (out, lse) is all there is to know of the keys seen so far; two such pairs merge exactly, in any order.
# - Keys and values travel; queries stay. N blocks, N - 1 hops, each posted before the block that hides it.
# - The backward needs no merge: final lse and delta are right in every block. It runs the ring in reverse.
# - The slowest rank of a step sets the pace. Under a causal mask contiguous wastes up to half, the others do not.
# - Work grows like c², what travels like c: from some c on the hops are hidden.
#
# **Ask yourself**
#
# 1. Why need no maximum travel with (out, lse)?
# 2. Why is rank 0 of the contiguous layout idle and yet not free to leave?
# 3. How many hops would dK and dV need if the backward turned the same way as the forward, own block first?
# 4. The batch doubles. What happens to the break-even c?
# 5. One rank passes `causal=True`, the others do not. What would happen without `Comm.agree`?
#
# **Go further**
#
# - ★ (15 minutes) Let `timeline` take one slow rank, at half the speed. What does the ring's time become?
# - ★★ (1 hour) Write the backward that turns forwards with `Wire`, and count its messages against `ring.backward`'s.
# - ★★★ (a weekend) Zigzag sends late chunks to ranks that never use them. Send each half only as far as it is needed.
#
# **Read:** `papers/ring_attention.md`, `papers/striped_attention.md`, `papers/blockwise_parallel_transformer.md`.
#
# **Next:** `python -m steps.step04_ring.demo --seq 2048 --gpus 4`, and the demo of the whole course, `make demo`, whose
# model trains with its sequence dealt to two ranks.
