"""What notebook 02a shows: kernels given as text, run in the emulation; owners, threads in time, lanes that agree."""

import tempfile
from pathlib import Path

from steps.step02_fa2_cuda import emulator


def emulated(text, kernel, tensors, *, grid, block, shared_bytes=0, **macros):
    """Compiles a text of CUDA C++ with g++ and runs one of its kernels on the CPU."""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / f"{kernel}.cu"
        file.write_text(text)
        emulator.launch(file, kernel, tensors, grid=grid, block=block, shared_bytes=shared_bytes, macros=macros)
