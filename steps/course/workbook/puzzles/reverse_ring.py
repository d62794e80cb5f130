"""In which order the backward visits the keys, and where it sends them and the sums of their gradients.

In the forward every rank begins with its own keys and hands them to rank + 1. dK and dV are sums over all ranks, which
travel with their K and V, and must end at the rank that these belong to, without a hop that nothing hides.
"""

import torch

from steps.course.workbook.puzzles import Case


def specification(N):
    """src, kv_to and dkv_to (N steps, N ranks), where -1 is None. The backward undoes the forward step by step."""
    forward, held = [], list(range(N))
    for _ in range(N):
        forward.append(held)
        held = held[-1:] + held[:-1]  # a hop: rank r gets what rank r - 1 had
    src = forward[::-1]
    to = [[there.index(of) for of in here] for here, there in zip(src, src[1:], strict=False)] + [[-1] * N]
    return {"src": torch.tensor(src), "kv_to": torch.tensor(to), "dkv_to": torch.tensor(to)}


def reverse_step(rank, step, N):
    """(src, kv_to, dkv_to) of this rank in this step, 0 to N - 1, of the backward on N ranks.

    src is the rank whose K and V are at hand. kv_to is the rank that K and V are sent to while the block is computed,
    and dkv_to the one that the sums of their dK and dV are sent to after it; None where they have arrived at their
    owner. A rank has stored only the K and V that the forward ended with, so that it needs its own back, too.
    """
    to = None if step == N - 1 else (rank - 1) % N
    return (rank + 1 + step) % N, to, to


def run(N, answer=reverse_step):
    """The entries of the specification, from `reverse_step` of every rank in every step."""
    table = [[_checked(answer(rank, step, N), rank, step, N) for rank in range(N)] for step in range(N)]
    return {name: torch.tensor([[x[i] for x in row] for row in table]) for i, name in enumerate(NAMES)}


NAMES = "src", "kv_to", "dkv_to"


def _checked(result, rank, step, N):
    """The result of a step with -1 for None. Raises TypeError or ValueError for another structure."""
    if not isinstance(result, tuple | list) or len(result) != 3:
        raise TypeError(f"reverse_step has to return (src, kv_to, dkv_to); got {result!r:.60}")
    for name, x in zip(NAMES, result, strict=True):
        if x is None and name == "src" or x is not None and x not in range(N):
            wanted = f"a rank, 0 to {N - 1}{', or None if nothing is sent' * (name != 'src')}"
            raise ValueError(f"{name} of rank {rank} in step {step} must be {wanted}; got {x!r:.20}")
    return [-1 if x is None else int(x) for x in result]


def expected(N):
    return {name: (x, 0) for name, x in specification(N).items()}


def _case(says, N):
    return Case(says, lambda: dict(N=N))


CASES = [
    _case("4 ranks", 4),
    _case("2 ranks, where both neighbours are the same rank", 2),
    _case("5 ranks", 5),
    _case("one rank: nothing is sent", 1),
]


def explain(got, want, N):
    """The first step in which the messages do not do what the answer says, in words; then the table of src."""
    return [*_story(*(got[name].tolist() for name in NAMES), N), *_both(got["src"], want["src"][0])]


