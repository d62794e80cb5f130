"""What notebook 00 draws, counts and breaks: the six animals, the running maximum, tiles, memory, mistakes."""

import contextlib
import itertools
import textwrap
import timeit
import weakref
from unittest.mock import patch

import matplotlib.pyplot as plt
import torch
from matplotlib.colors import ListedColormap
from torch.utils._python_dispatch import TorchDispatchMode

from reference import cases, error, mutants
from steps import step00_naive as stage
from steps.figures.picture import picture
from steps.figures.plots import FAINT, INK, OPERAND, SEEN, ink_on, style
from steps.step00_naive import fwd_3_tiled
from steps.workbook import exercises

torch.set_num_threads(1)  # The tensors of notebooks 00 and 01 are small: they are faster on one thread.

def soft_lookup(names, Q, K, V):
    """Left: the keys, and query 5. Right: the values, with discs as large as their weights, and the path of O[5]."""
    style()
    fig, (left, right) = plt.subplots(1, 2, figsize=(8, 3.6))
    arrow = {"arrowstyle": "->", "lw": 1.6}
    for j, name in enumerate(names):
        left.annotate("", K[j].tolist(), (0, 0), arrowprops=arrow | {"color": OPERAND["K"]})
        x, y = (K[j] + torch.tensor([0.42, 0.25]) * K[j] / K[j].norm()).tolist()
        left.text(x, y - 0.25 * (name == "frog"), name, color=OPERAND["K"], ha="center", va="center")
    left.annotate("", Q[5].tolist(), (0, 0), arrowprops=arrow | {"color": OPERAND["Q"], "lw": 2.5})
    left.text(3.05, 1.12, "q5", color=OPERAND["Q"])
    left.set(xlim=(-2, 3.6), ylim=(-1.6, 2.8), xlabel="water", ylabel="air", aspect="equal")
    left.set_title("keys, and query 5")
    path = (torch.linspace(0, 8, 400)[:, None] * (Q[5] @ K.T)).softmax(-1) @ V
    P = (Q[5] @ K.T / 2**0.5).softmax(-1)
    right.scatter(*V.T, s=1500 * P + 6, color=OPERAND["V"], alpha=0.6, lw=0)
    for name, (x, y), p in zip(names, V.tolist(), P.tolist(), strict=True):
        x += {"sparrow": -0.3, "eagle": 0.5}.get(name, 0)  # their words would touch
        right.text(x, y + (-1.8 if name == "trout" else 0.8), f"{name} {p:.2f}", ha="center", fontsize=9)
    right.plot(*path.T, color=INK, lw=1.2, label="O[5] as the scale goes from 0 to 8")
    right.plot(*V.mean(0), "s", color=INK, label="scale 0: the mean of all values")
    right.plot(*(P @ V), "X", color=OPERAND["O"], ms=10, label="scale 1/sqrt(2): O[5]")
    right.set(xlim=(-2.6, 12), ylim=(-6.5, 7.8), yticks=range(-4, 8, 2))
    right.set_title("values; the area is the weight")
    right.legend(loc="lower left", fontsize=9)
    return picture(fig, """Left: six key arrows and query 5 on the axes water and air; the query points between the
        trout and the gull, whose keys are long. Right: the six values as discs whose areas are their weights, 0.61 for
        the trout and 0.30 for the gull. The output moves from the mean of all values at scale 0 past its place at scale
        1/sqrt(2) to the trout's value as the scale grows.""")


class AliveBytes(TorchDispatchMode):
    """Counts the bytes of the tensors that torch makes: `peak` is the most that were alive at once, beside `inputs`."""

    def __init__(self, *inputs):
        super().__init__()
        self.now = self.peak = 0
        self.known = weakref.WeakSet(x.untyped_storage() for x in inputs)

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        storage = result.untyped_storage() if isinstance(result, torch.Tensor) else None
        if storage is not None and storage not in self.known:  # otherwise it is a view of an earlier tensor
            self.known.add(storage)
            self.change(storage.nbytes())
            weakref.finalize(storage, self.change, -storage.nbytes())
        return result

    def change(self, count):
        self.now += count
        self.peak = max(self.peak, self.now)


