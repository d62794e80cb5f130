"""Draws the picture beside the question of a notebook: `python notebooks/figures/questions.py`.

A picture that is a file stands in the notebook's first cell, above all code, and GitHub shows it, too. Each carries a
hash of this file inside, so that a test notices one that has not been drawn again.
"""

import hashlib
from pathlib import Path

import matplotlib.pyplot as plt
import torch
from matplotlib.colors import ListedColormap

from steps.course.bench import cost
from steps.course.figures.plots import COLOURS, FAINT, INK, ink_on, style

HERE = Path(__file__).parent
SOURCE = hashlib.sha256(Path(__file__).read_bytes()).hexdigest()


def whole_or_tile():
    """Notebook 00: the weights of 48 tokens, all at once and one tile of them, with what is carried along its row."""
    x = torch.randn(48, 8, generator=torch.Generator().manual_seed(1)).cumsum(0) / 4
    P = torch.softmax(x @ x.T, -1)
    fig, axes = plt.subplots(1, 2, figsize=(8.2, 3.6), layout="constrained", width_ratios=(1, 1.42))
    for ax, alpha in zip(axes, (1.0, 0.12), strict=True):
        ax.imshow(P.sqrt(), cmap="Blues", alpha=alpha, extent=(0, 48, 48, 0))
        ax.set(ylabel="query", xticks=range(0, 49, 16), yticks=range(0, 49, 16))
        ax.set_xlabel("key", x=24 / (48 if ax is axes[0] else 69))
        ax.grid(False)
    _, tiles = axes
    tiles.imshow(P[16:32, 16:32].sqrt(), cmap="Blues", extent=(16, 32, 32, 16), vmin=0, vmax=P.sqrt().max())
    tiles.add_patch(plt.Rectangle((16, 16), 16, 16, fill=False, ec=COLOURS[1], lw=2.5))
    for y in (8, 24, 40):
        for start in (8, 24):
            seen = y == 8 or (y == 24 and start == 8)  # The orange tile is the second of the second row.
            look = {"arrowstyle": "->", "color": COLOURS[1] if seen else INK, "lw": 2 if seen else 1}
            tiles.annotate("", (start + 13, y), (start + 3, y), arrowprops=look)
    for row, colour in enumerate((COLOURS[2], COLOURS[1], "white")):
        for x, name, width in ((50, "m", 2), (53, "l", 2), (56, "O", 6)):
            tiles.add_patch(plt.Rectangle((x, 16 * row + 1), width, 14, fc=colour, ec=INK, lw=0.8, alpha=0.8))
            tiles.text(x + width / 2, -1, name, ha="center", fontsize=10) if row == 0 else None
    for y, words in ((8, "done:\nO / l"), (24, "carried\nalong"), (40, "not yet\nbegun")):
        tiles.text(63, y, words, va="center", fontsize=9)
    tiles.set(xlim=(0, 69), ylim=(48, 0))
    tiles.spines["bottom"].set_bounds(0, 48)
    axes[0].set_title("as the formula says: N x N weights", fontsize=10)
    tiles.set_title("the same result, one tile at a time", fontsize=10, pad=14)
    return fig


