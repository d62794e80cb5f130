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
# # 04a. Ring attention
#
# ## 1. The question
#
# *How do several GPUs share one sequence, and who waits for whom?*
#
# ![Four ranks in a row. Each keeps its queries. Arrows lead from the keys and values of each rank to the next one, and
# from the last rank back to the first.](../notebooks/figures/question_04a.png)

# %% jupyter={"source_hidden": true} slideshow={"slide_type": "skip"}
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
from IPython.display import display
from reference import attention, cases, error
from steps.bench import cost, rows
from steps.figures.plots import COLOURS, GREYS, INK, style
from steps import step00_naive as step00, step04_ring as step04
from steps.step04_ring import Layout, demo, launch, ring
from steps.step04_ring.merge import merge as merge_parts
from steps.step04_ring.simulate import Machine, Shape, gantt, read_flops, schedule
from steps.step04_ring.strategies import lesson_1_hop, lesson_2_overlap
from steps.figures.picture import unchecked as picture
from steps.workbook import Blank, check, show
from steps.workbook import hint, solution  # noqa: F401  They are for part 5.

torch.set_num_threads(1)  # the ranks below are threads or processes themselves
print(f"{steps.engine.describe()}\nmatplotlib {matplotlib.__version__}")

# %% [markdown] slideshow={"slide_type": "subslide"}
# - **Before you start:** notebook 00 (tiles, lse, delta). No experience with distributed programs. Next: 04b, other ways to
#   share a sequence, links, faults and models.
# - **Time:** about an hour to read, an hour more with the exercises.
# - **Hardware:** any. Without GPUs the ranks are processes that talk over sockets (gloo), and here compute with stage
#   00's tiles, to be quick. With a GPU for each rank the same files use NCCL and the
#   kernels of stage 02 or 03.
# - **Code:** `steps/step04_ring/`. **Tests:** `pytest tests/test_step04_ring.py`. **Symbols:** `reference/symbols.md`.

# %% slideshow={"slide_type": "skip"}
style()
torch.set_printoptions(precision=2, sci_mode=False)
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


# %% jupyter={"source_hidden": true} slideshow={"slide_type": "fragment"}
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
# ### One hop
#
# Now two devices. Every rank sends its keys to the next one, and attends to its own and to those that arrive. If every
# rank first sent and then received, each would wait until the next one receives: for ever. So both halves of a **hop**
# are posted together. `launch.Ranks` starts processes in one process group. Each finds the worker by its name in a
# module, so that it cannot be typed in here. This one lets every rank send its own number, twice:

# %% slideshow={"slide_type": "fragment"}
show("step04_ring/strategies/lesson_1_hop", "hop")

# %% slideshow={"slide_type": "fragment"}
# When this runs as a plain script, the new processes must not run the file again.
globals().pop("__file__", None)
four_ranks = launch.Ranks(4)
print("\n".join(four_ranks.run(lesson_1_hop.worker)))

# %% [markdown] slideshow={"slide_type": "subslide"}
# ### Overlap
#
# A message takes time, and the first block does not need it. `post` only starts the hop; the wait may come later.
#
# **Predict.** A hop takes h, a block b. How long do two blocks and the hop take, with `overlap=False` and with `True`?
#
# <details><summary>Answer</summary>
#
# h + 2b, and max(h, b) + b. If the hop is the shorter of the two, it is free.
#
# </details>
#
# Here a block only sleeps for 100 ms, because a GPU would leave the processor free meanwhile. (A block that computes on
# the same cores as gloo's threads slows them down.)

# %% slideshow={"slide_type": "fragment"}
display(show("step04_ring/strategies/lesson_2_overlap", "attention"))
with launch.Ranks(2) as ranks:
    ms = ranks.run(lesson_2_overlap.worker)[0]
print(f"two blocks of 100 ms and a hop: in sequence {ms[False]:.0f} ms,", end=" ")
print(f"overlapped {ms[True]:.0f} ms")

