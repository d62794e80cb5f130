# SPDX-License-Identifier: MIT
"""The backward of flash.py on Hopper with a window, packed sequences, a soft-cap, dropout or sinks, in a single pass.

It is bwd_2_gluon.py, five products for each pair of tiles where flash_kernels.py makes seven, with these changes:

    window     The keys of a tile are seen by the queries from the first key's left edge to the last key's right edge.
               First come the tiles of queries that an edge cuts, which need a mask, and then the others. A tile with
               keys that do not exist needs a mask for all queries.
    packed     Tiles are read and written by descriptors that end where a sequence ends: `ragged` in flash_gluon.py.
               Behind a sequence's end lie other numbers of delta, which count as 0.
    soft-cap   S^T becomes tanh(S^T scale / softcap), and dS^T is multiplied by the derivative, 1 - tanh^2.
    dropout    P^T is dropped for dV, dP^T for dS^T. A warp has 16 keys, those of one call of the generator Philox, and
               all queries of a tile: each lane makes the calls of some queries, turns the 16 bytes of a call into 16
               bits, and gives them to the lanes that have scores of this query.
    sinks      lse contains the sink, so nothing changes but delta_kernel, which gives its gradient, too.

dq changes in its last bits from run to run, because it is added up in any order. Left out: masks, ALiBi, first_query
and first_key, head_dims below 64 and above 128: flash.py has these. Slower: both edges of a window in one loop, with
two comparisons or with one of numbers without a sign.
Spills in bfloat16 with Triton 3.6 and 3.7: up to 24 words in a step, with dropout 41. float16 and pairs of features
spill more: see `fits`. With Triton 3.9 it is 39 to 95 words, and at head_dim 64 with dropout ptxas serialises all
products.
Sources: FlashAttention-2, Algorithm 2; FlashAttention-3, section 3.1; for dropout in the backward FlashAttention,
Algorithm 4. Launch: grid (sequences * Hk * ceil(longest Nk / 128),), 12 warps, one program a multiprocessor. Needs
torch, Triton 3.6 to 3.9, a Hopper GPU, bwd_2_gluon.py, fwd_3_gluon.py, scheduler.py, replay.py, flash.py,
flash_gluon.py, flash_kernels.py, scores.py and tiles.py.
"""

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, warpgroup_mma_wait

from .. import bwd_2_gluon
from ..bwd_2_gluon import (
    STAGES,
    TILES,
    Bc,
    Inputs,
    Operands,
    add_products,
    allocate,
    describe_row_stats,
    layout,
    load_keys,
    load_pairs,
    load_queries,
    load_sums,
    matrix,
    probabilities,
    rounded,
    row_stats,
    schedule,
    scores,
    start_dP,
    start_dV,
    store_gradients,
    widened,
)
from ..fwd_3_gluon import LOG2_E, aligned, copy, describe
from ..replay import replayed
from ..scheduler import Lengths
from .flash import prepare
from .flash_gluon import BILLION, UNLIMITED, Rows, Visits, coordinates, ragged, visited, visits
from .flash_kernels import delta_kernel
from .scores import Features, check_options
from .tiles import new_like, strides_of

OPTIONS = (
    "causal", "scale", "window", "softcap", "sinks", "dropout_p", "seed", "cu_seqlens_q", "cu_seqlens_k",
    "max_seqlen_q", "max_seqlen_k",
)  # fmt: skip
FEW = 512  # In a narrower window, and in shorter packed sequences, flash.py was faster.
NUMBERS = "H", "group", "Nq", "Nk", "left", "right", "tiles_of_head", "threshold"


class Call(NamedTuple):
    """What is the same for all programs of a call."""

    lengths: Any  # Lengths; when packed, Nq and Nk are those of the longest sequence
    left: Any  # of the window
    right: Any
    starts_q: Any  # where the packed sequences begin; None if not packed
    starts_k: Any
    tiles_of_head: Any  # how many tiles of dQ a head has in `sums`
    to_cap: Any  # S^T is tanh(to_cap S^T); None without a soft-cap
    c: Any  # P^T = 2^(c S^T - lse)
    seed: Any  # of dropout, as two words; None without dropout
    threshold: Any
    kept_scale: Any


class WorkTile(NamedTuple):
    """What a program computes: the keys from row j of `keys` on, with these queries of each head of the group."""

    number: Any  # of the sequence or batch entry
    keys: Any  # Rows
    queries: Any  # Rows of the group's first head
    j: Any
    first: Any  # the first query that sees key j; it need not exist
    tiles: Any  # Visits, of tiles of queries
    sums: Any  # the number of their first tile of dQ in `sums`
    stats: Any  # where their numbers of lse_2 and delta begin


