"""What notebook 03b draws, measures and breaks."""

import collections
import itertools
import math
import re
import warnings

import matplotlib.pyplot as plt
import torch
import torch.nn.attention.flex_attention  # noqa: F401  The page calls it by its whole name.
import triton
import triton.language as tl
from matplotlib.colors import ListedColormap

from reference import attention, error, philox
from steps import engine
from steps.bench import cost, rows
from steps.figures.picture import picture
from steps.figures.plots import COLOURS, INK, style
from steps.figures.triton_compiler import compiled
from steps.figures.triton_planted import planted, who_sees
from steps.step03_triton import features, flash

style()
torch.set_num_threads(1)  # Small tensors are faster on one thread.
torch.set_printoptions(precision=2, sci_mode=False)
H200 = cost.GPUS["NVIDIA H200"]
warnings.filterwarnings("ignore", message="flex_attention called without")  # The page says that it is not compiled.


def six_tokens():
    """Q, K, V and dO of notebook 00's example."""
    Q = [[1.0, 2], [0, 1], [-1, 0], [2, -1], [1, 1], [3, 1]]
    K = [[0.0, 1], [1, 0], [-1, 1], [1, 2], [2, 0], [0, -1]]
    V = [[0.0, 6], [2, 0], [4, 6], [6, 4], [8, 0], [10, 6]]
    dO = [[1.0, 0], [0, 1], [1, 1], [2, 0], [0, -1], [1, -1]]
    return [torch.tensor(x) for x in (Q, K, V, dO)]


def memory():
    """Prints what masks and S take at two lengths, and what a call with both passes was measured to hold on an H200."""
    for N in (8192, 65536):
        inputs, mask = cost.compulsory_bytes(B=8, H=32, N=N, D=128), 2 * 8 * 32 * N * N
        print(f"N = {N:5}: q, k, v, out: {inputs / 1e9:4.1f} GB; a 16-bit mask of each head: {mask / 1e9:5,.0f} GB")
    for row in [row for row in rows.fresh(rows.read()) if row["options"].get("feature") == "memory"]:
        held, S = row["peak_bytes"] / 1e9, 2 * row["H"] * row["N"] ** 2 / 1e9
        who = row["peer"] or "this stage"
        print(f"{who}, H = {row['H']}, N = {row['N']}, both passes: {held:.2f} GB held; S has {S:.0f} GB")


def score_tables(scaled, cap, M, bias, S, derivative):
    """Six tables of six tokens' numbers, from the scaled products to the scores and their derivative."""
    capped = cap * torch.tanh(scaled / cap)
    tables = {"scale X": scaled, "soft-cap": capped, "+ M": capped + M, "- slope |i - j|": capped + M - bias}
    tables |= {"hidden: S": S, "dS/dX": derivative}
    fig, axes = plt.subplots(2, 3, figsize=(8.4, 5.4), layout="constrained", sharex=True, sharey=True)
    for ax, (title, matrix) in zip(axes.flat, tables.items(), strict=True):
        limit = 1 if title == "dS/dX" else 3
        shown = matrix.where(matrix.isfinite(), torch.nan)
        ax.imshow(shown, cmap=plt.get_cmap("RdBu", 13), vmin=-limit, vmax=limit)
        for i, j in itertools.product(range(6), range(6)):
            number = f"{matrix[i, j]:.2f}" if matrix[i, j].isfinite() else "-inf"
            ink = "white" if 0.6 * limit < abs(matrix[i, j]) < math.inf else INK
            ax.text(j, i, number, ha="center", va="center", fontsize=9, color=ink)
        ax.set(title=title, xticks=range(6), yticks=range(6))
        ax.grid(False)
    fig.supxlabel("key j", fontsize=10)
    fig.supylabel("query i", fontsize=10)
    return picture(fig, """Six tables of 6 by 6 numbers: the scaled products; after the soft-cap, where none is beyond
        1.5; with 0.5 added in column 0; less a quarter for each step of distance; with -inf above the diagonal; and the
        derivative, which is small where the scaled product was large.""", dpi=90)  # fmt: skip


