import select

from kunserve.transport.wire.wakeup import Wakeup


def is_raised(wakeup: Wakeup) -> bool:
    return bool(select.select([wakeup], [], [], 0)[0])


def test_raised_until_cleared() -> None:
    wakeup = Wakeup()
    assert not is_raised(wakeup)
    wakeup.clear()
    wakeup.set()
    wakeup.set()
    assert is_raised(wakeup)
    wakeup.clear()
    assert not is_raised(wakeup)
    wakeup.close()
