"""``--topology``: where each instance stands, and what is wrong with a file."""

import json
from pathlib import Path

import pytest

from kunserve.cluster.driver.topology import place_of, places_of, read_topology
from kunserve.core.config import ClusterConfig
from kunserve.core.errors import ConfigError
from kunserve.core.ids import InstanceId
from kunserve.core.place import ONE_HOST, Place

TOML = """
link_gbps = 100

[[hosts]]
name = "a"
rack = "left"
instances = 2

[[hosts]]
name = "b"
link_gbps = 25
instances = [0, 3]
"""


def written(folder: Path, text: str, name: str = "topology.toml") -> Path:
    path = folder / name
    path.write_text(text)
    return path


def test_counts_take_the_numbers_that_nobody_named(tmp_path):
    a, b = Place("a", "left", 100.0), Place("b", "", 25.0)
    assert read_topology(written(tmp_path, TOML), 4) == (b, a, a, b)


def test_json_says_the_same(tmp_path):
    hosts = [{"name": "a", "instances": 1}, {"name": "b", "instances": [0]}]
    path = written(tmp_path, json.dumps({"hosts": hosts}), "topology.json")
    assert read_topology(path, 2) == (Place("b"), Place("a"))


def test_without_a_file_all_stand_on_one_host():
    assert places_of(ClusterConfig()) == ()
    assert place_of((), InstanceId(7)) == ONE_HOST


def test_a_cluster_that_may_grow_needs_places_to_grow_to(tmp_path):
    config = ClusterConfig(num_instances=2, max_instances=6, topology=str(written(tmp_path, TOML)))
    with pytest.raises(ConfigError, match="places for 4 instances, and there are 6"):
        places_of(config)


@pytest.mark.parametrize(
    ("text", "what"),
    [
        ("hosts = 3", "Expected `array`"),
        ("hosts = []", "names no host"),
        ("[[hosts]]\nname = 'a'", "missing required field `instances`"),
        ("[[hosts]]\nname = 'a'\ninstances = 'all'", r"\$.hosts\[0\].instances"),
        ("[[hosts]]\nname = 'a'\ninstances = 2\nspeed = 3", "unknown field `speed`"),
        ("[[hosts]]\nname = 'a'\ninstances = -1", "host 'a' has -1 instances"),
        ("[[hosts]]\nname = 'a'\ninstances = 1", "places for 1 instances, and there are 2"),
        ("[[hosts]]\nname = 'a'\ninstances = [0, 5]", "names instance 5"),
        ("[[hosts]]\nname = 'a'\ninstances = [0, -1]", "they begin at 0"),
        ("[[hosts]]\nname = 'a'\ninstances = [0, 0]", "instance 0 stands on host 'a' and on 'a'"),
        ("[[hosts]]\nname = ''\ninstances = 2", "must have a name"),
        ("[[hosts]]\nname='a'\ninstances=1\n[[hosts]]\nname='a'\ninstances=1", "named once"),
        ("[[hosts]]\nname = 'a'\ninstances = 2\nlink_gbps = 0", "link_gbps must be above 0"),
        ("[[hosts]]\nname = 'a'\ninstances = 2\nlink_gbps = nan", "link_gbps must be above 0"),
        ("hosts: 3", "wants \\[\\[hosts\\]\\]"),
    ],
)
def test_a_wrong_file_is_told(tmp_path, text, what):
    with pytest.raises(ConfigError, match=what) as error:
        read_topology(written(tmp_path, text), 2)
    assert "--topology" in str(error.value)


def test_no_file_and_no_text(tmp_path):
    with pytest.raises(ConfigError, match="cannot be read: No such file"):
        read_topology(tmp_path / "none", 2)
    (tmp_path / "bytes").write_bytes(b"\xff\xfe")
    with pytest.raises(ConfigError, match="it is no text"):
        read_topology(tmp_path / "bytes", 2)
