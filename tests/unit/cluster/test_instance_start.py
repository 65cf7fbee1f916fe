"""An instance's process, from its order on."""

import os
import subprocess
import sys
from pathlib import Path

import msgspec

from kunserve.cluster.instance_start import EXIT_ORPHANED
from kunserve.cluster.launch import FakeSettings, InstanceOrder
from kunserve.core.config import KunServeConfig
from kunserve.core.ids import InstanceId


def test_an_instance_whose_front_died_first_ends(tmp_path: Path) -> None:
    """The parent's death is a signal only for those that asked for it in time."""
    order = InstanceOrder(
        InstanceId(0),
        FakeSettings(),
        front_address=f"ipc://{tmp_path}/front",
        socket_folder=str(tmp_path),
        config=KunServeConfig(),
        parent_pid=os.getpid() + 1,
    )
    ended = subprocess.run(
        [sys.executable, "-m", "kunserve.cluster.fake_main"],
        input=msgspec.json.encode(order),
        timeout=200,
        check=False,
    )
    assert ended.returncode == EXIT_ORPHANED
