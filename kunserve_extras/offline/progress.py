"""A bar for a batch, in the caller's thread."""

import sys
import time
from collections.abc import Callable
from typing import Any, TypeAlias

import tqdm.auto

from kunserve_extras.offline.session import Progress

Bar: TypeAlias = bool | Callable[..., Any] | None
"""Whether there shall be a bar; None: on a terminal. Or what makes one, as ``tqdm.tqdm`` does."""


class ProgressBar:
    """Counts prompts, and tells how many tokens a second they are."""

    def __init__(self, num_prompts: int, wanted: Bar) -> None:
        self._began_s = time.monotonic()
        self._num_prompt_tokens = self._num_output_tokens = 0
        self._bar: Any = None
        if wanted is None:
            wanted = sys.stderr.isatty()
        if wanted:
            make = wanted if callable(wanted) else tqdm.auto.tqdm
            self._bar = make(total=num_prompts, desc="Processed prompts", dynamic_ncols=True)

    def hear(self, news: Progress) -> None:
        """One more prompt is done."""
        self._num_prompt_tokens += news.num_prompt_tokens
        self._num_output_tokens += news.num_output_tokens
        if self._bar is not None:
            seconds = max(1e-9, time.monotonic() - self._began_s)
            self._bar.set_postfix_str(
                f"input {self._num_prompt_tokens / seconds:.1f} tokens/s, "
                f"output {self._num_output_tokens / seconds:.1f} tokens/s",
                refresh=False,
            )
            self._bar.update(1)

    def __enter__(self) -> "ProgressBar":
        return self

    def __exit__(self, *_: object) -> None:
        if self._bar is not None:
            self._bar.close()
