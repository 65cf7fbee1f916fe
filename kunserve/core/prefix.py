"""Names of beginnings: equal names mean equal tokens, so their KV is the same."""

import hashlib
from typing import TypeAlias

from kunserve.core.tokens import TOKEN_BYTES, TokenIds

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
    parent = known[-1] if known else salt_name(salt)
    rest = token_ids[len(known) * block_size :]
    return (*known, *name_blocks(parent, rest, block_size))


def name_blocks(parent: PrefixHash, token_ids: TokenIds, block_size: int) -> list[PrefixHash]:
    """Names of the full blocks of tokens that follow the block, or the salt, named ``parent``."""
    data, size = token_ids.to_bytes(), block_size * TOKEN_BYTES
    names: list[PrefixHash] = []
    for first in range(0, len(data) - size + 1, size):
        parent = _digest(parent + data[first : first + size])
        names.append(parent)
    return names


def salt_name(salt: str) -> PrefixHash:
    """What the first block of every beginning with this salt follows."""
    return _digest(salt.encode(), is_root=True)


def _digest(data: bytes, is_root: bool = False) -> bytes:
    # A salt is never taken for tokens, because the two are hashed in different ways.
    person = b"salt" if is_root else b"block"
    return hashlib.blake2b(data, digest_size=_HASH_BYTES, person=person).digest()
