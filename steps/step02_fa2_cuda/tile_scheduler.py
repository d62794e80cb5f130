# SPDX-License-Identifier: MIT
"""The tile scheduler of rung hopper: which block computes which tile of a call, and when.

    order_of_tiles       of the forward, the order of the tiles of queries of all heads
    order_of_key_tiles   of the backward, the order of the tiles of keys of all heads
    persistent_pays      of the backward, whether its blocks should be persistent
    busy                 the share of the time for which blocks work

A persistent block computes several tiles. Block b of P computes the tiles b, 2P - 1 - b, 2P + b, ...: every other round
gives out the tiles in reverse, so that all blocks get about equal work. Here a tile's work is the tiles of the other
side that it visits, and one for its beginning and end.

The tiles of a few heads, a `section`, are computed together: the first tile of each head, then the second, and so on.
Blocks that run at the same time then read the same K and V, or Q and dO, which stay in the L2 cache.
"""

import functools

import torch

LONG = 4096  # keys from which a causal tile of the forward counts as long
# Of the backward:
SECTION = 8  # heads whose tiles are computed together
FEW_TILES = 128  # tiles of keys up to which the queries ascend, if dq is to be bit-equal from run to run
LONG_SECTION = 2**17  # queries that a section of long heads may have
CACHE = 2**25  # bytes of the L2 cache; heads that fit into it can be one section


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


def order_of_key_tiles(problem):
    """(ascending, section, alone): how a backward orders its tiles of keys, and the queries of each.

    ascending: whether a block goes from the first tile of queries that sees its keys to the last, or back. alone: so
    many heads are computed one after the other. section: so many of the heads after them are computed together.
    """
    tiles, heads = problem.key_tiles, problem.B * problem.gradient_heads
    if problem.macros["PERSISTENT"]:
        alone = heads_alone(problem, heads) if problem.causal else heads
        return True, max(1, heads - alone), alone
    if problem.macros["DETERMINISTIC"]:
        return *order_that_waits_little(problem), 0
    # With a causal mask the first keys have the most queries. So the first tiles of all heads of a section come first:
    # the last blocks are short, and the multiprocessors end at nearly the same time. Blocks of a few steps do so in any
    # order, and for long heads the cache matters more.
    steps_matter = problem.causal and tiles * problem.H // problem.gradient_heads > 4 and tiles <= 64
    return True, SECTION if steps_matter else 1, 0


def heads_alone(problem, heads):
    """How many heads of a persistent backward fill whole pairs of rounds, and are computed one after the other.

    In a pair of rounds the blocks get nearly equal work, although tiles differ. The heads that are left do not fill a
    pair: they are one section, the longest tiles first.
    """
    two_rounds = 2 * problem.processors
    return heads * problem.key_tiles // two_rounds * two_rounds // problem.key_tiles


def order_that_waits_little(problem):
    """(ascending, section) of a backward whose blocks wait for each other, so that each dQ_i is summed in one order.

    With few tiles the queries ascend, and the last keys come first. With a causal mask hardly any block waits: it
    begins at the diagonal, and reaches each later tile just after the block of the next keys. But it has Bc / Br steps
    more than that block. So the blocks drift apart, and need more and more of the L2 cache. Therefore a section has the
    heads that fit into the cache whole: q, dout and dq together have 8 bytes a number, and so have k, v, dk and dv.
    Without a mask it has up to SECTION heads, because blocks wait less then.

    With many tiles, or several query heads in a block, the queries descend, all heads of a tile in turn, and the first
    keys come first. The blocks of a head begin at the same tile, and each runs about one step behind the one before it.
    Over many steps these blocks drift apart, too. So the longer a head is, the fewer heads are computed together: with
    65536 queries and no mask, eight heads together run at 0.6 to 0.8 of the speed of two.
    """
    ascending = problem.H == problem.gradient_heads and problem.key_tiles <= FEW_TILES
    queries = 2 * LONG_SECTION if problem.causal else LONG_SECTION  # a masked block visits half of them on average
    long_heads = 1 if ascending and problem.causal else min(SECTION, queries // problem.Nq)
    heads_in_cache = CACHE // (8 * problem.D) // (problem.Nq + problem.Nk)
    return ascending, max(1, long_heads, heads_in_cache)


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
    alone = heads_alone(problem, heads)
    return torch.cat([work.repeat(alone), work.repeat_interleave(heads - alone)])


def busy(work, blocks):
    """The share of the time for which so many blocks work, until the last one ends. work: (tiles,), in their order."""
    return float(work.sum() / blocks / of_blocks(work, blocks).max())


def of_blocks(work, blocks):
    """The work (blocks,) that each block gets."""
    rounds = torch.nn.functional.pad(work, (0, -len(work) % blocks)).view(-1, blocks)
    rounds[1::2] = rounds[1::2].flip(1)
    return rounds.sum(0)
