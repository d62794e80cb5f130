# SPDX-License-Identifier: MIT
"""Rung 0, "fused": FlashAttention-2's backward in three Triton kernels, without atomics: the same bits on every run.

    delta_kernel   delta = rowsum(dO * O)             one number a query, before the loops
    keys_kernel    a program owns Bc keys of one key head and visits the queries; dK_j, dV_j stay on the chip
    queries_kernel a program owns Br queries of one head and visits the keys; dQ_i stays on the chip

    in each tile of the last two
        P  = exp(scale * Q_i K_j^T - lse_i)           recomputed, never stored
        dP = dO_i V_j^T
        dS = P * (dP - delta_i)
        dV_j += P^T dO_i     dK_j += scale * dS^T Q_i                 keys_kernel
        dQ_i += scale * dS K_j                                        queries_kernel

The idea: in a single pass over the tiles many programs contribute to every dQ_i. They would need atomic additions,
whose order changes from run to run. In two passes each result has one owner; the price is that S and dP are computed
twice, in 7 matrix products instead of 5. Grouped heads cost nothing extra, because the owner of a key tile visits the
queries of all heads that share it. Source: FlashAttention-2, Algorithm 2. Left out: the single pass, autotuning, TMA.
Needs torch and Triton only.
"""

import torch
import triton
import triton.language as tl

# (Br, Bc, num_warps, num_stages) of the last two kernels, by bytes an entry and head_dim: up to 64, 128, 256.
KEYS_TILES = {
    2: {64: (32, 128, 8, 3), 128: (32, 128, 8, 2), 256: (32, 64, 8, 1)},
    4: {64: (32, 64, 8, 1), 128: (16, 32, 8, 1), 256: (16, 16, 8, 1)},
}
QUERIES_TILES = {
    2: {64: (128, 64, 8, 3), 128: (128, 64, 8, 2), 256: (64, 32, 8, 1)},
    4: {64: (64, 32, 8, 2), 128: (32, 16, 8, 1), 256: (16, 16, 8, 1)},
}


@triton.jit
def head(x, strides, b, h):
    """Where head h of batch entry b begins, computed in 64 bits because a tensor may have more than 2^31 entries."""
    return x + b.to(tl.int64) * strides[0] + h.to(tl.int64) * strides[1]


@triton.jit
def load_tile(x, first, N, stride, ROWS: tl.constexpr, D: tl.constexpr, D_pad: tl.constexpr):
    """ROWS rows of a matrix (N, D) from row `first` on, as a tile (ROWS, D_pad) with zeros beyond the edges."""
    row, column = first + tl.arange(0, ROWS)[:, None], tl.arange(0, D_pad)[None, :]
    return tl.load(x + row.to(tl.int64) * stride + column, mask=(row < N) & (column < D), other=0.0)


@triton.jit
def store_tile(x, tile, first, N, stride, ROWS: tl.constexpr, D: tl.constexpr, D_pad: tl.constexpr):
    row, column = first + tl.arange(0, ROWS)[:, None], tl.arange(0, D_pad)[None, :]
    tl.store(x + row.to(tl.int64) * stride + column, tile, mask=(row < N) & (column < D))


@triton.jit
def tile_gradients(S, dP, lse, delta, query, key, Nq, Nk, MASKED: tl.constexpr, CAUSAL: tl.constexpr):
    """(P, dS) of one tile, from S and from dP, the gradient of P; all of them may be transposed."""
    S = S - lse
    if MASKED:
        seen = key < Nk
        if CAUSAL:  # query i stands at position i + Nk - Nq
            seen = seen & (key <= query + Nk - Nq)
        S = tl.where(seen, S, float("-inf"))  # this covers lse = -inf too, because such a row sees no key
    P = tl.exp(S)
    return P, P * (dP - delta)


@triton.jit(do_not_specialize=["H", "Nq"])
def delta_kernel(
    dout, out, delta, dout_strides, out_strides, H, Nq, D: tl.constexpr, D_pad: tl.constexpr, Br: tl.constexpr
):
    program, tiles = tl.program_id(0), tl.cdiv(Nq, Br)
    i, bh = program % tiles * Br, program // tiles
    b, h = bh // H, bh % H
    dO = load_tile(head(dout, dout_strides, b, h), i, Nq, dout_strides[2], Br, D, D_pad).to(tl.float32)
    O = load_tile(head(out, out_strides, b, h), i, Nq, out_strides[2], Br, D, D_pad).to(tl.float32)
    row = i + tl.arange(0, Br)
    tl.store(delta + bh.to(tl.int64) * Nq + row, tl.sum(dO * O, 1), mask=row < Nq)


