"""Makes test parameters from a stage's SUPPORTS, and ends a run with the time that each file took, beside its budget.

With --mine the stages' tests run on the functions that a reader wrote in my/, and all other tests are skipped. With
--long the tests marked `long` run too.
"""

import os
import re
import sys
import zlib
from pathlib import Path

import pytest
import torch

import steps  # noqa: F401  This import decides the engine, before anything imports Numba or Triton.
from reference import cases
from steps import engine
from steps.course.workbook.answer import Problem
from steps.course.workbook.mine import Mine
from steps.course.workbook.one_rung import supports_of
from support import kept_calls
from support.contract_suite import BAD_INPUT, lacking

torch.set_num_threads(1)  # The tensors are so small that starting a second thread costs more than it saves.
os.environ.setdefault("OMP_NUM_THREADS", "1")  # the same for the processes that tests start

BUDGETS = {  # in seconds on 2 cores without a GPU; a file that takes five times its budget fails the run
    "test_step00_naive.py": 10, "test_step01_fa1_numba.py": 45, "test_step02_fa2_cuda.py": 130,
    "test_step03_triton.py": 60, "test_step04_ring.py": 60, "test_workbook.py": 100, "test_notebooks.py": 120,
    "test_ways.py": 10, "test_step02_cache.py": 30, "test_step02_launch.py": 10, "test_step02_compile.py": 30,
    "test_bench.py": 15, "test_copy_out.py": 30, "test_demo.py": 30, "test_emulator.py": 40,
    "test_emulator_hopper.py": 40, "test_engine.py": 20, "test_environment.py": 15, "test_errata.py": 10,
    "test_mutants.py": 35, "test_mutate.py": 5, "test_operators.py": 40, "test_readme.py": 15,
    "test_reference.py": 10, "test_slides.py": 15, "test_structure.py": 10, "test_gpu_check.py": 15,
    "test_verify.py": 50, "test_features_reference.py": 10, "test_step03_features.py": 60,
    "test_step03_options.py": 30, "test_step03_decode.py": 25, "test_step03_models.py": 20,
    "test_step03_memcheck.py": 5, "test_step03_offsets.py": 10, "test_feature_mutants.py": 35,
    "test_step04_faults.py": 45, "test_step04_strategies.py": 60, "test_step04_simulate.py": 15,
    "test_bench_ring.py": 15, "test_figures.py": 10, "test_claims.py": 10, "test_puzzle.py": 5, "test_site.py": 5,
    "test_site_scripts.py": 10, "test_notebook_puzzles.py": 5,
    "test_step03_flash_gluon.py": 40, "test_step03_flash_gluon_backward.py": 20, "test_step03_roles.py": 10,
    "test_step03_backward_roles.py": 10,
    "test_terminal.py": 10, "test_wheel.py": 20, "test_verdicts.py": 25, "test_reports.py": 30, "test_hub.py": 10,
}  # fmt: skip
# A process runs a file as a whole, but of these so many parts, so that at the end none waits for a long file alone.
PARTS = {
    "test_workbook.py": 4, "test_step02_fa2_cuda.py": 3, "test_step03_features.py": 3, "test_step01_fa1_numba.py": 2,
    "test_verify.py": 2, "test_step03_options.py": 2,
}  # fmt: skip
_seconds: dict[str, float] = {}


def pytest_addoption(parser):
    help = "put the functions that you wrote in my/ in place of the stages' own"
    parser.addoption("--mine", action="store_true", help=help)
    parser.addoption("--long", action="store_true", help="run the tests marked `long` too, as `make test-all` does")


def pytest_configure(config):
    config.mine = None
    if config.getoption("--mine"):
        try:
            config.mine = Mine()
        except Problem as problem:
            raise pytest.UsageError(str(problem)) from None
        config.mine.install()
        for name in [name for name in sys.modules if name.split(".")[0] == "support"]:
            del sys.modules[name]  # They have imported the stages as they were, and the tests import them anew.
        if config.option.tbstyle == "auto":
            config.option.tbstyle = "short"  # A reader needs the message, not the code of the test.


@pytest.fixture
def own_text(request):
    """own_text(path): the text of a stage's file, for a test that reads it or plants a mistake in it.

    The test is skipped if the file holds a reader's function, which may be as right with other lines.
    """

    def text(path):
        if request.config.mine and request.config.mine.holds(path):
            pytest.skip("it is about the stage's own text, and here is yours")
        return Path(path).read_text()

    return text


def pytest_unconfigure(config):
    if config.mine:
        config.mine.close()


