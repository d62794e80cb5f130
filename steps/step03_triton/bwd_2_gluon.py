# SPDX-License-Identifier: MIT
"""Rung 2, "gluon": dK, dV and dQ in one pass of five products, with warp specialisation written by hand.

    producer, one warp:               consumers, two warpgroups, 128 keys together:
      load K_j and V_j                  S^T = K_j Q_i^T of the first tile of queries
      for each tile of Br queries:      for each tile of Br queries:
        wait for an empty stage           dP^T = V_j dO_i^T           P^T = exp2(S^T - lse) meanwhile
        load Q_i, dO_i, lse, delta        dV += P^T dO_i              dS^T = P^T (dP^T - delta) meanwhile
                                          store dS^T, and meet the other warpgroup
                                          dQ_i = dS_i K_j   S^T of the next tile   dK += dS^T Q_i
                                          add dQ_i to dq in memory meanwhile

The idea: rung 1 computes S and dP twice, once for dK and dV and once for dQ, seven products where five are enough. Here
they are computed once. The price is that dQ_i is summed in memory, by additions of float32 that the L2 cache makes in
any order: dq changes in its last bits from run to run. For a bit-equal dq there is rung 1. A thread adds 4 numbers
with one instruction. So dq is stored in the order of the registers, and dq_kernel sorts it at the end.

It is stage 02's bwd_3_hopper.cu in Gluon, except that S^T is computed a step ahead, so that the tensor cores have work
while dQ_i is added. Gluon cannot keep K_j in registers as an operand. It can keep K_j there as pairs of numbers, which
is done at D <= 64; at D = 128 there are too few registers, even if S^T is not computed ahead. The compiler lets all
warps wait for each other where they arrive at a barrier, and before and after dS^T is stored: three barriers a step.
Additions, and two roundings at a time, need a line of PTX each.

Left out, because it was slower: no producer; two consumers of 64 keys each with an mbarrier between them; the tiles of
queries from the first to the last, so that with a causal mask every program begins with another one; dV after the
barrier; dK before it; dK a step later, during the exponentials, with dS^T from shared memory; several tiles of keys a
program, with the next K_j on its way, at D = 128; at D = 64 tiles of 64 queries; P rounded one by one on the unit that
exp2 needs, as the compiler does where P has two uses. Not faster: an arrival by a named barrier, which saves one of the
three; a polynomial for one exp2 of four; the heads from the last to the first, so that sums of dq are still in the L2
cache. Too few registers: dK += dS^T Q_i, with dS^T in registers, still running while the next step begins, which makes
ptxas serialise all products.
Spills: up to 9 words a step at D = 64, none at D = 128; some 20 before and after the steps. That is with Triton 3.6 and
3.7; with 3.9 it is 35 to 61 words a step.
Source: FlashAttention-2, Algorithm 2; FlashAttention-3, section 3.1. Launch: grid (B * Hk * ceil(Nk / 128),), 12 warps,
one program a multiprocessor. Needs torch, Triton 3.6 to 3.9, a Hopper GPU, bwd_1_tma.py, fwd_3_gluon.py, scheduler.py
and replay.py.
"""

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia import hopper
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, tma, warpgroup_mma, warpgroup_mma_wait
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from . import fwd_3_gluon
from .bwd_1_tma import delta_kernel
from .fwd_3_gluon import aligned, async_load, async_store, copy, describe, out_of_pairs
from .replay import replayed
from .scheduler import Lengths

of_memory = gl.shared_memory_descriptor
reinterpret = getattr(of_memory, "reinterpret", None) or of_memory._reinterpret  # its name before Triton 3.9
Bc = gl.constexpr(128)  # keys of a program, 64 a warpgroup
STAGES = gl.constexpr(3)  # tiles of queries in shared memory: one in use, the next one, and one on its way
TILES = {64: 128, 128: 64}  # Br by the columns of a tile in shared memory, so that dQ_i has 64 x 64 for a warpgroup


