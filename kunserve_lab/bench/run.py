"""What ``kunserve bench`` does with its flags: build, run, report, save, draw."""

import asyncio
import contextlib
import dataclasses
import json
import math
import os
import resource
import signal
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path

import click
import msgspec

from kunserve.core.errors import ConfigError
from kunserve_lab.bench.client import CallSettings
from kunserve_lab.bench.config import BenchConfig
from kunserve_lab.bench.environment import environment
from kunserve_lab.bench.metrics import RunMetrics, Slo, compute_metrics
from kunserve_lab.bench.output import report
from kunserve_lab.bench.output.progress import ProgressLine
from kunserve_lab.bench.prompts import PromptSource, TokenIdPrompts, WordPrompts
from kunserve_lab.bench.replay import Silent
from kunserve_lab.bench.runfile import Run, read_run, write_run
from kunserve_lab.bench.session import Outcome, Target, find_model, measure
from kunserve_lab.workload.multi_turn import Conversation
from kunserve_lab.workload.recipe import Dataset, Recipe, build_workload
from kunserve_lab.workload.summary import summarize
from kunserve_lab.workload.workload import Workload

EXIT_OK, EXIT_NONE_COMPLETED, EXIT_USAGE, EXIT_INTERRUPTED = 0, 1, 2, 130
_ENDPOINTS = {"openai": "/v1/completions", "openai-chat": "/v1/chat/completions"}

Fields = tuple[tuple[str, object], ...]


def run_command(config: BenchConfig) -> int:
    """Runs one experiment, or reports saved ones; returns the process's exit code.

    A caller's mistake, an unreachable server included, is one line on stderr and exit code 2.
    """
    try:
        shown = report.Presentation(
            parse_latencies(config.percentile_metrics),
            config.request_rate if config.request_rate != float("inf") else None,
            config.max_concurrency,
        )
        percentiles = parse_percentiles(config.metric_percentiles)
        slo = parse_goodput(config.goodput)
        if config.load_results:
            return _report_saved(config, shown, percentiles, slo)
        return _run(config, shown, percentiles, slo)
    except ConfigError as error:
        click.echo(f"kunserve bench: {error}", err=True)
        return EXIT_USAGE


def recipe_of(config: BenchConfig) -> Recipe:
    """The workload that the flags ask for."""
    return Recipe(
        dataset=Dataset(config.dataset_name),
        dataset_path=config.dataset_path,
        lengths_path=config.lengths_path,
        num_prompts=config.num_prompts,
        request_rate=config.request_rate,
        burstiness=config.burstiness,
        seed=config.seed,
        random_input_tokens=config.random_input_len,
        random_output_tokens=config.random_output_len,
        random_range_ratio=config.random_range_ratio,
        conversation=Conversation(
            config.turns,
            config.system_tokens,
            config.turn_tokens,
            config.answer_tokens,
            config.think_time,
        ),
        duration_s=config.bursty_duration,
        trace_start_s=config.trace_start,
        trace_end_s=config.trace_end,
        trace_model=config.trace_model,
        trace_time_scale=config.trace_time_scale,
        trace_scale=config.trace_scale,
        trace_keep_window=config.trace_keep_window,
        thin=config.thin,
        seconds_per_unit=config.timed_trace_sec_multiplier,
        max_total_tokens=config.max_total_tokens,
        length_scale=config.length_scale,
    )


def parse_goodput(pairs: Sequence[str]) -> Slo | None:
    """``ttft:500 tpot:50`` (milliseconds) to an objective; None without any."""
    limits_s: dict[str, float] = {}
    for pair in pairs:
        name, _, value = pair.partition(":")
        try:
            limit_s = float(value) / 1e3
        except ValueError:
            limit_s = -1.0
        if name not in ("ttft", "tpot", "e2el") or not limit_s >= 0:
            raise ConfigError(
                f"--goodput {pair}: expected ttft:MS, tpot:MS or e2el:MS, such as ttft:500"
            )
        limits_s[f"{name}_s"] = limit_s
    return Slo(**limits_s) if limits_s else None


def parse_latencies(text: str) -> tuple[str, ...]:
    """``ttft,tpot`` to names of latencies."""
    names = tuple(name.strip() for name in text.split(",") if name.strip())
    for name in names:
        if name not in report.LATENCIES:
            known = ", ".join(report.LATENCIES)
            raise ConfigError(f"--percentile-metrics {name}: expected some of {known}")
    return names


def parse_percentiles(text: str) -> tuple[float, ...]:
    """``50,99.9`` to percentiles."""
    try:
        values = tuple(float(value) for value in text.split(","))
    except ValueError:
        values = (-1.0,)
    if not all(0 <= value <= 100 for value in values):
        raise ConfigError(f"--metric-percentiles {text}: expected numbers from 0 to 100")
    return values


