# SPDX-License-Identifier: MIT
"""From tensors to launches: checks, buffers, arguments and grid of every rung, read from its row in ladder.py.

    forward, backward                            what a rung computes
    start_gradients, add_gradients, finish_dq    the parts of a backward, for gradients summed over several calls
    forward_works, backward_works, run           the launches as data, to look at or to change before they are run

The tensors' device decides where a kernel runs. On a GPU nvrtc.py compiles and launches it; on a CPU g++ compiles the
same file behind emulator/. Whatever depends only on the layout of the inputs is planned once and kept; a later call
with the same layout only puts new addresses into the launches.

Needs torch, and beside it the rung's .cu files, ladder.py, nvrtc.py, cache.py, wgmma.py and ptx.cuh; on a GPU cuda.core
and NVRTC, on a CPU emulator/ and g++.
"""

import functools
import math
import numbers
import re
from collections import defaultdict
from ctypes import c_float, c_int, c_longlong, c_void_p
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch

from . import ladder, nvrtc
from .ladder import Problem

HERE = Path(__file__).parent  # where the .cu files are
DELTA_THREADS = 128  # of rung scalar's attention_delta, each for one row
SMALLEST_SCALE = torch.finfo(torch.float32).tiny
LARGEST_SCALE = torch.finfo(torch.float32).max * math.log(2)  # because kernels multiply it by log2(e)
MOST = 2**31 - 2**16  # kernels count rows, tiles and blocks in 32 bits, and sometimes add a tile or a round to a count
kept = {}  # {what a plan depends on: the Plan}


def forward(q, k, v, *, rung="fa2", causal=False, scale=None, tile=None, **switches):
    """(out, lse) by one rung: out like q, contiguous; lse (B, H, Nq) float32, the log-sum-exp of the scaled scores.

    q (B, H, Nq, D), k and v (B, Hk, Nk, D) are on one device, in a dtype and head_dim of the rung's row; H is a
    multiple of Hk. scale: 1/sqrt(D) by default. tile: (Br, Bc) instead of the row's. switches: macros at the head of
    fwd_8_hopper.cu, such as PINGPONG=0, to measure what an idea brings; for the same reason rung may be a row of the
    ladder. Raises TypeError, ValueError or RuntimeError before anything is launched.
    """
    check_options(rung, scale, causal, tile)
    check_switches(rung, switches)
    key = "forward", rung, causal, scale, tile, *switches.items(), *layouts(q, k, v)
    plan = kept.get(key)
    if plan is None:
        row = ladder.forward_row(rung)
        check(row, q=q, k=k, v=v)
        if q.numel() == 0 or k.numel() == 0:
            return attention_to_nothing(q)
        problem = problem_of(row, q, k, causal, scale, tile, switches=switches.items())
        plan = keep(key, Plan(problem, forward_works, q=q, k=k, v=v))
    return attend(plan, q, k, v)


def functions(rung):
    """(forward, backward) of a rung, each with its function `planned`, by which the contract keeps a call."""
    forwards, backwards = partial(forward, rung=rung), partial(backward, rung=rung)
    forwards.planned, backwards.planned = partial(planned_forward, rung=rung), partial(planned_backward, rung=rung)
    return forwards, backwards


def planned_forward(q, k, v, *, rung="fa2", causal=False, scale=None, tile=None):
    """A function of (q, k, v) that does what `forward` did on these tensors, for others of the same layout."""
    return partial(attend, kept["forward", rung, causal, scale, tile, *layouts(q, k, v)])


def attend(plan, q, k, v):
    """(out, lse) by a plan."""
    B, H, Nq, D = q.shape  # The sizes are handed over one by one, because a whole shape doubles the time of new_empty.
    out = q.new_empty(B, H, Nq, D)
    lse = q.new_empty(B, H, Nq, dtype=torch.float32)
    plan.run({"q": q, "k": k, "v": v, "out": out, "lse": lse})
    return out, lse


