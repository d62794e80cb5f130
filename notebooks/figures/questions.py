"""Draws the picture beside the question of a notebook: `python notebooks/figures/questions.py`.

A picture that is a file stands in the notebook's first cell, above all code, and GitHub shows it, too. Each carries a
hash of this file inside, so that a test notices one that has not been drawn again.
"""

import hashlib
from pathlib import Path

import matplotlib.pyplot as plt
import torch
from matplotlib.colors import ListedColormap

from steps.bench import cost
from steps.bench.plots import COLOURS, FAINT, INK, style

HERE = Path(__file__).parent
SOURCE = hashlib.sha256(Path(__file__).read_bytes()).hexdigest()


def whole_or_tile():
    """Notebook 00: the weights of 48 tokens, all at once and one tile of them."""
    x = torch.randn(48, 8, generator=torch.Generator().manual_seed(1)).cumsum(0) / 4
    P = torch.softmax(x @ x.T, -1)
    fig, axes = plt.subplots(1, 2, figsize=(7.6, 3.5), layout="constrained")
    for ax, alpha in zip(axes, (1.0, 0.12), strict=True):
        ax.imshow(P.sqrt(), cmap="Blues", alpha=alpha, extent=(0, 48, 48, 0))
        ax.set(xlabel="key", ylabel="query", xticks=range(0, 49, 16), yticks=range(0, 49, 16))
        ax.grid(False)
    tile = P[0:16, 0:16].sqrt()
    axes[1].imshow(tile, cmap="Blues", extent=(0, 16, 16, 0), vmin=0, vmax=P.sqrt().max())
    axes[1].add_patch(plt.Rectangle((0, 0), 16, 16, fill=False, ec=COLOURS[1], lw=2.5))
    axes[1].annotate("", (30, 8), (17, 8), arrowprops={"arrowstyle": "->", "color": COLOURS[1], "lw": 2})
    axes[1].set(xlim=(0, 48), ylim=(48, 0))
    axes[0].set_title("as the formula says: N x N weights", fontsize=10)
    axes[1].set_title("the same result, one tile at a time", fontsize=10)
    return fig


def where_numbers_live():
    """Notebook 01: what lies in which memory, and how fast each one delivers."""
    gpu = cost.GPUS["NVIDIA H200"]
    shared = gpu.fp32_tflops / 2 * 32 / 128 * 4  # TB/s: 32 numbers of 4 bytes a cycle, beside 128 multiply-adds
    fig, ax = plt.subplots(figsize=(8.2, 3.0), layout="constrained")
    boxes = (
        (0, 3.4, "device memory", "Q, K, V, O", COLOURS[5]),
        (5.1, 3.0, "shared memory of an SM", "tiles Q_i, K_j, V_j, S", COLOURS[4]),
        (9.8, 3.2, "registers of a thread", "8 x 8 numbers of S, of O", COLOURS[2]),
    )
    for x, width, name, holds, colour in boxes:
        ax.add_patch(plt.Rectangle((x, 0), width, 2.2, fc=colour, alpha=0.35, ec=INK))
        ax.text(x + width / 2, 1.5, name, ha="center", fontweight="bold", fontsize=9)
        ax.text(x + width / 2, 0.75, holds, ha="center", fontsize=9)
    for start, end, rate in ((3.4, 5.1, gpu.bandwidth), (8.1, 9.8, shared)):
        ax.annotate("", (end, 1.1), (start, 1.1), arrowprops={"arrowstyle": "<->", "lw": 1.6, "color": INK})
        ax.text((start + end) / 2, 1.3, f"{rate:.1f} TB/s", ha="center", fontsize=9)
    ax.set(xlim=(-0.1, 13.1), ylim=(-0.1, 2.6), title=f"{gpu.name}: what has to pass, and how fast, all SMs together")
    ax.axis("off")
    return fig


def thread_or_warp():
    """Notebook 02a: who owns a number of S, 16 rows by 32 keys."""
    row, key = torch.meshgrid(torch.arange(16), torch.arange(32), indexing="ij")
    fig, axes = plt.subplots(1, 2, figsize=(8.2, 3.2), layout="constrained", sharey=True)
    mine = {
        "a thread owns a row": row == 5,
        "eight lanes of a warp own four rows": (row % 4 == 1) & (key % 8 == 2),
    }
    ours = row % 4 == 1
    for ax, (title, owned), shared in zip(axes, mine.items(), (False, True), strict=True):
        owner = 2 * owned.int() if not shared else ours.int() + owned.int()
        ax.pcolormesh(owner, cmap=ListedColormap(["white", COLOURS[5], COLOURS[1]]), edgecolors=FAINT, lw=0.3, vmax=2)
        ax.set(xlabel="key", ylim=(16, 0), xticks=range(0, 33, 8), yticks=range(0, 17, 4))
        ax.set_title(title, fontsize=10)
        ax.grid(False)
    axes[0].set_ylabel("query")
    handles = [plt.Rectangle((0, 0), 1, 1, color=colour) for colour in (COLOURS[1], COLOURS[5])]
    names = "one thread, or one lane", "the seven lanes that share its rows"
    fig.legend(handles, names, fontsize=8, ncols=2, loc="outside lower center")
    return fig


PICTURES = {"question_00": whole_or_tile, "question_01": where_numbers_live, "question_02a": thread_or_warp}

if __name__ == "__main__":
    style()
    for name, draw in PICTURES.items():
        draw().savefig(HERE / f"{name}.png", dpi=110, metadata={"Description": SOURCE})
