"""A class's answers: each student's folder is judged in processes and in a working folder of its own.

The exercises that their checks pass are then run on the whole contract, by `pytest --mine`: a check has only a few
cases. Hunts, puzzles and steps have no contract beyond their check.
"""

import ast
import contextlib
import hashlib
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import xml.etree.ElementTree
from pathlib import Path

from steps.course.workbook import checking
from steps.course.workbook.exercises import Exercise
from steps.places import ROOT

VERDICT_NAMES = ("passed", "wrong", "error", "skipped")
VERDICTS = "import sys; from steps.course.workbook import grading; grading.tell_verdicts(*sys.argv[1:])"
# Modules and functions by which an answer can reach files, other programs or a network; no exercise needs one of them.
OUTSIDE = {"os", "shutil", "subprocess", "socket", "ctypes", "urllib", "requests", "importlib", "pathlib"}
CALLS = {"open", "exec", "eval", "compile", "__import__"}


def students(folder):
    """The students' folders, by name."""
    return sorted(path for path in Path(folder).iterdir() if path.is_dir() and not path.name.startswith("."))


def reaching_outside(student, tasks):
    """{file: names}: the answers that import a module, or call a function, by which they can reach files or a network.

    It is found in the text before anything runs, for whoever wants to read such a file first. What is built from pieces
    of text is not found: only a container keeps an answer from what it must not reach.
    """
    found = {}
    for path in filter(None, (_answer(student, task) for task in tasks)):
        with contextlib.suppress(SyntaxError, ValueError):  # no Python: CUDA C++, or what cannot run
            if names := _names(ast.parse(path.read_text())):
                found[path.name] = names
    return found


def _names(tree):
    names = set()
    for node in ast.walk(tree):
        match node:
            case ast.Import(names=modules):
                names |= {module.name.split(".")[0] for module in modules} & OUTSIDE
            case ast.ImportFrom(module=str(module)):
                names |= {module.split(".")[0]} & OUTSIDE
            case ast.Call(func=ast.Name(id=name)) if name in CALLS:
                names.add(name)
    return sorted(names)


def grade(student, tasks, limit, quick=False, earlier=None):
    """{id: {"verdict", "lines", "contract", "file"}} of a student's folder, which is only read.

    verdict and lines are those of `check`. contract is None, or {"passed": number, "failed": [names], "ended": how it
    ended before all was run, or None}. file is a hash of the answer, or None for a blank. limit: seconds for one run of
    the contract, and at most for one check. quick: the contract is not run. earlier: what this function returned for
    the student before; a row whose file is the same is kept.
    """
    answers = {task.id: found for task in tasks if (found := _answer(student, task))}
    files = {id: hashlib.sha256(path.read_bytes()).hexdigest() for id, path in answers.items()}
    kept = {id: row for id, row in (earlier or {}).items() if id in files and row.get("file") == files[id]}
    with tempfile.TemporaryDirectory(prefix="steps-") as folder:
        new = {id: path for id, path in answers.items() if id not in kept}
        rows = {task.id: {"verdict": "blank", "lines": [], "contract": None} for task in tasks}
        rows |= _verdicts(folder, new, min(limit, checking.LIMIT)) | kept
        if not quick:
            passed = [task for task in tasks if isinstance(task, Exercise) and rows[task.id]["verdict"] == "passed"]
            passed = [task for task in passed if rows[task.id]["contract"] is None]
            for id, contract in _contracts(folder, {task: answers[task.id] for task in passed}, limit).items():
                rows[id]["contract"] = contract
    return {id: row | {"file": files.get(id)} for id, row in rows.items()}


def _answer(student, task):
    """The student's file for the task, from the folder itself or from a folder my/ in it; None if there is none."""
    found = [path for path in (student / task.mine.name, student / "my" / task.mine.name) if path.is_file()]
    return found[0] if found else None


def _verdicts(folder, answers, limit):
    if not answers:
        return {}
    command = [sys.executable, "-c", VERDICTS, str(limit), *answers]
    out, how = _run(folder, answers.values(), command, 60 + (limit + 15) * len(answers))
    told = [json.loads(line) for line in out.splitlines() if line.startswith('{"id"')]
    rows = {row.pop("id"): row | {"contract": None} for row in told}
    lost = {"verdict": "error", "lines": [how or "the process ended before this exercise was judged"], "contract": None}
    return {id: rows.get(id, lost) for id in answers}


