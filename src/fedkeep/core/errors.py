"""Errors a user can cause; the CLI prints their one sentence and exits non-zero, without a traceback."""


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


class RefusedError(FedkeepError):
    """Something from outside (a profile, a report, a record) that must not count."""

    def __init__(self, reason: str, detail: str) -> None:
        super().__init__(f"{reason}: {detail}")
        self.reason = reason
        self.detail = detail
