"""``kunserve demo``: a question, then the same burst served by two systems, on a real model."""

import http.client
import json
import urllib.request
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import click
from rich.console import Console

from kunserve.core.errors import KunServeError
from kunserve_lab.bench.server_process import running_server
from kunserve_lab.bench.session import ServerUnreachable
from kunserve_lab.bench.sse import DONE, error_message
from kunserve_lab.compare.comparison import Options, compare
from kunserve_lab.compare.experiment import Experiment
from kunserve_lab.compare.output.story import chart, sentence
from kunserve_lab.compare.settings import RealSetup, WorkloadSettings, workload_of

QUESTION = "What is the capital of France?"
SETUP = RealSetup(instance_memory="343MiB", max_num_batched_tokens=128)
REQUESTS = WorkloadSettings(rate=1.2, duration_s=60.0, max_total_tokens=3072)
"""Bursts that overflow the memory on slow and fast machines alike, and nearly fit after a drop: the
simulator says so of step times from 0.7 to 2.2 times those of an AVX-512 core, for every seed."""
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
        workload=replace(REQUESTS, rate=rate, duration_s=seconds),
        seeds=(seed,),
        rounds=rounds,
        title="The demo: one burst, two overload policies",
    )
    try:
        _ask()
        click.secho(f"\nThe same bursts, twice: {rounds * 2} runs of some {seconds:g} s", bold=True)
        results = compare(experiment, out, Options(is_fresh=True), _say)
    except KunServeError as error:
        raise click.ClickException(str(error)) from None
    except KeyboardInterrupt:
        raise click.Abort from None
    rival, ours = (
        next(run for run in results if run.system == name) for name in experiment.systems
    )
    click.secho(f"\n{sentence(rival, ours)}\n", bold=True)
    arrivals = workload_of(experiment.workload, 1.0, seed).arrival_s
    Console().print(chart(arrivals, (rival, ours)))
    click.echo(f"\nAll numbers: {out / 'table.txt'}. As a figure: {out / 'timeline.png'}")


def _say(text: str) -> None:
    """What goes on. Tables have several lines, and are for the folder."""
    if "\n" not in text:
        click.echo(text)


def _ask() -> None:
    model = SETUP.model
    click.secho(f"\nStarting two instances of {model} ...", bold=True)
    with running_server([model, "--num-instances", "2"]) as server:
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
