"""What notebook 03b draws, measures and breaks."""

import torch
import triton
import triton.language as tl
from matplotlib.patches import Patch

from reference import attention, error, philox
from steps import engine
from steps.course.bench import cost
from steps.course.figures.measured import H100, H200, fresh
from steps.course.figures.picture import picture
from steps.course.figures.plots import COLOURS, GREYS, INK, PEERS, colour_of, ink_on, subplots, table, visited_tiles
from steps.course.figures.triton_planted import diff, planted
from steps.step03_triton.features import flash, scores

torch.set_num_threads(1)  # Small tensors are faster on one thread.
torch.set_printoptions(precision=2, sci_mode=False)


def of_feature(*names, gpu=H200):
    """The rows of these features as the kernels are now, on a GPU."""
    return [row for row in fresh() if row["options"].get("feature") in names and row["gpu"] == gpu.name]


def memory():
    """Prints what a causal call with both passes held on an H200, beside what a 16-bit mask of each head would take."""
    for row in of_feature("memory"):
        held, mask = row["peak_bytes"] / 1e9, 2 * row["H"] * row["N"] ** 2 / 1e9
        print(f"{row['peer'] or 'this stage':10} held {held:.2f} GB; a 16-bit mask of each head takes {mask:.0f} GB")


def row_of_scores(i, scaled, cap, M, S, derivative):
    """Prints a row of the six tokens' numbers, from the scaled products to the scores and their derivative."""
    capped = cap * torch.tanh(scaled / cap)
    steps = {"scale X": scaled, "soft-cap": capped, "+ M": capped + M, "- slope |i - j|": S, "1 - tanh^2": derivative}
    lines = [[name, *(f"{x:.2f}" for x in matrix[i])] for name, matrix in steps.items()]
    print(table([f"row {i}", *(f"key {j}" for j in range(len(S)))], *lines))


