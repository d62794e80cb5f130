"""What notebook 04a draws, measures and breaks: whose keys a rank has, who computes which score, who waits for whom."""

import itertools
from functools import partial
from types import SimpleNamespace
from unittest.mock import patch

import matplotlib.pyplot as plt
import torch
import torch.distributed as dist

from reference import cases, error
from steps import step04_ring as stage
from steps.figures import ring_tables
from steps.figures.picture import picture
from steps.figures.plots import FAINT, RANK, SEEN, UNSEEN, ink_on, style
from steps.step04_ring import Layout, simulate
from steps.step04_ring import dry_run as dry
from steps.step04_ring.simulate import Machine, Shape
from steps.workbook.case_on_ranks import PlainBlock


def ring_on_this_rank(q, k, v):
    """What one rank does with q, k, v (tokens, d) of the whole sequence: (out, lse) of its shard, by the real ring."""
    layout = Layout("contiguous", len(q), dist.get_world_size())
    mine = [layout.shard(x[None, None], dist.get_rank()) for x in (q, k, v)]
    out, lse = stage.forward(*mine, layout="contiguous", S=len(q), block=PlainBlock)
    return out[0, 0], lse[0, 0]


def table_of_colours(ax, words, colours, rows, columns):
    """A table whose cells have a colour and a word; words and colours are lists of rows."""
    for (row, line), column in itertools.product(enumerate(words), range(len(columns))):
        colour = colours[row][column]
        ax.add_patch(plt.Rectangle((column + 0.03, row + 0.04), 0.94, 0.92, fc=colour, ec=FAINT, lw=0.8))
        how = {"ha": "center", "va": "center", "color": ink_on(colour), "fontsize": 9.5}
        ax.text(column + 0.5, row + 0.5, line[column], **how)
    ax.set(xlim=(0, len(columns)), ylim=(len(rows), 0))
    ax.set_xticks([n + 0.5 for n in range(len(columns))], columns)
    ax.set_yticks([n + 0.5 for n in range(len(rows))], rows)
    ax.tick_params(length=0, labelsize=9.5)
    ax.grid(False)
    ax.spines[:].set_visible(False)


def whose_keys(N=4):
    """Whose K and V each rank has in each step, forward and backward."""
    style()
    fig, axes = plt.subplots(1, 2, figsize=(8.4, 2.6), layout="constrained")
    titles = {"fwd": "forward: keys go to rank + 1", "bwd": "backward: they return to rank - 1"}
    for ax, (pass_, title) in zip(axes, titles.items(), strict=True):
        src = dry.sources(Layout("zigzag", 2 * N, N), pass_).T.tolist()  # a row for each rank
        words = [[f"K{one} V{one}" for one in line] for line in src]
        colours = [[RANK[one] for one in line] for line in src]
        table_of_colours(ax, words, colours, [f"rank {rank}" for rank in range(N)], range(N))
        ax.set(title=title, xlabel="step")
    return picture(fig, """Two tables of 4 ranks by 4 steps: whose K and V a rank has. Forward: rank 0 has those of rank
        0, 3, 2, 1; each colour moves down a rank a step. Backward: rank 0 begins with those of rank 1, where the
        forward ended, then has 2, 3, and last its own; each colour moves up.""")


def owners(layout):
    """{(query, key): (the rank that computes the score, the step)}."""
    found = {}
    for me, step in itertools.product(range(layout.N), range(layout.N)):
        src = (me - step) % layout.N
        rows, keys, causal = layout.work(me, src) or (slice(0), slice(0), False)
        mine, theirs = layout.positions(me)[rows].tolist(), layout.positions(src)[keys].tolist()
        for (i, query), (j, key) in itertools.product(enumerate(mine), enumerate(theirs)):
            if j <= i or not causal:
                assert (query, key) not in found, "a score is computed twice"
                found[query, key] = me, step
    return found


def who_computes(S=8, N=4):
    """The causal triangle in three layouts: a score has the colour of its rank, and the number of its step."""
    style()
    fig, axes = plt.subplots(1, 3, figsize=(8.4, 3.4), layout="constrained")
    for ax, kind in zip(axes, ("contiguous", "zigzag", "striped"), strict=True):
        for (i, j), (rank, step) in owners(Layout(kind, S, N, causal=True)).items():
            ax.add_patch(plt.Rectangle((j, i), 1, 1, fc=RANK[rank], ec="white", lw=0.5))
            ax.text(j + 0.5, i + 0.54, step, ha="center", va="center", color=ink_on(RANK[rank]), fontsize=9)
        ax.set(xlim=(0, S), ylim=(S, 0), aspect="equal", xlabel="keys", title=kind)
        ax.set_xticks([n + 0.5 for n in range(S)], range(S))
        ax.set_yticks([n + 0.5 for n in range(S)], range(S))
        ax.grid(False)
    axes[0].set_ylabel("queries")
    handles = [plt.Rectangle((0, 0), 1, 1, fc=RANK[rank]) for rank in range(N)]
    fig.legend(handles, [f"rank {rank}" for rank in range(N)], ncols=N, loc="outside lower center")
    return picture(fig, """The causal triangle of 8 by 8 scores for three layouts, coloured by the rank that computes a
        score and numbered with the step. Contiguous: four bands of rows, the last much larger than the first, and step
        3 is a block of rank 3 alone. Zigzag: rank 0 has the first and the last row. Striped: rows alternate between the
        ranks.""")


