"""CUDA's mathematical functions in stage 02's emulation: each has its meaning, or the message says what to write."""

import math
import re
from ctypes import c_float

import pytest
import torch

from steps import engine
from steps.course.workbook import check, runner
from steps.step02_fa2_cuda import emulator, nvrtc
from support.answers import edited

pytestmark = pytest.mark.skipif(not emulator.available(), reason="needs g++")


@pytest.fixture(scope="module", autouse=True)
def end_of_server():
    yield
    runner.stop()


# CUDA Math API, "Single Precision Mathematical Functions" and "Single Precision Intrinsics", and casts.
FUNCTIONS = """
acosf acoshf asinf asinhf atan2f atanf atanhf cbrtf ceilf copysignf cosf coshf cospif cyl_bessel_i0f cyl_bessel_i1f
erfcf erfcinvf erfcxf erff erfinvf exp10f exp2f expf expm1f fabsf fdimf fdividef floorf fmaf fmaxf fminf fmodf hypotf
ilogbf j0f j1f ldexpf lgammaf llrintf llroundf log10f log1pf log2f logbf logf lrintf lroundf max min nearbyintf
nextafterf norm3df norm4df normcdff normcdfinvf normf powf rcbrtf remainderf rhypotf rintf rnorm3df rnorm4df rnormf
roundf rsqrtf scalbnf sincosf sincospif sinf sinhf sinpif sqrtf tanf tanhf tgammaf truncf y0f y1f
__cosf __exp10f __expf __fadd_rd __fadd_rn __fadd_ru __fadd_rz __fdiv_rd __fdiv_rn __fdiv_ru __fdiv_rz __fdividef
__fmaf_rd __fmaf_rn __fmaf_ru __fmaf_rz __fmul_rd __fmul_rn __fmul_ru __fmul_rz __frcp_rd __frcp_rn __frcp_ru __frcp_rz
__frsqrt_rn __fsqrt_rd __fsqrt_rn __fsqrt_ru __fsqrt_rz __fsub_rd __fsub_rn __fsub_ru __fsub_rz __log10f __log2f __logf
__powf __saturatef __sincosf __sinf __tanf __tanhf
__float2int_rn __float2int_rz __float2int_rd __float2int_ru __int2float_rn __uint2float_rn __popc __clz __ffs __ldg
__float2uint_rn __ballot_sync __shfl_xor atomicMax __shared__ half wmma cg asm clock64 __syncthreads_or warpSize __ldcg
""".split()


def kernel(folder, body):
    file = folder / "k.cu"
    start = '#include "ptx.cuh"\nextern "C" __global__ void k(Global<float> y, float a, float b, float c) {\n'
    file.write_text(f"{start}{body}\n}}\n")
    return file


def refusal(folder, body):
    with pytest.raises(RuntimeError) as problem:
        emulator.compile(kernel(folder, body), {})
    return str(problem.value)


def test_each_name_is_there_or_the_message_says_what_to_write(tmp_path):
    uses = {name: f"auto f_{name} = &{name};" for name in FUNCTIONS}
    uses |= {name: f"{name} x_{name};" for name in ("half", "__shared__")}
    uses |= {"wmma": "wmma::f w;", "cg": "cg::f g;", "asm": 'asm("");', "__ldg": "__ldg(&y[0]);"}
    # Two of a name have no single address.
    uses |= {name: f"{name}(1.0f, 2.0f);" for name in ("max", "min")}
    said = refusal(tmp_path, "\n".join(uses.values()))
    absent = set(re.findall(r"error: (\w+) is not emulated here: \w+ \w+", said))
    assert len(absent) > 40 and re.findall(r"error: (?!\w+ is not emulated)(?!expected).*", said) == []
    # What C's headers declare is missed by the linker alone, so the others are left out.
    there = [name for name in FUNCTIONS if name not in absent and name not in ("max", "min", "__ldg")]
    calls = "\n".join(f"if (a > {n}) y[{n}] = emulator_address(&{name});" for n, name in enumerate(there))
    file = kernel(tmp_path, calls)
    helper = "template <class F> float emulator_address(F f) { return float(uintptr_t((void*)f)); }\n"
    file.write_text(file.read_text().replace('extern "C"', f'{helper}extern "C"'))
    try:
        emulator.compile(file, {})
    except RuntimeError as problem:
        absent |= set(re.findall(r"error: (\w+) is not emulated here: \w+ \w+", str(problem)))
        assert re.findall(r"error: (?!\w+ is not emulated)(?!ld returned).*", str(problem)) == []
    assert {"__expf", "__logf", "rsqrtf", "__fmaf_rn", "__fdividef", "fmaxf", "__ldg"}.isdisjoint(absent)
    assert {"__tanhf", "asm", "wmma", "cg", "__fadd_rz", "__shared__"} <= absent


