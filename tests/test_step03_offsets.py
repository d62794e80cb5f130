"""Stage 03: offsets have 64 bits, because a tensor may have more than 2^31 entries."""

import numpy as np
import pytest
import torch
from triton.runtime.interpreter import InterpretedFunction, InterpreterBuilder

from steps import engine
from steps.step03_triton import bwd_2_gluon, fwd_3_gluon, rungs
from steps.step03_triton.features import decode, dropout, flash, flash_gluon, flash_gluon_backward
from support.contracting_interpreter import interpreter  # noqa: F401  Pytest finds the fixture by its name.

pytestmark = pytest.mark.skipif(engine.name != "cpu", reason="the products of a compiled kernel cannot be watched")
B, H, N, D = 2, 2, 24, 16
LARGEST = 64  # No number of rows or tiles here is larger. Each stride that is not 1 is, times the largest index.
DTYPES = torch.float16, torch.float32


@pytest.fixture(autouse=True)
def products(monkeypatch):
    """A signed product of 32 bits may be a number of rows, but not an offset."""
    multiply = InterpreterBuilder.create_mul

    def create_mul(self, lhs, rhs):
        product = multiply(self, lhs, rhs)
        if lhs.data.dtype == np.int32:
            assert np.abs(product.data).max() <= LARGEST, "an offset of 32 bits"
        return product

    monkeypatch.setattr(InterpreterBuilder, "create_mul", create_mul)


def tensors(dtype, n=N, batches=B):
    """q, k, v, dout and out like any tensors, and lse."""
    x = torch.ones(batches, H, n, D, dtype=dtype)
    return x, x, x, x, x, torch.zeros(batches, H, n)


def both(forward, backward, dtype, more=(), batches=B, **options):
    q, k, v, dout, out, lse = tensors(dtype, batches=batches)
    forward(q, k, v, tile=(16, 16), **options)
    backward(dout, q, k, v, out, lse, tile=(16, 16), **options, **dict(more))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("rung", [rung for rung in rungs.RUNGS if rung != "gluon"])  # It is not interpreted.
def test_of_a_rung(rung, dtype):
    if dtype in rungs.LIMITS.get(rung, {}).get("dtypes", DTYPES):
        both(*rungs.RUNGS[rung], dtype)


def test_of_the_plain_kernels_of_the_rungs_in_gluon():
    """Gluon is not interpreted, but these kernels are Triton's."""
    files = bwd_2_gluon, flash_gluon, flash_gluon_backward, fwd_3_gluon
    own = {name: x for file in files for name, x in vars(file).items() if name.endswith("_kernel")}
    plain = {name for name, x in own.items() if isinstance(x, InterpretedFunction) and "gluon" in x.fn.__module__}
    assert plain == {"dq_kernel", "packed_dq_kernel"}, "each of them has to be called here"
    Nq, D, Br = 60, 64, 16
    dq = torch.full((B * H, Nq, D), torch.nan)
    programs = B * H * -(-Nq // Br)
    bwd_2_gluon.dq_kernel[(programs,)](torch.ones(programs * Br * D), dq, Nq, 0.5, D=D, D_pad=D, Br=Br)
    assert (dq == 0.5).all()
    starts, total, tiles = torch.tensor([0, 17, 17, 40], dtype=torch.int32), 45, 45 // Br + 3
    dq = torch.full((1, H, total, D), torch.nan)
    sums, programs = torch.ones(H * tiles * Br * D), 3 * H * -(-23 // Br)
    args = sums, dq, starts, H, total, 23, tiles, 0.5
    flash_gluon_backward.packed_dq_kernel[(programs,)](*args, D=D, D_pad=D, Br=Br)
    assert (dq[:, :, :40] == 0.5).all() and dq[:, :, 40:].isnan().all(), "rows of no sequence are not written"


STARTS = torch.tensor([0, 17, 24], dtype=torch.int32)
PACKED = dict(cu_seqlens_q=STARTS, cu_seqlens_k=STARTS, max_seqlen_q=17, max_seqlen_k=17)
MASKS = {
    "a mask": torch.zeros(B, H, N, N),
    "a mask by columns": torch.zeros(B, H, N, N).mT.contiguous().mT,
    "a mask of keys": torch.zeros(N, B, 1, 16)[..., :1].permute(1, 2, 3, 0),
    "a mask of queries": torch.zeros(B, H, N, 16)[..., :1],
}


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("mask, dtype", [(None, torch.float16), *((mask, torch.float32) for mask in MASKS)], ids=str)
def test_of_the_features(mask, packed, dtype):
    batches = 1 if packed else B
    options = PACKED if packed else {"alibi_slopes": torch.ones(B, 16 * N * H)[:, :: 16 * N]}
    options = options | {"sinks": torch.zeros(H)}
    if mask is not None:
        options = options | {"mask": MASKS[mask][:batches]}
    both(flash.forward, flash.backward, dtype, {"mask_gradient": mask is not None}, batches, **options)


def test_of_decoding():
    q, k, v, *_ = tensors(torch.float32, 64)
    decode.forward(q[:, :, :6], k, v, splits=2)
    decode.forward(q[:, :, :6], k, v, splits=2, sinks=torch.zeros(H))
    decode.forward(q[:, :, :6], k, v, splits=2, lengths_k=torch.tensor([64, 0], dtype=torch.int32))


def test_of_the_mask_of_dropout():
    dropout.dropout_mask(3, B, H, N, N, 0.5)
    dropout.dropout_mask(3, 1, H, N, N, 0.5, cu_seqlens_q=STARTS, cu_seqlens_k=STARTS)
