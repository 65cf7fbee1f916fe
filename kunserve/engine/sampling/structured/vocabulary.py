"""The model's vocabulary as the library wants it."""

from collections.abc import Sequence

from llguidance import LLTokenizer

from kunserve.engine.sampling.structured.grammar import FormError


def open_vocabulary(
    tokenizer_json: str, vocab_size: int, eos_token_ids: Sequence[int]
) -> LLTokenizer:
    """The vocabulary of a tokenizer in Hugging Face's format, for ``vocab_size`` logits.

    Takes a few tenths of a second, in which no other thread of Python runs. Raises FormError.
    """
    ends = [token for token in eos_token_ids if 0 <= token < vocab_size]
    if not ends:
        raise FormError("the model names no token that ends an answer")
    try:
        return LLTokenizer(tokenizer_json, n_vocab=vocab_size, eos_token=ends)
    except Exception as error:  # the library raises many kinds for a file that it cannot use
        raise FormError(f"the model's tokenizer cannot be used for forms: {error}") from error
