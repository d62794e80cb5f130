"""The reader's side of the course: looking at a kernel's source (`show`, `diff`) and at figures (`picture`) in the notebook,
writing functions oneself (`check`, `hint`, `solution`) and having them run inside the stages."""

from steps.workbook.answer import Blank  # noqa: F401
from steps.workbook.checks import check, hint, solution  # noqa: F401
from steps.workbook.figures import picture  # noqa: F401
from steps.workbook.source import diff, edited, show  # noqa: F401
