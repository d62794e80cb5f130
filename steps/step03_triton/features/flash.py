# SPDX-License-Identifier: MIT
"""FlashAttention to copy: forward and backward with masks, bias, dropout, window, ALiBi, soft-cap, sinks, packed rows.

    out, lse   = forward(q, k, v, causal=True, window=(4095, 0), softcap=50.0)
    dq, dk, dv = backward(dout, q, k, v, out, lse, causal=True, window=(4095, 0), softcap=50.0)

The kernels stand in flash_kernels.py, what a feature adds to them in scores.py. Here are the launchers, and the
tables of tiles. A kernel is compiled for each set of features; a feature that is off costs no instruction. On Hopper
flash_gluon.py has a faster forward for some features, and flash_gluon_backward.py a faster backward.

Sources: FlashAttention-2, Algorithms 1 and 2; scores.py names those of the features. Left out: paged K and V, fp8,
rotary embedding, block-sparse tables, and decoding, which decode.py does. Needs torch, Triton, flash_kernels.py,
scores.py, tiles.py and replay.py.
"""

import torch
import triton

from ..replay import replayed
from .flash_kernels import Inputs, Strides, delta_kernel, dkdv_kernel, dmask_kernel, dq_kernel, forward_kernel
from .scores import Features, Policy, check_options
from .tiles import can_copy, describe, describe_row_stats, dot_precision, is_aligned, new_like, strides_of

# (Br, Bc, num_warps, num_stages) by head_dim up to 64, 128, 256. In "tma" the copy engine reads the tiles. A mask, the
# random numbers of dropout, and positions (of a window, ALiBi or packed sequences) take registers from the tiles.
TILES = {
    "tma": {64: (64, 128, 4, 2), 128: (64, 64, 4, 3), 256: (128, 64, 8, 2)},
    "tma, mask by tma": {64: (64, 64, 4, 3), 128: (128, 64, 4, 2), 256: (128, 64, 8, 2)},
    "tma, mask": {64: (64, 64, 4, 3), 128: (128, 64, 8, 3), 256: (128, 64, 8, 2)},
    "tma, dropout": {64: (64, 64, 4, 2), 128: (128, 128, 8, 2), 256: (128, 64, 8, 2)},
    "tma, window": {64: (64, 64, 4, 2), 128: (64, 64, 4, 3), 256: (128, 64, 8, 2)},
    "tma, positions": {64: (64, 64, 4, 3), 128: (64, 64, 4, 3), 256: (128, 64, 8, 2)},
    "16 bits": {64: (64, 64, 4, 3), 128: (64, 64, 4, 3), 256: (64, 32, 8, 2)},
    "16 bits, mask": {64: (64, 64, 4, 3), 128: (64, 64, 4, 2), 256: (64, 32, 8, 2)},
    "tf32x3": {64: (64, 32, 4, 1), 128: (32, 32, 4, 2)},
    "ieee": {64: (64, 64, 4, 1), 128: (32, 32, 8, 1), 256: (32, 16, 8, 1)},
}
DKDV_TILES = {
    "tma": {64: (64, 64, 4, 3), 128: (64, 64, 4, 2), 256: (64, 64, 8, 2)},
    "tma, mask": {64: (64, 64, 4, 3), 128: (32, 64, 4, 2), 256: (32, 64, 8, 1)},
    "tma, dropout": {64: (64, 64, 4, 3), 128: (32, 64, 4, 2), 256: (32, 64, 8, 1)},
    "16 bits": {64: (64, 64, 4, 3), 128: (64, 64, 4, 2), 256: (32, 32, 8, 1)},
    "tf32x3": {64: (32, 32, 4, 1), 128: (32, 16, 4, 1)},
    "ieee": {64: (32, 64, 4, 1), 128: (16, 32, 8, 1), 256: (16, 16, 4, 1)},
}
DQ_TILES = {
    "tma": {64: (128, 64, 4, 3), 128: (128, 64, 8, 3), 256: (128, 32, 8, 2)},
    "tma, no mask": {64: (128, 64, 4, 3), 128: (64, 64, 4, 3), 256: (128, 32, 8, 2)},
    "tma, dropout": {64: (64, 64, 4, 3), 128: (64, 64, 4, 2), 256: (128, 32, 8, 2)},
    "tma, positions": {64: (64, 64, 4, 3), 128: (128, 64, 8, 3), 256: (128, 32, 8, 2)},
    "16 bits": {64: (64, 64, 4, 2), 128: (64, 64, 4, 2), 256: (64, 32, 8, 1)},
    "tf32x3": {64: (32, 32, 4, 1), 128: (32, 32, 4, 1)},
    "ieee": {64: (64, 32, 4, 1), 128: (32, 16, 8, 1), 256: (16, 16, 8, 1)},
}


