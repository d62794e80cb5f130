"""Stage 04: the contract on 1 to 4 ranks; layouts, merge, agreement of the ranks, failures, the launcher and the demo.

Without a GPU the ranks are processes over gloo. One pool of four serves the whole file; smaller worlds are its groups.
"""

import ast
import contextlib
import errno
import itertools
import math
import os
import re
import signal
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
from reference import attention, cases, error
from steps import engine, step00_naive
from steps.step04_ring import Layout, block, comm, entry, fetch, launch, merge_kernels, relay, side, watch
from steps.step04_ring.agree import go_round
from steps.step04_ring.layout import LAYOUTS
from steps.step04_ring.merge import Parts, add, merge
from steps.workbook.case_on_ranks import PlainBlock, group_of, outputs
from support import races
from support.contract_suite import Contract
from support.ranks import end_of_pool, on_ranks  # noqa: F401  Pytest finds the fixture by its name.

ON_FETCH = pytest.mark.skipif(
    engine.name == "cuda" and torch.cuda.device_count() < 4, reason="fetch needs a GPU for each of the 4 ranks"
)
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


@pytest.mark.parametrize("N", [2, 4, 8])
def test_zigzag_balances_a_causal_mask_and_contiguous_does_not(N):
    def area(rows, keys, causal):
        return (rows.stop - rows.start) * (keys.stop - keys.start) / (2 if causal else 1)

    def areas(kind):
        layout = Layout(kind, 64 * N, N, causal=True)
        rows = [[layout.work(me, (me - step) % N) for step in range(N)] for me in range(N)]
        return [[area(*work) if work else 0 for work in row] for row in rows]

    assert {x for row in areas("zigzag") for x in row} == {64 * 64 / 2}
    work = [sum(row) for row in areas("contiguous")]
    assert sum(work) / N / max(work) == pytest.approx(N / (2 * N - 1))


def test_unknown_layout():
    with pytest.raises(ValueError, match="zigzag, contiguous, striped; got 'ring'"):
        Layout("ring", 8, 2)


# Merge.


