# SPDX-License-Identifier: MIT
"""Compiles a .cu file at run time with NVRTC and launches it on a GPU, through cuda.core.

`compile` needs no GPU; `launch` runs a kernel on torch's current stream of the tensors' device. The same `launch` in emulator/
runs the same file on a CPU. CUDA is imported by the functions that need it: a machine without it can import this module.
"""

import ctypes
import functools
import io
import json
import re
import threading
from dataclasses import asdict, dataclass
from pathlib import Path

import torch

from . import cache

ARCHITECTURES = ("sm_75", "sm_80", "sm_90a")  # what the tests compile for: T4, A100, H100/H200


@dataclass(frozen=True)
class Usage:
    """What ptxas reports for one kernel: registers a thread, and bytes of local memory a thread."""

    registers: int
    stack: int
    spills: int  # bytes stored because the registers did not suffice


@dataclass(frozen=True)
class Compiled:
    cubin: bytes
    usage: dict  # {kernel: Usage}
    serialised: list  # what ptxas says where it could not let wgmma run on, or ignored setmaxnreg


def compile(file: Path, macros: dict, arch: str) -> Compiled:
    """The file's kernels for one GPU architecture, such as "sm_90a".

    macros: {"D": 64, ...}. The result is kept on disk under a hash of the source, the macros, the architecture and the compiler.
    Raises RuntimeError, with what was used in its attribute `usage`, where a kernel spills beyond its budget or ptxas makes
    wgmma wait for each other: both run, several times slower.
    """
    from cuda.bindings import nvrtc

    source = _source(file)
    parts = ("nvrtc", source, sorted(macros.items()), arch, nvrtc.nvrtcVersion()[1:], _OPTIONS, _SERIALISED)
    kept = cache.get(parts, ".json", lambda path: path.write_text(json.dumps(_compile(source, file.name, macros, arch))))
    made = json.loads(kept.read_text())
    usage = {name: Usage(**usage) for name, usage in made["usage"].items()}
    compiled = Compiled(bytes.fromhex(made["cubin"]), usage, made["serialised"])
    budget = int(next(iter(re.findall(r"Spill budget: (\d+) bytes", source)), 0))
    for name, usage in compiled.usage.items():
        if usage.spills > budget:
            problem = f"{name} spills {usage.spills} bytes of registers a thread to memory, and its header allows {budget}"
            raise _slow(file, macros, arch, problem, compiled.usage)
    if compiled.serialised:
        raise _slow(file, macros, arch, "; ".join(compiled.serialised), compiled.usage)
    return compiled


def _slow(file, macros, arch, problem, usage):
    error = RuntimeError(f"{file.name} with {macros} on {arch}: {problem.rstrip('.')}. Use a smaller head_dim or tile.")
    error.usage = usage
    return error


# no_cache: what NVRTC's own cache holds comes without a log, and a log is what the spill budget is read from.
_OPTIONS = dict(std="c++17", lineinfo=True, ptxas_options=["-v"], device_as_default_execution_space=True, no_cache=True)
_SERIALISED = r"\(C75(?:0[89]|1[0-8])\) .*"  # C7519 only says that ptxas has put in a wgmma.fence


def _compile(source, name, macros, arch):
    Program, ProgramOptions = _cuda_core("Program", "ProgramOptions")
    log = io.StringIO()
    macros = [(key, str(value)) for key, value in macros.items()]
    options = ProgramOptions(name=name, arch=arch, define_macro=macros, **_OPTIONS)
    cubin = Program(source, "c++", options).compile("cubin", logs=log).code
    usage = {name: asdict(usage) for name, usage in _usage(log.getvalue()).items()}
    return {"cubin": cubin.hex(), "usage": usage, "serialised": re.findall(_SERIALISED, log.getvalue())}


_importing = threading.Lock()


def _cuda_core(*names):
    """These members of cuda.core, whose first import must not happen in two threads at a time."""
    with _importing:
        import cuda.core
    return [getattr(cuda.core, name) for name in names]


