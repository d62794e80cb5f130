"""Stage 04: the contract on 1 to 4 ranks; layouts, merge, blocks and ranks that raise, both transports, the demo.

Without a GPU the ranks are processes over gloo. One pool of four serves the whole file; smaller worlds are its groups.
"""

import ast
import contextlib
import errno
import io
import itertools
import math
import os
import re
import subprocess
import sys
import time
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st

import steps.step04_ring as step04
from reference import cases, error
from steps import engine
from steps.cached import Cache
from steps.course.workbook.case_on_ranks import PlainBlock, group_of, outputs
from steps.course.workbook.edges import MERGES, many_merges
from steps.step04_ring import Layout, block, demo, entry, launch, merge_kernels, plan, strategies
from steps.step04_ring.layout import LAYOUTS
from steps.step04_ring.merge import Parts, add, merge
from steps.step04_ring.ranks import comm, side, watch
from steps.step04_ring.ranks.agree import go_round
from steps.step04_ring.ranks.note import Note
from support import races
from support.contract_suite import Contract
from support.ranks import (
    ON_FETCH,
    both_passes,
    end_of_pool,  # noqa: F401  Pytest finds the fixture by its name.
    in_every_rank,
    on_ranks,
    shards,
)

FOLDER = Path(step04.__file__).parent
FETCH = pytest.param("fetch", marks=ON_FETCH)


class TestContract(Contract):
    stage = step04

    def forward(self, q, k, v, rung):
        got = self.results(q, k, v, rung)
        return got["out"], got["lse"]

    def outputs(self, case, inputs, rung=None):
        ranks, layout = inputs.ring or (4, "zigzag")  # inputs.ring is None for tensors that do not come from a case
        # Triton's interpreter is slow. Without a GPU only two cases a dtype use the default block, with its own tile.
        options = {"block": None if engine.name == "cuda" or case.name in ("ragged", "ragged_causal") else PlainBlock}
        if engine.name == "cpu" and options["block"] is None:
            options["tile"] = None
        S = None if ranks % 2 else inputs.q.shape[2]
        return outputs(on_ranks, tuple(range(ranks)), layout, case, inputs, S=S, **options)

    def test_every_world_size_meets_every_layout(self):
        rows = [row for row in cases.select(step04.SUPPORTS) if row[2] is None and row[0].Nq(16) > 1]
        met = {cases.build(case, step04.SUPPORTS, dtype).ring for case, dtype, _ in rows if dtype == torch.float32}
        assert len(met) == 4 * len(LAYOUTS), met


@in_every_rank
def test_a_compiled_model_has_the_ring_between_its_graphs():
    group = group_of((0, 1))
    if dist.get_rank() not in (0, 1):
        return

    def attend(q, k, v):
        return step04.attention(q * 2, k, v, causal=True, block=PlainBlock, group=group).sin()

    *tensors, dout = shards()

    def passes(attend):
        leaves = [x.clone().requires_grad_() for x in tensors]
        out = attend(*leaves)
        return out.detach(), *torch.autograd.grad(out, leaves, dout)

    # Only one rank imports what torch.compile needs, which takes seconds.
    compiled = torch.compile(attend, backend="eager") if dist.get_rank() == 0 else attend
    assert all(map(torch.equal, passes(compiled), passes(attend)))


# Layouts: no processes needed.


@given(kind=st.sampled_from(LAYOUTS), S=st.integers(0, 40), N=st.integers(1, 7), causal=st.booleans())
@settings(max_examples=60, deadline=None)
def test_every_visible_pair_is_computed_once(kind, S, N, causal):
    layout = Layout(kind, S, N, causal)
    positions = [layout.positions(rank) for rank in range(N)]
    assert torch.equal(torch.cat(positions).sort().values, torch.arange(S))
    assert all(torch.equal(p, p.sort().values) and len(p) == layout.size(rank) for rank, p in enumerate(positions))
    assert max(map(len, positions)) - min(map(len, positions)) <= 2
    x = torch.randn(2, S, 3)
    assert torch.equal(layout.unshard([layout.shard(x, rank) for rank in range(N)]), x)
    computed = torch.zeros(S, S, dtype=torch.int)
    for me in range(N):
        for src in range(N):
            if work := layout.work(me, src):
                rows, keys, diagonal = positions[me][work[0]], positions[src][work[1]], work[2]
                assert len(rows) and len(keys) and (len(rows) == len(keys) or not diagonal)
                block = torch.ones(len(rows), len(keys), dtype=torch.int)
                computed[rows[:, None], keys] += block.tril() if diagonal else block
    visible = torch.ones(S, S, dtype=torch.int)
    assert torch.equal(computed, visible.tril() if causal else visible)


# Merge.


