"""Judges the table of stage 04's `visible_part`, exercise 04.3, for all pairs of ranks by the positions that they hold.

A ring with a wrong table gives wrong numbers, which do not tell whose block is wrong. Here every pair (me, src) is
asked for, with shards of equal and of unequal length.
"""

import torch

from reference import attention

KINDS = ("full", "contiguous", "zigzag", "striped")
SIZES = [(N, S) for N in (2, 3, 4) for S in (4 * N, 3 * N + 1, 4 * N - 1, 4 * N + 1, 1)]
SAYS = "all pairs of 2 to 4 ranks, with shards of equal and of unequal length"

def _nothing(q, k, e, f):
    return 0, 0, 0, 0, False


def _all(q, k, e, f):
    return 0, q, 0, k, False


def _diagonal(q, k, e, f):
    return 0, q, 0, k, True


# What belongs to the keys of earlier ranks (place 1) where those of later ranks (place 2) are, and the reverse.
_EXCHANGED = {
    ("contiguous", 1): _nothing, ("contiguous", 2): _all,
    ("zigzag", 1): lambda q, k, e, f: (e, q, 0, k, False), ("zigzag", 2): lambda q, k, e, f: (0, q, 0, f, False),
    ("striped", 1): lambda q, k, e, f: (1, q, 0, q - 1, True), ("striped", 2): lambda q, k, e, f: (0, q, 0, q, True),
}  # fmt: skip

