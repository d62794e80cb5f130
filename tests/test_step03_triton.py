"""Stage 03: the contract, sdpa against torch's, and the kernels compiled for GPUs that need not be there."""

import contextlib
import importlib.util
import itertools
import math
import re

import pytest
import torch
import triton
import triton.language as tl

import steps.step03_triton as step03
from reference import cases, error
from steps import engine
from steps.checks import check_tile, pick
from steps.course.bench import cost
from steps.step03_triton import (
    bwd_0_fused,
    bwd_1_tma,
    bwd_2_gluon,
    fwd_0_fused,
    fwd_1_tma,
    fwd_2_roles,
    fwd_3_gluon,
    rungs,
)
from steps.step03_triton.features import flash, tiles
from steps.step03_triton.replay import Recording
from support import compile_triton
from support.contract_suite import Contract, unwritten_is_nan
from support.contracting_interpreter import interpreter  # noqa: F401  Pytest finds the fixture by its name.
from support.operands import scores_whose_roundings_add_up

PINNED = "3.7.1"  # requirements.txt


class TestContract(Contract):
    stage = step03
    several_tiles = 300
    # Rungs tma and roles also have a way without descriptors ("offset"), and a backward of their own.
    few = Contract.few + ("fewer_queries", "wide_tile", "tall_tile", "offset", "grouped_heads")

    @contextlib.contextmanager
    def without_launches(self, monkeypatch):
        with monkeypatch.context() as patch:
            patch.setattr(Recording, "launch", lambda *_, **__: None)
            yield
        for file in (fwd_0_fused, fwd_1_tma, fwd_2_roles, fwd_3_gluon):
            file.forward.clear()
        for file in (bwd_0_fused, bwd_1_tma, bwd_2_gluon):
            file.backward.clear()


@pytest.mark.parametrize("file", [fwd_0_fused, fwd_1_tma, fwd_2_roles, bwd_2_gluon], ids=lambda file: file.__name__)
def test_the_grid_is_that_of_the_head_of_the_file(file, monkeypatch):
    """Of the kernel with the loop over tiles, which is the first of a forward and the second of a backward."""
    launched = []
    monkeypatch.setattr(bwd_2_gluon, "refusal", lambda q: None)
    monkeypatch.setattr(Recording, "launch", lambda self, kernel, programs, *_, **__: launched.append(programs))
    names = {"B": 2, "H": 6, "Hk": 3, "Nq": 333, "Nk": 300, "ceil": math.ceil, "Br": 32}
    told = re.search(r"Launch: grid\s\((.*?),\)", file.__doc__)[1]
    q, k = (torch.zeros(2, heads, N, 64, device=engine.device).half() for heads, N in ((6, 333), (3, 300)))
    if hasattr(file, "forward"):
        file.forward.clear()
        file.forward(q, k, k, tile=(32, 16))
        file.forward.clear()
    else:
        file.backward(q, q, k, k, q, q[..., 0].float())
        file.backward.clear()
    assert launched[0 if hasattr(file, "forward") else 1] == eval(told, names)


@pytest.fixture
def changed(own_text, tmp_path):
    """changed(module, old, new): a copy of a kernel file in which a piece of text is replaced, as a module."""

    def copy_of(module, old, new):
        text = own_text(module.__file__)
        assert old in text
        path = tmp_path / f"{module.__name__.rpartition('.')[2]}_changed.py"
        path.write_text(text.replace(old, new))
        spec = importlib.util.spec_from_file_location(f"{module.__package__}.{path.stem}", path)  # for its imports
        copy = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(copy)
        return copy

    return copy_of


# What every kernel does against infinite exponentials at huge scores, and what the text would be without it.
FACTOR = (
    "factor, shift = factor_and_shift(unit, scale_log2)",
    "factor, shift = unit * 0 + scale_log2, unit * scale_log2",
)
AT_MOST_1 = "tl.exp2(tl.minimum(S * scale_log2 - lse_2, 0.0))", "tl.exp2(S * scale_log2 - lse_2)"


