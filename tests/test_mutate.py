"""The changes of tests/mutate.py: each is small, leaves a program, and stays out of comments and messages."""

import re
import subprocess
import sys

import pytest

from tests import mutate

TEXTS = {  # {what makes the changes: {a text: what its changes leave}}
    mutate.python_changes: {
        'def f(n=1):\n    """k + v"""\n    if n < 2: raise ValueError("k - v", 3)': [
            'def f(n=2):\n    """k + v"""\n    if n < 2: raise ValueError("k - v", 3)',
            'def f(n=1):\n    """k + v"""\n    if n <= 2: raise ValueError("k - v", 3)',
            'def f(n=1):\n    """k + v"""\n    if n < 3: raise ValueError("k - v", 3)',
            'def f(n=1):\n    """k + v"""\n    if False: raise ValueError("k - v", 3)'],
        "def f(k, v): return k + v": [f"def f(k, v): return {x}" for x in ("k - v", "v + v", "k + k")],
        "y = min(a, f(b, c)) if -math.inf else a or b or c": [
            *(f"y = {x}" for x in ("min(a, f(b, c))", "a or b or c")),
            *(f"y = {x} if -math.inf else a or b or c" for x in ("a", "f(b, c)")),
            "y = min(a, f(b, c)) if -3.4e38 else a or b or c",
            *(f"y = min(a, f(b, c)) if -math.inf else {x}" for x in ("a and b or c", "b or c", "a or c", "a or b"))],
        "for y in (a, b): self.x = a <= y < b": [
            *(f"for y in ({x},): self.x = a <= y < b" for x in "ba"), "for y in (a, b): pass",
            *(f"for y in (a, b): self.x = {x}" for x in ("a < y < b", "a <= y", "y < b"))],
        "f(x.empty_like(y, dtype=a), y in {e.A, e.B})": [
            "pass", *(f"f(x.empty_like(y{x}), y in {{e.A, e.B}})" for x in ("", ", dtype=torch.float64")),
            *(f"f(x.empty_like(y, dtype=a), y in {{e.{x}}})" for x in "BA")],
    },
    mutate.cuda_changes: {
        "// k + 1\nreturn k < v ? k + 1 : -INFINITY;": [
            f"// k + 1\nreturn {x};" for x in (
                "k <= v ? k + 1 : -INFINITY", "k < v ? k - 1 : -INFINITY", "k < v ? k + 2 : -INFINITY",
                "k < v ? k + 1 : -3.4e38f", "v < v ? k + 1 : -INFINITY", "k < k ? k + 1 : -INFINITY",
                "k < v ? v + 1 : -INFINITY")],
        "y = fminf(x[i] - f(a, c), lowest);": [
            f"y = {x};" for x in ("fminf(x[i] + f(a, c), lowest)", "fminf(x[i] - f(a, c), -3.4e38f)",
                                  "(x[i] - f(a, c))", "(lowest)")],
    },
}  # fmt: skip


@pytest.mark.parametrize("make, text, new", [(make, *pair) for make, texts in TEXTS.items() for pair in texts.items()])
def test_every_change_of_a_text(make, text, new):
    assert sorted(change.apply(text) for change in make("file", text)) == sorted(new)


@pytest.mark.parametrize("stage", mutate.STAGES)
def test_a_seed_gives_the_same_changes_of_every_stage(stage):
    drawn = mutate.sample(stage, 20, seed=3)
    assert drawn == mutate.sample(stage, 20, seed=3) and len(set(drawn)) == 20
    for change in drawn:
        text = (mutate.ROOT / change.file).read_text()
        assert change.apply(text) != text
        if change.file.endswith(".py"):
            compile(change.apply(text), change.file, "exec")
    shared = {"steps/contract.py", "steps/operators.py", "steps/engine.py"}
    assert shared < {change.file for change in mutate.changes(stage)}


@pytest.mark.long
def test_a_run_of_one_change_ends_with_its_score():
    command = [sys.executable, "-m", "tests.mutate", "--stage", "00", "--count", "1", "--seed", "1"]
    done = subprocess.run(command, cwd=mutate.ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.startswith("seed 1\n") and re.search(r"^score: [01] of 1 = ", done.stdout, re.M), done.stdout
