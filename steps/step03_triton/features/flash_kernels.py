# SPDX-License-Identifier: MIT
"""The kernels of flash.py: those of fwd_1_tma.py and bwd_1_tma.py, with `scores` between Q K^T and the softmax.

    forward_kernel   owns Br queries, visits the tiles of keys that they see         S, derivative = scores(Q_i K_j^T)
    delta_kernel     delta = rowsum(dO * O), lse in base 2, and the gradient of the sinks, -exp(sink - lse) delta
    dkdv_kernel      owns Bc keys, visits the tiles of queries that see them         the same on S^T = K_j Q_i^T
    dq_kernel        owns Br queries, for dQ                                         dX = P (dP - delta) derivative
    dmask_kernel     owns a tile of an additive mask, and sums dS = P (dP - delta) over all that the tile was added to

scores.py says what a feature does, tiles.py how tiles are read and written. i is the first query of a tile, and j its
first key. Triton takes descriptors, and numbers that change from call to call, only as parameters of their own. So the
lists are long. Nothing is added by atomics, so results are bit-equal from run to run. Sources: FlashAttention-2,
Algorithms 1 and 2. Needs Triton, scores.py and tiles.py.
"""

from typing import Any, NamedTuple

import triton
import triton.language as tl

from .scores import (
    LN_2,
    LOG2_E,
    MASK_FLOOR,
    Tile,
    find_head,
    find_sequence,
    jump,
    kept,
    load_mask,
    scores,
    tile_ranges,
)
from .tiles import (
    load_row_stats,
    load_rows,
    load_tile,
    open_row_stats,
    open_rows,
    product,
    row_stats_by_pointers,
    store_rows,
)

LARGEST = tl.constexpr(2.35e38)  # times log2(e) it is a number of float32
LENGTHS = ["H", "Hk", "Nq", "Nk", "total_q", "stride"]


class Inputs(NamedTuple):
    """What a kernel of the backward reads, beside a mask."""

    dout: Any
    q: Any
    k: Any
    v: Any
    lse_2: Any  # and delta: made by delta_kernel
    delta: Any


class Strides(NamedTuple):
    """Of batch, head and row."""

    dout: Any
    q: Any
    k: Any
    v: Any


class Queries(NamedTuple):
    """What the backward reads of queries: all of it as Rows, or of one tile (Br, D), and (Br,) for lse_2 and delta."""

    Q: Any
    dO: Any
    lse_2: Any
    delta: Any


@triton.jit
def find_tile(tiles, heads, f):
    """(n, s, h): this program owns tile n of head h of sequence s.

    Neighbouring programs work on the same head, so they find its K and V in the L2 cache. If one mask serves all heads,
    neighbours take the same tile of different heads, because the mask is larger than K and V.
    """
    program = tl.program_id(0)
    if f.policy.heads_first is None:
        return program % tiles, program // tiles // heads, program // tiles % heads
    else:
        return program // heads % tiles, program // (heads * tiles), program % heads


@triton.jit
def factor_and_shift(m, c):
    """(f, f m) of P = 2^(f S - f m), two numbers a row; f is c unless m is huge. fwd_0_fused.py says why."""
    power_of_two = (c.to(tl.int32, bitcast=True) & 0x7F800000).to(tl.float32, bitcast=True)
    small = tl.abs(m * c) < 67108864.0
    return tl.where(small, c, power_of_two), tl.where(small, m * c, m * power_of_two)


@triton.jit
def at_mask_floor(x):
    """Whether x, the maximum or the lse of a row, shows that the mask absorbed all scores of this row."""
    return (x < MASK_FLOOR / 2) & (x > float("-inf"))


