"""The tooling of a day on a GPU: what is left when a phase is killed, fails or loses its device."""

import contextlib
import importlib.metadata
import json
import os
import signal
import subprocess
import sys
import tarfile
import time
from functools import partial
from pathlib import Path

import pytest

from benchmarks.gpu_day import Day, known, run_apart, run_legs
from benchmarks.gpu_kit import children, evidence, parts, travel
from benchmarks.gpu_kit.calls import CALL_S, CALLS, Leg
from benchmarks.gpu_kit.parts import Known, Part

PHASE = """
import json, os, sys, time
from benchmarks.gpu_kit import parts
from benchmarks.gpu_kit.parts import Known, Part
from pathlib import Path

def say(name):
    print(json.dumps({"name": name, "value": 1.0, "unit": "", "settings": {"device": "fake"}}),
          flush=True)

def end():
    say("half of it")
    while os.path.exists("waits"):
        time.sleep(0.01)
    if not os.path.exists("go on"):
        os.kill(os.getpid(), 9)

def break_():
    assert not os.path.exists("broken"), "it broke"

work = {"first": lambda: say("one"), "second": break_, "third": end, "fourth": lambda: say("four")}
parts.do([Part(n, w) for n, w in work.items()], Known.of(Path("P1.jsonl")), lambda: True)
"""
"""A phase of four parts, of which one breaks and one is killed, run where its files are to be."""


