"""Synthetic prompts of a wanted length. Every prompt differs, so a prefix cache cannot help."""

from typing import Protocol

from kunserve.workload import seeds

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
