# ---
# jupyter:
#   jupytext:
#     text_representation:
#       extension: .py
#       format_name: percent
#       format_version: '1.3'
#   kernelspec:
#     display_name: Python 3
#     language: python
#     name: python3
# ---

# %% [markdown] slideshow={"slide_type": "slide"}
# # 03a. Triton: a kernel written in tiles
#
# ## 1. The question
#
# *What does a tile language take over, what stays yours, and how far does that reach?*
#
# ![A table of five decisions in CUDA C++, Gluon and Triton. Owners of results, tiles and masks are always yours; copies
# and barriers not in Triton; the place of a number in CUDA C++ alone.](../notebooks/figures/question_03a.png)

# %% jupyter={"source_hidden": true} slideshow={"slide_type": "skip"}
import steps  # comes first, because it chooses the engine
import importlib.util
import inspect
import itertools
import json
import math
import os
import re
import subprocess
import sys
import tempfile
import warnings
from dataclasses import replace
from pathlib import Path

import matplotlib
import matplotlib.pyplot as plt
import torch
import triton
import triton.language as tl

from reference import attention, cases, error, mutants
from steps.bench import cost, profile, rows
from steps.figures.plots import COLOURS, GREYS, INK, style
from steps import step00_naive as step00, step03_triton as step03

# %% jupyter={"source_hidden": true} slideshow={"slide_type": "skip"}
from steps.figures import measured
from steps.step00_naive import fwd_3_tiled
from steps.step03_triton import fwd_0_fused, fwd_1_tma, fwd_2_roles, fwd_3_gluon, memcheck
from steps.figures.picture import unchecked as picture
from steps.workbook import Blank, check, hint, show, solution  # noqa: F401  part 5

torch.set_num_threads(1)
torch.set_printoptions(precision=2, sci_mode=False)
style()
device, h200 = steps.engine.device, cost.GPUS["NVIDIA H200"]
fresh = rows.fresh(rows.read())  # what was measured of the kernels as they are
print(steps.engine.describe())
print(f"triton {triton.__version__}, matplotlib {matplotlib.__version__}")


def box(ax, x, y, text, colour, ink=INK):
    """A unit square with a text in it."""
    ax.add_patch(plt.Rectangle((x, y), 1, 1, facecolor=colour, edgecolor="white", lw=1.5))
    ax.text(x + 0.5, y + 0.5, text, ha="center", va="center", color=ink, fontsize=9)


def bare(ax):
    """Takes the grid, the ticks and the frame away."""
    ax.grid(False)
    ax.tick_params(length=0)
    ax.spines[:].set_visible(False)

# %% [markdown] slideshow={"slide_type": "subslide"}
# - **Before you start:** notebook 00 (tiles, lse, delta); of 02a what a block and shared memory are; 02d for the second
#   half of part 4.
# - **Time:** about an hour to read, an hour more with the exercises.
# - **Hardware:** Linux. Without a GPU the kernels run in Triton's interpreter, and are compiled for GPUs that need not
#   be there. Speeds are recorded rows.
# - **Code:** `steps/step03_triton/`, four forwards and two backwards. **Tests:** `pytest tests/test_step03_triton.py`.
#   **Symbols:** `reference/symbols.md`.

# %% slideshow={"slide_type": "skip"}
DRIVER = r"""
import importlib, json, re, subprocess, sys, torch, triton
from triton.backends.compiler import GPUTarget
from triton.runtime.jit import JITFunction
from types import SimpleNamespace
arch = 90
class Driver:  # stands in for a GPU
    memory = {"max_shared_mem": 227 * 1024}
    utils = SimpleNamespace(get_device_properties=lambda device: Driver.memory)
    def launcher_cls(self, *kernel): return None
    def get_current_device(self): return arch
    def get_current_stream(self, device): return 0
    def get_current_target(self): return GPUTarget("cuda", arch, 32)
triton.runtime.driver.set_active(Driver())
"""

# %% slideshow={"slide_type": "skip"}
# Triton decides at import whether it interprets or compiles, so a second process compiles.
COMPILE = DRIVER + r"""
def compile_only(kernel, *args, grid, warmup, **options):
    made = launch(kernel, *args, grid=grid, warmup=True, **options)
    with open(f"{sys.argv[2]}/{hash(str(job))}.cubin", "wb") as file:
        file.write(made.asm["cubin"])
    tool = triton.knobs.nvidia.cuobjdump.path, "-res-usage", file.name
    text = subprocess.run(tool, capture_output=True, text=True, check=True).stdout
    registers, spilled = map(int, re.search(r"REG:(\d+) STACK:(\d+)", text).groups())
    found = dict(registers=registers, spilled=spilled, shared=made.metadata.shared)
    found |= dict(warps=made.metadata.num_warps, cubin=file.name)
    print(json.dumps([job, found | {x: made.asm[x] for x in ("ptx", "ttgir")}]), flush=True)
launch, JITFunction.run = JITFunction.run, compile_only
torch.cuda.get_device_capability = lambda device=None: divmod(arch, 10)
importlib.import_module(p := "steps.step03_triton").__path__.append(sys.argv[2])
for job in json.loads(sys.argv[1]):
    file, arch, D, tile = job
    module, x = importlib.import_module(f"{p}.{file}"), torch.zeros(1, 1, 128, D).bfloat16()
    module.refusal = lambda q: None  # Gluon's launcher looks for a GPU
    kind = module.kind_of_tiles(x) if file == "fwd_0_fused" else None
    table = module.TILES.get(kind, module.TILES)
    table[D] = tile or table[D]
    module.forward.forget()  # what it has recorded with another tile
    module.forward(x, x, x)
"""

# %% slideshow={"slide_type": "skip"}
folder = tempfile.TemporaryDirectory()
TWICE = (  # part 4: rows counted from the first row of the tensor, not of the tile
    ("    row = tl.arange(0, Br)\n    l =", "    row = i + tl.arange(0, Br)\n    l ="),
    ("lse + (bh.to(tl.int64) * Nq + i) + row", "lse + bh.to(tl.int64) * Nq + row"),
    ("mask=row < Nq - i", "mask=row < Nq"),
)
# Br, Bc, num_warps, num_stages: what part 7 compares with the kernels' own rows
SMALL = (64, 64, 4, 3)
SWEEP = ((64, 64, 4, 2), (64, 64, 8, 3), (128, 64, 4, 2), (128, 64, 4, 3), (128, 128, 8, 3))
FILES = "fwd_0_fused", "fwd_1_tma", "fwd_2_roles", "roles_twice", "fwd_3_gluon"
JOBS = [(file, 90, D, None) for D in (64, 128) for file in FILES[: 2 if D == 64 else 5]]
JOBS += [("fwd_0_fused", 80, 64, None), ("fwd_0_fused", 90, 64, (128, 64, 4, 3))]
JOBS += [("fwd_0_fused", 90, 128, SMALL), *(("fwd_1_tma", 90, 128, row) for row in SWEEP)]


def in_background(script, jobs, name):
    """Runs a script beside this notebook, with its lines in a file of that name."""
    root = Path(steps.__file__).parents[1]
    places = [Path(fwd_0_fused.__file__).parent, root, folder.name]
    environment = os.environ | {"TRITON_INTERPRET": "0", "STEPS_ENGINE": "compile"}
    environment["PYTHONPATH"] = os.pathsep.join(map(str, places))
    command = [sys.executable, "-c", script, json.dumps(jobs), folder.name]
    with Path(folder.name, name).open("w") as file:
        return subprocess.Popen(command, env=environment, stdout=file)


# %% jupyter={"source_hidden": true} slideshow={"slide_type": "skip"}
def lines_of(process, name):
    """What the background process has printed, once it has ended."""
    assert process.wait() == 0
    return [json.loads(line) for line in Path(folder.name, name).read_text().splitlines()]


def changed(file, name, *changes):
    """The path of a copy of a kernel file, under another name and with another text."""
    path = Path(fwd_0_fused.__file__).with_name(f"{file}.py")
    text = path.read_text()
    for before, after in changes:
        assert before in text, before
        text = text.replace(before, after)
    copy = Path(folder.name, f"{name}.py")
    copy.write_text(text)
    return copy


