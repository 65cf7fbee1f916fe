"""Commands, events and what peers say, as words for a log: every field that decides something.

What repeats the steps (activations, sampled rows, outputs) is left out: the log has the steps.
"""

from collections.abc import Iterable

from kunserve.control.instance.body import HostCopy
from kunserve.core.layout import GroupLayout
from kunserve.core.messages import (
    Abort,
    AllowParking,
    Commit,
    Committed,
    Connect,
    ExchangeDone,
    ExchangeProgress,
    Form,
    Formed,
    Handover,
    KvDropped,
    KvMoved,
    LateContact,
    LayersDropped,
    LayersLoaded,
    LayerSource,
    LinkBroken,
    LoadLayers,
    Message,
    PrefixPart,
    Prepare,
    Prepared,
    Ready,
    Rejoin,
    Report,
    ResetPrefixCache,
    Returned,
    ReturnWaiting,
    Rollback,
    SequenceKv,
    Submit,
    TransferProgress,
)
from kunserve.core.snapshots import TransitionRecord
from kunserve.core.step import StepPlan
from kunserve.core.transfer import KvPull, LayerLoad, LayerPull


def command_words(message: Message) -> str | None:
    """What the controller tells an instance; None for what no log needs."""
    match message:
        case Connect(peers, gone):
            lost = f", gone {_listed(gone)}" if gone else ""
            return f"connect {_listed(peer for peer, _ in peers)}{lost}"
        case Submit(request, group_id, migration_id):
            assert migration_id is None, message
            salt = f", salt {request.cache_salt}" if request.cache_salt else ""
            forwarded = f", for g{group_id}" if group_id is not None else ""
            return (
                f"submit {request.request_id}: {len(request.prompt_token_ids)} tokens, "
                f"{len(request.output_token_ids)} made, {request.sampling.max_tokens} at most"
                f"{salt}{forwarded}"
            )
        case Abort(request_id):
            return f"abort {request_id}"
        case Form(layout, specs, sources):
            assert [spec.instance_id for spec in specs] == list(layout.members), message
            return f"form {group_words((layout,))}{_sources(sources)}"
        case Prepare(transition_id, old, new):
            return f"prepare {transition_id}: {group_words(old)} -> {group_words(new)}"
        case Commit(transition_id):
            return f"commit {transition_id}"
        case Rollback(transition_id):
            return f"roll back {transition_id}"
        case LoadLayers(transition_id, group_id, capacity_blocks, members):
            loads = "; ".join(f"{m.instance_id}{_sources(m.sources)}" for m in members)
            return f"load {transition_id}: g{group_id} within {capacity_blocks} blocks; {loads}"
        case ReturnWaiting(request_ids):
            return f"return {_listed(request_ids)}"
        case AllowParking(group_id):
            return f"allow parking in g{group_id}"
        case ResetPrefixCache():
            return "reset prefix cache"
    return None


def event_words(message: Message) -> str | None:
    """What an instance tells the controller; None for what no log needs."""
    match message:
        case Ready():
            return f"ready, {message.max_model_len} tokens at most"
        case Rejoin():
            stands = "alone" if message.layout is None else group_words((message.layout,))
            return f"rejoin: {stands}, layers {_range(message.held)}, {message.kv_units} units"
        case Returned(_, request_ids):
            return f"returned {_listed(request_ids)}"
        case Formed(_, group_id, loaded_bytes):
            return f"formed g{group_id}, {loaded_bytes} bytes loaded"
        case Report(_, load):
            return (
                f"report {load.sequence_number} of g{load.group_id}: {load.num_running} run, "
                f"{load.num_waiting} wait, {load.num_stalled} stall, {load.num_away} away, "
                f"{load.used_blocks}+{load.growth_blocks}+{load.head_of_line_blocks} of "
                f"{load.capacity_blocks} blocks, {load.cached_blocks} cached, "
                f"{load.totals.num_preemptions} preempted"
            )
        case Prepared(transition_id, _, refusal, unreached):
            far = f", without {_listed(unreached)}" if unreached else ""
            return f"prepared {transition_id}{_refusal(refusal)}{far}"
        case LayersLoaded():
            said = f"loaded {message.transition_id}{_refusal(message.refusal)}"
            return f"{said}, {message.loaded_bytes} bytes"
        case TransferProgress(_, num_bytes):
            return f"{num_bytes} bytes have come"
        case Committed():
            return (
                f"committed {message.transition_id}: layers {_range(message.held)}, "
                f"{message.kv_units} units, {message.freed_bytes} bytes freed, "
                f"gap {message.gap_s:.3f}, leads {_listed(message.sequences)}"
            )
        case ExchangeDone():
            return (
                f"exchanged {message.transition_id}: g{message.group_id}, "
                f"{message.num_requests} requests, {message.moved_bytes} bytes in "
                f"{message.seconds:.3f}, stall {message.max_stall_s:.3f}"
            )
        case LateContact(_, peer):
            return f"reaches {peer} after all"
        case LinkBroken(_, peer, reason, is_down):
            return f"link to {peer} broken{' and down' if is_down else ''}: {reason}"
    return None


