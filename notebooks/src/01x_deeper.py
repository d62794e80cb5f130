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
# # 01x. Going deeper: what becomes of a Numba kernel
#
# *What does the compiler make of stage 01's kernels, what do shared memory and registers allow, and what does one
# rounding too many cost?*
#
# - **Before you start:** notebook 01. Each section can be read alone.
# - **Time:** about 30 minutes to read. Nothing here needs a GPU.
# - **Code:** [`steps/step01_fa1_numba`](../steps/step01_fa1_numba/__init__.py), and what compiles,
#   [`n01x_deeper.py`](../steps/course/figures/n01x_deeper.py).

# %% jupyter={"source_hidden": true} slideshow={"slide_type": "skip"}
import steps  # comes first: it chooses the engine, and tells Numba whether to simulate
import math
import numpy as np
from numba import cuda
from steps.course.figures import n01x_deeper as figures
from steps.step01_fa1_numba import fwd_2_registers
from steps.course.workbook import show
print(steps.engine.describe())

# %% [markdown] slideshow={"slide_type": "slide"}
# ## 1. The float64 trap
#
# A Python number such as 0.5 is a float64 for Numba. In a kernel it turns the arithmetic around it into float64, which
# GPUs compute more slowly. The simulator computes with NumPy, which stays in float32: it cannot show this mistake.
#
# The compiler can, and needs no GPU. **PTX** is NVIDIA's assembly language. In it `fma` is a multiply-add, `cvt` a
# conversion, and the endings `f32` and `f64` are types.

# %% slideshow={"slide_type": "fragment"}
def plain(x, y):
    y[0] = 0.5 * x[0] + 1.0


def with_casts(x, y):
    y[0] = np.float32(0.5) * x[0] + np.float32(1.0)


print(figures.ptx(plain, with_casts))
print("NumPy, float32 times 0.5:", (np.float32(1) * 0.5).dtype)

# %% [markdown] slideshow={"slide_type": "subslide"}
# ### What the stage does about it
#
# `plain` converts x to float64, computes there, and converts back. Hence `ZERO` and `MINUS_INF` in
# `fwd_0_published.py`, which are float32, and a test that compiles all kernels and searches their PTX for `.f64`.

# %% [markdown] slideshow={"slide_type": "slide"}
# ## 2. Signed indices
#
# In Python `x[-1]` is the last element, and Numba keeps this promise. Where an index has a sign, its code tests each
# time whether it is negative: `setp` is such a comparison. The two loads then have two addresses, each computed for
# itself. With an unsigned index there is nothing to test. There is one address, and the second number lies at a constant
# distance, `+64` bytes.

# %% slideshow={"slide_type": "fragment"}
def signed(x, y):
    t = cuda.threadIdx.x
    y[t] = x[t] + x[t + 16]


def unsigned(x, y):
    t = np.uint32(cuda.threadIdx.x)
    y[t] = x[t] + x[t + 16]


print(figures.ptx(signed, unsigned))

# %% [markdown] slideshow={"slide_type": "subslide"}
# ### What rung 2 does about it
#
# Rung 2 fetches 16 numbers for 64 multiply-adds, so it would spend much of its time on such tests. Its indices are made
# unsigned, in `add_products` for example.

# %% slideshow={"slide_type": "fragment"}
show("fwd_2_registers", "add_products")

# %% [markdown] slideshow={"slide_type": "slide"}
# ## 3. The banks that a warp asks
#
# This section needs rung 2's patch: a thread (x, y) owns 8 x 8 numbers of S, every 16th row from y on and every 8th
# column from x on. A **warp** is 32 threads that run together, here 8 values of x and 4 of y. They fetch one number of
# K_j each, from 8 different rows.
#
# Shared memory has 32 **banks**; address a lies in bank a mod 32. In a cycle each bank gives out one number. If a warp
# asks a bank for several addresses, it serves them one after the other, each in a **wavefront**.
#
# The cell prints the banks asked for column 3. With rows of 16 numbers every other row begins in the same bank, and the
# warp waits for four wavefronts. With a spare column the rows are spread over the banks: the tiles of stage 01 have odd
# widths.

# %% slideshow={"slide_type": "fragment"}
for width in (16, 17):
    banks = [(x * width + 3) % 32 for x in range(8)]
    wavefronts = max(banks.count(bank) for bank in banks)
    print(f"rows of {width}: banks {banks}, wavefronts: {wavefronts}")

# %% [markdown] slideshow={"slide_type": "subslide"}
# **Try it.** ★ (15 minutes) Print the banks that a warp asks in `store_transposed` of `fwd_2_registers.py`. Is 17 the
# right width for it?

# %% [markdown] slideshow={"slide_type": "slide"}
# ## 4. Registers, shared memory, and how many blocks fit
#
# An SM of an H200 has 65,536 registers and 228 KiB of shared memory, and holds as many blocks as both allow. A thread can
# have 255 registers; what does not fit is **spilled** to device memory.
#
# Rung 2's patches of S and O with m and l take $8 \cdot 8 + 8 \cdot 8 + 8 \cdot 2 = 144$ registers at d = 64. A larger
# tile is refused before anything is compiled, and the message shows the sum.

