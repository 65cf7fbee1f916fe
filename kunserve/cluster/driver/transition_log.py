"""Drops and restores in words: for the log, and for who asked for one. Other decisions too."""

import logging

from kunserve.control.cluster.commands import (
    LogObserved,
    LogQuarantine,
    LogReason,
    LogRerun,
    LogTransition,
    ScaleUp,
)
from kunserve.core.snapshots import Outcome, TransitionRecord

logger = logging.getLogger(__name__)


def describe(record: TransitionRecord) -> str:
    """One line on a transition: what, why, and what was measured."""
    return _template(record) % _values(record)


def log_transition(record: TransitionRecord) -> None:
    """One line per drop or restore. Its values are arguments, because JSON shows them as fields."""
    level = logging.INFO if record.outcome is Outcome.DONE else logging.WARNING
    logger.log(level, _template(record), *_values(record))


def _template(record: TransitionRecord) -> str:
    return (
        f"{record.kind} id=%d outcome=%r trigger=%r groups=%s bytes=%d remap_ms=%.2f gap_ms=%.1f "
        "prepare_ms=%.1f requests_moved=%d moved_bytes=%d max_stall_ms=%.0f total_ms=%.0f"
    )


def _values(record: TransitionRecord) -> tuple[object, ...]:
    before, after = (
        "+".join(str(len(layout.stages)) for layout in groups)
        for groups in (record.groups_before, record.groups_after)
    )
    took_s = (record.finished_s or record.started_s) - record.started_s
    return (
        record.transition_id,
        record.ending,
        record.trigger,
        f"{before}->{after}",
        record.freed_bytes,
        record.remap_s * 1e3,
        record.gap_s * 1e3,
        record.prepare_s * 1e3,
        record.requests_moved,
        record.moved_bytes,
        record.max_stall_s * 1e3,
        took_s * 1e3,
    )


def log_decision(
    command: LogTransition | LogReason | LogObserved | LogQuarantine | LogRerun | ScaleUp,
) -> None:
    """One line for what the controller has to say."""
    match command:
        case LogTransition(record):
            log_transition(record)
        case LogReason(group_id, reason):
            logger.info("nothing done group=%d reason=%r", group_id, reason)
        case LogObserved(text):
            logger.info("observed only, nothing is done: %s", text)
        case LogQuarantine(request_id, reason):
            logger.warning("quarantine request=%s: %s", request_id, reason)
        case LogRerun(request_id, num_tokens):
            logger.info("run again request=%s tokens=%d", request_id, num_tokens)
        case ScaleUp(reason):
            logger.warning("scale_up_wanted reason=%r", reason)
