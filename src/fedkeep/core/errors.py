"""Errors a user can cause; the CLI prints their one sentence and exits non-zero, without a traceback."""

from collections.abc import Iterator
from contextlib import contextmanager


class FedkeepError(Exception):
    """Anything a user can mend: the message says what is wrong and what to do."""


class ConfigError(FedkeepError):
    """A key, value or combination that the configuration does not allow."""


class DataError(FedkeepError):
    """A data file that is missing, damaged or of the wrong form."""


class MissingExtraError(FedkeepError):
    """A feature whose optional libraries are not installed."""

    def __init__(self, feature: str, extra: str) -> None:
        super().__init__(f"{feature} needs the '{extra}' extra: pip install 'fedkeep[{extra}]'")


@contextmanager
def optional_import(feature: str, extra: str) -> Iterator[None]:
    """Around imports of optional libraries: where one is missing, it is said what to install."""
    try:
        yield
    except ImportError as error:
        raise MissingExtraError(feature, extra) from error


def where(error: BaseException) -> str:
    """The kind of an error, its words, and the file and line it came from: for code that is not ours."""
    trace = error.__traceback__
    while trace is not None and trace.tb_next is not None:
        trace = trace.tb_next
    place = (
        "" if trace is None else f" ({trace.tb_frame.f_code.co_filename}, line {trace.tb_lineno})"
    )
    return f"{type(error).__name__}: {' '.join(str(error).split())}{place}"


class RejectedError(FedkeepError):
    """Something from outside (a profile, a report, a record) that must not count."""

    def __init__(self, reason: str, detail: str) -> None:
        super().__init__(f"{reason}: {detail}")
        self.reason = reason
        self.detail = detail
