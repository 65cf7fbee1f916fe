"""The page that tells of every endpoint. ``make test-openapi`` asks all that it allows."""

import jsonschema
import pytest
from starlette.routing import Route

from kunserve.core.config import KunServeConfig
from kunserve.server.start.app import create_app
from kunserve_extras.openapi import BODIES, QUERIES, document
from tests.unit.server.echo_engine import EchoEngine
from tests.unit.server.live_server import MODEL, live_server
from tests.unit.server.tiny_tokenizer import tiny_tokenizer


def served() -> list[Route]:
    app = create_app(EchoEngine(), tiny_tokenizer(), MODEL, KunServeConfig())
    return [route for route in app.routes if isinstance(route, Route)]


def test_every_endpoint_and_every_body_is_told() -> None:
    page = document(served())
    for route in served():
        item = page["paths"][route.path.replace(":path", "")]
        assert {method.upper() for method in item} | {"HEAD"} == (route.methods or set()) | {"HEAD"}
        if "post" in item:
            assert ("requestBody" in item["post"]) == (route.path in BODIES)
            assert route.path in BODIES or route.path in QUERIES, f"what does {route.path} read?"
        assert all(operation["summary"] for operation in item.values()), route.path
    paths = {route.path for route in served()}
    assert {*BODIES, *QUERIES} <= paths


@pytest.mark.parametrize("path", BODIES)
def test_a_body_that_is_told_wrong_is_refused(path: str) -> None:
    """By the page's schema and by the server, for a field of another type."""
    page = document(served())
    content = page["paths"][path]["post"]["requestBody"]["content"]
    schema = {**content["application/json"]["schema"], "components": page["components"]}
    names = [name for name in BODIES[path].model_fields if name != "prompt"]
    with live_server() as server, server.client() as http:
        for name in names:
            field = BODIES[path].model_fields[name]
            if "Any" in str(field.annotation) and "list" not in str(field.annotation):
                continue
            wrong = {name: [[1]] if "str" in str(field.annotation) else "x"}
            assert not jsonschema.Draft202012Validator(schema).is_valid(wrong), name
            assert http.post(path, json=wrong).status_code in (400, 403), name
            return


def test_the_page_is_served() -> None:
    with live_server() as server, server.client() as http:
        assert http.get("/openapi.json").json()["openapi"] == "3.1.0"
