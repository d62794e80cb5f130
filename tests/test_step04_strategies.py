"""Stage 04's lessons before the ring: each against the reference over gloo, and what it costs against the formulas.

One pool of four ranks serves the whole file; smaller teams are its groups.
"""

import contextlib
import functools
import itertools
import os
import re
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
import typer
from typer.testing import CliRunner

import steps.step04_ring as step04
from reference import attention as reference
from reference import error
from steps import engine, step03_triton
from steps.step03_triton import public
from steps.step04_ring import Layout, block, demo, in_your_model, launch, strategies, watch
from steps.step04_ring.comm import Comm
from steps.step04_ring.layout import LAYOUTS
from steps.step04_ring.strategies import account, cuts, lesson_1_hop, lesson_2_overlap, lesson_4_star
from steps.workbook.case_on_ranks import PlainBlock, group_of
from support.ranks import end_of_pool, on_ranks  # noqa: F401  Pytest finds the fixture by its name.

FOLDER = Path(strategies.__file__).parent
WITH_BACKWARD = ("query_parallel", "ulysses", "ring")


def inputs(S, H=4, Hk=4, D=16, dtype=torch.float32, Nq=None, device=engine.device):
    """q, k, v and dout, the same on every rank."""
    random = torch.Generator().manual_seed(S)
    shapes = (H, Nq or S), (Hk, S), (Hk, S), (H, Nq or S)
    return [torch.randn(1, *shape, D, generator=random).to(device, dtype) for shape in shapes]


def excess(got, want, whole, rank):
    """By how much the results of a rank, by name, leave the tolerance: {} if they do not."""
    found = {}
    for name, x in got.items():
        shard = whole.shard(want.value[name], rank) if whole else want.value[name]
        assert x.shape == shard.shape and bool(x.isfinite().all())
        worst = (x.double() - shard).abs().max().item() if x.numel() else 0
        if not worst <= want.tolerance[name]:
            found[name] = worst, want.tolerance[name]
    return found


# Lessons 1 and 2.


@pytest.mark.parametrize("overlap", [None, False, True])
def test_one_hop_is_attention_over_the_keys_of_two_ranks(overlap):
    assert on_ranks(two_ranks_of_keys, overlap) == [{}] * 4


def two_ranks_of_keys(overlap):
    rank, whole = dist.get_rank(), Layout("contiguous", 52, 4)
    q, k, v, dout = inputs(52, device=launch.message_device())
    before = whole.positions((rank - 1) % 4)
    keys = torch.cat([before, whole.positions(rank)]).to(q.device)
    mine = [whole.shard(x, rank) for x in (q, k, v)]
    lesson, options = (lesson_1_hop, {}) if overlap is None else (lesson_2_overlap, {"overlap": overlap})
    out, lse = lesson.attention(*mine, block=PlainBlock, **options)
    want = error.expected(mine[0], *(x.index_select(2, keys) for x in (k, v)), whole.shard(dout, rank))
    return excess({"out": out, "lse": lse}, want, None, rank)


def test_the_overlapped_hop_travels_while_the_block_is_computed():
    """The message is under way when the block begins, and is waited for after it; without overlap before it."""
    assert on_ranks(order_of_events, True) == [["post", "block", "wait", "block"]] * 4
    assert on_ranks(order_of_events, False) == [["post", "wait", "block", "block"]] * 4


def order_of_events(overlap):
    events, post = [], lesson_2_overlap.post

    def logged(x):
        messages, arriving = post(x)
        events.append("post")

        def wait():
            events.append("wait")
            for message in messages:
                message.wait()

        return [SimpleNamespace(wait=wait)], arriving

    def block(*tensors):
        events.append("block")
        return PlainBlock.forward(*tensors)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(lesson_2_overlap, "post", logged)
        shards = inputs(8, device=launch.message_device())[:3]
        lesson_2_overlap.attention(*shards, block=SimpleNamespace(forward=block), overlap=overlap)
    return events


# The four strategies.


@pytest.mark.parametrize("strategy", strategies.LESSONS)
def test_a_strategy_is_attention(strategy):
    assert on_ranks(compare_with_the_reference, strategy) == [{}] * 4