# %% [markdown] slideshow={"slide_type": "subslide"}
# ### The ring, in one process
#
# Every rank keeps its queries. In each of N steps it attends to the keys at hand, merges, and hands the keys to
# rank + 1. Here the ranks are entries of lists. `Layout` says which positions a rank holds. Its `work` says
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


# %% jupyter={"source_hidden": true} slideshow={"slide_type": "subslide"}
N, forward_holds = 4, []
layout = Layout("zigzag", 16, N)
shards = [[layout.shard(x[:16], rank) for rank in range(N)] for x in (q, k, v)]
ring_in_lists(*shards, layout, forward_holds)
backward_holds = forward_holds[::-1]  # Part 4 explains why.
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
# arriving, 2 / N. Where the sums of dK and dV travel with them, these exist three times: computed, on the way out, and
# arriving.

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
# | 1 | out = 0, lse = -inf, float32 | `merge.py`: `Parts` |
# | 4, 9 | post the hop, later wait for it | `relay.py`, over `comm.py`: `post`, `wait` |
# | 5 | the block: any kernel that gives (out, lse) | the argument `block`, with `Layout.work` |
# | 6–8 | merge | `merge.py` (yours, in part 5) |
# | 10–17 | the backward | `ring.backward` |
#
# The loop asks a **transport** for one rank's K, V after the other. `relay` brings them by hops; 04b has another one.

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
# forward ended with, those of rank + 1, and ends with the rank's own (the figure's right half; yours in exercise 04.4).

# %% slideshow={"slide_type": "fragment"}
show("step04_ring/ring", "backward")

# %% [markdown] slideshow={"slide_type": "subslide"}
# Now let the module's own two loops run. They need only `rank`, `size` and `post` of their communicator, so threads and
# queues will do.

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


# %% jupyter={"source_hidden": true} slideshow={"slide_type": "fragment"}
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
# Here is the waiting as a timeline, from the event model of `simulate.py`: a hop begins when both its ends have posted
# it, the next step when the block is done and the hops in and out are through. The model takes each block's speed from
# stage 02's recorded rows on an H200. The link has 155 GB/s each way, which NCCL has reached between four of them (not
# recorded; 04b shows the rows of two).

# %% jupyter={"source_hidden": true} slideshow={"slide_type": "fragment"}
speeds = read_flops(rows.read())  # FLOP/s of a block on an H200, by its size


def waiting(kind, link, words):
    """The timeline of 32k positions on four ranks; wide bars are blocks, dark ones hops."""
    machine = Machine(speeds, link)
    plan = schedule(Layout(kind, 2**15, 4, causal=True), Shape(), machine, "relay")
    busy = plan.blocks[1] - plan.blocks[0]  # (steps, ranks)
    shares = ", ".join(f"{share:.0%}" for share in busy.sum(0) / plan.seconds)
    print(f"{kind}, {link / 1e9:g} GB/s: ranks 0 to 3 compute {shares} of the time")
    return picture(gantt(plan, f"{kind}, {link / 1e9:g} GB/s each way"), words)


waiting("contiguous", 155e9, """Timeline of four ranks, contiguous. Rank 0 computes half a
block, and then only passes the others' keys on; rank 3 computes in all four steps. A hop, a
thin dark bar, takes as long as the first block and half as long as the later ones.""")

# %% slideshow={"slide_type": "fragment"}
waiting("zigzag", 155e9, """Timeline of four ranks, zigzag. All ranks compute in every step
with short gaps, because a hop takes a little longer than the block beside it.""")

# %% [markdown] slideshow={"slide_type": "subslide"}
# ### Real processes
#
# The demo's worker, `report`, makes the same random input on every rank, runs the ring on this rank's shard forward and
# backward, and compares with one device. What is left has to be float32 rounding:

# %% slideshow={"slide_type": "fragment"}
with four_ranks:  # ends them afterwards
    for kind in kinds:
        arguments = 259, 32, 2, True, kind, "float32"  # S, D, H, causal, layout, dtype
        lines = four_ranks.run(demo.report, *arguments)[0]
        print(f"{kind:10}", lines[-1].removeprefix("largest "))

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

