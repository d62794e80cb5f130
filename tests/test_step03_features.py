"""Stage 03's flash.py: every feature alone, in pairs and as models combine them, against float64."""

import itertools
import json
import math
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import triton
import triton.language as tl

from reference import cases, error, philox
from steps import engine
from steps.step03_triton import features, flash
from support import compile_triton
from support.contracting_interpreter import interpreter  # noqa: F401  Pytest finds the fixture by its name.

B, H, Hk, Nq, Nk, D = 2, 2, 1, 21, 37, 24
TILES = (16, 16), (32, 16)


def random(*shape, seed=0, dtype=torch.float32):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(engine.device, dtype)


def holes(*shape, seed, value):
    """An additive mask with some entries of `value`, and a row and a column of nothing else."""
    mask = random(*shape, seed=seed).masked_fill(random(*shape, seed=seed + 1) > 0.7, value)
    mask[..., 17] = value
    if shape[-2] > 1:
        mask[..., 4, :] = value
    return mask


def aligned(mask):
    """The same mask in a tensor whose rows are longer, full of NaN, and begin at multiples of 16 bytes."""
    keys = mask.shape[-1]
    rows = mask.new_full((*mask.shape[:-1], keys // 16 * 16 + 32), True if mask.dtype == torch.bool else math.nan)
    rows[..., :keys] = mask
    return rows[..., :keys]


def starts(*numbers):
    return torch.tensor(numbers, dtype=torch.int32, device=engine.device)


def every_feature(n=1):
    """{name: options} for n Nq queries and n Nk keys."""
    rows, keys, inf = n * Nq, n * Nk, math.inf
    return {
        "causal": {"causal": True},
        "window": {"window": (6 * n, 3 * n)},
        "left window": {"window": (18 * n, -1)},
        "narrow window": {"window": (0, 0)},
        "softcap": {"softcap": 1.5},
        "boolean": {"mask": holes(1, H, rows, keys, seed=1, value=-inf) > -0.5},
        "boolean of all heads": {"mask": aligned(holes(B, 1, rows, keys, seed=1, value=-inf) > -0.5)},
        "additive": {"mask": holes(B, 1, rows, keys, seed=3, value=-inf)},
        "additive of each head": {"mask": holes(1, H, rows, keys, seed=3, value=-inf)},
        "additive for keys": {"mask": holes(H, 1, keys, seed=5, value=-1e4)},
        "additive for queries": {"mask": random(rows, 1, seed=7)},
        "additive for heads": {"mask": random(B, H, 1, 1, seed=8)},
        "alibi": {"alibi_slopes": torch.tensor([0.5, 0.0625], device=engine.device)},
        "alibi of each batch": {"alibi_slopes": random(B, H, seed=9).abs()},
        "dropout": {"dropout_p": 0.3, "seed": torch.tensor(2**35 + 11)},
        "first": {"first_query": 9 * n, "first_key": 16 * n, "causal": True},
        "nothing seen": {"first_query": 60 * n, "window": (30 * n, -1)},
        "packed": {"cu_seqlens_q": starts(0, 3 * n, 3 * n, 20 * n), "cu_seqlens_k": starts(0, 17 * n, 18 * n, 35 * n),
                   "max_seqlen_q": 17 * n, "max_seqlen_k": 17 * n},
    }  # fmt: skip


FEATURES = every_feature()
MODELS = [
    ("softcap", "window", "causal"), ("alibi", "packed", "causal"), ("alibi of each batch", "packed", "window"),
    ("additive", "dropout"), ("additive for keys", "packed"), ("additive for queries", "packed", "dropout"),
    ("causal", "first", "dropout", "left window"), ("softcap", "additive", "alibi"),
]  # fmt: skip
PAIRS = [
    names
    for names in itertools.combinations(FEATURES, 2)
    if not FEATURES[names[0]].keys() & FEATURES[names[1]].keys() and set(names) != {"nothing seen", "first"}
]


def inputs(names, dtype=torch.float32, gain=1.0, n=1, D=D):
    """q, k, v, dout, each surrounded by NaN, and the options."""
    every = FEATURES if n == 1 else every_feature(n)
    options = {key: value for name in names for key, value in every[name].items()}
    batch = 1 if "packed" in names else B
    if "packed" in names:
        for key in ("mask", "alibi_slopes"):
            if key in options and options[key].ndim == 4:
                options[key] = options[key][:1]
        if "alibi of each batch" in names:
            options["alibi_slopes"] = random(3, H, seed=9).abs()  # of each sequence
    if "mask" in options and options["mask"].is_floating_point():
        mask = options["mask"].to(dtype)
        four = mask.view((1,) * (4 - mask.ndim) + mask.shape)
        alone = "additive of each head" in names
        options["mask"] = aligned(mask) if alone else cases.surround_with_nan(four, "heads inside").view_as(mask)
    shapes = (H, n * Nq), (Hk, n * Nk), (Hk, n * Nk), (H, n * Nq)
    tensors = (random(batch, *shape, D, seed=20 + n, dtype=dtype) for n, shape in enumerate(shapes))
    q, k, v, dout = (cases.surround_with_nan(x) for x in tensors)
    return q.mul_(gain), k, v, dout, options


def run(q, k, v, dout, options, tile):
    mask = options.get("mask")
    options = options | {"tile": tile}
    out, lse = flash.forward(q, k, v, **options)
    options["mask_gradient"] = mask is not None and mask.is_floating_point()
    return error._by_name(out, lse, *flash.backward(dout, q, k, v, out, lse, **options))


def reference(q, k, v, dout, options):
    options = {name: value for name, value in options.items() if not name.startswith("max_seqlen")}
    seed, mask = options.pop("seed", None), options.get("mask")
    if seed is not None:
        numbered = {x: options[x] for x in ("first_query", "first_key") if x in options}
        packed = {x: options[x].cpu() for x in ("cu_seqlens_q", "cu_seqlens_k") if x in options}
        shape, p = (q.shape[0], H, q.shape[2], k.shape[2]), options["dropout_p"]
        options["dropout_mask"] = philox.keep_mask(int(seed), *shape, p, **numbered, **packed).to(q.device)
        options["dropout_p"] = philox.rounded(p)
    additive = mask is not None and mask.is_floating_point()
    return error.expected(q, k, v, dout, mask_gradient=additive, **options)


def check(names, dtype, tile, gain=1.0):
    x = inputs(names, dtype, gain)
    assert not error.failures(run(*x, tile), reference(*x))


@pytest.mark.parametrize("name", FEATURES)
def test_alone(name):
    """Features in turn in float32, by pointers, and in float16, by descriptors; test_pairs has each in all dtypes."""
    half = list(FEATURES).index(name) % 2
    check((name,), *((torch.float16, TILES[1]) if half else (torch.float32, TILES[0], 3.0)))


@pytest.mark.parametrize("names", MODELS, ids=" + ".join)
def test_as_models_combine_them(names):
    check(names, torch.float16 if "packed" in names else torch.float32, TILES[0])


@pytest.mark.long
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("names", [*((name,) for name in FEATURES), *PAIRS, *MODELS], ids=" + ".join)
def test_pairs(names, dtype):
    check(names, dtype, TILES[dtype == torch.float32])


@pytest.mark.gpu
@pytest.mark.parametrize("dtype, D", [(torch.bfloat16, 128), (torch.float32, 64)], ids=str)
@pytest.mark.parametrize("names", [*((name,) for name in FEATURES), *MODELS], ids=" + ".join)
def test_with_the_tiles_of_the_tables(names, dtype, D):
    x = inputs(names, dtype, n=15, D=D)
    assert not error.failures(run(*x, None), reference(*x))


def bits(results):
    sizes = {2: torch.int16, 4: torch.int32}
    return {name: x.contiguous().view(sizes[x.element_size()]) for name, x in results.items()}


def test_bit_equal_from_run_to_run():
    x = inputs(("causal", "softcap", "additive", "alibi", "dropout"), torch.float16)
    one, two = (bits(run(*x, TILES[0])) for _ in range(2))
    assert all(torch.equal(one[name], two[name]) for name in one)


@pytest.mark.parametrize("value", ["finfo.min", -1e4], ids=str)
def test_a_finite_mask_stays_finite(value):
    """A row of finfo.min has equal P, in the backward too: its log-sum-exp has no room for the number of keys."""
    q, k, v, dout, options = inputs(("causal", "additive"))
    mask = options["mask"]
    mask[mask == -math.inf] = torch.finfo(mask.dtype).min if value == "finfo.min" else value
    got = run(q, k, v, dout, options, TILES[0])
    assert not error.failures(got, reference(q, k, v, dout, options))
    assert got["lse"].isfinite().all()


def test_a_sequence_does_not_read_its_neighbours():
    q, k, v, dout, options = inputs(("packed", "causal"), torch.float16)
    right = run(q, k, v, dout, options, TILES[0])
    for x in (q, dout):
        x[:, :, :3], x[:, :, 20:] = math.nan, math.nan
    for x in (k, v):
        x[:, :, :18], x[:, :, 35:] = math.nan, math.nan
    wrong = run(q, k, v, dout, options, TILES[0])
    rows = dict(zip(error.NAMES, (slice(3, 20),) * 3 + (slice(18, 35),) * 2, strict=True))
    assert all(torch.equal(right[name][:, :, rows[name]], wrong[name][:, :, rows[name]]) for name in error.NAMES)
    for name in error.NAMES:  # rows after the last entry
        assert (wrong[name][:, :, rows[name].stop :] == (-math.inf if name == "lse" else 0)).all()


@pytest.mark.parametrize("names", [("causal", "dropout"), ("softcap", "alibi"), ("additive", "window")], ids=" + ".join)
def test_a_part_of_the_keys_at_a_time_equals_one_call(names):
    """out and lse are carried; the gradients of the parts are those of all keys, and dq is their sum."""
    q, k, v, dout, options = inputs(names)
    if "mask" in options:
        options["mask"][:, :, 5] = torch.finfo(torch.float32).min  # a row that is swallowed in each part
    options |= {"first_query": Nk - Nq}
    want = reference(q, k, v, dout, options)
    out, lse = torch.zeros_like(dout), q.new_full(q.shape[:3], -math.inf)
    parts = slice(0, 5), slice(5, 16), slice(16, Nk)
    each = [options | {"first_key": keys.start, "tile": TILES[0]} for keys in parts]
    for o, keys in zip(each, parts, strict=True):
        o |= {"mask": options["mask"][..., keys]} if "mask" in o else {}
        carried = flash.forward(q, k[:, :, keys], v[:, :, keys], out=out, lse=lse, **o)
        assert carried[0] is out and carried[1] is lse
    grads = [
        flash.backward(dout, q, k[:, :, keys], v[:, :, keys], out, lse, **o)
        for o, keys in zip(each, parts, strict=True)
    ]
    dq, dk, dv = sum(g[0] for g in grads), *(torch.cat([g[n] for g in grads], 2) for n in (1, 2))
    assert not error.failures(error._by_name(out, lse, dq, dk, dv), want)


@pytest.mark.parametrize("dtype, first_query, first_key",
    [(torch.float32, None, 0), (torch.float16, 5, 32), (torch.float32, 3, 5), (torch.float16, 2, -7)], ids=str,
)  # fmt: skip
def test_every_kernel_drops_the_same_entries(dtype, first_query, first_key):
    """With q = 0, and v, dout or k the identity, an entry of out, dv or dq is 0 exactly where P was dropped."""
    n, p, seed = 18, 0.4, -5
    zero, one = torch.zeros(2, 2, n, n, dtype=dtype, device=engine.device), torch.ones(2, 2, n, n, dtype=dtype)
    eye, one = torch.eye(n, dtype=dtype, device=engine.device).expand(2, 2, n, n), one.to(engine.device)
    keep = philox.keep_mask(seed, 2, 2, n, n, p, first_query, first_key).to(engine.device)
    options = dict(dropout_p=p, seed=seed, first_query=first_query, first_key=first_key, tile=TILES[0])
    out, lse = flash.forward(zero, eye, eye, **options)
    assert torch.equal(out != 0, keep)
    options |= dict(mask=torch.zeros(2, 2, n, n, device=engine.device), mask_gradient=True)
    dq, _, _, dmask = flash.backward(one, zero, eye, one, zero, lse, **options)  # out = 0 makes delta 0
    _, _, dv, _ = flash.backward(eye, zero, eye, one, zero, lse, **options)
    for result in (dq, dv.mT, dmask):
        assert torch.equal(result != 0, keep)


def test_dropping_everything_gives_zeros():
    q, k, v, dout, options = inputs(("dropout",))
    got = run(q, k, v, dout, options | {"dropout_p": 0.999}, TILES[0])
    assert got["lse"].isfinite().all() and all((got[name] == 0).all() for name in ("out", "dq", "dk", "dv"))


@triton.jit
def visit_kernel(visits, x, shift, before, after, N, OWN: tl.constexpr, T: tl.constexpr):
    ranges = features.tile_ranges(x, shift, before, after, N, False, OWN, T)
    for n in range(ranges.whole, ranges.full, T):
        tl.store(visits + n // T, tl.load(visits + n // T) + 1)
    for n in range(ranges.begin, ranges.end, T):
        column = features.jump(n, ranges, before)
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


# ---- what the kernels compile to, for GPUs that need not be there ----------------------------------------------------

SWITCHES = {
    "none": {}, "causal": {"causal": True}, "window": {"window": (100, 50)}, "softcap": {"softcap": 30.0},
    "boolean": {"mask": torch.zeros(1, 1, 256, 256, dtype=torch.bool)},
    "additive": {"mask": torch.zeros(1, 1, 256, 256, dtype=torch.bfloat16), "mask_gradient": True},
    "alibi": {"alibi_slopes": torch.zeros(4)}, "dropout": {"dropout_p": 0.1, "seed": 3},
    "packed": {"cu_seqlens_q": torch.tensor([0, 100, 256], dtype=torch.int32), "max_seqlen_q": 156,
               "cu_seqlens_k": torch.tensor([0, 100, 256], dtype=torch.int32), "max_seqlen_k": 156, "causal": True},
    "carried": {"first_query": 7, "first_key": 16, "causal": True},
}  # fmt: skip


def compile_switches(wanted):
    """Prints a line of JSON for each kernel of (name, compute capability, head_dim)."""
    driver, launch = compile_triton.Driver(), triton.runtime.jit.JITFunction.run
    triton.runtime.driver.set_active(driver)
    torch.cuda.get_device_capability = lambda device=None: divmod(driver.capability, 10)

    def compile_only(kernel, *args, grid, warmup, **options):
        compiled = launch(kernel, *args, grid=grid, warmup=True, **options)
        log = compile_triton.assemble(compiled.asm["ptx"], driver.capability)
        found = dict(name=name, capability=driver.capability, D=D, kernel=kernel.__name__)
        found |= dict(shared=compiled.metadata.shared, spilled=int(re.search(r"(\d+) bytes spill stores", log)[1]))
        found |= dict(registers=int(re.search(r"Used (\d+) registers", log)[1]), serialised="serialized" in log)
        found |= {word: compiled.asm["ptx"].count(word) for word in compile_triton.INSTRUCTIONS}
        print(json.dumps(found), flush=True)

    triton.runtime.jit.JITFunction.run = compile_only
    for name, driver.capability, D in wanted:
        options = dict(SWITCHES[name])
        mask_gradient = options.pop("mask_gradient", False)
        x = torch.zeros(1 if name == "packed" else 2, 4, 256, D, dtype=torch.bfloat16)
        lse = torch.zeros(x.shape[:3])
        carried = {"out": x.float(), "lse": lse} if name == "carried" else {}
        flash.forward(x, x, x, **carried, **options)
        flash.backward(x, x, x, x, x, lse, mask_gradient=mask_gradient, **options)


def compiled(wanted):
    root = Path(__file__).parents[1]
    path = os.pathsep.join((str(root), str(root / "tests")))
    environment = os.environ | {"STEPS_ENGINE": "compile", "TRITON_INTERPRET": "0", "PYTHONPATH": path}
    command = [sys.executable, __file__, json.dumps(wanted)]
    lines = subprocess.run(command, cwd=root, env=environment, capture_output=True, text=True, check=True).stdout
    return [json.loads(line) for line in lines.splitlines()]


@pytest.mark.long
@pytest.mark.parametrize("capability", [80, 90])
def test_every_switch_compiles(capability):
    rows = compiled([(name, capability, D) for name in SWITCHES for D in (64, 128)])
    assert {row["name"] for row in rows} == set(SWITCHES)
    for row in rows:
        assert not row["serialised"] and row["shared"] <= {80: 163, 90: 227}[capability] * 1024, row
        if row["kernel"] != "delta_kernel":
            assert row["wgmma.mma_async" if capability == 90 else "mma.sync"] > 0, row


if __name__ == "__main__":
    compile_switches(json.loads(sys.argv[1]))
