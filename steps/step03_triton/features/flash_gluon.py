# SPDX-License-Identifier: MIT
"""The forward of flash.py with a window, packed sequences or sinks on Hopper.

In the forward a producer and two or three consumers work as in fwd_3_gluon.py. What is different:

    window    The queries of a tile see the keys from the first query's left edge to the last query's right edge. First
              come the tiles of keys that an edge cuts, which need a mask, and then the others.
    packed    A sequence is a range of rows of one long tensor. The copy engine reads zeros, and writes nothing, beyond
              the end of a tensor, but does not know where a sequence ends. `ragged` describes the tensor in such a way
              that a dimension ends where the sequence ends.
    sinks     One more key of value 0 at the end, by flash_kernels.add_sink.

Sources: FlashAttention-3, sections 3.1 and 3.2; for `ragged`, triton.tools.ragged_tma. Launch: as fwd_3_gluon.py;
at head_dim 64 with two consumers if many tiles need a mask, because three would spill registers then.
Left out: all other features, and head_dims below 64. A narrow window at 64 is faster in flash.py.
Needs torch, Triton, fwd_3_gluon.py, scheduler.py, scores.py, flash_kernels.py, replay.py and tiles.py.
"""

from typing import Any, NamedTuple

import torch
import triton
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from ..fwd_3_gluon import (
    LOG2_E,
    STAGES,
    TILES,
    Seen,
    aligned,
    copy,
    describe,
    first_step,
    get,
    last_product,
    load,
    load_pair,
    lse_and_sum,
    make_ring,
    pass_turn,
    refusal,
    step,
    store_lse,
    store_rows,
    wait_turn,
)
from ..replay import replayed
from ..scheduler import Lengths, Order, order_of, place, programs_for, rounds_of
from .flash_kernels import add_sink as add_sink_in_triton
from .scores import check_options
from .tiles import new_like, strides_of

add_sink = gluon.jit(add_sink_in_triton.fn)  # One text, because it means the same in both languages.
LENGTHS = "H", "group", "Nq", "Nk", "left", "right", "tiles", "section", "alternate", "total"
BILLION = gl.constexpr(2**30)
UNLIMITED = 2**29  # more keys than a GPU has memory for; twice as many are still a number of 32 bits
NARROW = 1024  # keys of a window, below which flash.py was faster at head_dim 64
LONG = 4096  # queries, below which two consumers were faster than three at head_dim 64 with a causal mask


class Call(NamedTuple):
    """What is the same for all programs of a call."""

    lengths: Any  # Lengths; when packed, Nq and Nk are those of the longest sequence
    order: Any  # Order
    left: Any  # of the window
    right: Any
    starts_q: Any  # where the packed sequences begin; None if not packed
    starts_k: Any


class Rows(NamedTuple):
    """The N rows of one sequence and head from `start` on."""

    b: Any
    h: Any
    start: Any
    N: Any


class Visits(NamedTuple):
    """The tiles begin ... end - 1 are visited, and whole ... full - 1 of them need no mask."""

    begin: Any
    whole: Any
    full: Any
    end: Any


class WorkTile(NamedTuple):
    """What a program computes in a round: the queries from row i of `queries` on. `seen` is that of the first one."""

    queries: Any  # Rows
    keys: Any
    i: Any
    seen: Any
    tiles: Any  # Visits


@gluon.jit
def coordinates(rows, row, PACKED: gl.constexpr):
    """What a descriptor calls this one of the rows."""
    if PACKED:  # see `ragged`
        return BILLION, rows.start + rows.N, rows.h, BILLION - rows.N + row, 0
    else:
        return rows.b, rows.h, row, 0


