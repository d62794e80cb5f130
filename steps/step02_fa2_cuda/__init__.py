"""Stage 02: FlashAttention-2 in CUDA C++, compiled at run time; without a GPU the same files run behind an emulation.

A call goes from here through steps/contract.py (checks, autograd) to calls.py. launches.py makes launch specs out of
the rung's row in ladder.py, and plan.py caches them. A later call goes to its plan, which nvrtc.py or emulator/ runs.
Notebooks: notebooks/02a_fa2_cuda_first_kernels.ipynb to 02e. Tests: tests/test_step02_fa2_cuda.py.
"""

import torch

from steps import contract, engine

from . import calls, ladder, launches

GPU = launches.gpu() if engine.name == "cuda" else (None, None)  # its compute capability and shared memory
RUNGS = {rung: calls.functions(rung) for rung in ladder.available(GPU[0])}
SUPPORTS = {
    "stage": "step02_fa2_cuda",
    "devices": (engine.device,),
    "dtypes": (torch.float32, torch.bfloat16, torch.float16),
    "head_dims": (*range(1, 97), 128, 256),
    "tiles": ladder.limits(*GPU)["scalar"]["tiles"],
    "rungs": tuple(RUNGS),
    "limits": ladder.limits(*GPU),
    "elsewhere": ladder.elsewhere(GPU[0]),
    "own_backward": ladder.OWN_BACKWARD,
    "gqa": True,
    "nq_ne_nk": True,
    "deterministic": False,  # unless it is asked for: rung scalar cannot
    "order": "fa2",  # the order in which tiles are visited, for reference/mutants.py
    "title": "FlashAttention-2 in CUDA C++, forward and backward",
    "notebooks": ("02a_fa2_cuda_first_kernels", "02b_fa2_cuda_tensor_cores", "02c_fa2_cuda_backward",
                  "02d_fa2_cuda_hopper", "02e_fa2_cuda_hopper_backward"),  # fmt: skip
    "minutes": 265,  # to read
}
forward, backward, attention = contract.entry_points(RUNGS, SUPPORTS)