@triton.jit
def visit_kernel(tiles, count, N, LEFT, RIGHT, SIDE: tl.constexpr):
    tiles += tl.program_id(0) * count
    r = features.tile_ranges(tl.program_id(0) * SIDE, 0, LEFT, RIGHT, N, False, SIDE, SIDE)
    for j in range(r.whole, r.full, SIDE):
        tl.store(tiles + j // SIDE, 1)
    for n in range(r.begin, r.end, SIDE):
        tl.store(tiles + features.jump(n, r, LEFT) // SIDE, 2)


def tiles_of(N, window, side=4):
    """(tiles, tiles) of `tile_ranges`: 0 not visited, 1 visited without a mask, 2 with one."""
    count = N // side
    tiles = torch.zeros(count, count, dtype=torch.int32, device=engine.device)
    visit_kernel[(count,)](tiles, count, N, *window, SIDE=side)
    return tiles.cpu()


def windows(N=24, side=4):
    """The tiles that are visited with windows, and the pairs that are seen."""
    shapes = {"causal": (None, 0), "window (11, 0)": (11, 0), "window (5, 5)": (5, 5)}
    fig, axes = plt.subplots(1, 3, figsize=(8.4, 3.2), layout="constrained", sharey=True)
    for ax, (name, window) in zip(axes, shapes.items(), strict=True):
        tiles, pairs = tiles_of(N, window, side), attention.visible(N, N, window=window)
        for n, j in tiles.nonzero().tolist():
            colour = COLOURS[4 if tiles[n, j] == 2 else 5]
            ax.add_patch(plt.Rectangle((side * j, side * n), side, side, facecolor=colour, edgecolor="white", lw=2))
        i, j = pairs.nonzero(as_tuple=True)
        ax.plot(j + 0.5, i + 0.5, ".", color=INK, ms=3)
        ax.add_patch(plt.Rectangle((0, 0), N, N, fill=False, edgecolor=INK, lw=1))
        ax.set(xlim=(-0.5, N + 0.5), ylim=(N + 0.5, -0.5), aspect="equal", xlabel="key", title=name)
        ax.set(xticks=range(0, N + 1, side), yticks=range(0, N + 1, side))
    axes[0].set_ylabel("query")
    return picture(fig, """Three squares of 24 queries by 24 keys in tiles of 4 by 4. Causal: blue tiles below the
        diagonal, orange ones on it, none above. Window (11, 0): from the third row of tiles on, a band of an
        orange, two blue and an orange tile. Window (5, 5): a band around the diagonal, with a blue tile in each row
        and orange ones on both sides.""")  # fmt: skip


def dropout_masks(seed, p):
    """Which of 32 by 32 entries are kept: by query and key, and wrongly by the place in a tile."""
    keep = philox.keep_mask(seed, 1, 2, 32, 32, p)[0, 0]
    shown = {"by query and key": (keep, (32, 32))}
    for Br, Bc in ((16, 16), (8, 16)):
        shown[f"wrong: tiles of {Br} x {Bc}"] = keep[:Br, :Bc].tile(32 // Br, 32 // Bc), (Br, Bc)
    fig, axes = plt.subplots(1, 3, figsize=(8.4, 2.9), layout="constrained", sharey=True)
    for ax, (name, (entries, (Br, Bc))) in zip(axes, shown.items(), strict=True):
        ax.imshow(entries, cmap=ListedColormap(["white", COLOURS[0]]))
        ax.vlines([x - 0.5 for x in range(Bc, 32, Bc)], -0.5, 31.5, color=COLOURS[1])
        ax.hlines([y - 0.5 for y in range(Br, 32, Br)], -0.5, 31.5, color=COLOURS[1])
        ax.set(xlabel="key", xticks=range(0, 32, 8), yticks=range(0, 32, 8), title=name)
        ax.grid(False)
    axes[0].set_ylabel("query")
    return picture(fig, """Three squares of 32 by 32 entries, blue where one is kept. Left: no pattern. The other two
        repeat themselves in every tile, and differ from each other.""")  # fmt: skip


WINDOW = "features", "(seq.shift - f.left)", "(seq.shift - f.left - 1)"
TRANSPOSED = "flash", "expand(B, H, Nq, Nk).stride()", "expand(B, H, Nq, Nk).mT.stride()"
ALIBI = "S -= head.slope * tl.abs(first - column.to(tl.float32))", "S += (j + column).to(tl.float32) * head.slope"
MISTAKES = {  # the options in which they are run, the file, and the change
    "window one key too wide": ("window (9, 0)", *WINDOW),
    "the same, wider than N": ("window (40, 0)", *WINDOW),
    "mask transposed": ("mask", *TRANSPOSED),
    "the same, symmetric mask": ("mask of |i - j|", *TRANSPOSED),
    "soft-cap without derivative": ("soft-cap", "features", "1 - S * S", "1.0"),
    "ALiBi of the key alone": ("causal ALiBi", "features", *ALIBI),
    "keys counted from the tile": ("dropout", "features", "(j >> 4) + tl.arange", "tl.arange"),
    "dP not scaled": ("dropout", "flash_kernels", "dP * f.kept_scale", "dP"),
}


def verdicts(N=32, D=16, p=0.3, seed=7):
    """{(mistake, result): "lives" or error / tolerance}, and the largest share of the kernels as they are."""
    generator = torch.Generator().manual_seed(1)
    q, k, v, dout = torch.randn(4, 1, 1, N, D, generator=generator).to(engine.device)
    q, away = 3 * q, (torch.arange(N)[:, None] - torch.arange(N)).abs().to(engine.device)
    settings = {f"window ({left}, 0)": {"window": (left, 0)} for left in (9, 40)} | {"soft-cap": {"softcap": 1.5}}
    settings["mask"] = {"mask": torch.randn(N, N, generator=generator).to(engine.device)}
    settings["mask of |i - j|"] = {"mask": -0.3 * away}
    settings["causal ALiBi"] = {"alibi_slopes": torch.tensor([0.25]).to(engine.device), "causal": True}
    settings["dropout"] = {"dropout_p": p, "seed": seed}

    def shares(kernels, name):
        options, of_reference = settings[name] | {"tile": (16, 16)}, dict(settings[name])
        if of_reference.pop("seed", None):
            of_reference["dropout_mask"] = philox.keep_mask(seed, 1, 1, N, N, p).to(engine.device)
            of_reference["dropout_p"] = philox.rounded(p)
        gradient = {"mask_gradient": "mask" in options}
        want = error.expected(q, k, v, dout, **of_reference, **gradient)
        out, lse = kernels.forward(q, k, v, **options)
        results = out, lse, *kernels.backward(dout, q, k, v, out, lse, **options, **gradient)
        errors = error.errors(dict(zip((*error.NAMES, "dmask"), results, strict=False)), want)
        return {result: e / want.tolerance[result] for result, e in errors.items()}

    found = {}
    for mistake, (name, *change) in MISTAKES.items():
        for result, ratio in shares(planted("flash", *change), name).items():
            found[mistake, result] = f"{ratio:,.0f} x" if ratio > 1 else "lives"
    return found, max(max(shares(flash, name).values()) for name in settings)


def mistakes_against_results():
    """Which result of the forward and backward sees which mistake that is planted in flash.py's files."""
    found, worst = verdicts()
    print(f"as they are, the kernels' largest error is {worst:.2f} of its tolerance")
    return who_sees(found, "green: seen, with error / tolerance; orange: by no result", "Mistakes against results.")


KINDS = {"integer product": r"IMAD(\.HI\.U32|\.WIDE\.U32)?$", "exp2, tanh": r"MUFU", "other": r""}


def instructions_a_score(side=64):
    """{feature: {kind: instructions a score more than without it}}, of the forward at D = 128 on an H100."""
    script = "from steps.step03_triton import flash\nx = torch.zeros(1, 2, 256, 128).bfloat16()\n"
    script += "mask = torch.zeros(256, 256)\n"
    options = {"none": "", "additive mask": "mask=mask.bfloat16()", "boolean mask": "mask=mask > 0"}
    options |= {"ALiBi": "alibi_slopes=torch.ones(2)", "soft-cap": "softcap=50.0"}
    options |= {"dropout": "dropout_p=0.1, seed=torch.tensor(3)"}
    script += "\n".join(f"flash.forward(x, x, x, tile=({side}, {side}), {given})" for given in options.values())
    counts = {}
    for name, made in zip(options, compiled(script), strict=True):
        kinds = [next(kind for kind, pattern in KINDS.items() if re.match(pattern, x)) for x in made["machine"]]
        # A kernel has its loop's text twice, with and without a mask; 128 threads share a tile.
        counts[name] = {kind: n / (2 * side * side / 128) for kind, n in collections.Counter(kinds).items()}
    plain = counts.pop("none")
    more = {name: {kind: c.get(kind, 0) - plain[kind] for kind in KINDS} for name, c in counts.items()}
    print("instructions a score that each feature adds to the forward:")
    for name, kinds in more.items():
        shown = ", ".join(f"{kind} {round(n, 1) + 0:.1f}" for kind, n in kinds.items())
        print(f"{name:13} {sum(kinds.values()):4.1f} more: {shown}")
    return more


BASES = dict.fromkeys(("additive mask", "boolean mask", "ALiBi", "soft-cap", "dropout"), "none")
BASES |= {"window": "causal", "soft-cap + window": "causal", "packed": "padded"}  # packed: the same work as a batch


def milliseconds(D, which):
    """{(feature, kernel or peer): ms} of the last run on an H200 that measured the features of flash.py."""
    found = [row for row in rows.fresh(rows.read()) if row["options"].get("feature") in {*BASES, *BASES.values()}]
    found = [row for row in found if (row["gpu"], row["D"], row["pass"]) == (H200.name, D, which) and row["N"] > 1024]
    last = max((row["run"] for row in found if row["kernel"] == "flash"), default=None)
    return {(r["options"]["feature"], r["kernel"] or r["peer"]): r["ms_median"] for r in found if r["run"] == last}


def decoding():
    """Prints how fast memory is read for one query of each head and a cache of 32k keys, beside a copy."""
    found = [row for row in rows.fresh(rows.read()) if row["options"].get("feature") == "decode"]
    last = max((row["run"] for row in found if row["kernel"]), default=None)
    for row in [row for row in found if row["run"] == last]:
        who = row["kernel"] or row["peer"]
        print(f"Nk = {row['Nk']}, {who:10} {1e3 * row['ms_median']:5.0f} us, {cost.bandwidth(row):.2f} TB/s")


def costs():
    """The time with each feature to the time without it, forward and backward, as bars; before it `decoding`."""
    decoding()
    fig, axes = plt.subplots(1, 2, figsize=(8.4, 4.4), layout="constrained", sharex=True, sharey=True)
    words = []
    for ax, which in zip(axes, ("fwd", "bwd"), strict=True):
        for n, D in enumerate((128, 64)):
            ms = {feature: x for (feature, who), x in milliseconds(D, which).items() if who == "flash"}
            there = [(y, f, ms[f] / ms[base]) for y, (f, base) in enumerate(BASES.items()) if {f, base} <= ms.keys()]
            at, ratios = [y + 0.38 * (n - 0.5) for y, _, _ in there], [ratio for _, _, ratio in there]
            bars = ax.barh(at, ratios, 0.36, color=COLOURS[n], label=f"D = {D}")
            ax.bar_label(bars, fmt="%.2f", padding=3)
            words += [f"{which}, D = {D}, {feature} {ratio:.2f}" for _, feature, ratio in there]
        ax.axvline(1, color=INK, lw=1)
        ax.set_title("forward" if which == "fwd" else "backward")
        ax.set_yticks(range(len(BASES)), [f"{feature}\nto {base}" for feature, base in BASES.items()])
        ax.grid(axis="y", visible=False)
        ax.margins(x=0.1)
    axes[0].set_ylim(len(BASES) - 0.4, -0.6)
    axes[0].legend(loc="lower right")
    fig.supxlabel("time with a feature / time without, on an H200 in bf16, N = 16384 (packed: 2048)", fontsize=10)
    return picture(fig, f"Bars of the time with each feature to the time without it. {'; '.join(words)}.")


def apart(theirs, ours, bias):
    """Prints how far two outputs are apart, and the gradients of the bias that both were made with."""
    gradients = [torch.autograd.grad(out.sum(), bias)[0] for out in (theirs, ours)]
    of_bias = (gradients[0] - gradients[1]).abs().max()
    print(f"window, soft-cap, bias: {(theirs - ours).abs().max():.0e} apart, the bias's gradient {of_bias:.0e}")
    beside_flex()


def beside_flex(D=128):
    """Prints milliseconds of flash.py and of compiled FlexAttention, where one run has both."""
    forward, backward = (milliseconds(D, which) for which in ("fwd", "bwd"))
    print(f"ms on an H200, D = {D}  forward: ours  FlexAttention  backward: ours  FlexAttention")
    for name in dict.fromkeys(feature for feature, who in forward if who == "flex"):
        both = [ms.get((name, who), math.nan) for ms in (forward, backward) for who in ("flash", "flex")]
        print("{:22} {:13.2f} {:14.2f} {:15.2f} {:14.2f}".format(name, *both))
