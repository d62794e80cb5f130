# SPDX-License-Identifier: MIT
"""What may stand between Q K^T and the softmax, for the kernels of flash.py: one `scores` for both directions.

    S = softcap tanh(scale X / softcap)  + mask  - slope |pos - key|    X = Q K^T; -inf where the key is hidden

in this order. Each feature is a field of `Features`, and each way to compute it a field of `Policy`. The kernels are
compiled anew for each set of these fields, and a field that is None costs no instruction. Query i stands where key
i + shift stands. It sees the keys from i + shift - left to i + shift + right, and `causal` is right = 0. `tile_ranges`
finds the tiles that have such keys.

Sources: soft-cap: Gemma 2, arXiv 2408.00118. ALiBi: arXiv 2108.12409. Window: Longformer, arXiv 2004.05150. Random
numbers: Salmon and others, "Parallel Random Numbers: As Easy as 1, 2, 3", SC 2011. Needs torch and Triton only.
"""

from typing import Any, NamedTuple

import triton
import triton.language as tl

LN_2 = tl.constexpr(0.6931471805599453)
LOG2_E = tl.constexpr(1.4426950408889634)
MASK_FLOOR = tl.constexpr(-(2.0**101))  # A mask of this or less absorbs every score, and counts as this number.
# For each of four scores: the score if its byte of $4 is not 0, else -inf.
WHERE_SEEN = tl.constexpr("".join(
    f"{{ .reg .pred p; .reg .b32 b; and.b32 b, $4, {0xFF << 8 * n}; setp.ne.u32 p, b, 0; "
    f"selp.f32 ${n}, ${n + 5}, 0fFF800000, p; }}" for n in range(4)
))  # fmt: skip


class Policy(NamedTuple):
    """How the kernels read and multiply. Each field is 1, or None where it does not hold.

    They follow from dtypes, layouts and the GPU, and change no result by more than rounding.
    """

    ieee: Any = None  # products of float32 are made without tensor cores
    approximate: Any = None  # the soft-cap uses the special function unit's tanh
    tma: Any = None  # tiles are read by Hopper's copy engine
    mask_tma: Any = None  # the mask, too
    in_fours: Any = None  # a thread tests four entries of a boolean mask in one register
    heads_first: Any = None  # one mask serves all heads, and neighbouring programs read the same tile of it
    broadcast_rows: Any = None  # all queries have the same row of the mask, as in a mask for padding
    aligned: Any = None  # the keys' random bytes begin at a multiple of 16, as those of one call do


class Features(NamedTuple):
    """What is asked. None is off."""

    scale: float
    left: Any = None  # the window, in which 0 on the right is causal
    right: Any = None
    first_query: Any = None  # the position of the first query; None is that of Nk - Nq
    first_key: Any = 0
    softcap: Any = None
    added: Any = None  # 1: there is an additive mask
    seen: Any = None  # 1: there is a boolean mask, of 8-bit integers
    mask_strides: Any = None  # of batch, head, query and key
    slopes: Any = None  # of ALiBi
    slope_strides: Any = None  # of batch (of the sequence, when packed) and head
    sinks: Any = None  # (H,) float32, in natural units
    seed: Any = None  # a tensor of one int64
    threshold: Any = None  # dropout keeps an entry if its random byte is less than this
    kept_scale: Any = None  # 256 / threshold
    cu_seqlens_q: Any = None  # where the packed sequences begin
    cu_seqlens_k: Any = None
    policy: Policy = Policy()


def check_options(
    q, *, scale=None, window=None, softcap=None, sinks=None, cu_seqlens_q=None, cu_seqlens_k=None, max_seqlen_q=None,
    max_seqlen_k=None, **_
):  # fmt: skip
    """Raises ValueError for options with which a kernel would read beyond a tensor, or compute nonsense."""
    if scale is not None and not scale > 0 or softcap is not None and not softcap >= 0:
        raise ValueError(f"scale must be > 0 and softcap at least 0, or None; got {scale} and {softcap}.")
    if window is not None and (isinstance(window, int) or len(window) != 2):
        raise ValueError(f"window must be None or a pair (left, right); got {window!r}. (W - 1, 0) are W keys.")
    if window is not None and any(limit is not None and limit < -1 for limit in window):
        raise ValueError(f"window's limits must be at least 0, or -1 or None for all; got {window}.")
    if sinks is not None and sinks.shape != q.shape[1:2]:
        raise ValueError(f"sinks must have shape ({q.shape[1]},), one for each head; got {tuple(sinks.shape)}.")
    if cu_seqlens_q is not None:
        if len(q) != 1 or any(x is None for x in (cu_seqlens_k, max_seqlen_q, max_seqlen_k)):
            raise ValueError(f"packed sequences need B = 1, cu_seqlens_k and max_seqlen_q, _k; got B = {len(q)}.")


class Part(NamedTuple):
    """The rows of one sequence in a tensor (B, H, ., D): the rows `start` to `start` + N of batch entry b."""

    b: Any  # 0 when packed
    start: Any  # 0 if not packed
    N: Any


