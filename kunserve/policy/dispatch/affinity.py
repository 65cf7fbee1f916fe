"""How much a group that has a prompt's beginning is worth going to, and when it has too much to do.

What a group *saves* is the blocks of the request's beginning whose KV it probably has. Saving is
worth a detour only to a group that is *near* the one that would be chosen otherwise:

    requests / instances <= MAX_RATIO * (requests / instances there) + SLACK

So a beginning that all requests have spreads: the group that has it fills until it is no longer
near, then another one computes the beginning once, has it too, and load decides between them.
"""

from collections.abc import Mapping
from types import MappingProxyType
from typing import TypeAlias

from kunserve.core.ids import GroupId
from kunserve.core.load import GroupLoad

Saved: TypeAlias = Mapping[GroupId, int]
"""Blocks of a request's beginning that a group probably has; groups with none are left out."""
NOTHING_SAVED: Saved = MappingProxyType({})

MAX_RATIO = 2.0
SLACK = 2.0
"""Requests that an instance may have more, so that an idle cluster follows prefixes too."""


def num_requests(group: GroupLoad) -> int:
    """Requests there and on their way."""
    report = group.report
    return report.num_running + report.num_stalled + group.num_waiting + group.num_unreported


def per_instance(group: GroupLoad) -> float:
    """Requests there for each of its instances."""
    return num_requests(group) / group.num_instances


def is_near(requests_here: float, requests_there: float) -> bool:
    """Whether saving decides between a group and the one that would be chosen without it.

    Both as requests per instance, ``there`` of the latter.
    """
    return requests_here <= MAX_RATIO * requests_there + SLACK


def is_worth_waiting(
    saved_tokens: int, tokens_ahead: float, saved_elsewhere: int, ahead_elsewhere: float
) -> bool:
    """Whether a request waits until a group that has its beginning can be sent more.

    It does if that gets it to its first token sooner than computing its beginning elsewhere does:
    what is ahead of it, per stage of the group, weighs as much as what is saved.
    """
    return saved_tokens - tokens_ahead > saved_elsewhere - ahead_elsewhere
