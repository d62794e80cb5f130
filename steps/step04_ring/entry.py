# SPDX-License-Identifier: MIT
"""The stage's public functions: the contract's checks, the agreement of the ranks, and autograd around the ring.

What depends only on shapes and options is decided once and kept: at 8k tokens a forward takes two H200 about half a
millisecond, and the host must not think for longer.
"""

import atexit
import functools
from dataclasses import dataclass

import torch
import torch.distributed as dist

from steps import checks, contract, engine

from . import ring
from .block import default_block
from .fetch import Fetch
from .layout import LAYOUTS, Layout
from .ranks import side
from .ranks.agree import agree, agree_again
from .ranks.comm import Comm
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
    "minutes": 75,  # to read
}


def uncompiled(function):
    """The function, of which torch.compile makes no graph: it would trace the exchanges among the ranks."""

    @functools.wraps(function)
    def call(*tensors, **options):
        run = torch.compiler.disable(function) if torch.compiler.is_compiling() else function
        return run(*tensors, **options)

    return call


@uncompiled
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
    call = Call(causal, scale, tile, rung, layout, group, block, S, transport)
    out, lse, _ = _forward(q, k, v, _plan(call, q, k, v))
    return out, lse


@uncompiled
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
    call = Call(causal, scale, tile, rung, layout, group, block, S, transport, deterministic)
    plan = _plan(call, q, k, v, (dout, out, lse))
    with plan["comm"].together(), torch.no_grad(), contract.no_autocast(q):
        kv = plan["transport"].fetch_next(*map(contract.as_4d, (k, v)))
        return _backward(dout, q, k, v, kv, out, lse, plan)


@uncompiled
def attention(
    q, k, v, *,
    causal=False, scale=None, tile=None, rung=None, layout="zigzag", group=None, block=None, S=None, transport=None,
    deterministic=False, **lacking
):  # fmt: skip
    """out of `forward`, differentiable once. It keeps the next rank's k and v, which saves the backward a hop.

    Autocast does not change the dtype, neither of the ring nor inside the block.

    deterministic: as for `backward`.
    """
    if lacking:
        checks.refuse("step04_ring", "attention", lacking)
    checks.check_derivatives(q, k, v)
    call = Call(causal, scale, tile, rung, layout, group, block, S, transport, deterministic)
    return _Attention.apply(q, k, v, _plan(call, q, k, v))


class _Attention(torch.autograd.Function):
    @staticmethod
    def forward(ctx, q, k, v, plan):
        out, lse, kv = _forward(q, k, v, plan)
        out = contract.apart(out)
        own = (k, v) if plan["transport"].keeps_own else (None, None)
        ctx.save_for_backward(q, *own, kv, out, lse)
        ctx.plan, ctx.shape = plan, k.shape
        return out

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, dout):
        agree_again(ctx.plan["comm"])
        with ctx.plan["comm"].together(), torch.no_grad(), contract.no_autocast(dout):
            dq, dk, dv = _backward(dout, *ctx.saved_tensors, ctx.plan)
        return dq, dk.reshape(ctx.shape), dv.reshape(ctx.shape), None


def _forward(q, k, v, plan):
    with plan["comm"].together(), torch.no_grad(), contract.no_autocast(q):
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
class Call:
    """The options of a call."""

    causal: bool
    scale: float | None
    tile: tuple | None
    rung: str | None
    layout: str
    group: object
    block: object
    S: int | None
    transport: str | None
    deterministic: bool = False

    @property
    def among(self):
        """The process group, or None for this process alone."""
        given = self.group is not None or not dist.is_available() or not dist.is_initialized()
        return self.group if given else dist.group.WORLD

    def key(self, *tensors):
        """All that the plan of the call with these tensors depends on. An error if one of them is no tensor."""
        options = self.causal, self.scale, self.tile, self.rung, self.layout, self.S, self.transport, self.deterministic
        kinds = tuple((type(x), x.dtype, x.device, x.layout, x.shape) for x in tensors)
        return options, tuple(map(type, options)), self.among, id(self.block), kinds


@dataclass(frozen=True)
class _Checked:
    """A call whose arguments this rank has found right. alike: what all ranks must have alike; plan: of `_plan`."""

    comm: Comm
    alike: dict
    scale: float
    plan: dict  # filled once the ranks have agreed


