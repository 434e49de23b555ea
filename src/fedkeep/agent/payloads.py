"""Samples that are files: bytes as they came, and the decoders that make numbers of them.

The bytes are stored; the numbers are made whenever a sample is valued or trained on. A payload
comes from outside and may be hostile, so that each decoder finds out what a payload would become
before it makes it, and refuses what is too large.
"""

import io
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from fedkeep.core.errors import ConfigError, FedkeepError, optional_import
from fedkeep.core.types import AnyArray
from fedkeep.loading import load_object

DECODERS = ("image", "audio", "npy")
_MOST_SCANS = 24
"""Of a JPEG: each scan of a progressive one goes over the whole picture again."""
_SCAN = b"\xff\xda"
_MOST_CHANNELS = 64
_LONGEST_HEADER = 10_000
_BEGINNINGS = (
    (b"\xff\xd8\xff", ".jpg"),
    (b"\x89PNG\r\n\x1a\n", ".png"),
    (b"RIFF", ".wav"),
    (b"fLaC", ".flac"),
    (b"\x93NUMPY", ".npy"),
)
SUFFIXES = (".jpg", ".jpeg", ".png", ".wav", ".flac", ".npy")
"""Of files that are payloads."""


class PayloadError(FedkeepError):
    """A payload is not what its decoder reads, or would become too large."""

    def __init__(self, reason: str, detail: str) -> None:
        super().__init__(detail)
        self.reason = reason
        """`payload`, or `oversized`."""


