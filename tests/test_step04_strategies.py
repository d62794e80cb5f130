"""Stage 04's lessons and the ring: each against the reference over gloo, what it refuses, and what it costs.

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
from reference import error
from steps import engine, step03_triton
from steps.course.workbook.case_on_ranks import PlainBlock, group_of
from steps.step03_triton import features
from steps.step04_ring import Layout, block, demo, in_your_model, launch, strategies
from steps.step04_ring.layout import LAYOUTS
from steps.step04_ring.ranks.board import Board
from steps.step04_ring.ranks.comm import Comm
from steps.step04_ring.strategies import account, lesson_1_hop, lesson_2_overlap, lesson_4_star
from steps.step04_ring.strategies.cuts import cut
from steps.step04_ring.strategies.one_device import differences, passes
from support.counted import Counted, Idle
from support.operands import PLACES as OTHER_PLACES
from support.ranks import (
    ON_FETCH,
    both_passes,
    end_of_pool,  # noqa: F401  Pytest finds the fixture by its name.
    in_every_rank,
    on_ranks,
)

FOLDER = Path(strategies.__file__).parent
LESSONS = {path.stem for path in FOLDER.glob("lesson_*.py")}
RESULTS = "out", "dq", "dk", "dv"
RING, ALL = ("relay", "fetch"), ("query_parallel", "star", "ulysses", "relay", "fetch")
WITH_BACKWARD = ("query_parallel", "ulysses", "ring")


def inputs(S, H=4, Hk=4, D=16, dtype=torch.float32, Nq=None, device=engine.device):
    """q, k, v and dout, the same on every rank."""
    random = torch.Generator().manual_seed(S)
    shapes = (H, Nq or S), (Hk, S), (Hk, S), (H, Nq or S)
    return [torch.randn(1, *shape, D, generator=random).to(device, dtype) for shape in shapes]


def check(got, want, whole=None, rank=0, about=None):
    """The results of a rank, by name, are within the tolerance."""
    for name, x in got.items():
        shard = whole.shard(want.value[name], rank, dim=2) if whole else want.value[name]
        assert x.shape == shard.shape and bool(x.isfinite().all()), (about, name)
        worst = (x.double() - shard).abs().max().item() if x.numel() else 0
        assert worst <= want.tolerance[name], (about, name, worst, want.tolerance[name])


def results(way, q, k, v, dout, change=None, block=PlainBlock, **options):
    """{name: result} of the ring, or what a strategy has of them. change(name, x) puts x into other memory."""
    if not change and way in RING:
        return dict(zip(error.NAMES, both_passes(q, k, v, dout, block, transport=way, **options), strict=True))
    if change:
        q, k, v, dout = (change(name, x) for name, x in (("q", q), ("k", k), ("v", v), ("dout", dout)))
    if way in strategies.LESSONS:
        found = passes(strategies.load(way), q, k, v, dout, block=block, **options)
        assert len(found) == (4 if way in WITH_BACKWARD else 1)
        return dict(zip(RESULTS, found, strict=False))
    options |= {"transport": way, "block": block}
    out, lse = step04.forward(q, k, v, **options)
    grads = step04.backward(dout, q, k, v, change("out", out), change("lse", lse), **options)
    return dict(zip(error.NAMES, (out, lse, *grads), strict=True))


def layouts_of(way):
    return [layout for layout in LAYOUTS if (way, layout) != ("query_parallel", "striped")]


# Lessons 1 and 2.


@pytest.mark.parametrize("overlap", [None, False, True])
@in_every_rank
def test_one_hop_is_attention_over_the_keys_of_two_ranks(overlap):
    rank, whole = dist.get_rank(), Layout("contiguous", 52, 4)
    q, k, v, dout = inputs(52, device=launch.message_device())
    before = whole.positions((rank - 1) % 4)
    keys = torch.cat([before, whole.positions(rank)]).to(q.device)
    mine = [whole.shard(x, rank) for x in (q, k, v)]
    lesson, options = (lesson_1_hop, {}) if overlap is None else (lesson_2_overlap, {"overlap": overlap})
    out, lse = lesson.attention(*mine, block=PlainBlock, **options)
    want = error.expected(mine[0], *(x.index_select(2, keys) for x in (k, v)), whole.shard(dout, rank))
    check({"out": out, "lse": lse}, want)


@pytest.mark.parametrize(
    "overlap, order", [(True, "post block wait block"), (False, "post wait block block")], ids=["overlap", "sequence"]
)
@in_every_rank
def test_the_overlapped_hop_travels_while_the_block_is_computed(overlap, order, monkeypatch):
    """The message is under way when the block begins, and is waited for after it; without overlap before it."""
    events, post = [], lesson_2_overlap.post

    def logged(x):
        messages, arriving = post(x)
        events.append("post")
        wait = SimpleNamespace(wait=lambda: events.append("wait") or [message.wait() for message in messages])
        return [wait], arriving

    monkeypatch.setattr(lesson_2_overlap, "post", logged)
    block = SimpleNamespace(forward=lambda *x: events.append("block") or PlainBlock.forward(*x))
    lesson_2_overlap.attention(*inputs(8, device=launch.message_device())[:3], block=block, overlap=overlap)
    assert events == order.split()


# The strategies, and the ring by both of its transports.

WAYS = [*ALL[:-1], pytest.param("fetch", marks=ON_FETCH)]
TEAMS = [(0, 1, 2, 3), (0, 1), (1, 2, 3), (2,)]
SETTINGS = [  # (teams, S, H, Hk, dtype, scale, masks), of heads so many to a rank
    (TEAMS, 37, 1, 1, torch.float32, 0.3, (False, True)),
    (TEAMS, 3, 2, 1, torch.float32, 0.3, (False, True)),
    (TEAMS, 32, 2, 1, torch.bfloat16, 0.3, (False, True)),
    # Two extremes at once: fewer positions than ranks, 16 bits or unequal shards, with a large scale or many heads.
    (TEAMS[:1], 3, 1, 1, torch.float32, 40.0, (True,)),
    (TEAMS[:1], 13, 8, 0.25, torch.bfloat16, None, (True,)),
    (TEAMS[:1], 13, 8, 1, torch.float16, 4.0, (True,)),
]


@pytest.mark.parametrize("way", WAYS)
@in_every_rank
def test_a_strategy_is_attention(way):
    """Over team sizes, lengths, layouts, heads and dtypes."""
    for teams, S, H, Hk, dtype, scale, masks in SETTINGS:
        for members, causal in itertools.product(teams, masks):
            group, N = group_of(members), len(members)  # All ranks make a group together.
            if dist.get_rank() not in members:
                continue
            tensors = inputs(S, H * N, max(int(Hk * N), N if way == "ulysses" else 1), 16, dtype)
            rank, want = dist.get_rank(group), error.expected(*tensors, causal=causal, scale=scale)
            for layout in layouts_of(way) if N > 2 else ("zigzag",):
                whole = Layout(layout, S, N)
                mine = [whole.shard(x, rank) for x in tensors]
                before = [x.clone() for x in mine]
                options = dict(causal=causal, scale=scale, layout=layout, group=group)
                options |= {} if S == 37 else {"S": S}  # without S the ranks add it up
                got = results(way, *mine, **options)
                assert all(x.dtype == dtype for name, x in got.items() if name != "lse")
                assert all(map(torch.equal, mine, before)), "an input was overwritten"
                check(got, want, whole, rank, (members, S, H, dtype, causal, layout))


@pytest.mark.parametrize("mask", [{"causal": True}, {}])  # By default there is none.
def test_without_a_process_group_a_strategy_has_one_rank(mask):
    tensors = inputs(21)
    for strategy in strategies.LESSONS:
        check(results(strategy, *tensors, **mask), error.expected(*tensors, **mask), about=strategy)


PACKED = (  # beginnings and the end, for S = 48: shards of 6 and 6, or of 12
    (0, 48),
    (0, 5, 6, 6, 20, 31),  # some lie in one shard, some over two; one is empty; the last rows belong to none
    (0, 12, 24, 36, 48),  # the ends of the shards
)


@pytest.mark.parametrize(
    "layout, causal",
    [("zigzag", True), *(pytest.param(one, False, marks=pytest.mark.long) for one in ("contiguous", "zigzag"))],
)
@in_every_rank
def test_query_parallel_takes_packed_sequences(layout, causal):
    """Beside the reference of each sequence alone; over the packed call of stage 03."""
    tensors = inputs(48, H=2, Hk=1)
    whole, rank = Layout(layout, 48, 4), dist.get_rank()
    mine = [whole.shard(x, rank) for x in tensors]
    for cu in PACKED:
        scale = 20.0 if cu[-1] < 48 else None  # large beside rows without a key
        places = zip(RESULTS, (tensors[0], *tensors[:3]), strict=True)
        value = {name: torch.zeros_like(x, dtype=torch.float64) for name, x in places}
        tolerance = dict.fromkeys(value, 0.0)
        for start, stop in zip(cu, cu[1:], strict=False):
            one = error.expected(*(x[:, :, start:stop] for x in tensors), causal=causal, scale=scale)
            for name in value if stop > start else ():
                value[name][:, :, start:stop] = one.value[name]
                tolerance[name] = max(tolerance[name], one.tolerance[name])
        options = dict(causal=causal, scale=scale, layout=layout, S=48, cu_seqlens=torch.tensor(cu, dtype=torch.int32))
        got = results("query_parallel", *mine, block=None, **options)
        check(got, SimpleNamespace(value=value, tolerance=tolerance), whole, rank, cu)


def test_what_a_run_of_queries_needs_of_packed_sequences():
    """Of the queries 7 to 10, and of all in the second half, whose last rows belong to no sequence."""
    for run, causal, keys, q, k in (
        (range(7, 11), True, slice(5, 11), [0, 0, 2, 4], [0, 0, 4, 6]),
        (range(7, 11), False, slice(5, 16), [0, 0, 2, 4], [0, 0, 4, 11]),
        (range(9, 20), True, slice(9, 20), [0, 0, 0, 7], [0, 0, 0, 7]),
        (range(9, 20), False, slice(9, 16), [0, 0, 0, 7], [0, 0, 0, 7]),
    ):
        found, options = cut((0, 5, 9, 16), run, 20, causal, "cpu")
        longest = {"max_seqlen_q": max(map(int.__sub__, q[1:], q)), "max_seqlen_k": max(map(int.__sub__, k[1:], k))}
        got = {name: x.tolist() if torch.is_tensor(x) else x for name, x in options.items()}
        assert found == keys and got == {"cu_seqlens_q": q, "cu_seqlens_k": k, **longest}, (run, causal)


@pytest.mark.parametrize("layout", LAYOUTS)
@in_every_rank
def test_star_takes_few_replicated_queries(layout):
    rank = dist.get_rank()
    cases = [(61, 1, True), (61, 1, False), (61, 7, False), (61, 7, True), (61, 40, True), (3, 2, True), (3, 1, False)]
    some = [(*case, torch.float32, None) for case in cases] + [(5, 9, True, torch.float32, 40.0)]  # rows without a key
    some += [(61, 7, True, torch.bfloat16, None), (61, 1, False, torch.bfloat16, None)]
    for S, Nq, causal, dtype, scale in some:
        if layout == "striped" and causal and Nq > 1:
            continue
        q, k, v, dout = inputs(S, H=4, Hk=2, Nq=Nq, dtype=dtype)
        want, whole = error.expected(q, k, v, dout, causal=causal, scale=scale), Layout(layout, S, 4)
        k, v = (whole.shard(x, rank) for x in (k, v))
        options = dict(strategy="star", causal=causal, scale=scale, layout=layout, S=S, replicated=True)
        out = strategies.attention(q, k, v, block=InFloat32, **options)
        everyone = [None] * 4
        dist.all_gather_object(everyone, out.cpu())
        assert all(torch.equal(x, everyone[0]) for x in everyone), "the ranks differ"
        check({"out": out}, want, about=(S, Nq, causal, dtype))
        once = (want.value["out"].to(dtype).double() - want.value["out"]).abs()  # by one rounding, of the whole result
        assert dtype == torch.float32 or ((out.double() - want.value["out"]).abs() <= once + 1e-6).all(), (S, Nq)


class InFloat32:
    """PlainBlock, whose out is not rounded to the dtype of q."""

    @staticmethod
    def forward(*tensors, **options):
        return PlainBlock.forward(*(x.float() for x in tensors), **options)


@in_every_rank
def test_a_rank_computes_one_block_and_sends_one_message_for_a_new_token(monkeypatch):
    """For a query that sees the keys of both of its zigzag chunks.

    After 24 bytes, by which the ranks compare their calls: out and lse of 4 heads in float32, to each rank.
    """
    done, exchange, gather = [], dist.all_to_all_single, dist.all_gather
    block = SimpleNamespace(forward=lambda *x, **options: done.append("block") or PlainBlock.forward(*x, **options))
    q, k, v = inputs(11, Hk=2, Nq=1)[:3]
    monkeypatch.setattr(dist, "all_to_all_single", lambda *x, **how: done.append(x[1].nbytes) or exchange(*x, **how))
    monkeypatch.setattr(dist, "all_gather", lambda all, x, **how: done.append(x.nbytes) or gather(all, x, **how))
    lesson_4_star.attention(q, k, v, causal=True, S=44, block=block, replicated=True)  # 4 shards of 11 keys
    assert done == [24, "block", 4 * 4 * (16 + 1) * 4]


def test_star_s_default_block_for_few_queries_is_stage_03_s(monkeypatch):
    """On a Hopper GPU the block of many queries is another one. The GPU's place is taken by a patch."""
    chosen = []
    q, k, v = inputs(8)[:3]
    on_hopper = SimpleNamespace(is_cuda=True, device="cuda:0", dtype=torch.bfloat16, shape=(1, 1, 4, 64))
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    monkeypatch.setitem(step03_triton.SUPPORTS, "deterministic", True)
    assert isinstance(block.default_block(on_hopper), block.Hopper)
    usual = functools.partial(block.default_block, on_hopper)
    monkeypatch.setattr(lesson_4_star, "default_block", lambda q, **how: usual(**how))
    monkeypatch.setattr(lesson_4_star, "Team", lambda *tensors, block=None, **others: chosen.append(block))
    for options in ({"replicated": True}, {}, {"replicated": True, "block": PlainBlock}, {"block": PlainBlock}):
        with pytest.raises(AttributeError):  # There is no team.
            lesson_4_star.attention(q, k, v, **options)
    assert chosen == [step03_triton, None, PlainBlock, PlainBlock]
    few, many = (torch.empty(1, 8, n, 64, device=engine.device) for n in (1, 65))
    keys = torch.empty(1, 2, 2048, 64, device=engine.device)
    f = features.DEFAULTS | {"causal": False, "scale": None, "tile": None, "rung": None}
    of_few, of_many = (features.forward_kernel(x, keys, f, gradient=False) for x in (few, many))
    assert of_few[0] is features.decode.forward and of_many is None, "the block divides the keys"


