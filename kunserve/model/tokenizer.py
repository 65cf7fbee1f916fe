"""Loads a model's tokenizer and chat template, without torch."""

from typing import Any

import transformers

from kunserve.core.errors import ModelFiles
from kunserve.model.config import read_eos_ids
from kunserve.model.gguf.file import read_gguf
from kunserve.model.gguf.tokenizer import build_tokenizer
from kunserve.model.source import ModelSource
from kunserve.model.vocabulary import locate_tokenizer


def load_tokenizer(source: ModelSource, tokenizer: str | None = None) -> Any:
    """The model's own tokenizer (a transformers fast tokenizer with its chat template).

    ``tokenizer`` names another one: a folder, a .gguf file or a hub id.
    """
    path = source.path if tokenizer is None else locate_tokenizer(tokenizer)
    if path.suffix == ".gguf":
        return build_tokenizer(read_gguf(path))
    try:
        if (path / "tokenizer.json").is_file():
            # AutoTokenizer would import torch, seconds that the HTTP front need not spend.
            return transformers.PreTrainedTokenizerFast.from_pretrained(path)
        return transformers.AutoTokenizer.from_pretrained(path)
    except Exception as error:
        # The tokenizers library raises bare Exception for a malformed file.
        raise ModelFiles(f"{path}: its tokenizer cannot be loaded: {error}") from error


def eos_token_ids(source: ModelSource, tokenizer: Any) -> tuple[int, ...]:
    """Every token that ends a reply: what the model's files say, and the tokenizer's own."""
    own = tokenizer.eos_token_id
    ids = [*read_eos_ids(source), *([own] if own is not None else [])]
    return tuple(dict.fromkeys(ids))
