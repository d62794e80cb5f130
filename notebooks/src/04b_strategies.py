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
# # 04b. Four ways to share a sequence
#
# ## 1. The question
#
# *What does the ring cost beside the other ways to share a sequence, and what happens when a rank fails?*
#
# ![The queries, and the keys and values, that rank 2 of 4 computes with. Query-parallel: own queries, all keys. Star: all
# queries, own keys. Ulysses: one head of all. Ring: own queries, keys of one other rank at a
# time.](../notebooks/figures/question_04b.png)

# %% jupyter={"source_hidden": true} slideshow={"slide_type": "skip"}
import steps  # comes first, because it chooses the engine
import math
from functools import partial
import matplotlib
import matplotlib.pyplot as plt
import torch
import torch.nn.functional as F
from steps.bench import cost, rows
from steps.figures import ring_tables
from steps.figures.plots import COLOURS, INK, style
from steps import step00_naive as step00, step04_ring as step04
from steps.step04_ring import Layout, demo, in_your_model, launch, simulate, strategies
from steps.step04_ring.dry_run import dry_run
from steps.step04_ring.merge import merge
from steps.step04_ring.simulate import Machine, Shape, gantt, predict, schedule
from steps.step04_ring.strategies import account, lesson_1_hop
from steps.figures.picture import unchecked as picture
from steps.workbook import Blank, check, show
from steps.workbook import hint, solution  # noqa: F401  They are for part 5.
from steps.workbook.case_on_ranks import PlainBlock

torch.set_num_threads(1)  # the ranks below are processes themselves
torch.set_printoptions(precision=2, sci_mode=False)
style()
speeds = simulate.read_flops(rows.read())  # FLOP/s of a block on an H200, by its size
print(f"{steps.engine.describe()}\nmatplotlib {matplotlib.__version__}")

# %% [markdown] slideshow={"slide_type": "subslide"}
# - **Before you start:** notebook 04a (merge, hop, overlap, ring, layouts).
# - **Time:** about 45 minutes to read, an hour more with the exercises.
# - **Hardware:** any. The ranks are processes over gloo; speeds on GPUs come from recorded rows, or from a model that says so.
# - **Code:** `steps/step04_ring/`, above all `strategies/`, `fetch.py`, `simulate.py`, `watch.py`, `in_your_model.py`.
#   **Tests:** `pytest tests/test_step04_strategies.py`, `..._simulate.py`, `..._faults.py`. **Symbols:** `reference/symbols.md`.

# %% [markdown] slideshow={"slide_type": "slide"}
# ## 2. The problem: bytes
#
# The ring hides a hop behind a block, if the block takes longer. With c = S / N positions a rank, a zigzag step has
# $2 B H c^2 D$ operations in the forward and 2.5 times that in the backward. It sends K and V, $4 B H_k c D$ bytes in
# bfloat16. In the backward dK and dV come on top, and how many bytes these are depends on the **transport**:
#
# - **relay** (04a): dK and dV are sums that travel from rank to rank, in float32: $8 B H_k c D$ bytes a step.
# - **fetch**: every rank copies K and V out of the memory of their *owner*, and copies its part of dK and dV into a slot
#   there, in the dtype of k: $4 B H_k c D$ bytes. The owner adds the N parts in float32, once.
#
# Work grows like c², bytes like c, so there is a c from which everything is hidden (`tokens_needed` is this quotient):

# %% slideshow={"slide_type": "fragment"}
peak = 1e12 * cost.GPUS["NVIDIA H200"].half_tflops
links = {  # bytes/s each way: two assumed, see below, and two datasheets'
    "copy engine, 370 GB/s": 370e9, "NCCL, 155 GB/s": 155e9,
    "network, 400 Gb/s": 50e9, "Ethernet, 10 Gb/s": 1.25e9,
}  # fmt: skip
for name, W in links.items():
    # A copy engine reaches the GPUs of its host only.
    transport = "fetch" if "copy" in name else "relay"
    fwd = simulate.tokens_needed(peak, W)
    bwd = simulate.tokens_needed(peak, W, pass_="bwd", transport=transport)
    grouped = simulate.tokens_needed(peak, W, share=1 / 4)  # Hk / H
    print(f"{name:21} fwd {fwd:11,.0f}   bwd, {transport} {bwd:11,.0f}", end="   ")
    print(f"fwd with Hk = H / 4 {grouped:9,.0f}")

