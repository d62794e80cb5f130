"""What notebook 01x compiles and counts: PTX, registers and blocks of stage 01's kernels, roofs.

Numba's compiler (libNVVM) turns a kernel into PTX, and NVIDIA's linker (nvJitLink) turns that into machine code and
reports what it used; neither needs a driver. A process that simulates cannot compile, so another one does it.
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

import numpy as np

from steps.course.bench import cost
from steps.course.figures import n01_fa1_numba as lesson
from steps.course.figures.plots import table
from steps.step00_naive import io_count
from steps.step02_fa2_cuda import cache


def elsewhere(program):
    """What a Python program prints in a process that compiles."""
    environment = os.environ | {"STEPS_ENGINE": "compile", "NUMBA_ENABLE_CUDASIM": "0", "TRITON_INTERPRET": "0"}
    done = subprocess.run([sys.executable, "-c", program], env=environment, capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(f"this installation of Numba cannot compile for a GPU:\n{done.stderr}")
    return done.stdout.rstrip()


def compiled(D, dtype="float32", cc=(9, 0)):
    """What each kernel of stage 01 becomes at its default tile for a GPU, a dict each. It is kept from run to run.

    spilled: bytes. shared: bytes of a block. limit: what keeps a further block out of a multiprocessor. float64, local:
    how often the PTX computes in float64, and names local memory, which is device memory.
    """
    program = "import json, steps\nfrom steps.course.figures import n01x_deeper\n"
    program += f"print(json.dumps([*n01x_deeper.kernels({D}, {dtype!r}, {cc})]))"
    files = [Path(__file__), *sorted(Path(__file__).parents[2].glob("step01_fa1_numba/*.py"))]
    compilers = sorted(f"{d.name} {d.version}" for d in metadata.distributions() if "numba" in d.name or "nv" in d.name)
    parts = program, compilers, [file.read_text() for file in files]
    return json.loads(cache.get(parts, ".json", lambda path: path.write_text(elsewhere(program))).read_text())


def kernels(D, dtype, cc):
    """What `compiled` gives, in a process that compiles."""
    from cuda.core import Linker, LinkerOptions, ObjectCode
    from numba import boolean, cuda, float32, int64

    # Numba asks the current device for its capability whenever it compiles a device function.
    cuda.dispatcher.get_current_device = lambda: SimpleNamespace(compute_capability=cc)
    x = getattr(cuda.types, dtype)
    x3, x1, o3, f2 = x[:, :, ::1], x[::1], float32[:, :, ::1], float32[:, ::1]
    for name, factory, arguments in (
        ("fwd_0_published", "forward", (x3, x3, x3, o3, f2, f2)),
        ("fwd_1_loops_swapped", "forward", (x3, x3, x3, x3, f2)),
        ("fwd_2_registers", "forward", (x1, x1, x1, x1, f2, int64, int64)),
        ("bwd_0_published", "backward", (x3, x3, x3, x3, x3, f2, f2, o3, x3, x3)),
        ("bwd_2_registers", "queries", (x1, x1, x1, x1, x1, f2, f2, x1, int64, int64)),
        ("bwd_2_registers", "keys", (x1, x1, x1, x1, f2, f2, x1, x1, int64, int64)),
    ):
        module = getattr(lesson.stage, name)
        kernel = getattr(module, f"{factory}_kernel")(*module.default_tile(D), D)
        x, y = module.threads(D) if "registers" in name else module.THREADS
        ptx, _ = cuda.compile_ptx(kernel.py_func, (*arguments, boolean, float32), cc=cc)
        options = LinkerOptions(arch=f"sm_{cc[0]}{cc[1]}", ptxas_options=["-v"], verbose=True)
        linker = Linker(ObjectCode.from_ptx(ptx.encode()), options=options)
        linker.link("cubin")
        used = dict(threads=x * y, registers=int(re.search(r"Used (\d+) registers", linker.get_info_log())[1]))
        used |= dict(shared=sum(map(int, re.findall(r"\.shared .*\[(\d+)\];", ptx))))
        fits = cost.occupancy(cc, **used)
        used |= dict(spilled=int(re.search(r"(\d+) bytes spill stores", linker.get_info_log())[1]))
        used |= dict(blocks=fits.blocks, limit=fits.limited_by, float64=ptx.count(".f64"), local=ptx.count(".local"))
        yield used | {"kernel": f"{name}, {factory}" if factory in ("queries", "keys") else name}


def resources():
    """What the kernels use for d = 64 on an H200."""
    columns = ("kernel", "registers", "spilled", "shared", "threads", "blocks", "limit")
    return table(columns, *([kernel[name] for name in columns] for kernel in compiled(D=64)))


def ptx(*functions):
    """The loads, multiply-adds, conversions and comparisons in the PTX of functions of two float32 arrays."""
    program = "import re, numpy as np\nfrom numba import cuda, float32\n"
    for function in functions:
        program += f"""{inspect.getsource(function)}
print("{function.__name__}:")
text, _ = cuda.compile_ptx({function.__name__}, (float32[::1], float32[::1]), cc=(8, 0))
for line in re.findall(r"^\\t((?:fma|cvt.*f32|setp|ld.global).*);", text, re.M):
    print("   ", " ".join(line.split()))
"""
    return elsewhere(program)


def online(in_alpha, in_P, x, v):
    """(P at the maximum, out, lse) of scores x (rows, N) and values v (N,) in tiles of 64, with two forms of exp."""
    m, l, O = np.full(len(x), -np.inf, np.float32), 0, 0
    for j in range(0, x.shape[1], 64):
        m_new = np.maximum(m, x[:, j : j + 64].max(1))
        alpha, P = in_alpha(m, m_new), in_P(x[:, j : j + 64], m_new[:, None])
        m, l, O = m_new, alpha * l + P.sum(1), alpha * O + P @ v[j : j + 64]
    return in_P(m, m), O / l, m + np.log(l)


def roofs():
    """The recorded speed of each forward rung at d = 64, and what shared memory and device memory would allow it."""
    lines, N, d = [("TFLOP/s", "shared memory", "device memory", "arithmetic", "measured")], 4096, 64
    for n, (name, tile) in enumerate(lesson.TILES.items()):
        moved = sum((io_count.fa2_count if n else io_count.fa1_count)(N, d, *tile))
        moved += (N // tile[1] - 1) * N * d * (n == 2)  # Rung 2 reads Q_i again for each key tile.
        shared = 2 * lesson.DELIVERS["shared memory"] / (2, 2, 16 / 64)[n]  # loads of shared memory, a multiply-add
        device = 4 * N * N * d * lesson.DELIVERS["device memory"] / moved
        reached = lesson.recorded()["fwd", f"fwd_{n}_{name}", d]["tflops"]
        lines.append((name, *(f"{x:.1f}" for x in (shared, device, lesson.GPU.fp32_tflops, reached))))
    return table(*lines)
