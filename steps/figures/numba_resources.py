"""What the compiler makes of stage 01's kernels: registers, spills, shared memory, blocks on a multiprocessor. No GPU.

Numba's compiler (libNVVM) turns a kernel into PTX, and NVIDIA's linker (nvJitLink) turns that into machine code and
reports what it used; neither library needs a driver. A process that simulates cannot compile, so that `table` starts
another one with STEPS_ENGINE=compile.
"""

import json
import os
import re
import subprocess
import sys
from importlib import metadata
from pathlib import Path
from types import SimpleNamespace

from steps.bench import cost
from steps.step02_fa2_cuda import cache

ROOT = Path(__file__).resolve().parents[2]


def table(D=64, dtype="float32", cc=(9, 0), only=""):
    """One dict for each kernel whose name contains `only`, at its default tile for a GPU. It is kept from run to run.

    kernel, tile, threads (of a block), registers (of a thread), spilled (bytes), shared (bytes of a block), float64 and
    local (how often the PTX computes in float64, and names local memory, which is device memory), blocks (on a
    multiprocessor), limit (what keeps a further one out), occupancy (share of the threads that it can hold).
    """
    command = [sys.executable, "-m", "steps.figures.numba_resources", str(D), dtype, *map(str, cc), only]

    def compile(path):
        environment = os.environ | {"STEPS_ENGINE": "compile"}
        done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
        if done.returncode:
            raise RuntimeError(f"{' '.join(command)} failed:\n{done.stderr}")
        path.write_text(done.stdout)

    files = [Path(__file__), *sorted((ROOT / "steps" / "step01_fa1_numba").glob("*.py"))]
    compilers = sorted(f"{d.name} {d.version}" for d in metadata.distributions() if "numba" in d.name or "nv" in d.name)
    parts = command, compilers, [file.read_text() for file in files]
    return json.loads(cache.get(parts, ".json", compile).read_text())


def kernels(D, dtype, only):
    """(name, tile, threads, kernel, argument types) of the kernels whose name contains `only`."""
    from numba import boolean, float32, int64, types
    from numba.cuda import types as cuda_types

    from steps import step01_fa1_numba as stage

    f0, f1, f2 = stage.fwd_0_published, stage.fwd_1_loops_swapped, stage.fwd_2_registers
    b0, b2 = stage.bwd_0_published, stage.bwd_2_registers
    x3, x1 = (types.Array(getattr(cuda_types, dtype), ndim, "C") for ndim in (3, 1))
    o3, f32 = types.Array(float32, 3, "C"), types.Array(float32, 2, "C")
    sizes, ends = (int64, int64), (boolean, float32)
    for name, module, factory, arguments in (
        ("fwd_0_published", f0, "forward_kernel", (x3, x3, x3, o3, f32, f32)),
        ("fwd_1_loops_swapped", f1, "forward_kernel", (x3, x3, x3, x3, f32)),
        ("fwd_2_registers", f2, "forward_kernel", (x1, x1, x1, x1, f32, *sizes)),
        ("bwd_0_published", b0, "backward_kernel", (x3, x3, x3, x3, x3, f32, f32, o3, x3, x3)),
        ("bwd_2_registers, queries", b2, "queries_kernel", (x1, x1, x1, x1, x1, f32, f32, x1, *sizes)),
        ("bwd_2_registers, keys", b2, "keys_kernel", (x1, x1, x1, x1, f32, f32, x1, x1, *sizes)),
    ):
        if only in name:
            tile = module.default_tile(D)
            threads = f2.threads(D) if "registers" in name else f0.THREADS
            yield name, tile, threads, getattr(module, factory)(*tile, D), (*arguments, *ends)


def compile_kernel(kernel, arguments, cc):
    """registers, spilled, shared, float64 and local, from the PTX and the linker's report on the machine code."""
    from cuda.core import Linker, LinkerOptions, ObjectCode
    from numba import cuda

    ptx, _ = cuda.compile_ptx(kernel.py_func, arguments, cc=cc)
    options = LinkerOptions(arch=f"sm_{cc[0]}{cc[1]}", ptxas_options=["-v"], verbose=True)
    linker = Linker(ObjectCode.from_ptx(ptx.encode()), options=options)
    linker.link("cubin")
    log = linker.get_info_log()
    used = {"registers": int(re.search(r"Used (\d+) registers", log)[1])}
    used |= {"spilled": int(re.search(r"(\d+) bytes spill stores", log)[1])}
    used |= {"shared": sum(map(int, re.findall(r"\.shared .*\[(\d+)\];", ptx)))}
    return used | {"float64": ptx.count(".f64"), "local": ptx.count(".local")}


def compile_table(D, dtype, cc, only):
    """What `table` gives, in a process whose engine compiles."""
    from numba.cuda import dispatcher

    # Numba asks the current device for its capability whenever it compiles a device function.
    dispatcher.get_current_device = lambda: SimpleNamespace(compute_capability=cc)
    for name, tile, (x, y), kernel, arguments in kernels(D, dtype, only):
        row = {"kernel": name, "tile": tile, "threads": x * y} | compile_kernel(kernel, arguments, cc)
        fits = cost.occupancy(cc, threads=row["threads"], registers=row["registers"], shared=row["shared"])
        yield row | {"blocks": fits.blocks, "limit": fits.limited_by, "occupancy": fits.fraction}


if __name__ == "__main__":
    D, dtype, major, minor, only = sys.argv[1:]
    print(json.dumps(list(compile_table(int(D), dtype, (int(major), int(minor)), only))))