class Sequence(NamedTuple):
    """One batch entry, or one of the packed sequences."""

    number: Any
    queries: Any
    keys: Any
    shift: Any
    c: Any  # P = 2^(c S - c m): c turns S into a power of 2. The unit of S depends on the features: `find_sequence`
    seed: Any


class Head(NamedTuple):
    h: Any
    hk: Any  # the key head that it shares
    mask: Any  # a pointer to the mask of this head and sequence, or its descriptor
    slope: Any  # of ALiBi, in units of S


class Tile(NamedTuple):
    """A tile of scores. row and column count from i and j: (Br, 1) and (1, Bc), or transposed (1, Br) and (Bc, 1)."""

    i: Any  # its first query
    j: Any  # its first key
    row: Any
    column: Any


class Ranges(NamedTuple):
    """Tiles from `whole` to `full` need no mask; the others are those from `begin` to `end`, see `jump`."""

    whole: Any
    full: Any
    begin: Any
    end: Any


@triton.jit
def find_sequence(s, Nq, Nk, f):
    seed = 0
    c = f.scale
    if f.cu_seqlens_q is not None:
        q_start = tl.load(f.cu_seqlens_q + s)
        k_start = tl.load(f.cu_seqlens_k + s)
        queries = Part(s - s, q_start, tl.load(f.cu_seqlens_q + s + 1) - q_start)
        keys = Part(s - s, k_start, tl.load(f.cu_seqlens_k + s + 1) - k_start)
    else:
        queries = Part(s, 0, Nq)
        keys = Part(s, 0, Nk)
    if f.first_query is None:  # The last query stands at the last key.
        shift = keys.N - queries.N - f.first_key
    else:
        shift = tl.cast(f.first_query, tl.int32) - f.first_key
    if f.seed is not None:
        seed = tl.load(f.seed)
    if f.softcap is not None:  # S is tanh(X scale / softcap)
        c = f.softcap
    if f.added is not None:  # S is in natural units, those of the mask
        c = 1.0
    return Sequence(s, queries, keys, shift, tl.full((), 1.0, tl.float32) * c * LOG2_E, seed)


@triton.jit
def find_head(h, hk, mask, f, seq):
    slope = 0.0
    if mask is None:
        mask = 0
    elif f.policy.mask_tma is None:
        strides = f.mask_strides
        query = tl.cast(seq.queries.start, tl.int64)
        key = tl.cast(seq.keys.start, tl.int64)
        of_head = seq.queries.b.to(tl.int64) * strides[0] + h.to(tl.int64) * strides[1]
        mask += of_head + query * strides[2] + key * strides[3]
    if f.slopes is not None:
        slope = tl.load(f.slopes + seq.number * f.slope_strides[0] + h * f.slope_strides[1]) * (LOG2_E / seq.c)
    return Head(h, hk, mask, slope)


@triton.jit
def tile_ranges(x, shift, before, after, N, ragged, OWN: tl.constexpr, T: tl.constexpr):
    """The tiles of T columns that the OWN rows from x on visit. Row x sees the columns x + shift - before ... + after.

    With `ragged` all of them need a mask.
    """
    begin = 0
    whole = 0
    full = N
    end = N
    if before is not None:
        begin = tl.maximum(0, x + shift - before) // T * T
        whole = tl.cdiv(tl.maximum(0, x + OWN - 1 + shift - before), T) * T
    if after is not None:
        full = tl.minimum(N, tl.maximum(0, x + 1 + shift + after))
        end = tl.minimum(N, tl.maximum(0, x + OWN + shift + after))
    full = full // T * T
    if before is not None:
        whole = tl.minimum(whole, tl.cdiv(end, T) * T)
        full = tl.maximum(full, whole)
    if ragged:
        full = whole
    if before is None:
        begin = full
    else:
        end -= full - whole
    return Ranges(whole, full, begin, end)


@triton.jit
def jump(n, ranges, before):
    """The column of the masked tile n. Whole tiles, which lie between the two edges of a window, are skipped."""
    if before is None:
        return n
    else:
        return tl.where(n < ranges.whole, n, n + ranges.full - ranges.whole)


@triton.jit
def tanh(x, approximate):
    if approximate is not None:  # one instruction, wrong by up to 2^-11 of the result: less than 16-bit inputs are
        return tl.inline_asm_elementwise("tanh.approx.f32 $0, $1;", "=f,f", [x], tl.float32, is_pure=True, pack=1)
    else:
        e = tl.exp2(tl.abs(x) * (-2 * LOG2_E))
        large = (1 - e) / (1 + e)
        y = x * x  # Near 0 the difference 1 - e would cancel.
        series = ((-6.2074265e-3 * y + 2.1027217e-2) * y - 5.3842276e-2) * y + 1.3332500e-1
        series = (series * y - 3.3333316e-1) * y  # tanh(x) / x - 1, to 2^-29
        return tl.where(tl.abs(x) < 0.55, x + x * series, tl.where(x < 0, -large, large))


