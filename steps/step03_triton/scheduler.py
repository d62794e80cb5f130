# SPDX-License-Identifier: MIT
"""The tile scheduler of Gluon's persistent programs: which program computes which tile of a forward, and when.

    programs_for   how many programs there are, one for each multiprocessor; each computes a tile a round
    place          in the kernel: the tile of a program in a round
    order_of       at the launch: the order of a causal call's tiles, with which all programs get equal work

A program loads its next tile while it still computes the last one. But it cannot help a program that has longer tiles.
So a causal call gives out tiles from long to short, in snake order: forwards in one round, backwards in the next. Then
a program with a longer tile gets a shorter one next. Needs torch and Triton.
"""

from typing import Any, NamedTuple

import torch
import triton
from triton.experimental import gluon
from triton.experimental.gluon import language as gl


class Lengths(NamedTuple):
    """How many of what a call has. Query heads h with the same h // group share a key head."""

    H: Any
    group: Any
    Nq: Any
    Nk: Any


class Order(NamedTuple):
    """The order of the tiles of a call: see `place`."""

    tiles: Any  # of all heads
    section: Any  # so many heads are computed together when causal
    alternate: Any  # 1 if every other section begins with its shortest tiles, else 0


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
    whole, rest = order.tiles // gl.num_programs(0), order.tiles % gl.num_programs(0)
    return whole + gl.where(position(whole, CAUSAL) < rest, 1, 0)


@gluon.jit
def place(round, lengths, order, CAUSAL: gl.constexpr, Br: gl.constexpr, Bc: gl.constexpr):
    """(b, h, i, blocks): in this round, the program computes the queries from i on, with `blocks` tiles of keys.

    These are the tiles with a key that some of the queries see; if there is none, one tile, in which all keys are
    hidden. When causal, the longest tiles of all heads of a section come first, then their next ones, and so on. If
    `alternate`, every other section begins with the shortest ones.
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

    A section should have 2^22 numbers of K, which fit into the L2 cache well. It has more where otherwise the programs
    would get unequal work.
    """
    section = max(1, 2**22 // max(1, Nk * columns))
    while True:
        section = min(section, heads)
        for alternate in (0, 1):
            if busy(work_in_order(heads, Nq, Nk, Br, Bc, section, alternate), programs) > 0.95 or section == heads:
                return section, alternate
        section *= 2


def work_in_order(heads, Nq, Nk, Br, Bc, section, alternate):
    """For each tile of queries, in the order of `place`: its tiles of keys, plus one for its beginning and end."""
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
