"""Tensors over memory that torch did not give."""

import torch


def wrap(address: int, num_bytes: int, device: torch.device) -> torch.Tensor:
    """The bytes [num_bytes] at an address, no copy. They need not be mapped yet.

    Touch only what is mapped, and nothing once the memory is closed.
    """
    # Private, and used in the same way by torch's own CUDA graph trees. The public ways ask the
    # driver about the pointer, and fail where its first byte is not mapped.
    storage = torch._C._construct_storage_from_data_pointer(address, device, num_bytes)
    return torch.empty(0, dtype=torch.uint8, device=device).set_(storage)