@triton.jit
def visit_queries(
    dK, dV, K_j, V_j, q, dout, lse, delta, q_stride, dout_stride, j, begin, end, Nq, Nk, scale,
    MASKED: tl.constexpr, CAUSAL: tl.constexpr, D: tl.constexpr, D_pad: tl.constexpr, Br: tl.constexpr, Bc: tl.constexpr
):
    """(dK, dV) with the queries from `begin` to `end` added.

    Every tile is computed transposed, with a row for each key and a column for each query, because P^T and dS^T are the
    left factors of the products for dV and dK.
    """
    for i in range(begin, end, Br):
        Q_i = load_tile(q, i, Nq, q_stride, Br, D, D_pad)  # (Br, D)
        dO_i = load_tile(dout, i, Nq, dout_stride, Br, D, D_pad)  # beyond Nq dO and delta are 0 and add nothing
        query, key = i + tl.arange(0, Br), j + tl.arange(0, Bc)
        lse_i = tl.load(lse + query, mask=query < Nq, other=0.0)  # (Br,)
        delta_i = tl.load(delta + query, mask=query < Nq, other=0.0)
        S_T = scale * tl.dot(K_j, tl.trans(Q_i), input_precision="ieee")  # (Bc, Br)
        dP_T = tl.dot(V_j, tl.trans(dO_i), input_precision="ieee")  # (Bc, Br)
        P_T, dS_T = tile_gradients(
            S_T, dP_T, lse_i[None, :], delta_i[None, :], query[None, :], key[:, None], Nq, Nk, MASKED, CAUSAL
        )
        dV = tl.dot(P_T.to(dO_i.dtype), dO_i, dV, input_precision="ieee")
        dK = tl.dot(dS_T.to(Q_i.dtype), Q_i, dK, input_precision="ieee")
    return dK, dV


@triton.jit(do_not_specialize=["Hk", "group", "Nq", "Nk"])  # so that one compiled kernel serves every length
def keys_kernel(
    dout, q, k, v, lse, delta, dk, dv, dout_strides, q_strides, k_strides, v_strides, dk_strides, Hk, group, Nq, Nk,
    scale, CAUSAL: tl.constexpr, D: tl.constexpr, D_pad: tl.constexpr, Br: tl.constexpr, Bc: tl.constexpr
):
    program, tiles = tl.program_id(0), tl.cdiv(Nk, Bc)
    j, bh = program % tiles * Bc, program // tiles  # the first keys start first: when causal, most queries see them
    b, hk = bh // Hk, bh % Hk
    K_j = load_tile(head(k, k_strides, b, hk), j, Nk, k_strides[2], Bc, D, D_pad)  # (Bc, D)
    V_j = load_tile(head(v, v_strides, b, hk), j, Nk, v_strides[2], Bc, D, D_pad)
    dK, dV = tl.zeros((Bc, D_pad), tl.float32), tl.zeros((Bc, D_pad), tl.float32)
    begin, full = 0, 0  # no query before `begin` sees any of these keys, every query from `full` on sees all of them
    if CAUSAL:
        begin = tl.maximum(0, j + Nq - Nk) // Br * Br
        full = tl.minimum(Nq, tl.cdiv(tl.maximum(0, j + Bc - 1 + Nq - Nk), Br) * Br)
    if j + Bc > Nk:  # the ragged last tile of keys is masked for every query
        full = Nq
    for g in range(0, group):  # the query heads that share this key head
        h = hk * group + g
        q_h, dout_h = head(q, q_strides, b, h), head(dout, dout_strides, b, h)
        rows = (bh.to(tl.int64) * group + g) * Nq
        dK, dV = visit_queries(
            dK, dV, K_j, V_j, q_h, dout_h, lse + rows, delta + rows, q_strides[2], dout_strides[2],
            j, begin, full, Nq, Nk, scale, True, CAUSAL, D, D_pad, Br, Bc
        )
        dK, dV = visit_queries(
            dK, dV, K_j, V_j, q_h, dout_h, lse + rows, delta + rows, q_strides[2], dout_strides[2],
            j, full, Nq, Nq, Nk, scale, False, CAUSAL, D, D_pad, Br, Bc
        )
    store_tile(head(dk, dk_strides, b, hk), dK * scale, j, Nk, dk_strides[2], Bc, D, D_pad)
    store_tile(head(dv, dk_strides, b, hk), dV, j, Nk, dk_strides[2], Bc, D, D_pad)


@triton.jit
def visit_keys(
    dQ, Q_i, dO_i, lse_i, delta_i, query, k, v, k_stride, v_stride, begin, end, Nq, Nk, scale,
    MASKED: tl.constexpr, CAUSAL: tl.constexpr, D: tl.constexpr, D_pad: tl.constexpr, Br: tl.constexpr, Bc: tl.constexpr
):
    """dQ with the keys from `begin` to `end` added."""
    for j in range(begin, end, Bc):
        K_j = load_tile(k, j, Nk, k_stride, Bc, D, D_pad)  # (Bc, D)
        V_j = load_tile(v, j, Nk, v_stride, Bc, D, D_pad)
        key = j + tl.arange(0, Bc)
        S = scale * tl.dot(Q_i, tl.trans(K_j), input_precision="ieee")  # (Br, Bc)
        dP = tl.dot(dO_i, tl.trans(V_j), input_precision="ieee")  # (Br, Bc)
        _, dS = tile_gradients(
            S, dP, lse_i[:, None], delta_i[:, None], query[:, None], key[None, :], Nq, Nk, MASKED, CAUSAL
        )
        dQ = tl.dot(dS.to(K_j.dtype), K_j, dQ, input_precision="ieee")
    return dQ


