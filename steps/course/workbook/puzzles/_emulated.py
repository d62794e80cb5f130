"""Runs the kernels of hopper.cu in the emulation, for the puzzles about Hopper, also where there is a GPU."""

import re
from ctypes import c_int
from pathlib import Path

from steps.step02_fa2_cuda import emulator

FILE = Path(__file__).with_name("hopper.cu")
NAME = "steps/course/workbook/puzzles/hopper.cu"  # as reports name it: a reader may know another file that ends so


def launch(kernel, *arguments, block, stuck=False, **schedule):
    """Runs a kernel, one block. Numbers become C's int. stuck: a kernel that is stuck, which leaves NaN, is no error.

    schedule: that of emulator.schedule. Returns the emulation's report of the mistake that stopped the kernel, or "".
    """
    arguments = [c_int(x) if isinstance(x, int) else x for x in arguments]
    try:
        with emulator.schedule(**schedule):
            emulator.launch(FILE, kernel, arguments, grid=1, block=block, shared_bytes=32768, macros={})
    except RuntimeError as report:
        if not stuck:
            raise
        return re.sub(r"\bhopper\.cu(?=:\d)", NAME, str(report))
    return ""
