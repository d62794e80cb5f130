"""Changes the stages' code in small ways, one change at a time, and counts the changes that the stages' tests notice.

    python -m tests.mutate                          20 changes in each of the five stages; up to an hour on 2 cores
    python -m tests.mutate --stage 02 --count 5 --seed 7

A change replaces an operator (+ by -), a constant (0 by 1), a name by one of like kind (k by v), the start value -inf
by the lowest number, the dtype of a new tensor by float64, or `a if c else b`, `a and b`, `a or b`, `min(a, b)` by one
of a and b. Or it drops something: an `if` that guards what follows it, one end of a range `a <= x < b`, an assignment
to an attribute, a call for its effect, one of several names in a tuple that is passed, looped over or searched, an
argument that a function can do without. It is made in a copy of the tree, and then the stage's tests run up to the
first failure. A change that no test notices survives: a test is missing, or the change makes no difference. The same
seed gives the same changes as long as the code stays the same.
"""

import argparse
import ast
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from queue import Queue

ROOT = Path(__file__).parents[1]
STAGES = ("00", "01", "02", "03", "04")
OPERATORS = {
    "+": "-", "-": "+", "*": "+", "/": "*", "//": "*", "%": "+", "<": "<=", "<=": "<", ">": ">=", ">=": ">",
    "==": "!=", "!=": "==", "and": "or", "or": "and", "&&": "||", "||": "&&", "&": "|", "|": "&", "@": "*",
}  # fmt: skip
PAIRS = (
    ("k", "v"), ("q", "dout"), ("dk", "dv"), ("Nq", "Nk"), ("Br", "Bc"), ("row", "col"), ("i", "j"), ("b", "h"),
    ("m", "l"), ("m", "m_new"), ("lse", "delta"), ("P", "S"), ("P", "dS"), ("H", "Hk"), ("B", "H"), ("r", "c"),
    ("k_strides", "v_strides"), ("k_stride", "v_stride"), ("q_strides", "dout_strides"), ("k_row", "v_row"),
    ("q_row", "dout_row"), ("k_head", "v_head"), ("q_head", "dout_head"), ("K", "V"), ("Q", "dO"), ("me", "src"),
)  # fmt: skip
ALIKE = {a: b for pair in PAIRS for a, b in (pair, pair[::-1])}
# What k has in common with v, and q with dout. To ask the other one for it would change nothing.
IN_COMMON = {"shape", "dtype", "device", "zeros_like", "empty_like"}
# Arguments without which a call still runs, with a default or in another place; not `device`, which takes a GPU to see.
OPTIONAL = {"dtype", "dir", "memory_format", "generator", "seed", "causal", "scale", "tile", "deterministic"}
BRACKETS = {ast.Tuple: ("(", ",)"), ast.List: ("[", "]"), ast.Set: ("{", "}")}
NEW = ("empty", "zeros", "ones", "full")  # they make tensors, also as new_empty and empty_like
LOWEST = "-3.4e38"  # with it in the place of -inf, a row that sees no key is no longer told from others
# Files and folders in which tests without a GPU see few changes (of Gluon only the roles run), or that are no code of a
# stage.
NOT_RUN_HERE = {"__init__.py", "ptx.cuh", "fwd_3_gluon.py", "bwd_2_gluon.py", "demo.py", "emulator"}
SHARED = ("contract.py", "checks.py", "operators.py", "engine.py")  # what every stage uses, and may lose an option in
SHARED_TESTS = ("test_engine.py", "test_operators.py")  # which run before a stage's tests where one of them is changed


@dataclass(frozen=True)
class Change:
    """In this file, relative to the root, the text from start to end is replaced."""

    file: str
    start: int
    end: int
    new: str

    def apply(self, text):
        return text[: self.start] + self.new + text[self.end :]

    def describe(self):
        """The file with the number of the line, and the line before and after."""
        text = (ROOT / self.file).read_text()
        number = text.count("\n", 0, self.start)
        before, after = (t.splitlines()[number].strip() for t in (text, self.apply(text)))
        return f"{self.file}:{number + 1}\n    - {before}\n    + {after}"


