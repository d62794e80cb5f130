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
# # 02a. CUDA C++: the first kernels
#
# ## 1. The question
#
# *How does attention look in CUDA C++, what does the compiler make of it, and who should own a row of S: a thread, or
# some lanes of a warp?*
#
# ![A tile of S twice. Left, a thread owns a whole row. Right, a lane of a warp owns every eighth number of four
# rows.](../notebooks/figures/question_02a.png)

# %% jupyter={"source_hidden": true} slideshow={"slide_type": "skip"}
import steps  # first: it chooses the engine
import ctypes
import functools
import json
import math
import os
import re
import subprocess
import sys
import tempfile
import textwrap
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import matplotlib.pyplot as plt
import torch
from IPython.display import display
from matplotlib.colors import ListedColormap

# %% jupyter={"source_hidden": true} slideshow={"slide_type": "skip"}
from reference import attention, cases, error
from steps import checks
from steps import step02_fa2_cuda as step02
from steps.bench import cost, rows
from steps.figures.measured import speed_bars
from steps.figures.plots import COLOURS, FAINT, INK, style
from steps.step02_fa2_cuda import cache, calls, emulator, ladder, nvrtc, works
from steps.figures.picture import unchecked as picture
from steps.workbook import check, edited, hint, show, solution  # noqa: F401

torch.set_num_threads(1)
torch.set_printoptions(precision=2, sci_mode=False)
style()
gpu = cost.GPUS["NVIDIA H200"]
print(steps.engine.describe())
print(f"torch {torch.__version__}, Python {sys.version.split()[0]}")

# %% [markdown] slideshow={"slide_type": "subslide"}
# - **Before you start:** notebooks 00 and 01; reading C. No CUDA C++ yet.
# - **Time:** about an hour to read, an hour more with the exercise.
# - **Hardware:** any computer with Linux (or WSL2) and g++. Kernels run on the CPU behind an emulation of CUDA; with a
#   GPU, one launch in part 5 and the checks of part 6 run there.
# - **Code:** [`steps/step02_fa2_cuda/ladder.py`](../steps/step02_fa2_cuda/ladder.py) and others. **Tests:**
#   `pytest tests/test_step02_fa2_cuda.py tests/test_emulator.py`.
# - **Paper:** FlashAttention-2 (2307.08691), restated in [papers/flash_attention_2.md](../papers/flash_attention_2.md).
#   Words: [reference/glossary.md](../reference/glossary.md).

# %% [markdown] slideshow={"slide_type": "slide"}
# ## 2. The problem, measured
#
# Stage 01's rungs: in `published` the loop over keys is outside, as in FlashAttention-1, with a block for each head. In
# `loops_swapped` queries are outside, as in FlashAttention-2, with a block for each *query tile*. In `registers` a
# thread also keeps 8 x 8 numbers of S and of O.

# %% jupyter={"source_hidden": true} slideshow={"slide_type": "fragment"}
AT = {"gpu": gpu.name, "n_gpus": 1, "pass": "fwd", "N": 4096, "D": 64, "causal": False}
AT |= {"options": {}, "timing": "interleaved"}
STAGE_01 = ("fwd_0_published", "fwd_1_loops_swapped", "fwd_2_registers")


def measured_rows(dtype, kernels, peer):
    """The committed rows of these kernels and of the peer. Prints who has none."""
    at = AT | {"dtype": dtype}
    found = rows.latest(rows.fresh(rows.read()))
    found = [r for r in found if all(r[name] == value for name, value in at.items())]
    found = [r for r in found if r["peer"] == peer or r["kernel"] in kernels]
    missing = [name for name in kernels if name not in [r["kernel"] for r in found]]
    if missing:
        print(f"not measured yet: {', '.join(missing)} in {dtype}")
    return found


def speeds(found):
    """A bar for each row."""
    text = ", ".join(f"{r['peer'] or r['kernel']} {r['tflops']:.3g}" for r in found)
    return picture(speed_bars(found), f"TFLOP/s of the forward as bars: {text}.")

# %% jupyter={"source_hidden": true} slideshow={"slide_type": "fragment"}
print("One sequence of 16384 tokens, 32 heads. Keys outside: 32 blocks,",
      f"{gpu.sms - 32} of {gpu.sms} multiprocessors idle.")
print(f"Queries outside, 64 rows a block: {32 * 16384 // 64} blocks.",
      f"The float32 units could reach {gpu.fp32_tflops} TFLOP/s.")
speeds(measured_rows("fp32", STAGE_01, "sdpa-efficient"))

# %% [markdown] slideshow={"slide_type": "subslide"}
# ### What Numba keeps from you
#
# For 64 multiply-adds, the inner loop of `registers` fetches 8 + 8 numbers from shared memory. One instruction of a GPU
# can fetch *four* neighbouring numbers. Below, Numba compiles this loop to **PTX**, NVIDIA's assembly language. The
# numbers lie side by side, aligned to 16 bytes, yet there are 16 loads of one number. CUDA C++ will need 4.

# %% slideshow={"slide_type": "fragment"}
PROGRAM = """
import re
from collections import Counter

import numpy as np
from numba import cuda, float32

def patch(x, y):
    A = cuda.shared.array(1024, np.float32, alignment=16)
    B = cuda.shared.array(1024, np.float32, alignment=16)
    a, b = cuda.local.array(8, np.float32), cuda.local.array(8, np.float32)
    S = cuda.local.array(64, np.float32)
    t, w = np.uint32(cuda.threadIdx.x), np.uint32(64)  # unsigned: notebook 01, part 4
    for d in range(16): A[t + d * w] = B[t + d * w] = x[t + d * w]
    cuda.syncthreads()
    for i in range(64): S[i] = np.float32(0)
    for d in range(16):
        for r in range(8): a[r] = A[d * w + t // 8 * np.uint32(8) + r]
        for r in range(8): b[r] = B[d * w + t % 8 * np.uint32(8) + r]
        for i in range(64): S[i] += a[i // 8] * b[i % 8]
    for i in range(64): y[t + i * w] = S[i]

ptx, _ = cuda.compile_ptx(patch, (float32[::1], float32[::1]), cc=(9, 0))
print(dict(Counter(re.findall(r"^\\t(fma\\S*|ld.shared\\S*)", ptx, re.M))))
"""

# %% slideshow={"slide_type": "fragment"}
def write_output(path):
    """Runs the program in its own process, because Numba may be simulating in this one."""
    environment = os.environ | {"NUMBA_ENABLE_CUDASIM": "0"}
    command = [sys.executable, "-c", PROGRAM]
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    path.write_text(done.stdout or "this Numba has no CUDA compiler")


print(cache.get(("02a", PROGRAM), ".txt", write_output).read_text())  # kept on disk

# %% [markdown] slideshow={"slide_type": "slide"}
# ## 3. The idea: owners who agree on m
#
# **Claim.** For *any* m, the same above and below,
#
# $$O_i = \frac{\sum_j e^{S_{ij} - m}\, V_j}{\sum_j e^{S_{ij} - m}}$$
#
# No other row occurs in it, so rows can be divided freely among workers. The *keys* of a row can be divided, too, if
# all workers use one m: then their parts of both sums add up. First the failing variants, on notebook 00's six tokens:
# two workers have three keys each.

