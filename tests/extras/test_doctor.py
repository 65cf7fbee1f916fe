"""What ``kunserve doctor`` finds, and what it says of it."""

import os
import socket
from pathlib import Path

import pytest
from click.testing import CliRunner

from kunserve.cli import main
from kunserve.cluster.processes import launch
from kunserve.core.config import KunServeConfig
from kunserve.core.errors import ConfigError, TooLittleMemory
from kunserve.engine.cpu.kernels import levels
from kunserve.engine.memory import address_space
from kunserve.engine.nodes import numa_nodes
from kunserve_extras import doctor
from tests.fakecuda.library import build


def found(subject: str, library: str = "/no/driver.so") -> list[doctor.Finding]:
    return [finding for finding in doctor.examine(library) if finding.subject == subject]


def test_this_machine_can_serve(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "available_bytes", lambda: 8 << 30)  # other tests may hold it
    findings = list(doctor.examine())
    assert not [finding for finding in findings if finding.verdict == "STOP"], findings
    assert len({finding.subject for finding in findings}) >= 8


def test_what_stops_a_server_is_the_exit_code(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "available_bytes", lambda: 1 << 20)
    result = CliRunner().invoke(main, ["doctor"])
    assert result.exit_code == 1
    assert "STOP memory" in result.output and "lower --instance-memory" in result.output


def test_memory_that_the_server_would_refuse_is_no_good(monkeypatch: pytest.MonkeyPatch) -> None:
    """Room for the instances themselves, but none for their processes."""
    monkeypatch.setattr(doctor, "available_bytes", lambda: 2100 << 20)
    assert found("memory")[0].verdict == "STOP"
    with pytest.raises(TooLittleMemory):
        monkeypatch.setattr(launch, "available_bytes", lambda: 2100 << 20)
        launch.check_memory(KunServeConfig())


def test_a_check_that_fails_is_a_finding(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse() -> None:
        raise ConfigError("no compiler")

    monkeypatch.setattr(doctor, "find_or_build", refuse)
    assert found("kernels") == [doctor.Finding("STOP", "kernels", "no compiler")]


@pytest.mark.parametrize(
    ("lacks", "refused", "wanted"),
    [
        ({"amx_tile"}, None, ("ok", "not used: this processor has no amx_tile")),
        (set(), "Linux refuses", ("note", "not used: Linux refuses")),
        (set(), None, ("ok", "used: Linux gives its tiles, and a product came out right")),
    ],
)
def test_tiles(monkeypatch: pytest.MonkeyPatch, lacks: set, refused: str | None, wanted) -> None:
    """Whatever this machine has: both answers are given here."""

    def answer(level: levels.Level) -> Path:
        if refused is not None:
            raise ConfigError(refused)
        return Path("kernels.so")

    (amx,) = (level for level in levels.LEVELS if level.has_tiles)
    monkeypatch.delenv(levels.VARIABLE, raising=False)
    monkeypatch.setattr(doctor.platform, "machine", lambda: amx.machine)
    monkeypatch.setattr(doctor, "processor_features", lambda: amx.needs - lacks)
    monkeypatch.setattr(doctor, "of_level", answer)
    (finding,) = found("AMX")
    assert (finding.verdict, finding.text) == wanted


@pytest.mark.parametrize(
    ("best", "is_slow", "verdict", "text"),
    [
        ("x86-64-v4-bf16", False, "ok", "x86-64-v4-bf16"),
        ("x86-64-v4-vnni", True, "ok", "twice as fast as its AVX-512 BF16"),
        ("x86-64-v4-vnni", False, "note", "no AVX-512 BF16"),
    ],
)
def test_bfloat16(monkeypatch: pytest.MonkeyPatch, best: str, is_slow: bool, verdict, text) -> None:
    level = next(level for level in levels.LEVELS if level.name == best)
    monkeypatch.setattr(doctor, "fitting_levels", lambda: (level,))
    monkeypatch.setattr(doctor, "has_slow_bfloat16", lambda: is_slow)
    (finding,) = found("processor")
    assert finding.verdict == verdict and text in finding.text


def test_a_kernel_that_cannot_move_pages(monkeypatch: pytest.MonkeyPatch) -> None:
    assert found("remap")[0].verdict == "ok"
    monkeypatch.setattr(address_space, "move", lambda *_: False)
    (finding,) = found("remap")
    assert finding.verdict == "note" and "Linux 5.13" in finding.text


def test_a_system_without_huge_pages(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(address_space, "populate_pages", lambda *_: False)
    (finding,) = found("huge pages")
    assert finding.verdict == "note" and "Linux 6.1" in finding.text


def test_a_port_in_use(monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen()
        port = listener.getsockname()[1]
        monkeypatch.setattr(doctor, "ServerConfig", lambda: Settings(port))
        (finding,) = found("port")
        assert f"127.0.0.1:{port}" in finding.text


class Settings:
    host = "127.0.0.1"

    def __init__(self, port: int) -> None:
        self.port = port


@pytest.mark.parametrize(
    ("cores", "verdict", "says"),
    [
        (["0-3"], "ok", "one node of memory"),
        (["0-1", "2-3"], "ok", "2 nodes of memory with 2 and 2 cores"),
        (["0", "1", "2-3"], "note", "--num-instances 3"),
    ],
)
def test_nodes_of_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, cores: list[str], verdict: str, says: str
) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(4)))
    for number, text in enumerate(cores):
        (tmp_path / f"node{number}").mkdir()
        (tmp_path / f"node{number}" / "cpulist").write_text(text)
    monkeypatch.setattr(doctor, "numa_nodes", lambda: numa_nodes(tmp_path))
    (finding,) = doctor._nodes()
    assert finding.verdict == verdict and says in finding.text


def test_devices_and_their_absence() -> None:
    (finding,) = found("CUDA")
    assert finding.verdict == "note" and "--device cuda" in finding.text
    (device,) = found("device 0", build())
    assert device.text.startswith("fake 0:") and "granules of" in device.text