def python_changes(file, text):
    """Every change of a Python file. Errors that are raised and the argument `strict`, a check too, stay."""
    line_starts = [0]
    for line in text.splitlines(keepends=True):
        line_starts.append(line_starts[-1] + len(line))

    def offset(line, column):  # ast counts columns in bytes of UTF-8
        start = line_starts[line - 1]
        return start + len(text[start : line_starts[line]].encode()[:column].decode())

    def span(node):
        return offset(node.lineno, node.col_offset), offset(node.end_lineno, node.end_col_offset)

    def source(node):
        return text[slice(*span(node))]

    def without_one(nodes, join, brackets=("", "")):
        """The text of these parts of an expression, each time without another one of them."""
        for dropped in nodes:
            yield brackets[0] + join.join(source(node) for node in nodes if node is not dropped) + brackets[1]

    def dropped(node):
        """What can be left out of a statement or an expression: (the node that is replaced, the new text)."""
        if isinstance(node, ast.If) and not node.orelse and isinstance(node.body[-1], (ast.Raise, ast.Return)):
            yield node.test, "False"
        if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Attribute):
            yield node, "pass"
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Call):
            yield node, "pass"
        if isinstance(node, ast.BoolOp):
            join = " and " if isinstance(node.op, ast.And) else " or "
            yield from ((node, new) for new in without_one(node.values, join))
        if isinstance(node, ast.Call):
            if isinstance(node.func, ast.Name) and node.func.id in ("min", "max") and len(node.args) == 2:
                yield from ((node, source(argument)) for argument in node.args)
            for keyword in node.keywords:
                if keyword.arg in OPTIONAL:
                    rest = [source(x) for x in (*node.args, *node.keywords) if x is not keyword]
                    yield node, f"{source(node.func)}({', '.join(rest)})"
                if keyword.arg == "dtype" and source(node.func).removesuffix("_like").endswith(NEW):
                    yield keyword.value, "torch.float64"
        if isinstance(node, ast.Compare) and len(node.ops) == 2:
            (start, first_end), (second, end) = span(node), span(node.comparators[0])
            yield node, text[start:end]
            yield node, text[second:first_end]
        for group in filter(is_list_of_names, searched(node)):
            yield from ((group, new) for new in without_one(group.elts, ", ", BRACKETS[type(group)]))

    def searched(node):
        """What is passed, looped over, or searched by `in`."""
        if isinstance(node, ast.Call):
            return node.args
        if isinstance(node, ast.Compare) and isinstance(node.ops[0], (ast.In, ast.NotIn)):
            return node.comparators[:1]
        return [node.iter] if hasattr(node, "iter") else []

    def visit(node, names):
        yield from (Change(file, *span(replaced), new) for replaced, new in dropped(node))
        if isinstance(node, (ast.Raise, ast.JoinedStr)) or isinstance(node, ast.keyword) and node.arg == "strict":
            return
        asked = node.func if isinstance(node, ast.Call) else node
        if isinstance(asked, ast.Attribute) and asked.attr in IN_COMMON:
            return
        if isinstance(node, (ast.FunctionDef, ast.Lambda)):
            names = {x.id for x in ast.walk(node) if isinstance(x, ast.Name)} | {a.arg for a in node.args.args}
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Load) and ALIKE.get(node.id) in names:
            yield Change(file, *span(node), ALIKE[node.id])
        elif isinstance(node, ast.UnaryOp) and source(node) == "-math.inf":
            yield Change(file, *span(node), LOWEST)
        elif isinstance(node, ast.Constant) and isinstance(node.value, (bool, int, float)):
            yield Change(file, *span(node), changed_constant(node.value))
        elif isinstance(node, ast.IfExp):
            yield from (Change(file, *span(node), source(part)) for part in (node.body, node.orelse))
        elif isinstance(node, (ast.BinOp, ast.Compare, ast.BoolOp)):
            operands = node.values if isinstance(node, ast.BoolOp) else [node.left]
            operands = operands[:2] + ([node.right] if isinstance(node, ast.BinOp) else [])
            operands += node.comparators[:1] if isinstance(node, ast.Compare) else []
            start, end = span(operands[0])[1], span(operands[1])[0]
            found = re.search(r"\*\*|//|<<|>>|[<>=!]=|[-+*/%<>&|@]|\band\b|\bor\b", text[start:end])
            if found and found[0] in OPERATORS:
                yield Change(file, start + found.start(), start + found.end(), OPERATORS[found[0]])
        for child in ast.iter_child_nodes(node):
            yield from visit(child, names)

    yield from visit(ast.parse(text), set())


