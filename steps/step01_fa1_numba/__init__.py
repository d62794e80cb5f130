"""Stage 01: FlashAttention-1 in Numba CUDA, on a GPU or in Numba's simulator.

Notebook: notebooks/01_fa1_numba.ipynb. Tests: tests/test_step01_fa1_numba.py.
"""

import torch

from steps import contract, engine

from . import bwd_0_published, bwd_2_registers, fwd_0_published, fwd_1_loops_swapped, fwd_2_registers, limits

RUNGS = {
    "registers": (fwd_2_registers.forward, bwd_2_registers.backward),
    "loops_swapped": (fwd_1_loops_swapped.forward, bwd_0_published.backward),
    "published": (fwd_0_published.forward, bwd_0_published.backward),
}
if engine.name == "cpu":  # The first rung is the default: the fastest on a GPU, here the one with the fewest barriers.
    from . import simulator  # It imports what is there only where kernels are simulated.

    simulator.prepare()
    RUNGS = dict(reversed(RUNGS.items()))
SUPPORTS = {
    "stage": "step01_fa1_numba",
    "devices": (engine.device,),
    "dtypes": (torch.float32, torch.float16),
    "head_dims": range(1, 129),  # on a GPU a thread's patch of O has D / 8 or D / 16 columns, at most 8
    "tiles": ((8, 8), (8, 16), (16, 8)) if engine.name == "cpu" else ((128, 64), (16, 16), (16, 32), (32, 16)),
    "rungs": tuple(RUNGS),
    "limits": limits.LIMITS,
    "own_backward": ("registers", "published"),  # loops_swapped uses published's backward
    "gqa": False,
    "nq_ne_nk": True,
    "deterministic": True,
    "order": "fa1" if engine.name == "cpu" else "fa2",  # the default rung's order of tiles, for reference/mutants.py
    "title": "FlashAttention-1 in Numba CUDA",
    "notebooks": ("01_fa1_numba",),
    "minutes": 60,  # to read
}
forward, backward, attention = contract.entry_points(RUNGS, SUPPORTS)
