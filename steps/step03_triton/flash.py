# SPDX-License-Identifier: MIT
"""FlashAttention to copy: forward and backward with masks, bias, dropout, window, ALiBi, soft-cap, packed sequences.

The kernels are those of fwd_1_tma.py and bwd_1_tma.py. What a feature adds stands in features.py beside this file:

    forward_kernel   owns Br queries, visits the tiles of keys that they see         S, derivative = scores(Q_i K_j^T)
    keys_kernel      owns Bc keys, visits the tiles of queries that see them         the same on S^T = K_j Q_i^T
    queries_kernel   owns Br queries, for dQ                                         dX = P (dP - delta) derivative
    mask_kernel      owns a tile of an additive mask, and sums dS = P (dP - delta) over all that the tile was added to

A program does not know whether its sequence is one of a batch, or one of many packed into one tensor: `open_rows` gives
it a view of its own rows. Nothing is added by atomics, so results are equal to the bit from run to run.

Sources: FlashAttention-2, Algorithms 1 and 2; features.py names those of the features. Left out: paged K and V, fp8,
rotary embedding, block-sparse tables, decoding with split keys. Needs torch, features.py and Triton 3.7, which lets a
field of a tuple be None. Compared with float64 in Triton's interpreter and compiled for GPUs, but not yet run on one.
"""

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from triton.tools.tensor_descriptor import TensorDescriptor

from .features import (
    LN_2,
    LOG2_E,
    SWALLOWS,
    Features,
    find_head,
    find_sequence,
    jump,
    kept,
    load_mask,
    scores,
    tile_ranges,
)

# (Br, Bc, num_warps, num_stages) by head_dim up to 64, 128, 256: of Hopper's copy engine, else by bytes an entry.
TILES = {
    "tma": {64: (64, 128, 4, 2), 128: (64, 64, 4, 3), 256: (128, 64, 8, 2)},
    2: {64: (64, 64, 4, 3), 128: (64, 64, 4, 3), 256: (64, 32, 8, 2)},
    4: {64: (64, 64, 4, 1), 128: (32, 32, 8, 1), 256: (32, 16, 8, 1)},
}
KEYS_TILES = {
    "tma": {64: (64, 64, 4, 3), 128: (64, 64, 4, 2), 256: (64, 64, 8, 2)},
    # With a mask, copies ahead of time would leave too few registers, and ptxas would serialise the products.
    "tma, mask": {64: (32, 64, 4, 1), 128: (32, 64, 4, 1), 256: (32, 64, 8, 1)},
    2: {64: (64, 64, 4, 3), 128: (64, 64, 4, 2), 256: (32, 32, 8, 1)},
    4: {64: (32, 64, 4, 1), 128: (16, 32, 8, 1), 256: (16, 16, 4, 1)},
}
QUERIES_TILES = {
    "tma": {64: (128, 64, 4, 3), 128: (128, 64, 8, 3), 256: (128, 32, 8, 2)},
    2: {64: (64, 64, 4, 2), 128: (64, 64, 4, 2), 256: (64, 32, 8, 1)},
    4: {64: (64, 64, 4, 1), 128: (32, 16, 8, 1), 256: (16, 16, 8, 1)},
}
LENGTHS = ["H", "Hk", "Nq", "Nk", "total_q", "stride", "first_query", "first_key", "left", "right"]


class Rows(NamedTuple):
    """The N rows of one sequence in a tensor (B, H, N, D), to be read in tiles."""

    x: Any  # a pointer, or a descriptor
    strides: Any
    b: Any
    N: Any
    D: Any
    row: Any  # the numbers of a tile's rows and columns, (rows, 1) and (1, D_pad)
    column: Any  # None if x is a descriptor


@triton.jit
def open_rows(
    x, strides, heads, seq, start, N, SIZE: tl.constexpr, D: tl.constexpr, D_pad: tl.constexpr, TMA: tl.constexpr
):
    row, column = tl.arange(0, SIZE)[:, None], tl.arange(0, D_pad)[None, :]
    if seq.f.cu_seqlens_q is not None:
        x += start.to(tl.int64) * strides[2]
        if TMA:  # It ends where the sequence ends.
            x = tl.make_tensor_descriptor(
                x, [1, heads, N, D], [strides[0], strides[1], strides[2], 1], [1, 1, SIZE, D_pad]
            )
    return Rows(x, strides, seq.b, N, D, row, None if TMA else column)


