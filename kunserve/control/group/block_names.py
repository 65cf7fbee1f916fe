"""The names of a sequence's full blocks, as far as a prefix cache asks for them."""

from kunserve.control.group.sequence import Sequence
from kunserve.core.prefix import PrefixHash, name_blocks, salt_name
from kunserve.core.tokens import TokenIds


def most_blocks(seq: Sequence, block_size: int) -> int:
    """Blocks that a sequence may begin with though it did not compute them."""
    most = seq.num_tokens - 1
    if seq.num_scored < seq.num_to_score:
        most = min(most, seq.num_scored)
    return most // block_size


def names_of(seq: Sequence, num_blocks: int, block_size: int) -> list[PrefixHash]:
    """At least the names of the sequence's first ``num_blocks``. Each is made once."""
    names = seq.beginning.names
    if len(names) < num_blocks:
        parent = names[-1] if names else salt_name(seq.request.cache_salt)
        first, end = len(names) * block_size, num_blocks * block_size
        if end <= seq.num_prompt:
            tokens = TokenIds(seq.request.prompt_token_ids[first:end])
        else:
            tokens = TokenIds(seq.known_tokens(first, end))
        names += name_blocks(parent, tokens, block_size)
    return names
