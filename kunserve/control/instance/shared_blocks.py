"""Who shares whose blocks on one instance: requests begin with blocks of the prefix cache."""

from collections.abc import Iterator, Mapping
from typing import NamedTuple

from kunserve.core.ids import PrefixId, RequestId


class Loan(NamedTuple):
    """Blocks [first_block, end_block) of a request are those of a prefix, at the same places."""

    prefix_id: PrefixId
    first_block: int
    end_block: int


class SharedBlocks:
    """Owner of the shares: a block that is lent is not freed."""

    def __init__(self) -> None:
        self._of: dict[RequestId, list[Loan]] = {}
        self._borrowers: dict[RequestId, list[RequestId]] = {}

    def of(self, request_id: RequestId) -> list[Loan]:
        """What a request has borrowed, block after block from its first."""
        return self._of.get(request_id, [])

    def num_blocks(self, request_id: RequestId) -> int:
        """Blocks that a request has borrowed: its first."""
        loans = self._of.get(request_id)
        return loans[-1].end_block if loans else 0

    def borrowers(self, holder: RequestId) -> list[RequestId]:
        """Who has borrowed of a prefix."""
        return self._borrowers.get(holder, [])

    def lent_end(self, holder: RequestId) -> int:
        """The block behind the holder's last that is lent; 0 if none is."""
        return max(
            (
                loan.end_block
                for borrower in self.borrowers(holder)
                for loan in self._of[borrower]
                if loan.prefix_id == holder
            ),
            default=0,
        )

    def add(self, request_id: RequestId, loan: Loan) -> None:
        """The request's next blocks are borrowed."""
        assert loan.first_block == self.num_blocks(request_id) < loan.end_block, loan
        self._of.setdefault(request_id, []).append(loan)
        self._borrowers.setdefault(loan.prefix_id, []).append(request_id)

    def cut(self, request_id: RequestId, num_blocks: int) -> None:
        """Only the request's first ``num_blocks`` are borrowed, if so many are."""
        loans = self._of.get(request_id)
        while loans and loans[-1].end_block > num_blocks:
            prefix_id, first_block, _ = loans.pop()
            if first_block < num_blocks:
                loans.append(Loan(prefix_id, first_block, num_blocks))
                return
            self._forget(prefix_id, request_id)
        if loans is not None and not loans:
            del self._of[request_id]

    def move(self, request_id: RequestId, ids: Mapping[PrefixId, PrefixId]) -> None:
        """What the request has borrowed of a prefix it has of that one's copy from now on."""
        loans = list(self.of(request_id))
        self.cut(request_id, 0)
        for prefix_id, first_block, end_block in loans:
            self.add(request_id, Loan(ids.get(prefix_id, prefix_id), first_block, end_block))

    def _forget(self, prefix_id: PrefixId, request_id: RequestId) -> None:
        borrowers = self._borrowers[prefix_id]
        borrowers.remove(request_id)
        if not borrowers:
            del self._borrowers[prefix_id]

    def __iter__(self) -> Iterator[tuple[RequestId, Loan]]:
        return ((borrower, loan) for borrower, loans in self._of.items() for loan in loans)

    def check(self) -> None:
        """Assert that both sides tell the same."""
        named = sorted((loan.prefix_id, borrower) for borrower, loan in self)
        known = sorted((p, b) for p, borrowers in self._borrowers.items() for b in borrowers)
        assert named == known, (named, known)
        for loans in self._of.values():
            end = 0
            for loan in loans:
                assert loan.first_block == end < loan.end_block, loans
                end = loan.end_block
