"""What is checked, planned, kept and handed to the driver; on CPU tensors, with a driver that only takes notes."""

import contextlib
import inspect
import itertools
import math
import re
import weakref
from collections import defaultdict
from ctypes import addressof, c_uint64, c_void_p
from dataclasses import replace
from functools import partial
from types import SimpleNamespace

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.multiprocessing.reductions import StorageWeakRef

from steps import engine
from steps.cached import Cache, key_of
from steps.course.bench.rows import geometry
from steps.step02_fa2_cuda import RUNGS, calls, emulator, ladder, launches, nvrtc, plan, tile_scheduler, wgmma

driver = pytest.importorskip("cuda.bindings.driver", reason="needs cuda-python")
on_cpu = pytest.mark.skipif(engine.name == "cuda", reason="there the driver itself is used")


@pytest.fixture
def launched(monkeypatch):
    """[(the addresses among the arguments, which copies of inputs are alive)], one for each launch."""
    noted, copies, sizes, init = [], [], {}, nvrtc.Launch.__init__

    def noted_init(self, *arguments, **options):
        init(self, *arguments, **options)
        sizes[self.arguments] = len(self.values)

    def cuLaunchKernel(*arguments):
        pointers = (c_uint64 * sizes[arguments[-2]]).from_address(arguments[-2])
        noted.append(({c_uint64.from_address(x).value for x in pointers}, [x() is not None for x in copies]))
        return (0,)

    def write(map, *arguments):  # here a tensor map has its address in its first 8 bytes
        c_uint64.from_buffer(map._obj).value = next(x.value for x in arguments if isinstance(x, c_void_p))

    def watched(needed):
        def copy_needed(size, name, x):
            copy = needed(size, name, x)
            return copy and (lambda x: noted_copy(copy(x)))

        return copy_needed

    def noted_copy(x):
        copies.append(weakref.ref(x))
        return x

    def bind(specs, tensors):
        with monkeypatch.context() as patch:
            patch.setattr(torch.Tensor, "device", SimpleNamespace(type="cuda", index=0))
            return launch_bind(specs, tensors)

    launch_bind = plan.bind
    monkeypatch.setattr(plan, "bind", bind)
    monkeypatch.setattr(driver, "cuLaunchKernel", cuLaunchKernel)
    monkeypatch.setattr(
        nvrtc, "_driver", lambda: SimpleNamespace(cuTensorMapEncodeTiled=write, cuTensorMapReplaceAddress=write)
    )
    monkeypatch.setattr(nvrtc.Launch, "__init__", noted_init)
    monkeypatch.setattr(nvrtc, "_load", lambda *arguments: 1)
    monkeypatch.setattr(nvrtc, "bind_context", lambda device: False)
    monkeypatch.setattr(launches, "copy_needed", watched(launches.copy_needed))
    monkeypatch.setattr(calls, "plans", Cache())
    monkeypatch.setattr(torch._C, "_cuda_getDevice", lambda: 0, raising=False)
    monkeypatch.setattr(torch._C, "_cuda_getCurrentRawStream", lambda device: 0, raising=False)
    return noted


SHAPES = [(1, 4, 40, 64), (1, 2, 70, 64), (1, 2, 70, 64), (1, 4, 40, 64)]  # q, k, v, dout
BOTH = pytest.mark.parametrize("rung", ["hopper", "fa2"])


def inputs():
    return [torch.zeros(shape).bfloat16() for shape in SHAPES]


def unaligned(shape):
    """8 bytes behind a multiple of 16."""
    return torch.zeros(torch.Size(shape).numel() + 4).bfloat16()[4:].view(shape)


def addresses(tensors):
    return {x.data_ptr() for x in tensors}


@on_cpu
@BOTH
def test_a_kept_launch_gets_the_addresses_of_this_call(rung, launched):
    first, second = inputs(), inputs()
    shared = first[0], first[1], first[1], first[0]  # v is k, and dout is q
    for times, (q, k, v, dout) in enumerate((shared, first, second, first)):
        out, lse = calls.forward(q, k, v, rung=rung, causal=True)
        assert addresses((q, k, v, out, lse)) <= launched[-1][0]
        grads = calls.backward(dout, q, k, v, out, lse, rung=rung, causal=True)
        given = set().union(*(there for there, _ in launched[-3:]))
        assert addresses((dout, q, k, v, out, lse, *grads)) <= given
        assert len(calls.plans) == 2 and len(launched) == 4 * (times + 1)


@on_cpu
@BOTH
def test_what_a_launch_depends_on_makes_another_plan(rung, launched):
    q, k, v, dout = inputs()
    usual = dict(q=q, k=k, v=v)
    saved = dict(dout=dout, out=q, lse=torch.zeros(1, 4, 40))
    strided = {x: torch.zeros(y.transpose(1, 2).shape).to(y.dtype).transpose(1, 2) for x, y in (usual | saved).items()}
    options = dict(causal=True), dict(scale=2.0)
    forwards = [{}, dict(k=strided["k"]), dict(v=strided["v"]), dict(q=q.half(), k=k.half(), v=v.half()), *options]
    forwards += [dict(k=k[:, :1], v=v[:, :1]), dict(v=unaligned(v.shape)), dict(tile=(64, 64))]
    forwards += [dict(LAZY=n) for n in (0, 1) if rung == "hopper"]
    backwards = [{}, *({name: x} for name, x in strided.items()), {"dout": unaligned(q.shape)}, *options]
    backwards += [dict(backward_tile=(64, 64)), dict(deterministic=True)]
    plans = 0
    for call, usual_, changes in (calls.forward, usual, forwards), (calls.backward, usual | saved, backwards):
        for change in changes:
            plans += 1
            for _ in range(2):
                results = call(**usual_ | change, rung=rung)
                assert len(calls.plans) == plans and all(x.is_contiguous() for x in results)