# What tests of equal, usual tensors do not see.


PLACES = OTHER_PLACES | {
    "strided columns": lambda x: x.new_full((*x.shape, 2), torch.nan)[..., 0].copy_(x),
    "heads and rows exchanged": lambda x: x.transpose(1, 2).contiguous().transpose(1, 2),
}


@pytest.mark.parametrize("way", WAYS)
@in_every_rank
def test_one_tensor_that_lies_in_memory_unlike_the_others(way):
    rank, layouts = dist.get_rank(), layouts_of(way)
    names = ("q", "k", "v", "dout", "out", "lse")[: 6 if way in RING else 4]
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
        for x, y in zip(got.values(), want[layout].values(), strict=True):
            assert (x - y).abs().max() < 1e-5, (layout, name, place)  # torch's sums may differ
        assert all(torch.equal(x, before) for x, before in seen), (layout, name, place)


@pytest.mark.parametrize("way", WAYS)
@in_every_rank
def test_autocast_changes_nothing(way):
    """The block is plain torch, whose products autocast would compute in bfloat16."""
    whole = Layout("zigzag", 20, 4)
    mine = [whole.shard(x, dist.get_rank()) for x in inputs(20)]
    want = results(way, *mine, S=20)
    with torch.autocast(engine.device, torch.bfloat16):
        got = results(way, *mine, S=20)
    assert all(map(torch.equal, got.values(), want.values()))


