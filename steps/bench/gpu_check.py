"""`python -m steps.bench.gpu_check`: the proof that the course is right on this GPU, as a file to commit.

Runs the tests that use a GPU and, over every kernel at small sizes, compute-sanitizer's tools: memcheck (accesses out
of bounds), racecheck (unsynchronised shared memory), initcheck (reads of memory that nobody wrote) and synccheck
(barriers misused). Writes steps/bench/results/<gpu>.checks.json: what passed, failed and was skipped, the sanitizers'
summaries and reports, versions, and the hash of each kernel's files. Nothing counts as clean that did not run to its
end: a time limit, a missing summary or a run in which no test passed is recorded as such.

Each kernel of stage 02 also runs with a race planted in it, because it is not certain that racecheck looks at a kernel
at all; the outcome's `planted` says whether the race was seen.
"""

import contextlib
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor, as_completed
from functools import partial
from typing import Annotated

import torch
import typer

from steps.bench import rows
from steps.bench.fingerprint import code_hash

# These never use a GPU.
WITHOUT_GPU = tuple(
    f"tests/test_{what}.py"
    for what in ("cache emulator emulator_hopper environment errata feature_mutants features_reference mutants mutate "
                 "notebooks readme reference slides step03_memcheck step04_simulate structure timeline").split()
)  # fmt: skip
# Each of these takes longer than all others together.
STAGE_02, WORKBOOK = "tests/test_step02_fa2_cuda.py", "tests/test_workbook.py"
STAGES = sorted(f"tests/{path.name}" for path in (rows.ROOT / "tests").glob("test_step0*.py"))
STAGE_03 = tuple(f"tests/test_step03_{what}.py" for what in ("triton", "features", "options", "decode"))
SUITES = {
    "suite": (
        "tests", *(f"--ignore={file}" for file in (*WITHOUT_GPU, STAGE_02, *STAGE_03, WORKBOOK)),
        "--dist", "worksteal", "-m", "not multigpu",
    ),
    # One after the other: they measure how long ranks take to end.
    "suite multigpu": (*STAGES, "-m", "multigpu", "-n", "0"),
    "suite 02_fa2_cuda": (STAGE_02, "--dist", "loadgroup"),
    "suite 03_triton": (*STAGE_03, "--dist", "load"),
    "suite workbook": (WORKBOOK, "--dist", "worksteal"),
}  # fmt: skip


def _tests(file, selected):
    return "-m", "pytest", f"tests/{file}.py", "-q", "-p", "no:cacheprovider", "-k", selected


def _commands(stage, kind, module):
    """For each file of a stage's ladder a command that runs its kernels, by "stage/file"."""
    files = sorted((rows.ROOT / "steps" / f"step{stage}").glob(f"?wd_*.{kind}"))
    return {f"{stage}/{file.stem}": ("-m", f"tests.support.{module}", file.stem) for file in files}


# What runs under the sanitizers, as arguments of Python: each kernel file of stages 02 and 03 alone, stage 03's
# features, and the ragged cases of all rungs of stage 01. Stage 00 has no kernels, and stage 04's are those of 02 and
# 03. What takes longest begins first.
SANITIZED = {
    "03_triton/flash": _tests("test_step03_features", "as_models"),
    "03_triton/decode": _tests("test_step03_decode", "queries_and_groups"),
    "01_fa1_numba": _tests("test_step01_fa1_numba", "ragged"),
    **_commands("03_triton", "py", "sanitized_triton"),
    **_commands("02_fa2_cuda", "cu", "sanitized_kernels"),
}
# memcheck would also count refused driver calls, but torch asks for what a driver may lack, and handles the answer.
_ALL = ("--show-backtrace", "no", "--print-limit", "100000")  # one kernel can have many reports of the kind in LISTED
TOOLS = {"memcheck": ("--report-api-errors", "no"), "racecheck": (), "initcheck": _ALL, "synccheck": ()}
SUITE_SECONDS, SANITIZER_SECONDS = 1800, 300  # the limits of one part of the suite, and of one run of a sanitizer
INTERRUPTED_SECONDS = 15  # to end after a limit
PRINTED = ("status", "passed", "failed", "skipped", "problems", "planted")  # of an outcome
GOOD = ("passed", "clean", "listed")  # the statuses that prove something


def _lines(file, *begins):
    """A pattern of the numbers of those lines of a file of stage 03 that begin so, one for each."""
    lines = (rows.ROOT / "steps" / "step03_triton" / f"{file}.py").read_text().splitlines()
    found = [[n for n, line in enumerate(lines, 1) if line.startswith(begin)] for begin in begins]
    return rf"{file}\.py:(?:{'|'.join(str(number) for (number,) in found)})"


