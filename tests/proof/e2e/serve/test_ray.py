# SPDX-License-Identifier: Apache-2.0
"""One server over the two hosts of a Ray cluster: a stage on each, its ranks inside."""

import importlib.util
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import closing

import pytest
from test_hosts import BOTH, answers

from proof.e2e.running import hosts
from proof.e2e.running.hosts import Host
from proof.e2e.running.server import Server, server_environment
from proof.e2e.running.serving import Engines
from stack.core.process import Runner

pytestmark = [pytest.mark.newest, pytest.mark.full]

PORT = 6379
RAY = (sys.executable, "-m", "ray.scripts.scripts", "start", "--block")
FLAGS = (
    *("--num-gpus", "2", "--num-cpus", "2"),
    *("--object-store-memory", str(100 << 20), "--disable-usage-stats"),
)
STARTED, SAYS = 90.0, "Ray runtime started."
"""Seconds until a host must be in the cluster, and what Ray then prints."""


class Cluster:
    """Two hosts and what Ray runs on them."""

    def __init__(self, engines: Engines, release: str, pair: list[Host]) -> None:
        self.pair = pair
        self.address = f"{pair[0].address}:{PORT}"
        self._engines, self._release, self._runner = engines, release, Runner()
        own = ("--port", str(PORT), "--temp-dir", str(pair[0].temporary))
        self._start(pair[0], "--head", "--include-dashboard", "false", *own)
        self._start(pair[1], "--address", self.address)

    def _start(self, host: Host, *flags: str) -> None:
        log = self._engines.work / f"ray-{host.address}.log"
        own = ("--node-ip-address", host.address)
        env = server_environment(self._engines, self._release) | host.environment()
        # Without dpctl Ray takes the GPUs for NVIDIA's, and this would hide all.
        del env["CUDA_VISIBLE_DEVICES"]
        process = self._runner.start(
            host.inside(*RAY, *flags, *own, *FLAGS),
            cwd=self._engines.work,
            env=env,
            stdin=subprocess.DEVNULL,
            stdout=log.open("w"),
            stderr=subprocess.STDOUT,
        )
        limit = time.monotonic() + STARTED
        while SAYS not in log.read_text() and process.poll() is None:
            assert time.monotonic() < limit, log.read_text()
            time.sleep(0.2)
        assert process.poll() is None, log.read_text()

    def close(self) -> None:
        self._runner.stop()


@pytest.fixture
def cluster(engines: Engines, release: str) -> Iterator[Cluster]:
    if importlib.util.find_spec("ray") is None:
        pytest.skip("there is no ray: run this by `tox -e hosts`")
    if reason := hosts.lacking():
        pytest.skip(f"no network namespaces here: {reason}")
    with (
        hosts.opened_hosts(2) as pair,
        closing(Cluster(engines, release, pair)) as started,
    ):
        yield started


@pytest.mark.shows("two hosts by Ray: PP 2, TP 2", "equal")
def test_two_hosts_of_a_cluster_answer_as_one(
    engines: Engines, cluster: Cluster, release: str
) -> None:
    with Server(
        engines,
        release,
        *BOTH,
        *("--distributed-executor-backend", "ray"),
        host=cluster.pair[0],
        staged=True,
        environment={"RAY_ADDRESS": cluster.address},
    ) as server:
        found = answers(server.wait())
    with Server(engines, release, *BOTH, staged=True) as one:
        assert found == answers(one.wait())
