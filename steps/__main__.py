"""The command line: python -m steps, or flash-steps, and a command: demo, check, hint, solution, grade, verify ..."""

import difflib
import json
import os
import platform
import re
import string
import sys
import textwrap
import time
from importlib import metadata
from pathlib import Path
from typing import Annotated

import typer
from rich import box
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table
from rich.text import Text
from typer.core import TyperGroup

from steps import catalogue, engine, places


class Commands(TyperGroup):
    """The commands, listed with the whole first paragraph of their help, which would otherwise be cut off."""

    def get_command(self, context, name):
        command = super().get_command(context, name)
        if command and command.help:
            command.short_help = " ".join(command.help.split("\n\n")[0].split())
        return command


app = typer.Typer(cls=Commands, add_completion=False, no_args_is_help=True, rich_markup_mode=None)
console = Console()
Stage = Annotated[str | None, typer.Option(help="One stage only: 00, 01, 02, 03 or 04.")]


# They compute nothing in this process, so they need not wait for torch.
WITHOUT_TORCH = "check", "hint", "solution", "grade"


@app.callback()
def settings(context: typer.Context):
    """FlashAttention in five stages."""
    if engine.name == "cpu" and context.invoked_subcommand not in WITHOUT_TORCH:
        import torch

        torch.set_num_threads(1)  # The tensors are so small that starting a second thread costs more than it saves.


def chosen(stage):
    """The numbers of the stages to run; ends the program for one that does not exist."""
    if stage is not None and stage not in catalogue.STAGES:
        known = ", ".join(catalogue.STAGES)
        raise typer.BadParameter(f"there is no stage {stage!r}; there are {known}", param_hint="--stage")
    return [stage] if stage else list(catalogue.STAGES)


def require_engine():
    """Ends the program with a line where the engine runs nothing."""
    try:
        engine.check_runs()
    except RuntimeError as e:
        say(str(e))
        raise typer.Exit(1) from None


@app.command()
def demo(
    stage: Stage = None,
    json_file: Annotated[Path | None, typer.Option("--json", help="Write the rows to this file too.")] = None,
):
    """Every stage on a trained model's attention, forward and backward, compared with the float64 reference."""
    from steps.course.demo import compare
    from steps.course.demo.model import LARGE, SMALL

    numbers = chosen(stage)
    require_engine()
    say(engine.describe(), "", *paragraph(DOES))
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
    show_table(results(rows))
    say(*COLUMNS.splitlines())
    if any("tflops" in row for row in rows):
        say("TFLOP/s      speed of the forward, and below it SDPA's, which is PyTorch's own attention")
    for row in rows:
        if "reason" in row:
            say(*paragraph(f"{row['stage']} was skipped: {row['reason']}"))
    if json_file:
        json_file.write_text(json.dumps(rows, indent=1))
    if any(row["verdict"] == "FAILS" for row in rows):
        raise typer.Exit(1)
    say("", "What next", *(NEXT if places.IS_CLONE else NEXT_WITHOUT_A_CLONE).splitlines())


DOES = (
    "The demo trains a small language model on a copy of the course's own pages. Then each stage computes the model's "
    "attention, forward and backward. Each result is compared with the same in float64: the upper number is the "
    "largest difference, the lower one how large it may be."
)
COLUMNS = """\
stage        below it: what runs it; batch x heads x tokens x head_dim
out, lse     the result of attention, and log of each row's softmax sum
dq, dk, dv   the gradients of attention's inputs
loss, model  a training step with this attention: its loss, its worst gradient
s            seconds. Without a GPU kernels are simulated: this is no speed"""
EXERCISE = """\
  exercise  python -m steps check 00   writes the exercises of stage 00 to my/,
                                       and checks them from then on
"""
NEXT = f"""\
  read      make lab, then open my/00_naive.ipynb
{EXERCISE}  test      make test ARGS=tests/test_step00_naive.py"""
NEXT_WITHOUT_A_CLONE = f"""\
{EXERCISE}  read      the notebooks and the tests are in a clone of the course only"""


def width():
    """How wide text is wrapped: as wide as the terminal, but not so narrow that nobody could read it."""
    return max(20, console.width)


