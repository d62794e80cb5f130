"""The one style that all of the course's figures share, and the pictures of a stage's rungs on the pages.

A function returns a closed matplotlib Figure, so that a notebook shows it once, as the value of its cell. The
background is opaque white, because a dark page would swallow dark text.

`python -m steps.course.figures.plots` draws the pictures anew whose rows have changed. A picture carries its numbers
inside, so that one of other rows is noticed; --check draws nothing and exits with 1 if there is one.
"""

import collections
import json
import statistics
import textwrap
from pathlib import Path
from typing import Annotated

import matplotlib.pyplot as plt
import typer
from matplotlib.colors import to_rgb
from PIL import Image

from steps.course.bench import rows as results
from steps.course.figures.picture import picture
from steps.places import require_clone

INK, FAINT = "#1a1a1a", "#c8c8c8"
# Okabe and Ito's palette without yellow: told apart with any kind of colour vision.
COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9")
PALE = tuple(tuple((1 + c) / 2 for c in to_rgb(colour)) for colour in COLOURS)
GREYS = ("#222222", "#5f5f5f", "#8a8a8a", "#ababab")
# One thing has one colour in all figures: a rank, an operand and its tiles, what a test sees and does not see.
RANK = COLOURS[:4]
OPERAND = {"Q": COLOURS[0], "K": COLOURS[1], "V": COLOURS[4], "S": COLOURS[5], "P": COLOURS[5], "O": COLOURS[2]}
SEEN, UNSEEN = COLOURS[2], COLOURS[1]
STYLE = {
    "figure.figsize": (7.2, 4.0), "figure.dpi": 110, "figure.facecolor": "white", "font.size": 10, "text.color": INK,
    "savefig.facecolor": "white", "savefig.transparent": False, "savefig.bbox": "tight", "legend.frameon": False,
    "axes.facecolor": "white", "axes.edgecolor": INK, "axes.labelcolor": INK, "axes.titlelocation": "left",
    "axes.spines.top": False, "axes.spines.right": False, "axes.grid": True, "axes.axisbelow": True,
    "axes.titlesize": 11, "axes.prop_cycle": plt.cycler(color=COLOURS), "grid.color": FAINT, "grid.linewidth": 0.6,
    "xtick.color": INK, "ytick.color": INK, "lines.linewidth": 1.8, "lines.markersize": 5,
}  # fmt: skip


def style():
    """Sets matplotlib's defaults in this process: dark text on opaque white, no frame, a faint grid."""
    plt.rcParams.update(STYLE)


def cells(ax, colours, words=(), edge="white", **axes):
    """A grid of coloured cells with a word in each, row by row from the top; (row, column) 0 and on are its ticks.

    colours, words: a list for each row. axes: what `ax.set` takes.
    """
    rgb = [[to_rgb(colour) for colour in row] for row in colours]
    ax.pcolormesh(range(len(rgb[0])), range(len(rgb)), rgb, shading="nearest", edgecolors=edge, lw=1)
    for i, row in enumerate(words):
        for j, word in enumerate(row):
            ax.text(j, i, word, color=ink_on(colours[i][j]), fontsize=9, ha="center", va="center_baseline")
    ax.set(ylim=(len(rgb) - 0.5, -0.5), **axes)
    ax.tick_params(length=0)
    ax.grid(False)
    ax.spines[:].set_visible(False)


def who_sees(found, alt, harmless=("as it is",)):
    """A table of {(mistake, who): word}, "lives" if unseen. What nobody sees is orange, unless it is harmless."""
    names, columns = (list(dict.fromkeys(key[n] for key in found)) for n in (0, 1))
    words = {name: [textwrap.fill(found[name, column], 15) for column in columns] for name in names}
    missed = {name for name in names if set(words[name]) == {"lives"}} - set(harmless)
    colours = [
        [SEEN if word != "lives" else UNSEEN if name in missed else FAINT for word in words[name]] for name in names
    ]
    fig, ax = subplots(figsize=(8.4, 0.6 + 0.46 * len(names)))
    cells(ax, colours, words.values(), yticks=range(len(names)), yticklabels=names)
    ax.set_xticks(range(len(columns)), [column.replace("_", "\n") for column in columns])
    told = "; ".join(f"{name}, seen by {who}: {word}" for (name, who), word in found.items() if word != "lives")
    return picture(fig, f"{alt} Green is seen, orange never seen. {told}. All others live.")


