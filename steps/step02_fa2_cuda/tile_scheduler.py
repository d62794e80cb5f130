# SPDX-License-Identifier: MIT
"""The tile scheduler of rung hopper: how persistent blocks share the tiles of a call, so that all get equal work.

    order_of_tiles   of the forward, the order of the tiles of all heads
    persistent_pays  of the backward, whether its blocks should be persistent
    busy             the share of the time for which blocks work

Block b of P computes the tiles b, 2P - 1 - b, 2P + b, ...: every other round gives out the tiles in reverse. Here a
tile's work is the tiles of the other side that it visits, and one for its beginning and end.
"""

import functools

import torch

LONG = 4096  # keys from which a causal tile of the forward counts as long


def order_of_tiles(problem):
    """(section, alternate): how a causal forward orders its tiles; fwd_8_hopper.cu says what they mean.

    Where tiles are long, a section should have the heads whose K and V fit into 32 MB of the L2 cache, which saves
    power. But if the section's length does not suit the number of multiprocessors, they get unequal work, by up to a
    tenth. Then twice as many heads are tried. Otherwise, and where tiles are short, a section has half as many heads as
    there are multiprocessors, or a quarter with a head_dim above 64.
    """
    heads = problem.B * problem.H
    many = max(1, problem.processors // (4 if problem.D > 64 else 2))
    if problem.causal and problem.Nk >= LONG:
        bytes_of_K_and_V = 2 * problem.Nk * problem.D * problem.dtype.itemsize
        fits = max(1, 2**25 // bytes_of_K_and_V) * (problem.H // problem.Hk)
        for section in (min(fits, heads), min(2 * fits, heads)):
            if busy(forward_work(problem, section, alternate=True), problem.processors) > 0.99:
                return section, True
    return min(many, heads), False


def forward_work(problem, section, alternate):
    """The work of a causal forward's tiles, in the order of fwd_8_hopper.cu's Tile."""
    heads = min(problem.B * problem.H, 64 * section)  # further heads repeat the same work
    tiles = problem.query_tiles
    n = torch.arange(tiles * heads, device="cpu")
    first = n // (section * tiles) * section  # head of the section
    level = (n - first * tiles) // (heads - first).clamp(max=section)
    later = (heads - 1) // section - first // section  # sections after this one
    shortest_first = (later % 2 == 1) & alternate
    tile = torch.where(shortest_first, level, tiles - 1 - level)
    keys = (((tile + 1) * problem.Br).clamp(max=problem.Nq) + problem.Nk - problem.Nq).clamp(min=0)
    return (keys + problem.Bc - 1) // problem.Bc + 1


@functools.lru_cache(1000)  # a launch asks several times
def persistent_pays(problem):
    """Whether blocks of the backward should compute several tiles, which saves starts but needs equal work.

    No block may have 5 % more work than a tile of mean length in each round. (Blocks of one tile start where another
    one has ended, so they share tiles of any lengths well.) With head_dim 128 the next V comes late, and tiles of few
    steps would wait for it.
    """
    work, blocks = backward_work(problem), problem.processors
    rounds, mean = -(-len(work) // blocks), float(work.float().mean())
    even = float(of_blocks(work, blocks).max()) <= 1.05 * rounds * mean
    return rounds > 1 and even and (problem.D < 128 or mean > 6)


def backward_work(problem):
    """The work of a backward's tiles, in the order of bwd_3_hopper.cu's Place for persistent blocks."""
    tiles = problem.key_tiles
    heads = min(problem.B * problem.gradient_heads, max(1, 2**20 // tiles))  # more heads would repeat the same work
    keys = torch.arange(tiles, device="cpu") * problem.Bc - (problem.Nk - problem.Nq)
    first = keys.clamp(min=0) // problem.Br * problem.causal  # the first tile of queries that sees them
    work = (problem.query_tiles - first) * (problem.H // problem.gradient_heads) + 1
    two_rounds = 2 * problem.processors
    alone = heads * tiles // two_rounds * two_rounds // tiles
    return torch.cat([work.repeat(alone), work.repeat_interleave(heads - alone)])


def busy(work, blocks):
    """The share of the time for which so many blocks work, until the last one ends. work: (tiles,), in their order."""
    return float(work.sum() / blocks / of_blocks(work, blocks).max())


def of_blocks(work, blocks):
    """The work (blocks,) that each block gets."""
    rounds = torch.nn.functional.pad(work, (0, -len(work) % blocks)).view(-1, blocks)
    rounds[1::2] = rounds[1::2].flip(1)
    return rounds.sum(0)