changed("fwd_2_roles", "roles_twice", *TWICE)
TABLES = {  # of an H100
    "fwd_0_fused": fwd_0_fused.TILES["16 bits, Hopper"], "fwd_1_tma": fwd_1_tma.TILES,
    "fwd_2_roles": fwd_2_roles.ROLES_TILES,
    "fwd_3_gluon": {128: (*fwd_3_gluon.TILES[128], 12, fwd_3_gluon.STAGES.value)},
}  # fmt: skip
compiler = in_background(COMPILE, JOBS, "kernels")

# %% [markdown] slideshow={"slide_type": "slide"}
# ## 2. The problem, counted
#
# Stage 02's `fa2` runs on GPUs since Turing; `hopper` uses what only an H100 has. What did that bring, at what
# cost in text, and where does a short Triton kernel stand? A line counts as *about the machine* if it names threads,
# warps, lanes, barriers, shared memory, copies or layouts. Speeds are shares of cuDNN's in the same run.

# %% slideshow={"slide_type": "fragment"}
MACHINE = r"threadIdx|blockIdx|program_id|__shfl|__syncthreads|[sS]hared|smem|unroll|lane"
MACHINE += r"|[wW]arp|ldmatrix|mma|[bB]arrier|swizzle|cp_async|tma|[lL]ayout|registers"
MACHINE += r"|async|launch_bounds|num_stages|slab"
counted = {}
for file in ("fwd_5_fa2", "fwd_8_hopper", "step03_triton/fwd_0_fused", "fwd_3_gluon"):
    text = re.sub(r'""".*?"""', "", str(show(file)), flags=re.S)  # without docstrings
    text = re.sub(r"//.*|(?m:(^|  )#(?!pragma|include).*)", "", text)  # nor comments
    lines = [line for line in text.splitlines() if line.strip()]
    about = sum(bool(re.search(MACHINE, line)) for line in lines)
    counted[file.split("/")[-1]] = about, len(lines) - about
    print(f"{file}: {about} of {len(lines)} lines are about the machine")


def one_run(kernel, which, D, causal):
    """Rows of the run that measured most beside this kernel, in bfloat16 on an H200."""
    at = {"pass": which, "dtype": "bf16", "D": D, "causal": causal, "gpu": h200.name}
    at |= {"options": {}, "timing": "interleaved", "n_gpus": 1}
    found = [row for row in fresh if all(row[name] == value for name, value in at.items())]
    runs = {row["run"] for row in found if row["kernel"] == kernel}
    runs = [[row for row in found if row["run"] == run] for run in sorted(runs)]
    return max(runs, key=len, default=[])

# %% jupyter={"source_hidden": true} slideshow={"slide_type": "fragment"}
fig, (left, right) = plt.subplots(1, 2, figsize=(9.2, 3), layout="constrained")
N = set()
for n, name in enumerate(("fwd_8_hopper", "fwd_5_fa2", "fwd_0_fused", "fwd_3_gluon")):
    speeds = {}
    for row in one_run(name, "fwd", 128, False):
        speeds.setdefault(row["N"], {})[row["kernel"] or row["peer"]] = row["tflops"]
    shares = [speeds[length][name] / speeds[length]["sdpa-cudnn"] for length in speeds]
    left.plot(list(speeds), shares, "osD^"[n] + "-", color=COLOURS[n], label=name)
    for length, share in list(zip(speeds, shares, strict=True))[-1:]:
        print(f"{name}: {share:.0%} of cuDNN's speed at N = {length}")
    N |= speeds.keys()
left.set_xscale("log", base=2)
left.set_xticks(sorted(N), [f"{n // 1024}k" if n >= 1024 else n for n in sorted(N)])
left.set(xlabel="N", title="share of cuDNN, H200, D = 128, bf16", ylim=(0, None))
left.legend(fontsize=8)
about, other = zip(*counted.values(), strict=True)
right.barh(list(counted), about, color=COLOURS[1], label="about the machine")
right.barh(list(counted), other, left=about, color=COLOURS[5], label="the rest")
right.set(title="lines of code", ylim=(5, -0.6))
right.grid(axis="y", visible=False)
right.legend(fontsize=8, loc="lower right")
parts = [f"{a / (a + o):.0%} of {n}'s" for n, (a, o) in counted.items()]
picture(fig, f"""Left: the speeds of stage 02's fa2 and hopper and of stage 03's fused and
gluon against N, as shares of cuDNN's. Right: their lines of code; about the machine are
{", ".join(parts)}.""")

# %% [markdown] slideshow={"slide_type": "slide"}
# In CUDA C++ you say which thread holds which number. In Triton you say what is done to *tiles*, and the compiler
# decides who holds what.
#
# ## 3. The idea: programs instead of threads
#
# A CUDA block becomes a **program**, and there are no threads in it: `tl.arange(0, 4)` is a tile of four numbers, `x +
# i` a tile of four pointers. What was `if (i < N)` becomes a **mask**: a tile's size is a power of two, so the last
# tile hangs over the edge. Without a mask:

# %% slideshow={"slide_type": "fragment"}
@triton.jit
def add(x, y, out, N, MASKED: tl.constexpr, BLOCK: tl.constexpr):
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)  # this program's BLOCK positions
    inside = i < N if MASKED else i >= 0
    x_i = tl.load(x + i, mask=inside, other=0.0)
    y_i = tl.load(y + i, mask=inside, other=0.0)
    tl.store(out + i, x_i + y_i, mask=inside)


x, y = torch.arange(8.0).to(device), torch.full((8,), 10.0).to(device)
for masked in (False, True):
    memory = torch.full((8,), -1.0).to(device)  # 6 numbers of out, 2 of somebody else
    add[(2,)](x, y, memory, 6, MASKED=masked, BLOCK=4)
    result, neighbours = memory[:6].tolist(), memory[6:].tolist()
    print(f"masked {masked!s:5}: out {result}, its neighbours {neighbours}")

# %% [markdown] slideshow={"slide_type": "fragment"}
# Nobody complained, though the neighbours became 16 and 17. Masks are yours, and so is `other`, what a masked load
# yields: 0 before a sum, -inf before a maximum. In two dimensions `[:, None]` and `[None, :]` broadcast:

# %% slideshow={"slide_type": "subslide"}
def excerpt(file, *functions):
    """Several functions of a kernel file, as one listing."""
    parts = [show(f"step03_triton/{file}", name) for name in functions]
    return type(parts[0])("\n\n\n".join(parts))


excerpt("fwd_0_fused", "pointers", "inside", "load_tile")

# %% [markdown] slideshow={"slide_type": "subslide"}
# ### What the interpreter shows, and what it hides
#
# It runs a kernel's Python text with numpy, one program after the other. Ours sums `tl.dot` in float64 (`interpreter.py`)
# and refuses an access beside its tensor (`memcheck.py`). Four kernels, each with a common fault: **which does the
# interpreter refuse?** A second process compiles them for an H100.

# %% slideshow={"slide_type": "fragment"}
@triton.jit
def odd_tile(x, out):  # copies a tile of 48 numbers
    tl.store(out + tl.arange(0, 48), tl.load(x + tl.arange(0, 48)))


@triton.jit
def many_stages(x, out, N):  # adds products of tiles, 128 x 128 each
    at = tl.arange(0, 128)[:, None] * 128 + tl.arange(0, 128)[None, :]
    first, total = tl.load(x + at), tl.zeros((128, 128), tl.float32)
    for j in range(0, N, 128):
        total += tl.dot(first, tl.load(x + j * 128 + at))
    tl.store(out + at, total)


@triton.jit
def largest(x, out, N):  # finds the largest of N numbers
    m = 0
    for j in range(0, N):
        m = tl.maximum(m, tl.load(x + j))
    tl.store(out, m)


@triton.jit
def count(total):  # counts the programs
    tl.store(total, tl.load(total) + 1.0)


# %% slideshow={"slide_type": "skip"}
SECOND = DRIVER + r"""
import faults
x, out = torch.zeros(1 << 16).half(), torch.zeros(1 << 16)
for name, args, options in json.loads(sys.argv[1]):
    args = [{"x": x, "out": out}.get(word, word) for word in args]
    try:
        made = getattr(faults, name).warmup(*args, grid=(1,), **options)
        if options:
            made._init_handles()  # what a launch does first
        ptx, words = made.asm["ptx"], ("ld.global", "st.global", "atom", "red.")
        said = f"no complaint; in the PTX: { {word: ptx.count(word) for word in words} }"
    except Exception as problem:
        said = str(problem)
    print(json.dumps([name, said]))
"""
given = {"odd_tile": ("x", "out"), "many_stages": ("x", "out", 256),
         "largest": ("x", "out", 9), "count": ("out",)}  # fmt: skip
