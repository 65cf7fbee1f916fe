"""The exception tree: a caller's mistakes only.

    KunServeError
    +-- InvalidRequest        400  a request's body or parameters
    |   +-- PromptTooLong     400
    +-- ModelNotFound         404  the request names a model we do not serve
    +-- Overloaded            503  queue limits reached; carries Retry-After
    +-- Unavailable           503  draining, or no instance is alive
    +-- ConfigError           CLI  a setting that cannot work
        +-- UnsupportedModel  CLI  the architecture is not implemented
        +-- ModelFiles        CLI  a model folder that is missing, truncated or malformed
        +-- TooLittleMemory   CLI  the model does not fit the instance's memory

A *bug* is an ``assert``; a *shortage* of KV memory is a returned value. Neither is here.
"""

from dataclasses import dataclass


class KunServeError(Exception):
    """Root of every error that is the caller's to mend."""


class InvalidRequest(KunServeError, ValueError):
    """A request that cannot be served as written. ``param`` names the field at fault.

    A ValueError too, because callers in Python expect one, as vLLM's do.
    """

    def __init__(self, message: str, param: str | None = None) -> None:
        super().__init__(message)
        self.param = param


class PromptTooLong(InvalidRequest):
    """The prompt (plus what it asks to generate) exceeds what any instance can hold."""


class ModelNotFound(KunServeError):
    """The request names a model that is not served here."""


MAX_QUEUED_REQS, MAX_QUEUED_TOKENS = "max_num_queued_reqs", "max_num_queued_tokens"
MAX_WAITING_TEXT = "max_waiting_text"
MAX_WAITING_FORMS = "max_waiting_forms"
LIMITS = (MAX_QUEUED_REQS, MAX_QUEUED_TOKENS, MAX_WAITING_TEXT, MAX_WAITING_FORMS)
"""What may be full: names for metrics, the first two are those of vLLM."""


class Overloaded(KunServeError):
    """Queue limits are reached. The client may retry after ``retry_after_s`` seconds."""

    def __init__(self, message: str, retry_after_s: int = 1, limit: str = MAX_QUEUED_REQS) -> None:
        """``limit`` is one of ``LIMITS``."""
        super().__init__(message)
        self.retry_after_s = retry_after_s
        self.limit = limit


class Unavailable(KunServeError):
    """The server is draining, or no instance is alive."""


class ConfigError(KunServeError):
    """A setting, or a combination of settings, that cannot work."""


class UnsupportedModel(ConfigError):
    """The model's architecture, or a feature it needs, is not implemented."""


class ModelFiles(ConfigError):
    """A model folder or file that is missing, truncated or malformed."""


class TooLittleMemory(ConfigError):
    """The model and one request do not fit the memory that an instance was given."""


_BY_NAME: dict[str, type[ConfigError]] = {
    kind.__name__: kind for kind in (ConfigError, ModelFiles, TooLittleMemory, UnsupportedModel)
}


@dataclass(frozen=True, slots=True)
class StartupFailure:
    """What a process that cannot start tells whoever has started it."""

    error: str
    message: str

    @classmethod
    def of(cls, error: KunServeError) -> "StartupFailure":
        """What is to be told of it."""
        return cls(type(error).__name__, str(error))

    def to_error(self) -> ConfigError:
        """The error as it is raised there."""
        return _BY_NAME.get(self.error, ConfigError)(self.message)
