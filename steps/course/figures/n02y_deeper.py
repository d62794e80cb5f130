"""What notebook 02y shows of Hopper: what wgmma reads, who has how many registers, and where the clocks go."""

import itertools
import re
import textwrap

import torch
from matplotlib.colors import ListedColormap

from steps.course.bench import ablations
from steps.course.figures import n02d_hopper
from steps.course.figures.picture import pictured
from steps.course.figures.planted import GPU, compiled
from steps.course.figures.plots import COLOURS, subplots
from steps.course.workbook import edited, show
from steps.course.workbook.puzzles.operand_address import operand_address
from steps.step02_fa2_cuda import ladder


@pictured
def read_by_wgmma():
    """Which chunks of a tile four instructions read, its first 32 rows. Of K each reads two chunks of every row,
    which the swizzle moves about in a pattern that repeats after eight rows. Of V each reads 16 whole rows."""
    fig, axes = subplots(1, 2, figsize=(8.4, 4.2), sharey=True)
    for is_V, ax in enumerate(axes):
        reader = torch.full((64 * 8,), float("nan"))
        for step, k, i in itertools.product(range(4), range(16), range(64)):
            where = (2048 * step, 8192, 1024) if is_V else (32 * step, 16, 1024)
            reader[operand_address(*where, k, i, bool(is_V)) // 16] = step
        ax.pcolormesh(reader.view(64, 8), cmap=ListedColormap(COLOURS[:4]), edgecolors="white", lw=0.5)
        ax.set(ylim=(32, 0), xlabel="16-byte chunk of the row", yticks=range(0, 33, 8))
        ax.set_title("V: an instruction reads 16 keys" if is_V else "K: an instruction reads 16 columns")
        ax.grid(False)
    axes[0].set_ylabel("row of 128 bytes, the first 32 of 64")
    n02d_hopper.legend(fig, {f"instruction {step}": COLOURS[step] for step in range(4)}, "outside lower center")
    return fig


def registers_of_the_roles(D):
    """What a consumer of rung hopper needs, and what setmaxnreg gives it, in words."""
    row = ladder.FORWARD["hopper"]
    Br, Bc = row.tiles[0][D]
    need, n = Bc // 2 + Bc // 4 + D // 2, Br // 64  # 64 rows among 128 threads; P has 16 bits
    text = re.findall(r"_REGISTERS = .*", str(show("fwd_8_hopper")))
    kept, taken = (int(re.findall(r"[?:] (\d+)", line)[n - 1]) for line in text)
    first = GPU.multiprocessor.registers // row.threads(D, Br, Bc) // 8 * 8
    given = f"at first {first}, then {taken}, producer {kept}; all {128 * (kept + n * taken)}"
    return f"D = {D:3}, {n} consumers: S, P, O need {need}; {given}"


def without_the_wait():
    """What ptxas says of rung wgmma when it does not wait for S."""
    with edited("fwd_6_wgmma.cu", ("    wgmma_wait<0>();\n    if (j * Bc", "    if (j * Bc")):
        try:
            compiled("fwd_6_wgmma", 128)
        except RuntimeError as refused:
            found = re.findall(r"\(C75\d\d\)[^;\n]*", str(refused))
            return "\n".join(textwrap.fill(says, 88) for says in dict.fromkeys(found))


def recorded():
    """[(what was changed, clocks from one block of keys to the next, timeline)] of rung hopper as it is now."""
    for one in ablations.read("timeline").get("timelines", ()):
        changed = ", ".join(f"{name} = {value}" for name, value in one["switches"].items())
        first, *between, last = (step[0][0] for step in one["marks"])
        yield f"without {one['without']}" if "without" in one else changed, (last - first) / (len(between) + 1), one


@pictured
def timelines():
    """Recorded timelines of two warpgroups over five steps, without and with turns. In both products follow each other
    nearly without a gap, the softmax of one warpgroup lies under the products of both, and the two alternate."""
    fig, grid = subplots(2, 1, figsize=(8.5, 4.6))
    bars = ("starts", "output", 0, COLOURS[0]), ("scores", "exponentials", 0.4, COLOURS[1])
    for changed, clocks, one in recorded():
        if changed.startswith("OVERLAP = 1"):
            ax, (origin, end) = grid[one["switches"]["PINGPONG"]], (one["marks"][n][0][0] for n in (8, 13))
            for (*events, shift, colour), group in itertools.product(bars, (0, 1)):
                a, b = map(ablations.EVENTS.index, events)
                pieces = [(step[group][a] - origin, step[group][b] - step[group][a]) for step in one["marks"]]
                ax.broken_barh(pieces, (group + shift - 0.18, 0.36), fc=colour, ec="white")
            ax.set_yticks((0, 0.4, 1, 1.4), ("group 0: products", "softmax", "group 1: products", "softmax"))
            turns = "with turns" if changed.endswith("1") else "without turns"
            ax.set(ylim=(1.7, -0.3), xlim=(0, end - origin), title=f"{turns}: {clocks:.0f} clocks a step")
            ax.grid(axis="y", visible=False)
    grid[1].set_xlabel("clocks of the SM, D = 128, no mask")
    return fig
