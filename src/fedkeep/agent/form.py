"""What every sample of a store looks like."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from fedkeep.core.types import AnyArray


@dataclass(frozen=True)
class SampleForm:
    """What every sample of a store looks like."""

    dtype: np.dtype[np.generic]
    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        return int(self.dtype.itemsize * np.prod(self.shape, dtype=np.int64))

    def shaped(self, x: object) -> AnyArray | None:
        """The numbers in the samples' shape and type; None if they are not such numbers."""
        try:
            array = np.asarray(x)
            if array.dtype.kind not in "fiu":
                return None
            if array.dtype != self.dtype:
                array = self._converted(array)
        except (ValueError, TypeError, OverflowError, RecursionError, MemoryError):
            return None
        if array.shape == self.shape:
            return array
        return array.reshape(self.shape) if array.ndim == 1 and array.size == np.prod(self.shape) else None

    def _converted(self, array: AnyArray) -> AnyArray:
        """As the store keeps it; whole numbers that do not fit are no samples."""
        if self.dtype.kind in "iu":
            limits = np.iinfo(self.dtype.str)
            if not np.all((array >= limits.min) & (array <= limits.max)):
                raise ValueError("out of range")
        with np.errstate(over="ignore"):
            return array.astype(self.dtype)