def test_merge_of_parts_is_attention_over_all_keys():
    q, k, v = (torch.randn(2, 9, 4, generator=torch.Generator().manual_seed(1)) for _ in range(3))
    want, want_lse = attention.forward(*(x[None] for x in (q, k, v)))
    for order in ([0, 1, 2], [2, 0, 1]):
        out, lse = torch.zeros_like(q), torch.full((2, 9), -math.inf)
        for part in (slice(3 * i, 3 * i + 3) for i in order):
            merge(out, lse, *step00_naive.forward(q, k[:, part], v[:, part]))
        torch.testing.assert_close(out.double(), want[0], rtol=0, atol=1e-6)
        torch.testing.assert_close(lse.double(), want_lse[0], rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize(
    "lse, lse_block, want, want_lse",
    [
        (-math.inf, -math.inf, 1, -math.inf),  # nothing seen on either side: what was there stays
        (-math.inf, 1.0, 2, 1.0),
        (1.0, -math.inf, 1, 1.0),
        (1e4, 1e4, 1.5, 1e4 + math.log(2)),  # exp(1e4) would be inf
        (-1e4, -1e4, 1.5, -1e4 + math.log(2)),
        (1e4, -1e4, 1, 1e4),
        (-1e4, 1e4, 2, 1e4),
    ],
)
def test_merge_at_the_edges(lse, lse_block, want, want_lse):
    out, lse = torch.full((1, 1), 1.0), torch.tensor([lse])
    merge(out, lse, torch.full((1, 1), 2.0), torch.tensor([lse_block]))
    assert out.item() == pytest.approx(want, abs=1e-3)
    assert lse.item() == pytest.approx(want_lse, rel=1e-6)


def some_parts(n, D, dtype=torch.float32):
    """Parts of 2 x 3 heads as four blocks return them; some rows have seen no key, and hold NaN there."""
    random = torch.Generator().manual_seed(n)
    for first, stop in ((0, n), (n // 2, n), (min(1, n - 1), n), (0, n - n // 3), (0, n)):
        out, lse = (torch.randn(2, 3, stop - first, d, generator=random) for d in (D, 1))
        lse = 5 * lse[..., 0]
        lse[0, 0] = -math.inf
        yield slice(first, stop), out.to(dtype), lse


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize("n, D", [(70, 40), (1, 8), (33, 64)])
def test_parts_are_merged_a_few_at_a_time(n, D, dtype):
    q = torch.empty(2, 3, n, D, dtype=dtype)
    want, want_lse = torch.zeros(q.shape), torch.full(q.shape[:3], -math.inf)
    parts = Parts(q)
    for rows, out, lse in some_parts(n, D, dtype):
        merge(want[..., rows, :], want_lse[..., rows], out, lse)
        parts.add(rows, out, lse)
        assert len(parts.parts) <= 4
    got, got_lse = parts.merged()
    assert got.dtype == dtype and torch.equal(got, want.to(dtype)) and torch.equal(got_lse, want_lse)


@pytest.mark.filterwarnings("ignore:divide by zero")  # of the interpreter, at the logarithm of 0
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize("n, D", [(70, 40), (1, 8)])
def test_the_kernels_of_merge(n, D, dtype):
    """Beside the formulas in torch. What a row that saw no key holds is not read."""
    want, want_lse = torch.zeros(2, 3, n, D), torch.full((2, 3, n), -math.inf)
    parts = list(some_parts(n, D, dtype))
    for rows, out, lse in parts:
        merge(want[..., rows, :], want_lse[..., rows], out, lse)
        out[lse == -math.inf] = math.nan
    parts = [tuple(x.to(engine.device) if torch.is_tensor(x) else x for x in part) for part in parts]
    got, got_lse = merge_kernels.merge(parts, want.shape, torch.float32)
    torch.testing.assert_close(got.cpu(), want, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(got_lse.cpu(), want_lse, rtol=1e-6, atol=1e-6)
    sums = [(slice(0, m), torch.randn(2, 3, m, D, device=engine.device).to(dtype)) for m in (n, n // 2, max(1, n - 1))]
    got = merge_kernels.add(sums, torch.empty(2, 3, n, D, device=engine.device))
    assert torch.equal(got.cpu(), add([(rows, x.cpu()) for rows, x in sums], torch.empty(2, 3, n, D)))


# Ranks together.


@pytest.mark.parametrize("transport", ["relay", FETCH])
def test_any_length_on_any_number_of_ranks(transport):
    assert max(on_ranks(compare_with_one_device, transport)) < 5e-6


def compare_with_one_device(transport):
    """The largest difference between the ring and one device in float32; inf where a second run is not bit-equal.

    Over every world size and layout, with S below, at and above the world size, and with one, some and all heads of k.
    """
    worst = 0.0
    for members in [(0,), (0, 1), (0, 1, 2), (0, 1, 2, 3), (1, 3)]:
        group = group_of(members)
        for S, heads in ((1, (2, 1)), (4, (2, 2)), (9, (3, 1)), (13, (4, 2))) if dist.get_rank() in members else ():
            random = torch.Generator().manual_seed(S)
            q, k, v, dout = (torch.randn(1, heads[i in (1, 2)], S, 8, generator=random) for i in range(4))
            for causal in (False, True):
                out, lse = PlainBlock.forward(q, k, v, causal=causal)
                want = out, lse, *PlainBlock.backward(dout, q, k, v, out, lse, causal=causal)
                for layout in LAYOUTS:
                    whole, me = Layout(layout, S, len(members)), dist.get_rank(group)
                    mine = [whole.shard(x, me).to(engine.device) for x in (q, k, v, dout)]
                    options = dict(causal=causal, layout=layout, group=group, S=S, transport=transport)
                    got = both_passes(*mine, **options)
                    again = both_passes(*mine, **options) if S == 13 else got
                    for x, y, z in zip(got, again, want, strict=True):
                        z = whole.shard(z, me, dim=2)
                        assert x.shape == z.shape
                        worst = max(worst, (x.cpu() - z).abs().max().item() if x.numel() else 0)
                        worst = worst if torch.equal(x, y) else math.inf
    return worst


def both_passes(q, k, v, dout, block=PlainBlock, **options):
    """(out, lse, dq, dk, dv), which are those of `attention` too; the inputs have to stay as they are."""
    before = [x.clone() for x in (q, k, v, dout)]
    out, lse = step04.forward(q, k, v, block=block, **options)
    grads = step04.backward(dout, q, k, v, out, lse, block=block, **options)
    leaves = [x.clone().requires_grad_() for x in (q, k, v)]
    step04.attention(*leaves, block=block, **options).backward(dout)
    assert all(torch.equal(x.grad, grad) for x, grad in zip(leaves, grads, strict=True))
    assert all(map(torch.equal, before, (q, k, v, dout))), "an input was overwritten"
    return out, lse, *grads


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
def test_gradients_are_added_in_float32_and_in_order(transport):
    rounded = torch.tensor([259.0, 2 * 259, 3 * 259]).bfloat16().tolist()
    assert rounded[0] != 256
    for rank, (sums, ordered) in enumerate(on_ranks(exact_gradients, transport)):
        assert sums == rounded
        # fetch adds in the order of the ranks, relay in that in which the keys visit them; both add dk and dv alike.
        order = range(4) if transport == "fetch" else [(rank - 1 - step) % 4 for step in range(4)]
        total = torch.zeros(2)
        for giver in order:
            total += torch.tensor([2.0, 3.0]) * ExactInOrder.parts[giver]
        assert ordered[1:] == total.tolist()


def exact_gradients(transport):
    """The first entries of (dq, dk, dv), in bfloat16 of Exact and in float32 of ExactInOrder."""
    found = []
    for dtype, exact in ((torch.bfloat16, Exact), (torch.float32, ExactInOrder)):
        x = torch.full((1, 1, 2, 8), float(dist.get_rank()), dtype=dtype, device=engine.device)
        lse = torch.zeros(1, 1, 2, device=engine.device)
        grads = step04.backward(x, x, x, x, x, lse, block=exact, S=8, layout="contiguous", transport=transport)
        found.append([grad.flatten()[0].item() for grad in grads])
        assert all((grad == grad.flatten()[0]).all() for grad in grads)
    return found


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


def test_a_block_with_its_backward_in_parts():
    assert all(on_ranks(compare_in_parts))


def compare_in_parts():
    random = torch.Generator().manual_seed(dist.get_rank())
    shards = [torch.randn(1, 2, 5, 8, generator=random).to(engine.device) for _ in range(4)]
    for options in (dict(layout=layout, causal=causal) for layout in LAYOUTS for causal in (False, True)):
        InParts.calls = 0
        results = [both_passes(*shards, S=20, block=one, **options) for one in (PlainBlock, InParts)]
        if not all(map(torch.equal, *results)) or InParts.calls != 2:
            return False
    return True


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


@pytest.mark.parametrize("culprits", [(1,), (0, 2), (0, 1, 2, 3)])
@pytest.mark.parametrize("transport", ["relay", FETCH])
def test_a_block_that_raises_ends_the_call_on_every_rank_and_the_next_call_is_right(transport, culprits):
    """Ranks that did not raise name those that did. Where they waited in vain, this pool's minute would pass first."""
    assert on_ranks(go_on_after_an_error, transport, culprits) == [[]] * 4


def go_on_after_an_error(transport, culprits):
    """What was wrong on this rank, in the world and in a group of two. culprits: the group's ranks that raise."""
    wrong = []
    for members in ((0, 1, 2, 3), (1, 3)):
        group, N = group_of(members), len(members)
        if dist.get_rank() not in members:
            continue
        rank, some = dist.get_rank(group), [who for who in culprits if who < N]
        random = torch.Generator().manual_seed(rank)
        q, k, v, dout = (torch.randn(1, 2, 5, 8, generator=random).to(engine.device) for _ in range(4))
        options = dict(S=5 * N, causal=True, group=group, transport=transport)
        want = both_passes(q, k, v, dout, **options)

        def forward(block, q=q, k=k, v=v, options=options):
            return step04.forward(q, k, v, block=block, **options)

        def backward(block, saved=(dout, q, k, v, *want[:2]), options=options):
            return step04.backward(*saved, block=block, **options)

        def autograd(block, q=q, k=k, v=v, dout=dout, options=options):
            step04.attention(*(x.clone().requires_grad_() for x in (q, k, v)), block=block, **options).backward(dout)

        calls = [(forward, *row) for row in FORWARDS]
        calls += [(call, *row) for row in BACKWARDS for call in (backward, autograd)]
        for call, usual, name, n in calls:
            step = N if n == "N" else n
            with pytest.raises((MemoryError, step04.RingError)) as raised:
                call(failing(usual, name, step) if rank in some else usual)
            note = watch.note(group)
            names = [f"rank {who} of {N} raised MemoryError: on purpose in call {note.now[0]}, hop " for who in some]
            told = str(raised.value)
            if rank in some:
                right = raised.type is MemoryError and told == "on purpose"
            else:
                right = raised.type is step04.RingError and all(words in told for words in names)
            if not right:
                wrong.append((members, call.__name__, name, n, repr(raised.value)))
            got = *step04.forward(q, k, v, block=PlainBlock, **options), *backward(PlainBlock)
            if not all(map(torch.equal, got, want)) or note.failure:
                wrong.append((members, call.__name__, name, n, "the next call"))
    return wrong


@pytest.mark.parametrize("transport", ["relay", FETCH])
def test_where_a_block_has_raised_no_stale_number_passes_for_a_gradient(transport):
    """As over NCCL, where the other ranks' hosts do not wait for the end of the call."""
    for rank, found in enumerate(on_ranks(gradients_without_a_part, transport)):
        assert found == ([] if rank == 1 else ["right", "right", "NaN", "NaN"]), (rank, found)


def gradients_without_a_part(transport):
    """Of (out, dq, dk, dv), while rank 1's block raises at its first step: whether each is right, NaN, or neither."""
    random = torch.Generator().manual_seed(dist.get_rank())
    q, k, v, dout = (torch.randn(1, 2, 5, 8, generator=random).to(engine.device) for _ in range(4))
    options = dict(S=20, causal=False, transport=transport)
    both_passes(q, k, v, 2 * dout, **options)  # whose gradients are left in the shared memory
    out, lse = step04.forward(q, k, v, block=PlainBlock, **options)
    want = out, *step04.backward(dout, q, k, v, out, lse, block=PlainBlock, **options)
    both_passes(q, k, v, 2 * dout, **options)
    got = []
    with pytest.MonkeyPatch.context() as patch, contextlib.suppress(MemoryError):
        patch.setattr("steps.step04_ring.comm.Comm.together", lambda comm: contextlib.nullcontext())
        for function, saved in ((step04.forward, (q, k, v)), (step04.backward, (dout, q, k, v, out, lse))):
            block = failing(PlainBlock, function.__name__, 1) if dist.get_rank() == 1 else PlainBlock
            with contextlib.suppress(MemoryError):
                got += function(*saved, block=block, **options)
    kinds = {(True, False): "right", (False, True): "NaN"}
    got = [x for i, x in enumerate(got) if i != 1]  # without lse
    return [
        kinds.get((torch.equal(x, y), bool(x.isnan().any() and (x.isnan() | (x == y)).all())), "neither")
        for x, y in zip(got, want, strict=False)
    ]


@pytest.mark.skipif(engine.name == "cuda", reason="takes the place of NCCL")
def test_over_nccl_every_other_rank_prints_what_a_block_raised():
    line = "rank 1 of 4 raised MemoryError: on purpose in call {}, hop 2"
    for rank, (call, lines) in enumerate(on_ranks(hear_of_a_failure)):
        assert lines == ([] if rank == 1 else [line.format(call)])


def hear_of_a_failure():
    """(the call that rank 1 failed in, what this process has printed). Here over gloo, but as over NCCL."""
    note, printed = watch.note(dist.group.WORLD), []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(watch, "print_line", printed.append)
        patch.setattr(note, "on_device", True)
        patch.setattr(note, "now", (note.now[0], 2, {}))
        dist.barrier()
        if dist.get_rank() == 1:
            note.failed(MemoryError("on purpose\nand more"))
        while not printed and dist.get_rank() != 1:
            time.sleep(0.01)
        dist.barrier()
        time.sleep(2 * watch.PERIOD)  # It is not printed again.
        note.failure = ""
        dist.barrier()
    return note.now[0], printed


def test_a_file_that_finds_no_memory_is_an_error_on_every_rank():
    words = "rank 1 has no room for 64 bytes in .*: No space left on device. .*--shm-size.*relay"
    assert all(re.search(words, message) for message in on_ranks(share_too_much))


def share_too_much():
    def full(file, first, size):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with pytest.MonkeyPatch.context() as patch:
        if dist.get_rank() == 1:
            patch.setattr(os, "posix_fallocate", full, raising=False)
        with pytest.raises(OSError) as raised:
            side.SharedFiles(64, comm.Comm())
    side.SharedFiles(64, comm.Comm())
    return str(raised.value)


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


@pytest.mark.parametrize("N", [1, 2, 4])
def test_a_forward_s_kernel_is_persistent_only_where_no_other_rank_shares_the_work(N):
    if N == 1:
        assert asked_for(None) == [True]
    for transport in ("relay", "fetch") if N > 1 and engine.name == "cpu" else ():
        found = on_ranks(asked_for, transport, tuple(range(N)))
        assert found == [[False]] * N + [[]] * (4 - N), transport
    assert block.Hopper(True).switches == {} and block.Hopper(False).switches == {"PERSISTENT": 0}
    assert block.Hopper().deterministic


def asked_for(transport, members=()):
    """What default_block is told of the GPU in a forward: [alone]."""
    told, group = [], group_of(members) if members else None
    if members and dist.get_rank() not in members:
        return told
    x = torch.zeros(1, 1, 4, 8, device=engine.device)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(entry, "default_block", lambda q, tile, alone: told.append(alone) or PlainBlock)
        patch.setattr(entry, "_kept", {})
        step04.forward(x, x, x, group=group, S=4 * max(1, len(members)), transport=transport)
    return told


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


def test_fetch_asks_for_its_first_copies_before_the_first_block():
    """The barrier and the copies from the next two ranks then do not stand behind a block's kernel."""
    if engine.name == "cuda" and torch.cuda.device_count() < 4:
        pytest.skip("needs 4 GPUs")
    order = ["own k", "barrier", "copy", "copy", "block", "block", "copy", "block", "block", "barrier"]
    assert on_ranks(order_of_a_forward) == [order] * 4


def order_of_a_forward():
    done, kind = [], side.Side if engine.name == "cuda" else side.HostSide
    copy, barrier = kind.copy, kind.barrier

    def copied(beside, *pairs):
        done.append("own k" if len(pairs) == 2 else "copy")
        copy(beside, *pairs)

    def waited(beside, memory):
        done.append("barrier")
        barrier(beside, memory)

    def computed(*tensors, **options):
        done.append("block")
        return PlainBlock.forward(*tensors, **options)

    x = torch.ones(1, 1, 4, 8, device=engine.device)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(kind, "copy", copied)
        patch.setattr(kind, "barrier", waited)
        step04.forward(x, x, x, S=16, transport="fetch", block=SimpleNamespace(forward=computed))
    return done


def test_a_relay_notes_when_the_device_has_passed_each_hop():
    assert on_ranks(notes_of_a_forward) == [1 + 3] * 4  # The first note is of the call's beginning.


def notes_of_a_forward():
    """How often the relay's forward notes where the device is."""
    notes, x = [], torch.ones(1, 1, 4, 8, device=engine.device)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(watch.Note, "passed", lambda note: notes.append(note.now))
        step04.forward(x, x, x, S=16, transport="relay", block=PlainBlock)
    return len(notes)


# Mistakes in the transports, which the tests above must notice.


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


def slot_of_the_wrong_owner(trip, owner, giver, keys, right=fetch.Trip.slot):
    if owner != trip.fetch.rank:
        owner = next(rank % trip.fetch.size for rank in (owner + 1, owner + 2) if rank % trip.fetch.size != giver)
    return right(trip, owner, giver, keys)


def swapped_gradients(trip, src, keys, dk, dv, right=fetch.Trip.give):
    right(trip, src, keys, dv, dk)


def one_buffer(trip, src, buffer, right=fetch.Trip.start):
    trip.only = getattr(trip, "only", buffer)
    right(trip, src, trip.only)


def lost_gradients(trip, src, keys, dk, dv):
    trip.given = [(keys, dk, dv)] if src == trip.relay.comm.rank else []


def rounded_on_the_way(parts, out, right=relay.add):
    return out.copy_(right(parts, out.bfloat16()))


MISTAKES = [  # (the transport, what is replaced, by what)
    ("fetch", "steps.step04_ring.fetch.Trip.slot", slot_of_the_wrong_owner),
    ("fetch", "steps.step04_ring.fetch.Trip.give", swapped_gradients),
    ("fetch", "steps.step04_ring.fetch.Trip.start", one_buffer),
    ("relay", "steps.step04_ring.relay.Return.give", lost_gradients),
    ("relay", "steps.step04_ring.relay.add", rounded_on_the_way),
]


@pytest.mark.parametrize(
    "transport, place, mistake",
    [pytest.param(*row, id=row[2].__name__, marks=[ON_FETCH] if row[0] == "fetch" else []) for row in MISTAKES],
)
def test_a_mistake_in_a_transport_would_be_noticed(transport, place, mistake):
    assert max(on_ranks(largest_error, transport)) < 5e-6
    assert max(on_ranks(largest_error, transport, place, mistake)) > 1e-3


def largest_error(transport, place=None, mistake=None):
    """The ring's largest difference to one device, for one call forward and backward, with a part of it replaced."""
    q, k, v, dout = torch.randn(4, 1, 2, 13, 8, generator=torch.Generator().manual_seed(1))
    out, lse = PlainBlock.forward(q, k, v)
    want = out, lse, *PlainBlock.backward(dout, q, k, v, out, lse)
    whole, me = Layout("zigzag", 13, 4), dist.get_rank()
    q, k, v, dout = (whole.shard(x, me).to(engine.device) for x in (q, k, v, dout))
    options = dict(S=13, block=PlainBlock, transport=transport)
    with pytest.MonkeyPatch.context() as patch:
        if place:
            patch.setattr(place, mistake)
        out, lse = step04.forward(q, k, v, **options)
        got = out, lse, *step04.backward(dout, q, k, v, out, lse, **options)
    differences = [(x.cpu() - whole.shard(y, me, dim=2)).abs().max().item() for x, y in zip(got, want, strict=True)]
    return max(math.inf if math.isnan(x) else x for x in differences)


DISAGREEMENTS = {  # what rank 2 does differently: words of the message that every rank raises
    "dtype": ("the same dtype", "rank 2 torch.float16"),
    "causal": ("the same causal", "rank 2 True"),
    "scale": ("the same scale", "rank 2 0.5"),
    "layout": ("the same layout", "rank 2 striped"),
    "heads": ("the same shape of q", "rank 2 (1, 4, 'n', 16)"),
    "S": ("the same S", "rank 2 12"),
    "transport": ("the same transport", "rank 2 fetch"),
    "length": ("zigzag shards of S = 13", "[3, 3, 3, 4]", "got [3, 3, 4, 3]"),
    "integer": ("int32", "takes float32"),
}


def test_a_rank_that_compares_its_call_names_the_ranks_beside_it(monkeypatch):
    said = []
    comm = SimpleNamespace(rank=1, size=4, group=None)
    comm.explained = lambda text: said.append(text) or contextlib.nullcontext()
    monkeypatch.setattr(dist, "all_gather", lambda everyone, sent, group: [x.copy_(sent) for x in everyone])
    signatures, sizes = go_round(comm, b"16 bytes of mine", 7)
    assert (signatures, sizes) == (4 * (b"16 bytes of mine",), (7, 7, 7, 7))
    assert said == ["comparing its call with those of all ranks, through rank 0 and rank 2"]


def test_ranks_that_disagree_all_raise():
    messages = on_ranks(disagree)
    for name, words in DISAGREEMENTS.items():
        raised = [rank[name] for rank in messages]
        assert all(word in message for word in words for message in raised), raised
        assert len(set(raised)) == 1 or name == "integer"
    assert "rank 2 of the ring was given what it does not take. TypeError" in messages[0]["integer"]


def disagree():
    """{what rank 2 does differently: the message that this rank raised}; a correct call must work afterwards."""
    messages, other = {}, dist.get_rank() == 2
    for name in DISAGREEMENTS:
        n = (4 if other else 3) if name == "length" else 3
        x = torch.zeros(1, 4 if other and name == "heads" else 2, n, 16, device=engine.device)
        different = {"S": 12, "causal": True, "scale": 0.5, "layout": "striped", "transport": "fetch"}
        options = {name: different[name]} if other and name in different else {}
        if other and name == "dtype":
            x = x.half()
        if other and name == "integer":
            x = x.int()
        with pytest.raises((ValueError, TypeError)) as raised:
            step04.forward(x, x, x, block=step00_naive, **options)
        messages[name] = str(raised.value)
    x = torch.zeros(1, 2, 3, 16, device=engine.device)
    step04.forward(x, x, x, block=step00_naive)
    return messages


def test_a_rank_outside_the_group_and_a_group_without_processes():
    messages = on_ranks(call_from_outside)
    assert messages[1] is None and "rank 0 is not in the group" in messages[0]
    with pytest.raises(ValueError, match="launch.init"):
        step04.forward(*[torch.zeros(2, 16, device=engine.device)] * 3, group="world")


def call_from_outside():
    group = group_of((1, 3))
    if dist.get_rank() in (1, 3):
        return None
    with pytest.raises(ValueError) as raised:
        step04.forward(*[torch.zeros(2, 16, device=engine.device)] * 3, group=group)
    return str(raised.value)


# Failures. Each of these tests starts ranks of its own, because they do not survive it.


def test_a_rank_that_dies_is_named():
    timeout = 3 if engine.name == "cpu" else 15  # within which the ranks also have to start
    with pytest.raises(launch.RankError, match="rank 2 of 4 failed") as raised:
        launch.spawn(die, 4, timeout=timeout, limit=60)
    outcomes = raised.value.outcomes
    assert "killed by SIGKILL" in outcomes[2][1]
    if engine.name == "cpu":  # NCCL's watchdog may end the survivors before they can raise
        assert all("RingError" in outcomes[rank][1] for rank in (0, 1, 3))  # every survivor raised ...
        assert all("rank 2" in outcomes[rank][1] for rank in (1, 3))  # ... and rank 2's neighbours name it


def test_a_rank_that_ends_is_named_with_its_exit_code():
    with pytest.raises(launch.RankError, match="rank 1 of 2 failed") as raised:
        launch.spawn(leave, 2, timeout=3 if engine.name == "cpu" else 15, limit=60)
    assert raised.value.outcomes[1][1] == "died: exit code 3"


def leave():
    if dist.get_rank() == 1:
        os._exit(3)


def die():
    x = torch.zeros(1, 1, 3, 16, device=engine.device)
    step04.forward(x, x, x, S=12, block=step00_naive)
    if dist.get_rank() == 2:
        os.kill(os.getpid(), signal.SIGKILL)
    step04.forward(x, x, x, S=12, block=step00_naive)


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


GOOD = {"RANK": "0", "WORLD_SIZE": "2", "LOCAL_RANK": "0", "MASTER_ADDR": "localhost", "MASTER_PORT": "29500"}


@pytest.mark.parametrize(
    "change, words",
    [
        ({"RANK": None}, ("RANK not set", "torchrun --standalone")),
        ({"RANK": None, "MASTER_ADDR": None}, ("RANK, MASTER_ADDR not set",)),
        ({"RANK": "two"}, ("RANK must be an integer from 0 to 1", "'two'", "torchrun --standalone")),
        ({"RANK": "2"}, ("RANK must be an integer from 0 to 1", "'2'")),
        ({"RANK": "-1"}, ("RANK must be an integer from 0 to 1", "'-1'")),
        ({"WORLD_SIZE": "0"}, ("WORLD_SIZE must be an integer of at least 1",)),
        ({"LOCAL_RANK": "-2"}, ("LOCAL_RANK must be an integer",)),
        ({"MASTER_PORT": "http"}, ("MASTER_PORT must be an integer from 1 to 65535", "'http'")),
        ({"MASTER_PORT": "65536"}, ("MASTER_PORT must be an integer from 1 to 65535",)),
    ],
)
def test_environment_of_init(monkeypatch, change, words):
    for name, value in (GOOD | change).items():
        monkeypatch.delenv(name, raising=False) if value is None else monkeypatch.setenv(name, value)
    with pytest.raises((RuntimeError, ValueError)) as raised:
        launch.init()
    assert all(word in str(raised.value) for word in words) and "\n" not in str(raised.value)


# Commands.

DEMO = ("-m", "steps.step04_ring.demo", "--seq", "67", "--dim", "16", "--causal")


def test_demo():
    """Under torchrun and with its own ranks, both at once."""
    torchrun = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", *DEMO)
    commands = [(*DEMO, "--gpus", "2", "--layout", "striped")]
    if engine.name == "cpu" or torch.cuda.device_count() >= 2:  # torchrun gives each rank a GPU of its own
        commands.append(torchrun)
    pipes = dict(stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    for process in [subprocess.Popen([sys.executable, *command], **pipes) for command in commands]:
        printed, errors = process.communicate(timeout=120)
        assert process.returncode == 0, errors
        for words in ("one device", "ring", "speed-up", "2 ranks over"):
            assert words in printed
        assert ("below 1 x is expected" in printed) == (engine.name == "cpu")
        differences = [words.split() for words in printed.split("largest differences to one device: ")[1].split(",")]
        assert [name for name, _ in differences] == ["out", "lse", "dq", "dk", "dv"]
        assert max(float(x) for _, x in differences) < (1e-5 if engine.name == "cpu" else 5e-2)


# On several GPUs.


@pytest.mark.multigpu
@pytest.mark.parametrize("N", [2, 4])
def test_transports_on_gpus(N):
    if engine.name != "cuda" or torch.cuda.device_count() < N:
        pytest.skip(f"needs {N} GPUs")
    for found in launch.spawn(compare_transports, N, timeout=120):
        assert found == []


def compare_transports():
    """What is wrong with either transport beside float64, for sizes that fill tiles and sizes that do not."""
    wrong, N = [], dist.get_world_size()
    for S, D, heads in ((512 * N, 128, (4, 2)), (237 * N + 1, 64, (2, 2)), (301, 32, (2, 1)), (N - 1, 128, (2, 2))):
        random = torch.Generator().manual_seed(S)
        q, k, v, dout = (torch.randn(1, heads[i in (1, 2)], S, D, generator=random).bfloat16() for i in range(4))
        for causal in (False, True):
            want = error.expected(*(x.to(engine.device) for x in (q, k, v, dout)), causal=causal)
            for layout in LAYOUTS:
                whole = Layout(layout, S, N)
                mine = [whole.shard(x, dist.get_rank()).to(engine.device) for x in (q, k, v, dout)]
                for transport in ("relay", "fetch"):
                    how = dict(causal=causal, layout=layout, S=S, transport=transport)
                    got, again = (both_passes(*mine, block=None, **how) for _ in range(2))
                    shards = [[torch.empty_like(x)] * 0 for x in got]
                    for x, parts in zip(got, shards, strict=True):
                        for rank in range(N):
                            shape = *x.shape[:2], whole.size(rank), *x.shape[3:]
                            part = x.contiguous() if rank == dist.get_rank() else x.new_empty(shape)
                            dist.broadcast(part, rank)
                            parts.append(part)
                    full = [whole.unshard(parts, dim=2) for parts in shards]
                    named = dict(zip(error.NAMES, full, strict=True))
                    wrong += [f"{how} {D}: {failure}" for failure in error.failures(named, want).items()]
                    if not all(map(torch.equal, got, again)):
                        wrong.append(f"{how} {D}: two runs differ")
    return wrong


@pytest.mark.multigpu
@pytest.mark.parametrize("N", [2, 4])
def test_a_cuda_graph_is_replayed_with_new_inputs(N):
    if engine.name != "cuda" or torch.cuda.device_count() < N:
        pytest.skip(f"needs {N} GPUs")
    assert launch.spawn(replay, N, timeout=120) == [True] * N


def replay():
    """Whether a captured forward and backward give what the functions give, on inputs that came after the capture."""
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
    same = True
    for seed in range(3):
        torch.manual_seed(seed * N + rank)
        for x in static:
            x.normal_()
        graph.replay()
        got = [x.clone() for x in captured]
        same = same and all(map(torch.equal, got, both(*static)))
    return same


# The default block.


def test_the_stage_imports_no_other_stage_and_no_triton_until_it_runs():
    for path in Path(step04.__file__).parent.glob("*.py"):
        # The demo is a command, and may import stages; merge_kernels.py is imported where there is a GPU.
        if path.name not in ("demo.py", "merge_kernels.py"):
            for node in ast.parse(path.read_text()).body:  # only the imports that run when the module is imported
                if isinstance(node, ast.Import | ast.ImportFrom):
                    assert not re.search("triton|step0[0-3]", ast.unparse(node)), path


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
    side.Side.barrier(made, None)
    assert asked == [(3, 15_000), "passed"]


def test_multicast_is_off_before_memory_is_shared(monkeypatch):
    import torch.distributed._symmetric_memory as symmetric

    monkeypatch.setenv(side.MULTICAST_OFF, "0")
    seen = []
    monkeypatch.setattr(symmetric, "empty", lambda *a, **k: seen.append(os.environ[side.MULTICAST_OFF]))
    monkeypatch.setattr(symmetric, "rendezvous", lambda *a: None)
    side.SymmetricMemory(16, SimpleNamespace(group_name="g"), torch.device("cpu"))
    assert seen == ["1"]
