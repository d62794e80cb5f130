"""FlashAttention in five stages; `python -m steps demo` runs them all.

Importing anything of this package first decides the engine (GPU or CPU), because Numba and Triton read it at import.
"""

from steps import engine  # noqa: F401
