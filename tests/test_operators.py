"""The stages as operators of torch: torch.compile, torch.export, fake tensors; what reaches a kernel on each way."""

import functools
import inspect
import math

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils.checkpoint import checkpoint

import steps.step00_naive as step00
import steps.step01_fa1_numba as step01
import steps.step02_fa2_cuda as step02
import steps.step03_triton as step03
import steps.step04_ring as step04
from steps import checks, contract, engine
from steps.step02_fa2_cuda import emulator
from steps.step03_triton.features import TENSORS

no_compiler = pytest.mark.skipif(engine.name == "cpu" and not emulator.available(), reason="there is no g++")
STAGES = [pytest.param(stage, id=stage.SUPPORTS["stage"]) for stage in (step00, step01, step03)]
STAGES.insert(2, pytest.param(step02, id="step02_fa2_cuda", marks=no_compiler))
every_stage = pytest.mark.parametrize("stage", STAGES)
with_the_ring = pytest.mark.parametrize("stage", [*STAGES, pytest.param(step04, id="step04_ring")])


@pytest.fixture(autouse=True)
def forget_what_was_compiled():
    torch._dynamo.reset()


def example(N=5, count=3, D=32, H=1):
    """Tensors (1, H, N, D) that require gradients."""
    rng = torch.Generator().manual_seed(N)
    return [torch.randn(1, H, N, D, generator=rng).to(engine.device).requires_grad_() for _ in range(count)]


def gradients(function, *tensors):
    """(out, dq, dk, dv) for dout = out."""
    out = function(*tensors)
    return out, *torch.autograd.grad(out, tensors, out.detach())


def same(got, want):
    for x, y in zip(got, want, strict=True):
        torch.testing.assert_close(x, y, atol=1e-6, rtol=1e-5)
        assert x.requires_grad == y.requires_grad


def operators(stage):
    name = stage.SUPPORTS["stage"]
    return getattr(torch.ops.steps, f"{name}_forward"), getattr(torch.ops.steps, f"{name}_backward")


@every_stage
def test_opcheck(stage):
    forward, backward = operators(stage)
    q, k, v = example()
    torch.library.opcheck(forward, (q, k, v), {"causal": True, "scale": 0.3})
    out, lse = forward(q, k, v)
    assert out.requires_grad and not lse.requires_grad  # there is no gradient through lse
    q, k, v = (x.detach() for x in (q, k, v))
    out, lse = stage.forward(q, k, v)
    torch.library.opcheck(backward, (q, q, k, v, out, lse))


@every_stage
def test_compile_and_autocast_give_the_same(stage):
    def attend(q, k, v):
        return stage.attention(q * 2, k, v, causal=True, scale=0.3).sin()

    tensors = example()
    want, compiled = gradients(attend, *tensors), torch.compile(attend, fullgraph=True, backend="aot_eager")
    same(gradients(compiled, *tensors), want)
    with torch.autocast(engine.device, torch.bfloat16):
        same(gradients(attend, *tensors), want)
        same(gradients(compiled, *tensors), want)


@every_stage
def test_forward_and_backward_are_compiled_too(stage):
    def both(dout, q, k, v):
        out, lse = stage.forward(q, k, v, scale=0.3)
        return out, lse, *stage.backward(dout, q, k, v, out, lse, scale=0.3)

    tensors = example(count=4)
    same(torch.compile(both, fullgraph=True, backend="eager")(*tensors), both(*tensors))


@every_stage
def test_one_graph_serves_every_size(stage):
    graphs = []

    def count(graph, inputs):
        graphs.append(graph)
        return graph

    attend = torch.compile(stage.attention, fullgraph=True, dynamic=True, backend=count)
    for N in (5, 6, 9):
        q, *_ = example(N)
        _, k, v = example(N + 3)
        same([attend(q, k, v, causal=True, scale=0.3)], [stage.attention(q, k, v, causal=True, scale=0.3)])
    assert len(graphs) == 1


def packed(n):
    """Two packed sequences, (cu_seqlens, max_seqlen), in a call of 5 rows."""
    starts = torch.tensor([0, 2, 5], dtype=torch.int32, device=engine.device)
    return {"cu_seqlens_q": starts, "cu_seqlens_k": starts, "max_seqlen_q": 3, "max_seqlen_k": 3} | n


