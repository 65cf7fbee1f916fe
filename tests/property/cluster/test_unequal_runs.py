"""Instances that draw different tokens of the same request, as batches on GPUs do.

A request runs again after a death, a broken link or a transition that failed. Whatever words of
the earlier run are still on their way then, its client gets one run's tokens up to some place and
another run's from there on: every token was drawn after exactly those that the client has before
it.
"""

import itertools
from collections.abc import Iterator

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kunserve.control.instance.body import SampleWork, StepWork
from kunserve.core.ids import InstanceId
from kunserve.core.request import FinishReason, Request
from kunserve.core.step import SampledToken
from kunserve_lab.world.by_choice import ChosenMember
from kunserve_lab.world.fake_body import FakeBody, FakeModel
from kunserve_lab.world.fake_model import Uint64Array, draw, last_hidden, mix_one
from tests.chaos_cluster import ChaosCluster, play
from tests.chaos_events import Happening, Harm, Load, Run, Setting, Wait
from tests.property.cluster.test_chaos import NUM_SCHEDULES


def unequal(token_id: int, process: int, model: FakeModel) -> int:
    """What a process draws where the model would have drawn ``token_id``."""
    return mix_one(token_id, process) % model.vocab_size


class UnequalBody(FakeBody):
    """Draws other tokens than each other process, though always the same ones of the same text."""

    process = 0

    def _sample(self, work: StepWork | SampleWork, rows: Uint64Array) -> Iterator[SampledToken]:
        for sampled in super()._sample(work, rows):
            token_id = sampled.token_id
            assert token_id is not None
            yield sampled._replace(token_id=unequal(token_id, self.process, self._model))


class UnequalCluster(ChaosCluster):
    """Chaos among instances that do not agree."""

    def make_member(self, instance_id: InstanceId) -> ChosenMember:
        """A process of its own."""
        member = super().make_member(instance_id)
        member.body.__class__ = UnequalBody
        assert isinstance(member.body, UnequalBody)
        member.body.process = self._num_processes
        return member

    def prove_tokens(self) -> None:
        """Each token of every request is some process's word after those before it."""
        for request_id, account in self.accounts.items():
            for position, token_id in enumerate(account.token_ids):
                drawn = self._drawn_after(account.request, account.token_ids[:position])
                assert token_id in drawn, (request_id, position, account.token_ids)
            if account.end in (FinishReason.LENGTH, FinishReason.STOP):
                assert len(account.token_ids) == account.request.sampling.max_tokens, request_id
            else:
                assert account.is_cancelled or request_id in self.poison, (request_id, account)

    def _drawn_after(self, request: Request, tokens: list[int]) -> set[int]:
        forward = last_hidden(self.model)
        text = list(itertools.chain(request.prompt_token_ids, tokens))
        hidden = [forward(token_id, position) for position, token_id in enumerate(text)][-1]
        value = draw(hidden, request.sampling, len(tokens), text) % self.model.vocab_size
        return {unequal(value, n, self.model) for n in range(1, self._num_processes + 1)}


_loads = st.builds(
    Load, st.integers(1, 4), st.integers(1, 8), st.integers(4, 10), st.just(False), st.just(0)
)
_runs = st.builds(Run, st.integers(1, 60), st.integers(0, 2**16))
_waits = st.builds(Wait, st.sampled_from([0.1, 0.6]))
_harms = st.builds(
    Harm,
    st.sampled_from(["drop", "drop", "restore", "kill", "start", "lose", "double", "cancel"]),
    st.integers(0, 7),
)
_schedules = st.lists(st.one_of(_loads, _runs, _runs, _waits, _harms, _harms), min_size=12)


@pytest.mark.timeout(600)
@settings(max_examples=NUM_SCHEDULES // 2)
@given(num_instances=st.integers(2, 4), schedule=_schedules)
def test_a_client_gets_no_token_that_was_drawn_after_others_than_it_has(
    num_instances: int, schedule: list[Happening]
) -> None:
    cluster = UnequalCluster(Setting(num_instances))
    play(cluster, schedule)
    cluster.heal()
    cluster.finish()