# %% jupyter={"source_hidden": true} slideshow={"slide_type": "fragment"}
for transport in ("fetch", "relay"):
    W, latency = simulate.read_link(rows.read(several_gpus=True), transport)
    print(f"fitted to rows of two H200, {transport}: {W / 1e9:.0f} GB/s", end=" ")
    print(f"and {1e6 * latency:.0f} us a message")

# %% [markdown] slideshow={"slide_type": "fragment"}
# The forward needs $c \ge 2\,(F/W)\,(H_k/H)$ tokens a rank, the backward 12/5 in place of 2 with relay and 8/5 with fetch. B,
# D and N cancel. F is the datasheet's peak here; a kernel below it needs fewer tokens. W is not the datasheet's 450 GB/s of
# NVLink. The 155 GB/s of NCCL, which `relay` sends with, and the 370 of copy engines, which `fetch` uses, are assumptions: one
# try on four H200, of which no row was kept. The last two lines come from rows.

# %% jupyter={"source_hidden": true} slideshow={"slide_type": "fragment"}
tokens = [2**i for i in range(8, 23)]
fig, ax = plt.subplots(figsize=(7.2, 3.6))
step_ms = [1e3 * cost.flops(1, 32, c, 128, causal=True) / peak for c in tokens]
ax.loglog(tokens, step_ms, "o-", color=COLOURS[1], label="a step's block, at peak")
looks = (COLOURS[0], "-"), (COLOURS[4], "-."), (COLOURS[2], "--"), (COLOURS[3], ":")
for (name, W), (colour, look) in zip(links.items(), looks, strict=True):
    hop_ms = [1e3 * 2 * 2 * 32 * 128 * c / W for c in tokens]
    ax.loglog(tokens, hop_ms, look, color=colour, label=f"K, V over: {name}")
    c = simulate.tokens_needed(peak, W)
    ax.plot(c, 1e3 * 2 * 2 * 32 * 128 * c / W, "X", color=INK, ms=8)
ax.set_title("ms; H = Hk = 32, D = 128, zigzag, forward. X: break-even")
ax.set(xlabel="c, tokens a rank")
ax.minorticks_off()
ax.legend(fontsize=8)
picture(fig, """Milliseconds against tokens a rank on log-log axes. The step's block rises
with slope 2, K and V over each of four links with slope 1; they cross further to the right
the slower the link is: at about 5, 13 and 40 thousand, and beyond a million tokens.""")

# %% [markdown] slideshow={"slide_type": "subslide"}
# Below its break-even the ring waits. Is there a way that sends less, or that sends better?
#
# ## 3. The idea: something has to travel
#
# A score needs a query and a key in one place. So either the keys come to the queries, or the queries to the keys, or both
# go where their *head* is. Six tokens, d = 2 and the numbers of notebook 00, on two ranks of three tokens; the first head
# has these, a second one the keys in the other order:

# %% slideshow={"slide_type": "fragment"}
Q = torch.tensor([[1.0, 2], [0, 1], [-1, 0], [2, -1], [1, 1], [3, 1]]).expand(2, 6, 2)
K = torch.tensor([[0.0, 1], [1, 0], [-1, 1], [1, 2], [2, 0], [0, -1]])
V = torch.tensor([[0.0, 6], [2, 0], [4, 6], [6, 4], [8, 0], [10, 6]])
K, V = torch.stack([K, K.flip(0)]), torch.stack([V, V.flip(0)])  # (heads, tokens, d)
q, k, v = ([x[:, :3], x[:, 3:]] for x in (Q, K, V))  # the shards of rank 0 and 1


def joined(parts):
    """out over all keys, from parts (out, lse) over some."""
    out, lse = torch.zeros_like(parts[0][0]), torch.full_like(parts[0][1], -math.inf)
    for part in parts:
        merge(out, lse, *part)
    return out


all_keys = torch.cat(k, 1), torch.cat(v, 1)
ways = {  # rank 1's out
    "query-parallel": step00.forward(q[1], *all_keys)[0],
    "star": joined([step00.forward(torch.cat(q, 1), k[r], v[r]) for r in (0, 1)])[:, 3:],
    "Ulysses": torch.stack([step00.forward(Q[h], K[h], V[h])[0] for h in (0, 1)])[:, 3:],
    "ring": joined([step00.forward(q[1], k[r], v[r]) for r in (1, 0)]),
}
for name, out in ways.items():
    print(f"{name:15} rank 1, query 5: head 0 {out[0, 2]}, head 1 {out[1, 2]}")