def _source(file):
    """The file's text with ptx.cuh, and wgmma's wrappers if it uses them, in place of the #include: NVRTC needs no path."""
    header = file.parent / "ptx.cuh" if (file.parent / "ptx.cuh").exists() else Path(__file__).parent / "ptx.cuh"
    inlined = f'#line 1 "ptx.cuh"\n{header.read_text().replace("#pragma once", "")}\n'
    before, after = file.read_text().split('#include "ptx.cuh"\n')
    if "wgmma_ss" in after or "wgmma_rs" in after:
        from . import wgmma

        inlined += f'#line 1 "wgmma.py"\n{wgmma.wrappers()}\n'
    return f'{before}{inlined}#line {before.count(chr(10)) + 2} "{file.name}"\n{after}'


def _usage(log):
    """{kernel: Usage} out of the log of `ptxas -v`."""
    found = re.findall(
        r"Function properties for (\w+)\n.*?(\d+) bytes stack frame, (\d+) bytes spill stores.*?\n.*?Used (\d+) registers", log
    )
    return {name: Usage(int(registers), int(stack), int(spills)) for name, stack, spills, registers in found}


class Launch:
    """A kernel with its arguments, put together once and run as often as needed.

    arguments: tensors for Global<T> parameters, tensor maps, ctypes values for the others. tensors: those whose addresses each
    run replaces; an argument, or what a tensor map was made of.
    """

    def __init__(
        self, file: Path, kernel: str, arguments, *, grid: int, block: int, shared_bytes: int = 0, macros: dict, tensors=()
    ):
        from cuda.bindings import driver  # cuda.core's launch takes no structures, and a tensor map is one

        self.device = next(x.device.index for x in arguments if isinstance(x, torch.Tensor))
        function = _load(file, kernel, tuple(macros.items()), self.device, shared_bytes)
        self.shape = kernel, macros, grid, block
        self.values = [ctypes.c_void_p(x.data_ptr()) if isinstance(x, torch.Tensor) else x for x in arguments]
        places = {id(x): n for n, x in enumerate(tensors)}
        pairs = [(value, places.get(id(getattr(x, "tensor", x)))) for value, x in zip(self.values, arguments, strict=True)]
        self.maps = [(value, n) for value, n in pairs if n is not None and isinstance(value, TensorMap)]
        self.pointers = [(value, n) for value, n in pairs if n is not None and not isinstance(value, TensorMap)]
        self.addresses = (ctypes.c_void_p * len(self.values))(*map(ctypes.addressof, self.values))
        self.launch, self.arguments = driver.cuLaunchKernel, ctypes.addressof(self.addresses)
        self.what = driver.CUfunction(function), grid, 1, 1, block, 1, 1, shared_bytes
        self.lock = threading.Lock()

    def __call__(self, tensors=()):
        """Runs it on torch's current stream, on these in place of the tensors that __init__ was given, if any."""
        # A context of that device must be current. (torch.cuda.current_device first asks whether CUDA has been set up.)
        if torch._C._cuda_getDevice() != self.device:
            with torch.cuda.device(self.device):
                return self(tensors)
        stream = torch._C._cuda_getCurrentRawStream(self.device)  # as Triton does: torch.cuda.current_stream takes 2 us
        with self.lock:
            for pointer, n in self.pointers if tensors else ():
                pointer.value = tensors[n].data_ptr()
            for map, n in self.maps if tensors else ():
                if map.address != (address := tensors[n].data_ptr()):
                    map.move(address)
            (status,) = self.launch(*self.what, stream, self.arguments, 0)
        if status:  # CUDA_SUCCESS is 0
            if _bind_context(self.device):
                return self(tensors)
            kernel, macros, grid, block = self.shape
            raise RuntimeError(f"{kernel} with {macros}, {grid} blocks of {block} threads: {status.name} at the launch")


def _bind_context(device):
    """Makes the GPU's context current in a thread that has none, because it has not used CUDA yet; whether it had none."""
    from cuda.bindings import driver

    if int(driver.cuCtxGetCurrent()[1]):
        return False
    driver.cuCtxSetCurrent(driver.cuDevicePrimaryCtxRetain(device)[1])
    return True


