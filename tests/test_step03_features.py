"""Stage 03's flash.py: every feature alone, in pairs and as models combine them, against float64."""

import functools
import itertools
import json
import math
import sys

import pytest
import torch
import triton
import triton.language as tl

import steps.step03_triton as step03
from reference import cases, error, feature_cases, philox
from reference.feature_cases import random
from steps import engine
from steps.step03_triton.features import decode, flash, flash_kernels, scores, tiles
from steps.step03_triton.replay import Recording
from support import compile_triton, kept_calls
from support.contract_suite import unwritten_is_nan
from support.contracting_interpreter import interpreter  # noqa: F401  Pytest finds the fixture by its name.
from support.operands import PLACES

TILES = (16, 16), (32, 16)
LENGTHS = [names for names in feature_cases.CASES if "lengths" in names]  # for decode.py
FEATURES = [names[0] for names in feature_cases.ALONE if names not in LENGTHS]
MODELS = [names for names in feature_cases.COMBINED if names not in LENGTHS]
OPTIONS = feature_cases.features()
PAIRS = [
    names
    for names in itertools.combinations(FEATURES, 2)
    if not OPTIONS[names[0]].keys() & OPTIONS[names[1]].keys()
    and names not in (("parts", "packed"), ("first key", "parts"), ("additive for heads", "parts"))
]  # A gradient of one number, which is 0, is rounded in each part.


Z = functools.partial(torch.zeros, device=engine.device)


def inputs(names, dtype=torch.float32, **options):
    return feature_cases.inputs(names, dtype, device=engine.device, **options)


def run(q, k, v, dout, options, tile):
    """The results by name, from memory that is full of NaN until it is written."""
    with unwritten_is_nan():
        got = feature_cases.run(flash, q, k, v, dout, options, tile=tile)
    like = dict.fromkeys(("out", "dq", "dk", "dv"), q) | {"dmask": options.get("mask"), "dsinks": options.get("sinks")}
    carried = ("out", "lse") if "parts" in options else ("lse",)
    assert all(x.dtype == (torch.float32 if name in carried else like[name].dtype) for name, x in got.items())
    return got


def check(names, dtype, tile, **options):
    x = inputs(names, dtype, **options)
    assert not error.failures(run(*x, tile), feature_cases.expected(*x))


HALF = ("narrow window", "boolean of all heads", "padding", "additive", "additive of each head", "alibi", "dropout",
        "packed")  # fmt: skip


@pytest.mark.parametrize("name", FEATURES)
def test_alone(name):
    """Some in float16, by descriptors, the others in float32, by pointers; test_pairs has each in all dtypes."""
    if name in HALF:
        check((name,), torch.float16, TILES[1])
    else:
        check((name,), torch.float32, TILES[0], gain=3.0)


@pytest.mark.parametrize("names", MODELS, ids=" + ".join)
def test_as_models_combine_them(names):
    others = {("additive", "window", "parts"): torch.bfloat16}
    check(names, others.get(names, torch.float16 if "packed" in names else torch.float32), TILES[0])


@pytest.mark.parametrize("given, error, word", [
    ({"dropout_p": 0.5}, ValueError, "seed"), ({"mask": Z(5, 37, dtype=torch.uint8)}, TypeError, "mask must be bool"),
    ({"sinks": Z(3)}, ValueError, "sinks must have shape"), ({"window": (3, -2)}, ValueError, "window's limits"),
    ({"scale": 0.0}, ValueError, "scale must be > 0"), ({"softcap": -1.0}, ValueError, "softcap"),
    ({"cu_seqlens_q": Z(2), "cu_seqlens_k": Z(2), "max_seqlen_q": 5, "max_seqlen_k": 37}, ValueError, "B = 1"),
])  # fmt: skip
def test_options_with_which_a_kernel_would_read_what_is_not_there(given, error, word):
    q, k = Z(2, 4, 5, 16), Z(2, 2, 37, 16)
    with pytest.raises(error, match=word):
        flash.forward(q, k, k, **given)
    with pytest.raises(ValueError, match="max_seqlen"):
        flash.forward(q[:1], k[:1], k[:1], cu_seqlens_q=Z(2), cu_seqlens_k=Z(2))


