"""KV events in the format of vLLM's ZMQ publisher, so that prefix-aware routers see our cache.

A message has three frames: the topic, the number of the batch (8 bytes, big-endian), and a msgpack
array of the time, the events and the publisher's rank. Nothing waits for who reads too slowly:
ZeroMQ drops batches of theirs, and the numbers tell that some are missing.
"""

import time
from typing import Any

import msgspec
import zmq

from kunserve.control.group.cache_journal import CacheEvent, Removed, Stored
from kunserve.core.errors import ConfigError
from kunserve.core.prefix import PrefixHash

MAX_UNSENT = 10_000
"""Batches that are kept for one reader."""
MEDIUM = "GPU"
"""Where KV lies, in the words that routers know: memory that is computed on."""


class BlockStored(msgspec.Struct, omit_defaults=True, tag=True):
    """Blocks can be found."""

    block_hashes: list[int]
    parent_block_hash: int | None
    token_ids: tuple[int, ...]
    block_size: int
    lora_id: int | None
    medium: str | None
    lora_name: str | None


class BlockRemoved(msgspec.Struct, omit_defaults=True, tag=True):
    """Blocks can be found no more."""

    block_hashes: list[int]
    medium: str | None


class AllBlocksCleared(msgspec.Struct, omit_defaults=True, tag=True):
    """None can be found."""


class EventBatch(msgspec.Struct, array_like=True, omit_defaults=True):
    """What is sent at once."""

    ts: float
    events: list[Any]
    data_parallel_rank: int | None = None


class KvEvents:
    """One instance's publisher: at the endpoint's port, plus the instance's number."""

    def __init__(self, endpoint: str, rank: int, block_size: int) -> None:
        """Raises ConfigError for an endpoint that cannot be bound."""
        self._rank = rank
        self._block_size = block_size
        self._number = 0
        self._encode = msgspec.msgpack.Encoder().encode
        host, colon, port = endpoint.rpartition(":")
        if not (endpoint.startswith("tcp://") and colon and port.isdecimal()):
            raise ConfigError(f"--kv-events-endpoint {endpoint}: it is like tcp://*:5557")
        self.address = f"{host}:{int(port) + rank if int(port) else 0}"
        self._context = zmq.Context()
        self._socket = self._context.socket(zmq.PUB)
        self._socket.set_hwm(MAX_UNSENT)
        self._socket.linger = 0
        try:
            self._socket.bind(self.address)
        except zmq.ZMQError as error:
            self.close()
            raise ConfigError(f"--kv-events-endpoint {self.address}: {error}") from None
        self.address = self._socket.getsockopt_string(zmq.LAST_ENDPOINT)

    def publish(self, events: list[CacheEvent]) -> None:
        """Tell whoever listens. Never waits."""
        if not events:
            return
        batch = EventBatch(time.time(), list(map(self._told, events)), self._rank)
        number = self._number.to_bytes(8, "big")
        self._number += 1
        self._socket.send_multipart([b"", number, self._encode(batch)], zmq.NOBLOCK)

    def close(self) -> None:
        """Nothing is told any more."""
        self._socket.close()
        self._context.term()

    def _told(self, event: CacheEvent) -> BlockStored | BlockRemoved | AllBlocksCleared:
        match event:
            case Stored():
                parent = None if event.parent is None else _number_of(event.parent)
                hashes, tokens = [_number_of(event.name)], event.token_ids
                return BlockStored(hashes, parent, tokens, self._block_size, None, MEDIUM, None)
            case Removed():
                return BlockRemoved(list(map(_number_of, event.names)), MEDIUM)
        return AllBlocksCleared()


def _number_of(name: PrefixHash) -> int:
    """As vLLM tells them unless it is told otherwise: 64 bits."""
    return int.from_bytes(name[:8], "big")
