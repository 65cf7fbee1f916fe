"""The request bodies we accept. Strict: a string is not a number, NaN is not a temperature."""

from typing import Annotated, Any, ClassVar, Literal, TypeAlias, TypeVar

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    ValidationError,
)
from pydantic_core import PydanticCustomError

from kunserve.core.errors import InvalidRequest

INT64_MIN, INT64_MAX = -(1 << 63), (1 << 63) - 1
DEFAULT_COMPLETION_TOKENS = 16
"""OpenAI's; a chat's default is all that remains of the context."""
Kind: TypeAlias = Literal["completion", "chat"]


MAX_LOGPROBS = 20
"""Alternatives reported with each token at most, as OpenAI and vLLM have it."""
MAX_STOP_CHARS = 8192
"""Of all stop strings of a request together, because each is prepared before the first token."""
LEAST_REPETITION_PENALTY, MOST_REPETITION_PENALTY = 0.01, 10.0
"""vLLM wants more than 0. Nearer to it, a float32 logit divided by the penalty is infinite."""


def _as_list(value: object) -> object:
    return [value] if isinstance(value, str) else value


def _check_total(stops: list[str]) -> list[str]:
    if sum(map(len, stops)) > MAX_STOP_CHARS:
        raise PydanticCustomError(
            "too_long", f"Stop strings may have {MAX_STOP_CHARS} characters together"
        )
    return stops


StopList = Annotated[
    list[Annotated[str, Field(min_length=1, max_length=1024)]],
    BeforeValidator(_as_list),
    Field(max_length=64),
    AfterValidator(_check_total),
]


MAX_SALT_CHARS = 128


def _check_salt(salt: str) -> str:
    # As vLLM: other stores of KV make paths and keys of it.
    if any(char in salt for char in "@/\\\0"):
        raise PydanticCustomError("bad_salt", "A salt may not contain @, /, \\ or NUL")
    return salt


CacheSalt = Annotated[
    str, Field(min_length=1, max_length=MAX_SALT_CHARS), AfterValidator(_check_salt)
]


BadWords = Annotated[
    list[Annotated[str, Field(min_length=1, max_length=256)]], Field(max_length=256)
]


class StreamOptions(BaseModel):
    """``stream_options`` of a streamed request."""

    model_config = ConfigDict(strict=True, extra="allow")

    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None


class GenerationBody(BaseModel):
    """What completions and chat share. None always means the default."""

    model_config = ConfigDict(strict=True, extra="allow", allow_inf_nan=False)
    kind: ClassVar[Kind]
    default_tokens: ClassVar[int | None]
    """``max_tokens`` of a body that gives none; None means all that remains of the context."""

    model: str | None = None
    max_tokens: int | None = Field(None, ge=1)
    temperature: float | None = Field(None, ge=0.0, le=2.0)
    top_p: float | None = Field(None, gt=0.0, le=1.0)
    top_k: int | None = Field(None, ge=-1, le=INT64_MAX)
    min_p: float | None = Field(None, ge=0.0, le=1.0)
    n: int | None = Field(None, ge=1)
    seed: int | None = Field(None, ge=INT64_MIN, le=INT64_MAX)
    stop: StopList | None = None
    stop_token_ids: Annotated[list[int], Field(max_length=256)] | None = None
    include_stop_str_in_output: bool | None = None
    ignore_eos: bool | None = None
    min_tokens: int | None = Field(None, ge=0)
    presence_penalty: float | None = Field(None, ge=-2.0, le=2.0)
    frequency_penalty: float | None = Field(None, ge=-2.0, le=2.0)
    repetition_penalty: float | None = Field(
        None, ge=LEAST_REPETITION_PENALTY, le=MOST_REPETITION_PENALTY
    )
    logit_bias: dict[str, float] | None = None
    allowed_token_ids: Annotated[list[int], Field(min_length=1)] | None = None
    bad_words: BadWords | None = None
    response_format: Any = None
    """Read by forms/body.py, as is the next."""
    structured_outputs: Any = None
    prompt_logprobs: int | None = Field(None, ge=0, le=MAX_LOGPROBS)
    return_tokens_as_token_ids: bool | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    skip_special_tokens: bool | None = None
    spaces_between_special_tokens: bool | None = None
    add_special_tokens: bool | None = None
    cache_salt: CacheSalt | None = None
    """KV is shared only with requests of the same salt."""
    truncate_prompt_tokens: int | None = Field(None, ge=-1, le=INT64_MAX)
    """Of a longer prompt only so many tokens are kept; -1: as many as leave room for the answer."""
    truncation_side: Literal["left", "right"] | None = None
    """Where a longer prompt is cut: at its beginning, unless told."""
    return_token_ids: bool | None = None
    priority: int | None = Field(None, ge=INT64_MIN, le=INT64_MAX)
    """With ``--scheduling-policy priority``: lower ones are served first. 0 unless told."""
    user: str | None = None

    @property
    def asked_tokens(self) -> int | None:
        """The completion length that the client asks for, by whichever name."""
        return self.max_tokens

    @property
    def num_logprobs(self) -> int | None:
        """Alternatives to report with each token; None for no log-probabilities at all."""
        raise NotImplementedError

    @property
    def echoes_logprobs(self) -> bool:
        """Whether ``logprobs`` begins with the prompt's tokens."""
        return False

    @property
    def num_prompt_logprobs(self) -> int | None:
        """Alternatives wanted of each token of the prompt, in whichever field; None for none."""
        wanted = [self.prompt_logprobs, self.num_logprobs if self.echoes_logprobs else None]
        return max((num for num in wanted if num is not None), default=None)


