# SPDX-License-Identifier: MIT
"""Plans: what is prepared once for a layout of inputs and cached, so that a later call only passes new addresses.

    Plan                     the launches of one layout, and which of the inputs have to be copied before each call
    attend, differentiate    a forward and a backward by a plan, with the memory for their results
    bind, launch_all         launch specs as launches, on a GPU or in the emulation
"""

from ctypes import c_void_p
from functools import partial

import torch

from . import nvrtc
from .launches import Box, strides_of


class Plan:
    """The launches for inputs of one layout, and which of the inputs have to be copied before each call."""

    def __init__(self, problem, copies, specs):
        """copies: {name of an input: the function that copies it before each call}. specs: the launches as data."""
        self.problem, self.copies, self.specs = problem, copies, specs
        self.launches = None

    def run(self, tensors):
        """Launches on these tensors, {name: tensor}; a name without a tensor is None."""
        for name, copy in self.copies.items():
            tensors[name] = copy(tensors[name])
        if self.launches is None:
            self.launches = bind(self.specs, tensors)
        for launch in self.launches:
            launch(tensors)


def attend(plan, q, k, v):
    """(out, lse) by a plan."""
    B, H, Nq, D = q.shape  # The sizes are handed over one by one, because a whole shape doubles the time of new_empty.
    out = q.new_empty(B, H, Nq, D)
    lse = q.new_empty(B, H, Nq, dtype=torch.float32)
    plan.run({"q": q, "k": k, "v": v, "out": out, "lse": lse})
    return out, lse


def differentiate(plan, dout, q, k, v, out, lse):
    """(dq, dk, dv) by a plan."""
    problem = plan.problem
    if problem.row.adds_to_dq:
        dq, sums = q.new_zeros(q.shape), {"delta": q.new_empty(q.shape[:3])}
    else:
        dq, sums = torch.empty_like(q, memory_format=torch.contiguous_format), Sums(problem).tensors
    dk, dv = differentiate_keys(plan, sums, {"dout": dout, "q": q, "k": k, "v": v, "out": out, "lse": lse, "dq": dq})
    return dq, dk, dv


def differentiate_keys(plan, sums, tensors):
    """(dk, dv) (B, Hk, Nk, D) by a plan; the keys' part of dq is added to dq, or to dq_sum, in `sums`."""
    problem, k = plan.problem, tensors["k"]
    B, _, Nk, D = k.shape
    # If a block computes only one query head (heads_apart), the kernel writes a part of dk and dv for each query head.
    dk, dv = (k.new_empty(B, problem.gradient_heads, Nk, D) for _ in range(2))
    plan.run(tensors | sums | {"counters": zero_counters(problem), "dk": dk, "dv": dv})
    if problem.gradient_heads == problem.Hk:
        return dk, dv
    return tuple(x.unflatten(1, (problem.Hk, -1)).sum(2) for x in (dk, dv))  # in float32, in a fixed order


class Sums:
    """The tensors that the parts of a backward share, for one call's queries, padded to whole tiles of Br rows.

    tensors: {name: a float32 tensor}. lse_2 (B, H, rows): lse in base 2. delta (B, H, rows): the row sums of
    dout * out. dq_sum (B, H, rows, D): the sum over keys that becomes dq, in the order of the kernel's registers.
    """

    def __init__(self, problem):
        self.problem = problem
        rows = problem.B, problem.H, problem.query_rows
        like = dict(dtype=torch.float32, device=problem.device)
        new_dq = torch.empty if problem.row.zeroes_dq else torch.zeros
        self.dq_sum = new_dq(*rows, problem.D, **like)
        self.tensors = {"lse_2": torch.empty(rows, **like), "delta": torch.empty(rows, **like), "dq_sum": self.dq_sum}


def zero_counters(problem):
    """Counters by which the blocks add to dq in a fixed order; None if dq need not be bit-equal from run to run."""
    if not problem.deterministic:
        return None
    tiles = problem.B * problem.H * problem.query_tiles
    return torch.zeros(1 + tiles, dtype=torch.int32, device=problem.device)


# ---- launch specs as launches ----------------------------------------------------------------------------------------


def launch_all(specs, tensors):
    """Launches these one after the other on these tensors, {name: tensor}."""
    for launch in bind(specs, tensors):
        launch(tensors)


def bind(specs, tensors):
    """A function of {name: tensor} for each spec. On a GPU this compiles; the emulation compiles at the first call."""
    device = next(iter(tensors.values())).device
    if device.type == "cpu":
        return [partial(emulate, spec) for spec in specs]
    nvrtc.bind_context(device.index)  # A tensor map needs a context, and a thread that has not used CUDA has none.
    arguments = [[on_gpu(argument, tensors) for argument in spec.arguments] for spec in specs]
    return [
        nvrtc.Launch(**vars(spec) | {"arguments": given}, device=device.index)
        for spec, given in zip(specs, arguments, strict=True)
    ]


def on_gpu(argument, tensors):
    """(name of the tensor whose address goes there at each run, or None; the value that the kernel gets)."""
    if isinstance(argument, Box):
        return argument.name, nvrtc.tensor_map(*view_and_box(tensors[argument.name], argument.rows))
    return (argument, c_void_p()) if isinstance(argument, str) else (None, argument)


def emulate(spec, tensors):
    """Runs one kernel on the CPU."""
    from . import emulator

    arguments = []
    for argument in spec.arguments:
        if isinstance(argument, Box):
            argument = emulator.tensor_map(*view_and_box(tensors[argument.name], argument.rows))
        elif isinstance(argument, str):
            argument = c_void_p(None) if tensors[argument] is None else tensors[argument]
        arguments.append(argument)
    emulator.launch(**vars(spec) | {"arguments": arguments})


def view_and_box(x, rows):
    """(view, box) of a tensor map by which the copy engine moves `rows` rows of one head of x (B, H, N, D).

    In shared memory they lie as ceil(D / 64) slabs of 128-byte rows. A kernel's coordinates are (0, row, 0, head,
    batch). If 64 does not divide D, a copy brings one slab, and the coordinates are (64 * slab, row, 0, head, batch).
    """
    B, H, N, D = x.shape
    batch, head, row = strides_of(x)
    slabs, columns = (D // 64, 64) if D % 64 == 0 else (1, D)
    return x.as_strided((B, H, slabs, N, columns), (batch, head, 64, row, 1)), (1, 1, slabs, rows, 64)
