# SPDX-License-Identifier: MIT
"""Rung 3, "gluon": the warp specialisation of rung 2, written by hand, and two products in flight.

    producer, one warp:                       consumers, two or three warpgroups of 64 query rows each:
      for each tile of queries:                 wait until K_n and V_(n-1) are there, and for the turn
        wait for an empty stage; load Q         start S = Q K_n^T and, behind it, O += P V_(n-1)
        for each tile of Bc keys:               pass the turn on; wait until S is ready
          wait for an empty stage               m, l and P from S, while O is still being computed
          load K_n and V_(n-1)                  wait until O is ready; the stage of K_n and V_(n-1) is empty
                                                O *= alpha

The idea: Gluon is the layer below Triton in the same compiler. Here the kernel says which warps do what, where tiles
lie in shared memory, when a copy or a product starts, and who waits for it. Triton waits for a tl.dot whose result the
same iteration uses, so that no product runs during the exponentials; here O is computed during them. Tiles of keys are
visited from the last one backwards, so that those that need a mask come first. A program computes several tiles of
queries (scheduler.py), and loads the next one while it computes. Compared with stage 02's fwd_8_hopper.cu there is one
producer, a tile's last product runs alone, and there is no lazy rescaling.

At D <= 64 the exponentials take as long as the products. So three consumers share a multiprocessor there: while one
waits for a product, two others compute. Each has only 160 registers a thread. So P is carried from one step to the next
as pairs of 16-bit numbers.

    idea                                                                   gain on H100 and H200, from 4k queries on
    several tiles a program, if all programs get equal work                2 to 8 %; below 4k queries up to 23 %
    the same with a mask, if programs get unequal work                     a loss of up to 14 %
    the consumers take turns (ping-pong)                                   3 to 5 % at D = 64, about 1 % at D = 128
    a consumer skips tiles of keys that its own rows do not see            1 to 5 % at D = 64
    one sum of l, at the end                                               0 to 3 %
    K_n and V_(n-1) as a pair: one wait and one arrival a step, not two    1 %

Left out, because it was not faster: a third tile of K and V; the wait for O after the exponentials (2 to 5 % slower;
the compiler has to be forced); O *= alpha only where a maximum has grown; a producer each for K, V and Q; turns by
mbarriers instead of named barriers. Spills: with three consumers 5 to 10 words in a step with a causal mask, else none
inside the loops.
Source: FlashAttention-3, sections 3.1 and 3.2. Launch: grid (programs,), 9 or 13 warps, which the compiler fills up to
12 or 16, one program a multiprocessor. Left out: float32 and GPUs other than Hopper. Triton's interpreter does not run
Gluon. Needs torch, scheduler.py, replay.py and Triton 3.6 to 3.9, because Gluon is experimental and may change.
"""

from typing import Any, NamedTuple

import torch
import triton
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia import hopper
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, tma, warpgroup_mma, warpgroup_mma_wait
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from .replay import replayed
from .scheduler import Lengths, Order, order_of, place, programs_for, rounds_of

# Triton 3.9 has new names for the two directions of a copy.
async_load = getattr(tma, "async_load", None) or tma.async_copy_global_to_shared
async_store = getattr(tma, "async_store", None) or tma.async_copy_shared_to_global
LOG2_E = gl.constexpr(1.4426950408889634)  # exp is computed as a power of 2
STAGES = gl.constexpr(2)  # tiles of K and of V in shared memory: one in use, one on its way
TILES = {64: (192, 128), 128: (128, 128), 256: (128, 64)}  # (Br, Bc) by the columns of a tile in shared memory
SHORT = 2048  # queries below which three consumers are slower with a causal mask, because more of their tiles need it


class Ring(NamedTuple):
    """A few stages in shared memory, each for one tile and with two barriers.

    A phase of `full` is complete when all bytes of a tile have come, one of `empty` when its readers have finished with
    the tile. Tile n is in stage n % DEPTH and has phase n // DEPTH; a wait names the phase by its parity. A new barrier
    behaves as if the phase before phase 0 were complete, so that the producer does not wait for its first stages.
    """

    tiles: Any
    full: Any
    empty: Any


