"""Pictures and experiments of notebook 02d: who waits for whom on Hopper."""

import functools
import itertools
import re

import matplotlib.pyplot as plt
import torch

from reference import error
from steps.bench import cost, rows
from steps.figures import planted
from steps.figures.picture import picture
from steps.figures.plots import COLOURS, FAINT, GREYS, OPERAND, PEERS, colour_of, ink_on, style
from steps.step02_fa2_cuda import calls, emulator, plan
from steps.workbook import edited

UNITS = {"products": COLOURS[0], "float32": COLOURS[2], "exp": COLOURS[1]}
H200 = cost.GPUS["NVIDIA H200"]


def axes(rows=1, columns=1, **how):
    """(figure, axes) in the course's style."""
    style()
    return plt.subplots(rows, columns, layout="constrained", **how)


def boxes(fig, colours, where="outside upper center"):
    """A legend of {name: colour}, a box for each."""
    patches = [plt.Rectangle((0, 0), 1, 1, color=colour) for colour in colours.values()]
    fig.legend(patches, colours, ncols=len(colours), loc=where)


@functools.cache
def fresh():
    """The committed rows of the kernels as they are now."""
    return rows.fresh(rows.read())


def of_one_run(*names, found=None, pass_="fwd", D=128, N=4096, causal=False):
    """{name: TFLOP/s} of kernels and peers on an H200, in the last run in which all of them were measured; or {}."""
    at = {"gpu": H200.name, "pass": pass_, "D": D, "N": N, "causal": causal, "dtype": "bf16", "options": {}}
    runs = {}
    for row in found or fresh():
        if row["timing"] == "interleaved" and at.items() <= row.items():
            runs.setdefault(row["run"], {})[row["kernel"] or row["peer"]] = row["tflops"]
    complete = [runs[run] for run in sorted(runs) if set(names) <= runs[run].keys()]
    return {name: complete[-1][name] for name in names} if complete else {}


def share_of_the_peak(*kernels):
    """The kernels' TFLOP/s as shares of the datasheet's, D = 128, N = 4096, full."""
    found = of_one_run(*kernels)
    words = [f"{kernel} {tflops / H200.half_tflops:.0%}" for kernel, tflops in found.items()]
    return f"of an H200's {H200.half_tflops:.0f} TFLOP/s: {', '.join(words) or 'not measured as they are now'}"


def lockstep(work, steps):
    """[(unit, warpgroup, start, end)]: both do the same at the same time, each with half of the unit."""
    now, spans = 0, []
    for unit, clocks in steps * [*work.items()]:
        spans += [(unit, group, now, now + 2 * clocks) for group in (0, 1)]
        now += 2 * clocks
    return spans


def ping_pong(work, steps):
    """The same with turns: each unit serves one warpgroup at a time, and they alternate."""
    free, ready, spans = dict.fromkeys(work, 0), [0, 0], []
    for group, (unit, clocks) in itertools.product(steps * (0, 1), work.items()):
        start = max(free[unit], ready[group])
        free[unit] = ready[group] = start + clocks
        spans.append((unit, group, start, start + clocks))
    return spans


def lockstep_and_ping_pong(tile_clocks):
    """Timelines of a model of two warpgroups, and how busy they keep the tensor cores."""
    fig, grid = axes(2, 2, figsize=(8.5, 4), sharex=True)
    for column, D in zip(grid.T, (64, 128), strict=True):
        work = dict(zip(("products", "exp", "float32"), tile_clocks(D, Br=64), strict=True))
        for ax, turns in zip(column, (lockstep, ping_pong), strict=True):
            for unit, group, start, end in turns(work, 3):
                ax.barh(group, end - start, left=start, height=0.7, color=UNITS[unit], edgecolor="white")
            busy = 2 * work["products"] * 100 / max(end for *_, end in turns(work, 100))
            ax.set_title(f"D = {D}, {turns.__name__.replace('_', '-')}: products {busy:.0%} of the time", fontsize=10)
            ax.set(ylim=(1.6, -0.6), xlim=(0, 11500))
            ax.set_yticks((0, 1), ("group 0", "group 1"))
            ax.grid(axis="y", visible=False)
    fig.supxlabel("clocks, three steps of each warpgroup", fontsize=10)
    boxes(fig, UNITS)
    alt = """A model's timelines of two warpgroups over three steps, in lockstep and in ping-pong. In lockstep the
    tensor cores work 39 % of the time at D = 64 and 55 % at D = 128; in ping-pong, where one's softmax lies under
    the other's products, 78 % and 100 %."""
    return picture(fig, alt)