def where_numbers_live():
    """Notebook 01: how large the memories are and how fast, and what passes in the two orders of the loops."""
    gpu = cost.GPUS["NVIDIA H200"]
    shared = gpu.fp32_tflops / 2 * 32 / 128 * 4  # TB/s: 32 numbers of 4 bytes a cycle, beside 128 multiply-adds
    sm = gpu.multiprocessor
    fig, ax = plt.subplots(figsize=(8.5, 4.0), layout="constrained")
    patches = "8 x 8 numbers of S\nand of O a thread"
    boxes = (
        (0, 2.3, "device memory", "outside the chip", ("Q, K, V, O", "Q, K, V, O"), COLOURS[5]),
        (6.7, 2.6, "shared memory", f"{sm.shared // 1024} KiB an SM", ("K_j, V_j stay", "Q_i, O_i stay"), COLOURS[4]),
        (10.9, 3.2, "registers", f"{4 * sm.registers // 1024} KiB an SM", ("", patches), COLOURS[2]),
    )
    for x, width, name, size, holds, colour in boxes:
        ax.add_patch(plt.Rectangle((x, 0), width, 4.6, fc=colour, alpha=0.35, ec=INK))
        ax.text(x + width / 2, 4.3, name, ha="center", va="top", fontweight="bold", fontsize=10)
        ax.text(x + width / 2, 3.9, size, ha="center", va="top", fontsize=9)
        for y, words in zip((2.55, 0.75), holds, strict=True):
            ax.text(x + width / 2, y, words, ha="center", va="center", fontsize=9)
    rows = "O_i, l, m at each visit"
    orders = (
        (3.45, "FlashAttention-1, keys outside", "K_j, V_j once", f"Q_i, {rows}", rows),
        (1.65, "FlashAttention-2, queries outside", "Q_i once", "K_j, V_j at each visit", "O_i once"),
    )
    for top, name, *moves in orders:
        ax.text(4.5, top, name, ha="center", fontsize=9, fontweight="bold")
        for line, words in enumerate(moves, 1):
            y, often, ends = top - 0.47 * line, "each" in words, (2.4, 6.6)
            start, end = ends if line < 3 else reversed(ends)  # the third goes back to device memory
            look = {"arrowstyle": "->", "lw": 2.4 if often else 1, "color": COLOURS[1] if often else INK}
            ax.annotate("", (end, y), (start, y), arrowprops=look)
            ax.text(4.5, y + 0.08, words, ha="center", fontsize=9)
    ax.annotate("", (10.8, 0.75), (9.4, 0.75), arrowprops={"arrowstyle": "<->", "lw": 2.4, "color": COLOURS[1]})
    for x, rate in ((4.5, gpu.bandwidth), (10.1, shared)):
        ax.text(x, -0.35, f"{rate:.1f} TB/s, all SMs together", ha="center", fontsize=9)
    ax.set(xlim=(-0.1, 14.2), ylim=(-0.5, 4.7))
    ax.set_title(f"{gpu.name}: what passes between its memories, how often and how fast", fontsize=10)
    ax.axis("off")
    return fig


