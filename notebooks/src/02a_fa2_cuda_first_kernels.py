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
# # 02a. FlashAttention-2 in CUDA C++: the first kernel
#
# ## 1. The question
#
# *What does FlashAttention-2 change about the loops, and what does the result look like as a real CUDA C++ kernel?*
#
# - **Before you start:** notebooks 00 and 01; reading C. No CUDA C++ yet.
# - **Time:** about 45 minutes to read, an hour more with the exercise.
# - **Hardware:** any computer with Linux (or WSL2) and g++. The kernel is compiled for three GPUs without having one,
#   and runs on the CPU behind an emulation of CUDA; a GPU adds the runs marked "engine".
# - **Code:** `steps/step02_fa2_cuda/`. **Tests:** `pytest tests/test_step02_fa2_cuda.py tests/test_emulator.py`.

# %% slideshow={"slide_type": "skip"}
import steps  # first: it chooses the engine
import math
import re
import tempfile
from contextlib import contextmanager
from pathlib import Path
from unittest.mock import patch

import matplotlib
import matplotlib.pyplot as plt
import torch

from reference import attention, cases, error
from reference.bench import cost, plots, rows
from reference.bench.plots import COLOURS, FAINT, INK
from steps import contract, step02_fa2_cuda as step02  # noqa: I001
from steps.step00_naive import fwd_3_tiled
from steps.step02_fa2_cuda import emulator, kernels, nvrtc
from steps.workbook import check, hint, picture, show, solution  # noqa: F401  for part 5

torch.set_num_threads(1)
torch.set_printoptions(precision=2, sci_mode=False)
plots.style()
print(steps.engine.describe())
print("matplotlib", matplotlib.__version__)

# %% [markdown] slideshow={"slide_type": "slide"}
# ## 2. The problem, measured
#
# Stage 01 loops over key tiles outside and query tiles inside, as FlashAttention-1 was published. So O_i, l and m come
# from device memory and go back on *every* visit; and since two key tiles change the same O_i, one head cannot be shared
# out among blocks. The next cell runs both loop nests, counts the bytes that cross the chip's border, and counts the
# blocks that can work at the same time.


# %% slideshow={"slide_type": "fragment"}
def traffic(order, N, D=64, Br=64, Bc=64):
    """(MB read, MB written) by one head, float32, one loop nest or the other."""
    row, read, written = 4 * D, 0, 0
    if order == "keys outside":
        for _ in range(0, N, Bc):
            read += 2 * Bc * row  # K_j, V_j
            for _ in range(0, N, Br):
                read += Br * (2 * row + 8)  # Q_i, O_i, l, m
                written += Br * (row + 8)  # O_i, l, m
    else:
        for _ in range(0, N, Br):
            read += Br * row  # Q_i
            for _ in range(0, N, Bc):
                read += 2 * Bc * row  # K_j, V_j
            written += Br * (row + 4)  # O_i, lse
    return read / 1e6, written / 1e6


orders = ("keys outside", "queries outside")
for order in orders:
    read, written = traffic(order, 4096)
    print(f"{order:15}: N = 4096, D = 64: read {read:.0f} MB, written {written:.0f} MB")
sms = cost.GPUS["NVIDIA H200"].sms
print(f"one sequence of 16384 tokens, 32 heads, on an H200's {sms} multiprocessors:")
print(f"keys outside 32 blocks, {sms - 32} idle; queries outside {32 * 16384 // 64} blocks")

# %% slideshow={"slide_type": "fragment"}
lengths = (512, 1024, 2048, 4096, 8192, 16384)
fig, (left, right) = plt.subplots(1, 2, figsize=(7.8, 3.3), layout="constrained")
for order, colour, line in zip(orders, (COLOURS[1], COLOURS[0]), ("o-", "o--"), strict=True):
    read, written = zip(*(traffic(order, N) for N in lengths), strict=True)
    left.loglog(lengths, read, line, color=colour, label=f"{order}: read")
    left.loglog(lengths, written, "s:", color=colour, label=f"{order}: written")
