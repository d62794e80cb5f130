"""What notebook 00 draws, counts and breaks: the six animals, the running maximum, tiles, memory, mistakes."""

import functools
import itertools
import textwrap
import timeit
from unittest.mock import patch

import torch

from reference import cases, error, mutants
from steps import engine
from steps import step00_naive as stage
from steps.figures.picture import pictured
from steps.figures.plots import FAINT, INK, OPERAND, SEEN, boxes, subplots
from steps.step00_naive import fwd_3_tiled
from steps.step04_ring.strategies.account import Watched
from steps.workbook import exercises

torch.set_num_threads(1)  # The tensors of notebooks 00 and 01 are small: they are faster on one thread.


@pictured
def soft_lookup(names, Q, K, V):
    """Left: six key arrows and query 5 on the axes water and air. The query points between the trout and the gull,
    whose keys are long. Right: the six values as discs whose areas are their weights, 0.61 for the trout and 0.30 for
    the gull. As the scale grows, the output moves from the mean of all values to the trout's value.
    """
    fig, (left, right) = subplots(1, 2, figsize=(8.4, 4.0), width_ratios=(1, 1.2))
    tips, colours = torch.cat([K, Q[5:]]), [OPERAND["K"]] * 6 + [OPERAND["Q"]]
    left.quiver(*torch.zeros(2, 7), *tips.T, color=colours, angles="xy", scale_units="xy", scale=1, width=0.009)
    for name, (x, y), colour in zip([*names, "q5"], tips.tolist(), colours, strict=True):
        left.text(x, y + (0.2 if y > 0 else -0.2), name, color=colour, ha="center", va="center")
    left.set(xlim=(-2, 3.6), ylim=(-1.6, 2.6), xlabel="water", ylabel="air", title="keys, and query 5")
    path = (torch.linspace(0, 8, 400)[:, None] * (Q[5] @ K.T)).softmax(-1) @ V
    P = (Q[5] @ K.T / 2**0.5).softmax(-1)
    right.scatter(*V.T, s=1500 * P + 6, color=OPERAND["V"], alpha=0.6, lw=0)
    for name, (x, y), p in zip(names, V.tolist(), P.tolist(), strict=True):
        right.text(x + 0.4 + 0.8 * p, y, f"{name} {p:.2f}", va="center", fontsize=9)
    right.plot(*path.T, color=INK, lw=1.2, label="O[5] as the scale grows from 0 to 8")
    right.plot(*V.mean(0), "s", color=INK, label="scale 0: the mean of all values")
    right.plot(*(P @ V), "X", color=OPERAND["O"], ms=10, label="scale 1/sqrt(2): O[5]")
    right.set(xlim=(-1, 14), ylim=(-1, 7), title="values; a disc's area is the weight")
    fig.legend(loc="outside lower center", ncols=3, fontsize=9)
    return fig


def peak_bytes(forward, N):
    """The most bytes that forward(q, k, v) uses at once beyond its inputs, for one head of N tokens, d = 64."""
    qkv = torch.randn(3, 1, 1, N, 64)
    with Watched(qkv) as memory:
        forward(*qkv)
    return memory.held


def milliseconds(forward, N):
    """The shortest of three such calls, on one thread."""
    qkv = torch.randn(3, 1, 1, N, 64)
    return 1e3 * min(timeit.repeat(lambda: forward(*qkv), number=1, repeat=3))


@pictured
def running_maximum(scores, steps):
    """Three plots over keys 0 to 5. The running maximum steps up at keys 1, 3 and 4; the sum l is multiplied by alpha,
    0.24, 0.24 and 0.49, there; the two components of O / l move from the first value to the final row of the output.
    """
    fig, (top, middle, bottom) = subplots(3, 1, figsize=(7.2, 5.4), sharex=True)
    m, l, O = (torch.stack(x) for x in zip(*steps, strict=True))
    keys, rows = range(len(scores)), O / l[:, None]
    top.bar(keys, scores, width=0.35, color=OPERAND["S"])
    top.step(keys, m, "o-", where="post", color=INK)
    middle.plot(keys, l, "o-", color=INK)
    for j in keys[1:]:
        if m[j] > m[j - 1]:
            middle.text(j, l[j] + 0.12, f"x {(m[j - 1] - m[j]).exp():.2f}, then + 1", ha="right", fontsize=9)
    for x, mark in enumerate(("o-", "s--")):
        bottom.plot(keys, rows[:, x], mark, color=OPERAND["O"])
        bottom.axhline(rows[-1, x], color=FAINT, lw=1.2, zorder=0)
    top.set(title="bars: the scores; black: their running maximum m")
    middle.set(ylim=(0.9, 2.0), title="l, and its factor alpha where m moves")
    bottom.set(title="O / l: first number solid, second dashed; grey: the final row", xlabel="key j", xticks=keys)
    return fig