@pytest.mark.parametrize("every", [False, pytest.param(True, marks=pytest.mark.long)])
@pytest.mark.parametrize("way", WAYS)
@in_every_rank
def test_a_call_leaves_nothing_for_the_next_one(way, every):
    """The same call gives the same after another one; and no call, also a failing one, leaves a switch turned.

    every: after each of the other calls, with S and without; otherwise a layout has one of them, and one S.
    """
    rank, others = dist.get_rank(), [(1, 29), (1,), (1, 3), (0,)]
    some = zip(layouts_of(way), (18, None, 18), others, strict=False)
    for layout, S, between in itertools.product(layouts_of(way), (18, None), others) if every else some:

        def call(seed, length=18, layout=layout, S=S):
            whole = Layout(layout, length, 4)
            tensors = [whole.shard(x, rank) + seed for x in inputs(length)]
            return list(results(way, *tensors, causal=True, layout=layout, S=S and length).values())

        first, other = call(0), call(*between)
        assert between == (0,) or not torch.equal(first[0], other[0])
        assert all(map(torch.equal, call(0), first)), (layout, S, between)

    def raises(*tensors, **options):
        raise MemoryError("on purpose")

    broken = SimpleNamespace(forward=raises, backward=raises)
    alone = way in RING and rank != 1  # A lesson ends on every rank only where it raises on every rank.
    options = {"S": 16} | ({"transport": way} if way in RING else {})
    for deterministic, grad in itertools.product((False, True), repeat=2):
        torch.set_deterministic_debug_mode("warn" if deterministic else "default")
        with torch.set_grad_enabled(grad):
            here = switches()
            for block, layout in ((PlainBlock, "zigzag"), (broken, "zigzag"), (PlainBlock, "ring")):
                fails = block is broken or layout == "ring"
                with pytest.raises(Exception) if fails else contextlib.nullcontext():
                    attention = strategies.load("ring" if way in RING else way)
                    attention(*inputs(4)[:3], block=PlainBlock if alone else block, layout=layout, **options)
                assert switches() == here, (deterministic, grad, block, layout)
    torch.set_deterministic_debug_mode("default")


