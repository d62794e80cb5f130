# SPDX-License-Identifier: MIT
"""The two passes of a planned call, for tensors with any number of dimensions, and autograd around them.

In both no autocast changes the dtype, neither of the ring nor inside the block, and a block that raises on one rank
ends the call on all (Comm.together). Needs ring.py, ranks/agree.py and steps/contract.py.
"""

import torch

from steps import contract

from . import ring
from .ranks.agree import agree_again


def forward(plan, q, k, v):
    """(out, lse, kv); kv is what a backward begins with, see ring.py."""
    with plan.mine.comm.together(), torch.no_grad(), contract.no_autocast(q):
        out, lse, kv = ring.forward(*map(contract.as_4d, (q, k, v)), **plan.how)
    return out.reshape(q.shape), lse.reshape(q.shape[:-1]), kv


def backward(plan, dout, q, k, v, out, lse):
    """(dq, dk, dv). It first fetches the kv with which the forward ended: one hop more than under autograd."""
    with plan.mine.comm.together(), torch.no_grad(), contract.no_autocast(q):
        kv = plan.how["transport"].fetch_next(*map(contract.as_4d, (k, v)))
        return _backward(plan, dout, q, k, v, kv, out, lse)


def _backward(plan, dout, q, k, v, kv, out, lse):
    """(dq, dk, dv). k and v may be None if the transport needs only kv; dk and dv then have four dimensions."""
    lse = contract.as_4d(lse.unsqueeze(-1)).squeeze(-1)
    dout, q_4d, out = map(contract.as_4d, (dout, q, out))
    own = None if k is None else tuple(map(contract.as_4d, (k, v)))
    dq, dk, dv = ring.backward(dout, q_4d, kv, out, lse, own=own, **plan.how)
    if k is not None:
        dk, dv = dk.reshape(k.shape), dv.reshape(v.shape)
    return dq.reshape(q.shape), dk, dv


class Attention(torch.autograd.Function):
    """out, differentiable once. It saves the next rank's k and v, so that the backward needs a hop less."""

    @staticmethod
    def forward(ctx, q, k, v, plan):
        out, lse, kv = forward(plan, q, k, v)
        out = contract.apart(out)
        own = (k, v) if plan.how["transport"].keeps_own else (None, None)
        ctx.save_for_backward(q, *own, kv, out, lse)
        ctx.plan, ctx.shape = plan, k.shape
        return out

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, dout):
        comm = ctx.plan.mine.comm
        agree_again(comm)
        with comm.together(), torch.no_grad(), contract.no_autocast(dout):
            dq, dk, dv = _backward(ctx.plan, dout, *ctx.saved_tensors)
        return dq, dk.reshape(ctx.shape), dv.reshape(ctx.shape), None
