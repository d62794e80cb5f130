"""What the stages are measured against: PyTorch's own attention, one peer for each of its backends, and its compiler.

A peer is called as `peer(q, k, v, causal) -> out`, is differentiable, and never falls back to another backend: what it
cannot do is an error.
"""

from functools import cache, partial

import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, flex_attention, sdpa_kernel

MATMUL_SIZE = 8192


def sdpa(backend, q, k, v, causal=False):
    """out, like q (B, H, N, D), for k and v (B, Hk, Nk, D). RuntimeError where the backend declines."""
    if causal and q.shape[-2] != k.shape[-2]:
        # SDPA would align the mask at the top left, the course at the bottom right: another computation.
        raise ValueError("SDPA's causal mask equals the contract's only for as many queries as keys.")
    with sdpa_kernel(backend):
        return F.scaled_dot_product_attention(q, k, v, is_causal=causal, enable_gqa=q.shape[1] != k.shape[1])


def flex(q, k, v, causal=False):
    """FlexAttention, which torch.compile turns into a Triton kernel; the mask skips blocks that see nothing."""
    mask = causal_blocks(q.shape[-2], k.shape[-2], q.device) if causal else None
    return compiled(flex_attention.flex_attention)(q, k, v, block_mask=mask, enable_gqa=q.shape[1] != k.shape[1])


@cache
def causal_blocks(Nq, Nk, device):
    """FlexAttention's description of the contract's causal mask."""
    return flex_attention.create_block_mask(lambda b, h, i, j: j <= i + Nk - Nq, None, None, Nq, Nk, device)


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
    """The function, compiled anew for each shape."""
    return torch.compile(function, dynamic=False)


def compiled_matrix_form(q, k, v, causal=False):
    return compiled(matrix_form)(q, k, v, causal)


PEERS = {
    "sdpa-flash": partial(sdpa, SDPBackend.FLASH_ATTENTION),  # FlashAttention-2, fp16 and bf16; torch's own on a CPU
    "sdpa-cudnn": partial(sdpa, SDPBackend.CUDNN_ATTENTION),  # NVIDIA's closed kernels; fp16 and bf16
    "sdpa-efficient": partial(sdpa, SDPBackend.EFFICIENT_ATTENTION),  # xFormers' memory-efficient kernels; fp32 too
    "sdpa-math": partial(sdpa, SDPBackend.MATH),  # the matrix form, N x N in memory; every dtype and device
    "flex": flex,  # FlexAttention, compiled
    "compiled": compiled_matrix_form,  # what torch.compile makes of the matrix form
}


def matmul(dtype, device):
    """(call, error) of a product of two square matrices, random normal: what the chip reaches without a softmax.

    error: the largest difference from float64, in the last row.
    """
    generator = torch.Generator(device).manual_seed(0)
    a, b = torch.randn(2, MATMUL_SIZE, MATMUL_SIZE, generator=generator, device=device).to(dtype)
    out = torch.empty_like(a)
    torch.mm(a, b, out=out)
    return lambda: torch.mm(a, b, out=out), float((out[-1].double() - a[-1].double() @ b.double()).abs().max())
