"""Synthetic prompts of a wanted length. Every prompt differs, so a prefix cache cannot help, but
where the workload says what prompts have in common.
"""

from typing import Protocol

from kunserve_lab.workload import seeds
from kunserve_lab.workload.workload import WorkloadRequest

Prompt = str | list[int]

DEFAULT_VOCAB_SIZE = 32_000
_WORDS = [
    "time", "year", "people", "way", "day", "man", "thing", "woman", "life", "child", "world",
    "school", "state", "family", "student", "group", "country", "problem", "hand", "part",
    "place", "case", "week", "company", "system", "program", "question", "work", "night", "point",
    "home", "water", "room", "mother", "area", "money", "story", "fact", "month", "lot", "right",
    "study", "book", "eye", "job", "word", "business", "issue", "side", "kind", "head", "house",
    "service", "friend", "father", "power", "hour", "game", "line", "end", "member", "law", "car",
    "city", "name", "team", "minute", "idea", "kid", "body", "back", "parent", "face", "level",
    "office", "door", "health", "person", "art", "war", "history", "party", "result", "change",
    "morning", "reason", "research", "girl", "guy", "food", "moment", "air",
]  # fmt: skip


class PromptSource(Protocol):
    """Makes prompts."""

    def prompt(self, number: int, num_tokens: int) -> Prompt:
        """The prompt of request ``number``; a function of the arguments and the seed alone."""
        ...


_RUNS = 1 << 32
"""Above the numbers of all requests: a run's own tokens or words."""


def prompt_of(source: PromptSource, request: WorkloadRequest) -> Prompt:
    """The prompt of a workload's request; runs of equal names have equal tokens or words."""
    num_tokens = request.input_tokens
    if request.content is None:
        return source.prompt(request.number, num_tokens)
    pieces = [source.prompt(_RUNS + name, size) for name, size in request.content]
    rest = num_tokens - request.content.num_tokens
    if rest > 0:
        pieces.append(source.prompt(request.number, rest))
    if all(isinstance(piece, str) for piece in pieces):
        return " ".join(map(str, pieces))
    return [token for piece in pieces for token in piece if isinstance(token, int)][:num_tokens]


class Detokenizer(Protocol):
    """The part of a Hugging Face tokenizer that prompts need."""

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """Token ids of a text."""
        ...

    def decode(self, token_ids: list[int], *, skip_special_tokens: bool = False) -> str:
        """Text of token ids."""
        ...


class TokenIdPrompts:
    """Random token ids: exactly the wanted length, for servers that accept ids as a prompt."""

    def __init__(self, seed: int, vocab_size: int = DEFAULT_VOCAB_SIZE) -> None:
        self._seed = seed
        self._vocab_size = vocab_size

    def prompt(self, number: int, num_tokens: int) -> list[int]:
        """``num_tokens`` ids, away from the low ones that tend to be special."""
        low = min(300, self._vocab_size // 2)
        rng = seeds.generator(self._seed, seeds.PROMPTS, number)
        ids: list[int] = rng.integers(low, self._vocab_size, num_tokens).tolist()
        return ids


class WordPrompts:
    """Common English words, about one token each in any tokenizer: the length is approximate."""

    def __init__(self, seed: int) -> None:
        self._seed = seed

    def prompt(self, number: int, num_tokens: int) -> str:
        """``num_tokens`` words."""
        rng = seeds.generator(self._seed, seeds.PROMPTS, number)
        picks = rng.integers(0, len(_WORDS), num_tokens).tolist()
        return " ".join(_WORDS[pick] for pick in picks)


class TokenizedPrompts:
    """Text that a tokenizer encodes to the wanted length, or within a token or two of it."""

    def __init__(self, seed: int, tokenizer: Detokenizer) -> None:
        self._words = WordPrompts(seed)
        self._tokenizer = tokenizer

    def prompt(self, number: int, num_tokens: int) -> str:
        """Words, cut at the token that fits and checked by encoding again."""
        text = self._words.prompt(number, num_tokens)
        overhead = len(self._tokenizer.encode("")) if num_tokens > 8 else 0
        wanted = max(1, num_tokens - overhead)
        ids = self._tokenizer.encode(text, add_special_tokens=False)
        while len(ids) < wanted:
            ids = ids + ids
        for _ in range(4):
            text = self._tokenizer.decode(ids[:wanted], skip_special_tokens=True)
            again = self._tokenizer.encode(text, add_special_tokens=False)
            if len(again) == wanted:
                break
            ids = again + ids
        return text
