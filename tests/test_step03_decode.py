"""Stage 03's decode.py: few queries against a long cache, with keys in splits, compared with float64."""

import functools
import json
import math
import sys

import pytest
import torch

import steps.step03_triton as step03
from reference import cases, error, feature_cases
from steps import engine
from steps.step03_triton.features import decode
from steps.step03_triton.replay import Recording
from support import compile_triton
from support.contract_suite import unwritten_is_nan
from support.contracting_interpreter import interpreter  # noqa: F401  Pytest finds the fixture by its name.
from support.operands import PLACES

DTYPES = torch.float32, torch.float16, torch.bfloat16
SMALL = (16, 16, 4, 2)  # a tile with few keys, so that short inputs have many
SUPPORTS = {"stage": "decode", "dtypes": DTYPES, "head_dims": range(1, 257), "tiles": ((16, 16), (16, 32), (32, 16)),
            "gqa": True, "nq_ne_nk": True}  # fmt: skip


@pytest.fixture
def small_tiles(monkeypatch):
    monkeypatch.setattr(decode, "TILES", {size: dict.fromkeys((64, 128, 256), SMALL) for size in (2, 4)})


def random(*shape, seed, dtype=torch.float32, place="heads inside"):
    """Random numbers, surrounded by NaN. Like most caches it lies in memory as (B, N, H, D), unless `place` differs."""
    x = torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(engine.device, dtype)
    return cases.surround_with_nan(x, place)


def inputs(B=1, H=2, Hk=1, Nq=1, Nk=83, D=24, **options):
    q = random(B, H, Nq, D, seed=1, **options)
    return q, *(random(B, Hk, Nk, D, seed=seed, **options) for seed in (2, 3))


Z = functools.partial(torch.zeros, device=engine.device)


def int32(*numbers):
    return torch.tensor(numbers, dtype=torch.int32, device=engine.device)


def run(q, k, v, **options):
    """{"out", "lse"} of decode, whose memory is full of NaN until it is written."""
    with unwritten_is_nan():
        out, lse = decode.forward(q, k, v, **options)
    assert out.dtype == q.dtype and lse.dtype == torch.float32
    return {"out": out, "lse": lse}


def check(q, k, v, splits=None, **options):
    got = run(q, k, v, splits=splits, **options)
    bad = error.failures(got, error.expected(q, k, v, q, **options))
    assert not bad, bad
    return got


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("splits", [1, 2, 3, 7, None], ids=str)
@pytest.mark.parametrize("sinks", [None, (1.5, -0.75)], ids=str)
def test_every_number_of_splits(sinks, splits, dtype, small_tiles):
    """No key, one key, exactly one tile and all keys. There are fewer tiles than splits, as many, and more."""
    x = inputs(B=4, Nq=2, Nk=53, dtype=dtype)
    options = {} if sinks is None else {"sinks": torch.tensor(sinks, dtype=dtype, device=engine.device)}
    check(*x, splits=splits, causal=True, lengths_k=int32(0, 1, 16, 53), **options)


FEATURES = {
    "left": {"window": (19, -1)}, "both": {"window": (33, 4)}, "right": {"window": (-1, 5)},
    "none": {"window": (500, -1)}, "softcap": {"softcap": 1.5}, "softcap, left": {"softcap": 0.7, "window": (20, 0)},
    "alibi": {"alibi_slopes": "(H,)"},
    "alibi, softcap": {"alibi_slopes": "(B, H)", "softcap": 3.0},
    "all": {"alibi_slopes": "(B, H)", "softcap": 3.0, "window": (40, 2), "sinks": "(H,)"},
}  # fmt: skip


@pytest.mark.parametrize("dtype, splits", [*zip(DTYPES, (3, None, 1), strict=True)], ids=str)
@pytest.mark.parametrize("name", FEATURES)
def test_features_of_a_cache(name, dtype, splits, small_tiles):
    """With a causal mask and without, where a sequence is empty, shorter than the queries, and as long as the cache."""
    shapes, options = {"(H,)": (4,), "(B, H)": (4, 4)}, {"causal": splits == 3, "lengths_k": int32(0, 2, 61, 83)}
    for feature, x in FEATURES[name].items():
        options[feature] = feature_cases.random(*shapes[x], seed=4).to(engine.device) if isinstance(x, str) else x
    check(*inputs(B=4, H=4, Hk=2, Nq=3, dtype=dtype), splits=splits, **options)


