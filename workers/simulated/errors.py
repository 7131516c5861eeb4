"""Errors of the HTTP API, in vLLM's JSON shape."""

from http import HTTPStatus


class ApiError(Exception):
    """An answer other than success.

    Attributes:
        status: HTTP status.
        message: what is wrong and what to change.
        kind: the `type` field; vLLM uses BadRequestError and NotFoundError for what its own
            checks find, and the status phrase for what request parsing finds.
        param: the field at fault, when there is one.
    """

    def __init__(
        self, status: HTTPStatus, message: str, *, kind: str | None = None, param: str | None = None
    ) -> None:
        super().__init__(message)
        self.status = status
        self.message = message
        self.kind = kind or status.phrase
        self.param = param

    def body(self) -> dict[str, object]:
        """The JSON body."""
        return {
            "error": {
                "message": self.message,
                "type": self.kind,
                "param": self.param,
                "code": int(self.status),
            }
        }


def bad_request(message: str, param: str | None = None) -> ApiError:
    """A request that parses and cannot be served."""
    return ApiError(HTTPStatus.BAD_REQUEST, message, kind="BadRequestError", param=param)


def malformed(location: str, problem: str) -> ApiError:
    """A body that does not parse, worded as the validation errors of vLLM's request models."""
    path = ", ".join(repr(part) for part in ("body", *location.split(".")) if part)
    message = f"1 validation error: {{'loc': ({path}), 'msg': '{problem}'}}"
    return ApiError(HTTPStatus.BAD_REQUEST, message, param=location or None)


def unknown_model(name: str) -> ApiError:
    """The model is not served here."""
    message = f"The model `{name}` does not exist."
    return ApiError(HTTPStatus.NOT_FOUND, message, kind="NotFoundError", param="model")


def kv_load_failed() -> ApiError:
    """KV$ that another engine should have held could not be had; worded as vLLM's."""
    return ApiError(
        HTTPStatus.INTERNAL_SERVER_ERROR, "Internal server error", kind="InternalServerError"
    )


def overloaded(message: str) -> ApiError:
    """The queue is full; a healthy engine says so with 503."""
    return ApiError(HTTPStatus.SERVICE_UNAVAILABLE, message, kind="ServiceUnavailableError")
