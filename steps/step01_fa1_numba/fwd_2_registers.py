# SPDX-License-Identifier: MIT
"""Rung 2, "registers": a thread keeps its sums in registers; shared memory only passes factors between threads.

    a tile is divided among a block's threads:        thread (x, y) owns rows y, y + 16, ... and columns x, x + 8, ...
        S, O    a patch of 8 x 8 of each, in registers
        m, l    of the patch's rows; l over the patch's own columns, added up over x at the end
    for each tile of Bc keys:
        S = 0
        for 16 columns of Q_i and K_j at a time, in shared memory:
            for each column:  S += (8 numbers of Q_i) (8 numbers of K_j)^T      16 loads for 64 multiplications
        m_new = max(m, rowmax S)                      threads exchange the maxima of their patches in shared memory
        P     = exp(S - m_new)                        goes to shared memory, because O's products run over all keys
        l, O  = alpha * l + rowsum P, alpha * O
        for 16 keys of V_j at a time, in shared memory:
            for each key:  O += (8 numbers of P) (8 numbers of V_j)^T           the same function
    out = O / l,  lse = m + log l

The idea: an outer product. Rung 1 loads two numbers for each multiplication, but shared memory needs the time of four
multiplications to deliver one number to each thread. In a patch of 8 x 8 every loaded number is used eight times, and
loads and multiplications are in balance. That is how a matrix product is made fast, and attention is two matrix
products. While 16 columns are multiplied, the next 16 are being loaded into registers. Neighbouring threads read
neighbouring rows, and because the tiles have an odd width, these lie in different banks. Q_i is read again for each key
tile, from the cache; in shared memory it would leave no room for a second block. Left out: tensor cores (stage 02).

The thread indices x and y are made unsigned. For a signed index Numba adds a test whether it is negative, and with that
test the compiler no longer sees that the rows of a patch lie a constant distance apart.
Needs fwd_0_published.py beside it.
"""

import functools
import math

import numpy as np
import torch
from numba import cuda

from .fwd_0_published import MINUS_INF, SIMULATED, ZERO, check_shared, keys_seen, launch

STEP = 8 if SIMULATED else 16  # columns of Q_i and K_j, or keys of V_j, that are in shared memory at a time
PATCH = 16  # the longest side that a thread's patch may have
REGISTERS = 255  # the most that a thread can have
unsigned = int if SIMULATED else np.uint32


