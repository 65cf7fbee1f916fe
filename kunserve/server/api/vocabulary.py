"""Token ids that clients name themselves."""

from collections.abc import Sequence
from typing import Any

from kunserve.core.errors import InvalidRequest
from kunserve.server.api.schema import shown_value


def check_token_ids(token_ids: Sequence[Any], vocab_size: int, param: str) -> list[int]:
    """The ids as they are; raises InvalidRequest for the first that is no token."""
    for token_id in token_ids:
        if type(token_id) is not int:
            raise InvalidRequest(
                f"`{param}`: a token id must be an integer (got {shown_value(token_id)}).", param
            )
        if not 0 <= token_id < vocab_size:
            shown = shown_value(token_id)
            raise InvalidRequest(
                f"`{param}`: token id {shown} is outside the vocabulary of {vocab_size}.", param
            )
    return list(token_ids)