# %% slideshow={"slide_type": "fragment"}
Q = torch.tensor([[1.0, 2], [0, 1], [-1, 0], [2, -1], [1, 1], [3, 1]])
K = torch.tensor([[0.0, 1], [1, 0], [-1, 1], [1, 2], [2, 0], [0, -1]])
V = torch.tensor([[0.0, 6], [2, 0], [4, 6], [6, 4], [8, 0], [10, 6]])
S = Q @ K.T / math.sqrt(2)


def part(keys, m=None):
    """(m, l, O) of row 5 over some keys, in the unit e^m. m: by default their maximum."""
    m = S[5, keys].max() if m is None else m
    P = (S[5, keys] - m).exp()
    return m, P.sum(), P @ V[keys]


first, second = slice(0, 3), slice(3, 6)
agreed = torch.maximum(part(first)[0], part(second)[0])
answers = {
    "the last one to write wins": [part(second)],
    "added, each with its own m": [part(first), part(second)],
    "added, with one m": [part(first, agreed), part(second, agreed)],
}
for says, parts in answers.items():
    out = sum(O for _, _, O in parts) / sum(l for _, l, _ in parts)
    print(f"{says:27} out[5] = ({out[0]:.2f}, {out[1]:.2f})")

# %% slideshow={"slide_type": "fragment"}
q, k, v = (x[None, None] for x in (Q, K, V))  # (B, H, N, D); on the CPU, so it is emulated
for order in ("forward", "reverse"):
    with emulator.schedule(blocks=order):
        out, lse = calls.forward(q, k, v, rung="scalar", tile=(2, 3))  # 3 blocks of 2 rows
    x, y = out[0, 0, 5]
    print(f"this stage's CUDA kernel, blocks {order}: out[5] = ({x:.2f}, {y:.2f})")

# %% [markdown] slideshow={"slide_type": "subslide"}
# Row 5 should be (6.83, 1.34), as in notebook 00. The failing variants give (7.35, 1.34) and, added in different units,
# (4.74, 1.32).
#
# The same choice comes again *inside* a block. FlashAttention-1 gave each warp some keys of every row, and added up O
# through shared memory; FlashAttention-2 gives it some rows (section 3.3). This notebook's kernels go further down:
#
# - rung 0, `scalar`: a thread owns a row. Nothing to agree on.
# - rung 1, `warp`: eight lanes of a warp own four rows. They agree on m by three shuffles.
#
# Below, a colour is an owner. In rung 0 each row has its own; the six colours repeat.

# %% jupyter={"source_hidden": true} slideshow={"slide_type": "fragment"}
row, key = torch.meshgrid(torch.arange(64), torch.arange(64), indexing="ij")
owners = {
    "FlashAttention-1: a warp, some keys": key // 16,
    "FlashAttention-2: a warp, some rows": row // 16,
    "rung 0: a thread, a row": row % 6,
}
fig, axes = plt.subplots(1, 3, figsize=(8.4, 3.1), layout="constrained", sharey=True)
for ax, (title, owner) in zip(axes, owners.items(), strict=True):
    colours = ListedColormap(COLOURS[: owner.max() + 1])
    ax.imshow(owner, cmap=colours, extent=(0, 64, 64, 0), interpolation="nearest")
    ax.set(xlabel="key", xticks=range(0, 65, 16), yticks=range(0, 65, 16))
    ax.set_title(title, fontsize=9)
    ax.grid(False)
axes[0].set_ylabel("query")
picture(fig, """A tile of S, 64 queries by 64 keys, coloured by owner, three times.
FlashAttention-1: four bands of keys, one for each warp, so that every row has four owners.
FlashAttention-2: four bands of rows, one owner each. Rung 0: every row is a band of its
own.""")

# %% [markdown] slideshow={"slide_type": "slide"}
# ## 4. From algorithm to code
#
# ### CUDA C++ for those who know Numba
#
# | Numba | here | meaning |
# |---|---|---|
# | `@cuda.jit` | `extern "C" __global__ void` | a kernel; `extern "C"` keeps its name findable |
# | `@cuda.jit(device=True)` | `__device__` | a function of a kernel |
# | `cuda.threadIdx.x`, `cuda.blockIdx.x` | `threadIdx.x`, `blockIdx.x` | who am I |
# | an array `x` | `Global<const float> x` | memory of the GPU: a pointer, without a length |
# | `cuda.shared.array(n, float32)` | `smem.array<float>(n)`, a `Shared<float>` | shared memory |
# | `cuda.local.array(n, float32)` | `float O[n]` | registers, if all goes well |
# | arrays are passed as they are | `float (&O)[n]`, `float& m` | the function gets the caller's variable itself |
# | `cuda.syncthreads()` | `__syncthreads()` | the barrier of a block |
# | a factory with `Br`, `Bc`, `D` | macros `Br`, `Bc`, `D`; in rung 1 a type, `T` | known to the compiler |
#
# On a GPU `Global` and `Shared` (in `ptx.cuh`) are plain pointers; under g++ they carry their bounds. A first kernel
# reverses an array, and numbers the threads as they come, before and after the barrier:

# %% slideshow={"slide_type": "subslide"}
MIRROR = """#include "ptx.cuh"
extern "C" __global__ void mirror(Global<const float> x, Global<float> y, Global<int> order,
                                  Global<int> counter) {
  SharedMemory smem;
  Shared<float> tile = smem.array<float>(blockDim.x);
  int t = threadIdx.x, n = blockDim.x;
  tile[t] = x[t];
  order[t] = atomicAdd(&counter[0], 1);
  __syncthreads();
  y[t] = tile[n - 1 - t];  // written by another thread
  order[n + t] = atomicAdd(&counter[0], 1);
}"""

# %% jupyter={"source_hidden": true} slideshow={"slide_type": "skip"}
def emulated(text, kernel, tensors, **shape):
    """Runs one kernel of a text on the CPU; shape: grid, block, shared_bytes, macros."""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / f"{kernel}.cu"
        file.write_text(text)
        emulator.launch(file, kernel, tensors, **{"macros": {}} | shape)


def mirror(threads="forward", before="", after=""):
    """(y, order) of eight threads; `after` stands in the text in place of `before`."""
    y, order = torch.zeros(8), torch.zeros(2, 8).int()
    tensors = [torch.arange(8.0), y, order, torch.zeros(1).int()]
    text = MIRROR.replace(before, after)
    with emulator.schedule(threads=threads, seed=1):
        emulated(text, "mirror", tensors, grid=1, block=8, shared_bytes=32)
    return y, order

# %% [markdown] slideshow={"slide_type": "subslide"}
# ### The same text on a CPU
#
# g++ compiles the .cu file unchanged. Each CUDA thread is a **fiber**: a function with its own stack that runs until it
# waits, and goes on when all have come. One fiber runs at a time, so any order can be asked for: a mistake that one
# order hides, another may show. Below, three orders, and then three mistakes in `mirror`. Shared memory starts as NaN
# here, so that what nobody has written cannot look right.

