"""Pictures and experiments of notebook 02e: which operand of Hopper's backward is read from where."""

import collections
import functools

import torch

from steps.course.bench import ablations, rows
from steps.course.figures import measured
from steps.course.figures.n02b_tensor_cores import function_at
from steps.course.figures.n02d_hopper import legend
from steps.course.figures.picture import pictured
from steps.course.figures.plots import COLOURS, GREYS, INK, subplots, table
from steps.step02_fa2_cuda import calls, emulator, ladder

BANDWIDTH, TENSOR = 128, 4096  # bytes of shared memory, FLOP: a clock and SM
TILES = ladder.BACKWARD["wgmma"].tiles[0]  # {D: (Br, Bc)}
LOOP = "for (int j = 0; j < Bc / 16; j++)\n    wgmma_ss<T, 64, 1, 1>"
BARRIER = "__syncthreads();  // both warpgroups have written dS^T, and all products of the tile before have ended\n"
MISTAKES = {  # of bwd_2_wgmma
    "S^T used before its wait": tuple(f"wgmma_wait<{n}>();{'':18}// S^T" for n in (1, 2)),
    "dP^T used before its wait": ("    wgmma_wait<0>();  // dP^T is there\n", ""),
    "no barrier after dS^T is stored": (f"    {BARRIER}", ""),
    "no wait for dV and dK": ("add_dQ(dq_i, dQ);\n    wgmma_wait<0>();", "add_dQ(dq_i, dQ);"),
    "both compute the same half of dQ": ("D == 64 ? warpgroup * Bc * 64 : 0", "0"),
    "dQ sums over half of the keys": (LOOP, LOOP.replace("Bc / 16", "Bc / 32")),
}
KEPT = {("hopper", 64): ("S^T", "dP^T"), ("hopper", 128): ("S^T",)}  # products with a first operand kept in registers


