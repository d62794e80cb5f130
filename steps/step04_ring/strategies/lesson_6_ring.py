# SPDX-License-Identifier: MIT
"""Lesson 6: ring. Queries stay, and K and V travel from rank to rank, each hop behind a block: lesson 2, N - 1 times.

    for each of N steps:   post the hop | the block of the keys at hand | merge | wait for the hop

The idea: a rank holds the keys of two ranks at any time, whatever N is, and sends to one neighbour only. It sends as
much as when all K and V are gathered, but in N - 1 messages that blocks hide. This is the stage itself: ring.py has the
loop, and layout.py says what each rank computes in each step.

It wins where memory counts, and where a block takes longer than a hop. Where the sequence is short and the ranks are
many, N - 1 messages too small for the link's full rate can make it slower than lessons 3 and 5.
"""

from steps.step04_ring import attention as ring_attention
from steps.step04_ring import launch
from steps.step04_ring.strategies.one_device import differences


def attention(q, k, v, **options):
    """out (B, H, n, D) of this rank's queries, differentiable once: the stage's `attention`, with its options."""
    return ring_attention(q, k, v, **options)


if __name__ == "__main__":
    print(*launch.spawn(differences, 4, attention), sep="\n")
