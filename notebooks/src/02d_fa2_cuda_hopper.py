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
# # 02d. Hopper: nobody waits
#
# ## 1. The question
#
# *On an H100 or H200, what keeps the tensor cores idle, and what do its asynchronous units change?*
#
# > **Note** This is an outline. The kernels it leads to (`wgmma`, `roles`, `hopper`, and before them the tensor-core
# > rungs of 02b) are not in `steps/step02_fa2_cuda/` yet; only `scalar` is. What runs here today are small models of
# > what those kernels must get right: clocks, barriers, the swizzle, registers, the order of tiles.
#
# - **Before you start:** 02b. **Time:** about 30 minutes, as much again for the exercises.
# - **Hardware:** any; nothing here is launched on a GPU.
# - **Code:** `steps/step02_fa2_cuda/`. **Tests:** `pytest tests/test_step02_fa2_cuda.py`.

# %% slideshow={"slide_type": "skip"}
import steps  # first: it chooses the engine
import heapq

import matplotlib
import matplotlib.pyplot as plt

from reference.bench import cost, plots, rows
from reference.bench.plots import COLOURS, FAINT, INK, style
from steps import step02_fa2_cuda as step02
from steps.workbook import picture

style()
print(steps.engine.describe())
print("matplotlib", matplotlib.__version__)
print("rungs of stage 02 today:", ", ".join(step02.SUPPORTS["rungs"]))

# %% [markdown] slideshow={"slide_type": "slide"}
# ## 2. The problem, counted
#
# Take one 128 x 128 tile of scores on one multiprocessor (SM) and count clocks: 4 x 128 x 128 x D FLOP for S and P V on
# the tensor cores, one exp a score on the special-function units, and four float32 instructions a score (scale and
# subtract, maximum, sum, convert) plus the rescaling of O. The rates a clock are in NVIDIA's H100 whitepaper and the
# CUDA C++ Programming Guide's table of arithmetic throughput. All four instructions count at the full rate, which
# flatters maximum and conversion.

# %% slideshow={"slide_type": "fragment"}
TENSOR, EXP, FP32 = 4096, 16, 128  # FLOP, results, instructions: a clock and SM


def tile_clocks(D, Br=128, Bc=128):
    """Clocks on the tensor cores, the special-function units and the float32 pipe for one tile of scores."""
    return 4 * Br * Bc * D // TENSOR, Br * Bc // EXP, (4 * Br * Bc + Br * D) // FP32


h200 = cost.GPUS["NVIDIA H200"]
ghz = 1e3 * h200.half_tflops / h200.sms / TENSOR
print(f"check: {h200.half_tflops} TFLOP/s / ({h200.sms} SMs x {TENSOR}) = {ghz:.2f} GHz")
for D in (64, 128, 256):
    tensor, exp, fp32 = tile_clocks(D)
    after, under = tensor / (tensor + exp + fp32), tensor / max(tensor, exp + fp32)
    print(f"D = {D:3}: tensor {tensor}, exp {exp}, fp32 {fp32}. Tensor cores busy {after:.0%};",
          f"{under:.0%} if softmax runs under the products")  # fmt: skip

# %% slideshow={"slide_type": "fragment"}
fig, ax = plt.subplots(figsize=(7.6, 2.9), layout="constrained")
for y, D in enumerate((64, 128, 256)):
    start = 0
    names = ("tensor cores", "exp", "fp32 pipe")
    for clocks, colour, name in zip(tile_clocks(D), COLOURS[:3], names, strict=True):
        ax.barh(y, clocks, left=start, height=0.6, color=colour, label=name if y == 0 else None)
        ax.text(start + clocks / 2, y, clocks, ha="center", va="center", color="white")
        start += clocks
ax.set_yticks(range(3), ["D = 64", "D = 128", "D = 256"])
ax.set(xlabel="clocks for one 128 x 128 tile, one after the other", ylim=(2.5, -0.5))
ax.grid(axis="y", visible=False)
ax.legend(ncols=3, loc="lower center", bbox_to_anchor=(0.5, 1))
picture(fig, """Bars of clocks a tile. Tensor cores take 1024, 2048 and 4096 at D = 64, 128 and 256; exp always
1024; the float32 pipe 576, 640 and 768. At D = 64 exp takes as long as the products, at D = 128 half as long.""")

