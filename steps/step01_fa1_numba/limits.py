# SPDX-License-Identifier: MIT
"""What each rung takes: the head_dims, and at each of them the tiles that registers and shared memory hold."""

import functools

from . import bwd_0_published, bwd_2_registers, fwd_0_published, fwd_1_loops_swapped, fwd_2_registers

KERNELS = {  # {rung: the functions that make its kernels, forward and backward, for a tile and a head_dim}
    "registers": (fwd_2_registers.forward_kernel, bwd_2_registers.queries_kernel, bwd_2_registers.keys_kernel),
    "loops_swapped": (fwd_1_loops_swapped.forward_kernel, bwd_0_published.backward_kernel),
    "published": (fwd_0_published.forward_kernel, bwd_0_published.backward_kernel),
}


def tile_fits(rung, D, tile):
    """Whether registers and shared memory hold the tile, both in the forward and in the backward."""
    try:
        for make in KERNELS[rung]:
            make(*tile, int(D))
    except ValueError:
        return False
    return True


LIMITS = {rung: {"tile_fits": functools.partial(tile_fits, rung)} for rung in KERNELS}
if fwd_0_published.SIMULATED:  # Fewer threads share a tile: a thread's patch of O has D / 4 columns, at most 16.
    LIMITS["registers"]["head_dims"] = range(1, 65)
