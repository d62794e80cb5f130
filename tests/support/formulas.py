"""The formulas in hints, computed: "l = alpha l + rowsum P" holds in a world where each of the names has its number."""

import math
import operator
import re

import torch


def rowmax(x):
    return x.amax(1, keepdim=True)


def rowsum(x):
    return x.sum(1, keepdim=True)


def largest(*x):
    """max(m, s) of two, and max S of a row."""
    return torch.maximum(*x) if len(x) == 2 else rowmax(*x)


def sum_keys(x):
    """The sum over the keys of a row. A product of matrices has summed over them already: it has D = 3 columns."""
    return rowsum(x) if x.shape[1] > 3 else x


def dot(a, b, more=0):
    return a @ b + more


FUNCTIONS = {
    "exp": torch.exp, "log": torch.log, "log2": torch.log2, "min": torch.minimum, "max": largest, "rowmax": rowmax,
    "sum": rowsum, "rowsum": rowsum, "sum_keys": sum_keys, "softmax": lambda x: x.softmax(1), "dot": dot,
    "trans": lambda x: x.mT, "exp_difference": lambda x, y: torch.exp(x - y), "logaddexp": torch.logaddexp,
}  # fmt: skip
OPERATORS = {
    "+": operator.add, "-": operator.sub, "*": operator.mul, "/": operator.truediv, "mod": operator.mod,
    "div": operator.floordiv,
}  # fmt: skip
WORDS = [  # what is said otherwise in words, and the marks of a place: Q_i is the tile's Q, and m[r] the row's m
    (r"\[[^\]]*\]", ""),
    (r"\btl\.|, input_precision=\w+", ""),
    (r" of these rows", ""),
    (r"the sum of these S", "rowsum P"),
    (r"max of m and row r of S", "max(m, rowmax S)"),
    (r"max of row r of S", "rowmax S"),
    (r"\b(max|sum) of ", r"\1 "),
    (r"\bsum_[js]\b|sum over the parts of", "sum_keys"),
    (r"the smaller one of (.*) and 0\)", r"min(\1, 0))"),
    (r"\b([QKVOPS]|d[QOPS]|lse|delta|v)_(?:ij|[ij])\b", r"\1"),
]
TOKEN = re.compile(r"\s*(\d+(?:\.\d+)?|[A-Za-z_]\w*|[-+*/^().,])")
APART = r"[,;:] | and | with | so | where | it is "  # between two formulas of a sentence


class Unread(Exception):
    """The text is no formula."""


class Reader:
    """Computes an expression as papers write it: P V is a product of matrices, alpha l one of numbers, max S a row's.

    names: {name: its number, or a matrix (rows, columns)}. Raises Unread for what is no formula of these names.
    """

    def __init__(self, text, names):
        self.tokens, self.names = TOKEN.findall(text) + [""], names
        if "".join(self.tokens) != re.sub(r"\s", "", text):
            raise Unread(text)

    def all(self):
        result = self.sum()
        if self.tokens != [""]:
            raise Unread(self.tokens)
        return result

    def take(self, *wanted):
        return self.tokens.pop(0) if self.tokens[0] in wanted else None

    def sum(self):
        result = -self.product() if self.take("-") else self.product()
        while sign := self.take("+", "-"):
            result = OPERATORS[sign](result, self.product())
        return result

    def product(self):
        result = self.neighbours()
        while sign := self.take("*", "/", "mod", "div", "."):
            other = self.neighbours()
            result = inner(result, other) if sign == "." else OPERATORS[sign](result, other)
        return result

    def neighbours(self):
        """Factors without a sign between them."""
        result = self.power()
        while re.match(r"[\w(]", self.tokens[0]) and self.tokens[0] not in OPERATORS:
            result = times(result, self.power())
        return result

    def power(self):
        base = self.factor()
        if not self.take("^"):
            return base
        return base.mT if self.take("T") else base ** self.factor()

    def factor(self):
        token = self.tokens.pop(0)
        if token == "(":
            result = self.sum()
            if not self.take(")"):
                raise Unread(self.tokens)
            return result
        if token in self.names:
            return self.names[token]
        if token[:1].isdigit():
            return torch.tensor(float(token), dtype=torch.float64)
        if token not in FUNCTIONS:
            raise Unread(token)
        if token == "sum_keys":
            return FUNCTIONS[token](self.product())
        if not self.take("("):
            return FUNCTIONS[token](self.power())
        arguments = [self.sum()]
        while self.take(","):
            arguments.append(self.sum())
        if not self.take(")"):
            raise Unread(self.tokens)
        return FUNCTIONS[token](*arguments)


def times(a, b):
    """The product of matrices where their sizes fit, else that of the numbers."""
    return a @ b if a.ndim == b.ndim == 2 and a.shape[1] == b.shape[0] > 1 else a * b


def inner(a, b):
    """Each row of a with the row of b, or with each row of b where there are more or fewer of them."""
    return (a * b).sum(1, keepdim=True) if a.shape == b.shape else a @ b.mT


def formulas(hint):
    """(name, expression) of each formula in a hint.

    What pseudo-code returns has the names return_1, return_2, ..., and what is added to x by x += y the name x+.
    """
    for words, replacement in WORDS:
        hint = re.sub(words, replacement, hint)
    hint = re.sub(r" +(\+?=) +", r" \1 ", hint)
    for sentence in re.split(r"(?<! )\.(?: |$)|\n| {4,}", hint):
        sentence = sentence.strip()
        left, _, right = sentence.partition(" = ")
        if sentence.startswith("return "):
            for n, part in enumerate(split(", ", sentence.removeprefix("return ")), 1):
                yield f"return_{n}", part
        elif re.fullmatch(r"\w+(?:, \w+)+", left):  # several at once
            yield from zip(split(", ", left), split(", ", right), strict=False)
        else:
            for part in split(APART, sentence):
                if found := re.search(r"(\w+) (\+?)= (.*)", part):
                    yield from ((found[1] + found[2], one.strip()) for one in found[3].split(" = "))  # a = b = c


def split(separator, text):
    """The parts of the text between separators that stand in no brackets."""
    parts, start = [], 0
    for found in re.finditer(separator, text):
        if text[: found.start()].count("(") == text[: found.start()].count(")"):
            parts.append(text[start : found.start()].strip())
            start = found.end()
    return [*parts, text[start:].strip()]


def compared(hint, before, after):
    """{name: whether all formulas for it give its number}, of those that can be read in the hint.

    before: the numbers that expressions are made of; after: those of the names on the left. A number alone, as in
    "l = 0 where", is that of a special case, and not looked at.
    """
    found = {}
    names = {name: torch.as_tensor(x, dtype=torch.float64) for name, x in ({"e": math.e} | before).items()}
    for name, expression in formulas(hint):
        if name not in after or re.fullmatch(r"-?(?:\d+|inf)", expression):
            continue
        want = torch.as_tensor(after[name], dtype=torch.float64)
        # A number that does not change is not told by itself.
        others = {other: x for other, x in names.items() if other != name or after[name] is not before.get(name)}
        try:
            value = Reader(expression, others).all()
        except Unread:
            continue
        except (RuntimeError, TypeError, IndexError):  # Sizes of matrices do not fit, or a function takes fewer.
            value = torch.tensor(math.nan)
        found[name] = found.get(name, True) and value.shape == want.shape and torch.allclose(value.double(), want)
    return found
