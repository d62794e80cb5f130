"""What the stages are measured against: PyTorch's own attention, one peer for each of its backends.

A peer is called as `peer(q, k, v, causal) -> out`, is differentiable, and never falls back to another backend: what it
cannot do is an error.
"""

from functools import partial

import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

MATMUL_SIZE = 8192


def sdpa(backend, q, k, v, causal=False):
    """out, like q (B, H, N, D), for k and v (B, Hk, Nk, D). RuntimeError where the backend declines."""
    if causal and q.shape[-2] != k.shape[-2]:
        # SDPA would align the mask at the top left, the course at the bottom right: another computation.
        raise ValueError("SDPA's causal mask equals the contract's only for as many queries as keys.")
    with sdpa_kernel(backend):
        return F.scaled_dot_product_attention(q, k, v, is_causal=causal, enable_gqa=q.shape[1] != k.shape[1])


PEERS = {
    "sdpa-flash": partial(sdpa, SDPBackend.FLASH_ATTENTION),  # FlashAttention-2, fp16 and bf16; torch's own on a CPU
    "sdpa-cudnn": partial(sdpa, SDPBackend.CUDNN_ATTENTION),  # NVIDIA's closed kernels; fp16 and bf16
    "sdpa-efficient": partial(sdpa, SDPBackend.EFFICIENT_ATTENTION),  # xFormers' memory-efficient kernels; fp32 too
    "sdpa-math": partial(sdpa, SDPBackend.MATH),  # the matrix form, N x N in memory; every dtype and device
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