@pytest.mark.filterwarnings("ignore:.*encountered:RuntimeWarning")
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
@pytest.mark.parametrize("module, mistake", [
    (fwd_0_fused, FACTOR), (fwd_1_tma, FACTOR), (fwd_2_roles, FACTOR), (bwd_0_fused, AT_MOST_1), (bwd_1_tma, AT_MOST_1),
], ids=lambda x: getattr(x, "__name__", "").rpartition(".")[2])  # fmt: skip
def test_without_its_guard_a_contracted_product_gives_infinity(module, mistake, dtype, changed):
    """At scores of 10^11 a rounded maximum is off by 4,000. The plain interpreter, which rounds twice, hides it."""
    (case,) = (case for case in cases.CASES if case.name == "large_scores")
    x = cases.build(case, step03.SUPPORTS, dtype, engine.device)
    saved = fwd_0_fused.forward(x.q, x.k, x.v, **x.options)
    for kernels, right in ((module, True), (changed(module, *mistake), False)):
        if hasattr(kernels, "forward"):
            results = kernels.forward(x.q, x.k, x.v, **x.options)
        else:
            results = kernels.backward(x.dout, x.q, x.k, x.v, *saved, **x.options)
        assert all(bool(torch.isfinite(result).all()) for result in results) == right


@triton.jit
def product_kernel(a, b, c, d):
    """c = a b and d = b^T a^T, of a (32, 16) and b (16, 16)."""
    i, j = tl.arange(0, 32), tl.arange(0, 16)
    at = i[:, None] * 16 + j[None, :]
    A, B = tl.load(a + at), tl.load(b + j[:, None] * 16 + j[None, :])
    tl.store(c + at, tl.dot(A, B, input_precision="ieee"))
    tl.store(d + j[:, None] * 32 + i[None, :], tl.dot(tl.trans(B), tl.trans(A), input_precision="ieee"))


@pytest.mark.skipif(engine.name != "cpu", reason="a GPU adds in an order of its own")
def test_the_interpreters_sums_do_not_depend_on_the_order():
    """Each row holds 2^24, 1, 1 and -2^24 in another order. In float32 2^24 + 1 is 2^24, and some sums are wrong."""
    terms = torch.tensor([*itertools.permutations((2.0**24, 1.0, 1.0, -(2.0**24)))])
    a = torch.zeros(32, 16)
    a[: len(terms), :4] = terms
    c, d = torch.empty(32, 16), torch.empty(16, 32)
    product_kernel[(1,)](a, torch.ones(16, 16), c, d)
    assert (c[: len(terms)] == 2).all() and torch.equal(d, c.T)


def float32_results(forward, backward, N=100, D=32):
    """What the kernels give for N causal queries and N + 50 keys with values above 0, and what is expected."""
    rng = torch.Generator().manual_seed(N)
    tensors = (torch.randn(1, 2, n, D, generator=rng) for n in (N, N, N + 50, N + 50))
    dout, q, k, v = (x.to(engine.device) for x in tensors)
    v = v.abs()  # so that what is cut off from the sums adds up
    out, lse = forward(q, k, v, causal=True)
    got = dict(zip(error.NAMES, (out, lse, *backward(dout, q, k, v, out, lse, causal=True)), strict=True))
    return got, error.expected(q, k, v, dout, causal=True)


@pytest.mark.parametrize("modules", [(fwd_0_fused, bwd_0_fused), (flash, flash)], ids=["fused", "flash"])
def test_products_of_float32_in_three_parts(modules, monkeypatch):
    """The interpreter multiplies exactly, so that this shows the order of the sums only."""
    for module in modules:
        monkeypatch.setattr(module, "dot_precision", lambda x: "tf32x3")
    assert not error.failures(*float32_results(modules[0].forward, modules[1].backward))


@pytest.mark.parametrize("kind", ["tf32x3", "ieee"])
def test_every_kernel_of_fused_is_told_how_to_multiply_float32(kind, monkeypatch):
    told, launch = [], Recording.launch

    def noted(self, *given, **constants):
        told.append(constants.get("PRECISION", kind))
        return launch(self, *given, **constants)

    monkeypatch.setattr(Recording, "launch", noted)
    for module, call in ((fwd_0_fused, fwd_0_fused.forward), (bwd_0_fused, bwd_0_fused.backward)):
        monkeypatch.setattr(module, "dot_precision", lambda x: kind)
        call.clear()  # What is recorded would be replayed.
    float32_results(fwd_0_fused.forward, bwd_0_fused.backward, 20)
    assert len(told) >= 3 and set(told) == {kind}
    fwd_0_fused.forward.clear()
    bwd_0_fused.backward.clear()