@on_cpu
@BOTH
def test_copies_of_unaligned_inputs_live_until_they_are_used_and_the_launch_is_kept(rung, launched):
    for times in (1, 2):
        q, k, v, dout = map(unaligned, SHAPES)
        out, lse = calls.forward(q, k, v, rung=rung)
        there, alive = launched[-1]
        assert alive[-3:] == [True] * 3 and sum(alive) == 3
        assert not addresses((q, k, v)) & there and addresses((out, lse)) <= there
        calls.backward(dout, q, k, v, out, lse, rung=rung)
        assert all(alive[-4:] == [True] * 4 and sum(alive) == 4 for _, alive in launched[-3:])
        assert len(launched) == 4 * times and len(calls.plans) == 2


@on_cpu
def test_expanded_inputs_are_copied_for_the_copy_engine_alone(launched):
    q, k, v, _ = inputs()
    k, v = (x[:, :1].expand(-1, 4, -1, -1) for x in (k, v))
    for rung, copied in (("hopper", True), ("fa2", False)):
        calls.forward(q, k, v, rung=rung)
        there, _ = launched[-1]
        assert addresses((q,)) <= there and bool(addresses((k, v)) & there) is not copied


@on_cpu
@BOTH
def test_what_does_not_lie_in_memory_as_it_is_read_is_copied(rung, launched):
    """The stride of a dimension of size 1 does not matter."""
    q, k, v, _ = inputs()
    q, apart = q.as_strided(q.shape, (1, *q.stride()[1:])), v.transpose(2, 3).contiguous().transpose(2, 3)
    calls.forward(q, k, v, rung=rung)
    assert addresses((q, k, v)) <= launched[-1][0]
    for copied in apart, torch._neg_view(v):  # The second is negated only when torch reads it.
        calls.forward(q, k, copied, rung=rung)
        assert addresses((q, k)) <= launched[-1][0] and not addresses((copied,)) & launched[-1][0]


@on_cpu
def test_a_kept_launch_keeps_no_tensor(launched):
    q, k, v, dout = inputs()
    out, lse = calls.forward(q, k, v, rung="hopper")
    grads = calls.backward(dout, q, k, v, out, lse, rung="hopper")
    held = [StorageWeakRef(x.untyped_storage()) for x in (q, k, v, dout, out, lse, *grads)]
    assert not any(storage.expired() for storage in held)
    del q, k, v, dout, out, lse, grads
    assert len(calls.plans) == 2 and all(storage.expired() for storage in held)


@on_cpu
def test_a_thread_without_a_context_gets_one_and_an_error_is_told(launched, monkeypatch):
    bound, answers = [], [driver.CUresult.CUDA_ERROR_INVALID_CONTEXT, driver.CUresult.CUDA_SUCCESS]
    monkeypatch.undo()
    monkeypatch.setattr(driver, "cuCtxGetCurrent", lambda: (0, len(bound)))  # 0: none
    monkeypatch.setattr(driver, "cuDevicePrimaryCtxRetain", lambda device: (0, "its primary context"))
    monkeypatch.setattr(driver, "cuCtxSetCurrent", lambda context: (bound.append(context) or 0,))
    monkeypatch.setattr(driver, "cuLaunchKernel", lambda *arguments: (answers.pop(0),))
    monkeypatch.setattr(nvrtc, "_load", lambda *arguments: 1)
    monkeypatch.setattr(torch._C, "_cuda_getDevice", lambda: 0, raising=False)
    monkeypatch.setattr(torch._C, "_cuda_getCurrentRawStream", lambda device: 0, raising=False)
    run = nvrtc.Launch(
        "fwd.cu", "attention_forward", [("q", c_void_p())], device=0, grid=1, block=128, macros={"D": 64}
    )
    run({"q": torch.zeros(1)})
    assert bound == ["its primary context"] and not answers
    answers += [driver.CUresult.CUDA_ERROR_INVALID_VALUE]
    with pytest.raises(RuntimeError, match="attention_forward with .*blocks of 128 threads: CUDA_ERROR_INVALID_VALUE"):
        run({"q": torch.zeros(1)})


@on_cpu
def test_a_context_is_bound_before_the_driver_makes_a_tensor_map(launched, monkeypatch):
    """Autograd's thread may never have used CUDA: then cuTensorMapEncodeTiled would fail with error 201."""
    order, tensor_map = [], nvrtc.tensor_map
    monkeypatch.setattr(nvrtc, "bind_context", lambda device: order.append("context"))
    monkeypatch.setattr(nvrtc, "tensor_map", lambda *arguments: order.append("map") or tensor_map(*arguments))
    q, k, v, dout = inputs()
    out, lse = calls.forward(q, k, v, rung="hopper")
    assert order == ["context", "map", "map", "map"]
    order.clear()
    calls.backward(dout, q, k, v, out, lse, rung="hopper")
    assert order[0] == "context" and order.count("map") == 6


def test_a_context_is_bound_where_a_kept_tensor_map_moves(launched, monkeypatch):
    """The same in a thread that runs a plan of another thread, on other tensors."""
    bound, encode = [], nvrtc._driver().cuTensorMapEncodeTiled

    def replace(map, *arguments):
        return encode(map, *arguments) if bound else 201

    first = inputs()[:3]  # held: the next tensors must not get their memory, for then no map would move
    calls.forward(*first, rung="hopper")
    library = SimpleNamespace(cuTensorMapEncodeTiled=encode, cuTensorMapReplaceAddress=replace)
    monkeypatch.setattr(nvrtc, "_driver", lambda: library)
    monkeypatch.setattr(nvrtc, "bind_context", lambda device: not bound and not bound.append(device))
    q, k, v = inputs()[:3]
    calls.forward(q, k, v, rung="hopper")
    assert bound == [0] and addresses((q, k, v)) <= launched[-1][0]
    monkeypatch.setattr(library, "cuTensorMapReplaceAddress", lambda *arguments: 1)
    with pytest.raises(RuntimeError, match="cuTensorMapReplaceAddress: error 1"):
        calls.forward(*inputs()[:3], rung="hopper")