options = {"many_stages": {"num_stages": 7}}
kernels = {kernel.fn.__name__: kernel for kernel in (odd_tile, many_stages, largest, count)}
sources = "\n\n".join(inspect.getsource(kernel.fn) for kernel in kernels.values())
head = "import triton\nimport triton.language as tl\n\n"
Path(folder.name, "faults.py").write_text(head + sources)
jobs = [(name, words, options.get(name, {})) for name, words in given.items()]
second = in_background(SECOND, jobs, "second")

# %% slideshow={"slide_type": "fragment"}
memcheck.watch_every_kernel()  # also those of a notebook
print(f"eight programs of each, on engine {steps.engine.name}:")
for name, kernel in kernels.items():
    x, out = torch.full((1 << 16,), -1.0).half().to(device), torch.zeros(1 << 16).to(device)
    arguments = [{"x": x, "out": out}.get(word, word) for word in given[name]]
    try:
        kernel[(8,)](*arguments, **options.get(name, {}))
        print(f"{name}: runs, and leaves {out[0].item()}")
    except Exception as problem:
        print(f"{name}: {type(problem).__name__}: {problem}")
for dtype in (torch.float16, torch.bfloat16):
    x = torch.tensor([1, 1.5, 2, 3], dtype=dtype, device=device)
    out = torch.zeros_like(x)
    add[(1,)](x, x, out, 4, MASKED=True, BLOCK=4)
    print(f"{x.tolist()} doubled in {dtype}: {out.tolist()}")
said = dict(lines_of(second, "second"))
print("\nthe compiler:")
for name in kernels:
    print(f"{name}: {said[name].strip()}\n")

# %% [markdown] slideshow={"slide_type": "fragment"}
# Read a message from its end: what is wrong comes last, where above it.
#
# - `odd_tile`: a tile's size is a power of two. Take 64, and a mask.
# - `many_stages`: seven stages are seven copies of a tile in shared memory, and the launch refuses.
# - `largest`: m begins as an integer and becomes a float, which only Python allows. The interpreter leaves 0, though
#   all numbers are -1. Begin with `float("-inf")`.
# - `count`: nobody complains, but nothing in the PTX is atomic: on a GPU all eight programs may read 0, and leave 1.
#   Give each result one owner, or use `tl.atomic_add`.
#
# numpy has no bfloat16: the interpreter adds bit patterns as integers. This stage's launchers interpret it in float32.

# %% [markdown] slideshow={"slide_type": "slide"}
# ## 4. From algorithm to code
#
# FlashAttention-2's Algorithm 1, line [10] corrected as in notebook 00, and the functions of `fwd_0_fused.py`:
#
# | line | what it does | function |
# |---|---|---|
# | [3–4] | a program takes Br queries; Q_i stays | `forward_kernel`, `load_tile` |
# | [5] | m = -inf, l = 0, O = 0 | `forward_kernel` |
# | [6–7] | for each tile of keys: K_j and V_j | `key_ranges`, `visit_keys`, `load_tile` |
# | [8] | S = Q_i K_jᵀ, not scaled yet | `visit_keys`; what is hidden: `mask` (part 5) |
# | [9–10] | m, l and O take in the tile | `online_update` (part 5) |
# | [12–15] | out = O / l, lse = scale · m + log l | `forward_kernel` |
#
# The budget: the compiler spreads a program's tiles over its warps, and what does not fit spills. float32 goes through
# tensor cores as three products of tf32, or not at all.

# %% slideshow={"slide_type": "fragment"}
for kind, table in fwd_0_fused.TILES.items():
    dtype = "bf16" if kind.startswith("16 bits") else "fp32"
    for D, (Br, Bc, warps, stages) in table.items():
        registers = cost.accumulator_registers(Br, Bc, D, dtype, threads=32 * warps)
        shared = cost.shared_bytes(Br, Bc, D, dtype, stages=stages) / 1024
        print(f"{kind:15} D <= {D:3}: tile {Br:3} x {Bc:3}, {warps} warps,", end=" ")
        print(f"{stages} stages: O, S, P {registers:3.0f} of 255 registers;", end=" ")
        print(f"Q, K, V at most {shared:3.0f} KiB")

# %% [markdown] slideshow={"slide_type": "subslide"}
# ### One tile's update, in base 2
#
# A GPU computes powers of 2. So log2(e) is folded into the scale: with c = scale · log2(e) it is exp(scale · S -
# scale · m) = 2^(c S - c m), one multiply-add and one `exp2` an entry. m is the maximum of the *unscaled* scores.
#
# Notebook 00's six tokens in tiles of 16 x 16, keys 0 to 2 first. What is not there is loaded as 0, and `mask` hides it
# as a key.

# %% slideshow={"slide_type": "fragment"}
@triton.jit
def visit(m, l, O, q, k, v, strides, scale, j, end, D: tl.constexpr, SIDE: tl.constexpr):
    """m, l (SIDE,) and O (SIDE, SIDE) after keys j to end - 1 too; q, k, v are (6, D)."""
    b, h = tl.program_id(0), tl.program_id(1)
    scale_log2 = scale * 1.4426950408889634
    i = tl.arange(0, SIDE)
    at = i[:, None] * SIDE + i[None, :]
    q_tile = fwd_0_fused.pointers(q, strides, b, h, 0, SIDE, SIDE)
    k_tile = fwd_0_fused.pointers(k, strides, b, h, j, SIDE, SIDE)
    v_tile = fwd_0_fused.pointers(v, strides, b, h, j, SIDE, SIDE)
    Q_i = fwd_0_fused.load_tile(q_tile, 0, 6, True, SIDE, D, SIDE)
    K_j = fwd_0_fused.load_tile(k_tile, j, end, True, SIDE, D, SIDE)
    V_j = fwd_0_fused.load_tile(v_tile, j, end, True, SIDE, D, SIDE)
    S = tl.dot(Q_i, tl.trans(K_j), input_precision="ieee")
    S = fwd_0_fused.mask(S, 0, j, 6, end, False, SIDE, SIDE)
    m_i, l_i, O_i = tl.load(m + i), tl.load(l + i), tl.load(O + at)
    m_i, l_i, O_i = fwd_0_fused.online_update(m_i, l_i, O_i, S, V_j, scale_log2, "ieee")
    tl.store(m + i, m_i)
    tl.store(l + i, l_i)
    tl.store(O + at, O_i)

# %% slideshow={"slide_type": "fragment"}
Q = torch.tensor([[1.0, 2], [0, 1], [-1, 0], [2, -1], [1, 1], [3, 1]]).to(device)
K = torch.tensor([[0.0, 1], [1, 0], [-1, 1], [1, 2], [2, 0], [0, -1]]).to(device)
V = torch.tensor([[0.0, 6], [2, 0], [4, 6], [6, 4], [8, 0], [10, 6]]).to(device)
scale = 1 / math.sqrt(2)
m = torch.full((16,), -math.inf).to(device)
l = torch.zeros(16).to(device)
O = torch.zeros(16, 16).to(device)
want = m[:6].clone(), l[:6].clone(), O[:6, :2].clone()
for j in (0, 3):
    visit[(1, 1)](m, l, O, Q, K, V, (12, 12, 2), scale, j, j + 3, D=2, SIDE=16)
    want = fwd_3_tiled.online_update(*want, scale * Q @ K[j : j + 3].T, V[j : j + 3])
    pairs = zip((scale * m[:6], l[:6], O[:6, :2]), want, strict=True)
    same = [torch.allclose(a, b) for a, b in pairs]
    print(f"keys to {j + 2}: row 5 has scale m {scale * m[5]:.2f}, l {l[5]:.2f},", end=" ")
    print(f"O / l ({O[5, 0] / l[5]:.2f}, {O[5, 1] / l[5]:.2f});", end=" ")
    print(f"scale m, l, O as stage 00's: {same}")

# %% [markdown] slideshow={"slide_type": "subslide"}
# Row 5 ends at (6.83, 1.34), as in notebook 00.
#
# ### Which tiles are visited, and which need a mask
#
# A mask costs comparisons on every score and every load, and most tiles need none. So there are **two loops** over the
# same text, up to `full` without and up to `end` with a mask: the constant `MASKED` makes the compiler write
# `visit_keys` twice.