def paragraph(text):
    """The text in lines as wide as the terminal, at most 80."""
    return textwrap.wrap(text, min(80, width()))


def show_table(table):
    """Prints a table in its full width. Where the terminal is narrower, rich would leave out what is in the cells."""
    table.width = console.measure(table, options=console.options.update(width=10_000)).maximum
    console.print(table, crop=False)


def results(rows):
    """The demo's table, 80 columns wide. Each cell has an error, and below it the tolerance."""
    speeds = any("tflops" in row for row in rows)
    table = Table(box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0))
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
    from steps.course import workbook
    from steps.course.workbook import exercises

    ids = [task.id for task in exercises.of_stage(what)] or [task(what).id]
    reports = [workbook.check(id) for id in ids]
    for report in reports:
        style = {"passed": "green", "wrong": "red", "error": "red"}.get(report.verdict, "")
        head, _, rest = repr(report).partition("\n")
        console.print(head, style=style, markup=False, highlight=False, soft_wrap=True)
        console.print(rest, markup=False, highlight=False, soft_wrap=True)
        if report.verdict == "passed":
            exercises.note_passed(exercises.find(report.id))
    if any(report.failed for report in reports):
        raise typer.Exit(1)


@app.command()
def hint(
    id: Task,
    level: Level = 1,
    code: Annotated[bool, typer.Option("--code", help="Of a hunt: the complaint and the whole broken kernel.")] = False,
):
    """A hint for an exercise, or the broken kernel of a hunt."""
    from steps.course import workbook
    from steps.course.workbook.exercises import Hunt

    if code:
        if not isinstance(hunt := task(id), Hunt):
            raise typer.BadParameter(f"only a hunt has a broken kernel, and {id} is none", param_hint="--code")
        return say(*textwrap.wrap(hunt.symptom, width()), "", str(workbook.show(id)))
    kept = "\N{NO-BREAK SPACE}"  # for the spaces within brackets, as in exp(s - m_new), where no line may end
    for line in str(workbook.hint(task(id).id, level)).splitlines():
        indent = " " * (len(line) - len(line.lstrip()))
        line = re.sub(r"\([^()]{1,24}\)", lambda found: found[0].replace(" ", kept), line)
        say(*(part.replace(kept, " ") for part in textwrap.wrap(line, width(), subsequent_indent=indent) or [""]))


@app.command()
def solution(id: Task):
    """The stage's own function."""
    from steps.course import workbook

    console.print(workbook.solution(task(id).id), markup=False, highlight=False, soft_wrap=True)


@app.command()
def grade(
    folder: Annotated[Path, typer.Argument(help="It has a folder for each student.", exists=True, file_okay=False)],
    stage: Stage = None,
    limit: Annotated[float, typer.Option(help="Seconds for one exercise's contract.")] = 300,
    quick: Annotated[bool, typer.Option("--quick", help="Check only, without the contract.")] = False,
    json_file: Annotated[
        Path | None,
        typer.Option("--json", help="Write all verdicts to this file after each student; what it has already is kept."),
    ] = None,
):
    """Checks the answers of a class, and runs the whole contract on the exercises that are passed.

    The folder has a folder for each student, with the files of that student's my/. They are only read, and so is your
    own my/. "passed 190/191" is an exercise that its check passes, but that fails one of the contract's 191 tests. This
    runs what students wrote: notebooks/TEACHING.md has the line that does it in a container.
    """
    from steps.course.workbook import exercises, grading

    places.require_clone("grade, which runs the tests of a stage,")
    tasks = [task for number in chosen(stage) for task in exercises.of_stage(number)]
    if not (students := grading.students(folder)):
        raise typer.BadParameter(f"there is no folder in {folder}", param_hint="FOLDER")
    for student in students:
        for file, names in grading.reaching_outside(student, tasks).items():
            say(f"{student.name}/{file} uses {', '.join(names)}: read it before you run it outside of a container.")
    earlier = json.loads(json_file.read_text()) if json_file and json_file.exists() else {}
    found = {}
    for student in students:
        begin = time.monotonic()
        found[student.name] = grading.grade(student, tasks, limit, quick, earlier.get(student.name))
        say(f"{student.name}: {grading.summary(found[student.name])} ({time.monotonic() - begin:.0f} s)")
        if json_file:
            json_file.write_text(json.dumps(earlier | found, indent=1) + "\n")
    shown = [task.id for task in tasks if any(rows[task.id]["verdict"] != "blank" for rows in found.values())]
    table = Table(box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0))
    for name in ("student", *shown):
        table.add_column(name)
    for name, rows in found.items():
        table.add_row(Text(name), *(Text(grading.cell(rows[id])) for id in shown))
    show_table(table)
    for name, rows in found.items():
        for id in shown:
            if failed := (rows[id]["contract"] or {}).get("failed"):
                say(f"{name}, {id}: fails {', '.join(failed[:3])}" + (", ..." if len(failed) > 3 else ""))


