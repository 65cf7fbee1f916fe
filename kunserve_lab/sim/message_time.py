"""What the tokens in a message add to its latency."""

from kunserve.core.messages import Handover, Message, Submit
from kunserve_lab.sim.profile import InstanceProfile

TOKEN_BYTES = 4.3
"""Of a token's id in a message, on average over a vocabulary of 150,000."""


def tokens_s(message: Message, profile: InstanceProfile) -> float:
    """Wire, encoding and decoding. A message without prompts adds nothing."""
    match message:
        case Handover(sequences=sequences):
            num_tokens = sum(
                len(s.request.prompt_token_ids) + len(s.output_token_ids) for s in sequences
            )
        case Submit(request=request):
            num_tokens = len(request.prompt_token_ids)
        case _:
            return 0.0
    return num_tokens * (TOKEN_BYTES / profile.network_bytes_per_s + profile.codec_token_s)
