# SPDX-License-Identifier: MIT
"""Rung 2, "registers": the backward with patches of registers, in two kernels without atomic additions.

    for each tile of Br queries:                  queries_kernel, a thread block each: dQ_i in registers
        delta = rowsum(dO_i * O_i)                one number a query; it goes to device memory for the other kernel
        for each tile of Bc keys:
            P   = exp(scale * Q_i K_j^T - lse_i)  recomputed
            dS  = P * (dO_i V_j^T - delta_i)
            dQ_i += scale * dS K_j
    for each tile of Bc keys:                     keys_kernel, a thread block each: dK_j, dV_j in registers
        for each tile of Br queries:
            P^T  = exp(scale * K_j Q_i^T - lse_i)
            dV_j += P^T dO_i
            dS^T = P^T * (V_j dO_i^T - delta_i)
            dK_j += scale * dS^T Q_i

The idea: dQ is a sum over keys, dK and dV are sums over queries, and registers can hold a sum only while the inner loop
runs over its terms. So each kernel has the loop order that its sums need. The price is that S and dP are computed
twice: seven matrix products instead of five. In return no sum is formed in device memory, nothing is atomic, and every
run gives the same bits. FlashAttention-2 (Algorithm 2) chooses otherwise: one kernel, five products, and dQ by atomic
additions (stage 02). Every product is made by the forward's add_products. Needs fwd_2_registers.py and
fwd_0_published.py beside it.
"""

import functools

import numpy as np
import torch
from numba import cuda

from .fwd_0_published import SIMULATED, ZERO, check_shared, exp_difference, first_query_tile, keys_seen, launch
from .fwd_2_registers import (
    STEP,
    check_registers,
    clear,
    multiply,
    multiply_rows,
    patch_shape,
    threads,
    unsigned,
)


