"""POST /v1/completions and /v1/chat/completions: a body becomes engine requests."""

import time
import uuid
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from starlette.requests import Request as HttpRequest

from kunserve.core.errors import InvalidRequest
from kunserve.core.ids import RequestId
from kunserve.core.request import Request, StructuredOutput
from kunserve.core.tokens import TokenIds
from kunserve.server.api.answers.choice import Choice, TextOptions
from kunserve.server.api.answers.logprobs import (
    chat_logprobs,
    completion_logprobs,
    shown,
    token_name,
)
from kunserve.server.api.answers.prompt_report import report_of
from kunserve.server.api.answers.stop import StopStrings
from kunserve.server.api.answers.streaming import GenerationAnswer, StreamedAnswer, WholeAnswer
from kunserve.server.api.answers.wire import Envelope, FormatLogprobs, UsageIn
from kunserve.server.api.forms.body import AskedForm, form_of
from kunserve.server.api.front import Front
from kunserve.server.api.generation import Generation
from kunserve.server.api.parsers.reader import MessageFormat, MessageReader
from kunserve.server.api.prompts import (
    bad_words_of,
    continued_message,
    echoes_of,
    encode_conversation,
    encode_prompts,
    truncated,
)
from kunserve.server.api.sampling import BadWords, check_entries, resolve_sampling
from kunserve.server.api.schema import ChatBody, CompletionBody, GenerationBody
from kunserve.server.api.unsupported import ForeignFields
from kunserve.server.http.body import unless_gone
from kunserve.server.http.middleware import ANSWER_ID, GIVEN_ID


@dataclass(frozen=True, slots=True)
class AnswerReading:
    """What the text of answers means, and the form that it must have for that."""

    form: MessageFormat | None = None
    """None where all of it is content."""
    structured: StructuredOutput | None = None


@dataclass(frozen=True, slots=True)
class AskedChat:
    """A conversation, once it is read."""

    prompt: list[int]
    bad_words: BadWords
    reading: AnswerReading


