# SPDX-License-Identifier: MIT
"""Bug hunt 02.bug3: the launcher of bug3.cu, which has the bug."""

from ctypes import c_float, c_int
from pathlib import Path

import torch

from .. import ladder, plan, works

FILE = Path(__file__).with_suffix(".cu")
Br = 64


def forward(q, k, v, *, causal=False, scale=None):
    """(out, lse): q (B, H, Nq, D), k and v (B, H, Nk, D), bfloat16 or float16, D = 64 or 128; out like q.

    lse is (B, H, Nq) in float32.
    """
    B, H, Nq, D = q.shape
    Nk = k.shape[2]
    Bc = 64 if Nk <= 64 else 128
    q, k, v = (x.contiguous().view(1, B * H, -1, D) for x in (q, k, v))
    out, lse = torch.empty_like(q), torch.empty(B, H, Nq, device=q.device)
    scale = D**-0.5 if scale is None else scale
    boxes = works.Box("q", Br), works.Box("k", Bc), works.Box("v", Bc)
    work = works.Work(
        FILE,
        "attention_forward",
        (*boxes, "out", "lse", c_int(Nq), c_int(Nk), c_float(scale), c_int(causal)),
        grid=-(-Nq // Br) * H * B,
        block=2 * Br,
        shared_bytes=2 * (Br + 4 * Bc) * D + 128,
        macros={"T": ladder.MACRO_T[q.dtype], "D": D, "Bc": Bc},
    )
    plan.launch_all([work], {"q": q, "k": k, "v": v, "out": out, "lse": lse})
    return out.view(B, H, Nq, D), lse