def colour_of(kernel):
    """The colour of a kernel's rung, or of a peer: "fwd_3_ldmatrix" and "bwd_3_hopper" have the same.

    Gluon's is rung 3 forward and rung 2 backward. It has one colour, which no other rung of stage 03 has.
    """
    if kernel in PEERS:
        return PEERS[kernel][2]
    number = 3 if kernel.endswith("_gluon") else int(kernel.split("_")[1])
    return COLOURS[number % len(COLOURS)]


def ink_on(colour):
    """INK or "white": the one in which text is easier to read on this colour, by WCAG 2's contrast."""
    linear = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in to_rgb(colour)]
    luminance = sum(weight * c for weight, c in zip((0.2126, 0.7152, 0.0722), linear, strict=True))
    return INK if luminance > 0.2 else "white"


def subplots(rows=1, columns=1, **how):
    """(figure, its axes), in the style of the course and arranged without overlaps."""
    style()
    return plt.subplots(rows, columns, layout="constrained", **how)


def boxes(ax, found):
    """Rectangles with a word in each, on axes without a grid. found: [(x, y, width, height, colour, word)]."""
    ax.grid(False)
    for x, y, width, height, colour, word in found:
        ax.add_patch(plt.Rectangle((x, y), width, height, fc=colour, ec=INK, lw=0.8, clip_on=False))
        place = x + width / 2, y + height / 2
        ax.text(*place, word, color=ink_on(colour), fontsize=9, ha="center", va="center_baseline")


def visited_tiles(panels, side, white=None):
    """Queries against keys, a panel for each {title: (tiles, pairs)}, with a dot for each pair that is seen.

    tiles: 0 for those that are not visited, 1 for those visited without a mask (blue), 2 for those with one (orange).
    white: what the legend says of those that are not visited, if it names them.
    """
    fig, axes = subplots(1, len(panels), figsize=(8.4, 3.1))
    end = side * max(max(tiles.shape) for tiles, _ in panels.values())
    for ax, (title, (tiles, pairs)) in zip(axes, panels.items(), strict=True):
        colours = {(i, j): COLOURS[5 if tiles[i, j] == 1 else 4] for i, j in tiles.nonzero().tolist()}
        boxes(ax, [(side * j, side * i, side, side, colour, "") for (i, j), colour in colours.items()])
        i, j = pairs.nonzero(as_tuple=True)
        ax.plot(j + 0.5, i + 0.5, ".", color=INK, ms=3)
        ax.add_patch(plt.Rectangle((0, 0), *reversed(pairs.shape), fill=False, edgecolor=INK, lw=2))
        ax.set(xlim=(-0.5, end + 0.5), ylim=(end + 0.5, -0.5), aspect="equal", xlabel="key", title=title)
        ax.set(xticks=range(0, end + 1, side), yticks=range(0, end + 1, side))
    axes[0].set_ylabel("query")
    told = {4: "tile with a mask", 5: "tile without"}
    handles = [plt.Rectangle((0, 0), 1, 1, fc=COLOURS[n], ec=INK, label=words) for n, words in told.items()]
    if white:
        handles.append(plt.Rectangle((0, 0), 1, 1, fc="white", ec=INK, label=white))
    handles += axes[0].plot([], [], ".", color=INK, label="pair that is seen")
    fig.legend(handles=handles, loc="outside lower center", ncols=len(handles))
    return fig


def table(*lines):
    """Lines of words and numbers as text in columns: the first begins at the left, the others end at the right."""
    lines = [[str(word) for word in line] for line in lines]
    first, *widths = (max(map(len, column)) for column in zip(*lines, strict=True))
    right = "".join(f"{{:>{width + 3}}}" for width in widths)
    return "\n".join((f"{{:{first}}}" + right).format(*line).rstrip() for line in lines)


LADDER = {"dtype": "bf16", "D": 128, "N": 4096, "causal": False}  # what the ladder compares, where a rung takes it
PEERS = {
    "sdpa-flash": ("FlashAttention-2", "--", GREYS[2]), "sdpa-cudnn": ("cuDNN", "-", GREYS[0]),
    "fa4": ("FlashAttention-4", ":", GREYS[1]), "fa3": ("FlashAttention-3", "-.", GREYS[3]),
}  # fmt: skip
PICTURES = {"02_fa2_cuda": "notebooks/figures/ladder.png", "03_triton": "notebooks/figures/ladder_triton.png"}
NARROW = "notebooks/figures/ladder_narrow.png"  # stage 02's, for the site's first screen and for phones


