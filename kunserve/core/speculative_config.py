"""Settings of speculative decoding."""

from dataclasses import dataclass

from kunserve.core.errors import ConfigError


@dataclass(frozen=True, slots=True)
class SpeculativeConfig:
    """Speculative decoding by prompt lookup, with vLLM's names."""

    method: str = "ngram"
    num_speculative_tokens: int = 4
    """Guesses of one request that a step checks, at most."""
    prompt_lookup_min: int = 2
    """A guess is what followed so many equal tokens at least."""
    prompt_lookup_max: int = 4
    """More equal tokens than this make no better guess."""

    def __post_init__(self) -> None:
        """Numbers that mean nothing are a mistake."""
        if self.method != "ngram":
            raise ConfigError(
                f'the method of speculation must be "ngram" (prompt lookup), not {self.method!r}; '
                "no draft models are loaded"
            )
        if self.num_speculative_tokens < 1:
            raise ConfigError(
                f"num_speculative_tokens must be at least 1, not {self.num_speculative_tokens}"
            )
        if not 1 <= self.prompt_lookup_min <= self.prompt_lookup_max:
            raise ConfigError(
                "prompt_lookup_min must be at least 1 and at most prompt_lookup_max, not "
                f"{self.prompt_lookup_min} of {self.prompt_lookup_max}"
            )
