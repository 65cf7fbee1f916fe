"""What studies of an idea share: variants of a system, the points they run at, and a table."""

import argparse
import statistics
from collections.abc import Iterator, Mapping, Sequence

from benchmarks.markdown import Row, markdown
from benchmarks.paper.points import KeptRun, Point, RunFigures, RunKey, kept, run_missing

SHOWN = ("P50 TTFT", "P99 TTFT", "P50 TPOT", "P99 TPOT", "output")


def run_study(
    name: str,
    text: str,
    points: Sequence[Point],
    variants: Sequence[str],
    seeds: Sequence[int],
    run: RunFigures,
) -> None:
    """The command of a study: run what its kept results lack, or print their table.

    The first of the variants is what all others are held against, unless ``--base`` names one.
    """
    parser = argparse.ArgumentParser(description=text.splitlines()[0])
    parser.add_argument("--table", action="store_true", help="print the table of what is kept")
    parser.add_argument("--again", action="store_true", help="also run what other code has run")
    parser.add_argument("--base", default=variants[0], help="what a table holds others against")
    parser.add_argument("--points", nargs="+", default=[one.name for one in points])
    parser.add_argument("--variants", nargs="+", default=list(variants))
    parser.add_argument("--seeds", nargs="+", type=int, default=list(seeds))
    options = parser.parse_args()
    known = kept(name)
    if options.table:
        ordered = [options.base, *(one for one in variants if one != options.base)]
        print(markdown(list(table(known, points, ordered))))
        return
    wanted = (
        (point, seed, variant)
        for point in points
        if point.name in options.points
        for seed in options.seeds
        for variant in options.variants
    )
    run_missing(name, wanted, known, again=options.again, run=run)


def table(
    known: Mapping[RunKey, KeptRun], points: Sequence[Point], variants: Sequence[str]
) -> Iterator[Row]:
    """Medians of the draws, and of the ratios to the first variant of the same draw."""
    base, *_ = variants
    yield ("point", "variant", "draws", *SHOWN, *(f"{name}, ratio" for name in SHOWN))
    for point in points:
        for variant in variants:
            draws = sorted(
                key.seed
                for key in known
                if (key.point, key.system) == (point.name, variant)
                and RunKey(point.name, key.seed, base) in known
            )
            if not draws:
                continue
            cells = [point.name, variant, str(len(draws))]
            found = [known[RunKey(point.name, seed, variant)].figures for seed in draws]
            against = [known[RunKey(point.name, seed, base)].figures for seed in draws]
            cells += [f"{statistics.median(one[name] for one in found):.3g}" for name in SHOWN]
            for name in SHOWN:
                pairs = zip(found, against, strict=True)
                ratios = [one[name] / other[name] for one, other in pairs]
                cells.append(
                    f"{statistics.median(ratios):.2f} ({min(ratios):.2f}-{max(ratios):.2f})"
                )
            yield cells
