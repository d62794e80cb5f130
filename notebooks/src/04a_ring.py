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
# *How do several GPUs share one sequence, and who waits for whom?*
#
# ![Four ranks in a row. Each keeps its queries. Arrows lead from the keys and values of each rank to the next one, and
# from the last rank back to the first.](../notebooks/figures/question_04a.png)
#
# - **Before you start:** notebook 00 (tiles, lse, delta). No distributed programming.
# - **Time:** about 50 minutes to read, 60 minutes more with the exercises.
# - **Code:** [`steps/step04_ring`](../steps/step04_ring/README.md). No GPU is needed.
# - **Tests:** `pytest tests/test_step04_ring.py`.
# - **Symbols:** in this stage S is the length of the sequence, N the number of devices, and $s_{ij}$ a score
#   ([reference/symbols.md](../reference/symbols.md)). **Terms:** [reference/glossary.md](../reference/glossary.md).

# %% jupyter={"source_hidden": true} slideshow={"slide_type": "skip"}
import steps  # comes first, because it chooses the engine
import torch
from steps import step00_naive as step00
from steps.course.figures import n04a_ring as figures
from steps.step04_ring import Layout, merge as merging
from steps.step04_ring.strategies import lesson_2_overlap
from steps.course.workbook import Blank, check, hint, show, solution  # noqa: F401
print(steps.engine.describe())

# %% [markdown] slideshow={"slide_type": "slide"}
# ## 1. The memory of one device
#
# No stage so far stores a matrix of all scores. q, k, v, out and lse grow only like the length S of the sequence. But
# without recomputing, each of the 32 layers must keep its own until the backward has used them. Here H = 32 heads, Hk =
# 8 heads of K and V, and D = 128.

# %% slideshow={"slide_type": "fragment"}
layers, H, Hk, D, mlp = 32, 32, 8, 128, 14336  # mlp: the width of the layers' MLP
attention = 2 * (2 * H + 2 * Hk) * D + 4 * H  # bytes a token: q, out, k, v in bfloat16; lse
rest = 2 * (2 * H * D + 3 * mlp)  # the inputs of two norms, three tensors of the MLP
inputs = 2 * H * D  # of the layers: all that is kept if the backward recomputes a layer
for S in (2**13, 2**17, 2**20):
    kept, others, least = (layers * S * x / 1e9 for x in (attention, rest, inputs))
    print(f"S = {S:9,}: attention keeps {kept:5.1f} GB,", end=" ")
    print(f"the rest {others:6.1f} GB, layers' inputs {least:5.1f} GB")

# %% [markdown] slideshow={"slide_type": "slide"}
# ## 2. The idea: the keys travel
#
# At a million tokens attention and the rest keep 4,127 GB. An H200 has 141, so it takes 30 of them. A model that
# recomputes each layer in the backward (*activation checkpointing*) still keeps the layers' inputs, 275 GB. But norms
# and the MLP treat each token alone, and need nothing of other tokens. So the *sequence* is divided: each of N devices,
# called **ranks**, holds S / N of the S positions. Only attention needs more than its own tokens: a query needs keys
# that lie on other ranks.
#
# ### Merging two results
#
# One query has attended to the keys A on rank 0, and to the keys B on rank 1. Write $o$ for a part's out and $\ell$ for
# its lse, the log of its sum of exponentials. For one part, $e^{\ell_A} o_A = \sum_A e^{s_j} v_j$ is the sum that was
# not divided yet. So:
#
# $$\ell = \log(e^{\ell_A} + e^{\ell_B}) \qquad w = e^{\ell_B - \ell} \qquad o = (1 - w)\, o_A + w\, o_B$$
#
# **Claim 1.** This is exactly attention over A and B. Try it with query 5 of the six tokens of notebook 00:

