# SPDX-License-Identifier: MIT
"""Where a rank stands: in which call of its process group, and in which hop of it.

    begin(...), begin_hop()    by the calling thread: two counters
    passed()                   by the calling thread: with NCCL an event on the current stream
    failed(error)              by the calling thread: what its block has raised, until its next call
    place(), stuck()           by other threads: where the rank is, or with NCCL its device

The idea: an exchange over gloo blocks the calling thread, so that the counters say where the rank is. With NCCL, or
memory that GPUs share, a call returns before its exchanges have happened: the calling thread runs ahead, and only the
events say where the device is. Left out: a CUDA graph that is replayed runs no Python and leaves no note. Needs
verdict.py.
"""

import collections
import threading
import time

import torch
import torch.distributed as dist

from .verdict import where


class Note:
    """Where this rank stands in the calls of one process group. board: the Board on which it is published."""

    def __init__(self, group, board):
        self.board = board
        self.name, self.members = group.group_name, dist.get_process_group_ranks(group)
        self.now = 0, 0, {}  # (call, hop, arguments), which is replaced as a whole because other threads read it
        self.signature = bytes(16)  # of the call, as agree.py gives it, and with it the call's number
        self.number = None
        self.compared = None  # the store's key of the last call whose arguments were compared
        self.failure = ""  # in words, what this rank's block raised in its last call
        self.heard = ""  # the last failure that this process has printed or had itself
        self.on_device = dist.get_backend(group) != "gloo"  # Then the calling thread runs ahead of the exchanges.
        self.device = torch.cuda.current_device() if self.on_device else None
        self.timeout = seconds(group)
        self.ahead = collections.deque()  # (event, what `now` was): what the device has not finished
        self.unused = collections.deque()  # events to use again, because making one takes longer than recording it
        self.first = None  # the first of `ahead`
        self.since = 0.0  # since when it is the first
        self.broken = False  # whether the device has failed
        self.lock = threading.Lock()  # between the threads that read; the calling thread only appends

    def begin(self, arguments, signature, number):
        """A new call. arguments: a dict, of which the verdict shows what differs between two ranks."""
        self.signature = signature
        self.number = number
        self.failure = ""
        self.now = self.now[0] + 1, 0, arguments
        self.passed()  # when the device reaches the call; its earlier work does not count as waiting

    def begin_hop(self):
        """The next exchange of this call is about to be posted; returns its number, from 1."""
        call, hop, arguments = self.now
        self.now = call, hop + 1, arguments
        return hop + 1

    def failed(self, error):
        """This rank's part of the call has raised. The board publishes it at once."""
        rank, what = self.members.index(dist.get_rank()), f"{type(error).__name__}: {error}".partition("\n")[0]
        self.failure = self.heard = f"rank {rank} of {len(self.members)} raised {what} in {where(self.now[:2])}"
        self.board.tell_failure(self)

    def passed(self):
        """The exchange is over when the device gets to this point of the current stream.

        While a CUDA graph is captured nothing is recorded, because its events cannot be queried.
        """
        if self.on_device and not torch.cuda.is_current_stream_capturing():
            event = self.unused.popleft() if self.unused else torch.cuda.Event()
            event.record()
            self.ahead.append((event, self.now))

    def place(self):
        """The (call, hop, arguments) that this rank is in, and with NCCL those that its device is in."""
        with self.lock:
            while self.ahead and self._over(self.ahead[0][0]):
                self.unused.append(self.ahead.popleft()[0])
            return self.ahead[0][1] if self.ahead else self.now

    def _over(self, event):
        try:
            with torch.cuda.device(self.device):  # else this thread would start using the first GPU
                return event.query()
        except RuntimeError:  # an earlier kernel failed; the calling thread gets this error, too
            self.broken = True
            return False

    def stuck(self):
        """Whether the device has been in the same exchange for longer than the timeout."""
        _, hop, _ = self.place()
        first = self.ahead[0] if self.ahead else None
        if first is not self.first:
            self.first = first
            self.since = time.monotonic()
        return first is not None and hop > 0 and time.monotonic() - self.since > self.timeout


def seconds(group):
    """The timeout of a process group."""
    device = "cpu" if dist.get_backend(group) == "gloo" else "cuda"
    return group._get_backend(torch.device(device)).options._timeout.total_seconds()
