"""What a window saves: attention of a layer that sees 1,024 tokens against one that sees all.

    python -m benchmarks.local_attention [--context 8192] [--window 1024] [--rounds 9]

The C kernel in bfloat16 with the heads of Gemma 3 4B, both layers in turns, by the processor time
of this thread: one token of each of four sequences, and a chunk of a prompt. ``window / all`` is
the median of the rounds' ratios, with their range.
"""

import argparse
import statistics
import time
from dataclasses import replace

import numpy as np
import torch

from benchmarks.kernel_calls import BLOCK_SIZE
from benchmarks.kernels import smollm2
from benchmarks.report import Report
from kunserve.engine.attention import StepBatch
from kunserve.engine.cpu.kernels.library import set_num_threads
from tests.unit.engine.reference_attention import FusedAttention

NUM_SEQUENCES = 4
CHUNK_TOKENS = 256
LOCAL, GLOBAL = 0, 1
"""The model's two layers."""


def batch_of(num_sequences: int, num_tokens: int, context: int) -> StepBatch:
    """The last tokens of each sequence; the blocks of all lie side by side."""
    width = -(-context // BLOCK_SIZE)
    positions = np.arange(context - num_tokens, context, dtype=np.int32)
    entries = np.arange(num_sequences * width, dtype=np.int32) * 2
    return StepBatch(
        token_ids=np.zeros(num_sequences * num_tokens, dtype=np.int32),
        positions=np.tile(positions, num_sequences),
        tables=entries.reshape(num_sequences, width),
        rows=np.arange(num_sequences, dtype=np.int32),
        q_starts=np.arange(num_sequences + 1, dtype=np.int32) * num_tokens,
        context_lens=np.full(num_sequences, context, dtype=np.int32),
        sample_rows=np.zeros(0, dtype=np.int32),
    )


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--context", type=int, default=8192)
    parser.add_argument("--window", type=int, default=1024)
    parser.add_argument("--rounds", type=int, default=9)
    options = parser.parse_args()
    set_num_threads(1)
    torch.set_num_threads(1)
    spec = replace(
        smollm2("bfloat16"),
        num_layers=2,
        num_heads=8,
        num_kv_heads=4,
        head_dim=256,
        sliding_window=options.window,
        global_layers=(GLOBAL,),
    )
    num_units = 2 * NUM_SEQUENCES * -(-options.context // BLOCK_SIZE)
    kv = torch.randn(num_units * spec.unit_bytes(BLOCK_SIZE) // 2).bfloat16()
    attention = FusedAttention(spec, kv.data_ptr(), BLOCK_SIZE)
    with Report("local_attention", context=options.context, window=options.window) as report:
        for name, batch in (
            ("decode", batch_of(NUM_SEQUENCES, 1, options.context)),
            ("prompt", batch_of(1, CHUNK_TOKENS, options.context)),
        ):
            qkv = torch.randn(batch.num_tokens, spec.qkv_size).bfloat16()
            out = torch.empty(batch.num_tokens, spec.q_size, dtype=torch.bfloat16)
            taken_s: dict[int, list[float]] = {LOCAL: [], GLOBAL: []}
            for _ in range(options.rounds + 1):
                for layer, times_s in taken_s.items():
                    began_s = time.thread_time()
                    attention.attend(layer, qkv, batch, out)
                    times_s.append(time.thread_time() - began_s)
            seen_s, all_s = (times_s[1:] for times_s in taken_s.values())  # the first warms up
            ratios = [seen / every for seen, every in zip(seen_s, all_s, strict=True)]
            report.add("all", 1e3 * statistics.median(all_s), "ms", step=name)
            report.add("window", 1e3 * statistics.median(seen_s), "ms", step=name)
            report.add("window / all", statistics.median(ratios), "", step=name)
            report.add("least", min(ratios), "", step=name)
            report.add("most", max(ratios), "", step=name)


if __name__ == "__main__":
    main()
