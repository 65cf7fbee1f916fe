"""What a step's device writes into the memory of another stage's, before hosts have heard of it."""

from collections.abc import Callable, Sequence
from typing import Protocol

import torch

from kunserve.core.ids import GroupId, StepId


class FedTokens(Protocol):
    """Tokens that another stage samples, perhaps on their way."""

    tokens: torch.Tensor
    """[n] int64 on the device, behind a wait of its stream."""

    def await_all(self, look_up: Callable[[], None] | None = None) -> bool:
        """As ``HiddenRows.await_all``."""
        ...


class WaysAhead(Protocol):
    """To and from the other stages of a group."""

    def give_ahead(self, hidden: torch.Tensor, to: str) -> memoryview | None:
        """For the links: where the device will write hidden states at the peer ``to``, once it has
        computed them. None where nobody could wait for that.
        """
        ...

    def write_tokens(
        self, parts: Sequence[torch.Tensor], to: str, group_id: GroupId, step_id: StepId
    ) -> memoryview | None:
        """Write what a step samples into the memory of the peer that leads.

        What tells where goes with the tokens. None where they are not written; once some are, all
        later ones of the group are.
        """
        ...

    def tokens_come(self, data: memoryview, group_id: GroupId, step_id: StepId) -> None:
        """What came with the tokens of a step: so this is where those of later ones will be."""
        ...

    def feeds_from(self, group_id: GroupId) -> bool:
        """Whether steps of the group that this instance leads can feed on what others sample."""
        ...

    def read_tokens(self, step_id: StepId, num_tokens: int) -> FedTokens:
        """The first tokens that a step of that group samples."""
        ...

    def stop_waiting(self) -> None:
        """Make steps void that wait for such tokens in vain."""
        ...


class NoWays:
    """All goes through hosts."""

    def give_ahead(self, hidden: torch.Tensor, to: str) -> memoryview | None:
        """See ``WaysAhead``."""
        return None

    def write_tokens(
        self, parts: Sequence[torch.Tensor], to: str, group_id: GroupId, step_id: StepId
    ) -> memoryview | None:
        """See ``WaysAhead``."""
        return None

    def tokens_come(self, data: memoryview, group_id: GroupId, step_id: StepId) -> None:
        """See ``WaysAhead``."""

    def feeds_from(self, group_id: GroupId) -> bool:
        """See ``WaysAhead``."""
        return False

    def read_tokens(self, step_id: StepId, num_tokens: int) -> FedTokens:
        """See ``WaysAhead``."""
        raise AssertionError("tokens come through hosts")

    def stop_waiting(self) -> None:
        """See ``WaysAhead``."""


NO_WAYS = NoWays()
