"""Puzzle 0 takes every right line, names the usual mistakes, and runs nothing that is no arithmetic."""

import ast
import builtins
import itertools
import math
import re
import subprocess
import sys
from pathlib import Path

import pytest

from steps import puzzle

FILE, TEXTS = Path(puzzle.__file__), puzzle.TEXTS
SAYS_RIGHT, START, NEXT = (TEXTS[name] for name in ("right", "start", "next"))
RIGHT = [
    "l * exp(m - m_new) + exp(s - m_new)",
    "l = math.exp(s-m_new) + math.exp(m-m_new)*l",
    "l * exp(m \N{MINUS SIGN} m_new) + exp(s \N{MINUS SIGN} m_new)",
    "l*e**(m - m_new) + e**(s - m_new)",
    "l / exp(m_new - m) + exp(s - max(m, s))",
    "l_new = l * np.exp(m - m_new) + torch.exp(s - m_new)",
    "l -= l * (1 - exp(m - m_new)) - exp(s - m_new)",
    "l * numpy.e ** (m - m_new) + math.exp(s - m_new)",
    "l * exp(m - s) + 1 if s > m else l + exp(s - m)",
    "l + exp(s - m_new) + l * (exp(m - m_new) - 1)",
]
WRONG = {
    "l + exp(s - m_new)": "do not rescale l",
    "l += exp(s - m_new)": "do not rescale l",
    "exp(s-m_new)+l*1": "do not rescale l",
    "l * exp(m - m_new) + exp(s - m)": "old maximum for the new term",
    "(exp(s - m) + l) * exp(m - m_new)": "In algebra this is right",
    "l * exp(m_new - m) + exp(s - m_new)": "upside down",
    "l * np.exp(m - m_new) + 1": "You add 1 for the new score",
    "1 + l * exp(m - s)": "every new score for the new maximum",
    "m / m_new * l + exp(s - m_new)": "the quotient of the maxima",
    "l * (m - m_new) + exp(s - m_new)": "the difference itself",
    "exp(s - m_new)": "start at 0 again",
    "l + exp(s)": "leave the maximum out",
    "exp(log(l) + m - m_new) + exp(s - m_new)": "From the second score on it is right",
    "l": "l ends at 0 and should be 1.653",
}
# What the words about each mistake have to name: what is missing or wrong in it, which no other mistake is told.
TOLD = {
    "l + exp(s - m_new)": "You do not rescale l.",
    "l * exp(m - m_new) + exp(s - m)": "You use the old maximum for the new term. It is exp(s - m_new).",
    "l + exp(s - m)": "the old maximum for the new term, and do not rescale l",
    "exp(m - m_new) * (l + exp(s - m))": "the old maximum: exp(s - m) is inf",
    "l * exp(m_new - m) + exp(s - m_new)": "The factor of l is upside down: it is exp(m - m_new), never above 1.",
    "(l + exp(s - m_new)) * exp(m - m_new)": "You rescale the new term, too.",
    "l * exp(m - m_new) + 1": "You add 1 for the new score.",
    "l * exp(m - s) + 1": "You take every new score for the new maximum.",
    "l * (m / m_new) + exp(s - m_new)": "You rescale by the quotient of the maxima.",
    "l * (m - m_new) + exp(s - m_new)": "You multiply l by the difference itself",
    "exp(s - m_new)": "You start at 0 again",
    "l * exp(m - m_new)": "the new score is not added",
    "l + exp(s)": "You leave the maximum out.",
    "l + s": "You add the score itself.",
}
NO_ARITHMETIC = {
    "": "Write one expression",
    "softmax": "There is no 'softmax' here",
    "l * exp": "exp is a function: write exp(...)",
    "l * exp(m - m_new": "cannot read this line",
    "\0": "cannot read this line",
    "(" * 250: "cannot read this line",
    "-" * 290 + "l": "should be 1.653",
    "l +" * 200: "longer than one line",
    "while True: pass": "Write one expression",
    "m = max(m, s)": "Write one expression",
    "[l for l in iter(int, 1)]": "Only arithmetic",
    "(lambda: l)()": "Only arithmetic",
    "exp.__globals__": "Only arithmetic",
    "math.__loader__": "Only arithmetic",
    "torch.load('x')": "Only arithmetic",
    "os.exp(l)": "Only arithmetic",
    "__import__('os').getpid()": "Only arithmetic",
    "open('x', 'w')": "Only arithmetic",
    "eval('1')": "Only arithmetic",
    "'l' * 9": "Only arithmetic",
    "True": "Only arithmetic",
    "l << 9": "Only arithmetic",
    "9 ** 9 ** 9 ** 9": "should be 1.653",
    "(-1) ** 0.5": "should be 1.653",
    "max((-1) ** 0.5, 1)": "cannot take",
    "exp()": "cannot take",
    "1 / 0": "should be 1.653",
}


@pytest.mark.parametrize("line", RIGHT)
def test_every_right_line_is_right(line):
    assert puzzle.judge(line) == (True, SAYS_RIGHT)


