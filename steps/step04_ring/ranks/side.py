# SPDX-License-Identifier: MIT
"""What fetch.py copies with: a stream beside the computation, and memory that all ranks of a host can read and write.

    Side        on GPUs: a CUDA stream, torch's symmetric memory, and its barrier, which has a time limit
    HostSide    without: files in shared memory and a barrier of gloo. Copies are done at once.

Four calls order the two streams, and all of them return at once. `follow`: the side waits for all work that the
computation has been given so far. `mark`: records an event on the side. `lead`: the computation waits for such an
event. `barrier`: the side's streams of all ranks wait for each other. Needs torch.
"""

import errno
import math
import mmap
import os
import socket
import tempfile
import weakref
from contextlib import suppress

import torch
import torch.distributed as dist

# Nothing here needs multicast, and it can put all GPUs of a host out of service.
MULTICAST_OFF = "TORCH_SYMM_MEM_DISABLE_MULTICAST"
SIGNALS = 512  # that torch has for barriers: one a channel and rank


_sides = weakref.WeakKeyDictionary()  # process group -> {device: its Side, or why it has none}


def side_of(comm, device, transport=None):
    """The Side of a group's calls on this device, or None where the transport is to be relay.

    transport: "relay", "fetch", or None for fetch where it runs on GPUs. Collective at a group's first call. Raises
    ValueError on every rank where "fetch" was asked for and cannot be.
    """
    if transport == "relay" or (transport is None and device.type == "cpu"):
        return None
    known = _sides.setdefault(comm.group, {})
    if device not in known:
        known[device] = _reason_against(comm, device) or (Side if device.type == "cuda" else HostSide)(comm, device)
    found = known[device]
    if isinstance(found, str) and transport == "fetch":
        raise ValueError(f'transport="fetch" cannot be used here: {found}. Use "relay".')
    return None if isinstance(found, str) else found


def _reason_against(comm, device):
    """Why the ranks cannot share memory, in words, or "". Every rank comes to the same answer. Collective."""
    on_gpu = device.type == "cuda"
    mine = _boot(), str(torch.cuda.get_device_properties(device).uuid) if on_gpu else None, _missing() if on_gpu else ""
    everyone = [None] * comm.size
    with comm.explained("asking where the other ranks are"):
        dist.all_gather_object(everyone, mine, group=comm.group)
    hosts, gpus, missing = zip(*everyone, strict=True)
    if len(set(hosts)) > 1:
        return "the ranks are on several hosts"
    if on_gpu and len(set(gpus)) < comm.size:
        return "several ranks have the same GPU"
    if on_gpu and comm.through_host:
        return "the backend is gloo, and GPUs share memory where it is nccl"
    return next(filter(None, missing), "")


def _boot():
    """A text that is the same for all processes of a host, also in containers with names of their own."""
    with suppress(OSError), open("/proc/sys/kernel/random/boot_id") as file:
        return file.read().strip()
    return socket.gethostname()


def _missing():
    """What this process lacks for a Side on its GPU, or ""."""
    try:
        import torch.distributed._symmetric_memory as symmetric

        symmetric.empty, symmetric.rendezvous  # noqa: B018
    except (ImportError, AttributeError) as error:
        return f"torch {torch.__version__} has no symmetric memory ({error})"
    here = torch.cuda.current_device()
    others = [gpu for gpu in range(torch.cuda.device_count()) if gpu != here]
    apart = [gpu for gpu in others if not torch.cuda.can_device_access_peer(here, gpu)]
    return f"GPU {here} cannot read the memory of GPU {apart[0]}" if apart else ""


