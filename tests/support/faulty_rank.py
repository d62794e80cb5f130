"""One rank of several, of which one, the culprit, fails: what tests/test_step04_faults.py starts.

    kill, stop    it sends itself SIGKILL, or SIGSTOP            sleep    it sleeps for a minute
    kill later    it sends itself SIGKILL after the first hop of a call has begun, so that all ranks stand at that hop
    leave         it ends, with exit code 3, as if it had made all its calls
    differ        it makes a call that all ranks have made before, but now make no more
    none          it goes on like the others                     on       all go on for ever

`fail` is a worker for launch.Ranks. As a program, python -m support.faulty_rank HOW TRANSPORT TIMEOUT CULPRIT, this is
what a launcher starts, with the rank in its environment.
"""

import os
import signal
import sys
import time
from datetime import timedelta
from types import SimpleNamespace

import torch
import torch.distributed as dist

from steps import engine, step00_naive
from steps.step04_ring import Layout, forward, launch


def fail(how, transport, timeout, who):
    """Three calls together; then one rank fails, and the others make two more."""
    rank, ranks, group = dist.get_rank(), dist.get_world_size(), None
    if engine.name == "cpu":  # The world has a longer timeout, because many processes may start at once.
        dist.barrier()
        group = dist.new_group(timeout=timedelta(seconds=timeout))
    S = 4 * ranks
    x = torch.zeros(1, 1, Layout("zigzag", S, ranks).size(rank), 16, device=engine.device)

    def call(layout, block=step00_naive):
        forward(x, x, x, layout=layout, S=S, block=block, transport=transport, group=group)
        if x.is_cuda:
            torch.cuda.synchronize()

    for layout in ("zigzag", "contiguous", "zigzag"):
        call(layout)
    dist.barrier()
    time.sleep(0.6)  # until the third call has been published
    print("begun", flush=True)
    culprit = rank == who
    if culprit:
        failing(how)
    while how == "on":
        call("zigzag")
    for _ in range(2):
        block = SimpleNamespace(forward=die_later) if culprit and how == "kill later" else step00_naive
        call("contiguous" if culprit and how == "differ" else "zigzag", block)


def die_later(*inputs, **options):
    time.sleep(0.6)  # until the hop has been published
    failing("kill")


def failing(how):
    if how in ("kill", "stop"):
        os.kill(os.getpid(), signal.SIGKILL if how == "kill" else signal.SIGSTOP)
    if how == "sleep":
        time.sleep(60)
    if how == "leave":
        os._exit(3)


def main(how, transport, timeout, who):
    """The process starts with a timeout that is long enough for a busy machine, but over NCCL the timeout stays."""
    launch.init(timeout=float(timeout) if engine.name == "cuda" else 60)
    fail(how, transport, float(timeout), int(who))
    print("ended", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main(*sys.argv[1:])
