"""Models that think before they answer, between two marks."""

from dataclasses import dataclass

from kunserve.server.api.parsers.message import MessageWriter
from kunserve.server.api.parsers.tape import Reading, Tape


@dataclass(frozen=True, slots=True)
class ReasoningParser:
    """The marks of one family of models."""

    begins: str
    ends: str
    always: bool = False
    """Whether an answer begins with reasoning, though neither it nor the prompt says so."""

    def is_open_after(self, prompt: str) -> bool | None:
        """Whether an answer to this prompt begins within reasoning; None if it will say itself.

        ``prompt`` is the end of the prompt's text: templates open reasoning, or close it unused.
        """
        prompt = prompt.rstrip()
        if prompt.endswith(self.begins):
            return True
        return False if prompt.endswith(self.ends) else None

    def is_open_within(self, text: str) -> bool | None:
        """The same for a message that the answer goes on with."""
        begin, end = text.rfind(self.begins), text.rfind(self.ends)
        return None if begin == end == -1 else begin > end

    def read(self, tape: Tape, out: MessageWriter, is_open: bool | None) -> Reading[None]:
        """Read up to where the answer proper begins."""
        if is_open is False:
            return
        tape.mark()
        yield from tape.spaces()
        begun = yield from tape.accept(self.begins)
        text = tape.recorded()
        if not (begun or is_open or self.always):
            out.content(text)
            return
        out.begin_reasoning()
        if not begun:  # white space, and perhaps half a mark where the text breaks off
            out.reasoning(text)
        if (yield from tape.until((self.ends,), out.reasoning)):
            out.end_reasoning()


THINK = ReasoningParser("<think>", "</think>")
R1 = ReasoningParser("<think>", "</think>", always=True)
REASONING_PARSERS: dict[str, ReasoningParser] = {"deepseek_r1": R1, "qwen3": THINK}
"""By vLLM's names."""