# %% [markdown] slideshow={"slide_type": "slide"}
# ## 3. The idea: take turns
#
# At D = 128 the exponentials cost half of the products' clocks (FlashAttention-3, section 3.1), and a kernel that does
# one thing after the other keeps the tensor cores busy only 55 % of the time. The units are separate; only the *program*
# makes them wait. Hopper lets it go on: TMA copies a tile while no thread attends, and `wgmma`, a product of 128
# threads (a warpgroup), runs while its threads compute something else.
#
# **Claim.** If two warpgroups take turns, one's softmax can hide under the other's products (**ping-pong**). First
# without turns: both ask for the same unit at once, each gets half of it, and both finish late.

# %% slideshow={"slide_type": "fragment"}
def lockstep(product, softmax, steps):
    """(unit, warpgroup, start, end): both in the same phase, sharing its unit."""
    timeline, period = [], 2 * product + 2 * softmax
    for start in range(0, steps * period, period):
        for wg in (0, 1):
            turn = start + 2 * product
            timeline += [("products", wg, start, turn), ("softmax", wg, turn, start + period)]
    return timeline


def ping_pong(product, softmax, steps):
    """The same with turns: each unit serves one warpgroup at a time, and they alternate."""
    tensor_free = softmax_free = 0
    ready, timeline = [0, 0], []
    for _ in range(steps):
        for wg in (0, 1):
            start = max(tensor_free, ready[wg])
            tensor_free = start + product
            begin = max(tensor_free, softmax_free)
            ready[wg] = softmax_free = begin + softmax
            timeline += [("products", wg, start, tensor_free), ("softmax", wg, begin, ready[wg])]
    return timeline


# %% slideshow={"slide_type": "fragment"}
for D in (64, 128, 256):
    tensor, exp, fp32 = tile_clocks(D, Br=64)  # each warpgroup has 64 rows
    last = [max(end for *_, end in plan(tensor, exp + fp32, 100)) for plan in (lockstep, ping_pong)]
    busy = [2 * 100 * tensor / end for end in last]
    print(f"D = {D:3}: tensor cores busy {busy[0]:.0%} in lockstep, {busy[1]:.0%} in ping-pong (100 steps)")

# %% slideshow={"slide_type": "subslide"}
fig, axes = plt.subplots(2, 2, figsize=(9, 3.8), sharex=True, layout="constrained")
for column, D in zip(axes.T, (64, 128), strict=True):
    tensor, exp, fp32 = tile_clocks(D, Br=64)
    for ax, plan in zip(column, (lockstep, ping_pong), strict=True):
        for unit, wg, start, end in plan(tensor, exp + fp32, 3):
            colour = COLOURS[unit == "softmax"]
            ax.barh(wg, end - start, left=start, height=0.7, edgecolor="white", color=colour)
        ax.set(title=f"D = {D}, {plan.__name__.replace('_', '-')}", ylim=(1.6, -0.6), xlim=(0, 11500))
        ax.set_yticks((0, 1), ("group 0", "group 1"))
        ax.grid(axis="y", visible=False)
for ax in axes[1]:
    ax.set_xlabel("clocks, three steps a warpgroup")
fig.legend(ax.patches[:2], ("products", "softmax"), ncols=2, loc="outside upper center")
picture(fig, """Timelines of two warpgroups over three steps. In lockstep both do products, then both softmax, and tensor cores
rest meanwhile. In ping-pong one's softmax lies under the other's products: at D = 128 the products follow each other
without a gap, at D = 64 the softmaxes do.""")

# %% [markdown] slideshow={"slide_type": "fragment"}
# With turns, D = 128 keeps the tensor cores busy; at D = 64 softmax is the wall, whatever the schedule. These are
# ceilings of a model: nothing is said about power, memory or the cost of a barrier.

# %% [markdown] slideshow={"slide_type": "slide"}
# ### How to wait: a barrier with a parity
#
# A producer copies tiles into a ring of stages; a consumer computes. Each stage has two mbarriers, `full` and `empty`.
# An mbarrier counts arrivals; when all have come, its **phase** is complete and the next begins. The wait asks only: "is
# the phase of parity p complete?" (`mbarrier.try_wait.parity`, PTX ISA). On a fresh barrier parity 1 counts as complete
# ("the phase before the first"), parity 0 does not. So the consumer starts waiting with 0, the producer with 1, and
# both flip when the ring wraps.

# %% slideshow={"slide_type": "fragment"}
class Mbarrier:
    """Completes a phase with every arrival (a real one counts to any number)."""

    def __init__(self):
        self.phase, self.history = 0, [(0, 0)]  # the phase under way; (clock, phase)

    def complete(self, parity):
        return parity != self.phase

    def arrive(self, clock):
        self.phase ^= 1
        self.history.append((clock, self.phase))


