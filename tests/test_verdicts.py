"""Rules of verdicts that hold for every exercise, whatever a reader writes."""

import ast
import importlib
import re
import textwrap

import pytest

from reference import error, mutants
from steps import catalogue
from steps.course.workbook import (
    answer,
    check,
    edges,
    exercises,
    jobs,
    one_rung,
    skeleton,
    slips,
    solution,
)
from steps.course.workbook.answer import Answer
from steps.course.workbook.exercises import Exercise, Hunt, Puzzle
from support.answers import runnable

TASKS = exercises.load()
EXERCISES = {id: task for id, task in TASKS.items() if isinstance(task, Exercise)}


@pytest.fixture
def my(tmp_path, monkeypatch):
    """An empty folder in place of my/."""
    monkeypatch.setattr(exercises, "MY", tmp_path / "my")


@pytest.mark.parametrize("id", EXERCISES)
def test_a_sheet_says_what_a_function_must_do_beyond_its_formula(id):
    """Which a case asks for, so that a reader could not know it otherwise."""
    sheet = " ".join(skeleton.text(EXERCISES[id]).replace("\n#", "").replace("\n//", "").split())
    for edge, sentence in skeleton.PROMISES.items():
        assert (sentence in sheet) == (edge in EXERCISES[id].edges), edge


# What the contract kills, the exercise's own cases kill.

# What a mutant changes: the steps of mutants.Forward, Backward and Ring that it overrides, by the part they belong to.
PARTS = {
    "heads": "key_head sum_heads",
    "scale": "choose_scale score_scale",
    "scale of a gradient": "dq_scale dk_scale",
    "tiles of keys": "key_tiles load end_of_keys",
    "mask": "shift positions hidden hidden_score mask_causal times_i times_j",
    "keys beyond the last": "mask_tail",
    "softmax": "m_start maximum unit exp alpha probabilities rescale_l add_to_l rescale_O update",
    "division in each tile": "multiply_back normalise_step",
    "division at the end": "divide finish",
    "sums": "accumulator",
    "operand": "operand mixed_up",
    "delta": "delta",
    "dS": "gradient returned",
    "dk and dv": "dk_product dv_product add",
    "dq": "add_dq",
    "merge": "weight next_lse merge",
    "ring": "steps held seen",
}
PART_OF = {step: part for part, steps in PARTS.items() for step in steps.split()}
# The parts that an exercise's function computes. It cannot make a mistake in another part, which the stage hands it.
MAKES = {
    "00.1": {"softmax", "division at the end"},
    "00.2": {"softmax", "operand", "sums"},
    "00.3": {"mask"},
    "00.4": {"softmax", "scale", "mask", "dS"},
    "01.1": {"softmax", "operand", "sums", "division in each tile", "division at the end"},
    "01.2": {"softmax", "operand", "sums", "division in each tile"},
    "01.3": {"dS"},
    "02.1": {"softmax", "operand", "sums", "division in each tile"},
    "02.2": {"dq", "scale of a gradient"},
    "02.3": {"delta"},
    "02.4": set(),  # an address
    "02.5": {"operand"},
    "02.6": {"tiles of keys"},
    "02.7": set(),  # an address
    "03.1": {"mask", "keys beyond the last"},
    "03.2": {"softmax", "mask", "dS"},
    "03.3": {"softmax", "operand", "sums"},
    "04.1": {"merge"},
    "04.3": set(),  # a table, all of whose entries parts.py compares
}
# {exercise: {mutants: why its function cannot make them, although it computes that part}}
CANNOT = {
    "02.1": {"no_guard masked_row_not_guarded": "it is called only for rows that see a key of the tile"},
    "02.2": {"dk_scale_missing": "it adds to dq alone"},
    "03.2": {"no_guard_in_backward": "a row that sees no key has lse_2 = +inf, for which P is 0"},
}


def steps_of(kind):
    """The names of the steps that a mutant overrides."""
    right = mutants.Forward, mutants.Backward, mutants.Ring
    own = [part for part in kind.__mro__ if part not in (*right, object)]
    names = {name for part in own for name in vars(part) if not name.startswith("_")}
    return names - {"applies", "run", "variants", "needs_lse"}


def mutants_of(task):
    """The mutants that the exercise's function can make."""
    kind = mutants.Backward if task.path.stem.startswith("bwd") else mutants.Forward
    cannot = {name for names in CANNOT.get(task.id, ()) for name in names.split()}
    for mutant in mutants.MUTANTS:
        parts = {PART_OF[step] for step in steps_of(mutant.kind)}
        if issubclass(mutant.kind, kind) and parts <= MAKES[task.id] and mutant.name not in cannot:
            yield mutant