# --- copies, phases, stages -----------------------------------------------------------------------------------


def emulate(text, kernel, *arguments, block=32):
    """Runs a kernel of this text in the emulation of a GPU, with one block."""
    planted.emulated(text, kernel, arguments, grid=1, block=block, shared_bytes=8192, T="bf16")


def tensor_map(x, rows):
    """The tensor map of a matrix: where it lies, its strides, and a box of so many rows and all columns."""
    return emulator.tensor_map(*plan.view_and_box(x[None, None], rows))


def copied_box(y, first=13, rows=21):
    """The two slabs that TMA wrote for rows first ... of a matrix with so many rows. y: 10 x row + chunk."""
    fig, grid = axes(1, 2, figsize=(8.5, 4.2), sharey=True)
    chunks = y.view(2, 16, 8, 8)[..., 0]  # slab, row, position in the row
    inside = rows - first
    for slab, ax in enumerate(grid):
        for row, at in itertools.product(range(16), range(8)):
            chunk = int(chunks[slab, row, at]) - 10 * (first + row)
            colour = "white" if row >= inside else OPERAND["K"] if chunk == 2 + 8 * slab else FAINT
            ax.add_patch(plt.Rectangle((at, row), 1, 1, facecolor=colour, edgecolor="white"))
            says = chunk if row < inside else ""
            ax.text(at + 0.5, row + 0.55, says, ha="center", va="center", fontsize=9, color=ink_on(colour))
        frame = {"facecolor": "none", "edgecolor": GREYS[1], "ls": "--", "clip_on": False}
        ax.add_patch(plt.Rectangle((0, inside + 0.05), 8, 16 - inside - 0.05, **frame))
        ax.text(4, (inside + 16) / 2, "rows that x does not have: all zeros", ha="center", va="center")
        ax.set(xlim=(0, 8), ylim=(16, 0), xlabel="place in the row, 16 bytes each", xticks=[])
        ax.set_title(f"slab {slab}: columns {64 * slab} to {64 * slab + 63}")
        ax.set_yticks([row + 0.5 for row in range(16)], range(16), fontsize=9)
        ax.grid(False)
    grid[0].set_ylabel("row of 128 bytes")
    alt = """What TMA wrote: two slabs of 16 rows of 128 bytes, each cell a chunk of 16 bytes with its number in the
    row of x. In each slab one chunk is marked; it stands in another place in each of eight rows. Rows 8 to 15, in a
    dashed frame, do not exist in x and are zero."""
    return picture(fig, alt)


ENDED = """#include "ptx.cuh"
extern "C" __global__ void passes(int ended, int parity) {
  SharedMemory smem;
  Shared<Barrier> b = smem.array<Barrier>(1);
  barrier_init(b, 1);
  for (int i = 0; i < ended; i++) barrier_arrive(b);  // ends a phase
  barrier_wait(b, parity);
}"""


def phases():
    """What a wait does, by the number of phases that have ended and by the parity that it asks for."""
    how, lines = dict(grid=1, block=1, shared_bytes=64, T="bf16"), ["phases ended   wait for 0   wait for 1"]
    for ended in range(5):
        reports = [planted.report(ENDED, "passes", (ended, parity), **how) for parity in (0, 1)]
        says = ["waits" if "is stuck" in report else "goes on" for report in reports]
        lines.append(f"{ended:7}        {says[0]:12} {says[1]}")
    return "\n".join(lines)