@pictured
def tiles_visited():
    """Three maps of S cut into tiles. Nq = Nk: the lower left triangle is visited, its tiles on the diagonal masked in
    part. Fewer queries than keys: the diagonal ends at the bottom right, so all queries visit a block of early keys.
    More queries than keys: the first queries see no key, and their tiles are never visited.
    """
    fig, axes = subplots(1, 3, figsize=(8.4, 3.4))
    for ax, (Nq, Nk, Br, Bc) in zip(axes, ((80, 80, 16, 16), (56, 88, 8, 16), (88, 56, 16, 8)), strict=True):
        tiles = []
        for i, j in itertools.product(range(0, Nq, Br), range(0, Nk, Bc)):
            hidden = fwd_3_tiled.mask(torch.zeros(min(Br, Nq - i), min(Bc, Nk - j)), i, j, Nk - Nq).isinf()
            colour = "white" if hidden.all() else OPERAND["Q"] if hidden.any() else OPERAND["S"]
            tiles.append((j, i, *reversed(hidden.shape), colour, ""))
        boxes(ax, tiles)
        ax.plot([Nk - Nq, Nk], [0, Nq], color=INK, lw=1.5, ls="--")
        ax.set_title(f"tile {Br, Bc}: {sum(tile[4] != 'white' for tile in tiles)} of {len(tiles)} visited", fontsize=10)
        ax.set(xlim=(0, Nk), ylim=(Nq, 0), aspect="equal", xlabel=f"{Nk} keys", ylabel=f"{Nq} queries")
    fig.supxlabel("light blue: seen whole; dark blue: masked in part; white: never visited", fontsize=10)
    return fig


def outcome(stage, case, compute, dtype=torch.float32):
    """(the results that compute(inputs) gives on a case of the contract, what is expected), for `error.failures`."""
    x = cases.build(case, stage.SUPPORTS, dtype, engine.device)
    return compute(x), error.expected(x.q, x.k, x.v, x.dout, causal=x.causal, scale=x.scale)


def contract(**replaced):
    """Stage 00 on all cases of the contract, with functions of fwd_3_tiled replaced: what failed, or the errors."""
    runs, failed, worst = [row for row in cases.select(stage.SUPPORTS) if row[2] is None], {}, {}
    with patch.dict(vars(fwd_3_tiled), replaced):
        for case, dtype, _ in runs:
            got, want = outcome(stage, case, functools.partial(cases.run, stage, case), dtype)
            failed |= {f"fails: {case.says}": case} if error.failures(got, want) else {}
            for name, e in error.errors(got, want).items():
                worst[name] = max(worst.get(name, 0), e / (want.tolerance[name] or 1))
    shares = ", ".join(f"{name} {share:.2f}" for name, share in worst.items())
    told = failed or [f"largest error in units of its tolerance: {shares}"]
    return "\n".join([f"{len(runs)} runs on {len(cases.CASES)} kinds of input", *told])


MISTAKES = {  # a mutant's name -> what it does
    "no_rescale_of_o": "O not rescaled", "inverse_alpha": "alpha inverted", "no_maximum": "no maximum subtracted",
    "maximum_starts_at_zero": "m starts at 0", "top_left": "causal: aligned top left",
    "tail_not_masked": "places after the last key count", "hard_coded_scale": "scale fixed to 1/8",
    "delta_missing": "delta left out",
}  # fmt: skip
INPUTS = {  # a case's name -> its column
    "head_dim_64": "d = 64", "ragged": "d = 32", "ragged_causal": "causal", "fewer_queries_causal": "causal,\nNq < Nk",
    "one_key": "one key", "scores_200": "scores\nof ±200", "falling": "scores\nthat fall",
    "negative_row": "scores\nnear -200",
}  # fmt: skip


@pictured
def mistakes_seen():
    """A table of eight mistakes against eight kinds of input. Most mistakes are seen almost everywhere. Leaving out the
    maximum is seen only with large or very negative scores; a maximum that starts at 0 only with a row of very negative
    scores; a mask aligned at the top left only where Nq and Nk differ; a scale fixed to 1/8 everywhere but at d = 64.
    """
    fig, ax = subplots(figsize=(8.4, 4.0))
    seen, _ = mutants.kill_matrix(stage.SUPPORTS, among=[one for one in mutants.MUTANTS if one.name in MISTAKES])
    for (y, mistake), (x, name) in itertools.product(enumerate(MISTAKES), enumerate(INPUTS)):
        boxes(ax, [(x, y, 1, 1, *((SEEN, "seen") if seen[mistake][name] == "killed" else ("white", "")))])
    ax.set_xticks([n + 0.5 for n in range(len(INPUTS))], INPUTS.values())
    ax.set_yticks([n + 0.5 for n in range(len(MISTAKES))], MISTAKES.values())
    ax.tick_params(length=0, labelsize=9)
    ax.xaxis.tick_top()
    ax.set(xlim=(0, len(INPUTS)), ylim=(len(MISTAKES), 0))
    return fig


def symptom(id):
    """What was reported about the broken kernel of a bug hunt."""
    return textwrap.fill(exercises.find(id).symptom, 88)
