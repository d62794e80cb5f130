# SPDX-License-Identifier: MIT
"""What the compiler makes of each kernel: registers, spills, shared memory, and how many blocks fit on a multiprocessor. No GPU.

Numba's compiler (libNVVM) turns a kernel into PTX, NVIDIA's linker (nvJitLink) turns that into machine code and reports what it
used. Both are libraries that need neither a GPU nor a driver. A process that simulates cannot compile, so `table` starts one that
does not. Needs the kernel files beside it, numba-cuda and cuda.core. `python resources.py` compiles everything in a minute or two
and writes resources.json, which `recorded` reads.
"""

import hashlib
import json
import os
import re
import subprocess
import sys
from importlib import metadata
from pathlib import Path

THREADS_A_WARP, WARPS, BLOCKS, REGISTERS = 32, 64, 32, 65536  # what a multiprocessor of compute capability 8.0 or 9.0 holds
SHARED = {(8, 0): 164 * 1024, (9, 0): 228 * 1024}  # bytes of shared memory of a multiprocessor; each block takes 1 KiB more


def table(D=64, dtype="float32", cc=(9, 0), only=""):
    """One dict for each kernel whose name contains `only`, at its default tile for a GPU. A few seconds a kernel.

    kernel, tile, threads (of a block), registers (of a thread), spilled (bytes), shared (bytes of a block), float64 and local
    (how often the PTX computes in float64, and names local memory, which is device memory), blocks (on a multiprocessor), limit
    (what keeps a further one out), occupancy (share of the 64 warps that a multiprocessor can hold).
    """
    environment = os.environ | {"NUMBA_ENABLE_CUDASIM": "0"}
    command = [sys.executable, __file__, str(D), dtype, *map(str, cc), only]
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(f"{' '.join(command)} failed:\n{done.stderr}")
    return json.loads(done.stdout)


def recorded():
    """What resources.json keeps: versions, and the rows of `table` for each of RECORDED, with their D, dtype and cc.

    Raises RuntimeError where the kernels have changed since.
    """
    kept = json.loads(RECORD.read_text())
    if kept["sources"] != sources():
        raise RuntimeError(f"the kernels have changed since {RECORD.name} was written; python {__file__} writes it anew.")
    return kept


def sources():
    """A hash of the kernels' files."""
    return hashlib.sha256("".join((RECORD.parent / f"{name}.py").read_text() for name in FILES).encode()).hexdigest()[:16]


def occupancy(threads, registers, shared, cc=(9, 0)):
    """(blocks on a multiprocessor, what limits them, share of the 64 warps). Registers are handed out 256 at a time to a warp."""
    warps = -(-threads // THREADS_A_WARP)
    fit = {
        "registers": REGISTERS // (warps * -(-registers * THREADS_A_WARP // 256) * 256),
        "shared memory": SHARED[cc] // (shared + 1024),
        "warps": WARPS // warps,
        "blocks": BLOCKS,
    }
    limit = min(fit, key=fit.get)
    return fit[limit], limit, fit[limit] * warps / WARPS


def kernels(D, dtype, only):
    """(name, tile, threads, kernel, argument types) of the kernels whose name contains `only`."""
    sys.path.insert(0, str(Path(__file__).parents[1]))
    sys.modules[STAGE] = package = type(sys)(STAGE)  # the package without its __init__.py, which would choose the simulator
    package.__path__ = [str(Path(__file__).parent)]
    from importlib import import_module

    from numba import boolean, float32, int64, types
    from numba.cuda import types as cuda_types

    f0, b0, f1, f2, b2 = (import_module(f"{STAGE}.{name}") for name in FILES)
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
    """{"registers", "spilled", "shared", "float64", "local"}, from the PTX and the linker's report on the machine code."""
    from cuda.core import Linker, LinkerOptions, ObjectCode
    from numba import cuda

    ptx, _ = cuda.compile_ptx(kernel.py_func, arguments, cc=cc)
    options = LinkerOptions(arch=f"sm_{cc[0]}{cc[1]}", ptxas_options=["-v"], verbose=True)
    linker = Linker(ObjectCode.from_ptx(ptx.encode()), options=options)
    linker.link("cubin")
    log = linker.get_info_log()
    number = lambda pattern: int(re.search(pattern, log)[1])  # noqa: E731
    return {
        "registers": number(r"Used (\d+) registers"),
        "spilled": number(r"(\d+) bytes spill stores"),
        "shared": sum(map(int, re.findall(r"\.shared .*\[(\d+)\];", ptx))),
        "float64": ptx.count(".f64"),
        "local": ptx.count(".local"),
    }


RECORD = Path(__file__).with_name("resources.json")
RECORDED = (64, "float32", (9, 0)), (128, "float32", (9, 0)), (64, "float16", (8, 0))
STAGE = "step01_fa1_numba"
FILES = ("fwd_0_published", "bwd_0_published", "fwd_1_loops_swapped", "fwd_2_registers", "bwd_2_registers")


def main(D, dtype, major, minor, only):
    from types import SimpleNamespace

    from numba.cuda import dispatcher

    cc = int(major), int(minor)
    dispatcher.get_current_device = lambda: SimpleNamespace(compute_capability=cc)  # asked for each device function
    rows = []
    for name, tile, (x, y), kernel, arguments in kernels(int(D), dtype, only):
        row = {"kernel": name, "tile": tile, "threads": x * y} | compile_kernel(kernel, arguments, cc)
        fits = occupancy(row["threads"], row["registers"], row["shared"], cc)
        rows.append(row | dict(zip(("blocks", "limit", "occupancy"), fits, strict=True)))
    print(json.dumps(rows))


def record():
    versions = {name: metadata.version(name) for name in ("numba-cuda", "nvidia-nvvm", "nvidia-nvjitlink")}
    kernels = [{"D": D, "dtype": dtype, "cc": cc} | row for D, dtype, cc in RECORDED for row in table(D, dtype, cc)]
    RECORD.write_text(json.dumps({"sources": sources(), "versions": versions, "kernels": kernels}, indent=1) + "\n")


if __name__ == "__main__":
    main(*sys.argv[1:]) if len(sys.argv) > 1 else record()
