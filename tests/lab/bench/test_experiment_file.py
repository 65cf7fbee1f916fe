"""Experiments in TOML: what they say, what they inherit, and what is refused."""

from dataclasses import replace
from pathlib import Path

import pytest
from click.testing import CliRunner

from kunserve.core.errors import ConfigError
from kunserve_lab.compare.compare_command import compare_command
from kunserve_lab.compare.experiment import Experiment, Place, World, check_experiment, plan
from kunserve_lab.compare.experiment_file import read_experiment
from kunserve_lab.compare.real import serve_arguments
from kunserve_lab.compare.settings import (
    RealSetup,
    SimulatedSetup,
    WorkloadSettings,
    digest_of,
    workload_of,
)
from kunserve_lab.compare.simulate_command import simulate_command
from kunserve_lab.compare.simulated.scenario import build_scenario
from kunserve_lab.compare.systems import SYSTEMS, find_system, is_baseline, serve_flags

ROOT = Path(__file__).parent.parent.parent.parent


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[setup\n", "Expected ']'"),
        ("setup = 3\n", "setup: Expected `object`, got `int`"),
        ("[workload]\nlenghts = 'x'\n", "unknown setting 'lenghts'; there are: trace, lengths"),
        ("titel = 'x'\n", "unknown setting 'titel'; there are: setup, workload"),
        ("compare = ['drop']\n", "unknown setting 'compare'; it is called 'systems' now"),
        ("[load]\nrate = 1.0\n", "unknown setting 'load'; it is called 'workload' now"),
        ("seeds = ['x']\n", "Expected `int`, got `str`"),
        ("seeds = [-1]\n", "a seed must be at least 0, not -1"),
        ("seeds = []\n", "seeds must not be empty"),
        ("[workload]\nrate = 0.0\n", "finite request rate greater than 0"),
        ("loads = [1.0, 0.0]\n", "a load must be above 0, not 0.0"),
        ("loads = [1.0, 1]\n", "loads names 1.0 twice"),
        ("systems = []\n", "name at least one system"),
        ("systems = ['drop', 'drop']\n", "systems names drop twice"),
        ("rounds = 2\n", "give several seeds instead"),
        ("world = 'dream'\n", "world must be 'real' or 'simulated'"),
        ("base = 'absent.toml'\n", "absent.toml: No such file"),
        ("base = 'experiment.toml'\n", "it is its own base"),
        ("base = 3\n", "base must be the name of a file"),
        ("[setup]\nnum_instances = 0\n", "num_instances must be at least 1, not 0"),
        ("[setup]\nstage_host_share = 1.5\n", "stage_host_share must be in [0, 1], not 1.5"),
        ("[setup]\nblock_size = 0\n", "block_size must be at least 1, not 0"),
        ("[setup]\nmax_num_seqs = 0\n", "max_num_seqs must be at least 1, not 0"),
        ("[setup]\nstart_s = -1.0\n", "start_s must be at least 0 and finite, not -1.0"),
        ("[workload]\nrepeat = [2.0, 1.0, 3]\n", "repeat wants (from, to, times)"),
        ("[workload]\nrepeat = [9000.0, 9001.0, 3]\n", "no request arrives from 9000 to 9001 s"),
    ],
)
def test_mistakes_in_an_experiment_file(text: str, message: str, tmp_path: Path) -> None:
    path = tmp_path / "experiment.toml"
    path.write_text(text)
    result = CliRunner().invoke(simulate_command, ["--experiment", str(path)])
    assert result.exit_code == 1
    assert message in result.output


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (
            "systems = ['autoscale']\n",
            "autoscale needs instances ordered under overload, which only the simulated world has",
        ),
        (
            "systems = ['four']\n[variants.four]\nof = 'static-pp'\npipeline_stages = 4\n",
            "2 cannot be parted so",
        ),
        ("[setup]\ndevice = 'a800'\n", "unknown setting 'device'; there are: model"),
        ("rounds = 0\n", "rounds must be at least 1, not 0"),
    ],
)
def test_mistakes_in_an_experiment_of_the_real_world(
    text: str, message: str, tmp_path: Path
) -> None:
    path = tmp_path / "experiment.toml"
    path.write_text("world = 'real'\n" + text)
    result = CliRunner().invoke(compare_command, [str(path), "-o", str(tmp_path / "out")])
    assert result.exit_code == 1
    assert message in result.output