@pytest.mark.parametrize("D, sizes, strides, box", [
    (128, [64, 40, 2, 3, 2], [3 * 256, 128, 256, 40 * 3 * 256], [64, 16, 2, 1, 1]),
    (96, [96, 40, 1, 3, 2], [3 * 192, 128, 192, 40 * 3 * 192], [64, 16, 1, 1, 1]),
])  # fmt: skip
@pytest.mark.parametrize("dtype, kind", [(torch.float16, 6), (torch.bfloat16, 9)])
def test_the_driver_is_told_how_a_tensor_lies_and_what_a_copy_brings(D, sizes, strides, box, dtype, kind, monkeypatch):
    """Sizes and strides are listed from the last dimension to the first, and strides are in bytes."""
    told = []
    library = SimpleNamespace(cuTensorMapEncodeTiled=lambda map, *arguments: told.extend(arguments) or 0)
    monkeypatch.setattr(nvrtc, "_driver", lambda: library)
    x = torch.zeros(2, 40, 3, D, dtype=dtype).transpose(1, 2)
    map = nvrtc.tensor_map(*plan.view_and_box(x, 16))
    assert told[:2] == [kind, 5] and told[2].value == map.address == x.data_ptr()
    assert [list(numbers) for numbers in told[3:7]] == [sizes, strides, box, [1] * 5]
    assert told[7:] == [0, 3, 2, 0] and addressof(map) % 128 == 0


@on_cpu
def test_a_launch_goes_to_its_own_gpu_and_the_current_stream(monkeypatch):
    current, asked = [0], []

    @contextlib.contextmanager
    def device(number):
        current.append(number)
        yield
        current.pop()

    monkeypatch.setattr(torch.cuda, "device", device)
    monkeypatch.setattr(torch._C, "_cuda_getDevice", lambda: current[-1], raising=False)
    monkeypatch.setattr(torch._C, "_cuda_getCurrentRawStream", lambda device: 70 + device, raising=False)
    monkeypatch.setattr(nvrtc, "_load", lambda *arguments: 1)
    monkeypatch.setattr(
        driver, "cuLaunchKernel", lambda *it: asked.append((current[-1], *it[1:9], run.lock.locked())) or (0,)
    )
    how = dict(grid=5, block=128, shared_bytes=96, macros={})
    run = nvrtc.Launch("fwd.cu", "attention_forward", [("q", c_void_p())], device=1, **how)
    run({"q": torch.zeros(1)})
    assert asked == [(1, 5, 1, 1, 128, 1, 1, 96, 71, True)] and current == [0]


@on_cpu
def test_a_kernel_asks_for_more_than_48_KB_of_shared_memory(monkeypatch):
    asked, compiled = [], []
    kernel = SimpleNamespace(handle=7)
    monkeypatch.setattr(torch.cuda, "device", contextlib.nullcontext)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: {0: (9, 0), 1: (8, 6), 2: (7, 0)}[device])
    monkeypatch.setattr(
        torch.cuda, "get_device_properties", lambda device: SimpleNamespace(shared_memory_per_block_optin=99 * 1024)
    )
    monkeypatch.setattr(
        nvrtc, "_module", lambda *it: compiled.append(it) or SimpleNamespace(get_kernel=lambda name: kernel)
    )
    monkeypatch.setattr(driver, "cuKernelSetAttribute", lambda *it: asked.append(it[1:]) or (driver.CUresult(0),))
    load = partial(nvrtc._load.__wrapped__, "fwd.cu", "attention_forward", (("D", 64),))
    assert load(0, 48 * 1024) == load(1, 48 * 1024 + 1) == 7 and asked == [(99 * 1024, 7, 1)]
    assert [arch for *_, arch in compiled] == ["sm_90a", "sm_86"]
    with pytest.raises(RuntimeError, match=r"attention_forward with \{'D': 64\} needs 101377 bytes .*smaller head_dim"):
        load(0, 99 * 1024 + 1)
    with pytest.raises(RuntimeError, match="7.0 is too old"):
        load(2, 0)


# ---- what a launcher that is lifted out refuses ----------------------------------------------------------------------

def without_memory(x):
    with FakeTensorMode():
        return torch.empty(x.shape, dtype=x.dtype, device=x.device)


WRONG = {  # name: (the arguments that are changed, exception, words of the message)
    "k in another dtype": (lambda q, k, v: {"k": k.half()}, TypeError, "k must be torch.bfloat16"),
    "v on another device": (lambda q, k, v: {"v": v.to("meta")}, TypeError, "v must be .* on .*; got .* on meta"),
    "v too short": (lambda q, k, v: {"v": v[:, :, 1:]}, ValueError, r"v must have shape \(1, 2, 70, 64\)"),
    "another batch": (lambda q, k, v: {"q": q.expand(2, -1, -1, -1)}, ValueError, r"k must have shape \(2, "),
    "heads": (lambda q, k, v: {"q": q[:, :3]}, ValueError, "multiple of k's heads; got 3 and 2"),
    "no K/V head": (lambda q, k, v: {"k": k[:, :0], "v": v[:, :0]}, ValueError, "multiple of k's heads; got 4 and 0"),
    "rank": (lambda q, k, v: {"q": q[0]}, ValueError, r"q must be \(B, H, N, D\)"),
    "a list": (lambda q, k, v: {"q": q.tolist()}, TypeError, "a dense torch.Tensor .*; got list, Tensor, Tensor"),
    "rung": (lambda q, k, v: {"rung": "warp9"}, ValueError, "the rungs are scalar, .*; got 'warp9'"),
    "a list as a rung": (lambda q, k, v: {"rung": ["fa2"]}, TypeError, r"rung must be a word .*; got \['fa2'\]"),
    "sparse": (lambda q, k, v: {"q": q.to_sparse()}, TypeError, "dense .*; got Tensor .sparse_coo., Tensor, Tensor"),
    "nested": (lambda q, k, v: {"k": torch.nested.nested_tensor([k[0]])}, TypeError, "got Tensor, Tensor .nested."),
    "jagged": (lambda q, k, v: {"v": torch.nested.nested_tensor([v[0]], layout=torch.jagged)}, TypeError, "nested"),
    "no memory": (lambda q, k, v: {"k": without_memory(k)}, TypeError, "with memory; got Tensor, FakeTensor, Tensor"),
}


