"""The changes of tests/mutate.py are small, leave a program, and are the same for the same seed."""

import pytest

from tests import mutate


def test_every_change_of_a_text():
    text = "def f(k, v): return k + v"
    of_python = [change.apply(text) for change in mutate.python_changes("file", text)]
    assert sorted(of_python) == [f"def f(k, v): return {x}" for x in ("k + k", "k - v", "v + v")]
    text = "// k + 1\nreturn k < v ? 1 : -INFINITY;"
    changed = "k < k ? 1 : -INFINITY", "k < v ? 1 : -3.4e38f", "k < v ? 2 : -INFINITY", "k <= v ? 1 : -INFINITY"
    of_cuda = [change.apply(text) for change in mutate.cuda_changes("file", text)]
    assert sorted(of_cuda) == [f"// k + 1\nreturn {x};" for x in (*changed, "v < v ? 1 : -INFINITY")]


@pytest.mark.parametrize("stage", mutate.STAGES)
def test_a_seed_gives_the_same_changes_of_a_stage_and_each_leaves_a_program(stage):
    drawn = mutate.sample(stage, 20, seed=3)
    assert drawn == mutate.sample(stage, 20, seed=3) and len(set(drawn)) == 20
    for change in drawn:
        text = (mutate.ROOT / change.file).read_text()
        assert change.apply(text) != text
        if change.file.endswith(".py"):
            compile(change.apply(text), change.file, "exec")
