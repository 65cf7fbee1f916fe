"""Memory for the activations of a CPU decoder's steps."""

import torch

from kunserve.engine.cpu.kernels.library import CBuffers
from kunserve.engine.cpu.kernels.packed import rounded_bytes
from kunserve.model.experts import Experts
from kunserve.model.spec import ModelSpec


def widest(spec: ModelSpec) -> int:
    """Values of a token that are rounded together, where weights are packed."""
    return max(spec.hidden_size, spec.q_size, spec.gated_size)


def routing_bytes(num_tokens: int, experts: Experts) -> int:
    """What the C kernel notes down for a step of so many tokens (``routing_of``)."""
    shared = 0 if experts.shared_size is None else 2
    per_token = experts.num_logits + 4 * experts.per_token + shared
    return 4 * (num_tokens * per_token + 3 * experts.number + 2)


class Scratch:
    """Activations of a step, grown to the largest step so far and reused."""

    def __init__(self, spec: ModelSpec, dtype: torch.dtype, *, has_hidden: bool = False) -> None:
        """``has_hidden``: also the residual stream of a step that begins with its tokens."""
        self._widths = {
            "normed": spec.hidden_size,
            "qkv": spec.qkv_size,
            "mixed": spec.q_size,
            "gated": spec.gated_size,
        }
        if has_hidden:
            self._widths["hidden"] = spec.hidden_size
        self._hidden_at: int | None = None
        self._experts = spec.experts
        self._dtype = dtype
        self._rounded_bytes = 0 if spec.packed is None else rounded_bytes(1, widest(spec))
        self._tensors: dict[str, torch.Tensor] = {}
        self._capacity = 0
        self._buffers = CBuffers()

    def __call__(self, name: str, num_tokens: int) -> torch.Tensor:
        """Activation ``name`` for ``num_tokens`` tokens: [num_tokens, width]."""
        if num_tokens > self._capacity or not self._tensors:
            self.reserve(num_tokens)
        return self._tensors[name][:num_tokens]

    def reserve(self, num_tokens: int) -> None:
        """Take memory for steps of this size, whose pages are there on return."""
        self._capacity = num_tokens
        self._tensors = {
            key: torch.empty(num_tokens, width, dtype=self._dtype).zero_()
            for key, width in self._widths.items()
        }
        rounded = torch.empty(num_tokens, self._rounded_bytes, dtype=torch.uint8)
        self._tensors["rounded"] = rounded.zero_()
        if self._experts is not None:
            routing = torch.empty(routing_bytes(num_tokens, self._experts), dtype=torch.uint8)
            self._tensors["routing"] = routing.zero_()
            self._tensors["sums"] = torch.empty(num_tokens, self._widths["normed"]).zero_()
        for name, tensor in self._tensors.items():
            setattr(self._buffers, name, tensor.data_ptr())
        self._hidden_at = self._buffers.hidden

    @property
    def num_bytes(self) -> int:
        """In use now."""
        return sum(tensor.nbytes for tensor in self._tensors.values())

    def as_c(self, hidden: torch.Tensor) -> CBuffers:
        """The kernels' view, with ``hidden`` as the residual stream, until the next call."""
        self.make_room(hidden.shape[0])
        return self.at(hidden.data_ptr())

    def make_room(self, num_tokens: int) -> None:
        """Have memory for a step of this size."""
        if num_tokens > self._capacity:
            self.reserve(num_tokens)

    def with_own_hidden(self) -> CBuffers:
        """The kernels' view, with the residual stream here too, until the next call."""
        assert "hidden" in self._tensors and self._hidden_at is not None
        return self.at(self._hidden_at)

    def at(self, hidden: int) -> CBuffers:
        """The kernels' view, with the residual stream at this address, until the next call."""
        self._buffers.hidden = hidden
        return self._buffers