def compare_with_the_reference(strategy):
    """{setting: what is out of tolerance} over team sizes, lengths, layouts, heads and dtypes."""
    wrong = {}
    attention, rank_in_world = strategies.load(strategy), dist.get_rank()
    for members in [(0, 1, 2, 3), (0, 1), (1, 2, 3), (2,)]:
        group, N = group_of(members), len(members)
        for S, H, Hk, dtype in [
            (37, N, N, torch.float32),
            (3, 2 * N, N, torch.float32),
            (32, 2 * N, N, torch.bfloat16),
        ]:
            if rank_in_world not in members:
                continue
            q, k, v, dout = inputs(S, H, Hk, 16, dtype)
            for causal in (False, True):
                want = error.expected(q, k, v, dout, causal=causal, scale=0.3)
                for layout in LAYOUTS if N > 2 else ("zigzag",):
                    if layout == "striped" and strategy == "query_parallel" and N > 1:
                        continue  # see test_what_a_strategy_refuses
                    rank, whole = dist.get_rank(group), Layout(layout, S, N)
                    mine = [whole.shard(x, rank) for x in (q, k, v, dout)]
                    before = [x.clone() for x in mine]
                    options = dict(causal=causal, scale=0.3, layout=layout, group=group, block=PlainBlock)
                    options |= {} if S == 37 else {"S": S}  # without S the ranks add it up
                    results = account.passes(attention, *mine, **options)
                    assert len(results) == (4 if strategy in WITH_BACKWARD else 1)
                    assert all(x.dtype == dtype for x in results)
                    assert all(map(torch.equal, mine, before)), "an input was overwritten"
                    got = dict(zip(("out", "dq", "dk", "dv"), results, strict=False))
                    if bad := excess(got, want, whole, rank):
                        wrong[members, S, H, str(dtype), causal, layout] = bad
    return wrong


@pytest.mark.parametrize("mask", [{"causal": True}, {}])  # By default there is none.
def test_without_a_process_group_a_strategy_has_one_rank(mask):
    q, k, v, dout = inputs(21)
    want = error.expected(q, k, v, dout, **mask)
    for strategy in strategies.LESSONS:
        options = dict(strategy=strategy, block=PlainBlock, **mask)
        results = account.passes(strategies.attention, q, k, v, dout, **options)
        got = dict(zip(("out", "dq", "dk", "dv"), results, strict=False))
        assert excess(got, want, None, 0) == {}


@pytest.mark.parametrize(
    "layout, causal",
    [("zigzag", True), ("contiguous", False), pytest.param("zigzag", False, marks=pytest.mark.long)],
)
def test_query_parallel_takes_packed_sequences(layout, causal):
    assert on_ranks(packed, layout, causal) == [{}] * 4


PACKED = (  # beginnings and the end, for S = 48: shards of 6 and 6, or of 12
    (0, 48),
    (0, 5, 6, 6, 20, 31),  # some lie in one shard, some over two; one is empty; the last rows belong to none
    (0, 12, 24, 36, 48),  # the ends of the shards
)


def packed(layout, causal):
    """What is out of tolerance beside the reference of each sequence alone; over the packed call of stage 03."""
    wrong = {}
    q, k, v, dout = inputs(48, H=2, Hk=1)
    whole, rank = Layout(layout, 48, 4), dist.get_rank()
    for cu in PACKED:
        scale = 20.0 if cu[-1] < 48 else None  # large beside rows without a key
        value = {
            name: torch.zeros_like(x, dtype=torch.float64)
            for name, x in zip(("out", "dq", "dk", "dv"), (q, q, k, v), strict=True)
        }
        tolerance = dict.fromkeys(value, 0.0)
        for start, stop in zip(cu, cu[1:], strict=False):
            one = error.expected(*(x[:, :, start:stop] for x in (q, k, v, dout)), causal=causal, scale=scale)
            for name in value if stop > start else ():
                value[name][:, :, start:stop] = one.value[name]
                tolerance[name] = max(tolerance[name], one.tolerance[name])
        options = dict(causal=causal, scale=scale, layout=layout, S=48, cu_seqlens=torch.tensor(cu, dtype=torch.int32))
        mine = [whole.shard(x, rank) for x in (q, k, v, dout)]
        results = account.passes(strategies.load("query_parallel"), *mine, **options)
        got = dict(zip(value, results, strict=True))
        if bad := excess(got, SimpleNamespace(value=value, tolerance=tolerance), whole, rank):
            wrong[cu] = bad
    return wrong


@pytest.mark.parametrize("layout", ["zigzag", "contiguous", "striped"])
def test_star_takes_few_replicated_queries(layout):
    for messages in on_ranks(few_queries, layout):
        assert messages == {}


