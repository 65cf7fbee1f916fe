"""Row by row the table of ``when_to_read``, and what the inbox does with the answers."""

import pytest

from kunserve.control.instance.inbox import (
    MAX_OVERTAKERS,
    Inbox,
    Mail,
    Moment,
    When,
    is_plain,
    when_to_read,
)
from kunserve.core.ids import GroupId, InstanceId, RequestId, StepId, TransitionId
from kunserve.core.layout import GroupLayout, LayerRange, Stage
from kunserve.core.messages import (
    Abort,
    Activation,
    Commit,
    ExchangeProgress,
    FinalRows,
    Form,
    HandOff,
    Handover,
    HeadPart,
    KvDropped,
    KvMoved,
    LayersDropped,
    LoadLayers,
    Message,
    Migrate,
    OfferTaken,
    Prepare,
    ResetPrefixCache,
    Rollback,
    Sampled,
    Shutdown,
    Submit,
    WithdrawKv,
)
from kunserve.core.request import Request, SamplingParams
from kunserve.core.step import StepPlan, StepResult

ME = InstanceId(0)
KNOWN, UNKNOWN = RequestId("known"), RequestId("unknown")
CHANGE, OTHER = TransitionId(7), TransitionId(8)


def knows(request_id: RequestId) -> bool:
    return request_id == KNOWN


MOMENT = Moment(
    group_id=GroupId(5),
    formed_id=GroupId(3),
    leads=True,
    is_forming=False,
    is_quiescing=False,
    change_id=CHANGE,
    has_switched=False,
    knows=knows,
)


def activation(group_id: int) -> Activation:
    return Activation(StepPlan(GroupId(group_id), StepId(0), (), (), ()))


def sampled(group_id: int) -> Sampled:
    return Sampled(StepResult(GroupId(group_id), StepId(0), ()))


def rows(group_id: int) -> FinalRows:
    return FinalRows(GroupId(group_id), StepId(0), ())


def part(group_id: int) -> HeadPart:
    return HeadPart(GroupId(group_id), StepId(0), 0)


def submit(request_id: RequestId = UNKNOWN, group_id: int | None = None) -> Submit:
    request = Request(request_id, (1,), SamplingParams(1), 0.0)
    return Submit(request, None if group_id is None else GroupId(group_id))


def form() -> Form:
    return Form(GroupLayout(GroupId(9), (Stage(ME, LayerRange(0, 1)),)), ())


def progress(transition_id: TransitionId) -> ExchangeProgress:
    return ExchangeProgress(transition_id, ME, 0, (), 0, False)


def load(group_id: int, transition_id: TransitionId = OTHER) -> LoadLayers:
    return LoadLayers(transition_id, GroupId(group_id), 0, ())


