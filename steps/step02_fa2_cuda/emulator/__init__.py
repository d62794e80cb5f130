# SPDX-License-Identifier: MIT
"""Compiles a .cu file with g++ and runs its kernels on the CPU. cuda.h lists what the emulation finds and what not.

`launch` runs one kernel. `schedule` chooses the order in which the threads of a block, and the blocks, run.
"""

import contextlib
import ctypes
import functools
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import torch

from .. import cache
from . import absent

HERE = Path(__file__).parent
ORDERS = ("forward", "reverse", "random")
TIMES = ("eager", "late", "lifo", "random")
# NVRTC makes one FMA of a * b - c, and with these flags so does g++. All processors with AVX2 have FMA.
_CONTRACTION = ["-ffp-contract=fast", "-fexpensive-optimizations"]
if torch.backends.cpu.get_cpu_capability().startswith("AVX"):
    _CONTRACTION.append("-mfma")
# A variable that is never set begins with a huge number. Without this flag, of g++ 12, it often begins with 0.
_SET = "-ftrivial-auto-var-init=pattern"
_PROBE = ["g++", _SET, "-E", "-x", "c++", os.devnull]
_KNOWN = [_SET] if shutil.which("g++") and subprocess.run(_PROBE, capture_output=True).returncode == 0 else []
# A loop with a constant end that passes the end of an array is refused. The kernel might give right numbers by luck.
_CHECKED = ["-Werror=aggressive-loop-optimizations"]
_LINKER = ["-fuse-ld=gold"] if shutil.which("ld.gold") else []  # A kernel is then compiled in a fifth less time.
# C's headers declare functions that no library has, such as __sinhf. So the linker reports them, and not the loader.
_WHOLE = ["-Wl,-z,defs"] if sys.platform == "linux" else []
_FLAGS = ["-std=c++17", "-O1", *_CONTRACTION, *_KNOWN, *_CHECKED, *_LINKER, "-g1", "-fPIC", "-fvisibility=hidden"]
# Before a kernel's text: what must not be in the headers, because C's own come after them.
_ONLY_HERE = "#define printf emulator::print\n#pragma GCC poison asm __asm __asm__\n"
_counts = None  # inside `count_conflicts`: {"file:line": (accesses, wavefronts)}
_additions = None  # inside `count_additions`: {kernel: atomic additions}
_unwritten = None  # inside `find_unwritten`: [what was found]
_schedule = {"threads": "forward", "blocks": "forward", "seed": 0, "copies": "late", "wgmma": "eager"}


class TensorMap(ctypes.Structure):
    """What the emulated TMA reads: the same 128 bytes as TensorMap in hopper.h."""

    _fields_ = [
        ("address", ctypes.c_void_p), ("stride", ctypes.c_longlong * 4), ("size", ctypes.c_int * 5),
        ("box", ctypes.c_int * 5), ("element", ctypes.c_int), ("unused", ctypes.c_char * 44),
    ]  # fmt: skip


def tensor_map(x: torch.Tensor, box: tuple) -> TensorMap:
    """How TMA sees a view x of rank 5, whose last dimension is contiguous, and the box of it that one copy takes.

    box: its sizes in the order of x's dimensions. In shared memory the box lies row after row, in rows of 128 bytes
    whose 16-byte chunks are swizzled. A kernel's coordinates c0, ..., c4 count the dimensions of x from the last to the
    first. The map is an argument of `launch` like others, and it keeps x alive.
    """
    if x.dim() != 5 or len(box) != 5 or x.stride(4) != 1:
        raise ValueError(
            f"TMA wants a view of rank 5 with its last dimension contiguous and a box of 5; got {x.shape} and {box}"
        )
    size = x.element_size()
    strides = [n * size for n in x.stride()[3::-1]]  # in bytes
    if x.data_ptr() % 16 or any(n % 16 or not 0 <= n < 2**40 for n in strides):
        raise ValueError(f"TMA wants an address and strides that are multiples of 16 bytes; got strides of {strides}")
    if not all(1 <= n <= 256 for n in box) or box[-1] * size != 128:
        raise ValueError(
            f"The box must have 1 to 256 elements each way and rows of 128 bytes; got {box} of {size} bytes"
        )
    map = TensorMap(x.data_ptr(), tuple(strides), tuple(x.shape[::-1]), tuple(box[::-1]), size)
    map.tensor = x
    return map


