"""The spellings of ``prompts`` and of ``messages``, as lists with one entry per prompt."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeVar

from kunserve.core.errors import InvalidRequest
from kunserve_extras.offline.sampling_params import SamplingParams

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Prompt:
    """One prompt: a text or token ids."""

    text: str | None
    token_ids: list[int] | None = None
    cache_salt: str | None = None


def listed_prompts(prompts: Any) -> list[Prompt]:
    """A text, ``{"prompt": text}``, token ids, ``{"prompt_token_ids": ids}``, or a list of them."""
    if isinstance(prompts, str | Mapping) or _is_ids(prompts):
        return [_prompt("`prompts`", prompts)]
    if not isinstance(prompts, Sequence):
        raise InvalidRequest(
            "`prompts` must be a text, a list of token ids, a dictionary with `prompt` or "
            f"`prompt_token_ids`, or a list of them, not {type(prompts).__name__}.",
            "prompts",
        )
    return [_prompt(f"`prompts`[{index}]", one) for index, one in enumerate(prompts)]


def _is_ids(value: Any) -> bool:
    return isinstance(value, list | tuple) and bool(value) and all(type(i) is int for i in value)


def _prompt(where: str, given: Any) -> Prompt:
    if isinstance(given, Mapping):
        known = [name for name in ("prompt_token_ids", "prompt") if given.get(name) is not None]
        salt = given.get("cache_salt")
        known_too = {*known, "cache_salt"}
        others = [name for name, value in given.items() if value and name not in known_too]
        if others:
            raise InvalidRequest(f"{where}: {others[0]!r} is not supported.", "prompts")
        return replace(_prompt(where, given[known[0]] if known else None), cache_salt=salt)
    if isinstance(given, str):
        return Prompt(given)
    if _is_ids(given):
        return Prompt(None, list(given))
    if given in ([], ()):
        raise InvalidRequest(f"{where} is empty.", "prompts")
    raise InvalidRequest(
        f"{where} must be a text, a list of token ids, or a dictionary with `prompt` or "
        f"`prompt_token_ids`, not {type(given).__name__}.",
        "prompts",
    )


def listed_conversations(messages: Any) -> list[list[dict[str, Any]]]:
    """One conversation, or a list of them."""
    if not isinstance(messages, Sequence) or isinstance(messages, str) or not messages:
        raise InvalidRequest("`messages` must be a conversation, or a list of them.", "messages")
    is_one = isinstance(messages[0], Mapping)
    conversations = [messages] if is_one else messages
    for index, one in enumerate(conversations):
        if not isinstance(one, Sequence) or not all(isinstance(part, Mapping) for part in one):
            where = "`messages`" if is_one else f"`messages`[{index}]"
            raise InvalidRequest(f"{where} must be a list of dictionaries.", "messages")
    return [[dict(part) for part in one] for one in conversations]


def listed_params(
    params: SamplingParams | Sequence[SamplingParams] | None, num_prompts: int
) -> list[SamplingParams | None]:
    """One for each prompt; None for what the model's makers recommend."""
    if params is None or isinstance(params, SamplingParams):
        return [params] * num_prompts
    listed = list(params)
    if not all(isinstance(one, SamplingParams) for one in listed):
        raise InvalidRequest("`sampling_params` must be SamplingParams, or a list of them.")
    if len(listed) != num_prompts:
        raise InvalidRequest(
            f"There are {num_prompts} prompts, and {len(listed)} sampling parameters for them.",
            "sampling_params",
        )
    return [*listed]


def listed_priorities(priority: Any, num_prompts: int) -> list[int | None]:
    """One for each prompt; None for that of nobody who asked."""
    if priority is None or isinstance(priority, int):
        return [priority] * num_prompts
    if isinstance(priority, str) or not isinstance(priority, Sequence):
        raise InvalidRequest("`priority` must be a number, or a list of them.", "priority")
    if len(priority) != num_prompts:
        raise InvalidRequest(
            f"There are {num_prompts} prompts, and {len(priority)} priorities for them.", "priority"
        )
    return [*priority]
