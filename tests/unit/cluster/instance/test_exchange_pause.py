"""How long steps give way to the copies of an exchange."""

from kunserve.cluster.instance.exchange_pause import LONGEST_S, QUIET_S, ExchangePause


def test_steps_give_way_while_pieces_land() -> None:
    pause = ExchangePause()
    now_s, taken = 5.0, 700
    assert pause.gives_way(taken, now_s)
    while now_s + 0.9 * QUIET_S < 5.0 + LONGEST_S:
        now_s, taken = now_s + 0.9 * QUIET_S, taken + 1
        assert pause.gives_way(taken, now_s)
    assert now_s > 5.0 + QUIET_S, "longer than if nothing had landed"


def test_a_step_begins_when_nothing_lands_any_more() -> None:
    pause = ExchangePause()
    assert pause.gives_way(0, 5.0)
    assert pause.gives_way(1, 5.0 + 0.5 * QUIET_S)
    assert pause.gives_way(1, 5.0 + 1.4 * QUIET_S)
    assert not pause.gives_way(1, 5.0 + 1.6 * QUIET_S)


def test_a_long_exchange_does_not_keep_steps_for_ever() -> None:
    pause = ExchangePause()
    gave_way_s = 0.0
    for turn in range(1000):
        now_s = 0.001 * turn
        if pause.gives_way(turn, now_s):
            gave_way_s = now_s
    assert QUIET_S < gave_way_s < LONGEST_S


def test_each_exchange_has_a_pause_of_its_own() -> None:
    pause = ExchangePause()
    assert pause.gives_way(0, 1.0)
    assert not pause.gives_way(0, 1.0 + QUIET_S)
    pause.end()
    assert pause.gives_way(0, 2.0)
