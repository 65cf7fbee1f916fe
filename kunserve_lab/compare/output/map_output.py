"""``kunserve simulate --map``: the map of a cluster and lengths, instead of a simulation."""

from pathlib import Path

from kunserve.core.errors import ConfigError
from kunserve_lab.compare.experiment import Experiment, check_experiment
from kunserve_lab.compare.output.map_figure import Panel, plot_maps
from kunserve_lab.compare.output.table import as_text
from kunserve_lab.compare.settings import RealSetup, workload_of
from kunserve_lab.compare.simulated.burst_map import (
    FINE_HEIGHTS,
    FINE_LENGTHS_S,
    LEGEND,
    USUAL_BASE,
    Mark,
    make_map,
    map_rows,
)
from kunserve_lab.compare.simulated.full_rate import with_full_rate
from kunserve_lab.compare.simulated.projection import (
    capacity,
    capacity_lines,
    outlook,
    outlook_lines,
    trust,
)
from kunserve_lab.compare.simulated.scenario import build_scenario
from kunserve_lab.sim.steady import RequestMix

FIGURE_NOTE = "colours: fluid model, with even arrivals and no restores"


def show_map(experiment: Experiment, with_traffic: bool, output: Path | None) -> None:
    """Print the table of the map, and draw it into ``output``. Without traffic nothing is marked.

    The mix of lengths is that of the experiment's requests at its first load.
    """
    check_experiment(experiment)
    setup, seed = experiment.setup, experiment.seeds[0]
    if isinstance(setup, RealSetup):
        raise ConfigError("a map is of the simulated world")
    loads = experiment.loads if with_traffic else experiment.loads[:1]
    workload = with_full_rate(setup, experiment.workload)
    scenarios = {load: build_scenario(setup, workload_of(workload, load, seed)) for load in loads}
    first = scenarios[loads[0]]
    able = capacity(first)
    seen = {load: outlook(one, able) for load, one in scenarios.items()} if with_traffic else {}
    found = {load: one for load, one in seen.items() if one is not None}
    base = next((one.base for one in found.values()), USUAL_BASE)
    cluster = f"{first.profile.model.name}, {first.num_instances} instances"
    text = [f"{cluster}, {_mean(able.mix)}"]
    if found:
        text += outlook_lines(scenarios)
    else:
        text += [*capacity_lines(first.profile, able, first.num_instances, base), trust()]
    table = as_text(map_rows(make_map(able, base)))
    text += ["", f"Bursts after {base:.2f} X. {LEGEND}", table]
    print("\n".join(text))
    if output is None:
        return
    try:
        output.mkdir(parents=True, exist_ok=True)
        (output / "map.txt").write_text("\n".join(text) + "\n")
    except OSError as error:
        raise ConfigError(f"cannot write to {output}: {error.strerror}") from None
    marks = tuple(
        Mark(f"load {load:g}" if len(found) > 1 else "this traffic", one.height, one.burst.length_s)
        for load, one in found.items()
    )
    fine = make_map(able, base, FINE_HEIGHTS, FINE_LENGTHS_S)
    plot_maps(
        [[Panel(f"{cluster}\n{_mean(able.mix)}", fine, marks)]], output / "map.png", FIGURE_NOTE
    )
    print(f"\nwritten to {output}")


def _mean(mix: RequestMix) -> str:
    return f"{mix.mean_input_tokens:.0f} tokens in and {mix.mean_output_tokens:.0f} out on average"
