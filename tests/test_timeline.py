"""The clocks that reference/bench/timeline.py writes into a kernel's text leave its results and its registers as they were."""

import pytest
import torch

from reference.bench import timeline
from steps.step02_fa2_cuda import emulator, hopper, nvrtc

MACROS = {"T": "bf16", "D": 128, "Br": 128, "Bc": 128, "CAUSAL": 0}


@pytest.mark.skipif(not emulator.available(), reason="needs g++")
def test_clocks_go_forward_and_change_nothing(tmp_path):
    copy = timeline.lifted(tmp_path)
    text = (copy.HERE / f"{timeline.KERNEL}.cu").read_text()
    (copy.HERE / "fwd_8_timed.cu").write_text(timeline.instrumented(text, first=2, steps=8))
    q, k, v = torch.randn(3, 1, 1, 512, 128, generator=torch.Generator().manual_seed(0)).bfloat16()
    launch, out, lse, marks = timeline.timed_launch(copy, q, k, v, {}, steps=8)
    launch()
    assert all(map(torch.equal, copy.hopper_forward(q, k, v), (out, lse)))
    # Block 0 of 3 has the first and the last of 4 tiles of queries, with 4 blocks of keys each: steps 0 to 7, the last unwritten.
    assert (marks[:5] > 0).all() and (marks[5:] == 0).all()
    times = marks[:5].transpose(0, 1).flatten(1)
    assert (times[:, 1:] >= times[:, :-1]).all()


def test_clocks_cost_no_spills(tmp_path):
    pytest.importorskip("cuda.core", reason="cuda.core is not installed")
    file = tmp_path / "fwd_8_timed.cu"
    file.write_text(timeline.instrumented((hopper.HERE / f"{timeline.KERNEL}.cu").read_text()))
    assert nvrtc.compile(file, MACROS, "sm_90a").usage["attention_forward"].spills == 0
