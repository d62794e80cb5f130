# SPDX-License-Identifier: MIT
"""The functions to call: each checks its arguments, finds or makes the plan for them, and runs it.

    forward, backward                            what a rung computes
    start_gradients, add_gradients, finish_dq    the parts of a backward, for gradients summed over several calls

The tensors' device decides where a kernel runs. On a GPU nvrtc.py compiles and launches it; on a CPU g++ compiles the
same file behind emulator/. From here a call goes to plan.py, and if no plan is cached for it, to launches.py first.

Needs torch, and beside it the rung's .cu files, cached.py, ladder.py, launches.py, tile_scheduler.py, plan.py,
nvrtc.py, cache.py, wgmma.py and ptx.cuh; on a GPU cuda.core and NVRTC, on a CPU emulator/ and g++.
"""

import functools
import math
import re
from functools import partial

import torch

from . import ladder, launches
from .cached import Cache, check_no_gradient, key_of
from .plan import Plan, Sums, attend, differentiate, differentiate_keys

plans = Cache()  # {key_of a call: its Plan}


def forward(q, k, v, *, rung="fa2", causal=False, scale=None, tile=None, **switches):
    """(out, lse) by one rung: out like q, contiguous; lse (B, H, Nq) float32, the log-sum-exp of the scaled scores.

    q (B, H, Nq, D), k and v (B, Hk, Nk, D) are on one device, in a dtype and head_dim of the rung's row; H is a
    multiple of Hk. scale: 1/sqrt(D) by default. tile: (Br, Bc) instead of the row's. switches: macros at the head of
    fwd_8_hopper.cu, such as PINGPONG=0, to measure what an idea brings; for the same reason rung may be a row of the
    ladder. Raises TypeError, ValueError or RuntimeError before anything is launched.
    """
    check_no_gradient(q, k, v)
    options = {"rung": rung, "causal": causal, "scale": scale, "tile": tile, **switches}
    key = key_of((q, k, v), options)
    plan = plans.get(key)
    if plan is None:
        check_options(rung, tile)
        check(ladder.forward_row(rung), q=q, k=k, v=v)
        check_switches(ladder.forward_row(rung).file, switches)
        if q.numel() == 0 or k.numel() == 0:
            return attention_to_nothing(q)
        plan = plans.add(key, plan_forward(q, k, v, **options))
    return attend(plan, q, k, v)


def plan_forward(q, k, v, *, rung, causal, scale, tile=None, **switches):
    """The Plan for tensors of this layout."""
    problem = launches.problem_of(ladder.forward_row(rung), q, k, causal, scale, tile, switches=switches.items())
    return Plan(*launches.prepared(problem, launches.forward_launches, q=q, k=k, v=v))


def functions(rung):
    """(forward, backward) of a rung, each with its function `first`, by which the contract makes and caches a plan."""
    forwards, backwards = partial(forward, rung=rung), partial(backward, rung=rung)
    forwards.first, backwards.first = partial(first_forward, rung=rung), partial(first_backward, rung=rung)
    return forwards, backwards


def first_forward(q, k, v, **options):
    """(what `forward` returns, a function that does the same for other tensors of this layout), after all checks."""
    plan = plan_forward(q, k, v, **options)
    return attend(plan, q, k, v), partial(attend, plan)


def backward(
    dout, q, k, v, out, lse, *, rung="fa2", causal=False, scale=None, tile=None, backward_tile=None, deterministic=False
):
    """(dq, dk, dv), contiguous, like q, k, v, by the first of the rung's backwards that takes this dtype and head_dim.

    dout and out are like q (B, H, Nq, D), and lse (B, H, Nq) is float32, as `forward` returned it; q, k, v, causal and
    scale are as for `forward`. tile: the forward's; a row with `tile_of_forward` uses it. backward_tile: (Br, Bc)
    instead of the backward row's. deterministic: dq, too, is bit-equal from run to run.
    """
    check_no_gradient(dout, q, k, v, out, lse)
    options = {"rung": rung, "causal": causal, "scale": scale, "tile": tile, "backward_tile": backward_tile}
    options["deterministic"] = deterministic
    key = key_of((dout, q, k, v, out, lse), options)
    plan = plans.get(key)
    if plan is None:
        check_options(rung, tile)
        check_tile("backward_tile", backward_tile)
        check(ladder.forward_row(rung), dout=dout, q=q, k=k, v=v, out=out, lse=lse)
        if q.numel() == 0 or k.numel() == 0:
            return zeros_like(q), zeros_like(k), zeros_like(v)
        plan = plans.add(key, plan_backward(dout, q, k, v, out, lse, **options))
    return differentiate(plan, dout, q, k, v, out, lse)


