# SPDX-License-Identifier: MIT
"""Bug hunt 02.bug2: the launcher of bug2.cu, which has the bug."""

from ctypes import c_int
from pathlib import Path

import torch

from .. import kernels

Br, Bc = 32, 16


def forward(q, k, v, *, causal=False, scale=None):
    """(out, lse): float32 q (B, H, Nq, D), k and v (B, H, Nk, D), D a multiple of 4 up to 64; out like q, lse (B, H, Nq)."""
    B, H, Nq, D = q.shape
    q, k, v = (x.contiguous() for x in (q, k, v))
    out, lse = torch.empty_like(q), q.new_empty(B, H, Nq)
    _, _, *sizes = kernels._sizes(q, k, causal, scale)
    at_once = torch.cuda.get_device_properties(q.device).multi_processor_count if q.is_cuda else 4
    kernels._launch(
        Path(__file__).with_suffix(".cu"), "attention_forward", (q, k, v, out, lse, c_int(H * B), *sizes),
        grid=min(at_once, kernels._tiles(Nq, Br) * H * B), block=Br + 32, shared_bytes=16 * Bc * D + 32,
        macros={"D": D, "Br": Br, "Bc": Bc},
    )  # fmt: skip
    return out, lse