# %% [markdown] slideshow={"slide_type": "subslide"}
# **Exercise 04.4: the reverse ring.** Whose keys a rank has in each step of the backward, and to whom it sends them, and
# the sums of dK and dV. (04.3 is in 04b.)

# %% slideshow={"slide_type": "fragment"}
def reverse_step(rank, step, N):
    """(src, kv_to, dkv_to) of this rank in this step, 0 to N - 1, of the backward.

    src is the rank whose K and V are at hand. kv_to is the rank that K and V are sent to
    while the block is computed, and dkv_to the one that the sums of their dK and dV are
    sent to after it; None where nobody needs them any more, or where they have arrived.
    """
    raise Blank


check("04.4", reverse_step)

# %% [markdown] slideshow={"slide_type": "fragment"}
# **Case file 04.bug2, "NaN at the beginning".** Keys are divided among ranks, and the parts of all are merged. On 2 ranks
# everything is right; on 4 the first queries of a causal call are NaN, though their lse is right.
# `python -m steps check 04.bug2` writes `my/04_bug2.py` with the whole complaint. Write the test that would have caught
# it, and name the cause.

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


# %% jupyter={"source_hidden": true} slideshow={"slide_type": "fragment"}
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
# **Question.** Suppose out is rounded to bfloat16 after every merge, or dK and dV travel in bfloat16, half the bytes.
# Does the error grow with the number of ranks? Is it worse than if only each *block's* result comes rounded?
#
# <details><summary>Answer</summary>
#
# A block's rounding enters with the block's weight, and the weights add up to 1: the error stays level. An accumulator
# is rounded as a whole and once a step, so its error grows with the number of ranks. Rounding lse too is worse, as an
# error in lse is a *relative* error of the weights. Hence the
# stage sums in float32, and where sums travel, they travel in float32. 04b's other transport sends every part to its
# owner once, as a block gives it: that is "blocks rounded".
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


# %% jupyter={"source_hidden": true} slideshow={"slide_type": "fragment"}
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
# So the sums have to be float32, and a block's result may be rounded. What the ring costs in time is 04b's matter.

# %% [markdown] slideshow={"slide_type": "slide"}
# ## 8. Summary
#
# - (out, lse) is all there is to know of the keys seen so far; two such pairs merge exactly, in any order.
# - Keys and values travel; queries stay. N blocks, N - 1 hops, each posted before the block that hides it.
# - The backward needs no merge: final lse and delta are right in every block. It runs the ring in reverse.
# - The slowest rank of a step sets the pace. Under a causal mask contiguous wastes up to half, the others do not.
# - A hop that is posted before a block and waited for after it is free, if the block takes longer and lets it begin.
#
# **Ask yourself**
#
# 1. Why need no maximum travel with (out, lse)?
# 2. Why is rank 0 of the contiguous layout idle and yet not free to leave?
# 3. How many hops would dK and dV need if the backward turned the same way as the forward, own block first?
# 4. What may be done between `post` and `wait` with the tensor that is sent, and with the one that arrives?
# 5. One rank passes `causal=True`, the others do not. What would happen if the ranks did not compare their calls?
#
# **Go further**
#
# - ★ (15 minutes) Draw the timeline with `Machine(..., slow={1: 2.0})`: rank 1 takes twice as long. Who notices, and when?
# - ★★ (1 hour) Write the backward that turns forwards with `Wire`, and count its messages against `ring.backward`'s.
# - ★★★ (a weekend) Zigzag sends late chunks to ranks that never use them. Send each half only as far as it is needed.
#
# **Read:** `papers/ring_attention.md`, `papers/striped_attention.md`, `papers/blockwise_parallel_transformer.md`.
#
# **Next:** 04b, four ways to share a sequence, and what each costs. And
# `python -m steps.step04_ring.demo --seq 2048 --gpus 4`.