# %% [markdown] slideshow={"slide_type": "subslide"}
# Four times the (6.83, 1.34) of notebook 00: all four are exact. What differs is who sends what. With q = B H c D numbers in a
# rank's queries, and kv = 2 B Hk c D in its keys and values:
#
# | strategy | what moves | a rank sends, forward | a rank holds | limit | backward |
# |---|---|---|---|---|---|
# | query-parallel | K, V to everybody | (N - 1) kv | N kv, and 2 N kv while they are put in order | successive queries: not striped | yes; also packed sequences |
# | star | queries to everybody, results home | about (N - 1) · 2 q, whatever Hk is | up to 3 N results | - | no; for few queries and many keys |
# | Ulysses | positions against heads | (N - 1) / N · (2 q + kv) | 5 q + kv | N divides H and Hk | yes |
# | ring | K, V from rank to rank | (N - 1) kv | 2 kv, and four results that wait to be merged | - | yes |
#
# Star sends its queries, and the results have their size. Ulysses sends q, k and v, and out home, but only the part that
# belongs to other ranks' heads: per rank, *less* the more ranks there are.
#
# ## 4. From algorithm to code
#
# All four are `attention(q, k, v, causal=...)` on shards, in at most 60 lines each. Query-parallel needs no merge:

# %% slideshow={"slide_type": "fragment"}
show("step04_ring/strategies/lesson_3_query_parallel", "forward")

# %% [markdown] slideshow={"slide_type": "fragment"}
# Ulysses is attention on one device, between two exchanges:

# %% slideshow={"slide_type": "fragment"}
show("step04_ring/strategies/lesson_5_ulysses", "forward")

# %% slideshow={"slide_type": "fragment"}
show("step04_ring/strategies/lesson_5_ulysses", "to_heads")

# %% [markdown] slideshow={"slide_type": "subslide"}
# **Predict.** With grouped heads, Hk = H / 4, which of the four send less than with Hk = H?
#
# <details><summary>Answer</summary>
#
# Query-parallel and the ring, a quarter. Ulysses a little, as q and out are most of what it sends. Star not at all.
#
# </details>
#
# Now on two real ranks, H = Hk = 4: what each sends and holds, beside the formulas of `account.py`, and how far the
# results are from one device.

# %% slideshow={"slide_type": "fragment"}
# When this runs as a plain script, the new processes must not run the file again.
globals().pop("__file__", None)
two_ranks = launch.Ranks(2)
for name in strategies.LESSONS:
    arguments = name, 512, 16, 4, True, "zigzag", "float32"  # S, D, H, causal, layout, ...
    lines = two_ranks.run(demo.report_strategy, *arguments)[0]
    chosen = [line for line in lines if line.startswith(("sent", "memory", "rank"))]
    print(name, *chosen, sep="\n   ")

# %% [markdown] slideshow={"slide_type": "fragment"}
# What is sent equals the formulas to the byte; on two ranks the ring holds a quarter less than its formula. So they may be
# asked about sizes that no CPU can run: four ranks, a layer with H = 32, D = 128, bfloat16, causal zigzag. The first column of
# each pair has Hk = 32, the second Hk = 8.

# %% slideshow={"slide_type": "fragment"}
SIZES = {"8k": 2**13, "32k": 2**15, "128k": 2**17}


def worst(formula, strategy, S, Hk, N=4):
    """Megabytes of the rank that sends or holds most."""
    layout = Layout("zigzag", S, N, causal=True)
    sizes = dict(B=1, H=32, Hk=Hk, D=128, e=2)
    found = [formula(strategy, layout, rank, **sizes) for rank in range(N)]
    return max(x[0] if isinstance(x, tuple) else x for x in found) / 1e6


heads = [f"{'sent, ' + size:>16}{'held':>14}" for size in SIZES]
print(f"{'MB, forward':15}" + "".join(heads))
for name in strategies.LESSONS:
    line = f"{name:15}"
    for S in SIZES.values():
        for formula, width in ((account.sent_bytes, 16), (account.memory_bytes, 14)):
            both = [f"{worst(formula, name, S, Hk):.0f}" for Hk in (32, 8)]
            line += f"{' / '.join(both):>{width}}"
    print(line)
