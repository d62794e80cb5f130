# SPDX-License-Identifier: MIT
"""Attention of few queries to many keys, as in decoding: the keys are divided among the GPU's multiprocessors.

    split_kernel   m_s, l_s, O_s = the online softmax over one share s of the keys, in base 2 with c = scale log2(e)
    merge_kernel   m = max m_s,  w_s = 2^(c (m_s - m)),  l = sum w_s l_s,  out = sum w_s O_s / l,  lse = scale m + log l
                   A sink, one more key of value 0, counts as one more share, and so once for all of them.

The idea: a new token has one query a head. One program a head would leave most multiprocessors empty, and each head of
a group would read the same K and V, which takes all the time. So the H / Hk heads times Nq queries that share K and V
are the rows of one tile, and there are so many shares that each multiprocessor always has copies in flight. A tile has
at least 16 rows, for the tensor cores, and always a mask. Both are free, since the next keys do not arrive any sooner.

The merge is that of step04_ring/merge.py for lse_s = scale m_s + log l_s. Here m_s and l_s stay apart: at scores of 4
million float32 has no room for log l_s. Left out: K and V in pages. Needs torch and Triton only.
"""

import functools

import torch
import triton
import triton.language as tl

from .replay import replayed

# (largest Br, Bc, num_warps, num_stages) by bytes an entry and head_dim: up to 64, 128, 256. Smaller GPUs use the same
# rows, because 99 KB of shared memory are enough. Only GPUs that have 227 KB use more, for tiles of 64 queries.
TILES = {2: {64: (64, 64, 4, 4), 128: (64, 64, 4, 3), 256: (32, 32, 4, 3)},
         4: {64: (32, 32, 4, 3), 128: (16, 32, 8, 3), 256: (16, 16, 4, 3)}}  # fmt: skip
LEAST_KEYS = 1024  # With fewer the second launch costs more than the first one saves.


@triton.jit
def load_tile(x, offset, exists, D: tl.constexpr, D_pad: tl.constexpr):
    """The rows that begin at x + offset, as a tile (rows, D_pad) with zeros where a row or a column does not exist."""
    column = tl.arange(0, D_pad)[None, :]
    return tl.load(x + offset[:, None] + column, mask=exists[:, None] & (column < D), other=0.0)


@triton.jit
def online_update(m, l, O, S, V_j, c):
    """(m, l, O) after one more tile of keys, with S = Q K_j^T (Br, Bc), not scaled, and the values V_j (Bc, D)."""
    m_new = tl.maximum(m, tl.max(S, 1))
    unit = tl.where(m_new == float("-inf"), 0.0, m_new)  # in a row without a key -inf - (-inf) would be NaN
    alpha, P = tl.exp2((m - unit) * c), tl.exp2((S - unit[:, None]) * c)
    return m_new, alpha * l + tl.sum(P, 1), tl.dot(P.to(V_j.dtype), V_j, O * alpha[:, None], input_precision="ieee")