@pytest.mark.parametrize("id", EXERCISES)
def test_what_the_contract_kills_the_exercise_s_own_cases_kill(id):
    """Each mutant that the function can make, by the results that the check looks at."""
    task = EXERCISES[id]
    supports = one_rung.supports_of(one_rung.stage(task.stage), task.rung)
    names = error.NAMES[2:] if task.path.stem.startswith("bwd") else error.NAMES[:2]

    def kills(mutant, inputs, want):
        tile = task.tile or inputs.tile or supports["tiles"][0]
        try:
            got = mutant.run(inputs, tile, task.order or supports["order"])
        except mutants.NotApplicable:
            return False
        return bool(error.failures({name: got[name] for name in names}, want))

    left = list(mutants_of(task))
    asked = [*task.cases, *(name for name in task.edges if name not in edges.EDGES)]
    for _, inputs, want in jobs._cases({"cases": asked}, supports) if left else ():
        left = [mutant for mutant in left if not kills(mutant, inputs, want)]
    contract = mutants._prepared(supports) if left else ()
    missed = {m.name: case.name for case, *x in contract for m in left if kills(m, *x)}
    assert not missed, "these mutants are killed by these cases of the contract, and by none of the exercise's own"


# No remark without its premise.

SLIPS = [(id, slip) for id, task in EXERCISES.items() for slip in task.slips]
OF_TEXTS = [(id, slip) for id, slip in SLIPS if "text" in slip]


@pytest.mark.parametrize("id, slip", OF_TEXTS, ids=[f"{id}-{slip['text'].strip()}" for id, slip in OF_TEXTS])
def test_a_slip_s_text_alone_makes_no_remark(id, slip):
    """Wherever the text stands, nothing is said if the answer stays wrong with its repair."""
    task = EXERCISES[id]
    text = slip["text"].strip().replace("...", "x")
    python = f"\ndef unused():\n    return '''\n    {text}\n    '''\n"
    line = python if task.path.suffix == ".py" else f"\n/*\n{text}\n*/\n"
    tried = []

    def passes(other, **options):
        tried.append(other.text)
        return False

    given = Answer(str(solution(id)) + line, "your text")
    assert slips.remarks(task, given, [{"says": slip.get("only", ""), "wrong": ["off"]}], passes) == []
    assert given.text not in tried and (tried or not isinstance(slip.get("repair"), str)), "the repair finds its place"


def test_of_several_slips_at_once_those_are_named_that_are_needed():
    """The answer passes only if two of three are repaired."""

    def passes(other, **options):
        return "m[i + r]" not in other.text and "l[i + r]" not in other.text

    given = Answer("def online_update(S, l, m):\n    S[0] = m[i + r] + l[i + r] + old[0, i + r]\n", "your text")
    told = slips.remarks(EXERCISES["01.1"], given, [], passes)
    assert [line.split("`")[1] for line in told] == ["m[i + r]", "l[i + r]"]


def changed_in(text, *edits):
    for old, new in edits:
        assert old in text, old
        text = text.replace(old, new)
    return text


def guarded():
    """01.1 with a loop over all rows of the tile, and a guard for those that do not exist."""
    head, body = str(solution("01.1")).replace("min(S.shape[0], l.shape[1] - i)", "S.shape[0]").split("blockDim.y):\n")
    return f"{head}blockDim.y):\n        if i + r < l.shape[1]:\n{textwrap.indent(body, '    ')}"


