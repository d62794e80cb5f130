"""The dropout mask as a pure function of (seed, batch, head, query, key): Philox4x32-10 in numpy.

A counter-based generator has no state. It turns a counter of four 32-bit words and a key of two into four random words,
so a thread computes the random numbers of its own entries and needs nothing of any other thread. Here

    key     = low and high 32 bits of the seed
    counter = (key's number div 16, query's number, head, batch)

and the sixteen bytes of the result, least significant byte of the first word first, belong to the keys 16 c ... 16 c +
15 of that query. An entry is kept where its byte is less than t = round(256 (1 - p)), at least 1 unless p is 1, and
what is kept is multiplied by 256 / t. So neither tiles nor the order of computation nor a division of the keys among
calls change the mask.

Source: Salmon, Moraes, Dror and Shaw, "Parallel Random Numbers: As Easy as 1, 2, 3", SC 2011. triton.language.philox
gives the same words.
"""

import numpy as np
import torch

MULTIPLY = np.uint64(0xD2511F53), np.uint64(0xCD9E8D57)  # the multipliers of the first and the third word
RAISE = np.uint64(0x9E3779B9), np.uint64(0xBB67AE85)  # what the two words of the key grow by from round to round
WORD = np.uint64(0xFFFFFFFF)


def philox(counter, key, rounds=10):
    """The four random words, uint32 arrays, of a counter of four words and a key of two: arrays or integers."""
    c0, c1, c2, c3 = (np.asarray(c, dtype=np.uint64) for c in counter)
    k0, k1 = (np.asarray(k, dtype=np.uint64) for k in key)
    for _ in range(rounds):
        a, b = MULTIPLY[0] * c0, MULTIPLY[1] * c2  # 64 bits each, no overflow
        c0, c1, c2, c3 = (b >> np.uint64(32)) ^ c1 ^ k0, b & WORD, (a >> np.uint64(32)) ^ c3 ^ k1, a & WORD
        k0, k1 = (k0 + RAISE[0]) & WORD, (k1 + RAISE[1]) & WORD
    return tuple(c.astype(np.uint32) for c in np.broadcast_arrays(c0, c1, c2, c3))


def threshold(p):
    """t: how many of the 256 values of a byte keep an entry, when entries are to be dropped with probability p."""
    return max(1, round(256 * (1 - p))) if p < 1 else 0


def rounded(p):
    """1 - t / 256: p rounded to what a byte can decide, for the option `dropout_p` of the reference."""
    return 1 - threshold(p) / 256


def keep_mask(seed, B, H, Nq, Nk, p, first_query=None, first_key=0, cu_seqlens_q=None, cu_seqlens_k=None):
    """(B, H, Nq, Nk) bool, True where the entry is kept, for a seed of 64 bits (an integer, negative ones too).

    A query's number is i + first_query, or i where first_query is None: the default position Nk - Nq is not added. A
    key's number is j + first_key. So a call with a part of the keys has the mask's columns of one call with all keys,
    if both give the same first_query (or none). Numbers are taken modulo 2^32.

    With cu_seqlens_q and cu_seqlens_k the sequences are packed and B is 1: queries and keys are numbered from 0 in each
    sequence, the number of the sequence takes the place of the batch, and all other entries are False.
    """
    if cu_seqlens_q is None:
        return _dense(seed, np.arange(B), H, Nq, Nk, p, first_query or 0, first_key)
    keep = torch.zeros(B, H, Nq, Nk, dtype=torch.bool)
    starts = [x.tolist() for x in (cu_seqlens_q, cu_seqlens_k)]
    ends = [x[1:] for x in starts]
    for s, (q0, k0, q1, k1) in enumerate(zip(*starts, *ends, strict=False)):
        keep[:, :, q0:q1, k0:k1] = _dense(seed, np.array([s]), H, q1 - q0, k1 - k0, p, first_query or 0, first_key)
    return keep


def _dense(seed, batches, H, Nq, Nk, p, first_query, first_key):
    """(len(batches), H, Nq, Nk) bool for queries first_query ... and keys first_key ... of one numbering."""
    first, last = first_key // 16, -(-(first_key + Nk) // 16)
    call, query = np.arange(first, last), np.arange(Nq) + first_query
    counter = call, query[:, None], np.arange(H)[:, None, None], batches[:, None, None, None]
    counter = [c.astype(np.int64).view(np.uint64) & WORD for c in counter]  # modulo 2^32
    words = philox(counter, key=(seed & 0xFFFFFFFF, (seed >> 32) & 0xFFFFFFFF))
    words = np.stack(words, axis=-1).astype("<u4")  # (B, H, Nq, calls, 4), least significant byte first
    numbers = np.ascontiguousarray(words).view(np.uint8).reshape(len(batches), H, Nq, 16 * len(call))
    start = first_key - 16 * first
    return torch.from_numpy(numbers[..., start : start + Nk] < threshold(p))
