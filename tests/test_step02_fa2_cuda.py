"""Stage 02: the contract; registers and spills, which need no GPU; and what only a GPU, or only the emulation, can show."""

import shutil
from dataclasses import replace

import pytest
import torch

import steps.step02_fa2_cuda as step02
from reference import cases, error
from steps import engine
from steps.step02_fa2_cuda import emulator, kernels, nvrtc
from suite import Contract

no_compiler = engine.name == "cpu" and not emulator.available()
needs_compiler = pytest.mark.skipif(no_compiler, reason="without a GPU stage 02 needs g++, and there is none")


@needs_compiler
class TestContract(Contract):
    stage = step02
    few = ("ragged", "ragged_causal", "more_queries_causal", "scores_200")  # g++ takes seconds for each head_dim and dtype
    few_in_other_dtypes = ()


FORWARD, BACKWARD = kernels.HERE / "fwd_0_scalar.cu", kernels.HERE / "bwd_0_scalar.cu"
BUILDS = [  # file, D, tile, architectures: the default tile everywhere, the others where registers are shortest
    *((file, D, tile, arch) for file, tile in ((FORWARD, (64, 32)), (BACKWARD, (32, 64)))
      for D in (64, 96) for arch in nvrtc.ARCHITECTURES),
    (FORWARD, 96, (32, 32), "sm_90a"), (FORWARD, 96, (32, 64), "sm_90a"),
    (BACKWARD, 96, (32, 32), "sm_90a"), (BACKWARD, 96, (64, 32), "sm_90a"),
]  # fmt: skip


def build(file, D, tile, arch):
    pytest.importorskip("cuda.bindings.nvrtc", reason="needs cuda-python and NVRTC")
    return nvrtc.compile(file, {"D": D, "Br": tile[0], "Bc": tile[1]}, arch)


@pytest.mark.compile
@pytest.mark.parametrize("file, D, tile, arch", BUILDS, ids=[f"{f.stem}-D{D}-{t[0]}x{t[1]}-{a}" for f, D, t, a in BUILDS])
def test_kernels_fit_into_the_registers(file, D, tile, arch):
    usage = build(file, D, tile, arch).usage
    print(f"{file.name} D={D} tile={tile} {arch}:", ", ".join(f"{name} {u.registers} registers" for name, u in usage.items()))
    assert usage and all(u.spills == 0 and u.stack == 0 and 0 < u.registers <= 255 for u in usage.values()), usage


LADDER = [  # file, architecture, T, D, Br, Bc, other macros: the tiles that a GPU of that kind gets
    ("fwd_1_warp", "sm_80", "float32", 64, 64, 64, {}),
    *((file, arch, T, 128, 64, 64, {}) for file in ("fwd_2_mma", "fwd_3_ldmatrix", "fwd_4_cp_async")
      for arch, T in (("sm_80", "bf16"), ("sm_75", "fp16"))),
    *(("fwd_5_fa2", arch, T, D, *kernels.FA2_TILES[D], {}) for arch, T, D in
      (("sm_80", "bf16", 64), ("sm_80", "bf16", 128), ("sm_90a", "bf16", 256), ("sm_75", "fp16", 64))),
]  # fmt: skip


@pytest.mark.compile
@pytest.mark.parametrize("file, arch, T, D, Br, Bc, more", LADDER, ids=lambda x: str(x) if isinstance(x, int | str) else "")
def test_the_ladder_compiles_within_its_spill_budgets(file, arch, T, D, Br, Bc, more):
    pytest.importorskip("cuda.bindings.nvrtc", reason="needs cuda-python and NVRTC")
    usage = nvrtc.compile(kernels.HERE / f"{file}.cu", {"T": T, "D": D, "Br": Br, "Bc": Bc, **more}, arch).usage
    assert usage and all(u.registers > 0 for u in usage.values())


@pytest.mark.compile
def test_a_kernel_that_spills_is_refused():
    with pytest.raises(RuntimeError, match=r"'D': 128.* on sm_90a: attention_forward spills \d+ bytes .* allows 0"):
        build(FORWARD, 128, (64, 32), "sm_90a")


@pytest.mark.compile
def test_an_error_in_a_kernel_names_its_line(tmp_path):
    text = FORWARD.read_text()
    (tmp_path / FORWARD.name).write_text(text.replace("float m_new = fmaxf(", "float m_new = no_such_function("))
    line = 1 + next(n for n, row in enumerate(text.split("\n")) if "m_new = fmaxf(" in row)
    with pytest.raises(Exception, match=rf"fwd_0_scalar.cu\({line}\).*no_such_function"):
        build(tmp_path / FORWARD.name, 64, (64, 32), "sm_80")