def prepare(
    record, q, k, *, causal=False, scale=None, window=None, softcap=None, mask=None, alibi_slopes=None, sinks=None,
    dropout_p=0.0, seed=None, first_query=None, first_key=0, cu_seqlens_q=None, cu_seqlens_k=None, max_seqlen_q=None,
    max_seqlen_k=None
):  # fmt: skip
    """(sequences, Nq, Nk, features), as the kernels take them, from the options of `forward`."""
    (sequences, H, Nq, D), Nk = q.shape, k.shape[2]
    left, right = (None if limit == -1 else limit for limit in window or (None, None))
    f = Features(
        scale=D**-0.5 if scale is None else scale,
        left=left,
        right=0 if causal else right,
        softcap=softcap or None,
        first_query=first_query,
        first_key=first_key,
        slopes=record.in_float32(alibi_slopes),
        sinks=record.in_float32(sinks),
    )
    if mask is not None:
        if mask.dtype != torch.bool and not mask.is_floating_point():
            raise TypeError(f"mask must be bool or floating point; got {mask.dtype}.")
        kind = "seen" if mask.dtype == torch.bool else "added"
        f = f._replace(**{kind: 1}, mask_strides=mask.expand(sequences, H, Nq, Nk).stride())
    if cu_seqlens_q is not None:
        starts_q, starts_k = (record.derive(torch.Tensor.contiguous, x) for x in (cu_seqlens_q, cu_seqlens_k))
        f = f._replace(cu_seqlens_q=starts_q, cu_seqlens_k=starts_k)
        sequences, Nq, Nk = len(cu_seqlens_q) - 1, max_seqlen_q, max_seqlen_k
    if alibi_slopes is not None:
        f = f._replace(slope_strides=f.slopes.expand(sequences, H).stride())
    if dropout_p:
        threshold = max(1, round(256 * (1 - dropout_p))) if dropout_p < 1 else 0
        kept_scale = 256 / threshold if threshold else 0.0
        f = f._replace(seed=seed_tensor(record, seed, q.device), threshold=threshold, kept_scale=kept_scale)
    return sequences, Nq, Nk, f._replace(policy=policy_of(q, f))


def seed_tensor(record, seed, device):
    if seed is None:
        raise ValueError("dropout needs a seed, the same in forward and backward.")
    if isinstance(seed, torch.Tensor):
        return record.derive(lambda seed: seed.to(device), seed)
    return record.new((1,), fill=seed, dtype=torch.int64)


def policy_of(q, f):
    """The policy for these features, if tiles are read by pointers."""
    assembly = not triton.knobs.runtime.interpret  # The interpreter has no inline assembly.
    broadcast_rows = f.mask_strides is not None and f.mask_strides[2] == 0
    holds = {
        "ieee": dot_precision(q) == "ieee",
        "approximate": f.softcap is not None and assembly and q.dtype != torch.float32,
        "heads_first": f.mask_strides is not None and f.mask_strides[1] == 0,
        "broadcast_rows": broadcast_rows,
        "in_fours": f.seen is not None and assembly and not broadcast_rows,
        "aligned": f.seed is not None and f.first_key % 16 == 0,
    }
    return Policy(**{name: 1 if value else None for name, value in holds.items()})


def with_tma(f, tensors, mask):
    """f, whose policy now says what the copy engine reads: the tensors (q, k, v, ...), and the mask.

    The copy engine reads no mask that is broadcast over rows or columns.
    """
    if not can_copy(tensors):
        return f
    q, k = tensors[:2]
    packed = f.cu_seqlens_q is not None  # A sequence's first key may be any, and boxes begin at multiples of 16 bytes.
    whole = mask is not None and not f.policy.broadcast_rows and mask.shape[-2:] == (q.shape[2], k.shape[2])
    mask_too = whole and not packed and mask.stride(-1) == 1 and is_aligned(four_dimensions(mask))
    return f._replace(policy=f.policy._replace(tma=1, mask_tma=1 if mask_too else None))


def kinds(q, f):
    """The rows of a table of tiles that apply, the most special one first."""
    if not f.policy.tma:
        yield f"{dot_precision(q)}, mask", f.mask_strides
        yield dot_precision(q), True
        return
    yield "tma, mask by tma", f.policy.mask_tma
    yield "tma, mask", f.mask_strides
    yield "tma, dropout", f.seed is not None
    yield "tma, window", f.left is not None
    yield "tma, positions", f.left is not None or f.slopes is not None or f.cu_seqlens_q is not None
    yield "tma, no mask", not f.mask_strides
    yield "tma", True


