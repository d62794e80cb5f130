"""`make gpu-check` on the CPU: what it makes of the tools' words, and that what it runs checks its results."""

import re
import shutil

import pytest

from reference import error
from steps import catalogue, engine
from steps.bench import rows
from support import gpu_check, sanitized_kernels

STAGE_02 = rows.ROOT / "steps" / "step02_fa2_cuda"
needs_triton = pytest.mark.skipif(bool(catalogue.unavailable("03")), reason="there is no Triton")

CLEAN = "========= COMPUTE-SANITIZER\n12 passed in 9.1s\n========= ERROR SUMMARY: 0 errors\n"
NO_RACE = CLEAN.replace("ERROR SUMMARY: 0 errors", "RACECHECK SUMMARY: 0 hazards displayed (0 errors, 0 warnings)")
RACE = """4 passed
========= ERROR SUMMARY: 669 errors were not printed. Use --print-limit option to adjust the number of printed errors
========= RACECHECK SUMMARY: 1 hazard displayed (1 error, 0 warnings)
"""


@pytest.mark.parametrize(
    "what, output, code, planted, said",
    [
        ("synccheck 01_fa1_numba", CLEAN, 0, "", ["clean"]),
        ("synccheck 01_fa1_numba", CLEAN, 1, "", ["tests failed or did not run"]),
        ("synccheck 01_fa1_numba", CLEAN.replace("12 passed", "12 deselected"), 0, "", ["tests failed or did not run"]),
        ("synccheck 01_fa1_numba", "12 passed", 0, "", ["no summary"]),
        ("synccheck 01_fa1_numba", CLEAN, None, "", ["time limit"]),
        ("racecheck 03_triton/fwd_2_roles", RACE, 0, "", ["known"]),
        ("racecheck 03_triton/fwd_1_tma", RACE, 0, "", ["1 problems"]),
        ("racecheck 02_fa2_cuda/fwd_0_scalar", NO_RACE, 0, RACE, ["clean", "seen"]),
        ("racecheck 02_fa2_cuda/fwd_0_scalar", NO_RACE, 0, NO_RACE, ["clean", "not seen"]),
        ("racecheck 02_fa2_cuda/fwd_0_scalar", RACE, 0, RACE, ["1 problems", "not seen"]),  # nothing new
    ],
)
def test_nothing_is_clean_that_did_not_run_to_its_end(monkeypatch, what, output, code, planted, said):
    answers = {False: (code, output), True: (0, planted)}
    monkeypatch.setattr(gpu_check, "run", lambda command, limit: answers["--planted" in command])
    tool, kernel = what.split()
    found = gpu_check.judged("compute-sanitizer", ((tool, kernel), gpu_check.sanitized()[kernel]))
    assert list(found.values()) == said and list(found)[0] == (tool, kernel)
    assert (set(said) <= set(gpu_check.GOOD)) == (said in (["clean"], ["known"], ["clean", "seen"]))
    text = gpu_check.summary(rows.provenance("cpu") | {"python": "3"}, {"one GPU": (0, "7 passed")}, found)
    assert "- tests on one GPU: 7 passed" in text and (f"- {kernel}, {tool}: {said[0]}" in text) == (said[0] != "clean")


def test_known_reports_are_of_kernels_that_there_are_and_no_test_of_a_gpu_is_left_out():
    known = gpu_check.known_reports()
    assert known and {kernel for _, kernel in known} <= set(gpu_check.sanitized()) and all(known.values())
    texts = [(rows.ROOT / "tests" / f"test_{name}.py").read_text() for name in gpu_check.WITHOUT_GPU]
    assert not any(re.search(r"\n@pytest.mark.(multi)?gpu", text) for text in texts)


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