def switches():
    """What a library may find switched, and has to leave so."""
    found = torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()
    found += torch.is_grad_enabled(), torch.get_num_threads(), torch.get_default_dtype(), dict(os.environ)
    found += (torch.cuda.current_device(), torch.cuda.current_stream()) if engine.name == "cuda" else ()
    return *found, torch.get_rng_state().tolist()


# What is refused.

REFUSALS = [  # (strategy, H, Hk, options, words of the message), of shards of 4 positions on 4 ranks
    ("ulysses", 6, 6, {}, "6 heads of q .* 4 ranks. Use lesson 3, 4 or 6"),
    ("ulysses", 8, 2, {}, "2 heads of k and v .* repeat the heads"),
    ("query_parallel", 4, 4, {"layout": "striped"}, "successive .*not striped"),
    ("star", 4, 4, {"layout": "striped", "causal": True, "replicated": True}, "successive keys"),
    ("star", 4, 4, {"S": 24}, r"S = 24 on 4 ranks have \[6, 6, 6, 6\] positions; got 4"),
    ("query_parallel", 4, 4, {"cu_seqlens": (1, 16)}, r"begin with 0.*\[1, 16\]"),
    ("star", 4, 4, {"layout": "ring"}, "zigzag, contiguous, striped; got 'ring'"),
    ("rings", 4, 4, {}, "query_parallel, star, ulysses, ring; got 'rings'"),
]