def backward(
    dout, q, k, v, out, lse, *, rung="fa2", causal=False, scale=None, tile=None, backward_tile=None, deterministic=False
):
    """(dq, dk, dv), contiguous, like q, k, v, by the first of the rung's backwards that takes this dtype and head_dim.

    dout and out are like q (B, H, Nq, D), and lse (B, H, Nq) is float32, as `forward` returned it; q, k, v, causal and
    scale are as for `forward`. tile: the forward's; only rung scalar's backward uses it. backward_tile: (Br, Bc)
    instead of the backward row's. deterministic: dq, too, is bit-equal from run to run.
    """
    check_options(rung, scale, causal, tile, deterministic)
    check_tile("backward_tile", backward_tile)
    key = "backward", rung, causal, scale, tile, backward_tile, deterministic, *layouts(dout, q, k, v, out, lse)
    plan = kept.get(key)
    inputs = {"dout": dout, "q": q, "k": k, "v": v, "out": out, "lse": lse}
    if plan is None:
        check(ladder.forward_row(rung), **inputs)
        if q.numel() == 0 or k.numel() == 0:
            return zeros_like(q), zeros_like(k), zeros_like(v)
        row = ladder.backward_row(rung, q.dtype, q.shape[3], deterministic)
        backward_tile = tile if row.word == "scalar" and backward_tile is None else backward_tile
        problem = problem_of(row, q, k, causal, scale, backward_tile, deterministic=deterministic)
        plan = keep(key, Plan(problem, backward_works, **inputs))
    return differentiate(plan, *inputs.values())


def planned_backward(
    *tensors, rung="fa2", causal=False, scale=None, tile=None, backward_tile=None, deterministic=False
):  # fmt: skip
    """A function of (dout, q, k, v, out, lse) that does what `backward` did on these tensors, for others like them."""
    plan = kept["backward", rung, causal, scale, tile, backward_tile, deterministic, *layouts(*tensors)]
    return partial(differentiate, plan)


def differentiate(plan, dout, q, k, v, out, lse):
    """(dq, dk, dv) by a plan."""
    inputs = {"dout": dout, "q": q, "k": k, "v": v, "out": out, "lse": lse}
    if plan.problem.row.word == "scalar":
        return scalar_gradients(plan, inputs)
    sums = Sums(plan.problem)
    dq, (dk, dv) = torch.empty_like(q, memory_format=torch.contiguous_format), parts_of_gradients(plan.problem, k)
    plan.run(inputs | sums.tensors() | {"counters": zero_counters(plan.problem), "dq": dq, "dk": dk, "dv": dv})
    return dq, *added_parts(plan.problem, dk, dv)


def scalar_gradients(plan, inputs):
    """Rung scalar's gradients. Its kernel wants a K/V head for each query head, so the plan repeats k's and v's."""
    q = inputs["q"]
    delta = q.new_empty(q.shape[:3])
    dq = q.new_zeros(q.shape)
    dk, dv = parts_of_gradients(plan.problem, inputs["k"])
    plan.run(inputs | {"delta": delta, "dq": dq, "dk": dk, "dv": dv})
    return dq, *added_parts(plan.problem, dk, dv)


def parts_of_gradients(problem, k):
    """Memory for dk and dv as the kernel writes them: (B, Hk, Nk, D), or (B, H, Nk, D) if it takes heads apart."""
    B, _, Nk, D = k.shape
    return k.new_empty(B, problem.gradient_heads, Nk, D), k.new_empty(B, problem.gradient_heads, Nk, D)


def added_parts(problem, dk, dv):
    """(dk, dv) (B, Hk, Nk, D). Parts are added in float32, in a fixed order."""
    if problem.gradient_heads == problem.Hk:
        return dk, dv
    return (x.unflatten(1, (problem.Hk, -1)).sum(2) for x in (dk, dv))


# ---- what is checked, and what a call depends on ---------------------------------------------------------------------


def check(row, **inputs):
    """Raises an error that names the argument unless the row's kernel takes these tensors, {name: tensor}."""
    for x in inputs.values():
        if x.layout is not torch.strided or x.data_ptr() == 0 and x.numel() > 0 and x.device.type != "meta":
            raise not_readable(inputs.values())
    for name, x in inputs.items():
        rank = 3 if name == "lse" else 4
        if x.ndim != rank:
            raise ValueError(f"{name} must be {'(B, H, N, D)' if rank == 4 else '(B, H, N)'}; got {tuple(x.shape)}.")
    like = "q" if "q" in inputs else "out"
    q = inputs[like]
    keys = (q.shape[0], *inputs["k"].shape[1:3], q.shape[3]) if "k" in inputs else None
    for name, x in inputs.items():
        shape = {"k": keys, "v": keys, "lse": q.shape[:3]}.get(name, q.shape)
        dtype = torch.float32 if name == "lse" else q.dtype
        if x.dtype != dtype or x.device != q.device:
            raise TypeError(f"{name} must be {dtype} on {q.device}, to match {like}; got {x.dtype} on {x.device}.")
        if x.shape != shape:
            raise ValueError(f"{name} must have shape {tuple(shape)} to match the others; got {tuple(x.shape)}.")
    if keys and (keys[1] == 0 or q.shape[1] % keys[1]):
        raise ValueError(f"q's heads must be a multiple of k's heads; got {q.shape[1]} and {keys[1]}.")
    row.check(q.dtype, q.shape[3], q.device)


