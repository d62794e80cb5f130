# SPDX-License-Identifier: MIT
"""The check that all ranks make the same call, at every call and before what was computed can be used.

    gloo            16 bytes of a hash and each rank's length go round before the first hop; the same at the call's end,
                    where a rank reports that its block has raised
    NCCL            a new call: its arguments are compared through the store, while the host waits
                    later, relay: the hash travels beside the first hop, and the device compares it
                    later, fetch: each call has a barrier of its own, so that ranks in different calls never meet

The idea: the size and order of every message follow from the arguments, so that ranks whose arguments differ hang, or
return wrong numbers without an error. The whole call is compared: shapes, dtype, options, and the function, because the
messages of a rank that has left a call out would fit, too. It is not enough to compare a call once: two ranks may be in
two different calls, each of which was compared. But with NCCL no host waits for these later comparisons.
Needs verdict.py.
"""

import functools
import hashlib
import json
import struct
import weakref

import torch
import torch.distributed as dist

from .verdict import BACKWARD, NO_BACKWARD

_known = weakref.WeakKeyDictionary()  # process group -> {signature: number} of the calls compared through the store


def agree(comm, call, size, always=False, problem=None):
    """Begins `call`, a dict, and compares it with every other rank's; returns each rank's `size`.

    Collective. If the calls differ, every rank raises the same ValueError. Over NCCL a call that the ranks have agreed
    on before is not compared here unless `always` is set, and gives None.
    problem: the exception for what this rank found wrong with its own arguments, or None. It is raised here, and the
    other ranks raise a ValueError that quotes it.
    """
    comm.arguments = call
    if comm.size == 1:
        if problem:
            raise problem
        return [size]
    mine, known = signature(tuple(call.items())), _known.setdefault(comm.group, {})
    comm.note.begin(call, mine, known.get(mine))
    if comm.through_host:
        signatures, sizes = go_round(comm, bytes(16) if problem else mine, size or 0)
        if set(signatures) == {mine}:
            return list(sizes)
    elif mine in known and not always and not problem:
        return None
    text = json.dumps([{name: str(value) for name, value in call.items()}, size, problem and describe(problem)])
    with comm.explained("comparing the arguments of all ranks"):
        everyone = comm.note.board.exchange(comm.note, text, wait=not problem)
    if problem:
        raise problem
    calls, sizes, problems = zip(*map(json.loads, everyone), strict=True)
    for rank, found in enumerate(problems):
        if found:
            raise ValueError(f"rank {rank} of the ring was given what it does not take. {found}")
    for name in dict.fromkeys(name for theirs in calls for name in theirs):  # in the same order on every rank
        if len({theirs.get(name) for theirs in calls}) > 1:
            found = [theirs.get(name) for theirs in calls]
            values = ", ".join(f"rank {rank} {value}" for rank, value in enumerate(found))
            why = f" Perhaps a rank is without one: {NO_BACKWARD}." * (BACKWARD in found)
            raise ValueError(f"every rank of the ring must pass the same {name}; got {values}.{why}")
    comm.note.number = known.setdefault(mine, len(known))  # The ranks compare together, so that they count alike.
    return list(sizes)


def agree_again(comm):
    """`agree` on the call that `comm` was made for, which goes on in another function: the backward of autograd."""
    if comm.size > 1:
        agree(comm, comm.arguments | {"function": BACKWARD}, 0)


@functools.lru_cache(maxsize=1000)
def signature(call):
    """16 bytes that differ when two ranks' calls, tuples of (name, value), differ."""
    return hashlib.blake2b(repr(call).encode(), digest_size=16).digest()


def go_round(comm, mine, size):
    """([signature of rank 0, 1, ...], [size of rank 0, 1, ...]), over gloo. Also at a call's end, see comm.py."""
    sent = torch.frombuffer(bytearray(struct.pack("<16sq", mine, size)), dtype=torch.uint8)
    everyone = [torch.empty_like(sent) for _ in range(comm.size)]
    beside = (comm.rank - 1) % comm.size, (comm.rank + 1) % comm.size
    with comm.explained("comparing its call with those of all ranks, through rank {} and rank {}".format(*beside)):
        dist.all_gather(everyone, sent, group=comm.group)
    return zip(*(struct.unpack("<16sq", x.numpy().tobytes()) for x in everyone), strict=True)


@functools.cache
def on_device(mine, device):
    """A signature as a tensor; cached, because a CUDA graph that is captured cannot copy it from the host."""
    return torch.frombuffer(bytearray(mine), dtype=torch.uint8).to(device)


def stop_if_different(theirs, mine):
    """Stops the device if another rank's signature is not this rank's, so that no later result can be read.

    The calling thread gets the error where it next waits for the device; watch.py then says which calls differed.
    """
    torch._assert_async((theirs == mine).all(), "the ranks of the ring make different calls")


def describe(problem):
    return f"{type(problem).__name__}: {problem}"