def test_simulate_names_the_command_of_the_real_world(tmp_path: Path) -> None:
    path = tmp_path / "experiment.toml"
    path.write_text("world = 'real'\n")
    result = CliRunner().invoke(simulate_command, ["--experiment", str(path)])
    assert result.exit_code == 1 and f"kunserve compare {path}" in result.output


def test_an_experiment_file(tmp_path: Path) -> None:
    path = tmp_path / "small.toml"
    path.write_text(
        'title = "Small"\nsystems = ["drop"]\nloads = [0.5, 1]\nseeds = [3]\n'
        "[setup]\nnum_instances = 2\nkills = [[3.0, 1]]\nmax_num_queued_reqs = 7\n"
        '[workload]\ntrace = "t.csv"\nlengths = "longbench"\n'
    )
    experiment = read_experiment(path)
    setup = experiment.setup
    assert isinstance(setup, SimulatedSetup) and setup.kills == ((3.0, 1),)
    assert experiment.loads == (0.5, 1.0) and experiment.seeds == (3,)
    assert experiment.workload.trace == tmp_path / "t.csv"
    assert experiment.workload.lengths == Path("longbench")  # a data set's name, not a file
    few = workload_of(WorkloadSettings(duration_s=5.0), 1.0, seed=0)
    assert build_scenario(setup, few).server.max_num_queued_reqs == 7


def test_a_file_is_laid_over_its_base(tmp_path: Path) -> None:
    (tmp_path / "under").mkdir()
    (tmp_path / "under" / "base.toml").write_text(
        'title = "Base"\nloads = [1.0]\nsystems = ["swap", "drop"]\n'
        '[workload]\ntrace = "t.csv"\nstart_s = 20.0\n[setup]\nnum_instances = 4\n'
    )
    path = tmp_path / "over.toml"
    path.write_text('base = "under/base.toml"\nloads = [2.0]\n[workload]\nend_s = 90.0\n')
    experiment = read_experiment(path)
    assert (experiment.title, experiment.loads) == ("Base", (2.0,))
    assert experiment.systems == ("swap", "drop")
    workload = experiment.workload
    assert (workload.start_s, workload.end_s) == (20.0, 90.0)
    assert workload.trace == tmp_path / "under" / "t.csv"
    assert experiment.setup == SimulatedSetup(num_instances=4)
    path.write_text('base = "under/base.toml"\nworld = "real"\n')
    assert read_experiment(path).setup == RealSetup()


def test_real_systems_take_turns() -> None:
    experiment = Experiment(RealSetup(), systems=("recompute", "drop"), loads=(0.5, 1.0))
    assert experiment.world is World.REAL and experiment.num_rounds == 3
    order = [place.system[0] for place in plan(experiment) if place.load == 0.5]
    assert "".join(order) == "rddrrd"
    assert plan(experiment)[0] == Place(0.5, 0, 0, "recompute")
    assert len(plan(experiment)) == 12
    assert Experiment().num_rounds == 1


def test_systems_as_flags_of_serve() -> None:
    assert serve_flags(find_system("recompute")) == ("--overload-policy", "recompute")
    drop = find_system("drop")
    assert serve_flags(replace(drop, lookahead=False))[2:] == ("--no-lookahead",)
    deep = ("--min-deep-gain", "0.0", "--max-queue-per-gain", "1000000000.0")
    assert serve_flags(find_system("drop-deep"))[2:] == deep
    with pytest.raises(
        ConfigError, match="real systems are: recompute, recompute-rr, recompute-least, "
    ):
        serve_flags(find_system("autoscale"))
    assert serve_flags(find_system("swap")) == ("--overload-policy", "swap")
    parks = ("--overload-policy", "drop", "--park-behind-drop")
    shared = serve_arguments(find_system("shared"), RealSetup(), None)
    assert "--weights shared" in " ".join(shared)
    assert "--weights private" in " ".join(serve_arguments(drop, RealSetup(), None))
    assert serve_flags(find_system("drop-park")) == parks
    assert serve_flags(find_system("drop-rr"))[2:] == ("--dispatch-policy", "round-robin")
    assert serve_flags(find_system("recompute-chunk"))[2:] == ("--no-scheduler-reserve-full-isl",)
    assert serve_flags(find_system("tp-pairs"))[2:] == ("--tensor-parallel-size", "2")
    sheds = replace(find_system("recompute"), max_num_queued_reqs=9)
    assert serve_flags(sheds)[2:] == ("--max-num-queued-reqs", "9")
    rings = ("--no-enable-prefix-caching", "--no-disable-hybrid-kv-cache-manager")
    assert serve_flags(find_system("drop-ring"))[2:] == rings
    assert [name for name in SYSTEMS if not is_baseline(name)] == [
        name for name in SYSTEMS if name.startswith("drop") or name == "endless"
    ]


