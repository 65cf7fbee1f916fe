"""``kunserve demo``: a question, then the same burst served by two systems, on a real model."""

import http.client
import json
import os
import time
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
from kunserve_lab.compare.demo_burst import Pace, choose, measure_pace
from kunserve_lab.compare.experiment import Experiment
from kunserve_lab.compare.output.story import chart, sentence
from kunserve_lab.compare.real import serve_arguments
from kunserve_lab.compare.settings import RealSetup, WorkloadSettings, workload_of
from kunserve_lab.compare.systems import find_system

QUESTION = "What is the capital of France?"
SETUP = RealSetup(instance_memory="343MiB", max_num_batched_tokens=128)
REQUESTS = WorkloadSettings(duration_s=60.0, max_total_tokens=3072)
"""Their rate, and on slow machines their lengths, are chosen by what steps take (`demo_burst`)."""
LOOK_S = 1.0
ANSWER_S = 120.0
"""How long the model may think about the question."""


@click.command("demo")
@click.option(
    "--seconds", default=REQUESTS.duration_s, show_default=True, help="Length of the burst window."
)
@click.option(
    "--rate",
    type=float,
    help="Mean requests per second [what overflows the memory of this machine].",
)
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
    help=f"Of each instance [{SETUP.instance_memory}: weights take 75 %; less on slow machines].",
)
@click.option(
    "--out",
    default=Path("demo"),
    show_default=True,
    type=click.Path(path_type=Path, file_okay=False),
    help="Folder for the table, the figures and the raw runs.",
)
def demo_command(
    seconds: float,
    rate: float | None,
    seed: int,
    rounds: int,
    instance_memory: str | None,
    out: Path,
) -> None:
    """Ask a real model a question, then send it one burst under two overload policies.

    Both servers have the same model, memory, arrivals and lengths. `recompute` preempts and
    queues as vLLM does; `drop` frees replicated layers and runs the instances as a pipeline.
    """
    busy_before = _busy_cores()
    setup, workload = SETUP, replace(REQUESTS, duration_s=seconds)
    if instance_memory is not None:
        setup = replace(setup, instance_memory=instance_memory)
    try:
        pace = _ask(setup, is_timed=rate is None)
        if pace is not None:
            click.echo("Simulating which burst overflows its memory, and fits after a drop ...")
            burst = choose(pace, setup, workload, seed, is_sized=instance_memory is None)
            setup, workload = burst.setup, burst.workload
            click.echo(f"Chosen: {burst.reason(pace)}.")
        elif rate is not None:
            workload = replace(workload, rate=rate)
        experiment = Experiment(
            setup=setup,
            workload=workload,
            seeds=(seed,),
            rounds=rounds,
            title="The demo: one burst, two overload policies",
        )
        click.secho(f"\nThe same bursts, twice: {rounds * 2} runs of some {seconds:g} s", bold=True)
        results = compare(experiment, out, Options(is_fresh=True), _say)
    except KunServeError as error:
        raise click.ClickException(str(error)) from None
    except KeyboardInterrupt:
        raise click.Abort from None
    rival, ours = (
        next(run for run in results if run.system == name) for name in experiment.systems
    )
    click.secho(f"\n{sentence(rival, ours, busy_before)}\n", bold=True)
    arrivals = workload_of(experiment.workload, 1.0, seed).arrival_s
    Console().print(chart(arrivals, (rival, ours)))
    click.echo(f"\nAll numbers: {out / 'table.txt'}. As a figure: {out / 'timeline.png'}")


def _say(text: str) -> None:
    """What goes on. Tables have several lines, and are for the folder."""
    if "\n" not in text:
        click.echo(text)


def _busy_cores() -> float:
    """How many others use for a moment: a load average would tell of an install that is over."""

    def idle_s() -> float:
        _, *ticks = Path("/proc/stat").read_text(encoding="ascii").splitlines()[0].split()
        return sum(map(int, ticks[3:5])) / os.sysconf("SC_CLK_TCK")  # idle, or waiting for a disk

    began_s, before_s = time.monotonic(), idle_s()
    time.sleep(LOOK_S)
    took_s = time.monotonic() - began_s
    return max(0.0, (os.cpu_count() or 1) - (idle_s() - before_s) / took_s)


def _ask(setup: RealSetup, is_timed: bool) -> Pace | None:
    """The question; then how fast the server's steps are, if that decides the burst."""
    model = setup.model
    click.secho(f"\nStarting two instances of {model} ...", bold=True)
    with running_server(serve_arguments(find_system("recompute"), setup, None)) as server:
        click.echo(f"> {QUESTION}")
        for piece in answer(server.url, model, QUESTION):
            click.echo(piece, nl=False)
        click.echo()
        if not is_timed:
            return None
        click.echo("\nTiming a few requests ...")
        return measure_pace(server.url, setup)


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
