"""What a client is told of a body at fault."""

import pytest
from pydantic import ValidationError

from kunserve.core.errors import InvalidRequest
from kunserve.server.api.schema import ChatBody, invalid_field


def fault_of(messages: str) -> InvalidRequest:
    with pytest.raises(ValidationError) as caught:
        ChatBody.model_validate_json(f'{{"messages": [{messages}]}}')
    return invalid_field(caught.value)


def test_the_first_field_at_fault_is_named() -> None:
    fault = fault_of("{}, 1, 2")
    assert "`messages.1`" in str(fault)
    assert fault.param == "messages"


def test_a_body_of_nothing_but_faults_holds_up_nobody() -> None:
    """To list a quarter million of them takes a second, in the loop that serves everybody."""
    fault = fault_of(",".join("1" * 5000))
    assert "5000 values" in str(fault)