@triton.jit
def visit_keys(m, l, O, Q_i, K, V, i, ranges, f, seq, head, MASKED: tl.constexpr):
    row = tl.arange(0, Q_i.shape[0])[:, None]
    column = tl.arange(0, K.row.shape[0])[None, :]
    first = ranges.begin if MASKED else ranges.whole
    last = ranges.end if MASKED else ranges.full
    for n in range(first, last, K.row.shape[0]):
        j = jump(n, ranges, f.left) if MASKED else n
        tile = Tile(i, j, row, column)
        K_j = load_tile(K, head.hk, j, f, MASKED)  # (Bc, D)
        V_j = load_tile(V, head.hk, j, f, MASKED)
        M = load_mask(tile, f, seq, head, MASKED) if f.policy.mask_tma is None else 0
        X = product(Q_i, tl.trans(K_j), f)  # (Br, Bc)
        if f.policy.mask_tma is not None:  # It lies in shared memory, and takes no registers during the product.
            M = load_mask(tile, f, seq, head, MASKED)
        S, _ = scores(X, M, tile, f, seq, head, MASKED)
        m_new = tl.maximum(m, tl.max(S, 1))
        finite = tl.where(m_new == float("-inf"), 0.0, m_new)  # in a row without a key -inf - (-inf) would be NaN
        factor, shift = factor_and_shift(finite, seq.c)
        alpha = tl.exp2((m - finite) * factor)
        P = tl.exp2(S * factor[:, None] - shift[:, None])
        m = m_new
        l = alpha * l + tl.sum(P, 1)
        if f.seed is not None:  # after the sum, which dropout does not change
            P = tl.where(kept(tile, f, seq, head), P, 0.0)
        O = product(P.to(V_j.dtype), V_j, f, O * alpha[:, None])
    return m, l, O


@triton.jit
def carried_state(lse, O, f, seq):
    """(m, l, O) after the keys of earlier calls, which count as one key with the score lse and the value O."""
    m = lse * (LOG2_E / seq.c)
    l = tl.full(lse.shape, 1.0, tl.float32)
    if f.added is not None:
        m = tl.where(at_mask_floor(lse), MASK_FLOOR, m)
        l = tl.where(at_mask_floor(lse), lse / MASK_FLOOR, l)
    if f.seed is not None:
        O = O * (f.threshold / 256)
    return m, l, O * l[:, None]


@triton.jit
def add_sink(lse, sink):
    """(lse after one more key of score `sink`, the share of the sum of P that the other keys still have).

    The value of this key is 0, so out is multiplied by that share. step04_ring/merge.py does the same with a part of
    out = 0 and lse = sink.
    """
    largest = tl.maximum(lse, sink)
    finite = tl.where(largest == float("-inf"), 0.0, largest)  # without a key and a sink -inf - (-inf) would be NaN
    before = tl.exp(lse - finite)
    both = before + tl.exp(sink - finite)
    both = tl.where(both == 0, 1.0, both)
    return largest + tl.log(both), before / both


@triton.jit(do_not_specialize=LENGTHS)  # so that one compiled kernel serves every length
def forward_kernel(
    q, k, v, k_box, v_box, mask, out, lse, q_strides, k_strides, v_strides, out_strides, H, group, Nq, Nk, total_q,
    f,
    CARRIED: tl.constexpr, D: tl.constexpr, D_pad: tl.constexpr, Br: tl.constexpr, Bc: tl.constexpr
):
    n, s, h = find_tile(tl.cdiv(Nq, Br), H, f)
    i = (tl.cdiv(Nq, Br) - 1 - n) * Br  # The last queries start first: when causal, they see most keys.
    hk = h // group  # `group` query heads share a key head
    seq = find_sequence(s, Nq, Nk, f)
    if f.cu_seqlens_q is not None:  # Nq is that of the longest sequence.
        if i >= seq.queries.N:
            return
    K = open_rows(k, k_box, k_strides, seq.keys, Bc, D, D_pad)
    V = open_rows(v, v_box, v_strides, seq.keys, Bc, D, D_pad)
    out = open_rows(out, None, out_strides, seq.queries, Br, D, D_pad)
    head = find_head(h, hk, mask, f, seq)

    Q_i = load_rows(open_rows(q, None, q_strides, seq.queries, Br, D, D_pad), h, i)  # (Br, D)
    query = i + tl.arange(0, Br)
    lse += (seq.queries.b.to(tl.int64) * H + h) * total_q + seq.queries.start
    m = tl.full((Br,), float("-inf"), tl.float32)
    l = tl.zeros((Br,), tl.float32)
    O = tl.zeros((Br, D_pad), tl.float32)
    if CARRIED:
        lse_i = tl.load(lse + query, mask=query < seq.queries.N, other=0.0)
        m, l, O = carried_state(lse_i, load_rows(out, h, i), f, seq)
    ranges = tile_ranges(i, seq.shift, f.left, f.right, seq.keys.N, False, Br, Bc)
    m, l, O = visit_keys(m, l, O, Q_i, K, V, i, ranges, f, seq, head, False)
    m, l, O = visit_keys(m, l, O, Q_i, K, V, i, ranges, f, seq, head, True)

    l = tl.where(l == 0, 1.0, l)  # a row that saw no key then gets out = 0 / 1 and lse = -inf + log 1
    O = O / l[:, None]
    if f.seed is not None:
        O = O * f.kept_scale
    lse_i = m * (seq.c * LN_2) + tl.log(l)
    if f.added is not None:  # MASK_FLOOR + log l would be rounded to MASK_FLOOR. So l becomes a factor instead.
        lse_i = tl.where(at_mask_floor(m), MASK_FLOOR * l, lse_i)
    if f.sinks is not None:
        lse_i, kept_share = add_sink(lse_i, tl.load(f.sinks + h))
        O = O * kept_share[:, None]
    store_rows(out, O, h, i)
    tl.store(lse + query, lse_i, mask=query < seq.queries.N)


