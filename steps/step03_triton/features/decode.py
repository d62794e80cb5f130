# SPDX-License-Identifier: MIT
"""Attention of few queries to many keys, as in decoding: split the keys among the multiprocessors, then combine.

    split_kernel   m_s, l_s, O_s = the online softmax over one split s of the keys, in base 2 with c = scale log2(e)
                   The first split begins with the sink, one more key of value 0: m = sink, l = 1, O = 0. With sinks
                   all scores are in natural units, c = log2(e), because sink / scale may be too large for float32.
    combine_kernel m = max m_s,  w_s = 2^(c (m_s - m)),  l = sum w_s l_s,  out = sum w_s O_s / l,  lse = scale m + log l
                   If there is only one split, split_kernel stores out = O / l itself.

The idea: a new token has one query a head. One program a head would leave most multiprocessors empty, and each head of
a group would read the same K and V, although reading takes all the time. So the H / Hk heads times Nq queries that
share K and V are the rows of one tile, and there are so many splits that each multiprocessor always has copies in
flight. A tile has at least 16 rows, for the tensor cores, and always a mask. Both cost no time, because the kernel
waits for the next keys anyway.

The combination is that of step04_ring/merge.py for lse_s = scale m_s + log l_s. Here m_s and l_s stay apart: at scores
of 4 million, the sum in float32 would lose log l_s. Also here is what caches of today's models need: a window, whose
keys alone are read, a soft-cap, ALiBi and sinks. Left out: K and V in pages. Needs torch, Triton, replay.py and
scores.py.
"""

import functools
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl

from ..replay import for_inference
from .scores import check_options, tanh

# (largest Br, Bc, num_warps, num_stages) by bytes an entry and head_dim: up to 64, 128, 256. All fit into the 99 KB of
# shared memory that every GPU from Ampere on has.
TILES = {2: {64: (64, 64, 4, 4), 128: (64, 32, 4, 3), 256: (32, 32, 4, 3)},
         4: {64: (32, 32, 4, 3), 128: (16, 32, 8, 3), 256: (16, 16, 4, 3)}}  # fmt: skip
LEAST_KEYS = 1024  # With fewer the second launch costs more than the first one saves.
LOG2_E = tl.constexpr(1.4426950408889634)


class Inputs(NamedTuple):
    """The tensors that split_kernel reads."""

    q: Any
    k: Any
    v: Any
    lengths_k: Any  # or None
    sinks: Any  # or None


class Strides(NamedTuple):
    """Of batch, head and row."""

    q: Any
    k: Any
    v: Any


class Splits(NamedTuple):
    """What the splits leave behind, for each batch entry, head and query one after the other."""

    O: Any
    m: Any
    l: Any  # None if there is only one split: then O is out, and m is lse


class Slopes(NamedTuple):
    """Those of ALiBi."""

    x: Any
    stride: Any  # of batch


@triton.jit
def offsets(strides, b, h, row):
    """Where these rows of head h, or each of its own head, begin in batch entry b. b and h have 64 bits."""
    return b * strides[0] + h * strides[1] + row.to(tl.int64) * strides[2]


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
    alpha = tl.exp2((m - unit) * c)
    P = tl.exp2((S - unit[:, None]) * c)
    l = alpha * l + tl.sum(P, 1)
    O = tl.dot(P.to(V_j.dtype), V_j, O * alpha[:, None], input_precision="ieee")
    return m_new, l, O


@triton.jit
def softcap_and_alibi(S, distance, scale, softcap, slope):
    """The scores in natural units from Q K_j^T (Br, Bc); distance: position - key."""
    S *= scale
    if softcap is not None:
        S = tanh(S / softcap, None) * softcap
    if slope is not None:
        S -= slope[:, None] * tl.abs(distance.to(tl.float32))
    return S