def task(id):
    """The exercise or hunt; ends the program for one that does not exist."""
    from steps.course.workbook import exercises

    try:
        return exercises.find(id)
    except KeyError as e:
        raise typer.BadParameter(e.args[0]) from None


@app.command()
def mutants(stage: Stage = None):
    """Shows which of the contract's cases kills which planted mistake, stage by stage, features included."""
    from reference import feature_mutants
    from reference import mutants as planted

    failed = False
    for number in chosen(stage):
        if reason := catalogue.unavailable(number):
            say(f"{catalogue.STAGES[number]}: {reason}")
            continue
        supports = catalogue.stage(number).SUPPORTS
        failed |= show_kills(catalogue.STAGES[number], *planted.kill_matrix(supports))
        if number == "03":
            failed |= show_kills("features", *feature_mutants.kill_matrix())
    raise typer.Exit(1 if failed else 0)


def show_kills(title, matrix, twins):
    """Prints the kill matrix, and what the cases do not notice; returns whether there is any."""
    from reference import mutants as planted

    say(kill_table(title, matrix))
    survivors = planted.survivors(matrix)
    for name in survivors:
        say(f"survives every case: {name}")
    for pair in twins:
        say(f"no case tells apart: {' and '.join(pair)}")
    return bool(survivors or twins)


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
    file: Annotated[str | None, typer.Argument(metavar="KERNEL", help="A kernel file alone: fwd_8_hopper.")] = None,
    stage: Stage = None,
    kernel: Annotated[str | None, typer.Option(help="One rung's word, such as fused.")] = None,
    grid: Annotated[str, typer.Option(help="quick, or standard: the papers' sizes.")] = "quick",
    dtype: Annotated[list[str] | None, typer.Option(help="fp32, fp16, bf16; by default bf16 or else fp32.")] = None,
    peer: Annotated[list[str] | None, typer.Option(help="Peers, such as sdpa-flash; by default all.")] = None,
    sustained: Annotated[
        bool, typer.Option("--sustained", help="Time each candidate alone for a second, at N = 16k.")
    ] = False,
):
    """Measures the stages' kernels beside PyTorch's own on this GPU, and shows them beside the committed rows.

    A kernel file that is named is first compared with the reference on a few of the contract's cases. This needs no
    GPU.

    What is measured is added to my/results. The peers fa4 and fa3, which are FlashAttention-4 and 3, take part where
    the packages flash-attn-4 and fa3-fwd are installed; fa3's backward needs flash-attn3-jax and JAX for the GPU.

    With --sustained there are clock and power beside the speed, of the best rung of stage 02, or of --stage and
    --kernel, and of the fastest peers. `python -m steps.course.bench --help` is for maintainers.
    """
    import torch

    from steps.course.bench import __main__ as measuring
    from steps.course.bench import cost, rows
    from steps.course.bench import grid as grids
    from steps.course.bench.peers import PEERS
    from steps.course.workbook import one_rung

    check_known({"peer": (peer or (), PEERS), "grid": ([grid], grids.GRIDS), "dtype": (dtype or (), cost.BYTES)})
    numbers = [number for number in chosen(stage) if number in ("01", "02", "03")]
    if kernel:
        supports = [catalogue.stage(number).SUPPORTS for number in numbers if catalogue.unavailable(number) is None]
        words = [word for each in supports for word in (*each["rungs"], *each.get("elsewhere", ()))]
        check_known({"kernel": ([kernel], dict.fromkeys(words))})
    if file:
        file = file.removesuffix(".py").removesuffix(".cu")
        files = grids.kernel_files()
        if file not in files and file in {path.stem for path in Path(__file__).parent.glob("step0*/*wd_*")}:
            raise typer.BadParameter(f"no rung that can run here has the file {file}", param_hint="KERNEL")
        check_known({"KERNEL": ([file], files)})
        stage, kernel = files[file]
        require_engine()
        check_kernel(stage, kernel)
        if engine.name != "cuda" or stage == "00":  # Stage 00 is written to be read, and takes minutes for such sizes.
            return
    if engine.name != "cuda":
        say(f"bench needs a GPU, because simulators say nothing about speed. Rows are in {rows.COMMITTED}.")
        raise typer.Exit(1)
    both = ("fwd", "bwd")
    if sustained:
        number = chosen(stage)[0] if stage else "02"
        best = kernel or catalogue.stage(number).SUPPORTS["rungs"][0]
        (part,) = grids.sustained([grids.Part(((number, best),), passes=both, peers=grids.BEST)])
    else:
        words = {number: catalogue.stage(number).SUPPORTS["rungs"] for number in numbers}
        rungs = [(number, word) for number in numbers for word in words[number] if kernel in (None, word)]
        takes = [one_rung.supports_of(catalogue.stage(number), word)["dtypes"] for number, word in rungs]
        taken = {"bf16" if torch.bfloat16 in dtypes else "fp32" for dtypes in takes}
        peers = peer or (("sdpa-flash", "sdpa-efficient") if file else tuple(PEERS))
        part = grids.Part(tuple(rungs), grids.GRIDS[grid], both, tuple(dtype or sorted(taken)), tuple(peers))
    measuring.show(part(), beside=True)