# %% slideshow={"slide_type": "fragment"}
excerpt("fwd_0_fused", "key_ranges", "visit_keys", "forward_kernel")


# %% slideshow={"slide_type": "fragment"}
@triton.jit
def ranges(result, Nq, Nk, CAUSAL: tl.constexpr, Br: tl.constexpr, Bc: tl.constexpr):
    full, end = fwd_0_fused.key_ranges(tl.program_id(0) * Br, Nq, Nk, CAUSAL, Br, Bc)
    tl.store(result + 2 * tl.program_id(0), full)
    tl.store(result + 2 * tl.program_id(0) + 1, end)


def tiles(Nq, Nk, causal, Br, Bc):
    """[(i, j, masked)] of the tiles that are visited, in a program's order."""
    found = torch.zeros(triton.cdiv(Nq, Br), 2, dtype=torch.int32, device=device)
    ranges[(len(found),)](found, Nq, Nk, CAUSAL=causal, Br=Br, Bc=Bc)
    visited = []
    for n, (full, end) in enumerate(found.tolist()):
        visited += [(n * Br, j, False) for j in range(0, full, Bc)]
        visited += [(n * Br, j, True) for j in range(full, end, Bc)]
    return visited

# %% jupyter={"source_hidden": true} slideshow={"slide_type": "fragment"}
shapes = {"not causal": (14, 14, False), "causal": (14, 14, True),
          "causal, fewer queries": (10, 18, True),
          "causal, more queries": (18, 10, True)}  # fmt: skip
fig, axes = plt.subplots(1, 4, figsize=(9.6, 3.2))
for ax, (name, (Nq, Nk, causal)) in zip(axes, shapes.items(), strict=True):
    visited = tiles(Nq, Nk, causal, 4, 4)
    for i, j, masked in visited:
        colour = COLOURS[4 if masked else 5]
        ax.add_patch(plt.Rectangle((j, i), 4, 4, facecolor=colour, edgecolor="white", lw=2))
    i, j = attention.visible(Nq, Nk, causal).nonzero(as_tuple=True)
    ax.plot(j + 0.5, i + 0.5, ".", color=INK, ms=3)
    ax.add_patch(plt.Rectangle((0, 0), Nk, Nq, fill=False, edgecolor=INK, lw=1))
    ax.set(xlim=(-0.5, 20.5), ylim=(20.5, -0.5), aspect="equal", xlabel="key")
    ax.set_title(f"{name}\n{Nq} x {Nk}", fontsize=9)
    ax.set(xticks=range(0, 21, 4), yticks=range(0, 21, 4))
    masked = sum(tile[2] for tile in visited)
    print(f"{name:22}: {len(visited) - masked} tiles without a mask,", end=" ")
    print(f"{masked} with one, of {triton.cdiv(Nq, 4) * triton.cdiv(Nk, 4)}")
axes[0].set_ylabel("query")
picture(fig, """Four drawings of queries against keys in tiles of 4 by 4; dots are the pairs
that are seen. Not causal: only the last, ragged column of tiles is masked. Causal: tiles on
the diagonal are masked, those below it are not, and those above it are not visited. With 10
queries and 18 keys the diagonal ends in the lower right corner; with 18 queries and 10 keys
the first 8 queries see nothing and their tiles are not visited.""")

# %% slideshow={"slide_type": "skip"}
INDUCTOR = DRIVER + r"""
from steps.bench.peers import matrix_form
from torch._inductor.graph import GraphLowering
def stop(text):  # instead of running what has been written
    print(json.dumps([causal, text]), flush=True)
    raise InterruptedError
GraphLowering.save_output_code = staticmethod(stop)
qkv = torch.zeros(3, 1, 1, 1024, 128).bfloat16()
how = dict(fullgraph=True, dynamic=False, options={"cpu_backend": "triton"})
for causal in (False, True):
    try:
        torch.compile(matrix_form, **how)(*qkv, causal)
    except Exception as problem:
        assert "InterruptedError" in repr(problem), problem
"""
inductor = in_background(INDUCTOR, [], "inductor")  # Part 7 reads what it writes.

# %% [markdown] slideshow={"slide_type": "subslide"}
# ### Who reads what
#
# `pointers` works with the tensor's own strides, in 64 bits. For row 2²⁵ of 64 numbers begins at element 2³¹, one more
# than 32 bits can count. With grouped heads `h // group` is the key head. Let every value of key head n be n. Then `out`
# tells which one a program has read:

# %% jupyter={"source_hidden": true} slideshow={"slide_type": "fragment"}
in_32_bits = torch.tensor(2**25, dtype=torch.int32).mul(64).item()
print("2^25 * 64 in 32 bits:", in_32_bits, " in 64 bits:", 2**25 * 64)
H, Hk, N = 4, 2, 40
q, k = (torch.randn(1, N, heads, 16).to(device).transpose(1, 2) for heads in (H, Hk))
v = torch.arange(Hk).to(q)[None, :, None, None].expand(1, Hk, N, 16)
out, _ = step03.forward(q, k, v, causal=True, tile=(16, 16))
heads_read = out[0, :, -1, 0].round().int().tolist()
print("strides of q:", q.stride(), " key head read by query heads 0 to 3:", heads_read)
fig, ax = plt.subplots(figsize=(5.6, 2.3))
count_tiles = triton.cdiv(N, 16)
for program in range(H * count_tiles):
    i = count_tiles - 1 - program % count_tiles  # numbered as in forward_kernel
    h = program // count_tiles
    box(ax, i, h, f"program {program}", COLOURS[(5, 4)[heads_read[h]]])
ax.set(xlim=(0, count_tiles), ylim=(H, 0), title="blue reads key head 0, orange key head 1")
names = [f"queries from {16 * i}" for i in range(count_tiles)]
ax.set_xticks([i + 0.5 for i in range(count_tiles)], names)
ax.set_yticks([h + 0.5 for h in range(H)], [f"head {h}" for h in range(H)])
bare(ax)
picture(fig, """Four heads by three tiles of queries: twelve programs. Program 0 has the
last queries of head 0, program 2 the first. Heads 0 and 1 read key head 0, heads 2 and 3
key head 1.""")

# %% [markdown] slideshow={"slide_type": "subslide"}
# Neighbouring programs share a key head in the cache. The last queries, which see most keys, go first.
#
# ### What the compiler made of it
#
# This file compiled for an A100 (sm_80) and an H100 (sm_90), in bfloat16 with D = 64, each with its tile:

# %% slideshow={"slide_type": "fragment"}
made_of = lines_of(compiler, "kernels")
compiled = {(*job[:3], tuple(job[3] or ())): made for job, made in made_of}
for arch in (80, 90):
    made = compiled["fwd_0_fused", arch, 64, ()]
    names = ("mma.sync", "wgmma.mma_async", "cp.async.cg", "ex2.approx")
    counts = ", ".join(f"{name} {made['ptx'].count(name)}" for name in names)
    print(f"sm_{arch}: {counts}; {made['shared']} bytes of shared memory")
Br, Bc, _, stages = fwd_0_fused.TILES["16 bits, Hopper"][64]
KV_bytes = cost.shared_bytes(Br, Bc, 64, "bf16", tiles="KV", stages=stages)
Q_bytes = cost.shared_bytes(Br, Bc, 64, "bf16", tiles="Q")
print(f"sm_90: K and V, {stages} stages: {KV_bytes} bytes; Q: {Q_bytes} bytes")

# %% [markdown] slideshow={"slide_type": "subslide"}
# The same text became `mma.sync` on one GPU and `wgmma` on the other (02b, 02d). `cp.async` copies K and V ahead of
# their use, as `num_stages=3` asked. On sm_90 the shared memory is three times K and V, and Q.
#
# ### What one rounding can do
#
# The compiler makes one *fused multiply-add* of c S - c m, which rounds once instead of twice. But c m was rounded
# before, so at S = m the exponent is that rounding error (02b). Here it is, and with the power of two that
# `factor_and_shift` takes for huge scores:

