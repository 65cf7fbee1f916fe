"""The simulated world: runs of an experiment, several at once, as results."""

import os
from collections.abc import Iterator, Sequence

from kunserve_lab.compare.experiment import World
from kunserve_lab.compare.results import Outcome, result_of
from kunserve_lab.compare.simulated.jobs import Job, run_jobs
from kunserve_lab.compare.simulated.simulation import SimResult


def run_simulated(jobs: Sequence[Job], limit: int | None) -> Iterator[Outcome]:
    """Each job's outcome as soon as it is there, ``limit`` jobs at once (None: one per core)."""
    cores = len(os.sched_getaffinity(0)) if limit is None else limit
    for job, done in run_jobs(jobs, max(1, min(len(jobs), cores))):
        yield _outcome(job, done)


def _outcome(job: Job, done: SimResult) -> Outcome:
    result = result_of(
        World.SIMULATED,
        job.place,
        job.digest,
        done.run,
        done.metrics,
        num_preemptions=done.num_preemptions,
        num_drops=done.num_drops,
        num_restores=done.num_restores,
        num_migrations=done.num_migrations,
        prefix_hit_rate=round(done.prefix_hit_rate, 4) or None,
        num_ordered=done.num_ordered,
        num_given_back=done.num_given_back,
        lost_tokens=done.lost_tokens,
        bubble_ratio=None if done.bubble_ratio is None else round(done.bubble_ratio, 4),
        gpu_hours=round(done.gpu_hours, 4),
        moved_gb=round(done.bulk_bytes / 1e9, 3),
        swapped_out_gb=round(done.swapped_out_bytes / 1e9, 3),
        swapped_back_gb=round(done.swapped_back_bytes / 1e9, 3),
        environment=dict(done.run.environment),
    )
    return Outcome(result, done.run)
