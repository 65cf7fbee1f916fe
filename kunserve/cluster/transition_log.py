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
    before = "+".join("".join(str(len(g.stages))) for g in record.groups_before)
    after = "+".join(str(len(g.stages)) for g in record.groups_after)
    took_s = (record.finished_s or record.started_s) - record.started_s
    return (
        f"{record.kind} id={record.transition_id} outcome={record.ending!r} "
        f"trigger={record.trigger!r} groups={before}->{after} bytes={record.freed_bytes} "
        f"remap_ms={record.remap_s * 1e3:.2f} gap_ms={record.gap_s * 1e3:.1f} "
        f"requests_moved={record.requests_moved} moved_bytes={record.moved_bytes} "
        f"max_stall_ms={record.max_stall_s * 1e3:.0f} total_ms={took_s * 1e3:.0f}"
    )


def log_transition(record: TransitionRecord) -> None:
    """One line per drop or restore."""
    level = logging.INFO if record.outcome is Outcome.DONE else logging.WARNING
    logger.log(level, describe(record))


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
