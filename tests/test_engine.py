"""The engine is decided before Numba and Triton are imported, or says that it is too late."""

import contextlib
import os
import re
import signal
import subprocess
import sys
import threading
import time
import traceback
from importlib import metadata
from types import ModuleType

import pytest
import torch
from typer.testing import CliRunner

from steps import __main__, catalogue, engine, step00_naive
from steps.course.demo import compare
from steps.course.workbook import exercises


@pytest.mark.parametrize(
    "asked, gpu, chosen",
    [
        (None, False, "cpu"),
        (None, True, "cuda"),
        ("", True, "cuda"),
        ("cpu", True, "cpu"),
        ("cuda", True, "cuda"),
        ("compile", True, "compile"),
    ],
)
def test_choice(asked, gpu, chosen):
    assert engine._choose(asked, gpu) == chosen


@pytest.mark.parametrize("asked, words", [("gpu", "STEPS_ENGINE"), ("cuda", "no GPU")])
def test_impossible_choices_say_what_is_possible(asked, words):
    with pytest.raises(RuntimeError, match=words):
        engine._choose(asked, gpu=False)


OPTIMIZED = """
import sys
import torch
from typer.testing import CliRunner
from reference import error
from steps import __main__, catalogue, engine
print("level", sys.flags.optimize)
for number in catalogue.STAGES:
    if catalogue.unavailable(number):
        continue
    stage, (q, k, v, dout) = catalogue.stage(number), torch.randn(4, 1, 1, 5, 32, device=engine.device)
    out, lse = stage.forward(q, k, v, causal=True)
    grads = stage.backward(dout, q, k, v, out, lse, causal=True)
    print(number, error.failures(error._by_name(out, lse, *grads), error.expected(q, k, v, dout, causal=True)))
for command in "engine", "hint 00.2 2", "check 00.bug1", "--help":
    said = CliRunner().invoke(__main__.app, command.split())
    print(said.exit_code, said.output.splitlines()[0])
"""
NOTICED = """
import torch
from reference import attention
CAUSE = "b"
def test(forward):
    q, k, v = torch.randn(3, 1, 1, 300, 8, generator=torch.Generator().manual_seed(0))
    out, want = (function(q, k, v, causal=True)[0] for function in (forward, attention.forward))
    assert (out - want).abs().max() < 1e-5
"""


@pytest.mark.long
def test_without_docstrings_and_asserts(tmp_path):
    """As with python -OO. Only the asserts of a reader's test have to stay."""
    (tmp_path / exercises.find("00.bug1").mine_name).write_text(NOTICED)
    environment = os.environ | {"PYTHONOPTIMIZE": "2", "STEPS_MY": str(tmp_path)}
    done = subprocess.run([sys.executable, "-c", OPTIMIZED], env=environment, capture_output=True, text=True)
    level, *lines = done.stdout.splitlines()
    assert level == "level 2", done.stderr
    stages, commands = lines[:-4], lines[-4:]
    assert stages == [f"{number} {{}}" for number in catalogue.STAGES if not catalogue.unavailable(number)]
    assert [line.split()[0] for line in commands] == ["0"] * 4, commands
    assert commands[2].endswith("passed"), "its assert has to notice the broken kernel"


MODES = {"numba": "NUMBA_ENABLE_CUDASIM", "triton": "TRITON_INTERPRET"}


@pytest.mark.parametrize("module", MODES)
def test_too_late_is_an_error(module, monkeypatch):
    """Only where the module was imported in the mode of the other engine."""
    for other in MODES:
        monkeypatch.delitem(sys.modules, other, raising=False)
        monkeypatch.setenv(MODES[other], "0")
    for name, mode in ("cpu", "1"), ("compile", "0"), ("cuda", "0"):
        engine._configure(name)
        assert [os.environ[variable] for variable in MODES.values()] == [mode] * 2
    monkeypatch.setitem(sys.modules, module, ModuleType(module))
    with pytest.raises(RuntimeError, match=f"{module} was imported before steps.*{MODES[module]}"):
        engine._configure("cpu")
    monkeypatch.setenv(MODES[module], "1")
    engine._configure("cpu")


def test_an_engine_that_only_compiles_neither_simulates_nor_computes(monkeypatch):
    engine.check_runs()  # here something is computed
    assert re.fullmatch(rf"engine {engine.name}: [^\n]{{1,40}}", engine.describe())
    monkeypatch.setattr(engine, "name", "compile")
    assert engine.describe() == "engine compile: neither runs nor simulates"
    for words in (["demo"], ["bench", "fwd_1_matrix"]):
        done = CliRunner().invoke(__main__.app, words)
        assert done.exit_code == 1 and done.output.startswith("under STEPS_ENGINE=compile nothing is computed")
    with pytest.raises(RuntimeError, match="under STEPS_ENGINE=compile nothing is computed"):
        step00_naive.forward(*torch.randn(3, 4, 8))


