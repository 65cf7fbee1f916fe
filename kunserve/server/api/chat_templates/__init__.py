"""Chat templates that are shipped, for models whose own does not know tools."""

from pathlib import Path

from kunserve.core.errors import ConfigError

_FOLDER = Path(__file__).parent


def shipped_templates() -> list[str]:
    """Their names."""
    return sorted(path.stem for path in _FOLDER.glob("*.jinja"))


def read_chat_template(name: str) -> str:
    """The template of ``--chat-template``: a file, or a shipped one by its name.

    Raises ConfigError where there is none.
    """
    path = Path(name).expanduser()
    if name in shipped_templates():
        path = _FOLDER / f"{name}.jinja"
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or error
        raise ConfigError(
            f"--chat-template {name}: {reason}; give a file, or one of "
            f"{', '.join(shipped_templates())}"
        ) from None
