"""Files of a model that were changed are told from those that the cluster began with."""

import os
import shutil
from pathlib import Path

import pytest

from kunserve.cluster.instance.main import load_model
from kunserve.cluster.processes.launch import InstanceOrder
from kunserve.cluster.processes.succession import settings_digest
from kunserve.core.config import KunServeConfig, ModelConfig
from kunserve.core.errors import ModelFiles
from kunserve.core.ids import InstanceId
from kunserve.core.plan import Plan
from kunserve.model.fingerprint import check_fingerprint, model_fingerprint
from kunserve.model.source import ModelSource


@pytest.fixture
def source(tmp_path: Path) -> ModelSource:
    folder = tmp_path / "model"
    folder.mkdir()
    for name in ("config.json", "a.safetensors", "b.safetensors", "README.md"):
        (folder / name).write_text(name * 10)
    return ModelSource("model", folder, "safetensors")


def test_a_change_of_what_weights_depend_on_is_seen(source: ModelSource) -> None:
    seen = {model_fingerprint(source)}
    file = source.path / "b.safetensors"
    before = file.stat()
    file.write_text("B" * before.st_size)
    os.utime(file, ns=(before.st_atime_ns, before.st_mtime_ns))
    seen.add(model_fingerprint(source))  # same size and time, another header
    file.write_text("longer than it was before" * 100)
    seen.add(model_fingerprint(source))
    (source.path / "config.json").write_text("{}")
    seen.add(model_fingerprint(source))
    file.rename(source.path / "c.safetensors")
    seen.add(model_fingerprint(source))
    assert len(seen) == 5


def test_files_that_are_put_back_are_taken_again(source: ModelSource, tmp_path: Path) -> None:
    expected = model_fingerprint(source)
    shutil.copytree(source.path, tmp_path / "copy")
    (source.path / "README.md").write_text("new")
    check_fingerprint(source, expected)
    (source.path / "a.safetensors").write_text("other weights")
    with pytest.raises(ModelFiles, match="not the files that the other instances have loaded"):
        check_fingerprint(source, expected)
    shutil.copy2(tmp_path / "copy" / "a.safetensors", source.path / "a.safetensors")
    check_fingerprint(source, expected)
    check_fingerprint(source, None)


def test_what_cannot_be_read_is_told(source: ModelSource, tmp_path: Path) -> None:

    (source.path / "d.safetensors").symlink_to(tmp_path / "nowhere")
    with pytest.raises(ModelFiles, match=r"d\.safetensors: cannot be read"):
        model_fingerprint(source)


def test_an_instance_refuses_other_files_before_it_loads_any(source: ModelSource) -> None:
    """The front tries it again with growing pauses, as any replacement that does not start."""
    model = ModelConfig(model=str(source.path))
    order = InstanceOrder(
        InstanceId(0), None, "", "", Plan(KunServeConfig(model)), model_files="other"
    )
    with pytest.raises(ModelFiles, match="put those back"):
        load_model(order)


def test_a_front_of_the_same_words_but_other_files_is_another_one() -> None:
    plan = Plan(KunServeConfig())
    assert settings_digest(plan, None, "a") == settings_digest(plan, None, "a")
    assert settings_digest(plan, None, "a") != settings_digest(plan, None, "b")
