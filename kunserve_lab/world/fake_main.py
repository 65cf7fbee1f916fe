"""The entry point of a fake instance's process: no model and no torch, real everything else."""

import sys

from kunserve.cluster.instance.start import Loaded, run_instance
from kunserve.cluster.processes.launch import InstanceOrder
from kunserve.control.instance.body import StepWork
from kunserve_lab.world.fake_body import FakeBody, FakeModel, fake_spec

MODULE = "kunserve_lab.world.fake_main"
"""This one, for ``FakeSettings``: an instance's process runs it."""


def load_fake(order: InstanceOrder) -> Loaded:
    """A body of the order's ``fake`` settings."""
    fake, block_size = order.fake, order.plan.config.instance.block_size
    assert fake is not None
    spec = fake_spec(
        order.instance_id,
        num_layers=fake.num_layers,
        kv_units=fake.kv_blocks * fake.num_layers,
        block_size=block_size,
        layer_bytes=fake.layer_bytes,
        granule_bytes=fake.granule_bytes,
    )

    def delay_s(work: StepWork) -> float:
        return fake.step_s * work.layers.num_layers / fake.num_layers

    body = FakeBody(spec, FakeModel(fake.num_layers, fake.vocab_size), delay_s)
    longest = fake.kv_blocks * block_size
    return Loaded(body, frozenset(), longest, f"fake, {fake.kv_blocks} KV blocks")


if __name__ == "__main__":
    sys.exit(run_instance(load_fake))
