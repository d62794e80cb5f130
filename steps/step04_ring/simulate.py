# SPDX-License-Identifier: MIT
"""How long the ring takes on a machine that you need not have: an event model, and pictures of who waits for whom.

    python -m steps.step04_ring.simulate --seq 32768 --gpus 4 --flops 620e12 --link 370e9 --picture x.png

The idea: `Layout.work` says what every rank computes in every step, as it does in the ring itself. Four numbers, all
measured, say how long that takes:

    FLOP/s of a block, by rows x keys    bytes/s of a link, each way    seconds that every hop costs beside its bytes
    seconds that a launch costs the host

A fifth comes from the datasheet: the bytes/s of a GPU's own memory, with which k and v are copied before they travel,
the parts of out merged, and those of dK and dV added.

Each rank has two lanes, one that computes and one that carries messages. The transports differ in when a message may
begin:

    relay   when its sender and its receiver have both begun the step before the one that needs it
    fetch   when its buffer is free, of which there are two; the owner of the keys need not do anything

Launches are counted for a call, and their time is added to it, as if the GPU waited for each of them.
Left out: links that several messages share, the multiprocessors that NCCL takes from a block beside its messages, and
what varies from run to run.
dry_run.py has the same ring with real numbers. Needs layout.py, dry_run.py and numpy; for pictures matplotlib.
"""

import json
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import numpy as np
import typer

from steps.step04_ring.dry_run import sources, work_table
from steps.step04_ring.layout import LAYOUTS, Layout

PASSES = {"fwd": 1.0, "bwd": 2.5}  # operations, in forwards
TRANSPORTS = ("relay", "fetch")
MEASURED = Path(__file__).parents[1] / "course" / "bench" / "results" / "nvidia-h200.jsonl"
# (a, b): a call of N ranks launches a + b N kernels, copies and barriers, as the profiler counts them. In a backward
# a rank that has only late queries for a block launches three more; the profiler has counted such a rank of relay.
LAUNCHES = {
    ("relay", "fwd"): (4, 2),  # a rank: a block and a hop
    ("fetch", "fwd"): (4, 2),  # a rank: a block, and a copy of K and V
    ("relay", "bwd"): (6, 6),  # a rank: a block and zeros before it, two hops, two sums
    ("fetch", "bwd"): (4, 5),  # a rank: a block and zeros before it, copies of K with V, of dK, of dV
}

# ---- a machine -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Shape:
    """What a rank's tensors are beside their length; e is the size of an element in bytes."""

    B: int = 1
    H: int = 32
    Hk: int = 32
    D: int = 128
    e: int = 2


