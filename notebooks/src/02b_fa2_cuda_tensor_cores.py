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
# # 02b. Tensor cores: who holds which number
#
# ## 1. The question
#
# *Why can the scalar kernel never be fast, and what must a warp know before it can use the tensor cores?*
#
# > **Note** This is an outline. The kernels it leads to (`warp`, `mma`, `ldmatrix`, `cp_async`, `fa2`; and `wgmma`,
# > `roles`, `hopper` of 02d) are not in `steps/step02_fa2_cuda/` yet; only `scalar` is. What runs here today is the
# > arithmetic behind them, and a model of one warp, number by number.
#
# - **Before you start:** 02a, the scalar kernel. **Time:** about 30 minutes, as much again for the exercises.
# - **Hardware:** any. Only part 6 launches a kernel; a GPU runs it natively.
# - **Code:** `steps/step02_fa2_cuda/`. **Tests:** `pytest tests/test_step02_fa2_cuda.py`.

# %% slideshow={"slide_type": "skip"}
import steps  # first: it chooses the engine
import math

import matplotlib
import matplotlib.pyplot as plt
import torch

from reference import error
from reference.bench import cost, plots, rows
from reference.bench.plots import COLOURS, FAINT, INK, style
from steps import step02_fa2_cuda as step02
from steps.workbook import picture, show

style()
print(steps.engine.describe())
print("matplotlib", matplotlib.__version__)
print("rungs of stage 02 today:", ", ".join(step02.SUPPORTS["rungs"]))

# %% [markdown] slideshow={"slide_type": "slide"}
# ## 2. The problem, counted
#
# The scalar kernel's inner loop takes one number from shared memory for each multiply-add:

# %% slideshow={"slide_type": "fragment"}
show("fwd_0_scalar", "scores")

# %% [markdown] slideshow={"slide_type": "fragment"}
# That is 2 FLOP for 4 bytes. Shared memory has 32 banks of 4 bytes a clock (CUDA C++ Programming Guide): we count 128
# bytes a clock for all threads of a multiprocessor (SM) together. Its arithmetic units could do far more (the rates
# below are from NVIDIA's architecture whitepapers; with the datasheets' TFLOP/s they give plausible clocks):

# %% slideshow={"slide_type": "fragment"}
SHARED = 32 * 4  # bytes a clock and SM
A100 = "NVIDIA A100-SXM4-80GB"
# FLOP a clock and SM: ordinary float32, tensor cores in 16 bit
RATES = {"Tesla T4": (128, 1024), A100: (128, 2048), "NVIDIA H200": (256, 4096)}
for name, (fp32, tensor) in RATES.items():
    gpu = cost.GPUS[name]
    clocks = [1e3 * peak / gpu.sms / rate for peak, rate in ((gpu.fp32_tflops, fp32), (gpu.half_tflops, tensor))]
    print(f"{name.split()[1]:14} fp32 {fp32}, tensor {tensor} FLOP a clock: {clocks[0]:.2f} and {clocks[1]:.2f} GHz;",
          f"{tensor // SHARED} FLOP a byte for the tensor peak")  # fmt: skip

# FLOP a byte that a kernel takes from shared memory
per_byte = {"scalar": 2 / 4, "warp, 4 x 4 scores a thread": 2 * 16 / (4 * 8),
            "mma, 16 rows a warp": 2 * 16 / 2, "fa2, 32 rows a warp": 2 * 32 / 2}  # fmt: skip
for name, intensity in per_byte.items():
    most = min(SHARED * intensity, RATES[A100][name[0] in "mf"])  # mma and fa2 use tensor cores
    print(f"A100, {name:27}: {intensity:4.1f} FLOP a byte, at most {most:4.0f} FLOP a clock")

# %% [markdown] slideshow={"slide_type": "subslide"}
# The last two: with Q in registers, a warp of 16 rows uses each 2-byte number of K or V 16 times.
#
# Is device memory a limit too? A roofline says: at x FLOP a byte of traffic no more than bandwidth times x is possible.

# %% slideshow={"slide_type": "fragment"}
fig, (left, right) = plt.subplots(1, 2, figsize=(9, 3.6), layout="constrained")
xs = [2 ** (e / 8) for e in range(-16, 104)]
for name, colour in zip(RATES, (COLOURS[4], COLOURS[1], COLOURS[0]), strict=True):
    gpu = cost.GPUS[name]
    for dtype, line in (("fp16", "-"), ("fp32", "--")):
        label = f"{name.split()[1][:4]} {dtype}: {cost.peak_tflops(gpu, dtype):g}"
        ceiling = [cost.roofline_tflops(x, gpu, dtype) for x in xs]
        left.loglog(xs, ceiling, line, color=colour, lw=1.4, label=label)