# %% slideshow={"slide_type": "fragment"}
try:
    fwd_2_registers.check_registers("128 x 128", (8, 16), (8, 16), (8, 2))
except ValueError as refusal:
    print(*str(refusal).replace(";", ",").split(", "), sep="\n    ")

# %% [markdown] slideshow={"slide_type": "subslide"}
# ### The compiler's own count
#
# The table is compiled now, for an H200. `limit` says what keeps a further block out.
#
# An SM holds two blocks of rung 2, an eighth of the warps that it has room for. That is enough: a thread has 64
# independent sums, so it need not wait for one of them.
#
# **Try it.** ★★★ (a weekend) Give rung 2 other tiles and patches, and predict the fastest from this table.

# %% slideshow={"slide_type": "fragment"}
print(figures.resources())

# %% [markdown] slideshow={"slide_type": "slide"}
# ## 5. Three roofs
#
# Arithmetic, device memory and shared memory each limit a kernel's speed. Each limit follows from a count: how many
# numbers the kernel asks of that memory for a multiply-add, and how many the memory gives in a second. **Which of the
# three is the lowest over each rung at d = 64?**
#
# <details><summary>Answer</summary>
#
# Over rungs 0 and 1 it is shared memory: two loads a multiply-add. Over rung 2 shared memory and arithmetic meet, by
# design. Device memory is the lowest over none, even with tiles of 16.
#
# </details>

# %% slideshow={"slide_type": "fragment"}
print(figures.roofs())

# %% [markdown] slideshow={"slide_type": "subslide"}
# ### Why all stay below
#
# A roof assumes that nothing waits. In rungs 0 and 1 a row of `online_update` belongs to one thread, so that 16 of a
# block's 256 threads work and the others wait at the barrier.

# %% [markdown] slideshow={"slide_type": "slide"}
# ## 6. Rung 2's backward: seven products for five
#
# Rung 0's backward has keys outside: dK_j and dV_j are finished in one visit, and dQ is loaded and stored at every
# visit. A sum can stay in registers only while the outer loop stays at its tile, so rung 2 has two kernels:
#
# | kernel | outer loop | in registers | products |
# |---|---|---|---|
# | `queries_kernel` | queries | dQ_i | S, dP, dQ |
# | `keys_kernel` | keys | dK_j, dV_j | Sᵀ, dPᵀ, dV, dK |
#
# These are seven products instead of five, as S and dP are computed twice. In return no two blocks add to one number, so
# that no atomic additions are needed and every run gives the same bits.
#
# TFLOP/s of a backward count five products. **If each product went as fast as in the forward, what would be the
# backward's share of the forward's speed?** Notebook 01 has the measured 20.0 and 12.4 TFLOP/s at d = 64.
#
# <details><summary>Answer</summary>
#
# 5/7 of 20.0 is 14.3 TFLOP/s. It stays below, because three patches at a time leave fewer registers: the table in
# section 4 shows 255, and spills.
#
# </details>

# %% [markdown] slideshow={"slide_type": "slide"}
# ## 7. A multiply-add too many
#
# GPUs compute $2^x$. Fast kernels therefore write $e^{x - m}$ as $2^{x c - m c}$ with $c = \log_2 e$: they compute m c
# once a row, and then one fused multiply-add, which does not round x c. But m c *was* rounded, so at x = m the
# difference is not 0.
#
# Here everything but this form is in float64, and scores are around ±200.

# %% slideshow={"slide_type": "fragment"}
c = np.float32(math.log2(math.e))


def exact(x, m):
    return np.exp(np.float64(x) - np.float64(m))


def plain(x, m):
    return np.exp(np.float64(x - m))


def fused(x, m):
    return np.exp2(np.float64(np.float32(np.float64(x) * c - np.float64(m * c))))

# %% slideshow={"slide_type": "fragment"}
random = np.random.default_rng(0)
x = random.normal(0, 55, (256, 4096)).astype(np.float32)
v = random.normal(0, 1, 4096)
right = figures.online(exact, exact, x, v)
forms = {"exp(x - m)": (plain, plain), "fused, P": (plain, fused)}
forms["fused, alpha too"] = fused, fused
print("largest error        P at m      out      lse")
for name, (in_alpha, in_P) in forms.items():
    got = figures.online(in_alpha, in_P, x, v)
    errors = (abs(a - b).max() for a, b in zip(got, right, strict=True))
    print(f"{name:18}", *(f"{e:8.1e}" for e in errors))
print(f"float32's own rounding of a score of 200: {np.spacing(np.float32(200)) / 2:.1e}")

# %% [markdown] slideshow={"slide_type": "subslide"}
# ### What it costs
#
# Near the maximum x - m is exact. Fused, all of a tile's P are wrong by one factor, about as much as by a score's own
# rounding. Most of this cancels in O / l; lse keeps it, and the backward computes P from lse.
#
# A fused alpha is not exactly 1 even where m stays the same, and the errors of 64 tiles add up. FlashAttention-2's code
# fuses P only, stage 01 neither.
