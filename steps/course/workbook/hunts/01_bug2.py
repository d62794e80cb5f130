# 01.bug2: the maximum starts at the smallest positive number, so scores below it never become the maximum.
import torch

from reference import attention
from steps import engine

CAUSE = "b"


def test(forward):
    """One query points away from every key. All its scores are near -200, and exp(-200) is 0 in float32."""
    q, k, v = torch.randn(3, 1, 1, 9, 16, generator=torch.Generator().manual_seed(0)).to(engine.device)
    k[..., 0] = 20
    q[..., 0] = 0
    q[..., 4, 0] = -40  # Its scores are near 20 x -40 / sqrt(16) = -200.
    out, lse = forward(q, k, v)
    want, want_lse = attention.forward(q, k, v)
    torch.testing.assert_close(out.double(), want, rtol=0, atol=1e-3)
    torch.testing.assert_close(lse.double(), want_lse, rtol=0, atol=1e-3)
