"""An instance's part in live migrations: one request may leave while another one comes."""

from typing import TypeAlias

from kunserve.control.instance.migration_source import MigrationSource
from kunserve.control.instance.migration_target import MigrationTarget
from kunserve.control.instance.state import InstanceState
from kunserve.core.ids import RequestId
from kunserve.core.messages import (
    EndMigration,
    HandOff,
    KvDropped,
    KvMoved,
    Migrate,
    OfferKv,
    Submit,
    WithdrawKv,
)
from kunserve.core.transfer import KvPull

MigrationMessage: TypeAlias = (
    Migrate | HandOff | EndMigration | OfferKv | WithdrawKv | KvMoved | KvDropped
)


class Migration:
    """Passes on what concerns whom."""

    def __init__(self, seat: InstanceState) -> None:
        self._departure = MigrationSource(seat)
        self._arrival = MigrationTarget(seat)

    @property
    def is_busy(self) -> bool:
        """Whether a request is on its way from here or to here."""
        return self._departure.is_busy or self._arrival.is_busy

    def hear(self, message: MigrationMessage, is_busy: bool) -> None:
        """Word of the controller or of the other side; ``is_busy`` with a transition."""
        match message:
            case Migrate():
                self._departure.begin(message, is_busy)
            case OfferKv():
                self._arrival.offer(message, is_busy)
            case WithdrawKv(migration_id):
                self._arrival.ended(migration_id)
            case EndMigration(migration_id):
                self._arrival.ended(migration_id)
                self._departure.hear(message)
            case HandOff() | KvMoved() | KvDropped():
                self._departure.hear(message)

    def pump(self) -> None:
        """Take whatever step has become possible."""
        self._departure.pump()
        self._arrival.pump()

    def pulled(self, piece: KvPull, ok: bool) -> None:
        """The mover filled a piece, or its source would not give it."""
        self._arrival.pulled(piece, ok)

    def submit(self, message: Submit) -> bool:
        """A request for this instance to serve; True if its KV is coming already."""
        return self._arrival.submit(message)

    def abort(self, request_id: RequestId) -> bool:
        """The client is gone; True if the request was still on its way here."""
        self._departure.ends(request_id, "aborted")
        return self._arrival.abort(request_id)

    def release(self, request_id: RequestId) -> None:
        """The request's blocks here are about to be freed: it ended, or was preempted."""
        self._departure.ends(request_id, "ended or preempted")

    def make_room(self) -> None:
        """A step lacks units, perhaps because of blocks in transfer."""
        self._departure.make_room()
