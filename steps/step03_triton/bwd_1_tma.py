# SPDX-License-Identifier: MIT
"""Rung 1, "tma": rung 0, with every tile copied by Hopper's copy engine, and lse and delta with it.

    a descriptor says once, on the host:  where a tensor (B, H, N, D) begins, its sizes and strides, and that a tile is
                                          a box of (1, 1, Br or Bc, D)
    load_tile is then:                    q.load([b, h, i, 0])

The idea is explained in fwd_1_tma.py. In the backward a tile of queries also has two rows of numbers, lse and delta.
In rung 0 each thread of the program copies them in pieces of 4 bytes, once for each of its entries of the tile. Here
they are boxes too, of (1, Br). A row of a descriptor must begin at a multiple of 16 bytes, so their rows are padded.

The three kernels are those of rung 0: delta_kernel, dkdv_kernel, dq_kernel. Up to head_dim 128 dq_kernel
keeps Q_i and dO_i, the left factors of two of its products, in registers. Tensors that are not aligned to 16 bytes, and
GPUs other than Hopper, take pointers as in rung 0. Where the limit lies: 7 products are computed where the backward
needs 5, so no more than 5/7 of the tensor cores' speed can be reached. A single pass of 5 products would add to dQ by
atomics, in an order that changes from run to run, and its dS would have to go through shared memory.

Source: FlashAttention-2, Algorithm 2. Left out: the single pass, autotuning. Needs torch, Triton and replay.py.
"""

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from triton.tools.tensor_descriptor import TensorDescriptor

from .replay import replayed

# (Br, Bc, num_warps, num_stages) of the last two kernels, by head_dim: up to 64, 128, 256.
DKDV_TILES = {64: (64, 64, 4, 3), 128: (64, 64, 4, 2), 256: (64, 64, 8, 2)}
DQ_TILES = {64: (64, 64, 4, 3), 128: (64, 64, 4, 3), 256: (128, 32, 8, 2)}
DQ_TILES_BY_POINTERS = {64: (128, 64, 4, 3), 128: (128, 64, 8, 3), 256: (128, 32, 8, 2)}


class Rows(NamedTuple):
    """The N rows of head h, of batch entry b, in a tensor (B, H, N, D)."""

    x: Any  # a descriptor of the tensor, or a pointer to it
    strides: Any  # of batch, head and row
    b: Any
    h: Any
    N: Any


class Queries(NamedTuple):
    """What the backward reads of queries: of a whole head, or of one tile."""

    Q: Any  # of a head Rows, of a tile (Br, D)
    dO: Any
    lse_2: Any  # of a head a pointer to lse_2 of all heads, of a tile (Br,)
    delta: Any


@triton.jit
def load_tile(rows, first, ROWS: tl.constexpr, D: tl.constexpr, D_pad: tl.constexpr, TMA: tl.constexpr):
    """The rows from `first` on, as a tile (ROWS, D_pad) with zeros beyond the N rows and D columns.

    rows.x is a descriptor if TMA, else a pointer.
    """
    x, strides, b, h, N = rows
    if TMA:
        return x.load([b, h, first, 0]).reshape(ROWS, D_pad)
    else:
        row, column = first + tl.arange(0, ROWS)[:, None], tl.arange(0, D_pad)[None, :]
        # Offsets have 64 bits, because a tensor may have more than 2^31 entries.
        offset = b.to(tl.int64) * strides[0] + h.to(tl.int64) * strides[1]
        return tl.load(x + offset + row.to(tl.int64) * strides[2] + column, mask=(row < N) & (column < D), other=0.0)


@triton.jit
def store_tile(rows, tile, first, D: tl.constexpr, TMA: tl.constexpr):
    x, strides, b, h, N = rows
    if TMA:
        x.store([b, h, first, 0], tile.to(x.dtype).reshape(1, 1, tile.shape[0], tile.shape[1]))
    else:
        row, column = first + tl.arange(0, tile.shape[0])[:, None], tl.arange(0, tile.shape[1])[None, :]
        offset = b.to(tl.int64) * strides[0] + h.to(tl.int64) * strides[1]
        tl.store(x + offset + row.to(tl.int64) * strides[2] + column, tile, mask=(row < N) & (column < D))


