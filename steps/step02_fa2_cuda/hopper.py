# SPDX-License-Identifier: MIT
"""The host side of Hopper's kernels: tensor maps, tiles, shared memory, grids.

The tensors' device decides: on a GPU (sm_90) the files are compiled with NVRTC, on a CPU with g++ behind an emulation of CUDA.
Needs torch; beside it the .cu files, ptx.cuh, wgmma.py and cache.py; on a GPU nvrtc.py, cuda.core and NVRTC; on a CPU emulator/
and g++.
"""

import functools
from ctypes import c_float, c_int, c_longlong
from pathlib import Path

import torch

HERE = Path(__file__).parent
TYPES = {torch.bfloat16: "bf16", torch.float16: "fp16"}
TILES = {32: (192, 128), 64: (192, 128), 96: (192, 96), 128: (128, 128), 256: (128, 80)}  # (Br, Bc) by head_dim


def wgmma_forward(q, k, v, *, causal=False, scale=None, tile=None):
    """(out, lse): bfloat16 or float16 q (B, H, Nq, D), k and v (B, Hk, Nk, D), D contiguous; out like q, lse (B, H, Nq) float32.

    D is 32, 64, 96, 128 or 256, H a multiple of Hk. tile is (Br, Bc): Br 64, 128 or 192, Bc a multiple of 16. Rung 6.
    """
    return _forward("fwd_6_wgmma.cu", q, k, v, causal, scale, tile or (128, TILES[q.shape[-1]][1]))


def roles_forward(q, k, v, *, causal=False, scale=None, tile=None):
    """The same by rung 7."""
    return _forward("fwd_7_roles.cu", q, k, v, causal, scale, tile or TILES[q.shape[-1]])


def hopper_forward(q, k, v, *, causal=False, scale=None, tile=None, **switches):
    """The same by rung 8. switches: macros at the head of fwd_8_hopper.cu, such as PINGPONG=0, to measure what they bring."""
    return _forward("fwd_8_hopper.cu", q, k, v, causal, scale, tile or TILES[q.shape[-1]], **switches)


_launches = {}  # those that have been put together, by everything that they depend on but out and lse


def _forward(file, q, k, v, causal, scale, tile, **switches):
    B, H, Nq, _ = q.shape
    out = torch.empty_like(q, memory_format=torch.contiguous_format)
    lse = torch.empty(B, H, Nq, dtype=torch.float32, device=q.device)  # half the time of q.new_empty(q.shape[:3], ...)
    if not q.is_cuda:
        from . import emulator

        arguments, shape = _plan(file, *map(_aligned, (q, k, v)), out, lse, causal, scale, tile, switches)
        emulator.launch(HERE / file, "attention_forward", arguments, **shape)
        return out, lse

    key = (
        file, q.dtype, q.device, causal, scale, tile, q.shape, k.shape, q.stride(), k.stride(), v.stride(),
        q.data_ptr(), k.data_ptr(), v.data_ptr(), *switches.items(),
    )  # fmt: skip
    launch = _launches.get(key)
    if launch is None:
        from .nvrtc import Launch

        aligned = [_aligned(x) for x in (q, k, v)]
        arguments, shape = _plan(file, *aligned, out, lse, causal, scale, tile, switches)
        launch = Launch(HERE / file, "attention_forward", arguments, **shape)
        if all(x is y for x, y in zip(aligned, (q, k, v), strict=True)):  # copies have other addresses the next time
            if len(_launches) >= 1000:
                _launches.clear()
            _launches[key] = launch
    launch(((3, out), (4, lse)))
    return out, lse


