"""The entry point of a real instance's process: ``python -m kunserve.cluster.instance.main``."""

import sys
from dataclasses import replace

from kunserve.cluster.instance.start import Loaded, address_for, run_instance
from kunserve.cluster.processes.launch import InstanceOrder
from kunserve.engine.body import EngineBody
from kunserve.engine.devices import open_backend
from kunserve.engine.memory.weights_file import SharedWeights
from kunserve.engine.nodes import numa_nodes, stay_on_one
from kunserve.model.config import read_eos_ids
from kunserve.model.fingerprint import check_fingerprint, model_fingerprint
from kunserve.model.source import resolve_model


def load_model(order: InstanceOrder) -> Loaded:
    """The model in its arena. Raises ConfigError when files, memory or settings forbid it."""
    config, instance = order.plan.config, order.plan.instance
    bears = order.instance_id < config.cluster.num_instances
    instance = replace(instance, bears_weights=bears)
    source = resolve_model(config.model.model, config.model.load_format)
    is_here = config.cluster.launcher == "local"
    check_fingerprint(source, order.model_files, with_times=is_here)
    if instance.device == "cpu" and instance.tensor_parallel_size == 1:
        stay_on_one(order.instance_id, instance.num_threads, numa_nodes())
    shared = None
    if order.weights_fds:
        files = order.model_files or model_fingerprint(source)
        told = {"model_files": files, "seed": str(config.model.seed)}
        shared = SharedWeights(order.weights_fds, told)
    backend = open_backend(config.model, source, instance, order.instance_id, shared)
    swap = order.plan.measured.swap
    body = EngineBody(
        order.instance_id,
        config.model,
        instance,
        source,
        config.scheduler,
        backend,
        order.plan.measured.ring,
        None if swap is None else swap.host_bytes,
    )
    if order.network is None:
        backend.open_hops(address_for("links", order))
    elif instance.nccl_between_hosts:
        backend.open_hops(f"tcp://{order.network.host}")
    account = body.account
    eos = frozenset(read_eos_ids(source))
    return Loaded(body, eos, account.longest_request_tokens, str(account))


if __name__ == "__main__":
    sys.exit(run_instance(load_model))
