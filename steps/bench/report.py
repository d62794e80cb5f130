"""`python -m steps.bench.report`: writes the measured rows into the tables of README.md and results/README.md.

A table stands between two markers; the first says by field=value pairs which rows it shows:

    <!-- results: gpu=nvidia-h200 pass=fwd dtype=bf16 D=128 causal=false -->
    <!-- /results -->

Rows of sustained load (timing=sustained) have other columns. without=fa4 leaves out a peer. It then has a table of its
own with run=..., because only what was measured in one run can be compared. A picture of a stage's rungs stands between
<!-- ladder 02_fa2_cuda --> and <!-- /ladder -->. It carries its numbers inside, so that a picture of other rows is
noticed. What the hardware counters said of an H200 stands between <!-- profile --> and <!-- /profile -->.

Rows whose kernel has changed since they were measured are stale: they are listed, no page shows them, and each page
says so. --check writes nothing and exits with 1 if a page or a picture would change.
"""

import json
import os
import re
import statistics
from collections import Counter
from pathlib import Path
from typing import Annotated

import typer
from PIL import Image

from steps.bench import cost, plots, profile, timing
from steps.bench import rows as results
from steps.bench.rows import label, setting

_SECTION = re.compile(r"(<!-- results:(.*?)-->\n).*?(<!-- /results -->)", re.S)
_LADDER = re.compile(r"(<!-- ladder (\w+) -->\n).*?(<!-- /ladder -->)", re.S)
_PROFILE = re.compile(r"(<!-- profile -->\n).*?(<!-- /profile -->)", re.S)
EMPTY = "_Not measured yet._\n"
PAGES = "README.md", "steps/bench/results/README.md"
PICTURES = {"02_fa2_cuda": "notebooks/figures/ladder.png", "03_triton": "notebooks/figures/ladder_triton.png"}
ALT = (
    "TFLOP/s of the rungs of stage {}, forward and backward, the peers as lines; "
    "right axis: % of a matrix product."
)
VERSIONS = {"driver": "driver", "CUDA": "cuda", "torch": "torch", "triton": "triton"}
USUAL = {"options": "{}", "timing": "interleaved", "n_gpus": "1"}  # what a marker means that names none of them


# --- pages --------------------------------------------------------------------------------------------------


def render(text, rows, stale=(), page=PAGES[0]):
    """`text` of a page with each section filled from `rows`, and a note of who has only stale ones."""

    def pictured(match):
        begin, stage, end = match.groups()
        path = Path(os.path.relpath(PICTURES[stage], Path(page).parent)).as_posix()
        image = f"![{ALT.format(stage)}]({path})\n" if plots.ladder_numbers(rows, stage) else EMPTY
        return begin + image + end

    def filled(match):
        begin, marker, end = match.groups()
        shown, hidden = (select(some, marker) for some in (rows, stale))
        changed = sorted({label(row) for row in hidden if row["kernel"]} - set(map(label, shown)))
        note = f"Changed since it was measured, and not shown: {', '.join(changed)}.\n"
        if changed and not any(row["kernel"] for row in shown):
            return begin + note + end
        return begin + markdown(shown) + (f"\n{note}" if changed else "") + end

    return _SECTION.sub(filled, _LADDER.sub(pictured, text))


def select(rows, marker):
    """The rows that read as a marker says, "D=128 causal=false gpu=nvidia-h200"; ValueError for an unknown field."""
    conditions = dict(pair.split("=", 1) for pair in marker.split())
    absent = conditions.pop("without", None)
    if unknown := sorted(set(conditions) - set(results.FIELDS)):
        raise ValueError(f"<!-- results:{marker}-->: no such field: {', '.join(unknown)}.")
    wanted = {**USUAL, **conditions}.items()
    found = [row for row in rows if all(_text(row, name) == value for name, value in wanted)]
    return [row for row in found if absent is None or row["peer"] != absent]


def _text(row, name):
    """A field as a marker writes it."""
    if name == "gpu":
        return results.slug(row["gpu"])
    return row[name] if isinstance(row[name], str) else json.dumps(row[name], sort_keys=True)


def in_markdown(lines, words):
    """Lines of words as a table, the first one as its head. So many columns hold words, and the others numbers."""
    rule = ["---" if n < words else "---:" for n, _ in enumerate(lines[0])]
    return "".join(f"| {' | '.join(line)} |\n" for line in (lines[0], rule, *lines[1:]))


# --- tables -------------------------------------------------------------------------------------------------