@triton.jit
def visit_kernel(tiles, count, N, LEFT, RIGHT, SIDE: tl.constexpr):
    tiles += tl.program_id(0) * count
    r = scores.tile_ranges(tl.program_id(0) * SIDE, 0, LEFT, RIGHT, N, False, SIDE, SIDE)
    for j in range(r.whole, r.full, SIDE):
        tl.store(tiles + j // SIDE, 1)
    for n in range(r.begin, r.end, SIDE):
        tl.store(tiles + scores.jump(n, r, LEFT) // SIDE, 2)


def windows():
    """The tiles that are visited with windows, and the pairs that are seen."""
    N, side, panels = 24, 4, {}
    for title, window in {"causal": (None, 0), "window (11, 0)": (11, 0), "window (5, 5)": (5, 5)}.items():
        tiles = torch.zeros(N // side, N // side, dtype=torch.int32, device=engine.device)
        visit_kernel[(len(tiles),)](tiles, len(tiles), N, *window, SIDE=side)
        panels[title] = tiles.cpu(), attention.visible(N, N, window=window)
    return picture(visited_tiles(panels, side), """Three squares of 24 queries by 24 keys in tiles of 4 by 4. Causal:
        blue tiles below the diagonal, orange ones on it. Window (11, 0): rows of an orange, two blue and an orange
        tile. Window (5, 5): a blue tile in each row, and orange ones on both sides.""")  # fmt: skip


TRANSPOSED = "flash", "expand(sequences, H, Nq, Nk).stride()", "expand(sequences, H, Nq, Nk).mT.stride()"
MISTAKES = {  # the setting in which they are run, the file, and the change
    "window one key too wide": ("window", "scores", "(seq.shift - f.left)", "(seq.shift - f.left - 1)"),
    "mask transposed": ("mask", *TRANSPOSED),
    "the same, symmetric mask": ("symmetric mask", *TRANSPOSED),
    "soft-cap without derivative": ("soft-cap", "scores", "1 - S * S", "1.0"),
    "ALiBi of the key alone": ("causal ALiBi", "scores", "tl.abs(first - column.to(tl.float32))", "-(j + column)"),
    "keys counted from the tile": ("dropout", "scores", "(j >> 4) + tl.arange", "tl.arange"),
    "dP not scaled": ("dropout", "flash_kernels", "dP * f.kept_scale", "dP"),
}


def mistakes_against_results():
    """Prints mistakes that are planted in flash.py's files: which results of both passes show each, and its diff."""
    torch.manual_seed(1)
    q, k, v, dout = torch.randn(4, 1, 1, 32, 16).to(engine.device)
    mask, away = torch.randn(32, 32).to(q), (torch.arange(32)[:, None] - torch.arange(32)).abs().to(q)
    settings = {"window": {"window": (9, 0)}, "soft-cap": {"softcap": 1.5}, "dropout": {"dropout_p": 0.3, "seed": 7}}
    settings |= {"mask": {"mask": mask}, "symmetric mask": {"mask": -0.3 * away}}
    settings["causal ALiBi"] = {"alibi_slopes": torch.tensor([0.25]).to(q), "causal": True}
    keep = philox.keep_mask(7, 1, 1, 32, 32, 0.3).to(engine.device)
    of_reference = settings | {"dropout": {"dropout_mask": keep, "dropout_p": philox.rounded(0.3)}}

    def shares(kernels, name):
        """{result: its error in units of the tolerance}."""
        gradient = {"mask_gradient": "mask" in settings[name]}
        want = error.expected(3 * q, k, v, dout, **of_reference[name], **gradient)
        how = settings[name] | {"tile": (16, 16)}
        out, lse = kernels.forward(3 * q, k, v, **how)
        results = out, lse, *kernels.backward(dout, 3 * q, k, v, out, lse, **how, **gradient)
        errors = error.errors(dict(zip((*error.NAMES, "dmask"), results, strict=False)), want)
        return {result: e / want.tolerance[result] for result, e in errors.items()}

    worst = max(max(shares(flash, name).values()) for name in settings)
    told = []
    print(f"as they are, the kernels' largest error is {worst:.2f} of its tolerance")
    for mistake, (name, *change) in MISTAKES.items():
        seen = [result for result, share in shares(planted("flash", *change), name).items() if share > 1]
        print(f"{mistake:28} {', '.join(seen) or 'lives'}")
        if change not in told:
            print(diff(*change))
            told.append(change)


BASES = dict.fromkeys(("causal", "additive mask", "boolean mask", "ALiBi", "soft-cap", "sinks", "dropout"), "none")
PASSES = {"fwd": "forward", "bwd": "backward"}
BASES |= {"window": "causal", "soft-cap + window": "causal", "packed": "padded"}  # packed: the same work as a batch


def milliseconds(D, which):
    """{(feature, "ours" or a peer): ms} of the last run on an H200 that measured the features."""
    found = [row for row in of_feature(*BASES, "none", "padded") if (row["D"], row["pass"]) == (D, which)]
    last = max((row["run"] for row in found if row["kernel"] == "flash" and row["N"] > 1024), default=None)
    return {(r["options"]["feature"], r["peer"] or "ours"): r["ms_median"] for r in found if r["run"] == last}


def last_of(feature, D, which, *others):
    """{"ours" or a peer: row} of a feature, of the last run on an H200 that measured it with all others; or {}."""
    runs = {}
    for row in of_feature(feature):
        if (row["D"], row["pass"]) == (D, which) and row["N"] > 1024:
            runs.setdefault(row["run"], {})[row["peer"] or "ours"] = row
    complete = [runs[run] for run in sorted(runs) if {"ours", *others} <= runs[run].keys()]
    return complete[-1] if complete else {}


def finish(ax, names, **axes):
    """Adds the names of features beside bars, a number to each bar, and a line at 1, which runs through no number."""
    for bars in ax.containers:
        plain = {"facecolor": "white", "edgecolor": "none", "pad": 0.6}
        ax.bar_label(bars, fmt="%.2f", padding=3, fontsize=9, bbox=plain)
    ax.axvline(1, color=INK, lw=1)
    ax.set(yticks=range(len(names)), yticklabels=names, ylim=(len(names) - 0.4, -0.6), **axes)
    ax.grid(axis="y", visible=False)


LANGUAGES = {"Triton": colour_of("fwd_1_tma"), "Gluon": colour_of("fwd_3_gluon")}  # built like these rungs


def language(rows):
    return "Gluon" if "gluon" in rows["ours"]["kernel"] else "Triton"


def costs(D=128):
    """What each feature costs on an H200 as bars, in both passes: the time with it by the time without."""
    names = [name if base == "none" else f"{name} / {base}" for name, base in BASES.items()]
    fig, axes = subplots(1, 2, figsize=(8.4, 4.2), sharey=True)
    told = []
    for ax, (which, word) in zip(axes, PASSES.items(), strict=True):
        ms, panel = milliseconds(D, which), []
        for place, (name, base) in enumerate(BASES.items()):
            if not {(name, "ours"), (base, "ours")} <= ms.keys():
                ax.text(0.04, place, "no run has both", va="center", fontsize=9)
                continue
            times = ms[name, "ours"] / ms[base, "ours"]
            ax.barh(place, times, color=LANGUAGES[language(last_of(name, D, which))])
            panel.append(f"{names[place]} {times:.2f}")
        finish(ax, names, title=f"{word}, D = {D}", xlabel="time with / time without", xlim=(0, 2.1))
        told.append(f"{word}: " + ", ".join(panel))
    handles = [Patch(color=colour, label=f"in {name}") for name, colour in LANGUAGES.items()]
    fig.legend(handles=handles, loc="outside lower center", ncols=2)
    return picture(fig, f"Bars of the time with a feature by the time without, D = {D}. {'; '.join(told)}.")


def beside_peers(D=128):
    """Our speed by that of FlashAttention-4 and of FlexAttention with a feature on an H200 as bars, in both passes."""
    peers = {"fa4": ("FlashAttention-4", PEERS["fa4"][2]), "flex": ("FlexAttention", GREYS[3])}
    features = [name for name in BASES if name != "causal"]  # alone, it is computed by the rungs
    names = [name for name in features if any(last_of(name, D, which, who) for which in PASSES for who in peers)]
    fig, axes = subplots(1, 2, figsize=(8.4, 4.2), sharey=True)
    told = []
    for ax, (which, word) in zip(axes, PASSES.items(), strict=True):
        for n, (who, (about, colour)) in enumerate(peers.items()):
            found = {name: last_of(name, D, which, who) for name in names}
            shares = {name: of[who]["ms_median"] / of["ours"]["ms_median"] for name, of in found.items() if of}
            places = [names.index(name) + 0.4 * n - 0.2 for name in shares]
            ax.barh(places, shares.values(), height=0.4, color=colour, label=f"of {about}'s")
            told.append(f"{word}, of {about}: " + ", ".join(f"{name} {share:.2f}" for name, share in shares.items()))
        finish(ax, names, title=f"{word}, D = {D}", xlabel="our speed / theirs", xlim=(0, 3))
    fig.legend(*axes[0].get_legend_handles_labels(), loc="outside lower center", ncols=2)
    return picture(fig, f"Bars of our speed as a share of that of others, D = {D}. {'; '.join(told)}.")


SIZES = {(8, 2**15): "8 sequences of 32k keys", (64, 2**11): "64 sequences of 2k keys"}


def bandwidths():
    """{who: [TB/s of each of SIZES]} with one new query of each head, of the last run on an H100 that measured both."""
    found = of_feature("decode", gpu=H100)
    runs = [{row["run"] for row in found if row["kernel"] and (row["B"], row["Nk"]) == size} for size in SIZES]
    last = max(set.intersection(*runs), default=None)
    speeds = {}
    for row in found:
        if row["run"] == last and (row["B"], row["Nk"]) in SIZES:
            speeds.setdefault(row["kernel"] or row["peer"], []).append(cost.bandwidth(row))
    return speeds


def decoding():
    """How fast an H100 reads K and V for one new query of each head as bars, beside a copy of as many bytes."""
    speeds = bandwidths()
    copies = speeds.pop("copy", ())
    words = [{"decode": "decode.py", "flex": "FlexAttention"}.get(who) or PEERS[who][0] for who in speeds]
    colours = [PEERS[who][2] if who in PEERS else COLOURS[0] if who == "decode" else GREYS[3] for who in speeds]
    fig, axes = subplots(1, 2, figsize=(8.4, 2.9), sharey=True)
    told = []
    for n, (ax, title) in enumerate(zip(axes, SIZES.values(), strict=True)):
        reached = [of[n] for of in speeds.values()]
        bars = ax.barh(words, reached, color=colours)
        for bar, tbs, colour in zip(bars, reached, colours, strict=True):
            place = tbs / 2, bar.get_y() + bar.get_height() / 2
            ax.text(*place, f"{tbs:.2f}", color=ink_on(colour), fontsize=9, ha="center", va="center")
        told.append(f"{title}: {', '.join(f'{w} {tbs:.2f}' for w, tbs in zip(words, reached, strict=True))}")
        for copy in copies[n : n + 1]:
            ax.axvline(copy, color=INK, lw=1)
            told[-1] += f"; a copy {copy:.2f}"
        ax.set(title=title, xlabel="TB/s; the line is a copy of as many bytes", xlim=(0, 3.3))
        ax.grid(axis="y", visible=False)
    axes[0].invert_yaxis()
    return picture(fig, f"Bars of TB/s on an H100. {'. '.join(told)}.")
