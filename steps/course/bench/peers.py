"""What the stages are measured against: PyTorch's own attention, its compiler, and what others wrote for it.

A peer is called as `peer(q, k, v, causal) -> out`, is differentiable, and never falls back to another backend: what it
cannot do is an error. fa4 and fa3 take part where their packages are installed.
"""

from functools import cache, partial
from importlib import metadata

import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, flex_attention, sdpa_kernel

from steps.course.bench import fa3_jax


def sdpa(backend, q, k, v, causal=False, mask=None):
    """out, like q (B, H, N, D), for k and v (B, Hk, Nk, D). RuntimeError where the backend declines."""
    if causal and q.shape[-2] != k.shape[-2]:
        # SDPA would align the mask at the top left, the course at the bottom right: another computation.
        raise ValueError("SDPA's causal mask equals the contract's only for as many queries as keys.")
    how = dict(attn_mask=mask, is_causal=causal, enable_gqa=q.shape[1] != k.shape[1])
    with sdpa_kernel(backend):
        return F.scaled_dot_product_attention(q, k, v, **how)


def flex(q, k, v, causal=False, *, change=None, seen=None):
    """FlexAttention, which torch.compile turns into a Triton kernel; it skips blocks of keys that nothing sees.

    change(score, b, h, i, j) is a score as it enters the softmax, and seen(b, h, i, j) says whether query i sees key j.
    """
    blocks = blocks_of(seen, causal, q.shape[-2], k.shape[-2], q.device)
    how = dict(score_mod=change, block_mask=blocks, enable_gqa=q.shape[1] != k.shape[1])
    return compiled(flex_attention.flex_attention)(q, k, v, **how)


@cache
def blocks_of(seen, causal, Nq, Nk, device):
    """FlexAttention's description of a mask, or None without one. If causal, query i stands at the key i + Nk - Nq."""
    if causal:
        return flex_attention.create_block_mask(lambda b, h, i, j: j <= i + Nk - Nq, None, None, Nq, Nk, device)
    return seen and flex_attention.create_block_mask(seen, None, None, Nq, Nk, device)


def matrix_form(q, k, v, causal=False):
    """Attention as one writes it down, with the N x N matrix."""
    k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], dim=1) for x in (k, v))
    S = q @ k.mT * q.shape[-1] ** -0.5
    if causal:
        hidden = torch.ones(S.shape[-2:], dtype=torch.bool, device=q.device).triu(1 + S.shape[-1] - S.shape[-2])
        S = S.masked_fill(hidden, float("-inf"))
    return S.softmax(-1) @ v


@cache
def compiled(function):
    """The function, compiled anew for each shape and mask."""
    # After this many compilations torch would run the function as it is; with fullgraph that is an error instead.
    torch._dynamo.config.recompile_limit = 256
    return torch.compile(function, dynamic=False, fullgraph=True)


# --- packages of FlashAttention: their tensors are (B, N, H, D), and some versions return lse beside out --------------


def fa4(q, k, v, causal=False, **how):
    """FlashAttention-4. how: window_size=(left, right), softcap, learnable_sink."""
    from flash_attn.cute import flash_attn_func

    out = flash_attn_func(*(x.transpose(1, 2) for x in (q, k, v)), causal=causal, **how)
    return without_lse(out).transpose(1, 2)


def fa3(q, k, v, causal=False):
    """FlashAttention-3: the package fa3-fwd; where gradients are asked for, flash-attn3-jax: causal, head_dim 128."""
    if q.requires_grad:
        if not causal or q.shape[-1] != 128:
            raise NotImplementedError("has a backward with a causal mask and head_dim 128 alone")
        return fa3_jax.Attention.apply(q, k, v)
    from fa3_fwd_interface import flash_attn_func

    out = flash_attn_func(*(x.transpose(1, 2) for x in (q, k, v)), causal=causal)
    return without_lse(out).transpose(1, 2)


def without_lse(out):
    return out[0] if isinstance(out, tuple) else out


def fa4_packed(q, k, v, causal=False, **how):
    """FlashAttention-4 for packed sequences, whose tensors are (total, H, D). how: cu_seqlens_q, max_seqlen_q, ..."""
    from flash_attn.cute import flash_attn_varlen_func

    out = flash_attn_varlen_func(*(x[0].transpose(0, 1) for x in (q, k, v)), **how)
    return without_lse(out).transpose(0, 1)[None]


def varlen(starts, length, q, k, v, causal=False):
    """torch's FlashAttention-2 for packed sequences."""
    from torch.nn.attention.varlen import varlen_attn

    q, k, v = (x[0].transpose(0, 1) for x in (q, k, v))
    return varlen_attn(q, k, v, starts, starts, length, length).transpose(0, 1)[None]


PEERS = {
    "sdpa-flash": partial(sdpa, SDPBackend.FLASH_ATTENTION),  # FlashAttention-2, fp16 and bf16; torch's own on a CPU
    "sdpa-cudnn": partial(sdpa, SDPBackend.CUDNN_ATTENTION),  # NVIDIA's closed kernels; fp16 and bf16
    "sdpa-efficient": partial(sdpa, SDPBackend.EFFICIENT_ATTENTION),  # xFormers' memory-efficient kernels; fp32 too
    "sdpa-math": partial(sdpa, SDPBackend.MATH),  # the matrix form, N x N in memory; every dtype and device
    "flex": flex,  # FlexAttention, compiled
    "compiled": lambda q, k, v, causal=False: compiled(matrix_form)(q, k, v, causal),
    "fa4": fa4,
    "fa3": fa3,
}


def version(peer, pass_="fwd"):
    """What a peer's pass is part of, with its version: "flash-attn-4 4.0.0b36", "cudnn 9.19.0", "torch 2.11.0"."""
    if peer == "sdpa-cudnn" or peer.startswith("context-parallel"):  # which calls cuDNN
        number = torch.backends.cudnn.version() or 0
        return f"cudnn {number // 10000}.{number // 100 % 100}.{number % 100}"
    if peer == "fa3" and pass_ != "fwd":
        return f"flash-attn3-jax {metadata.version('flash-attn3-jax')}, jax {metadata.version('jax')}"
    package = {"fa4": "flash-attn-4", "fa3": "fa3-fwd"}.get(peer, "torch")
    return f"{package} {metadata.version(package)}"
