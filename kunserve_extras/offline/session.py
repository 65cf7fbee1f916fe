"""A running cluster behind ``LLM``: prompts become requests, and requests become outputs."""

import asyncio
import contextlib
import logging
import time
from collections.abc import Awaitable, Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from kunserve.core.errors import InvalidRequest, Unavailable
from kunserve.core.request import FinishReason
from kunserve.core.snapshots import ClusterState
from kunserve.server.api.answers.choice import Choice
from kunserve.server.api.chat_format import template_defaults
from kunserve.server.api.forms.body import form_of
from kunserve.server.api.front import Front
from kunserve.server.api.generation import ClientGone, EngineFailed, Generation
from kunserve.server.api.openai_routes import AnswerReading, OpenAIRoutes
from kunserve.server.api.prompts import bad_words_of, encode_conversation, truncated
from kunserve.server.api.schema import DEFAULT_COMPLETION_TOKENS, ChatBody, parsed_fields
from kunserve.server.api.text import TextCodec
from kunserve.server.api.vocabulary import check_token_ids
from kunserve.server.http.limits import FrontLimits
from kunserve.server.start.launch import Launched
from kunserve_extras.offline.loop_thread import Tell
from kunserve_extras.offline.outputs import Reporter, RequestOutput
from kunserve_extras.offline.prompts import Prompt
from kunserve_extras.offline.sampling_params import GenerateBody, SamplingParams

logger = logging.getLogger(__name__)

QUEUE_DEPTH = 2
"""Requests that are given to the cluster at once, in full batches of all instances: one runs, and
one waits for whatever room there is. More would only be a longer queue."""
RESPAWN_S = 300.0
"""How long a request waits while no instance is alive, and replacements start."""
RETRY_S = 0.1


@dataclass(frozen=True, slots=True)
class Wish:
    """How one prompt is to be answered, and how soon."""

    params: SamplingParams | None
    """None: as the model's makers recommend."""
    priority: int | None


@dataclass(frozen=True, slots=True)
class Asked:
    """One prompt, checked and ready to run."""

    prompt: str | None
    token_ids: list[int]
    choices: list[Choice]
    eager: bool
    """Whether its text may end it, so that each token is looked at when it comes."""
    reporter: Reporter
    num_prompt_logprobs: int | None


@dataclass(frozen=True, slots=True)
class Progress:
    """One prompt is done."""

    num_prompt_tokens: int
    num_output_tokens: int