class CompletionBody(GenerationBody):
    """POST /v1/completions."""

    kind: ClassVar[Kind] = "completion"
    default_tokens: ClassVar[int | None] = DEFAULT_COMPLETION_TOKENS

    prompt: Any = None
    """A string, a list of strings, token ids, or a list of token id lists: see prompts.py."""
    max_tokens: int | None = Field(None, ge=0)
    """0 goes with ``echo`` only."""
    echo: bool | None = None
    logprobs: int | None = Field(None, ge=0, le=MAX_LOGPROBS)
    best_of: int | None = None
    """What old clients send beside ``n``; nothing is chosen from, so it must be the same."""

    @property
    def num_logprobs(self) -> int | None:
        """See ``GenerationBody``."""
        return self.logprobs

    @property
    def echoes_logprobs(self) -> bool:
        """See ``GenerationBody``."""
        return bool(self.echo) and self.logprobs is not None


class ChatBody(GenerationBody):
    """POST /v1/chat/completions."""

    kind: ClassVar[Kind] = "chat"
    default_tokens: ClassVar[int | None] = None

    messages: list[dict[str, Any]]
    max_completion_tokens: int | None = Field(None, ge=1)
    logprobs: bool | None = None
    top_logprobs: int | None = Field(None, ge=0, le=MAX_LOGPROBS)
    echo: bool | None = None
    """Whether the answer begins with the message that it continues."""
    tools: list[dict[str, Any]] | None = None
    tool_choice: Any = None
    parallel_tool_calls: bool | None = None
    """False: an answer has one call at most."""
    include_reasoning: bool | None = None
    """False: what the model thinks is read, and not told."""
    reasoning_effort: str | None = None
    """For templates that know it."""
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None

    @property
    def asked_tokens(self) -> int | None:
        """See ``GenerationBody``; the newer name goes before the older one."""
        return self.max_tokens if self.max_completion_tokens is None else self.max_completion_tokens

    @property
    def num_logprobs(self) -> int | None:
        """See ``GenerationBody``."""
        return (self.top_logprobs or 0) if self.logprobs else None


class TokenizeBody(BaseModel):
    """POST /tokenize: a prompt or a conversation."""

    model_config = ConfigDict(strict=True, extra="ignore")

    model: str | None = None
    prompt: str | None = None
    messages: list[dict[str, Any]] | None = None
    add_special_tokens: bool | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    tools: list[dict[str, Any]] | None = None
    return_token_strs: bool | None = None


class DetokenizeBody(BaseModel):
    """POST /detokenize."""

    model_config = ConfigDict(strict=True, extra="ignore")

    model: str | None = None
    tokens: list[int]


Body = TypeVar("Body", bound=BaseModel)
MAX_NAME_CHARS = 100
"""Of a field's name in an error message, because clients choose keys of objects."""
MOST_FAULTS = 1000
"""With more of them in a body the first is not looked for: that lists all of them, for about a
second where every value of a large body is wrong, and holds up everybody else.
"""


def parsed_fields(shape: type[Body], fields: dict[str, Any]) -> Body:
    """Fields that come from Python, or InvalidRequest naming the first one at fault."""
    try:
        return shape.model_validate(fields)
    except ValidationError as error:
        raise invalid_field(error) from None


def invalid_field(error: ValidationError) -> InvalidRequest:
    """What a client is told of the first field at fault."""
    if error.error_count() > MOST_FAULTS:
        return InvalidRequest(
            f"The request body has {error.error_count()} values of a wrong type or size."
        )
    first = error.errors(include_url=False, include_context=False)[0]
    kind, location, given = first["type"], first["loc"], first["input"]
    if kind == "json_invalid":
        return InvalidRequest(f"The request body is not valid JSON: {first['msg']}")
    if not location:
        return InvalidRequest("The request body must be a JSON object.")
    name = ".".join(map(str, location))[:MAX_NAME_CHARS]
    if kind == "missing":
        return InvalidRequest(f"`{name}` is required.", name)
    if kind == "extra_forbidden":
        return InvalidRequest(f"`{name}` is not a known field.", name)
    text = f"`{name}`: {first['msg']} (got {shown_value(given)})."
    return InvalidRequest(text, str(location[0])[:MAX_NAME_CHARS])


def shown_value(value: object) -> str:
    """A value in an error message: short, whatever it is."""
    if isinstance(value, int) and abs(value) >= 10**40:
        return "an integer of more than 40 digits"
    if isinstance(value, str | list | dict) and len(value) > 1000:
        return f"a {type(value).__name__} of length {len(value)}"
    shown = repr(value)
    return shown if len(shown) <= 80 else shown[:77] + "..."
