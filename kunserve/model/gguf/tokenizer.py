"""Builds a tokenizer from GGUF metadata, which holds the vocabulary but not the rules.

The rules (how text is cut into words before merging) are known by name; an unknown name is
refused, since a wrong rule gives plausible, slightly wrong tokens.
"""

import importlib
from itertools import pairwise
from typing import Any

from tokenizers import AddedToken, Regex, Tokenizer, decoders, normalizers, pre_tokenizers
from tokenizers.models import BPE
from tokenizers.processors import TemplateProcessing

from kunserve.core.errors import ModelFiles, UnsupportedModel
from kunserve.model.gguf.file import GgufFile

_CONTROL = 3
_USER_DEFINED = 4

_LLAMA3_WORDS = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_QWEN2_WORDS = _LLAMA3_WORDS.replace(r"\p{N}{1,3}", r"\p{N}")
_TEKKEN_WORDS = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+"
    r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*"
    r"|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_WORDS = {
    "llama-bpe": _LLAMA3_WORDS,
    "llama3": _LLAMA3_WORDS,
    "llama-v3": _LLAMA3_WORDS,
    "qwen2": _QWEN2_WORDS,
    "deepseek-r1-qwen": _QWEN2_WORDS,
    "tekken": _TEKKEN_WORDS,
}
"""Regular expressions of the byte-level vocabularies, by ``tokenizer.ggml.pre``."""
_GPT2_WORDS = ("default", "gpt-2")
_GPT2_WORDS_AND_DIGITS = ("smollm",)


def build_backend(file: GgufFile) -> Tokenizer:
    """What the fast tokenizer is made around. An instance needs no more of it."""
    tokens = file.get("tokenizer.ggml.tokens", list)
    kind = file.get("tokenizer.ggml.model", str)
    if kind == "gpt2":
        backend = _byte_level(file, tokens)
    elif kind == "llama":
        backend = _sentence_piece(file, tokens)
    else:
        raise UnsupportedModel(f"{file.path}: tokenizer model {kind!r} is not supported")
    _add_special(file, tokens, backend)
    return backend


def build_tokenizer(file: GgufFile) -> Any:
    """A transformers fast tokenizer equal to the one that the file was converted from."""
    transformers = importlib.import_module("transformers")  # seconds that no instance need spend
    backend = build_backend(file)
    named = _named_tokens(file, file.get("tokenizer.ggml.tokens", list))
    adds_bos = file.get("tokenizer.ggml.model", str) == "llama"
    if file.get("tokenizer.ggml.add_bos_token", bool, adds_bos) and "bos_token" in named:
        bos = named["bos_token"]
        backend.post_processor = TemplateProcessing(
            single=f"{bos} $A",
            pair=f"{bos} $A {bos} $B",
            special_tokens=[(bos, file.get("tokenizer.ggml.bos_token_id", int))],
        )
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=backend,
        chat_template=file.metadata.get("tokenizer.chat_template"),
        clean_up_tokenization_spaces=False,
        model_max_length=_context_length(file),
        **named,
    )


def _byte_level(file: GgufFile, tokens: list[str]) -> Tokenizer:
    merges = [tuple(merge.split(" ", 1)) for merge in file.get("tokenizer.ggml.merges", list)]
    backend = Tokenizer(_bpe(file, tokens, merges))
    backend.pre_tokenizer = _word_rule(file)
    backend.decoder = decoders.ByteLevel()
    if file.metadata.get("tokenizer.ggml.pre") in ("qwen2", "deepseek-r1-qwen"):
        backend.normalizer = normalizers.NFC()
    return backend


def _word_rule(file: GgufFile) -> Any:
    name = file.get("tokenizer.ggml.pre", str, "default")
    if name in _GPT2_WORDS:
        return pre_tokenizers.ByteLevel(add_prefix_space=False)
    if name in _GPT2_WORDS_AND_DIGITS:
        return pre_tokenizers.Sequence(
            [
                pre_tokenizers.Digits(individual_digits=True),
                pre_tokenizers.ByteLevel(add_prefix_space=False),
            ]
        )
    if name in _WORDS:
        return pre_tokenizers.Sequence(
            [
                pre_tokenizers.Split(Regex(_WORDS[name]), "isolated"),
                pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
            ]
        )
    raise UnsupportedModel(
        f"{file.path}: pre-tokenizer {name!r} is not known; give --tokenizer a Hugging Face folder"
    )


def _sentence_piece(file: GgufFile, tokens: list[str]) -> Tokenizer:
    """SentencePiece BPE: merges are implied by the pieces' scores."""
    scores = file.get("tokenizer.ggml.scores", list)
    ids = {token: index for index, token in enumerate(tokens)}
    merges = []
    for piece, score in zip(tokens, scores, strict=True):
        for cut in range(1, len(piece)):
            left, right = piece[:cut], piece[cut:]
            if left in ids and right in ids:
                merges.append((-score, ids[left], ids[right], left, right))
    merges.sort()
    backend = Tokenizer(
        _bpe(file, tokens, [(left, right) for *_, left, right in merges], byte_fallback=True)
    )
    prefix = file.get("tokenizer.ggml.add_space_prefix", bool, True)
    steps = [normalizers.Prepend("▁")] if prefix else []
    backend.normalizer = normalizers.Sequence([*steps, normalizers.Replace(" ", "▁")])
    backend.decoder = decoders.Sequence(
        [
            decoders.Replace("▁", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            *([decoders.Strip(" ", 1, 0)] if prefix else []),
        ]
    )
    return backend


def _bpe(file: GgufFile, tokens: list[str], merges: list[Any], byte_fallback: bool = False) -> BPE:
    unknown = file.metadata.get("tokenizer.ggml.unknown_token_id")
    try:
        return BPE(
            vocab={token: index for index, token in enumerate(tokens)},
            merges=merges,
            unk_token=tokens[unknown] if byte_fallback and unknown is not None else None,
            fuse_unk=byte_fallback,
            byte_fallback=byte_fallback,
        )
    except Exception as error:
        # The library raises bare Exception, for example for a merge of unknown tokens.
        raise ModelFiles(f"{file.path}: its vocabulary is malformed: {error}") from error


def _add_special(file: GgufFile, tokens: list[str], backend: Tokenizer) -> None:
    kinds = file.metadata.get("tokenizer.ggml.token_type", [])
    found = [
        AddedToken(token, special=kind == _CONTROL, normalized=False)
        for token, kind in zip(tokens, kinds, strict=False)
        if kind in (_CONTROL, _USER_DEFINED)
    ]
    # Consecutive ones of a kind go in one call: the library rebuilds its automaton each time.
    cuts = [0, *(i + 1 for i, (a, b) in enumerate(pairwise(found)) if a.special != b.special)]
    for first, last in pairwise([*cuts, len(found)]):
        group = found[first:last]
        if group and group[0].special:
            backend.add_special_tokens(group)
        elif group:
            backend.add_tokens(group)


def _named_tokens(file: GgufFile, tokens: list[str]) -> dict[str, str]:
    names = {
        "bos_token": "bos_token_id",
        "eos_token": "eos_token_id",
        "unk_token": "unknown_token_id",
        "pad_token": "padding_token_id",
    }
    found = {}
    for name, key in names.items():
        token_id = file.metadata.get(f"tokenizer.ggml.{key}")
        if isinstance(token_id, int) and 0 <= token_id < len(tokens):
            found[name] = tokens[token_id]
    return found


def _context_length(file: GgufFile) -> int:
    kind = file.get("general.architecture", str)
    return int(file.get(f"{kind}.context_length", int, 1 << 30))
