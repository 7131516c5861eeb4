"""What can go wrong on the way of a request, one class per condition.

`http_api.py` maps each class to a status; `reason` travels in the `x-timestable-reason` header and
in the metrics, so that a client and an operator see why without reading text.
"""

from enum import StrEnum

from indexer.contract.identifiers import InstanceId


class DropReason(StrEnum):
    """Why a request did not get an answer from an engine."""

    REQUEST_INVALID = "request-invalid"
    BODY_TOO_LARGE = "body-too-large"
    MODEL_UNKNOWN = "model-unknown"
    PROMPT_TOO_LONG = "prompt-too-long"
    OVERLOADED = "overloaded"
    TOKENIZER_UNAVAILABLE = "tokenizer-unavailable"
    NO_ELIGIBLE_INSTANCE = "no-eligible-instance"
    INDEX_UNAVAILABLE = "index-unavailable"
    UPSTREAM_FAILED = "upstream-failed"
    UPSTREAM_TIMEOUT = "upstream-timeout"


class RouterError(Exception):
    """Base of all operating errors; the message is for the client and says what to change."""

    reason: DropReason
    retry_after_s: float | None = None


class RequestInvalid(RouterError):  # noqa: N818 - names a condition, not an Error class hierarchy
    """The request can never succeed as it is."""

    reason = DropReason.REQUEST_INVALID

    def __init__(
        self,
        message: str,
        *,
        param: str | None = None,
        reason: DropReason = DropReason.REQUEST_INVALID,
    ) -> None:
        super().__init__(message)
        self.param = param
        self.reason = reason


class ModelUnknown(RouterError):  # noqa: N818
    """No fleet serves the model under this name."""

    reason = DropReason.MODEL_UNKNOWN

    def __init__(self, model: str, known: list[str]) -> None:
        names = ", ".join(sorted(known)) or "none"
        super().__init__(f"The model `{model}` does not exist. Models served here: {names}.")
        self.model = model


class Overloaded(RouterError):  # noqa: N818
    """A bound of this router is reached; the request was not started."""

    reason = DropReason.OVERLOADED
    retry_after_s = 1.0


class NoEligibleInstance(RouterError):  # noqa: N818
    """The model is known, but no instance may take the request now."""

    reason = DropReason.NO_ELIGIBLE_INSTANCE
    retry_after_s = 2.0


class IndexUnavailable(RouterError):  # noqa: N818
    """Redis did not answer within its deadline, and nothing to decide from is at hand."""

    reason = DropReason.INDEX_UNAVAILABLE
    retry_after_s = 2.0


class TokenizerUnavailable(RouterError):  # noqa: N818
    """The model's tokenizer cannot be loaded here."""

    reason = DropReason.TOKENIZER_UNAVAILABLE
    retry_after_s = 30.0


class UpstreamFailed(RouterError):  # noqa: N818
    """The chosen instance did not answer, or broke off."""

    reason = DropReason.UPSTREAM_FAILED
    retry_after_s = 1.0

    def __init__(
        self, instance_id: InstanceId, message: str, *, before_first_byte: bool, timeout: bool = False
    ) -> None:
        super().__init__(message)
        self.instance_id = instance_id
        self.before_first_byte = before_first_byte
        if timeout:
            self.reason = DropReason.UPSTREAM_TIMEOUT