for name in ("query_parallel", "ring"):
    held = [worst(account.memory_bytes, name, 8192 * N, 8, N) for N in (4, 16, 64)]
    amounts = ", ".join(f"{x:,.0f}" for x in held)
    print(f"{name:15} 8k positions a rank, Hk = 8: 4, 16, 64 ranks hold {amounts}")

# %% [markdown] slideshow={"slide_type": "fragment"}
# At Hk = 32 Ulysses sends half of what the others send; at Hk = 8 query-parallel and the ring send less. What the
# ring holds for K and V does not grow with N, and that of query-parallel does.
#
# Star is last in this table. But take a single new query against a cache of keys that the ranks share:

# %% slideshow={"slide_type": "fragment"}
N, H, Hk, D, e = 4, 32, 8, 128, 2
parts = (N - 1) * H * (D + 1) * 4  # each rank's part goes to all others: out, lse, float32
for name, S in SIZES.items():
    gathered = (N - 1) * 2 * Hk * (S // N) * D * e
    print(f"one query, {name:>4} keys: star sends {parts:,} bytes a rank,", end=" ")
    print(f"gathering keys {gathered:,}")

# %% [markdown] slideshow={"slide_type": "subslide"}
# ### The last transport: fetch
#
# Relay moves keys from neighbour to neighbour although, inside of a host, every GPU can read the memory of all others. So
# let each rank copy from the keys' owner, on a stream of its own, by the GPU's copy engine. There is no relay, no sender who
# has to take part, and no multiprocessor that is busy with sending:

# %% slideshow={"slide_type": "fragment"}
show("step04_ring/fetch", "start")

# %% [markdown] slideshow={"slide_type": "fragment"}
# `start` runs two steps ahead, into two buffers; a barrier in front makes sure that the owners' keys are there, and one at the
# end that nobody needs them any more. What it gives up: one host, and in the backward N - 1 slots for the parts of dK and dV.
# An event model of both, with the links as measured and blocks at the speed of stage 02's rows. In it merging costs nothing,
# messages begin while a block runs (part 7: do they?), and NCCL takes no multiprocessor from a block.

# %% slideshow={"slide_type": "fragment"}
machines = {  # Assumed: a message costs 10 us more than its bytes.
    "relay": Machine(speeds, links["NCCL, 155 GB/s"], latency=1e-5),
    "fetch": Machine(speeds, links["copy engine, 370 GB/s"], latency=1e-5),
}


# %% jupyter={"source_hidden": true} slideshow={"slide_type": "skip"}
def timeline(transport, words, S=2**13, pass_="fwd"):
    """Four ranks, Hk = H. Wide bars compute, dark ones bring keys, light ones dK and dV."""
    layout = Layout("zigzag", S, 4, causal=True)
    plan = schedule(layout, Shape(), machines[transport], transport, pass_)
    print(f"a rank computes {plan.busy / plan.seconds:.0%} of the time")
    return picture(gantt(plan, f"model: {transport}, {S // 1024}k, {pass_}"), words)


# %% slideshow={"slide_type": "fragment"}
timeline("relay", """Timeline of four ranks over relay at 8k positions: the dark bars, which
bring keys, are longer than the blocks, and every rank waits after each block.""")

# %% slideshow={"slide_type": "fragment"}
timeline("fetch", """Timeline of four ranks over fetch at 8k positions: the keys of the
next two ranks are copied one after the other from the start. A copy takes longer than a
block, so every block waits, but less than half as long as over relay.""")

# %% slideshow={"slide_type": "fragment"}
timeline("fetch", """Timeline of the backward of four ranks over fetch at 32k positions:
blocks without gaps. Below them the copies of keys, dark, and of dK and dV, light, which are
much shorter than the blocks.""", 2**15, "bwd")

# %% [markdown] slideshow={"slide_type": "subslide"}
# A model has to be checked. Its limits are known: over an infinitely fast link, contiguous must reach
# N / (2N - 1), and zigzag 1. And where a machine is not there, its *results* can be: `dry_run.py` computes those of any
# number of ranks in one process, from the same `Layout.work`:

# %% slideshow={"slide_type": "fragment"}
instant = Machine(6e14, 1e30)
for N in (4, 64):
    for kind in ("contiguous", "zigzag"):
        layout = Layout(kind, 1024 * N, N, causal=True)
        share = predict(layout, Shape(), instant)["fwd"][1]
        print(f"{kind:10} {N:2} ranks: {share:.4f}, N / (2N - 1) = {N / (2 * N - 1):.4f}")
inputs = account.random_inputs(700, 2, 2, 16, torch.float32)
out, *_ = dry_run(*inputs[:3], Layout("zigzag", 700, 256, causal=True), PlainBlock)
want = account.one_device(*inputs, causal=True)[0]
largest = (out - want).abs().max()
print(f"256 ranks, dry run: largest difference to one device {largest:.0e}")

# %% [markdown] slideshow={"slide_type": "subslide"}
# ### When a rank fails
#
# In a ring everybody soon waits for everybody, so that the neighbour that a rank waits for is seldom the culprit. Every
# rank therefore publishes where it stands, and whoever fails first compares. Rank 2 is killed; what do the others say?

# %% slideshow={"slide_type": "fragment"}
x = torch.zeros(1, 1, 4, 16, device=steps.engine.device)


def outcome(run):
    """The last words of each rank, without those of the backend and without advice."""
    try:
        run()
    except launch.RankError as problem:
        first, *lines = str(problem).splitlines()
        print(first)
        for line in lines[: lines.index(next(x for x in lines if not x.startswith("  ")))]:
            line = line.replace("steps.step04_ring.comm.", "")
            print(line.split(". Rank ")[0].split(". Cut ")[0])


four_ranks = launch.Ranks(4, timeout=4)  # seconds; 60 is the default
four_ranks.run(lesson_1_hop.worker)
four_ranks.processes[2].kill()
outcome(lambda: four_ranks.run(partial(step04.forward, block=PlainBlock), x, x, x))

# %% [markdown] slideshow={"slide_type": "fragment"}
# The neighbours of rank 2 see at once that a connection is gone. Rank 0 waits until its timeout, and names rank 2 all the same.
#
# Another failure is silent in many programs: ranks that do not make the same call. If the messages fit, the results are wrong.
# So every call is compared, here on two ranks that both bring four positions, while they say that S is nine:

# %% slideshow={"slide_type": "fragment"}
outcome(lambda: launch.Ranks(2).run(partial(step04.forward, S=9), x, x, x))

# %% [markdown] slideshow={"slide_type": "subslide"}
# ### In your model
#
# Everything but attention acts on each position alone, and does not notice that it has only some of them. Four places do:
#
# - **Positions.** A rotary embedding turns q and k by an angle that grows with the position *in the whole sequence*.
#   `Layout.positions(rank)` takes the place of `arange`; in zigzag the second half of a shard does not follow the first.
# - **Labels.** A token's label is the next token, which may be on another rank.
# - **Loss.** Shards differ in length by one or two. Each rank's *sum* is divided by the labels of all ranks.
# - **Gradients** of the weights are summed over the ranks, once, after the backward.
#
# Grouped heads need nothing: only Hk heads travel.

# %% slideshow={"slide_type": "fragment"}
for rank in range(2):
    positions = Layout("zigzag", 9, 2).positions(rank).tolist()
    print(f"zigzag, S = 9, rank {rank} of 2: {positions}")
show("step04_ring/in_your_model", "rotated")

# %% [markdown] slideshow={"slide_type": "fragment"}
# `in_your_model.py` has a decoder of two layers with four heads, two of K and V, and an uneven sequence of 37 tokens. Two
# ranks run it on their shards, and compare the loss and all gradients with one device:

# %% slideshow={"slide_type": "fragment"}
with two_ranks:  # ends them afterwards
    found = two_ranks.run(in_your_model.compare, 37, "zigzag", PlainBlock)[0]
loss = found.pop("loss")
print(f"differences: loss {loss:.0e}, {len(found)} gradients {max(found.values()):.0e}")

# %% slideshow={"slide_type": "fragment"}
show("step04_ring/in_your_model", "loss_and_gradients")

# %% [markdown] slideshow={"slide_type": "slide"}
# ## 5. Write it yourself
#
# **Exercise 04.3: what a rank gives to its model.** Its tokens, positions and labels, and the number by which it divides the
# sum of its losses. (04.1, 04.2 and 04.4 are in 04a.)

# %% slideshow={"slide_type": "fragment"}
IGNORED = -100  # the label of a token that has no next one


def of_rank(tokens, layout, rank):
    """(tokens, positions, labels, count) of this rank. tokens (S,) are those of all ranks.

    The first three are tensors with an entry for each of the rank's positions, in the
    order of layout.positions(rank). count is a number. Every rank divides the sum of its
    losses by it, and the results are added up over the ranks.
    """
    raise Blank


check("04.3", of_rank)

# %% [markdown] slideshow={"slide_type": "fragment"}
# **Case file 04.bug1, "Somewhere in the third hour".** Four ranks trained a model in zigzag for weeks. Since the documents are
# single sentences, all four stand still after some hundred steps, each waiting for another one.
# `python -m steps check 04.bug1` writes `my/04_bug1.py` with the whole complaint. Write the test that would have caught it,
# and name the cause.

# %% [markdown] slideshow={"slide_type": "slide"}
# ## 6. Check it, then break it
#
# The differences above were rounding. So one device can show what a mistake costs, if what the ranks would have had is put back
# in order. **Which of these four mistakes would you notice from the loss alone?**
#
# <details><summary>Answer</summary>
#
# None: without the right one beside it, each is a plausible loss. The gradients are off by several percent and more, so
# that the model learns something, only worse.
#
# </details>

# %% slideshow={"slide_type": "fragment"}
S, ranks = 37, 4
tokens = torch.randint(32, (1, S), generator=torch.Generator().manual_seed(1))
labels = torch.cat([tokens[:, 1:], torch.tensor([[IGNORED]])], 1)
layout = Layout("zigzag", S, ranks)
own = [layout.positions(rank) for rank in range(ranks)]
in_order = torch.cat(own).argsort()  # puts what the ranks have back in order
from_zero = torch.cat([torch.arange(len(mine)) for mine in own])[in_order]
as_if_contiguous = [r * len(mine) + torch.arange(len(mine)) for r, mine in enumerate(own)]
as_if_contiguous = torch.cat(as_if_contiguous)[in_order]
shifted = [torch.cat([tokens[0, mine][1:], torch.tensor([IGNORED])]) for mine in own]
shifted = torch.cat(shifted)[in_order][None]


def on_one_device(positions, labels, count=S - 1):
    def attention(q, k, v):
        return F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)

    return in_your_model.loss_and_gradients(tokens, labels, positions, attention, count)


