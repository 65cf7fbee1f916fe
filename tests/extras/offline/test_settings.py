from pathlib import Path
from typing import Any

import pytest

from kunserve.core.config import MIB, ServerConfig, SpeculativeConfig
from kunserve.core.errors import ConfigError
from kunserve_extras.offline.settings import config_from_keywords


def test_keywords_are_flags() -> None:
    config = config_from_keywords(
        {
            "model": "some/model",
            "num_instances": 3,
            "instance_memory": "600MiB",
            "overload_policy": "recompute",
            "lookahead": False,
            "check_invariants": True,
            "served_model_name": ["a", "b"],
            "restore_below": 0,
            "speculative_config": {"method": "ngram", "num_speculative_tokens": 3},
        }
    )
    assert config.model.model == "some/model"
    assert config.cluster.num_instances == 3 and config.cluster.check_invariants
    assert config.instance.memory_bytes == 600 * MIB
    assert config.overload.policy == "recompute" and config.overload.restore_below == 0.0
    assert config.scheduler.lookahead is False
    assert config.scheduler.speculative_config == SpeculativeConfig(num_speculative_tokens=3)
    assert config.model.served_model_name == ("a", "b")
    assert config.log.log_level == "warning"
    assert config_from_keywords({"log_level": "info"}).log.log_level == "info"


def test_keywords_go_before_variables_and_those_before_a_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "serve.yaml"
    file.write_text("num-instances: 5\nmax-num-seqs: 6\nblock-size: 32\n")
    monkeypatch.setenv("KUNSERVE_NUM_INSTANCES", "4")
    monkeypatch.setenv("KUNSERVE_MAX_NUM_SEQS", "9")
    monkeypatch.setenv("KUNSERVE_CONFIG", str(file))
    config = config_from_keywords({"num_instances": 3})
    assert config.cluster.num_instances == 3
    assert config.scheduler.max_num_seqs == 9
    assert config.instance.block_size == 32


def test_what_is_switched_off_goes_before_variables_and_files_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "serve.yaml"
    file.write_text("park-behind-drop: true\n")
    monkeypatch.setenv("KUNSERVE_CHECK_INVARIANTS", "1")
    monkeypatch.setenv("KUNSERVE_CONFIG", str(file))
    on = config_from_keywords({})
    assert on.cluster.check_invariants and on.overload.park_behind_drop
    off = config_from_keywords({"check_invariants": False, "park_behind_drop": False})
    assert not off.cluster.check_invariants and not off.overload.park_behind_drop


def test_what_a_server_is_told_is_not_meant(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KUNSERVE_API_KEY_FILE", "/nowhere")
    monkeypatch.setenv("KUNSERVE_MAX_NUM_QUEUED_REQS", "1")
    config = config_from_keywords({"request_timeout": 60})
    assert config.server == ServerConfig(request_timeout_s=60.0)


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ({"num_instance": 2}, "Did you mean `num-instances`"),
        ({"num_instances": "many"}, "an integer from 1"),
        ({"num_instances": True}, "an integer from 1"),
        ({"num_instances": 0}, "an integer from 1"),
        ({"instance_memory": "lots"}, "800MiB"),
        ({"tensor_parallel_size": 0}, "tensor"),
        ({"port": 8000}, "`port` is about a server"),
        ({"enable_admin": True}, "about a server"),
        ({"front_grace": 3}, "about a server"),
        ({"reasoning_parser": "qwen3"}, "about a server"),
        ({"overload_policy": "drop", "pipeline_parallel_size": 2}, "pipelines of 2"),
    ],
)
def test_what_cannot_work_is_said(given: dict[str, Any], says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        config_from_keywords(given)
