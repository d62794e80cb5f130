"""Judges somebody's attention and says, while it does so, what it finds."""

from steps import engine
from steps.course.verify import adapters, anybody, verdict
from steps.course.workbook.outcome import case_lines

FEWER = "What it does not claim to take, --without leaves out: python -m steps verify --help"


def run(target, claims, adapter, say):
    """What is found of the function at the target, or None if no case could be judged. say: prints lines.

    claims: see anybody.Claims. adapter: the name of the function's form, or "".
    """
    rows, kept = [], []
    try:
        function = anybody.load(target)
        function = adapters.ADAPTERS[adapter].wrap(function) if adapter else function
        for row in verdict.judge(function, claims, kept):
            rows.append(row)
            in_full = sum(bool(row["wrong"]) for row in rows) <= 3
            say(*case_lines(row) if in_full or not row["wrong"] else [f"WRONG  {row['says']}: {row['wrong'][0]}"])
    except anybody.Problem as problem:
        say(f"{target}: {problem}")
        return None
    named = verdict.mistakes(kept, claims.tile)
    say_mistakes(named, kept, claims, say)
    judged = verdict.Judged(rows, named, measured(function, claims, say) if engine.name == "cuda" else [])
    hold = f"{len(rows) - judged.failed} of {len(rows)} properties hold."
    if not judged.failed:
        say(hold)
        return judged
    say(f"{hold} {FEWER}")
    if options := verdict.options(rows, claims, named):
        say(f"All that it is then asked holds with {' '.join(options)}")
    return judged


def say_mistakes(named, kept, claims, say):
    """Names the mistakes that the failures equal, or says what else can be said of them."""
    for where, equal in named:
        about = f"{where}: this" if where else "This"
        say(f"{about} equals what you get when {', or when '.join(m.says for m in equal)}.")
    if not named and (remark := verdict.remark(kept, claims.tile)):
        say(remark)


def measured(function, claims, say):
    """The rows of verdict.speed, as far as it comes."""
    rows = []
    try:
        for row in verdict.speed(function, claims):
            rows.append(row)
            say("{pass}: {ms:.3f} ms, {tflops:.1f} TFLOP/s; SDPA: {sdpa_tflops:.1f} TFLOP/s".format(**row))
    except RuntimeError as e:  # Too little memory, or the GPU's context is lost after a kernel's error.
        say(f"The speed could not be measured: {anybody.told(e)}")
    return rows