@pytest.mark.parametrize("module", [fwd_0_fused, bwd_0_fused, tiles], ids=lambda x: x.__name__.rpartition(".")[2])
def test_float32_of_which_head_dims_and_gpus_is_multiplied_in_three_parts(module, monkeypatch):
    def found(D, major, interpret=False, dtype=torch.float32):
        monkeypatch.setattr(module.torch.cuda, "get_device_capability", lambda _: (major, 0))
        monkeypatch.setattr(module.triton.knobs.runtime, "interpret", interpret)
        return module.dot_precision(torch.empty(1, 1, 7, D, dtype=dtype))

    assert [found(D, 8) for D in (1, 128, 129, 256)] == ["tf32x3", "tf32x3", "ieee", "ieee"]
    assert found(64, 7) == "ieee" and found(64, 9, interpret=True) == "ieee"
    assert found(64, 7, dtype=torch.float16) == found(256, 9, dtype=torch.bfloat16) == "16 bits"


@pytest.mark.parametrize("major, interpret, dtype, kind", [
    (9, False, torch.float16, "16 bits, Hopper"), (8, False, torch.float16, "16 bits"),
    (10, False, torch.bfloat16, "16 bits"), (9, True, torch.float16, "16 bits"), (9, False, torch.float32, "tf32x3"),
])  # fmt: skip
def test_which_tiles_fused_takes_where(major, interpret, dtype, kind, monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: (major, 0))
    monkeypatch.setattr(triton.knobs.runtime, "interpret", interpret)
    assert fwd_0_fused.kind_of_tiles(torch.empty(1, 1, 7, 64, dtype=dtype)) == kind and kind in fwd_0_fused.TILES


@pytest.mark.gpu
@pytest.mark.parametrize("D", [64, 128])
def test_float32_is_as_exact_on_tensor_cores_as_without(D, changed):
    got, want = float32_results(fwd_0_fused.forward, bwd_0_fused.backward, 2000, D)
    assert all(e < 0.5 * want.tolerance[name] for name, e in error.errors(got, want).items())
    got, _ = float32_results(flash.forward, flash.backward, 2000, D)
    assert not error.failures(got, want)
    rounded = changed(fwd_0_fused, "else dot_precision(q)  #", 'else "tf32"  #')
    worse, _ = float32_results(rounded.forward, bwd_0_fused.backward, 2000, D)
    assert error.failures(worse, want), "tf32 has 11 bits, which must not be enough"


def random(*shape, dtype=torch.float32):
    rng = torch.Generator().manual_seed(sum(shape))
    return torch.randn(*shape, generator=rng).to(engine.device, dtype).requires_grad_()


@pytest.mark.parametrize("D, dtype, rung", [
    *((D, dtype, None) for D in (1, 128, 256) for dtype in step03.SUPPORTS["dtypes"]),
    *((D, torch.float16, rung) for D in (72, 128) for rung in ("tma", "flash")),
], ids=str)  # fmt: skip
def test_head_dims(D, dtype, rung):
    """Queries and keys are alike, so that a score is a sum of D squares. At some D left factors stay in registers."""
    if rung == "tma" and rung not in step03.RUNGS:
        pytest.skip("needs a Hopper GPU, or none")
    N = 20 if rung is None else 70
    q, k, v, dout = (random(1, 1, N, D, dtype=dtype).detach() * (1 + i / 8) for i in range(4))
    assert not error.failures(forward_and_backward(q, k, v, dout, rung), error.expected(q, k, v, dout, causal=True))


@pytest.mark.parametrize("rung", ["fused", "tma", "roles"])
@pytest.mark.parametrize("Nq, Nk", [(0, 3), (3, 0)])
def test_a_kernel_alone_takes_no_query_and_no_key(rung, Nq, Nk):
    forward, backward = rungs.RUNGS[rung]
    q, k = (torch.ones(1, 1, n, 16, dtype=torch.float16, device=engine.device) for n in (Nq, Nk))
    out, lse = forward(q, k, k)
    assert (out == 0).all() and (lse == -torch.inf).all()
    for grad, x in zip(backward(q, q, k, k, out, lse), (q, k, k), strict=True):
        assert grad.shape == x.shape and (grad == 0).all()


