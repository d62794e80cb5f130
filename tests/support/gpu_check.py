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
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

import torch

from steps.bench import rows

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
PYTEST = "-m", "pytest", "-q", "-p", "no:cacheprovider"


def sanitized():
    """{kernel: arguments of Python that run it}: what takes longest comes first. Stage 04 runs kernels of 02 and 03."""
    commands = {
        "03_triton/flash": (*PYTEST, "tests/test_step03_features.py", "-k", "as_models"),
        "03_triton/decode": (*PYTEST, "tests/test_step03_decode.py", "-k", "queries_and_groups"),
        "01_fa1_numba": (*PYTEST, "tests/test_step01_fa1_numba.py", "-k", "ragged"),
    }
    for stage, kind, module in (("03_triton", "py", "sanitized_triton"), ("02_fa2_cuda", "cu", "sanitized_kernels")):
        for file in sorted((rows.ROOT / "steps" / f"step{stage}").glob(f"?wd_*.{kind}")):
            commands[f"{stage}/{file.stem}"] = "-m", f"tests.support.{module}", file.stem
    return commands


def known_reports():
    """{(tool, kernel): why its reports are no mistakes}."""
    text = (Path(__file__).parent / "known_reports.txt").read_text()
    lines = [line.split(" | ") for line in text.splitlines() if " | " in line]
    return {(tool, kernel): reason for tool, kernel, reason in lines[1:]}  # The first line says what the columns are.


def run(command, limit=None):
    """(exit code or None after the time limit, what was printed)."""
    # PyTorch's allocator hands out pieces of large blocks: what is outside a tensor would still be inside its block.
    environment = os.environ | {"STEPS_ENGINE": "cuda", "PYTORCH_NO_CUDA_MEMORY_CACHING": "1"}
    how = dict(cwd=rows.ROOT, env=environment, text=True, errors="replace", timeout=limit)
    try:
        done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, **how)
    except subprocess.TimeoutExpired:
        return None, ""
    return done.returncode, done.stdout


def problems(sanitizer, tool, arguments):
    """How many problems a sanitizer sees in a program; or in words why it cannot tell. It is printed what it sees."""
    command = [sanitizer, "--tool", tool, *TOOLS[tool], "--target-processes", "all", sys.executable, *arguments]
    code, output = run(command, SECONDS)
    if code is None:
        return "time limit"
    found = re.findall(r"(?:ERROR|RACECHECK) SUMMARY: (\d+)(?!.*not printed)", output)
    if not found:
        return "no summary"
    if count := sum(map(int, found)):
        print(*command, output, sep="\n", flush=True)
        return count
    return 0 if code == 0 and re.search(r"[1-9]\d* passed", output) else "tests failed or did not run"


def judged(sanitizer, item):
    """{(tool, kernel): what is said of it}: "clean", "known", "seen" of a planted race, or else something bad."""
    (tool, kernel), arguments = item
    count = problems(sanitizer, tool, arguments)
    said = count if isinstance(count, str) else f"{count} problems" if count else "clean"
    found = {(tool, kernel): "known" if said.endswith("problems") and (tool, kernel) in known_reports() else said}
    if tool == "racecheck" and arguments[1] == "tests.support.sanitized_kernels":
        planted = problems(sanitizer, tool, (*arguments, "--planted"))
        more = isinstance(planted, int) and isinstance(count, int) and planted > count
        found[PLANTED, kernel] = "hangs" if planted == "time limit" else "seen" if more else "not seen"
    return found


def summary(origin, suites, sanitizers):
    """The file's text: versions, pytest's last line of each run, the sanitizers by kernel."""
    versions = [f"{name} {origin[name]}" for name in ("driver", "cuda", "torch", "triton", "python")]
    lines = [f"# Tests and sanitizers on an {origin['gpu']}", ""]
    lines += [f"Commit {origin['commit']}, {origin['date']}, {', '.join(versions)}. Made by `make gpu-check`.", ""]
    lines += [f"- tests on {name}: {last}" for name, (_, last) in suites.items()]
    kernels = list(dict.fromkeys(kernel for _, kernel in sorted(sanitizers)))
    clean = [kernel for kernel in kernels if all(sanitizers.get((t, kernel)) == "clean" for t in TOOLS)]
    seen = [kernel for kernel in kernels if sanitizers.get((PLANTED, kernel)) == "seen"]
    lines += ["", f"Clean under {', '.join(TOOLS)}: {', '.join(clean) or 'no kernel'}.", ""]
    lines += [f"A race planted in it is seen by racecheck: {', '.join(seen) or 'no kernel'}.", ""]
    others = {key: said for key, said in sorted(sanitizers.items()) if said not in ("clean", "seen")}
    lines += [f"- {kernel}, {tool}: {said}" for (tool, kernel), said in others.items()]
    return "\n".join([*lines, "", "Why a report is known stands in `tests/support/known_reports.txt`.", ""])


def main():
    parser = argparse.ArgumentParser(prog="make gpu-check")
    parser.add_argument("--jobs", default="2", help="processes side by side")
    parser.add_argument("--only", default="", help="a pattern of sanitizers and kernels, such as 'racecheck 03'")
    asked = parser.parse_args()
    sanitizer = shutil.which("compute-sanitizer", path=f"{os.environ.get('PATH', '')}:/usr/local/cuda/bin")
    if not torch.cuda.is_available() or not sanitizer:
        raise SystemExit("gpu-check needs a GPU and compute-sanitizer.")
    suites = {"one GPU": ("not multigpu", "-n", asked.jobs, "--dist", "loadgroup"), "all GPUs": ("multigpu", "-n", "0")}
    ignored = [f"--ignore=tests/test_{name}.py" for name in WITHOUT_GPU]
    for name, how in suites.items() if not asked.only else ():
        code, output = run([sys.executable, *PYTEST, "tests", *ignored, "-m", *how])
        print(output, flush=True)
        suites[name] = code, output.strip().rpartition("\n")[2]
    items = [((tool, kernel), arguments) for kernel, arguments in sanitized().items() for tool in TOOLS]
    items = [item for item in items if re.search(asked.only, " ".join(item[0]))]
    with ThreadPoolExecutor(int(asked.jobs)) as pool:
        sanitizers = {key: said for found in pool.map(partial(judged, sanitizer), items) for key, said in found.items()}
    text = summary(rows.provenance() | {"python": sys.version.split()[0]}, {} if asked.only else suites, sanitizers)
    print(text)
    if not asked.only:
        (rows.COMMITTED / f"{rows.slug(torch.cuda.get_device_name())}.checks.md").write_text(text)
    failed = not asked.only and any(code for code, _ in suites.values())
    raise SystemExit(failed or not sanitizers or not set(sanitizers.values()) <= set(GOOD))


if __name__ == "__main__":
    main()
