"""Runs survive the disk; files that are no runs are named."""

from pathlib import Path

import pytest

from kunserve.core.errors import ConfigError
from kunserve_lab.bench.records import RequestRecord, ServerSample
from kunserve_lab.bench.runfile import Run, read_run, write_run

RECORD = RequestRecord(0, "http://x", 0.0, 0.1, (0.2, 0.3), 0.3, 0.4, 5, 2, 2, "length", None)
RUN = Run(
    label="one",
    provenance="arrivals: a; lengths: b",
    duration_s=1.5,
    records=(RECORD,),
    samples=(ServerSample(0.5, kv_usage=0.25),),
    config=(("seed", 1),),
    environment=(("cpus", 2),),
)


def test_a_run_is_read_back_as_written(tmp_path: Path) -> None:
    write_run(tmp_path / "run.jsonl", RUN)
    assert read_run(tmp_path / "run.jsonl") == RUN
    assert [path.name for path in tmp_path.iterdir()] == ["run.jsonl"]


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "not a result"),
        ("{}", "line 1: unexpected kind"),
        ("nonsense", "line 1"),
        ('{"kind": "run", "schema": 99}', "unexpected kind"),
        ('{"kind": "request", "number": 1}', "line 1"),
    ],
)
def test_other_files_are_refused(tmp_path: Path, text: str, words: str) -> None:
    path = tmp_path / "other.jsonl"
    path.write_text(text)
    with pytest.raises(ConfigError, match=words):
        read_run(path)


def test_a_place_that_cannot_be_written(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cannot write"):
        write_run(tmp_path / "absent" / "run.jsonl", RUN)
