"""The backend of ``--engine vllm``: host memory of ours, and vLLM's model classes over it."""

import logging
from dataclasses import replace

import torch

from kunserve.core.config import InstanceConfig, ModelConfig
from kunserve.core.errors import UnsupportedModel
from kunserve.engine.backend import CpuBackend, Loader, kv_in
from kunserve.engine.cpu.decoder import StepDecoder, StepLimits
from kunserve.engine.cpu.kernels.library import library
from kunserve.engine.layer_weights import ModelWeights
from kunserve.engine.memory.memory import Memory
from kunserve.engine.weights.readers import DummyReader, Reader, SafetensorsReader, open_reader
from kunserve.model.config import read_spec
from kunserve.model.source import ModelSource
from kunserve.model.spec import ModelSpec, WeightSizes
from kunserve_extras.vllm_body.decoder import VllmDecoder, room_bytes
from kunserve_extras.vllm_body.loader import ParameterLoader, Parameters
from kunserve_extras.vllm_body.refusals import check_model, check_release, installed_version
from kunserve_extras.vllm_body.release import open_model

logger = logging.getLogger(__name__)


class VllmBackend(CpuBackend):
    """One model in one process. A token's hop has as many rows as the model's class says."""

    splits_head = False
    has_panels = False
    rows_are_alike = False

    def __init__(self, config: InstanceConfig) -> None:
        super().__init__()
        self._block_size = config.block_size
        self._parameters: Parameters | None = None

    @property
    def _opened(self) -> Parameters:
        assert self._parameters is not None, "the model's shape comes first"
        return self._parameters

    def shape(self, source: ModelSource, model: ModelConfig) -> ModelSpec:
        """See ``Backend``. vLLM makes the modules; their weights are nowhere yet."""
        found = installed_version()
        check_release(found)
        check_model(source)
        library()
        spec = read_spec(source, model.dtype, computed_elsewhere=True)
        open_reader(source, spec, model.seed)  # of a file that is none vLLM would not say so
        opened = open_model(source.path, model.dtype, self._block_size)
        self._parameters = Parameters(opened)
        self.hop_rows = len(opened.hop_names)
        theirs = len(opened.layers), opened.num_kv_heads, opened.head_size
        if theirs != (spec.num_layers, spec.num_kv_heads, spec.head_dim):
            raise UnsupportedModel(f"{opened.name}: KV of another shape than config.json says")
        promise = "the same tokens alone, in batches and through drops"
        if not opened.is_ours_throughout:
            promise = "numerically equal, but batches and drops may change a token"
        logger.info(
            "engine vllm %s: %s, attention %s, %s: %s",
            found,
            opened.name,
            opened.attention_kernels,
            model.dtype,
            promise,
        )
        layer_bytes, end_bytes = self._parameters.layer_bytes, self._parameters.end_seats.num_bytes
        return replace(spec, sizes=WeightSizes(end_bytes, layer_bytes, 0))

    def settle(self, spec: ModelSpec, config: InstanceConfig, most: StepLimits) -> InstanceConfig:
        """See ``Backend``."""
        return config

    def buffer_bytes(self, spec: ModelSpec, limits: StepLimits) -> int:
        """See ``Backend``. Gate and up lie apart from their product, and a hop is wider."""
        rows = (self.hop_rows + 1) * spec.hidden_size + 2 * spec.gated_size
        passing = limits.num_tokens * rows * spec.dtype_bytes
        return limits.buffer_bytes(spec) + passing + 3 * room_bytes(spec)

    def weights(self, memory: Memory, spec: ModelSpec) -> ModelWeights:
        """See ``Backend``. None of ours: the modules have theirs."""
        none = torch.empty(0)
        return ModelWeights(none, [], none, none)

    def loader(
        self, reader: Reader, spec: ModelSpec, memory: Memory, weights: ModelWeights
    ) -> Loader:
        """See ``Backend``."""
        assert isinstance(reader, SafetensorsReader | DummyReader), reader
        return ParameterLoader(self._opened, reader, memory.shards[0])

    def decoder(
        self, spec: ModelSpec, weights: ModelWeights, memory: Memory, config: InstanceConfig
    ) -> StepDecoder:
        """See ``Backend``."""
        kv = kv_in(memory.shards[0], self.device)
        model = self._opened.model
        return VllmDecoder(spec, model, kv, config.block_size, config.num_threads)
