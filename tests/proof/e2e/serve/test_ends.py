# SPDX-License-Identifier: Apache-2.0
"""How a server of two ranks ends: killed, and by SIGTERM while it answers."""

import os
import signal
import time
from concurrent.futures import ThreadPoolExecutor

import psutil
import pytest
from test_faults import NEVER, RUNNING, ask, eventually, outcome

from proof.e2e.running import container
from proof.e2e.running.container import Container
from proof.e2e.running.server import Server
from proof.e2e.running.serving import Engines

pytestmark = [pytest.mark.newest, pytest.mark.full]

KEY = "sesame"
TWO = ("--tensor-parallel-size", "2")
HOLDERS = ("EngineCore", "Worker")
"""The processes that have the devices' memory."""
DRAINS, GRACE = 40, 60
"""Seconds that running requests have, and an orchestrator gives the container: twice
those of `serve.sh`, because ranks that share a processor take seconds a step."""
SHORT = 6
"""New tokens of an answer that comes in time."""
AT_ONCE = 5.0
"""Seconds within which a kernel ends what a namespace holds."""
STAYS = 15.0
"""Seconds after which what is left over counts as left for ever."""


@pytest.fixture(autouse=True)
def namespaces() -> None:
    if reason := container.lacking():
        pytest.skip(f"no PID namespaces here: {reason}")


def holders(first: psutil.Process) -> list[psutil.Process]:
    below = first.children(recursive=True)
    return [process for process in below if holds(process)]


def holds(process: psutil.Process) -> bool:
    try:
        return any(name in " ".join(process.cmdline()) for name in HOLDERS)
    except psutil.NoSuchProcess:
        return False


def alive(process: psutil.Process) -> bool:
    """Whether it holds memory: one that ended may wait for its parent to ask."""
    try:
        return process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


@pytest.mark.shows("a killed `vllm serve` without a container", "failed")
def test_a_killed_server_alone_leaves_its_engine(
    engines: Engines, release: str
) -> None:
    """Upstream's: the engine does not see that nobody asks it any more. Where this
    fails, docs/deploying.md need not ask for a container or a control group."""
    with Server(engines, release, *TWO) as server:
        server.wait()
        held = holders(psutil.Process(server.process.pid))
        assert len(held) == 3, server.log
        os.kill(server.process.pid, signal.SIGKILL)
        left = psutil.wait_procs(held, timeout=STAYS)[1]
        assert len(left) == 3, server.log


@pytest.mark.shows("a killed `vllm serve` as a container's first process", "equal")
def test_a_killed_server_in_a_container_leaves_nothing(
    engines: Engines, release: str
) -> None:
    with Container(engines, release, *TWO, key=KEY) as server:
        server.wait()
        inside = [server.first, *server.first.children(recursive=True)]
        assert len(holders(server.first)) == 3, server.log
        os.kill(server.first.pid, signal.SIGKILL)
        assert psutil.wait_procs(inside, timeout=AT_ONCE)[1] == []


@pytest.mark.shows("SIGTERM under load, as the images answer it", "equal")
def test_sigterm_under_load(engines: Engines, release: str) -> None:
    """Answers that fit into the time come; the devices are free after it; what clients
    still wait for ends with the orchestrator's SIGKILL. A new request gets nothing."""
    drains = ("--shutdown-timeout", str(DRAINS))
    with Container(engines, release, *TWO, *drains, key=KEY) as server:
        server.wait()
        first, held = server.first, holders(server.first)
        with ThreadPoolExecutor(6) as clients:
            endless = [clients.submit(ask, server, NEVER) for _ in range(3)]
            short = [clients.submit(ask, server, SHORT) for _ in range(2)]
            assert eventually(lambda: server.metric(RUNNING) == 5), server.log
            began = time.monotonic()
            first.send_signal(signal.SIGTERM)
            assert eventually(lambda: "draining" in server.log.lower()), server.log
            late = outcome(clients.submit(ask, server, SHORT))
            assert all(future.result(DRAINS) for future in short), server.log
            answered = time.monotonic() - began
            assert eventually(lambda: not any(map(alive, held)), GRACE), server.log
            freed = time.monotonic() - began
            assert answered < DRAINS <= freed < GRACE
            time.sleep(max(0.0, GRACE - freed))
            waiting = sum(not future.done() for future in endless)
            lives = first.is_running()
            print(f"answered {answered:.0f} s, freed {freed:.0f} s, {waiting} wait")
            if lives:
                first.kill()
            ends = {outcome(future) for future in endless}
        assert (lives, waiting, ends) == (True, 3, {"connection"}), server.log
        # Upstream's: status 200, no text, "abort" for a reason; or no answer, where its
        # listener closes first, as up to v0.26.0.
        assert late in ("nothing", "connection"), server.log