def forward_and_backward(q, k, v, dout, rung, causal=True):
    """{name: result} of a rung by the stage's functions, or of flash.py."""
    stage, options = (flash, {}) if rung == "flash" else (step03, {"rung": rung})
    out, lse = stage.forward(q, k, v, causal=causal, **options)
    grads = stage.backward(dout, q, k, v, out, lse, causal=causal, **options)
    return dict(zip(error.NAMES, (out, lse, *grads), strict=True))


every_kernel = pytest.mark.parametrize("rung", [*step03.SUPPORTS["rungs"], "flash"])


@every_kernel
def test_a_single_key_gets_all_of_the_gradient_at_huge_scores(rung):
    """P is 1 for the only key. Without what `in_base_2` takes off, rounding makes it 0 for some of these queries."""
    q = random(1, 1, 40, 32, dtype=torch.float16).detach().clamp(-2, 2) * 16384
    k, v = q[:, :, :1].abs(), random(1, 1, 1, 32, dtype=torch.float16).detach()
    dout = torch.ones_like(q)
    got = forward_and_backward(q, k, v, dout, rung, causal=False)
    torch.testing.assert_close(got["out"], v.expand_as(q), rtol=2e-3, atol=0)
    torch.testing.assert_close(got["dv"], torch.full_like(v, 40), rtol=2e-3, atol=0)


@every_kernel
def test_a_single_key_gets_all_of_the_gradient_where_four_roundings_add_up(rung):
    """With 2^-23 or 2^-24 in the place of the 2^-22 that `in_base_2` takes off, P is less than 1 for these queries."""
    q, k, scale, lse = scores_whose_roundings_add_up(32, torch.float16)
    q, k, lse = (x.to(engine.device) for x in (q, k, lse))
    v = random(1, 1, 1, 32, dtype=torch.float16).detach()
    stage, options = (flash, {}) if rung == "flash" else (step03, {"rung": rung})
    dq, dk, dv = stage.backward(torch.ones_like(q), q, k, v, v.expand_as(q), lse, scale=scale, **options)
    torch.testing.assert_close(dv, torch.full_like(v, 40))


@every_kernel
def test_a_second_batch_entry_or_head_that_is_not_aligned(rung):
    """Each begins at an odd number of elements after the first, where a descriptor cannot point.

    q, k, v and dout have strides of their own: one that is read with another's strides gives other numbers.
    """
    for larger in (0, 1):  # the dimension, batch or heads, of the larger stride
        inputs = []
        for n, row in enumerate((33, 35, 37, 39)):
            head = 9 * row + 2 * n
            strides = (2 * head, head, row, 1) if larger == 0 else (head, 2 * head, row, 1)
            inputs.append(random(1600, dtype=torch.float16).detach().roll(n).as_strided((2, 2, 9, 32), strides))
        assert not error.failures(forward_and_backward(*inputs, rung), error.expected(*inputs, causal=True))


# Without a causal mask and with Nk a multiple of 128 rung roles gives its warps roles; the others are its other ways.
WAYS_OF_ROLES = [(130, 256, False), (1, 128, False), (130, 200, False), (130, 128, True)]


@pytest.mark.parametrize("Nq, Nk, causal", WAYS_OF_ROLES)
@pytest.mark.parametrize("D", [72, 128])
def test_every_way_of_rung_roles(Nq, Nk, causal, D):
    """The interpreter ignores roles, but takes the way with one loop."""
    q, k, v = (random(1, 1, N, D, dtype=torch.float16).detach() for N in (Nq, Nk, Nk))
    if "roles" not in step03.RUNGS:
        pytest.skip("needs a Hopper GPU, or none")
    with unwritten_is_nan():
        out, lse = step03.forward(q, k, v, causal=causal, rung="roles")
    want = error.expected(q, k, v, q, causal=causal)
    assert not error.failures({"out": out, "lse": lse}, want)


