# SPDX-License-Identifier: MIT
"""Starts the ranks: `init` joins those that a launcher started, `spawn` and `Ranks` start processes from Python.

    torchrun --standalone --nproc-per-node 4 -m steps.step04_ring.demo    each process calls init()
    spawn(worker, 4, seq)                                                 worker(seq) in four processes, results by rank

The backend is NCCL where each rank has a GPU, otherwise gloo. The caller gets an error for every failure of a rank: all
waits have a time limit, and an error has the rank's number and traceback. A worker must be a function of an importable
module, because processes look it up by name; a function typed into a notebook is not found. A script starts ranks under
`if __name__ == "__main__":`, because every rank imports the script. Left out: starting ranks on several machines, which
torchrun, mpirun and srun do; environment.py reads what each of them says.
"""

import math
import multiprocessing
import os
import pickle
import signal
import socket
import sys
import time
import traceback
import uuid
from datetime import timedelta
from multiprocessing.connection import wait

import torch
import torch.distributed as dist

from steps import engine

from . import environment, watch
from .board import answered

_ME = uuid.uuid4().hex  # distinguishes two processes that were given the same rank


class RankError(RuntimeError):
    """A rank raised, died or ran out of time. `outcomes`: {rank: (result, None) or (None, what went wrong)}."""

    def __init__(self, message, outcomes):
        super().__init__(message)
        self.outcomes = outcomes


def init(timeout=60, end_process=False):
    """Joins the process group that the launcher's environment variables describe; returns this rank's device.

    timeout: seconds after which the start fails if a rank has not come, and an exchange that has not completed.
    end_process: over gloo a failed exchange raises RingError, and then the program may go on. True ends the process
    instead, as with NCCL, as soon as the failure of any rank is known.
    Raises RuntimeError or ValueError in one line if a variable is missing or wrong, or if the ranks do not meet.
    """
    _check_timeout(timeout)
    place = environment.read(torch.cuda.device_count() if engine.device == "cuda" else 0)
    _set_threads(place.here or place.size)
    if place.here == place.size:
        _use_loopback()
    store, at = _meet(place, timeout), f"{place.address}:{place.port}"
    backend = "nccl" if engine.device == "cuda" else "gloo"
    try:
        device = _join(place.rank, place.size, place.local_rank, backend, timeout, store)
    except RuntimeError as error:
        variable = "NCCL_SOCKET_IFNAME" if backend == "nccl" else "GLOO_SOCKET_IFNAME"
        reason = (str(error).splitlines() or [""])[0]
        raise RuntimeError(
            f"rank {place.rank} of {place.size} met the others at {at}, but cannot reach them over {backend}; on "
            f"several hosts {variable} must name the network interface that connects them: {reason}"
        ) from error
    keeper = "torchrun" if _agent() else f"rank 0 of {place.size}"
    watch.start(store, watch.print_line, end_process, keeper=f"{keeper}, which keeps the store at {at},")
    return device


def _agent():
    """Whether torchrun's own process keeps the store; otherwise rank 0 does."""
    return os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"


def _meet(place, timeout):
    """The store at MASTER_ADDR:MASTER_PORT, once every rank has come to it.

    The steps are taken in a thread, because some have no time limit: a name server that does not answer, or another
    program at the port, which accepts a connection and says nothing.
    """
    at, end = f"{place.address}:{place.port}", time.monotonic() + timeout
    keeps = place.rank == 0 and not _agent()
    try:
        answered(lambda: socket.getaddrinfo(place.address, place.port), timeout)
        if not keeps:
            _knock(place, end)
        store = answered(lambda: _store(place, keeps, timeout), end - time.monotonic())
        answered(lambda: _come(store, place, end - time.monotonic()), timeout)
        return store
    except socket.gaierror as error:
        problem = f"cannot find the host in MASTER_ADDR, {place.address!r}: {error.strerror}"
    except (TimeoutError, dist.DistNetworkError):
        problem = f"connected to {at}, but no store answered within {timeout:g} s: another program listens there"
        if keeps:
            problem = f"cannot listen at {at}: another program does, or another process has rank 0 as well"
    except OSError as error:
        reason = f"rank 0 was not started there, or its host cannot be reached ({error})"
        problem = f"could not connect to {at} within {timeout:g} s: {reason}"
    raise RuntimeError(f"rank {place.rank} of {place.size} {problem}")


def _knock(place, end):
    """Waits until something listens at the store's address; OSError if nothing does in time."""
    while True:
        left = end - time.monotonic()
        try:
            return socket.create_connection((place.address, place.port), max(left, 0.1)).close()
        except OSError as error:
            if left < 0.2:
                raise OSError(error.strerror or "no answer") from error
            time.sleep(0.1)