TENSORS = dict(dout=Z(2, 4, 5, 16), q=Z(2, 4, 5, 16), k=Z(2, 2, 37, 16), v=Z(2, 2, 37, 16), out=Z(2, 4, 5, 16))


@pytest.mark.parametrize("name, x, error", [
    ("k", Z(1, 2, 37, 16), ValueError), ("k", Z(2, 2, 37, 8), ValueError), ("q", Z(2, 5, 16), ValueError),
    ("v", Z(2, 2, 9, 16), ValueError), ("v", Z(2, 1, 37, 16), ValueError), ("dout", Z(2, 4, 4, 16), ValueError),
    ("out", Z(2, 4, 4, 16), ValueError), ("lse", Z(2, 4, 4), ValueError), ("q", Z(2, 4, 16, 5).mT, ValueError),
    ("out", Z(2, 4, 16, 5).mT, ValueError), ("v", Z(2, 2, 37, 16).half(), TypeError),
    ("dout", Z(2, 4, 5, 16).half(), TypeError), ("k", Z(2, 2, 37, 16).to("meta"), TypeError),
])  # fmt: skip
def test_tensors_of_which_a_kernel_would_read_what_is_not_there(name, x, error):
    """replay.py refuses them in every launcher of the stage."""
    with pytest.raises(error, match=f"{name}\\b"):
        flash.backward(**(TENSORS | {"lse": Z(2, 4, 5)} | {name: x}))


@pytest.mark.parametrize("names", LENGTHS, ids=" + ".join)
def test_lengths(names):
    q, k, v, dout, options = inputs(names)
    out, lse = decode.forward(q, k, v, **options)
    assert not error.failures({"out": out, "lse": lse}, feature_cases.expected(q, k, v, dout, options))


# Packed sequences are chunks themselves, the keys of parts are in chunks, and there queries stand far behind the keys.
IN_CHUNKS = [
    names for names in (*((name,) for name in FEATURES), *MODELS) if not {"packed", "parts", "nothing seen"} & {*names}
]


@pytest.mark.parametrize("names", IN_CHUNKS, ids=" + ".join)
def test_queries_in_chunks_behind_a_growing_cache(names):
    """A chunk sees the keys up to its last query. It has to give first_query, from which dropout counts queries."""
    q, k, v, _, options = inputs(names)
    before = k.shape[2] - q.shape[2]
    options["causal"] = True
    if "seed" in options:
        options.setdefault("first_query", before)
        options["seed"] = options["seed"].to(q.device)
    out, lse = step03.forward(q, k, v, **options)
    for start, end in ((0, 8), (8, 21)):
        o, keys = dict(options), before + end
        if "first_query" in o:
            o["first_query"] += start
        if "mask" in o:
            mask = flash.four_dimensions(o["mask"])
            mask = mask[:, :, start:end] if mask.shape[2] > 1 else mask
            o["mask"] = mask[..., :keys] if mask.shape[3] > 1 else mask
        got = step03.forward(q[:, :, start:end], k[:, :, :keys], v[:, :, :keys], **o)
        for x, y in zip(got, (out[:, :, start:end], lse[:, :, start:end]), strict=True):
            torch.testing.assert_close(x, y, rtol=1e-5, atol=1e-5)


@pytest.mark.long
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("names", [*((name,) for name in FEATURES), *PAIRS, *MODELS], ids=" + ".join)
def test_pairs(names, dtype):
    check(names, dtype, TILES[dtype == torch.float32])


@pytest.mark.parametrize("name, dtype", [
    ("own_layouts", torch.float16), ("offset", torch.float16), ("expanded", torch.float16),
    ("large_scores", torch.float32), ("tied_keys", torch.float32),
])  # fmt: skip
def test_without_features(name, dtype):
    (case,) = [case for case in cases.CASES if case.name == name]
    x = cases.build(case, {"tiles": TILES, "head_dims": ()}, dtype, engine.device)
    want = x.expected()
    assert not error.failures(cases.run(flash, case, x), want)


