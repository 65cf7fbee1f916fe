"""What a controller commanded and what became of it, as lines for people."""

from typing import Any

from kunserve.control.cluster.commands import (
    Condemn,
    ControlCommand,
    Deliver,
    LogObserved,
    LogQuarantine,
    LogReason,
    LogRerun,
    LogTransition,
    Respawn,
    ScaleDown,
    ScaleUp,
    Send,
)
from kunserve.core.ids import GroupId, InstanceId, RequestId
from kunserve.core.layout import GroupLayout
from kunserve.core.messages import (
    Abort,
    AllowParking,
    Commit,
    Committed,
    Connect,
    EndMigration,
    ExchangeDone,
    Form,
    HandOff,
    Handover,
    LayersLoaded,
    LoadLayers,
    Message,
    Migrate,
    MigrationOver,
    MigrationReady,
    Prepare,
    Prepared,
    Ready,
    ResetPrefixCache,
    ReturnWaiting,
    Rollback,
    Shutdown,
    Submit,
    TokenOutput,
)


class EventLog:
    """A ``Watcher``. One line per command, answer, preemption and end of a request.

    Times are virtual seconds, to the microsecond.
    """

    def __init__(self) -> None:
        self.lines: list[str] = []
        self._first_s: dict[RequestId, float] = {}
        self._postponed: set[GroupId] = set()

    def happened(self, kind: str, time_s: float, *details: Any) -> None:
        """See ``Watcher``."""
        match kind, details:
            case "command", (Deliver(token),):
                self._token(time_s, token)
            case "command", (LogReason(group_id, reason),):
                if reason.startswith("restore ") and group_id not in self._postponed:
                    self._postponed.add(group_id)
                    why = reason.removeprefix("restore postponed: ")
                    self.lines.append(f"            postponed g{group_id}: {why}")
            case "command", (command,):
                self.write(time_s, _command(command))
            case "event", (src, message):
                self.write(time_s, _answer(src, message))
            case "read", (src, dst, Handover() as handover):
                num = len(handover.kv)
                text = f"handover {handover.transition_id}: {src} -> {dst}, {num} requests"
                self.write(time_s, text)
            case "preempted", (instance_id, preemption):
                text = f"preempted {preemption.request_id} on {instance_id}"
                self.write(time_s, f"{text}: {preemption.lost_tokens} tokens")
            case "lost", (instance_id,):
                self.write(time_s, f"died {instance_id}")

    def write(self, time_s: float, text: str | None) -> None:
        """One line, or none."""
        if text is not None:
            self.lines.append(f"{time_s:11.6f} {text}")

    def _token(self, time_s: float, token: TokenOutput) -> None:
        first_s = self._first_s.setdefault(token.request_id, time_s)
        if token.finish_reason is not None:
            num = token.position + 1
            text = f"end {token.request_id}: {token.finish_reason}, {num} tokens"
            self.write(time_s, f"{text}, first at {first_s:.6f}")


def _command(command: ControlCommand) -> str | None:
    match command:
        case Send(instance_id, message):
            told = _told(message)
            return None if told is None else f"tell {instance_id} {told}"
        case Condemn(instance_id, reason):
            return f"condemn {instance_id}: {reason}"
        case Respawn(instance_id):
            return f"respawn {instance_id}"
        case LogTransition(record):
            return (
                f"announce {record.kind} {record.transition_id} {record.ending}: "
                f"{record.requests_moved} requests, {record.moved_bytes} bytes moved, "
                f"{record.freed_bytes} freed, stall {record.max_stall_s:.6f}; {record.trigger}"
            )
        case ScaleUp(reason):
            return f"scale up: {reason}"
        case LogQuarantine(request_id, reason):
            return f"quarantine {request_id}: {reason}"
        case ScaleDown(instance_id):
            return f"scale down {instance_id}"
        case LogObserved() | LogRerun():
            return None
    raise AssertionError(command)


def _told(message: Message) -> str | None:
    match message:
        case Submit(request):
            again = len(request.output_token_ids)
            ending = f", again after {again} tokens" if again else ""
            return f"submit {request.request_id}{ending}"
        case Prepare(transition_id, old, new):
            return f"prepare {transition_id}: {_groups(old)} -> {_groups(new)}"
        case Form(layout):
            return f"form {_groups((layout,))}"
        case LoadLayers():
            sources = "; ".join(
                f"{member.instance_id} pulls "
                + " ".join(
                    f"{s.layers.first}-{s.layers.end}@{s.instance_id}" for s in member.sources
                )
                for member in message.members
            )
            return f"load {message.transition_id}: within {message.capacity_blocks}, {sources}"
        case Commit(transition_id) | Rollback(transition_id):
            return f"{type(message).__name__.lower()} {transition_id}"
        case ReturnWaiting(request_ids):
            return f"return {len(request_ids)} waiting"
        case Abort(request_id):
            return f"abort {request_id}"
        case AllowParking() | ResetPrefixCache() | Migrate() | HandOff() | EndMigration():
            return repr(message)
        case Shutdown():
            return repr(message)
        case Connect():
            return None
    raise AssertionError(message)


def _answer(src: InstanceId, message: Any) -> str | None:
    match message:
        case Ready():
            return f"{src} ready"
        case Prepared(transition_id, _, refusal):
            return f"{src} prepared {transition_id}{'' if refusal is None else f': {refusal}'}"
        case LayersLoaded(transition_id, _, refusal):
            return f"{src} loaded {transition_id}{'' if refusal is None else f': {refusal}'}"
        case Committed():
            return (
                f"{src} committed {message.transition_id}: {message.kv_units} units, "
                f"leads {len(message.sequences)}"
            )
        case ExchangeDone():
            return f"{src} exchanged {message.transition_id}: {message.moved_bytes} bytes"
        case MigrationReady() | MigrationOver():
            return repr(message)
    return None


def _groups(layouts: tuple[GroupLayout, ...]) -> str:
    texts = []
    for layout in layouts:
        stages = " ".join(f"{s.instance_id}:{s.layers.first}-{s.layers.end}" for s in layout.stages)
        texts.append(f"g{layout.group_id}[{stages}]")
    return " ".join(texts)
