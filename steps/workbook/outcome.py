"""The outcome of a check, as the text that its reader sees."""

from dataclasses import dataclass, field


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


def case_lines(row):
    """A line with the case's property, and below it, where the case fails, what is wrong and where."""
    if not row["wrong"]:
        return [f"ok     {row['says']}"]
    return [f"WRONG  {row['says']}", *(" " * 9 + line for line in row["wrong"])]
