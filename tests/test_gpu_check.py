"""NVIDIA's sanitizers over every kernel, as `make gpu-check` runs them with all other tests on a GPU.

compute-sanitizer has memcheck (accesses out of bounds), racecheck (unsynchronised shared memory), initcheck (reads of
memory that nobody wrote) and synccheck (barriers misused). A kernel is clean only if the tool came to its summary,
found nothing, and checks passed under it. What known_reports.txt lists is no mistake: here it is expected to fail. A
kernel of stage 02 also runs with a race planted in it, which shows whether racecheck looks at it at all.
"""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from reference import error, feature_cases
from steps import catalogue, engine
from steps.course.bench import rows
from support import sanitized

STAGE_02 = rows.ROOT / "steps" / "step02_fa2_cuda"
# memcheck would also count refused driver calls, but torch asks for what a driver may lack, and handles the answer.
TOOLS = {
    "memcheck": ("--report-api-errors", "no"), "racecheck": (), "synccheck": (),
    "initcheck": ("--show-backtrace", "no", "--print-limit", "100000"),
}  # fmt: skip
SECONDS = 300  # the limit of one run of a sanitizer
# PyTorch's allocator hands out pieces of large blocks: what is outside a tensor would still be inside its block.
ENVIRONMENT = os.environ | {"STEPS_ENGINE": "cuda", "STEPS_SANITIZE": "1", "PYTORCH_NO_CUDA_MEMORY_CACHING": "1"}
FEATURES = "flash", "flash_gluon", "flash_gluon_backward", "decode"  # files of stage 03
numba = "tests/test_step01_fa1_numba.py", "-q", "-p", "no:cacheprovider", "-k", "ragged"
COMMANDS = {"01_fa1_numba": ("-m", "pytest", *numba)}  # arguments of Python; stage 04 runs kernels of 02 and 03
for stage, kind in (("03_triton", "py"), ("02_fa2_cuda", "cu")):
    kernels = [path.stem for path in sorted((rows.ROOT / "steps" / f"step{stage}").glob(f"?wd_*.{kind}"))]
    for kernel in (*kernels, *FEATURES) if kind == "py" else kernels:
        COMMANDS[f"{stage}/{kernel}"] = "-m", "tests.support.sanitized", kernel
# {(tool, kernel): why its reports are no mistakes}; the first line says what the columns are.
_lines = (Path(__file__).parent / "support" / "known_reports.txt").read_text().splitlines()[1:]
KNOWN = {tuple(line.split(" | ")[:2]): line.split(" | ")[2] for line in _lines if line}

on_gpu = pytest.mark.skipif("STEPS_SANITIZE" not in os.environ, reason="make gpu-check runs it")


def under(tool, arguments):
    """(what a tool says of a program: "clean", or what is wrong; what was printed)."""
    found = shutil.which("compute-sanitizer", path=f"{os.environ.get('PATH', '')}:/usr/local/cuda/bin")
    command = [found, "--tool", tool, *TOOLS[tool], "--target-processes", "all", sys.executable, *arguments]
    how = dict(cwd=rows.ROOT, env=ENVIRONMENT, text=True, errors="replace", timeout=SECONDS)
    done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, **how)
    return verdict(done.returncode, done.stdout), done.stdout


def verdict(code, output):
    counts = re.findall(r"(?:ERROR|RACECHECK) SUMMARY: (\d+)(?!.*not printed)", output)
    if not counts:
        return "no summary"
    if problems := sum(map(int, counts)):
        return f"{problems} problems"
    return "clean" if code == 0 and re.search(r"[1-9]\d* passed", output) else "tests failed or did not run"


@on_gpu
@pytest.mark.parametrize("tool", TOOLS)
@pytest.mark.parametrize("kernel", COMMANDS)
def test_clean(tool, kernel):
    said, output = under(tool, COMMANDS[kernel])
    judge(said, output, (tool, kernel) in KNOWN)


def judge(said, output, known):
    """Fails unless a kernel is clean. Known reports, which are no mistakes, are expected if its results are right."""
    if known and said.endswith("problems") and re.search(r"^=* *[1-9]\d* passed", output, re.M):
        pytest.xfail("known_reports.txt says why")
    assert said == "clean", output[-5000:]


