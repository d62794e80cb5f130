"""`python -m steps.course.bench.report`: writes the measured rows into the tables of README.md and results/README.md.

A table stands between two markers; the first says by field=value pairs which rows it shows:

    <!-- results: gpu=nvidia-h200 pass=fwd dtype=bf16 D=128 causal=false -->
    <!-- /results -->

A table with fa3 or fa4 names one run=..., because only what was measured in one run can be compared. Rows whose kernel
has changed since they were measured are stale: no page shows them, and each page says so. What the hardware counters
said of an H200 stands between <!-- profile --> and <!-- /profile -->, and what small calls take the CPU between
<!-- small calls --> and <!-- /small calls -->. `make report` also draws the pages' pictures
(steps/course/figures/plots.py).
"""

import json
import re
import statistics
from collections import Counter

import typer

from steps.course.bench import cost, profile, timing
from steps.course.bench import rows as results
from steps.course.bench.rows import label, setting
from steps.places import require_clone

_SECTION = re.compile(r"(<!-- results:(.*?)-->\n).*?(<!-- /results -->)", re.S)
_PROFILE = re.compile(r"(<!-- profile -->\n).*?(<!-- /profile -->)", re.S)
_SMALL = re.compile(r"(<!-- small calls -->\n).*?(<!-- /small calls -->)", re.S)
EMPTY = "_Not measured yet._\n"
PAGES = "README.md", "steps/course/bench/results/README.md"
USUAL = {"options": "{}", "timing": "interleaved", "n_gpus": "1"}  # what a marker means that names none of them


# --- tables: lines of words, the first one the head -----------------------------------------------------------


def table(rows, head, words, columns):
    """A line for each of the different words(row), in their order; [] without rows.

    head: the names of these first words. columns: {name: function of the line's rows that gives a word}.
    """
    lines = {}
    for row in rows:
        lines.setdefault(tuple(words(row)), []).append(row)
    found = [[*first, *(column(some) for column in columns.values())] for first, some in lines.items()]
    return [[*head, *columns], *found] if found else []


def by_length(rows, word, name=str):
    """Columns for `table`, one for each N of the rows: the word of a line's first row with this N, or –."""

    def cell(N):
        return lambda own: next((word(row) for row in own if row["N"] == N), "–")

    return {name(N): cell(N) for N in sorted({row["N"] for row in rows})}


def markdown(rows):
    """The table of a section of a page, with its caption. rows: either interleaved or sustained."""
    loaded = any(row["timing"] == "sustained" for row in rows)
    lines, shown, caption = (loads if loaded else speeds)(rows)
    if not lines:
        return EMPTY
    return f"{piped(lines, 1 + loaded)}\n{caption}. {machines(shown)}.\n"


def in_text(lines):
    """The table's lines as text, in columns."""
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    return ["  ".join(w.ljust(n) for w, n in zip(line, widths, strict=True)).rstrip() for line in lines]


def piped(lines, left):
    """The table in Markdown. left: how many of its first columns are words."""
    rule = ["---" if n < left else "---:" for n, _ in enumerate(lines[0])]
    return "".join(f"| {' | '.join(line)} |\n" for line in (lines[0], rule, *lines[1:]))


def comparable(rows):
    """The latest rows, without peers of runs of which no kernel is among them: those were not measured beside one."""
    shown = results.latest(rows)
    beside = {(row["run"], setting(row)) for row in shown if row["kernel"]}
    return [row for row in shown if row["kernel"] or (row["run"], setting(row)) in beside]


def speeds(rows):
    """A line for each kernel, then each peer: TFLOP/s for each N, the share of the best peer, the error."""
    shown = comparable(rows)
    slowest_first = sorted((row for row in rows if row["peer"]), key=lambda row: row["tflops"])
    fastest = {(row["run"], setting(row)): row["tflops"] for row in slowest_first}  # of the fastest peer: the last one

    def of_best_peer(own):
        shares = [row["tflops"] / fastest[where] for row in own if (where := (row["run"], setting(row))) in fastest]
        return f"{statistics.median(shares):.0%}" if shares and own[0]["kernel"] else "–"

    columns = by_length(shown, lambda row: f"{row['tflops']:.3g}", "N={}".format)
    columns["of the best peer"] = of_best_peer
    columns["error"] = lambda own: f"{max(row['error'] for row in own):.1e}"
    reps = min((row["reps"] for row in shown), default=0)
    share = "of the best peer: median over N of the speed divided by the fastest peer's in the same run"
    caption = f"TFLOP/s, medians of at least {reps} interleaved calls; {share}; error: largest difference from float64"
    in_order = sorted(shown, key=lambda row: (row["peer"] is not None, label(row)))
    return table(in_order, ["kernel"], lambda row: [label(row)], columns), shown, caption


