"""What was recorded of the causal ring on several GPUs: tables of text, and a picture of a call.

A table is a list of lines, which are lists of words, the first line its head. Of each size, the lines that compute the
same are of one run: of several runs that with most rows there.
"""

import functools
import textwrap

import matplotlib.pyplot as plt

from steps.course.bench import cost, report, ring
from steps.course.bench.rows import code_hash, fresh, read, read_record
from steps.course.figures import measured
from steps.course.figures.picture import picture
from steps.course.figures.plots import COLOURS, GREYS, INK, boxes, subplots
from steps.step04_ring import fitted
from steps.step04_ring.fitted import RINGS, of_fullest_run, size
from steps.step04_ring.layout import Layout
from steps.step04_ring.strategies import account

ONE = "one GPU"
ASKED = {"deterministic": {True: ", in order", False: ", any order"}, "graph": {True: ", in a graph"}}


def recorded(gpu="", n_gpus=None):
    """The rows of one GPU and of several, of the code as it is now.

    gpu: part of the name of those that count. n_gpus: of several GPUs, only the rows of so many.
    """
    some = [row for row in several_gpus() if n_gpus in (None, row["n_gpus"])]
    return [row for row in measured.fresh() + some if gpu in row["gpu"]]


@functools.cache
def several_gpus():
    """The committed rows of several GPUs, of the code as it is now."""
    return fresh(read(several_gpus=True))


def shown(name, rows):
    """One of TABLES in columns of text, with its docstring as a note; or a sentence if there are no such rows."""
    lines, note = TABLES[name](rows), " ".join((TABLES[name].__doc__ or "").split())
    if not lines:
        return "Not recorded yet. `python -m steps.course.bench ring` measures it on two GPUs or more."
    return "\n".join([*report.in_text(lines), "", textwrap.fill(note, 87)])


def who(row):
    """The row's candidate in words."""
    options, transport = row["options"], RINGS.get(row["kernel"])
    asked = "".join(words[options[name]] for name, words in ASKED.items() if name in options)
    if transport is None:
        return (row["peer"] or options.get("strategy", ONE)).replace("context-parallel-", "torch, ") + asked
    return f"ring, {transport}" if "strategy" in options else transport + asked


def by_size(rows, word):
    """A table with a line for each candidate and a column for each N, and in it the word of the first such row."""
    rows = [row for row in rows if row["causal"]]

    def words(row):
        gpus = f"{row['n_gpus']} {row['gpu'].removeprefix('NVIDIA ').split()[0]}"
        return gpus, row["pass"], str(row["Hk"]), who(row)

    def place(row):
        return row["n_gpus"], row["gpu"], row["pass"] != "fwd", -row["Hk"], who(row) != ONE, who(row)

    columns = report.by_length(rows, word, lambda N: f"{N // 1024}k")
    return report.table(sorted(rows, key=place), ["GPUs", "causal", "Hk", "by"], words, columns)


def ms(row):
    return f"{row['ms_median']:.3g}"


def beside_one(rows, single=ONE):
    """The rows of one run. Those that took turns with a single GPU, whose row comes first, get an "efficiency"."""
    alone, found = {}, []
    for row in of_fullest_run(rows):
        if who(row) == single:
            alone[size(row)] = row["ms_median"]
        elif one := alone.get(size(row)):
            row = row | {"one_gpu_ms": one, "efficiency": one / row["n_gpus"] / row["ms_median"]}
        found.append(row)
    return found


def ring_speed(rows):
    """Milliseconds of the slowest rank, the median of five rounds. In brackets the efficiency: the time of one GPU
    (while all of them compute) / GPUs / this time."""
    rows = [row for row in rows if row["n_gpus"] > 1 and row["layout"] in (None, "zigzag")]
    rows = beside_one([row for row in rows if not row["options"] and row["H"] == 32])
    return by_size(rows, lambda row: ms(row) + (f" ({row['efficiency']:.2f})" if "efficiency" in row else ""))


