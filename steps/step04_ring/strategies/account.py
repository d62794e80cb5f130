# SPDX-License-Identifier: MIT
"""What a strategy costs a rank, as formulas: the bytes that it sends, and the memory of its forward.

N ranks, c = S / N; q = B H c D and kv = 2 B Hk c D elements of e bytes; f = 4 / e, for float32; o = q and its lse

    sent              forward                              backward
      ring            (N-1) kv                             (N-1) (kv + f kv): dK and dV are sent in float32
      query_parallel  (N-1) kv                             (N-1) (kv + f kv)
      star            (N-1) (q + o); causal: fewer o       -
      ulysses         (N-1) / N (2 q + kv)                 (N-1) / N (2 q + kv)
    memory of the forward beyond its inputs
      ring            2 kv + 4 o + f q; causal: fewer o    K, V at hand and arriving; parts that wait to be merged; out;
                                                           16 bits: f q once more, a part in float32
      query_parallel  2 N kv                               K, V of all ranks as they arrive, and in order
      star            3 N o; causal: fewer o               the parts as found, as sent, and as received
      ulysses         5 q + kv                             q, k, v, out of the rank's heads; out on its way home, 3 q

`sent_bytes` is exact, for shards of any length, without what the backend adds, without what a copy engine fetches, and
without the few bytes by which the ranks compare their calls. `memory_bytes` has the largest terms; a fused kernel needs
no memory inside. The tests count both on four ranks. Needs nothing but a Layout of layout.py.
"""


def sent_bytes(strategy, layout, rank, *, B, H, Hk, D, e):
    """(bytes that the rank sends in the forward, in the backward or None); e is the size of an element in bytes."""
    sizes = [layout.size(r) for r in range(layout.N)]
    others, n = sum(sizes) - sizes[rank], sizes[rank]
    kv, q = 2 * B * Hk * D, B * H * D  # of one position
    if strategy == "ring":  # all shards but the next rank's in the forward, all but its own in the backward
        return (sum(sizes) - sizes[(rank + 1) % layout.N]) * kv * e, others * kv * (e + 4)
    if strategy == "query_parallel":
        gathered = (layout.N - 1) * max(sizes) * kv * e  # as long as the longest
        return gathered, gathered + others * kv * 4
    if strategy == "star":
        rows = sum(len(found_rows(layout, owner, rank)) for owner in range(layout.N) if owner != rank)
        return (layout.N - 1) * max(sizes) * q * e + rows * B * H * (D * e + 4), None
    there = (layout.N - 1) * n * (q + kv) // layout.N  # q, k, v; in the backward dout alone
    back = others * q // layout.N
    return (there + back) * e, ((layout.N - 1) * n * q + others * (q + kv)) // layout.N * e


def found_rows(layout, owner, keys_of):
    """The rows of the owner's queries for which star computes a part with the keys of another rank."""
    work = layout.work(owner, keys_of)
    return range(layout.size(owner))[work[0]] if work else range(0)


def memory_bytes(strategy, layout, rank, *, B, H, Hk, D, e):
    """Bytes that the forward holds beyond its inputs, the largest terms: the table at the head of this file."""
    n, N = layout.size(rank), layout.N
    kv, q, lse = 2 * B * Hk * n * D * e, B * H * n * D * e, 4 * B * H * n
    merging = (4 * q // e + lse) * (1 if e == 4 else 2)  # out in float32, and a float32 copy of a part with 16 bits
    if strategy == "ring":
        waiting = min(4 * n, sum(len(found_rows(layout, rank, src)) for src in range(N)))  # step 04 merges four at once
        return 2 * kv + waiting * B * H * (D * e + 4) + merging
    if strategy == "query_parallel":
        return max(2 * N * kv, N * kv + 2 * q + 2 * lse)
    if strategy == "star":
        pairs = [(owner, rank) for owner in range(N)], [(rank, src) for src in range(N)]
        found, received = (sum(len(found_rows(layout, *pair)) for pair in some) * B * H for some in pairs)
        outs = (found + received) * D * e
        return max(found * (D * e + 4) + outs, received * (D * e + 4) + merging)
    return 5 * q + kv + lse