def backward(dout, q, k, v, out, lse, *, causal=False, scale=None, tile=None):
    """(dq, dk, dv) like q (B, H, Nq, D), k and v (B, H, Nk, D), from dout and out like q, lse (B, H, Nq).

    tile is (Br, Bc). Raises ValueError, which shows the sum, when shared memory or registers do not hold the tiles.
    """
    D = q.shape[-1]
    scale = D**-0.5 if scale is None else scale
    Br, Bc = tile or default_tile(D)
    q_, k_, v_, dout, out, lse = (x.flatten(0, 1).contiguous() for x in (q, k, v, dout, out, lse))  # (B * H, N, D)
    dq, dk, dv, delta = (torch.empty_like(x) for x in (q_, k_, v_, lse))
    (heads, Nq, _), Nk = q_.shape, k_.shape[1]
    options = Nq, Nk, causal, np.float32(scale)
    q_, k_, v_, dout, out, *grads = (x.view(-1) for x in (q_, k_, v_, dout, out, dq, dk, dv))  # flat, as in the forward
    tensors = q_, k_, v_, dout, out, lse, delta, grads[0]
    launch(queries_kernel(Br, Bc, D), heads * -(-Nq // Br), threads(D), tensors, *options)
    tensors = q_, k_, v_, dout, lse, delta, *grads[1:]
    launch(keys_kernel(Br, Bc, D), heads * -(-Nk // Bc), threads(D), tensors, *options)
    return dq.reshape(q.shape), dk.reshape(k.shape), dv.reshape(v.shape)


def default_tile(D):
    """The largest (Br, Bc) that registers and shared memory allow in both kernels."""
    return (8, 8) if SIMULATED else (64, 128) if D <= 64 else (64, 64)


@functools.cache
def queries_kernel(Br, Bc, D):
    """The kernel for delta and dQ, for one tile and head_dim."""
    X, Y = threads(D)
    R, C, C_D = patch_shape(Br, Bc, D)
    A_shape, B_shape, dS_shape = (Br, STEP + 1), (max(Bc, C_D * X), STEP + 1), (Br, Bc + 1)
    check_shared(f"tile {Br, Bc}, head_dim {D}", A=A_shape, B=B_shape, dS=dS_shape, delta=(Br,))
    check_registers(f"tile {Br, Bc}, head_dim {D}", (R, C), (R, C), (R, C_D))

    @cuda.jit
    def kernel(q, k, v, dout, out, lse, delta, dq, Nq, Nk, causal, scale):
        A = cuda.shared.array(A_shape, np.float32)  # STEP columns of Q_i or dO_i
        B = cuda.shared.array(B_shape, np.float32)  # STEP columns of K_j or V_j, or STEP keys of K_j, transposed
        dS = cuda.shared.array(dS_shape, np.float32)
        delta_i = cuda.shared.array(Br, np.float32)
        P = cuda.local.array((R, C), np.float32)
        dP = cuda.local.array((R, C), np.float32)
        dQ = cuda.local.array((R, C_D), np.float32)
        x, y = unsigned(cuda.threadIdx.x), unsigned(cuda.threadIdx.y)
        tiles = (Nq + Br - 1) // Br
        head = cuda.blockIdx.x // tiles
        i = (tiles - 1 - cuda.blockIdx.x % tiles) * Br
        row_delta(delta_i, delta, dout, out, Nq, D, head, i)  # the loop has a barrier before delta_i is read
        clear(dQ)
        for j in range(0, keys_seen(min(i + Br, Nq) - 1, Nq, Nk, causal), Bc):
            multiply(P, q, Nq, i, k, Nk, j, A, B, head, D, X, Y)
            multiply(dP, dout, Nq, i, v, Nk, j, A, B, head, D, X, Y)
            for r in range(R):
                row = i + r * Y + y
                seen = keys_seen(row, Nq, Nk, causal)
                for c in range(C):
                    p = exp_difference(scale * P[r, c], lse[head, row]) if j + c * X + x < seen else ZERO
                    dS[r * Y + y, c * X + x] = p * (dP[r, c] - delta_i[r * Y + y])
            multiply_rows(dQ, dS, k, Nk, j, B, head, D, X, Y)
        store_rows(dq, dQ, scale, Nq, D, head, i, X, Y)

    return kernel


@functools.cache
def keys_kernel(Br, Bc, D):
    """The kernel for dK and dV, for one tile and head_dim. Its patches lie on P^T (Bc, Br)."""
    X, Y = threads(D)
    R, C, C_D = patch_shape(Bc, Br, D)
    A_shape, B_shape, T_shape = (Bc, STEP + 1), (max(Br, C_D * X), STEP + 1), (Bc, Br + 1)
    check_shared(f"tile {Br, Bc}, head_dim {D}", A=A_shape, B=B_shape, P=T_shape)
    check_registers(f"tile {Br, Bc}, head_dim {D}", (R, C), (R, C_D), (R, C_D))

    @cuda.jit
    def kernel(q, k, v, dout, lse, delta, dk, dv, Nq, Nk, causal, scale):
        A = cuda.shared.array(A_shape, np.float32)  # STEP columns of K_j or V_j
        B = cuda.shared.array(B_shape, np.float32)  # STEP columns of Q_i or dO_i, or STEP queries of them, transposed
        T = cuda.shared.array(T_shape, np.float32)  # P^T, which dS^T overwrites
        patch = cuda.local.array((R, C), np.float32)  # a part of S^T, then of dP^T
        dK = cuda.local.array((R, C_D), np.float32)
        dV = cuda.local.array((R, C_D), np.float32)
        x, y = unsigned(cuda.threadIdx.x), unsigned(cuda.threadIdx.y)
        tiles = (Nk + Bc - 1) // Bc
        head, j = cuda.blockIdx.x // tiles, cuda.blockIdx.x % tiles * Bc
        clear(dK)
        clear(dV)
        for i in range(first_query_tile(j, Nq, Nk, Br, causal), Nq, Br):
            multiply(patch, k, Nk, j, q, Nq, i, A, B, head, D, X, Y)  # S^T
            for c in range(C):
                row = i + c * X + x
                seen = keys_seen(row, Nq, Nk, causal)
                for r in range(R):
                    p = exp_difference(scale * patch[r, c], lse[head, row]) if j + r * Y + y < seen else ZERO
                    T[r * Y + y, c * X + x] = p
            multiply_rows(dV, T, dout, Nq, i, B, head, D, X, Y)
            multiply(patch, v, Nk, j, dout, Nq, i, A, B, head, D, X, Y)  # dP^T
            for c in range(C):
                row = i + c * X + x
                delta_i = delta[head, row] if row < Nq else ZERO
                for r in range(R):
                    T[r * Y + y, c * X + x] *= patch[r, c] - delta_i
            multiply_rows(dK, T, q, Nq, i, B, head, D, X, Y)
        store_rows(dk, dK, scale, Nk, D, head, j, X, Y)
        store_rows(dv, dV, np.float32(1), Nk, D, head, j, X, Y)

    return kernel


@cuda.jit(device=True)
def row_delta(delta_i, delta, dout, out, N, D, head, i):
    """delta_i (Br,) and delta[head, i : i + Br] = rowsum(dO * O), one thread a row."""
    thread = cuda.threadIdx.y * cuda.blockDim.x + cuda.threadIdx.x
    for r in range(thread, min(delta_i.shape[0], N - i), cuda.blockDim.x * cuda.blockDim.y):
        total = ZERO
        row = (head * N + i + r) * D
        for d in range(D):
            total += np.float32(dout[row + d]) * np.float32(out[row + d])
        delta_i[r] = total
        delta[head, i + r] = total


@cuda.jit(device=True)
def store_rows(t, patch, factor, N, D, head, start, X, Y):
    """t[head, start ...] = factor * patch (R, C), for the rows and columns that t (B * H, N, D) has."""
    x, y = unsigned(cuda.threadIdx.x), unsigned(cuda.threadIdx.y)
    for r in range(patch.shape[0]):
        for c in range(patch.shape[1]):
            row, column = start + r * Y + y, c * X + x
            if row < N and column < D:
                t[(head * N + row) * D + column] = factor * patch[r, c]
