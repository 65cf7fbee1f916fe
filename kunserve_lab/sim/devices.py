"""Accelerators by name: published peaks, and the shares of them that programs reach.

The shares of a100 and h100 are read off published measurements of real kernels (Vidur's
matrix products and collectives, DistServe's fit of vLLM's decode steps); a800 and h800 differ in
their interconnects only, h200 and b200 take h100's shares. ``docs/decisions/simulator.md`` has
the table of what was compared with what.
"""

from dataclasses import dataclass

from kunserve.core.errors import ConfigError

GIGA = 1e9


@dataclass(frozen=True, slots=True)
class Device:
    """One GPU and its share of the wires."""

    name: str
    memory_bytes: int
    peak_flops: float
    """Dense bfloat16."""
    memory_bytes_per_s: float
    matmul_share: float
    """Of the peak, in large matrix products."""
    attention_share: float
    """Of the peak, in the attention of a prompt."""
    weight_read_share: float
    """Of the memory bandwidth, when weights are streamed."""
    kv_read_share: float
    """Of the memory bandwidth, when paged KV is read."""
    peer_bytes_per_s: float
    """Inside a server, one way."""
    network_bytes_per_s: float
    """Between servers, one way, per GPU."""
    host_bytes_per_s: float
    """PCIe, one way."""
    collective_share: float = 0.5
    """Of the peer bandwidth, in an all-reduce of megabytes."""
    collective_latency_s: float = 30e-6
    network_latency_s: float = 30e-6
    """What a collective over several servers adds."""
    network_share: float = 0.7
    """Of the network bandwidth that a bulk transfer reaches."""
    step_overhead_s: float = 4.5e-3
    """Of the host, per step."""
    layer_overhead_s: float = 35e-6
    """Of the small operators and launches, per layer and step."""
    sequence_overhead_s: float = 60e-6
    """Of the host, per sequence and step."""
    gpus_per_server: int = 8


def _device(
    name: str,
    memory_gb: int,
    peak_tflops: float,
    memory_gb_per_s: float,
    shares: tuple[float, float, float, float],
    wires_gb_per_s: tuple[float, float, float],
) -> Device:
    matmul, attention, weights, kv = shares
    peer, network, host = wires_gb_per_s
    return Device(
        name=name,
        memory_bytes=int(memory_gb * GIGA),
        peak_flops=peak_tflops * 1e12,
        memory_bytes_per_s=memory_gb_per_s * GIGA,
        matmul_share=matmul,
        attention_share=attention,
        weight_read_share=weights,
        kv_read_share=kv,
        peer_bytes_per_s=peer * GIGA,
        network_bytes_per_s=network * GIGA,
        host_bytes_per_s=host * GIGA,
    )


_AMPERE = (0.75, 0.50, 0.755, 0.68)
_HOPPER = (0.73, 0.50, 0.85, 0.75)

DEVICES = {
    device.name: device
    for device in (
        _device("a100", 85, 312, 2039, _AMPERE, (300, 25, 25)),
        _device("a800", 85, 312, 2039, _AMPERE, (200, 25, 25)),
        _device("h100", 85, 989, 3350, _HOPPER, (450, 50, 50)),
        _device("h800", 85, 989, 3350, _HOPPER, (300, 50, 50)),
        _device("h200", 151, 989, 4800, _HOPPER, (450, 50, 50)),
        _device("b200", 192, 2250, 7700, _HOPPER, (900, 50, 50)),
    )
}
"""Name -> device. 80 GB cards hold 80 GiB."""


def find_device(name: str) -> Device:
    """The device of that name, in any case."""
    device = DEVICES.get(name.lower())
    if device is None:
        raise ConfigError(f"no device {name!r} to simulate; there are: {', '.join(DEVICES)}")
    return device