class Seen(NamedTuple):
    """The first query sees the keys low ... high - 1, the next one those from low + 1 to high. None is no limit."""

    low: Any
    high: Any
    Nk: Any


@gluon.jit
def make_ring(x, DEPTH: gl.constexpr, READERS: gl.constexpr):
    tiles = gl.allocate_shared_memory(x.dtype, [DEPTH] + x.block_type.shape, x.layout)
    full = gl.allocate_shared_memory(gl.int64, [DEPTH, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [DEPTH, 1], mbarrier.MBarrierLayout())
    for stage in gl.static_range(DEPTH):
        mbarrier.init(full.index(stage), count=1)
        mbarrier.init(empty.index(stage), count=READERS)
    return Ring(tiles, full, empty)


@gluon.jit
def load(x, ring, n, where):
    """The producer: starts to copy tile n, which begins at these coordinates. TMA writes zeros beyond the edges."""
    depth: gl.constexpr = ring.tiles.shape[0]
    stage, phase = n % depth, n // depth & 1
    mbarrier.wait(ring.empty.index(stage), phase ^ 1)
    mbarrier.expect(ring.full.index(stage), x.block_type.nbytes)
    async_load(x, where, ring.full.index(stage), ring.tiles.index(stage))


# V_(n-1) is used together with K_n. So the two are loaded and released as a pair, with the barriers of K's ring, and V
# needs no barriers. The first K has no V, and the last V no K: a tile beyond the end of the keys stands for it, and is
# not used.
@gluon.jit
def load_pair(k, v, K, V, n, where, where_before):
    """The producer: starts to copy K_n and V_(n-1)."""
    stage, phase = n % STAGES, n // STAGES & 1
    mbarrier.wait(K.empty.index(stage), phase ^ 1)
    mbarrier.expect(K.full.index(stage), k.block_type.nbytes + v.block_type.nbytes)
    async_load(k, where, K.full.index(stage), K.tiles.index(stage))
    async_load(v, where_before, K.full.index(stage), V.index(stage))


@gluon.jit
def at(tiles, n):
    """Tile n as a matrix in shared memory."""
    return tiles.index(n % tiles.shape[0]).reshape((tiles.shape[-2], tiles.shape[-1]))


@gluon.jit
def get(ring, n):
    """A consumer: waits until tile n has come, and returns it."""
    depth: gl.constexpr = ring.tiles.shape[0]
    mbarrier.wait(ring.full.index(n % depth), n // depth & 1)
    return at(ring.tiles, n)


@gluon.jit
def release(ring, n):
    """A reader: has finished with tile n."""
    mbarrier.arrive(ring.empty.index(n % ring.tiles.shape[0]), count=1)


@gluon.jit
def produce(q, k, v, Q, K, V, lengths, order, CAUSAL: gl.constexpr, Br: gl.constexpr):
    H, group, Nq, Nk = lengths
    consumers: gl.constexpr = Br // 64
    Bc: gl.constexpr = K.tiles.shape[3]
    n = 0  # tiles of keys so far
    beyond = 0, 0, Nk, 0
    before = beyond  # where the last one of them begins
    for round in range(rounds_of(order, CAUSAL)):
        b, h, i, blocks = place(round, lengths, order, CAUSAL, Br, Bc)
        for tile in range(blocks):
            where = b, h // group, (blocks - 1 - tile) * Bc, 0
            load_pair(k, v, K, V, n + tile, where, before)
            before = where
            if tile == 0:  # Q after the pair, because the last product of the tile before waits for this pair
                for w in gl.static_range(consumers):
                    load(q, Q, round * consumers + w, [b, h, i + 64 * w, 0])
        n += blocks
    load_pair(k, v, K, V, n, beyond, before)


# Ping-pong: the consumers start their products in turn, so that one computes exponentials during the products of the
# others. A turn is a named barrier of the hardware, which Gluon does not offer, but PTX does. Consumer w waits at its
# own barrier until the consumer before it arrives there; the one that arrives does not wait. Triton itself uses the
# first few of the 16 barriers.
@gluon.constexpr_function
def named_barrier(instruction, w):
    return f"bar.{instruction} {13 + w}, 256; mov.b32 $0, $1;"


@gluon.jit
def wait_turn(w):
    thread = gl.arange(0, 128, gl.BlockedLayout([1], [32], [4], [0]))  # an instruction for each thread
    gl.inline_asm_elementwise(named_barrier("sync", w), "=r,r", [thread], gl.int32, is_pure=False, pack=1)


@gluon.jit
def pass_turn(w, consumers):
    thread = gl.arange(0, 128, gl.BlockedLayout([1], [32], [4], [0]))
    following: gl.constexpr = (w + 1) % consumers
    gl.inline_asm_elementwise(named_barrier("arrive", following), "=r,r", [thread], gl.int32, is_pure=False, pack=1)


@gluon.constexpr_function
def layout(columns):
    """Which thread holds which entries of a product (64, columns), as wgmma prescribes it: a warp has 16 rows."""
    return gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, columns, 16])


