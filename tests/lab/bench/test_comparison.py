"""Comparisons of either world: what is run, in which order, what is kept, and what is not rerun."""

import contextlib
import dataclasses
from pathlib import Path
from unittest.mock import Mock

import pytest

from kunserve.core.code import HOUSES, code_of
from kunserve_lab.bench.environment import SIMULATED, version
from kunserve_lab.bench.metrics import compute_metrics
from kunserve_lab.bench.output.plot import plot_comparison
from kunserve_lab.bench.runfile import read_run, write_run
from kunserve_lab.compare import comparison, real
from kunserve_lab.compare.comparison import Options, compare
from kunserve_lab.compare.experiment import Experiment, World
from kunserve_lab.compare.output import files as output
from kunserve_lab.compare.real import RealRun, run_system, serve_arguments
from kunserve_lab.compare.results import load
from kunserve_lab.compare.settings import RealSetup, SimulatedSetup, WorkloadSettings
from kunserve_lab.compare.systems import find_system
from tests.lab.bench.comparisons import result, run_of

REQUESTS = WorkloadSettings(duration_s=20.0, rate=1.0)
REAL = Experiment(RealSetup(), REQUESTS, systems=("recompute", "drop"), rounds=2)
SMALL = Experiment(
    SimulatedSetup(num_instances=2), WorkloadSettings(duration_s=5.0, rate=2.0), loads=(0.5, 1.0)
)


class Servers:
    """Stands in for servers and clients, and writes down what was asked of them."""

    def __init__(self) -> None:
        self.started: list[str] = []
        self.fails_after: int | None = None
        self.ttft_s: float | None = 0.1

    def run_system(self, system, setup, workload, **more) -> RealRun:  # type: ignore[no-untyped-def]
        if len(self.started) == self.fails_after:
            raise KeyboardInterrupt
        assert self.ttft_s is not None, "nothing is left to run"
        self.started.append(system.name)
        run = run_of(system.name, [self.ttft_s] * 20)
        metrics = compute_metrics(run.records, run.duration_s)
        return RealRun(run, metrics, (f"{system.name} drop id=0",), (0.5, 1.0))


@pytest.fixture
def servers(monkeypatch: pytest.MonkeyPatch) -> Servers:
    made = Servers()
    monkeypatch.setattr(real, "run_system", made.run_system)
    return made


@pytest.fixture
def figures(monkeypatch: pytest.MonkeyPatch) -> list[list[float]]:
    """Stands in for figures, which take seconds: the durations of the runs of each timeline."""
    drawn: list[list[float]] = []

    def draw(runs, path, mark=""):  # type: ignore[no-untyped-def]
        drawn.append([run.duration_s for run in runs])
        path.write_text(mark)

    monkeypatch.setattr(output, "plot_comparison", draw)
    monkeypatch.setattr(output, "plot_violations", lambda group, path: None)
    monkeypatch.setattr(output, "plot_loads", lambda groups, path: None)
    return drawn


def test_real_systems_run_in_turns_and_are_kept(servers: Servers, tmp_path: Path) -> None:
    said: list[str] = []
    results = compare(REAL, tmp_path, say=said.append)
    assert servers.started == ["recompute", "drop", "drop", "recompute"]
    assert len(results) == 4 and load(tmp_path) == results
    names = {path.name for path in tmp_path.iterdir()}
    assert {"table.txt", "report.html", "timeline.png", "slo.png"} <= names
    assert len(read_run(tmp_path / "drop-load1-seed0-round2.jsonl").records) == 20
    text = "\n".join(said)
    assert "run 1 of 4: recompute, load 1, seed 0, round 1" in text
    assert "run 3 of 4, about 0 min left: drop, load 1, seed 0, round 2" in text
    assert "recompute drop id=0" in text and "client lag P99 (ms)" in text
    assert "2 runs of each system" in (tmp_path / "table.txt").read_text()
    assert results[0].environment == {} and results[0].load_average == (0.5, 1.0)


