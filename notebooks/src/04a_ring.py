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
# - **Before you start:** notebook 00 (tiles, lse, delta). Nothing about distributed programs.
# - **Time:** about 40 minutes to read, 60 minutes more with the exercises.
# - **Code:** [`steps/step04_ring`](../steps/step04_ring/README.md). No GPU is needed: the ranks are processes on the CPU.
# - **Tests:** `pytest tests/test_step04_ring.py`.
# - **Symbols:** [reference/symbols.md](../reference/symbols.md). **Terms:**
#   [reference/glossary.md](../reference/glossary.md).

# %% jupyter={"source_hidden": true} slideshow={"slide_type": "skip"}
import steps  # comes first, because it chooses the engine
import torch
from steps import step00_naive as step00
from steps.figures import n04a_ring as figures
from steps.step04_ring import Layout, demo, launch, merge as merging
from steps.step04_ring.strategies import lesson_1_hop, lesson_2_overlap
from steps.workbook import Blank, check, hint, show, solution  # noqa: F401
print(steps.engine.describe())

# %% [markdown] slideshow={"slide_type": "slide"}
# ## 1. The memory of one device
#
# No stage so far stores an N x N matrix. q, k, v, out and lse grow only like N, but every layer keeps them until the
# backward. Take 32 layers with H = 32 heads, Hk = 8 heads of K and V, and D = 128.

# %% slideshow={"slide_type": "fragment"}
layers, H, Hk, D, mlp = 32, 32, 8, 128, 14336  # mlp: the width of the layers' MLP
attention = 2 * (2 * H + 2 * Hk) * D + 4 * H  # bytes a token: q, out, k, v in bfloat16; lse
rest = 2 * (2 * H * D + 3 * mlp)  # the inputs of two norms, three tensors of the MLP
for N in (2**13, 2**17, 2**20):
    kept, others = (layers * N * x / 1e9 for x in (attention, rest))
    seconds = layers * 7 * N**2 * H * D / 989e12  # causal, both passes, at an H200's peak
    print(f"N = {N:9,}: attention keeps {kept:5.1f} GB, the rest", end=" ")
    print(f"{others:6.1f} GB; {seconds:6.1f} s a step")

# %% [markdown] slideshow={"slide_type": "slide"}
# ## 2. The idea: the keys travel
#
# At a million tokens attention keeps 691.5 GB, where an H200 has 141. The rest of a layer keeps five times as much, unless
# it is computed again in the backward; but norms and MLP treat each token alone, so that dividing the *sequence* divides
# their memory too, without a message.
#
# So deal the sequence out: each of N devices, called a **rank**, holds S / N of the S positions. (From here on N counts
# ranks.) Only attention needs more than its own tokens: a query wants keys that lie on other ranks.
#
# ### Merging two results
#
# Rank 0 has attended to the keys A and rank 1 to the keys B, with the same query. Write $o$ for a part's out and $\ell$ for
# its lse, the log of its sum of exponentials. Then $e^{\ell_A} o_A = \sum_A e^{s_j} v_j$ is the sum before it was divided.
# Add both sums, and divide by $e^{\ell_A} + e^{\ell_B}$:
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
# B has 0.91 of the sum: the result (6.83, 1.34) lies near B's.
#
# Typed in like this, the formula has two weak points. exp(lse) overflows from 89 on. And a query that has seen no key yet
# has out = 0 and lse = -inf: if both parts are such, -inf - (-inf) is NaN. The stage's `merge` survives both.
#
# **Claim 2.** Parts may be merged in any order, up to rounding. So each rank may begin with its own keys.

# %% slideshow={"slide_type": "fragment"}
for a, b in ((0.0, 1.0), (100.0, 100.0), (-torch.inf, 1.0), (-torch.inf, -torch.inf)):
    a, b = torch.tensor([a, b]).chunk(2)
    typed_in = (a.exp() + b.exp()).log()
    w, lse = torch.zeros(1, 1), a.clone()
    merging.merge(w, lse, torch.ones(1, 1), b)  # out is 0 and 1, so that the result is w
    told = f"lse {a[0]:4.0f} and {b[0]:4.0f}: typed in, lse {typed_in[0]:6.2f}"
    print(f"{told}, w {(b - typed_in).exp()[0]:4.2f}; merge: {lse[0]:6.2f}, {w[0, 0]:.2f}")
