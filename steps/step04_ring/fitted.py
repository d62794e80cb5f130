# SPDX-License-Identifier: MIT
"""simulate.py's model with the numbers that were measured on the ring's own GPUs, for a row of the ring.

    from other rows                                                      in the model
      the blocks' speed on one GPU, a link's bytes/s and latency           Machine.flops, link, latency
      what a launch costs the host                                         Machine.launch
      a backward in a fixed order of dQ, and in any order                  Machine.ordered
      one GPU while all compute: lower clocks, few K/V heads               Machine.slow
      the share of the messages that a profiler has seen hidden            a prediction between overlap and none

The idea: the row that is predicted is none of these rows. So the difference shows what the model leaves out. A row is a
dict with the fields of steps/course/bench. Needs layout.py and simulate.py.
"""

import math
import statistics
from collections import Counter
from dataclasses import replace

from steps.step04_ring.layout import Layout
from steps.step04_ring.simulate import Machine, Shape, read_flops, read_launch, read_link, schedule

RINGS = {"ring+fetch": "fetch", "ring+relay": "relay"}
BLOCKS = "fwd_8_hopper", "bwd_3_hopper"  # the kernels of stage 02 that compute a ring's blocks


def size(row):
    """The fields in which two rows must agree so that they may be compared."""
    return tuple(row[name] for name in ("gpu", "n_gpus", "pass", "B", "H", "Hk", "N", "Nk", "D", "dtype", "causal"))


def of_fullest_run(rows):
    """The rows of each size that were measured in the run with most of them; of equal runs the last one counts."""
    counts, best = Counter((size(row), row["run"]) for row in rows), {}
    for (where, run), count in counts.items():
        if count >= counts[where, best.get(where)]:
            best[where] = run
    return [row for row in rows if best[size(row)] == row["run"]]


def predicted(rows, row, memory):
    """The model's seconds for a row of the ring; None without the rows of a block's speed or of hops.

    Also None for a ring measured on an earlier day than its blocks' speed, because it may have used other kernels,
    unless one GPU was measured beside it, with the same kernels: its time is then the unit of a block's.
    memory: bytes/s of the GPU's own memory, by its datasheet.
    """
    machine, passes = machine_of(rows, row, memory), row["pass"].split("+")
    if not machine or not {(pass_, causal) for pass_ in passes for causal in (False, True)} <= machine.flops.keys():
        return None
    shares, together, seconds = hidden(rows, row), beside_others(rows, row), 0.0
    blocks = [one for one in rows if one["gpu"] == row["gpu"] and one["n_gpus"] == 1 and one["kernel"] in BLOCKS]
    measured_on = {pass_: min(one["date"] for one in blocks if one["pass"] == pass_) for pass_ in passes}
    if any(row["date"] < day and pass_ not in together for pass_, day in measured_on.items()):
        return None
    layout = Layout(row["layout"], row["N"], row["n_gpus"], row["causal"])
    shape = Shape(row["B"], row["H"], row["Hk"], row["D"])
    for pass_ in passes:
        alone = machine.block(shape, row["N"], row["N"], row["causal"], pass_)
        slower = dict.fromkeys(range(row["n_gpus"]), together.get(pass_, alone) / alone)
        how = layout, shape, replace(machine, slow=slower), RINGS[row["kernel"]], pass_
        beside, after = (schedule(*how, overlap=overlap).seconds for overlap in (True, False))
        seconds += after + shares.get(pass_, 1.0) * (beside - after)
    return seconds


def machine_of(rows, like, memory):
    """The Machine of a ring's GPUs and transport; None if its blocks or hops were not measured."""
    gpu = like["gpu"]
    rows = [row for row in rows if row["gpu"] == gpu]
    # Between two of more GPUs a hop takes the same time: through the switch each pair has its full bandwidth.
    hops = of_fullest_run([row for row in rows if row["peer"] == "copy"])
    try:
        speeds = read_flops(rows, gpu=gpu, kernels=BLOCKS), *read_link(hops, RINGS[like["kernel"]])
    except ValueError:  # there are no rows: the code has changed since it was measured
        return None
    return Machine(*speeds, memory=memory, launch=read_launch(rows), ordered=price_of_the_order(rows, like))


def price_of_the_order(rows, like):
    """The factor by which a backward is slower if it adds to dQ in a fixed order; 1 if no ring was measured both ways.

    It is measured over fetch with as many GPUs and K/V heads, at the nearest length.
    """
    at_its_size = {name: like[name] for name in ("N", "Nk", "pass")}
    alike = [row for row in rows if (row["kernel"], row["layout"]) == ("ring+fetch", like["layout"])]
    alike = [row for row in alike if size(row | at_its_size) == size(like)]
    ms = {(row["pass"], row["N"], row["run"]): row["ms_median"] for row in alike if not row["options"]}
    forward = {N: x for (pass_, N, _), x in ms.items() if pass_ == "fwd"}
    prices = {}
    for row in (row for row in alike if row["options"] == {"deterministic": False} and row["N"] in forward):
        in_order, in_any_order, before = ms.get(("fwd+bwd", row["N"], row["run"])), row["ms_median"], forward[row["N"]]
        if in_order:
            prices[row["N"]] = (in_order - before) / (in_any_order - before)
    return prices[min(prices, key=lambda N: abs(math.log(N / like["N"])))] if prices else 1.0


def beside_others(rows, like):
    """{pass: seconds of one GPU for the whole sequence, while all GPUs compute}, at this row's size.

    Clocks are lower then, and blocks with few K/V heads slower, than where the speed of a block was measured.
    """
    ms = {"fwd": [], "fwd+bwd": []}
    for row in (row for row in rows if size(row | {"pass": like["pass"]}) == size(like)):
        if row["peer"] is None and row["kernel"] not in RINGS and not row["options"]:
            ms[row["pass"]].append(row["ms_median"])
    forward, both = (1e-3 * statistics.median(some) if some else None for some in ms.values())
    return ({"fwd": forward} if forward else {}) | ({"bwd": both - forward} if both else {})


def hidden(rows, like):
    """{pass: share of the messages that the profiler has seen hidden}; forward + backward counts as the backward's.

    It is the mean of all profiles, because it differs much from run to run.
    """
    found = {}
    for row in rows:
        if "hidden" in row and all(row[name] == like[name] for name in ("gpu", "n_gpus", "kernel")):
            found.setdefault(row["pass"].removeprefix("fwd+"), []).append(row["hidden"])
    return {pass_: statistics.mean(some) for pass_, some in found.items()}
