"""What every sample of a store looks like."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from fedkeep.core.encoding import EncodingName, SampleCodec
from fedkeep.core.types import AnyArray


@dataclass(frozen=True)
class SampleForm:
    """What every sample of a store looks like."""

    dtype: np.dtype[np.generic]
    """Of what arrives."""
    shape: tuple[int, ...]
    encoding: EncodingName | None = None
    """In how few bytes it is stored; None: as it arrives."""

    @property
    def nbytes(self) -> int:
        """Of a stored sample."""
        return self.codec().nbytes

    def codec(self) -> SampleCodec:
        return SampleCodec(self.shape, self.dtype.str, self.encoding)

    @property
    def name(self) -> str:
        """What a stored sample is, for the label of the file."""
        return self.dtype.str if self.encoding is None else self.encoding

    def shaped(self, x: object) -> AnyArray | None:
        """The numbers in the samples' shape and type; None if they are not such numbers."""
        try:
            array = np.asarray(x)
            if array.dtype.kind not in "fiu":
                return None
            if array.dtype != self.dtype:
                array = self._converted(array)
        except Exception:  # noqa: BLE001 - whatever a hostile object does when it is looked at
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
