from kunserve.offline.llm import LLM as LLM
from kunserve.offline.outputs import CompletionOutput as CompletionOutput
from kunserve.offline.outputs import Logprob as Logprob
from kunserve.offline.outputs import RequestOutput as RequestOutput
from kunserve.offline.sampling_params import SamplingParams as SamplingParams
from kunserve.offline.sampling_params import StructuredOutputsParams as StructuredOutputsParams

__version__: str