@on_gpu
@pytest.mark.parametrize("kernel", sanitized.PLANTED)
def test_racecheck_sees_a_planted_race(kernel):
    try:
        assert under("racecheck", (*COMMANDS[f"02_fa2_cuda/{kernel}"], "--planted"))[0].endswith("problems")
    except subprocess.TimeoutExpired:
        pytest.skip("a kernel without a barrier may wait for ever: then racecheck tells nothing")


CLEAN = "12 passed in 9.1s\n========= RACECHECK SUMMARY: 0 hazards displayed (0 errors, 0 warnings)\n"
RACE = """4 passed
========= ERROR SUMMARY: 669 errors were not printed. Use --print-limit option to adjust the number of printed errors
========= RACECHECK SUMMARY: 1 hazard displayed (1 error, 0 warnings)
"""


def test_nothing_is_clean_that_did_not_run_to_its_end():
    assert verdict(0, CLEAN) == "clean" and verdict(0, RACE) == "1 problems" and verdict(0, "12 passed") == "no summary"
    assert verdict(1, CLEAN) == verdict(0, CLEAN.replace("12 passed", "12 deselected")) == "tests failed or did not run"
    judge("clean", CLEAN, known=False)
    with pytest.raises(pytest.xfail.Exception):
        judge("1 problems", RACE, known=True)
    for said, output, known in (("1 problems", RACE, False), ("1 problems", "", True), ("no summary", CLEAN, True)):
        with pytest.raises(AssertionError):
            judge(said, output, known)


def test_every_kernel_is_sanitized_and_each_of_stage_02_has_a_planted_race():
    kernels = {path.stem for path in STAGE_02.glob("*.cu")}
    of_stage_03 = {path.stem for path in (STAGE_02.parent / "step03_triton").glob("?wd_*.py")}
    others = {"01_fa1_numba", *(f"03_triton/{kernel}" for kernel in of_stage_03.union(FEATURES))}
    assert {f"02_fa2_cuda/{kernel}" for kernel in kernels} | others == set(COMMANDS)
    assert set(sanitized.PLANTED) == kernels and all(KNOWN.values())
    assert {tool for tool, _ in KNOWN} <= set(TOOLS) and {kernel for _, kernel in KNOWN} <= set(COMMANDS)
    for kernel in kernels:
        text = (STAGE_02 / f"{kernel}.cu").read_text()
        planted = sanitized.with_a_race(text, kernel)
        changed = [a for a, b in zip(text.splitlines(), planted.splitlines(), strict=True) if a != b]
        (line,) = (a for a in changed if "Spill budget" not in a)
        assert re.search("barrier|syncthreads", line)


@pytest.mark.skipif(not shutil.which("g++"), reason="without a GPU stage 02 needs g++, and there is none")
def test_what_runs_under_the_sanitizers_checks_its_results(monkeypatch):
    assert sanitized.check("fwd_0_scalar", N=40, head_dims=(64, 128)) == 2  # scalar takes no head_dim 128
    assert sanitized.check("fwd_0_scalar", planted=True, N=40, head_dims=(64,)) == 0
    assert sanitized.check("bwd_3_hopper", N=40, head_dims=(64,)) == 4  # dq is added in a fixed order, too
    assert sanitized.tma_store() == 1
    monkeypatch.setattr(error, "failures", lambda got, want: {"out": (1.0, 0.1)} if list(got) == ["out", "lse"] else {})
    with pytest.raises(AssertionError, match="fwd_0_scalar, D=64, causal=False"):
        sanitized.check("fwd_0_scalar", N=40, head_dims=(64,))


@pytest.mark.skipif(bool(catalogue.unavailable("03")), reason="there is no Triton")
@pytest.mark.skipif(engine.name != "cpu", reason="gpu-check runs it on a GPU")
def test_what_runs_of_stage_03_under_the_sanitizers_checks_its_results(monkeypatch):
    from steps.step03_triton.features import decode  # These need Triton.

    kernels = {*sanitized.TRITON, *sanitized.FEATURES}
    assert {f"03_triton/{kernel}" for kernel in kernels} == {kernel for kernel in COMMANDS if "03_" in kernel}
    assert sanitized.check("fwd_2_roles", N=40) == 5  # the fifth one with warps that have roles
    assert sanitized.check("bwd_1_tma", N=40) == 4
    assert sanitized.check("decode") == 8
    keys = sanitized.FEATURES["decode"][1] * feature_cases.Nk
    assert all(keys > 2 * Bc for table in decode.TILES.values() for _, Bc, *_ in table.values()), "splits to combine"
    monkeypatch.setattr(error, "failures", lambda got, want: {"dk": (1.0, 0.1)} if "dk" in got else {})
    with pytest.raises(AssertionError, match="bwd_0_fused, N=40, D=64, torch.float32, causal=False: .*dk"):
        sanitized.check("bwd_0_fused", N=40)
    with pytest.raises(AssertionError, match="flash, .*softcap.*dk"):
        sanitized.check("flash")