def like_the_ladder(row):
    """Compares by how much a row is what the ladder compares: dtype first, then D."""
    return [row[name] == value for name, value in LADDER.items()]


def alone(rows):
    """The rows of one GPU, without options, of interleaved calls."""
    return [row for row in rows if row["n_gpus"] == 1 and not row["options"] and row["timing"] == "interleaved"]


def ladder_rows(rows, stage="02_fa2_cuda"):
    """(GPU or None, {"fwd": ..., "bwd": {kernel: its row}}): the rungs of a stage's ladder, the lowest first.

    Of several GPUs the one on which most rungs were measured, and of two such the H200, not the H100; of several rows
    of one subject that of `latest`.
    """
    mine = [row for row in alone(rows) if row["stage"] == stage and like_the_ladder(row)[2:] == [True, True]]
    rungs_of = collections.Counter(gpu for gpu, _ in {(row["gpu"], row["kernel"]) for row in mine})
    gpu = max(rungs_of, key=lambda gpu: (rungs_of[gpu], gpu), default=None)
    rungs = {"fwd": {}, "bwd": {}}
    for row in sorted(results.latest([row for row in mine if row["gpu"] == gpu]), key=like_the_ladder):
        rungs.get(row["pass"], {})[row["kernel"]] = row
    return gpu, {pass_: dict(sorted(found.items())) for pass_, found in rungs.items()}


def ladder_numbers(rows, stage="02_fa2_cuda"):
    """What a stage's ladder shows of these rows, or None if there are not rungs of both passes.

    {"gpu", "matmul": TFLOP/s or None, "fwd": ..., "bwd": {"rungs": [[word, TFLOP/s, what differs from LADDER]],
    "peers": {name: TFLOP/s}}}. The peers are those of one run, in which most of the rungs were measured.
    """
    gpu, found = ladder_rows(rows, stage)
    runs = {row["run"] for row in alone(rows) if row["stage"] == stage}
    beside = [row for row in alone(rows) if row["run"] in runs and row["peer"] and row["gpu"] == gpu]
    products = [row["tflops"] for row in beside if row["peer"] == "matmul" and row["dtype"] == LADDER["dtype"]]
    numbers = {"gpu": gpu, "matmul": statistics.median(products) if products else None}
    for pass_, own in found.items():
        rungs = [[kernel.split("_", 2)[2], row["tflops"], "\n".join(differing(row))] for kernel, row in own.items()]
        run_of = [row["run"] for row in own.values() if all(like_the_ladder(row))]
        most = max(reversed(run_of), key=run_of.count, default=None)
        of_run = [row for row in beside if row["run"] == most and row["pass"] == pass_ and all(like_the_ladder(row))]
        peers = {row["peer"]: row["tflops"] for row in results.latest(of_run)}
        numbers[pass_] = {"rungs": rungs, "peers": {name: peers[name] for name in PEERS if name in peers}}
    return numbers if numbers["fwd"]["rungs"] and numbers["bwd"]["rungs"] else None


def differing(row):
    """Words for what a rung's row has that the ladder does not compare: ["fp32", "D=64"]."""
    same_dtype, same_D, *_ = like_the_ladder(row)
    return [row["dtype"]] * (not same_dtype) + [f"D={row['D']}"] * (not same_D)