@triton.jit
def load_row_stats(x, stride, bh, first, N, Br: tl.constexpr, TMA: tl.constexpr):
    """The numbers of x (B * H, N) that belong to the queries of head bh from `first` on (Br,), and 0 beyond N."""
    if TMA:
        return x.load([bh, first]).reshape(Br)
    else:
        row = first + tl.arange(0, Br)
        return tl.load(x + bh.to(tl.int64) * stride + row, mask=row < N, other=0.0)


@triton.jit
def tile_gradients(S, dP, lse_2, delta, query, key, Nq, Nk, scale_log2, MASKED: tl.constexpr, CAUSAL: tl.constexpr):
    """(P, dS) of one tile, from S and from dP, the gradient of P; all of them may be transposed."""
    # No P is larger than 1. Rounding could make it larger where the scores are huge, and even infinite.
    P = tl.exp2(tl.minimum(S * scale_log2 - lse_2, 0.0))
    if MASKED:
        seen = key < Nk
        if CAUSAL:  # query i stands at position i + Nk - Nq
            seen = seen & (key <= query + Nk - Nq)
        P = tl.where(seen, P, 0.0)
    return P, P * (dP - delta)


@triton.jit
def in_base_2(lse):
    """lse * log2(e) for P = 2^(c S - lse_2), and infinity for a row that saw no key, whose P is then 0.

    lse, c and this product are rounded, so that c S - lse_2 may be wrong by 2^-22 of lse_2: by 8 if lse_2 = 2^25. So
    from 2^24 on lse_2 is made smaller by as much, to 2^25 - 8 for example. Then a row's largest score gets an exponent
    of at least 0, and `tile_gradients` limits its P to 1. Several keys that share the largest score get P = 1, too:
    neighbouring float32 numbers are so far apart there that lse does not depend on the number of these keys.
    """
    lse_2 = lse * 1.4426950408889634
    size = tl.abs(lse_2)
    lse_2 = tl.where(size < 16777216.0, lse_2, lse_2 - size / 4194304.0)
    return tl.where(lse == float("-inf"), float("inf"), lse_2)


@triton.jit(do_not_specialize=["stride", "H", "Nq"])
def delta_kernel(
    dout, out, lse, lse_2, delta, dout_strides, out_strides, stride, H, Nq,
    D: tl.constexpr, D_pad: tl.constexpr, Br: tl.constexpr
):
    program, tiles = tl.program_id(0), tl.cdiv(Nq, Br)
    i, bh = program % tiles * Br, program // tiles
    b, h = bh // H, bh % H
    dO = load_tile(Rows(dout, dout_strides, b, h, Nq), i, Br, D, D_pad, False).to(tl.float32)
    O = load_tile(Rows(out, out_strides, b, h, Nq), i, Br, D, D_pad, False).to(tl.float32)
    row = i + tl.arange(0, Br)
    lse_i = load_row_stats(lse, Nq, bh, i, Nq, Br, False)
    rows = bh.to(tl.int64) * stride + row
    tl.store(delta + rows, tl.sum(dO * O, 1), mask=row < Nq)
    tl.store(lse_2 + rows, in_base_2(lse_i), mask=row < Nq)