_kept = {}  # {the key of a call: its _Checked}
# A process group's threads need Python when it is deleted, so that Python must not end with a group that is kept here.
atexit.register(_kept.clear)


def _plan(call, q, k, v, saved=()):
    """The keyword arguments of the two loops in ring.py.

    Checks this rank's arguments first, and then that the arguments of all ranks fit together.
    """
    problem = None
    try:
        key = call.key(q, k, v, *saved)
        checked = _kept.get(key)
    except (TypeError, AttributeError, RuntimeError):  # One of them is not what it should be, which _check will say.
        key = checked = None
    if checked is None:
        comm, alike, scale = Comm(call.among), {}, None
        try:
            alike, scale = _check(call, q, k, v, saved)
            if call.S is not None:  # Here the rank can tell by itself; it raises after the others have heard of it.
                check_length(comm, Layout(call.layout, call.S, comm.size), q.shape[-2])
        except (TypeError, ValueError, NotImplementedError) as error:
            problem = error
        checked = _Checked(comm, alike, scale, {})
    size = q.shape[-2] if problem is None else None
    sizes = agree(checked.comm, checked.alike, size, always=call.S is None, problem=problem)
    if call.S is None or not checked.plan:
        plan = _agreed_plan(call, checked, sizes, q)
        if key is None or call.S is None:
            return plan
        if len(_kept) >= 1000:
            _kept.clear()
        checked.plan.update(plan)
        _kept[key] = checked
    return checked.plan


def _check(call, q, k, v, saved):
    """(what all ranks must have alike, the scale); raises for what this rank finds wrong by itself."""
    checks.check_flag("deterministic", call.deterministic)
    checks.pick({"ring": (forward, backward)}, SUPPORTS, call.rung, 0, q)
    tile = call.tile if call.block is None else None  # a block that the caller passes checks its own tiles
    scale, _ = checks.check_call(SUPPORTS, forward, (("q", q), ("k", k), ("v", v)), call.causal, call.scale, tile)
    if saved:
        checks.check_saved(q, *saved)
    Layout(call.layout, 0, 1)
    S, transport = call.S, call.transport
    if not (S is None or isinstance(S, int) and S >= 0):
        raise ValueError(f"S must be the length of the whole sequence, an integer >= 0, or None; got {S!r}.")
    if transport not in (None, *SUPPORTS["transports"]):
        names = ", ".join(map(repr, SUPPORTS["transports"]))
        raise ValueError(f"transport must be {names}, or None for the faster one that can be used; got {transport!r}.")
    alike = {"function": "backward" if saved else "forward"}
    alike |= {f"shape of {name}": (*x.shape[:-2], "n", x.shape[-1]) for name, x in (("q", q), ("k", k))}
    alike |= {"dtype": str(q.dtype), "causal": call.causal, "scale": scale, "layout": call.layout, "S": S}
    return alike | {"transport": transport}, scale


def check_length(comm, whole, size, sizes=None):
    """Raises if this rank's length, or the lengths of all ranks where they are known, do not fit the layout."""
    expected = [whole.size(rank) for rank in range(comm.size)]
    if expected != (sizes or expected) or expected[comm.rank] != size:
        raise ValueError(
            f"the {whole.kind} shards of S = {whole.S} on {comm.size} ranks have {expected} positions; "
            f"got {sizes or size}. Cut them with Layout({whole.kind!r}, {whole.S}, {comm.size}).shard(x, rank)."
        )


def _agreed_plan(call, checked, sizes, q):
    """The plan of a call that all ranks make. sizes: each rank's length, or None if they have agreed on it before."""
    comm = checked.comm
    whole = Layout(call.layout, sum(sizes) if call.S is None else call.S, comm.size, call.causal)
    check_length(comm, whole, q.shape[-2], sizes)
    beside = side.side_of(comm, q.device, call.transport)
    transport = Relay(whole, comm) if beside is None else Fetch(whole, comm, beside)
    block = call.block
    if block is None:
        block = default_block(q, tile=call.tile, alone=comm.size == 1)
    plan = {"layout": whole, "comm": comm, "block": block, "transport": transport, "scale": checked.scale}
    return plan if call.tile is None else plan | {"tile": call.tile}
