# SPDX-License-Identifier: MIT
"""Starts the ranks: `init` joins those that torchrun started, `spawn` and `Ranks` start processes from Python.

    torchrun --standalone --nproc-per-node 4 -m steps.step04_ring.demo      each process calls init()
    spawn(worker, 4, seq)                                                   worker(seq) in four processes, their results by rank

The backend is NCCL with a GPU for each rank, otherwise gloo. Whatever happens to a rank, the caller hears of it: every wait has a
limit, and an error carries the rank's number and traceback. A worker is a function of an importable module (processes look it up
by name), so not one typed into a notebook; a script starts ranks under `if __name__ == "__main__":`, because every rank imports
it. Left out: several machines, which are torchrun's business.
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
    """A rank raised, died or ran out of time. `outcomes`: {rank: (result or None, None or what went wrong)}."""

    def __init__(self, message, outcomes):
        super().__init__(message)
        self.outcomes = outcomes


def init(timeout=60):
    """Joins the process group that torchrun's environment variables describe; returns this rank's device.

    timeout: seconds after which an exchange that does not complete raises. Raises RuntimeError or ValueError, with the command
    to use, when a variable is missing or out of range.
    """
    missing = [name for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT") if not os.environ.get(name)]
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
    """Initialises the default process group, through torchrun's variables or a store; returns this rank's device."""
    device = torch.device(engine.device)
    if engine.device == "cuda":  # before anything of NCCL, or all ranks would take the first GPU
        device = torch.device("cuda", local_rank % torch.cuda.device_count())
        torch.cuda.set_device(device)
    dist.init_process_group(
        backend, store=store, rank=rank, world_size=world_size, timeout=timedelta(seconds=timeout),
        device_id=device if backend == "nccl" else None,
    )  # fmt: skip
    return device


def spawn(fn, world_size, *args, timeout=60, limit=600):
    """[fn(*args) of rank 0, 1, ...], each in a process of its own, all in one process group. Raises RankError if a rank fails.

    timeout: seconds for one exchange between ranks; limit: seconds for the whole.
    """
    with Ranks(world_size, timeout) as ranks:
        return ranks.run(fn, *args, limit=limit)


class Ranks:
    """world_size processes in one process group, which stay for several `run`s. Use in a `with` statement, or call `close`.

    After a RankError they are gone.
    """

    def __init__(self, world_size, timeout=60):
        # forkserver: torch is imported once and the ranks are forked from there. CUDA does not survive a fork.
        context = multiprocessing.get_context("spawn" if engine.name == "cuda" else "forkserver")
        context.set_forkserver_preload(["steps.step04_ring.entry", "steps.step03_triton"])
        self._folder = tempfile.TemporaryDirectory()
        self.pipes, self.processes = [], []
        for rank in range(world_size):
            ours, theirs = context.Pipe()
            job = (theirs, rank, world_size, timeout, os.path.join(self._folder.name, "store"))
            process = context.Process(target=_rank, args=job, daemon=True)
            process.start()
            theirs.close()  # so that the pipe ends with the process
            self.pipes.append(ours)
            self.processes.append(process)

    def run(self, fn, *args, limit=600):
        """[fn(*args) of rank 0, 1, ...]; RankError if a rank raises, dies, or takes more than `limit` seconds."""
        task = pickle.dumps((fn, args))  # tensors travel by value, not as shared memory that dies with its process
        for pipe in self.pipes:
            try:
                pipe.send_bytes(task)
            except OSError:  # that rank has died; its pipe says so below
                pass
        outcomes, deadline = {}, time.monotonic() + limit
        while len(outcomes) < len(self.pipes) and (left := deadline - time.monotonic()) > 0:
            for pipe in wait([pipe for rank, pipe in enumerate(self.pipes) if rank not in outcomes], left):
                rank = self.pipes.index(pipe)
                outcomes[rank] = self._outcome(rank)
                if outcomes[rank][1]:  # a little time for the others to say what they saw of it
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
            return None, f"died: {f'killed by {signal.Signals(-code).name}' if code and code < 0 else f'exit code {code}'}"

    def close(self, kill=False):
        """Ends the processes: politely, or at once."""
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
    """A rank's life: joins, then does what comes through the pipe until it closes."""
    torch.set_num_threads(max(1, (os.cpu_count() or 1) // world_size))
    # All ranks are on this machine; the loopback interface needs no host name that resolves.
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
    """One line a rank, and in full what went wrong at the one where, by all signs, it began."""
    silent = f"no answer within {limit:g} s, or 5 s after another rank's failure"
    problems = {rank: problem for rank, (_, problem) in outcomes.items() if problem}  # in the order in which they came in
    problems |= {rank: silent for rank in range(world_size) if rank not in outcomes}

    def how_late(rank):
        """A death comes first, then an error of its own, then silence; an exchange that failed is what the others see of it."""
        problem = problems[rank]
        return 0 if problem.startswith("died") else 3 if "RingError" in problem else 2 if problem == silent else 1

    first = min(problems, key=how_late)
    last_lines = (problems.get(rank, "fine").strip().splitlines()[-1] for rank in range(world_size))
    lines = [f"  rank {rank}: {line}" for rank, line in enumerate(last_lines)]
    return "\n".join([f"rank {first} of {world_size} failed.", *lines, f"rank {first}:", problems[first]])
