"""Flags of the laboratory that mean a setting are that setting's."""

import click
import pytest

from kunserve.server.start.flags.declared import declared_flags
from kunserve_lab.compare.simulate_command import simulate_command
from kunserve_lab.profile.command import profile_command

OTHERS = {
    ("profile", "device"): "a profile is of one device: nothing is chosen for it",
    ("profile", "max_num_batched_tokens"): "the largest batch measured: too few fit no model",
    ("profile", "model"): "a model's name is an argument",
    ("simulate", "model"): "of those that are built in",
    ("simulate", "num_instances"): "processes of no machine: no bound to how many are modelled",
    ("simulate", "device"): "of those that are modelled",
    ("simulate", "profile"): "a file that must be there",
    ("simulate", "topology"): "a file that must be there",
    ("simulate", "seed"): "of arrivals, not of sampling",
}
"""Of the same name, but not the same."""


@pytest.mark.parametrize("command", [profile_command, simulate_command], ids=lambda one: one.name)
def test_a_flag_that_means_a_setting_takes_what_the_setting_takes(command: click.Command) -> None:
    settings = {flag.name: flag for flag in declared_flags({})}
    shared = {flag.name: flag for flag in command.params if flag.name in settings}
    assert {name for where, name in OTHERS if where == command.name} <= shared.keys() | {"model"}
    checked = [name for name in shared if (command.name, name) not in OTHERS]
    assert len(checked) >= 3
    for name in checked:
        ours, serves = shared[name].type, settings[name].type
        assert type(ours) is type(serves) and ours.to_info_dict() == serves.to_info_dict(), name
