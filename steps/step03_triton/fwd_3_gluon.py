# SPDX-License-Identifier: MIT
"""Rung 3, "gluon": the roles that the compiler gives out in rung 2, written by hand, and two products in flight.

    producer, one warp:                       consumers, two or three warpgroups of 64 query rows each:
      load Q behind the first K_n               start S = Q K_n^T and, behind it, O += P V_(n-1)
      for each tile of Bc keys:                 wait until S is ready; the room of K_n is free
        wait until there is room; load K_n      m, l and P from S, while O is still being computed
        wait until there is room; load V_n      wait until O is ready; the room of V_(n-1) is free; O *= alpha

The idea: Gluon is the layer below Triton in the same compiler. Here the kernel says which warps do what, where tiles
lie in shared memory, when a copy or a product starts, and who waits for it. Triton waits for a tl.dot whose result the
same iteration uses, so that no product runs beside the exponentials; here O is computed beside them. Tiles are visited
from the last key backwards, so that those that need a mask come first. Compared with stage 02's fwd_8_hopper.cu there
is one producer, no ping-pong scheduling, no persistent blocks and no lazy rescaling.

At D <= 64 the exponentials take as long as the products. So three consumers share a multiprocessor there: while one
waits for a product, two others compute. Each has 160 registers a thread, for which P goes around the loop in pairs of
16-bit numbers.

Left out, because it was not faster: programs that take several tiles one after the other (faster at N = 1k only); K_n
released later; the wait for O behind all exponentials; a producer each for K, V and Q; consumers that take turns with
their products, as in fwd_8 (4 % slower to 1 % faster). Spills: with three consumers and a causal mask 5 or 6 words a
step, else none inside the loops.
Source: FlashAttention-3, sections 3.1 and 3.2. Launch: grid (B * H * ceil(Nq / Br),), 9 or 13 warps, which the compiler
fills up to 12 or 16, one program a multiprocessor. Left out: float32 and GPUs other than Hopper. Triton's interpreter
does not run Gluon. Needs torch, replay.py and Triton 3.6 to 3.9, because Gluon is experimental and may change.
"""

import torch
import triton
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia import hopper
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, tma, warpgroup_mma, warpgroup_mma_wait
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from .replay import replayed

# Triton 3.9 has new names for the two directions of a copy.
async_load = getattr(tma, "async_load", None) or tma.async_copy_global_to_shared
async_store = getattr(tma, "async_store", None) or tma.async_copy_shared_to_global
STAGES = gl.constexpr(2)  # tiles of K and of V in shared memory: one in use, one on its way
TILES = {64: (192, 128), 128: (128, 128), 256: (128, 64)}  # (Br, Bc) by the columns of a tile in shared memory
SHORT = 2048  # queries below which three consumers are no faster, because the last tile of a head is not full