# %% slideshow={"slide_type": "fragment"}
torch.set_printoptions(precision=2, sci_mode=False)
Q = torch.tensor([[1.0, 2], [0, 1], [-1, 0], [2, -1], [1, 1], [3, 1]])
K = torch.tensor([[0.0, 1], [1, 0], [-1, 1], [1, 2], [2, 0], [0, -1]])
V = torch.tensor([[0.0, 6], [2, 0], [4, 6], [6, 4], [8, 0], [10, 6]])
out_A, lse_A = step00.forward(Q[5:], K[:3], V[:3])
out_B, lse_B = step00.forward(Q[5:], K[3:], V[3:])
print("the plain mean of both:", (out_A[0] + out_B[0]) / 2)  # wrong
lse = (lse_A.exp() + lse_B.exp()).log()
w = (lse_B - lse).exp()
out = (1 - w) * out_A + w * out_B
print(f"A   lse {lse_A.item():.2f}  out {out_A[0]}")
print(f"B   lse {lse_B.item():.2f}  out {out_B[0]}")
print(f"w = {w.item():.2f}: lse {lse.item():.2f}  out {out[0]}")
print("claim 1:", torch.allclose(out, step00.forward(Q[5:], K, V)[0]))

# %% [markdown] slideshow={"slide_type": "subslide"}
# Written like this, the formula fails twice. exp(lse) overflows above 88. And a query that has seen no key has lse =
# -inf: with two such parts, -inf - (-inf) is NaN. The stage's `merge` avoids both, and you will write it.
#
# **Claim 2.** Parts may be merged in any order, up to rounding. So each rank may begin with its own keys. The attention
# of a rank's queries over the keys of one rank is called a **block**.

# %% slideshow={"slide_type": "fragment"}
for a, b in ((0.0, 1.0), (100.0, 100.0), (-torch.inf, -torch.inf)):
    lse_A, lse_B = torch.tensor([a, b])
    lse = (lse_A.exp() + lse_B.exp()).log()
    print(f"lse of A {a:4.0f}, of B {b:4.0f}: lse {lse:5.2f}, w {(lse_B - lse).exp():.2f}")
parts = [step00.forward(Q, K[i : i + 2], V[i : i + 2]) for i in (0, 2, 4)]
for order in ((0, 1, 2), (2, 1, 0), (1, 2, 0)):
    out, lse = torch.zeros(6, 2), torch.full((6,), -torch.inf)
    for n in order:
        merging.merge(out, lse, *parts[n])
    print(f"three parts in order {order}: query 5 {out[5]}, lse {lse[5]:.2f}")

# %% [markdown] slideshow={"slide_type": "subslide"}
# ### Exercise 04.1: merge the results of two blocks of keys
#
# Write claim 1, stable and in place. Mind rows where one lse or both are -inf, and blocks whose out is not float32.

# %% slideshow={"slide_type": "fragment"}
def merge(out, lse, out_block, lse_block):
    """Merges a block's result into out (..., n, D) and lse (..., n), float32, in place."""
    raise Blank


check("04.1", merge)

# %% [markdown] slideshow={"slide_type": "subslide"}
# ### Hop and overlap
#
# A **hop** sends the keys of every rank to the next one. If all ranks first sent and then received, each would wait for
# ever. So a rank **posts** both together, which only starts them, and waits later. Until then what is sent must not
# change, and what arrives must not be touched.
#
# The first block of scores does not need the message. So a rank posts the hop, computes with the keys that it has, and
# only then waits: **overlap**.
#
# **Predict.** A hop takes h ms, a block b ms. How long do two blocks and the hop take without overlap, and with it?
#
# <details><summary>Answer</summary>
#
# h + 2b, and max(h, b) + b. A hop that is shorter than a block is free.
#
# </details>
#
# `figures.ranks` starts processes with the stage's `launch.Ranks`; they send messages by torch's library for CPUs. In
# the test a block only sleeps for 100 ms. The sleep stands for a GPU that computes while the CPU is free.

# %% slideshow={"slide_type": "fragment"}
two_ranks = figures.ranks(2)
ms = two_ranks.run(lesson_2_overlap.worker, 2**15)[0]  # so many keys travel
b = 100
h = ms[False] - 2 * b
print(f"in sequence {ms[False]:.0f} ms, so h is {h:.0f} ms")
print(f"overlapped: predicted {max(h, b) + b:.0f} ms, measured {ms[True]:.0f} ms")
show("step04_ring/strategies/lesson_2_overlap", "post", "attention")

# %% [markdown] slideshow={"slide_type": "slide"}
# ## 3. The ring
#
# ### The ring, in one process
#
# Every rank keeps its queries. In each of N steps it attends to the keys at hand and merges. After each step but the
# last it hands the keys on. Here are two ranks of three tokens. The ranks are a loop, and a hop rotates a list.

