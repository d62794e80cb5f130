# SPDX-License-Identifier: MIT
"""The host side of Hopper's kernels: tensor maps, tiles, shared memory, grids.

The tensors' device decides: on a GPU (sm_90) the files are compiled with NVRTC, on a CPU with g++ behind an emulation of CUDA.
Needs torch; beside it the .cu files, ptx.cuh, wgmma.py, nvrtc.py and cache.py; on a GPU cuda.core and NVRTC; on a CPU emulator/
and g++.
"""

import functools
from ctypes import c_float, c_int, c_longlong
from pathlib import Path

import torch

from . import nvrtc

HERE = Path(__file__).parent
TYPES = {torch.bfloat16: "bf16", torch.float16: "fp16"}
TILES = {32: (192, 128), 64: (192, 128), 96: (192, 96), 128: (128, 128), 256: (128, 80)}  # (Br, Bc) by head_dim


def wgmma_forward(q, k, v, *, causal=False, scale=None, tile=None):
    """(out, lse): bfloat16 or float16 q (B, H, Nq, D), k and v (B, Hk, Nk, D), D contiguous; out like q, lse (B, H, Nq) float32.

    D is 32, 64, 96, 128 or 256, H a multiple of Hk. tile is (Br, Bc): Br 64, 128 or 192, Bc a multiple of 16. Rung 6.
    """
    return _forward(q, k, v, "fwd_6_wgmma.cu", causal, scale, tile or (128, _tile("fwd_6_wgmma.cu", q, TILES)[1]))


def roles_forward(q, k, v, *, causal=False, scale=None, tile=None):
    """The same by rung 7."""
    return _forward(q, k, v, "fwd_7_roles.cu", causal, scale, tile)


def hopper_forward(q, k, v, *, causal=False, scale=None, tile=None, **switches):
    """The same by rung 8. switches: macros at the head of fwd_8_hopper.cu, such as PINGPONG=0, to measure what they bring."""
    return _forward(q, k, v, "fwd_8_hopper.cu", causal, scale, tile, *switches.items())


def _forward(q, k, v, *options):
    B, H, Nq, D = q.shape  # apart, as a shape in one piece doubles the time of new_empty
    out, lse = q.new_empty(B, H, Nq, D), q.new_empty(B, H, Nq, dtype=torch.float32)
    _run(_forward_plan, (q, k, v), (out, lse), options)
    return out, lse


