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
# *An H100 or H200 copies, multiplies and computes exponentials in three different units. How does a kernel keep all three
# at work at the same time, and how does it stay right?*
#
# ![A sketch over time. Above, copies, products and exponentials wait for each other. Below, products follow without a
# gap, and the others run beside them.](../notebooks/figures/question_02d.png)

# %% jupyter={"source_hidden": true} slideshow={"slide_type": "skip"}
import steps  # first: it chooses the engine
import functools
import heapq
import itertools
import re
import tempfile
import textwrap
from ctypes import c_int
from pathlib import Path

import matplotlib
import matplotlib.pyplot as plt
import torch
from IPython.display import display

from reference import cases, error
from steps import checks
from steps import step02_fa2_cuda as step02
from steps.bench import ablations, cost, profile, report, rows, timing
from steps.figures.plots import COLOURS, FAINT, GREYS, INK, style
from steps.step02_fa2_cuda import calls, emulator, ladder, nvrtc, plan, works
from steps.figures.picture import unchecked as picture
from steps.workbook import Blank, check, edited, exercises, show
from steps.workbook import hint, solution  # noqa: F401  for you, in part 5
from steps.workbook.listing import Source
from steps.workbook.puzzles.operand_address import operand_address  # yours, in part 5

# %% jupyter={"source_hidden": true} slideshow={"slide_type": "skip"}
style()
torch.set_num_threads(1)
h200 = cost.GPUS["NVIDIA H200"]
fresh = rows.fresh(rows.read())
recorded = [row for row in rows.latest(fresh) if row["gpu"] == h200.name]
loads = report.of_last_run(rows.fresh(rows.read(timing="sustained")))
clocked = ablations.read("timeline")
whole = [one for one in clocked.get("timelines", ()) if "without" not in one]
NO_CLOCKS = "no timeline of this kernel: on an H200, python -m steps.bench.ablations"


def excerpt(file, *parts):
    """Parts of a kernel file, each from a line with one text to the next with another."""
    lines, found = show(file).splitlines(), []
    for first, last in parts:
        begin = next(n for n, line in enumerate(lines) if first in line)
        end = next(n for n, line in enumerate(lines) if n > begin and last in line)
        found.append(textwrap.dedent("\n".join(lines[begin:end])).rstrip())
    result = Source("\n\n".join(found))
    result.language = "cpp"
    return result


print(steps.engine.describe(), f"torch {torch.__version__}", sep="\n")
print("rungs of stage 02:", ", ".join(step02.SUPPORTS["rungs"]))

# %% [markdown] slideshow={"slide_type": "subslide"}
# - **Before you start:** 02b (fragments, swizzle, `cp_async`).
# - **Time:** about an hour to read, an hour more with the exercises.
# - **Hardware:** any computer with Linux (or WSL2) and g++; Hopper is emulated. Speeds and clocks are recordings from
#   an H200.
# - **Code:** in `steps/step02_fa2_cuda/`, `fwd_6_wgmma.cu`, `fwd_7_roles.cu`, `fwd_8_hopper.cu`. **Tests:**
#   `pytest tests/test_step02_fa2_cuda.py tests/test_emulator_hopper.py`.

# %% [markdown] slideshow={"slide_type": "slide"}
# ## 2. The problem, counted
#
# FlashAttention-2's kernel runs on Hopper as it is. How much of the chip can it use? Count clocks for a tile of 128 x
# 128 scores on one multiprocessor (SM): 4 x 128 x 128 x D FLOP on the tensor cores, an exp a score on the
# special-function units, and about four float32 instructions a score (scale and subtract, maximum, sum, convert)
# besides the rescaling of O. The rates are NVIDIA's (H100 whitepaper; CUDA C++ Programming Guide).

# %% slideshow={"slide_type": "fragment"}
TENSOR, EXP, FP32 = 4096, 16, 128  # FLOP, results, instructions: a clock and SM


def tile_clocks(D, Br=128, Bc=128):
    """Clocks of tensor cores, special-function units and float32 pipe for one tile."""
    return 4 * Br * Bc * D // TENSOR, Br * Bc // EXP, (4 * Br * Bc + Br * D) // FP32


def row_of(name, which="fwd", D=128, N=4096, causal=False):
    """The recorded row of a kernel ("fwd_5_fa2") or a peer, or None."""
    at = {"pass": which, "D": D, "N": N, "causal": causal, "dtype": "bf16"}
    at |= {"options": {}, "timing": "interleaved"}
    found = (r for r in recorded if name in (r["kernel"], r["peer"]))
    return next((r for r in found if at.items() <= r.items()), None)


clock = 1e3 * h200.half_tflops / h200.sms / TENSOR
print(f"check: {h200.half_tflops} TFLOP/s / ({h200.sms} SMs x {TENSOR}) = {clock:.2f} GHz")
for D in (64, 128, 256):
    tensor, exp, fp32 = tile_clocks(D)
    after, at_once = tensor / (tensor + exp + fp32), tensor / max(tensor, exp, fp32)
    measured = row_of("sdpa-flash", D=D) or {"tflops": float("nan")}
    print(f"D = {D:3}: tensor {tensor}, exp {exp}, fp32 {fp32}. Tensor cores busy",
          f"{after:.0%} one after the other, {at_once:.0%} if all three work at once;",
          f"\n     PyTorch's FlashAttention-2: {measured['tflops'] / h200.half_tflops:.0%}")

# %% jupyter={"source_hidden": true} slideshow={"slide_type": "subslide"}
fig, ax = plt.subplots(figsize=(7.6, 2.9), layout="constrained")
names = ("tensor cores", "exp", "fp32 pipe")
for y, D in enumerate((64, 128, 256)):
    start = 0
    for clocks, colour, name in zip(tile_clocks(D), COLOURS, names, strict=False):
        label = name if y == 0 else None
        ax.barh(y, clocks, left=start, height=0.6, color=colour, label=label)
        ax.text(start + clocks / 2, y, clocks, ha="center", va="center", color="white")
        start += clocks
ax.set_yticks(range(3), ["D = 64", "D = 128", "D = 256"])
ax.set(xlabel="clocks for one 128 x 128 tile, one after the other", ylim=(2.5, -0.5))
ax.grid(axis="y", visible=False)
ax.legend(ncols=3, loc="lower center", bbox_to_anchor=(0.5, 1))
picture(fig, """Bars of clocks a tile. Tensor cores take 1024, 2048 and 4096 at D = 64, 128
and 256; exp always 1024; the float32 pipe 576, 640 and 768. At D = 64 exp takes as long as
the products, at D = 128 half as long.""")

# %% [markdown] slideshow={"slide_type": "slide"}
# ## 3. The idea: start, go on, and know when
#
# At D = 128 exponentials take half as long as the products (FlashAttention-3, section 3.1). `fa2` already places
# exponentials between its `mma`s (02b). But an `mma` is small and needs its operands in registers, and the compiler
# decides the order.
#
# On Hopper **TMA** copies a tile that one thread has asked for. **wgmma** multiplies for a *warpgroup*, 128 threads,
# for example 64 x 128 x 16 numbers, and reads them from shared memory. Both are *asynchronous*: the program says where
# to wait, and until then threads compute something else.
#
# **Claim 1.** With turns, **ping-pong**, one warpgroup's softmax can hide under the other's products. In lockstep both
# do the same at the same time, and nothing is gained. The picture is a model without waits for results. The lines above
# it were measured of `hopper` (D = 128; two switches of part 4). Part 7 asks why it falls short:

# %% slideshow={"slide_type": "fragment"}
def lockstep(work, steps):  # work: {unit: clocks} of a warpgroup's step, in this order
    """[(unit, warpgroup, start, end)]: both do the same, each with half of the unit."""
    spans, now = [], 0
    for unit, clocks in steps * [*work.items()]:
        spans += [(unit, wg, now, now + 2 * clocks) for wg in (0, 1)]
        now += 2 * clocks
    return spans


def ping_pong(work, steps):
    """The same with turns: each unit serves one warpgroup at a time, and they alternate."""
    free, ready, spans = dict.fromkeys(work, 0), [0, 0], []
    for wg, (unit, clocks) in itertools.product(steps * (0, 1), work.items()):
        start = max(free[unit], ready[wg])
        free[unit] = ready[wg] = start + clocks
        spans.append((unit, wg, start, start + clocks))
    return spans


def clocks_a_step(one):
    """Of a recorded timeline: from one block of keys to the next, both warpgroups."""
    marks = one["marks"]
    return (marks[-1][0][0] - marks[0][0][0]) / (len(marks) - 1)


# %% jupyter={"source_hidden": true} slideshow={"slide_type": "subslide"}
fig, axes = plt.subplots(2, 2, figsize=(9, 3.8), sharex=True, layout="constrained")
colours = {"products": COLOURS[0], "float32": COLOURS[2], "exp": COLOURS[1]}
for c in (c for rung, c in profile.read().items() if rung == "hopper"):
    print(f"ncu: tensor cores busy {c['tensor_pipe']:.0f}%, exp {c['exp_units']:.0f}%")
for column, D in zip(axes.T, (64, 128), strict=True):
    tensor, exp, fp32 = tile_clocks(D, Br=64)  # each warpgroup has 64 rows
    work = {"products": tensor, "float32": fp32, "exp": exp}
    for ax, turns in zip(column, (lockstep, ping_pong), strict=True):
        for unit, wg, start, end in turns(work, 3):
            look = {"edgecolor": "white", "color": colours[unit]}
            ax.barh(wg, end - start, left=start, height=0.7, **look)
        share = 100 * 2 * tensor / max(end for *_, end in turns(work, 100))
        name = turns.__name__.replace("_", "-")
        ax.set_title(f"model, D = {D}, {name}: tensor cores busy {share:.0%}", fontsize=10)
        ax.set(ylim=(1.6, -0.6), xlim=(0, 11500))
        ax.set_yticks((0, 1), ("group 0", "group 1"))
fig.supxlabel("clocks, three steps a warpgroup", fontsize=9)
boxes = [plt.Rectangle((0, 0), 1, 1, color=colour) for colour in colours.values()]
fig.legend(boxes, colours, ncols=3, loc="outside upper center")
for one in whole:
    busy = f"tensor cores busy {tile_clocks(128)[0] / clocks_a_step(one):.0%}"
    print("timeline,", *(f"{name} = {x}," for name, x in one["switches"].items()), busy)
picture(fig, """A model's timelines of two warpgroups over three steps, in lockstep and in
ping-pong. In lockstep tensor cores are busy 39 % of the time at D = 64, 55 % at D = 128; in
ping-pong, where one's softmax lies under the other's products, 78 % and 100 %.""")

# %% [markdown] slideshow={"slide_type": "subslide"}
# ### A copy that nobody attends
#
# TMA needs a *tensor map*, made by the host: where the tensor lies, its strides, the size of a box. In the kernel a
# single thread asks for the box at some coordinates and names a barrier, which will count the bytes. Below, 16 rows of
# x (21, 128) are copied, from row 13 on:

# %% slideshow={"slide_type": "fragment"}
COPY = r"""#include "ptx.cuh"
extern "C" __global__ void copied(const __grid_constant__ TensorMap x, Global<T> y,
                                  int first, int waits) {
  SharedMemory smem;
  Shared<T> tile = smem.array<T>(2 * 16 * 64);
  Shared<Barrier> full = smem.array<Barrier>(1);
  if (threadIdx.x == 0) {
    barrier_init(full, 1);  // a phase ends with one arrival ...
    barrier_init_fence();
    barrier_expect(full, 2 * 16 * 64 * sizeof(T));  // ... this one, and so many bytes
    tma_load(tile, x, full, 0, first, 0, 0, 0);
  }
  __syncthreads();  // the barrier exists
  if (waits) barrier_wait(full, 0);
  for (int e = threadIdx.x; e < 2 * 16 * 64; e += blockDim.x) y[e] = tile[e];
  barrier_wait(full, 0);
}
extern "C" __global__ void passes(int ended, int parity) {
  SharedMemory smem;
  Shared<Barrier> b = smem.array<Barrier>(1);
  barrier_init(b, 1);
  for (int i = 0; i < ended; i++) barrier_arrive(b);  // ends a phase
  barrier_wait(b, parity);
}"""

# %% slideshow={"slide_type": "subslide"}
def emulate(text, kernel, *arguments, block=32):
    """Runs a kernel of this text in the emulation, one block."""
    arguments = [c_int(x) if isinstance(x, int) else x for x in arguments]
    shape = {"grid": 1, "block": block, "shared_bytes": 8192, "macros": {"T": "bf16"}}
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / f"{kernel}.cu"
        file.write_text(text)
        emulator.launch(file, kernel, arguments, **shape)