# For each option that is a number, the options of call n.
NUMBERS = {
    "scale": lambda n: {"scale": 0.1 + n / 9},
    "window": lambda n: {"window": (n % 4, n)},
    "softcap": lambda n: {"softcap": 0.5 + n / 5},
    "dropout_p": lambda n: {"dropout_p": 0.1 + n / 20, "seed": 5},
    "seed": lambda n: {"dropout_p": 0.4, "seed": n - 3},
    "first_query": lambda n: {"first_query": n - 4, "causal": True},
    "first_key": lambda n: {"first_key": n - 12, "first_query": -7, "causal": True},  # 0 is the default, and no feature
    "max_seqlen_q": lambda n: packed({"max_seqlen_q": 3 + n}),
    "max_seqlen_k": lambda n: packed({"max_seqlen_k": 3 + n}),
}
NO_NUMBERS = {"q", "k", "v", "lacking", "causal", "tile", "rung", "deterministic", "check"} | {*TENSORS} - {"seed"}
# Each way of reading a number is once in the short suite: a pair, a length, a float of stage 03 and of another stage.
SHORT = {("window", "step03_triton"), ("max_seqlen_q", "step03_triton"), ("softcap", "step03_triton"),
         ("scale", "step00_naive")}  # fmt: skip
CALLS = [
    pytest.param(*stage.values, name, id=f"{name}-{stage.id}",
                 marks=[*stage.marks, *([] if (name, stage.id) in SHORT else [pytest.mark.long])])
    for stage in STAGES for name in inspect.signature(stage.values[0].attention).parameters if name not in NO_NUMBERS
]  # fmt: skip


@pytest.mark.parametrize("stage, name", CALLS)
def test_one_graph_serves_every_number(stage, name):
    """The first call's number is a constant of its graph, and a second graph serves all others."""

    def both(dout, q, k, v, given):
        of_two = {"seed": 5} | given if "dropout_p" in given else given
        out, lse = stage.forward(q, k, v, **of_two)
        return stage.attention(q, k, v, **given), lse, *stage.backward(dout, q, k, v, out, lse, **of_two)

    torch._dynamo.utils.counters.clear()
    compiled, tensors = torch.compile(both, fullgraph=True, backend="aot_eager"), example(count=4)
    results = {n: compiled(*tensors, NUMBERS[name](n)) for n in (0, 1, 2, 11)}
    for n in (1, 11):
        want = both(*tensors, NUMBERS[name](n))
        same(results[n], want)
        same(*(torch.autograd.grad(out[0].sum(), tensors[1:]) for out in (results[n], want)))
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] <= 2
    assert name.startswith("max_seqlen") or not torch.equal(results[1][0], results[11][0]), "the number does not matter"


@every_stage
def test_a_bad_number_is_refused_where_the_graph_serves_every_number(stage):
    compiled = torch.compile(stage.attention, fullgraph=True, backend="aot_eager")
    for scale in (0.3, 0.4, 0.5):
        compiled(*example(), scale=scale)
    for bad in (-0.3, 1e-40, math.inf):
        with pytest.raises(Exception, match="scale must be a finite number"):
            compiled(*example(), scale=bad)


def test_batches_of_packed_sequences_share_a_graph():
    def attend(q, given):
        return step03.attention(q, q, q, causal=True, **given)

    torch._dynamo.utils.counters.clear()
    compiled = torch.compile(attend, fullgraph=True, backend="aot_eager")
    for n in range(4):
        starts = torch.tensor([0, 5 + n, 12 + 2 * n], dtype=torch.int32, device=engine.device)
        given = {"cu_seqlens_q": starts, "cu_seqlens_k": starts, "max_seqlen_q": 7 + n, "max_seqlen_k": 7 + n}
        (q,) = example(12 + 2 * n, count=1)
        same([compiled(q, given)], [attend(q, given)])
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] <= 2


def longest(starts):
    return int((starts[1:] - starts[:-1]).max().item())


READ = {  # options from numbers in a tensor, which are not known while a call is compiled
    "max_seqlen": lambda x: dict(cu_seqlens_q=x, cu_seqlens_k=x, max_seqlen_q=longest(x), max_seqlen_k=longest(x)),
    "positions": lambda x: {"causal": True, "first_query": x[2].item(), "first_key": x[1].item()},
    "window": lambda x: {"window": (x[1].item(), x[0].item())},
    "seed": lambda x: {"dropout_p": 0.4, "seed": x[2].item()},
}  # fmt: skip


