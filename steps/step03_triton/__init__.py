"""Stage 03: FlashAttention-2 in Triton; without a GPU in Triton's interpreter.

    functions.py       forward, backward and attention: begin here
    rungs.py           the table of the kernels fwd_0_fused.py ... fwd_3_gluon.py, bwd_0_fused.py ... bwd_2_gluon.py
    features/          masks, dropout, windows, packed sequences, decoding; torch's function, and whole models
    replay.py          launches a kernel, and repeats its launch quickly

Notebooks: notebooks/03*.ipynb. Tests: tests/test_step03_*.py.
"""

from steps import engine

from . import interpreter, replay
from .features.dropout import dropout_mask, set_deterministic  # noqa: F401  They are public.
from .features.models import register_with_transformers, use_in_sdpa  # noqa: F401
from .features.sdpa import sdpa_of
from .functions import RUNGS, SUPPORTS, attention, backward, forward  # noqa: F401

if engine.name == "cpu":
    interpreter.prepare()
engine.free_after_fork(replay.ONE_AT_A_TIME)  # here, because replay.py imports nothing of steps
sdpa = sdpa_of(attention)  # with the arguments of torch's scaled_dot_product_attention
