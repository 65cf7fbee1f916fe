"""Which tokens the form of each request allows next, computed in a thread beside the steps.

The library lets go of the interpreter while it works, and so do the kernels of a step. So a mask
is there, as a rule, before the logits are.
"""

import contextlib
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import CancelledError, Future, ThreadPoolExecutor
from functools import partial

import numpy as np
import numpy.typing as npt
from llguidance import LLMatcher, LLTokenizer

from kunserve.core.request import StructuredOutput
from kunserve.engine.structured.grammar import FormError, check, compile_form

MAX_COMPILED = 16
"""Forms that are kept compiled when no request has them."""
MAX_WAIT_S = 10.0
"""A mask that takes longer ends its request. The library's own limits let none take a second."""


class Form:
    """One request's place in its form.

    Between ``append`` and the next ``forbidden`` a mask is computed elsewhere.
    """

    def __init__(self, forms: "Forms", first: Callable[[], LLMatcher]) -> None:
        self._forms = forms
        self._matcher: LLMatcher | None = None
        self._words = np.zeros(0, dtype=np.uint32)
        self._forbidden: npt.NDArray[np.bool_] | None = None
        self._job: Future[None] = forms.submit(partial(self._begin, first))
        self.is_complete = False
        """Whether nothing may follow but the end. Known once ``forbidden`` has been called."""

    def forbidden(self) -> npt.NDArray[np.bool_]:
        """[vocab] the tokens that may not come next. Raises FormError."""
        try:
            self._job.result(MAX_WAIT_S)
        except TimeoutError:
            self._forms.give_up()
            raise FormError(f"no mask within {MAX_WAIT_S:g} s") from None
        except CancelledError:
            raise FormError("another form has held up this one") from None
        assert self._forbidden is not None
        return self._forbidden

    def append(self, token_id: int) -> None:
        """The token that was chosen: from now on the next mask is on its way."""
        self._job = self._forms.submit(partial(self._advance, token_id))

    def _begin(self, first: Callable[[], LLMatcher]) -> None:
        with _as_form_error():
            self._matcher = first()
            self._look()

    def _advance(self, token_id: int) -> None:
        with _as_form_error():
            assert self._matcher is not None, "its beginning has failed"
            self._matcher.consume_token(token_id)
            check(self._matcher)
            self._look()

    def _look(self) -> None:
        """In the thread: see what may come next."""
        matcher, num_tokens = self._matcher, self._forms.vocabulary.vocab_size
        assert matcher is not None
        self.is_complete = matcher.is_stopped()
        if len(self._words) == 0:
            self._words = np.zeros(-(-num_tokens // 32), dtype=np.uint32)
        matcher.unsafe_compute_mask_ptr(self._words.ctypes.data, self._words.nbytes)
        check(matcher)
        bits = np.unpackbits((~self._words).view(np.uint8), count=num_tokens, bitorder="little")
        self._forbidden = bits.view(np.bool_)
        if self._forbidden.all():
            raise FormError("the form allows no token, and no end")


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
        self._compiled: OrderedDict[StructuredOutput, LLMatcher] = OrderedDict()
        """Least recently used first. Only the thread looks at it."""

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
        tokens = list(output_token_ids)
        return Form(self, lambda: self._begin(structured, tokens))

    def submit(self, job: Callable[[], None]) -> "Future[None]":
        """Have the thread do it, after all that it was asked before."""
        if self._thread is None:
            self._thread = ThreadPoolExecutor(1, thread_name_prefix="forms")
        return self._thread.submit(job)

    def give_up(self) -> None:
        """Leave the thread to what holds it up; what waits for it ends, what comes gets another."""
        self.close()
        self._thread = None

    def close(self) -> None:
        """Let the thread go."""
        if self._thread is not None:
            self._thread.shutdown(wait=False, cancel_futures=True)

    def _warm(self, structured: StructuredOutput) -> None:
        # Whoever starts it will meet the error again.
        with contextlib.suppress(FormError), _as_form_error():
            self._find(structured).compute_bitmask()

    def _find(self, structured: StructuredOutput) -> LLMatcher:
        """The form at its beginning. What its copies learn of its lexer they all know."""
        compiled = self._compiled.pop(structured, None)
        if compiled is None:
            compiled = compile_form(self.vocabulary, structured)
        self._compiled[structured] = compiled
        if len(self._compiled) > MAX_COMPILED:
            self._compiled.popitem(last=False)
        return compiled

    def _begin(self, structured: StructuredOutput, tokens: list[int]) -> LLMatcher:
        matcher = self._find(structured).deep_copy()
        if not matcher.consume_tokens(tokens):
            check(matcher)
        return matcher
