"""`python -m reference.bench.gpu_check`: the proof that the course is right on this GPU, as a file to commit.

Runs the test suite and, over every kernel at small sizes, compute-sanitizer's tools: memcheck (accesses out of bounds), racecheck
(unsynchronised shared memory), initcheck (reads of what nobody wrote) and synccheck (barriers misused). Writes
reference/bench/results/<gpu>.checks.json: what passed, failed and was skipped, the sanitizers' summaries and reports, versions,
and the hash of each kernel's files. Nothing counts as clean that did not run to its end: a time limit, a missing summary or a run
in which no test passed is recorded as such.

Whether racecheck looks at a kernel at all is tried, too: each kernel of stage 02 is run with a race planted in it, and its
outcome's `planted` says whether that was seen.
"""

import argparse
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor, as_completed
from pathlib import Path
from xml.etree import ElementTree

import torch
from rich.console import Console
from rich.table import Table

from reference.bench import rows
from reference.bench.source import source_files, source_hash

STAGE_02, WORKBOOK = "tests/test_step02_fa2_cuda.py", "tests/test_workbook.py"  # take longer than all others
SUITES = {
    "suite": ("tests", f"--ignore={STAGE_02}", f"--ignore={WORKBOOK}", "--dist", "loadfile"),
    "suite 02_fa2_cuda": (STAGE_02, "--dist", "load"),  # test by test, not by file
    "suite workbook": (WORKBOOK, "--dist", "loadfile"),
}
# What runs under the sanitizers, as arguments of Python: every rung of a stage, and the ragged cases in all its dtypes; of stage
# 02 each kernel alone. Stage 00 has no kernels, and stage 04's are stage 03's.
_SMALL = ("-q", "-p", "no:cacheprovider", "-k", "every_rung or ragged")
SANITIZED = {
    "01_fa1_numba": ("-m", "pytest", "tests/test_step01_fa1_numba.py", *_SMALL),
    **{
        f"02_fa2_cuda/{path.stem}": ("-m", "tests.sanitized", path.stem)
        for path in sorted((rows.ROOT / "steps" / "step02_fa2_cuda").glob("?wd_*.cu"))
    },
    "03_triton": ("-m", "pytest", "tests/test_step03_triton.py", *_SMALL),
}
STAGES = ("01_fa1_numba", "02_fa2_cuda", "03_triton")
# memcheck would count refused driver calls too: torch asks for functions that a driver may lack, and handles the answer.
_ALL = ("--show-backtrace", "no", "--print-limit", "100000")  # of a kind that is listed there can be many
TOOLS = {"memcheck": ("--report-api-errors", "no"), "racecheck": (), "initcheck": _ALL, "synccheck": ()}
PARTS = ("suite", *TOOLS)
# By tool: reports that are no mistakes, of which kernels, and why.
LISTED = {
    "initcheck": (
        ("02_fa2_cuda/bwd_2_wgmma", "02_fa2_cuda/bwd_3_hopper"),
        "^Host API memory access error .* cudaMemcpy source$",
        "initcheck does not see what the copy engine stores (cp.async.bulk.tensor): dk and dv, whose every number is compared "
        "with the reference in the same run. Of `python -m tests.sanitized tma_store`, a few lines, it says the same. Of "
        "racecheck, which does not see such copies either, flash-attention's AI/RACECHECK_TMA_HAZARD.md tells.",
    )
}


def run_suite(name, limit, processes):
    """The outcome of a part of the test suite: counts, the failures by name, the skips by reason."""
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "junit.xml"
        command = [sys.executable, "-m", "pytest", *SUITES[name], "-q", "-n", str(processes), f"--junitxml={report}"]
        code, output, seconds = run_limited(command, limit)
        outcome = parse_junit(report.read_text()) if report.exists() else {}
    status = "timeout" if code is None else "passed" if code == 0 and outcome.get("passed") else "failed"
    tail = {} if status == "passed" else {"tail": output.splitlines()[-20:]}
    return {"status": status, "seconds": round(seconds), **outcome, **tail}


def parse_junit(xml):
    """Counts of passed, failed and skipped tests in a JUnit report; a fixture's error counts as failed."""
    counts, skips, failures = Counter(passed=0, failed=0, skipped=0), Counter(), []
    for test in ElementTree.fromstring(xml).iter("testcase"):
        skipped = test.find("skipped")
        if test.find("failure") is not None or test.find("error") is not None:
            counts["failed"] += 1
            failures.append(f"{test.get('classname')}::{test.get('name')}")
        elif skipped is not None:
            counts["skipped"] += 1
            skips[skipped.get("message", "")] += 1
        else:
            counts["passed"] += 1
    return {**counts, "failures": failures, "skips": dict(skips)}