# %% slideshow={"slide_type": "fragment"}
fused = compiled["fwd_0_fused", 90, 128, ()]["ptx"]
print("in the PTX:", {name: fused.count(name) for name in ("fma.rn.f32", "ex2.approx")})
c = torch.tensor(math.log2(math.e) / math.sqrt(128))
power_of_two = (c.view(torch.int32) & 0x7F800000).view(torch.float32)
for size in (1e2, 1e5, 1e8, 1e11):
    m = size * (1 + torch.rand(1000, generator=torch.Generator().manual_seed(0)))
    for name, factor in {"c": c, "power of two": power_of_two}.items():
        # The product of two float32 numbers is exact in float64.
        exponent = m.double() * factor.double() - (m * factor).double()
        P = exponent.max().exp2().float()
        print(f"m about {size:.0e}, factor {name:12}: largest P at S = m is {P:.6g}")

# %% [markdown] slideshow={"slide_type": "subslide"}
# At 10⁸ P may be 2 instead of 1, but so is all of its row, l included, and out is right. At 10¹¹ P is infinite, and out
# is NaN. So from c m = 2²⁶ on the kernels take the power of two. The interpreter rounds twice and hides this.
#
# ### Descriptors: a box instead of pointers
#
# In `fwd_1_tma.py` a *descriptor* says once where a tensor lies and how large a tile's box is. Then one thread asks
# Hopper's copy engine (TMA, 02d) for the box at some coordinates. What lies outside comes as zeros, so a load needs no
# mask. S needs one: 0 is not -inf.

# %% slideshow={"slide_type": "fragment"}
GROUPS = {
    "products": r"HGMMA",
    "copies": r"LDGSTS|UTMALDG",
    "exp2": r"MUFU",
    "addresses, comparisons": r"IMAD|IADD|LEA|ISETP|LOP3|SHF|PRMT|UIADD|ULEA",
}
chosen = {"pointers": ("fwd_0_fused", 90, 128, SMALL),
          "descriptors": ("fwd_1_tma", 90, 128, ())}  # the same tile
for name, key in chosen.items():
    tool = triton.knobs.nvidia.cuobjdump.path, "-sass", compiled[key]["cubin"]
    text = subprocess.run(tool, capture_output=True, text=True, check=True).stdout
    operations = re.findall(r"/\*[0-9a-f]{4,}\*/ +(?:@!?\w+ )?(\w+)", text)
    print(f"{name}: {compiled[key]['registers']} registers, {len(operations)} instructions")
    for group, pattern in GROUPS.items():
        print(f"    {group:23}", sum(bool(re.match(pattern, each)) for each in operations))
show("fwd_1_tma", "load_tile")

# %% [markdown] slideshow={"slide_type": "subslide"}
# What goes is copies, addresses, and the registers that held pointers. The price: address and strides must be multiples
# of 16 bytes; anything else takes the `else`.
#
# ### Warp specialisation, and its trap
#
# With one argument to the loop, `warp_specialize=True`, the compiler divides the warps of `fwd_2_roles.py`: one copies,
# two groups of four compute, 64 rows each. It wants, without saying so, descriptors made in the kernel and a single
# loop, which leaves no place for a causal mask. Left is how this file stores lse, right how `fwd_1_tma`
# does, compiled in its place:

# %% slideshow={"slide_type": "fragment"}
def adds_64(ttgir):
    """Where the second group's part of the program adds 64 to the rows of lse."""
    part = ttgir[ttgir.rindex("partition") :]
    defined = dict(re.findall(r"^ *(%\w+) = (.*?)(?: loc.*)?$", part, re.M))
    waiting, adds = re.findall(r"tt.store (%\w+)", part)[-1:], {}
    while waiting:
        name = waiting.pop()
        says = defined.pop(name, "")
        if re.search(r"%c64_|start = 64", says):
            adds[name] = re.sub(r" \{async[^}]*2>\}|async_task_id = [^>]*>, ", "", says)
        waiting += re.findall(r"%\w+", says)
    return adds


for before, after in TWICE:
    print(f"{before.strip().splitlines()[0]:42} | {after.strip().splitlines()[0]}")
for file in ("fwd_2_roles", "roles_twice"):
    found = adds_64(compiled[file, 90, 128, ()]["ttgir"])
    begins = 64 * len(found)
    rows_of = [[*range(i, i + 64), *range(i + begins, i + begins + 64)] for i in (0, 128)]
    written = {row for row in itertools.chain(*rows_of) if row < 256}
    print(f"{file}:", *(f"\n    {name} = {says}" for name, says in found.items()))
    print(f"    group 2 begins at row i + {begins}: {len(written)} of 256 rows are written")

# %% [markdown] slideshow={"slide_type": "subslide"}
# The compiler gives the second group its rows by adding 64: to a tile of row numbers, and to the coordinate of a
# descriptor, which `i` is for Q. A sum of both moves twice, and half of lse is never written. In
# this file `i` goes into the address, where it is not moved, and `row` moves alone.
#
# ### Gluon: the same, said by hand
#
# Triton waits for a `tl.dot` whose result the same iteration uses, so no group multiplies under its own exponentials.
# `fwd_3_gluon.py` does, in the layer below Triton. Beside stage 02:
#
# | | `fwd_3_gluon.py` | `fwd_8_hopper.cu` |
# |---|---|---|
# | room, barriers | `make_ring`: `allocate_shared_memory`, `mbarrier.init` | `struct Ring`, `barrier_init` |
# | a copy | `load`: `expect`, `async_copy_global_to_shared` | `Ring::load`: `barrier_expect`, `tma_load` |
# | start S, O | `warpgroup_mma(..., is_async=True)` | `wgmma_fence`, `wgmma_ss`, `wgmma_commit` |
# | wait for S, not O | `warpgroup_mma_wait(1, (S,))` | `wgmma_wait<...>()` |
# | P as an operand | `convert_layout(P, DotOperandLayout(...))` | `to_operand`, `pack` |
# | roles, registers | `gl.warp_specialize([...], [4, 1], [240, 24])` | `if (threadIdx.x < 128)`, `registers_decrease` |
# | turns, persistent blocks | – | `Turn`, `tile_number` |

# %% slideshow={"slide_type": "fragment"}
show("step03_triton/fwd_3_gluon", "step")

# %% [markdown] slideshow={"slide_type": "subslide"}
# Waits and phases are yours again; swizzles and the places of numbers in registers are not. The interpreter does not
# run Gluon.
#
# ### The backward: three kernels and no atomics
#
# One pass over the tiles computes five products in each: S, dP, dV, dK, dQ. If a program owns a tile of keys, dK_j and
# dV_j stay with it, but dQ_i gets parts from many programs, in whatever order they come. Two passes have one owner for
# each result, and both compute S and dP. Grouped heads come for free: the owner of a key tile visits the queries of all
# heads that share it.

# %% jupyter={"source_hidden": true} slideshow={"slide_type": "fragment"}
fig, axes = plt.subplots(1, 2, figsize=(7.4, 3.2), layout="constrained")
for ax, by_keys in zip(axes, (True, False), strict=True):
    for i, j in itertools.product(range(4), range(4)):
        if j <= i:
            owner = j if by_keys else i
            box(ax, j, i, owner, COLOURS[2 + owner])
    for n in range(4):
        if by_keys:
            begin, end = (n + 0.15, n + 0.08), (n + 0.15, 3.92)
        else:
            begin, end = (0.08, n + 0.85), (n + 0.92, n + 0.85)
        ax.annotate("", end, begin, arrowprops={"arrowstyle": "->", "color": INK})
    ax.set(xlim=(0, 4), ylim=(4, 0), aspect="equal", xticks=[], yticks=[])
    ax.set(xlabel="tiles of keys", ylabel="tiles of queries")
    ax.grid(False)
axes[0].set_title("keys_kernel: dK_j, dV_j\nS, dP, dV, dK: 4 products", fontsize=10)
axes[1].set_title("queries_kernel: dQ_i\nS, dP, dQ: 3 products", fontsize=10)
picture(fig, """Two causal triangles of tiles. Left: each column has one colour, the program
that owns those keys and walks down the queries. Right: each row has one colour, the program
that owns those queries and walks along the keys.""")

# %% slideshow={"slide_type": "fragment"}
products = {}
for name in ("visit_queries", "visit_keys"):
    text = str(show("step03_triton/bwd_0_fused", name))
    products[name] = len(re.findall(r"tl\.dot\(", text))
