# 02.bug3: the descriptor of V says that the next 64 columns begin Br rows further instead of Bc.
import torch

from reference import attention

CAUSE = "b"


def test(forward):
    """head_dim 128, so that V has two slabs, and more keys than queries in a tile."""
    q, k, v = torch.randn(3, 1, 1, 128, 128, generator=torch.Generator().manual_seed(0)).bfloat16()
    out, lse = forward(q, k, v)
    want, want_lse = attention.forward(q, k, v)
    torch.testing.assert_close(out.double(), want, rtol=0, atol=0.02)
    torch.testing.assert_close(lse.double(), want_lse, rtol=0, atol=1e-4)