class OpenAIRoutes:
    """The two generating endpoints."""

    def __init__(self, front: Front) -> None:
        self._front = front
        self._foreign_fields = ForeignFields()

    async def completions(self, http: HttpRequest) -> GenerationAnswer:
        """POST /v1/completions."""
        body = await self._front.bodies.read(http, CompletionBody)
        with self._front.admission(body.model) as arrival_s:
            return await self._complete(http, body, arrival_s)

    async def _complete(
        self, http: HttpRequest, body: CompletionBody, arrival_s: float
    ) -> GenerationAnswer:
        front = self._front
        self.check(body)
        if body.max_tokens == 0 and not body.echo:
            raise InvalidRequest("`max_tokens` must be at least 1 without `echo`.", "max_tokens")
        if body.best_of not in (None, body.n or 1):
            raise InvalidRequest("`best_of` other than `n` is not supported.", "best_of")
        most, limits = front.limits.max_requests_per_call, front.engine.limits
        prompts = await encode_prompts(http, front.codec, body, limits, most)
        echoes = [""] * len(prompts)
        if body.echo:
            echoes = await unless_gone(http, echoes_of(front.codec, body, prompts))
        bad_words = await bad_words_of(front.codec, body)
        reading = AnswerReading(structured=await self._tried(http, form_of(body)))
        return await self._answer(http, body, prompts, echoes, bad_words, arrival_s, reading)

    async def chat(self, http: HttpRequest) -> GenerationAnswer:
        """POST /v1/chat/completions."""
        body = await self._front.bodies.read(http, ChatBody)
        with self._front.admission(body.model) as arrival_s:
            return await self._chat(http, body, arrival_s)

    async def _chat(self, http: HttpRequest, body: ChatBody, arrival_s: float) -> GenerationAnswer:
        asked = await self.read_chat(http, body)
        echoes = [continued_message(body)]
        return await self._answer(
            http, body, [asked.prompt], echoes, asked.bad_words, arrival_s, asked.reading
        )

    async def read_chat(self, http: HttpRequest, body: ChatBody) -> AskedChat:
        """What a conversation asks of the engine. Raises InvalidRequest for what makes no sense."""
        front = self._front
        self.check(body)
        if body.top_logprobs is not None and not body.logprobs:
            raise InvalidRequest("`top_logprobs` needs `logprobs` to be true.", "top_logprobs")
        demand = front.formats.demand(body)
        if front.formats.hides_tools(demand):
            body.tools = None
        prompt = await unless_gone(http, encode_conversation(front.codec, body))
        prompt = truncated(prompt, body, front.engine.limits.max_model_len)
        bad_words = await bad_words_of(front.codec, body)
        asked = AskedForm("tools", demand.structured) if demand.structured else form_of(body)
        structured = await self._tried(http, asked)
        structured = front.formats.behind_reasoning(front.codec, body, prompt, structured)
        form = front.formats.of(front.codec, body, demand, prompt, structured)
        return AskedChat(prompt, bad_words, AnswerReading(form, structured))

    async def _tried(self, http: HttpRequest, asked: AskedForm | None) -> StructuredOutput | None:
        # Most ask for none, and need no watch of their connection here.
        return None if asked is None else await unless_gone(http, self.tried(asked))

    async def tried(self, asked: AskedForm | None) -> StructuredOutput | None:
        """The form that the output must have, once it is known to be one."""
        if asked is None:
            return None
        await self._front.forms.check(asked.form, asked.param)
        return asked.form

    def check(self, body: GenerationBody) -> None:
        """What can be refused before the prompt is looked at."""
        self._foreign_fields.check(body.model_extra or {})
        if body.n is not None and body.n > self._front.limits.max_choices:
            raise InvalidRequest(f"`n` may be at most {self._front.limits.max_choices}.", "n")
        options = body.stream_options
        if options is not None and not body.stream:
            raise InvalidRequest("`stream_options` needs `stream` to be true.", "stream_options")
        if body.prompt_logprobs is not None and body.stream:
            raise InvalidRequest(
                "`prompt_logprobs` is not available when `stream` is true.", "prompt_logprobs"
            )
        if body.priority and self._front.config.scheduler.scheduling_policy != "priority":
            raise InvalidRequest(
                "`priority` needs a server with --scheduling-policy priority.", "priority"
            )
        apart = body.spaces_between_special_tokens
        if apart is False and not self._front.codec.token_bytes.byte_level:
            raise InvalidRequest(
                "`spaces_between_special_tokens` can be false only where a token's text does not "
                "depend on its neighbours.",
                "spaces_between_special_tokens",
            )

    async def _answer(
        self,
        http: HttpRequest,
        body: GenerationBody,
        prompts: Sequence[list[int]],
        echoes: Sequence[str],
        bad_words: BadWords,
        arrival_s: float,
        reading: AnswerReading,
    ) -> GenerationAnswer:
        """Submit the request; the response that will follow it to its end.

        ``echoes`` holds, per prompt, the text to repeat before the answer.
        """
        front = self._front
        prefix = "chatcmpl-" if body.kind == "chat" else "cmpl-"
        given = http.scope["state"].get(GIVEN_ID)
        # What the client did not name has one id everywhere: in the header, the body and the log.
        unique = uuid.uuid4().hex if given else http.scope["state"][ANSWER_ID]
        response_id = prefix + (given or unique)
        # Clients may send one id twice; the engine's ids differ all the same.
        engine_id = f"{response_id}-{unique[:8]}" if given else response_id
        most = front.limits.max_prompt_logprobs
        report = report_of(front.codec, body, prompts, echoes, most)
        choices = self.choices(body, prompts, bad_words, engine_id, arrival_s, reading)
        num_choices = body.n or 1
        envelope = Envelope(
            kind=body.kind,
            response_id=response_id,
            created=int(time.time()),
            model=front.model_name,
            format_logprobs=self._formatter(body),
            prefixes=[echoes[choice.index // num_choices] for choice in choices],
            num_prompt_tokens=sum(map(len, prompts)),
            report=report,
            tells_cached=front.config.server.enable_prompt_tokens_details,
            prompt_token_ids=[prompts[choice.index // num_choices] for choice in choices]
            if body.return_token_ids
            else None,
        )
        eager = bool(body.stream or body.stop)
        generation = Generation(front.engine, choices, front.watch, eager, num_choices)
        answer: GenerationAnswer
        if body.stream:
            usage = UsageIn.of(body.stream_options)
            answer = StreamedAnswer(front, generation, envelope, usage)
        else:
            answer = WholeAnswer(front, generation, envelope)
        await front.enter(generation)
        return answer

    def choices(
        self,
        body: GenerationBody,
        prompts: Sequence[list[int]],
        bad_words: BadWords,
        engine_id: str,
        arrival_s: float,
        reading: AnswerReading,
    ) -> list[Choice]:
        """``n`` completions of each prompt, ready to be started."""
        front = self._front
        num_completions = len(prompts) * (body.n or 1)
        check_entries(body, bad_words, num_completions, front.limits.max_entries)
        skip_special = body.skip_special_tokens is not False
        options = TextOptions(
            StopStrings(body.stop) if body.stop else None,
            bool(body.include_stop_str_in_output),
            skip_special,
            omits_answer=body.asked_tokens == 0,
        )
        num_choices = body.n or 1
        token_ids_of = [TokenIds(prompt) for prompt in prompts]
        form = reading.form
        kept = front.codec.special_tokens(() if form is None else form.markers)
        choices: list[Choice] = []
        for sampling in resolve_sampling(
            body,
            front.defaults,
            front.engine.limits,
            [len(prompt) for prompt in prompts],
            front.seeds,
            bad_words,
            reading.structured,
        ):
            index = len(choices)
            token_ids = token_ids_of[index // num_choices]
            request_id = RequestId(f"{engine_id}-{index}")
            request = Request(
                request_id,
                token_ids,
                sampling,
                arrival_s,
                cache_salt=body.cache_salt or "",
                priority=body.priority or 0,
            )
            detokenizer = front.codec.detokenizer(token_ids, skip_special, kept)
            reader = None if form is None else MessageReader(form)
            matcher = options.new_matcher()
            choices.append(Choice(index, request, detokenizer, options, matcher, reader))
        return choices

    def _formatter(self, body: GenerationBody) -> FormatLogprobs | None:
        num_top = body.num_logprobs
        if num_top is None:
            return None
        token_bytes = self._front.codec.token_bytes
        as_ids = bool(body.return_tokens_as_token_ids)

        def name_of(token_id: int) -> str:
            return token_name(token_id) if as_ids else shown(token_bytes.of(token_id))

        def chat(entries: Sequence[Any], _offset: int) -> dict[str, Any]:
            return chat_logprobs(entries, token_bytes, num_top, as_ids)

        def completion(entries: Sequence[Any], offset: int) -> dict[str, Any]:
            return completion_logprobs(entries, name_of, num_top, offset)

        return chat if body.kind == "chat" else completion