@triton.jit
def visit_queries(
    dK, dV, K_j, V_j, queries, stride, bh, j, begin, end, Nk, scale_log2,
    MASKED: tl.constexpr, CAUSAL: tl.constexpr, D: tl.constexpr, Br: tl.constexpr, TMA: tl.constexpr
):
    """(dK, dV) with the queries from `begin` to `end` added.

    Every tile is computed transposed, with a row for each key and a column for each query, because P^T and dS^T are the
    left factors of the products for dV and dK.
    """
    Nq = queries.Q.N
    for i in range(begin, end, Br):
        Q_i = load_tile(queries.Q, i, Br, D, K_j.shape[1], TMA)  # (Br, D)
        dO_i = load_tile(queries.dO, i, Br, D, K_j.shape[1], TMA)  # beyond Nq it is 0, and adds nothing
        lse_i = load_row_stats(queries.lse_2, stride, bh, i, Nq, Br, TMA)  # (Br,)
        delta_i = load_row_stats(queries.delta, stride, bh, i, Nq, Br, TMA)
        query, key = i + tl.arange(0, Br), j + tl.arange(0, K_j.shape[0])
        S_T = tl.dot(K_j, tl.trans(Q_i), input_precision="ieee")  # (Bc, Br)
        dP_T = tl.dot(V_j, tl.trans(dO_i), input_precision="ieee")  # (Bc, Br)
        P_T, dS_T = tile_gradients(
            S_T, dP_T, lse_i[None, :], delta_i[None, :], query[None, :], key[:, None], Nq, Nk, scale_log2,
            MASKED, CAUSAL
        )
        dV = tl.dot(P_T.to(dO_i.dtype), dO_i, dV, input_precision="ieee")
        dK = tl.dot(dS_T.to(Q_i.dtype), Q_i, dK, input_precision="ieee")
    return dK, dV


@triton.jit(do_not_specialize=["Hk", "Nq", "Nk", "stride"])  # so that one compiled kernel serves every length
def dkdv_kernel(
    dout, q, k, v, lse_2, delta, dk, dv, dout_strides, q_strides, k_strides, v_strides, dk_strides, stride,
    Hk, group, Nq, Nk, scale,
    CAUSAL: tl.constexpr, D: tl.constexpr, D_pad: tl.constexpr, Br: tl.constexpr, Bc: tl.constexpr, TMA: tl.constexpr
):
    program, tiles = tl.program_id(0), tl.cdiv(Nk, Bc)
    j, bhk = program % tiles * Bc, program // tiles  # the first keys start first: when causal, most queries see them
    b, hk = bhk // Hk, bhk % Hk
    K_j = load_tile(Rows(k, k_strides, b, hk, Nk), j, Bc, D, D_pad, TMA)  # (Bc, D)
    V_j = load_tile(Rows(v, v_strides, b, hk, Nk), j, Bc, D, D_pad, TMA)
    dK, dV = tl.zeros((Bc, D_pad), tl.float32), tl.zeros((Bc, D_pad), tl.float32)
    begin, full = 0, 0  # no query before `begin` sees any of these keys, every query from `full` on sees all of them
    if CAUSAL:
        begin = tl.maximum(0, j + Nq - Nk) // Br * Br
        full = tl.minimum(Nq, tl.cdiv(tl.maximum(0, j + Bc - 1 + Nq - Nk), Br) * Br)
    if j + Bc > Nk:  # the ragged last tile of keys is masked for every query
        full = Nq
    scale_log2 = scale * 1.4426950408889634
    for g in range(0, group):  # the query heads that share this key head; with group = 1 Triton drops the loop
        h, bh = hk * group + g, bhk * group + g
        queries = Queries(Rows(q, q_strides, b, h, Nq), Rows(dout, dout_strides, b, h, Nq), lse_2, delta)
        dK, dV = visit_queries(
            dK, dV, K_j, V_j, queries, stride, bh, j, begin, full, Nk, scale_log2, True, CAUSAL, D, Br, TMA
        )
        dK, dV = visit_queries(
            dK, dV, K_j, V_j, queries, stride, bh, j, full, Nq, Nk, scale_log2, False, CAUSAL, D, Br, TMA
        )
    store_tile(Rows(dk, dk_strides, b, hk, Nk), dK * scale, j, D, TMA)
    store_tile(Rows(dv, dk_strides, b, hk, Nk), dV, j, D, TMA)


