# SPDX-License-Identifier: Apache-2.0
"""Hosts on one machine: each has a network address, shared memory, temporary files and
processes of its own, in Linux namespaces, and reaches the others and the machine by a
switch."""

import os
import shutil
import subprocess
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

import psutil

from stack.core.process import Runner, clean_environment

NETWORK = "198.18"
"""Addresses that are kept for tests between devices (RFC 2544)."""
PORT = "lan0"
"""The network interface of each host."""
PROGRAMS = ("ip", "nsenter", "unshare")
STARTED = 20.0
"""Seconds until a namespace must be there."""


@dataclass(frozen=True)
class Host:
    """A host: its address, the process that is the first of its own, and the folder for
    temporary files, in which each host sees its own."""

    address: str
    init: int
    temporary: Path

    def inside(self, *command: str) -> list[str]:
        """`command`, to be run on the host."""
        spaces = ("--net", "--mount", "--pid")
        return ["nsenter", "--target", str(self.init), *spaces, *command]

    def environment(self) -> dict[str, str]:
        """What vLLM and gloo must be told of the network."""
        return {
            "GLOO_SOCKET_IFNAME": PORT,
            "TMPDIR": str(self.temporary),
            "VLLM_HOST_IP": self.address,
        }

    def unplug(self) -> None:
        """Take the host off the network: nobody is told, as by a pulled cable."""
        command(*self.inside("ip", "link", "set", PORT, "down"))

    def crash(self) -> None:
        """End all processes of the host at once, and its network."""
        os.kill(self.init, 9)


def command(*words: str) -> None:
    done = subprocess.run(words, capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(f"{' '.join(words)}: {done.stderr.strip()}")


def lacking() -> str:
    """Why this machine cannot have hosts; empty if it can."""
    absent = [name for name in PROGRAMS if shutil.which(name) is None]
    if absent:
        return f"no program {', '.join(absent)}"
    tried = subprocess.run(
        ["unshare", "--net", "--mount", "--pid", "--fork", "ip", "link"],
        capture_output=True,
        text=True,
    )
    return tried.stderr.strip() if tried.returncode else ""


def started(runner: Runner, temporary: Path) -> int:
    """A process with namespaces of its own, which end with it."""
    spaces = ("--net", "--mount", "--pid", "--mount-proc")
    own = ("/dev/shm", str(temporary))
    mounts = [f"mount -t tmpfs tmpfs {folder}" for folder in own]
    shell = " && ".join([*mounts, "exec sleep infinity"])
    outer = runner.start(
        ["unshare", *spaces, "--fork", "--kill-child", "sh", "-c", shell],
        cwd=Path("/"),
        env=clean_environment(),
        stdin=subprocess.DEVNULL,
    )
    limit = time.monotonic() + STARTED
    while time.monotonic() < limit and outer.poll() is None:
        for child in psutil.Process(outer.pid).children():
            if child.name() == "sleep":
                return int(child.pid)
        time.sleep(0.02)
    raise RuntimeError(f"no namespaces: unshare ended with {outer.poll()}")


@contextmanager
def opened_hosts(count: int) -> Iterator[list[Host]]:
    """Hosts on one network with this machine, which can ask their servers."""
    runner = Runner()
    # Sockets lie in it, whose names must be short.
    temporary = Path(tempfile.mkdtemp(prefix="e2e-"))
    network = f"{NETWORK}.{os.getpid() % 256}"
    cable = f"e2e{os.getpid()}"
    with ExitStack() as stack:
        stack.callback(temporary.rmdir)
        stack.callback(runner.stop)
        switch = started(runner, temporary)
        in_switch = ("nsenter", "--target", str(switch), "--net", "ip")
        command(*in_switch, "link", "add", "switch", "type", "bridge")
        command(*in_switch, "link", "set", "switch", "up")
        peer = ("peer", "p1", "netns", str(switch))
        command("ip", "link", "add", cable, "type", "veth", *peer)
        # Its name is taken until the kernel has cleared the switch away.
        stack.callback(command, "ip", "link", "delete", cable)
        command("ip", "address", "add", f"{network}.1/24", "dev", cable)
        command("ip", "link", "set", cable, "up")
        command(*in_switch, "link", "set", "p1", "master", "switch", "up")
        hosts = []
        for number in range(2, 2 + count):
            init = started(runner, temporary)
            host = Host(f"{network}.{number}", init, temporary)
            ip = host.inside("ip")
            peer = ("peer", f"p{number}", "netns", str(switch))
            command(*ip, "link", "set", "lo", "up")
            own = (PORT, "netns", str(init))
            command("ip", "link", "add", *own, "type", "veth", *peer)
            command(*ip, "address", "add", f"{host.address}/24", "dev", PORT)
            command(*ip, "link", "set", PORT, "up")
            command(*in_switch, "link", "set", f"p{number}", "master", "switch", "up")
            hosts.append(host)
        yield hosts
