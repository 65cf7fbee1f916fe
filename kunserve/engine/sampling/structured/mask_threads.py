"""The threads in which masks are computed: one for what is quick, one for what may not be.

A mask takes a millisecond or less as a rule, but a form may make it take a fifth of a second, or
its compiling half of one, and may be asked for by 128 outputs. So what was slow the last time goes
to a thread of its own, and there the form that has had least time goes first.
"""

import threading
import time
from collections import OrderedDict
from collections.abc import Callable
from heapq import heappop, heappush
from itertools import count

from kunserve.core.request import StructuredOutput

QUICK_S = 0.02
"""What was slower the last time is not for the thread of the quick."""
_FORGIVES = 0.5
"""Of a form's cost this much is remembered beside its next one."""
_MOST_COSTS = 1024
"""Forms of which it is remembered."""


def _nothing() -> None:
    """Is done."""


class _Cost:
    """What a form has cost so far."""

    def __init__(self) -> None:
        self.each_s = float("inf")
        """One job of it, by those before: not known before the first."""
        self.total_s = 0.0
        self.num_slow = 0
        """Its jobs in the slow thread. As long as there are any, all go there: outputs of a form
        share a lexer, and who waits for that is as slow as who has it."""

    def took(self, job_s: float) -> None:
        """A job has ended."""
        known_s = 0.0 if self.each_s == float("inf") else self.each_s
        self.each_s = max(job_s, _FORGIVES * known_s)
        self.total_s += job_s


class Job:
    """What a thread was asked to do for one output."""

    def __init__(self, form: StructuredOutput, cost: _Cost, run: Callable[[], None]) -> None:
        self.form = form
        self.cost = cost
        self.run = run
        self.asked_s = time.monotonic()
        self.done = threading.Event()
        self.is_void = False
        """It is not run any more: its output has ended, or its form has a thread stuck."""

    @property
    def age_s(self) -> float:
        """Since it was asked for."""
        return time.monotonic() - self.asked_s


class _Thread:
    """Runs jobs, of those that wait the one with the lowest rank first."""

    def __init__(self, name: str, run: Callable[["_Thread", Job], None]) -> None:
        self._run = run
        self._changed = threading.Condition()
        self._waiting: list[tuple[float, int, Job]] = []
        self._numbers = count()
        self._is_closed = False
        self.running: Job | None = None
        self.since_s = 0.0
        """When the running one began."""
        self._thread = threading.Thread(target=self._work, name=name, daemon=True)
        self._thread.start()

    def add(self, rank: float, job: Job) -> None:
        with self._changed:
            heappush(self._waiting, (rank, next(self._numbers), job))
            self._changed.notify()

    def close(self) -> list[Job]:
        """End behind the job under way; the jobs that will not be run."""
        with self._changed:
            left, self._waiting, self._is_closed = self._waiting, [], True
            self._changed.notify()
        return [job for _, _, job in sorted(left)]

    def _work(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._waiting or self._is_closed)
                if not self._waiting:
                    return
                job = heappop(self._waiting)[2]
                self.running, self.since_s = job, time.monotonic()
            self._run(self, job)
            self.running = None


class MaskThreads:
    """Owner of both threads, and of what each form has cost. Threads start at the first job."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._costs: OrderedDict[int, _Cost] = OrderedDict()
        """By the forms' hashes, because forms are long. Least recently asked for first."""
        self._threads: dict[bool, _Thread] = {}
        """By whether it is the slow one."""

    def submit(self, form: StructuredOutput, run: Callable[[], None]) -> Job:
        """Have it done. ``run`` raises nothing."""
        with self._lock:
            job = Job(form, self._cost_of(form), run)
            self._add(job, is_slow=job.cost.each_s > QUICK_S or job.cost.num_slow > 0)
        return job

    def give_up(self, stuck_s: float) -> list[StructuredOutput]:
        """Leave threads to jobs that they have been at for so long. Their forms: what waits for
        these ends, because it would be stuck as well; what waits for others goes on elsewhere.
        """
        stuck: list[StructuredOutput] = []
        with self._lock:
            for is_slow, thread in list(self._threads.items()):
                job, since_s = thread.running, thread.since_s
                if job is None or time.monotonic() - since_s < stuck_s:
                    continue
                stuck.append(job.form)
                del self._threads[is_slow]
                self._costs.pop(hash(job.form), None)
                for other in thread.close():
                    if other.form == job.form:
                        other.is_void = True
                        continue
                    other.cost.num_slow -= is_slow
                    self._add(other, is_slow=is_slow)
        return stuck

    def close(self) -> None:
        """Let the threads go. What waits is not done."""
        with self._lock:
            for thread in self._threads.values():
                for job in thread.close():
                    job.is_void = True
            self._threads.clear()

    def _add(self, job: Job, *, is_slow: bool) -> None:
        thread = self._threads.get(is_slow)
        if thread is None:
            name = "slow forms" if is_slow else "forms"
            thread = self._threads[is_slow] = _Thread(name, self._run)
        job.cost.num_slow += is_slow
        thread.add(job.cost.total_s if is_slow else 0.0, job)

    def _cost_of(self, form: StructuredOutput) -> _Cost:
        name = hash(form)
        cost = self._costs.pop(name, None) or _Cost()
        self._costs[name] = cost
        if len(self._costs) > _MOST_COSTS:
            self._costs.popitem(last=False)
        return cost

    def _run(self, thread: _Thread, job: Job) -> None:
        cost = job.cost
        with self._lock:
            is_slow = self._threads.get(True) is thread
            if not is_slow and cost.each_s > QUICK_S and not job.is_void:
                self._add(job, is_slow=True)  # one before it has turned out to be slow
                return
        began_s, is_wanted = time.thread_time(), not job.is_void
        if is_wanted:
            job.run()
        job.run = _nothing  # its output may be forgotten before the job is
        took_s = time.thread_time() - began_s
        with self._lock:
            cost.num_slow -= is_slow
            if is_wanted:
                cost.took(took_s)
        job.done.set()
