"""Without a GPU, Triton's interpreter refuses a load or store beside its tensor, as memcheck does on a GPU."""

import collections
import re
from contextlib import nullcontext
from importlib import metadata

import pytest
import torch
import triton
import triton.language as tl
from triton.tools.tensor_descriptor import TensorDescriptor

import steps.step03_triton  # noqa: F401  It switches the check on, for its own kernels.
from steps import engine
from steps.course.figures.triton_compiler import compiled
from steps.step03_triton import fwd_0_fused, interpreter, memcheck
from steps.step03_triton.memcheck import NoTruthValue, OutOfBounds

pytestmark = pytest.mark.skipif(engine.name == "cuda", reason="on a GPU compute-sanitizer checks this")
Tensors = collections.namedtuple("Tensors", "x y")
N = 30  # numbers, for two programs of 16


@pytest.fixture(autouse=True)
def every_kernel(monkeypatch):
    monkeypatch.setattr(memcheck, "_every", True)


@triton.jit
def load(x, at, end):
    return tl.load(x + at, mask=at < end)


@triton.jit
def copy_kernel(x, y, first, end_x, end_y, SIZE: tl.constexpr):
    at = first + tl.program_id(0) * SIZE + tl.arange(0, SIZE)
    tl.store(y + at, load(x, at, end_x), mask=at < end_y)


@triton.jit
def tuple_kernel(both, end, SIZE: tl.constexpr):
    at = tl.program_id(0) * SIZE + tl.arange(0, SIZE)
    tl.store(both.y + at, load(both.x, at, end), mask=at < 30)


@triton.jit
def descriptor_kernel(x, y, SIZE: tl.constexpr):
    y.store([SIZE * tl.program_id(0)], x.load([SIZE * tl.program_id(0)]))


@triton.jit
def bytes_kernel(x, out, end):
    tl.store(out, load(x, tl.program_id(0), end))


def copy(x, y, first=0, end_x=N, end_y=N):
    copy_kernel[(2,)](x, y, first, end_x, end_y, SIZE=16)


@pytest.mark.parametrize("watched, times", [(True, 2 * 2), (False, 2 * 3)])
def test_a_launch_replaces_triton_s_functions_once_for_each_module(watched, times, monkeypatch):
    """In two launches of two programs, which call a function each. Of a kernel that is not watched, at each call."""
    plain, replaced = interpreter.interpreter._patch_lang, []
    monkeypatch.setattr(interpreter.interpreter, "_patch_lang", lambda fn: replaced.append(fn) or plain(fn))
    monkeypatch.setattr(memcheck, "_every", watched)
    x = torch.randn(N)
    for _ in range(2):
        copy(x, y := torch.zeros(N))
        assert torch.equal(x, y)
    assert len(replaced) == times


def rows_of_one_tensor(dtype=torch.float32):
    """Two tensors of N numbers that lie in one, with a number between them and one more at each end."""
    return torch.arange(3 + 2 * N).to(dtype)[1:-1].unfold(0, N, N + 1)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.int8])
def test_what_lies_within_its_tensor_is_taken(dtype):
    x, y = rows_of_one_tensor(dtype)
    copy(x, y)
    assert torch.equal(x, y)


@pytest.mark.parametrize("ends, message", [
    (dict(end_x=N + 1), "program (1, 0, 0) loads up to 4 bytes behind the last of x"),
    (dict(end_y=N + 2), "program (1, 0, 0) stores up to 8 bytes behind the last of y"),
    (dict(first=-1), "program (0, 0, 0) loads 4 bytes before the first of x"),
])  # fmt: skip
def test_one_number_too_far_is_refused_though_it_is_the_processs_memory(ends, message):
    x, y = rows_of_one_tensor()
    kept = y.clone()
    copy(torch.zeros(80)[4:], torch.zeros(80), end_x=60)  # A launch forgets the tensors of the one before.
    with pytest.raises(OutOfBounds) as raised:
        copy(x, y, **ends)
    assert str(raised.value) == message
    assert {"load", "copy_kernel"} & {frame.name for frame in raised.traceback}, "it leads to the kernel's line"
    assert torch.equal(y[16:], kept[16:]), "the store must not take place"


def test_rows_with_a_gap_end_with_their_last_number():
    x, y = torch.zeros(4, 10)[:, :3], torch.zeros(N)  # 33 numbers in memory, the last one at 32
    copy(x, y)
    copy(x, torch.zeros(33), end_x=32, end_y=32)
    with pytest.raises(OutOfBounds, match="stores up to 4 bytes behind the last of y"):
        copy(torch.zeros(64), x, first=2, end_x=34, end_y=34)


def test_tensors_in_a_tuple_are_named_by_their_field():
    both = Tensors(*rows_of_one_tensor())
    tuple_kernel[(2,)](both, N, SIZE=16)
    with pytest.raises(OutOfBounds, match="behind the last of both.x"):
        tuple_kernel[(2,)](both, N + 1, SIZE=16)


