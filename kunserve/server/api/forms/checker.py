"""Whether forms can be had: asked once each, in a process of its own, remembered for a while."""

import asyncio
from collections import OrderedDict
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

from kunserve.core.errors import MAX_WAITING_FORMS, InvalidRequest, Overloaded
from kunserve.core.request import StructuredOutput
from kunserve.server.api.forms.child import Order
from kunserve.server.api.forms.metrics import FormMetrics
from kunserve.server.api.forms.process import FormProcess

MAX_KNOWN = 1024
MAX_KNOWN_CHARS = 8 << 20
MAX_WAITING = 64
"""Forms that wait to be tried, or are tried; more are answered 503."""
MAX_WAIT_S = 20.0


class FormChecker:
    """One per front. Its process starts when the first form comes."""

    def __init__(self, order: Callable[[], Order], metrics: FormMetrics) -> None:
        self._process = FormProcess(order)
        self._metrics = metrics
        self._thread: ThreadPoolExecutor | None = None
        self._known: OrderedDict[StructuredOutput, str | None] = OrderedDict()
        """Why each is refused, if it is; least recently asked first."""
        self._known_chars = 0
        self._waiting: dict[StructuredOutput, asyncio.Task[str | None]] = {}

    async def check(self, form: StructuredOutput, param: str) -> None:
        """Raise InvalidRequest for a form that cannot be had, Overloaded if that is not known."""
        self._metrics.asked(form)
        if form in self._known:
            self._known.move_to_end(form)
            error = self._known[form]
        else:
            error = await self._ask(form)
        if error is not None:
            raise InvalidRequest(f"`{param}` cannot be compiled: {error}", param)

    def close(self) -> None:
        """End the process; called when no request is left."""
        self._process.kill()
        if self._thread is not None:
            self._thread.shutdown(wait=True, cancel_futures=True)
        self._process.close()

    async def _ask(self, form: StructuredOutput) -> str | None:
        task = self._waiting.get(form)
        if task is None:
            if len(self._waiting) >= MAX_WAITING:
                raise _overloaded("Too many structured outputs are waiting to be compiled.")
            task = asyncio.create_task(self._try(form))
            self._waiting[form] = task
            # Everybody who waited may have left.
            task.add_done_callback(lambda done: done.cancelled() or done.exception())
        # A client that leaves takes its answer from nobody else.
        try:
            return await asyncio.wait_for(asyncio.shield(task), MAX_WAIT_S)
        except TimeoutError:
            raise _overloaded("Structured outputs wait too long to be compiled.") from None

    async def _try(self, form: StructuredOutput) -> str | None:
        try:
            if self._thread is None:
                self._thread = ThreadPoolExecutor(1, thread_name_prefix="forms")
            future = self._thread.submit(self._process.try_form, form)
            verdict = await asyncio.wrap_future(future)
            self._metrics.tried(form, verdict)
            self._remember(form, verdict.error)
            return verdict.error
        finally:
            del self._waiting[form]

    def _remember(self, form: StructuredOutput, error: str | None) -> None:
        self._known[form] = error
        self._known_chars += len(form.text)
        while len(self._known) > MAX_KNOWN or self._known_chars > MAX_KNOWN_CHARS:
            oldest, _ = self._known.popitem(last=False)
            self._known_chars -= len(oldest.text)


def _overloaded(message: str) -> Overloaded:
    return Overloaded(message, limit=MAX_WAITING_FORMS)