# 10 x the row, plus the number of the 16-byte chunk
x = (10 * torch.arange(21)[:, None] + torch.arange(128) // 8).bfloat16()
x_map = emulator.tensor_map(*plan.view_and_box(x[None, None], 16))
y = torch.empty(2 * 16, 64).bfloat16()
for waits in (0, 1):
    emulate(COPY, "copied", x_map, y, 13, waits)
    print(f"waits: {bool(waits)!s:5}: {y.isnan().sum()} of {y.numel()} numbers are nan;",
          "row 2 begins", y[2, :64:8].tolist())

# %% jupyter={"source_hidden": true} slideshow={"slide_type": "subslide"}
fig, axes = plt.subplots(1, 2, figsize=(8.6, 4), sharey=True, layout="constrained")
chunks = y.view(2, 16, 8, 8)[..., 0]  # slab, row, position in the row
for slab, ax in enumerate(axes):
    for row, at in itertools.product(range(16), range(8)):
        inside, chunk = 13 + row < 21, int(chunks[slab, row, at]) - 10 * (13 + row)
        marked = inside and chunk == 2 + 8 * slab
        colour = COLOURS[1] if marked else FAINT if inside else "white"
        ax.add_patch(plt.Rectangle((at, row), 1, 1, facecolor=colour, edgecolor="white"))
        looks = {"fontsize": 8, "color": "white" if marked else INK}
        says = chunk if inside else "0"
        ax.text(at + 0.5, row + 0.55, says, ha="center", va="center", **looks)
    ax.set(xlim=(0, 8), ylim=(16, 0), xlabel="banks")
    ax.set_title(f"slab {slab}: columns {64 * slab} to {64 * slab + 63}")
    banks = [f"{4 * at}-{4 * at + 3}" for at in range(8)]
    ax.set_xticks([at + 0.5 for at in range(8)], banks, fontsize=8)
    ax.set_yticks([row + 0.5 for row in range(16)], range(16), fontsize=8)
    ax.grid(False)
axes[0].set_ylabel("row of 128 bytes")
moved = all(chunks[s, r, c ^ r % 8] == 10 * (13 + r) + 8 * s + c
            for s, r, c in itertools.product(range(2), range(8), range(8)))
print("chunk c of row r is at position c ^ (r % 8):", moved)
picture(fig, """What TMA wrote: two slabs of 16 rows of 128 bytes, each cell a 16-byte
chunk with its number in the row of x. In each slab one chunk is marked; it stands at
another position in each of eight rows. Rows 8 to 15, beyond x, are zero.""")

# %% [markdown] slideshow={"slide_type": "fragment"}
# Without the wait the threads read what nobody has written yet: NaN in the emulation, anything on a GPU. With it row 2
# has come, row 15 of x, but does not begin with chunk 0.
#
# A row of 128 numbers becomes two *slabs* of 128-byte rows. Within a slab chunk c of row r goes to position c ^ (r %
# 8). This is 02b's swizzle, done by hardware. Rows beyond the tensor come as zeros.

# %% [markdown] slideshow={"slide_type": "subslide"}
# ### How to wait: phases
#
# The barrier in shared memory, an *mbarrier*, counts arrivals and bytes. When all have come its **phase** ends and the
# next begins. The wait asks with one bit: "has the phase of parity p ended?", p = 0, 1, 0, ... In truth the wait
# compares p with the parity of the phase that is running. **Claim 2.** One bit is enough to tell *this* phase from the
# one before, and from no other. `passes` ends so many phases and waits.
#
# On a new barrier a wait for parity 1 goes on, as if a phase before the first had ended. And a thread that falls two
# phases behind is misled, because line 2 of the table looks like line 0.

# %% slideshow={"slide_type": "fragment"}
@functools.cache
def goes_on(ended, parity):
    """Whether barrier_wait(parity) returns when so many phases have ended.

    Otherwise the emulation finds the thread stuck.
    """
    try:
        emulate(COPY, "passes", ended, parity, block=1)
    except RuntimeError as stuck:
        assert "is stuck" in str(stuck), stuck
        return False
    return True


print("phases ended   wait for 0   wait for 1")
for ended in range(5):
    says = ["goes on" if goes_on(ended, parity) else "waits" for parity in (0, 1)]
    print(f"{ended:7}       {says[0]:12} {says[1]:12}")

# %% [markdown] slideshow={"slide_type": "subslide"}
# ### A ring of stages
#
# One thread, the **producer**, copies tiles into a ring buffer of `DEPTH` **stages**; the **consumers** use them. A stage has
# two barriers: `full`, the bytes have come, and `empty`, the consumers have done with it. The consumer first waits on `full`
# for parity 0. The producer first waits on `empty` for parity 1 and goes on, as nothing needs to be emptied.

# %% slideshow={"slide_type": "fragment"}
def ring(stages, tiles=6, copy=3, use=2):
    """[(start, end)] of each tile's copy, and of its use: a copy needs an empty stage, a
    use needs the tile."""
    copies, uses = [], []
    for n in range(tiles):
        begin = max(copies[-1][1] if n else 0, uses[n - stages][1] if n >= stages else 0)
        copies.append((begin, begin + copy))
        begin = max(copies[n][1], uses[-1][1] if n else 0)
        uses.append((begin, begin + use))
    return copies, uses


ends = [ring(stages)[1][-1][1] for stages in (1, 2, 3)]
print("clocks for 6 tiles with 1, 2 and 3 stages:", *ends)

# %% jupyter={"source_hidden": true} slideshow={"slide_type": "fragment"}
fig, ax = plt.subplots(figsize=(8.4, 2.7), layout="constrained")
copies, uses = ring(2)
last = uses[-1][1] + 1
shades = (FAINT, INK), (GREYS[1], "white")
for side, barrier, spans in (("producer", "full", copies), ("consumer", "empty", uses)):
    for n, (start, end) in enumerate(spans):
        look = {"left": start, "color": COLOURS[n % 2], "edgecolor": "white"}
        ax.barh(side, end - start, height=0.7, **look)
        ax.text((start + end) / 2, side, n, ha="center", va="center", color="white")
    for stage in (0, 1):
        y = f"{barrier}[{stage}]"
        # The phases of full end with copies, those of empty with uses.
        times = [0, *(end for _, end in spans[stage::2]), last]
        for phase, (start, end) in enumerate(itertools.pairwise(times)):
            shade, ink = shades[phase % 2]
            ax.barh(y, end - start, left=start, height=0.55, color=shade, edgecolor="white")
            ax.text(start + 0.2, y, phase % 2, va="center", fontsize=8, color=ink)
ax.set(xlabel="clock", xlim=(0, last), xticks=range(0, last, 2))
ax.set_title("two stages (blue, orange): tiles, and the parity of each barrier's phase")
ax.invert_yaxis()
ax.grid(axis="y", visible=False)
picture(fig, """A ring of two stages. The producer copies tiles 0 to 5 back to back into
stages 0, 1, 0, 1 ...; the consumer uses each as soon as it has come. The parity of full
flips when a copy ends, that of empty when a use ends.""")

# %% [markdown] slideshow={"slide_type": "subslide"}
# ### What a descriptor says
#
# A *descriptor* of 64 bits tells wgmma where an operand in shared memory *starts*, how far the next 8 rows are
# (*stride*), how far the next slab of 64 columns is (*leading*, which K here does not need), and that the rows are
# swizzled.
#
# What does it read? Let the first operand be the unit matrix. Then the product *is* the second operand, as the
# instruction found it: 16 x 64 numbers of a tile of 64 x 64.

# %% slideshow={"slide_type": "fragment"}
READS = r"""#include "ptx.cuh"
extern "C" __global__ void __launch_bounds__(128) reads(
    Global<const T> raw, Global<float> d, Global<uint64_t> bits, int V, int step) {
  SharedMemory smem;
  Shared<T> tile = smem.array<T>(64 * 64);
  for (int e = threadIdx.x; e < 64 * 64; e += 128) tile[e] = raw[e];
  fence_async();
  __syncthreads();  // the tile is there, for the tensor cores too
  int row = threadIdx.x / 32 * 16 + threadIdx.x % 32 / 4, column = 2 * (threadIdx.x % 4);
  uint32_t unit[4];
  for (int i = 0; i < 4; i++) {
    int r = row + i % 2 * 8, c = column + i / 2 * 8;
    unit[i] = pack<T>(r == c, r == c + 1);
  }
  bits[0] = V ? descriptor(tile + step * 16 * 64, 64 * 128, 1024)
              : descriptor(tile + step * 16, 16, 1024);
  float D[32];
  wgmma_fence();
  if (V) wgmma_rs<T, 64, 1>(D, unit, bits[0], false);
  else wgmma_rs<T, 64, 0>(D, unit, bits[0], false);
  wgmma_commit();
  wgmma_wait<0>();
  for (int i = 0; row < 16 && i < 32; i++)
    d[(row + i / 2 % 2 * 8) * 64 + i / 4 * 8 + column + i % 2] = D[i];
}"""

# %% slideshow={"slide_type": "subslide"}
read = {}  # (operand, step): the bytes that the instruction read, [16][64]
numbers = torch.arange(64)[:, None].expand(64, 64)  # of rows; transposed, of columns
print("start, leading, stride in bytes, swizzle (1: of 128 bytes);",
      "does part 5's function say what was read?")
for is_v, step in itertools.product((0, 1), range(4)):
    found, bits = torch.empty(2, 16, 64), torch.empty(1, dtype=torch.int64)
    for d, raw in zip(found, (numbers, numbers.T), strict=True):
        raw = raw.bfloat16().contiguous()
        emulate(READS, "reads", raw, d, bits, is_v, step, block=128)
    read["KV"[is_v], step] = (128 * found[0] + 2 * found[1]).int()
    where = [(bits.item() >> shift & 0x3FFF) << 4 for shift in (0, 16, 32)]
    said = [[operand_address(*where, k, i, is_v) for i in range(64)] for k in range(16)]
    right = said == read["KV"[is_v], step].tolist()
    print(f"    {'KV'[is_v]}, instruction {step}: {(*where, bits.item() >> 62)}", right)

# %% jupyter={"source_hidden": true} slideshow={"slide_type": "subslide"}
fig, axes = plt.subplots(1, 2, figsize=(8.6, 4.2), sharey=True, layout="constrained")
four = matplotlib.colors.ListedColormap(COLOURS[:4])
titles = {"K": "K: 16 columns an instruction", "V": "V: 16 keys an instruction"}
for ax, (operand, title) in zip(axes, titles.items(), strict=True):
    reader = torch.empty(64 * 8)
    for step in range(4):
        reader[read[operand, step].flatten() // 16] = step
    ax.pcolormesh(reader.view(64, 8), cmap=four, edgecolors="white", lw=0.5)
    ax.set(ylim=(32, 0), xlabel="16-byte chunk of the row", title=title)
    ax.set_yticks(range(0, 33, 8))
    ax.grid(False)
axes[0].set_ylabel("row of 128 bytes, the first 32 of 64")
boxes = [plt.Rectangle((0, 0), 1, 1, color=c) for c in COLOURS[:4]]
labels = [f"instruction {step}" for step in range(4)]
fig.legend(boxes, labels, ncols=4, loc="outside lower center")
picture(fig, """Which 16-byte chunks of a tile the four instructions read, the first 32 of
its 64 rows. Of K each reads two chunks of every row, which the swizzle moves about in a
pattern that repeats after eight rows. Of V each reads 16 whole rows: here those of
instructions 0 and 1.""")

# %% [markdown] slideshow={"slide_type": "fragment"}
# **Claim 3.** Three numbers and one XOR describe both (exercise 02.9). For S = Q Kᵀ the sum runs along a row: the next
# instruction starts 32 bytes further, *inside* the pattern. The pattern repeats every 1024 bytes of addresses, so tiles start
# at multiples of 1024. For P V the sum runs down the rows, and V needs no transposing copy.

# %% [markdown] slideshow={"slide_type": "slide"}
# ## 4. From algorithm to code
#
# FlashAttention-3's Algorithms 1 and 2, corrected; the lines are those of `papers/flash_attention_3.md`.
#
# | lines | what | `wgmma` | `roles` | `hopper` |
# |---|---|---|---|---|
# | 1, 6 | registers given and taken | | `registers_decrease`, `registers_increase` | same |
# | 2–5 | Q_i, K_j, V_j on their way | lambda `load`, thread 0 | `Ring::load`, a warpgroup of its own | same, tile after tile |
# | 7, 10 | S = Q_i K_jᵀ | `start_scores`, then wait | same | `start` |
# | 11 | O += P V | `start_output`, then wait | same | `start`, for the block before |
# | 13, 14 | m, l, P, alpha | `online_softmax` | same | same, under line 11 |
# | 15 | O *= alpha | `rescale`, before P V | same | `step`, after P V, if needed |
# | 16 | the stage is empty | `__syncthreads` | `Ring::release` | same |
# | 19 | O / l, lse | `store_rows` | same | same, under the next tile |

# %% [markdown] slideshow={"slide_type": "subslide"}
# ### Rung 6, `wgmma`: fewer hands
#
# The loop of rung 5 with new instructions. After `wgmma_fence` products may read the registers written so far.
# `start_scores` does not wait; `wgmma_commit` closes a group of products. `wgmma_wait<N>` waits until at most N groups
# are under way. Nobody may touch the registers of a group that is. In this rung a wait follows every start.

# %% slideshow={"slide_type": "fragment"}
excerpt("fwd_6_wgmma", ("for (int n = 0; n < blocks; n++) {", "int64_t first ="))

# %% [markdown] slideshow={"slide_type": "subslide"}
# **What if a wait is left out?** The emulation refuses it. ptxas repairs the code: it sees that S is read while a
# product still writes it, inserts a wait at a place of its own choice, and reports C7517. The course's loader refuses
# such code (and C7510 to C7516, all products one after the other):

# %% slideshow={"slide_type": "fragment"}
sizes = {"B": 1, "H": 1, "Hk": 1, "Nq": 4096, "Nk": 4096, "D": 128, "causal": False}
sizes |= {"dtype": torch.bfloat16, "processors": h200.sms, "shared_limit": 232448}
((kernel, *_, macros),) = rows.geometry("fwd_6_wgmma", **sizes)
no_wait = ("    wgmma_wait<0>();\n    if (j * Bc", "    if (j * Bc")
for edits in ((), (no_wait,)):
    with edited("fwd_6_wgmma.cu", *edits):
        try:
            made = nvrtc.compile(works.HERE / "fwd_6_wgmma.cu", macros, "sm_90a")
            print(f"as it is: {made.usage[kernel]}")
        except RuntimeError as refused:
            for message in re.findall(r"\(C75\d\d\)[^;]*", str(refused)):
                print(textwrap.fill(f"without the wait for S: {message}", 105))

# %% [markdown] slideshow={"slide_type": "subslide"}
# ### Rung 7, `roles`: a producer
#
# The `__syncthreads()` at the loop's end makes every warpgroup wait for the slowest, so that one thread can load. Now
# loading is the only work of one thread, in a warpgroup of its own. The consumers' loop is rung 6's, with `K.get()` and
# `V.get()` before the products and `release()` after.

# %% slideshow={"slide_type": "fragment"}
excerpt("fwd_7_roles", ("// The producer: starts to copy ROWS rows", "};"))

# %% [markdown] slideshow={"slide_type": "subslide"}
# **The budget.** At the launch all threads of a block get equally many registers. Then the producer gives some back
# (`setmaxnreg.dec`). `setmaxnreg.inc`, by which consumers take more, *waits* until enough are free: if the sum is too
# large, for ever. A consumer's 128 threads share 64 rows of O and S, with P packed beside S; each needs some 30
# registers besides.

# %% slideshow={"slide_type": "fragment"}
row, sm = ladder.FORWARD["hopper"], h200.multiprocessor
registers = excerpt("fwd_8_hopper", ("constexpr int PRODUCER_REGISTERS", "// Tiles on"))
lines = registers.splitlines()
print(registers)
# for 1, 2 and 3 consumers
kept, taken = ([int(n) for n in re.findall(r"[?:] (\d+)", line)] for line in lines)
for D, (Br, Bc) in row.tiles[0].items():
    shared, threads = row.shared_bytes(D, Br, Bc), row.threads(D, Br, Bc)
    need = cost.accumulator_registers(64, Bc, D, "bf16", threads=128)
    n = Br // 64 - 1
    total = 128 * (kept[n] + (n + 1) * taken[n])
    print(f"D = {D:3}, tile {Br} x {Bc:3}: {shared / 1024:5.1f} of",
          f"{sm.shared_per_block // 1024} KiB; {need} + 30 registers;",
          f"{sm.registers // threads // 8 * 8} at the launch, then {taken[n]}",
          f"({total} of {sm.registers} in all)")

# %% [markdown] slideshow={"slide_type": "subslide"}
# ### Rung 8, `hopper`: overlap and turns
#
# *Within* a warpgroup, S of the next block is started together with O of the one before, whose P is ready. Softmax then
# runs beside O's product. *Between* warpgroups, a turn decides who may start products.
#
# `get` now returns a descriptor; V's argument is *leading*. A warpgroup calls `turn.pass()` as soon as its products are
# *started*, so that those of the other queue behind them. A turn is a named barrier of 256 threads: 128 arrive and go
# on, 128 wait. P V is added in units of the old m; only then `rescale` brings O to the new m. With LAZY it does so only
# if m has grown by more than 8 in log2: FlashAttention-4's conditional rescaling (2603.05451; 02e).

# %% slideshow={"slide_type": "fragment"}
excerpt(
    "fwd_8_hopper",
    ("// The warpgroups' turns.", "// x, on which all lanes"),
    ("// S of one block of keys, alone or beside O", "// A tile's first block"),
)

# %% [markdown] slideshow={"slide_type": "subslide"}
# ### Persistent blocks
#
# A block takes nearly all registers, so one runs on an SM at a time. When it ends, the next begins with empty stages.
# So rung 8 starts one block an SM, which takes tile after tile: the producer loads the next while the consumers store.
# Causal tiles differ in length (yellow: long). Which block takes which tile is fixed before the launch: the longest
# first, in sections of heads. A section has half as many heads as there are blocks (a quarter at D > 64).
#
# From 16,384 keys on (8,192 at D = 128 without a mask) a tile takes so long that its beginning and end hardly count.
# Then the launch starts one block for each tile, and without a mask PINGPONG is off. The GPU gives each SM its next
# block when it is free, so sections may be small: the heads whose K and V fit into 32 MB of the L2 cache.

# %% slideshow={"slide_type": "fragment"}
display(show("fwd_8_hopper", "tile_number"))


def first_free(work, sms=132):
    """[(SM, start, end)]: each tile, in this order, goes to the SM that is free first."""
    free, spans = [(0, sm) for sm in range(sms)], []  # as a GPU deals blocks
    for w in work:
        start, sm = heapq.heappop(free)
        heapq.heappush(free, (start + w, sm))
        spans.append((sm, start, start + w))
    return spans


def dealt(work, reverse, sms=132):
    """[(SM, start, end)]: SM b takes tile_number(0), tile_number(1), ..."""
    spans, now = [], [0] * sms
    for n, w in enumerate(work):
        sm = n % sms
        if reverse and n // sms % 2:
            sm = sms - 1 - sm
        spans.append((sm, now[sm], now[sm] + w))
        now[sm] += w
    return spans


# %% jupyter={"source_hidden": true} slideshow={"slide_type": "subslide"}
blocks_of_keys = 16 * list(range(4096 // 128, 0, -1))  # head by head, longest tiles first
longest_first = sorted(blocks_of_keys, reverse=True)
plans = {
    "a block a tile,\nhead by head": first_free(blocks_of_keys),
    "a block a tile,\nlongest first": first_free(longest_first),
    "persistent,\nlongest first": dealt(longest_first, False),
    "persistent, reversed\nevery other round": dealt(longest_first, True),
}
ideal = sum(blocks_of_keys) / 132
fig, axes = plt.subplots(1, 4, figsize=(9.4, 3.2), sharey=True, layout="constrained")
for ax, (name, spans) in zip(axes, plans.items(), strict=True):
    end = max(stop for *_, stop in spans)
    lengths = torch.full((132, end), float("nan"))  # [SM][time]: of the tile under way
    for sm, start, stop in spans:
        lengths[sm, start:stop] = stop - start
    ax.pcolormesh(lengths, cmap="cividis")
    ax.axvline(ideal, color=COLOURS[1], lw=1.5, ls="--")
    ax.set_title(f"{name}:\n{end} steps, SMs busy {ideal / end:.0%}", fontsize=9)
    ax.set(xlabel=f"time in blocks of keys\n(dashed: ideal, {ideal:.0f})")
    ax.set(xlim=(0, 85), ylim=(132, 0))
    ax.grid(False)
axes[0].set_ylabel("SM")
picture(fig, """Timelines of 132 SMs; long tiles are yellow. A block a tile: head by head
SMs end at different times; longest first, close to the ideal. Persistent, dealt in one
direction SM 0 ends last; with every other round reversed all end close to the ideal.""")

# %% [markdown] slideshow={"slide_type": "subslide"}
# ### Blocks that a warpgroup does not need
#
# A tile needs a block of keys if *one* of its rows sees it. A warpgroup has 64 rows, and a tile at D = 64 has 192. So
# with a causal mask the first warpgroup sees nothing of the last block, and in the last tile a warpgroup may have no
# rows. With the switch SKIP it gives such a stage back at once, and passes its turn on. **For which N is that much?**

# %% slideshow={"slide_type": "fragment"}
def products_started(N, causal, skip, Br=192, Bc=128):
    """How many products of 64 rows and Bc keys the warpgroups of one head start."""
    started = 0
    for row in range(0, -(-N // Br) * Br, 64):  # each warpgroup's first row
        if row < N or not skip:
            last = row if skip else row // Br * Br + Br - 64  # whose blocks it visits
            keys = min(last + 64, N) if causal else N
            started += -(-keys // Bc)
    return started


def foreseen(D, N, causal):
    """By how much more products the kernel would be slower without SKIP."""
    tile = ladder.FORWARD["hopper"].tiles[0][D]
    all_, left = (products_started(N, causal, skip, *tile) for skip in (False, True))
    return all_ / left - 1


for N in (512, 1024, 4096, 16384):
    says = []
    for causal in (False, True):
        all_, left = (products_started(N, causal, skip) for skip in (False, True))
        says.append(f"{all_} products, {all_ - left} skipped ({1 - left / all_:.0%})")
    print(f"N = {N:5}: {says[0]}; causal {says[1]}")

# %% [markdown] slideshow={"slide_type": "slide"}
# ## 5. Write it yourself
#
# Three functions in Python, which `check` runs against the emulated hardware. `hint("02.8")` to `hint("02.10", 3)`
# help. Without a function, `check("02.9")` writes a file with the whole task.
#
# **Exercise 02.8: place and parity.** Both sides of a ring count tiles in an n of their own. In which stage is tile n, for which
# parity does the consumer wait on `full`, and for which the producer on `empty`?
#
# **Exercise 02.9: where wgmma finds a number.** From a descriptor's start, leading and stride to the byte of number (k,
# i) of the second operand, along the rows as for K, or down as for V.
#
# **Exercise 02.10: the order of two waits.** The nine operations of rung 8's step, in the order in which a warpgroup does them.

# %% slideshow={"slide_type": "fragment"}
def stage_and_parity(n, stages):
    """(stage, the consumer's parity, the producer's parity) of tile n."""
    raise Blank


check("02.8", stage_and_parity)

# %% slideshow={"slide_type": "fragment"}
def operand_address(start, leading, stride, k, i, runs_down):  # noqa: F811
    """The byte at which wgmma finds the number (k, i). runs_down: as for V."""
    raise Blank


check("02.9", operand_address)

# %% slideshow={"slide_type": "fragment"}
def order_of_step():
    """A list: "start S", "start O", "wait for S" (at most one group is left), "release K",
    "wait for all", "release V", "softmax", "pack P", "rescale O", each once, in your order.
    """
    raise Blank


check("02.10", order_of_step)

# %% [markdown] slideshow={"slide_type": "subslide"}
# **Bug hunt 02.bug2.** Below is what was reported about `show("02.bug2")`. Find the cause, and write a test that fails
# on it and passes on the repaired kernel.

# %% slideshow={"slide_type": "fragment"}
print(textwrap.fill(exercises.find("02.bug2").symptom, 110))


def test(forward):
    """Asserts what must hold of (out, lse) = forward(q, k, v, causal=..., scale=...)."""
    raise Blank


check("02.bug2", test)

# %% [markdown] slideshow={"slide_type": "slide"}
# ## 6. Check it, then break it
#
# Nothing in the text of such a kernel says *when* copies and products happen. In the emulation a schedule decides, and
# the kernel must be right in all. Three cases, three schedules:

# %% slideshow={"slide_type": "fragment"}
SCHEDULES = {
    "copies late": {},  # the default: finds waits that are missing
    # finds stages that are filled again too early
    "products late": {"copies": "eager", "wgmma": "late"},
    "random": {"threads": "random", "copies": "random", "wgmma": "random", "seed": 1},
}
small = checks.supports_of(step02.SUPPORTS, "hopper") | {"tiles": ((128, 64),)}
names = ("ragged_causal", "fewer_queries_causal", "scores_200")
for rung in ("wgmma", "roles", "hopper"):
    failed, shares = 0, []
    for case in (case for case in cases.CASES if case.name in names):
        x = cases.build(case, small, torch.bfloat16)  # on the CPU
        want = error.expected(x.q, x.k, x.v, x.dout, causal=x.causal, scale=x.scale)
        for how in SCHEDULES.values():
            with emulator.schedule(**how):
                out, lse = calls.forward(x.q, x.k, x.v, rung=rung, **x.options)
            got = {"out": out, "lse": lse}
            failed += bool(error.failures(got, want))
            errors = error.errors(got, want)
            shares += [errors[name] / (want.tolerance[name] or 1) for name in got]
    print(f"{rung:7} {len(names) * len(SCHEDULES)} runs, {failed} failed,",
          f"largest error {max(shares):.2f} of the tolerance")

# %% [markdown] slideshow={"slide_type": "subslide"}
# ### Stuck
#
# In rung 7 the producer waits on `empty` for parity 0 first. **Who waits for whom?**
#
# <details><summary>Answer</summary>
#
# Thread 0, the producer, waits for the consumers to empty a stage that was never filled, and they wait for Q.
#
# </details>

# %% slideshow={"slide_type": "fragment"}
wait_empty = "barrier_wait(empty + stage(), parity()"
wrong_parity = (f"{wait_empty} ^ 1);", f"{wait_empty});")
generator = torch.Generator().manual_seed(0)
q, k, v = torch.randn(3, 1, 1, 300, 32, generator=generator).bfloat16()
try:
    with edited("fwd_7_roles.cu", wrong_parity) as lines:
        calls.forward(q, k, v, rung="roles", tile=(64, 64))
except RuntimeError as stuck:
    returned = "; threads 1-31 returned from the kernel, and count as missing"
    print(str(stuck).replace(returned, "; ..."))
    for line in sorted({int(n) for n in re.findall(r"\.cu:(\d+)", str(stuck))}):
        print(f"line {line}: {lines[line - 1].strip()}")

# %% [markdown] slideshow={"slide_type": "subslide"}
# ### Wrong, and not always
#
# Five more mistakes of one line each; "refused" is a misuse that the emulation reports. **One lives under the first
# schedule. Which, and why?**
#
# <details><summary>Answer</summary>
#
# K released before its products have ended. In the first schedule products are performed as soon as they are started,
# and K is not needed any more. With late products and early copies the producer overwrites a tile that is still being
# read.
#
# </details>

# %% slideshow={"slide_type": "fragment"}
wait_full, wait_S = "barrier_wait(full + stage(), parity()", "      wgmma_wait<0>();\n"
release = "      K.release();\n"
mistakes = {
    "the consumer begins with parity 1": (wait_full, wait_full + " ^ 1"),
    "the parity never flips": ("return n / DEPTH % 2;", "return 0;"),
    "every lane releases a stage": ("if (threadIdx.x % 32 == 0) barrier_a", "barrier_a"),
    "no wait for S": (wait_S + release, release),
    "K released before its products end": (wait_S + release, release + wait_S),
}
want = error.expected(q, k, v, torch.zeros_like(q))


def outcome(how):
    try:
        with emulator.schedule(**how):
            out, lse = calls.forward(q, k, v, rung="roles", tile=(64, 64))
        return "wrong" if error.failures({"out": out, "lse": lse}, want) else "lives"
    except RuntimeError as report:
        return "stuck" if "stuck" in str(report) else "refused"


print(f"{'':36}", *(f"{name:14}" for name in SCHEDULES))
for name, change in mistakes.items():
    with edited("fwd_7_roles.cu", change):
        print(f"{name:36}", *(f"{outcome(how):14}" for how in SCHEDULES.values()))

# %% [markdown] slideshow={"slide_type": "slide"}
# ## 7. Predict, then measure
#
# ### The timeline
#
# `steps/bench/ablations.py` makes a copy of rung 8 note the clock when a warpgroup asks for its turn, gets it, has S,
# its exponentials, and O (D = 128, no mask). With OVERLAP a bar of products lasts until the warpgroup looks for O; the
# products may end earlier, so the column *no product* has a dash. *Busy* is the products' clocks by the datasheet, as a
# share of a step's. The copy is slower.
#
# **Question 1.** With OVERLAP softmax runs beside O's product. If there are no turns (PINGPONG = 0), will the two
# warpgroups compute exponentials at the same time?
#
# <details><summary>Answer</summary>
#
# Now and then: in 11 % of the clocks, with turns in 8 %. The tensor cores serve both, and whoever comes second gets its
# S later: the two drift apart, and hardly wait for turns (grey). Turns brought 2 % , OVERLAP 5 to 7 %.
#
# Why do tensor cores rest at all? From S until it asks for its next turn (*S to turn*, medians) a warpgroup took more
# than twice the model's softmax. The last two lines leave parts of the softmax out. A step takes 690 clocks more than
# its products. Without exponentials 300 of them vanish, without the rest of softmax 280 more; the last 100 are
# unexplained.
#
# </details>

# %% slideshow={"slide_type": "subslide"}
def spans(one, begin, end):
    """[(start, end)] between two of the events of a timeline, for each warpgroup."""
    a, b = (clocked["events"].index(event) for event in (begin, end))
    return [[(step[wg][a], step[wg][b]) for step in one["marks"]] for wg in (0, 1)]


def covered(*sets):
    """Clocks in which all of these sets of spans are under way."""
    edges = [(a, 1, n) for n, found in enumerate(sets) for a, _ in found]
    edges += [(b, -1, n) for n, found in enumerate(sets) for _, b in found]
    running, total, before = [0] * len(sets), 0, 0
    for at, change, n in sorted(edges):
        if all(running):
            total += at - before
        running[n] += change
        before = at
    return total


def switches(one):
    if "without" in one:
        return f"without {one['without']}"
    return ", ".join(f"{name} = {value}" for name, value in one["switches"].items())

# %% slideshow={"slide_type": "subslide"}
columns = "clocks a step", "busy", "no product", "both softmax", "S to turn", "TFLOP/s"
heading = f"{clocked.get('N', 0)} keys".ljust(27)
heading += "".join(f"{column:>14}" for column in (*columns, "with clocks"))
print(heading if clocked else NO_CLOCKS)
for one in clocked.get("timelines", ()):
    marks, took = one["marks"], clocks_a_step(one)
    total = took * (len(marks) - 1)
    softmax = covered(*spans(one, "scores", "exponentials")) / total
    # Without OVERLAP O's product has ended when S is there; with it, nothing marks its end.
    none, shipped = "-", f"{one['tflops']:.0f}" if "tflops" in one else "-"
    if not one["switches"]["OVERLAP"]:
        none = f"{1 - covered(sum(spans(one, 'starts', 'scores'), [])) / total:.0%}"
    late = [[b[wg][0] - a[wg][3] for a, b in itertools.pairwise(marks)] for wg in (0, 1)]
    late = "/".join(str(sorted(clocks)[len(clocks) // 2]) for clocks in late)
    print(f"{switches(one):27}{took:14.0f}{tile_clocks(128)[0] / took:14.0%}{none:>14}",
          f"{softmax:13.0%}{late:>14}{shipped:>14}{one['tflops_timed']:14.0f}")
print("the model's softmax of a warpgroup:", sum(tile_clocks(128, Br=64)[1:]), "clocks")

# %% jupyter={"source_hidden": true} slideshow={"slide_type": "subslide"}
def draw_timelines(first=8, steps=5):
    shown = [one for one in whole if one["switches"]["OVERLAP"]]
    fig, axes = plt.subplots(len(shown), 1, figsize=(9, 4), layout="constrained")
    bars = (("asks", "starts", 0, FAINT), ("starts", "output", 0, COLOURS[0]),
            ("scores", "exponentials", 0.4, COLOURS[1]))  # fmt: skip
    for ax, one in zip(axes, shown, strict=True):
        origin, end = (one["marks"][n][0][0] for n in (first, first + steps))
        for begin, stop, shift, colour in bars:
            for wg, found in enumerate(spans(one, begin, stop)):
                pieces = [(start - origin, till - start) for start, till in found]
                ax.broken_barh(pieces, (wg + shift - 0.18, 0.36), fc=colour, ec="white")
        labels = ("group 0: products", "softmax", "group 1: products", "softmax")
        ax.set_yticks((0, 0.4, 1, 1.4), labels, fontsize=8)
        ax.set(ylim=(1.7, -0.3), xlim=(0, end - origin), xlabel="clocks of the SM")
        ax.set_title(switches(one))
        ax.grid(axis="y", visible=False)
    boxes = [plt.Rectangle((0, 0), 1, 1, color=colour) for *_, colour in bars]
    labels = ("waits for its turn", "products", "softmax")
    fig.legend(boxes, labels, ncols=3, loc="outside lower center", fontsize=8)
    return picture(fig, """Recorded timelines of two warpgroups over five steps, without
    and with turns: blue, from the start of the products to O; orange, from S to the last
    exponential; grey, hardly any, waiting for a turn. In both the two alternate.""")


draw_timelines() if clocked else print(NO_CLOCKS)

# %% [markdown] slideshow={"slide_type": "subslide"}
# ### The ladder's last rungs
#
# **Question 2.** By part 2's count, which step gains more: copies without threads (`fa2` to `wgmma`, `roles`), or softmax
# under products (`roles` to `hopper`)? At which D can the latter gain more?
#
# <details><summary>Answer</summary>
#
# The count sees no difference between `fa2` and `roles`: it knows neither addresses nor waiting. With softmax under
# products it allows the step from the sum of all three units to the slowest alone, which is more at D = 64. The
# measured gain is far smaller, and smallest there. Nothing keeps the warpgroups of `roles` in step: one computes
# exponentials while another multiplies.
#
# At D = 64 `roles` also has the larger tile; only D = 128 shows the roles alone.
#
# </details>

# %% jupyter={"source_hidden": true} slideshow={"slide_type": "fragment"}
def draw_ladder(N=4096):
    fig, axes = plt.subplots(1, 2, figsize=(9.4, 3.4), sharey=True, layout="constrained")
    for D, (ours, theirs, shift) in LOOKS.items():
        rungs = {name: row_of(name, D=D)["tflops"] for name in LADDER}
        for ax, values in zip(axes, (rungs, beside_fa4(D)), strict=True):
            names = LADDER if values is rungs else PEERS
            x = [n + shift for n in range(len(names))]
            colours = [ours if name in LADDER else theirs for name in names]
            heights = [values[name] for name in names]
            bars = ax.bar(x, heights, width=0.38, color=colours, label=f"D = {D}")
            ax.bar_label(bars, fmt="%.0f", fontsize=8)
            ax.set_xticks(range(len(names)), [name.split("_")[-1] for name in names])
            ax.grid(axis="x", visible=False)
    axes[0].set_title(f"the rungs, forward, N = {N}, full, TFLOP/s")
    axes[1].set_title("beside others, in one run")
    axes[0].set_ylim(0, 760)
    axes[0].legend(fontsize=8, loc="upper left", ncols=2)
    return picture(fig, """Bars of TFLOP/s at N = 4096, full, D = 64 and 128. Left, fa2,
    wgmma, roles and hopper, each higher than the one before. Right, hopper and
    FlashAttention-4 nearly equal, cuDNN below them, FlashAttention-2 at about half.""")


# %% slideshow={"slide_type": "fragment"}
LADDER = "fwd_5_fa2 fwd_6_wgmma fwd_7_roles fwd_8_hopper".split()
PEERS = "fwd_8_hopper fa4 sdpa-cudnn sdpa-flash".split()
LOOKS = {64: (COLOURS[5], GREYS[3], -0.2), 128: (COLOURS[0], GREYS[1], 0.2)}  # ours, theirs


def beside_fa4(D, N=4096):
    """{name: TFLOP/s} of the newest run that measured FlashAttention-4 and rung 8."""
    at, runs = {"pass": "fwd", "D": D, "N": N, "causal": False, "gpu": h200.name}, {}
    for row in fresh:
        if at.items() <= row.items() and row["stage"] in (None, "02_fa2_cuda"):
            runs.setdefault(row["run"], {})[row["kernel"] or row["peer"]] = row["tflops"]
    return next((runs[n] for n in sorted(runs)[::-1] if {*PEERS} <= runs[n].keys()), {})


if all(row_of(name, D=D) for D in LOOKS for name in LADDER) and all(map(beside_fa4, LOOKS)):
    display(draw_ladder())
    for D, (old, new) in itertools.product(LOOKS, itertools.pairwise(LADDER)):
        gain = row_of(new, D=D)["tflops"] / row_of(old, D=D)["tflops"]
        tiles = (ladder.FORWARD[name.split("_")[-1]].tiles[0][D] for name in (old, new))
        print(f"D = {D:3}: {old} {next(tiles)} to {new} {next(tiles)}: x {gain:.2f}")
    for D in LOOKS:
        most = sum(tile_clocks(D)) / max(tile_clocks(D))
        print(f"D = {D:3}: the count allows softmax under products x {most:.2f} at most")
else:
    print("rows are missing: on an H200, python -m steps.bench fast")

# %% [markdown] slideshow={"slide_type": "subslide"}
# ### Under load
#
# The bars above are of calls *in turn*: all kernels meet nearly the same clock. Below, each runs alone for a second
# (*sustained*). At D = 128 every good kernel then meets the limit of 700 W, and the chip lowers its clock, for rung 8
# from 1,980 MHz to 1,635 or less. Compare numbers of one kind only.

# %% slideshow={"slide_type": "fragment"}
under_load = [r for r in loads if r["gpu"] == h200.name and r["pass"] == "fwd"]
under_load.sort(key=lambda r: (-r["D"], r["causal"], -r["tflops"]))
print(f"N = {', '.join(map(str, sorted({r['N'] for r in under_load})))}")
for r in under_load:
    name, (D, N, causal) = r["kernel"] or r["peer"], (r[x] for x in ("D", "N", "causal"))
    in_turn = (row_of(name, D=D, N=N, causal=causal) or {"tflops": float("nan")})["tflops"]
    print(f"D = {D:3}, {'causal' if causal else 'full':6} {name:12}",
          f"in turn {in_turn:3.0f}, sustained {r['tflops']:3.0f} TFLOP/s",
          f"at {r['clock_mhz']:.0f} MHz and {r['watts']:.0f} W:",
          f"{timing.work_a_clock(r):.0f} TFLOP/s a GHz,",
          f"{timing.energy(r):.2f} J/TFLOP")
print("Watts and J/TFLOP come from the chip's sensor, right to about a tenth.")
if not under_load:
    print("not measured yet: on an H200, python -m steps bench --sustained")

# %% [markdown] slideshow={"slide_type": "subslide"}
# ### One switch at a time
#
# Each idea of `fwd_8_hopper.cu` is a macro. The table switches one off at a time: + is slower than the whole kernel in
# the same run. At N = 16384 the launch itself turns PERSISTENT off, and without a mask PINGPONG: these cells show
# noise. LARGE_SCORES: see 02b, part 6. *Spread*: the whole kernel's times, 20th to 80th percentile. **Question 3.**
# Which switch should bring more with a causal mask than without?
#
# <details><summary>Answer</summary>
#
# PERSISTENT: it hides each tile's beginning and end, which weigh more where tiles are short (N = 512). And SKIP, where a
# tile has 192 rows (D = 64); at D = 128 nothing is skipped.
#
# *Foreseen* is part 4's count, which knows nothing of waiting: a tile lasts as long as its busiest warpgroup.
#
# </details>

# %% jupyter={"source_hidden": true} slideshow={"slide_type": "fragment"}
SAME = "run", "D", "N", "causal", "dtype", "pass"
switched = [r for r in rows.fresh(rows.read(switched=True)) if r["gpu"] == h200.name]
wholes = {tuple(r[x] for x in SAME): r for r in switched if r["kernel"] == "fwd_8_hopper"}
changes, spreads = {}, {}  # {(switch, D, N, causal): slowdown}, {(D, N, causal): spread}
for row in rows.latest(switched):
    kernel, _, switch = (row["kernel"] or "").partition(":")
    if kernel == "fwd_8_hopper" and switch:
        at, whole = (row["D"], row["N"], row["causal"]), wholes[tuple(row[x] for x in SAME)]
        changes[switch, *at] = row["ms_median"] / whole["ms_median"] - 1
        spreads[at] = whole["ms_p80"] / whole["ms_p20"] - 1
settings = [*itertools.product((64, 128), (512, 4096, 16384), (False, True))]
if not changes:
    print("no rows of the switches yet: on an H200, python -m steps.bench switches")
for title, values in zip(("D", "N", "causal"), zip(*settings, strict=True), strict=False):
    print(f"{title:16}", *(f"{value!s:>8}" for value in values))
for switch in dict.fromkeys(name for name, *_ in changes):
    found = [changes.get((switch, *at)) for at in settings]
    print(f"{switch:16}", *(" " * 8 if x is None else f"{x:+8.1%}" for x in found))
print(f"{'spread':16}", *(f"{spreads.get(at, 0):8.1%}" for at in settings))
print("SKIP=0, foreseen", *(f"{foreseen(*at):+8.1%}" for at in settings))

# %% [markdown] slideshow={"slide_type": "slide"}
# ## 8. Summary
#
# - At D = 128 exponentials need half of the products' clocks, at D = 64 all of them.
# - TMA and wgmma are started, and waited for. In between nobody may touch what they use.
# - Roles: a producer with few registers; consumers that get the rest, and meet only to take turns.
# - Persistent blocks hide beginnings and ends of short tiles. Long causal tiles go first.
#
# **Ask yourself**
#
# 1. Which line of part 2's count would a cheaper exp change, and for which D should it pay?
# 2. Why is one parity bit enough although a barrier goes through many phases?
# 3. What does a third stage gain in part 3's ring, when a copy takes 3 clocks and its use 2? And 2 and 3?
# 4. Suppose tiles began at multiples of 512 bytes. What would K's instruction 1 read?
# 5. Why does `hopper` release K before O is there, and V after?
#
# **Go further**
#
# - ★ (15 minutes) Set `tile + step * 16` in `reads` to start 8 numbers further. Predict the picture, then draw it.
# - ★★ (1 hour) Give `fwd_7_roles.cu` three stages and find out, in the emulation, for which D they fit.
# - ★★★ (a weekend) Three consumer warpgroups in ping-pong at D = 128: what must the tile be, and do the registers suffice?
#
# **Read:** `papers/flash_attention_3.md`, `papers/flash_attention_4.md`; the PTX ISA on `mbarrier`, `cp.async.bulk.tensor`,
# `wgmma` and `setmaxnreg`.
#
# **Next:** [02e_fa2_cuda_hopper_backward.ipynb](02e_fa2_cuda_hopper_backward.ipynb): Hopper's backward.