def _story(src, kv_to, dkv_to, N):
    """Sends messages as the answer says, and tells what goes wrong first. Lists by step and rank."""
    held = [(rank + 1) % N for rank in range(N)]  # where the forward ended
    for step in range(N):
        for rank in range(N):
            if src[step][rank] != held[rank]:
                how = "The forward ended with" if step == 0 else "What has arrived are"
                return [f"step {step}: rank {rank} says that it has the keys of rank {src[step][rank]}.",
                        f"{how} those of rank {held[rank]}."]  # fmt: skip
        last = step == N - 1
        for what, to in (("K and V", kv_to[step]), ("the sums of dK and dV", dkv_to[step])):
            missing = [rank for rank in range(N) if rank not in to]
            if last and max(to) >= 0:
                sender = to.index(max(to))
                return [f"step {step} is the last one, but rank {sender} sends {what} of rank {src[step][sender]} "
                        f"to rank {max(to)}, which does not wait for them."]  # fmt: skip
            if not last and missing:
                return [f"step {step}: nobody sends {what} to rank {missing[0]}, which needs some in step {step + 1}."]
        if not last:
            apart = [rank for rank in range(N) if kv_to[step][rank] != dkv_to[step][rank]]
            if apart:
                rank, of = apart[0], src[step][apart[0]]
                return [f"step {step}: rank {rank} sends K and V of rank {of} to rank {kv_to[step][rank]}, but the",
                        f"sums of their dK and dV to rank {dkv_to[step][rank]},",
                        "which adds its own part in another step, or not at all."]  # fmt: skip
            arrived = dict(zip(kv_to[step], held, strict=True))
            held = [arrived[rank] for rank in range(N)]
    return []


def _both(yours, right):
    """Both tables beside each other, a row a step."""
    if torch.equal(yours, right):
        return []
    lines = [f"{'src by rank, yours':24}right"]
    for step, rows in enumerate(zip(yours.tolist(), right.tolist(), strict=True)):
        a, b = (" ".join(map(str, row)) for row in rows)
        lines.append(f"{f'  step {step}:  {a}':24}{b}")
    return lines


# The mistakes: another order, another direction, or a message too many or too few.


def _right(rank, step, N):
    to = None if step == N - 1 else (rank - 1) % N
    return (rank + 1 + step) % N, to, to


def _changed(**others):
    """The right answer with the functions `others`, by name, of (rank, step, N) in place of what is right."""

    def answer(*step):
        right = dict(zip(NAMES, _right(*step), strict=True))
        return tuple((right | {name: f(*step) for name, f in others.items()}).values())

    return answer


def _on(rank, step, N):
    return None if step == N - 1 else (rank + 1) % N


def _back(rank, step, N):
    return (rank - 1) % N


def _owner(rank, step, N):
    src, *_ = _right(rank, step, N)
    return None if src == rank else src


MISTAKES = {
    "as_the_forward": (
        "the backward goes round as the forward does, beginning with its own keys: dK and dV then need one hop more",
        _changed(src=lambda rank, step, N: (rank - step) % N, kv_to=_on, dkv_to=lambda rank, step, N: (rank + 1) % N)),
    "as_the_forward_without_the_last_hop": (
        "the backward goes round as the forward does, and dK and dV are not sent home in the end",
        _changed(src=lambda rank, step, N: (rank - step) % N, kv_to=_on, dkv_to=_on)),
    "begins_with_its_own": (
        "the backward begins with its own keys, which are not those that the forward ended with, and ends elsewhere",
        _changed(src=lambda rank, step, N: (rank + step) % N)),
    "sent_the_wrong_way": (
        "the keys go on to rank + 1, though those of the next step are at rank + 1 and have to come from there",
        _changed(kv_to=_on, dkv_to=_on)),
    "the_same_direction": (
        "the backward begins where the forward ended, but goes on in the forward's direction",
        _changed(src=lambda rank, step, N: (rank + 1 - step) % N, kv_to=_on, dkv_to=_on)),
    "keys_sent_in_the_last_step": (
        "K and V are sent in the last step too, N hops and not N - 1", _changed(kv_to=_back)),
    "sums_sent_in_the_last_step": (
        "dK and dV are sent in the last step too, although they have arrived", _changed(dkv_to=_back)),
    "all_sent_in_the_last_step": (
        "everything is sent in the last step too, although nobody needs K and V, and dK and dV have arrived",
        _changed(kv_to=_back, dkv_to=_back)),
    "straight_to_the_owner": (
        "dK and dV are sent to their owner at once, as `fetch` does: N - 1 parts arrive there, and no sum travels",
        _changed(dkv_to=_owner)),
}  # fmt: skip
