"""What notebook 02c shows: what autograd keeps, who owns which gradient, bits that change, budgets, roofs, mistakes."""

import functools

import matplotlib.pyplot as plt
import torch

from reference import cases, error, mutants
from steps import engine
from steps import step02_fa2_cuda as step02
from steps.bench import cost, rows
from steps.figures.picture import picture
from steps.figures.planted import emulated, prepared
from steps.figures.plots import COLOURS, FAINT, INK, PEERS, colour_of, style
from steps.step02_fa2_cuda import calls, emulator, ladder, nvrtc, works
from steps.workbook import edited, one_rung

GPU = cost.GPUS["NVIDIA H200"]
TILE = {"scalar": (16, 16), "fa2": (32, 32)}  # small ones, for the emulation
GRADIENTS = "dq", "dk", "dv"
PIECES = """#include "ptx.cuh"
extern "C" __global__ void pieces(Global<const bf16> x, Global<uint32_t> stored, Global<uint32_t> transposed) {
  SharedMemory smem;
  Shared<bf16> tile = smem.array<bf16>(32 * 8);  // four pieces of 8 x 8, in a column
  int t = threadIdx.x;
  copy_16(tile + 8 * t, x + 8 * t, true);
  __syncthreads();  // a lane gets numbers of rows that others have copied
  uint32_t r[4];
  ldmatrix_x4(r, tile + 8 * t);
  stored[t] = r[0];  // of the first piece
  ldmatrix_x4_trans(r, tile + 8 * t);
  transposed[t] = r[0];
}"""


def kept_kib(attention, N, D=32):
    """KiB that autograd keeps for the backward of one head."""
    q, k, v = (torch.randn(1, 1, N, D, device=engine.device, requires_grad=True) for _ in range(3))
    kept = {}

    def note(x):
        kept[x.untyped_storage().data_ptr()] = x.untyped_storage().nbytes()
        return x

    with torch.autograd.graph.saved_tensors_hooks(note, lambda x: x):
        attention(q, k, v)
    return sum(kept.values()) / 1024


def owners():
    """Key tiles outside and query tiles outside: which gradient a block owns, and which all blocks add to."""
    style()
    fig, axes = plt.subplots(1, 2, figsize=(8, 3.6), layout="constrained")
    for ax, by_keys in zip(axes, (True, False), strict=True):
        own, shared = ("dK dV", "dQ +=") if by_keys else ("dQ", "dK dV\n+=")
        looks = {"fontsize": 9, "ha": "center", "va": "center"}
        for n in range(4):
            box = {"facecolor": COLOURS[n], "alpha": 0.5, "edgecolor": "white"}
            for m in range(4):
                ax.add_patch(plt.Rectangle((n, m) if by_keys else (m, n), 1, 1, lw=2, **box))
            ends = ((n + 0.5, 3.9), (n + 0.5, 0.1))
            ends = ends if by_keys else [end[::-1] for end in ends]
            ax.annotate("", *ends, arrowprops={"arrowstyle": "->", "color": INK})
            side, below = (4.4, n + 0.5), (n + 0.5, 4.35)
            ax.text(*(below if by_keys else side), own, bbox=box, **looks)
            ax.text(*(side if by_keys else below), shared, **looks)
        ax.set(xlim=(0, 5), ylim=(4.7, 0), aspect="equal", xticks=[], yticks=[], ylabel="query tiles i")
        ax.set_title("key tiles outside" if by_keys else "query tiles outside")
        ax.grid(False)
        ax.spines[:].set_visible(False)
    return picture(fig, """Two grids of four query tiles by four key tiles. Left: a colour a column, one block each,
    walking down; dK and dV stand below each column on its colour, and dQ += at the end of each row on white, since
    all four blocks add to it. Right: a colour a row; dQ on its colour at the end of each row, dK dV += on white
    below.""")


@functools.cache
def gradients(n, blocks, seed=0):
    """(dq, dk, dv) by rung 0, of two heads of n tokens, D = 32, tile (16, 16): in the emulation, blocks in an order."""
    q, k, v, dout = torch.randn(4, 1, 2, n, 32, generator=torch.Generator().manual_seed(0))
    out, lse = calls.forward(q, k, v, rung="scalar")
    with emulator.schedule(blocks=blocks, seed=seed):
        return calls.backward(dout, q, k, v, out, lse, rung="scalar")


