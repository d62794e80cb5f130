"""What notebook 01 draws, counts and breaks: memories, the order of the visits, who works, measured speeds."""

import contextlib
from unittest.mock import patch

import matplotlib.pyplot as plt
import torch
from matplotlib.collections import PatchCollection

from reference import cases, error
from steps import engine
from steps import step01_fa1_numba as stage
from steps.bench import cost, rows
from steps.figures.n00_naive import symptom  # noqa: F401  The notebook's hunts begin with it.
from steps.figures.picture import picture
from steps.figures.plots import COLOURS, FAINT, INK, OPERAND, ink_on, style
from steps.step00_naive import io_count

GPU = cost.GPUS["NVIDIA H200"]
BANKS, LANES = 32, 128  # numbers that shared memory delivers to an SM in a cycle; its multiply-adds in float32
MULTIPLY_ADDS = GPU.fp32_tflops / 2  # in 10^12 a second, all SMs together
# What each memory delivers, in 10^12 numbers of float32 a second.
DELIVERS = {"shared memory": MULTIPLY_ADDS * BANKS / LANES, "device memory": GPU.bandwidth / 4}
# The tiles that each rung takes on a GPU at d = 64.
TILES = {"published": (16, 16), "loops_swapped": (16, 32), "registers": (128, 64)}


def memories():
    """Sizes and speeds of an H200's memories, in words."""
    sm = GPU.multiprocessor
    lines = [f"{GPU.name}: {GPU.sms} SMs, {MULTIPLY_ADDS:.1f} x 10^12 multiply-adds a second in float32"]
    for name, size in (("registers", 4 * sm.registers), ("shared memory", sm.shared)):
        lines.append(f"{name:13}  {size / 2**10:.0f} KiB an SM, {size * GPU.sms / 2**20:.1f} MiB in all")
    for name, numbers in DELIVERS.items():
        waits = MULTIPLY_ADDS / numbers
        lines.append(f"{name:13} {4 * numbers:5.1f} TB/s: a number in the time of {waits:2.0f} multiply-adds")
    return "\n".join(lines)


def standard_traffic(N=4096, d=64):
    """How long an H200 would take for standard attention's traffic, in times of its arithmetic."""
    moved = sum(io_count.standard_count(N, d))
    lines = [f"standard attention, N = {N}, d = {d}: {moved / (4 * N * d + N):.0f} times what q, k, v, out and lse are"]
    for dtype, size, rate in (("float32", 4, MULTIPLY_ADDS), ("fp16, tensor cores", 2, GPU.half_tflops / 2)):
        times = moved / (GPU.bandwidth / size) / (2 * N * N * d / rate)
        lines.append(f"{dtype:18} the traffic takes {times:.1f} times as long as the arithmetic")
    return "\n".join(lines)


def visits_of_O(V, trace):
    """The six values, and where O goes at each visit. trace: [(O of the tile alone, O)] after each tile of two keys."""
    style()
    fig, axes = plt.subplots(1, 3, figsize=(8.4, 3.2), layout="constrained", sharey=True)
    for n, (ax, (alone, O)) in enumerate(zip(axes, trace, strict=True)):
        for j, (x, y) in enumerate(V.tolist()):
            seen = j < 2 * n + 2
            ax.plot(x, y, "o", color=INK if seen else FAINT, ms=4)
            ax.text(x, y + 0.45, f"v{j}", ha="center", fontsize=9, alpha=1 if seen else 0.6)
        if n:
            before = trace[n - 1][1]
            ax.plot(*torch.stack([before, alone]).T, color=FAINT, lw=1.5, zorder=0)
            ax.plot(*before, "s", color=INK, ms=7, label="old O")
        ax.plot(*alone, "D", color=OPERAND["V"], ms=8, label="the tile alone")
        ax.plot(*O, "X", color=OPERAND["O"], ms=10, label="new O")
        ax.set(title=f"visit {n + 1}: keys {2 * n}, {2 * n + 1}", xlim=(-1, 11), ylim=(-1, 7.6))
    fig.legend(*axes[2].get_legend_handles_labels(), loc="outside lower center", ncols=3)
    return picture(fig, """Three plots of the six values, one for each visit. At the first, O is the attention over the
        first tile. At visits 2 and 3 the new O lies on the line from the old O to the attention over the new tile
        alone, nearer to the tile's.""")


def order_of_visits():
    """Top: the visits of the tiles of S, numbered, in both orders. Bottom: the rows of O written at each visit."""
    style()
    orders = {"FA1: keys outside": [(i, j) for j in range(4) for i in range(3)],
              "FA2: queries outside": [(i, j) for i in range(3) for j in range(4)]}  # fmt: skip
    fig, axes = plt.subplots(2, 2, figsize=(8, 4.6), height_ratios=(1.1, 1), layout="constrained")
    for (name, order), top, bottom in zip(orders.items(), *axes, strict=True):
        for visit, (i, j) in enumerate(order, 1):
            top.add_patch(plt.Rectangle((8 * j, 8 * i), 8, 8, fc=COLOURS[i], ec="white", lw=2))
            look = {"ha": "center", "va": "center", "fontweight": "bold", "color": ink_on(COLOURS[i])}
            top.text(8 * j + 4, 8 * i + 4, visit, **look)
            if name.startswith("FA1") or j == 3:
                bottom.add_patch(plt.Rectangle((visit - 0.4, 8 * i), 0.8, 8, fc=COLOURS[i]))
        top.set(xlim=(0, 32), ylim=(24, 0), title=name, xlabel="key", ylabel="query", xticks=range(0, 33, 8))
        bottom.set(xlim=(0.4, 12.6), ylim=(24, 0), xlabel="visit", ylabel="row of O written", xticks=range(1, 13))
        for ax in (top, bottom):
            ax.set_yticks(range(0, 25, 8))
            ax.grid(False)
    return picture(fig, """Top: S as 3 by 4 tiles with the number of the visit. FA1 numbers them down the columns, FA2
        along the rows. Bottom: the rows of O written at each visit. FA1 writes a tile of rows at every one of the 12
        visits, so each row four times; FA2 writes each row once, at visits 4, 8 and 12.""")