total = sum(products.values())
print("matrix products a tile:", products, "together", total)
print(f"counted are 5: at most 5/{total} = {5 / total:.0%} of the speed of products")
seeded = torch.Generator().manual_seed(0)
q, k, v, dout = torch.randn(4, 1, 1, 64, 16, generator=seeded).to(device)
out, lse = step03.forward(q, k, v)
parts = []
for j in range(0, 64, 16):
    k_j, v_j = k[:, :, j : j + 16], v[:, :, j : j + 16]
    parts.append(step00.backward(dout, q, k_j, v_j, out, lse, rung="matrix")[0])
sums = set()
for order in itertools.permutations(parts):
    sums.add(sum(order[1:], order[0]).cpu().numpy().tobytes())
print(f"dQ from 4 tiles of keys, added in 24 orders: {len(sums)} different results")
runs = [step03.backward(dout, q, k, v, out, lse, tile=(32, 32)) for _ in range(2)]
same = all(torch.equal(a, b) for a, b in zip(*runs, strict=True))
print("stage 03 twice, the same bits:", same)

# %% [markdown] slideshow={"slide_type": "slide"}
# ## 5. Write it yourself
#
# Write the body in place of `raise Blank`: `check` runs some of the contract's cases and names what fails.
# `hint("03.1")` to `hint("03.1", 3)` help, `solution("03.1")` is the stage's function.
#
# **Exercise 03.1: the scores that are hidden.** The orange tiles of part 4: no key, or, if CAUSAL, one after the query.
#
# **Exercise 03.2: P and dS of one tile or of its transpose.** `keys_kernel` calls it with everything transposed. So
# `lse_2`, `delta`, `query` and `key` (positions in q and k) come as a column or a row to match. S is not scaled;
# `scale_log2` is scale · log2(e), and `lse_2` is lse · log2(e), or +inf for a query that sees no key.
#
# **Exercise 03.3: one tile of keys, in base 2.** `factor_and_shift(m, scale_log2)` is there for you,
# and PRECISION is `tl.dot`'s `input_precision`. V_j (Bc, D) has the tensors' dtype. In a row that has seen no key m is -inf.
#
# **Bug hunt 03.bug1:** "half of my lse is garbage, only with `warp_specialize`". `python -m steps check 03.bug1` tells
# the whole complaint; you write the test that catches it.

# %% slideshow={"slide_type": "fragment"}
@triton.jit
def mask(S, i, j, Nq, Nk, CAUSAL: tl.constexpr, Br: tl.constexpr, Bc: tl.constexpr):
    """S (Br, Bc), with -inf where there is no key, or where it lies after the query.

    The tile starts at query i and key j.
    """
    raise Blank


check("03.1", mask)

# %% slideshow={"slide_type": "fragment"}
@triton.jit
def tile_gradients(
    S, dP, lse_2, delta, query, key, Nq, Nk, scale_log2,
    MASKED: tl.constexpr, CAUSAL: tl.constexpr
):  # fmt: skip
    """(P, dS) of one tile, from S and dP, the gradient of P; also with all transposed."""
    raise Blank


check("03.2", tile_gradients)

# %% slideshow={"slide_type": "fragment"}
@triton.jit
def online_update(m, l, O, S, V_j, scale_log2, PRECISION: tl.constexpr):
    """(m, l, O) after one more tile of keys, with S = Q_i K_j^T (Br, Bc), not scaled."""
    raise Blank


check("03.3", online_update)

# %% [markdown] slideshow={"slide_type": "slide"}
# ## 6. Check it, then break it
#
# Five of the contract's cases, cut to be quick. Then five mistakes, each in a copy of the file. Where a case dies, its
# `out` is compared with mutants. **Which mistake lives through everything? Which dies only with grouped heads?**
#
# <details><summary>Answer</summary>
#
# `offsets in 32 bits` lives: it takes 2³¹ elements, so the stage has a test of that size for GPUs. `h % Hk` dies only
# with grouped heads. And `end aligned at the top left` lives with more queries than keys, where it only visits masked
# tiles in vain.
#
# </details>

# %% slideshow={"slide_type": "fragment"}
# T is the longer side of the stage's smallest tile.
cut = {
    "ragged": dict(H=1, Nq=lambda T: T + 5),
    "fewer_queries_causal": dict(H=1, Nq=lambda T: T + 5, Nk=lambda T: 2 * T + 3),
    "more_queries_causal": dict(H=1, Nq=lambda T: 2 * T + 3, Nk=lambda T: T + 5),
    "head_dim_odd": dict(H=1, Nq=lambda T: 5),
    "grouped_heads": dict(H=4, Hk=2, Nq=lambda T: 5),
}
built, worst = {}, {}
for case in (replace(case, **cut[case.name]) for case in cases.CASES if case.name in cut):
    x = cases.build(case, step03.SUPPORTS, torch.float32)
    want = error.expected(x.q, x.k, x.v, x.dout, causal=x.causal, scale=x.scale)
    q, k, v, dout = (t.to(device) for t in (x.q, x.k, x.v, x.dout))
    results = step03.forward(q, k, v, **x.options)
    if case.name == "grouped_heads":
        results += step03.backward(dout, q, k, v, *results, **x.options)
    named = zip(error.NAMES, results, strict=False)
    errors = error.errors({name: r.cpu() for name, r in named}, want)
    worst[case.name] = max(e / want.tolerance[name] for name, e in errors.items())
    built[case.name] = x, want
failed = sum(ratio > 1 for ratio in worst.values())
print(f"engine {steps.engine.name}: {len(worst)} cases, {failed} failed,", end=" ")
print(f"largest error {max(worst.values()):.2f} of the tolerance")

# %% slideshow={"slide_type": "fragment"}
mistakes = {
    "masked only if causal": ("        if MASKED:", "        if MASKED and CAUSAL:"),
    "end aligned at the top left": ("i + Br + Nk - Nq", "i + Br"),
    "key head h % Hk": ("h // group", "h % (H // group)"),
    "columns not masked": ("ROWS, D, D_pad), other", "ROWS, D_pad, D_pad), other"),
    "offsets in 32 bits": (".to(tl.int64)", ""),
}


def planted(number, before, after):
    """A copy of the stage's forward, as a module, with `after` in place of `before`."""
    # Triton reads a kernel's text from its file, so the copy is a file.
    file = changed("fwd_0_fused", f"planted_{number}", (before, after))
    name = f"{step03.__name__}.{file.stem}"  # in the stage's package, for its imports
    spec = importlib.util.spec_from_file_location(name, file)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module

# %% slideshow={"slide_type": "subslide"}
def diagnosis(out, x, want):
    """The names of the mutants of the forward that give this out."""
    found = []
    for mutant in (m for m in mutants.MUTANTS if issubclass(m.kind, mutants.Forward)):
        try:
            theirs = mutant.run(x, x.tile, step03.SUPPORTS["order"])["out"]
        except mutants.NotApplicable:
            continue
        if torch.allclose(out, theirs, atol=2 * want.tolerance["out"], equal_nan=True):
            found.append(mutant.name)
    return "\n".join(found) or "dies"


verdicts = {}
# numpy warns where the interpreter meets the NaN that we look for.
warnings.filterwarnings("ignore", message="All-NaN")
for number, (says, change) in enumerate(mistakes.items()):
    broken = planted(number, *change)
    for name, (x, want) in built.items():
        try:
            out, lse = broken.forward(*(t.to(device) for t in (x.q, x.k, x.v)), **x.options)
            wrong = error.failures({"out": out.cpu(), "lse": lse.cpu()}, want)
            verdicts[says, name] = diagnosis(out.cpu(), x, want) if wrong else "lives"
        except IndexError:  # memcheck.py's
            verdicts[says, name] = "out of bounds"

# %% jupyter={"source_hidden": true} slideshow={"slide_type": "fragment"}
fig, ax = plt.subplots(figsize=(9.6, 3.2))
for (row, says), (column, name) in itertools.product(enumerate(mistakes), enumerate(built)):
    word = verdicts[says, name]
    lives = word == "lives"
    box(ax, column, row, word, COLOURS[4 if lives else 0], INK if lives else "white")
for text in ax.texts:
    text.set_fontsize(7.5)
ax.set(xlim=(0, len(built)), ylim=(len(mistakes), 0))
ax.set_xticks([c + 0.5 for c in range(len(built))], built, fontsize=8)
ax.set_yticks([r + 0.5 for r in range(len(mistakes))], mistakes, fontsize=8)
ax.set_title("blue: dies; with a mutant's name where out equals that mutant's")
bare(ax)
picture(fig, """Five mistakes against five cases. Each of the first four dies in one case:
masked only if causal in ragged, end aligned at the top left with fewer queries, key head
h % Hk with grouped heads, columns not masked with an odd head_dim. Offsets in 32 bits live
everywhere.""")