def test_an_experiment_defines_systems_of_its_own(tmp_path: Path) -> None:
    path = tmp_path / "experiment.toml"
    path.write_text(
        "systems = ['drop', 'kept']\n[variants.kept]\nof = 'drop'\ndescription = 'never back'\n"
        "lookahead = false\noverload = { restore_below = 0.0 }\n"
    )
    experiment = read_experiment(path)
    made = experiment.system("kept")
    assert made == replace(
        find_system("drop"),
        name="kept",
        description="never back",
        lookahead=False,
        overload=replace(find_system("drop").overload, restore_below=0.0),
    )
    assert experiment.system("drop") == find_system("drop")
    with pytest.raises(ConfigError, match="no system 'gone' to compare; there are: .*, kept"):
        experiment.system("gone")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[variants.drop]\nof = 'recompute'\n", "variants.drop: a system of ours has that name"),
        ("[variants.x]\nlookahead = false\n", "variants.x: it needs the name of a system, `of`"),
        ("[variants.x]\nof = 'y'\n", "no system 'y' to compare"),
        ("[variants.x]\nof = 'drop'\nlook = 1\n", "unknown setting 'look'; there are: name"),
        ("[variants.x]\nof = 'drop'\noverload = { a = 1 }\n", "unknown setting 'a'"),
        ("[variants.x]\nof = 'drop'\nlookahead = 'no'\n", "variants.x: Expected `bool`"),
        ("variants = 3\n", "variants must be tables"),
    ],
)
def test_mistakes_in_a_system_of_ones_own(text: str, message: str, tmp_path: Path) -> None:
    path = tmp_path / "experiment.toml"
    path.write_text(text)
    with pytest.raises(ConfigError, match=message):
        read_experiment(path)


def test_a_digest_tells_settings_and_requests_apart() -> None:
    requests = workload_of(WorkloadSettings(duration_s=20.0), 1.0, seed=0)
    other = workload_of(WorkloadSettings(duration_s=20.0), 1.0, seed=1)
    drop, pairs = find_system("drop"), find_system("drop-pairs")
    digests = {
        digest_of(SimulatedSetup(), drop, requests),
        digest_of(SimulatedSetup(), drop, other),
        digest_of(SimulatedSetup(), pairs, requests),
        digest_of(SimulatedSetup(num_instances=7), drop, requests),
        digest_of(RealSetup(), drop, requests),
        digest_of(SimulatedSetup(), replace(drop, reserves_prompts=False), requests),
        digest_of(SimulatedSetup(), replace(drop, max_num_queued_reqs=9), requests),
    }
    assert len(digests) == 7
    assert digest_of(SimulatedSetup(), drop, requests) in digests


def test_a_burst_can_be_repeated() -> None:
    once = workload_of(WorkloadSettings(duration_s=100.0), 1.0, seed=0)
    again = workload_of(WorkloadSettings(duration_s=100.0, repeat=(5.0, 15.0, 4)), 1.0, seed=0)
    in_burst = sum(5.0 <= moment < 15.0 for moment in once.arrival_s)
    before = sum(moment < 5.0 for moment in once.arrival_s)
    assert len(again) == before + 4 * in_burst
    assert again.duration_s < 45.0


@pytest.mark.parametrize(
    "path", sorted((ROOT / "experiments").glob("*.toml")), ids=lambda path: path.name
)
def test_experiments_of_the_tree_can_be_run(path: Path) -> None:
    experiment = read_experiment(path)
    check_experiment(experiment)
    assert len(workload_of(experiment.workload, experiment.loads[0], experiment.seeds[0]))
