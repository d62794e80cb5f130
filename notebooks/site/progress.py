"""The reader's progress: which exercises of my/ are begun, written and passed.

Only the standard library is used, because the site is built where no torch is.
"""

import hashlib
import json
import tomllib

STAGES = {
    "00": "Stage 00, naive attention", "01": "Stage 01, Numba CUDA", "02": "Stage 02, CUDA C++",
    "03": "Stage 03, Triton", "04": "Stage 04, the ring",
}  # fmt: skip
BLANK = "raise Blank", "#error Blank", 'CAUSE = ""'


def state(id, my):
    """"not begun", "begun", "written" or "passed" of the exercise whose file the command `check` wrote to my/.

    A file counts as passed if `check` passed it as it is now. The capstone's file grows from step to step, so there it
    is enough that the step was passed once.
    """
    capstone = "capstone" in id
    stem = "03_capstone" if capstone else id.replace(".", "_")
    files = sorted(path for path in my.glob(f"{stem}*") if path.stem == stem or path.stem.startswith(f"{stem}_"))
    if not files:
        return "not begun"
    content = files[0].read_bytes()
    try:
        passed = json.loads((my / "passed.json").read_text())
    except (OSError, ValueError):  # nothing has passed yet, or it is no JSON
        passed = {}
    if passed.get(id) == hashlib.sha256(content).hexdigest() or capstone and id in passed:
        return "passed"
    if capstone:
        return "begun"
    return "begun" if any(word in content.decode(errors="replace") for word in BLANK) else "written"


def in_order(task):
    """Exercises before the capstone and the hunts; 02.10 after 02.9."""
    return [(part.isalpha() or "bug" in part, part.zfill(9)) for part in task["id"].split(".")]


def page(exercises, my):
    """The rest of the page: a table for each stage. exercises: the text of exercises.toml; my: the reader's folder."""
    tasks = [task for kind in tomllib.loads(exercises).values() if isinstance(kind, list) for task in kind]
    lines = []
    for number, title in STAGES.items():
        mine = sorted((task for task in tasks if task["id"].split(".")[0] == number), key=in_order)
        states = [state(task["id"], my) for task in mine]
        lines += ["", f"## {title}: {states.count('passed')} of {len(mine)} passed", ""]
        lines += ["| exercise | | state |", "|---|---|---|"]
        lines += [f"| {task['id']} | {task['title']} | {word} |" for task, word in zip(mine, states, strict=True)]
    return "\n".join([*lines, ""])
