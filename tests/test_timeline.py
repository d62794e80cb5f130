"""The clocks that steps/bench/timeline.py writes into a kernel's text leave its results and registers as they were.

And steps/bench/left_out.py leaves out what it says, and nothing else.
"""

from types import SimpleNamespace

import pytest
import torch

from steps.bench import fingerprint, left_out, rows, timeline, timing
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


def test_what_was_recorded_is_of_the_kernel_as_it_is_and_of_an_h200_rather_than_an_h100(tmp_path, monkeypatch):
    sizes = {(point.B, point.H, point.N, point.D) for point in left_out.POINTS}
    times = left_out.read()["times"]
    assert {tuple(time[name] for name in "BHND") for time in times} == sizes
    assert [time["without"] for time in times] == [None, *left_out.PARTS] * len(sizes)
    record = {"source": fingerprint.code_hash("02_fa2_cuda", left_out.KERNEL)}
    for gpu in ("NVIDIA H100 80GB HBM3", "NVIDIA H200"):
        rows.write_record("left_out", record | {"gpu": gpu}, tmp_path)
        assert left_out.read(tmp_path)["gpu"] == gpu
    rows.write_record("left_out", {"source": "of another kernel", "gpu": "NVIDIA H200"}, tmp_path)
    assert left_out.read(tmp_path)["gpu"] == "NVIDIA H100 80GB HBM3"
    monkeypatch.setattr(left_out, "KERNEL", "bwd_2_wgmma")
    assert left_out.read(tmp_path) == {}


def test_every_part_is_timed_in_one_run_and_recorded(tmp_path, monkeypatch):
    with pytest.raises(SystemExit, match="needs a GPU of Hopper's kind"):
        monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
        left_out.main(out=tmp_path)
    machine = rows.provenance("cpu", commit="c") | {"gpu": "NVIDIA H200"}
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (9, 0))
    monkeypatch.setattr(rows, "provenance", lambda **_: machine)
    monkeypatch.setattr(left_out, "tensors_at", lambda point, device: point.D)
    monkeypatch.setattr(left_out, "call_of", lambda file, D: (D, file.read_text()))
    whole = (launch.HERE / f"{left_out.KERNEL}.cu").read_text()

    def interleaved(calls, device):
        assert device == "cuda" and list(calls) == [None, *left_out.PARTS]
        assert [text == whole for _, text in calls.values()] == [name is None for name in calls]
        return {name: SimpleNamespace(ms_median=D) for name, (D, _) in calls.items()}

    monkeypatch.setattr(timing, "interleaved", interleaved)
    left_out.main(out=tmp_path)
    assert [time["ms_median"] for time in left_out.read(tmp_path)["times"]] == [128] * 6 + [64] * 6
