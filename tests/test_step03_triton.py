"""Stage 03: the contract, sdpa against torch's, and the kernels compiled for GPUs that need not be there."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
import triton

import steps.step03_triton as step03
from reference import error
from steps import engine
from support.contract_suite import Contract

PINNED = "3.7.1"  # requirements.txt


class TestContract(Contract):
    stage = step03


@pytest.fixture(scope="module", autouse=True)
def faster_interpreter():
    """Saves a third of the interpreter's time.

    The interpreter replaces triton.language's functions anew at each call of a helper, and checks each integer addition
    for overflow. The first replacement is enough, and the check never fails here.
    """
    if engine.name == "cuda":
        yield
        return
    from triton.runtime import interpreter

    call = interpreter.InterpretedFunction.__call__

    def helper(self, *args, **kwargs):
        if self.fn.__module__.startswith("triton"):
            return call(self, *args, **kwargs)
        return self.rewrite()(*args, **kwargs)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(interpreter.InterpretedFunction, "__call__", helper)
        unchecked = interpreter.InterpreterOptions(sanitize_overflow=False)
        patch.setattr(interpreter.interpreter_builder, "options", unchecked)
        yield


def random(*shape, dtype=torch.float32):
    rng = torch.Generator().manual_seed(sum(shape))
    return torch.randn(*shape, generator=rng).to(engine.device, dtype).requires_grad_()


# Shapes of query, key and value, and options: one of each kind that torch's function takes and sdpa offers.
SDPA = {
    "plain": ((2, 2, 7, 32), (2, 2, 9, 32), (2, 2, 9, 32), {}),
    "scale": ((1, 1, 7, 32), (1, 1, 9, 32), (1, 1, 9, 32), {"scale": 0.3}),
    "causal": ((1, 2, 9, 32), (1, 2, 9, 32), (1, 2, 9, 32), {"is_causal": True}),
    "causal, fewer queries": ((1, 1, 5, 32), (1, 1, 40, 32), (1, 1, 40, 32), {"is_causal": True}),
    "causal, more queries": ((1, 1, 40, 32), (1, 1, 5, 32), (1, 1, 5, 32), {"is_causal": True, "scale": 0.3}),
    "causal, no key": ((1, 1, 4, 32), (1, 1, 0, 32), (1, 1, 0, 32), {"is_causal": True}),
    "2-D": ((7, 32), (9, 32), (9, 32), {}),
    "3-D": ((2, 7, 32), (2, 9, 32), (2, 9, 32), {"is_causal": True}),
    "5-D": ((1, 2, 1, 7, 32), (1, 2, 1, 9, 32), (1, 2, 1, 9, 32), {}),
    "batch of keys broadcast": ((2, 1, 7, 32), (1, 1, 9, 32), (1, 1, 9, 32), {}),
    "head of query broadcast": ((1, 1, 7, 32), (1, 2, 9, 32), (1, 2, 9, 32), {}),
    "ranks differ": ((2, 7, 32), (9, 32), (9, 32), {}),
    "grouped heads": ((1, 4, 7, 32), (1, 2, 9, 32), (1, 2, 9, 32), {"enable_gqa": True}),
    "grouped heads, 3-D": ((4, 7, 32), (2, 9, 32), (2, 9, 32), {"enable_gqa": True, "is_causal": True}),
    "grouped heads, key and value differ": ((3, 4, 7, 32), (3, 2, 9, 32), (3, 1, 9, 32), {"enable_gqa": True}),
}  # fmt: skip


@pytest.mark.parametrize("name", SDPA)
def test_sdpa_is_torchs_function(name):
    *shapes, options = SDPA[name]
    ours, theirs = ([random(*shape) for shape in shapes] for _ in range(2))
    out, want = step03.sdpa(*ours, **options), F.scaled_dot_product_attention(*theirs, **options)
    torch.testing.assert_close(out, want, atol=2e-6, rtol=1e-5)
    dout = random(*want.shape).detach()
    out.backward(dout)
    want.backward(dout)
    for x, y in zip(ours, theirs, strict=True):
        torch.testing.assert_close(x.grad, y.grad, atol=2e-5, rtol=1e-5)  # on a GPU torch's own error is 1e-5


SDPA_ERRORS = {
    "heads without enable_gqa": ((1, 4, 7, 32), (1, 2, 9, 32), {}),
    "heads that do not divide": ((1, 3, 7, 32), (1, 2, 9, 32), {"enable_gqa": True}),
    "batches": ((2, 1, 7, 32), (3, 1, 9, 32), {}),
    "enable_gqa without heads": ((7, 32), (9, 32), {"enable_gqa": True}),
}


@pytest.mark.parametrize("name", SDPA_ERRORS)
def test_sdpa_refuses_what_torchs_function_refuses(name):
    query, key, options = SDPA_ERRORS[name]
    for function in (F.scaled_dot_product_attention, step03.sdpa):
        with pytest.raises((RuntimeError, IndexError)):
            function(random(*query), random(*key), random(*key), **options)


@pytest.mark.parametrize("options", [{"attn_mask": torch.ones(7, 9, dtype=torch.bool)}, {"dropout_p": 0.1}])
def test_sdpa_names_what_it_lacks(options):
    with pytest.raises(NotImplementedError, match=next(iter(options))):
        step03.sdpa(random(1, 1, 7, 32), random(1, 1, 9, 32), random(1, 1, 9, 32), **options)


def test_sdpa_needs_one_head_dim():
    with pytest.raises(NotImplementedError, match="head_dim"):
        step03.sdpa(random(7, 32), random(9, 32), random(9, 16))


@pytest.mark.parametrize("dtype", step03.SUPPORTS["dtypes"], ids=str)
@pytest.mark.parametrize("D", [1, 256])
def test_the_ends_of_the_head_dims(D, dtype):
    q, k, v, dout = (random(1, 1, 20, D, dtype=dtype).detach() * (1 + i / 8) for i in range(4))
    out, lse = step03.forward(q, k, v, causal=True)
    got = dict(zip(error.NAMES, (out, lse, *step03.backward(dout, q, k, v, out, lse, causal=True)), strict=True))
    assert not error.failures(got, error.expected(q, k, v, dout, causal=True))


# Compiles the kernels that the launchers launch, for one GPU after the other; prints a line of JSON for each kernel.
COMPILE = """
import importlib, json, re, subprocess, sys, torch, triton
from triton.backends.compiler import GPUTarget
from triton.runtime.jit import JITFunction

