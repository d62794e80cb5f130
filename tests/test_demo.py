"""`python -m steps demo` on the command line: every stage agrees with the reference, and a wrong stage fails."""

import hashlib
import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

from reference import attention, error, mutants
from steps import __main__, catalogue, engine
from steps.course.demo import compare, model, training

QUICK = model.Size(N=40, H=2, D=32, steps=20)
without_a_gpu = pytest.mark.skipif(engine.name != "cpu", reason="there is a GPU in use")


@pytest.fixture(scope="module")
def subject():
    return compare.Subject(QUICK, lambda: None)


def test_the_command_runs_one_stage_and_writes_its_row(tmp_path):
    file = tmp_path / "rows.json"
    command = [sys.executable, "-m", "steps", "demo", "--stage", "00", "--json", str(file)]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("engine ") and "What next" in done.stdout and "make lab" in done.stdout
    assert all(len(line) <= 80 for line in done.stdout.splitlines())
    (row,) = [r for r in json.loads(file.read_text()) if r["stage"] == "step00_naive"]
    assert row["verdict"] == "agrees" and row["shape"] == [1, 2, 131, 32]
    assert all(0 < row["errors"][n] <= row["tolerances"][n] for n in ("out", "lse", "dq", "dk", "dv"))


def test_a_part_of_the_sequence_has_one_byte_more_than_queries(subject):
    """Each query predicts the byte that follows it."""
    q, *_ = subject.upto(11).inputs()
    assert q.shape == (1, 2, 11, 32) and subject.upto(11).tokens.shape[1] == 12


def test_every_column_is_explained(subject):
    row = compare.compare("00", subject) | {"tflops": 1.0, "sdpa_tflops": 2.0}
    columns = [str(column.header).replace("\n", "") for column in __main__.results([row]).columns]
    explained = re.findall(r"^(\w+(?:, \w+)*) ", __main__.COLUMNS, re.M)
    assert [*", ".join(explained).split(", "), "TFLOP/s", "verdict"] == columns


def test_the_text_is_a_fixed_copy_of_pages(monkeypatch):
    """The losses, the recorded training and the picture of the five stages are of these bytes, whatever pages say."""
    read, real = [], Path.read_bytes
    monkeypatch.setattr(Path, "read_bytes", lambda path: read.append(path) or real(path))
    texts = [bytes(text.tolist()) for text in (model.text(), model.sequence(model.LARGE, "cpu")[0])]
    digests = [(len(text), hashlib.sha256(text).hexdigest()[:16]) for text in texts]
    assert digests == [(79565, "a2a1c446605e7d81"), (4097, "047e6f908b2ecd57")]
    assert {path.parent for path in read} == {Path(model.__file__).parent}


@pytest.mark.parametrize("number", catalogue.STAGES)
def test_every_stage_agrees_with_the_reference(number, subject):
    row = compare.compare(number, subject)
    if "reason" in row:
        pytest.skip(row["reason"])
    assert row["verdict"] == "agrees", row


@pytest.mark.parametrize("name", error.NAMES)
def test_a_wrong_result_fails_the_stage_and_the_command(name, subject, monkeypatch):
    right = catalogue.stage("00")

    def off(names, results):
        return tuple(x * 1.001 if n == name else x for n, x in zip(names, results, strict=True))

    class Wrong:
        forward = staticmethod(lambda *args, **how: off(error.NAMES[:2], right.forward(*args, **how)))
        backward = staticmethod(lambda *args, **how: off(error.NAMES[2:], right.backward(*args, **how)))
        attention = right.attention

    monkeypatch.setattr(compare, "stage", lambda number: Wrong)
    row = compare.compare("00", subject)
    assert row["verdict"] == "FAILS" and row["errors"][name] > row["tolerances"][name]
    monkeypatch.setattr(compare, "Subject", lambda size, progress: subject)
    others = {number: row | {"verdict": "agrees"} for number in catalogue.STAGES}
    monkeypatch.setattr(compare, "compare", lambda number, *_: (others | {"02": row})[number])
    result = CliRunner().invoke(__main__.app, ["demo"])
    sizes = 1 if engine.name == "cpu" else 2  # a GPU also runs a larger one
    assert result.exit_code == 1 and result.output.count("FAILS") == sizes


def test_a_wrong_gradient_inside_the_model_fails_too(subject, monkeypatch):
    right = catalogue.stage("00")

    class Wrong:
        forward, backward = right.forward, right.backward
        attention = staticmethod(lambda q, k, v, **options: right.attention(q, k, v, **options) * 1.0001)

    monkeypatch.setattr(compare, "stage", lambda number: Wrong)
    row = compare.compare("00", subject)
    assert row["verdict"] == "FAILS" and row["errors"]["out"] <= row["tolerances"]["out"]


def test_the_worst_gradient_is_the_one_that_is_furthest_beyond_its_tolerance(subject, monkeypatch):
    right = compare.compare("00", subject)
    step, tolerance = subject.step_under_sdpa()
    small, *_, large = sorted(step.keys() - {"loss"}, key=tolerance.get)
    step[small] = step[small] + 1.5 * tolerance[small]
    step[large] = step[large] + 0.9 * tolerance[large]
    monkeypatch.setattr(compare, "_on_one", lambda *_: ({}, step))
    row = compare.compare("00", subject)
    assert right["verdict"] == "agrees" and row["verdict"] == "FAILS" and row["gradient"]["worst"] == small