@pytest.mark.parametrize("layout", ["every other key", "one row"])
def test_masks_that_the_copy_engine_cannot_read(layout):
    q, k, v, dout, options = inputs(("additive of each head",), torch.float16)
    mask = options["mask"]
    if layout == "one row":
        mask = mask[:, :1, 3:4].clone()
    else:
        mask = torch.stack([mask, torch.full_like(mask, math.nan)], -1).flatten(-2)
        mask = torch.nn.functional.pad(mask, (0, 6))[..., : 2 * k.shape[2] : 2]
    assert tiles.is_aligned(mask)
    out, lse = flash.forward(q, k, v, mask=mask, tile=TILES[0])
    assert not error.failures({"out": out, "lse": lse}, feature_cases.expected(q, k, v, dout, {"mask": mask}))


@pytest.mark.gpu
@pytest.mark.parametrize("dtype, D", [(torch.bfloat16, 128), (torch.float32, 64)], ids=str)
@pytest.mark.parametrize("names", [*((name,) for name in FEATURES), *MODELS], ids=" + ".join)
def test_with_the_tiles_of_the_tables(names, dtype, D):
    check(names, dtype, None, n=15, D=D)


def test_bit_equal_from_run_to_run():
    x = inputs(("causal", "softcap", "additive", "alibi"), torch.float16)
    one, two = (run(*x, TILES[0]) for _ in range(2))
    assert all(torch.equal(one[name], two[name]) for name in one)


@pytest.mark.parametrize("names, value", [
    (("causal", "additive"), -1e4), (("causal", "additive"), "finfo.min"), (("additive", "sinks"), "finfo.min"),
    (("additive", "window", "parts"), "finfo.min"),
], ids=str)  # fmt: skip
def test_a_finite_mask_stays_finite(names, value):
    """A row of finfo.min has equal P, in the backward too: its log-sum-exp has no room for the number of keys."""
    q, k, v, dout, options = inputs(names)
    mask = options["mask"]
    mask[mask == -math.inf] = torch.finfo(mask.dtype).min if value == "finfo.min" else value
    got = run(q, k, v, dout, options, TILES[0])
    assert not error.failures(got, feature_cases.expected(q, k, v, dout, options))
    assert got["lse"].isfinite().all()


def test_a_nan_in_the_mask_reaches_its_row_and_no_other():
    q, k, v, _, options = inputs(("additive for keys",))
    mask = options["mask"].expand(2, 2, q.shape[2], k.shape[2]).clone()
    out, _ = flash.forward(q, k, v, tile=TILES[0], mask=mask)
    mask[1, 0, 3, 20] = math.nan
    wrong, lse = flash.forward(q, k, v, tile=TILES[0], mask=mask)
    right = torch.ones(lse.shape, dtype=torch.bool, device=engine.device)
    right[1, 0, 3] = False
    assert torch.equal(lse.isfinite(), right) and torch.equal(wrong.isfinite().all(-1), right)
    assert wrong[1, 0, 3].isnan().all() and torch.equal(wrong[right], out[right])


@pytest.mark.parametrize("names", [("causal", "first"), ("boolean", "dropout"), ("packed",), ("additive", "parts")],
                         ids=" + ".join)  # fmt: skip
def test_a_row_without_a_key_has_its_sink_as_lse_and_a_sink_of_minus_infinity_is_none(names):
    x = *tensors, options = inputs(names, torch.float16)
    H, rows = tensors[0].shape[1], 20 if "packed" in names else None  # Behind them rows belong to no sequence.
    sinks = torch.tensor([-math.inf, 100.0, 7.0, -2.0], device=engine.device)[:H]  # exp(100) is too much for float32.
    got, without = run(*tensors, options | {"sinks": sinks}, TILES[0]), run(*x, TILES[0])
    # Compiled with sinks, a kernel may round in another order. The interpreter does not.
    rounding = dict(rtol=0, atol=0) if engine.name == "cpu" else {}
    for name in without:
        heads = slice(0, 1) if name in ("out", "lse", "dq") else slice(0, 0)  # dk and dv are sums over two heads.
        torch.testing.assert_close(got[name][:, heads], without[name][:, heads], **rounding)
    no_key = without["lse"][:, :, :rows] == -math.inf
    assert no_key.any() and got["dsinks"][0] == 0
    assert torch.equal(got["lse"][:, :, :rows][no_key], sinks[:, None].expand(no_key.shape)[no_key])
    assert (got["out"][:, :, :rows][no_key] == 0).all() and got["dsinks"].isfinite().all()


