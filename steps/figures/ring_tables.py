"""What was recorded of the ring on several GPUs: tables of text, a picture of a call, and simulate.py's model.

    speed         the ring beside one GPU and torch's context_parallel
    strategies    the four ways to share a sequence: time, memory, bytes sent
    predictions   what simulate.py says, and what was measured
    changes       the ring with one part changed, or without its watching threads
    trace         what the profiler saw
    token         one new token over keys that the GPUs share
    hops          single messages

A table is a list of lines, which are lists of words, the first line its head. Of each size, the lines that compute the
same are of one run: of several runs that with most rows there. What steps/bench/ring.py no longer measures, such as a
ring without overlap, CUDA graphs or single messages, was measured by former versions of it.
"""

import math
import statistics
import textwrap
from collections import Counter
from dataclasses import replace

import matplotlib.pyplot as plt

from steps.bench import cost, report
from steps.bench.rows import COMMITTED, COPY, code_hash, read_record
from steps.figures.plots import COLOURS, GREYS, style
from steps.step04_ring import simulate
from steps.step04_ring.layout import Layout
from steps.step04_ring.strategies import account

PASSES = {"fwd": "forward", "fwd+bwd": "forward + backward"}
RINGS = {"ring+fetch": "fetch", "ring+relay": "relay"}
DQ = {True: ", dQ in order", False: ", dQ in any order"}  # what is said of a row whose options have "deterministic"
ONE = "one GPU"  # adds dQ in any order
ONE_IN_ORDER = ONE + DQ[True]  # as the ring does
ORDER = ONE, ONE_IN_ORDER, "fetch", "fetch" + DQ[False], "fetch, graph", "relay"
SIZE = "gpu", "n_gpus", "pass", "B", "H", "Hk", "N", "Nk", "D", "dtype", "causal"
LIMITS = {"query_parallel": "layout not striped", "star": "no backward", "ulysses": "N divides H and Hk",
          "ring, relay": "", "ring, fetch": "one host"}  # fmt: skip
CHANGES = {
    "changed=nothing": "as it is", "overlap=False": "no overlap", "merge=eager": "merged by torch, not in one kernel",
    "dkv=fp32": "dK, dV sent in float32", "deterministic=False": "dQ summed in any order",
    "persistent=True": "kernel persistent for short tiles", "persistent=False": "kernel not persistent",
    "block=stage 03": "stage 03's block", "merge=carried": "stage 03's block, sum carried in it",
    "watch=True": "8k, as it is", "watch=False": "8k, without watching threads",
}  # fmt: skip


def shown(name, rows):
    """One of TABLES in columns of text, with its note; or a sentence if there are no such rows."""
    table, note = TABLES[name]
    lines = table(rows)
    if not lines:
        return "Not recorded yet. `python -m steps.bench ring` measures it on two GPUs or more."
    return "\n".join([*report.in_text(lines), "", f"{textwrap.fill(note, 110)}."])


def recorded_trace(folder=COMMITTED):
    """The record of kind "trace" for trace_picture; {} if there is none of the ring as it is now."""
    record = read_record("trace", folder=folder)
    now = {kernel: code_hash("04_ring", kernel) for kernel in record.get("source", ())}
    return record if record and now == record["source"] else {}


# --- tables ---------------------------------------------------------------------------------------------------


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
    options, ring = row["options"], RINGS.get(row["kernel"])
    order = DQ.get(options.get("deterministic"), "")
    if ring is None:
        return row["peer"] or options.get("strategy", ONE + order)
    return f"ring, {ring}" if "strategy" in options else f"{ring}, graph" if options.get("graph") else ring + order


def about(row):
    """A line's first words: how many GPUs of which kind, what is computed, the K/V heads."""
    mask = "causal" if row["causal"] else "full"
    layout = ", contiguous" if row["causal"] and row["layout"] == "contiguous" else ""
    gpus = f"{row['n_gpus']} {row['gpu'].removeprefix('NVIDIA ').split()[0]}"
    return [gpus, f"{row['pass']}, {mask}{layout}", str(row["Hk"])]


def in_order(rows):
    """Fewer GPUs first, of one kind; then causal, zigzag, the forward, more K/V heads, the ring; else as measured."""

    def key(row):
        contiguous = row["causal"] and row["layout"] == "contiguous"
        place = ORDER.index(who(row)) if who(row) in ORDER else len(ORDER)
        return row["n_gpus"], row["gpu"], not row["causal"], contiguous, row["pass"] != "fwd", -row["Hk"], place

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
    """The ring beside one GPU and torch's context_parallel."""
    shown = [{}, {"graph": True}, {"deterministic": True}, {"deterministic": False}]
    rows = of_one_run([row for row in rows if row["n_gpus"] > 1 and row["options"] in shown])
    alone, shares = {}, {}
    for row in rows:
        if who(row) == ONE:  # Its row comes before those of the ones that it takes turns with.
            alone[size(row)] = [row["ms_median"]]
        elif who(row) == ONE_IN_ORDER and size(row) in alone:
            alone[size(row)].append(row["ms_median"])
        elif size(row) in alone:
            both = [f"{ms / row['n_gpus'] / row['ms_median']:.2f}" for ms in alone[size(row)]]
            shares[id(row)] = f"{' / '.join(both)}, "

    def word(row):
        return f"{ms(row)} to {ms(row, 'ms_worst')} ({shares.get(id(row), '')}{row['tflops']:.0f})"

    return by_size(in_order(rows), lambda row: [*about(row), who(row)], ["GPUs", "computed", "Hk", "by"], word)


