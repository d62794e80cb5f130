"""`python -m steps.bench.report`: writes the measured rows into README.md's tables.

A table stands between two markers; the first says by field=value pairs which rows it shows:

    <!-- results: gpu=nvidia-h200 pass=fwd dtype=bf16 D=128 causal=false -->
    <!-- /results -->

The picture of stage 02's rungs, notebooks/figures/ladder.png, stands between <!-- ladder --> and <!-- /ladder -->. It
carries its numbers inside, so that a picture of other rows is noticed.

Rows whose kernel has changed since they were measured are stale: they are listed, README shows none of them, and says
so. --check writes nothing and exits with 1 if README or the picture would change.
"""

import json
import re
import statistics
from collections import Counter
from pathlib import Path
from typing import Annotated

import typer
from PIL import Image
from rich import box
from rich.console import Console
from rich.table import Table

from steps.bench import plots
from steps.bench import rows as results
from steps.bench.fingerprint import fresh
from steps.bench.rows import label

_SECTION = re.compile(r"(<!-- results:(.*?)-->\n).*?(<!-- /results -->)", re.S)
_LADDER = re.compile(r"(<!-- ladder -->\n).*?(<!-- /ladder -->)", re.S)
EMPTY = "_Not measured yet._\n"
PICTURE = Path("notebooks/figures/ladder.png")
ALT = (
    "TFLOP/s of stage 02's rungs, forward and backward, FlashAttention-2 and cuDNN as lines; "
    "right axis: % of a matrix product."
)
VERSIONS = {"driver": "driver", "CUDA": "cuda", "torch": "torch", "triton": "triton"}
USUAL = {"options": "{}", "timing": "interleaved"}  # what a marker means that names neither


def render(text, rows, stale=()):
    """`text` with each section filled from `rows`, and a note of who has only stale ones."""
    picture = f"![{ALT}]({PICTURE})\n" if ladder(rows) else EMPTY
    text = _LADDER.sub(lambda match: match[1] + picture + match[2], text)

    def filled(match):
        begin, marker, end = match.groups()
        shown, hidden = (select(some, marker) for some in (rows, stale))
        changed = sorted({label(row) for row in hidden if row["kernel"]} - set(map(label, shown)))
        note = f"\nChanged since it was measured, and not shown: {', '.join(changed)}.\n" if changed else ""
        return begin + markdown(shown) + note + end

    return _SECTION.sub(filled, text)


def select(rows, marker):
    """The rows that read as a marker says, "D=128 causal=false gpu=nvidia-h200"; ValueError for an unknown field."""
    conditions = dict(pair.split("=", 1) for pair in marker.split())
    if unknown := sorted(set(conditions) - set(results.FIELDS)):
        raise ValueError(f"<!-- results:{marker}-->: no such field: {', '.join(unknown)}.")
    return [row for row in rows if all(_text(row, name) == value for name, value in {**USUAL, **conditions}.items())]


def _text(row, name):
    """A field as a marker writes it."""
    if name == "gpu":
        return results.slug(row["gpu"])
    return row[name] if isinstance(row[name], str) else json.dumps(row[name], sort_keys=True)


def markdown(rows):
    """A markdown table: a line for each kernel, then each peer; TFLOP/s for each N; error; provenance."""
    if not rows:
        return EMPTY
    shown = results.latest(rows)
    lengths = sorted({row["N"] for row in shown})
    lines = [
        ["kernel", *(f"N={N}" for N in lengths), "of the best peer", "error"],
        ["---", *("---:" for _ in lengths), "---:", "---:"],
    ]
    for _, name in sorted({(row["peer"] is not None, label(row)) for row in shown}):
        own = [row for row in shown if label(row) == name]
        speed = {row["N"]: f"{row['tflops']:.3g}" for row in own}
        error = f"{max(row['error'] for row in own):.1e}"
        lines.append([name, *(speed.get(N, "–") for N in lengths), _of_best_peer(own, rows), error])
    table = "\n".join(f"| {' | '.join(line)} |" for line in lines)
    return f"{table}\n\n{_caption(shown)}\n"


