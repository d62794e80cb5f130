"""Four ranks in which the tests of stage 04 run their workers, one test after the other, and a worker's two passes.

Starting ranks takes longer than most tests, so that all tests of a file share them.
"""

import functools
import inspect

import pytest
import torch
import torch.distributed as dist

import steps.step04_ring as step04
from steps import engine
from steps.course.workbook.case_on_ranks import PlainBlock
from steps.step04_ring import launch

ON_FETCH = pytest.mark.skipif(
    engine.name == "cuda" and torch.cuda.device_count() < 4, reason="fetch needs a GPU for each of the 4 ranks"
)


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


def in_every_rank(test):
    """A test that runs in each of the ranks, and fails where it fails in one. Its monkeypatch is the rank's own."""

    @functools.wraps(test)
    def either(**arguments):
        arguments.pop("monkeypatch", None)
        if not dist.is_initialized():
            on_ranks(functools.partial(either, **arguments))
            return
        with pytest.MonkeyPatch.context() as patch:
            own = {"monkeypatch": patch} if "monkeypatch" in inspect.signature(test).parameters else {}
            test(**arguments, **own)

    return either


def shards(n=5, dtype=torch.float32):
    """q, k, v and dout (1, 2, n, 8) of this rank."""
    random = torch.Generator().manual_seed(dist.get_rank())
    return [torch.randn(1, 2, n, 8, generator=random).to(engine.device, dtype) for _ in range(4)]


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
