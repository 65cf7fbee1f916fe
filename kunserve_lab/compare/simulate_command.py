"""``kunserve simulate``: the flags, and nothing else. What they mean is in `simulate_flags`."""

from pathlib import Path
from typing import Any

import click

from kunserve.core.config import InstanceConfig, SchedulerConfig
from kunserve.core.errors import KunServeError
from kunserve.server.start.flags.declared import setting
from kunserve.server.start.flags.grouped import GroupedCommand
from kunserve_lab.bench.flag_groups import option
from kunserve_lab.compare.experiment import Experiment
from kunserve_lab.compare.settings import SimulatedSetup, WorkloadSettings

_REQUESTS, _EXPERIMENT = WorkloadSettings(), Experiment()
_SETUP = SimulatedSetup()
_cluster = option("Cluster", _SETUP)
_workload = option("Workload")
_compare = option("Comparison")
_output = option("Output")

_FILE = click.Path(dir_okay=False, path_type=Path)
_POSITIVE = click.FloatRange(min=0, min_open=True)

_EPILOG = """\b
Examples
  Would dropping help with my traffic, my model, my GPUs?
    kunserve simulate --model Qwen/Qwen2.5-14B --device a800 --num-instances 8 \\
      --trace arrivals.csv --lengths lengths.csv --compare recompute,static-pp,drop -o out

\b
  No file at hand: the built-in window with two spikes, at four loads:
    kunserve simulate --scale 0.7,0.8,0.9,1 --compare recompute,drop

\b
  Which bursts would it help? A map, in seconds, with my traffic on it:
    kunserve simulate --map --device a800 --trace arrivals.csv --lengths lengths.csv -o out

\b
  A figure of the paper:
    kunserve simulate --experiment experiments/end_to_end_longbench_14b.toml -o out
"""


# fmt: off
@click.command(
    "simulate",
    cls=GroupedCommand,
    epilog=_EPILOG,
    context_settings={"max_content_width": 100, "help_option_names": ["-h", "--help"]},
)
@_cluster("--model", help="A built-in model, dense or sparse (Mixtral, OLMoE, Qwen3-MoE, "
          "DeepSeek-V3); --list shows them.")
@_cluster("--device", help="a100, a800, h100, h800, h200 or b200.")
@_cluster("--profile", type=_FILE,
          help="A file of `kunserve profile`: CPU instances of its model, instead of GPUs.")
@_cluster("--instance-mib", type=click.IntRange(min=1), help="Memory of such an instance.")
@_cluster("--num-instances", type=click.IntRange(min=1), help="Replicas.")
@_cluster("--topology", type=_FILE,
          help="TOML or JSON file that says on which host each instance stands, and how fast the "
          "hosts' links are. Default: all on one.")
@_cluster("--gpus-per-instance", type=click.IntRange(min=1),
          help="Under tensor or expert parallelism. Default: as in the paper, by the model.")
@_cluster("--memory-utilization", type=click.FloatRange(0, 1, min_open=True),
          help="Share of the GPU memory for weights and KV.")
@_cluster("--block-size", **setting(InstanceConfig, "block_size", default=_SETUP.block_size))
@_cluster("--max-num-batched-tokens", **setting(
    SchedulerConfig, "max_num_batched_tokens", default=_SETUP.max_num_batched_tokens))
@_cluster("--max-num-seqs", **setting(
    SchedulerConfig, "max_num_seqs", default=_SETUP.max_num_seqs))
@_cluster("--host-gib", type=click.FloatRange(min=0),
          help="Host memory of each instance for swapped KV. Default: no limit.")
@_cluster("--kill", "kills", many=True, metavar="SEC:INSTANCE...",
          help="An instance dies at this moment; a new one starts in its place.")
@_workload("--trace", type=_FILE, help="Arrivals: azure, burstgpt (CSV), timed_trace (JSONL), "
           "or a name that `kunserve data` lists.")
@_workload("--trace-format", type=click.Choice(["azure", "burstgpt", "mooncake", "timed_trace"]),
           help="Default: told from the file's name.")
@_workload("--lengths", type=_FILE,
           help="CSV or data set whose lengths replace those of the trace. "
           "Default without a trace: longbench.")
@_workload("--max-total-tokens", type=click.IntRange(min=2),
           help="Cut inputs of --lengths so that input + output fits.")
@_workload("--trace-start", type=click.FloatRange(min=0), default=0.0, metavar="SEC")
@_workload("--trace-end", type=_POSITIVE, metavar="SEC")
@_workload("--request-rate", type=_POSITIVE,
           help="Of the built-in bursty window, where no trace is given. Default: the rate at "
           "which its spikes fill the memory.")
@_workload("--duration", type=_POSITIVE, default=_REQUESTS.duration_s, show_default=True,
           metavar="SEC", help="Of the built-in window.")
@_workload("--turns", type=click.IntRange(min=1),
           help="Conversations of so many turns instead of the built-in window, --request-rate "
           "turns per second.")
@_workload("--system-tokens", type=click.IntRange(min=0), default=_REQUESTS.system_tokens,
           show_default=True, help="Of the prompt that all conversations begin with.")
@_workload("--turn-tokens", type=click.IntRange(min=1), default=_REQUESTS.turn_tokens,
           show_default=True, help="What the user says in a turn.")
@_workload("--answer-tokens", type=click.IntRange(min=1), default=_REQUESTS.answer_tokens,
           show_default=True)
@_workload("--think-time", "think_s", type=click.FloatRange(min=0), default=_REQUESTS.think_s,
           show_default=True, metavar="SEC", help="Mean time from a turn to the next.")
@_workload("--scale", default="1", show_default=True, metavar="F[,F...]",
           help="Multiply the rate, keeping the pattern; several values make a curve.")
@_workload("--seed", type=click.IntRange(min=0), default=_EXPERIMENT.seeds[0],
           show_default=True, help="Of arrivals and lengths.")
@_compare("--compare", default=",".join(_EXPERIMENT.systems), show_default=True,
          metavar="NAME[,NAME...]", help="The systems; --list shows them.")
@_compare("--experiment", type=_FILE,
          help="A TOML file with all of the above (kunserve compare runs it too).")
@_compare("--map", is_flag=True,
          help="Simulate nothing: a table (-o: a picture) of the bursts that drops help.")
@_compare("--list", "show_list", is_flag=True, help="Show models, devices and systems.")
@_output("-o", "--output", type=click.Path(file_okay=False, path_type=Path),
         help="Folder for results.jsonl, table.txt, figures and report.html.")
@_output("--save-requests", is_flag=True, help="Also every request and sample, a JSONL per run.")
@_output("--chrome-trace", is_flag=True, help="Also every step, for chrome://tracing.")
@_output("--fresh", is_flag=True,
         help="Run again what the folder has already. If interrupted, go on without it.")
@_output("--jobs", type=click.IntRange(min=1),
         help="Runs at once, each in a process of its own. Default: one per core.")
@click.pass_context
def simulate_command(ctx: click.Context, /, **flags: Any) -> None:
    """Ask what would happen: real controller and policies over modelled GPUs, links and time.

    Seconds on a laptop for minutes on a cluster. Equal settings and seed give equal results.
    """
    from kunserve_lab.compare.simulate_flags import start

    try:
        given = {
            name
            for name in flags
            if ctx.get_parameter_source(name) is click.core.ParameterSource.COMMANDLINE
        }
        start(flags, given)
    except KunServeError as error:
        raise click.ClickException(str(error)) from None
