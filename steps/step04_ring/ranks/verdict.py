# SPDX-License-Identifier: MIT
"""Whose fault it is that a call of several ranks fails: one line, from what the ranks have published of themselves.

    arguments differ    the calls of this number are not the same call
    a block raised      what it raised
    silent              a rank's note does not change any more: its process died, or was stopped
    furthest back       it does something else, or left a call out

The idea: in a ring every rank soon waits for another, so the neighbour that a rank waits for is seldom the cause. The
four causes are looked for in this order, because the earlier ones lead to the later ones. These functions see only
notes:

    {"beats": n, "calls": {group: [(call, hop), arguments, what its block raised]}}

beats grows each time that the rank publishes. A note says what was begun. If a rank dies between two calls, what was
finished is the same on all ranks. A dead rank's last note may be a quarter of a second old, so that the rank may have
come further than the verdict says. Needs nothing.
"""

BACKWARD = "backward of attention"  # the function of a call that autograd makes
NO_BACKWARD = "its inputs require no gradient, so that it makes no backward"


def verdict(group, before, after):
    """One line that names the culprit. before, after: each rank's note, read twice."""
    if line := differing(group, after):
        return line
    if raised := [failure for *_, failure in (standing(group, note) for note in after) if failure]:
        return "; ".join(raised)
    N, places = len(after), [tuple(standing(group, note)[0]) for note in after]
    silent = [rank for rank in range(N) if before[rank]["beats"] == after[rank]["beats"]]
    culprits = silent or [rank for rank in range(N) if places[rank] == min(places)]
    others = sorted(place for rank, place in enumerate(places) if rank not in culprits)
    if not others:
        return f"all {N} ranks stand at {where(places[0])}, and none is silent (a connection broke)"
    stand = ", ".join(f"rank {rank} of {N} stands at {where(places[rank])}" for rank in culprits)
    wait = " to ".join(dict.fromkeys(map(where, (others[0], others[-1]))))
    waiting = [standing(group, after[rank])[1] for rank in range(N) if rank not in culprits]
    why = "it died, or hangs" + f", or {NO_BACKWARD}" * any(call.get("function") == BACKWARD for call in waiting)
    return f"{stand}; the others wait at {wait} ({why})"


def differing(group, notes):
    """One line for ranks that are in calls of the same number but with different arguments, otherwise ""."""
    places, calls, _ = zip(*(standing(group, note) for note in notes), strict=True)
    latest = max(call for call, _ in places)
    line = difference({rank: calls[rank] for rank, (call, _) in enumerate(places) if call == latest})
    return line and f"the ranks make different calls: call {latest} has {line}"


def standing(group, note):
    """((call, hop), arguments, failure) of a published note; before its first call a rank stands at call 0."""
    return note["calls"].get(group, [(0, 0), {}, ""])


def where(place):
    """A (call, hop) in words; hop 0 is what comes before the first hop, such as comparing the arguments."""
    return f"call {place[0]}, hop {place[1]}"


def difference(calls):
    """What differs between the ranks' calls, {rank: {name: value}}: "causal True on rank 2, False on ranks 0, 1"."""
    parts = []
    for name in dict.fromkeys(name for call in calls.values() for name in call):
        ranks = {}  # value -> the ranks that have it
        for rank, call in calls.items():
            ranks.setdefault(call.get(name), []).append(rank)
        if len(ranks) > 1:
            values = (f"{value} on rank{'s' * (len(of) > 1)} {', '.join(map(str, of))}" for value, of in ranks.items())
            parts.append(f"{name} {' and '.join(values)}")
    return "; ".join(parts)