ENDS = 2.3e38, 2.37e38, 3.39e38, -3.39e38, 1e38, -1e38, 10.0, -10.0, -math.inf


@pytest.mark.parametrize("scale, dtype", [(None, torch.float32), (2e-38, torch.bfloat16), (1e-36, torch.float32)])
def test_sinks_up_to_the_ends_of_float32(scale, dtype):
    """Times log2(e), or divided by the scale, they would leave it. Each is that of a head; two rows see no key."""
    sinks = torch.tensor(ENDS, device=engine.device).to(dtype)
    q, dout, k, v = (random(1, len(ENDS), N, 16, seed=N).to(engine.device) for N in (5, 6, 3, 4))
    dout, v, options = dout[:, :, :5], v[:, :, :3], {"causal": True, "scale": scale, "sinks": sinks}
    got = run(q, k, v, dout, options, TILES[0])
    assert not error.failures(got, error.expected(q, k, v, dout, **options))
    no_key = got["lse"][0, :, 0]
    assert torch.equal(no_key, sinks.float()) and all(x.isfinite().all() for name, x in got.items() if name != "lse")


def test_a_sequence_does_not_read_its_neighbours():
    q, k, v, dout, options = inputs(("packed", "causal"), torch.float16)
    right = run(q, k, v, dout, options, TILES[0])
    second = slice(1, 18)  # Both its queries and its keys.
    for x in (q, k, v, dout):
        x[:, :, : second.start], x[:, :, second.stop :] = math.nan, math.nan
    wrong = run(q, k, v, dout, options, TILES[0])
    for name in error.NAMES:
        assert torch.equal(right[name][:, :, second], wrong[name][:, :, second])
        after = wrong[name][:, :, 36 if name in ("dk", "dv") else 20 :]  # the rows after the last entry
        assert (after == (-math.inf if name == "lse" else 0)).all()


@pytest.mark.parametrize("dtype, first_query, first_key", [
    (torch.float16, None, 32), (torch.float32, 3, 5), (torch.float16, 2, -8),
], ids=str)  # fmt: skip
def test_every_kernel_drops_the_same_entries(dtype, first_query, first_key):
    """With q = 0, and v, dout or k the identity, an entry of out, dv or dq is 0 exactly where P was dropped."""
    H, n, p, seed = 2, 18, 0.3, -5
    zero, one = torch.zeros(1, H, n, n, dtype=dtype, device=engine.device), torch.ones(1, H, n, n, dtype=dtype)
    eye, one = torch.eye(n, dtype=dtype, device=engine.device).expand(1, H, n, n), one.to(engine.device)
    keep = philox.keep_mask(seed, 1, H, n, n, p, first_query, first_key).to(engine.device)
    options = dict(dropout_p=p, seed=seed, first_query=first_query, first_key=first_key, tile=TILES[0])
    out, lse = flash.forward(zero, eye, eye, **options)
    assert torch.equal(out != 0, keep)
    options |= dict(mask=torch.zeros(1, H, n, n, device=engine.device), mask_gradient=True)
    dq, _, _, dmask = flash.backward(one, zero, eye, one, zero, lse, **options)  # out = 0 makes delta 0
    _, _, dv, _ = flash.backward(eye, zero, eye, one, zero, lse, **options)
    for result in (dq, dv.mT, dmask):
        assert torch.equal(result != 0, keep)


EACH = [*((name,) for name in FEATURES), *MODELS]
IN_TURN = [pytest.param(n, names, False, id=" + ".join(names)) for n, names in enumerate(EACH[:18])]  # 6 in 3 places
ALL = [pytest.param(n, x, True, id=" + ".join(x) + "-all", marks=pytest.mark.long) for n, x in enumerate(EACH)]