# %% [markdown] slideshow={"slide_type": "slide"}
# ## 7. Predict, then measure
#
# **Question 1.** Two counts bound the time in which tensor cores can work. *By groups:* they idle while a group of four
# warps computes its softmax, unless another group on the same multiprocessor (SM) multiplies. By 02d's count 64 scores
# of a row take 8 clocks of tensor cores, 4 of exp and 3 of float32 at D = 128; 4, 4 and 2.5 at D = 64. *By bytes:*
# shared memory gives or takes at most 128 bytes a clock (02e). How many groups must share an SM? What do Br, Bc,
# `num_warps` and `num_stages` change?
#
# <details><summary>Answer</summary>
#
# The whole over the products: 15 / 8 and 10.5 / 4, so two groups at D = 128, three at D = 64. Eight warps are two groups
# if each has 64 rows of its own. A stage more is a copy of K and V more: with 128 x 64 and four warps the third costs a
# program. A larger Bc widens products, which then read Q_i less often; with a larger Br K and V are copied less often.
# On Hopper `fused` takes 128 rows and eight warps.
#
# </details>

# %% slideshow={"slide_type": "fragment"}
def at_most(D, Br, Bc, groups, ptx):
    """The share of the time in which tensor cores can work: by groups, by bytes."""
    tensor, exp, fp32 = Bc * D / 1024, Bc / 16, (4 * Bc + D) / 128  # clocks of a row
    by_groups = groups * tensor / (tensor + exp + fp32)
    found = re.findall(r"wgmma.mma_async\S*m64n(\d+)k16\S* *\{[^}]*\}, *(\{?)", ptx)
    clocks = sum(int(n) / 2 for n, _ in found)
    bytes_ = sum(32 * int(n) + (0 if registers else 2048) for n, registers in found)
    bytes_ += 4096 / Br * clocks  # K_j and V_j: 4 Bc D bytes for 4 Br Bc D / 4096 clocks
    by_bytes = 128 * clocks / bytes_ if found else math.nan  # not wgmma
    return min(tensor / max(tensor, exp, fp32), by_groups), min(by_bytes, 1)


print("file           D  row, * the file's own ", "registers spilled  KiB",
      "programs x groups  at most: by groups by bytes")  # fmt: skip
