"""Settings of the model."""

from dataclasses import dataclass
from functools import partial
from typing import Annotated, Literal

from kunserve.core.config.flag import Flag
from kunserve.core.errors import ConfigError

_model = partial(Flag, "Model")


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """Which model, and how it is loaded."""

    model: str = "smollm2-135m"
    """The built-in model's name, a Hugging Face folder or hub id, or a .gguf file."""
    tokenizer: Annotated[str | None, _model()] = None
    """Folder or hub id of the tokenizer [the model's own]."""
    served_model_name: Annotated[tuple[str, ...], _model(is_many=True)] = ()
    """Names in the API [MODEL]; several if MODEL stands first. Answers and metrics have the first
    one."""
    dtype: Annotated[Literal["bfloat16", "float16", "float32"], _model()] = "bfloat16"
    """Weights and KV; float16 on a GPU only."""
    load_format: Annotated[Literal["auto", "safetensors", "gguf", "dummy"], _model()] = "auto"
    """How weights are read; dummy makes random ones."""
    quantization: Annotated[
        Literal["none", "auto", "gguf", "compressed-tensors", "fp8"], _model()
    ] = "none"
    """How weights lie in memory: none expands quantised ones to --dtype, auto keeps those as they
    are stored that the device computes with; gguf, compressed-tensors and fp8 insist on it."""
    seed: Annotated[int, _model()] = 0
    """For dummy weights, and for requests that bring no seed."""
    generation_config: Annotated[Literal["auto", "vllm"], _model()] = "auto"
    """Defaults of sampling: auto takes the model's generation_config.json, vllm neutral ones."""
    max_model_len: Annotated[int | None, _model(least=1)] = None
    """Longest prompt plus output in tokens [what model and memory allow]."""

    def __post_init__(self) -> None:
        """A name that no client could give is a mistake."""
        if not all(self.served_model_name):
            raise ConfigError("a served model name must not be empty")