@triton.jit(do_not_specialize=["Hk", "group", "Nq", "Nk"])  # so that one compiled kernel serves every length
def split_kernel(q, k, v, lengths_k, O_s, m_s, l_s, q_strides, k_strides, v_strides, Hk, group, Nq, Nk, scale,
                 CAUSAL: tl.constexpr, D: tl.constexpr, D_pad: tl.constexpr, Br: tl.constexpr, Bc: tl.constexpr):
    tiles, s, splits = tl.cdiv(group * Nq, Br), tl.program_id(1), tl.num_programs(1)
    bh = (tl.program_id(0) // tiles).to(tl.int64)  # Offsets have 64 bits: a tensor may have more than 2^31 entries.
    b, hk = bh // Hk, bh % Hk
    length = Nk if lengths_k is None else tl.minimum(tl.load(lengths_k + b), Nk)
    row = tl.program_id(0) % tiles * Br + tl.arange(0, Br)  # Nq rows for each of the `group` heads
    h, i, exists = hk * group + row // Nq, row % Nq, row < group * Nq
    last = tl.where(CAUSAL, i + length - Nq, length - 1)  # the last key that a query sees
    Q = load_tile(q, b * q_strides[0] + h * q_strides[1] + i.to(tl.int64) * q_strides[2], exists, D, D_pad)  # (Br, D)
    m, l, O = tl.full((Br,), float("-inf"), tl.float32), tl.zeros((Br,), tl.float32), tl.zeros((Br, D_pad), tl.float32)
    share = tl.cdiv(tl.cdiv(length, Bc), splits) * Bc
    for j in range(s * share, tl.minimum((s + 1) * share, length), Bc):
        key = j + tl.arange(0, Bc).to(tl.int64)
        K_j = load_tile(k, b * k_strides[0] + hk * k_strides[1] + key * k_strides[2], key < length, D, D_pad)  # (Bc, D)
        V_j = load_tile(v, b * v_strides[0] + hk * v_strides[1] + key * v_strides[2], key < length, D, D_pad)
        S = tl.dot(Q, tl.trans(K_j), input_precision="ieee")  # (Br, Bc)
        S = tl.where(tl.arange(0, Bc)[None, :] <= last[:, None] - j, S, float("-inf"))
        m, l, O = online_update(m, l, O, S, V_j, scale * 1.4426950408889634)
    place, column = (bh * group * Nq + row) * splits + s, tl.arange(0, D_pad)[None, :]
    tl.store(O_s + place[:, None] * D + column, O, mask=exists[:, None] & (column < D))
    tl.store(m_s + place, m, mask=exists)
    tl.store(l_s + place, l, mask=exists)


@triton.jit(do_not_specialize=["splits"])
def merge_kernel(O_s, m_s, l_s, out, lse, splits, scale, sinks, D: tl.constexpr, SPLITS: tl.constexpr):
    row, s, column = tl.program_id(0).to(tl.int64), tl.arange(0, SPLITS), tl.program_id(1) * 32 + tl.arange(0, 32)
    place, exists = row * splits + s, s < splits
    m_s = tl.load(m_s + place, mask=exists, other=float("-inf"))  # (SPLITS,)
    l_s = tl.load(l_s + place, mask=exists, other=0.0)
    O_s = tl.load(O_s + place[:, None] * D + column, mask=exists[:, None] & (column < D), other=0.0)  # (SPLITS, 32)
    m = tl.max(m_s, 0)
    if sinks is not None:  # (numbers, H, Nq). A sink is one more share: m = sink / scale, l = 1 and O = 0.
        m_sink = tl.load(sinks[0] + row // sinks[2] % sinks[1]) / scale
        m = tl.maximum(m, m_sink)
    w = tl.exp2((m_s - tl.where(m == float("-inf"), 0.0, m)) * (scale * 1.4426950408889634))
    l = tl.sum(w * l_s, 0)
    if sinks is not None:
        l += tl.exp2((m_sink - tl.where(m == float("-inf"), 0.0, m)) * (scale * 1.4426950408889634))
    l = tl.where(l == 0, 1.0, l)  # a query that saw no key then gets out = 0 / 1 and lse = -inf + log 1
    tl.store(out + row * D + column, tl.sum(w[:, None] * O_s, 0) / l, mask=column < D)
    tl.store(lse + row, m * scale + tl.log(l))


@functools.cache
def multiprocessors(device):  # Triton's interpreter counts as a GPU with 6, so that keys are divided there, too.
    return 6 if triton.knobs.runtime.interpret else torch.cuda.get_device_properties(device).multi_processor_count


def fits(q, k):
    """Whether queries are few, key heads fewer than multiprocessors, and keys so many that a second launch is cheap."""
    (B, H, Nq, _), (Hk, Nk) = q.shape, k.shape[1:3]
    return Nq * H <= 64 * Hk and Nk >= LEAST_KEYS and B * Hk < multiprocessors(q.device)


@replayed
def forward(record, q, k, v, *, causal=False, scale=None, lengths_k=None, sinks=None, splits=None):
    """(out, lse): q (B, H, Nq, D), k and v (B, Hk, Nk, D), D contiguous; out like q, lse (B, H, Nq) float32.

    scale > 0; None is 1/sqrt(D). lengths_k (B,) int32 on the device of q, or a list: only the first lengths_k[b] keys
    exist, and causal is aligned at the last of them; a number above Nk counts as Nk. sinks: (H,) floating point, the
    scores of one more key of each head, whose value is 0. splits: the number of shares; None is about two programs a
    multiprocessor.
    """
    if isinstance(lengths_k, torch.Tensor):
        lengths_k = record.derive(torch.Tensor.contiguous, lengths_k)
    elif lengths_k is not None:
        lengths = tuple(lengths_k)
        lengths_k = record.derive(lambda q: torch.tensor(lengths, dtype=torch.int32, device=q.device), q)
    (B, H, Nq, D), (Hk, Nk) = q.shape, k.shape[1:3]
    if sinks is not None:
        sinks = record.derive(lambda sinks: sinks.float().contiguous(), sinks), H, Nq
    out, lse = record.new(q.shape, like=q), record.new((B, H, Nq))
    if lse.numel() == 0:
        return out, lse
    rows, D_pad = H // Hk * Nq, max(16, triton.next_power_of_2(D))  # A tensor core takes 16 rows and columns.
    Br, Bc, num_warps, num_stages = TILES[q.element_size()][max(64, D_pad)]
    Br, scale = min(Br, max(16, triton.next_power_of_2(rows))), D**-0.5 if scale is None else scale
    programs = B * Hk * triton.cdiv(rows, Br)
    splits = splits or max(1, min(2 * multiprocessors(q.device) // programs, triton.cdiv(Nk, Bc)))
    O_s, m_s, l_s = record.new((B, H, Nq, splits, D)), record.new((B, H, Nq, splits)), record.new((B, H, Nq, splits))
    record.launch(
        split_kernel, (programs, splits),
        q, k, v, lengths_k, O_s, m_s, l_s, *(x.stride()[:3] for x in (q, k, v)), Hk, H // Hk, Nq, Nk, scale,
        CAUSAL=causal, D=D, D_pad=D_pad, Br=Br, Bc=Bc, num_warps=num_warps, num_stages=num_stages,
    )  # fmt: skip
    columns, SPLITS = triton.cdiv(D, 32), triton.next_power_of_2(splits)
    record.launch(
        merge_kernel, (B * H * Nq, columns), O_s, m_s, l_s, out, lse, splits, scale, sinks, D=D, SPLITS=SPLITS
    )  # fmt: skip
    return out, lse
