"""The chart as Helm renders it, against the schemas of Kubernetes (``make test-chart``).

Kinds that KubeRay, the Prometheus operator and KEDA add have schemas of their own: ``CRDS`` names a
folder with their CustomResourceDefinitions, as those projects ship them.
"""

import functools
import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

helm = pytest.importorskip("helm_python")
kubernetes_validate = pytest.importorskip("kubernetes_validate")
jsonschema = pytest.importorskip("jsonschema")

ROOT = Path(__file__).parent.parent.parent
HELM = ROOT / "deploy" / "helm"
CHART = HELM / "kunserve"
EXAMPLES = {path.stem: yaml.safe_load(path.read_text()) for path in (HELM / "examples").iterdir()}
ALL_OF_RAY = {"ray": {"autoscaling": {"enabled": True}, "version": "2.50.0"}}
CASES: dict[str, dict[str, Any]] = {
    "defaults": {},
    **EXAMPLES,
    "guarded ray": {**EXAMPLES["guarded"], **EXAMPLES["ray"], **ALL_OF_RAY},
    "everything off": {
        "podDisruptionBudget": {"enabled": False},
        "networkPolicy": {"enabled": False},
        "replicas": 1,
    },
}
LABEL = {
    "type": "string",
    "maxLength": 63,
    "pattern": "^(([A-Za-z0-9][-A-Za-z0-9_.]*)?[A-Za-z0-9])?$",
}
PORT = {
    "type": "object",
    "required": ["number"],
    "properties": {"number": {"type": "integer", "minimum": 1, "maximum": 65535}},
    "additionalProperties": False,
}
POOL: dict[str, Any] = {
    "required": ["selector", "targetPorts"],
    "properties": {
        "selector": {
            "required": ["matchLabels"],
            "properties": {
                "matchLabels": {
                    "additionalProperties": LABEL,
                    "minProperties": 1,
                    "maxProperties": 64,
                }
            },
            "additionalProperties": False,
        },
        "targetPorts": {
            "type": "array",
            "items": PORT,
            "minItems": 1,
            "maxItems": 8,
            "uniqueItems": True,
        },
        "appProtocol": {"enum": ["http", "kubernetes.io/h2c"]},
        "endpointPickerRef": {
            # Of a Service, which it is where no kind is told, the port is wanted.
            "required": ["name", "port"],
            "properties": {
                "name": {"type": "string", "minLength": 1, "maxLength": 253},
                "port": PORT,
                "failureMode": {"enum": ["FailOpen", "FailClose"]},
            },
            "additionalProperties": False,
        },
    },
    "additionalProperties": False,
}
"""What the CustomResourceDefinition of gateway-api-inference-extension v1.6.0 asks of the ``spec``
of an InferencePool (inference.networking.k8s.io/v1). Read, not copied; ``CRDS`` has the whole.
"""
MORE_KINDS = {"RayCluster", "ServiceMonitor", "ScaledObject", "InferencePool"}
"""Which Kubernetes itself does not know."""
Object = dict[str, Any]
FAST = getattr(yaml, "CSafeLoader", yaml.SafeLoader)


def rendered(values: Object, release: str = "llm") -> dict[str, Object]:
    """Objects by kind."""
    with helm.Chart.load(CHART) as chart:
        chart.validate_schema(values)
        texts = chart.render(values, name=release, namespace="serving")
    assert any("port-forward" in text for name, text in texts.items() if name.endswith("NOTES.txt"))
    found = {}
    for name, text in texts.items():
        if not name.endswith(".txt") and text.strip():
            content = yaml.safe_load(text)
            assert content["kind"] not in found
            found[content["kind"]] = content
    return found


@pytest.fixture(params=CASES, scope="module")
def case(request: pytest.FixtureRequest) -> str:
    name: str = request.param
    return name


@pytest.fixture(scope="module")
def objects(case: str) -> dict[str, Object]:
    return rendered(CASES[case])


def templates(objects: dict[str, Object]) -> Iterator[Object]:
    """Of pods."""
    if "Deployment" in objects:
        yield objects["Deployment"]["spec"]["template"]
        return
    cluster = objects["RayCluster"]["spec"]
    yield cluster["headGroupSpec"]["template"]
    for group in cluster["workerGroupSpecs"]:
        yield group["template"]


def labels_as_made(objects: dict[str, Object]) -> Iterator[Object]:
    """Of the pods, with those that KubeRay adds."""
    kinds = ["head", "worker"]
    for template, kind in zip(templates(objects), kinds, strict=False):
        mine = dict(template["metadata"]["labels"])
        if "RayCluster" in objects:
            mine["ray.io/cluster"] = objects["RayCluster"]["metadata"]["name"]
            mine["ray.io/node-type"] = kind
        yield mine


