"""``create_app``: the routes of one front."""

import contextlib
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.requests import Request as HttpRequest
from starlette.responses import Response
from starlette.routing import Route

from kunserve.cluster.api import EngineClient
from kunserve.cluster.driver.background import Background
from kunserve.core.config import KunServeConfig
from kunserve.core.errors import KunServeError
from kunserve.core.extras import every_extra
from kunserve.model.generation_config import SamplingDefaults
from kunserve.server.api.chat_format import template_defaults
from kunserve.server.api.front import Front
from kunserve.server.api.openai_routes import OpenAIRoutes
from kunserve.server.api.system_routes import SystemRoutes
from kunserve.server.api.text import FastTokenizer, TextCodec
from kunserve.server.http.errors import EffectMissing
from kunserve.server.http.limits import FrontLimits
from kunserve.server.http.middleware import ANSWER_ID, FrontMiddleware
from kunserve.server.http.paths import unknown_path
from kunserve.server.telemetry.accounts import Accounts
from kunserve.server.telemetry.request_life import Tracer
from kunserve.server.telemetry.stats_log import StatsLog


def create_app(
    engine: EngineClient,
    tokenizer: FastTokenizer,
    model_name: str,
    config: KunServeConfig,
    limits: FrontLimits | None = None,
    defaults: SamplingDefaults | None = None,
    tracer: Tracer | None = None,
    accounts: Accounts | None = None,
) -> Starlette:
    """The ASGI application in front of a started ``engine``. ``app.state.front`` is its Front.

    ``accounts`` are those of the server that it is a part of, which then samples and logs.
    """
    limits = limits or FrontLimits()
    server = config.server
    codec = TextCodec(
        tokenizer,
        engine.limits.max_model_len,
        limits.inline_chars,
        limits.max_waiting_chars,
        template_defaults(config.chat),
    )
    observers = [] if tracer is None else [tracer.observer(engine, model_name)]
    front = Front(
        engine,
        codec,
        model_name,
        config,
        limits,
        defaults or SamplingDefaults(),
        observers,
        accounts,
    )

    app = Starlette(
        routes=_routes(front),
        middleware=[
            Middleware(FrontMiddleware, server, front.keys, front.error_answer),
            *([] if tracer is None else [Middleware(tracer.wrap)]),
        ],
        exception_handlers={
            HTTPException: _answer_error,
            KunServeError: _answer_error,
            EffectMissing: _answer_error,
        },
        lifespan=_lifespan_of(front, samples=accounts is None),
    )
    app.router.redirect_slashes = False
    app.state.front = front
    return app


def _lifespan_of(
    front: Front, *, samples: bool
) -> Callable[[Starlette], AbstractAsyncContextManager[None]]:
    """What runs beside the application, and what is closed after it."""

    @contextlib.asynccontextmanager
    async def lifespan(_app: Starlette) -> AsyncIterator[None]:
        background = Background()
        if samples:
            background.run("samples", front.sampler.run())
            background.run("statistics in the log", StatsLog(front.metrics.cluster).run())
        try:
            yield
        finally:
            await background.close()
            front.codec.threads.close()
            front.forms.close()

    return lifespan


async def _answer_error(http: HttpRequest, error: Exception) -> Response:
    front: Front = http.app.state.front
    if isinstance(error, HTTPException) and error.status_code == 404:
        error = HTTPException(404, unknown_path(http.scope["path"], http.app.routes))
    if isinstance(error, HTTPException) and error.status_code == 405:
        allowed = (error.headers or {}).get("Allow", "")
        error.detail = f"{http.method} is not allowed here: {http.scope['path']} takes {allowed}."
    front.metrics.refused(error)
    if front.request_log is not None:
        front.request_log.refused(http, http.scope["state"][ANSWER_ID], error)
    return front.error_answer(http.scope["path"], error)


def _routes(front: Front) -> list[Route]:
    system, openai = SystemRoutes(front), OpenAIRoutes(front)
    get, post = ["GET"], ["POST"]
    return [
        Route("/v1/completions", openai.completions, methods=post),
        Route("/v1/chat/completions", openai.chat, methods=post),
        Route("/v1/models", system.models, methods=get),
        Route("/v1/models/{name:path}", system.model, methods=get),
        Route("/load", system.load, methods=get),
        Route("/version", system.version, methods=get),
        Route("/tokenize", system.tokenize, methods=post),
        Route("/detokenize", system.detokenize, methods=post),
        Route("/tokenizer_info", system.tokenizer_info, methods=get),
        Route("/health", system.health, methods=get),
        Route("/health/ready", system.ready, methods=get),
        Route("/ping", system.health, methods=["GET", "POST"]),
        Route("/livez", system.live, methods=get),
        Route("/readyz", system.ready, methods=get),
        Route("/metrics", system.metrics, methods=get),
        Route("/kunserve/state", system.state, methods=get),
        *(route for routes in every_extra("routes") for route in routes(front, openai)),
    ]