class _Launch(ctypes.Structure):
    """The structure Launch of cuda.h."""

    _fields_ = [
        ("grid", ctypes.c_uint * 3), ("block", ctypes.c_uint * 3), ("shared_bytes", ctypes.c_int),
        ("thread_order", ctypes.c_int), ("block_order", ctypes.c_int), ("copy_time", ctypes.c_int),
        ("wgmma_time", ctypes.c_int), ("count", ctypes.c_int), ("seed", ctypes.c_uint64),
        ("arguments", ctypes.POINTER(ctypes.c_void_p)), ("elements", ctypes.POINTER(ctypes.c_longlong)),
        ("names", ctypes.POINTER(ctypes.c_char_p)), ("interrupted", ctypes.c_void_p),
    ]  # fmt: skip


def available() -> bool:
    """Whether there is a g++."""
    return shutil.which("g++") is not None


@contextlib.contextmanager
def schedule(threads="forward", blocks="forward", seed=0, copies="late", wgmma="eager"):
    """Inside `with`, threads and blocks run in these ORDERS; the seed determines the "random" one.

    copies and wgmma, of TIMES, say when an asynchronous copy or product is performed. The default finds waits that are
    missing; copies="eager" and wgmma="late" find buffers that are filled again too early.
    """
    before = dict(_schedule)
    _schedule.update(threads=threads, blocks=blocks, seed=seed, copies=copies, wgmma=wgmma)
    try:
        yield
    finally:
        _schedule.update(before)


@contextlib.contextmanager
def count_conflicts():
    """Inside `with`, counts the accesses of all warps to shared memory: {"file:line": (accesses, wavefronts)}.

    A wavefront is what the 32 banks serve at once. Without bank conflicts an access takes 1 wavefront; an access of 8
    bytes a lane takes 2, and one of 16 bytes, as by ldmatrix, takes 4. The accesses of the kernel's text are counted,
    while a GPU's compiler may join neighbouring loads or move them out of a loop.
    """
    global _counts
    before, _counts = _counts, {}
    try:
        yield _counts
    finally:
        _counts = before


@contextlib.contextmanager
def count_additions():
    """Inside `with`, counts the atomic additions of each kernel to its arguments: {kernel: additions}.

    Each lane of a warp counts by itself. Numbers that are added at once, as by atomic_add_4, count as one addition.
    """
    global _additions
    before, _additions = _additions, {}
    try:
        yield _additions
    finally:
        _additions = before


@contextlib.contextmanager
def find_unwritten():
    """Inside `with`, lists for each launch the first result that is NaN because of shared memory nobody had written.

    Outside of it a launch does not report this, because a result that is NaN can be seen. If a kernel hides such a NaN,
    as by fmaxf, it is not found.
    """
    global _unwritten
    before, _unwritten = _unwritten, []
    try:
        yield _unwritten
    finally:
        _unwritten = before


def compile(file: Path, macros: dict) -> Path:
    """The shared library made from a .cu file, cached on disk under a hash of all sources. macros: {"D": 64, ...}.

    Raises RuntimeError if there is no g++, or if it cannot compile the file.
    """
    if not available():
        raise RuntimeError(
            "Without a GPU, stage 02 compiles its kernels with g++, and there is none: sudo apt install g++."
        )
    source = file.read_text()
    kernels = _parameters(source)
    # The macros stand after the headers, which use such names themselves.
    defines = "".join(f"#define {name} {value}\n" for name, value in macros.items())
    exports = "".join(f"EMULATOR_KERNEL({name})\n" for name in kernels)
    text = f'{_ONLY_HERE}{defines}#line 1 "{file.name}"\n{absent.without_headers(source)}\n{exports}'
    emulation = [HERE.parent / "ptx.cuh", *sorted(HERE.glob("*.h")), *sorted(HERE.glob("*.cpp"))]
    common = "g++", _version(), [*_FLAGS, *_WHOLE], [path.read_text() for path in emulation]
    make = functools.partial(_compile, text, common, file.parent)
    return cache.get((*common, text), ".so", make)


def _parameters(source):
    """{kernel: the names of its parameters}"""
    kernel = r"__global__(?:\s+void|\s+__launch_bounds__\((?:[^()]|\([^()]*\))*\))*\s+(\w+)\s*\(([^()]*)\)"
    found = re.findall(kernel, re.sub("//.*", "", source))
    return {name: re.findall(r"(\w+)\s*(?:,|$)", parameters) for name, parameters in found}


