"""A request rate at which a cluster's KV memory overflows, found from step times alone."""

from kunserve.core.ids import RequestId
from kunserve.core.step import Chunk
from kunserve_lab.compare.simulated.scenario import Scenario
from kunserve_lab.workload.bursty import SPIKES, peak_over_mean

STEADY, FILLING_S = 0.85, 26.0
"""The rate at which memory fills, over the balanced rate, is STEADY + FILLING_S / spike: a short
spike ends before the balance is reached. From simulations of Qwen2.5-14B on eight A800."""
MOST = 2.0
"""Above it compute runs out long before memory."""
_NOBODY = RequestId("nobody")


def filling_rate(scenario: Scenario, window_s: float) -> float:
    """Mean requests per second of the built-in window, ``window_s`` long, that fill the KV memory.

    At the peak an instance gets as many requests as it completes when its memory is full. One
    request takes the time of its prompt, and of as many decodes as it has tokens. A decode counts
    with what it adds to a step that computes prompts, because most steps then do. More requests
    would fill the memory too, but only wait. Two significant digits.
    """
    profile, scheduler = scenario.profile, scenario.scheduler
    lengths = scenario.workload.lengths
    num_in, num_out = int(lengths.mean_input_tokens), int(lengths.mean_output_tokens)
    context = num_in + num_out // 2
    num_running = max(1, min(profile.pool_tokens // context, scheduler.max_num_seqs))

    def step_s(chunks: list[Chunk]) -> float:
        return profile.times.stage_s(chunks, profile.spec.num_layers, True)

    prompt = [
        Chunk(_NOBODY, start, min(scheduler.max_num_batched_tokens, num_in - start), False)
        for start in range(0, num_in, scheduler.max_num_batched_tokens)
    ]
    decodes = [Chunk(_NOBODY, context, 1, True)] * num_running
    decode_s = (step_s([prompt[0], *decodes]) - step_s([prompt[0]])) / num_running
    prompt_s = sum(step_s([chunk]) for chunk in prompt)
    busy_s = prompt_s + num_out * decode_s
    spike_s = max(spike.end - spike.start for spike in SPIKES) * window_s
    headroom = min(MOST, STEADY + FILLING_S / spike_s)
    return float(f"{headroom * scenario.num_instances / busy_s / peak_over_mean():.2g}")