class Session:
    """Everything but the thread it runs in. Made on the event loop."""

    def __init__(self, launched: Launched) -> None:
        self.launched = launched
        config, cluster = launched.config, launched.cluster
        limits = FrontLimits(max_waiting_chars=1 << 62)  # nobody else waits
        codec = TextCodec(
            launched.tokenizer,
            cluster.limits.max_model_len,
            limits.inline_chars,
            limits.max_waiting_chars,
            template_defaults(config.chat),
        )
        self.front = Front(cluster, codec, launched.model_name, config, limits, launched.defaults)
        self._routes = OpenAIRoutes(self.front)
        self._num_asked = 0
        batch = config.cluster.num_instances * config.scheduler.max_num_seqs
        self._num_at_once = QUEUE_DEPTH * batch

    async def close(self) -> None:
        """End the instances, and the process that tries forms."""
        self.front.forms.close()
        self.front.codec.threads.close()
        await self.launched.cluster.close()

    async def state(self) -> ClusterState:
        """As of now."""
        return self.front.engine.state()

    async def reset_prefix_cache(self) -> None:
        """See ``EngineClient``."""
        await self.front.engine.reset_prefix_cache()

    def default_params(self) -> SamplingParams:
        """What the model's makers recommend, and neutral values for what they leave open."""
        known = asdict(self.front.defaults)
        del known["max_new_tokens"]
        given = {name: value for name, value in known.items() if value is not None}
        return SamplingParams(max_tokens=self._default_tokens, **given)

    @property
    def _default_tokens(self) -> int:
        return self.front.defaults.max_new_tokens or DEFAULT_COMPLETION_TOKENS

    def _default_body(self, num_prompt_tokens: int) -> GenerateBody:
        """Where nobody said how long, a prompt gets what has room behind it, as over HTTP."""
        remains = self.front.engine.limits.max_model_len - num_prompt_tokens
        wanted = None if remains < 1 else min(self._default_tokens, remains)
        return GenerateBody.model_validate({"max_tokens": wanted})

    # What is asked for

    async def generate(
        self, prompts: Sequence[Prompt], wishes: Sequence[Wish], tell: Tell
    ) -> list[RequestOutput]:
        """The answers, in the prompts' order. Raises InvalidRequest before anything runs."""
        return await self._run([*zip(prompts, wishes, strict=True)], self._spelled, tell)

    async def chat(
        self,
        conversations: Sequence[ChatBody],
        wishes: Sequence[Wish],
        tell: Tell,
    ) -> list[RequestOutput]:
        """The same for conversations."""

        async def spelled(conversation: ChatBody) -> Prompt:
            token_ids = await encode_conversation(self.front.codec, conversation)
            return Prompt(self.front.codec.decode(token_ids), token_ids)

        return await self._run([*zip(conversations, wishes, strict=True)], spelled, tell)

    async def _spelled(self, prompt: Prompt) -> Prompt:
        if prompt.text is None:
            vocab_size = self.front.engine.limits.vocab_size
            check_token_ids(prompt.token_ids or [], vocab_size, "prompts")
            return prompt
        (token_ids,) = await self.front.codec.encode([prompt.text], add_special_tokens=True)
        if not token_ids:
            raise InvalidRequest("`prompts`: the text is empty.", "prompts")
        return replace(prompt, token_ids=token_ids)

    async def _run(
        self,
        given: Sequence[tuple[Any, Wish]],
        spell: Callable[[Any], Awaitable[Prompt]],
        tell: Tell,
    ) -> list[RequestOutput]:
        asked = []
        for index, (prompt, wish) in enumerate(given):
            with _named(index, len(given)):
                asked.append(await self._ask(await spell(prompt), wish))
            await asyncio.sleep(0)  # the cluster has its turn
        outputs: dict[int, RequestOutput] = {}
        # The engine puts in order only what it has, which is not all.
        left = iter(sorted(enumerate(asked), key=lambda one: one[1].choices[0].request.priority))

        async def work() -> None:
            for index, one in left:
                outputs[index] = output = await self._answer(one)
                lengths = [len(answer.token_ids) for answer in output.outputs]
                tell(Progress(len(output.prompt_token_ids), sum(lengths)))

        workers = [asyncio.create_task(work()) for _ in range(min(len(asked), self._num_at_once))]
        try:
            await asyncio.gather(*workers)
        finally:
            for worker in workers:
                worker.cancel()
            await asyncio.gather(*workers, return_exceptions=True)
        return [outputs[index] for index in range(len(asked))]

    # One prompt

    async def _ask(self, prompt: Prompt, wish: Wish) -> Asked:
        text, token_ids, params = prompt.text, prompt.token_ids or [], wish.params
        body = self._default_body(len(token_ids)) if params is None else params.body()
        more = {"cache_salt": prompt.cache_salt, "priority": wish.priority}
        told = parsed_fields(GenerateBody, more)
        body = body.model_copy(update={name: getattr(told, name) for name in more})
        self._routes.check(body)
        kept = truncated(token_ids, body, self.front.engine.limits.max_model_len)
        if text is not None and len(kept) < len(token_ids):
            text = self.front.codec.decode(kept)
        bad_words = await bad_words_of(self.front.codec, body)
        self._num_asked += 1
        name = f"offline-{self._num_asked}"
        reading = AnswerReading(structured=await self._routes.tried(form_of(body)))
        choices = self._routes.choices(body, [kept], bad_words, name, time.monotonic(), reading)
        detokenizes = params is None or params.detokenize
        reporter = Reporter(self.front.codec.token_bytes, detokenizes)
        return Asked(text, kept, choices, bool(body.stop), reporter, body.prompt_logprobs)

    async def _answer(self, asked: Asked) -> RequestOutput:
        front, choices = self.front, asked.choices
        for choice in choices:  # it joins the queue only now
            choice.request = replace(choice.request, arrival_s=time.monotonic())
        generation = await self._started(choices, asked.eager)
        try:
            while await generation.advance():
                pass
        except EngineFailed:
            logger.warning(
                "the engine gave up on a prompt request=%s", choices[0].request.request_id
            )
        finally:
            front.leave(generation, ClientGone())
        return self._output(asked)

    async def _started(self, choices: Sequence[Choice], eager: bool) -> Generation:
        """Waits while no instance is alive."""
        until_s = time.monotonic() + RESPAWN_S
        while True:
            generation = Generation(
                self.front.engine, choices, self.front.watch, eager, len(choices)
            )
            try:
                await self.front.enter(generation)
                return generation
            except Unavailable:
                if time.monotonic() > until_s:
                    raise
            await asyncio.sleep(RETRY_S)

    def _output(self, asked: Asked) -> RequestOutput:
        deltas = [choice.drain() for choice in asked.choices]
        for choice in asked.choices:
            choice.finish_reason = choice.finish_reason or FinishReason.ERROR
        scores = None
        if asked.num_prompt_logprobs is not None and deltas[0].starts:
            scores = asked.reporter.prompt(
                asked.token_ids, deltas[0].prompt_scores, asked.num_prompt_logprobs
            )
        answers = zip(asked.choices, deltas, strict=True)
        return RequestOutput(
            request_id=str(asked.choices[0].request.request_id).rpartition("-")[0],
            prompt=asked.prompt,
            prompt_token_ids=asked.token_ids,
            prompt_logprobs=scores,
            outputs=[asked.reporter.answer(i, *one) for i, one in enumerate(answers)],
            num_cached_tokens=asked.choices[0].num_cached_tokens,
        )


@contextlib.contextmanager
def _named(index: int, num: int) -> Iterator[None]:
    """Errors say which prompt is at fault."""
    try:
        yield
    except InvalidRequest as error:
        if num == 1:
            raise
        raise type(error)(f"prompt {index}: {error}", error.param) from None
