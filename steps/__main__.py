"""The command line: python -m steps demo | check | hint | solution | mutants | bench."""

import json
import string
import time
from pathlib import Path
from typing import Annotated

import torch
import typer
from rich import box
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from steps import catalogue, engine

ABOUT = "FlashAttention in five stages."
app = typer.Typer(add_completion=False, no_args_is_help=True, help=ABOUT, rich_markup_mode=None)
console = Console()
Stage = Annotated[str | None, typer.Option(help="One stage only: 00, 01, 02, 03 or 04.")]


@app.callback()
def settings():
    """FlashAttention in five stages."""
    if engine.name == "cpu":
        torch.set_num_threads(1)  # The tensors are so small that starting a second thread costs more than it saves.


def chosen(stage):
    """The numbers of the stages to run; ends the program for one that does not exist."""
    if stage is not None and stage not in catalogue.STAGES:
        known = ", ".join(catalogue.STAGES)
        raise typer.BadParameter(f"there is no stage {stage!r}; there are {known}", param_hint="--stage")
    return [stage] if stage else list(catalogue.STAGES)


@app.command()
def demo(
    stage: Stage = None,
    json_file: Annotated[Path | None, typer.Option("--json", help="Write the rows to this file too.")] = None,
):
    """Every stage on a trained model's attention, forward and backward, compared with the float64 reference."""
    from steps.demo import compare
    from steps.demo.model import LARGE, SMALL

    console.print(engine.describe(), highlight=False)
    numbers = chosen(stage)
    sizes = [(SMALL, numbers, False)]
    if engine.name == "cuda":
        sizes.append((LARGE, [n for n in numbers if n != "00"], True))
    rows = []
    columns = TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn()
    with Progress(*columns, console=console, transient=True) as progress:
        task = progress.add_task("", total=sum(size.steps / 50 + len(n) for size, n, _ in sizes))
        for size, wanted, timed in sizes:
            progress.update(task, description=f"training a model on {size.N} bytes at a time, {size.H} heads")
            subject = compare.Subject(size, lambda: progress.advance(task, 1 / 50))
            for number in wanted:
                progress.update(task, description=f"{catalogue.STAGES[number]}, N = {size.N}")
                rows.append(compare.compare(number, subject, timed))
                progress.advance(task)
    console.print(results(rows))
    for row in rows:
        if "reason" in row:
            console.print(f"{row['stage']} was skipped: {row['reason']}")
    if json_file:
        json_file.write_text(json.dumps(rows, indent=1))
    if any(row["verdict"] == "FAILS" for row in rows):
        raise typer.Exit(1)
    console.print(NEXT, highlight=False)


NEXT = """
What next
  read      make lab, then open my/00_naive.ipynb: what attention computes, and how to do it without the N x N matrix
  exercise  python -m steps check 00 writes the stage's exercises to my/, and checks them from then on
  test      make test ARGS=tests/test_step00_naive.py: what the stage promises, case by case"""


CAPTION = "Under each error: its tolerance. Under a speed: SDPA's."


def results(rows):
    """The demo's table, 80 columns wide. Each cell has an error, and below it the tolerance."""
    table = Table(box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0), caption=CAPTION)
    speeds = any("tflops" in row for row in rows)
    table.add_column("stage", no_wrap=True)
    for name in ("out", "lse", "dq", "dk", "dv", "loss", "model", "s"):
        table.add_column(name, justify="right")
    if speeds:
        table.add_column("TFLOP\n/s", justify="right")
    table.add_column("verdict")
    for row in rows:
        cells = [f"{row['stage'].removeprefix('step')}\n{row['engine']}\n{'x'.join(map(str, row['shape']))}"]
        if row["verdict"] == "skipped":
            empty = [""] * (len(table.columns) - 2)
            table.add_row(*cells, *empty, "skipped", end_section=True)
            continue
        pairs = [(row["errors"][n], row["tolerances"][n]) for n in ("out", "lse", "dq", "dk", "dv")]
        pairs.append((row["loss_difference"], row["loss_tolerance"]))
        pairs.append((row["gradient"]["difference"], row["gradient"]["tolerance"]))
        cells += [f"{error:.0e}\n{tolerance:.0e}".replace("e-0", "e-") for error, tolerance in pairs]
        cells.append(f"{row['seconds']:.1f}")
        if speeds:
            cells.append(f"{row['tflops']:.3g}\n({row['sdpa_tflops']:.3g})" if "tflops" in row else "")
        table.add_row(*cells, row["verdict"], end_section=True)
    return table


Task = Annotated[str, typer.Argument(metavar="EXERCISE", help="Such as 00.2, or 00.bug1 for a hunt.")]
Several = Annotated[
    str, typer.Argument(metavar="EXERCISE|STAGE", help="Such as 00.2, 00.bug1, or 00 for a whole stage.")
]
Level = Annotated[int, typer.Argument(help="1 a question, 2 the formula, 3 pseudo-code.", min=1, max=3)]


@app.command()
def check(what: Several):
    """Runs what you have written in my/ inside the stage. The first call writes the files to fill in."""
    from steps import workbook
    from steps.workbook import exercises

    ids = [task.id for task in exercises.of_stage(what)] or [task(what).id]
    reports = [workbook.check(id) for id in ids]
    for report in reports:
        style = {"passed": "green", "wrong": "red", "error": "red"}.get(report.verdict, "")
        head, _, rest = repr(report).partition("\n")
        console.print(head, style=style, markup=False, highlight=False)
        console.print(rest, markup=False, highlight=False, soft_wrap=True)
    if any(report.failed for report in reports):
        raise typer.Exit(1)


