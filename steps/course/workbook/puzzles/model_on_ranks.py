"""What a rank gives to its model: tokens, positions for the rotary embedding, labels, and by what a loss is divided.

A model computes all of it from the tokens on one device. A rank has only some of the positions, and zigzag's are not
even neighbours.
"""

import torch

from steps.course.workbook.puzzles import Case
from steps.step04_ring import Layout

IGNORED = -100  # the label of a token that has no next one; torch's cross_entropy leaves it out


def specification(tokens, kind, N):
    """What the ranks must have together, put back into the order of the sequence: the same as on one device."""
    S = len(tokens)
    labels = torch.tensor([*tokens[1:], IGNORED])
    count = torch.full((N,), S - 1)  # on every rank: it divides the sum of its own losses by all labels there are
    return {"tokens": tokens, "positions": torch.arange(S), "labels": labels, "count": count}


def of_rank(tokens, layout, rank):
    """(tokens, positions, labels, count) of this rank. tokens (S,) are those of the whole sequence.

    The first three are tensors with an entry for each of the rank's positions, in the order of layout.positions(rank).
    The label of a token is the token that follows it in the whole sequence. The last token has none, and gets IGNORED.
    count is a number. Every rank divides the sum of its losses by it, and the results are added up over the ranks.
    """
    mine = layout.positions(rank)
    labels = torch.cat([tokens[1:], tokens.new_tensor([IGNORED])])  # before the cut: the next token may be elsewhere
    return tokens[mine], mine, labels[mine], len(tokens) - 1


def run(tokens, kind, N, answer=of_rank):
    """The entries of the specification, from `of_rank` on every rank."""
    layout = Layout(kind, len(tokens), N)
    *columns, counts = zip(*(_checked(answer(tokens, layout, rank), layout, rank) for rank in range(N)), strict=True)
    whole = {name: layout.unshard(column, dim=0) for name, column in zip(NAMES, columns, strict=False)}
    return whole | {"count": torch.tensor(counts)}


NAMES = "tokens", "positions", "labels", "count"


def _checked(result, layout, rank):
    """The result of a rank. Raises TypeError or ValueError for another structure."""
    if not isinstance(result, tuple | list) or len(result) != 4:
        raise TypeError(f"of_rank has to return (tokens, positions, labels, count); got {result!r:.60}")
    *tensors, count = result
    for name, x in zip(NAMES, tensors, strict=False):
        if not isinstance(x, torch.Tensor) or x.shape != (layout.size(rank),):
            shape = tuple(x.shape) if isinstance(x, torch.Tensor) else type(x).__name__
            raise ValueError(f"{name} of rank {rank} must be a tensor ({layout.size(rank)},); got {shape}")
    return *tensors, int(count)


def expected(tokens, kind, N):
    return {name: (x, 0) for name, x in specification(tokens, kind, N).items()}


def _case(says, kind, S, N):
    tokens = torch.randint(32, (S,), generator=torch.Generator().manual_seed(S))
    return Case(says, lambda: dict(tokens=tokens, kind=kind, N=N))


CASES = [
    _case("contiguous, 16 positions on 4 ranks", "contiguous", 16, 4),
    _case("zigzag, 16 positions on 4 ranks: the halves of a shard are no neighbours", "zigzag", 16, 4),
    _case("zigzag, 19 positions on 4 ranks: the shards differ in length", "zigzag", 19, 4),
    _case("striped, 19 positions on 4 ranks: no two positions of a rank are neighbours", "striped", 19, 4),
    _case("one rank", "zigzag", 7, 1),
]


def explain(got, want, tokens, kind, N):
    """The first rank with something wrong: what it has and what it should have, in a line each."""
    layout = Layout(kind, len(tokens), N)
    for rank in range(N):
        places = layout.positions(rank)
        lines = []
        for name in want:
            yours, right = (x[[rank] if name == "count" else places].tolist() for x in (got[name], want[name][0]))
            if yours != right:
                lines += [f"{name:9}  yours  {_listed(yours)}", f"{'':9}  right  {_listed(right)}"]
        if lines:
            return [f"rank {rank} of {N} has the positions {_listed(places.tolist())}:", *lines]
    return []


def _listed(numbers):
    return " ".join(f"{n:4}" for n in numbers)


# The mistakes: something is computed after the cut that belongs before it, or the rank is taken for the whole sequence.


def _changed(**others):
    """The right answer with the functions `others`, by name, of (tokens, mine, rank) in place of what is right."""

    def answer(tokens, layout, rank):
        mine = layout.positions(rank)
        labels = torch.tensor([*tokens[1:], IGNORED])
        right = dict(zip(NAMES, (tokens[mine], mine, labels[mine], len(tokens) - 1), strict=True))
        return tuple((right | {name: f(tokens, mine, rank) for name, f in others.items()}).values())

    return answer


def _shifted_shard(tokens, mine, rank):
    return torch.cat([tokens[mine][1:], torch.tensor([IGNORED])[: len(mine)]])


def _wrapped(tokens, mine, rank):
    return tokens.roll(-1)[mine]


MISTAKES = {
    "counted_from_zero": (
        "every rank counts its positions from 0, so that the rotary embedding takes all shards for the beginning",
        _changed(positions=lambda tokens, mine, rank: torch.arange(len(mine)))),
    "taken_for_contiguous": (
        "a rank's positions are taken for neighbours, as they are in the layout contiguous only",
        _changed(positions=lambda tokens, mine, rank: rank * len(mine) + torch.arange(len(mine)))),
    "shifted_after_the_cut": (
        "the labels are shifted after the cut: the last token of a chunk gets the first one of another chunk, or none",
        _changed(labels=_shifted_shard)),
    "shifted_and_counted_after_the_cut": (
        "the labels are shifted after the cut, and every rank counts its own",
        _changed(labels=_shifted_shard, count=lambda tokens, mine, rank: len(mine) - 1)),
    "last_label_wraps": (
        "the last token has a label, the first token: nobody has set it to IGNORED after the shift",
        _changed(labels=_wrapped)),
    "last_label_wraps_and_counts": (
        "the last token has a label, the first token, and is counted",
        _changed(labels=_wrapped, count=lambda tokens, mine, rank: len(tokens))),
    "shifted_the_other_way": (
        "a token's label is the token before it",
        _changed(labels=lambda tokens, mine, rank: torch.tensor([IGNORED, *tokens[:-1]])[mine])),
    "counts_its_own": (
        "every rank divides by the number of its own labels, so that the labels of short shards weigh more",
        _changed(count=lambda tokens, mine, rank: (mine < len(tokens) - 1).sum())),
    "counts_the_last_token": (
        "the last token, which has no label, is counted", _changed(count=lambda tokens, mine, rank: len(tokens))),
}  # fmt: skip