def markdown(rows):
    """The table of a section with its caption."""
    if not rows:
        return EMPTY
    if len({row["timing"] for row in rows}) > 1:
        raise ValueError("a table shows interleaved rows or sustained ones: choose first.")
    lines, words, caption = (loads if rows[0]["timing"] == "sustained" else speeds)(rows)
    return f"{in_markdown(lines, words)}\n{caption}.\n" if lines[1:] else EMPTY


def speeds(rows):
    """A line for each kernel, then each peer: TFLOP/s for each N, the share of the best peer, the error."""
    shown = results.latest(rows)
    beside = {(row["run"], setting(row)) for row in shown if row["kernel"]}
    # A peer from a run of which no kernel is shown would be compared across runs.
    shown = [row for row in shown if row["kernel"] or (row["run"], setting(row)) in beside or not beside]
    lengths = sorted({row["N"] for row in shown})
    lines = [["kernel", *(f"N={N}" for N in lengths), "of the best peer", "error"]]
    for _, name in sorted({(row["peer"] is not None, label(row)) for row in shown}):
        own = [row for row in shown if label(row) == name]
        speed = {row["N"]: f"{row['tflops']:.3g}" for row in own}
        error = f"{max(row['error'] for row in own):.1e}"
        lines.append([name, *(speed.get(N, "–") for N in lengths), _of_best_peer(own, rows), error])
    how = f"TFLOP/s, medians of at least {min(row['reps'] for row in shown)} interleaved calls"
    share = "of the best peer: median over N of the speed divided by the fastest peer's in the same run"
    caption = f"{how}; {share}; error: largest difference from float64. {machines(shown)}"
    return lines, 1, caption


def _of_best_peer(own, rows):
    """A kernel's speed as a share of the fastest peer's in the same run, median over N; – for a peer."""
    shares = []
    for row in own:
        here = row["run"], setting(row)
        peers = [other["tflops"] for other in rows if other["peer"] and (other["run"], setting(other)) == here]
        if row["peer"] is None and peers:
            shares.append(row["tflops"] / max(peers))
    return f"{statistics.median(shares):.0%}" if shares else "–"


def of_last_run(rows):
    """Of each setting the rows of the last run in which a kernel was measured there."""
    last = {setting(row): row["run"] for row in rows if row["kernel"]}
    return [row for row in rows if last.get(setting(row)) == row["run"]]


def loads(rows):
    """Of sustained rows: for each pass and size a line for each kernel, then each peer."""
    rows = of_last_run(rows)
    lines = [["measured", "kernel", "TFLOP/s", "MHz", "W", "TFLOP/s a GHz", "J/TFLOP"]]
    for row in sorted(rows, key=lambda row: (row["pass"] != "fwd", -row["D"], row["causal"], bool(row["peer"]))):
        size = f"{row['pass']}, D={row['D']}, {'causal' if row['causal'] else 'full'}"
        load = f"{row['clock_mhz']:.0f}", f"{row['watts']:.0f}"
        speed, *derived = (f"{x:.3g}" for x in (row["tflops"], timing.work_a_clock(row), timing.energy(row)))
        lines.append([size, label(row), speed, *load, *derived])
    lengths = ", ".join(str(N) for N in sorted({row["N"] for row in rows}))
    how = f"N = {lengths}; about a second of calls of one candidate, then of the next"
    medians = "medians of the calls' TFLOP/s, of the SM clock and of the power meanwhile"
    return lines, 2, f"{how}; {medians}. {machines(rows)}"


def machines(rows):
    """Hardware and versions of the rows, and for each machine the commits and days of its runs."""
    found = {}
    for row in rows:
        versions = (f"{name} {row[field]}" for name, field in VERSIONS.items() if isinstance(row[field], str))
        where = f"{row['gpu']}, {', '.join(versions)}"
        found.setdefault(where, {})[f"{(row['commit'] or 'unknown')[:7]} ({row['date']})"] = True
    runs = {where: f"commit{'' if len(some) == 1 else 's'} {', '.join(some)}" for where, some in found.items()}
    return "; ".join(f"{where}, {some}" for where, some in runs.items())


def counters(folder=results.COMMITTED):
    """The recorded profile: a line for each kernel, with what the hardware counted while it ran once."""
    record, found = results.read_record("profile", folder=folder), profile.read(folder)
    if not found:
        return EMPTY
    lines = [["kernel", *COUNTED, "registers a thread", "warps wait most for"]]
    for rung, counted in found.items():
        numbers = (counted[name] / unit for name, unit in COUNTED.values())
        numbers = (f"{n:.0f}" if n >= 100 else f"{n:.3g}" for n in numbers)
        reasons = [f"{name} {share:.0%}" for name, share in profile.waits(counted).items() if name != "selected"][:3]
        name = f"02 {record['rungs'][rung]['kernel']}"
        lines.append([name, *numbers, f"{counted['registers']:.0f}", ", ".join(reasons)])
    size = ", ".join(f"{name} = {record['size'][name]}" for name in ("B", "H", "N", "D"))
    how = f"{size}, bfloat16, without a mask; read by ncu {record['ncu']}. {machines([record])}"
    return f"{in_markdown(lines, 1)}\n{how}.\n"


