"""What notebook 00 draws, counts and breaks: the six animals, the running maximum, tiles, memory, mistakes."""

import functools
import textwrap
import timeit
from unittest.mock import patch

import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from reference import cases, error, mutants
from steps import engine
from steps import step00_naive as stage
from steps.course.figures.picture import pictured
from steps.course.figures.plots import FAINT, INK, OPERAND, SEEN, UNSEEN, cells, subplots, visited_tiles
from steps.course.workbook import exercises
from steps.step00_naive import fwd_3_tiled

torch.set_num_threads(1)  # The tensors of notebooks 00 and 01 are small: they are faster on one thread.


@pictured
def soft_lookup(names, Q, K, V):
    """Left: query 5 as an arrow between those of the keys trout and gull, and each key's score. Right: the six values
    as discs, the areas their weights. As the scale grows, the output moves from the mean of all values to the trout's.
    """
    fig, (left, right) = subplots(1, 2, figsize=(8.4, 4.0), width_ratios=(1, 1.2))
    tips, colours = torch.cat([K, Q[5:]]), [OPERAND["K"]] * 6 + [OPERAND["Q"]]
    roots = torch.zeros(7, 2)
    roots[1, 1] = -0.12  # The frog's arrow would lie below the trout's.
    left.quiver(*roots.T, *tips.T, color=colours, angles="xy", scale_units="xy", scale=1, width=0.009)
    words = [f"{name}\n{s:.2f}" for name, s in zip(names, (Q[5] @ K.T / 2**0.5).tolist(), strict=True)]
    for word, (x, y), colour in zip([*words, "q5"], tips.tolist(), colours, strict=True):
        left.text(x, y + (0.1 if y > 0 else -0.2), word, color=colour, ha="center", va="bottom" if y > 0 else "top")
    left.set(xlim=(-2, 3.6), ylim=(-1.9, 2.9), xlabel="water", ylabel="air", title="keys and scores of query 5")
    path = (torch.linspace(0, 8, 400)[:, None] * (Q[5] @ K.T)).softmax(-1) @ V
    P = (Q[5] @ K.T / 2**0.5).softmax(-1)
    right.scatter(*V.T, s=1500 * P + 6, color=OPERAND["V"], alpha=0.6, lw=0)
    for name, (x, y), p in zip(names, V.tolist(), P.tolist(), strict=True):
        right.text(x + 0.4 + 0.8 * p, y, f"{name} {p:.2f}", va="center", fontsize=9)
    right.plot(*path.T, color=INK, lw=1.2, label="O[5] as the scale grows from 0 to 8")
    right.plot(*V.mean(0), "s", color=INK, label="scale 0: the mean of all values")
    right.plot(*(P @ V), "X", color=OPERAND["O"], ms=10, label="scale 1/sqrt(2): O[5]")
    names_of_axes = dict(xlabel="first number of a value", ylabel="second number")
    right.set(xlim=(-1, 14), ylim=(-1, 7), title="values; a disc's area is the weight", **names_of_axes)
    fig.legend(loc="outside lower center", ncols=3, fontsize=9)
    return fig


class Held(TorchDispatchMode):
    """The bytes that the new tensors of a call under this mode `held` at most at one time."""

    def __init__(self, inputs):
        super().__init__()
        self.held = 0
        self.alive = {x.untyped_storage()._cdata: (StorageWeakRef(x.untyped_storage()), 0) for x in inputs}

    @classmethod
    def _should_skip_dynamo(cls):
        return False  # otherwise the first operator imports what torch.compile needs, for two seconds

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        for x in tree_leaves(result):
            if isinstance(x, torch.Tensor) and x.untyped_storage().nbytes():  # A view's storage is there already.
                storage = x.untyped_storage()
                known = self.alive.get(storage._cdata)
                if known is None or known[0].expired():
                    self.alive[storage._cdata] = StorageWeakRef(storage), storage.nbytes()
        self.held = max(self.held, self.held_now())
        return result

    def held_now(self):
        self.alive = {key: known for key, known in self.alive.items() if not known[0].expired()}
        return sum(size for _, size in self.alive.values())


def peak_bytes(forward, N):
    """The most bytes that forward(q, k, v) uses at once beyond its inputs, for one head of N tokens, d = 64."""
    qkv = torch.randn(3, 1, 1, N, 64)
    with Held(qkv) as memory:
        forward(*qkv)
    return memory.held


def milliseconds(forward, N):
    """The shortest of three such calls, on one thread."""
    qkv = torch.randn(3, 1, 1, N, 64)
    return 1e3 * min(timeit.repeat(lambda: forward(*qkv), number=1, repeat=3))


