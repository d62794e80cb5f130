"""FlashAttention in five stages; `python -m steps demo` runs them all.

    step00_naive ... step04_ring   the stages: each with its kernels, and with forward, backward and attention
    contract.py, operators.py      what every stage promises: checks of the arguments, autograd, torch's operators
    engine.py                      decides whether the kernels run on a GPU or on the CPU
    catalogue.py                   which stages there are, and which of them can run here
    places.py                      whether this is a clone or an installed package, and where my/ is
    course                         what looks at the stages: exercises, demo, measurements, pictures; `verify` for yours

Numba and Triton read the choice of the engine while they are imported. Therefore importing anything of this package
first imports `engine`.
"""

import os

from steps import engine  # noqa: F401

if os.environ.get("COLUMNS") == "0":  # From a terminal of unknown width. Commands would print lines of no width.
    del os.environ["COLUMNS"]
