"""The puzzles of one line in notebook 01: the answers that the page gives are right, and others are told why not."""

import re
from pathlib import Path

import pytest

from steps.course.figures import n01_fa1_numba as figures

PAGE = (Path(__file__).parents[1] / "notebooks/src/01_fa1_numba.py").read_text()
NAMES = "index", "guard", "barrier", "rows"


def answers():
    """{name: the answer} of the fold below the puzzles."""
    fold = re.search(r"<summary>Answers</summary>\n#\n# ```python\n(.*?)# ```", PAGE, re.S)[1]
    found = {}
    exec(fold.replace("# ", ""), found)
    return {name: found[name] for name in NAMES}


def said(capsys, **other):
    """{name: what is said of its answer}, of the right answers but for these."""
    figures.puzzles(**answers() | other)
    return dict(zip(NAMES, capsys.readouterr().out.splitlines(), strict=True))


def test_the_answers_on_the_page_are_right(capsys):
    assert f"figures.puzzles({', '.join(NAMES)})" in PAGE
    assert all(": right." in words for words in said(capsys).values())


def test_a_blank_is_no_answer(capsys):
    blank = lambda *asked: ...  # noqa: E731
    told = said(capsys, index=blank, guard=blank, barrier=..., rows=blank)
    assert all("still to be written" in words for words in told.values())


@pytest.mark.parametrize(
    ("name", "answer", "words"),
    [
        ("index", lambda block, size, thread: thread, "(1, 3, 0) gives 0, and should give 3"),
        ("index", lambda block, size, thread: thread * size + block, "should give"),
        ("index", lambda block, size, thread: 3 * block + thread, "(5, 128, 7)"),
        ("index", lambda block, size, thread: nothing, "NameError"),  # noqa: F821
        ("guard", lambda n, N: n <= N, "(6, 6) gives True"),
        ("guard", lambda n, N: n < N - 1, "(5, 6) gives False"),
        ("barrier", 1, "not after line 1"),
        ("barrier", 3, "not after line 3"),
        ("barrier", "2", "gives '2', and should give 2"),
        ("rows", lambda t, T, Br: range(t, Br), "(0, 4, 6)"),
        ("rows", lambda t, T, Br: range(0, Br, T), "(1, 4, 6)"),
        ("rows", lambda t, T, Br: range(t * (Br // T), (t + 1) * (Br // T)), "(0, 4, 6)"),
        ("rows", lambda t, T, Br: [t], "(0, 4, 6) gives [0]"),
    ],
)
def test_a_wrong_line_is_told_where_it_is_wrong(name, answer, words, capsys):
    told = said(capsys, **{name: answer})
    assert words in told[name] and ": right" not in told[name]
    assert sum(": right." in line for line in told.values()) == 3