# %% slideshow={"slide_type": "fragment"}
right, gradients = on_one_device(torch.arange(S), labels)
each = []  # rank by rank: its labels alone, divided by how many it has
for mine in own:
    alone = torch.full_like(labels, IGNORED)
    alone[:, mine] = labels[:, mine]
    each.append(on_one_device(torch.arange(S), alone, (alone != IGNORED).sum()))
mean_loss = sum(loss for loss, _ in each) / ranks
means = mean_loss, {x: sum(g[x] for _, g in each) / ranks for x in gradients}
mistakes = {
    "positions from 0 on every rank": on_one_device(from_zero, labels),
    "positions as in contiguous": on_one_device(as_if_contiguous, labels),
    "labels shifted after the cut": on_one_device(torch.arange(S), shifted),
    "mean of the ranks' means": means,
}
print(f"right: loss {right:.5f}")
largest = max(x.abs().max() for x in gradients.values())
for name, (loss, grads) in mistakes.items():
    off = max((grads[x] - gradients[x]).abs().max() for x in gradients) / largest
    print(f"{name:31} loss {loss:.5f}, gradients off by {off:.1%} of the largest")

# %% [markdown] slideshow={"slide_type": "slide"}
# ## 7. Predict, then measure
#
# **Question.** Four H200, causal zigzag, forward. At 8k, 32k and 128k positions, which of the four is fastest over NCCL? And
# what does fetch change?
#
# <details><summary>Answer, as the model has it</summary>
#
# At 128k all are within a fifth, because blocks take c² and what travels only c. (The ring even gains, as most of its
# blocks have no mask, and stage 02 is a little faster without one.) At 8k and Hk = 32 every way is bound by what travels, and the
# ring over NCCL is the slowest: it has to send as much as query-parallel, at the lower rate of single messages. Ulysses sends
# half as much. Fetch moves the ring's bytes at more than twice the rate, and hides some of them.
#
# </details>
#
# The model again: blocks as fast as stage 02 was on one H200 (rows), and messages at rates that are assumed, as in part 2: from
# the same try without rows come 291 GB/s for NCCL's all-gather and 217 for its all-to-all. A strategy that sends before and
# after its blocks takes both times, a ring what its timeline says. Left out are launches and merging.