# What Triton adds to a kernel in order to divide its warps has the numbers of these lines. In gluon nothing else has.
# In roles the kernel's own writes can have them, too, but nothing else reads at the line where the kernel begins.
_GLUON = "(?:Read|Write) access at forward_kernel in " + _lines(
    "fwd_3_gluon", "def forward_kernel(", "    gl.warp_specialize("
)
_READ = "Read access at forward_kernel in " + _lines("fwd_2_roles", "def forward_kernel(")
_WRITE = "Write access at forward_kernel in " + _lines(
    "fwd_2_roles", "def forward_kernel(", "        return x.load([first, 0])", "    tl.store(lse + "
)
# By tool: reports that are no mistakes, of which kernels, and why.
LISTED = {
    "racecheck": (
        ("03_triton/fwd_2_roles", "03_triton/fwd_3_gluon"),
        f"^Error: Race reported between (?:{_GLUON}(?: and {_GLUON})+|{_READ}(?: and {_WRITE})+)$",
        "Through shared memory Triton tells each warp which function to run, and hands it values. In the PTX, barrier "
        "1 stands between each of these stores and each load, and all 384 threads wait for it. It is not known why "
        "racecheck does not see that.",
    ),
    "initcheck": (
        (
            *("02_fa2_cuda/bwd_2_wgmma", "02_fa2_cuda/bwd_3_hopper"),
            *("03_triton/fwd_1_tma", "03_triton/fwd_3_gluon", "03_triton/bwd_1_tma"),
        ),
        "^Host API memory access error .* cudaMemcpy source$",
        "initcheck does not see what the copy engine stores (cp.async.bulk.tensor): out, dq, dk or dv, whose every "
        "number is compared with the reference in the same run. It says the same of a few lines, "
        "`python -m tests.support.sanitized_kernels tma_store`. racecheck does not see such copies either, as "
        "flash-attention's AI/RACECHECK_TMA_HAZARD.md tells.",
    ),
}


def run_suite(name, processes, limit):
    """The outcome of a part of the test suite: counts, the failures by name and message, the skips by reason."""
    command = [sys.executable, "-m", "pytest", "-q", "-rfEs", "--tb=short", "-n", str(processes), *SUITES[name]]
    code, output, seconds = run_limited(command, limit, COLUMNS="400")  # of a long line pytest would cut the message
    outcome = parse_suite(output)
    status = "timeout" if code is None else "passed" if code == 0 and outcome["passed"] else "failed"
    tail = {} if status == "passed" else {"tail": output.splitlines()[-20:]}
    return {"status": status, "seconds": round(seconds), **outcome, **tail}


def parse_suite(output):
    """What pytest prints at its end with -rfEs; a fixture's error counts as failed."""
    failures = re.findall(r"^(?:FAILED|ERROR) (.+)$", output, re.M)
    skips = Counter()
    for count, reason in re.findall(r"^SKIPPED \[(\d+)\] \S+ (.+)$", output, re.M):
        skips[reason] += int(count)
    counts = {"passed": count_passed(output), "failed": len(failures), "skipped": skips.total()}
    return {**counts, "failures": failures, "skips": dict(skips)}


def count_passed(output):
    """How many tests passed, as the last summary in the output says."""
    found = re.findall(r"(\d+) passed", output)
    return int(found[-1]) if found else 0


def sanitize(tool, what, limit):
    """One sanitizer over one of SANITIZED; of racecheck and stage 02 also whether it sees a planted race."""
    found, code, seconds, output = run_sanitizer(tool, SANITIZED[what], limit)
    status = "timeout" if code is None else verdict(found, code)
    extra = {} if status == "clean" else {"tail": output.splitlines()[-20:]}
    if status == "problems" and is_listed(tool, what, found["reports"]):
        extra |= {"status": "listed", "listed": LISTED[tool][-1]}
    if tool == "racecheck" and SANITIZED[what][1] == "tests.support.sanitized_kernels":
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
    # PyTorch's allocator hands out pieces of large blocks: what is outside a tensor would still be inside its block.
    code, output, seconds = run_limited(command, limit, PYTORCH_NO_CUDA_MEMORY_CACHING="1")
    return parse_sanitizer(output), code, seconds, output


def parse_sanitizer(output):
    """What compute-sanitizer and the tests print at their ends: {"summaries", "problems", "passed", "reports"}.

    problems: errors, or racecheck's hazards (errors and warnings), of all processes together. reports: the different
    ones, the lines that say what and where, without addresses.
    """
    found = re.finditer(r"(?:ERROR|RACECHECK) SUMMARY: (\d+)[^\n]*", output)
    summaries = [match for match in found if "not printed" not in match[0]]
    kinds = "Host API|Error|Warning|Invalid|Uninitialized|Barrier error|Potential|Program hit"
    pattern = rf"^=+ ((?:{kinds})[^\n]*(?:\n=+ {{4,}}(?:at|and|Uninitialized) [^\n]*)*)"
    reports = re.findall(pattern, output, re.M)
    plain = [re.sub(r"\n=+ +| \[\d+ hazards?\]|\+0x\w+|0x\w+", " ", report).strip() for report in reports]
    return {
        "summaries": [match[0] for match in summaries],
        "problems": sum(int(match[1]) for match in summaries),
        "passed": count_passed(output),
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
        command,
        cwd=rows.ROOT,
        env=environment,
        text=True,
        errors="replace",
        start_new_session=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
    )
    try:
        output, _ = process.communicate(timeout=limit)
        code = process.returncode
    except subprocess.TimeoutExpired:
        output, code = _interrupted(process), None
    return code, output, time.monotonic() - start