@triton.jit
def in_base_2(lse, f):
    """lse * log2(e), less what rounding may have added, and inf where no key is seen. bwd_0_fused.py says why."""
    limited = lse
    if f.sinks is not None:  # A sink, and so lse, may be too large to be multiplied. P of every key is 0 there.
        limited = tl.clamp(lse, -LARGEST, LARGEST, propagate_nan=tl.PropagateNan.ALL)
    lse_2 = limited * LOG2_E
    size = tl.abs(lse_2)
    lse_2 = tl.where(size < 16777216.0, lse_2, lse_2 - size / 4194304.0)
    if f.added is not None:
        lse_2 = tl.where(at_mask_floor(lse), lse, lse_2)
    return tl.where(lse == float("-inf"), float("inf"), lse_2)


@triton.jit
def tile_gradients(X, dP, M, lse_2, delta, tile, f, seq, head, MASKED: tl.constexpr):
    """(P after dropout, dS, dX) of one tile, from X and from dP, the gradient of that P; all may be transposed."""
    factor = seq.c
    S, derivative = scores(X, M, tile, f, seq, head, MASKED)
    if f.added is not None:  # Where lse_2 = MASK_FLOOR l, P is 1 / l. 2^-126 turns MASK_FLOOR into 0, and leaves -inf.
        factor = tl.where(at_mask_floor(lse_2), 1.1754944e-38, factor)
        lse_2 = tl.where(at_mask_floor(lse_2), tl.log2(tl.maximum(lse_2 / MASK_FLOOR, 1.0)), lse_2)
    # No P is larger than 1. Rounding could make it larger where the scores are huge, and even infinite.
    P = tl.exp2(tl.minimum(S * factor - lse_2, 0.0))
    P_kept = P
    if f.seed is not None:
        keep = kept(tile, f, seq, head)
        P_kept = tl.where(keep, P, 0.0)
        dP = tl.where(keep, dP * f.kept_scale, 0.0)
    dS = P * (dP - delta)
    return P_kept, dS, dS * derivative


@triton.jit(do_not_specialize=LENGTHS)
def delta_kernel(
    dout, out, lse, lse_2, delta, dsinks, dout_strides, out_strides, stride, H, Nq, Nk, total_q, f,
    D: tl.constexpr, D_pad: tl.constexpr, Br: tl.constexpr
):
    n, s, h = find_tile(tl.cdiv(Nq, Br), H, f)
    i = n * Br
    seq = find_sequence(s, Nq, Nk, f)
    dO = load_rows(open_rows(dout, None, dout_strides, seq.queries, Br, D, D_pad), h, i)
    O = load_rows(open_rows(out, None, out_strides, seq.queries, Br, D, D_pad), h, i)
    query = i + tl.arange(0, Br)
    batch_and_head = seq.queries.b.to(tl.int64) * H + h
    exists = query < seq.queries.N
    lse_i = tl.load(lse + batch_and_head * total_q + seq.queries.start + query, mask=exists, other=0.0)
    delta = open_row_stats(delta, None, stride, H, seq, Br, f)
    lse_2 = open_row_stats(lse_2, None, stride, H, seq, Br, f)
    # A row lies in several lanes. Each of them adds up the whole row and stores the sum. The sums are bit-equal if all
    # products are rounded, as in fma(x, y, 0). With dO * O the compiler would fuse a lane's own products into the
    # additions, but not those of the other lanes.
    products = tl.fma(dO.to(tl.float32), O.to(tl.float32), 0.0)
    tl.store(delta.x + batch_and_head * stride + query, tl.sum(products, 1), mask=exists)
    tl.store(lse_2.x + batch_and_head * stride + query, in_base_2(lse_i, f), mask=exists)
    if f.sinks is not None:  # dS = P (dP - delta) of a key whose value, and so its dP, is 0
        P = tl.exp(tl.load(f.sinks + h) - tl.where(lse_i == float("-inf"), 0.0, lse_i))
        dS = tl.where(exists, -P * tl.sum(products, 1), 0.0)
        tl.store(dsinks + (s * tl.cdiv(Nq, Br) + n).to(tl.int64) * H + h, tl.sum(dS, 0))


