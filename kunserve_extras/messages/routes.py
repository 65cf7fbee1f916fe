"""POST /v1/messages and /v1/messages/count_tokens: Anthropic's API over the requests of chats."""

from starlette.requests import Request as HttpRequest
from starlette.responses import Response
from starlette.routing import Route

from kunserve.server.api.front import Front
from kunserve.server.api.openai_routes import OpenAIRoutes
from kunserve.server.api.prompts import encode_conversation
from kunserve.server.http.body import unless_gone
from kunserve.server.http.errors import json_answer
from kunserve.server.http.middleware import ANSWER_ID
from kunserve_extras.chats.answers import one_answer
from kunserve_extras.messages.answer import MessageAnswer, StreamedMessage
from kunserve_extras.messages.errors import messages_error
from kunserve_extras.messages.schema import CountBody, MessagesBody

PATH = "/v1/messages"


def routes(front: Front, openai: OpenAIRoutes) -> list[Route]:
    """What the seam ``routes`` of a server takes."""
    front.error_shapes[PATH] = messages_error
    own = MessagesRoutes(front, openai)
    return [
        Route(PATH, own.create, methods=["POST"]),
        Route(f"{PATH}/count_tokens", own.count, methods=["POST"]),
    ]


class MessagesRoutes:
    """Two endpoints."""

    def __init__(self, front: Front, openai: OpenAIRoutes) -> None:
        self._front = front
        self._openai = openai

    async def create(self, http: HttpRequest) -> MessageAnswer:
        """POST /v1/messages."""
        body = await self._front.bodies.read(http, MessagesBody)
        with self._front.admission(body.model) as arrival_s:
            return await self._create(http, body, arrival_s)

    async def _create(
        self, http: HttpRequest, body: MessagesBody, arrival_s: float
    ) -> MessageAnswer:
        front, chat = self._front, body.as_chat()
        asked = await self._openai.read_chat(http, chat)
        # Clients ask for as much as some model gives: here the answer ends where the context does.
        remains = max(1, front.engine.limits.max_model_len - len(asked.prompt))
        chat.max_tokens = min(body.max_tokens, remains)
        response_id = f"msg_{http.scope['state'][ANSWER_ID]}"
        generation, envelope = one_answer(front, self._openai, chat, asked, response_id, arrival_s)
        shape = StreamedMessage if body.stream else MessageAnswer
        answer = shape(front, generation, envelope, body.max_tokens > remains)
        await front.enter(generation)
        return answer

    async def count(self, http: HttpRequest) -> Response:
        """POST /v1/messages/count_tokens."""
        body = await self._front.bodies.read(http, CountBody)
        self._front.check_model(body.model)
        chat = body.as_chat()
        prompt = await unless_gone(http, encode_conversation(self._front.codec, chat))
        return json_answer({"input_tokens": len(prompt)})
