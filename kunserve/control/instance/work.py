"""What an agent gives its body to do: the layers of a stage, or what follows them."""

from typing import Any, NamedTuple

from kunserve.control.instance.body import (
    AnyWork,
    Body,
    HeadWork,
    SampleWork,
    StepOutcome,
    StepWork,
)


class Work(NamedTuple):
    """Something for the body, and the hidden states that came with it."""

    step: AnyWork
    hidden: Any

    def run(self, body: Body) -> StepOutcome:
        """Have the body do it. A driver may call ``Body.execute`` itself."""
        match self.step:
            case StepWork() as step:
                return body.execute(step, self.hidden)
            case HeadWork() as head:
                return StepOutcome(body.head_part(head, self.hidden), ())
            case SampleWork() as sampling:
                return StepOutcome(None, body.sample(sampling), sampling.scores)
