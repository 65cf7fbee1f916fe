"""``LLM``: a cluster in the program that uses it."""

import weakref
from collections.abc import Callable, Coroutine, Sequence
from typing import Any, TypeAlias

from kunserve.core.config import KunServeConfig, ModelConfig
from kunserve.core.snapshots import ClusterState
from kunserve.server.api.schema import ChatBody, parsed_fields
from kunserve.server.start.launch import launch
from kunserve_extras.offline.loop_thread import LoopThread, Tell
from kunserve_extras.offline.outputs import RequestOutput
from kunserve_extras.offline.progress import Bar, ProgressBar
from kunserve_extras.offline.prompts import (
    listed_conversations,
    listed_params,
    listed_priorities,
    listed_prompts,
)
from kunserve_extras.offline.sampling_params import SamplingParams
from kunserve_extras.offline.session import Session, Wish
from kunserve_extras.offline.settings import config_from_keywords

OnePrompt: TypeAlias = str | list[int] | dict[str, Any]
Conversation: TypeAlias = Sequence[dict[str, Any]]
Params: TypeAlias = SamplingParams | Sequence[SamplingParams] | None
Priority: TypeAlias = int | Sequence[int] | None


class LLM:
    """A model over several instances, for programs that need no server.

    The instances are those of ``kunserve serve``: processes beside this one, which drop and restore
    layers as memory runs out. They end with ``close``, with the ``with`` block, with the last
    reference to this object, and with this process, however it ends.

    They are started as programs of their own, so no ``if __name__ == "__main__"`` is needed.
    Several threads may call at once; their prompts run side by side. A running event loop is no
    hindrance, as in notebooks: the cluster has one of its own, in a thread.
    """

    def __init__(self, model: str = ModelConfig().model, **flags: Any) -> None:
        """Start the instances. A keyword is a flag of ``kunserve serve`` without its dashes.

        For example ``LLM("smollm2-135m", num_instances=2, instance_memory="600MiB")``. Raises
        ConfigError for what cannot work.
        """
        config = config_from_keywords({"model": model, **flags})
        thread, sessions = LoopThread(), list[Session]()
        # Not a method, because nothing that lives as long as the thread may hold this object.
        self._finalizer = weakref.finalize(self, _shut_down, thread, sessions)
        try:
            thread.call(lambda _: _open(config, sessions))
        except BaseException:
            self._finalizer()
            raise
        self._thread = thread
        self._session = sessions[0]

    def generate(
        self,
        prompts: OnePrompt | Sequence[OnePrompt],
        sampling_params: Params = None,
        use_tqdm: Bar = None,
        *,
        priority: Priority = None,
    ) -> list[RequestOutput]:
        """Complete prompts; the outputs are in their order.

        A prompt is a text, token ids, or a dictionary with ``prompt`` or ``prompt_token_ids``.
        Without ``sampling_params`` the model's makers' are taken, and an answer gets no more tokens
        than the context has left. ``use_tqdm`` None shows a bar on a terminal. ``priority`` is one
        for all or one for each, lower ones first, with ``scheduling_policy="priority"``. Raises
        InvalidRequest, a ValueError, before anything runs. A prompt that the engine gives up on has
        the finish reason ``error``; the others go on.
        """
        listed = listed_prompts(prompts)
        wishes = _wishes(sampling_params, priority, len(listed))
        session = self._session
        return self._run(len(listed), use_tqdm, lambda tell: session.generate(listed, wishes, tell))

    def chat(
        self,
        messages: Conversation | Sequence[Conversation],
        sampling_params: Params = None,
        use_tqdm: Bar = None,
        *,
        add_generation_prompt: bool | None = None,
        continue_final_message: bool = False,
        tools: list[dict[str, Any]] | None = None,
        chat_template_kwargs: dict[str, Any] | None = None,
        priority: Priority = None,
    ) -> list[RequestOutput]:
        """Answer conversations; the model's chat template makes them prompts. See ``generate``.

        ``tools`` are told to the template; calls stand in the text as the model writes them.
        """
        options = {
            "add_generation_prompt": add_generation_prompt,
            "continue_final_message": continue_final_message,
            "tools": tools,
            "chat_template_kwargs": chat_template_kwargs,
        }
        bodies = [
            parsed_fields(ChatBody, {"messages": one, **options})
            for one in listed_conversations(messages)
        ]
        wishes = _wishes(sampling_params, priority, len(bodies))
        session = self._session
        return self._run(len(bodies), use_tqdm, lambda tell: session.chat(bodies, wishes, tell))

    def _run(
        self,
        num_prompts: int,
        bar: Bar,
        work: Callable[[Tell], Coroutine[Any, Any, list[RequestOutput]]],
    ) -> list[RequestOutput]:
        with ProgressBar(num_prompts, bar) as progress:
            return self._thread.call(work, progress.hear)

    def get_tokenizer(self) -> Any:
        """The model's tokenizer, of transformers. Not for other threads while this one uses it."""
        return self._session.launched.tokenizer

    def get_default_sampling_params(self) -> SamplingParams:
        """What the model's makers recommend."""
        return self._session.default_params()

    def state(self) -> ClusterState:
        """Groups, memory, drops and restores as of now."""
        return self._thread.call(lambda _: self._session.state())

    def reset_prefix_cache(self) -> bool:
        """Forget the KV of equal beginnings, but for what calls of other threads share. True."""
        self._thread.call(lambda _: self._session.reset_prefix_cache())
        return True

    def close(self) -> None:
        """End the instances. May be called again; nothing else may be called after it."""
        self._finalizer()

    def __enter__(self) -> "LLM":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _wishes(params: Params, priority: Priority, num_prompts: int) -> list[Wish]:
    """One for each prompt."""
    priorities = listed_priorities(priority, num_prompts)
    return [*map(Wish, listed_params(params, num_prompts), priorities)]


async def _open(config: KunServeConfig, sessions: list[Session]) -> None:
    """Start the cluster, and note it for ``_shut_down``: the caller may be interrupted any time."""
    launched = await launch(config)
    try:
        sessions.append(Session(launched))
    except BaseException:
        await launched.cluster.close()
        raise


def _shut_down(thread: LoopThread, sessions: list[Session]) -> None:
    async def last() -> None:
        for session in sessions:
            await session.close()

    thread.close(last)
