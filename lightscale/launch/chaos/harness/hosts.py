"""Hosts of a run: this machine, or network namespaces of it with names, addresses and links of their own.

    node-a: fabric ──┐
                     ├ bridge, in a third namespace: the switch
    node-b: fabric ──┘

They share the file systems and the process numbers of this machine, and nothing of its networks.
"""

import os
import secrets
import shutil
import signal
import socket
import string
import subprocess
import sys
import zlib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path

from lightscale.errors import UserError
from lightscale.parallel.rendezvous.sockets import KEY_VARIABLE, LOOPBACK
from lightscale.runs.job_environment import node_name

MOST_HOSTS = len(string.ascii_lowercase)
_PROGRAMS = ("ip", "tc", "unshare")
# A hardware address that nobody has.
_NOBODY = "02:00:00:00:00:fe"


@dataclass(frozen=True, kw_only=True)
class Host:
    """A host; of this class itself, this machine."""

    name: str
    address: str
    """Where the others reach it."""
    variables: Mapping[str, str] = field(default_factory=dict)
    """Of the environment of launchers and ranks."""

    def inside(self, command: Sequence[str]) -> list[str]:
        """The command that runs `command` there, as one process."""
        return [*command]


@dataclass(frozen=True, kw_only=True)
class NamespaceHost(Host):
    """A host that is a network namespace, whose link can be down, slow, or lose what is sent."""

    namespace: str
    switch: str

    def inside(self, command: Sequence[str]) -> list[str]:
        """See `Host`; all of these programs become the next one."""
        words = ["unshare", "--uts", "sh", "-c", 'hostname "$0"; exec "$@"', self.name, *command]
        return ["ip", "netns", "exec", self.namespace, *words]

    def processes(self) -> list[int]:
        """Ids of all processes there."""
        return [int(number) for number in _run("ip", "netns", "pids", self.namespace).split()]

    def kill_processes(self) -> None:
        """End all processes there."""
        # One that is just starting another may leave it behind.
        while found := self.processes():
            for process in found:
                with suppress(ProcessLookupError):
                    os.kill(process, signal.SIGKILL)

    def set_link(self, *, is_up: bool) -> None:
        """Its link, at the switch."""
        _run("ip", "-n", self.switch, "link", "set", self.name, "up" if is_up else "down")

    def lose(self, others: Sequence[Host], *, is_on: bool) -> None:
        """Packets to `others` are lost, those from them are not: they go to a hardware address that nobody has."""
        how = ["lladdr", _NOBODY, "nud", "permanent"] if is_on else []
        for other in others:
            entry = [other.address, "dev", "fabric", *how]
            _run("ip", "-n", self.namespace, "neigh", "replace" if is_on else "del", *entry)

    def slow(self, rate_mbit: float | None) -> None:
        """Send at most so many Mbit/s, and drop what waits for more than 50 ms; None: as fast as it goes."""
        # No netem, which could delay and drop at random as well: many kernels are built without it.
        shape = [] if rate_mbit is None else ["tbf", "rate", f"{rate_mbit:.3f}mbit", "burst", "64kb", "latency", "50ms"]
        action = "del" if rate_mbit is None else "replace"
        _run("tc", "-n", self.namespace, "qdisc", action, "dev", "fabric", "root", *shape)


def this_machine() -> Host:
    """The host of a run on one host."""
    return Host(name=node_name() or socket.gethostname(), address=LOOPBACK)


def missing_for_hosts() -> list[str]:
    """What this machine lacks for hosts that are network namespaces."""
    if not sys.platform.startswith("linux"):
        return ["Linux"]
    # Those for root, whatever PATH has: they are found where `ip` is.
    missing = [name for name in _PROGRAMS if shutil.which(name) is None]
    return [*([] if os.geteuid() == 0 else ["root"]), *missing]


def stem_of(directory: Path) -> str:
    """What the names of the namespaces for `directory` begin with."""
    return f"ls{zlib.crc32(str(directory.absolute()).encode()):08x}"


@contextmanager
def namespace_hosts(stem: str, number: int) -> Iterator[tuple[NamespaceHost, ...]]:
    """Make `number` hosts, whose namespaces are named after `stem`, and remove them with all of their processes.

    Those that a killed process of the same stem has left are removed first. Raises UserError where the kernel has no
    namespaces or bridges.
    """
    key, switch = {KEY_VARIABLE: secrets.token_hex()}, f"{stem}-switch"
    hosts = tuple(
        NamespaceHost(
            name=f"node-{letter}",
            address=f"10.231.0.{index}",
            variables=key,
            namespace=f"{stem}-{letter}",
            switch=switch,
        )
        for index, letter in enumerate(string.ascii_lowercase[:number], start=1)
    )
    _remove(stem)
    try:
        try:
            _connect(hosts, switch)
        except subprocess.CalledProcessError as error:
            raise UserError(
                f"{number} hosts on this machine need network namespaces, bridges and tc's tbf: "
                f"{' '.join(error.cmd)}: {error.stderr.strip()}"
            ) from None
        yield hosts
    finally:
        _remove(stem)


def _connect(hosts: Sequence[NamespaceHost], switch: str) -> None:
    _run("ip", "netns", "add", switch)
    _run("ip", "-n", switch, "link", "add", "bridge", "type", "bridge")
    _run("ip", "-n", switch, "link", "set", "bridge", "up")
    for host in hosts:
        _run("ip", "netns", "add", host.namespace)
        inside = ["ip", "-n", host.namespace]
        _run(*inside, "link", "set", "lo", "up")
        _run(*inside, "link", "add", "fabric", "type", "veth", "peer", host.name, "netns", switch)
        _run(*inside, "address", "add", f"{host.address}/24", "dev", "fabric")
        _run(*inside, "link", "set", "fabric", "up")
        _run("ip", "-n", switch, "link", "set", host.name, "master", "bridge", "up")
        # A kernel without tbf shows it here, before anything is written.
        host.slow(1000.0)
        host.slow(None)


def _remove(stem: str) -> None:
    # Without `ip` there are none, and nothing can have been made.
    for line in _run("ip", "netns", "list").splitlines():
        # NAME, or NAME (id: NUMBER)
        name = line.split()[0]
        if name.startswith(f"{stem}-"):
            NamespaceHost(name=name, address="", namespace=name, switch=name).kill_processes()
            _run("ip", "netns", "delete", name)


def _run(*words: str) -> str:
    return subprocess.run(words, check=True, capture_output=True, text=True, timeout=60).stdout
