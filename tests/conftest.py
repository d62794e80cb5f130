"""Turns a stage's SUPPORTS into test parameters, and ends a run with what was skipped and how long each file took."""

import pytest
import torch

import steps  # noqa: F401  decides the engine before anything imports Numba or Triton
from reference import cases
from steps import engine
from suite import BAD_INPUT, lacking

torch.set_num_threads(1)  # the tensors are tiny: waking a second thread costs more than it computes

BUDGETS = {  # seconds on 2 cores without a GPU; five times as much fails the run
    "test_step00_naive.py": 10, "test_step01_fa1_numba.py": 45, "test_step02_fa2_cuda.py": 75, "test_step03_triton.py": 30,
    "test_step04_ring.py": 30, "test_workbook.py": 60, "test_notebooks.py": 120, "test_mutants.py": 30, "test_demo.py": 30,
    "test_copy_out.py": 30, "test_emulator.py": 30, "test_engine.py": 20, "test_environment.py": 15, "test_bench.py": 10,
}  # fmt: skip
_seconds: dict[str, float] = {}


def pytest_generate_tests(metafunc):
    stage = getattr(metafunc.cls, "stage", None)
    if stage is None:
        return
    if "case" in metafunc.fixturenames:
        rows = cases.select(stage.SUPPORTS, gpu=engine.name == "cuda")
        metafunc.parametrize("case, dtype", [_case(*row) for row in rows])
    if "rung" in metafunc.fixturenames:
        metafunc.parametrize("rung", stage.SUPPORTS["rungs"])
    if "bad" in metafunc.fixturenames:
        rows = BAD_INPUT | lacking(stage.SUPPORTS)
        metafunc.parametrize("bad", list(rows.values()), ids=list(rows))


def _case(case, dtype, reason):
    marks = [pytest.mark.skip(reason=reason)] if reason else []
    return pytest.param(case, dtype, id=f"{case.name}-{str(dtype).removeprefix('torch.')}", marks=marks)


def pytest_runtest_setup(item):
    if item.get_closest_marker("gpu") and engine.name != "cuda":
        pytest.skip("needs a GPU")
    if item.get_closest_marker("multigpu") and torch.cuda.device_count() < 2:
        pytest.skip("needs two GPUs")


def pytest_runtest_logreport(report):
    file = report.nodeid.split("::")[0].split("/")[-1]
    _seconds[file] = _seconds.get(file, 0) + report.duration


def pytest_sessionfinish(session):
    """A file that takes five times its budget fails the run: something hangs or has become far too slow."""
    if engine.name == "cpu" and any(_seconds.get(file, 0) > 5 * budget for file, budget in BUDGETS.items()):
        session.exitstatus = pytest.ExitCode.TESTS_FAILED


def pytest_report_header():
    return engine.describe()


def pytest_terminal_summary(terminalreporter):
    if _seconds:
        terminalreporter.section("seconds by file, beside its budget")
    for file, seconds in sorted(_seconds.items()):
        budget = BUDGETS.get(file)
        terminalreporter.write_line(f"{seconds:7.1f} s  {file}" + (f"  (budget {budget} s)" if budget else ""))