def test_each_number_of_a_training_step_alone_fails_the_stage(subject, monkeypatch):
    """The loss and each parameter's gradient, which has to be within its own tolerance."""
    step, tolerance = subject.step_under_sdpa()
    for name, x in step.items():
        for far, verdict in (0.9, "agrees"), (1.5, "FAILS"):
            other = step | {name: x + far * tolerance[name]}
            monkeypatch.setattr(compare, "_on_one", lambda *_, other=other: ({}, other))
            assert compare.compare("00", subject)["verdict"] == verdict, name


def test_each_form_of_a_cell_of_the_demo_s_table():
    number = {"errors": dict.fromkeys(error.NAMES, 3e-7), "tolerances": dict.fromkeys(error.NAMES, 4e-6)}
    number |= {"loss_difference": 0.0, "loss_tolerance": 2e-12, "seconds": 0.04}
    number |= {"gradient": {"worst": "w", "difference": float("inf"), "tolerance": 1.5}}
    where = {"stage": "step02_fa2_cuda", "engine": "NVRTC", "shape": [1, 2, 131, 32]}
    table = __main__.results([
        where | number | {"verdict": "agrees", "tflops": 123.4, "sdpa_tflops": 0.5},
        where | number | {"verdict": "FAILS"},
        where | {"verdict": "skipped", "reason": "needs a GPU"},
    ])  # fmt: skip
    lines = [list(column.cells) for column in table.columns]
    agrees, fails, skipped = map(list, zip(*lines, strict=True))
    first = "02_fa2_cuda\nNVRTC\n1x2x131x32"
    numbers = ["3e-7\n4e-6"] * 5 + ["0e+00\n2e-12", "inf\n2e+00", "0.0"]
    assert agrees == [first, *numbers, "123\n(0.5)", "agrees"]
    assert fails == [first, *numbers, "", "FAILS"]
    assert skipped == [first, *[""] * 9, "skipped"]


@without_a_gpu
def test_a_missing_compiler_is_a_reason_to_skip_not_to_fail(subject, monkeypatch):
    monkeypatch.setattr(catalogue.shutil, "which", lambda name: None)
    row = compare.compare("02", subject)
    assert row["verdict"] == "skipped" and "apt install g++" in row["reason"]


def test_there_is_no_stage_05():
    result = CliRunner().invoke(__main__.app, ["demo", "--stage", "05"])
    assert result.exit_code == 2 and "00, 01, 02, 03, 04" in result.output


def test_trained_attention_is_peaked_and_the_same_every_time(subject):
    q, k, _, _ = subject.inputs()
    again = compare.Subject(QUICK, lambda: None).inputs()
    assert torch.equal(q, again[0])
    untrained = model.Model(QUICK.H, QUICK.D).to(q.device)
    q0, k0, _, _ = model.attention_input(untrained, subject.tokens)
    weights, weights0 = (attention.scores(*pair, causal=True).softmax(-1) for pair in ((q, k), (q0, k0)))
    assert weights.amax(-1).mean() > weights0.amax(-1).mean()


@pytest.mark.parametrize("mark, twins, says", [
    ("killed", [], None), ("survives", [], "survives every case: a"), ("killed", [("a", "b")], "tells apart: a and b"),
])  # fmt: skip
def test_mutants_fails_where_a_mistake_survives_or_two_cannot_be_told_apart(mark, twins, says, monkeypatch):
    matrix = {"a": {"ragged": mark}, "b": {"ragged": "killed"}}
    monkeypatch.setattr(mutants, "kill_matrix", lambda supports: (matrix, twins))
    result = CliRunner().invoke(__main__.app, ["mutants", "--stage", "00"])
    assert result.exit_code == (says is not None) and "a ragged" in result.output
    assert says in result.output if says else "no case" not in result.output


@without_a_gpu
def test_bench_without_a_gpu_says_so():
    result = CliRunner().invoke(__main__.app, ["bench"])
    assert result.exit_code == 1 and "needs a GPU" in result.output


def test_a_model_learns_the_same_with_every_stage_and_not_with_a_wrong_one():
    size = model.Size(N=33, H=1, D=32, steps=4, batch=2)
    found = training.attentions("float32", ("00", "03") if not catalogue.unavailable("03") else ("00",))

    def ahead(q, k, v):  # each query sees one key too many
        return catalogue.stage("00").attention(q, torch.roll(k, -1, -2), torch.roll(v, -1, -2), causal=True)

    losses = {name: training.curve(size, one) for name, one in (found | {"ahead": ahead}).items()}
    far = training.apart(losses)
    assert far.keys() == losses.keys() - {training.SDPA} and losses[training.SDPA][-1] < losses[training.SDPA][0]
    assert far.pop("ahead") > 1e-3 and max(far.values()) < 1e-5
