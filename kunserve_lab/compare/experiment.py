"""An experiment: which systems meet which requests, in which world, how often."""

import enum
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType

from kunserve.core.errors import ConfigError
from kunserve_lab.compare.others import OtherServers, check_others, system_of
from kunserve_lab.compare.settings import RealSetup, SimulatedSetup, WorkloadSettings
from kunserve_lab.compare.systems import SYSTEMS, System, find_system, serve_flags

REAL_ROUNDS = 3
"""Runs of each real system at each load, where an experiment does not say. One run is one draw."""


class World(enum.StrEnum):
    """Where the systems run."""

    REAL = "real"
    """`kunserve serve` on this machine, measured by the client of `kunserve bench`."""
    SIMULATED = "simulated"
    """The real controller and policies over modelled instances, links and time."""


@dataclass(frozen=True, slots=True)
class Experiment:
    """One comparison, at one or several loads. The kind of ``setup`` says in which world."""

    setup: SimulatedSetup | RealSetup = field(default_factory=SimulatedSetup)
    workload: WorkloadSettings = field(default_factory=WorkloadSettings)
    systems: tuple[str, ...] = ("recompute", "drop")
    """The first one is the one that the others are held against."""
    loads: tuple[float, ...] = (1.0,)
    """Factors on the workload's rate."""
    seeds: tuple[int, ...] = (0,)
    """Of arrivals and lengths: each one is another draw of the workload."""
    rounds: int | None = None
    """How often each system meets the same requests. None: 3 in the real world, else 1."""
    title: str = "Comparison"
    claim: str = ""
    """What the paper says, for the report."""
    others: Mapping[str, OtherServers] = field(default_factory=lambda: MappingProxyType({}))
    """Servers that are not ours, by the name that ``systems`` has for them. Real world only."""
    variants: Mapping[str, System] = field(default_factory=lambda: MappingProxyType({}))
    """Systems that only this experiment needs, by name."""

    def system(self, name: str) -> System:
        """The system of that name. Raises ConfigError."""
        if name in self.others:
            return system_of(name, self.others[name])
        if name in self.variants:
            return self.variants[name]
        if name not in SYSTEMS:
            known = ", ".join((*SYSTEMS, *self.variants, *self.others))
            raise ConfigError(f"no system {name!r} to compare; there are: {known}")
        return find_system(name)

    @property
    def world(self) -> World:
        """Where the systems run."""
        return World.REAL if isinstance(self.setup, RealSetup) else World.SIMULATED

    @property
    def num_rounds(self) -> int:
        """``rounds``, or what the world takes without it."""
        if self.rounds is not None:
            return self.rounds
        return REAL_ROUNDS if self.world is World.REAL else 1


@dataclass(frozen=True, slots=True, order=True)
class Place:
    """Where a run stands in an experiment."""

    load: float
    seed: int
    round: int
    system: str


def check_experiment(experiment: Experiment) -> None:
    """Raise ConfigError for what can be seen to be impossible before anything runs."""
    if not experiment.systems:
        raise ConfigError("nothing to compare: name at least one system")
    if experiment.others and experiment.world is World.SIMULATED:
        raise ConfigError("others: servers that are not ours cannot be simulated")
    check_others(experiment.others, experiment.systems)
    for name in experiment.systems:
        system = experiment.system(name)
        if experiment.world is World.REAL:
            serve_flags(system)
    _check_distinct("systems", experiment.systems)
    _check_distinct("loads", experiment.loads)
    _check_distinct("seeds", experiment.seeds)
    if experiment.num_rounds < 1:
        raise ConfigError(f"rounds must be at least 1, not {experiment.rounds}")
    if experiment.world is World.SIMULATED and experiment.num_rounds > 1:
        raise ConfigError("rounds of a simulation are all equal: give several seeds instead")


def plan(experiment: Experiment) -> list[Place]:
    """Every run, in the order of execution.

    All runs of a load follow one another, and the order of the systems turns round each time
    (ABBA), because a machine that grows slower or faster must not favour one system.
    """
    places = []
    for load in experiment.loads:
        names = experiment.systems
        for seed in experiment.seeds:
            for number in range(experiment.num_rounds):
                places += [Place(load, seed, number, name) for name in names]
                names = names[::-1]
    return places


def _check_distinct(name: str, values: Sequence[object]) -> None:
    if not values:
        raise ConfigError(f"{name} must not be empty")
    twice = [value for value in values if values.count(value) > 1]
    if twice:
        raise ConfigError(f"{name} names {twice[0]} twice")
