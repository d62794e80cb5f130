# SPDX-License-Identifier: MIT
"""The rungs of stage 03: which kernels belong to a word, what each takes, and what a machine needs to run them."""

import functools

import torch

from . import bwd_0_fused, bwd_1_tma, bwd_2_gluon, fwd_0_fused, fwd_1_tma, fwd_2_roles, fwd_3_gluon


@functools.wraps(bwd_2_gluon.backward, assigned=("__module__", "__name__"))
def backward_of_gluon(dout, *tensors, tile=None, deterministic=False, **options):
    """The backward of bwd_2_gluon.py, or of rung tma if dq has to be deterministic or head_dim is above 128.

    Both have tiles of their own, which the forward's `tile` does not change.
    """
    return backward_for(dout, deterministic)(dout, *tensors, **options)


def first_of_gluon(dout, *tensors, tile=None, deterministic=False, **options):
    return backward_for(dout, deterministic).first(dout, *tensors, **options)


def backward_for(dout, deterministic):
    return (bwd_1_tma if deterministic or dout.shape[3] > 128 else bwd_2_gluon).backward


backward_of_gluon.first = first_of_gluon


# In the order in which a call that names no rung tries them. Rung tma takes all inputs that rung roles takes. So rung
# roles only runs if a call names it.
RUNGS = {
    "gluon": (fwd_3_gluon.forward, backward_of_gluon),
    "tma": (fwd_1_tma.forward, bwd_1_tma.backward),
    "roles": (fwd_2_roles.forward, bwd_1_tma.backward),
    "fused": (fwd_0_fused.forward, bwd_0_fused.backward),
}
HOPPER = "a Hopper GPU"
AMPERE = "Ampere or newer; float32 up to head_dim 128 from Turing on"
NEEDS = {"gluon": HOPPER, "tma": HOPPER, "roles": HOPPER, "fused": AMPERE}
SIXTEEN_BITS = (torch.float16, torch.bfloat16)
LIMITS = {
    "gluon": {
        "dtypes": SIXTEEN_BITS,
        "head_dims": range(8, 257, 8),
        "best": lambda q, direction: q.ndim > 0 and q.shape[-1] >= 64,
        "tiles": ((128, 64),),
        "deterministic": False,  # unless it is asked for
    },
    "tma": {"dtypes": SIXTEEN_BITS, "deterministic": True},
    "roles": {"dtypes": SIXTEEN_BITS, "deterministic": True},
    "fused": {"deterministic": True},
}


def taken(capability):
    """(dtypes, head_dims) that the kernels take on a GPU of this compute capability; None is Triton's interpreter.

    Triton does not use the tensor cores of GPUs before Ampere. Without them the 16-bit kernels do not fit into the
    registers, nor the larger head_dims into the shared memory.
    """
    if capability and capability[0] < 8:
        return (torch.float32,), range(1, 129)
    return (torch.float32, *SIXTEEN_BITS), range(1, 257)


def taken_on(device):
    """`taken` of a device. A tensor without memory may be on a GPU that this machine does not have."""
    on_gpu = device.type == "cuda" and torch.cuda.is_available()
    return taken(torch.cuda.get_device_capability(device) if on_gpu else None)


def available(capability):
    """{word: (forward, backward)} for a GPU of this compute capability, or without a GPU for Triton's interpreter."""
    if capability is None:  # Gluon does not run in the interpreter. The first rung is the simplest one there.
        words = "fused", "tma", "roles"
    else:
        words = tuple(RUNGS) if capability[0] == 9 else ("fused",)
    return {word: RUNGS[word] for word in words}
