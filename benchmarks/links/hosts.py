"""Hosts on one machine: network namespaces around a switch, each with its own address.

Needs root and iproute2. Nothing is left behind, whatever happens: a namespace lives as long as a
process that sleeps in it, and that dies with this one. The machine's own network is not touched:
the switch is a namespace too.

A link that is cut drops everything in silence, as a pulled plug does. It is done by sending to a
card that nobody has, so each direction of each pair can be cut alone.
"""

import ctypes
import os
import shutil
import signal
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import replace

from kunserve.cluster.processes.launch import InstanceOrder, LocalLauncher, LocalProcess
from kunserve.core.place import Place
from kunserve.transport.wire.network import FrontPlace

NETWORK = "10.77.0"
"""Addresses exist in the namespaces only."""
_PR_SET_PDEATHSIG = 1
_CLONE_NEWNET = 0x40000000
_NOBODY = "02:00:00:00:00:fe"
_QUEUE_BYTES = 1 << 20
"""Of a shaped link: about 8 ms at 1 Gbit/s, as a switch's port may have."""


def why_not() -> str | None:
    """Why hosts cannot be made here; None if they can."""
    for tool in ("ip", "tc", "unshare", "nsenter"):
        if shutil.which(tool) is None:
            return f"needs the command {tool} (packages iproute2 and util-linux)"
    probe = "ip link add probe0 type veth peer name probe1 && ip link add probe2 type bridge"
    found = subprocess.run(["unshare", "--net", "sh", "-c", probe], capture_output=True, text=True)
    if found.returncode == 0:
        return None
    return f"network namespaces are not allowed here: {found.stderr.strip()}"


def _die_with_parent() -> None:
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


class Host:
    """One namespace."""

    def __init__(self, name: str, address: str) -> None:
        self.name = name
        self.address = address
        # It says a letter once it is in its namespace.
        self._holder = subprocess.Popen(
            ["unshare", "--net", "sh", "-c", "echo; exec sleep infinity"],
            stdout=subprocess.PIPE,
            preexec_fn=_die_with_parent,
        )
        assert self._holder.stdout is not None
        self._holder.stdout.read(1)
        self._holder.stdout.close()

    @property
    def pid(self) -> int:
        """Of the process that keeps the namespace."""
        return self._holder.pid

    @property
    def within(self) -> list[str]:
        """What to put before a command that shall run on the host."""
        return ["nsenter", f"--net=/proc/{self.pid}/ns/net", "--"]

    def run(self, *command: str) -> None:
        """Run a command on the host; raises if it fails."""
        subprocess.run([*self.within, *command], check=True, capture_output=True)

    def close(self) -> None:
        """The namespace and its network cards vanish."""
        self._holder.kill()
        self._holder.wait()


