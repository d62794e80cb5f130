"""What nvrtc.run hands to the driver, on CPU tensors: the driver here only notes it."""

import weakref
from ctypes import c_uint64, c_void_p
from types import SimpleNamespace

import pytest
import torch
from torch.multiprocessing.reductions import StorageWeakRef

from steps import engine
from steps.step02_fa2_cuda import emulator, hopper, kernels, nvrtc

driver = pytest.importorskip("cuda.bindings.driver", reason="needs cuda-python")
pytestmark = pytest.mark.skipif(engine.name == "cuda", reason="there the driver itself is used")


@pytest.fixture
def launched(monkeypatch):
    """[(the addresses among the arguments, which copies of unaligned tensors are alive)], one for each launch."""
    calls, copies, sizes, init = [], [], {}, nvrtc.Launch.__init__

    def noted_init(self, *arguments, **options):
        init(self, *arguments, **options)
        sizes[self.arguments] = len(self.values)

    def cuLaunchKernel(*arguments):
        pointers = (c_uint64 * sizes[arguments[-2]]).from_address(arguments[-2])
        calls.append(({c_uint64.from_address(x).value for x in pointers}, [x() is not None for x in copies]))
        return (0,)

    def write(map, *arguments):  # a tensor map has its address in its first 8 bytes, here
        c_uint64.from_buffer(map._obj).value = next(x.value for x in arguments if isinstance(x, c_void_p))

    def watched(aligned):
        def call(x):
            if (y := aligned(x)) is not x:
                copies.append(weakref.ref(y))
            return y

        return call

    monkeypatch.setattr(driver, "cuLaunchKernel", cuLaunchKernel)
    monkeypatch.setattr(nvrtc, "_driver", lambda: SimpleNamespace(cuTensorMapEncodeTiled=write, cuTensorMapReplaceAddress=write))
    monkeypatch.setattr(nvrtc.Launch, "__init__", noted_init)
    monkeypatch.setattr(nvrtc, "_load", lambda *arguments: 1)
    monkeypatch.setattr(nvrtc, "_runs", {})
    monkeypatch.setattr(torch._C, "_cuda_getDevice", lambda: None, raising=False)
    monkeypatch.setattr(torch._C, "_cuda_getCurrentRawStream", lambda device: 0, raising=False)
    monkeypatch.setattr(emulator, "tensor_map", nvrtc.tensor_map)
    for host in (hopper, kernels):
        monkeypatch.setattr(host, "_run", nvrtc.run)
        monkeypatch.setattr(host, "_aligned", watched(host._aligned))
    return calls


LAUNCHERS = [(hopper.hopper_forward, hopper.hopper_backward), (kernels.fa2_forward, kernels.fa2_backward)]
SHAPES = [(1, 4, 40, 64), (1, 2, 70, 64), (1, 2, 70, 64), (1, 4, 40, 64)]  # q, k, v, dout


def unaligned(shape):
    return torch.zeros(torch.Size(shape).numel() + 1).bfloat16()[1:].view(shape)


@pytest.mark.parametrize("forward, backward", LAUNCHERS, ids=["hopper", "fa2"])
def test_a_kept_launch_gets_the_addresses_of_this_call(forward, backward, launched):
    for times in range(3):
        q, k, v, dout = (torch.zeros(shape).bfloat16() for shape in SHAPES)
        if times == 0:  # later v and dout are others
            v, dout = k, q
        out, lse = forward(q, k, v, causal=True)
        *_, (addresses, _) = launched
        assert {x.data_ptr() for x in (q, k, v, out, lse)} <= addresses
        grads = backward(dout, q, k, v, out, lse, causal=True)
        addresses = set().union(*(addresses for addresses, _ in launched[-3:]))
        assert {x.data_ptr() for x in (dout, q, k, v, out, lse, *grads)} <= addresses
        assert len(nvrtc._runs) == 2 and len(launched) == 4 * (times + 1)


@pytest.mark.parametrize("forward, backward", LAUNCHERS, ids=["hopper", "fa2"])
def test_what_it_depends_on_makes_another_launch(forward, backward, launched):
    q, k, v, _ = (torch.zeros(shape).bfloat16() for shape in SHAPES)
    strided = torch.zeros(1, 70, 2, 64).bfloat16().transpose(1, 2)
    calls = [
        dict(q=q, k=k, v=v),
        dict(q=q, k=k, v=strided),
        dict(q=q.half(), k=k.half(), v=v.half()),
        dict(q=q, k=k[:, :1], v=v[:, :1]),
    ]
    calls += [dict(q=q, k=k, v=v, **options) for options in (dict(causal=True), dict(scale=2.0), dict(tile=(64, 64)))]
    for n, arguments in enumerate(calls, 1):
        forward(**arguments)
        assert len(nvrtc._runs) == n


@pytest.mark.parametrize("forward, backward", LAUNCHERS, ids=["hopper", "fa2"])
def test_copies_live_until_they_are_used_and_are_made_anew(forward, backward, launched):
    forward(*(torch.zeros(shape).bfloat16() for shape in SHAPES[:3]))  # the same, but aligned
    for times in (1, 2):
        q, k, v, dout = map(unaligned, SHAPES)
        out, lse = forward(q, k, v)
        assert launched[-1][1][-3:] == [True] * 3 and not {x.data_ptr() for x in (q, k, v)} & launched[-1][0]
        backward(dout, q, k, v, out, lse)
        assert all(alive[-4:] == [True] * 4 for _, alive in launched[-3:]) and len(launched) == 1 + 4 * times
    assert len(nvrtc._runs) == 1


def test_a_kept_launch_keeps_no_tensor(launched):
    q, k, v, dout = (torch.zeros(shape).bfloat16() for shape in SHAPES)
    out, lse = hopper.hopper_forward(q, k, v)
    grads = hopper.hopper_backward(dout, q, k, v, out, lse)
    held = [StorageWeakRef(x.untyped_storage()) for x in (q, k, v, dout, out, lse, *grads)]
    assert not any(storage.expired() for storage in held)
    del q, k, v, dout, out, lse, grads
    assert len(nvrtc._runs) == 2 and all(storage.expired() for storage in held)


def test_a_thread_without_a_context_gets_one_and_an_error_is_told(launched, monkeypatch):
    bound, answers = [], [driver.CUresult.CUDA_ERROR_INVALID_CONTEXT, driver.CUresult.CUDA_SUCCESS]
    monkeypatch.setattr(driver, "cuLaunchKernel", lambda *arguments: (answers.pop(0),))
    monkeypatch.setattr(driver, "cuCtxGetCurrent", lambda: (0, len(bound)))  # 0: none
    monkeypatch.setattr(driver, "cuDevicePrimaryCtxRetain", lambda device: (0, "its primary context"))
    monkeypatch.setattr(driver, "cuCtxSetCurrent", bound.append)
    q, k, v, _ = (torch.zeros(shape).bfloat16() for shape in SHAPES)
    kernels.fa2_forward(q, k, v)
    assert bound == ["its primary context"] and not answers
    answers += [driver.CUresult.CUDA_ERROR_INVALID_VALUE]
    with pytest.raises(RuntimeError, match="attention_forward with .*blocks of 128 threads: CUDA_ERROR_INVALID_VALUE"):
        kernels.fa2_forward(q, k, v)
