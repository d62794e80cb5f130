"""Stage 03: FlashAttention-2 in Triton; without a GPU in Triton's interpreter.

Notebook: notebooks/03_triton.ipynb. Tests: tests/test_step03_triton.py.
"""

import torch

from steps import contract, engine

from . import bwd_0_fused, fwd_0_fused
from .sdpa import sdpa_of

RUNGS = {"fused": (fwd_0_fused.forward, bwd_0_fused.backward)}
SUPPORTS = {
    "stage": "step03_triton",
    "devices": (engine.device,),
    "dtypes": (torch.float32, torch.float16, torch.bfloat16),
    "head_dims": range(1, 257),
    "tiles": ((64, 32), (16, 16), (16, 32), (32, 16), (32, 32)),
    "rungs": tuple(RUNGS),
    "own_backward": tuple(RUNGS),
    "gqa": True,
    "nq_ne_nk": True,
    "deterministic": True,
    "order": "fa2",  # the order in which tiles are visited, for reference/mutants.py
    "title": "FlashAttention-2 fused in Triton",
    "notebooks": ("03_triton",),
    "minutes": 45,  # to read
    "hardware": "Linux; an NVIDIA GPU for its speed",
}
forward, backward, attention = contract.entry_points(RUNGS, SUPPORTS)
sdpa = sdpa_of(attention)  # with the arguments of torch's scaled_dot_product_attention