@triton.jit
def visit_keys(
    dQ, own, K, V, i, begin, end, Nq, scale_log2,
    MASKED: tl.constexpr, CAUSAL: tl.constexpr, D: tl.constexpr, Bc: tl.constexpr, TMA: tl.constexpr
):
    """dQ of the queries `own`, a tile, with the keys from `begin` to `end` added."""
    for j in range(begin, end, Bc):
        K_j = load_tile(K, j, Bc, D, dQ.shape[1], TMA)  # (Bc, D)
        V_j = load_tile(V, j, Bc, D, dQ.shape[1], TMA)
        query, key = i + tl.arange(0, dQ.shape[0]), j + tl.arange(0, Bc)
        S = tl.dot(own.Q, tl.trans(K_j), input_precision="ieee")  # (Br, Bc)
        dP = tl.dot(own.dO, tl.trans(V_j), input_precision="ieee")  # (Br, Bc)
        _, dS = tile_gradients(
            S, dP, own.lse_2[:, None], own.delta[:, None], query[:, None], key[None, :], Nq, K.N, scale_log2,
            MASKED, CAUSAL
        )
        dQ = tl.dot(dS.to(K_j.dtype), K_j, dQ, input_precision="ieee")
    return dQ


@triton.jit(do_not_specialize=["H", "Nq", "Nk", "stride"])
def dq_kernel(
    dout, q, k, v, lse_2, delta, dq, dout_strides, q_strides, k_strides, v_strides, dq_strides, stride,
    H, group, Nq, Nk, scale,
    CAUSAL: tl.constexpr, D: tl.constexpr, D_pad: tl.constexpr, Br: tl.constexpr, Bc: tl.constexpr, TMA: tl.constexpr
):
    program, tiles = tl.program_id(0), tl.cdiv(Nq, Br)
    # The last queries start first: when causal, they see most keys.
    i, bh = (tiles - 1 - program % tiles) * Br, program // tiles
    b, h = bh // H, bh % H
    hk = h // group
    K, V = Rows(k, k_strides, b, hk, Nk), Rows(v, v_strides, b, hk, Nk)
    Q_i = load_tile(Rows(q, q_strides, b, h, Nq), i, Br, D, D_pad, TMA)  # (Br, D)
    dO_i = load_tile(Rows(dout, dout_strides, b, h, Nq), i, Br, D, D_pad, TMA)
    if TMA and D_pad <= 128:
        # wgmma, Hopper's product, takes its left factor from shared memory or from registers. Triton leaves a tile that
        # was just loaded in shared memory, where every product reads it anew, and keeps in registers what was computed.
        # Adding 0 is such a computation. It only pays for tiles that the copy engine loaded, and above head_dim 128
        # there are too few registers.
        Q_i, dO_i = Q_i + 0.0, dO_i + 0.0
    lse_i = load_row_stats(lse_2, stride, bh, i, Nq, Br, TMA)  # (Br,)
    own = Queries(Q_i, dO_i, lse_i, load_row_stats(delta, stride, bh, i, Nq, Br, TMA))
    full, end = Nk, Nk  # all of these queries see all keys before `full`, none sees a key from `end` on
    if CAUSAL:
        full = tl.minimum(Nk, tl.maximum(0, i + 1 + Nk - Nq))
        end = tl.minimum(Nk, tl.maximum(0, i + Br + Nk - Nq))
    full = full // Bc * Bc
    scale_log2 = scale * 1.4426950408889634
    dQ = tl.zeros((Br, D_pad), tl.float32)
    dQ = visit_keys(dQ, own, K, V, i, 0, full, Nq, scale_log2, False, CAUSAL, D, Bc, TMA)
    dQ = visit_keys(dQ, own, K, V, i, full, end, Nq, scale_log2, True, CAUSAL, D, Bc, TMA)
    store_tile(Rows(dq, dq_strides, b, h, Nq), dQ * scale, i, D, TMA)


