"""Layers or experts: what must hold of the comparison, whatever the rates are."""

import pytest

from benchmarks.drop_unit import CASES, NVLINK, RDMA, TEN, Case, Link, Rounds, decodes, prompt
from kunserve_lab.sim.devices import find_device

FREE = Link("free", 1e18, 0.0)


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_experts_read_less_and_cross_more(case: Case) -> None:
    rounds = Rounds(case)
    for batch in (decodes(64), prompt(2048)):
        free_s, hidden_s = rounds.experts(batch, FREE)
        assert free_s == pytest.approx(hidden_s) and free_s <= rounds.alone(batch) * (1 + 1e-6)
        slow_s, slow_hidden_s = rounds.experts(batch, TEN)
        assert free_s < slow_s and slow_hidden_s <= slow_s
    assert rounds.experts(decodes(64), FREE)[0] < rounds.layers(decodes(64))


def test_a_fast_link_favours_experts_and_a_slow_one_layers() -> None:
    rounds = Rounds(Case("Qwen/Qwen3-30B-A3B", find_device("a800"), 1, (NVLINK, RDMA, TEN)))
    assert rounds.experts(decodes(64), NVLINK)[0] < rounds.layers(decodes(64))
    assert rounds.experts(prompt(2048), TEN)[0] > rounds.layers(prompt(2048))
