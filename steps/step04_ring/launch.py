# SPDX-License-Identifier: MIT
"""Starts the ranks: `init` joins those that torchrun started, `spawn` and `Ranks` start processes from Python.

    torchrun --standalone --nproc-per-node 4 -m steps.step04_ring.demo    each process calls init()
    spawn(worker, 4, seq)                                                 worker(seq) in four processes, results by rank

The backend is NCCL where each rank has a GPU, otherwise gloo. The caller is told of every failure of a rank: every wait
has a time limit, and an error carries the rank's number and traceback. A worker must be a function of an importable
module, because processes look it up by name; a function typed into a notebook is not found. A script starts ranks under
`if __name__ == "__main__":`, because every rank imports the script. Left out: several machines; torchrun starts those.
"""

import multiprocessing
import os
import pickle
import signal
import sys
import tempfile
import time
import traceback
from datetime import timedelta
from multiprocessing.connection import wait

import torch
import torch.distributed as dist

from steps import engine

TORCHRUN = "torchrun --standalone --nproc-per-node 4 -m steps.step04_ring.demo"


class RankError(RuntimeError):
    """A rank raised, died or ran out of time. `outcomes`: {rank: (result, None) or (None, what went wrong)}."""

    def __init__(self, message, outcomes):
        super().__init__(message)
        self.outcomes = outcomes


def init(timeout=60):
    """Joins the process group that torchrun's environment variables describe; returns this rank's device.

    timeout: seconds after which an exchange that has not completed raises.
    Raises RuntimeError or ValueError, with the command to use, when a variable is missing or out of range.
    """
    names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")
    missing = [name for name in names if not os.environ.get(name)]
    if missing:
        raise RuntimeError(f"{', '.join(missing)} not set; torchrun sets them: {TORCHRUN}")
    world_size = _integer("WORLD_SIZE", 1)
    rank = _integer("RANK", 0, world_size - 1)
    gpus = torch.cuda.device_count() if engine.device == "cuda" else None
    local_rank = _integer("LOCAL_RANK", 0, gpus and gpus - 1)
    _integer("MASTER_PORT", 1, 65535)
    return _join(rank, world_size, local_rank, "nccl" if gpus else "gloo", timeout, None)


def _integer(name, low, high=None):
    """The environment variable as an integer from low to high."""
    text = os.environ[name]
    if not (text.lstrip("-").isdigit() and low <= int(text) and (high is None or int(text) <= high)):
        wanted = f"from {low} to {high}" if high is not None else f"of at least {low}"
        gpus = f" ({torch.cuda.device_count()} GPUs here)" if name == "LOCAL_RANK" and high is not None else ""
        raise ValueError(f"{name} must be an integer {wanted}{gpus}, got {text!r}; torchrun sets it: {TORCHRUN}")
    return int(text)


def _join(rank, world_size, local_rank, backend, timeout, store):
    """Initialises the default process group from torchrun's variables or from a store; returns this rank's device."""
    device = torch.device(engine.device)
    if engine.device == "cuda":  # The device is set before NCCL starts; otherwise all ranks would use the first GPU.
        device = torch.device("cuda", local_rank % torch.cuda.device_count())
        torch.cuda.set_device(device)
    dist.init_process_group(
        backend, store=store, rank=rank, world_size=world_size, timeout=timedelta(seconds=timeout),
        device_id=device if backend == "nccl" else None,
    )  # fmt: skip
    return device


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
        # With "forkserver" one process imports torch, and the ranks are forked from it. CUDA does not survive a fork.
        context = multiprocessing.get_context("spawn" if engine.name == "cuda" else "forkserver")
        context.set_forkserver_preload(["steps.step04_ring.entry", "steps.step03_triton"])
        self._folder = tempfile.TemporaryDirectory()
        self.pipes, self.processes = [], []
        for rank in range(world_size):
            ours, theirs = context.Pipe()
            job = (theirs, rank, world_size, timeout, os.path.join(self._folder.name, "store"))
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
        self._folder.cleanup()

    def __enter__(self):
        return self

    def __exit__(self, kind, error, trace):
        self.close(kill=kind is not None)


def _rank(pipe, rank, world_size, timeout, path):
    """What a rank's process runs: it joins the group, then runs the tasks from the pipe until the pipe closes."""
    torch.set_num_threads(max(1, (os.cpu_count() or 1) // world_size))
    # All ranks are on this machine, and the loopback interface works even where the host's name does not resolve.
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo0" if sys.platform == "darwin" else "lo")
    enough = engine.device == "cuda" and torch.cuda.device_count() >= world_size
    joined = False
    while True:
        try:
            task = pipe.recv_bytes()
        except EOFError:
            break
        try:
            if not joined:
                _join(rank, world_size, rank, "nccl" if enough else "gloo", timeout, dist.FileStore(path, world_size))
                joined = True
            fn, args = pickle.loads(task)
            answer = pickle.dumps((fn(*args), None))
        except Exception:
            answer = pickle.dumps((None, traceback.format_exc()))
        pipe.send_bytes(answer)
    if joined:
        dist.destroy_process_group()


def _explain(outcomes, world_size, limit):
    """One line a rank, and in full what went wrong at the rank where the failure most likely began."""
    silent = f"no answer within {limit:g} s, or 5 s after another rank's failure"
    problems = {rank: problem for rank, (_, problem) in outcomes.items() if problem}  # in the order of their arrival
    problems |= {rank: silent for rank in range(world_size) if rank not in outcomes}

    def how_late(rank):
        """0 for a rank that died, 1 for an error of its own, 2 for silence, 3 for an exchange that failed.

        A failed exchange is how the other ranks see a failure, so it is the least likely beginning.
        """
        problem = problems[rank]
        if problem.startswith("died"):
            return 0
        if "RingError" in problem:
            return 3
        return 2 if problem == silent else 1

    first = min(problems, key=how_late)
    last_lines = (problems.get(rank, "fine").strip().splitlines()[-1] for rank in range(world_size))
    lines = [f"  rank {rank}: {line}" for rank, line in enumerate(last_lines)]
    return "\n".join([f"rank {first} of {world_size} failed.", *lines, f"rank {first}:", problems[first]])
