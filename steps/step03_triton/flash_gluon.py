# SPDX-License-Identifier: MIT
"""The forward of flash.py with a window, packed sequences or sinks on Hopper, and the backward with sinks alone.

In the forward a producer and two consumers work as in fwd_3_gluon.py. What is different:

    window    The queries of a program see the keys from the first query's left edge to the last query's right edge.
              First come the tiles that an edge cuts, which need a mask, and then the others.
    packed    A sequence is a range of rows of one long tensor. The copy engine reads zeros, and writes nothing, beyond
              the end of a tensor, but does not know where a sequence ends. `ragged` describes the tensor in such a way
              that a dimension ends there.
    sinks     One more key of value 0 at the end, by flash_kernels.add_sink. The backward finds it in lse, and needs no
              more than another delta_kernel before the kernels of bwd_2_gluon.py.

Sources: FlashAttention-3, sections 3.1 and 3.2; for `ragged`, triton.tools.ragged_tma. Launch: as fwd_3_gluon.py and
bwd_2_gluon.py. Left out: all other features, and in the forward head_dims up to 64, where flash.py is as fast: its
small programs share a multiprocessor. Needs torch, Triton, fwd_3_gluon.py, bwd_2_gluon.py, features.py,
flash_kernels.py, replay.py and tiles.py.
"""

import torch
import triton
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, tma, warpgroup_mma_wait
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from . import bwd_2_gluon
from .features import Features, check_options
from .flash_kernels import add_sink as add_sink_in_triton
from .flash_kernels import delta_kernel
from .fwd_3_gluon import (
    STAGES,
    TILES,
    aligned,
    async_store,
    copy,
    deal,
    describe,
    get,
    in_pairs,
    layout,
    load,
    make_ring,
    mask,
    online_softmax,
    refusal,
    release,
    start_output,
    start_scores,
    step,
)
from .replay import replayed
from .tiles import new_packed, strides_of

add_sink = gluon.jit(add_sink_in_triton.fn)  # One text, because what it calls means the same in both languages.
BILLION = gl.constexpr(2**30)
UNLIMITED = 2**29  # more keys than a GPU has memory for; twice as many are still a number of 32 bits


@gluon.jit
def coordinates(part, row, PACKED: gl.constexpr):
    """What a descriptor calls this row of a part: (batch entry, head, first row, number of rows)."""
    b, h, start, N = part
    if PACKED:  # see `ragged`
        return [BILLION, start + N, h, BILLION - N + row, 0]
    else:
        return [b, h, row, 0]


