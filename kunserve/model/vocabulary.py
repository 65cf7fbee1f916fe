"""A tokenizer as text in Hugging Face's format, without the library around it."""

import importlib
from pathlib import Path

from tokenizers import Tokenizer

from kunserve.core.errors import ModelFiles
from kunserve.model.gguf.file import read_gguf
from kunserve.model.gguf.tokenizer import build_backend
from kunserve.model.source import ModelSource, fetch_tokenizer


def tokenizer_json(source: ModelSource, tokenizer: str | None = None) -> str:
    """The model's own tokenizer, or the one that is named, as ``load_tokenizer`` finds it.

    Raises ModelFiles where there is none that can be read.
    """
    path = source.path if tokenizer is None else locate_tokenizer(tokenizer)
    if path.suffix == ".gguf":
        return plain_json(build_backend(read_gguf(path)))
    file = path / "tokenizer.json"
    if not file.is_file():
        # An old format, and a library that takes seconds to import.
        module = importlib.import_module("kunserve.model.tokenizer")
        return plain_json(module.load_tokenizer(source, tokenizer).backend_tokenizer)
    try:
        return plain_json(Tokenizer.from_file(str(file)))
    except Exception as error:
        # The tokenizers library raises bare Exception for a malformed file.
        raise ModelFiles(f"{path}: its tokenizer cannot be loaded: {error}") from error


def locate_tokenizer(name: str) -> Path:
    """The file or folder of a tokenizer: here, or a hub id."""
    path = Path(name).expanduser()
    return path if path.exists() else fetch_tokenizer(name)


def plain_json(tokenizer: Tokenizer) -> str:
    """The tokenizer's text, without what it does to the length of texts."""
    tokenizer.no_truncation()
    tokenizer.no_padding()
    return tokenizer.to_str()
