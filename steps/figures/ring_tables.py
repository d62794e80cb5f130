"""What was recorded of the ring on several GPUs: tables of text, a picture of a call, and simulate.py's model.

    speed         the ring beside one GPU and torch's context_parallel
    strategies    the four ways to share a sequence
    predictions   how far simulate.py is off what was measured

A table is a list of lines, which are lists of words, the first line its head. Of each size, the lines that compute the
same are of one run: of several runs that with most rows there. Single messages were measured by a former version of
steps/bench/ring.py.
"""

import math
import statistics
import textwrap
from collections import Counter
from dataclasses import replace

import matplotlib.pyplot as plt

from steps.bench import cost, report, ring
from steps.bench.rows import COMMITTED, COPY, code_hash, fresh, read, read_record
from steps.figures.picture import picture
from steps.figures.plots import COLOURS, GREYS, style
from steps.step04_ring import simulate
from steps.step04_ring.layout import Layout
from steps.step04_ring.strategies import account

PASSES = {"fwd": "forward", "fwd+bwd": "forward + backward"}
RINGS = {"ring+fetch": "fetch", "ring+relay": "relay"}
DQ = {True: ", dQ in order", False: ", any order"}  # what is said of a row whose options have "deterministic"
ONE = "one GPU"  # adds dQ in any order
ONE_IN_ORDER = ONE + DQ[True]  # as the ring does
ORDER = ONE, ONE_IN_ORDER, "fetch", "fetch" + DQ[False], "relay"
SIZE = "gpu", "n_gpus", "pass", "B", "H", "Hk", "N", "Nk", "D", "dtype", "causal"


def recorded():
    """The rows of one GPU and of several, of the code as it is now."""
    return fresh(read() + read(several_gpus=True))


def shown(name, rows):
    """One of TABLES in columns of text, with its note; or a sentence if there are no such rows."""
    table, note = TABLES[name]
    lines = table(rows)
    if not lines:
        return "Not recorded yet. `python -m steps.bench ring` measures it on two GPUs or more."
    return "\n".join([*report.in_text(lines), "", f"{textwrap.fill(note, 87)}."])


def recorded_trace(folder=COMMITTED):
    """The record of kind "trace" for trace_picture; {} if there is none of the ring as it is now."""
    record = read_record("trace", folder=folder)
    now = {kernel: code_hash("04_ring", kernel) for kernel in record.get("source", ())}
    return record if record and now == record["source"] else {}


def recorded_call():
    """The picture of the recorded trace; a sentence if the ring has changed since."""
    if record := recorded_trace():
        return trace_picture(record)
    return print("No trace of this version of the ring has been recorded yet.")


def size(row):
    return tuple(row[name] for name in SIZE)


def of_one_run(rows):
    """The rows of each size that were measured in the run with most of them; of equal runs the last one counts."""
    counts, best = Counter((size(row), row["run"]) for row in rows), {}
    for (where, run), count in counts.items():
        if count >= counts[where, best.get(where)]:
            best[where] = run
    return [row for row in rows if best[size(row)] == row["run"]]


def who(row):
    """The row's candidate in words."""
    options, transport = row["options"], RINGS.get(row["kernel"])
    order = DQ.get(options.get("deterministic"), "")
    if transport is None:
        return (row["peer"] or options.get("strategy", ONE + order)).replace("context-parallel-", "torch, ")
    return f"ring, {transport}" if "strategy" in options else transport + order


def about(row):
    """A line's first words: how many GPUs of which kind, what is computed, the K/V heads."""
    mask = "causal" if row["causal"] else "full"
    gpus = f"{row['n_gpus']} {row['gpu'].removeprefix('NVIDIA ').split()[0]}"
    return [gpus, f"{row['pass']}, {mask}", str(row["Hk"])]


def in_order(rows):
    """Fewer GPUs first, of one kind; then causal, the forward, more K/V heads, the ring; else as measured."""

    def key(row):
        place = ORDER.index(who(row)) if who(row) in ORDER else len(ORDER)
        return row["n_gpus"], row["gpu"], not row["causal"], row["pass"] != "fwd", -row["Hk"], place

    return sorted(rows, key=key)


def by_size(rows, words, head, word):
    """A table with a column for each N, and in it the word of the first row of this line and N."""
    lengths = {N: thousands(N) for N in sorted({row["N"] for row in rows})}
    return report.table(rows, head, words, report.across(lambda row: row["N"], word, lengths))


def thousands(n):
    return f"{n // 1024}k" if n % 1024 == 0 else str(n)


def ms(row, name="ms_median"):
    return f"{row[name]:.3g}" if row[name] < 1000 else f"{row[name]:.0f}"


