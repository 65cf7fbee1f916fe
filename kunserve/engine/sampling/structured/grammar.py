"""A form that an output must have, as the library's grammar, and within its limits.

The front compiles every form once in a process of its own before a request is accepted; an
instance compiles it again by itself. Both call ``compile_form``, so they agree.
"""

import json

from llguidance import LLMatcher, LLParserLimits, LLTokenizer, grammar_from

from kunserve.core.request import StructuredOutput
from kunserve.engine.sampling.structured.schema import prepare_schema

WHITESPACE = r"(\r?\n)?[ \t]{0,20}"
"""Between the parts of a JSON text. Without an end a small model may write spaces for ever."""

_EMPTY = "no output can have this form"
_PLAIN = {"NoExtension": _EMPTY, "NoExtensionBias": _EMPTY}
"""What the library says in words that only it knows."""


class FormError(Exception):
    """A form that is none, or that costs too much; the message is for whoever wrote it."""


def limits() -> LLParserLimits:
    """What one form may cost an instance.

    Below the library's own limits, which leave a mask a second: the worst that is known takes a
    fifth of one, and its request ends.
    """
    return LLParserLimits(
        initial_lexer_fuel=1_000_000,
        step_lexer_fuel=200_000,
        step_max_items=10_000,
        max_items_in_row=2_000,
        max_lexer_states=50_000,
        max_grammar_size=500_000,
        verbose_errors=False,
    )


def compile_form(vocabulary: LLTokenizer, form: StructuredOutput) -> LLMatcher:
    """A matcher at the beginning of an output. Raises FormError."""
    try:
        grammar = _grammar_of(form)
    except (ValueError, TypeError, RecursionError) as error:
        raise FormError(f"{error}") from None
    matcher = LLMatcher(vocabulary, grammar, log_level=0, limits=limits())
    check(matcher)
    return matcher


def check(matcher: LLMatcher) -> None:
    """Raise FormError if the matcher has failed: it never recovers."""
    if matcher.is_error():
        said = matcher.get_error().removesuffix("<non-verbose/>").strip()
        raise FormError(_PLAIN.get(said, said))


def _grammar_of(form: StructuredOutput) -> str:
    match form.kind:
        case "json_object":
            return _json_grammar('{"type": "object"}')
        case "json_schema":
            return _json_grammar(form.text)
        case "choice":
            # Each is spelled as a JSON string, which is how the grammar's language spells one. In
            # capitals they are one terminal: thousands of choices are one automaton, not rules.
            choices = " | ".join(json.dumps(one, ensure_ascii=False) for one in _choices(form))
            return LLMatcher.grammar_from_lark(f"start: CHOICE\nCHOICE: {choices}")
        case "regex":
            return LLMatcher.grammar_from_regex(form.text)
        case "grammar":
            return grammar_from("grammar", form.text)


def _json_grammar(text: str) -> str:
    schema = json.loads(text)
    prepare_schema(schema)
    # ``oneOf`` of parts that overlap becomes ``anyOf``; without that it would be refused.
    return LLMatcher.grammar_from_json_schema(
        schema, defaults={"whitespace_pattern": WHITESPACE, "coerce_one_of": True}
    )


def _choices(form: StructuredOutput) -> list[str]:
    choices: list[str] = json.loads(form.text)
    return choices