@pytest.mark.parametrize("name", READ)
def test_numbers_that_are_read_from_a_tensor(name):
    def attend(q, starts):
        return step03.attention(q, q, q, **READ[name](starts))

    with torch._dynamo.config.patch(capture_scalar_outputs=True):
        compiled, (q,) = torch.compile(attend, fullgraph=True, backend="aot_eager"), example(count=1)
        for numbers in ((0, 2, 5), (0, 4, 5)):
            starts = torch.tensor(numbers, dtype=torch.int32, device=engine.device)
            want, got = (function(q, starts) for function in (attend, compiled))
            same([got, *torch.autograd.grad(got.sum(), q)], [want, *torch.autograd.grad(want.sum(), q)])


@pytest.mark.parametrize("name, bad, words", [
    ("max_seqlen_q", -1, "at least 0 and less than 268435456; got -1"),
    ("first_key", 2**28, "at least -268435456 and less than 268435456; got 268435456"),
    ("window", -2, "integers >= -1 or None; got .-2, 0"),
])  # fmt: skip
def test_a_number_that_is_read_from_a_tensor_is_checked_when_the_program_runs(name, bad, words):
    def attend(q, starts, numbers):
        given = {"cu_seqlens_q": starts, "cu_seqlens_k": starts, "max_seqlen_q": 3, "max_seqlen_k": 3}
        number = numbers.max().item()  # Of a tensor that is an argument it would be a constant of the program.
        return step03.attention(q, q, q, **given | {name: (number, 0) if name == "window" else number})

    (q,), starts = example(count=1), torch.tensor([0, 2, 5], dtype=torch.int32, device=engine.device)
    with torch._dynamo.config.patch(capture_scalar_outputs=True):
        compiled = torch.compile(attend, fullgraph=True, backend="aot_eager")
        compiled(q, starts, torch.tensor([3]))
        with pytest.raises(ValueError, match=f"^{name} must be .*{words}"):
            compiled(q, starts, torch.tensor([bad]))


@every_stage
def test_export(stage):
    class Model(torch.nn.Module):
        def forward(self, q, k, v):
            return stage.attention(q, k, v, causal=True)

    N = torch.export.Dim("N", min=2, max=64)
    exported = torch.export.export(Model(), tuple(example()), dynamic_shapes=[{2: N}] * 3).module()
    tensors = [x.detach() for x in example(9)]
    same([exported(*tensors)], [stage.attention(*tensors, causal=True)])


@every_stage
def test_a_mode_of_torch_sees_one_operator(stage):
    q, k, v = (x.detach() for x in example())
    nodes = make_fx(lambda *x: stage.attention(*x))(q, k, v).graph.nodes
    assert sum(node.target is operators(stage)[0].default for node in nodes) == 1


@every_stage
@pytest.mark.parametrize("shape", [(1, 2, 7, 32), (2, 7, 32), (7, 32), (0, 2, 7, 32)], ids=len)
def test_fake_tensors_give_fake_results(stage, shape):
    with FakeTensorMode():
        turned = *shape[:-2], shape[-1], shape[-2]  # Whatever the inputs' strides are, results are contiguous.
        q, k, v = (torch.empty(turned, device=engine.device).mT.requires_grad_() for _ in range(3))
        out = stage.attention(q, k, v)
        grads = torch.autograd.grad(out, (q, k, v), out)
    outside = stage.attention(q, k, v)
    for x in (out, outside, *grads):
        assert type(x) is type(q) and (x.shape, x.dtype, x.device) == (q.shape, q.dtype, q.device)
        assert x.is_contiguous()


@every_stage
def test_fake_tensors_are_refused_beside_real_ones(stage):
    with FakeTensorMode():
        q, k, v = (torch.empty(1, 1, 7, 32, device=engine.device) for _ in range(3))
        out, lse = stage.forward(q, k, v)
        assert [x.shape for x in stage.backward(q, q, k, v, out, lse)] == [q.shape, k.shape, v.shape]
    real, _, _ = example(7)
    with pytest.raises(TypeError) as refused:
        stage.backward(real, real, real, real, real, lse)
    assert str(refused.value) == FAKE