def sanitize(tool, what, limit):
    """One sanitizer over one of SANITIZED; racecheck over a kernel of stage 02 also says whether it sees a planted race."""
    found, code, seconds, output = run_sanitizer(tool, SANITIZED[what], limit)
    status = "timeout" if code is None else verdict(found, code)
    extra = {} if status == "clean" else {"tail": output.splitlines()[-20:]}
    if status == "problems" and is_listed(tool, what, found["reports"]):
        extra |= {"status": "listed", "listed": LISTED[tool][-1]}
    if tool == "racecheck" and SANITIZED[what][1] == "tests.sanitized":
        planted, code, *_ = run_sanitizer(tool, (*SANITIZED[what], "--planted"), min(limit, 60))
        new, ended = set(planted["reports"]) - set(found["reports"]), code == 0 and planted["summaries"]
        extra["planted"] = "hangs" if code is None else "seen" if new else "not seen" if ended else "failed"
    return {"status": status, **found, "seconds": round(seconds), **extra}


def is_listed(tool, what, reports):
    """Whether LISTED has every report of the tool on one of SANITIZED."""
    kernels, pattern, _ = LISTED.get(tool, ((), "", ""))
    return what in kernels and bool(reports) and all(re.search(pattern, report) for report in reports)


def run_sanitizer(tool, arguments, limit):
    """(what it found, exit code, seconds, output) of a Python program under one of TOOLS."""
    sanitizer = shutil.which("compute-sanitizer", path=f"{os.environ.get('PATH', '')}:/usr/local/cuda/bin")
    if sanitizer is None:
        return parse_sanitizer(""), 127, 0.0, "there is no compute-sanitizer"
    command = [sanitizer, "--tool", tool, *TOOLS[tool], "--target-processes", "all", sys.executable, *arguments]
    # PyTorch's allocator hands out pieces of large blocks: out of a tensor's bounds would be inside a block.
    code, output, seconds = run_limited(command, limit, PYTORCH_NO_CUDA_MEMORY_CACHING="1")
    return parse_sanitizer(output), code, seconds, output


def parse_sanitizer(output):
    """What compute-sanitizer and the tests print at their ends: {"summaries", "problems", "passed", "reports"}.

    problems: errors, or racecheck's hazards (errors and warnings), of all processes together. reports: the different ones, their
    first lines without addresses.
    """
    summaries = [m for m in re.finditer(r"(?:ERROR|RACECHECK) SUMMARY: (\d+)[^\n]*", output) if "not printed" not in m[0]]
    passed = re.findall(r"(\d+) passed", output)
    reports = re.findall(r"^=+ ((?:Host API|Error|Warning|Invalid|Uninitialized|Barrier error|Potential|Program hit)[^\n]*"
                         r"(?:\n=+ {4,}(?:at|and|Uninitialized) [^\n]*){0,2})", output, re.M)  # fmt: skip
    plain = [re.sub(r"\n=+ +| \[\d+ hazards?\]|\+0x\w+|0x\w+", " ", report).strip() for report in reports]
    return {
        "summaries": [match[0] for match in summaries],
        "problems": sum(int(match[1]) for match in summaries),
        "passed": int(passed[-1]) if passed else 0,
        "reports": list(dict.fromkeys(" ".join(report.split()) for report in plain)),
    }


def verdict(found, code):
    """The status: "clean" only if the tool came to its summary, found nothing, and tests passed under it."""
    if not found["summaries"]:
        return "no summary"
    if found["problems"]:
        return "problems"
    if not found["passed"]:
        return "nothing ran"
    return "clean" if code == 0 else "tests failed"


def run_limited(command, limit, **environment):
    """(exit code, output, seconds); no exit code when the time limit ended it, along with its children."""
    start = time.monotonic()
    environment = {**os.environ, "STEPS_ENGINE": "cuda", **environment}
    process = subprocess.Popen(
        command, cwd=rows.ROOT, env=environment, text=True, errors="replace", start_new_session=True,
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
    )  # fmt: skip
    try:
        output, _ = process.communicate(timeout=limit)
        code = process.returncode
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        output, code = process.communicate()[0], None
    return code, output, time.monotonic() - start


def kernel_hashes(root=rows.ROOT):
    """{"02_fa2_cuda/fwd_0_scalar": hash} of every kernel in the course."""
    files = [path for name in ("fwd_*", "bwd_*") for path in Path(root).glob(f"steps/step*/{name}")]
    kernels = {(path.parent.name.removeprefix("step"), path.stem) for path in files}
    return {f"{stage}/{name}": source_hash(source_files(stage, name, root)) for stage, name in sorted(kernels)}


