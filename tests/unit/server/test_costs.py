"""Where the server takes the costs of batch formation from."""

import logging
from dataclasses import replace
from pathlib import Path

import pytest

from kunserve.core.config import (
    MIB,
    InstanceConfig,
    KunServeConfig,
    OverloadConfig,
    SchedulerConfig,
)
from kunserve.core.cost import CostCoefficients
from kunserve.core.errors import ConfigError
from kunserve.model.profile import FORMAT, Profile, ProfileSubject, default_path, write_profile
from kunserve.policy.batch.cost import assumed_cost
from kunserve.server.start import plan
from kunserve.server.start.command import serve_command
from kunserve.server.start.plan import find_step_cost, find_swap
from tests.specs import model_spec

SPEC = model_spec()
MEASURED = CostCoefficients(6e-7, 1e-3, 0.012, 0.011)


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(Path, "home", lambda: tmp_path)
    return tmp_path


def profile(path: Path, subject: ProfileSubject) -> None:
    write_profile(
        path,
        Profile(FORMAT, subject, "cpu", "wall", {}, "", MEASURED, 1, MEASURED, MEASURED, {}, ()),
    )


def test_without_a_profile_they_are_assumed_and_it_is_said(
    caplog: pytest.LogCaptureFixture,
) -> None:
    with caplog.at_level(logging.INFO):
        cost = find_step_cost(KunServeConfig(), SPEC)
    assert cost == assumed_cost(SPEC)
    assert "assumed" in caplog.text and "kunserve profile" in caplog.text


def test_quantised_weights_are_read_in_less_time() -> None:
    plain, packed = (
        find_step_cost(KunServeConfig(), SPEC, "gguf", layer_bytes)
        for layer_bytes in (None, SPEC.layer_bytes / 4)
    )
    assert plain is not None and packed is not None
    assert packed.shared_s == packed.chunk_s == pytest.approx(plain.shared_s / 4)
    assert packed.token_s == plain.token_s


def test_the_profile_in_the_usual_place_is_taken() -> None:
    subject = ProfileSubject.of(SPEC, 1, 16)
    profile(default_path(subject), subject)
    assert find_step_cost(KunServeConfig(), SPEC) == MEASURED


def test_a_profile_of_something_else_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "p.json"
    profile(path, replace(ProfileSubject.of(SPEC, 1, 16), model="other"))
    config = KunServeConfig(scheduler=SchedulerConfig(profile=str(path)))
    with pytest.raises(ConfigError, match="other"):
        find_step_cost(config, SPEC)


def test_without_lookahead_nothing_is_read(tmp_path: Path) -> None:
    scheduler = SchedulerConfig(lookahead=False, profile=str(tmp_path / "none.json"))
    config = KunServeConfig(scheduler=scheduler)
    assert find_step_cost(config, SPEC) is None


def test_the_flags() -> None:
    context = serve_command.make_context("serve", ["--no-lookahead", "--profile", "p.json"])
    assert context.params["lookahead"] is False and context.params["profile"] == "p.json"
    assert serve_command.make_context("serve", []).params["lookahead"] is True


def test_an_objective_in_seconds_wants_measured_seconds() -> None:
    config = KunServeConfig(scheduler=SchedulerConfig(lookahead=False, tpot_slo_s=0.5))
    with pytest.raises(ConfigError, match=r"--tpot-slo .*`kunserve profile`"):
        find_step_cost(config, SPEC)
    subject = ProfileSubject.of(SPEC, 1, 16)
    profile(default_path(subject), subject)
    assert find_step_cost(config, SPEC) == MEASURED


def test_a_cpus_profile_says_nothing_of_a_gpu() -> None:
    subject = ProfileSubject.of(SPEC, 1, 16)
    profile(default_path(subject), subject)
    config = KunServeConfig(instance=InstanceConfig(device="cuda"))
    assert find_step_cost(config, SPEC) == assumed_cost(SPEC)


@pytest.mark.parametrize(
    "overload",
    [
        OverloadConfig(policy="swap"),
        OverloadConfig(policy="park"),
        OverloadConfig(policy="drop", park_behind_drop=True),
    ],
)
def test_host_memory_beside_a_gpu_wants_measured_seconds(
    overload: OverloadConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Assumed ones are a CPU's: a plan would copy gigabytes within one step of theirs."""
    instance = InstanceConfig(device="cuda", memory_bytes=1 << 40)
    config = KunServeConfig(instance=instance, overload=overload)
    with pytest.raises(ConfigError, match=r"measured .*`kunserve profile --device cuda`"):
        find_step_cost(config, SPEC)
    path = tmp_path / "gpu.json"
    profile(path, ProfileSubject.of(SPEC, 1, 16))
    config = replace(config, scheduler=SchedulerConfig(profile=str(path)))
    assert find_step_cost(config, SPEC) == MEASURED
    monkeypatch.setattr(plan, "measure_copy_rate", {"cuda": 7e9}.__getitem__)
    monkeypatch.setattr(plan, "available_bytes", lambda: 400 * MIB)
    swap = find_swap(config)
    assert swap is not None and swap.host_bytes_per_s == 7e9, "the device's own rate"
    assert swap.host_bytes == 400 * MIB // 2 // config.cluster.num_instances