def efficiency(kind, N):
    """The mean rank's share of the time in which it computes, under a causal mask, if hops took no time."""
    layout = Layout(kind, 1024 * N, N, causal=True)
    return simulate.predict(layout, Shape(), Machine(6e14, 1e30))["fwd"][1]


def waiting(kind):
    """The timeline of 32k positions on four ranks, as the event model has it: blocks and link as fast as in rows."""
    recorded = ring_tables.recorded()
    link, latency = simulate.read_link(recorded, "relay")
    machine = Machine(simulate.read_flops(recorded), link, latency)
    plan = simulate.schedule(Layout(kind, 2**15, 4, causal=True), Shape(), machine, "relay")
    shares = ", ".join(f"{share:.0%}" for share in (plan.blocks[1] - plan.blocks[0]).sum(0) / plan.seconds)
    title = f"model: {kind}, {link / 1e9:.0f} GB/s each way; ranks compute {shares} of the time"
    return picture(simulate.gantt(plan, title), f"Timeline of four ranks, {title}. The hops stand below the blocks.")


def layouts_measured():
    """The ring's forward at 32k on two GPUs in two layouts, over fetch, beside one GPU."""
    at = {"gpu": "NVIDIA H200", "n_gpus": 2, "N": 2**15, "Hk": 32, "causal": True, "pass": "fwd", "options": {}}
    rows = [row for row in ring_tables.recorded() if all(row[name] == at[name] for name in at) and not row["peer"]]
    alone, told = 0, ["NVIDIA H200, causal, 32k positions, H = 32, D = 128:"]
    for row in ring_tables.of_one_run([row for row in rows if row["kernel"] != "ring+relay"]):
        if row["kernel"] != "ring+fetch":  # it comes before those that it took turns with
            alone = row["ms_median"]
        else:
            told.append(f"one GPU {alone:.3g} ms, two in {row['layout']} {row['ms_median']:.3g} ms: efficiency "
                        f"{alone / 2 / row['ms_median']:.2f}")  # fmt: skip
    return "\n".join(told) if alone else "Not measured as it is now."


PLACES = {"merge": dry, "work": Layout}  # a broken function's name: where the dry run finds the right one
INPUTS = {"not causal": ("ragged", "striped"), "contiguous": ("ragged_causal", "contiguous"),
          "zigzag": ("ragged_causal", "zigzag"), "striped": ("ragged_causal", "striped"),
          "one token": ("one_token", "zigzag")}  # fmt: skip


def outcome(name, kind, replaced, broken):
    """What is out of tolerance on 4 ranks with a broken function: (words, colour). White where no number changes."""
    (case,) = (case for case in cases.CASES if case.name == name)
    x = cases.build(case, stage.SUPPORTS, torch.float32)
    block = SimpleNamespace(**{f: partial(getattr(PlainBlock, f), scale=x.scale) for f in ("forward", "backward")})
    run = partial(dry.dry_run, x.q, x.k, x.v, Layout(kind, x.q.shape[2], 4, x.causal), block, x.dout)
    right = run()
    with patch.object(PLACES[replaced], replaced, broken):
        got = run()
    want = error.expected(x.q, x.k, x.v, x.dout, causal=x.causal, scale=x.scale)
    wrong = error.failures(dict(zip(error.NAMES, got, strict=True)), want)
    if all(map(torch.equal, got, right)):
        return "no change", "white"
    return ("all" if len(wrong) == 5 else ", ".join(wrong), SEEN) if wrong else ("not seen", UNSEEN)


def mistakes_seen(**broken):
    """Broken functions {"merge" or "work": [...]} against inputs: whether the reference sees them, in which results."""
    style()
    fig, ax = plt.subplots(figsize=(8.4, 2.2), layout="constrained")
    mistakes = [(place, function) for place, functions in broken.items() for function in functions]
    found = [[outcome(*where, *mistake) for where in INPUTS.values()] for mistake in mistakes]
    words, colours = ([[cell[n] for cell in line] for line in found] for n in (0, 1))
    names = [function.__name__ for _, function in mistakes]
    table_of_colours(ax, words, colours, names, list(INPUTS))
    ax.xaxis.tick_top()
    lines = "; ".join(f"{name}: {' | '.join(line)}" for name, line in zip(names, words, strict=True))
    return picture(fig, f"Three mistakes against five inputs; green: seen, and in which results. {lines}.")