EVERYBODY = "fetch", "relay", "torch, allgather", "torch, alltoall"


def efficiency(gpu="H200"):
    """The efficiency of forward + backward over the number of GPUs, a panel for each length; Hk = H."""
    rows = [row for row in recorded(gpu) if row["layout"] in (None, "zigzag") and not row["options"]]
    rows = [row for row in beside_one(rows) if row["pass"] == "fwd+bwd" and row["causal"] and row["Hk"] == 32]
    shares = {(who(row), row["N"], row["n_gpus"]): row["efficiency"] for row in rows if "efficiency" in row}
    lengths, numbers = (sorted({key[n] for key in shares}) for n in (1, 2))
    fig, axes = subplots(1, len(lengths), figsize=(8.4, 3.2), sharey=True)
    for ax, N in zip(axes, lengths, strict=True):
        for name, colour, look in zip(EVERYBODY, COLOURS[:4], ("o-", "s-", "^-", "v--"), strict=True):
            ax.plot([1, *numbers], [1, *(shares[name, N, n] for n in numbers)], look, color=colour, label=name)
        ax.set(title=f"{N // 1024}k positions", xlabel="GPUs", xticks=[1, *numbers], ylim=(0, 1.05))
    axes[0].set_ylabel("efficiency, forward + backward")
    fig.legend(*axes[0].get_legend_handles_labels(), ncols=len(EVERYBODY), loc="outside lower center")
    told = "; ".join(f"{name}, {N // 1024}k, {n} GPUs: {share:.2f}" for (name, N, n), share in shares.items())
    return picture(fig, f"Efficiency of forward + backward over the number of GPUs, one GPU being 1. {told}.")


def ring_orders(rows):
    """Milliseconds of the slowest rank. In brackets the efficiency beside one GPU that adds to dQ in any order, and
    beside one that adds in a fixed order, as the ring does where nothing else is said."""
    rows = of_runs_with(rows, deterministic=True)
    in_order = [row.get("efficiency") for row in beside_one(rows, f"{ONE}, in order")]
    rows = [row | {"in_order": share} for row, share in zip(beside_one(rows), in_order, strict=True)]

    def word(row):
        shares = [f"{share:.2f}" for share in (row.get("efficiency"), row["in_order"]) if share]
        return ms(row) + (f" ({', '.join(shares)})" if shares and RINGS.get(row["kernel"]) else "")

    return by_size(rows, word)


def ring_graphs(rows):
    """Milliseconds of the slowest rank."""
    return by_size(of_runs_with(rows, graph=True), ms)


def of_runs_with(rows, **options):
    """The rows of a run in which somebody was asked for these options."""
    runs = {row["run"] for row in rows if row["options"] == options}
    return [row for row in rows if row["run"] in runs]


def ring_strategies(rows):
    """Milliseconds of the slowest rank / MB that a rank sends."""
    rows = of_fullest_run([row for row in rows if "strategy" in row["options"] and row["N"] > 1])
    return by_size(rows, lambda row: f"{ms(row)} / {sent(row) / 1e6:.0f}")