# %% slideshow={"slide_type": "fragment"}
RATES = {"query_parallel": 291e9, "star": 217e9, "ulysses": 217e9}  # bytes/s, assumed


def seconds_of_all(S, Hk, N=4):
    """(seconds of the blocks, {way: seconds of the forward}), as the model has them."""
    layout, shape = Layout("zigzag", S, N, causal=True), Shape(Hk=Hk)
    blocks = machines["fetch"].block(shape, S, S, True, "fwd") / N
    found = {}
    for name, rate in RATES.items():
        found[name] = blocks + 1e6 * worst(account.sent_bytes, name, S, Hk) / rate
    for transport, machine in machines.items():
        found[f"ring, {transport}"] = predict(layout, shape, machine, transport)["fwd"][0]
    return blocks, found


cases = [(size, Hk) for size in SIZES for Hk in (32, 8)]
print(f"{'model, ms':15}" + "".join(f"{f'{size}, Hk={Hk}':>13}" for size, Hk in cases))
table = [seconds_of_all(SIZES[size], Hk) for size, Hk in cases]
print(f"{'blocks alone':15}" + "".join(f"{1e3 * blocks:13.2f}" for blocks, _ in table))
for name in table[0][1]:
    print(f"{name:15}" + "".join(f"{1e3 * found[name]:13.2f}" for _, found in table))