@gluon.jit
def start_scores(Q_i, K_n):
    zeros = gl.full((64, K_n.shape[0]), 0, gl.float32, layout(K_n.shape[0]))
    return warpgroup_mma(Q_i, K_n.permute((1, 0)), zeros, use_acc=False, is_async=True)  # (64, Bc)


@gluon.constexpr_function
def twice(x):
    return (x, x)


@gluon.jit
def in_pairs(P, dtype: gl.constexpr):
    """P (float32) in 16 bits, neighbours in one number of 32 bits."""
    low, high = gl.split(P.reshape((P.shape[0], P.shape[1] // 2, 2)))
    if dtype == gl.bfloat16:
        return gl.inline_asm_elementwise(
            "cvt.rn.bf16x2.f32 $0, $2, $1;", "=r,f,f", [low, high], dtype=gl.int32, is_pure=True, pack=1
        )  # fmt: skip
    else:
        return gl.inline_asm_elementwise(
            "cvt.rn.f16x2.f32 $0, $2, $1;", "=r,f,f", [low, high], dtype=gl.int32, is_pure=True, pack=1
        )  # fmt: skip


@gluon.jit
def out_of_pairs(x, dtype: gl.constexpr):
    """The tile from its pairs. If it were pure, the compiler would do it early, and pass on 16-bit numbers instead."""
    low, high = gl.inline_asm_elementwise(
        "mov.b32 {$0, $1}, $2;", "=h,=h,r", [x], dtype=twice(dtype), is_pure=False, pack=1
    )  # fmt: skip
    return gl.join(low, high).reshape((x.shape[0], 2 * x.shape[1]))


@gluon.jit
def start_output(O, P, V_n):
    # P is in pairs until here: if a step passed 16-bit numbers to the next, ptxas would swap each of them twice.
    P = out_of_pairs(P, V_n.dtype)
    P = gl.convert_layout(P, gl.DotOperandLayout(0, O.type.layout, 2))  # every number stays in its thread
    return warpgroup_mma(P, V_n, O, is_async=True)  # (64, D_pad)


@gluon.jit
def mask(S, j, seen):
    """S (64, Bc), which starts at key j, with -inf where there is no key or the query does not see it."""
    row = gl.arange(0, 64, gl.SliceLayout(1, S.type.layout))
    column = gl.arange(0, S.shape[1], gl.SliceLayout(0, S.type.layout))
    end = gl.zeros_like(row) + (seen.Nk - j)  # the row sees the columns before this one
    if seen.high is not None:
        end = gl.minimum(end, row + (seen.high - j))
    is_seen = column[None, :] < end[:, None]
    if seen.low is not None:
        is_seen = is_seen & (column[None, :] >= (row + (seen.low - j))[:, None])
    return gl.where(is_seen, S, float("-inf"))


@gluon.jit
def factor_and_shift(m, scale_log2):
    """(f, f m) of P = 2^(f S - f m), two numbers a row; f is scale_log2 unless m is huge. fwd_0_fused.py says why."""
    power_of_two = (scale_log2.to(gl.int32, bitcast=True) & 0x7F800000).to(gl.float32, bitcast=True)
    factor = gl.where(gl.abs(m * scale_log2) < 67108864.0, scale_log2, power_of_two)
    return factor, m * factor


@gluon.jit
def partial_sums(P):
    """The sums of P's rows, each still in four numbers: the columns that one thread holds."""
    return gl.sum(gl.sum(P.reshape((P.shape[0], P.shape[1] // 8, 4, 2)), 3), 1)


@gluon.jit
def online_softmax(m, l, S, scale_log2):
    """(m, l, alpha, P) after one more tile of keys, with S = Q_i K_n^T (64, Bc), not scaled; m is its maximum.

    l are `partial_sums`, which are summed up once, at the end.
    """
    m_new = gl.maximum(m, gl.max(S, 1))
    unit = gl.where(m_new == float("-inf"), 0.0, m_new)  # in a row without a key -inf - (-inf) would be NaN
    factor, shift = factor_and_shift(unit, scale_log2)
    alpha = gl.exp2((m - unit) * factor)
    P = gl.exp2(S * factor[:, None] - shift[:, None])
    return m_new, gl.convert_layout(alpha, gl.SliceLayout(1, l.type.layout))[:, None] * l + partial_sums(P), alpha, P


@gluon.jit
def first_step(w, consumers, Q_i, K, V, n, j, seen, scale_log2):
    """(m, l, P, O) after a query's first tile of keys, which is tile n and starts at key j."""
    K_n = get(K, n)
    wait_turn(w)
    S = start_scores(Q_i, K_n)
    pass_turn(w, consumers)
    S = warpgroup_mma_wait(0, (S,))
    release(K, n)
    S = mask(S, j, seen)
    m = gl.full((64,), float("-inf"), gl.float32, gl.SliceLayout(1, S.type.layout))
    m, l, alpha, P = online_softmax(m, partial_sums(gl.zeros_like(S)), S, scale_log2)
    return m, l, in_pairs(P, V.dtype), gl.full((64, V.shape[-1]), 0, gl.float32, layout(V.shape[-1]))


@gluon.jit
def step(w, consumers, state, Q_i, K, V, n, j, seen, scale_log2, MASKED: gl.constexpr):
    """Computes S of tile n, which starts at key j, and beside it adds P V of tile n - 1 to O."""
    m, l, P, O = state
    K_n = get(K, n)
    wait_turn(w)
    S = start_scores(Q_i, K_n)
    O = start_output(O, P, at(V, n))  # which is V_(n-1)
    pass_turn(w, consumers)
    S = warpgroup_mma_wait(1, (S,))  # all products but the last one have ended
    if MASKED:
        S = mask(S, j, seen)
    m, l, alpha, P = online_softmax(m, l, S, scale_log2)
    O = warpgroup_mma_wait(0, (O,))
    release(K, n)
    return m, l, in_pairs(P, V.dtype), O * gl.convert_layout(alpha, gl.SliceLayout(1, O.type.layout))[:, None]


@gluon.jit
def last_product(state, K, V, n):
    """(m, l, O): adds P V of tile n - 1, which is loaded together with K of tile n. Tile n is not released here."""
    m, l, P, O = state
    get(K, n)
    return m, l, warpgroup_mma_wait(0, (start_output(O, P, at(V, n)),))


@gluon.jit
def skip(w, consumers, K, n):
    """Skips tile n, of which this consumer's queries see no key. It takes its turn, because the others wait for it."""
    get(K, n)
    release(K, n)
    wait_turn(w)
    pass_turn(w, consumers)


@gluon.jit
def lse_and_sum(m, l, scale):
    """(lse, l) of 64 rows, from the partial sums l."""
    l = gl.convert_layout(gl.sum(l, 1), m.type.layout)
    l = gl.where(l == 0, 1.0, l)  # a row that saw no key then gets out = 0 / 1 and lse = -inf + log 1
    return m * scale + gl.log(l), l


@gluon.jit
def store_lse(lse, lse_i, head, length, i, end):
    """Stores lse_i (64,), from row i of a head on, but nothing from row `end` on. length: how many rows a head has."""
    row = i + gl.arange(0, 64, lse_i.type.layout)
    lse += head.to(gl.int64) * length  # in 64 bits because a tensor may have more than 2^31 entries
    gl.store(lse + row, lse_i, mask=row < end)


@gluon.jit
def store_rows(out, where, Q, n, O, l):
    """Stores O / l. It goes through the stage of Q's tile n, which is not needed any more."""
    tile = Q.tiles.index(n % Q.tiles.shape[0])
    inverse = gl.convert_layout(1 / l, gl.SliceLayout(1, O.type.layout))
    tile.reshape((64, O.shape[1])).store((O * inverse[:, None]).to(out.dtype))
    hopper.fence_async_shared()  # TMA must see what was stored
    async_store(out, where, tile)
    tma.store_wait(0)  # TMA has read it
    release(Q, n)


@gluon.jit
def consume(w: gl.constexpr, consumers: gl.constexpr, out, lse, Q, K, V, lengths, order, scale, CAUSAL: gl.constexpr):
    """Warpgroup w: 64 queries of each tile."""
    Bc: gl.constexpr = K.tiles.shape[3]
    H, group, Nq, Nk = lengths
    if w == consumers - 1:
        pass_turn(w, consumers)  # consumer 0 may begin
    n = 0  # tiles of keys so far
    for round in range(rounds_of(order, CAUSAL)):
        b, h, i, blocks = place(round, lengths, order, CAUSAL, 64 * consumers, Bc)
        i += 64 * w
        seen = Seen(None, None, Nk)
        needed, whole = blocks, Nk // Bc  # the first tiles of the keys: those with a key to see, those without a mask
        if CAUSAL:  # query i stands at position i + Nk - Nq
            high = i + 1 + Nk - Nq
            seen = Seen(None, high, Nk)
            whole = gl.minimum(Nk, gl.maximum(0, high)) // Bc
            if 64 * consumers > Bc:  # otherwise all consumers need the same tiles
                needed = gl.minimum(blocks, gl.cdiv(gl.maximum(1, high + 63), Bc))
                for _ in range(blocks - needed):
                    skip(w, consumers, K, n)
                    n += 1
        Q_i = get(Q, round * consumers + w)
        j = (needed - 1) * Bc
        state = first_step(w, consumers, Q_i, K, V, n, j, seen, scale * LOG2_E)
        masked = gl.maximum(1, needed - whole)
        if CAUSAL:  # otherwise only the first tile needs a mask
            for tile in range(1, masked):
                state = step(w, consumers, state, Q_i, K, V, n + tile, j - tile * Bc, seen, scale * LOG2_E, True)
        for tile in range(masked, needed):
            state = step(w, consumers, state, Q_i, K, V, n + tile, 0, seen, scale * LOG2_E, False)
        n += needed
        m, l, O = last_product(state, K, V, n)
        lse_i, l = lse_and_sum(m, l, scale)
        store_lse(lse, lse_i, b * H + h, Nq, i, Nq)
        store_rows(out, [b, h, i, 0], Q, round * consumers + w, O, l)
    if w == 0:
        wait_turn(w)  # a program must not end while a named barrier is half full


@gluon.jit(do_not_specialize=["H", "group", "Nq", "Nk", "tiles", "section", "alternate"])  # one kernel for every length
def forward_kernel(
    q, k, v, out, lse, H, group, Nq, Nk, tiles, section, alternate, scale, CAUSAL: gl.constexpr,
    CONSUMERS: gl.constexpr,
):  # fmt: skip
    lengths, order = Lengths(H, group, Nq, Nk), Order(tiles, section, alternate)
    Q_STAGES: gl.constexpr = 2 if q.block_type.shape[3] <= 128 else 1  # as many as there is memory for
    Q, K = make_ring(q, Q_STAGES * CONSUMERS, 1), make_ring(k, STAGES, CONSUMERS)
    V = gl.allocate_shared_memory(v.dtype, [STAGES] + v.block_type.shape, v.layout)
    # The first function runs on the kernel's own 4 warps. The two lists at the end are for the other functions: their
    # warps, and the registers of each of their threads. The first function gets the program's other registers.
    gl.warp_specialize([
        (consume, (w, CONSUMERS, out, lse, Q, K, V, lengths, order, scale, CAUSAL)) if w < CONSUMERS else
        (produce, (q, k, v, Q, K, V, lengths, order, CAUSAL, 64 * CONSUMERS)) for w in (0, 1, 2, 3)[:CONSUMERS + 1]
    ], [4, 1] if CONSUMERS == 2 else [4, 4, 1], [240, 24] if CONSUMERS == 2 else [160, 160, 24])  # fmt: skip


def refusal(q):
    """Why this kernel does not take q, shaped as in forward; None if it does."""
    D = q.shape[-1]
    if not q.is_cuda or torch.cuda.get_device_capability(q.device) != (9, 0):
        return "needs a Hopper GPU (compute capability 9.0)"
    if q.dtype not in (torch.float16, torch.bfloat16) or D % 8 or not 0 < D <= 256:
        return f"takes float16 and bfloat16 with a head_dim of 8, 16, ... 256; got {q.dtype} and {D}"
    return None


def aligned(x):
    """Whether a descriptor can describe x: its address and strides are multiples of 16 bytes."""
    steps = [stride for size, stride in zip(x.shape[:3], x.stride()[:3], strict=True) if size > 1]
    return x.data_ptr() % 16 == 0 and all(stride % 8 == 0 for stride in steps)


def copy(x):
    return x.clone(memory_format=torch.contiguous_format)


def describe(x, rows, D_pad):
    """A descriptor of x (B, H, N, D) whose boxes have so many rows."""
    # The stride of a dimension of size 1 is never used, but must be a multiple of 16 bytes too.
    strides = [stride if size > 1 else 16 for size, stride in zip(x.shape[:3], x.stride()[:3], strict=True)]
    swizzled = gl.NVMMASharedLayout.get_default_for([1, 1, rows, D_pad], gl.float16)  # bfloat16 has the same size
    return TensorDescriptor(x, list(x.shape), [*strides, 1], [1, 1, rows, D_pad], swizzled)


@replayed
def forward(record, q, k, v, *, causal=False, scale=None, tile=None):
    """(out, lse): q (B, H, Nq, D), k and v (B, Hk, Nk, D), D contiguous; out like q, lse (B, H, Nq) float32.

    scale > 0; None is 1/sqrt(D). tile is (128, Bc): Bc 64, or 128 up to head_dim 128; or (192, 128) up to head_dim 64.
    Raises ValueError with the `refusal`.
    """
    (B, H, Nq, D), (Hk, Nk) = q.shape, k.shape[1:3]
    if reason := refusal(q):
        raise ValueError(f"rung gluon {reason}.")
    q, k, v = (x if aligned(x) else record.derive(copy, x) for x in (q, k, v))
    scale = D**-0.5 if scale is None else scale
    out, lse = record.new(q.shape, like=q), record.new((B, H, Nq))
    if Nk == 0 or out.numel() == 0:  # there is no descriptor of an empty tensor
        return record.new(q.shape, like=q, fill=0), record.new((B, H, Nq), fill=float("-inf"))
    D_pad = max(64, triton.next_power_of_2(D))
    Br, Bc = tile or ((128, TILES[D_pad][1]) if causal and Nq < SHORT else TILES[D_pad])
    descriptors = [describe(x, rows, D_pad) for x, rows in ((q, 64), (k, Bc), (v, Bc), (out, 64))]
    tiles = B * H * triton.cdiv(Nq, Br)
    programs = programs_for(q.device, tiles)
    order = order_of(B * H, Nq, Nk, Br, Bc, D_pad, programs) if causal else (1, 0)
    record.launch(
        forward_kernel, programs, *descriptors, lse, H, H // Hk, Nq, Nk, tiles, *order, float(scale), CAUSAL=causal,
        CONSUMERS=Br // 64, num_warps=4, maxnreg=168 if Br == 128 else 128,
    )  # fmt: skip
    return out, lse
