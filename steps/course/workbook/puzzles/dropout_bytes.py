"""Which entries dropout keeps, by a random generator without a state: the same entries whatever the tile.

In this stage the forward, the two kernels of the backward (one of them with its tiles transposed) and the ring all have
to draw the same mask, although each divides the queries and keys into other tiles.
"""

from types import SimpleNamespace

import numpy as np
import torch
import triton
import triton.language as tl

from reference import philox
from steps import engine
from steps.course.workbook.puzzles import Case


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


def explain(got, want, seed, B, H, Nq, Nk, p, Br, Bc, transposed):
    """The first entry that is another one: its counter and its byte, and the keys that share the call with it."""
    yours, right = got["keep"], want["keep"][0]
    wrong = (yours != right).nonzero()
    batch, head, query, key = wrong[0].tolist()
    counter, number, threshold = (key // 16, query, head, batch), key % 16, philox.threshold(p)
    words = philox.philox([np.array([x]) for x in counter], (seed & 0xFFFFFFFF, seed >> 32 & 0xFFFFFFFF))
    byte = int(words[number // 4][0]) >> 8 * (number % 4) & 255
    has_to_be = "kept" if byte < threshold else "dropped"
    first, stop = key // 16 * 16, min(key // 16 * 16 + 16, Nk)
    rows = ["".join(".#"[x] for x in keep[batch, head, query, first:stop].int()) for keep in (yours, right)]
    return [
        f"{len(wrong)} of {right.numel()} entries are kept or dropped wrongly, with tiles of {Br} x {Bc}",
        f"  the first one is key {key} of query {query}, head {head}, batch entry {batch}",
        f"  byte {number} of the counter {counter} is {byte}, and the threshold {threshold}: it has to be {has_to_be}",
        f"  keys {first} to {stop - 1} of this query, # kept, . dropped: yours {rows[0]}, right {rows[1]}",
    ]


# The mistakes: another counter, or another byte of the result.


def mistaken(seed, B, H, Nq, Nk, p, Br, Bc, transposed, answer):
    """{"keep"} with answer = {"counter": of an entry, "number": of the byte that it takes, or "keeps": by its byte}."""
    batch, head, query, key = np.ogrid[:B, :H, :Nq, :Nk]
    x = SimpleNamespace(b=batch, h=head, i=query, j=key, Br=Br, Bc=Bc)
    right = {"counter": _counter, "number": lambda x: x.j % 16, "keeps": lambda byte, threshold: byte < threshold}
    counter, number, keeps = (right | answer).values()
    words = philox.philox(counter(x), (seed & 0xFFFFFFFF, seed >> 32 & 0xFFFFFFFF))
    number = np.broadcast_to(number(x), (B, H, Nq, Nk))
    words = [np.broadcast_to(word, number.shape) for word in words]
    byte = np.choose(number // 4, words) >> (8 * (number % 4)).astype(np.uint32) & 255
    return {"keep": torch.from_numpy(keeps(byte, philox.threshold(p)))}


def _counter(x):
    return x.j // 16, x.i, x.h, x.b


MISTAKES = {
    "keys_of_the_tile": (
        "keys are counted from the tile's first key, so that the tile's width decides what is dropped",
        dict(counter=lambda x: (x.j % x.Bc // 16, x.i, x.h, x.b), number=lambda x: x.j % x.Bc % 16)),
    "queries_of_the_tile": (
        "queries are counted from the tile's first query, so that all tiles of queries drop the same entries",
        dict(counter=lambda x: (x.j // 16, x.i % x.Br, x.h, x.b))),
    "counted_from_the_tile": (
        "queries and keys are counted from the tile's first ones, so that the tile's size decides what is dropped",
        dict(counter=lambda x: (x.j % x.Bc // 16, x.i % x.Br, x.h, x.b), number=lambda x: x.j % x.Bc % 16)),
    "at_most_the_threshold": (
        "an entry is kept where its byte is at most the threshold, and not below it",
        dict(keeps=lambda byte, threshold: byte <= threshold)),
    "key_not_divided": (
        "the counter begins with the key itself and not with key div 16, so that each key has a call of its own",
        dict(counter=lambda x: (x.j, x.i, x.h, x.b))),
    "one_byte_for_all": (
        "all sixteen keys of a call take its first byte, so that they are kept or dropped together",
        dict(number=lambda x: 0 * x.j)),
    "highest_byte_first": (
        "the bytes of a word are taken from the highest one on", dict(number=lambda x: x.j % 16 ^ 3)),
    "word_and_byte_exchanged": (
        "the word is key mod 4 and the byte in it key div 4 mod 4, instead of the other way round",
        dict(number=lambda x: x.j % 4 * 4 + x.j // 4 % 4)),
    "head_and_batch_exchanged": (
        "head and batch have each other's place in the counter", dict(counter=lambda x: (x.j // 16, x.i, x.b, x.h))),
    "query_and_key_exchanged": (
        "query and key have each other's place in the counter", dict(counter=lambda x: (x.i, x.j // 16, x.h, x.b))),
    "head_left_out": (
        "the head is not in the counter, so that all heads drop the same entries",
        dict(counter=lambda x: (x.j // 16, x.i, 0 * x.h, x.b))),
    "batch_left_out": (
        "the batch is not in the counter, so that all batch entries drop the same entries",
        dict(counter=lambda x: (x.j // 16, x.i, x.h, 0 * x.b))),
    "kept_and_dropped_exchanged": (
        "what should be kept is dropped, and what should be dropped is kept",
        dict(keeps=lambda byte, threshold: byte >= threshold)),
}  # fmt: skip