def _store(place, keeps, timeout):
    """The store in which the ranks find each other: torchrun's, or one that rank 0 starts."""
    options = dict(timeout=timedelta(seconds=timeout), wait_for_workers=False, multi_tenant=True)
    store = dist.TCPStore(place.address, place.port, None, keeps, **options)
    return dist.PrefixStore(f"attempt {os.environ.get('TORCHELASTIC_RESTART_COUNT', 0)}", store)


def _come(store, place, patience):
    """Says that this rank has come, and waits for the others; RuntimeError names those that do not come."""
    if store.compare_set(f"rank {place.rank}", "", _ME).decode() != _ME:
        raise RuntimeError(f"two processes were given rank {place.rank} of {place.size}")
    try:
        store.wait([f"rank {rank}" for rank in range(place.size)], timedelta(seconds=max(patience - 1, 1)))
    except dist.DistStoreError:
        missing = [rank for rank in range(place.size) if not store.check([f"rank {rank}"])]
        names = ", ".join(map(str, missing))
        raise RuntimeError(f"rank {place.rank} of {place.size} has waited in vain for rank {names} to start") from None


def _check_timeout(timeout):
    if not (isinstance(timeout, int | float) and 0 < timeout < math.inf):
        raise ValueError(f"timeout must be a number of seconds greater than 0; got {timeout!r}.")


