"""What a report of `check` says, and in which order: the name of the mistake, else the function's own first difference,
then one failing case in full and the others in a line each.
"""

import importlib
import shutil

import pytest
import torch

from reference import cases, error
from steps import catalogue, engine
from steps.course.workbook import check, differences, exercises, first_difference, jobs, one_rung
from steps.course.workbook.outcome import LONGEST, in_full_once, why
from support.answers import edited

TASKS = exercises.load()
on_cpu = pytest.mark.skipif(engine.name != "cpu", reason="on a GPU a kernel's function is not called from Python")
emulated = pytest.mark.skipif(not shutil.which("g++"), reason="the emulation needs g++")


@pytest.fixture(autouse=True)
def my(tmp_path, monkeypatch):
    """An empty folder in place of my/."""
    monkeypatch.setattr(exercises, "MY", tmp_path / "my")


def report_on(id, *edits):
    """The report on the stage's own text with these pairs (old, new) of text replaced."""
    if reason := catalogue.unavailable(TASKS[id].number):
        pytest.skip(reason)
    return check(id, edited(id, *edits))


# The order.


def test_a_right_case_with_a_long_name_is_not_called_wrong():
    lines = in_full_once([{"says": "a", "wrong": ["b"]}, {"says": LONGEST * "c", "wrong": []}])
    assert lines[-1] == f"ok     {LONGEST * 'c'}"


def test_the_name_comes_first_and_one_case_is_told_in_full():
    lines = report_on("00.2", ("alpha[..., None] * O", "O")).lines
    assert lines[0] == "This equals what you get when O is not rescaled when the running maximum moves."
    at = [n for n, line in enumerate(lines) if line.startswith("WRONG")]
    assert at[0] == 1 and at[1:] == list(range(at[1], at[1] + 3)), lines
    assert lines[2].strip().startswith("out is off by") and lines[at[1]].startswith(
        "WRONG  stable at scores of +-200: out"
    )


def test_a_name_from_a_single_case_is_given_as_such():
    first = report_on("00.3", ("-math.inf", "-1e9")).lines[0]
    assert first.startswith("In the one case that is wrong, this equals what you get when masked scores are set to")


def test_a_slip_in_the_text_stands_before_the_cases():
    report = report_on("00.1", (".nan_to_num(neginf=0.0)", ".clamp(min=-1e9)"))
    assert report.lines[0].startswith("Look at `-1e9`"), report


def test_the_parts_of_a_report_in_short():
    rows = [{"says": "a", "wrong": []}, {"says": "b", "wrong": ["off", "more"]},
            {"says": "c", "wrong": ["off", "more"]},
            {"says": "d", "wrong": ["x" * LONGEST]}, {"says": "e", "wrong": ["the first one is:"]}]  # fmt: skip
    full = ["ok     a", "WRONG  b", " " * 9 + "off", " " * 9 + "more"]
    assert in_full_once(rows) == [*full, "WRONG  c: off", "WRONG  d", "WRONG  e"]
    assert why([*rows, {"equals": ["x"], "difference": ["y"], "changed": ["z"]}])[:2] == [
        "This equals what you get when x.", "y"]  # fmt: skip
    assert why(rows[:2] + [{"equals": ["x"]}]) == ["In the one case that is wrong, this equals what you get when x."]
    assert why([{"wrong": ["w"]}, {"equals": ["x"], "of_many": True}]) == ["This equals what you get when x."]
    assert why([{"wrong": ["w"]}, {"remark": "r"}]) == ["r"] and why([]) == []


# The function's own first difference.

THREAD = "thread = cuda.threadIdx.y * cuda.blockDim.x + cuda.threadIdx.x"
SHOWN = {  # {exercise: (edit, what the report contains)}; mistakes.toml has more
    "00.1": (("return P,", "return 3.1 * P,"), ["row 0 of your P adds up to 3.1, not 1", "every entry of P is 3.1"]),
    "00.2": (("p[..., None] * v_j", "2 * p[..., None] * v_j"),
             ["differs from the right one after key 1", "yours            1.67263               1         1.85658"]),
    "00.3": (("col > row", "(col > row) | (col == 3)"),
             ["in call 1, at i = 0, j = 0, shift = 0", "rows 0 to 7, columns 0 to 7 of the tile: # seen, . hidden",
              "    ###.....   ####...."]),
    "01.1": (("else beta / l_new", "else 2 * beta / l_new"), ["in call 1, at head = 0, i = 8", "now P", "new["]),
    "01.2": ((THREAD, "thread = cuda.threadIdx.x // 2"), first_difference.ONE_THREAD),
    "00.4": (("arange(rows.start, rows.stop", "arange(0, rows.stop - rows.start"),
             ["in call 5, at rows = 8 to 15, keys = 8 to 15", "# seen, . hidden", "    #######.   ########"]),
    "01.3": (("- delta_i)", "- 2 * delta_i)"), ["in call 1, at head = 0, i = 0", "    dS[0, 0] is "]),
    "03.1": (("column < Nk", "(column < Nk - 8) & (row < Nq)"),  # no result shows the rows from Nq on
             ["rows 0 to 4, columns 7 to 14 of the tile: # seen, . hidden", "####....   ########"]),
    "03.3": (("alpha * l + tl.sum(P, 1), O", "alpha * l + tl.sum(P, 1) * 3, O"),
             ["in call 1", "m[0]          l[0]       O[0, 0]"]),
}  # fmt: skip


