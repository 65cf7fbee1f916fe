"""lm-eval's tasks: it runs in an environment of its own, and from whatever folder it is called."""

import importlib
import re
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

ROOT = Path(__file__).parent.parent.parent.parent
TASKS = ROOT / "benchmarks" / "serving" / "lm_eval_tasks"


def test_a_task_finds_its_questions_from_any_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def from_json(path: str) -> list[str]:
        return Path(path).read_text().splitlines()

    fake = SimpleNamespace(Dataset=SimpleNamespace(from_json=from_json))
    monkeypatch.setitem(sys.modules, "datasets", fake)
    monkeypatch.chdir(tmp_path)
    beside = importlib.import_module("benchmarks.serving.lm_eval_tasks.beside")
    found = {}
    for path in TASKS.glob("*.yaml"):
        text = path.read_text()
        assert "custom_dataset: !function beside.read" in text
        (file,) = re.findall(r"^  file: (.*)$", text, re.MULTILINE)
        found[path.stem] = len(beside.read(file)["test"])
    assert found == {"kunserve_facts": 50, "kunserve_sequences": 20}
