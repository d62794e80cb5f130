"""Valid rows of results, made up."""


def row(**changes):
    """A valid row of a kernel, with some fields changed."""
    good = dict(
        run="r1", commit="abc", date="2026-01-31", gpu="NVIDIA H200", n_gpus=1, driver="580", cuda="13.0",
        torch="2.11.0", triton="3.6.0", stage="01_fa1_numba", kernel="fwd_0_scalar", peer=None, source="0" * 12,
        dtype="bf16", B=1, H=2, Hk=2, N=512, Nk=512, D=64, causal=False, layout=None, options={}, timing="interleaved",
        clock_mhz=None, watts=None, ms_median=2.0, ms_p20=1.5, ms_p80=2.5, reps=30, tflops=3.0, error=1e-3,
    )  # fmt: skip
    return {**good, "pass": "fwd", **changes}


def peer_row(**changes):
    return row(stage=None, kernel=None, source=None, **{"peer": "sdpa-flash", **changes})


def of_02(kernel="fwd_5_fa2", **changes):
    return row(stage="02_fa2_cuda", kernel=kernel, **changes)


def ladder_rows(tflops=50.0):
    """Rows of three rungs of stage 02, with their peers and a matrix product."""
    at = dict(N=4096, Nk=4096)
    return [
        of_02("fwd_0_scalar", tflops=4.0, dtype="fp32", **at),
        of_02("fwd_2_mma", tflops=tflops, D=128, **at),
        of_02("bwd_0_scalar", tflops=1.5, dtype="fp32", **at, **{"pass": "bwd"}),
        peer_row(**at, D=128, tflops=340.0),
        peer_row(N=8192, Nk=8192, D=8192, tflops=800.0, peer="matmul", **{"pass": "matmul"}),
    ]


LOAD = {"timing": "sustained", "clock_mhz": 1600, "watts": 700.0}  # what a sustained row has
WHERE = "run", "commit", "date", "gpu", "n_gpus", "driver", "cuda", "torch", "triton"
ORIGIN = {name: row()[name] for name in WHERE} | {"n_gpus": 2}
