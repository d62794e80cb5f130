# SPDX-License-Identifier: MIT
"""Rung 0, "fused": FlashAttention-2's backward in three Triton kernels, without atomics: the same bits on every run.

    delta_kernel   delta = rowsum(dO * O), and lse in base 2: one number each a query, before the loops
    dkdv_kernel    a program owns Bc keys of one key head and visits the queries; dK_j, dV_j stay on the chip
    dq_kernel      a program owns Br queries of one head and visits the keys; dQ_i stays on the chip

    in each tile of the last two
        P  = 2^(c Q_i K_j^T - lse_2)                  recomputed, never stored; c = scale log2(e), lse_2 = lse log2(e)
        dP = dO_i V_j^T
        dS = P * (dP - delta_i)
        dV_j += P^T dO_i     dK_j += scale * dS^T Q_i                 dkdv_kernel
        dQ_i += scale * dS K_j                                        dq_kernel

The idea: in a single pass over the tiles many programs contribute to every dQ_i. They would need atomic additions,
whose order changes from run to run. In two passes each result has one owner; the price is that S and dP are computed
twice, in 7 matrix products instead of 5. Grouped heads need no second kernel, because the owner of a key tile visits
the queries of all heads that share it. Source: FlashAttention-2, Algorithm 2. Left out: the single pass, TMA (rung 1),
autotuning. Needs torch, Triton and replay.py.
"""

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl

from .replay import replayed

# (Br, Bc, num_warps, num_stages) of the last two kernels, by `dot_precision` and head_dim: up to 64, 128, 256.
DKDV_TILES = {
    "16 bits": {64: (64, 64, 4, 3), 128: (64, 64, 4, 2), 256: (32, 32, 8, 1)},
    "tf32x3": {64: (32, 32, 4, 1), 128: (32, 16, 4, 1)},
    "ieee": {64: (32, 64, 4, 1), 128: (16, 32, 8, 1), 256: (16, 16, 4, 1)},
}
DQ_TILES = {
    "16 bits": {64: (64, 64, 4, 2), 128: (64, 64, 4, 2), 256: (64, 32, 8, 1)},
    "tf32x3": {64: (32, 32, 4, 1), 128: (32, 32, 4, 1)},
    "ieee": {64: (64, 64, 4, 1), 128: (32, 16, 8, 1), 256: (16, 16, 8, 1)},
}


def dot_precision(x):
    """How matrices like x are multiplied; fwd_0_fused.py explains the words."""
    if x.element_size() == 2:
        return "16 bits"
    if triton.knobs.runtime.interpret or x.shape[-1] > 128:
        return "ieee"
    return "tf32x3" if torch.cuda.get_device_capability(x.device)[0] >= 8 else "ieee"


class Rows(NamedTuple):
    """The N rows of head h, of batch entry b, in a tensor (B, H, N, D)."""

    x: Any  # a pointer to the tensor
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
def load_tile(rows, first, ROWS: tl.constexpr, D: tl.constexpr, D_pad: tl.constexpr):
    """The rows from `first` on, as a tile (ROWS, D_pad) with zeros beyond the N rows and D columns."""
    row, column = first + tl.arange(0, ROWS)[:, None], tl.arange(0, D_pad)[None, :]
    # Offsets have 64 bits, because a tensor may have more than 2^31 entries.
    x, strides, b, h, N = rows
    offset = b.to(tl.int64) * strides[0] + h.to(tl.int64) * strides[1]
    return tl.load(x + offset + row.to(tl.int64) * strides[2] + column, mask=(row < N) & (column < D), other=0.0)


@triton.jit
def store_tile(rows, tile, first, D: tl.constexpr):
    row, column = first + tl.arange(0, tile.shape[0])[:, None], tl.arange(0, tile.shape[1])[None, :]
    x, strides, b, h, N = rows
    offset = b.to(tl.int64) * strides[0] + h.to(tl.int64) * strides[1]
    tl.store(x + offset + row.to(tl.int64) * strides[2] + column, tile, mask=(row < N) & (column < D))


@triton.jit
def load_row_stats(x, bh, first, N, Br: tl.constexpr):
    """The numbers of x (B * H, N) that belong to the queries of head bh from `first` on (Br,), and 0 beyond N."""
    row = first + tl.arange(0, Br)
    return tl.load(x + bh.to(tl.int64) * N + row, mask=row < N, other=0.0)


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


