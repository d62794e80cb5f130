# 02.bug1: a warp hands over into a slot that another one is still reading; only an order in which it comes first shows that.
import torch

from reference import attention
from steps.step02_fa2_cuda import emulator


def test(forward):
    """The same call with the threads taking turns in other orders: a kernel whose barriers suffice gives the same each time."""
    q, k, v = torch.randn(3, 1, 2, 40, 16, generator=torch.Generator().manual_seed(0))
    want, want_lse = attention.forward(q, k, v)
    for order in emulator.ORDERS:
        with emulator.schedule(threads=order):
            out, lse = forward(q, k, v)
        torch.testing.assert_close(out.double(), want, rtol=0, atol=1e-5)
        torch.testing.assert_close(lse.double(), want_lse, rtol=0, atol=1e-5)
