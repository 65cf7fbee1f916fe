"""The script for a day on a GPU, rehearsed on the stand-in for its driver."""

import json
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from benchmarks import gpu_day
from benchmarks.gpu_day import Day
from benchmarks.gpu_kit import parts
from benchmarks.gpu_kit.tile_table import TABLE
from benchmarks.gpu_phases import probe
from benchmarks.gpu_phases.costs import PROFILE
from benchmarks.gpu_phases.machine import FAKE_GRANULARITY_BYTES, SHAPES
from kunserve.model.profile import read_profile
from kunserve_extras.triton_ops.tiles import table_rows, tiles_for
from kunserve_lab.bench.with_parent import with_parent
from tests.fakecuda.library import FakeCuda

QUICK = ("S", "P0", "P1", "P2", "P4", "P5", "P5b", "P8")


def figures_of(lines: str) -> dict[str, float | None]:
    found = [json.loads(line) for line in lines.splitlines() if '"settings"' in line]
    return {figure["name"]: figure["value"] for figure in found}


@pytest.mark.dear
def test_phases_without_a_server(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """In this process, because most of the time would go into starting another one."""
    monkeypatch.setenv(
        "FAKECUDA_GRANULARITY_BYTES", str(FAKE_GRANULARITY_BYTES)
    )  # so it stays here
    fake = FakeCuda(FAKE_GRANULARITY_BYTES, 1 << 30)
    for name in QUICK:
        gpu_day.run_here(name, "fake", tmp_path)
        assert fake.left() == {}, name
    found = figures_of(capsys.readouterr().out)
    assert found["missing packages"] == 0
    assert found["bytes seen through a second mapping"] == 1
    assert {"set access, all in one call", "map a second time", "commit a drop"} <= set(found)
    assert {"export a granule", "import and map a granule"} <= set(found)
    assert {"attention", "prompt speed", "step reads"} <= set(found)
    assert {"attention reads", "tiles chosen"} <= set(found)
    table = json.loads((tmp_path / TABLE).read_text())
    assert table[0]["device"] == "fake" and table[1:] == table_rows()
    assert tiles_for(SHAPES["tiny"], "fake", table).parts == table[0]["parts"]
    assert found["recorded again"] == 0 < found["graphs launched"]
    assert {"a token", "held-out error", "predicted / measured"} <= set(found)
    assert len(read_profile(tmp_path / PROFILE).samples) == found["batches"]
    assert not list(tmp_path.glob("*.samples.jsonl")), "its measurements are in the profile"


@pytest.mark.slow
def test_servers_that_are_asked_once(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """P3 and P3b fail if a token is not that of transformers. All servers of a phase start
    from a folder, so each takes as long as a dozen other tests.
    """
    monkeypatch.setenv("FAKECUDA_GRANULARITY_BYTES", str(FAKE_GRANULARITY_BYTES))
    for name in ("P3", "P3b", "P9"):
        gpu_day.run_here(name, "fake", tmp_path)
    found = figures_of(capsys.readouterr().out)
    assert found["answers equal to those of transformers"] == found["answers"] == 10
    assert {"tokens", "largest margin of those", "a token", "all done after"} <= set(found)


@pytest.mark.dear
def test_two_processes_under_load(tmp_path: Path) -> None:
    found = gpu_day.run_apart("P6", Day("fake", tmp_path), 250.0, ("14b, mapped",))
    assert found["outcome"] == gpu_day.DONE, found["log"]
    kinds = [one["settings"].get("transition") for one in found["figures"]]
    assert {"drop", "restore"} <= set(kinds)
    report = gpu_day.write_report(tmp_path).read_text()
    assert "| P6 | load | done |" in report and "| P1 | mapping | not run |" in report
    assert "P1: not run" in report and "say nothing about a GPU" in report
    assert (tmp_path / "P6-a-drop-and-a-restore-under-load.png").exists()


@pytest.mark.slow
def test_all_phases(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "benchmarks.gpu_day", "--device", "fake"]
    command = with_parent([*command, "--out", str(tmp_path)], signal.SIGTERM)
    subprocess.run(command, cwd=gpu_day.ROOT, check=True)
    for name in gpu_day.PHASES:
        assert json.loads((tmp_path / f"{name}.json").read_text())["outcome"] == gpu_day.DONE


def test_a_phase_that_takes_too_long_is_stopped(tmp_path: Path) -> None:
    found = gpu_day.run_apart("P1", Day("fake", tmp_path), 0.05)
    assert found["outcome"].startswith("stopped after")
    assert json.loads((tmp_path / "P1.json").read_text()) == found
    assert "stopped after" in gpu_day.write_report(tmp_path).read_text()


def test_what_is_done_is_not_done_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ran: list[str] = []
    limits: dict[str, float] = {}
    outcomes = {"P0": "failed with exit code 1", "P1": gpu_day.DONE, "P2": gpu_day.DONE}

    def run_apart(
        name: str, day: Day, limit_s: float, only: tuple[str, ...], anew: bool
    ) -> dict[str, Any]:
        ran.append(name)
        limits[day.device] = limit_s
        found: dict[str, Any] = {"outcome": outcomes[name], "device": day.device, "seconds": 1.0}
        found |= {"figures": [], "log": ["it broke"]}
        (day.out / f"{name}.json").write_text(json.dumps(found))
        return found

    def call(*flags: str) -> int:
        ran.clear()
        monkeypatch.setattr(sys, "argv", ["gpu_day", "--out", str(tmp_path), *flags])
        with pytest.raises(SystemExit) as end:
            gpu_day.main()
        return int(end.value.code or 0)

    monkeypatch.setattr(gpu_day, "run_apart", run_apart)
    monkeypatch.setattr(gpu_day, "has_driver", lambda: True)
    assert call("--phases", "P0,P1") == 1 and ran == ["P0", "P1"]
    assert call("--phases", "P0,P1,P2") == 1 and ran == ["P0", "P2"]
    assert call("--phases", "P1", "--again") == 0 and ran == ["P1"]
    assert call("--phases", "P1", "--again") == 0 and limits["cuda"] == 120.0
    assert call("--phases", "P1", "--device", "fake") == 0 and ran == ["P1"]
    assert limits["fake"] == 600.0, "a small machine that others use, too"
    assert call("--phases", "P2", "--within", "0") == 0 and ran == [], "done, so no time is needed"
    assert "it broke" in (tmp_path / "report.md").read_text()


def test_a_phase_that_there_is_not_is_said(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["gpu_day", "--phases", "P0,P77"])
    with pytest.raises(SystemExit):
        gpu_day.main()
    assert "P77 is none of S, P3" in capsys.readouterr().err


def test_no_driver_is_said_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu_day, "LIBRARY", "libnothing.so")
    monkeypatch.setattr(sys, "argv", ["gpu_day", "--out", str(tmp_path / "out")])
    with pytest.raises(SystemExit, match=r"no driver \(libnothing.so\).*--device fake"):
        gpu_day.main()
    assert not (tmp_path / "out").exists()


def test_half_a_line_of_a_killed_process_is_no_figure(tmp_path: Path) -> None:
    path = tmp_path / "P1.jsonl"
    path.write_text('{"name": "map", "settings": {}}\nother words\n{"name": "unm')
    assert parts.read(path).figures == [{"name": "map", "settings": {}}]


def test_missing_packages_come_with_a_command(monkeypatch: pytest.MonkeyPatch) -> None:
    real = probe.importlib.metadata.version

    def version(name: str) -> str:
        if name in ("msgspec", "gguf", "scipy"):
            raise probe.importlib.metadata.PackageNotFoundError(name)
        return real(name)

    monkeypatch.setattr(probe.importlib.metadata, "version", version)
    assert probe.missing() == ["gguf>=0.17,<1", "msgspec>=0.19,<1", "scipy>=1.13,<2"]
    download, install = probe.how_to_bring(probe.missing()).splitlines()
    assert download.startswith("pip download --only-binary=:all: --python-version 3")
    assert download.endswith("--dest wheels 'gguf>=0.17,<1' 'msgspec>=0.19,<1' 'scipy>=1.13,<2'")
    assert install.startswith("pip install --no-index --find-links wheels 'gguf")