@triton.jit(do_not_specialize=["H", "Nq"])
def delta_kernel(
    dout, out, lse, lse_2, delta, dout_strides, out_strides, H, Nq,
    D: tl.constexpr, D_pad: tl.constexpr, Br: tl.constexpr
):
    program, tiles = tl.program_id(0), tl.cdiv(Nq, Br)
    i, bh = program % tiles * Br, program // tiles
    b, h = bh // H, bh % H
    dO = load_tile(Rows(dout, dout_strides, b, h, Nq), i, Br, D, D_pad).to(tl.float32)
    O = load_tile(Rows(out, out_strides, b, h, Nq), i, Br, D, D_pad).to(tl.float32)
    row = i + tl.arange(0, Br)
    lse_i = load_row_stats(lse, bh, i, Nq, Br)
    rows = bh.to(tl.int64) * Nq + row
    # A row lies in several lanes. Each of them adds up the whole row and stores the sum. The sums are bit-equal if all
    # products are rounded, as in fma(x, y, 0). With dO * O the compiler would fuse a lane's own products into the
    # additions, but not those of the other lanes.
    tl.store(delta + rows, tl.sum(tl.fma(dO, O, 0.0), 1), mask=row < Nq)
    tl.store(lse_2 + rows, in_base_2(lse_i), mask=row < Nq)


@triton.jit
def visit_queries(
    dK, dV, K_j, V_j, queries, bh, j, begin, end, Nk, scale_log2,
    MASKED: tl.constexpr, CAUSAL: tl.constexpr, D: tl.constexpr, Br: tl.constexpr, PRECISION: tl.constexpr
):
    """(dK, dV) with the queries from `begin` to `end` added.

    Every tile is computed transposed, with a row for each key and a column for each query, because P^T and dS^T are the
    left factors of the products for dV and dK.
    """
    Nq = queries.Q.N
    for i in range(begin, end, Br):
        Q_i = load_tile(queries.Q, i, Br, D, K_j.shape[1])  # (Br, D)
        dO_i = load_tile(queries.dO, i, Br, D, K_j.shape[1])  # beyond Nq it is 0, and adds nothing
        lse_i = load_row_stats(queries.lse_2, bh, i, Nq, Br)  # (Br,)
        delta_i = load_row_stats(queries.delta, bh, i, Nq, Br)
        query, key = i + tl.arange(0, Br), j + tl.arange(0, K_j.shape[0])
        S_T = tl.dot(K_j, tl.trans(Q_i), input_precision=PRECISION)  # (Bc, Br)
        dP_T = tl.dot(V_j, tl.trans(dO_i), input_precision=PRECISION)  # (Bc, Br)
        P_T, dS_T = tile_gradients(
            S_T, dP_T, lse_i[None, :], delta_i[None, :], query[None, :], key[:, None], Nq, Nk, scale_log2,
            MASKED, CAUSAL
        )
        dV = tl.dot(P_T.to(dO_i.dtype), dO_i, dV, input_precision=PRECISION)
        dK = tl.dot(dS_T.to(Q_i.dtype), Q_i, dK, input_precision=PRECISION)
    return dK, dV


@triton.jit(do_not_specialize=["Hk", "Nq", "Nk"])  # so that one compiled kernel serves every length
def dkdv_kernel(
    dout, q, k, v, lse_2, delta, dk, dv, dout_strides, q_strides, k_strides, v_strides, dk_strides,
    Hk, group, Nq, Nk, scale,
    CAUSAL: tl.constexpr, D: tl.constexpr, D_pad: tl.constexpr, Br: tl.constexpr,
    Bc: tl.constexpr, PRECISION: tl.constexpr
):
    program, tiles = tl.program_id(0), tl.cdiv(Nk, Bc)
    j, bhk = program % tiles * Bc, program // tiles  # the first keys start first: when causal, most queries see them
    b, hk = bhk // Hk, bhk % Hk
    K_j = load_tile(Rows(k, k_strides, b, hk, Nk), j, Bc, D, D_pad)  # (Bc, D)
    V_j = load_tile(Rows(v, v_strides, b, hk, Nk), j, Bc, D, D_pad)
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
            dK, dV, K_j, V_j, queries, bh, j, begin, full, Nk, scale_log2, True, CAUSAL, D, Br, PRECISION
        )
        dK, dV = visit_queries(
            dK, dV, K_j, V_j, queries, bh, j, full, Nq, Nk, scale_log2, False, CAUSAL, D, Br, PRECISION
        )
    store_tile(Rows(dk, dk_strides, b, hk, Nk), dK * scale, j, D)
    store_tile(Rows(dv, dk_strides, b, hk, Nk), dV, j, D)


@triton.jit
def visit_keys(
    dQ, own, K, V, i, begin, end, Nq, scale_log2,
    MASKED: tl.constexpr, CAUSAL: tl.constexpr, D: tl.constexpr, Bc: tl.constexpr, PRECISION: tl.constexpr
):
    """dQ of the queries `own`, a tile, with the keys from `begin` to `end` added."""
    for j in range(begin, end, Bc):
        K_j = load_tile(K, j, Bc, D, dQ.shape[1])  # (Bc, D)
        V_j = load_tile(V, j, Bc, D, dQ.shape[1])
        query, key = i + tl.arange(0, dQ.shape[0]), j + tl.arange(0, Bc)
        S = tl.dot(own.Q, tl.trans(K_j), input_precision=PRECISION)  # (Br, Bc)
        dP = tl.dot(own.dO, tl.trans(V_j), input_precision=PRECISION)  # (Br, Bc)
        _, dS = tile_gradients(
            S, dP, own.lse_2[:, None], own.delta[:, None], query[:, None], key[None, :], Nq, K.N, scale_log2,
            MASKED, CAUSAL
        )
        dQ = tl.dot(dS.to(K_j.dtype), K_j, dQ, input_precision=PRECISION)
    return dQ