@pytest.mark.parametrize("name", WRONG)
@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors", "ignore:Accessing the data pointer of FakeT")
@BOTH
def test_a_launcher_refuses_what_its_kernel_would_get_wrong(name, rung, monkeypatch):
    monkeypatch.setattr(plan, "bind", lambda *_: pytest.fail("something was launched"))
    change, exception, words = WRONG[name]
    q, k, v = (x.to(engine.device) for x in inputs()[:3])
    arguments = {"q": q, "k": k, "v": v, "rung": rung} | change(q, k, v)
    with pytest.raises(exception, match=words):
        calls.forward(**arguments)
    saved = {"dout": torch.zeros_like(q), "out": torch.zeros_like(q), "lse": torch.zeros(1, 4, 40, device=q.device)}
    with pytest.raises(exception):
        device = arguments["v"].device if name == "a device" else engine.device
        calls.backward(**arguments, **{name: x.to(device) for name, x in saved.items()})


class Equal:
    """It finds in a dictionary what was kept for another value, but is of another type."""

    def __init__(self, value):
        self.value = value

    def __eq__(self, other):
        return self.value == other

    def __hash__(self):
        return hash(self.value)


@pytest.mark.parametrize("name", ["forward", "backward", "start_gradients", "add_gradients"])
def test_a_kept_plan_skips_no_check_of_an_option(name, monkeypatch):
    """Of every option in the signature: what was refused at first must be refused when a plan is kept for its equal."""
    monkeypatch.setattr(plan, "bind", lambda specs, tensors: [])
    monkeypatch.setattr(calls, "plans", Cache())
    q, k, v, dout = (x.to(engine.device) for x in inputs())
    lse = torch.zeros(1, 4, 40, device=q.device)
    tensors = {"forward": (q, k, v), "backward": (dout, q, k, v, q, lse), "start_gradients": (dout, q, lse)}
    tensors["add_gradients"] = calls.start_gradients(dout, q, lse), dout, q, k, v
    good = dict(rung="fa2", causal=True, scale=1.0, tile=(64, 64), backward_tile=(64, 64), deterministic=True)
    call = partial(getattr(calls, name), *tensors[name])
    for option, x in inspect.signature(call).parameters.items():
        if x.kind == x.VAR_KEYWORD:
            option, good["LAZY"] = "LAZY", 1
            call = partial(call, rung="hopper")
        if option in ("causal", "scale", "deterministic"):
            continue  # Another number is another call; that it is one, the stage has checked.
        call(**{option: good[option]})
        plans = len(calls.plans)
        equals = {"LAZY": [1.0], "rung": []}
        for equal in (Equal(good[option]), *equals.get(option, [(64.0, 64)])):
            with pytest.raises((TypeError, ValueError), match=f"{option} must be"):
                call(**{option: equal})
        assert len(calls.plans) == plans


@pytest.mark.parametrize("rung, dtype, tile", [("scalar", torch.float32, (8, 16)), ("fa2", torch.bfloat16, (64, 64))])
def test_the_forward_s_tile_is_for_scalar_s_backward_alone(rung, dtype, tile, monkeypatch):
    monkeypatch.setattr(plan, "bind", lambda specs, tensors: [])
    monkeypatch.setattr(calls, "plans", Cache())
    q, k, v, dout = (x.to(engine.device, dtype) for x in inputs())
    calls.backward(dout, q, k, v, q, torch.zeros(1, 4, 40, device=q.device), rung=rung, tile=tile)
    (kept,) = calls.plans.values()
    own = ladder.BACKWARD[rung].tile(64, launches.shared_memory(q.device))
    assert (kept.problem.Br, kept.problem.Bc) == (tile if rung == "scalar" else own) and own != tile


def test_the_parts_of_a_backward_refuse_other_queries(monkeypatch):
    monkeypatch.setattr(plan, "bind", lambda specs, tensors: [])
    q, k, v, dout = (x.to(engine.device) for x in inputs())
    lse = torch.zeros(1, 4, 40, device=q.device)
    sums = calls.start_gradients(dout, q, lse)
    calls.add_gradients(sums, dout, q, k, v)
    for wrong in (q[:, :, :20], q[:, :2], q.half()):
        same = [x.to(wrong.dtype) for x in (k, v)]
        with pytest.raises(ValueError, match=r"queries that start_gradients was called for, \(\(1, 4, 40, 64\)"):
            calls.add_gradients(sums, wrong, wrong, *same)
    with pytest.raises(NotImplementedError, match="no parts"):
        calls.start_gradients(dout.float(), q.float(), lse, rung="scalar")


def test_parts_without_queries_or_keys_give_zeros(monkeypatch):
    monkeypatch.setattr(plan, "bind", lambda specs, tensors: [])
    q, k, v, dout = (x.to(engine.device) for x in inputs())
    none = calls.start_gradients(dout[:, :, :0], q[:, :, :0], torch.zeros(1, 4, 0, device=q.device))
    dk, dv = calls.add_gradients(none, dout[:, :, :0], q[:, :, :0], k, v)
    assert dk.shape == k.shape and not dk.any() and not dv.any() and calls.finish_dq(none).shape == (1, 4, 0, 64)
    sums = calls.start_gradients(dout, q, torch.zeros(1, 4, 40, device=q.device))
    assert [x.shape for x in calls.add_gradients(sums, dout, q, k[:, :, :0], v[:, :, :0])] == [(1, 2, 0, 64)] * 2