# %% jupyter={"source_hidden": true} slideshow={"slide_type": "fragment"}
print("y =", mirror()[0])
orders = {threads: mirror(threads)[1] for threads in emulator.ORDERS}
fig, axes = plt.subplots(1, 3, figsize=(7.8, 3.0), sharey=True, layout="constrained")
for ax, (threads, (before, after)) in zip(axes, orders.items(), strict=True):
    for t in range(8):
        ax.plot([before[t], after[t]], [t, t], color=FAINT, lw=1.5, zorder=1)
    ax.plot(before, range(8), "o", color=COLOURS[1], label="before the barrier")
    ax.plot(after, range(8), "s", color=COLOURS[0], label="after it")
    ax.axvline(7.5, color=INK, ls="--", lw=1)
    ax.set(title=f"threads {threads}", xlabel="order in time", yticks=range(8))
axes[0].set_ylabel("thread")
handles = axes[0].get_legend_handles_labels()
fig.legend(*handles, fontsize=8, ncols=2, loc="outside lower center")
picture(fig, """When each of eight threads comes to run, in three orders. In each, all
eight threads run up to the barrier before any goes on after it; the orders differ in who
comes first. Grey lines are the times a thread waits.""")

# %% slideshow={"slide_type": "fragment"}
for says, change in {
    "n - t": ("tile[n - 1 - t]", "tile[n - t]"),
    "no barrier": ("  __syncthreads();\n", ""),
    "thread 5 returns": ("  __syncthreads", "  if (t == 5) return;\n  __syncthreads"),
}.items():
    try:
        print(f"{says}: y = {mirror('forward', *change)[0]}")
    except RuntimeError as report:
        print(f"{says}:")
        for line in str(report).splitlines():
            print(textwrap.fill(line, 120, subsequent_indent="    "))

# %% [markdown] slideshow={"slide_type": "subslide"}
# ### Yours: an index, a barrier, a launch
#
# The kernel `differences` computes $y_n = x_n - x_{n-1}$ for 20 numbers, with $x_{-1} = 0$. Each thread leaves its
# number in shared memory for its right neighbour. Only the first thread of a block asks device memory.
#
# **Fill in the four blanks.** Index and barrier are C++. The index is this thread's place in x, over all blocks of
# eight threads; `grid` is the number of blocks, `shared_bytes` what the tile takes.
#
# <details><summary>Answer</summary>
#
# ```python
# index = "blockIdx.x * blockDim.x + threadIdx.x"
# barrier = "__syncthreads();"
# grid = 3
# shared_bytes = 8 * 4
# ```
#
# Three blocks of eight make 24 threads. The last four have no number, so `n < N` stands twice; the barrier stands
# between the two, in no `if`.
#
# </details>

# %% jupyter={"source_hidden": true} slideshow={"slide_type": "skip"}
def try_differences(index, barrier, grid, shared_bytes):
    """Runs the kernel with four answers, its threads in two orders; says what is wrong."""
    answers = {"index": index, "barrier": barrier, "grid": grid}
    answers["shared_bytes"] = shared_bytes
    if blank := [name for name, answer in answers.items() if answer is ...]:
        print("still blank:", ", ".join(blank))
        return
    x = torch.arange(20.0) ** 2
    text = DIFFERENCES.replace("INDEX", index).replace("BARRIER", barrier)
    shape = {"grid": grid, "block": 8, "shared_bytes": shared_bytes, "macros": {"N": 20}}
    for threads in ("forward", "reverse"):
        y = torch.full((20,), math.nan)
        try:
            with emulator.schedule(threads=threads):
                emulated(text, "differences", [x, y], **shape)
        except RuntimeError as report:
            print(f"threads {threads}: {str(report)[:400]}")
            return
        want = torch.diff(x, prepend=torch.zeros(1))
        wrong = (y != want).nonzero().flatten().tolist()
        unwritten = y.isnan().nonzero().flatten().tolist()
        says = f"y is wrong at {wrong}, and nan at {unwritten}" if wrong else "right"
        print(f"threads {threads}: {says}")

# %% slideshow={"slide_type": "fragment"}
DIFFERENCES = """#include "ptx.cuh"
extern "C" __global__ void differences(Global<const float> x, Global<float> y) {
  SharedMemory smem;
  Shared<float> tile = smem.array<float>(blockDim.x);
  int t = threadIdx.x, n = INDEX;
  if (n < N) tile[t] = x[n];
  BARRIER
  if (n < N) y[n] = x[n] - (t > 0 ? tile[t - 1] : n > 0 ? x[n - 1] : 0);
}"""

index = ...
barrier = ...
grid = ...
shared_bytes = ...
try_differences(index, barrier, grid, shared_bytes)

# %% [markdown] slideshow={"slide_type": "slide"}
# ### The kernel, line by line
#
# Rung 0: a thread owns a query row, a block Br of them. In brackets the lines of FlashAttention-2's Algorithm 1, of
# which line 10 is misprinted ([papers/errata.md](../papers/errata.md)).
#
# | line | what it does | in `fwd_0_scalar.cu` |
# |---|---|---|
# | [3] | for each tile of Br queries | the grid, set by `works.py`: `tile` out of `blockIdx.x` |
# | [4–5] | Q_i; m = -inf, l = 0, O = 0, on the chip | `Q_i`, `O_i`, `m`, `l`: registers of a thread |
# | [6] | for each tile of Bc keys | the loop over `j`, up to `keys` |
# | [7] | K_j, V_j to shared memory | `load_tile`, between two barriers |
# | [8] | S = scale Q_i K_jᵀ, Bc numbers a thread | `scores`, which finds max S as well |
# | [9–10] | m_new, P, alpha; new l and O | `online_update` (yours, in part 5) |
# | [12–15] | O / l and lse, written once | `store_row`, and the last line |
#
# **The budget.** q and O take 2 D registers of a thread, addresses, counters and numbers on their way 60 to 90 more. A
# thread can have 255. So D = 96 should be about the end, and S has to lie in shared memory.
#
# **Banks.** In `scores` all threads read the same `K[j * D + d]` at once, and one read serves a warp. Each thread has a
# column of S, so a warp meets 32 different banks.
#
# **Two ends.** The *block* stops at `keys`, the *row* at `seen`. All threads run the block's loop and its two barriers
# equally often; only the arithmetic between them is behind the row's own `if`.

# %% slideshow={"slide_type": "subslide"}
display(show("fwd_0_scalar", "load_tile"), show("fwd_0_scalar", "scores"))
show("fwd_0_scalar", "attention_forward")

# %% [markdown] slideshow={"slide_type": "slide"}
# ### The same text for a GPU that is not here
#
# NVRTC, NVIDIA's run-time compiler, turns a string of CUDA C++ into a *cubin*, the machine code of one architecture:
# sm_75 is a T4, sm_80 an A100, sm_90a an H100 or H200. Its last step, `ptxas`, assigns the registers, and reports how
# many bytes **spilled**: what does not fit goes to the thread's *local memory*, which is device memory behind the
# caches.

# %% slideshow={"slide_type": "fragment"}
scalar = ladder.FORWARD["scalar"]  # its row in the ladder
FORWARD = works.HERE / scalar.file
Br, Bc = scalar.tiles[0][64]  # the tile that a GPU gets, at every head_dim