def loads(rows):
    """Of sustained rows: for each pass and size a line for each kernel, then each peer."""
    rows = sorted(comparable(rows), key=lambda r: (r["pass"] != "fwd", -r["D"], r["causal"], bool(r["peer"])))
    columns = {  # a line has one row
        "TFLOP/s": lambda own: f"{own[0]['tflops']:.3g}",
        "MHz": lambda own: f"{own[0]['clock_mhz']:.0f}",
        "W": lambda own: f"{own[0]['watts']:.0f}",
        "TFLOP/s a GHz": lambda own: f"{1e3 * own[0]['tflops'] / own[0]['clock_mhz']:.3g}",
        "J/TFLOP": lambda own: f"{own[0]['watts'] / own[0]['tflops']:.3g}",
    }

    def words(row):
        return f"{row['pass']}, D={row['D']}, {'causal' if row['causal'] else 'full'}", label(row)

    lengths = ", ".join(str(N) for N in sorted({row["N"] for row in rows}))
    how = f"N = {lengths}; about a second of calls of one candidate, then of the next"
    medians = "medians of the calls' TFLOP/s, of the SM clock and of the power meanwhile"
    return table(rows, ["measured", "kernel"], words, columns), rows, f"{how}; {medians}"


def small_calls(rows, N=256):
    """Of the newest run of small calls with N queries: microseconds for each kernel, then each peer."""
    rows = [row for row in rows if row["options"].get("feature") == "small call" and row["N"] == N]
    newest = max((row["run"] for row in rows), default=None)
    shown = sorted((row for row in rows if row["run"] == newest), key=lambda row: row["peer"] is not None)

    def column(pass_, graph=False, taken=lambda row: row["host_us"]):
        def cell(own):
            found = [row for row in own if (row["pass"], row["options"].get("graph", False)) == (pass_, graph)]
            return f"{taken(found[0]):.0f}" if found else "–"

        return cell

    columns = {
        "forward": column("fwd"),
        "forward + backward": column("fwd+bwd"),
        "as CUDA graphs": column("fwd+bwd", graph=True),
        "GPU, forward + backward": column("fwd+bwd", taken=lambda row: 1e3 * row["ms_median"]),
    }
    lines = table(shown, ["kernel"], lambda row: [label(row).partition("+")[0]], columns)
    return f"{piped(lines, 1)}\nMicroseconds; {size(shown[0])}, bfloat16. {machines(shown)}.\n" if lines else EMPTY


def size(row):
    """The sizes in words, "B = 1, H = 16, N = 256, D = 128"."""
    return ", ".join(f"{name} = {row[name]}" for name in ("B", "H", "N", "D"))


def machines(rows):
    """Hardware and versions of the rows, and for each machine the commits and days of its runs."""
    found = {}
    for row in rows:
        versions = (f"{name} {row[field]}" for name, field in VERSIONS.items() if isinstance(row[field], str))
        where = f"{row['gpu']}, {', '.join(versions)}"
        found.setdefault(where, {})[f"{(row['commit'] or 'unknown')[:7]} ({row['date']})"] = True
    return "; ".join(f"{where}, commit{'s'[: len(some) - 1]} {', '.join(some)}" for where, some in found.items())


VERSIONS = {"driver": "driver", "CUDA": "cuda", "torch": "torch", "triton": "triton"}  # field, by its name on a page
UNITS = {"nanoseconds": 1e3, "shared_wavefronts": 1e6, "bank_conflicts": 1e6}  # microseconds and millions on a page


