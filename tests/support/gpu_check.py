"""`make gpu-check`: runs the tests and NVIDIA's sanitizers on this machine's GPU, and writes a summary to commit.

compute-sanitizer's tools run over every kernel at small sizes: memcheck (accesses out of bounds), racecheck
(unsynchronised shared memory), initcheck (reads of memory that nobody wrote) and synccheck (barriers misused). A kernel
is clean only if the tool came to its summary, found nothing, and tests passed under it. What known_reports.txt lists is
no mistake. A kernel of stage 02 also runs with a race planted in it, which shows whether racecheck looks at it at all.
"""

import argparse
import os
import re
import shutil
import subprocess
import sys
import tempfile
import xml.etree.ElementTree as ElementTree
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

import torch

from steps.bench import rows

HERE = Path(__file__).parent
# memcheck would also count refused driver calls, but torch asks for what a driver may lack, and handles the answer.
TOOLS = {
    "memcheck": ("--report-api-errors", "no"), "racecheck": (), "synccheck": (),
    "initcheck": ("--show-backtrace", "no", "--print-limit", "100000"),
}  # fmt: skip
SECONDS = 300  # the limit of one run of a sanitizer
PLANTED = "racecheck of a planted race"
GOOD = "clean", "known", "seen", "hangs"  # A kernel without a barrier may wait for ever: then racecheck tells nothing.
# These never use a GPU.
WITHOUT_GPU = """bench_ring step02_cache emulator emulator_hopper environment errata feature_mutants features_reference
figures gpu_check mutants mutate notebooks readme reference sign slides step03_memcheck step04_simulate
structure""".split()
SUITE = "tests", "-q", "-p", "no:cacheprovider", *(f"--ignore=tests/test_{name}.py" for name in WITHOUT_GPU)


def sanitized():
    """{kernel: arguments of Python that run it}: what takes longest comes first. Stage 04 runs kernels of 02 and 03."""

    def test(file, selected):
        return "-m", "pytest", f"tests/{file}.py", "-q", "-p", "no:cacheprovider", "-k", selected

    commands = {
        "03_triton/flash": test("test_step03_features", "as_models"),
        "03_triton/decode": test("test_step03_decode", "queries_and_groups"),
        "01_fa1_numba": test("test_step01_fa1_numba", "ragged"),
    }
    for stage, kind, module in (("03_triton", "py", "sanitized_triton"), ("02_fa2_cuda", "cu", "sanitized_kernels")):
        for file in sorted((rows.ROOT / "steps" / f"step{stage}").glob(f"?wd_*.{kind}")):
            commands[f"{stage}/{file.stem}"] = "-m", f"tests.support.{module}", file.stem
    return commands


def known_reports():
    """{(tool, kernel): why its reports are no mistakes}."""
    lines = [line.split(" | ") for line in (HERE / "known_reports.txt").read_text().splitlines() if " | " in line]
    return {(tool, kernel): reason for tool, kernel, reason in lines[1:]}  # The first line says what the columns are.


def run(command, limit=None):
    """(exit code or None after the time limit, what was printed)."""
    # PyTorch's allocator hands out pieces of large blocks: what is outside a tensor would still be inside its block.
    environment = os.environ | {"STEPS_ENGINE": "cuda", "PYTORCH_NO_CUDA_MEMORY_CACHING": "1"}
    how = dict(cwd=rows.ROOT, env=environment, text=True, errors="replace")
    try:
        done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, timeout=limit, **how)
    except subprocess.TimeoutExpired:
        return None, ""
    return done.returncode, done.stdout


def sanitize(sanitizer, tool, arguments):
    """(what a sanitizer says of a program in words, its different reports)."""
    command = [sanitizer, "--tool", tool, *TOOLS[tool], "--target-processes", "all", sys.executable, *arguments]
    code, output = run(command, SECONDS)
    if code is None:
        return "time limit", []
    found = re.findall(r"(?:ERROR|RACECHECK) SUMMARY: (\d+)(.*)", output)
    summaries = [count for count, rest in found if "not printed" not in rest]
    kinds = "Host API|Error|Warning|Invalid|Uninitialized|Barrier error|Potential|Program hit"
    found = re.findall(rf"^=+ ((?:{kinds}).*(?:\n=+ {{4,}}(?:at|and|Uninitialized) .*)*)", output, re.M)
    plain = [re.sub(r"\n=+ +| \[\d+ hazards?\]|\+0x\w+|0x\w+", " ", report) for report in found]
    reports = list(dict.fromkeys(" ".join(report.split()) for report in plain))
    if not summaries:
        return "no summary", reports
    if problems := sum(map(int, summaries)):
        return f"{problems} problems", reports
    passed = re.search(r"[1-9]\d* passed", output)
    return ("clean" if passed and code == 0 else "tests failed or did not run"), reports


