"""Stage 04: the contract on 1 to 4 ranks; layouts, merge, agreement of the ranks, failures, the launcher and the demo.

Without a GPU the ranks are processes over gloo. One pool of four serves the whole file; smaller worlds are its groups.
"""

import ast
import functools
import math
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st

import steps.step04_ring as step04
from reference import attention, cases
from steps import engine, step00_naive
from steps.step04_ring import Layout, launch
from steps.step04_ring.layout import LAYOUTS
from steps.step04_ring.merge import merge
from steps.workbook.case_on_ranks import PlainBlock, group_of, outputs
from support.contract_suite import Contract


@functools.cache
def pool():
    return launch.Ranks(4)


@pytest.fixture(scope="module", autouse=True)
def end_of_pool():
    yield
    if pool.cache_info().currsize:
        pool().close()


def on_ranks(worker, *args):
    """The workers' results by rank; the next call gets new ranks if one failed."""
    try:
        return pool().run(worker, *args, limit=120)
    except launch.RankError:
        pool.cache_clear()
        raise


class TestContract(Contract):
    stage = step04

    def out(self, q, k, v, rung):
        return self.results(q, k, v, rung)["out"]

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


# Ranks together.


def test_any_length_on_any_number_of_ranks():
    assert max(on_ranks(compare_with_one_device)) < 5e-6


def compare_with_one_device():
    """The largest difference between the ring and one device in float32.

    Over every world size and layout, with S below, at and above the world size.
    """
    worst = 0.0
    for members in [(0,), (0, 1), (0, 1, 2), (0, 1, 2, 3), (1, 3)]:
        group = group_of(members)
        for S in (1, 2, 4, 13) if dist.get_rank() in members else ():
            random = torch.Generator().manual_seed(S)
            q, k, v, dout = (torch.randn(1, 2, S, 8, generator=random).to(engine.device) for _ in range(4))
            for causal in (False, True):
                out, lse = step00_naive.forward(q, k, v, causal=causal)
                want = out, lse, *step00_naive.backward(dout, q, k, v, out, lse, causal=causal)
                for layout in LAYOUTS:
                    whole, me = Layout(layout, S, len(members)), dist.get_rank(group)
                    options = dict(causal=causal, layout=layout, group=group, S=S, block=step00_naive)
                    mine = [whole.shard(x, me) for x in (q, k, v)]
                    out, lse = step04.forward(*mine, **options)
                    got = out, lse, *step04.backward(whole.shard(dout, me), *mine, out, lse, **options)
                    for x, y in zip(got, want, strict=True):
                        y = whole.shard(y, me, dim=2)
                        assert x.shape == y.shape
                        worst = max(worst, (x - y).abs().max().item() if x.numel() else 0)
    return worst


DISAGREEMENTS = {  # what rank 2 does differently: words of the message that every rank raises
    "dtype": ("the same dtype", "rank 2 torch.float16"),
    "causal": ("the same causal", "rank 2 True"),
    "scale": ("the same scale", "rank 2 0.5"),
    "layout": ("the same layout", "rank 2 striped"),
    "heads": ("the same shape of q", "rank 2 (1, 4, 'n', 16)"),
    "S": ("the same S", "rank 2 12"),
    "length": ("zigzag shards of S = 13", "[3, 3, 3, 4]", "got [3, 3, 4, 3]"),
    "integer": ("int32", "takes float32"),
}


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
        different = {"S": 12, "causal": True, "scale": 0.5, "layout": "striped"}
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
    start = time.monotonic()
    with pytest.raises(launch.RankError, match="rank 2 of 4 failed") as raised:
        launch.spawn(die, 4, timeout=3, limit=60)
    outcomes = raised.value.outcomes
    assert "killed by SIGKILL" in outcomes[2][1]
    if engine.name == "cpu":  # NCCL's watchdog may end the survivors before they can raise
        assert all("RingError" in outcomes[rank][1] for rank in (0, 1, 3))  # every survivor raised ...
        assert all("rank 2" in outcomes[rank][1] for rank in (1, 3))  # ... and rank 2's neighbours name it
    assert time.monotonic() - start < 40


def test_a_rank_that_ends_is_named_with_its_exit_code():
    with pytest.raises(launch.RankError, match="rank 1 of 2 failed") as raised:
        launch.spawn(leave, 2, timeout=3, limit=60)
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
        differences = [words.split() for words in printed.split("largest differences to one device: ")[1].split(",")]
        assert [name for name, _ in differences] == ["out", "lse", "dq", "dk", "dv"]
        assert max(float(x) for _, x in differences) < (1e-5 if engine.name == "cpu" else 5e-2)


# The default block.


def test_the_stage_imports_no_other_stage_and_no_triton_until_it_runs():
    for path in Path(step04.__file__).parent.glob("*.py"):
        if path.name != "demo.py":  # the demo is a command, and may import stages
            for node in ast.parse(path.read_text()).body:  # only the imports that run when the module is imported
                if isinstance(node, ast.Import | ast.ImportFrom):
                    assert not re.search("triton|step0[0-3]", ast.unparse(node)), path


def test_the_default_block_takes_what_the_stage_offers():
    from steps import step03_triton

    for name in ("dtypes", "tiles", "head_dims"):
        assert set(step04.SUPPORTS[name]) <= set(step03_triton.SUPPORTS[name])