def few_queries(layout):
    wrong, rank = {}, dist.get_rank()
    cases = [(61, 1, True), (61, 1, False), (61, 7, False), (61, 7, True), (61, 40, True), (3, 2, True), (3, 1, False)]
    some = [(*case, torch.float32, None) for case in cases] + [(5, 9, True, torch.float32, 40.0)]  # rows without a key
    some += [(61, 7, True, torch.bfloat16, None), (61, 1, False, torch.bfloat16, None)]
    for S, Nq, causal, dtype, scale in some:
        if layout == "striped" and causal and Nq > 1:
            continue
        q, k, v, dout = inputs(S, H=4, Hk=2, Nq=Nq, dtype=dtype)
        want, whole = error.expected(q, k, v, dout, causal=causal, scale=scale), Layout(layout, S, 4)
        options = dict(causal=causal, scale=scale, layout=layout, S=S, block=InFloat32, replicated=True)
        with account.counted() as sent:
            out = strategies.attention(q, *(whole.shard(x, rank) for x in (k, v)), strategy="star", **options)
        if sent["bytes"] != 3 * 4 * Nq * (16 + 1) * 4:  # out and lse of 4 heads in float32, to each of 3 ranks
            wrong[S, Nq, causal, "sent"] = sent["bytes"]
        everyone = [None] * 4
        dist.all_gather_object(everyone, out.cpu())
        assert all(torch.equal(x, everyone[0]) for x in everyone), "the ranks differ"
        if bad := excess({"out": out}, want, None, rank):
            wrong[S, Nq, causal, dtype] = bad
        once = (want.value["out"].to(dtype).double() - want.value["out"]).abs()  # by one rounding, of the whole result
        if dtype != torch.float32 and not ((out.double() - want.value["out"]).abs() <= once + 1e-6).all():
            wrong[S, Nq, causal, dtype] = "rounded more than once"
    return wrong


class InFloat32:
    """PlainBlock, whose out is not rounded to the dtype of q."""

    @staticmethod
    def forward(*tensors, **options):
        return PlainBlock.forward(*(x.float() for x in tensors), **options)


def test_a_rank_computes_one_block_and_sends_one_message_for_a_new_token():
    """After 24 bytes, by which the ranks compare their calls."""
    assert on_ranks(one_token) == [[24, "block", "all_to_all_single"]] * 4


def one_token():
    """What a rank does, in order, for a query that sees the keys of both of its zigzag chunks."""
    done, exchange, gather = [], dist.all_to_all_single, dist.all_gather

    def block(*tensors, **options):
        done.append("block")
        return PlainBlock.forward(*tensors, **options)

    def exchanged(*tensors, **options):
        done.append("all_to_all_single")
        return exchange(*tensors, **options)

    def gathered(everyone, mine, **options):
        done.append(mine.nbytes)
        gather(everyone, mine, **options)

    q, k, v = inputs(11, Hk=2, Nq=1)[:3]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(dist, "all_to_all_single", exchanged)
        patch.setattr(dist, "all_gather", gathered)
        options = dict(causal=True, S=44, block=SimpleNamespace(forward=block), replicated=True)
        lesson_4_star.attention(q, k, v, **options)  # 44 keys in 4 shards of 11
    return done


def test_star_s_default_block_for_few_queries_is_stage_03_s():
    """On a Hopper GPU the block of many queries is another one. The GPU's place is taken by a patch."""
    chosen = []

    class Chosen(Exception):
        pass

    def teams(*tensors, block=None, **others):
        chosen.append(block)
        raise Chosen

    q, k, v = inputs(8)[:3]
    on_hopper = SimpleNamespace(is_cuda=True, device="cuda:0", dtype=torch.bfloat16, shape=(1, 1, 4, 64))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
        assert isinstance(block.default_block(on_hopper), block.Hopper)
        usual = functools.partial(block.default_block, on_hopper)
        patch.setattr(lesson_4_star, "default_block", lambda q, **how: usual(**how))
        patch.setattr(lesson_4_star, "Team", teams)
        for options in ({"replicated": True}, {}, {"replicated": True, "block": PlainBlock}, {"block": PlainBlock}):
            with pytest.raises(Chosen):
                lesson_4_star.attention(q, k, v, **options)
    assert chosen == [step03_triton, None, PlainBlock, PlainBlock]
    few, many = (torch.empty(1, 8, n, 64, device=engine.device) for n in (1, 65))
    takes = functools.partial(public.has_few_queries, step03_triton.SUPPORTS)
    keys = torch.empty(1, 2, 2048, 64, device=engine.device)
    assert takes(few, keys) and not takes(many, keys)


