"""How much of a model's KV lies outside the windows of its layers, at lengths of real traffic.

    python -m benchmarks.local_kv

Arithmetic over data sets: every request's KV is counted at each token of its answer, because that
is how long it lies in memory. A layer with a window needs the tokens of its window only. Figures:

* ``outside``: KV that no step will read again, of all KV;
* ``room``: how many times the requests would fit if blocks were freed as they leave the window;
* ``ring``: how many times they fit with ``--no-disable-hybrid-kv-cache-manager``.

And what is served: requests of one length are sent to an instance of Gemma 3 1B's layers, windows
and blocks (narrow ones, with dummy weights), all at once. Figures:

* ``counted``: the most that run at one time, whole and with a ring, in the same memory;
* ``computed``: what arithmetic says.
"""

import asyncio
import json
import tempfile
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

from benchmarks.report import Report, Setting
from kunserve.cluster.driver.local import LocalCluster
from kunserve.core.config import (
    ClusterConfig,
    InstanceConfig,
    KunServeConfig,
    ModelConfig,
    OverloadConfig,
    SchedulerConfig,
)
from kunserve.core.ids import RequestId
from kunserve.core.kv_blocks import KvBlocks, ring_of
from kunserve.core.messages import TokenOutput
from kunserve.core.plan import Measured, Plan
from kunserve.core.request import Request, SamplingParams
from kunserve.core.tokens import TokenIds
from kunserve_lab.workload.data.catalog import SHIPPED_FOLDER
from kunserve_lab.workload.traces import read_azure, read_lengths
from kunserve_lab.workload.workload import Lengths

BLOCK_TOKENS = 16
STEP_TOKENS = 512
"""The default of ``--max-num-batched-tokens``."""
SERVED = {
    "architectures": ["Gemma3ForCausalLM"],
    "model_type": "gemma3_text",
    "num_hidden_layers": 26,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 32,
    "vocab_size": 512,
    "max_position_embeddings": 32_768,
    "sliding_window": 512,
    "eos_token_id": 1,
}
"""Gemma 3 1B but for the widths."""
NUM_WHOLE = 4
"""Requests for which there is memory where KV is whole."""
ANSWER_TOKENS = 512
"""So many that the first has not ended when memory is full."""


@dataclass(frozen=True, slots=True)
class Shape:
    """A public model, as far as its KV goes."""

    name: str
    num_layers: int
    num_global: int
    window: int

    @property
    def period(self) -> int:
        """Layers of which the last sees all tokens."""
        return self.num_layers // self.num_global


SHAPES = (
    Shape("gemma-2-9b", 42, 21, 4096),
    Shape("gemma-3-1b", 26, 4, 512),
    Shape("gemma-3-4b", 34, 5, 1024),
    Shape("gemma-3-27b", 62, 10, 1024),
)


def data_sets() -> dict[str, Lengths]:
    """The shipped ones."""
    azure = read_azure(SHIPPED_FOLDER / "azure-2023-merged-640s.csv.gz")
    return {
        "azure-2023": azure.lengths,
        "sharegpt": read_lengths(SHIPPED_FOLDER / "sharegpt.csv.gz"),
        "longbench": read_lengths(SHIPPED_FOLDER / "longbench.csv"),
    }


def contexts_of(lengths: Lengths) -> npt.NDArray[np.int64]:
    """The context at every token of every answer."""
    return np.concatenate(
        [
            np.arange(num_in + 1, num_in + num_out + 1)
            for num_in, num_out in zip(lengths.input_tokens, lengths.output_tokens, strict=True)
        ]
    )


