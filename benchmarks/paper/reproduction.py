"""Runs every experiment of the simulated world, and writes the tables of the documents.

    python -m benchmarks.paper.reproduction [NAME ...] [--jobs N]      (or: make experiments)
    python -m benchmarks.paper.reproduction NAME ... --missing
    python -m benchmarks.paper.reproduction --tables

A run that results/NAME has already, of the same settings and requests, is not run again: a broken
off call goes on where it stopped. When an experiment is complete, what the document needs of it
goes to benchmarks/results/simulated/NAME.jsonl, and the tables between the markers of
docs/reproduction.md and of the other ``DOCUMENTS`` are written anew from there.
``--missing`` runs only the systems that the committed results lack, and adds them: the others
stay as they are, of the code that made them. ``--tables`` writes tables only. A run takes from 20
seconds to 6 minutes of one core, and there are nearly a thousand.
"""

import argparse
import json
import re
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import msgspec

from benchmarks.markdown import markdown
from benchmarks.paper.kept_results import RESULTS, SLO_KEY, figures_of, runs_of
from benchmarks.paper.tables import TABLES
from kunserve.core.errors import ConfigError
from kunserve_lab.compare.comparison import Options, compare
from kunserve_lab.compare.experiment import Experiment, World
from kunserve_lab.compare.experiment_file import read_experiment
from kunserve_lab.compare.groups import by_load
from kunserve_lab.compare.results import RunResult, load
from kunserve_lab.compare.slo import FACTORS, one_base, violations

ROOT = Path(__file__).parents[2]
DOCUMENTS = (
    ROOT / "README.md",
    *(
        ROOT / "docs" / f"{name}.md"
        for name in (
            *("reproduction", "results", "when-it-helps", "sparse-models", "vllm-fleets", "gpu"),
            *("decisions/drop-worth", "decisions/simulator"),
        )
    ),
)
LEFT_OUT = ("ttft_ms", "tpot_ms")
"""Of a run's fields, what no table needs: every request's latency is most of a file."""
_MARKED = re.compile(r"(<!-- table: ([\w-]+) -->\n).*?(<!-- end -->)", re.DOTALL)


def experiments() -> dict[str, Path]:
    """Every experiment of the simulated world, by name."""
    files = sorted((ROOT / "experiments").glob("*.toml"))
    simulated = (path for path in files if read_experiment(path).world is World.SIMULATED)
    return {path.stem: path for path in simulated}


def kept(results: Sequence[RunResult], beside: Sequence[RunResult] = ()) -> bytes:
    """The lines that are committed: a run's fields without its requests, and its late shares.

    ``beside`` are runs that were committed before, for the objectives.
    """
    lines = []
    places = {run.place for run in results}
    for group in by_load([*beside, *results]):
        base = one_base(group)
        for run in (run for run in group.runs if run.place in places):
            late = [violations(run, base, factor) for factor in FACTORS]
            values = {
                name: value
                for name, value in msgspec.to_builtins(run).items()
                if value not in (None, (), [], {}) and name not in LEFT_OUT
            }
            if run.ttft_ms:
                values[SLO_KEY] = [round(share[0], 4) for share in late if share is not None]
            lines.append(json.dumps(values, separators=(",", ":")))
    return "".join(f"{line}\n" for line in lines).encode()


def write_tables(text: str) -> str:
    """The document with every table between its markers made anew."""

    def made(found: re.Match[str]) -> str:
        table = TABLES[found[2]]
        of_code = f"\n\n{table.made_by}" if table.of else ""
        return f"{found[1]}{markdown(table.rows())}{of_code}\n{found[3]}"

    return _MARKED.sub(made, text)


def update_documents() -> None:
    """Write the tables of the documents from the results as they are now."""
    runs_of.cache_clear()
    figures_of.cache_clear()
    for document in DOCUMENTS:
        document.write_text(write_tables(document.read_text()))


def run(name: str, path: Path, num_jobs: int | None, *, only_missing: bool = False) -> None:
    """One experiment, and its part of the document."""
    experiment = read_experiment(path)
    file = RESULTS / "simulated" / f"{name}.jsonl"
    before: list[RunResult] = []
    if only_missing:
        wanted, before = missing(experiment, file)
        if not wanted:
            return
        experiment = replace(experiment, systems=wanted)
    results = compare(experiment, ROOT / "results" / name, Options(num_jobs=num_jobs))
    lines = kept(results, before)
    file.write_bytes((file.read_bytes() if only_missing else b"") + lines)
    update_documents()


def missing(experiment: Experiment, file: Path) -> tuple[tuple[str, ...], list[RunResult]]:
    """The experiment's systems that a committed file has no run of, and the runs that it has.

    Raises ConfigError where percentiles of old and new runs would not be over equal requests.
    """
    before = load(file)
    if any(run.num_failed > (run.num_shed or 0) for run in before):
        raise ConfigError(f"{file.name}: some requests failed, so all systems must run again")
    known = {run.system for run in before}
    return tuple(name for name in experiment.systems if name not in known), before


def main() -> None:
    """The experiments that are named, or all."""
    found = experiments()
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"of {', '.join(found)}")
    parser.add_argument("--jobs", type=int, help="simulations at once; one per core by default")
    parser.add_argument("--missing", action="store_true", help="only systems without results")
    parser.add_argument("--tables", action="store_true", help="run nothing, write the tables")
    options = parser.parse_args()
    unknown = sorted(set(options.names) - set(found))
    if unknown:
        parser.error(f"no experiment {unknown[0]!r}; there are: {', '.join(found)}")
    names = [] if options.tables else options.names or list(found)
    for number, name in enumerate(names, start=1):
        print(f"\n[{number}/{len(names)}] {name}", file=sys.stderr, flush=True)
        run(name, found[name], options.jobs, only_missing=options.missing)
    update_documents()
    names = ", ".join(str(document.relative_to(ROOT)) for document in DOCUMENTS)
    print(f"tables written to {names}", file=sys.stderr)


if __name__ == "__main__":
    main()
