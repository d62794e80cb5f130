"""Recorded speeds as pictures and words: bars of kernels and peers, shares of a peer's speed, a sweep of tiles."""

import itertools
from collections import Counter

import matplotlib.pyplot as plt

from steps.bench import report
from steps.bench import rows as results
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


def rung(kernel, found=None, *, gpu="NVIDIA H200", D=128, N=4096, causal=False, dtype="bf16"):
    """A rung's result in a line, of one run: TFLOP/s, the factor to the rung before it, and to the fastest peer.

    found: rows, the fresh committed ones if None. Where there is no row at this size, the line says so.
    """
    size = f"{gpu}, {dtype}, D = {D}, N = {N}, {'causal' if causal else 'full'}"
    chosen = rung_row(kernel, found, gpu=gpu, D=D, N=N, causal=causal, dtype=dtype)
    if not chosen:
        return f"{kernel}: not measured as it is now on {size}"
    mine, before, peer = chosen
    words = [f"{kernel}: {mine['tflops']:.3g} TFLOP/s"]
    words += [f"{mine['tflops'] / before['tflops']:.2f} x {before['kernel']}"] if before else []
    words += [f"{mine['tflops'] / peer['tflops']:.2f} of {peer['peer']}"] if peer else []
    return f"{', '.join(words)}\n  ({size})"


def rung_row(kernel, found=None, *, gpu="NVIDIA H200", D=128, N=4096, causal=False, dtype="bf16"):
    """(row, row of the next lower rung or None, row of the fastest peer or None) of a rung in one run, or None.

    Of several runs the last one counts in which a lower rung was measured, too.
    """
    found = results.fresh(results.read()) if found is None else found
    at = {"gpu": gpu, "D": D, "N": N, "causal": causal, "dtype": dtype, "options": {}, "n_gpus": 1}
    found = [row for row in found if row["timing"] == "interleaved" and all(row[name] == at[name] for name in at)]
    candidates = [(row, *company(row, found)) for row in found if row["kernel"] == kernel]
    return max(candidates, key=lambda one: (one[1] is not None, one[0]["run"]), default=None)


def company(row, found):
    """Of the run and size of a kernel's row: the row of the next lower rung, and of the fastest peer, or None."""
    pass_, number, _ = row["kernel"].split("_", 2)
    beside = [one for one in found if (one["run"], setting(one)) == (row["run"], setting(row))]
    kernels = {int(one["kernel"].split("_")[1]): one for one in beside if one["stage"] == row["stage"]}
    lower = [n for n in kernels if n < int(number) and kernels[n]["kernel"].startswith(pass_)]
    peers = [one for one in beside if one["peer"]]
    return kernels[max(lower)] if lower else None, max(peers, key=lambda one: one["tflops"], default=None)


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