def counters(folder=results.COMMITTED):
    """The recorded profile: a line for each kernel, with what the hardware counted while it ran once."""
    record, found = results.read_record("profile", folder=folder), profile.read(folder)
    if not found:
        return EMPTY
    lines = [["kernel", *(title for _, title in profile.COUNTERS.values()), "warps wait most for"]]
    for rung, counted in found.items():
        numbers = (counted[name] / UNITS.get(name, 1) for name in profile.COUNTERS)
        numbers = (f"{n:.0f}" if n >= 100 else f"{n:.3g}" for n in numbers)
        stalls = {name.removeprefix("stalled_"): n for name, n in counted.items() if name.startswith("stalled_")}
        longest = sorted((name for name in stalls if name != "selected"), key=stalls.get, reverse=True)[:3]
        reasons = ", ".join(f"{name} {stalls[name] / sum(stalls.values()):.0%}" for name in longest)
        lines.append([f"02 {record['rungs'][rung]['kernel']}", *numbers, reasons])
    how = f"{size(record['size'])}, bfloat16, without a mask; read by ncu. {machines([record])}"
    return f"{piped(lines, 1)}\n{how}.\n"


def line(row):
    """A row as a line of text, with the spread of its calls."""
    what = " ".join(f"{name}={row[name]}" for name in ("B", "H", "N", "D")) + (" causal" if row["causal"] else "")
    if row["options"]:
        what += f", {row['options'].get('feature', row['options'])}"
    # Where there is one query, reading the keys is all that counts.
    reached = f"{row['tflops']:.3g} TFLOP/s" if row["N"] > 1 else f"{cost.bandwidth(row):.3g} TB/s"
    reached += f" at {row['clock_mhz']:.0f} MHz and {row['watts']:.0f} W" if row["timing"] == "sustained" else ""
    speed = f"{row['ms_median']:8.3g} ms ±{timing.spread(row):.1f}%, {reached}, error {row['error']:.0e}"
    return f"{label(row):24} {row['pass']} {row['dtype']} {what}: {speed}"


# --- pages ----------------------------------------------------------------------------------------------------


def render(text, rows, stale=()):
    """`text` of a page with each section filled from `rows`, and a note of who has only stale ones."""

    def filled(match):
        begin, marker, end = match.groups()
        shown, hidden = (select(some, marker) for some in (rows, stale))
        changed = sorted({label(row) for row in hidden if row["kernel"]} - set(map(label, shown)))
        note = f"Changed since it was measured, and not shown: {', '.join(changed)}.\n" if changed else ""
        if changed and not any(row["kernel"] for row in shown):
            return begin + note + end  # not a table of peers alone
        return begin + markdown(shown) + (note and f"\n{note}") + end

    return _SECTION.sub(filled, text)


def select(rows, marker):
    """The rows that read as a marker says, "D=128 causal=false gpu=nvidia-h200"; ValueError for an unknown field."""
    wanted = USUAL | dict(pair.split("=", 1) for pair in marker.split())
    if unknown := sorted(set(wanted) - set(results.FIELDS)):
        raise ValueError(f"<!-- results:{marker}-->: no such field: {', '.join(unknown)}.")

    def written(row, name):
        value = results.slug(row["gpu"]) if name == "gpu" else row[name]
        return value if isinstance(value, str) else json.dumps(value, sort_keys=True)

    return [row for row in rows if all(written(row, name) == value for name, value in wanted.items())]


def pages(root=results.ROOT):
    """{page: its text with the measured rows in its tables}. root: the repository."""
    folder = root / results.COMMITTED.relative_to(results.ROOT)
    ways = dict(timing="interleaved"), dict(timing="sustained"), dict(several_gpus=True)
    measured = [row for how in ways for row in results.read(folder, **how)]
    shown, stale = results.fresh(measured, root), [row for row in measured if results.is_stale(row, root)]
    print(f"{len(measured)} rows, {len(stale)} of them stale: {dict(Counter(map(label, stale)))}")
    texts = {page: render((root / page).read_text(), shown, stale) for page in PAGES}
    for pattern, found in ((_PROFILE, counters(folder)), (_SMALL, small_calls(shown))):
        texts = {page: pattern.sub(rf"\g<1>{found}\g<2>", text) for page, text in texts.items()}
    return texts


def main():
    """Writes the measured rows into the tables of README.md and steps/course/bench/results/README.md."""
    require_clone("steps.course.bench.report")
    for page, text in pages().items():
        (results.ROOT / page).write_text(text)


if __name__ == "__main__":
    typer.run(main)