def is_list_of_names(node):
    """Whether the node is a list of several names, such as (k, v), {errno.EROFS, errno.EPERM} or ["q", "k"]."""

    def is_name(x):
        return isinstance(x, (ast.Name, ast.Attribute)) or isinstance(x, ast.Constant) and isinstance(x.value, str)

    return isinstance(node, tuple(BRACKETS)) and len(node.elts) > 1 and all(map(is_name, node.elts))


def changed_constant(value):
    if isinstance(value, bool):
        return str(not value)
    return str(value + 1 if isinstance(value, int) else 2 * value + 1)


def cuda_changes(file, text):
    """Every change of a .cu or .cuh file. Comments, strings, macros and lines of the preprocessor stay."""
    code = re.sub(r"//[^\n]*|\"[^\"\n]*\"|^ *#[^\n]*", lambda found: " " * len(found[0]), text, flags=re.M)
    names = set(re.findall(r"\w+", code))
    for found in re.finditer(r"(?<= )(&&|\|\||[<>=!]=|[-+*/%<>&|])(?= )", code):
        yield Change(file, *found.span(), OPERATORS[found[0]])
    for found in re.finditer(r"(?<![\w.])\d+(?![\w.])", code):
        yield Change(file, *found.span(), changed_constant(int(found[0])))
    for found in re.finditer(r"-INFINITY\b|\blowest\b", code):
        yield Change(file, *found.span(), f"{LOWEST}f")
    for found in re.finditer(r"\b(?:min|max|fminf|fmaxf)\(([^(),]*(?:\([^()]*\)[^(),]*)*), ([^(),]*)\)", code):
        yield from (Change(file, *found.span(), f"({text[slice(*found.span(group))]})") for group in (1, 2))
    for found in re.finditer(r"\b[A-Za-z_]+\b", code):
        if ALIKE.get(found[0]) in names:
            yield Change(file, *found.span(), ALIKE[found[0]])


def changes(stage):
    """Every change of the stage's own files, without the emulation, and of the shared ones."""
    (folder,) = (ROOT / "steps").glob(f"step{stage}_*/")
    found = []
    for path in (*sorted(folder.rglob("*.*")), *(ROOT / "steps" / name for name in SHARED)):
        if path.suffix in (".py", ".cu", ".cuh") and not {path.name, path.parent.name} & NOT_RUN_HERE:
            kind = python_changes if path.suffix == ".py" else cuda_changes
            found += kind(str(path.relative_to(ROOT)), path.read_text())
    return found


def sample(stage, count, seed):
    """`count` changes of the stage; a file is drawn first, so that a long one has no more of them than a short one."""
    rng, by_file = random.Random(f"{seed} {stage}"), {}
    for change in changes(stage):
        by_file.setdefault(change.file, []).append(change)
    drawn = []
    while len(drawn) < count and by_file:
        file = rng.choice(sorted(by_file))
        drawn.append(by_file[file].pop(rng.randrange(len(by_file[file]))))
        by_file = {name: rest for name, rest in by_file.items() if rest}
    return drawn


