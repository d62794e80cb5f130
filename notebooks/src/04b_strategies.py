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
# *What does the ring cost beside the other ways to share a sequence, and which one should I take?*
#
# ![The queries, and the keys and values, that rank 2 of 4 computes with. Query-parallel: own queries, all keys. Ring: own
# queries, keys of one rank in each step. Star: all queries, own keys. Ulysses: one head of all. Star and Ulysses send
# results back.](../notebooks/figures/question_04b.png)
#
# - **Before you start:** notebook 04a (merge, hop, overlap, ring, layouts).
# - **Time:** about 50 minutes to read, 60 minutes more with the exercise. (Most of these: the bug hunt at the end.)
# - **Code:** [`steps/step04_ring`](../steps/step04_ring/README.md). No GPU is needed.
# - **Tests:** `pytest tests/test_step04_strategies.py tests/test_step04_faults.py`.
# - **Symbols:** as in 04a, S is the length of the sequence, and N the number of ranks
#   ([reference/symbols.md](../reference/symbols.md)). **Terms:** [reference/glossary.md](../reference/glossary.md).

# %% jupyter={"source_hidden": true} slideshow={"slide_type": "skip"}
import steps  # comes first, because it chooses the engine
import torch
from steps import step00_naive as step00
from steps.course.figures import n04b_strategies as figures, ring_tables
from steps.step04_ring import Layout, in_your_model as model, merge as merging, strategies
from steps.course.workbook import Blank, check, hint, show, solution  # noqa: F401
from steps.course.workbook.case_on_ranks import PlainBlock
print(steps.engine.describe())

# %% [markdown] slideshow={"slide_type": "slide"}
# ## 1. The problem: a message that nothing hides
#
# The ring hides a hop behind a block, if the block takes longer. Each of N ranks has c = S / N positions. In a step of
# the causal zigzag ring half of a block's c² scores are visible: $2 B H c^2 D$ operations. K and V are $4 B H_k c D$
# bytes in bfloat16. With F operations and W bytes a second the block takes longer from
#
# $$c \ge 2\, \frac{F}{W}\, \frac{H_k}{H}$$
#
# tokens on: work grows like c², bytes like c. B, D and the number of ranks cancel. (A message's latency, left out here,
# makes c larger.)
#
# The backward has 2.5 times the operations. K and V are 1 unit of bytes. dK and dV are 2 units in float32 (04a's
# **relay**): the 2 becomes 2 · 3 / 2.5 = 2.4. In bfloat16 (**fetch**, part 3) they are 1: 1.6.
#
# F was measured on one H200, W on two. Hk = H:

# %% slideshow={"slide_type": "fragment"}
print(figures.tokens_needed())

# %% [markdown] slideshow={"slide_type": "subslide"}
# Between hosts W is smaller, and c larger. Below this c the ring waits. Is there a way that sends less?

# %% [markdown] slideshow={"slide_type": "slide"}
# ## 2. Something has to travel
#
# A score needs a query and a key in one place. Either the keys come to the queries (**query-parallel**: all at once;
# **ring**: one rank's after the other), or the queries go to the keys (**star**), or both go to the rank that computes
# their *head* (**Ulysses**).
#
# Six tokens on two ranks. The first head has the numbers of notebook 00, the second its keys and values in reverse:

# %% slideshow={"slide_type": "fragment"}
torch.set_printoptions(precision=2, sci_mode=False)
Q = torch.tensor([[1.0, 2], [0, 1], [-1, 0], [2, -1], [1, 1], [3, 1]]).expand(2, 6, 2)
K = torch.tensor([[0.0, 1], [1, 0], [-1, 1], [1, 2], [2, 0], [0, -1]])
V = torch.tensor([[0.0, 6], [2, 0], [4, 6], [6, 4], [8, 0], [10, 6]])
K, V = torch.stack([K, K.flip(0)]), torch.stack([V, V.flip(0)])  # (heads, tokens, d)
q, k, v = ([x[:, :3], x[:, 3:]] for x in (Q, K, V))  # the shards of rank 0 and 1


def joined(parts):
    """out over all keys, from parts (out, lse) over some."""
    out, lse = torch.zeros_like(parts[0][0]), torch.full_like(parts[0][1], -torch.inf)
    for part in parts:
        merging.merge(out, lse, *part)
    return out


