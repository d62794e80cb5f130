# SPDX-License-Identifier: MIT
"""The stage's public functions: the contract's checks, the agreement of the ranks, and autograd around the ring.

What depends only on shapes and options is decided once and kept: at 8k tokens a forward takes two H200 about half a
millisecond, and the host must not think for longer.
"""

import atexit
from dataclasses import dataclass

import torch
import torch.distributed as dist

from steps import checks, contract, engine

from . import ring, side, watch
from .agree import agree, agree_again
from .block import default_block
from .comm import Comm
from .fetch import Fetch
from .layout import LAYOUTS, Layout
from .relay import Relay

SUPPORTS = {
    "stage": "step04_ring",
    "devices": (engine.device,),
    "dtypes": (torch.float32, torch.float16, torch.bfloat16),
    "head_dims": range(1, 257),  # head_dims and tiles are those of the default block, stage 03
    "tiles": ((16, 16), (16, 32), (32, 16)),
    "rungs": ("ring",),
    "own_backward": ("ring",),
    "layouts": LAYOUTS,
    "transports": ("relay", "fetch"),
    "gqa": True,
    "nq_ne_nk": False,
    "deterministic": True,
    "order": "fa2",
    "title": "Ring attention with torch.distributed",
    "notebooks": ("04a_ring", "04b_strategies"),
    "minutes": 105,  # to read
    "hardware": "any; 2 or more GPUs for its speed",
}


def forward(
    q, k, v, *,
    causal=False, scale=None, tile=None, rung=None, layout="zigzag", group=None, block=None, S=None, transport=None,
    **lacking
):  # fmt: skip
    """Self-attention over a sequence divided among the ranks of a process group: (out, lse) of this rank's positions.

    q, out (B, H, n, D), k and v (B, Hk, n, D): this rank's shard, n = Layout(layout, S, ranks).size(rank) of S
    positions; fewer leading dimensions are accepted. lse (B, H, n) float32.
    causal: over the whole sequence. scale: 1/sqrt(D) by default. layout: "zigzag", "contiguous" or "striped".
    group: a process group; by default the world, or this process alone.
    block: an object with forward and backward of one block, as ring.py describes it. The default is stage 02's rung
    hopper on an H100 or H200 in bfloat16 and float16, otherwise steps.step03_triton; tile (Br, Bc) is passed to it.
    S: the length of the whole sequence. Without S the ranks compare their arguments at every call, which also adds up
    S. With S the host waits for that only the first time that it sees these shapes and options; see agree.py.
    transport: "relay", from neighbour to neighbour; or "fetch", out of the owner's memory (see relay.py and fetch.py).
    The default is fetch where every rank has a GPU of its own on one host.
    In a CUDA graph: give S, call once to warm up, and then capture the call with
    `torch.cuda.graph(g, capture_error_mode="thread_local")`, because a thread that watches the ranks queries events.
    lacking: options of other stages, such as window; each raises NotImplementedError that names who has it.
    Collective: every rank of the group must call. Raises TypeError, ValueError or NotImplementedError before anything
    is computed, RingError when a neighbour fails.
    A block may raise on one rank, for want of memory say. This rank then still passes on what the others wait for, and
    raises the block's exception. Over gloo the others raise RingError, which names the rank and quotes the exception.
    Over NCCL, where no host waits for another, they print that line: their out is right, and their gradients are NaN
    where the rank's part is missing. In both cases the next call is right if all ranks make it.
    """
    if lacking:
        checks.refuse("step04_ring", "forward", lacking)
    out, lse, _ = _forward(q, k, v, _plan(q, k, v, causal, scale, tile, rung, layout, group, block, S, transport))
    return out, lse