def plan_backward(
    dout, q, k, v, out, lse, *, rung, causal, scale, tile=None, backward_tile=None, deterministic=False
):  # fmt: skip
    """The Plan for tensors of this layout."""
    row = ladder.backward_row(rung, q.dtype, q.shape[3], deterministic)
    if row.tile_of_forward and backward_tile is None:
        backward_tile = tile
    problem = launches.problem_of(row, q, k, causal, scale, backward_tile, deterministic=deterministic)
    return Plan(*launches.prepared(problem, launches.backward_launches, dout=dout, q=q, k=k, v=v, out=out, lse=lse))


def first_backward(*tensors, **options):
    """(what `backward` returns, a function that does the same for other tensors of this layout), after all checks."""
    plan = plan_backward(*tensors, **options)
    return differentiate(plan, *tensors), partial(differentiate, plan)


# ---- what is checked -------------------------------------------------------------------------------------------------


def check(row, **inputs):
    """Raises an error that names the argument unless the row's kernel takes these tensors, {name: tensor}."""
    for x in inputs.values():
        dense = isinstance(x, torch.Tensor) and not x.is_nested and x.layout is torch.strided
        if not dense or x.data_ptr() == 0 and x.numel() > 0 and x.device.type != "meta":
            raise not_readable(inputs.values())
    for name, x in inputs.items():
        rank = 3 if name == "lse" else 4
        if x.ndim != rank:
            raise ValueError(f"{name} must be {'(B, H, N, D)' if rank == 4 else '(B, H, N)'}; got {tuple(x.shape)}.")
    like = "q" if "q" in inputs else "out"
    q = inputs[like]
    keys = (q.shape[0], *inputs["k"].shape[1:3], q.shape[3]) if "k" in inputs else None
    for name, x in inputs.items():
        shape = {"k": keys, "v": keys, "lse": q.shape[:3]}.get(name, q.shape)
        dtype = torch.float32 if name == "lse" else q.dtype
        if x.dtype != dtype or x.device != q.device:
            raise TypeError(f"{name} must be {dtype} on {q.device}, to match {like}; got {x.dtype} on {x.device}.")
        if x.shape != shape:
            raise ValueError(f"{name} must have shape {tuple(shape)} to match the others; got {tuple(x.shape)}.")
    if keys and (keys[1] == 0 or q.shape[1] % keys[1]):
        raise ValueError(f"q's heads must be a multiple of k's heads; got {q.shape[1]} and {keys[1]}.")
    row.check(q.dtype, q.shape[3], q.device)


def check_options(rung, tile=None):
    """Raises TypeError or ValueError for options by which a kernel would read what is not there."""
    if not isinstance(rung, (str, ladder.Kernel)):
        raise TypeError(f"rung must be a word such as 'fa2', or a row of the ladder; got {rung!r}.")
    check_tile("tile", tile)


def check_tile(name, tile):
    """Raises TypeError or ValueError unless tile is None or a tuple of two sizes."""
    if tile is None:
        return
    if not isinstance(tile, tuple) or [type(size) for size in tile] != [int, int]:
        raise TypeError(f"{name} must be a pair of integers, as a tuple (Br, Bc), or None; got {tile!r}.")
    if min(tile) < 1:
        raise ValueError(f"{name} must have sizes of at least 1; got {tile!r}.")


def not_readable(tensors):
    """The TypeError for inputs of which one is no tensor with memory in which every entry has a place."""
    given = ", ".join(map(kind, tensors))
    return TypeError(f"every input must be a dense torch.Tensor with memory; got {given}.")