def pytest_generate_tests(metafunc):
    stage = getattr(metafunc.cls, "stage", None)
    if stage is None:
        return
    if "case" in metafunc.fixturenames:
        mine = metafunc.config.mine
        rungs = mine.rungs(stage.SUPPORTS["stage"]) if mine else stage.SUPPORTS["rungs"]
        rows = []
        for rung in rungs:
            rows += [_case(stage, rung, *row) for row in _rows(metafunc.cls, rung, everything=mine is not None)]
        skips = mine.blanks(stage.SUPPORTS["stage"]) if mine else {}
        for id, reason in skips.items():
            rows.append(pytest.param(None, None, None, id=id, marks=pytest.mark.skip(reason=reason)))
        metafunc.parametrize("case, dtype, rung", rows)
    if "every_rung" in metafunc.fixturenames:
        metafunc.parametrize("every_rung", stage.SUPPORTS["rungs"])
    if "way" in metafunc.fixturenames:
        metafunc.parametrize("way", kept_calls.names(stage))
    if "bad" in metafunc.fixturenames:
        rows = BAD_INPUT | lacking(stage.SUPPORTS)
        metafunc.parametrize("bad", list(rows.values()), ids=list(rows))


def _rows(contract, rung, everything):
    """Yields (case, dtype, reason to skip) of a rung. Without a GPU the rungs beyond the first run only a few cases."""
    stage = contract.stage
    supports = supports_of(stage, rung)
    for case, dtype, reason in cases.select(supports, gpu=engine.name == "cuda"):
        few = contract.few if dtype == supports["dtypes"][0] else contract.few_in_other_dtypes
        if everything or engine.name == "cuda" or rung == stage.SUPPORTS["rungs"][0] or case.name in few:
            yield case, dtype, reason


def _case(stage, rung, case, dtype, reason):
    marks = [pytest.mark.skip(reason=reason)] if reason else []
    name = f"{case.name}-{str(dtype).removeprefix('torch.')}"
    if rung != stage.SUPPORTS["rungs"][0]:
        name += f"-{rung}"
    return pytest.param(case, dtype, rung, id=name, marks=marks)


def pytest_collection_modifyitems(config, items):
    """Puts the files that take longest first, so that at the end no process still has a long one to begin with.

    With --mine, skips the tests that are of no stage, and those of stages in which every exercise is still blank.
    """
    items.sort(key=lambda item: -BUDGETS.get(item.path.name, 0))
    if not config.mine:
        return
    for item in items:
        number = re.match(r"test_step(\d\d)_", item.path.name)
        if reason := config.mine.nothing(number[1]) if number else "--mine is for the stages' tests":
            item.add_marker(pytest.mark.skip(reason=reason))


def part_of(nodeid):
    """The unit that one process runs. Tests of one function that begin with the same parameter stay together."""
    file, together = nodeid.split("::")[0], nodeid.partition("-")[0]
    return f"{file} {zlib.crc32(together.encode()) % PARTS.get(Path(file).name, 1)}"


@pytest.hookimpl(optionalhook=True)  # pytest-xdist need not be installed
def pytest_xdist_make_scheduler(config, log):
    if config.getvalue("dist") != "loadfile":
        return None
    from xdist.scheduler import LoadFileScheduling

    scheduler = LoadFileScheduling(config, log)
    scheduler._split_scope = part_of
    return scheduler


def pytest_runtest_setup(item):
    if item.get_closest_marker("gpu") and engine.name != "cuda":
        pytest.skip("needs a GPU")
    if item.get_closest_marker("multigpu") and torch.cuda.device_count() < 2:
        pytest.skip("needs two GPUs")
    if item.get_closest_marker("long") and not item.config.getoption("--long"):
        pytest.skip("takes long: make test-all runs it")


def pytest_runtest_teardown():
    if engine.name == "cuda":
        torch.cuda.empty_cache()  # Tests in other processes need the GPU's memory, too.


def pytest_runtest_logreport(report):
    file = report.nodeid.split("::")[0].split("/")[-1]
    if "long" not in report.keywords:  # Long tests have no budget.
        _seconds[file] = _seconds.get(file, 0) + report.duration


def pytest_sessionfinish(session):
    """Fails the run if a file took five times its budget, because then something hangs or has become far too slow."""
    if any(map(far_too_slow, BUDGETS)):
        session.exitstatus = pytest.ExitCode.TESTS_FAILED


def far_too_slow(file):
    return engine.name == "cpu" and _seconds.get(file, 0) > 5 * BUDGETS[file]


def pytest_report_header(config):
    return [engine.describe(), *([config.mine.describe()] if config.mine else [])]


def pytest_terminal_summary(terminalreporter):
    if _seconds:
        terminalreporter.section("seconds by file, beside its budget")
    for file, seconds in sorted(_seconds.items()):
        budget = f"  (budget {BUDGETS[file]} s)" if file in BUDGETS else ""
        if budget and far_too_slow(file):
            budget += " FAILED: more than five times as long. Is this machine busy with something else?"
        terminalreporter.write_line(f"{seconds:7.1f} s  {file}{budget}")
