"""A progress line while a run goes on."""

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskID, TextColumn, TimeElapsedColumn

from kunserve_lab.bench.records import RequestRecord


class ProgressLine:
    """Shows sent, running, finished and failed requests. On a pipe it shows nothing."""

    def __init__(self, num_requests: int) -> None:
        self._sent = 0
        self._finished = 0
        self._failed = 0
        self._progress = Progress(
            TextColumn("[bold]{task.completed}/{task.total}"),
            BarColumn(bar_width=None),
            TextColumn("sent {task.fields[sent]}  running {task.fields[running]}"),
            TextColumn("failed {task.fields[failed]}", style="red"),
            TimeElapsedColumn(),
            console=Console(stderr=True),
            refresh_per_second=4,
            transient=True,
        )
        self._task: TaskID = self._progress.add_task(
            "requests", total=num_requests, sent=0, running=0, failed=0
        )

    def __enter__(self) -> "ProgressLine":
        self._progress.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._progress.stop()

    def sent(self) -> None:
        """A request went out."""
        self._sent += 1
        self._show()

    def ended(self, record: RequestRecord) -> None:
        """A request completed or failed."""
        self._finished += 1
        self._failed += not record.succeeded
        self._show()

    def _show(self) -> None:
        self._progress.update(
            self._task,
            completed=self._finished,
            sent=self._sent,
            running=self._sent - self._finished,
            failed=self._failed,
        )
