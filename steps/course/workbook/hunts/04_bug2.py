# 04.bug2: where neither part has a key for a query, the weight is exp(-inf - (-inf)), and NaN never goes away.
import torch

from reference import attention

CAUSE = "c"


def test(forward):
    """Causal, and so many ranks that the first queries see no key in the first two parts that are merged."""
    q, k, v = torch.randn(3, 1, 2, 12, 8, generator=torch.Generator().manual_seed(0))
    out, lse = forward(q, k, v, causal=True, ranks=4)
    want, want_lse = attention.forward(q, k, v, causal=True)
    torch.testing.assert_close(out.double(), want, rtol=0, atol=1e-5)
    torch.testing.assert_close(lse.double(), want_lse, rtol=0, atol=1e-5)