@triton.jit
def visit_queries(dK, dV, K_j, V_j, queries, j, ranges, f, seq, head, MASKED: tl.constexpr):
    """(dK, dV) with a range of queries added.

    Every tile is computed transposed, with a row for each key and a column for each query, because P^T and dX^T are the
    left factors of the products for dV and dK.
    """
    row = tl.arange(0, queries.Q.row.shape[0])[None, :]
    column = tl.arange(0, K_j.shape[0])[:, None]
    first = ranges.begin if MASKED else ranges.whole
    last = ranges.end if MASKED else ranges.full
    for n in range(first, last, queries.Q.row.shape[0]):
        i = jump(n, ranges, f.right) if MASKED else n
        tile = Tile(i, j, row, column)
        Q_i = load_tile(queries.Q, head.h, i, f, MASKED)  # (Br, D)
        dO_i = load_tile(queries.dO, head.h, i, f, MASKED)  # beyond Nq it is 0, and adds nothing
        lse_i = load_row_stats(queries.lse_2, head.h, i, f, MASKED)  # (Br,)
        delta_i = load_row_stats(queries.delta, head.h, i, f, MASKED)
        M_T = load_mask(tile, f, seq, head, MASKED)
        X_T = product(K_j, tl.trans(Q_i), f)  # (Bc, Br)
        dP_T = product(V_j, tl.trans(dO_i), f)  # (Bc, Br)
        P_T, _, dX_T = tile_gradients(X_T, dP_T, M_T, lse_i[None, :], delta_i[None, :], tile, f, seq, head, MASKED)
        dV = product(P_T.to(dO_i.dtype), dO_i, f, dV)
        dK = product(dX_T.to(Q_i.dtype), Q_i, f, dK)
    return dK, dV


@triton.jit(do_not_specialize=LENGTHS)
def dkdv_kernel(
    inputs, dout_box, q_box, lse_box, delta_box, mask, dk, dv, strides, dk_strides, stride, Hk, group, Nq, Nk, f,
    D: tl.constexpr, D_pad: tl.constexpr, Br: tl.constexpr, Bc: tl.constexpr
):
    n, s, hk = find_tile(tl.cdiv(Nk, Bc), Hk, f)
    j = n * Bc  # The first keys start first: when causal, most queries see them.
    H = Hk * group
    seq = find_sequence(s, Nq, Nk, f)
    if f.cu_seqlens_q is not None:
        if j >= seq.keys.N:
            return
    dO = open_rows(inputs.dout, dout_box, strides.dout, seq.queries, Br, D, D_pad)
    Q = open_rows(inputs.q, q_box, strides.q, seq.queries, Br, D, D_pad)
    K_j = load_rows(open_rows(inputs.k, None, strides.k, seq.keys, Bc, D, D_pad), hk, j)  # (Bc, D)
    V_j = load_rows(open_rows(inputs.v, None, strides.v, seq.keys, Bc, D, D_pad), hk, j)
    lse_2 = open_row_stats(inputs.lse_2, lse_box, stride, H, seq, Br, f)
    delta = open_row_stats(inputs.delta, delta_box, stride, H, seq, Br, f)
    queries = Queries(Q, dO, lse_2, delta)
    dK = tl.zeros((Bc, D_pad), tl.float32)
    dV = tl.zeros((Bc, D_pad), tl.float32)
    # Key j is seen by the queries from j - shift - right to j - shift + left. Those beyond Nq need no mask, because
    # they are 0. The ragged last tile of keys is masked for every query.
    end = tl.cdiv(seq.queries.N, Br) * Br if f.cu_seqlens_q is None else seq.queries.N
    ranges = tile_ranges(j, -seq.shift, f.right, f.left, end, j + Bc > seq.keys.N, Bc, Br)
    for g in range(0, group):  # the query heads that share this key head; with group = 1 Triton drops the loop
        head = find_head(hk * group + g, hk, mask, f, seq)
        dK, dV = visit_queries(dK, dV, K_j, V_j, queries, j, ranges, f, seq, head, True)
        dK, dV = visit_queries(dK, dV, K_j, V_j, queries, j, ranges, f, seq, head, False)
    if f.seed is not None:
        dV = dV * f.kept_scale
    store_rows(open_rows(dk, None, dk_strides, seq.keys, Bc, D, D_pad), dK * f.scale, hk, j)
    store_rows(open_rows(dv, None, dk_strides, seq.keys, Bc, D, D_pad), dV, hk, j)


