"""Runs a case of the contract on stage 04: shards the sequence over several ranks and gathers their results.

`outputs` does so on ranks that a caller has started; tests/test_step04_ring.py keeps its own. `on_new_ranks` starts
ranks for one case, for a check of an exercise.
"""

import functools
import multiprocessing
import os
import pickle
import sys
import tempfile
import time
from datetime import timedelta
from multiprocessing.connection import wait
from pathlib import Path
from types import SimpleNamespace

import torch
import torch.distributed as dist

from reference import cases
from steps import engine, step04_ring
from steps.course.workbook.failure import account
from steps.step00_naive import bwd_3_tiled, fwd_3_tiled
from steps.step04_ring import Layout

PATIENCE = timedelta(seconds=20)  # the longest that one exchange between ranks may take


class PlainBlock:
    """A block for stage 04 that is faster than Triton's interpreter: stage 00's tiles in float32, with grouped heads.

    What it returns is rounded to the dtype of q, as by the default block.
    """

    @staticmethod
    def forward(q, k, v, **options):
        out, lse = fwd_3_tiled.forward(q.float(), *(repeat_heads(x.float(), q) for x in (k, v)), **options)
        return out.to(q.dtype), lse

    @staticmethod
    def backward(dout, q, k, v, out, lse, **options):
        repeated = (repeat_heads(x.float(), q) for x in (k, v))
        dq, *dkv = bwd_3_tiled.backward(dout.float(), q.float(), *repeated, out.float(), lse, **options)
        if q.shape[1] != k.shape[1]:
            dkv = (x.unflatten(1, (k.shape[1], -1)).sum(2) for x in dkv)
        return tuple(x.to(q.dtype) for x in (dq, *dkv))


def repeat_heads(x, q):
    """k or v with each head repeated until it has as many heads as q."""
    return x if x.shape[1] == q.shape[1] else x.repeat_interleave(q.shape[1] // x.shape[1], 1)


def outputs(run, members, layout, case, inputs, **options):
    """{name: tensor}: the results for the whole sequence.

    run(run_shard, *arguments) calls run_shard on every rank and returns a list of what each rank returned. members: the
    ranks of the world that share the sequence. options: block and S, as stage 04's functions take them.
    """
    tensors = [x.cpu() for x in (inputs.q, inputs.k, inputs.v, inputs.dout)]
    shards = run(run_shard, members, layout, tensors, case.place, case.through_autograd, inputs.options | options)
    whole = Layout(layout, inputs.q.shape[2], len(members))
    names = shards[members[0]]
    return {name: whole.unshard([shards[r][name] for r in members], dim=2).to(engine.device) for name in names}


def run_shard(members, layout, tensors, place, through_autograd, options):
    """One rank's part of a case: runs stage 04 on its shards of q, k, v and dout, returns its shards of the results.

    The shards are embedded in NaN again, as the whole tensors of the case were.
    """
    group = group_of(members)
    if dist.get_rank() not in members:
        return None
    H, S = tensors[0].shape[1:3]
    if place == "expanded":
        tensors = [x[:, :1] if i in (1, 2) else x for i, x in enumerate(tensors)]
    whole = Layout(layout, S, len(members))
    own = [whole.shard(x, dist.get_rank(group)).to(engine.device) for x in tensors]
    shards = [cases.surround_with_nan(x, place, name) for x, name in zip(own, ("q", "k", "v", "dout"), strict=True)]
    if place == "expanded":
        shards = [x.expand(-1, H, -1, -1) for x in shards]
    before = [x.clone() for x in shards]
    more = {"layout": layout, "group": group} | {name: options[name] for name in ("S", "block")}
    names = "forward", "backward", "attention"
    stage = SimpleNamespace(**{name: functools.partial(getattr(step04_ring, name), **more) for name in names})
    inputs = cases.Inputs(*shards, options["causal"], options["scale"], options.get("tile"))
    case = cases.Case("shard", "a rank's part", through_autograd=through_autograd, place=place)
    results = cases.run(stage, case, inputs)
    for x, y in zip(before, shards, strict=True):
        if not torch.equal(x.nan_to_num(), y.nan_to_num()):
            raise AssertionError("an input was overwritten")
    return {name: x.cpu() for name, x in results.items()}


@functools.cache
def group_of(members):
    """The process group of these ranks of the world. Every rank has to ask for the same groups in the same order."""
    return dist.new_group(list(members))


class RankFailed(Exception):
    """An exception of a rank. Its `account` is what failure.account returned in that rank."""

    def __init__(self, account):
        super().__init__(account["message"])
        self.account = account


def on_new_ranks(case, inputs):
    """`outputs` on new ranks. Their number and the layout are those of inputs.ring. Raises RankFailed.

    Without a GPU the ranks are forked from this process, which saves them all imports. With a GPU they are started
    anew, because CUDA does not survive a fork.
    """
    ranks, layout = inputs.ring
    context = multiprocessing.get_context("fork" if engine.name == "cpu" else "spawn")

    def run(*task):
        pipes, processes = [], []
        with tempfile.TemporaryDirectory() as folder:
            for rank in range(ranks):
                ours, theirs = context.Pipe()
                job = theirs, rank, ranks, os.path.join(folder, "store"), task
                processes.append(context.Process(target=_rank, args=job, daemon=True))
                processes[-1].start()
                pipes.append(ours)
            try:
                return _collect(pipes)
            finally:
                for process in processes:
                    process.kill()
                    process.join()

    return outputs(run, tuple(range(ranks)), layout, case, inputs, block=PlainBlock, S=None)


def _rank(pipe, rank, ranks, store, task):
    """A rank's process. It joins the others, does the task and sends (result, None), or (None, account) if it fails."""
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo0" if sys.platform == "darwin" else "lo")
    step04_ring.merge.KERNELS = False  # On a GPU, too, the results are to depend on the functions of an exercise.
    try:
        store = dist.FileStore(store, ranks)
        dist.init_process_group("gloo", store=store, rank=rank, world_size=ranks, timeout=PATIENCE)
        worker, *args = task
        answer = worker(*args), None
    except Exception as e:
        answer = None, account(e, Path(step04_ring.__file__).parents[2])
    pipe.send_bytes(pickle.dumps(answer))  # send() would put tensors into shared memory, which ends with this process.
    pipe.recv()  # The rank waits to be killed. If it ended now, the others would lose their connections to it.


def _collect(pipes):
    """The list of the ranks' results. Raises RankFailed if there was an exception in one.

    When one rank fails, its neighbours report a RingError. The exception that caused it is therefore preferred to a
    RingError.
    """
    answers = {}
    deadline = None
    while len(answers) < len(pipes):
        waiting = [pipe for pipe in pipes if pipe not in answers]
        ready = wait(waiting, None if deadline is None else max(0, deadline - time.monotonic()))
        if not ready:
            break
        for pipe in ready:
            answers[pipe] = pickle.loads(pipe.recv_bytes())
            if answers[pipe][1] and answers[pipe][1]["type"] != "RingError":
                deadline = time.monotonic()
    problems = [problem for _, problem in answers.values() if problem]
    causes = [problem for problem in problems if problem["type"] != "RingError"]
    if problems:
        raise RankFailed((causes or problems)[0])
    return [answers[pipe][0] for pipe in pipes]
