"""Flags of the model."""

import click

from kunserve.core.config import ModelConfig
from kunserve.server.start.flags.option import HintedChoice, all_of, flags_of

_DTYPES = HintedChoice(
    ["bfloat16", "float16", "float32"],
    {
        "auto": "whatever the files hold, weights become bfloat16; leave the flag out",
        "half": "write float16",
        "float": "write float32",
    },
)
_NOT_HERE = "KunServe reads GGUF, and int8 per channel by compressed-tensors"
_QUANTIZATIONS = HintedChoice(
    ["none", "auto", "gguf", "compressed-tensors"],
    dict.fromkeys(("awq", "gptq", "fp8", "bitsandbytes", "awq_marlin", "gptq_marlin"), _NOT_HERE),
)
_model = flags_of("Model", ModelConfig())

MODEL_FLAGS = all_of(
    _model("--tokenizer", help="Folder or hub id of the tokenizer [the model's own]."),
    _model(
        "--served-model-name",
        many=True,
        help="Names in the API [MODEL]; several if MODEL stands first. Answers and metrics have "
        "the first one.",
    ),
    _model("--dtype", type=_DTYPES, help="Weights and KV; float16 on a GPU only."),
    _model(
        "--load-format",
        type=click.Choice(["auto", "safetensors", "gguf", "dummy"]),
        help="How weights are read; dummy makes random ones.",
    ),
    _model(
        "--quantization",
        type=_QUANTIZATIONS,
        help="How weights lie in memory: none expands quantised ones to --dtype, auto keeps them "
        "as they are stored (on CPUs); gguf and compressed-tensors insist on being kept.",
    ),
    _model("--seed", type=int, help="For dummy weights, and for requests that bring no seed."),
    _model(
        "--generation-config",
        type=click.Choice(["auto", "vllm"]),
        help="Defaults of sampling: auto takes the model's generation_config.json, vllm neutral "
        "ones.",
    ),
    _model(
        "--max-model-len",
        type=click.IntRange(min=1),
        help="Longest prompt plus output in tokens [what model and memory allow].",
    ),
)
