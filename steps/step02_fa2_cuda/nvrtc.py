# SPDX-License-Identifier: MIT
"""Compiles a .cu file at run time with NVRTC and launches it on a GPU, through cuda.core.

`compile` needs no GPU. A `Launch` runs a kernel on torch's current stream. CUDA is imported by the functions that need
it, so that a machine without it can import this module.
"""

import ctypes
import functools
import io
import json
import os
import re
import threading
from dataclasses import asdict, dataclass
from pathlib import Path

import torch

from . import cache


@dataclass(frozen=True)
class Usage:
    """What ptxas reports for one kernel, for each of its threads."""

    registers: int
    stack: int  # bytes of local memory
    spills: int  # bytes that are stored there because the registers did not suffice


@dataclass(frozen=True)
class Compiled:
    cubin: bytes
    usage: dict  # {kernel: Usage}
    serialised: list  # ptxas's warnings that it serialises wgmma or ignores setmaxnreg


def compile(file: Path, macros: dict, arch: str) -> Compiled:
    """The file's kernels for one GPU architecture, such as "sm_90a".

    macros: {"D": 64, ...}. The result is cached on disk under a hash of the source, the macros, the architecture and
    the compiler. Raises RuntimeError where a kernel spills more than the budget in its header allows, or where ptxas
    makes wgmma instructions wait for each other. Such kernels would run, but several times slower. The error's
    attribute `usage` is {kernel: Usage}.
    """
    from cuda.bindings import nvrtc

    source = _source(file)
    version = nvrtc.nvrtcVersion()[1:]
    parts = ("nvrtc", source, sorted(macros.items()), arch, version, _OPTIONS, _SERIALISED)
    make = functools.partial(_compile, source, file.name, macros, arch, version)
    made = json.loads(cache.get(parts, ".json", lambda path: path.write_text(json.dumps(make()))).read_text())
    usage = {name: Usage(**usage) for name, usage in made["usage"].items()}
    compiled = Compiled(bytes.fromhex(made["cubin"]), usage, made["serialised"])
    budget = int(next(iter(re.findall(r"Spill budget: (\d+) bytes", source)), 0))
    for name, used in compiled.usage.items():
        if used.spills > budget:
            what = f"{name} spills {used.spills} bytes of registers a thread to memory, and its header allows {budget}"
            what += ". Use a smaller head_dim or tile"
            raise _slow(file, macros, arch, what, compiled.usage)
    if compiled.serialised:
        what = "; ".join(line.rstrip(".") for line in compiled.serialised)
        what += ". A wait is missing, or registers are used while a wgmma has them"
        raise _slow(file, macros, arch, what, compiled.usage)
    return compiled


def _slow(file, macros, arch, problem, usage):
    error = RuntimeError(f"{file.name} with {macros} on {arch}: {problem}.")
    error.usage = usage
    return error


_OPTIONS = dict(std="c++17", lineinfo=True, ptxas_options=["-v"], device_as_default_execution_space=True)
_SERIALISED = r"\(C75(?:0[89]|1[0-8])\) .*"  # C7519 only says that ptxas has put in a wgmma.fence


def _compile(source, name, macros, arch, version):
    Program, ProgramOptions = _cuda_core("Program", "ProgramOptions")
    log = io.StringIO()
    macros = [(key, str(value)) for key, value in macros.items()]
    # From 12.9 on NVRTC has a cache of its own. What it holds comes without a log, from which spills are read.
    own_cache = {"no_cache": True} if version >= (12, 9) else {}
    options = ProgramOptions(name=name, arch=arch, define_macro=macros, **_OPTIONS, **own_cache)
    cubin = Program(source, "c++", options).compile("cubin", logs=log).code
    usage = {name: asdict(usage) for name, usage in _usage(log.getvalue()).items()}
    return {"cubin": cubin.hex(), "usage": usage, "serialised": re.findall(_SERIALISED, log.getvalue())}


_importing = threading.Lock()
os.register_at_fork(after_in_child=_importing._at_fork_reinit)  # A forked process has no thread that would release it.


def _cuda_core(*names):
    """These members of cuda.core, whose first import must not happen in two threads at a time."""
    with _importing:
        import cuda.core
    return [getattr(cuda.core, name) for name in names]