@pytest.mark.skipif(bool(catalogue.unavailable("03")), reason="there is no Triton")
def test_the_files_with_features_run_with_every_combination(monkeypatch):
    from steps.step03_triton.features import flash_gluon, flash_gluon_backward

    ran, compared, right = [], [], feature_cases.expected

    def computed(q, k, v, *, dout=None, **options):
        value = right(q, k, v, q if dout is None else dout, options).value
        return {name: x.float() for name, x in value.items()}

    def forward(q, k, v, **options):
        ran.append(("forward", q.dtype, q.shape[3], {*options}))
        return [computed(q, k, v, **options)[name] for name in ("out", "lse")]

    def backward(dout, q, k, v, out, lse, **options):
        ran.append(("backward", q.dtype, q.shape[3], {*options}))
        names = ("dq", "dk", "dv", *(["dsinks"] if "sinks" in options else []))
        return [computed(q, k, v, dout=dout, **options)[name] for name in names]

    def whole(module, q, k, v, dout, options):
        ran.append(("whole", q.dtype, q.shape[3], {*options}))
        return {name: x.float() for name, x in right(q, k, v, dout, options).value.items()}

    monkeypatch.setattr(flash_gluon, "forward", forward)
    monkeypatch.setattr(flash_gluon_backward, "backward", backward)
    monkeypatch.setattr(feature_cases, "run", whole)
    monkeypatch.setattr(error, "failures", lambda got, want: compared.append({*got}) and {})
    assert sanitized.check("flash") == 17 == len(ran) == len(compared)
    assert {dtype for _, dtype, *_ in ran} == {*sanitized.ALL} and any("seed" in asked for *_, asked in ran)
    ran.clear(), compared.clear()
    for kernel, kind, count in (("flash_gluon", "forward", 3), ("flash_gluon_backward", "backward", 4)):
        ran.clear(), compared.clear()
        assert sanitized.check(kernel) == count and [kind for kind, *_ in ran] == [kind] * count
        assert {dtype for _, dtype, *_ in ran} == {*sanitized.HALVES} and all(D > 64 for *_, D, _ in ran)
        assert compared[0] == ({"out", "lse"} if kind == "forward" else {"dq", "dk", "dv"})
    assert compared[-1] == {"dq", "dk", "dv", "dsinks"}, "with sinks"


if __name__ == "__main__":  # python -m tests.test_gpu_check JOBS [further arguments of pytest, and then no file]
    here, (jobs, *more) = rows.provenance(), sys.argv[1:]
    text = "# Tests and sanitizers on an {gpu}\n\nCommit {commit}, {date}, ".format(**here)
    text += "driver {driver}, CUDA {cuda}, torch {torch}, triton {triton}. Made by `make gpu-check`.\n".format(**here)
    codes = []
    for how in (("not multigpu", "-n", jobs, "--dist", "loadgroup"), ("multigpu",)):
        command = [sys.executable, "-m", "pytest", "tests", "-q", "-rfEx", "-p", "no:cacheprovider", *more, "-m", *how]
        done = subprocess.run(command, cwd=rows.ROOT, env=ENVIRONMENT, stdout=subprocess.PIPE, text=True)
        print(done.stdout, flush=True)
        last = done.stdout.splitlines()[-20:]
        text += "\n" + "".join(f"- {line}\n" for line in last if re.match(r"XFAIL|FAILED|ERROR|\d+ \w+.* in ", line))
        codes.append(done.returncode)
    if not more:
        (rows.COMMITTED / f"{rows.slug(here['gpu'])}.checks.md").write_text(text)
    sys.exit(codes[0] or codes[1] not in (0, 5))  # 5: no test was asked for