def test_few_queries_cover_what_is_visible_once():
    for kind in ("zigzag", "contiguous"):
        for S, N, Nq, causal in [(29, 4, 6, True), (29, 4, 29, True), (29, 3, 5, False), (2, 4, 1, True)]:
            layout, seen = Layout(kind, S, N, causal), torch.zeros(Nq, S, dtype=torch.int)
            for rank in range(N):
                positions = layout.positions(rank)
                for rows, keys, diagonal in cuts.few_queries(layout, rank, Nq):
                    queries, columns = torch.arange(Nq)[rows], positions[keys]
                    block = torch.ones(len(queries), len(columns), dtype=torch.int)
                    assert block.numel(), "a block without a query or a key"
                    if diagonal:  # aligned at the bottom right
                        block = block.tril(len(columns) - len(queries))
                    seen[queries[:, None], columns] += block
            assert torch.equal(seen, reference.visible(Nq, S, causal).int()), (kind, S, N, Nq)


def test_a_run_of_packed_queries_takes_the_keys_that_it_sees():
    keys, options = cuts.cut((0, 5, 9, 16), range(7, 11), 16, True, "cpu")
    lists = {name: x if isinstance(x, int) else x.tolist() for name, x in options.items()}
    assert keys == slice(5, 11) and lists == {
        "cu_seqlens_q": [0, 0, 2, 4], "max_seqlen_q": 2, "cu_seqlens_k": [0, 0, 4, 6], "max_seqlen_k": 4
    }  # fmt: skip


def test_results_are_bit_equal_from_run_to_run():
    for strategy in strategies.LESSONS:
        assert on_ranks(twice, strategy) == [True] * 4


def twice(strategy):
    whole = Layout("zigzag", 41, 4)
    mine = [whole.shard(x, dist.get_rank()) for x in inputs(41)]
    options = dict(causal=True, S=41, block=PlainBlock)
    runs = [account.passes(strategies.load(strategy), *mine, **options) for _ in range(3)]
    return all(torch.equal(a, b) for run in runs[1:] for a, b in zip(runs[0], run, strict=True))


# What tests of equal, usual tensors do not see. WAYS are the strategies, and the ring by both of its transports.

ON_FETCH = pytest.mark.skipif(
    engine.name == "cuda" and torch.cuda.device_count() < 4, reason="fetch needs a GPU for each of the 4 ranks"
)
WAYS = ["query_parallel", "star", "ulysses", "relay", pytest.param("fetch", marks=ON_FETCH)]


def results(way, q, k, v, dout, change=lambda name, x: x, block=PlainBlock, **options):
    """(out, lse, dq, dk, dv) of the ring, or what a strategy has of them. change(name, x) puts x into other memory."""
    q, k, v, dout = (change(name, x) for name, x in (("q", q), ("k", k), ("v", v), ("dout", dout)))
    if way in strategies.LESSONS:
        return account.passes(strategies.load(way), q, k, v, dout, block=block, **options)
    options |= {"transport": way, "block": block}
    out, lse = step04.forward(q, k, v, **options)
    return out, lse, *step04.backward(dout, q, k, v, change("out", out), change("lse", lse), **options)


def layouts_of(way):
    return [layout for layout in LAYOUTS if (way, layout) != ("query_parallel", "striped")]


def apart(x, dim):
    """x as every second entry of a tensor that is NaN in between."""
    shape = list(x.shape)
    shape[dim] *= 2
    return x.new_full(shape, torch.nan).unflatten(dim, (-1, 2)).select(dim + 1, 0).copy_(x)


PLACES = {
    "strided rows": lambda x: apart(x, 2),
    "strided columns": lambda x: apart(x, x.ndim - 1),
    "heads and rows exchanged": lambda x: x.transpose(1, 2).contiguous().transpose(1, 2),
    "unaligned": lambda x: x.new_empty(x.numel() + 1)[1:].view_as(x).copy_(x),
    "expanded over heads": lambda x: x[:, :1].expand_as(x),
}


@pytest.mark.parametrize("way", WAYS)
def test_one_tensor_that_lies_in_memory_unlike_the_others(way):
    assert on_ranks(one_unlike_the_others, way) == [[]] * 4


def one_unlike_the_others(way):
    """[(layout, tensor, place)] with which a result is not that of dense tensors."""
    wrong, rank, layouts = [], dist.get_rank(), layouts_of(way)
    names = ("q", "k", "v", "dout") + (("out", "lse") if way not in strategies.LESSONS else ())
    whole = {layout: Layout(layout, 21, 4) for layout in layouts}
    tensors = [x[:, :1].repeat(1, 4, 1, 1) for x in inputs(21)]  # All heads are the same.
    mine = {layout: [whole[layout].shard(x, rank) for x in tensors] for layout in layouts}
    want = {layout: results(way, *mine[layout], causal=True, layout=layout, S=21) for layout in layouts}
    for number, (name, place) in enumerate(itertools.product(names, PLACES)):
        layout, seen = layouts[number % len(layouts)], []

        def change(of, x, name=name, place=place, here=number % 2 or rank == 1, seen=seen):
            if of == name and here:  # on one rank or on all
                x = PLACES[place](x)
                seen.append((x, x.clone()))
            return x

        got = results(way, *mine[layout], change, causal=True, layout=layout, S=21)
        pairs = zip(got, want[layout], strict=True)
        same = all((x - y).abs().max() < 1e-5 for x, y in pairs)  # torch's sums may differ
        if not same or not all(torch.equal(x, before) for x, before in seen):
            wrong.append((layout, name, place))
    return wrong