def _source(file):
    """The file's text with ptx.cuh, and wgmma's wrappers if it uses them, in place of the #include.

    So NVRTC needs no path, and the text is all that a compilation depends on.
    """
    header = Path(__file__).with_name("ptx.cuh")
    inlined = f'#line 1 "ptx.cuh"\n{header.read_text().replace("#pragma once", "")}\n'
    before, after = file.read_text().split('#include "ptx.cuh"\n')
    if "wgmma_ss" in after or "wgmma_rs" in after:
        from . import wgmma

        inlined += f'#line 1 "wgmma.py"\n{wgmma.wrappers()}\n'
    return f'{before}{inlined}#line {before.count(chr(10)) + 2} "{file.name}"\n{after}'


def _usage(log):
    """{kernel: Usage} out of the log of `ptxas -v`."""
    found = re.findall(
        r"Function properties for (\w+)\n"
        r".*?(\d+) bytes stack frame, (\d+) bytes spill stores.*?\n"
        r".*?Used (\d+) registers",
        log,
    )
    return {name: Usage(int(registers), int(stack), int(spills)) for name, stack, spills, registers in found}


class Launch:
    """A kernel with its arguments, put together once and run as often as needed, each time on other tensors."""

    def __init__(
        self,
        file: Path,
        kernel: str,
        arguments,
        *,
        device: int,
        grid: int,
        block: int,
        shared_bytes: int = 0,
        macros: dict,
    ):
        """arguments: pairs (name of a tensor or None, ctypes value).

        A value with a name is a c_void_p or a TensorMap, into which each run puts the address of the tensor of that
        name. The others stay as they are.
        """
        from cuda.bindings import driver  # cuda.core's launch takes no structures, such as tensor maps.

        self.device = device
        function = _load(file, kernel, tuple(macros.items()), device, shared_bytes)
        self.described = kernel, macros, grid, block
        self.values = [value for _, value in arguments]
        named = [pair for pair in arguments if pair[0] is not None]
        self.maps = [(value, name) for name, value in named if isinstance(value, TensorMap)]
        self.pointers = [(value, name) for name, value in named if not isinstance(value, TensorMap)]
        self.addresses = (ctypes.c_void_p * len(self.values))(*map(ctypes.addressof, self.values))
        self.launch = driver.cuLaunchKernel
        self.configuration = driver.CUfunction(function), grid, 1, 1, block, 1, 1, shared_bytes
        self.arguments = ctypes.addressof(self.addresses)
        self.lock = threading.Lock()

    def __call__(self, tensors):
        """Runs the kernel on torch's current stream. tensors: {name: tensor, or None for a null pointer}."""
        # A context of that device must be current. This is torch.cuda.current_device, less its check of CUDA's set-up.
        if torch._C._cuda_getDevice() != self.device:
            with torch.cuda.device(self.device):
                return self(tensors)
        stream = torch._C._cuda_getCurrentRawStream(self.device)  # 2 us less than torch.cuda.current_stream
        with self.lock:  # The values are read by the launch itself, so that the next thread may change them after it.
            for pointer, name in self.pointers:
                tensor = tensors[name]
                pointer.value = None if tensor is None else tensor.data_ptr()
            for map, name in self.maps:
                address = tensors[name].data_ptr()
                if map.address != address:
                    map.move(address, self.device)
            (status,) = self.launch(*self.configuration, stream, self.arguments, 0)
        if status:  # CUDA_SUCCESS is 0
            if bind_context(self.device):
                return self(tensors)
            kernel, macros, grid, block = self.described
            raise RuntimeError(f"{kernel} with {macros}, {grid} blocks of {block} threads: {status.name} at the launch")


def launch(file: Path, kernel: str, arguments, **shape):
    """Runs one kernel once, as emulator.launch does on the CPU.

    arguments: tensors for Global<T> parameters, tensor maps, ctypes values. shape: grid, block, shared_bytes and
    macros.
    """
    tensors = {n: x for n, x in enumerate(arguments) if isinstance(x, torch.Tensor)}
    values = [(n, ctypes.c_void_p()) if n in tensors else (None, x) for n, x in enumerate(arguments)]
    device = next(x.device.index for x in tensors.values())
    Launch(file, kernel, values, device=device, **shape)(tensors)


