"""The engine is decided before Numba and Triton are imported, or says that it is too late."""

import os
import subprocess
import sys

import pytest

from steps import engine


def python(code, **environment):
    """(exit code, stdout, stderr) of code in a fresh interpreter."""
    ours = ("STEPS_ENGINE", "NUMBA_ENABLE_CUDASIM", "TRITON_INTERPRET")
    env = {name: value for name, value in os.environ.items() if name not in ours}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=env | environment)
    return done.returncode, done.stdout.strip(), done.stderr


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


def test_sets_the_modes_of_numba_and_triton():
    code = "import os, steps; from numba import cuda; print(os.environ['TRITON_INTERPRET'], cuda.is_available())"
    assert python(code, STEPS_ENGINE="cpu")[1] == "1 True"  # the simulator is always available


def test_an_engine_that_only_compiles_neither_simulates_nor_computes():
    modes = "os.environ['NUMBA_ENABLE_CUDASIM'], os.environ['TRITON_INTERPRET']"
    code = f"import os; from steps import engine; print(engine.device, {modes}, engine.describe()); engine.check_runs()"
    status, said, stderr = python(code, STEPS_ENGINE="compile")
    assert said.startswith("cpu 0 0 engine compile: neither runs nor simulates")
    assert status != 0 and "RuntimeError: under STEPS_ENGINE=compile nothing is computed" in stderr
    engine.check_runs()  # here something is computed


@pytest.mark.parametrize("module, variable", [("numba", "NUMBA_ENABLE_CUDASIM"), ("triton", "TRITON_INTERPRET")])
def test_too_late_is_an_error(module, variable):
    code, _, stderr = python(f"import {module}, steps", STEPS_ENGINE="cpu")
    assert code != 0 and f"{module} was imported before steps" in stderr and variable in stderr
    assert python(f"import {module}, steps", STEPS_ENGINE="cpu", **{variable: "1"})[0] == 0


def test_one_thread_at_a_time_is_in_a_simulator():
    code = """if True:
        import threading
        from steps import engine

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
        raises = engine.one_at_a_time(lambda: 1 / 0)
        try:
            raises()
        except ZeroDivisionError:
            pass  # The two threads below still get their turn.
        threads = [threading.Thread(target=outer, daemon=True) for _ in range(2)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(10)
        print(counts, inside, engine.one_at_a_time(print) is print)
    """
    assert python(code, STEPS_ENGINE="cpu")[1] == "[1, 1] [] False"
    assert python(code, STEPS_ENGINE="compile")[1] == "[1, 2] [] True"  # like "cuda": no lock, and so no cost


def test_description_names_the_engine():
    assert engine.describe().startswith(f"engine {engine.name}:")


def test_a_stage_refuses_to_compute_where_it_can_only_be_compiled():
    code = "import torch; from steps import step00_naive; step00_naive.forward(*torch.randn(3, 4, 8))"
    status, _, stderr = python(code, STEPS_ENGINE="compile")
    assert status != 0 and "nothing is computed" in stderr


UNTIL_THE_GRADIENTS = """
import sys, torch
from steps import engine, step00_naive, step01_fa1_numba, step02_fa2_cuda, step03_triton
for stage, features in ((step00_naive, {}), (step01_fa1_numba, {}), (step02_fa2_cuda, {}), (step03_triton, {}),
                        (step03_triton, {"window": (3, 0), "dropout_p": 0.5})):
    q, k, v = torch.randn(3, 1, 1, 5, 16, device=engine.device).requires_grad_()
    stage.attention(q, k, v, **features).sum().backward()
print([name for name in ("torch._dynamo", "sympy") if name in sys.modules])
"""


def test_what_torch_compile_needs_is_not_imported_without_it():
    """It takes seconds, which the first call of a process would wait."""
    assert python(UNTIL_THE_GRADIENTS) == (0, "[]", "")