class Ring:
    def __init__(self, stages=2, tiles=6, copy=3, compute=2):
        self.stages, self.tiles, self.takes = stages, tiles, {"producer": copy, "consumer": compute}
        self.full, self.empty = ([Mbarrier() for _ in range(stages)] for _ in range(2))
        self.holds, self.clock = [None] * stages, 0  # which tile a stage holds
        self.timeline, self.waits, self.wrong = [], {}, []


# %% slideshow={"slide_type": "fragment"}
def role(ring, name, parity):
    """The code of one side. Each `yield` hands back a condition and goes on when it holds."""
    wait_on, signal = (ring.empty, ring.full) if name == "producer" else (ring.full, ring.empty)
    for n in range(ring.tiles):
        stage = n % ring.stages
        ring.waits[name] = f"stage {stage} for tile {n}, parity {parity}"
        yield lambda barrier=wait_on[stage], parity=parity: barrier.complete(parity)
        if name == "consumer" and ring.holds[stage] != n:
            ring.wrong.append(f"clock {ring.clock}: reads stage {stage} for tile {n}; it holds {ring.holds[stage]}")
        done = ring.clock + ring.takes[name]
        ring.timeline.append((name, n, ring.clock, done))
        yield lambda done=done: ring.clock >= done
        if name == "producer":
            ring.holds[stage] = n
        signal[stage].arrive(ring.clock)
        parity ^= stage == ring.stages - 1  # the ring wraps


# %% slideshow={"slide_type": "fragment"}
def run(ring, producer_parity=1, consumer_parity=0):
    """Runs both sides until they are done, or stuck; returns the ring with its timeline and what went wrong."""
    parities = {"producer": producer_parity, "consumer": consumer_parity}
    sides = {name: role(ring, name, parity) for name, parity in parities.items()}
    condition = {name: next(side) for name, side in sides.items()}
    while any(condition.values()) and ring.clock < 40:
        for name in 2 * list(sides):  # twice: an arrival may let the other side go on
            while condition[name] and condition[name]():
                condition[name] = next(sides[name], None)
        ring.clock += any(condition.values())
    ring.wrong += [f"stuck: {name} waits on {ring.waits[name]}" for name in sides if condition[name]]
    return ring


two, one = run(Ring(stages=2)), run(Ring(stages=1))
print(f"two stages: {two.clock} clocks, wrong: {two.wrong}")
print(f"one stage:  {one.clock} clocks, wrong: {one.wrong}")
for says, parities in {"producer starts with 0": (0, 0), "consumer starts with 1": (1, 1)}.items():
    print(f"{says}:", *run(Ring(), *parities).wrong, sep="\n   ")

# %% slideshow={"slide_type": "skip"}
def draw_ring(ax, ring, title, end):
    ax.barh(["producer", "consumer"], 0)
    for name, n, start, stop in ring.timeline:
        colour = COLOURS[(0, 1)[n % ring.stages]]
        ax.barh(name, stop - start, left=start, height=0.7, color=colour, edgecolor="white")
        ax.text((start + stop) / 2, name, n, ha="center", va="center", color="white")
    for kind, stage in (("full", 0), ("full", 1), ("empty", 0), ("empty", 1)):
        changes, y = [*getattr(ring, kind)[stage].history, (end, None)], f"{kind}[{stage}]"
        for (start, phase), (stop, _) in zip(changes, changes[1:], strict=False):
            ax.barh(y, stop - start, left=start, height=0.55, color=(FAINT, "#6a6a6a")[phase], edgecolor="white")
            ax.text(start + 0.2, y, phase, va="center", fontsize=8, color=(INK, "white")[phase])
    for n, wrong in enumerate(ring.wrong):
        ax.text(0.5, n, wrong, va="center", fontsize=9, color=COLOURS[1])
    ax.set(title=title, xlim=(0, end), xticks=range(0, end + 1, 2))
    ax.invert_yaxis()
    ax.grid(axis="y", visible=False)


