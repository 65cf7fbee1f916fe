"""How torch is asked to record; nothing here needs a device."""

import contextlib
from collections.abc import Iterator

import pytest
import torch

from kunserve.core.errors import ConfigError
from kunserve_extras.triton_ops.recorder import TorchRecorder

DEVICE = torch.device("cuda", 0)


class Asked:
    """What torch was asked for, in order."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.calls: list[str] = []
        asked = self

        class Graph:
            def capture_begin(self, pool: object, capture_error_mode: str) -> None:
                assert capture_error_mode == "thread_local"
                asked.calls.append(f"begin in {pool}")

            def capture_end(self) -> None:
                asked.calls.append("end")

        @contextlib.contextmanager
        def stream(which: str) -> Iterator[None]:
            asked.calls.append(f"on {which}")
            yield
            asked.calls.append("off")

        for name, stub in (
            ("Stream", lambda _: "stream"),
            ("graph_pool_handle", lambda: "pool"),
            ("CUDAGraph", Graph),
            ("stream", stream),
            ("synchronize", lambda _: self.calls.append("wait")),
        ):
            monkeypatch.setattr(torch.cuda, name, stub)
        self.recorder = TorchRecorder(DEVICE)


def test_work_is_warmed_up_where_it_is_recorded(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = Asked(monkeypatch)
    asked.recorder.warm_up(lambda: asked.calls.append("work"))
    assert asked.calls == ["wait", "on stream", "work", "off", "wait"]
    asked.calls.clear()
    for _ in range(2):
        asked.recorder.record(lambda: asked.calls.append("work"))
    assert asked.calls == 2 * ["on stream", "begin in pool", "work", "end", "off"]


def test_what_cannot_be_recorded_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = Asked(monkeypatch)

    def fail() -> None:
        raise RuntimeError("operation not permitted when stream is capturing")

    with pytest.raises(ConfigError, match="not permitted when .* Start with --enforce-eager"):
        asked.recorder.record(fail)
    assert "end" in asked.calls
