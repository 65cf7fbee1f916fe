"""Experiments of this repository run from a clone: every name in them is known here."""

from pathlib import Path

import pytest

from benchmarks.__main__ import FOLDER
from kunserve.bench.compare.experiment import check_experiment
from kunserve.bench.compare.experiment_file import read_experiment
from kunserve.bench.compare.settings import workload_of
from kunserve.workload.data.catalog import DATA_SETS

EXPERIMENTS = sorted((FOLDER.parent / "experiments").glob("*.toml"))


@pytest.mark.parametrize("path", EXPERIMENTS, ids=lambda path: path.stem)
def test_an_experiment_needs_nothing_from_outside(path: Path) -> None:
    experiment = read_experiment(path)
    check_experiment(experiment)
    assert experiment.title != "Comparison"
    for setting in (experiment.workload.trace, experiment.workload.lengths):
        assert setting is None or DATA_SETS[str(setting)].download is None
    assert len(workload_of(experiment.workload, experiment.loads[0], 0)) > 10


def test_a_base_is_for_several_experiments_and_is_none_itself() -> None:
    names = [path.name for path in (FOLDER.parent / "experiments" / "base").iterdir()]
    text = "\n".join(path.read_text() for path in [*EXPERIMENTS])
    bases = "\n".join(
        path.read_text() for path in (FOLDER.parent / "experiments" / "base").iterdir()
    )
    for name in names:
        assert text.count(f'"base/{name}"') + bases.count(f'"{name}"') > 1, name