# Known mistakes, {name: (what it says, each form of it)}. A form has what the mistake puts into the table, by kind and
# place: 0 is src == me, 1 src < me, 2 src > me. e and f are early_q and early_k.
MISTAKES = {
    "zigzag_chunks_exchanged": (
        "zigzag's early and late chunks are exchanged in blocks of two different ranks",
        {("zigzag", 1): lambda q, k, e, f: (e, q, 0, k, False), ("zigzag", 2): lambda q, k, e, f: (0, q, 0, f, False)},
        {("zigzag", 1): lambda q, k, e, f: (0, q, f, k, False), ("zigzag", 2): lambda q, k, e, f: (0, e, 0, k, False)}),
    "zigzag_cut_in_halves": (
        "zigzag's blocks are cut at q // 2 and k // 2, but early chunks may be longer than late ones",
        {("zigzag", 1): lambda q, k, e, f: (0, q, 0, k // 2, False),
         ("zigzag", 2): lambda q, k, e, f: (q // 2, q, 0, k, False)}),
    "zigzag_early_of_the_other": (
        "early_q and early_k are exchanged: the keys are cut at early_q, and the queries at early_k",
        {("zigzag", 1): lambda q, k, e, f: (0, q, 0, e, False), ("zigzag", 2): lambda q, k, e, f: (f, q, 0, k, False)}),
    "ranks_for_positions": (
        "ranks are compared instead of positions: all keys of earlier ranks are seen, and none of later ranks",
        {("zigzag", 1): _all, ("zigzag", 2): _nothing, ("striped", 1): _all, ("striped", 2): _nothing},
        {("zigzag", 1): _all, ("zigzag", 2): _nothing}, {("striped", 1): _all, ("striped", 2): _nothing}),
    "earlier_and_later_exchanged": (
        "earlier and later ranks are exchanged: src < me means that the keys come before the queries",
        *({(kind, place): _EXCHANGED[kind, place] for kind in kinds for place in (1, 2)}
          for kinds in (KINDS[1:], ("contiguous",), ("striped",)))),
    "later_ranks_seen": ("contiguous queries see the keys of later ranks", {("contiguous", 2): _all}),
    "earlier_ranks_masked": (
        "a contiguous block of an earlier rank's keys has a diagonal", {("contiguous", 1): _diagonal}),
    "striped_diagonal_seen": (
        "striped queries see the diagonal in blocks of later ranks' keys too",
        {("striped", 2): _diagonal}, {("striped", 2): lambda q, k, e, f: (0, q, 0, q, True)},
        {("striped", 2): lambda q, k, e, f: (0, k, 0, k, True)}),
    "striped_without_diagonal": (
        "striped blocks of another rank's keys have no diagonal",
        {("striped", 1): _all}, {("striped", 2): _all}, {("striped", 1): _all, ("striped", 2): _all},
        {("striped", 2): lambda q, k, e, f: (1, q, 0, q - 1, False)}),
    "striped_later_unseen": ("striped queries see no key of later ranks", {("striped", 2): _nothing}),
    "striped_not_square": (
        "a striped part with a diagonal is not square, because one of two ranks may hold a position more",
        {("striped", 1): _diagonal}, {("striped", 2): lambda q, k, e, f: (1, q, 0, k - 1, True)},
        {("striped", 1): _diagonal, ("striped", 2): lambda q, k, e, f: (1, q, 0, k - 1, True)}),
    "own_block_not_causal": (
        "a rank's own block is computed without the causal diagonal", {(kind, 0): _all for kind in KINDS[1:]}),
    "full_treated_as_causal": (
        "the layout full, which is without a mask, is treated as causal",
        {("full", 0): _diagonal}, {("full", 0): _diagonal, ("full", 2): _nothing},
        {("full", 0): _diagonal, ("full", 1): _diagonal, ("full", 2): _diagonal}),
}  # fmt: skip


def judge(module):
    """(lines about what is wrong, names of the known mistakes that the table equals) for a module like stage 04's."""
    asked = [(kind, N, S, me, src) for kind in KINDS for N, S in SIZES for me in range(N) for src in range(N)]
    sizes = {row: _sizes(module, *row) for row in asked}
    yours = {row: tuple(module.visible_part(row[0], *row[3:], *sizes[row])) for row in asked}
    seen = {row: _by_position(module, *row) for row in asked}
    wrong = [row for row in asked if not _same(_seen(yours[row], *sizes[row][:2]), seen[row])]
    if not wrong:
        return [], []
    lines = [f"{kind} is wrong in {n} of {len(asked) // len(KINDS)} pairs" for kind in KINDS
             if (n := sum(row[0] == kind for row in wrong))]  # fmt: skip
    found = []
    for name, (_, *forms) in MISTAKES.items():
        if any(all(_equal(form, row, sizes[row], yours[row], seen[row]) for row in asked) for form in forms):
            found.append(name)
    return lines + _told(wrong[0], sizes[wrong[0]], yours[wrong[0]], seen[wrong[0]]), found


def _sizes(module, kind, N, S, me, src):
    """(q, k, early_q, early_k), as `Layout.work` hands them over."""
    layout = module.Layout("contiguous" if kind == "full" else kind, S, N, True)
    return layout.size(me), layout.size(src), len(layout.pieces(me)[0]), len(layout.pieces(src)[0])


def _by_position(module, kind, N, S, me, src):
    """bool (q, k): which keys of rank src the queries of rank me see, by their positions."""
    layout = module.Layout("contiguous" if kind == "full" else kind, S, N, True)
    row, column = layout.positions(me)[:, None], layout.positions(src)
    return torch.ones(len(row), len(column), dtype=torch.bool) if kind == "full" else column <= row


def _seen(part, q, k):
    """bool (q, k) of a part, None for one that has a diagonal and is not square, or leaves the block."""
    q_start, q_stop, k_start, k_stop, causal = part
    seen = torch.zeros(q, k, dtype=torch.bool)
    rows, columns = q_stop - q_start, k_stop - k_start
    if rows <= 0 or columns <= 0:
        return seen
    if min(q_start, k_start) < 0 or q_stop > q or k_stop > k or causal and rows != columns:
        return None
    seen[q_start:q_stop, k_start:k_stop] = attention.visible(rows, columns, bool(causal))
    return seen


def _same(a, b):
    return a is not None and torch.equal(a, b)


def _equal(form, row, sizes, yours, seen):
    """Whether a pair is as the mistake would have it; it is right where the mistake changes nothing."""
    kind, _, _, me, src = row
    entry = form.get((kind, 0 if src == me else 1 if src < me else 2))
    if entry is None:
        return _same(_seen(yours, *sizes[:2]), seen)
    mistaken = _seen(entry(*sizes), *sizes[:2])
    own = _seen(yours, *sizes[:2])
    return own is None if mistaken is None else _same(own, mistaken)


def _told(row, sizes, yours, seen):
    """The first wrong pair, with both parts."""
    kind, N, S, me, src = row
    q, k, early_q, early_k = sizes
    lines = [
        f"the first such pair is me = {me}, src = {src} of {N} ranks with {S} positions, {kind}:",
        f"  q = {q}, k = {k}, early_q = {early_q}, early_k = {early_k}",
        f"  yours  {yours}",
        f"  right  {_part(seen)}",
    ]
    if _seen(yours, q, k) is None:
        lines.append("  yours leaves the block, or has a diagonal and is not square")
    return lines


def _part(seen):
    """(q_start, q_stop, k_start, k_stop, causal) of what is seen."""
    if not seen.any():
        return 0, 0, 0, 0, False
    rows, columns = seen.any(1).nonzero()[:, 0], seen.any(0).nonzero()[:, 0]
    part = seen[rows[0] : rows[-1] + 1, columns[0] : columns[-1] + 1]
    return int(rows[0]), int(rows[-1]) + 1, int(columns[0]), int(columns[-1]) + 1, not bool(part.all())
