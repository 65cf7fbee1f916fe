"""``kunserve serve``: what its flags take, and what it says of those it does not have."""

import asyncio
from dataclasses import replace

import pytest
import uvloop
from click.testing import CliRunner

import kunserve.server.start.launch as launch
from kunserve.core.config import MIB, KunServeConfig, ModelConfig, SpeculativeConfig
from kunserve.core.errors import ConfigError
from kunserve.server.start.command import config_from_flags, serve_command
from kunserve.server.start.foreign_flags import FLAGS
from kunserve.server.start.plan import check_length, idle_cores
from tests.unit.server.test_costs import SPEC


def parsed(*args: str) -> KunServeConfig:
    return config_from_flags(serve_command.make_context("serve", list(args)).params)


def refused(*args: str) -> str:
    result = CliRunner().invoke(serve_command, list(args))
    assert result.exit_code == 2, result.output
    return result.output


@pytest.mark.parametrize("flag", ["-h", "--help"])
def test_help_shows_examples_as_they_are_typed(flag: str) -> None:
    text = CliRunner().invoke(serve_command, [flag]).output
    assert "\\b" not in text and "\b" not in text
    assert "  kunserve serve smollm2-135m\n" in text


def test_the_server_runs_on_uvloop(monkeypatch: pytest.MonkeyPatch) -> None:
    loops: list[type] = []

    async def run_server(_config: KunServeConfig) -> None:
        loops.append(type(asyncio.get_running_loop()))

    monkeypatch.setattr(launch, "run_server", run_server)
    assert CliRunner().invoke(serve_command, []).exit_code == 0
    assert loops == [uvloop.Loop]


def test_a_small_number_without_a_unit_is_no_size() -> None:
    assert "write 600MiB" in refused("--instance-memory", "600")
    assert "write 1048575MiB" in refused("--kv-cache-memory-bytes", "1048575")
    assert "is no size" in refused("--instance-memory", "9" * 400)
    assert parsed("--instance-memory", "600b").instance.memory_bytes == 600
    assert parsed("--instance-memory", "600MiB").instance.memory_bytes == 600 * MIB
    assert parsed("--kv-cache-memory-bytes", "1048576").instance.kv_cache_memory_bytes == MIB


@pytest.mark.parametrize("flag", ["--max-park-s", "--tpot-slo"])
@pytest.mark.parametrize("seconds", ["0", "-1", "nan", "inf"])
def test_seconds_that_no_request_can_wait_are_refused(flag: str, seconds: str) -> None:
    assert f"Invalid value for '{flag}'" in refused("smollm2-135m", flag, seconds)


def test_parking_goes_with_some_policies_only() -> None:
    behind = parsed("smollm2-135m", "--park-behind-drop", "--max-park-s", "4").overload
    assert behind.park_behind_drop and behind.max_park_s == 4.0
    with pytest.raises(ConfigError, match="goes with policy 'drop', not 'park'"):
        parsed("smollm2-135m", "--overload-policy", "park", "--park-behind-drop")
    with pytest.raises(ConfigError, match="max_park_s goes with policy 'park'"):
        parsed("smollm2-135m", "--max-park-s", "4")
    pair = ("--num-instances", "2", "--pipeline-parallel-size", "2")
    assert parsed("smollm2-135m", *pair, "--overload-policy", "park").overload.uses_host_memory
    with pytest.raises(ConfigError, match="no layers to drop"):
        parsed("smollm2-135m", *pair, "--park-behind-drop")


def test_speculation_is_an_object_with_names_of_vllm() -> None:
    assert parsed("smollm2-135m").scheduler.speculative_config is None
    given = '{"method": "ngram", "num_speculative_tokens": 5, "prompt_lookup_max": 3}'
    found = parsed("smollm2-135m", "--speculative-config", given).scheduler.speculative_config
    assert found == SpeculativeConfig("ngram", 5, 2, 3)


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ('{"model": "a/b", "method": "eagle3"}', "not 'eagle3'; no draft models are loaded"),
        ('{"method": "eagle"}', "must be \"ngram\" (prompt lookup), not 'eagle'"),
        ('{"num_speculative_tokens": 0}', "must be at least 1, not 0"),
        ('{"num_speculative_tokens": "4"}', "Expected `int`, got `str`"),
        ('{"prompt_lookup_min": 5}', "at most prompt_lookup_max, not 5 of 4"),
        ('{"model": "a/b"}', "'model' is none of its keys, which are method, num_spec"),
        ("ngram", "no object of JSON"),
        ("[1]", "no object of JSON"),
    ],
)
def test_a_slip_in_it_is_told(given: str, says: str) -> None:
    assert says in " ".join(refused("smollm2-135m", "--speculative-config", given).split())


