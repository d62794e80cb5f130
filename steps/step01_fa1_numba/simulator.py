# SPDX-License-Identifier: MIT
"""Numba's simulator, whose main thread lets a block's threads compute while it waits for them.

The simulator starts a Python thread for each CUDA thread, and its main thread asks all of them again and again whether
they are alive and whether they stand at a barrier. Only one Python thread computes at a time, so that a kernel would
wait for these questions most of the time.

And where numba-cuda is not installed, as on macOS, the simulator is the one in Numba, with a mistake that numba-cuda
has mended: see `swapped_cuda_module`.
"""

import contextlib
import threading
import time

from numba import cuda
from numba.cuda.simulator import kernel as simulator
from numba.cuda.simulator.kernelapi import FakeCUDAModule

_replaced = []  # (the names of a module, a name in it that stands for the simulator's `cuda` during this launch)


def is_alive(thread):
    time.sleep(0)  # another thread may go on
    return threading.Thread.is_alive(thread)


@contextlib.contextmanager
def swapped_cuda_module(function, fake):
    """Inside `with`, `cuda` in the function's module is the simulator's. It stays so until the launch ends.

    Numba's own puts the real `cuda` back when the first thread leaves a function, so that the others, which are still
    in functions of that module, find a `cuda` without threadIdx.
    """
    names = function.__globals__
    for name, x in list(names.items()):
        if fake and (x is cuda or isinstance(x, FakeCUDAModule)):  # There is none where a launch has failed.
            _replaced.append((names, name))
            names[name] = fake
    try:
        yield
    finally:
        if not isinstance(threading.current_thread(), simulator.BlockThread):  # It is the launch that ends.
            while _replaced:
                names, name = _replaced.pop()
                names[name] = cuda


def prepare():
    """From now on the main thread waits, and `cuda` is swapped, in this way."""
    simulator.BlockThread.is_alive = is_alive
    simulator.swapped_cuda_module = swapped_cuda_module
