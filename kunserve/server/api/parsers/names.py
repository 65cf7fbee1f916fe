"""The parsers by their names, which are vLLM's."""

from kunserve.server.api.parsers.llama3 import LLAMA3_JSON
from kunserve.server.api.parsers.mistral import MISTRAL
from kunserve.server.api.parsers.pythonic import LLAMA4_PYTHONIC, PYTHONIC
from kunserve.server.api.parsers.qwen3_coder import QWEN3_CODER
from kunserve.server.api.parsers.reasoning import R1, THINK, ReasoningParser
from kunserve.server.api.parsers.tagged import GRANITE, HERMES, JAMBA, PHI4_MINI
from kunserve.server.api.parsers.tool_parser import ToolParser
from kunserve.server.api.parsers.xlam import XLAM

TOOL_PARSERS: dict[str, ToolParser] = {
    "granite": GRANITE,
    "granite4": HERMES,
    "hermes": HERMES,
    "jamba": JAMBA,
    "llama3_json": LLAMA3_JSON,
    "llama4_json": LLAMA3_JSON,
    "llama4_pythonic": LLAMA4_PYTHONIC,
    "mistral": MISTRAL,
    "phi4_mini_json": PHI4_MINI,
    "pythonic": PYTHONIC,
    "qwen3_coder": QWEN3_CODER,
    "qwen3_xml": QWEN3_CODER,
    "xlam": XLAM,
}
REASONING_PARSERS: dict[str, ReasoningParser] = {
    "deepseek_r1": R1,
    "qwen3": THINK,
}
