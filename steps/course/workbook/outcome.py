"""The outcome of a check, as the text that its reader sees."""

from dataclasses import dataclass, field

LONGEST = 110  # characters of a line that tells of a case


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


def in_full_once(rows):
    """The lines about all cases: the first one that fails in full, and each of the others in a line."""
    first = next((row for row in rows if row["wrong"]), None)
    return [line for row in rows for line in (case_lines(row) if row is first else one_line(row))]


def one_line(row):
    """The case in a line, with what is wrong if there is room for it."""
    if not row["wrong"]:
        return case_lines(row)
    line = f"WRONG  {row['says']}: {row['wrong'][0]}"
    return [line if len(line) <= LONGEST and not line.endswith(":") else f"WRONG  {row['says']}"]


def why(rows):
    """The lines about the cause, from the last row of a job: the mistakes that the results equal, the first call of the
    function that differs, or what else can be said of the results.
    """
    last = rows[-1] if rows else {}
    lines = []
    if last.get("equals"):
        wrong = sum(bool(row.get("wrong")) for row in rows)
        this = "This" if wrong > 1 or last.get("of_many") else "In the one case that is wrong, this"
        lines = [f"{this} equals what you get when {', or when '.join(last['equals'])}."]
    elif last.get("remark"):
        lines = [last["remark"]]
    lines += last.get("difference", [])
    for name in last.get("changed", []):
        lines.append(f"Your function also changes {name}, which is no output: the caller may still need it as it was.")
    return lines
