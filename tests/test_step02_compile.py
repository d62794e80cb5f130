"""Stage 02's kernels through NVIDIA's compiler, which needs no GPU: registers and spills, and what it refuses."""

import math
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch

from steps.step02_fa2_cuda import ladder, launches, nvrtc


def build(file, arch, D, dtype=None, *, tile=None, **options):
    """What a compilation of one of the ladder's files depends on, at the tile of a GPU with much shared memory."""
    (row,) = (row for row in (*ladder.ROWS, *ladder.BACKWARD_ROWS) if row.file == f"{file}.cu")
    dtype = dtype or {"sm_75": torch.float16}.get(arch, torch.bfloat16)
    dtype = dtype if dtype in row.dtypes else torch.float32
    Br, Bc = tile or row.tile(D, math.inf)
    like = dict(causal=False, scale=1, Br=Br, Bc=Bc, H=1, processors=1) | options
    problem = ladder.Problem(row, B=1, Hk=1, Nq=1, Nk=1, D=D, dtype=dtype, **like)
    return file, arch, (("D", D), ("Br", Br), ("Bc", Bc), *row.macros(problem).items())


ALL = ("sm_75", "sm_80", "sm_90a")  # T4, A100, H100
BUILDS = [  # every kernel for every GPU that it is for, at tiles that such a GPU gets, where registers are shortest
    *(build("fwd_0_scalar", arch, 96) for arch in ALL),
    *(build("bwd_0_scalar", arch, 96) for arch in ALL),
    *(build("fwd_0_scalar", "sm_90a", 96, tile=tile) for tile in ((32, 32), (32, 64))),
    *(build("bwd_0_scalar", "sm_90a", 96, tile=tile) for tile in ((32, 32), (64, 32))),
    *(build("fwd_1_warp", "sm_75", 96, dtype) for dtype in (torch.float32, torch.float16)),
    *(build("fwd_1_warp", "sm_80", 64, torch.float32, tile=tile) for tile in (None, (64, 32))),
    build("fwd_1_warp", "sm_90a", 96),
    *(build(file, arch, 128) for file in ("fwd_2_mma", "fwd_3_ldmatrix", "fwd_4_cp_async") for arch in ALL),
    *(build("fwd_5_fa2", arch, D)
      for arch, D in (("sm_75", 64), ("sm_80", 64), ("sm_80", 128), ("sm_90a", 128), ("sm_90a", 256))),
    *(build(file, "sm_90a", 128, causal=True) for file in ("fwd_6_wgmma", "fwd_7_roles")),
    *(build("fwd_8_hopper", "sm_90a", D, causal=causal) for D, causal in ((128, True), (256, False))),
    build("bwd_1_fa2", "sm_75", 128, tile=(32, 32)),
    *(build("bwd_1_fa2", arch, D) for arch, D in (("sm_80", 64), ("sm_90a", 64), ("sm_90a", 256))),
    build("bwd_2_wgmma", "sm_90a", 128),
    *(build(file, "sm_90a", 128, H=8, processors=132) for file in ("bwd_1_fa2", "bwd_2_wgmma", "bwd_3_hopper")),
    *(build("bwd_3_hopper", "sm_90a", D, deterministic=there) for D, there in ((64, False), (64, True), (128, True))),
    *(build("bwd_3_hopper", "sm_90a", D, switches=(("STAGES", 2),)) for D in (64, 128)),
]  # fmt: skip


def compile(file, arch, macros):
    path = file if isinstance(file, Path) else launches.HERE / f"{file}.cu"
    return nvrtc.compile(path, dict(macros), arch)


@pytest.fixture(scope="module")
def compiled(request):
    """{build: its future}: those that the selected tests want are compiled in the background, two at a time."""
    pytest.importorskip("cuda.bindings.nvrtc", reason="needs cuda-python and NVRTC")
    parameters = [getattr(item, "callspec", None) for item in request.session.items if item.path == request.path]
    wanted = [call.params["made_of"] for call in parameters if call and "made_of" in call.params]
    with ThreadPoolExecutor(2) as pool:
        yield {made_of: pool.submit(compile, *made_of) for made_of in wanted}


def test_every_kernel_is_compiled():
    assert {file for file, *_ in BUILDS} == {file.stem for file in launches.HERE.glob("?wd_*.cu")}


@pytest.mark.compile
@pytest.mark.parametrize(
    "made_of", BUILDS, ids=["-".join((f, a, *(f"{k}{v}" for k, v in macros))) for f, a, macros in BUILDS]
)
def test_kernels_fit_into_the_registers(made_of, compiled):
    """nvrtc.compile raises beyond a spill budget. A stack without spills is an array indexed at run time."""
    usage = compiled[made_of].result().usage
    print(*made_of[:2], dict(made_of[2]), {name: (u.registers, u.spills) for name, u in usage.items()})
    assert usage and all(0 < u.registers <= 255 and (u.stack == 0 or u.spills > 0) for u in usage.values()), usage


@pytest.mark.compile
def test_a_kernel_that_spills_is_refused():
    pytest.importorskip("cuda.bindings.nvrtc", reason="needs cuda-python and NVRTC")
    with pytest.raises(RuntimeError, match=r"'D': 128.* on sm_90a: attention_forward spills \d+ bytes .* allows 0"):
        compile(*build("fwd_0_scalar", "sm_90a", 128, tile=(64, 32)))


@pytest.mark.compile
@pytest.mark.parametrize(
    "before, after, problem",
    [
        ("__launch_bounds__(128 + 2 * Br, 1) ", "", r"\(C7508\) .*setmaxnreg"),
        ("wgmma_wait<0>();\n      V.release();", "V.release();", r"\(C7517\) .*wait\w* is injected"),
    ],
)
def test_wgmma_that_cannot_run_on_is_refused(before, after, problem, tmp_path):
    pytest.importorskip("cuda.bindings.nvrtc", reason="needs cuda-python and NVRTC")
    text = (launches.HERE / "fwd_7_roles.cu").read_text()
    assert text.count(before) == 1
    (tmp_path / "slow.cu").write_text(text.replace(before, after))
    with pytest.raises(RuntimeError, match=problem):
        _, arch, macros = build("fwd_7_roles", "sm_90a", 64, tile=(128, 64))
        compile(tmp_path / "slow.cu", arch, macros)


@pytest.mark.compile
def test_an_error_in_a_kernel_names_its_line(tmp_path):
    pytest.importorskip("cuda.bindings.nvrtc", reason="needs cuda-python and NVRTC")
    file, text = tmp_path / "fwd_0_scalar.cu", (launches.HERE / "fwd_0_scalar.cu").read_text()
    file.write_text(text.replace("float m_new = fmaxf(", "float m_new = no_such_function("))
    line = 1 + next(n for n, row in enumerate(text.split("\n")) if "m_new = fmaxf(" in row)
    with pytest.raises(Exception, match=rf"fwd_0_scalar.cu\({line}\).*no_such_function"):
        compile(file, *build("fwd_0_scalar", "sm_80", 64)[1:])
