"""Lessons that lead to the ring: one hop, then four strategies of attention over a sequence that ranks share.

    lesson_1_hop              one message to the next rank
    lesson_2_overlap          the same message, waited for after the work that hides it
    lesson_3_query_parallel   K and V are gathered              forward and backward, packed sequences
    lesson_4_star             queries are gathered              forward; few queries over many keys
    lesson_5_ulysses          heads are exchanged               forward and backward
    lesson_6_ring             K and V travel from rank to rank  forward and backward: the stage itself

Each is a program, `python -m steps.step04_ring.strategies.lesson_1_hop`, and the last four have one function in common:

    attention(q, k, v, *, causal=False, scale=None, layout="zigzag", S=None, group=None, block=None) -> out

on this rank's shards. `python -m steps.step04_ring.demo --strategy star` prints what one costs.
"""

from functools import partial
from importlib import import_module

from steps import checks
from steps.contract import no_autocast
from steps.step04_ring.entry import SUPPORTS
from steps.step04_ring.ranks.agree import agree
from steps.step04_ring.ranks.comm import comm_of

LESSONS = {
    "query_parallel": "lesson_3_query_parallel", "star": "lesson_4_star", "ulysses": "lesson_5_ulysses",
    "ring": "lesson_6_ring",
}  # fmt: skip
COMMON = ("causal", "scale", "layout", "S", "group", "block")  # options that every strategy takes
OWN = {  # those that only one takes
    "query_parallel": ("cu_seqlens",), "star": ("replicated",), "ulysses": (),
    "ring": ("tile", "rung", "transport", "deterministic"),
}  # fmt: skip


def attention(q, k, v, *, strategy, **options):
    """out (B, H, n, D) of this rank's queries, by one of LESSONS. q (B, H, n, D), k and v (B, Hk, n, D): its shards.

    All ranks must pass the same options, which are compared at every call: where they differ, every rank raises.
    """
    return load(strategy)(q, k, v, **options)


def load(strategy):
    """The function `attention` of a strategy, which refuses the options that the strategy does not take.

    The strategy's module is imported only now, so that it can run as a program.
    """
    if strategy not in LESSONS:
        raise ValueError(f"strategy must be one of {', '.join(LESSONS)}; got {strategy!r}.")
    import_module(f"{__name__}.{LESSONS[strategy]}")
    return partial(_checked, strategy)


def _checked(strategy, q, k, v, **options):
    attend = import_module(f"{__name__}.{LESSONS[strategy]}").attention
    taken = (*COMMON, *OWN[strategy])
    try:
        if lacking := sorted(options.keys() - set(taken)):
            raise NotImplementedError(
                f"{strategy} has no {', '.join(lacking)}; its options are {', '.join(taken)}. Of the strategies only "
                "query_parallel takes packed sequences (cu_seqlens). Windows, masks and dropout are step03_triton's."
            )
        if strategy != "ring":  # which checks all of this itself
            supports = SUPPORTS | {"nq_ne_nk": options.get("replicated", False)}
            tensors = ("q", q), ("k", k), ("v", v)
            checks.check_call(supports, None, tensors, options.get("causal", False), options.get("scale"), None)
            if q.ndim != 4:
                raise ValueError(f"{strategy} takes q (B, H, n, D), k and v (B, Hk, n, D); got q {tuple(q.shape)}.")
    except (TypeError, ValueError, NotImplementedError) as problem:  # The other ranks have to hear of it.
        agree(comm_of(options.get("group")), {"strategy": strategy}, None, problem=problem)
    if strategy == "ring":
        return attend(q, k, v, **options)
    with no_autocast(q):
        return attend(q, k, v, **options)
