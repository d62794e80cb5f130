# SPDX-License-Identifier: MIT
"""The ladder: one table of all kernels of this stage, a row for each, with what a kernel takes and how it is launched.

launches.py turns a row into launch specs, plan.py runs them, and calls.py has the functions to call: `from lifted.calls
import forward, backward`. What the stage says about itself (SUPPORTS, error messages, README's table, exercises) is
read from the rows, too. Needs torch, and tile_scheduler.py.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property, partial

import torch

from .tile_scheduler import persistent_pays

FP32 = (torch.float32,)
HALF = (torch.bfloat16, torch.float16)
# How a kernel's macro T names a dtype.
MACRO_T = {torch.float32: "float32", torch.bfloat16: "bf16", torch.float16: "fp16"}
TURING, AMPERE, HOPPER = (7, 5), (8, 0), (9, 0)  # compute capabilities


@dataclass(frozen=True, eq=False)
class Kernel:
    """A row of the table: one .cu file, which holds the forward or the backward of a rung.

    Br and Bc below are the rows and columns of a tile of S, which are queries and keys.
    """

    word: str  # the rung's name, as `rung="fa2"` asks for it
    file: str
    dtypes: tuple
    tiles: tuple  # tables {head_dim: (Br, Bc)}, the best first; the first that fits into the shared memory is used
    threads: Callable  # (D, Br, Bc) -> threads of a block
    shared_bytes: Callable  # (D, Br, Bc) -> bytes of dynamic shared memory of a block
    macros: Callable = lambda problem: {}  # (Problem) -> what the file is compiled for, besides D, Br and Bc
    needs: tuple = TURING  # the compute capability
    loads: str = "elements"  # how tensors are read: a number at a time, "16 bytes" at a time, or by TMA, "tma"
    persistent: bool = False  # whether a block can compute several tiles, one after the other; the macro PERSISTENT
    repeats_heads: bool = False  # k and v are repeated, one K/V head for each query head

    @property
    def head_dims(self):
        return tuple(self.tiles[0])

    def tile(self, D, memory):
        """(Br, Bc) for a GPU whose blocks can have `memory` bytes of shared memory.

        It is the smallest tile if none fits, and in the emulation, where memory is None.
        """
        for table in self.tiles if memory is not None else ():
            if self.shared_bytes(D, *table[D]) <= memory:
                return table[D]
        return self.tiles[-1][D]

    def fits(self, D, memory):
        """Whether the smallest tile for this head_dim fits into so many bytes of shared memory."""
        return memory is None or self.shared_bytes(D, *self.tiles[-1][D]) <= memory

    def takes(self, dtype, D):
        return dtype in self.dtypes and D in self.head_dims

    def describe(self):
        """ "fwd_5_fa2.cu takes bfloat16 or float16 and head_dim 32, 64"."""
        return f"{self.file} takes {self.dtype_names()} and head_dim {self.head_dim_span()}"

    def dtype_names(self):
        return " or ".join(str(dtype).removeprefix("torch.") for dtype in self.dtypes)

    def head_dim_span(self):
        D = self.head_dims
        neighbours = len(D) > 2 and D == tuple(range(D[0], D[-1] + 1))
        return f"{D[0]} to {D[-1]}" if neighbours else ", ".join(map(str, D))

    def runs_on(self, capability):
        """Newer GPUs run what older ones do, except Hopper's own instructions: Blackwell has no wgmma."""
        return capability == HOPPER if self.needs == HOPPER else capability >= self.needs

    def needed(self):
        """The compute capability in words."""
        number = f"{self.needs[0]}.{self.needs[1]}"
        return f"exactly {number} (H100, H200)" if self.needs == HOPPER else f"{number} or newer"

    def check(self, dtype, D, device):
        """TypeError, ValueError or RuntimeError unless the kernel takes this dtype and head_dim and runs there."""
        if dtype not in self.dtypes:
            raise TypeError(f"{self.describe()}; got {dtype}.")
        if D not in self.head_dims:
            raise ValueError(f"{self.describe()}; got head_dim {D}.")
        if device.type not in ("cpu", "cuda"):
            raise ValueError(f"{self.file} runs on a GPU or on the CPU; the tensors are on {device}.")
        if device.type == "cuda" and not self.runs_on(torch.cuda.get_device_capability(device)):
            raise RuntimeError(f"{self.file} needs a GPU of compute capability {self.needed()}.")