parts = [step00.forward(Q, K[i : i + 2], V[i : i + 2]) for i in (0, 2, 4)]
for order in ((0, 1, 2), (2, 1, 0), (1, 2, 0)):
    out, lse = torch.zeros(6, 2), torch.full((6,), -torch.inf)
    for n in order:
        merging.merge(out, lse, *parts[n])
    print(f"three parts in order {order}: query 5 {out[5]}, lse {lse[5]:.2f}")

# %% [markdown] slideshow={"slide_type": "subslide"}
# ### Exercise 04.1: merge the results of two blocks of keys
#
# Write claim 1, stable and in place: out and lse are changed, nothing is returned. Mind rows where one lse or both are
# -inf, and blocks whose out is not float32.

# %% slideshow={"slide_type": "fragment"}
def merge(out, lse, out_block, lse_block):
    """Merges a block's result into out (..., N, D) and lse (..., N), float32, in place."""
    raise Blank


check("04.1", merge)

# %% [markdown] slideshow={"slide_type": "subslide"}
# ### One hop
#
# A **hop** sends the keys of every rank to the next one. If all ranks first sent and then received, each would wait for the
# next one for ever. So both halves are **posted** together, which only starts them, and waited for afterwards.
#
# `launch.Ranks` starts processes that send each other messages, here over **gloo**, torch's library for CPUs; with GPUs
# it is NCCL. In the test every rank sends its own number, twice.

# %% slideshow={"slide_type": "fragment"}
# When this runs as a plain script, the new processes must not run the file again.
globals().pop("__file__", None)
two_ranks = launch.Ranks(2)
print("\n".join(two_ranks.run(lesson_1_hop.worker)))
show("step04_ring/strategies/lesson_1_hop", "hop")

# %% [markdown] slideshow={"slide_type": "subslide"}
# ### Overlap
#
# The first block of scores does not need the message. So a rank posts the hop, computes with the keys that it has, and only
# then waits: **overlap**.
#
# **Predict.** A hop takes h, a block b. How long do two blocks and the hop take, without overlap and with it?
#
# <details><summary>Answer</summary>
#
# h + 2b, and max(h, b) + b. If the hop is the shorter of the two, it is free.
#
# </details>
#
# In the test a block only sleeps for 100 ms, as a processor may while its GPU computes. What is measured can be some
# milliseconds more: over gloo the processors themselves copy the message, and `post` takes time before the block begins.

# %% slideshow={"slide_type": "fragment"}
ms = two_ranks.run(lesson_2_overlap.worker, 2**15)[0]  # so many keys travel
b = 100
h = ms[False] - 2 * b
print(f"in sequence {ms[False]:.0f} ms, so h is {h:.0f} ms")
print(f"overlapped: predicted {max(h, b) + b:.0f} ms, measured {ms[True]:.0f} ms")

# %% [markdown] slideshow={"slide_type": "slide"}
# ## 3. The ring
#
# ### The ring, in one process
#
# Every rank keeps its queries. In each of N steps it attends to the keys at hand, merges, and hands the keys on. This is
# all of it, with two ranks of three tokens. The ranks are a loop here, and a hop turns a list.

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
    at_hand = at_hand[-1:] + at_hand[:-1]  # the hop: rank r gets what rank r - 1 had
want, want_lse = step00.forward(Q, K, V)
print("as on one device:", torch.allclose(torch.cat(out), want, atol=1e-6))

# %% [markdown] slideshow={"slide_type": "subslide"}
# Follow rank 1, whose last query is query 5. In step 0 it has its own keys, and gets B's result with lse 4.65. In step 1
# rank 0's keys have arrived: A's result, with lse 2.36. Merged, that is (6.83, 1.34) again.
#
# A rank holds two pairs of K and V, the one at hand and the one that is arriving: 2 / N of all. There are N blocks and
# N - 1 hops; Ring Attention's Algorithm 1 prints N - 1 rounds, which leaves a block out.
#
# ### Line by line
#
# | line | what it does | in [`step04_ring`](../steps/step04_ring/README.md) |
# |---|---|---|
# | 1 | out = 0, lse = -inf, float32 | `merge.py`: `Parts`, which keeps up to four parts and merges them at once |
# | 4, 9 | post the hop, later wait for it | `relay.py` |
# | 5 | a block: any kernel that gives (out, lse) | the argument `block` |
# | 6–8 | merge | `merge.py`: `merge` |
# | 10–17 | the backward | `ring.backward` |
#
# In this function `src` is the rank whose keys have come, and `work_of` says which of them a causal mask lets us see. A
# **transport** is what brings the keys; `Relay` does so by hops. The six tokens go through it in two processes:

