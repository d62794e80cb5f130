# SPDX-License-Identifier: MIT
"""Compiles a .cu file with g++ and runs its kernels on the CPU. What the emulation checks and what it cannot: cuda.h.

`launch` is called like nvrtc.launch. `schedule` chooses in which order the threads of a block, and the blocks, take their turns.
"""

import contextlib
import ctypes
import functools
import re
import shutil
import subprocess
from pathlib import Path

import torch

from .. import cache

HERE = Path(__file__).parent
ORDERS = ("forward", "reverse", "random")
_FLAGS = ["-std=c++17", "-O1", "-g1", "-fPIC", "-shared", "-fvisibility=hidden", "-w"]
_schedule = {"threads": "forward", "blocks": "forward", "seed": 0}


class _Launch(ctypes.Structure):
    _fields_ = [
        ("grid", ctypes.c_uint * 3), ("block", ctypes.c_uint * 3), ("shared_bytes", ctypes.c_int), ("thread_order", ctypes.c_int),
        ("block_order", ctypes.c_int), ("seed", ctypes.c_uint64), ("arguments", ctypes.POINTER(ctypes.c_void_p)),
        ("elements", ctypes.POINTER(ctypes.c_longlong)),
    ]  # fmt: skip


def available() -> bool:
    """Whether there is a g++."""
    return shutil.which("g++") is not None


@contextlib.contextmanager
def schedule(threads="forward", blocks="forward", seed=0):
    """Inside `with`, threads and blocks take turns in these ORDERS; "random" is decided by the seed."""
    before = dict(_schedule)
    _schedule.update(threads=threads, blocks=blocks, seed=seed)
    try:
        yield
    finally:
        _schedule.update(before)


def compile(file: Path, macros: dict) -> Path:
    """The shared library made from a .cu file, kept on disk under a hash of all its sources. macros: {"D": 64, ...}."""
    if not available():
        raise RuntimeError("Without a GPU, stage 02 compiles its kernels with g++, and there is none: sudo apt install g++.")
    source = file.read_text()
    kernels = re.findall(r"__global__(?:\s+void|\s+__launch_bounds__\([^)]*\))*\s+(\w+)\s*\(", source)
    text = f'#line 1 "{file.name}"\n{source}\n' + "".join(f"EMULATOR_KERNEL({name})\n" for name in kernels)
    flags = _FLAGS + [f"-D{name}={value}" for name, value in macros.items()]
    headers = [path.read_text() for path in (HERE.parent / "ptx.cuh", *sorted(HERE.glob("*.h")))]
    return cache.get(("g++", _version(), text, flags, headers), ".so", functools.partial(_compile, text, flags, file.parent))


def _compile(text, flags, folder, path):
    command = ["g++", *flags, f"-I{HERE.parent}", "-x", "c++", "-", "-o", path]
    made = subprocess.run(command, input=text, text=True, capture_output=True, cwd=folder)  # debuggers look for sources there
    if made.returncode:
        raise RuntimeError(f"g++ cannot compile the kernel:\n{made.stderr}")


@functools.cache
def _version():
    return subprocess.run(["g++", "-v"], text=True, capture_output=True).stderr


@functools.cache
def _load(file, kernel, macros):
    # PyDLL keeps Python's lock: the emulation has one launch at a time
    function = getattr(ctypes.PyDLL(str(compile(file, dict(macros)))), f"emulate_{kernel}")
    function.restype, function.argtypes = ctypes.c_char_p, [ctypes.POINTER(_Launch)]
    return function


def launch(file: Path, kernel: str, arguments, *, grid: int, block: int, shared_bytes: int = 0, macros: dict):
    """Runs one kernel. arguments: CPU tensors for Global<T> parameters, ctypes values for the others.

    Raises RuntimeError where a block is stuck or a thread leaves a tensor or an array in shared memory.
    """
    values = [ctypes.c_void_p(x.data_ptr()) if isinstance(x, torch.Tensor) else x for x in arguments]
    addresses = [ctypes.cast(ctypes.pointer(value), ctypes.c_void_p) for value in values]
    sizes = [_extent(x) if isinstance(x, torch.Tensor) else 0 for x in arguments]
    error = _load(file, kernel, tuple(macros.items()))(
        _Launch(
            (grid, 1, 1), (block, 1, 1), shared_bytes, ORDERS.index(_schedule["threads"]), ORDERS.index(_schedule["blocks"]),
            _schedule["seed"], (ctypes.c_void_p * len(values))(*addresses), (ctypes.c_longlong * len(values))(*sizes),
        )
    )  # fmt: skip
    if error:
        raise RuntimeError(f"{kernel}: {error.decode()}")


def _extent(x):
    """Bytes from the tensor's first element to the end of its last one."""
    last = sum((n - 1) * stride for n, stride in zip(x.shape, x.stride(), strict=True))
    return x.element_size() * (last + 1) if x.numel() else 0
