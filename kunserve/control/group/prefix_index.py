"""Which prefix has the block of a name: what of a group's KV can be found."""

from collections.abc import Iterator

from kunserve.control.group.block_names import names_of
from kunserve.control.group.cache_journal import CacheJournal
from kunserve.control.group.prompt_prefix import Prefix
from kunserve.control.group.sequence import Sequence
from kunserve.core.prefix import PrefixHash


class PrefixIndex:
    """Owner of the names that are found. Of blocks with equal names, the first shown is found."""

    def __init__(self, block_size: int, journal: CacheJournal | None) -> None:
        self._block_size = block_size
        self._journal = journal
        self._prefix_of: dict[PrefixHash, Prefix] = {}

    def __iter__(self) -> Iterator[tuple[PrefixHash, Prefix]]:
        return iter(self._prefix_of.items())

    def finds(self, name: PrefixHash, prefix: Prefix) -> bool:
        """Whether the block of that name is found in this prefix, not in an equal one."""
        return self._prefix_of.get(name) is prefix

    def find(self, seq: Sequence, num_blocks: int) -> list[tuple[Prefix, int]]:
        """The prefixes that the sequence's first ``num_blocks`` are in, as far as they are."""
        if not num_blocks or not self._prefix_of:
            return []
        parts: list[tuple[Prefix, int]] = []
        last: Prefix | None = None
        end = 0
        for name in names_of(seq, num_blocks, self._block_size)[:num_blocks]:
            prefix = self._prefix_of.get(name)
            if prefix is None:
                break
            if prefix is not last and last is not None:
                parts.append((last, end))
                _cut(parts, prefix.first)
            last = prefix
            end += 1
        if last is not None:
            parts.append((last, end))
        return parts

    def show(self, seq: Sequence, own: Prefix, first: int) -> None:
        """Let the sequence's own blocks from ``first`` on be found, unless equal ones are."""
        names = own.names[first - own.first :]
        if self._journal is None:
            for name in names:
                self._prefix_of.setdefault(name, own)
            return
        for block, name in enumerate(names, first):
            if name not in self._prefix_of:
                self._prefix_of[name] = own
                self._journal.stored(seq, block, self._block_size)

    def show_moved(self, prefix: Prefix, end: int) -> None:
        """What an exchange brought is found before ``end``: it was told when it was computed."""
        for name in prefix.names[: end - prefix.first]:
            self._prefix_of.setdefault(name, prefix)

    def hide(self, prefix: Prefix, end: int) -> None:
        """Blocks of the prefix at ``end`` and behind are found no more."""
        hidden = [n for n in prefix.names[end - prefix.first :] if self._prefix_of.get(n) is prefix]
        for name in hidden:
            del self._prefix_of[name]
        if self._journal is not None:
            self._journal.removed(hidden)

    def clear(self) -> None:
        """The group has ended."""
        self._prefix_of.clear()


def _cut(parts: list[tuple[Prefix, int]], first: int) -> None:
    """A prefix that begins at ``first`` has what comes behind that itself.

    Both would be held, and a request that needs all memory would never fit.
    """
    while parts and parts[-1][1] > first:
        prefix, _ = parts.pop()
        if first > (parts[-1][1] if parts else 0):
            parts.append((prefix, first))