def merge(old, new):
    """`new` with the outcomes that only `old` has, where both speak of the same code and the same machine."""
    same = all(old.get(name) == new[name] for name in ("gpu", "driver", "cuda", "torch", "triton", "python", "sources"))
    return {**new, "outcomes": {**(old["outcomes"] if same else {}), **new["outcomes"]}}


def tasks(parts, stages):
    """[(the outcome's name, a function of the seconds it may take)] of what is asked for."""
    suites = [(name, lambda limit, p, name=name: run_suite(name, limit, p)) for name in SUITES if "suite" in parts]
    pairs = [(tool, what) for what in SANITIZED for tool in TOOLS if tool in parts and what.partition("/")[0] in stages]
    return suites + [(f"{tool} {what}", lambda limit, _, t=tool, w=what: sanitize(t, w, limit)) for tool, what in pairs]


def run_tasks(todo, limits, jobs, seconds):
    """Yields (name, outcome) as they end: first the suites, one after the other, then the sanitizers, `jobs` at a time.

    Begins nothing after `seconds`, and gives nothing more than what is left of them: the outcome of what was not begun is None.
    """
    end = time.monotonic() + seconds

    def run(name, function):
        left, kind = end - time.monotonic(), "suite" if name.startswith("suite") else "sanitizer"
        return name, function(min(left, limits[kind]), jobs) if left > 10 else None

    suites = [task for task in todo if task[0].startswith("suite")]
    yield from (run(*task) for task in suites)
    with ThreadPoolExecutor(jobs) as pool:
        yield from (future.result() for future in as_completed([pool.submit(run, *task) for task in todo[len(suites) :]]))


def main(arguments=None):
    """Exit code: 0 if everything asked for passed and was clean, or is listed."""
    parser = argparse.ArgumentParser(prog="python -m reference.bench.gpu_check", description=__doc__.partition("\n")[0])
    parser.add_argument("--only", nargs="+", choices=PARTS, default=PARTS, help="run these; keep the others' last outcome")
    parser.add_argument("--stages", nargs="+", choices=STAGES, default=STAGES, help="whose kernels to sanitize")
    parser.add_argument("--suite-limit", type=float, default=1800, metavar="S", help="seconds for each part of the suite (1800)")
    parser.add_argument("--limit", type=float, default=300, metavar="S", help="seconds for each sanitizer run (300)")
    parser.add_argument("--minutes", type=float, default=60, help="for everything; what is not begun by then is left out (60)")
    parser.add_argument("--jobs", type=int, default=2, help="processes side by side (2)")
    parser.add_argument("--commit", help="what is checked, for a machine without the git history")
    parser.add_argument("--folder", type=Path, default=rows.COMMITTED, help="where the file goes")
    options = parser.parse_args(arguments)
    console = Console()
    if not torch.cuda.is_available():
        console.print("gpu-check needs a GPU, and torch sees none here.")
        return 1

    origin = {**rows.provenance(commit=options.commit), "python": sys.version.split()[0], "sources": kernel_hashes()}
    name = f"{rows.slug(origin['gpu'])}.checks.json"
    path = options.folder / name
    old = next((json.loads(p.read_text()) for p in (path, rows.COMMITTED / name) if p.exists()), {})
    limits = {"suite": options.suite_limit, "sanitizer": options.limit}
    outcomes, left_out = {}, []
    for name, outcome in run_tasks(tasks(options.only, options.stages), limits, options.jobs, 60 * options.minutes):
        if outcome is None:
            left_out.append(name)
            continue
        outcomes[name] = outcome
        path.parent.mkdir(parents=True, exist_ok=True)  # written at once: whoever stops the run keeps what there is
        path.write_text(json.dumps(merge(old, {**origin, "outcomes": outcomes}), indent=1) + "\n")
        console.print(f"{name}: {outcome['status']} {outcome.get('planted', '')}", highlight=False)
    if path.exists():
        console.print(table(json.loads(path.read_text())))
        console.print(f"written: {path}")
    if left_out:
        console.print(f"no time for: {', '.join(left_out)}")
    bad = [one for one in outcomes.values() if one["status"] not in ("passed", "clean", "listed")]
    return 1 if bad or left_out else 0


def table(checks):
    """The outcomes as a rich Table."""
    shown = Table(title=f"{checks['gpu']}, torch {checks['torch']}, triton {checks['triton']}", title_justify="left")
    fields = ("status", "passed", "failed", "skipped", "problems", "planted", "seconds")
    for name in ("check", *fields):
        shown.add_column(name)
    for name, outcome in sorted(checks["outcomes"].items()):
        shown.add_row(name, *(str(outcome.get(field, "")) for field in fields))
    return shown


if __name__ == "__main__":
    sys.exit(main())