# %% slideshow={"slide_type": "fragment"}
ways = {  # rank 1's out
    "query-parallel": step00.forward(q[1], torch.cat(k, 1), torch.cat(v, 1))[0],
    "ring": joined([step00.forward(q[1], k[src], v[src]) for src in (1, 0)]),
    "star": joined([step00.forward(torch.cat(q, 1), k[r], v[r]) for r in (0, 1)])[:, 3:],
    "Ulysses": torch.stack([step00.forward(Q[i], K[i], V[i])[0] for i in (0, 1)])[:, 3:],
}
for name, out in ways.items():
    print(f"{name:14} rank 1, query 5: head 0 {out[0, 2]}, head 1 {out[1, 2]}")

# %% [markdown] slideshow={"slide_type": "subslide"}
# ### Who sends what
#
# Eight times the (6.83, 1.34) of notebook 00: all four are exact. (Star Attention has a first phase, which
# approximates. This is the second.) A rank's queries, or its results, are q = B H c D numbers, its keys and values kv =
# 2 B Hk c D.
#
# | strategy | what moves | a rank sends, forward | can be hidden? | holds beside its own | limit |
# |---|---|---|---|---|---|
# | query-parallel | K, V to everybody | (N - 1) kv | no | 2 N kv | not striped |
# | ring | K, V from rank to rank | (N - 1) kv | behind blocks | 2 kv; out and parts to merge: up to 8 q | – |
# | star | queries to everybody, results home | about (N - 1) · 2 q | no | up to 3 N q | no backward here |
# | Ulysses | positions against heads | (N - 1) / N · (2 q + kv) | no | 5 q + kv | N divides H and Hk |
#
# With S fixed, q and kv are proportional to 1 / N: in Ulysses a rank sends *less* with more ranks.
#
# **Predict.** With **grouped heads** several query heads share one head of K and V. If Hk = H / 4, which of the four
# send less than with Hk = H?
#
# <details><summary>Answer</summary>
#
# Query-parallel and the ring send a quarter, Ulysses somewhat less, and star the same.
#
# </details>

# %% [markdown] slideshow={"slide_type": "slide"}
# ## 3. From algorithm to code
#
# Query-parallel **gathers**: every rank gets the keys of all. A rank's queries are one or two runs of successive
# positions, and each run is one ordinary call of attention. Nothing is merged.
#
# Ulysses is attention on one device between two **all-to-alls**, here `to_heads` and `to_positions`: each rank sends
# every other rank a different part. (`team` has the ranks and the kernel.)

# %% slideshow={"slide_type": "fragment"}
show("step04_ring/strategies/lesson_5_ulysses", "forward")

# %% [markdown] slideshow={"slide_type": "subslide"}
# On four ranks, S = 256, H = Hk = 4, D = 16 in float32, the formulas give what the busiest rank sends.

# %% slideshow={"slide_type": "fragment"}
layout = Layout("zigzag", 256, 4, causal=True)
for name in ("query_parallel", "ring", "star", "ulysses"):
    sizes = dict(B=1, H=4, Hk=4, D=16, e=4)  # e: bytes of an element
    sent = (strategies.account.sent_bytes(name, layout, r, **sizes)[0] for r in range(4))
    print(f"{name:15} {max(sent):7,} bytes forward")

# %% [markdown] slideshow={"slide_type": "subslide"}
# ### The ring's other transport: fetch
#
# On a GPU each of relay's hops is a kernel of NCCL, NVIDIA's library for messages between GPUs. It occupies
# **multiprocessors**, the units of a GPU that also compute the blocks.
#
# Inside a host every GPU can read the memory of the others. In **fetch** ([`fetch.py`](../steps/step04_ring/fetch.py))
# a rank's copies are made by the GPU's **copy engine**, a unit that only copies. It is still a ring: blocks, their
# order and the merge are the same. Each rank first copies its own K and V to where all can read them. Then comes a
# **barrier**, which no rank passes before all have come. In the backward each rank copies its part of dK and dV to the
# owner, which adds the parts in float32.
#
# **Several streams.** A **stream** is a queue of work for a GPU. Inside one, work is done in order. Across streams
# ([`side.py`](../steps/step04_ring/ranks/side.py)) only an **event** keeps an order: one stream records it, the other
# waits for it. `lead`: a block waits until its K and V are copied. `follow`: the next copy into a buffer waits until
# the block has read it. Without one of these waits the results are wrong now and then, and nothing complains.

