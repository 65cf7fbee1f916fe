"""vLLM's model classes as the body of an instance: `kunserve serve MODEL --engine vllm`.

Our memory, block tables, stages and scheduler; theirs are the layers and attention over the cache.
What of vLLM may change between releases is in ``release.py`` alone.
"""

import logging
import os

# It is read when vLLM is imported, which would write its log where an instance says last words.
os.environ["VLLM_CONFIGURE_LOGGING"] = "0"
logging.getLogger("vllm").setLevel(logging.ERROR)  # it warns of what is meant here
# A context that threads share is summed in an order that depends on who else is in the step.
os.environ["VLLM_CPU_ATTN_SPLIT_KV"] = "0"
