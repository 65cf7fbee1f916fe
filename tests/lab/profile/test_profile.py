"""Profiling a tiny model on the real engine: shapes, journal, and the command."""

import signal
import subprocess
import sys
from dataclasses import replace
from multiprocessing import Event
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from click.testing import CliRunner

from kunserve.cli import main
from kunserve.core.config import InstanceConfig, ModelConfig
from kunserve.core.errors import ConfigError
from kunserve.model.profile import ProfileSubject, read_profile
from kunserve_lab.profile import command, neighbours, run
from kunserve_lab.profile.cost_forms import FORMS
from kunserve_lab.profile.journal import Journal, Plan
from kunserve_lab.profile.run import BodySettings
from kunserve_lab.profile.shapes import REGIONS, BatchShape, ShapeLimits, draw_shapes
from kunserve_lab.profile.stopwatch import Reading
from tests.tiny_models import save_tiny

LIMITS = ShapeLimits(max_batch_tokens=512, max_context=4096, max_decodes=64, max_total_context=9000)
SUBJECT = ProfileSubject("tiny", "LlamaForCausalLM", 3, 64, "bfloat16", 1, 16)


@pytest.mark.parametrize("seed", range(5))
def test_shapes_stay_within_the_limits(seed: int) -> None:
    shapes = draw_shapes(20, LIMITS, seed)
    assert [sum(s.region == region for s in shapes) for region in REGIONS] == [20] * 4
    for shape in shapes:
        assert len(shape.prefixes) == len(shape.lengths) >= shape.num_samples
        assert min(shape.lengths) > 0 and 0 < shape.num_tokens <= LIMITS.max_batch_tokens
        ends = [p + c for p, c in zip(shape.prefixes, shape.lengths, strict=True)]
        assert max(ends) <= LIMITS.max_context and sum(ends) <= LIMITS.max_total_context
        if shape.region == "prefill":
            assert not any(shape.prefixes)
        if shape.region in ("prefix", "decode"):
            assert all(shape.prefixes)
        if shape.region == "decode":
            assert set(shape.lengths) == {1} and shape.num_samples == len(shape.lengths)


def test_shapes_cover_the_lengths_and_are_seeded() -> None:
    shapes = draw_shapes(24, LIMITS, 3)
    assert shapes == draw_shapes(24, LIMITS, 3) != draw_shapes(24, LIMITS, 4)
    totals = sorted(s.num_tokens for s in shapes if s.region == "prefill")
    assert totals[0] < 24 and totals[-1] > 400
    assert [s.region for s in shapes] != sorted(s.region for s in shapes), "not in turns"


def body_of(num_tokens: int, block_size: int, max_position: int = 8192) -> Any:
    blocks = num_tokens // block_size
    spec = SimpleNamespace(
        kv_units=blocks * 4, num_layers=4, block_size=block_size, unit_bytes=32768 * block_size
    )
    return SimpleNamespace(spec=spec, model=SimpleNamespace(max_position=max_position))


