"""The changes of tests/mutate.py: each is small, leaves a program, and stays out of comments and messages."""

import re
import subprocess
import sys

import pytest

from tests import mutate

PYTHON = '''
def f(k, v, n=1):
    """k + v"""
    if n < 2 and k:
        raise ValueError("k - v", 3)
    x.zeros_like(k.shape[0], k)
    v = k if x else v
    return k * v + n  # k + 1
'''
CUDA = """
// k + 1
__device__ int f(int k, int v) { return k < v ? k + 1 : 0; }
"""


def results(make, text):
    return [change.apply(text) for change in make("file", text)]


def test_changes_of_python():
    new = {
        "n=1": ["n=2"],
        "n < 2 and k": ["n <= 2 and k", "n < 3 and k", "n < 2 or k", "n < 2 and v", "n < 2", "k", "False"],
        "x.zeros_like(k.shape[0], k)": ["pass"],
        "k if x else v": ["k", "v", "v if x else v", "k if x else k"],
        "k * v + n": ["v * v + n", "k * k + n", "k + v + n", "k * v - n"],
    }
    wanted = [PYTHON.replace(before, after) for before in new for after in new[before]]
    assert sorted(results(mutate.python_changes, PYTHON)) == sorted(wanted)


@pytest.mark.parametrize("text, new", [
    ("y = min(a, f(b))", ["y = a", "y = f(b)"]),
    ("for y in (a, b, c): f(y)", ["for y in (b, c,): f(y)", "for y in (a, c,): f(y)",
                                  "for y in (a, b,): f(y)", "for y in (a, b, c): pass"]),
    ("y = f((a, b), c)", ["y = f((b,), c)", "y = f((a,), c)"]),
    ("y = a, b", []),
    ("y = f(a, dtype=g(b), more=c)", ["y = f(a, more=c)"]),
    ("self.x = y", ["pass"]),
    ("y = -math.inf", ["y = -3.4e38"]),
    ("y = a or b or c", ["y = a and b or c", "y = b or c", "y = a or c", "y = a or b"]),
    ("if a: return\nelse: f = b", []),
    ("y = a >> b", []),
    ("y = a <= f(x) < b", ["y = a < f(x) < b", "y = a <= f(x)", "y = f(x) < b"]),
    ("y = x in {errno.A, errno.B}", ["y = x in {errno.B}", "y = x in {errno.A}"]),
    ("y = any(f(n) for n in (e.A, e.B))", ["y = any(f(n) for n in (e.B,))", "y = any(f(n) for n in (e.A,))"]),
    ('f(["a", "b"])', ['f(["b"])', 'f(["a"])', "pass"]),
    ("y = torch.empty_like(x, dtype=a)", ["y = torch.empty_like(x)", "y = torch.empty_like(x, dtype=torch.float64)"]),
    ("y = x.new_full(n, z, dtype=a)", ["y = x.new_full(n, z)", "y = x.new_full(n, z, dtype=torch.float64)"]),
])  # fmt: skip
def test_what_a_change_of_python_drops(text, new):
    """Each of these kinds was planted once, and the tests of its stage stayed green."""
    assert sorted(results(mutate.python_changes, text)) == sorted(new)


@pytest.mark.parametrize("text, new", [
    ("float y = fminf(x[i] - f(a, b), 0.0f);", ["float y = (x[i] - f(a, b));", "float y = (0.0f);"]),
    ("float y = max(a[c], b);", ["float y = (a[c]);", "float y = (b);"]),
    ("float y = -INFINITY, z = lowest;", ["float y = -3.4e38f, z = lowest;", "float y = -INFINITY, z = -3.4e38f;"]),
])  # fmt: skip
def test_what_a_change_of_cuda_drops(text, new):
    assert set(new) <= set(results(mutate.cuda_changes, text))


def test_changes_of_cuda():
    found = results(mutate.cuda_changes, CUDA)
    body = ("k <= v ? k + 1 : 0", "k < v ? k - 1 : 0", "k < v ? k + 2 : 0", "k < v ? k + 1 : 1", "v < v ? k + 1 : 0",
            "k < k ? k + 1 : 0", "k < v ? v + 1 : 0")  # fmt: skip
    in_body = [text for text in found if "int k, int v" in text]
    assert sorted(in_body) == sorted(CUDA.replace("k < v ? k + 1 : 0", new) for new in body)
    assert all("// k + 1" in text for text in found)


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


def test_a_scale_can_be_lost():
    files = {change.file for change in mutate.changes("01") if change.new == "D**-0.5"}
    assert len(files) == 5, "each file of a kernel has its own default"


@pytest.mark.long
def test_a_run_of_one_change_ends_with_its_score():
    command = [sys.executable, "-m", "tests.mutate", "--stage", "00", "--count", "1", "--seed", "1"]
    done = subprocess.run(command, cwd=mutate.ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.startswith("seed 1\n") and re.search(r"^score: [01] of 1 = ", done.stdout, re.M), done.stdout
