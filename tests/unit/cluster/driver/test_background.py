"""Nothing that fails in the background is silent, and nothing else ends with it."""

import asyncio
import logging

import pytest

from kunserve.cluster.driver.background import Background


def test_an_error_is_counted_and_logged_and_what_follows_goes_on(
    caplog: pytest.LogCaptureFixture,
) -> None:
    background, done = Background(), []
    with caplog.at_level(logging.ERROR):
        for _ in range(9):
            with background.surviving("a command"):
                raise RuntimeError("no")
            done.append(1)
    assert len(done) == 9 and background.num_errors == 9
    counts = [record.getMessage().split("count=")[1] for record in caplog.records]
    assert counts == ["1", "2", "4", "8"]
    assert "RuntimeError: no" in caplog.text


def test_a_call_that_fails_is_counted_by_what_it_was_about(
    caplog: pytest.LogCaptureFixture,
) -> None:
    background = Background()
    with caplog.at_level(logging.ERROR):
        try:
            int("no number")
        except ValueError:
            background.note("command str")
    assert background.num_errors == 1
    assert "'command str' count=1" in caplog.text and "no number" in caplog.text


def test_a_task_that_dies_is_seen(caplog: pytest.LogCaptureFixture) -> None:
    async def story() -> None:
        background = Background()

        async def die() -> None:
            raise ValueError("gone")

        await background.run("a task", die())
        assert background.num_errors == 1
        forever = background.run("another", asyncio.sleep(1e9))
        await background.close()
        assert forever.cancelled() and background.num_errors == 1

    with caplog.at_level(logging.ERROR):
        asyncio.run(story())
    assert "what='a task'" in caplog.text
