# SPDX-License-Identifier: MIT
"""The stage's public functions. A call is checked, agreed on by all ranks, planned, and then computed:

    check        what this rank can find alone: wrong arguments, or its part of the work
    agree        the ranks compare their calls (ranks/agree.py)
    make         which block computes, and how K and V travel (plan.py)
    the passes   ring.py's loops, and autograd around them (autograd.py)

The plan depends only on shapes and options, and is cached: at 8k tokens a forward takes two H200 about half a
millisecond, and the host may not take longer.
"""

import atexit
import functools
from dataclasses import dataclass

import torch
import torch.distributed as dist

from steps import checks, engine
from steps.cached import Cache, key_of

from . import autograd
from .layout import LAYOUTS, Layout
from .plan import Mine, make
from .ranks.agree import agree
from .ranks.comm import comm_of

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
    "minutes": 100,  # to read
}


def uncompiled(function):
    """The function, excluded from torch.compile, which would trace the exchanges among the ranks."""

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
    S: the length of the whole sequence. Without S the ranks exchange their arguments at every call, to compare them
    and to add up S. With S the host waits for this only at the first call with these shapes and options; see agree.py.
    transport: "relay", from neighbour to neighbour; or "fetch", out of the owner's memory (see relay.py and fetch.py).
    The default is fetch where every rank has a GPU of its own on one host.
    In a CUDA graph: give S, call once to warm up, and then capture the call with
    `torch.cuda.graph(g, capture_error_mode="thread_local")`, because a thread that watches the ranks queries events.
    lacking: options of other stages, such as window; each raises NotImplementedError that names who has it.
    Collective: every rank of the group must call. Raises TypeError, ValueError or NotImplementedError before anything
    is computed, RingError when a neighbour fails.
    A block may raise on one rank, for lack of memory say. This rank then still sends what the others wait for, and
    raises the block's exception. Over gloo the others raise RingError, which names the rank and quotes the exception.
    Over NCCL, where no host waits for another, they print that line: their out is right, and their gradients are NaN
    where the rank's part is missing. In both cases the next call is right if all ranks make it.
    """
    if lacking:
        checks.refuse("step04_ring", "forward", lacking)
    call = Call(causal, scale, tile, rung, layout, group, block, S, transport)
    out, lse, _ = autograd.forward(plan_of(call, q, k, v), q, k, v)
    return out, lse


@uncompiled
def backward(
    dout, q, k, v, out, lse, *,
    causal=False, scale=None, tile=None, rung=None, layout="zigzag", group=None, block=None, S=None, transport=None,
    deterministic=False, **lacking
):  # fmt: skip
    """Gradients (dq, dk, dv) of this rank's positions, from dout, and from out and lse as `forward` gave them.

    It makes one hop more than the backward of `attention`, which saves the k and v with which the forward ended.
    deterministic: whether they have to be bit-equal from run to run, as they always are if the block's are.
    """
    if lacking:
        checks.refuse("step04_ring", "backward", lacking)
    call = Call(causal, scale, tile, rung, layout, group, block, S, transport, deterministic)
    plan = plan_of(call, q, k, v, (dout, out, lse))
    return autograd.backward(plan, dout, q, k, v, out, lse)


@uncompiled
def attention(
    q, k, v, *,
    causal=False, scale=None, tile=None, rung=None, layout="zigzag", group=None, block=None, S=None, transport=None,
    deterministic=False, **lacking
):  # fmt: skip
    """out of `forward`, differentiable once. It saves the next rank's k and v, so that the backward needs a hop less.

    Autocast does not change the dtype, neither of the ring nor inside the block.

    deterministic: as for `backward`.
    """
    if lacking:
        checks.refuse("step04_ring", "attention", lacking)
    checks.check_derivatives(q, k, v)
    call = Call(causal, scale, tile, rung, layout, group, block, S, transport, deterministic)
    return autograd.Attention.apply(q, k, v, plan_of(call, q, k, v))


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
        """The key of the plan for this call and these tensors; None if one of them is no tensor, for example."""
        key = key_of(tensors, vars(self) | {"group": None, "block": None})
        return key and (*key, self.among, id(self.block))


_cached = Cache()  # {the key of a call that gives S: its Plan}
# A process group's threads need Python when it is deleted, so that Python must not end with a group that is cached.
atexit.register(_cached.clear)


def plan_of(call, q, k, v, saved=()):
    """The Plan of a call. One that gives S is checked and planned once; the ranks agree at every call."""
    key = call.key(q, k, v, *saved)
    known = _cached.get(key)
    mine = known.mine if known else check(call, q, k, v, saved)
    sizes = agree(mine.comm, mine.alike, mine.size, call.S is None, mine.problem) if mine.comm.size > 1 else [mine.size]
    plan = known or make(call, mine, sizes, q)
    if not known and call.S is not None:
        _cached.add(key, plan)
    return plan


def check(call, q, k, v, saved):
    """What this rank can find alone: its part of the work, or a problem, which is raised once all ranks know it."""
    comm, layout, work = comm_of(call.group), None, None
    try:
        checks.check_flag("deterministic", call.deterministic)
        checks.pick({"ring": (forward, backward)}, SUPPORTS, call.rung, 0, q)
        tile = call.tile if call.block is None else None  # a block that the caller passes checks its own tiles
        scale, _ = checks.check_call(SUPPORTS, forward, (("q", q), ("k", k), ("v", v)), call.causal, call.scale, tile)
        if saved:
            checks.check_saved(q, *saved)
        checks.check_shared(SUPPORTS, call.S, call.transport)
        if call.layout not in LAYOUTS:
            Layout(call.layout, 0, 1)  # raises, and says which there are
        if call.S is not None:
            layout = Layout(call.layout, call.S, comm.size, call.causal)
            work = layout.share(comm.rank, q.shape[-2])
    except (TypeError, ValueError, NotImplementedError) as problem:
        if comm.size == 1:
            raise
        return Mine(comm, problem)
    alike = {
        "function": "backward" if saved else "forward",
        "shape of q": (*q.shape[:-2], "n", q.shape[-1]),  # n may differ from rank to rank
        "shape of k": (*k.shape[:-2], "n", k.shape[-1]),
        "dtype": str(q.dtype),
        "causal": call.causal, "scale": scale, "layout": call.layout, "S": call.S, "transport": call.transport,
    }  # fmt: skip
    return Mine(comm, None, q.shape[-2], alike, scale, layout, work)
