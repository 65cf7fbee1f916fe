"""By which address an instance's process lets peers give it hidden states beside the links."""

from types import SimpleNamespace
from typing import Any

import pytest

from kunserve.cluster.instance import main
from kunserve.core.config import InstanceConfig
from kunserve.transport.wire.network import Network

NETWORK = Network("far.example", "public", "secret", "front")


@pytest.mark.parametrize(
    ("network", "by_nccl", "start"),
    [(None, False, "ipc://"), (NETWORK, True, "tcp://far.example"), (NETWORK, False, None)],
)
def test_hops_are_opened_where_peers_find_them(
    monkeypatch: pytest.MonkeyPatch, network: Network | None, by_nccl: bool, start: str | None
) -> None:
    opened: list[str] = []
    account = SimpleNamespace(longest_request_tokens=7)
    config = SimpleNamespace(
        model=SimpleNamespace(model="m", load_format="auto", seed=0),
        cluster=SimpleNamespace(num_instances=1, launcher="local"),
        scheduler=None,
    )
    measured = SimpleNamespace(swap=None, ring=None)
    instance = InstanceConfig(device="cuda", nccl_between_hosts=by_nccl)
    order: Any = SimpleNamespace(
        instance_id=0,
        model_files="",
        weights_fds=(),
        network=network,
        socket_folder="/tmp/sockets",
        plan=SimpleNamespace(config=config, instance=instance, measured=measured),
    )
    given: dict[str, Any] = {
        "resolve_model": lambda *_: None,
        "check_fingerprint": lambda *_, **__: None,
        "open_backend": lambda *_: SimpleNamespace(open_hops=opened.append),
        "EngineBody": lambda *_: SimpleNamespace(account=account),
        "read_eos_ids": lambda source: (),
    }
    for name, value in given.items():
        monkeypatch.setattr(main, name, value)
    assert main.load_model(order).longest_request_tokens == 7
    assert len(opened) == (start is not None)
    assert all(start is not None and address.startswith(start) for address in opened)