def test_a_plan_belongs_to_one_device():
    """Every key holds the device, by which two equal GPUs differ; here the CPU and one without memory."""
    row = ladder.BACKWARD["fa2"]
    q = torch.zeros(1, 1, 8, 64).bfloat16()
    problems = [launches.problem_of(row, x, x) for x in (q, q.to("meta"))]
    assert problems[0] != problems[1] and problems[0] == launches.problem_of(row, q.clone(), q)
    assert q.device in key_of((q,), {})[0]


@pytest.mark.parametrize("name", ["dout", "out", "lse"])
def test_a_launcher_refuses_saved_tensors_that_do_not_fit(name, monkeypatch):
    monkeypatch.setattr(plan, "bind", lambda *_: pytest.fail("something was launched"))
    q, k, v, dout = (x.to(engine.device) for x in inputs())
    good = {"dout": dout, "q": q, "k": k, "v": v, "out": q, "lse": torch.zeros(1, 4, 40, device=q.device)}
    with pytest.raises(ValueError, match=f"{name} must have shape"):
        calls.backward(**good | {name: good[name][:, :, 1:]})
    with pytest.raises(TypeError, match=f"{name} must be"):
        calls.backward(**good | {name: good[name].double()})
    with pytest.raises(TypeError, match="tile must be a pair of integers"):
        calls.backward(**good, tile=(64, 64), backward_tile=(64,))


@pytest.mark.parametrize("rung", ladder.FORWARD)
def test_no_keys_and_no_queries_give_nothing(rung):
    for dtype, (Nq, Nk) in itertools.product(ladder.FORWARD[rung].dtypes, ((5, 0), (0, 5))):
        q, k = torch.ones(1, 2, Nq, 64, dtype=dtype), torch.ones(1, 2, Nk, 64, dtype=dtype)
        out, lse = calls.forward(q, k, k, rung=rung)
        assert out.shape == q.shape and not out.any() and torch.equal(lse, torch.full((1, 2, Nq), -torch.inf))
        assert (out.dtype, lse.dtype) == (dtype, torch.float32)
        grads = calls.backward(q, q, k, k, out, lse, rung=rung)
        assert [x.dtype for x in grads] == [dtype] * 3
        assert [x.shape for x in grads] == [q.shape, k.shape, k.shape] and not any(x.any() for x in grads)


# ---- the table, and launches as data ---------------------------------------------------------------------------------


def test_every_kernel_file_has_one_row():
    rows = (*ladder.ROWS, *ladder.BACKWARD_ROWS)
    assert sorted(row.file for row in rows) == sorted(path.name for path in launches.HERE.glob("?wd_*.cu"))
    for row in rows:
        assert row.file.endswith(f"_{row.word}.cu") and len({tuple(table) for table in row.tiles}) == 1


def test_which_backward_a_rung_has():
    pick = lambda *arguments: ladder.backward_row(*arguments).file[:5]  # noqa: E731
    assert pick("hopper", torch.bfloat16, 64) == "bwd_3" and pick("hopper", torch.bfloat16, 32) == "bwd_1"
    assert pick("roles", torch.float16, 128) == "bwd_2" and pick("roles", torch.float16, 128, True) == "bwd_3"
    assert pick("warp", torch.float32, 64) == "bwd_0" and pick("warp", torch.float16, 64) == "bwd_1"
    assert ladder.OWN_BACKWARD == ("scalar", "fa2", "wgmma", "hopper")
    with pytest.raises(NotImplementedError, match="adds to dq in any order"):
        pick("scalar", torch.float32, 64, True)
    with pytest.raises(ValueError, match="no backward for float32 and head_dim 128: .*bwd_0_scalar.cu .* 1 to 96"):
        pick("warp", torch.float32, 128)


def test_a_tile_fits_into_the_shared_memory():
    fa2 = ladder.BACKWARD["fa2"]
    needed = fa2.shared_bytes(64, 128, 128)
    tiles = [fa2.tile(64, memory) for memory in (needed, needed - 1, 0, None)]
    assert tiles == [(128, 128), (64, 64), (32, 32), (32, 32)]
    for row in (*ladder.ROWS, *ladder.BACKWARD_ROWS):
        assert all(row.shared_bytes(D, *tile) <= 227 * 1024 for D, tile in row.tiles[0].items()), row.file  # H100


@pytest.mark.parametrize("scale", [1e-30, 0.6, 0.8, 1e30])
def test_the_maxima_of_rung_hopper_start_below_all_scores_and_at_a_finite_exponent(scale):
    q = torch.zeros(1, 1, 8, 64).bfloat16()
    (spec,) = launches.forward_launches(launches.problem_of(ladder.FORWARD["hopper"], q, q, scale=scale), {})
    lowest, scale_log2 = torch.tensor([spec.arguments[-4].value, scale / math.log(2)])
    assert (lowest * scale_log2).isfinite() and lowest * max(1, scale_log2) <= -3e38