@pytest.mark.parametrize("rung", step03.RUNGS)
def test_heads_that_do_not_fit(rung):
    """A kernel would read beyond k and v."""
    forward, backward = rungs.RUNGS[rung]
    q = torch.zeros(1, 4, 5, 16, dtype=torch.float16, device=engine.device)
    for Hk in (3, 8, 0):
        k = q.new_zeros(1, Hk, 5, 16)
        for call in (lambda k=k: forward(q, k, k), lambda k=k: backward(q, q, k, k, q, q[..., 0].float())):
            with pytest.raises(ValueError, match="H must be a multiple of Hk; got q .1, 4, 5, 16. and k"):
                call()


def test_which_rungs_a_gpu_has():
    assert tuple(rungs.available((9, 0))) == ("gluon", "tma", "roles", "fused")
    assert tuple(rungs.available(None)) == ("fused", "tma", "roles")
    for capability in ((7, 5), (8, 0), (8, 9), (10, 0), (12, 0)):
        assert tuple(rungs.available(capability)) == ("fused",)
    sixteen_bits = (torch.float16, torch.bfloat16)
    for capability in (None, (8, 0), (9, 0), (12, 0)):
        assert rungs.taken(capability) == ((torch.float32, *sixteen_bits), range(1, 257))
    assert rungs.taken((7, 5)) == ((torch.float32,), range(1, 129))


@pytest.mark.parametrize("D, dtype, rung", [
    (128, torch.bfloat16, "gluon"), (64, torch.bfloat16, "gluon"), (72, torch.float16, "gluon"),
    (256, torch.float16, "gluon"), (56, torch.bfloat16, "tma"), (71, torch.float16, "tma"),
    (129, torch.bfloat16, "tma"), (1, torch.float16, "tma"),
    (64, torch.float32, "fused"), (128, torch.float32, "fused"),
])  # fmt: skip
def test_the_rung_that_a_hopper_gpu_picks(D, dtype, rung):
    kernels = rungs.available((9, 0))
    supports = step03.SUPPORTS | {"rungs": tuple(kernels), "limits": rungs.LIMITS, "elsewhere": {}}
    for direction in (0, 1):
        kernel, _ = pick(kernels, supports, None, direction, torch.empty(1, 1, 1, D, dtype=dtype))
        assert kernel is kernels[rung][direction]


def test_a_hopper_gpu_picks_a_rung_that_has_the_tile():
    """Gluon, the first rung, has a tile of its own only. It refuses those that no rung has."""
    kernels = rungs.available((9, 0))
    supports = step03.SUPPORTS | {"rungs": tuple(kernels), "limits": rungs.LIMITS, "elsewhere": {}}
    q = torch.empty(1, 1, 8, 128, dtype=torch.bfloat16)
    for direction in (0, 1):
        for tile in supports["tiles"]:
            kernel, own = pick(kernels, supports, None, direction, q, tile=list(tile))
            assert kernel is kernels["tma"][direction] and check_tile(own, list(tile), 64) == tile
        for tile in ((128, 64), (7, 7), 5):
            assert pick(kernels, supports, None, direction, q, tile=tile)[0] is kernels["gluon"][direction]
    slow = {"gluon": rungs.LIMITS["gluon"] | {"best": lambda q, direction: False}, "tma": {"tiles": ((128, 64),)}}
    kernel, _ = pick(kernels, supports | {"limits": rungs.LIMITS | slow}, None, 0, q, tile=(128, 64))
    assert kernel is kernels["tma"][0], "of two rungs with the tile the one that is faster"
    del slow["tma"]
    kernel, _ = pick(kernels, supports | {"limits": rungs.LIMITS | slow}, None, 0, q, tile=(128, 64))
    assert kernel is kernels["gluon"][0], "the only one with the tile, even if others are faster"


def test_a_rung_is_picked_for_a_vector_too_which_is_refused_afterwards():
    kernels = rungs.available((9, 0))
    supports = step03.SUPPORTS | {"rungs": tuple(kernels), "limits": rungs.LIMITS, "elsewhere": {}}
    assert callable(pick(kernels, supports, None, 0, torch.empty(128, dtype=torch.bfloat16))[0])