def peak_bytes(forward, N, d=64):
    """The most bytes that forward(q, k, v) uses at once beyond its inputs, for one head of N tokens."""
    q, k, v = torch.randn(3, 1, 1, N, d)
    with AliveBytes(q, k, v) as memory:
        forward(q, k, v)
    return memory.peak


def milliseconds(forward, N=512, d=64):
    """The shortest of three runs of forward(q, k, v), for one head of N tokens, on one thread."""
    q, k, v = torch.randn(3, 1, 1, N, d)
    return 1e3 * min(timeit.repeat(lambda: forward(q, k, v), number=1, repeat=3))


def running_maximum(scores, steps):
    """m, l and O / l of a row after each key. steps: [(m, l, O)]."""
    style()
    fig, axes = plt.subplots(3, 1, figsize=(7.2, 5.4), sharex=True, layout="constrained")
    m, l = (torch.stack([step[n] for step in steps]) for n in (0, 1))
    rows = torch.stack([O / l for _, l, O in steps])
    alpha = (m[:-1] - m[1:]).exp()
    keys = range(len(scores))
    axes[0].bar(keys, scores, width=0.35, color=OPERAND["S"], label="score s_j")
    axes[0].step(keys, m, "o-", where="post", color=INK, label="running maximum m")
    axes[0].legend(fontsize=9, loc="upper left")
    axes[0].set_title("m follows the largest score")
    axes[1].plot(keys, l, "o-", color=INK)
    for j, factor in enumerate(alpha.tolist(), 1):
        if factor < 1:
            axes[1].text(j, l[j] + 0.12, f"x {factor:.2f}, then + 1", ha="right", fontsize=9)
    axes[1].set(ylim=(0.9, 2.0), title="l, and its factor alpha where m moves")
    for c, (mark, line) in enumerate((("o-", "component 0"), ("s--", "component 1"))):
        axes[2].plot(keys, rows[:, c], mark, color=OPERAND["O"], label=line)
        axes[2].axhline(rows[-1, c], color=FAINT, lw=1.2, zorder=0)
    axes[2].legend(fontsize=9, loc="upper right")
    axes[2].set(title="O / l, the attention over the keys so far; grey: the final row", xlabel="key j", xticks=keys)
    return picture(fig, """Three plots over keys 0 to 5. The running maximum steps up at keys 1, 3 and 4; the sum l is
        multiplied by alpha, 0.24, 0.24 and 0.49, there; the two components of O / l move from the first value to the
        final row of the output and end on it.""")


def tiles_visited():
    """Maps of S in tiles, causal: seen whole, crossed by the diagonal, never visited. Three ratios of Nq and Nk."""
    style()
    fig, axes = plt.subplots(1, 3, figsize=(8.4, 3.4), layout="constrained")
    whole, crossed = OPERAND["S"], OPERAND["Q"]
    for ax, (Nq, Nk, Br, Bc) in zip(axes, ((80, 80, 16, 16), (56, 88, 8, 16), (88, 56, 16, 8)), strict=True):
        visited = 0
        for i, j in itertools.product(range(0, Nq, Br), range(0, Nk, Bc)):
            end = fwd_3_tiled.last_key(i + Br, Nq, Nk, True)
            S = torch.zeros(min(Br, Nq - i), min(Bc, Nk - j))
            masked = fwd_3_tiled.mask(S, i, j, Nk - Nq).isinf().any()
            colour = "white" if j >= end else crossed if masked else whole
            ax.add_patch(plt.Rectangle((j, i), S.shape[1], S.shape[0], fc=colour, ec=INK, lw=0.8, clip_on=False))
            visited += j < end
        ax.plot([Nk - Nq, Nk], [0, Nq], color=INK, lw=1.5, ls="--")
        ax.set_title(f"tile {Br, Bc}: {visited} of {-(-Nq // Br) * -(-Nk // Bc)}", fontsize=10)
        ax.set(xlim=(0, Nk), ylim=(Nq, 0), aspect="equal", xlabel=f"{Nk} keys", ylabel=f"{Nq} queries")
        ax.grid(False)
    handles = [plt.Rectangle((0, 0), 1, 1, fc=colour, ec=INK) for colour in (whole, crossed, "white")]
    fig.legend(handles, ("seen whole", "masked in part", "never visited"), ncols=3, loc="outside lower center")
    return picture(fig, """Three maps of S cut into tiles. Nq = Nk: the lower left triangle is visited, its tiles on the
        diagonal masked in part. Fewer queries than keys: the diagonal ends at the bottom right, so a block of early
        keys is visited by all. More queries than keys: the first queries see no key, and their tiles are never
        visited.""")


