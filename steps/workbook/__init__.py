"""The reader's side of the course: looking at a kernel's source (`show`, `diff`) and at figures (`picture`) in the notebook."""

from steps.workbook.figures import picture  # noqa: F401
from steps.workbook.source import diff, show  # noqa: F401
