"""`python -m steps.course.bench PLAN ...`: measures plans, for maintainers. `python -m steps bench` is for everybody.

    python -m steps.course.bench fast bwd --record     adds the rows of two plans to the committed ones
    python -m steps.course.bench fast --sustained      what a plan has at N = 16k, under sustained load
    python -m steps.course.bench ring-32k              a part of stage 04's plan, on all GPUs of this machine

`python -m steps.course.bench.ablations`, `.profile`, `.tune` and `.report` are commands, too. STEPS_COMMIT names what
is measured on a machine that has no git history.
"""

from typing import Annotated

import typer

from steps import engine
from steps.course.bench import grid, report, ring, rows
from steps.places import require_clone

PLANS = grid.PLANS | ring.PLANS


def show(found, folder=rows.OWN, beside=False):
    """Writes rows as they come, and prints them; beside: and then what is committed at the same settings."""
    shown = []
    for row in found:
        if "kind" in row:  # a record, such as that of a profiler
            print("written:", rows.write_record(row.pop("kind"), row, folder))
            continue
        rows.append(row, folder)
        print(report.line(row), flush=True)
        shown.append(row)
    settings, timed = set(map(rows.setting, shown)), {row["timing"] for row in shown}
    for row in rows.latest([row for way in sorted(timed) for row in rows.read(timing=way)]) if beside else ():
        if rows.setting(row) in settings:
            print("committed:", report.line(row))


def main(
    plans: Annotated[list[str], typer.Argument(help=f"One or more of {', '.join(PLANS)}.")],
    record: Annotated[bool, typer.Option("--record", help="Write to the committed rows, not to my/results.")] = False,
    sustained: Annotated[bool, typer.Option("--sustained", help="Time each candidate alone for a second.")] = False,
):
    """Measures plans on this machine's GPUs."""
    if unknown := [name for name in plans if name not in PLANS]:
        raise typer.BadParameter(f"there is no {unknown[0]!r}; there are {', '.join(PLANS)}", param_hint="PLANS")
    if record:
        require_clone("--record")
    if engine.name != "cuda":
        raise SystemExit("This needs a GPU: simulators say nothing about speed.")
    parts = [part for name in plans for part in PLANS[name]]
    for part in grid.sustained(parts) if sustained else parts:
        show(part(), rows.COMMITTED if record else rows.OWN)


if __name__ == "__main__":
    typer.run(main)