def check_options(rung, scale, causal, tile=None, deterministic=False):
    """Raises TypeError or ValueError that names the option unless a kernel can be given it.

    Every call does this before it looks for a kept plan: 1 would find the plan that was made for True.
    """
    if not isinstance(rung, (str, ladder.Kernel)):
        raise TypeError(f"rung must be a word such as 'fa2', or a row of the ladder; got {rung!r}.")
    if not isinstance(causal, bool):
        raise TypeError(f"causal must be True or False, got {causal!r}.")
    if not isinstance(deterministic, bool):
        raise TypeError(f"deterministic must be True or False, got {deterministic!r}.")
    if scale is not None:
        if isinstance(scale, bool) or not isinstance(scale, numbers.Real):
            raise TypeError(f"scale must be a number, or None for 1/sqrt(D); got {scale!r}.")
        if not SMALLEST_SCALE <= scale <= LARGEST_SCALE:
            must_be = "a finite number > 0 that float32 can hold, times log2(e) too, or None for 1/sqrt(D)"
            raise ValueError(f"scale must be {must_be}; got {scale}.")
    check_tile("tile", tile)


def check_tile(name, tile):
    """Raises TypeError or ValueError unless tile is None or a tuple of two sizes."""
    if tile is None:
        return
    if not isinstance(tile, tuple) or [type(size) for size in tile] != [int, int]:
        raise TypeError(f"{name} must be a pair of integers, as a tuple (Br, Bc), or None; got {tile!r}.")
    if min(tile) < 1:
        raise ValueError(f"{name} must have sizes of at least 1; got {tile!r}.")


def layouts(*tensors):
    """What a plan depends on of each input. True means contiguous strides.

    Of the address only the alignment counts, and whether there is one: a fake tensor has none.
    """
    try:
        return [
            (x.dtype, x.device, x.shape, x.is_contiguous() or x.stride(), (p := x.data_ptr()) % 16, p == 0, x.is_neg())
            for x in tensors
        ]
    except (AttributeError, RuntimeError):  # no tensor, or one that has no such thing
        raise not_readable(tensors) from None


def not_readable(tensors):
    """The TypeError for inputs of which one is no tensor with memory in which every entry has a place."""
    given = ", ".join(map(kind, tensors))
    return TypeError(f"every input must be a dense torch.Tensor with memory; got {given}.")


def kind(x):
    """The type of an input, and what it is other than dense."""
    if not isinstance(x, torch.Tensor):
        return type(x).__name__
    layout = "nested" if x.is_nested else str(x.layout).removeprefix("torch.")
    return type(x).__name__ if layout == "strided" else f"{type(x).__name__} ({layout})"


def problem_of(row, q, k, causal=False, scale=None, tile=None, deterministic=False, switches=()):
    """The Problem of a call on these tensors."""
    (B, H, Nq, D), (Hk, Nk) = q.shape, k.shape[1:3]
    Br, Bc = tile or row.tile(D, shared_memory(q.device))
    scale = scale_or_default(scale, D)
    check_count("queries and keys", Nq + Nk)
    sizes = B, H, Hk, Nq, Nk, D
    switches = tuple((name, int(value)) for name, value in switches)
    return Problem(row, *sizes, q.dtype, causal, scale, Br, Bc, processors(q.device), q.device, deterministic, switches)


def check_count(what, number):
    """ValueError unless a kernel can count to this number."""
    if number > MOST:
        raise ValueError(f"{number} {what} are more than a kernel can count ({MOST}). Split the batch or the queries.")


def scale_or_default(scale, D):
    return D**-0.5 if scale is None else scale


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


def attention_to_nothing(q):
    """(out, lse) where there is no query or no key: the sum over no key is 0, and its logarithm -inf."""
    lse = torch.full(q.shape[:3], -math.inf, dtype=torch.float32, device=q.device)
    return zeros_like(q), lse


