"""A batch is the same on the device whichever way it goes there."""

from dataclasses import fields

import pytest
import torch

from kunserve_extras.torch_body.ops.table import DeviceBatch
from kunserve_extras.torch_body.pinned import Sender
from tests.unit.engine.gpu_kernels.interpreted_kernels import mixed_batch

CPU = torch.device("cpu")


def test_a_batch_that_is_sent_is_the_one_that_is_copied(monkeypatch: pytest.MonkeyPatch) -> None:
    """More of them than the sender has buffers, and nothing from memory that makes copies wait."""
    sender = Sender(CPU)
    sizes = [4, 16] * 6
    hosts = [mixed_batch(block_size, num_layers=3) for block_size in sizes]
    for number, host in enumerate(hosts):
        host.tables[1] += number
    copied = [DeviceBatch.of(host, size, CPU) for host, size in zip(hosts, sizes, strict=True)]
    monkeypatch.setattr(torch, "from_numpy", None)
    sent = [
        DeviceBatch.of(host, size, CPU, sender) for host, size in zip(hosts, sizes, strict=True)
    ]
    for one, other in zip(copied, sent, strict=True):
        for field in fields(DeviceBatch):
            value, expected = getattr(other, field.name), getattr(one, field.name)
            if isinstance(expected, torch.Tensor):
                assert value.dtype == torch.int32 and value.equal(expected), field.name
