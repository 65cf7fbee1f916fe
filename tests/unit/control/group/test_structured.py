"""Structured outputs in the brain: their tokens so far go wherever they are sampled next."""

import pytest

from kunserve.core.ids import GroupId, InstanceId
from kunserve.core.request import SamplingParams, StructuredOutput
from tests.fake_cluster import FakeCluster

FORM = StructuredOutput("regex", "a+")
EOS = frozenset(range(0, 1000, 7))


@pytest.mark.parametrize("head_cost_layers", [None, 1.0], ids=["last stage", "shared head"])
def test_their_tokens_survive_a_drop_and_a_death(head_cost_layers: float | None) -> None:
    """Fake bodies draw such tokens from all that came before: one that is lost changes the next."""
    cluster = FakeCluster(pools=(12, 12), head_cost_layers=head_cost_layers)
    for number in range(6):
        cluster.request(
            5 + number,
            sampling=SamplingParams(12, temperature=number % 2, seed=number, structured=FORM),
        )
    accounts = cluster.accounts.values()
    cluster.run_until(lambda: all(len(account.token_ids) >= 2 for account in accounts))
    cluster.drop((0, 0, 2), (1, 2, 4))
    cluster.run_until(lambda: len(cluster.groups()) == 1)
    assert any(account.end is None for account in accounts)
    cluster.kill_instance(InstanceId(0))
    cluster.finish()


def test_a_form_says_where_an_output_ends() -> None:
    """Whoever ignores the end, or wants more tokens, does so in the sampler, as the form allows."""
    cluster = FakeCluster(eos_token_ids=EOS)
    for wishes in ({"ignore_eos": True}, {"min_tokens": 15}):
        plain = cluster.request(sampling=SamplingParams(15, temperature=0.0, **wishes))
        formed = cluster.request(
            sampling=SamplingParams(15, temperature=0.0, structured=FORM, **wishes)
        )
        cluster.run_until_idle()
        assert len(cluster.accounts[plain].token_ids) == 15
        tokens = cluster.accounts[formed].token_ids
        assert tokens[-1] in EOS or len(tokens) == 15
        assert not EOS & set(tokens[:-1])
    cluster.finish()
    assert GroupId(0) in cluster.controller.placement.groups
