"""``kunserve demo``: a question, then the same burst served twice, on a real model."""

from collections.abc import Sequence
from pathlib import Path

import click
from openai import OpenAI

from kunserve.bench.plot import plot_comparison
from kunserve.bench.runfile import write_run
from kunserve.bench.server_process import running_server
from kunserve.bench.versus import Result, System, run_systems, table
from kunserve.core.errors import KunServeError
from kunserve.workload.bursty import bursty_workload
from kunserve.workload.workload import Workload

MODEL = "smollm2-135m"
QUESTION = "What is the capital of France?"
BURST_S = 80.0
MEAN_RATE = 0.6


@click.command("demo")
@click.option("--seconds", default=BURST_S, show_default=True, help="Length of the burst window.")
@click.option("--rate", default=MEAN_RATE, show_default=True, help="Mean requests per second.")
@click.option("--seed", default=0, show_default=True, help="Of arrivals, lengths and prompts.")
@click.option(
    "--instance-memory",
    default="343MiB",
    show_default=True,
    help="Of each instance; at 343MiB weights take 75 %.",
)
@click.option(
    "--out",
    default=Path("demo"),
    show_default=True,
    type=click.Path(path_type=Path, file_okay=False),
    help="Folder for the figure and the raw runs.",
)
def demo_command(seconds: float, rate: float, seed: int, instance_memory: str, out: Path) -> None:
    """Ask a real model a question, then send it one burst under two overload policies.

    Both servers have the same model, memory, arrivals and lengths. `recompute` preempts and
    queues as vLLM does; `drop` frees replicated layers and runs the instances as a pipeline.
    """
    try:
        out.mkdir(parents=True, exist_ok=True)
        _ask_in_each_dtype()
        workload = bursty_workload(
            seconds,
            rate,
            seed,
        )
        results = _burst(workload, instance_memory, seed)
        _tell(results, out)
    except KunServeError as error:
        raise click.ClickException(str(error)) from None
    except KeyboardInterrupt:
        raise click.Abort from None


def _ask_in_each_dtype() -> None:
    for dtype in ("bfloat16", "float32"):
        click.secho(f"\nStarting two instances of SmolLM2-135M-Instruct in {dtype} ...", bold=True)
        with running_server([MODEL, "--num-instances", "2", "--dtype", dtype]) as server:
            client = OpenAI(base_url=f"{server.url}/v1", api_key="none")
            click.echo(f"> {QUESTION}")
            stream = client.chat.completions.create(
                model=MODEL,
                messages=[{"role": "user", "content": QUESTION}],
                max_tokens=32,
                temperature=0,
                stream=True,
            )
            for chunk in stream:
                if chunk.choices and chunk.choices[0].delta.content:
                    click.echo(chunk.choices[0].delta.content, nl=False)
            click.echo()


def _burst(workload: Workload, instance_memory: str, seed: int) -> list[Result]:
    common = (
        *(MODEL, "--num-instances", "2", "--instance-memory", instance_memory),
        *("--max-num-batched-tokens", "128"),
    )
    systems = [
        System(policy, (*common, "--overload-policy", policy)) for policy in ("recompute", "drop")
    ]
    click.secho(
        f"\nOne burst, twice: {len(workload)} requests over {workload.duration_s:.0f} s, "
        f"{workload.provenance}",
        bold=True,
    )
    return run_systems(systems, workload, seed=seed, say=lambda text: click.echo(f"  {text}"))


def _tell(results: Sequence[Result], out: Path) -> None:
    click.echo("\n" + table(results))
    for result in results:
        if result.transitions:
            click.echo(f"\n{result.run.label}: what the server logged of its transitions")
            for line in result.transitions:
                click.echo(f"  {line}")
        write_run(out / f"{result.run.label}.jsonl", result.run)
    figure = out / "burst.png"
    plot_comparison([result.run for result in results], figure)
    click.secho(f"\nFigure: {figure}", bold=True)
