# SPDX-License-Identifier: MIT
"""Bug hunt 03.bug2: attention with dropout, for few queries and keys, forward and backward.

    P   = exp(S - lse)                      softmax
    Z   = 1 / (1 - p) where an entry is kept, 0 where it is dropped: seed, head, query and key decide
    out = (P Z) V
    dV  = (P Z)^T dO,  dP = (dO V^T) Z,  dS = P (dP - delta),  delta = rowsum(dO out)
    dQ  = scale dS K,  dK = scale dS^T Q

The forward has a program for each tile of queries, with all keys at once. The backward has one for each tile of keys,
with all queries at once. Z is not stored: the backward draws it again. Needs torch and Triton only.
"""

import torch
import triton
import triton.language as tl

T = 16  # rows of a tile


@triton.jit
def load(x, N, ROWS: tl.constexpr, D: tl.constexpr):
    """The N rows that begin at x, as a tile of ROWS rows with zeros behind the last one."""
    row, column = tl.arange(0, ROWS)[:, None], tl.arange(0, D)[None, :]
    return tl.load(x + row * D + column, mask=row < N, other=0.0)


@triton.jit
def store(x, tile, N, ROWS: tl.constexpr, D: tl.constexpr):
    row, column = tl.arange(0, ROWS)[:, None], tl.arange(0, D)[None, :]
    tl.store(x + row * D + column, tile, mask=row < N)


@triton.jit
def dot(a, b):
    return tl.dot(a, b, input_precision="ieee")


@triton.jit
def dropout_factors(seed, head, query, key, Nq, Nk, p):
    """Z. Each entry of P has a number of its own, and with it a random number between 0 and 1."""
    return tl.where(tl.rand(seed, (head * Nq + query) * Nk + key) >= p, 1 / (1 - p), 0.0)


@triton.jit
def forward_kernel(
    q, k, v, out, lse, Nq, Nk, scale, p, seed, D: tl.constexpr, T: tl.constexpr, KEYS: tl.constexpr
):  # fmt: skip
    head, i = tl.program_id(0), tl.program_id(1) * T
    Q = load(q + (head * Nq + i) * D, Nq - i, T, D)
    K, V = load(k + head * Nk * D, Nk, KEYS, D), load(v + head * Nk * D, Nk, KEYS, D)
    row, key = tl.arange(0, T), tl.arange(0, KEYS)[None, :]
    S = tl.where(key < Nk, scale * dot(Q, tl.trans(K)), float("-inf"))  # (T, KEYS)
    m = tl.max(S, 1)
    l = tl.sum(tl.exp(S - m[:, None]), 1)
    P = tl.exp(S - m[:, None]) / l[:, None]
    Z = dropout_factors(seed, head, i + row[:, None], key, Nq, Nk, p)
    store(out + (head * Nq + i) * D, dot(P * Z, V), Nq - i, T, D)
    tl.store(lse + head * Nq + i + row, m + tl.log(l), mask=row < Nq - i)


@triton.jit
def backward_kernel(
    q, k, v, dout, lse, delta, dq, dk, dv, Nq, Nk, scale, p, seed,
    D: tl.constexpr, T: tl.constexpr, QUERIES: tl.constexpr
):  # fmt: skip
    head, j = tl.program_id(0), tl.program_id(1) * T
    tile, left = (head * Nk + j) * D, Nk - j  # where the tile begins, and how many keys there are from there on
    K, V = load(k + tile, left, T, D), load(v + tile, left, T, D)
    Q, dO = load(q + head * Nq * D, Nq, QUERIES, D), load(dout + head * Nq * D, Nq, QUERIES, D)
    row, key = tl.arange(0, QUERIES), tl.arange(0, T)[None, :]
    lse = tl.load(lse + head * Nq + row, mask=row < Nq, other=float("inf"))[:, None]  # P is 0 where there is no query
    delta = tl.load(delta + head * Nq + row, mask=row < Nq, other=0.0)[:, None]
    P = tl.where(key < left, tl.exp(scale * dot(Q, tl.trans(K)) - lse), 0.0)  # (QUERIES, T)
    Z = dropout_factors(seed, head, row[:, None], j + key, Nq, Nk, p)
    dS = P * (dot(dO, tl.trans(V)) * Z - delta)
    store(dv + tile, dot(tl.trans(P * Z), dO), left, T, D)
    store(dk + tile, scale * dot(tl.trans(dS), Q), left, T, D)
    place = dq + (head * Nq + row[:, None]) * D + tl.arange(0, D)[None, :]
    tl.atomic_add(place, scale * dot(dS, K), mask=row[:, None] < Nq)


class Attention(torch.autograd.Function):
    @staticmethod
    def forward(ctx, q, k, v, scale, p, seed):
        q, k, v = (x.contiguous() for x in (q, k, v))
        (B, H, Nq, D), Nk = q.shape, k.shape[2]
        out, lse = torch.empty_like(q), q.new_empty(B, H, Nq)
        ctx.options = Nq, Nk, scale, p, seed
        forward_kernel[(B * H, triton.cdiv(Nq, T))](
            q, k, v, out, lse, *ctx.options, D=D, T=T, KEYS=max(16, triton.next_power_of_2(Nk))
        )
        ctx.save_for_backward(q, k, v, out, lse)
        return out

    @staticmethod
    def backward(ctx, dout):
        q, k, v, out, lse = ctx.saved_tensors
        (B, H, Nq, D), Nk, dout = q.shape, k.shape[2], dout.contiguous()
        dq, dk, dv = torch.zeros_like(q), torch.empty_like(k), torch.empty_like(v)
        backward_kernel[(B * H, triton.cdiv(Nk, T))](
            q, k, v, dout, lse, (dout * out).sum(-1), dq, dk, dv, *ctx.options,
            D=D, T=T, QUERIES=max(16, triton.next_power_of_2(Nq))
        )  # fmt: skip
        return dq, dk, dv, None, None, None


def attention(q, k, v, *, scale=None, dropout_p=0.0, seed=0):
    """out, differentiable: float32 q (B, H, Nq, D), k and v (B, H, Nk, D), D a power of two from 16 on."""
    return Attention.apply(q, k, v, q.shape[-1] ** -0.5 if scale is None else scale, dropout_p, seed)
