# SPDX-License-Identifier: MIT
"""Launches as data (launch specs): file, kernel, arguments and grid of each launch of a rung, by its row in ladder.py.

    problem_of                                     the sizes and options of a call on these tensors
    forward_launches, backward_launches            all launches of a forward, and of a backward
    delta_launches, gradient_launches, dq_launches those of the parts of a backward

Nothing is launched here; plan.py does that. For another launch, change a LaunchSpec with dataclasses.replace first.
"""

import functools
import math
from ctypes import c_float, c_int, c_longlong
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch

from .ladder import Problem
from .tile_scheduler import order_of_key_tiles, order_of_tiles

HERE = Path(__file__).parent  # where the .cu files are
DELTA_THREADS = 128  # of rung scalar's attention_delta, each for one row
MOST = 2**31 - 2**16  # kernels count rows, tiles and blocks in 32 bits, and sometimes add a tile or a round to a count


@dataclass(frozen=True)
class LaunchSpec:
    """The spec of one launch of one kernel. An argument is a tensor's name, a Box of a tensor, or a ctypes value."""

    file: Path
    kernel: str
    arguments: tuple
    grid: int  # blocks
    block: int  # threads of a block
    shared_bytes: int
    macros: dict


@dataclass(frozen=True)
class Box:
    """The tensor map of a tensor (B, H, N, D), by which the copy engine moves so many rows of one head at a time."""

    name: str
    rows: int


def problem_of(row, q, k, causal=False, scale=None, tile=None, deterministic=False, switches=()):
    """The Problem of a call on these tensors. switches: pairs (macro, value)."""
    (B, H, Nq, D), (Hk, Nk) = q.shape, k.shape[1:3]
    check_count("queries and keys", Nq + Nk)
    switches = tuple([(name, int(value)) for name, value in switches])
    Br, Bc = tile or row.tile(D, shared_memory(q.device))
    scale = D**-0.5 if scale is None else scale
    how = q.dtype, causal, scale, Br, Bc, processors(q.device), q.device, deterministic, switches
    return Problem(row, B, H, Hk, Nq, Nk, D, *how).settled()


def check_count(what, number):
    """ValueError unless a kernel can count to this number."""
    if number > MOST:
        raise ValueError(f"{number} {what} are more than a kernel can count ({MOST}). Split the batch or the queries.")


@functools.cache
def processors(device):
    """How many multiprocessors the GPU has; 3 in the emulation, so that a persistent block gets several tiles."""
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 3


@functools.cache
def shared_memory(device):
    """Bytes of shared memory that a block can have; None in the emulation, which takes the smallest tiles."""
    return torch.cuda.get_device_properties(device).shared_memory_per_block_optin if device.type == "cuda" else None


def gpu():
    """((major, minor) compute capability, bytes of shared memory that a block can have) of the current GPU."""
    device = torch.device("cuda", torch.cuda.current_device())
    return torch.cuda.get_device_capability(device), shared_memory(device)


# ---- what a plan is made of ------------------------------------------------------------------------------------------


def prepared(problem, make_launches, **inputs):
    """(the Problem, {input: the function that copies it before each call}, the launches), as Plan takes them."""
    copies = {}
    strides = {}
    for name, x in inputs.items():
        copy = copy_needed(problem, name, x)
        if copy:
            copies[name] = copy
            x = copy(x.to("meta"))  # A copy of a tensor without memory has the strides that the real copy will have.
        strides[name] = strides_of(x)
    return problem, copies, make_launches(problem, strides)


# ---- inputs that a kernel cannot read where they lie -----------------------------------------------------------------