def products(D, Br, kept=()):
    """{product: (clocks, bytes read from shared memory, first operand in registers)} of a step of two warpgroups.

    Each has 64 of the block's 128 keys, and computes half of dQ_i. kept: those of S^T and dP^T whose first operand
    stays in registers.
    """
    found = {name: (Br, D // 16, name in kept) for name in ("S^T", "dP^T")}  # wgmma's n, how many, in registers
    found |= {"dV": (D, Br // 16, True), "dK": (D, Br // 16, True), "dQ": (64, 128 // 16, False)}
    return {
        name: (2 * count * 2 * 64 * 16 * n // TENSOR, 2 * count * 32 * (n if registers else n + 64), registers)
        for name, (n, count, registers) in found.items()
    }


def step_of(D, Br, kept=()):
    """(clocks of the tensor cores, bytes that wgmma reads) of a block's step."""
    clocks, read, _ = zip(*products(D, Br, kept).values(), strict=True)
    return sum(clocks), sum(read)


@pictured
def five_products():
    """Bytes of shared memory a clock that each of the five products reads. At D = 128, S^T, dP^T and dQ reach the
    dashed line of 128 bytes, dV and dK half of it. At D = 64 only dQ reaches it; S^T and dP^T read 96, dV and dK 64.
    Grey bars to their right, up to the line: TMA, dS^T, and lse and delta, at D = 64 for 256, 256 and 512 clocks, at
    D = 128 for 256, 128 and 256."""
    fig, grid = subplots(1, 2, figsize=(8.5, 3.4), sharey=True)
    looks = {"both operands from shared memory": COLOURS[1], "the first one from registers": COLOURS[0]}
    for ax, (D, (Br, _)) in zip(grid, TILES.items(), strict=True):
        start = 0
        for name, (clocks, read, registers) in products(D, Br).items():
            ax.bar(start, read / clocks, clocks, align="edge", color=COLOURS[not registers], edgecolor="white")
            ax.text(start + clocks / 2, read / clocks - 12, name, ha="center", color="white")
            start += clocks
        for name, clocks in beside_products(D).items():
            ax.bar(start, BANDWIDTH, clocks, align="edge", color=GREYS[1], edgecolor="white")
            how = dict(rotation=90, ha="center", va="center", color="white", fontsize=9)
            ax.text(start + clocks / 2, BANDWIDTH / 2, f"{name}: {clocks:.0f} clocks", **how)
            start += clocks
        ax.axhline(BANDWIDTH, color=INK, ls="--", lw=1)
        ax.text(0, BANDWIDTH + 4, "dashed: all that shared memory delivers", fontsize=9)
        ax.set(title=f"D = {D}, tile {Br} x 128", xlabel="clocks of the tensor cores, a step; then others")
        ax.set(ylim=(0, 145), xlim=(0, start), xticks=range(0, start, 512))
        ax.grid(axis="x", visible=False)
    grid[0].set_ylabel("bytes a clock")
    legend(fig, looks | {"what else passes": GREYS[1]}, "outside lower center")
    return fig


@functools.cache
def wavefronts(rung, D):
    """{function: wavefronts} of one more tile of queries: the kernel text's own accesses to shared memory, in the
    emulation."""
    (Br, Bc), total = TILES[D], collections.Counter()  # of all three rungs
    for sign, rows_of_q in ((-1, 2 * Br), (1, 3 * Br)):
        q, dout = torch.randn(2, 1, 1, rows_of_q, D).bfloat16()
        k, v = torch.randn(2, 1, 1, Bc, D).bfloat16()
        out, lse = calls.forward(q, k, v, rung="wgmma")
        with emulator.count_conflicts() as counted:
            calls.backward(dout, q, k, v, out, lse, rung=rung, backward_tile=TILES[D])
        for site, (_, n) in counted.items():
            total[function_at(*site.split(":"))] += sign * n
    return total


def beside_products(D):
    """{what: clocks}: what else passes through shared memory in a step of rung wgmma, at full bandwidth."""
    Br, _ = TILES[D]
    found = wavefronts("wgmma", D)
    both = found["probabilities"] + found["score_gradients"]
    return {"TMA": from_tma(D, Br) // BANDWIDTH, "dS^T": found["store_tile"], "lse, delta": both}


def from_tma(D, Br):
    """Bytes of Q_i and dO_i."""
    return 2 * 2 * Br * D


def roof(rung, D):
    """(TFLOP/s on an H200 if the busier of tensor cores and shared memory never rests, the count in words)."""
    Br, _ = TILES[D]
    clocks, read = step_of(D, Br, KEPT.get((rung, D), ()))
    read = 0 if rung == "fa2" else read + from_tma(D, Br)  # fa2's loads are all in its text
    shared = read / BANDWIDTH + sum(wavefronts(rung, D).values())
    tflops = measured.H200.half_tflops * clocks / max(clocks, shared)
    words = f"products {clocks}, shared memory {shared:.0f} clocks a step; roof {tflops:.0f} TFLOP/s"
    return tflops, f"bwd {rung:6} D = {D:3}: {words}"


def gained(kernel, before, after, D):
    """A kernel's measured factor to the rung before it, beside that of their roofs, in words."""
    foreseen = f"D = {D:3}: foreseen x {after / before:.2f}"
    if not (chosen := measured.rung_row(kernel, D=D)):
        return f"{foreseen}, not measured as it is now"
    new, old = (row["tflops"] for row in chosen[:2])
    return f"{foreseen}, measured x {new / old:.2f}; {old / before:.0%} and {new / after:.0%} of the roofs"


def parts_left_out():
    """A table of bwd_3's time without some of its parts, of the GPU on which that was recorded."""
    parts = ablations.read("left_out")
    if not parts:
        return "not recorded of this kernel: python -m steps.course.bench.ablations"
    product = sorted(r["tflops"] for r in measured.fresh() if (r["peer"], r["gpu"]) == (rows.MATMUL, parts["gpu"]))
    took = {(t["without"], t["D"]): t["ms_median"] for t in parts["times"]}
    lines = [(parts["gpu"], *(word for point in ablations.POINTS for word in (f"D = {point.D}: time", "TFLOP/s")))]
    for name in dict.fromkeys(name for name, _ in took):
        words = [f"without {name}" if name else "the whole kernel"]
        for point in ablations.POINTS:
            ms = took[name, point.D]
            words += [f"{ms / took[None, point.D] - 1:+.1%}", f"{point.flops('bwd') / ms / 1e9:.0f}"]
        lines.append(words)
    return f"{table(*lines)}\na matrix product: {product[len(product) // 2]:.0f} TFLOP/s"
