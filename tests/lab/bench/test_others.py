"""Servers that are not ours in a comparison: those that run already, and those that it starts."""

import sys
import urllib.error
import urllib.request
from pathlib import Path

import pytest
from click.testing import CliRunner

from kunserve_lab.bench.session import ServerUnreachable
from kunserve_lab.compare.compare_command import compare_command
from kunserve_lab.compare.comparison import _jobs
from kunserve_lab.compare.experiment import plan
from kunserve_lab.compare.experiment_file import read_experiment
from kunserve_lab.compare.others import OtherServers, running_others
from kunserve_lab.compare.real import run_others
from kunserve_lab.compare.results import load
from kunserve_lab.compare.settings import RealSetup
from kunserve_lab.workload.workload import Lengths, Workload
from tests.conftest import wait_until
from tests.lab.conftest import FakeServer

EXPERIMENT = """
world = "real"
systems = ["theirs"]
rounds = 1
[others.theirs]
{other}
[workload]
rate = 20.0
duration_s = 1.0
length_scale = 0.01
"""
REPLICA = """
import http.server, os, sys

class Answer(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200)
        self.end_headers()
        self.wfile.write(os.environ["REPLICA"].encode())

http.server.HTTPServer(("127.0.0.1", int(sys.argv[1])), Answer).serve_forever()
"""


def run(tmp_path: Path, other: str) -> tuple[int, str]:
    path = tmp_path / "theirs.toml"
    path.write_text(EXPERIMENT.replace("{other}", other))
    result = CliRunner().invoke(compare_command, [str(path), "-o", str(tmp_path / "out")])
    return result.exit_code, result.output


def test_servers_that_run_already_take_turns(
    server: FakeServer, second_server: FakeServer, tmp_path: Path
) -> None:
    urls = f"description = 'two of theirs'\nurls = ['{server.url}/', '{second_server.url}']"
    code, output = run(tmp_path, urls)
    assert code == 0, output
    (theirs,) = load(tmp_path / "out")
    assert theirs.system == "theirs" and theirs.num_failed == 0
    counts = [len(one.bodies) for one in (server, second_server)]
    assert sum(counts) == theirs.num_requests + 4, "two to warm each of them up"
    assert abs(counts[0] - counts[1]) <= 1
    assert "two of theirs" in (tmp_path / "out" / "report.html").read_text()
    again = run(tmp_path, urls)
    assert again[0] == 0 and "1 of 1 runs are in" in again[1]
    assert "1 of 1 runs are in" not in run(tmp_path, urls.replace("/'", "'"))[1], "other servers"


def test_no_prompt_comes_twice_to_servers_that_keep_their_caches(server: FakeServer) -> None:
    other = OtherServers(urls=(server.url,))
    requests = Workload((0.0,) * 5, Lengths((9,) * 5, (2,) * 5, "five"), "five")
    runs = [run_others("theirs", other, RealSetup(), requests, seed=0).run for _ in range(2)]
    beginnings = {tuple(body["prompt"][:4]) for body in server.bodies}
    assert len(beginnings) == len(server.bodies) == 2 * (5 + 2)
    assert len({dict(one.config)["prompt_seed"] for one in runs}) == 2


@pytest.mark.parametrize(
    ("other", "message"),
    [
        ("", "give either a command or urls"),
        ("command = 'x --port {port}'\nurls = ['http://a']", "give either a command or urls"),
        ("command = 'x'", "the command must have {port} in it"),
        ("command = '\"x --port {port}'", "the command cannot be read: No closing quotation"),
        ("command = 'x --port {port}'\nreplicas = 0", "replicas must be at least 1, not 0"),
        ("comand = 'x --port {port}'", "unknown setting 'comand'; there are: description, command"),
        ("command = '$NOT_SET_HERE/x {port}'", "uses $NOT_SET_HERE, which is not set: call"),
        ("urls = ['http://127.0.0.1:9']\n[others.drop]\nurls = ['http://a']", "others.drop: a sys"),
        ("command = '/no/such {port}'", "cannot start /no/such: No such file"),
    ],
)
def test_mistakes(other: str, message: str, tmp_path: Path) -> None:
    code, output = run(tmp_path, other)
    assert code == 1 and message in output, output


def test_a_system_that_nobody_knows_is_told_the_others(tmp_path: Path) -> None:
    path = tmp_path / "x.toml"
    path.write_text(EXPERIMENT.replace("{other}", "urls = ['http://a']").replace('"theirs"', '"x"'))
    result = CliRunner().invoke(compare_command, [str(path)])
    assert "no system 'x' to compare" in result.output and "theirs" in result.output


def test_another_value_of_a_variable_is_another_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "theirs.toml"
    other = "command = '$PEERS/server --port {port}'\nenvironment = { CORES = '$CORES' }"
    path.write_text(EXPERIMENT.replace("{other}", other))
    digests = []
    for peers, cores in (("/a", "0"), ("/b", "0"), ("/b", "1"), ("/b", "1")):
        monkeypatch.setenv("PEERS", peers)
        monkeypatch.setenv("CORES", cores)
        experiment = read_experiment(path)
        (job,) = _jobs(experiment, plan(experiment), None, traces=False)
        digests.append(job.digest)
    assert len(set(digests)) == 3 and digests[2] == digests[3]


def test_others_cannot_be_simulated(tmp_path: Path) -> None:
    path = tmp_path / "x.toml"
    text = EXPERIMENT.replace("{other}", "urls = ['http://a']").replace('"real"', '"simulated"')
    path.write_text(text)
    result = CliRunner().invoke(compare_command, [str(path)])
    assert result.exit_code == 1 and "cannot be simulated" in result.output


def test_replicas_are_started_and_stopped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    script = tmp_path / "a replica.py"
    script.write_text(REPLICA)
    monkeypatch.setenv("SCRIPT", str(script))
    other = OtherServers(
        command=f"{sys.executable} $SCRIPT {{port}}",
        replicas=2,
        environment={"REPLICA": "number {replica}"},
    )
    with running_others("theirs", other) as urls:
        said = [urllib.request.urlopen(url, timeout=60).read().decode() for url in urls]
        assert said == ["number 0", "number 1"]
    for url in urls:
        with pytest.raises(urllib.error.URLError):
            urllib.request.urlopen(url, timeout=60)


def test_children_of_a_replica_that_has_ended_are_ended(tmp_path: Path) -> None:
    """vLLM's front may die before its engine does."""
    said = tmp_path / "child"
    words = (
        "import pathlib, subprocess, sys; "
        "child = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(600)']); "
        f"pathlib.Path('{said}').write_text(str(child.pid))"
    )
    other = OtherServers(command=f'{sys.executable} -c "{words}" {{port}}')
    with pytest.raises(ServerUnreachable), running_others("theirs", other):
        raise AssertionError("it is not ready")

    child = Path(f"/proc/{int(said.read_text())}/stat")

    def is_over() -> bool:
        try:
            return child.read_text().split()[2] == "Z"
        except OSError:
            return True

    wait_until(is_over)


def test_a_replica_that_ends_shows_its_last_words() -> None:
    words = "import sys; sys.exit('no such model')"
    other = OtherServers(command=f'{sys.executable} -c "{words}" {{port}}')
    with pytest.raises(ServerUnreachable, match="no such model"), running_others("theirs", other):
        raise AssertionError("it is not ready")
