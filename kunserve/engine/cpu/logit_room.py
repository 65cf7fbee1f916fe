"""Memory for the logits of a CPU decoder's steps."""

import torch


class LogitRoom:
    """Float32 rows of the vocabulary's width, grown to the largest step so far and reused.

    And beside each so many more numbers, for what an output head works on. Views are kept, because
    slicing costs more than a look here.
    """

    def __init__(self, width: int, beside: int = 0) -> None:
        self._width = width
        self._reserved_width = width + beside
        self._logits = torch.empty(0, self._reserved_width)
        self._views: dict[tuple[int, int], torch.Tensor] = {}
        """Of the memory's start, by their shape."""
        self._address = self._logits.data_ptr()

    @property
    def num_bytes(self) -> int:
        """In use now."""
        return self._logits.nbytes

    @property
    def address(self) -> int:
        """Where the first row lies, as kept: behind a step to ask torch is slow."""
        return self._address

    def reserve(self, num_rows: int) -> None:
        """Take memory for so many rows, whose pages are there on return."""
        self._take(torch.empty(num_rows, self._reserved_width).zero_())

    def rows(self, num_rows: int) -> torch.Tensor:
        """[num_rows, width], until the next call."""
        return self.part(num_rows, self._width)

    def part(self, num_rows: int, width: int) -> torch.Tensor:
        """[num_rows, width] of another width, in the same memory."""
        view = self._views.get((num_rows, width))
        if view is not None:
            return view
        if num_rows * width > self._logits.numel():
            self._take(torch.empty(num_rows, max(width, self._reserved_width)))
        view = self._logits.view(-1)[: num_rows * width].view(num_rows, width)
        self._views[num_rows, width] = view
        return view

    def _take(self, logits: torch.Tensor) -> None:
        self._logits = logits
        self._address = logits.data_ptr()
        self._views.clear()