def _set_threads(here):
    """Shares the cores among the ranks on this host. By default each rank would start as many threads as cores."""
    if "OMP_NUM_THREADS" not in os.environ:
        bound = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
        torch.set_num_threads(max(1, min(bound, (os.cpu_count() or 1) // here)))


def _use_loopback():
    """Where all ranks are on this machine, the loopback interface works even if the host's name does not resolve."""
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo0" if sys.platform == "darwin" else "lo")


def _join(rank, world_size, local_rank, backend, timeout, store):
    """Initialises the default process group from a store; returns this rank's device."""
    device = torch.device(engine.device)
    if engine.device == "cuda":  # The device is set before NCCL starts; otherwise all ranks would use the first GPU.
        device = torch.device("cuda", local_rank % torch.cuda.device_count())
        torch.cuda.set_device(device)
    # After the timeout NCCL's own watchdog ends the process, too, but names no rank; watch.py acts before it. If the
    # device fails, the watchdog would act first; it shall leave the error to the thread that made the call.
    os.environ.setdefault("TORCH_NCCL_WAIT_TIMEOUT_DUMP_MILSEC", "1000")
    os.environ.setdefault("TORCH_NCCL_RETHROW_CUDA_ERRORS", "0")
    dist.init_process_group(
        backend, store=store, rank=rank, world_size=world_size, timeout=timedelta(seconds=timeout),
        device_id=device if backend == "nccl" else None,
    )  # fmt: skip
    return device


def message_device():
    """The device of tensors that are sent without a copy: over NCCL this rank's GPU, over gloo host memory."""
    return torch.device("cuda" if dist.get_backend() == "nccl" else "cpu")


def spawn(fn, world_size, *args, timeout=60, limit=600):
    """[fn(*args) of rank 0, 1, ...], each in a process of its own, all in one process group.

    timeout: seconds for one exchange between ranks; limit: seconds for the whole. Raises RankError if a rank fails.
    """
    with Ranks(world_size, timeout) as ranks:
        return ranks.run(fn, *args, limit=limit)


class Ranks:
    """world_size processes in one process group, which live through several `run`s and end with a RankError.

    Use it in a `with` statement, or call `close`.
    """

    def __init__(self, world_size, timeout=60):
        if not (isinstance(world_size, int) and world_size > 0):
            raise ValueError(f"the number of ranks must be an integer of at least 1; got {world_size!r}.")
        _check_timeout(timeout)
        # With "forkserver" one process imports torch, and the ranks are forked from it. CUDA does not survive a fork.
        context = multiprocessing.get_context("spawn" if engine.name == "cuda" else "forkserver")
        # torch's first backward would import the last of these in every rank, for a second.
        context.set_forkserver_preload(
            ["steps.step04_ring.entry", "steps.step03_triton", "torch.fx.experimental.symbolic_shapes"]
        )
        # The store is in this process, because it has to outlive every rank.
        self._store = dist.TCPStore("127.0.0.1", 0, None, True, wait_for_workers=False)
        self.pipes, self.processes = [], []
        for rank in range(world_size):
            ours, theirs = context.Pipe()
            job = (theirs, rank, world_size, timeout, self._store.port)
            process = context.Process(target=_rank, args=job, daemon=True)
            process.start()
            theirs.close()  # so that only the process holds this end, and the pipe closes when it ends
            self.pipes.append(ours)
            self.processes.append(process)

    def run(self, fn, *args, limit=600):
        """[fn(*args) of rank 0, 1, ...]; RankError if a rank raises, dies, or takes more than `limit` seconds."""
        task = pickle.dumps((fn, args))  # by value: tensors in shared memory would be lost when their process ends
        for pipe in self.pipes:
            try:
                pipe.send_bytes(task)
            except OSError:  # that rank has died, which reading from its pipe reports below
                pass
        outcomes, deadline = {}, time.monotonic() + limit
        while len(outcomes) < len(self.pipes) and (left := deadline - time.monotonic()) > 0:
            for pipe in wait([pipe for rank, pipe in enumerate(self.pipes) if rank not in outcomes], left):
                rank = self.pipes.index(pipe)
                outcomes[rank] = self._outcome(rank)
                if outcomes[rank][1]:  # the other ranks get 5 s to report what they saw of this failure
                    deadline = min(deadline, time.monotonic() + 5)
        if len(outcomes) < len(self.pipes) or any(problem for _, problem in outcomes.values()):
            self.close(kill=True)
            raise RankError(_explain(outcomes, len(self.pipes), limit), outcomes)
        return [outcomes[rank][0] for rank in range(len(self.pipes))]

    def _outcome(self, rank):
        """(result, None), or (None, what went wrong)."""
        try:
            return pickle.loads(self.pipes[rank].recv_bytes())
        except (EOFError, OSError):
            self.processes[rank].join(5)
            code = self.processes[rank].exitcode
            how = f"killed by {signal.Signals(-code).name}" if code and code < 0 else f"exit code {code}"
            return None, f"died: {how}"

    def close(self, kill=False):
        """Ends the processes: each gets 10 s to end by itself, or with `kill` none."""
        for pipe in self.pipes:
            pipe.close()
        for process in self.processes:
            process.join(0 if kill else 10)
            if process.is_alive():
                process.kill()
                process.join()
        self._store = None

    def __enter__(self):
        return self

    def __exit__(self, kind, error, trace):
        self.close(kill=kind is not None)


def _rank(pipe, rank, world_size, timeout, port):
    """What a rank's process runs: it joins the group, then runs the tasks from the pipe until the pipe closes."""
    _set_threads(world_size)
    _use_loopback()
    enough = engine.device == "cuda" and torch.cuda.device_count() >= world_size

    def join():
        store = dist.TCPStore("127.0.0.1", port, None, False, wait_for_workers=False)
        _join(rank, world_size, rank, "nccl" if enough else "gloo", timeout, store)
        # Over NCCL a verdict ends this process, so the verdict is its answer. Over gloo its RingError is the answer.
        say = (lambda line: pipe.send_bytes(pickle.dumps((None, f"RingError: {line}")))) if enough else None
        watch.start(store, say, keeper="the process that started the ranks")

    joined = False
    while True:
        try:
            task = pipe.recv_bytes()
        except EOFError:
            break
        try:
            if not joined:
                join()
                joined = True
            fn, args = pickle.loads(task)
            answer = pickle.dumps((fn(*args), None))
        except Exception:
            answer = pickle.dumps((None, traceback.format_exc()))
            watch.last_words()
        pipe.send_bytes(answer)
    if joined:
        dist.destroy_process_group()


def _explain(outcomes, world_size, limit):
    """One line a rank, and in full what went wrong at the rank where the failure most likely began."""
    silent = f"no answer within {limit:g} s, or 5 s after another rank's failure"
    problems = {rank: problem for rank, (_, problem) in outcomes.items() if problem}  # in the order of their arrival
    problems |= {rank: silent for rank in range(world_size) if rank not in outcomes}

    def how_late(rank):
        """0 for a rank that died, 1 for an error of its own, 2 for silence, 3 for how the others see a failure."""
        problem = problems[rank]
        by_itself = problem != silent and "RingError" not in problem
        return [problem.startswith("died"), by_itself, problem == silent, True].index(True)

    first = min(problems, key=how_late)
    last_lines = (problems.get(rank, "fine").strip().splitlines()[-1] for rank in range(world_size))
    lines = [f"  rank {rank}: {line}" for rank, line in enumerate(last_lines)]
    return "\n".join([f"rank {first} of {world_size} failed.", *lines, f"rank {first}:", problems[first]])
