# SPDX-License-Identifier: MIT
"""Rung 2, "roles": rung 1 with warp specialisation by the compiler: one warp copies, two groups of warps compute.

    for j in tl.range(begin, end, Bc, warp_specialize=True):

The idea: in rung 1 every warp starts copies, waits for them, multiplies, and computes the softmax. With this one
argument the compiler cuts the loop in two: a warp of its own copies K and V and signals by barriers in shared memory
that a tile has come, and two groups of four warps wait for the signal and compute, with 64 rows of the tile each. The
groups drift apart, so that one multiplies while the other one computes exponentials, and a tile of 128 x 128 fits into
the registers.

The compiler does this under conditions that it does not report. The kernel may have only one loop, so there is none
for tiles with a mask: roles are used without a causal mask, where Nk is a multiple of Bc and head_dim is 65 to 128. All
other calls have two loops, as in rung 1, and the tiles of rung 1. Q, K and V need descriptors of two dimensions, one
for each head, which the kernel makes itself, and num_warps must be 4.

The trap: the compiler divides a tile's rows between the groups by adding 64 to the row number of the second group. It
has already done so in a number that is the coordinate of a descriptor. If the same number is also used to compute
addresses, 64 is added twice, and half of lse is never written, without any message. Therefore rows are counted from the
first row of the tile here: lse + i + row, with row < Nq - i.

Source: FlashAttention-2, Algorithm 1; the roles are FlashAttention-3's (section 3.1). Launch: grid
(B * H * ceil(Nq / Br),). Left out: products and softmax of one group at the same time (rung 3). Needs torch, Triton
and replay.py.
"""

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl

from .replay import replayed

# (Br, Bc, num_warps, num_stages) by head_dim: up to 64, 128, 256.
TILES = {64: (64, 128, 4, 2), 128: (64, 64, 4, 3), 256: (128, 64, 8, 2)}
ROLES_TILES = {128: (128, 128, 4, 2)}  # the same with roles; at head_dim 64 the rows of rung 1 were faster


class Rows(NamedTuple):
    """The N rows of one head of a tensor (B, H, N, D)."""

    x: Any  # if TMA a descriptor of the head's matrix (N, D), else a pointer to it
    stride: Any  # from row to row
    N: Any


@triton.jit
def open_rows(x, strides, b, h, N, ROWS: tl.constexpr, D: tl.constexpr, D_pad: tl.constexpr, TMA: tl.constexpr):
    """The Rows of head h of x. If TMA, a box of their descriptor has ROWS rows."""
    # Offsets have 64 bits, because a tensor may have more than 2^31 entries.
    x = x + b.to(tl.int64) * strides[0] + h.to(tl.int64) * strides[1]
    if TMA:
        x = tl.make_tensor_descriptor(x, [N, D], [strides[2], 1], [ROWS, D_pad])
    return Rows(x, strides[2], N)


@triton.jit
def load_tile(rows, first, ROWS: tl.constexpr, D: tl.constexpr, D_pad: tl.constexpr, TMA: tl.constexpr):
    """The rows from `first` on, as a tile (ROWS, D_pad) with zeros beyond the N rows and D columns."""
    x, stride, N = rows
    if TMA:
        return x.load([first, 0])
    else:
        row, column = first + tl.arange(0, ROWS)[:, None], tl.arange(0, D_pad)[None, :]
        return tl.load(x + row.to(tl.int64) * stride + column, mask=(row < N) & (column < D), other=0.0)


@triton.jit
def store_tile(rows, tile, first, D: tl.constexpr):
    """Writes a tile to the rows from `first` on. rows.x is a pointer."""
    x, stride, N = rows
    row, column = tl.arange(0, tile.shape[0])[:, None], tl.arange(0, tile.shape[1])[None, :]
    x += tl.cast(first, tl.int64) * stride
    tl.store(x + (row.to(tl.int64) * stride + column), tile, mask=(row < N - first) & (column < D))


@triton.jit
def key_ranges(i, Nq, Nk, CAUSAL: tl.constexpr, Br: tl.constexpr, Bc: tl.constexpr):
    """(full, end) for the Br queries from i on: all of them see all keys before full, none sees a key from end on."""
    full, end = Nk, Nk
    if CAUSAL:  # query i stands at position i + Nk - Nq
        full = tl.minimum(Nk, tl.maximum(0, i + 1 + Nk - Nq))
        end = tl.minimum(Nk, tl.maximum(0, i + Br + Nk - Nq))
    return full // Bc * Bc, end