@on_cpu
@pytest.mark.parametrize("id", [pytest.param(id, marks=pytest.mark.long if id == "01.1" else ()) for id in SHOWN])
def test_the_first_difference_is_shown(id):
    edit, words = SHOWN[id]
    report = report_on(id, edit)
    assert report.verdict == "wrong" and report.mutants == [], report
    assert all(word in repr(report) for word in words), report
    cause = report.lines.index(next(line for line in report.lines if line.startswith(("WRONG", "ok "))))
    assert any(words[0] in line for line in report.lines[:cause]), report
    assert max(map(len, report.lines)) <= 120, report


OF_PUZZLES = {  # (puzzle, edit, what the report contains)
    "02.10": ("02.10", ('"wait for S", "release K"', '"release K", "wait for S"'),
              ['operation 3, "release K", needs the end of the product for S, but S and O may be under way']),
    "02.10 not started": ("02.10", ('"start S", "start O", "wait for S"', '"start O", "wait for S", "start S"'),
                          ["S is started after the wait for S", 'operation 4, "release K", needs the end']),
    "02.10 late": ("02.10", ('["start S", "start O", "wait for S", "release K"',
                             '["release K", "start S", "start O", "wait for S"'),
                   ['operation 1, "release K", needs the end of the product for S, but it is not yet started']),
    "03.5": ("03.5", ("key // 16", "key // 8"),
             ["the first one is key 10 of query 0, head 0, batch entry 0",
              "byte 10 of the counter (0, 0, 0, 0) is 58, and the threshold 154: it has to be kept",
              "keys 0 to 15 of this query, # kept, . dropped: yours ###...#.#..#..#., right ###...#.#.###..#"]),
    "03.6": ("03.6", ("scale * S + M", "scale * (S + M)"),
             ["is the sum over (b, h) = (0, 0), (0, 1), (0, 2), (1, 0), (1, 1), (1, 2):",
              "0.0715 + 0.6427 + 0.537 + 0.07753 - 0.003992 + 0.005572 = 1.33",
              "in (0, 0) P is 0.3726, dP -0.828 and delta -1.02"]),
    "03.7": ("03.7", ("tl.exp(lse_s - unit)", "tl.where(lse_s == m, 1.0, 0.0)"),
             ["in row 0 the parts have lse_s = -0.47166, 0.07221", "lse: yours 0.0722095, right 0.529948",
              "weights: yours 0, 1; right 0.36729, 0.63271"]),
    "03.7 no sum": ("03.7", ("w[:, None] * out_s, 0)", "w[:, None] * out_s * out_s, 0)"),
                    ["right 0.36729, 0.63271; yours is no weighted sum of the parts"]),
    "03.capstone.1": ("03.capstone.1", ("tl.max(S, 1)[:, None])", "tl.max(S, 0)[None, :])"),
                      ["With the identity for v, out is your P (in the case: one head of 32 tokens):",
                       "P[0, 0] is 0.00420932, expected 0.0059457"]),
    "03.capstone.3": ("03.capstone.3", ("load_tile(v, v_strides[2], j", "load_tile(v, D, j"),
                      ["strides of their own; head 0 of batch entry 0", "it is right; look at how v is read"]),
    "03.capstone.4": ("03.capstone.4", ("key <= query + Nk - Nq", "key <= query + Nk - Nq - 1 + (key == 0)"),
                      ["rows 0 to 7, columns 0 to 7 of the tile: # seen, . hidden", "    ###.....   ####....",
                       "P[1, 0] is 1, expected 0.346359"]),
}  # fmt: skip


LONG = "02.10 not started", "02.10 late", "03.7 no sum", "03.capstone.3", "03.capstone.4"