def ring_speed(rows):
    """The ring beside one GPU and torch's context_parallel; causal and zigzag."""
    rows = [row for row in rows if row["causal"] and row["layout"] in (None, "zigzag")]
    shown = [{}, {"deterministic": True}, {"deterministic": False}]
    rows = of_one_run([row for row in rows if row["n_gpus"] > 1 and row["options"] in shown])
    alone, shares = {}, {}
    for row in rows:
        if who(row) == ONE:  # Its row comes before those of the ones that it takes turns with.
            alone[size(row)] = [row["ms_median"]]
        elif who(row) == ONE_IN_ORDER and size(row) in alone:
            alone[size(row)].append(row["ms_median"])
        elif size(row) in alone:
            shares[id(row)] = " / ".join(f"{ms / row['n_gpus'] / row['ms_median']:.2f}" for ms in alone[size(row)])

    def word(row):
        return f"{ms(row)} ({shares[id(row)]})" if id(row) in shares else ms(row)

    return by_size(in_order(rows), lambda row: [*about(row), who(row)], ["GPUs", "computed", "Hk", "by"], word)


def ring_strategies(rows):
    """The four ways to share a sequence."""

    def word(row):
        return f"{ms(row)} / {sent(row) / 1e6:.0f}"

    rows = in_order(of_one_run([row for row in rows if "strategy" in row["options"] and row["N"] > 1]))
    return by_size(rows, lambda row: [*about(row), who(row)], ["GPUs", "computed", "Hk", "strategy"], word)


