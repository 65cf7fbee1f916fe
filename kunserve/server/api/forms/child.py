"""The process that tries forms: ``python -m kunserve.server.api.forms.child``.

It reads an order, then forms, and answers each. A form that is too deep, too large or too slow
ends this process and nothing else.
"""

import os
import resource
import signal
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import BinaryIO, TypeAlias

from llguidance import LLTokenizer

from kunserve.core.request import StructuredOutput
from kunserve.engine.sampling.structured.grammar import FormError, check, compile_form
from kunserve.engine.sampling.structured.vocabulary import open_vocabulary
from kunserve.transport.wire.codec import Codec

MOST_CPU_S = 0.5
"""Of compiling one form, and of the first masks of an output."""
_NUM_TRIED = 2
"""Tokens of an output that is begun."""
MOST_MEMORY_BYTES = 128 << 20
"""Beyond what the process has once it is ready."""
STACK_BYTES = 2 << 20
"""A quarter of what the threads of an instance have, so that what fits here fits there."""
MAX_SHOWN_CHARS = 500
_PREFIX_BYTES = 4


@dataclass(frozen=True, slots=True)
class Order:
    """The first message to the process: the vocabulary."""

    tokenizer_json: str
    eos_token_ids: tuple[int, ...]
    vocab_size: int


@dataclass(frozen=True, slots=True)
class Verdict:
    """Its answer to each form."""

    error: str | None
    """Why the form is refused; None where it is not."""
    compile_s: float


Said: TypeAlias = Order | StructuredOutput | Verdict
_CODEC: Codec[Said] = Codec((Order, StructuredOutput, Verdict))


def framed(message: Said) -> bytes:
    """A message behind its length."""
    data = _CODEC.encode(message)
    return len(data).to_bytes(_PREFIX_BYTES, "big") + data


def read_message(stream: BinaryIO) -> Said | None:
    """The next message; None at the end."""
    prefix = stream.read(_PREFIX_BYTES)
    if len(prefix) < _PREFIX_BYTES:
        return None
    return _CODEC.decode(stream.read(int.from_bytes(prefix, "big")))


def verdict_on(vocabulary: LLTokenizer, form: StructuredOutput) -> Verdict:
    """Compile the form, and begin an output: some cost too much only when a token is taken."""
    began_s = time.perf_counter()
    error = None
    try:
        matcher = compile_form(vocabulary, form)
        ends = vocabulary.eos_tokens
        for _ in range(_NUM_TRIED):
            tokens = _allowed(matcher.compute_bitmask())
            allowed = next((token for token in tokens if token not in ends), None)
            check(matcher)
            if allowed is None:
                break
            matcher.consume_token(allowed)
            check(matcher)
    except FormError as caught:
        error = " ".join(str(caught).split())[:MAX_SHOWN_CHARS] or "unknown"
    return Verdict(error, time.perf_counter() - began_s)


def _allowed(mask: bytes) -> Iterator[int]:
    """The tokens of a mask of a bit for each, lowest first."""
    for number, byte in enumerate(mask):
        for bit in range(8) if byte else ():
            if byte >> bit & 1:
                yield 8 * number + bit


def _serve() -> None:
    source = sys.stdin.buffer
    order = read_message(source)
    if not isinstance(order, Order):
        return
    vocabulary = open_vocabulary(order.tokenizer_json, order.vocab_size, order.eos_token_ids)
    _limit_memory()
    os.dup2(os.open(os.devnull, os.O_WRONLY), 2)  # the last words of every process that ends
    _answer(Verdict(None, 0.0))
    while isinstance(form := read_message(source), StructuredOutput):
        # The kernel ends the process: nothing in it could interrupt the library.
        signal.setitimer(signal.ITIMER_PROF, MOST_CPU_S)
        verdict = verdict_on(vocabulary, form)
        signal.setitimer(signal.ITIMER_PROF, 0.0)
        _answer(verdict)


def _answer(verdict: Verdict) -> None:
    sys.stdout.buffer.write(framed(verdict))
    sys.stdout.buffer.flush()


def _limit_memory() -> None:
    with open("/proc/self/statm", encoding="ascii") as file:
        now_bytes = int(file.read().split()[0]) * resource.getpagesize()
    most = now_bytes + MOST_MEMORY_BYTES
    resource.setrlimit(resource.RLIMIT_AS, (most, most))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))


def main() -> None:
    """Serve until the front closes its end."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    threading.stack_size(STACK_BYTES)
    thread = threading.Thread(target=_serve)
    thread.start()
    thread.join()


if __name__ == "__main__":
    main()
