# SPDX-License-Identifier: MIT
"""The host side of the kernels: which file, how many blocks and threads, how much shared memory, which arguments.

The tensors' device decides: on a GPU the files are compiled with NVRTC, on a CPU with g++ behind an emulation of CUDA.
Needs torch; beside it the .cu files, ptx.cuh, nvrtc.py and cache.py; on a GPU cuda.core and NVRTC; on a CPU emulator/ and g++.
"""

from ctypes import c_float, c_int, c_longlong
from pathlib import Path

import torch

from . import nvrtc

HERE = Path(__file__).parent
DELTA_ROWS = 128  # a block of attention_delta


def scalar_forward(q, k, v, *, causal=False, scale=None, tile=None):
    """(out, lse): float32 q (B, H, Nq, D), k and v (B, Hk, Nk, D), D contiguous; out like q, lse (B, H, Nq). tile is (Br, Bc)."""
    B, H, Nq, D = q.shape  # apart, as a shape in one piece doubles the time of new_empty
    out, lse = q.new_empty(B, H, Nq, D), q.new_empty(B, H, Nq)
    _run(_scalar_plan, (q, k, v), (out, lse), (causal, scale, tile or ((64, 32) if q.is_cuda else (16, 16))))
    return out, lse


def _scalar_plan(q, k, v, out, lse, causal, scale, tile):
    (B, H, Nq, D), (Br, Bc) = q.shape, tile
    yield dict(
        file=HERE / "fwd_0_scalar.cu", kernel="attention_forward",
        arguments=(*_strided(q), *_strided(k), *_strided(v), out, lse, *_sizes(q, k, causal, scale)),
        grid=_tiles(Nq, Br) * H * B, block=Br, shared_bytes=4 * (2 * Bc * D + Bc * Br), macros={"D": D, "Br": Br, "Bc": Bc},
    )  # fmt: skip


def scalar_backward(dout, q, k, v, out, lse, *, causal=False, scale=None, tile=None, deterministic=False):
    """(dq, dk, dv) like q (B, H, Nq, D), k and v (B, Hk, Nk, D), from dout and out like q, lse (B, H, Nq)."""
    if deterministic:
        raise NotImplementedError(
            "rung scalar adds to dq in any order; rung fa2 takes deterministic=True, in bfloat16 and float16. In float32 "
            "steps.step03_triton is always deterministic."
        )
    H, Hk = q.shape[1], k.shape[1]
    k, v = (_a_head_for_each_query_head(x, H) for x in (k, v))
    delta, dq, dk, dv = q.new_empty(q.shape[:3]), q.new_zeros(q.shape), k.new_empty(k.shape), k.new_empty(k.shape)
    tile = tile or ((32, 64) if q.is_cuda else (16, 16))
    _run(_scalar_backward_plan, (dout, q, k, v, out), (lse.contiguous(), delta, dq, dk, dv), (causal, scale, tile))
    return dq, *(dx if H == Hk else dx.unflatten(1, (Hk, -1)).sum(2) for dx in (dk, dv))


def _scalar_backward_plan(dout, q, k, v, out, lse, delta, dq, dk, dv, causal, scale, tile):
    (B, H, Nq, D), Nk, (Br, Bc) = q.shape, k.shape[2], tile
    common = {"file": HERE / "bwd_0_scalar.cu", "macros": {"D": D, "Br": Br, "Bc": Bc}}
    yield dict(
        kernel="attention_delta", arguments=(*_strided(dout), *_strided(out), delta, c_int(B), c_int(H), c_int(Nq)),
        grid=_tiles(B * H * Nq, DELTA_ROWS), block=DELTA_ROWS, **common,
    )  # fmt: skip
    strided, (H_, _, *sizes) = (y for x in (dout, q, k, v) for y in _strided(x)), _sizes(q, k, causal, scale)
    yield dict(
        kernel="attention_backward", arguments=(*strided, lse, delta, dq, dk, dv, H_, *sizes),
        grid=_tiles(Nk, Bc) * H * B, block=Bc, shared_bytes=4 * (2 * Bc * (D + 1) + 2 * Br * D + Br * Bc + 2 * Br), **common,
    )  # fmt: skip


