"""Runs the kernels of a file of stage 03 at small sizes and compares them with the reference, for NVIDIA's sanitizers.

    python -m tests.support.sanitized_triton bwd_1_tma    prints "4 passed"

Each tensor is an allocation of its own, and inputs and reference are computed on the CPU, as in sanitized_kernels.py.
The kernels have the tiles of their tables, and two query heads share a key head.
"""

import importlib
import itertools
import sys
from unittest import mock

import torch

from reference import error, feature_cases
from steps import engine
from steps.step03_triton import fwd_2_roles, fwd_3_gluon
from steps.step03_triton.features import flash_gluon

from .sanitized_kernels import inputs

HALVES = torch.float16, torch.bfloat16
ALL = torch.float32, *HALVES
# Of each file the dtypes, which take turns, and the head_dims. Rows of 20 numbers do not begin at multiples of 16
# bytes, so that rungs tma and roles take pointers. Rung gluon takes no such rows.
KERNELS = {
    "fwd_0_fused": (ALL, (64, 20)),
    "fwd_1_tma": (HALVES, (64, 20)),
    "fwd_2_roles": (HALVES, (64, 20)),
    "fwd_3_gluon": (HALVES, (64, 72)),
    "bwd_0_fused": (ALL, (64, 20)),
    "bwd_1_tma": (HALVES, (64, 20)),
    "bwd_2_gluon": (HALVES, (64, 128)),
}
# Of the files with features the cases of feature_cases.py, and how many times as long as there with which head_dim.
# decode has a few splits. Of more than 8, all warps hold the sums over the splits, and each stores them to the same
# place to lay them out anew: racecheck calls that a race.
COMBINED = [names for names in feature_cases.COMBINED if "lengths" not in names]
FEATURES = {
    "flash": (COMBINED, 1, 24),
    "decode": ([names for names in feature_cases.CASES if "lengths" in names], 5, 24),
    "flash_gluon": ([("left window", "causal", "sinks"), ("packed", "window"), ("sinks",)], 10, 72),
}


def written(size, alignment, stream):
    """Memory for the descriptors that rung roles makes, filled with zeros.

    A descriptor is stored by `tensormap.cp_fenceproxy`, of which ptxas makes an atomic exchange (ATOMG.EXCH), whose old
    value nobody uses. initcheck takes the exchange for a read.
    """
    return torch.zeros(size, dtype=torch.int8, device="cuda")


def few(device, tiles):
    """How many programs of Gluon's forwards there are, so that each computes several tiles."""
    return min(tiles, 2)


def results(kernel, q, k, v, dout, out, lse, causal):
    """{name: tensor}: the results of a file's kernels; of a backward for the reference's out and lse."""
    module = importlib.import_module(f"steps.step03_triton.{kernel}")
    if hasattr(module, "backward"):
        gradients = module.backward(dout, q, k, v, out, lse, causal=causal)
        return dict(zip(("dq", "dk", "dv"), gradients, strict=True))
    with mock.patch.object(fwd_2_roles, "allocate", written), mock.patch.object(fwd_3_gluon, "SHORT", 0):
        return dict(zip(("out", "lse"), module.forward(q, k, v, causal=causal), strict=True))


def check(kernel, N=261):
    """Runs the kernels of a file with its head_dims, causal and not; how many runs were right."""
    dtypes, head_dims = KERNELS[kernel]
    runs = [(N, D, causal) for D in head_dims for causal in (False, True)]
    if kernel == "fwd_2_roles":
        runs.append((256, 128, False))  # Its warps have roles at such sizes only.
    for (n, D, causal), dtype in zip(runs, itertools.cycle(dtypes), strict=False):
        on_cpu = inputs(D, dtype, n)
        want = error.expected(*on_cpu, causal=causal)
        saved = want.value["out"].to(dtype), want.value["lse"].float()
        got = results(kernel, *(x.to(engine.device) for x in (*on_cpu, *saved)), causal)
        compare(got, want, f"{kernel}, N={n}, D={D}, {dtype}, causal={causal}")
    return len(runs)


def check_features(kernel):
    """The same for a file with features: decode has no backward, and flash_gluon one for sinks alone."""
    module, (cases, n, D) = importlib.import_module(f"steps.step03_triton.features.{kernel}"), FEATURES[kernel]
    for names, dtype in zip(cases, itertools.cycle(HALVES if kernel == "flash_gluon" else ALL), strict=False):
        *on_cpu, options = feature_cases.inputs(names, dtype, n=n, D=D)
        want = feature_cases.expected(*on_cpu, options)
        options = {x: y.to(engine.device) if isinstance(y, torch.Tensor) else y for x, y in options.items()}
        q, k, v, dout = (x.to(engine.device) for x in on_cpu)
        if kernel == "flash":
            got = feature_cases.run(module, q, k, v, dout, options)
        else:
            saved = module.forward(q, k, v, **options)
            grads = module.backward(dout, q, k, v, *saved, **options) if names == ("sinks",) else ()
            got = dict(zip(("out", "lse", "dq", "dk", "dv", "dsinks"), (*saved, *grads), strict=False))
        compare(got, want, f"{kernel}, {names}, {dtype}")
    return len(cases)


def compare(got, want, about):
    bad = error.failures({name: x.cpu() for name, x in got.items()}, want)
    assert not bad, f"{about}: {bad}"


if __name__ == "__main__":
    fwd_3_gluon.programs_for = flash_gluon.programs_for = few
    # Under a sanitizer the CPU's threads would wait for each other, half a minute for one small reference.
    torch.set_num_threads(1)
    kernel = sys.argv[1]
    print(f"{check_features(kernel) if kernel in FEATURES else check(kernel)} passed")