for N in (512, 4096):
    x = cost.flops(1, 16, N, 128) / cost.compulsory_bytes(1, 16, N, 128)
    left.axvline(x, color=INK, lw=1, ls=":")
    left.text(x * 0.9, 0.35, f"N = {N}", rotation=90, ha="right", fontsize=8)
left.set(xlabel="FLOP a byte of device memory", title="TFLOP/s; dotted: attention forward, 16 bit")
left.set(xlim=(1, 8192), ylim=(0.3, 3000))
left.legend(fontsize=7, loc="upper left")
for top, line, text in zip(RATES[A100], ("--", "-"), ("fp32 pipe", "tensor cores"), strict=True):
    right.loglog(xs[:72], [min(SHARED * x, top) for x in xs[:72]], line, color=COLOURS[1], lw=1.4)
    right.text(120, top * 1.12, f"{text}: {top}", ha="right", fontsize=8)
for (name, x), mark in zip(per_byte.items(), "osD^", strict=True):
    right.plot(x, min(SHARED * x, 128 if x < 10 else 2048), mark, color=COLOURS[0], ms=8, label=name)
right.set(xlabel="FLOP a byte of shared memory", title="A100: FLOP a clock and SM", ylim=(20, 6000))
right.legend(fontsize=8, loc="lower right")
picture(fig, """Left: rooflines of T4, A100 and H200, half precision and float32; attention at N = 512 and 4096 lies right
of all corners. Right: the A100's roofline for shared memory. The scalar kernel is on the slope, below even the float32
ceiling; mma with 16 rows sits on the corner of the tensor cores' ceiling; fa2 with 32 rows is past it.""")

# %% [markdown] slideshow={"slide_type": "fragment"}
# Device memory is not the wall of a long sequence: both dotted lines lie right of the corners, at the flat part.
# Shared memory is the wall: the scalar kernel reaches at most 64 of 2048 FLOP a clock on an A100. Two things must
# change together: more work for each byte, and units that can do it.

# %% [markdown] slideshow={"slide_type": "slide"}
# ## 3. The idea: a warp holds a matrix
#
# `mma.m16n8k16` multiplies A (16 x 16) with B (16 x 8) and adds C (16 x 8). The matrices lie in the registers of the 32
# threads of a warp: thread `lane` holds 8 numbers of A, 4 of B, 4 of C. Which ones, the PTX ISA fixes ("Matrix
# Fragments for mma.m16n8k16 with floating point type"). The same rules as index tables, a row a thread, a column a
# register; a pair of 16-bit numbers shares one 32-bit register:

# %% slideshow={"slide_type": "fragment"}
lane, i = torch.arange(32)[:, None], torch.arange(8)[None]
group, member = lane // 4, lane % 4  # the warp as 8 groups of 4