@pytest.mark.parametrize("way", WAYS)
def test_a_call_leaves_nothing_for_the_next_one(way):
    assert on_ranks(one_call_after_another, way) == [[]] * 4


def one_call_after_another(way):
    """Where the same call gives something else after another one; and what a call, also a failing one, has switched."""
    wrong, rank = [], dist.get_rank()
    for layout, S in itertools.product(layouts_of(way), (18, None)):

        def call(seed, length=18, layout=layout, S=S):
            whole = Layout(layout, length, 4)
            tensors = [whole.shard(x, rank) + seed for x in inputs(length)]
            return results(way, *tensors, causal=True, layout=layout, S=S and length)

        first, other = call(0), call(1)
        assert not torch.equal(first[0], other[0])
        for between in (lambda: None, lambda: call(1), lambda: call(1, 29), lambda: call(1, 3)):
            between()
            if not all(map(torch.equal, call(0), first)):
                wrong.append((layout, S))

    def raises(*tensors, **options):
        raise MemoryError("on purpose")

    broken = SimpleNamespace(forward=raises, backward=raises)
    all_raise = way in strategies.LESSONS  # which end on every rank only then
    tensors = [x[:, :, :4] for x in inputs(8)]
    for deterministic, grad in itertools.product((False, True), repeat=2):
        torch.use_deterministic_algorithms(deterministic, warn_only=True)
        with torch.set_grad_enabled(grad):
            here = switches()
            for block, options in ((PlainBlock, {}), (broken, {}), (PlainBlock, {"layout": "ring"})):
                expected = contextlib.nullcontext() if block is PlainBlock and not options else pytest.raises(Exception)
                with expected:
                    block = block if all_raise or rank == 1 else PlainBlock
                    attention = strategies.load("ring" if way not in strategies.LESSONS else way)
                    options |= {"transport": way} if way not in strategies.LESSONS else {}
                    attention(*tensors[:3], S=16, block=block, **options)
                if switches() != here:
                    wrong.append((deterministic, grad, block, options))
    torch.use_deterministic_algorithms(False)
    return wrong


def switches():
    """What a library may find switched, and has to leave so."""
    found = torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()
    found += torch.is_grad_enabled(), torch.get_num_threads(), torch.get_default_dtype(), dict(os.environ)
    if engine.name == "cuda":
        found += torch.cuda.current_device(), torch.cuda.current_stream()
    return *found, torch.get_rng_state().tolist()


EXTREMES = {  # S, H, Hk, dtype, scale: two at once
    "fewer positions than ranks, and a large scale": (3, 4, 4, torch.float32, 40.0),
    "many queries' heads to one of keys, in 16 bits, and unequal shards": (13, 32, 1, torch.bfloat16, None),
    "the same, and a large scale": (13, 32, 4, torch.float16, 4.0),
}


@pytest.mark.parametrize("way", WAYS)
def test_two_extremes_at_once(way):
    assert on_ranks(extremes, way) == [{}] * 4


def extremes(way):
    wrong, rank = {}, dist.get_rank()
    for layout, (name, (S, H, Hk, dtype, scale)) in itertools.product(layouts_of(way), EXTREMES.items()):
        Hk = max(Hk, 4) if way == "ulysses" else Hk  # which has whole heads on each of 4 ranks
        whole, tensors = Layout(layout, S, 4), inputs(S, H, Hk, dtype=dtype)
        want = error.expected(*tensors, causal=True, scale=scale)
        mine = [whole.shard(x, rank) for x in tensors]
        got = results(way, *mine, causal=True, scale=scale, layout=layout, S=S)
        named = zip(("out", "lse", "dq", "dk", "dv") if len(got) == 5 else ("out", "dq", "dk", "dv"), got, strict=False)
        got = {name: x for name, x in named if name != "lse"}
        if bad := excess(got, want, whole, rank):
            wrong[layout, name] = bad
    return wrong


# What is refused.