def backward(
    dout, q, k, v, out, lse, *,
    causal=False, scale=None, tile=None, rung=None, layout="zigzag", group=None, block=None, S=None, transport=None,
    deterministic=False, **lacking
):  # fmt: skip
    """Gradients (dq, dk, dv) of this rank's positions, from dout, and from out and lse as `forward` gave them.

    It makes one hop more than the backward of `attention`, which has kept the k and v that the forward ended with.
    deterministic: whether they have to be bit-equal from run to run, as they always are if the block's are.
    """
    if lacking:
        checks.refuse("step04_ring", "backward", lacking)
    saved = dout, out, lse
    plan = _plan(q, k, v, causal, scale, tile, rung, layout, group, block, S, transport, deterministic, saved)
    with plan["comm"].together(), torch.no_grad():
        kv = plan["transport"].fetch_next(*map(contract.as_4d, (k, v)))
        return _backward(dout, q, k, v, kv, out, lse, plan)


def attention(
    q, k, v, *,
    causal=False, scale=None, tile=None, rung=None, layout="zigzag", group=None, block=None, S=None, transport=None,
    deterministic=False, **lacking
):  # fmt: skip
    """out of `forward`, differentiable once. It keeps the next rank's k and v, which saves the backward a hop.

    deterministic: as for `backward`.
    """
    if lacking:
        checks.refuse("step04_ring", "attention", lacking)
    plan = _plan(q, k, v, causal, scale, tile, rung, layout, group, block, S, transport, deterministic)
    return _Attention.apply(q, k, v, plan)


class _Attention(torch.autograd.Function):
    @staticmethod
    def forward(ctx, q, k, v, plan):
        out, lse, kv = _forward(q, k, v, plan)
        own = (k, v) if plan["transport"].keeps_own else (None, None)
        ctx.save_for_backward(q, *own, kv, out, lse)
        ctx.plan, ctx.shape = plan, k.shape
        return out

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, dout):
        agree_again(ctx.plan["comm"], watch.BACKWARD)
        with ctx.plan["comm"].together(), torch.no_grad():
            dq, dk, dv = _backward(dout, *ctx.saved_tensors, ctx.plan)
        return dq, dk.reshape(ctx.shape), dv.reshape(ctx.shape), None


def _forward(q, k, v, plan):
    with plan["comm"].together(), torch.no_grad():
        out, lse, kv = ring.forward(*map(contract.as_4d, (q, k, v)), **plan)
    return out.reshape(q.shape), lse.reshape(q.shape[:-1]), kv


def _backward(dout, q, k, v, kv, out, lse, plan):
    """(dq, dk, dv); k and v may be None where the transport keeps only kv, and dk and dv then have four dimensions."""
    lse = contract.as_4d(lse.unsqueeze(-1)).squeeze(-1)
    dout, q_4d, out = map(contract.as_4d, (dout, q, out))
    own = None if k is None else tuple(map(contract.as_4d, (k, v)))
    dq, dk, dv = ring.backward(dout, q_4d, kv, out, lse, own=own, **plan)
    if k is not None:
        dk, dv = dk.reshape(k.shape), dv.reshape(v.shape)
    return dq.reshape(q.shape), dk, dv


@dataclass(frozen=True)
class _Checked:
    """A call whose arguments this rank has found right. call: what all ranks must have alike; plan: of `_plan`."""

    comm: Comm
    call: dict
    scale: float
    plan: dict  # filled once the ranks have agreed


_kept = {}  # {all that a call depends on: its _Checked}
# A process group's threads need Python when it is deleted, so that Python must not end with a group that is kept here.
atexit.register(_kept.clear)