def moved(row):
    """(bytes that a rank sends or copies in a call, bytes that others can read), of 16-bit tensors."""
    strategy, backward = row["options"]["strategy"], row["pass"] != "fwd"
    N, sizes = row["n_gpus"], {name: row[name] for name in ("B", "H", "Hk", "D")}
    if row["kernel"] == "ring+fetch":
        shard = 4 * row["B"] * row["Hk"] * (row["N"] // N) * row["D"]  # of K and V
        # The backward still has the shard that the forward fetched last, and gives all but its own dK and dV away.
        fetched, slots = ((N - 1) + (N - 2) + (N - 1), N - 1) if backward else ((N - 1), 0)
        return fetched * shard, (1 + slots) * shard
    whole = Layout(row["layout"], row["N"], N, row["causal"])
    both = [account.sent_bytes(strategy, whole, rank, **sizes, e=2) for rank in range(N)]
    return max(there + (back if backward else 0) for there, back in both), 0


def ring_strategies(rows):
    """The four ways to share a sequence."""

    def word(row):
        sent, shared = moved(row)
        return f"{ms(row)} / {(row['peak_bytes'] + shared) / 1e6:.0f} / {sent / 1e6:.0f}"

    rows = in_order(of_one_run([row for row in rows if "strategy" in row["options"] and row["N"] > 1]))
    head = ["GPUs", "computed", "Hk", "strategy", "limit"]
    return by_size(rows, lambda row: [*about(row), who(row), LIMITS[who(row)]], head, word)


def token(rows):
    rows = in_order(of_one_run([row for row in rows if "strategy" in row["options"] and row["N"] == 1]))
    columns = {"us": lambda row: f"{1e3 * row['ms_median']:.0f}"}
    columns["sent, MB"] = lambda row: f"{row['sent_bytes'] / 1e6:.3g}"

    def words(row):
        return about(row)[0], thousands(row["Nk"]), str(row["Hk"]), who(row)

    return report.table(rows, ["GPUs", "keys", "Hk", "strategy"], words, report.of_one(**columns))


def changes(rows):
    usual, rows = {}, of_one_run([one for one in rows if one["kernel"] in RINGS and changed(one) in CHANGES])
    # Where persistence was turned off, it was on in the other rows of this transport and this run.
    persistent = {(row["kernel"], row["run"]) for row in rows if changed(row) == "persistent=False"}

    def key(row):
        return row["kernel"], row["pass"], size(row)

    def words(row):
        what = CHANGES[changed(row)]
        if (row["kernel"], row["run"]) in persistent and changed(row) not in ("persistent=False", "block=stage 03"):
            what += ", kernel persistent"
        return about(row)[0], RINGS[row["kernel"]], what

    def word(row):
        return ms(row) + (f" ({row['ms_median'] / usual[key(row)]:.3f})" if key(row) in usual else "")

    usual |= {key(row): row["ms_median"] for row in rows if changed(row) in ("changed=nothing", "watch=True")}
    columns = report.across(lambda row: row["pass"], word, PASSES)
    return report.table(rows, ["GPUs", "transport", "what"], words, columns)


def changed(row):
    return ", ".join(f"{name}={value}" for name, value in row["options"].items())


def trace(rows):
    rows = in_order(of_one_run([row for row in rows if row["options"] == {"profiler": True}]))
    columns = report.of_one(
        ms=ms,
        hidden=lambda row: f"{row['hidden']:.0%}",
        idle=lambda row: f"{row['idle']:.1%}",
        launches=lambda row: f"{row['launches']:.0f}",
    )
    head = ["GPUs", "computed", "Hk", "transport"]
    return report.table(rows, head, lambda row: [*about(row), RINGS[row["kernel"]]], columns)


def hops(rows):
    def nbytes(row):
        return 2 * row["B"] * row["Hk"] * row["Nk"] * row["D"]

    def words(row):
        amount = f"{nbytes(row) >> 20} MiB" if nbytes(row) >= 2**20 else f"{nbytes(row) >> 10} KiB"
        return about(row)[0], amount

    def word(row):
        return f"{nbytes(row) / row['ms_median'] / 1e6:.3g} ({1e3 * row['ms_median']:.0f})"

    rows = of_one_run([row for row in rows if row["peer"] == COPY and row["n_gpus"] > 1])
    rows.sort(key=lambda row: (about(row)[0], nbytes(row)))
    columns = report.across(lambda row: row["options"]["transport"], word, {one: one for one in RINGS.values()})
    return report.table(rows, ["GPUs", "message"], words, columns)


def predictions(rows):
    plain = [row for row in rows if row["kernel"] in RINGS and row["layout"] == "zigzag" and row["causal"]]
    plain = in_order(of_one_run([row for row in plain if row["options"] == {}]))
    seconds = {id(row): predicted(rows, row) for row in plain}

    def word(row):
        model = 1e3 * seconds[id(row)]
        return f"{model:.3g} / {ms(row)} ({model / row['ms_median'] - 1:+.0%})"

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
    ms = {(row["pass"], changed(row)): row["ms_median"] for row in rows if changed(row) in CHANGES}
    try:
        forward, both = (ms[pass_, "changed=nothing"] for pass_ in PASSES)
        return (both - forward) / (ms["fwd+bwd", "deterministic=False"] - forward)
    except KeyError:
        return 1.0


TABLES = {  # by name: the function, and what stands below the table
    "speed": (
        ring_speed,
        "Milliseconds of the slowest rank, the median and the worst of five rounds; in brackets the efficiency, "
        "which is the time of one GPU (while all of them compute) / GPUs / the ring's, and TFLOP/s a GPU. One "
        "GPU adds to dQ in any order. Where one that keeps the ring's order was measured too, the efficiency beside it "
        "stands second",
    ),
    "strategies": (
        ring_strategies,
        "Milliseconds / MB that a rank holds beyond its inputs, shared memory included / MB that it sends",
    ),
    "token": (token, "One query a head that every rank has, over keys that the ranks share"),
    "predictions": (
        predictions,
        "Milliseconds by the model of `simulate.py` / measured (how far the model is off). It knows from "
        "other rows how fast a block is on one GPU, a link's bytes a second and a hop's latency, which share of the "
        "moving a profiler has seen hidden, what the fixed order of dQ costs at one size, and what a launch of stage "
        "02 costs the host",
    ),
    "changes": (
        changes,
        "Milliseconds at 32k, causal, Hk = 32, and in brackets the share of what the ring took "
        "with nothing changed, in the same run; the watching threads at 8k, Hk = 8",
    ),
    "trace": (
        trace,
        "By torch's profiler. Hidden: the share of the time of copies between GPUs in which a kernel computes. "
        "Idle: the share of all time in which none does",
    ),
    "hops": (
        hops,
        "GB/s each way, and in brackets microseconds, of a message to the next GPU while all of them send",
    ),
}


# --- the picture of a call ------------------------------------------------------------------------------------

# As spans_of in steps/bench/ring.py names them.
LANES = {"computes": "computes", "moves": "moves data", "waits": "waits for\nall ranks"}


def trace_picture(record, pass_="fwd+bwd"):
    """When one GPU computes and when it moves data in a call of the ring, over relay and over fetch.

    record: of the kind "trace". A span of a block is dark blue, one of another kernel light blue.
    """
    calls = [call for call in record.get("calls", ()) if call["pass"] == pass_]
    if not calls:
        raise ValueError(f"no trace of {pass_}; `python -m steps.bench ring-trace` records one.")
    style()
    how = dict(figsize=(9.2, 0.7 + 1.35 * len(calls)), sharex=True, squeeze=False, layout="constrained")
    fig, axes = plt.subplots(len(calls), 1, **how)
    calls.sort(key=lambda call: call["kernel"], reverse=True)  # relay first
    for ax, call in zip(axes.flat, calls, strict=True):
        for lane, name, start, end in call["spans"]:
            block = "attention" in name
            colour = {"computes": COLOURS[0] if block else COLOURS[5], "moves": COLOURS[1], "waits": GREYS[2]}[lane]
            y = list(LANES).index(lane)
            ax.barh(y, (end - start) / 1e3, 0.7, start / 1e3, color=colour, edgecolor="white", linewidth=0.2)
        ax.set_yticks(range(len(LANES)), LANES.values())
        ax.set_ylim(len(LANES) - 0.5, -0.5)
        ax.grid(axis="y", visible=False)
        shares = f"{call['hidden']:.0%} of the moving hidden, no kernel in {call['idle']:.1%} of the time"
        ax.set_title(f"{call['kernel'].removeprefix('ring+')}: {call['ms']:.3g} ms a call, {shares}")
    axes.flat[-1].set_xlabel("ms")
    plt.close(fig)
    return fig


def trace_in_words(record, pass_="fwd+bwd"):
    """What `trace_picture` shows, for those who do not see it."""
    words = f"Timelines of one of {record['n_gpus']} GPUs in a call of the ring: blocks above, below them moving data."
    for call in record["calls"]:
        if call["pass"] == pass_:
            shares = f"{call['hidden']:.0%} of the moving beside a kernel, {call['idle']:.1%} of the time without one"
            words += f" {call['kernel'].removeprefix('ring+')}: {call['ms']:.3g} ms, {shares}."
    return words
