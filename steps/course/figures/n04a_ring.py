"""What notebook 04a draws, measures and breaks: whose keys a rank has, who computes which score, which layout wins."""

import sys
from unittest.mock import patch

import matplotlib.pyplot as plt
import torch.distributed as dist

from reference import cases, error
from steps import step04_ring as stage
from steps.course.figures import ring_tables
from steps.course.figures.n00_naive import outcome
from steps.course.figures.picture import pictured
from steps.course.figures.plots import RANK, cells, subplots, table
from steps.course.workbook.case_on_ranks import PlainBlock
from steps.step04_ring import Layout, demo, launch
from steps.step04_ring import dry_run as dry

LAYOUTS = "contiguous", "zigzag", "striped"


def ranks(count, **options):
    """launch.Ranks of so many processes, which have not to run a notebook again that runs as a plain script."""
    vars(sys.modules["__main__"]).pop("__file__", None)
    return launch.Ranks(count, **options)


def differences(ranks, kind, S):
    """The largest differences of out, lse, dq, dk, dv to one device, causal, in float32."""
    *_, last = ranks.run(demo.report, S, 32, 2, True, kind, "float32")[0]
    return last.removeprefix("largest differences to one device: ")


def ring_on_this_rank(q, k, v):
    """What one rank does with q, k, v (tokens, d) of the whole sequence: (out, lse) of its shard, by the real ring."""
    layout = Layout("contiguous", len(q), dist.get_world_size())
    mine = [layout.shard(x[None, None], dist.get_rank()) for x in (q, k, v)]
    out, lse = stage.forward(*mine, layout="contiguous", S=len(q), block=PlainBlock)
    return out[0, 0], lse[0, 0]


@pictured
def whose_keys(N=4):
    """Two tables of 4 ranks by 4 steps: whose K and V a rank has. Forward: those of rank 0 move down a rank a step.
    Backward: rank 0 begins with those of rank 1, where the forward ended, then has 2, 3, and last its own."""
    fig, axes = subplots(1, 2, figsize=(8.4, 2.4))
    titles = {"fwd": "forward: keys go to rank + 1", "bwd": "backward: they return to rank - 1"}
    for ax, (pass_, title) in zip(axes, titles.items(), strict=True):
        owners = dry.sources(Layout("zigzag", 2 * N, N), pass_).T.tolist()  # a list of N steps for each rank
        words = [[f"K{src} V{src}" for src in row] for row in owners]
        cells(ax, [[RANK[src] for src in row] for row in owners], words, title=title, xlabel="step", xticks=range(N))
        ax.set_yticks(range(N), [f"rank {rank}" for rank in range(N)])
    return fig


@pictured
def who_computes(S=8, N=4):
    """The causal triangle of 8 by 8 scores for three layouts, coloured by the rank that computes a score and numbered
    with the step. Contiguous: rank 3 alone has step 3. Zigzag: rank 0 has the first and the last row. Striped: rows
    alternate between the ranks."""
    fig, axes = subplots(1, 3, figsize=(8.4, 3.4))
    for ax, kind in zip(axes, LAYOUTS, strict=True):
        owner = {place: rank for rank in range(N) for place in Layout(kind, S, N).positions(rank).tolist()}
        steps = [[(owner[i] - owner[j]) % N if j <= i else "" for j in range(S)] for i in range(S)]
        colours = [[RANK[owner[i]] if j <= i else "white" for j in range(S)] for i in range(S)]
        cells(ax, colours, steps, aspect=1, xlabel="keys", title=kind, xticks=range(S), yticks=range(S))
    axes[0].set_ylabel("queries")
    handles = [plt.Rectangle((0, 0), 1, 1, fc=colour) for colour in RANK]
    fig.legend(handles, [f"rank {rank}" for rank in range(N)], ncols=N, loc="outside lower center")
    return fig


def layouts_measured():
    """The ring's forward at 32k over fetch in two layouts, beside the one GPU that took turns with it."""
    at = {"gpu": "NVIDIA H200", "N": 2**15, "Hk": 32, "causal": True, "pass": "fwd", "options": {}}
    rows = ring_tables.beside_one([row for row in ring_tables.recorded() if at.items() <= row.items()])
    lines = [("causal, 32k", "H200", "one", "the ring", "efficiency", "at most")]
    for row in (row for row in rows if row["kernel"] == "ring+fetch" and "efficiency" in row):
        N = row["n_gpus"]
        most = 1 if row["layout"] == "zigzag" else N / (2 * N - 1)
        times = (f"{row[name]:.3g} ms" for name in ("one_gpu_ms", "ms_median"))
        lines.append((row["layout"], str(N), *times, *(f"{share:.2f}" for share in (row["efficiency"], most))))
    return table(lines[0], *sorted(lines[1:], key=lambda line: line[1]))


INPUTS = {"not causal": ("ragged", "striped")} | {kind: ("ragged_causal", kind) for kind in LAYOUTS}


def wrong_results(name, kind, work):
    """The results of the case that are out of tolerance on 4 ranks with another table of work."""
    (case,) = (case for case in cases.CASES if case.name == name)

    def compute(x):
        return dry.dry_run(x.q, x.k, x.v, Layout(kind, x.q.shape[2], 4, x.causal), PlainBlock, x.dout)

    with patch.object(Layout, "work", work):
        got, want = outcome(stage, case, compute)
    wrong = error.failures(dict(zip(error.NAMES, got, strict=True)), want)
    return "all" if len(wrong) == 5 else ", ".join(wrong) or "-"


def mistakes_seen(*works):
    """Wrong tables of work against inputs: which results are wrong."""
    lines = [(work.__name__, *(wrong_results(*where, work) for where in INPUTS.values())) for work in works]
    return table(("wrong results", *INPUTS), *lines)
