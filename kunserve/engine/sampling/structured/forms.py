"""Which tokens the form of each request allows next, computed in a thread beside the steps.

The library lets go of the interpreter while it works, and so do the kernels of a step. So a mask
is there, as a rule, before the logits are.
"""

import contextlib
import functools
import time
from array import array
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import CancelledError, Future, ThreadPoolExecutor
from dataclasses import replace
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
from llguidance import LLMatcher, LLTokenizer

from kunserve.core.request import ReasoningMarks, StructuredOutput
from kunserve.core.tokens import TYPE_CODE
from kunserve.engine.sampling.structured.grammar import FormError, check, compile_form

MAX_COMPILED = 16
"""Forms that are kept compiled when no request has them."""
MAX_WAIT_S = 10.0
"""A mask that takes longer ends its request. The library's own limits let none take a second."""
MOST_STEP_S = 2.0
"""Processor time of all outputs of one form in one step. Each may be within the library's limits,
but a call may ask for 128, and all who have a form wait for each of them."""

_HELD_UP = "another form has held up this one"

_BITS = np.unpackbits(np.arange(256, dtype=np.uint8)[:, None], axis=1, bitorder="little")
_MASK_OF_BYTE = np.where(_BITS, np.float32(0.0), np.float32(-np.inf))
"""[256, 8] what a byte of the library's mask means for its eight tokens. Adding to a row of logits
is twenty times as fast as choosing in it."""


class Job(NamedTuple):
    """What a thread was asked to do."""

    future: Future[None]
    thread: ThreadPoolExecutor


class _Reasoning:
    """Whether a request thinks before its form begins: then every token may come."""

    def __init__(self, marks: ReasoningMarks | None) -> None:
        self._marks = marks
        self.is_open = marks is not None and marks.is_open
        self.may_open: int | None = None
        """A token that may come although the form does not have it."""
        if marks is not None and not marks.is_open:
            self.may_open = marks.opens

    def takes(self, token_id: int) -> bool:
        """Whether the next token is of the reasoning; else it is of the form."""
        if self.is_open:
            assert self._marks is not None
            self.is_open = token_id != self._marks.closes
            return True
        self.is_open, self.may_open = token_id == self.may_open, None
        return self.is_open


