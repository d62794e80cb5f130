"""Figures from results rows, and the one style that all of the course's figures share.

Every function returns a closed matplotlib Figure, so that a notebook shows it once, as the value of its cell. Kernels
are drawn in colours and solid, peers in greys and dashed. The background is opaque white, because a dark page would
swallow dark text.
"""

import itertools
import statistics

import matplotlib.pyplot as plt
from matplotlib.colors import to_rgb

from steps.bench.rows import label, latest

INK, FAINT = "#1a1a1a", "#c8c8c8"
# Okabe and Ito's palette without yellow: told apart with any kind of colour vision.
COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9")
GREYS = ("#222222", "#5f5f5f", "#8a8a8a", "#ababab")
MARKERS = "osD^vP"
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


def ink_on(colour):
    """INK or "white": the one in which text is easier to read on this colour, by WCAG 2's contrast."""
    linear = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in to_rgb(colour)]
    luminance = sum(weight * c for weight, c in zip((0.2126, 0.7152, 0.0722), linear, strict=True))
    return INK if luminance > 0.2 else "white"


def speed_lines(rows):
    """TFLOP/s against N, a line for each kernel and peer. Rows: alike in what is compared but for B, H and N."""
    if len({(subtitle([row]), str(row["options"]), row["timing"]) for row in rows}) > 1:
        raise ValueError("speed_lines needs rows of one GPU, pass, dtype, D, mask, options and timing: choose first.")
    fig, ax = _figure(rows)
    for name, looks in _looks(rows).items():
        own = sorted((row for row in rows if label(row) == name), key=lambda row: row["N"])
        ax.plot([row["N"] for row in own], [row["tflops"] for row in own], label=name, **looks)
    lengths = sorted({row["N"] for row in rows})
    ax.set_xscale("log", base=2)
    ax.set_xticks(lengths, [f"{N // 1024}k" if N % 1024 == 0 else str(N) for N in lengths])
    ax.set(xlabel="sequence length N", ylabel="TFLOP/s", title=subtitle(rows))
    ax.set_ylim(bottom=0)
    ax.legend(loc="center left", bbox_to_anchor=(1.0, 0.5))
    plt.close(fig)
    return fig


def speed_bars(rows):
    """TFLOP/s as bars with their values, fastest on top. Rows: one for each kernel and peer, at one size."""
    if len({label(row) for row in rows}) < len(rows):
        raise ValueError("speed_bars needs one row for each kernel and peer: choose one size first.")
    fig, ax = _figure(rows)
    looks = _looks(rows)
    ordered = sorted(rows, key=lambda row: row["tflops"])
    bars = ax.barh([label(row) for row in ordered], [row["tflops"] for row in ordered], height=0.7)
    for bar, row in zip(bars, ordered, strict=True):
        bar.set_color(looks[label(row)]["color"])
    ax.bar_label(bars, fmt="%.3g", padding=4, color=INK)
    ax.margins(x=0.1)  # room for the values
    ax.grid(axis="y", visible=False)
    ax.set(xlabel="TFLOP/s", title=f"{subtitle(rows)}, N={rows[0]['N']}")
    plt.close(fig)
    return fig


LADDER = {"N": 4096, "D": 128, "causal": False, "dtype": "bf16"}  # what the ladder compares, where a rung takes it
PEERS = {
    "sdpa-flash": ("FlashAttention-2", "--", COLOURS[1]), "sdpa-cudnn": ("cuDNN", "-", COLOURS[2]),
    "fa4": ("FlashAttention-4", ":", COLOURS[3]),
}  # fmt: skip


def ladder_numbers(rows, stage="02_fa2_cuda"):
    """What a stage's ladder shows of these rows, or None if there are not rungs of both passes.

    {"gpu", "matmul": TFLOP/s or None, "fwd": ..., "bwd": {"rungs": [[word, TFLOP/s, what differs from LADDER]],
    "peers": {name: TFLOP/s}}}. Of several GPUs the one measured last; of several rows of one subject that of `latest`.
    The peers are those of one run, in which most of the rungs were measured.
    """
    plain = [row for row in rows if row["n_gpus"] == 1 and not row["options"] and row["timing"] == "interleaved"]
    runs = {row["run"] for row in plain if row["stage"] == stage}
    here = [row for row in plain if row["run"] in runs and (row["stage"] == stage or row["peer"])]
    mine = [row for row in here if row["stage"] and row["N"] == LADDER["N"] and row["causal"] == LADDER["causal"]]
    gpu = mine[-1]["gpu"] if mine else None
    here = [row for row in here if row["gpu"] == gpu]
    mine = latest([row for row in mine if row["gpu"] == gpu])
    products = [row["tflops"] for row in here if row["peer"] == "matmul" and row["dtype"] == LADDER["dtype"]]
    numbers = {"gpu": gpu, "matmul": statistics.median(products) if products else None}
    for pass_ in ("fwd", "bwd"):
        own = sorted((row for row in mine if row in here and row["pass"] == pass_), key=_likeness)
        rungs = {row["kernel"]: [row["kernel"].split("_", 2)[2], row["tflops"], _difference(row)] for row in own}
        run_of = [row["run"] for row in own if all(_likeness(row))]
        most = max(reversed(run_of), key=run_of.count, default=None)
        like = [row for row in here if row["run"] == most and row["pass"] == pass_ and all(_likeness(row))]
        peers = {row["peer"]: row["tflops"] for row in latest(like)}
        peers = {name: peers[name] for name in PEERS if name in peers}
        numbers[pass_] = {"rungs": [rungs[kernel] for kernel in sorted(rungs)], "peers": peers}
    return numbers if numbers["fwd"]["rungs"] and numbers["bwd"]["rungs"] else None