REFUSALS = {  # (strategy, options): words of the message
    "heads of q": ("ulysses", {"H": 6, "Hk": 6}, ("6 heads of q", "4 ranks", "lesson 3, 4 or 6")),
    "heads of k": ("ulysses", {"H": 8, "Hk": 2}, ("2 heads of k and v", "repeat the heads")),
    "striped": ("query_parallel", {"layout": "striped"}, ("successive", "not striped")),
    "striped keys": ("star", {"layout": "striped", "causal": True, "replicated": True}, ("successive keys",)),
    "length": ("star", {"S": 24}, ("S = 24 on 4 ranks have [6, 6, 6, 6]", "got 4")),
    "packed": ("query_parallel", {"cu_seqlens": (1, 16)}, ("begin with 0", "[1, 16]")),
    "layout": ("star", {"layout": "ring"}, ("zigzag, contiguous, striped; got 'ring'",)),
}  # fmt: skip


def test_what_a_strategy_refuses():
    for messages in on_ranks(refusals):
        for name, (_, _, words) in REFUSALS.items():
            assert all(word in messages[name] for word in words), (name, messages[name])
    with pytest.raises(ValueError, match="query_parallel, star, ulysses, ring; got 'rings'"):
        strategies.load("rings")


def refusals():
    messages = {}
    for name, (strategy, change, _) in REFUSALS.items():
        options = {"S": 16, "block": PlainBlock} | {x: y for x, y in change.items() if x not in ("H", "Hk")}
        q, k, v = inputs(4, change.get("H", 4), change.get("Hk", 4))[:3]
        with pytest.raises(ValueError) as raised:
            strategies.attention(q, k, v, strategy=strategy, **options)
        messages[name] = str(raised.value)
    return messages


@pytest.mark.parametrize("strategy", strategies.LESSONS)
def test_tensors_that_do_not_fit_are_refused(strategy):
    """Three keys would be padded with zeros, and six be cropped, without an error."""
    q, k, v = inputs(4)[:3]
    wrong = {
        "same shape": (q, k, inputs(3)[2]), "Nq = Nk": (q, *inputs(6)[1:3]), "head_dim": (q, k[..., :8], v[..., :8]),
        "one dtype": (q, k, v.half()), "takes float32": (q.double(), k.double(), v.double()),
        "multiple": (q, k[:, :3], v[:, :3]),
    }  # fmt: skip
    for words, tensors in wrong.items():
        with pytest.raises((ValueError, TypeError, NotImplementedError), match=words):
            strategies.attention(*tensors, strategy=strategy, S=4, block=PlainBlock)
    for options in ({"causal": 1}, {"scale": 0}):
        with pytest.raises((ValueError, TypeError), match="causal must be|scale must be"):
            strategies.attention(q, k, v, strategy=strategy, S=4, block=PlainBlock, **options)
    if strategy != "ring":
        with pytest.raises(ValueError, match=f"{strategy} takes q .B, H, n, D."):
            strategies.attention(q[0], k[0], v[0], strategy=strategy, S=4, block=PlainBlock)
    if strategy == "star":  # which takes other queries than keys where they are replicated, but no other v
        with pytest.raises(ValueError, match="same shape"):
            strategies.attention(q[:, :, :1], k, v[:, :, :3], strategy=strategy, S=4, replicated=True)


@pytest.mark.parametrize("strategy", strategies.LESSONS)
def test_an_option_that_a_strategy_lacks_is_not_ignored(strategy):
    q, k, v = inputs(8)[:3]
    lacking = {"window", "dropout", "casual", "cu_seqlens", "replicated", "transport"} - set(strategies.OWN[strategy])
    for option in lacking:
        with pytest.raises(NotImplementedError, match=f"{strategy} has no {option}; its options are causal, "):
            strategies.attention(q, k, v, strategy=strategy, block=PlainBlock, **{option: None})


@pytest.mark.parametrize("trained", range(3))
def test_star_has_no_backward(trained):
    q, k, v = tensors = inputs(8)[:3]
    tensors[trained].requires_grad_()
    with pytest.raises(NotImplementedError, match="lesson 3, 5 or 6"):
        strategies.attention(q, k, v, strategy="star", block=PlainBlock)


