# SPDX-License-Identifier: MIT
"""The host side of the kernels: which file, how many blocks and threads, how much shared memory, which arguments.

The tensors' device decides: on a GPU the files are compiled with NVRTC, on a CPU with g++ behind an emulation of CUDA.
Needs torch; beside it the .cu files, ptx.cuh and cache.py; on a GPU nvrtc.py, cuda.core and NVRTC; on a CPU emulator/ and g++.
"""

from ctypes import c_float, c_int, c_longlong
from pathlib import Path

import torch

HERE = Path(__file__).parent
DELTA_ROWS = 128  # a block of attention_delta


def scalar_forward(q, k, v, *, causal=False, scale=None, tile=None):
    """(out, lse): float32 q (B, H, Nq, D), k and v (B, H, Nk, D), D contiguous; out like q, lse (B, H, Nq). tile is (Br, Bc)."""
    B, H, Nq, D = q.shape
    Br, Bc = tile or ((64, 32) if q.is_cuda else (16, 16))
    out, lse = q.new_empty(B, H, Nq, D), q.new_empty(B, H, Nq)
    arguments = *_strided(q), *_strided(k), *_strided(v), out, lse, *_sizes(q, k, causal, scale)
    _launch(
        "fwd_0_scalar.cu", "attention_forward", arguments,
        grid=_tiles(Nq, Br) * H * B, block=Br, shared_bytes=4 * (2 * Bc * D + Bc * Br), macros={"D": D, "Br": Br, "Bc": Bc},
    )  # fmt: skip
    return out, lse


def scalar_backward(dout, q, k, v, out, lse, *, causal=False, scale=None, tile=None):
    """(dq, dk, dv) like q (B, H, Nq, D), k and v (B, H, Nk, D), from dout and out like q, lse (B, H, Nq)."""
    B, H, Nq, D = q.shape
    Nk = k.shape[2]
    Br, Bc = tile or ((32, 64) if q.is_cuda else (16, 16))
    lse, delta, dq = lse.contiguous(), q.new_empty(B, H, Nq), q.new_zeros(B, H, Nq, D)
    dk, dv = (k.new_empty(B, H, Nk, D) for _ in range(2))
    macros = {"D": D, "Br": Br, "Bc": Bc}
    _launch(
        "bwd_0_scalar.cu", "attention_delta", (*_strided(dout), *_strided(out), delta, c_int(B), c_int(H), c_int(Nq)),
        grid=_tiles(B * H * Nq, DELTA_ROWS), block=DELTA_ROWS, macros=macros,
    )  # fmt: skip
    arguments = *_strided(dout), *_strided(q), *_strided(k), *_strided(v), lse, delta, dq, dk, dv, *_sizes(q, k, causal, scale)
    _launch(
        "bwd_0_scalar.cu", "attention_backward", arguments,
        grid=_tiles(Nk, Bc) * H * B, block=Bc, macros=macros,
        shared_bytes=4 * (2 * Bc * (D + 1) + 2 * Br * D + Br * Bc + 2 * Br),
    )  # fmt: skip
    return dq, dk, dv


def _launch(file, kernel, arguments, **shape):
    if any(x.is_cuda for x in arguments if isinstance(x, torch.Tensor)):
        from .nvrtc import launch
    else:
        from .emulator import launch
    launch(HERE / file, kernel, arguments, **shape)


def _strided(x):
    """A tensor (B, H, N, D) and its three strides, in elements."""
    return x, *map(c_longlong, x.stride()[:3])


def _sizes(q, k, causal, scale):
    """H, Nq, Nk, scale, causal: how every attention kernel's arguments end."""
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    return c_int(q.shape[1]), c_int(q.shape[2]), c_int(k.shape[2]), c_float(scale), c_int(causal)


def _tiles(n, size):
    return -(-n // size)
