"""The day in calls of less than ten minutes, for a machine that is lent in such pieces.

What decides most comes first. Each call ends within ``CALL_S``, by the limits of its phases.
"""

from dataclasses import dataclass

CALL_S = 560.0
"""A call, from its first command to its last."""
SETUP_S = 20.0
"""To unpack the project and install what is missing."""
BETWEEN_S = 3.0
"""Beside a phase's limit: its device is looked at before and after, and it is packed."""


@dataclass(frozen=True, slots=True)
class Leg:
    """A phase in a call, or some parts of it."""

    phase: str
    limit_s: float
    only: tuple[str, ...] = ()
    """Patterns of its parts; none: all."""


@dataclass(frozen=True, slots=True)
class Call:
    """Phases that run one after the other."""

    shows: str
    legs: tuple[Leg, ...]

    @property
    def seconds(self) -> float:
        """At most."""
        return SETUP_S + sum(leg.limit_s + BETWEEN_S for leg in self.legs)

    @property
    def arithmetic(self) -> str:
        """How that comes about."""
        parts = [f"{SETUP_S:.0f} to set up"]
        parts += [f"{leg.phase} {leg.limit_s:.0f}" for leg in self.legs]
        parts.append(f"{len(self.legs)} x {BETWEEN_S:.0f} between")
        return f"{' + '.join(parts)} = {self.seconds:.0f} s of {CALL_S:.0f}"


CALLS = {
    "A": Call(
        "is it right, and what does a drop cost?",
        (
            Leg("S", 60.0),
            Leg("P3", 110.0),
            Leg("P1", 100.0),
            Leg("P4", 135.0),
            Leg("P6", 115.0, ("14b, mapped",)),
        ),
    ),
    "B": Call(
        "is it fast?",
        (Leg("P0", 60.0), Leg("P2", 120.0), Leg("P5", 190.0), Leg("P5b", 150.0)),
    ),
    "C": Call(
        "does it help in a burst?",
        (Leg("P8", 120.0), Leg("P7", 310.0, ("simulated", "round 1")), Leg("P6", 95.0, ("7b, *",))),
    ),
    "D": Call(
        "what is left",
        (Leg("P7", 260.0), Leg("P3b", 140.0), Leg("P9", 110.0)),
    ),
    "F": Call(
        "what does a client see of one instance?",
        (Leg("P12", 150.0), Leg("P5", 130.0), Leg("P2", 120.0)),
    ),
    "E": Call("do vLLM's model classes gain as much?", (Leg("P10", 180.0), Leg("P11", 330.0))),
}