# %% slideshow={"slide_type": "fragment"}
N = 2
q, k, v = (x.chunk(N) for x in (Q, K, V))  # rank 0 has tokens 0 to 2, rank 1 tokens 3 to 5
out = [torch.zeros(3, 2) for _ in range(N)]
lse = [torch.full((3,), -torch.inf) for _ in range(N)]
at_hand = [(src, k[src], v[src]) for src in range(N)]  # every rank begins with its own keys
for step in range(N):
    for rank in range(N):  # real ranks do this at the same time
        src, K_src, V_src = at_hand[rank]
        out_block, lse_block = step00.forward(q[rank], K_src, V_src)
        merging.merge(out[rank], lse[rank], out_block, lse_block)
        print(f"step {step}, rank {rank} has K{src}, V{src}; its last query:", end=" ")
        print(f"block {out_block[2]}, lse {lse_block[2]:.2f}")
        print(f"    merged {out[rank][2]}, lse {lse[rank][2]:.2f}")
    if step + 1 < N:
        at_hand = at_hand[-1:] + at_hand[:-1]  # the hop: rank r gets what rank r - 1 had
want, want_lse = step00.forward(Q, K, V)
print("as on one device:", torch.allclose(torch.cat(out), want, atol=1e-6))

# %% [markdown] slideshow={"slide_type": "subslide"}
# Rank 1 merges B's result, then A's, for query 5: (6.83, 1.34) again.
#
# Beside its own, a rank holds two pairs of K and V, the one at hand and the one that is arriving: 2 / N of all K and V.
# There are N blocks and N - 1 hops.
#
# ### Line by line
#
# | line of [papers/ring_attention.md](../papers/ring_attention.md) | in [`step04_ring`](../steps/step04_ring/README.md) |
# |---|---|
# | [1] out = 0, lse = -inf, float32 | `merge.py`: `Parts` |
# | [4, 9] post the hop, later wait for it | `relay.py`: `Relay` |
# | [5] a block: any kernel that gives (out, lse) | the argument `block` |
# | [6–8] merge | `merge.py`: `merge` |
#
# In the function, `src` is the rank whose keys have come, and `work` names the queries and keys to compute. n' counts
# the next rank's positions. If a block raises, `to_the_end` still takes the other steps, for which other ranks wait.
# `transport` is how keys travel: here **relay**, the hops from neighbour to neighbour. With another, **fetch**, each
# rank copies keys from their owner (04b).
#
# The six tokens go through it in two processes:

# %% slideshow={"slide_type": "fragment"}
for rank, (out_r, lse_r) in enumerate(two_ranks.run(figures.ring_on_this_rank, Q, K, V)):
    same = torch.allclose(out_r, out[rank]) and torch.allclose(lse_r, lse[rank])
    print(f"rank {rank}: last query {out_r[2]}, lse {lse_r[2]:.2f}; as in the loop: {same}")
show("step04_ring/ring", "forward")

# %% [markdown] slideshow={"slide_type": "slide"}
# ## 4. The backward
#
# Notebook 00's dS is here $ds_{ij} = P_{ij}\,(dP_{ij} - \mathit{delta}_i)$, with
# $P_{ij} = e^{s_{ij} - \mathit{lse}_i}$ and $\mathit{delta}_i = dO_i \cdot O_i$. Two numbers of the *whole row* enter, lse and delta.
#
# **Claim 3.** Compute each block's gradients with the final lse and out. They are right, and are simply added. With a
# block's own lse and out they are wrong:

# %% slideshow={"slide_type": "fragment"}
dO = torch.tensor([[1.0, 0], [0, 1], [1, 1], [2, 0], [0, -1], [1, -1]])
dq, dk, dv = step00.backward(dO, Q, K, V, want, want_lse)
halves = [(K[:3], V[:3]), (K[3:], V[3:])]
own = [step00.forward(Q, *half) for half in halves]
for name, saved in (("own", own), ("final", [(want, want_lse)] * 2)):
    blocks = [step00.backward(dO, Q, *kv, *s) for kv, s in zip(halves, saved, strict=True)]
    dk_right = torch.allclose(torch.cat([blocks[0][1], blocks[1][1]]), dk)
    print(f"{name:5} lse and out, dk right: {dk_right}; dq of query 5", end=" ")
    print(blocks[0][0][5] + blocks[1][0][5])