def ring_of_stages(copies, uses):
    """The spans of copies and uses in a ring of two stages, and the parity of each barrier's phase."""
    fig, ax = axes(figsize=(8.4, 3))
    last = uses[-1][1] + 1
    for side, barrier, spans in (("producer", "full", copies), ("consumer", "empty", uses)):
        for n, (start, end) in enumerate(spans):
            ax.barh(side, end - start, height=0.7, left=start, color=COLOURS[n % 2], edgecolor="white")
            ax.text((start + end) / 2, side, n, ha="center", va="center", color=ink_on(COLOURS[n % 2]))
        for stage in (0, 1):
            ends = [0, *(end for _, end in spans[stage::2]), last]  # a phase of full ends with a copy
            for phase, (start, end) in enumerate(itertools.pairwise(ends)):
                shade, at = (FAINT, GREYS[1])[phase % 2], f"{barrier}[{stage}]"
                ax.barh(at, end - start, left=start, height=0.55, color=shade, edgecolor="white")
                ax.text(start + 0.2, at, phase % 2, va="center", fontsize=9, color=ink_on(shade))
    ax.set(xlabel="clock", xlim=(0, last), xticks=range(0, last, 2))
    ax.set_title("two stages (blue, orange): tiles, and the parity of each barrier's phase")
    ax.invert_yaxis()
    ax.grid(axis="y", visible=False)
    alt = """A ring of two stages. The producer copies tiles 0 to 5 back to back into stages 0, 1, 0, 1 ...; the
    consumer uses each as soon as it has come. The parity of full flips when a copy ends, that of empty when a use
    ends."""
    return picture(fig, alt)


def one_wgmma():
    """Which numbers an instruction reads and where its result goes: 64 x 16 times 16 x 128."""
    fig, ax = axes(figsize=(8.4, 3.6))
    for warp in range(4):
        shade = OPERAND["S"] if warp % 2 else "#8cc6ea"
        ax.add_patch(plt.Rectangle((24, 16 * warp), 128, 15, color=shade))
        ax.text(88, 16 * warp + 7.5, f"S, rows {16 * warp} to {16 * warp + 15}: registers of warp {warp}",
                ha="center", va="center", color=ink_on(shade))  # fmt: skip
    ax.add_patch(plt.Rectangle((0, 0), 16, 63, color=OPERAND["Q"]))
    ax.text(8, 31, "Q\n64 x 16", ha="center", va="center", color=ink_on(OPERAND["Q"]))
    ax.add_patch(plt.Rectangle((24, -24), 128, 16, color=OPERAND["K"]))
    ax.text(88, -16, "K transposed, 16 x 128: shared memory", ha="center", va="center", color=ink_on(OPERAND["K"]))
    ax.text(8, 66, "shared\nmemory", ha="center", va="top")
    ax.set(xlim=(-4, 154), ylim=(78, -26), aspect="equal")
    ax.axis("off")
    alt = """One wgmma. Q, 64 x 16 numbers, and K transposed, 16 x 128, are read from shared memory. The result S,
    64 x 128, lies in the registers of four warps, 16 rows each."""
    return picture(fig, alt)


# --- mistakes -------------------------------------------------------------------------------------------------

RUNGS = {"wgmma": 6, "roles": 7, "hopper": 8}
SCHEDULES = {
    "copies late": {},  # the emulation's default: finds waits that are missing
    "products late": {"copies": "eager", "wgmma": "late"},  # finds stages that are filled again too early
    "random": {"threads": "random", "copies": "random", "wgmma": "random", "seed": 1},
}


