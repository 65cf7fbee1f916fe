"""Every error as the one JSON shape that clients parse, mapped here and nowhere else."""

import http
from collections.abc import Mapping
from typing import Any

import msgspec
from starlette.exceptions import HTTPException
from starlette.responses import Response

from kunserve.core.errors import (
    InvalidRequest,
    KunServeError,
    ModelNotFound,
    Overloaded,
    Unavailable,
)
from kunserve.server.api.generation import EngineFailed, Interrupted


class BodyTooLarge(KunServeError):
    """The request body exceeds the front's limit: 413."""


class BodyTooSlow(KunServeError):
    """The request body did not arrive in time: 408."""


class TooManyBodies(KunServeError):
    """The bodies that are arriving at the same time exceed the front's limit: 503."""


class TooManyConnections(KunServeError):
    """The connection is one beyond the front's limit: 503."""


class Unauthorized(KunServeError):
    """The API key is missing or wrong: 401."""


class Forbidden(KunServeError):
    """The endpoint exists but is switched off: 403."""


class Conflict(KunServeError):
    """Somebody has asked for something else meanwhile: 409."""


class TryLater(KunServeError):
    """The cluster could not do it now; ``retry_after_s`` says when it may: 503."""

    def __init__(self, message: str, retry_after_s: int = 1) -> None:
        super().__init__(message)
        self.retry_after_s = retry_after_s


class EffectMissing(Exception):
    """An admin action was reported as done but the cluster's state does not show it: 500."""


_STATUS: tuple[tuple[type[Exception], int, str], ...] = (
    (InvalidRequest, 400, "BadRequestError"),
    (Unauthorized, 401, "AuthenticationError"),
    (Forbidden, 403, "PermissionDeniedError"),
    (ModelNotFound, 404, "NotFoundError"),
    (BodyTooSlow, 408, "RequestTimeoutError"),
    (Conflict, 409, "ConflictError"),
    (BodyTooLarge, 413, "PayloadTooLargeError"),
    (Overloaded, 503, "ServiceUnavailableError"),
    (Unavailable, 503, "ServiceUnavailableError"),
    (TryLater, 503, "ServiceUnavailableError"),
    (TooManyBodies, 503, "ServiceUnavailableError"),
    (TooManyConnections, 503, "ServiceUnavailableError"),
    (Interrupted, 503, "ServiceUnavailableError"),
    (EngineFailed, 500, "InternalServerError"),
    (EffectMissing, 500, "InternalServerError"),
)

_HTTP_TYPES = {404: "NotFoundError", 405: "MethodNotAllowedError"}


def json_answer(
    value: Any, status: int = 200, headers: Mapping[str, str] | None = None
) -> Response:
    """A JSON response."""
    return Response(
        msgspec.json.encode(value), status, headers=headers, media_type="application/json"
    )


def error_object(error: Exception) -> dict[str, Any]:
    """``{"error": {...}}``; what is not the caller's to know becomes a plain 500."""
    message, kind, status = "Internal server error.", "InternalServerError", 500
    if isinstance(error, HTTPException):
        status = error.status_code
        message, kind = str(error.detail), _HTTP_TYPES.get(status, "HTTPError")
    else:
        for shape, its_status, its_kind in _STATUS:
            if isinstance(error, shape):
                message, kind, status = str(error), its_kind, its_status
                break
    param = "model" if isinstance(error, ModelNotFound) else getattr(error, "param", None)
    return {"error": {"message": message, "type": kind, "param": param, "code": status}}


def error_answer(error: Exception) -> Response:
    """The response to a request that failed before its answer began."""
    body = error_object(error)
    status: int = body["error"]["code"]
    headers: dict[str, str] = {}
    if isinstance(error, HTTPException) and error.headers:
        headers.update(error.headers)
    if isinstance(error, Overloaded | TryLater):
        headers["Retry-After"] = str(max(1, error.retry_after_s))
    elif status == http.HTTPStatus.SERVICE_UNAVAILABLE:
        headers["Retry-After"] = "1"
    if isinstance(error, Unauthorized):
        headers["WWW-Authenticate"] = "Bearer"
    if isinstance(error, BodyTooLarge | BodyTooSlow):
        headers["Connection"] = "close"
    return json_answer(body, status, headers)