def ladder(numbers):
    """TFLOP/s of a stage's rungs, one after the other, forward and backward; the peers as lines.

    numbers: as `ladder_numbers` gives them. The right axis is the share of the measured matrix product. A rung that
    does not take the ladder's head_dim or dtype is shown with another, and says so.
    """
    style()
    counts = [len(numbers[pass_]["rungs"]) for pass_ in ("fwd", "bwd")]
    how = dict(figsize=(10.8, 4.4), sharey=True, layout="constrained", width_ratios=[n + 1.5 for n in counts])
    fig, axes = plt.subplots(1, 2, **how)
    for ax, pass_, name in zip(axes, ("fwd", "bwd"), ("forward", "backward"), strict=True):
        words, tflops, notes = zip(*numbers[pass_]["rungs"], strict=True)
        bars = ax.bar(range(len(words)), tflops, width=0.66, color=COLOURS[0])
        for bar, note in zip(bars, notes, strict=True):
            bar.set_alpha(0.55 if note else 1)
        plain = {"facecolor": "white", "edgecolor": "none", "pad": 0.6}  # no line runs through a number
        ax.bar_label(bars, fmt="%.3g", padding=3, color=INK, fontsize=9, bbox=plain)
        ax.set_xticks(range(len(words)), [f"{word}\n{note}".strip() for word, note in zip(words, notes, strict=True)])
        ax.tick_params(axis="x", labelsize=9)
        ax.grid(axis="x", visible=False)
        for peer, speed in numbers[pass_]["peers"].items():
            about, line, colour = PEERS[peer]
            ax.axhline(speed, color=colour, linestyle=line, lw=1.4, label=f"{about} {speed:.3g}")
        if numbers[pass_]["peers"]:
            ax.legend(loc="upper left")
        ax.set_title(name)
    axes[0].set_ylabel("TFLOP/s")
    if ceiling := numbers["matmul"]:
        axes[0].set_ylim(0, 1.3 * max(ceiling, *axes[0].get_ylim()))  # the legend stands above all lines
        share = axes[1].secondary_yaxis("right", functions=(lambda y: 100 * y / ceiling, lambda y: y * ceiling / 100))
        share.set_ticks(range(0, 101, 20))
        share.set_ylabel(f"% of a measured matrix product, {ceiling:.3g} TFLOP/s")
    size = f"N={LADDER['N']}, D={LADDER['D']}, {LADDER['dtype']}, not causal"
    fig.suptitle(f"{numbers['gpu']}, {size} unless a rung says otherwise", x=0.01, ha="left", fontsize=11)
    plt.close(fig)
    return fig


def ladder_narrow(numbers):
    """The same numbers (as `ladder_numbers` gives them) as one column of lying bars, which fits a phone."""
    rungs = [("forward", *rung) for rung in numbers["fwd"]["rungs"]]
    rungs += [("backward", *rung) for rung in numbers["bwd"]["rungs"]]
    fig, ax = subplots(figsize=(4.4, 4.8))
    gap = len(numbers["fwd"]["rungs"])
    places = [n + 0.9 * (n >= gap) for n in range(len(rungs))]
    bars = ax.barh(places, [tflops for *_, tflops, _ in rungs], height=0.7, color=COLOURS[0])
    ax.bar_label(bars, fmt="%.3g", padding=3, color=INK, fontsize=9)
    names = [" ".join([word, *note.split("\n")]).strip() for _, word, _, note in rungs]
    ax.set_yticks(places, names, fontsize=9)
    for pass_, first, last in (("fwd", 0, gap), ("bwd", gap, len(rungs))):
        if (peer := numbers[pass_]["peers"].get("sdpa-cudnn")) is not None:
            ax.vlines(peer, places[first] - 0.5, places[last - 1] + 0.5, color=INK, lw=1.2)
            ax.text(peer, places[first] - 0.55, f"cuDNN {peer:.3g}", ha="right", va="bottom", fontsize=9)
    longest = max(tflops for *_, tflops, _ in rungs)
    ax.set(ylim=(places[-1] + 0.6, -1.1), xlim=(0, 1.18 * longest), xlabel="TFLOP/s")
    ax.grid(axis="y", visible=False)
    ax.set_title(f"{numbers['gpu']}: forward, then backward", fontsize=10, loc="right")
    plt.close(fig)
    return fig


def numbers_in(picture):
    """What a picture was drawn from, as `ladder_numbers` gives it; None if there is no such file."""
    return json.loads(Image.open(picture).text.get("Description", "null")) if picture.exists() else None


def main(
    check: Annotated[bool, typer.Option(help="Draw nothing; exit with 1 if a picture is out of date.")] = False,
    root: Annotated[Path, typer.Option(help="The repository.")] = results.ROOT,
):
    """Draws the ladders of stages 02 and 03 for the pages, from the rows of kernels as they are now."""
    require_clone("steps.course.figures.plots")
    shown = results.fresh(results.read(root / results.COMMITTED.relative_to(results.ROOT)), root)
    drawn = {path: (stage, ladder) for stage, path in PICTURES.items()} | {NARROW: ("02_fa2_cuda", ladder_narrow)}
    for path, (stage, draw) in drawn.items():
        numbers = ladder_numbers(shown, stage)
        if numbers == numbers_in(root / path):
            print(f"{path} is up to date.")
        elif check:
            print(f"{path} is out of date: run `make report`.")
            raise typer.Exit(1)
        else:
            (root / path).parent.mkdir(parents=True, exist_ok=True)
            draw(numbers).savefig(root / path, dpi=110, metadata={"Description": json.dumps(numbers)})
            print(f"{path} is drawn.")


if __name__ == "__main__":
    typer.run(main)
