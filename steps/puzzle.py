"""Puzzle 0: write one line of online softmax. Needs Python 3.11 and no package: python3 steps/puzzle.py

The line is not executed by Python. It is parsed, and `value` computes what arithmetic there is in it, so that whatever
is typed ends, and touches nothing. What it says stands in puzzle.toml. Nothing of the course is imported.
"""

import ast
import math
import operator
import re
import sys
import tomllib
from pathlib import Path

TEXTS = tomllib.loads(Path(__file__).with_suffix(".toml").read_text(encoding="utf-8"))
SCORES, MISTAKES, SAYS = TEXTS["scores"], TEXTS["mistakes"], TEXTS["says"]


class Unclear(Exception):
    """The line is not arithmetic with the names of the puzzle; the message says why."""


def exponential(x):
    """exp, which is inf where Python's own raises OverflowError."""
    return math.inf if x > 709 else math.exp(x)


FUNCTIONS = {"exp": exponential, "log": math.log, "max": max, "min": min, "abs": abs}
CONSTANTS = {"inf": math.inf, "e": math.e}
MODULES = ("math", "np", "numpy", "torch")  # Whoever works with these types np.exp(...).
NAMES = ("l", "m", "m_new", "s")
OPERATORS = {
    ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul, ast.Div: operator.truediv,
    ast.Pow: operator.pow, ast.USub: operator.neg, ast.UAdd: operator.pos,
    ast.Lt: operator.lt, ast.LtE: operator.le, ast.Gt: operator.gt, ast.GtE: operator.ge,
    ast.Eq: operator.eq, ast.NotEq: operator.ne,
}  # fmt: skip


def parse(line):
    """The expression for the new l, from a line with or without "l =". Raises Unclear."""
    line = line.strip().replace("\N{MINUS SIGN}", "-")  # as it is copied from a paper
    if len(line) > 300:
        raise Unclear(SAYS["too_long"])
    try:
        statements = ast.parse(line).body
    except (SyntaxError, ValueError, MemoryError, RecursionError):
        raise Unclear(SAYS["unreadable"]) from None
    match statements:
        case [ast.Expr(value=found)]:
            return found
        case [ast.Assign(targets=[ast.Name(id=name)], value=found)] if name == "l" or name not in NAMES:  # l_new, say
            return found
        case [ast.AugAssign(target=ast.Name(id="l"), op=op, value=found)]:
            return ast.BinOp(ast.Name("l"), op, found)
    raise Unclear(SAYS["one_expression"])


def value(node, names):
    """The number that the expression has, with the values of its names. Raises Unclear for all but arithmetic."""

    def of(part):
        return value(part, names)

    match node:
        case ast.Constant(value=int() | float() as number) if not isinstance(number, bool):
            return float(number)  # Powers of floats overflow at once, where those of whole numbers can take hours.
        case ast.Name(id=name):
            if name in names:
                return names[name]
            if name in CONSTANTS:
                return CONSTANTS[name]
            if name in FUNCTIONS:
                raise Unclear(SAYS["is_function"].format(name=name))
            raise Unclear(SAYS["unknown_name"].format(name=name))
        case ast.Attribute(value=ast.Name(id=module), attr=name) if module in MODULES and name in CONSTANTS:
            return CONSTANTS[name]
        case ast.BinOp(left=a, op=op, right=b) if type(op) in OPERATORS:
            return OPERATORS[type(op)](of(a), of(b))
        case ast.Compare(left=a, ops=[op], comparators=[b]) if type(op) in OPERATORS:
            return OPERATORS[type(op)](of(a), of(b))
        case ast.UnaryOp(op=op, operand=a) if type(op) in OPERATORS:
            return OPERATORS[type(op)](of(a))
        case ast.IfExp(test=test, body=a, orelse=b):
            return of(a) if of(test) else of(b)
        case ast.Call(func=ast.Name(id=name), keywords=[]) if name in FUNCTIONS:
            return FUNCTIONS[name](*map(of, node.args))
        case ast.Call(func=ast.Attribute(value=ast.Name(id=module), attr=name), keywords=[]):
            if module in MODULES and name in FUNCTIONS:
                return FUNCTIONS[name](*map(of, node.args))
    raise Unclear(SAYS["no_arithmetic"])


