"""``kunserve demo``: a question, then the same burst served by two systems, on a real model."""

import http.client
import json
import urllib.request
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import click

from kunserve.core.errors import KunServeError
from kunserve_lab.bench.server_process import running_server
from kunserve_lab.bench.session import ServerUnreachable
from kunserve_lab.bench.sse import DONE, error_message
from kunserve_lab.compare.comparison import Options, compare
from kunserve_lab.compare.experiment import Experiment
from kunserve_lab.compare.settings import RealSetup, WorkloadSettings

QUESTION = "What is the capital of France?"
SETUP = RealSetup(instance_memory="343MiB", max_num_batched_tokens=128)
REQUESTS = WorkloadSettings(rate=0.6, duration_s=80.0)
ANSWER_S = 120.0
"""How long the model may think about the question."""


@click.command("demo")
@click.option(
    "--seconds", default=REQUESTS.duration_s, show_default=True, help="Length of the burst window."
)
@click.option("--rate", default=REQUESTS.rate, show_default=True, help="Mean requests per second.")
@click.option("--seed", default=0, show_default=True, help="Of arrivals, lengths and prompts.")
@click.option(
    "--rounds",
    type=click.IntRange(min=1),
    default=1,
    show_default=True,
    help="Runs of each system. One is a draw; three tell a difference from noise.",
)
@click.option(
    "--instance-memory",
    default=SETUP.instance_memory,
    show_default=True,
    help="Of each instance; at 343MiB weights take 75 %.",
)
@click.option(
    "--out",
    default=Path("demo"),
    show_default=True,
    type=click.Path(path_type=Path, file_okay=False),
    help="Folder for the table, the figures and the raw runs.",
)
def demo_command(
    seconds: float, rate: float, seed: int, rounds: int, instance_memory: str, out: Path
) -> None:
    """Ask a real model a question, then send it one burst under two overload policies.

    Both servers have the same model, memory, arrivals and lengths. `recompute` preempts and
    queues as vLLM does; `drop` frees replicated layers and runs the instances as a pipeline.
    """
    experiment = Experiment(
        setup=replace(SETUP, instance_memory=instance_memory),
        workload=WorkloadSettings(rate=rate, duration_s=seconds),
        seeds=(seed,),
        rounds=rounds,
        title="The demo: one burst, two overload policies",
    )
    try:
        for dtype in ("bfloat16", "float32"):
            _ask_in(dtype)
        click.secho("\nOne burst, twice", bold=True)
        compare(experiment, out, Options(is_fresh=True), click.echo)
    except KunServeError as error:
        raise click.ClickException(str(error)) from None
    except KeyboardInterrupt:
        raise click.Abort from None
    click.secho(f"Figure: {out / 'timeline.png'}", bold=True)


def _ask_in(dtype: str) -> None:
    model = SETUP.model
    click.secho(f"\nStarting two instances of {model} in {dtype} ...", bold=True)
    with running_server([model, "--num-instances", "2", "--dtype", dtype]) as server:
        click.echo(f"> {QUESTION}")
        for piece in answer(server.url, model, QUESTION):
            click.echo(piece, nl=False)
        click.echo()


def answer(url: str, model: str, question: str) -> Iterator[str]:
    """The pieces of a streamed chat answer, as they come.

    Raises ServerUnreachable for an answer that the server does not give, or not to its end.
    """
    body = {
        "model": model,
        "messages": [{"role": "user", "content": question}],
        "max_completion_tokens": 32,
        "temperature": 0,
        "stream": True,
    }
    request = urllib.request.Request(
        f"{url}/v1/chat/completions",
        json.dumps(body).encode(),
        {"Content-Type": "application/json"},
    )
    try:
        with urllib.request.urlopen(request, timeout=ANSWER_S) as response:
            for line in response:
                payload = line.removeprefix(b"data: ").strip()
                if payload == DONE:
                    return
                if payload:
                    yield from _pieces(url, json.loads(payload))
    except (OSError, http.client.HTTPException) as error:
        raise ServerUnreachable(f"{url}: {error}") from None
    raise ServerUnreachable(f"{url}: the answer ended early")


def _pieces(url: str, event: dict[str, Any]) -> Iterator[str]:
    if event.get("error") is not None:
        raise ServerUnreachable(f"{url}: {error_message(event['error'])}")
    for choice in event.get("choices", ()):
        yield choice["delta"].get("content") or ""
