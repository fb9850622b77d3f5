# SPDX-License-Identifier: Apache-2.0
"""One server over two hosts of a Ray cluster, as vLLM's `--distributed-executor-backend
ray` starts it: each stage on a host, and its ranks inside."""

import subprocess
import sys
import time
from collections.abc import Iterator

import pytest
from test_hosts import BOTH, answers

from e2e import hosts
from e2e.hosts import Host
from e2e.server import Server, environment
from e2e.serving import Engines
from xpustack.core.process import Runner

pytestmark = [pytest.mark.newest, pytest.mark.full]

PORT = 6379
RAY = (sys.executable, "-m", "ray.scripts.scripts", "start", "--block")
STARTED = 90.0
"""Seconds until a cluster must have both hosts."""


def start(runner: Runner, engines: Engines, release: str, host: Host, *own: str):
    log = engines.work / f"ray-{host.address}.log"
    return log, runner.start(
        host.inside(
            *RAY,
            *own,
            *("--node-ip-address", host.address, "--num-gpus", "2"),
            *("--num-cpus", "2", "--object-store-memory", str(100 << 20)),
            "--disable-usage-stats",
        ),
        cwd=engines.work,
        env=environment(engines, release) | host.environment(),
        stdin=subprocess.DEVNULL,
        stdout=log.open("w"),
        stderr=subprocess.STDOUT,
    )


@pytest.fixture
def cluster(engines: Engines, release: str) -> Iterator[list[Host]]:
    if reason := hosts.lacking():
        pytest.skip(f"no network namespaces here: {reason}")
    runner = Runner()
    with hosts.opened_hosts(2) as pair:
        head = ("--head", "--port", str(PORT), "--include-dashboard", "false")
        temporary = ("--temp-dir", str(pair[0].temporary))
        logs = [start(runner, engines, release, pair[0], *head, *temporary)]
        time.sleep(8)
        address = f"{pair[0].address}:{PORT}"
        logs.append(start(runner, engines, release, pair[1], "--address", address))
        time.sleep(8)
        for log, process in logs:
            print(process.poll(), log.read_text()[-1500:])
        yield pair
        runner.stop()


@pytest.mark.shows("two hosts by Ray: PP 2, TP 2", "equal")
def test_two_hosts_of_a_cluster_answer_as_one(
    engines: Engines, cluster: list[Host], release: str
) -> None:
    with Server(
        engines,
        release,
        *BOTH,
        "--distributed-executor-backend",
        "ray",
        host=cluster[0],
        staged=True,
        RAY_ADDRESS=f"{cluster[0].address}:{PORT}",
    ) as server:
        got = answers(server.wait())
        print(server.log[-3000:])
    with Server(engines, release, *BOTH, staged=True) as one:
        assert answers(one.wait()) == got
