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
# # 04x. Going deeper: roundings, bytes, time and failures of a ring
#
# *What may be rounded on the way, what does each strategy send and hold, how well can the time be predicted, and what do
# ranks say when one of them fails?*
#
# - **Before you start:** notebooks 04a and 04b. Each section can be read alone.
# - **Time:** about 45 minutes to read, in six sections. Nothing here needs a GPU.
# - **Code:** [`steps/step04_ring`](../steps/step04_ring/README.md), and what counts and draws,
#   [`n04x_deeper.py`](../steps/course/figures/n04x_deeper.py) and
# [`ring_tables.py`](../steps/course/figures/ring_tables.py).

# %% jupyter={"source_hidden": true} slideshow={"slide_type": "skip"}
import steps  # comes first, because it chooses the engine
from functools import partial
import torch
from reference import attention
from steps.course.figures import n04x_deeper as figures, ring_tables
from steps.step04_ring import Layout, dry_run, forward, merge, simulate, strategies
from steps.course.workbook.case_on_ranks import PlainBlock
print(steps.engine.describe())

# %% [markdown] slideshow={"slide_type": "slide"}
# ## 1. What may be rounded
#
# This section needs 04a's merge. Suppose the merged out is rounded to bfloat16 after every merge. **Does the error grow
# with the number of ranks? Is it worse than if only each *block's* result comes rounded?**
#
# <details><summary>Answer</summary>
#
# A block's rounding enters with the block's weight, and the weights add up to 1: the error does not grow with N. The
# merged out is rounded as a whole, once a step, so its error grows with the number of ranks. Rounding lse too is worse:
# an absolute error d in lse changes each weight by the factor $e^d$.
#
# </details>

# %% slideshow={"slide_type": "fragment"}
def ring_error(N, rounds):
    """The error of out. Rounded: "b" a block's out, "o" the merged out, "l" lse."""
    def kept(x, what):
        return x.bfloat16().float() if what in rounds else x

    out, lse = torch.zeros_like(q), torch.full(q.shape[:-1], -torch.inf)
    for keys, values in zip(k.chunk(N, 2), v.chunk(N, 2), strict=True):
        part, part_lse = PlainBlock.forward(q, keys, values, tile=(256, 256))
        merge.merge(out, lse, kept(part, "b"), part_lse)
        out, lse = kept(out, "o"), kept(lse, "l")
    return (out - exact).abs().max() / exact.abs().max()


# %% slideshow={"slide_type": "fragment"}
q, k, v = torch.randn(3, 1, 1, 512, 64, generator=torch.Generator().manual_seed(0))
exact, _ = attention.forward(q, k, v)
names = {"": "nothing", "b": "a block's out", "o": "merged out", "ol": "merged out and lse"}
print("rounded to bfloat16    " + "".join(f"{N:5} ranks" for N in (1, 4, 16, 64)))
for rounds, name in names.items():
    print(f"{name:22} ", *(f"{ring_error(N, rounds):10.1e}" for N in (1, 4, 16, 64)))

# %% [markdown] slideshow={"slide_type": "subslide"}
# ### What the stage does about it
#
# out, lse, and the sums of dq, dk and dv are float32, and relay sends its sums in float32. Fetch sends each part once, as
# the block gives it, and the owner adds them in float32: that is the second line.

# %% [markdown] slideshow={"slide_type": "slide"}
# ## 2. Bytes and memory of four strategies
#
# This section needs 04b's table of who sends what. `account.py` has the formulas, and what four real ranks send equals them
# to the byte. So they may be asked about sizes that no CPU can run: four ranks with 32k tokens, a layer with H = 32 and
# D = 128 in bfloat16.

# %% slideshow={"slide_type": "fragment"}
layout = Layout("zigzag", 2**15, 4, causal=True)
for name in strategies.LESSONS:
    for Hk in (32, 8):
        at = dict(B=1, H=32, Hk=Hk, D=128, e=2)  # bytes of an element
        sent = strategies.account.sent_bytes(name, layout, 0, **at)[0]  # forward, rank 0
        held = strategies.account.memory_bytes(name, layout, 0, **at)
        print(f"{name:14} Hk = {Hk:2}: sends {sent / 1e6:4.0f} MB,",
              f"holds {held / 1e6:4.0f} MB more")

# %% [markdown] slideshow={"slide_type": "subslide"}
# ### What it costs in time
#
# At Hk = 32 Ulysses sends half of what the others send; at Hk = 8 query-parallel and the ring send less. What the ring
# holds for K and V does not grow with N, and that of query-parallel does. Measured on four GPUs of one host:

# %% slideshow={"slide_type": "fragment"}
print(ring_tables.shown("strategies", ring_tables.recorded("H200", n_gpus=4)))

# %% [markdown] slideshow={"slide_type": "subslide"}
# ### How to read it
#
# At 32k the ring over fetch is the fastest. At 128k it is, too, but for forward + backward with Hk = 8: there Ulysses takes
# 218 ms and the ring 222, which adds to dQ in a fixed order. At 8k all wait for the **host**, the CPU that starts all
# kernels: whoever asks the GPU for the fewest things is in front. This table is of another run than 04b's:
# from 32k on, the rings' times differ by up to 12 %. On two H200 the ring over fetch was the fastest at every size.
#
# ### A single new token
#
# Star is never the best in this table. But take one new query against a cache of keys that the ranks share. Star sends
# each rank's part of the result, out and lse, to all others. The rest would gather the keys.

