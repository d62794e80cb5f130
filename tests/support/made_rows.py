"""Valid rows of results, made up."""

from steps.bench import ring
from steps.bench.cost import Point
from steps.bench.grid import HOW


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


LOAD = {"timing": "sustained", "clock_mhz": 1600, "watts": 700.0}  # what a sustained row has

ORIGIN = {
    "run": "r1", "commit": "c", "date": "2026-01-31", "gpu": "NVIDIA H200", "n_gpus": 2, "driver": "580",
    "cuda": "13.0", "torch": "2.11.0", "triton": "3.6.0",
}  # fmt: skip
LARGE = ring.CASES["32k"][0]


def turned(who, **options):
    """A candidate of the ring whose rows tell these options."""
    return who, options


def made(case, who, ms, pass_="fwd", n_gpus=2, run="r1", **more):
    """A row of several GPUs."""
    who, options = who if isinstance(who, tuple) else (who, case.options(who))
    origin = ORIGIN | {"n_gpus": n_gpus, "run": run}
    row = ring.row_of(case, who, pass_, [ms, ms, ms, ms, 1.5 * ms], 1, {"error": 0.0, "peak_bytes": 10**6}, origin)
    return row | {"options": options} | more


def hop(transport, nbytes, ms):
    """A row of a message to the next rank."""
    row = {**ORIGIN, **Point(1, 1, nbytes // 256, 128).sizes, **HOW, "pass": "copy", "dtype": "bf16", "peer": "copy"}
    row |= {"stage": None, "kernel": None, "source": None, "options": {"transport": transport}}
    return row | dict(ms_median=ms, ms_p20=ms, ms_p80=ms, ms_worst=ms, reps=100, tflops=0.0, error=0.0)
