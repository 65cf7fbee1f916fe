"""A program with an ``LLM`` over fake instances, run by ``test_offline.py`` as others would run it.

No ``if __name__ == "__main__"``: instances are programs of their own.
"""

import asyncio
import sys
import threading

from kunserve import LLM, SamplingParams
from kunserve.cluster.driver.local import LocalCluster
from kunserve.core.config import KunServeConfig
from kunserve.core.ids import RequestId
from kunserve.core.plan import Plan
from kunserve.core.request import Request
from kunserve.core.request import SamplingParams as EngineParams
from kunserve.core.tokens import TokenIds
from kunserve.model.generation_config import SamplingDefaults
from kunserve.server.start.launch import Launched
from kunserve_extras.offline import llm as module
from kunserve_lab.world.fake_body import expected_tokens
from tests.running.live_cluster import FAKE, MAX_LEN, MODEL
from tests.unit.server.tiny_tokenizer import tiny_tokenizer


async def launch(config: KunServeConfig) -> Launched:
    cluster = await LocalCluster.start(Plan(config), vocab_size=FAKE.vocab_size, fake=FAKE)
    return Launched(cluster, tiny_tokenizer(), SamplingDefaults(), config)


module.launch = launch  # type: ignore[assignment]
GREEDY = SamplingParams(temperature=0, max_tokens=60)


def truth(prompt: list[int]) -> tuple[int, ...]:
    """The tokens of an undisturbed run."""
    sampling = EngineParams(max_tokens=60, temperature=0.0)
    return expected_tokens(Request(RequestId("x"), TokenIds(prompt), sampling, 0.0), MODEL, MAX_LEN)


def prompt(number: int) -> list[int]:
    return [(number * 31 + i * 7) % FAKE.vocab_size for i in range(1, 41)]


def said(llm: LLM) -> None:
    """The instances, for the test to look for."""
    pids = llm._session.front.engine.vitals().pids
    print("pids", *(pid for _, pid in pids), flush=True)


how = sys.argv[1]
llm = LLM("fake", num_instances=2, block_size=16, restore_below=0.0, check_invariants=True)
if how == "wait":  # for signals
    long = SamplingParams(temperature=0, max_tokens=3000)
    try:
        said(llm)
        llm.generate([prompt(1)], long)
    except KeyboardInterrupt:
        print("interrupted", llm.generate([prompt(1)])[0].outputs[0].finish_reason, flush=True)
    llm.generate([prompt(1)], long)
elif how == "drop":
    said(llm)
    prompts = [prompt(number) for number in range(12)]

    def disturb() -> None:
        """While the main thread generates."""
        engine = llm._session.front.engine
        for change in (engine.drop(None), engine.restore()):
            llm._thread.call(lambda _, change=change: change)

    thread = threading.Thread(target=disturb)
    thread.start()
    outputs = llm.generate(prompts, GREEDY)
    thread.join()
    outputs += llm.generate(prompts[:2], GREEDY)
    for given, output in zip([*prompts, *prompts[:2]], outputs, strict=True):
        assert output.prompt_token_ids == given
        assert tuple(output.outputs[0].token_ids) == truth(given)
    state = llm.state()
    assert (state.num_drops, state.num_restores) == (1, 1), state
    print("same tokens", flush=True)

    async def cell() -> None:
        """A notebook's: its loop runs."""
        assert tuple(llm.generate([prompt(3)], GREEDY)[0].outputs[0].token_ids) == truth(prompt(3))

    asyncio.run(cell())
    # No close(): the end of the program is enough, however it comes.
    raise RuntimeError("a mistake of the program's own")
