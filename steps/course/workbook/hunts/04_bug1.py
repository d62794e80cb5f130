# 04.bug1: a rank without work keeps the sums of the ranks before it, and everybody waits for them.
import torch

from reference import attention

CAUSE = "b"


def test(gradients):
    """Fewer positions than chunks: some rank has no late chunk, and so no query that sees a later rank's keys."""
    q, k, v, dout = torch.randn(4, 1, 2, 6, 8, generator=torch.Generator().manual_seed(0))
    dk, dv = gradients(q, k, v, dout, causal=True)
    _, want_dk, want_dv = attention.backward(dout, q, k, v, causal=True)
    torch.testing.assert_close(dk.double(), want_dk, rtol=0, atol=1e-5)
    torch.testing.assert_close(dv.double(), want_dv, rtol=0, atol=1e-5)