def test_a_window_reads_its_own_keys_only(small_tiles):
    """NaN before the window of the first query does not matter, nor does it cost time: the splits divide the window."""
    q, k, v = inputs(Nq=2, Nk=300)
    want = run(q, k, v, window=(30, 0), splits=2)
    for x in (k, v):
        x[:, :, : 300 - 2 - 30] = math.nan
    got = run(q, k, v, window=(30, 0), splits=2)
    assert all(torch.equal(got[name], want[name]) for name in want)


def test_a_sink_of_minus_infinity_is_none(small_tiles):
    """Also where there is no key. The other head's sink is one more key of value 0, far above all scores."""
    x, options = inputs(B=2, Nq=2), {"lengths_k": int32(0, 70), "splits": 3}
    sinks = torch.tensor([-math.inf, 1e4], device=engine.device)
    got, without = check(*x, sinks=sinks, **options), run(*x, **options)
    for name in got:  # With sinks the scores have another unit, and so are rounded otherwise.
        torch.testing.assert_close(got[name][:, 0], without[name][:, 0], rtol=1e-5, atol=1e-6)
    assert (got["out"][:, 1] == 0).all()


@pytest.mark.parametrize("splits", [1, 3])
@pytest.mark.parametrize("scale, dtype", [
    (None, torch.float32), (2e-38, torch.bfloat16), (1e-36, torch.float32), (1e30, torch.bfloat16),
], ids=str)  # fmt: skip
def test_sinks_up_to_the_ends_of_float32(scale, dtype, splits, small_tiles):
    """Divided by the scale they would leave it. Each is that of a head."""
    ends = 2.3e38, 2.37e38, 3.39e38, -3.39e38, 1e38, -1e38, 10.0, -10.0, -math.inf
    x, sinks = inputs(B=3, H=len(ends), Nk=40), torch.tensor(ends, device=engine.device).to(dtype)
    options = {"sinks": sinks, "scale": scale, "splits": splits}
    check(*x, **options)
    got = check(*x, lengths_k=int32(0, 1, 40), **options)
    assert torch.equal(got["lse"][0, :, 0], sinks.float()), "the first sequence has no key"


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_the_tables_own_tiles(dtype):
    check(*inputs(H=4, Nk=333, D=40, dtype=dtype), splits=2)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("Nq, group, splits", [(1, 1, 3), (3, 1, 3), (1, 4, 3), (4, 4, 3), (5, 4, 1), (9, 4, 2)])
def test_queries_and_groups(Nq, group, splits, causal, small_tiles):
    """`group` heads times Nq queries are a part of a tile, exactly one, one and a part of another, and three."""
    sinks = {"sinks": feature_cases.random(2 * group, seed=4).to(engine.device)} if causal else {}
    check(*inputs(H=2 * group, Hk=2, Nq=Nq, Nk=50), splits=splits, causal=causal, lengths_k=int32(41), **sinks)


@pytest.mark.parametrize("length", [0, 1, 15, 16, 17, 31, 32, 33, 48, 82, 83])
def test_lengths_around_the_tiles(length, small_tiles):
    """In the second entry the queries see as many keys as exist, in the first one fewer than there are queries."""
    check(*inputs(B=2, Nq=4), splits=4, causal=True, lengths_k=int32(3, length))


CASES = [
    pytest.param(case, dtype, id=f"{case.name}-{str(dtype).removeprefix('torch.')}")
    for case, dtype, _ in cases.select(SUPPORTS, engine.name == "cuda")
    if not case.gpu or engine.name == "cuda"
]


@pytest.mark.parametrize("case, dtype", CASES)
def test_the_cases_of_the_contract(case, dtype, small_tiles):
    """With their first queries only, because the merge of each query takes the interpreter some milliseconds."""
    x = cases.build(case, SUPPORTS, dtype, engine.device)
    check(x.q[:, :, :7], x.k, x.v, causal=x.causal, scale=x.scale, splits=3)


@pytest.mark.parametrize("D", [1, 16, 33, 100])
@pytest.mark.parametrize("place", ["contiguous", "heads inside", "offset"])
def test_layouts_and_head_dims(place, D, small_tiles):
    dtype = DTYPES[D % 2]
    check(*inputs(B=2, H=2, Hk=2, Nq=2, Nk=20, D=D, place=place, dtype=dtype), causal=True, lengths_k=int32(20, 9))