@pytest.mark.parametrize("D, deterministic, module", [(128, False, bwd_2_gluon), (128, True, bwd_1_tma),
                                                      (136, False, bwd_1_tma)])  # fmt: skip
def test_which_backward_rung_gluon_has(monkeypatch, D, deterministic, module):
    """Tensors by position or by name; the forward's tile goes to neither of the two."""
    def backward(*tensors, **options):
        return len(tensors), options

    backward.first = backward
    monkeypatch.setattr(module, "backward", backward)
    dout = torch.empty(1, 1, 1, D)
    for call in (rungs.backward_of_gluon, rungs.backward_of_gluon.first):
        assert call(dout, dout, tile=(192, 128), deterministic=deterministic, causal=True) == (2, {"causal": True})
        assert call(dout=dout, q=dout, deterministic=deterministic)[1].keys() == {"q"}


def test_what_gluon_refuses():
    with pytest.raises(ValueError, match="rung gluon needs a Hopper GPU|takes float16"):
        fwd_3_gluon.forward(*torch.zeros(3, 1, 1, 4, 64))


# (rung, compute capability, dtype, head_dim, causal)
SOME = [
    ("fused", 80, "bfloat16", 128, True), ("tma", 90, "bfloat16", 128, True), ("roles", 90, "bfloat16", 128, False),
    ("gluon", 90, "bfloat16", 128, True), ("fused", 90, "float32", 64, True),
]  # fmt: skip
ALL = [
    *(("fused", capability, dtype, D, True) for capability in (80, 86, 89, 90, 120)
      for dtype in ("float32", "float16", "bfloat16") for D in (64, 128, 256)),
    *(("fused", 75, "float32", D, True) for D in (64, 128)),
    *((rung, 90, dtype, D, causal) for rung in ("tma", "gluon") for dtype in ("float16", "bfloat16")
      for D in (64, 128) for causal in (False, True)),
    *((rung, 90, "bfloat16", 256, causal) for rung in ("tma", "gluon") for causal in (False, True)),
    *(("roles", 90, dtype, 128, causal) for dtype in ("float16", "bfloat16") for causal in (False, True)),
]  # fmt: skip
SHARED_KB = {75: 64, 80: 163, 86: 99, 89: 99, 90: 227, 120: 99}  # what a block can have
FEW_BYTES = 40  # bytes of registers that a thread may spill
# Kernels that spill more, and are faster so than with a smaller tile. Without tensor cores ("ieee") float32 wants large
# tiles, and with them (float32) a product needs registers for two parts of each factor.
SPILLS = {("fused", "ieee", 64): 3700, ("fused", "ieee", 128): 300, ("fused", "float32", 128): 110,
          ("fused", "bfloat16", 128): 220, ("fused", "float16", 128): 220,
          ("fused", "bfloat16", 256): 450, ("fused", "float16", 256): 450,
          ("tma", "bfloat16", 128): 100, ("tma", "float16", 128): 100, ("tma", "bfloat16", 256): 400,
          ("gluon", "bfloat16", 64): 200, ("gluon", "float16", 64): 200}  # fmt: skip
# Rung gluon's backward: bytes that it may spill before and after its steps, and words in every step, by head_dim.
AROUND, IN_A_STEP = 100, {64: 3, 128: 0}

# Programs that share a multiprocessor, so that one multiplies while another computes its softmax. It is the budget of
# registers and shared memory; 2 where nothing is said. What has roles needs one, because its warps do that themselves.
PROGRAMS = {("tma", "forward_kernel", 64): 3, ("tma", "dq_kernel", 64): 3, ("fused", "forward_kernel", 128): 1}


@pytest.fixture(scope="module", autouse=True)
def compiler():
    """The process that compiles SOME of the kernels while the tests run here."""
    process = compile_triton.start(compile_triton.__file__, SOME)
    yield process
    process.kill()


@pytest.fixture(scope="module")
def compiled(compiler):
    """What SOME of the kernels compile to, by (rung, compute capability, kernel)."""
    return {(row["rung"], row["capability"], row["kernel"]): row for row in compile_triton.rows_of(compiler)}


