"""`verify` in a process of its own: somebody else's function may end the process, and with any exit code."""

import signal
import subprocess
import sys

JUDGED = 10  # the exit code of that process if every property holds
IN_A_CHILD = "from steps.__main__ import app; from steps.course.verify.process import in_a_child; in_a_child(app, {!r})"


def run(name, say):
    """Runs the command of sys.argv in a child and ends with its exit code. name: how the usage line calls the program.

    The function has been judged to the end only if the child ends with an exit code of ours. say: prints a line.
    """
    try:
        code = subprocess.run([sys.executable, "-c", IN_A_CHILD.format(name), *sys.argv[1:]]).returncode
    except KeyboardInterrupt:  # Ctrl-C reaches the child too, which says so.
        sys.exit(1)
    if code not in (JUDGED, 1, 2):
        how = signal.Signals(-code).name if code < 0 else f"exit code {code}"
        say(f"The function ended the process ({how}) before all properties were judged.")
    sys.exit({JUDGED: 0, 2: 2}.get(code, 1))


def in_a_child(app, name):
    """Runs the command of sys.argv with JUDGED as its exit code instead of 0."""
    try:
        app(prog_name=name)
    except SystemExit as end:
        sys.exit(end.code or JUDGED)