@in_every_rank
def test_what_a_strategy_refuses():
    for strategy, H, Hk, options, words in REFUSALS:
        with pytest.raises(ValueError, match=words):
            options = {"S": 16, "block": PlainBlock} | options
            strategies.attention(*inputs(4, H, Hk)[:3], strategy=strategy, **options)


@pytest.mark.parametrize("strategy", strategies.LESSONS)
def test_tensors_and_options_that_do_not_fit_are_refused(strategy):
    """Three keys would be padded with zeros, and six be cropped, without an error."""

    def refused(words, q, k, v, **options):
        with pytest.raises((ValueError, TypeError, NotImplementedError), match=words):
            strategies.attention(q, k, v, strategy=strategy, **{"S": 4, "block": PlainBlock} | options)

    q, k, v = inputs(4)[:3]
    refused("same shape", q, k, inputs(3)[2])
    refused("Nq = Nk", q, *inputs(6)[1:3])
    refused("head_dim", q, k[..., :8], v[..., :8])
    refused("one dtype", q, k, v.half())
    refused("takes float32", q.double(), k.double(), v.double())
    refused("multiple", q, k[:, :3], v[:, :3])
    refused("causal must be", q, k, v, causal=1)
    refused("scale must be", q, k, v, scale=0)
    for option in {"window", "casual", "cu_seqlens", "replicated", "transport"} - {*strategies.OWN[strategy]}:
        refused(f"{strategy} has no {option}; its options are causal, ", q, k, v, **{option: None})
    if strategy == "ring":
        own = dict.fromkeys(strategies.OWN["ring"]) | {"transport": "relay", "deterministic": True}
        strategies.attention(q, k, v, strategy="ring", S=4, block=PlainBlock, **own)
    else:
        refused(f"{strategy} takes q .B, H, n, D.", q[0], k[0], v[0])
    if strategy == "star":  # which takes other queries than keys where they are replicated, but no other v
        refused("same shape", q[:, :, :1], k, v[:, :, :3], replicated=True)
        for trained in range(3):
            tensors = [x.clone().requires_grad_(number == trained) for number, x in enumerate((q, k, v))]
            refused("star has no backward.*lesson 3, 5 or 6", *tensors)