def notices(tree, stage, limit, file=""):
    """Whether the stage's tests fail in this copy, in which `file` is changed.

    A run that does not end in `limit` seconds has failed.
    """
    first = SHARED_TESTS if Path(file).parent.name == "steps" else ()
    names = *first, f"test_step{stage}_*.py"
    tests = dict.fromkeys(str(path) for name in names for path in sorted((tree / "tests").glob(name)))
    command = [sys.executable, "-m", "pytest", "-x", "-q", "-p", "no:cacheprovider", "-m", "not compile", *tests]
    environment = os.environ | {"PYTHONPATH": str(tree), "XDG_CACHE_HOME": str(tree.parent / "cache")}
    quiet = dict(stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    process = subprocess.Popen(command, cwd=tree, env=environment, start_new_session=True, **quiet)
    try:
        return process.wait(limit) != 0
    except subprocess.TimeoutExpired:
        return True
    finally:
        try:
            os.killpg(process.pid, signal.SIGKILL)  # the tests and every process that they started
        except ProcessLookupError:
            pass
        process.wait()


def main():
    parser = argparse.ArgumentParser(prog="python -m tests.mutate", description=__doc__.split("\n")[0])
    parser.add_argument("--stage", choices=STAGES, help="one stage only")
    parser.add_argument("--count", type=int, default=20, help="changes in a stage (20)")
    parser.add_argument("--seed", type=int, default=random.randrange(1000), help="of a run that is to be repeated")
    parser.add_argument("--limit", type=float, default=240, help="seconds for the tests of one change (240)")
    parser.add_argument("--minutes", type=float, default=60, help="for everything; no change is begun later (60)")
    options = parser.parse_args()
    stages = [options.stage] if options.stage else STAGES
    print(f"seed {options.seed}")
    deadline = time.monotonic() + 60 * options.minutes
    with tempfile.TemporaryDirectory() as folder, ThreadPoolExecutor(2) as pool:
        trees = Queue()
        for number in range(2):
            tree = Path(folder) / str(number)
            shutil.copytree(ROOT, tree, ignore=shutil.ignore_patterns(".*", "__pycache__", "my", "*.ipynb"))
            trees.put(tree)

        def judge(stage, change):
            """True if the change was noticed, False if not, None if there was no time left."""
            if time.monotonic() > deadline:
                return None
            tree = trees.get()
            path = tree / change.file
            text = path.read_text()
            try:
                path.write_text(change.apply(text))
                return notices(tree, stage, options.limit, change.file)
            finally:
                path.write_text(text)
                trees.put(tree)

        for stage in stages:
            if notices(Path(folder) / "0", stage, 4 * options.limit):
                sys.exit(f"the tests of stage {stage} fail without any change")
        rows = [(stage, change) for stage in stages for change in sample(stage, options.count, options.seed)]
        verdicts = list(pool.map(lambda row: judge(*row), rows))
    report(rows, verdicts)


def report(rows, verdicts):
    """Prints the changes that survived, and what part was noticed, stage by stage."""
    for (_, change), noticed in zip(rows, verdicts, strict=True):
        if noticed is False:
            print(f"survived: {change.describe()}")
    for stage in sorted({stage for stage, _ in rows}):
        of_stage = [noticed for (s, _), noticed in zip(rows, verdicts, strict=True) if s == stage]
        print(f"stage {stage}: {of_stage.count(True)} of {len(of_stage) - of_stage.count(None)} changes noticed")
    judged = len(rows) - verdicts.count(None)
    print(f"score: {verdicts.count(True)} of {judged}" + (f" = {verdicts.count(True) / judged:.0%}" if judged else ""))
    if verdicts.count(None):
        print(f"{verdicts.count(None)} changes were not tried: the time was over")


if __name__ == "__main__":
    main()
