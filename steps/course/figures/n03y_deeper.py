"""What notebook 03y draws of kernels in Gluon: phases and roles, consumers, the ragged trick, and shares of peers."""

import itertools

from steps.course.figures import measured
from steps.course.figures.measured import fresh
from steps.course.figures.n02d_hopper import UNITS, legend, ping_pong
from steps.course.figures.n03x_deeper import shares
from steps.course.figures.picture import pictured
from steps.course.figures.plots import COLOURS, FAINT, INK, PALE, PEERS, boxes, subplots

__all__ = "shares", "phases_and_roles", "two_or_three_consumers", "ragged", "beside_peers"
FORWARD_AT_64 = {"products": 512, "exp": 512, "float32": 288}  # clocks of 64 queries and 128 keys, as 02d counts them


@pictured
def phases_and_roles():
    """Timelines of rung gluon's forward, with two stages and two consumers. The producer loads pair n into stage n % 2
    when both consumers have released pair n - 2. Each time a stage is filled, its barrier has the next phase. A
    consumer computes S of tile n, then P V of tile n - 1. Its softmax of tile n begins when S is there: beside its own
    P V, and then beside the products of the other consumer."""
    fig, ax = subplots(figsize=(8.5, 4.2))
    names = "producer loads", "stage 0", "stage 1", "consumer 0: products", "softmax", "consumer 1: products", "softmax"
    found = []

    def bar(row, start, end, colour, word):
        found.append((start, row + 0.12, end - start, 0.76, colour, word))

    for n in range(5):
        at = 8 * n  # when consumer 0 starts the products of tile n; consumer 1 starts its own 4 later
        bar(0, at - 5, at - 1, COLOURS[3], f"pair {n}")
        if n < 4:  # Pair 3 is cut off where the picture ends.
            bar(1 + n % 2, at - 1, min(at + 11, 32), FAINT, f"pair {n}: phase {n // 2}")
        for row, start in ((3, at), (5, at + 4)):
            bar(row, start, start + 2, COLOURS[0], f"S{n}")
            if n > 0:
                bar(row, start + 2, start + 4, PALE[0], f"O{n - 1}")
            bar(row + 1, start + 2, start + 7, COLOURS[1], f"softmax {n}")
    boxes(ax, [box for box in found if box[0] + box[2] <= 32])
    ax.set(xlim=(-5.5, 32), ylim=(7, 0), xticks=(), xlabel="time", title="pair n: K of tile n, and V of tile n - 1")
    ax.set_yticks([row + 0.5 for row in range(7)], names)
    ax.tick_params(length=0)
    ax.spines[:].set_visible(False)
    return fig


@pictured
def two_or_three_consumers():
    """A model's timelines at head_dim 64, where the exponentials of a step take as long as its products. With two
    consumers the tensor cores work 78 % of the time, because neither multiplies while one has its exponentials and the
    other its float32 work. With three consumers they work 99 % of the time."""
    fig, axes = subplots(2, 1, figsize=(8.5, 4.2), sharex=True, height_ratios=(2, 3))
    for ax, groups in zip(axes, (2, 3), strict=True):
        for unit, group, start, end in ping_pong(FORWARD_AT_64, 4, groups):
            ax.barh(group, end - start, left=start, height=0.7, color=UNITS[unit], edgecolor="white")
        work = groups * 100 * FORWARD_AT_64["products"]
        busy = work / max(end for *_, end in ping_pong(FORWARD_AT_64, 100, groups))
        ax.set(ylim=(groups - 0.4, -0.6), xlim=(0, 5600), title=f"{groups} consumers: products {busy:.0%} of the time")
        ax.set_yticks(range(groups), [f"consumer {group}" for group in range(groups)])
        ax.grid(axis="y", visible=False)
    axes[1].set_xlabel("clocks, a step has 64 queries and 128 keys")
    legend(fig, UNITS)
    return fig


@pictured
def ragged():
    """A sequence of 300 rows, rows 700 to 999 of a tensor, and a box of 128 rows that begins at its row 256. In the
    tensor 84 of the 128 rows belong to the next sequence. In the ragged descriptor's dimension of 2^30 rows the
    sequence has the last 300, and the dimension ends where the sequence ends: the 84 rows come as zeros."""
    fig, axes = subplots(2, 1, figsize=(8.5, 3.9))
    words = ("other sequences", "this sequence: 300 rows", "the next sequence"), ("", "the last 300 rows", "")
    colours = (FAINT, COLOURS[0], FAINT), ("white", COLOURS[0], "white")
    titles = "rows of the tensor", "rows of the ragged descriptor's dimension"
    ends = ("700", "1000"), ("2³⁰ - 300", "2³⁰: the end")
    says = "84 rows of the next sequence", "84 rows of zeros, which are not written"
    for n, ax in enumerate(axes):
        parts = zip((480, 700, 1000), (220, 300, 180 * (1 - n)), colours[n], words[n], strict=True)
        boxes(ax, [(x, 1, width, 1, colour, word) for x, width, colour, word in parts if width])
        boxes(ax, [(956, 2.3, 44, 0.7, COLOURS[0], "44"), (1000, 2.3, 84, 0.7, colours[n][2], "84")])
        ax.text(948, 2.65, "a box of 128 rows:", ha="right", va="center", fontsize=9)
        ax.text(1092, 2.65, says[n], ha="left", va="center", fontsize=9)
        ax.axvline(1000, color=INK, lw=1, ls="--")
        ax.set(xlim=(480, 1330), ylim=(3.1, 0.9), yticks=(), title=titles[n])
        ax.set_xticks((700, 1000), ends[n])
        ax.spines[:].set_visible(False)
    return fig


@pictured
def beside_peers():
    """Rung gluon's speed as shares of cuDNN's and FlashAttention-4's on an H100, from N = 1024 on. The forward is
    faster than cuDNN from N = 2048 on. It is faster than FlashAttention-4 where sequences are short, and a little
    slower where they are long. The backward is faster than cuDNN and slower than FlashAttention-4 everywhere."""
    fig, grid = subplots(2, 2, figsize=(8.5, 5.2), sharex=True, sharey=True)
    found = [row for row in fresh() if row["gpu"] == measured.H100.name and row["N"] > 512]
    found = [row for row in found if row["B"] * row["N"] == 2**14]  # the papers' sizes
    panels = itertools.product(("fwd_3_gluon", "bwd_2_gluon"), (64, 128))
    for ax, (kernel, D) in zip(grid.flat, panels, strict=True):
        for peer, causal in itertools.product(("sdpa-cudnn", "fa4"), (False, True)):
            line = [(row["N"], share) for row, share in measured.beside(found, [kernel], peer)
                    if row["D"] == D and row["causal"] == causal]  # fmt: skip
            about, colour = PEERS[peer][0], COLOURS[("sdpa-cudnn", "fa4").index(peer)]
            words = f"of {about}, {'causal' if causal else 'full'}"
            ax.plot(*zip(*line, strict=True) if line else ((), ()), "o:" if causal else "o-", color=colour, label=words)
        ax.axhline(1, color=INK, lw=1)
        ax.set(title=f"{'forward' if kernel[0] == 'f' else 'backward'}, D = {D}", xscale="log")
        ax.set_xticks([2**n for n in range(10, 15)], ["1k", "2k", "4k", "8k", "16k"])
        ax.minorticks_off()
    fig.supxlabel("N", fontsize=10)
    fig.supylabel("share of the peer's speed", fontsize=10)
    fig.legend(*grid[0, 0].get_legend_handles_labels(), loc="outside upper center", ncols=4, fontsize=9)
    return fig