A_ROW, A_COL = group + 8 * (i // 2 % 2), 2 * member + i % 2 + 8 * (i // 4)  # (32, 8)
i = i[:, :4]
B_ROW, B_COL = 2 * member + i % 2 + 8 * (i // 2), group + 0 * i  # (32, 4)
C_ROW, C_COL = group + 8 * (i // 2), 2 * member + i % 2  # (32, 4)

for name, r, c, width in (("A", A_ROW, A_COL, 16), ("B", B_ROW, B_COL, 8), ("C", C_ROW, C_COL, 8)):
    covered = sorted((r * width + c).flatten().tolist())
    print(f"{name}: each of the {16 * width} entries once:", covered == list(range(16 * width)))
print("thread 5 holds of A:", list(zip(A_ROW[5].tolist(), A_COL[5].tolist(), strict=True)))
two_tiles = torch.cat([C_ROW, C_ROW], 1), torch.cat([C_COL, C_COL + 8], 1)
same = torch.equal(two_tiles[0], A_ROW) and torch.equal(two_tiles[1], A_COL)
print("two accumulators side by side are laid out as A:", same)

# %% slideshow={"slide_type": "subslide"}
def draw_fragment(ax, r, c, title):
    """Each entry: the number of its thread; the colour says which pair of that thread's registers."""
    for t in range(32):
        for n in range(r.shape[1]):
            x, y = c[t, n].item(), r[t, n].item()
            colour = COLOURS[(0, 4, 2, 3)[n // 2]]
            ax.add_patch(plt.Rectangle((x, y), 1, 1, facecolor=colour, alpha=0.55, edgecolor="white"))
            bold = {"fontsize": 8, "fontweight": "bold"} if t == 5 else {"fontsize": 6.5}
            ax.text(x + 0.5, y + 0.52, t, ha="center", va="center", **bold)
    ax.set(xlim=(0, c.max() + 1), ylim=(16, 0), aspect="equal", title=title)
    marks = [0, 7, 8, 15]
    ax.set_xticks([x + 0.5 for x in marks if x <= c.max()], [x for x in marks if x <= c.max()])
    ax.set_yticks([y + 0.5 for y in marks], marks)
    ax.grid(False)


fig, axes = plt.subplots(1, 3, figsize=(9.2, 3.9), width_ratios=(2, 2, 1), layout="constrained")
draw_fragment(axes[0], *two_tiles, "S: two accumulators, 16 x 8 each")
axes[0].axvline(8, color=INK, lw=2)
draw_fragment(axes[1], A_ROW, A_COL, "P: operand A of P V, 16 x 16")
draw_fragment(axes[2], B_ROW, B_COL, "K^T or V: operand B")
picture(fig, """Grids of thread numbers, coloured by register, thread 5 in bold. Two neighbouring 16 x 8 accumulators
of S and the 16 x 16 operand A look
exactly alike: thread 5 has columns 2, 3, 10 and 11 of rows 1 and 9. Operand B, 16 x 8, runs down the columns.""")

# %% [markdown] slideshow={"slide_type": "fragment"}
# The first two pictures are the same. Keys 0 to 7 are one accumulator, keys 8 to 15 the next, and after exp each thread
# already holds, register for register, what it needs as operand A for P V. It rounds pairs to 16 bits and issues the
# next `mma`: **no shuffle, no shared memory.** A row belongs to four neighbouring threads (row 1: threads 4 to 7), so its
# maximum takes two shuffles. Now one warp in torch, with nothing but fragments:

# %% slideshow={"slide_type": "subslide"}
def bf16(x):
    return x.bfloat16().float()


def load(x, fragment):
    return x[fragment]  # what each thread of the warp holds of the matrix x: (32, registers)


def store(x, fragment, shape):
    matrix = torch.full(shape, math.nan)
    matrix[fragment] = x
    return matrix


def mma(a, b, c):
    """Fragments in, fragment out: a (32, 8), b (32, 4), c (32, 4)."""
    return load(bf16(store(a, A, (16, 16))) @ bf16(store(b, B, (16, 8))) + store(c, C, (16, 8)), C)


A, B, C = (A_ROW, A_COL), (B_ROW, B_COL), (C_ROW, C_COL)
torch.manual_seed(0)
a, b, c = bf16(torch.randn(16, 16)), bf16(torch.randn(16, 8)), torch.randn(16, 8)
product = mma(load(a, A), load(b, B), load(c, C))
print("mma on fragments equals A B + C:", torch.allclose(store(product, C, (16, 8)), a @ b + c))


# %% [markdown] slideshow={"slide_type": "slide"}
# ### Fetching fragments: bank conflicts
#
# `ldmatrix` brings 8 x 8 pieces of 16-bit numbers from shared memory into this layout: eight rows of 16 bytes at a time.
# The rule: 32 banks of 4 bytes; a bank gives one word a clock, so two different words of one bank take two clocks. A
# tile with D = 64 has rows of 128 bytes, all banks once. Laid out plainly, a column of eight 16-byte chunks hits the
# same four banks. The XOR swizzle stores chunk c of row r in place c ^ (r % 8) of its row:

# %% slideshow={"slide_type": "fragment"}
def clocks(addresses):
    """Clocks for 16-byte reads at these byte addresses by the rule of 32 banks."""
    words = {a // 4 + w for a in addresses for w in range(4)}
    return max(sum(word % 32 == bank for word in words) for bank in range(32))


def plain(row, chunk, D):
    return row * 2 * D + 16 * chunk


def swizzled(row, chunk, D):
    return row * 2 * D + 16 * (chunk ^ row % 8)


for place in (plain, swizzled):
    for D in (64, 128):
        column = max(clocks([place(r, c, D) for r in range(8)]) for c in range(D // 8))
        line = max(clocks([place(r, c, D) for c in range(8)]) for r in range(8))
        print(f"{place.__name__:8} D = {D:3}: clocks for 8 rows of one chunk {column}, for 8 chunks of one row {line}")

# %% slideshow={"slide_type": "subslide"}
fig, axes = plt.subplots(1, 2, figsize=(8, 3.2), layout="constrained")
for ax, place in zip(axes, (plain, swizzled), strict=True):
    for row in range(8):
        for chunk in range(8):
            x = place(row, chunk, 64) % 128 // 16
            read = chunk == 2
            colour, ink = (COLOURS[1], "white") if read else (FAINT, INK)
            ax.add_patch(plt.Rectangle((x, row), 1, 1, facecolor=colour, edgecolor="white"))
            ax.text(x + 0.5, row + 0.52, chunk, ha="center", va="center", color=ink, fontsize=9)
    taken = clocks([place(row, 2, 64) for row in range(8)])
    ax.set(xlim=(0, 8), ylim=(8, 0), xlabel="banks", ylabel="row")
    ax.set_title(f"{place.__name__}; clocks for chunk 2 of 8 rows: {taken}")
    ax.set_xticks([x + 0.5 for x in range(8)], [f"{4 * x}-{4 * x + 3}" for x in range(8)], fontsize=8)
    ax.set_yticks([y + 0.5 for y in range(8)], range(8))
    ax.grid(False)
picture(fig, """Two maps of 8 rows against the 32 banks, four a column. Plain: chunk 2 stands in the same column in all
rows, 8 clocks. Swizzled: it stands in a different column in every row, 1 clock.""")

# %% [markdown] slideshow={"slide_type": "slide"}
# ## 4. From algorithm to code
#
# What each rung to come changes. Algorithm 1 of FlashAttention-2 stays the same throughout.
#
# | rung | idea | what it removes |
# |---|---|---|
# | `warp` | a warp owns rows; each thread a small piece of S | one load a multiply-add; barriers in the softmax |
# | `mma` | S and O as fragments, P straight from S | the float32 pipe as the ceiling |
# | `ldmatrix` | fragments by `ldmatrix` from a swizzled tile | bank conflicts, many small loads |
# | `cp_async` | the next tile is copied while this one is used | waiting for device memory |
# | `fa2` | 32 rows a warp, long causal tiles first, exp2 | half of the shared reads; idle SMs at the end |
# | `wgmma` | 128 threads multiply straight from shared memory | registers and instructions for K and V |
# | `roles` | a producer warp copies, consumers compute | address arithmetic among the products |
# | `hopper` | softmax under the other's products | tensor cores that wait for exp (02d) |
#
# The budget comes first. O and S are accumulators, P is packed beside S; addresses, m and l come on top. A thread can
# have 255 registers. With four warps:

# %% slideshow={"slide_type": "fragment"}
for Br, Bc, D in ((64, 64, 64), (64, 64, 128), (128, 64, 128), (128, 128, 128)):
    registers = cost.accumulator_registers(Br, Bc, D, "bf16", threads=128)
    shared = cost.shared_bytes(Br, Bc, D, "bf16", stages=1)
    verdict = "tight: P must take the place of S" if registers + 40 > 255 else "fits"
    verdict = "too many" if registers > 255 else verdict
    print(f"tile ({Br}, {Bc}), D = {D}: {shared // 1024} KiB shared, {registers} registers + about 40: {verdict}")

# %% [markdown] slideshow={"slide_type": "slide"}
# ## 5. Write it yourself
#
# **Exercise 1: addresses for ldmatrix.** `ldmatrix.x4` loads four 8 x 8 pieces. Lanes 0 to 7 point at the rows of piece
# 0, lanes 8 to 15 at those of piece 1, and so on; every lane then gets two numbers of each piece, those of registers 0
# and 1, 2 and 3, 4 and 5, 6 and 7. Which row and first column must each lane point at, so that operand A arrives?
#
# <details><summary>Hint: a question</summary>
#
# In the middle picture, which colour is which quarter of A? The pieces come in the order of the registers.
#
# </details>
#
# **Exercise 2: a swizzle for D = 32.** Rows have 64 bytes, four chunks; two rows share the banks' full width. With
# `c ^ r % 8` the chunk would leave its row. Find a place for every chunk that makes columns free of conflicts.
#
# <details><summary>Hint: a question</summary>
#
# Which rows collide when chunks stand plainly, and by what bits of their numbers do they differ?
#
# </details>

# %% slideshow={"slide_type": "fragment"}
my_address = None  # my_address(lane) -> (row, first column) in the 16 x 16 matrix A
my_place = None  # my_place(row, chunk) -> the chunk's place 0..3 in its row of 64 bytes


def ldmatrix_x4(x, address):
    """What the 32 lanes receive: register pair p of lane t is from row t // 4 of piece p."""
    row_of = [x[r, c : c + 8] for r, c in map(address, range(32))]
    return torch.stack([torch.cat([row_of[8 * p + t // 4][t % 4 * 2 :][:2] for p in range(4)]) for t in range(32)])


if my_address is None:
    print("exercise 1: not written yet")
else:
    print("exercise 1:", "ok" if torch.equal(ldmatrix_x4(a, my_address), load(a, A)) else "not operand A")
if my_place is None:
    print("exercise 2: not written yet")
else:
    inside = all(sorted(my_place(r, ch) for ch in range(4)) == [0, 1, 2, 3] for r in range(64))
    rows_of_8 = [range(r0, r0 + 8) for r0 in range(0, 64, 8)]
    worst = max(clocks([64 * r + 16 * my_place(r, ch) for r in eight]) for eight in rows_of_8 for ch in range(4))
    print("exercise 2: every row keeps its chunks:", inside, " clocks:", worst, "(aim: 1)")

# %% [markdown] slideshow={"slide_type": "slide"}
# ## 6. Check it, then break it
#
# One warp's attention: 16 queries, 16 keys a step, everything in fragments. In a thread, registers 0 and 1 of an
# accumulator belong to one row, 2 and 3 to another; so m and l are two numbers a thread.

# %% slideshow={"slide_type": "fragment"}
def quad(x, combine, shuffles=(1, 2)):
    """x (32, 2) combined over the four threads of a group, by shuffles with lane ^ 1 and lane ^ 2."""
    for mask in shuffles:
        x = combine(x, x[torch.arange(32) ^ mask])
    return x


# %% slideshow={"slide_type": "fragment"}
def warp_attention(Q, K, V, order=(0, 1, 2, 3, 4, 5, 6, 7), shuffles=(1, 2), sum_late=False):
    """out (16, D). order: which accumulator register becomes which register of operand A."""
    D, rows_of = Q.shape[1], [0, 0, 1, 1]  # register -> which of the thread's two rows
    m, l, O = torch.full((32, 2), -math.inf), torch.zeros(32, 2), torch.zeros(D // 8, 32, 4)
    for j in range(0, len(K), 16):
        S = torch.zeros(2, 32, 4)  # two accumulators: keys j .. j+7 and j+8 .. j+15
        for n in range(2):
            for d in range(0, D, 16):
                K_j = K[j + 8 * n : j + 8 * n + 8, d : d + 16]
                S[n] = mma(load(Q[:, d : d + 16], A), load(K_j.T, B), S[n])
        S = S / D**0.5
        m_new = torch.maximum(m, quad(S.reshape(2, 32, 2, 2).amax((0, 3)), torch.maximum, shuffles))
        alpha, P = (m - m_new).exp(), (S - m_new[:, rows_of]).exp()
        part = P.reshape(2, 32, 2, 2).sum((0, 3))
        l, m = alpha * l + (part if sum_late else quad(part, torch.add, shuffles)), m_new
        P = torch.cat([P[0], P[1]], 1)[:, list(order)]  # (32, 8): the accumulators are operand A
        V_j = [load(V[j : j + 16, d : d + 8], B) for d in range(0, D, 8)]
        O = torch.stack([mma(P, V_jd, alpha[:, rows_of] * O_d) for V_jd, O_d in zip(V_j, O, strict=True)])
    l = quad(l, torch.add) if sum_late else l
    return torch.cat([store(o / l[:, rows_of], C, (16, 8)) for o in O], 1)


# %% [markdown] slideshow={"slide_type": "subslide"}
# It must be within the contract's tolerance for bfloat16 inputs, and close to the scalar kernel, which gets the same
# numbers in float32. Then four changes. **Which ones do no harm?**
#
# 1. Registers 1 and 2 change places on the way from S to P.
# 2. The two accumulators change places.
# 3. The maximum and the sum forget their second shuffle.
# 4. The threads' sums are combined only once, after the last tile.
#
# <details><summary>Answer</summary>
#
# Only the fourth: all four threads of a group rescale by the same alpha, so their partial sums can wait. That saves two
# shuffles a row and tile. The second would be harmless too if V's rows were exchanged in the same way: the order of
# keys does not matter, as long as P and V agree.
#
# </details>

# %% slideshow={"slide_type": "fragment"}
Q, K, V = (bf16(torch.randn(n, 32)) for n in (16, 48, 48))
wide = [x[None, None] for x in (Q, K, V)]
want = error.expected(*(x.bfloat16() for x in wide), torch.randn(1, 1, 16, 32).bfloat16())
scalar, _ = step02.forward(*(x.to(steps.engine.device) for x in wide), rung="scalar")
distance = (warp_attention(Q, K, V) - scalar[0, 0].cpu()).abs().max()
print(f"tolerance {want.tolerance['out']:.4f}; one warp's distance from the scalar kernel {distance:.4f}")
variants = {"as it should be": {}, "1 registers swapped": {"order": (0, 2, 1, 3, 4, 5, 6, 7)},
            "2 accumulators swapped": {"order": (4, 5, 6, 7, 0, 1, 2, 3)},
            "3 one shuffle": {"shuffles": (1,)}, "4 sum combined late": {"sum_late": True}}  # fmt: skip
for name, change in variants.items():
    e = error.errors({"out": warp_attention(Q, K, V, **change)[None, None]}, want)["out"]
    print(f"{name:23} error {e:.4f}  {'ok' if e <= want.tolerance['out'] else 'wrong'}")

# %% [markdown] slideshow={"slide_type": "slide"}
# ## 7. Predict, then measure
#
# **Question.** The right-hand roofline gives the scalar kernel half of the A100's float32 rate. Will it reach that?
#
# <details><summary>Answer</summary>
#
# No, it is a ceiling: exp, the staging of tiles, barriers and the scores' round trip through shared memory all cost time
# that the count leaves out. The distance from the ceiling is what a profiler is for.
#
# </details>

# %% slideshow={"slide_type": "fragment"}
measured = rows.latest([row for row in rows.read() if row["pass"] == "fwd"])
mine = [row for row in measured if row["stage"] == "02_fa2_cuda"]
if mine:
    like = max(mine, key=lambda row: (row["N"], row["D"], not row["causal"]))
    at = [row for row in measured if all(row[name] == like[name] for name in rows.SETTING)]
    at = [row for row in at if row["peer"] or row in mine]
    result = picture(plots.speed_bars(at), f"TFLOP/s of stage 02's kernels and their peers, {plots.subtitle([like])}.")
else:
    result = print("no rows yet for stage 02")
result

# %% [markdown] slideshow={"slide_type": "slide"}
# ## 8. Summary
#
# - The scalar kernel is bound by shared memory: 2 FLOP a 4-byte number. Tensor cores need 16 FLOP a byte on an A100.
# - A fragment is a matrix dealt to the 32 threads of a warp; the rule is a formula of thread and register.
# - Two accumulators of S are, as they lie, the operand A of P V.
# - Eight rows read at one column collide in a plain tile; c ^ (r % 8) makes them hit all banks once.
#
# **Ask yourself**
#
# 1. Why does a bigger head dimension not help the scalar kernel?
# 2. Which threads hold row 9 of S, and how many of its numbers has each?
# 3. Why does a row's maximum need two shuffles, not five?
# 4. Would rows padded by 16 bytes be free of conflicts? What would that cost?
# 5. Why may the sum wait until the end, and the maximum not?
#
# **Go further**
#
# - ★ (15 minutes) Change `clocks` to 4-byte reads by 32 threads, and count them for the scalar kernel's S, where thread
#   t reads S[j * Br + t], and for the transposed S[t * Bc + j].
# - ★★ (1 hour) Give `warp_attention` a causal mask, using C_ROW and C_COL to find each register's key and query.
# - ★★★ (a weekend) Keep K and V in one swizzled array of bytes, fetch every fragment by a model of `ldmatrix` (V
#   transposed on the way), and count the clocks that a tile costs with and without the swizzle.
#
# **Read:** `papers/flash_attention_2.md` (sections 3.1 and 3.3 of the paper); `papers/flash_attention_3.md`; the PTX ISA
# on `mma` and `ldmatrix`.
#
# **Next:** [02c_fa2_cuda_backward.ipynb](02c_fa2_cuda_backward.ipynb), the backward pass. Hopper is
# [02d](02d_fa2_cuda_hopper.ipynb).