def peer_words(message: Message) -> str | None:
    """What instances tell each other; None for what no log needs."""
    match message:
        case Handover():
            led = [state.request.request_id for state in message.sequences]
            prefixes = "".join(
                f"; {one.prefix_id} {one.first_block}-{one.end_block}" for one in message.prefixes
            )
            each = " ".join(_kv(one) for one in message.kv) or "nothing"
            return (
                f"handover {message.transition_id} of g{message.old_group}: {each}"
                f"; leads {_listed(led)}{prefixes}"
            )
        case KvMoved(transition_id, request_id, first_block, end_block):
            return f"moved {transition_id}: {request_id} blocks {first_block}-{end_block}"
        case KvDropped(transition_id, request_id):
            return f"dropped {transition_id}: {request_id}"
        case ExchangeProgress():
            done = ", finished" if message.is_finished else ""
            lost = f", lost {_listed(message.lost)}" if message.lost else ""
            return (
                f"progress {message.transition_id}: {message.extra_units} extra units, "
                f"arrived {_listed(message.arrived)}, {message.moved_bytes} bytes{lost}{done}"
            )
        case LayersDropped(transition_id):
            return f"layers dropped {transition_id}"
        case LoadLayers() | Submit() | Abort():
            return command_words(message)
    return None


def pull_words(what: KvPull | LayerPull | LayerLoad) -> str:
    """What one instance copies from another."""
    match what:
        case KvPull():
            blocks = f"{what.first_block}-{what.end_block}"
            place = f"layers {_range(what.layers)} of {what.src}"
            return f"pull {what.transition_id}: {what.request_id} blocks {blocks}, {place}"
        case LayerPull():
            return f"pull weights {_range(what.layers)} of {what.src}"
        case LayerLoad():
            return f"load weights {_range(what.layers)}"


def copy_words(copies: tuple[HostCopy, ...]) -> str:
    """KV that goes to host memory, or comes back."""
    texts = []
    for request_id, first_block, starts, num_units, is_shared in copies:
        shared = " shared" if is_shared else ""
        end_block = first_block + len(starts)
        texts.append(f"{request_id}:{first_block}-{end_block} of {num_units} layers{shared}")
    return ", ".join(texts)


def plan_words(plan: StepPlan) -> str:
    """One microbatch, as the leader formed it."""
    chunks = [f"{c.request_id}:{c.start}+{c.num_tokens}/{c.num_sampled}" for c in plan.chunks]
    parts = [
        ("releases", [str(one) for one in plan.released]),
        ("starts", [str(one.request_id) for one in plan.started]),
        ("keeps", [f"{r}:{first}-{end}={p}" for r, p, first, end in plan.kept]),
        ("evicts", [f"{p}:{end}" for p, end in plan.evicted]),
        ("shares", [f"{r}:{end}={p}" for r, p, end in plan.shared]),
    ]
    rest = "".join(f"; {name} {' '.join(texts)}" for name, texts in parts if texts)
    return f"step g{plan.group_id}.{plan.step_id}: {' '.join(chunks)}{rest}"


def record_words(record: TransitionRecord) -> str:
    """A drop or a restore that has ended."""
    committed = "never" if record.committed_s is None else f"{record.committed_s:.3f}"
    finished = "never" if record.finished_s is None else f"{record.finished_s:.3f}"
    return (
        f"{record.kind} {record.transition_id} {record.ending}: "
        f"{group_words(record.groups_before)} -> {group_words(record.groups_after)}, "
        f"begun {record.started_s:.3f}, committed {committed}, finished {finished}, "
        f"{record.requests_moved} requests, {record.moved_bytes} bytes moved, "
        f"{record.freed_bytes} freed, gap {record.gap_s:.3f}, stall {record.max_stall_s:.3f}; "
        f"{record.trigger}"
    )


def group_words(layouts: tuple[GroupLayout, ...]) -> str:
    """Groups with their stages."""
    texts = []
    for layout in layouts:
        stages = " ".join(f"{s.instance_id}:{_range(s.layers)}" for s in layout.stages)
        texts.append(f"g{layout.group_id}[{stages}]")
    return " ".join(texts)


def _sources(sources: tuple[LayerSource, ...]) -> str:
    texts = [
        f" {_range(s.layers)}@{'disk' if s.instance_id is None else s.instance_id}" for s in sources
    ]
    return f", pulls{''.join(texts)}" if texts else ""


def _kv(kv: SequenceKv) -> str:
    shared = "".join(_part(part) for part in kv.shared)
    return f"{kv.request_id}:{kv.num_blocks}/{kv.max_stored_tokens}{shared}"


def _part(part: PrefixPart) -> str:
    return f"({part.prefix_id} to {part.end_block})"


def _range(layers: tuple[int, int]) -> str:
    first, end = layers
    return f"{first}-{end}"


def _refusal(refusal: str | None) -> str:
    return "" if refusal is None else f": refused, {refusal}"


def _listed(names: Iterable[object]) -> str:
    return " ".join(str(name) for name in names) or "none"
