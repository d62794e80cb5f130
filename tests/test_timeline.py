"""The clocks that steps/bench/timeline.py writes into a kernel's text leave its results and registers as they were.

And steps/bench/left_out.py leaves out what it says, and nothing else.
"""

import pytest
import torch

from steps.bench import left_out, timeline
from steps.bench.grid import Point
from steps.step02_fa2_cuda import emulator, launch, nvrtc


@pytest.mark.skipif(not emulator.available(), reason="needs g++")
def test_clocks_go_forward_and_change_nothing(tmp_path):
    q, k, v = torch.randn(3, 1, 1, 512, 128, generator=torch.Generator().manual_seed(0)).bfloat16()
    run, out, lse, marks = timeline.timed_launch(timeline.timed_file(tmp_path, first=2, steps=8), q, k, v, {}, steps=8)
    run()
    assert all(map(torch.equal, launch.forward(q, k, v, rung="hopper"), (out, lse)))
    # Block 0 of 3 has the first and the last of 4 tiles of queries, with 4 blocks of keys each: steps 0 to 7, the last
    # unwritten.
    assert (marks[:5] > 0).all() and (marks[5:] == 0).all()
    times = marks[:5].transpose(0, 1).flatten(1)
    assert (times[:, 1:] >= times[:, :-1]).all()


def test_all_steps_that_are_recorded_are_of_one_block():
    sizes = {**timeline.POINT.sizes, "dtype": torch.bfloat16, "processors": 132, "shared_limit": 232448}
    sizes["Nq"] = sizes.pop("N")
    ((_, grid, _, _, macros),) = launch.geometry(timeline.KERNEL, **sizes)
    tiles = sizes["B"] * sizes["H"] * sizes["Nq"] // macros["Br"] // grid
    assert timeline.FIRST + timeline.STEPS <= tiles * sizes["Nk"] // macros["Bc"]


def test_what_is_left_out_is_no_longer_in_the_text(tmp_path):
    whole, exp, softmax = (timeline.timed_file(tmp_path, without).read_text() for without in (None, "exp", "softmax"))
    assert [text.count("exp2_approx(S[e") for text in (whole, exp, softmax)] == [2, 0, 2]
    assert [text.count("online_softmax(S,") for text in (whole, exp, softmax)] == [2, 2, 0]


@pytest.mark.compile
@pytest.mark.parametrize("without", (None, *timeline.LEFT_OUT))
def test_clocks_cost_no_spills(tmp_path, without):
    pytest.importorskip("cuda.core", reason="cuda.core is not installed")
    macros = {"T": "bf16", "D": 128, "Br": 128, "Bc": 128, "CAUSAL": 0}
    compiled = nvrtc.compile(timeline.timed_file(tmp_path, without), macros, "sm_90a")
    assert compiled.usage["attention_forward"].spills == 0


def test_the_median_of_a_column_is_over_the_lines_that_hold_a_number_there():
    printed = "1755, 690.0, [N/A]\n1745, [N/A], [N/A]\n1750, 680.0, [N/A]\nno line of numbers\n"
    assert timeline.medians(printed) == [1750, 685, None]


@pytest.mark.skipif(not emulator.available(), reason="needs g++")
def test_what_the_backward_computes_without_a_part(tmp_path):
    tensors = left_out.tensors_at(Point(1, 1, 200, 128), "cpu")

    def results(without=None):
        for name in ("dq_sum", "dk", "dv"):
            tensors[name].zero_()
        left_out.call_of(left_out.written(tmp_path, without), tensors)()
        return [tensors[name].clone() for name in ("dq_sum", "dk", "dv")]

    whole = dq_sum, dk, dv = results()
    inputs = (tensors[name] for name in ("dout", "q", "k", "v", "out", "lse"))
    assert all(map(torch.equal, launch.backward(*inputs, rung="hopper")[1:], (dk, dv)))
    assert dq_sum.any()
    for without, changed in (("delta", [True, True, False]), ("additions to dq", [True, False, False])):
        found = results(without)
        assert [not torch.equal(*pair) for pair in zip(found, whole, strict=True)] == changed
    assert not found[0].any()


@pytest.mark.compile
@pytest.mark.parametrize("D, Br", ((64, 128), (128, 64)))
def test_leaving_a_part_out_costs_no_spills(tmp_path, D, Br):
    pytest.importorskip("cuda.core", reason="cuda.core is not installed")
    macros = {"T": "bf16", "D": D, "Br": Br, "Bc": 128, "DETERMINISTIC": 0, "HEADS_APART": 0}
    for without in left_out.PARTS:
        compiled = nvrtc.compile(left_out.written(tmp_path, without), macros, "sm_90a")
        assert compiled.usage["attention_backward"].spills == 0
