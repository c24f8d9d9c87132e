"""Every error of the service, in one tree.

Request errors carry their HTTP status, OpenAI `type`, `code` and the metric label `reason` as class
attributes, so the one place that answers errors has no table. Messages are written for the caller:
what, which limit, what was given, what to do; never input text.
"""

from __future__ import annotations

from typing import ClassVar


class EmbedsvcError(Exception):
    """Root of the tree."""


# --- errors that stop the start ----------------------------------------------------------------


class StartError(EmbedsvcError):
    """The service cannot start; the message says which field or file and what to do."""


class ConfigError(StartError):
    """The configuration is wrong; the message starts with the field's path."""


class ModelError(StartError):
    """A model cannot be loaded: missing, unsafe, wrong hash, unsupported.

    Attributes:
        killed: its process was ended by SIGKILL; the next one may load. See `ModelDied`.
    """

    def __init__(self, message: str, *, killed: bool = False) -> None:
        super().__init__(message)
        self.killed = killed


# --- errors between a model and its engine ------------------------------------------------------


class DeviceOutOfMemory(EmbedsvcError):
    """A batch did not fit on the device; a smaller one may."""


class DeviceLost(EmbedsvcError):
    """The device does nothing more for this process, e.g. after a failed assertion of CUDA."""


class ModelFailed(EmbedsvcError):
    """A batch failed in the model's own process; that process's lines in the log say why."""


class ModelDied(EmbedsvcError):
    """The model's process ended before it answered; `Model.load` starts another.

    Attributes:
        in_flight: whether the batch had reached it, so that one of its rows may be to blame.
        killed: by SIGKILL, which comes from outside: from an operator, from a kernel that is short
            of memory, or from the server for another worker, whose batch did not end.
    """

    def __init__(self, message: str, *, in_flight: bool, killed: bool = False) -> None:
        super().__init__(message)
        self.in_flight = in_flight
        self.killed = killed


# --- errors that answer a request --------------------------------------------------------------


class RequestError(EmbedsvcError):
    """Answers one request with OpenAI's error envelope."""

    status: ClassVar[int] = 500
    type: ClassVar[str] = "server_error"
    code: ClassVar[str | None] = None
    reason: ClassVar[str] = "internal"
    # None leaves the decision to the client's own rule for the status.
    should_retry: ClassVar[bool | None] = None

    def __init__(
        self, message: str, *, param: str | None = None, retry_after_s: float | None = None
    ) -> None:
        super().__init__(message)
        self.message = message
        self.param = param
        self.retry_after_s = retry_after_s


class InvalidRequest(RequestError):
    """The request can never succeed as it is."""

    status = 400
    type = "invalid_request_error"
    reason = "invalid"


class InputTooLong(InvalidRequest):
    """A text has more tokens than the model takes and truncation is off."""

    code = "context_length_exceeded"
    reason = "too_long"


class TooManyTokens(InvalidRequest):
    """All texts of one request together have more tokens than the limit."""

    type = "max_tokens_per_request"
    code = "max_tokens_per_request"
    reason = "too_many_tokens"


class TooManyInputs(InvalidRequest):
    """One request has more inputs than the limit."""

    reason = "too_many_inputs"


class MissingKey(RequestError):
    """The request came without an API key, and one is needed."""

    status = 401
    type = "invalid_request_error"
    reason = "no_key"


class InvalidKey(RequestError):
    """The API key is not one of those that are let in."""

    status = 401
    type = "invalid_request_error"
    code = "invalid_api_key"
    reason = "invalid_key"


class ModelNotFound(RequestError):
    """No served model has this name."""

    status = 404
    type = "invalid_request_error"
    code = "model_not_found"
    reason = "model_not_found"


class RouteNotFound(RequestError):
    """No route has this path."""

    status = 404
    type = "invalid_request_error"
    reason = "not_found"


class MethodNotAllowed(RequestError):
    """The route exists, the method does not."""

    status = 405
    type = "invalid_request_error"
    reason = "method_not_allowed"


class RequestTimeout(RequestError):
    """The request took too long to arrive."""

    status = 408
    type = "invalid_request_error"
    reason = "too_slow"


class BodyTooLarge(RequestError):
    """The request body is larger than the limit."""

    status = 413
    type = "invalid_request_error"
    reason = "body_too_large"


class UnsupportedEncoding(RequestError):
    """The request body is compressed; only plain ones are read."""

    status = 415
    type = "invalid_request_error"
    reason = "unsupported_encoding"


class HeadersTooLarge(RequestError):
    """The request's line and headers are larger than the limit."""

    status = 431
    type = "invalid_request_error"
    reason = "headers_too_large"


class Overloaded(RequestError):
    """The queue is full; come back after `retry_after_s` seconds."""

    status = 429
    type = "rate_limit_error"
    code = "rate_limit_exceeded"
    reason = "overloaded"


class ClientGone(RequestError):
    """The client closed its connection; nobody reads this answer."""

    status = 499
    reason = "client_gone"


class InferenceFailed(RequestError):
    """The model failed on this request; the same request would fail again."""

    reason = "inference_failed"
    should_retry = False


class InternalError(RequestError):
    """A fault of the server itself; details are in its log."""


class NotReady(RequestError):
    """The model is loading, reloading or stopping."""

    status = 503
    type = "service_unavailable_error"
    code = "not_ready"
    reason = "not_ready"


class DeadlineExceeded(RequestError):
    """The deadline passed before the vectors were there."""

    status = 504
    type = "timeout_error"
    code = "deadline_exceeded"
    reason = "deadline"
    should_retry = False