def thread_or_warp():
    """Notebook 02a: who owns a number of S, 16 rows by 32 keys."""
    row, key = torch.meshgrid(torch.arange(16), torch.arange(32), indexing="ij")
    fig, axes = plt.subplots(1, 2, figsize=(8.2, 3.2), layout="constrained", sharey=True)
    mine = {
        "scalar: a thread owns a whole row": row == 5,
        "warp: eight threads share four rows": (row % 4 == 1) & (key % 8 == 2),
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
    names = "one thread (in a warp, a group of 32 threads: one lane)", "the seven lanes that share its rows"
    fig.legend(handles, names, fontsize=9, ncols=2, loc="outside lower center")
    return fig


def one_wavefront():
    """Notebook 02b: how many of a wavefront's 32 words a rung uses for S, and the multiply-adds that they feed."""
    used = {"scalar": ("1 word", 1, 1, 32), "warp": ("4 or 8 words", 4, 8, 85)}  # words: always, at most; multiply-adds
    used |= {"mma": ("4 words", 4, 4, 128), "ldmatrix": ("32 words", 32, 32, 1024)}
    looks = [FAINT, COLOURS[4], COLOURS[1]]
    fig, axes = plt.subplots(1, 4, figsize=(8.2, 3.2), layout="constrained")
    for ax, (name, (words, always, most, fed)) in zip(axes, used.items(), strict=True):
        bank, rows = torch.arange(33), -(-fed // 32)
        strip = (torch.arange(32) < always).int() + (torch.arange(32) < most).int()
        products = (torch.arange(32 * rows) < fed).int().view(rows, 32)
        ax.pcolormesh(bank, torch.tensor([-4, -1.5]), strip[None], cmap=ListedColormap(looks), vmin=0, vmax=2)
        fills = ListedColormap(["white", COLOURS[5]])
        ax.pcolormesh(bank, bank[: rows + 1], products, cmap=fills, vmin=0, edgecolors="white", lw=0.2)
        ax.set_title(f"{name}\n{words} of 32\nmultiply-adds: {fed:,}", fontsize=10, loc="left")
        ax.set(xlim=(-0.5, 32.5), ylim=(32.5, -4.5), aspect="equal")
        ax.axis("off")
    names = "words that are used", "in some wavefronts", "not used", "a multiply-add of S"
    handles = [plt.Rectangle((0, 0), 1, 1, color=colour) for colour in (*reversed(looks), COLOURS[5])]
    says = "one wavefront, the 32 words that shared memory gives in a cycle, and what it feeds"
    fig.legend(handles, names, fontsize=9, ncols=4, loc="outside lower center", title=says, title_fontsize=10)
    return fig


def kept_and_added():
    """Notebook 02c: what the forward keeps instead of P, and which gradients cross the blocks of the backward."""
    fig, axes = plt.subplots(1, 2, figsize=(7.6, 3.6), layout="constrained")
    box = {"ec": INK, "lw": 1}
    text = {"ha": "center", "va": "center", "fontsize": 9}
    for ax in axes:
        ax.set(xlim=(-0.1, 5.6), ylim=(5.3, -0.1), aspect="equal")
        ax.axis("off")
    axes[0].set_title("instead of P the forward keeps one number a row", fontsize=10)
    axes[0].add_patch(plt.Rectangle((0, 0), 4, 4, fc="white", ls="--", **box))
    axes[0].text(2, 2, "P: N x N,\nnever stored", **text)
    axes[0].add_patch(plt.Rectangle((4.3, 0), 0.3, 4, fc=COLOURS[1], **box))
    axes[0].text(4.45, 4.3, "lse: N", **text)
    axes[1].set_title("the backward: four blocks, each with its keys", fontsize=10)
    for n, colour in enumerate(COLOURS[:4]):
        axes[1].add_patch(plt.Rectangle((n, 0), 1, 4, fc=colour, alpha=0.45, **box))
        axes[1].annotate("", (n + 0.2, 3.9), (n + 0.2, 0.1), arrowprops={"arrowstyle": "->", "color": INK})
        axes[1].add_patch(plt.Rectangle((n, 4.2), 1, 0.75, fc=colour, alpha=0.45, **box))
        axes[1].text(n + 0.5, 4.58, "dK dV", **text)
        axes[1].add_patch(plt.Rectangle((4.2, n), 1.2, 1, fc="white", **box))
        axes[1].text(4.8, n + 0.5, "dQ +=", **text)
        # Each block adds to every dQ_i; the arrows of one are drawn.
        start, end = (n + 0.6, 1.2 + 0.2 * n), (4.2, 1.2 + 0.2 * n)
        axes[1].plot(start[0], start[1], "o", color=INK, ms=4)
        axes[1].annotate("", end, start, arrowprops={"arrowstyle": "->", "color": INK, "shrinkA": 0, "shrinkB": 0})
    return fig


def three_units():
    """Notebook 02d: copies, products and exponentials of four tiles, one after the other and all at once. A sketch."""
    colours = {"copies": COLOURS[2], "products": COLOURS[0], "exponentials": COLOURS[1]}
    work = ("copies", ""), ("products", "S"), ("exponentials", ""), ("products", "PV")  # of a tile, in this order
    one_by_one = {(unit, what, tile): 4 * tile + n for tile in range(4) for n, (unit, what) in enumerate(work)}
    starts = zip((0, 1, 3, 5), (1, 2, 4, 6), (2, 3, 5, 7), (3, 5, 7, 8), strict=True)  # of each tile's work
    at_once = {(*work[n], tile): start for tile, all_of in enumerate(starts) for n, start in enumerate(all_of)}
    fig, axes = plt.subplots(2, 1, figsize=(7.6, 3.4), layout="constrained", sharex=True)
    for ax, begins in zip(axes, (one_by_one, at_once), strict=True):
        for (unit, what, tile), start in begins.items():
            row = list(colours).index(unit)
            ax.broken_barh([(start, 1)], (row - 0.4, 0.8), fc=colours[unit], ec="white")
            ax.text(start + 0.5, row, f"{what} {tile}".strip(), ha="center", va="center", color="white", fontsize=9)
        ax.set_yticks(range(3), colours)
        ax.set(ylim=(2.6, -0.6), xlim=(0, 16), xticks=[])
        ax.grid(False)
    axes[0].set_title("one after the other", fontsize=10)
    axes[1].set_title("started, and waited for where the result is needed", fontsize=10)
    axes[1].set_xlabel("time: four tiles of keys (a sketch)")
    return fig


def operands():
    """Notebook 02e: where the five products of a step have their operands from."""
    ways = {
        "warps fetch it (ldmatrix)": COLOURS[1],
        "tensor cores read shared memory": COLOURS[5],
        "it lies in registers": COLOURS[2],
    }
    fetched, read, held = ways.values()
    steps = {
        "bwd_1: mma": ("S Q K^T, dP dO V^T, dV P^T dO, dK dS^T Q, dQ dS K", (fetched,) * 5, fetched),
        "bwd_2: wgmma": ("S^T K Q^T, dP^T V dO^T, dV P^T dO, dK dS^T Q, dQ dS K", (read, read, held, held, read), read),
    }
    fig, axes = plt.subplots(1, 2, figsize=(7.6, 3.2), layout="constrained")
    for ax, (title, (products, firsts, second)) in zip(axes, steps.items(), strict=True):
        for y, (product, first) in enumerate(zip(products.replace("^T", "ᵀ").split(", "), firsts, strict=True)):
            result, *operands = product.split()
            ax.text(0.6, y + 0.5, f"{result} =", ha="right", va="center", fontsize=10)
            ax.text(2.05, y + 0.5, "x", ha="center", va="center", fontsize=10)
            for x, colour, name in zip((0.8, 2.2), (first, second), operands, strict=True):
                ax.add_patch(plt.Rectangle((x, y + 0.12), 1.1, 0.76, fc=colour, ec=INK, lw=0.8))
                ax.text(x + 0.55, y + 0.5, name, color=ink_on(colour), ha="center", va="center", fontsize=10)
        ax.set(xlim=(-0.2, 3.6), ylim=(5, 0))
        ax.set_title(title, fontsize=10)
        ax.axis("off")
    handles = [plt.Rectangle((0, 0), 1, 1, color=colour) for colour in ways.values()]
    fig.legend(handles, ways, fontsize=9, ncols=3, loc="outside lower center")
    return fig


def yours_or_the_compilers():
    """Notebook 03a: who decides what, in three languages."""
    languages = {
        "CUDA C++": "yours yours yours yours yours",
        "Gluon": "yours yours yours yours yours,_as_a_layout",
        "Triton": "yours yours compiler compiler compiler",
    }
    decisions = (
        "who owns which result",
        "tile sizes, pointers, masks",
        "copies, room in shared memory",
        "waits, barriers, roles of warps",
        "which lane has which number",
    )
    fig, ax = plt.subplots(figsize=(7.6, 3.0), layout="constrained")
    for x, whose in enumerate(languages.values()):
        for y, who in enumerate(whose.split()):
            colour = COLOURS[5] if who == "compiler" else COLOURS[4]
            ax.add_patch(plt.Rectangle((x, y), 1, 1, fc=colour, alpha=0.6, ec="white", lw=2))
            ax.text(x + 0.5, y + 0.5, who.replace("_", " "), ha="center", va="center", fontsize=9)
    ax.set(xlim=(0, 3), ylim=(5, 0))
    ax.set_xticks([x + 0.5 for x in range(3)], languages, fontweight="bold")
    ax.set_yticks([y + 0.5 for y in range(5)], decisions)
    ax.xaxis.tick_top()
    ax.tick_params(length=0)
    ax.grid(False)
    ax.spines[:].set_visible(False)
    return fig


def what_changes_the_scores():
    """Notebook 03b: six features, each as what it does to the scores of 16 queries and 16 keys, or to their P."""
    query, key = torch.meshgrid(torch.arange(16), torch.arange(16), indexing="ij")
    causal = key <= query
    document = torch.tensor([0] * 6 + [1] * 7 + [2] * 3)
    dice = torch.rand(16, 16, generator=torch.Generator().manual_seed(0))
    features = {
        "window": causal * (query - key < 5),
        "packed sequences": causal * (document[query] == document[key]),
        "ALiBi": causal * (1 - (query - key) / 20),
        "mask, bias": torch.where(dice < 0.25, 0, 0.3 + 0.7 * dice),
        "dropout": causal * (dice > 0.2),
        "decoding": torch.ones(1, 16),
    }
    fig, axes = plt.subplots(1, 6, figsize=(8.4, 2.0), layout="constrained")
    for ax, (name, seen) in zip(axes, features.items(), strict=True):
        ax.imshow(seen, cmap="Blues", vmin=0, vmax=1.3, extent=(0, 16, len(seen), 0))
        ax.add_patch(plt.Rectangle((0, 0), 16, len(seen), fill=False, ec=INK, lw=1))
        ax.set(xticks=[], yticks=[], xlim=(-0.2, 16.2), ylim=(16.2, -0.2), aspect="equal")
        ax.set_title(name, fontsize=9, loc="center")
        ax.spines[:].set_visible(False)
        ax.grid(False)
    axes[0].set_ylabel("queries", fontsize=9)
    fig.supxlabel("keys", fontsize=9)
    return fig


def ring():
    """Notebook 04a: four ranks; the keys travel, the queries stay."""
    fig, ax = plt.subplots(figsize=(7.6, 3.0), layout="constrained")
    for rank, colour in enumerate(COLOURS[:4]):
        x = 3 * rank
        ax.add_patch(plt.Rectangle((x, 0), 2, 2, fc="white", ec=INK))
        ax.text(x + 1, 2.3, f"rank {rank}", ha="center", fontweight="bold", fontsize=10)
        ax.text(x + 1, 1.5, f"Q{rank} stays", ha="center", va="center", fontsize=9)
        ax.add_patch(plt.Rectangle((x + 0.2, 0.2), 1.6, 0.7, fc=colour, ec="none"))
        ax.text(x + 1, 0.55, f"K{rank} V{rank}", ha="center", va="center", color="white", fontweight="bold", fontsize=9)
        if rank < 3:
            ax.annotate("", (x + 3.1, 0.55), (x + 1.9, 0.55), arrowprops={"arrowstyle": "->", "lw": 2, "color": colour})
    ax.plot((10.9, 11.5, 11.5, -0.5, -0.5), (0.55, 0.55, -0.6, -0.6, 0.55), color=COLOURS[3], lw=2)
    ax.annotate("", (0.15, 0.55), (-0.55, 0.55), arrowprops={"arrowstyle": "->", "lw": 2, "color": COLOURS[3]})
    ax.text(5.5, -0.95, "a hop: K and V go on to the next rank", ha="center", va="center", fontsize=9)
    ax.set(xlim=(-0.8, 11.8), ylim=(-1.2, 2.7))
    ax.axis("off")
    return fig


def at_hand():
    """Notebook 04b: with whose queries and keys rank 2 of four computes, in four ways to share a sequence."""
    rank, head = torch.meshgrid(torch.arange(4), torch.arange(4), indexing="xy")  # (head, rank), drawn row by row
    own, all_of, one_head = (rank == 2).int(), torch.ones(4, 4, dtype=torch.int), (head == 2).int()
    ways = {  # (Q, K and V), 1 where a rank's head is at hand, 2 where a result goes back for it
        "query-parallel": (own, all_of),
        "ring": (own, all_of),
        "star": (2 * all_of, own),
        "Ulysses": (2 * one_head, one_head),
    }
    fig, axes = plt.subplots(2, 4, figsize=(7.6, 4.1), layout="constrained", sharex=True, sharey=True)
    for column, (title, both) in zip(axes.T, ways.items(), strict=True):
        for ax, here, name in zip(column, both, ("Q", "K, V"), strict=True):
            looks = torch.where(own > 0, here.clamp(max=1), here + (here > 0))  # 1: its own, 2 and 3: sent by others
            colours = ListedColormap(["white", COLOURS[5], COLOURS[1], COLOURS[4]])
            ax.pcolormesh(looks, cmap=colours, edgecolors=INK, lw=0.6, vmin=0, vmax=3)
            ax.set(xlim=(-0.05, 4.05), ylim=(4.05, -0.05), aspect="equal")
            ax.set_xticks([i + 0.5 for i in range(4)], range(4))
            ax.set_yticks([i + 0.5 for i in range(4)], range(4))
            ax.tick_params(length=0)
            ax.grid(False)
            ax.set_title(f"{title}: {name}" + " in step" * (title == "ring" and name != "Q"), fontsize=10, loc="left")
        column[1].set_xlabel("rank whose positions")
    for step, src in enumerate((2, 1, 0, 3)):  # Of the ring's keys, rank 2 has only those of one step at a time.
        for row in range(4):
            axes[1, 1].text(src + 0.5, row + 0.5, step, ha="center", va="center_baseline", fontsize=9)
    for ax in axes[:, 0]:
        ax.set_ylabel("head")
    handles = [plt.Rectangle((0, 0), 1, 1, fc=colour, ec=INK) for colour in (COLOURS[5], COLOURS[1], COLOURS[4])]
    names = "rank 2's own", "sent to rank 2", "sent to rank 2, which sends a result back"
    fig.legend(handles, names, fontsize=9, ncols=3, loc="outside lower center")
    return fig


PICTURES = {
    "question_00": whole_or_tile,
    "question_01": where_numbers_live,
    "question_02a": thread_or_warp,
    "question_02b": one_wavefront,
    "question_02c": kept_and_added,
    "question_02d": three_units,
    "question_02e": operands,
    "question_03a": yours_or_the_compilers,
    "question_03b": what_changes_the_scores,
    "question_04a": ring,
    "question_04b": at_hand,
}

if __name__ == "__main__":
    style()
    for name, draw in PICTURES.items():
        draw().savefig(HERE / f"{name}.png", dpi=110, metadata={"Description": SOURCE})
