"""What notebook 02c shows: what autograd keeps, who owns which gradient, bits that change, roofs, mistakes."""

import functools

import torch

from reference import error, mutants
from steps import engine
from steps.bench import cost, rows
from steps.figures.measured import fresh
from steps.figures.picture import picture
from steps.figures.planted import GPU, emulated, prepared
from steps.figures.plots import INK, PALE, cells, subplots
from steps.step02_fa2_cuda import calls, emulator, ladder
from steps.workbook import edited

TILE = {"scalar": (16, 16), "fa2": (32, 32)}  # small ones, for the emulation
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
    with torch.autograd.graph.saved_tensors_hooks(lambda x: kept.setdefault(x.data_ptr(), x), lambda x: x):
        attention(q, k, v)
    return sum(x.untyped_storage().nbytes() for x in kept.values()) / 1024


def owners():
    """Key tiles outside and query tiles outside: which gradient a block owns, and which all blocks add to."""
    fig, axes = subplots(1, 2, figsize=(8, 3.4))
    for ax, by_keys in zip(axes, (True, False), strict=True):
        side, below = ("dQ +=", "dK dV") if by_keys else ("dQ", "dK dV\n+=")
        table = [[PALE[j if by_keys else i] if max(i, j) < 4 else "white" for j in range(6)] for i in range(6)]
        words = [*[[""] * 5 + [side]] * 4, [""] * 6, [below] * 4 + [""] * 2]
        for n in range(4):  # on its colour stands what a block owns
            table[5 if by_keys else n][n if by_keys else 5] = PALE[n]
            start, end = ((n, -0.4), (n, 3.4)) if by_keys else ((-0.4, n), (3.4, n))
            ax.annotate("", end, start, arrowprops={"arrowstyle": "->", "color": INK})
        title = f"{'key' if by_keys else 'query'} tiles outside"
        cells(ax, table, words, title=title, ylabel="query tiles i", xticks=[], yticks=[])
    return picture(fig, """Two grids of four query tiles by four key tiles. Left: a block a column, walking down; dK and
    dV stand below on its colour, dQ += at the end of each row on white. Right: a block a row, and the reverse.""")


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


def roof(rung, D):
    """TFLOP/s on an H200 if its shared memory never rests, by the wavefronts of one head in the emulation."""
    N, dtype = (64, torch.float32) if rung == "scalar" else (256, torch.bfloat16)
    q, k, v, dout = torch.randn(4, 1, 1, N, D, generator=torch.Generator().manual_seed(0)).to(dtype)
    out, lse = calls.forward(q, k, v, rung=rung)
    with emulator.count_conflicts() as counted:
        calls.backward(dout, q, k, v, out, lse, rung=rung, backward_tile=ladder.BACKWARD[rung].tiles[0][D])
    n = sum(n for _, n in counted.values())  # a multiprocessor does 4096 FLOP, or one wavefront, a cycle
    return GPU.half_tflops / 4096 * cost.flops(1, 1, N, D, pass_="bwd") / n


def results(x, rung, **tile):
    """{"dq": ..., "dk": ..., "dv": ...} of a rung on a case."""
    out, lse = calls.forward(x.q, x.k, x.v, rung=rung, causal=x.causal, scale=x.scale)
    got = calls.backward(x.dout, x.q, x.k, x.v, out, lse, rung=rung, causal=x.causal, scale=x.scale, **tile)
    return dict(zip(("dq", "dk", "dv"), got, strict=True))


def spoilt(rung, edit, names):
    """({case: the gradients that an edit of a rung's backward spoils}, which of the reference's mutants it equals)."""
    found, recognised = {}, "none"
    for name in names:
        x, want = prepared(name, rung, tile=TILE[rung])
        with edited(ladder.BACKWARD[rung].file, edit):
            got = results(x, rung, backward_tile=TILE[rung])
        found[name] = " ".join(error.failures(got, want)) or "-"
        if found[name] != "-" and recognised == "none":
            recognised = next((m.says for m in mutants.MUTANTS if equals(m, x, rung, got, want)), "none")
    return found, recognised


def equals(mutant, x, rung, got, want):
    """Whether a mutant of the reference's backward gives these gradients."""
    try:
        wrong = mutant.run(x, TILE[rung], "fa2") if issubclass(mutant.kind, mutants.Backward) else {}
    except mutants.NotApplicable:
        return False
    return bool(wrong) and all((got[name] - wrong[name]).abs().max() <= 2 * want.tolerance[name] for name in got)


def against_roofs():
    """Prints the backward's TFLOP/s on an H200, N = 4096, not causal: rungs 0 and 1 beside their roofs, and peers."""
    at = {"gpu": GPU.name, "n_gpus": 1, "pass": "bwd", "causal": False, "N": 4096, "options": {}}
    found = [row for row in rows.latest(fresh()) if at.items() <= row.items()]
    rungs = {"bwd_0_scalar": "scalar", "bwd_1_fa2": "fa2"}
    for who in (*rungs, "sdpa-flash", "sdpa-cudnn"):
        dtype, rung = "fp32" if "scalar" in who else "bf16", rungs.get(who)
        for row in (r for r in found if who in (r["peer"], r["kernel"]) and r["dtype"] == dtype):
            most = roof(rung, row["D"]) if rung else 0
            share = f", {row['tflops'] / most:.0%} of its roof of {most:.3g}" if rung else ""
            print(f"{who:12} {dtype} D = {row['D']:3}: {row['tflops']:5.3g} TFLOP/s{share}")
