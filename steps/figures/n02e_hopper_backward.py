"""Pictures and experiments of notebook 02e: which operand of Hopper's backward is read from where."""

import itertools
from collections import Counter

import torch

from steps.bench import ablations, rows
from steps.figures.n02d_hopper import H200, axes, boxes, fresh, of_one_run, speeds
from steps.figures.picture import picture
from steps.figures.plots import COLOURS, INK, PEERS
from steps.step02_fa2_cuda import calls, emulator, ladder

BANDWIDTH, TENSOR = 128, 4096  # bytes of shared memory, FLOP: a clock and SM
TILES = ladder.BACKWARD["wgmma"].tiles[0]  # {D: (Br, Bc)}
KEPT = {"wgmma": {64: (), 128: ()}, "hopper": {64: ("S^T", "dP^T"), 128: ("S^T",)}}  # first operands in registers
LADDER = "bwd_1_fa2", "bwd_2_wgmma", "bwd_3_hopper"
BESIDE = "sdpa-flash", "sdpa-cudnn", "fa4"


def bars(N=4096):
    """The rungs of the backward and others in one run, D = 64 and 128, not causal."""
    panels = {f"D = {D}, backward, full, N = {N}": of_one_run(*LADDER, *BESIDE, pass_="bwd", D=D, N=N) for D in TILES}
    alt = """Bars of TFLOP/s of the backward at D = 64 and 128. wgmma is about twice as high as fa2, and hopper a little
    higher. PyTorch's FlashAttention-2 is as high as fa2, cuDNN lower than wgmma, FlashAttention-4 level with hopper."""
    return speeds(panels, alt)


# --- counts ---------------------------------------------------------------------------------------------------


def wgmma(n, first_in_registers):
    """(clocks, bytes of shared memory) of one instruction, 64 x 16 times 16 x n."""
    first = 0 if first_in_registers else 64 * 16 * 2
    return 2 * 64 * 16 * n // TENSOR, first + 16 * n * 2