class Side:
    """The stream and the shared memory of a process group's calls on one GPU."""

    def __init__(self, comm, device):
        self.comm, self.device, self.memories, self.gates = comm, device, {}, []
        self.make_stream()

    def make_stream(self):
        # With the higher priority a barrier's one block does not have to wait until a whole computation has started.
        self.stream = torch.cuda.Stream(self.device, priority=-1)

    def memory(self, name, nbytes):
        """Shared memory of at least so many bytes. Collective where there is none yet: every rank needs the same.

        It is never freed, because a captured CUDA graph may still use it. Each new one is at least twice as large as
        those before, so that all of them together are less than four times the largest request.
        """
        known = self.memories.setdefault(name, {})
        fits = [size for size in known if size >= nbytes]
        if not fits:
            fits = [max(-(-nbytes // 16) * 16, 2 * max(known, default=0), 16)]  # whole numbers of every dtype
            known[fits[0]] = self.new_memory(fits[0])
        return known[min(fits)]

    def new_memory(self, nbytes):
        return SymmetricMemory(nbytes, self.comm.group, self.device)

    def follow(self):
        self.stream.wait_stream(torch.cuda.current_stream(self.device))

    def mark(self):
        return self.stream.record_event()

    def lead(self, mark):
        torch.cuda.current_stream(self.device).wait_event(mark)

    def in_a_graph(self):
        """Whether the calls are captured in a CUDA graph instead of being run."""
        return torch.cuda.is_current_stream_capturing()

    def copy(self, *pairs):
        """Starts to copy, for each pair (to, from)."""
        with torch.cuda.stream(self.stream):
            for to, x in pairs:
                to.copy_(x, non_blocking=True)

    def barrier(self):
        """Every rank's side waits for those of the others. Ranks in different calls never meet.

        After the group's timeout watch.py names the culprit and ends the process; 5 s later the GPU itself would stop.
        """
        note = self.comm.note
        note.begin_hop()
        handle, channel = self.gate(note.number)
        with torch.cuda.stream(self.stream):
            handle.barrier(channel, timeout_ms=int(1e3 * (note.timeout + 5)))
            note.passed()

    def gate(self, number):
        """(handle, channel) of the barrier that only the call of this number uses."""
        page, channel = divmod(number, SIGNALS // self.comm.size)
        while len(self.gates) <= page:
            self.gates.append(self.new_memory(16))
        return self.gates[page].handle, channel


class SymmetricMemory:
    """Bytes of every rank's GPU that the GPUs of the other ranks can address."""

    def __init__(self, nbytes, group, device):
        import torch.distributed._symmetric_memory as symmetric

        os.environ[MULTICAST_OFF] = "1"
        self.own = symmetric.empty(nbytes, dtype=torch.uint8, device=device)
        self.handle = symmetric.rendezvous(self.own, group.group_name)
        self.views = {}

    def of(self, rank, shape, dtype, first=0):
        """A tensor in the memory of that rank, which begins at the number `first` of this dtype."""
        key = rank, shape, dtype, first
        if key not in self.views:
            with torch.inference_mode(False):  # A tensor of inference mode could not be written to outside of it.
                self.views[key] = self.handle.get_buffer(rank, shape, dtype, first)
        return self.views[key]


class HostSide(Side):
    """The same without a GPU: the side does everything at once, so that only the barrier has to wait."""

    def make_stream(self):
        pass

    def new_memory(self, nbytes):
        return SharedFiles(nbytes, self.comm)

    def follow(self):
        pass

    def mark(self):
        pass

    def lead(self, mark):
        pass

    def in_a_graph(self):
        return False

    def copy(self, *pairs):
        for to, x in pairs:
            to.copy_(x)

    def barrier(self):
        self.comm.note.begin_hop()
        with self.comm.explained("waiting for all ranks"):
            dist.barrier(group=self.comm.group)


def allocated(file, nbytes):
    """Makes a file of so many bytes; returns in words why it cannot, or "".

    truncate would make a file larger than the memory for it; the first copy beyond that memory would end in SIGBUS.
    """
    try:
        allocate = getattr(os, "posix_fallocate", lambda number, first, size: os.truncate(number, size))  # not on macOS
        allocate(file.fileno(), 0, nbytes)
    except OSError as error:
        return (
            f"has no room for {nbytes:,} bytes in {os.path.dirname(file.name)}: {error.strerror}. A container gets "
            'more by --shm-size (Docker gives 64 MB); transport="relay" needs none.'
        )
    return ""


class SharedFiles:
    """Bytes of every rank as a file that the ranks of this host have mapped. Nobody has to delete it afterwards."""

    def __init__(self, nbytes, comm):
        file = tempfile.NamedTemporaryFile(dir="/dev/shm" if os.path.isdir("/dev/shm") else None)  # noqa: SIM115
        everyone = [None] * comm.size
        with comm.explained("sharing memory"):
            dist.all_gather_object(everyone, (file.name, allocated(file, nbytes)), group=comm.group)
        names, problems = zip(*everyone, strict=True)
        for rank, problem in enumerate(problems):
            if problem:  # Every rank raises the same, and may call again.
                raise OSError(errno.ENOSPC, f"rank {rank} {problem}")
        self.bytes = [self.mapped(name, nbytes) for name in names]
        with comm.explained("sharing memory"):
            dist.barrier(group=comm.group)
        with suppress(FileNotFoundError):
            file.close()  # deletes the name; the memory lives as long as it is mapped

    @staticmethod
    def mapped(name, nbytes):
        with open(name, "r+b") as file:
            return torch.frombuffer(mmap.mmap(file.fileno(), nbytes), dtype=torch.uint8)

    def of(self, rank, shape, dtype, first=0):
        """A tensor in the memory of that rank, which begins at the number `first` of this dtype."""
        return self.bytes[rank].view(dtype)[first : first + math.prod(shape)].view(shape)