@triton.jit
def add_keys(dQ, own, K, V, i, ranges, f, seq, head, MASKED: tl.constexpr):
    """dQ of the queries `own` with a range of keys added."""
    row = tl.arange(0, own.Q.shape[0])[:, None]
    column = tl.arange(0, K.row.shape[0])[None, :]
    first = ranges.begin if MASKED else ranges.whole
    last = ranges.end if MASKED else ranges.full
    for n in range(first, last, K.row.shape[0]):
        j = jump(n, ranges, f.left) if MASKED else n
        tile = Tile(i, j, row, column)
        K_j = load_tile(K, head.hk, j, f, MASKED)  # (Bc, D)
        V_j = load_tile(V, head.hk, j, f, MASKED)
        M = load_mask(tile, f, seq, head, MASKED)
        X = product(own.Q, tl.trans(K_j), f)  # (Br, Bc)
        dP = product(own.dO, tl.trans(V_j), f)  # (Br, Bc)
        _, _, dX = tile_gradients(X, dP, M, own.lse_2[:, None], own.delta[:, None], tile, f, seq, head, MASKED)
        dQ = product(dX.to(K_j.dtype), K_j, f, dQ)
    return dQ


@triton.jit
def load_left_factor(rows, h, first, f):
    """The tile of `load_rows`, in registers where that is faster: bwd_1_tma.py says why adding 0 moves it there.

    This is slower for tiles that pointers loaded, and with dropout, whose random numbers need the registers.
    """
    by_pointers = (f.policy.tma is None) or (f.cu_seqlens_q is not None)
    if by_pointers or (f.seed is not None) or (rows.column.shape[1] != 128):
        return load_rows(rows, h, first)
    else:
        return load_tile(rows, h, first, f, False) + 0.0


@triton.jit(do_not_specialize=LENGTHS)
def dq_kernel(
    inputs, dout_box, q_box, k_box, v_box, mask, dq, strides, dq_strides, stride, H, group, Nq, Nk, f,
    D: tl.constexpr, D_pad: tl.constexpr, Br: tl.constexpr, Bc: tl.constexpr
):
    n, s, h = find_tile(tl.cdiv(Nq, Br), H, f)
    i = (tl.cdiv(Nq, Br) - 1 - n) * Br
    hk = h // group
    seq = find_sequence(s, Nq, Nk, f)
    if f.cu_seqlens_q is not None:
        if i >= seq.queries.N:
            return
    dO_i = load_left_factor(open_rows(inputs.dout, dout_box, strides.dout, seq.queries, Br, D, D_pad), h, i, f)
    Q_i = load_left_factor(open_rows(inputs.q, q_box, strides.q, seq.queries, Br, D, D_pad), h, i, f)  # (Br, D)
    K = open_rows(inputs.k, k_box, strides.k, seq.keys, Bc, D, D_pad)
    V = open_rows(inputs.v, v_box, strides.v, seq.keys, Bc, D, D_pad)
    lse_i = row_stats_by_pointers(open_row_stats(inputs.lse_2, None, stride, H, seq, Br, f), h, i)  # (Br,)
    delta_i = row_stats_by_pointers(open_row_stats(inputs.delta, None, stride, H, seq, Br, f), h, i)
    own = Queries(Q_i, dO_i, lse_i, delta_i)
    head = find_head(h, hk, mask, f, seq)
    dQ = tl.zeros((Br, D_pad), tl.float32)
    ranges = tile_ranges(i, seq.shift, f.left, f.right, seq.keys.N, False, Br, Bc)
    dQ = add_keys(dQ, own, K, V, i, ranges, f, seq, head, False)
    dQ = add_keys(dQ, own, K, V, i, ranges, f, seq, head, True)
    store_rows(open_rows(dq, None, dq_strides, seq.queries, Br, D, D_pad), dQ * f.scale, h, i)