class Form:
    """One request's place in its form.

    Between ``append`` and the next ``mask`` it is computed elsewhere.
    """

    def __init__(
        self, forms: "Forms", structured: StructuredOutput, token_ids: Sequence[int]
    ) -> None:
        """``token_ids`` have been produced so far."""
        self._forms = forms
        self._structured = replace(structured, after=None)
        self._reasoning = _Reasoning(structured.after)
        self._matcher: LLMatcher | None = None
        self._shared: LLMatcher | None = None
        """The kept one whose lexer it uses, as others do. None: it has one of its own."""
        self._taken = array(TYPE_CODE)
        """The form's tokens while it shares a lexer: another one begins with them."""
        self._words = np.zeros(0, dtype=np.uint32)
        self._mask = np.zeros(0, dtype=np.float32)
        self._error: FormError | None = None
        self.job = forms.submit(functools.partial(self._begin, list(token_ids)))
        """What the next mask comes from."""
        self.is_complete = False
        """Whether nothing may follow but the end. Known once ``mask`` has been called."""

    def mask(self) -> npt.NDArray[np.float32]:
        """[vocab] to be added to logits: 0 for what may come next, else minus infinity.

        Raises FormError.
        """
        self._forms.tell()
        self._forms.wait_for(self.job)
        if self._error is not None:
            raise self._error
        return self._mask

    def append(self, token_id: int) -> None:
        """The token that was chosen. The next mask is on its way from ``Forms.tell`` on."""
        self._forms.chosen.append((self, token_id))

    def _begin(self, token_ids: list[int]) -> None:
        with self._keeping_errors(), self._forms.charging(self._structured):
            self._shared = self._forms.find(self._structured)
            self._matcher = self._shared.deep_copy()
            self._go_on(token_ids)

    def advance(self, token_id: int) -> None:
        """In the thread: take the token."""
        with self._keeping_errors(), self._forms.charging(self._structured):
            self._go_on([token_id])

    def _go_on(self, token_ids: Sequence[int]) -> None:
        """In the thread: take the tokens, and see what may come next."""
        of_form = [token_id for token_id in token_ids if not self._reasoning.takes(token_id)]
        if self._shared is None:
            self._take(of_form)
            return
        self._taken.extend(of_form)
        try:
            with _as_form_error():
                self._take(of_form)
        except FormError:
            self._part()

    def _part(self) -> None:
        """Go on with a lexer of its own.

        A lexer's limits count what all who share it have found, so they may be spent although
        this output is within them. What fails now is this form's own.
        """
        assert self._shared is not None
        self._forms.drop(self._structured, self._shared)
        taken, self._taken, self._shared = self._taken, array(TYPE_CODE), None
        self._matcher = compile_form(self._forms.vocabulary, self._structured)
        self._take(taken)

    def _take(self, token_ids: Sequence[int]) -> None:
        assert self._matcher is not None, "its beginning has failed"
        for token_id in token_ids:
            self._matcher.consume_token(token_id)
            check(self._matcher)
        self._look()

    @contextlib.contextmanager
    def _keeping_errors(self) -> Iterator[None]:
        """What fails is this form's and nobody else's."""
        try:
            with _as_form_error():
                yield
        except FormError as error:
            self._error = error

    def _look(self) -> None:
        """In the thread: see what may come next."""
        matcher, num_tokens = self._matcher, self._forms.vocabulary.vocab_size
        assert matcher is not None
        if self._reasoning.is_open:
            self._mask = self._forms.no_mask
            return
        self.is_complete = matcher.is_stopped()
        if len(self._words) == 0:
            self._words = np.zeros(-(-num_tokens // 32), dtype=np.uint32)
        matcher.unsafe_compute_mask_ptr(self._words.ctypes.data, self._words.nbytes)
        check(matcher)
        if not self._words.any():
            raise FormError("the form allows no token, and no end")
        self._mask = _MASK_OF_BYTE[self._words.view(np.uint8)].reshape(-1)[:num_tokens]
        if self._reasoning.may_open is not None:
            self._mask[self._reasoning.may_open] = 0.0


@contextlib.contextmanager
def _as_form_error() -> Iterator[None]:
    """Whatever fails is the form's, also a panic of the library, which is no ``Exception``."""
    try:
        yield
    except FormError:
        raise
    except BaseException as error:
        raise FormError(f"{type(error).__name__}: {error}") from error


class Forms:
    """One instance's: the vocabulary, forms that are compiled, and the thread."""

    def __init__(self, open_vocabulary: Callable[[], LLTokenizer]) -> None:
        """``open_vocabulary`` is called in the thread when the first form is started."""
        self._open_vocabulary = open_vocabulary
        self._vocabulary: LLTokenizer | None = None
        self._thread: ThreadPoolExecutor | None = None
        self.chosen: list[tuple[Form, int]] = []
        """Tokens that the thread is yet to be told of."""
        self._compiled: OrderedDict[StructuredOutput, LLMatcher] = OrderedDict()
        """Least recently used first. Only the thread looks at it."""
        self._step_s: dict[StructuredOutput, float] = {}
        """Of this step's jobs: the processor time that each form has taken."""
        self._spent_s = self._step_s
        """Of the step whose job the thread is at. Only the thread looks at it."""

    @functools.cached_property
    def no_mask(self) -> npt.NDArray[np.float32]:
        """[vocab] for rows in which every token may come."""
        return np.zeros(self.vocabulary.vocab_size, dtype=np.float32)

    @property
    def vocabulary(self) -> LLTokenizer:
        """Opened at first use, which is in the thread."""
        if self._vocabulary is None:
            self._vocabulary = self._open_vocabulary()
        return self._vocabulary

    def prepare(self, structured: StructuredOutput) -> None:
        """Compile it, if that has not been done. Returns at once."""
        self.submit(lambda: self._warm(structured))

    def start(self, structured: StructuredOutput, output_token_ids: Sequence[int]) -> Form:
        """A request that has produced these tokens so far. Returns at once."""
        return Form(self, structured, output_token_ids)

    def flush(self) -> None:
        """All rows of a step are sampled: ``tell``. Before, it would only compete with that."""
        self.tell()
        self._step_s = {}

    def tell(self) -> None:
        """Have the thread take the tokens that were chosen and compute the masks behind them."""
        if not self.chosen:
            return
        chosen, self.chosen = self.chosen, []

        def advance() -> None:
            for form, token_id in chosen:
                form.advance(token_id)

        job = self.submit(advance)
        for form, _ in chosen:
            form.job = job

    def submit(self, job: Callable[[], None]) -> Job:
        """Have the thread do it, after all that it was asked before."""
        step_s = self._step_s

        def charged() -> None:
            self._spent_s = step_s
            job()

        if self._thread is None:
            self._thread = ThreadPoolExecutor(1, thread_name_prefix="forms")
        return Job(self._thread.submit(charged), self._thread)

    def wait_for(self, job: Job) -> None:
        """Until it is done. Raises FormError if that takes too long.

        What holds up the thread is waited for once, however many forms are behind it.
        """
        if job.thread is not self._thread and not job.future.done():
            raise FormError(_HELD_UP)
        try:
            job.future.result(MAX_WAIT_S)
        except TimeoutError:
            self._give_up()
            raise FormError(f"no mask within {MAX_WAIT_S:g} s") from None
        except CancelledError:
            raise FormError(_HELD_UP) from None

    def _give_up(self) -> None:
        """Leave the thread to what holds it up; what waits for it ends, what comes gets another.

        Kept forms are left, too: what holds it up may have one of their lexers locked.
        """
        self.close()
        self._thread, self._compiled = None, OrderedDict()

    def close(self) -> None:
        """Let the thread go."""
        if self._thread is not None:
            self._thread.shutdown(wait=False, cancel_futures=True)

    def find(self, structured: StructuredOutput) -> LLMatcher:
        """In the thread: the form at its beginning, kept. Its copies share its lexer.

        So what one of them has found the others know, and the lexer's limits are of them all.
        """
        compiled = self._compiled.pop(structured, None)
        if compiled is None:
            compiled = compile_form(self.vocabulary, structured)
        self._compiled[structured] = compiled
        if len(self._compiled) > MAX_COMPILED:
            self._compiled.popitem(last=False)
        return compiled

    @contextlib.contextmanager
    def charging(self, structured: StructuredOutput) -> Iterator[None]:
        """In the thread: work for one of the form's outputs. Raises FormError if the others have
        taken all the time that the form has in a step.
        """
        spent_s = self._spent_s
        if spent_s.get(structured, 0.0) > MOST_STEP_S:
            raise FormError(
                f"the outputs of this form together take over {MOST_STEP_S:g} s for a token"
            )
        began_s = time.thread_time()
        try:
            yield
        finally:
            took_s = time.thread_time() - began_s
            spent_s[structured] = spent_s.get(structured, 0.0) + took_s

    def drop(self, structured: StructuredOutput, compiled: LLMatcher) -> None:
        """In the thread: keep this one no longer, because its lexer may be spent."""
        if self._compiled.get(structured) is compiled:
            self._compiled.pop(structured, None)

    def _warm(self, structured: StructuredOutput) -> None:
        # Whoever starts it will meet the error again.
        with contextlib.suppress(FormError), _as_form_error():
            self.find(replace(structured, after=None)).compute_bitmask()
