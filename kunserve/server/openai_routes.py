"""POST /v1/completions and /v1/chat/completions: a body becomes engine requests."""

import time
import uuid
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from starlette.requests import Request as HttpRequest
from starlette.responses import Response

from kunserve.core.errors import InvalidRequest
from kunserve.core.ids import RequestId
from kunserve.core.request import Request
from kunserve.server.body import read_body
from kunserve.server.choice import Choice, TextOptions
from kunserve.server.front import Front
from kunserve.server.generation import Generation
from kunserve.server.logprobs import chat_logprobs, completion_logprobs
from kunserve.server.prompts import conversation_text, encode_prompts
from kunserve.server.sampling import remaining_tokens, resolve_sampling, with_length
from kunserve.server.schema import ChatBody, CompletionBody, GenerationBody, parse_body
from kunserve.server.streaming import GenerationAnswer, StreamedAnswer, WholeAnswer
from kunserve.server.unsupported import refuse_unsupported
from kunserve.server.wire import Envelope, FormatLogprobs, Kind

DEFAULT_COMPLETION_TOKENS = 16
"""OpenAI's; a chat's default is all that remains of the context."""


@dataclass(frozen=True, slots=True)
class Job:
    """A parsed request, ready to be submitted."""

    kind: Kind
    body: GenerationBody
    prompts: Sequence[Sequence[int]]
    echoes: Sequence[str]
    """Per prompt: the text to repeat before the answer."""
    max_tokens: int | None
    default_tokens: int | None
    num_logprobs: int | None
    arrival_s: float


class OpenAIRoutes:
    """The two generating endpoints."""

    def __init__(self, front: Front) -> None:
        self._front = front

    async def completions(self, http: HttpRequest) -> Response:
        """POST /v1/completions."""
        arrival_s = time.monotonic()
        front = self._front
        body = parse_body(CompletionBody, await read_body(http, front.limits))
        self._check(body)
        if body.echo and body.logprobs is not None:
            raise InvalidRequest("`echo` together with `logprobs` is not supported.", "echo")
        limits = front.engine.limits
        special = body.add_special_tokens is not False
        prompts = await encode_prompts(
            front.codec, body.prompt, special, limits.vocab_size, limits.max_model_len
        )
        job = Job(
            "completion",
            body,
            prompts,
            self._echoes(body, prompts),
            body.max_tokens,
            DEFAULT_COMPLETION_TOKENS,
            body.logprobs,
            arrival_s,
        )
        return self._answer(job)

    async def chat(self, http: HttpRequest) -> Response:
        """POST /v1/chat/completions."""
        arrival_s = time.monotonic()
        front = self._front
        body = parse_body(ChatBody, await read_body(http, front.limits))
        self._check(body)
        if body.top_logprobs is not None and not body.logprobs:
            raise InvalidRequest("`top_logprobs` needs `logprobs` to be true.", "top_logprobs")
        text = conversation_text(front.codec, body)
        # The template writes the special tokens itself.
        prompt = await front.codec.encode(text, add_special_tokens=bool(body.add_special_tokens))
        if not prompt:
            raise InvalidRequest("`messages` make an empty prompt.", "messages")
        asked = body.max_tokens
        if body.max_completion_tokens is not None:
            asked = body.max_completion_tokens
        num_logprobs = (body.top_logprobs or 0) if body.logprobs else None
        return self._answer(Job("chat", body, [prompt], [""], asked, None, num_logprobs, arrival_s))

    def _check(self, body: GenerationBody) -> None:
        """What can be refused before the prompt is looked at."""
        self._front.admit(body.model)
        refuse_unsupported(body.model_extra or {})
        if body.n is not None and body.n > self._front.limits.max_choices:
            raise InvalidRequest(f"`n` may be at most {self._front.limits.max_choices}.", "n")
        options = body.stream_options
        if options is not None and not body.stream:
            raise InvalidRequest("`stream_options` needs `stream` to be true.", "stream_options")
        if options is not None and options.continuous_usage_stats:
            raise InvalidRequest(
                "`stream_options.continuous_usage_stats` is not supported by this server.",
                "stream_options",
            )

    def _echoes(self, body: CompletionBody, prompts: Sequence[Sequence[int]]) -> list[str]:
        if not body.echo:
            return [""] * len(prompts)
        given = body.prompt if isinstance(body.prompt, list) else [body.prompt]
        if all(isinstance(text, str) for text in given):
            return list(given)
        return [self._front.codec.decode(token_ids) for token_ids in prompts]

    def _answer(self, job: Job) -> Response:
        """Submit the job; the response that will follow it to its end."""
        front = self._front
        prefix = "chatcmpl-" if job.kind == "chat" else "cmpl-"
        response_id = prefix + uuid.uuid4().hex
        choices = self._choices(job, response_id)
        num_choices = job.body.n or 1
        envelope = Envelope(
            kind=job.kind,
            response_id=response_id,
            created=int(time.time()),
            model=front.model_name,
            format_logprobs=self._formatter(job),
            prefixes=[job.echoes[choice.index // num_choices] for choice in choices],
        )
        eager = bool(job.body.stream or job.body.stop)
        generation = Generation(front.engine, choices, front.metrics, eager)
        answer: GenerationAnswer
        if job.body.stream:
            streamed = StreamedAnswer(front, generation, envelope)
            options = job.body.stream_options
            streamed.include_usage = bool(options and options.include_usage)
            answer = streamed
        else:
            answer = WholeAnswer(front, generation, envelope)
        answer.count_prompts(job.prompts)
        front.enter(generation)
        return answer

    def _choices(self, job: Job, response_id: str) -> list[Choice]:
        front, body = self._front, job.body
        limits = front.engine.limits
        num_choices = body.n or 1
        if len(job.prompts) * num_choices > front.limits.max_requests_per_call:
            raise InvalidRequest(
                f"One call may ask for at most {front.limits.max_requests_per_call} completions.",
                "prompt",
            )
        skip_special = body.skip_special_tokens is not False
        options = TextOptions(
            tuple(body.stop or ()), bool(body.include_stop_str_in_output), skip_special
        )
        choices: list[Choice] = []
        for prompt in job.prompts:
            seed = front.seeds.draw() if body.seed is None else body.seed
            sampling = resolve_sampling(body, job.num_logprobs, limits.vocab_size, seed)
            max_tokens = remaining_tokens(
                limits.max_model_len, len(prompt), job.max_tokens, job.default_tokens
            )
            token_ids = tuple(prompt)
            for choice in range(num_choices):
                index = len(choices)
                request = Request(
                    RequestId(f"{response_id}-{index}"),
                    token_ids,
                    with_length(sampling, max_tokens, choice),
                    job.arrival_s,
                )
                detokenizer = front.codec.detokenizer(token_ids, skip_special)
                choices.append(Choice(index, request, detokenizer, options))
        return choices

    def _formatter(self, job: Job) -> FormatLogprobs | None:
        if job.num_logprobs is None:
            return None
        token_bytes, num_top = self._front.codec.token_bytes, job.num_logprobs

        def chat(entries: Sequence[Any], _offset: int) -> dict[str, Any]:
            return chat_logprobs(entries, token_bytes, num_top)

        def completion(entries: Sequence[Any], offset: int) -> dict[str, Any]:
            return completion_logprobs(entries, token_bytes, num_top, offset)

        return chat if job.kind == "chat" else completion
