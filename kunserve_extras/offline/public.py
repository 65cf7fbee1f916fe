"""The names of ``import kunserve`` that are of the offline library."""

from kunserve_extras.offline.llm import LLM
from kunserve_extras.offline.outputs import CompletionOutput, Logprob, RequestOutput
from kunserve_extras.offline.sampling_params import SamplingParams, StructuredOutputsParams

__all__ = [
    "LLM",
    "CompletionOutput",
    "Logprob",
    "RequestOutput",
    "SamplingParams",
    "StructuredOutputsParams",
]