def check_compiled(row):
    """Fails unless a kernel fits its GPU, multiplies on tensor cores and, on Hopper, is not serialised by ptxas."""
    limit = SPILLS.get((row["rung"], "ieee" if row["capability"] < 80 else row["dtype"], row["D"]), FEW_BYTES)
    assert row["shared"] <= SHARED_KB[row["capability"]] * 1024, row
    assert not row["serialised"], row
    if triton.__version__ == PINNED:  # Other versions spill a few registers more or less.
        if (row["rung"], row["kernel"]) == ("gluon", "backward_kernel"):
            limit = AROUND
            assert row["spilled_in_a_step"] <= IN_A_STEP[row["D"]], row
        assert row["spilled"] <= limit, row
    if row["kernel"] in ("delta_kernel", "dq_kernel") or row["capability"] < 80:
        return
    if row["capability"] in (80, 90) and row["D"] <= 128:
        block = {name: row[name] for name in ("threads", "shared", "registers")}
        programs = cost.occupancy(divmod(row["capability"], 10), **block)
        wanted = 1 if row["setmaxnreg"] else PROGRAMS.get((row["rung"], row["kernel"], row["D"]), 2)
        assert programs.blocks >= wanted, (programs, row)
    if row["dtype"] == "float32":  # Above head_dim 128 no tensor core multiplies it.
        assert (row["wgmma.mma_async"] + row["mma.sync"] > 0) == (row["D"] <= 128), row
        if (row["kernel"], row["D"]) == ("forward_kernel", 64):
            # In two loops a thread makes 16 numbers of P and adds to 32 of O. Blackwell's instruction computes two.
            together = 2 if row["capability"] >= 100 else 1
            assert row["fma.rn.f32"] * together >= 2 * (16 + 32), "a tensor core adds to O itself, and truncates"
        return
    small = row["rung"] == "fused" and row["D"] > 128  # tiles with too few rows for wgmma, and no room to copy ahead
    if small:
        assert row["wgmma.mma_async"] + row["mma.sync"] > 0, row
    else:
        used, unused = ("wgmma.mma_async", "mma.sync")[:: 1 if row["capability"] == 90 else -1]
        assert row[used] > 0 and row[unused] == 0, row
    if not small:
        assert row["cp.async.cg" if row["rung"] == "fused" else "cp.async.bulk.tensor"] > 0, row


@pytest.mark.parametrize(
    "rung, capability, kernel",
    [("fused", 80, "forward_kernel"), ("fused", 80, "dkdv_kernel"), ("fused", 80, "dq_kernel"),
     ("fused", 90, "forward_kernel"),
     ("tma", 90, "forward_kernel"), ("tma", 90, "dkdv_kernel"), ("tma", 90, "dq_kernel"),
     ("roles", 90, "forward_kernel"), ("gluon", 90, "forward_kernel"), ("gluon", 90, "backward_kernel")],
)  # fmt: skip
def test_what_the_kernels_compile_to(compiled, rung, capability, kernel):
    row = compiled[rung, capability, kernel]
    check_compiled(row)
    assert (row["setmaxnreg"] > 0) == (rung in ("roles", "gluon")), "a warp's role decides how many registers it gets"
    if (rung, kernel) == ("gluon", "backward_kernel") and triton.__version__ == PINNED:
        assert row["bar.sync"] <= 9, "the warps meet three times a step, and three times at the end"


@pytest.mark.long
def test_everything_compiles_for_every_gpu():
    rows = compile_triton.in_a_process(compile_triton.__file__, ALL)
    assert {(row["rung"], row["capability"], row["dtype"], row["D"], row["causal"]) for row in rows} == set(ALL)
    for row in rows:
        check_compiled(row)