@pytest.mark.parametrize("lse, lse_block, want, want_lse", MERGES)
def test_merge_at_the_edges(lse, lse_block, want, want_lse):
    out, lse = torch.full((1, 1), 0.0 if lse == -math.inf else 1.0), torch.tensor([lse])
    merge(out, lse, torch.full((1, 1), 2.0), torch.tensor([lse_block]))
    assert out.item() == pytest.approx(want, abs=1e-3)
    assert lse.item() == pytest.approx(want_lse, rel=1e-6)


def test_many_merges_round_nothing_to_16_bits():
    assert many_merges({"module": merge.__module__}, None, None) == []


def some_parts(n, D, dtype=torch.float32):
    """Parts of 2 x 3 heads as four blocks return them; some rows have seen no key, and hold NaN there."""
    random = torch.Generator().manual_seed(n)
    for first, stop in ((0, n), (n // 2, n), (min(1, n - 1), n), (0, n - n // 3), (0, n)):
        out, lse = (torch.randn(2, 3, stop - first, d, generator=random) for d in (D, 1))
        lse = 5 * lse[..., 0]
        lse[0, 0] = -math.inf
        yield slice(first, stop), out.to(dtype), lse


@pytest.mark.filterwarnings("ignore:divide by zero")  # of the interpreter, at the logarithm of 0
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize("n, D", [(70, 40), (1, 8), (33, 64)])
def test_parts_are_merged_a_few_at_a_time_and_by_kernels_too(n, D, dtype):
    """What a row that saw no key holds is not read."""
    q = torch.empty(2, 3, n, D, dtype=dtype)
    want, want_lse = torch.zeros(q.shape), torch.full(q.shape[:3], -math.inf)
    parts, held = list(some_parts(n, D, dtype)), Parts(q)
    for rows, out, lse in parts:
        merge(want[..., rows, :], want_lse[..., rows], out, lse)
        held.add(rows, out, lse)
        assert len(held.parts) <= 4
    got, got_lse = held.merged()
    assert got.dtype == dtype and torch.equal(got, want.to(dtype)) and torch.equal(got_lse, want_lse)
    for _, out, lse in parts:
        out[lse == -math.inf] = math.nan
    parts = [tuple(x.to(engine.device) if torch.is_tensor(x) else x for x in part) for part in parts]
    got, got_lse = merge_kernels.merge(parts, want.shape, torch.float32)
    torch.testing.assert_close(got.cpu(), want, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(got_lse.cpu(), want_lse, rtol=1e-6, atol=1e-6)
    sums = [(slice(0, m), torch.randn(2, 3, m, D, device=engine.device).to(dtype)) for m in (n, n // 2, max(1, n - 1))]
    got = merge_kernels.add(sums, torch.empty(2, 3, n, D, device=engine.device))
    assert torch.equal(got.cpu(), add([(rows, x.cpu()) for rows, x in sums], torch.empty(2, 3, n, D)))


# Ranks together.


class Exact:
    """A block whose results say which rank's queries met which rank's keys: k holds the rank, and q does.

    The gradients are of `parts`, by the rank that a gradient does not belong to; dk is twice, and dv three times that.
    """

    parts = 256.0, 1.0, 1.0, 1.0  # whose sum, 259, is lost where it is rounded to bfloat16 before the end

    @classmethod
    def forward(cls, q, k, v, *, causal, scale):
        return torch.ones_like(q), torch.zeros(q.shape[:3], device=q.device)

    @classmethod
    def backward(cls, dout, q, k, v, out, lse, *, causal, scale):
        of_q, of_k = (cls.parts[int(x.flatten()[0])] for x in (q, k))
        return torch.full_like(q, of_k), torch.full_like(k, 2 * of_q), torch.full_like(v, 3 * of_q)


class ExactInOrder(Exact):
    parts = 1.0, 1e8, -1e8, 3.0  # whose sum in float32 depends on the order


@pytest.mark.parametrize("transport", ["relay", FETCH])
@in_every_rank
def test_gradients_are_added_in_float32_and_in_order(transport):
    """In bfloat16 of Exact and in float32 of ExactInOrder."""
    rank, found = dist.get_rank(), []
    for dtype, exact in ((torch.bfloat16, Exact), (torch.float32, ExactInOrder)):
        x = torch.full((1, 1, 2, 8), float(rank), dtype=dtype, device=engine.device)
        lse = torch.zeros(1, 1, 2, device=engine.device)
        grads = step04.backward(x, x, x, x, x, lse, block=exact, S=8, layout="contiguous", transport=transport)
        found.append([grad.flatten()[0].item() for grad in grads])
        assert all((grad == grad.flatten()[0]).all() for grad in grads)
    assert found[0] == torch.tensor([259.0, 2 * 259, 3 * 259]).bfloat16().tolist()
    # fetch adds in the order of the ranks, relay in that in which the keys visit them; both add dk and dv alike.
    total = torch.zeros(2)
    for giver in range(4) if transport == "fetch" else [(rank - 1 - step) % 4 for step in range(4)]:
        total += torch.tensor([2.0, 3.0]) * ExactInOrder.parts[giver]
    assert found[1][1:] == total.tolist()


class InParts:
    """PlainBlock with its backward in parts, as a block may offer them."""

    calls = 0
    forward = PlainBlock.forward

    @classmethod
    def delta(cls, dout, q, out, lse, *, scale):
        cls.calls += 1
        return dout, q, out, lse, scale, torch.zeros_like(q)

    @staticmethod
    def backward_into(sums, rows, k, v, *, causal):
        dout, q, out, lse, scale, dq = sums
        saved = *(x[:, :, rows] for x in (dout, q)), k, v, *(x[:, :, rows] for x in (out, lse))
        part, dk, dv = PlainBlock.backward(*saved, causal=causal, scale=scale)
        dq[:, :, rows] += part
        return dk, dv

    @staticmethod
    def dq(sums):
        return sums[-1]


@in_every_rank
def test_a_block_with_its_backward_in_parts():
    mine = shards()
    for layout, causal in itertools.product(LAYOUTS, (False, True)):
        InParts.calls = 0
        both = [both_passes(*mine, one, S=20, layout=layout, causal=causal) for one in (PlainBlock, InParts)]
        assert all(map(torch.equal, *both)) and InParts.calls == 2, (layout, causal)


def failing(block, name, n):
    """The block, of which one function finds no memory left when it is called for the n-th time."""
    calls = itertools.count(1)

    def function(*tensors, **options):
        if next(calls) == n:
            raise MemoryError("on purpose")
        return getattr(block, name)(*tensors, **options)

    return type("Failing", (block,), {name: staticmethod(function)})


# On every rank a causal zigzag calls the block once at each step, so that N is the last of them.
FORWARDS = [(PlainBlock, "forward", n) for n in (1, 2, "N")]
BACKWARDS = [(PlainBlock, "backward", n) for n in (1, 2, "N")]
BACKWARDS += [(InParts, "delta", 1), (InParts, "backward_into", 2), (InParts, "dq", 1)]


# A short run has each transport and each set of ranks that raise, but not every pair of the two.
@pytest.mark.parametrize("transport, culprits", [
    ("relay", (1,)), ("relay", (0, 2)), pytest.param("fetch", (0, 1, 2, 3), marks=ON_FETCH),
    pytest.param("relay", (0, 1, 2, 3), marks=pytest.mark.long),
    pytest.param("fetch", (1,), marks=(ON_FETCH, pytest.mark.long)),
    pytest.param("fetch", (0, 2), marks=(ON_FETCH, pytest.mark.long)),
], ids=str)  # fmt: skip
@in_every_rank
def test_a_block_that_raises_ends_the_call_on_every_rank_and_the_next_call_is_right(transport, culprits):
    """Ranks that did not raise name those that did. Where they waited in vain, this pool's minute would pass first.

    In the world and in a group of two, whose ranks `culprits` raise.
    """
    groups = {members: group_of(members) for members in ((0, 1, 2, 3), (1, 3))}
    for members, group in groups.items() if dist.get_rank() in (1, 3) else [*groups.items()][:1]:
        rank, N = dist.get_rank(group), len(members)
        some = [who for who in culprits if who < N]
        q, k, v, dout = shards()
        options = dict(S=5 * N, causal=True, group=group, transport=transport)
        want = both_passes(q, k, v, dout, **options)
        forward, backward = partial(step04.forward, q, k, v), partial(step04.backward, dout, q, k, v, *want[:2])

        def autograd(q=q, k=k, v=v, dout=dout, **options):
            step04.attention(*(x.clone().requires_grad_() for x in (q, k, v)), **options).backward(dout)

        calls = [(forward, *row) for row in FORWARDS]
        calls += [(call, *row) for row in BACKWARDS for call in (backward, autograd)]
        for call, usual, name, n in calls:
            block = failing(usual, name, N if n == "N" else n) if rank in some else usual
            with pytest.raises(MemoryError if rank in some else step04.RingError) as raised:
                call(block=block, **options)
            note, told = watch.note(group), str(raised.value)
            names = [f"rank {who} of {N} raised MemoryError: on purpose in call {note.now[0]}, hop " for who in some]
            assert told == "on purpose" if rank in some else all(words in told for words in names), (name, n, told)
            got = *forward(block=PlainBlock, **options), *backward(block=PlainBlock, **options)
            assert all(map(torch.equal, got, want)) and not note.failure, (members, name, n, "the next call")


@pytest.mark.parametrize("transport", ["relay", FETCH])
@in_every_rank
def test_where_a_block_has_raised_no_stale_number_passes_for_a_gradient(transport, monkeypatch):
    """As over NCCL, where the other ranks' hosts do not wait for the end of the call. Rank 1 raises at its first step.

    The others' out and dq are right, and their dk and dv are NaN where they are not.
    """
    q, k, v, dout = shards()
    options = dict(S=20, causal=False, transport=transport)
    want_out, lse, *want = both_passes(q, k, v, dout, **options)
    both_passes(q, k, v, 2 * dout, **options)  # whose gradients are left in the shared memory
    got = []
    monkeypatch.setattr("steps.step04_ring.ranks.comm.Comm.together", lambda comm: contextlib.nullcontext())
    for function, saved in ((step04.forward, (q, k, v)), (step04.backward, (dout, q, k, v, want_out, lse))):
        block = failing(PlainBlock, function.__name__, 1) if dist.get_rank() == 1 else PlainBlock
        with contextlib.suppress(MemoryError):
            got += function(*saved, block=block, **options)
    assert (dist.get_rank() == 1) == (not got)
    for name, x, y in zip(error.NAMES, got, (want_out, lse, *want), strict=False):
        assert torch.equal(x, y) if name in ("out", "lse", "dq") else x.isnan().any() and (x.isnan() | (x == y)).all()


@pytest.mark.skipif(engine.name == "cuda", reason="takes the place of NCCL")
@in_every_rank
def test_over_nccl_every_other_rank_prints_what_a_block_raised(monkeypatch):
    """Here over gloo, but as over NCCL. It is not printed again."""
    note, printed = watch.note(dist.group.WORLD), []
    call = note.now[0]
    monkeypatch.setattr(watch, "print_line", printed.append)
    monkeypatch.setattr(note, "on_device", True)
    monkeypatch.setattr(note, "now", (call, 2, {}))
    dist.barrier()
    if dist.get_rank() == 1:
        note.failed(MemoryError("on purpose\nand more"))
    while not printed and dist.get_rank() != 1:
        time.sleep(0.01)
    dist.barrier()
    time.sleep(2 * watch.PERIOD)
    note.failure = ""
    dist.barrier()
    line = f"rank 1 of 4 raised MemoryError: on purpose in call {call}, hop 2"
    assert printed == ([] if dist.get_rank() == 1 else [line])


@in_every_rank
def test_a_file_that_finds_no_memory_is_an_error_on_every_rank(monkeypatch):
    def full(file, first, size):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as patch:
        if dist.get_rank() == 1:
            patch.setattr(os, "posix_fallocate", full, raising=False)
        words = "rank 1 has no room for 64 bytes in .*: No space left on device. .*--shm-size.*relay"
        with pytest.raises(OSError, match=words):
            side.SharedFiles(64, comm.Comm())
    side.SharedFiles(64, comm.Comm())


def test_shared_memory_is_there_before_it_is_written(tmp_path):
    """A file that is only long, and takes no blocks, ends the process by SIGBUS where memory is short."""
    with open(tmp_path / "shared", "w+b") as file:
        assert side.allocated(file, 1 << 20) == ""
        found = os.stat(file.fileno())
    assert found.st_size == 1 << 20 <= 512 * found.st_blocks or not hasattr(os, "posix_fallocate")


@pytest.mark.parametrize("first, n", [(128, 256), (70, 140), (1, 90)])
def test_stage_02_s_backward_on_slices(first, n):
    """dq comes from blocks with all queries and from blocks with the late ones, which may begin inside a tile."""
    random = torch.Generator().manual_seed(n)
    q, dout, k, v = (torch.randn(1, h, n, 64, generator=random).to(engine.device, torch.bfloat16) for h in (2, 2, 1, 1))
    lse = torch.full((1, 2, n), 7.0, device=engine.device)
    before = lse.clone()
    hopper = block.Hopper()
    if engine.name == "cuda" and torch.cuda.get_device_capability() != (9, 0):
        hopper.rung = "fa2"
    for late in (slice(0, n), slice(first, n)):
        sums = hopper.delta(dout, q, q, lse, scale=0.125)
        total = torch.zeros(q.shape, dtype=torch.float64)
        whole = slice(0, n)
        for rows, keys, causal in (
            (whole, whole, True),
            (late, slice(0, n - 5), False),
            (late, slice(3, n), False),
            (late, late, True),
        ):
            dkv = hopper.backward_into(sums, rows, k[:, :, keys], v[:, :, keys], causal=causal)
            saved = *(x[:, :, rows] for x in (dout, q)), k[:, :, keys], v[:, :, keys], q[:, :, rows], lse[:, :, rows]
            dq, *want = PlainBlock.backward(*(x.cpu().float() for x in saved), causal=causal, scale=0.125)
            total[:, :, rows] += dq
            for x, y in zip(dkv, want, strict=True):
                torch.testing.assert_close(x.cpu().float(), y, rtol=0.02, atol=0.02 * y.abs().max().item())
        dq = hopper.dq(sums).cpu().double()
        torch.testing.assert_close(dq, total, rtol=0.02, atol=0.02 * total.abs().max().item())
        sums.whole.dq_sum.fill_(2.0)
        for tile, part in sums.late.values():  # bfloat16 has neither 257 nor 259, so both are float32
            part.dq_sum.fill_(257.0)
            hopper.dq(sums)
            assert (sums.whole.dq_sum[:, :, tile:] == 259).all()
    assert torch.equal(lse, before), "an input was overwritten"


def asked_for(monkeypatch, **options):
    """What default_block is told of the GPU in a forward: [alone]."""
    told, x = [], torch.zeros(1, 1, 4, 8, device=engine.device)
    monkeypatch.setattr(plan, "default_block", lambda q, tile, alone: told.append(alone) or PlainBlock)
    monkeypatch.setattr(entry, "_cached", Cache())
    step04.forward(x, x, x, **options)
    return told


def test_a_forward_s_kernel_is_persistent_where_it_has_the_gpu_for_itself(monkeypatch):
    assert asked_for(monkeypatch, S=4) == [True]
    assert block.Hopper(True).switches == {} and block.Hopper(False).switches == {"PERSISTENT": 0}
    assert block.Hopper().deterministic


def test_a_block_of_the_caller_has_tiles_of_its_own():
    told, x = [], torch.zeros(1, 1, 4, 8, device=engine.device)
    block = SimpleNamespace(forward=lambda *inputs, tile, **options: told.append(tile) or PlainBlock.forward(*inputs))
    step04.forward(x, x, x, S=4, block=block, tile=(24, 7))
    assert told == [(24, 7)]
    with pytest.raises(ValueError, match="tile"):
        step04.forward(x, x, x, S=4, tile=(24, 7))


@pytest.mark.parametrize("transport", ["relay", FETCH])
@in_every_rank
def test_a_forward_s_kernel_is_not_persistent_where_ranks_share_the_work(transport, monkeypatch):
    pair = group_of((0, 1))
    for group, N in ((dist.group.WORLD, 4), (pair, 2))[: 2 if dist.get_rank() < 2 else 1]:
        assert asked_for(monkeypatch, group=group, S=4 * N, transport=transport) == [False]


@pytest.mark.parametrize("alone", [True, False])
def test_the_default_block_hands_the_switch_to_its_kernel(monkeypatch, alone):
    """The place of a Hopper GPU is taken by a tensor that says it is on one."""
    seen = []
    q = SimpleNamespace(is_cuda=True, device="cuda:0", dtype=torch.bfloat16, shape=(1, 1, 4, 64))
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    chosen = block.default_block(q, alone=alone)
    assert isinstance(chosen, block.Hopper)
    chosen.calls = SimpleNamespace(forward=lambda *tensors, **how: seen.append(how))
    chosen.forward(q, q, q, causal=True, scale=1.0)
    assert seen[0].get("PERSISTENT", 1) == alone and seen[0]["rung"] == "hopper"


@ON_FETCH
@in_every_rank
def test_fetch_asks_for_its_first_copies_before_the_first_block(monkeypatch):
    """The barrier and the copies from the next two ranks then do not stand behind a block's kernel."""
    done, kind = [], side.Side if engine.name == "cuda" else side.HostSide
    copy, barrier = kind.copy, kind.barrier

    def copied(beside, *pairs):
        done.append("own k" if len(pairs) == 2 else "copy")
        copy(beside, *pairs)

    monkeypatch.setattr(kind, "copy", copied)
    monkeypatch.setattr(kind, "barrier", lambda *side: done.append("barrier") or barrier(*side))
    block = SimpleNamespace(forward=lambda *x, **how: done.append("block") or PlainBlock.forward(*x, **how))
    x = torch.ones(1, 1, 4, 8, device=engine.device)
    step04.forward(x, x, x, S=16, transport="fetch", block=block)
    assert done == ["own k", "barrier", "copy", "copy", "block", "block", "copy", "block", "block", "barrier"]


@ON_FETCH
@in_every_rank
def test_in_a_graph_the_first_block_waits_for_the_first_barrier(monkeypatch):
    """A graph would start the block beside the copy before it, and the barrier's kernel would have to wait."""
    done, kind = [], side.Side if engine.name == "cuda" else side.HostSide
    lead, barrier = kind.lead, kind.barrier
    monkeypatch.setattr(kind, "in_a_graph", lambda side: True)
    monkeypatch.setattr(kind, "lead", lambda *side: done.append("wait") or lead(*side))
    monkeypatch.setattr(kind, "barrier", lambda *side: done.append("barrier") or barrier(*side))
    block = SimpleNamespace(forward=lambda *x, **how: done.append("block") or PlainBlock.forward(*x, **how))
    x = torch.ones(1, 1, 4, 8, device=engine.device)
    step04.forward(x, x, x, S=16, transport="fetch", block=block)
    assert done[:3] == ["barrier", "wait", "block"]


@in_every_rank
def test_a_relay_notes_when_the_device_has_passed_each_hop(monkeypatch):
    notes, x = [], torch.ones(1, 1, 4, 8, device=engine.device)
    monkeypatch.setattr(Note, "passed", lambda note: notes.append(note.now))
    step04.forward(x, x, x, S=16, transport="relay", block=PlainBlock)
    assert len(notes) == 1 + 3  # The first note is of the call's beginning.


def test_fetch_has_no_race_and_every_wait_is_needed(monkeypatch):
    kinds = ("zigzag", True), ("striped", False)
    layouts = [Layout(kind, 8 * N + 3, N, causal) for N in (2, 4) for kind, causal in kinds]
    waits = set()
    for layout in layouts:
        found, called = races.run(layout, monkeypatch)
        assert not found, f"{layout}: {found[0]}"
        waits |= called
    assert len(waits) == 8
    for wait in waits:
        assert any(races.run(layout, monkeypatch, without=wait)[0] for layout in layouts), wait


def test_a_rank_that_compares_its_call_names_the_ranks_beside_it(monkeypatch):
    said = []
    comm = SimpleNamespace(rank=1, size=4, group=None)
    comm.explained = lambda text: said.append(text) or contextlib.nullcontext()
    monkeypatch.setattr(dist, "all_gather", lambda everyone, sent, group: [x.copy_(sent) for x in everyone])
    signatures, sizes = go_round(comm, b"16 bytes of mine", 7)
    assert (signatures, sizes) == (4 * (b"16 bytes of mine",), (7, 7, 7, 7))
    assert said == ["comparing its call with those of all ranks, through rank 0 and rank 2"]


def test_a_group_without_processes():
    with pytest.raises(ValueError, match="launch.init"):
        step04.forward(*[torch.zeros(2, 16, device=engine.device)] * 3, group="world")


@in_every_rank
def test_a_rank_outside_the_group():
    group, rank = group_of((1, 3)), dist.get_rank()
    if rank in (0, 2):
        with pytest.raises(ValueError, match=f"rank {rank} is not in the group"):
            step04.forward(*[torch.zeros(2, 16, device=engine.device)] * 3, group=group)


# Failures. Each of these tests starts ranks of its own, because they do not survive it.


def test_a_rank_that_raises_or_hangs_is_named():
    with pytest.raises(launch.RankError, match="rank 1 of 2 failed") as raised:
        launch.spawn(fail, 2, "raise")
    assert "ValueError: on purpose" in str(raised.value) and "Traceback" in str(raised.value)
    with launch.Ranks(2) as ranks:
        assert ranks.run(fail, "not") == ["not", "not"]
        with pytest.raises(launch.RankError, match="rank 1 of 2 failed(.|\n)*no answer within 1 s"):
            ranks.run(fail, "hang", limit=1)


def fail(how):
    if dist.get_rank() == 1 and how == "hang":
        time.sleep(600)
    if dist.get_rank() == 1 and how == "raise":
        raise ValueError("on purpose")
    return how


def test_the_demo_under_torchrun():
    """test_step04_strategies.py calls it without."""
    if engine.name == "cuda" and torch.cuda.device_count() < 2:
        pytest.skip("torchrun gives each rank a GPU of its own")
    torchrun = (sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2")
    command = (*torchrun, "-m", "steps.step04_ring.demo", "--seq", "67", "--dim", "16", "--layout", "striped")
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert "2 ranks over" in done.stdout and "largest differences to one device: out " in done.stdout
    assert ("says nothing about GPUs" in done.stdout) == (engine.name == "cpu")


@pytest.mark.skipif(engine.name == "cuda", reason="the demo then prints what torch's allocator says")
def test_the_memory_of_a_rank_is_what_the_readme_says_for_any_number_of_ranks():
    line = next(line for line in on_ranks(demo.report, 512, 32, 4, False, "zigzag", "float32")[0] if "memory" in line)
    shown = re.search(r"(\S+ MB) a rank beyond its inputs, in the forward; one device: (\S+) MB", line)
    readme = " ".join((FOLDER / "README.md").read_text().split())
    assert f"in a forward {shown[1]} with `--dim 32` and `--seq 512 --gpus 4`, `--seq 1024 --gpus 8`" in readme
    assert float(shown[2]) == round(4 * 512 * 4 * (32 + 1) / 1e6, 3), "out and lse of four heads"
    sizes = dict(B=1, H=4, Hk=4, D=32, e=4)
    held = {strategies.account.memory_bytes("ring", Layout("zigzag", 128 * N, N), 0, **sizes) for N in (4, 8, 16)}
    assert len(held) == 1


def check_messages():
    """What a rank prints that runs the README's check of messages."""
    readme = (FOLDER / "README.md").read_text()
    (program,) = (text for text in re.findall(r"```python\n(.*?)```", readme, re.S) if "hop.py" in text)
    with pytest.MonkeyPatch.context() as patch, contextlib.redirect_stdout(io.StringIO()) as printed:
        patch.setattr(launch, "init", launch.message_device)  # The ranks of the tests have met already,
        patch.setattr(dist, "destroy_process_group", lambda: None)  # and go on.
        exec(program, {})
    return printed.getvalue()


def test_the_readmes_check_of_messages_prints_what_the_rank_before_sent():
    backend, *_ = on_ranks(dist.get_backend)
    assert on_ranks(check_messages) == [f"{rank} {backend} [{(rank - 1) % 4}]\n" for rank in range(4)]


# On several GPUs.


def compare_transports(members=None):
    """What is wrong with either transport beside float64, for sizes that fill tiles and sizes that do not.

    members: of this rank's ring; all ranks, if None.
    """
    members = members or tuple(range(dist.get_world_size()))
    group, N, wrong = group_of(members), len(members), []
    rank = dist.get_rank(group)
    for S, D, heads in ((512 * N, 128, (4, 2)), (237 * N + 1, 64, (2, 2)), (301, 32, (2, 1)), (N - 1, 128, (2, 2))):
        random = torch.Generator().manual_seed(S + members[0])  # other numbers in each ring
        q, k, v, dout = (torch.randn(1, heads[i in (1, 2)], S, D, generator=random).bfloat16() for i in range(4))
        for causal, layout in itertools.product((False, True), LAYOUTS):
            want = error.expected(*(x.to(engine.device) for x in (q, k, v, dout)), causal=causal)
            whole = Layout(layout, S, N)
            mine = [whole.shard(x, rank).to(engine.device) for x in (q, k, v, dout)]
            for transport in ("relay", "fetch"):
                how = dict(causal=causal, layout=layout, S=S, transport=transport)
                got, again = (both_passes(*mine, block=None, group=group, **how) for _ in range(2))
                everyone = [None] * N
                dist.all_gather_object(everyone, [x.cpu() for x in got], group=group)
                full = (whole.unshard(parts, dim=2).to(engine.device) for parts in zip(*everyone, strict=True))
                failures = error.failures(dict(zip(error.NAMES, full, strict=True)), want)
                wrong += [f"{how} {D}: {failure}" for failure in failures.items()]
                if not all(map(torch.equal, got, again)):
                    wrong.append(f"{how} {D}: two runs differ")
    return wrong


def compare_in_pairs():
    """What is wrong when the ranks form two rings of two, which run beside each other, the second one in reverse."""
    pairs = (0, 2), (3, 1)
    for pair in pairs:
        group_of(pair)  # All ranks make a group together.
    return compare_transports(*(pair for pair in pairs if dist.get_rank() in pair))


def replay():
    """[] where a captured forward and backward give what the functions give, on inputs newer than the capture."""
    N, rank = dist.get_world_size(), dist.get_rank()
    shape, options = (1, 4, 256, 128), dict(causal=True, S=256 * N, transport="fetch")
    static = [torch.randn(shape, device=engine.device).bfloat16() for _ in range(4)]

    def both(q, k, v, dout):
        out, lse = step04.forward(q, k, v, **options)
        return out, lse, *step04.backward(dout, q, k, v, out, lse, **options)

    for _ in range(3):  # compiles, and shares memory
        both(*static)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):
        captured = both(*static)
    wrong = []
    for seed in range(3):
        torch.manual_seed(seed * N + rank)
        for x in static:
            x.normal_()
        graph.replay()
        got = [x.clone() for x in captured]
        wrong += [] if all(map(torch.equal, got, both(*static))) else [seed]
    return wrong


@pytest.mark.multigpu
@pytest.mark.parametrize(
    "N, what",
    [*itertools.product((2, 3, 4), (compare_transports, replay)), (4, compare_in_pairs)],
)
def test_on_gpus(N, what):
    if engine.name != "cuda" or torch.cuda.device_count() < N:
        pytest.skip(f"needs {N} GPUs")
    assert launch.spawn(what, N, timeout=120) == [[]] * N


# The default block.


def test_the_stage_imports_triton_and_its_blocks_only_where_they_run():
    files = {*FOLDER.glob("*.py"), *FOLDER.glob("ranks/*.py")}
    for path in files - {Path(demo.__file__), Path(merge_kernels.__file__)}:
        imports = (node for node in ast.parse(path.read_text()).body if isinstance(node, ast.Import | ast.ImportFrom))
        assert not re.search("triton|step0[0-3]", " ".join(map(ast.unparse, imports))), path


def test_the_default_block_adds_in_a_fixed_order(monkeypatch):
    """Also where stage 03 does so only if it is asked to, as on a Hopper GPU."""
    from steps import step03_triton

    q = torch.empty(1, 1, 1, 64)
    monkeypatch.setitem(step03_triton.SUPPORTS, "deterministic", True)
    assert block.default_block(q) is step03_triton
    monkeypatch.setitem(step03_triton.SUPPORTS, "deterministic", False)
    monkeypatch.setattr(step03_triton, "backward", lambda *tensors, **options: options)
    chosen = block.default_block(q)
    assert chosen.forward is step03_triton.forward
    assert chosen.backward(q, causal=True) == {"causal": True, "deterministic": True}


def test_the_default_block_takes_what_the_stage_offers():
    from steps import step03_triton

    for name in ("dtypes", "tiles", "head_dims"):
        assert set(step04.SUPPORTS[name]) <= set(step03_triton.SUPPORTS[name])


def test_shared_memory_that_is_large_enough_is_taken_again():
    beside = object.__new__(side.Side)
    beside.memories, beside.new_memory = {}, lambda nbytes: nbytes
    assert [beside.memory("kv", n) for n in (100, 112, 50, 150, 1000, 100)] == [112, 112, 112, 224, 1008, 112]


HERE = ("boot", "gpu 0", ""), ("boot", "gpu 1", "")  # two ranks as fetch needs them
APART = {  # what the ranks say of themselves: words of the reason against fetch
    "several hosts": (HERE[:1] + (("other boot", "gpu 1", ""),), "several hosts"),
    "one GPU": (HERE[:1] * 2, "the same GPU"),
    "an old torch": (HERE[:1] + (("boot", "gpu 1", "torch 1.0 has no symmetric memory"),), "no symmetric memory"),
    "gloo": (HERE, "the backend is gloo"),
    "none": (HERE, ""),
}


@pytest.mark.parametrize("name", APART)
def test_where_fetch_can_be_used(monkeypatch, name):
    """The place of GPUs and of the other rank is taken by patches."""
    said, words = APART[name]
    group = type("Group", (), {})()
    comm = SimpleNamespace(rank=0, size=2, group=group, through_host=name == "gloo")
    comm.explained = lambda doing: contextlib.nullcontext()
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: SimpleNamespace(uuid="gpu 0"))
    monkeypatch.setattr(side, "_missing", lambda: "")
    monkeypatch.setattr(side, "Side", lambda comm, device: SimpleNamespace(device=device))

    def all_gather_object(everyone, mine, group):
        everyone[:] = said

    monkeypatch.setattr(dist, "all_gather_object", all_gather_object)
    gpu = torch.device("cuda:0")
    assert side.side_of(comm, gpu, "relay") is None
    assert (side.side_of(comm, gpu) is None) == bool(words)  # the default
    if words:
        with pytest.raises(ValueError, match=f"cannot be used here: .*{words}.* Use .relay."):
            side.side_of(comm, gpu, "fetch")
    else:
        assert side.side_of(comm, gpu, "fetch").device == gpu


def test_a_barrier_of_gpus_has_a_time_limit_and_a_channel_of_its_call():
    asked = []
    handle = SimpleNamespace(barrier=lambda channel, timeout_ms: asked.append((channel, timeout_ms)))
    passed = partial(asked.append, "passed")  # what watch.py knows of the device
    note = SimpleNamespace(begin_hop=lambda: 1, passed=passed, number=3, timeout=10.0)
    made = SimpleNamespace(comm=SimpleNamespace(size=4, note=note), stream=None, gates=[SimpleNamespace(handle=handle)])
    made.gate = lambda number: side.Side.gate(made, number)
    side.Side.barrier(made)
    assert asked == [(3, 15_000), "passed"]


def test_memory_first_seen_in_inference_mode_can_be_written_to_afterwards():
    memory = object.__new__(side.SymmetricMemory)
    memory.views, memory.handle = {}, SimpleNamespace(get_buffer=lambda rank, shape, dtype, first: torch.zeros(shape))
    with torch.inference_mode():
        memory.of(0, (2,), torch.float32).fill_(1)
    assert memory.of(0, (2,), torch.float32).fill_(2).tolist() == [2, 2]


def test_multicast_is_off_before_memory_is_shared(monkeypatch):
    import torch.distributed._symmetric_memory as symmetric

    monkeypatch.setenv(side.MULTICAST_OFF, "0")
    seen = []
    monkeypatch.setattr(symmetric, "empty", lambda *a, **k: seen.append(os.environ[side.MULTICAST_OFF]))
    monkeypatch.setattr(symmetric, "rendezvous", lambda *a: None)
    side.SymmetricMemory(16, SimpleNamespace(group_name="g"), torch.device("cpu"))
    assert seen == ["1"]