# %% slideshow={"slide_type": "fragment"}
N, H, Hk, D = 4, 32, 8, 128
for keys in (2**13, 2**17):
    gathered = (N - 1) * 2 * Hk * (keys // N) * D * 2
    parts = (N - 1) * H * (D + 1) * 4  # out and lse, float32
    print(f"{keys:7,} keys: star sends {parts:,} bytes a rank, gathering {gathered:,}")

# %% [markdown] slideshow={"slide_type": "slide"}
# ## 3. A model of the ring's time
#
# This section needs 04b's two transports. `simulate.py` is an **event model**: it knows how fast a block and a link are,
# and works out when each block and each message can begin. For relay that is when both ranks have posted the hop; for
# fetch when one of two buffers is free.
#
# Four ranks at 8k positions, Hk = H, with blocks and links as fast as their rows on H200. Here a rank has only 2k tokens,
# too few to hide a message. The third picture is a backward at 32k.

# %% slideshow={"slide_type": "fragment"}
figures.timeline("zigzag", "relay", S=2**13)

# %% slideshow={"slide_type": "fragment"}
figures.timeline("zigzag", "fetch", S=2**13)

# %% slideshow={"slide_type": "fragment"}
figures.timeline("zigzag", "fetch", pass_="bwd")

# %% [markdown] slideshow={"slide_type": "subslide"}
# ### Is the model right?
#
# Its limits are known: over an infinitely fast link contiguous must reach N / (2N - 1), and zigzag 1. Then it is compared
# with what two and four H200 did, at lengths that do not wait for the host.

# %% slideshow={"slide_type": "fragment"}
instant = simulate.Machine(flops=6e14, link=1e30)
for N in (4, 64):
    for kind in ("contiguous", "zigzag"):
        layout = Layout(kind, 1024 * N, N, causal=True)
        share = simulate.predict(layout, simulate.Shape(), instant)["fwd"][1]
        limit = {"contiguous": f"N / (2N - 1) = {N / (2 * N - 1):.4f}", "zigzag": "1"}[kind]
        print(f"{kind:10} {N:2} ranks: {share:.4f}, its limit {limit}")
print(ring_tables.shown("predictions", ring_tables.recorded()))

# %% [markdown] slideshow={"slide_type": "subslide"}
# ### More and more hosts
#
# On two GPUs all are within a tenth, and on four at 128k. At 32k on four, relay's forward takes longer than the model says:
# a hop of NCCL's took 0.83 to 1.01 ms there (04b's picture), twice the model's time, which is that between two. And
# forward + backward takes less. Most of the difference comes from one number: the cost of the fixed order (section 4) was
# measured in another run, where the ring over fetch took 14.5 instead of 13.5 ms.
#
# Now ask it what cannot be tried here: hosts of 8 GPUs, and between them a network with the
# whole, a quarter or a sixteenth of the speed of relay's link. **What happens to the efficiency with the second host, and
# what with further ones?**
#
# <details><summary>Answer</summary>
#
# One hop in eight crosses the network, and every rank moves at the slowest link's pace. If a rank has fewer tokens than
# that link needs, efficiency falls with the second host. Further hosts change little, as a rank's work grows with N.
#
# </details>

# %% slideshow={"slide_type": "fragment"}
link = figures.machine("relay").link
print("network   Hk   tokens a rank" + "".join(f"{N:6} GPUs" for N in (8, 16, 64, 1024)))
for part in (1, 4, 16):
    hosts = figures.machine("relay", host=8, network=link / part)
    for Hk, c in ((32, 2**13), (32, 2**15), (8, 2**13)):
        found = simulate.scale_out(hosts, simulate.Shape(Hk=Hk), c, (8, 16, 64, 1024))
        shares = "".join(f"{share:11.2f}" for _, share in found)
        print(f"link / {part:2} {Hk:3} {c:15,}{shares}")

# %% [markdown] slideshow={"slide_type": "subslide"}
# ### How to read it
#
# Efficiency may come near 1, or pass it. It is measured against one GPU with the whole causal sequence, whose kernel is
# slower with a mask up to 8k, while most of the ring's blocks have none. The model leaves out links that several
# messages share, and the multiprocessors that NCCL takes from a block.
#
# ### And the results?
#
# Where a machine is not there, its *results* can be: `dry_run.py` computes those of any number of ranks in one process,
# from the same table of work as the ring. Here are 256 ranks, with 2 or 3 positions each.

# %% slideshow={"slide_type": "fragment"}
q, k, v = torch.randn(3, 1, 2, 700, 16, generator=torch.Generator().manual_seed(0))
out, _ = dry_run.dry_run(q, k, v, Layout("zigzag", 700, 256, causal=True), PlainBlock)
want, _ = attention.forward(q, k, v, causal=True)
print(f"256 ranks: largest difference to one device {(out - want).abs().max():.0e}")

# %% [markdown] slideshow={"slide_type": "slide"}
# ## 4. A fixed order, a CUDA graph, a million tokens
#
# This section needs 04b's table of speed. There the ring over fetch has 0.89 to 0.92 of four GPUs in forward + backward
# from 32k on. (The table below is another run, where it has 0.84 to 0.90.) But the ring adds to dQ in a fixed order, so
# that dq is bit-equal from run to run, and the one GPU beside it does not. What remains if both do the same?

# %% slideshow={"slide_type": "fragment"}
print(ring_tables.shown("orders", ring_tables.recorded("H200")))

# %% [markdown] slideshow={"slide_type": "subslide"}
# ### How to read it
#
# Two pairs compare like with like: the ring against one GPU where both add in any order (the first number of "any
# order"), and where both add in a fixed order (the second of "fetch"). These are between 0.96 and 0.99 on two GPUs, and
# between 0.88 and 1.00 on four. So on two GPUs most of what the ring seemed to lose is the price of the order, not of
# the hops. On four it is more than half, compared in any order, but a quarter to about a half, compared in a fixed
# order: with Hk = 8 at 32k, 0.84 becomes 1.00 or 0.88. At 128k with Hk = 32 the order makes the call of four GPUs 9 %
# longer (225 ms for 206), and that of one GPU 8 % (840 for 781).
#
# And what does the ring cost at 8k if Python is out of the way? A **CUDA graph** records the launches of a call once, and
# replays them without the host:

# %% slideshow={"slide_type": "fragment"}
print(ring_tables.shown("graphs", ring_tables.recorded()))

# %% [markdown] slideshow={"slide_type": "subslide"}
# On four GPUs a rank has a fifth of a millisecond of work for a forward. The host needs far longer to ask for it: as a
# graph the forward took 0.23 and 0.19 of the time, and forward + backward 0.32 and 0.27. Then the efficiency of forward +
# backward is 0.50 and 0.58 instead of 0.16 and 0.15. The rest are hops that nothing hides.
#
# In a graph two launches have an order only if one waits for the other. One graph that was tried was slower than no
# graph: it started the first block together with the copy of the rank's own K and V. That block took all
# multiprocessors, so the next small kernel, and behind it the hop, waited until the block ended. Now the block waits
# for the barrier in front of the hop (`fetch.py`).
#
# Once the ring was also run at a million positions, with 8 query heads and 2 heads of K and V, on two and on four H200:
# 1.70 and 0.89 seconds forward, 6.87 and 3.38 forward + backward. Each of the four did 630 and 582 TFLOP/s.

# %% [markdown] slideshow={"slide_type": "slide"}
# ## 5. With FSDP and tensor parallelism
#
# A `DeviceMesh` is torch's grid of ranks, with a name for each dimension. The ring is one dimension: pass
# `group=mesh["context"].get_group()` to `attention`. **FSDP** divides the weights over all ranks, and averages
# gradients. So each rank's loss, which is divided by all labels, has to be multiplied by the number of ranks. **Tensor
# parallelism** divides the heads. With T-way tensor parallelism there are T rings, each with H / T query heads and Hk /
# T key heads, at the same c.

# %% [markdown] slideshow={"slide_type": "slide"}
# ## 6. When a rank fails
#
# In a ring everybody soon waits for everybody, so that the neighbour that a rank waits for is seldom the culprit. Every
# rank therefore publishes where it stands, and whoever fails first compares. Rank 2 is killed; what do the others say?

# %% slideshow={"slide_type": "fragment"}
x = torch.zeros(1, 1, 4, 16, device=steps.engine.device)
call = partial(forward, block=PlainBlock)
four_ranks = figures.ranks(4, timeout=4)  # seconds; 60 is the default
four_ranks.run(call, x, x, x)
four_ranks.processes[2].kill()
figures.what_ranks_say(lambda: four_ranks.run(call, x, x, x))

# %% [markdown] slideshow={"slide_type": "subslide"}
# ### Ranks that do not make the same call
#
# Ranks 1 and 3 see at once that a connection is gone, and name rank 2. Rank 0 waits until its timeout.
# If it has not answered 5 s after the first failure, the program that started the ranks stops waiting, and says "no
# answer"; otherwise rank 0 names rank 2, too. "Call 0" is what rank 2 had *written down
# last*, before its first call. Ranks write four times a second where they stand, and rank 2 was killed before it wrote
# that this call was done. So a dead rank's note may be older than its death.
#
# Another failure is silent in many programs: ranks that do not make the same call. If the messages fit, the results are
# wrong. So every call is compared, here on two ranks that both bring four positions, while they say that S is nine:

# %% slideshow={"slide_type": "fragment"}
figures.what_ranks_say(lambda: figures.ranks(2).run(partial(forward, S=9), x, x, x))

# %% [markdown] slideshow={"slide_type": "subslide"}
# **Try it.** ★ (15 minutes) Let rank 1 sleep instead: `steps/step04_ring/ranks/watch.py` says how a rank that is slow
# is told from one that hangs.
