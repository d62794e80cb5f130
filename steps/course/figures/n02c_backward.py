"""What notebook 02c shows: what autograd keeps, bits that change, mistakes in the backward."""

import functools

import torch

from reference import error
from steps import engine
from steps.course.figures import planted
from steps.course.figures.picture import picture
from steps.course.figures.plots import INK, PALE, cells, subplots, who_sees
from steps.course.workbook import edited
from steps.step02_fa2_cuda import calls, emulator, ladder

MISTAKES = {  # {mistake: (rung, old text, new text)}
    "delta left out": ("scalar", "P * (dP - delta_i[r])", "P * dP"),
    "dq without scale": ("scalar", "K, rows, keys, scale);", "K, rows, keys, 1);"),
    "diagonal top left": ("scalar", "tile * Bc + t - (Nk - Nq)", "tile * Bc + t"),
    "no second barrier": ("fa2", "    __syncthreads();  // P and dS are complete\n", ""),
    "P not transposed": ("fa2", "true, false>(dV, P_i", "false, false>(dV, P_i"),
}
TILE = {"scalar": (16, 16), "fa2": (32, 32)}  # small ones, for the emulation


def kept_kib(attention, N, D=32):
    """KiB that autograd keeps for the backward of one head."""
    q, k, v = (torch.randn(1, 1, N, D, device=engine.device, requires_grad=True) for _ in range(3))
    kept = {}
    with torch.autograd.graph.saved_tensors_hooks(lambda x: kept.setdefault(x.data_ptr(), x), lambda x: x):
        attention(q, k, v)
    return sum(x.untyped_storage().nbytes() for x in kept.values()) / 1024


@functools.cache
def gradients(n, blocks, seed=0):
    """(dq, dk, dv) by rung 0, of two heads of n tokens, D = 32, tile (16, 16): in the emulation, blocks in an order."""
    q, k, v, dout = torch.randn(4, 1, 2, n, 32, generator=torch.Generator().manual_seed(0))
    out, lse = calls.forward(q, k, v, rung="scalar")
    with emulator.schedule(blocks=blocks, seed=seed):
        return calls.backward(dout, q, k, v, out, lse, rung="scalar")


def results(x, rung, **tile):
    """{"dq": ..., "dk": ..., "dv": ...} of a rung on a case."""
    out, lse = calls.forward(x.q, x.k, x.v, rung=rung, causal=x.causal, scale=x.scale)
    got = calls.backward(x.dout, x.q, x.k, x.v, out, lse, rung=rung, causal=x.causal, scale=x.scale, **tile)
    return dict(zip(("dq", "dk", "dv"), got, strict=True))


def addresses():
    """Where the four matrices lie that `ldmatrix` fetches for an operand: in the operand, in a tile that is stored like
    it, with the lanes that give the addresses, and in a tile that stores its transpose."""
    fig, axes = subplots(1, 3, figsize=(8.5, 3.4))
    titles = "the operand, as mma wants it", "a tile stored like it", "a tile that stores the transpose"
    for ax, title in zip(axes, titles, strict=True):
        stored, transposed = title == titles[1], title == titles[2]
        down, across = (2, 1) if transposed else (1, 2)
        matrix = [[i // 8 * down + j // 8 * across for j in range(16)] for i in range(16)]
        lane = [[8 * n + i % 8 if stored and j % 8 == 0 else "" for j, n in enumerate(matrix[i])] for i in range(16)]
        cells(ax, [[PALE[(0, 4, 2, 3)[n]] for n in row] for row in matrix], lane, title=title, aspect=1)
        ax.set(xticks=(0, 8), yticks=(0, 8))
        for i, j in ((3, 3), (3, 11), (11, 3), (11, 11)):
            ax.text(j + 1, i + 0.5, matrix[i][j], fontsize=16, color=INK, ha="center", va="center")
    axes[1].set_xlabel("small: the lane that gives the\naddress of this row of a matrix")
    return picture(fig, """Three squares of 16 x 16 in four quarters, the matrices 0 to 3. In the operand, and in a tile
    stored like it, 0 is top left, 1 bottom left, 2 top right, 3 bottom right; the rows of matrix 0 have lanes 0 to 7,
    those of matrix 1 lanes 8 to 15, and so on. In a tile with the transpose 1 is top right and 2 bottom left.""")


def diffs():
    """The mistakes as old and new lines, rung by rung."""
    told = []
    for rung in dict.fromkeys(rung for rung, *_ in MISTAKES.values()):
        file = ladder.BACKWARD[rung].file.removesuffix(".cu")
        of_rung = {says: (*edit,) for says, (of, *edit) in MISTAKES.items() if of == rung}
        told += [f"{file}.cu", planted.diffs(file, of_rung)]
    return "\n".join(told)


def spoilt(mistakes, names):
    """A table of {mistake: (rung, old, new)} in the backward against cases: which gradients each of them spoils."""
    found = {}
    for says, (rung, *edit) in mistakes.items():
        with edited(ladder.BACKWARD[rung].file, edit):
            for name in names:
                x, want = planted.prepared(name, rung, tile=TILE[rung])
                wrong = error.failures(results(x, rung, backward_tile=TILE[rung]), want)
                found[says, name] = " ".join(wrong) or "lives"
    return who_sees(found, "Mistakes in the backward against cases, with the gradients that they spoil.")