@triton.jit(do_not_specialize=["H", "Nq", "Nk"])
def dq_kernel(
    dout, q, k, v, lse_2, delta, dq, dout_strides, q_strides, k_strides, v_strides, dq_strides,
    H, group, Nq, Nk, scale,
    CAUSAL: tl.constexpr, D: tl.constexpr, D_pad: tl.constexpr, Br: tl.constexpr,
    Bc: tl.constexpr, PRECISION: tl.constexpr
):
    program, tiles = tl.program_id(0), tl.cdiv(Nq, Br)
    # The last queries start first: when causal, they see most keys.
    i, bh = (tiles - 1 - program % tiles) * Br, program // tiles
    b, h = bh // H, bh % H
    hk = h // group
    K, V = Rows(k, k_strides, b, hk, Nk), Rows(v, v_strides, b, hk, Nk)
    Q_i = load_tile(Rows(q, q_strides, b, h, Nq), i, Br, D, D_pad)  # (Br, D)
    dO_i = load_tile(Rows(dout, dout_strides, b, h, Nq), i, Br, D, D_pad)
    own = Queries(Q_i, dO_i, load_row_stats(lse_2, bh, i, Nq, Br), load_row_stats(delta, bh, i, Nq, Br))
    full, end = Nk, Nk  # all of these queries see all keys before `full`, none sees a key from `end` on
    if CAUSAL:
        full = tl.minimum(Nk, tl.maximum(0, i + 1 + Nk - Nq))
        end = tl.minimum(Nk, tl.maximum(0, i + Br + Nk - Nq))
    full = full // Bc * Bc
    scale_log2 = scale * 1.4426950408889634
    dQ = tl.zeros((Br, D_pad), tl.float32)
    dQ = visit_keys(dQ, own, K, V, i, 0, full, Nq, scale_log2, False, CAUSAL, D, Bc, PRECISION)
    dQ = visit_keys(dQ, own, K, V, i, full, end, Nq, scale_log2, True, CAUSAL, D, Bc, PRECISION)
    store_tile(Rows(dq, dq_strides, b, h, Nq), dQ * scale, i, D)


@replayed
def backward(record, dout, q, k, v, out, lse, *, causal=False, scale=None, tile=None):
    """(dq, dk, dv) from dout and out like q (B, H, Nq, D), k and v (B, Hk, Nk, D), D contiguous.

    lse (B, H, Nq) is float32. scale > 0; None is 1/sqrt(D). tile is (Br, Bc).
    """
    (B, H, Nq, D), (Hk, Nk) = q.shape, k.shape[1:3]
    scale = D**-0.5 if scale is None else scale
    D_pad = max(16, triton.next_power_of_2(D))  # tiles are powers of two, and a tensor core takes 16 columns
    lse_2, delta = record.new((B * H, Nq)), record.new((B * H, Nq))
    dq, dk, dv = (record.new(x.shape, like=x) for x in (q, k, v))
    strides = [x.stride()[:3] for x in (dout, q, k, v)]
    sizes = H // Hk, Nq, Nk, scale
    kind = dot_precision(q)
    same = dict(CAUSAL=causal, D=D, D_pad=D_pad, PRECISION="ieee" if kind == "16 bits" else kind)

    def options(table):
        Br, Bc, num_warps, num_stages = (*tile, 4, 1) if tile else table[kind][max(64, D_pad)]
        return dict(Br=Br, Bc=Bc, num_warps=num_warps, num_stages=num_stages, **same)

    lse = record.derive(torch.Tensor.contiguous, lse)
    record.launch(
        delta_kernel, B * H * triton.cdiv(Nq, 64), dout, out, lse, lse_2, delta, strides[0], out.stride()[:3], H, Nq,
        D=D, D_pad=D_pad, Br=64,
    )  # fmt: skip
    how = options(DKDV_TILES)
    record.launch(
        dkdv_kernel, B * Hk * triton.cdiv(Nk, how["Bc"]), dout, q, k, v, lse_2, delta, dk, dv, *strides,
        dk.stride()[:3], Hk, *sizes, **how,
    )  # fmt: skip
    how = options(DQ_TILES)
    record.launch(
        dq_kernel, B * H * triton.cdiv(Nq, how["Br"]), dout, q, k, v, lse_2, delta, dq, *strides,
        dq.stride()[:3], H, *sizes, **how,
    )  # fmt: skip
    return dq, dk, dv