@pytest.mark.parametrize("B, Nk, D, Hk, section, alternate", [
    (5, 4095, 64, 32, 66, False), (5, 4095, 96, 16, 33, False), (5, 4095, 128, 16, 33, False),
    (4, 4096, 128, 16, 16, True), (1, 16384, 64, 32, 8, True), (1, 16384, 128, 16, 4, True),
    (1, 16384, 128, 8, 8, True), (1, 2**20, 128, 16, 1, True), (1, 11264, 128, 16, 10, True),
    (2, 6144, 128, 16, 32, False),
])  # fmt: skip
def test_sections_of_long_tiles_fit_into_the_cache_unless_work_would_be_unequal(B, Nk, D, Hk, section, alternate):
    """At 11264 the 5 heads that fit would keep the blocks busy for 0.9 of the time, at 6144 also twice as many."""
    q, k = (torch.empty(B, heads, Nk, D, dtype=torch.bfloat16, device="meta") for heads in (2048 // D, Hk))
    problem = replace(launches.problem_of(ladder.FORWARD["hopper"], q, k, causal=True), processors=132)
    (spec,) = launches.forward_launches(problem, {})
    assert spec.grid == 132 and [x.value for x in spec.arguments[-2:]] == [section, alternate]
    (alone,) = launches.forward_launches(replace(problem, switches=(("PERSISTENT", 0),)), {})
    assert alone.grid == problem.query_tiles * B * q.shape[1] and alone.macros["PERSISTENT"] == 0
    (few,) = launches.forward_launches(replace(problem, B=1, H=3, Hk=3), {})
    assert few.arguments[-2].value == min(3, section)


def test_the_work_of_a_great_many_heads_is_counted_on_the_first_of_them():
    q = torch.empty(1, 64, 4096, 128, device="meta")
    problem = launches.problem_of(ladder.FORWARD["hopper"], q, q, causal=True)
    many, more = (tile_scheduler.forward_work(replace(problem, B=B), 1, True) for B in (1, 2**12))
    assert len(many) == len(more) and tile_scheduler.busy(many, 132) == tile_scheduler.busy(more, 132)


@pytest.mark.parametrize("B, H, N, D, causal, persistent", [
    (32, 32, 512, 64, True, True), (16, 16, 1024, 128, True, True), (32, 16, 512, 128, False, True),
    (32, 16, 512, 128, True, False), (8, 32, 2049, 64, False, False), (1, 16, 1024, 64, False, False),
    (4, 16, 896, 64, True, False), (4, 16, 896, 64, False, True),
])  # fmt: skip
def test_blocks_of_rung_hoppers_backward_are_persistent_where_that_pays(B, H, N, D, causal, persistent):
    """Not with tiles of few steps at head_dim 128, many queries or a single round, or if work would be unequal."""
    row = ladder.BACKWARD["hopper"]
    q = torch.empty(B, H, N, D, dtype=torch.bfloat16, device="meta")
    problem = replace(launches.problem_of(row, q, q, causal=causal), processors=132, Br=row.tiles[0][D][0])
    tiles = B * H * -(-N // 128)
    for turned, deterministic in ((persistent, False), (False, True)):
        with torch.device("meta"):  # where tensors would be whose device is not named
            (spec,) = launches.gradient_launches(replace(problem, deterministic=deterministic), {})
        assert spec.macros["PERSISTENT"] == turned and spec.grid == (132 if turned else tiles)
        assert spec.arguments[-4].value == tiles
    switched = replace(problem, switches=(("DETERMINISTIC", 1),))
    assert switched.row.macros(switched)["PERSISTENT"] == 0


@pytest.mark.parametrize("B, H, Hk, N, D, causal, deterministic, order", [
    (8, 32, 32, 4096, 64, True, False, (True, 8, 0)), (8, 32, 32, 4096, 64, False, False, (True, 1, 0)),
    (1, 16, 16, 8192, 128, True, False, (True, 8, 0)), (1, 16, 16, 8320, 128, True, False, (True, 1, 0)),
    (8, 32, 32, 512, 64, False, False, (True, 1, 256)), (32, 32, 32, 512, 64, True, False, (True, 34, 990)),
    (1, 16, 16, 16384, 128, True, True, (True, 1, 0)), (1, 16, 16, 16384, 128, False, True, (True, 8, 0)),
    (1, 16, 16, 16385, 128, True, True, (False, 8, 0)), (1, 16, 16, 65536, 128, False, True, (False, 2, 0)),
    (8, 16, 8, 4096, 128, True, True, (False, 8, 0)), (16, 32, 32, 1024, 64, True, True, (True, 32, 0)),
])  # fmt: skip
def test_the_order_of_key_tiles_of_rung_hoppers_backward(B, H, Hk, N, D, causal, deterministic, order):
    """(ascending, section, alone), on 132 multiprocessors; the kernel gets them as its last arguments."""
    row = ladder.BACKWARD["hopper"]
    q, k = (torch.empty(B, heads, N, D, dtype=torch.bfloat16, device="meta") for heads in (H, Hk))
    problem = launches.problem_of(row, q, k, causal=causal, deterministic=deterministic)
    (spec,) = launches.gradient_launches(replace(problem, processors=132, Br=row.tiles[0][D][0]), {})
    assert tuple(x.value for x in spec.arguments[-3:]) == order


def test_the_work_of_a_great_many_tiles_is_counted_on_a_million_of_them():
    q, k = (torch.empty(2**16, 16, N, 64, dtype=torch.bfloat16, device="meta") for N in (1, 2**11))
    problem = launches.problem_of(ladder.BACKWARD["hopper"], q, k, causal=True)
    assert len(tile_scheduler.backward_work(problem)) == 2**20


@on_cpu
def test_no_more_than_a_thousand_plans_are_kept(launched):
    calls.plans.update(dict.fromkeys(range(1000)))
    q, k, v, _ = inputs()
    for _ in range(2):
        calls.forward(q, k, v, rung="fa2")
        assert len(calls.plans) == 1


def test_the_geometry_of_a_launch():
    """By hand, from the head of each file."""
    sizes = dict(B=2, H=16, Hk=4, Nq=1000, Nk=700, D=64, causal=True, dtype=torch.bfloat16)
    sizes |= dict(processors=132, shared_limit=227 * 1024)
    macros = {"T": "bf16", "D": 64}
    (forward,) = geometry("fwd_8_hopper", **sizes, LAZY=0)
    shared = (2 * 192 + 6 * 128) * 128 + 128
    assert forward == ("attention_forward", 132, 512, shared, macros | {"Br": 192, "Bc": 128, "CAUSAL": 1, "LAZY": 0})
    (forward,) = geometry("fwd_5_fa2", **sizes)
    assert forward == ("attention_forward", 8 * 32, 128, 2 * 384 * 64, macros | {"Br": 128, "Bc": 128})
    delta, gradients, dq = geometry("bwd_1_fa2", **sizes)
    macros |= {"Br": 128, "Bc": 128, "WARPS": 8, "HEADS_APART": 1}
    assert delta == ("attention_delta", 1024 // 32 * 32, 256, 0, macros)
    shared = 2 * (2 * 128 * 64 + 4 * 128 * 64 + 2 * 128 * 128) + 16 * 128
    assert gradients == ("attention_backward", 6 * 32, 256, shared, macros)
    assert dq == ("attention_dq", -(-1000 * 64 // 1024) * 32, 256, 0, macros)
    assert geometry("bwd_1_fa2", **sizes | {"D": 96})[0][1] == 1024 // 16 * 32, "16 threads a row, as at 128"
    for D, Br in ((64, 128), (128, 64)):
        needed = 2 * (3 * 128 * D + 6 * Br * D + 2 * Br * 128) + 24 * Br + 128
        for Nq, stages in ((2**17 // D, 3), (2**17 // D + 1, 2)):  # a third buffer where queries are few
            launch = geometry("bwd_3_hopper", **sizes | {"D": D, "Nq": Nq})[1]
            assert launch[4]["STAGES"] == stages and launch[3] == needed
    small = geometry("bwd_1_fa2", **sizes | {"shared_limit": 99 * 1024})[1]
    assert small[1:3] == (11 * 32, 128) and small[4] == macros | {"Br": 64, "Bc": 64, "WARPS": 4}


# What the head of a .cu file says of a launch: an expression in the sizes, such as ceil(Nq / Br) * H * B.
ATOM = r"(?:ceil)?\((?:[^()]|\([^()]*\))*\)|\w+"
EXPRESSION = rf"(?:{ATOM})(?: [-+*/] (?:{ATOM}))*"


def told_of_launches(row):
    """{kernel: what the head of the row's file says of its launch}; where it says "as in rung N", that file's."""
    text = (launches.HERE / row.file).read_text()
    head = " ".join(line.removeprefix("//").strip() for line in text.splitlines() if line.startswith("//"))
    told = re.search(r"Launch(?: and limits)?:? (.*?) Spill budget", head)[1]
    if other := re.match(r"as in rung (\d)", told):
        return told_of_launches(ladder.ROWS[int(other[1])])
    parts = re.split(r"(attention_\w+(?: and attention_\w+)?) with ", told)
    if len(parts) == 1:
        return {"attention_forward": told}
    pairs = zip(parts[1::2], parts[2::2], strict=True)
    return {kernel: part for names, part in pairs for kernel in names.split(" and ")}


def told_of(told, spec, problem):
    """(grid, block, bytes of shared memory) of the launch, from what the head of its file says of it."""
    D, Br, group = problem.D, problem.Br, problem.H // problem.Hk
    names = {name: getattr(problem, name) for name in ("B", "H", "Nq", "Nk", "D", "Br", "Bc")} | {"ceil": math.ceil}
    names |= {"padded_rows": -(-problem.Nq // Br) * Br, "WARPS": spec.macros.get("WARPS")}
    names["parts"] = problem.H if spec.macros.get("HEADS_APART") else problem.H // group
    for name, value in re.findall(r"^constexpr int (Q_STAGES|STAGES) = (.*?);", spec.file.read_text(), re.M):
        names[name] = eval(re.sub(r"(.*) \? (.*) : (.*)", r"\2 if \1 else \3", value), dict(names))

    def value(before):
        found = re.search(rf"{before}({EXPRESSION})", told)
        return found and eval(found[1], dict(names))

    names["total"] = value("total = ")
    grid = value("without PERSISTENT ") or value("grid ")
    if D == 96 and "for D = 96" in told:
        grid = value("for D = 96 ")
    if "multiprocessor" in told and spec.macros.get("PERSISTENT", 1):
        grid = min(grid, problem.processors)
    block = value(r"threads \(") if Br < 64 else None
    block = block or value("block ")
    shared = re.search(rf"({EXPRESSION}) bytes of dynamic shared memory", told)
    return grid, block, eval(shared[1], dict(names)) if shared else 0


@pytest.mark.parametrize("row", [*ladder.ROWS, *ladder.BACKWARD_ROWS], ids=lambda row: row.file)
def test_the_launches_are_those_of_the_head_of_each_file(row):
    """Whoever copies a file out launches it as its head says."""
    told, make = told_of_launches(row), launches.forward_launches if row in ladder.ROWS else launches.backward_launches
    head_dims = {row.head_dims[0], 96, row.head_dims[-1]} & set(row.head_dims)
    for D, H, Nq in itertools.product(head_dims, (4, 16), (300, 2100)):
        q, k = (torch.empty(2, heads, N, D, dtype=row.dtypes[0], device="meta") for heads, N in ((H, Nq), (4, 700)))
        for tile in {table[D] for table in row.tiles} | ({(32, 64)} if "Br < 64" in str(told) else set()):
            problem = replace(launches.problem_of(row, q, k, tile=tile), processors=7)
            for switched in ((), (("PERSISTENT", 0),)) if row.persistent else ((),):
                specs = make(replace(problem, switches=switched), defaultdict(lambda: (0, 0, 0)))
                assert {spec.kernel for spec in specs} == told.keys()
                for spec in specs:
                    found = spec.grid, spec.block, spec.shared_bytes
                    assert told_of(told[spec.kernel], spec, problem) == found, (D, H, Nq, tile, spec.kernel)


@pytest.mark.parametrize("what, sizes", [
    ("queries and keys", dict(Nq=2**31 - 2**16, Nk=1)),
    ("queries and keys", dict(Nq=1, Nk=2**31 - 2**16)),
    ("tiles", dict(B=2**13, H=2**13, Nq=2**13)),
])  # fmt: skip
@BOTH
def test_more_than_a_kernel_can_count_is_refused(rung, what, sizes, monkeypatch):
    """The tensors are views of one element, which take no memory."""
    monkeypatch.setattr(plan, "bind", lambda *_: pytest.fail("something was launched"))
    sizes = dict(B=1, H=1, Nq=8, Nk=8) | sizes
    q, k = (torch.ones(1).bfloat16().expand(sizes["B"], sizes["H"], sizes[n], 64) for n in ("Nq", "Nk"))
    monkeypatch.setattr(launches, "can_read", lambda *_: True)
    with pytest.raises(ValueError, match=f"{what} are more than a kernel can count"):
        calls.forward(q, k, k, rung=rung)


def test_a_kernel_counts_to_its_limit_and_no_further():
    launches.check_count("blocks", launches.MOST)
    with pytest.raises(ValueError, match=f"{launches.MOST + 1} blocks are more than a kernel can count"):
        launches.check_count("blocks", launches.MOST + 1)


@pytest.mark.parametrize("row", [*ladder.ROWS, *ladder.BACKWARD_ROWS], ids=lambda row: row.file)
def test_the_blocks_of_every_launch_are_counted(row, monkeypatch):
    """Of a persistent kernel the tiles: more of them than 2^31 are no problem of memory in a test of launches alone."""
    counted = []
    monkeypatch.setattr(launches, "check_count", lambda what, number: counted.append(number))
    q, k = (torch.empty(1, 1, N, row.head_dims[-1], dtype=row.dtypes[0], device="meta") for N in (8, 2000))
    problem = replace(launches.problem_of(row, q, k), B=2**31)
    make = launches.forward_launches if row in ladder.ROWS else launches.backward_launches
    specs = make(problem, defaultdict(lambda: (0, 0, 0)))
    assert specs
    for spec in specs:
        blocks = spec.grid if spec.grid > problem.processors else 2**31
        assert blocks in counted and (blocks >= 2**31 or spec.kernel == "attention_delta"), spec


@pytest.mark.skipif(engine.name == "cpu" and not emulator.available(), reason="without a GPU stage 02 needs g++")
@pytest.mark.parametrize("rung, D", [("fa2", 32), ("hopper", 64)])
@pytest.mark.parametrize("deterministic", [False, True])
def test_gradients_of_slices_add_up_to_those_of_the_whole(rung, D, deterministic):
    """The parts of the backward over two slices of the queries and of the keys, as a ring of two ranks calls them."""
    if rung not in RUNGS:
        pytest.skip("needs a Hopper GPU, or none")
    rng = torch.Generator().manual_seed(0)
    q, k, v, dout = (torch.randn(1, H, 150, D, generator=rng).to(engine.device, torch.bfloat16) for H in (2, 1, 1, 2))
    out, lse = calls.forward(q, k, v, rung=rung, causal=True)
    whole = calls.backward(dout, q, k, v, out, lse, rung=rung, causal=True, deterministic=deterministic)
    dq, dk, dv = [], torch.zeros_like(k, dtype=torch.float32), torch.zeros_like(v, dtype=torch.float32)
    halves = slice(0, 75), slice(75, 150)  # of one layout, so that a plan must know whether it is causal
    for n, rows in enumerate(halves):
        mine = dout[:, :, rows], q[:, :, rows]
        sums = calls.start_gradients(mine[0], out[:, :, rows], lse[:, :, rows], rung=rung, deterministic=deterministic)
        for m, keys in enumerate(halves[: n + 1]):
            parts = calls.add_gradients(sums, *mine, k[:, :, keys], v[:, :, keys], causal=n == m)
            dk[:, :, keys] += parts[0]
            dv[:, :, keys] += parts[1]
        dq.append(calls.finish_dq(sums))
    for got, want in zip((torch.cat(dq, 2), dk, dv), whole, strict=True):
        torch.testing.assert_close(got.float(), want.float(), rtol=0.02, atol=0.02)


@pytest.mark.parametrize("kind", ["ss", "rs"])
def test_the_operands_of_wgmma_are_numbered_as_they_are_listed(kind):
    """An operand with a wrong number would be read as another one, which only a Hopper GPU would show."""
    text = wgmma.wrappers(widths=(16, 176))
    body = text[text.index(f"wgmma_{kind}(") :].split("\n}\n")[0]
    statements = re.findall(r'N == (\d+) && .*\n *asm volatile\("(.*?)" : (.*?) : (.*)\);', body)
    assert [int(n) for n, *_ in statements] == [16, 16, 176, 176]
    for n, instruction, outputs, inputs in statements:
        registers = int(n) // 2
        assert outputs == ", ".join(f'"+f"(d[{i}])' for i in range(registers))
        a = ['"l"(a)'] if kind == "ss" else [f'"r"(a[{i}])' for i in range(4)]
        trans = ['"n"(TRANS_A)', '"n"(TRANS_B)'] if kind == "ss" else ['"n"(TRANS_B)']
        assert inputs.split(", ") == [*a, '"l"(b)', '"r"(int(add))', *trans]
        add = registers + len(a) + 1
        D, A = (", ".join(f"%{i}" for i in part) for part in (range(registers), range(registers, registers + len(a))))
        A = A if kind == "ss" else f"{{{A}}}"
        rest = "".join(f", %{add + 1 + i}" for i in range(len(trans)))
        assert f"setp.ne.b32 add, %{add}, 0;" in instruction
        assert instruction.endswith(f" {{{D}}}, {A}, %{add - 1}, add, 1, 1{rest}; }}")