def usage(D, arch="sm_90a", bounds="Br"):
    """Registers, stack and spills of rung 0 by ptxas, also where the loader refuses it."""
    text = FORWARD.read_text().replace("_bounds__(Br)", f"_bounds__({bounds})")
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / FORWARD.name
        file.write_text(text)
        try:
            found = nvrtc.compile(file, {"D": D, "Br": Br, "Bc": Bc}, arch).usage
        except RuntimeError as refused:
            found = refused.usage
    return found["attention_forward"]


head_dims, archs = (32, 64, 96, 128), nvrtc.ARCHITECTURES  # sm_75, sm_80, sm_90a
builds = [(D, arch) for D in (64, 96) for arch in archs] + [(32, archs[2]), (128, archs[2])]
with ThreadPoolExecutor(2) as pool:
    measured = dict(zip(builds, pool.map(usage, *zip(*builds, strict=True)), strict=True))
for D in (64, 96):  # another version of NVRTC may need a few more or fewer
    found = " / ".join(str(measured[D, arch].registers) for arch in archs)
    print(f"D = {D}: 2 D + 70 = {2 * D + 70}, registers on {' / '.join(archs)}: {found}")

# %% jupyter={"source_hidden": true} slideshow={"slide_type": "skip"}
from cuda.bindings import nvrtc as raw  # older tutorials' `from cuda import nvrtc` is gone


def checked(result):  # a status, which must be 0, and then what was asked for
    status, *rest = result
    assert int(status) == 0, status
    return rest[0] if rest else None


def fetched(size, get, program):
    text = bytes(checked(size(program)))
    checked(get(program, text))  # fills it in
    return text


def compile_raw(text, *options, arch="sm_90a"):
    """(PTX, what the compilers say, cubin) of a text that may include ptx.cuh."""
    names, headers = [b"ptx.cuh"], [(works.HERE / "ptx.cuh").read_bytes()]
    program = checked(raw.nvrtcCreateProgram(text.encode(), b"text.cu", 1, headers, names))
    options = f"-arch={arch}", "-default-device", "--ptxas-options=-v", *options
    status = raw.nvrtcCompileProgram(program, len(options), [x.encode() for x in options])
    log = fetched(raw.nvrtcGetProgramLogSize, raw.nvrtcGetProgramLog, program).decode()
    assert int(status[0]) == 0, log
    ptx = fetched(raw.nvrtcGetPTXSize, raw.nvrtcGetPTX, program).decode()
    return ptx, log, fetched(raw.nvrtcGetCUBINSize, raw.nvrtcGetCUBIN, program)

# %% jupyter={"source_hidden": true} slideshow={"slide_type": "skip"}
def kept(text, *options, arch="sm_90a"):
    """(PTX, log) of compile_raw, kept on disk as all else that the stage compiles."""
    header = (works.HERE / "ptx.cuh").read_text()
    parts = "02a", text, header, options, arch, raw.nvrtcVersion()
    made = functools.partial(compile_raw, text, *options, arch=arch)
    file = cache.get(parts, ".json", lambda path: path.write_text(json.dumps(made()[:2])))
    return json.loads(file.read_text())

# %% [markdown] slideshow={"slide_type": "subslide"}
# ### Three ways to lose the registers
#
# - **Too many numbers**: D = 128.
# - **An index that is not constant.** Registers have no addresses, so the compiler must know every index of an array in
#   them. Hence `#pragma unroll`, which writes loops out in full; `#pragma unroll 8` keeps a loop.
# - **A promise.** `__launch_bounds__(Br, blocks)` says how many blocks are to share a multiprocessor's 65536 registers.
#
# **Which shows in the PTX, which only in ptxas's log? And how many blocks of 64 threads can be promised before a thread
# spills?** (`kept`, folded, asks for both.)
#
# <details><summary>Answer</summary>
#
# PTX has as many registers as it likes, so the first and the third show in the log alone. The second shows in the PTX:
# `__local_depot0`, 512 bytes, is q and O. Its log is treacherous: the fewest registers of all, and not a byte
# *spilled*. Read the *stack frame*, too. Six blocks can be promised, seven not. The loader refuses spills that a header
# does not allow.
#
# </details>

# %% slideshow={"slide_type": "fragment"}
scalar_text = FORWARD.read_text()
unrolled, bounds = "#pragma unroll\n", "__launch_bounds__(Br)"
ways = {
    "as it is, D = 64": (64, scalar_text),
    "too many numbers, D = 128": (128, scalar_text),
    "an index, D = 64": (64, scalar_text.replace(unrolled, "#pragma unroll 8\n")),
    "a promise, D = 64": (64, scalar_text.replace(bounds, "__launch_bounds__(Br, 8)")),
}
for says, (D, text) in ways.items():
    ptx, log = kept(text, f"-DD={D}", f"-DBr={Br}", f"-DBc={Bc}")
    numbers = re.search(r"\.reg \.f32\s+%f<(\d+)>", ptx)[1]
    depot = re.findall(r"\.local.*(__local_depot0\[\d+\])", ptx) or ["no local memory"]
    print(f"{says}\n    PTX: {numbers} float variables,", *depot)
    for line in re.findall(r"\d+ bytes stack.*|Used \d+ registers", log):
        print("    ptxas:", line)

# %% jupyter={"source_hidden": true} slideshow={"slide_type": "subslide"}
promises = (1, 6, 7, 10, 16)
builds = [(64, "sm_90a", f"Br, {blocks}") for blocks in promises]
with ThreadPoolExecutor(2) as pool:
    bounded = list(pool.map(usage, *zip(*builds, strict=True)))
