"""Stage 04: ring attention. The sequence is divided among several processes or GPUs; keys and values travel in a ring.

Each call takes this rank's shard, and all ranks of the process group call together. Without a process group the ring
has one rank. Start ranks with torchrun and `launch.init()`, or from Python with `launch.spawn`.

    from steps.step04_ring import Layout, attention
    shards = Layout("zigzag", S, ranks)                     # q (B, H, S, D) of the whole sequence
    out = attention(*(shards.shard(x, rank) for x in (q, k, v)), causal=True, layout="zigzag")

Notebooks: notebooks/04a_ring.ipynb and 04b_strategies.ipynb. Tests: tests/test_step04_*.py.
Demo: python -m steps.step04_ring.demo.
"""

from .entry import SUPPORTS, attention, backward, forward
from .layout import Layout
from .ranks import launch
from .ranks.comm import RingError

ring_attention = attention  # the name that other libraries use
__all__ = ["SUPPORTS", "Layout", "RingError", "attention", "backward", "forward", "launch", "ring_attention"]
