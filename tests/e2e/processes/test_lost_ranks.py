"""A rank that dies, stands still or cannot start: nobody waits for it, and none is left behind."""

import os
import signal
import threading
import time
from contextlib import closing
from pathlib import Path

import pytest

from kunserve.cluster.processes.launch import blame_for
from kunserve.control.cluster.requests.quarantine import Cause
from kunserve.core.config import InstanceConfig, KunServeConfig, ModelConfig
from kunserve.core.errors import ConfigError, ModelFiles, TooLittleMemory
from kunserve.core.faults import Fault
from kunserve.core.ids import InstanceId
from kunserve.core.layout import LayerRange
from kunserve.engine.body import EngineBody
from kunserve.model.source import resolve_model
from kunserve.transport.children.child import Child
from kunserve_extras.ranks import processes
from kunserve_extras.ranks.backend import RankedBackend
from kunserve_extras.ranks.meeting import Meeting, RankLost
from kunserve_extras.ranks.processes import Start
from tests.direct_engine import DirectEngine
from tests.extras.ranks.forked_ranks import ForkedRank, fork_member
from tests.tiny_models import save_tiny

WHOLE = LayerRange(0, 2)
PROMPT = [[5, 6, 7, 8]]


class Deaths:
    """What ``on_death`` is told."""

    def __init__(self) -> None:
        self.seen: list[tuple[int, int]] = []
        self.event = threading.Event()

    def __call__(self, rank: int, code: int) -> None:
        self.seen.append((rank, code))
        self.event.set()


def lose_a_rank(
    body: EngineBody,
    deaths: Deaths,
    prompts: list[list[int]],
    number: signal.Signals = signal.SIGKILL,
    fault: Fault = Fault.UNKNOWN,
) -> None:
    """Rank 1 dies while steps run: one of them ends with that, and so does the next drop.

    Both tell whose doing it was.
    """
    engine = DirectEngine([(body, LayerRange(0, body.spec.num_layers))])
    engine.generate(prompts, 2)
    (pid,) = body.other_pids
    os.kill(pid, number)
    with pytest.raises(RankLost) as lost:
        while True:
            engine.generate(prompts, 2)
    assert lost.value.fault is fault
    assert deaths.event.wait(30.0)
    assert deaths.seen == [(1, -number)]
    with pytest.raises(RankLost) as lost:
        body.memory.drop(LayerRange(0, 1))
    assert lost.value.fault is fault


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny(tmp_path_factory.mktemp("model"), "qwen3", 2)


def open_ranks(
    folder: Path,
    num_ranks: int = 2,
    *,
    deaths: Deaths | None = None,
    dies_too: bool = False,
    memory_bytes: int = 2 << 20,
    start: Start = fork_member,
) -> EngineBody:
    model = ModelConfig(str(folder), dtype="float32")
    source = resolve_model(str(folder))
    config = InstanceConfig(
        memory_bytes=memory_bytes,
        granule_bytes=8192,
        block_size=8,
        tensor_parallel_size=num_ranks,
    )
    on_death = None if dies_too else deaths or Deaths()
    backend = RankedBackend(model, source, num_ranks, start, on_death)
    return EngineBody(InstanceId(0), model, config, source, backend=backend)


@pytest.mark.parametrize(
    ("number", "fault"), [(signal.SIGKILL, Fault.UNKNOWN), (signal.SIGSEGV, Fault.REQUEST)]
)
def test_a_step_ends_when_a_rank_has_died(
    number: signal.Signals, fault: Fault, folder: Path
) -> None:
    """What it computed is to blame only if nobody else has ended it."""
    deaths = Deaths()
    with closing(open_ranks(folder, deaths=deaths)) as body:
        lose_a_rank(body, deaths, PROMPT, number, fault)


def test_an_error_behind_a_word_leaves_the_next_word_its_answers(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before, whoever spoke next waited for ever."""
    with closing(open_ranks(folder)) as body:
        with monkeypatch.context() as patch, pytest.raises(ZeroDivisionError):
            patch.setattr(body.memory.shards[0], "drop", lambda keep: 1 // 0)
            body.memory.drop(WHOLE)
        assert body.memory.drop(LayerRange(0, 1)).moved_bytes > 0
        body.check()


def test_a_step_ends_when_a_rank_stands_still(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    meetings: list[Meeting] = []

    def watched(*arguments: int, **named: float) -> Meeting:
        meetings.append(Meeting(*arguments, **named))
        return meetings[-1]

    monkeypatch.setattr(processes, "Meeting", watched)
    with closing(open_ranks(folder)) as body:
        meetings[0].as_c.patience_ns = 300_000_000
        (pid,) = body.other_pids
        os.kill(pid, signal.SIGSTOP)
        with pytest.raises(RankLost, match="stood still for too long") as lost:
            DirectEngine([(body, WHOLE)]).generate(PROMPT, 2)
        assert lost.value.fault is Fault.MACHINE
        os.kill(pid, signal.SIGCONT)


def test_none_is_left_behind(folder: Path) -> None:
    body = open_ranks(folder, 4)
    pids = body.other_pids
    assert len(pids) == 3
    body.close()
    for pid in pids:
        with pytest.raises(ProcessLookupError):
            os.kill(pid, 0)


def test_what_one_rank_refuses_the_instance_refuses(folder: Path) -> None:
    """The first one to say so is heard, and the others end."""
    started: list[ForkedRank] = []

    def start(end: object) -> ForkedRank:
        started.append(fork_member(end))  # type: ignore[arg-type]
        return started[-1]

    with pytest.raises(TooLittleMemory, match="per rank of an instance of 2"):
        open_ranks(folder, memory_bytes=1 << 18, start=start)
    with pytest.raises(ConfigError, match="leave --quantization gguf out"):
        KunServeConfig(
            model=ModelConfig(quantization="gguf"), instance=InstanceConfig(tensor_parallel_size=2)
        )
    with pytest.raises(ConfigError, match="4 attention heads, which it does not divide"):
        open_ranks(folder, 3, start=start)
    assert not started, "bad settings start nobody"


def test_a_rank_that_cannot_read_its_files(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The fork reads what it finds: nothing."""

    def start(end: object) -> ForkedRank:
        with monkeypatch.context() as patch:
            patch.setattr("kunserve.engine.weights.readers.SafetensorsReader.check", _truncated)
            return fork_member(end)  # type: ignore[arg-type]

    with pytest.raises(ModelFiles, match="truncated"):
        open_ranks(folder, start=start)


def _truncated(*args: object) -> None:
    raise ModelFiles("model.safetensors: truncated")


def test_a_rank_that_ends_without_a_word(folder: Path) -> None:
    def start(end: object) -> Child:
        return Child(["-S", "-c", "raise SystemExit(7)"])

    with pytest.raises(ConfigError, match="rank 1 of the instance did not start: exit code 7"):
        open_ranks(folder, start=start)


@pytest.mark.parametrize(
    ("signal_number", "cause"), [(signal.SIGKILL, Cause.OUTSIDE), (signal.SIGSEGV, Cause.INSIDE)]
)
def test_the_instance_ends_as_its_rank_has(
    signal_number: signal.Signals, cause: Cause, folder: Path
) -> None:
    """So that whoever watches the instance blames its requests only for what they may have done."""
    pid = os.fork()
    if pid == 0:
        try:
            body = open_ranks(folder, dies_too=True)
            os.kill(body.other_pids[0], signal_number)
            time.sleep(60.0)
        finally:
            os._exit(0)
    code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    assert blame_for(code, b"").cause is cause
    assert code != 0