class Driver:  # stands in for a GPU: Triton asks it what to compile for
    arch = 80
    def get_current_device(self): return self.arch
    def get_current_stream(self, device): return 0
    def get_current_target(self): return GPUTarget("cuda", self.arch, 32)

driver, launch, report = Driver(), JITFunction.run, []
triton.runtime.driver.set_active(driver)

def compile_only(kernel, *args, grid, warmup, **options):
    compiled = launch(kernel, *args, grid=grid, warmup=True, **options)
    arch = f"sm_{driver.arch}a" if driver.arch >= 90 else f"sm_{driver.arch}"
    ptxas = [triton.knobs.nvidia.ptxas.path, "-v", "--gpu-name=" + arch, "-o", "/dev/null", "/dev/stdin"]
    log = subprocess.run(ptxas, input=compiled.asm["ptx"], capture_output=True, text=True, check=True).stderr
    spilled = int(re.search(r"(\\d+) bytes spill stores", log)[1])
    counts = {name: compiled.asm["ptx"].count(name) for name in ("mma.sync", "wgmma.mma_async", "cp.async")}
    row = dict(arch=driver.arch, kernel=kernel.__name__, spilled=spilled, shared=compiled.metadata.shared)
    print(json.dumps(row | counts))

JITFunction.run = compile_only
forward = importlib.import_module("fwd_0_fused").forward
backward = importlib.import_module("bwd_0_fused").backward
x, lse = torch.zeros(1, 1, 64, 64, dtype=torch.bfloat16), torch.zeros(1, 1, 64)
for driver.arch in (80, 90):
    forward(x, x, x, causal=True)
    backward(x, x, x, x, x, lse, causal=True)
"""


@pytest.fixture(scope="module", autouse=True)
def compiler():
    """The process that compiles. Triton may interpret in this one, and the other one works while the tests run here."""
    environment = os.environ | {"TRITON_INTERPRET": "0", "PYTHONPATH": str(Path(step03.__file__).parent)}
    process = subprocess.Popen([sys.executable, "-c", COMPILE], env=environment, stdout=subprocess.PIPE, text=True)
    yield process
    process.kill()


@pytest.fixture(scope="module")
def compiled(compiler):
    """What the kernels compile to, by (compute capability, kernel)."""
    rows, _ = compiler.communicate()
    assert compiler.returncode == 0
    return {(row["arch"], row["kernel"]): row for row in map(json.loads, rows.splitlines())}


@pytest.mark.parametrize("kernel", ["forward_kernel", "keys_kernel", "queries_kernel"])
@pytest.mark.parametrize("arch, instruction, shared", [(80, "mma.sync", 163), (90, "wgmma.mma_async", 227)])
def test_compiles_to_tensor_core_instructions(compiled, kernel, arch, instruction, shared):
    row = compiled[arch, kernel]
    assert row[instruction] > 0 and row["cp.async"] > 0  # copies run ahead of their use
    assert row["shared"] <= shared * 1024
    if triton.__version__ == PINNED:  # older versions spill a register or two
        assert row["spilled"] == 0, row


@pytest.mark.gpu
@pytest.mark.parametrize("shape", [(2, 1, 2**25, 64), (1, 1, 2**7, 2**25)], ids=["batch", "row"])
def test_more_than_2_to_the_31_elements(shape):
    """2^32 elements: the second batch entry, or the rows from 64 on, begin 2^31 or more elements after the first."""
    x = torch.empty(shape, dtype=torch.float16, device="cuda")[:, :, :70, :64]
    x.copy_(random(*shape[:2], 70, 64).detach())
    out, lse = step03.forward(x, x, x, causal=True)
    got = dict(zip(error.NAMES, (out, lse, *step03.backward(x, x, x, x, out, lse, causal=True)), strict=True))
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