def _of_best_peer(own, rows):
    """A kernel's speed as a share of the fastest peer's in the same run, median over N; – for a peer."""
    shares = []
    for row in own:
        here = row["run"], results.setting(row)
        peers = [other["tflops"] for other in rows if other["peer"] and (other["run"], results.setting(other)) == here]
        if row["peer"] is None and peers:
            shares.append(row["tflops"] / max(peers))
    return f"{statistics.median(shares):.0%}" if shares else "–"


def _caption(rows):
    """Units, hardware and versions of the rows, and for each machine the commits and days of its runs."""
    machines = {}
    for row in rows:
        versions = (f"{name} {row[field]}" for name, field in VERSIONS.items())
        where = f"{row['gpu']}, {', '.join(versions)}"
        machines.setdefault(where, {})[f"{(row['commit'] or 'unknown')[:7]} ({row['date']})"] = True
    runs = {where: f"commit{'' if len(found) == 1 else 's'} {', '.join(found)}" for where, found in machines.items()}
    origins = (f"{where}, {found}" for where, found in runs.items())
    how = f"TFLOP/s, medians of at least {results.MIN_REPS} {rows[0]['timing']} calls"
    return f"{how}; error: largest difference from float64. {'; '.join(origins)}."


def ladder(rows):
    """What the picture of stage 02's rungs shows, as JSON; "" if the rows do not suffice for one."""
    numbers = plots.ladder_numbers(rows)
    return json.dumps(numbers) if numbers else ""


def ladder_in(picture):
    """The numbers that a picture was drawn from; "" if there is no such file."""
    if not picture.exists():
        return ""
    with Image.open(picture) as image:
        return image.text.get("Description", "")


def draw(rows, picture):
    """Writes the picture with its numbers inside, or removes it where the rows do not suffice."""
    if numbers := ladder(rows):
        picture.parent.mkdir(parents=True, exist_ok=True)
        plots.ladder(rows).savefig(picture, dpi=110, metadata={"Description": numbers})
    else:
        picture.unlink(missing_ok=True)


def table(rows, title=""):
    """The rows as a rich Table, in the order given. spread: half the way from p20 to p80, in % of ms."""
    shown = Table(title=title, title_justify="left", box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0))
    shown.add_column("kernel or peer", overflow="fold")
    shown.add_column("pass, dtype")
    shown.add_column("B, H, N, D")
    for name in ("ms", "spread", "TFLOP/s", "error"):
        shown.add_column(name, justify="right")
    for row in rows:
        size = ", ".join(str(row[name]) for name in ("B", "H", "N", "D")) + (" causal" if row["causal"] else "")
        spread = f"±{50 * (row['ms_p80'] - row['ms_p20']) / row['ms_median']:.1f}%"
        speed = (f"{row['ms_median']:.3g}", spread, f"{row['tflops']:.3g}", f"{row['error']:.0e}")
        shown.add_row(label(row), f"{row['pass']}, {row['dtype']}", size, *speed)
    return shown


def main(
    check: Annotated[bool, typer.Option(help="Write nothing; exit with 1 if README is out of date.")] = False,
    root: Annotated[Path, typer.Option(help="The repository.")] = results.ROOT,
):
    """Writes the measured rows into README.md's tables."""
    console, readme, picture = Console(soft_wrap=True), root / "README.md", root / PICTURE
    measured = results.read(root / results.COMMITTED.relative_to(results.ROOT))
    shown = fresh(measured, root)
    kept = set(map(id, shown))
    stale = [row for row in measured if id(row) not in kept]
    console.print(f"{len(measured)} rows, {len(stale)} of them stale: their kernels have changed since.")
    for name, count in Counter(map(label, stale)).items():
        console.print(f"  {name}: {count}")
    text = readme.read_text()
    new = render(text, shown, stale)
    if new == text and ladder_in(picture) == ladder(shown):
        console.print("README.md and its pictures are up to date.")
    elif check:
        console.print("README.md or its picture is out of date: run `make report`.")
        raise typer.Exit(1)
    else:
        readme.write_text(new)
        draw(shown, picture)
        console.print("README.md rewritten.")


if __name__ == "__main__":
    typer.run(main)
