"""The stages of the course, by number, and whether a stage can run on this machine."""

import importlib
import shutil

from steps import engine

STAGES = {
    "00": "step00_naive",
    "01": "step01_fa1_numba",
    "02": "step02_fa2_cuda",
    "03": "step03_triton",
    "04": "step04_ring",
}


def stage(number):
    """The package of a stage, such as steps.step02_fa2_cuda for "02"."""
    return importlib.import_module(f"steps.{STAGES[number]}")


def unavailable(number):
    """The reason why the stage cannot run on this machine, or None."""
    if number == "02" and engine.name == "cpu" and not shutil.which("g++"):
        return "without a GPU this stage is compiled by g++, which is missing (Debian, Ubuntu: apt install g++)"
    try:
        stage(number)
        if number == "04":
            stage("03")  # Stage 03 is stage 04's default block.
    except ImportError as e:
        return f"{e.name or e} is not installed on this platform"
    return None