def zeros_like(x):
    return torch.zeros_like(x, memory_format=torch.contiguous_format)


# ---- plans: what is prepared once for a layout -----------------------------------------------------------------------


class Plan:
    """The launches for inputs of one layout, and which of the inputs have to be copied before each call."""

    def __init__(self, problem, make_works, **inputs):
        self.problem = problem
        self.copies = {name: copy for name, x in inputs.items() if (copy := copy_needed(problem, name, x))}
        # Copies of tensors without memory have the strides that the real copies will have.
        read = {name: self.copies[name](x.to("meta")) if name in self.copies else x for name, x in inputs.items()}
        self.works = make_works(problem, {name: strides_of(x) for name, x in read.items()})
        self.launches = None

    def run(self, tensors):
        """Launches on these tensors, {name: tensor}; a name without a tensor is None."""
        for name, copy in self.copies.items():
            tensors[name] = copy(tensors[name])
        if self.launches is None:
            self.launches = bind(self.works, tensors)
        for launch in self.launches:
            launch(tensors)


def keep(key, plan):
    """The plan, which later calls will find under this key. With more than 1000 plans all are forgotten."""
    if len(kept) >= 1000:
        kept.clear()
    kept[key] = plan
    return plan


def copy_needed(problem, name, x):
    """A function that copies an input which the kernel cannot read where it lies; None if it can."""
    if name in ("k", "v") and problem.row.file == "bwd_0_scalar.cu" and problem.H > problem.Hk:
        return partial(torch.Tensor.repeat_interleave, repeats=problem.H // problem.Hk, dim=1)
    return (
        None if readable(problem.row, name, x) else partial(torch.Tensor.clone, memory_format=torch.contiguous_format)
    )


def readable(row, name, x):
    """Whether the kernel can read x where it lies.

    Rows have to be contiguous, and no tensor one that torch negates only when it reads it, such as z.conj().imag. Loads
    of 16 bytes and the copy engine want every row to begin at a multiple of 16 bytes, and the copy engine refuses
    strides of 0. The stride of a dimension of size 1 does not matter.
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
    """The strides of batch, head and row in elements. Where there is only one, its stride is that of whole rows.

    A kernel computes the addresses of further rows too, which it does not read, and they have to be aligned.
    """
    return tuple(stride if n > 1 else x.shape[-1] for stride, n in zip(x.stride()[:3], x.shape, strict=False))


def run(works, tensors):
    """Launches the works one after the other on these tensors, {name: tensor}."""
    for launch in bind(works, tensors):
        launch(tensors)


def bind(works, tensors):
    """A function of {name: tensor} for each work. On a GPU this compiles; the emulation compiles at the first call."""
    device = next(iter(tensors.values())).device
    if device.type == "cpu":
        return [partial(emulate, work) for work in works]
    nvrtc.bind_context(device.index)  # A tensor map needs a context, and a thread that has not used CUDA has none.
    return [
        nvrtc.Launch(
            work.file,
            work.kernel,
            [on_gpu(argument, tensors) for argument in work.arguments],
            device=device.index,
            grid=work.grid,
            block=work.block,
            shared_bytes=work.shared_bytes,
            macros=work.macros,
        )
        for work in works
    ]


def on_gpu(argument, tensors):
    """(name of the tensor whose address goes there at each run, or None; the value that the kernel gets)."""
    if isinstance(argument, Box):
        return argument.name, nvrtc.tensor_map(*view_and_box(tensors[argument.name], argument.rows))
    return (argument, c_void_p()) if isinstance(argument, str) else (None, argument)


def emulate(work, tensors):
    """Runs one kernel on the CPU."""
    from . import emulator

    def in_emulation(argument):
        if isinstance(argument, Box):
            return emulator.tensor_map(*view_and_box(tensors[argument.name], argument.rows))
        value = tensors[argument] if isinstance(argument, str) else argument
        return c_void_p(None) if value is None else value

    emulator.launch(
        work.file,
        work.kernel,
        list(map(in_emulation, work.arguments)),
        grid=work.grid,
        block=work.block,
        shared_bytes=work.shared_bytes,
        macros=work.macros,
    )


def view_and_box(x, rows):
    """What a tensor map is made of by which the copy engine moves `rows` rows of one head of x (B, H, N, D).

    In shared memory they lie as ceil(D / 64) slabs of 128-byte rows. A kernel's coordinates are (0, row, 0, head,
    batch). If 64 does not divide D, a copy brings one slab, and the coordinates are (64 * slab, row, 0, head, batch).
    """
    B, H, N, D = x.shape
    batch, head, row = strides_of(x)
    slabs, columns = (D // 64, 64) if D % 64 == 0 else (1, D)
    return x.as_strided((B, H, slabs, N, columns), (batch, head, 64, row, 1)), (1, 1, slabs, rows, 64)


# ---- launches as data ------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Work:
    """One launch of one kernel. An argument is the name of a tensor, a Box of one, or a ctypes value."""

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


def forward_works(problem, strides):
    """The one launch of a forward. strides: {name: those of batch, head and row, in elements}."""
    outputs = "out", "lse", *heads_and_lengths(problem), c_float(problem.scale)
    tiles = problem.query_tiles * problem.H * problem.B
    check_count("tiles", tiles)
    if problem.row.loads != "tma":
        arguments = *strided(("q", "k", "v"), strides), *outputs, c_int(problem.causal)
        return [work(problem, "attention_forward", arguments, tiles)]
    arguments = Box("q", problem.Br), Box("k", problem.Bc), Box("v", problem.Bc), *outputs
    if not problem.row.persistent:
        return [work(problem, "attention_forward", arguments, tiles)]
    persistent = problem.row.macros(problem).get("PERSISTENT", 1)
    lowest = -3.4e38 / max(1, problem.scale / math.log(2))  # where a row's maximum starts; the kernel says why
    further = c_float(lowest), c_int(tiles), c_int(heads_of_a_section(problem, persistent))
    blocks = min(tiles, problem.processors) if persistent else tiles
    return [work(problem, "attention_forward", (*arguments, *further), blocks)]


def heads_of_a_section(problem, persistent):
    """How many heads a causal forward of rung hopper takes together: their tiles are ordered by length, longest first.

    The fewer they are, the more blocks read the same keys from the L2 cache, which saves power. If a multiprocessor
    gets its next tile when it is free, a section is the heads whose K and V fit into 32 MB of the cache. A persistent
    kernel deals its tiles out beforehand. Its blocks get equal work only if the sections are large, so that one has
    half as many heads as there are blocks. With a head_dim above 64 a head has more bytes, and a section a quarter.
    """
    bytes_of_K_and_V = 2 * problem.Nk * problem.D * problem.dtype.itemsize
    in_the_cache = max(1, 2**25 // bytes_of_K_and_V) * (problem.H // problem.Hk)
    dealt = max(1, problem.processors // (4 if problem.D > 64 else 2))
    section = dealt if persistent else in_the_cache
    return min(section, problem.B * problem.H)


def backward_works(problem, strides):
    """The launches of a whole backward."""
    if problem.row.word == "scalar":
        return scalar_backward_works(problem, strides)
    return [*delta_works(problem, strides), *gradient_works(problem, strides), *dq_works(problem, strides)]


def scalar_backward_works(problem, strides):
    """Rung scalar's delta, and its gradients; here k and v have as many heads as q."""
    H, Nq, Nk = c_int(problem.H), c_int(problem.Nq), c_int(problem.Nk)
    arguments = *strided(("dout", "out"), strides), "delta", c_int(problem.B), H, Nq
    blocks = -(-problem.B * problem.H * problem.Nq // DELTA_THREADS)
    delta = work(problem, "attention_delta", arguments, blocks, DELTA_THREADS, shared_bytes=0)
    results = "lse", "delta", "dq", "dk", "dv", H, Nq, Nk, c_float(problem.scale), c_int(problem.causal)
    arguments = *strided(("dout", "q", "k", "v"), strides), *results
    blocks = problem.key_tiles * problem.gradient_heads * problem.B
    return [delta, work(problem, "attention_backward", arguments, blocks)]


def delta_works(problem, strides):
    """delta = the row sums of dout * out, and lse in base 2; the kernels of wgmma and hopper also set dq_sum to 0."""
    arguments = *strided(("dout", "out"), strides), "lse", "lse_2", "delta"
    if problem.row.word == "fa2":
        rows = problem.query_tiles * problem.Br
        rows_of_a_block = 16 if problem.D == 96 else 2048 // problem.D  # 256 threads take 8 numbers each
        blocks = -(-rows // rows_of_a_block)
        arguments = *arguments, c_int(problem.H), c_int(problem.Nq), c_int(rows)
    else:
        blocks = problem.query_tiles
        arguments = *arguments, "dq_sum", c_int(problem.H), c_int(problem.Nq)
    return [work(problem, "attention_delta", arguments, blocks * problem.H * problem.B, 256, shared_bytes=0)]


def gradient_works(problem, strides):
    """dk and dv of the keys, and what the keys give to dq."""
    numbers = *heads_and_lengths(problem), c_float(problem.scale), c_int(problem.causal)
    if problem.row.word == "fa2":
        tensors = *strided(("dout", "q", "k", "v"), strides), "lse_2", "delta", "dq_sum", "dk", "dv", "counters"
        arguments = *tensors, *numbers, c_int(problem.deterministic)
    else:
        Br, Bc = problem.Br, problem.Bc
        boxes = Box("dout", Br), Box("q", Br), Box("k", Bc), Box("v", Bc), Box("dk", 16), Box("dv", 16)
        counters = ("counters",) if problem.row.word == "hopper" else ()
        arguments = *boxes, "lse_2", "delta", "dq_sum", *counters, *numbers
    blocks = problem.key_tiles * problem.gradient_heads * problem.B
    return [work(problem, "attention_backward", arguments, blocks)]


def dq_works(problem, strides):
    """dq = scale * dq_sum, in the dtype of q."""
    if problem.row.word == "fa2":
        blocks = -(-problem.Nq * problem.D // 1024)
        numbers = c_int(problem.Nq), c_int(problem.query_tiles * problem.Br), c_float(problem.scale)
    else:
        blocks = problem.query_tiles
        numbers = c_int(problem.Nq), c_float(problem.scale)
    return [
        work(problem, "attention_dq", ("dq_sum", "dq", *numbers), blocks * problem.H * problem.B, 256, shared_bytes=0)
    ]


def work(problem, kernel, arguments, grid, block=None, shared_bytes=None):
    """One launch of a kernel of this row. Unless they are given, block and shared_bytes are the row's."""
    check_count("blocks", grid)
    D, Br, Bc = problem.D, problem.Br, problem.Bc
    block = problem.row.threads(D, Br, Bc) if block is None else block
    shared_bytes = problem.row.shared_bytes(D, Br, Bc) if shared_bytes is None else shared_bytes
    macros = {"D": D, "Br": Br, "Bc": Bc, **problem.row.macros(problem)}
    return Work(HERE / problem.row.file, kernel, arguments, grid, block, shared_bytes, macros)


def strided(names, strides):
    """Tensors, each with its strides, as a kernel takes them that computes addresses itself."""
    return (*(argument for name in names for argument in (name, *map(c_longlong, strides[name]))),)


def heads_and_lengths(problem):
    return c_int(problem.H), c_int(problem.H // problem.Hk), c_int(problem.Nq), c_int(problem.Nk)


def check_switches(rung, switches):
    """TypeError unless each is a number for a macro that the file defines where the launch does not."""
    file = ladder.forward_row(rung).file
    for name, value in switches.items():
        if name not in switches_of(HERE / file):
            raise TypeError(f"{file} has no switch {name}.")
        if not isinstance(value, int):
            raise TypeError(f"the switch {name} must be an integer; got {value!r}.")


@functools.cache
def switches_of(path):
    return re.findall(r"^#ifndef (\w+)$", path.read_text(), re.M)


# ---- the parts of a backward -----------------------------------------------------------------------------------------


class Sums:
    """What the parts of a backward hand on to each other, for one call's queries, padded to whole tiles of Br rows.

    All are float32. lse_2 (B, H, rows): lse in base 2. delta (B, H, rows): the row sums of dout * out.
    dq_sum (B, H, rows, D): the sum over keys that becomes dq, in the order of the kernel's registers.
    """

    def __init__(self, problem):
        rows = problem.query_tiles * problem.Br
        empty = partial(torch.empty, dtype=torch.float32, device=problem.device)
        self.problem = problem
        self.lse_2 = empty(problem.B, problem.H, rows)
        self.delta = empty(problem.B, problem.H, rows)
        self.dq_sum = empty(problem.B, problem.H, rows, problem.D)
        if problem.row.word == "fa2":  # The others' attention_delta writes these zeros.
            self.dq_sum.zero_()

    def tensors(self):
        return {"lse_2": self.lse_2, "delta": self.delta, "dq_sum": self.dq_sum}


def zero_counters(problem):
    """Counters by which the blocks add to dq in a fixed order; None if dq need not be bit-equal from run to run."""
    if not problem.deterministic:
        return None
    counters = problem.B * problem.H * problem.query_tiles
    if problem.row.word == "hopper":  # There each of the 8 warps of a block has a counter of its own.
        counters *= 8
    return torch.zeros(1 + counters, dtype=torch.int32, device=problem.device)


def start_gradients(dout, out, lse, *, rung="fa2", scale=None, deterministic=False):
    """The Sums of these queries, with dq_sum = 0. Arguments as for `backward`; float32 has no parts."""
    check_options(rung, scale, causal=False, deterministic=deterministic)
    key = "start", rung, scale, deterministic, *layouts(dout, out, lse)
    plan = kept.get(key)
    inputs = {"dout": dout, "out": out, "lse": lse}
    if plan is None:
        check(ladder.forward_row(rung), **inputs)
        row = ladder.backward_row(rung, out.dtype, out.shape[3], deterministic)
        if row.word == "scalar":
            raise NotImplementedError(
                "rung scalar has no parts: its kernel adds to dq itself. Use bfloat16 or float16."
            )
        plan = keep(
            key, Plan(problem_of(row, out, out, scale=scale, deterministic=deterministic), delta_works, **inputs)
        )
    sums = Sums(plan.problem)
    if dout.numel():
        plan.run(inputs | sums.tensors())
    return sums


def add_gradients(sums, dout, q, k, v, *, causal=False):
    """(dk, dv) of these queries and keys alone, like k and v; what the keys give to dq is added to sums.dq_sum.

    sums: what `start_gradients` returned for the same queries. Its out and lse must be those over all keys that the
    queries see, not over the keys of this call alone. Other queries, or a slice of these, need Sums of their own.
    """
    start = sums.problem
    check_options(start.row, start.scale, causal)
    key = "add", start, causal, *layouts(dout, q, k, v)
    plan = kept.get(key)
    inputs = {"dout": dout, "q": q, "k": k, "v": v}
    if plan is None:
        check(start.row, **inputs)
        queries, given = start.queries(), (tuple(q.shape), q.dtype, q.device)
        if given != queries:
            raise ValueError(f"q must be the queries that start_gradients was called for, {queries}; got {given}.")
        if q.numel() == 0 or k.numel() == 0:
            return zeros_like(k), zeros_like(v)
        problem = problem_of(start.row, q, k, causal, start.scale, deterministic=start.deterministic)
        plan = keep(key, Plan(problem, gradient_works, **inputs))
    dk, dv = parts_of_gradients(plan.problem, k)
    plan.run(inputs | sums.tensors() | {"counters": zero_counters(plan.problem), "dk": dk, "dv": dv})
    return (*added_parts(plan.problem, dk, dv),)


def finish_dq(sums):
    """dq (B, H, Nq, D) = scale * sums.dq_sum, in the dtype of the queries."""
    problem = sums.problem
    dq = sums.dq_sum.new_empty(problem.B, problem.H, problem.Nq, problem.D, dtype=problem.dtype)
    key = "finish", problem
    plan = kept.get(key)
    if plan is None:
        plan = keep(key, Plan(problem, dq_works))
    if dq.numel():
        plan.run(sums.tensors() | {"dq": dq})
    return dq


def geometry(stem, *, B, H, Hk, Nq, Nk, D, causal, dtype, processors, shared_limit, **switches):
    """[(kernel, grid, block, shared bytes, macros)] of the launches of a file such as "fwd_5_fa2", without tensors.

    processors, shared_limit: the GPU's multiprocessors, and the bytes of shared memory that a block can have there.
    """
    (row,) = (row for row in (*ladder.ROWS, *ladder.BACKWARD_ROWS) if row.file == f"{stem}.cu")
    Br, Bc = row.tile(D, shared_limit)
    problem = Problem(
        row, B, H, Hk, Nq, Nk, D, dtype, causal, D**-0.5, Br, Bc, processors, switches=tuple(switches.items())
    )
    works = (forward_works if row in ladder.ROWS else backward_works)(problem, defaultdict(lambda: (0, 0, 0)))
    return [(work.kernel, work.grid, work.block, work.shared_bytes, work.macros) for work in works]