@pytest.mark.parametrize("n, names, every", [*IN_TURN, *ALL])
def test_one_operand_unlike_the_others(n, names, every):
    """One of q, k, v, dout, out and lse lies elsewhere, the next one with the next feature, and the feature's own."""
    q, k, v, dout, options = inputs(names, torch.float16)
    options = options | {"tile": (16, 32)}
    options.pop("parts", None)
    want = feature_cases.run(flash, q, k, v, dout, options)
    gradient = {"mask_gradient": "dmask" in want}
    tensors = dict(q=q, k=k, v=v, dout=dout, out=want["out"], lse=want["lse"])
    own = {name: x for name, x in options.items() if isinstance(x, torch.Tensor)}
    for m, (name, x) in enumerate((tensors | own).items()):
        if name in tensors and m != n % 6 and not every:
            continue
        names_of_places = ("unaligned", "strided") if x.dtype == torch.bool else ("unaligned", "strided", "negated")
        place = PLACES[names_of_places[n // 6 % len(names_of_places)]]
        moved = tensors | own | {name: place(x)}
        given = options | {name: moved[name] for name in own}
        inputs_of_both = moved["q"], moved["k"], moved["v"]
        out, lse = flash.forward(*inputs_of_both, **given)
        grads = flash.backward(moved["dout"], *inputs_of_both, moved["out"], moved["lse"], **given, **gradient)
        found = dict(zip(want, (out, lse, *grads), strict=True))
        torch.testing.assert_close(found, want, rtol=2e-3, atol=2e-3)


def test_dropping_everything_gives_zeros():
    q, k, v, dout, options = inputs(("dropout",))
    got = run(q, k, v, dout, options | {"dropout_p": 1.0}, TILES[0])
    assert got["lse"].isfinite().all() and all((got[name] == 0).all() for name in ("out", "dq", "dk", "dv"))


@triton.jit
def tanh_kernel(y, x, N: tl.constexpr):
    column = tl.arange(0, N)
    tl.store(y + column, scores.tanh(tl.load(x + column), None))


def test_tanh_is_exact():
    """To a few roundings, near 0 and where it is 1, too."""
    x = torch.cat([10.0 ** torch.linspace(-6, 2, 512), torch.linspace(0.3, 0.8, 512)]).to(engine.device)
    y = torch.empty(2, 1024, device=engine.device)
    for sign, result in zip((1, -1), y, strict=True):
        tanh_kernel[(1,)](result, sign * x, N=1024)
    want = x.double().tanh()
    assert ((y[0] / want - 1).abs() < 2**-21).all() and torch.equal(y[1], -y[0])


@triton.jit
def visit_kernel(visits, x, shift, before, after, N, OWN: tl.constexpr, T: tl.constexpr):
    ranges = scores.tile_ranges(x, shift, before, after, N, False, OWN, T)
    for n in range(ranges.whole, ranges.full, T):
        tl.store(visits + n // T, tl.load(visits + n // T) + 1)
    for n in range(ranges.begin, ranges.end, T):
        column = scores.jump(n, ranges, before)
        tl.store(visits + column // T, tl.load(visits + column // T) + 100)


def test_only_tiles_that_are_seen_are_visited():
    """Each tile once; with a mask if a row does not see all of its columns, and not at all if no row sees one."""
    OWN, T = 4, 2
    limits = itertools.product((None, 0, 1, 7, 40), (None, 0, 2, 9))
    for (before, after), N, x, shift in itertools.product(limits, (1, 8, 13), (0, 8), (-6, 0, 5)):
        visits = torch.zeros(20, dtype=torch.int32, device=engine.device)
        visit_kernel[(1,)](visits, x, shift, before, after, N, OWN=OWN, T=T)
        row, column = torch.arange(x, x + OWN)[:, None] + shift, torch.arange(40)
        seen = (column < N).expand(OWN, -1)
        seen = seen if before is None else seen & (column >= row - before)
        seen = seen if after is None else seen & (column <= row + after)
        tiles = seen.T.reshape(20, -1)
        want = torch.where(tiles.all(1), 1, torch.where(tiles.any(1), 100, 0))
        visits = visits.cpu()
        if N % T:  # The ragged last tile may be visited for columns that do not exist.
            visits[N // T], want[N // T] = 0, 0
        # A window that is narrower than two tiles may have a mask where it needs none, but never the other way.
        assert torch.equal(visits > 0, want > 0) and (visits >= want).all(), (before, after, N, x, shift)
        assert set(visits.tolist()) <= {0, 1, 100}


def nan_in(x, tiles):
    """x with NaN in these tiles of 16 rows."""
    x = x.clone()
    for n in tiles:
        x[:, :, 16 * n : 16 * n + 16] = math.nan
    return x


@pytest.mark.parametrize("options, dtype, unseen_keys, unseen_queries", [
    ({"causal": True}, torch.float32, (4, 5), (0, 1)), ({"window": (10, 5)}, torch.float16, (0, 1, 5), (0, 4)),
], ids=str)  # fmt: skip
@pytest.mark.filterwarnings("ignore:All-NaN slice")
def test_tiles_that_are_not_seen_are_not_read(options, dtype, unseen_keys, unseen_queries):
    """The third tile of queries and the fourth one of keys both stand at 48 to 63. These are the tiles they do not see.

    A tile that a kernel reads and then hides would show: P is 0 there, and 0 * NaN is NaN.
    """
    lengths = enumerate((80, 96, 96, 80))
    q, k, v, dout = (random(1, 2, N, 16, seed=n).to(engine.device, dtype) for n, N in lengths)
    options = options | {"tile": (16, 16)}
    out, lse = flash.forward(q, k, v, **options)
    dq, dk, dv = flash.backward(dout, q, k, v, out, lse, **options)

    K, V = nan_in(k, unseen_keys), nan_in(v, unseen_keys)
    of_queries = *flash.forward(q, K, V, **options), flash.backward(dout, q, K, V, out, lse, **options)[0]
    for got, want in zip(of_queries, (out, lse, dq), strict=True):
        assert torch.equal(got[:, :, 32:48], want[:, :, 32:48])
    Q, dO = nan_in(q, unseen_queries), nan_in(dout, unseen_queries)
    of_keys = flash.backward(dO, Q, k, v, out, lse, **options)[1:]
    for got, want in zip(of_keys, (dk, dv), strict=True):
        assert torch.equal(got[:, :, 48:64], want[:, :, 48:64])


@triton.jit
def order_kernel(order, tiles, heads, f):
    n, s, h = flash_kernels.find_tile(tiles, heads, f)
    order += 3 * tl.program_id(0)
    tl.store(order, s)
    tl.store(order + 1, n)
    tl.store(order + 2, h)


@pytest.mark.parametrize("shape, shared", [
    (None, False), ((2, 3, 1, 32), False), ((3, 32, 32), False),
    ((1, 1, 32, 32), True), ((2, 1, 1, 32), True), ((32,), True),
], ids=str)  # fmt: skip
def test_programs_that_read_the_same_tile_of_a_mask_follow_one_another(shape, shared):
    """Where all heads have the same mask, which is where its stride of heads is 0. Elsewhere those of a head do."""
    q = torch.zeros(2, 3, 32, 16, device=engine.device)
    mask = None if shape is None else torch.zeros(shape, device=engine.device)
    f = flash.prepare(Recording([q]), q, q, mask=mask)[3]
    assert f.policy.heads_first == (1 if shared else None)
    order = torch.empty(12, 3, dtype=torch.int32, device=engine.device)
    order_kernel[(12,)](order, 2, 3, f)
    by_tile = [(s, n, h) for s in range(2) for n in range(2) for h in range(3)]
    by_head = [(s, n, h) for s in range(2) for h in range(3) for n in range(2)]
    assert order.tolist() == [list(x) for x in (by_tile if shared else by_head)]


@pytest.mark.parametrize("shape, alike", [((3, 32, 32), None), ((2, 3, 1, 32), 1), ((32,), 1)], ids=str)
def test_of_a_mask_that_all_queries_share_a_tile_is_one_row(shape, alike):
    """Otherwise ptxas serialises products on Hopper. The copy engine does not read such a mask, of any shape."""
    q = torch.zeros(2, 3, 32, 16, dtype=torch.float16, device=engine.device)
    mask = torch.zeros(shape, device=engine.device)
    for same in (mask, mask.expand(2, 3, 32, 32)):
        f = flash.prepare(Recording([q]), q, q, mask=same)[3]
        assert f.policy.broadcast_rows == alike
        assert not alike or flash.with_tma(f, (q, q, q), same).policy.mask_tma is None


def test_alibi_counts_queries_from_the_tiles_first_key():
    """Beyond 2^24 float32 does not hold every position. All keys are one key in memory, so lse shows the distances."""
    q, k = random(1, 1, 4, 16).to(engine.device), random(1, 1, 1, 16, seed=1).to(engine.device)
    options = {"alibi_slopes": torch.tensor([0.3], device=engine.device), "window": (40, 0), "tile": (16, 16)}
    far, near = (flash.forward(q, *(x.expand(-1, -1, N, -1) for x in (k, k)), **options) for N in (2**25, 64))
    assert all(torch.equal(x, y) for x, y in zip(far, near, strict=True))


# ---- what the kernels compile to, for GPUs that need not be there ----------------------------------------------------

SWITCHES = {
    "none": {}, "causal": {"causal": True}, "window": {"window": (100, 50)}, "softcap": {"softcap": 30.0},
    "boolean": {"mask": torch.zeros(1, 1, 256, 256, dtype=torch.bool)},
    "additive": {"mask": torch.zeros(1, 1, 256, 256, dtype=torch.bfloat16), "mask_gradient": True},
    "padding": {"mask": torch.zeros(2, 1, 1, 256, dtype=torch.bool)},
    "float32 mask": {"mask": torch.zeros(1, 1, 1, 256), "mask_gradient": True},
    "alibi": {"alibi_slopes": torch.zeros(4)}, "sinks": {"sinks": torch.zeros(4)},
    "dropout": {"dropout_p": 0.1, "seed": 3},
    "packed": {"cu_seqlens_q": torch.tensor([0, 100, 256], dtype=torch.int32), "max_seqlen_q": 156,
               "cu_seqlens_k": torch.tensor([0, 100, 256], dtype=torch.int32), "max_seqlen_k": 156, "causal": True},
    "carried": {"first_query": 7, "first_key": 16, "causal": True},
}  # fmt: skip


def launch_switches(wanted):
    """Launches the kernels of each (name, compute capability, head_dim, dtype, number of queries and keys)."""
    for name, capability, D, dtype, N in wanted:
        yield dict(name=name, D=D, N=N), capability
        options = dict(SWITCHES[name])
        mask_gradient = options.pop("mask_gradient", False)
        x = torch.zeros(1 if name == "packed" else 2, 4, N, D, dtype=getattr(torch, dtype))
        if "mask" in options and options["mask"].dtype == torch.bfloat16:
            options["mask"] = options["mask"].to(x.dtype)
        lse = torch.zeros(x.shape[:3])
        carried = {"out": x.float(), "lse": lse} if name == "carried" else {}
        flash.forward(x, x, x, **carried, **options)
        flash.backward(x, x, x, x, x, lse, mask_gradient=mask_gradient, **options)


SHARED = {75: 64, 80: 163, 86: 99, 90: 227, 120: 99}  # KB that a block may have; 89 has as much as 86


@pytest.mark.long
@pytest.mark.parametrize("capability", SHARED)
def test_every_switch_compiles(capability):
    """On Turing the kernels take float32 only, up to head_dim 128. A mask takes the most shared memory."""
    dtype, head_dims = ("float32", (64, 128)) if capability == 75 else ("bfloat16", (64, 128, 256))
    names = [name for name in SWITCHES if capability in (80, 90) or name == "none" or "mask" in SWITCHES[name]]
    wanted = [(name, capability, D, dtype, 256) for name in names for D in head_dims]
    rows = compile_triton.in_a_process(__file__, wanted)
    assert {row["name"] for row in rows} == set(names)
    for row in rows:
        assert row["shared"] <= SHARED[capability] * 1024, row
        assert not row["serialised"], row
        if row["kernel"] not in ("clear_kernel", "delta_kernel") and capability > 75:
            assert row["wgmma.mma_async" if capability == 90 else "mma.sync"] > 0, row


def test_a_first_call_with_a_feature_compiles_four_kernels_and_another_length_none():
    """Backward needs delta before the others, and dK, dV and dQ come from two kernels, so that none adds atomically."""
    names = "window", "packed"
    rows = compile_triton.in_a_process(__file__, [(name, 90, 16, "bfloat16", N) for name in names for N in (256, 1000)])
    for name in names:
        first, second = ([row for row in rows if (row["name"], row["N"]) == (name, N)] for N in (256, 1000))
        kernels = [row["kernel"] for row in first if row["kernel"] != "clear_kernel"]  # of rows that no sequence has
        assert kernels == ["forward_kernel", "delta_kernel", "dkdv_kernel", "dq_kernel"]
        assert [row["key"] for row in second] == [row["key"] for row in first], name


if __name__ == "__main__":
    compile_triton.compile_all(launch_switches(json.loads(sys.argv[1])))


@pytest.mark.skipif(engine.name == "cuda", reason="sums in any order are not equal to the bit")
@pytest.mark.parametrize("way", kept_calls.FEATURES)
def test_a_changed_call_between_usual_ones_is_what_it_is_alone(way):
    kept_calls.check(step03, way)


# Rows behind the last sequence, of queries and of keys. The kernels of one side must not take the end of the other.
@pytest.mark.parametrize("of_queries, of_keys", [(0, 37), (37, 0), (3, 20), (20, 3)])
@pytest.mark.parametrize("longer", ["queries", "keys"])
def test_packed_sequences_end_before_the_tensors_by_other_lengths(of_queries, of_keys, longer):
    """What lies behind is NaN, and so is memory before the results are written."""
    ends_q, ends_k = (20, 20, 26), (7, 37, 37)  # the second sequence has no query, the third no key
    ends_q, ends_k = (ends_q, ends_k) if longer == "keys" else (ends_k, ends_q)
    causal = longer == "keys"
    Nq, Nk = ends_q[-1] + of_queries, ends_k[-1] + of_keys
    q, dout, k, v = (random(1, 2, N, 16, seed=n).to(engine.device) for n, N in enumerate((Nq, Nq, Nk, Nk)))
    for x, end in ((q, ends_q), (dout, ends_q), (k, ends_k), (v, ends_k)):
        x[:, :, end[-1] :] = math.nan
    starts = [torch.tensor([0, *ends], dtype=torch.int32, device=engine.device) for ends in (ends_q, ends_k)]
    packed = dict(zip(("cu_seqlens_q", "cu_seqlens_k"), starts, strict=True)) 
    packed |= {"max_seqlen_q": 30, "max_seqlen_k": 30}
    with unwritten_is_nan():
        out, lse = step03.forward(q, k, v, causal=causal, tile=(16, 16), **packed)
        grads = step03.backward(dout, q, k, v, out, lse, causal=causal, tile=(16, 16), **packed)
    got = dict(zip(error.NAMES, (out, lse, *grads), strict=True))
    for (a, b), (c, d) in zip(itertools.pairwise((0, *ends_q)), itertools.pairwise((0, *ends_k)), strict=True):
        want = error.expected(q[:, :, a:b], k[:, :, c:d], v[:, :, c:d], dout[:, :, a:b], causal=causal)
        own = {name: x[:, :, c:d] if name in ("dk", "dv") else x[:, :, a:b] for name, x in got.items()}
        assert not error.failures(own, want), (a, c)
    for name, x in got.items():
        behind = x[:, :, (ends_k if name in ("dk", "dv") else ends_q)[-1] :]
        assert (behind == (-math.inf if name == "lse" else 0)).all(), name
