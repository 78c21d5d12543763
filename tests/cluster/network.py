"""Hosts in network namespaces: one switch in a namespace of its own, a cable to each host, and one to the tests."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from collections.abc import Sequence
from pathlib import Path

import psutil


def run(*words: str) -> str:
    """A program's output. Raises: CalledProcessError."""
    return subprocess.run(words, check=True, capture_output=True, text=True).stdout


class Network:
    """Up to 200 hosts on one switch, with names and addresses that no other run has."""

    def __init__(self) -> None:
        numbers = (number % 200 for number in range(os.getpid(), os.getpid() + 200))
        number = next(one for one in numbers if subprocess.call(["ip", "netns", "add", f"mfn{one}s"]) == 0)
        self._prefix = f"mfn{number}"
        self._net = f"10.77.{number}"
        self._switch = f"{self._prefix}s"
        run("ip", "-n", self._switch, "link", "add", "br0", "type", "bridge")
        run("ip", "-n", self._switch, "link", "set", "br0", "up")
        self.hosts: list[Machine] = []
        root = f"{self._prefix}t"
        run("ip", "link", "add", root, "type", "veth", "peer", "name", "pt", "netns", self._switch)
        run("ip", "-n", self._switch, "link", "set", "pt", "master", "br0", "up")
        run("ip", "addr", "add", f"{self._net}.1/24", "dev", root)
        run("ip", "link", "set", root, "up")

    def host(self, name: str, hidden: Sequence[Path] = ()) -> Machine:
        """A new host. hidden: folders of this machine that it sees empty."""
        number = len(self.hosts) + 11
        space = f"{self._prefix}h{number}"
        run("ip", "netns", "add", space)
        self._plug(str(number), "name", "eth0", "netns", space)
        address = f"{self._net}.{number}"
        for words in (
            ("addr", "add", f"{address}/24", "dev", "eth0"),
            ("link", "set", "eth0", "up"),
            ("link", "set", "lo", "up"),
        ):
            run("ip", "-n", space, *words)
        made = Machine(name, space, address, hidden)
        self.hosts.append(made)
        return made

    def _plug(self, number: str, *peer: str) -> None:
        run("ip", "-n", self._switch, "link", "add", f"p{number}", "type", "veth", "peer", *peer)
        run("ip", "-n", self._switch, "link", "set", f"p{number}", "master", "br0", "up")

    def unplug(self, host: Machine) -> None:
        """The host falls silent: nothing reaches it, nothing leaves it, no connection is closed."""
        run("ip", "-n", self._switch, "link", "set", f"p{host.number}", "down")

    def plug(self, host: Machine) -> None:
        run("ip", "-n", self._switch, "link", "set", f"p{host.number}", "up")

    def close(self) -> None:
        for host in self.hosts:
            host.close()
        subprocess.run(["ip", "netns", "del", self._switch], check=False)


class Machine:
    """One host: namespaces of network, mounts and host name, held by a process that sleeps."""

    def __init__(self, name: str, space: str, address: str, hidden: Sequence[Path]) -> None:
        self.name, self.address, self._space = name, address, space
        self.number = address.rpartition(".")[2]
        hide = " ".join(f"mount -t tmpfs none {folder} &&" for folder in hidden)
        script = f"hostname {name} && mount --make-rprivate / && {hide} echo ready && exec sleep infinity"
        self._anchor = subprocess.Popen(
            ["nsenter", f"--net=/run/netns/{space}", "unshare", "--mount", "--uts", "sh", "-c", script],
            stdout=subprocess.PIPE, text=True,
        )  # fmt: skip
        assert self._anchor.stdout is not None
        assert self._anchor.stdout.readline() == "ready\n"

    def command(self, *words: str) -> list[str]:
        """The words that run a command on this host."""
        return ["nsenter", "-t", str(self._anchor.pid), "-n", "-m", "-u", "--", *words]

    def processes(self) -> list[psutil.Process]:
        """All that runs here: what sees this host's mounts or its network, but the anchor."""
        ours = {_space_of(self._anchor.pid, kind) for kind in ("mnt", "net")}
        return [
            one
            for one in psutil.process_iter()
            if one.pid != self._anchor.pid and {_space_of(one.pid, kind) for kind in ("mnt", "net")} & ours
        ]

    def kill(self) -> int:
        """End every process at once, as a power cut does; the kernel closes their connections. How many."""
        killed: set[int] = set()
        while found := [one for one in self.processes() if one.status() != psutil.STATUS_ZOMBIE]:
            for one in found:
                try:
                    one.send_signal(signal.SIGKILL)
                except psutil.NoSuchProcess:
                    continue
                killed.add(one.pid)
            time.sleep(0.02)
        return len(killed)

    def close(self) -> None:
        self.kill()
        self._anchor.kill()
        self._anchor.communicate()
        subprocess.run(["ip", "netns", "del", self._space], check=False)


def _space_of(pid: int, kind: str) -> str:
    try:
        return os.readlink(f"/proc/{pid}/ns/{kind}")
    except OSError:
        return f"{pid} is gone"