@pytest.mark.parametrize("dtype, poison", [*zip(DTYPES, (math.nan, math.inf, math.nan), strict=True)], ids=str)
def test_what_lies_behind_the_lengths_does_not_matter(poison, dtype, small_tiles):
    q, k, v = inputs(B=3, Nq=2, dtype=dtype)
    options = {"lengths_k": int32(21, 0, 64), "causal": True, "splits": 3}
    behind = (torch.arange(k.shape[2], device=k.device) >= options["lengths_k"][:, None])[:, None, :, None]
    for x in (k, v):
        x.masked_fill_(behind, 0)
    clean = check(q, k, v, **options)
    for x in (k, v):
        x.masked_fill_(behind, poison)
    poisoned = run(q, k, v, **options)
    assert all(torch.equal(clean[name], poisoned[name]) for name in clean)


def test_a_length_beyond_the_cache_is_the_cache(small_tiles):
    """Nothing behind k and v is read, which is NaN here. The causal mask is aligned at the last key that exists."""
    x = inputs(Nq=2, Nk=33, place="contiguous")
    want = check(*x, causal=True, splits=2)
    got = run(*x, causal=True, splits=2, lengths_k=int32(40))
    assert all(torch.equal(got[name], want[name]) for name in want)


def test_a_short_sequence_in_a_long_cache_is_divided_evenly(small_tiles, monkeypatch):
    """Four tiles of keys for four splits: in each of them every query meets keys, and no split has more than a tile."""
    sums, launch = [], Recording.launch

    def noted(self, kernel, programs, *arguments, **options):
        if kernel is decode.combine_kernel:
            sums.append(arguments[0].l)
        launch(self, kernel, programs, *arguments, **options)

    monkeypatch.setattr(Recording, "launch", noted)
    q, k, v = inputs(B=2, Nq=2, Nk=300)
    run(q * 0, k, v, splits=4, lengths_k=int32(64, 300))  # All scores are 0, so l counts the keys.
    assert (sums[0][0] == 16).all()
    assert (sums[0][1] == torch.tensor([80, 80, 80, 60], device=engine.device)).all()


def test_splits_of_equal_huge_scores_are_weighted_by_their_keys(small_tiles):
    """Scores of 4 million, in which float32 has no room for log l_s. Here l_s is 16, 16 and 5."""
    q, k, v = inputs(Nk=37)
    q.fill_(1)
    k.fill_(4e6 / 24**0.5)
    got = run(q, k, v, splits=3)
    torch.testing.assert_close(got["out"], v.mean(2, keepdim=True).expand_as(q))
    torch.testing.assert_close(got["lse"], torch.full_like(got["lse"], 4e6 + math.log(37)))


@pytest.mark.filterwarnings("ignore:All-NaN slice:RuntimeWarning")
def test_a_nan_stays_where_it_is(small_tiles):
    q, k, v = inputs(B=2, H=4, Hk=2, Nq=3)
    clean = run(q, k, v)["out"]
    q[1, 2, 1, 5] = math.nan
    out = run(q, k, v)["out"]
    assert out[1, 2, 1].isnan().all()
    out[1, 2, 1] = clean[1, 2, 1]
    assert torch.equal(out, clean)
    q[1, 2, 1, 5], v[0, 1, 40, 3], k[1, 0, 70, 2] = 0, math.nan, math.nan
    seen = run(q, k, v)["out"].isnan().any(-1)
    assert seen[0, 2:].all() and seen[1, :2].all() and seen.sum() == 12


@pytest.mark.parametrize("B, H, Hk, Nq, Nk", [(0, 2, 2, 3, 5), (2, 0, 0, 3, 5), (2, 2, 2, 0, 5)])
def test_no_kernel_runs_where_there_is_no_query(B, H, Hk, Nq, Nk, monkeypatch):
    monkeypatch.setattr(decode, "split_kernel", None)
    q, k, v = (torch.ones(B, *heads, 16, device=engine.device) for heads in ((H, Nq), (Hk, Nk), (Hk, Nk)))
    out, lse = decode.forward(q, k, v, causal=True, lengths_k=int32(*[Nk] * B))
    assert out.shape == q.shape and lse.shape == q.shape[:3] and lse.dtype == torch.float32