def products(D, Br, swapped=True, kept=()):
    """{product: (n, how many instructions, first operand in registers)} of a warpgroup with 64 of the block's 128 keys.

    swapped: S^T and dP^T are computed, with a key a row. dQ_i is then shared equally between the two warpgroups. kept:
    those of S^T and dP^T whose first operand stays in registers.
    """
    t = "^T" if swapped else ""
    own = {f"{x}{t}": (Br, D // 16, f"{x}{t}" in kept) for x in ("S", "dP")}
    own |= {"dV": (D, Br // 16, swapped), "dK": (D, Br // 16, swapped)}
    if not swapped and Br == 64:  # its part of the whole dQ_i, over its own 64 keys
        return own | {"dQ": (128, 64 // 16, True)}
    return own | {"dQ": (64, 128 // 16, not swapped)}


def step_of(D, Br, swapped=True, kept=()):
    """(clocks of the tensor cores, bytes that wgmma reads) of a block's step, which has two warpgroups."""
    pairs = [(count, *wgmma(n, kept)) for n, count, kept in products(D, Br, swapped, kept).values()]
    return sum(2 * count * clocks for count, clocks, _ in pairs), sum(2 * count * bytes_ for count, _, bytes_ in pairs)


def in_words(D, swapped):
    """What a step reads from shared memory, and what it stores there and adds to dq in memory."""
    Br, Bc = TILES[D]
    _, read = step_of(D, Br, swapped)
    stored = 2 * Br * Bc * (1 if swapped else 2)  # dS, and P unless swapped
    added = 4 * Br * D * (2 if not swapped and D == 128 else 1)  # in float32
    kib = "wgmma reads {} KiB, stored {} KiB, added to dq {} KiB".format(*(n // 1024 for n in (read, stored, added)))
    return f"D = {D:3}, {'S^T' if swapped else 'S  '}: {kib}"


def bytes_a_clock():
    """What each product of a step reads, beside what shared memory delivers."""
    fig, grid = axes(1, 2, figsize=(8.5, 3.4), sharey=True)
    looks = {"both operands from shared memory": COLOURS[1], "the first one from registers": COLOURS[0]}
    for ax, (D, (Br, _)) in zip(grid, TILES.items(), strict=True):
        start = 0
        for name, (n, count, registers) in products(D, Br).items():
            clocks, bytes_ = (2 * count * x for x in wgmma(n, registers))
            colour = [*looks.values()][registers]
            ax.bar(start, bytes_ / clocks, width=clocks, align="edge", color=colour, edgecolor="white")
            ax.text(start + clocks / 2, bytes_ / clocks + 3, name, ha="center")
            start += clocks
        ax.axhline(BANDWIDTH, color=INK, ls="--", lw=1)
        ax.text(0, BANDWIDTH + 15, "dashed: all that shared memory delivers", fontsize=9)
        ax.set(title=f"D = {D}, tile {Br} x 128", xlabel="clocks of the tensor cores, a step")
        ax.set(ylim=(0, 155), xlim=(0, start))
        ax.grid(axis="x", visible=False)
    grid[0].set_ylabel("bytes a clock")
    boxes(fig, looks, "outside lower center")
    alt = """Bytes of shared memory a clock that each of the five products reads. At D = 128, S^T, dP^T and dQ reach the
    dashed line of 128 bytes, dV and dK half of it. At D = 64 only dQ reaches it; S^T and dP^T read 96, dV and dK 64."""
    return picture(fig, alt)


def counted_wavefronts(rung, D):
    """Wavefronts of one more tile of queries: the kernel text's own accesses to shared memory, in the emulation."""
    Br, Bc = TILES[D]
    total = Counter()
    for sign, N in ((1, 3 * Br), (-1, 2 * Br)):
        q, dout, k, v = torch.randn(4, 1, 1, max(N, Bc), D).bfloat16()
        q, dout, k, v = q[:, :, :N], dout[:, :, :N], k[:, :, :Bc], v[:, :, :Bc]
        out, lse = calls.forward(q, k, v, rung="wgmma")
        with emulator.count_conflicts() as counted:
            sums = calls.start_gradients(dout, out, lse, rung=rung)
            calls.add_gradients(sums, dout, q, k, v)
        for site, (_, wavefronts) in counted.items():
            total[site] += sign * wavefronts
    return sum(total.values())


def roof(rung, D):
    """(TFLOP/s on an H200 if the busier of tensor cores and shared memory never rests, the count in words)."""
    Br, _ = TILES[D]
    clocks, bytes_ = step_of(D, Br, kept=KEPT[rung][D])
    bytes_ += 2 * 2 * Br * D  # Q_i and dO_i come
    shared = bytes_ / BANDWIDTH + counted_wavefronts(rung, D)
    tflops = H200.half_tflops * clocks / max(clocks, shared)
    words = f"products {clocks}, shared memory {shared:.0f} clocks a step; roof {tflops:.0f} TFLOP/s"
    return tflops, f"bwd {rung:6} D = {D:3}: {words}"


def roof_of_fa2(D, N=256):
    """TFLOP/s on an H200 if the shared memory of rung fa2 never rests, by one head's wavefronts."""
    q, k, v, dout = torch.randn(4, 1, 1, N, D, generator=torch.Generator().manual_seed(0)).bfloat16()
    out, lse = calls.forward(q, k, v, rung="fa2")
    with emulator.count_conflicts() as counted:
        calls.backward(dout, q, k, v, out, lse, rung="fa2", backward_tile=ladder.BACKWARD["fa2"].tiles[0][D])
    wavefronts = sum(wavefronts for _, wavefronts in counted.values())
    return H200.half_tflops / TENSOR * 10 * N * N * D / wavefronts


def gained(old, new, before, after, D):
    """Two kernels' measured ratio beside the one of their roofs, in words."""
    speed = of_one_run(old, new, pass_="bwd", D=D)
    if not speed:
        return f"D = {D:3}: foreseen x {after / before:.2f}, not measured as they are now"
    reached = f"{speed[old] / before:.0%} and {speed[new] / after:.0%} of the roofs"
    return f"D = {D:3}: foreseen x {after / before:.2f}, measured x {speed[new] / speed[old]:.2f}; {reached}"


# --- measured -------------------------------------------------------------------------------------------------


def parts_left_out():
    """A table of bwd_3's time without some of its parts, of the GPU on which that was recorded."""
    parts = ablations.read("left_out")
    if not parts:
        return "not recorded of this kernel: python -m steps.bench.ablations"
    product = sorted(r["tflops"] for r in fresh() if (r["peer"], r["gpu"]) == (rows.MATMUL, parts["gpu"]))
    lines = [f"{parts['gpu']}; a matrix product: {product[len(product) // 2]:.0f} TFLOP/s"]
    for point in ablations.POINTS:
        took = {t["without"]: t["ms_median"] for t in parts["times"] if t["D"] == point.D}
        for name, ms in took.items():
            what, speed = f"without {name}" if name else "the whole kernel", point.flops("bwd") / ms / 1e9
            lines.append(f"D = {point.D:3}, {what:24} {ms:.2f} ms, {ms / took[None] - 1:+6.1%}; {speed:.0f} TFLOP/s")
    return "\n".join(lines)


def beside_others(lengths=(512, 1024, 2048, 4096, 8192, 16384)):
    """TFLOP/s against N of our forward and backward and of others, each point of one run, on an H200."""
    fig, grid = axes(2, 4, figsize=(8.5, 5), sharey=True, sharex=True)
    for ours, row in zip(("fwd_8_hopper", "bwd_3_hopper"), grid, strict=True):
        others = (*BESIDE, "fa3")[: 4 if ours.startswith("fwd") else 3]
        for ax, (D, causal) in zip(row, itertools.product(TILES, (False, True)), strict=True):
            for name in (ours, *others):
                speeds_of = [of_one_run(ours, *others, pass_=ours[:3], D=D, N=N, causal=causal) for N in lengths]
                label, line, colour = PEERS.get(name, ("stage 02", "-", COLOURS[0]))
                ax.plot(lengths, [one.get(name) for one in speeds_of], line, color=colour, label=label)
            ax.set_xscale("log", base=2)
            ax.set_xticks(lengths, ("512", "", "2k", "", "8k", ""), fontsize=9)
            ax.minorticks_off()
            ax.set_title(f"{ours[:3]}, D = {D}, {'causal' if causal else 'full'}", fontsize=9)
            ax.set_ylim(0, 800)
    fig.supylabel("TFLOP/s, bf16, 16k tokens, H200", fontsize=10)
    fig.legend(*grid[0][0].get_legend_handles_labels(), loc="outside lower center", ncols=5, fontsize=9)
    alt = """TFLOP/s against N, forward above, backward below, D = 64 and 128. From 4k on stage 02 and FlashAttention-4
    nearly lie on each other, above cuDNN and FlashAttention-2. Below 4k stage 02 is above it forward, and mostly a bit
    below it backward. FlashAttention-3, forward only, is highest at D = 128."""
    return picture(fig, alt)