class Elsewhere(torch.Tensor):
    """A tensor that has no memory, as those of many libraries."""

    @staticmethod
    def __new__(cls, x):
        return torch.Tensor._make_wrapper_subclass(cls, x.shape, dtype=x.dtype, device=x.device)

    @classmethod
    def __torch_dispatch__(cls, function, types, arguments=(), options=None):
        raise NotImplementedError(function)


def spread(x):
    """A DTensor, for which a mesh of one rank is enough."""
    from torch.distributed.tensor import DeviceMesh, DTensor, Shard

    mesh = DeviceMesh(engine.device, [0], _init_backend=False, _rank=0)
    return DTensor.from_local(x, mesh, [Shard(1)], run_check=False)


PADDED = "q must be a dense tensor, got a nested one. Convert it with .to_padded_tensor(0.0)."
FAKE = ("this FakeTensor has no memory that a kernel can read: it has a shape, but no numbers. The stages 00 to 03 "
        "take it where q is fake, too.")  # fmt: skip
WITHOUT_MEMORY = {  # {a kind of tensor: (how it is made, what is said of it)}
    "fake": (lambda x: FakeTensorMode().from_tensor(x), FAKE),
    "DTensor": (spread, "this DTensor has no memory that a kernel can read: its numbers are spread over the ranks "
                "of a device mesh. Give this rank's part, x.to_local()."),
    "subclass": (Elsewhere, "this Elsewhere has no memory that a kernel can read: it is a subclass of torch.Tensor "
                 "whose numbers lie elsewhere. Give the tensor that it stands for."),
    "sparse": (torch.Tensor.to_sparse, "q must be a dense tensor, got sparse_coo. Convert it with q.to_dense()."),
    "quantised": (lambda x: torch.quantize_per_tensor(x.cpu(), 0.1, 0, torch.qint8),
                  "q must be a dense tensor, got a quantised one. Convert it with q.dequantize()."),
    "nested": (lambda x: torch.nested.nested_tensor([x[0], x[0]]), PADDED),
    "jagged": (lambda x: torch.nested.nested_tensor([x[0], x[0]], layout=torch.jagged), PADDED),
    "meta": (lambda x: x.to("meta"), " in this process; the tensors are on meta. Move them with .to(...), or start "
             "Python with STEPS_ENGINE=cpu or STEPS_ENGINE=cuda to choose the engine."),
}  # fmt: skip


@with_the_ring
@pytest.mark.parametrize("kind", WITHOUT_MEMORY)
@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors", "ignore:.*quantiz")
def test_each_kind_of_tensor_without_memory_has_its_own_reason(kind, stage):
    make, words = WITHOUT_MEMORY[kind]
    x = make(torch.ones(1, 1, 7, 32, device=engine.device))
    for call in (stage.forward, stage.attention):
        if kind == "fake" and stage is not step04:
            continue
        with pytest.raises((TypeError, ValueError)) as refused:
            call(x, x, x)
        assert str(refused.value).endswith(words) if kind == "meta" else str(refused.value) == words


@pytest.mark.parametrize("kind", ["DTensor", "subclass"])
def test_a_mask_without_memory_has_the_same_reason(kind):
    make, words = WITHOUT_MEMORY[kind]
    q, mask = torch.ones(1, 1, 7, 32, device=engine.device), make(torch.ones(1, 1, 7, 7, device=engine.device))
    with pytest.raises(TypeError) as refused:
        step03.forward(q, q, q, mask=mask)
    assert str(refused.value) == words


def dual(attend, x):
    with torch.autograd.forward_ad.dual_level():
        attend(torch.autograd.forward_ad.make_dual(x, x))


TRANSFORMS = {
    "grad": lambda attend, x: torch.func.grad(lambda x: attend(x).sum())(x),
    "vjp": lambda attend, x: torch.func.vjp(attend, x)[1](x),
    "vmap": lambda attend, x: torch.vmap(attend)(x[None]),
    "jvp": lambda attend, x: torch.func.jvp(attend, (x,), (x,)),
    "functionalize": lambda attend, x: torch.func.functionalize(attend)(x),
    "forward mode": lambda attend, x: dual(attend, x),
}


