# SPDX-License-Identifier: MIT
"""torch.nn.functional.scaled_dot_product_attention on the stage's kernels: its arguments, alignment, broadcasting."""

import torch


def sdpa_of(attention):
    """`sdpa`, which is torch's function, computed by an `attention` with masks and dropout."""

    def sdpa(query, key, value, attn_mask=None, dropout_p=0.0, is_causal=False, scale=None, enable_gqa=False,
             *, sinks=None):  # fmt: skip
        """The result of torch's function of this signature, differentiable, also in a floating-point attn_mask.

        query (..., H, Nq, D), key and value (..., Hk, Nk, D); leading dimensions broadcast.
        attn_mask: broadcast to (..., H, Nq, Nk), without being copied unless the query has more than four dimensions;
        bool (True is seen), or added to the scores.
        dropout_p: the probability, in steps of 1/256, with which an entry of P is dropped. Pass 0 for inference.
        is_causal: query i sees the keys 0 to i, whatever Nq and Nk. This is torch's alignment at the top left;
        `attention` aligns at the bottom right. enable_gqa: H may be a multiple of Hk.
        sinks: those of `attention`, (H,), which torch's function does not have.
        Raises NotImplementedError for a value whose last dimension is not the query's; RuntimeError where leading
        dimensions do not fit, as torch does, and for is_causal with attn_mask, as some of torch's kernels do; and the
        errors of `attention` for other wrong input, such as a scale that is not above 0.
        """
        if attn_mask is not None and is_causal:
            raise RuntimeError("sdpa takes attn_mask or is_causal, not both. Hide in the mask what causal would hide.")
        for name, x in (("query", query), ("key", key), ("value", value), ("attn_mask", attn_mask)):
            if not isinstance(x, torch.Tensor) and (x is not None or name != "attn_mask"):
                raise TypeError(f"{name} must be a torch.Tensor, got {type(x).__name__}.")
        if value.shape[-1] != key.shape[-1]:
            raise NotImplementedError(
                f"sdpa needs key and value of one head_dim; got {key.shape[-1]} and {value.shape[-1]}."
            )
        query, key, value = broadcast(query, key, value, enable_gqa)
        leading = query.shape[:-2]
        if query.ndim > 4:
            if attn_mask is not None and attn_mask.ndim > 3:
                attn_mask = attn_mask.expand(*leading[:-1], *attn_mask.shape[-3:]).flatten(0, -4)
            query, key, value = (x.flatten(0, -4) for x in (query, key, value))
        options = {"scale": scale, "causal": is_causal, "mask": attn_mask, "dropout_p": dropout_p, "sinks": sinks}
        if is_causal and query.shape[-2] != key.shape[-2]:
            options["first_query"] = 0
        out = attention(query, key, value, **options)
        return out.reshape(*leading, *out.shape[-2:])

    return sdpa


def broadcast(query, key, value, enable_gqa):
    """The three with common leading dimensions; with enable_gqa key and value may keep fewer heads than the query."""
    own = 2  # the dimensions of each that are not broadcast
    if enable_gqa and min(query.ndim, key.ndim, value.ndim) < 3:
        raise RuntimeError("enable_gqa needs heads: query (..., H, Nq, D), key and value (..., Hk, Nk, D).")
    if enable_gqa and query.shape[-3] > 0:
        H, heads = query.shape[-3], (key.shape[-3], value.shape[-3])
        if any(Hk == 0 or H % Hk for Hk in heads):
            raise RuntimeError(
                f"enable_gqa: the numbers of key and value heads {heads} must divide that of query heads, {H}."
            )
        Hk = max(heads) if max(heads) % min(heads) == 0 else H
        key, value = (x.repeat_interleave(Hk // x.shape[-3], dim=-3) if x.shape[-3] != Hk else x for x in (key, value))
        own = 3
    leading = torch.broadcast_shapes(*(x.shape[:-own] for x in (query, key, value)))
    return tuple(x.expand(*leading, *x.shape[-own:]) for x in (query, key, value))