shown = {key: made for key, made in compiled.items() if key[0] in TABLES and key[1] == 90}
for (file, _, D, tile), made in sorted(shown.items()):
    Br, Bc, _, stages = tile or TABLES[file][D]
    needs = {name: made[name] for name in ("registers", "shared")}
    programs = cost.occupancy((9, 0), threads=32 * made["warps"], **needs).blocks
    n = max(1, min(made["warps"] // 4, Br // 64))  # groups that have rows of their own
    made["row"] = Br, Bc, made["warps"], stages
    made["bounds"] = at_most(D, Br, Bc, programs * n, made["ptx"])
    print(f"{file:11} {D:4} {' ' if tile else '*'}{measured.in_words(made['row']):26}",
          f"{made['registers']:6}{made['spilled']:8}{made['shared'] // 1024:6}",
          f"{programs:7} x {n}", *(f"{x:16.0%}" for x in made["bounds"]))  # fmt: skip

# %% jupyter={"source_hidden": true} slideshow={"slide_type": "fragment"}
sweep = rows.read_record("tune")
as_it_is = sweep["source"] == rows.code_hash("03_triton", "fwd_1_tma")
speeds = {tuple(one["row"]): one["tflops"] for one in sweep["candidates"]}
print(f"{len(speeds)} rows of fwd_1_tma at D = 128, measured on {sweep['date']};",
      f"the file is as it was then: {as_it_is}")  # fmt: skip
for (file, _, D, _), made in sorted(shown.items()):
    if file == "fwd_1_tma" and D == 128 and made["row"] in speeds:
        share = speeds[made["row"]] / h200.half_tflops
        print(f"{measured.in_words(made['row']):26} {speeds[made['row']]:.0f} TFLOP/s,",
              f"{share:.0%} of the peak; by the counts at most {min(made['bounds']):.0%}")
print(measured.sweep_in_words(sweep))
fastest = max(speeds, key=speeds.get)
picture(measured.tiles(sweep), f"""TFLOP/s of the table's row and its neighbours, by tile;
the markers are warps, the colours stages. The fastest is {measured.in_words(fastest)}
with {speeds[fastest]:.0f}, the slowest has {min(speeds.values()):.0f}.""")

# %% [markdown] slideshow={"slide_type": "subslide"}
# The counts know neither barriers nor waiting: at D = 128 `tma` is fastest with 64 x 64, though larger tiles have higher
# bounds. So tables of tiles come from sweeps.
#
# **Question 2.** Where can `roles` not be better than `tma`? Which rung should come closest to cuDNN at D = 128, and
# why may another one at D = 64?
#
# **Question 3.** The backward does 7 products where 5 are counted. What is the most it can show? In what share of the
# cycles does a profiler find `tma`'s tensor cores at work, in either pass?
#
# <details><summary>Answers</summary>
#
# 2. With a causal mask, and for D up to 64: there that rung is `tma` with descriptors made in the kernel, and V_j
#    loaded later: slower. `gluon` alone multiplies under its own exponentials. At D = 64 two groups are too few by the
#    count: `tma` has three, and `gluon` from N = 2048 on.
# 3. 5/7 of what a plain matrix product reaches in the same run: the dashed line. `fa4` and `gluon` pass it with 5 products in
#    one pass, for which it adds up dQ in memory. The share of cycles: forward about TFLOP/s over the peak, backward 7/5
#    of that. `queries_kernel` leads: its left factors, Q_i and dO_i, stay in registers, so that wgmma reads less. Where
#    no other unit is near its limit, a kernel waits.
#
# </details>

# %% slideshow={"slide_type": "fragment"}
of_rung = dict(zip(("fused", "tma", "roles", "gluon"), COLOURS, strict=False))


def at_longest(kernel, which):
    """{(D, causal): {name: TFLOP/s}} at the longest N of the run with most kernels."""
    speeds = {}
    for setting in itertools.product((128, 64), (False, True)):
        run = one_run(kernel, which, *setting)
        longest = [row for row in run if row["N"] == max(row["N"] for row in run)]
        speeds[setting] = {row["kernel"] or row["peer"]: row["tflops"] for row in longest}
        shown = {name: round(tflops) for name, tflops in speeds[setting].items()}
        about = f"D = {setting[0]}{', causal' if setting[1] else ''}"
        if not run:
            print(f"{about}: no rows yet")
            continue
        print(f"{about}, N = {longest[0]['N']}, TFLOP/s: {shown}")
        ours = [name for name in shown if "wd_" in name]
        parts = [f"{name} {shown[name] / h200.half_tflops:.0%}" for name in ours]
        print("    of the datasheet's peak:", ", ".join(parts))
    files = {path.stem for path in Path(step03.__file__).parent.glob(f"{which}_*.py")}
    absent = files.difference(*speeds.values())
    print("not in this run:", ", ".join(sorted(absent)) or "none")
    return speeds

# %% jupyter={"source_hidden": true} slideshow={"slide_type": "fragment"}
def draw(speeds, which, alt, roof=None):
    names = sorted(set().union(*speeds.values()), key=lambda n: (n[1:4] != "wd_", n))
    if not names:
        return print("on an H200: python -m steps.bench triton")
    fig, ax = plt.subplots(figsize=(9.2, 3.2), layout="constrained")
    greys, count = iter(GREYS[1:]), len(names)
    for n, name in enumerate(names):
        colour = of_rung[name.split("_")[-1]] if "wd_" in name else next(greys)
        heights = [found.get(name, 0) for found in speeds.values()]
        at = [s + 0.84 * (n + 0.5) / count - 0.42 for s in range(4)]
        bars = ax.bar(at, heights, width=0.8 / count, color=colour, label=name)
        plain = {"facecolor": "white", "edgecolor": "none", "pad": 0.4}
        ax.bar_label(bars, fmt="%.0f", fontsize=7, padding=2, bbox=plain)
    if roof:
        ax.axhline(roof, color=INK, ls="--", lw=1, label=f"5/7 of a product: {roof:.0f}")
    ax.set_xticks(range(4), ["D = 128", "D = 128, causal", "D = 64", "D = 64, causal"])
    ax.grid(axis="x", visible=False)
    ax.set(title=f"{which} at the longest N on an H200, bfloat16, TFLOP/s")
    ax.legend(fontsize=8, loc="center left", bbox_to_anchor=(1, 0.5))
    return picture(fig, alt)


draw(at_longest("fwd_0_fused", "fwd"), "forward", """Bars of TFLOP/s of the forwards of
stage 03, torch's kernels and FlashAttention-4, at D = 128 and 64, with and without a causal
mask.""")

# %% slideshow={"slide_type": "fragment"}
in_bf16 = [row for row in fresh if row["dtype"] == "bf16" and row["gpu"] == h200.name]
for peer in ("sdpa-cudnn", "fa4"):
    best = "fwd_3_gluon", "fwd_1_tma", "bwd_1_tma", "bwd_2_gluon"
    print(measured.shares(in_bf16, best, peer), end="\n\n")
backwards = at_longest("bwd_0_fused", "bwd")
run = {row["run"] for row in one_run("bwd_0_fused", "bwd", 128, False)}
beside = [row for row in fresh if row["run"] in run and row["peer"] == rows.MATMUL]
beside = [row["tflops"] for row in beside]
roof = 5 / 7 * sorted(beside)[len(beside) // 2] if beside else None
for (D, causal), found in backwards.items():
    for name in ("bwd_0_fused", "bwd_1_tma") if roof and found else ():  # seven products
        print(f"D = {D}, causal {causal}: {name} has {found[name] / roof:.0%} of the roof")
draw(backwards, "backward", """Bars of TFLOP/s of the backwards of stage 03, torch's
kernels and FlashAttention-4, at D = 128 and 64, with and without a causal mask; a dashed
line at 5/7 of a matrix product.""", roof)

# %% jupyter={"source_hidden": true} slideshow={"slide_type": "fragment"}
counted = {"hopper of stage 02": profile.read().get("hopper")} | profile.read(part="triton")
counted = {kernel: c for kernel, c in counted.items() if c}  # not of a former version
UNITS = {"tensor_pipe": "tensor cores\nwork", "exp_units": "exp units\nwork",
         "issue_slots": "issue slots\nused", "dram_throughput": "device memory\nbandwidth",
         "occupancy": "warps of those\nthat fit"}  # fmt: skip
fig, ax = plt.subplots(figsize=(9.2, 3.2), layout="constrained")
for n, (kernel, c) in enumerate(counted.items()):
    at = [i + 0.2 * (n - (len(counted) - 1) / 2) for i in range(len(UNITS))]
    bars = ax.bar(at, [c[unit] for unit in UNITS], 0.18, color=COLOURS[n], label=kernel)
    ax.bar_label(bars, fmt="%.0f", fontsize=8)
    highest = max(("tensor_pipe", "exp_units", "issue_slots", "dram_throughput"), key=c.get)
    print(f"{kernel}: {c['registers']:.0f} registers; highest: {highest} {c[highest]:.0f}%")
ax.set_xticks(range(len(UNITS)), UNITS.values())
ax.set(ylabel="%", ylim=(0, 105))
ax.set_title("H200: {B} x {H} heads, N = {N}, D = {D}, not causal".format(**profile.SIZE))
ax.grid(axis="x", visible=False)
ax.legend(fontsize=8)
picture(fig, f"""Bars of five counters in percent for {", ".join(counted)}. Those whose
names end in _kernel are rung tma's.""")

# %% [markdown] slideshow={"slide_type": "subslide"}
# **Where it stands** from N = 4096 on, causal or not: at D = 128 `gluon` has 0.99 to 1.12 of cuDNN's speed and 0.90 to 0.96 of
# FlashAttention-4's (`fa4`), at D = 64 `tma` 0.98 to 1.02 and 0.81 to 0.90; backward `tma` 0.83 to 0.98 and 0.70 to 0.77, `gluon`
# (03x) 1.01 to 1.20 and 0.86 to 0.91.
#
# ### torch.compile of naive attention
#
# What does `torch.compile` make of the formula with its N x N matrix (`matrix_form` in `steps/bench/peers.py`)? On a
# GPU `TORCH_LOGS=output_code python FILE.py` shows what its compiler, Inductor, writes. Here it writes Triton for
# tensors of a CPU, N = 1024, and is stopped before it runs. **Question 4.** At N = 16384, why is it as fast as cuDNN
# full, and far behind causal?
#
# <details><summary>Answer</summary>
#
# Inductor knows the plain formula by its pattern, and calls SDPA. A mask by `masked_fill` fits no pattern. Then both
# products are calls of a library, and Triton gets what lies between, a whole row at a time. S and P go through memory,
# written and read, and no tile is skipped.
#
# </details>

# %% slideshow={"slide_type": "fragment"}
CALL = r"(?m)^ +(?:buf\d+ = )?((?:torch\.ops\.aten|extern_kernels|triton_)[\w.]+)\("
for causal, text in lines_of(inductor, "inductor"):
    print(f"causal {causal} calls:", *re.findall(CALL, text), sep="\n    ")
    for kernel in re.findall(r"@triton.jit\n(def .*?)\n'''", text, re.S):
        print(kernel)
print()
for D, causal in itertools.product((128, 64), (False, True)):
    at = {"D": D, "causal": causal, "pass": "fwd", "gpu": h200.name, "n_gpus": 1}
    found = [row for row in fresh if all(row[name] == value for name, value in at.items())]
    runs = [row["run"] for row in found if row["peer"] == "compiled"]
    found = [row for row in found if row["run"] in runs[-1:]]
    ms = {row["kernel"] or row["peer"]: round(row["ms_median"], 1) for row in found}
    for row in found[:1]:
        moved = 4 * 2 * row["B"] * row["H"] * row["N"] ** 2  # S and P, written and read
        moved_ms = 1e3 * moved / (1e12 * h200.bandwidth)
        print(f"D = {D}, causal {causal}, N = {row['N']}, ms: {ms}; S and P {moved_ms:.1f}")

# %% [markdown] slideshow={"slide_type": "slide"}
# ## 8. Summary
#
# - Threads, registers, shared memory, barriers and instructions are the compiler's; pointers, masks, tile sizes, and
#   who owns which result are yours. On a GPU nobody checks a store.
# - A tile decides how many groups of warps share an SM, one multiplying under another's softmax, and how much shared
#   memory must move.
# - Descriptors save instructions and registers; roles are one argument, with a trap; Gluon writes them out.
# - Two passes in the backward: 7 products instead of 5, no atomics, the same bits each time.
# - The interpreter proves formulas and edges; races, bfloat16, roundings and speed need the GPU.
#
# **Ask yourself**
#
# 1. Why may `load_tile` fill K_j beyond the last key with 0, though a softmax needs -inf there?
# 2. What does `full // Bc * Bc` do at a ragged end when there is no causal mask?
# 3. Why does `fwd_0_fused` take eight warps at D = 64, and `fwd_1_tma` four?
# 4. Why is `i + row` right in `fwd_1_tma`, and wrong with roles?
# 5. With 8 query heads a key head, how many programs write dK_j, and how many query tiles does each visit?
#
# ### Capstone: the forward from an empty file
#
# `my/03_capstone.py` begins with the signature of `attention`.
#
# | `python -m steps check` | what you add |
# |---|---|
# | `03.capstone.1` | 32 queries, 32 keys: three loads, two products, a softmax in between |
# | `03.capstone.2` | a loop over tiles of keys, with the online softmax |
# | `03.capstone.3` | any number of queries and keys, any head_dim, any strides |
# | `03.capstone.4` | the causal mask, and lse |
#
# Then `python -m steps verify my/03_capstone.py:attention --without backward,gqa --tile 32` runs the cases, and on a GPU
# prints your speed.
#
# **Go further**
#
# - ★ (15 minutes) Give question 1's table a tile of 32 x 64 at D = 128. What do the counts leave out?
# - ★★ (1 hour, GPU) `python -m steps.bench.tune` on your GPU: where do the counts fail?
#
# **Read:** `papers/flash_attention_2.md`, `papers/flash_attention_3.md`; Triton's tutorial on fused attention.
#
# **Next:** [03b_triton_features.ipynb](03b_triton_features.ipynb): features, decoding, and which file to take.
