"""What notebook 02c shows: what autograd keeps, bits that change, mistakes in the backward."""

import functools

import torch

from reference import error
from steps import engine
from steps.course.figures.planted import prepared
from steps.course.figures.plots import who_sees
from steps.course.workbook import edited
from steps.step02_fa2_cuda import calls, emulator, ladder

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


def spoilt(mistakes, names):
    """A table of {mistake: (rung, old, new)} in the backward against cases: which gradients each of them spoils."""
    found = {}
    for says, (rung, *edit) in mistakes.items():
        with edited(ladder.BACKWARD[rung].file, edit):
            for name in names:
                x, want = prepared(name, rung, tile=TILE[rung])
                wrong = error.failures(results(x, rung, backward_tile=TILE[rung]), want)
                found[says, name] = " ".join(wrong) or "lives"
    return who_sees(found, "Mistakes in the backward against cases, with the gradients that they spoil.")
