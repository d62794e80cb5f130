"""`check`, `hint` and `solution`, the three functions that a reader calls."""

import functools
import shutil
import tempfile
import time

from steps import catalogue, engine, places
from steps.course.workbook import answer as answers
from steps.course.workbook import exercises, runner, skeleton, slips, splice
from steps.course.workbook.answer import Problem
from steps.course.workbook.exercises import Exercise, Hunt, Puzzle, Step
from steps.course.workbook.explain import explain
from steps.course.workbook.listing import show
from steps.course.workbook.outcome import Report, in_full_once, why

LIMIT = 60  # seconds for one check
# What the emulation counts, by the name that `counted` of an exercise gives it, and how a report tells it. A wavefront
# is what the 32 banks of shared memory serve at once.
COUNTED = {
    "wavefronts": "{wavefronts:,} wavefronts of shared memory for {accesses:,} accesses",
    "additions": "{additions:,} atomic additions",
}


def check(id, answer=None, limit=LIMIT, cause=None):
    """Runs the reader's answer inside the stage. The report says what is right, what is wrong and, if known, why.

    id: "00.2", or "00.bug1" for a hunt. answer: a function of the notebook, or the text of a CUDA function; by default
    the file under my/, which the first call writes and no later call overwrites. limit: seconds. cause: for a hunt, the
    letter of its cause; by default that of CAUSE in the answer's text.
    """
    try:
        task = exercises.find(id)
    except KeyError as e:
        return Report(id, "unknown", "error", [*e.args])
    try:
        if answer is None:
            skeleton.write(task)
        text = answers.read(task, answer)
        function, suffix = ("test", ".py") if isinstance(task, Hunt) else (task.function, task.path.suffix)
        if answers.is_blank(text, function, suffix):
            where = task.where if answer is None else text.label
            return Report(id, task.title, "blank", [f"still to be written: {where}", _pointer(task)])
        with tempfile.TemporaryDirectory(prefix="steps-") as folder:
            job = {"stage": task.stage, "module": _module(task), "folder": folder, "limit": limit}
            if isinstance(task, Hunt):
                job |= {"kind": "hunt", "cause": cause or answers.constant(text, "CAUSE")}
            else:
                answers.require(text, task)
            judge = {Exercise: _exercise, Puzzle: _puzzle, Step: _step, Hunt: _hunt}[type(task)]
            verdict, lines, rows, printed = judge(task, text, job)
    except Unjudged as e:
        return Report(id, task.title, *e.args)
    except Problem as problem:
        return Report(id, task.title, "error", [*str(problem).splitlines(), _pointer(task)])
    names = rows[-1].get("mutants", []) if rows else []
    return Report(id, task.title, verdict, [*lines, *_after(task, verdict, rows), *_printed(printed)], names)


def hint(id, level=1):
    """A hint for the exercise, and the command to type next.

    Level 1 is a question, 2 the formula and its place in the paper, 3 pseudo-code.
    """
    hints = exercises.find(id).hints
    if level not in range(1, len(hints) + 1):
        raise ValueError(f"there are hints 1 to {len(hints)} for {id}; got {level!r}")
    following = f"check {id}"
    in_a_notebook = ""
    if level < len(hints):
        following = f"hint {id} {level + 1}"
        in_a_notebook = f'    (in a notebook: hint("{id}", {level + 1}))'
    return Text(f"{hints[level - 1]}\nNext: python -m steps {following}{in_a_notebook}")


def solution(id):
    """The stage's own function, for a step the whole file. For a hunt it is the last hint: the cause and the test."""
    task = exercises.find(id)
    if isinstance(task, Hunt):
        return hint(id, len(task.hints))
    return show(f"{task.stage}/{task.path.stem}", None if isinstance(task, Step) else task.function)


class Unjudged(Exception):
    """The answer was not judged; the arguments are the verdict and the lines of a report that says why."""


class Text(str):
    """A string that a notebook shows without quotation marks and escapes."""

    def __repr__(self):
        return str(self)


def _pointer(task):
    return f'Hint: python -m steps hint {task.id}, or in a notebook hint("{task.id}")'


def judged(task, text, job, lines, on=None):
    """What the job shows of the answer: (verdict, lines of text, rows of results, what was printed).

    lines: which lines of the copy are the answer's, as {line of the copy: line of the answer}. on: an engine.
    """
    rows, how, printed = runner.run(job, job["folder"], job["limit"], on=on)
    steps = [row["step"] for row in rows if "step" in row]  # A job of the capstone also runs the steps before its own.
    shown = [row for row in rows if "wrong" in row and (not steps or row["step"] == steps[-1])]
    bad = _ending(rows, how, task, text, lines, job["limit"])
    verdict = "error" if bad else "wrong" if any(row.get("wrong") for row in rows) else "passed"
    return verdict, [*why(rows), *in_full_once(shown), *bad], rows, printed


