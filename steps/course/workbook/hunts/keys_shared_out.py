# SPDX-License-Identifier: MIT
"""Bug hunt 02.bug1: the launcher of keys_shared_out.cu."""

from ctypes import c_float, c_int
from pathlib import Path

import torch

from steps.step02_fa2_cuda import launches, plan

FILE = Path(__file__).with_suffix(".cu")


def forward(q, k, v, *, causal=False, scale=None):
    """(out, lse): float32 q (B, H, Nq, D), k and v (B, H, Nk, D), D up to 96; out like q, lse (B, H, Nq)."""
    B, H, Nq, D = q.shape
    q, k, v = (x.contiguous() for x in (q, k, v))
    out, lse = torch.empty_like(q), q.new_empty(B, H, Nq)
    scale = D**-0.5 if scale is None else scale
    spec = launches.LaunchSpec(
        FILE,
        "attention_forward",
        ("q", "k", "v", "out", "lse", c_int(Nq), c_int(k.shape[2]), c_float(scale), c_int(causal)),
        grid=-(-Nq // 32) * H * B,
        block=128,
        shared_bytes=4 * 2 * 32 * (D + 2),
        macros={"D": D},
    )
    plan.launch_all([spec], {"q": q, "k": k, "v": v, "out": out, "lse": lse})
    return out, lse
