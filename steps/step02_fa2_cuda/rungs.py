# SPDX-License-Identifier: MIT
"""The ladder: which forward and backward a rung's word stands for, and what each takes.

A rung without a backward of its own has the best one below it. Needs torch, kernels.py and hopper.py beside it.
"""

import torch

from . import hopper, kernels

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32


def _without_tile(backward):
    """The backward at its own tile, whatever the forward's is."""

    def call(dout, q, k, v, out, lse, *, causal=False, scale=None, tile=None, deterministic=False):
        return backward(dout, q, k, v, out, lse, causal=causal, scale=scale, deterministic=deterministic)

    call.__module__, call.__name__ = backward.__module__, backward.__name__
    return call


def _hopper_or_fa2(backward):
    """One of Hopper's backwards for the head_dims that they have tiles for, FlashAttention-2's for the others."""

    def call(dout, q, *tensors, deterministic, **options):
        if q.shape[-1] not in hopper.BACKWARD_TILES:
            return kernels.fa2_backward(dout, q, *tensors, deterministic=deterministic, **options)
        if deterministic:  # rung 2 adds to dq in any order
            return hopper.hopper_backward(dout, q, *tensors, deterministic=True, **options)
        return backward(dout, q, *tensors, **options)

    call.__module__, call.__name__ = backward.__module__, backward.__name__
    return call


def _by_dtype(dout, *tensors, **options):
    backward = kernels.scalar_backward if dout.dtype == FP32 else kernels.fa2_backward
    return backward(dout, *tensors, **options)


fa2_backward = _without_tile(kernels.fa2_backward)
LADDER = {  # the best first
    "hopper": (hopper.hopper_forward, _without_tile(_hopper_or_fa2(hopper.hopper_backward))),
    "roles": (hopper.roles_forward, _without_tile(_hopper_or_fa2(hopper.wgmma_backward))),
    "wgmma": (hopper.wgmma_forward, _without_tile(_hopper_or_fa2(hopper.wgmma_backward))),
    "fa2": (kernels.fa2_forward, fa2_backward),
    "cp_async": (kernels.cp_async_forward, fa2_backward),
    "ldmatrix": (kernels.ldmatrix_forward, fa2_backward),
    "mma": (kernels.mma_forward, fa2_backward),
    "warp": (kernels.warp_forward, _without_tile(_by_dtype)),
    "scalar": (kernels.scalar_forward, kernels.scalar_backward),
}
HOPPER, TENSOR_CORES = ("hopper", "roles", "wgmma"), ("fa2", "cp_async", "ldmatrix", "mma")


def available(engine):
    """{rung: (forward, backward)} of what this GPU can run, the best first; in the emulation everything, the simplest first."""
    if engine == "cpu":
        return dict(reversed(LADDER.items()))
    return {rung: kernel for rung, kernel in LADDER.items() if rung not in elsewhere(engine)}


def elsewhere(engine):
    """{rung: what it needs} of those that this GPU cannot run."""
    if engine == "cpu" or torch.cuda.get_device_capability() == (9, 0):
        return {}
    return dict.fromkeys(HOPPER, "a GPU of compute capability 9.0 (H100, H200)")  # newer ones have no wgmma


def limits(engine):
    """What a rung takes where it differs from the stage's SUPPORTS; tiles: some of many; in the emulation one."""
    gpu = engine == "cuda"
    old = gpu and torch.cuda.get_device_capability() < (8, 0)  # bf16 came with sm_80
    half = {"dtypes": (FP16,) if old else (BF16, FP16)}
    memory = torch.cuda.get_device_properties().shared_memory_per_block_optin if gpu else float("inf")
    fits = lambda D: kernels._fa2_backward_bytes(D, *kernels.FA2_BACKWARD_SMALLEST[:2]) <= memory  # noqa: E731
    mma, fa2 = ((64, 64), (32, 64), (64, 32)), ((128, 128), (64, 64), (64, 128), (128, 64))
    hopper_tiles = ((128, 128), (128, 64)) if gpu else ((192, 128),)
    return {
        "scalar": {"dtypes": (FP32,), "head_dims": range(1, 97)},
        "warp": {"dtypes": (FP32, *half["dtypes"]), "head_dims": (32, 64, 96), "tiles": mma if gpu else mma[:1]},
        **{rung: half | {"head_dims": tuple(kernels.MMA_TILES), "tiles": mma if gpu else mma[:1]} for rung in TENSOR_CORES},
        "fa2": half | {"head_dims": tuple(filter(fits, kernels.FA2_TILES)), "tiles": fa2 if gpu else fa2[:1]},
        **{rung: half | {"head_dims": tuple(hopper.TILES), "tiles": hopper_tiles} for rung in HOPPER},
    }
