"""GET /openapi.json: every endpoint, and the bodies that it reads."""

import re
from typing import Any

import msgspec
from pydantic import BaseModel
from pydantic.json_schema import models_json_schema
from starlette.requests import Request as HttpRequest
from starlette.responses import Response
from starlette.routing import Route

import kunserve
from kunserve.server.api.front import Front
from kunserve.server.api.openai_routes import OpenAIRoutes
from kunserve.server.api.schema import ChatBody, CompletionBody, DetokenizeBody, TokenizeBody
from kunserve_extras.admin import DropBody, EmptyBody, KillBody, ScaleBody
from kunserve_extras.messages.schema import CountBody, MessagesBody
from kunserve_extras.pausing import AbortBody
from kunserve_extras.responses.schema import ResponsesBody

BODIES: dict[str, type[BaseModel]] = {
    "/v1/completions": CompletionBody,
    "/v1/chat/completions": ChatBody,
    "/v1/responses": ResponsesBody,
    "/v1/messages": MessagesBody,
    "/v1/messages/count_tokens": CountBody,
    "/tokenize": TokenizeBody,
    "/detokenize": DetokenizeBody,
    "/abort_requests": AbortBody,
    "/kunserve/drop": DropBody,
    "/kunserve/restore": EmptyBody,
    "/kunserve/kill": KillBody,
    "/kunserve/scale": ScaleBody,
    "/kunserve/pause": EmptyBody,
    "/kunserve/resume": EmptyBody,
}
QUERIES: dict[str, dict[str, Any]] = {
    "/pause": {
        "mode": {"type": "string", "enum": ["abort", "wait"]},
        "clear_cache": {"type": "boolean"},
    },
    "/reset_prefix_cache": {},
    "/ping": {},
    "/resume": {},
    "/kunserve/timeline": {"since": {"type": "number"}},
}
"""Of endpoints that read no body."""
_PLACE = "#/components/schemas/{model}"


def routes(_front: Front, _openai: OpenAIRoutes) -> list[Route]:
    """What the seam ``routes`` of a server takes."""
    return [Route("/openapi.json", page, methods=["GET"])]


async def page(http: HttpRequest) -> Response:
    """GET /openapi.json."""
    found = [route for route in http.app.routes if isinstance(route, Route)]
    return Response(msgspec.json.encode(document(found)), media_type="application/json")


def document(served: list[Route]) -> dict[str, Any]:
    """The page of these endpoints."""
    kinds = sorted(set(BODIES.values()), key=lambda kind: kind.__name__)
    _, schemas = models_json_schema([(kind, "validation") for kind in kinds], ref_template=_PLACE)
    return {
        "openapi": "3.1.0",
        "info": {"title": "KunServe", "version": kunserve.__version__},
        "paths": {_plain(route.path): _item(route) for route in served},
        "components": {"schemas": schemas["$defs"]},
    }


def _plain(path: str) -> str:
    """Starlette's ``{name:path}`` without what it may hold."""
    return re.sub(r"\{(\w+):\w+\}", r"{\1}", path)


def _item(route: Route) -> dict[str, Any]:
    parameters = [
        {"name": name, "in": "path", "required": True, "schema": {"type": "string", "minLength": 1}}
        for name in re.findall(r"\{(\w+)", route.path)
    ]
    for name, schema in QUERIES.get(route.path, {}).items():
        parameters.append({"name": name, "in": "query", "required": False, "schema": schema})
    operation: dict[str, Any] = {
        "summary": (route.endpoint.__doc__ or "").strip().partition("\n")[0],
        "responses": {"200": {"description": "Done."}, "default": {"description": "Refused."}},
    }
    if parameters:
        operation["parameters"] = parameters
    methods = sorted((route.methods or set()) - {"HEAD"})
    return {method.lower(): _with_body(operation, method, route.path) for method in methods}


def _with_body(operation: dict[str, Any], method: str, path: str) -> dict[str, Any]:
    kind = BODIES.get(path)
    if method != "POST" or kind is None:
        return operation
    schema = {"$ref": _PLACE.format(model=kind.__name__)}
    content = {"application/json": {"schema": schema}}
    return {**operation, "requestBody": {"required": True, "content": content}}
