# SPDX-License-Identifier: MIT
"""A process in the ring: hops to and from its two neighbours, and the check that all ranks make the same call.

A hop is one message sent and one message received, posted together. No rank has to receive before its neighbour can
send, so the hop cannot deadlock. It is posted before the computation that hides it, and waited for afterwards. Ranks
here are ranks of the process group, which need not be the world. Without a process group the ring is Alone.

    NCCL   the two messages are one kernel on a stream of its own; wait() makes the current stream wait, not the host
    gloo   two messages over sockets; wait() blocks the host. GPU tensors pass through host memory, so that several
           ranks may share a GPU

The idea: the size and order of every message follow from the arguments, so the ranks need not negotiate. The price is
that ranks with different arguments would hang, or read stale bytes without an error; agree.py prevents that. The rank
that an error names is the one where the failure began, which watch.py finds. Needs agree.py and watch.py.
"""

import contextlib

import torch
import torch.distributed as dist

from . import agree, watch


class RingError(RuntimeError):
    """An exchange failed or timed out; the message names the rank that caused it, and what this rank was doing."""


class Alone:
    """The ring of a process that has no process group, or is the only one in it: it sends nothing."""

    rank, size = 0, 1
    together = contextlib.nullcontext  # There is no other rank that has to know what this one raises.


def comm_of(group=None):
    """A process group as a ring (None: the default group): a Comm, or Alone."""
    if not (dist.is_available() and dist.is_initialized()):
        if group is not None:
            raise ValueError(
                "group needs torch.distributed: call steps.step04_ring.launch.init() first, or leave group out."
            )
        return Alone()
    return Alone() if dist.get_world_size(group) == 1 else Comm(group)


class Comm:
    """A process group of two or more ranks as a ring. This process is rank `rank` of `size`."""

    def __init__(self, group=None):
        self.arguments = {}  # of the call, which agree sets
        self.group = dist.group.WORLD if group is None else group
        self.rank, self.size = dist.get_rank(self.group), dist.get_world_size(self.group)
        if self.rank < 0:
            raise ValueError(
                f"rank {dist.get_rank()} is not in the group that it passed; only the group's members may call."
            )
        self.through_host = dist.get_backend(self.group) == "gloo"
        self.note = watch.note(self.group)

    def post(self, x, shape, towards):
        """Starts to send x (contiguous) to rank + towards and to receive `shape` from rank - towards; returns the Hop.

        Both neighbours know both shapes beforehand. Empty tensors are not sent.
        """
        to, source = (self.rank + towards) % self.size, (self.rank - towards) % self.size
        wire = "cpu" if self.through_host else x.device
        sent, received = x.to(wire), torch.empty(shape, dtype=x.dtype, device=wire)
        messages, header = [(sent, received)], None
        if self.note.begin_hop() == 1 and not self.through_host:  # over gloo agree has compared the calls
            mine = agree.on_device(self.note.signature, x.device)
            header = torch.empty_like(mine), mine
            messages.append(header[::-1])
        ops, names = [], []
        for outgoing, incoming in messages:
            if outgoing.numel():
                ops.append(dist.P2POp(dist.isend, outgoing, group=self.group, group_peer=to))
                names.append(f"sending to rank {to}")
            if incoming.numel():
                ops.append(dist.P2POp(dist.irecv, incoming, group=self.group, group_peer=source))
                names.append(f"receiving from rank {source}")
        with self.explained(" and ".join(dict.fromkeys(names))):
            works = dist.batch_isend_irecv(ops) if ops else []
        if len(works) < len(names):  # NCCL returns one work for all messages
            names = [" and ".join(dict.fromkeys(names))]
        return Hop(self, list(zip(works, names, strict=True)), sent, received, x.device, header)

    @contextlib.contextmanager
    def together(self):
        """A call that raises on all ranks if it raises on one: on the others a RingError that quotes the exception.

        Before that, every exchange of the call happens, see ring.py, so that all ranks may call again. Over NCCL no
        host waits for another rank: there watch.py only prints the exception.
        """
        error = None
        try:
            yield
        except RingError:
            raise
        except BaseException as raised:
            self.note.failed(raised)
            if not isinstance(raised, Exception):
                raise
            error = raised
        if self.through_host:
            _, failed = agree.go_round(self, self.note.signature, int(error is not None))
            if any(failed):
                found = [None] * self.size
                with self.explained("asking what the others' blocks raised"):
                    dist.all_gather_object(found, self.note.failure, group=self.group)
                if error is None:
                    line = "; ".join(filter(None, found))
                    raise RingError(f"{line}. Rank {self.rank} of {self.size} has thrown its results away")
        if error is not None:
            raise error

    @contextlib.contextmanager
    def explained(self, doing):
        """Replaces the backend's error by a RingError that names the culprit and what this rank was doing."""
        try:
            yield
        except (RuntimeError, TimeoutError) as error:
            line, reason = watch.judge(self.note), str(error).split(". ")[0].strip()
            raise RingError(f"{line}. Rank {self.rank} of {self.size} failed while {doing}: {reason}") from error


class Hop:
    """An exchange that is under way. It holds both buffers until `wait`."""

    def __init__(self, comm, works, sent, received, device, header):
        self.comm, self.works, self.sent, self.received, self.device = comm, works, sent, received, device
        self.header = header

    def wait(self):
        """The tensor that arrived. After this call the buffer that was sent may be overwritten."""
        for work, name in self.works:
            with self.comm.explained(name):
                work.wait()
        if self.header:
            agree.stop_if_different(*self.header)
        self.comm.note.passed()
        return self.received.to(self.device)
