"""The outcome of a check, as the text that its reader sees."""

from dataclasses import dataclass, field
from math import inf

NOT_A_NUMBER = "is NaN or infinite, or not what masking leaves (out 0, lse -inf)"


@dataclass(frozen=True)
class Report:
    """The outcome of one check. Its repr is the text to read.

    verdict: "passed", "blank", "wrong", "error" or "skipped".
    """

    id: str
    title: str
    verdict: str
    lines: list = field(default_factory=list)
    mutants: list = field(default_factory=list)  # names from reference/mutants.py

    @property
    def failed(self):
        return self.verdict in ("wrong", "error")

    def __repr__(self):
        verdict = self.verdict.upper() if self.failed else self.verdict
        return "\n".join([f"{self.id} {self.title}: {verdict}", *(f"  {line}" for line in self.lines)])


def case_line(row):
    """One line with the case's property, and below it, where the case fails, what is out of tolerance."""
    failures = row["failures"]
    if not failures:
        return f"ok     {row['says']}"
    if set(failures) & {"out", "lse"}:  # The gradients are computed from these, and wrong with them.
        failures = {name: failures[name] for name in failures if name in ("out", "lse")}
    off = ", ".join(
        f"{name} is off by {e:.1e} (tolerance {tolerance:.0e})" if e < inf else f"{name} {NOT_A_NUMBER}"
        for name, (e, tolerance) in failures.items()
    )
    return f"WRONG  {row['says']}\n{' ' * 9}{off}"
