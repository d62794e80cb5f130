# SPDX-License-Identifier: MIT
"""A process in the ring: hops to and from its two neighbours, and the check that all ranks make the same call.

A hop is one message sent and one message received, posted together. No rank has to receive before its neighbour can
send, so the hop cannot deadlock. It is posted before the computation that hides it, and waited for afterwards. Ranks
here are ranks of the process group, which need not be the world. Without a process group the ring has one rank and
makes no hop.

    NCCL   the two messages are one kernel on a stream of its own; wait() makes the current stream wait, not the host
    gloo   two messages over sockets; wait() blocks the host. GPU tensors pass through host memory, so that several
           ranks may share a GPU

The idea: the size and order of every message follow from the arguments, so the ranks need not negotiate. The price is
that ranks with different arguments would hang, or read stale bytes without an error; `agree` prevents that. Left out:
finding the rank at which a failure began. The rank that an error names may have failed only because its own neighbour
did. Needs torch only.
"""

import contextlib
import weakref

import torch
import torch.distributed as dist


class RingError(RuntimeError):
    """An exchange failed or timed out; the message says on which rank, and with which neighbour."""


class Comm:
    """A process group as a ring (None: the default group). This process is rank `rank` of `size`."""

    _agreed = weakref.WeakKeyDictionary()  # process group -> the calls that its ranks have agreed on

    def __init__(self, group=None):
        self.rank, self.size = 0, 1
        if not (dist.is_available() and dist.is_initialized()):
            if group is not None:
                raise ValueError(
                    "group needs torch.distributed: call steps.step04_ring.launch.init() first, or leave group out."
                )
            return
        self.group = dist.group.WORLD if group is None else group
        self.rank, self.size = dist.get_rank(self.group), dist.get_world_size(self.group)
        if self.rank < 0:
            raise ValueError(
                f"rank {dist.get_rank()} is not in the group that it passed; only the group's members may call."
            )
        self.through_host = dist.get_backend(self.group) == "gloo"

    def post(self, x, shape, towards):
        """Starts to send x (contiguous) to rank + towards and to receive `shape` from rank - towards; returns the Hop.

        Both neighbours know both shapes beforehand. Empty tensors are not sent.
        """
        to, source = (self.rank + towards) % self.size, (self.rank - towards) % self.size
        wire = "cpu" if self.through_host else x.device
        sent, received = x.to(wire), torch.empty(shape, dtype=x.dtype, device=wire)
        ops, names = [], []
        if sent.numel():
            ops.append(dist.P2POp(dist.isend, sent, group=self.group, group_peer=to))
            names.append(f"sending to rank {to}")
        if received.numel():
            ops.append(dist.P2POp(dist.irecv, received, group=self.group, group_peer=source))
            names.append(f"receiving from rank {source}")
        with self.explained(" and ".join(names)):
            works = dist.batch_isend_irecv(ops) if ops else []
        if len(works) < len(names):  # NCCL returns one work for the two messages
            names = [" and ".join(names)]
        return Hop(self, list(zip(works, names, strict=True)), sent, received, x.device)

    def agree(self, call, size, always=False, problem=None):
        """Compares `call`, a dict, with every other rank's; returns each rank's `size`.

        A call that the ranks have agreed on before is not compared again unless `always` is set, and gives None.
        Comparing is collective. If the calls differ, every rank raises the same ValueError.
        `problem` is the exception for what this rank found wrong with its own arguments, or None. It is raised here.
        With `always` the ranks compare first, so that the other ranks raise a ValueError that quotes it.
        """
        if problem and (self.size == 1 or not always):
            raise problem
        if self.size == 1:
            return [size]
        agreed, key = self._agreed.setdefault(self.group, set()), tuple(call.items())
        if key in agreed and not always:
            return None
        everyone, mine = [None] * self.size, (call, size, problem and f"{type(problem).__name__}: {problem}")
        with self.explained("comparing the arguments of all ranks"):
            dist.all_gather_object(everyone, mine, group=self.group)
        if problem:
            raise problem
        calls, sizes, problems = zip(*everyone, strict=True)
        for rank, found in enumerate(problems):
            if found:
                raise ValueError(f"rank {rank} of the ring was given what it does not take. {found}")
        for name in call:
            if len({theirs[name] for theirs in calls}) > 1:
                values = ", ".join(f"rank {rank} {theirs[name]}" for rank, theirs in enumerate(calls))
                raise ValueError(f"every rank of the ring must pass the same {name}; got {values}.")
        agreed.add(key)
        return list(sizes)

    @contextlib.contextmanager
    def explained(self, doing):
        """Replaces the backend's RuntimeError by a RingError that says what this rank was doing with which rank."""
        try:
            yield
        except RuntimeError as error:
            raise RingError(
                f"rank {self.rank} of {self.size} failed while {doing}; that rank died, hangs, made another call, "
                f"or failed because its own neighbour did. {error}"
            ) from error


class Hop:
    """An exchange that is under way. It keeps both buffers alive until `wait`."""

    def __init__(self, comm, works, sent, received, device):
        self.comm, self.works, self.sent, self.received, self.device = comm, works, sent, received, device

    def wait(self):
        """The tensor that arrived. After this call the buffer that was sent may be overwritten."""
        for work, name in self.works:
            with self.comm.explained(name):
                work.wait()
        return self.received.to(self.device)
