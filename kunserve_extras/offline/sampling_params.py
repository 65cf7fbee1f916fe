"""``SamplingParams`` with vLLM's names. What is valid is said once, by the bodies of HTTP."""

from dataclasses import asdict, dataclass, fields
from typing import Any, ClassVar

from pydantic import Field

from kunserve.core.errors import InvalidRequest
from kunserve.server.api.schema import CompletionBody, parsed_fields


class GenerateBody(CompletionBody):
    """A body as ``POST /v1/completions`` has it, but that no ``max_tokens`` is all that remains."""

    default_tokens: ClassVar[int | None] = None

    max_tokens: int | None = Field(None, ge=1)


@dataclass
class StructuredOutputsParams:
    """A form that the output must have: one of these, as in vLLM."""

    json: str | dict[str, Any] | None = None
    """A JSON schema."""
    regex: str | None = None
    choice: list[str] | None = None
    grammar: str | None = None
    json_object: bool | None = None


@dataclass
class SamplingParams:
    """How answers are chosen, and what is told of them. Defaults are vLLM's.

    Raises InvalidRequest, which is a ValueError too, for a value that HTTP would refuse. What
    depends on the model, such as token ids, is checked by ``LLM.generate`` before anything runs.
    """

    n: int = 1
    """Answers to each prompt."""
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    temperature: float = 1.0
    """0 is greedy."""
    top_p: float = 1.0
    top_k: int = 0
    """0 and -1: all tokens."""
    min_p: float = 0.0
    seed: int | None = None
    stop: str | list[str] | None = None
    stop_token_ids: list[int] | None = None
    bad_words: list[str] | None = None
    ignore_eos: bool = False
    max_tokens: int | None = 16
    """None: all that remains of the context."""
    min_tokens: int = 0
    logprobs: int | None = None
    """Alternatives told with each token; 0 tells of the token only."""
    prompt_logprobs: int | None = None
    detokenize: bool = True
    """False leaves ``text`` empty."""
    skip_special_tokens: bool = True
    spaces_between_special_tokens: bool = True
    include_stop_str_in_output: bool = False
    truncate_prompt_tokens: int | None = None
    """Of a longer prompt only so many tokens at its end are kept; -1: as many as have room."""
    structured_outputs: StructuredOutputsParams | None = None
    logit_bias: dict[int, float] | None = None
    allowed_token_ids: list[int] | None = None

    def __post_init__(self) -> None:
        """Check what can be checked without a model."""
        self.body()

    def body(self) -> GenerateBody:
        """The same as the body of a request."""
        given = {field.name: getattr(self, field.name) for field in fields(self)}
        structured = given["structured_outputs"]
        if isinstance(structured, StructuredOutputsParams):
            form = {name: value for name, value in asdict(structured).items() if value is not None}
            given["structured_outputs"] = form
        if isinstance(given["logit_bias"], dict):  # whose keys are texts in JSON
            given["logit_bias"] = {str(key): bias for key, bias in given["logit_bias"].items()}
        detokenize = given.pop("detokenize")
        if not detokenize and self.stop:
            raise InvalidRequest("`stop` needs `detokenize`: it is looked for in the text.", "stop")
        return parsed_fields(GenerateBody, given)
