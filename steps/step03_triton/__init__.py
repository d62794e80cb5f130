"""Stage 03: FlashAttention-2 in Triton; without a GPU in Triton's interpreter.

Notebooks: notebooks/03*.ipynb. Tests: tests/test_step03_*.py.
"""

import torch

from steps import engine

from . import interpreter, options, replay, rungs
from .dropout import dropout_mask, set_deterministic  # noqa: F401  They are public.
from .models import register_with_transformers, use_in_sdpa  # noqa: F401
from .public import functions
from .sdpa import sdpa_of

if engine.name == "cpu":
    interpreter.prepare()
engine.free_after_fork(replay.ONE_AT_A_TIME)  # here, because replay.py imports nothing of steps
GPU = torch.cuda.get_device_capability() if engine.name == "cuda" else None
RUNGS, (DTYPES, HEAD_DIMS) = rungs.available(GPU), options.taken(GPU)
SUPPORTS = {
    "stage": "step03_triton",
    "devices": (engine.device,),
    "dtypes": DTYPES,
    "head_dims": HEAD_DIMS,
    "tiles": ((64, 32), (16, 16), (16, 32), (32, 16), (32, 32)),
    "rungs": tuple(RUNGS),
    "limits": {rung: limits for rung, limits in rungs.LIMITS.items() if rung in RUNGS},
    "elsewhere": {rung: needs for rung, needs in rungs.NEEDS.items() if rung not in RUNGS},
    "own_backward": tuple(rung for rung in RUNGS if rung != "roles"),  # which has tma's backward
    "gqa": True,
    "nq_ne_nk": True,
    "deterministic": "gluon" not in RUNGS,  # unless it is asked for
    "order": "fa2",  # the order in which tiles are visited, for reference/mutants.py
    "title": "FlashAttention-2 fused in Triton",
    "notebooks": ("03a_triton_kernels", "03b_triton_features"),
    "minutes": 90,  # to read
}
forward, backward, attention = functions(RUNGS, SUPPORTS)
sdpa = sdpa_of(attention)  # with the arguments of torch's scaled_dot_product_attention