# %% slideshow={"slide_type": "fragment"}
for rank, (out_r, lse_r) in enumerate(two_ranks.run(figures.ring_on_this_rank, Q, K, V)):
    same = torch.allclose(out_r, out[rank]) and torch.allclose(lse_r, lse[rank])
    print(f"rank {rank}: last query {out_r[2]}, lse {lse_r[2]:.2f}; as in the loop: {same}")
show("step04_ring/ring", "forward")

# %% [markdown] slideshow={"slide_type": "slide"}
# ## 4. The backward
#
# With $P_{ij} = e^{S_{ij} - \mathit{lse}_i}$ and $\mathit{delta}_i = dO_i \cdot O_i$ it is
# $dS_{ij} = P_{ij}\,(dP_{ij} - \mathit{delta}_i)$. Two numbers of the *whole row* enter, lse and delta. The rest belongs to
# one query and one key.
#
# **Claim 3.** With the final lse and out every block's gradients are right, and are simply added. No merge is needed.
# With a block's own lse and out they are wrong:

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
# dQ stays with its rank. dK and dV are sums over the queries of *all* ranks. They travel with their K and V, and must end
# at their owner. If the ring turns round, this takes no extra hop. The backward begins with the keys that the forward ended with, those
# of rank + 1, and ends with the rank's own. It is `backward` in [ring.py](../steps/step04_ring/ring.py).

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
    sent to after it; None where nobody needs them any more, or where they have arrived.
    """
    raise Blank


check("04.2", reverse_step)

# %% [markdown] slideshow={"slide_type": "slide"}
# ## 5. Layouts
#
# ### Who waits for whom
#
# Under a causal mask late queries see much, and early ones little. In each step every rank waits for its neighbour's
# keys, so that the slowest rank sets the pace. It matters which positions a rank holds, its **layout**. The figure deals 8
# positions to 4 ranks. **How many ranks have something to compute in step 3?**

# %% slideshow={"slide_type": "fragment"}
figures.who_computes()

# %% [markdown] slideshow={"slide_type": "subslide"}
# **Contiguous**: rank 3 alone. **Zigzag** gives each rank an early and a late chunk: in every step all do equally much.
# **Striped** deals positions like cards, which is nearly as good.
#
# Count a block of c² scores as one, c = S / N, and one on the diagonal as half. Contiguous, the last rank has N - 1/2
# blocks to do and the mean rank N / 2, so that the mean rank computes N / (2N - 1) of the time. The
# [player](../notebooks/site/player.md), a page of the course's site, lets you go through the steps one by one.
#
# The timeline is a model: a hop begins when both of its ranks have posted it, a step when the block and the hops before
# it are done. Blocks are as fast as stage 02's recorded rows on an H200, the link as the rows of NCCL's messages between
# two. A bar's colour says whose keys it computes with.

# %% slideshow={"slide_type": "fragment"}
for N in (2, 4, 64):
    found = [figures.efficiency(kind, N) for kind in ("contiguous", "zigzag")]
    print(f"{N:2} ranks: contiguous {found[0]:.2f}, zigzag {found[1]:.2f};", end=" ")
    print(f"N / (2N - 1) = {N / (2 * N - 1):.2f}")
figures.waiting("contiguous")

# %% slideshow={"slide_type": "fragment"}
figures.waiting("zigzag")

# %% [markdown] slideshow={"slide_type": "subslide"}
# ### Exercise 04.3: which part each rank computes
#
# Write the table behind `work_of`: which of rank me's q queries see which of rank src's k keys, and whether there is a
# diagonal. The figure has the answer for 8 positions; in general chunks differ in length, so that q and k may differ.

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
# `report` runs the ring on random input, forward and backward, and compares with one device. What is left has to be the
# rounding of float32.

# %% slideshow={"slide_type": "fragment"}
with two_ranks:  # ends them afterwards
    for kind in ("contiguous", "zigzag", "striped"):
        *_, last = two_ranks.run(demo.report, 259, 32, 2, True, kind, "float32")[0]
        print(f"{kind:10}", last.removeprefix("largest differences to one device: "))

# %% [markdown] slideshow={"slide_type": "subslide"}
# ### Three mistakes
#
# Now break a merge and two tables of work, on four ranks. **Which of the three would live through tests without a causal
# mask? Which needs one particular layout?**
#
# <details><summary>Answer</summary>
#
# Both wrong tables; `key_too_many` needs striped, which alone has a diagonal with a later rank's keys. White in the figure:
# the mistake changes no number of this input.
#
# </details>

# %% slideshow={"slide_type": "fragment"}
def averaged(out, lse, out_block, lse_block):
    out.copy_((out + out_block) / 2)
    lse.copy_(torch.logaddexp(lse, lse_block))


def no_diagonal(layout, me, src, work=Layout.work):
    return (found := work(layout, me, src)) and (*found[:2], False)


def key_too_many(layout, me, src, work=Layout.work):
    found, n = work(layout, me, src), min(layout.size(me), layout.size(src))
    leaks = layout.causal and layout.kind == "striped" and src > me
    return (slice(0, n), slice(0, n), True) if leaks and found else found


# %% slideshow={"slide_type": "fragment"}
figures.mistakes_seen(merge=[averaged], work=[no_diagonal, key_too_many])

# %% [markdown] slideshow={"slide_type": "slide"}
# ## 7. Predict, then measure
#
# Two H200 share a causal sequence of 32k positions. **Which efficiency do you expect of contiguous, which of zigzag?**
# Efficiency is the time of one GPU divided by 2 and by the ring's time.
#
# <details><summary>Answer</summary>
#
# At most N / (2N - 1) = 0.67 for contiguous, and 1 for zigzag. Measured: 0.64 and 0.90. Messages, merging and launches take
# the rest.
#
# </details>

# %% slideshow={"slide_type": "fragment"}
print(figures.layouts_measured())

# %% [markdown] slideshow={"slide_type": "slide"}
# ## 8. Summary
#
# - (out, lse) is all there is to know of the keys seen so far; two such pairs merge exactly, in any order.
# - Queries stay, keys and values travel: N blocks, N - 1 hops, each posted before the block that hides it.
# - The backward needs no merge: the final lse and delta are right in every block. It runs the ring in reverse.
# - The slowest rank of a step sets the pace. Under a causal mask contiguous wastes up to half, zigzag nothing.
#
# **Ask yourself**
#
# 1. Why need no maximum travel with (out, lse)?
#    <details><summary>Answer</summary>
#
#    m was only the unit in which l was counted, and lse = m + log l has absorbed it.
#    </details>
# 2. Why is rank 0 of the contiguous layout idle and yet not free to leave?
#    <details><summary>Answer</summary>
#
#    The keys of other ranks pass through it. Without its hops the ring is cut.
#    </details>
# 3. How many hops would dK and dV need if the backward turned the same way as the forward, own block first?
#    <details><summary>Answer</summary>
#
#    N. After N - 1 hops they are with the rank before their owner, and one more takes them home.
#    </details>
# 4. What may be done between `post` and `wait` with the tensor that is sent, and with the one that arrives?
#    <details><summary>Answer</summary>
#
#    The sent one may be read, not changed. The arriving one may not be touched at all.
#    </details>
# 5. One rank passes `causal=True`, the others do not. What would happen if the ranks did not compare their calls?
#    <details><summary>Answer</summary>
#
#    All messages fit, so nothing hangs: one rank's rows of out are masked, the others' are not.
#    </details>

# %% [markdown] slideshow={"slide_type": "subslide"}
# ### Go further
#
# - **Bug hunt 04.bug2, "NaN at the beginning".** On 2 ranks everything is right; on 4 the first queries of a causal call
#   are NaN, though their lse is right. `python -m steps check 04.bug2` writes `my/04_bug2.py` with the whole complaint.
# - ★ (15 minutes) `simulate.gantt` with `Machine(..., slow={1: 2.0})`, rank 1 half as fast: who notices, and when?
# - ★★ (1 hour) Give the ring of two ranks in one process a causal mask, by `Layout("zigzag", 6, 2, causal=True).work`.
# - ★★★ (a weekend) Zigzag sends late chunks to ranks that never use them. Send each half only as far as it is needed.
#
# **Read:** [papers/ring_attention.md](../papers/ring_attention.md),
# [papers/striped_attention.md](../papers/striped_attention.md),
# [papers/blockwise_parallel_transformer.md](../papers/blockwise_parallel_transformer.md).
#
# **Next:** [04b_strategies.ipynb](04b_strategies.ipynb), other ways to share a sequence, and what each costs. For
# specialists: [04x_deeper.ipynb](04x_deeper.ipynb).