# %% slideshow={"slide_type": "subslide"}
fig, axes = plt.subplots(2, 1, figsize=(8.4, 5), sharex=True, layout="constrained")
draw_ring(axes[0], two, "two stages (blue: 0, orange: 1); numbers: tiles, and the phase of each barrier", 22)
draw_ring(axes[1], run(Ring(), producer_parity=0), "the producer starts with parity 0: nothing ever happens", 22)
axes[1].set_xlabel("clock")
picture(fig, """Above, a ring of two stages: the producer copies tiles back to back, the consumer works on each as soon
as it has arrived, and a barrier's phase bit flips at every arrival on it. Below, with the wrong parity, producer and
consumer wait for each other for ever, and all phases stay 0.""")

# %% [markdown] slideshow={"slide_type": "fragment"}
# With the right parities the copies run back to back; with one stage, copy and compute alternate. The two mistakes are
# of different kinds. A producer that starts with 0 waits for a consumer that waits for it. A consumer that starts with
# 1 does not wait: it computes with what lies there, an older tile or nothing, and is stuck only in the end.

# %% [markdown] slideshow={"slide_type": "slide"}
# ## 4. From algorithm to code
#
# FlashAttention-3's Algorithms 1 and 2 are restated, corrected, in `papers/flash_attention_3.md`. The rungs to come:
#
# | rung | idea | lines there | what it must get right |
# |---|---|---|---|
# | `wgmma` | TMA copies, warpgroups multiply from shared memory | 5, 10, 11 | the 128-byte swizzle |
# | `roles` | one producer, two consumer warpgroups | 1 to 6, 16 | parities; registers |
# | `hopper` | softmax under products, ping-pong, persistent blocks | 9 to 17 | turns; the order of tiles |
#
# **The swizzle.** TMA writes, and `wgmma` reads, rows of 128 bytes with 16-byte chunks permuted: byte address a goes to
# `a ^ ((a >> 3) & 0x70)`. It is the XOR of 02b, done by hardware: bits 4 to 6, the chunk, are XORed with bits 7 to 9, the
# row modulo 8.

# %% slideshow={"slide_type": "fragment"}
def swizzle(a):
    return a ^ ((a >> 3) & 0x70)


