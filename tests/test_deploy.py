"""The files in deploy/: do they agree with the program and with each other?

Here the chart is read as text. What it renders is checked by `make test-chart`, and the schemas of
other files before a release (docs/release.md).
"""

import json
import re
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import yaml

import kunserve
from kunserve.core.config import MIB, KunServeConfig, ServerConfig
from kunserve.engine.memory.free_memory import FRONT_BYTES, PROCESS_BYTES
from kunserve.server.start.app import create_app
from kunserve.server.start.command import config_from_flags, serve_command
from tests.unit.server.echo_engine import EchoEngine
from tests.unit.server.tiny_tokenizer import tiny_tokenizer

ROOT = Path(__file__).parent.parent
DEPLOY = ROOT / "deploy"
CHART = DEPLOY / "helm" / "kunserve"
DOCKERFILE = (DEPLOY / "Dockerfile").read_text()
(COMPOSE,) = [yaml.safe_load((DEPLOY / "compose.yaml").read_text())["services"]["kunserve"]]
VALUES = yaml.safe_load((CHART / "values.yaml").read_text())
TEMPLATES = {path.name: path.read_text() for path in sorted((CHART / "templates").iterdir())}
TEMPLATE = "\n".join(TEMPLATES.values())
OF_RAY = {"--cluster", "--ray-autoscaling", "--max-instances"}
"""With a release that can do that."""


def config_of(args: list[str]) -> KunServeConfig:
    """What the server makes of a container's arguments."""
    context = serve_command.make_context("serve", list(args))
    return config_from_flags(context.params)


def test_the_memory_limit_is_enough() -> None:
    """Of Compose; the chart computes its own, with the numbers of the server."""
    config = config_of(COMPOSE["command"])
    each = config.instance.memory_bytes + PROCESS_BYTES
    assert COMPOSE["mem_limit"] == "2g"
    assert config.cluster.num_instances * each + FRONT_BYTES <= 2 << 30
    assert VALUES["overhead"]["instanceMiB"] == PROCESS_BYTES // MIB
    assert VALUES["overhead"]["frontMiB"] == FRONT_BYTES // MIB


def test_probes_ask_what_exists() -> None:
    app = create_app(EchoEngine(), tiny_tokenizer(), "tiny", KunServeConfig())
    paths = {getattr(route, "path", None) for route in app.routes}
    probes = dict(re.findall(r"(\w+)Probe:\s+httpGet:\s+path: (\S+)", TEMPLATE))
    assert probes == {"startup": "/health", "readiness": "/health/ready", "liveness": "/livez"}
    assert set(probes.values()) | {"/metrics"} <= paths
    assert "/health'" in DOCKERFILE


def test_a_drain_is_waited_for() -> None:
    """The chart gives the server the seconds that it waits for itself."""
    drain = VALUES["drain"]
    assert drain["timeoutSeconds"] == ServerConfig().shutdown_timeout_s
    assert "--shutdown-timeout={{ .Values.drain.timeoutSeconds }}" in TEMPLATE
    (grace,) = re.findall(r"terminationGracePeriodSeconds: \{\{ add (.*) \}\}", TEMPLATE)
    assert grace == ".Values.drain.delaySeconds .Values.drain.timeoutSeconds 10"
    grace_s = int(COMPOSE["stop_grace_period"].removesuffix("s"))
    assert grace_s > config_of(COMPOSE["command"]).server.shutdown_timeout_s
    assert "STOPSIGNAL SIGTERM" in DOCKERFILE


def test_the_user_is_the_same_number_everywhere() -> None:
    (user,) = re.findall(r"runAsUser: (\d+)", TEMPLATE)
    assert f"USER {user}:{user}" in DOCKERFILE and f"useradd --uid {user}" in DOCKERFILE
    assert "runAsNonRoot: true" in TEMPLATE and "readOnlyRootFilesystem: true" in TEMPLATE
    assert COMPOSE["read_only"]
    mounts = TEMPLATE.split('define "kunserve.mounts"')[1].split("readOnly: true")[0]
    writable = re.findall(r"mountPath: (\S+)", mounts)
    assert writable[:2] == ["/tmp", "/models"], "what the Dockerfile says"


def test_the_charts_arguments_are_flags() -> None:
    known = {option for parameter in serve_command.params for option in parameter.opts}
    arguments = TEMPLATE.split('define "kunserve.args"')[1]
    used = set(re.findall(r"^- (--[a-z-]+)", arguments, re.MULTILINE))
    assert {"--num-instances", "--api-key-file", "--ssl-keyfile"} <= used
    assert used - known in (set(), OF_RAY)


def test_the_chart_is_of_this_version() -> None:
    chart = yaml.safe_load((CHART / "Chart.yaml").read_text())
    assert chart["appVersion"] == kunserve.__version__


def test_templates_ask_for_values_that_there_are() -> None:
    """A misspelt one would render as nothing."""
    for name, text in TEMPLATES.items():
        for path in re.findall(r"\.Values\.([\w.]+)", text):
            value: Any = VALUES
            for key in path.split("."):
                assert key in value, f"{name}: {path}"
                value = value[key]
        for one, part in re.findall(r"\$v\.(\w+)\.(\w+)", text):
            assert part in VALUES[one], f"{name}: {one}.{part}"
        named = set(re.findall(r'include "([\w.]+)"', text))
        assert named <= set(re.findall(r'define "([\w.]+)"', TEMPLATE)), name


def merged(base: dict[str, Any], more: dict[str, Any]) -> dict[str, Any]:
    """As Helm merges values."""
    both = dict(base)
    for key, value in more.items():
        is_map = isinstance(value, dict) and isinstance(both.get(key), dict)
        both[key] = merged(both[key], value) if is_map else value
    return both


EXAMPLES = sorted((DEPLOY / "helm" / "examples").glob("*.yaml"))


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.stem)
def test_values_follow_their_schema(path: Path) -> None:
    """Every value has a place in it, and one that does not is refused."""
    schema = json.loads((CHART / "values.schema.json").read_text())
    values = merged(VALUES, yaml.safe_load(path.read_text()))
    jsonschema.validate(values, schema)
    for wrong in ({"instance": {}}, {"instances": {"number": 2}}, {"mode": "cluster"}):
        with pytest.raises(jsonschema.ValidationError):
            jsonschema.validate(merged(values, wrong), schema)


def test_the_image_is_built_of_what_is_sent_to_the_builder() -> None:
    sent = {
        line.removeprefix("!").strip("/")
        for line in (ROOT / ".dockerignore").read_text().splitlines()
        if line.startswith("!")
    }
    assert all((ROOT / name).exists() for name in sent)
    assert {"kunserve", "pyproject.toml", "setup.py", "README.md", "LICENSE"} <= sent


def test_the_images_arguments_are_flags() -> None:
    (line,) = [line for line in DOCKERFILE.splitlines() if line.startswith("CMD ")]
    args = json.loads(line.removeprefix("CMD "))
    assert config_of(args).cluster.num_instances == 2


def test_torch_is_the_same_everywhere() -> None:
    """The Makefile's, the image's and CI's."""
    files = ("Makefile", "deploy/Dockerfile", ".github/workflows/ci.yml")
    found = {
        match for name in files for match in re.findall(r"torch==[\d.]+", (ROOT / name).read_text())
    }
    assert len(found) == 1, found