DISAGREEMENTS = [  # (who can disagree so, the call of most ranks, what rank 2 does otherwise, what every rank raises)
    (ALL, {}, {"causal": True}, "the same causal; got rank 0 False, rank 1 False, rank 2 True, rank 3 False"),
    (ALL, {}, {"scale": 0.5}, "the same scale; got rank 0 .*, rank 2 0.5, "),
    (ALL, {}, {"layout": "contiguous"}, "the same layout; got rank 0 zigzag, rank 1 zigzag, rank 2 contiguous"),
    (ALL, {}, {"dtype": torch.float16}, "the same dtype; got rank 0 torch.float32, .*rank 2 torch.float16"),
    (ALL, {}, {"H": 8}, r"the same shape of q; got rank 0 \(1, 4, .*rank 2 \(1, 8, "),
    (ALL, {}, {"S": "other"}, "the same S; got rank 0 "),
    (ALL, {}, {"way": "other"}, "the same function; got rank 0 .*, rank 2 "),
    (ALL, {}, {"n": 3}, "positions; got "),
    (ALL, {}, {"causal": 1}, "rank 2 of the ring was given what it does not take. TypeError: causal must be"),
    (ALL, {}, {"window": 3}, "rank 2 of the ring was given what it does not take. NotImplementedError: .* no window"),
    (RING, {}, {"transport": "other"}, "the same transport; got rank 0 "),
    (RING, {}, {"only": "backward"}, "the same function; got rank 0 forward, .*rank 2 backward"),
    ((*RING, "query_parallel", "ulysses"), {"backward": True}, {"backward": False, "twice": True},
     "the same function; got rank 0 backward of attention, .*its inputs require no gradient"),
    (("query_parallel",), {}, {"cu_seqlens": (0, 16)}, r"the same cu_seqlens; got rank 0 None, .*rank 2 \(0, 16\)"),
    (("query_parallel",), {}, {"cu_seqlens": (0, 5.5, 16)},
     "rank 2 of the ring was given what it does not take. TypeError: cu_seqlens must be integers"),
    (("star",), {"Nq": 2}, {"Nq": 3}, r"the same shape of q; got rank 0 \(1, 4, 2, 16\), .*rank 2 \(1, 4, 3, 16\)"),
    (("star",), {}, {"trained": True},
     "rank 2 of the ring was given what it does not take. NotImplementedError: star has no backward"),
]  # fmt: skip