@pytest.mark.gpu
@pytest.mark.skipif("gluon" not in step03.SUPPORTS["rungs"], reason="needs a Hopper GPU")
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize(
    "H, Hk, Nq, Nk, D",
    [(2, 2, 384, 384, 64), (4, 2, 575, 193, 64), (2, 1, 1, 500, 48), (1, 1, 300, 9, 8), (4, 2, 300, 500, 128),
     (2, 2, 500, 300, 256)],
)  # fmt: skip
def test_programs_of_several_tiles_in_gluon(monkeypatch, H, Hk, Nq, Nk, D, dtype, causal):
    """With three consumers up to head_dim 64, also at lengths at which a call does not pick them by itself."""
    monkeypatch.setattr(fwd_3_gluon, "programs_for", lambda device, tiles: min(tiles, 3))
    q, k, v = (torch.randn(2, h, N, D, device="cuda", dtype=dtype) for h, N in ((H, Nq), (Hk, Nk), (Hk, Nk)))
    tile = (192, 128) if D <= 64 else None
    got = dict(zip(("out", "lse"), fwd_3_gluon.forward(q, k, v, causal=causal, tile=tile), strict=True))
    assert not error.failures(got, error.expected(q, k, v, q, causal=causal))


@pytest.mark.gpu
@pytest.mark.parametrize("rung", step03.SUPPORTS["rungs"])
@pytest.mark.parametrize("shape", [(2, 1, 2**25, 64), (1, 1, 2**7, 2**25)], ids=["batch", "row"])
def test_more_than_2_to_the_31_elements(shape, rung):
    """2^32 elements: the second batch entry, or the rows from 64 on, begin 2^31 or more elements after the first."""
    x = torch.empty(shape, dtype=torch.float16, device="cuda")[:, :, :70, :64]
    x.copy_(random(*shape[:2], 70, 64).detach())
    got = forward_and_backward(x, x, x, x, rung)
    assert not error.failures(got, error.expected(x, x, x, x, causal=True))


@pytest.mark.gpu
@pytest.mark.multigpu
def test_a_device_that_is_not_the_current_one():
    random_tensors = random(1, 2, 40, 64), random(1, 2, 41, 64), random(1, 2, 42, 64)[:, :, 1:]
    q, k, v = (x.detach().to("cuda:1") for x in random_tensors)
    assert torch.cuda.current_device() == 0
    out, lse = step03.forward(q, k, v)
    got = dict(zip(error.NAMES, (out, lse, *step03.backward(q, q, k, v, out, lse)), strict=True))
    assert not error.failures(got, error.expected(q, k, v, q))
    assert torch.cuda.current_device() == 0


@pytest.mark.gpu
@pytest.mark.parametrize("rung", step03.SUPPORTS["rungs"])
def test_a_cuda_graph_replays_it(rung):
    inputs = [random(1, 2, 300, 128, dtype=torch.float16).detach() * (1 + i / 8) for i in range(4)]
    forward_and_backward(*inputs, rung)  # compiles
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        replayed = forward_and_backward(*inputs, rung)
    for x in inputs:
        x.copy_(torch.randn_like(x))
    graph.replay()
    q, k, v, dout = inputs
    assert not error.failures(replayed, error.expected(q, k, v, dout, causal=True))


@pytest.mark.gpu
@pytest.mark.parametrize("rung", step03.SUPPORTS["rungs"])
def test_it_runs_on_the_current_stream(rung):
    """On another stream than its input's, a kernel would read what has not been written yet."""
    inputs = [random(1, 2, 300, 128, dtype=torch.float16).detach() for _ in range(4)]
    forward_and_backward(*inputs, rung)  # compiles
    stream, late = torch.cuda.Stream(), [torch.zeros_like(x) for x in inputs]
    torch.cuda.synchronize()
    with torch.cuda.stream(stream):
        torch.cuda._sleep(20_000_000)  # about 10 ms
        for x, y in zip(late, inputs, strict=True):
            x.copy_(y)
        got = forward_and_backward(*late, rung)
    stream.synchronize()
    assert not error.failures(got, error.expected(*inputs, causal=True))


def test_a_recording_tells_a_tensor_apart_that_is_given_twice():
    """The first call's dout is its q. The second call has the same key, and another dout."""
    q, k, v, dout = torch.randn(4, 1, 2, 20, 16, device=engine.device)
    out, lse = fwd_0_fused.forward(q, k, v)
    bwd_0_fused.backward.clear()
    want = bwd_0_fused.backward(dout.clone(), q, k, v, out, lse)
    bwd_0_fused.backward.clear()
    bwd_0_fused.backward(q, q, k, v, out, lse)
    got = bwd_0_fused.backward(dout, q, k, v, out, lse)
    assert all(torch.equal(x, y) for x, y in zip(got, want, strict=True))