def bind_context(device: int) -> bool:
    """Gives a thread that has not used CUDA yet the GPU's context. Returns whether it had none."""
    from cuda.bindings import driver

    if int(driver.cuCtxGetCurrent()[1]):
        return False
    status, context = driver.cuDevicePrimaryCtxRetain(device)
    if not status:  # CUDA_SUCCESS is 0
        (status,) = driver.cuCtxSetCurrent(context)
    if status:
        raise RuntimeError(f"GPU {device} gives this thread no context: {status.name}")
    return True


class TensorMap(ctypes.Structure):
    """How a tensor lies in memory, and which box of it a copy takes. Kernels get it by value."""

    _fields_ = [("opaque", ctypes.c_char * 128)]

    def move(self, address, device):
        """Describes a tensor of the same shape and strides on this GPU at another address from now on."""
        replace, arguments = _driver().cuTensorMapReplaceAddress, (ctypes.byref(self), ctypes.c_void_p(address))
        status = replace(*arguments)
        if status and bind_context(device):
            status = replace(*arguments)
        if status:
            raise RuntimeError(f"cuTensorMapReplaceAddress: error {status} for {address:#x}")
        self.address = address


def tensor_map(x: torch.Tensor, box: tuple) -> TensorMap:
    """The map of a tensor view x of rank 5 on a GPU, its last dimension contiguous, and of the box that a copy brings.

    In shared memory the box lies row after row, in rows of 128 bytes whose 16-byte chunks are swizzled. A kernel's
    coordinates c0, ..., c4 count the dimensions from the last to the first.
    """
    memory = ctypes.create_string_buffer(2 * 128)  # The driver wants 128 aligned bytes; cuda.bindings' own are not.
    map = TensorMap.from_buffer(memory, -ctypes.addressof(memory) % 128)
    map.address = x.data_ptr()
    kinds = {torch.float16: 6, torch.float32: 7, torch.bfloat16: 9}  # CU_TENSOR_MAP_DATA_TYPE_...
    sizes = (ctypes.c_uint64 * 5)(*reversed(x.shape))
    strides = (ctypes.c_uint64 * 4)(*(n * x.element_size() for n in x.stride()[3::-1]))  # in bytes
    boxes, steps = (ctypes.c_uint32 * 5)(*reversed(box)), (ctypes.c_uint32 * 5)(1, 1, 1, 1, 1)
    modes = 0, 3, 2, 0  # no interleave, SWIZZLE_128B, L2_PROMOTION_L2_128B, zeros outside of the tensor
    address = ctypes.c_void_p(map.address)
    status = _driver().cuTensorMapEncodeTiled(
        ctypes.byref(map), kinds[x.dtype], 5, address, sizes, strides, boxes, steps, *modes
    )
    if status:
        raise RuntimeError(f"cuTensorMapEncodeTiled: error {status} for {x.shape}, strides {x.stride()} and box {box}")
    return map


@functools.cache
def _driver():
    return ctypes.CDLL("libcuda.so.1")


@functools.cache
def _load(file, kernel, macros, device, shared_bytes):
    """The kernel's handle, ready to run on a device with that much dynamic shared memory."""
    from cuda.bindings import driver

    with torch.cuda.device(device):
        function = _module(file, macros, _architecture(device)).get_kernel(kernel)
    if shared_bytes > 48 * 1024:  # A kernel has to ask for more than this, and cuda.core has no call for it.
        limit = torch.cuda.get_device_properties(device).shared_memory_per_block_optin
        if shared_bytes > limit:
            raise RuntimeError(
                f"{kernel} with {dict(macros)} needs {shared_bytes} bytes of shared memory for a block; this GPU has "
                f"{limit}. Use a smaller head_dim or tile."
            )
        what = driver.CUfunction_attribute.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
        (status,) = driver.cuKernelSetAttribute(what, limit, function.handle, device)
        if status != driver.CUresult.CUDA_SUCCESS:
            raise RuntimeError(f"{kernel}: {status.name} when asking for up to {limit} bytes of shared memory a block")
    return int(function.handle)


@functools.cache
def _module(file, macros, arch):
    (ObjectCode,) = _cuda_core("ObjectCode")
    return ObjectCode.from_cubin(compile(file, dict(macros), arch).cubin, name=file.name)


def _architecture(device):
    major, minor = torch.cuda.get_device_capability(device)
    if (major, minor) < (7, 5):
        raise RuntimeError(f"compute capability {major}.{minor} is too old for NVRTC 13; 7.5 (T4) and newer will do.")
    return f"sm_{major}{minor}" + "a" * (major == 9)  # sm_90a has Hopper's own instructions