def judged(sanitizer, item):
    """{(tool, kernel): what is said of it}: "clean", "known", "seen" of a planted race, or else something bad."""
    (tool, kernel), arguments = item
    said, reports = sanitize(sanitizer, tool, arguments)
    if said.endswith("problems"):
        said = "known" if (tool, kernel) in known_reports() else f"{said}: {'; '.join(reports)}"
    if tool == "racecheck" and arguments[1] == "tests.support.sanitized_kernels":
        planted, new = sanitize(sanitizer, tool, (*arguments, "--planted"))
        seen = "hangs" if planted == "time limit" else "seen" if set(new) - set(reports) else "not seen"
        return {(tool, kernel): said, (PLANTED, kernel): seen}
    return {(tool, kernel): said}


def counts(report):
    """{file: Counter of passed, failed and skipped} of pytest's --junitxml."""
    found = {}
    for case in ElementTree.parse(report).iter("testcase"):
        file = re.search(r"test_\w+", case.get("classname"))[0]
        ends = {child.tag for child in case}
        how = "failed" if ends & {"failure", "error"} else "skipped" if "skipped" in ends else "passed"
        found.setdefault(file, Counter())[how] += 1
    return found


def summary(origin, tests, sanitizers):
    """The file's text: versions, the tests by file, the sanitizers by kernel."""
    versions = [f"{name} {origin[name]}" for name in ("driver", "cuda", "torch", "triton", "python")]
    lines = [f"# Tests and sanitizers on an {origin['gpu']}", ""]
    lines += [f"Commit {origin['commit']}, {origin['date']}, {', '.join(versions)}. Made by `make gpu-check`.", ""]
    lines += ["| tests | passed | failed | skipped |", "| --- | ---: | ---: | ---: |"]
    for file, count in sorted(tests.items()):
        lines.append(f"| {file} | {' | '.join(str(count[how]) for how in ('passed', 'failed', 'skipped'))} |")
    kernels = list(dict.fromkeys(kernel for _, kernel in sorted(sanitizers)))
    clean = [kernel for kernel in kernels if all(sanitizers.get((t, kernel)) == "clean" for t in TOOLS)]
    seen = [kernel for kernel in kernels if sanitizers.get((PLANTED, kernel)) == "seen"]
    lines += ["", f"Clean under {', '.join(TOOLS)}: {', '.join(clean) or 'no kernel'}.", ""]
    lines += [f"A race planted in it is seen by racecheck: {', '.join(seen) or 'no kernel'}.", ""]
    for (tool, kernel), said in sorted(sanitizers.items()):
        if said not in ("clean", "seen"):
            lines.append(f"- {kernel}, {tool}: {said}")
    return "\n".join(lines + ["", "Why a report is known stands in `tests/support/known_reports.txt`.", ""])


def main():
    parser = argparse.ArgumentParser(prog="make gpu-check")
    parser.add_argument("--jobs", type=int, default=2, help="processes side by side")
    parser.add_argument("--only", default="", help="a pattern of sanitizers and kernels, such as 'racecheck 03'")
    parser.add_argument("--commit", help="what is checked, for a machine without the git history")
    asked = parser.parse_args()
    sanitizer = shutil.which("compute-sanitizer", path=f"{os.environ.get('PATH', '')}:/usr/local/cuda/bin")
    if not torch.cuda.is_available() or not sanitizer:
        raise SystemExit("gpu-check needs a GPU and compute-sanitizer.")
    origin = rows.provenance(commit=asked.commit) | {"python": sys.version.split()[0]}
    tests = {}
    with tempfile.TemporaryDirectory() as folder:
        parts = ("-m", "not multigpu", "-n", str(asked.jobs), "--dist", "loadgroup"), ("-m", "multigpu", "-n", "0")
        for part in parts if not asked.only else ():
            report = Path(folder) / "report.xml"
            print(run([sys.executable, "-m", "pytest", *SUITE, *part, f"--junitxml={report}"])[1], flush=True)
            for file, count in counts(report).items():
                tests[file] = tests.get(file, Counter()) + count
    items = [((tool, kernel), arguments) for kernel, arguments in sanitized().items() for tool in TOOLS]
    items = [item for item in items if re.search(asked.only, " ".join(item[0]))]
    with ThreadPoolExecutor(asked.jobs) as pool:
        sanitizers = {key: said for found in pool.map(partial(judged, sanitizer), items) for key, said in found.items()}
    text = summary(origin, tests, sanitizers)
    print(text)
    if not asked.only:
        (rows.COMMITTED / f"{rows.slug(origin['gpu'])}.checks.md").write_text(text)
    passed = all(count["failed"] == 0 for count in tests.values()) and set(sanitizers.values()) <= set(GOOD)
    raise SystemExit(not (passed and sanitizers))


if __name__ == "__main__":
    main()
