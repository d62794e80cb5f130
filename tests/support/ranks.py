"""Four ranks in which the tests of stage 04 run their workers, one test after the other. Test files import both names.

Starting ranks takes longer than most tests, so that all tests of a file share them.
"""

import functools

import pytest

from steps.step04_ring import launch


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
