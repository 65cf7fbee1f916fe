"""The cluster grows and shrinks: places for instances, as the controller or an operator has it."""

import logging
from collections.abc import Callable

from kunserve.cluster.processes.launch import FakeSettings, Launcher, startup_error
from kunserve.cluster.processes.processes import FAILED_STARTS, Death, Processes
from kunserve.control.cluster.controller import Controller
from kunserve.core.config.cluster import MAX_INSTANCES
from kunserve.core.errors import ConfigError, InvalidRequest
from kunserve.core.ids import InstanceId
from kunserve.core.messages import Shutdown
from kunserve.core.plan import Plan
from kunserve.transport.wire.channel import FrontChannel

logger = logging.getLogger(__name__)


class SizeDriver:
    """Carries out ``ScaleUp`` and ``ScaleDown``, and answers who asks for a size."""

    def __init__(
        self,
        plan: Plan,
        fake: FakeSettings | None,
        controller: Controller,
        processes: Processes,
        launcher: Launcher,
        channel: FrontChannel,
        now_s: Callable[[], float],
    ) -> None:
        self._plan = plan
        self._fake = fake
        self._controller = controller
        self._processes = processes
        self._launcher = launcher
        self._channel = channel
        self._now_s = now_s

    def resize(self, num_instances: int) -> str:
        """An operator asks for so many; what is being done. Raises InvalidRequest."""
        size = self._controller.size
        self._check(num_instances, len(self._processes.ids))
        self._controller.resize(num_instances)
        before = size.wanted
        if num_instances == before:
            return f"{num_instances} instances are wanted already"
        verb = "start" if num_instances > before else "leave once their requests are gone"
        return f"from {before} to {num_instances} instances: {abs(num_instances - before)} {verb}"

    def _check(self, num_instances: int, num_places: int) -> None:
        config = self._plan.config.cluster
        most = config.max_instances or MAX_INSTANCES
        least = config.min_instances or 1
        if config.pipeline_stages > 1:
            raise InvalidRequest(
                "Pipelines from the start have a fixed size: the server has "
                "--pipeline-parallel-size.",
                "num_instances",
            )
        if not least <= num_instances <= most:
            raise InvalidRequest(
                f"`num_instances` must be from {least} to {most} "
                f"(--min-instances, --max-instances), not {num_instances}.",
                "num_instances",
            )
        if num_instances > num_places:
            try:
                self._check_room(num_instances - num_places)
            except ConfigError as error:
                raise InvalidRequest(
                    f"There is no room for {num_instances} instances: {error}", "num_instances"
                ) from None

    def _check_room(self, num_more: int) -> None:
        """Raise ConfigError when so many do not fit beside those that there are."""
        pids = dict(self._processes.pids)
        num_unborn = sum(one not in pids for one in self._processes.ids)
        num_more += num_unborn
        self._launcher.check_growth(self._plan, self._fake, num_more, pids.values())

    def _free_id(self) -> InstanceId:
        """The lowest: so names in metrics and files are used again, and GPUs taken in turn."""
        number = 0
        while InstanceId(number) in self._processes:
            number += 1
        return InstanceId(number)

    def grow(self, reason: str) -> None:
        """Start an instance more, or tell the controller why not."""
        try:
            self._check_room(1)
        except ConfigError as error:
            logger.warning("not grown wanted_because=%r reason=%r", reason, str(error))
            self._controller.growth_refused(str(error), self._now_s())
            return
        instance_id = self._free_id()
        logger.info("cluster grows instance=%d reason=%r", instance_id, reason)
        self._processes.add(instance_id)

    def shrink(self, instance_id: InstanceId) -> None:
        """The instance serves nobody, or has died: it leaves, and what it still says is ignored."""
        logger.info("cluster shrinks instance=%d", instance_id)
        self._processes.remove(instance_id, lambda: self._channel.send(instance_id, Shutdown()))
        self._channel.forget(instance_id)

    def gives_up(self, death: Death) -> bool:
        """Whether the cluster does without an instance that it was to grow by.

        One that said why it cannot start will say it again. Others are tried once more.
        """
        if not death.is_new or not (death.said or death.num_failed_starts >= FAILED_STARTS):
            return False
        why = str(startup_error(death.instance_id, death.reason, death.said))
        logger.warning("not grown reason=%r", why)
        self._controller.growth_refused(why, self._now_s())
        return True
