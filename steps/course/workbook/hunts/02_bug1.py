# 02.bug1: a warp writes to a slot that another warp may still be reading. It shows only if the writing warp runs first.
import torch

from reference import attention
from steps.step02_fa2_cuda import emulator

CAUSE = "d"


def test(forward):
    """The same call with the threads run in several orders. A kernel with all its barriers gives the same each time."""
    q, k, v = torch.randn(3, 1, 2, 40, 16, generator=torch.Generator().manual_seed(0))
    want, want_lse = attention.forward(q, k, v)
    for order in emulator.ORDERS:
        with emulator.schedule(threads=order):
            out, lse = forward(q, k, v)
        torch.testing.assert_close(out.double(), want, rtol=0, atol=1e-5)
        torch.testing.assert_close(lse.double(), want_lse, rtol=0, atol=1e-5)