@triton.jit
def open_numbers(x, stride, heads, seq, SIZE: tl.constexpr, TMA: tl.constexpr):
    """The same for lse_2 and delta, (B * H, stride), where each sequence begins at a multiple of 16 bytes."""
    if seq.f.cu_seqlens_q is not None:
        x += (seq.q_start // 4 + seq.number) * 4
        if TMA:
            x = tl.make_tensor_descriptor(x, [heads, seq.Nq], [stride, 1], [1, SIZE])
    return Rows(x, stride, seq.b * heads, seq.Nq, 1, tl.arange(0, SIZE), None if TMA else 0)


@triton.jit
def pointers(rows, h, first):
    """(pointers, which entries exist) of the tile of head h that begins with row `first`."""
    row = first + rows.row
    # Offsets have 64 bits, because a tensor may have more than 2^31 entries.
    head = rows.b.to(tl.int64) * rows.strides[0] + h.to(tl.int64) * rows.strides[1]
    pointer = rows.x + head + row.to(tl.int64) * rows.strides[2] + rows.column
    return pointer, (row < rows.N) & (rows.column < rows.D)


@triton.jit
def load_tile(rows, h, first):
    """The rows of head h from `first` on, as a tile (rows, D_pad) with zeros beyond the N rows and D columns."""
    if rows.column is None:
        tile = rows.x.load([rows.b, h, first, 0])
        return tile.reshape(tile.shape[2], tile.shape[3])
    else:
        pointer, exists = pointers(rows, h, first)
        return tl.load(pointer, mask=exists, other=0.0)


@triton.jit
def store_tile(rows, tile, h, first):
    if rows.column is None:
        rows.x.store([rows.b, h, first, 0], tile.to(rows.x.dtype).reshape(1, 1, tile.shape[0], tile.shape[1]))
    else:
        pointer, exists = pointers(rows, h, first)
        tl.store(pointer, tile, mask=exists)


@triton.jit
def load_numbers(rows, h, first):
    """The numbers (rows,) that belong to the queries of head h from `first` on, and 0 beyond N."""
    if rows.column is None:
        return rows.x.load([rows.b + h, first]).reshape(rows.row.shape[0])
    else:
        row = first + rows.row
        return tl.load(rows.x + (rows.b + h).to(tl.int64) * rows.strides + row, mask=row < rows.N, other=0.0)


@triton.jit
def factor_and_shift(m, c):
    """(f, f m) of P = 2^(f S - f m), two numbers a row; f is c unless m is huge. fwd_0_fused.py tells the reason."""
    power_of_two = (c.to(tl.int32, bitcast=True) & 0x7F800000).to(tl.float32, bitcast=True)
    small = tl.abs(m * c) < 67108864.0
    return tl.where(small, c, power_of_two), tl.where(small, m * c, m * power_of_two)


@triton.jit
def is_swallowed(x):
    """Whether x, the maximum or the lse of a row, says that the mask absorbed all of its scores."""
    return (x < SWALLOWS / 2) & (x > float("-inf"))


@triton.jit
def visit_keys(m, l, O, Q_i, K, V, hk, i, ranges, head, seq, MASKED: tl.constexpr):
    row, column = tl.arange(0, Q_i.shape[0])[:, None], tl.arange(0, K.row.shape[0])[None, :]
    first, last = ranges.whole, ranges.full
    if MASKED:
        first, last = ranges.begin, ranges.end
    for n in range(first, last, K.row.shape[0]):
        j = jump(n, ranges, seq.left) if MASKED else n
        K_j, V_j = load_tile(K, hk, j), load_tile(V, hk, j)  # (Bc, D)
        M = None if head.mask is None else load_mask(i, j, row, column, head, seq, MASKED)
        X = tl.dot(Q_i, tl.trans(K_j), input_precision="ieee")  # (Br, Bc)
        S, _ = scores(X, M, i, j, row, column, head, seq, MASKED)
        m_new = tl.maximum(m, tl.max(S, 1))
        finite = tl.where(m_new == float("-inf"), 0.0, m_new)  # in a row without a key -inf - (-inf) would be NaN
        factor, shift = factor_and_shift(finite, seq.c)
        alpha = tl.exp2((m - finite) * factor)
        P = tl.exp2(S * factor[:, None] - shift[:, None])
        m, l = m_new, alpha * l + tl.sum(P, 1)
        if seq.f.seed is not None:  # after the sum, which dropout does not change
            P = tl.where(kept(i, j, row, column, head, seq), P, 0.0)
        O = tl.dot(P.to(V_j.dtype), V_j, O * alpha[:, None], input_precision="ieee")
    return m, l, O


@triton.jit
def carried_state(lse, O, seq):
    """(m, l, O) after the keys of earlier calls: they count as one key, of score lse and value O."""
    m, l = lse * (LOG2_E / seq.c), tl.full(lse.shape, 1.0, tl.float32)
    if seq.f.bias is not None:
        m, l = tl.where(is_swallowed(lse), SWALLOWS, m), tl.where(is_swallowed(lse), lse / SWALLOWS, l)
    if seq.f.seed is not None:
        O = O * (seq.f.threshold / 256)
    return m, l, O * l[:, None]


@triton.jit(do_not_specialize=LENGTHS)  # so that one compiled kernel serves every length
def forward_kernel(
    q, k, v, out, lse, q_strides, k_strides, v_strides, out_strides, H, group, Nq, Nk, total_q,
    first_query, first_key, left, right, f,
    CARRIED: tl.constexpr, D: tl.constexpr, D_pad: tl.constexpr, Br: tl.constexpr, Bc: tl.constexpr, TMA: tl.constexpr
):
    program, tiles = tl.program_id(0), tl.cdiv(Nq, Br)
    # Neighbouring programs work on the same head, so they find its K and V in the L2 cache. The last queries start
    # first: when causal, they see most keys.
    i, sh = (tiles - 1 - program % tiles) * Br, program // tiles
    s, h = sh // H, sh % H
    hk, Hk = h // group, H // group  # `group` query heads share a key head
    seq = find_sequence(f, s, Nq, Nk, first_query, first_key, left, right)
    if f.cu_seqlens_q is not None:  # Nq is that of the longest sequence.
        if i >= seq.Nq:
            return
    Q = open_rows(q, q_strides, H, seq, seq.q_start, seq.Nq, Br, D, D_pad, TMA)
    K = open_rows(k, k_strides, Hk, seq, seq.k_start, seq.Nk, Bc, D, D_pad, TMA)
    V = open_rows(v, v_strides, Hk, seq, seq.k_start, seq.Nk, Bc, D, D_pad, TMA)
    out = open_rows(out, out_strides, H, seq, seq.q_start, seq.Nq, Br, D, D_pad, TMA and not CARRIED)
    head = find_head(seq, h)

    Q_i = load_tile(Q, h, i)  # (Br, D)
    row = i + tl.arange(0, Br)
    lse += (seq.b.to(tl.int64) * H + h) * total_q + seq.q_start
    m = tl.full((Br,), float("-inf"), tl.float32)
    l, O = tl.zeros((Br,), tl.float32), tl.zeros((Br, D_pad), tl.float32)
    if CARRIED:
        m, l, O = carried_state(tl.load(lse + row, mask=row < seq.Nq, other=0.0), load_tile(out, h, i), seq)
    ranges = tile_ranges(i, seq.shift, left, right, seq.Nk, False, Br, Bc)
    m, l, O = visit_keys(m, l, O, Q_i, K, V, hk, i, ranges, head, seq, False)
    m, l, O = visit_keys(m, l, O, Q_i, K, V, hk, i, ranges, head, seq, True)

    l = tl.where(l == 0, 1.0, l)  # a row that saw no key then gets out = 0 / 1 and lse = -inf + log 1
    O = O / l[:, None]
    if f.seed is not None:
        O = O * f.kept_scale
    lse_i = m * (seq.c * LN_2) + tl.log(l)
    if f.bias is not None:  # Beside a number as large as SWALLOWS log l would be lost, so it becomes a factor.
        lse_i = tl.where(is_swallowed(m), SWALLOWS * l, lse_i)
    store_tile(out, O, h, i)
    tl.store(lse + row, lse_i, mask=row < seq.Nq)


@triton.jit
def in_base_2(lse, seq):
    """lse * log2(e), less by what rounding may have added, and inf where no key is seen. bwd_0_fused.py tells why."""
    lse_2 = lse * LOG2_E
    size = tl.abs(lse_2)
    lse_2 = tl.where(size < 16777216.0, lse_2, lse_2 - size / 4194304.0)
    if seq.f.bias is not None:
        lse_2 = tl.where(is_swallowed(lse), lse, lse_2)
    return tl.where(lse == float("-inf"), float("inf"), lse_2)


@triton.jit
def tile_gradients(X, dP, M, lse_2, delta, i, j, row, column, head, seq, MASKED: tl.constexpr):
    """(P after dropout, dS, dX) of one tile, from X and from dP, the gradient of that P; all may be transposed."""
    f, factor = seq.f, seq.c
    S, derivative = scores(X, M, i, j, row, column, head, seq, MASKED)
    if f.bias is not None:  # Where lse_2 = SWALLOWS l, P is 1 / l. 2^-126 turns SWALLOWS into 0, and leaves -inf.
        factor = tl.where(is_swallowed(lse_2), 1.1754944e-38, factor)
        lse_2 = tl.where(is_swallowed(lse_2), tl.log2(tl.maximum(lse_2 / SWALLOWS, 1.0)), lse_2)
    # No P is larger than 1. Rounding could make it larger where the scores are huge, and even infinite.
    P = tl.exp2(tl.minimum(S * factor - lse_2, 0.0))
    P_kept = P
    if f.seed is not None:
        keep = kept(i, j, row, column, head, seq)
        P_kept, dP = tl.where(keep, P, 0.0), tl.where(keep, dP * f.kept_scale, 0.0)
    dS = P * (dP - delta)
    return P_kept, dS, dS * derivative


@triton.jit(do_not_specialize=LENGTHS)
def delta_kernel(
    dout, out, lse, lse_2, delta, dout_strides, out_strides, stride, H, Nq, Nk, total_q, f,
    D: tl.constexpr, D_pad: tl.constexpr, Br: tl.constexpr
):
    program, tiles = tl.program_id(0), tl.cdiv(Nq, Br)
    i, sh = program % tiles * Br, program // tiles
    s, h = sh // H, sh % H
    seq = find_sequence(f, s, Nq, Nk, 0, 0, None, None)
    dO = load_tile(open_rows(dout, dout_strides, H, seq, seq.q_start, seq.Nq, Br, D, D_pad, False), h, i)
    O = load_tile(open_rows(out, out_strides, H, seq, seq.q_start, seq.Nq, Br, D, D_pad, False), h, i)
    row, head = i + tl.arange(0, Br), seq.b.to(tl.int64) * H + h
    lse_i = tl.load(lse + head * total_q + seq.q_start + row, mask=row < seq.Nq, other=0.0)
    delta += head * stride + row
    tl.store(open_numbers(delta, stride, H, seq, Br, False).x, tl.sum(dO.to(tl.float32) * O, 1), mask=row < seq.Nq)
    lse_2 += head * stride + row
    tl.store(open_numbers(lse_2, stride, H, seq, Br, False).x, in_base_2(lse_i, seq), mask=row < seq.Nq)


@triton.jit
def visit_queries(dK, dV, K_j, V_j, Q, dO, lse_2, delta, j, ranges, head, seq, MASKED: tl.constexpr):
    """(dK, dV) with a range of queries added.

    Every tile is computed transposed, with a row for each key and a column for each query, because P^T and dX^T are the
    left factors of the products for dV and dK.
    """
    row, column = tl.arange(0, Q.row.shape[0])[None, :], tl.arange(0, K_j.shape[0])[:, None]
    first, last = ranges.whole, ranges.full
    if MASKED:
        first, last = ranges.begin, ranges.end
    for n in range(first, last, Q.row.shape[0]):
        i = jump(n, ranges, seq.right) if MASKED else n
        Q_i, dO_i = load_tile(Q, head.h, i), load_tile(dO, head.h, i)  # (Br, D); dO_i is 0 beyond Nq, and adds nothing
        lse_i, delta_i = load_numbers(lse_2, head.h, i), load_numbers(delta, head.h, i)  # (Br,)
        M_T = None if head.mask is None else load_mask(i, j, row, column, head, seq, MASKED)
        X_T = tl.dot(K_j, tl.trans(Q_i), input_precision="ieee")  # (Bc, Br)
        dP_T = tl.dot(V_j, tl.trans(dO_i), input_precision="ieee")  # (Bc, Br)
        P_T, _, dX_T = tile_gradients(
            X_T, dP_T, M_T, lse_i[None, :], delta_i[None, :], i, j, row, column, head, seq, MASKED
        )
        dV = tl.dot(P_T.to(dO_i.dtype), dO_i, dV, input_precision="ieee")
        dK = tl.dot(dX_T.to(Q_i.dtype), Q_i, dK, input_precision="ieee")
    return dK, dV


@triton.jit(do_not_specialize=LENGTHS)
def keys_kernel(
    dout, q, k, v, lse_2, delta, dk, dv, dout_strides, q_strides, k_strides, v_strides, dk_strides, stride,
    Hk, group, Nq, Nk, first_query, first_key, left, right, f,
    D: tl.constexpr, D_pad: tl.constexpr, Br: tl.constexpr, Bc: tl.constexpr, TMA: tl.constexpr
):
    program, tiles = tl.program_id(0), tl.cdiv(Nk, Bc)
    j, sh = program % tiles * Bc, program // tiles  # the first keys start first: when causal, most queries see them
    s, hk, H = sh // Hk, sh % Hk, Hk * group
    seq = find_sequence(f, s, Nq, Nk, first_query, first_key, left, right)
    if f.cu_seqlens_q is not None:
        if j >= seq.Nk:
            return
    dO = open_rows(dout, dout_strides, H, seq, seq.q_start, seq.Nq, Br, D, D_pad, TMA)
    Q = open_rows(q, q_strides, H, seq, seq.q_start, seq.Nq, Br, D, D_pad, TMA)
    K_j = load_tile(open_rows(k, k_strides, Hk, seq, seq.k_start, seq.Nk, Bc, D, D_pad, TMA), hk, j)  # (Bc, D)
    V_j = load_tile(open_rows(v, v_strides, Hk, seq, seq.k_start, seq.Nk, Bc, D, D_pad, TMA), hk, j)
    lse_2, delta = open_numbers(lse_2, stride, H, seq, Br, TMA), open_numbers(delta, stride, H, seq, Br, TMA)
    dK, dV = tl.zeros((Bc, D_pad), tl.float32), tl.zeros((Bc, D_pad), tl.float32)
    # Key j is seen by the queries from j - shift - right to j - shift + left. Those beyond Nq need no mask, because
    # they are 0. The ragged last tile of keys is masked for every query.
    ranges = tile_ranges(j, -seq.shift, right, left, tl.cdiv(seq.Nq, Br) * Br, j + Bc > seq.Nk, Bc, Br)
    for g in range(0, group):  # the query heads that share this key head; with group = 1 Triton drops the loop
        head = find_head(seq, hk * group + g)
        dK, dV = visit_queries(dK, dV, K_j, V_j, Q, dO, lse_2, delta, j, ranges, head, seq, True)
        dK, dV = visit_queries(dK, dV, K_j, V_j, Q, dO, lse_2, delta, j, ranges, head, seq, False)
    if f.seed is not None:
        dV = dV * f.kept_scale
    store_tile(open_rows(dk, dk_strides, Hk, seq, seq.k_start, seq.Nk, Bc, D, D_pad, TMA), dK * f.scale, hk, j)
    store_tile(open_rows(dv, dk_strides, Hk, seq, seq.k_start, seq.Nk, Bc, D, D_pad, TMA), dV, hk, j)


@triton.jit
def add_keys(dQ, Q_i, dO_i, lse_i, delta_i, K, V, hk, i, ranges, head, seq, MASKED: tl.constexpr):
    """dQ with a range of keys added."""
    row, column = tl.arange(0, Q_i.shape[0])[:, None], tl.arange(0, K.row.shape[0])[None, :]
    first, last = ranges.whole, ranges.full
    if MASKED:
        first, last = ranges.begin, ranges.end
    for n in range(first, last, K.row.shape[0]):
        j = jump(n, ranges, seq.left) if MASKED else n
        K_j, V_j = load_tile(K, hk, j), load_tile(V, hk, j)  # (Bc, D)
        M = None if head.mask is None else load_mask(i, j, row, column, head, seq, MASKED)
        X = tl.dot(Q_i, tl.trans(K_j), input_precision="ieee")  # (Br, Bc)
        dP = tl.dot(dO_i, tl.trans(V_j), input_precision="ieee")  # (Br, Bc)
        _, _, dX = tile_gradients(X, dP, M, lse_i[:, None], delta_i[:, None], i, j, row, column, head, seq, MASKED)
        dQ = tl.dot(dX.to(K_j.dtype), K_j, dQ, input_precision="ieee")
    return dQ


@triton.jit(do_not_specialize=LENGTHS)
def queries_kernel(
    dout, q, k, v, lse_2, delta, dq, dout_strides, q_strides, k_strides, v_strides, dq_strides, stride,
    H, group, Nq, Nk, first_query, first_key, left, right, f,
    D: tl.constexpr, D_pad: tl.constexpr, Br: tl.constexpr, Bc: tl.constexpr, TMA: tl.constexpr
):
    program, tiles = tl.program_id(0), tl.cdiv(Nq, Br)
    i, sh = (tiles - 1 - program % tiles) * Br, program // tiles
    s, h = sh // H, sh % H
    hk, Hk = h // group, H // group
    seq = find_sequence(f, s, Nq, Nk, first_query, first_key, left, right)
    if f.cu_seqlens_q is not None:
        if i >= seq.Nq:
            return
    dO_i = load_tile(open_rows(dout, dout_strides, H, seq, seq.q_start, seq.Nq, Br, D, D_pad, TMA), h, i)
    Q_i = load_tile(open_rows(q, q_strides, H, seq, seq.q_start, seq.Nq, Br, D, D_pad, TMA), h, i)  # (Br, D)
    K = open_rows(k, k_strides, Hk, seq, seq.k_start, seq.Nk, Bc, D, D_pad, TMA)
    V = open_rows(v, v_strides, Hk, seq, seq.k_start, seq.Nk, Bc, D, D_pad, TMA)
    lse_i = load_numbers(open_numbers(lse_2, stride, H, seq, Br, TMA), h, i)  # (Br,)
    delta_i = load_numbers(open_numbers(delta, stride, H, seq, Br, TMA), h, i)
    head, dQ = find_head(seq, h), tl.zeros((Br, D_pad), tl.float32)
    ranges = tile_ranges(i, seq.shift, left, right, seq.Nk, False, Br, Bc)
    dQ = add_keys(dQ, Q_i, dO_i, lse_i, delta_i, K, V, hk, i, ranges, head, seq, False)
    dQ = add_keys(dQ, Q_i, dO_i, lse_i, delta_i, K, V, hk, i, ranges, head, seq, True)
    store_tile(open_rows(dq, dq_strides, H, seq, seq.q_start, seq.Nq, Br, D, D_pad, TMA), dQ * f.scale, h, i)


@triton.jit(do_not_specialize=LENGTHS)
def mask_kernel(
    dout, q, k, v, lse_2, delta, dmask, dout_strides, q_strides, k_strides, v_strides, dmask_strides, stride,
    H, group, Nq, Nk, first_query, first_key, left, right, f, batches, heads,
    OVER_QUERIES: tl.constexpr, OVER_KEYS: tl.constexpr,
    D: tl.constexpr, D_pad: tl.constexpr, Br: tl.constexpr, Bc: tl.constexpr
):
    """dmask: dS, summed over the `batches`, the `heads`, and, if OVER_ them, the queries or keys of a mask's entry."""
    tiles_q, tiles_k = 1 if OVER_QUERIES else tl.cdiv(Nq, Br), 1 if OVER_KEYS else tl.cdiv(Nk, Bc)
    program, Hm = tl.program_id(0), H // heads
    j0, i0, sh = program % tiles_k * Bc, program // tiles_k % tiles_q * Br, program // (tiles_k * tiles_q)
    seq = find_sequence(f, sh // Hm, Nq, Nk, first_query, first_key, left, right)
    visits_q = tl.cdiv(seq.Nq, Br) if OVER_QUERIES else 1
    visits_k = tl.cdiv(seq.Nk, Bc) if OVER_KEYS else 1
    row, column = tl.arange(0, Br)[:, None], tl.arange(0, Bc)[None, :]
    dM = tl.zeros((Br, Bc), tl.float32)
    for n in range(0, batches * heads * visits_q * visits_k):
        i, j, bh = i0 + n // visits_k % visits_q * Br, j0 + n % visits_k * Bc, n // (visits_k * visits_q)
        h, hk = sh % Hm + bh % heads, (sh % Hm + bh % heads) // group
        visit = find_sequence(f, sh // Hm + bh // heads, Nq, Nk, first_query, first_key, left, right)
        Q_i = load_tile(open_rows(q, q_strides, H, visit, visit.q_start, visit.Nq, Br, D, D_pad, False), h, i)
        dO_i = load_tile(open_rows(dout, dout_strides, H, visit, visit.q_start, visit.Nq, Br, D, D_pad, False), h, i)
        K_j = load_tile(open_rows(k, k_strides, H, visit, visit.k_start, visit.Nk, Bc, D, D_pad, False), hk, j)
        V_j = load_tile(open_rows(v, v_strides, H, visit, visit.k_start, visit.Nk, Bc, D, D_pad, False), hk, j)
        lse_i = load_numbers(open_numbers(lse_2, stride, H, visit, Br, False), h, i)[:, None]
        delta_i = load_numbers(open_numbers(delta, stride, H, visit, Br, False), h, i)[:, None]
        head = find_head(visit, h)
        M = load_mask(i, j, row, column, head, visit, True)
        X = tl.dot(Q_i, tl.trans(K_j), input_precision="ieee")  # (Br, Bc)
        dP = tl.dot(dO_i, tl.trans(V_j), input_precision="ieee")
        dM += tile_gradients(X, dP, M, lse_i, delta_i, i, j, row, column, head, visit, True)[1]
    if OVER_QUERIES:
        dM, row = tl.sum(dM, 0, keep_dims=True), tl.zeros((1, 1), tl.int32)
    if OVER_KEYS:
        dM, column = tl.sum(dM, 1, keep_dims=True), tl.zeros((1, 1), tl.int32)
    corner = seq.b.to(tl.int64) * dmask_strides[0] + (sh % Hm).to(tl.int64) * dmask_strides[1]
    query, key = tl.cast(seq.q_start + i0, tl.int64) + row, tl.cast(seq.k_start + j0, tl.int64) + column
    exists = (row < seq.Nq - i0) & (column < seq.Nk - j0)
    tl.store(dmask + corner + query * dmask_strides[2] + key * dmask_strides[3], dM, mask=exists)


def prepare(
    q, k, *, causal=False, scale=None, window=None, softcap=None, mask=None, alibi_slopes=None, dropout_p=0.0,
    seed=None, first_query=None, first_key=0, cu_seqlens_q=None, cu_seqlens_k=None, max_seqlen_q=None, max_seqlen_k=None
):  # fmt: skip
    """(sequences, Nq, Nk, positions, features), as the kernels take them, from the options of `forward`."""
    (B, H, Nq, D), Nk = q.shape, k.shape[2]
    f, (left, right) = {"scale": D**-0.5 if scale is None else scale}, window or (None, None)
    left, right = (None if limit in (None, -1) else limit for limit in (left, right))
    if causal:
        right = 0 if right is None else min(0, right)
    if softcap:
        # The interpreter has no inline assembly.
        approximate = q.dtype != torch.float32 and not triton.knobs.runtime.interpret
        f |= {"softcap": softcap, "approximate": 1 if approximate else None}
    if mask is not None:
        seen = mask.dtype == torch.bool
        f |= {"seen" if seen else "bias": mask.view(torch.int8) if seen else mask}
        f["mask_strides"] = mask.expand(B, H, Nq, Nk).stride()
    if cu_seqlens_q is not None:
        f |= {"cu_seqlens_q": cu_seqlens_q, "cu_seqlens_k": cu_seqlens_k}
        B, Nq, Nk = len(cu_seqlens_q) - 1, max_seqlen_q, max_seqlen_k
    if alibi_slopes is not None:
        slopes = alibi_slopes.float()
        f |= {"slopes": slopes, "slope_strides": slopes.expand(B, H).stride()}
    if dropout_p:
        t = round(256 * (1 - dropout_p))
        seed = torch.as_tensor(seed, dtype=torch.int64, device=q.device)
        f |= {"seed": seed, "threshold": t, "kept_scale": 256 / t if t else 0.0}
        f["aligned"] = 1 if first_key % 16 == 0 else None
    return B, Nq, Nk, (first_query, first_key, left, right), Features(**f)


def is_aligned(x):
    """Whether a descriptor can describe x (B, H, N, D): its address and strides are multiples of 16 bytes."""
    return x.numel() > 0 and all(n % 16 == 0 for n in (x.data_ptr(), *(s * x.element_size() for s in strides_of(x))))


def strides_of(x):
    """Strides of batch, head and row. That of a dimension of size 1 is never used, but a descriptor checks it, too."""
    return tuple(stride if size > 1 else 16 for size, stride in zip(x.shape[:3], x.stride()[:3], strict=True))


def describe(x, rows, D_pad):
    """A descriptor of x (B, H, N, D) whose boxes have so many rows."""
    return TensorDescriptor(x, list(x.shape), [*strides_of(x), 1], [1, 1, rows, D_pad])


def has_tma(x):
    """Whether x lies on a Hopper GPU, which has the copy engine; Triton's interpreter has one, too."""
    return triton.knobs.runtime.interpret or torch.cuda.get_device_capability(x.device)[0] == 9


def can_copy(tensors, packed):
    """Whether descriptors are used. Kernels that make their own, one for each sequence, ask for memory to put them."""
    TMA = tensors[0].element_size() == 2 and has_tma(tensors[0]) and all(map(is_aligned, tensors))
    if TMA and packed:  # For each thread anew: autograd calls `backward` in a thread of its own.
        triton.set_allocator(lambda size, alignment, stream: torch.empty(size, dtype=torch.int8, device="cuda"))
    return TMA


def sizes(table, q, tile, TMA, f):
    D_pad = max(16, triton.next_power_of_2(q.shape[-1]))  # tiles are powers of two, and a tensor core takes 16 columns
    kind = "tma" if TMA else q.element_size()
    if TMA and f.mask_strides is not None and "tma, mask" in table:
        kind = "tma, mask"
    Br, Bc, num_warps, num_stages = (*tile, 4, 1) if tile else table[kind][max(64, D_pad)]
    return {"D": q.shape[-1], "D_pad": D_pad, "Br": Br, "Bc": Bc, "num_warps": num_warps, "num_stages": num_stages}


def in_float32(options):
    """The options for the interpreter, whose numpy has no bfloat16."""
    mask = options.get("mask")
    return options | ({"mask": mask.float()} if mask is not None and mask.is_floating_point() else {})


def forward(q, k, v, *, out=None, lse=None, tile=None, **options):
    """(out, lse): q (B, H, Nq, D), k and v (B, Hk, Nk, D), D contiguous; out like q, lse (B, H, Nq) float32.

    Options, of which features.py gives the formula. Query i stands at i + first_query, by default Nk - Nq.

        causal, scale=1/sqrt(D), softcap
        window=(left, right)      both inclusive; None or -1 is no limit
        mask                      broadcast to (B, H, Nq, Nk) without being copied; bool (True = seen) or added
        alibi_slopes              (H,) or (B, H)
        dropout_p, seed           p in steps of 1/256; the seed is an int64 tensor on q's device, or an integer
        first_query, first_key    the positions of the first query and key
        cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k    packed sequences: B is 1, int32 tensors (n + 1,);
                                  alibi_slopes (n, H); rows after the last entry give 0 and -inf
        out, lse                  what earlier calls with other keys gave, float32, contiguous, at first 0 and -inf.
                                  They are changed in place, and returned.
        tile                      (Br, Bc)
    """
    if triton.knobs.runtime.interpret and q.dtype == torch.bfloat16:
        given = dict(out=out, lse=lse, tile=tile)
        new_out, lse = forward(q.float(), k.float(), v.float(), **given, **in_float32(options))
        return new_out if out is not None else new_out.to(q.dtype), lse
    sequences, Nq, Nk, positions, f = prepare(q, k, **options)
    H, Hk, packed, carried = q.shape[1], k.shape[1], f.cu_seqlens_q is not None, out is not None
    if not carried:
        out = (torch.zeros if packed else torch.empty)(q.shape, dtype=q.dtype, device=q.device)
        lse = torch.full(q.shape[:3], -torch.inf, dtype=torch.float32, device=q.device)
    tensors = q, k, v, out
    strides = [strides_of(x) for x in tensors]
    with torch.cuda.device_of(q):  # Triton launches on the current device
        TMA = can_copy(tensors[: 3 if carried else 4], packed)
        how = sizes(TILES, q, tile, TMA, f)
        if TMA and not packed:
            rows = how["Br"], how["Bc"], how["Bc"], how["Br"]
            tensors = [describe(x, n, how["D_pad"]) for x, n in zip(tensors, rows, strict=True)]
            tensors[3] = out if carried else tensors[3]
        forward_kernel[(sequences * H * triton.cdiv(Nq, how["Br"]),)](
            *tensors, lse, *strides, H, H // Hk, Nq, Nk, q.shape[2], *positions, f, CARRIED=carried, TMA=TMA, **how
        )
    return out, lse


def backward(dout, q, k, v, out, lse, *, tile=None, mask_gradient=False, **options):
    """(dq, dk, dv), and dmask if mask_gradient, from dout and out like q, lse (B, H, Nq), and the options of `forward`.

    out and lse may be those of more keys than k and v: dq is then the part that comes from these keys.
    """
    if triton.knobs.runtime.interpret and q.dtype == torch.bfloat16:
        given = *(x.float() for x in (dout, q, k, v, out)), lse
        grads = backward(*given, tile=tile, mask_gradient=mask_gradient, **in_float32(options))
        return tuple(grad.to(x.dtype) for grad, x in zip(grads, (q, k, v, options.get("mask")), strict=False))
    sequences, Nq, Nk, positions, f = prepare(q, k, **options)
    (B, H), Hk, packed = q.shape[:2], k.shape[1], f.cu_seqlens_q is not None
    group, new = H // Hk, torch.zeros if packed else torch.empty
    dq, dk, dv = (new(x.shape, dtype=x.dtype, device=x.device) for x in (q, k, v))
    # Each row of lse_2 and delta, and in it each sequence, begins at a multiple of 16 bytes.
    stride = 4 * (triton.cdiv(q.shape[2], 4) + (sequences if packed else 0))
    lse_2, delta = torch.empty(2, B * H, stride, dtype=torch.float32, device=q.device)
    tensors = dout, q, k, v
    strides = [strides_of(x) for x in tensors]

    def inputs(Br, Bc, D_pad, **_):
        """dout, q, k, v, lse_2 and delta as a kernel with these tiles takes them."""
        if packed or not TMA:
            return *tensors, lse_2, delta
        numbers = [TensorDescriptor(x, [B * H, Nq], [stride, 1], [1, Br]) for x in (lse_2, delta)]
        return *(describe(x, n, D_pad) for x, n in zip(tensors, (Br, Br, Bc, Bc), strict=True)), *numbers

    def results(*grads, rows, D_pad):
        return [describe(grad, rows, D_pad) for grad in grads] if TMA and not packed else grads

    with torch.cuda.device_of(q):  # Triton launches on the current device
        TMA = can_copy((*tensors, dq, dk), packed)
        how = sizes(KEYS_TILES, q, tile, TMA, f)
        D, D_pad = how["D"], how["D_pad"]
        delta_kernel[(sequences * H * triton.cdiv(Nq, 64),)](
            dout, out, lse.contiguous(), lse_2, delta, strides[0], strides_of(out), stride, H, Nq, Nk, q.shape[2], f,
            D=D, D_pad=D_pad, Br=64,
        )
        keys_kernel[(sequences * Hk * triton.cdiv(Nk, how["Bc"]),)](
            *inputs(**how), *results(dk, dv, rows=how["Bc"], D_pad=D_pad), *strides, strides_of(dk), stride,
            Hk, group, Nq, Nk, *positions, f, TMA=TMA, **how,
        )
        how = sizes(QUERIES_TILES, q, tile, TMA, f)
        queries_kernel[(sequences * H * triton.cdiv(Nq, how["Br"]),)](
            *inputs(**how), *results(dq, rows=how["Br"], D_pad=D_pad), *strides, strides_of(dq), stride,
            H, group, Nq, Nk, *positions, f, TMA=TMA, **how,
        )
        if not mask_gradient:
            return dq, dk, dv
        mask = options["mask"]
        shape = (1,) * (4 - mask.ndim) + tuple(mask.shape)
        # One number for all queries and keys is summed over the queries in the kernel, and over the keys after it.
        columns = k.shape[2] if shape[2:] == (1, 1) else shape[3]
        dmask = torch.zeros(*shape[:3], columns, dtype=torch.float32, device=q.device)
        over_queries, over_keys = shape[2] == 1, columns == 1
        batches, heads = sequences if shape[0] == 1 and not packed else 1, H if shape[1] == 1 else 1
        how = sizes(QUERIES_TILES, q, tile, False, f)
        tiles_q = 1 if over_queries else triton.cdiv(Nq, how["Br"])
        tiles_k = 1 if over_keys else triton.cdiv(Nk, how["Bc"])
        mask_kernel[(sequences // batches * (H // heads) * tiles_q * tiles_k,)](
            *tensors, lse_2, delta, dmask, *strides, dmask.expand(B, H, q.shape[2], k.shape[2]).stride(), stride,
            H, group, Nq, Nk, *positions, f, batches, heads, OVER_QUERIES=over_queries, OVER_KEYS=over_keys, **how,
        )
    dmask = dmask if columns == shape[3] else dmask.sum(3)
    return dq, dk, dv, dmask.reshape(mask.shape).to(mask.dtype)