def launch(file: Path, kernel: str, arguments, **shape):
    """Runs one kernel once; shape: grid, block, shared_bytes and macros as for Launch.

    A file is read once a process: after an edit, start Python anew.
    """
    Launch(file, kernel, arguments, **shape)()


_runs = {}  # by everything that a plan depends on: its launches


def run(plan, inputs, others, options):
    """Launches the kernels that plan(*inputs, *others, *options) yields, each as a dictionary of `launch`'s arguments.

    A plan may depend on the options, and on the inputs' shapes, strides, 16-byte alignment, and common type and device. A call
    that agrees with an earlier one in these only puts other addresses into its launches, unless the plan copies an input.
    """
    q = inputs[0]
    key = plan, options, q.dtype, q.device, *[(x.shape, x.is_contiguous() or x.stride(), x.data_ptr() % 16) for x in inputs]
    tensors, launches = (*inputs, *others), _runs.get(key)
    if launches is None:
        own = [x.view_as(x) for x in tensors]  # each an object of its own, also where q, k and v are one tensor
        planned = list(plan(*own, *options))  # holds copies until they are in use
        launches = [Launch(**what, tensors=own) for what in planned]
        # An input that has no place has been copied, and a launch that is kept would go on with the copy.
        maps = [pair for launch in launches for pair in launch.maps]
        if {n for _, n in (*maps, *(pair for launch in launches for pair in launch.pointers))}.issuperset(range(len(inputs))):
            for map, _ in maps:
                map.tensor = None  # it would fill memory
            if len(_runs) >= 1000:
                _runs.clear()
            _runs[key] = launches
    for launch in launches:
        launch(tensors)


class TensorMap(ctypes.Structure):
    """How a tensor lies in memory, and which box of it a copy takes; passed to kernels by value."""

    _fields_ = [("opaque", ctypes.c_char * 128)]

    def move(self, address):
        """From now on it shows the same at another address."""
        if status := _driver().cuTensorMapReplaceAddress(ctypes.byref(self), ctypes.c_void_p(address)):
            raise RuntimeError(f"cuTensorMapReplaceAddress: error {status} for {address:#x}")
        self.address = address


def tensor_map(x: torch.Tensor, box: tuple) -> TensorMap:
    """The map of a tensor view x of rank 5 on a GPU, its last dimension contiguous, and of the box that a copy brings.

    In shared memory the box lies row after row, in rows of 128 bytes whose 16-byte chunks are swizzled. A kernel's coordinates
    c0, ..., c4 count the dimensions from the last to the first.
    """
    memory = ctypes.create_string_buffer(2 * 128)  # the driver wants it aligned, and cuda.bindings' own CUtensorMap is not
    map = TensorMap.from_buffer(memory, -ctypes.addressof(memory) % 128)
    map.address = x.data_ptr()
    kinds = {torch.float16: 6, torch.float32: 7, torch.bfloat16: 9}  # CU_TENSOR_MAP_DATA_TYPE_...
    status = _driver().cuTensorMapEncodeTiled(
        ctypes.byref(map), kinds[x.dtype], 5, ctypes.c_void_p(map.address), (ctypes.c_uint64 * 5)(*reversed(x.shape)),
        (ctypes.c_uint64 * 4)(*(n * x.element_size() for n in x.stride()[3::-1])), (ctypes.c_uint32 * 5)(*reversed(box)),
        (ctypes.c_uint32 * 5)(1, 1, 1, 1, 1), 0, 3, 2, 0,  # no interleave, SWIZZLE_128B, L2_PROMOTION_L2_128B, zeros outside
    )  # fmt: skip
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
    if shared_bytes > 48 * 1024:  # more has to be asked for, and cuda.core has no call for it
        limit = torch.cuda.get_device_properties(device).shared_memory_per_block_optin
        if shared_bytes > limit:
            raise RuntimeError(
                f"{kernel} with {dict(macros)} needs {shared_bytes} bytes of shared memory a block; this GPU has {limit}. "
                "Use a smaller head_dim or tile."
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
