"""Recorded speeds as pictures and words: bars of kernels and peers, shares of a peer's speed, a sweep of tiles."""

import itertools
from collections import Counter

import matplotlib.pyplot as plt

from steps.bench import report
from steps.bench.rows import label, setting
from steps.figures.plots import COLOURS, GREYS, INK, style

MARKERS = "osD^vP"


def speed_bars(found):
    """TFLOP/s as bars with their values, fastest on top. One row for each kernel and peer, at one size."""
    if len({label(row) for row in found}) < len(found):
        raise ValueError("speed_bars needs one row for each kernel and peer: choose one size first.")
    if not found:
        raise ValueError("no results rows to draw; measure some with `python -m steps bench`.")
    style()
    fig, ax = plt.subplots(layout="constrained")
    is_peer = {label(row): row["peer"] is not None for row in found}
    colours = {False: itertools.cycle(COLOURS), True: itertools.cycle(GREYS)}
    looks = {name: next(colours[is_peer[name]]) for name in sorted(is_peer)}
    ordered = sorted(found, key=lambda row: row["tflops"])
    bars = ax.barh([label(row) for row in ordered], [row["tflops"] for row in ordered], height=0.7)
    for bar, row in zip(bars, ordered, strict=True):
        bar.set_color(looks[label(row)])
    ax.bar_label(bars, fmt="%.3g", padding=4, color=INK)
    ax.margins(x=0.1)  # room for the values
    ax.grid(axis="y", visible=False)
    ax.set(xlabel="TFLOP/s", title=f"{subtitle(found)}, N={found[0]['N']}")
    plt.close(fig)
    return fig


def beside(found, kernels, other):
    """[(row, share)]: the kernels' rows, and their TFLOP/s in those of another kernel or a peer in the same run.

    Of several runs that measured both at one size the last one counts.
    """
    theirs = {(row["run"], setting(row)): row["tflops"] for row in found if other in (row["peer"], row["kernel"])}
    both = [row for row in found if row["kernel"] in kernels and (row["run"], setting(row)) in theirs]
    last = {(row["kernel"], setting(row)): row for row in sorted(both, key=lambda row: row["run"])}.values()
    last = sorted(last, key=lambda row: (kernels.index(row["kernel"]), row["D"], row["causal"], row["N"]))
    return [(row, row["tflops"] / theirs[row["run"], setting(row)]) for row in last]


def shares(found, kernels, other):
    """What `beside` gives as a table in words: a line for each kernel, head_dim and mask, a column for each N."""
    ordered = [row | {"share": f"{share:.2f}"} for row, share in beside(found, kernels, other)]
    lengths = {N: f"N = {N}" for N in sorted({row["N"] for row in ordered})}
    columns = report.across(lambda row: row["N"], lambda row: row["share"], lengths)

    def words(row):
        return row["kernel"], f"D = {row['D']}", "causal" if row["causal"] else "full"

    lines = report.table(ordered, [f"of {other}", "", ""], words, columns)
    return "\n".join(report.in_text(lines)) if lines else f"no rows of {', '.join(kernels)} beside {other}"


def subtitle(found):
    """What the rows have in common: "NVIDIA H200, fwd, bf16, D=128, causal"."""
    row = found[0]
    mask = "causal" if row["causal"] else "not causal"
    return f"{row['gpu']}, {row['pass']}, {row['dtype']}, D={row['D']}, {mask}"


def tiles(sweep):
    """TFLOP/s of a row of a table of tiles and of its neighbours, a point for each. sweep: of the kind "tune".

    Tiles stand side by side. Of each the markers tell the warps, and the colours the stages. A ring and a dashed line
    show the table's own row.
    """
    style()
    fig, ax = plt.subplots(figsize=(9.2, 3.8), layout="constrained")
    candidates, own = sweep["candidates"], sweep["row"]
    shapes = sorted({tuple(one["row"][:2]) for one in candidates})
    warps, stages = (sorted({one["row"][n] for one in candidates}) for n in (2, 3))

    def place(row):
        return shapes.index(tuple(row[:2])) + 0.25 * (stages.index(row[3]) - (len(stages) - 1) / 2)

    for w, s in itertools.product(warps, stages):
        some = [one for one in candidates if one["row"][2:] == [w, s]]
        looks = dict(marker=MARKERS[warps.index(w)], color=COLOURS[stages.index(s)], linestyle="none")
        at, speeds = [place(one["row"]) for one in some], [one["tflops"] for one in some]
        ax.plot(at, speeds, **looks, label=f"{w} warps, {s} stage{'s' if s > 1 else ''}")
    speed = next(one["tflops"] for one in candidates if one["row"] == own)
    dashed = dict(color=INK, linestyle="--", linewidth=1)
    ax.axhline(speed, **dashed)
    ring = dict(marker="o", markersize=13, fillstyle="none")
    ax.plot(place(own), speed, **dashed, **ring, label=f"the table's row: {speed:.3g}")
    ax.set_xticks(range(len(shapes)), [f"{Br}x{Bc}" for Br, Bc in shapes])
    ax.set_xticks([n + 0.5 for n in range(len(shapes) - 1)], minor=True)  # lines between the tiles
    ax.grid(axis="x", which="minor")
    ax.grid(axis="x", which="major", visible=False)
    ax.tick_params(axis="x", which="both", length=0)
    ax.set_ylim(bottom=0)
    about = f"{sweep['file']}, {sweep['kernel']} kernel, {sweep['dtype']}, D={sweep['D']}, N={sweep['N']}"
    ax.set(xlabel="Br x Bc", ylabel="TFLOP/s", title=f"{sweep['gpu']}, {about}")
    ax.legend(loc="center left", bbox_to_anchor=(1.0, 0.5))
    plt.close(fig)
    return fig


def in_words(row):
    """(64, 128, 4, 2) as "64x128, 4 warps, 2 stages"."""
    return "{}x{}, {} warps, {} stages".format(*row)


def sweep_in_words(sweep):
    """Whether a neighbour is faster than the table's row by more than the noise, and who was left out.

    The noise is what lies between the 20th and the 80th percentile of the calls. Two rows differ if these do not meet.
    """
    own = next(one for one in sweep["candidates"] if one["row"] == sweep["row"])
    best, reasons = sweep["candidates"][0], [one["reason"] for one in sweep["left_out"]]
    left_out = ", ".join(f"{count} {reason}" for reason, count in Counter(reasons).most_common())
    told = f"No neighbour is faster than the table's {in_words(own['row'])} by more than the noise."
    if best["ms_p80"] < own["ms_p20"]:
        faster, noise = own["ms_median"] / best["ms_median"], 50 * (own["ms_p80"] - own["ms_p20"]) / own["ms_median"]
        told = f"{in_words(best['row'])} is {faster:.2f} times as fast here as the table's {in_words(own['row'])}, "
        told += f"which is more than the noise of ±{noise:.1f}%."
    return f"{told}\nLeft out: {left_out}." if left_out else told