# A ring is (tiles, full, empty): room for a few tiles in shared memory, and two barriers for each. A phase of "full" is
# complete when all bytes of a tile have come, one of "empty" when the consumers have finished with the tile. Tile n has
# room n % DEPTH and phase n // DEPTH; a wait names the phase by its parity. A new barrier behaves as if the phase
# before phase 0 were complete, so that the producer does not wait for its first rooms.
@gluon.jit
def make_ring(x, DEPTH: gl.constexpr, CONSUMERS: gl.constexpr):
    tiles = gl.allocate_shared_memory(x.dtype, [DEPTH] + x.block_type.shape, x.layout)
    full = gl.allocate_shared_memory(gl.int64, [DEPTH, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [DEPTH, 1], mbarrier.MBarrierLayout())
    for room in gl.static_range(DEPTH):
        mbarrier.init(full.index(room), count=1)
        mbarrier.init(empty.index(room), count=CONSUMERS)
    return tiles, full, empty


@gluon.jit
def load(x, ring, n, where):
    """The producer: starts to copy tile n, which begins at these coordinates. TMA writes zeros beyond the edges."""
    tiles, full, empty = ring
    room, phase = n % tiles.shape[0], n // tiles.shape[0] & 1
    mbarrier.wait(empty.index(room), phase ^ 1)
    mbarrier.expect(full.index(room), x.block_type.nbytes)
    async_load(x, where, full.index(room), tiles.index(room))


@gluon.jit
def get(ring, n):
    """A consumer: waits until tile n has come, and returns it as a matrix in shared memory."""
    tiles, full, empty = ring
    mbarrier.wait(full.index(n % tiles.shape[0]), n // tiles.shape[0] & 1)
    return tiles.index(n % tiles.shape[0]).reshape((tiles.shape[-2], tiles.shape[-1]))


@gluon.jit
def release(ring, n):
    """A consumer: has finished with tile n."""
    tiles, full, empty = ring
    mbarrier.arrive(empty.index(n % tiles.shape[0]), count=1)


@gluon.jit
def produce(q, k, v, Q, K, V, b, h, hk, i, blocks):
    consumers: gl.constexpr = Q[0].shape[0]
    for n in range(blocks):
        j = (blocks - 1 - n) * k.block_type.shape[2]
        load(k, K, n, [b, hk, j, 0])
        if n == 0:
            for w in gl.static_range(consumers):
                load(q, Q, w, [b, h, i + 64 * w, 0])
        load(v, V, n, [b, hk, j, 0])


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
    """The tile from its pairs. Not pure, so that the compiler does not do it early and carry 16-bit numbers instead."""
    low, high = gl.inline_asm_elementwise(
        "mov.b32 {$0, $1}, $2;", "=h,=h,r", [x], dtype=twice(dtype), is_pure=False, pack=1
    )  # fmt: skip
    return gl.join(low, high).reshape((x.shape[0], 2 * x.shape[1]))


@gluon.jit
def start_output(O, P, V_n):
    # P is in pairs until here: if 16-bit numbers went around the loop, ptxas would swap each of them twice.
    P = out_of_pairs(P, V_n.dtype)
    P = gl.convert_layout(P, gl.DotOperandLayout(0, O.type.layout, 2))  # every number stays in its thread
    return warpgroup_mma(P, V_n, O, is_async=True)  # (64, D_pad)


@gluon.jit
def mask(S, j, low, high, Nk):
    """S (64, Bc), which starts at key j, with -inf where there is no key or the query does not see it.

    The first query sees the keys low ... high - 1, the next one those from low + 1 to high. None is no limit.
    """
    row = gl.arange(0, 64, gl.SliceLayout(1, S.type.layout))
    column = gl.arange(0, S.shape[1], gl.SliceLayout(0, S.type.layout))
    end = gl.zeros_like(row) + (Nk - j)  # the row sees the columns before this one
    if high is not None:
        end = gl.minimum(end, row + (high - j))
    seen = column[None, :] < end[:, None]
    if low is not None:
        seen = seen & (column[None, :] >= (row + (low - j))[:, None])
    return gl.where(seen, S, float("-inf"))


@gluon.jit
def factor_and_shift(m, scale_log2):
    """(f, f m) of P = 2^(f S - f m), two numbers a row; f is scale_log2 unless m is huge. fwd_0_fused.py says why."""
    power_of_two = (scale_log2.to(gl.int32, bitcast=True) & 0x7F800000).to(gl.float32, bitcast=True)
    factor = gl.where(gl.abs(m * scale_log2) < 67108864.0, scale_log2, power_of_two)
    return factor, m * factor


@gluon.jit
def online_softmax(m, l, S, scale_log2):
    """(m, l, alpha, P) after one more tile of keys, with S = Q_i K_n^T (64, Bc), not scaled; m is its maximum."""
    m_new = gl.maximum(m, gl.max(S, 1))
    unit = gl.where(m_new == float("-inf"), 0.0, m_new)  # in a row without a key -inf - (-inf) would be NaN
    factor, shift = factor_and_shift(unit, scale_log2)
    alpha = gl.exp2((m - unit) * factor)
    P = gl.exp2(S * factor[:, None] - shift[:, None])
    return m_new, alpha * l + gl.sum(P, 1), alpha, P


@gluon.jit
def step(m, l, P, O, Q_i, K, V, n, j, low, high, Nk, scale_log2, MASKED: gl.constexpr):
    """Computes S of tile n, which starts at key j, and beside it adds P V of tile n - 1 to O."""
    S = start_scores(Q_i, get(K, n))
    O = start_output(O, P, get(V, n - 1))
    S = warpgroup_mma_wait(1, (S,))  # all products but the last one have ended
    release(K, n)
    if MASKED:
        S = mask(S, j, low, high, Nk)
    m, l, alpha, P = online_softmax(m, l, S, scale_log2)
    O = warpgroup_mma_wait(0, (O,))
    release(V, n - 1)
    return m, l, in_pairs(P, V[0].dtype), O * gl.convert_layout(alpha, gl.SliceLayout(1, O.type.layout))[:, None]


@gluon.jit
def consume(w, CAUSAL: gl.constexpr, out, lse, Q, K, V, b, h, i, blocks, Nq, Nk, scale):
    """Warpgroup w: the 64 queries from i on."""
    Bc: gl.constexpr = K[0].shape[3]
    D_pad: gl.constexpr = K[0].shape[4]
    rows: gl.constexpr = gl.SliceLayout(1, layout(Bc))
    m, l = gl.full((64,), float("-inf"), gl.float32, rows), gl.full((64,), 0, gl.float32, rows)
    O = gl.full((64, D_pad), 0, gl.float32, layout(D_pad))  # not yet divided by l
    scale_log2 = scale * 1.4426950408889634  # exp is computed as a power of 2
    whole, high = Nk // Bc, None  # the first tiles of the keys, which need no mask
    if CAUSAL:  # query i stands at position i + Nk - Nq
        high = i + 1 + Nk - Nq
        whole = gl.minimum(Nk, gl.maximum(0, high)) // Bc
    if blocks > 0:  # otherwise nothing comes to wait for
        Q_i = get(Q, w)
        S = warpgroup_mma_wait(0, (start_scores(Q_i, get(K, 0)),))
        release(K, 0)
        S = mask(S, (blocks - 1) * Bc, None, high, Nk)
        m, l, alpha, P = online_softmax(m, l, S, scale_log2)
        P = in_pairs(P, V[0].dtype)
        masked = gl.maximum(1, blocks - whole)
        if CAUSAL:  # otherwise only the first tile needs a mask
            for n in range(1, masked):
                j = (blocks - 1 - n) * Bc
                m, l, P, O = step(m, l, P, O, Q_i, K, V, n, j, None, high, Nk, scale_log2, True)
        for n in range(masked, blocks):
            m, l, P, O = step(m, l, P, O, Q_i, K, V, n, 0, None, high, Nk, scale_log2, False)
        O = warpgroup_mma_wait(0, (start_output(O, P, get(V, blocks - 1)),))
    l = gl.where(l == 0, 1.0, l)  # a row that saw no key then gets out = 0 / 1 and lse = -inf + log 1
    row = gl.arange(0, 64, rows)
    gl.store(lse + i + row, m * scale + gl.log(l), mask=row < Nq - i)
    tile = Q[0].index(w)  # Q_i is not needed any more, so out leaves the chip from its place
    inverse = gl.convert_layout(1 / l, gl.SliceLayout(1, layout(D_pad)))
    tile.reshape((64, D_pad)).store((O * inverse[:, None]).to(out.dtype))
    hopper.fence_async_shared()  # TMA must see what was stored
    async_store(out, [b, h, i, 0], tile)
    tma.store_wait(0)  # the shared memory must live until TMA has read it


@gluon.jit
def deal(tiles, causal, Nk, D_pad):
    """This program's tile and head. First come the tiles 0 of a section of heads, then their tiles 1, and so on.

    They are tiles and heads of queries in a forward, and of keys in a backward. When causal, tiles differ in length,
    and those that come first should be the longest. The more heads a section has, the shorter are the last tiles of
    all, so that the multiprocessors end at nearly the same time. But K and V of a section should fit into 32 MB of the
    L2 cache: 2^25 bytes, 4 for a number of K and one of V. Without a mask all tiles take equally long, and heads come
    one by one.
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


@gluon.jit(do_not_specialize=["H", "group", "Nq", "Nk"])  # so that one compiled kernel serves every length
def forward_kernel(q, k, v, out, lse, H, group, Nq, Nk, scale, CAUSAL: gl.constexpr, CONSUMERS: gl.constexpr):
    Br: gl.constexpr = 64 * CONSUMERS
    tiles = gl.cdiv(Nq, Br)
    tile, bh = deal(tiles, CAUSAL, Nk, k.block_type.shape[3])
    i = (tiles - 1 - tile) * Br  # the last queries first: when causal, they see most keys
    b, h = bh // H, bh % H
    end = Nk  # none of the Br queries sees a key from here on
    if CAUSAL:
        end = gl.minimum(Nk, gl.maximum(0, i + Br + Nk - Nq))
    blocks = gl.cdiv(end, k.block_type.shape[2])
    lse += bh.to(gl.int64) * Nq  # in 64 bits because a tensor may have more than 2^31 entries
    Q, K, V = make_ring(q, CONSUMERS, 1), make_ring(k, STAGES, CONSUMERS), make_ring(v, STAGES, CONSUMERS)
    # The first function runs on the kernel's own 4 warps. The lists at the end have the warps of the others, and the
    # registers that each of their threads asks for. The first function has the rest of the program's registers.
    if CONSUMERS == 2:
        gl.warp_specialize([
            (consume, (0, CAUSAL, out, lse, Q, K, V, b, h, i, blocks, Nq, Nk, scale)),
            (consume, (1, CAUSAL, out, lse, Q, K, V, b, h, i + 64, blocks, Nq, Nk, scale)),
            (produce, (q, k, v, Q, K, V, b, h, h // group, i, blocks)),
        ], [4, 1], [240, 24])  # fmt: skip
    else:
        gl.warp_specialize([
            (consume, (0, CAUSAL, out, lse, Q, K, V, b, h, i, blocks, Nq, Nk, scale)),
            (consume, (1, CAUSAL, out, lse, Q, K, V, b, h, i + 64, blocks, Nq, Nk, scale)),
            (consume, (2, CAUSAL, out, lse, Q, K, V, b, h, i + 128, blocks, Nq, Nk, scale)),
            (produce, (q, k, v, Q, K, V, b, h, h // group, i, blocks)),
        ], [4, 4, 1], [160, 160, 24])  # fmt: skip


def refusal(q):
    """Why this kernel does not take q, shaped as in forward; None if it does."""
    D = q.shape[3]
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
    Br, Bc = tile or (TILES[D_pad] if Nq >= SHORT else (128, TILES[D_pad][1]))
    descriptors = [describe(x, rows, D_pad) for x, rows in ((q, 64), (k, Bc), (v, Bc), (out, 64))]
    record.launch(
        forward_kernel, B * H * triton.cdiv(Nq, Br), *descriptors, lse, H, H // Hk, Nq, Nk, float(scale),
        CAUSAL=causal, CONSUMERS=Br // 64, num_warps=4, maxnreg=168 if Br == 128 else 128,
    )  # fmt: skip
    return out, lse