def check_kernel(number, rung):
    """Compares a rung with the reference on a few cases; ends the program if it is wrong."""
    from reference import cases, error
    from steps.course.workbook import one_rung

    module, wrong = catalogue.stage(number), False
    supports = one_rung.supports_of(module, rung)
    for case, dtype, reason in cases.select(supports):
        if case.name in CASES_OF_A_FILE and dtype == supports["dtypes"][0] and not reason:
            x = cases.build(case, supports, dtype, engine.device)
            want = x.expected()
            bad = error.failures(one_rung.results(module, rung, case, x), want)
            say(f"{'wrong' if bad else 'right'}: {case.says}" + (f", (error, tolerance) = {bad}" if bad else ""))
            wrong |= bool(bad)
    if wrong:
        raise typer.Exit(1)


CASES_OF_A_FILE = "ragged_causal", "more_queries_causal", "explicit_scale", "scores_200"


@app.command("engine")
def show_engine():
    """What runs the kernels here, stage by stage, and the versions behind it: the facts for a report of a fault."""
    import torch

    from steps.course.demo.compare import ENGINES

    asked = os.environ.get("STEPS_ENGINE")
    chosen_by = f"STEPS_ENGINE={asked}" if asked else "itself; STEPS_ENGINE=cpu or STEPS_ENGINE=cuda overrides it"
    say(engine.describe(), f"chosen by {chosen_by}")
    runs = ENGINES.get(engine.name, dict.fromkeys(catalogue.STAGES, "only compiled"))
    for number, stem in catalogue.STAGES.items():
        say(f"{stem:18} {catalogue.unavailable(number) or runs[number]}")
    if torch.cuda.is_available():
        for n in range(torch.cuda.device_count()):
            found = torch.cuda.get_device_properties(n)
            size = f"{found.total_memory / 2**30:.0f} GiB"
            say(f"GPU {n}: {found.name}, compute capability {found.major}.{found.minor}, {size}")
    packages = [each for each in PACKAGES if list(metadata.distributions(name=each))]
    versions = ", ".join(f"{each} {metadata.version(each)}" for each in packages)
    say(f"{os.cpu_count()} CPU cores, {platform.platform()}", f"Python {platform.python_version()}, {versions}")


PACKAGES = "torch", "triton", "numpy", "numba", "numba-cuda", "cuda-core", "cuda-bindings", "cuda-toolkit"


