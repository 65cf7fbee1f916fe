"""What prompts have in common: a prompt as runs of tokens, each run with a name.

Runs of equal names have equal tokens, so two prompts share as long a beginning as their first
runs are equal. The tokens themselves are made when a request is sent.
"""

from array import array
from collections.abc import Iterator, Sequence

RUN_TOKENS = 512
"""Tokens of one ``hash_id`` of Mooncake's traces."""
MAX_NAME = 1 << 40
"""Names of traces and generators are below it."""


class Content:
    """The runs of one prompt, in 16 bytes each. Equal if all of them are."""

    __slots__ = ("_names", "_sizes")

    def __init__(self, names: Sequence[int], sizes: Sequence[int]) -> None:
        assert len(names) == len(sizes) and min(sizes, default=1) > 0, (names, sizes)
        self._names, self._sizes = array("q", names), array("q", sizes)

    @classmethod
    def of_blocks(cls, names: Sequence[int], num_tokens: int, run_tokens: int) -> "Content":
        """Blocks of ``run_tokens``, the last one cut; names beyond the tokens are left out."""
        names = names[: -(-num_tokens // run_tokens)]
        sizes = [min(run_tokens, num_tokens - i * run_tokens) for i in range(len(names))]
        return cls(names, sizes)

    def __len__(self) -> int:
        return len(self._names)

    def __iter__(self) -> Iterator[tuple[int, int]]:
        """(name, tokens) of each run."""
        return zip(self._names, self._sizes, strict=True)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Content) and list(self) == list(other)

    def __hash__(self) -> int:
        return hash((self._names.tobytes(), self._sizes.tobytes()))

    def __repr__(self) -> str:
        return f"Content({list(self)})"

    @property
    def num_tokens(self) -> int:
        """Of all runs; a prompt that is longer ends with tokens of its own."""
        return sum(self._sizes)

    def scaled(self, factor: float) -> "Content":
        """Every length times ``factor``: equal beginnings stay equal. Runs may vanish."""
        names, sizes, end, before = [], [], 0, 0
        for name, size in self:
            end += size
            after = round(end * factor)
            if after > before:
                names.append(name)
                sizes.append(after - before)
                before = after
        return Content(names, sizes)

    def again(self, times: int) -> "Content":
        """The same shape with other tokens: what another set of users would send."""
        return Content([name + times * MAX_NAME for name in self._names], self._sizes)
