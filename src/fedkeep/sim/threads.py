"""Threads of numerical libraries: small models run faster, and the same everywhere, on one."""

import os
from types import TracebackType
from typing import Any

from threadpoolctl import ThreadpoolController

LARGE_MODEL = 500_000
"""Parameters from which a run uses the threads that the libraries choose."""
_VARIABLES = ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS")


class ThreadLimit:
    """Limits numerical libraries to one thread while a small model is worked on.

    Their threads wait for each other by spinning: for small arrays, and on a machine that does
    other things, that takes more time than the work. Whoever sets `OMP_NUM_THREADS` or a variable
    like it decides himself.

    Parameters
    ----------
    parameters : int
        The size of the model.

    Examples
    --------
    >>> with ThreadLimit(parameters=610):
    ...     pass
    """

    def __init__(self, parameters: int) -> None:
        chosen = any(name in os.environ for name in _VARIABLES)
        limited = parameters < LARGE_MODEL and not chosen
        self._controller = ThreadpoolController() if limited else None
        self._limiter: Any = None

    def __enter__(self) -> None:
        if self._controller is not None:
            self._limiter = self._controller.limit(limits=1)

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._limiter is not None:
            self._limiter.restore_original_limits()
            self._limiter = None