# %% [markdown] slideshow={"slide_type": "subslide"}
# Now what two H200 did, and with the strategies two H100. Lines that compute the same at one size are of one run.

# %% jupyter={"source_hidden": true} slideshow={"slide_type": "fragment"}
recorded = rows.fresh(rows.read() + rows.read(several_gpus=True))
print(ring_tables.shown("speed", recorded))

# %% [markdown] slideshow={"slide_type": "fragment"}
# Forward, causal, zigzag, fetch: the efficiency is 0.98 or more at 128k and 0.90 or more at 32k, where `context_parallel` has
# 0.67 to 0.76. Forward + backward has 0.88 to 0.91 from 32k on, beside a GPU that adds to dQ in any order, and is ahead of
# `context_parallel` at 8k and 32k, too. Change one thing at a time:

# %% slideshow={"slide_type": "fragment"}
print(ring_tables.shown("changes", recorded))

# %% [markdown] slideshow={"slide_type": "fragment"}
# The ring's blocks add to dQ in a fixed order, so that dq is bit-equal from run to run. In any order, as the one GPU adds, the
# call takes 9 % less time, and the efficiency is 0.95 instead of 0.88. A GPU that keeps the order was not measured beside the
# ring. Its backward has 0.87 of the speed in any order (02e: D = 128, causal, 4k and 16k), which would make the ring's about 0.97.
#
# Merging by torch costs 13 % of the forward, stage 03's block 5 %; if that carries the sums in float32, so that nothing is
# merged, 39 %. Float32 dK and dV, the watching threads and persistence cost nothing that shows. No overlap costs fetch 11 %. So
# is the hop hidden? Forward and backward under the profiler (dark: a block, light: another kernel):

# %% jupyter={"source_hidden": true} slideshow={"slide_type": "fragment"}
if record := ring_tables.recorded_trace():
    in_words = ring_tables.trace_in_words(record)
    timelines = picture(ring_tables.trace_picture(record), in_words)
else:
    timelines = print("No trace of this version of the ring has been recorded yet.")
timelines

# %% slideshow={"slide_type": "fragment"}
print(ring_tables.shown("trace", recorded))

# %% [markdown] slideshow={"slide_type": "fragment"}
# Over fetch most of it is: as soon as some thread blocks have ended, the own K and V are copied and the barrier is passed, and
# then the copy engine needs no multiprocessor. (A persistent kernel gives none back before its end.)
#
# Of relay's forward only 41 % is. NCCL's kernel and the block start together. Probably, where the block comes first, NCCL's
# kernel waits behind its thread blocks, and on the other rank for its partner: above, the first message lasts as long as the
# block. In the backward delta is computed first, and messages are hidden.
#
# The four strategies, and the one new token of part 4:

# %% slideshow={"slide_type": "fragment"}
print(ring_tables.shown("strategies", recorded))
print()
print(ring_tables.shown("token", recorded))