@with_the_ring
@pytest.mark.parametrize("transform", TRANSFORMS)
def test_torch_func_is_refused_in_one_sentence(transform, stage):
    x, given = torch.ones(1, 1, 7, 32, device=engine.device), [{}]
    given += [{"softcap": 2.0}] if stage is step03 else []
    calls = [functools.partial(stage.attention, **options) for options in given]
    calls += [lambda *x: stage.forward(*x)[0]] if transform != "forward mode" else []  # It takes no derivative.
    for call in calls:
        with pytest.raises(NotImplementedError) as refused:
            TRANSFORMS[transform](lambda x, call=call: call(x, x, x), x)
        assert str(refused.value) == checks.NO_TRANSFORMS


@with_the_ring
@pytest.mark.parametrize("shape", [(1, 1, 5, 32), (5, 32)], ids=len)
def test_out_can_be_changed_in_place_but_not_before_its_gradient(shape, stage):
    """As with torch's own attention. A view that an autograd.Function returns could not be changed at all."""
    q = torch.ones(shape, device=engine.device, requires_grad=True)
    for options in ({}, {"softcap": 2.0}) if stage is step03 else ({},):
        out = stage.attention(q, q, q, **options)
        out.add_(1)
        assert (out > 1.5).all()
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            out.sum().backward()


NUMBER, FLAG = torch.nn.Parameter(torch.tensor(0.3)), torch.tensor(True)
ONE_LINE = {  # {an option that came as a tensor: what is said of it}
    "scale": (NUMBER, "scale must be a number or None for 1/sqrt(D); got a Parameter of shape (); give what .item() "
              "returns."),
    "tile": (torch.ones(2), "tile must be a pair of integers (Br, Bc), got a Tensor of shape (2,); give what .tolist() "
             "returns."),
    "causal": (FLAG, "causal must be True or False, got a Tensor of shape (); give what .item() returns."),
}  # fmt: skip
OF_FEATURES = {
    "softcap": (NUMBER, "softcap must be a number or None for no cap; got a Parameter of shape (); give what .item() "
                "returns."),
    "window": (torch.ones(2), "window must be None or a pair (left, right) of integers >= -1 or None; got a Tensor of "
               "shape (2,); give what .tolist() returns. (W - 1, 0) is the query's own key and W - 1 before it."),
    "first_key": (NUMBER, "first_key must be an integer; got a Parameter of shape (); give what .item() returns."),
    "check": (FLAG, "check must be True or False, got a Tensor of shape (); give what .item() returns."),
    "dropout_p": (NUMBER, "dropout_p must be a number, 0 <= dropout_p < 1; got a Parameter of shape (); give what "
                  ".item() returns."),
    "cu_seqlens_q": (torch.tensor([0, 7]), f"cu_seqlens_q must be int32 on {engine.device}, where q is; got int64 on "
                     f"{engine.device}. Convert it with cu_seqlens_q.int()."),
}  # fmt: skip


def refusal(call, *tensors, **options):
    with pytest.raises((TypeError, ValueError)) as refused:
        call(*tensors, **options)
    return str(refused.value)


@with_the_ring
@pytest.mark.parametrize("name", ONE_LINE)
def test_a_tensor_in_the_place_of_a_number(name, stage):
    x, (given, words) = torch.ones(1, 1, 7, 32, device=engine.device), ONE_LINE[name]
    assert refusal(stage.forward, x, x, x, **{name: given}) == words


@pytest.mark.parametrize("name", OF_FEATURES)
def test_a_tensor_in_the_place_of_a_features_number(name):
    x, (given, words) = torch.ones(1, 1, 7, 32, device=engine.device), OF_FEATURES[name]
    options = {name: given.to(engine.device)}
    if name == "cu_seqlens_q":
        options |= {"cu_seqlens_k": options[name].int(), "max_seqlen_q": 7, "max_seqlen_k": 7}
    assert refusal(step03.forward, x, x, x, **options) == words


@with_the_ring
@pytest.mark.parametrize("D_v, advice", [(16, "v with zeros, and drop these columns of out"),
                                         (48, "q and k with zeros, and give the scale")])  # fmt: skip