def tell_verdicts(limit, *ids):
    """Prints a line of JSON for each exercise, in a process of its own."""
    for id in ids:
        report = checking.check(id, limit=float(limit))
        print(json.dumps({"id": id, "verdict": report.verdict, "lines": report.lines}), flush=True)


def _contracts(folder, answers, limit):
    """{id: contract} of exercises that their checks pass; answers: {task: file}.

    All of them run together, which takes one start of pytest and runs what they share once. Only where a stage's tests
    fail, or all did not end in time, each of its exercises runs alone, to tell which one it is.
    """
    if not answers:
        return {}
    together = _contract(folder, answers, limit * len(answers))
    rows = {task.id: together[task.stage] for task in answers}
    alone = [task for task in answers if rows[task.id]["failed"] or rows[task.id]["ended"]] if len(answers) > 1 else []
    return rows | {task.id: _contract(folder, {task: answers[task]}, limit)[task.stage] for task in alone}


def _contract(folder, answers, limit):
    """{stage: {"passed", "failed", "ended"}} of one run of the tests of the answers' stages, with all the answers."""
    report, stages = Path(folder) / "report.xml", list(dict.fromkeys(task.stage for task in answers))
    report.unlink(missing_ok=True)
    command = [sys.executable, "-m", "pytest", "-c", str(ROOT / "pyproject.toml"), f"--rootdir={ROOT}", "-q", "--mine"]
    command += ["-p", "no:cacheprovider", f"--junitxml={report}"]
    command += [str(ROOT / "tests" / f"test_{stage}.py") for stage in stages]
    _, how = _run(folder, answers.values(), command, limit)
    if not report.exists():
        return {stage: {"passed": 0, "failed": [], "ended": how or "pytest ended without a report"} for stage in stages}
    tests = [case for case in xml.etree.ElementTree.parse(report).iter("testcase") if case.find("skipped") is None]
    return {stage: _counted(tests, stage, how) for stage in stages}


def _counted(tests, stage, how):
    ours = [case for case in tests if f"test_{stage}" in case.get("classname").split(".")]
    failed = [case.get("name") for case in ours if case.find("failure") is not None or case.find("error") is not None]
    return {"passed": len(ours) - len(failed), "failed": failed, "ended": how}


def _run(folder, files, command, limit):
    """(what it printed, None or how it ended) of a command that finds copies of these files in the place of my/."""
    my, work = Path(folder) / "my", Path(folder) / "work"
    for path in (my, work):
        shutil.rmtree(path, ignore_errors=True)
        path.mkdir()
    for file in files:
        shutil.copyfile(file, my / file.name)
    path = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
    environment = os.environ | {"STEPS_MY": str(my), "PYTHONPATH": path, "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}
    environment |= {"PYTHONOPTIMIZE": ""}  # Otherwise Python may leave out `assert`.
    options = dict(cwd=work, env=environment, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
    with subprocess.Popen(command, start_new_session=True, **options) as process:
        try:
            return process.communicate(timeout=limit)[0], None
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            return process.communicate()[0], f"stopped after {limit:.0f} s"


def cell(row):
    """A row of `grade` as an entry of the table."""
    contract = row["contract"]
    if contract is None:
        return {"blank": "-", "wrong": _wrong(row), "error": _error(row)}.get(row["verdict"], row["verdict"])
    total = contract["passed"] + len(contract["failed"])
    if contract["ended"]:
        return f"passed; contract {contract['ended']}"
    return f"passed {contract['passed']}/{total}"


def _wrong(row):
    """A hunt's test may be right although the letter of the cause is not: by the points, that is worth one."""
    return "WRONG cause, right test" if any(line.startswith("The test is right") for line in row["lines"]) else "WRONG"


def _error(row):
    """In a few words, what kept an answer from being judged: "ERROR: SyntaxError" or "ERROR: stopped after 60 s"."""
    found = (re.match(r"(stopped after [\d.]+ s|\w*(?:Error|Exception)\b)", line) for line in row["lines"])
    return "ERROR" + next((f": {words[1]}" for words in found if words), "")


def summary(rows):
    """What a student's rows come to: "2 passed, 1 wrong, 1 error"."""
    counts = {verdict: sum(row["verdict"] == verdict for row in rows.values()) for verdict in VERDICT_NAMES}
    return ", ".join(f"{count} {verdict}" for verdict, count in counts.items() if count) or "nothing handed in"