class Program(NamedTuple):
    """What a consumer needs in every step."""

    operands: Any
    queries: Any  # bwd_2_gluon.Queries
    dS: Any
    ready: Any
    call: Any
    work: Any
    first: Any  # the first query that sees each of the keys
    steps: Any


@gluon.jit
def work_tile(call, D_pad: gl.constexpr, Br: gl.constexpr, LONGEST_FIRST: gl.constexpr):
    """The WorkTile of this program. In a packed sequence that is shorter than the longest one, it may have no key."""
    H, group, Nq, Nk = call.lengths
    tile, head = schedule(gl.cdiv(Nk, Bc), LONGEST_FIRST, Nk, D_pad)
    Hk = H // group
    s, hk, j = head // Hk, head % Hk, tile * Bc
    b, q_start, k_start, sums, stats = s, 0, 0, s * H * call.tiles_of_head, 0
    if call.starts_q is not None:
        b = 0
        q_start, k_start = gl.load(call.starts_q + s), gl.load(call.starts_k + s)
        Nq, Nk = gl.load(call.starts_q + s + 1) - q_start, gl.load(call.starts_k + s + 1) - k_start
        sums, stats = q_start // Br + s, (q_start // 4 + s) * 4
    first = j - (Nk - Nq) - call.right
    tiles = visits(first, first + call.left + call.right + 1, Nq, Bc, Br)
    if j + Bc > Nk:  # No query sees the keys that do not exist, so that all tiles are masked.
        tiles = Visits(tiles.begin, tiles.end, tiles.end, tiles.end)
    keys, queries = Rows(b, hk, k_start, Nk), Rows(b, hk * group, q_start, Nq)
    return WorkTile(s, keys, queries, j, first, tiles, sums, stats)


@gluon.jit
def produce(inputs, queries, keys, ready, work, call):
    """Loads K_j, V_j, and the tiles of queries that see some of these keys, of each head that shares the key head."""
    PACKED: gl.constexpr = call.starts_q is not None
    Br: gl.constexpr = inputs.q.block_type.shape[-2]
    if work.j < work.keys.N:
        load_keys(inputs.k, inputs.v, keys, coordinates(work.keys, work.j, PACKED))
        count = work.tiles.end - work.tiles.begin
        b, first_head, start, Nq = work.queries
        for g in range(call.lengths.group):
            for n in range(count):
                i = visited(n, work.tiles) * Br
                where = coordinates(Rows(b, first_head + g, start, Nq), i, PACKED)
                row = b * call.lengths.H + first_head + g
                load_queries(inputs, queries, ready, g * count + n, where, row, work.stats + i)


@gluon.jit
def philox(c0, c1, c2, c3, k0, k1):
    """Four words (uint32) of the generator Philox4x32-10, from the counter and the key."""
    for _ in gl.static_range(10):
        high, low = gl.umulhi(0xD2511F53, c0), c0 * 0xD2511F53
        c0, c1, c2, c3 = gl.umulhi(0xCD9E8D57, c2) ^ c1 ^ k0, c2 * 0xCD9E8D57, high ^ c3 ^ k1, low
        k0 += 0x9E3779B9
        k1 += 0xBB67AE85
    return c0, c1, c2, c3


@gluon.jit
def bytes_below(word, threshold):
    """Four bits: which bytes of a word are less than the threshold, that of the lowest byte first."""
    # A difference of 16 bits for each byte, of which bit 8 says whether it is at least 2^8.
    limit = threshold * 0x10001 + 0xFF00FF
    even, odd = limit - (word & 0xFF00FF), limit - (word >> 8 & 0xFF00FF)
    bits = (even >> 8 & 0x10001) | (odd >> 7 & 0x20002)
    return (bits | bits >> 14) & 15