def bits_by_key_tiles(tiles=(1, 2, 3, 4, 6, 8)):
    """The share of dq whose bits change when rung 0's blocks run backwards, for some numbers of key tiles."""
    style()
    pairs = ((gradients(16 * n, blocks)[0] for blocks in ("forward", "reverse")) for n in tiles)
    shares = [(one != other).float().mean().item() for one, other in pairs]
    fig, ax = plt.subplots(figsize=(6.4, 2.8), layout="constrained")
    bars = ax.bar([str(n) for n in tiles], shares, color=COLOURS[0], width=0.6)
    ax.bar_label(bars, [f"{share:.0%}" for share in shares], padding=2, fontsize=9)
    ax.set(title="rung 0: share of dq that changes when blocks run backwards", xlabel="key tiles of 16", yticks=[])
    ax.set_ylim(0, 0.8)
    ax.grid(False)
    return picture(fig, """Bars: with one and with two key tiles no element of dq changes when the blocks run in
    reverse; from three tiles on a share that grows to well over half at eight tiles.""")


def pieces():
    """(as stored, transposed), each (32, 2): which numbers of an 8 x 8 piece that counts 0, 1, ... a lane gets."""
    x, held = torch.arange(256.0).bfloat16(), torch.zeros(2, 32, dtype=torch.int32)
    emulated(PIECES, "pieces", [x, *held], grid=1, block=32, shared_bytes=512)
    return held.view(torch.bfloat16).reshape(2, 32, 2).int()


def who_gets_it(stored, transposed):
    """The piece with the number of the lane that gets each entry, as stored and transposed."""
    style()
    fig, axes = plt.subplots(1, 2, figsize=(7.4, 3.7), layout="constrained")
    for ax, title, held in zip(axes, ("ldmatrix", "ldmatrix.trans"), (stored, transposed), strict=True):
        for t, pair in enumerate(held.tolist()):
            look = {"facecolor": COLOURS[t] if t < 4 else FAINT, "edgecolor": "white"}
            for i, j in (divmod(number, 8) for number in pair):
                ax.add_patch(plt.Rectangle((j, i), 1, 1, alpha=0.7, **look))
                ax.text(j + 0.5, i + 0.5, t, ha="center", va="center", fontsize=9)
        ax.set(xlim=(0, 8), ylim=(8, 0), aspect="equal", xticks=[], yticks=[], xlabel="key", ylabel="query")
        ax.set_title(f"{title}: which lane gets it")
        ax.grid(False)
    return picture(fig, """An 8 x 8 piece of P, a query a row, with the number of the lane that gets each entry. By
    ldmatrix lanes 0 to 3 share the first row, two neighbouring keys each. By ldmatrix.trans they share the first
    column, two neighbouring queries each.""")


def budget(rung, D):
    """A block of a rung's backward on an H200, in words; also where the loader refuses it for its spills."""
    row, limit = ladder.BACKWARD[rung], GPU.multiprocessor.shared_per_block
    Br, Bc = row.tile(D, limit) if D in row.head_dims else row.tiles[0][64]
    block = {"threads": row.threads(D, Br, Bc), "shared": row.shared_bytes(D, Br, Bc)}
    macros = {"D": D, "Br": Br, "Bc": Bc}
    if rung != "scalar":
        sizes = dict(B=1, H=1, Hk=1, Nq=4096, Nk=4096, D=D, causal=False, dtype=torch.bfloat16, processors=GPU.sms)
        macros = rows.geometry(row.file.removesuffix(".cu"), shared_limit=limit, **sizes)[1][-1]
    says = f"{Br} x {Bc}, {block['threads']} threads, {block['shared'] / 1024:.0f} KiB"
    try:
        used = nvrtc.compile(works.HERE / row.file, macros, "sm_90a").usage["attention_backward"]
    except RuntimeError as refused:
        return f"{says}, refused: {refused.usage['attention_backward'].spills} bytes spilled"
    fit = cost.occupancy(GPU.capability, registers=used.registers, **block)
    return f"{says}, {used.registers} registers: {fit.blocks} a multiprocessor"


@functools.cache
def roof(rung, D):
    """TFLOP/s on an H200 if its shared memory never rests, by the wavefronts of one head in the emulation."""
    N, dtype = (64, torch.float32) if rung == "scalar" else (256, torch.bfloat16)
    q, k, v, dout = torch.randn(4, 1, 1, N, D, generator=torch.Generator().manual_seed(0)).to(dtype)
    out, lse = calls.forward(q, k, v, rung=rung)
    with emulator.count_conflicts() as counted:
        calls.backward(dout, q, k, v, out, lse, rung=rung, backward_tile=ladder.BACKWARD[rung].tiles[0][D])
    multiply_adds = 5 * N * N * D / sum(wavefronts for _, wavefronts in counted.values())
    return GPU.half_tflops / 4096 * 2 * multiply_adds  # a multiprocessor does 4096 FLOP, or 1 wavefront, a cycle