def _exercise(task, text, job):
    spliced = splice.copy_of_steps(job["folder"], [(task, text)])[task.id]
    fields = "id", "function", "rung", "cases", "order", "tile", "threads", "masks", "edges"
    job |= {name: getattr(task, name) for name in fields}
    job |= {"kind": "exercise", "own": answers.plain_source(task), "file": task.file, "label": text.label}
    job["original"] = task.path.read_text()
    began = time.monotonic()
    for on in _engines(task):
        verdict, lines, rows, printed = judged(task, text, job, spliced.lines, on)
        if verdict != "passed":
            break
    names = rows[-1].get("equals", []) if rows else []
    in_time = time.monotonic() - began < job["limit"]
    if verdict != "passed" and in_time and len(names) != 1:  # The results do not say which mistake it is; the text may.
        lines = slips.remarks(task, text, rows, functools.partial(_passes, task, job, on)) + lines
    if verdict == "passed" and task.cost and shutil.which("g++"):
        verdict, *cost = _cost(task, text, job["limit"])
        lines += cost
    return verdict, lines, rows, printed


def _engines(task):
    """The engines on which an exercise runs, one after the other.

    A GPU does not show everything: a race may go well, and memory that nobody wrote may hold zeros. So an answer in
    CUDA C++ runs in the emulation before.
    """
    if task.engine:
        return [task.engine]
    emulated = engine.name == "cuda" and task.path.suffix == ".cu" and shutil.which("g++")
    return ["cpu", "cuda"] if emulated else [engine.name]


def _puzzle(task, text, job):
    spliced = splice.copy_of_steps(job["folder"], [(task, text)])[task.id]
    return judged(task, text, job | {"kind": "puzzle"}, spliced.lines)


def _step(task, text, job):
    """The step's cases, after those of the steps before it: a later step has to keep what an earlier one gave."""
    if not answers.has_kernel(text):
        raise Problem(f"{text.label} has no function with @triton.jit, but the kernel is what the capstone asks for.")
    splice.copy_of_steps(job["folder"], [])
    splice.write_copy(job["folder"], task, text.text)
    same_lines = {n: n for n in range(1, 1 + len(text.text.splitlines()))}
    verdict, lines, rows, printed = judged(task, text, job | {"kind": "capstone", "level": task.level}, same_lines)
    at = [1, *(row["step"] for row in rows if "step" in row)][-1]
    if verdict != "passed" and at < task.level:
        first = task.id.removesuffix(str(task.level)) + str(at)
        raise Unjudged("blank", [f"Step {at} comes first, and is not right: python -m steps check {first}"])
    return verdict, [*(f"ok     step {n}: all of its cases" for n in range(1, at)), *lines], rows, printed


def _hunt(task, text, job):
    if answers.top_level(answers.parse(text), "test") is None:
        raise Problem(f"{text.label} has no function test({task.subject}).")
    splice.copy_of_steps(job["folder"], [])
    job |= {name: getattr(task, name) for name in ("subject", "rung", "edit", "broken")}
    job |= {"file": task.path.name, "label": text.label, "text": text.text, "helpers": text.helpers}
    _, bad, rows, printed = judged(task, text, job, {}, task.engine)
    good, fails = (next((row[key] for row in rows if key in row), None) for key in ("good", "broken"))
    right = "the repaired kernel"
    verdict, lines = "error", bad
    if good and fails and not bad:
        verdict, *told = _judge_cause(task, job["cause"])
        lines = [*told, f"the test passes on {right}", f"the test fails on the broken kernel: {fails}"]
    elif good and not bad:
        verdict = "wrong"
        lines = ["The test is not right. WRONG: passes on the broken kernel too", f"passes on {right}"]
        lines += _how_near(task, rows[-1].get("distance"))
    elif bad and rows and rows[-1].get("error", {}).get("type") == "AssertionError":
        verdict, lines = "wrong", [f"The test is not right. WRONG: fails on {right} too, which is right:", *bad]
    return verdict, lines, rows, printed


def _passes(task, job, on, answer, **options):
    """Whether another answer to the exercise passes the job; that it would be slow on a GPU does not count."""
    with tempfile.TemporaryDirectory(prefix="steps-") as folder:
        try:
            splice.copy_of_steps(folder, [(task, answer)])
        except (SyntaxError, AttributeError):  # The repair of a slip does not fit to this answer.
            return False
        rows, how, _ = runner.run(job | options, folder, min(job["limit"], 20), on=on)
    failed = rows and "error" in rows[-1] and rows[-1]["error"]["type"] != "OnlyOnAGPU"
    return how is None and not failed and not any(row.get("wrong") for row in rows)


