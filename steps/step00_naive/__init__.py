"""Stage 00: attention on the CPU in plain Python and torch, from three loops to FlashAttention's tiles.

Notebook: notebooks/00_naive.ipynb. Tests: tests/test_step00_naive.py.
"""

import torch

from steps import contract

from . import bwd_1_matrix, bwd_3_tiled, fwd_0_loops, fwd_1_matrix, fwd_2_online, fwd_3_tiled

RUNGS = {
    "tiled": (fwd_3_tiled.forward, bwd_3_tiled.backward),
    "matrix": (fwd_1_matrix.forward, bwd_1_matrix.backward),
    "online": (fwd_2_online.forward, bwd_1_matrix.backward),
    "loops": (fwd_0_loops.forward, bwd_1_matrix.backward),
}
SUPPORTS = {
    "stage": "step00_naive",
    "devices": ("cpu", "cuda"),
    "dtypes": (torch.float32, torch.float64),
    "head_dims": range(1, 1025),
    "tiles": ((16, 16), (8, 8), (8, 16), (16, 8)),
    "rungs": tuple(RUNGS),
    "own_backward": ("tiled", "matrix"),  # the other two rungs use matrix's backward
    "gqa": False,
    "nq_ne_nk": True,
    "deterministic": True,
    "order": "fa2",  # the order in which tiles are visited, for reference/mutants.py
    "title": "Naive attention, and tiles in plain torch",
    "notebooks": ("00_naive",),
    "minutes": 55,  # to read
}
forward, backward, attention = contract.entry_points(RUNGS, SUPPORTS)