WHILE = """
def score_gradients(dS, P, dO_i, V_j, delta, head, i, Bc, D):
    r = cuda.threadIdx.y
    while r < P.shape[0]:
        for c in range(cuda.threadIdx.x, Bc, cuda.blockDim.x):
            dS[r, c] = P[r, c] * (dot(dO_i, r, V_j, c, D) - (delta[head, i + r] if i + r < delta.shape[1] else ZERO))
        r += cuda.blockDim.y
"""
HELPER = """
def exponentials(row, m_new, Bc):
    total = ZERO
    for c in range(Bc):
        row[c] = exp_difference(row[c], m_new)
        total += row[c]
    return total


def online_update(S, alpha, l, m, Bc):
    thread = cuda.threadIdx.y * cuda.blockDim.x + cuda.threadIdx.x
    for r in range(thread, S.shape[0], cuda.blockDim.x * cuda.blockDim.y):
        m_new = m[r]
        for c in range(Bc):
            m_new = max(m_new, S[r, c])
        alpha[r] = exp_difference(m[r], m_new)
        l[r] = alpha[r] * l[r] + exponentials(S[r], m_new, Bc)
        m[r] = m_new
"""
MAXIMUM = """
def merge(out, lse, out_block, lse_block):
    m = torch.maximum(lse, lse_block).nan_to_num(neginf=0.0)
    old, new = (lse - m).exp(), (lse_block - m).exp()
    w = torch.where(new == 0, 0, new / (old + new))
    out.lerp_(out_block.float(), w[..., None])
    lse.copy_(m + (old + new).log())
"""
# Right answers that contain the text of a slip, and a mistake elsewhere: (exercise, edits of the stage's own function
# that leave it right, or another right answer or a function that makes it; the edit that makes it wrong).
INNOCENT = {
    "a small number that divides": ("00.1", [("torch.where(l == 0, 0, E / l)", "E / l.clamp(min=1e-30)")],
                                    ("E / l.clamp", "1.1 * E / l.clamp")),
    "triu": ("00.3", [("S.masked_fill(col > row, -math.inf)", "S.masked_fill(torch.ones(S.shape[-2:], "
                       "dtype=torch.bool).triu(1 + shift + i - j), -math.inf)")], ("shift + i - j", "shift + j - i")),
    "a guard in the loop": ("01.1", guarded, ("l_old * alpha / l_new", "l_old * beta / l_new")),
    "a helper that stores": ("01.2", HELPER, ("alpha[r] * l[r] +", "m_new * l[r] +")),
    "while": ("01.3", WHILE, ("V_j, c, D)", "V_j, c, Bc)")),
    "powers of 2": ("02.1", [("expf(S[j * Br] - m_new)", "exp2f((S[j * Br] - m_new) * 1.4426950408889634f)")],
                    ("int j = 0", "int j = 1")),
    "a declaration": ("02.3", [("float sum = 0;", "float sum; sum = 0;")], ("d < D", "d < D - 1")),
    "a sum that is swizzled": (
        "02.7", [(" ^ swizzle<WIDTH>(r);", ";"), ("(column ^ c)", "(column + c ^ swizzle<WIDTH>(r))")],
        ("t % 8;", "7 - t % 8;")),
    "the mask from the key": ("03.1", [("column <= row + Nk - Nq", "column + Nq - Nk <= row")],
                              ("seen = column < Nk", "seen = column + 1 < Nk")),
    "the mask without a difference": ("03.2", [("key <= query + Nk - Nq", "key + Nq <= query + Nk")],
                                      ("(dP - delta)", "(dP - 2 * delta)")),
    "a maximum": ("04.1", MAXIMUM, ("new / (old + new)", "0.9 * new / (old + new)")),
}  # fmt: skip
OPENINGS = ("Look at", "There is no", "Nothing else is wrong", "With cuda.syncthreads()")


QUICK = "triu", "powers of 2", "a declaration"


@pytest.mark.parametrize("name", [pytest.param(x, marks=() if x in QUICK else pytest.mark.long) for x in INNOCENT])
def test_a_right_answer_with_a_slip_s_text_and_a_mistake_elsewhere_gets_no_remark(name, my):
    id, right, mistake = INNOCENT[name]
    runnable(EXERCISES[id])
    right = right() if callable(right) else right if isinstance(right, str) else changed_in(str(solution(id)), *right)
    assert check(id, right).verdict == "passed", check(id, right)
    report = check(id, changed_in(right, mistake))
    assert report.verdict == "wrong" and not any(line.startswith(OPENINGS) for line in report.lines), report


# No hidden agreement.

WRITTEN = {id: task for id, task in TASKS.items() if isinstance(task, Exercise | Puzzle)}


@pytest.mark.parametrize("id", WRITTEN)
def test_the_sheet_names_what_can_be_used_and_nothing_of_the_solution(id):
    task = WRITTEN[id]
    if reason := catalogue.unavailable(task.number):
        pytest.skip(reason)
    mark = "#" if task.path.suffix == ".py" else "//"
    head = " ".join(line.removeprefix(mark).strip() for line in skeleton.text(task).splitlines())
    listed = re.search(r"everything that is defined there(?:, such as ([^.]*))?\.", head)
    names = listed[1].split(", ") if listed[1] else []
    if mark == "//":
        own = str(solution(id))
        assert all(re.search(rf"\b{name}\b", task.path.read_text().replace(own, "")) for name in names), names
        assert not any(re.search(rf"\b(int|float|auto|bool) &?{name}\b", own) for name in names), names
        return
    module = importlib.import_module(f"steps.{task.file.removesuffix('.py').replace('/', '.')}")
    function = answer.top_level(ast.parse(task.path.read_text()), task.function)
    stored = {n.id for n in ast.walk(function) if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Store)}
    assert all(hasattr(module, name) for name in names), names
    assert not {*names} & (stored | {a.arg for a in function.args.args}), names


