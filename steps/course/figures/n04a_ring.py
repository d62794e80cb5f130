"""What notebook 04a draws, measures and breaks: whose keys a rank has, who computes which score, which layout wins."""

import sys
from unittest.mock import patch

import matplotlib.pyplot as plt
import torch.distributed as dist

from reference import cases, error
from steps import step04_ring as stage
from steps.course.figures import ring_tables
from steps.course.figures.n00_naive import outcome
from steps.course.figures.picture import picture, pictured
from steps.course.figures.plots import RANK, cells, subplots, table
from steps.course.workbook.case_on_ranks import PlainBlock
from steps.step04_ring import Layout, demo, launch, simulate
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
    """Two tables of 4 ranks by 4 steps: whose K and V a rank has, in the colour of their owner. Forward: those of rank
    0 move down a rank a step. Backward: rank 0 begins with those of rank 1, where the forward ended, then has 2, 3, and
    last its own. Beside them stand the sums of their dK and dV, which have the parts of one rank more in each step."""
    fig, axes = subplots(1, 2, figsize=(8.4, 3.0))
    titles = {"fwd": "forward: keys go to rank + 1", "bwd": "backward: keys and sums go to rank - 1"}
    for ax, (pass_, title) in zip(axes, titles.items(), strict=True):
        owners = dry.sources(Layout("zigzag", 2 * N, N), pass_).T.tolist()  # a list of N steps for each rank
        sums = "" if pass_ == "fwd" else "\ndK{0} dV{0}"
        words = [[("K{0} V{0}" + sums).format(src) for src in row] for row in owners]
        cells(ax, [[RANK[src] for src in row] for row in owners], words, title=title, xlabel="step")
        parts = [f"{step}: {step + 1} part{'s' * (step > 0)}" if sums else step for step in range(N)]
        ax.set_xticks(range(N), parts)
        ax.set_yticks(range(N), [f"rank {rank}" for rank in range(N)])
    axes[1].set_xlabel("step: parts that the sums dK, dV have after it")
    fig.suptitle("Colour: the rank that the keys belong to", x=0.01, ha="left", fontsize=10)
    return fig


@pictured
def who_computes(S=8, N=4):
    """The causal triangle of 8 by 8 scores for three layouts, coloured by the rank that computes a score and numbered
    with the step. Contiguous: rank 3 alone has step 3. Zigzag: rank 0 has the first and the last row. Striped: rows
    alternate between the ranks. The slowest rank's scores in the four steps: contiguous 3, 4, 4, 4; zigzag 3, 2, 2, 2;
    striped 3, 3, 3, 3."""
    fig, axes = subplots(1, 3, figsize=(8.4, 3.7))
    for ax, kind in zip(axes, LAYOUTS, strict=True):
        owner = {place: rank for rank in range(N) for place in Layout(kind, S, N).positions(rank).tolist()}
        steps = [[(owner[i] - owner[j]) % N if j <= i else "" for j in range(S)] for i in range(S)]
        colours = [[RANK[owner[i]] if j <= i else "white" for j in range(S)] for i in range(S)]
        slowest = slowest_rank(kind, S, N)
        title = f"{kind}: {'+'.join(map(str, slowest))} = {sum(slowest)}"
        cells(ax, colours, steps, aspect=1, xlabel="keys", title=title, xticks=range(S), yticks=range(S))
    axes[0].set_ylabel("queries")
    told = "Colour: the query's rank. Number: the step. Title: the scores of the slowest rank, step by step"
    fig.suptitle(told, x=0.01, ha="left", fontsize=10)
    handles = [plt.Rectangle((0, 0), 1, 1, fc=colour) for colour in RANK]
    fig.legend(handles, [f"rank {rank}" for rank in range(N)], ncols=N, loc="outside lower center")
    return fig


def slowest_rank(kind, S, N):
    """How many scores the rank with most of them computes, for each of the N steps of the causal ring."""
    held = [Layout(kind, S, N).positions(rank) for rank in range(N)]
    seen = [[int((held[rank][:, None] >= held[src]).sum()) for src in range(N)] for rank in range(N)]
    return [max(seen[rank][rank - step] for rank in range(N)) for step in range(N)]


def machine(transport, **more):
    """An H200 and its link as the rows have them, for the event model."""
    recorded = ring_tables.recorded()
    return simulate.Machine(simulate.read_flops(recorded), *simulate.read_link(recorded, transport), **more)


def computing(plan):
    """In words, which share of a schedule's time each rank computes; one share, if they are equal."""
    shares = [f"{share:.0%}" for share in (plan.blocks[1] - plan.blocks[0]).sum(0) / plan.seconds]
    return f"ranks compute {', '.join(dict.fromkeys(shares))} of the time"


def timelines(S=2**15, N=4):
    """{layout: its forward, if relay's hops and the blocks ran beside each other, as fast as they are on H200s}."""
    at = simulate.Shape(), machine("relay")
    return {kind: simulate.schedule(Layout(kind, S, N, causal=True), *at) for kind in ("contiguous", "zigzag")}


def timeline(kind):
    """A picture of one of `timelines`. Their axes have the same length, so that blocks can be compared."""
    plans = timelines()
    title = f"{kind}, if hops and blocks ran beside each other (colour: the keys' owner)\n{computing(plans[kind])}"
    fig = simulate.gantt(plans[kind], title)
    fig.axes[0].set_xlim(0, 1.05e3 * max(plan.seconds for plan in plans.values()))
    return picture(fig, f"Timeline of four ranks: {title}. Messages stand below the blocks.")


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