def _run(
    config: BenchConfig, shown: report.Presentation, percentiles: tuple[float, ...], slo: Slo | None
) -> int:
    _check_outputs(config)
    workload = build_workload(recipe_of(config))
    prompts = _prompts(config)
    servers, extra_body = _servers(config), _extra_body(config.extra_body)
    _allow_many_sockets(len(workload))
    target, outcome, interrupted = asyncio.run(
        _measured(config, servers, extra_body, workload, prompts)
    )
    if interrupted and not outcome.records:
        click.echo("Interrupted before the first request.", err=True)
        return EXIT_INTERRUPTED
    run = Run(
        label=config.label or config.backend,
        provenance=workload.provenance,
        duration_s=outcome.duration_s,
        records=outcome.records,
        samples=outcome.samples,
        config=tuple(_config(config, target).items()),
        environment=tuple(environment().items()),
    )
    metrics = compute_metrics(run.records, run.duration_s, percentiles, slo)
    _show(run, metrics, shown, config.ignore_eos)
    if outcome.num_missed_samples and target.metrics_urls:
        click.echo(f"Note: {outcome.num_missed_samples} looks at /metrics got no answer.")
    if config.save_result:
        _save(config, target, run, metrics)
    if config.plot_path:
        _plot([run], config.plot_path)
    if interrupted:
        return EXIT_INTERRUPTED
    return EXIT_OK if metrics.num_completed else EXIT_NONE_COMPLETED


async def _measured(
    config: BenchConfig,
    servers: tuple[str, ...],
    extra_body: Fields,
    workload: Workload,
    prompts: PromptSource,
) -> tuple[Target, Outcome, bool]:
    """Finds the servers, then measures. The first Ctrl-C ends the run and keeps its numbers."""
    ready_s = config.ready_check_timeout_sec

    def waiting(reason: str) -> None:
        click.echo(f"Waiting up to {ready_s:g} s: {reason}.", err=True)

    model = await find_model(servers, config.model, config.api_key, ready_s, waiting)
    target = _target(config, servers, model, extra_body)
    _announce(target, workload)
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    loop.add_signal_handler(signal.SIGINT, stop.set)
    try:
        with contextlib.ExitStack() as stack:
            observer = (
                Silent()
                if config.disable_tqdm
                else stack.enter_context(ProgressLine(len(workload)))
            )
            outcome = await measure(target, workload, prompts, observer, stop)
    finally:
        loop.remove_signal_handler(signal.SIGINT)
    return target, outcome, stop.is_set()


def _target(
    config: BenchConfig, servers: tuple[str, ...], model: str, extra_body: Fields
) -> Target:
    metrics_urls = tuple(config.metrics_urls) or tuple(f"{url}/metrics" for url in servers)
    return Target(
        servers=servers,
        settings=CallSettings(
            model=model,
            endpoint="/" + (config.endpoint or _ENDPOINTS[config.backend]).lstrip("/"),
            chat=config.backend == "openai-chat",
            ignore_eos=config.ignore_eos,
            temperature=config.temperature,
            api_key=config.api_key,
            timeout_s=config.request_timeout_sec,
            extra_body=extra_body,
        ),
        metrics_urls=() if metrics_urls == ("none",) else metrics_urls,
        max_concurrency=config.max_concurrency,
        num_warmups=config.num_warmups,
    )


def _servers(config: BenchConfig) -> tuple[str, ...]:
    urls = config.base_urls or (f"http://{config.host}:{config.port}",)
    for url in urls:
        if not url.startswith(("http://", "https://")):
            raise ConfigError(f"--base-url {url}: expected http://HOST:PORT")
    return tuple(url.rstrip("/").removesuffix("/v1") for url in urls)


def _extra_body(text: str | None) -> Fields:
    if text is None:
        return ()
    try:
        return tuple(msgspec.json.decode(text, type=dict[str, object]).items())
    except msgspec.MsgspecError as error:
        raise ConfigError(f"--extra-body: {error}") from None


def _prompts(config: BenchConfig) -> PromptSource:
    seed, wanted = config.seed, config.prompt_format
    if config.tokenizer is not None:
        if wanted == "token-ids":
            raise ConfigError("--tokenizer makes text prompts: it excludes token-ids")
        from kunserve_lab.bench.tokenizer import tokenized_prompts

        return tokenized_prompts(seed, config.tokenizer)
    chat = config.backend == "openai-chat"
    if wanted == "token-ids" and chat:
        raise ConfigError("--prompt-format token-ids needs --backend openai: a chat has text only")
    if wanted == "text" or chat:
        return WordPrompts(seed)
    return TokenIdPrompts(seed, config.prompt_vocab_size)


def _announce(target: Target, workload: Workload) -> None:
    facts = summarize(workload)
    rate = f"{facts.mean_rate:.2f} req/s" if facts.duration_s else "all at once"
    if facts.duration_s:
        rate += f" (peak {facts.peak_rate:.2f} over {facts.bin_s:g} s)"
    click.echo(f"Target:   {target.settings.model} at {', '.join(target.servers)}")
    click.echo(
        f"Workload: {facts.num_requests} requests over {facts.duration_s:.0f} s, {rate}, mean "
        f"{facts.mean_input_tokens:.0f} tokens in, {facts.mean_output_tokens:.0f} out"
    )
    click.echo(f"          {workload.provenance}")
    if target.max_concurrency is not None:
        click.echo(
            "Warning:  --max-concurrency holds requests back when the server is slow, so queueing "
            "is hidden. Do not compare systems under overload with it.",
            err=True,
        )