DISAGREEMENTS = {  # what rank 2 does otherwise: words of what every rank raises
    "causal": ("the same causal; got rank 0 False, rank 1 False, rank 2 True, rank 3 False",),
    "scale": ("the same scale; got rank 0 ", ", rank 2 0.5, "),
    "layout": ("the same layout; got rank 0 zigzag, rank 1 zigzag, rank 2 contiguous",),
    "dtype": ("the same dtype; got rank 0 torch.float32, ", "rank 2 torch.float16"),
    "heads": ("the same shape of q; got rank 0 (1, 4, ", "rank 2 (1, 8, "),
    "strategy": ("the same function; got rank 0 ", ", rank 2 "),
    "a length": ("positions; got ",),
    "not what it takes": ("rank 2 of the ring was given what it does not take. TypeError: causal must be",),
    "no backward": ("the same function; got rank 0 backward of attention, ", "inputs require no gradient"),
    "cu_seqlens": ("the same cu_seqlens; got rank 0 None, ", "rank 2 (0, 16)"),
    "queries": ("the same shape of q; got rank 0 (1, 4, 2, 16), ", "rank 2 (1, 4, 3, 16)"),
    "a gradient": ("rank 2 of the ring was given what it does not take. NotImplementedError: star has no backward",),
}
NOT_OF_ALL = {  # the strategies that can disagree so
    "no backward": WITH_BACKWARD, "cu_seqlens": ("query_parallel",), "queries": ("star",), "a gradient": ("star",)
}  # fmt: skip


@pytest.mark.parametrize("S", [16, pytest.param(None, marks=pytest.mark.long)])
@pytest.mark.parametrize("strategy", strategies.LESSONS)
def test_ranks_that_disagree_all_raise(strategy, S):
    """With S these are calls that all ranks have agreed on before."""
    messages = on_ranks(disagree, strategy, S)
    assert len(messages[0]) == {"ulysses": 9, "ring": 9}.get(strategy, 10)
    for name in messages[0]:
        for rank, said in enumerate(messages):
            by_itself = rank == 2 and name in ("a length", "not what it takes", "a gradient")
            assert by_itself or all(words in said[name] for words in DISAGREEMENTS[name]), (name, rank, said[name])


def disagree(strategy, S):
    """{what rank 2 does otherwise: the message that this rank raised}; calls that fit must go on giving the same."""
    messages, other = {}, dist.get_rank() == 2
    options_of = {"causal": True, "scale": 0.5, "layout": "contiguous", "cu_seqlens": (0, 16)}

    def call(name="", strategy=strategy):
        H, n, Nq = 8 if name == "heads" else 4, 3 if name == "a length" else 4, {"few": 2, "queries": 3}.get(name)
        q, k, v, dout = inputs(n, H, H, dtype=torch.float16 if name == "dtype" else torch.float32, Nq=Nq)
        options = {name: options_of[name]} if name in options_of else {}
        options |= {"causal": 1} if name == "not what it takes" else {"replicated": True} if Nq else {}
        q.requires_grad_(name in ("a gradient", "backward"))
        out = strategies.attention(q, k, v, strategy=strategy, S=S, block=PlainBlock, **options)
        return torch.autograd.grad(out, q, dout)[0] if name == "backward" else out

    known = ["causal", "scale", "layout", "dtype", "heads", "few" if strategy == "star" else "backward"]
    want = [call(name) for name in known]
    for name in DISAGREEMENTS:
        if strategy not in NOT_OF_ALL.get(name, strategies.LESSONS):
            continue
        mine = {"queries": "few", "no backward": "backward"}.get(name, "")
        with pytest.raises((ValueError, TypeError, NotImplementedError)) as raised:
            if other and name == "strategy":
                call(strategy="ulysses" if strategy == "ring" else "ring")
            elif other and name == "no backward":
                call(), call()
            else:
                call(name if other else mine)
        messages[name] = str(raised.value)
        assert all(torch.equal(call(again), x) for again, x in zip(known, want, strict=True)), name
    return messages


@pytest.mark.skipif(engine.name == "cuda", reason="takes the place of NCCL")
@pytest.mark.parametrize("strategy", ["query_parallel", "star", "ulysses"])
def test_over_nccl_the_devices_compare_calls_that_were_agreed_on(strategy):
    for said, texts in on_ranks(disagree_as_over_nccl, strategy):
        assert said == "the ranks of the ring make different calls" and texts == 2


def disagree_as_over_nccl(strategy):
    """(what this rank raised, how often arguments were compared as text). Here over gloo, but as over NCCL."""
    init, exchange, texts = Comm.__init__, watch.exchange, []

    def as_over_nccl(self, group=None):
        init(self, group)
        self.through_host = False

    def counted(*args, **options):
        texts.append(args)
        return exchange(*args, **options)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Comm, "__init__", as_over_nccl)
        patch.setattr(watch, "exchange", counted)
        tensors = inputs(5)[:3]
        options = dict(strategy=strategy, S=20, block=PlainBlock, group=group_of((3, 0, 1, 2)))
        for layout in 2 * ("zigzag", "contiguous"):
            strategies.attention(*tensors, layout=layout, **options)
        with pytest.raises(RuntimeError) as raised:
            strategies.attention(*tensors, layout="zigzag" if dist.get_rank() == 2 else "contiguous", **options)
    return str(raised.value), len(texts)


