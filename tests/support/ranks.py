"""Four ranks in which the tests of stage 04 run their workers, one test after the other, and a worker's two passes.

Starting ranks takes longer than most tests, so that all tests of a file share them.
"""

import functools

import pytest
import torch

import steps.step04_ring as step04
from steps.step04_ring import launch
from steps.workbook.case_on_ranks import PlainBlock


@functools.cache
def pool():
    return launch.Ranks(4)


@pytest.fixture(scope="module", autouse=True)
def end_of_pool():
    yield
    if pool.cache_info().currsize:
        pool().close()
        pool.cache_clear()  # Another file in this process starts its own.


def on_ranks(worker, *args):
    """The workers' results by rank; the next call gets new ranks if one failed."""
    try:
        return pool().run(worker, *args, limit=120)
    except launch.RankError:
        pool.cache_clear()
        raise


def both_passes(q, k, v, dout, block=PlainBlock, **options):
    """(out, lse, dq, dk, dv) of the ring, which are those of `attention` too; the inputs have to stay as they are."""
    before = [x.clone() for x in (q, k, v, dout)]
    out, lse = step04.forward(q, k, v, block=block, **options)
    grads = step04.backward(dout, q, k, v, out, lse, block=block, **options)
    leaves = [x.clone().requires_grad_() for x in (q, k, v)]
    step04.attention(*leaves, block=block, **options).backward(dout)
    assert all(torch.equal(x.grad, grad) for x, grad in zip(leaves, grads, strict=True))
    assert all(map(torch.equal, before, (q, k, v, dout))), "an input was overwritten"
    return out, lse, *grads
