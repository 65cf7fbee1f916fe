"""The threads of masks: who is quick waits for nobody slow, and forms share the slow one fairly."""

import threading
import time
from collections.abc import Callable

import pytest

from kunserve.core.request import StructuredOutput
from kunserve.engine.sampling.structured import mask_threads
from kunserve.engine.sampling.structured.mask_threads import Job, MaskThreads

A, B, C = (StructuredOutput("regex", text) for text in "abc")
WAIT_S = 60.0


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Callable[[float], Callable[[], None]]:
    """What makes a job that takes so much processor time, by the threads' clock."""
    spent = threading.local()
    monkeypatch.setattr(time, "thread_time", lambda: getattr(spent, "s", 0.0))

    def taking(job_s: float) -> Callable[[], None]:
        def run() -> None:
            spent.s = getattr(spent, "s", 0.0) + job_s

        return run

    return taking


def done(job: Job) -> None:
    assert job.done.wait(WAIT_S)


def held(threads: MaskThreads, form: StructuredOutput) -> threading.Event:
    """Until it is set, the form's thread is at one of its jobs."""
    began, gate = threading.Event(), threading.Event()

    def run() -> None:
        began.set()
        gate.wait(WAIT_S)

    threads.submit(form, run)
    assert began.wait(WAIT_S)
    return gate


def test_a_quick_form_waits_for_no_slow_one(clock: Callable[[float], Callable[[], None]]) -> None:
    threads = MaskThreads()
    for _ in range(2):  # the first is not known to be quick
        done(threads.submit(A, clock(0.001)))
    gate = held(threads, B)
    done(threads.submit(A, clock(0.001)))
    done(threads.submit(A, clock(1.0)))
    behind = threads.submit(A, clock(0.001))
    assert not behind.done.wait(0.05), "it was slow the last time"
    gate.set()
    done(behind)
    threads.close()


def test_it_is_quick_again_when_its_cost_is_forgotten(
    clock: Callable[[float], Callable[[], None]],
) -> None:
    threads = MaskThreads()
    done(threads.submit(A, clock(0.1)))
    for _ in range(4):
        done(threads.submit(A, clock(0.0)))
    gate = held(threads, B)
    done(threads.submit(A, clock(0.0)))
    gate.set()
    threads.close()


def test_what_turns_out_slow_takes_the_rest_of_its_form_along(
    clock: Callable[[float], Callable[[], None]],
) -> None:
    """So that a quick form behind 128 outputs waits for one of them."""
    threads = MaskThreads()
    for form in (A, A, C, C):
        done(threads.submit(form, clock(0.001)))
    gate = held(threads, B)  # the slow thread
    quick_gate = held(threads, A)  # the quick one
    many = [threads.submit(A, clock(1.0)) for _ in range(5)]
    quick = threads.submit(C, clock(0.001))
    quick_gate.set()
    done(quick)
    assert many[0].done.is_set() and not any(job.done.is_set() for job in many[1:])
    gate.set()
    for job in many:
        done(job)
    threads.close()


def test_of_slow_forms_the_one_that_had_least_goes_first(
    clock: Callable[[float], Callable[[], None]],
) -> None:
    threads, order = MaskThreads(), []

    def noting(name: str, job_s: float) -> Callable[[], None]:
        run = clock(job_s)
        return lambda: (order.append(name), run())[1]

    done(threads.submit(A, clock(9.0)))
    done(threads.submit(B, clock(5.0)))
    gate = held(threads, C)
    jobs = [threads.submit(A, noting("a", 1.0)) for _ in range(2)]
    jobs += [threads.submit(B, noting("b", 1.0)) for _ in range(2)]
    gate.set()
    for job in jobs:
        done(job)
    assert order == ["b", "b", "a", "a"]
    threads.close()


def test_a_stuck_thread_is_left_to_its_form() -> None:
    threads = MaskThreads()
    gate = held(threads, A)
    same, other = threads.submit(A, lambda: None), threads.submit(B, lambda: None)
    assert threads.give_up(60.0) == [] and not other.done.is_set()
    assert threads.give_up(0.0) == [A]
    done(other)
    assert same.is_void
    done(threads.submit(A, lambda: None))
    gate.set()
    threads.close()


def test_what_is_known_of_forms_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mask_threads, "_MOST_COSTS", 2)
    threads = MaskThreads()
    for form in (A, B, C, A):
        done(threads.submit(form, lambda: None))
    assert len(threads._costs) == 2
    threads.close()
