# SPDX-License-Identifier: MIT
"""The stage's public functions: the contract's checks, the agreement of the ranks, and autograd around the ring."""

import torch

from steps import contract, engine

from . import ring
from .comm import Comm
from .layout import LAYOUTS, Layout

SUPPORTS = {
    "stage": "step04_ring",
    "devices": (engine.device,),
    "dtypes": (torch.float32, torch.float16, torch.bfloat16),
    "head_dims": range(1, 257),  # head_dims and tiles are those of the default block, stage 03
    "tiles": ((16, 16), (16, 32), (32, 16)),
    "rungs": ("ring",),
    "own_backward": ("ring",),
    "layouts": LAYOUTS,
    "gqa": True,
    "nq_ne_nk": False,
    "deterministic": True,
    "order": "fa2",
    "title": "Ring attention with torch.distributed",
    "notebooks": ("04_ring",),
    "minutes": 60,  # to read
    "hardware": "any; 2 or more GPUs for its speed",
}


def forward(
    q, k, v, *, causal=False, scale=None, tile=None, rung=None, layout="zigzag", group=None, block=None, S=None
):
    """Self-attention over a sequence divided among the ranks of a process group: (out, lse) of this rank's positions.

    q, out (B, H, n, D), k and v (B, Hk, n, D): this rank's shard, n = Layout(layout, S, ranks).size(rank) of S
    positions; fewer leading dimensions are accepted. lse (B, H, n) float32.
    causal: over the whole sequence. scale: 1/sqrt(D) by default. layout: "zigzag", "contiguous" or "striped".
    group: a process group; by default the world, or this process alone.
    block: an object with forward and backward of one block, by default steps.step03_triton; tile (Br, Bc) is passed
    to it.
    S: the length of the whole sequence. Without S the ranks compare their arguments at every call, which also adds up
    S. With S they compare only the first time that they see these shapes and options.
    Collective: every rank of the group must call. Raises TypeError, ValueError or NotImplementedError before anything
    is computed, RingError when a neighbour fails.
    """
    out, lse, _ = _forward(q, k, v, _plan(q, k, v, causal, scale, tile, rung, layout, group, block, S))
    return out, lse


def backward(
    dout, q, k, v, out, lse, *,
    causal=False, scale=None, tile=None, rung=None, layout="zigzag", group=None, block=None, S=None
):
    """Gradients (dq, dk, dv) of this rank's positions, from dout, and from out and lse as `forward` gave them.

    It makes one hop more than the backward of `attention`, which has kept the k and v that the forward ended with.
    """
    plan = _plan(q, k, v, causal, scale, tile, rung, layout, group, block, S, (dout, out, lse))
    with torch.no_grad():
        kv = ring.fetch_next(*map(contract.as_4d, (k, v)), layout=plan["layout"], comm=plan["comm"])
    return _backward(dout, q, kv, out, lse, k.shape, plan)


def attention(
    q, k, v, *, causal=False, scale=None, tile=None, rung=None, layout="zigzag", group=None, block=None, S=None
):
    """out of `forward`, differentiable once. It keeps the next rank's k and v, which saves the backward a hop."""
    return _Attention.apply(q, k, v, _plan(q, k, v, causal, scale, tile, rung, layout, group, block, S))


class _Attention(torch.autograd.Function):
    @staticmethod
    def forward(ctx, q, k, v, plan):
        out, lse, kv = _forward(q, k, v, plan)
        ctx.save_for_backward(q, kv, out, lse)
        ctx.plan, ctx.shape = plan, k.shape
        return out

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, dout):
        return *_backward(dout, *ctx.saved_tensors, ctx.shape, ctx.plan), None


def _forward(q, k, v, plan):
    with torch.no_grad():
        out, lse, kv = ring.forward(*map(contract.as_4d, (q, k, v)), **plan)
    return out.reshape(q.shape), lse.reshape(q.shape[:-1]), kv


def _backward(dout, q, kv, out, lse, k_shape, plan):
    with torch.no_grad():
        lse = contract.as_4d(lse.unsqueeze(-1)).squeeze(-1)
        dout, q_4d, out = map(contract.as_4d, (dout, q, out))
        dq, dk, dv = ring.backward(dout, q_4d, kv, out, lse, **plan)
    return dq.reshape(q.shape), dk.reshape(k_shape), dv.reshape(k_shape)


def _plan(q, k, v, causal, scale, tile, rung, layout, group, block, S, saved=()):
    """The keyword arguments of the two loops in ring.py.

    Checks this rank's arguments first, and then that the arguments of all ranks fit together.
    """
    comm, problem, call, size = Comm(group), None, {}, None
    try:
        contract.pick_kernel({"ring": (forward, backward)}, SUPPORTS, rung, 0, q)
        checked_tile = tile if block is None else None  # a block that the caller passes checks its own tiles
        scale, _ = contract.check_call(SUPPORTS, forward, (("q", q), ("k", k), ("v", v)), causal, scale, checked_tile)
        if saved:
            contract.check_saved(q, *saved)
        Layout(layout, 0, 1)
        if not (S is None or isinstance(S, int) and S >= 0):
            raise ValueError(f"S must be the length of the whole sequence, an integer >= 0, or None; got {S!r}.")
        size = q.shape[-2]
        call = {f"shape of {name}": (*x.shape[:-2], "n", x.shape[-1]) for name, x in (("q", q), ("k", k))}
        call |= {"dtype": str(q.dtype), "causal": causal, "scale": scale, "layout": layout, "S": S}
        call |= {"function": "backward" if saved else "forward"}
    except (TypeError, ValueError, NotImplementedError) as error:
        problem = error
    sizes = comm.agree(call, size, always=S is None, problem=problem)
    whole = Layout(layout, sum(sizes) if S is None else S, comm.size, causal)
    expected = [whole.size(rank) for rank in range(comm.size)]
    if expected != (sizes or expected) or expected[comm.rank] != size:
        raise ValueError(
            f"the {layout} shards of S = {whole.S} on {comm.size} ranks have {expected} positions; "
            f"got {sizes or size}. Cut them with Layout({layout!r}, {whole.S}, {comm.size}).shard(x, rank)."
        )
    if block is None:
        from steps import step03_triton as block  # imported here, so that importing this stage needs no Triton
    return {"layout": whole, "comm": comm, "block": block, "scale": scale} | ({} if tile is None else {"tile": tile})
