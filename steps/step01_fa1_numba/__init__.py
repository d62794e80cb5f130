"""Stage 01: FlashAttention-1 in Numba CUDA, on a GPU or in Numba's simulator.

Notebook: notebooks/01_fa1_numba.ipynb. Tests: tests/test_step01_fa1_numba.py.
"""

import torch

from steps import contract, engine

from . import bwd_0_published, fwd_0_published

RUNGS = {"published": (fwd_0_published.forward, bwd_0_published.backward)}
SUPPORTS = {
    "stage": "step01_fa1_numba",
    "devices": (engine.device,),
    "dtypes": (torch.float32, torch.float16),
    "head_dims": range(1, 65),  # the backward's six tiles of D columns must fit 48 KiB of shared memory
    "tiles": ((8, 8), (4, 8), (8, 4)) if engine.name == "cpu" else ((16, 16), (16, 32), (32, 16)),
    "rungs": tuple(RUNGS),
    "gqa": False,
    "nq_ne_nk": True,
    "deterministic": True,
    "order": "fa1",  # the order in which tiles are visited, for reference/mutants.py
    "title": "FlashAttention-1 in Numba CUDA",
    "notebooks": ("01_fa1_numba",),
    "minutes": 45,  # to read
    "hardware": "any; an NVIDIA GPU for its speed",
}
forward, backward, attention = contract.entry_points(RUNGS, SUPPORTS)