@on_cpu
@emulated
@pytest.mark.parametrize("name", [pytest.param(x, marks=pytest.mark.long if x in LONG else ()) for x in OF_PUZZLES])
def test_a_puzzle_and_the_capstone_show_their_own_first_difference(name):
    id, edit, words = OF_PUZZLES[name]
    report = report_on(id, edit)
    assert report.verdict == "wrong" and all(word in repr(report) for word in words), report


PROBED = {  # (exercise, edit, what the report contains)
    "02.1": ("02.1", ("l += P;", "l += 2 * P;"), ["after tile 1,", "yours              1     3.21306     2.81959",
                                                  "right              1     1.60653     2.81959"]),
    "02.1 int": ("02.1", ("float P", "int P"), ["line 12: a float becomes int here"]),
    "02.2": ("02.2", ("sum += dS", "sum += 2 * dS"), ["row 0, column 0 of dq gets 9, and not 4.5"]),
    "02.1 rows of V": ("02.1", ("V[j * D + d]", "V[j * Bc + d]"), ["yours              1     1.60653     4.03265"]),
    "02.2 threads": ("02.2", ("e += Bc", "e += 1"), ["added more than once, or by nobody:", "1 2", "3 3"]),
    "02.2 transposed": ("02.2", ("e / D * Bc + j", "j * Bc + e / D"), ["row 0, column 0 of dq gets 8.5, and not 4.5"]),
    "02.3": ("02.3", ("dO[d] * O[d]", "dO[d] + O[d]"), ["your function returns 36; expected 70"]),
    "02.5": ("02.5", ("near[2], near[3]", "near[3], near[2]"),
             ["Lane 0 is the first that holds other entries of P, in A[1]:",
              "yours  lower half P[8][1], upper half P[8][0]", "right in all lanes: A[0], A[2], A[3]"]),
    "02.6": ("02.6", ("min(Nk, max(", "min(Nk - 1, max("), ["causal = 1, with Br = 16", "returns 19; expected 20"]),
    "02.7": ("02.7", ("t / 16 * 8 + t % 8", "t / 16 * 8 + t / 4 % 8"),
             ["lane 1 is the first that gives another", "yours  row 0, column 48", "right  row 1, column 48"]),
}  # fmt: skip


@emulated
@pytest.mark.parametrize("name", PROBED)
def test_a_small_kernel_shows_the_first_difference_in_cuda(name):
    id, edit, words = PROBED[name]
    report = report_on(id, edit)
    assert report.verdict == "wrong" and all(word in repr(report) for word in words), report
    assert max(map(len, report.lines)) <= 120, report


def said_of_the_stages_own(id, folder):
    """What is said of the function of the stage itself, in the smallest case of the exercise."""
    task, module = TASKS[id], f"steps.{TASKS[id].file.removesuffix('.py').replace('/', '.')}"
    stage = one_rung.stage(task.stage)
    job = {name: getattr(task, name) for name in ("id", "stage", "file", "function", "rung", "cases")}
    job |= {"folder": str(folder), "module": module, "original": task.path.read_text()}
    found = list(jobs._cases(job, one_rung.supports_of(stage, task.rung)))
    case, inputs, want = min(found, key=lambda row: row[1].q.numel())

    def run():
        if task.stage == "step04_ring":
            return jobs._of_chunks(importlib.import_module(module).merge, inputs, last_first=True)
        return jobs._results(stage, job, case, inputs, want)

    return first_difference.explain(job, case.says, run, lambda results: not error.failures(results, want))


@on_cpu
@pytest.mark.parametrize("id", first_difference.WATCHED)
def test_nothing_is_said_of_a_right_function(id, tmp_path):
    """But for threads: it is asked only of wrong answers, and right with one thread is what it then says."""
    if reason := catalogue.unavailable(TASKS[id].number):
        pytest.skip(reason)
    assert said_of_the_stages_own(id, tmp_path) == (first_difference.ONE_THREAD if id[:2] == "01" else [])


def test_every_exercise_in_python_that_can_be_watched_is():
    python = {id for id, task in TASKS.items() if isinstance(task, exercises.Exercise) and task.path.suffix == ".py"}
    assert python - {"04.3"} == {*first_difference.WATCHED}, "04.3 shows a pair of ranks"


# What is returned, and what is changed.


