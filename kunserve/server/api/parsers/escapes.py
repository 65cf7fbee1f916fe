r"""Escapes of JSON that is passed on as a model writes it: ``\ud83d\ude00`` is one character.

Half of such a pair is none. Many readers of JSON refuse it, ours too, so a client could not send
the answer back as a part of its conversation.
"""

import re

_HEX, _HIGH, _LOW = "[0-9a-fA-F]", "[dD][89abAB]", "[dD][c-fC-F]"
_ESCAPE = re.compile(
    rf"(?P<begun>\\(?:u(?:[dD](?:[c-fC-F]{_HEX}?|[89abAB](?:{_HEX}(?:{_HEX}"
    rf"(?:\\(?:u(?:[dD](?:[c-fC-F]{_HEX}?)?)?)?)?)?)?)?)?)?\Z)"
    rf"|\\u{_HIGH}{_HEX}{{2}}\\u{_LOW}{_HEX}{{2}}"
    rf"|(?P<half>\\u[dD][89a-fA-F]{_HEX}{{2}})"
    r"|\\.",
    re.DOTALL,
)
_UNKNOWN = "\\ufffd"
"""The character that stands for what is none. As long as what it replaces."""


class WholePairs:
    """Passes JSON on, with U+FFFD for halves of pairs. Holds an escape until it knows its end."""

    __slots__ = ("_held",)

    def __init__(self) -> None:
        self._held = ""

    def write(self, text: str) -> str:
        """More of it; what can be passed on."""
        if not self._held and "\\" not in text:
            return text
        text, self._held = self._held + text, ""
        return _ESCAPE.sub(self._read, text)

    def _read(self, escape: re.Match[str]) -> str:
        if escape["begun"] is not None:
            self._held = escape[0]
            return ""
        return _UNKNOWN if escape["half"] is not None else escape[0]

    def finish(self) -> str:
        """The text is over, or breaks off here: what was held."""
        held, self._held = self._held, ""
        # Nothing else is held that is so long.
        return _UNKNOWN + held[len(_UNKNOWN) :] if len(held) >= len(_UNKNOWN) else held