print("all keys at once:                    dq of query 5", dq[5])

# %% [markdown] slideshow={"slide_type": "subslide"}
# ### Whose keys are where
#
# dQ stays with its rank. dK and dV are sums over the queries of *all* ranks: they travel with their K and V, and must
# end at their owner. If the ring turns the other way, this takes no extra hop. The backward begins with the keys that
# the forward ended with, those of rank + 1, and ends with the rank's own.

# %% slideshow={"slide_type": "fragment"}
figures.whose_keys()

# %% [markdown] slideshow={"slide_type": "subslide"}
# ### Exercise 04.2: the reverse ring
#
# Whose keys does a rank have in each step, and to whom does it send them and the sums of dK and dV? Write the figure's
# right half, for any N.

# %% slideshow={"slide_type": "fragment"}
def reverse_step(rank, step, N):
    """(src, kv_to, dkv_to) of this rank in this step, 0 to N - 1, of the backward.

    src is the rank whose K and V are at hand. kv_to is the rank that K and V are sent to
    while the block is computed, and dkv_to the one that the sums of their dK and dV are
    sent to after it; None once they have come home. A rank kept only the K and V that the
    forward ended with, so its own have to come back, too.
    """
    raise Blank


check("04.2", reverse_step)

# %% [markdown] slideshow={"slide_type": "slide"}
# ## 5. Layouts
#
# ### Who waits for whom
#
# Under a causal mask late queries see much, and early ones little. As every rank waits for its neighbour's keys, the
# slowest sets the pace. So it matters which positions a rank holds, its **layout**.
#
# The figure deals 8 positions to 4 ranks. A number is the step in which a score is computed. **In step 3, how many
# contiguous ranks compute?**

# %% slideshow={"slide_type": "fragment"}
figures.who_computes()

# %% [markdown] slideshow={"slide_type": "subslide"}
# **Contiguous**: rank 3 alone. **Zigzag** gives each rank an early and a late chunk: in every step all do equally much.
# **Striped** deals positions like cards. The titles add up the scores of the slowest rank: 15, 9, and 12. With
# thousands of positions zigzag and striped are nearly equal.
#
# Contiguous ranks have blocks of S / N queries and keys. A block counts as 1. A large block on the diagonal counts as
# 1/2, as half of it is hidden. (The figure's small ones show 3 scores of 4.) The last rank has N - 1/2 blocks to
# compute, the mean rank N / 2. So the mean rank computes N / (2N - 1) of the time: 4/7 with four ranks.
#
# The timelines are a model of 32k positions, as if hops and blocks overlapped fully, each as fast as recorded on H200s.
# (Relay on GPUs hides little, and takes twice as long: 04b, part 6.) A hop starts when sender and receiver have both
# posted it. The black line belongs to the receiver.

# %% slideshow={"slide_type": "fragment"}
figures.timeline("contiguous")

# %% slideshow={"slide_type": "fragment"}
figures.timeline("zigzag")

# %% [markdown] slideshow={"slide_type": "subslide"}
# ### Exercise 04.3: which part each rank computes
#
# Write the table behind `work`: which queries of rank me see which keys of rank src, and whether there is a diagonal.
# (q, k, early_q and early_k are counts here.) The figure of 8 positions has the answer for q = k = 2.

# %% slideshow={"slide_type": "fragment"}
def visible_part(kind, me, src, q, k, early_q, early_k):
    """(q_start, q_stop, k_start, k_stop, causal) for the queries of me and the keys of src.

    kind is a layout under a causal mask, or "full". causal says whether a diagonal hides
    some of what is named; a block with one is square. In zigzag, the early chunks are the
    first early_q queries and the first early_k keys. If nothing is seen, start = stop.
    """
    raise Blank


check("04.3", visible_part)

# %% [markdown] slideshow={"slide_type": "slide"}
# ## 6. Check it, then break it
#
# `differences` runs the ring, forward and backward, and compares with one device: only float32's rounding may be left.
# Then we break the table of work of four ranks: `no_diagonal` masks nothing in a block, and with `key_too_many` a rank
# of striped sees one key too many. **Which of them do tests without a causal mask miss?**
#
# <details><summary>Answer</summary>
#
# Both: without a causal mask no block has a diagonal to get wrong. Only in striped a block with keys of a *later* rank
# has one.
#
# </details>

