"""`python -m reference.bench.gpu_check`: the proof that the course is right on this GPU, as a file to commit.

Runs the test suite and, over every kernel at small sizes, compute-sanitizer's memcheck (accesses out of
bounds) and racecheck (unsynchronised shared memory), and writes reference/bench/results/<gpu>.checks.json:
what passed, failed and was skipped, the sanitizers' summaries, versions, and the hash of each kernel's files.
Nothing counts as clean that did not run to its end: a time limit, a missing summary or a run in which no test
passed is recorded as such.
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
from pathlib import Path
from xml.etree import ElementTree

import torch
from rich.console import Console
from rich.table import Table

from reference.bench import rows
from reference.bench.source import source_files, source_hash

SUITE = ("-m", "pytest", "tests", "-q")
# What runs under the sanitizers, as arguments of Python: every rung of a stage, and the ragged cases in all
# its dtypes. Stage 00 has no kernels, and stage 04's are stage 03's.
_SMALL = ("-q", "-p", "no:cacheprovider", "-k", "every_rung or ragged")
SANITIZED = {
    "01_fa1_numba": ("-m", "pytest", "tests/test_step01_fa1_numba.py", *_SMALL),
    "02_fa2_cuda": ("-m", "pytest", "tests/test_step02_fa2_cuda.py", *_SMALL),
    "03_triton": ("-m", "pytest", "tests/test_step03_triton.py", *_SMALL),
}
# memcheck would count refused driver calls too: torch asks for functions that a driver may lack, and handles the answer.
TOOLS = {"memcheck": ("--report-api-errors", "no"), "racecheck": ()}
PARTS = ("suite", *TOOLS)


def run_suite(limit):
    """The test suite's outcome: counts, the failures by name, the skips by reason."""
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "junit.xml"
        code, output, seconds = run_limited([sys.executable, *SUITE, f"--junitxml={report}"], limit)
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


def sanitize(tool, stage, limit):
    """One sanitizer over one stage's kernels."""
    sanitizer = shutil.which("compute-sanitizer", path=f"{os.environ.get('PATH', '')}:/usr/local/cuda/bin")
    if sanitizer is None:
        return {"status": "missing"}
    command = [sanitizer, "--tool", tool, *TOOLS[tool], "--target-processes", "all", sys.executable, *SANITIZED[stage]]
    # PyTorch's allocator hands out pieces of large blocks: out of a tensor's bounds would be inside a block.
    code, output, seconds = run_limited(command, limit, PYTORCH_NO_CUDA_MEMORY_CACHING="1")
    found = parse_sanitizer(output)
    status = "timeout" if code is None else verdict(found, code)
    tail = {} if status == "clean" else {"tail": output.splitlines()[-20:]}
    return {"status": status, **found, "seconds": round(seconds), **tail}


def parse_sanitizer(output):
    """What compute-sanitizer and pytest print at their ends: {"summaries", "problems", "passed"}.

    problems: memcheck's errors, or racecheck's hazards (errors and warnings), of all processes together.
    """
    summaries = list(re.finditer(r"(?:ERROR|RACECHECK) SUMMARY: (\d+)[^\n]*", output))
    passed = re.findall(r"(\d+) passed", output)
    return {
        "summaries": [match[0] for match in summaries],
        "problems": sum(int(match[1]) for match in summaries),
        "passed": int(passed[-1]) if passed else 0,
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


def check(parts, stages, suite_limit, limit):
    """{name: outcome} of the suite and of each sanitizer over each stage, as far as they are asked for."""
    outcomes = {"suite": run_suite(suite_limit)} if "suite" in parts else {}
    for tool in TOOLS:
        for stage in stages if tool in parts else ():
            outcomes[f"{tool} {stage}"] = sanitize(tool, stage, limit)
    return outcomes


def main(arguments=None):
    """Exit code: 0 if everything asked for passed and was clean."""
    parser = argparse.ArgumentParser(prog="python -m reference.bench.gpu_check", description=__doc__.partition("\n")[0])
    parser.add_argument("--only", nargs="+", choices=PARTS, default=PARTS, help="run these; keep the others' last outcome")
    parser.add_argument(
        "--stages",
        nargs="+",
        choices=tuple(SANITIZED),
        default=tuple(SANITIZED),
        help="whose kernels to sanitize",
    )
    parser.add_argument("--suite-limit", type=float, default=1800, metavar="S", help="seconds for the suite (1800)")
    parser.add_argument("--limit", type=float, default=300, metavar="S", help="seconds for each sanitizer run (300)")
    parser.add_argument("--commit", help="what is checked, for a machine without the git history")
    parser.add_argument("--folder", type=Path, default=rows.COMMITTED, help="where the file goes")
    options = parser.parse_args(arguments)
    console = Console()
    if not torch.cuda.is_available():
        console.print("gpu-check needs a GPU, and torch sees none here.")
        return 1

    origin = {
        **rows.provenance(commit=options.commit),
        "python": sys.version.split()[0],
        "sources": kernel_hashes(),
    }
    outcomes = check(options.only, options.stages, options.suite_limit, options.limit)
    path = options.folder / f"{rows.slug(origin['gpu'])}.checks.json"
    checks = merge(json.loads(path.read_text()) if path.exists() else {}, {**origin, "outcomes": outcomes})
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(checks, indent=1) + "\n")
    console.print(table(checks))
    console.print(f"written: {path}")
    return 0 if all(one["status"] in ("passed", "clean") for one in outcomes.values()) else 1


def table(checks):
    """The outcomes as a rich Table."""
    shown = Table(title=f"{checks['gpu']}, torch {checks['torch']}, triton {checks['triton']}", title_justify="left")
    fields = ("status", "passed", "failed", "skipped", "problems", "seconds")
    for name in ("check", *fields):
        shown.add_column(name)
    for name, outcome in checks["outcomes"].items():
        shown.add_row(name, *(str(outcome.get(field, "")) for field in fields))
    return shown


if __name__ == "__main__":
    sys.exit(main())