def is_aligned(x):
    """Whether a descriptor can describe x (B, H, N, D): its address and strides are multiples of 16 bytes."""
    steps = [stride for size, stride in zip(x.shape[:3], x.stride()[:3], strict=True) if size > 1]
    return x.numel() > 0 and x.data_ptr() % 16 == 0 and all(stride * x.element_size() % 16 == 0 for stride in steps)


def describe(x, rows, D_pad):
    """A descriptor of x (B, H, N, D) whose boxes have so many rows."""
    # The stride of a dimension of size 1 is never used, but must be a multiple of 16 bytes too.
    strides = [stride if size > 1 else 16 for size, stride in zip(x.shape[:3], x.stride()[:3], strict=True)]
    return TensorDescriptor(x, list(x.shape), [*strides, 1], [1, 1, rows, D_pad])


def has_tma(x):
    """Whether x lies on a Hopper GPU, which has the copy engine; Triton's interpreter has one, too."""
    return triton.knobs.runtime.interpret or torch.cuda.get_device_capability(x.device)[0] == 9


@replayed
def backward(record, dout, q, k, v, out, lse, *, causal=False, scale=None, tile=None):
    """(dq, dk, dv) from dout and out like q (B, H, Nq, D), k and v (B, Hk, Nk, D), D contiguous.

    lse (B, H, Nq) is float32. scale > 0; None is 1/sqrt(D). tile is (Br, Bc).
    """
    (B, H, Nq, D), (Hk, Nk) = q.shape, k.shape[1:3]
    scale = D**-0.5 if scale is None else scale
    D_pad = max(16, triton.next_power_of_2(D))  # tiles are powers of two, and a tensor core takes 16 columns
    dq, dk, dv = (record.new(x.shape, like=x) for x in (q, k, v))
    stride = 4 * triton.cdiv(Nq, 4)  # each row of lse_2 and delta begins at a multiple of 16 bytes
    lse_2, delta = record.new((B * H, stride)), record.new((B * H, stride))
    tensors = dout, q, k, v
    strides = [x.stride()[:3] for x in tensors]
    TMA = has_tma(q) and all(map(is_aligned, (*tensors, dq, dk)))

    def options(table):
        Br, Bc, num_warps, num_stages = (*tile, 4, 1) if tile else table[max(64, D_pad)]
        return dict(CAUSAL=causal, D=D, D_pad=D_pad, Br=Br, Bc=Bc, TMA=TMA, num_warps=num_warps, num_stages=num_stages)

    def inputs(Br, Bc, **_):
        """dout, q, k, v, lse_2 and delta as a kernel with these tiles takes them."""
        if not TMA:
            return *tensors, lse_2, delta
        row_stats = [TensorDescriptor(x, [B * H, Nq], [stride, 1], [1, Br]) for x in (lse_2, delta)]
        return *(describe(x, n, D_pad) for x, n in zip(tensors, (Br, Br, Bc, Bc), strict=True)), *row_stats

    def results(*grads, rows):
        return [describe(grad, rows, D_pad) for grad in grads] if TMA else grads

    lse = record.derive(torch.Tensor.contiguous, lse)
    record.launch(
        delta_kernel, B * H * triton.cdiv(Nq, 64), dout, out, lse, lse_2, delta, strides[0], out.stride()[:3], stride,
        H, Nq, D=D, D_pad=D_pad, Br=64,
    )  # fmt: skip
    how = options(DKDV_TILES)
    record.launch(
        dkdv_kernel, B * Hk * triton.cdiv(Nk, how["Bc"]), *inputs(**how), *results(dk, dv, rows=how["Bc"]), *strides,
        dk.stride()[:3], stride, Hk, H // Hk, Nq, Nk, scale, **how,
    )  # fmt: skip
    how = options(DQ_TILES if TMA else DQ_TILES_BY_POINTERS)
    record.launch(
        dq_kernel, B * H * triton.cdiv(Nq, how["Br"]), *inputs(**how), *results(dq, rows=how["Br"]), *strides,
        dq.stride()[:3], stride, H, H // Hk, Nq, Nk, scale, **how,
    )  # fmt: skip
    return dq, dk, dv
