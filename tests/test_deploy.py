"""The files in deploy/: do they agree with the program and with each other?

Their own schemas are checked before a release (docs/release.md).
"""

import json
import re
from pathlib import Path

import pytest
import yaml

from kunserve.core.config import MIB, KunServeConfig
from kunserve.engine.free_memory import FRONT_BYTES, PROCESS_BYTES
from kunserve.server.app import create_app
from kunserve.server.command import config_from_flags, serve_command
from tests.unit.server.echo_engine import EchoEngine
from tests.unit.server.tiny_tokenizer import tiny_tokenizer

ROOT = Path(__file__).parent.parent
DEPLOY = ROOT / "deploy"
KUBERNETES = sorted((DEPLOY / "kubernetes").glob("*.yaml"))
DOCKERFILE = (DEPLOY / "Dockerfile").read_text()
COMPOSE = yaml.safe_load((DEPLOY / "compose.yaml").read_text())
DEPLOYMENT = yaml.safe_load((DEPLOY / "kubernetes" / "deployment.yaml").read_text())
POD = DEPLOYMENT["spec"]["template"]["spec"]
(CONTAINER,) = POD["containers"]
SIZES = {"g": 1 << 30, "Gi": 1 << 30, "m": MIB, "Mi": MIB}


def config_of(args: list[str]) -> KunServeConfig:
    """What the server makes of a container's arguments."""
    context = serve_command.make_context("serve", list(args))
    return config_from_flags(context.params)


def size_bytes(text: str) -> int:
    number, unit = re.fullmatch(r"(\d+)(\w+)", text).groups()
    return int(number) * SIZES[unit]


@pytest.mark.parametrize(
    ("args", "limit"),
    [
        (CONTAINER["args"], CONTAINER["resources"]["limits"]["memory"]),
        (COMPOSE["services"]["kunserve"]["command"], COMPOSE["services"]["kunserve"]["mem_limit"]),
    ],
    ids=["kubernetes", "compose"],
)
def test_the_memory_limit_is_enough(args: list[str], limit: str) -> None:
    config = config_of(args)
    each = config.instance.memory_bytes + PROCESS_BYTES
    assert size_bytes(limit) >= config.cluster.num_instances * each + FRONT_BYTES


def test_probes_ask_what_exists() -> None:
    app = create_app(EchoEngine(), tiny_tokenizer(), "tiny", KunServeConfig())
    paths = {getattr(route, "path", None) for route in app.routes}
    for probe in ("startupProbe", "readinessProbe", "livenessProbe"):
        assert CONTAINER[probe]["httpGet"]["path"] in paths
    assert CONTAINER["readinessProbe"]["httpGet"]["path"] == "/health/ready"
    assert "/health'" in DOCKERFILE and "/health" in paths


def test_a_drain_is_waited_for() -> None:
    drain_s = config_of(CONTAINER["args"]).server.shutdown_timeout_s
    assert POD["terminationGracePeriodSeconds"] > drain_s + 5
    grace = COMPOSE["services"]["kunserve"]["stop_grace_period"]
    assert int(grace.removesuffix("s")) > drain_s
    assert "STOPSIGNAL SIGTERM" in DOCKERFILE


def test_the_user_is_the_same_number_everywhere() -> None:
    user = POD["securityContext"]["runAsUser"]
    assert f"USER {user}:{user}" in DOCKERFILE and POD["securityContext"]["runAsNonRoot"]
    assert CONTAINER["securityContext"]["readOnlyRootFilesystem"]
    assert COMPOSE["services"]["kunserve"]["read_only"]
    writable = {mount["mountPath"] for mount in CONTAINER["volumeMounts"]}
    assert writable == {"/tmp", "/models"}, "what the Dockerfile says"


def test_selectors_find_the_pods() -> None:
    labels = DEPLOYMENT["spec"]["template"]["metadata"]["labels"]
    for path in KUBERNETES:
        spec = yaml.safe_load(path.read_text()).get("spec", {})
        selector = spec.get("selector")
        if selector is not None:
            assert selector.get("matchLabels", selector).items() <= labels.items(), path.name


def test_the_list_of_manifests_is_whole() -> None:
    """All but those that need more than Kubernetes itself."""
    listed = yaml.safe_load((DEPLOY / "kubernetes" / "kustomization.yaml").read_text())
    needs_more = {"kustomization.yaml", "keda.yaml"}
    assert {path.name for path in KUBERNETES} - needs_more == set(listed["resources"])


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
        match for name in files for match in re.findall(r"torch==\S+", (ROOT / name).read_text())
    }
    assert len(found) == 1, found
