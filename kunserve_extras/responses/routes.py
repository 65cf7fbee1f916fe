"""POST /v1/responses: the stateless core of OpenAI's newer API, over the same requests as chats."""

from starlette.requests import Request as HttpRequest
from starlette.routing import Route

from kunserve.server.api.front import Front
from kunserve.server.api.openai_routes import OpenAIRoutes
from kunserve.server.http.middleware import ANSWER_ID
from kunserve_extras.chats.answers import one_answer
from kunserve_extras.responses.answer import ResponsesAnswer, StreamedResponsesAnswer, Telling
from kunserve_extras.responses.output import Output
from kunserve_extras.responses.schema import ResponsesBody


def routes(front: Front, openai: OpenAIRoutes) -> list[Route]:
    """What the seam ``routes`` of a server takes."""
    return [Route("/v1/responses", ResponsesRoutes(front, openai).create, methods=["POST"])]


class ResponsesRoutes:
    """One endpoint. What would need a memory of past responses is refused."""

    def __init__(self, front: Front, openai: OpenAIRoutes) -> None:
        self._front = front
        self._openai = openai

    async def create(self, http: HttpRequest) -> ResponsesAnswer:
        """POST /v1/responses."""
        body = await self._front.bodies.read(http, ResponsesBody)
        with self._front.admission(body.model) as arrival_s:
            return await self._create(http, body, arrival_s)

    async def _create(
        self, http: HttpRequest, body: ResponsesBody, arrival_s: float
    ) -> ResponsesAnswer:
        front, chat = self._front, body.as_chat()
        asked = await self._openai.read_chat(http, chat)
        unique = http.scope["state"][ANSWER_ID]
        response_id = f"resp_{unique}"
        generation, envelope = one_answer(front, self._openai, chat, asked, response_id, arrival_s)
        shape = StreamedResponsesAnswer if body.stream else ResponsesAnswer
        telling = Telling(envelope, body, Output(generation.choices[0], unique))
        answer = shape(front, generation, envelope, telling)
        await front.enter(generation)
        return answer
