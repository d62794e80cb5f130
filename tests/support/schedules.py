"""Every kernel of stage 02 behind the emulation, with its threads, blocks, copies and products in several orders."""

import functools

import torch

from reference import error
from steps.step02_fa2_cuda import calls, emulator

CALLS = {  # kernel: rung, dtype, Nq, Nk, D, tile: several tiles each way, ragged at the end. 96 columns are two slabs
    "fwd_0_scalar": ("scalar", torch.float32, 37, 43, 8, None),
    "fwd_1_warp": ("warp", torch.float32, 70, 100, 32, (64, 32)),
    "fwd_2_mma": ("mma", torch.bfloat16, 70, 100, 32, (64, 32)),
    "fwd_3_ldmatrix": ("ldmatrix", torch.bfloat16, 70, 100, 32, (64, 32)),
    "fwd_4_cp_async": ("cp_async", torch.bfloat16, 70, 100, 32, (64, 32)),
    "fwd_5_fa2": ("fa2", torch.bfloat16, 70, 100, 32, (64, 32)),
    "fwd_6_wgmma": ("wgmma", torch.bfloat16, 150, 150, 96, (128, 32)),
    "fwd_7_roles": ("roles", torch.bfloat16, 150, 450, 96, (128, 32)),  # Each stage is filled seven times.
    "fwd_8_hopper": ("hopper", torch.bfloat16, 150, 150, 64, (128, 32)),
    "bwd_0_scalar": ("scalar", torch.float32, 37, 43, 8, None),
    "bwd_1_fa2": ("fa2", torch.bfloat16, 70, 100, 32, None),
    "bwd_2_wgmma": ("wgmma", torch.bfloat16, 300, 150, 64, None),
    "bwd_3_hopper": ("hopper", torch.bfloat16, 600, 300, 64, None),
}
TIMES = [
    dict(),
    dict(copies="eager", wgmma="late"),
    dict(threads="reverse", copies="eager"),
    dict(threads="reverse", blocks="reverse", copies="lifo", wgmma="lifo"),
    *(dict(threads="random", blocks="random", copies="random", wgmma="random", seed=seed) for seed in (1, 2, 3)),
]
WRONG = "a wrong result"


@functools.cache
def problem(kernel):
    """q, k, v, dout with grouped heads, and the results that are right."""
    _, dtype, Nq, Nk, D, _ = CALLS[kernel]
    rng = torch.Generator().manual_seed(0)
    q, dout = (torch.randn(1, 4, Nq, D, generator=rng).to(dtype) for _ in range(2))
    k, v = (torch.randn(1, 2, Nk, D, generator=rng).to(dtype) for _ in range(2))
    return q, k, v, dout, error.expected(q, k, v, dout, causal=True)


def problems(kernel, **options):
    """What goes wrong in the first schedule in which anything does: the report, or WRONG; "" if all is right."""
    rung, dtype, *_, tile = CALLS[kernel]
    q, k, v, dout, want = problem(kernel)
    saved = want.value["out"].to(dtype), want.value["lse"].float()
    if kernel.startswith("fwd"):
        names, call = error.NAMES[:2], functools.partial(calls.forward, q, k, v, tile=tile)
    else:
        names, call = error.NAMES[2:], functools.partial(calls.backward, dout, q, k, v, *saved)
    for schedule in TIMES:
        try:
            with emulator.schedule(**schedule):
                got = call(rung=rung, causal=True, **options)
        except RuntimeError as e:
            assert "cannot compile" not in str(e)
            return str(e)
        if error.failures(dict(zip(names, got, strict=True)), want):
            return WRONG
    return ""
