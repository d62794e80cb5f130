"""Stage 03's flash_gluon.py: windows, packed sequences and sinks. What needs no Hopper GPU is shown without one."""

import itertools
import json
import math
import sys
from types import SimpleNamespace

import pytest
import torch
import triton

import steps.step03_triton as step03
from reference import error, feature_cases
from steps import engine
from steps.step03_triton import features
from steps.step03_triton.features import flash, flash_gluon
from support import compile_triton
from support.contract_suite import unwritten_is_nan

on_hopper = pytest.mark.skipif("gluon" not in step03.SUPPORTS["rungs"], reason="needs a Hopper GPU")


@pytest.fixture
def on_integers(monkeypatch):
    """The kernel's functions of numbers, as Python runs them."""
    of_numbers = dict(minimum=min, maximum=max, cdiv=lambda x, y: -(-x // y), where=lambda c, x, y: x if c else y)
    monkeypatch.setattr(flash_gluon, "gl", SimpleNamespace(**vars(flash_gluon.gl) | of_numbers))
    monkeypatch.setattr(flash_gluon, "BILLION", 2**30)


@pytest.mark.parametrize("Br, Bc", [(4, 4), (2, 4), (4, 2), (128, 128)])
def test_every_key_that_is_seen_is_visited_once(on_integers, Br, Bc):
    """And a tile that is visited without a mask is seen wholly by every query that there is."""
    large = [(1, 1), (300, 700), (700, 300), (512, 512), (900, 1025)]
    lengths, window = (itertools.product(range(1, 11), range(11)), range(6)) if Br < 128 else (large, (0, 1, 127, 200))
    for (Nq, Nk), left, right in itertools.product(lengths, *2 * [(*window, flash_gluon.UNLIMITED)]):
        for i in range(0, Nq, Br):
            low, high = i + Nk - Nq - left, i + Nk - Nq + right + 1
            tiles = begin, whole, full, end = flash_gluon.visits.fn(low, high, Nk, Br, Bc)
            order = [flash_gluon.visited.fn(n, tiles) for n in range(end - begin)]
            assert sorted(order) == [*range(begin, end)], "each tile once, and no other"
            last = min(i + Br, Nq) - 1 - i
            seen = range(max(0, low), min(Nk, high + last))
            assert not seen or (begin * Bc <= seen[0] and seen[-1] < end * Bc)
            for n in order[end - begin - (full - whole) :]:
                assert low + last <= n * Bc and (n + 1) * Bc <= min(Nk, high)


def test_a_packed_sequence_ends_where_the_descriptor_does(on_integers):
    """The address of a row is that of the row in the whole tensor, and beyond the sequence no coordinate is valid."""
    x = torch.zeros(1, 500, 3, 64, dtype=torch.float16).transpose(1, 2)
    descriptor = flash_gluon.ragged(x, 64, 64)
    steps = [2 * stride for stride in descriptor.strides]  # bytes
    for start, n, h in ((0, 500, 0), (17, 100, 2), (499, 1, 1), (3, 0, 0)):
        for row in (0, 1, 63, 99, 100, 499, 500, 563):
            where = flash_gluon.coordinates.fn(flash_gluon.Rows(0, h, start, n), row, True)
            exists = all(0 <= c < size for c, size in zip(where, descriptor.shape, strict=True))
            assert exists == (row < n)
            if exists:
                address = sum(c * step for c, step in zip(where, steps, strict=True)) % 2**64  # as hardware counts
                assert address == 2 * (h * x.stride(1) + (start + row) * x.stride(2))
    assert flash_gluon.coordinates.fn(flash_gluon.Rows(5, 2, 0, 9), 3, False) == (5, 2, 3, 0)
    one = torch.zeros(64, dtype=torch.float16).as_strided((1, 1, 1, 64), (1, 1, 1, 1))
    strides = flash_gluon.ragged(one, 64, 64).strides  # The strides of one head and one row may be any.
    assert all(2 * stride % 16 == 0 for stride in strides[:4])


@pytest.fixture
def launched(monkeypatch):
    """The arguments of the kernels that would be launched, by name; there is no GPU that could run them."""
    calls, names = [], flash_gluon.forward_kernel.arg_names

    class Kernel:
        arg_names = names

        def __getitem__(self, grid):
            return lambda *x, **_: calls.append({"programs": grid[0], **dict(zip(names, x, strict=False))})

    monkeypatch.setattr(flash_gluon, "refusal", lambda q: None)
    monkeypatch.setattr(flash_gluon, "forward_kernel", Kernel())
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: SimpleNamespace(multi_processor_count=3))
    return calls


@pytest.mark.skipif(engine.name == "cuda", reason="stands in for a GPU")
def test_what_the_kernel_is_given(launched):
    q, k, v = (torch.randn(1, H, N, 72, dtype=torch.float16) for H, N in ((4, 300), (2, 500), (2, 500)))
    starts = torch.tensor([[0, 0], [10, 200], [190, 450]], dtype=torch.int32).unbind(1)  # not contiguous
    packed = dict(cu_seqlens_q=starts[0], cu_seqlens_k=starts[1], max_seqlen_q=180, max_seqlen_k=250)
    for sinks in (None, torch.zeros(4, dtype=torch.float16)):
        with unwritten_is_nan():
            out, lse = step03.forward(q, k, v, causal=True, scale=0.5, sinks=sinks, **packed)
        found = launched[-1]
        assert found["starts_q"].is_contiguous() and found["starts_k"].is_contiguous()
        assert [found[name].tolist() for name in ("starts_q", "starts_k")] == [[0, 10, 190], [0, 200, 450]]
        numbers = [found[name] for name in ("programs", "H", "group", "Nq", "left", "right", "total", "scale")]
        assert numbers == [3, 4, 2, 180, flash_gluon.UNLIMITED, 0, 300, 0.5]
        assert [found[name] for name in ("tiles", "section", "Nk")] == [2 * 4 * 2, 8, 250], "of the longest sequence"
        assert (out[:, :, 190:] == 0).all() and (lse == -math.inf).all(), "of rows that no sequence has"
        assert [found[name].base.data_ptr() for name in "qkv"] == [x.data_ptr() for x in (q, k, v)]
        assert (found["sinks"] is None) == (sinks is None) and (sinks is None or found["sinks"].dtype == torch.float32)
    far = flash_gluon.UNLIMITED
    seen = (((7, 3), False, (7, 3)), ((7, 3), True, (7, 0)), ((-1, 5), False, (far, 5)), ((4, None), False, (4, far)))
    for window, causal, edges in seen:
        step03.forward(q, k, v, window=window, causal=causal)
        found = launched[-1]
        numbers = [found[name] for name in ("tiles", "left", "right", "Nk", "scale")]
        assert numbers == [4 * 3, *edges, 500, 72**-0.5]
    unaligned = torch.randn(1, 4, 300, 76, dtype=torch.float16)[..., 4:]
    step03.forward(unaligned, k, v, window=(7, 0))
    assert launched[-1]["q"].base.data_ptr() % 16 == 0, "TMA reads a copy"
    count = len(launched)
    for given in ({"check": True}, {}):
        step03.forward(q[0], k[0], v[0], window=(7, 0), **given)
    assert len(launched) == count + 2, "fewer dimensions, and a check of what it is given, change no kernel"


@pytest.mark.skipif(engine.name == "cuda", reason="stands in for a GPU")
def test_tiles_where_many_need_a_mask(launched):
    """At head_dim 64 two consumers are faster there than three."""
    starts, causal, sinks = torch.tensor([0, 4096], dtype=torch.int32), {"causal": True}, {"sinks": torch.zeros(1)}
    packed = dict(cu_seqlens_q=starts, cu_seqlens_k=starts, max_seqlen_q=4096, max_seqlen_k=4096)
    two = {"window": (2000, 0)}, {"window": (9, 5000)} | sinks, packed | causal
    three = packed, sinks, sinks | causal, {"window": (-1, -1)} | sinks
    cases = [(4096, 64, given, 128) for given in two] + [(4096, 64, given, 192) for given in three]
    for N, D, given, rows in (*cases, (4095, 64, sinks | causal, 128), (500, 256, {"window": (7, 0)}, 64)):
        step03.forward(*[torch.zeros(1, 1, N, D, dtype=torch.float16)] * 3, **given)
        found = launched[-1]
        if D == 64:
            assert found["tiles"] == -(-N // rows), given
        assert found["k"].block_shape[-2] == min(rows, 128), given


@pytest.mark.skipif(engine.name == "cuda", reason="stands in for a GPU")
@pytest.mark.parametrize("given", [
    {"window": (-2, 0)}, {"window": 5}, {"sinks": torch.zeros(3)}, {"window": (7, 0), "scale": 0.0},
    dict(cu_seqlens_q=torch.zeros(2), cu_seqlens_k=torch.zeros(2), max_seqlen_q=9, max_seqlen_k=9),
], ids=str)  # fmt: skip
def test_options_with_which_the_kernels_would_read_what_is_not_there(given, launched):
    q = torch.zeros(2, 4, 30, 72, dtype=torch.float16)
    with pytest.raises(ValueError, match="must be|must have shape|B = 1"):
        flash_gluon.forward(q, q, q, **given)
    assert not launched


def whole(given):
    """{name: value} of all options of a call, as the checks give them."""
    own = {"causal": False, "scale": None, "tile": None, "rung": None, "deterministic": False}
    f = own | features.DEFAULTS | given
    return f | {"asked": features.options.asked(f)}


def test_which_calls_take_it(monkeypatch):
    starts = torch.tensor([0, 10, 32], dtype=torch.int32)
    packed = dict(cu_seqlens_q=starts, cu_seqlens_k=starts, max_seqlen_q=22, max_seqlen_k=22)

    def picked(D, keys=32, queries=32, **given):
        q, k = (torch.zeros(1, 2, N, D, dtype=torch.float16) for N in (queries, keys))
        kernel, _ = features.forward_kernel(q, k, whole(given), gradient=True) or (None, None)
        return kernel

    window = {"window": (7, 0)}
    assert picked(128, **window) is flash.forward, "there is no Hopper GPU"
    monkeypatch.setattr(flash_gluon, "refusal", lambda q: None)
    taken = (128, window), (72, window), (256, packed), (128, packed | window), (128, {"sinks": starts})
    for D, given in (*taken, (128, window | {"check": True})):
        assert picked(D, **given) is flash_gluon.forward
    for given in ({"window": (1000, 24)}, {"window": (-1, 0)}, {"window": (1024, 5), "causal": True}, packed):
        assert picked(64, **given) is flash_gluon.forward
    narrow = {"window": (1000, 23)}, {"window": (1023, 5), "causal": True}, {"window": (7, -1), "causal": True}
    for D, given in (*((64, given) for given in narrow), (40, packed)):
        assert picked(D, **given) is flash.forward
    assert picked(128) is picked(128, causal=True) is None, "a rung computes it"
    carried = {"out": torch.zeros(1), "lse": torch.zeros(1)}
    for more in ({"softcap": 2.0}, {"first_query": 3}, {"tile": [128, 64]}, carried, {"keys": 0}):
        assert picked(128, **window, **more) is flash.forward


def check(q, k, v, **given):
    """Compares a call's results, from memory full of NaN, with the reference."""
    with unwritten_is_nan():
        got = dict(zip(("out", "lse"), flash_gluon.forward(q, k, v, **given), strict=True))
    assert not error.failures(got, feature_cases.expected(q, k, v, q, given))


of_lengths = pytest.mark.parametrize("Nq, Nk", [(1, 1), (200, 200), (300, 700), (700, 300)])


@pytest.fixture
def few_programs(monkeypatch):
    """So that each computes several tiles."""
    monkeypatch.setattr(flash_gluon, "programs_for", lambda device, tiles: min(tiles, 3))


def tensors(B, H, Hk, Nq, Nk, D, dtype):
    return (torch.randn(B, h, N, D, device="cuda", dtype=dtype) for h, N in ((H, Nq), (Hk, Nk), (Hk, Nk)))


@pytest.mark.gpu
@on_hopper
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("D", [64, 72, 256])
@of_lengths
def test_windows(few_programs, Nq, Nk, D, dtype):
    q, k, v = tensors(2, 4, 2, Nq, Nk, D, dtype)
    for window, causal in (((0, 0), False), ((100, None), True), ((300, 40), False), ((1, -1), False)):
        check(q, k, v, window=window, causal=causal, scale=0.3)
    check(q, k, v, window=(100, 0), sinks=torch.tensor([-math.inf, 7.0, -2.0, 100.0], device="cuda"))


@pytest.mark.gpu
@on_hopper
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("D", [64, 128, 256])
@pytest.mark.parametrize(
    "of_q, of_k", [((1, 64, 200, 0, 129), (5, 64, 230, 70, 0)), ((128, 256), (256, 128))], ids=["five", "two"]
)
def test_packed(few_programs, of_q, of_k, D, dtype):
    """Sequences of any length, also without queries or keys; behind the last one are rows of none."""
    starts = {"q": [0, *itertools.accumulate(of_q)], "k": [0, *itertools.accumulate(of_k)]}
    given = {f"cu_seqlens_{x}": torch.tensor(n, dtype=torch.int32, device="cuda") for x, n in starts.items()}
    given |= {"max_seqlen_q": max(of_q), "max_seqlen_k": max(of_k)}
    q, k, v = tensors(1, 4, 2, sum(of_q) + 9, sum(of_k) + 30, D, dtype)
    sinks = {"sinks": torch.tensor([-math.inf, 7.0, -2.0, 100.0], device="cuda")}
    for more in ({}, {"causal": True}, {"window": (50, 0)}, {"window": (64, 10)}, sinks):
        check(q, k, v, **given, **more)
    apart = (x.transpose(1, 2).contiguous().transpose(1, 2) for x in (q, k, v))  # (B, N, H, D) in memory
    check(*apart, **given)


@pytest.mark.gpu
@on_hopper
def test_a_sequence_does_not_read_its_neighbours():
    q, k, v = tensors(1, 2, 2, 300, 300, 128, torch.float16)
    starts = torch.tensor([0, 100, 290], dtype=torch.int32, device="cuda")
    given = dict(cu_seqlens_q=starts, cu_seqlens_k=starts, max_seqlen_q=190, max_seqlen_k=190)
    right = flash_gluon.forward(q, k, v, **given)
    for x in (q, k, v):
        x[:, :, 100:] = math.nan
    for x, y, name in zip(flash_gluon.forward(q, k, v, **given), right, ("out", "lse"), strict=True):
        assert torch.equal(x[:, :, :100], y[:, :, :100]) and x[:, :, 100:290].isnan().all()
        assert (x[:, :, 290:] == (0 if name == "out" else -math.inf)).all()


def launches(wanted):
    flash_gluon.refusal = lambda q: None  # it looks for a GPU
    for D, packed in wanted:
        yield dict(D=D, packed=packed), 90
        x, starts = torch.zeros(1, 2, 128, D, dtype=torch.bfloat16), torch.zeros(3, dtype=torch.int32)
        of_packed = dict(cu_seqlens_q=starts, cu_seqlens_k=starts, max_seqlen_q=128, max_seqlen_k=128)
        sinks = torch.zeros(2)
        given = of_packed | ({"sinks": sinks} if D == 256 else {}) if packed else {"window": (7, 0), "sinks": sinks}
        flash_gluon.forward(x, x, x, **given)


SOME = [(64, True), (128, False), (256, True)]  # (head_dim, packed)


@pytest.mark.parametrize("wanted", [SOME, pytest.param([(64, False), (128, True)], marks=pytest.mark.long)], ids=str)
def test_what_it_compiles_to(wanted):
    rows = compile_triton.in_a_process(__file__, wanted)
    rows = [row for row in rows if row["kernel"] == "forward_kernel"]
    assert len(rows) == len(wanted)
    for row in rows:
        assert row["wgmma.mma_async"] > 0 and row["cp.async.bulk.tensor"] > 0 and row["setmaxnreg"] > 0, row
        assert row["shared"] <= 227 * 1024 and not row["serialised"], row
        few = {64: 250 if row["packed"] else 0, 128: 0, 256: 32}[row["D"]]  # bytes; packed has three consumers
        assert row["spilled"] <= few or not triton.__version__.startswith("3.7"), row  # others may spill a few more


if __name__ == "__main__":
    compile_triton.compile_all(launches(json.loads(sys.argv[1])))