def check_known(asked):
    """Ends the program if an option has an unknown value; asked is {option: (values, known values)}."""
    for option, (values, known) in asked.items():
        if unknown := set(values) - set(known):
            name, *_ = sorted(unknown)
            near = difflib.get_close_matches(name, known, 1)
            meant = f" (did you mean {near[0]!r}?)" if near else ""
            problem = f"there is no {name!r}{meant}; there are {', '.join(known)}"
            raise typer.BadParameter(problem, param_hint=option if option.isupper() else f"--{option}")


@app.command()
def verify(
    target: Annotated[str, typer.Argument(metavar="FILE.py:FUNCTION", help="Or package.module:function.")],
    dtype: Annotated[list[str] | None, typer.Option(help="Once for each; the first, float32, runs every case.")] = None,
    head_dim: Annotated[list[int] | None, typer.Option(help="Once for each; by default 32, 64 and 40.")] = None,
    tile: Annotated[int, typer.Option(help="The longer side of its tiles: N is several of them, and ragged.")] = 64,
    top_left: Annotated[bool, typer.Option("--top-left", help="Causal with Nq != Nk is aligned as in SDPA.")] = False,
    without: Annotated[str, typer.Option(help="What it does not take, of the list above: gqa,backward,empty.")] = "",
    adapter: Annotated[str, typer.Option(help="Its form: cs336, leetgpu, kernelbot or flash_attn; see above.")] = "",
):
    """Runs the contract's cases on your own attention, and names the mistake that its failures equal.

    The function takes q (B, H, Nq, D), k and v (B, Hk, Nk, D) and returns out or (out, lse). It may have the arguments
    of torch's scaled_dot_product_attention. On a GPU its speed is measured beside SDPA's. --without leaves out

    \b
    causal        an argument causal or is_causal; aligned at the bottom right
    scale         an argument scale, softmax_scale or sm_scale
    gqa           fewer heads in k and v than in q
    nq-ne-nk      another number of queries than of keys
    ragged        an N that is not a multiple of --tile
    empty         N, B or H of 0
    strides       any strides
    offset        tensors that begin at any element
    large-scores  scores of 10^11
    backward      differentiation by autograd

    --adapter takes files as they are written elsewhere, and leaves out what such a function never takes

    \b
    cs336         an autograd.Function of q, k, v (batch, N, D) and is_causal
    leetgpu       solve(Q, K, V, output, M, N, d) of one head
    kernelbot     custom_kernel(data) with data = (q, k, v)
    flash_attn    flash_attn_func(q, k, v, causal=, softmax_scale=) of (B, N, H, D)

    A function of another form is wrapped in a file of yours: a copy of Triton's tutorial 06, with --dtype float16
    --head-dim 64 --head-dim 128 --tile 128 --without ragged,gqa,nq-ne-nk,empty,strides,offset:

    \b
    from tutorial import attention as theirs
    def attention(q, k, v, causal, scale):
        return theirs(q, k, v, causal, scale, False)
    """
    import torch

    from steps.course.verify import adapters, anybody, command

    say(engine.describe())
    dtypes = [getattr(torch, name, None) for name in dtype or ["float32"]]
    if not all(isinstance(x, torch.dtype) and x.is_floating_point for x in dtypes):
        raise typer.BadParameter("there are float32, bfloat16, float16 and float64", param_hint="--dtype")
    left_out = [name for name in without.split(",") if name]
    forms = adapters.ADAPTERS
    check_known({"without": (left_out, anybody.PROPERTIES), "adapter": ([adapter] if adapter else [], forms)})
    takes = {"top_left": top_left} | (forms[adapter].takes if adapter else {})
    takes |= {name.replace("-", "_"): False for name in left_out}
    claims = anybody.Claims(tuple(dtypes), tuple(head_dim or (32, 64, 40)), tile, **takes)
    judged = command.run(target, claims, adapter, say)
    raise typer.Exit(1 if judged is None or judged.failed else 0)


def say(*lines):
    """Prints lines as they are."""
    for line in lines:
        console.print(line, markup=False, highlight=False, emoji=False, soft_wrap=True)


def main():
    """Runs the command of sys.argv."""
    if sys.argv[1:2] != ["verify"]:
        return app()
    from steps.course.verify import process

    process.run("flash-steps" if Path(sys.argv[0]).stem == "flash-steps" else "python -m steps", say)


if __name__ == "__main__":
    main()
