"""`python -m reference.bench.report`: writes the measured rows into README.md's tables.

A table stands between two markers; the first says by field=value pairs which rows it shows:

    <!-- results: gpu=nvidia-h200 pass=fwd dtype=bf16 D=128 causal=false -->
    <!-- /results -->

The picture of stage 02's rungs, notebooks/figures/ladder.png, stands between <!-- ladder --> and <!-- /ladder -->; it carries
its numbers inside, so that a picture of other rows is noticed.

Rows whose kernel has changed since they were measured are stale: they are listed, README shows none of them, and says so.
--check writes nothing and exits with 1 if README or the picture would change.
"""

import argparse
import json
import re
import statistics
import sys
from pathlib import Path

from PIL import Image
from rich import box
from rich.console import Console
from rich.table import Table

from reference.bench import rows as results
from reference.bench.source import fresh

_SECTION = re.compile(r"(<!-- results:(.*?)-->\n).*?(<!-- /results -->)", re.S)
_LADDER = re.compile(r"(<!-- ladder -->\n).*?(<!-- /ladder -->)", re.S)
EMPTY = "_Not measured yet._\n"
PICTURE = Path("notebooks/figures/ladder.png")
ALT = "TFLOP/s of stage 02's rungs, forward and backward, FlashAttention-2 and cuDNN as lines; right axis: % of a matrix product."


def render(text, rows, stale=()):
    """`text` with each section filled from `rows`, naming those who have stale ones only. ValueError for an unknown field."""
    numbers = ladder(rows)
    text = _LADDER.sub(lambda match: match[1] + (f"![{ALT}]({PICTURE})\n" if numbers else EMPTY) + match[2], text)

    def filled(match):
        begin, conditions, end = match.groups()
        shown, hidden = (select(some, _conditions(conditions)) for some in (rows, stale))
        changed = sorted({label(row) for row in hidden if row["kernel"]} - set(map(label, shown)))
        note = f"\nChanged since it was measured, and not shown: {', '.join(changed)}.\n" if changed else ""
        return begin + markdown(shown) + note + end

    return _SECTION.sub(filled, text)


def ladder(rows):
    """What the picture of stage 02's rungs shows, as JSON; "" if the rows do not suffice for one."""
    from reference.bench.plots import ladder_numbers

    numbers = ladder_numbers(rows)
    return json.dumps(numbers) if numbers else ""


def ladder_in(picture):
    """The numbers that a picture was drawn from; "" if there is no such file."""
    if not picture.exists():
        return ""
    with Image.open(picture) as image:
        return image.text.get("Description", "")


def draw(rows, picture):
    """Writes the picture with its numbers inside, or removes it where the rows do not suffice."""
    from reference.bench import plots

    if numbers := ladder(rows):
        picture.parent.mkdir(parents=True, exist_ok=True)
        plots.ladder(rows).savefig(picture, dpi=110, metadata={"Description": numbers})
    else:
        picture.unlink(missing_ok=True)


def _conditions(marker):
    pairs = dict(pair.split("=", 1) for pair in marker.split())
    unknown = set(pairs) - set(results.FIELDS)
    if unknown:
        raise ValueError(f"<!-- results:{marker}-->: no such field: {', '.join(sorted(unknown))}.")
    return pairs


def select(rows, conditions):
    """The rows that read as `conditions` say: {"D": "128", "causal": "false", "gpu": "nvidia-h200"}."""
    return [row for row in rows if all(_text(row, name) == value for name, value in conditions.items())]


def _text(row, name):
    value = row[name]
    if name == "gpu":
        return results.slug(value)
    return str(value).lower() if isinstance(value, bool) or value is None else str(value)


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


def label(row):
    """Who a row is about: "02 fwd_0_scalar", or the peer's name."""
    return row["peer"] or f"{row['stage'][:2]} {row['kernel']}"


def _of_best_peer(own, rows):
    """A kernel's speed as a share of the fastest peer's in the same run, median over N; – for a peer."""
    shares = []
    for row in own:
        peers = [other["tflops"] for other in rows if other["peer"] is not None and _side_by_side(row, other)]
        if row["peer"] is None and peers:
            shares.append(row["tflops"] / max(peers))
    return f"{statistics.median(shares):.0%}" if shares else "–"


def _side_by_side(row, other):
    return all(row[name] == other[name] for name in ("run", *results.SETTING))


def _caption(rows):
    """Units, hardware and versions of the rows; of runs on the same machine only the commits and days are told apart."""
    machines = {}
    for row in rows:
        where = f"{row['gpu']}, driver {row['driver']}, CUDA {row['cuda']}, torch {row['torch']}, triton {row['triton']}"
        machines.setdefault(where, {})[f"{(row['commit'] or 'unknown')[:7]} ({row['date']})"] = True
    origins = (f"{where}, commit{'s' * (len(found) > 1)} {', '.join(found)}" for where, found in machines.items())
    how = f"TFLOP/s, medians of at least {results.MIN_REPS} interleaved calls"
    return f"{how}; error: largest difference from float64. {'; '.join(origins)}."


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
        shown.add_row(label(row), f"{row['pass']} {row['dtype']}", size, *speed)
    return shown


def main(arguments=None):
    """Exit code: 0, or 1 when --check finds that README does not show what the rows say."""
    parser = argparse.ArgumentParser(prog="python -m reference.bench.report", description=__doc__.split("\n")[0])
    parser.add_argument("--check", action="store_true", help="write nothing; exit with 1 if README is out of date")
    parser.add_argument("--root", type=Path, default=results.ROOT, help="the repository (default: this one)")
    options = parser.parse_args(arguments)
    console = Console()
    readme = options.root / "README.md"
    measured = results.read(options.root / results.COMMITTED.relative_to(results.ROOT))
    shown = fresh(measured, options.root)
    stale = [row for row in measured if row not in shown]
    if stale:
        console.print(table(stale, "Stale: these kernels have changed since they were measured"))
    console.print(f"{len(measured)} rows, {len(stale)} of them stale.")
    text = readme.read_text() if readme.exists() else ""
    if not _SECTION.search(text):
        what = "no section between <!-- results: ... --> and <!-- /results -->: nothing to write"
        console.print(f"{readme} has {what}.", soft_wrap=True)
        return 0
    new, picture = render(text, shown, stale), options.root / PICTURE
    if new == text and ladder_in(picture) == ladder(shown):
        console.print("README.md and its pictures are up to date.")
        return 0
    if options.check:
        console.print("README.md or its picture is out of date: run `make report`.")
        return 1
    readme.write_text(new)
    draw(shown, picture)
    console.print("README.md rewritten.")
    return 0


if __name__ == "__main__":
    sys.exit(main())
