"""Values of flags that are lists with commas between."""

from kunserve.core.errors import ConfigError


def names(text: str) -> tuple[str, ...]:
    """``recompute,drop`` to names."""
    return tuple(name.strip() for name in text.split(",") if name.strip())


def numbers(flag: str, text: str) -> tuple[float, ...]:
    """``0.5,1`` to numbers."""
    try:
        return tuple(float(part) for part in text.split(","))
    except ValueError:
        raise ConfigError(f"{flag} takes numbers with commas between, not {text!r}") from None


def whole_numbers(flag: str, text: str) -> tuple[int, ...]:
    """``0,1`` to whole numbers."""
    try:
        return tuple(int(part) for part in text.split(","))
    except ValueError:
        raise ConfigError(f"{flag} takes whole numbers with commas between, not {text!r}") from None