@pytest.mark.skipif(torch.cuda.device_count() >= 4, reason="over NCCL no rank waits for the comparison")
@pytest.mark.parametrize("S", [16, pytest.param(None, marks=pytest.mark.long)])
@pytest.mark.parametrize("way", WAYS)
@in_every_rank
def test_ranks_that_disagree_all_raise(way, S):
    """With S these are calls that all ranks have agreed on before. Calls that fit must go on giving the same."""
    other, count = dist.get_rank() == 2, 0

    def call(way=way, n=4, H=4, Nq=None, dtype=torch.float32, S=S, only="", backward=False, trained=False, **options):
        q, k, v, dout = inputs(n, H, H, dtype=dtype, Nq=Nq)
        options |= {"replicated": True} if Nq else {"transport": way} | options if way in RING else {}
        options |= {"S": S, "block": PlainBlock}
        if only:
            return step04.backward(dout, q, k, v, q, q[..., 0].float(), **options)[0]
        attention = strategies.load("ring" if way in RING else way)
        if options.pop("twice", False):
            attention(q, k, v, **options)
        q.requires_grad_(trained or backward)
        out = attention(q, k, v, **options)
        return torch.autograd.grad(out, q, dout)[0] if backward else out

    another = {"S": None if S else 16, "way": "star" if way == "ulysses" else "ulysses"}
    another["transport"] = "fetch" if way == "relay" else "relay"
    known = [dict(causal=True), dict(layout="contiguous"), dict(dtype=torch.float16), dict(H=8)]
    known += [dict(Nq=2)] if way == "star" else [dict(backward=True)]
    known += [dict(only="backward")] if way in RING else []
    want = [call(**options) for options in known]
    for ways, usual, changed, words in DISAGREEMENTS:
        if way in ways:
            options = usual | {name: another[name] if x == "other" else x for name, x in changed.items()}
            own = words.split("Error: ")[-1]  # What rank 2 finds wrong by itself it does not quote.
            with pytest.raises((ValueError, TypeError, NotImplementedError), match=own if other else words):
                call(**(options if other else usual))
            assert all(torch.equal(call(**again), x) for again, x in zip(known, want, strict=True)), words
            count += 1
    assert count == {"query_parallel": 13, "star": 12, "ulysses": 11}.get(way, 13)


@pytest.mark.skipif(engine.name == "cuda", reason="takes the place of NCCL")
@pytest.mark.parametrize("strategy", ["query_parallel", "star", "ulysses"])
@in_every_rank
def test_over_nccl_the_devices_compare_calls_that_were_agreed_on(strategy, monkeypatch):
    """Here over gloo, but as over NCCL. As text they were compared twice."""
    init, exchange, texts = Comm.__init__, Board.exchange, []

    def as_over_nccl(self, group=None):
        init(self, group)
        self.through_host = False

    monkeypatch.setattr(Comm, "__init__", as_over_nccl)
    monkeypatch.setattr(Board, "exchange", lambda *args, **options: texts.append(args) or exchange(*args, **options))
    options = dict(strategy=strategy, S=20, block=PlainBlock, group=group_of((3, 0, 1, 2)))
    for layout in 2 * ("zigzag", "contiguous"):
        strategies.attention(*inputs(5)[:3], layout=layout, **options)
    with pytest.raises(RuntimeError, match="^the ranks of the ring make different calls$"):
        strategies.attention(*inputs(5)[:3], layout="zigzag" if dist.get_rank() == 2 else "contiguous", **options)
    assert len(texts) == 2


# What a strategy costs.


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("S, H, Hk, dtype", [(262, 8, 8, torch.float32), (258, 8, 4, torch.bfloat16)])
@pytest.mark.parametrize("strategy", strategies.LESSONS)
@in_every_rank
def test_sent_bytes_and_memory_are_those_of_the_formulas(strategy, S, H, Hk, dtype, causal):
    """Memory in one of the four settings alone, because counting it takes long."""
    layout, rank = "contiguous" if S == 258 else "zigzag", dist.get_rank()
    whole, attention = Layout(layout, S, 4, causal), strategies.load(strategy)
    mine = [whole.shard(x, rank) for x in inputs(S, H, Hk, 64, dtype)]
    options = dict(causal=causal, layout=layout, S=S, block=Idle)
    memory = engine.name == "cpu" and causal and dtype == torch.bfloat16
    forward, both = Counted(mine, memory), Counted(mine)
    attention(*mine[:3], **options)  # the first call of these shapes may also compare arguments
    with forward:
        attention(*mine[:3], **options)
    with both:
        passes(attention, *mine, **options)
    backward = both.sent - forward.sent if strategy in WITH_BACKWARD else None
    sizes = dict(B=1, H=H, Hk=Hk, D=64, e=dtype.itemsize)
    assert (forward.sent, backward) == account.sent_bytes(strategy, whole, rank, **sizes)
    formula = account.memory_bytes(strategy, whole, rank, **sizes)
    assert not memory or 0.85 * formula < forward.held < 1.15 * formula, (forward.held, formula)
    assert engine.name != "cpu" or "torch._dynamo" not in sys.modules, "importing torch.compile takes seconds"


# Programs.