def _interrupted(process):
    """What the process and its children print when they are interrupted: pytest tells what has failed so far."""
    process.send_signal(signal.SIGINT)
    try:
        output, _ = process.communicate(timeout=INTERRUPTED_SECONDS)
    except subprocess.TimeoutExpired:
        output = None
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    return output or process.communicate()[0]


def kernel_hashes(root=rows.ROOT):
    """{"02_fa2_cuda/fwd_0_scalar": hash of its code} of every file with kernels; "04_ring" is all code of the ring."""
    rungs = root.glob("steps/step*/?wd_*")
    others = (root / "steps" / "step03_triton" / f"{name}.py" for name in ("flash", "decode"))
    kernels = sorted({(path.parent.name.removeprefix("step"), path.stem) for path in (*rungs, *others)})
    ring = root / "steps" / "step04_ring"
    of_ring = "+".join(path.relative_to(ring).with_suffix("").as_posix() for path in ring.rglob("*.py"))
    hashes = {f"{stage}/{name}": code_hash(stage, name, root) for stage, name in kernels}
    return hashes | {"04_ring": code_hash("04_ring", of_ring, root)}


def merge(old, new):
    """`new` with the outcomes that only `old` has, where both speak of the same machine and the same code.

    The code of a sanitizer's run or of a suite is that of the kernel or stage that it names, otherwise all of
    kernel_hashes(). Records from before it had "04_ring" keep no outcome of the latter kind.
    """
    if any(old.get(name) != new[name] for name in ("gpu", "driver", "cuda", "torch", "triton", "python")):
        return new

    def same_code(outcome):
        named = outcome.split()[-1]
        what = named if any(kernel.startswith(named) for kernel in new["sources"]) else ""
        of_old, of_new = ({k: v for k, v in x["sources"].items() if k.startswith(what)} for x in (old, new))
        return of_old == of_new

    kept = {name: outcome for name, outcome in old["outcomes"].items() if same_code(name)}
    return {**new, "outcomes": {**kept, **new["outcomes"]}}


def run_all(only, jobs, seconds):
    """Yields (name, outcome) as they end: first the suites, one after the other, then the sanitizers, `jobs` at a time.

    After `seconds` nothing more is begun, and the outcome of what was not begun is None.
    """
    end = time.monotonic() + seconds

    def run(name, function, limit):
        left = end - time.monotonic()
        return name, function(min(left, limit)) if left > 10 else None

    for name in SUITES:
        if re.search(only, name):
            yield run(name, partial(run_suite, name, jobs), SUITE_SECONDS)
    sanitizers = {f"{tool} {what}": partial(sanitize, tool, what) for what in SANITIZED for tool in TOOLS}
    asked = [(name, function, SANITIZER_SECONDS) for name, function in sanitizers.items() if re.search(only, name)]
    with ThreadPoolExecutor(jobs) as pool:
        waiting = [pool.submit(run, *one) for one in asked]
        yield from (future.result() for future in as_completed(waiting))


def main(
    only: Annotated[str, typer.Option(help="A pattern of names, suite or 'racecheck 03'; the others stay.")] = "",
    minutes: Annotated[float, typer.Option(help="For everything; what is not begun by then is left out.")] = 60,
    jobs: Annotated[int, typer.Option(help="Processes side by side.")] = 2,
    commit: rows.Commit = None,
    out: rows.Folder = rows.COMMITTED,
):
    """The proof that the course is right on this GPU. Exit code 0 if all outcomes are passed, clean or listed."""
    if not torch.cuda.is_available():
        raise SystemExit("gpu-check needs a GPU, and torch sees none here.")
    # A program that a shell starts in the background ignores SIGINT, and its children inherit that. Then pytest would
    # not be interrupted at a time limit, and would not tell what had failed until then.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    origin = {**rows.provenance(commit=commit), "python": sys.version.split()[0], "sources": kernel_hashes()}
    old = rows.read_record("checks", origin["gpu"], out) or rows.read_record("checks", origin["gpu"])
    outcomes, bad = {}, []
    for name, outcome in run_all(only, jobs, 60 * minutes):
        if outcome is None:
            print(f"{name}: no time left")
        else:
            outcomes[name] = outcome  # written at once, so that who stops the run keeps what there is
            rows.write_record("checks", merge(old, {**origin, "outcomes": outcomes}), out)
            print(f"{name}:", ", ".join(f"{key} {outcome[key]}" for key in PRINTED if key in outcome), flush=True)
        if outcome is None or outcome["status"] not in GOOD:
            bad.append(name)
    raise typer.Exit(1 if bad or not outcomes else 0)


if __name__ == "__main__":
    typer.run(main)