class Inputs(NamedTuple):
    """Descriptors of what is loaded."""

    q: Any
    k: Any
    v: Any
    dout: Any
    lse_2: Any
    delta: Any


class Queries(NamedTuple):
    """The stages in shared memory for tiles of queries, and the barriers at which what is loaded into them arrives."""

    Q: Any
    dO: Any
    lse_2: Any
    delta: Any
    full: Any


class Keys(NamedTuple):
    """K_j and V_j in shared memory, and the barrier at which they arrive."""

    K: Any
    V: Any
    full: Any


class Operands(NamedTuple):
    """K_j and V_j as matrices."""

    K_left: Any  # as the left operand of S^T: in shared memory, or in pairs
    K: Any
    V: Any


class WorkTile(NamedTuple):
    """What a program computes: the keys from j on, with the tiles of queries from first_tile to tiles - 1."""

    b: Any
    hk: Any
    h: Any  # the first query head of the group
    j: Any
    first_tile: Any
    tiles: Any


@gluon.constexpr_function
def layout(columns, across=1):
    """Which thread holds which entries of a product of 64 rows a warpgroup, or of half its columns if across is 2."""
    shape = [16, columns // across, 16]  # a warp has 16 rows, as wgmma prescribes it
    return gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[8 // across, across], instr_shape=shape)


@gluon.jit
def matrix(tiles, stage):
    return tiles.index(stage).reshape((tiles.shape[-2], tiles.shape[-1]))


@gluon.jit
def make_barriers(COUNT: gl.constexpr):
    barriers = gl.allocate_shared_memory(gl.int64, [COUNT, 1], mbarrier.MBarrierLayout())
    for n in gl.static_range(COUNT):
        mbarrier.init(barriers.index(n), count=1)
    return barriers


@gluon.jit
def load_keys(k, v, keys, where):
    """Loads K_j and V_j. where: what a descriptor calls their first row."""
    full = keys.full.index(0)
    mbarrier.expect(full, 2 * k.block_type.nbytes)
    async_load(k, where, full, keys.K.index(0))
    async_load(v, where, full, keys.V.index(0))


@gluon.jit
def load_queries(inputs, queries, ready, n, where, row, i):
    """Loads the tile of queries of step n. where: its first row of q; row, i: its first number of lse_2."""
    q, k, v, dout, lse_2, delta = inputs
    stage = n % STAGES
    # When dS of step n - 2 is ready, step n - 3 has ended, whose tiles were in this stage. A wait names a phase by its
    # parity, and a new barrier behaves as if the phase before phase 0 were complete.
    mbarrier.wait(ready.index(n - 2 & 1), n - 2 >> 1 & 1)
    full = queries.full.index(stage)
    mbarrier.expect(full, 2 * q.block_type.nbytes + 2 * lse_2.block_type.nbytes)
    async_load(q, where, full, queries.Q.index(stage))
    async_load(dout, where, full, queries.dO.index(stage))
    async_load(lse_2, [row, i], full, queries.lse_2.index(stage))
    async_load(delta, [row, i], full, queries.delta.index(stage))


@gluon.jit
def produce(inputs, queries, keys, ready, work, lengths):
    """Loads K_j, V_j, and the tiles of queries from the last to the first, of each head that shares the key head.

    All programs of a head begin with the same tile, so that it is read from memory once, and then from the L2 cache.
    """
    b, hk, h, j, first_tile, tiles = work
    H, group, Nq, Nk = lengths
    load_keys(inputs.k, inputs.v, keys, [b, hk, j, 0])
    n = 0
    for g in range(group):
        row = b * H + h + g
        for passed in range(0, tiles - first_tile):
            i = (tiles - 1 - passed) * inputs.q.block_type.shape[-2]
            load_queries(inputs, queries, ready, n, [b, h + g, i, 0], row, i)
            n += 1


@gluon.jit
def rounded(x, dtype: gl.constexpr):
    """x (float32) in bfloat16 or float16, two numbers with one instruction."""
    if dtype == gl.bfloat16:
        return gl.inline_asm_elementwise(
            "cvt.rn.bf16x2.f32 $0, $2, $1;", "=r,f,f", [x], dtype=gl.bfloat16, is_pure=True, pack=2
        )  # fmt: skip
    else:
        return gl.inline_asm_elementwise(
            "cvt.rn.f16x2.f32 $0, $2, $1;", "=r,f,f", [x], dtype=gl.float16, is_pure=True, pack=2
        )  # fmt: skip


@gluon.jit
def widened(x):
    """x in float32, two numbers at a time. The bits of a bfloat16 are the upper half of the same number in float32."""
    if x.dtype == gl.bfloat16:
        return gl.inline_asm_elementwise(
            "shl.b32 $0, $2, 16; and.b32 $1, $2, 0xffff0000;", "=f,=f,r", [x], dtype=gl.float32, is_pure=True, pack=2
        )  # fmt: skip
    else:
        return x.to(gl.float32)


@gluon.jit
def add(dq, dQ):
    """Adds dQ to Br * D_pad numbers of dq in the order of the registers: a thread's next 4 numbers are neighbours."""
    row = gl.arange(0, dQ.shape[0], gl.SliceLayout(1, dQ.type.layout))
    column = gl.arange(0, dQ.shape[1], gl.SliceLayout(0, dQ.type.layout))
    # Four numbers of a thread lie in rows 8 apart and in neighbouring columns. They share one address, which does not
    # depend on row / 8 % 2 and column % 2. It is computed as a pointer, so that the compiler finds its constant terms.
    place = dq + (row // 16 * 1024 + row % 8 * 16)[:, None]
    place += (column // 64 * 4096 + column // 8 % 8 * 128 + column // 2 % 4 * 4)[None, :]
    gl.inline_asm_elementwise(
        "red.global.add.v4.f32 [$4], {$8, $9, $10, $11}; mov.b32 $0, 0; mov.b32 $1, 0; mov.b32 $2, 0; mov.b32 $3, 0;",
        "=r,=r,=r,=r,l,l,l,l,f,f,f,f", [place.to(gl.int64, bitcast=True), dQ], dtype=gl.int32, is_pure=False, pack=4,
    )  # fmt: skip


@gluon.constexpr_function
def pairs_layout(pairs):
    """Which thread holds which pairs of neighbours of a left operand (128, 2 * pairs), as wgmma prescribes it."""
    in_registers = [[8, 0], [0, 4]] + [[0, 8 << n] for n in range((pairs // 8).bit_length() - 1)]
    lanes, warps = [[0, 1], [0, 2], [1, 0], [2, 0], [4, 0]], [[16, 0], [32, 0], [64, 0]]
    return gl.DistributedLinearLayout(in_registers, lanes, warps, [], [Bc.value, pairs])


@gluon.jit
def load_pairs(K):
    """K_j from shared memory, two neighbours in 32 bits."""
    pairs: gl.constexpr = K.shape[1] // 2
    as_pairs: gl.constexpr = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=32, rank=2)
    return reinterpret(K, gl.int32, [Bc, pairs], as_pairs).load(pairs_layout(pairs))


@gluon.jit
def scores(K, queries, n):
    """Starts S^T = K_j Q_i^T of step n, as soon as Q_i has come. K_j is in shared memory, or in pairs."""
    Q = queries.Q
    Br: gl.constexpr = Q.shape[-2]
    mbarrier.wait(queries.full.index(n % STAGES), n // STAGES & 1)
    zeros = gl.full((Bc, Br), 0, gl.float32, layout(Br))
    if Br == 128:
        K = out_of_pairs(K, Q.dtype)
        K = gl.convert_layout(K, gl.DotOperandLayout(0, layout(Br), 2))  # every number stays in its thread
    return warpgroup_mma(K, matrix(Q, n % STAGES).permute((1, 0)), zeros, use_acc=False, is_async=True)


@gluon.jit
def start_dP(V, dO_i):
    """Starts dP^T = V_j dO_i^T."""
    zeros = gl.full((Bc, dO_i.shape[0]), 0, gl.float32, layout(dO_i.shape[0]))
    return warpgroup_mma(V, dO_i.permute((1, 0)), zeros, use_acc=False, is_async=True)


@gluon.jit
def row_stats(x, stage, S):
    """lse_2 or delta of a stage: a number for each column of S^T."""
    return x.index(stage).reshape((S.shape[1],)).load(gl.SliceLayout(0, S.type.layout))


@gluon.jit
def probabilities(S, lse_i, c):
    """P^T = 2^(c S^T - lse)."""
    # No P is larger than 1. Rounding could make it larger where the scores are huge, and even infinite.
    return gl.exp2(gl.minimum(S * c - lse_i[None, :], 0.0))


@gluon.jit
def start_dV(dV, P, dO_i):
    """Starts dV += P^T dO_i. As a left operand P stays in registers, every number in its thread. So does dS."""
    return warpgroup_mma(gl.convert_layout(P, gl.DotOperandLayout(0, dV.type.layout, 2)), dO_i, dV, is_async=True)


@gluon.jit
def add_products(dS, dK, dV, Q_i, dS_i, operands, queries, ready, dq, t, n, steps):
    """The second half of step n: (S^T of the next step, dK, dV), and dQ_i is added to tile t of dq."""
    Br: gl.constexpr = Q_i.shape[0]
    D_pad: gl.constexpr = Q_i.shape[1]
    dS_i.store(dS)
    hopper.fence_async_shared()  # the products must see what was stored
    mbarrier.arrive(ready.index(n & 1), count=1)  # all warps have stored, because the compiler lets them meet here
    # dQ_i (Br, D) = dS_i K_j. A warpgroup has 64 of its columns, or of its rows where there are 128 of them.
    zeros = gl.full((Br, D_pad), 0, gl.float32, layout(D_pad, 128 // Br))
    dQ = warpgroup_mma(dS_i.permute((1, 0)), operands.K, zeros, use_acc=False, is_async=True)
    dV = warpgroup_mma_wait(1, (dV,))  # P needs no registers any more
    S = scores(operands.K_left, queries, gl.minimum(n + 1, steps - 1))  # after the last step nobody uses it
    dS = gl.convert_layout(dS, gl.DotOperandLayout(0, dK.type.layout, 2))
    dK = warpgroup_mma(dS, Q_i, dK, is_async=True)
    dQ = warpgroup_mma_wait(2, (dQ,))
    add(dq + t.to(gl.int64) * (Br * D_pad), dQ)
    S, dK = warpgroup_mma_wait(0, (S, dK))
    return S, dK, dV


@gluon.jit
def step(state, operands, queries, dS_stages, ready, dq, t, n, steps, seen_from, scale_log2, MASKED: gl.constexpr):
    """From (S^T of step n, of tile t, dK, dV) to (S^T of the next step, dK, dV), and adds to dq."""
    S, dK, dV = state
    stage = n % STAGES
    Q_i, dO_i, dS_i = matrix(queries.Q, stage), matrix(queries.dO, stage), dS_stages.index(n & 1)
    dP = start_dP(operands.V, dO_i)
    if MASKED:
        query = gl.arange(0, S.shape[1], gl.SliceLayout(0, S.type.layout))
        S = gl.where(query[None, :] >= (seen_from - t * S.shape[1])[:, None], S, float("-inf"))
    P = rounded(probabilities(S, row_stats(queries.lse_2, stage, S), scale_log2), queries.Q.dtype)
    dV = start_dV(dV, P, dO_i)
    dP = warpgroup_mma_wait(1, (dP,))  # all products but the last one have ended
    delta_i = row_stats(queries.delta, stage, dP)
    dS = (widened(P) * (dP - delta_i[None, :])).to(queries.Q.dtype)
    return add_products(dS, dK, dV, Q_i, dS_i, operands, queries, ready, dq, t, n, steps)


@gluon.jit
def store_gradients(dk, dv, keys, where, dK, dV):
    """Stores dK_j and dV_j from the place of K_j and V_j, which no product needs any more."""
    K, V = matrix(keys.K, 0), matrix(keys.V, 0)
    K.store(dK.to(K.dtype))
    V.store(dV.to(V.dtype))
    hopper.fence_async_shared()  # TMA must see what was stored
    async_store(dk, where, keys.K.index(0))
    async_store(dv, where, keys.V.index(0))
    tma.store_wait(0)  # the shared memory must live until TMA has read it


@gluon.jit
def consume(CAUSAL: gl.constexpr, dq, dk, dv, queries, keys, dS, ready, work, lengths, scale):
    """The 128 keys from j on."""
    b, hk, h, j, first_tile, tiles = work
    H, group, Nq, Nk = lengths
    Br: gl.constexpr = queries.Q.shape[3]
    D_pad: gl.constexpr = queries.Q.shape[4]
    key = j + gl.arange(0, Bc, gl.SliceLayout(1, layout(Br)))
    seen_from = gl.zeros_like(key)  # the first query that sees the key
    whole = 0  # the queries from here on see every key of the tile
    if CAUSAL:  # query i stands at position i + Nk - Nq
        seen_from = key - (Nk - Nq)
        whole = j + Bc - 1 - (Nk - Nq)
    if j + Bc > Nk:
        whole = Nq
    seen_from = gl.where(key < Nk, seen_from, Nq + Br)
    masked = gl.maximum(first_tile, gl.minimum(tiles, gl.cdiv(gl.maximum(0, whole), Br)))
    scale_log2 = scale * 1.4426950408889634  # exp is computed as a power of 2
    mbarrier.wait(keys.full.index(0), 0)
    K, V = matrix(keys.K, 0), matrix(keys.V, 0)
    K_left = K
    if Br == 128:
        K_left = load_pairs(K)
    dK = gl.full((Bc, D_pad), 0, gl.float32, layout(D_pad))
    dV = dK
    steps = (tiles - first_tile) * group  # at least one, because the last query sees every key
    S = warpgroup_mma_wait(0, (scores(K_left, queries, 0),))
    state, operands = (S, dK, dV), Operands(K_left, K, V)
    n = 0
    for g in range(group):  # the query heads that share this key head
        dq_g = dq + (b * H + h + g).to(gl.int64) * tiles * Br * D_pad
        for passed in range(0, tiles - masked):
            # The maximum is always the first argument. But without gl.maximum the compiler orders a step's instructions
            # in another way, which takes up to 10 % longer at D = 128.
            t = gl.maximum(tiles - 1 - passed, masked)
            state = step(state, operands, queries, dS, ready, dq_g, t, n, steps, seen_from, scale_log2, False)
            n += 1
        for passed in range(0, masked - first_tile):
            t = masked - 1 - passed
            state = step(state, operands, queries, dS, ready, dq_g, t, n, steps, seen_from, scale_log2, True)
            n += 1
    S, dK, dV = state
    store_gradients(dk, dv, keys, [b, hk, j, 0], dK * scale, dV)


@gluon.jit
def schedule(tiles, causal, Nk, D_pad):
    """This program's tile of keys and its head. The heads of a section are interleaved: all tiles 0, all tiles 1, ...

    When causal, tiles differ in length, and the longest ones come first. The more heads a section has, the shorter are
    its last tiles, so that the multiprocessors end at nearly the same time. But K and V of a section should fit into 32
    MB of the L2 cache: 2^25 bytes, 4 for a number of K and one of V. Without a mask all tiles take equally long, and
    heads come one by one.
    """
    program = gl.program_id(0)
    tile, head = program % tiles, program // tiles
    if causal:
        section = gl.maximum(1, gl.minimum(8, 2**23 // (Nk * D_pad)))
        first = head // section * section
        heads = gl.minimum(section, gl.num_programs(0) // tiles - first)  # the last section may have fewer
        n = program - first * tiles
        tile, head = n // heads, first + n % heads
    return tile, head


@gluon.jit
def allocate(q, k, lse_2):
    """(queries, keys, dS^T, ready): what a program has in shared memory."""
    Q = gl.allocate_shared_memory(q.dtype, [STAGES] + q.block_type.shape, q.layout)
    dO = gl.allocate_shared_memory(q.dtype, [STAGES] + q.block_type.shape, q.layout)
    K = gl.allocate_shared_memory(q.dtype, [1] + k.block_type.shape, k.layout)
    V = gl.allocate_shared_memory(q.dtype, [1] + k.block_type.shape, k.layout)
    lse_i = gl.allocate_shared_memory(gl.float32, [STAGES] + lse_2.block_type.shape, lse_2.layout)
    delta_i = gl.allocate_shared_memory(gl.float32, [STAGES] + lse_2.block_type.shape, lse_2.layout)
    Br: gl.constexpr = q.block_type.shape[-2]
    swizzled: gl.constexpr = gl.NVMMASharedLayout.get_default_for([Bc, Br], gl.float16)
    dS = gl.allocate_shared_memory(q.dtype, [2, Bc, Br], swizzled)  # transposed: a row for each key
    of_queries, ready, of_keys = make_barriers(STAGES), make_barriers(2), make_barriers(1)
    return Queries(Q, dO, lse_i, delta_i, of_queries), Keys(K, V, of_keys), dS, ready


@gluon.jit(do_not_specialize=["H", "group", "Nq", "Nk"])  # so that one compiled kernel serves every length
def backward_kernel(q, k, v, dout, lse_2, delta, dq, dk, dv, H, group, Nq, Nk, scale, CAUSAL: gl.constexpr):
    Br: gl.constexpr = q.block_type.shape[2]
    queries, keys, dS, ready = allocate(q, k, lse_2)
    tiles = gl.cdiv(Nq, Br)
    tile, bhk = schedule(gl.cdiv(Nk, Bc), CAUSAL, Nk, k.block_type.shape[3])
    j, Hk = tile * Bc, H // group
    b, hk = bhk // Hk, bhk % Hk
    h = hk * group
    first_tile = 0  # the first tile of queries of which one sees a key
    if CAUSAL:
        first_tile = gl.minimum(tiles, gl.maximum(0, j - (Nk - Nq)) // Br)
    work, lengths = WorkTile(b, hk, h, j, first_tile, tiles), Lengths(H, group, Nq, Nk)
    # The first function runs on the kernel's own 8 warps, the second on a warp of its own, as in fwd_3_gluon.
    gl.warp_specialize([
        (consume, (CAUSAL, dq, dk, dv, queries, keys, dS, ready, work, lengths, scale)),
        (produce, (Inputs(q, k, v, dout, lse_2, delta), queries, keys, ready, work, lengths)),
    ], [1], [24])  # fmt: skip


@triton.jit
def load_sums(sums, D_pad: tl.constexpr, Br: tl.constexpr):
    """A tile (Br, D_pad) of dQ, whose numbers are in the order in which `add` left them."""
    tile = tl.load(sums + tl.arange(0, Br * D_pad))
    # column / 64, row / 16, column / 8 % 8, row % 8, column / 2 % 4, row / 8 % 2, column % 2
    tile = tl.reshape(tile, (D_pad // 64, Br // 16, 8, 8, 4, 2, 2))
    return tl.reshape(tl.permute(tile, (1, 5, 3, 0, 2, 4, 6)), (Br, D_pad))


@triton.jit(do_not_specialize=["Nq"])
def dq_kernel(sums, dq, Nq, scale, D: tl.constexpr, D_pad: tl.constexpr, Br: tl.constexpr):
    """dq (B * H, Nq, D) = scale * sums. Grid: B * H * ceil(Nq / Br)."""
    program, tiles = tl.program_id(0), tl.cdiv(Nq, Br)
    i, bh = program % tiles * Br, program // tiles
    tile = load_sums(sums + program.to(tl.int64) * Br * D_pad, D_pad, Br) * scale
    row, column = i + tl.arange(0, Br)[:, None], tl.arange(0, D_pad)[None, :]
    place = dq + (bh.to(tl.int64) * Nq + row) * D + column
    tl.store(place, tile.to(dq.dtype.element_ty), mask=(row < Nq) & (column < D))


def refusal(q):
    """Why this kernel does not take q, shaped as in backward; None if it does."""
    if q.shape[-1] > 128:
        return f"takes a head_dim up to 128; got {q.shape[-1]}"
    return fwd_3_gluon.refusal(q)


def describe_row_stats(x, N, Br):
    """A descriptor of the first N numbers in each row of x (B * H, stride), with boxes of Br."""
    plain = gl.NVMMASharedLayout(swizzle_byte_width=0, element_bitwidth=32, rank=2)
    return TensorDescriptor(x, [len(x), N], [x.stride(0), 1], [1, Br], plain)


@replayed
def backward(record, dout, q, k, v, out, lse, *, causal=False, scale=None):
    """(dq, dk, dv) from dout and out like q (B, H, Nq, D), k and v (B, Hk, Nk, D), D contiguous, 8, 16, ... 128.

    lse (B, H, Nq) is float32. scale > 0; None is 1/sqrt(D). dq is not bit-equal from run to run, dk and dv are. Raises
    ValueError with the `refusal`.
    """
    B, H, Nq, D = q.shape
    if reason := refusal(q):
        raise ValueError(f"the backward of rung gluon {reason}.")
    if q.numel() == 0 or k.numel() == 0:  # there is no descriptor of an empty tensor
        return tuple(record.new(x.shape, like=x, fill=0) for x in (q, k, v))
    stride = 4 * triton.cdiv(Nq, 4)  # each row of lse_2 and delta begins at a multiple of 16 bytes
    lse_2, delta = record.new((B * H, stride)), record.new((B * H, stride))
    lse = record.derive(torch.Tensor.contiguous, lse)
    record.launch(
        delta_kernel, B * H * triton.cdiv(Nq, 64), dout, out, lse, lse_2, delta, dout.stride()[:3], out.stride()[:3],
        stride, H, Nq, D=D, D_pad=64 if D <= 64 else 128, Br=64,
    )  # fmt: skip
    return gradients(record, dout, q, k, v, lse_2, delta, causal, scale)


def gradients(record, dout, q, k, v, lse_2, delta, causal, scale):
    """(dq, dk, dv) from what delta_kernel has left in lse_2 and delta; the others are as in `backward`."""
    (B, H, Nq, D), (Hk, Nk) = q.shape, k.shape[1:3]
    dout, q, k, v = (x if aligned(x) else record.derive(copy, x) for x in (dout, q, k, v))
    scale = D**-0.5 if scale is None else scale
    dq, dk, dv = (record.new(x.shape, like=x) for x in (q, k, v))
    D_pad = 64 if D <= 64 else 128
    Br = TILES[D_pad]
    tiles = B * H * triton.cdiv(Nq, Br)
    sums = record.new((tiles * Br * D_pad,), fill=0)
    queries = [describe(x, Br, D_pad) for x in (q, dout)] + [describe_row_stats(x, Nq, Br) for x in (lse_2, delta)]
    keys = [describe(x, Bc.value, D_pad) for x in (k, v, dk, dv)]
    record.launch(
        backward_kernel, B * Hk * triton.cdiv(Nk, Bc.value), queries[0], *keys[:2], *queries[1:], sums, *keys[2:],
        H, H // Hk, Nq, Nk, float(scale), CAUSAL=causal, num_warps=8, maxnreg=168,
    )  # fmt: skip
    record.launch(dq_kernel, tiles, sums, dq, Nq, float(scale), D=D, D_pad=D_pad, Br=Br, num_warps=8)
    return dq, dk, dv
