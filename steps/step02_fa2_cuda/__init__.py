"""Stage 02: FlashAttention-2 in CUDA C++, compiled at run time; without a GPU the same files run behind an emulation.

Notebooks: notebooks/02a_fa2_cuda_first_kernels.ipynb to 02d. Tests: tests/test_step02_fa2_cuda.py.
"""

import torch

from steps import contract, engine

from . import rungs

RUNGS = rungs.available(engine.name)
SUPPORTS = {
    "stage": "step02_fa2_cuda",
    "devices": (engine.device,),
    "dtypes": (torch.float32, torch.bfloat16, torch.float16),
    "head_dims": (*range(1, 97), 128, 256),
    "tiles": ((64, 32), (32, 32), (32, 64)) if engine.name == "cuda" else ((16, 16), (8, 16), (16, 8)),
    "rungs": tuple(RUNGS),
    "limits": rungs.limits(engine.name),
    "elsewhere": rungs.elsewhere(engine.name),
    "gqa": True,
    "nq_ne_nk": True,
    "deterministic": False,  # unless it is asked for: rung scalar cannot
    "order": "fa2",  # the order in which tiles are visited, for reference/mutants.py
    "title": "FlashAttention-2 in CUDA C++, forward and backward",
    "notebooks": (
        "02a_fa2_cuda_first_kernels",
        "02b_fa2_cuda_tensor_cores",
        "02c_fa2_cuda_backward",
        "02d_fa2_cuda_hopper",
    ),
    "minutes": 150,  # to read
    "hardware": "any with g++; an NVIDIA GPU for its speed",
}
forward, backward, attention = contract.entry_points(RUNGS, SUPPORTS)
