"""`make gpu-check` on the CPU: what it makes of the tools' words, and that what it runs checks its results."""

import os
import re
import shutil
import subprocess
import sys
from collections import Counter

import pytest

from reference import error
from steps import catalogue, engine
from steps.bench import rows
from support import gpu_check, sanitized_kernels

STAGE_02 = rows.ROOT / "steps" / "step02_fa2_cuda"
needs_triton = pytest.mark.skipif(bool(catalogue.unavailable("03")), reason="there is no Triton")

CLEAN = "========= COMPUTE-SANITIZER\n12 passed in 9.1s\n========= ERROR SUMMARY: 0 errors\n"
NO_RACE = CLEAN.replace("ERROR SUMMARY: 0 errors", "RACECHECK SUMMARY: 0 hazards displayed (0 errors, 0 warnings)")
RACE = """========= COMPUTE-SANITIZER
========= Error: Race reported between Write access at attention_backward+0x430 in ptx.cuh:7
=========     and Read access at attention_backward+0x770 in bwd_2_wgmma.cu:55 [248 hazards]
4 passed
========= ERROR SUMMARY: 669 errors were not printed. Use --print-limit option to adjust the number of printed errors
========= RACECHECK SUMMARY: 1 hazard displayed (1 error, 0 warnings)
"""
REPORT = "Error: Race reported between Write access at attention_backward in ptx.cuh:7 and Read access at "
REPORT += "attention_backward in bwd_2_wgmma.cu:55"


@pytest.mark.parametrize(
    "what, output, code, planted, said",
    [
        ("synccheck 01_fa1_numba", CLEAN, 0, "", ["clean"]),
        ("synccheck 01_fa1_numba", CLEAN, 1, "", ["tests failed or did not run"]),
        ("synccheck 01_fa1_numba", CLEAN.replace("12 passed", "12 deselected"), 0, "", ["tests failed or did not run"]),
        ("synccheck 01_fa1_numba", "12 passed", 0, "", ["no summary"]),
        ("synccheck 01_fa1_numba", CLEAN, None, "", ["time limit"]),
        ("racecheck 03_triton/fwd_2_roles", RACE, 0, "", ["known"]),
        ("racecheck 03_triton/fwd_1_tma", RACE, 0, "", [f"1 problems: {REPORT}"]),
        ("racecheck 02_fa2_cuda/fwd_0_scalar", NO_RACE, 0, RACE, ["clean", "seen"]),
        ("racecheck 02_fa2_cuda/fwd_0_scalar", NO_RACE, 0, NO_RACE, ["clean", "not seen"]),
        ("racecheck 02_fa2_cuda/fwd_0_scalar", RACE, 0, RACE, [f"1 problems: {REPORT}", "not seen"]),  # no new report
    ],
)
def test_nothing_is_clean_that_did_not_run_to_its_end(monkeypatch, what, output, code, planted, said):
    answers = {False: (code, output), True: (0, planted)}
    monkeypatch.setattr(gpu_check, "run", lambda command, limit: answers["--planted" in command])
    tool, kernel = what.split()
    found = gpu_check.judged("compute-sanitizer", ((tool, kernel), gpu_check.sanitized()[kernel]))
    assert list(found.values()) == said and list(found)[0] == (tool, kernel)
    assert (set(said) <= set(gpu_check.GOOD)) == (said in (["clean"], ["known"], ["clean", "seen"]))


def test_a_time_limit_ends_what_runs():
    assert gpu_check.run([sys.executable, "-c", "import time; time.sleep(60)"], 0.5) == (None, "")
    assert gpu_check.run([sys.executable, "-c", "print(7)"], 60) == (0, "7\n")


def test_the_summary_has_every_file_and_what_is_not_clean(tmp_path):
    file = tmp_path / "test_some.py"
    file.write_text("import pytest\ndef test_a(): pass\ndef test_b(): assert 0\ndef test_c(): pytest.skip('x')\n")
    report = tmp_path / "report.xml"
    command = [sys.executable, "-m", "pytest", "-p", "no:xdist", "-c", "/dev/null", file, f"--junitxml={report}"]
    subprocess.run(command, cwd=tmp_path, stdout=subprocess.DEVNULL)
    tests = gpu_check.counts(report)
    assert tests == {"test_some": Counter(passed=1, failed=1, skipped=1)}
    kernels = {(tool, "02/a"): "clean" for tool in gpu_check.TOOLS} | {("memcheck", "02/b"): "time limit"}
    text = gpu_check.summary(rows.provenance("cpu", commit="c") | {"python": "3.12"}, tests, kernels)
    assert "| test_some | 1 | 1 | 1 |" in text and ": 02/a.\n" in text and "- 02/b, memcheck: time limit" in text


def test_known_reports_are_of_kernels_that_there_are():
    known = gpu_check.known_reports()
    assert known and {kernel for _, kernel in known} <= set(gpu_check.sanitized())
    assert {tool for tool, _ in known} <= set(gpu_check.TOOLS) and all(known.values())
    for name in gpu_check.WITHOUT_GPU:
        text = (rows.ROOT / "tests" / f"test_{name}.py").read_text()
        assert "\n@pytest.mark.gpu" not in text and "\n@pytest.mark.multigpu" not in text


