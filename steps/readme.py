"""`python -m steps.readme`: writes README.md's table of stages from their SUPPORTS, and its picture from a run of all five.

The picture is made where this runs, so that what it says about the errors was computed. --table leaves it as it is.
"""

import re
import sys

import matplotlib.pyplot as plt
from matplotlib.patches import Rectangle

from reference import attention
from reference.bench.plots import style
from steps import compare, demo
from steps.step04_ring.layout import Layout

README, PICTURE = demo.ROOT / "README.md", demo.ROOT / "notebooks" / "figures" / "five_stages.png"
N, TILE, RANKS = 64, 8, 4  # what the picture shows: 64 bytes of text in tiles of 8 x 8, on 4 ranks


def table():
    """The stages as a markdown table."""
    lines = ["| stage | notebook | module | test command | minutes | hardware |", "|---|---|---|---|---|---|"]
    for number, name in compare.STAGES.items():
        s = compare.stage(number).SUPPORTS
        links = ", ".join(f"[{n.split('_')[0]}](notebooks/{n}.ipynb)" for n in s["notebooks"])
        module, test = f"[`steps/{name}`](steps/{name})", f"`make test ARGS=tests/test_{name}.py`"
        lines.append(f"| {number} {s['title']} | {links} | {module} | {test} | {s['minutes']} | {s['hardware']} |")
    return "\n".join(lines)


def render(text):
    """README's text with the table between its markers."""
    return re.sub(r"(<!-- stages -->\n).*?(<!-- /stages -->)", lambda m: m[1] + table() + "\n" + m[2], text, flags=re.S)


def draw():
    """Five panels: the attention of the demo's model on the first bytes of this README, as each stage computes it."""
    style()
    subject = compare.Subject(demo.SMALL, lambda: None).upto(N)
    q, k, v, _ = subject.inputs()
    truth, _ = attention.forward(q, k, v, causal=True)
    P = attention.scores(q, k, causal=True).softmax(-1)[0, 0].cpu()
    figure, axes = plt.subplots(1, 5, figsize=(15, 3.9))
    for (number, name), axis, (paint, words) in zip(compare.STAGES.items(), axes, PANELS, strict=True):
        axis.imshow(P.sqrt(), cmap="Greys", vmin=0, vmax=0.9, extent=(0, N, N, 0))
        paint(axis)
        out, _ = compare.stage(number).forward(q, k, v, causal=True)
        error = (out - truth).abs().max().item()
        axis.set_title(f"{number}  {name.split('_', 1)[1]}", fontweight="bold")
        axis.set_xlabel(f"{words}\nlargest error of out: {error:.0e}", fontsize=9)
        axis.set(xticks=[], yticks=[])
    figure.tight_layout()
    PICTURE.parent.mkdir(exist_ok=True)
    figure.savefig(PICTURE, dpi=110, facecolor="white")


def square(axis, i, j, colour, label=""):
    """Paints the tile in row i and column j."""
    axis.add_patch(Rectangle((j * TILE, i * TILE), TILE, TILE, facecolor=colour, edgecolor="white", alpha=0.55))
    axis.text((j + 0.5) * TILE, (i + 0.5) * TILE, label, ha="center", va="center", fontsize=7)


def in_order(tiles, colours):
    """A painter that numbers the tiles as they are visited; colours(i, j) is a number from 0 to 1."""

    def paint(axis):
        for step, (i, j) in enumerate(tiles, 1):
            square(axis, i, j, plt.cm.viridis(colours(i, j)), step)

    return paint


def fused(axis):
    for i, j in BY_ROW:
        square(axis, i, j, "tab:orange" if i == j else "tab:blue", "mask" if i == j else "")


def ring(axis):
    """Each position's rank; a tile's number is the ring step in which its keys arrive at that rank."""
    layout = Layout("zigzag", N, RANKS, causal=True)
    rank_of = {p: rank for rank in range(RANKS) for p in layout.positions(rank).tolist()}
    for i, j in BY_ROW:
        me, src = rank_of[i * TILE], rank_of[j * TILE]
        square(axis, i, j, plt.cm.tab10(me), (me - src) % RANKS)


T = N // TILE
BY_ROW = [(i, j) for i in range(T) for j in range(i + 1)]  # the tiles that a causal mask leaves
BY_COLUMN = [(i, j) for j in range(T) for i in range(j, T)]
PANELS = (
    (lambda axis: None, "all of S and P in memory at once"),
    (in_order(BY_COLUMN, lambda i, j: j / T), "keys outside: O is written back\nfor every column of tiles"),
    (in_order(BY_ROW, lambda i, j: i / T), "queries outside: a row of tiles\nis one block, O is written once"),
    (fused, "whole tiles without a mask,\nthe diagonal with one, the rest skipped"),
    (ring, "colour: the rank that computes it;\nnumber: the ring step in which it does"),
)


if __name__ == "__main__":
    if "--table" not in sys.argv:
        draw()
    README.write_text(render(README.read_text()))
