"""P8: the cost model fitted to steps of this device, and how well it and the simulator predict."""

from collections.abc import Callable, Sequence
from functools import partial

import numpy as np

from benchmarks.gpu_kit.parts import Part
from benchmarks.gpu_phases.machine import Machine
from benchmarks.gpu_phases.models import serving_model, write_model
from benchmarks.report import Report
from kunserve.core.config import ModelConfig, SchedulerConfig
from kunserve.core.cost import CostSample
from kunserve.core.ids import RequestId
from kunserve.core.step import Chunk
from kunserve.model.profile import Profile, ProfileSubject, read_profile, write_profile
from kunserve.model.spec import ModelSpec
from kunserve_lab.profile.cost_fit import predict_held_out
from kunserve_lab.profile.journal import Journal
from kunserve_lab.profile.neighbours import neighbours
from kunserve_lab.profile.run import (
    BodySettings,
    limits_of,
    make_plan,
    make_profile,
    measure,
    open_body,
)
from kunserve_lab.profile.stopwatch import Stopwatch
from kunserve_lab.sim.devices import DEVICES, Device
from kunserve_lab.sim.models import from_spec
from kunserve_lab.sim.profile import RooflineTimes

PROFILE = "profile.json"
"""In the folder of phases: what P7 serves and simulates with."""
_NOBODY = RequestId("nobody")
Seconds = Callable[[CostSample], float]


def block_size_of(machine: Machine) -> int:
    """Of the instances that serve on it."""
    return 64 if machine.is_real else 8


def batch_tokens_of(machine: Machine) -> int:
    """The largest batch of those instances."""
    return 2048 if machine.is_real else 48


def run(machine: Machine, report: Report) -> None:
    """One part: a fit needs all that was measured."""
    machine.do(Part("profile", partial(_profile_and_fit, machine, report)))


def _profile_and_fit(machine: Machine, report: Report) -> None:
    """Measure through the code of ``kunserve profile``, fit, and hold what is left out against."""
    spec, kv_bytes = serving_model(machine)
    profile = _profile(machine, spec, kv_bytes)
    write_profile(machine.folder / PROFILE, profile)
    report.add("batches", len(profile.samples), "", model=spec.name, clock=profile.clock)
    cost = profile.coefficients
    for name, value in (
        ("a pair", cost.attention_s),
        ("a token", cost.token_s),
        ("a chunk", cost.chunk_s),
        ("of it shared", cost.shared_s),
        ("a token of context", cost.context_s),
        ("a sample", cost.sample_s),
        ("a narrow batch", cost.narrow_s),
        ("an expert", cost.expert_s),
    ):
        report.add(name, value * 1e6, "us", model=spec.name)
    for name, by_region in profile.errors.items():
        for region, error in by_region.items():
            report.add("held-out error", error.mean * 100, "%", of=name, batches=region)
            report.add("largest", error.largest * 100, "%", of=name, batches=region)
    stock = stock_device(machine)
    times = RooflineTimes(from_spec(spec), stock, 1, 1.0)
    fitted = dict(zip(profile.samples, predict_held_out(profile.samples).tolist(), strict=True))
    predictions: dict[str, Seconds] = {
        f"simulator's {stock.name}": lambda s: times.stage_s(_chunks(s), spec.num_layers, True),
        "simulator's, fitted": lambda sample: fitted[sample],
    }
    for name, seconds in predictions.items():
        _compare(report, name, profile.samples, seconds)


def measured(machine: Machine) -> Profile | None:
    """What P8 has left."""
    path = machine.folder / PROFILE
    return read_profile(path) if path.exists() else None


def stock_device(machine: Machine) -> Device:
    """The simulator's device that this one is, or is most like."""
    name = machine.driver().name.lower()
    return next((device for key, device in DEVICES.items() if key in name), DEVICES["h100"])


def _profile(machine: Machine, spec: ModelSpec, kv_bytes: int) -> Profile:
    """A profile as ``kunserve profile`` makes it, beside an instance that computes, too."""
    real = machine.is_real
    folder = write_model(spec, machine.folder / spec.name)
    model = ModelConfig(model=str(folder), load_format="dummy", dtype="bfloat16")
    scheduler = SchedulerConfig(max_num_batched_tokens=batch_tokens_of(machine))
    settings = BodySettings(
        model, block_size_of(machine), 1, machine.instance_device, kv_bytes, scheduler
    )
    num_per_region, num_repeats, most_decodes = (24, 4, 128) if real else (5, 2, 4)
    num_instances = 2 if real else 1
    body = open_body(settings)
    try:
        subject = ProfileSubject.of(body.model, settings.num_threads, settings.block_size)
        limits = limits_of(body, batch_tokens_of(machine), most_decodes)
        plan = make_plan(subject, limits, num_per_region, num_repeats, seed=0)
        journal = Journal(machine.folder / "profile.samples.jsonl", plan)
        stopwatch = Stopwatch(body, settings.clock)
        with neighbours(num_instances - 1, settings) as others:
            measure(stopwatch, plan, journal, others, lambda: None)
        profile = make_profile(
            plan,
            journal.found,
            stopwatch.clock,
            num_instances,
            0,
            "cuda" if real else "cpu",
        )
        journal.remove()
        return profile
    finally:
        body.close()


def _chunks(sample: CostSample) -> list[Chunk]:
    first = len(sample.lengths) - sample.num_samples
    pairs = zip(sample.prefixes, sample.lengths, strict=True)
    return [Chunk(_NOBODY, p, length, at >= first) for at, (p, length) in enumerate(pairs)]


def _compare(report: Report, name: str, samples: Sequence[CostSample], seconds: Seconds) -> None:
    """Mean and largest error by kind of batch, and whether it is too much or too little."""
    ratios = np.array([seconds(sample) / sample.seconds for sample in samples])
    regions = np.array([sample.region for sample in samples])
    for region in (*dict.fromkeys(regions.tolist()), "all"):
        mine = ratios if region == "all" else ratios[regions == region]
        where = {"of": name, "batches": region}
        report.add("error", float(np.abs(mine - 1.0).mean()) * 100, "%", **where)
        report.add("largest", float(np.abs(mine - 1.0).max()) * 100, "%", **where)
        report.add("predicted / measured", float(np.median(mine)), "", **where)
