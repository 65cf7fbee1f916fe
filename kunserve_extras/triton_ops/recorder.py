"""CUDA graphs by torch."""

from collections.abc import Callable

import torch

from kunserve.core.errors import ConfigError
from kunserve_extras.torch_body.graphs import Graph


class TorchRecorder:
    """Implements ``Recorder`` on one CUDA device.

    All graphs share what memory torch takes while they are recorded, because no two of them run at
    the same time, and none reads what another one left there.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        # The default stream cannot be recorded. Libraries keep memory for each stream, so the work
        # is warmed up in the same one.
        self._stream = torch.cuda.Stream(device)
        self._pool = torch.cuda.graph_pool_handle()

    def warm_up(self, work: Callable[[], None]) -> None:
        """See ``Recorder``."""
        torch.cuda.synchronize(self._device)
        with torch.cuda.stream(self._stream):
            work()
        torch.cuda.synchronize(self._device)

    def record(self, work: Callable[[], None]) -> Graph:
        """See ``Recorder``. Raises ConfigError where something cannot be recorded."""
        graph = torch.cuda.CUDAGraph()
        try:
            # Not torch.cuda.graph(), which collects garbage each time: half a minute for a large
            # model.
            with torch.cuda.stream(self._stream):
                graph.capture_begin(pool=self._pool, capture_error_mode="thread_local")
                try:
                    work()
                finally:
                    graph.capture_end()
        except RuntimeError as error:
            raise ConfigError(
                f"steps cannot be recorded as CUDA graphs: {error}. Start with --enforce-eager"
            ) from error
        recorded: Graph = graph
        return recorded