def on_cases(rung, names):
    """Prints how a rung does on some of the contract's cases, in shares of the tolerance, on this machine's engine."""
    worst, failed = dict.fromkeys(GRADIENTS, 0.0), 0
    for name in names:
        (case,) = (case for case in cases.CASES if case.name == name)
        x, want = prepared(name, rung, device=engine.device)
        got = one_rung.results(step02, rung, case, x)
        failed += bool(error.failures(got, want))
        found = error.errors(got, want)
        worst = {name: max(worst[name], found[name] / (want.tolerance[name] or 1)) for name in GRADIENTS}
    shares = ", ".join(f"{name} {x:.2f}" for name, x in worst.items())
    print(f"{rung:6} {len(names)} cases, {failed} wrong; largest errors, of the tolerance: {shares}")


def spoilt(rung, edit, names):
    """({case: the gradients that an edit of a rung's backward spoils}, which of the reference's mutants it equals)."""
    found, recognised = {}, []
    for name in names:
        x, want = prepared(name, rung, tile=TILE[rung])
        out, lse = calls.forward(x.q, x.k, x.v, rung=rung, causal=x.causal, scale=x.scale)
        options = {"causal": x.causal, "scale": x.scale, "backward_tile": TILE[rung]}
        with edited(ladder.BACKWARD[rung].file, edit):
            got = calls.backward(x.dout, x.q, x.k, x.v, out, lse, rung=rung, **options)
        got = dict(zip(GRADIENTS, got, strict=True))
        found[name] = error.failures(got, want)
        if found[name] and not recognised:
            recognised = [m.says for m in backward_mutants() if equals(m, x, rung, got, want)]
    return {name: " ".join(wrong) or "-" for name, wrong in found.items()}, "; ".join(recognised) or "none"


def backward_mutants():
    return [m for m in mutants.MUTANTS if issubclass(m.kind, mutants.Backward)]


def equals(mutant, x, rung, got, want):
    """Whether a mutant of the reference gives these gradients."""
    try:
        wrong = mutant.run(x, TILE[rung], "fa2")
    except mutants.NotApplicable:
        return False
    return all((got[name] - wrong[name]).abs().max() <= 2 * want.tolerance[name] for name in got)


def speeds():
    """TFLOP/s of the backward against N on an H200, rungs 0 and 1 and the peers, below the roof over rung 1."""
    style()
    fresh = rows.fresh(rows.read())
    fig, axes = plt.subplots(1, 2, figsize=(8.5, 3.6), layout="constrained", sharey=True)
    at = {"gpu": GPU.name, "n_gpus": 1, "pass": "bwd", "causal": False, "options": {}}
    found = [r for r in rows.latest(fresh) if all(r[name] == at[name] for name in at) and r["B"] * r["N"] == 16384]
    for ax, D in zip(axes, (64, 128), strict=True):
        for who in ("bwd_0_scalar", "bwd_1_fa2", "sdpa-flash", "sdpa-cudnn"):
            dtype, look = "fp32" if "scalar" in who else "bf16", "--" if who in PEERS else "-"
            mine = [r for r in found if who in (r["peer"], r["kernel"]) and (r["D"], r["dtype"]) == (D, dtype)]
            points = sorted((r["N"], r["tflops"]) for r in mine)
            looks = dict(marker="o", color=colour_of(who), label=f"{who}, {dtype}")
            ax.plot([N for N, _ in points], [tflops for _, tflops in points], look, **looks)
        ax.axhline(roof("fa2", D), color=INK, lw=1, ls=":")
        ax.text(17000, roof("fa2", D) - 8, f"roof over rung 1: {roof('fa2', D):.0f}", fontsize=9, ha="right", va="top")
        ax.set_xscale("log", base=2)
        ax.set_xticks([512 * 2**n for n in range(6)], ("512", "1k", "2k", "4k", "8k", "16k"))
        ax.set(title=f"backward, D = {D}, not causal", xlabel="N", ylim=(0, 700))
    axes[0].set_ylabel("TFLOP/s, H200")
    fig.legend(*axes[0].get_legend_handles_labels(), loc="outside lower center", ncols=2, fontsize=9)
    return picture(fig, """TFLOP/s of the backward against N on an H200 for D = 64 and 128: rungs 0 and 1,
    FlashAttention-2 and cuDNN as lines, the roof that shared memory puts over rung 1 as a dotted line.""")
