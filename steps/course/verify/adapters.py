"""Forms in which attention is written elsewhere, turned into attention(q, k, v, causal, scale) of four dimensions.

ADAPTERS has for each form the function that wraps, and what such a function does not take: {claim: value}.
"""

from typing import NamedTuple

import torch


class Adapter(NamedTuple):
    wrap: object  # the other function -> attention(q, k, v, causal, scale)
    takes: dict  # the claims that such a function does not make


def cs336(function):
    """Stanford's CS336, assignment 2: an autograd.Function of q, k, v (batch, N, D) and is_causal, which saves L."""

    def attention(q, k, v, causal, scale):
        out = function.apply(*(x.flatten(0, 1) for x in (q, k, v)), causal)
        saved = getattr(out.grad_fn, "saved_tensors", ())
        lse = [x.reshape(q.shape[:-1]) for x in saved if x.ndim == 2 and x.numel() == q.shape[:-1].numel()]
        return out.reshape(q.shape), *lse[:1]

    return attention


def leetgpu(function):
    """LeetGPU's "softmax attention": solve(Q (M, d), K (N, d), V (N, d), output (M, d), M, N, d)."""

    def attention(q, k, v):
        out = torch.full_like(q, torch.nan, memory_format=torch.contiguous_format)
        for head in torch.cartesian_prod(torch.arange(q.shape[0]), torch.arange(q.shape[1])).tolist():
            Q, K, V = (x[tuple(head)].contiguous() for x in (q, k, v))
            function(Q, K, V, out[tuple(head)], len(Q), len(K), Q.shape[1])
        return out

    return attention


def kernelbot(function):
    """GPU MODE's KernelBot: custom_kernel(data), where data is (q, k, v), each (B, H, N, D)."""
    return lambda q, k, v: function((q, k, v))


def flash_attn(function):
    """The package flash_attn: flash_attn_func of q, k, v (B, N, H, D)."""

    def attention(q, k, v, causal, scale):
        q, k, v = (x.transpose(1, 2) for x in (q, k, v))
        return function(q, k, v, causal=causal, softmax_scale=scale).transpose(1, 2)

    return attention


LACKS = dict.fromkeys(("scale", "gqa", "empty"), False)
ADAPTERS = {
    "cs336": Adapter(cs336, LACKS | {"top_left": True}),
    "leetgpu": Adapter(leetgpu, LACKS | {"causal": False, "backward": False}),
    "kernelbot": Adapter(kernelbot, LACKS | {"causal": False, "backward": False}),
    "flash_attn": Adapter(flash_attn, {"empty": False, "offset": False}),
}