# %% slideshow={"slide_type": "fragment"}
with two_ranks:  # ends them afterwards
    for kind in ("contiguous", "zigzag", "striped"):
        print(f"{kind:10}", figures.differences(two_ranks, kind, S=259))

# %% slideshow={"slide_type": "fragment"}
def no_diagonal(layout, me, src, work=Layout.work):
    found = work(layout, me, src)  # (rows of q, rows of k, is there a diagonal?), or None
    return found and (*found[:2], False)


def key_too_many(layout, me, src, work=Layout.work):
    if layout.causal and layout.kind == "striped" and src > me:
        n = min(layout.size(me), layout.size(src))
        return slice(0, n), slice(0, n), True
    return work(layout, me, src)


print(figures.mistakes_seen(no_diagonal, key_too_many))

# %% [markdown] slideshow={"slide_type": "fragment"}
# A dash: all results are right.

# %% [markdown] slideshow={"slide_type": "slide"}
# ## 7. Predict, then measure
#
# Two or four H200 share the forward of a causal sequence of 32k positions, over fetch, the faster transport. Efficiency
# is the time of one GPU, divided by the number of GPUs and by the ring's time. Each ring was timed beside its
# own run on one GPU. **How much do you expect of contiguous, how much of zigzag?**
#
# <details><summary>Answer</summary>
#
# Contiguous cannot have more than N / (2N - 1), which is 0.67 of two and 0.57 of four, and zigzag 1.
#
# </details>

# %% slideshow={"slide_type": "fragment"}
print(figures.layouts_measured())

# %% [markdown] slideshow={"slide_type": "slide"}
# ## 8. Summary
#
# - (out, lse) is all that must be kept of the keys seen so far; two such pairs merge in any order, the same up to
#   rounding.
# - Queries stay, keys and values travel: N blocks, N - 1 hops, each posted before the block that hides it.
# - The backward uses the final lse and delta in every block, and the ring turns round.
# - The slowest rank of a step sets the pace. Under a causal mask contiguous wastes up to half, zigzag nothing.
#
# **Ask yourself**
#
# 1. Why need no maximum travel with (out, lse)?
#    <details><summary>Answer</summary>
#
#    m was only the unit in which l was counted; lse = m + log l contains it.
#    </details>
# 2. Why is rank 0 of the contiguous layout idle and yet not free to leave?
#    <details><summary>Answer</summary>
#
#    The keys of other ranks pass through it.
#    </details>
# 3. How many hops would dK and dV need if the backward turned the same way as the forward, own block first?
#    <details><summary>Answer</summary>
#
#    N: after N - 1 hops they are with the rank before their owner.
#    </details>
# 4. What may be done between `post` and `wait` with the tensor that is sent, and with the one that arrives?
#    <details><summary>Answer</summary>
#
#    The sent one may be read, not changed. The arriving one may not be touched at all.
#    </details>
# 5. One rank passes `causal=True`, the others do not. What would the loop of hops do, and what does `attention` do?
#    <details><summary>Answer</summary>
#
#    All messages would fit, so nothing would hang, and only one rank's rows of out would be masked. `attention` lets
#    the ranks compare their arguments first: each raises a ValueError that names `causal`.
#    </details>

# %% [markdown] slideshow={"slide_type": "subslide"}
# ### Go further
#
# - **Bug hunt 04.bug2, "NaN at the beginning".** On 4 ranks the first queries of a causal call are NaN, though their lse
#   is right. `python -m steps check 04.bug2` writes `my/04_bug2.py`.
# - ★ (15 minutes) `simulate.gantt` with `Machine(..., slow={1: 2.0})`, rank 1 half as fast: who notices?
# - ★★ (1 hour) Give the ring of two ranks in one process a causal mask, by `Layout("zigzag", 6, 2, causal=True).work`.
# - ★★★ (a weekend) Zigzag sends late chunks to ranks that never use them. Send each half only as far as it is needed.
#
# **Read:** [papers/ring_attention.md](../papers/ring_attention.md),
# [papers/striped_attention.md](../papers/striped_attention.md).
#
# **Next:** [04b_strategies.ipynb](04b_strategies.ipynb), other ways to share a sequence.