@app.command()
def hint(id: Task, level: Level = 1):
    """A hint for an exercise."""
    from steps import workbook

    console.print(workbook.hint(task(id).id, level), markup=False, highlight=False)


@app.command()
def solution(id: Task):
    """The stage's own function."""
    from steps import workbook

    console.print(workbook.solution(task(id).id), markup=False, highlight=False, soft_wrap=True)


def task(id):
    """The exercise or hunt; ends the program for one that does not exist."""
    from steps.workbook import exercises

    try:
        return exercises.find(id)
    except KeyError as e:
        raise typer.BadParameter(e.args[0]) from None


@app.command()
def mutants(stage: Stage = None):
    """Shows which of the contract's cases kills which planted mistake, stage by stage."""
    from reference import mutants as planted

    failed = False
    for number in chosen(stage):
        if reason := catalogue.unavailable(number):
            console.print(f"{catalogue.STAGES[number]}: {reason}")
            continue
        supports = catalogue.stage(number).SUPPORTS
        matrix, twins = planted.kill_matrix(supports)
        console.print(kill_table(catalogue.STAGES[number], matrix), highlight=False)
        survivors = planted.survivors(matrix)
        failed |= bool(survivors or twins)
        for name in survivors:
            console.print(f"survives every case: {name}")
        for pair in twins:
            console.print(f"no case tells apart: {' and '.join(pair)}")
    raise typer.Exit(1 if failed else 0)


def kill_table(title, matrix):
    """The kill matrix as text, with a row a mutant and a column a case. The first line explains the marks."""
    names = list(next(iter(matrix.values())))
    letters = (string.ascii_lowercase + string.ascii_uppercase)[: len(names)]
    marks = {"killed": "x", "survives": ".", "n/a": " "}
    width = max(map(len, matrix)) + 1
    lines = [f"{title}: x killed, . survives, blank: makes no difference there", f"{'':{width}}{letters}"]
    lines += [f"{mutant:{width}}{''.join(marks[row[name]] for name in names)}" for mutant, row in matrix.items()]
    return "\n".join([*lines, ", ".join(f"{letter} {name}" for letter, name in zip(letters, names, strict=True))])


@app.command()
def bench(
    stage: Stage = None,
    kernel: Annotated[str | None, typer.Option(help="One rung's word, such as fused.")] = None,
    grid: Annotated[str, typer.Option(help="quick, or standard: the papers' sizes.")] = "quick",
    dtype: Annotated[list[str] | None, typer.Option(help="fp32, fp16, bf16; by default bf16 or else fp32.")] = None,
    peer: Annotated[list[str] | None, typer.Option(help="Peers, such as sdpa-flash; by default all.")] = None,
    limit: Annotated[float, typer.Option(help="Milliseconds; who takes longer for one call is left out.")] = 1000,
    record: Annotated[bool, typer.Option(help="For maintainers: write to the committed rows.")] = False,
    plan: Annotated[list[str] | None, typer.Option(help="For maintainers: a part of what is recorded.")] = None,
    out: Annotated[Path | None, typer.Option(help="Another folder for the rows.")] = None,
    minutes: Annotated[float, typer.Option(help="After these no more sizes are begun.")] = 60,
    runs: Annotated[int, typer.Option(help="How often a plan is measured, each time as a run of its own.")] = 1,
    commit: Annotated[str | None, typer.Option(help="The commit to note where there is no git history.")] = None,
):
    """Measures the stages' kernels beside PyTorch's own on this GPU, and shows them beside the committed rows.

    What is measured is added to my/results.
    """
    from steps.bench import grid as grids
    from steps.bench import plans, report, rows
    from steps.bench.peers import PEERS

    asked = {"peer": (peer or (), PEERS), "grid": ([grid], grids.GRIDS), "plan": (plan or (), plans.PLANS)}
    for option, (values, known) in asked.items():
        if unknown := set(values) - set(known):
            problem = f"there is no {unknown.pop()!r}; there are {', '.join(known)}"
            raise typer.BadParameter(problem, param_hint=f"--{option}")
    if engine.name != "cuda":
        console.print("bench needs a GPU, because simulators say nothing about speed. Rows are in steps/bench/results.")
        raise typer.Exit(1)
    options = dict(limit_ms=limit, until=time.monotonic() + 60 * minutes, commit=commit, say=console.print)
    if plan:
        found = plans.record_parts([part for name in plan for part in plans.PLANS[name]] * runs, **options)
    else:
        numbers = [number for number in chosen(stage) if number in ("01", "02", "03")]
        candidates = [candidate for number in numbers for candidate in plans.entrants(number, kernel)]
        best = {"bf16" if "bf16" in c.dtypes else "fp32" for c in candidates}
        options |= dict(passes=("fwd", "bwd"), dtypes=dtype or sorted(best))
        found = grids.measure(candidates, peer or tuple(PEERS), grids.GRIDS[grid], **options)
    committed, measured = rows.read(), []
    for row in found:
        rows.append([row], out or (rows.COMMITTED if record else rows.OWN))
        measured.append(row)
    console.print(report.table(measured, "measured now"))
    settings = set(map(rows.setting, measured))
    beside = [row for row in rows.latest(committed) if rows.setting(row) in settings]
    if beside and not plan:
        console.print(report.table(beside, "committed, the same sizes on the same GPU"))


if __name__ == "__main__":
    app()