def test_where_there_is_no_key_out_is_0():
    q, k = (torch.ones(2, H, N, 16, device=engine.device) for H, N in ((2, 3), (1, 0)))
    got = run(q, k, k, causal=True, lengths_k=int32(0, 0))
    assert got["out"].shape == (2, 2, 3, 16) and (got["out"] == 0).all() and (got["lse"] == -math.inf).all()


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("operand", ["q", "k", "v", "lengths_k", "sinks"])
def test_one_operand_unlike_the_others(operand, place, small_tiles):
    names = dict(zip("qkv", inputs(B=2, H=4, Hk=2, Nq=2, place="contiguous"), strict=True))
    names |= {"lengths_k": int32(40, 83), "sinks": feature_cases.random(4, seed=4).to(engine.device)}
    if place == "expanded" and names[operand].ndim == 1:
        pytest.skip("it has no heads")
    got = run(**names | {operand: PLACES[place](names[operand])}, causal=True, splits=2)
    q, k, v = (PLACES[place](x).resolve_neg() if name == operand else x for name, x in [*names.items()][:3])
    want = error.expected(q, k, v, q, causal=True, lengths_k=names["lengths_k"], sinks=names["sinks"])
    assert not error.failures(got, want)


def test_lengths_in_a_list(small_tiles):
    x = inputs(B=2, Nq=2)
    got, want = (run(*x, lengths_k=lengths) for lengths in ([40, 7], int32(40, 7)))
    assert all(torch.equal(got[name], want[name]) for name in want)


def test_heads_that_do_not_fit():
    q = torch.zeros(1, 4, 1, 16, device=engine.device)
    with pytest.raises(ValueError, match="H must be a multiple of Hk"):
        decode.forward(q, q[:, :3], q[:, :3])


@pytest.mark.parametrize("given, word", [
    ({"lengths_k": [3]}, "lengths_k"), ({"lengths_k": int32(3, 3, 3)}, "lengths_k"), ({"sinks": Z(3)}, "sinks"),
    ({"alibi_slopes": Z(1, 4)}, "alibi_slopes"), ({"alibi_slopes": Z(())}, "alibi_slopes"), ({"splits": -1}, "splits"),
    ({"splits": 1.5}, "splits"), ({"scale": 0.0}, "scale"), ({"softcap": -1.0}, "softcap"),
    ({"window": (-2, 0)}, "window"), ({"window": (3, -2)}, "window"), ({"window": 5}, "window"),
])  # fmt: skip
def test_options_with_which_a_kernel_would_read_what_is_not_there(given, word):
    q, k = Z(2, 4, 1, 16), Z(2, 2, 37, 16)
    with pytest.raises(ValueError, match=word):
        decode.forward(q, k, k, **given)


def test_a_soft_cap_of_0_is_none():
    q, k, v = inputs(Nq=2)
    assert all(map(torch.equal, decode.forward(q, k, v, softcap=0.0), decode.forward(q, k, v)))



def test_bit_equal_from_run_to_run(small_tiles):
    x = inputs(H=4, Nq=2)
    one, two = (run(*x, lengths_k=int32(70)) for _ in range(2))
    assert all(torch.equal(one[name], two[name]) for name in one)


def test_how_many_splits_there_are(monkeypatch):
    """About three programs a multiprocessor; no more splits than tiles of keys; a single split is not combined."""
    launches = []
    monkeypatch.setattr(Recording, "launch", lambda self, *given, **options: launches.append(given))
    monkeypatch.setattr(decode, "multiprocessors", lambda x: 132)
    for B, H, Hk, Nq, Nk in [(8, 32, 8, 1, 32768), (1, 8, 8, 1, 200), (70, 4, 4, 1, 999), (1, 32, 1, 3, 9999)]:
        q, k = (torch.empty(B, *heads, 64, dtype=torch.float16) for heads in ((H, Nq), (Hk, Nk)))
        decode.forward(q, k, k)
    decode.forward(q, k, k, window=(189, -1))  # the three queries see 192 keys
    grids = [programs for kernel, programs, *_ in launches if kernel is decode.split_kernel]
    assert grids == [(64, 6), (8, 4), (280, 1), (2, 157), (2, 3)]  # heads times tiles of rows, splits
    assert len(launches) == 2 * len(grids) - 1


def test_fits(monkeypatch):
    monkeypatch.setattr(decode, "multiprocessors", lambda x: 132)

    def fits(B, H, Hk, Nq, Nk):
        return decode.fits(torch.empty(B, H, Nq, 0), torch.empty(B, Hk, Nk, 0))

    assert fits(8, 32, 8, 1, 32768) and fits(1, 32, 32, 1, 1024) and fits(1, 64, 1, 1, 4096) and fits(1, 8, 8, 64, 4096)
    assert not fits(1, 32, 32, 1, 1023)  # few keys
    assert fits(8, 32, 32, 1, 8192) and fits(132, 1, 1, 16, 4096)  # 2.95 TB/s on an H100, a rung 2.63
    assert not fits(132, 1, 1, 17, 4096)  # a program for each head fills the GPU,
    assert fits(132, 2, 1, 17, 4096)  # but would read shared keys twice
    assert not fits(1, 65, 1, 1, 4096) and not fits(1, 8, 8, 65, 4096)  # more rows than a tile