def test_every_kernel_is_sanitized_and_each_of_stage_02_has_a_planted_race():
    kernels = {path.stem for path in STAGE_02.glob("*.cu")}
    of_stage_03 = {path.stem for path in (STAGE_02.parent / "step03_triton").glob("?wd_*.py")} | {"flash", "decode"}
    others = {"01_fa1_numba", *(f"03_triton/{kernel}" for kernel in of_stage_03)}
    assert {f"02_fa2_cuda/{kernel}" for kernel in kernels} | others == set(gpu_check.sanitized())
    assert set(sanitized_kernels.PLANTED) == kernels
    for kernel in kernels:
        text = (STAGE_02 / f"{kernel}.cu").read_text()
        planted = sanitized_kernels.with_a_race(text, kernel)
        changed = [a for a, b in zip(text.splitlines(), planted.splitlines(), strict=True) if a != b]
        (line,) = (a for a in changed if "Spill budget" not in a)
        assert re.search("barrier|syncthreads", line)
        with pytest.raises(ValueError, match="0 lines"):
            sanitized_kernels.with_a_race(planted, kernel)


@pytest.mark.skipif(not shutil.which("g++"), reason="without a GPU stage 02 needs g++, and there is none")
def test_what_runs_under_the_sanitizers_checks_its_results(monkeypatch):
    assert sanitized_kernels.check("fwd_0_scalar", N=40, head_dims=(64, 128)) == 2  # scalar takes no head_dim 128
    assert sanitized_kernels.check("fwd_0_scalar", planted=True, N=40, head_dims=(64,)) == 0
    assert sanitized_kernels.check("bwd_3_hopper", N=40, head_dims=(64,)) == 4  # dq is added in a fixed order, too
    assert sanitized_kernels.tma_store() == 1
    monkeypatch.setattr(error, "failures", lambda got, want: {"out": (1.0, 0.1)} if list(got) == ["out", "lse"] else {})
    with pytest.raises(AssertionError, match="fwd_0_scalar, D=64, causal=False"):
        sanitized_kernels.check("fwd_0_scalar", N=40, head_dims=(64,))


@needs_triton
@pytest.mark.skipif(engine.name != "cpu", reason="gpu-check runs it on a GPU")
def test_what_runs_of_stage_03_under_the_sanitizers_checks_its_results(monkeypatch):
    from support import sanitized_triton  # It needs Triton.

    module = "tests.support.sanitized_triton"
    assert set(sanitized_triton.KERNELS) == {what[2] for what in gpu_check.sanitized().values() if what[1] == module}
    assert sanitized_triton.check("fwd_2_roles", N=40) == 5  # the fifth one with warps that have roles
    assert sanitized_triton.check("bwd_1_tma", N=40) == 4
    monkeypatch.setattr(error, "failures", lambda got, want: {"dk": (1.0, 0.1)} if "dk" in got else {})
    with pytest.raises(AssertionError, match="bwd_0_fused, N=40, D=64, torch.float32, causal=False: .*dk"):
        sanitized_triton.check("bwd_0_fused", N=40)


DELTA = """
import torch, triton
from support import compile_triton
from steps.step03_triton import {module}
triton.runtime.driver.set_active(compile_triton.Driver())
torch.cuda.get_device_capability = lambda device=None: (8, 0)
launch = triton.runtime.jit.JITFunction.run
def compile_only(kernel, *args, grid, warmup, **options):
    if kernel.__name__ == "delta_kernel":
        print(launch(kernel, *args, grid=grid, warmup=True, **options).asm["ptx"])
triton.runtime.jit.JITFunction.run = compile_only
x = torch.zeros(1, 1, 64, 24)  # Of rows with 24 numbers each lane takes one.
{module}.backward(x, x, x, x, x, torch.zeros(1, 1, 64))
"""


@needs_triton
@pytest.mark.long
@pytest.mark.parametrize("module", ["bwd_0_fused", "flash"])
def test_every_lane_that_stores_a_number_of_delta_stores_the_same(module):
    """No product is fused into the addition of what another lane sends. It would be rounded in that lane only.

    racecheck saw the lanes store numbers that differed. bwd_1_tma takes 16-bit numbers only, whose products are exact
    in float32, so that it does not matter there.
    """
    path = os.pathsep.join((str(rows.ROOT), str(rows.ROOT / "tests")))
    environment = os.environ | {"STEPS_ENGINE": "compile", "TRITON_INTERPRET": "0", "PYTHONPATH": path}
    command = [sys.executable, "-c", DELTA.format(module=module)]
    ptx = subprocess.run(command, cwd=rows.ROOT, env=environment, capture_output=True, text=True, check=True).stdout
    sent = set(re.findall(r"shfl\.sync\.bfly\.b32\s+(%\w+),", ptx))
    added = set(re.findall(r"fma\.rn\.f32\s+%\w+, %\w+, %\w+, (%\w+);", ptx))
    assert sent and not sent & added
