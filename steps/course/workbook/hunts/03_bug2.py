# 03.bug2: the backward counts the keys of dropout's random numbers from its own tile, so it draws another mask.
import torch

from steps import engine

CAUSE = "c"


def test(attention):
    """With one seed out is linear in v, so that sum(out * dout) = sum(v * dv). There is more than one tile of keys."""
    q, k, v, dout = torch.randn(4, 1, 2, 40, 16, generator=torch.Generator().manual_seed(0)).to(engine.device)
    v.requires_grad_()
    out = attention(q, k, v, dropout_p=0.3, seed=5)
    out.backward(dout)
    torch.testing.assert_close((v * v.grad).sum(), (out * dout).sum(), rtol=0, atol=1e-3)