def _show(run: Run, metrics: RunMetrics, shown: report.Presentation, ignore_eos: bool) -> None:
    click.echo(report.console_block(metrics, shown))
    failures = report.failure_lines(run.records)
    if failures:
        click.echo("Failures:\n" + "\n".join(failures))
    for note in report.cautions(run.records, ignore_eos):
        click.echo(f"Note: {note}")


def _save(config: BenchConfig, target: Target, run: Run, metrics: RunMetrics) -> None:
    """vLLM's JSON under the name asked for, and everything as JSON lines beside it."""
    moment = datetime.now(UTC).strftime("%Y%m%d-%H%M%S")
    model = target.settings.model.rsplit("/", 1)[-1]
    rate = config.request_rate or ("inf" if config.dataset_name == "random" else "trace")
    label = run.label.replace("/", "-")
    name = config.result_filename or f"{label}-{rate}qps-{model}-{moment}.json"
    path = (config.result_dir or Path()) / name
    header = {
        "date": moment,
        "backend": config.backend,
        "label": run.label,
        "model_id": target.settings.model,
        "tokenizer_id": config.tokenizer,
        "num_prompts": len(run.records),
        "request_rate": _in_json(config.request_rate or math.inf),
        "burstiness": _in_json(config.burstiness),
        "max_concurrency": config.max_concurrency,
        "workload": run.provenance,
    }
    metadata = dict(pair.partition("=")[::2] for pair in config.metadata)
    result = header | metadata | report.result_json(metrics)
    if config.save_detailed:
        result |= report.detailed_json(run.records)
    summary = path if path.suffix == ".json" else path.with_name(path.name + ".json")
    lines = summary.with_suffix(".jsonl")
    try:
        summary.write_text(json.dumps(result, default=str) + "\n")
    except OSError as error:
        raise ConfigError(f"cannot write {summary}: {error.strerror}") from None
    write_run(lines, run)
    click.echo(f"Saved {summary} and {lines}")


def _in_json(value: float | None) -> float | str | None:
    """JSON has no infinity; vLLM writes a word for it, too."""
    return "inf" if value == math.inf else value


def _plot(runs: Sequence[Run], path: Path) -> None:
    from kunserve_lab.bench.output.plot import plot_comparison, plot_timeline

    if len(runs) == 1:
        plot_timeline(runs[0], path)
    else:
        plot_comparison(runs, path)
    click.echo(f"Drew {path}")


def _report_saved(
    config: BenchConfig, shown: report.Presentation, percentiles: tuple[float, ...], slo: Slo | None
) -> int:
    _check_outputs(config)
    runs = [read_run(path) for path in config.load_results]
    for run in runs:
        click.echo(f"{run.label}: {run.provenance}")
        metrics = compute_metrics(run.records, run.duration_s, percentiles, slo)
        ignored = bool(dict(run.config).get("ignore_eos"))
        _show(run, metrics, shown, ignored)
    if config.plot_path:
        _plot(runs, config.plot_path)
    return EXIT_OK


def _check_outputs(config: BenchConfig) -> None:
    """What cannot be written is found out before the run, not after it."""
    folders: list[Path] = []
    if config.save_result:
        folders.append(((config.result_dir or Path()) / (config.result_filename or "x")).parent)
    plot: Path | None = config.plot_path
    if plot is not None:
        if plot.suffix not in (".png", ".svg", ".pdf", ".jpg", ".webp"):
            raise ConfigError(f"--plot {plot}: expected a .png, .svg or .pdf file")
        folders.append(plot.parent)
    for folder in folders:
        try:
            folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise ConfigError(f"cannot make the folder {folder}: {error.strerror}") from None
        if not os.access(folder, os.W_OK):
            raise ConfigError(f"cannot write into the folder {folder}")


def _config(config: BenchConfig, target: Target) -> dict[str, object]:
    """The flags as given, without the key."""
    kept = {
        name: value
        for name, value in dataclasses.asdict(config).items()
        if name not in ("api_key", "load_results") and value not in (None, ())
    }
    plain = {name: str(value) if isinstance(value, Path) else value for name, value in kept.items()}
    return plain | {"model": target.settings.model, "base_urls": target.servers}


def _allow_many_sockets(num_requests: int) -> None:
    """Raises the soft limit on open files: an overloaded run keeps thousands of streams open."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = num_requests + 256
    if soft != resource.RLIM_INFINITY and soft < wanted:
        limit = wanted if hard == resource.RLIM_INFINITY else min(hard, wanted)
        with contextlib.suppress(ValueError, OSError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, limit), hard))
