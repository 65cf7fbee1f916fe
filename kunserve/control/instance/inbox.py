"""Which message an instance reads now, which one later, which one never.

Messages of one sender come in the order of sending, those of two senders in any order. So a
message may come before its time, because another instance is ahead; or too late, because what it
speaks of is over. ``when_to_read`` decides; the ``Inbox`` keeps what is for later.
"""

from collections.abc import Callable
from typing import Any, Literal, NamedTuple, TypeAlias

from kunserve.core.ids import GroupId, RequestId, TransitionId
from kunserve.core.messages import (
    Abort,
    Activation,
    AllowParking,
    Commit,
    EndMigration,
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
    OfferRefused,
    OfferTaken,
    ResetPrefixCache,
    Rollback,
    Sampled,
    Shutdown,
    Submit,
    WithdrawKv,
)
from kunserve.core.step import StepResult

MAX_OVERTAKERS = 1024
"""Aborts and rollbacks kept for what they withdraw. The oldest is for something long over."""

_RESET = ResetPrefixCache()

When: TypeAlias = Literal["now", "later", "never"]


class Moment(NamedTuple):
    """What the decision depends on: where an instance stands and what changes there."""

    group_id: GroupId | None
    """In which it stands; None before the first."""
    formed_id: GroupId | None
    """The last group that was formed from nothing; requests of older groups run again elsewhere."""
    leads: bool
    is_forming: bool
    """A ``Form`` waits for the running step."""
    is_quiescing: bool
    """It has committed and waits for its new group."""
    change_id: TransitionId | None
    """Of the transition or migration under way."""
    has_switched: bool
    """It has entered the new group of the transition under way."""
    knows: Callable[[RequestId], bool]
    """Whether the instance can abort the request, or knows who can."""


def when_to_read(message: Message, moment: Moment) -> When:
    """When a message is to be read, at the earliest.

    ===================  ======================  ===========================  =================
    message              now                     later                        never
    ===================  ======================  ===========================  =================
    Form, Shutdown       always                  -                            -
    all others           as below                without a group, or while    -
                                                 one waits to be formed
    Activation           of this group           of a younger group           of an older group
    Sampled, FinalRows,  of this group           -                            of another group
    HeadPart
    Submit               to any group            while quiescing              forwarded before a
                                                                              failure
    Abort                its request is known    while quiescing; when it     -
                                                 overtook its ``Submit``
    Rollback             of the present change   on a follower: it overtook   on a leader
                                                 its ``LoadLayers``
    LoadLayers,          for this group          -                            for another group
    AllowParking
    ResetPrefixCache     in any group            while quiescing              without a group
    KvMoved, KvDropped,  of the present change   of the present change        of another change
    ExchangeProgress     after the switch        before the switch
    other words on a     of the present change   -                            of another change
    change
    orders               always                  -                            -
    ===================  ======================  ===========================  =================
    """
    match message:
        case Form() | Shutdown():
            return "now"
        case ResetPrefixCache():
            return _by_cache(moment)
        case _ if moment.is_forming or moment.group_id is None:
            return "later"
        case Activation(plan):
            return _by_group(plan.group_id, moment.group_id)
        case Sampled(StepResult(group_id)) | FinalRows(group_id) | HeadPart(group_id):
            return "now" if group_id == moment.group_id else "never"
        case Submit(_, group_id):
            formed_id = moment.formed_id
            if group_id is not None and formed_id is not None and group_id < formed_id:
                return "never"
            return "later" if moment.is_quiescing else "now"
        case Abort(request_id):
            return "now" if moment.knows(request_id) and not moment.is_quiescing else "later"
        case Rollback(transition_id):
            if transition_id == moment.change_id:
                return "now"
            return "never" if moment.leads else "later"
        case LoadLayers() | AllowParking():
            return "now" if message.group_id == moment.group_id else "never"
        case KvMoved() | KvDropped() | ExchangeProgress():
            return _by_switch(message.transition_id, moment)
        case Commit() | Handover() | LayersDropped():
            return "now" if message.transition_id == moment.change_id else "never"
        case HandOff() | EndMigration() | OfferTaken() | OfferRefused() | WithdrawKv():
            return "now" if message.migration_id == moment.change_id else "never"
    return "now"


def _by_cache(moment: Moment) -> When:
    """What moves to the next group is meant too. One that is formed from nothing has no cache."""
    if moment.is_forming or moment.group_id is None:
        return "never"
    return "later" if moment.is_quiescing else "now"