@pytest.mark.parametrize("asked", [1, 16, 256, 4096])
@pytest.mark.parametrize(
    ("num_tokens", "block_size"),
    [(23301, 16), (9362, 16), (4672, 16), (4096, 16), (528, 16), (400, 16), (32768, 64),
     (2560, 256), (265, 1)],
)  # fmt: skip
def test_shapes_fit_little_kv_memory(num_tokens: int, block_size: int, asked: int) -> None:
    """As many models have within 512 MiB."""
    limits = run.limits_of(body_of(num_tokens, block_size), 512, asked)
    for shape in draw_shapes(12, limits, 0):
        chunks = list(zip(shape.prefixes, shape.lengths, strict=True))
        assert min(shape.prefixes) >= 0 and min(shape.lengths) > 0
        assert sum(-(-(p + n) // block_size) for p, n in chunks) <= num_tokens // block_size
        assert max(p + n for p, n in chunks) <= limits.max_context
        if shape.region == "decode":
            assert min(shape.prefixes) > 0 and len(chunks) <= min(asked, limits.max_decodes)


def test_no_decode_is_left_out_that_fits() -> None:
    assert run.limits_of(body_of(23301, 16), 512, 256) == ShapeLimits(512, 8192, 256, 19072)
    assert run.limits_of(body_of(4096, 16), 512, 256) == ShapeLimits(496, 992, 124, 1984)


@pytest.mark.parametrize(("num_tokens", "block_size", "least"), [(384, 16, 400), (264, 1, 265)])
def test_too_little_kv_memory_for_a_profile_is_said(
    num_tokens: int, block_size: int, least: int
) -> None:
    with pytest.raises(ConfigError, match=rf"hold {num_tokens} tokens .*needs {least}: give"):
        run.limits_of(body_of(num_tokens, block_size), 512, 256)


class FakeProcess:
    """Ends once it was asked for so many times."""

    exitcode = -9

    def __init__(self, num_looks: int) -> None:
        self._left = num_looks

    def is_alive(self) -> bool:
        self._left -= 1
        return self._left >= 0


def test_nothing_is_kept_of_what_was_measured_without_a_neighbour(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(neighbours, "_SETTLE_S", 0.0)
    plan = Plan(SUBJECT, 2, [BatchShape("prefill", (0,), (n,), 1) for n in (16, 32)])
    journal = Journal(tmp_path / "j.jsonl", plan)
    stopwatch: Any = SimpleNamespace(measure=lambda shape: Reading(0.5, 0.6))
    processes: Any = [FakeProcess(99), FakeProcess(3)]
    company = neighbours.Neighbours(Event(), processes)
    with pytest.raises(ConfigError, match="exit code -9"):
        run.measure(stopwatch, plan, journal, company, lambda: None)
    assert journal.num_measured == 3
    journal.close()


def test_a_neighbour_that_ends_instead_of_starting_is_not_waited_for(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(neighbours, "_LOOK_S", 0.0)
    processes: Any = [FakeProcess(1)]
    with pytest.raises(ConfigError, match="exit code -9"):
        neighbours._await_start(Event(), neighbours.Neighbours(Event(), processes))


def test_a_neighbour_does_not_hear_the_key_that_ends_the_profile() -> None:
    """A terminal sends SIGINT to all of its processes; the neighbour would write a traceback."""
    before = signal.getsignal(signal.SIGINT)
    with neighbours._no_interrupts():
        program = "import signal, sys; sys.exit(signal.getsignal(2) is not signal.SIG_IGN)"
        done = subprocess.run([sys.executable, "-c", program], timeout=60, check=False)
    assert done.returncode == 0 and signal.getsignal(signal.SIGINT) is before


def test_tokens_attend_to_different_numbers(tmp_path: Path) -> None:
    """Over the same ones they would be alike, and choose the same experts."""
    save_tiny(tmp_path, "qwen3")
    settings = BodySettings(ModelConfig(model=str(tmp_path)), block_size=16, num_threads=1)
    body = run.open_body(replace(settings, kv_bytes=1 << 20))
    try:
        units = [bytes(body.memory.unit_view(unit, 1)) for unit in range(8)]
        values = torch.frombuffer(bytearray(b"".join(units)), dtype=torch.bfloat16)
        assert len(set(units)) == 8 and values.isfinite().all() and 0.9 < values.float().std() < 1.1
    finally:
        body.close()


def test_a_journal_is_resumed_where_it_ended(tmp_path: Path) -> None:
    path = tmp_path / "j.jsonl"
    plan = Plan(SUBJECT, 2, [BatchShape("prefill", (0,), (n,), 1) for n in (16, 32)])
    journal = Journal(path, plan)
    journal.note(0, Reading(0.5, 0.6))
    journal.note(1, Reading(1.0, 1.1))
    journal.close()
    with path.open("ab") as file:
        file.write(b'{"shape":0,"seco')
    again = Journal(path, plan)
    assert again.found == [[(0.5, 0.6)], [(1.0, 1.1)]] and again.num_measured == 2
    again.note(0, Reading(0.25, 0.3))
    again.close()
    other = Journal(path, Plan(SUBJECT, 3, plan.shapes))
    assert other.num_measured == 0, "another plan begins anew"
    other.remove()
    assert not path.exists()


def test_the_command_writes_a_whole_profile(tmp_path: Path) -> None:
    folder = save_tiny(tmp_path / "olmoe", "olmoe", 2)
    out = tmp_path / "p.json"
    arguments = ["profile", str(folder), "--quick", "--out", str(out), "--max-num-seqs", "16",
                 "--max-num-batched-tokens", "64", "--block-size", "8"]  # fmt: skip
    result = CliRunner().invoke(main, arguments, catch_exceptions=False)
    assert result.exit_code == 0, result.output
    assert "Held-out error" in result.output
    told = [line for line in result.stderr.splitlines() if " of 144 batches" in line]
    assert len(told) == 10, "nobody looks at a bar: a line for each tenth"
    assert told[-1] == "144 of 144 batches, about 0.0 min left"
    profile = read_profile(out)
    assert profile.subject.num_layers == 2 and profile.subject.block_size == 8
    assert profile.num_instances == 2
    for cost in (profile.coefficients, profile.serving, profile.alone):
        assert cost.experts.per_token == 4 <= cost.experts.num <= 11
    assert profile.serving.token_s > 0 and profile.alone.token_s > 0
    assert len(profile.samples) == 48 and all(s.seconds > 0 for s in profile.samples)
    assert set(profile.errors) == {form.name for form in FORMS}
    assert [p.name for p in tmp_path.iterdir() if p.is_file()] == ["p.json"]


def test_a_missing_model_is_a_plain_error() -> None:
    result = CliRunner().invoke(main, ["profile", "./no-such-model"])
    assert result.exit_code == 1 and "Error" in result.output


def test_a_profile_of_a_gpu_is_not_kept_in_place_of_the_cpus() -> None:
    result = CliRunner().invoke(main, ["profile", "--device", "cuda"])
    assert result.exit_code == 2 and "needs --out" in result.output


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_a_profile_is_of_what_serve_will_have(
    device: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """``serve --profile`` refuses a profile of another block size."""
    seen: list[BodySettings] = []

    def open_body(settings: BodySettings) -> None:
        seen.append(settings)
        raise ConfigError("seen")

    monkeypatch.setattr(command, "open_body", open_body)
    arguments = ["profile", "any", "--device", device, "--out", str(tmp_path / "p.json")]
    assert "seen" in CliRunner().invoke(main, [*arguments, "--dtype", "float16"]).output
    served = InstanceConfig.of_device(device)
    assert (seen[0].block_size, seen[0].device) == (served.block_size, device)


def test_neighbours_take_the_gpus_that_are_theirs(monkeypatch: pytest.MonkeyPatch) -> None:
    numbers: list[int] = []

    def open_backend(model: object, source: object, config: object, number: int) -> None:
        numbers.append(number)
        raise ConfigError("seen")

    monkeypatch.setattr(run, "open_backend", open_backend)
    settings = BodySettings(ModelConfig(), 16, 1, "cuda")
    for seed in range(2):
        with pytest.raises(ConfigError, match="seen"):
            neighbours._compute(settings, seed, Event(), Event(), Event())
    with pytest.raises(ConfigError, match="seen"):
        run.open_body(settings)
    assert numbers == [1, 2, 0]
