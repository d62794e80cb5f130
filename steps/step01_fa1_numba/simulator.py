# SPDX-License-Identifier: MIT
"""Numba's simulator, whose main thread lets a block's threads compute while it waits for them.

The simulator starts a Python thread for each CUDA thread, and its main thread asks all of them again and again whether
they are alive and whether they stand at a barrier. Only one Python thread computes at a time, so that a kernel would
wait for these questions most of the time.
"""

import threading
import time

from numba.cuda.simulator.kernel import BlockThread


def is_alive(thread):
    time.sleep(0)  # another thread may go on
    return threading.Thread.is_alive(thread)


def prepare():
    """From now on the main thread waits in this way."""
    BlockThread.is_alive = is_alive
