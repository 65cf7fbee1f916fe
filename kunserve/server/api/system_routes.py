"""Everything that generates nothing: models, tokens, health, metrics, the cluster's state."""

import time
from typing import Any

from prometheus_client import CONTENT_TYPE_LATEST
from starlette.requests import Request as HttpRequest
from starlette.responses import Response

import kunserve
from kunserve.core.errors import InvalidRequest
from kunserve.server.api.front import Front
from kunserve.server.api.prompts import encode_conversation
from kunserve.server.api.schema import DetokenizeBody, TokenizeBody
from kunserve.server.api.vocabulary import check_token_ids
from kunserve.server.http.body import unless_gone
from kunserve.server.http.errors import json_answer
from kunserve.server.telemetry.state_json import state_object


class SystemRoutes:
    """Read-only endpoints."""

    def __init__(self, front: Front) -> None:
        self._front = front
        self._created = int(time.time())

    async def health(self, _http: HttpRequest) -> Response:
        """GET /health: 200 while a group serves; ``degraded`` says that instances are missing."""
        engine = self._front.engine
        vitals = engine.vitals()
        status = "degraded" if vitals.num_missing else "ok"
        if not engine.is_healthy():
            status = "unhealthy"
        body = {
            "status": status,
            "instances": vitals.num_instances,
            "instances_missing": vitals.num_missing,
            "instances_starting": vitals.num_starting,
        }
        return json_answer(body, 503 if status == "unhealthy" else 200)

    async def ready(self, _http: HttpRequest) -> Response:
        """GET /health/ready: 200 while new requests are welcome and work moves on."""
        engine = self._front.engine
        reason = None
        if self._front.draining:
            reason = "draining"
        elif self._front.is_paused:
            reason = "paused"
        elif not engine.is_healthy():
            reason = "unhealthy"
        elif not engine.is_progressing():
            reason = "stuck"
        body = {"status": reason or "ready", "unfinished": engine.num_unfinished()}
        return json_answer(body, 503 if reason else 200)

    async def live(self, _http: HttpRequest) -> Response:
        """GET /livez: 200 while the front answers at all, whatever becomes of its instances."""
        return json_answer({"status": "alive"})

    async def metrics(self, _http: HttpRequest) -> Response:
        """GET /metrics."""
        content = await self._front.accounts.metrics()
        return Response(content, headers={"content-type": CONTENT_TYPE_LATEST})

    async def version(self, _http: HttpRequest) -> Response:
        """GET /version."""
        return json_answer({"version": kunserve.__version__})

    async def load(self, _http: HttpRequest) -> Response:
        """GET /load: requests whose answers are not complete, for balancers that ask vLLM's."""
        return json_answer({"server_load": self._front.num_in_flight})

    async def models(self, _http: HttpRequest) -> Response:
        """GET /v1/models."""
        names = self._front.model_names
        return json_answer({"object": "list", "data": [self._model(name) for name in names]})

    async def model(self, http: HttpRequest) -> Response:
        """GET /v1/models/{name}."""
        name = http.path_params["name"]
        self._front.check_model(name)
        return json_answer(self._model(name))

    def _model(self, name: str) -> dict[str, Any]:
        return {
            "id": name,
            "object": "model",
            "created": self._created,
            "owned_by": "kunserve",
            "root": self._front.config.model.model,
            "parent": None,
            "max_model_len": self._front.engine.limits.max_model_len,
        }

    async def tokenize(self, http: HttpRequest) -> Response:
        """POST /tokenize."""
        front = self._front
        body = await front.bodies.read(http, TokenizeBody)
        front.check_model(body.model)
        if (body.prompt is None) == (body.messages is None):
            raise InvalidRequest("Give either `prompt` or `messages`.", "prompt")
        if body.prompt is not None:
            special = body.add_special_tokens is not False
            encoding = front.codec.encode([body.prompt], special)
            (token_ids,) = await unless_gone(http, encoding)
        else:
            token_ids = await unless_gone(http, encode_conversation(front.codec, body))
        strings = front.codec.token_strings(token_ids) if body.return_token_strs else None
        return json_answer(
            {
                "count": len(token_ids),
                "max_model_len": front.engine.limits.max_model_len,
                "tokens": token_ids,
                "token_strs": strings,
            }
        )

    async def tokenizer_info(self, _http: HttpRequest) -> Response:
        """GET /tokenizer_info: what lm-eval asks before it has /tokenize do the rest."""
        return json_answer(self._front.codec.tokenizer_info())

    async def detokenize(self, http: HttpRequest) -> Response:
        """POST /detokenize."""
        front = self._front
        body = await front.bodies.read(http, DetokenizeBody)
        front.check_model(body.model)
        check_token_ids(body.tokens, front.engine.limits.vocab_size, "tokens")
        codec = front.codec
        text = await codec.threads.run(len(body.tokens), codec.decode, body.tokens)
        return json_answer({"prompt": text})

    async def state(self, _http: HttpRequest) -> Response:
        """GET /kunserve/state."""
        return json_answer(state_object(self._front.engine.state()))
