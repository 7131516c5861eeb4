"""What can go wrong on the way of a request, one class per condition.

`http/failures.py` maps each reason to a status; it travels in the `x-timestable-reason` header and
in the metrics, so that a client and an operator see why without reading text.
"""

from enum import StrEnum
from typing import Final

from indexer.contract.identifiers import InstanceId

MODEL_SHOWN_MAX = 128
"""Characters of an unknown model's name that go back to whoever asked for it."""

INSTANCES_SHOWN_MAX = 16
"""Of a fleet, to whoever asked for one that is not there."""


class DropReason(StrEnum):
    """Why a request did not get an answer from an engine."""

    REQUEST_INVALID = "request-invalid"
    BODY_TOO_LARGE = "body-too-large"
    BODY_TOO_SLOW = "body-too-slow"
    MODEL_UNKNOWN = "model-unknown"
    INSTANCE_UNKNOWN = "instance-unknown"
    RESERVATION_UNKNOWN = "reservation-unknown"
    PROMPT_TOO_LONG = "prompt-too-long"
    OVERLOADED = "overloaded"
    QUEUE_TIMEOUT = "queue-timeout"
    UNAUTHORIZED = "unauthorized"
    FORBIDDEN = "forbidden"
    KEY_LIMITED = "key-limited"
    DRAINING = "draining"
    NO_ELIGIBLE_INSTANCE = "no-eligible-instance"
    INDEX_UNAVAILABLE = "index-unavailable"
    UPSTREAM_FAILED = "upstream-failed"
    UPSTREAM_TIMEOUT = "upstream-timeout"
    CLIENT_GONE = "client-gone"


class DegradedCause(StrEnum):
    """What a decision had to do without."""

    TOKENIZER_UNAVAILABLE = "tokenizer-unavailable"
    TOKENIZER_SLOW = "tokenizer-slow"
    TOKENIZER_BUSY = "tokenizer-busy"
    TEXT_REFUSED = "text-refused"
    TEMPLATE_FAILED = "template-failed"
    INDEX_UNAVAILABLE = "index-unavailable"
    INDEX_INCOMPLETE = "index-incomplete"
    LEDGER_UNAVAILABLE = "ledger-unavailable"


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


class BodyTooLarge(RouterError):  # noqa: N818
    """The request's body is over the limit of this router."""

    reason = DropReason.BODY_TOO_LARGE

    def __init__(self, limit_bytes: int) -> None:
        super().__init__(
            f"The request body is larger than {limit_bytes} bytes. Send a shorter prompt, or raise "
            "the router's body_bytes_max."
        )


class BodyTooSlow(RouterError):  # noqa: N818
    """The request's body did not arrive in time."""

    reason = DropReason.BODY_TOO_SLOW

    def __init__(self, deadline_s: float) -> None:
        super().__init__(
            f"The request body did not arrive within {deadline_s:g} s. Send it faster."
        )


class ModelUnknown(RouterError):  # noqa: N818
    """No fleet serves the model under this name."""

    reason = DropReason.MODEL_UNKNOWN

    def __init__(self, model: str, known: list[str]) -> None:
        names = ", ".join(sorted(known)) or "none"
        shown = model if len(model) <= MODEL_SHOWN_MAX else f"{model[:MODEL_SHOWN_MAX]}..."
        super().__init__(f"The model `{shown}` does not exist. Models served here: {names}.")
        self.model = model


class InstanceUnknown(RouterError):  # noqa: N818
    """There is no instance of this id."""

    reason = DropReason.INSTANCE_UNKNOWN

    def __init__(self, asked: str, known: list[str]) -> None:
        ids = ", ".join(sorted(known)[:INSTANCES_SHOWN_MAX]) or "none"
        super().__init__(f"There is no instance `{asked[:MODEL_SHOWN_MAX]}`. Known are: {ids}.")


class ReservationUnknown(RouterError):  # noqa: N818
    """This process holds no reservation of this id."""

    reason = DropReason.RESERVATION_UNKNOWN

    def __init__(self, reservation_id: str) -> None:
        super().__init__(
            f"There is no reservation `{reservation_id[:MODEL_SHOWN_MAX]}` here: it was released, "
            "its time is over, or another router process has it."
        )


class Overloaded(RouterError):  # noqa: N818
    """A bound of this router is reached; the request was not started."""

    reason = DropReason.OVERLOADED
    retry_after_s = 1.0


class Draining(Overloaded):
    """This router is being stopped and takes no new request."""

    reason = DropReason.DRAINING


