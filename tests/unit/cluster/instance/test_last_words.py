"""An instance that fails says whose doing it was: only a step's own failure names its requests."""

from collections.abc import Callable

import pytest

from kunserve.cluster.instance import start
from kunserve.cluster.instance.mover import LayerLoader
from kunserve.cluster.processes.launch import blame_for
from kunserve.control.cluster.requests.quarantine import Blame, Cause
from kunserve.core.faults import Fault, MachineFailed
from kunserve.core.ids import RequestId
from kunserve.core.layout import LayerRange
from kunserve.core.messages import Submit
from kunserve.core.request import Request, SamplingParams
from kunserve.core.tokens import TokenIds
from kunserve.engine.memory.instance_memory import RemapFailed
from kunserve_extras.ranks.meeting import RankLost
from kunserve_lab.world.fake_body import FakeBody
from tests.conftest import wait_until
from tests.unit.cluster.instance.test_instance_loop import Exchanging, Instance

R = RequestId("r")
NAMED = Blame(Cause.INSIDE, (R,))
NOT_NAMED = Blame(Cause.INSIDE)
UNKNOWN = Blame(Cause.OUTSIDE)
MACHINE = Blame(Cause.NOBODY)


class Loading(Exchanging):
    is_in_transition = True


def blamed(instance: Instance, capfdbinary: pytest.CaptureFixture[bytes]) -> Blame:
    """What the front makes of an instance that fails while it serves one request."""
    request = Request(R, TokenIds((5, 6, 7)), SamplingParams(3), 0.0)
    instance.wires.mail.append(Submit(request))
    try:
        code = start._run(instance.make_loop())
    except SystemExit as end:
        assert isinstance(end.code, int)
        code = end.code
    except BaseException:
        code = 1
    return blame_for(code, capfdbinary.readouterr().out)


def failing(error: BaseException) -> Callable[[], None]:
    def fail() -> None:
        raise error

    return fail


@pytest.mark.parametrize(
    ("error", "blame"),
    [
        (ZeroDivisionError(), NAMED),
        (MachineFailed("the disk"), MACHINE),
        (RankLost("it stood still"), MACHINE),
        (RankLost("it computed and died", lambda: Fault.REQUEST), NAMED),
        (RankLost("it was killed", lambda: Fault.UNKNOWN), UNKNOWN),
        (RemapFailed(), MACHINE),
    ],
)
def test_what_fails_in_a_step(
    error: BaseException, blame: Blame, capfdbinary: pytest.CaptureFixture[bytes]
) -> None:
    instance = Instance()
    instance.body.on_step = failing(error)
    assert blamed(instance, capfdbinary) == blame


@pytest.mark.parametrize("error", [ZeroDivisionError(), MachineFailed("the disk")])
def test_mail_that_is_read_in_the_middle_of_a_step_is_not_the_steps_doing(
    error: Exception, capfdbinary: pytest.CaptureFixture[bytes]
) -> None:
    instance = Instance(agent=Exchanging)

    def looked() -> None:
        if instance.body.is_computing:
            raise error

    instance.wires.looked = looked
    blame = MACHINE if isinstance(error, MachineFailed) else NOT_NAMED
    assert blamed(instance, capfdbinary) == blame


def test_a_step_is_named_that_fails_after_mail_was_read_in_it(
    capfdbinary: pytest.CaptureFixture[bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(FakeBody, "execute", lambda self, work, hidden, look_up: look_up() or 1 / 0)
    assert blamed(Instance(agent=Exchanging), capfdbinary) == NAMED


@pytest.mark.parametrize("error", [OSError("EIO"), AssertionError("another file")])
def test_a_layer_that_cannot_be_read_is_nobodys_doing(
    error: Exception, capfdbinary: pytest.CaptureFixture[bytes]
) -> None:
    """A disk fails in the middle of a step."""
    instance = Instance(agent=Loading)
    loader = instance.mover.loader = LayerLoader(lambda layers, gate: failing(error)())

    def looked() -> None:
        if instance.body.is_computing:
            loader.start(LayerRange(0, 1))
            wait_until(lambda: loader._failure is not None)

    instance.wires.looked = looked
    assert blamed(instance, capfdbinary) == MACHINE