COUNTED = {  # the column: (the counter's name, what its numbers are divided by)
    "time, µs": ("nanoseconds", 1e3),
    "tensor cores, % of the cycles": ("tensor_pipe", 1),
    "exp units, %": ("exp_units", 1),
    "instructions issued, % of the slots": ("issue_slots", 1),
    "device memory, % of its peak": ("dram_throughput", 1),
    "wavefronts of shared memory, millions": ("shared_wavefronts", 1e6),
    "of them for bank conflicts": ("bank_conflicts", 1e6),
    "warps on the SM, % of the most": ("occupancy", 1),
}


# --- pictures, lines and the command ------------------------------------------------------------------------


def ladder_in(picture):
    """What the picture was drawn from, as `plots.ladder_numbers` gives it; None if there is no such file."""
    if not picture.exists():
        return None
    with Image.open(picture) as image:
        return json.loads(image.text.get("Description", "null"))


def draw(rows, stage, picture):
    """Writes the picture with its numbers inside, or removes it where the rows do not suffice."""
    if numbers := plots.ladder_numbers(rows, stage):
        picture.parent.mkdir(parents=True, exist_ok=True)
        plots.ladder(rows, stage).savefig(picture, dpi=110, metadata={"Description": json.dumps(numbers)})
    else:
        picture.unlink(missing_ok=True)


def line(row):
    """A row as a line of text. The ± is half the way from the 20th to the 80th percentile, in % of the median."""
    what = " ".join(f"{name}={row[name]}" for name in ("B", "H", "N", "D")) + (" causal" if row["causal"] else "")
    if row["options"]:
        what += f", {row['options'].get('feature', row['options'])}"
    spread = 50 * (row["ms_p80"] - row["ms_p20"]) / row["ms_median"]
    # Where there is one query, reading the keys is all that counts.
    reached = f"{row['tflops']:.3g} TFLOP/s" if row["N"] > 1 else f"{cost.bandwidth(row):.3g} TB/s"
    reached += f" at {row['clock_mhz']:.0f} MHz and {row['watts']:.0f} W" if row["timing"] == "sustained" else ""
    speed = f"{row['ms_median']:8.3g} ms ±{spread:.1f}%, {reached}, error {row['error']:.0e}"
    return f"{label(row):24} {row['pass']} {row['dtype']} {what}: {speed}"


def main(
    check: Annotated[bool, typer.Option(help="Write nothing; exit with 1 if a page is out of date.")] = False,
    root: Annotated[Path, typer.Option(help="The repository.")] = results.ROOT,
):
    """Writes the measured rows into the tables of README.md and steps/bench/results/README.md."""
    folder = root / results.COMMITTED.relative_to(results.ROOT)
    of_one = results.read(folder) + results.read(folder, timing="sustained")
    measured = of_one + results.read(folder, several_gpus=True)
    shown = results.fresh(measured, root)
    kept = set(map(id, shown))
    stale = [row for row in measured if id(row) not in kept]
    print(f"{len(measured)} rows, {len(stale)} of them stale: their kernels have changed since.")
    for name, count in Counter(map(label, stale)).items():
        print(f"  {name}: {count}")
    texts = {page: (root / page).read_text() for page in PAGES}
    new = {page: render(text, shown, stale, page) for page, text in texts.items()}
    new = {page: _PROFILE.sub(lambda m: m[1] + counters(folder) + m[2], text) for page, text in new.items()}
    drawn = all(ladder_in(root / path) == plots.ladder_numbers(shown, stage) for stage, path in PICTURES.items())
    if new == texts and drawn:
        print(f"{' and '.join(PAGES)} and their pictures are up to date.")
    elif check:
        print(f"{' and '.join(PAGES)} or a picture is out of date: run `make report`.")
        raise typer.Exit(1)
    else:
        for page, text in new.items():
            (root / page).write_text(text)
        for stage, path in PICTURES.items():
            draw(shown, stage, root / path)
        print(f"{' and '.join(PAGES)} rewritten.")


if __name__ == "__main__":
    typer.run(main)