@pytest.fixture
def day(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Day:
    """One whose phases are that script."""
    out = tmp_path / "out"
    out.mkdir()
    root = Path(__file__).parents[3]
    monkeypatch.setattr("benchmarks.gpu_day.ROOT", out)
    monkeypatch.setattr("benchmarks.gpu_day._command", lambda *args: [sys.executable, "-c", PHASE])
    return Day("fake", out, tmp_path / "evidence", {"PYTHONPATH": str(root)})


def names(found: dict[str, object]) -> list[str]:
    figures = found["figures"]
    assert isinstance(figures, list)
    return [figure["name"] for figure in figures]


def states(lines: parts.Lines) -> dict[str, str]:
    return {name: one["is"] for name, one in lines.parts.items()}


def packed(path: Path, folder: Path) -> parts.Lines:
    with tarfile.open(path) as tar:
        tar.extractall(folder, filter="data")
    return parts.read(folder / "P1.jsonl")


def test_a_phase_that_is_killed_leaves_what_it_had_and_a_next_call_does_the_rest(
    day: Day, tmp_path: Path
) -> None:
    (day.out / "broken").touch()
    found = run_apart("P1", day, 60.0)
    assert found["outcome"] == "failed with exit code -9 (2 of 3 parts: second, third)"
    assert names(found) == ["one", "half of it"]
    assert day.evidence is not None
    tar = day.evidence / "P1.tar.gz"
    expected = {"first": "done", "second": "failed", "third": "begun"}
    assert states(packed(tar, tmp_path / "seen")) == expected
    assert "it broke" in (tmp_path / "seen" / "P1.log").read_text()
    # A bare machine, with nothing but the file.
    (again := tmp_path / "bare").mkdir()
    assert evidence.unpack(day.evidence, again) == ["P1"]
    (again / "go on").touch()
    next_day = Day("fake", again, day.evidence, day.environment)
    found = run_apart_in(again, next_day)
    assert found["outcome"] == "done"
    assert names(found) == ["one", "half of it", "four"], "what was done is there, once"
    assert set(states(packed(tar, tmp_path / "later")).values()) == {"done"}


def run_apart_in(folder: Path, day: Day) -> dict[str, object]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("benchmarks.gpu_day.ROOT", folder)
        return run_apart("P1", day, 60.0)


def test_what_a_killed_caller_has_packed_is_whole(day: Day, tmp_path: Path) -> None:
    """After the first part, while the phase goes on."""
    assert day.evidence is not None
    (day.out / "waits").touch()
    script = f"""
import sys
from pathlib import Path
import benchmarks.gpu_day as day
day.ROOT = Path({str(day.out)!r})
day._command = lambda *args: [sys.executable, '-c', {PHASE!r}]
here = day.Day('fake', day.ROOT, Path({str(day.evidence)!r}), {day.environment!r})
day.run_apart('P1', here, 60.0)
"""
    root = Path(__file__).parents[3]
    caller = subprocess.Popen([sys.executable, "-c", script], cwd=root, start_new_session=True)
    tar, until = day.evidence / "P1.tar.gz", time.monotonic() + 60.0
    try:
        while not tar.exists() or "third" not in (day.out / "P1.jsonl").read_text():
            assert time.monotonic() < until
            time.sleep(0.05)
    finally:
        caller.send_signal(signal.SIGKILL)
        caller.wait()
    seen = packed(tar, tmp_path / "seen")
    assert states(seen)["first"] == "done" and seen.figures[0]["name"] == "one"


def test_a_part_that_raises_stops_no_other_and_comes_last_next_time(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    ran: list[str] = []

    def work(name: str, breaks: bool) -> None:
        ran.append(name)
        assert not breaks, "it broke"

    some = [Part(name, partial(work, name, name == "a")) for name in "abc"]
    with pytest.raises(parts.PartsFailed, match="a: AssertionError: it broke"):
        parts.do(some, Known(), lambda: True)
    assert ran == ["a", "b", "c"]
    path = tmp_path / "P1.jsonl"
    path.write_text(capsys.readouterr().out)
    before = Known.of(path)
    assert before.done == {"b", "c"} and before.failed == {"a"}
    more = [*some, Part("d", partial(work, "d", False))]
    assert [part.name for part in before.left_of(more)] == ["d", "a"]
    assert [part.name for part in Known(only=("[b-c]",)).left_of(more)] == ["b", "c"]


def test_a_lost_device_ends_the_phase_and_that_part_is_examined(
    day: Day, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(parts.DeviceIsLost, match="a: "):
        parts.do([Part("a", lambda: 1 / 0), Part("b", print)], Known(), lambda: False)
    lost = 'print(\'{"part": "a", "is": "lost"}\'); raise SystemExit(75)'
    monkeypatch.setattr(
        "benchmarks.gpu_day._command",
        lambda name, day, limit_s, only: [sys.executable, "-c", lost, *only],
    )
    checker = tmp_path / "checker"
    checker.write_text('#!/bin/sh\necho "checked: $@"\n')
    checker.chmod(0o755)
    monkeypatch.setattr(evidence, "find_sanitizer", lambda: str(checker))
    found = run_apart("P2", day, 60.0)
    assert found["outcome"] == "lost the device (1 of 1 parts: a)"
    said = (day.out / "P2.sanitizer.log").read_text()
    assert said.startswith("checked: --tool memcheck ") and said.endswith(" a\n")


class _Enough(Exception):
    pass


def test_nothing_is_left_of_a_phase_however_it_ends(tmp_path: Path) -> None:
    """Neither what has a session of its own, as servers have, nor what ignores a first word."""

    def look() -> None:
        if (tmp_path / "said").exists():
            raise _Enough

    stubborn = "import signal, time; signal.signal(15, lambda *a: print(flush=True)); "
    stubborn += "open('pid', 'w').write(str(__import__('os').getpid())); time.sleep(600)"
    script = f"""
import os, subprocess, sys, time
subprocess.Popen([sys.executable, "-c", {stubborn!r}], start_new_session=True)
while not os.path.exists("pid"):
    time.sleep(0.01)
open("said", "w").write("started")
sys.exit(0) if sys.argv[1] == "ends" else time.sleep(600)
"""
    for how in ("ends", "hangs"):
        with (tmp_path / "log").open("wb") as log, pytest.MonkeyPatch.context() as patch:
            patch.setattr("benchmarks.gpu_kit.children._ORPHANS_S", 0.5)
            with contextlib.nullcontext() if how == "ends" else pytest.raises(_Enough):
                code = children.run(
                    [sys.executable, "-c", script, how],
                    folder=tmp_path, environment={}, stdout=log, stderr=log, limit_s=99.0,
                    look=look if how == "hangs" else lambda: None,
                )  # fmt: skip
                assert code == 0
        pid = int((tmp_path / "pid").read_text())
        with pytest.raises(ProcessLookupError):
            os.kill(pid, 0)
        (tmp_path / "pid").unlink()
        (tmp_path / "said").unlink()


def test_neither_a_phase_nor_its_server_outlives_a_caller_that_is_killed(tmp_path: Path) -> None:
    """Who is killed ends nobody: `subprocess.run` of a test kills soon after Ctrl-C."""
    phase = """
import os, sys, time
from pathlib import Path
from kunserve_lab.bench.server_process import ServerProcess

stays = [sys.executable, "-c", "import time; time.sleep(600)"]
server = ServerProcess(stays, 1, Path("server.log"))
Path("new").write_text(f"{os.getpid()} {server._process.pid}")
Path("new").rename("pids")
time.sleep(600)
"""
    caller = f"""
import sys
from pathlib import Path
from benchmarks.gpu_kit import children
children.run([sys.executable, "-c", {phase!r}], folder=Path({str(tmp_path)!r}), environment={{}},
             stdout=sys.stdout.buffer, stderr=sys.stderr.buffer, limit_s=600.0)
"""
    root, until = Path(__file__).parents[3], time.monotonic() + 60.0
    process = subprocess.Popen(
        [sys.executable, "-c", caller], cwd=root, env={**os.environ, "PYTHONPATH": str(root)}
    )
    pids: list[int] = []
    try:
        while not (tmp_path / "pids").exists():
            assert process.poll() is None and time.monotonic() < until
            time.sleep(0.05)
        pids = [int(word) for word in (tmp_path / "pids").read_text().split()]
        process.kill()
        process.wait()
        while any(runs(pid) for pid in pids):
            assert time.monotonic() < until, "somebody is left behind"
            time.sleep(0.05)
    finally:
        process.kill()
        for pid in filter(runs, pids):
            os.kill(pid, signal.SIGKILL)


def runs(pid: int) -> bool:
    """Zombies, for whom nobody has asked yet, do not."""
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    return False


def test_packing_leaves_out_models_and_what_is_too_large_and_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out, where = tmp_path / "out", tmp_path / "evidence"
    (out / "model").mkdir(parents=True)
    (out / "model" / "tokenizer.json").write_text("{}")
    (out / "P1.jsonl").write_text("{}\n")
    (out / "P1.log").write_text("x" * 100)
    (out / "profile.json").write_text("{}")
    (out / "large").write_bytes(os.urandom(4000))
    monkeypatch.setattr(evidence, "MOST_BYTES", 4000)
    monkeypatch.setattr(evidence, "MOST_LOG_BYTES", 40)
    path = evidence.pack("P1", out, where, 0.0)
    with tarfile.open(path) as tar:
        assert tar.getnames() == ["P1.jsonl", "P1.log", "profile.json", "P1.left_out.txt"]
        log = tar.extractfile("P1.log")
        assert log is not None and b"[... cut ...]" in log.read()
    assert [one.name for one in where.iterdir()] == ["P1.tar.gz"]
    (where / "P2.tar.gz").write_bytes(path.read_bytes()[:50])
    assert evidence.unpack(where, tmp_path / "new") == ["P1"], "a broken file is only said"


def test_a_done_phase_is_run_again_only_for_parts_that_were_not_asked_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ran: list[tuple[str, ...]] = []

    def done(
        name: str, day: Day, limit_s: float, only: tuple[str, ...], anew: bool
    ) -> dict[str, object]:
        ran.append(only)
        found = {"outcome": "done", "device": "fake", "only": list(only), "seconds": 0}
        found |= {"figures": [], "log": []}
        (day.out / f"{name}.json").write_text(json.dumps(found))
        return found

    monkeypatch.setattr("benchmarks.gpu_day.run_apart", done)
    day = Day("fake", tmp_path)
    for only in (("a",), ("a",), (), ("b",)):
        assert run_legs([Leg("P1", 9.0, only)], day, 99.0, anew=False)
    assert ran == [("a",), ()]


def test_a_phase_that_was_cut_off_is_known_by_its_lines(tmp_path: Path) -> None:
    figure = {"name": "x", "value": 1.0, "unit": "", "settings": {"device": "cuda"}}
    lines = [{"part": "a", "is": "begun"}, figure, {"part": "a", "is": "done"}]
    (tmp_path / "P1.jsonl").write_text("\n".join(map(json.dumps, lines)) + '\n{"part')
    found = known("P1", tmp_path)
    assert found is not None and found["outcome"] == "cut off" and found["device"] == "cuda"


def test_every_call_ends_in_time() -> None:
    for call in CALLS.values():
        assert call.seconds <= CALL_S, call.arithmetic
        assert len({leg.phase for leg in call.legs}) <= 7, "eight files come back, with the log"


def test_what_travels_is_as_if_installed(tmp_path: Path) -> None:
    travel.pack_project(tmp_path / "project.tar.gz")
    with tarfile.open(tmp_path / "project.tar.gz") as tar:
        tar.extractall(tmp_path / "project", filter="data")
    (found,) = importlib.metadata.distributions(path=[str(tmp_path / "project")])
    points = {(one.group, one.name): one.value for one in found.entry_points}
    assert points["kunserve.attention", "triton"] == "kunserve_extras.triton_ops.ops"
    assert ("kunserve.ranks", "devices") in points and found.metadata["Name"] == "kunserve"
    assert (tmp_path / "project" / "tests" / "fakecuda" / "fakecuda.c").exists()


def test_commands_fit_and_what_travels_is_weighed(tmp_path: Path) -> None:
    for name in CALLS:
        text = travel.command(name, " --device fake")
        assert len(text) <= travel.MOST_CHARACTERS
        assert subprocess.run(["bash", "-n", "-c", text], check=False).returncode == 0
    subprocess.run(["git", "init", "-q", str(tmp_path)], check=True)
    (tmp_path / ".gpu").mkdir()
    (tmp_path / "own").write_text("12345")
    (tmp_path / "packed").mkdir()
    (tmp_path / "packed" / "P1.tar.gz").write_text("123")
    travel._ignore(tmp_path)
    travel._ignore(tmp_path)
    travel.take_state(tmp_path / "packed", tmp_path / ".gpu" / "state")
    assert travel.bytes_of(tmp_path) == {"checkout": 8, "state": 3}
    exclude = (tmp_path / ".git" / "info" / "exclude").read_text()
    assert exclude.splitlines().count("/.gpu/") == 1
