"""``kunserve profile``: what steps of a model cost here."""

import contextlib
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import click
from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)
from rich.table import Table

from kunserve.core.config import (
    CUDA_BLOCK_SIZE,
    ClusterConfig,
    InstanceConfig,
    ModelConfig,
    SchedulerConfig,
)
from kunserve.core.cost import DENSE, ExpertChoice, Windows
from kunserve.core.errors import KunServeError
from kunserve.engine.body import EngineBody
from kunserve.model.profile import Profile, ProfileSubject, default_path, write_profile
from kunserve.server.start.flags.declared import setting
from kunserve_lab.profile.journal import Journal
from kunserve_lab.profile.neighbours import neighbours
from kunserve_lab.profile.run import (
    BodySettings,
    limits_of,
    make_plan,
    make_profile,
    measure,
    open_body,
)
from kunserve_lab.profile.stopwatch import Stopwatch

_MODEL, _INSTANCE = ModelConfig(), InstanceConfig()
_FULL, _QUICK = (48, 5), (12, 3)
"""(Batches of each region, repeats of each)."""
_LINES = 10
"""On a pipe, of the whole measurement."""


@click.command("profile", context_settings={"show_default": True})
@click.argument("model", default=_MODEL.model)
@click.option("--dtype", **setting(ModelConfig, "dtype"))
@click.option("--quantization", **setting(ModelConfig, "quantization"))
@click.option("--load-format", **setting(ModelConfig, "load_format", hidden=True))
@click.option("--device", default=_INSTANCE.device, type=click.Choice(["cpu", "cuda"]),
              help="Where `serve` will compute. A GPU times batches by its events.")  # fmt: skip
@click.option("--num-threads", **setting(InstanceConfig, "num_threads"))
@click.option("--tensor-parallel-size", **setting(InstanceConfig, "tensor_parallel_size"))
@click.option("--block-size", **setting(InstanceConfig, "block_size", help="As `serve` will have "
              f"[{_INSTANCE.block_size}; {CUDA_BLOCK_SIZE} on a GPU]."))  # fmt: skip
@click.option("--max-num-batched-tokens", **setting(
    SchedulerConfig, "max_num_batched_tokens", type=click.IntRange(min=32),
    help="Largest batch measured."))  # fmt: skip
@click.option("--max-num-seqs", **setting(
    SchedulerConfig, "max_num_seqs",
    help="Most decodes in a batch measured, if KV memory holds them."))  # fmt: skip
@click.option("--num-instances", **setting(
    ClusterConfig, "num_instances",
    help="As many as `serve` will run here: the others compute meanwhile."))  # fmt: skip
@click.option("--quick", is_flag=True, help="A quarter of the batches, fewer repeats.")
@click.option("--seed", default=0, help="Of the batches drawn.")
@click.option("--out", type=click.Path(path_type=Path, dir_okay=False),
              help="The profile [where `serve` looks for it].")  # fmt: skip
