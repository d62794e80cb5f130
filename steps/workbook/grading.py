"""A class's answers: each student's folder is judged in processes and in a working folder of its own.

An exercise that its check passes is then run on the whole contract, by `pytest --mine` with this one answer: a check
has only a few cases. Hunts, puzzles and steps have no contract beyond their check.
"""

import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import xml.etree.ElementTree
from pathlib import Path

from steps.places import ROOT
from steps.workbook import checking
from steps.workbook.exercises import Exercise

VERDICTS = "import sys; from steps.workbook import grading; grading.tell_verdicts(*sys.argv[1:])"


def students(folder):
    """The students' folders, by name."""
    return sorted(path for path in Path(folder).iterdir() if path.is_dir() and not path.name.startswith("."))


def grade(student, tasks, limit):
    """{id: {"verdict", "lines", "contract"}} of a student's folder, which is only read.

    verdict and lines are those of `check`. contract is None, or {"passed": number, "failed": [names], "ended": how it
    ended before all was run, or None}. limit: seconds for one run of the contract, and at most for one check.
    """
    with tempfile.TemporaryDirectory(prefix="steps-") as folder:
        answers = {task.id: found for task in tasks if (found := _answer(student, task))}
        rows = {task.id: {"verdict": "blank", "lines": [], "contract": None} for task in tasks}
        rows |= _verdicts(folder, answers, min(limit, checking.LIMIT))
        for task in tasks:
            if rows[task.id]["verdict"] == "passed" and isinstance(task, Exercise):
                rows[task.id]["contract"] = _contract(folder, answers[task.id], task, limit)
        return rows


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


def _contract(folder, file, task, limit):
    report = Path(folder) / "report.xml"
    report.unlink(missing_ok=True)
    command = [sys.executable, "-m", "pytest", "-c", str(ROOT / "pyproject.toml"), f"--rootdir={ROOT}", "-q", "--mine"]
    command += ["-p", "no:cacheprovider", f"--junitxml={report}", str(ROOT / "tests" / f"test_{task.stage}.py")]
    _, how = _run(folder, [file], command, limit)
    if not report.exists():
        return {"passed": 0, "failed": [], "ended": how or "pytest ended without a report"}
    tests = [case for case in xml.etree.ElementTree.parse(report).iter("testcase") if case.find("skipped") is None]
    failed = [case.get("name") for case in tests if case.find("failure") is not None or case.find("error") is not None]
    return {"passed": len(tests) - len(failed), "failed": failed, "ended": how}


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
        return {"blank": "-", "wrong": "WRONG", "error": "ERROR"}.get(row["verdict"], row["verdict"])
    total = contract["passed"] + len(contract["failed"])
    if contract["ended"]:
        return f"passed; contract {contract['ended']}"
    return f"passed {contract['passed']}/{total}"
