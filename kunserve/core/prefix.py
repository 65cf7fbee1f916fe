"""Names of beginnings: equal names mean equal tokens, so their KV is the same."""

import hashlib
from typing import TypeAlias

from kunserve.core.tokens import TokenIds

PrefixHash: TypeAlias = bytes
"""16 bytes that name all tokens up to the end of a block, and the salt."""
_HASH_BYTES = 16


def prefix_hashes(
    token_ids: TokenIds, block_size: int, salt: str = "", known: tuple[PrefixHash, ...] = ()
) -> tuple[PrefixHash, ...]:
    """One name for each full block of ``token_ids``, in order.

    ``known`` are the names of the first blocks, which are not computed again. Two names are equal
    only if all tokens before, and the salts, are equal: a chain of BLAKE2b.
    """
    parent = known[-1] if known else _digest(salt.encode(), is_root=True)
    names = list(known)
    for first in range(len(known) * block_size, len(token_ids) - block_size + 1, block_size):
        parent = _digest(parent + token_ids[first : first + block_size].to_bytes())
        names.append(parent)
    return tuple(names)


def _digest(data: bytes, is_root: bool = False) -> bytes:
    # A salt is never taken for tokens, because the two are hashed in different ways.
    person = b"salt" if is_root else b"block"
    return hashlib.blake2b(data, digest_size=_HASH_BYTES, person=person).digest()
