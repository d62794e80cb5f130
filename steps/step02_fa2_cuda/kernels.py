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


FA2_BACKWARD_TILES = {32: (128, 128), 64: (128, 128), 96: (64, 128), 128: (64, 128), 256: (64, 64)}  # FlashAttention-2's


def fa2_backward(dout, q, k, v, out, lse, *, causal=False, scale=None, tile=None, deterministic=False):
    """(dq, dk, dv) like q (B, H, Nq, D), k and v (B, Hk, Nk, D) in bfloat16 or float16, from dout and out like q, lse (B, H, Nq).

    D is a multiple of 32, H of Hk. tile is (Br, Bc), multiples of 16 and 32. deterministic: dq, too, is bit-equal from run to run.
    """
    (B, H, Nq, D), (Hk, Nk) = q.shape, k.shape[1:3]
    Br, Bc = tile or _fa2_backward_tile(q)
    scale = D**-0.5 if scale is None else scale
    dout, q, k, v, out = (_aligned(x) for x in (dout, q, k, v, out))
    rows = _tiles(Nq, Br) * Br  # lse and delta as whole tiles
    lse_2, delta = (q.new_empty(B, H, rows, dtype=torch.float32) for _ in range(2))
    dq_sum, dq = q.new_zeros(B, H, Nq, D, dtype=torch.float32), q.new_empty(B, H, Nq, D)
    dk, dv = (k.new_empty(B, Hk, Nk, D) for _ in range(2))
    turns = q.new_zeros(1 + B * H * rows // Br if deterministic else 1, dtype=torch.int32)
    macros = {"T": "bf16" if q.dtype == torch.bfloat16 else "fp16", "D": D, "Br": Br, "Bc": Bc}
    _launch(
        "bwd_1_fa2.cu", "attention_delta",
        (*_strided(dout), *_strided(out), lse.contiguous(), lse_2, delta, c_int(B), c_int(H), c_int(Nq), c_int(rows)),
        grid=_tiles(B * H * rows * (16 if D == 96 else D // 8), 256), block=256, macros=macros,
    )  # fmt: skip
    _launch(
        "bwd_1_fa2.cu", "attention_backward",
        (
            *_strided(dout), *_strided(q), *_strided(k), *_strided(v), lse_2, delta, dq_sum, dk, dv, turns,
            c_int(H), c_int(H // Hk), c_int(Nq), c_int(Nk), c_float(scale), c_int(causal), c_int(deterministic),
        ),
        grid=_tiles(Nk, Bc) * Hk * B, block=min(256, 4 * Br, 4 * Bc), shared_bytes=_fa2_backward_bytes(D, Br, Bc), macros=macros,
    )  # fmt: skip
    _launch(
        "bwd_1_fa2.cu", "attention_dq", (dq_sum, dq, c_longlong(dq.numel()), c_float(scale)),
        grid=_tiles(dq.numel(), 1024), block=256, macros=macros,
    )  # fmt: skip
    return dq, dk, dv


def _fa2_backward_tile(q):
    """The first tile that fits into the GPU's shared memory; the emulator's is small."""
    D = q.shape[-1]
    if not q.is_cuda:
        return 32, 32
    limit = torch.cuda.get_device_properties(q.device).shared_memory_per_block_optin
    tiles = FA2_BACKWARD_TILES[D], (64, 64), (32, 32)
    return next((tile for tile in tiles if _fa2_backward_bytes(D, *tile) <= limit), tiles[-1])


def _fa2_backward_bytes(D, Br, Bc):
    """K and V; two buffers of Q and dO; P and dS, in 16 bits; two buffers of lse and delta; the block's number."""
    return 2 * (2 * Bc * D + 4 * Br * D + 2 * Br * Bc) + 4 * (4 * Br + 4)


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


def _aligned(x):
    """x, or a copy if 16-byte loads cannot read its rows."""
    fits = x.data_ptr() % 16 == 0 and all(stride * x.element_size() % 16 == 0 for stride in x.stride()[:3]) and x.stride(3) == 1
    return x if fits else x.clone(memory_format=torch.contiguous_format)