def contract(**replaced):
    """Stage 00 on all cases of the contract, with functions of fwd_3_tiled replaced: what failed, and the errors."""
    runs, failed, worst = 0, [], {}
    with contextlib.ExitStack() as stack:
        for name, function in replaced.items():
            stack.enter_context(patch.object(fwd_3_tiled, name, function))
        for case, dtype, reason in cases.select(stage.SUPPORTS):
            if reason is None:
                runs += 1
                x = cases.build(case, stage.SUPPORTS, dtype)
                want = error.expected(x.q, x.k, x.v, x.dout, causal=x.causal, scale=x.scale)
                got = cases.run(stage, case, x)
                if error.failures(got, want) and (line := f"fails: {case.says}") not in failed:
                    failed.append(line)
                for name, e in error.errors(got, want).items():
                    worst[name] = max(worst.get(name, 0), e / (want.tolerance[name] or 1))
    shares = ", ".join(f"{name} {share:.2f}" for name, share in worst.items())
    last = [] if failed else [f"largest error in units of its tolerance: {shares}"]
    return "\n".join([f"{runs} runs on {len(cases.CASES)} kinds of input", *failed, *last])


MISTAKES = {  # a mutant's name -> what it does
    "no_rescale_of_o": "O not rescaled", "inverse_alpha": "alpha inverted", "no_maximum": "no maximum subtracted",
    "maximum_starts_at_zero": "m starts at 0", "top_left": "causal: aligned top left",
    "tail_not_masked": "last tile's tail not masked", "hard_coded_scale": "scale fixed to 1/8",
    "delta_missing": "delta left out",
}  # fmt: skip
INPUTS = {  # a case's name -> its column
    "head_dim_64": "d = 64", "ragged": "d = 32", "ragged_causal": "causal", "fewer_queries_causal": "causal,\nNq < Nk",
    "one_key": "one key", "scores_200": "scores\nof ±200", "falling": "scores\nthat fall",
    "negative_row": "scores\nnear -200",
}  # fmt: skip


def mistakes_seen():
    """Planted mistakes against inputs of the contract: coloured where the input fails, so that the mistake is seen."""
    style()
    fig, ax = plt.subplots(figsize=(8.4, 4.0), layout="constrained")
    seen = [[fails(mistake, name) for name in INPUTS] for mistake in MISTAKES]
    ax.pcolormesh(seen, cmap=ListedColormap(["white", SEEN]), edgecolors=FAINT, lw=0.8, vmin=0, vmax=1)
    for row, column in torch.tensor(seen).nonzero().tolist():
        ax.text(column + 0.5, row + 0.5, "seen", color=ink_on(SEEN), ha="center", va="center", fontsize=9)
    ax.set_xticks([n + 0.5 for n in range(len(INPUTS))], INPUTS.values())
    ax.set_yticks([n + 0.5 for n in range(len(MISTAKES))], MISTAKES.values())
    ax.tick_params(length=0, labelsize=9)
    ax.xaxis.tick_top()
    ax.invert_yaxis()
    ax.grid(False)
    return picture(fig, """A table of eight mistakes against eight kinds of input. Several mistakes are seen almost
        everywhere. Leaving out the maximum is seen only with large or very negative scores; a maximum that starts at 0
        only with a row of very negative scores; a mask aligned at the top left only where Nq and Nk differ; a scale
        fixed to 1/8 everywhere but at d = 64.""")


def fails(mistake, name):
    """Whether a kernel with this mutant's mistake fails on this case."""
    (mutant,) = (m for m in mutants.MUTANTS if m.name == mistake)
    (case,) = (c for c in cases.CASES if c.name == name)
    x = cases.build(case, stage.SUPPORTS, torch.float32)
    want = error.expected(x.q, x.k, x.v, x.dout, causal=x.causal, scale=x.scale)
    try:
        return bool(error.failures(mutant.run(x, x.tile, stage.SUPPORTS["order"]), want))
    except mutants.NotApplicable:
        return False


def symptom(id):
    """What was reported about the broken kernel of a bug hunt."""
    return textwrap.fill(exercises.find(id).symptom, 88)