def outcomes(rung, mistakes=None, backward=False):
    """What becomes of a rung as it is, and with each of {name: (old text, new text)}, in three schedules, in words."""
    sizes = (400, 64) if backward else (300, 32)
    q, k, v, dout = torch.randn(4, 1, 1, *sizes, generator=torch.Generator().manual_seed(0)).bfloat16()
    file, tile = f"{'bwd' if backward else 'fwd'}_{'2' if backward else RUNGS[rung]}_{rung}.cu", (64, 64)
    want, lines = error.expected(q, k, v, dout), []
    results = ("dq", "dk", "dv") if backward else ("out", "lse")

    def outcome(how):
        try:
            with emulator.schedule(**how):
                found = out, lse = calls.forward(q, k, v, rung=rung, tile=tile)
                found = calls.backward(dout, q, k, v, out, lse, rung=rung) if backward else found
        except RuntimeError as report:
            return "stuck" if "stuck" in str(report) else "refused"
        spoilt = error.failures(dict(zip(results, found, strict=True)), want)
        return f"spoils {', '.join(spoilt)}" if spoilt else "lives"

    if mistakes:
        lines.append(f"{'':36}" + "".join(f"{name:17}" for name in SCHEDULES).rstrip())
    for name, change in ({f"{rung} as it is": None} | (mistakes or {})).items():
        with edited(file, *([change] if change else [])):
            lines.append(f"{name:36}" + "".join(f"{outcome(how):17}" for how in SCHEDULES.values()).rstrip())
    return "\n".join(lines)


def report_of(*mistake):
    """What the emulation says of rung roles with a mistake, shortened, and the lines that it names."""
    q, k, v = torch.randn(3, 1, 1, 300, 32, generator=torch.Generator().manual_seed(0)).bfloat16()
    try:
        with edited("fwd_7_roles.cu", mistake) as lines:
            calls.forward(q, k, v, rung="roles", tile=(64, 64))
    except RuntimeError as stuck:
        told = re.sub(r"; threads 1-31 returned.*|, and count as missing| \(\d+ of \d+ arrivals.*?\)", "", str(stuck))
        named = sorted({int(n) for n in re.findall(r"\.cu:(\d+)", told)})
        return "\n".join([told, *(f"line {n}: {lines[n - 1].strip()}" for n in named)])
    return "It ended."


# --- measured -------------------------------------------------------------------------------------------------

LADDER = "fwd_5_fa2", "fwd_6_wgmma", "fwd_7_roles", "fwd_8_hopper"
BESIDE = "sdpa-flash", "sdpa-cudnn", "fa4", "fa3"


def ladder(N=4096):
    """The last rungs of the forward and others in one run, D = 128, without and with a causal mask."""
    masks = {"full": False, "causal": True}.items()
    panels = {f"forward, {how}, D = 128, N = {N}": of_one_run(*LADDER, *BESIDE, N=N, causal=x) for how, x in masks}
    alt = """Bars of TFLOP/s at D = 128, N = 4096, in one run. Each of fa2, wgmma, roles and hopper is higher than the
    one before. FlashAttention-3 is the highest of all: a little above hopper without a mask, a tenth with one.
    FlashAttention-4 and cuDNN are near hopper, FlashAttention-2 at half."""
    return speeds(panels, alt)


def speeds(panels, alt):
    """Bars of {title: {kernel or peer: TFLOP/s}}, a panel for each title."""
    fig, grid = axes(1, len(panels), figsize=(8.5, 3.6), sharey=True)
    for ax, (title, found) in zip(grid, panels.items(), strict=True):
        bars = ax.bar(range(len(found)), found.values(), color=[colour_of(name) for name in found])
        ax.bar_label(bars, fmt="%.0f", fontsize=9)
        ax.set_xticks(range(len(found)), [label(name) for name in found], rotation=40, ha="right", fontsize=9)
        ax.set_title(title if found else f"{title}: not measured as it is now")
        ax.grid(axis="x", visible=False)
    grid[0].set_ylabel("TFLOP/s, bf16, H200")
    return picture(fig, alt)


def label(name):
    """ "hopper" of "fwd_8_hopper", "FlashAttention-3" of "fa3"."""
    return PEERS[name][0] if name in PEERS else name.split("_", 2)[2]