@triton.jit(do_not_specialize=["Hk", "group", "Nq", "Nk", "left", "right"])  # so that one kernel serves every length
def split_kernel(
    inputs, splits, strides, Hk, group, Nq, Nk, scale, left, right, softcap, slopes,
    CAUSAL: tl.constexpr, D: tl.constexpr, D_pad: tl.constexpr, Br: tl.constexpr, Bc: tl.constexpr
):
    q, k, v, lengths_k, sinks = inputs
    tiles = tl.cdiv(group * Nq, Br)
    split = tl.program_id(1)
    num_splits = tl.num_programs(1)
    bh = (tl.program_id(0) // tiles).to(tl.int64)  # Offsets have 64 bits: a tensor may have more than 2^31 entries.
    b = bh // Hk
    hk = bh % Hk
    length = Nk if lengths_k is None else tl.minimum(tl.load(lengths_k + b), Nk)
    row = tl.program_id(0) % tiles * Br + tl.arange(0, Br)  # Nq rows for each of the `group` heads
    h = hk * group + row // Nq
    i = row % Nq
    exists = row < group * Nq
    position = i + length - Nq
    last = tl.where(CAUSAL, position, length - 1)  # the last key that a query sees
    first = 0  # No query sees a key before it.
    slope = None
    if left is not None:
        first = tl.maximum(length - Nq - left, 0)
    if right is not None:
        last = tl.minimum(last, position + right)
    if slopes is not None:
        slope = tl.load(slopes.x + b * slopes.stride + h, mask=exists, other=0.0)
    Q = load_tile(q, offsets(strides.q, b, h, i), exists, D, D_pad)  # (Br, D)
    m_scale = scale  # m_scale m is in natural units. `softcap_and_alibi` has scaled the scores already.
    if softcap is not None or slope is not None or sinks is not None:
        m_scale = 1.0
    m = tl.full((Br,), float("-inf"), tl.float32)
    l = tl.zeros((Br,), tl.float32)
    O = tl.zeros((Br, D_pad), tl.float32)
    if sinks is not None:
        if split == 0:
            m = tl.load(sinks + h, mask=exists, other=0.0)
            l = l + 1
    keys = tl.cdiv(tl.cdiv(length - first, Bc), num_splits) * Bc  # of a split
    for j in range(first + split * keys, tl.minimum(first + (split + 1) * keys, length), Bc):
        key = j + tl.arange(0, Bc).to(tl.int64)
        K_j = load_tile(k, offsets(strides.k, b, hk, key), key < length, D, D_pad)  # (Bc, D)
        V_j = load_tile(v, offsets(strides.v, b, hk, key), key < length, D, D_pad)
        S = tl.dot(Q, tl.trans(K_j), input_precision="ieee")  # (Br, Bc)
        if softcap is not None or slope is not None or sinks is not None:
            S = softcap_and_alibi(S, position[:, None] - key[None, :], scale, softcap, slope)
        S = tl.where(tl.arange(0, Bc)[None, :] <= last[:, None] - j, S, float("-inf"))
        if left is not None:
            S = tl.where(tl.arange(0, Bc)[None, :] >= position[:, None] - left - j, S, float("-inf"))
        m, l, O = online_update(m, l, O, S, V_j, m_scale * LOG2_E)
    if splits.l is None:
        l = tl.where(l == 0, 1.0, l)  # a query that saw no key then gets out = 0 / 1 and lse = -inf + log 1
        m = m * m_scale + tl.log(l)
        O = O / l[:, None]
    place = (bh * group * Nq + row) * num_splits + split
    column = tl.arange(0, D_pad)[None, :]
    tl.store(splits.O + place[:, None] * D + column, O, mask=exists[:, None] & (column < D))
    tl.store(splits.m + place, m, mask=exists)
    if splits.l is not None:
        tl.store(splits.l + place, l, mask=exists)


@triton.jit(do_not_specialize=["num_splits"])
def combine_kernel(
    splits, out, lse, num_splits, m_scale, D: tl.constexpr, SPLITS: tl.constexpr, COLUMNS: tl.constexpr
):
    row = tl.program_id(0).to(tl.int64)
    split = tl.arange(0, SPLITS)
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    place = row * num_splits + split
    exists = split < num_splits
    m_s = tl.load(splits.m + place, mask=exists, other=float("-inf"))  # (SPLITS,)
    l_s = tl.load(splits.l + place, mask=exists, other=0.0)
    exists = exists[:, None] & (column < D)
    O_s = tl.load(splits.O + place[:, None] * D + column, mask=exists, other=0.0)  # (SPLITS, COLUMNS)
    m = tl.max(m_s, 0)
    w = tl.exp2((m_s - tl.where(m == float("-inf"), 0.0, m)) * (m_scale * LOG2_E))
    l = tl.sum(w * l_s, 0)
    l = tl.where(l == 0, 1.0, l)  # as in split_kernel
    tl.store(out + row * D + column, tl.sum(w[:, None] * O_s, 0) / l, mask=column < D)
    tl.store(lse + row, m * m_scale + tl.log(l))


@functools.cache
def multiprocessors(device):  # Triton's interpreter counts as a GPU with 6, so that keys are split there, too.
    return 6 if triton.knobs.runtime.interpret else torch.cuda.get_device_properties(device).multi_processor_count


def fits(q, k):
    """Whether `forward` is faster than a rung: keys are many, and the rows of a key head are few.

    More rows than a tile of 16 pay only if a rung would leave multiprocessors empty, or read shared keys again.
    """
    (B, H, Nq, _), (Hk, Nk) = q.shape, k.shape[1:3]
    alone = B * Hk < multiprocessors(q.device) or H > Hk
    return Nq * H <= (64 if alone else 16) * Hk and Nk >= LEAST_KEYS


def check(q, alibi_slopes, lengths_k, splits):
    """Raises ValueError for wrong options that only this file takes; scores.check_options checks the others."""
    B, H = q.shape[:2]
    for name, x, *allowed in (("alibi_slopes", alibi_slopes, (H,), (B, H)), ("lengths_k", lengths_k, (B,))):
        shape = None if x is None else tuple(x.shape) if isinstance(x, torch.Tensor) else (len(x),)
        if shape not in (None, *allowed):
            raise ValueError(f"{name} must have shape {' or '.join(map(str, allowed))}; got {shape}.")
    if splits is not None and not (isinstance(splits, int) and splits > 0):
        raise ValueError(f"splits must be an integer of at least 1, or None; got {splits!r}.")


@for_inference
def forward(
    record, q, k, v, *, causal=False, scale=None, window=None, softcap=None, alibi_slopes=None, lengths_k=None,
    sinks=None, splits=None
):  # fmt: skip
    """(out, lse): q (B, H, Nq, D), k and v (B, Hk, Nk, D), D contiguous; out like q, lse (B, H, Nq) float32.

    float32, float16 or bfloat16, D at most 256, H a multiple of Hk. scale > 0; None is 1/sqrt(D).
    lengths_k: (B,) int32 on the device of q, or a list: only the first lengths_k[b] keys exist, and a causal mask and a
    window are aligned at the last of them; a number above Nk counts as Nk.
    window (left, right): how many keys a query sees before and behind its own position; None or -1 for all.
    softcap: scores s become softcap tanh(s / softcap); 0 or None is none. alibi_slopes (H,) or (B, H): slope |distance|
    is subtracted. sinks: (H,) floating point, the scores of one more key of each head, whose value is 0.
    splits: the number of splits; None is about three programs a multiprocessor. Not differentiable. In a loop give
    lengths_k as a tensor: a list is a new call for each of its values.
    """
    check_options(q, scale=scale, window=window, softcap=softcap, sinks=sinks)
    check(q, alibi_slopes, lengths_k, splits)
    softcap = softcap or None
    if isinstance(lengths_k, torch.Tensor):
        lengths_k = record.derive(torch.Tensor.contiguous, lengths_k)
    elif lengths_k is not None:
        lengths = tuple(lengths_k)
        lengths_k = record.derive(lambda q: torch.tensor(lengths, dtype=torch.int32, device=q.device), q)
    (B, H, Nq, D), (Hk, Nk) = q.shape, k.shape[1:3]
    sinks = record.in_float32(sinks)
    slopes = None
    if alibi_slopes is not None:
        slopes = Slopes(record.in_float32(alibi_slopes), H * (alibi_slopes.ndim - 1))
    # A window that reaches beyond all keys counts as no window.
    left, right = (None if limit in (None, -1) or limit >= Nq + Nk else limit for limit in window or (None, None))
    # With one of these the scores of the splits are in natural units.
    natural = softcap is not None or slopes is not None or sinks is not None
    out, lse = record.new(q.shape, like=q), record.new((B, H, Nq))
    if lse.numel() == 0:
        return out, lse
    rows = H // Hk * Nq
    D_pad = max(16, triton.next_power_of_2(D))  # A tensor core takes 16 rows and columns.
    Br, Bc, num_warps, num_stages = TILES[q.element_size()][max(64, D_pad)]
    Br = min(Br, max(16, triton.next_power_of_2(rows)))
    scale = D**-0.5 if scale is None else scale
    programs = B * Hk * triton.cdiv(rows, Br)
    keys = Nk if left is None else min(Nk, left + Nq)
    together = 3 * multiprocessors(q.device)  # so many programs keep the memory busy
    num_splits = splits or max(1, min(together // programs, triton.cdiv(keys, Bc)))
    splits = Splits(out, lse, None)
    if num_splits > 1:
        splits = Splits(*(record.new((B, H, Nq, num_splits, *columns)) for columns in ((D,), (), ())))
    record.launch(
        split_kernel, (programs, num_splits),
        Inputs(q, k, v, lengths_k, sinks), splits, Strides(*(x.stride()[:3] for x in (q, k, v))),
        Hk, H // Hk, Nq, Nk, scale, left, right, softcap, slopes,
        CAUSAL=causal, D=D, D_pad=D_pad, Br=Br, Bc=Bc, num_warps=num_warps, num_stages=num_stages,
    )  # fmt: skip
    if num_splits > 1:  # If there are few rows, several programs combine each of them, each some of the columns.
        SPLITS, COLUMNS = triton.next_power_of_2(num_splits), D_pad if B * H * Nq >= together else 32
        record.launch(
            combine_kernel, (B * H * Nq, triton.cdiv(D, COLUMNS)),
            splits, out, lse, num_splits, 1.0 if natural else scale, D=D, SPLITS=SPLITS, COLUMNS=COLUMNS,
        )  # fmt: skip
    return out, lse