# What a strategy costs.


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("S, H, Hk, dtype", [(262, 8, 8, torch.float32), (258, 8, 4, torch.bfloat16)])
@pytest.mark.parametrize("strategy", strategies.LESSONS)
def test_sent_bytes_and_memory_are_those_of_the_formulas(strategy, S, H, Hk, dtype, causal):
    layout = "contiguous" if S == 258 else "zigzag"
    sizes = dict(B=1, H=H, Hk=Hk, D=64, e=dtype.itemsize)
    for rank, (sent, memory) in enumerate(on_ranks(costs, strategy, layout, S, H, Hk, dtype, causal)):
        whole = Layout(layout, S, 4, causal)
        formula = account.sent_bytes(strategy, whole, rank, **sizes)
        assert sent == formula
        by_formula = account.memory_bytes(strategy, whole, rank, **sizes)
        if engine.name == "cpu":  # On a GPU this block's own tensors are counted, too.
            assert 0.85 * by_formula < memory < 1.15 * by_formula, (rank, memory, by_formula)


def costs(strategy, layout, S, H, Hk, dtype, causal):
    whole, attention = Layout(layout, S, 4), strategies.load(strategy)
    mine = [whole.shard(x, dist.get_rank()) for x in inputs(S, H, Hk, 64, dtype)]
    options = dict(causal=causal, layout=layout, S=S)
    quick = {name: functools.partial(getattr(PlainBlock, name), tile=(128, 128)) for name in ("forward", "backward")}
    plain = SimpleNamespace(**quick)

    def forward(block):
        return attention(*mine[:3], block=block, **options)

    forward(plain)  # the first call of these shapes may also compare arguments
    with account.counted() as first:
        forward(plain)
    with account.counted() as both:
        account.passes(attention, *mine, block=plain, **options)
    backward = both["bytes"] - first["bytes"] if strategy in WITH_BACKWARD else None
    return (first["bytes"], backward), account.measured_memory(forward, plain, mine)


# Programs.


def test_every_lesson_is_a_program_of_at_most_60_lines():
    lessons = sorted(FOLDER.glob("lesson_*.py"))
    assert [path.stem.split("_")[1] for path in lessons] == list("123456")
    assert {path.stem for path in lessons} >= set(strategies.LESSONS.values())
    for path in lessons:
        assert len(path.read_text().splitlines()) <= 60, path


def test_a_lesson_runs():
    command = [sys.executable, "-m", "steps.step04_ring.strategies.lesson_1_hop"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0 and "rank 2 got [1, 1]" in done.stdout, done.stderr


@pytest.mark.long
@pytest.mark.parametrize("lesson", sorted(path.stem for path in FOLDER.glob("lesson_[2-6]*.py")))
def test_the_other_lessons_run(lesson):
    command = [sys.executable, "-m", f"steps.step04_ring.strategies.{lesson}"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    if lesson != "lesson_2_overlap":  # which prints times; the order of its events has a test above
        assert max(float(word.strip(",")) for word in done.stdout.split() if "e-" in word) < 5e-6


def test_demo_of_a_strategy():
    app = typer.Typer()
    app.command()(demo.main)  # In this process starting ranks is fast. test_step04_ring.py runs the program.
    words = ("--strategy", "ulysses", "--seq", "64", "--dim", "16", "--gpus", "2")
    done = CliRunner().invoke(app, words)
    assert done.exit_code == 0, done.output
    for words in ("forward + backward", "memory, forward", "by formula", "largest differences"):
        assert words in done.output
    sent = re.findall(r"sent, (\w+) +(\S+) MB a rank, by formula (\S+)", done.output)
    assert [of_pass for of_pass, _, _ in sent] == ["forward", "backward"]
    assert all(measured == formula != "0.000" for _, measured, formula in sent), sent


@pytest.mark.parametrize("strategy", strategies.LESSONS)
def test_a_report_of_fewer_positions_than_ranks(strategy):
    for rank, line in enumerate(on_ranks(differences_of_one_position, strategy)):
        assert line.startswith(f"rank {rank}: ") and max(float(word) for word in re.findall(r"\S+e.\d+", line)) < 5e-6


def differences_of_one_position(strategy):
    return account.differences(strategies.load(strategy), S=1, block=PlainBlock)


# In a model.


@pytest.mark.parametrize("S, layout", [(37, "zigzag"), (30, "striped")])
def test_a_model_on_ranks_has_the_loss_and_gradients_of_one_device(S, layout):
    for found in on_ranks(in_your_model.compare, S, layout, PlainBlock):
        assert len(found) == 22 and max(found.values()) < 2e-6, found
