"""Steps by vLLM's model classes: each layer's code run every time, and repeated, in turn.

    python -m benchmarks.compute.vllm_layers --model FOLDER [--dtype bfloat16] [--rows 1 8 32]

By the Python that has vLLM. Each row is a sequence that decodes behind ``--context`` tokens.
"""

import argparse
import os
import statistics
import time
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.report import Report
from kunserve.core.config import InstanceConfig, ModelConfig, SchedulerConfig
from kunserve.core.ids import InstanceId
from kunserve.engine.attention import StepBatch
from kunserve.engine.body import EngineBody
from kunserve.engine.cpu.kernels.levels import processor_name
from kunserve.engine.devices import open_backend
from kunserve.model.source import resolve_model

BLOCK_SIZE = 32
SETTLE_S = 10
"""After which KV memory lies in its pages."""


def open_body(folder: Path, dtype: str, threads: int) -> EngineBody:
    """As an instance of a server opens it."""
    os.environ["OMP_WAIT_POLICY"] = "PASSIVE"  # as its launcher does; read when torch begins
    source, number = resolve_model(str(folder)), InstanceId(0)
    model = ModelConfig(model=str(folder), dtype=dtype)  # type: ignore[arg-type]
    config = InstanceConfig(
        engine="vllm", block_size=BLOCK_SIZE, memory_bytes=2 << 30, num_threads=threads
    )
    backend = open_backend(model, source, config, number)
    return EngineBody(number, model, config, source, SchedulerConfig(), backend)


def decodes(rows: int, context: int, num_layers: int) -> StepBatch:
    """The last token of each of ``rows`` sequences, ``context`` tokens long."""
    blocks = -(-context // BLOCK_SIZE)
    tables = np.arange(rows * blocks, dtype=np.int32).reshape(rows, blocks) * num_layers
    every, positions = np.arange(rows + 1, dtype=np.int32), np.full(rows, context - 1, np.int32)
    tokens = np.arange(5, 5 + rows, dtype=np.int32)
    return StepBatch(tokens, positions, tables, every[:-1], every, positions + 1, every[:-1])


def step_s(decoder: Any, batch: StepBatch) -> float:
    """The layers' time, without the head's."""
    started = time.perf_counter()
    decoder.forward(batch, decoder.embed(batch))
    return time.perf_counter() - started


def main() -> None:
    """Both, in turn, for each number of rows."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", type=Path, required=True, help="a Hugging Face folder")
    parser.add_argument("--dtype", default="bfloat16", choices=("bfloat16", "float32"))
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 8, 32])
    parser.add_argument("--context", type=int, default=128, help="tokens")
    parser.add_argument("--rounds", type=int, default=10, help="of six steps of both")
    options = parser.parse_args()
    common = {"model": options.model.name, "processor": processor_name(), "dtype": options.dtype}
    with (
        closing(open_body(options.model, options.dtype, options.threads)) as body,
        Report("vllm_layers", **common, threads=options.threads) as report,
    ):
        time.sleep(SETTLE_S)
        decoder: Any = body._decoder
        for rows in options.rows:
            batch = decodes(rows, options.context, body.model.num_layers)
            times: dict[bool, list[float]] = {True: [], False: []}
            for _ in range(options.rounds):
                for is_plain, found in times.items():
                    for layer in decoder._repeated:
                        layer.is_plain = is_plain or layer.refusal is not None
                    step_s(decoder, batch)  # the first one is written down
                    found += [step_s(decoder, batch) for _ in range(6)]
            code, repeated = (1000 * statistics.median(found) for found in times.values())
            settings = {"rows": rows, "context": options.context}
            report.add("as code", code, "ms", **settings)
            report.add("repeated", repeated, "ms", **settings)
            report.add("as code / repeated", code / repeated, "x", **settings)


if __name__ == "__main__":
    main()