def forward(q, k, v, *, causal=False, scale=None, tile=None):
    """(out, lse): q (B, H, Nq, D), k and v (B, H, Nk, D), float32 or float16; out like q, lse (B, H, Nq) float32.

    tile is (Br, Bc). Raises ValueError, which shows the sum, when shared memory or registers do not hold the tiles.
    """
    D = q.shape[-1]
    scale = D**-0.5 if scale is None else scale
    Br, Bc = tile or default_tile(D)
    q_, k_, v_ = (x.flatten(0, 1).contiguous() for x in (q, k, v))  # (B * H, N, D)
    out, lse = torch.empty_like(q_), torch.empty(q_.shape[:2], dtype=torch.float32, device=q.device)
    (heads, Nq, _), Nk = q_.shape, k_.shape[1]
    # Flat tensors, because D is a constant of the kernel: then the offsets within a patch are constants as well.
    flat = tuple(x.view(-1) for x in (q_, k_, v_, out))
    launch(forward_kernel(Br, Bc, D), heads * -(-Nq // Br), threads(D), (*flat, lse), Nq, Nk, causal, np.float32(scale))
    return out.reshape(q.shape), lse.reshape(q.shape[:-1])


def threads(D):
    """(x, y) of a block, chosen so that O's patch has eight columns at head_dim 64 and 128."""
    return (4, 2) if SIMULATED else (8, 16) if D <= 64 else (16, 8)


def default_tile(D):
    """(Br, Bc) with patches of 8 x 8."""
    return (8, 8) if SIMULATED else (128, 64) if D <= 64 else (64, 128)


def patch_shape(Br, Bc, D):
    """(rows, columns of S, columns of O) of a thread's patch. Raises ValueError where a tile does not divide evenly."""
    x, y = threads(D)
    if Br % y or Bc % y or Bc % x or Bc % STEP:
        raise ValueError(
            f"tile {Br, Bc}, head_dim {D}: {x} x {y} threads share {Br} rows and {Bc} columns out and take {STEP} of those "  # noqa: E501
            f"at a time, so the rows must be a multiple of {y} and the columns of {math.lcm(x, STEP)}."
        )
    return Br // y, Bc // x, -(-D // x)


def check_registers(what, *patches):
    """Raises ValueError, showing the sum, if patches of these shapes leave a thread no registers to work with."""
    words = sum(map(math.prod, patches))
    if max(map(max, patches)) > PATCH or words > REGISTERS - 60:
        listed = " + ".join(f"{rows} x {columns}" for rows, columns in patches)
        raise ValueError(
            f"{what}: patches of {listed} = {words} numbers in registers, and a thread has {REGISTERS}, of which about 60 "  # noqa: E501
            f"go to factors and addresses; no side may exceed {PATCH}. Take a smaller tile or head_dim."
        )


@functools.cache
def forward_kernel(Br, Bc, D):
    """The kernel for one tile and head_dim."""
    X, Y = threads(D)
    R, C, C_O = patch_shape(Br, Bc, D)
    check_registers(f"tile {Br, Bc}, head_dim {D}", (R, C), (R, C_O), (R, 2))
    A_shape, B_shape, P_shape = (Br, STEP + 1), (max(Bc, C_O * X), STEP + 1), (Br, Bc + 1)
    check_shared(f"tile {Br, Bc}, head_dim {D}", A=A_shape, B=B_shape, P=P_shape)

    @cuda.jit
    def kernel(q, k, v, out, lse, Nq, Nk, causal, scale):
        A = cuda.shared.array(A_shape, np.float32)  # STEP columns of Q_i; between the products, scratch memory
        B = cuda.shared.array(B_shape, np.float32)  # STEP columns of K_j, or STEP keys of V_j, transposed
        P = cuda.shared.array(P_shape, np.float32)
        S = cuda.local.array((R, C), np.float32)
        O = cuda.local.array((R, C_O), np.float32)
        m = cuda.local.array(R, np.float32)
        l = cuda.local.array(R, np.float32)
        tiles = (Nq + Br - 1) // Br
        head = cuda.blockIdx.x // tiles
        i = (tiles - 1 - cuda.blockIdx.x % tiles) * Br  # the last tile starts first: when causal, it sees most keys
        clear(O)
        for r in range(R):
            m[r], l[r] = MINUS_INF, ZERO
        for j in range(0, keys_seen(min(i + Br, Nq) - 1, Nq, Nk, causal), Bc):
            multiply(S, q, Nq, i, k, Nk, j, A, B, head, D, X, Y)
            scale_and_mask(S, i, j, Nq, Nk, causal, scale, X, Y)
            online_update(S, O, l, m, A, X, Y)
            store(P, S, R, C, X, Y)
            multiply_rows(O, P, v, Nk, j, B, head, D, X, Y)
        add_up_row_sums(l, A, X, Y)
        store_rows(out, lse, O, l, m, Nq, D, head, i, X, Y)

    return kernel


@cuda.jit(device=True)
def clear(patch):
    """Sets patch (R, C) to 0."""
    for r in range(patch.shape[0]):
        for c in range(patch.shape[1]):
            patch[r, c] = ZERO


@cuda.jit(device=True)
def multiply(patch, t, Nt, start, u, Nu, first, A, B, head, D, X, Y):
    """patch (R, C) = this thread's part of t[head, start ...] u[head, first ...]^T.

    t (B * H, Nt, D) and u (B * H, Nu, D) are flat. A and B are tiles in shared memory.
    """
    a, b = cuda.local.array((PATCH, PATCH), np.float32), cuda.local.array((PATCH, PATCH), np.float32)
    a_rows, b_rows, columns = patch.shape[0], patch.shape[1] * X // Y, STEP // X
    clear(patch)
    fetch(a, a_rows, columns, t, Nt, D, head, start, 0, X, Y)
    fetch(b, b_rows, columns, u, Nu, D, head, first, 0, X, Y)
    for d in range(0, D, STEP):
        cuda.syncthreads()  # all have read A and B, which may now be overwritten
        store(A, a, a_rows, columns, X, Y)
        store(B, b, b_rows, columns, X, Y)
        cuda.syncthreads()  # every thread needs numbers that others have stored
        if d + STEP < D:  # the loads for the next iteration run while this one multiplies
            fetch(a, a_rows, columns, t, Nt, D, head, start, d + STEP, X, Y)
            fetch(b, b_rows, columns, u, Nu, D, head, first, d + STEP, X, Y)
        add_products(patch, A, 0, B, X, Y)


@cuda.jit(device=True)
def multiply_rows(total, P, t, Nt, first, B, head, D, X, Y):
    """total (R, C) += this thread's part of P (rows, keys) t[head, first : first + keys]; t (B * H, Nt, D), flat."""
    held = cuda.local.array((PATCH, PATCH), np.float32)
    keys, rows, columns = P.shape[1] - 1, STEP // Y, total.shape[1]  # P has a spare column
    fetch(held, rows, columns, t, Nt, D, head, first, 0, X, Y)
    for c in range(0, keys, STEP):
        cuda.syncthreads()  # all have read B, which may now be overwritten
        store_transposed(B, held, rows, columns, X, Y)
        cuda.syncthreads()  # every thread needs numbers that others have stored, in P too
        if c + STEP < keys:
            fetch(held, rows, columns, t, Nt, D, head, first + c + STEP, 0, X, Y)
        add_products(total, P, c, B, X, Y)


@cuda.jit(device=True)
def fetch(held, rows, columns, t, N, D, head, start, first, X, Y):
    """held[:rows, :columns] = this thread's part of t[head, start ..., first ...], and 0 beyond the edges of t.

    t (B * H, N, D) is flat.
    """
    x, y = unsigned(cuda.threadIdx.x), unsigned(cuda.threadIdx.y)
    for r in range(rows):
        for c in range(columns):
            row, column = start + r * Y + y, first + c * X + x
            held[r, c] = np.float32(t[(head * N + row) * D + column]) if row < N and column < D else ZERO


@cuda.jit(device=True)
def store(tile, patch, rows, columns, X, Y):
    """This thread's part of a tile in shared memory = patch[:rows, :columns]."""
    x, y = unsigned(cuda.threadIdx.x), unsigned(cuda.threadIdx.y)
    for r in range(rows):
        for c in range(columns):
            tile[r * Y + y, c * X + x] = patch[r, c]


@cuda.jit(device=True)
def store_transposed(tile, patch, rows, columns, X, Y):
    """As `store`, for a tile whose rows are the patch's columns."""
    x, y = unsigned(cuda.threadIdx.x), unsigned(cuda.threadIdx.y)
    for r in range(rows):
        for c in range(columns):
            tile[c * X + x, r * Y + y] = patch[r, c]


@cuda.jit(device=True)
def add_products(total, A, first, B, X, Y):
    """total (R, C) += this thread's rows of A[:, first : first + STEP] times its rows of B (.., STEP), transposed."""
    x, y = unsigned(cuda.threadIdx.x), unsigned(cuda.threadIdx.y)
    a = cuda.local.array(PATCH, np.float32)
    b = cuda.local.array(PATCH, np.float32)
    for d in range(STEP):
        for r in range(total.shape[0]):
            a[r] = A[r * Y + y, first + d]
        for c in range(total.shape[1]):
            b[c] = B[c * X + x, d]
        for r in range(total.shape[0]):
            for c in range(total.shape[1]):
                total[r, c] += a[r] * b[c]


@cuda.jit(device=True)
def scale_and_mask(S, i, j, Nq, Nk, causal, scale, X, Y):
    """Scales S (R, C), and sets -inf where the query does not see the key; the tile begins at query i and key j."""
    x, y = unsigned(cuda.threadIdx.x), unsigned(cuda.threadIdx.y)
    for r in range(S.shape[0]):
        seen = keys_seen(i + r * Y + y, Nq, Nk, causal)
        for c in range(S.shape[1]):
            S[r, c] = scale * S[r, c] if j + c * X + x < seen else MINUS_INF


@cuda.jit(device=True)
def online_update(S, O, l, m, scratch, X, Y):
    """Replaces the patch S (R, C) by P = exp(S - m_new), updates l and m (R,) with it, and rescales O (R, C_O)."""
    x, y = unsigned(cuda.threadIdx.x), unsigned(cuda.threadIdx.y)
    cuda.syncthreads()  # all have read the products' factors, so their memory may serve as scratch memory
    for r in range(S.shape[0]):
        m_patch = MINUS_INF
        for c in range(S.shape[1]):
            m_patch = max(m_patch, S[r, c])
        scratch[r * Y + y, x] = m_patch
    cuda.syncthreads()  # a row's maximum is the largest of X threads' maxima
    for r in range(S.shape[0]):
        m_new = m[r]
        for other in range(X):
            m_new = max(m_new, scratch[r * Y + y, other])
        unit = ZERO if m_new == MINUS_INF else m_new  # in a row that has seen no key, -inf - (-inf) would be NaN
        alpha = math.exp(m[r] - unit)
        m[r] = m_new
        l[r] *= alpha
        for c in range(O.shape[1]):
            O[r, c] *= alpha
        for c in range(S.shape[1]):
            S[r, c] = math.exp(S[r, c] - unit)
            l[r] += S[r, c]


@cuda.jit(device=True)
def add_up_row_sums(l, scratch, X, Y):
    """Replaces l (R,), the sums over this thread's columns, by the sums over whole rows."""
    x, y = unsigned(cuda.threadIdx.x), unsigned(cuda.threadIdx.y)
    for r in range(l.shape[0]):
        scratch[r * Y + y, x] = l[r]
    cuda.syncthreads()
    for r in range(l.shape[0]):
        l[r] = ZERO
        for other in range(X):
            l[r] += scratch[r * Y + y, other]


@cuda.jit(device=True)
def store_rows(out, lse, O, l, m, N, D, head, i, X, Y):
    """out = O / l and lse = m + log l for the patch's rows before row N; a row that saw no key gets 0 and -inf."""
    x, y = unsigned(cuda.threadIdx.x), unsigned(cuda.threadIdx.y)
    for r in range(O.shape[0]):
        row = i + r * Y + y
        if row < N:
            for c in range(O.shape[1]):
                if c * X + x < D:
                    out[(head * N + row) * D + c * X + x] = ZERO if l[r] == ZERO else O[r, c] / l[r]
            if x == 0:
                lse[head, row] = MINUS_INF if l[r] == ZERO else m[r] + math.log(l[r])