def test_a_head_dim_of_v_of_its_own(D_v, advice, stage):
    x, v = (torch.ones(1, 1, 7, D, device=engine.device) for D in (32, D_v))
    words = "k and v must have the same head_dim, as D_v != D is not supported; got k (1, 1, 7, 32), v (1, 1, 7, "
    assert refusal(stage.forward, x, x, v) == f"{words}{D_v}). Pad {advice}."


@every_stage
def test_bad_input_is_refused_while_it_is_traced(stage):
    with pytest.raises(Exception, match="scale must be a finite number"):
        torch.compile(stage.attention, fullgraph=True, backend="eager")(*example(), scale=-1.0)
    with FakeTensorMode(), pytest.raises(ValueError, match="k and v must have the same shape"):
        stage.attention(*(torch.empty(1, 1, N, 32, device=engine.device) for N in (7, 7, 8)))


@every_stage
def test_a_checkpoint_gives_the_same(stage):
    tensors = example()
    same(
        gradients(lambda *x: checkpoint(stage.attention, *x, use_reentrant=False), *tensors),
        gradients(stage.attention, *tensors),
    )


@pytest.mark.parametrize("Nq, Nk", [(0, 3), (3, 0)])
def test_no_kernel_runs_where_there_is_no_query_or_no_key(Nq, Nk):
    """On a GPU it would be a launch without a block."""
    calls = []
    forward, backward, _ = stub_stage(calls)
    q, k = (torch.ones(1, 1, N, 32, device=engine.device) for N in (Nq, Nk))
    saved = forward(q, k, k)
    assert [x.shape for x in backward(q, q, k, k, *saved)] == [q.shape, k.shape, k.shape] and calls == []


@pytest.mark.parametrize("D", [2, 3])
def test_a_last_dimension_that_is_not_contiguous_is_copied(D):
    x = torch.arange(2.0 * D, device=engine.device).reshape(1, 1, D, 2).mT
    read = contract.as_4d(x)
    assert torch.equal(read, x) and x.stride(-1) == 2 and read.stride(-1) == 1


def stub_stage(calls, limits={}):  # noqa: B006  Nobody changes it.
    """A stage with two rungs whose kernels only write down how they are called."""

    def rung(name):
        def forward(q, k, v, *, causal, scale, tile=None):
            calls.append((name, "forward", causal, scale, tile))
            return torch.zeros_like(q), q.new_zeros(q.shape[:3])

        def backward(dout, q, k, v, out, lse, *, causal, scale, tile=None, deterministic=False):
            calls.append((name, "backward", causal, scale, tile, deterministic))
            return torch.zeros_like(q), torch.zeros_like(k), torch.zeros_like(v)

        return forward, backward

    supports = step00.SUPPORTS | {"stage": "stub", "deterministic": False, "limits": limits}
    return contract.entry_points({"first": rung("first"), "second": rung("second")}, supports)


@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
def test_the_options_reach_both_kernels(compiled):
    calls = []
    _, _, attention = stub_stage(calls)
    attention = torch.compile(attention, fullgraph=True, backend="aot_eager") if compiled else attention
    for options in ({}, {"causal": True, "scale": 0.3, "tile": (8, 16), "rung": "second", "deterministic": True}):
        q, k, v = example()
        attention(q, k, v, **options).sum().backward()
    defaults = "first", False, 1 / math.sqrt(32), None
    given = "second", True, 0.3, (8, 16)
    assert calls == [call for rung, *rest in (defaults, given)
                     for call in ((rung, "forward", *rest), (rung, "backward", *rest, rung == "second"))]  # fmt: skip
    assert all(type(number) is int for call in calls for number in call[4] or ())


@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
def test_a_tile_picks_a_rung_that_has_it(compiled):
    calls = []
    _, _, attention = stub_stage(calls, limits={"first": {"tiles": ((64, 64),)}})
    attention = torch.compile(attention, fullgraph=True, backend="aot_eager") if compiled else attention
    for tile in ((64, 64), (8, 16)):
        attention(*example(), tile=tile).sum().backward()
    assert [(rung, tile) for rung, _, _, _, tile, *_ in calls] == 2 * [("first", (64, 64))] + 2 * [("second", (8, 16))]


def test_an_eager_call_takes_no_operator():
    """An operator would cost 10 microseconds more."""
    q, k, v = example()
    node = step00.attention(q, k, v).grad_fn
    assert type(node).__name__ == "AttentionBackward"
