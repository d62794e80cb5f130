"""Turns an exception of a child process, or of a rank that it has started, into plain data that its parent can read."""

import traceback


def account(e, folder, label=None):
    """An exception as {"type", "message", "frames"}.

    frames are the (file, line) pairs of the traceback that lie in the copy of the course in `folder`, with paths
    relative to it, or in the answer, whose text was compiled under the name `label`. The innermost frame comes last.
    """
    if hasattr(e, "account"):  # The exception only reports what another process has told.
        return e.account
    while type(e).__name__ == "InterpreterError" and e.__cause__:  # Triton's interpreter wraps the reader's exception.
        e = e.__cause__
    # Triton's compiler chains one CompilationError to another, from the calling function to the innermost one.
    while type(e).__name__ == type(e.__cause__).__name__ == "CompilationError":
        e = e.__cause__
    frames = []
    for frame in traceback.extract_tb(e.__traceback__):
        if frame.filename.startswith(str(folder)) or frame.filename == label:
            frames.append((frame.filename.removeprefix(f"{folder}/"), frame.lineno))
    return {"type": type(e).__name__, "message": str(e), "frames": frames}