@dataclass(frozen=True)
class PayloadDecoder:
    """Makes numbers in the samples' shape of payloads.

    Parameters
    ----------
    name
        `image`, `audio`, `npy`, or `module:function`, which takes bytes and returns an array.
    shape
        A sample's shape. A picture is (channels, height, width) with 1 or 3 channels, or (height,
        width); it is brought to this size, with numbers from 0 to 1. Sound is (frames,) or
        (channels, frames): what is longer is cut, what is shorter ends in zeros.
    most_numbers
        A payload that would decode to more numbers than this is refused.

    Raises
    ------
    ConfigError
        If there is no such decoder, or it does not make such samples.
    MissingExtraError
        If its library is not installed.

    Examples
    --------
    >>> decoder = PayloadDecoder("npy", (2,), 100)
    >>> buffer = io.BytesIO()
    >>> np.save(buffer, np.array([1.0, 2.0]))
    >>> decoder(buffer.getvalue())
    array([1., 2.], dtype=float32)
    """

    name: str
    shape: tuple[int, ...]
    most_numbers: int

    def __post_init__(self) -> None:
        object.__setattr__(self, "_decode", self._loaded())

    def _loaded(self) -> Callable[[bytes], Any]:
        """Return the function that decodes, with its library imported now and not at a sample."""
        if ":" in self.name:
            function = load_object(self.name)
            if not callable(function):
                raise ConfigError(f"[samples] decoder: {self.name} is not a function")
            return function  # type: ignore[no-any-return]
        if self.name == "image":
            if len(self.shape) not in (2, 3) or (
                len(self.shape) == 3 and self.shape[0] not in (1, 3)
            ):
                raise ConfigError(
                    "[samples] shape of pictures is [channels, height, width] with 1 or 3 "
                    f"channels, or [height, width], not {list(self.shape)}"
                )
            with optional_import('decoder = "image"', "image"):
                from PIL import Image, PngImagePlugin

                # Compressed text within a PNG may otherwise unpack to 64 MB.
                PngImagePlugin.MAX_TEXT_MEMORY = PngImagePlugin.MAX_TEXT_CHUNK = 1 << 16
                Image.preinit()
            return self._image
        if self.name == "audio":
            if len(self.shape) > 2:
                raise ConfigError(
                    "[samples] shape of sound is [frames] or [channels, frames], not "
                    f"{list(self.shape)}"
                )
            with optional_import('decoder = "audio"', "audio"):
                import soundfile  # noqa: F401
            return self._audio
        if self.name == "npy":
            return self._npy
        raise ConfigError(
            f"there is no decoder '{self.name}': choose {', '.join(DECODERS)}, or name a "
            "function of yours as module:function"
        )

    def __call__(self, payload: bytes) -> AnyArray:
        """Return the sample of a payload.

        Raises
        ------
        PayloadError
            If it is none.
        """
        try:
            array = np.asarray(self._decode(payload))  # type: ignore[attr-defined]
            if array.dtype.kind not in "fiub":
                raise PayloadError("payload", f"it holds {array.dtype}, which are no numbers")
            if array.shape != self.shape and array.size == math.prod(self.shape):
                array = array.reshape(self.shape)
            with np.errstate(over="ignore"):
                sample = array.astype(np.float32)
        except PayloadError:
            raise
        except Exception as error:  # noqa: BLE001 - a decoder may raise anything on hostile bytes
            raise PayloadError("payload", f"{type(error).__name__}: {error}"[:200]) from None
        if sample.shape != self.shape:
            raise PayloadError("shape", f"it is of shape {list(sample.shape)}")
        return sample

    def _require(self, numbers: int) -> None:
        if not 0 < numbers <= self.most_numbers:
            raise PayloadError(
                "oversized",
                f"it would become {numbers} numbers, beyond decoded_numbers = {self.most_numbers}",
            )

    def _image(self, payload: bytes) -> AnyArray:
        from PIL import Image

        if payload.count(_SCAN) > _MOST_SCANS:
            raise PayloadError("oversized", f"a picture in more than {_MOST_SCANS} scans")
        *channels, height, width = self.shape
        mode = "RGB" if channels == [3] else "L"
        try:
            opened = Image.open(io.BytesIO(payload), formats=("JPEG", "PNG"))
        except Image.DecompressionBombError as error:
            raise PayloadError("oversized", str(error)) from None
        with opened as found:
            self._require(found.width * found.height * len(found.getbands()))
            found.draft(mode, (width, height))
            picture = found.convert(mode)
        if picture.size != (width, height):
            picture = picture.resize((width, height), Image.Resampling.BILINEAR)
        pixels = np.asarray(picture, dtype=np.float32) / 255.0
        return (pixels.transpose(2, 0, 1) if mode == "RGB" else pixels).reshape(self.shape)

    def _audio(self, payload: bytes) -> AnyArray:
        import soundfile

        frames = self.shape[-1]
        with soundfile.SoundFile(io.BytesIO(payload)) as sound:
            if sound.format not in ("WAV", "WAVEX", "FLAC") or sound.channels > _MOST_CHANNELS:
                raise PayloadError("payload", f"{sound.format} of {sound.channels} channels")
            self._require(min(frames, max(1, sound.frames)) * sound.channels)
            wave = sound.read(frames, dtype="float32", always_2d=True).T
        if len(self.shape) == 1 or self.shape[0] == 1:
            wave = wave.mean(axis=0, keepdims=True)
        padded = np.zeros((len(wave), frames), dtype=np.float32)
        padded[:, : wave.shape[1]] = wave
        return padded[0] if len(self.shape) == 1 else padded

    def _npy(self, payload: bytes) -> AnyArray:
        file = io.BytesIO(payload)
        version = np.lib.format.read_magic(file)
        read = {(1, 0): np.lib.format.read_array_header_1_0}.get(
            version, np.lib.format.read_array_header_2_0
        )
        shape, by_column, dtype = read(file, max_header_size=_LONGEST_HEADER)
        size = math.prod(shape)
        self._require(size)
        # What the header claims is not believed: the bytes that follow must be as many.
        if (
            dtype.hasobject
            or dtype.kind not in "fiub"
            or len(payload) - file.tell() != size * dtype.itemsize
        ):
            raise PayloadError("payload", f"{size} of {dtype} are not what follows the header")
        array = np.frombuffer(payload, dtype, offset=file.tell())
        return array.reshape(shape, order="F" if by_column else "C")


def suffix_of(payload: bytes) -> str:
    """Return the suffix of a file with these bytes, by how they begin.

    >>> suffix_of(b"RIFF...."), suffix_of(b"?")
    ('.wav', '.bin')
    """
    return next((suffix for begins, suffix in _BEGINNINGS if payload.startswith(begins)), ".bin")


def looks_whole(payload: bytes) -> bool:
    """Whether a file of a known kind has come to its end; of others nobody can say.

    >>> looks_whole(b"RIFF" + (100).to_bytes(4, "little") + b"WAVE")
    False
    """
    match suffix_of(payload):
        case ".jpg":
            return b"\xff\xd9" in payload[-64:]
        case ".png":
            return b"IEND" in payload[-64:]
        case ".wav":
            return len(payload) >= int.from_bytes(payload[4:8], "little")
        case _:
            return bool(payload)
