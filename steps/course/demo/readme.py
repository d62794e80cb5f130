"""`python -m steps.course.demo.readme` writes README.md's tables and first picture, and tables of rungs.

The tables are made from the stages' SUPPORTS, from the ladders of stages 02 and 03, and from the measured rows. For the
picture all five stages are run, so that the errors in its text are computed ones. With --tables only the tables are
written.
"""

import sys

import matplotlib.pyplot as plt
import numpy as np
from matplotlib.colors import to_rgb
from matplotlib.patches import Rectangle

from reference import attention
from steps import catalogue
from steps.course.demo import compare
from steps.course.demo.model import SMALL
from steps.course.figures import measured, plots
from steps.course.figures.plots import ink_on, style
from steps.places import ROOT, require_clone
from steps.step02_fa2_cuda import ladder
from steps.step03_triton import rungs as triton_rungs
from steps.step04_ring.layout import Layout

PICTURE = ROOT / "notebooks" / "figures" / "five_stages.png"
# The picture shows 64 bytes of text in tiles of 8 x 8, on 4 ranks.
N = 64
TILE = 8
RANKS = 4
PAINT = 0.55  # how much of a tile's colour there is, with the weights below it


def stages():
    """The stages as a markdown table. It is narrow, because README counts what stands between two spaces as a word."""
    lines = ["|stage|notebook|module|test|minutes|", "|---|---|---|---|---|"]
    for number, name in catalogue.STAGES.items():
        s = catalogue.stage(number).SUPPORTS
        links = ", ".join(f"[{n.split('_')[0]}](notebooks/{n}.ipynb)" for n in s["notebooks"])
        module, test = f"[`steps/{name}`](steps/{name}/README.md)", f"[`tests/test_{name}.py`](tests/test_{name}.py)"
        lines.append(f"|{number} {s['title']}|{links}|{module}|{test}|{s['minutes']}|")
    return "\n".join(lines)


def rungs():
    """Stage 02's ladder as a markdown table."""
    lines = ["| rung | forward | backward | dtypes | head_dim | compute capability |", "|---|---|---|---|---|---|"]
    for row in ladder.ROWS:
        backwards = ", else ".join(ladder.BACKWARD[word].file for word in row.backwards)
        needs = f"{row.needs[0]}.{row.needs[1]}" + ("" if row.needs == ladder.HOPPER else " and newer")
        takes = f"{row.dtype_names()} | {row.head_dim_span()}"
        lines.append(f"| {row.word} | {row.file} | {backwards} | {takes} | {needs} |")
    return "\n".join(lines)


def rungs_of_triton():
    """Stage 03's ladder as a markdown table, from the slowest rung to the fastest."""
    lines = ["| rung | forward | backward | dtypes | head_dim | needs |", "|---|---|---|---|---|---|"]
    for word, kernels in reversed(triton_rungs.RUNGS.items()):
        forward, backward = (f"{kernel.__module__.rpartition('.')[2]}.py" for kernel in kernels)
        takes = triton_rungs.LIMITS.get(word, {})
        dtypes = "float16 or bfloat16" if "dtypes" in takes else "float32 or float16 or bfloat16"
        dims = takes.get("head_dims", range(1, 257))
        head_dims = f"{dims[0]} to {dims[-1]}" if dims.step == 1 else f"{dims[0]}, {dims[1]}, ... {dims[-1]}"
        lines.append(f"| {word} | {forward} | {backward} | {dtypes} | {head_dims} | {triton_rungs.NEEDS[word]} |")
    return "\n".join(lines)


def speeds():
    """The rungs in README's picture as a markdown table, narrow too, and what the peers in the picture reach.

    A share is of a peer that was measured in the same run at the same setting.
    """
    found = measured.fresh()
    gpu, rungs = plots.ladder_rows(found)
    numbers = plots.ladder_numbers(found)
    names = {peer: plots.PEERS[peer][0] for peer in ("sdpa-cudnn", "fa4")}
    lines = [f"|kernel|adds|TFLOP/s|{'|'.join(f'of {name}' for name in names.values())}|", "|---|---|---:|---:|---:|"]
    for kernel, row in (rungs["fwd"] | rungs["bwd"]).items():
        shares = "|".join(measured.share_of(peer, row, found) for peer in names)
        idea = ", ".join([measured.IDEAS[kernel], *plots.differing(row)])
        link = f"[{kernel}](steps/step02_fa2_cuda/{kernel}.cu)"
        lines.append(f"|{link}|{idea}|{row['tflops']:.3g}|{shares}|")
    said = []
    for peer, (name, *_) in plots.PEERS.items():
        both = [f"{numbers[pass_]['peers'][peer]:.3g}" for pass_ in rungs if peer in numbers[pass_]["peers"]]
        said.append(f"{name} {' and '.join(both)}")
    return "\n".join([*lines, "", f"{gpu}; TFLOP/s of the peers, forward and backward: {', '.join(said)}."])


