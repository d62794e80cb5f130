# 00.bug1: every slice but the last sees later keys. Only a sequence that is longer than one slice shows this.
import torch

from reference import attention

CAUSE = "b"


def test(forward):
    """A causal call with so many queries that they are cut into several slices."""
    q, k, v = torch.randn(3, 1, 1, 300, 8, generator=torch.Generator().manual_seed(0))
    out, lse = forward(q, k, v, causal=True)
    want, want_lse = attention.forward(q, k, v, causal=True)
    torch.testing.assert_close(out.double(), want, rtol=0, atol=1e-5)
    torch.testing.assert_close(lse.double(), want_lse, rtol=0, atol=1e-5)
