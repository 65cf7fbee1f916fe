"""Flags from the environment and from a file: who goes before whom, and what a slip is told."""

import subprocess
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner

import kunserve.server.start.launch as launch
from kunserve.core.config import MIB, KunServeConfig
from kunserve.server.start.command import config_from_flags, serve_command
from kunserve.server.start.flags.environment import variables_of


@pytest.fixture
def clean(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    for name in variables_of(serve_command):
        monkeypatch.delenv(name, raising=False)
    return monkeypatch


def parsed(*args: str) -> KunServeConfig:
    return config_from_flags(serve_command.make_context("serve", list(args)).params)


def refused(*args: str, env: dict[str, str] | None = None) -> str:
    result = CliRunner().invoke(serve_command, list(args), env=env)
    assert result.exit_code == 2, result.output
    return " ".join(result.output.partition("Error:")[2].split())


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "serve.yaml"
    path.write_text(
        "model: ./Qwen2.5-0.5B\nport: 9001\nnum-instances: 4\ninstance_memory: 2GiB\n"
        "no-lookahead: true\nenable-admin: true\napi_key: from-file\n"
    )
    return path


def test_command_line_before_environment_before_file(clean: pytest.MonkeyPatch, file: Path) -> None:
    clean.setenv("KUNSERVE_NUM_INSTANCES", "3")
    clean.setenv("KUNSERVE_PORT", "9002")
    config = parsed("--config", str(file), "--port", "9003")
    assert config.server.port == 9003
    assert config.cluster.num_instances == 3
    assert config.instance.memory_bytes == 2048 * MIB
    assert config.model.model == "./Qwen2.5-0.5B"
    assert not config.scheduler.lookahead and config.server.enable_admin
    assert config.server.api_key == "from-file"
    clean.setenv("KUNSERVE_MODEL", "from-environment")
    clean.setenv("KUNSERVE_CONFIG", str(file))
    assert parsed().model.model == "from-environment"
    assert parsed("given").model.model == "given"


def test_every_flag_has_a_variable(clean: pytest.MonkeyPatch) -> None:
    clean.setenv("KUNSERVE_API_KEY", "k")
    clean.setenv("KUNSERVE_LOOKAHEAD", "0")
    clean.setenv("KUNSERVE_ENABLE_ADMIN", "true")
    clean.setenv("KUNSERVE_INSTANCE_MEMORY", "600MiB")
    clean.setenv("KUNSERVE_SHUTDOWN_TIMEOUT", "7")
    config = parsed()
    assert config.server.api_key == "k" and config.server.enable_admin
    assert not config.scheduler.lookahead
    assert config.instance.memory_bytes == 600 * MIB
    assert config.server.shutdown_timeout_s == 7.0


def test_a_wrong_variable_is_named(clean: pytest.MonkeyPatch) -> None:
    assert "KUNSERVE_PORT" in refused(env={"KUNSERVE_PORT": "eighty"})


def test_an_empty_key_in_the_environment_lets_nobody_in(clean: pytest.MonkeyPatch) -> None:
    assert "KUNSERVE_API_KEY is empty" in refused(env={"KUNSERVE_API_KEY": ""})


def test_what_kubernetes_writes_is_no_setting(clean: pytest.MonkeyPatch) -> None:
    """A service named ``kunserve`` puts these into every pod of its namespace."""
    clean.setenv("KUNSERVE_PORT", "tcp://10.0.0.7:8000")
    clean.setenv("KUNSERVE_SERVICE_HOST", "10.0.0.7")
    clean.setenv("KUNSERVE_PORT_8000_TCP_ADDR", "10.0.0.7")
    clean.setenv("KUNSERVE_SERVICE_PORT_HTTP", "8000")
    assert parsed().server.port == 8000
    assert not said_at_start(clean)


def said_at_start(monkeypatch: pytest.MonkeyPatch, *args: str) -> list[str]:
    said: list[str] = []

    async def run_server(_config: KunServeConfig) -> None:
        pass

    monkeypatch.setattr(launch, "run_server", run_server)
    for level in ("info", "warning"):
        monkeypatch.setattr(
            f"kunserve.server.start.command.logger.{level}",
            lambda text, *rest: said.append(text % rest),
        )
    result = CliRunner().invoke(serve_command, list(args))
    assert result.exit_code == 0, result.output
    return said


def test_the_log_says_where_settings_came_from(clean: pytest.MonkeyPatch, file: Path) -> None:
    clean.setenv("KUNSERVE_API_KEY", "hidden")
    clean.setenv("KUNSERVE_PROT", "80")
    clean.setenv("KUNSERVE_KERNELS", "")
    said = said_at_start(clean, "--config", str(file))
    assert (
        f"settings file={file} keys=model,num-instances,instance-memory,lookahead,port," in said[0]
    )
    assert said[1:] == [
        "settings environment=KUNSERVE_API_KEY",
        "the variable KUNSERVE_PROT is no setting; did you mean KUNSERVE_PORT?",
    ]


@pytest.mark.parametrize(
    ("content", "said"),
    [
        ("prot: 1", "serve.yaml: `prot` is no setting. Did you mean `port`?"),
        ("whatever: 1", "serve.yaml: `whatever` is no setting."),
        ("data_parallel_size: 2", "`data_parallel_size` is not supported: use --num-instances"),
        ("port: eighty", "serve.yaml: `port` must be an integer from 0 to 65535: 'eighty'"),
        ("port: 80000", "`port` must be an integer from 0 to 65535: 80000 is not in the range"),
        ("port: 1.5", "`port` must be an integer from 0 to 65535: 1.5 is no integer"),
        ("port: true", "`port` must be an integer from 0 to 65535: True is something else"),
        ("port: [1]", "`port` must be an integer from 0 to 65535: [1] is something else"),
        ("dtype: int4", "`dtype` must be one of bfloat16, float16, float32: 'int4' is not one of"),
        ("enable-admin: 1", "`enable-admin` must be true or false: 1 is neither"),
        ("api-key: 123", "`api-key` must be a text: 123 is no text, put it between quotes"),
        ("api-key:", "`api-key` must be a text: it has no value here"),
        ("instance-memory: 600", "`instance-memory` must be a size such as 800MiB: 600 bytes are"),
        ("port: 1\nport : 2\nno_lookahead: true\nlookahead: true", "`lookahead` is given twice"),
        ("- port", "serve.yaml must hold lines of the form `key: value`"),
        ("port: 1\n  host: [", "serve.yaml, line 2: no valid YAML"),
    ],
)
def test_a_slip_in_the_file_is_told_by_file_and_key(
    tmp_path: Path, content: str, said: str
) -> None:
    path = tmp_path / "serve.yaml"
    path.write_text(content)
    assert said in refused("--config", str(path))


def test_a_file_that_is_not_there(tmp_path: Path) -> None:
    assert "missing.yaml cannot be read: No such file" in refused(
        "--config", str(tmp_path / "missing.yaml")
    )
    empty = tmp_path / "empty.yaml"
    empty.write_text("")
    assert parsed("--config", str(empty)) == parsed()


def test_completion_imports_no_server() -> None:
    """Completion runs at every Tab, and ``--help`` should not take a second."""
    code = """
import sys
from click.shell_completion import BashComplete
from kunserve.cli import main
complete = BashComplete(main, {}, "kunserve", "")
print(*(one.value for one in complete.get_completions([], "")))
print(*(one.value for one in complete.get_completions(["serve"], "--num-i")))
print(*sys.modules)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    commands, flags, modules = done.stdout.splitlines()
    assert {"serve", "bench", "simulate"} <= set(commands.split())
    assert flags == "--num-instances"
    heavy = {"numpy", "pydantic", "starlette", "transformers", "torch", "uvicorn", "zmq", "asyncio"}
    assert not heavy & set(modules.split())
