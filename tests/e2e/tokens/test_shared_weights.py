"""A served cluster whose instances share one copy of the weights: tokens, memory, deaths, joins."""

import asyncio
from dataclasses import replace
from pathlib import Path

import pytest

from kunserve.cluster.driver.local import LocalCluster
from kunserve.core.config import KunServeConfig, OverloadConfig
from kunserve.core.errors import InvalidRequest
from kunserve.core.ids import InstanceId
from kunserve.core.plan import Measured
from kunserve.server.start.plan import shared_weights_line
from tests.e2e.tokens.asked_cluster import (
    GREEDY,
    NUM_TOKENS,
    PROMPTS,
    QUEUED,
    QUEUED_TOKENS,
    Answers,
    config_of,
    run,
)
from tests.e2e.tokens.test_ranked_cluster import ranked
from tests.tiny_models import VOCAB, greedy_after, tiny_model

pytestmark = pytest.mark.timeout(300)  # a busy machine; what is waited for has its own deadlines
NUM_LAYERS = 5
SHARED = Measured(weight_sharers=2)


def config_in(folder: Path) -> KunServeConfig:
    """Memory for a few requests at a time, so that a drop would be made."""
    tiny_model("llama3", NUM_LAYERS).save_pretrained(folder)
    config = config_of(str(folder), "float32", 2, 24 * NUM_LAYERS * 2 * 8 * 2 * 32 * 4)
    cluster = replace(config.cluster, topology=None)
    return replace(config, cluster=cluster, overload=OverloadConfig(policy="drop"))


def check_tokens(answers: Answers) -> None:
    model = tiny_model("llama3", NUM_LAYERS)
    for name, tokens in answers.tokens.items():
        assert tokens == greedy_after(model, answers.wanted[name].prompt, tokens), name


def ask_all(answers: Answers) -> None:
    for name, prompt in (PROMPTS | QUEUED).items():
        num_tokens = NUM_TOKENS.get(name, QUEUED_TOKENS)
        answers.ask(name, prompt, num_tokens, GREEDY, wants_scores=False)


def copies_of(pid: int) -> dict[str, int]:
    """Inodes of weights that a process has mapped, with the bytes that count as its own."""
    found: dict[str, int] = {}
    inode = None
    for line in Path(f"/proc/{pid}/smaps").read_text().splitlines():
        name, *fields = line.split(maxsplit=5)
        if not name.endswith(":"):
            is_copy = fields[-1].startswith("/memfd:kunserve-weights")
            inode = fields[3] if is_copy else None
            assert not is_copy or fields[0] == "r--s", line
        elif inode is not None and name == "Pss:":
            found[inode] = found.get(inode, 0) + int(fields[0]) * 1024
    return found


def copies(cluster: LocalCluster) -> list[dict[str, int]]:
    pids = [cluster.pid_of(spec.spec.instance_id) for spec in cluster.state().instances]
    return [copies_of(pid) for pid in pids if pid is not None]


@pytest.mark.parametrize("num_ranks", [1, 2])
def test_two_instances_have_one_copy(tmp_path: Path, num_ranks: int) -> None:
    async def story(cluster: LocalCluster, answers: Answers) -> None:
        ask_all(answers)
        await answers.all()
        state = cluster.state()
        assert state.num_drops == 0 and len(state.groups) == 2
        specs = [instance.spec for instance in state.instances]
        weights_bytes = specs[0].shared_weights_bytes
        one, other = copies(cluster)
        assert one.keys() == other.keys() and len(one) == num_ranks
        total = sum(one.values()) + sum(other.values())
        if num_ranks == 1:  # ranks other than the first have it mapped too
            assert total == pytest.approx(weights_bytes, abs=2 * 4096)
        line = str(shared_weights_line(specs))
        assert line.startswith("weights ") and " once for 2 instances, KV " in line
        with pytest.raises(InvalidRequest, match="weights are shared, nothing to drop"):
            await cluster.drop(None)

    config = ranked(config_in(tmp_path), num_ranks)
    check_tokens(run(config, VOCAB, story, measured=SHARED))


def test_who_dies_comes_back_to_the_copy_and_who_joins_finds_it(tmp_path: Path) -> None:
    """The files of the model are gone meanwhile, but for their headers."""

    async def story(cluster: LocalCluster, answers: Answers) -> None:
        ask_all(answers)
        await answers.have(1)
        before = copies(cluster)[0].keys()
        await cluster.kill(InstanceId(0))
        await cluster.scale(3)
        await answers.all()
        async with asyncio.timeout(90.0):
            while cluster.vitals().num_missing or len(cluster.state().groups) < 3:
                await asyncio.sleep(0.05)
        assert [found.keys() for found in copies(cluster)] == [before] * 3
        units = {instance.spec.kv_units for instance in cluster.state().instances}
        assert len(units) == 1, "who joins has as much memory for KV"

    check_tokens(run(config_in(tmp_path), VOCAB, story, measured=SHARED))
