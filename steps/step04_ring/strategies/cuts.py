# SPDX-License-Identifier: MIT
"""Which blocks cover what is visible, where the queries and the keys of a block are not those of two ranks.

    few_queries   star: the last queries of the sequence, with a rank's keys
    cut           query-parallel: a run of queries out of packed sequences

The idea of both: a causal block aligns its last query with its last key. So keys after the last query are cut away, and
then one ordinary call has the right mask, though its queries and keys begin at different positions. Needs torch only.
"""

import torch


def few_queries(layout, rank, Nq):
    """(rows of the last Nq queries, rows of the rank's keys, causal) of the blocks in which these queries see keys."""
    n = layout.size(rank)
    if not layout.causal or Nq == 1:  # every query sees every key: one block, not one for each run of keys
        if n and Nq:
            yield slice(0, Nq), slice(0, n), False
        return
    start, before = 0, layout.S - Nq  # query i stands at position i + before
    for run in filter(len, layout.pieces(rank)):
        if run.step != 1:
            raise ValueError("star needs successive keys for several causal queries: layout zigzag or contiguous.")
        keys, start = slice(start, start + len(run)), start + len(run)
        first, after = (max(0, end - before) for end in (run.start, run.stop))
        if first < after:  # queries that stand among these keys, the last of them at the last key
            yield slice(first, after), keys, True
        if after < Nq:
            yield slice(after, Nq), keys, False


def cut(cu_seqlens, run, S, causal, device):
    """What a run of successive queries needs of packed sequences: (the keys, as a slice; options of a packed call).

    For cu_seqlens (0, 5, 9, 16) and the queries 7 ... 10 of a causal call: the keys 5 ... 10, cu_seqlens_q (0, 0, 2, 4)
    and cu_seqlens_k (0, 0, 4, 6). The other sequences stay, with length 0. A causal call aligns a sequence's last query
    with its last key; so a sequence whose later queries are on other ranks must lose its later keys here, too.
    """
    cu_seqlens, (a, b) = list(map(int, cu_seqlens)), (run.start, run.stop)
    if cu_seqlens[:1] != [0] or cu_seqlens != sorted(cu_seqlens) or cu_seqlens[-1] > S:
        raise ValueError(f"cu_seqlens must begin with 0, never fall and end at most at S = {S}; got {cu_seqlens}.")
    first = max(c for c in cu_seqlens if c <= a)
    last = b if causal else min((c for c in cu_seqlens if c >= b), default=cu_seqlens[-1])
    options = {}
    for name, low, high in (("q", a, b), ("k", first, last)):
        ends = [min(max(c, low), high) - low for c in cu_seqlens]
        options[f"cu_seqlens_{name}"] = torch.tensor(ends, dtype=torch.int32, device=device)
        options[f"max_seqlen_{name}"] = max(y - x for x, y in zip(ends, ends[1:], strict=False))
    return slice(first, last), options