@dataclass(frozen=True, eq=False)
class Forward(Kernel):
    backwards: tuple = ()  # the backwards that go with it, by word; the first that takes the input is used
    choices: tuple = ()  # the tiles that `tile=` may name
    emulated_choices: tuple = ()  # the same in the emulation, where every tile costs seconds to compile


@dataclass(frozen=True, eq=False)
class Backward(Kernel):
    in_order: bool = False  # whether blocks can add to dq in a fixed order, so that it is bit-equal from run to run
    zeroes_dq: bool = False  # a block of attention_delta computes a tile of queries, and also sets its dq_sum to 0
    dq_by_tile: bool = False  # a block of attention_dq computes a tile of queries, and not 1024 numbers of dq
    adds_to_dq: bool = False  # attention_backward adds to dq itself, so that there is no dq_sum and no attention_dq
    tile_of_forward: bool = False  # the tile that a call names for the forward is used here, too

    def takes(self, dtype, D, deterministic=False):
        return super().takes(dtype, D) and (self.in_order or not deterministic)


@dataclass(frozen=True)
class Problem:
    """The input of a launch spec: the row, the sizes of the tensors, the tile."""

    row: Kernel
    B: int
    H: int
    Hk: int
    Nq: int
    Nk: int
    D: int
    dtype: torch.dtype
    causal: bool
    scale: float
    Br: int
    Bc: int
    processors: int  # multiprocessors of the GPU
    device: torch.device = None
    deterministic: bool = False
    switches: tuple = ()  # pairs (macro, value)

    def queries(self):
        """(shape, dtype, device) of a tensor like q."""
        return (self.B, self.H, self.Nq, self.D), self.dtype, self.device

    @cached_property
    def query_tiles(self):
        return -(-self.Nq // self.Br)

    @cached_property
    def query_rows(self):
        """The queries, padded to whole tiles."""
        return self.query_tiles * self.Br

    @cached_property
    def key_tiles(self):
        return -(-self.Nk // self.Bc)

    @cached_property
    def heads_apart(self):
        """Whether a block of the backward computes one query head, and not all query heads of a K/V head.

        Then there are more blocks, but dk and dv come in parts. So it is done only where it saves a quarter of the
        rounds in which the GPU works on the blocks, and always if k and v are repeated.
        """
        group, blocks = self.H // self.Hk, self.key_tiles * self.Hk * self.B
        together, apart = group * -(-blocks // self.processors), -(-group * blocks // self.processors)
        return self.row.repeats_heads or 4 * apart <= 3 * together

    @cached_property
    def gradient_heads(self):
        """The heads of dk and dv as the backward's kernel writes them."""
        return self.H if self.heads_apart else self.Hk

    @cached_property
    def threads(self):
        return self.row.threads(self.D, self.Br, self.Bc)

    @cached_property
    def shared_bytes(self):
        return self.row.shared_bytes(self.D, self.Br, self.Bc)

    @cached_property
    def macros(self):
        return {"D": self.D, "Br": self.Br, "Bc": self.Bc, **self.row.macros(self)}

    def settled(self):
        """The Problem itself, after everything that the ladder says of it has been computed."""
        for name in ("query_rows", "key_tiles", "gradient_heads", "threads", "shared_bytes", "macros"):
            getattr(self, name)
        return self


def same(tile, head_dims):
    """One tile for all of these head_dims."""
    return dict.fromkeys(head_dims, tile)


# ---- formulas of the rows: threads of a block, bytes of its shared memory, macros ------------------------------------


def warps_of_16_rows(D, Br, Bc):
    return 32 * min(4, Br // 16)


def warpgroups_of_64_rows(D, Br, Bc):
    return 2 * Br


def and_a_producer(D, Br, Bc):
    return warpgroups_of_64_rows(D, Br, Bc) + 128


def two_warpgroups(D, Br, Bc):
    return 256


def fa2_backward_threads(D, Br, Bc):
    """4 warps share a tile of up to 64 x 64; a larger one, or head_dim 256, needs the registers of 8."""
    warps = 8 if D > 128 or Br * Bc > 64 * 64 else 4
    return 32 * min(warps, Br // 8, Bc // 8)


def tiles_of_half(D, Br, Bc):
    """Q, K and V in 16 bits."""
    return 2 * (Br + 2 * Bc) * D


def swizzled_tiles(Q_tiles, KV_tiles, D, Br, Bc):
    """Tiles as the copy engine writes them, in slabs of 64 columns (128 bytes), and 128 bytes of barriers."""
    slabs = -(-D // 64)
    return (Q_tiles * Br + KV_tiles * Bc) * slabs * 128 + 128


def two_stages(D, Br, Bc):
    """One Q; K and V twice, so that the next tiles arrive while these are used."""
    return swizzled_tiles(1, 4, D, Br, Bc)


def hopper_stages(D, Br, Bc):
    """As many stages as fit: Q two up to head_dim 128, else one; K and V three up to head_dim 64, else two."""
    return swizzled_tiles(2 if D <= 128 else 1, 6 if D <= 64 else 4, D, Br, Bc)


def backward_tiles(D, Br, Bc, stages=2):
    """K and V, stages of Q and dO, and two tiles of P or dS in 16 bits; stages of lse and delta in float32."""
    return 2 * (2 * Bc * D + 2 * stages * Br * D + 2 * Br * Bc) + 4 * 2 * stages * Br


def forward_macros(problem):
    return {"T": MACRO_T[problem.dtype], **dict(problem.switches)}


def hopper_macros(problem):
    return forward_macros(problem) | {"CAUSAL": int(problem.causal)}


def backward_macros(problem):
    return {"T": MACRO_T[problem.dtype], "HEADS_APART": int(problem.heads_apart)}


def fa2_backward_macros(problem):
    return backward_macros(problem) | {"WARPS": fa2_backward_threads(problem.D, problem.Br, problem.Bc) // 32}


def hopper_backward_macros(problem):
    short = problem.Nq * problem.D <= SHORT_HEAD
    macros = backward_macros(problem) | {"DETERMINISTIC": int(problem.deterministic), "STAGES": 3 if short else 2}
    macros |= dict(problem.switches)
    return {"PERSISTENT": int(short and not macros["DETERMINISTIC"] and persistent_pays(problem))} | macros


# ---- the table -------------------------------------------------------------------------------------------------------

# A head with so many numbers of Q or fewer is short: rung hopper's backward has a third buffer and may be persistent.
SHORT_HEAD = 2**17
SMALL = range(1, 97)
MMA = same((64, 64), (32, 64, 96, 128))
WGMMA = {32: (128, 128), 64: (128, 128), 96: (128, 96), 128: (128, 128), 256: (128, 80)}
HOPPER_FORWARD = {32: (192, 128), 64: (192, 128), 96: (192, 96), 128: (128, 128), 256: (128, 80)}
HOPPER_BACKWARD = {64: (128, 128), 128: (64, 128)}
# FlashAttention-2's tiles, then smaller ones for GPUs with less shared memory (GeForce, then the T4).
FA2_FORWARD = {32: (128, 128), 64: (128, 128), 96: (128, 64), 128: (128, 64), 256: (64, 64)}
FA2_BACKWARD = {32: (128, 128), 64: (128, 128), 96: (64, 128), 128: (64, 128), 256: (64, 64)}
FA2_BACKWARD_SMALL = {32: (64, 64), 64: (64, 64), 96: (64, 64), 128: (32, 64), 256: (32, 32)}
FA2_BACKWARD_SMALLEST = same((32, 32), FA2_BACKWARD)

# What several rows have in common.
WARPS_OF_MMA = dict(
    threads=warps_of_16_rows, loads="16 bytes", macros=forward_macros,
    choices=((64, 64), (32, 64), (64, 32)), emulated_choices=((64, 64),),
)  # fmt: skip
ON_HOPPER = dict(needs=HOPPER, loads="tma")
HOPPER_BACKWARDS = ON_HOPPER | dict(threads=two_warpgroups, zeroes_dq=True, dq_by_tile=True)
WARPGROUPS = ON_HOPPER | dict(macros=hopper_macros, choices=((128, 128), (128, 64)), emulated_choices=((192, 128),))

ROWS = (  # forward, the simplest first
    Forward("scalar", "fwd_0_scalar.cu", FP32, (same((64, 32), SMALL), same((16, 16), SMALL)),
            threads=lambda D, Br, Bc: Br, shared_bytes=lambda D, Br, Bc: 4 * (2 * Bc * D + Bc * Br),
            choices=((64, 32), (32, 32), (32, 64)), emulated_choices=((16, 16), (8, 16), (16, 8)),
            backwards=("scalar",)),
    Forward("warp", "fwd_1_warp.cu", FP32 + HALF, ({32: (64, 64), 64: (64, 64), 96: (64, 32), 128: (64, 32)},),
            shared_bytes=lambda D, Br, Bc: 4 * (Br + 2 * Bc) * (D + 4),  # Rows are padded by 4 numbers.
            backwards=("fa2", "scalar"), **WARPS_OF_MMA),
    Forward("mma", "fwd_2_mma.cu", HALF, (MMA,), shared_bytes=tiles_of_half, backwards=("fa2",), **WARPS_OF_MMA),
    Forward("ldmatrix", "fwd_3_ldmatrix.cu", HALF, (MMA,), shared_bytes=tiles_of_half, backwards=("fa2",),
            **WARPS_OF_MMA),
    Forward("cp_async", "fwd_4_cp_async.cu", HALF, (MMA,), shared_bytes=tiles_of_half, backwards=("fa2",),
            **WARPS_OF_MMA),
    Forward("fa2", "fwd_5_fa2.cu", HALF, (FA2_FORWARD,), shared_bytes=tiles_of_half, backwards=("fa2",),
            **WARPS_OF_MMA | dict(choices=((128, 128), (64, 64), (64, 128), (128, 64)),
                                  emulated_choices=((128, 128),))),
    Forward("wgmma", "fwd_6_wgmma.cu", HALF, (WGMMA,), threads=warpgroups_of_64_rows, shared_bytes=two_stages,
            backwards=("wgmma", "hopper", "fa2"), **WARPGROUPS),
    Forward("roles", "fwd_7_roles.cu", HALF, (HOPPER_FORWARD,), threads=and_a_producer, shared_bytes=two_stages,
            backwards=("wgmma", "hopper", "fa2"), **WARPGROUPS),
    Forward("hopper", "fwd_8_hopper.cu", HALF, (HOPPER_FORWARD,), threads=and_a_producer, shared_bytes=hopper_stages,
            persistent=True, backwards=("hopper", "fa2"), **WARPGROUPS),
)  # fmt: skip
BACKWARD_ROWS = (
    Backward("scalar", "bwd_0_scalar.cu", FP32, (same((32, 64), SMALL), same((16, 16), SMALL)),
             threads=lambda D, Br, Bc: Bc, adds_to_dq=True, repeats_heads=True, tile_of_forward=True,
             shared_bytes=lambda D, Br, Bc: 4 * (2 * Bc * (D + 1) + 2 * Br * D + Br * Bc + 2 * Br)),
    Backward("fa2", "bwd_1_fa2.cu", HALF, (FA2_BACKWARD, FA2_BACKWARD_SMALL, FA2_BACKWARD_SMALLEST),
             threads=fa2_backward_threads, shared_bytes=backward_tiles, macros=fa2_backward_macros, loads="16 bytes",
             in_order=True),
    Backward("wgmma", "bwd_2_wgmma.cu", HALF, (HOPPER_BACKWARD,), macros=backward_macros,
             shared_bytes=lambda D, Br, Bc: backward_tiles(D, Br, Bc) + 128, **HOPPER_BACKWARDS),
    Backward("hopper", "bwd_3_hopper.cu", HALF, (HOPPER_BACKWARD,), macros=hopper_backward_macros,
             shared_bytes=lambda D, Br, Bc: backward_tiles(D, Br, Bc, stages=3) + 2 * Bc * D + 128, persistent=True,
             in_order=True, **HOPPER_BACKWARDS),
)  # fmt: skip
FORWARD = {row.word: row for row in ROWS}
BACKWARD = {row.word: row for row in BACKWARD_ROWS}
OWN_BACKWARD = tuple(word for word, row in FORWARD.items() if row.backwards[0] == word)


def forward_row(rung):
    """The row of a rung's forward, or `rung` itself if it is a row; ValueError names the rungs there are."""
    if isinstance(rung, Kernel):
        return rung
    if rung not in FORWARD:
        raise ValueError(f"the rungs are {', '.join(FORWARD)}; got {rung!r}.")
    return FORWARD[rung]


def backward_row(rung, dtype, D, deterministic=False):
    """The row of the backward that a rung uses for this input: the first of its `backwards` that takes it.

    Raises NotImplementedError where only `deterministic` is in the way, otherwise ValueError.
    """
    row = forward_row(rung)
    rung, rows = row.word, [BACKWARD[word] for word in row.backwards]
    for row in rows:
        if row.takes(dtype, D, deterministic):
            return row
    if any(row.takes(dtype, D) for row in rows):
        raise NotImplementedError(
            f"the backward of rung {rung} adds to dq in any order; rung fa2 takes deterministic=True, in bfloat16 and "
            "float16. In float32 steps.step03_triton is always deterministic."
        )
    there = "; ".join(row.describe() for row in rows)
    raise ValueError(f"rung {rung} has no backward for {str(dtype).removeprefix('torch.')} and head_dim {D}: {there}.")


# ---- what the stage says about itself: of this GPU, or of the emulation, which has capability None and runs everything


def available(capability):
    """The words of the rungs that run there, in the order in which one is chosen by default.

    On a GPU the best comes first. In the emulation it is the simplest, which compiles fastest.
    """
    if capability is None:
        return tuple(FORWARD)
    return tuple(word for word in reversed(FORWARD) if FORWARD[word].runs_on(capability))


def elsewhere(capability):
    """{word: what it needs} of the rungs that do not run there."""
    missing = [] if capability is None else [row for row in ROWS if not row.runs_on(capability)]
    return {row.word: f"a GPU of compute capability {row.needed()}" for row in missing}


def limits(capability, memory):
    """{word: what SUPPORTS says of the rung}: its dtypes, head_dims and the tiles that can be asked for.

    memory: bytes of shared memory that a block can have; None in the emulation.
    """
    return {word: _limits(row, capability, memory) for word, row in FORWARD.items()}


def _limits(row, capability, memory):
    bf16 = capability is None or capability >= AMPERE
    dtypes = tuple(dtype for dtype in row.dtypes if bf16 or dtype != torch.bfloat16)
    head_dims = tuple(D for D in row.head_dims if row.fits(D, memory) and _has_backward(row, dtypes, D, memory))
    return {
        "dtypes": dtypes,
        "head_dims": head_dims,
        "tiles": row.emulated_choices if capability is None else row.choices,
        "tile_fits": partial(_tile_fits, row, memory),
    }


def _tile_fits(row, memory, D, tile):
    """Whether shared memory holds the tile, both in the forward and in a backward that uses the forward's tile."""
    backwards = [BACKWARD[word] for word in row.backwards]
    rows = [row, *(b for b in backwards if b.tile_of_forward and D in b.head_dims)]
    return memory is None or all(row.shared_bytes(D, *tile) <= memory for row in rows)


def _has_backward(row, dtypes, D, memory):
    backwards = [BACKWARD[word] for word in row.backwards]
    return all(any(b.takes(dtype, D) and b.fits(D, memory) for b in backwards) for dtype in dtypes)