@triton.jit(do_not_specialize=["H", "group", "Nq", "Nk"])
def queries_kernel(
    dout, q, k, v, lse, delta, dq, dout_strides, q_strides, k_strides, v_strides, dq_strides, H, group, Nq, Nk,
    scale, CAUSAL: tl.constexpr, D: tl.constexpr, D_pad: tl.constexpr, Br: tl.constexpr, Bc: tl.constexpr
):
    program, tiles = tl.program_id(0), tl.cdiv(Nq, Br)
    # The last queries start first: when causal, they see most keys.
    i, bh = (tiles - 1 - program % tiles) * Br, program // tiles
    b, h = bh // H, bh % H
    k, v = head(k, k_strides, b, h // group), head(v, v_strides, b, h // group)
    Q_i = load_tile(head(q, q_strides, b, h), i, Nq, q_strides[2], Br, D, D_pad)  # (Br, D)
    dO_i = load_tile(head(dout, dout_strides, b, h), i, Nq, dout_strides[2], Br, D, D_pad)
    rows, query = bh.to(tl.int64) * Nq, i + tl.arange(0, Br)
    lse_i = tl.load(lse + rows + query, mask=query < Nq, other=0.0)  # (Br,)
    delta_i = tl.load(delta + rows + query, mask=query < Nq, other=0.0)
    full, end = Nk, Nk  # all of these queries see all keys before `full`, none sees a key from `end` on
    if CAUSAL:
        full = tl.minimum(Nk, tl.maximum(0, i + 1 + Nk - Nq))
        end = tl.minimum(Nk, tl.maximum(0, i + Br + Nk - Nq))
    full = full // Bc * Bc
    dQ = tl.zeros((Br, D_pad), tl.float32)
    dQ = visit_keys(
        dQ, Q_i, dO_i, lse_i, delta_i, query, k, v, k_strides[2], v_strides[2], 0, full, Nq, Nk, scale,
        False, CAUSAL, D, D_pad, Br, Bc
    )
    dQ = visit_keys(
        dQ, Q_i, dO_i, lse_i, delta_i, query, k, v, k_strides[2], v_strides[2], full, end, Nq, Nk, scale,
        True, CAUSAL, D, D_pad, Br, Bc
    )
    store_tile(head(dq, dq_strides, b, h), dQ * scale, i, Nq, dq_strides[2], Br, D, D_pad)


def backward(dout, q, k, v, out, lse, *, causal=False, scale=None, tile=None):
    """(dq, dk, dv) from dout and out like q (B, H, Nq, D), k and v (B, Hk, Nk, D), D contiguous.

    lse (B, H, Nq) is float32. tile is (Br, Bc).
    """
    if triton.knobs.runtime.interpret and q.dtype == torch.bfloat16:  # the interpreter's numpy has no bfloat16
        grads = backward(*(x.float() for x in (dout, q, k, v, out)), lse, causal=causal, scale=scale, tile=tile)
        return tuple(grad.to(q.dtype) for grad in grads)
    (B, H, Nq, D), (Hk, Nk) = q.shape, k.shape[1:3]
    scale = D**-0.5 if scale is None else scale
    D_pad = max(16, triton.next_power_of_2(D))  # tiles are powers of two, and a tensor core takes 16 columns
    lse, delta = lse.contiguous(), torch.empty_like(lse, memory_format=torch.contiguous_format)
    dq, dk, dv = (torch.empty(x.shape, dtype=x.dtype, device=x.device) for x in (q, k, v))
    strides = [x.stride()[:3] for x in (dout, q, k, v)]
    numbers = (H // Hk, Nq, Nk, scale)

    def options(table):
        Br, Bc, num_warps, num_stages = (*tile, 4, 1) if tile else table[q.element_size()][max(64, D_pad)]
        return dict(CAUSAL=causal, D=D, D_pad=D_pad, Br=Br, Bc=Bc, num_warps=num_warps, num_stages=num_stages)

    with torch.cuda.device_of(q):  # Triton launches on the current device
        delta_kernel[(B * H * triton.cdiv(Nq, 64),)](
            dout, out, delta, strides[0], out.stride()[:3], H, Nq, D=D, D_pad=D_pad, Br=64
        )
        keys_kernel[lambda META: (B * Hk * triton.cdiv(Nk, META["Bc"]),)](
            dout, q, k, v, lse, delta, dk, dv, *strides, dk.stride()[:3], Hk, *numbers, **options(KEYS_TILES)
        )
        queries_kernel[lambda META: (B * H * triton.cdiv(Nq, META["Br"]),)](
            dout, q, k, v, lse, delta, dq, *strides, dq.stride()[:3], H, *numbers, **options(QUERIES_TILES)
        )
    return dq, dk, dv
