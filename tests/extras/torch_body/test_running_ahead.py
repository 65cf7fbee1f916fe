"""A device is asked for the next step before the last one's tokens are here, and gives the same.

Beside tokens: how many operations over the device's tensors the host asks for while the device has
nothing to compute, because the step before has been collected.
"""

from contextlib import closing
from pathlib import Path
from typing import NamedTuple

from benchmarks.gpu_phases.machine import FAKE_GRANULARITY_BYTES, MIB
from benchmarks.gpu_phases.models import write_model
from kunserve.control.instance.agent import InstanceAgent
from kunserve.control.instance.body import StepWork
from kunserve.control.instance.state import AgentConfig
from kunserve.core.config import SchedulerConfig
from kunserve.core.ids import GroupId, InstanceId, RequestId
from kunserve.core.layout import GroupLayout, Stage
from kunserve.core.messages import Form, Outputs, Submit
from kunserve.core.plan import NOTHING_MEASURED
from kunserve.core.request import Request, SamplingParams
from kunserve.core.tokens import TokenIds
from kunserve_lab.world.mover import WorldMover
from tests.extras.torch_body.test_strict_device import SAMPLING, SPEC, WHOLE, open_body
from tests.fakecuda.library import FakeCuda
from tests.strict_device import DEVICE, StrictDevice

NUM_TOKENS = 9


class Served(NamedTuple):
    """What was served."""

    tokens: dict[RequestId, list[int | None]]
    num_ahead: int
    """Steps that were asked for before the tokens of the one before were here."""
    num_mixed: int
    """Of these, those that compute several tokens of a prompt beside others' last ones."""
    late: list[int]
    """Of each other step that only decodes: operations asked for while nothing was computed."""


def submit(agent: InstanceAgent, number: int, num_prompt: int, sampling: SamplingParams) -> None:
    prompt = TokenIds(range(3 + number, 3 + number + num_prompt))
    agent.on(Submit(Request(RequestId(f"r{number}"), prompt, sampling, float(number))), 0.0)


def serve(
    folder: Path,
    sampling: tuple[SamplingParams, ...],
    *,
    runs_ahead: bool,
    late: tuple[SamplingParams, ...] = (),
) -> Served:
    """A request of each kind, all at once; while they decode late ones with prompts of several
    chunks.
    """
    tokens: dict[RequestId, list[int | None]] = {}
    num_ahead = num_mixed = 0
    late_operations: list[int] = []
    with StrictDevice() as strict, closing(open_body(folder, 0, DEVICE, False)) as body:
        scheduler = SchedulerConfig(
            max_num_batched_tokens=24 if late else 48, max_num_seqs=8, async_scheduling=runs_ahead
        )
        config = AgentConfig(InstanceId(0), scheduler, NOTHING_MEASURED, frozenset(), 64)
        agent = InstanceAgent(config, body, WorldMover())
        layout = GroupLayout(GroupId(1), (Stage(InstanceId(0), WHOLE),))
        agent.on(Form(layout, (body.spec,)), 0.0)
        for number, one in enumerate(sampling):
            submit(agent, number, 6, one)
        asked, work, num_steps = None, agent.next_work(0.0), 0
        while work is not None:
            assert isinstance(work.step, StepWork)
            if asked is None:
                before = strict.num_checked
                asked = body.launch(work.step, None)
                if all(chunk.start >= 6 for chunk in work.step.plan.chunks):
                    late_operations.append(strict.num_checked - before)
            num_steps += 1
            if num_steps == 3:
                for number, one in enumerate(late, len(sampling)):
                    submit(agent, number, 40, one)
            following, ahead = agent.next_ahead(0.0, body), None
            if following is not None:
                assert isinstance(following.step, StepWork)
                chunks = following.step.plan.chunks
                num_ahead += 1
                num_mixed += len(chunks) > 1 and max(chunk.num_tokens for chunk in chunks) > 1
                ahead = body.launch(following.step, None)
            agent.finished(work, body.collect(asked), 0.0)
            agent.check()
            work, asked = (following, ahead) if following else (agent.next_work(0.0), None)
        for _, message, _ in agent.outbox:
            for token in message.tokens if isinstance(message, Outputs) else ():
                tokens.setdefault(token.request_id, []).append(token.token_id)
    return Served(tokens, num_ahead, num_mixed, late_operations)


def test_tokens_are_the_same_and_the_device_never_waits(tmp_path: Path) -> None:
    FakeCuda(FAKE_GRANULARITY_BYTES, 64 * MIB)
    folder = write_model(SPEC, tmp_path / "model")
    alone = tuple(one for one in SAMPLING if not one.bad_words)
    alone = tuple(
        SamplingParams(NUM_TOKENS, temperature=0.0) if one.max_tokens > 9 else one for one in alone
    )
    expected = serve(folder, alone, runs_ahead=False)
    found = serve(folder, alone, runs_ahead=True)
    assert found.tokens == expected.tokens and len(found.tokens) == len(alone)
    assert all(len(tokens) == NUM_TOKENS for tokens in found.tokens.values())
    assert expected.num_ahead == 0 and len(expected.late) == NUM_TOKENS - 1
    assert found.num_ahead == NUM_TOKENS - 1 and found.late == []
    assert min(expected.late) > 20, "what the device would have waited for"


def test_chunks_of_late_prompts_run_ahead_beside_decodes(tmp_path: Path) -> None:
    FakeCuda(FAKE_GRANULARITY_BYTES, 64 * MIB)
    folder = write_model(SPEC, tmp_path / "model")
    greedy = SamplingParams(NUM_TOKENS, temperature=0.0)
    late = (SAMPLING[3], SAMPLING[4])
    expected = serve(folder, (greedy, SAMPLING[1]), runs_ahead=False, late=late)
    found = serve(folder, (greedy, SAMPLING[1]), runs_ahead=True, late=late)
    assert found.tokens == expected.tokens
    assert [len(tokens) for tokens in found.tokens.values()] == [NUM_TOKENS] * 4
    assert expected.num_mixed == 0 and found.num_mixed >= 3, found


def test_a_request_whose_tokens_the_host_must_see_holds_all_back(tmp_path: Path) -> None:
    FakeCuda(FAKE_GRANULARITY_BYTES, 64 * MIB)
    folder = write_model(SPEC, tmp_path / "model")
    banned = SamplingParams(NUM_TOKENS, temperature=0.0, bad_words=((7,),))
    sorted_ = SamplingParams(NUM_TOKENS, temperature=1.0, top_p=0.999999, seed=3)
    for one in (banned, sorted_):
        greedy = SamplingParams(NUM_TOKENS, temperature=0.0)
        expected = serve(folder, (one, greedy), runs_ahead=False)
        found = serve(folder, (one, greedy), runs_ahead=True)
        assert found == expected and found.num_ahead == 0


def test_a_last_token_that_the_host_must_see_holds_all_back(tmp_path: Path) -> None:
    """Only then does the device note tokens for penalties."""
    FakeCuda(FAKE_GRANULARITY_BYTES, 64 * MIB)
    folder = write_model(SPEC, tmp_path / "model")
    short = SamplingParams(3, temperature=1.0, top_p=0.999999, seed=3)
    penalised = SamplingParams(NUM_TOKENS, temperature=0.0, presence_penalty=2.0)
    expected = serve(folder, (short, penalised), runs_ahead=False)
    found = serve(folder, (short, penalised), runs_ahead=True)
    assert found.tokens == expected.tokens and found.num_ahead > 0