fig, (left, right) = plt.subplots(1, 2, figsize=(8, 3.4), layout="constrained", sharey=True)
at_D = [measured[D, "sm_90a"] for D in head_dims]
left.plot(head_dims, [2 * D for D in head_dims], "--", color=INK, lw=1, label="q, O: 2 D")
room = [min(255, 65536 // (Br * n)) for n in promises]
right.plot(promises, room, ":", color=INK, lw=1.2, label="a thread's share")
for ax, xs, found in ((left, head_dims, at_D), (right, promises, bounded)):
    ax.plot(xs, [u.registers for u in found], "o-", color=COLOURS[0], label="ptxas, sm_90a")
    looks = {"textcoords": "offset points", "ha": "center", "va": "top", "fontsize": 7.5}
    for x, u in zip(xs, found, strict=True):
        what = f"{u.registers}\n{u.spills} bytes\nspilled" if u.spills else u.registers
        ax.annotate(what, (x, u.registers), (0, -8), **looks)
    ax.axhline(255, color=COLOURS[1], lw=1.2)
    ax.set(ylim=(0, 285), xticks=xs)
left.text(31, 259, "the most a thread can have: 255", fontsize=8, color=COLOURS[1])
left.set(xlabel="head_dim D", ylabel="registers a thread", title="too many numbers")
right.set(xlabel="blocks promised, D = 64", title="a promise", xlim=(0, 18))
left.legend(fontsize=8, loc="lower right")
right.legend(fontsize=8, loc="upper right", bbox_to_anchor=(1, 0.88))
picture(fig, """Registers a thread. Left, against D: 60 to 90 above the line 2 D; 255 at D
= 96 and, with bytes spilled, at 128. Right, at D = 64, against the blocks promised: they
fall with a thread's share of 65536, and from 7 blocks on bytes are spilled, ever more.""")

# %% [markdown] slideshow={"slide_type": "slide"}
# ### Rung 1: a warp owns 16 rows
#
# First, what a multiply-add costs. The cell counts instructions of part 2's patch, now in CUDA C++, and of rung 0 for
# one key. The patch takes 4 loads for 64 multiply-adds. Rung 0 loads by fours, but uses each number *once*: 32 loads
# for 128 multiply-adds (18 more belong to exp and log). And in `scores` each multiply-add of a key waits for the one
# before.
#
# `fwd_1_warp.cu` gives each lane a patch. Number the 32 lanes (a, b), 4 x 8: the eight lanes with the same a own the
# same four rows. Each takes every eighth key of S and eight columns of O. Nobody else needs these rows, so S stays in
# registers. Warps meet only at the two barriers of a tile.

# %% slideshow={"slide_type": "fragment"}
PATCH_CU = """#include "ptx.cuh"
extern "C" __global__ void patch(Global<const float> x, Global<float> y) {
  SharedMemory smem;
  Shared<float> A = smem.array<float>(1024), B = smem.array<float>(1024);
  int t = threadIdx.x;
  for (int d = 0; d < 16; d++) A[t + d * 64] = B[t + d * 64] = x[t + d * 64];
  __syncthreads();
  float a[8], b[8], S[64] = {};
  for (int d = 0; d < 16; d++) {
    for (int r = 0; r < 8; r++) a[r] = A[d * 64 + t / 8 * 8 + r];
    for (int r = 0; r < 8; r++) b[r] = B[d * 64 + t % 8 * 8 + r];
    for (int i = 0; i < 64; i++) S[i] += a[i / 8] * b[i % 8];
  }
  for (int i = 0; i < 64; i++) y[t + i * 64] = S[i];
}"""


def instructions(text, *options):
    """How often the PTX has each kind of multiply-add, load from shared memory, shuffle."""
    kinds = r"^\s(fma\.rn\S*|ld\.shared\S*|shfl\S*)\s"
    return dict(Counter(re.findall(kinds, kept(text, *options)[0], re.M)))


in_rung_0 = instructions(scalar_text, "-DD=64", "-DBr=64", "-DBc=32")
print(f"patch:  {instructions(PATCH_CU)}\nrung 0: {in_rung_0}")

# %% jupyter={"source_hidden": true} slideshow={"slide_type": "fragment"}
a, b = 1, 2
S_owner, O_owner = torch.zeros(16, 64), torch.zeros(16, 64)
S_owner[1::4], O_owner[1::4] = 1, 1
for i in range(1, 16, 4):  # the rows of a = 1
    S_owner[i, b::8] = 2
    O_owner[i, 4 * b : 4 * b + 4] = O_owner[i, 32 + 4 * b : 36 + 4 * b] = 2
fig, axes = plt.subplots(1, 2, figsize=(8.4, 2.5), layout="constrained", sharey=True)
colours = ListedColormap(["white", COLOURS[5], COLOURS[0]])
panels = (("S", S_owner, "key of the tile"), ("O", O_owner, "column"))
for ax, (title, owner, xlabel) in zip(axes, panels, strict=True):
    ax.pcolormesh(owner, cmap=colours, edgecolors=FAINT, linewidth=0.3)
    ax.set(title=title, xlabel=xlabel, ylim=(16, 0))
    ax.set(xticks=range(0, 65, 8), yticks=range(0, 17, 4))
    ax.grid(False)
axes[0].set_ylabel("row of the warp")
handles = [plt.Rectangle((0, 0), 1, 1, color=c) for c in (COLOURS[0], COLOURS[5])]
labels = [f"lane (a, b) = ({a}, {b})", f"the other lanes of a = {a}"]
fig.legend(handles, labels, fontsize=8, ncols=2, loc="outside lower center")
picture(fig, """A warp's 16 rows of S and of O at D = 64. Lane (1, 2) owns the rows 1, 5, 9
and 13: of S the keys 2, 10, 18 and so on, eight of them; of O the columns 8 to 11 and 40
to 43. The rest of these four rows belongs to the seven other lanes of a = 1.""")

# %% slideshow={"slide_type": "subslide"}
display(show("fwd_1_warp", "scores"), show("fwd_1_warp", "row_max"))

# %% [markdown] slideshow={"slide_type": "subslide"}
# ### Eight lanes agree
#
# `__shfl_xor_sync(mask, x, 4)` gives a lane the x of the lane whose number differs in the bit of value 4, from register
# to register. After 4, 2 and 1 every lane has met all eight. `mask` names who takes part, here all 32; all of them must
# come. Below, half of the warp first stays away; then all come.

# %% slideshow={"slide_type": "fragment"}
BUTTERFLY = """#include "ptx.cuh"
extern "C" __global__ void butterfly(Global<float> x) {
  if (threadIdx.x >= TAKE_PART) return;
  float m = x[threadIdx.x];
  for (int step = 1, lanes = 4; lanes > 0; lanes /= 2, step++) {
    m = fmaxf(m, __shfl_xor_sync(~0u, m, lanes));
    x[32 * step + threadIdx.x] = m;
  }
}"""


def butterfly(take_part=32):
    """(4, 32): each lane's number at first and after each shuffle."""
    x = torch.zeros(4, 32)
    x[0] = torch.randperm(32, generator=torch.Generator().manual_seed(3))
    emulated(BUTTERFLY, "butterfly", [x], grid=1, block=32, macros={"TAKE_PART": take_part})
    return x


try:
    butterfly(16)
except RuntimeError as report:
    print(report)

# %% jupyter={"source_hidden": true} slideshow={"slide_type": "fragment"}
x = butterfly()[:, :8]
fig, ax = plt.subplots(figsize=(7.2, 2.9), layout="constrained")
for step, lanes in enumerate((4, 2, 1)):
    for lane in range(8):
        for partner in (lane, lane ^ lanes):
            ax.plot([partner, lane], [step, step + 1], color=FAINT, lw=1.3, zorder=0)
for step in range(4):
    for lane in range(8):
        fill, ink = (COLOURS[0], "white") if x[step, lane] == x[0].max() else ("white", INK)
        circle = {"boxstyle": "circle,pad=0.25", "fc": fill, "ec": INK, "lw": 0.8}
        looks = {"ha": "center", "va": "center", "color": ink, "fontsize": 9}
        ax.text(lane, step, int(x[step, lane]), bbox=circle, **looks)
ax.set(xlabel="lane", xlim=(-0.5, 7.5), ylim=(3.45, -0.45), xticks=range(8))
ax.set_yticks(range(4), ["its own", "after 4", "after 2", "after 1"])
ax.grid(False)
picture(fig, """Eight lanes with a number each. After the exchange with the lane 4 away two
lanes hold the maximum, after the one 2 away four, after the one 1 away all eight.""")

# %% [markdown] slideshow={"slide_type": "subslide"}
# ### The micro-tile's gain
#
# At D = 64 and Bc = 64 a lane has 4 rows, 8 keys and 8 columns. In `scores` each column costs 12 numbers from shared
# memory, 4 + 8, for 32 multiply-adds. In `add_PV` each key costs 8 numbers of V, and 4 of P by shuffles from other
# lanes, also for 32. The text unrolls four columns and 16 keys. Does the PTX agree?

# %% slideshow={"slide_type": "fragment"}
warp_text = (works.HERE / "fwd_1_warp.cu").read_text()
ROWS, KEYS, COLUMNS = 4, 8, 2 * 4
in_rung_1 = instructions(warp_text, "-DT=float32", "-DD=64", "-DBr=64", "-DBc=64")
print("rung 1:", in_rung_1)
print(f"expected: {ROWS + KEYS} loads of four for S and {16 * COLUMNS // 4} for O;",
      f"{16 * ROWS} shuffles of P")
multiply_adds = 64 * ROWS * (KEYS + COLUMNS)  # one tile: 64 columns of S, 64 keys for O
numbers, shuffles = 64 * (ROWS + KEYS) + 64 * COLUMNS, 64 * ROWS
loads = in_rung_0["ld.shared.v4.f32"] / 128
a_multiply_add = {  # numbers fetched, instructions that fetch them
    "stage 01, dot": (2, 2),  # notebook 01 counted these two
    "stage 01, patch": (16 / 64, 16 / 64),
    "rung 0, scalar": (4 * loads, loads),
    "rung 1, warp": (numbers / multiply_adds, (numbers / 4 + shuffles) / multiply_adds),
}

# %% jupyter={"source_hidden": true} slideshow={"slide_type": "fragment"}
fig, axes = plt.subplots(1, 2, figsize=(8.4, 2.3), layout="constrained", sharey=True)
titles = "numbers from shared memory", "instructions that fetch, with shuffles"
heights = zip(*a_multiply_add.values(), strict=True)
for ax, title, x in zip(axes, titles, heights, strict=True):
    bars = ax.barh(list(a_multiply_add), x, color=[*COLOURS[4:], *COLOURS[:2]], height=0.65)
    ax.bar_label(bars, fmt="%.2f", padding=3)
    ax.set(title=title, xlabel="a multiply-add", xlim=(0, 2.3), ylim=(3.5, -0.5))
    ax.grid(axis="y", visible=False)
alt = "{}: {:.2f} numbers, {:.2f} instructions".format
picture(fig, "Bars. " + "; ".join(alt(name, *x) for name, x in a_multiply_add.items()))

# %% slideshow={"slide_type": "subslide"}
show("fwd_1_warp", "attention_forward")

# %% [markdown] slideshow={"slide_type": "subslide"}
# A shuffle wants all lanes, so no lane may leave or skip a row: the loads write zeros beyond the last row, and `mask`
# does what rung 0's `if (n > 0)` did. m starts at a large negative number, so that m - m is 0, not NaN, for a row that
# has seen no key. l stays each lane's share until the end; with one m, eight shares simply add up.

# %% [markdown] slideshow={"slide_type": "slide"}
# ## 5. Write it yourself
#
# Write the body in place of the line with `#error`, and run the cell: `check` compiles the kernel with it and runs some
# of the contract's cases. `hint("02.1")` to `hint("02.1", 3)` tell more and more, `solution("02.1")` all.
#
# **Exercise 02.1: take in a tile of keys, in registers.** Rung 0, lines [9–10], in about ten lines. `S[j * Br]` is this
# thread's score of key j, row j of V begins at `V[j * D]`, and `max_S` is the largest of the n scores; there is at
# least one. O is not divided by l. What you assign to m, l and O the caller sees.

# %% slideshow={"slide_type": "fragment"}
online_update = r"""
__device__ void online_update(float& m, float& l, float (&O)[D], Shared<float> S,
                              float max_S, Shared<float> V, int n) {
#error Blank 02.1
}"""

check("02.1", online_update)

# %% [markdown] slideshow={"slide_type": "subslide"}
# ### Further: by hand, with `cuda.bindings`
#
# `works.py` takes tile, threads and shared memory from the kernel's row in `ladder.py`; `nvrtc.py` compiles and
# launches through `cuda.core`, the interface to learn today. Older tutorials use the raw calls, with a status before
# every result. Part 4 used them, because without a driver cuda.core 1.2 makes no PTX: unfold `compile_raw` there.

# %% slideshow={"slide_type": "subslide"}
def launch_raw(cubin, kernel, tensors, grid, block, shared_bytes):
    """Loads a cubin and runs one of its kernels on torch's stream."""
    from cuda.bindings import driver

    module = checked(driver.cuModuleLoadData(cubin))
    function = checked(driver.cuModuleGetFunction(module, kernel))
    pointers = [ctypes.c_void_p(x.data_ptr()) for x in tensors]
    # The driver wants the address at which each argument lies.
    arguments = (ctypes.c_void_p * len(pointers))(*map(ctypes.addressof, pointers))
    shape = grid, 1, 1, block, 1, 1, shared_bytes, torch.cuda.current_stream().cuda_stream
    checked(driver.cuLaunchKernel(function, *shape, ctypes.addressof(arguments), 0))


on_gpu = steps.engine.name == "cuda"
major, minor = torch.cuda.get_device_capability() if on_gpu else (9, 0)
ptx, log, cubin = compile_raw(MIRROR, arch=f"sm_{major}{minor}")
says = f"made {len(ptx)} characters of PTX and {len(cubin)} bytes of cubin:"
print("NVRTC", *raw.nvrtcVersion()[1:], says, cubin[:4])
if on_gpu:
    x = torch.arange(8.0, device="cuda")  # torch also makes the driver's context
    y, order, counter = x.new_zeros(8), x.new_zeros(16).int(), x.new_zeros(1).int()
    launch_raw(cubin, b"mirror", [x, y, order, counter], grid=1, block=8, shared_bytes=32)
print("y =", y.cpu()) if on_gpu else print("no GPU here: not launched")

# %% [markdown] slideshow={"slide_type": "subslide"}
# ### What cooperative groups make of it
#
# CUDA's headers have a word for eight lanes' maximum: `cg::reduce` over a tile of 8 lanes. **Is it the same, or
# something better?** The PTX tells, moves, loads and stores left out; also of an int over 8 lanes and over a warp.
#
# <details><summary>Answer</summary>
#
# The same three shuffles. `cg::reduce` also works out the mask of its eight lanes each time (and, shl), and compares
# and selects where we have `max` (setp, selp). Only the int over a whole warp has an instruction of its own, `redux`.
# So we miss nothing, and without CUDA's headers g++ can read our kernels.
#
# </details>

# %% slideshow={"slide_type": "fragment"}
from cuda import pathfinder

GROUPS = """#include <cooperative_groups.h>
#include <cooperative_groups/reduce.h>
namespace cg = cooperative_groups;
template <int lanes, class T, class Op> __device__ T reduced(T x, Op op) {
  return cg::reduce(cg::tiled_partition<lanes>(cg::this_thread_block()), x, op);
}
#define KERNEL(name, lanes, T, Op) extern "C" __global__ void name(T* x) { \
  x[threadIdx.x] = reduced<lanes>(x[threadIdx.x], cg::Op<T>()); }
KERNEL(groups, 8, float, greater)
KERNEL(groups_int, 8, int, plus)
KERNEL(groups_int_32, 32, int, plus)
"""
OURS = f"{show('fwd_1_warp', 'row_max')}\n" + """
extern "C" __global__ void ours(float* x) { x[threadIdx.x] = row_max(x[threadIdx.x]); }
"""
folders = [pathfinder.find_nvidia_header_directory(name) for name in ("cudart", "cccl")]
texts = {OURS: []}
if all(folders):
    texts[GROUPS] = [f"-I{folder}" for folder in folders]
word = r"^\s(?!mov|ld|st|cvta|mul\.wide|add\.s64|bar|ret)([a-z]\w+)(?:\.\S+)?\s"
for text, options in texts.items():
    for entry in kept(text, *options)[0].split(".entry ")[1:]:
        print(f"{entry.split('(')[0]:14}", *re.findall(word, entry, re.M))

# %% [markdown] slideshow={"slide_type": "slide"}
# ## 6. Check it, then break it
#
# Some of the contract's cases, both rungs (`pytest tests/test_step02_fa2_cuda.py` runs all):

# %% slideshow={"slide_type": "fragment"}
inputs = """ragged ragged_causal fewer_queries_causal more_queries_causal one_key
    scores_200 negative_row""".split()


def prepared(name, rung, device="cpu"):
    """A case's inputs in float32, at the rung's smallest tile, and what is expected."""
    tile = (16, 16) if device == "cpu" else {"scalar": (32, 32), "warp": (64, 64)}[rung]
    limits = checks.supports_of(step02.SUPPORTS, rung) | {"tiles": (tile,)}
    case = next(c for c in cases.CASES if c.name == name)
    x = cases.build(case, limits, torch.float32, device)
    return x, error.expected(x.q, x.k, x.v, x.dout, causal=x.causal, scale=x.scale)


def results(x, rung):
    out, lse = calls.forward(x.q, x.k, x.v, rung=rung, **x.options)
    return {"out": out, "lse": lse}


for rung in ("scalar", "warp"):
    pairs = [prepared(name, rung, steps.engine.device) for name in inputs]
    found = [(results(x, rung), want) for x, want in pairs]
    wrong = sum(bool(error.failures(*pair)) for pair in found)
    shares = [e / w.tolerance[n] for x, w in found for n, e in error.errors(x, w).items()]
    print(f"engine {steps.engine.name}, {rung:6}: {len(inputs)} cases, {wrong} wrong;",
          f"largest error {max(shares):.2f} of its tolerance")

# %% [markdown] slideshow={"slide_type": "subslide"}
# ### Stuck
#
# A thread beyond the last query has nothing to compute. In rung 0, let it return at once, as a first CUDA kernel often
# does; in rung 1, skip its rows a line earlier, before `row_sum`. **What happens?**
#
# <details><summary>Answer</summary>
#
# The last block has five rows. In rung 0 their threads wait at a barrier for company that has returned, in rung 1 at a
# shuffle. A GPU's barrier waits only for threads that have not returned: the block goes on without what the others
# should have loaded, and is wrong. A thread without a row must stay and help.
#
# </details>

# %% slideshow={"slide_type": "fragment"}
early_return = ("  float Q_i[D], O_i", "  if (i >= Nq) return;\n  float Q_i[D], O_i")
sum_of_row = "    float sum = row_sum(l[r]);\n"
early_continue = (sum_of_row, "    if (i + 4 * r >= Nq) continue;\n" + sum_of_row)
for rung, change in {"scalar": early_return, "warp": early_continue}.items():
    x, _ = prepared("ragged", rung)
    with edited(ladder.FORWARD[rung].file, change) as lines:
        try:
            results(x, rung)
        except RuntimeError as stuck:
            print(stuck)
            line = int(re.search(r"\.cu:(\d+)", str(stuck))[1])
            print(f"    line {line}: {lines[line - 1].strip()}\n")

# %% [markdown] slideshow={"slide_type": "subslide"}
# ### A missing barrier
#
# Take away rung 0's barrier *after* the loads, with D = 1, twelve causal tokens and one tile: thread t loads key t and reads
# the keys 0 to t. **In which of three orders is all well?**

# %% slideshow={"slide_type": "fragment"}
no_barrier = ("    __syncthreads();  // every thread", "    // every thread")
q1, k1, v1 = torch.randn(3, 1, 1, 12, 1, generator=torch.Generator().manual_seed(0))
truth = attention.forward(q1, k1, v1, causal=True)[0]
right = {}
for order in emulator.ORDERS:
    with edited(scalar.file, no_barrier), emulator.schedule(threads=order, seed=1):
        out, _ = calls.forward(q1, k1, v1, rung="scalar", causal=True)
    right[order] = torch.isclose(out.double(), truth).flatten()
    wrong = f"{out.isnan().sum()} of 12 rows are nan"
    print(f"threads {order:7}: {wrong}, {right[order].sum()} right")

# %% [markdown] slideshow={"slide_type": "subslide"}
# Forwards, every thread finds its keys, because those before it have been there: a test in one order would have passed.
#
# ### What the emulation finds, and what not
#
# It says so itself, in the head of [emulator/cuda.h](../steps/step02_fa2_cuda/emulator/cuda.h), printed below. Unknown
# names belong to 02b and 02d.
#
# ### The mistake that lives
#
# Six mistakes of one line each, forward and reverse. **One survives everything. Which, and why?**
#
# <details><summary>Answer</summary>
#
# If all threads write S to one column, they overwrite each other's scores on a GPU, where they run at the same time.
# Here a fiber is only interrupted where it waits, and between `scores` and `online_update` it does not: the first point
# of the list. On a GPU `compute-sanitizer --tool racecheck` finds it.
#
# </details>

# %% slideshow={"slide_type": "fragment"}
head, _ = (works.HERE / "emulator" / "cuda.h").read_text().split("#pragma")
head = head.replace("//", "").split("\n", 1)[1]  # without the licence
for paragraph in re.split(r"\n *\n|\n +(?=- )", head)[:-1]:
    print(textwrap.fill(" ".join(paragraph.split()), 110, subsequent_indent="  "))
loop = "load_tile(V, v + j * v_row, v_row, "
mistakes = {
    "idle threads return early": early_return,
    "no barrier before the loads": ("    __syncthreads();  // no ", "    // no "),
    "V loaded beyond the last key": (loop + "min(Bc, keys - j)", loop + "Bc"),
    "m starts at 0": ("m = -INFINITY, l = 0;", "m = 0, l = 0;"),
    "l = 0 is divided by": ("l == 0 ? 0 : O[d] / l", "O[d] / l"),
    "one column of S for all": ("<float>(Bc * Br) + threadIdx.x", "<float>(Bc * Br)"),
}


def verdict(name):
    x, want = prepared(name, "scalar")  # on the CPU
    try:
        for order in ("forward", "reverse"):
            with emulator.schedule(threads=order):
                if error.failures(results(x, "scalar"), want):
                    return "wrong"
    except RuntimeError as report:
        return "stuck" if "stuck" in str(report) else "outside"
    return "lives"

# %% jupyter={"source_hidden": true} slideshow={"slide_type": "fragment"}
verdicts = {}
for says, change in mistakes.items():
    with edited(scalar.file, change):
        verdicts |= {(says, name): verdict(name) for name in inputs}
colours = dict(zip(("stuck", "outside", "wrong", "lives"), (3, 2, 0, 4), strict=True))
fig, ax = plt.subplots(figsize=(7.8, 2.8), layout="constrained")
for y, says in enumerate(mistakes):
    for x, name in enumerate(inputs):
        word = verdicts[says, name]
        colour = COLOURS[colours[word]]
        ax.add_patch(plt.Rectangle((x, y), 1, 1, facecolor=colour, edgecolor="white"))
        ink = INK if word in ("lives", "stuck") else "white"
        ax.text(x + 0.5, y + 0.5, word, fontsize=8, ha="center", va="center", color=ink)
ax.set(xlim=(0, len(inputs)), ylim=(len(mistakes), 0))
ax.set_xticks([x + 0.5 for x in range(len(inputs))], inputs, rotation=20, fontsize=8)
plt.setp(ax.get_xticklabels(), ha="right", rotation_mode="anchor")
ax.set_yticks([y + 0.5 for y in range(len(mistakes))], mistakes, fontsize=8)
ax.grid(False)
ax.tick_params(length=0)
ax.spines[:].set_visible(False)
picture(fig, """Six mistakes against seven cases. Early return is stuck, and V loaded too
far is outside, in all of them. The missing first barrier lives only with one key. m = 0 is
wrong in negative_row alone, l = 0 in more_queries_causal alone. One column of S for all
threads lives everywhere.""")

# %% [markdown] slideshow={"slide_type": "slide"}
# ## 7. Predict, then measure
#
# **Question 1.** An H200's multiprocessor has 65536 registers, 228 KiB of shared memory and room for 2048 threads. Rung
# 0's blocks have 64 threads, rung 1's 128. How many fit, and what refuses more?

# %% slideshow={"slide_type": "fragment"}
sizes = {"B": 1, "H": 32, "Hk": 32, "Nq": 4096, "Nk": 4096, "dtype": torch.float32}
sizes |= {"causal": False, "processors": gpu.sms}
sizes |= {"shared_limit": gpu.multiprocessor.shared_per_block}
for rung, D in (("scalar", 32), ("scalar", 64), ("scalar", 96), ("warp", 64)):
    file = works.HERE / ladder.FORWARD[rung].file
    ((kernel, _, threads, shared, macros),) = rows.geometry(file.stem, D=D, **sizes)
    registers = nvrtc.compile(file, macros, "sm_90a").usage[kernel].registers
    per_block = {"threads": threads, "shared": shared, "registers": registers}
    fit = cost.occupancy(gpu.capability, **per_block)
    print(f"{rung:6}, D = {D}: {registers} registers, {shared} bytes: {fit.blocks} blocks,",
          f"limited by {fit.limited_by}, {fit.fraction:.1%} of the threads")

# %% [markdown] slideshow={"slide_type": "subslide"}
# Registers are the limit. A multiprocessor hides one warp's wait by running another, and there are few; both rungs wait
# for K_j and V_j at every tile.
#
# **Question 2: a thread or a warp for a row?** Of `registers`, rung 0 and rung 1, which is the fastest in float32, and
# which comes second?
#
# <details><summary>Answer</summary>
#
# By the numbers fetched (part 4) `registers` should win four to one over rung 0, rung 1 three to one. By instructions
# `registers` and rung 0 are even, rung 1 needs the fewest. So expect both ahead of rung 0, by less than three to one.
# Between those two the counts disagree: fewest numbers, `registers`; fewest instructions, rung 1. The measured order is
# printed below.
#
# </details>
#
# Given bf16, rung 1 still computes in float32; tensor cores are the next notebook's subject.

# %% jupyter={"source_hidden": true} slideshow={"slide_type": "fragment"}
found = measured_rows("fp32", (*STAGE_01, "fwd_0_scalar", "fwd_1_warp"), "sdpa-efficient")
in_fp32 = {r["kernel"]: r["tflops"] for r in found}
if "fwd_1_warp" in in_fp32:
    thread, warp = in_fp32["fwd_0_scalar"], in_fp32["fwd_1_warp"]
    own = sorted(filter(None, in_fp32), key=in_fp32.get, reverse=True)
    print("Measured in float32, from the fastest on:", ", ".join(own))
    print(f"In float32, eight lanes of a warp for four rows reach {warp:.3g} TFLOP/s,",
          f"and a thread for a row {thread:.3g}: {warp / thread:.2f} times its speed.")
in_bf16 = measured_rows("bf16", ("fwd_1_warp",), "sdpa-flash")
in_bf16 = [f"{r['kernel'] or r['peer']} {r['tflops']:.3g}" for r in in_bf16]
print("Given bf16, TFLOP/s:", ", ".join(in_bf16))
runs = {r["run"] for r in found}
peer = AT | {"dtype": "fp32", "peer": "sdpa-efficient"}
in_each = [r for r in rows.fresh(rows.read()) if peer.items() <= r.items()]
in_each = sorted(r["tflops"] for r in in_each if r["run"] in runs)
if in_each:
    print(f"The bars are of {len(runs)} runs. In these sdpa-efficient reached",
          f"{in_each[0]:.3g} to {in_each[-1]:.3g} TFLOP/s, so that they can be compared.")
speeds(found)

# %% [markdown] slideshow={"slide_type": "slide"}
# ## 8. Summary
#
# - Rows can be shared out freely, and a row's keys among those who agree on m: eight lanes do, with three shuffles.
# - NVRTC makes a cubin of a .cu file for any architecture; g++ runs it thread by thread on a CPU.
# - Registers are lost to too many numbers, to an index that is not constant, to a promise of blocks.
# - A warp beats a thread: rung 1 fetches 0.31 numbers for a multiply-add, rung 0 one.
# - Barriers and shuffles stand where all come. What one order of threads hides another shows; some races none shows.
#
# **Ask yourself**
#
# 1. Why does rung 0's loop need two barriers a tile, and not one?
# 2. Which of rung 0's Br and Bc could grow at no cost in registers? What would it cost instead?
# 3. Why may rung 0 leave the rows beyond the last key unwritten, and rung 1 not?
# 4. Why may l stay divided among eight lanes until the end, and m not?
# 5. `seen` differs from thread to thread. Why is that no danger for rung 0's barriers?
#
# **Go further**
#
# - ★ (15 minutes) Set rung 1's `STRIDE` to D, and count with `emulator.count_conflicts()` what a warp's loads of K then
#   cost.
# - ★★ (1 hour) Give rung 0 four sums in `scores` instead of one. Do the registers still suffice at D = 64? Does it pay?
# - ★★★ (a weekend) Load the next K_j and V_j, into a second pair of arrays, while this tile is worked on. How many
#   barriers are left?
#
# **Read:** [papers/flash_attention_2.md](../papers/flash_attention_2.md).
#
# **Next:** [02b_fa2_cuda_tensor_cores.ipynb](02b_fa2_cuda_tensor_cores.ipynb): a warp multiplies tiles in one
# instruction; or first the backward, [02c_fa2_cuda_backward.ipynb](02c_fa2_cuda_backward.ipynb).