# %% [markdown] slideshow={"slide_type": "fragment"}
# The ring over fetch was the fastest at every size, causal, in both passes. (Two ranks make one hop; of more there are no rows.)
#
# For one token the ring sends 268 MB and takes 1.02 ms, of which its hop alone is 0.72 (256 MiB in the next table). Star would
# send 16 KB; as it is now, it has not been measured.
#
# Single messages, and the model, fed with what its note names:

# %% slideshow={"slide_type": "fragment"}
print(ring_tables.shown("hops", recorded))
print()
print(ring_tables.shown("predictions", recorded))
head, *lines = ring_tables.predictions(recorded) or [[]]
for size in head[4:]:
    words = [line[head.index(size)] for line in lines]
    off = [int(word.split("(")[1].rstrip("%)")) for word in words if "(" in word]
    print(f"{size}: the model is off by {min(off):+} to {max(off):+} %")

# %% [markdown] slideshow={"slide_type": "subslide"}
# All but one are within a tenth; without the launches the model is off by up to 25 % at 8k. A CUDA graph needs no host, but was
# slower in three of four settings.
#
# So from 32k positions on, two GPUs that share a sequence over fetch keep nine tenths of their speed, with a backward that is
# bit-equal from run to run. `python -m steps.bench ring-32k` measures on your GPUs.
#
# **Question.** More and more hosts of 8 GPUs, on three networks: what happens to the efficiency?
#
# <details><summary>Answer</summary>
#
# One hop in eight crosses the network, and every rank moves at the slower link's pace. If the network is slower, and a
# rank has fewer tokens than needed, efficiency falls with the second host. Further hosts change little, as the work of a rank
# grows with N.
#
# </details>

# %% slideshow={"slide_type": "fragment"}
networks = {"NVLink": 370e9, "InfiniBand": 50e9, "Ethernet": 12.5e9}  # bytes/s of a GPU
inside, scales = links["NCCL, 155 GB/s"], (8, 16, 64, 1024)
print("model: tokens a rank      needed" + "".join(f"{N:6} GPUs" for N in scales))
for name, network in networks.items():
    machine = Machine(speeds, inside, latency=1e-5, host=8, network=network)
    for Hk in (32, 8):
        for c in (2**13, 2**15):
            speed, pace = machine.speed(c, c, True, "fwd"), min(inside, network)
            needed = simulate.tokens_needed(speed, pace, share=Hk / 32)
            line = f"{name:10} Hk = {Hk:2} {c:7,} {needed:11,.0f}"
            found = simulate.scale_out(machine, Shape(Hk=Hk), c, scales)
            print(line + "".join(f"{share:11.2f}" for _, share in found))

# %% [markdown] slideshow={"slide_type": "slide"}
# ## 8. Summary
#
# - Keys to queries, queries to keys, or both to their head: all exact. They differ in bytes, memory and limits.
# - Work grows like c², what travels like c: from some c on everything can be hidden. Fewer K/V heads help the ring in proportion.
# - A message is hidden only if the block's kernel leaves room for whatever starts it.
# - Relay needs a neighbour and multiprocessors for each hop. Fetch needs one host and a copy engine, and sends dK and dV once, in
#   the dtype of k.
# - A failing rank is named by whoever fails first: the one whose note differs, or does not change, or stands furthest back.
# - In a model four places change: positions, labels, the loss's divisor, and the sum of the weights' gradients.
#
# **Ask yourself**
#
# 1. Why does star not profit from grouped heads, and when does it send least nevertheless?
# 2. Why may Ulysses not use 8 ranks with Hk = 4? What would it cost to repeat the heads?
# 3. The batch doubles. What happens to the break-even c?
# 4. Why does the backward need 2.4 (F/W)(Hk/H) tokens over relay, and 1.6 over fetch?
# 5. The sums of dK and dV would be wrong if they travelled in bfloat16 (04a, part 7). Why may fetch send bfloat16?
#
# **Go further**
#
# - ★ (15 minutes) Draw `timeline` with `slow={1: 2.0}` for both transports. Who waits for the slow rank?
# - ★★ (1 hour) Give star a backward: which rank can compute dK and dV without any message?
# - ★★★ (a weekend) Two rings in one: heads dealt to groups of ranks as in Ulysses, positions to a ring in each group.
#
# **Read:** `papers/ring_attention.md`, `papers/striped_attention.md`; Ulysses 2309.14509; Star Attention 2411.17116.
#
# **Next:** `python -m steps.step04_ring.demo --strategy star`, and the demo of the whole course, `make demo`, whose model
# trains with its sequence dealt to two ranks.
