"""Which tokens the form of each request allows next, computed in threads beside the steps.

The library lets go of the interpreter while it works, and so do the kernels of a step. So a mask
is there, as a rule, before the logits are. A step goes on without one that is not.
"""

import contextlib
import functools
import threading
import time
from array import array
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace

import numpy as np
import numpy.typing as npt
from llguidance import LLMatcher, LLTokenizer

from kunserve.core.request import ReasoningMarks, StructuredOutput
from kunserve.core.tokens import TYPE_CODE
from kunserve.engine.sampling.structured.grammar import FormError, check, compile_form
from kunserve.engine.sampling.structured.mask_threads import Job, MaskThreads

MAX_COMPILED = 16
"""Forms that are kept compiled when no request has them."""
MOST_HOLD_S = 0.01
"""A step waits for masks for so long, all of them together. Who has none then is computed again by
a later step."""
MAX_WAIT_S = 10.0
"""A mask that takes longer ends its request, whether its own form is slow or 128 outputs of it
are. The library's own limits let no mask take a second."""

_BITS = np.unpackbits(np.arange(256, dtype=np.uint8)[:, None], axis=1, bitorder="little")
_MASK_OF_BYTE = np.where(_BITS, np.float32(0.0), np.float32(-np.inf))
"""[256, 8] what a byte of the library's mask means for its eight tokens. Adding to a row of logits
is twenty times as fast as choosing in it."""


class MaskLate(Exception):
    """Which tokens may come is not known in time. Nothing is lost: a later step asks again."""


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
        begin = functools.partial(self._begin, list(token_ids))
        self._job = forms.submit(self._structured, begin)
        """What the next mask comes from."""
        self.is_complete = False
        """Whether nothing may follow but the end. Known once ``mask`` has been called."""

    def mask(self) -> npt.NDArray[np.float32]:
        """[vocab] to be added to logits: 0 for what may come next, else minus infinity.

        Raises FormError, or MaskLate.
        """
        self._forms.tell()
        self._forms.wait_for(self._job)
        if self._error is not None:
            raise self._error
        return self._mask

    def append(self, token_id: int) -> None:
        """The token that was chosen. The next mask is on its way from ``Forms.tell`` on."""
        self._forms.chosen.append((self, token_id))

    def _begin(self, token_ids: list[int]) -> None:
        with self._keeping_errors():
            self._shared = self._forms.find(self._structured)
            self._matcher = self._shared.deep_copy()
            self._go_on(token_ids)

    def go_on_behind(self, token_id: int) -> None:
        """Have the mask behind this token computed. Returns at once."""
        run = functools.partial(self._advance, token_id)
        self._job = self._forms.submit(self._structured, run)

    def close(self) -> None:
        """Nobody wants another mask."""
        self._job.is_void = True

    def _advance(self, token_id: int) -> None:
        """In a thread: take the token."""
        with self._keeping_errors():
            self._go_on([token_id])

    def _go_on(self, token_ids: Sequence[int]) -> None:
        """In a thread: take the tokens, and see what may come next."""
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
        """In a thread: see what may come next."""
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
    """One instance's: the vocabulary, forms that are compiled, and the threads."""

    def __init__(self, open_vocabulary: Callable[[], LLTokenizer]) -> None:
        """``open_vocabulary`` is called in a thread when the first form is started."""
        self._open_vocabulary = open_vocabulary
        self._vocabulary: LLTokenizer | None = None
        self._threads = MaskThreads()
        self.chosen: list[tuple[Form, int]] = []
        """Tokens that the threads are yet to be told of."""
        self._lock = threading.Lock()
        self._compiled: OrderedDict[StructuredOutput, LLMatcher] = OrderedDict()
        """Least recently used first. Under the lock."""
        self._held_until_s: float | None = None
        """By when this step waits for no mask any more; None before it waits."""

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
        form = replace(structured, after=None)
        self.submit(form, lambda: self._warm(form))

    def start(self, structured: StructuredOutput, output_token_ids: Sequence[int]) -> Form:
        """A request that has produced these tokens so far. Returns at once."""
        return Form(self, structured, output_token_ids)

    def flush(self) -> None:
        """All rows of a step are sampled: ``tell``. Before, it would only compete with that."""
        self.tell()
        self._held_until_s = None

    def tell(self) -> None:
        """Have the threads take the tokens that were chosen and compute the masks behind them."""
        chosen, self.chosen = self.chosen, []
        for form, token_id in chosen:
            form.go_on_behind(token_id)

    def submit(self, structured: StructuredOutput, run: Callable[[], None]) -> Job:
        """Have a thread do it for an output of the form. ``run`` raises nothing."""
        return self._threads.submit(structured, run)

    def wait_for(self, job: Job) -> None:
        """Until it is done, for as long as a step waits. Raises MaskLate; FormError if it has taken
        too long, or will never be done.
        """
        if job.done.is_set():
            return
        now_s = time.monotonic()
        if self._held_until_s is None:
            self._held_until_s = now_s + MOST_HOLD_S
        if not job.is_void and job.done.wait(max(0.0, self._held_until_s - now_s)):
            return
        if job.is_void:
            raise FormError("another output of this form takes too long")
        if job.age_s <= MAX_WAIT_S:
            raise MaskLate
        job.is_void = True
        stuck = self._threads.give_up(MAX_WAIT_S)
        with self._lock:
            for structured in stuck:  # its lexer may be locked for ever
                self._compiled.pop(structured, None)
        raise FormError(f"no mask within {MAX_WAIT_S:g} s")

    def close(self) -> None:
        """Let the threads go."""
        self._threads.close()

    def find(self, structured: StructuredOutput) -> LLMatcher:
        """In a thread: the form at its beginning, kept. Its copies share its lexer.

        So what one of them has found the others know, and the lexer's limits are of them all.
        """
        with self._lock:
            compiled = self._compiled.get(structured)
            if compiled is not None:
                self._compiled.move_to_end(structured)
                return compiled
        compiled = compile_form(self.vocabulary, structured)
        with self._lock:
            self._compiled[structured] = compiled
            if len(self._compiled) > MAX_COMPILED:
                self._compiled.popitem(last=False)
        return compiled

    def drop(self, structured: StructuredOutput, compiled: LLMatcher) -> None:
        """In a thread: keep this one no longer, because its lexer may be spent."""
        with self._lock:
            if self._compiled.get(structured) is compiled:
                self._compiled.pop(structured, None)

    def _warm(self, structured: StructuredOutput) -> None:
        # Whoever starts it will meet the error again.
        with contextlib.suppress(FormError), _as_form_error():
            self.find(structured).compute_bitmask()
