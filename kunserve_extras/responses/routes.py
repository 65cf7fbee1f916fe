"""POST /v1/responses: the stateless core of OpenAI's newer API, over the same requests as chats."""

import time

from starlette.requests import Request as HttpRequest
from starlette.responses import Response
from starlette.routing import Route

from kunserve.server.api.answers.wire import Envelope
from kunserve.server.api.front import Front
from kunserve.server.api.generation import Generation
from kunserve.server.api.openai_routes import OpenAIRoutes
from kunserve.server.api.prompts import bad_words_of, encode_conversation, truncated
from kunserve.server.http.body import unless_gone
from kunserve.server.http.middleware import ANSWER_ID
from kunserve_extras.responses.answer import ResponsesAnswer, StreamedResponsesAnswer
from kunserve_extras.responses.schema import ResponsesBody


def routes(front: Front, openai: OpenAIRoutes) -> list[Route]:
    """What the seam ``routes`` of a server takes."""
    return [Route("/v1/responses", ResponsesRoutes(front, openai).create, methods=["POST"])]


class ResponsesRoutes:
    """One endpoint. What would need a memory of past responses is refused."""

    def __init__(self, front: Front, openai: OpenAIRoutes) -> None:
        self._front = front
        self._openai = openai

    async def create(self, http: HttpRequest) -> Response:
        """POST /v1/responses."""
        body = await self._front.bodies.read(http, ResponsesBody)
        with self._front.admission(body.model) as arrival_s:
            return await self._create(http, body, arrival_s)

    async def _create(self, http: HttpRequest, body: ResponsesBody, arrival_s: float) -> Response:
        front = self._front
        body.check()
        self._openai.check(body)
        prompt = await unless_gone(http, encode_conversation(front.codec, body.conversation()))
        prompt = truncated(prompt, body, front.engine.limits.max_model_len)
        bad_words = await bad_words_of(front.codec, body)
        reading = await self._openai.reading(http, body)
        unique = http.scope["state"][ANSWER_ID]
        response_id = f"resp_{unique}"
        choices = self._openai.choices(body, [prompt], bad_words, response_id, arrival_s, reading)
        envelope = Envelope(
            kind=body.kind,
            response_id=response_id,
            created=int(time.time()),
            model=front.model_name,
            format_logprobs=None,
            prefixes=[""],
            num_prompt_tokens=len(prompt),
        )
        eager = bool(body.stream or body.stop)
        generation = Generation(front.engine, choices, front.watch, eager, 1)
        shape = StreamedResponsesAnswer if body.stream else ResponsesAnswer
        answer = shape(front, generation, envelope, body)
        await front.enter(generation)
        return answer