def front_of(objects: dict[str, Object]) -> tuple[Object, Object]:
    """Pod and container that answer clients."""
    pod = next(templates(objects))["spec"]
    return pod, pod["containers"][-1]


def mebibytes(text: str) -> int:
    number, unit = re.fullmatch(r"(\d+)(Mi|Gi)", text).groups()  # type: ignore[union-attr]
    return int(number) * {"Mi": 1, "Gi": 1024}[unit]


def test_kubernetes_takes_it(objects: dict[str, Object]) -> None:
    for kind, content in objects.items():
        if kind not in MORE_KINDS:
            kubernetes_validate.validate(content, "1.34", strict=True)


def test_pods_of_ray_are_pods(objects: dict[str, Object]) -> None:
    """KubeRay's schema of them may be of another release of Kubernetes."""
    for number, template in enumerate(templates(objects)):
        spec = {**template["spec"]}
        pod = {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": f"p{number}"}, "spec": spec}
        kubernetes_validate.validate(pod, "1.34", strict=True)


@functools.cache
def validators() -> dict[tuple[str, str], Any]:
    """Of the kinds that others add, with no field that they do not name."""
    found = {}
    for path in Path(os.environ["CRDS"]).glob("*.y*ml"):
        for crd in yaml.load_all(path.read_text(), FAST):
            if not crd or crd.get("kind") != "CustomResourceDefinition":
                continue
            for version in crd["spec"]["versions"]:
                schema = closed(version["schema"]["openAPIV3Schema"], is_top=True)
                api = f"{crd['spec']['group']}/{version['name']}"
                found[api, crd["spec"]["names"]["kind"]] = jsonschema.Draft7Validator(schema)
    return found


def closed(schema: Object, is_top: bool = False) -> Object:
    """What a server would prune is an error."""
    made = {key: value for key, value in schema.items() if not key.startswith("x-")}
    if schema.get("x-kubernetes-int-or-string"):
        return {"type": ["integer", "string"]}
    if isinstance(properties := schema.get("properties"), dict):
        made["properties"] = {
            # Of metadata no CRD says what is in it; the server knows.
            name: one if is_top and name == "metadata" else closed(one)
            for name, one in properties.items()
        }
        if not schema.get("x-kubernetes-preserve-unknown-fields"):
            made.setdefault("additionalProperties", False)
    for key in ("items", "additionalProperties"):
        if isinstance(one := schema.get(key), dict):
            made[key] = closed(one)
    return made


@pytest.mark.skipif(not os.environ.get("CRDS"), reason="CRDS names no folder")
def test_operators_take_it(objects: dict[str, Object]) -> None:
    for kind in sorted(MORE_KINDS & set(objects)):
        content = objects[kind]
        key = content["apiVersion"], kind
        if key not in validators():
            pytest.skip(f"no CRD of {kind} in {os.environ['CRDS']}")
        validators()[key].validate(content)
        wrong = {**content, "spec": {**content["spec"], "nothing": 1}}
        assert not validators()[key].is_valid(wrong)


def test_selectors_find_the_pods(objects: dict[str, Object]) -> None:
    made = list(labels_as_made(objects))
    selectors = {"Service": objects["Service"]["spec"]["selector"]}
    for kind, key in (
        ("Deployment", "selector"),
        ("PodDisruptionBudget", "selector"),
        ("NetworkPolicy", "podSelector"),
    ):
        if kind in objects:
            selectors[kind] = objects[kind]["spec"][key]["matchLabels"]
    for kind, selector in selectors.items():
        found = [selector.items() <= labels.items() for labels in made]
        assert found == ([True, False] if kind == "Service" else [True, True])[: len(made)], kind
    if "ServiceMonitor" in objects:
        wanted = objects["ServiceMonitor"]["spec"]["selector"]["matchLabels"]
        labels = objects["Service"]["metadata"]["labels"]
        assert wanted.items() <= labels.items()
        rules = (ROOT / "deploy" / "prometheus" / "alerts.yml").read_text()
        job = labels[objects["ServiceMonitor"]["spec"]["jobLabel"]]
        assert set(re.findall(r'job="(.*?)"', rules)) == {job}
    if "RayCluster" in objects:  # a release of KubeRay finds its own head by this one
        assert all("app.kubernetes.io/name" not in labels for labels in made)


def test_the_end_of_a_pod_is_long_enough(objects: dict[str, Object]) -> None:
    pod, front = front_of(objects)
    (timeout,) = [arg for arg in front["args"] if arg.startswith("--shutdown-timeout=")]
    delay_s = int(front["lifecycle"]["preStop"]["exec"]["command"][1])
    drain_s = int(timeout.partition("=")[2])
    assert pod["terminationGracePeriodSeconds"] >= delay_s + drain_s + 10
    if "RayCluster" in objects:
        (ray, _) = pod["containers"]
        assert "8000" in ray["lifecycle"]["preStop"]["exec"]["command"][-1], "waits for the front"


def test_nothing_runs_as_root_or_writes_where_it_must_not(objects: dict[str, Object]) -> None:
    for template in templates(objects):
        pod = template["spec"]
        assert pod["securityContext"]["runAsNonRoot"]
        for container in pod["containers"]:
            guard = container["securityContext"]
            assert guard["readOnlyRootFilesystem"] and guard["capabilities"] == {"drop": ["ALL"]}
            assert not guard["allowPrivilegeEscalation"]
        volumes = {volume["name"] for volume in pod["volumes"]}
        mounts = {m["name"] for container in pod["containers"] for m in container["volumeMounts"]}
        assert mounts == volumes


def test_memory_by_the_rule(case: str, objects: dict[str, Object]) -> None:
    """N x (memory + 224 MiB) + 160 MiB; with GPUs what the values say."""
    pod = list(templates(objects))[-1]["spec"]
    resources = pod["containers"][0]["resources"]
    limit, request = resources["limits"], resources["requests"]
    assert limit["memory"] == request["memory"]
    expected = {"defaults": 2 * 824 + 160, "ray": 2 * (4096 + 224) + 1024, "gpu": 48 * 1024}
    if case in expected:
        assert mebibytes(limit["memory"]) == expected[case]
    if case == "gpu":
        assert limit["nvidia.com/gpu"] == 2
    if case == "ray":
        (group,) = objects["RayCluster"]["spec"]["workerGroupSpecs"]
        assert group["replicas"] == group["maxReplicas"] == 4
        assert group["rayStartParams"]["num-cpus"] == "8" and request["cpu"] == "8"


def test_a_certificate_and_keys_reach_server_and_probes() -> None:
    objects = rendered(CASES["guarded"])
    pod, front = front_of(objects)
    assert "--ssl-keyfile=/etc/kunserve/tls/tls.key" in front["args"]
    assert "--api-key-file=/etc/kunserve/keys/keys" in front["args"]
    for kind in ("startupProbe", "readinessProbe", "livenessProbe"):
        assert front[kind]["httpGet"]["scheme"] == "HTTPS"
    secrets = {v["secret"]["secretName"] for v in pod["volumes"] if "secret" in v}
    assert secrets == {"kunserve-keys", "kunserve-tls"}
    assert objects["ServiceMonitor"]["spec"]["endpoints"][0]["scheme"] == "https"
    policy = objects["NetworkPolicy"]["spec"]
    assert policy["policyTypes"] == ["Ingress", "Egress"] and len(policy["egress"]) == 1
    assert len(policy["ingress"][0]["from"]) == 2
    assert "replicas" not in objects["Deployment"]["spec"], "the autoscaler's"


@pytest.mark.parametrize(
    ("values", "says"),
    [
        ({"instance": {"count": 2}}, "instance"),
        ({"mode": "cluster"}, "mode"),
        ({"instances": {"count": 0}}, "count"),
        ({"args": ["max-model-len=1"]}, "args"),
    ],
)
def test_wrong_values_are_refused(values: Object, says: str) -> None:
    with pytest.raises(helm.HelmValuesError, match=says):
        rendered(values)


def test_no_memory_is_refused() -> None:
    with pytest.raises(helm.HelmRenderError, match=r"give resources\.limits\.memory"):
        rendered({"instances": {"memoryMiB": None}})


def test_helm_finds_nothing_to_complain_of(case: str) -> None:
    """But that there is no icon."""
    messages = helm.lint(CHART, CASES[case], strict=True)["messages"]
    assert [one["error"] for one in messages if "icon is recommended" not in one["error"]] == []


def test_a_pool_has_the_pods_that_answer_and_their_port() -> None:
    for values in ({}, EXAMPLES["ray"]):
        objects = rendered({**EXAMPLES["gateway"], **values})
        pool = objects["InferencePool"]["spec"]
        pod, container = next(labels_as_made(objects)), front_of(objects)[1]
        assert pool["selector"]["matchLabels"].items() <= pod.items()
        assert [one["number"] for one in pool["targetPorts"]] == [
            port["containerPort"] for port in container["ports"] if port["name"] == "http"
        ]
        assert pool["endpointPickerRef"] == {
            "name": "llm-picker",
            "port": {"number": 9002},
            "failureMode": "FailOpen",
        }
    assert "InferencePool" not in rendered({})


def test_the_gateways_definition_takes_the_pool() -> None:
    pool = rendered(EXAMPLES["gateway"])["InferencePool"]
    assert pool["apiVersion"] == "inference.networking.k8s.io/v1"
    jsonschema.Draft7Validator(POOL).validate(pool["spec"])
    for wrong in ({"targetPortNumber": 8000}, {"targetPorts": []}, {"endpointPickerRef": {}}):
        assert not jsonschema.Draft7Validator(POOL).is_valid({**pool["spec"], **wrong})