@gluon.jit
def visits(low, high, Nk, Br: gl.constexpr, Bc: gl.constexpr):
    """The Visits of Br queries. The first one sees the keys low ... high - 1, the next one those from low + 1 to high.

    At least one tile is visited.
    """
    end = gl.maximum(1, gl.cdiv(gl.minimum(Nk, high + Br - 1), Bc))
    begin = gl.maximum(0, low) // Bc
    whole = gl.minimum(end, gl.cdiv(gl.maximum(0, low + Br - 1), Bc))
    full = gl.maximum(whole, gl.minimum(Nk, gl.maximum(0, high)) // Bc)
    return Visits(begin, whole, full, end)


@gluon.jit
def visited(n, tiles):
    """The tile that is visited n-th.

    First come the tiles of the right edge, from the last one backwards; then those of the left edge, from the first one
    forwards; then all others, from the last one backwards.
    """
    begin, whole, full, end = tiles
    right = end - full
    cut = end - full + whole - begin
    return gl.where(n < right, end - 1 - n, gl.where(n < cut, begin + n - right, full - 1 - (n - cut)))


@gluon.jit
def work_tile(round, call, LONGEST_FIRST: gl.constexpr, Br: gl.constexpr, Bc: gl.constexpr):
    H, group, Nq, Nk = call.lengths
    b, h, i, _ = place(round, call.lengths, call.order, LONGEST_FIRST, Br, Bc)
    q_start, k_start = 0, 0
    if call.starts_q is not None:  # packed: b is the sequence
        q_start, k_start = gl.load(call.starts_q + b), gl.load(call.starts_k + b)
        Nq, Nk = gl.load(call.starts_q + b + 1) - q_start, gl.load(call.starts_k + b + 1) - k_start
    low, high = i + Nk - Nq - call.left, i + Nk - Nq + call.right + 1
    queries, keys = Rows(b, h, q_start, Nq), Rows(b, h // group, k_start, Nk)
    return WorkTile(queries, keys, i, Seen(low, high, Nk), visits(low, high, Nk, Br, Bc))


@gluon.jit
def produce(q, k, v, Q, K, V, call, LONGEST_FIRST: gl.constexpr, CONSUMERS: gl.constexpr):
    PACKED: gl.constexpr = call.starts_q is not None
    Bc: gl.constexpr = K.tiles.shape[-2]
    n_q, n = 0, 0  # tiles of queries and of keys so far
    beyond = coordinates(Rows(0, 0, 0, 0), call.lengths.Nk, PACKED)
    before = beyond  # where the last one of them begins
    for round in range(rounds_of(call.order, LONGEST_FIRST)):
        work = work_tile(round, call, LONGEST_FIRST, 64 * CONSUMERS, Bc)
        if work.i < work.queries.N:  # packed sequences may be shorter than the longest one
            count = work.tiles.end - work.tiles.begin
            for tile in range(count):
                where = coordinates(work.keys, visited(tile, work.tiles) * Bc, PACKED)
                load_pair(k, v, K, V, n + tile, where, before)
                before = where
                if tile == 0:  # as in fwd_3_gluon.py
                    for w in gl.static_range(CONSUMERS):
                        load(q, Q, n_q + w, coordinates(work.queries, work.i + 64 * w, PACKED))
            n_q += CONSUMERS
            n += count
    if not PACKED or n > 0:  # A program without queries must not end while this copy is on its way.
        load_pair(k, v, K, V, n, beyond, before)


@gluon.jit
def consume(
    w: gl.constexpr, consumers: gl.constexpr, out, lse, sinks, Q, K, V, call, total, scale, LONGEST_FIRST: gl.constexpr
):  # fmt: skip
    """Warpgroup w: 64 queries of each tile."""
    PACKED: gl.constexpr = call.starts_q is not None
    Bc: gl.constexpr = K.tiles.shape[-2]
    if w == consumers - 1:
        pass_turn(w, consumers)  # consumer 0 may begin
    n_q, n = w, 0  # tiles of queries and of keys so far
    for round in range(rounds_of(call.order, LONGEST_FIRST)):
        queries, keys, i, first_seen, tiles = work_tile(round, call, LONGEST_FIRST, 64 * consumers, Bc)
        if i < queries.N:
            count = tiles.end - tiles.begin
            seen = Seen(first_seen.low + 64 * w, first_seen.high + 64 * w, keys.N)
            Q_i = get(Q, n_q)
            state = first_step(w, consumers, Q_i, K, V, n, visited(0, tiles) * Bc, seen, scale * LOG2_E)
            masked = gl.maximum(1, count - (tiles.full - tiles.whole))
            for tile in range(1, masked):
                j = visited(tile, tiles) * Bc
                state = step(w, consumers, state, Q_i, K, V, n + tile, j, seen, scale * LOG2_E, True)
            for tile in range(masked, count):
                state = step(w, consumers, state, Q_i, K, V, n + tile, 0, seen, scale * LOG2_E, False)
            n += count
            m, l, O = last_product(state, K, V, n)
            lse_i, l = lse_and_sum(m, l, scale)
            if sinks is not None:
                lse_i, kept_share = add_sink(lse_i, gl.load(sinks + queries.h))
                l /= kept_share
            head = queries.h if PACKED else queries.b * call.lengths.H + queries.h
            store_lse(lse, lse_i, head, total, queries.start + i + 64 * w, queries.start + queries.N)
            store_rows(out, coordinates(queries, i + 64 * w, PACKED), Q, n_q, O, l)
            n_q += consumers
    if w == 0:
        wait_turn(w)  # a program must not end while a named barrier is half full


@gluon.jit(do_not_specialize=LENGTHS)  # so that one compiled kernel serves every length
def forward_kernel(
    q, k, v, out, lse, sinks, starts_q, starts_k, H, group, Nq, Nk, left, right, tiles, section, alternate, total,
    scale, LONGEST_FIRST: gl.constexpr, CONSUMERS: gl.constexpr,
):  # fmt: skip
    lengths, order = Lengths(H, group, Nq, Nk), Order(tiles, section, alternate)
    call = Call(lengths, order, left, right, starts_q, starts_k)
    Q_STAGES: gl.constexpr = 2 if q.block_type.shape[-1] <= 128 else 1  # as many as there is memory for
    Q, K = make_ring(q, Q_STAGES * CONSUMERS, 1), make_ring(k, STAGES, CONSUMERS)
    V = gl.allocate_shared_memory(v.dtype, [STAGES] + v.block_type.shape, v.layout)
    # The warps and registers are those of fwd_3_gluon.py.
    gl.warp_specialize([
        (consume, (w, CONSUMERS, out, lse, sinks, Q, K, V, call, total, scale, LONGEST_FIRST)) if w < CONSUMERS else
        (produce, (q, k, v, Q, K, V, call, LONGEST_FIRST, CONSUMERS)) for w in (0, 1, 2, 3)[:CONSUMERS + 1]
    ], [4, 1] if CONSUMERS == 2 else [4, 4, 1], [240, 24] if CONSUMERS == 2 else [160, 160, 24])  # fmt: skip


def ragged(x, rows, D_pad):
    """A descriptor of x (1, H, N, D), whose boxes have so many rows of one packed sequence.

    Its dimensions are (., ., H, 2^30, D), and its rows begin s entries of 2 bytes apart. Row r of a sequence of n rows
    that ends at row e is row 2^30 - n + r of the fourth dimension, which ends with the sequence. The first two
    dimensions move it to its place, by e - 2^30 rows: 2^30 steps of 2^34 - s entries are -2^30 rows and 2^65 bytes,
    which addresses of 64 bits ignore; e steps of s entries are e rows.
    """
    (_, h, s), most = strides_of(x), 2**31 - 2**16
    shape, strides = [most, most, x.shape[1], 2**30, x.shape[3]], [2**34 - s, s, h, s, 1]
    swizzled = gl.NVMMASharedLayout.get_default_for([1, 1, 1, rows, D_pad], gl.float16)  # bfloat16 has the same size
    return TensorDescriptor(x, shape, strides, [1, 1, 1, rows, D_pad], swizzled)


OPTIONS = "causal", "scale", "window", "sinks", "cu_seqlens_q", "cu_seqlens_k", "max_seqlen_q", "max_seqlen_k"


def fits(q, asked):
    """Whether `forward` takes q, and is faster than flash.py. asked: the features in use and causal, {name: value}."""
    if asked.keys() - {*OPTIONS} or not {"window", "sinks", "cu_seqlens_q"} & asked.keys():
        return False
    left, right = asked.get("window", (-1, -1))
    right = 0 if asked.get("causal") else right
    narrow, D = min(left, right) >= 0 and left + right < NARROW, q.shape[-1]
    return D >= 64 and not (D == 64 and narrow) and refusal(q) is None


@replayed
def forward(
    record, q, k, v, *, causal=False, scale=None, window=None, sinks=None, cu_seqlens_q=None, cu_seqlens_k=None,
    max_seqlen_q=None, max_seqlen_k=None,
):  # fmt: skip
    """(out, lse) like flash.forward, with its options. head_dim is 64 or more, and there is at least one key."""
    check_options(
        q, scale=scale, window=window, sinks=sinks, cu_seqlens_q=cu_seqlens_q, cu_seqlens_k=cu_seqlens_k,
        max_seqlen_q=max_seqlen_q, max_seqlen_k=max_seqlen_k,
    )  # fmt: skip
    (B, H, Nq, D), (Hk, Nk) = q.shape, k.shape[1:3]
    q, k, v = (x if aligned(x) else record.derive(copy, x) for x in (q, k, v))
    left, right = window or (None, None)
    left, right = (UNLIMITED if x in (None, -1) else min(x, UNLIMITED) for x in (left, 0 if causal else right))
    if cu_seqlens_q is None:
        kind, starts, sequences = describe, (None, None), B
        out, lse = record.new(q.shape, like=q), record.new(q.shape[:3])
    else:
        kind, sequences, Nq, Nk = ragged, len(cu_seqlens_q) - 1, max_seqlen_q, max_seqlen_k
        starts = [record.derive(torch.Tensor.contiguous, x) for x in (cu_seqlens_q, cu_seqlens_k)]
        out, lse = new_like(record, q, starts[0]), record.new(q.shape[:3], fill=-torch.inf)
    sinks = record.in_float32(sinks)
    D_pad = max(64, triton.next_power_of_2(D))
    many_masked = min(left, right) < Nk and (window is not None or cu_seqlens_q is not None or Nq < LONG)
    Br, Bc = (128, 128) if D_pad == 64 and many_masked else TILES[D_pad]
    descriptors = [kind(x, rows, D_pad) for x, rows in ((q, 64), (k, Bc), (v, Bc), (out, 64))]
    tiles, longest_first = sequences * H * triton.cdiv(Nq, Br), right < Nk
    programs = programs_for(q.device, tiles)
    ordered = longest_first and tiles > 0
    order = order_of(sequences * H, Nq, Nk, Br, Bc, D_pad, programs) if ordered else (1, 0)
    record.launch(
        forward_kernel, programs, *descriptors, lse, sinks, *starts, H, H // Hk, Nq, Nk, left, right, tiles, *order,
        q.shape[2], float(D**-0.5 if scale is None else scale), LONGEST_FIRST=longest_first, CONSUMERS=Br // 64,
        num_warps=4, maxnreg=168 if Br == 128 else 128,
    )  # fmt: skip
    return out, lse