def _plan(file, q, k, v, out, lse, causal, scale, tile, switches):
    """The kernel's arguments, and the launch's shape."""
    (B, H, Nq, D), (Hk, Nk), (Br, Bc) = q.shape, k.shape[1:3], tile
    tiles, blocks = -(-Nq // Br) * H * B, multiprocessors(q.device)
    arguments = [tensor_map(q, Br), tensor_map(k, Bc), tensor_map(v, Bc), out, lse]
    arguments += c_int(H), c_int(H // Hk), c_int(Nq), c_int(Nk), c_float(D**-0.5 if scale is None else scale)
    if file == "fwd_8_hopper.cu":
        # A causal section has half as many heads as there are blocks: two blocks share a head's keys at a time, and because the
        # tiles of all its heads are taken in order of their length, the blocks finish it together.
        arguments += c_int(tiles), c_int(max(1, blocks // 2))
    Q_tiles = 2 if file == "fwd_8_hopper.cu" and D <= 128 else 1
    KV_tiles = 6 if file == "fwd_8_hopper.cu" and D <= 64 else 4
    persistent = file == "fwd_8_hopper.cu" and switches.get("PERSISTENT", 1)
    return arguments, {
        "grid": min(tiles, blocks) if persistent else tiles,
        "block": 2 * Br + (0 if file == "fwd_6_wgmma.cu" else 128),
        "shared_bytes": (Q_tiles * Br + KV_tiles * Bc) * -(-D // 64) * 128 + 128,
        "macros": {"T": TYPES[q.dtype], "D": D, "Br": Br, "Bc": Bc, "CAUSAL": int(causal), **switches},
    }


BACKWARD_TILES = {64: (128, 128), 128: (64, 128)}  # (Br, Bc) by head_dim; the others take kernels.fa2_backward


def wgmma_backward(dout, q, k, v, out, lse, *, causal=False, scale=None, tile=None):
    """(dq, dk, dv) like q (B, H, Nq, D), k and v (B, Hk, Nk, D) in bfloat16 or float16, from dout and out like q, lse (B, H, Nq).

    D is 64 or 128, H a multiple of Hk. tile: the one of BACKWARD_TILES. Rung 2.
    """
    return _backward("bwd_2_wgmma.cu", dout, q, k, v, out, lse, causal, scale, tile)


def hopper_backward(dout, q, k, v, out, lse, *, causal=False, scale=None, tile=None, deterministic=False):
    """The same by rung 3. deterministic: dq, too, is bit-equal from run to run."""
    return _backward("bwd_3_hopper.cu", dout, q, k, v, out, lse, causal, scale, tile, DETERMINISTIC=int(deterministic))


def _backward(file, dout, q, k, v, out, lse, causal, scale, tile, **switches):
    (B, H, Nq, D), (Hk, Nk), (Br, Bc) = q.shape, k.shape[1:3], tile or BACKWARD_TILES[q.shape[-1]]
    if (Br, Bc) != BACKWARD_TILES.get(D):
        raise ValueError(f"{file} has one tile for each head_dim, {BACKWARD_TILES}; got {(Br, Bc)} for head_dim {D}.")
    bulk, scale = file == "bwd_3_hopper.cu", D**-0.5 if scale is None else scale
    dout, q, k, v, out = map(_aligned, (dout, q, k, v, out))
    tiles = -(-Nq // Br)
    dq_sum, lse_2, delta = (q.new_empty(B, H, tiles * Br, n, dtype=torch.float32) for n in (D, 1, 1))
    dq, dk, dv = (x.new_empty(x.shape) for x in (q, k, v))
    turns = (q.new_zeros(1 + 8 * B * H * tiles * switches["DETERMINISTIC"], dtype=torch.int32),) if bulk else ()
    macros = {"T": TYPES[q.dtype], "D": D, "Br": Br, "Bc": Bc, **switches}
    strided = (y for x in (dout, out) for y in (x, *map(c_longlong, x.stride()[:3])))
    _launch(
        HERE / file, "attention_delta", (*strided, lse.contiguous(), lse_2, delta, dq_sum, c_int(H), c_int(Nq)),
        grid=tiles * H * B, block=256, macros=macros,
    )  # fmt: skip
    boxes = (dout, Br), (q, Br), (k, Bc), (v, Bc), (dk, 16), (dv, 16)
    numbers = c_int(H), c_int(H // Hk), c_int(Nq), c_int(Nk), c_float(scale), c_int(causal)
    _launch(
        HERE / file, "attention_backward", (*(tensor_map(x, rows) for x, rows in boxes), lse_2, delta, dq_sum, *turns, *numbers),
        grid=-(-Nk // Bc) * Hk * B, block=256, macros=macros,
        shared_bytes=2 * (2 * Bc * D + 4 * Br * D + 2 * Br * Bc) + 4 * (Br * D * bulk + 4 * Br) + 128,
    )  # fmt: skip
    _launch(
        HERE / file, "attention_dq", (dq_sum, dq, c_int(Nq), c_float(scale)),
        grid=tiles * H * B, block=256, macros=macros,
    )  # fmt: skip
    return dq, dk, dv


def _aligned(x):
    """x, or a copy where the copy engine cannot read it: it wants rows at multiples of 16 bytes, and each row once."""
    strides = [stride * x.element_size() for stride, n in zip(x.stride()[:3], x.shape, strict=False) if n > 1]
    fits = x.data_ptr() % 16 == 0 and all(n > 0 and n % 16 == 0 for n in strides)
    return x if fits else x.clone(memory_format=torch.contiguous_format)


def tensor_map(x, rows):
    """The map by which TMA copies `rows` rows of one head of x (B, H, N, D), `_aligned`, as ceil(D / 64) slabs of 128-byte rows.

    A kernel's coordinates are (0, row, 0, head, batch). If 64 does not divide D, a copy brings one slab: (64 * slab, row, ...).
    """
    B, H, N, D = x.shape
    batch, head, row = (x.stride(i) if x.shape[i] > 1 else D for i in range(3))  # a stride that does not matter may be anything
    slabs, columns = (D // 64, 64) if D % 64 == 0 else (1, D)
    shape, strides, box = (B, H, slabs, N, columns), (batch, head, 64, row, 1), (1, 1, slabs, rows, 64)
    if not x.is_cuda:
        from .emulator import tensor_map

        return tensor_map(x.as_strided(shape, strides), box)
    from .nvrtc import tensor_map

    return tensor_map(x.data_ptr(), x.dtype, shape, strides, box)


@functools.cache
def multiprocessors(device):
    """How many blocks run at a time, one each; 3 in the emulator, so that each gets several tiles."""
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 3


def _launch(file, kernel, arguments, **shape):
    if any(x.is_cuda for x in arguments if isinstance(x, torch.Tensor)):
        from .nvrtc import launch
    else:
        from .emulator import launch
    launch(file, kernel, arguments, **shape)