def test_every_lesson_is_a_program_of_at_most_60_lines():
    assert [name.split("_")[1] for name in sorted(LESSONS)] == list("123456")
    assert LESSONS >= set(strategies.LESSONS.values())
    assert all(len((FOLDER / f"{name}.py").read_text().splitlines()) <= 60 for name in LESSONS)


@pytest.mark.parametrize(
    "lesson",
    ["lesson_1_hop", *(pytest.param(one, marks=pytest.mark.long) for one in sorted(LESSONS) if one > "lesson_2")],
)
def test_a_lesson_runs(lesson):
    command = [sys.executable, "-m", f"steps.step04_ring.strategies.{lesson}"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    if lesson == "lesson_1_hop":
        assert "rank 2 got [1, 1]" in done.stdout
    elif lesson != "lesson_2_overlap":  # which prints times; the order of its events has a test above
        assert max(float(word.strip(",")) for word in done.stdout.split() if "e-" in word) < 5e-6


def test_the_demo_in_this_file_s_ranks(monkeypatch):
    app = typer.Typer()
    app.command()(demo.main)
    monkeypatch.setattr(launch, "spawn", lambda work, ranks, *args: on_ranks(work, *args))
    usual = "--seq", "67", "--dim", "16", "--causal"
    ring, ulysses = (CliRunner().invoke(app, (*usual, *more)).output for more in ([], ["--strategy", "ulysses"]))
    assert "4 ranks over" in ring and "one device" in ring and "speed-up" in ring
    found = re.findall(r"(\w+) (\S+e[+-]\d+)", ring.split("largest differences to one device: ")[1])
    assert [name for name, _ in found] == list(error.NAMES)
    assert max(float(x) for _, x in found) < (1e-5 if engine.name == "cpu" else 5e-2)
    for words in ("forward + backward", "memory, forward", "largest differences"):
        assert words in ulysses
    whole, sizes = Layout("zigzag", 67, 4, causal=True), dict(B=1, H=4, Hk=4, D=16, e=4)
    most = map(max, zip(*(account.sent_bytes("ulysses", whole, rank, **sizes) for rank in range(4)), strict=True))
    sent = re.findall(r"sent, (\w+) +(\S+) MB a rank", ulysses)
    assert sent == [(name, f"{x / 1e6:.3f}") for name, x in zip(("forward", "backward"), most, strict=True)]


@pytest.mark.parametrize("strategy", strategies.LESSONS)
@in_every_rank
def test_a_report_of_fewer_positions_than_ranks(strategy):
    line = differences(strategies.load(strategy), S=1, block=PlainBlock)
    assert line.startswith(f"rank {dist.get_rank()}: ")
    assert max(float(word) for word in re.findall(r"\S+e.\d+", line)) < 5e-6


# In a model.


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("layout", LAYOUTS)
@in_every_rank
def test_sinks_are_merged_once_after_the_ring(layout, dtype):
    q, k, v, dout = inputs(37, Hk=2, dtype=dtype)
    sinks = torch.tensor([0.5, -torch.inf, 3.0, -1.0], device=engine.device)
    rank, whole = dist.get_rank(), Layout(layout, 37, dist.get_world_size())
    *leaves, dout_here = (whole.shard(x, rank) for x in (q, k, v, dout))
    leaves = [x.requires_grad_() for x in (*leaves, sinks.clone())]
    out = in_your_model.WithSinks.apply(*leaves, dict(causal=True, layout=layout, S=37, block=PlainBlock))
    first = torch.autograd.grad((out * out).sum(), leaves[3], create_graph=True)[0]
    with pytest.raises(RuntimeError, match="once_differentiable"):
        first.sum().backward()
    grads = torch.autograd.grad(out, leaves, dout_here)
    want = error.expected(q, k, v, dout, causal=True, sinks=sinks)
    check(dict(zip(RESULTS, (out.detach(), *grads[:3]), strict=True)), want, whole, rank)
    dist.all_reduce(grads[3])
    assert not error.failures({"dsinks": grads[3]}, want)


@pytest.mark.parametrize("S, layout", [(37, "zigzag"), (30, "striped")])
@in_every_rank
def test_a_model_on_ranks_has_the_loss_and_gradients_of_one_device(S, layout):
    found = in_your_model.compare(S, layout, PlainBlock)
    assert len(found) == 22 and max(found.values()) < 2e-6, found
