"""Which entries dropout keeps, by a random generator without a state: the same entries whatever the tile.

In this stage the forward, the two kernels of the backward (one of them with its tiles transposed) and the ring all have
to draw the same mask, although each divides the queries and keys into other tiles.
"""

import numpy as np
import torch
import triton
import triton.language as tl

from reference import philox
from steps import engine
from steps.workbook.puzzles import Case, mistake


def specification(seed, B, H, Nq, Nk, p):
    """(B, H, Nq, Nk) bool: which entries are kept. One call of Philox gives the bytes of sixteen keys that follow.

    A counter of four numbers becomes four random words of 32 bits. Byte 0 is the lowest byte of the first word.
    """
    batch, head, query, key = np.ogrid[:B, :H, :Nq, :Nk]
    words = philox.philox(counter=(key // 16, query, head, batch), key=(seed & 0xFFFFFFFF, seed >> 32 & 0xFFFFFFFF))
    byte = np.choose(key % 16 // 4, words) >> (8 * (key % 4)).astype(np.uint32) & 255
    return {"keep": torch.from_numpy(byte < round(256 * (1 - p)))}


@triton.jit
def kept(seed, i, j, row, column, head, batch, threshold):
    """Which entries of the tile at query i and key j dropout keeps: those whose random byte is below the threshold.

    row and column count from i and j. They are (Br, 1) and (1, Bc), or (1, Br) and (Bc, 1) if the tile is transposed.
    tl.philox(seed, c0, c1, c2, c3) gives the four words of each counter, uint32, where c0 to c3 broadcast.
    """
    key, query = j + column, i + row
    w0, w1, w2, w3 = tl.philox(seed, key // 16, query, head, batch)
    word = key // 4 % 4
    words = tl.where(word < 2, tl.where(word == 0, w0, w1), tl.where(word == 2, w2, w3))
    return (words >> (8 * (key % 4)).to(tl.uint32)) & 255 < threshold


@triton.jit
def keep_kernel(
    keep, seed, H, Nq, Nk, threshold, TRANSPOSED: tl.constexpr, Br: tl.constexpr, Bc: tl.constexpr
):  # fmt: skip
    i, j, bh = tl.program_id(0) * Br, tl.program_id(1) * Bc, tl.program_id(2)
    row, column = tl.arange(0, Br)[:, None], tl.arange(0, Bc)[None, :]
    if TRANSPOSED:
        row, column = tl.arange(0, Br)[None, :], tl.arange(0, Bc)[:, None]
    tile = kept(tl.load(seed), i, j, row, column, bh % H, bh // H, threshold)
    exists = (i + row < Nq) & (j + column < Nk)
    tl.store(keep + (bh * Nq + i + row) * Nk + j + column, tile.to(tl.int8), mask=exists)


def run(seed, B, H, Nq, Nk, p, Br, Bc, transposed):
    """{"keep"} from a kernel with tiles of Br x Bc."""
    keep = torch.zeros(B, H, Nq, Nk, dtype=torch.int8, device=engine.device)
    grid = triton.cdiv(Nq, Br), triton.cdiv(Nk, Bc), B * H
    seed, threshold = torch.tensor(seed, device=engine.device), philox.threshold(p)
    keep_kernel[grid](keep, seed, H, Nq, Nk, threshold, TRANSPOSED=transposed, Br=Br, Bc=Bc)
    return {"keep": keep.cpu() != 0}


def expected(seed, B, H, Nq, Nk, p):
    return {"keep": (philox.keep_mask(seed, B, H, Nq, Nk, p), 0)}


def _case(says, Br, Bc, transposed=False, seed=7, p=0.4):
    inputs = dict(seed=seed, B=2, H=2, Nq=20, Nk=40, p=p)
    return Case(says, lambda: inputs, dict(Br=Br, Bc=Bc, transposed=transposed))


CASES = [
    _case("tiles of 16 x 32", 16, 32),
    _case("tiles of 32 x 16: the same mask", 32, 16),
    _case("tiles of 16 x 8, half of what a call gives: the same mask", 16, 8),
    _case("transposed tiles of 16 x 32: the same mask", 16, 32, transposed=True),
    _case("a seed of 64 bits, p = 0.9", 16, 32, seed=-81985529216486896, p=0.9),
]


# The mistakes: another counter, or another byte of the result.


def _drawn(seed, B, H, Nq, Nk, p, counter, number=lambda key: key % 16, more=0):
    """{"keep"} from counter(batch, head, query, key) and the number of the byte that an entry takes."""
    batch, head, query, key = np.ogrid[:B, :H, :Nq, :Nk]
    words = philox.philox(counter(batch, head, query, key), (seed & 0xFFFFFFFF, seed >> 32 & 0xFFFFFFFF))
    number = np.broadcast_to(number(key), (B, H, Nq, Nk))
    words = [np.broadcast_to(word, number.shape) for word in words]
    byte = np.choose(number // 4, words) >> (8 * (number % 4)).astype(np.uint32) & 255
    return {"keep": torch.from_numpy(byte < philox.threshold(p) + more)}


def _right(batch, head, query, key):
    return key // 16, query, head, batch


@mistake("keys are counted from the tile's first key, so that the tile's width decides what is dropped")
def keys_of_the_tile(Br, Bc, transposed, **inputs):
    return _drawn(**inputs, counter=lambda b, h, i, j: (j % Bc // 16, i, h, b), number=lambda key: key % Bc % 16)


@mistake("queries are counted from the tile's first query, so that all tiles of queries drop the same entries")
def queries_of_the_tile(Br, Bc, transposed, **inputs):
    return _drawn(**inputs, counter=lambda b, h, i, j: (j // 16, i % Br, h, b))


@mistake("queries and keys are counted from the tile's first ones, so that the tile's size decides what is dropped")
def counted_from_the_tile(Br, Bc, transposed, **inputs):
    return _drawn(**inputs, counter=lambda b, h, i, j: (j % Bc // 16, i % Br, h, b), number=lambda key: key % Bc % 16)


@mistake("an entry is kept where its byte is at most the threshold, and not below it")
def at_most_the_threshold(Br, Bc, transposed, **inputs):
    return _drawn(**inputs, counter=_right, more=1)


@mistake("the counter begins with the key itself and not with key div 16, so that each key has a call of its own")
def key_not_divided(Br, Bc, transposed, **inputs):
    return _drawn(**inputs, counter=lambda b, h, i, j: (j, i, h, b))


@mistake("all sixteen keys of a call take its first byte, so that they are kept or dropped together")
def one_byte_for_all(Br, Bc, transposed, **inputs):
    return _drawn(**inputs, counter=_right, number=lambda key: 0 * key)


@mistake("the bytes of a word are taken from the highest one on")
def highest_byte_first(Br, Bc, transposed, **inputs):
    return _drawn(**inputs, counter=_right, number=lambda key: key % 16 ^ 3)


@mistake("the word is key mod 4 and the byte in it key div 4 mod 4, instead of the other way round")
def word_and_byte_exchanged(Br, Bc, transposed, **inputs):
    return _drawn(**inputs, counter=_right, number=lambda key: key % 4 * 4 + key // 4 % 4)


@mistake("head and batch have each other's place in the counter")
def head_and_batch_exchanged(Br, Bc, transposed, **inputs):
    return _drawn(**inputs, counter=lambda b, h, i, j: (j // 16, i, b, h))


@mistake("query and key have each other's place in the counter")
def query_and_key_exchanged(Br, Bc, transposed, **inputs):
    return _drawn(**inputs, counter=lambda b, h, i, j: (i, j // 16, h, b))


@mistake("the head is not in the counter, so that all heads drop the same entries")
def head_left_out(Br, Bc, transposed, **inputs):
    return _drawn(**inputs, counter=lambda b, h, i, j: (j // 16, i, 0 * h, b))


@mistake("the batch is not in the counter, so that all batch entries drop the same entries")
def batch_left_out(Br, Bc, transposed, **inputs):
    return _drawn(**inputs, counter=lambda b, h, i, j: (j // 16, i, h, 0 * b))


@mistake("what should be kept is dropped, and what should be dropped is kept")
def kept_and_dropped_exchanged(Br, Bc, transposed, **inputs):
    return {"keep": ~expected(**inputs)["keep"][0]}
