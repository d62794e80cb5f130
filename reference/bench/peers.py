"""What the stages are measured against: PyTorch's own attention, one peer for each of its backends.

A peer is called as `peer(q, k, v, causal) -> out`, is differentiable, and never falls back to another
backend: what it cannot do is an error. `why_not` asks beforehand, by trying, because what a backend takes
changes with torch's version.
"""

import functools
import re
import warnings
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

MATMUL_SIZE = 8192


@dataclass(frozen=True)
class Peer:
    """One backend of torch.nn.functional.scaled_dot_product_attention (SDPA)."""

    name: str
    backend: SDPBackend
    about: str

    def __call__(self, q, k, v, causal=False):
        """out, like q (B, H, N, D), for k and v (B, Hk, Nk, D). RuntimeError where the backend declines."""
        if causal and q.shape[-2] != k.shape[-2]:
            # SDPA would align the mask at the top left, the course at the bottom right: another computation.
            raise ValueError("SDPA's causal mask equals the contract's only for as many queries as keys.")
        with sdpa_kernel(self.backend):
            return F.scaled_dot_product_attention(q, k, v, is_causal=causal, enable_gqa=q.shape[1] != k.shape[1])


PEERS = {
    peer.name: peer
    for peer in (
        Peer(
            "sdpa-flash",
            SDPBackend.FLASH_ATTENTION,
            "FlashAttention-2; fp16 and bf16 on a GPU, torch's own on a CPU",
        ),
        Peer("sdpa-cudnn", SDPBackend.CUDNN_ATTENTION, "NVIDIA's closed kernels; fp16 and bf16"),
        Peer("sdpa-efficient", SDPBackend.EFFICIENT_ATTENTION, "xFormers' memory-efficient kernels; fp32 too"),
        Peer("sdpa-math", SDPBackend.MATH, "the matrix form, N x N in memory; every dtype and device"),
    )
}


@functools.cache
def why_not(name, dtype, D, device="cuda"):
    """None if the peer takes this torch dtype, head_dim and device type both ways; else why not."""
    if device != "cuda" and name in ("sdpa-cudnn", "sdpa-efficient"):
        return "needs an NVIDIA GPU"
    if device == "cuda" and not torch.cuda.is_available():
        return "torch sees no GPU"
    q, k, v = (torch.randn(1, 1, 64, D, dtype=dtype, device=device, requires_grad=True) for _ in range(3))
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        try:
            PEERS[name](q, k, v).sum().backward()
        except RuntimeError as error:
            return _reason([str(warning.message) for warning in said], error)
    return None


def _reason(messages, error):
    """torch explains itself in warnings: a heading and a line for each backend, the switched-off ones too."""
    messages = [re.sub(r"\s*\(Triggered internally at .*", "", message, flags=re.S) for message in messages]
    ours = [m for m in messages if "not used because" not in m and "runtime disabled" not in m]
    return " ".join(" ".join(ours or [str(error)]).split())


def matmul(dtype, device, seed=0):
    """(call, error) of a product of two square matrices, random normal: what the chip reaches without a softmax.

    error: the largest difference from float64, in the last row.
    """
    generator = torch.Generator(device).manual_seed(seed)
    a, b = torch.randn(2, MATMUL_SIZE, MATMUL_SIZE, generator=generator, device=device).to(dtype)
    out = torch.empty_like(a)
    torch.mm(a, b, out=out)
    return lambda: torch.mm(a, b, out=out), float((out[-1].double() - a[-1].double() @ b.double()).abs().max())