@pytest.mark.usefixtures("figures")
def test_an_interrupted_comparison_goes_on_where_it_stopped(
    servers: Servers, tmp_path: Path
) -> None:
    servers.fails_after = 3
    with pytest.raises(KeyboardInterrupt):
        compare(REAL, tmp_path, say=lambda text: None)
    assert len(load(tmp_path)) == 3
    servers.fails_after = None
    said: list[str] = []
    results = compare(REAL, tmp_path, say=said.append)
    assert servers.started == ["recompute", "drop", "drop", "recompute"]
    assert len(results) == 4 and said[0].startswith("3 of 4 runs are in")
    assert (tmp_path / "timeline.png").exists()
    compare(REAL, tmp_path, say=said.append)
    assert len(servers.started) == 4
    compare(REAL, tmp_path, Options(is_fresh=True), said.append)
    assert len(servers.started) == 8


@pytest.mark.usefixtures("figures")
def test_an_interrupted_fresh_comparison_leaves_no_old_run_beside_new_ones(
    servers: Servers, tmp_path: Path
) -> None:
    compare(REAL, tmp_path, say=lambda text: None)
    other_load = dataclasses.replace(REAL, loads=(2.0,))
    compare(other_load, tmp_path, say=lambda text: None)
    old = load(tmp_path)
    servers.started.clear()
    servers.fails_after = 3
    with pytest.raises(KeyboardInterrupt):
        compare(REAL, tmp_path, Options(is_fresh=True), lambda text: None)
    assert [run.load for run in load(tmp_path)] == [2.0] * 4 + [1.0] * 3
    assert load(tmp_path / "replaced.jsonl") == [run for run in old if run.load == 1.0]
    servers.fails_after = None
    said: list[str] = []
    assert len(compare(REAL, tmp_path, say=said.append)) == 4
    assert said[0].startswith("3 of 4 runs are in") and len(servers.started) == 4


@pytest.mark.usefixtures("figures")
@pytest.mark.parametrize("is_fresh", [False, True])
def test_a_torn_line_is_run_again(is_fresh: bool, servers: Servers, tmp_path: Path) -> None:
    compare(REAL, tmp_path, say=lambda text: None)
    path = tmp_path / "results.jsonl"
    path.write_bytes(path.read_bytes()[:-30])
    servers.started.clear()
    said: list[str] = []
    compare(REAL, tmp_path, Options(is_fresh=is_fresh), said.append)
    assert said[0].endswith("results.jsonl was torn: its run is run again")
    assert len(servers.started) == (4 if is_fresh else 1) and len(load(tmp_path)) == 4


@pytest.mark.usefixtures("figures")
def test_other_settings_are_run_again(servers: Servers, tmp_path: Path) -> None:
    compare(REAL, tmp_path, say=lambda text: None)
    larger = dataclasses.replace(REAL, setup=RealSetup(instance_memory="400MiB"))
    compare(larger, tmp_path, say=lambda text: None)
    assert len(servers.started) == 8
    other = dataclasses.replace(REAL, systems=("recompute", "drop-deep"))
    compare(dataclasses.replace(other, setup=larger.setup), tmp_path, say=lambda text: None)
    assert servers.started[8:] == ["drop-deep", "drop-deep"]
    assert len(load(tmp_path)) == 6


def test_runs_of_other_loads_are_not_drawn_or_lost(
    servers: Servers, figures: list[list[float]], tmp_path: Path
) -> None:
    """Each of these calls finds the folder as the one before it left it."""
    for load_, ttft_s in ((0.5, 0.1), (2.0, 9.0), (0.5, None)):
        servers.ttft_s = ttft_s
        compare(dataclasses.replace(REAL, loads=(load_,)), tmp_path, say=lambda text: None)
    assert len(servers.started) == 8, "the third call finds what the first one ran"
    assert figures[0] == figures[2] != figures[1]
    kept = read_run(tmp_path / "drop-load0.5-seed0-round1.jsonl")
    assert [kept.duration_s] * 2 == figures[0]
    changed = dataclasses.replace(kept, config=(("result", "of other settings"),))
    write_run(tmp_path / "drop-load0.5-seed0-round1.jsonl", changed)
    compare(dataclasses.replace(REAL, loads=(2.0,)), tmp_path, say=lambda text: None)
    compare(dataclasses.replace(REAL, loads=(0.5,)), tmp_path, say=lambda text: None)
    assert len(figures) == 4 and not (tmp_path / "timeline.png").exists()


