"""The schemas that outputs are judged by come out of the packages as they are meant."""

import io
import json
import tarfile
import zipfile
from pathlib import Path
from typing import Any

import pytest

from benchmarks.serving.structured import schema_of
from benchmarks.serving.structured_suite import judge, schemas_in

DEFINITIONS = {
    "$defs": {
        "a.Meta": {"type": "object", "properties": {"owner": {"$ref": "#/$defs/a.Owner"}}},
        "a.Owner": {"type": "string"},
        "a.Other": {"type": "null"},
    }
}
POD = {"type": "object", "properties": {"meta": {"$ref": "/api/_definitions.json#/$defs/a.Meta"}}}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    with zipfile.ZipFile(tmp_path / "kubernetes_validate-1-py3-none-any.whl", "w") as wheel:
        for version in ("v1.8.0-local-strict", "v1.9.0-local-strict", "v1.9.0-local"):
            wheel.writestr(f"k/{version}/_definitions.json", json.dumps(DEFINITIONS))
            wheel.writestr(f"k/{version}/pod.json", json.dumps(POD | {"title": version}))
    groups = [{"schema": {"type": "integer"}}, {"schema": True}, {"schema": {"type": "null"}}]
    with tarfile.open(tmp_path / "jsonschema-1.tar.gz", "w:gz") as archive:
        for draft in ("draft7", "draft2020-12", "latest"):
            data = json.dumps(groups).encode()
            member = tarfile.TarInfo(f"jsonschema-1/json/tests/{draft}/type.json")
            member.size = len(data)
            archive.addfile(member, io.BytesIO(data))
    return tmp_path


def test_schemas_are_found_once_and_stand_alone(folder: Path) -> None:
    pod, *others = schemas_in(folder)
    assert others == [("standard", {"type": "integer"}), ("standard", {"type": "null"})]
    name, schema = pod
    assert name == "kubernetes" and schema["title"] == "v1.9.0-local-strict"
    assert set(schema["$defs"]) == {"a.Meta", "a.Owner"}
    assert judge(schema, '{"meta": {"owner": "me"}}') == "valid"
    assert judge(schema, '{"meta": {"owner": 5}}') == "not valid"


@pytest.mark.parametrize(
    ("schema", "text", "verdict"),
    [
        ({"type": "integer"}, "5", "valid"),
        ({"type": "integer"}, "5.5", "not valid"),
        ({"type": "integer"}, "5 5", "not JSON"),
        ({"type": "string", "pattern": "\\p{L}"}, '"a"', "not judged"),
        (schema_of(3), "[]", "not valid"),
    ],
)
def test_answers_are_judged(schema: dict[str, Any], text: str, verdict: str) -> None:
    assert judge(schema, text) == verdict