# What hints of hunts say to try, at the sizes that they name: (words of the hint, a test that does it).
TYPED_IN = {
    "00.bug1": ("40 tokens of head_dim 40 and with v = torch.eye(40)[None, None]", """
def test(forward):
    q, k = torch.randn(2, 1, 1, 40, 40, generator=torch.Generator().manual_seed(0))
    v = torch.eye(40)[None, None]
    out, lse = forward(q, k, v, causal=True)
    assert not out.triu(1).any()
"""),
    "02.bug1": ('with emulator.schedule(threads="reverse")', """
from reference import attention
from steps.step02_fa2_cuda import emulator

def test(forward):
    q, k, v = torch.randn(3, 1, 2, 40, 16, generator=torch.Generator().manual_seed(0))
    with emulator.schedule(threads="reverse"):
        out, lse = forward(q, k, v)
    assert (lse - attention.forward(q, k, v)[1]).abs().max() < 1e-4
"""),
    "02.bug3": ("With 128 keys and v = torch.eye(128)[None, None].bfloat16()", """
from reference import attention

def test(forward):
    q, k = torch.randn(2, 1, 1, 128, 128, generator=torch.Generator().manual_seed(0)).bfloat16()
    v = torch.eye(128)[None, None].bfloat16()
    out, lse = forward(q, k, v)
    assert (out - attention.forward(q, k, v)[0])[..., 64].abs().max() < 0.01
"""),
    "04.bug1": ('`Layout("zigzag", S, 4, causal=True).work(me, src)`', """
from steps.step04_ring import Layout

def test(gradients):
    none = [S for S in (64, 6) for me in range(4) for src in range(4)
            if Layout("zigzag", S, 4, causal=True).work(me, src) is None]
    assert {*none} == {6}
    q, k, v, dout = torch.randn(4, 1, 1, 6, 8)
    gradients(q, k, v, dout, causal=True)
"""),
}  # fmt: skip
HUNTS = {id: task for id, task in TASKS.items() if isinstance(task, Hunt)}


@pytest.mark.parametrize("id", TYPED_IN)
def test_what_a_hunt_s_hint_says_to_try_shows_the_fault(id, my):
    runnable(HUNTS[id])
    words, text = TYPED_IN[id]
    assert words in "\n".join(HUNTS[id].hints)
    report = check(id, f"import torch\n{text}", cause=HUNTS[id].cause)
    assert report.verdict == "passed", report


def test_each_line_of_code_in_the_hints_of_hunts_has_been_typed_in():
    """A name alone is no code."""
    for id, task in HUNTS.items():
        for code in re.findall(r"`([^`]*)`|(torch\.[\w.]+\()", "\n".join(task.hints[:2])):
            if re.search(r"\W", "".join(code)):
                typed = TYPED_IN[id][1]
                assert "".join(code) in typed or all(part in typed for part in re.split(r"\bS\b", "".join(code))), code


@pytest.mark.parametrize("cause, verdict, words", [
    ("B", "passed", "the cause: the causal mask"),
    (" b ", "passed", "the cause: the causal mask"),
    ("A", "wrong", "The test is right. WRONG: the cause is not 'A'"),
    ("e", "wrong", "The test is right. There is no cause 'e'. The cause is one of these:"),
    ("", "blank", "The test is right. Still to be answered"),
])  # fmt: skip
def test_the_letter_of_a_cause_is_read_as_a_reader_means_it(cause, verdict, words, my):
    text = f'import torch\nCAUSE = "{cause}"\n{TYPED_IN["00.bug1"][1]}'
    report = check("00.bug1", text)
    assert report.verdict == verdict and report.lines[0].startswith(words), report


def test_a_wrong_test_is_told_apart_from_a_wrong_cause(my):
    report = check("00.bug1", "import torch\n" + TYPED_IN["00.bug1"][1].replace("causal=True", "causal=False"))
    assert report.lines[0].startswith("The test is not right. WRONG: fails on the repaired kernel too"), report
