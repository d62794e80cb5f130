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
from steps.figures.plots import COLOURS, FAINT, INK, style
from steps.step02_fa2_cuda import calls, emulator, ladder
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


def against_roofs(N=4096):
    """Prints the backward's TFLOP/s on an H200, not causal, of the rungs beside their roofs, and of the peers."""
    fresh = rows.latest(rows.fresh(rows.read()))
    at = {"gpu": GPU.name, "n_gpus": 1, "pass": "bwd", "causal": False, "N": N, "options": {}}
    found = [row for row in fresh if all(row[name] == at[name] for name in at)]
    roofs = {("bwd_0_scalar", 64): "scalar", ("bwd_1_fa2", 64): "fa2", ("bwd_1_fa2", 128): "fa2"}
    for who in ("bwd_0_scalar", "bwd_1_fa2", "sdpa-flash", "sdpa-cudnn"):
        dtype = "fp32" if "scalar" in who else "bf16"
        for row in (r for r in found if who in (r["peer"], r["kernel"]) and r["dtype"] == dtype):
            rung = roofs.get((who, row["D"]))
            share = f", {row['tflops'] / roof(rung, row['D']):.0%} of its roof" if rung else ""
            print(f"{who:12} {dtype} D = {row['D']:3}: {row['tflops']:5.3g} TFLOP/s{share}")