def _plan(q, k, v, causal, scale, tile, rung, layout, group, block, S, transport, deterministic=False, saved=()):
    """The keyword arguments of the two loops in ring.py.

    Checks this rank's arguments first, and then that the arguments of all ranks fit together.
    """
    key, problem = None, None
    try:
        options = tuple((type(x), x) for x in (causal, scale, tile, rung, layout, S, transport, deterministic))
        group = dist.group.WORLD if group is None and dist.is_available() and dist.is_initialized() else group
        tensors = tuple((type(x), x.dtype, x.device, x.layout, x.shape) for x in (q, k, v, *saved))
        key = options, group, id(block), tensors
        checked = _kept.get(key)
    except (TypeError, AttributeError, RuntimeError):  # One of them is not what it should be, which _check will say.
        checked = None
    if checked is None:
        comm, call, checked_scale = Comm(group), {}, None
        try:
            checks.check_flag("deterministic", deterministic)
            call, checked_scale = _check(q, k, v, causal, scale, tile, rung, layout, block, S, transport, saved)
            if S is not None:  # Here the rank can tell by itself; it raises after the others have heard of it.
                check_length(comm, Layout(layout, S, comm.size), q.shape[-2])
        except (TypeError, ValueError, NotImplementedError) as error:
            problem = error
        checked = _Checked(comm, call, checked_scale, {})
    size = q.shape[-2] if problem is None else None
    sizes = agree(checked.comm, checked.call, size, always=S is None, problem=problem)
    if S is None or not checked.plan:
        plan = _agreed_plan(checked, sizes, size, q, causal, tile, layout, block, S, transport)
        if key is None or S is None:
            return plan
        if len(_kept) >= 1000:
            _kept.clear()
        checked.plan.update(plan)
        _kept[key] = checked
    return checked.plan


def _check(q, k, v, causal, scale, tile, rung, layout, block, S, transport, saved):
    """(what all ranks must have alike, the scale); raises for what this rank finds wrong by itself."""
    checks.pick({"ring": (forward, backward)}, SUPPORTS, rung, 0, q)
    checked_tile = tile if block is None else None  # a block that the caller passes checks its own tiles
    scale, _ = checks.check_call(SUPPORTS, forward, (("q", q), ("k", k), ("v", v)), causal, scale, checked_tile)
    if saved:
        checks.check_saved(q, *saved)
    Layout(layout, 0, 1)
    if not (S is None or isinstance(S, int) and S >= 0):
        raise ValueError(f"S must be the length of the whole sequence, an integer >= 0, or None; got {S!r}.")
    if transport not in (None, *SUPPORTS["transports"]):
        names = ", ".join(map(repr, SUPPORTS["transports"]))
        raise ValueError(f"transport must be {names}, or None for the faster one that can be used; got {transport!r}.")
    call = {"function": "backward" if saved else "forward"}
    call |= {f"shape of {name}": (*x.shape[:-2], "n", x.shape[-1]) for name, x in (("q", q), ("k", k))}
    call |= {"dtype": str(q.dtype), "causal": causal, "scale": scale, "layout": layout, "S": S}
    return call | {"transport": transport}, scale


def check_length(comm, whole, size, sizes=None):
    """Raises if this rank's length, or the lengths of all ranks where they are known, do not fit the layout."""
    expected = [whole.size(rank) for rank in range(comm.size)]
    if expected != (sizes or expected) or expected[comm.rank] != size:
        raise ValueError(
            f"the {whole.kind} shards of S = {whole.S} on {comm.size} ranks have {expected} positions; "
            f"got {sizes or size}. Cut them with Layout({whole.kind!r}, {whole.S}, {comm.size}).shard(x, rank)."
        )


def _agreed_plan(checked, sizes, size, q, causal, tile, layout, block, S, transport):
    """The plan of a call that all ranks make. sizes: each rank's length, or None if they have agreed on it before."""
    comm = checked.comm
    whole = Layout(layout, sum(sizes) if S is None else S, comm.size, causal)
    check_length(comm, whole, size, sizes)
    beside = side.side_of(comm, q.device, transport)
    transport = Relay(whole, comm) if beside is None else Fetch(whole, comm, beside)
    if block is None:
        block = default_block(q, tile=tile, alone=comm.size == 1)
    plan = {"layout": whole, "comm": comm, "block": block, "transport": transport, "scale": checked.scale}
    return plan if tile is None else plan | {"tile": tile}