def sizes(table, q, tile, f):
    """The constants of a kernel; its tile is the `tile` asked for, or that of the table's first row that applies."""
    D_pad = max(16, triton.next_power_of_2(q.shape[-1]))  # tiles are powers of two, and a tensor core takes 16 columns
    kind = next(kind for kind, applies in kinds(q, f) if applies and kind in table)
    Br, Bc, num_warps, num_stages = (*tile, 4, 1) if tile else table[kind][max(64, D_pad)]
    return dict(D=q.shape[-1], D_pad=D_pad, Br=Br, Bc=Bc, num_warps=num_warps, num_stages=num_stages)


def four_dimensions(mask):
    return mask.view((1,) * (4 - mask.ndim) + tuple(mask.shape))


def boxes(f, *tensors_and_rows, D_pad):
    """For each (tensor, rows) a descriptor whose boxes have so many rows, if the copy engine reads the tensors."""
    return [describe(x, rows, D_pad) if f.policy.tma else None for x, rows in tensors_and_rows]


def tiled(record, mask, f, Br, Bc):
    """The mask as a kernel reads it by tiles (Br, Bc): a descriptor or a tensor, of 8-bit integers if it is boolean."""
    if mask is None:
        return None
    if mask.dtype == torch.bool:
        mask = record.derive(lambda mask: mask.view(torch.int8), mask)
    return describe(record.derive(four_dimensions, mask), Br, Bc) if f.policy.mask_tma else mask


@replayed
def forward(record, q, k, v, *, out=None, lse=None, tile=None, **options):
    """(out, lse): q (B, H, Nq, D), k and v (B, Hk, Nk, D), D contiguous; out like q, lse (B, H, Nq) float32.

    flash_attn's tensors are (B, N, H, D): give those as q.transpose(1, 2). Options, of which scores.py gives the
    formula. Query i stands at i + first_query, by default Nk - Nq.

        causal, scale=1/sqrt(D), softcap
        window=(left, right)      both inclusive; None or -1 is no limit
        mask                      broadcast to (B, H, Nq, Nk) without being copied; bool (True = seen) or added
        alibi_slopes              (H,) or (B, H)
        sinks                     (H,): scores of one more key of value 0. Where several calls carry out and lse, only
                                  one of them may have sinks, because the key would otherwise count several times
        dropout_p, seed           p in steps of 1/256; the seed is an int64 tensor on q's device, or an integer
        first_query, first_key    the positions of the first query and key
        cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k    packed sequences: B is 1, int32 tensors (n + 1,);
                                  alibi_slopes (n, H); rows after the last entry give 0 and -inf
        out, lse                  the results of earlier calls with other keys, float32, contiguous, at first 0 and
                                  -inf. They are changed in place, and returned.
        tile                      (Br, Bc)
    """
    if out is not None and record.negated(out, lse):
        raise ValueError("out and lse are changed in place: give and keep out.resolve_neg() and lse.resolve_neg().")
    check_options(q, **options)
    sequences, Nq, Nk, f = prepare(record, q, k, **options)
    mask = options.get("mask")
    H, Hk = q.shape[1], k.shape[1]
    carried = out is not None
    if not carried:
        out = new_like(record, q, f.cu_seqlens_q)
        lse = record.new(q.shape[:3], fill=-torch.inf)
    f = with_tma(f, (q, k, v), mask)
    how = sizes(TILES, q, tile, f)
    Br, Bc = how["Br"], how["Bc"]
    record.launch(
        forward_kernel, sequences * H * triton.cdiv(Nq, Br),
        q, k, v, *boxes(f, (k, Bc), (v, Bc), D_pad=how["D_pad"]), tiled(record, mask, f, Br, Bc), out, lse,
        *map(strides_of, (q, k, v, out)), H, H // Hk, Nq, Nk, q.shape[2], f, CARRIED=carried, **how,
    )  # fmt: skip
    return out, lse


