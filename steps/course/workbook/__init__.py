"""The learner's side of the course.

A notebook looks at the kernels' source with `show` and `diff`, and runs a kernel with a mistake planted by `edited`. A
reader writes functions and has them run inside a stage with `check`, `hint` and
`solution`; the same three are commands of `python -m steps`. The exercises are listed in exercises.toml.
"""

from steps.course.workbook.answer import Blank  # noqa: F401
from steps.course.workbook.checking import check, hint, solution  # noqa: F401
from steps.course.workbook.listing import diff, edited, show  # noqa: F401