def _by_switch(transition_id: TransitionId, moment: Moment) -> When:
    if transition_id != moment.change_id:
        return "never"
    return "now" if moment.has_switched else "later"


def is_plain(message: Message, present: GroupId, *, is_calm: bool) -> bool:
    """Whether ``when_to_read`` says "now" to an instance in that group, unless it is forming one.

    Nothing else is asked of what stages tell each other for every microbatch; nor of a new request,
    where nothing waits in the inbox, or for the next group (``is_calm``).
    """
    match message:
        case Activation(plan):
            return plan.group_id == present
        case FinalRows(group_id) | HeadPart(group_id):
            return group_id == present
        case Submit(_, None):
            return is_calm
    return False


def _by_group(group_id: GroupId, present: GroupId) -> When:
    """Ids of groups only grow."""
    if group_id == present:
        return "now"
    return "later" if group_id > present else "never"


class Mail(NamedTuple):
    """A message, and the hidden states that came with it."""

    message: Message
    hidden: Any


class Inbox:
    """Owner of what came before its time."""

    def __init__(self) -> None:
        self._waiting: list[Mail] = []
        """In order of coming."""
        self._withdrawn: set[RequestId | TransitionId] = set()
        """What waiting aborts and rollbacks are about."""
        self._seen: Moment | None = None
        """All that waits is for later than this moment."""

    @property
    def waiting(self) -> tuple[Message, ...]:
        """What is kept for later."""
        return tuple(mail.message for mail in self._waiting)

    @property
    def has_mail(self) -> bool:
        """Whether anything is kept for later."""
        return bool(self._waiting)

    @property
    def may_be_due(self) -> bool:
        """Whether something kept may become due though nothing else comes.

        What withdraws something is due only behind that. Most of it is for something long over: an
        abort that has crossed the end of its request stays here, and nobody shall wait for it.
        """
        is_looked_at = self._seen is not None or not self._waiting
        return not is_looked_at or len(self._waiting) > len(self._withdrawn)

    def accept(self, mail: Mail, moment: Moment) -> bool:
        """Whether the mail is to be read now; what is for later is kept."""
        when = when_to_read(mail.message, moment)
        if when == "later":
            self._keep(mail)
        elif when == "now" and self._withdrawn:
            match mail.message:
                case Submit(request) if request.request_id in self._withdrawn:
                    self._seen = None
                case LoadLayers(transition_id) if transition_id in self._withdrawn:
                    self._seen = None
        return when == "now"

    def _keep(self, mail: Mail) -> None:
        withdrawn = _withdrawn_by(mail.message)
        if withdrawn in self._withdrawn:
            return
        if mail.message == _RESET and _RESET in self.waiting:
            return
        self._waiting.append(mail)
        if withdrawn is None:
            return
        self._withdrawn.add(withdrawn)
        if len(self._withdrawn) > MAX_OVERTAKERS:
            kinds = (_withdrawn_by(mail.message) for mail in self._waiting)
            self._take_out(next(i for i, kind in enumerate(kinds) if kind is not None))

    def _take_out(self, index: int) -> None:
        withdrawn = _withdrawn_by(self._waiting.pop(index).message)
        if withdrawn is not None:
            self._withdrawn.discard(withdrawn)

    def next_due(self, moment: Moment) -> Mail | None:
        """The first mail kept whose time has come, if any; what will never be read is dropped."""
        if moment == self._seen:
            return None
        index = 0
        while index < len(self._waiting):
            mail = self._waiting[index]
            when = when_to_read(mail.message, moment)
            if when == "later":
                index += 1
                continue
            self._take_out(index)
            if when == "now":
                return mail
        self._seen = moment
        return None

    def start_anew(self) -> None:
        """A ``Form`` has come: only microbatches may still be wanted of what came before it."""
        self._waiting = [mail for mail in self._waiting if isinstance(mail.message, Activation)]
        self._withdrawn.clear()

    def check(self, moment: Moment) -> None:
        """Assert that all that waits is for later."""
        for message in self.waiting:
            assert when_to_read(message, moment) == "later", (message, moment)


def _withdrawn_by(message: Message) -> RequestId | TransitionId | None:
    """What an abort or a rollback is about."""
    match message:
        case Abort(request_id):
            return request_id
        case Rollback(transition_id):
            return transition_id
    return None