least = [cost.compulsory_bytes(1, 1, N, 64, dtype="fp32") / 1e6 for N in lengths]
left.loglog(lengths, least, "--", color=INK, lw=1, label="q, k, v, out, lse once")
left.set(title="one head's traffic, MB", xlabel="N")
heads = [32 * 16384 // N for N in lengths]  # 16k tokens in all, hidden size 2048, D = 64
right.loglog(lengths, heads, "o-", color=COLOURS[1], label="keys outside: a head a block")
tiles = [h * N // 64 for h, N in zip(heads, lengths, strict=True)]
right.loglog(lengths, tiles, "o-", color=COLOURS[0], label="queries outside: 64 rows a block")
right.axhline(sms, color=INK, ls="--", lw=1)
right.text(512, sms * 1.1, "multiprocessors of an H200", fontsize=8)
right.set(title="blocks, 16k tokens of 32 heads", xlabel="N", ylim=(20, 40000))
for ax in (left, right):
    ax.set_xticks(lengths, ["512", "1k", "2k", "4k", "8k", "16k"])
    ax.minorticks_off()
    ax.legend(fontsize=7, loc="upper left")
picture(fig, """Left: bytes against N. With keys outside a head reads and writes with slope 2;
with queries outside it reads with slope 2 too, but writes only as much as the compulsory line,
slope 1. Right: with keys outside the number of blocks falls from 1024 to 32, below the 132
multiprocessors of an H200; with queries outside it stays at 8192.""")

# %% [markdown] slideshow={"slide_type": "subslide"}
# Query tiles outside: the 69 MB written become 1, and what is read over and over (K and V) is the same for all blocks of
# a head, so that the chip's cache can serve it. The right plot matters more. On one sequence of 16384 tokens, stage 01
# has 32 blocks, and 100 of the 132 multiprocessors have nothing to do. With query tiles outside there are 8192 blocks.

# %% [markdown] slideshow={"slide_type": "slide"}
# ## 3. The idea: a block owns its rows
#
# **Claim.** What row i has collected after some keys, $(m_i, l_i, O_i)$, depends on $q_i$, K and V and on no other row:
#
# $$O_i = \frac{\sum_j e^{S_{ij} - m_i} V_j}{\sum_j e^{S_{ij} - m_i}}$$
#
# So the outer loop over *queries* may become blocks that run side by side, in any order. The outer loop over *keys* may
# not. First the failing variant, on notebook 00's six tokens: two blocks, each with three of the keys, take the same
# state, update it, and write it back.

# %% slideshow={"slide_type": "fragment"}
N, d = 6, 2
Q = torch.tensor([[1.0, 2], [0, 1], [-1, 0], [2, -1], [1, 1], [3, 1]])
K = torch.tensor([[0.0, 1], [1, 0], [-1, 1], [1, 2], [2, 0], [0, -1]])
V = torch.tensor([[0.0, 6], [2, 0], [4, 6], [6, 4], [8, 0], [10, 6]])


def visit(state, j):
    """The state (m, l, O) of all rows after the keys j, j + 1, j + 2 have been taken in too."""
    return fwd_3_tiled.online_update(*state, Q @ K[j : j + 3].T / math.sqrt(d), V[j : j + 3])


start = torch.full((N,), -math.inf), torch.zeros(N), torch.zeros(N, d)
one_after_the_other, side_by_side = (
    visit(visit(start, 0), 3),
    visit(start, 3),
)  # the last one to write wins
for says, (_, l, O) in {"one after the other": one_after_the_other, "side by side": side_by_side}.items():
    print(f"keys outside, {says:19}: O[5] / l = ({O[5, 0] / l[5]:.2f}, {O[5, 1] / l[5]:.2f})")

q, k, v = (x[None, None] for x in (Q, K, V))  # (B, H, N, D), on the CPU: emulated on any machine
for order in ("forward", "reverse"):
    with emulator.schedule(blocks=order):
        out, lse = kernels.scalar_forward(q, k, v, tile=(2, 3))  # three blocks of two rows
    print(f"queries outside, blocks {order:9}: out[5] = ({out[0, 0, 5, 0]:.2f}, {out[0, 0, 5, 1]:.2f})")

# %% [markdown] slideshow={"slide_type": "subslide"}
# Row 5 should be (6.83, 1.34), as in notebook 00. Side by side, the first three keys are lost: (7.35, 1.34). The last two
# lines come from this stage's CUDA kernel, with a block for each two rows: forwards or backwards, the same.
#
# FlashAttention-2 changes a second thing: O is divided by l once, at the end, instead of on every visit. Divisions run
# outside the tensor cores, whose arithmetic is scarce.

# %% slideshow={"slide_type": "fragment"}
fig, axes = plt.subplots(1, 2, figsize=(7.8, 3.2), layout="constrained")
for ax, swapped in zip(axes, (True, False), strict=True):
    for i in range(4):
        for j in range(4):
            colour = COLOURS[5] if swapped else COLOURS[i]
            ax.add_patch(plt.Rectangle((j, i), 1, 1, facecolor=colour, alpha=0.55, edgecolor="white", lw=2))
            ax.text(j + 0.5, i + 0.5, 1 + (4 * j + i if swapped else j), ha="center", va="center")
    for n in range(4):
        end, begin = ((n + 0.2, 3.85), (n + 0.2, 0.15)) if swapped else ((3.85, n + 0.2), (0.15, n + 0.2))
        ax.annotate("", end, begin, arrowprops={"arrowstyle": "->", "color": INK})
    ax.set(xlim=(0, 4), ylim=(4, 0), aspect="equal", xticks=[], yticks=[])
    ax.set(xlabel="key tiles j", ylabel="query tiles i")
    ax.grid(False)
axes[0].set_title("FlashAttention-1: one block, 16 steps")
axes[1].set_title("FlashAttention-2: four blocks, 4 steps each")
picture(fig, """Two grids of four query tiles by four key tiles. Left, one colour: one block
walks down the columns in 16 steps, meeting each query tile four times. Right, a colour for each
row: four blocks walk along their own rows at the same time, four steps each.""")

# %% [markdown] slideshow={"slide_type": "slide"}
# ## 4. From algorithm to code
#
# ### CUDA C++ for those who know Numba
#
# | Numba | here | meaning |
# |---|---|---|
# | `@cuda.jit` | `extern "C" __global__ void` | a kernel |
# | `@cuda.jit(device=True)` | `__device__` | a function of a kernel |
# | `cuda.threadIdx.x`, `cuda.blockIdx.x` | `threadIdx.x`, `blockIdx.x` | who am I |
# | `cuda.shared.array(n, float32)` | `smem.array<float>(n)` | shared memory |
# | `cuda.syncthreads()` | `__syncthreads()` | the barrier of a block |
# | a factory with `Br`, `Bc`, `D` | macros `Br`, `Bc`, `D` | sizes known to the compiler |
#
# `Global<T>` and `Shared<T>` (in `ptx.cuh`) are plain pointers on a GPU. Under g++ they carry their bounds. A first
# kernel reverses an array, and notes at which turn each thread passed before and after the barrier:

# %% slideshow={"slide_type": "fragment"}
MIRROR = """#include "ptx.cuh"
extern "C" __global__ void mirror(Global<const float> x, Global<float> y,
                                  Global<int> turn, Global<int> clock) {
  SharedMemory smem;
  Shared<float> tile = smem.array<float>(blockDim.x);
  int t = threadIdx.x, n = blockDim.x;
  tile[t] = x[t];
  turn[t] = atomicAdd(&clock[0], 1);
  __syncthreads();
  y[t] = tile[n - 1 - t];  // written by another thread
  turn[n + t] = atomicAdd(&clock[0], 1);
}"""


# %% slideshow={"slide_type": "fragment"}
def mirror(order):
    """(y, turns) of eight threads that take turns in this order."""
    y, turn, clock = torch.zeros(8), torch.zeros(2, 8, dtype=torch.int32), torch.zeros(1).int()
    shape = {"grid": 1, "block": 8, "shared_bytes": 32, "macros": {}}
    with tempfile.TemporaryDirectory() as folder, emulator.schedule(threads=order, seed=1):
        file = Path(folder) / "mirror.cu"
        file.write_text(MIRROR)
        emulator.launch(file, "mirror", [torch.arange(8.0), y, turn, clock], **shape)
    return y, turn


turns = {order: mirror(order)[1] for order in emulator.ORDERS}
print("y =", mirror("forward")[0])

# %% slideshow={"slide_type": "subslide"}
fig, axes = plt.subplots(1, 3, figsize=(7.8, 3.0), sharey=True, layout="constrained")
for ax, (order, (before, after)) in zip(axes, turns.items(), strict=True):
    for t in range(8):
        ax.plot([before[t], after[t]], [t, t], color=FAINT, lw=1.5, zorder=1)
    ax.plot(before, range(8), "o", color=COLOURS[1], label="before the barrier")
    ax.plot(after, range(8), "s", color=COLOURS[0], label="after it")
    ax.axvline(7.5, color=INK, ls="--", lw=1)
    ax.set(title=f"threads {order}", xlabel="turn", yticks=range(8))
axes[0].set_ylabel("thread")
fig.legend(*axes[0].get_legend_handles_labels(), fontsize=8, ncols=2, loc="outside lower center")
picture(fig, """Turns of eight threads in three orders. In each, all eight threads take their
turn before the barrier before any takes one after it; the orders differ in who goes first. Grey
lines are the times a thread waits.""")

# %% [markdown] slideshow={"slide_type": "subslide"}
# ### The same text on a CPU
#
# g++ compiles the .cu file unchanged. Each CUDA thread is a **fiber**: a function with its own stack that runs until it
# waits (orange), and goes on when all have come (blue); the grey line is the waiting. The last to come goes straight on.
# Since one fiber runs at a time, any order can be asked for: a mistake that one order hides, another may show. What the
# emulation says of itself:

# %% slideshow={"slide_type": "fragment"}
import textwrap

head, _ = (kernels.HERE / "emulator" / "cuda.h").read_text().replace("//", "").split("#pragma")
head = head.split("\n", 1)[1]  # without the licence
for part in re.split(r"\n *\n|\n +(?=- )", head)[:-1]:
    print(textwrap.fill(" ".join(part.split()), 100, subsequent_indent="  "))

# %% [markdown] slideshow={"slide_type": "subslide"}
# ### The same text for a GPU that is not here
#
# NVRTC, NVIDIA's run-time compiler, turns a string of CUDA C++ into a *cubin*, the machine code of one GPU architecture:
# sm_75 is a T4, sm_80 an A100, sm_90a an H100 or H200. It needs no GPU. Its last step, `ptxas`, reports what decides
# whether a kernel can be fast: registers a thread, and **spills**, bytes of variables that did not fit.
#
# First the budget. A thread keeps q and O, 2 D registers, and counts on 30 to 50 more for addresses and counters; 255 is
# the most it can have. The block keeps K_j, V_j and S in shared memory. Where should the kernel end?

# %% slideshow={"slide_type": "fragment"}
import cuda.core  # noqa: F401  imported here, because two threads must not do it at once
from concurrent.futures import ThreadPoolExecutor

FORWARD, Br, Bc = kernels.HERE / "fwd_0_scalar.cu", 64, 32  # the tile that a GPU gets by default


def registers_and_spills(D, arch):
    """What ptxas reports, also for a kernel that the loader refuses."""
    try:
        usage = nvrtc.compile(FORWARD, {"D": D, "Br": Br, "Bc": Bc}, arch).usage
        return usage["attention_forward"].registers, 0
    except RuntimeError as refused:
        return 255, int(re.search(r"spills (\d+) bytes", str(refused))[1])


head_dims = (32, 64, 96, 128)
print("  D  2 D + 40   registers, sm_75 / sm_80 / sm_90a    shared bytes, K_j V_j S")
builds = [(D, arch) for D in head_dims for arch in nvrtc.ARCHITECTURES if arch == "sm_90a" or D in (64, 96)]
with ThreadPoolExecutor(2) as pool:
    measured = dict(zip(builds, pool.map(registers_and_spills, *zip(*builds, strict=True)), strict=True))
for D in (64, 96):
    found = " / ".join(str(measured[D, arch][0]) for arch in nvrtc.ARCHITECTURES)
    print(f"{D:3}  {2 * D + 40:8}   {found:36} {cost.shared_bytes(Br, Bc, D, tiles='KVS')}")
cubin = nvrtc.compile(FORWARD, {"D": 64, "Br": Br, "Bc": Bc}, "sm_90a").cubin
print(f"the cubin for sm_90a: {len(cubin)} bytes, starting with {cubin[:4]}")

# %% slideshow={"slide_type": "fragment"}
fig, ax = plt.subplots(figsize=(6.8, 3.3), layout="constrained")
found = [measured[D, "sm_90a"] for D in head_dims]
ax.plot(head_dims, [r for r, _ in found], "o-", color=COLOURS[0], label="registers, ptxas for sm_90a")
ax.plot(head_dims, [2 * D for D in head_dims], "--", color=INK, lw=1, label="q and O: 2 D")
ax.axhline(255, color=COLOURS[1], lw=1.2)
ax.text(31, 259, "the most a thread can have: 255", fontsize=8, color=COLOURS[1])
for D, (registers, spills) in zip(head_dims, found, strict=True):
    below = f"{spills} bytes\nspilled" if spills else registers
    ax.annotate(
        below, (D, registers), (0, -8), textcoords="offset points", ha="center", va="top", fontsize=8
    )
ax.set(xlabel="head_dim D", title="registers a thread", ylim=(0, 285), xticks=head_dims)
ax.legend(fontsize=8, loc="lower right")
picture(fig, """Registers a thread against D, as ptxas reports them: they lie some 60 to 80
above the line 2 D, reach 255 at D = 96, and stay there at 128, where bytes are spilled to
memory instead.""")

# %% [markdown] slideshow={"slide_type": "subslide"}
# ptxas takes more than the budget as long as there is more: 206 instead of 168 at D = 64. At D = 96 all 255 are in use,
# and beyond it moves variables to memory (another version of NVRTC may need a few more or fewer). The loader refuses
# such a kernel rather than running it slowly:

# %% slideshow={"slide_type": "fragment"}
try:
    nvrtc.compile(FORWARD, {"D": 128, "Br": Br, "Bc": Bc}, "sm_90a")
except RuntimeError as refused:
    print(refused)

# %% [markdown] slideshow={"slide_type": "subslide"}
# `steps/step02_fa2_cuda/nvrtc.py` does this through `cuda.core`. Below is the raw interface, once: every call returns a
# status first. It stops one step earlier, at PTX, the assembly text that all NVIDIA GPUs share; then we count.

# %% slideshow={"slide_type": "fragment"}
from cuda.bindings import nvrtc as raw  # `from cuda import nvrtc`, in older tutorials, is gone


def checked(result):
    status, *rest = result
    assert status == raw.nvrtcResult.NVRTC_SUCCESS, status
    return rest[0] if rest else None


header = (kernels.HERE / "ptx.cuh").read_bytes()
text = FORWARD.read_bytes()
program = checked(raw.nvrtcCreateProgram(text, b"fwd_0_scalar.cu", 1, [header], [b"ptx.cuh"]))
options = "--gpu-architecture=compute_90 --device-as-default-execution-space".split()
options += "-DD=64 -DBr=64 -DBc=32".split()
checked(raw.nvrtcCompileProgram(program, len(options), [o.encode() for o in options]))
ptx = bytes(checked(raw.nvrtcGetPTXSize(program)))
checked(raw.nvrtcGetPTX(program, ptx))
print("NVRTC", *raw.nvrtcVersion()[1:])
for instruction in ("fma.rn.f32", "ld.shared.v4.f32", "ld.global.f32", "bar.sync"):
    print(f"{instruction:17}", len(re.findall(re.escape(instruction) + r"\s", ptx.decode())))

# %% [markdown] slideshow={"slide_type": "fragment"}
# The two loops over the keys hold 64 multiply-adds each (D = 64); the rest of the 146 belongs to exp and log.
# They are fed by 32 loads of four floats: one load from shared memory for every four multiply-adds. Keep this ratio in
# mind.

# %% [markdown] slideshow={"slide_type": "slide"}
# ### The kernel, line by line
#
# One thread owns one query row, one block Br of them. FlashAttention-2, Algorithm 1; in brackets the paper's lines.
# Line 10 is printed with an inverse that does not belong there (notebook 00).
#
# | line | what it does | in `fwd_0_scalar.cu` |
# |---|---|---|
# | [3] | for each tile of Br queries | the launch: `tile` out of `blockIdx.x` |
# | [4–5] | Q_i; m = -inf, l = 0, O = 0, on the chip | `Q_i`, `O_i`, `m`, `l`: registers of a thread |
# | [6] | for each tile of Bc keys | the loop over `j`, up to `keys` |
# | [7] | K_j, V_j to shared memory | `load_tile`, between two barriers |
# | [8] | S = scale Q_i K_jᵀ, (Bc,) a thread | `scores`, which finds max S as well |
# | [9–10] | m_new, P, alpha; new l and O | `online_update` (yours, in part 5) |
# | [12–15] | O / l and lse, written once | `store_row`, and the last line |

# %% slideshow={"slide_type": "fragment"}
show("fwd_0_scalar", "load_tile")

# %% slideshow={"slide_type": "fragment"}
show("fwd_0_scalar", "scores")

# %% [markdown] slideshow={"slide_type": "fragment"}
# All threads read the same `K[j * D + d]` at the same time: one read serves a whole warp. S has no room among the
# registers; it lies in shared memory, a column a thread, so that the 32 threads of a warp meet 32 different banks.

# %% slideshow={"slide_type": "fragment"}
show("fwd_0_scalar", "store_row")

# %% slideshow={"slide_type": "subslide"}
show("fwd_0_scalar", "attention_forward")

# %% [markdown] slideshow={"slide_type": "fragment"}
# `keys` is where the *block* stops and `seen` where the *row* stops. The barriers stand in the block's loop, which all
# threads run equally often. Only the arithmetic between them is behind the row's own `if`.

# %% [markdown] slideshow={"slide_type": "slide"}
# ## 5. Write it yourself
#
# Write the body in place of the line with `#error`, and run the cell: `check` compiles the kernel with your text in the
# place of the stage's function, runs some of the contract's cases, and names what fails. `hint("02.1")` asks a question,
# `hint("02.1", 2)` gives the formula, `hint("02.1", 3)` pseudo-code, `solution("02.1")` the stage's function.
#
# **Exercise 02.1: take in a tile of keys, in registers.** Lines [9–10] for one thread, in about ten lines. `S[j * Br]` is
# this thread's score of key j, row j of V begins at `V[j * D]`, and `max_S` is the largest of the n scores; there is at
# least one. O is not divided by l. `float&`: the caller sees what you assign.

# %% slideshow={"slide_type": "fragment"}
online_update = r"""
__device__ void online_update(float& m, float& l, float (&O)[D], Shared<float> S, float max_S, Shared<float> V, int n) {
#error Blank 02.1
}"""

check("02.1", online_update)

# %% [markdown] slideshow={"slide_type": "slide"}
# ## 6. Check it, then break it
#
# The contract's cases, as far as they use head_dim 32 and square tiles (`pytest tests/test_step02_fa2_cuda.py` runs
# all), on this process's engine:

# %% slideshow={"slide_type": "fragment"}
ran, failed, worst = 0, [], 0.0
scalar = contract.limits(step02.SUPPORTS, "scalar")
for case, dtype, reason in cases.select(scalar):
    if reason is None and (case.D, case.tile) == (32, "square"):
        x = cases.build(case, scalar, dtype, steps.engine.device)
        want = error.expected(x.q, x.k, x.v, x.dout, causal=x.causal, scale=x.scale)
        got = dict(zip(("out", "lse"), step02.forward(x.q, x.k, x.v, **x.options, rung="scalar"), strict=True))
        ran, failed = ran + 1, failed + [case.name] * bool(error.failures(got, want))
        errors = error.errors(got, want)
        worst = max([worst, *(e / (want.tolerance[name] or 1) for name, e in errors.items())])
print(f"engine {steps.engine.name}: {ran} cases, {len(failed)} failed,", end=" ")
print(f"largest error {worst:.2f} of the tolerance")

# %% slideshow={"slide_type": "skip"}
@contextmanager
def planted(before, after):
    """Inside `with`, the forward kernel comes from a copy of its file with `after` for `before`."""
    text = FORWARD.read_text()
    assert text.count(before) == 1, before
    with tempfile.TemporaryDirectory() as folder, patch.object(kernels, "HERE", Path(folder)):
        (Path(folder) / FORWARD.name).write_text(text.replace(before, after))
        yield


def emulated(name):
    """(results, what is expected) of the kernel, as planted, on one of the contract's cases."""
    case = next(c for c in cases.CASES if c.name == name)
    x = cases.build(case, scalar | {"tiles": ((16, 16),)}, torch.float32)  # on the CPU
    want = error.expected(x.q, x.k, x.v, x.dout, causal=x.causal, scale=x.scale)
    out, lse = kernels.scalar_forward(x.q, x.k, x.v, causal=x.causal, scale=x.scale, tile=(16, 16))
    return {"out": out, "lse": lse}, want


# %% [markdown] slideshow={"slide_type": "subslide"}
# ### Stuck
#
# A thread beyond the last query has nothing to compute. Let it return at once, as a first CUDA kernel often does.
# **What happens?**

# %% slideshow={"slide_type": "fragment"}
early_return = ("  float Q_i[D], O_i", "  if (i >= Nq) return;\n  float Q_i[D], O_i")
try:
    with planted(*early_return):
        changed = (kernels.HERE / FORWARD.name).read_text().splitlines()
        emulated("ragged")
except RuntimeError as stuck:
    print(stuck)
    place = int(re.search(r"\.cu:(\d+)", str(stuck))[1])
    print(f"\nline {place}: {changed[place - 1].strip()}")

# %% [markdown] slideshow={"slide_type": "fragment"}
# The last block has five rows left. Its other threads returned, and these five wait at the loop's first barrier for
# company. A GPU is kinder, and the result worse: its barrier waits only for threads that have not returned, so the block
# goes on, without the elements of K_j and V_j that the others should have loaded. Threads without a row must stay and
# help.
#
# ### A missing barrier
#
# Take away the barrier *after* the loads, with D = 1, twelve causal tokens and one tile: thread t loads key t and reads
# the keys 0 to t. Run it in three orders. **In which one is all well?**

# %% slideshow={"slide_type": "fragment"}
no_barrier = ("    __syncthreads();  // every thread", "    // every thread")
q1, k1, v1 = torch.randn(3, 1, 1, 12, 1, generator=torch.Generator().manual_seed(0))
truth = attention.forward(q1, k1, v1, causal=True)[0]
right = {}
for order in emulator.ORDERS:
    with planted(*no_barrier), emulator.schedule(threads=order, seed=1):
        out, _ = kernels.scalar_forward(q1, k1, v1, causal=True)
    right[order] = torch.isclose(out.double(), truth).flatten()
    print(f"threads {order:7}: {out.isnan().sum()} of 12 rows are nan, {right[order].sum()} right")


# %% slideshow={"slide_type": "fragment"}
def coloured_table(ax, lines, columns, found, colours):
    """A cell for each (line, column), with the word found[line, column] in that word's colour."""
    for y, line in enumerate(lines):
        for x, column in enumerate(columns):
            word = found[line, column]
            ax.add_patch(plt.Rectangle((x, y), 1, 1, facecolor=colours[word], edgecolor="white"))
            ink = {"ha": "center", "va": "center", "color": INK if word == "lives" else "white"}
            ax.text(x + 0.5, y + 0.5, word, fontsize=8, **ink)
    ax.set(xlim=(0, len(columns)), ylim=(len(lines), 0))
    ax.set_xticks([x + 0.5 for x in range(len(columns))], columns, fontsize=8)
    ax.set_yticks([y + 0.5 for y in range(len(lines))], lines, fontsize=8)
    ax.grid(False)
    ax.tick_params(length=0)
    ax.spines[:].set_visible(False)


fig, ax = plt.subplots(figsize=(6.4, 1.9), layout="constrained")
words = {(order, i): "ok" if right[order][i] else "nan" for order in right for i in range(12)}
coloured_table(ax, right, range(12), words, {"ok": COLOURS[0], "nan": COLOURS[1]})
ax.set(xlabel="row, one thread each", title="without the barrier after the loads")
picture(fig, """Twelve rows under three orders of threads. Forward: all are right. Reverse and
random: most are nan, because a thread reads keys that threads after it have not loaded yet.""")

# %% [markdown] slideshow={"slide_type": "subslide"}
# Forwards, every thread finds the keys it needs, because those before it have been there: a test in one order would have
# passed. Shared memory that nobody wrote is NaN, so that the other orders cannot miss it.
#
# Now six mistakes of one line each, in forward and reverse order. **One survives everything. Which, and why?**
#
# <details><summary>Answer</summary>
#
# If all threads write S to one column, they overwrite each other's scores: on a GPU, where they run at the same time, a
# grave mistake. Here a fiber is only interrupted at barriers, and between `scores` and `online_update` there is none. The
# list above says so in its first point. On a GPU `compute-sanitizer --tool racecheck` finds it.
#
# </details>

# %% slideshow={"slide_type": "fragment"}
v_load = "load_tile(V, v + j * v_row, v_row, {})"
mistakes = {
    "idle threads return early": early_return,
    "no barrier before the loads": ("    __syncthreads();  // no thread", "    // no thread"),
    "V loaded beyond the last key": (v_load.format("min(Bc, keys - j)"), v_load.format("Bc")),
    "m starts at 0": ("m = -INFINITY, l = 0;", "m = 0, l = 0;"),
    "l = 0 is divided by": ("l == 0 ? 0 : O[d] / l", "O[d] / l"),
    "one column of S for all": ("smem.array<float>(Bc * Br) + threadIdx.x", "smem.array<float>(Bc * Br)"),
}
inputs = """ragged ragged_causal fewer_queries_causal more_queries_causal one_key
    scores_200 negative_row""".split()


def verdict(name):
    try:
        for order in ("forward", "reverse"):
            with emulator.schedule(threads=order):
                if error.failures(*emulated(name)):
                    return "wrong"
    except RuntimeError as report:
        return "stuck" if "stuck" in str(report) else "outside"
    return "lives"


# %% slideshow={"slide_type": "skip"}
def build(change):
    """Compiles the changed kernel ahead of its use; what g++ makes of a text is kept on disk."""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / FORWARD.name
        file.write_text(FORWARD.read_text().replace(*change))
        emulator.compile(file, {"D": 32, "Br": 16, "Bc": 16})


with ThreadPoolExecutor(2) as pool:
    list(pool.map(build, mistakes.values()))
verdicts = {}
for says, change in mistakes.items():
    with planted(*change):
        verdicts |= {(says, name): verdict(name) for name in inputs}
for says in mistakes:
    print(f"{says:29}", *(f"{verdicts[says, name]:8}" for name in inputs))

# %% slideshow={"slide_type": "fragment"}
colours = {"stuck": COLOURS[3], "outside": COLOURS[2], "wrong": COLOURS[0], "lives": COLOURS[4]}
fig, ax = plt.subplots(figsize=(7.8, 2.8), layout="constrained")
coloured_table(ax, mistakes, inputs, verdicts, colours)
plt.setp(ax.get_xticklabels(), rotation=20, ha="right", rotation_mode="anchor")
picture(fig, """Six mistakes against seven cases. Early return is stuck, and V loaded too far
is outside, in all of them. The missing first barrier lives only with one key. m = 0 is wrong in
negative_row alone, l = 0 in more_queries_causal alone. One column of S for all threads lives
everywhere.""")

# %% [markdown] slideshow={"slide_type": "slide"}
# ## 7. Predict, then measure
#
# **Question 1.** An H200's multiprocessor has 65536 registers, 228 KiB of shared memory and room for 2048 threads. Our
# block has 64 threads. How many blocks fit at D = 32, 64 and 96, and what refuses one more?

# %% slideshow={"slide_type": "fragment"}
for D in (32, 64, 96):
    shared = cost.shared_bytes(Br, Bc, D, tiles="KVS")
    fit = cost.occupancy((9, 0), threads=Br, shared=shared, registers=measured[D, "sm_90a"][0])
    print(f"D = {D}: {fit.blocks} blocks, limited by {fit.limited_by}, {fit.fraction:.1%} of the threads")

# %% [markdown] slideshow={"slide_type": "subslide"}
# Registers are the limit, not shared memory: at D = 64 four blocks fit, 12.5% of the threads that the multiprocessor
# could hold. It hides the wait for one thread's data by running another, and there are few others.
#
# **Question 2.** On a GPU, does this kernel come near torch's SDPA in float32?
#
# <details><summary>Answer</summary>
#
# Expect a small part of it. Every four multiply-adds need a load from shared memory, few threads are there to hide the
# wait for it, and K_j and V_j are not fetched while the tile before is worked on.
#
# </details>


# %% slideshow={"slide_type": "fragment"}
def measured_speed(kernel, pass_):
    """TFLOP/s of a kernel and its peers, from the committed measurements."""
    at = {"pass": pass_, "dtype": "fp32", "D": 64, "causal": False, "n_gpus": 1}
    found = [r for r in rows.latest(rows.read()) if all(r[name] == value for name, value in at.items())]
    gpus = [r["gpu"] for r in found if r["kernel"] == kernel]
    found = [r for r in found if gpus and r["gpu"] == gpus[0] and (r["kernel"] == kernel or r["peer"])]
    if not found:
        return print("no rows yet")
    return picture(plots.speed_lines(found), f"TFLOP/s against N of {kernel} and its peers on {gpus[0]}.")


measured_speed("fwd_0_scalar", "fwd")

# %% [markdown] slideshow={"slide_type": "slide"}
# ## 8. Summary
#
# - Query tiles outside: a block owns its rows, needs no other block, and writes O once. There are as many blocks as query
#   tiles, not as heads.
# - The .cu text is one; NVRTC makes a cubin of it for any architecture, g++ runs it thread by thread on a CPU.
# - q and O in registers: 2 D of 255. D = 96 is the end, and ptxas says so before a GPU is needed.
# - Barriers stand where all threads pass. What one order of threads hides another shows; some races none shows.
#
# **Ask yourself**
#
# 1. Why does the loop need two barriers a tile, and not one?
# 2. Which of Br and Bc could grow at no cost in registers? What would it cost instead?
# 3. Why may `load_tile` leave the rows beyond the last key unwritten?
# 4. What in this kernel makes the result bit-equal from run to run?
# 5. `seen` differs from thread to thread. Why is that no danger for the barriers?
#
# **Go further**
#
# - ★ (15 minutes) Compile for `sm_120` too. Do registers change? And with Br = 128?
# - ★★ (1 hour) Let two threads share a row, each with half of D. How many registers are left at D = 128, and what
#   must the two exchange for each key?
# - ★★★ (a weekend) Load the next K_j and V_j while this tile is worked on, into a second pair of arrays. How many
#   barriers are left?
#
# **Read:** `papers/flash_attention_2.md`; the head of `emulator/cuda.h`.
#
# **Next:** [02b_fa2_cuda_tensor_cores.ipynb](02b_fa2_cuda_tensor_cores.ipynb), where a warp multiplies tiles in one
# instruction; or the other direction first: [02c_fa2_cuda_backward.ipynb](02c_fa2_cuda_backward.ipynb).
