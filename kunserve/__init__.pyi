from kunserve_extras.offline.llm import LLM as LLM
from kunserve_extras.offline.outputs import CompletionOutput as CompletionOutput
from kunserve_extras.offline.outputs import Logprob as Logprob
from kunserve_extras.offline.outputs import RequestOutput as RequestOutput
from kunserve_extras.offline.sampling_params import SamplingParams as SamplingParams
from kunserve_extras.offline.sampling_params import (
    StructuredOutputsParams as StructuredOutputsParams,
)

__version__: str