@gluon.jit
def kept(call, work, h, i, S):
    """Which entries of P^T (Bc, Br), laid out as S, dropout keeps for the queries from i on: as scores.kept does."""
    Br: gl.constexpr = S.shape[1]
    of_calls: gl.constexpr = gl.BlockedLayout([1, Br // 32], [1, 32], [8, 1], [1, 0])  # a warp has 16 keys
    calls = work.j // 16 + gl.arange(0, Bc // 16, gl.SliceLayout(1, of_calls))
    query = i + gl.arange(0, Br, gl.SliceLayout(0, of_calls))
    zeros = gl.full((Bc // 16, Br), 0, gl.uint32, of_calls)
    c0, c1 = zeros + calls.to(gl.uint32)[:, None], zeros + query.to(gl.uint32)[None, :]
    w0, w1, w2, w3 = philox(c0, c1, zeros + h.to(gl.uint32), zeros + work.number.to(gl.uint32), *call.seed)
    t = call.threshold.to(gl.uint32)
    bits = bytes_below(w0, t) | bytes_below(w1, t) << 4 | bytes_below(w2, t) << 8 | bytes_below(w3, t) << 12
    apart: gl.constexpr = S.reshape((Bc // 16, 16, Br)).type.layout
    key = gl.arange(0, 16, gl.SliceLayout(0, gl.SliceLayout(2, apart)))
    bits = gl.convert_layout(bits, gl.SliceLayout(1, apart)).expand_dims(1)
    of_key = (bits >> key.to(gl.uint32).expand_dims(0).expand_dims(2)) & 1
    return gl.convert_layout(of_key.reshape((Bc, Br)), S.type.layout) != 0


@gluon.jit
def step(state, program, dq, t, n, h, EARLY: gl.constexpr, LATE: gl.constexpr):
    """bwd_2_gluon.step with the features, for a tile of queries of head h.

    EARLY and LATE: whether the tile may have queries that are too early, or too late, to see some of the keys.
    """
    S, dK, dV = state
    operands, queries, dS_stages, ready, call, work, first, steps = program
    Br: gl.constexpr = S.shape[1]
    dtype: gl.constexpr = queries.Q.dtype
    stage = n % STAGES
    Q_i, dO_i, dS_i = matrix(queries.Q, stage), matrix(queries.dO, stage), dS_stages.index(n & 1)
    query = gl.arange(0, Br, gl.SliceLayout(0, S.type.layout))
    dP = start_dP(operands.V, dO_i)
    if call.seed is not None:
        keep = kept(call, work, h, t * Br, S)
    if call.to_cap is not None:
        S = gl.inline_asm_elementwise("tanh.approx.f32 $0, $1;", "=f,f", [S * call.to_cap], gl.float32, True, 1)
        derivative = 1 - S * S
    if EARLY:
        S = gl.where(query[None, :] >= (first - t * Br)[:, None], S, float("-inf"))
    if LATE:
        S = gl.where(query[None, :] <= (first - t * Br + call.left + call.right)[:, None], S, float("-inf"))
    P = rounded(probabilities(S, row_stats(queries.lse_2, stage, S), call.c), dtype)
    P_kept = P
    if call.seed is not None:
        P_kept = gl.where(keep, P, 0.0)
    dV = start_dV(dV, P_kept, dO_i)
    dP = warpgroup_mma_wait(1, (dP,))  # all products but the last one have ended
    if call.seed is not None:
        dP = gl.where(keep, dP * call.kept_scale, 0.0)
    delta_i = row_stats(queries.delta, stage, dP)
    if (EARLY or LATE) and call.starts_q is not None:
        delta_i = gl.where(query < work.queries.N - t * Br, delta_i, 0.0)  # that of the next sequence may be NaN
    dS = widened(P) * (dP - delta_i[None, :])
    if call.to_cap is not None:
        dS *= derivative
    return add_products(dS.to(dtype), dK, dV, Q_i, dS_i, operands, queries, ready, dq, t, n, steps)


@gluon.jit
def consume(dq, dk, dv, queries, keys, dS, ready, work, call, scale, NARROW: gl.constexpr):
    """The 128 keys from j on. The tiles of queries come in the order of `visited`.

    NARROW: a tile that is masked for queries that are too early may also have some that are too late.
    """
    PACKED: gl.constexpr = call.starts_q is not None
    Br: gl.constexpr = queries.Q.shape[-2]
    D_pad: gl.constexpr = queries.Q.shape[-1]
    begin, whole, full, end = work.tiles
    if work.j < work.keys.N:
        # A query that does not exist needs no mask: Q, dO and delta are 0 there. A key that does not exist needs one:
        # its dS = -P delta may be infinite in float16, and infinity times the 0 in K_j would be NaN in dq.
        key = gl.arange(0, Bc, gl.SliceLayout(1, layout(Br)))
        first = gl.where(work.j + key < work.keys.N, work.first + key, BILLION)
        mbarrier.wait(keys.full.index(0), 0)
        K, V = matrix(keys.K, 0), matrix(keys.V, 0)
        K_left = K
        if Br == 128:
            K_left = load_pairs(K)
        dK = gl.full((Bc, D_pad), 0, gl.float32, layout(D_pad))
        operands, steps = Operands(K_left, K, V), (end - begin) * call.lengths.group
        program = Program(operands, queries, dS, ready, call, work, first, steps)
        S = warpgroup_mma_wait(0, (scores(K_left, queries, 0),))
        state, n = (S, dK, dK), 0
        for g in range(call.lengths.group):
            h = work.queries.h + g
            dq_g = dq + (work.sums + h * call.tiles_of_head).to(gl.int64) * (Br * D_pad)
            for passed in range(0, end - full):
                state = step(state, program, dq_g, end - 1 - passed, n, h, False, True)
                n += 1
            for t in range(begin, whole):
                state = step(state, program, dq_g, t, n, h, True, NARROW)
                n += 1
            for passed in range(0, full - whole):
                state = step(state, program, dq_g, full - 1 - passed, n, h, False, False)
                n += 1
        S, dK, dV = state
        if call.seed is not None:
            dV *= call.kept_scale
        store_gradients(dk, dv, keys, coordinates(work.keys, work.j, PACKED), dK * scale, dV)


@gluon.jit(do_not_specialize=NUMBERS)  # so that one compiled kernel serves every length
def backward_kernel(
    q, k, v, dout, lse_2, delta, dq, dk, dv, starts_q, starts_k, seed, H, group, Nq, Nk, left, right, tiles_of_head,
    threshold, kept_scale, to_cap, c, scale, LONGEST_FIRST: gl.constexpr, NARROW: gl.constexpr,
):  # fmt: skip
    queries, keys, dS, ready = allocate(q, k, lse_2)
    words = None
    if seed is not None:
        number = gl.load(seed)
        words = (number & 0xFFFFFFFF).to(gl.uint32), (number >> 32).to(gl.uint32)
    lengths = Lengths(H, group, Nq, Nk)
    call = Call(lengths, left, right, starts_q, starts_k, tiles_of_head, to_cap, c, words, threshold, kept_scale)
    work = work_tile(call, k.block_type.shape[-1], q.block_type.shape[-2], LONGEST_FIRST)
    # The warps and registers are those of bwd_2_gluon.py.
    gl.warp_specialize([
        (consume, (dq, dk, dv, queries, keys, dS, ready, work, call, scale, NARROW)),
        (produce, (Inputs(q, k, v, dout, lse_2, delta), queries, keys, ready, work, call)),
    ], [1], [24])  # fmt: skip


@triton.jit(do_not_specialize=["H", "total", "Nq", "tiles_of_head"])
def packed_dq_kernel(
    sums, dq, starts, H, total, Nq, tiles_of_head, scale, D: tl.constexpr, D_pad: tl.constexpr, Br: tl.constexpr
):
    """dq (1, H, total, D) = scale * sums. Grid: sequences * H * ceil(Nq / Br), Nq rows in the longest sequence."""
    program, tiles = tl.program_id(0), tl.cdiv(Nq, Br)
    i, h, s = program % tiles * Br, program // tiles % H, program // tiles // H
    start = tl.load(starts + s)
    N = tl.load(starts + s + 1) - start
    if i < N:
        number = h * tiles_of_head + start // Br + s + i // Br
        tile = load_sums(sums + number.to(tl.int64) * Br * D_pad, D_pad, Br) * scale
        row, column = i + tl.arange(0, Br)[:, None], tl.arange(0, D_pad)[None, :]
        place = dq + (h.to(tl.int64) * total + start + row) * D + column
        tl.store(place, tile.to(dq.dtype.element_ty), mask=(row < N) & (column < D))


def fits(q, asked):
    """Whether `backward` takes q, and is faster than flash.py. asked: features in use and causal, {name: value}."""
    if asked.keys() - {*OPTIONS} or q.shape[-1] < 64 or q.numel() == 0:
        return False
    left, right = asked.get("window", (-1, -1))
    right = 0 if asked.get("causal") else right
    few = min(left, right) >= 0 and left + right < FEW or asked.get("max_seqlen_q", FEW) < FEW
    hard = len({"softcap", "dropout_p"} & asked.keys())
    spilling = hard == 2 or hard == 1 and q.dtype == torch.float16 and q.shape[-1] == 64  # too many registers
    if "cu_seqlens_q" in asked and 128 * len(asked["cu_seqlens_q"]) > q.shape[2]:
        return False  # A sequence has a tile of sums or more, which would take memory if all are short.
    return not (few or spilling) and bwd_2_gluon.refusal(q) is None


@replayed
def backward(record, dout, q, k, v, out, lse, **options):
    """(dq, dk, dv), and dsinks with sinks, like flash.backward, with some of its options: OPTIONS.

    dq changes in its last bits from run to run. head_dim is 64 to 128, and there is at least one query and one key.
    """
    check_options(q, **options)
    if others := options.keys() - {*OPTIONS}:
        raise TypeError(f"the backward in one sweep has no {min(others)}; flash.backward has it.")
    if reason := bwd_2_gluon.refusal(q):
        raise ValueError(f"the backward in one sweep {reason}.")
    sequences, Nq, Nk, f = prepare(record, q, k, **options)
    (B, H, total, D), packed = q.shape, f.cu_seqlens_q is not None
    tiles, stride = triton.cdiv(Nq, 64), row_stats_stride(total, sequences if packed else 0)
    lse_2, delta = record.new((B * H, stride)), record.new((B * H, stride))
    dsinks = None if f.sinks is None else record.new((sequences * tiles, H))
    lse = record.derive(torch.Tensor.contiguous, lse)
    own = Features(f.scale, sinks=f.sinks, cu_seqlens_q=f.cu_seqlens_q, cu_seqlens_k=f.cu_seqlens_k)
    record.launch(
        delta_kernel, sequences * H * tiles, dout, out, lse, lse_2, delta, dsinks, strides_of(dout), strides_of(out),
        stride, H, Nq, Nk, total, own, D=D, D_pad=triton.next_power_of_2(D), Br=64,
    )  # fmt: skip
    plain = f.left is None and f.right in (None, 0) and f.softcap is None and f.seed is None and not packed
    if plain:
        gradients = bwd_2_gluon.gradients(record, dout, q, k, v, lse_2, delta, f.right == 0, f.scale)
    else:
        gradients = gradients_of(record, dout, q, k, v, lse_2, delta, sequences, Nq, Nk, f)
    if dsinks is None:
        return gradients
    dtype = options["sinks"].dtype
    return *gradients, record.derive(lambda dsinks: dsinks.sum(0).to(dtype), dsinks)


def row_stats_stride(rows, sequences):
    """How far apart the heads are in lse_2 and delta: each head and each packed sequence begins at 16 bytes."""
    return 4 * (triton.cdiv(rows, 4) + sequences)


def gradients_of(record, dout, q, k, v, lse_2, delta, sequences, Nq, Nk, f):
    """(dq, dk, dv) from what delta_kernel has left in lse_2 and delta."""
    (B, H, total, D), Hk, packed = q.shape, k.shape[1], f.cu_seqlens_q is not None
    dout, q, k, v = (x if aligned(x) else record.derive(copy, x) for x in (dout, q, k, v))
    dq = new_like(record, q, f.cu_seqlens_q)
    dk, dv = (new_like(record, x, f.cu_seqlens_k) for x in (k, v))
    D_pad = 64 if D <= 64 else 128
    Br = TILES[D_pad]
    tiles = triton.cdiv(Nq, Br)
    tiles_of_head = total // Br + sequences if packed else tiles
    sums = record.new((B * H * tiles_of_head * Br * D_pad,), fill=0)
    kind = ragged if packed else describe
    queries = [kind(x, Br, D_pad) for x in (q, dout)]
    of_rows = [describe_row_stats(x, x.shape[1] if packed else Nq, Br) for x in (lse_2, delta)]
    keys = [kind(x, Bc.value, D_pad) for x in (k, v, dk, dv)]
    left, right = (UNLIMITED if x is None else min(x, UNLIMITED) for x in (f.left, f.right))
    c = (f.softcap or f.scale) * LOG2_E.value
    to_cap = f.softcap and f.scale / f.softcap
    # Both edges may cut one tile of queries if the window is narrow; in a ragged tile of keys, if its left part is.
    narrow = left + right < Bc.value + Br - 3 or left < Bc.value - 2
    record.launch(
        backward_kernel, sequences * Hk * triton.cdiv(Nk, Bc.value), queries[0], *keys[:2], queries[1], *of_rows, sums,
        *keys[2:], f.cu_seqlens_q, f.cu_seqlens_k, f.seed, H, H // Hk, Nq, Nk, left, right, tiles_of_head, f.threshold,
        f.kept_scale, to_cap, c, float(f.scale), LONGEST_FIRST=right < Nk,
        NARROW=narrow, num_warps=8, maxnreg=168,
    )  # fmt: skip
    if packed:
        record.launch(
            packed_dq_kernel, sequences * H * tiles, sums, dq, f.cu_seqlens_q, H, total, Nq, tiles_of_head,
            float(f.scale), D=D, D_pad=D_pad, Br=Br, num_warps=8,
        )  # fmt: skip
    else:
        record.launch(
            bwd_2_gluon.dq_kernel, B * H * tiles, sums, dq, Nq, float(f.scale), D=D, D_pad=D_pad, Br=Br, num_warps=8
        )
    return dq, dk, dv
