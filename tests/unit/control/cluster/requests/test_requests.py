"""What the client gets when leaders change, and their words come late, early or twice."""

from kunserve.control.cluster.commands import Deliver, LogRerun, Outbox, Send
from kunserve.control.cluster.requests.requests import Requests
from kunserve.core.ids import GroupId, InstanceId, RequestId
from kunserve.core.kv_blocks import KvBlocks
from kunserve.core.messages import Outputs, Submit, TokenOutput
from kunserve.core.prompt_scores import PromptScores, pack_scores
from kunserve.core.request import FinishReason, Request, SamplingParams, TokenLogprobs
from tests.unit.control.cluster.brain import drained
from tests.unit.control.cluster.test_placement import placed

REQUEST = Request(RequestId("r"), (1, 2), SamplingParams(max_tokens=9), 0.0)
OLD, NEW = InstanceId(0), InstanceId(1)


class Followed:
    """One request, whose client keeps what it is given."""

    def __init__(self, request: Request = REQUEST) -> None:
        self._outbox = Outbox()
        self._delivered: list[TokenOutput] = []
        self._submits: list[tuple[InstanceId, int]] = []
        self.placement = placement = placed((OLD,), (NEW,))
        self.requests = Requests(placement, KvBlocks(4), 512, "soonest", self._outbox)
        self.requests.add(request, self._delivered.append, 0.0)

    def loses(self, *leaders: InstanceId) -> None:
        """These are told to form groups from nothing, and what they led runs again."""
        for leader in leaders:
            group = self.placement.led_by(leader)
            assert group is not None
            self.placement.begin_forming(group.layout.group_id)
        self.requests.rerun(set(leaders), {})

    @property
    def submits(self) -> list[tuple[InstanceId, int]]:
        """Who was sent the request, and with how many output tokens."""
        self._drain()
        return self._submits

    @property
    def scores(self) -> list[float]:
        """Of the prompt, as the client has them."""
        pieces = [piece for token in self.delivered for piece in token.prompt_scores]
        return [row.logprob for piece in pieces for row in piece.rows()]

    @property
    def delivered(self) -> list[TokenOutput]:
        self._drain()
        return self._delivered

    def _drain(self) -> None:
        for command in drained(self._outbox):
            if isinstance(command, Deliver):
                command.client(command.token)
            elif isinstance(command, Send) and isinstance(command.message, Submit):
                so_far = command.message.request.output_token_ids
                self._submits.append((command.instance_id, len(so_far)))


def says(leader: InstanceId, first: int, end: int, reason: FinishReason | None = None) -> Outputs:
    """Tokens [first, end), the last one with ``reason``."""
    reasons = [None] * (end - first - 1) + [reason]
    return Outputs(
        leader,
        tuple(
            TokenOutput(REQUEST.request_id, position, 100 + position, None, why)
            for position, why in zip(range(first, end), reasons, strict=True)
        ),
    )


def test_the_new_leaders_tokens_wait_for_the_old_leaders_last() -> None:
    client = Followed()
    client.requests.deliver(says(OLD, 0, 2))
    client.requests.deliver(says(NEW, 4, 6, FinishReason.LENGTH))
    client.requests.deliver(says(NEW, 3, 4))
    assert [token.position for token in client.delivered] == [0, 1]
    client.requests.deliver(says(OLD, 2, 3))
    assert [token.token_id for token in client.delivered] == [100, 101, 102, 103, 104, 105]
    assert client.delivered[-1].finish_reason is FinishReason.LENGTH
    assert len(client.requests) == 0


def test_an_end_without_a_token_waits_too() -> None:
    client = Followed()
    end = TokenOutput(REQUEST.request_id, 1, None, None, FinishReason.ERROR)
    client.requests.deliver(Outputs(NEW, (end,)))
    assert not client.delivered
    client.requests.deliver(says(OLD, 0, 1))
    assert client.delivered[-1] == end
    assert len(client.requests) == 0


def test_repeats_of_a_re_run_are_not_delivered() -> None:
    client = Followed()
    client.requests.deliver(says(OLD, 0, 3))
    client.requests.deliver(says(NEW, 1, 4))
    assert [token.position for token in client.delivered] == [0, 1, 2, 3]