# %% slideshow={"slide_type": "fragment"}
figures.two_streams()

# %% [markdown] slideshow={"slide_type": "fragment"}
# After the barrier: `order` has the owners of the keys, block by block, and `wanted` those to fetch from. `free` are
# two buffers. `start` begins a copy, `arriving` has the event after it, and `there` the K and V.

# %% slideshow={"slide_type": "fragment"}
show("step04_ring/fetch", "for buffer in free", until="if missing")

# %% [markdown] slideshow={"slide_type": "slide"}
# ## 4. In your model
#
# Everything but attention acts on each position alone. Four places notice that some positions are elsewhere:
#
# - **Positions.** A rotary embedding turns q and k by an angle that grows with the position *in the whole sequence*.
#   `Layout.positions(rank)` takes the place of `arange`.
# - **Labels.** A token's label is the next token, which may be on another rank.
# - **Loss.** Shards differ in length. Each rank's *sum* is divided by the number of labels of all ranks.
# - **Gradients** of the weights are summed over the ranks, once, after the backward. (DDP and FSDP average them:
#   [04x](04x_deeper.ipynb).)
#
# [`in_your_model.py`](../steps/step04_ring/in_your_model.py) has a decoder of two layers and 37 tokens. Four ranks run
# it on their shards, and compare loss and gradients with one device.

# %% slideshow={"slide_type": "fragment"}
for rank in range(2):
    positions = Layout("zigzag", 9, 2).positions(rank).tolist()
    print(f"zigzag, S = 9, rank {rank} of 2: {positions}")
with figures.ranks(4) as four_ranks:  # ends them afterwards
    found = four_ranks.run(model.compare, 37, "zigzag", PlainBlock)[0]
loss = found.pop("loss")
print(f"differences: loss {loss:.0e}, {len(found)} gradients {max(found.values()):.0e}")
show("step04_ring/in_your_model", "loss_and_gradients")

# %% [markdown] slideshow={"slide_type": "subslide"}
# ### Exercise 04.4: what a rank gives to its model
#
# Its tokens, positions and labels, and the number by which it divides the sum of its losses.

# %% slideshow={"slide_type": "fragment"}
IGNORED = -100  # the label of a token that has no next one


def of_rank(tokens, layout, rank):
    """(tokens, positions, labels, count) of this rank. tokens (S,) are those of all ranks.

    The first three are tensors with an entry for each of the rank's positions, in the
    order of layout.positions(rank). count is a number. Every rank divides the sum of its
    losses by it, and the results are added up over the ranks.
    """
    raise Blank


check("04.4", of_rank)

# %% [markdown] slideshow={"slide_type": "slide"}
# ## 5. Check it, then break it
#
# The differences so far were rounding. Now one of three places is wrong on four ranks: positions, labels or loss.
# **Which mistake would you notice from the loss alone?**
#
# <details><summary>Answer</summary>
#
# None, with nothing to compare it to: each is a plausible loss. The gradients are off by several percent and more.
#
# </details>

# %% slideshow={"slide_type": "fragment"}
figures.mistakes_in_a_model()

# %% [markdown] slideshow={"slide_type": "slide"}
# ## 6. Predict, then measure
#
# Two and four H200 of one host, causal zigzag. **At which lengths does the ring over fetch keep about nine tenths of
# the GPUs' speed? Relay's forward sends the same bytes, at 0.89 of fetch's rate. How much longer does it take on four
# GPUs, at 32k and at 128k?**
#
# <details><summary>Answer</summary>
#
# At 32k and 128k. At 8k the CPU, which starts all kernels, takes longer than the GPU: even a quarter of the bytes
# (Hk = 8) changes nothing. (04x takes the CPU out of the way.) Relay's forward, Hk = H, takes 89 % longer at 32k and
# 7 % at 128k.
#
# </details>
#
# "torch" is torch's own `context_parallel`: "allgather" first collects all keys, as query-parallel does; "alltoall"
# passes them on in a ring, and is not Ulysses. Here with Hk = H:

# %% slideshow={"slide_type": "fragment"}
ring_tables.efficiency()

# %% [markdown] slideshow={"slide_type": "subslide"}
# On four GPUs. For two: the [page of results](../steps/course/bench/results/README.md).

# %% slideshow={"slide_type": "fragment"}
print(ring_tables.shown("speed", ring_tables.recorded("H200", n_gpus=4)))

