"""Tokens that the last stage samples, written into the first one's memory for its next steps.

No ticket is awaited. Once the last stage has begun to write a group's tokens it writes those of
each step that samples, and the steps are numbered: so the first stage knows where they will be. And
nobody tells when a slot may be written again. A step that feeds on another one is so many steps
behind it as there are stages, which is less than there are slots; and a slot's next tokens are of a
later step, which the first stage has computed after that one.
"""

from collections.abc import Callable
from typing import NamedTuple

import torch

from kunserve.core.ids import GroupId
from kunserve_extras.torch_body.hops.lanes import Lane
from kunserve_extras.torch_body.hops.reads import Read, Reads


class TokenSource(NamedTuple):
    """Where a group's tokens are written, as the last stage has told behind some of them."""

    group_id: GroupId
    lane: Lane
    first_number: int
    """Of step 0, if that had been written."""


class TokensToCome:
    """See ``FedTokens``."""

    def __init__(self, reads: Reads, read: Read, tokens: torch.Tensor) -> None:
        self.tokens = tokens
        self._reads, self._read = reads, read

    def await_all(self, look_up: Callable[[], None] | None = None) -> bool:
        """See ``FedTokens``."""
        return self._reads.await_one(self._read, look_up)