def sent(row):
    """The bytes of 16-bit tensors that a rank sends or copies in a call."""
    strategy, backward = row["options"]["strategy"], row["pass"] != "fwd"
    N, sizes = row["n_gpus"], {name: row[name] for name in ("B", "H", "Hk", "D")}
    if row["kernel"] == "ring+fetch":
        # The backward still has the shard that the forward fetched last, and gives all but its own dK and dV away.
        return ((N - 1) + ((N - 2) + (N - 1)) * backward) * 4 * row["B"] * row["Hk"] * (row["N"] // N) * row["D"]
    whole = Layout(row["layout"], row["N"], N, row["causal"])
    both = [account.sent_bytes(strategy, whole, rank, **sizes, e=2) for rank in range(N)]
    return max(there + (back if backward else 0) for there, back in both)


def predictions(rows):
    plain = [row for row in rows if row["kernel"] in RINGS and row["layout"] == "zigzag" and row["causal"]]
    plain = in_order(of_one_run([row for row in plain if row["options"] == {}]))
    seconds = {id(row): predicted(rows, row) for row in plain}

    def word(row):
        return f"{ms(row)} ({1e3 * seconds[id(row)] / row['ms_median'] - 1:+.0%})"

    def words(row):
        return [*about(row), who(row)]

    return by_size([row for row in plain if seconds[id(row)]], words, ["GPUs", "computed", "Hk", "transport"], word)


def predicted(rows, row):
    """The model's seconds for a row of the ring; None where it lacks the rows of a block's speed or of hops."""
    transport, shares, factors = RINGS[row["kernel"]], hidden(rows, row), beside_others(rows, row)
    machine = machines(rows, row["gpu"], row["n_gpus"]).get(transport)
    passes = row["pass"].split("+")
    if not machine or not {(pass_, causal) for pass_ in passes for causal in (False, True)} <= machine.flops.keys():
        return None
    layout = Layout(row["layout"], row["N"], row["n_gpus"], row["causal"])
    shape = simulate.Shape(row["B"], row["H"], row["Hk"], row["D"])
    seconds = 0.0
    for pass_ in passes:
        measured = factors.get(pass_)
        factor = measured / machine.block(shape, row["N"], row["N"], row["causal"], pass_) if measured else 1.0
        slowed = replace(machine, slow=dict.fromkeys(range(row["n_gpus"]), factor))
        how = layout, shape, slowed, transport, pass_
        beside, after = (simulate.schedule(*how, overlap=overlap).seconds for overlap in (True, False))
        seconds += after + shares.get(pass_, 1.0) * (beside - after)
    return seconds


def beside_others(rows, like):
    """{pass: seconds of one GPU for the whole sequence, while all GPUs compute}, at this row's size.

    Clocks are lower then, and blocks with few K/V heads slower, than where the speed of a block was measured.
    """
    same = [row for row in rows if row["n_gpus"] > 1 and who(row) == ONE and row["peer"] is None]
    same = [row for row in same if size(row | {"pass": like["pass"]}) == size(like)]
    ms = {pass_: [row["ms_median"] for row in same if row["pass"] == pass_] for pass_ in PASSES}
    found = {pass_: 1e-3 * statistics.median(some) for pass_, some in ms.items() if some}
    if both := found.pop("fwd+bwd", None):
        found["bwd"] = both - found["fwd"]
    return found


def hidden(rows, like):
    """{pass: share} by the profiler, which has seen forward + backward as a whole: its share counts as the backward's.

    like: a row of the same ring on the same GPUs, of any size.
    """
    same = [row for row in rows if all(row[name] == like[name] for name in ("gpu", "n_gpus", "kernel"))]
    return {row["pass"].removeprefix("fwd+"): row["hidden"] for row in same if "hidden" in row}


def machines(rows, gpu, n_gpus):
    """{transport: simulate.Machine} of so many GPUs, of the transports whose hops were measured.

    Measured are the speed of a block on one GPU, a link's bytes/s and its latency, what a launch costs the host, and
    the price of a fixed order.
    """
    rows = [row for row in rows if row["gpu"] == gpu]
    try:
        flops = simulate.read_flops(rows, gpu=gpu)
    except ValueError:  # There is none: the kernels have changed since they were measured.
        return {}
    hops = of_one_run([row for row in rows if row["peer"] == COPY and row["n_gpus"] == n_gpus])
    sizes = Counter(row["options"]["transport"] for row in hops)
    links = {one: simulate.read_link(hops, one) for one in RINGS.values() if sizes[one] > 1}
    memory = 1e12 * cost.GPUS[gpu].bandwidth if gpu in cost.GPUS else math.inf
    how = {"memory": memory, "ordered": price_of_the_order(rows, n_gpus)}
    how["launch"] = simulate.read_launch(read_record("host", gpu))
    return {one: simulate.Machine(flops, *link, **how) for one, link in links.items()}


def price_of_the_order(rows, n_gpus):
    """The time of a backward that adds to dQ in a fixed order, in those of one that does not; 1 if that is not known.

    Measured in the ring with and without it at one size, less the ring's forward.
    """
    rows = of_one_run([row for row in rows if row["n_gpus"] == n_gpus and row["kernel"] == "ring+fetch"])
    ms = {(row["pass"], *row["options"].items()): row["ms_median"] for row in rows}
    try:
        forward, both = (ms[pass_, ("changed", "nothing")] for pass_ in PASSES)
        return (both - forward) / (ms["fwd+bwd", ("deterministic", False)] - forward)
    except KeyError:
        return 1.0


TABLES = {  # by name: the function, and what stands below the table
    "speed": (
        ring_speed,
        "Milliseconds of the slowest rank, the median of five rounds. In brackets the efficiency: the time of one GPU "
        "(while all of them compute) / GPUs / this time. One GPU adds to dQ in any order; a second efficiency, where "
        "there is one, is beside one GPU that keeps the ring's order",
    ),
    "strategies": (ring_strategies, "Milliseconds of the slowest rank / MB that a rank sends"),
    "predictions": (
        predictions,
        "Milliseconds as measured, and in brackets how far the model of `simulate.py` is off. It knows from other rows "
        "how fast a block is on one GPU, a link's bytes a second and a hop's latency, which share of the moving a "
        "profiler has seen hidden, what the fixed order of dQ costs at one size, and what a launch costs the host",
    ),
}


# --- the picture of a call ------------------------------------------------------------------------------------

# As spans_of in steps/bench/ring.py names them.
LANES = {"computes": "computes", "moves": "moves data", "waits": "waits for\nall ranks"}
BLOCK, OTHER, MOVES, WAITS = COLOURS[0], COLOURS[5], COLOURS[1], GREYS[2]


def trace_picture(record, pass_="fwd"):
    """When one GPU computes and when it moves data in one recorded call of the ring, over relay and over fetch.

    record: of the kind "trace". The titles' numbers are those of the call that is drawn.
    """
    calls = sorted((call for call in record.get("calls", ()) if call["pass"] == pass_), key=lambda call: call["kernel"])
    if not calls:
        raise ValueError(f"no trace of {pass_}; `python -m steps.bench ring-trace` records one.")
    style()
    how = dict(figsize=(8.4, 1.1 + 1.45 * len(calls)), sharex=True, squeeze=False, layout="constrained")
    fig, axes = plt.subplots(len(calls), 1, **how)
    titles = []
    for ax, call in zip(axes.flat, calls[::-1], strict=True):  # relay first
        for lane, name, start, end in call["spans"]:
            colour = {"computes": BLOCK if "attention" in name else OTHER, "moves": MOVES, "waits": WAITS}[lane]
            ax.barh(list(LANES).index(lane), (end - start) / 1e3, 0.7, start / 1e3, color=colour, ec="white", lw=0.2)
        ax.set_yticks(range(len(LANES)), LANES.values())
        ax.set_ylim(len(LANES) - 0.5, -0.5)
        ax.grid(axis="y", visible=False)
        drawn = ring.shares([[lane, None, *rest] for lane, *rest in call["spans"]], 1)
        titles.append(f"{call['kernel'].removeprefix('ring+')}: {drawn['ms']:.3g} ms, {drawn['hidden']:.0%} of the "
                      f"moving hidden, no kernel in {drawn['idle']:.1%} of the time")  # fmt: skip
        ax.set_title(titles[-1])
    axes.flat[-1].set_xlabel("ms")
    looks = {"a block": BLOCK, "another kernel": OTHER, "K and V": MOVES, "a barrier": WAITS}
    handles = [plt.Rectangle((0, 0), 1, 1, fc=colour) for colour in looks.values()]
    fig.legend(handles, looks, ncols=4, loc="outside lower center", fontsize=9)
    words = f"Timelines of one of {record['n_gpus']} GPUs in one call of the ring. Blocks stand above, messages below."
    return picture(fig, f"{words} {'. '.join(titles)}.")
