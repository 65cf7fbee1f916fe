"""What ranks say to each other arrives as it was said."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from kunserve.core.config import InstanceConfig
from kunserve.core.errors import ModelFiles, StartupFailure
from kunserve.core.ids import InstanceId
from kunserve.core.layout import LayerRange
from kunserve.engine.cpu.decoder import StepLimits
from kunserve.model.experts import Experts
from kunserve.model.packed import PackedField, PackedWeights, Run, WeightFormat
from kunserve.model.rope import LinearRope, Llama3Rope, RopeScaling, YarnRope
from kunserve.model.source import ModelSource
from kunserve.transport.wire.codec import MalformedMessage
from kunserve_extras.device_ranks.sums import SumsBy
from kunserve_extras.device_ranks.words import WORDS as DEVICE_WORDS
from kunserve_extras.device_ranks.words import CopyUnits, MoveLayer, MoveUnits, OpenSums, Prepare
from kunserve_extras.ranks.control import (
    Answer,
    Drop,
    Held,
    Join,
    OpenRegion,
    Reclaim,
    Talk,
    talk_pair,
)
from kunserve_extras.ranks.region import Room
from tests.specs import SMOLLM2_135M

LAYERS = LayerRange(3, 9)
FIELD = PackedField("qkv", (Run(WeightFormat.Q8_0, 96), Run(WeightFormat.PLAIN, 32)), 64)
PACKED = PackedWeights("gguf", (FIELD,), ((FIELD,), ()), 4096, 512, 256)


def join(rope: RopeScaling | None = None, **changes: Any) -> Join:
    spec = replace(SMOLLM2_135M, rope_scaling=rope, **changes)
    source = ModelSource("m", Path("/models/m"), "safetensors")
    config = InstanceConfig(memory_bytes=1 << 30)
    return Join(
        InstanceId(2), 1, 4, 77, spec, source, 5, config, 2.5, frozenset({1, 3}), "cuda:1", 9
    )


@pytest.mark.parametrize(
    "word",
    [
        join(),
        join(LinearRope(4.0)),
        join(Llama3Rope(32.0, 1.0, 4.0, 8192)),
        join(YarnRope(4.0, 256, 1.1)),
        join(packed=PACKED),
        join(experts=Experts(8, 2, True), global_layers=(1, 5)),
        Drop(LAYERS),
        Reclaim(LAYERS),
        OpenRegion(Room(8, 4, 2), StepLimits(8, 2, 64)),
        Answer(),
        Answer(StartupFailure.of(ModelFiles("no such file"))),
        Answer(said="no memory"),
        Answer(said=Held(LAYERS, (b"\x00\x01", b""))),
        OpenSums(SumsBy.GLOO),
        Prepare(LAYERS),
        CopyUnits(((1, 2, 3),)),
        MoveUnits(((1, 2),), is_in=True),
        MoveLayer(4, ((0, 8), (8, 8)), is_in=False),
    ],
    ids=lambda word: type(word).__name__,
)
def test_a_word_arrives_as_it_was_said(word: object) -> None:
    ours, theirs = talk_pair(DEVICE_WORDS)
    other = Talk(theirs)
    other.learn(DEVICE_WORDS)
    try:
        ours.say(word)
        assert other.hear(1.0) == (word, [])
    finally:
        ours.close()
        other.close()


def test_a_failure_is_the_error_that_it_was() -> None:
    error = StartupFailure.of(ModelFiles("no such file")).to_error()
    assert type(error) is ModelFiles and str(error) == "no such file"


def test_nothing_but_words_is_understood() -> None:
    ours, theirs = talk_pair()
    with theirs:
        with pytest.raises(MalformedMessage):
            ours.say(Prepare(LAYERS))  # of another kind of ranks
        theirs.send(b"\x80\x04\x95nonsense")
        with pytest.raises(MalformedMessage):
            ours.hear(1.0)
    ours.close()