@triton.jit
def mask(S, i, j, Nq, Nk, CAUSAL: tl.constexpr, Br: tl.constexpr, Bc: tl.constexpr):
    """S with -inf where there is no key, or the key lies after the query. S (Br, Bc) starts at query i and key j."""
    row, column = tl.arange(0, Br)[:, None], tl.arange(0, Bc)[None, :]
    seen = column < Nk - j
    if CAUSAL:
        seen = seen & (column - row <= i + Nk - Nq - j)
    return tl.where(seen, S, float("-inf"))


@triton.jit
def factor_and_shift(m, scale_log2):
    """(f, f m) of P = 2^(f S - f m), two numbers a row; f is scale_log2 unless m is huge.

    The compiler makes one fused multiply-add of f S - f m, in which f S is exact, but f m was rounded before. At S = m
    the exponent is then not 0, but up to f m / 2^24: up to 8 if f m = 2^27, and P is infinite for scores of 1e11. So
    from 2^26 on f is the power of two below scale_log2, whose products are exact. With either factor, neighbouring
    float32 scores of that size differ by 2 or more in the exponent, which is no more than the scores' own error.
    """
    power_of_two = (scale_log2.to(tl.int32, bitcast=True) & 0x7F800000).to(tl.float32, bitcast=True)
    small = tl.abs(m * scale_log2) < 67108864.0
    return tl.where(small, scale_log2, power_of_two), tl.where(small, m * scale_log2, m * power_of_two)


@triton.jit
def probabilities(m, S, scale_log2):
    """(m, alpha, P) after one more tile of keys, with S = Q_i K_j^T (Br, Bc), not scaled.

    m (Br,) is the maximum of S. l and O must be scaled by alpha (Br,). P (Br, Bc) is not divided by l.
    """
    m_new = tl.maximum(m, tl.max(S, 1))
    unit = tl.where(m_new == float("-inf"), 0.0, m_new)  # in a row without a key -inf - (-inf) would be NaN
    factor, shift = factor_and_shift(unit, scale_log2)
    alpha = tl.exp2((m - unit) * factor)
    P = tl.exp2(S * factor[:, None] - shift[:, None])
    return m_new, alpha, P


@triton.jit
def visit_keys(
    m, l, O, Q_i, K, V, i, begin, end, Nq, scale_log2,
    MASKED: tl.constexpr, CAUSAL: tl.constexpr, D: tl.constexpr, Bc: tl.constexpr,
    TMA: tl.constexpr, ROLES: tl.constexpr
):
    for j in tl.range(begin, end, Bc, warp_specialize=ROLES):
        K_j = load_tile(K, j, Bc, D, Q_i.shape[1], TMA)  # (Bc, D)
        S = tl.dot(Q_i, tl.trans(K_j), input_precision="ieee")  # (Br, Bc)
        if MASKED:
            S = mask(S, i, j, Nq, K.N, CAUSAL, Q_i.shape[0], Bc)
        m, alpha, P = probabilities(m, S, scale_log2)
        # With roles, the groups that compute wait for V_j here. So it is loaded as late as possible.
        V_j = load_tile(V, j, Bc, D, Q_i.shape[1], TMA)
        O = tl.dot(P.to(V_j.dtype), V_j, O * alpha[:, None], input_precision="ieee")
        l = alpha * l + tl.sum(P, 1)
    return m, l, O