def banks(chunk, place=swizzle):
    """The banks of this 16-byte chunk, in each of 8 rows of 128 bytes."""
    return [place(128 * row + 16 * chunk) // 4 % 32 + word for row in range(8) for word in range(4)]


print("its own inverse:", all(swizzle(swizzle(a)) == a for a in range(4096)))
by_chunk = {128 * row + 16 * c: 128 * row + 16 * (c ^ row % 8) for row in range(64) for c in range(8)}
print("the same as chunk ^ (row % 8):", all(swizzle(a) == place for a, place in by_chunk.items()))
print("8 rows of any chunk hit 32 distinct banks:", all(len(set(banks(c))) == 32 for c in range(8)))
print("without it:", len(set(banks(0, place=int))), "banks")

# %% slideshow={"slide_type": "fragment"}
fig, ax = plt.subplots(figsize=(5.4, 3), layout="constrained")
grid = [[swizzle(128 * row + 16 * x) // 16 % 8 for x in range(8)] for row in range(8)]  # its own inverse
two_colours = matplotlib.colors.ListedColormap([FAINT, COLOURS[1]])
ax.imshow([[chunk == 0 for chunk in line] for line in grid], cmap=two_colours, aspect="auto")
for row, line in enumerate(grid):
    for x, chunk in enumerate(line):
        ax.text(x, row, chunk, ha="center", va="center", color="white" if chunk == 0 else INK)
ax.set_xticks(range(8), [f"{4 * x}-{4 * x + 3}" for x in range(8)], fontsize=8)
ax.set(xlabel="banks", ylabel="row", title="which chunk lies where; orange: chunk 0")
ax.grid(False)
picture(fig, """Eight rows of eight chunks. Chunk 0 lies on the diagonal: in row r it stands in place r, so the eight rows
cover all banks.""")

# %% [markdown] slideshow={"slide_type": "subslide"}
# **Registers.** 384 threads share 65536 registers evenly at the launch, in multiples of 8. A producer needs few, so
# `setmaxnreg` moves them: 24 for each of its 128 threads, 240 for the consumers. A consumer thread holds D/2 of O, Bc/2
# of S and Bc/4 of P, and needs about 40 more:

# %% slideshow={"slide_type": "fragment"}
threads = 384
at_launch = cost.MULTIPROCESSORS[9, 0].registers // threads // 8 * 8
print(f"at the launch {at_launch} a thread, {at_launch * threads} of {cost.MULTIPROCESSORS[9, 0].registers}")
print(f"after setmaxnreg 240 * 256 + 24 * 128 = {240 * 256 + 24 * 128}")
for D, Bc in ((64, 128), (128, 128), (128, 176), (256, 80), (256, 128)):
    need = D // 2 + Bc // 2 + Bc // 4 + 40
    fits = f"fits in {at_launch}" if need <= at_launch else "needs the 240" if need <= 240 else "does not fit"
    print(f"D = {D:3}, Bc = {Bc:3}: about {need} registers: {fits}")

# %% [markdown] slideshow={"slide_type": "subslide"}
# **The order of tiles.** A causal query tile further down has more keys. Persistent blocks, one an SM, fetch the next
# tile when they are done; the order decides how long the last one runs alone. Sixteen heads, N = 4096, tiles of 128:

# %% slideshow={"slide_type": "fragment"}
def schedule(work, sms=132):
    """[(SM, start, end)]: each tile, in the given order, goes to the SM that is free first."""
    free = [(0, sm) for sm in range(sms)]
    timeline = []
    for w in work:
        start, sm = heapq.heappop(free)
        heapq.heappush(free, (start + w, sm))
        timeline.append((sm, start, start + w))
    return timeline


# %% slideshow={"slide_type": "fragment"}
in_order = [i + 1 for _ in range(16) for i in range(4096 // 128)]  # key tiles to visit, head by head
orders = {"in order": in_order, "longest first": sorted(in_order, reverse=True)}
ideal = sum(in_order) / 132
fig, axes = plt.subplots(1, 2, figsize=(8.6, 3.2), sharex=True, sharey=True, layout="constrained")
for ax, (name, work) in zip(axes, orders.items(), strict=True):
    end = max(stop for *_, stop in schedule(work))
    for sm, start, stop in schedule(work):
        ax.barh(sm, stop - start, left=start, height=1, color=plt.cm.cividis((stop - start) / 32), lw=0)
    ax.axvline(ideal, color=COLOURS[1], lw=1.5, ls="--")
    ax.set(title=f"{name}: {end} steps, SMs busy {ideal / end:.0%}", ylim=(132, 0))
    ax.set_xlabel("time in key tiles; dashed: ideal")
    ax.grid(False)
    print(f"{name}: {end} steps, ideal {ideal:.1f}")
axes[0].set_ylabel("SM")
picture(fig, """Timelines of 132 SMs, dark for short tiles and yellow for long ones. In order, long tiles of the last
heads end well after the ideal time, and most SMs are idle meanwhile. Longest first, short tiles fill the gaps, and all
SMs end near the ideal.""")

# %% [markdown] slideshow={"slide_type": "slide"}
# ## 5. Write it yourself
#
# **Exercise 1: stage and parity without a flip.** The model flips a bit when the ring wraps. Compute both from the
# running number n of a tile instead, as a kernel does that enters the ring in the middle.
#
# <details><summary>Hint: a question</summary>
#
# How often has the ring wrapped before tile n? When is that number odd?
#
# </details>
#
# **Exercise 2: a schedule without a counter.** A static schedule lets SM b take, in turn n, a tile it computes itself,
# so nobody has to ask. With tiles sorted longest first and `b + n * sms`, SM 0 gets the longest tile of every turn. Do
# better.
#
# <details><summary>Hint: a question</summary>
#
# How are cards dealt so that nobody is first twice in a row?
#
# </details>

# %% slideshow={"slide_type": "fragment"}
my_stage_and_parity = None  # (n, stages) -> (stage, the consumer's parity, the producer's parity)
my_tile = None  # (b, n, sms) -> index into the tiles, longest first; an index past the last: no tile

if my_stage_and_parity is None:
    print("exercise 1: not written yet")
else:
    for stages in (1, 2, 3, 4):
        parity, good = 0, True
        for n in range(20):
            good &= tuple(my_stage_and_parity(n, stages)) == (n % stages, parity, 1 - parity)
            parity ^= n % stages == stages - 1
        print(f"exercise 1, {stages} stages:", "ok" if good else "wrong")
if my_tile is None:
    print("exercise 2: not written yet")
else:
    tiles, turns = orders["longest first"], range(-(-len(in_order) // 132))
    mine = [[i for n in turns if (i := my_tile(b, n, 132)) < len(tiles)] for b in range(132)]
    once = sorted(i for own in mine for i in own) == list(range(len(tiles)))
    strided = max(sum(tiles[b::132]) for b in range(132))
    steps_taken = max(sum(tiles[i] for i in own) for own in mine)
    print("exercise 2: every tile once:", once, " steps:", steps_taken, " strided:", strided)

# %% [markdown] slideshow={"slide_type": "slide"}
# ## 6. Check it, then break it
#
# The models are checked where they stand. Now flip one thing in the swizzle. The hardware applies it to *absolute*
# shared-memory addresses. Suppose your code computes the place from the offset within the tile, and adds the tile's
# base. **For which bases do the two agree?**
#
# <details><summary>Answer</summary>
#
# Only if the base has zeros in bits 4 to 9: multiples of 1024. That is why tiles are aligned to 1024 bytes. With another
# base nothing crashes, the product is just made of the wrong numbers.
#
# </details>

# %% slideshow={"slide_type": "fragment"}
offsets = range(0, 64 * 128, 16)
for base in (0, 1024, 5 * 1024, 512, 128, 16):
    wrong = sum(base + swizzle(o) != swizzle(base + o) for o in offsets)
    print(f"base {base:4}: {wrong} of {len(offsets)} chunks are looked for in the wrong place")
flips = {"a >> 3, & 0x70": swizzle, "a >> 4, & 0x70": lambda a: a ^ ((a >> 4) & 0x70),
         "a >> 3, & 0x30": lambda a: a ^ ((a >> 3) & 0x30)}  # fmt: skip
for says, place in flips.items():
    whole = sorted(map(place, offsets)) == list(offsets)
    print(f"a ^ ({says}): each chunk once: {whole}; 8 rows of a chunk hit {len(set(banks(0, place)))} of 32 banks")

# %% [markdown] slideshow={"slide_type": "slide"}
# ## 7. Predict, then measure
#
# **Question.** By the model, for which head dimension does ping-pong gain most, and for which least?
#
# <details><summary>Answer</summary>
#
# In part 3, D = 128 goes from 55 % to 100 %, D = 64 from 39 % to 64 %, D = 256 from 70 % to 100 %: as a ratio most at
# 128, where products and softmax are nearly equal, least at 256, where products dominate.
#
# </details>

# %% slideshow={"slide_type": "fragment"}
measured = rows.latest([row for row in rows.read() if row["pass"] == "fwd" and row["dtype"] != "fp32"])
mine = [row for row in measured if any(idea in str(row["kernel"]) for idea in ("wgmma", "roles", "hopper"))]
if mine:
    like = max(mine, key=lambda row: (row["N"], row["D"], not row["causal"]))
    at = [row for row in measured if all(row[name] == like[name] for name in rows.SETTING)]
    at = [row for row in at if row["peer"] or row["stage"] == "02_fa2_cuda"]
    result = picture(plots.speed_bars(at), f"TFLOP/s of stage 02's kernels and their peers, {plots.subtitle([like])}.")
else:
    result = print("no rows yet for the Hopper kernels")
result

# %% [markdown] slideshow={"slide_type": "slide"}
# ## 8. Summary
#
# - At D = 128 exp needs half of the products' clocks, at D = 64 all of them: waiting in turn wastes the tensor cores.
# - Two warpgroups in turn hide softmax under products, as far as softmax is shorter.
# - An mbarrier tells phases apart by one bit. A wrong first parity is a deadlock on one side, wrong data on the other.
# - The swizzle is one XOR on absolute addresses, so tiles start at multiples of 1024 bytes.
# - Registers go where the accumulators are; long causal tiles go first.
#
# **Ask yourself**
#
# 1. Which line of part 2's count would a cheaper exp change, and for which D would it pay?
# 2. Why is one parity bit enough although a barrier goes through many phases?
# 3. What does a third stage gain in the ring, when copies take 3 clocks and computing 2? And with 2 and 3?
# 4. Why can two consumer warpgroups not have 256 registers a thread each?
# 5. Why does in-order scheduling hurt less at 16 times as many heads?
#
# **Go further**
#
# - ★ (15 minutes) Write the swizzle for rows of 64 bytes (exercise 2 of 02b) as one XOR on the address, and check it.
# - ★★ (1 hour) Give the ring two consumers whose arrivals both count before a stage is empty.
# - ★★★ (a weekend) Model the pipeline within one warpgroup (lines 9 to 17) and combine it with ping-pong. What is left?
#
# **Read:** `papers/flash_attention_3.md`, `papers/flash_attention_2.md`; the PTX ISA on `mbarrier`, `wgmma` and
# `setmaxnreg`.
#
# **Next:** [03_triton.ipynb](03_triton.ipynb). A compiler decides most of this for you.
