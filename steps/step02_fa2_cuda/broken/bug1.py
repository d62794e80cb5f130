# SPDX-License-Identifier: MIT
"""Bug hunt 02.bug1: the launcher of bug1.cu, which has the bug."""

from pathlib import Path

import torch

from .. import kernels


def forward(q, k, v, *, causal=False, scale=None):
    """(out, lse): float32 q (B, H, Nq, D), k and v (B, H, Nk, D), D up to 96; out like q, lse (B, H, Nq)."""
    B, H, Nq, D = q.shape
    q, k, v = (x.contiguous() for x in (q, k, v))
    out, lse = torch.empty_like(q), q.new_empty(B, H, Nq)
    _, _, *sizes = kernels._sizes(q, k, causal, scale)
    kernels._launch(
        Path(__file__).with_suffix(".cu"), "attention_forward", (q, k, v, out, lse, *sizes),
        grid=kernels._tiles(Nq, 32) * H * B, block=128, shared_bytes=4 * 2 * 32 * (D + 2), macros={"D": D},
    )  # fmt: skip
    return out, lse
