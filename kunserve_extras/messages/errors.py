"""Errors in Anthropic's shape. Their statuses are those of every other endpoint."""

from typing import Any

import msgspec
from starlette.responses import Response

from kunserve.server.http.errors import error_answer, error_object

_KINDS = {
    400: "invalid_request_error",
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    408: "timeout_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
}


def error_body(error: Exception) -> dict[str, Any]:
    """``{"type": "error", "error": {...}}``."""
    said = error_object(error)["error"]
    is_ours = said["code"] >= 500
    kind = _KINDS.get(said["code"], "api_error" if is_ours else "invalid_request_error")
    return {"type": "error", "error": {"type": kind, "message": said["message"]}}


def messages_error(error: Exception) -> Response:
    """The response to a request that failed before its answer began."""
    answer = error_answer(error)
    answer.body = msgspec.json.encode(error_body(error))
    answer.headers["content-length"] = str(len(answer.body))
    return answer