@on_cpu
@pytest.mark.parametrize("id, edits, words", [
    ("03.1", [('return tl.where(seen, S, float("-inf"))', "return S.to(tl.int32)")],
     "mask returned a tile (16, 16) of int32; expected a tile (16, 16) of float32."),
    ("03.1", [('return tl.where(seen, S, float("-inf"))', "S = tl.where(seen, S, 0.0)")],
     "mask returned None; expected a tile (32, 16) of float32."),
    ("03.2", [("return P, P * (dP - delta)", "return P")],
     "tile_gradients returned a tile (16, 16) of float32; expected (a tile (16, 16) of float32, a tile"),
    ("00.1", [("P, (m + l.log()).squeeze(-1)", "P, m + l.log()")],
     "softmax returned (a tensor (1, 2, 21, 21), a tensor (1, 2, 21, 1)); expected ("),
])  # fmt: skip
def test_what_is_returned_is_told(id, edits, words):
    report = report_on(id, *edits)
    assert report.failed and report.lines[0].startswith(words), report


def test_an_argument_that_is_changed_is_told():
    changing = "dS = P * (dP - delta[..., rows, None])\n    delta.mul_(2)\n    return P, dS"
    wrong = report_on("00.4", ("return P, P * (dP - delta[..., rows, None])", changing))
    assert wrong.lines[0] == "Each call returns what is right, but changes delta, which later calls get again.", wrong
    right = "out.mul_((1 - w)[..., None]).add_(out_block.float())"
    merged = report_on("04.1", ("out.lerp_(out_block.float(), w[..., None])", f"out_block.mul_(w[..., None]); {right}"))
    assert merged.verdict == "wrong" and merged.lines[0].startswith("Your function also changes out_block, which is no")
    assert "also changes" not in repr(report_on("04.1"))


# What can be said of whole results.

RIGHT = torch.randn(2, 3, 5, 4, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
MASKED = RIGHT.masked_fill(RIGHT > 1, -torch.inf)


@pytest.mark.parametrize("got, says", [
    (0.255 * RIGHT, "is 0.255 times the right one"), (-RIGHT, "has the other sign"), (0 * RIGHT, "is 0"),
    (RIGHT + 0.5, "is the right one + 0.5"), (RIGHT.abs(), ""), (RIGHT[..., :1], ""), (RIGHT + torch.nan, ""),
    (RIGHT * (1 + torch.arange(4)), ""),
])  # fmt: skip
def test_how_every_entry_follows_from_the_right_one(got, says):
    assert differences.relation(got, RIGHT, 1e-6) == says


def test_of_masked_results_the_mask_has_to_be_right():
    assert differences.relation(2 * MASKED, MASKED, 1e-6) == "is 2 times the right one"
    assert differences.relation(2 * RIGHT, MASKED, 1e-6) == ""
    assert differences.relation(torch.ones(1), torch.full((1,), 2.0), 1e-6) == "", "of one number anything can be said"


EXCHANGED = "right but for two dimensions, 1 and 2, which are exchanged"


@pytest.mark.parametrize("got, says", [
    (RIGHT.transpose(1, 2), EXCHANGED), (RIGHT.transpose(1, 2).reshape(RIGHT.shape), f"{EXCHANGED} in memory"),
    (RIGHT.flip(1), ""),
])  # fmt: skip
def test_two_dimensions_that_are_exchanged(got, says):
    assert differences._exchanged(got, RIGHT, 1e-6) == says


def test_a_result_of_another_shape_may_have_its_dimensions_exchanged():
    case = next(case for case in cases.CASES if case.name == "ragged")
    want = cases.build(case, {"tiles": ((8, 8),), "head_dims": (32,)}, torch.float32).expected()
    told = differences.lines({"out": want.value["out"].transpose(1, 2).float()}, want)
    assert told == [f"out has the shape (1, 21, 2, 32); expected (1, 2, 21, 32): {EXCHANGED}"]


# Hunts, and threads that have come apart.


def test_of_a_fault_that_hangs_no_distance_is_told():
    test = """import torch
def test(gradients):
    q, k, v, dout = torch.randn(4, 1, 2, 64, 8)
    assert gradients(q, k, v, dout, causal=True)[0].isfinite().all()
"""
    lines = check("04.bug1", test).lines
    assert lines[2] == "With these inputs nobody waits for ever: they do not show what is wrong.", lines
    assert {id for id, task in TASKS.items() if getattr(task, "hangs", False)} == {"02.bug2", "04.bug1"}


@emulated
def test_two_barriers_are_told_apart():
    report = report_on("02.1", ("  float m_new", "  if (threadIdx.x) __syncthreads();\n  float m_new"))
    assert report.lines[:2] == ["your text, line 5:", "    if (threadIdx.x) __syncthreads();"], report
    assert "others are at __syncthreads of another line" in repr(report)
