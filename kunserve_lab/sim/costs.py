"""Step times from measured coefficients, and coefficients from step times."""

from collections.abc import Sequence

import numpy as np

from kunserve.core.cost import (
    DENSE,
    NO_WINDOWS,
    CostCoefficients,
    CostSample,
    ExpertChoice,
    Windows,
)
from kunserve.core.errors import TooLittleMemory
from kunserve.core.ids import InstanceId, RequestId
from kunserve.core.snapshots import HeadShape, InstanceSpec
from kunserve.core.step import Chunk
from kunserve.policy.batch.cost import BatchTotals, head_cost, layers_cost
from kunserve_lab.profile.cost_fit import fit, sized
from kunserve_lab.profile.cost_forms import forms_for, from_vector
from kunserve_lab.sim.models import SimModel
from kunserve_lab.sim.profile import InstanceProfile, StepTimes

LOOP_S = 0.7e-3
"""Between two steps of a real instance: mail, plan, results. Measured: 0.5 ms alone, 0.9 among
busy neighbours."""

_DECODES_OF_SPARSE = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024)
"""Sizes of batches by which experts are told from what every batch pays."""


class MeasuredTimes:
    """Implements ``StepTimes`` from what ``kunserve profile`` measured over the whole model.

    A stage takes its share of the layers' part; the output head's part is the last stage's.
    """

    def __init__(self, cost: CostCoefficients, num_layers: int, loop_s: float = 0.0) -> None:
        """``loop_s`` is what a step takes beside computing."""
        self._cost = cost
        self._num_layers = num_layers
        self._loop_s = loop_s

    def stage_s(self, chunks: Sequence[Chunk], num_layers: int, is_last: bool) -> float:
        """See ``StepTimes``."""
        windows = self._cost.windows if self._cost.windows.share else None
        num_tokens = num_samples = 0
        context: float = 0
        pairs: float = 0
        for _, start, count, samples in chunks:
            num_tokens += count
            num_samples += samples
            context += start
            pairs += count * start + count * (count + 1) // 2
            if windows is not None:
                pairs -= windows.hidden_pairs(start, count)
                context -= windows.hidden_keys(start)
        totals = BatchTotals(len(chunks), num_tokens, pairs, context, num_samples)
        layers_s = layers_cost(self._cost, totals) * num_layers / self._num_layers
        return layers_s + (head_cost(self._cost, totals) if is_last else 0.0) + self._loop_s


def cpu_profile(
    model: SimModel,
    serving: CostCoefficients,
    alone: CostCoefficients,
    block_size: int,
    memory_bytes: int,
) -> InstanceProfile:
    """An instance as ``kunserve serve`` runs it on a CPU, with step times as a profile has them.

    Rates of transfers inside one machine are those measured for our transport and arena.
    """
    granule = 256 * 1024
    weights = -(-model.weights_bytes // granule) * granule
    unit_bytes = block_size * model.kv_token_bytes
    kv_units = (memory_bytes - weights) // unit_bytes
    if kv_units < model.num_layers:
        raise TooLittleMemory(
            f"{model.name} needs {model.weights_bytes / 2**20:.0f} MiB for its weights; the "
            f"instance has {memory_bytes / 2**20:.0f} MiB"
        )
    spec = InstanceSpec(
        instance_id=InstanceId(0),
        num_layers=model.num_layers,
        block_size=block_size,
        unit_bytes=unit_bytes,
        layer_bytes=model.layer_bytes,
        memory_bytes=memory_bytes,
        kv_units=kv_units,
        granule_bytes=granule,
        head=HeadShape(
            model.embedding_bytes // (model.hidden_size * model.dtype_bytes),
            model.embedding_bytes / model.layer_bytes,
        ),
    )
    return InstanceProfile(
        model=model,
        spec=spec,
        times=MeasuredTimes(serving, model.num_layers, LOOP_S),
        times_alone=MeasuredTimes(alone, model.num_layers, LOOP_S),
        num_gpus=0,
        network_bytes_per_s=2.5e9,
        host_bytes_per_s=2.0e9,
        copy_bytes_per_s=5.0e9,
        remap_granule_s=10e-6,
        reads_during_steps=False,
    )


def profile_times(
    times: StepTimes,
    num_layers: int,
    max_tokens: int,
    experts: ExpertChoice = DENSE,
    windows: Windows = NO_WINDOWS,
) -> CostCoefficients:
    """What ``kunserve profile`` would find on a simulated device: what formation plans with.

    Six digits of it: linear algebra differs in the last ones from processor to processor, and a
    simulation must not.
    """
    batches: list[list[tuple[int, int, bool]]] = []
    decodes = (1, 8, 32, 128) if experts == DENSE else _DECODES_OF_SPARSE
    for prefix in (0, 1024, 4096, 16_384):
        length = 64
        while length <= max_tokens:
            batches.append([(prefix, length, True)])
            batches.append([(prefix, length, False)])
            batches.append([(prefix, length, True), (4096, 1, True), (1024, 1, True)])
            length *= 2
        batches.extend([(prefix, 1, True)] * num for num in decodes if num <= max_tokens)
    samples = []
    for batch in batches:
        chunks = [Chunk(RequestId(""), *chunk) for chunk in batch]
        samples.append(
            CostSample(
                region="mixed",
                prefixes=tuple(prefix for prefix, _, _ in batch),
                lengths=tuple(length for _, length, _ in batch),
                num_samples=sum(samples for _, _, samples in batch),
                seconds=times.stage_s(chunks, num_layers, True),
            )
        )
    form = sized(samples, forms_for(experts, windows)[0])
    found = fit(samples, form)
    vector = np.array([float(f"{value:.6g}") for value in found])
    return from_vector(vector, form.experts, windows)
