"""What notebook 01x compiles and draws: PTX, registers and blocks of stage 01's kernels, banks, roofs.

Numba's compiler (libNVVM) turns a kernel into PTX, and NVIDIA's linker (nvJitLink) turns that into machine code and
reports what it used; neither library needs a driver. A process that simulates cannot compile, so that `ptx` and `table`
start another one.
"""

import inspect
import json
import os
import re
import subprocess
import sys
from importlib import metadata
from pathlib import Path
from types import SimpleNamespace

import matplotlib.pyplot as plt
import numpy as np

from steps.bench import cost
from steps.figures import n01_fa1_numba as lesson
from steps.figures.picture import picture
from steps.figures.plots import OPERAND, style
from steps.step00_naive import io_count
from steps.step02_fa2_cuda import cache

ROOT = Path(__file__).resolve().parents[2]


def table(D=64, dtype="float32", cc=(9, 0), only=""):
    """One dict for each kernel whose name contains `only`, at its default tile for a GPU. It is kept from run to run.

    kernel, tile, threads (of a block), registers (of a thread), spilled (bytes), shared (bytes of a block), float64 and
    local (how often the PTX computes in float64, and names local memory, which is device memory), blocks (on a
    multiprocessor), limit (what keeps a further one out), occupancy (share of the threads that it can hold).
    """
    command = [sys.executable, "-m", "steps.figures.n01x_deeper", str(D), dtype, *map(str, cc), only]

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


def resources(D=64):
    """`table` in words, for an H200; or that this installation cannot compile."""
    columns = ("registers", "spilled", "shared", "threads", "blocks", "limit")
    try:
        found = table(D)
    except RuntimeError:
        return "this installation of Numba has no CUDA compiler"
    lines = [f"{f'd = {D}':25}" + "".join(f"{name:>10}" for name in columns)]
    return "\n".join(lines + [f"{row['kernel']:25}" + "".join(f"{row[n]:>10}" for n in columns) for row in found])


def ptx(*functions):
    """The loads, multiply-adds, conversions and comparisons in the PTX of functions of two float32 arrays."""
    sources = "\n".join(inspect.getsource(function) for function in functions)
    names = ", ".join(function.__name__ for function in functions)
    program = f"""
import re, numpy as np
from numba import cuda, float32
{sources}
for f in {names},:
    text, _ = cuda.compile_ptx(f, (float32[::1], float32[::1]), cc=(8, 0))
    print(f.__name__ + ":")
    for line in re.findall(r"^\\t((?:fma|cvt.*f32|setp|ld.global).*);", text, re.M):
        print("   ", " ".join(line.split()))
"""
    command = [sys.executable, "-c", program]
    environment = os.environ | {"NUMBA_ENABLE_CUDASIM": "0"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    return done.stdout.rstrip() if done.returncode == 0 else "this installation of Numba has no CUDA compiler"


def online(in_alpha, in_P, x, v):
    """(P at the maximum, out, lse) of scores x (rows, N) and values v (N,) in tiles of 64, with two forms of exp."""
    m, l, O = np.full(len(x), -np.inf, np.float32), 0, 0
    for j in range(0, x.shape[1], 64):
        m_new = np.maximum(m, x[:, j : j + 64].max(1))
        alpha, P = in_alpha(m, m_new), in_P(x[:, j : j + 64], m_new[:, None])
        m, l, O = m_new, alpha * l + P.sum(1), alpha * O + P @ v[j : j + 64]
    return in_P(m, m), O / l, m + np.log(l)


def banks_asked():
    """How many addresses a warp asks of each bank for a column of K_j, with rows of 16 and of 17 numbers."""
    style()
    fig, axes = plt.subplots(1, 2, figsize=(8, 3.2), layout="constrained", sharey=True)
    for ax, width in zip(axes, (16, 17), strict=True):
        addresses = {x * width + 3 for x in range(8)}  # column 3 of the rows of eight neighbouring threads
        asked = [sum(a % 32 == bank for a in addresses) for bank in range(32)]
        ax.bar(range(32), asked, color=OPERAND["K"])
        ax.set_title(f"rows of {width}: {max(asked)} wavefront{'s' * (max(asked) > 1)}")
        ax.set(xlabel="bank", ylim=(0, 4.4), xticks=range(0, 33, 8), yticks=range(5))
    axes[0].set(ylabel="addresses asked of a bank")
    return picture(fig, """Addresses asked of each of the 32 banks when a warp fetches one column of K_j. With rows of
        16 two banks are asked for four addresses each; with rows of 17 eight banks for one each.""")


def roofs(N=4096, d=64):
    """The recorded speed of each forward rung, and what shared memory and device memory would allow it."""
    tiles = lesson.TILES
    moved = {name: sum(io_count.fa2_count(N, d, *tile)) for name, tile in tiles.items()}
    moved["published"] = sum(io_count.fa1_count(N, d, *tiles["published"]))
    moved["registers"] += (N // tiles["registers"][1] - 1) * N * d  # It reads Q_i again for each key tile.
    loads = {"published": 2, "loops_swapped": 2, "registers": 16 / 64}  # of shared memory, a multiply-add
    lines = [f"d = {d}, TFLOP/s:   shared memory  device memory  arithmetic  measured"]
    for n, name in enumerate(tiles):
        shared = 2 * lesson.DELIVERS["shared memory"] / loads[name]
        device = 4 * N * N * d * lesson.DELIVERS["device memory"] / moved[name]
        reached = lesson.recorded(N)["fwd"][f"fwd_{n}_{name}"][d]["tflops"]
        lines.append(f"{name:17}{shared:15.1f}{device:15.1f}{lesson.GPU.fp32_tflops:12.1f}{reached:10.1f}")
    return "\n".join(lines)


if __name__ == "__main__":
    D, dtype, major, minor, only = sys.argv[1:]
    print(json.dumps(list(compile_table(int(D), dtype, (int(major), int(minor)), only))))