# %% [markdown] slideshow={"slide_type": "subslide"}
# Over fetch, four GPUs have an efficiency of 0.86 to 0.98 from 32k on, where `context_parallel` has 0.40 to 0.82.
#
# ### Is the hop hidden?
#
# One of six calls of the forward at 32k, in another run, as torch's profiler saw it on one of the four GPUs. Its hidden share
# is the nearest to the mean of the six; over fetch even that one is far from it.

# %% slideshow={"slide_type": "fragment"}
ring_tables.recorded_call()

# %% [markdown] slideshow={"slide_type": "subslide"}
# Over fetch two of three copies run beside blocks. (The two small boxes copy the rank's own keys.) The first had to wait for
# a rank that was late (grey), until the first block had ended. Over relay the first hop began before the block. The
# others begin when a block ends, although they were posted before: NCCL's kernel needs free multiprocessors, and
# probably the block had taken them all.
#
# So a hop is hidden if the block takes longer, no rank is late, *and* the block leaves room for whatever starts the hop.
#
# ### Which strategy?
#
# | your case | take | because |
# |---|---|---|
# | four GPUs, 8k positions | one GPU, or a CUDA graph ([04x](04x_deeper.ipynb)) | a forward takes 0.785 ms on one, 1.7 on four |
# | one host, 32k or more | ring, fetch | faster than relay, query-parallel, star and Ulysses, or at most 2 % slower |
# | several hosts, c several times 2.4 (F/W)(Hk/H), W the network's | ring, relay | a hop is short beside a block, hidden or not |
# | fewer tokens a rank, and N divides H and Hk | Ulysses | sends less, the more ranks there are |
# | fewer tokens a rank, N does not divide Hk, 2 N kv fits | query-parallel | one gather, no N - 1 hops, nothing to merge |
# | a few new tokens, many keys | star | results are smaller than keys |
#
# The first two lines are measured, the second in 04x. The others follow from bytes and messages. On your machines:
# `python -m steps.course.bench ring-32k`.

# %% [markdown] slideshow={"slide_type": "slide"}
# ## 7. Summary
#
# - Keys to queries, queries to keys, or both to their head: all exact, with other bytes, memory and limits.
# - Work grows like c², what travels like c: from some c on it can be hidden.
# - A message is hidden only if no rank is late, and the block's kernel leaves room for whatever starts it.
# - In a model four places change: positions, labels, the loss's divisor, the sum of gradients.
#
# **Ask yourself**
#
# 1. Why does star not profit from grouped heads, and when does it send least nevertheless?
#    <details><summary>Answer</summary>
#
#    Queries and results have H heads, whatever Hk is. With one new token there is one query, and the keys stay.
#    </details>
# 2. Why may Ulysses not use 8 ranks with Hk = 4?
#    <details><summary>Answer</summary>
#
#    Half of the ranks would have no head of K and V.
#    </details>
# 3. The batch doubles. What happens to the c from which a block hides its message?
#    <details><summary>Answer</summary>
#
#    Nothing, if latency is left out: work and bytes both double.
#    </details>
# 4. Why does the backward need more tokens over relay than over fetch?
#    <details><summary>Answer</summary>
#
#    Relay's sums are float32, fetch's parts bfloat16.
#    </details>
# 5. A sum of dK in bfloat16 would be rounded at every rank. Why may fetch send bfloat16?
#    <details><summary>Answer</summary>
#
#    Each part is sent once, as the block gives it; the sum is float32.
#    </details>

# %% [markdown] slideshow={"slide_type": "subslide"}
# ### Go further
#
# - **Bug hunt 04.bug1.** On short sentences the backward's four ranks wait for ever: `python -m steps check 04.bug1`.
# - ★ (15 minutes) `python -m steps.step04_ring.demo --strategy star`: explain each number.
# - ★★ (1 hour) Give star a backward: which rank can compute dK and dV without any message?
# - ★★★ (a weekend) Two rings in one: heads dealt to groups of ranks as in Ulysses, positions to a ring in each group.
#
# **Read:** [papers/ring_attention.md](../papers/ring_attention.md); DeepSpeed Ulysses, arXiv 2309.14509; Star
# Attention, arXiv 2411.17116.
#
# **Next:** [04x_deeper.ipynb](04x_deeper.ipynb): roundings, bytes, a model of time, ranks that fail.