@pictured
def running_maximum(scores, steps):
    """Two plots over keys 0 to 5. The maximum steps up at keys 1, 3 and 4. There the sum l falls, by the factors
    alpha of 0.24, 0.24 and 0.49, and then rises by 1. At keys 2 and 5 it rises by 0.03 and 0.01.
    """
    fig, (top, bottom) = subplots(2, 1, figsize=(7.2, 3.8), sharex=True)
    m, l, _ = (torch.stack(x) for x in zip(*steps, strict=True))
    keys = range(len(scores))
    top.bar(keys, scores, width=0.35, color=OPERAND["S"])
    top.step(keys, m, "o-", where="post", color=INK)
    bottom.plot(0, l[0], "o", color=INK)
    for j in keys[1:]:
        rescaled = (m[j - 1] - m[j]).exp() * l[j - 1]
        bottom.plot((j - 1, j - 0.2), (l[j - 1], l[j - 1]), color=FAINT)
        bottom.plot((j - 0.2, j - 0.1), (l[j - 1], rescaled), color=UNSEEN)
        bottom.plot((j - 0.1, j), (rescaled, l[j]), "o-", color=INK, markevery=[1])
        term = (scores[j] - m[j]).exp()
        if m[j] > m[j - 1]:
            bottom.text(j - 0.3, rescaled, f"x {(m[j - 1] - m[j]).exp():.2f}", ha="right", va="bottom", fontsize=9)
            bottom.text(j + 0.05, (rescaled + l[j]) / 2, f"+ {term:.0f}", va="center", fontsize=9)
        else:
            bottom.text(j, l[j] - 0.07, f"+ {term:.2f}", ha="center", va="top", fontsize=9)
    top.set(title="bars: the scores; black: their running maximum m")
    bottom.set(title="the sum l: orange, alpha shrinks it; black, the new key's term", xlabel="key j", xticks=keys)
    bottom.set(ylim=(0, 1.9))
    return fig


@pictured
def tiles_visited():
    """Three maps of S in tiles of 4 x 4. The diagonal ends at the bottom right, and its tiles are masked. Fewer queries
    than keys: all see the first tile of keys. More: the first queries see no key, and their tiles are never visited.
    """
    panels = {}
    for title, Nq, Nk in (("Nq = Nk", 12, 12), ("Nq < Nk", 8, 12), ("Nq > Nk", 12, 8)):
        pairs = fwd_3_tiled.mask(torch.zeros(Nq, Nk), 0, 0, Nk - Nq) == 0
        seen = pairs.unfold(0, 4, 4).unfold(1, 4, 4).sum((2, 3))  # how many scores of each tile
        panels[title] = seen.sign() + ((0 < seen) & (seen < 16)), pairs
    return visited_tiles(panels, 4, white="tile never visited")


def outcome(stage, case, compute, dtype=torch.float32):
    """(the results that compute(inputs) gives on a case of the contract, what is expected), for `error.failures`."""
    x = cases.build(case, stage.SUPPORTS, dtype, engine.device)
    return compute(x), x.expected()


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
    "tail_not_masked": "end of the last tile not masked", "hard_coded_scale": "scale fixed to 1/8",
    "delta_missing": "delta left out",
}  # fmt: skip
INPUTS = {  # a case's name -> its column
    "head_dim_64": "d = 64", "ragged": "d = 32", "ragged_causal": "causal",
    "fewer_queries_causal": "causal,\nNq < Nk",
    "one_key": "one key", "scores_200": "scores\nof ±200", "falling": "scores\nthat fall",
    "negative_row": "scores\nnear -200",
}  # fmt: skip


@pictured
def mistakes_seen():
    """A table of eight mistakes against eight kinds of input. Leaving out the maximum is seen only with large or very
    negative scores; a maximum that starts at 0 only with very negative scores; a mask aligned at the top left only
    where Nq and Nk differ; a scale fixed to 1/8 everywhere but at d = 64.
    """
    killed, _ = mutants.kill_matrix(stage.SUPPORTS, among=[one for one in mutants.MUTANTS if one.name in MISTAKES])
    words = [["seen" if killed[mistake][name] == "killed" else "" for name in INPUTS] for mistake in MISTAKES]
    fig, ax = subplots(figsize=(8.4, 4.0))
    cells(ax, [[SEEN if word else "white" for word in row] for row in words], words, edge=FAINT)
    ax.set_xticks(range(len(INPUTS)), INPUTS.values())
    ax.set_yticks(range(len(MISTAKES)), MISTAKES.values())
    ax.xaxis.tick_top()
    return fig


def symptom(id):
    """What was reported about the broken kernel of a bug hunt."""
    return textwrap.fill(exercises.find(id).symptom, 88)
