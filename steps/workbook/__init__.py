"""The reader's side of the course: looking at a kernel's source (`show`, `diff`) without leaving the notebook."""

from steps.workbook.source import diff, show  # noqa: F401