def test_what_a_dead_leader_said_too_early_is_forgotten() -> None:
    client = Followed()
    client.requests.deliver(says(OLD, 0, 1))
    client.requests.deliver(says(NEW, 2, 4))
    client.requests.rerun({OLD}, {})
    client.requests.deliver(says(OLD, 1, 2))
    assert [token.position for token in client.delivered] == [0, 1]


def test_late_words_of_a_run_do_not_count_once_there_is_another() -> None:
    """The two may have drawn different tokens."""
    client = Followed()
    client.requests.deliver(says(OLD, 0, 1))
    client.loses(OLD)
    assert client.submits == [(OLD, 0), (NEW, 1)]
    client.requests.deliver(says(OLD, 1, 3, FinishReason.LENGTH))
    assert len(client.delivered) == 1
    client.requests.deliver(says(NEW, 1, 3, FinishReason.STOP))
    assert [token.position for token in client.delivered] == [0, 1, 2]
    assert client.delivered[-1].finish_reason is FinishReason.STOP


def test_until_then_they_do_and_the_next_run_goes_on_behind_them() -> None:
    client = Followed()
    client.loses(OLD, NEW)
    assert client.submits == [(OLD, 0)]
    client.requests.deliver(says(NEW, 0, 1))
    assert not client.delivered, "it never ran there"
    client.requests.deliver(says(OLD, 0, 2))
    assert [token.position for token in client.delivered] == [0, 1]
    client.placement.formed(GroupId(1), NEW)
    client.requests.place_if_changed()
    assert client.submits == [(OLD, 0), (NEW, 2)]
    client.requests.deliver(says(OLD, 2, 3))
    assert len(client.delivered) == 2


SCORED = Request(
    RequestId("r"), tuple(range(8)), SamplingParams(max_tokens=9, num_prompt_logprobs=1), 0.0
)
"""A prompt with scores 0 to 6."""


def scores(first: int, end: int, request: Request = SCORED) -> PromptScores:
    rows = [TokenLogprobs(-float(index), 1, ((5, 0.0),)) for index in range(first, end)]
    return pack_scores(request.request_id, first, 1, rows)


def test_scores_come_with_the_first_token_in_order_and_once() -> None:
    client = Followed(SCORED)
    client.requests.deliver(Outputs(NEW, (), (scores(4, 6),)))
    client.requests.deliver(Outputs(NEW, says(NEW, 0, 2).tokens, (scores(6, 7),)))
    assert not client.delivered
    client.requests.deliver(Outputs(OLD, (), (scores(0, 3),)))
    client.requests.deliver(Outputs(OLD, (), (scores(0, 3), scores(2, 5))))
    assert [token.position for token in client.delivered] == [0, 1]
    assert client.scores == [0, -1, -2, -3, -4, -5, -6]
    assert client.delivered[1].prompt_scores == ()


def test_a_re_run_is_told_with_the_tokens_that_its_client_has() -> None:
    client = Followed(REQUEST)
    client.requests.deliver(says(OLD, 0, 2))
    client.requests.rerun({OLD}, {})
    told = [c for c in drained(client._outbox) if isinstance(c, LogRerun)]
    assert told == [LogRerun(REQUEST.request_id, 2)]


def test_a_re_run_is_asked_for_the_missing_scores_only() -> None:
    client = Followed(SCORED)
    client.requests.deliver(Outputs(OLD, (), (scores(0, 3), scores(5, 7))))
    client.requests.rerun({OLD}, {})
    sent = [c.message for c in drained(client._outbox) if isinstance(c, Send)]
    assert [submit.request.num_scored for submit in sent] == [0, 3]
    # What lay beyond the gap is computed again.
    client.requests.deliver(Outputs(OLD, says(OLD, 0, 1).tokens, (scores(3, 5),)))
    assert not client.delivered
    client.requests.deliver(Outputs(OLD, (), (scores(5, 7),)))
    assert client.scores == [0, -1, -2, -3, -4, -5, -6]


def test_an_error_does_not_wait_for_scores() -> None:
    client = Followed(SCORED)
    end = TokenOutput(SCORED.request_id, 0, None, None, FinishReason.ERROR)
    client.requests.deliver(Outputs(OLD, (end,), (scores(0, 3),)))
    assert client.delivered == [end]