@replayed
def backward(record, dout, q, k, v, out, lse, *, tile=None, mask_gradient=False, **options):
    """(dq, dk, dv), and dmask if mask_gradient, from dout and out like q, lse (B, H, Nq), and the options of `forward`.

    out and lse may belong to more keys than k and v: dq is then the part that comes from these keys. With sinks the
    last result is dsinks. dq, dk and dv do not need the sinks, because lse contains them.
    """
    check_options(q, **options)
    sequences, Nq, Nk, f = prepare(record, q, k, **options)
    mask = options.get("mask")
    (B, H), Hk = q.shape[:2], k.shape[1]
    group = H // Hk
    packed = f.cu_seqlens_q is not None
    dq = new_like(record, q, f.cu_seqlens_q)
    dk, dv = (new_like(record, x, f.cu_seqlens_k) for x in (k, v))
    # Each row of lse_2 and delta, and in it each sequence, begins at a multiple of 16 bytes.
    stride = 4 * (triton.cdiv(q.shape[2], 4) + (sequences if packed else 0))
    lse_2, delta = record.new((B * H, stride)), record.new((B * H, stride))
    tiles, sinks = triton.cdiv(Nq, 64), options.get("sinks")
    dsinks = None if sinks is None else record.new((sequences * tiles, H))
    lse = record.derive(torch.Tensor.contiguous, lse)
    inputs = Inputs(dout, q, k, v, lse_2, delta)
    strides = Strides(*map(strides_of, (dout, q, k, v)))

    how = sizes(DQ_TILES, q, tile, f)
    record.launch(
        delta_kernel, sequences * H * tiles,
        dout, out, lse, lse_2, delta, dsinks, strides.dout, strides_of(out), stride, H, Nq, Nk, q.shape[2], f,
        D=how["D"], D_pad=how["D_pad"], Br=64,
    )  # fmt: skip
    f = f._replace(sinks=None)  # The other kernels need not be compiled for them.
    if mask_gradient:
        dmask = gradient_of_mask(record, mask, inputs, strides, sequences, Nq, Nk, f, how)
    f = with_tma(f, (q, k, v, dout), mask)
    how = sizes(DKDV_TILES, q, tile, f)
    Br, Bc, D_pad = how["Br"], how["Bc"], how["D_pad"]
    row_stats = [describe_row_stats(x, stride if packed else Nq, Br) if f.policy.tma else None for x in (lse_2, delta)]
    record.launch(
        dkdv_kernel, sequences * Hk * triton.cdiv(Nk, Bc),
        inputs, *boxes(f, (dout, Br), (q, Br), D_pad=D_pad), *row_stats, tiled(record, mask, f, Br, Bc), dk, dv,
        strides, strides_of(dk), stride, Hk, group, Nq, Nk, f, **how,
    )  # fmt: skip
    how = sizes(DQ_TILES, q, tile, f)
    Br, Bc = how["Br"], how["Bc"]
    record.launch(
        dq_kernel, sequences * H * triton.cdiv(Nq, Br),
        inputs, *boxes(f, (dout, Br), (q, Br), (k, Bc), (v, Bc), D_pad=D_pad), tiled(record, mask, f, Br, Bc), dq,
        strides, strides_of(dq), stride, H, group, Nq, Nk, f, **how,
    )  # fmt: skip
    gradients = (dq, dk, dv, dmask) if mask_gradient else (dq, dk, dv)
    if sinks is None:
        return gradients
    dtype = sinks.dtype
    return *gradients, record.derive(lambda dsinks: dsinks.sum(0).to(dtype), dsinks, like=sinks)


def gradient_of_mask(record, mask, inputs, strides, sequences, Nq, Nk, f, how):
    """dmask like the mask: dS, summed over what the mask was broadcast over."""
    q, k = inputs.q, inputs.k
    (B, H), group = q.shape[:2], q.shape[1] // k.shape[1]
    packed = f.cu_seqlens_q is not None
    shape = (1,) * (4 - mask.ndim) + tuple(mask.shape)
    # One number for all queries and keys is summed over the queries in the kernel, and over the keys after it.
    columns = k.shape[2] if shape[2:] == (1, 1) else shape[3]
    dmask = record.new((*shape[:3], columns), fill=0)
    over_queries, over_keys = shape[2] == 1, columns == 1
    batches = sequences if shape[0] == 1 and not packed else 1
    heads = H if shape[1] == 1 else 1
    tiles_q = 1 if over_queries else triton.cdiv(Nq, how["Br"])
    tiles_k = 1 if over_keys else triton.cdiv(Nk, how["Bc"])
    dmask_strides = dmask.expand(B, H, q.shape[2], k.shape[2]).stride()
    record.launch(
        dmask_kernel, sequences // batches * (H // heads) * tiles_q * tiles_k,
        inputs, tiled(record, mask, f, 0, 0), dmask, strides, dmask_strides, inputs.delta.shape[1],
        H, group, Nq, Nk, f, batches, heads, OVER_QUERIES=over_queries, OVER_KEYS=over_keys, **how,
    )  # fmt: skip
    if columns != shape[3]:
        dmask = record.derive(lambda dmask: dmask.sum(3), dmask)
    shape, dtype = mask.shape, mask.dtype
    return record.derive(lambda dmask: dmask.reshape(shape).to(dtype), dmask, like=mask)