@pytest.mark.parametrize("line, says", (WRONG | NO_ARITHMETIC).items())
def test_a_wrong_line_is_told_what_is_wrong(line, says, monkeypatch):
    def touched(*_):
        raise AssertionError("something was executed")

    for name in ("eval", "exec", "open", "__import__"):
        monkeypatch.setattr(builtins, name, touched)
    right, said = puzzle.judge(line)
    assert not right and says in said


def test_mistakes_are_wrong_and_no_two_are_the_same():
    found = [str(puzzle.results(puzzle.parse(line))) for line in puzzle.MISTAKES]
    assert len(set(found)) == len(found)
    for line, words in puzzle.MISTAKES.items():
        assert puzzle.judge(line)[0] is False and puzzle.judge(line)[1].endswith(words)


def test_the_words_about_a_mistake_name_what_is_wrong_in_it():
    assert TOLD.keys() == puzzle.MISTAKES.keys()
    for line, told in TOLD.items():
        assert [other for other, words in puzzle.MISTAKES.items() if told in words] == [line]


def test_the_last_hint_is_right_and_so_is_the_formula_before_it():
    _, formula, answer = TEXTS["hints"]
    assert puzzle.judge(answer.removeprefix("Hint 3, the answer: ")) == (True, SAYS_RIGHT)
    left, right = (ast.parse(side).body[0].value for side in formula.partition(": ")[2].split(", with")[0].split(" = "))
    for score, m, m_new in itertools.product((-1.5, 0.0, 0.5), repeat=3):
        names = {"score": score, "m": m, "m_new": m_new}
        assert math.isclose(puzzle.value(left, names), puzzle.value(right, names))


@pytest.mark.parametrize(
    "text",
    [
        "-inf",
        "m = -inf",
        "-math.inf",
        "- inf",
        "-np.inf",
        "m = float('-inf')",
        '-float("inf")',
        '-float("infinity")',
    ],
)
def test_the_maximum_starts_below_every_score(text):
    assert puzzle.judge_start(text) == (True, NEXT)


@pytest.mark.parametrize("text, says", [
    ("0", "softmax 0 / 0"), ("m = 0.0", "softmax 0 / 0"), ("inf", "Not inf"),
    *((text, "below every score") for text in ("-1", "-1000", "-1e30", "-1e308", f"-{sys.float_info.max}")),
    *((text, "Write a number") for text in ("s", "", "float('x')", "9**9**9**9", "-inf; 1", "\0")),
])  # fmt: skip
def test_another_start_is_told_why_not(text, says):
    right, said = puzzle.judge_start(text)
    assert not right and says in said


def run(*arguments, typed=None):
    """The exit code and the output under a Python that has no packages and does not see the course."""
    command = [sys.executable, "-I", "-S", str(FILE), *arguments]
    done = subprocess.run(command, input=typed or "", capture_output=True, text=True, cwd="/", timeout=60)
    assert done.stderr == ""
    return done.returncode, done.stdout


def test_it_needs_no_package_and_answers_arguments_and_standard_input():
    nodes = list(ast.walk(ast.parse(FILE.read_text())))
    imported = {name.name for node in nodes if isinstance(node, ast.Import) for name in node.names}
    imported |= {node.module for node in nodes if isinstance(node, ast.ImportFrom)}
    assert imported <= sys.stdlib_module_names
    assert run(RIGHT[0]) == (0, f"{SAYS_RIGHT}\n{START} Answer as a second argument.\n")
    assert run(RIGHT[0], "-inf") == (0, f"{SAYS_RIGHT}\n{NEXT}\n") == run(typed=f"{RIGHT[0]}\n-inf\n")
    assert run(RIGHT[0], "0")[0] == 1
    assert run("l + exp(s - m_new)") == run(typed="l + exp(s - m_new)\n") and run("l")[0] == 1
    assert run() == run("--help") and run()[1].startswith("Puzzle 0") and "notebooks/00_naive.ipynb" in NEXT


def test_at_the_keyboard_it_asks_until_both_answers_are_right(monkeypatch, capsys):
    typed = iter(["", "l + exp(s - m_new)", RIGHT[0], "0", "", "-inf"])
    monkeypatch.setattr(builtins, "input", lambda prompt: next(typed))
    monkeypatch.setattr(sys.stdin, "isatty", lambda: True, raising=False)
    assert puzzle.main([]) == 0 and next(typed, None) is None
    said = capsys.readouterr().out
    for part in (TEXTS["puzzle"], TEXTS["hints"][0], "do not rescale l", SAYS_RIGHT, START, "0 / 0", NEXT):
        assert said.count(part) == 1

    def ended(prompt):
        raise EOFError

    monkeypatch.setattr(builtins, "input", ended)
    assert puzzle.main([]) == 1


def test_its_scores_are_those_of_query_5_in_notebook_00():
    notebook = (FILE.parents[1] / "notebooks/src/00_naive.py").read_text()
    K, Q = (ast.literal_eval(re.search(rf"^{name} = torch.tensor\((.*)\)", notebook, re.M)[1]) for name in "KQ")
    scores = [round((Q[5][0] * x + Q[5][1] * y) / math.sqrt(2), 3) for x, y in K]
    assert scores == puzzle.SCORES["the scores of notebook 00, rounded"]