def test_a_descriptor_is_measured_by_its_tensor():
    x, y = torch.arange(64)[:N], torch.zeros(64, dtype=torch.int64)[:N]  # Descriptors begin at multiples of 16 bytes.
    described = TensorDescriptor(x, [N], [1], [16])
    descriptor_kernel[(2,)](described, TensorDescriptor(y, [N], [1], [16]), SIZE=16)
    assert torch.equal(x, y)
    with pytest.raises(OutOfBounds, match="stores up to 16 bytes behind the last of y"):
        descriptor_kernel[(2,)](described, TensorDescriptor(y, [32], [1], [16]), SIZE=16)


def test_a_tensor_read_as_another_type_and_booleans():
    seen, out = torch.ones(3, dtype=torch.bool), torch.zeros(1)
    for x in (seen, triton.reinterpret(seen, tl.int8)):
        bytes_kernel[(3,)](x, out, 3)
        assert out.item() == 1
        with pytest.raises(OutOfBounds, match="1 bytes behind the last of x"):
            bytes_kernel[(4,)](x, out, 4)


def test_nothing_may_be_loaded_where_there_is_nothing():
    copy(torch.zeros(0), torch.zeros(0), end_x=0, end_y=0)
    with pytest.raises(OutOfBounds):
        copy(torch.zeros(0), torch.zeros(0), end_y=0)


@triton.jit
def product_kernel(x, out):
    i, j = tl.arange(0, 16)[:, None], tl.arange(0, 16)[None, :]
    tile = tl.load(x + i * 16 + j)
    tl.store(out + i * 16 + j, tl.dot(tile, tile))


@triton.jit
def both_kernel(out, N, SIZE: tl.constexpr, HOW: tl.constexpr):
    at = tl.arange(0, SIZE)
    if HOW == "and":
        seen = (at < N) and (at > 2)
    elif HOW == "or":
        seen = (at < N) or (at > 2)
    elif HOW == "not":
        seen = not (at < N)
    elif HOW == "between":
        seen = 2 < at < N
    else:
        seen = (at < N) & (at > 2)
    if N > 2 and SIZE > 2:  # Numbers have a truth value.
        tl.store(out + at, seen.to(tl.int32))


@pytest.mark.parametrize("how", ["and", "or", "not", "between"])
def test_a_tile_has_no_truth_value(how):
    """The interpreter would take `a and b` as b, and the compiler as a & b."""
    out, right = torch.zeros(16, dtype=torch.int32), [int(2 < n < 7) for n in range(16)]
    understood = how == "between" and metadata.version("triton") >= "3.9"  # from then on Triton writes the & itself
    refused = pytest.raises(NoTruthValue, match="shape .16,. is neither true nor false. Write & for `and`")
    with nullcontext() if understood else refused:
        both_kernel[(1,)](out, 7, SIZE=16, HOW=how)
    assert out.tolist() == (right if understood else [0] * 16)
    both_kernel[(1,)](out, 7, SIZE=16, HOW="&")
    assert out.tolist() == right


def test_a_kernel_of_another_module_runs_as_triton_has_it(monkeypatch):
    """Before and after a kernel of the course, and although that one fails."""
    monkeypatch.setattr(memcheck, "_every", False)
    x, y = rows_of_one_tensor()
    q = torch.zeros(1, 1, 8, 16)
    own, dots = interpreter.tritons_own, []
    monkeypatch.setattr(interpreter, "tritons_own", lambda *args: dots.append("Triton's") or own(*args))
    for _ in range(2):
        copy(x, y, end_x=N + 1, end_y=N + 1)  # one number too far, which is still the process's memory
        out = torch.zeros(16, dtype=torch.int32)
        both_kernel[(1,)](out, 7, SIZE=16, HOW="and")
        assert out.tolist() == [int(n > 2) for n in range(16)]
        product_kernel[(1,)](torch.zeros(16, 16), torch.zeros(16, 16))
        assert dots == ["Triton's"], "tl.dot, too"
        dots.clear()
        with pytest.raises(OutOfBounds, match="of k"):
            tensors = q, q[:, :, :4].clone(), q, q.clone(), q[..., 0].clone()
            fwd_0_fused.forward_kernel[(1,)](
                *tensors, *[q.stride()[:3]] * 4, 1, 1, 8, 8, 1.0,
                CAUSAL=False, D=16, D_pad=16, Br=16, Bc=16, PRECISION="ieee",
            )  # fmt: skip


@pytest.mark.long
@pytest.mark.parametrize("module", ["bwd_0_fused", "flash"])
def test_every_lane_that_stores_a_number_of_delta_stores_the_same(module):
    """No product is fused into the addition of what another lane sends. It would be rounded in that lane only.

    racecheck saw the lanes store numbers that differed. bwd_1_tma takes 16-bit numbers only, whose products are exact
    in float32, so that it does not matter there.
    """
    script = f"from steps.step03_triton import {module}\narch(80)\n"
    script += "x = torch.zeros(1, 1, 64, 24)\n"  # Of rows with 24 numbers each lane takes one.
    script += f"{module}.backward(x, x, x, x, x, torch.zeros(1, 1, 64))"
    (ptx,) = (made["ptx"] for made in compiled(script) if made["kernel"] == "delta_kernel")
    sent = set(re.findall(r"shfl\.sync\.bfly\.b32\s+(%\w+),", ptx))
    added = set(re.findall(r"fma\.rn\.f32\s+%\w+, %\w+, %\w+, (%\w+);", ptx))
    assert sent and not sent & added