class Hosts:
    """Some hosts and the switch between them."""

    def __init__(
        self, names: Sequence[str], gbps: float | None = None, delay_ms: float | None = None
    ) -> None:
        """Each host sends with ``gbps`` at most, and what it sends takes ``delay_ms`` longer.

        Raises RuntimeError where the kernel cannot delay (it has no ``netem``).
        """
        self._switch = Host("switch", "")
        self._switch.run("ip", "link", "add", "name", "switch", "type", "bridge")
        self._switch.run("ip", "link", "set", "switch", "up")
        self._hosts: dict[str, Host] = {}
        try:
            for number, name in enumerate(names, start=1):
                self._add(Host(name, f"{NETWORK}.{number}"), f"port{number}", gbps, delay_ms)
        except BaseException:
            self.close()
            raise

    def _add(self, host: Host, port: str, gbps: float | None, delay_ms: float | None) -> None:
        self._hosts[host.name] = host
        ends = ["ip", "link", "add", "name", port, "type", "veth", "peer", "name", "eth0"]
        self._switch.run(*ends, "netns", str(host.pid))
        self._switch.run("ip", "link", "set", port, "master", "switch", "up")
        host.run("ip", "link", "set", "lo", "up")
        host.run("ip", "address", "add", f"{host.address}/24", "dev", "eth0")
        host.run("ip", "link", "set", "eth0", "up")
        if gbps is not None:
            rate = ["rate", f"{gbps * 1000:g}mbit", "burst", "64kb", "limit", str(_QUEUE_BYTES)]
            host.run("tc", "qdisc", "add", "dev", "eth0", "root", "handle", "1:", "tbf", *rate)
        if delay_ms is not None:
            where = ["root"] if gbps is None else ["parent", "1:1"]
            delay = ["netem", "delay", f"{delay_ms:g}ms", "limit", "10000"]
            try:
                host.run("tc", "qdisc", "add", "dev", "eth0", *where, *delay)
            except subprocess.CalledProcessError as error:
                raise RuntimeError(f"this kernel cannot delay: {error.stderr.decode()}") from None

    def __getitem__(self, name: str) -> Host:
        return self._hosts[name]

    def cut(self, src: str, dst: str) -> None:
        """Nothing that ``src`` sends reaches ``dst`` from now on."""
        to, card = self._hosts[dst].address, ["lladdr", _NOBODY, "nud", "permanent"]
        self._hosts[src].run("ip", "neighbour", "replace", to, *card, "dev", "eth0")

    def heal(self, src: str, dst: str) -> None:
        """It reaches it again."""
        to = self._hosts[dst].address
        self._hosts[src].run("ip", "neighbour", "del", to, "dev", "eth0")

    def cut_off(self, name: str) -> None:
        """The host and all others do not reach each other any more."""
        for other in self._hosts:
            if other != name:
                self.cut(name, other)
                self.cut(other, name)

    def rejoin(self, name: str) -> None:
        """The opposite."""
        for other in self._hosts:
            if other != name:
                self.heal(name, other)
                self.heal(other, name)

    def close(self) -> None:
        """Nothing is left. Callable twice."""
        for host in (*self._hosts.values(), self._switch):
            host.close()

    def __enter__(self) -> "Hosts":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class NamespaceLauncher(LocalLauncher):
    """Each instance on its host. The front itself is on one of them."""

    def __init__(
        self,
        front_host: str,
        places: Mapping[int, tuple[int, str]],
        program: Sequence[str] | None = None,
        link_gbps: float | None = None,
    ) -> None:
        """``places``: by instance, the process that keeps its namespace, and its address there."""
        super().__init__(program)
        self.front_host = front_host
        self._places = places
        self._link_gbps = link_gbps
        self.unreachable: set[str] = set()
        """Hosts whose processes nobody can end now, as on a host that is cut off."""

    async def start(self, order: InstanceOrder) -> "_OnHost":
        """Start the process in the namespace of its host."""
        pid, host = self._places[order.instance_id]
        assert order.network is not None
        order = replace(
            order,
            network=replace(order.network, host=host),
            place=Place(host=host, link_gbps=self._link_gbps),
        )
        within = ["nsenter", f"--net=/proc/{pid}/ns/net", "--"]
        return _OnHost(LocalProcess(order, self._program, within), self, host)


class _OnHost:
    """Implements ``InstanceProcess``: a child whose host may be cut off."""

    public_key: str | None = None

    def __init__(self, process: LocalProcess, launcher: NamespaceLauncher, host: str) -> None:
        self._process = process
        self._launcher = launcher
        self._host = host
        self.pid = process.pid
        self.mark = process.mark

    @property
    def said(self) -> bytes:
        """See ``InstanceProcess``."""
        return self._process.said

    @property
    def exit_code(self) -> int | None:
        """See ``InstanceProcess``."""
        return self._process.exit_code

    async def wait(self) -> str:
        """See ``InstanceProcess``."""
        return await self._process.wait()

    def kill(self) -> None:
        """SIGKILL, if that reaches the host."""
        if self._host not in self._launcher.unreachable:
            self._process.kill()

    def follow(self, front: FrontPlace) -> None:
        """See ``InstanceProcess``."""
        self._process.follow(front)


def enter(pid: int) -> None:
    """Move this process into a host's namespace; before it has other threads."""
    libc = ctypes.CDLL(None, use_errno=True)
    with open(f"/proc/{pid}/ns/net") as namespace:
        if libc.setns(namespace.fileno(), _CLONE_NEWNET) != 0:
            raise OSError(ctypes.get_errno(), "setns")


def places_on(hosts: Hosts, names: Sequence[str]) -> list[tuple[int, str]]:
    """For ``NamespaceLauncher``: instance ``i`` on the i-th host of ``names``."""
    return [(hosts[name].pid, hosts[name].address) for name in names]


def environment() -> dict[str, str]:
    """For processes on hosts: no proxy of the machine's own network."""
    return {name: value for name, value in os.environ.items() if not name.lower().endswith("proxy")}