def _forward_plan(q, k, v, out, lse, file, causal, scale, tile, *switches):
    _check_gpu(file, q)
    usual, switches = _tile(file, q, TILES), dict(switches)
    if unknown := [name for name in switches if f"#ifndef {name}\n" not in (HERE / file).read_text()]:
        raise TypeError(f"{file} has no switch {', '.join(unknown)}.")
    q, k, v, (Br, Bc) = *map(_aligned, (q, k, v)), tile or usual
    (B, H, Nq, D), (Hk, Nk) = q.shape, k.shape[1:3]
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
    yield dict(
        file=HERE / file, kernel="attention_forward", arguments=arguments,
        grid=min(tiles, blocks) if persistent else tiles, block=2 * Br + (0 if file == "fwd_6_wgmma.cu" else 128),
        shared_bytes=(Q_tiles * Br + KV_tiles * Bc) * -(-D // 64) * 128 + 128,
        macros={"T": TYPES[q.dtype], "D": D, "Br": Br, "Bc": Bc, "CAUSAL": int(causal), **switches},
    )  # fmt: skip


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
    (B, H, Nq, D), usual = q.shape, _tile(file, q, BACKWARD_TILES)
    Br, Bc = tile or usual
    if (Br, Bc) != usual:
        raise ValueError(f"{file} has one tile for each head_dim, {BACKWARD_TILES}; got {(Br, Bc)} for head_dim {D}.")
    tiles = -(-Nq // Br)
    dq_sum, lse_2, delta = (q.new_empty(B, H, tiles * Br, n, dtype=torch.float32) for n in (D, 1, 1))
    dq, dk, dv = (torch.empty_like(x, memory_format=torch.contiguous_format) for x in (q, k, v))
    bulk = file == "bwd_3_hopper.cu"
    turns = q.new_zeros(bulk * (1 + 8 * B * H * tiles * switches.get("DETERMINISTIC", 0)), dtype=torch.int32)
    others = lse.contiguous(), lse_2, delta, dq_sum, dq, dk, dv, turns
    _run(_backward_plan, (dout, q, k, v, out), others, (file, causal, scale, Br, Bc, *switches.items()))
    return dq, dk, dv


def _backward_plan(dout, q, k, v, out, lse, lse_2, delta, dq_sum, dq, dk, dv, turns, file, causal, scale, Br, Bc, *switches):
    _check_gpu(file, q)
    dout, q, k, v, out = map(_aligned, (dout, q, k, v, out))
    (B, H, Nq, D), (Hk, Nk) = q.shape, k.shape[1:3]
    bulk, scale, tiles = file == "bwd_3_hopper.cu", D**-0.5 if scale is None else scale, -(-Nq // Br)
    common = {"file": HERE / file, "block": 256, "macros": {"T": TYPES[q.dtype], "D": D, "Br": Br, "Bc": Bc, **dict(switches)}}
    strided = (y for x in (dout, out) for y in (x, *map(c_longlong, x.stride()[:3])))
    numbers = c_int(H), c_int(Nq)
    yield dict(kernel="attention_delta", arguments=(*strided, lse, lse_2, delta, dq_sum, *numbers), grid=tiles * H * B, **common)
    boxes = (dout, Br), (q, Br), (k, Bc), (v, Bc), (dk, 16), (dv, 16)
    sums = lse_2, delta, dq_sum, *[turns] * bulk
    numbers = c_int(H), c_int(H // Hk), c_int(Nq), c_int(Nk), c_float(scale), c_int(causal)
    yield dict(
        kernel="attention_backward", arguments=(*(tensor_map(x, rows) for x, rows in boxes), *sums, *numbers),
        grid=-(-Nk // Bc) * Hk * B, shared_bytes=2 * (2 * Bc * D + 4 * Br * D + 2 * Br * Bc) + 4 * (Br * D * bulk + 4 * Br) + 128,
        **common,
    )  # fmt: skip
    yield dict(kernel="attention_dq", arguments=(dq_sum, dq, c_int(Nq), c_float(scale)), grid=tiles * H * B, **common)


def _tile(file, q, tiles):
    """(Br, Bc) for q's head_dim."""
    if (D := q.shape[-1]) not in tiles:
        raise ValueError(f"{file} takes head_dim {', '.join(map(str, tiles))}; got {D}.")
    return tiles[D]


def _check_gpu(file, x):
    if x.is_cuda and torch.cuda.get_device_capability(x.device) != (9, 0):
        raise RuntimeError(f"{file} needs a GPU of compute capability 9.0 (H100, H200); kernels.py's launchers run on others.")


def _aligned(x):
    """x, or a copy where the copy engine cannot read it: it wants rows at multiples of 16 bytes, and each row once."""
    strides = [stride * x.element_size() for stride, n in zip(x.stride()[:3], x.shape, strict=False) if n > 1]
    fits = x.data_ptr() % 16 == 0 and all(n > 0 and n % 16 == 0 for n in strides)
    return x if fits else x.clone(memory_format=torch.contiguous_format)


def tensor_map(x, rows):
    """The map by which TMA copies `rows` rows of one head of x (B, H, N, D), `_aligned`, as ceil(D / 64) slabs of 128-byte rows.

    A kernel's coordinates are (0, row, 0, head, batch). If 64 does not divide D, a copy brings one slab: (64 * slab, row, ...).
    """
    tensor_map = nvrtc.tensor_map
    if not x.is_cuda:
        from .emulator import tensor_map
    B, H, N, D = x.shape
    batch, head, row = (x.stride(i) if x.shape[i] > 1 else D for i in range(3))  # a stride that does not matter may be anything
    slabs, columns = (D // 64, 64) if D % 64 == 0 else (1, D)
    map = tensor_map(x.as_strided((B, H, slabs, N, columns), (batch, head, 64, row, 1)), (1, 1, slabs, rows, 64))
    map.tensor = x  # keeps it alive, and tells Launch whose address to replace
    return map


@functools.cache
def multiprocessors(device):
    """How many blocks run at a time, one each; 3 in the emulator, so that each gets several tiles."""
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 3


def _run(plan, inputs, others, options):
    """Launches the kernels that plan(*inputs, *others, *options) yields; on a GPU what is yielded is kept for the next call."""
    if inputs[0].is_cuda:
        nvrtc.run(plan, inputs, others, options)
        return
    from .emulator import launch

    for what in plan(*inputs, *others, *options):
        launch(**what)
