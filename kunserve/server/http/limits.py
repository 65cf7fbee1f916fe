"""What one client may cost the front. Sizes and times a user has no reason to set."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class FrontLimits:
    """Bounds that keep one client's mistake from becoming everyone's problem."""

    max_body_bytes: int = 16 << 20
    """A larger request body is answered 413."""
    max_discarded_bytes: int = 64 << 20
    """How much of a too large body is read (and thrown away) so that the client hears the 413."""
    body_timeout_s: float = 60.0
    """A body must have arrived within this."""
    header_timeout_s: float = 20.0
    """A connection must send a request's headers within this."""
    max_header_bytes: int = 64 << 10
    write_timeout_s: float = 30.0
    """A client that accepts no data for this long is dropped and its requests aborted."""
    overflow_timeout_s: float = 1.0
    """How long a connection beyond the limit may stay silent before it is told 503."""
    max_choices: int = 128
    """Largest ``n``."""
    max_requests_per_call: int = 1024
    """Prompts times ``n`` in one HTTP request."""
    max_entries: int = 1 << 18
    """Tokens in ``logit_bias``, and in ``bad_words``, over all completions of one call; plain
    lists of tokens may be longer."""
    inline_chars: int = 2000
    """A request with more text is tokenised in a thread, so that nobody else waits for it."""
    max_waiting_chars: int = 32 << 20
    """Text that may wait to be tokenised, over all requests; more is answered 503."""
    max_body_values: int = 1 << 18
    """Values (counted by commas) in one body, because parsing holds up everybody else.

    A model whose context is longer may be given two values per token of it.
    """
    max_unfinished_bytes: int = 256 << 20
    """Bodies that have not arrived completely, over all connections; more is answered 503."""
    max_prompt_logprobs: int = 1 << 21
    """Log-probabilities of prompts in one call: the front keeps four bytes of each, and writes
    about 60."""
    small_body_bytes: int = 64 << 10
    """The first bytes of each body that do not count there: small requests always get in."""
