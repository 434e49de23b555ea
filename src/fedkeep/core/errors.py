"""Exceptions a user or a peer can cause, and the reasons of a rejection.

The tree (docs/design.md has the same as a table):

    FedkeepError
    |-- ConfigError         a configuration that cannot be used
    |-- DataError           a data, record or state file that cannot be used
    |-- MissingExtraError   an optional library that is not installed
    `-- RejectedError       input of another party that must not count

The command line prints the one sentence of a `FedkeepError` and exits non-zero, without a
traceback. Any other exception is a defect of fedkeep or of a user's own component.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from enum import StrEnum


class FedkeepError(Exception):
    """An error that its user can correct: the message says what is wrong and what to do."""


class ConfigError(FedkeepError):
    """A key, a value or a combination that the configuration does not allow."""


class DataError(FedkeepError):
    """A file of data, records or state that is missing, damaged or of the wrong form."""


class MissingExtraError(FedkeepError):
    """A feature whose optional libraries are not installed.

    Parameters
    ----------
    feature : str
        What was asked for, as the subject of a sentence.
    extra : str
        The extra of the package that brings its libraries.
    """

    def __init__(self, feature: str, extra: str) -> None:
        super().__init__(f"{feature} needs the '{extra}' extra: pip install 'fedkeep[{extra}]'")


class RejectionReason(StrEnum):
    """Why a report, a profile, an order or a message does not count, or not in full.

    The values are data: records, metrics and messages between processes carry them.
    """

    # A device's report.
    DUPLICATE = "duplicate"
    LATE = "late"
    LEFT = "left"
    NOT_ASKED = "not-asked"
    REPLAYED = "replayed"
    BAD_COUNT = "bad-count"
    BAD_WEIGHT = "bad-weight"
    ZERO_MODEL = "zero-model"
    LARGE_UPDATE = "large-update"
    MISSING_ARRAY = "missing-array"
    ZERO_ESTIMATOR = "zero-estimator"
    LARGE_ESTIMATOR = "large-estimator"
    ESTIMATOR_SHAPE = "estimator-shape"
    ESTIMATOR_DTYPE = "estimator-dtype"
    ESTIMATOR_NOT_FINITE = "estimator-not-finite"
    ESTIMATOR_CONTRADICTS = "estimator-contradicts"
    MODEL_SHAPE = "model-shape"
    MODEL_DTYPE = "model-dtype"
    MODEL_NOT_FINITE = "model-not-finite"
    MODEL_TOO_LARGE = "model-too-large"

    # Values that count, but less than reported.
    UPDATE_CUT = "update-cut"
    WEIGHT_CUT = "weight-cut"
    RATE_CUT = "rate-cut"
    CAPACITY_CUT = "capacity-cut"
    COUNT_CUT = "count-cut"
    LOSS_CUT = "loss-cut"
    CLAIM_UNFOUNDED = "claim-unfounded"

    # A device's profile, evaluation and identity.
    PROFILE = "profile"
    BAD_CAPACITY = "bad-capacity"
    BAD_DEVICE = "bad-device"
    METHOD_DIFFERS = "method-differs"
    NEGATIVE_VELOCITY = "negative-velocity"
    VELOCITY_TOO_LARGE = "velocity-too-large"
    VELOCITY_SHAPE = "velocity-shape"
    VELOCITY_DTYPE = "velocity-dtype"
    VELOCITY_NOT_FINITE = "velocity-not-finite"
    BAD_EVALUATION = "bad-evaluation"
    BAD_STEPS = "bad-steps"
    BAD_SAMPLES = "bad-samples"
    BAD_GRADIENT_SAMPLES = "bad-gradient_samples"
    IDENTITY_TAKEN = "identity-taken"

    # A server's order.
    ORDER_ROUND = "order-round"
    ORDER_LEARNING_RATE = "order-learning-rate"
    ORDER_PROXIMAL = "order-proximal"
    ORDER_EPOCHS = "order-epochs"
    ORDER_BATCH_SIZE = "order-batch-size"
    DIRECTION_SHAPE = "direction-shape"
    DIRECTION_NOT_FINITE = "direction-not-finite"
    DIRECTION_TOO_LARGE = "direction-too-large"
    PLAN_SHAPE = "plan-shape"
    PLAN_SIZE = "plan-size"
    PLAN_WEIGHTS = "plan-weights"

    # What an operator asks of an agent.
    LABEL = "label"
    PAYLOAD = "payload"
    SELECT = "select"
    SETTINGS = "settings"
    SIGNATURE = "signature"
    STREAM = "stream"
    UPLOAD = "upload"

    # Any message or file.
    ERROR = "error"
    MALFORMED = "malformed"
    OVERSIZED = "oversized"
    VERSION = "version"
    WRONG_RECORDS = "wrong-records"
    DISK = "disk"
    ERASE = "erase"
    TOO_SLOW = "too-slow"
    STALE_SERVER = "stale server"

    # Secure aggregation.
    NOT_SECURE = "not-secure"
    IN_THE_CLEAR = "in the clear"
    ANSWER_IN_THE_CLEAR = "answer in the clear"
    ANSWER_NOT_EXPECTED = "answer not expected"
    ANSWER_OF_WRONG_FORM = "answer of the wrong form"
    ANOTHER_SUM = "another sum"
    ENVELOPES = "envelopes"
    UNREADABLE_ENVELOPE = "envelope that does not open"
    LOST_ESTIMATOR = "lost estimator"
    NOT_A_MEMBER = "not a member"
    NO_PLAN = "no plan"
    TOKEN = "token"
    UNREADABLE_CIPHERTEXT = "unreadable ciphertext"
    UNCLEAR_COMPARISON = "unclear comparison"
    COMPARISONS = "comparisons"
    ROSTER = "roster"
    SECOND_MASKING = "second masking"
    SECOND_SHARING = "second sharing"
    SHARES_DO_NOT_FIT = "shares that do not fit"
    SUM_TERMS = "sum-terms"
    SURVIVORS = "survivors"
    THRESHOLD = "threshold"
    TOO_FEW_DEVICES = "too few devices"
    TWICE_IN_SUM = "twice in the sum"
    UNMASKING = "unmasking"
    UNUSABLE_PUBLIC_KEY = "unusable public key"
    VALUE_OUT_OF_BOUNDS = "value out of bounds"
    VALUE_NOT_FINITE = "value that is not finite"

    # Differential privacy and encrypted profiles.
    ANOTHER_PRIVACY_LEDGER = "another privacy ledger"
    DAMAGED_PRIVACY_LEDGER = "damaged privacy ledger"
    LOST_PRIVACY_LEDGER = "lost privacy ledger"
    OLD_PRIVACY_LEDGER = "old privacy ledger"
    GRADIENT_OF_NO_SAMPLES = "local gradient of no samples"
    UNCLIPPED_GRADIENT = "unclipped local gradient"
    RELEASED_GRADIENT_NOT_FINITE = "local gradient that is not finite"
    RELEASED_MODEL_NOT_FINITE = "model that is not finite"
    RELEASED_VELOCITY_NOT_FINITE = "velocity that is not finite"
    ANOTHER_KEY = "another key"
    BROKEN_SEAL = "broken seal"
    DAMAGED_KEY = "damaged key"
    LOST_KEY = "lost key"
    MALFORMED_PLAN = "malformed plan"
    NOT_THE_SERVER = "not the server"
    OUTDATED = "outdated"
    PROFILE_ASKED_ENCRYPTED = "profile asked encrypted"
    PROFILE_ASKED_IN_THE_CLEAR = "profile asked in the clear"
    PROFILE_IN_THE_CLEAR = "profile in the clear"
    PROFILE_REQUEST = "profile request"


class RejectedError(FedkeepError):
    """Input of another party (a profile, a report, an order, a record) that must not count.

    Parameters
    ----------
    reason : str
        A `RejectionReason`, or its value. A peer of another version may give one that is not known
        here.
    detail : str
        One sentence on what was found and what was expected.
    """

    def __init__(self, reason: str, detail: str) -> None:
        super().__init__(f"{reason}: {detail}")
        self.reason = reason
        self.detail = detail


@contextmanager
def optional_import(feature: str, extra: str) -> Iterator[None]:
    """Turn an `ImportError` inside the block into one that names the extra to install.

    Parameters
    ----------
    feature : str
        What needs the libraries, as the subject of a sentence.
    extra : str
        The extra of the package that brings them.

    Raises
    ------
    MissingExtraError
        If an import inside the block fails.
    """
    try:
        yield
    except ImportError as error:
        raise MissingExtraError(feature, extra) from error


def where(error: BaseException) -> str:
    """Describe an error of code that is not fedkeep's: its kind, its message, its file and line."""
    trace = error.__traceback__
    while trace is not None and trace.tb_next is not None:
        trace = trace.tb_next
    place = ""
    if trace is not None:
        place = f" ({trace.tb_frame.f_code.co_filename}, line {trace.tb_lineno})"
    message = " ".join(str(error).split())
    return f"{type(error).__name__}: {message}{place}"