def sent(row):
    """The bytes of 16-bit tensors that a rank sends or copies in a call."""
    backward, N = row["pass"] != "fwd", row["n_gpus"]
    if row["kernel"] == "ring+fetch":
        # The backward still has the shard that the forward fetched last, and gives all but its own dK and dV away.
        return ((N - 1) + ((N - 2) + (N - 1)) * backward) * 4 * row["B"] * row["Hk"] * (row["N"] // N) * row["D"]
    whole = Layout(row["layout"], row["N"], N, row["causal"])
    sizes = {name: row[name] for name in ("B", "H", "Hk", "D")}
    both = [account.sent_bytes(row["options"]["strategy"], whole, rank, **sizes, e=2) for rank in range(N)]
    return max(there + (back if backward else 0) for there, back in both)


def predictions(rows):
    """Milliseconds as measured, and in brackets how far the model of `simulate.py` is off. It knows from other rows
    how fast a block is on one GPU, a link's bytes a second and a hop's latency, which share of the moving a profiler
    has seen hidden, what the fixed order of dQ costs at the nearest length measured, and what a launch costs the host.
    """
    plain = [row for row in rows if row["kernel"] in RINGS and row["layout"] == "zigzag" and not row["options"]]
    # The sizes at which one GPU took turns with the ring. Shorter ones wait for the host, which the model hardly knows.
    plain = [row for row in plain if row["H"] == 32 and row["N"] >= 2**15]
    memory = {gpu: 1e12 * cost.GPUS[gpu].bandwidth for gpu in {row["gpu"] for row in plain}}
    plain = [row | {"model": fitted.predicted(rows, row, memory[row["gpu"]])} for row in of_fullest_run(plain)]
    return by_size([row for row in plain if row["model"]],
                   lambda row: f"{ms(row)} ({1e3 * row['model'] / row['ms_median'] - 1:+.0%})")  # fmt: skip


TABLES = {
    "speed": ring_speed, "orders": ring_orders, "graphs": ring_graphs, "strategies": ring_strategies,
    "predictions": predictions,
}  # fmt: skip
LANES = {"computes": COLOURS[0], "moves": COLOURS[1], "waits": GREYS[2]}  # as bench/ring.py's spans_of has them


def recorded_call():
    """When one GPU computes, and when K and V move, in a recorded forward; a sentence if the ring has changed since."""
    record = read_record("trace")
    if not record or any(code_hash("04_ring", kernel) != was for kernel, was in record["source"].items()):
        return print("No trace of this version of the ring has been recorded yet.")
    calls = {RINGS[call["kernel"]]: call for call in record["calls"] if call["pass"] == "fwd"}
    fig, axes = subplots(2, figsize=(8.4, 3.9), sharex=True, height_ratios=(2, 3))  # Nothing of relay's waits for all.
    last = max(span[-1] for call in calls.values() for span in call["spans"]) / 1e3
    for ax, name in zip(axes, ("relay", "fetch"), strict=True):
        spans, mean = calls[name]["spans"], calls[name]["hidden"]
        boxes(ax, [bar(*span) for span in spans])
        told = ring.shares([[lane, None, *rest] for lane, *rest in spans], 1)
        title = f"{name}: {told['ms']:.3g} ms, {told['hidden']:.0%} of the moving hidden in this call"
        lanes = ["computes", "moves data", "waits for all"][: 1 + max(list(LANES).index(span[0]) for span in spans)]
        ax.set(xlim=(0, last), ylim=(len(lanes) - 0.5, -0.5))
        ax.set_title(f"{title}; mean of {ring.PROFILED}: {mean:.0%}")
        ax.set_yticks(range(len(lanes)), lanes)
    axes[1].set_xlabel("ms")
    looks = {"block": LANES["computes"], "copies or merges": COLOURS[5], "moves K, V": LANES["moves"]}
    looks |= {"barrier": LANES["waits"]}
    handles = [plt.Rectangle((0, 0), 1, 1, fc=colour, ec=INK, label=words) for words, colour in looks.items()]
    fig.legend(handles=handles, ncols=len(looks), loc="outside lower center")
    told = "; ".join(ax.get_title("left") for ax in axes)
    return picture(fig, f"What one of {record['n_gpus']} GPUs does in one call of the ring. {told}.")


def bar(lane, kernel, start, end):
    """A span as `boxes` wants it, from microseconds; what computes and is no block is pale."""
    block = "attention" in kernel
    colour = COLOURS[5] if lane == "computes" and not block else LANES[lane]
    word = "block" if block else "K, V" if lane == "moves" and end - start > 300 else ""
    return start / 1e3, list(LANES).index(lane) - 0.35, (end - start) / 1e3, 0.7, colour, word