def _compile(text, common, folder, path):
    # The emulation takes longer to compile than a kernel, so it is compiled once. When g++ is told to include name.h,
    # it looks for name.h.gch first.
    headers = cache.get((*common, "headers"), ".h.gch", _compile_headers).with_suffix("")
    rest = cache.get((*common, "rest"), ".o", functools.partial(_compile_rest, headers))
    options = *_FLAGS, *_WHOLE, f"-I{HERE.parent}", "-include", headers
    # The working directory is where debuggers look for the source.
    _run_compiler(*options, "-shared", "-x", "c++", "-", "-x", "none", rest, "-o", path, input=text, cwd=folder)


def _compile_rest(headers, path):
    sources = "".join(f'#include "{source.name}"\n' for source in sorted(HERE.glob("*.cpp")))
    _run_compiler(*_FLAGS, f"-I{HERE}", "-include", headers, "-c", "-x", "c++", "-", "-o", path, input=sources)


def _compile_headers(path):
    _run_compiler(*_FLAGS, "-x", "c++-header", HERE.parent / "ptx.cuh", "-o", path)


def _run_compiler(*options, **run):
    english = os.environ | {"LC_ALL": "C"}
    made = subprocess.run(["g++", *options], text=True, capture_output=True, env=english, **run)
    if made.returncode:
        raise RuntimeError(f"g++ cannot compile the kernel:\n{absent.advised(made.stderr, run.get('cwd'))}")


@functools.cache
def _version():
    return subprocess.run(["g++", "-v"], text=True, capture_output=True).stderr


@functools.cache
def _load(file, kernel, macros):
    """(the kernel's shared library, the function in it that launches the kernel, the names of its parameters)"""
    # PyDLL keeps Python's lock during a call, because the emulation can run one launch at a time.
    library = ctypes.PyDLL(str(compile(file, dict(macros))))
    function = getattr(library, f"emulate_{kernel}")
    function.restype, function.argtypes = ctypes.c_char_p, [ctypes.POINTER(_Launch)]
    library.emulator_conflicts.restype = library.emulator_unwritten.restype = ctypes.c_char_p
    library.emulator_additions.restype = ctypes.c_longlong
    return library, function, _parameters(file.read_text())[kernel]


def launch(file: Path, kernel: str, arguments, *, grid: int, block: int, shared_bytes: int = 0, macros: dict):
    """Runs one kernel. arguments: CPU tensors for Global<T> parameters, tensor maps, ctypes values for the others.

    Raises RuntimeError if a block is stuck, if a thread leaves a tensor or an array in shared memory, if two blocks
    write to one element of a tensor, or for other mistakes that cuda.h lists.
    """
    values = [ctypes.c_void_p(x.data_ptr()) if isinstance(x, torch.Tensor) else x for x in arguments]
    addresses = [ctypes.cast(ctypes.pointer(value), ctypes.c_void_p) for value in values]
    sizes = [_extent(x) if isinstance(x, torch.Tensor) else 0 for x in arguments]
    library, function, names = _load(file, kernel, tuple(macros.items()))
    error = function(
        _Launch(
            (grid, 1, 1), (block, 1, 1), shared_bytes,
            ORDERS.index(_schedule["threads"]), ORDERS.index(_schedule["blocks"]),
            TIMES.index(_schedule["copies"]), TIMES.index(_schedule["wgmma"]), _counts is not None, _schedule["seed"],
            (ctypes.c_void_p * len(values))(*addresses), (ctypes.c_longlong * len(values))(*sizes),
            (ctypes.c_char_p * len(names))(*map(str.encode, names)),
            ctypes.cast(ctypes.pythonapi.PyErr_CheckSignals, ctypes.c_void_p),
        )
    )  # fmt: skip
    if error:
        raise RuntimeError(f"{kernel}: {error.decode()}")
    if _unwritten is not None and (found := library.emulator_unwritten()):
        _unwritten.append(f"{kernel}: {found.decode()}")
    if _additions is not None:
        _additions[kernel] = _additions.get(kernel, 0) + library.emulator_additions()
    if _counts is not None:
        for line in library.emulator_conflicts().decode().splitlines():
            site, *counts = line.rsplit(maxsplit=2)
            _counts[site] = tuple(a + int(b) for a, b in zip(_counts.get(site, (0, 0)), counts, strict=True))


def _extent(x):
    """Bytes from the tensor's first element to the end of its last one."""
    last = sum((n - 1) * stride for n, stride in zip(x.shape, x.stride(), strict=True))
    return x.element_size() * (last + 1) if x.numel() else 0