# ---- on a GPU --------------------------------------------------------------------------------------------------------


@pytest.mark.gpu
def test_a_cuda_graph_reads_the_lengths_anew():
    q, k, v = inputs(B=3, H=8, Hk=2, Nq=2, Nk=3000, D=64, dtype=torch.bfloat16)
    lengths = int32(100, 3000, 1)
    decode.forward(q, k, v, causal=True, lengths_k=lengths)  # compiles
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out, lse = decode.forward(q, k, v, causal=True, lengths_k=lengths)
    for new in ((100, 3000, 1), (0, 2999, 1024)):
        lengths.copy_(int32(*new))
        graph.replay()
        want = error.expected(q, k, v, q, causal=True, lengths_k=lengths)
        assert not error.failures({"out": out, "lse": lse}, want)


@pytest.mark.gpu
@pytest.mark.parametrize("dimension", [0, 1, 2], ids=["batch", "head", "row"])
def test_more_than_2_to_the_31_elements(dimension):
    """The third batch entry, head or row begins 2^31 elements after the first."""
    shape, strides = [1, 1, 1, 64], [64, 64, 64, 1]
    shape[dimension], strides[dimension] = 3, 2**30
    x = torch.empty(2**31 + 64, dtype=torch.float16, device="cuda").as_strided(shape, strides)
    x.copy_(torch.randn(shape))
    check(x, x, x)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("D", [64, 96, 128, 256])
def test_every_row_of_the_table(D, dtype):
    x = inputs(B=2, H=16, Hk=2, Nq=3, Nk=1111, D=D, dtype=dtype)
    check(*x, causal=True, lengths_k=int32(1111, 300))


# ---- what the kernels compile to, for GPUs that need not be there ----------------------------------------------------


def launch_kernels(wanted):
    """Launches the kernels of each (compute capability, dtype, head_dim, rows, causal, with lengths_k)."""
    decode.multiprocessors = lambda x: 132
    for asked in wanted:
        capability, dtype, D, rows, causal, lengths = asked
        yield dict(asked=asked), capability
        q = torch.zeros(1, rows, 1, D, dtype=getattr(torch, dtype))
        k = q.new_zeros(1, 1, 4096, D)
        more = {"window": (1000, 0), "softcap": 30.0, "alibi_slopes": q.new_zeros(rows), "sinks": q.new_zeros(rows)}
        decode.forward(q, k, k, causal=causal, **more | {"lengths_k": int32(7)} if lengths else {})


@pytest.mark.long
@pytest.mark.parametrize("capability", [80, 86, 90])
def test_every_row_of_the_table_compiles(capability):
    """Without spills to speak of, and in no more than the 99 KB of shared memory that every GPU from Ampere on has."""
    names = [str(dtype).removeprefix("torch.") for dtype in DTYPES]
    wanted = [(capability, dtype, D, rows, rows == 4, rows > 4) for dtype in names for D in (64, 128, 256)
              for rows in (4, 32, 64)]  # fmt: skip
    rows = compile_triton.in_a_process(__file__, wanted)
    assert len(rows) == 2 * len(wanted)
    for row in rows:
        assert not row["serialised"] and row["spilled"] <= 16, row
        assert row["shared"] <= 99 * 1024, row
        if row["kernel"] == "split_kernel":
            assert row["cp.async.cg"] > 0, row
            assert (row["mma.sync"] + row["wgmma.mma_async"] > 0) == (row["asked"][1] != "float32"), row


def test_a_device_that_does_not_run_the_stage_is_not_asked_for_its_size(monkeypatch):
    def refuse(x):
        raise AssertionError(f"asked of {x.device}")

    monkeypatch.setattr(decode, "multiprocessors", refuse)
    q, k = torch.empty(1, 2, 1, 32, device="meta"), torch.empty(1, 2, 2000, 32, device="meta")
    with pytest.raises(ValueError, match="meta.*STEPS_ENGINE"):
        step03.forward(q, k, k)


if __name__ == "__main__":
    compile_triton.compile_all(launch_kernels(json.loads(sys.argv[1])))
