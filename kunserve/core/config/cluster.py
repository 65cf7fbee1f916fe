"""Settings of the cluster: how many instances, where, and how they are watched."""

from dataclasses import dataclass
from functools import partial
from typing import Annotated, Literal, TypeAlias

from kunserve.core.config.flag import Flag
from kunserve.core.errors import ConfigError

DispatchPolicy: TypeAlias = Literal["soonest", "least-load", "round-robin"]
MAX_INSTANCES = 128
"""Of one controller, which looks at every group for every request."""
_cluster = partial(Flag, "Instances")
_faults = partial(Flag, "Faults and traces")


@dataclass(frozen=True, slots=True)
class ClusterConfig:
    """How many instances, and how they are watched."""

    num_instances: Annotated[int, _cluster(least=1, most=MAX_INSTANCES)] = 2
    """Replicas."""
    min_instances: Annotated[int | None, _cluster(least=1)] = None
    """With --max-instances: the cluster shrinks to so many when it has little to do
    [--num-instances]."""
    max_instances: Annotated[int | None, _cluster(least=1)] = None
    """Start instances up to so many while memory is short and nothing is left to drop, and let them
    go later [the size changes by `kunserve scale` only]."""
    launcher: Annotated[Literal["local", "ray"], _cluster("--cluster")] = "local"
    """Where instances are started: on this machine, or on the nodes of a Ray cluster (needs the
    extra ray: pip install 'kunserve[ray]')."""
    ray_address: Annotated[str | None, _cluster()] = None
    """host:port of Ray's head [the cluster that this machine is a node of]."""
    ray_name: Annotated[str | None, _cluster()] = None
    """With --cluster ray: tells this server from others of the Ray cluster. The same command, given
    on any node within --front-grace of the end of this front, takes its instances over [the port's
    number]."""
    ray_placement: Annotated[Literal["spread", "pack"], _cluster()] = "spread"
    """With --cluster ray: instances on many nodes, or on few."""
    ray_autoscaling: Annotated[bool, _cluster()] = False
    """With --cluster ray: Ray's autoscaler adds nodes. Instances for which there is no room are
    asked of it, and wait up to --start-timeout; else they are refused."""
    dispatch_policy: Annotated[DispatchPolicy, _cluster()] = "soonest"
    """soonest: requests wait in one queue for the instance that starts them first; least-load: each
    goes to the instance with the least load when it comes, and waits there; round-robin: to the
    next in turn, as behind a plain balancer."""
    prefix_aware_dispatch: Annotated[bool, _cluster()] = True
    """With prefix caching and soonest: requests go where the KV of their beginning lies, unless
    that instance has much more to do than another."""
    pipeline_stages: Annotated[int, _cluster("--pipeline-parallel-size", least=1, most=64)] = 1
    """Instances that share one copy of the weights from the start, and for good: for comparison,
    with an --overload-policy that drops nothing."""
    topology: Annotated[str | None, _cluster(before="device")] = None
    """TOML or JSON file that says on which host and in which rack each instance stands: groups
    merge within a host first, and layers come from the nearest that has them [all on one host]."""
    report_period_s: float = 0.1
    heartbeat_timeout_s: float = 10.0
    """An instance silent for this long is dead."""
    start_timeout_s: Annotated[float, _faults("--start-timeout", above=0)] = 300.0
    """Seconds until every instance must be ready.

    Model loading, and a first compilation of the kernels.
    """
    hang_timeout_s: Annotated[float, _faults("--hang-timeout", above=0)] = 60.0
    """Replace an instance whose loop stands still so many seconds (and ten longest steps).

    It beats, so it is not dead.
    """
    link_timeout_s: Annotated[float, _faults("--link-timeout", least=0.1)] = 4.0
    """Between hosts: a connection on which nothing comes for so many seconds is broken.

    Virtual machines and frozen containers commonly stand still for 1-3 s, which costs time only.
    """
    front_grace_s: Annotated[float, _faults("--front-grace", least=0)] = 30.0
    """Seconds that instances outlive this process, so that the same command, given again, serves
    without loading weights."""
    trace_out: Annotated[str | None, _faults()] = None
    """Write steps, transfers and transitions there at the end (for Perfetto)."""
    check_invariants: Annotated[bool, _faults()] = False
    """Check every part's invariants whenever idle (slow; for the hunt of bugs)."""

    @property
    def fewest_instances(self) -> int:
        """To which the cluster shrinks by itself."""
        return self.num_instances if self.min_instances is None else self.min_instances

    def check_size(self) -> None:
        """Raise ConfigError for numbers of instances, or places of them, that exclude each other.

        Called for the whole configuration, not when this part of it is made.
        """
        num, fewest, most = self.num_instances, self.fewest_instances, self.max_instances
        if max(num, most or 0) > MAX_INSTANCES:
            raise ConfigError(
                f"a cluster has at most {MAX_INSTANCES} instances, not {max(num, most or 0)}: one "
                "controller looks at all of them for each request"
            )
        if (self.min_instances or most) and self.pipeline_stages > 1:
            raise ConfigError(
                "pipelines from the start have a fixed size: leave --min-instances and "
                "--max-instances out"
            )
        if fewest > num:
            raise ConfigError(f"--min-instances {fewest} is more than --num-instances {num}")
        if most is not None and most < num:
            raise ConfigError(f"--max-instances {most} is less than --num-instances {num}")
        if fewest < num and most is None:
            raise ConfigError(
                "--min-instances is for a cluster that grows and shrinks: give --max-instances too"
            )
        of_ray = {
            "--ray-address": self.ray_address,
            "--ray-name": self.ray_name,
            "--ray-autoscaling": self.ray_autoscaling,
        }
        for flag, value in of_ray.items():
            if value and self.launcher != "ray":
                raise ConfigError(f"{flag} goes with --cluster ray")
        if self.topology is not None and self.launcher == "ray":
            raise ConfigError(
                "--topology is for a cluster without Ray: its nodes say by labels where they are "
                "(`ray start --labels rack=left,link-gbps=25`)"
            )