@pytest.mark.parametrize("name, together", [("cpu", [1, 1]), ("compile", [1, 2])])
def test_one_thread_at_a_time_is_in_a_simulator(name, together, monkeypatch):
    monkeypatch.setattr(engine, "name", name)
    monkeypatch.setattr(engine, "_lock", threading.RLock())
    inside, counts, both = [], [], threading.Event()

    @engine.one_at_a_time
    def outer():
        inside.append(0)
        counts.append(len(inside))
        if len(inside) == 2:
            both.set()
        both.wait(1)  # second
        inner()
        inside.pop()

    inner = engine.one_at_a_time(lambda: None)
    with pytest.raises(ZeroDivisionError):  # The two threads below still get their turn.
        engine.one_at_a_time(lambda: 1 / 0)()
    threads = [threading.Thread(target=outer, daemon=True) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(10)
    assert counts == together and not inside
    assert (engine.one_at_a_time(print) is print) == (name != "cpu")  # like "cuda": no lock, and so no cost


def forked(function, seconds=20):
    """Whether the function ends without an error in a forked process, in which it has so many seconds."""
    child = os.fork()
    if child == 0:
        try:
            function()
        except BaseException:
            traceback.print_exc()
            os._exit(1)
        os._exit(0)
    until = time.monotonic() + seconds
    while time.monotonic() < until:
        ended, status = os.waitpid(child, os.WNOHANG)
        if ended:
            return status == 0
        time.sleep(0.01)
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    return False


@contextlib.contextmanager
def in_another_thread(function):
    """Inside `with`, calls the function again and again in another thread."""
    stop, began = threading.Event(), threading.Event()

    def work():
        while not stop.is_set():
            began.set()
            function()

    thread = threading.Thread(target=work, daemon=True)
    thread.start()
    assert began.wait(10)
    try:
        yield
    finally:
        stop.set()
        thread.join(10)


def locks_of_modules():
    """{module.name: each lock that a module of steps has}"""
    for number in catalogue.STAGES:
        if not catalogue.unavailable(number):
            catalogue.stage(number)
    kinds, modules = (type(threading.Lock()), type(threading.RLock()), threading.Condition), sorted(sys.modules.items())
    own = [(name, module) for name, module in modules if name.partition(".")[0] == "steps"]
    return {f"{name}.{key}": x for name, module in own for key, x in vars(module).items() if isinstance(x, kinds)}


no_gpu = pytest.mark.skipif(engine.name == "cuda", reason="CUDA does not work in a forked process")
multithreaded = pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")


@no_gpu
@multithreaded
def test_a_forked_process_finds_every_lock_free(monkeypatch):
    """Also where another thread of the parent keeps them for longer than a fork waits."""
    monkeypatch.setattr(engine, "_PATIENCE", 0.1)
    locks, q = locks_of_modules(), torch.randn(1, 1, 3, 16)
    assert {"steps.engine._lock", "steps.step02_fa2_cuda.nvrtc._importing"} <= set(locks)
    taken, end = threading.Event(), threading.Event()

    def hold():
        with contextlib.ExitStack() as all_of_them:
            for lock in locks.values():
                all_of_them.enter_context(lock)
            taken.set()
            end.wait()

    def compute():
        for name, lock in locks.items():
            assert lock.acquire(blocking=False), name
            lock.release()
        for number in ("00", "03"):
            if not catalogue.unavailable(number):
                catalogue.stage(number).forward(q, q, q)

    thread = threading.Thread(target=hold, daemon=True)
    thread.start()
    assert taken.wait(10)
    try:
        assert forked(compute)
    finally:
        end.set()
        thread.join(10)


@no_gpu
@multithreaded
def test_a_process_forked_while_a_thread_is_in_a_simulator_computes():
    """The fork waits until no kernel runs. Else the child has the simulator's `cuda` in the kernel's module."""
    if reason := catalogue.unavailable("01"):
        pytest.skip(reason)
    q, stage = torch.randn(1, 1, 11, 16), catalogue.stage("01")
    right = stage.forward(q, q, q)[0]

    def compute():
        torch.testing.assert_close(stage.forward(q, q, q)[0], right)

    with in_another_thread(lambda: stage.forward(q, q, q)):
        time.sleep(0.05)
        assert forked(compute)
    assert stage.forward(q, q, q)[0].equal(right)  # The parent goes on.


def test_the_long_form_tells_what_runs_each_stage_and_the_versions(monkeypatch):
    result = CliRunner().invoke(__main__.app, ["engine"])
    lines = result.output.splitlines()
    assert result.exit_code == 0 and lines[0] == engine.describe()
    for number, stem in catalogue.STAGES.items():
        (line,) = [line for line in lines if line.startswith(stem)]
        assert catalogue.unavailable(number) or line.endswith(compare.ENGINES[engine.name][number])
    assert f"torch {metadata.version('torch')}, " in lines[-1] and f"numpy {metadata.version('numpy')}" in lines[-1]
    monkeypatch.setenv("STEPS_ENGINE", "cpu")
    assert "chosen by STEPS_ENGINE=cpu" in CliRunner().invoke(__main__.app, ["engine"]).output


UNTIL_THE_GRADIENTS = """
import steps, sys, torch
from steps import engine, step00_naive, step01_fa1_numba, step02_fa2_cuda, step03_triton
for stage, features in ((step00_naive, {}), (step01_fa1_numba, {}), (step02_fa2_cuda, {}), (step03_triton, {}),
                        (step03_triton, {"window": (3, 0), "dropout_p": 0.5})):
    q, k, v = torch.randn(3, 1, 1, 5, 16, device=engine.device).requires_grad_()
    stage.attention(q, k, v, **features).sum().backward()
print([name for name in ("torch._dynamo", "sympy") if name in sys.modules])
"""


def test_a_fresh_process_gets_to_the_gradients_without_what_torch_compile_needs():
    """Its import takes seconds, which the first call of a process would wait. No variable sets the modes here."""
    environment = {name: value for name, value in os.environ.items() if name not in ("STEPS_ENGINE", *MODES.values())}
    command = [sys.executable, "-c", UNTIL_THE_GRADIENTS]
    done = subprocess.run(command, capture_output=True, text=True, env=environment)
    assert (done.returncode, done.stdout.strip(), done.stderr) == (0, "[]", "")
