"""Triton's interpreter for tests: the language is patched once, not for each call of a function.

For a third of its time it looked through all names of the language, behind which nothing was left
to do, and took back behind each kernel what the next one needs. Nothing else runs in its process.
"""

from collections.abc import Callable
from functools import cache
from typing import Any

from triton.runtime import interpreter

_patch_lang, _patch_tensor = interpreter._patch_lang, interpreter._patch_lang_tensor


class _Kept:
    """What has been patched stays so."""

    def restore(self) -> None:
        """Nothing is."""


@cache
def _patch_once(function: Callable[..., Any]) -> _Kept:
    _patch_lang(function)
    return _Kept()


def _patch_for_numpy(tensor: Any, scope: Any) -> None:
    """Bounds of a loop are arrays of one element, which NumPy 2.4 makes no integers of."""
    _patch_tensor(tensor, scope)
    tensor.__index__ = lambda self: int(self.handle.data.item())


def patch() -> None:
    """Before the first kernel, in a process that ``TRITON_INTERPRET`` has been given to."""
    interpreter._patch_lang, interpreter._patch_lang_tensor = _patch_once, _patch_for_numpy
