"""Drop plans for tests: say what matters, by the names of ``Wanted``, ``Limits``, ``Standing``."""

from collections.abc import Sequence
from dataclasses import fields
from typing import Any

from kunserve.core.ids import GroupId
from kunserve.core.layout import GroupLayout
from kunserve.policy.drop.capacity import Specs
from kunserve.policy.drop.plan import DropPlan, Limits, Standing, Wanted, plan_drop

FIRST_ID = GroupId(100)
"""Of the groups that plans make."""
_OF_WANTED = {field.name for field in fields(Wanted)}
_OF_LIMITS = {field.name for field in fields(Limits)}


def planned(
    layouts: Sequence[GroupLayout], specs: Specs, required: int, **options: Any
) -> DropPlan:
    wanted = {name: options.pop(name) for name in _OF_WANTED & options.keys()}
    limits = {name: options.pop(name) for name in _OF_LIMITS & options.keys()}
    standing = Standing(layouts, specs, FIRST_ID, **options)
    return plan_drop(standing, Wanted(required, **wanted), Limits(**limits))