@dataclass(frozen=True)
class Machine:
    """What the model knows of the ranks. The first three fields, `ordered` and `launch` are measured.

    flops: FLOP/s of a block, a number, or {(pass, causal): [(rows x keys, FLOP/s), ...]} between whose points the model
    interpolates. link: bytes/s each way between two ranks of a host. latency: seconds that a hop, or the barrier before
    the first fetch, costs beside its bytes.
    host: ranks on a host; all, if None. network: bytes/s each way of a rank's part of the link between hosts.
    slow: {rank: factor by which its blocks take longer}.
    memory: bytes/s of a GPU's own memory, by its datasheet. If it is infinite, copies, merges and sums take no time.
    ordered: the factor by which a block of the backward takes longer because it adds to dQ in a fixed order.
    launch: seconds that each launch of a kernel, a copy or a barrier costs the host.
    """

    flops: float | dict
    link: float
    latency: float = 0.0
    host: int | None = None
    network: float | None = None
    slow: dict | None = None
    memory: float = math.inf
    ordered: float = 1.0
    launch: float = 0.0

    def speed(self, rows, keys, causal, pass_):
        """FLOP/s of a block."""
        if not isinstance(self.flops, dict):
            return self.flops
        sizes, speeds = zip(*sorted(self.flops[pass_, causal]), strict=True)
        return float(np.interp(math.log(rows * keys), np.log(sizes), speeds))

    def block(self, shape, rows, keys, causal, pass_):
        """Seconds of one block on one rank."""
        work = 4 * shape.B * shape.H * rows * keys * shape.D * PASSES[pass_] * (0.5 if causal else 1)
        return work / self.speed(rows, keys, causal, pass_)

    def bandwidth(self, a, b):
        """bytes/s from each rank of the array a to that of b."""
        if self.host is None:
            return np.full(len(a), self.link)
        return np.where(a // self.host == b // self.host, self.link, self.network)


def read_flops(rows, *, gpu="NVIDIA H200", D=128, dtype="bf16", kernels=("fwd_8_hopper", "bwd_3_hopper")):
    """Machine.flops from results rows of one GPU of this name: the median speed of these kernels at each size."""
    speeds = {}
    for row in (row for row in rows if row["gpu"] == gpu):
        plain = row["n_gpus"] == 1 and row["layout"] is None and not row["options"] and row["timing"] == "interleaved"
        if plain and row["kernel"] in kernels and (row["D"], row["dtype"]) == (D, dtype) and row["pass"] in PASSES:
            where = speeds.setdefault((row["pass"], row["causal"]), {})
            where.setdefault(row["N"] * row["Nk"], []).append(1e12 * row["tflops"])
    if not speeds:
        raise ValueError(f"no rows of {', '.join(kernels)} on one {gpu} with D = {D} and {dtype}.")
    return {key: [(size, float(np.median(some))) for size, some in found.items()] for key, found in speeds.items()}


def read_link(rows, transport):
    """(link, latency) from rows of hops of several sizes: the line that fits their seconds best.

    Such a row is a copy of k to the next rank: peer "copy", n_gpus > 1, options {"transport": ...}.
    """
    hops = [row for row in rows if row["peer"] == "copy" and row["n_gpus"] > 1 and row["timing"] == "interleaved"]
    hops = [row for row in hops if row["options"].get("transport") == transport]
    sizes = [row["B"] * row["Hk"] * row["Nk"] * row["D"] * (4 if row["dtype"] == "fp32" else 2) for row in hops]
    if len(set(sizes)) < 2:
        raise ValueError(f"link and latency need rows of hops of two sizes; got {len(set(sizes))} of {transport}.")
    slope, latency = np.polyfit(sizes, [1e-3 * row["ms_median"] for row in hops], 1)
    return 1 / float(slope), max(0.0, float(latency))


def read_launch(rows):
    """Machine.launch from rows of small calls on GPUs of one kind: what stage 02's forward, one launch, takes the host.

    0 without such rows.
    """
    like = {"stage": "02_fa2_cuda", "pass": "fwd", "options": {"feature": "small call"}}
    return 1e-6 * min((row["host_us"] for row in rows if like.items() <= row.items()), default=0.0)


# ---- when everything happens -----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Schedule:
    """When one pass does what: seconds, in arrays (begin or end, N steps, N ranks). What does not exist takes no time.

    blocks[:, s, r] is rank r's block in step s. keys[:, s, r] is the message that brings the keys of this step, and
    gradients[:, s, r] the one that takes its dK and dV away. src[s, r] says whose keys these are.
    """

    layout: Layout
    src: np.ndarray
    blocks: np.ndarray
    keys: np.ndarray
    gradients: np.ndarray
    seconds: float


def schedule(layout, shape, machine, transport="relay", pass_="fwd", overlap=True):
    """The Schedule of a pass. overlap=False: a message travels while its rank does not compute, for comparison."""
    if transport not in TRANSPORTS:
        raise ValueError(f"transport must be one of {', '.join(TRANSPORTS)}; got {transport!r}.")
    distinct, which = work_table(layout)
    ranks, src = np.arange(layout.N), sources(layout, pass_)
    of_work = [0.0 if work is None else machine.block(shape, *_lengths(work), pass_) for work in distinct]
    slower = [(machine.slow or {}).get(rank, 1.0) for rank in range(layout.N)]
    seconds = np.array(of_work)[which[ranks, src]] * np.array(slower)
    seconds *= machine.ordered if pass_ == "bwd" else 1.0
    own = np.array([layout.size(rank) for rank in range(layout.N)])
    kv = 2.0 * shape.B * shape.Hk * own * shape.D * shape.e
    tables = np.zeros((3, 2, layout.N, layout.N))
    if transport == "relay":
        end = _relay(machine, src, seconds, kv, kv * 4 / shape.e, 1 if pass_ == "fwd" else -1, overlap, *tables)
    else:
        end = _fetch(machine, src, seconds, kv, pass_, overlap, *tables)
    if pass_ == "fwd":  # Each block's part of out is read to be merged, and out is written.
        rows = np.array([0 if work is None else _lengths(work)[0] for work in distinct])[which].sum(1)
        added = shape.B * shape.H * (rows + own) * shape.D * shape.e
    elif transport == "fetch":  # Each rank's dK and dV are read, and the sums are written.
        added = (layout.N + 1) * kv
    else:  # In each step a sum in float32 is read and written, and what is added to it read.
        added = layout.N * (8 / shape.e + 1) * kv
    some, a_rank = LAUNCHES[transport, pass_]
    if layout.N > 1:
        end = end + added / machine.memory + machine.launch * (some + a_rank * layout.N)
    return Schedule(layout, src, *tables, float(end.max()))


def _lengths(work):
    rows, keys, causal = work
    return rows.stop - rows.start, keys.stop - keys.start, causal


def _relay(machine, src, seconds, kv, dkv, towards, overlap, blocks, keys, gradients):
    """Fills the tables; returns when each rank is done. dkv: bytes of the sums of dK, dV of a rank's keys, float32."""
    N = len(kv)
    # of the step; the forward first copies k and v into one message
    begin = 2 * kv / machine.memory if towards == 1 else np.zeros(N)
    lane = np.zeros(N)  # when the link has carried all messages so far, one after the other
    summed = np.zeros(N)  # when dK, dV of the ranks before have arrived
    for step in range(N):
        here, last = blocks[:, step], step == N - 1
        arrived = begin
        if not last:
            keys[:, step + 1] = _hop(machine, begin, lane, kv[src[step]], towards)
            lane = arrived = keys[1, step + 1]
        here[0] = begin if overlap else arrived
        here[1] = here[0] + seconds[step]
        begin = np.maximum(here[1], arrived)
        if towards == -1:  # The backward adds its dK, dV to those that have arrived, and sends the sums on.
            given = np.maximum(here[1], summed)
            begin = np.maximum(given, arrived)
            if not last:
                gradients[:, step] = _hop(machine, given, lane, dkv[src[step]], towards)
                lane = summed = gradients[1, step]
                begin = begin if overlap else np.maximum(begin, summed)
    return begin


def _hop(machine, posted, lane, size, towards):
    """(begin, end) for each rank of the message that it sends to rank + towards and the one that it receives.

    A message begins when both of its ranks have posted it and their lanes are free.
    """
    ranks = np.arange(len(size))
    able = np.maximum(posted, lane)
    begin = np.maximum(able, np.roll(able, -towards))
    end = begin + machine.latency + size / machine.bandwidth(ranks, (ranks + towards) % len(size))
    return np.minimum(begin, np.roll(begin, towards)), np.maximum(end, np.roll(end, towards))


def _fetch(machine, src, seconds, kv, pass_, overlap, blocks, keys, gradients):
    """Fills the tables; returns when each rank is done. dK and dV travel in the dtype of k, straight to their owner."""
    N, ranks = len(kv), np.arange(len(kv))
    lane = np.zeros(N)
    if N > 1:  # The own k and v are copied to where others can read them. Then comes a barrier, and one at the end.
        lane += (2 * kv / machine.memory).max() + machine.latency

    def copy(table, step, after, there, from_, to):
        """A message on this rank's lane, unless it does not need the keys of `there`."""
        nonlocal lane
        needed = (seconds[step] > 0) & (there != ranks)
        begin = np.where(needed, np.maximum(lane, after), 0)
        took = machine.latency + kv[there] / machine.bandwidth(from_, to)
        table[:, step] = begin, begin + np.where(needed, took, 0)
        lane = np.where(needed, table[1, step], lane)

    def bring(step, after):
        if 0 < step < N:
            copy(keys, step, after, src[step], src[step], ranks)

    for step in (1, 2) if overlap else ():  # two buffers, beside the keys that are there from the start
        bring(step, np.zeros(N))
    end = np.zeros(N)
    for step in range(N):
        if not overlap:
            bring(step, end)
        begin = np.maximum(end, keys[1, step])
        end = begin + seconds[step]
        blocks[:, step] = begin, end
        if pass_ == "bwd":
            copy(gradients, step, end, src[step], ranks, src[step])
            end = end if overlap else np.maximum(end, gradients[1, step])
        if overlap and step > 0:  # the block has freed its buffer
            bring(step + 2, end)
    return np.maximum(end, lane.max() + machine.latency) if N > 1 else end


# ---- answers ---------------------------------------------------------------------------------------------------------


def predict(layout, shape, machine, transport="relay", **options):
    """{"fwd", "bwd", "fwd+bwd": (seconds, efficiency)}. Efficiency: one device's seconds for S / N / seconds."""
    alone = {pass_: machine.block(shape, layout.S, layout.S, layout.causal, pass_) for pass_ in PASSES}
    seconds = {pass_: schedule(layout, shape, machine, transport, pass_, **options).seconds for pass_ in PASSES}
    for times in (alone, seconds):
        times["fwd+bwd"] = times["fwd"] + times["bwd"]
    return {pass_: (seconds[pass_], alone[pass_] / layout.N / seconds[pass_]) for pass_ in seconds}


def tokens_needed(flops, link, share=1.0, pass_="fwd", transport="relay", e=2):
    """The tokens a rank, c, from which zigzag's messages are hidden behind causal blocks; share is Hk / H.

    A step has 2 B H c^2 D operations and sends 2 e B Hk c D bytes, so c >= e (flops / link) share in the forward. The
    backward has 5 B H c^2 D operations, and sends dK and dV too: in float32 by relay, in e bytes an element by fetch.
    """
    sent = 2 * e if pass_ == "fwd" else 2 * e + 2 * (4 if transport == "relay" else e)
    return sent / (2 * PASSES[pass_]) * flops / link * share


def scale_out(machine, shape, c, ranks):
    """[(N, efficiency)] of the forward over relay with c tokens a rank, causal and zigzag, for each number of ranks."""
    layouts = [Layout("zigzag", c * N, N, causal=True) for N in ranks]
    return [(layout.N, predict(layout, shape, machine)["fwd"][1]) for layout in layouts]


def gantt(plan, title):
    """A matplotlib Figure: for each rank what it computes (wide bars) and what its link carries (narrow bars).

    A wide bar's colour and number say whose keys it computes with; dark narrow bars bring keys, light ones take
    dK and dV away. Dark text on opaque white, so that it can be read on a dark page too.
    """
    from matplotlib.figure import Figure
    from matplotlib.patches import Patch

    N, unit = plan.layout.N, 1e3
    figure = Figure(figsize=(8.4, 1.2 + 0.55 * N), facecolor="white", layout="constrained")
    axes = figure.subplots()
    axes.set_facecolor("white")
    for step in range(N):
        for rank in range(N):
            whose, ink = RANK[plan.src[step, rank] % len(RANK)]
            for table, top, height, colour in (
                (plan.blocks, -0.42, 0.56, whose),
                (plan.keys, 0.18, 0.12, DARK),
                (plan.gradients, 0.32, 0.12, LIGHT),
            ):
                begin, end = unit * table[:, step, rank]
                if end > begin:
                    axes.barh(rank + top, end - begin, height, begin, align="edge", color=colour, edgecolor="white")
                if end > begin and table is plan.blocks and N <= 8:
                    text = dict(ha="center", va="center", color=ink, fontsize=9.5, clip_on=True)
                    axes.text((begin + end) / 2, rank + top + height / 2, f"K{plan.src[step, rank]}", **text)
    words = {DARK: "brings K and V", LIGHT: "takes dK and dV away"}
    seen = [DARK] + [LIGHT] * bool((plan.gradients[1] > plan.gradients[0]).any())
    handles = [Patch(color=colour, label=words[colour]) for colour in seen]
    figure.legend(handles=handles, ncols=2, loc="outside lower right", frameon=False, fontsize=9.5)
    axes.set_ylim(N - 0.4, -0.6)
    axes.set_yticks(range(N), [f"rank {rank}" for rank in range(N)], color=INK)
    axes.tick_params(axis="x", colors=INK)
    axes.set_xlabel("ms", color=INK)
    axes.set_title(f"{title}: {unit * plan.seconds:.3g} ms", loc="left", fontsize=11, color=INK)
    axes.spines[["top", "right"]].set_visible(False)
    return figure


INK, DARK, LIGHT = "#1a1a1a", "#222222", "#ababab"
# The colours that a rank has in all figures of the course, each with that of the letters on it.
RANK = ("#0072b2", "white"), ("#d55e00", INK), ("#009e73", INK), ("#cc79a7", INK)


# ---- the program -----------------------------------------------------------------------------------------------------


def main(
    seq: Annotated[int, typer.Option(min=1)] = 32768,
    gpus: Annotated[int, typer.Option(min=1)] = 4,
    layout: Annotated[str, typer.Option(help=", ".join(LAYOUTS))] = "zigzag",
    transport: Annotated[str, typer.Option(help=", ".join(TRANSPORTS))] = "relay",
    flops: Annotated[float, typer.Option(min=0, help="FLOP/s of a block; 0: as measured on an H200 or H100")] = 0,
    link: Annotated[float, typer.Option(min=0, help="bytes/s each way; 0: as measured between two H200")] = 0,
    picture: Annotated[Path | None, typer.Option(help="a .png to draw the forward into")] = None,
):
    """How long the causal ring would take with the heads of `Shape`, and how many tokens a GPU needs."""
    rows = [json.loads(line) for line in MEASURED.read_text().splitlines()]
    shape = Shape()
    try:
        whole = Layout(layout, seq, gpus, causal=True)
        link, latency = (link, 1e-5) if link else read_link(rows, transport)
        machine = Machine(flops or read_flops(rows), link, latency, memory=4.8e12, launch=read_launch(rows))
        plan = schedule(whole, shape, machine, transport)
    except ValueError as error:
        raise SystemExit(str(error)) from None
    for pass_, (seconds, efficiency) in predict(whole, shape, machine, transport).items():
        print(f"{pass_:8} {1e3 * seconds:10.3f} ms   efficiency {efficiency:.3f}")
    c = max(1, seq // gpus)
    needed = tokens_needed(machine.speed(c, c, True, "fwd"), link)
    print(f"{c:,} tokens a GPU; zigzag hides the forward's messages from {needed:,.0f} on")
    if picture:
        gantt(plan, f"forward, {layout}, {transport}").savefig(picture, dpi=110)


if __name__ == "__main__":
    typer.run(main)