def profile_command(
    model: str,
    dtype: str,
    quantization: str,
    load_format: str,
    device: str,
    num_threads: int,
    tensor_parallel_size: int,
    block_size: int | None,
    max_num_batched_tokens: int,
    max_num_seqs: int,
    num_instances: int,
    quick: bool,
    seed: int,
    out: Path | None,
) -> None:
    """Measure what steps of MODEL cost on this machine, and fit the cost model of batch formation.

    Batches of whole prompts, of later chunks, of decodes and of all mixed run on the real engine,
    in random order and several times over. Interrupted, it goes on where it stopped.
    """
    if device != "cpu" and out is None:  # the default place is that of the CPU's profile
        raise click.UsageError("a GPU's profile needs --out; give the file to `serve --profile`")
    how: Any = {"dtype": dtype, "load_format": load_format, "quantization": quantization}
    read, ranks = ModelConfig(model=model, **how), {"num_ranks": tensor_parallel_size}
    block_size = block_size or InstanceConfig.of_device(device).block_size
    steps = None if device == "cpu" else SchedulerConfig(max_num_seqs, max_num_batched_tokens)
    settings = BodySettings(read, block_size, num_threads, device, scheduler=steps, **ranks)
    try:
        body = open_body(settings)
        try:
            subject = _subject_of(body, settings)
            path = out or default_path(subject)
            limits = limits_of(body, max_num_batched_tokens, max_num_seqs)
            plan = make_plan(subject, limits, *(_QUICK if quick else _FULL), seed)
            journal = Journal(path.with_suffix(".samples.jsonl"), plan)
            stopwatch = Stopwatch(body, settings.clock)
            try:
                total = len(plan.shapes) * plan.num_repeats
                beside = neighbours(num_instances - 1, settings)
                with beside as others, _told(total, journal.num_measured) as advance:
                    measure(stopwatch, plan, journal, others, advance)
                profile = make_profile(
                    plan, journal.found, stopwatch.clock, num_instances, seed, device, *_kinds(body)
                )
            except BaseException:
                journal.close()
                raise
        finally:
            body.close()
        write_profile(path, profile)
        journal.remove()
    except KunServeError as error:
        raise click.ClickException(str(error)) from None
    _tell(profile, path)


def _kinds(body: EngineBody) -> tuple[ExpertChoice, Windows]:
    """What the cost of the model's layers depends on beside their sizes."""
    experts = body.model.experts
    return DENSE if experts is None else experts.choice, body.model.windows


def _subject_of(body: EngineBody, settings: BodySettings) -> ProfileSubject:
    packed = body.model.packed
    kept = None if packed is None else packed.method
    return ProfileSubject.of(
        body.model, settings.num_threads, settings.block_size, kept, settings.num_ranks
    )


@contextlib.contextmanager
def _told(total: int, num_before: int) -> Iterator[Callable[[], None]]:
    """Gives what is to be called after each batch. A bar; on a pipe a line for every tenth."""
    console = Console(stderr=True)
    progress = Progress(
        TextColumn("[bold]{task.description}"),
        BarColumn(bar_width=None),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TimeRemainingColumn(),
        console=console,
        transient=True,
        disable=not console.is_terminal,
    )
    task = progress.add_task("measuring", total=total, completed=num_before)
    began_s, done = time.monotonic(), num_before

    def advance() -> None:
        nonlocal done
        done += 1
        progress.advance(task)
        if progress.disable and done * _LINES // total > (done - 1) * _LINES // total:
            left_s = (time.monotonic() - began_s) / (done - num_before) * (total - done)
            click.echo(f"{done} of {total} batches, about {left_s / 60:.1f} min left", err=True)

    if progress.disable:
        click.echo(f"measuring {total} batches of steps, {num_before} before", err=True)
    with progress:
        yield advance


def _tell(profile: Profile, path: Path) -> None:
    regions = [r for r in next(iter(profile.errors.values())) if r != "all"]
    table = Table(title=f"Held-out error, mean (largest), in percent; {profile.clock}")
    table.add_column("cost model")
    for region in regions:
        table.add_column(region, justify="right")
    for name, errors in profile.errors.items():
        cells = [f"{errors[r].mean * 100:.1f} ({errors[r].largest * 100:.0f})" for r in regions]
        table.add_row(name, *cells)
    Console().print(table)
    fits = (
        (profile.clock, profile.coefficients),
        ("wall time while the others rest", profile.alone),
        (f"wall time among {profile.num_instances} instances", profile.serving),
    )
    for clock, c in fits:
        click.echo(
            f"attention {c.attention_s * 1e6:.3f} us/pair, token {c.token_s * 1e6:.1f} us, "
            f"chunk {c.chunk_s * 1e3:.2f} ms ({c.shared_s * 1e3:.2f} shared), "
            f"context {c.context_s * 1e6:.3f} us/token, sample {c.sample_s * 1e6:.1f} us, "
            f"narrow {c.narrow_s * 1e3:.2f} ms, expert {c.expert_s * 1e6:.1f} us; {clock}"
        )
    click.echo(f"{profile.subject.model} on {profile.device}: {path}")