def kind(x):
    """The type of an input, and what it is other than dense."""
    if not isinstance(x, torch.Tensor):
        return type(x).__name__
    layout = "nested" if x.is_nested else str(x.layout).removeprefix("torch.")
    return type(x).__name__ if layout == "strided" else f"{type(x).__name__} ({layout})"


def attention_to_nothing(q):
    """(out, lse) where there is no query or no key: the sum over no key is 0, and its logarithm -inf."""
    lse = torch.full(q.shape[:3], -math.inf, dtype=torch.float32, device=q.device)
    return zeros_like(q), lse


def zeros_like(x):
    return torch.zeros_like(x, memory_format=torch.contiguous_format)


def check_switches(file, switches):
    """TypeError unless each is a number for a macro that the file defines where the launch does not."""
    for name, value in switches.items():
        if name not in switches_of(launches.HERE / file):
            raise TypeError(f"{file} has no switch {name}.")
        if not isinstance(value, int):
            raise TypeError(f"the switch {name} must be an integer; got {value!r}.")


@functools.cache
def switches_of(path):
    return re.findall(r"^#ifndef (\w+)$", path.read_text(), re.M)


# ---- the parts of a backward -----------------------------------------------------------------------------------------


def start_gradients(dout, out, lse, *, rung="fa2", scale=None, deterministic=False):
    """The Sums of these queries, with dq_sum = 0. Arguments as for `backward`; float32 has no parts."""
    options = {"part": "start", "rung": rung, "scale": scale, "deterministic": deterministic}
    key = key_of((dout, out, lse), options)
    plan = plans.get(key)
    inputs = {"dout": dout, "out": out, "lse": lse}
    if plan is None:
        check_options(rung)
        check(ladder.forward_row(rung), **inputs)
        row = ladder.backward_row(rung, out.dtype, out.shape[3], deterministic)
        if row.adds_to_dq:
            raise NotImplementedError(f"{row.file} has no parts, as it adds to dq itself. Use bfloat16 or float16.")
        problem = launches.problem_of(row, out, out, scale=scale, deterministic=deterministic)
        plan = plans.add(key, Plan(*launches.prepared(problem, launches.delta_launches, **inputs)))
    sums = Sums(plan.problem)
    if dout.numel():
        plan.run(inputs | sums.tensors)
    return sums


def add_gradients(sums, dout, q, k, v, *, causal=False):
    """(dk, dv) of these queries and keys alone, like k and v; the keys' part of dq is added to sums.dq_sum.

    sums: what `start_gradients` returned for the same queries. Its out and lse must be those over all keys that the
    queries see, not over the keys of this call alone. Other queries, or a slice of these, need Sums of their own.
    """
    start = sums.problem
    key = key_of((dout, q, k, v), {"part": "add", "start": start, "causal": causal})
    plan = plans.get(key)
    inputs = {"dout": dout, "q": q, "k": k, "v": v}
    if plan is None:
        check(start.row, **inputs)
        queries, given = start.queries(), (tuple(q.shape), q.dtype, q.device)
        if given != queries:
            raise ValueError(f"q must be the queries that start_gradients was called for, {queries}; got {given}.")
        if q.numel() == 0 or k.numel() == 0:
            return zeros_like(k), zeros_like(v)
        problem = launches.problem_of(start.row, q, k, causal, start.scale, deterministic=start.deterministic)
        plan = plans.add(key, Plan(*launches.prepared(problem, launches.gradient_launches, **inputs)))
    return differentiate_keys(plan, sums.tensors, inputs)


def finish_dq(sums):
    """dq (B, H, Nq, D) = scale * sums.dq_sum, in the dtype of the queries."""
    problem = sums.problem
    dq = sums.dq_sum.new_empty(problem.B, problem.H, problem.Nq, problem.D, dtype=problem.dtype)
    key = key_of((), {"part": "finish", "problem": problem})
    plan = plans.get(key) or plans.add(key, Plan(*launches.prepared(problem, launches.dq_launches)))
    if dq.numel():
        plan.run(sums.tensors | {"dq": dq})
    return dq
