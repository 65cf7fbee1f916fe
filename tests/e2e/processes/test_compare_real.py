"""A comparison in the real world: servers are started, measured and stopped."""

from pathlib import Path

import pytest
from click.testing import CliRunner

from kunserve_lab.compare.compare_command import compare_command
from kunserve_lab.compare.experiment import World
from kunserve_lab.compare.results import load

EXPERIMENT = """
world = "real"
systems = ["drop", "static-pp"]
rounds = 1
[setup]
instance_memory = "600MiB"
serve_flags = ["--load-format", "dummy"]
[workload]
rate = 2.0
duration_s = 2.0
length_scale = 0.05
"""


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_comparison_of_real_servers(tmp_path: Path) -> None:
    path = tmp_path / "small.toml"
    path.write_text(EXPERIMENT)
    out = tmp_path / "out"
    result = CliRunner().invoke(compare_command, [str(path), "-o", str(out)])
    assert result.exit_code == 0, result.output
    assert "One run of each system" in result.output
    drop, pipelines = load(out)
    assert {run.world for run in (drop, pipelines)} == {World.REAL}
    assert drop.num_failed == pipelines.num_failed == 0 < drop.num_requests
    assert drop.bubble_ratio is None and pipelines.bubble_ratio is not None
    assert drop.client_lag_s is not None and drop.load_average is not None
    assert pipelines.num_drops == 0  # the forced one was before the run
    assert (out / "report.html").exists() and (out / "timeline.png").exists()
