"""``kunserve observe``: the flags, and nothing else."""

import asyncio
from pathlib import Path
from typing import Any

import click

from kunserve.core.errors import KunServeError
from kunserve.server.start.flags.grouped import GroupedCommand
from kunserve_lab.bench.flag_groups import option
from kunserve_lab.observer.settings import Made, settings_of

_MADE = Made()
_fleet, _source = option("Fleet", _MADE), option("Source")
_output = option("Output")
_FILE = click.Path(dir_okay=False, path_type=Path)
_POSITIVE = click.FloatRange(min=0, min_open=True)

_EPILOG = """\b
Examples
  Would drops have helped my vLLM fleet? Watch it; nothing is installed or sent there:
    kunserve observe --urls http://a:8000,http://b:8000 --device h100 --report today.html

\b
  Yesterday, from the Prometheus server that scrapes it:
    kunserve observe --prometheus http://prometheus:9090 --since 24h \\
      --selector 'job="vllm"' --device h100 --report yesterday.html

\b
  Keep what was seen, and judge it again later, say on other hardware:
    kunserve observe --urls http://a:8000,http://b:8000 --record fleet.jsonl
    kunserve observe --from fleet.jsonl --device h200 --report h200.html

\b
What it says after a burst
  "memory was short on 3 of 4 replicas, compute was not; a drop would have lowered P99 TTFT from
  about 18 to 5 s, and raised P50 TPOT by 20%", or "compute was short: more replicas, not drops".
  Each figure is simulated from the burst's own arrivals and lengths, as the servers counted them;
  what the servers measured stands beside it, and tells how far to trust the rest.
"""


# fmt: off
@click.command(
    "observe",
    cls=GroupedCommand,
    epilog=_EPILOG,
    context_settings={"max_content_width": 100, "help_option_names": ["-h", "--help"]},
)
@_source("--urls", default="", metavar="URL[,URL...]",
         help="The servers: vLLM, SGLang (with --enable-metrics) or KunServe. Each replica's own "
         "address, not that of a gateway.")
@_source("--from", "file", type=_FILE, help="Instead: a file of --record.")
@_source("--prometheus", metavar="URL", help="Instead: a Prometheus server that scrapes them.")
@_source("--since", default="24h", show_default=True, metavar="SPAN",
         help="With --prometheus: from so long ago until now.")
@_source("--step", "step_s", type=_POSITIVE, default=15.0, show_default=True, metavar="SEC",
         help="With --prometheus: between two points. The scrape interval is best; bursts shorter "
         "than it are not seen.")
@_source("--selector", default="", help="With --prometheus: matchers such as job=\"vllm\".")
@_source("--period", "period_s", type=click.FloatRange(min=0.1), default=1.0, show_default=True,
         metavar="SEC", help="With --urls: between two looks at a server.")
@_source("--duration", "duration_s", type=_POSITIVE, metavar="SEC",
         help="With --urls: stop after so long. Default: at Ctrl-C.")
@_source("--api-key", envvar="KUNSERVE_API_KEY",
         help="The servers' key [KUNSERVE_API_KEY, or none].")
@_fleet("--model", help="A name that `kunserve simulate --list` shows, a folder or a .gguf file. "
        "Default: as the servers call it.")
@_fleet("--device", help="a100, a800, h100, h800, h200 or b200.")
@_fleet("--gpus-per-instance", type=click.IntRange(min=1),
        help="Of a replica, under tensor parallelism. Default: by the model.")
@_fleet("--profile", type=_FILE,
        help="A file of `kunserve profile`: replicas on CPUs, instead of GPUs.")
@_fleet("--max-num-seqs", type=click.IntRange(min=1), help="As the servers were started.")
@_fleet("--max-num-batched-tokens", type=click.IntRange(min=1), help="The same.")
@_output("--json", "as_json", is_flag=True, help="A JSON object a line: views and episodes.")
@_output("--port", type=click.IntRange(0, 65535),
         help="Serve /metrics of the observer's own, /state and a live page at / here.")
@_output("--host", default="127.0.0.1", show_default=True, help="For --port.")
@_output("--record", type=_FILE, help="Append every reading to this file.")
@_output("--report", type=_FILE, help="Write an HTML page with plots at the end.")
def observe_command(**flags: Any) -> None:
    """Watch servers of other makers, and say what drops would have done for them.

    It reads their /metrics once a second, and changes nothing. KV memory, demand and a forecast are
    shown live; after each burst it says whether memory or compute was short, and what drops,
    least-load dispatch, fp8 KV and waking a sleeping replica would each have made of it.
    """
    from kunserve_lab.observer.run import Observer

    try:
        settings = settings_of(flags)
        observer = Observer(settings)
        if settings.urls:
            asyncio.run(observer.watch())
        else:
            observer.replay()
    except KunServeError as error:
        raise click.ClickException(str(error)) from None
