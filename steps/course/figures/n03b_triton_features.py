"""What notebook 03b draws, measures and breaks."""

import torch
import triton
import triton.language as tl

from reference import attention, error, philox
from steps import engine
from steps.course.bench import cost
from steps.course.figures.measured import H100, H200, fresh
from steps.course.figures.picture import picture
from steps.course.figures.plots import table, visited_tiles
from steps.course.figures.triton_planted import planted
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
    """Prints which result of the forward and backward sees which mistake that is planted in flash.py's files."""
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
    print(f"as they are, the kernels' largest error is {worst:.2f} of its tolerance")
    for mistake, (name, *change) in MISTAKES.items():
        seen = [result for result, share in shares(planted("flash", *change), name).items() if share > 1]
        print(f"{mistake:28} {', '.join(seen) or 'lives'}")


BASES = dict.fromkeys(("causal", "additive mask", "boolean mask", "ALiBi", "soft-cap", "sinks", "dropout"), "none")
BASES |= {"window": "causal", "soft-cap + window": "causal", "packed": "padded"}  # packed: the same work as a batch


def milliseconds(D, which):
    """{(feature, "ours" or a peer): ms} of the last run on an H100 that measured the features."""
    found = [row for row in of_feature(*BASES, "none", "padded", gpu=H100) if (row["D"], row["pass"]) == (D, which)]
    last = max((row["run"] for row in found if row["kernel"] == "flash" and row["N"] > 1024), default=None)
    return {(r["options"]["feature"], r["peer"] or "ours"): r["ms_median"] for r in found if r["run"] == last}


def costs(D=128):
    """Prints what each feature costs on an H100, and our speed as a share of that of two peers, in both passes."""
    lines = [[f"D = {D}"], *([name if base == "none" else f"{name}, to {base}"] for name, base in BASES.items())]
    for which, name in (("fwd", "forward"), ("bwd", "backward")):
        ms = milliseconds(D, which)
        lines[0] += [name, "of fa4", "of flex"]
        for line, (name, base) in zip(lines[1:], BASES.items(), strict=True):
            pairs = ((name, "ours"), (base, "ours")), *(((name, who), (name, "ours")) for who in ("fa4", "flex"))
            line += [f"{ms[a] / ms[b]:.2f}" if {a, b} <= ms.keys() else "–" for a, b in pairs]
    print(table(*lines))


def decoding():
    """Prints how fast an H100 reads K and V for one new query of each head, beside a copy of as many bytes."""
    found = of_feature("decode", gpu=H100)
    sizes = {(8, 2**15): "8 sequences of 32k keys", (64, 2**11): "64 sequences of 2k keys"}
    runs = [{row["run"] for row in found if row["kernel"] and (row["B"], row["Nk"]) == size} for size in sizes]
    last = max(set.intersection(*runs), default=None)  # that measured both
    speeds = {}  # {who: [TB/s of each size]}
    for row in found:
        if row["run"] == last and (row["B"], row["Nk"]) in sizes:
            speeds.setdefault(row["kernel"] or row["peer"], []).append(f"{cost.bandwidth(row):.2f}")
    head = ["TB/s on an H100, one query a head", *sizes.values()]
    print(table(head, *([who, *words] for who, words in speeds.items())))