@pytest.mark.parametrize("flag", sorted(FLAGS))
def test_flags_of_other_servers_are_refused_with_a_reason(flag: str) -> None:
    said = " ".join(refused("smollm2-135m", flag, "1").split())
    assert f"{flag} is not supported: {FLAGS[flag]}." in said


def test_other_spellings_of_those_flags() -> None:
    assert "--num-instances" in refused("--data_parallel_size=2")
    assert "No such option" in refused("--no-such-flag")


def test_our_flags_are_not_among_those_refused() -> None:
    ours = {
        name
        for parameter in serve_command.params
        for name in (*parameter.opts, *parameter.secondary_opts)
    }
    assert not ours & set(FLAGS)


def test_a_length_that_the_model_was_not_made_for_is_refused() -> None:
    def with_length(max_model_len: int | None) -> KunServeConfig:
        return replace(KunServeConfig(), model=ModelConfig(max_model_len=max_model_len))

    for length in (None, 1, SPEC.max_position):
        check_length(with_length(length), SPEC)
    with pytest.raises(ConfigError, match="513 is more than the 512 tokens"):
        check_length(with_length(513), SPEC)


def test_what_suits_the_device(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kunserve_extras.torch_body.front.auto_device", lambda: "cuda")
    for device in ("cuda", "auto"):
        instance = parsed("--device", device, "--gpu-memory-utilization", "0.5").instance
        assert (instance.device, instance.gpu_memory_utilization) == ("cuda", 0.5)
        assert instance.block_size == 64
    assert parsed("--device", "cuda", "--block-size", "32").instance.block_size == 32
    assert parsed("--device", "cuda").instance.gpu_memory_utilization == 0.9
    sized = parsed("--device", "cuda", "--instance-memory", "2GiB").instance
    assert (sized.memory_bytes, sized.gpu_memory_utilization) == (2048 * MIB, None)
    plain = parsed().instance
    assert (plain.device, plain.block_size, plain.memory_bytes) == ("cpu", 16, 1024 * MIB)
    with pytest.raises(ConfigError, match="give one of them"):
        parsed("--device", "cuda", "--instance-memory", "2GiB", "--gpu-memory-utilization", "0.5")
    with pytest.raises(ConfigError, match="needs --device cuda"):
        parsed("--gpu-memory-utilization", "0.5")


def test_types_of_other_servers_are_refused_with_a_reason() -> None:
    assert "leave the flag out" in refused("--dtype", "auto")
    assert "write float16" in refused("--dtype", "half")
    assert "not one of" in refused("--dtype", "int4")


def test_the_knobs_of_the_mechanism() -> None:
    flags = ("--dwell", "5", "--restore-hold", "60", "--restore-below", "0.3")
    overload = parsed(*flags, "--overload-policy", "observe").overload
    knobs = (overload.dwell_s, overload.restore_hold_s, overload.restore_below)
    assert knobs == (5.0, 60.0, 0.3)
    assert overload.policy == "observe"
    assert "0<=x<=3600" in refused("--dwell", "-1").replace(".0", "")
    assert "nan is no finite number" in refused("--dwell", "nan")
    assert "inf is no finite number" in refused("--hang-timeout", "inf")


def test_generation_config() -> None:
    assert parsed().model.generation_config == "auto"
    assert parsed("--generation-config", "vllm").model.generation_config == "vllm"


@pytest.mark.parametrize(
    ("size", "num_bytes"),
    [
        ("600MiB", 600 * MIB),
        ("600mib", 600 * MIB),
        ("600m", 600 * MIB),
        ("600MB", 600_000_000),
        ("1.5g", 1536 * MIB),
        ("1.5 GB", 1_500_000_000),
        ("1073741824", 1024 * MIB),
        ("1073741824B", 1024 * MIB),
    ],
)
def test_a_size_is_what_its_unit_says(size: str, num_bytes: int) -> None:
    assert parsed("--instance-memory", size).instance.memory_bytes == num_bytes


def test_pipelines_that_do_not_come_out_even_are_told_first() -> None:
    with pytest.raises(ConfigError, match="2 instances cannot be parted into pipelines of 3"):
        parsed("--pipeline-parallel-size", "3", "--num-instances", "2")


def test_idle_cores_are_told_with_what_uses_them() -> None:
    assert idle_cores(parsed(), 2) is idle_cores(parsed(), 3) is None
    said = "2 of 32 cores compute: --num-threads 16 would use them all"
    assert idle_cores(parsed(), 32) == said
    assert idle_cores(parsed("--num-threads", "16"), 32) is None
    assert idle_cores(parsed("--tensor-parallel-size", "8"), 32) == said.replace("2 of", "16 of")
    for elsewhere in (("--device", "cuda"), ("--cluster", "ray")):
        assert idle_cores(parsed(*elsewhere), 32) is None