# By call: what it gives for a = 1.7, b = 0.3 and c = -2.6.
A, B, C = 1.7, 0.3, -2.6
VALUES = {
    "__expf(c)": math.exp(C),
    "__exp10f(b)": 10**B,
    "__logf(a)": math.log(A),
    "__log2f(a)": math.log2(A),
    "__log10f(a)": math.log10(A),
    "__powf(a, c)": A**C,
    "__sinf(a)": math.sin(A),
    "__cosf(a)": math.cos(A),
    "__tanf(a)": math.tan(A),
    "__fdividef(a, b)": A / B,
    "__fdividef(a, 0x1p127f)": 0,  # from 2^126 on
    "fdividef(a, 0x1p127f)": A / 2**127,
    "__saturatef(a) + __saturatef(c) + __saturatef(b)": 1 + B,
    "rsqrtf(a)": A**-0.5,
    "__frsqrt_rn(a)": A**-0.5,
    "__fsqrt_rn(a)": A**0.5,
    "rcbrtf(a)": A ** (-1 / 3),
    "sinpif(a)": math.sin(math.pi * A),
    "cospif(a)": math.cos(math.pi * A),
    "__frcp_rn(a)": 1 / A,
    "__fdiv_rn(a, b)": A / B,
    "__fsub_rn(a, b)": A - B,
    # Rounded once, and rounded twice: an FMA keeps what the product loses.
    "__fmaf_rn(0x1.000002p0f, 0x1.000002p0f, -0x1.000004p0f)": 2.0**-46,
    "__fadd_rn(0x1.000002p0f * 0x1.000002p0f, -0x1.000004p0f)": 0,
    "fmaxf(c, NAN) + max(a, b) + min(a, b)": C + A + B,
    "__float2int_rn(c)": -3,
    "__float2int_rz(c)": -2,
    "__float2int_rd(c)": -3,
    "__float2int_ru(c)": -2,
    "__popc(255) + __clz(1) + __ffs(8)": 8 + 31 + 4,
    "__ldg(&y[0]) + __ldg(y + 0)": 2 * math.exp(C),
    "__expf(-INFINITY)": 0,
}


def test_each_has_its_meaning(tmp_path):
    body = "".join(f"y[{n}] = {call};\n" for n, call in enumerate(VALUES))
    y = torch.full((len(VALUES),), math.nan)
    arguments = y, c_float(A), c_float(B), c_float(C)
    emulator.launch(kernel(tmp_path, body), "k", arguments, grid=1, block=1, macros={})
    got = dict(zip(VALUES, y.tolist(), strict=True))
    wrong = {call: (x, VALUES[call]) for call, x in got.items() if not math.isclose(x, VALUES[call], rel_tol=1e-6)}
    assert not wrong


def test_a_gpu_has_each_of_them_and_prints(tmp_path):
    body = "".join(f"y[{n}] = {call};\n" for n, call in enumerate(VALUES)) + 'printf("%f\\n", y[0]);'
    nvrtc.compile(kernel(tmp_path, body), {"NAN": "__int_as_float(0x7fffffff)"}, "sm_80")


def test_a_header_is_refused_with_the_reason(tmp_path):
    file = kernel(tmp_path, "")
    file.write_text("#include <cuda_fp16.h>\n" + file.read_text())
    with pytest.raises(RuntimeError, match="k.cu:1:.*there is no cuda_fp16.h: a kernel includes ptx.cuh only"):
        emulator.compile(file, {})


def test_an_answer_may_use_them_and_print():
    fast = ("expf(S[j * Br] - m_new)", "__expf(S[j * Br] - m_new)"), ("l *= alpha", "l = __fmul_rn(l, alpha)")
    prints = "m = m_new;", 'if (threadIdx.x + blockIdx.x + blockIdx.y == 0) printf("n is %d\\n", n);\n  m = m_new;'
    report = check("02.1", edited("02.1", *fast, prints))
    assert report.verdict == "passed", report
    assert "it printed:\n    n is " in repr(report)


@pytest.mark.skipif(engine.name == "cuda", reason="on a GPU NVRTC says what it does not know")
@pytest.mark.parametrize(
    "edit, says",
    [
        (("expf(S[j", "__sinhf(S[j"), "__sinhf is not emulated here: write sinhf"),  # which C's headers declare
        (("m = m_new;", 'asm volatile("");\n  m = m_new;'), "asm is not emulated here: inline PTX is for a GPU alone"),
    ],
)
def test_what_an_answer_may_not_use_is_told_with_its_line(edit, says):
    text = edited("02.1", edit)
    line = next(n for n, line in enumerate(text.splitlines(), 1) if edit[1].split("\n")[0] in line)
    report = check("02.1", text)
    assert report.verdict == "error" and f"your text, line {line}:" in repr(report) and says in repr(report), report
    assert "OSError" not in repr(report) and ".so" not in repr(report)