def main() -> None:
    """Print the figures."""
    with Report("local_kv", block=BLOCK_TOKENS) as report:
        for data, lengths in data_sets().items():
            contexts = contexts_of(lengths)
            blocks = -(-contexts // BLOCK_TOKENS)
            for shape in SHAPES:
                num_local = shape.num_layers - shape.num_global
                hidden = np.maximum(0, contexts - shape.window) * num_local
                # A window begins somewhere in a block.
                most = -(-shape.window // BLOCK_TOKENS) + 1
                kept = blocks * shape.num_global + np.minimum(blocks, most) * num_local
                of: dict[str, Setting] = {
                    "data": data,
                    "mean context": float(contexts.mean()),
                    "model": shape.name,
                }
                outside = float(hidden.sum() / (contexts.sum() * shape.num_layers))
                report.add("outside", 100 * outside, "%", **of)
                report.add("room", float(blocks.sum() * shape.num_layers / kept.sum()), "x", **of)
                ring = ring_of(shape.window, shape.period, BLOCK_TOKENS, STEP_TOKENS)
                beyond = np.maximum(0, blocks - ring.num_blocks)
                taken = np.minimum(blocks, ring.num_blocks) - (-beyond // ring.period)
                report.add("ring", float(blocks.sum() / taken.sum()), "x", **of)
        for num_tokens in (4096, 8192):
            _compare_served(report, num_tokens)


def _compare_served(report: Report, num_tokens: int) -> None:
    whole = KvBlocks(BLOCK_TOKENS)
    window, period = int(str(SERVED["sliding_window"])), 6
    ring = whole._replace(ring=ring_of(window, period, BLOCK_TOKENS, STEP_TOKENS))
    longest = num_tokens + ANSWER_TOKENS
    num_blocks = NUM_WHOLE * whole.holding(longest)
    for name, blocks in (("whole", whole), ("ring", ring)):
        of: dict[str, Setting] = {"KV": name, "tokens": num_tokens, "blocks": num_blocks}
        report.add("computed", num_blocks // blocks.holding(longest), "requests", **of)
        report.add("counted", asyncio.run(_serve(blocks, num_tokens, num_blocks)), "requests", **of)


async def _serve(blocks: KvBlocks, num_tokens: int, num_blocks: int) -> int:
    """The most requests with so long prompts that run at one time."""
    layers, kv_token_bytes = int(str(SERVED["num_hidden_layers"])), 2 * 32 * 2
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "config.json").write_text(json.dumps(SERVED))
        config = KunServeConfig(
            model=ModelConfig(model=folder, load_format="dummy"),
            instance=InstanceConfig(
                block_size=BLOCK_TOKENS,
                kv_cache_memory_bytes=num_blocks * layers * BLOCK_TOKENS * kv_token_bytes,
                granule_bytes=layers * BLOCK_TOKENS * kv_token_bytes,
                disable_hybrid_kv_cache_manager=blocks.ring is None,
            ),
            scheduler=SchedulerConfig(
                max_num_batched_tokens=STEP_TOKENS, enable_prefix_caching=False, watermark=0.0
            ),
            overload=OverloadConfig(policy="recompute"),
            cluster=ClusterConfig(num_instances=1),
        )
        plan = Plan(config, Measured(ring=blocks.ring))
        cluster = await LocalCluster.start(plan, vocab_size=int(str(SERVED["vocab_size"])))
        try:
            return await _most_running(
                cluster, num_tokens, num_blocks // blocks.holding(num_tokens)
            )
        finally:
            await cluster.close()


async def _most_running(cluster: LocalCluster, num_tokens: int, num_requests: int) -> int:
    """Sends some more than fit, and looks until the first has ended."""
    ended = asyncio.Event()

    def received(token: TokenOutput) -> None:
        if token.finish_reason is not None:
            ended.set()

    sampling = SamplingParams(ANSWER_TOKENS, temperature=0.0, ignore_eos=True)
    for number in range(num_requests + 2):
        prompt = TokenIds([(number + 7 * i) % 500 + 2 for i in range(num_tokens)])
        cluster.submit(Request(RequestId(str(number)), prompt, sampling, 0.0), received)
    most = 0
    while not ended.is_set():
        await asyncio.sleep(0.02)
        most = max(most, sum(load.num_running for load in cluster.state().loads))
    return most


if __name__ == "__main__":
    main()
