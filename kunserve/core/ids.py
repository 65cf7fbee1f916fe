"""Identifiers. Each is a distinct type so that mypy catches a swap."""

from typing import NewType

RequestId = NewType("RequestId", str)
InstanceId = NewType("InstanceId", int)
GroupId = NewType("GroupId", int)
"""Unique over the life of a cluster, and growing: a younger group has a larger id."""
TransitionId = NewType("TransitionId", int)
StepId = NewType("StepId", int)
PrefixId = NewType("PrefixId", RequestId)
"""Of blocks in a group's cache: a holder of blocks as requests are."""