@triton.jit
def load_mask(tile, f, seq, head, MASKED: tl.constexpr):
    """The mask's tile; 0 without a mask, and where the mask has no entry. `scores` applies it."""
    i, j, row, column = tile
    strides = f.mask_strides
    if strides is None:
        return 0
    elif f.policy.mask_tma is not None:  # A stride of 0 stands for a size of 1.
        b = tl.where(strides[0] == 0, 0, seq.queries.b)
        h = tl.where(strides[1] == 0, 0, head.h)
        M = head.mask.load([b, h, i, j])
        if row.shape[0] == 1:
            return tl.trans(M.reshape(row.shape[1], column.shape[0]))
        else:
            return M.reshape(row.shape[0], column.shape[1])
    elif f.policy.broadcast_rows is not None:  # One number a key, which `scores` broadcasts over the queries.
        key = j + column
        return tl.load(head.mask + key.to(tl.int64) * strides[3], mask=key < seq.keys.N, other=0)
    else:
        exists = row < seq.queries.N - i
        if MASKED:
            exists = exists & (column < seq.keys.N - j)
        corner = head.mask + i.to(tl.int64) * strides[2] + j.to(tl.int64) * strides[3]
        pointer = corner + row.to(tl.int64) * strides[2] + column.to(tl.int64) * strides[3]  # Strides may be huge.
        return tl.load(pointer, mask=exists, other=0)


@triton.jit
def hide(S, M, f):
    """-inf where the boolean mask M is 0, S elsewhere."""
    if f.policy.in_fours is not None:  # Otherwise the compiler would put every byte into a register of its own.
        return tl.inline_asm_elementwise(WHERE_SEEN, "=f,=f,=f,=f,r,f,f,f,f", [M, S], tl.float32, is_pure=True, pack=4)
    else:
        return tl.where(M != 0, S, float("-inf"))


@triton.jit
def scores(X, M, tile, f, seq, head, MASKED: tl.constexpr):
    """(S, dS/dX) of a tile, S in units of 1 / c. M is the mask's. If not MASKED, position hides none of the keys."""
    i, j, row, column = tile
    S = X
    derivative = 1.0
    if f.softcap is not None:
        S = tanh(X * (f.scale / f.softcap), f.policy.approximate)
        derivative = 1 - S * S
    if f.added is not None:
        M = M.to(tl.float32)
        S = S * (f.scale if f.softcap is None else f.softcap) + M
        S = tl.where(M == float("-inf"), float("-inf"), tl.maximum(S, MASK_FLOOR, propagate_nan=tl.PropagateNan.ALL))
    if f.seen is not None:
        S = hide(S, M, f)
    if f.slopes is not None:  # Positions count from j, so that those nearby are small, and exact in float32.
        first = row.to(tl.float32) - (j - i - seq.shift).to(tl.float32)
        S -= head.slope * tl.abs(first - column.to(tl.float32))
    if MASKED:
        query = i + row
        key = j + column
        seen = key < seq.keys.N
        if f.right is not None:
            seen = seen & (key <= query + (seq.shift + f.right))
        if f.left is not None:
            seen = seen & (key >= query + (seq.shift - f.left))
        S = tl.where(seen, S, float("-inf"))
    return S, derivative


@triton.jit
def kept(tile, f, seq, head):
    """Which entries of the tile dropout keeps: a function of seed, sequence, head, query and key alone.

    The generator Philox turns the counter (key div 16, query, head, sequence) into sixteen bytes, one for each key.
    """
    i, j, row, column = tile
    TRANSPOSED: tl.constexpr = row.shape[0] == 1
    j += f.first_key
    key = j + column
    query = i + row
    if f.first_query is not None:
        query += f.first_query
    if f.policy.aligned is not None:
        CALLS: tl.constexpr = column.shape[0] * column.shape[1] // 16
        call = (j >> 4) + tl.arange(0, CALLS)
        w0, w1, w2, w3 = tl.philox(seq.seed, call[:, None] if TRANSPOSED else call[None, :], query, head.h, seq.number)
        words = tl.join(tl.join(w0, w2), tl.join(w1, w3))  # [..., x, y] is word 2 x + y
        words = words.reshape(words.shape[0], words.shape[1], 4, 1)
        numbers = words >> (8 * tl.arange(0, 4)).to(tl.uint32)[None, None, None, :]  # (..., 4, 4): words, bytes
        if TRANSPOSED:  # from (calls, queries, words, bytes) to (calls, words, bytes, queries)
            numbers = numbers.permute(0, 2, 3, 1)
        numbers = numbers.reshape(tl.broadcast(row, column)[0].shape)
    else:  # One call of the generator for each entry, which uses one of the sixteen bytes.
        w0, w1, w2, w3 = tl.philox(seq.seed, key >> 4, query, head.h, seq.number)
        word = (key >> 2) & 3
        numbers = tl.where(word < 2, tl.where(word == 0, w0, w1), tl.where(word == 2, w2, w3))
        numbers = numbers >> (8 * (key & 3)).to(tl.uint32)
    return (numbers & 255).to(tl.int32) < f.threshold