def run(expression, scores, m=-math.inf, l=0.0):
    """l after the loop over the scores; nan where Python would raise an error."""
    for s in scores:
        m_new = max(m, s)
        try:
            l = value(expression, {"l": l, "m": m, "m_new": m_new, "s": s})
        except (ArithmeticError, ValueError, RecursionError):
            return math.nan
        except TypeError:  # exp() without a number, say, or the order of complex numbers
            raise Unclear(SAYS["misused"]) from None
        if isinstance(l, complex):  # a negative number to the power of 0.5
            return math.nan
        m = m_new
    return float(l)


def results(expression):
    """What the line gives for each list of scores: (from the first score on, from the second, where m is a number)."""
    return {
        name: (run(expression, scores), run(expression, scores[1:], m=scores[0], l=1.0))
        for name, scores in SCORES.items()
    }


def same(some, others):
    """Whether the numbers are equal up to rounding; nan equals nan."""
    pairs = zip(some, others, strict=True)
    return all(math.isclose(a, b, rel_tol=1e-9) or (math.isnan(a) and math.isnan(b)) for a, b in pairs)


def judge(line):
    """(whether the line is right, what to say about it)."""
    try:
        got = results(parse(line))
    except Unclear as problem:
        return False, str(problem)
    want = {name: sum(math.exp(s - max(scores)) for s in scores) for name, scores in SCORES.items()}
    wrong = [name for name in SCORES if not same(got[name][:1], [want[name]])]
    if not wrong:
        return True, TEXTS["right"]
    name = wrong[0]
    numbers = {"got": f"{got[name][0] + 0:.4g}", "want": f"{want[name]:.4g}"}  # + 0 turns -0 into 0
    says = SAYS["not_yet"].format(name=name, scores=SCORES[name], **numbers)
    for answer, words in MISTAKES.items():
        mistaken = results(parse(answer))
        if all(same(got[name], mistaken[name]) for name in SCORES):
            return False, f"{says}\n{words}"
    if all(same(got[name][1:], [want[name]]) for name in SCORES):
        return False, f"{says}\n{SAYS['first_score']}"
    return False, says


def judge_start(text):
    """(whether m may begin with this number, what to say about it)."""
    text = re.sub(r"""float\((["'])(-?inf)\w*\1\)""", r"\2", text)  # Python's own name for it
    try:
        statements = ast.parse(text.strip().removeprefix("m").strip().removeprefix("=").strip(), mode="eval")
        start = value(statements.body, {})
    except (Unclear, SyntaxError, ValueError, ArithmeticError, TypeError, MemoryError, RecursionError):
        return False, SAYS["no_number"]
    if start == -math.inf:
        return True, TEXTS["next"]
    if start == 0:
        return False, SAYS["start_at_0"]
    return False, SAYS["start_elsewhere"].format(start=f"{start:g}")


def ask(judged_by, prompt, hints):
    """Asks at the keyboard until the answer is right; returns whether it was."""
    hints = iter(hints)
    while True:
        try:
            line = input(prompt)
        except (EOFError, KeyboardInterrupt):
            print()
            return False
        right, says = judged_by(line) if line.strip() else (False, next(hints, "That was the last hint."))
        print(says, end="\n\n")
        if right:
            return True


def main(arguments):
    """The exit code: 0 if what was answered is right. Without arguments the answers are read, line by line."""
    if not arguments and sys.stdin.isatty():
        print(TEXTS["puzzle"], "\nAn empty line shows a hint, Ctrl-D ends.\n", sep="\n")
        if not ask(judge, "l = ", TEXTS["hints"]):
            return 1
        print(TEXTS["start"])
        return 0 if ask(judge_start, "m = ", TEXTS["start_hints"]) else 1
    line, start, *_ = [*arguments, "", ""] if arguments else [sys.stdin.readline() for _ in range(2)]
    if not line.strip() or line in ("-h", "--help"):
        print(TEXTS["puzzle"], '\nFor example: python3 steps/puzzle.py "l + s"', sep="\n")
        return 1
    right, says = judge(line)
    print(says)
    if right and start.strip():
        right, says = judge_start(start)
        print(says)
    elif right:
        print(f"{TEXTS['start']} Answer as a second argument.")
    return 0 if right else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