class QueueTimeout(Overloaded):
    """The request waited for a place, and none became free in time."""

    reason = DropReason.QUEUE_TIMEOUT


class Unauthorized(RouterError):  # noqa: N818
    """The request has no key, or one that is not known here.

    Attributes:
        challenge: the scheme that the answer asks for.
    """

    reason = DropReason.UNAUTHORIZED

    def __init__(self, message: str, *, challenge: str = "Bearer") -> None:
        super().__init__(message)
        self.challenge = challenge


class Forbidden(RouterError):  # noqa: N818
    """Who asks is not allowed to."""

    reason = DropReason.FORBIDDEN


class ModelForbidden(Forbidden):
    """The key is not for this model."""

    def __init__(self, model: str) -> None:
        shown = model if len(model) <= MODEL_SHOWN_MAX else f"{model[:MODEL_SHOWN_MAX]}..."
        super().__init__(
            f"This key is not for the model `{shown}`. GET /v1/models lists those that it is for."
        )


class KeyLimited(RouterError):  # noqa: N818
    """The key has used up what it may use for now.

    Attributes:
        limit: requests, tokens or concurrent.
    """

    reason = DropReason.KEY_LIMITED

    def __init__(self, message: str, *, limit: str, retry_after_s: float | None) -> None:
        super().__init__(message)
        self.limit = limit
        self.retry_after_s = retry_after_s


class NoEligibleInstance(RouterError):  # noqa: N818
    """The model is known, but no instance may take the request now."""

    reason = DropReason.NO_ELIGIBLE_INSTANCE
    retry_after_s = 2.0


class IndexUnavailable(RouterError):  # noqa: N818
    """Redis did not answer within its deadline, and nothing to decide from is at hand.

    Attributes:
        cause: what a decision that is made all the same has to do without.
    """

    reason = DropReason.INDEX_UNAVAILABLE
    retry_after_s = 2.0

    def __init__(
        self, message: str, *, cause: DegradedCause = DegradedCause.INDEX_UNAVAILABLE
    ) -> None:
        super().__init__(message)
        self.cause = cause


class TokensUnknown(Exception):  # noqa: N818
    """A prompt's token ids are not to be had; its request is routed without hits."""

    def __init__(self, cause: DegradedCause, message: str) -> None:
        super().__init__(message)
        self.cause = cause


class UpstreamCause(StrEnum):
    """How an instance failed a request."""

    CONNECT = "connect"  # refused, unreachable, or a name that nobody knows
    CONNECT_TIMEOUT = "connect-timeout"
    RESET = "reset"  # the connection broke, or what came is not HTTP
    STATUS = "status"  # it said so itself: 500, 502, 504
    PUSHBACK = "pushback"  # 429 or 503: it is well, and will not take more
    TRANSFER = "transfer"  # it could not have what another one had prefilled for it
    TRUNCATED = "truncated"  # a stream that ended as if complete, and is not
    FIRST_BYTE_TIMEOUT = "first-byte-timeout"
    IDLE_TIMEOUT = "idle-timeout"
    TOTAL_TIMEOUT = "total-timeout"

    @property
    def timeout(self) -> bool:
        """It was given all the time there was, so nobody else is asked."""
        return self in _OUT_OF_TIME


_OUT_OF_TIME: Final = frozenset(
    {
        UpstreamCause.FIRST_BYTE_TIMEOUT,
        UpstreamCause.IDLE_TIMEOUT,
        UpstreamCause.TOTAL_TIMEOUT,
    }
)


class UpstreamFailed(RouterError):  # noqa: N818
    """The chosen instance did not answer, or broke off.

    Attributes:
        instance_id: the chosen instance.
        before_first_byte: nothing of its answer has reached the client.
        cause: how it failed.
    """

    reason = DropReason.UPSTREAM_FAILED
    retry_after_s = 1.0

    def __init__(
        self,
        instance_id: InstanceId,
        message: str,
        *,
        before_first_byte: bool,
        cause: UpstreamCause = UpstreamCause.RESET,
    ) -> None:
        super().__init__(message)
        self.instance_id = instance_id
        self.before_first_byte = before_first_byte
        self.cause = cause
        if cause.timeout:
            self.reason = DropReason.UPSTREAM_TIMEOUT

    @property
    def retryable(self) -> bool:
        """Whether another instance may be asked."""
        return self.before_first_byte and not self.cause.timeout


class ClientGone(RouterError):  # noqa: N818
    """The client closed its connection, or stopped reading for too long."""

    reason = DropReason.CLIENT_GONE