@triton.jit(do_not_specialize=["H", "group", "Nq", "Nk"])  # so that one compiled kernel serves every length
def forward_kernel(
    q, k, v, out, lse, q_strides, k_strides, v_strides, out_strides, H, group, Nq, Nk, scale,
    CAUSAL: tl.constexpr, D: tl.constexpr, D_pad: tl.constexpr, Br: tl.constexpr, Bc: tl.constexpr, TMA: tl.constexpr,
    ROLES: tl.constexpr
):
    program, tiles = tl.program_id(0), tl.cdiv(Nq, Br)
    # Neighbouring programs work on the same head, so they find its K and V in the L2 cache. The last queries start
    # first: when causal, they see most keys.
    i, bh = (tiles - 1 - program % tiles) * Br, program // tiles
    b, h = bh // H, bh % H
    hk = h // group  # `group` query heads share a key head
    scale_log2 = scale * 1.4426950408889634

    Q = open_rows(q, q_strides, b, h, Nq, Br, D, D_pad, TMA)
    K = open_rows(k, k_strides, b, hk, Nk, Bc, D, D_pad, TMA)
    V = open_rows(v, v_strides, b, hk, Nk, Bc, D, D_pad, TMA)
    out = open_rows(out, out_strides, b, h, Nq, Br, D, D_pad, False)
    Q_i = load_tile(Q, i, Br, D, D_pad, TMA)  # (Br, D)
    m = tl.full((Br,), float("-inf"), tl.float32)
    l, O = tl.zeros((Br,), tl.float32), tl.zeros((Br, D_pad), tl.float32)
    full, end = key_ranges(i, Nq, Nk, CAUSAL, Br, Bc)
    m, l, O = visit_keys(m, l, O, Q_i, K, V, i, 0, full, Nq, scale_log2, False, CAUSAL, D, Bc, TMA, ROLES)
    if not ROLES:
        m, l, O = visit_keys(m, l, O, Q_i, K, V, i, full, end, Nq, scale_log2, True, CAUSAL, D, Bc, TMA, ROLES)

    row = tl.arange(0, Br)
    l = tl.where(l == 0, 1.0, l)  # a row that saw no key then gets out = 0 / 1 and lse = -inf + log 1
    store_tile(out, O / l[:, None], i, D)
    tl.store(lse + (bh.to(tl.int64) * Nq + i) + row, m * scale + tl.log(l), mask=row < Nq - i)


def strides_of(x):
    """The strides of x (B, H, N, D) but the last. That of a dimension of size 1 is never used, and can be any: 16."""
    return tuple(stride if size > 1 else 16 for size, stride in zip(x.shape[:3], x.stride()[:3], strict=True))


def is_aligned(x):
    """Whether a descriptor can describe the heads of x: its address and strides are multiples of 16 bytes."""
    steps = x.data_ptr(), *(stride * x.element_size() for stride in strides_of(x))
    return x.numel() > 0 and all(step % 16 == 0 for step in steps)


def allocate(size, alignment, stream):
    """Memory for the descriptors that a kernel makes."""
    return torch.empty(size, dtype=torch.int8, device="cuda")


def forward(q, k, v, *, causal=False, scale=None, tile=None):
    """(out, lse): q (B, H, Nq, D), k and v (B, Hk, Nk, D), D contiguous; out like q, lse (B, H, Nq) float32.

    scale > 0; None is 1/sqrt(D). tile is (Br, Bc).
    """
    # Triton keeps an allocator for each thread, and a checkpoint calls `forward` in a thread of autograd.
    triton.set_allocator(allocate)
    return launch(q, k, v, causal=causal, scale=scale, tile=tile)


@replayed
def launch(record, q, k, v, *, causal, scale, tile):
    (B, H, Nq, D), (Hk, Nk) = q.shape, k.shape[1:3]
    scale = D**-0.5 if scale is None else scale
    D_pad = max(16, triton.next_power_of_2(D))  # tiles are powers of two, and a tensor core takes 16 columns
    out, lse = record.new(q.shape, like=q), record.new((B, H, Nq))
    interpreted = triton.knobs.runtime.interpret  # The interpreter has descriptors, too, and ignores roles.
    hopper = not interpreted and torch.cuda.get_device_capability(q.device)[0] == 9
    TMA = (interpreted or hopper) and all(map(is_aligned, (q, k, v, out)))
    Br, Bc, num_warps, num_stages = (*tile, 4, 1) if tile else TILES[max(64, D_pad)]
    ROLES = TMA and not causal and not tile and D_pad in ROLES_TILES and Nk % ROLES_TILES[D_pad][1] == 0
    if ROLES:
        Br, Bc, num_warps, num_stages = ROLES_TILES[D_pad]
    record.launch(
        forward_kernel, B * H * triton.cdiv(Nq, Br),
        q, k, v, out, lse, *map(strides_of, (q, k, v, out)), H, H // Hk, Nq, Nk, scale, CAUSAL=causal,
        D=D, D_pad=D_pad, Br=Br, Bc=Bc, TMA=TMA, ROLES=ROLES, num_warps=num_warps, num_stages=num_stages,
    )  # fmt: skip
    return out, lse


forward.clear = launch.clear