def _a_head_for_each_query_head(x, H):
    """k or v (B, H, Nk, D) from (B, Hk, Nk, D): the simplest way to grouped heads, at the price of a copy."""
    return x if x.shape[1] == H else x.repeat_interleave(H // x.shape[1], dim=1)


# Forward, rungs 1-5: by head_dim, the tile (Br, Bc) that is taken unless another is asked for. Rungs 1-4 take Br up to 64 (they
# are launched with at most 4 warps), rung 5 Br = 32 or multiples of 64.
WARP_TILES = {32: (64, 64), 64: (64, 64), 96: (64, 32), 128: (64, 32)}
MMA_TILES = {32: (64, 64), 64: (64, 64), 96: (64, 64), 128: (64, 64)}  # rungs 2-4
FA2_TILES = {32: (128, 128), 64: (128, 128), 96: (128, 64), 128: (128, 64), 256: (64, 64)}  # FlashAttention-2's
MACROS = {torch.float32: "float32", torch.bfloat16: "bf16", torch.float16: "fp16"}


def _forward(file, tiles, padding=0, size=2):
    """The launcher of a forward kernel whose shared tiles have rows of D + padding numbers of `size` bytes."""

    def forward(q, k, v, *, causal=False, scale=None, tile=None):
        """(out, lse): q (B, H, Nq, D), k and v (B, Hk, Nk, D), H a multiple of Hk; out like q, lse (B, H, Nq) float32."""
        B, H, Nq, D = q.shape
        out, lse = q.new_empty(B, H, Nq, D), q.new_empty(B, H, Nq, dtype=torch.float32)
        _run(plan, (q, k, v), (out, lse), (causal, scale, tile))
        return out, lse

    def plan(q, k, v, out, lse, causal, scale, tile):
        B, H, Nq, D = q.shape
        if D not in tiles:
            raise ValueError(f"{file} takes head_dim {', '.join(map(str, tiles))}; got {D}.")
        q, k, v, (Br, Bc) = *map(_aligned, (q, k, v)), tile or tiles[D]
        yield dict(
            file=HERE / file, kernel="attention_forward",
            arguments=(*_strided(q), *_strided(k), *_strided(v), out, lse, *_sizes(q, k, causal, scale)),
            grid=_tiles(Nq, Br) * H * B, block=32 * min(4, Br // 16), shared_bytes=size * (Br + 2 * Bc) * (D + padding),
            macros={"T": MACROS[q.dtype], "D": D, "Br": Br, "Bc": Bc},
        )  # fmt: skip

    return forward


warp_forward = _forward("fwd_1_warp.cu", WARP_TILES, padding=4, size=4)
mma_forward = _forward("fwd_2_mma.cu", MMA_TILES)
ldmatrix_forward = _forward("fwd_3_ldmatrix.cu", MMA_TILES)
cp_async_forward = _forward("fwd_4_cp_async.cu", MMA_TILES)
fa2_forward = _forward("fwd_5_fa2.cu", FA2_TILES)


# FlashAttention-2's (Br, Bc) and warps a block; smaller ones for a GPU with less shared memory (D = 256 needs 100.5 KiB: no
# GeForce, no T4)
FA2_BACKWARD = {32: (128, 128, 8), 64: (128, 128, 8), 96: (64, 128, 8), 128: (64, 128, 8), 256: (64, 64, 8)}
FA2_BACKWARD_SMALL = {32: (64, 64, 4), 64: (64, 64, 4), 96: (64, 64, 4), 128: (32, 64, 4), 256: (32, 32, 4)}
FA2_BACKWARD_SMALLEST = (32, 32, 4)


def fa2_backward(dout, q, k, v, out, lse, *, causal=False, scale=None, tile=None, deterministic=False):
    """(dq, dk, dv) like q (B, H, Nq, D), k and v (B, Hk, Nk, D) in bfloat16 or float16, from dout and out like q, lse (B, H, Nq).

    D is a key of FA2_BACKWARD, H a multiple of Hk. tile is (Br, Bc), powers of 2 from 16 and from 32 on, Bc <= 4 Br.
    deterministic: dq, too, is bit-equal from run to run.
    """
    B, H, Nq, D = q.shape
    if D not in FA2_BACKWARD:
        raise ValueError(f"bwd_1_fa2.cu takes head_dim {', '.join(map(str, FA2_BACKWARD))}; got {D}.")
    tile = (*tile, min(8, *(size // 8 for size in tile))) if tile else _fa2_backward_tile(q)
    rows = _tiles(Nq, tile[0]) * tile[0]  # whole tiles
    lse_2, delta = (q.new_empty(B, H, rows, dtype=torch.float32) for _ in range(2))
    dq_sum = q.new_zeros(B, H, rows, D, dtype=torch.float32)
    dq, dk, dv = (torch.empty_like(x, memory_format=torch.contiguous_format) for x in (q, k, v))
    turns = q.new_zeros(1 + B * H * rows // tile[0] if deterministic else 1, dtype=torch.int32)
    others = lse.contiguous(), lse_2, delta, dq_sum, dq, dk, dv, turns
    _run(_fa2_backward_plan, (dout, q, k, v, out), others, (causal, scale, tile, deterministic))
    return dq, dk, dv


def _fa2_backward_plan(dout, q, k, v, out, lse, lse_2, delta, dq_sum, dq, dk, dv, turns, causal, scale, tile, deterministic):
    (B, H, Nq, D), (Hk, Nk), (Br, Bc, warps) = q.shape, k.shape[1:3], tile
    dout, q, k, v, out = map(_aligned, (dout, q, k, v, out))
    rows, sizes = _tiles(Nq, Br) * Br, _sizes(q, k, causal, scale)
    macros = {"T": MACROS[q.dtype], "D": D, "Br": Br, "Bc": Bc, "Warps": warps}
    common = {"file": HERE / "bwd_1_fa2.cu", "macros": macros}
    yield dict(
        kernel="attention_delta",
        arguments=(*_strided(dout), *_strided(out), lse, lse_2, delta, c_int(H), c_int(Nq), c_int(rows)),
        grid=_tiles(rows, 16 if D == 96 else 2048 // D) * H * B, block=256, **common,
    )  # fmt: skip
    strided = (y for x in (dout, q, k, v) for y in _strided(x))
    yield dict(
        kernel="attention_backward",
        arguments=(*strided, lse_2, delta, dq_sum, dk, dv, turns, *sizes, c_int(deterministic)),
        grid=_tiles(Nk, Bc) * Hk * B, block=32 * warps, shared_bytes=_fa2_backward_bytes(D, Br, Bc), **common,
    )  # fmt: skip
    yield dict(
        kernel="attention_dq", arguments=(dq_sum, dq, c_int(Nq), c_int(rows), sizes[4]),
        grid=_tiles(Nq * D, 1024) * H * B, block=256, **common,
    )  # fmt: skip


def _fa2_backward_tile(q):
    """(Br, Bc, warps): what fits into the GPU's shared memory; in the emulator the smallest."""
    D = q.shape[-1]
    limit = torch.cuda.get_device_properties(q.device).shared_memory_per_block_optin if q.is_cuda else 0
    tiles = FA2_BACKWARD[D], FA2_BACKWARD_SMALL[D]
    return next((tile for tile in tiles if _fa2_backward_bytes(D, *tile[:2]) <= limit), FA2_BACKWARD_SMALLEST)


def _fa2_backward_bytes(D, Br, Bc):
    """K and V, two buffers of Q and dO, P and dS in 16 bits; two buffers of lse and delta in float32."""
    return 2 * (2 * Bc * D + 4 * Br * D + 2 * Br * Bc) + 4 * 4 * Br


def _run(plan, inputs, others, options):
    """Launches the kernels that plan(*inputs, *others, *options) yields; on a GPU what is yielded is kept for the next call."""
    if inputs[0].is_cuda:
        nvrtc.run(plan, inputs, others, options)
        return
    for what in plan(*inputs, *others, *options):
        _launch(**what)


def _launch(file, kernel, arguments, **shape):
    launch = nvrtc.launch
    if not any(x.is_cuda for x in arguments if isinstance(x, torch.Tensor)):
        from .emulator import launch
    launch(file, kernel, arguments, **shape)


def _strided(x):
    """A tensor (B, H, N, D) and its three strides, in elements."""
    return x, *map(c_longlong, x.stride()[:3])


def _sizes(q, k, causal, scale):
    """H, H / Hk, Nq, Nk, scale, causal: how an attention kernel's arguments end."""
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    return *map(c_int, (q.shape[1], q.shape[1] // k.shape[1], q.shape[2], k.shape[2])), c_float(scale), c_int(causal)


def _tiles(n, size):
    return -(-n // size)


def _aligned(x):
    """x, or a copy if 16-byte loads cannot read its rows."""
    fits = x.data_ptr() % 16 == 0 and all(stride * x.element_size() % 16 == 0 for stride in x.stride()[:3]) and x.stride(3) == 1
    return x if fits else x.clone(memory_format=torch.contiguous_format)