def traffic(N=1024, d=64, tiles=(16, 32, 64, 128)):
    """Numbers that pass between device memory and the chip, in units of N^2: counted, and equal to the formulas."""
    lines = [f"{'moved / N^2':12}" + "".join(f"  tile {b:3}" for b in tiles)]
    for order in ("standard", "fa1", "fa2"):
        run, formula = getattr(io_count, order), getattr(io_count, f"{order}_count")
        counts = []
        for b in tiles:
            tile = () if order == "standard" else (b, b)
            memory = io_count.Memory()
            run(memory, *torch.randn(3, N, d), **({"tile": tile} if tile else {}))
            assert (memory.loads, memory.stores) == formula(N, d, *tile)
            counts.append((memory.loads + memory.stores) / N**2)
        lines.append(f"{order:12}" + "".join(f"{count:10.2f}" for count in counts))
    return "\n".join(lines)


def who_works(B=1, H=16, N=4096):
    """The multiprocessors of an H200, and the blocks that start on them: of a head one, or one for each query tile."""
    style()
    fig, axes = plt.subplots(1, 2, figsize=(8.4, 3.8), layout="constrained")
    grids = (("published", 1, B * H), ("registers", 2, B * H * -(-N // TILES["registers"][0])))
    for ax, (name, resident, blocks) in zip(axes, grids, strict=True):
        boxes, colours = [], []
        for slot in range(GPU.sms * resident):
            y, x = divmod(slot % GPU.sms, 12)
            y += 0.88 / resident * (slot // GPU.sms)
            head, first = divmod(slot * B * H, blocks)
            boxes.append(plt.Rectangle((x, y), 0.88, 0.88 / resident))
            colours.append(COLOURS[head % 6] if head < B * H else "white")
            if head < B * H and first < B * H:
                look = {"ha": "center", "va": "center", "fontsize": 9, "color": ink_on(colours[-1])}
                ax.text(x + 0.44, y + 0.46 / resident, head, **look)
        ax.add_collection(PatchCollection(boxes, facecolor=colours, edgecolor=FAINT, lw=0.8))
        busy = min(1, blocks / GPU.sms)
        ax.set_title(f"{name}: {blocks} blocks, {busy:.0%} of the SMs work", fontsize=10)
        ax.set(xlim=(-0.1, 12), ylim=(11, -0.1), xticks=[], yticks=[])
        ax.grid(False)
        ax.spines[:].set_visible(False)
    return picture(fig, f"""The {GPU.sms} multiprocessors of an H200 as a grid of 11 by 12, for one sequence of 4096
        tokens with 16 heads. Published: 16 are coloured, one for each head, the others are empty. Registers: each has
        two blocks; the first blocks belong to heads 0 to 8.""")


def cases_of_the_contract(*names, **replaced):
    """Whether each rung passes these cases; or rung published with functions of its file replaced."""
    module, lines = stage.fwd_0_published, []
    with contextlib.ExitStack() as stack:
        for name, function in replaced.items():
            stack.enter_context(patch.object(module, name, function))
        module.forward_kernel.cache_clear()  # Kernels that were compiled before still call the old functions.
        for case in (case for name in names for case in cases.CASES if case.name == name):
            x = cases.build(case, stage.SUPPORTS, torch.float32, engine.device)
            want = error.expected(x.q, x.k, x.v, x.dout, causal=x.causal, scale=x.scale)
            words = []
            for rung in ("published",) if replaced else TILES:
                got = dict(zip(("out", "lse"), stage.forward(x.q, x.k, x.v, **x.options, rung=rung), strict=True))
                words.append(f"{rung} {'FAILS' if error.failures(got, want) else 'passes'}")
            lines.append(f"{case.says}\n    {', '.join(words)}")
    module.forward_kernel.cache_clear()
    return "\n".join(lines)


def recorded(N=4096):
    """{pass: {kernel or peer: {d: row}}} on an H200 in float32, not causal."""
    at = {"gpu": GPU.name, "dtype": "fp32", "N": N, "causal": False, "options": {}, "timing": "interleaved"}
    found = {}
    for row in rows.latest(rows.fresh(rows.read())):
        if row["stage"] in ("01_fa1_numba", None) and all(row[name] == value for name, value in at.items()):
            found.setdefault(row["pass"], {}).setdefault(row["kernel"] or row["peer"], {})[row["D"]] = row
    return found


def speeds(N=4096):
    """Recorded TFLOP/s, shares of sdpa-efficient's speed, and the largest error."""
    lines = []
    for pass_, kernels in recorded(N).items():
        best = kernels["sdpa-efficient"]
        lines.append(f"{pass_:19}" + "".join(f"   d = {D:3}: TFLOP/s  share  error" for D in sorted(best)))
        for name in sorted(kernels):
            cells = [(row["tflops"], row["tflops"] / best[D]["tflops"], row["error"])
                     for D, row in sorted(kernels[name].items()) if D in best]  # fmt: skip
            lines.append(f"{name:19}" + "".join("{:19.1f}  {:5.2f}  {:5.0e}".format(*cell) for cell in cells))
    return "\n".join(lines)