@needs_compiler
@pytest.mark.skipif(engine.name == "cuda", reason="the emulation runs on the CPU")
@pytest.mark.parametrize("tile", step02.SUPPORTS["tiles"])
@pytest.mark.parametrize("name", ["ragged", "more_queries_causal"])
def test_the_order_of_threads_and_blocks_does_not_matter(name, tile):
    case = next(c for c in cases.CASES if c.name == name)
    inputs = replace(cases.build(case, step02.SUPPORTS, torch.float32), tile=tile)  # of the first rung, the scalar one
    want = error.expected(inputs.q, inputs.k, inputs.v, inputs.dout, causal=inputs.causal)
    first = cases.run(step02, case, inputs)
    for schedule in (("reverse", "reverse"), ("random", "random", 1), ("random", "random", 2), ("forward", "random", 3)):
        with emulator.schedule(*schedule):
            got = cases.run(step02, case, inputs)
        assert not error.failures(got, want)
        for result in ("out", "lse", "dk", "dv"):  # dq is a sum of atomic additions, in the order of the blocks
            assert torch.equal(got[result], first[result]), (schedule, result)


@needs_compiler
def test_files_work_when_copied_out(tmp_path, monkeypatch):
    """The folder without its __init__.py, anywhere: nothing of steps is needed."""
    folder = tmp_path / "lifted_fa2"
    shutil.copytree(kernels.HERE, folder, ignore=shutil.ignore_patterns("__pycache__"))
    (folder / "__init__.py").unlink()
    assert not any("from steps" in path.read_text() for path in folder.glob("**/*.py"))
    monkeypatch.syspath_prepend(tmp_path)
    import lifted_fa2.kernels as lifted

    q, k, v = TestContract().example(rung="scalar")
    out, lse = lifted.scalar_forward(q, k, v, causal=True)
    want = error.expected(q, k, v, torch.ones_like(q), causal=True)
    grads = lifted.scalar_backward(torch.ones_like(q), q, k, v, out, lse, causal=True)
    assert not error.failures(dict(zip(error.NAMES, (out, lse, *grads), strict=True)), want)


@pytest.mark.gpu
@pytest.mark.multigpu
def test_a_device_that_is_not_the_current_one():
    assert torch.cuda.current_device() == 0
    q, k, v = (x.to("cuda:1").requires_grad_() for x in TestContract().example(N=70, D=96))
    out = step02.attention(q, k, v, causal=True)
    grads = torch.autograd.grad(out.sum(), (q, k, v))
    assert torch.cuda.current_device() == 0
    want = error.expected(*(x.detach() for x in (q, k, v)), torch.ones_like(out), causal=True)
    assert not error.failures(dict(zip(("out", "dq", "dk", "dv"), (out.detach(), *grads), strict=True)), want)


@pytest.mark.gpu
def test_the_current_stream_is_used():
    q, k, v = TestContract().example(N=300, D=64)
    expected = step02.forward(q, k, v)[0]
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        torch.cuda._sleep(100_000_000)  # a kernel on another stream would read q before it is filled
        late = torch.zeros_like(q).copy_(q)
        out, _ = step02.forward(late, k, v)
    stream.synchronize()
    assert torch.equal(out, expected)


@pytest.mark.gpu
def test_more_than_2_to_the_31_elements():
    B, H, N, D = 600, 1000, 64, 64  # 2.46e9 elements, 9.8 GB; k, v and dout are expanded and take no memory
    if torch.cuda.mem_get_info()[0] < 60e9:
        pytest.skip("needs 60 GB of free GPU memory")
    q = torch.randn(B, H, N, D, device="cuda")
    k, v, dout = (torch.randn(1, 1, N, D, device="cuda").expand(B, H, -1, -1) for _ in range(3))
    out, lse = step02.forward(q, k, v, causal=True)
    dq, dk, dv = step02.backward(dout, q, k, v, out, lse, causal=True)
    for b, h in ((0, 0), (B - 1, H - 1)):
        own = [x[b : b + 1, h : h + 1] for x in (q, k, v, dout)]
        got = {name: x[b : b + 1, h : h + 1] for name, x in zip(error.NAMES, (out, lse, dq, dk, dv), strict=True)}
        assert not error.failures(got, error.expected(*own, causal=True))
