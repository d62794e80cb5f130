# SPDX-License-Identifier: MIT
"""How Gluon's persistent programs share the tiles of a forward: who computes which tile, and when.

    programs_for   how many programs there are, one for each multiprocessor; each computes a tile a round
    place          in the kernel: the tile of a program in a round
    order_of       at the launch: the order of a causal call's tiles, with which all programs get equal work

A program that goes on with another tile loads it while it still computes the last one. But it cannot help another one
that has longer tiles. So a causal call deals its tiles out one length after the other, and every other round in
reverse: who had a longer tile gets a shorter one next. Needs torch and Triton.
"""

import torch
import triton
from triton.experimental import gluon
from triton.experimental.gluon import language as gl


@gluon.jit
def position(round, CAUSAL: gl.constexpr):
    """The program's place in a round: which of the round's tiles it computes."""
    if CAUSAL and round % 2 == 1:
        return gl.num_programs(0) - 1 - gl.program_id(0)
    else:
        return gl.program_id(0)


@gluon.jit
def rounds_of(order, CAUSAL: gl.constexpr):
    """How many tiles the program computes, one after the other: one in each round, but perhaps none in the last."""
    whole, rest = order[0] // gl.num_programs(0), order[0] % gl.num_programs(0)
    return whole + gl.where(position(whole, CAUSAL) < rest, 1, 0)


@gluon.jit
def place(round, lengths, order, CAUSAL: gl.constexpr, Br: gl.constexpr, Bc: gl.constexpr):
    """(b, h, i, blocks): in this round, the program computes the queries from i on, with so many tiles of keys.

    They are those of which a query of the tile sees a key, but at least one, in which all keys may be hidden.
    order: (tiles of all heads, section, alternate). When causal, the longest tiles of a section of heads come first,
    then their next ones, and so on; or the shortest first in every other section, if these alternate.
    """
    H, group, Nq, Nk = lengths
    tiles_of_all, section, alternate = order
    tiles = gl.cdiv(Nq, Br)
    n = round * gl.num_programs(0) + position(round, CAUSAL)
    tile, head, end = tiles - 1 - n % tiles, n // tiles, Nk
    if CAUSAL:
        first = head // section * section
        heads = gl.minimum(section, tiles_of_all // tiles - first)  # the last section may have fewer
        level = (n - first * tiles) // heads
        later = (tiles_of_all // tiles - 1) // section - first // section  # sections after this one
        tile = gl.where(later % 2 * alternate == 1, level, tiles - 1 - level)
        head = first + (n - first * tiles) % heads
        end = gl.minimum(Nk, gl.maximum(1, (tile + 1) * Br + Nk - Nq))  # no query of the tile sees a key from here on
    return head // H, head % H, tile * Br, gl.cdiv(end, Bc)


def programs_for(device, tiles):
    """How many programs a launch has: one for each multiprocessor, but no more than there are tiles."""
    return min(tiles, torch.cuda.get_device_properties(device).multi_processor_count)


def order_of(heads, Nq, Nk, Br, Bc, columns, programs):
    """(section, alternate) of a causal call, for `place`. columns: of a tile of K in shared memory.

    A section should have 2^22 numbers of K, which share the L2 cache well. It has more where the programs would get
    unequal work otherwise.
    """
    section = max(1, 2**22 // max(1, Nk * columns))
    while True:
        section = min(section, heads)
        for alternate in (0, 1):
            if busy(work_in_order(heads, Nq, Nk, Br, Bc, section, alternate), programs) > 0.95 or section == heads:
                return section, alternate
        section *= 2


def work_in_order(heads, Nq, Nk, Br, Bc, section, alternate):
    """Of each tile of queries its tiles of keys, and one for its beginning and end; in the order of `place`."""
    tiles = triton.cdiv(Nq, Br)
    n = torch.arange(heads * tiles, device="cpu")
    first = n // (section * tiles) * section
    level = (n - first * tiles) // (heads - first).clamp(max=section)
    later = (heads - 1) // section - first // section
    tile = torch.where(later % 2 * alternate == 1, level, tiles - 1 - level)
    return (((tile + 1) * Br + Nk - Nq).clamp(1, Nk) + Bc - 1) // Bc + 1


def busy(work, programs):
    """The share of the time for which the programs work, until the last one ends."""
    rounds = torch.nn.functional.pad(work, (0, -len(work) % programs)).view(-1, programs)
    rounds[1::2] = rounds[1::2].flip(1)
    return float(work.sum() / programs / rounds.sum(0).max())
