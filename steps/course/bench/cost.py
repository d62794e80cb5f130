"""What attention must cost: arithmetic on sizes for operations, memory traffic, and room on a multiprocessor.

Sizes are those of the contract: q (B, H, N, D) and k, v (B, Hk, Nk, D). A pass is "fwd", "bwd" or "fwd+bwd"; a dtype
is "fp32", "fp16" or "bf16".
"""

from dataclasses import dataclass
from typing import NamedTuple

BYTES = {"fp32": 4, "fp16": 2, "bf16": 2}
# The backward multiplies five N x N x D matrices (S, dP, dV, dQ, dK) where the forward multiplies two (S, O).
FORWARDS = {"fwd": 1.0, "bwd": 2.5, "fwd+bwd": 3.5}


@dataclass(frozen=True)
class Point:
    """One size: q (B, H, N, D), k and v (B, Hk, Nk, D). Hk is H and Nk is N unless given."""

    B: int
    H: int
    N: int
    D: int
    causal: bool = False
    Hk: int | None = None
    Nk: int | None = None

    @property
    def sizes(self):
        """The fields of a results row."""
        return {**vars(self), "Hk": self.Hk or self.H, "Nk": self.Nk or self.N}

    def flops(self, pass_="fwd"):
        """Floating-point operations by the papers' convention: 4 B H N Nk D forward, half when causal.

        The softmax is not counted, and recomputing S in the backward is.
        """
        forward = 4.0 * self.B * self.H * self.N * (self.Nk or self.N) * self.D
        return forward * (0.5 if self.causal else 1.0) * FORWARDS[pass_]

    def __str__(self):
        return " ".join(f"{name}={value}" for name, value in self.sizes.items())


def bandwidth(row):
    """TB/s that a measured row reached, by the bytes that must be moved between device memory and the multiprocessors.

    A forward reads q, k, v and writes out, lse; a copy reads and writes k.
    """
    queries = row["B"] * row["H"] * row["N"] * row["D"] * BYTES[row["dtype"]]  # q or out
    keys = row["B"] * row["Hk"] * row["Nk"] * row["D"] * BYTES[row["dtype"]]  # k or v
    lse = row["B"] * row["H"] * row["N"] * 4
    compulsory = 2 * keys if row["pass"] == "copy" else 2 * queries + 2 * keys + lse
    return compulsory / row["ms_median"] / 1e9


# --- one multiprocessor --------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Multiprocessor:
    """What the blocks on one streaming multiprocessor (SM) share. Memory in bytes."""

    threads: int
    blocks: int
    shared: int  # all blocks together
    shared_reserved: int = 1024  # taken by the system for every block
    shared_unit: int = 128  # an allocation is rounded up to this
    registers: int = 65536

    @property
    def shared_per_block(self):
        """The most that one block may ask for."""
        return self.shared - self.shared_reserved


# By compute capability. CUDA C++ Programming Guide, "Compute Capabilities", table "Technical Specifications"; the
# allocation units are those of NVIDIA's occupancy calculator.
MULTIPROCESSORS = {
    (7, 5): Multiprocessor(1024, 16, 64 * 1024, 0, 256),
    (8, 0): Multiprocessor(2048, 32, 164 * 1024),
    (8, 6): Multiprocessor(1536, 16, 100 * 1024),
    (8, 9): Multiprocessor(1536, 24, 100 * 1024),
    (9, 0): Multiprocessor(2048, 32, 228 * 1024),
}


class Occupancy(NamedTuple):
    """Blocks resident on one multiprocessor, and the resource that refuses one more."""

    blocks: int
    limited_by: str


def occupancy(capability, *, threads, shared=0, registers=0):
    """How many blocks of this size fit on one multiprocessor: an Occupancy.

    threads: in a block. shared: bytes of shared memory of a block. registers: of a thread. 0: not considered.
    capability: (major, minor), as torch.cuda.get_device_capability() gives it. 0 blocks: it cannot be launched.
    """
    sm = MULTIPROCESSORS[capability]
    warps = -(-threads // 32)
    fits = {"threads": sm.threads // (32 * warps), "blocks": sm.blocks}
    if shared:
        taken = -(-(shared + sm.shared_reserved) // sm.shared_unit) * sm.shared_unit
        fits["shared memory"] = sm.shared // taken
    if registers:
        # Handed out a warp at a time in units of 256, out of four equal register files: by fours of warps.
        resident_warps = sm.registers // (-(-32 * registers // 256) * 256) // 4 * 4
        fits["registers"] = resident_warps // warps if registers <= 255 else 0
    limited_by = min(fits, key=fits.get)
    return Occupancy(fits[limited_by], limited_by)


# --- the whole chip -----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Gpu:
    """Peak rates from the datasheet: upper bounds that no kernel reaches."""

    name: str
    capability: tuple[int, int]
    sms: int
    half_tflops: float  # dense matrix products of fp16 or bf16, summed in float32
    fp32_tflops: float  # ordinary float32 multiply-adds, no tensor cores
    bandwidth: float  # device memory, TB/s

    @property
    def multiprocessor(self):
        return MULTIPROCESSORS[self.capability]


# Keyed by the exact name that torch.cuda.get_device_name() gives: a laptop or NVL part of the same family is slower.
# Sources: NVIDIA's datasheets (H200, H100, A100, L4, T4) and architecture whitepapers (Ada for the RTX 4090, Ampere
# GA102 for the RTX 3090), figures with sparsity halved to dense.
GPUS = {
    gpu.name: gpu
    for gpu in (
        Gpu("NVIDIA H200", (9, 0), 132, 989.4, 66.9, 4.8),
        Gpu("NVIDIA H100 80GB HBM3", (9, 0), 132, 989.4, 66.9, 3.35),
        Gpu("NVIDIA A100-SXM4-80GB", (8, 0), 108, 312.0, 19.5, 2.039),
        Gpu("NVIDIA A100-SXM4-40GB", (8, 0), 108, 312.0, 19.5, 1.555),
        Gpu("NVIDIA GeForce RTX 4090", (8, 9), 128, 165.2, 82.6, 1.008),
        Gpu("NVIDIA GeForce RTX 3090", (8, 6), 82, 71.0, 35.6, 0.936),
        Gpu("NVIDIA L4", (8, 9), 58, 121.0, 30.3, 0.300),
        Gpu("Tesla T4", (7, 5), 40, 65.0, 8.1, 0.320),  # fp16 only: its tensor cores know no bf16
    )
}
