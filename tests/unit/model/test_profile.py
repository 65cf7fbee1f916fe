"""Profiles on disk: written whole, read strictly, found where they are expected."""

import os
from dataclasses import replace
from pathlib import Path

import pytest

from kunserve.core.cost import DENSE, CostCoefficients, CostSample, ExpertChoice
from kunserve.core.errors import ConfigError
from kunserve.model.profile import (
    FORMAT,
    Profile,
    ProfileSubject,
    RegionError,
    default_path,
    find_cost,
    read_profile,
    write_profile,
)

OLD = Path(__file__).parents[3] / "benchmarks" / "results" / "profile-smollm2-135m.json"
SUBJECT = ProfileSubject("org/tiny", "LlamaForCausalLM", 4, 64, "bfloat16", 1, 16)
PROFILE = Profile(
    format=FORMAT,
    subject=SUBJECT,
    device="a CPU",
    clock="CPU time of the thread",
    versions={"kunserve": "0.1.0"},
    created="2026-01-01T00:00:00+00:00",
    coefficients=CostCoefficients(6e-7, 1e-3, 0.012, 0.011, 2e-6, 3e-4),
    num_instances=2,
    serving=CostCoefficients(7e-7, 1.1e-3, 0.014, 0.013, 2.2e-6, 3e-4),
    alone=CostCoefficients(6e-7, 1e-3, 0.012, 0.011, 2e-6, 3e-4),
    errors={"kunserve": {"all": RegionError(4, 0.02, 0.05)}},
    samples=(CostSample("prefill", (0,), (64,), 1, 0.08),),
)


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(Path, "home", lambda: tmp_path)
    return tmp_path


def test_what_is_written_is_read(tmp_path: Path) -> None:
    path = tmp_path / "new" / "profile.json"
    write_profile(path, PROFILE)
    assert read_profile(path) == PROFILE
    assert [p.name for p in path.parent.iterdir()] == ["profile.json"]


def test_a_profile_of_a_sparse_model_and_one_from_before_there_were_any(tmp_path: Path) -> None:
    path = tmp_path / "profile.json"
    sparse = replace(PROFILE.coefficients, expert_s=2e-4, experts=ExpertChoice(64, 8))
    write_profile(path, replace(PROFILE, coefficients=sparse))
    assert read_profile(path).coefficients == sparse
    old = read_profile(OLD).coefficients
    assert "expert_s" not in OLD.read_text()
    assert old.expert_s == 0.0 and old.experts == DENSE and old.token_s > 0.0


def test_the_default_place_is_named_after_the_subject(home: Path) -> None:
    path = default_path(SUBJECT)
    assert path.is_relative_to(home) and path.name == "org-tiny-bfloat16-1t-b16.json"


def test_without_a_profile_there_are_no_coefficients() -> None:
    cost, source = find_cost(SUBJECT, None)
    assert cost is None and "kunserve profile" in source


def test_the_default_place_is_looked_at() -> None:
    write_profile(default_path(SUBJECT), PROFILE)
    assert find_cost(SUBJECT, None) == (PROFILE.coefficients, str(default_path(SUBJECT)))


def test_a_user_without_a_home_has_no_profile(monkeypatch) -> None:
    def homeless() -> Path:
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.setattr(Path, "home", homeless)
    assert find_cost(SUBJECT, None) == (
        None,
        "this user has no home folder: name the profile's file",
    )


def test_a_home_that_is_not_ours_holds_no_profile(monkeypatch) -> None:
    """As root's is not for the user of a container."""
    write_profile(default_path(SUBJECT), PROFILE)
    monkeypatch.setattr(os, "access", lambda path, mode: False)
    assert find_cost(SUBJECT, None)[0] is None


def test_a_named_profile_must_exist_and_fit(tmp_path: Path) -> None:
    path = tmp_path / "p.json"
    with pytest.raises(ConfigError, match="cannot read"):
        find_cost(SUBJECT, path)
    write_profile(path, PROFILE)
    with pytest.raises(ConfigError, match="num_threads=2"):
        find_cost(replace(SUBJECT, num_threads=2), path)


@pytest.mark.parametrize("text", ["", "{}", '{"format": 2}'])
def test_what_is_no_profile_is_refused(tmp_path: Path, text: str) -> None:
    path = tmp_path / "p.json"
    path.write_text(text)
    with pytest.raises(ConfigError, match="is no profile"):
        read_profile(path)


def test_impossible_coefficients_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "p.json"
    write_profile(path, PROFILE)
    path.write_text(path.read_text().replace('"token_s": 0.001', '"token_s": -0.001'))
    with pytest.raises(ConfigError, match="is no profile"):
        read_profile(path)


def test_another_format_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "p.json"
    write_profile(path, replace(PROFILE, format=99))
    with pytest.raises(ConfigError, match="format 99"):
        read_profile(path)


def test_an_unwritable_place_is_told(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match="cannot write"):
        write_profile(tmp_path / "file" / "p.json", PROFILE)