@triton.jit
def tile_dS(inputs, strides, stride, H, h, hk, mask, tile, f, seq, D: tl.constexpr, D_pad: tl.constexpr):
    """dS of one tile of scores, for which all that it needs is read by pointers."""
    i, j, row, column = tile
    Br: tl.constexpr = row.shape[0]
    Bc: tl.constexpr = column.shape[1]
    Q_i = load_rows(open_rows(inputs.q, None, strides.q, seq.queries, Br, D, D_pad), h, i)
    dO_i = load_rows(open_rows(inputs.dout, None, strides.dout, seq.queries, Br, D, D_pad), h, i)
    K_j = load_rows(open_rows(inputs.k, None, strides.k, seq.keys, Bc, D, D_pad), hk, j)
    V_j = load_rows(open_rows(inputs.v, None, strides.v, seq.keys, Bc, D, D_pad), hk, j)
    lse_i = row_stats_by_pointers(open_row_stats(inputs.lse_2, None, stride, H, seq, Br, f), h, i)[:, None]
    delta_i = row_stats_by_pointers(open_row_stats(inputs.delta, None, stride, H, seq, Br, f), h, i)[:, None]
    head = find_head(h, hk, mask, f, seq)
    M = load_mask(tile, f, seq, head, True)
    X = product(Q_i, tl.trans(K_j), f)  # (Br, Bc)
    dP = product(dO_i, tl.trans(V_j), f)
    _, dS, _ = tile_gradients(X, dP, M, lse_i, delta_i, tile, f, seq, head, True)
    return dS


@triton.jit(do_not_specialize=LENGTHS)
def dmask_kernel(
    inputs, mask, dmask, strides, dmask_strides, stride, H, group, Nq, Nk, f, batches, heads,
    OVER_QUERIES: tl.constexpr, OVER_KEYS: tl.constexpr,
    D: tl.constexpr, D_pad: tl.constexpr, Br: tl.constexpr, Bc: tl.constexpr
):
    """dmask: dS summed over all scores to which an entry of the mask was added.

    These are those of the `batches`, the `heads`, and if OVER_QUERIES or OVER_KEYS of all queries or keys. A program
    owns one tile of the mask, and visits all tiles of scores to which it was added.
    """
    tiles_q = 1 if OVER_QUERIES else tl.cdiv(Nq, Br)
    tiles_k = 1 if OVER_KEYS else tl.cdiv(Nk, Bc)
    program = tl.program_id(0)
    mask_heads = H // heads
    own_j = program % tiles_k * Bc
    own_i = program // tiles_k % tiles_q * Br
    sequence_and_head = program // (tiles_k * tiles_q)
    own_s = sequence_and_head // mask_heads
    own = find_sequence(own_s, Nq, Nk, f)
    visits_q = tl.cdiv(own.queries.N, Br) if OVER_QUERIES else 1
    visits_k = tl.cdiv(own.keys.N, Bc) if OVER_KEYS else 1
    row = tl.arange(0, Br)[:, None]
    column = tl.arange(0, Bc)[None, :]
    dM = tl.zeros((Br, Bc), tl.float32)
    visits = batches * heads * visits_q * visits_k
    own_h = sequence_and_head % mask_heads
    for n in range(0, visits):
        i = own_i + n // visits_k % visits_q * Br
        j = own_j + n % visits_k * Bc
        batch_and_head = n // (visits_k * visits_q)
        h = own_h + batch_and_head % heads
        hk = h // group
        seq = find_sequence(own_s + batch_and_head // heads, Nq, Nk, f)
        tile = Tile(i, j, row, column)
        dM += tile_dS(inputs, strides, stride, H, h, hk, mask, tile, f, seq, D, D_pad)
    if OVER_QUERIES:
        dM = tl.sum(dM, 0, keep_dims=True)
        row = tl.zeros((1, 1), tl.int32)
    if OVER_KEYS:
        dM = tl.sum(dM, 1, keep_dims=True)
        column = tl.zeros((1, 1), tl.int32)
    corner = own.queries.b.to(tl.int64) * dmask_strides[0] + own_h.to(tl.int64) * dmask_strides[1]
    query = tl.cast(own.queries.start + own_i, tl.int64) + row
    key = tl.cast(own.keys.start + own_j, tl.int64) + column
    exists = (row < own.queries.N - own_i) & (column < own.keys.N - own_j)
    tl.store(dmask + corner + query * dmask_strides[2] + key * dmask_strides[3], dM, mask=exists)