@pytest.mark.parametrize(
    ("message", "changes", "when"),
    [
        (form(), {"group_id": None}, "now"),
        (form(), {"is_forming": True}, "now"),
        (Shutdown(), {"is_forming": True}, "now"),
        (activation(5), {"group_id": None}, "later"),
        (submit(), {"group_id": None}, "later"),
        (Commit(CHANGE), {"is_forming": True}, "later"),
        (activation(4), {}, "never"),
        (activation(5), {}, "now"),
        (activation(6), {}, "later"),
        (rows(4), {}, "never"),
        (rows(5), {}, "now"),
        (part(6), {}, "never"),
        (part(5), {"is_quiescing": True}, "now"),
        (sampled(4), {}, "never"),
        (sampled(5), {}, "now"),
        (submit(), {}, "now"),
        (submit(), {"is_quiescing": True}, "later"),
        (submit(group_id=4), {}, "now"),
        (submit(group_id=2), {}, "never"),
        (submit(group_id=2), {"formed_id": None}, "now"),
        (Abort(KNOWN), {}, "now"),
        (Abort(KNOWN), {"is_quiescing": True}, "later"),
        (Abort(UNKNOWN), {}, "later"),
        (Rollback(CHANGE), {}, "now"),
        (Rollback(OTHER), {}, "never"),
        (Rollback(OTHER), {"leads": False}, "later"),
        (load(5), {}, "now"),
        (load(4), {}, "never"),
        (ResetPrefixCache(), {}, "now"),
        (ResetPrefixCache(), {"is_quiescing": True}, "later"),
        (ResetPrefixCache(), {"is_forming": True}, "never"),
        (ResetPrefixCache(), {"group_id": None}, "never"),
        (KvMoved(CHANGE, KNOWN, 0, 1), {}, "later"),
        (KvMoved(CHANGE, KNOWN, 0, 1), {"has_switched": True}, "now"),
        (KvDropped(CHANGE, KNOWN), {"has_switched": True}, "now"),
        (KvDropped(OTHER, KNOWN), {"has_switched": True}, "never"),
        (progress(CHANGE), {}, "later"),
        (progress(OTHER), {}, "never"),
        (progress(CHANGE), {"change_id": None}, "never"),
        (Commit(CHANGE), {}, "now"),
        (Handover(OTHER, GroupId(5), (), ()), {}, "never"),
        (LayersDropped(CHANGE, ME), {}, "now"),
        (LayersDropped(OTHER, ME), {}, "never"),
        (HandOff(OTHER), {}, "never"),
        (OfferTaken(CHANGE, 1), {}, "now"),
        (WithdrawKv(OTHER), {}, "never"),
        (Prepare(OTHER, (), (), ()), {"is_quiescing": True}, "now"),
        (Migrate(OTHER, GroupId(5), ME, GroupId(6), 1), {}, "now"),
    ],
)
def test_when_a_message_is_read(message: Message, changes: dict[str, object], when: When) -> None:
    moment = MOMENT._replace(**changes)  # type: ignore[arg-type]
    assert when_to_read(message, moment) == when
    stands = not moment.is_forming and moment.group_id is not None
    is_calm = not moment.is_quiescing
    if stands and is_plain(message, GroupId(5), is_calm=is_calm):
        assert when == "now"
    is_new = isinstance(message, Submit) and message.group_id is None
    if stands and (is_new or isinstance(message, Activation | FinalRows | HeadPart)):
        assert is_plain(message, GroupId(5), is_calm=is_calm) == (when == "now")


def test_what_waits_comes_in_order_once_its_time_has_come() -> None:
    inbox, quiescing = Inbox(), MOMENT._replace(is_quiescing=True)
    waiting = [submit(), activation(6), Abort(KNOWN)]
    for message in waiting:
        assert not inbox.accept(Mail(message, "hidden"), quiescing)
    assert inbox.next_due(quiescing) is None
    inbox.check(quiescing)
    entered = MOMENT._replace(group_id=GroupId(6), change_id=None)
    for message in waiting:
        assert inbox.next_due(entered) == Mail(message, "hidden")
    assert inbox.next_due(entered) is None and not inbox.waiting


def test_what_is_of_no_use_any_more_is_dropped() -> None:
    inbox = Inbox()
    assert not inbox.accept(Mail(progress(CHANGE), None), MOMENT)
    assert inbox.next_due(MOMENT._replace(change_id=None)) is None
    assert not inbox.waiting


def test_an_abort_waits_for_the_request_that_it_has_overtaken() -> None:
    inbox, known = Inbox(), {KNOWN}
    moment = MOMENT._replace(knows=known.__contains__)
    assert not inbox.accept(Mail(Abort(UNKNOWN), None), moment)
    assert inbox.next_due(moment) is None
    assert inbox.accept(Mail(submit(UNKNOWN), None), moment)
    known.add(UNKNOWN)
    assert inbox.next_due(moment) == Mail(Abort(UNKNOWN), None)


def test_a_rollback_waits_for_the_order_that_it_has_overtaken() -> None:
    inbox, moment = Inbox(), MOMENT._replace(leads=False, change_id=None)
    assert not inbox.accept(Mail(Rollback(OTHER), None), moment)
    assert inbox.next_due(moment) is None
    assert inbox.accept(Mail(load(5), None), moment)
    assert inbox.next_due(moment._replace(change_id=OTHER)) == Mail(Rollback(OTHER), None)


def test_the_oldest_of_too_many_aborts_is_forgotten() -> None:
    inbox = Inbox()
    for number in range(MAX_OVERTAKERS + 3):
        for _ in range(2):
            inbox.accept(Mail(Abort(RequestId(f"r{number}")), None), MOMENT)
    assert len(inbox.waiting) == MAX_OVERTAKERS
    assert inbox.waiting[0] == Abort(RequestId("r3"))


def test_a_form_leaves_only_microbatches() -> None:
    inbox, quiescing = Inbox(), MOMENT._replace(is_quiescing=True)
    for message in (submit(), activation(6), Abort(UNKNOWN), progress(CHANGE)):
        inbox.accept(Mail(message, None), quiescing)
    inbox.start_anew()
    assert inbox.waiting == (activation(6),)