def ladder(rows, stage="02_fa2_cuda"):
    """TFLOP/s of a stage's rungs, one after the other, forward and backward; the peers as lines.

    The right axis is the share of the measured matrix product. A rung that does not take the ladder's head_dim or dtype
    is shown with another, and says so.
    """
    numbers = ladder_numbers(rows, stage)
    if numbers is None:
        raise ValueError(f"no rows of {stage} in both passes; `python -m steps bench --plan` measures them.")
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


def tiles(sweep):
    """TFLOP/s of a row of a table of tiles and of its neighbours, a point for each. sweep: as `bench --tune` writes it.

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


LANES = {"computes": "computes", "moves": "moves data", "waits": "waits for\nall ranks"}  # as ring_trace.py has them


def trace(record, pass_="fwd+bwd"):
    """When one GPU computes and when it moves data in a call of the ring, over relay and over fetch.

    record: of the kind "trace", as `bench --plan ring-trace` writes it. A span of a block is dark blue, one of another
    kernel light blue.
    """
    calls = [call for call in record.get("calls", ()) if call["pass"] == pass_]
    if not calls:
        raise ValueError(f"no trace of {pass_}; `python -m steps bench --plan ring-trace` records one.")
    style()
    how = dict(figsize=(9.2, 0.7 + 1.35 * len(calls)), sharex=True, squeeze=False, layout="constrained")
    fig, axes = plt.subplots(len(calls), 1, **how)
    calls.sort(key=lambda call: call["kernel"], reverse=True)  # relay first
    for ax, call in zip(axes.flat, calls, strict=True):
        for lane, name, start, end in call["spans"]:
            block = "attention" in name
            colour = {"computes": COLOURS[0] if block else COLOURS[5], "moves": COLOURS[1], "waits": GREYS[2]}[lane]
            y = list(LANES).index(lane)
            ax.barh(y, (end - start) / 1e3, 0.7, start / 1e3, color=colour, edgecolor="white", linewidth=0.2)
        ax.set_yticks(range(len(LANES)), LANES.values())
        ax.set_ylim(len(LANES) - 0.5, -0.5)
        ax.grid(axis="y", visible=False)
        shares = f"{call['hidden']:.0%} of the moving hidden, no kernel in {call['idle']:.1%} of the time"
        ax.set_title(f"{call['kernel'].removeprefix('ring+')}: {call['ms']:.3g} ms a call, {shares}")
    axes.flat[-1].set_xlabel("ms")
    plt.close(fig)
    return fig


def trace_in_words(record, pass_="fwd+bwd"):
    """What `trace` shows, for those who do not see it."""
    words = f"Timelines of one of {record['n_gpus']} GPUs in a call of the ring: blocks above, below them moving data."
    for call in record["calls"]:
        if call["pass"] == pass_:
            shares = f"{call['hidden']:.0%} of the moving beside a kernel, {call['idle']:.1%} of the time without one"
            words += f" {call['kernel'].removeprefix('ring+')}: {call['ms']:.3g} ms, {shares}."
    return words


def _likeness(row):
    """Compares by how much a row is what the ladder compares: dtype first, then D."""
    return tuple(row[name] == LADDER[name] for name in ("dtype", "D", "N", "causal"))


def _difference(row):
    """The row's dtype and D, a line each, where they are not the ladder's."""
    shown = {"dtype": row["dtype"], "D": f"D={row['D']}"}
    return "\n".join(text for name, text in shown.items() if row[name] != LADDER[name])


def subtitle(rows):
    """What the rows have in common: "NVIDIA H200, fwd, bf16, D=128, causal"."""
    row = rows[0]
    mask = "causal" if row["causal"] else "not causal"
    return f"{row['gpu']}, {row['pass']}, {row['dtype']}, D={row['D']}, {mask}"


def _looks(rows):
    """{label: how its line is drawn}: kernels in colours, peers in greys; the same for the same labels."""
    looks = {}
    for is_peer, colours, line in ((False, COLOURS, "-"), (True, GREYS, "--")):
        names = sorted({label(row) for row in rows if (row["peer"] is not None) == is_peer})
        for name, colour, marker in zip(names, itertools.cycle(colours), itertools.cycle(MARKERS)):
            looks[name] = {"color": colour, "marker": marker, "linestyle": line}
    return looks


def _figure(rows):
    if not rows:
        raise ValueError("no results rows to draw; measure some with `python -m steps bench`.")
    style()
    return plt.subplots(layout="constrained")