TABLES = {  # page: {the name between its markers: what makes the table}
    "README.md": {"stages": stages, "speeds": speeds},
    "steps/step02_fa2_cuda/README.md": {"rungs": rungs},
    "steps/step03_triton/README.md": {"triton rungs": rungs_of_triton},
}


def render(page):
    """The page's text with the current tables between their markers."""
    text = (ROOT / page).read_text()
    for name, table in TABLES[page].items():
        before, rest = text.split(f"<!-- {name} -->\n")
        _, after = rest.split(f"<!-- /{name} -->")
        text = f"{before}<!-- {name} -->\n{table()}\n<!-- /{name} -->{after}"
    return text


def draw():
    """Draws the picture: the attention of the demo's model on its text, as each stage computes it."""
    style()
    subject = compare.Subject(SMALL, lambda: None).upto(N)
    q, k, v, _ = subject.inputs()
    truth, _ = attention.forward(q, k, v, causal=True)
    P = attention.scores(q, k, causal=True).softmax(-1)[0, 0].cpu()
    figure, axes = plt.subplots(1, 5, figsize=(15, 3.9))
    for (number, name), axis, (paint, words) in zip(catalogue.STAGES.items(), axes, PANELS, strict=True):
        axis.imshow(P.sqrt(), cmap="Greys", vmin=0, vmax=0.9, extent=(0, N, N, 0))
        paint(axis)
        out, _ = catalogue.stage(number).forward(q, k, v, causal=True)
        error = (out - truth).abs().max().item()
        axis.set_title(f"{number}  {name.split('_', 1)[1]}", fontweight="bold")
        axis.set_xlabel(f"{words}\nlargest error of out: {error:.0e}", fontsize=9)
        axis.set(xticks=[], yticks=[])
    figure.tight_layout()
    PICTURE.parent.mkdir(exist_ok=True)
    figure.savefig(PICTURE, dpi=110, facecolor="white")


def square(axis, i, j, colour, label=""):
    """Paints the tile in row i and column j."""
    corner = (j * TILE, i * TILE)
    axis.add_patch(Rectangle(corner, TILE, TILE, facecolor=colour, edgecolor="white", alpha=PAINT))
    (weights,) = axis.images
    tile = weights.get_array()[i * TILE : (i + 1) * TILE, j * TILE : (j + 1) * TILE]
    seen = PAINT * np.array(to_rgb(colour)) + (1 - PAINT) * weights.to_rgba(tile)[..., :3].mean((0, 1))
    look = {"ha": "center", "va": "center", "fontsize": 7, "fontweight": "bold", "color": ink_on(seen)}
    axis.text((j + 0.5) * TILE, (i + 0.5) * TILE, label, **look)


def in_order(tiles, colours):
    """A function that paints the tiles, numbered in the order of the visits. colours(i, j) is a number from 0 to 1."""

    def paint(axis):
        for step, (i, j) in enumerate(tiles, 1):
            square(axis, i, j, plt.cm.viridis(colours(i, j)), step)

    return paint


def nothing(axis):
    """Leaves the matrix of weights as it is."""


def fused(axis):
    """Tells the tiles on the diagonal, which need a mask, from the others."""
    for i, j in BY_ROW:
        square(axis, i, j, "tab:orange" if i == j else "tab:blue", "mask" if i == j else "")


def ring(axis):
    """Paints each tile in the colour of its queries' rank, with the number of the ring step that brings its keys."""
    layout = Layout("zigzag", N, RANKS, causal=True)
    rank_of = {p: rank for rank in range(RANKS) for p in layout.positions(rank).tolist()}
    for i, j in BY_ROW:
        me, src = rank_of[i * TILE], rank_of[j * TILE]
        square(axis, i, j, plt.cm.tab10(me), (me - src) % RANKS)


T = N // TILE
BY_ROW = [(i, j) for i in range(T) for j in range(i + 1)]  # the tiles that a causal mask leaves
BY_COLUMN = [(i, j) for j in range(T) for i in range(j, T)]
PANELS = (
    (nothing, "all of S and P in memory at once"),
    (in_order(BY_COLUMN, lambda i, j: j / T), "number: the visit; keys outside:\nO is written back for every column"),
    (in_order(BY_ROW, lambda i, j: i / T), "number: the visit; queries outside:\na row is one block, O written once"),
    (fused, "whole tiles without a mask,\nthe diagonal with one, the rest skipped"),
    (ring, "colour: the rank that computes it;\nnumber: the ring step in which it does"),
)


if __name__ == "__main__":
    require_clone("steps.course.demo.readme")
    if "--tables" not in sys.argv:
        draw()
    for page in TABLES:
        (ROOT / page).write_text(render(page))
