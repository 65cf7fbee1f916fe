"""Who is let in: what the driver asks before the controller hears of a request."""

from kunserve.control.cluster.controller import Controller
from kunserve.core.errors import Overloaded, PromptTooLong, Unavailable
from kunserve.core.request import Request


def check_admission(request: Request, controller: Controller, max_model_len: int) -> None:
    """Raise PromptTooLong, Overloaded or Unavailable unless the request may be submitted now."""
    if not controller.can_serve:
        raise Unavailable("no instance is alive; a replacement is starting")
    num_tokens = len(request.prompt_token_ids) + request.sampling.max_tokens
    if num_tokens > max_model_len:
        raise PromptTooLong(
            f"This model's maximum context length is {max_model_len} tokens. "
            f"However, you requested {num_tokens} tokens."
        )
    shed = controller.admit(request)
    if shed is not None:
        raise Overloaded(shed.reason, shed.retry_after_s, shed.limit)
