"""Flags of vLLM that ``kunserve serve`` does not have, and values of those that it has: refused by
name, with what to do instead.
"""

from collections.abc import Sequence

import click

_ONE_MODEL = "KunServe serves the model as it is"
_NOT_THERE = "KunServe does not do this"
_NO_CODE = "packages bring parsers by entry points of the group kunserve.tool_parsers"

FLAGS = {
    "--model": "give the model as the first argument: kunserve serve MODEL",
    "-tp": "use --tensor-parallel-size",
    "-pp": "use --pipeline-parallel-size",
    "--data-parallel-size": "use --num-instances",
    "-dp": "use --num-instances",
    "--num-gpu-blocks-override": "use --kv-cache-memory-bytes",
    "--kv-events-config": "use --kv-events-endpoint",
    "--swap-space": "use --overload-policy swap",
    "--cpu-offload-gb": _NOT_THERE,
    "--compilation-config": "see --enforce-eager",
    "--distributed-executor-backend": "see --cluster",
    "--data-parallel-backend": "see --cluster",
    "--data-parallel-address": "see --ray-address",
    "--enable-chunked-prefill": "prompts are always cut into chunks, so leave the flag out",
    "--no-enable-chunked-prefill": "prompts are always cut into chunks",
    "--kv-cache-dtype": "KV has the type of the weights; see --dtype",
    "-q": "use --quantization",
    "--revision": "give the folder of the revision instead of the hub id",
    "--trust-remote-code": "no code of a model's repository is ever run",
    "--tokenizer-mode": "only fast tokenizers are used",
    "--hf-overrides": _ONE_MODEL,
    "--rope-scaling": _ONE_MODEL,
    "--enable-lora": _NOT_THERE,
    "--lora-modules": _NOT_THERE,
    "--tool-parser-plugin": _NO_CODE,
    "--tool-server": _NOT_THERE,
    "--reasoning-parser-plugin": _NO_CODE,
    "--chat-template-content-format": "contents of messages are always given as text",
    "--trust-request-chat-template": "give the template to the server: --chat-template",
    "--guided-decoding-backend": "llguidance is the only one, so leave the flag out",
    "--structured-outputs-config": "llguidance is the only backend, so leave the flag out",
    "--disable-log-requests": "requests are not logged by default, so leave the flag out",
    "--disable-log-stats": "statistics are logged only while there is work, so leave the flag out",
}

_NOT_QUANTISED = "KunServe reads GGUF, fp8, and int8, e4m3 and int4 by compressed-tensors"
VALUES: dict[str, dict[str, str]] = {
    "dtype": {
        "auto": "whatever the files hold, weights become bfloat16; leave the flag out",
        "half": "write float16",
        "float": "write float32",
    },
    "quantization": dict.fromkeys(
        ("awq", "gptq", "bitsandbytes", "awq_marlin", "gptq_marlin"), _NOT_QUANTISED
    ),
    "tool_call_parser": {
        "qwen2_5": "Qwen2.5 writes calls as Hermes does; write hermes",
        "qwen3": "Qwen3 writes calls as Hermes does; write hermes (Qwen3-Coder: qwen3_coder)",
        "qwen": "Qwen2.5 and Qwen3 write calls as Hermes does; write hermes",
        "llama3": "write llama3_json, or pythonic",
        "openai": "gpt-oss is not a model that KunServe serves",
    },
}
"""By the field of the configuration."""


def refuse_foreign(args: Sequence[str]) -> None:
    """Raise a usage error for the first flag of ``FLAGS``; what follows ``--`` is no flag."""
    for arg in args:
        if arg == "--":
            return
        flag = arg.partition("=")[0].replace("_", "-") if arg.startswith("-") else arg
        if flag in FLAGS:
            raise click.UsageError(f"{flag} is not supported: {FLAGS[flag]}.")