def _cost(task, text, limit):
    """(verdict, lines of text ...): whether the answer takes more of what is counted than the stage's own."""
    yours, own = _count(task, text, limit), _own_count(task.id, limit)
    if yours is None:
        says = f"counting was stopped after {limit:g} s: it is far slower than the stage's own"
        return "wrong", f"WRONG  the results are right, but {says}", " " * 9 + task.cost
    says = COUNTED[task.counted].format(**yours)
    if yours[task.counted] <= own[task.counted]:
        return "passed", f"ok     {says}: no more than with the stage's own function"
    wrong = f"WRONG  the results are right, but it takes {says}; {own[task.counted]:,} {task.counted} are enough"
    return "wrong", wrong, " " * 9 + task.cost


def _count(task, text, limit):
    """{"accesses", "wavefronts", "additions"}: what the emulation counts in the exercise's cases, see jobs.cost.

    text: the answer, or None for the stage's own function. The result is None for an answer that takes too long.
    """
    with tempfile.TemporaryDirectory(prefix="steps-") as folder:
        splice.copy_of_steps(folder, [(task, text)] if text else [])
        job = {name: getattr(task, name) for name in ("stage", "rung", "cases")}
        job |= {"kind": "cost", "module": _module(task)}
        rows, how, _ = runner.run(job, folder, limit, on="cpu")
    if how == "time" and text:
        return None
    if bad := _ending(rows, how, task, text or answers.Answer("", "the stage's own"), {}, limit):
        raise Problem("\n".join(bad))
    return rows[-1]


@functools.cache
def _own_count(id, limit):
    """`_count` with the stage's own function, counted once in a process."""
    return _count(exercises.find(id), None, limit)


def _how_near(task, distance):
    """What a test that passes on the broken kernel has missed: the right inputs, or the right comparison."""
    if distance is None or distance == float("inf"):
        return []
    if task.hangs:
        return ["With these inputs nobody waits for ever: they do not show what is wrong."]
    says = "it does not compare what is wrong" if distance > 1e-3 else "its inputs do not show what is wrong"
    return [f"There the results are off by {distance:.1e} at most: {says}."]


def _judge_cause(task, given):
    """(verdict, lines of text ...) on the letter that the reader gives as the cause of a hunt, in any case."""
    cause = str(given or "").strip().lower()
    if cause == task.cause:
        return "passed", f"the cause: {task.causes[cause]}"
    listed = [f"  {letter}  {says}" for letter, says in task.causes.items()]
    if not cause:
        how = f'Write its letter as CAUSE = "" above the test, or in a notebook check("{task.id}", test, cause="").'
        return "blank", "The test is right. Still to be answered: what is the cause?", *listed, how
    if cause not in task.causes:
        return "wrong", f"The test is right. There is no cause {given!r}. The cause is one of these:", *listed
    return "wrong", f"The test is right. WRONG: the cause is not {given!r}. It is another one of these:", *listed


def _ending(rows, how, task, text, lines, limit):
    """The lines of text about an exception, a time-out or a crash of the child; [] if it came to an orderly end."""
    if rows and "error" in rows[-1]:
        if reason := catalogue.unavailable(task.number):
            raise Unjudged("skipped", [f"cannot be checked here: {reason}"])
        running = [row["running"] for row in rows if "running" in row]
        late = isinstance(task, Hunt) or rows[-1]["error"]["type"] == "OnlyOnAGPU"
        case = [f"(in the case: {running[-1]})"] if running and not late else []
        return [*explain(rows[-1]["error"], task, text, lines), *case]
    first = "before the test was called" if isinstance(task, Hunt) else "before the first case"
    where = next((f"in the case: {row['running']}" for row in rows[::-1] if "running" in row), first)
    if how == "time":
        question = "Does a loop never end, or does a barrier wait for a thread that has left?"
        return [f"stopped after {limit:g} s {where}", question]
    if how == "memory":
        says = f"stopped {where}: its processes took more than {runner.MEMORY / 2**30:.0f} GB of memory"
        return [says, "Does a loop append to a list for ever, or does a tensor have one dimension too many?"]
    if how:
        says = ["Has a kernel read or written an address outside of its tensors?"] if how == "SIGSEGV" else []
        return [f"the process ended without a result ({how}) {where}", *says]
    return []


def _after(task, verdict, rows):
    """What the reader can do next, as lines of text."""
    if verdict != "passed":
        return [_pointer(task)]
    if isinstance(task, Exercise):
        how = f"python -m pytest tests/test_{task.stage}.py --mine"
        how = f"All of them: {how}" if places.IS_CLONE else "A clone of the course runs all of them."
        return [f"These were {len(task.cases)} cases; the stage has {rows[0].get('of')}. {how}"]
    return exercises.following(task) if isinstance(task, Step) else []


def _printed(text, most=20):
    """What the answer has printed, as lines of text, at most so many."""
    lines = text.splitlines()
    if not lines:
        return []
    shown = ["it printed:", *(f"  {line}" for line in lines[:most])]
    if len(lines) > most:
        shown.append(f"... and {len(lines) - most} lines more")
    return shown


def _module(task):
    """The name of the module in whose file the exercise's function stands."""
    return ".".join(("steps", *task.file.removesuffix(task.path.suffix).split("/")))
