"""Data sets by name: what is shipped is readable, what is not is fetched whole or not at all."""

import io
import urllib.error
import urllib.request
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from kunserve.core.errors import ConfigError
from kunserve_lab.workload.data import download
from kunserve_lab.workload.data.catalog import (
    BURSTGPT_LIKE,
    DATA_SETS,
    SHIPPED_FOLDER,
    DataSet,
    Download,
    locate,
)
from kunserve_lab.workload.data.command import data_command
from kunserve_lab.workload.data.download import blob_of, fetch
from kunserve_lab.workload.recipe import Dataset, Recipe, build_workload
from kunserve_lab.workload.traces import read_azure, read_lengths

CONTENT = b"arrival_s,input_tokens,output_tokens\n0.5,3,4\n"
SHIPPED = [data for data in DATA_SETS.values() if data.file and data.download is None]


@pytest.fixture
def remote() -> DataSet:
    source = Download("someone/data", "c0ffee", "trace.csv", blob_of(CONTENT), "tiny")
    return DataSet("tiny", "trace", "CC-BY 4.0", "a row", "tiny.csv", source)


@pytest.fixture
def answers(monkeypatch: pytest.MonkeyPatch) -> dict[str, bytes]:
    """What each address gives; any other cannot be reached."""
    pages: dict[str, bytes] = {}

    def urlopen(url: str, timeout: float) -> Any:
        if url not in pages:
            raise urllib.error.URLError(OSError(-2, "Name or service not known"))
        return io.BytesIO(pages[url])

    monkeypatch.setattr(urllib.request, "urlopen", urlopen)
    return pages


def test_every_shipped_file_has_a_name_and_is_named_with_its_licence_beside_it() -> None:
    files = {path.name for path in SHIPPED_FOLDER.iterdir() if ".csv" in path.name}
    assert files == {data.file for data in SHIPPED}
    readme = (SHIPPED_FOLDER / "README.md").read_text()
    for data in SHIPPED:
        assert f"`{data.file}`" in readme
        for licence in data.licence.split(", "):
            assert licence in readme


@pytest.mark.parametrize("data", SHIPPED, ids=lambda data: data.name)
def test_shipped_files_are_read_by_their_kind(data: DataSet) -> None:
    path = locate(data.name)
    rows = read_azure(path) if data.kind == "trace" else read_lengths(path)
    assert len(rows) >= 400


def test_a_workload_is_made_of_names() -> None:
    recipe = Recipe(
        Dataset.AZURE,
        Path("azure-2023-merged-640s"),
        lengths_path=Path("longbench"),
        max_total_tokens=32_768,
    )
    workload = build_workload(recipe)
    assert len(workload) == 5119
    assert "longbench.csv" in workload.provenance and "merged-640s" in workload.provenance
    fitted = build_workload(
        replace(recipe, lengths_path=Path(BURSTGPT_LIKE), max_total_tokens=None)
    )
    assert "fit to BurstGPT" in fitted.provenance
    assert recipe.max_total_tokens is not None
    capped = build_workload(replace(recipe, lengths_path=Path(BURSTGPT_LIKE)))
    assert (
        max(map(sum, zip(capped.lengths.input_tokens, capped.lengths.output_tokens, strict=True)))
        <= recipe.max_total_tokens
    )
    few = replace(recipe, lengths_path=Path(BURSTGPT_LIKE), max_total_tokens=300)
    with pytest.raises(ConfigError, match="300: an output alone is as long"):
        build_workload(few)


def test_a_path_stays_a_path_and_a_wrong_name_is_told(tmp_path: Path) -> None:
    assert locate(tmp_path / "missing.csv") == tmp_path / "missing.csv"
    with pytest.raises(ConfigError, match="neither a file nor a data set; there are: azure"):
        locate("longbnech")
    with pytest.raises(ConfigError, match="can only be lengths"):
        locate(BURSTGPT_LIKE)
    with pytest.raises(ConfigError, match="`kunserve data burstgpt` downloads it .*CC-BY 4.0"):
        locate("burstgpt", tmp_path)


def test_a_download_is_kept_and_not_made_twice(
    remote: DataSet, answers: dict[str, bytes], tmp_path: Path
) -> None:
    assert remote.download is not None
    answers[remote.download.url] = CONTENT
    path = fetch(remote, tmp_path / "cache")
    assert path.read_bytes() == CONTENT
    answers.clear()
    assert fetch(remote, tmp_path / "cache") == path
    path.write_bytes(b"edited")
    with pytest.raises(ConfigError, match="is not the expected file"):
        fetch(remote, tmp_path / "cache")


def test_a_failed_download_says_what_to_do_and_leaves_nothing(
    remote: DataSet, answers: dict[str, bytes], tmp_path: Path
) -> None:
    assert remote.download is not None
    with pytest.raises(ConfigError, match=r"Name or service not known\. Without a network, put"):
        fetch(remote, tmp_path)
    answers[remote.download.url] = b"<html>"
    with pytest.raises(ConfigError, match="is not the expected file"):
        fetch(remote, tmp_path)
    assert not list(tmp_path.iterdir())


def test_a_blob_is_named_as_git_names_it() -> None:
    assert blob_of(b"") == "e69de29bb2d1d6434b8b29ae775ad8c2e48c5391"


def test_the_command_lists_every_name_and_finds_what_is_shipped(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(Path, "home", lambda: tmp_path)
    shown = CliRunner().invoke(data_command, []).output
    assert all(name in shown for name in DATA_SETS)
    assert str(tmp_path) in shown
    done = CliRunner().invoke(data_command, ["longbench", BURSTGPT_LIKE])
    assert str(SHIPPED_FOLDER / "longbench.csv") in done.output
    assert "generated" in done.output
    failed = CliRunner().invoke(data_command, ["nope"])
    assert failed.exit_code == 1 and "no data set 'nope'" in failed.output


def test_the_command_fetches_or_explains(
    monkeypatch: pytest.MonkeyPatch, answers: dict[str, bytes], tmp_path: Path
) -> None:
    monkeypatch.setattr(Path, "home", lambda: tmp_path)
    failed = CliRunner().invoke(data_command, ["burstgpt"])
    assert failed.exit_code == 1 and "cannot download burstgpt" in failed.output
    source = DATA_SETS["azure-2023-conv"].download
    assert source is not None
    answers[source.url] = CONTENT
    monkeypatch.setattr(download, "blob_of", lambda content: source.blob)
    done = CliRunner().invoke(data_command, ["azure-2023-conv"])
    assert done.exit_code == 0, done.output
    assert (tmp_path / ".cache/kunserve/data/azure-2023-conv.csv").read_bytes() == CONTENT
