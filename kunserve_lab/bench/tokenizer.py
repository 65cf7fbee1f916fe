"""Text prompts of exact length from a Hugging Face tokenizer. Importing it needs transformers."""

from typing import cast

from transformers import AutoTokenizer

from kunserve.core.errors import ConfigError
from kunserve_lab.bench.prompts import Detokenizer, TokenizedPrompts


def tokenized_prompts(seed: int, name: str) -> TokenizedPrompts:
    """Prompts measured by the tokenizer ``name``: a folder, or an id that is cached or fetched."""
    try:
        tokenizer = AutoTokenizer.from_pretrained(name)
    except (OSError, ValueError) as error:
        reason = str(error).strip().splitlines()[0]
        raise ConfigError(f"--tokenizer {name}: {reason}") from None
    return TokenizedPrompts(seed, cast(Detokenizer, tokenizer))