def copy_needed(problem, name, x):
    """A function that copies an input which the kernel cannot read where it lies; None if it can."""
    if name in ("k", "v") and problem.row.repeats_heads and problem.H > problem.Hk:
        return partial(torch.Tensor.repeat_interleave, repeats=problem.H // problem.Hk, dim=1)
    if can_read(problem.row, name, x):
        return None
    return partial(torch.Tensor.clone, memory_format=torch.contiguous_format)


def can_read(row, name, x):
    """Whether the kernel can read x where it lies.

    It cannot where rows are not contiguous, or where torch negates a tensor only when torch reads it, such as
    z.conj().imag. Loads of 16 bytes and the copy engine need every row to begin at a multiple of 16 bytes, and the copy
    engine refuses strides of 0. The stride of a dimension of size 1 does not matter.
    """
    if x.is_neg():
        return False
    if name == "lse":
        return x.is_contiguous()
    if x.stride(3) != 1:
        return False
    if row.loads == "elements":
        return True
    strides = [stride * x.element_size() for stride, n in zip(x.stride()[:3], x.shape, strict=False) if n > 1]
    aligned = x.data_ptr() % 16 == 0 and all(stride % 16 == 0 for stride in strides)
    return aligned and (row.loads != "tma" or 0 not in strides)


def strides_of(x):
    """The strides of batch, head and row in elements. A dimension of size 1 gets the stride of whole rows.

    A kernel also computes the addresses of rows beyond the last one. It does not read them, but they must be aligned.
    """
    strides = list(x.stride()[:3])
    for n, size in enumerate(x.shape[:3]):
        if size < 2:
            strides[n] = x.shape[-1]
    return tuple(strides)


# ---- the launches ----------------------------------------------------------------------------------------------------


def forward_launches(problem, strides):
    """The one launch of a forward. strides: {name: those of batch, head and row, in elements}."""
    outputs = "out", "lse", *heads_and_lengths(problem), c_float(problem.scale)
    tiles = problem.query_tiles * problem.H * problem.B
    check_count("tiles", tiles)
    if problem.row.loads != "tma":
        arguments = *strided(("q", "k", "v"), strides), *outputs, c_int(problem.causal)
        return [launch_spec(problem, "attention_forward", arguments, tiles)]
    arguments = Box("q", problem.Br), Box("k", problem.Bc), Box("v", problem.Bc), *outputs
    if not problem.row.persistent:
        return [launch_spec(problem, "attention_forward", arguments, tiles)]
    persistent = problem.macros.get("PERSISTENT", 1)
    lowest = -3.4e38 / max(1, problem.scale / math.log(2))  # where a row's maximum starts; the kernel says why
    further = c_float(lowest), c_int(tiles), *map(c_int, order_of_tiles(problem))
    blocks = min(tiles, problem.processors) if persistent else tiles
    return [launch_spec(problem, "attention_forward", (*arguments, *further), blocks)]


def backward_launches(problem, strides):
    """The launches of a whole backward."""
    if problem.row.adds_to_dq:
        return scalar_backward_launches(problem, strides)
    return [*delta_launches(problem, strides), *gradient_launches(problem, strides), *dq_launches(problem, strides)]


def scalar_backward_launches(problem, strides):
    """Delta, then all gradients, for a kernel that adds to dq itself. Here k and v have as many heads as q."""
    H, Nq, Nk = c_int(problem.H), c_int(problem.Nq), c_int(problem.Nk)
    arguments = *strided(("dout", "out"), strides), "delta", c_int(problem.B), H, Nq
    blocks = -(-problem.B * problem.H * problem.Nq // DELTA_THREADS)
    delta = launch_spec(problem, "attention_delta", arguments, blocks, DELTA_THREADS, shared_bytes=0)
    results = "lse", "delta", "dq", "dk", "dv", H, Nq, Nk, c_float(problem.scale), c_int(problem.causal)
    arguments = *strided(("dout", "q", "k", "v"), strides), *results
    blocks = problem.key_tiles * problem.gradient_heads * problem.B
    return [delta, launch_spec(problem, "attention_backward", arguments, blocks)]


def delta_launches(problem, strides):
    """delta = the row sums of dout * out, and lse in base 2. A kernel that `zeroes_dq` sets dq_sum to 0 as well."""
    arguments = *strided(("dout", "out"), strides), "lse", "lse_2", "delta"
    numbers = c_int(problem.H), c_int(problem.Nq)
    if problem.row.zeroes_dq:
        blocks = problem.query_tiles
        arguments = *arguments, "dq_sum", *numbers
    else:
        rows_of_a_block = 16 if problem.D == 96 else 2048 // problem.D  # 256 threads take 8 numbers each
        blocks = -(-problem.query_rows // rows_of_a_block)
        arguments = *arguments, *numbers, c_int(problem.query_rows)
    return [launch_spec(problem, "attention_delta", arguments, blocks * problem.H * problem.B, 256, shared_bytes=0)]


def gradient_launches(problem, strides):
    """dk and dv of the keys, and the keys' part of dq."""
    numbers = *heads_and_lengths(problem), c_float(problem.scale), c_int(problem.causal)
    sums = "lse_2", "delta", "dq_sum"
    counters = ("counters",) if problem.row.in_order else ()
    if problem.row.loads == "tma":
        Br, Bc = problem.Br, problem.Bc
        boxes = Box("dout", Br), Box("q", Br), Box("k", Bc), Box("v", Bc), Box("dk", 16), Box("dv", 16)
        arguments = *boxes, *sums, *counters, *numbers
    else:
        tensors = *strided(("dout", "q", "k", "v"), strides), *sums, "dk", "dv", *counters
        arguments = *tensors, *numbers, c_int(problem.deterministic)
    tiles = problem.key_tiles * problem.gradient_heads * problem.B
    check_count("tiles", tiles)
    if not problem.row.persistent:
        return [launch_spec(problem, "attention_backward", arguments, tiles)]
    blocks = min(tiles, problem.processors) if problem.macros["PERSISTENT"] else tiles
    further = c_int(tiles), *map(c_int, order_of_key_tiles(problem))
    return [launch_spec(problem, "attention_backward", (*arguments, *further), blocks)]


def dq_launches(problem, strides):
    """dq = scale * dq_sum, in the dtype of q. dq_sum is in the order of rows, or of a tile's registers."""
    if problem.row.dq_by_tile:
        blocks = problem.query_tiles
        numbers = c_int(problem.Nq), c_float(problem.scale)
    else:
        blocks = -(-problem.Nq * problem.D // 1024)
        numbers = c_int(problem.Nq), c_int(problem.query_rows), c_float(problem.scale)
    blocks *= problem.H * problem.B
    return [launch_spec(problem, "attention_dq", ("dq_sum", "dq", *numbers), blocks, 256, shared_bytes=0)]


def launch_spec(problem, kernel, arguments, grid, block=None, shared_bytes=None):
    """One launch of a kernel of this row. Unless they are given, block and shared_bytes are the row's."""
    check_count("blocks", grid)
    block = problem.threads if block is None else block
    shared_bytes = problem.shared_bytes if shared_bytes is None else shared_bytes
    return LaunchSpec(HERE / problem.row.file, kernel, arguments, grid, block, shared_bytes, problem.macros)


def strided(names, strides):
    """Tensors, each with its strides, for a kernel that computes addresses itself."""
    arguments = []
    for name in names:
        arguments += [name, *map(c_longlong, strides[name])]
    return tuple(arguments)


def heads_and_lengths(problem):
    return c_int(problem.H), c_int(problem.H // problem.Hk), c_int(problem.Nq), c_int(problem.Nk)
