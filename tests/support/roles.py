"""Runs the roles of a Gluon kernel as threads, for tests of who waits for whom."""

import threading

SECONDS = 5  # after which a wait is taken for a deadlock


def run_together(roles):
    """Runs (function, arguments) of all roles at the same time. Raises AssertionError with the first one's failure."""
    failures = []

    def guarded(role, arguments):
        try:
            role(*arguments)
        except BaseException as failure:
            failures.append(failure)

    threads = [threading.Thread(target=guarded, args=role, daemon=True) for role in roles]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(2 * SECONDS)
    assert not failures, failures[0]