@pytest.mark.usefixtures("figures")
def test_a_timeline_stays_as_long_as_it_is_of_these_runs(tmp_path: Path) -> None:
    alone = dataclasses.replace(SMALL, systems=("recompute",))

    def is_shown(at: float) -> bool:
        experiment = dataclasses.replace(alone, loads=(at,))
        compare(experiment, tmp_path, Options(num_jobs=1), lambda text: None)
        shown = "Over time" in (tmp_path / "report.html").read_text()
        assert (tmp_path / "timeline.png").exists() is shown
        return shown

    assert is_shown(0.5)
    assert is_shown(0.5), "no requests were kept, but the figure is still of these"
    assert is_shown(1.0)
    assert not is_shown(0.5)


def test_a_png_has_its_mark_among_its_bytes(tmp_path: Path) -> None:
    plot_comparison([run_of("drop", [0.1] * 3)], tmp_path / "timeline.png", "12ab 34cd")
    assert b"12ab 34cd" in (tmp_path / "timeline.png").read_bytes()


@pytest.mark.usefixtures("figures")
def test_simulations_are_not_run_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    options = Options(num_jobs=1)
    first = compare(SMALL, tmp_path, options, say=lambda text: None)
    table = (tmp_path / "table.txt").read_text()
    written = (tmp_path / "results.jsonl").read_bytes()

    def none_left(jobs, limit):  # type: ignore[no-untyped-def]
        assert not jobs
        return iter(())

    monkeypatch.setattr(comparison, "run_simulated", none_left)
    said: list[str] = []
    assert compare(SMALL, tmp_path, options, said.append) == first
    assert said[0].startswith("4 of 4 runs are in")
    assert (tmp_path / "results.jsonl").read_bytes() == written
    assert (tmp_path / "table.txt").read_text() == table


def test_a_run_is_of_the_code_that_its_server_was_started_from(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The tree may change under a comparison of hours."""
    tree = {"code": "old"}
    run = run_of("drop", [0.1])
    measured = RealRun(run, compute_metrics(run.records, run.duration_s), (), (0.0, 0.0))

    @contextlib.contextmanager
    def running(flags):  # type: ignore[no-untyped-def]
        tree["code"] = "new"
        yield Mock(transitions=list)

    monkeypatch.setattr(real, "running_server", running)
    monkeypatch.setattr(real, "version", lambda: dict(tree))
    monkeypatch.setattr(real, "_measured", lambda *args: measured)
    done = run_system(find_system("drop"), RealSetup(), Mock())
    assert dict(done.run.environment)["code"] == "old"


def test_what_was_run_of_other_code_is_said() -> None:
    path, now = Path("results.jsonl"), version(SIMULATED)
    runs = [result("drop", [0.1], seed=n, environment=now) for n in range(2)]
    found = {run.place: run for run in runs}
    text = "2 of 4 runs are in results.jsonl already"
    assert comparison._found(found, 4, path, World.SIMULATED) == text
    found[runs[0].place] = dataclasses.replace(runs[0], environment={"commit": "a", "code": "b"})
    text += " (of commit a with code b; --fresh repeats them)"
    assert comparison._found(found, 4, path, World.SIMULATED) == text


def test_code_is_told_by_its_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kunserve.__file__", str(tmp_path / "kunserve" / "__init__.py"))
    for room in (*HOUSES, *SIMULATED):
        (tmp_path / room).mkdir(parents=True, exist_ok=True)
    seen = set()
    for name in ("kunserve_lab/sim/a.py", "kunserve/a.py", "kunserve/a.txt"):
        (tmp_path / name).write_text("x = 1")
        seen.add((code_of(SIMULATED), version()["code"]))
    assert len(seen) == 2 and len({simulated for simulated, _ in seen}) == 1


def test_what_a_server_is_started_with() -> None:
    setup = RealSetup(num_instances=4, serve_flags=("--dtype", "float32"))
    flags = serve_arguments(find_system("static-pp"), setup, Path("t.json"))
    assert flags[0] == "smollm2-135m" and "--no-lookahead" in flags
    assert flags[flags.index("--pipeline-parallel-size") + 1] == "2"
    assert flags[-4:] == ("--trace-out", "t.json", "--dtype", "float32")
    dropping = serve_arguments(find_system("drop"), setup, None)
    assert "--pipeline-parallel-size" not in dropping
    assert dropping[dropping.index("--weights") + 1] == "private", "shared ones are not dropped"


def test_endless_memory_is_a_multiple_of_the_others() -> None:
    setup = RealSetup(instance_memory="100MiB")
    flags = serve_arguments(find_system("endless"), setup, None)
    assert flags[flags.index("--instance-memory") + 1] == str(500 << 20)