@gluon.jit
def visits(low, high, Nk, Br: gl.constexpr, Bc: gl.constexpr):
    """(begin, whole, full, end): tiles begin ... end - 1 are visited, and whole ... full - 1 of them need no mask.

    The first of the Br queries sees the keys low ... high - 1, the next one those from low + 1 to high.
    """
    end = gl.cdiv(gl.minimum(Nk, gl.maximum(0, high + Br - 1)), Bc)
    begin = gl.minimum(end, gl.maximum(0, low) // Bc)
    whole = gl.minimum(end, gl.cdiv(gl.maximum(0, low + Br - 1), Bc))
    full = gl.maximum(whole, gl.minimum(Nk, gl.maximum(0, high)) // Bc)
    return begin, whole, full, end


@gluon.jit
def visited(n, tiles):
    """The tile that is visited n-th.

    First come the tiles of the right edge, the last one first, then those of the left edge, the first one first, and
    then all others, the last one first.
    """
    begin, whole, full, end = tiles
    right, cut = end - full, end - full + whole - begin
    return gl.where(n < right, end - 1 - n, gl.where(n < cut, begin + n - right, full - 1 - (n - cut)))


@gluon.jit
def produce(q, k, v, Q, K, V, queries, keys, i, tiles, PACKED: gl.constexpr):
    begin, whole, full, end = tiles
    for n in range(end - begin):
        where = coordinates(keys, visited(n, tiles) * K[0].shape[-2], PACKED)
        load(k, K, n, where)
        if n == 0:
            for w in gl.static_range(2):
                load(q, Q, w, coordinates(queries, i + 64 * w, PACKED))
        load(v, V, n, where)


@gluon.jit
def consume(w, PACKED: gl.constexpr, out, lse, sinks, Q, K, V, queries, i, low, high, Nk, tiles, scale):
    """Warpgroup w: the 64 queries from i on, of which the first one sees the keys low ... high - 1."""
    Bc: gl.constexpr = K[0].shape[-2]
    D_pad: gl.constexpr = K[0].shape[-1]
    rows: gl.constexpr = gl.SliceLayout(1, layout(Bc))
    m, l = gl.full((64,), float("-inf"), gl.float32, rows), gl.full((64,), 0, gl.float32, rows)
    O = gl.full((64, D_pad), 0, gl.float32, layout(D_pad))  # not yet divided by l
    scale_log2 = scale * 1.4426950408889634  # exp is computed as a power of 2
    begin, whole, full, end = tiles
    blocks = end - begin
    if blocks > 0:  # otherwise nothing comes to wait for
        Q_i = get(Q, w)
        S = warpgroup_mma_wait(0, (start_scores(Q_i, get(K, 0)),))
        release(K, 0)
        S = mask(S, visited(0, tiles) * Bc, low, high, Nk)
        m, l, alpha, P = online_softmax(m, l, S, scale_log2)
        P = in_pairs(P, V[0].dtype)
        masked = gl.maximum(1, blocks - (full - whole))
        for n in range(1, masked):
            j = visited(n, tiles) * Bc
            m, l, P, O = step(m, l, P, O, Q_i, K, V, n, j, low, high, Nk, scale_log2, True)
        for n in range(masked, blocks):
            m, l, P, O = step(m, l, P, O, Q_i, K, V, n, 0, low, high, Nk, scale_log2, False)
        O = warpgroup_mma_wait(0, (start_output(O, P, get(V, blocks - 1)),))
    l = gl.where(l == 0, 1.0, l)  # a row that saw no key then gets out = 0 / 1 and lse = -inf + log 1
    row = i + gl.arange(0, 64, rows)
    lse += row
    lse_i = m * scale + gl.log(l)
    if sinks is not None:
        lse_i, kept_share = add_sink(lse_i, gl.load(sinks + queries[1]))
        l /= kept_share
    gl.store(lse, lse_i, mask=row < queries[3])
    tile = Q[0].index(w)  # Q_i is not needed any more, so out leaves the chip from its place
    inverse = gl.convert_layout(1 / l, gl.SliceLayout(1, layout(D_pad)))
    tile.reshape((64, D_pad)).store((O * inverse[:, None]).to(out.dtype))
    fence_async_shared()  # TMA must see what was stored
    async_store(out, coordinates(queries, i, PACKED), tile)
    tma.store_wait(0)  # the shared memory must live until TMA has read it


@gluon.jit(do_not_specialize=["H", "group", "Nq", "Nk", "left", "right", "total"])  # one kernel for every length
def forward_kernel(
    q, k, v, out, lse, sinks, starts_q, starts_k, H, group, Nq, Nk, left, right, total, scale
):  # fmt: skip
    Br: gl.constexpr = 128
    PACKED: gl.constexpr = starts_q is not None
    programs = gl.cdiv(Nq, Br)
    n, bh = deal(programs, right < Nk, Nk, k.block_type.shape[-1])
    i = (programs - 1 - n) * Br
    b, h = bh // H, bh % H
    q_start, k_start = 0, 0
    if PACKED:  # b is the sequence, and Nq the length of the longest one
        q_start, k_start = gl.load(starts_q + b), gl.load(starts_k + b)
        Nq, Nk = gl.load(starts_q + b + 1) - q_start, gl.load(starts_k + b + 1) - k_start
        lse += h.to(gl.int64) * total + q_start
        if i >= Nq:
            return
    else:
        lse += bh.to(gl.int64) * Nq
    queries, keys = (b, h, q_start, Nq), (b, h // group, k_start, Nk)
    low, high = i + Nk - Nq - left, i + Nk - Nq + right + 1
    tiles = visits(low, high, Nk, Br, k.block_type.shape[-2])
    Q, K, V = make_ring(q, 2, 1), make_ring(k, STAGES, 2), make_ring(v, STAGES, 2)
    # The warps and registers are those of fwd_3_gluon.py.
    gl.warp_specialize([
        (consume, (0, PACKED, out, lse, sinks, Q, K, V, queries, i, low, high, Nk, tiles, scale)),
        (consume, (1, PACKED, out, lse, sinks, Q, K, V, queries, i + 64, low + 64, high + 64, Nk, tiles, scale)),
        (produce, (q, k, v, Q, K, V, queries, keys, i, tiles, PACKED)),
    ], [4, 1], [240, 24])  # fmt: skip


def ragged(x, rows, D_pad):
    """A descriptor of x (1, H, N, D), whose boxes have so many rows of one packed sequence.

    Its dimensions are (., ., H, 2^30, D), and its rows begin s entries of 2 bytes apart. Row r of a sequence of n rows
    that ends at row e is row 2^30 - n + r of the fourth dimension, which ends with the sequence. The first two take it
    to its place: 2^30 steps of 2^34 - s entries are 2^65 bytes, which in addresses of 64 bits are none, and -2^30 rows;
    and e steps of s entries are e rows.
    """
    (_, h, s), most = strides_of(x), 2**31 - 2**16
    shape, strides = [most, most, x.shape[1], 2**30, x.shape[3]], [2**34 - s, s, h, s, 1]
    swizzled = gl.NVMMASharedLayout.get_default_for([1, 1, 1, rows, D_pad], gl.float16)  # bfloat16 has the same size
    return TensorDescriptor(x, shape, strides, [1, 1, 1, rows, D_pad], swizzled)


OPTIONS = "causal", "scale", "window", "sinks", "cu_seqlens_q", "cu_seqlens_k", "max_seqlen_q", "max_seqlen_k"


def fits(q, asked):
    """Whether `forward` takes q, and is faster than flash.py. asked: the names of the features in use, and causal."""
    if {*asked} - {*OPTIONS} or not {"window", "sinks", "cu_seqlens_q"} & {*asked}:
        return False
    return q.shape[3] > 64 and refusal(q) is None


@replayed
def forward(
    record, q, k, v, *, causal=False, scale=None, window=None, sinks=None, cu_seqlens_q=None, cu_seqlens_k=None,
    max_seqlen_q=None, max_seqlen_k=None,
):  # fmt: skip
    """(out, lse) as flash.forward gives them, with its options. head_dim is above 64, and there is at least one key."""
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
        kind, sequences, Nq = ragged, len(cu_seqlens_q) - 1, max_seqlen_q
        starts = [record.derive(torch.Tensor.contiguous, x) for x in (cu_seqlens_q, cu_seqlens_k)]
        out, lse = new_packed(record, q, starts[0]), record.new(q.shape[:3], fill=-torch.inf)
    if sinks is not None:
        sinks = record.derive(lambda sinks: sinks.float().contiguous(), sinks)
    D_pad = triton.next_power_of_2(D)
    Br, Bc = TILES[D_pad]
    descriptors = [kind(x, rows, D_pad) for x, rows in ((q, 64), (k, Bc), (v, Bc), (out, 64))]
    record.launch(
        forward_kernel, sequences * H * triton.cdiv(Nq, Br), *descriptors, lse, sinks, *starts, H, H // Hk, Nq, Nk,
        left, right, q.shape[2], float(D**-0.5 if scale is None else scale), num_warps=4, maxnreg=168,
    )  # fmt: skip
    return out, lse


def fits_backward(q, asked):
    """Whether `backward` takes q. asked: the names of the features in use, without causal."""
    return [*asked] == ["sinks"] and q.shape[3] >= 64 and bwd_2_gluon.refusal(q) is None


@replayed
def backward(record, dout, q, k, v, out, lse, *, sinks, causal=False, scale=None):
    """(dq, dk, dv, dsinks), as flash.backward gives them with no other option than these.

    dq changes in its last bits from run to run. head_dim is at most 128, and there is at least one query and one key.
    """
    check_options(q, scale=scale, sinks=sinks)
    (B, H, Nq, D), Nk = q.shape, k.shape[2]
    tiles, stride = triton.cdiv(Nq, 64), 4 * triton.cdiv(Nq, 4)  # each row begins at a multiple of 16 bytes
    lse_2, delta = record.new((B * H, stride)), record.new((B * H, stride))
    dsinks, dtype = record.new((B * tiles, H)), sinks.dtype
    float_sinks = record.derive(lambda sinks: sinks.float().contiguous(), sinks)
    f = Features(D**-0.5 if scale is None else scale, sinks=float_sinks)
    lse = record.derive(torch.Tensor.contiguous, lse)
    record.launch(
        delta_kernel, B * H * tiles, dout, out, lse, lse_2, delta, dsinks, strides_of(dout), strides_of(out), stride,
        H, Nq, Nk, Nq, f, D=D, D_pad=triton.next_power_of_2(D), Br=64,
    )  # fmt: skip
    gradients = bwd_2_gluon.gradients(record, dout, q, k, v, lse_2, delta, causal, scale)
    return *gradients, record.derive(lambda dsinks: dsinks.sum(0).to(dtype), dsinks, like=sinks)
