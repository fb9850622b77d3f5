# SPDX-License-Identifier: Apache-2.0
"""Servers and clients that end when they should not."""

import os
import signal
import socket
import subprocess
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor

import openai
import psutil
import pytest

from proof.e2e.checkpoints.checkpoint import CHOSEN
from proof.e2e.running.server import MODEL, Server
from proof.e2e.running.serving import Engines
from stack.base.releases import load

pytestmark = pytest.mark.newest

PATIENCE = 30.0
"""Seconds until a fault must be seen."""
SOME, NEVER = 16, 900
"""New tokens of an answer that comes, and of one that no test waits for."""
RUNNING = "vllm:num_requests_running"
QUEUE = 6
"""Requests that a server may have where the release can limit them."""
LIMITED = "--max-num-queued-reqs"
HOST_EXPERTS = ("--moe-expert-cache-size", str(CHOSEN))


def ask(server: Server, new: int) -> str:
    answer = server.client.completions.create(
        model=MODEL,
        prompt=[5, 6, 7],
        max_tokens=new,
        temperature=0.0,
        extra_body={"ignore_eos": True},
    )
    return answer.choices[0].text


def eventually(is_so: Callable[[], bool], seconds: float = PATIENCE) -> bool:
    limit = time.monotonic() + seconds
    while not is_so():
        if time.monotonic() > limit:
            return False
        time.sleep(0.1)
    return True


def outcome(future: Future[str]) -> str:
    """How a request ended: by its text's name, or by the client's name for an error."""
    try:
        return "text" if future.result(timeout=PATIENCE) else "nothing"
    except openai.APIStatusError as error:
        return str(error.status_code)
    except openai.APIConnectionError:
        return "connection"


def check_all_gone(server: Server, below: list[psutil.Process]) -> None:
    left = psutil.wait_procs(below, timeout=PATIENCE)[1]
    assert not left, f"left over: {left}\n{server.log}"


def shares_its_port(server: Server) -> bool:
    """Whether it lets another process of the same user listen where it does."""
    with socket.socket() as other:
        other.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        try:
            other.bind(("", server.port))
        except OSError:
            return False
        return True


@pytest.mark.shows("a client that hangs up", "equal")
def test_a_client_that_hangs_up_frees_its_place(server: Server) -> None:
    before = ask(server, 4)
    stream = server.client.completions.create(
        model=MODEL, prompt=[5, 6, 7], max_tokens=NEVER, temperature=0.0, stream=True
    )
    next(iter(stream))
    assert server.metric(RUNNING) == 1
    stream.close()
    assert eventually(lambda: server.metric(RUNNING) == 0), server.log
    assert ask(server, 4) == before


@pytest.mark.shows("a second server on the same port", "refused")
@pytest.mark.full
def test_a_second_server_on_the_same_port_ends(
    engines: Engines,
    server: Server,
    release: str,
    request: pytest.FixtureRequest,
) -> None:
    if shares_its_port(server):
        reason = "two servers share a port, and requests go to either (vllm#39762)"
        timeout = subprocess.TimeoutExpired
        mark = pytest.mark.xfail(reason=reason, raises=timeout, strict=True)
        request.applymarker(mark)
    with Server(engines, release, port=server.port) as second:
        assert second.process.wait(PATIENCE * 2) not in (0, None)
        assert "Address already in use" in second.log, second.log
    assert server.get("/health") == 200


@pytest.mark.shows("more requests than the queue takes", "refused")
@pytest.mark.full
def test_a_full_queue_refuses_and_sigterm_waits_for_answers(
    engines: Engines, release: str
) -> None:
    """An answer that takes longer than --shutdown-timeout never comes, and the server
    does not end while its client waits (vllm#36964)."""
    site = engines.installed(load(engines.project)[release], patched=True)
    if LIMITED not in (site / "vllm/engine/arg_utils.py").read_text():
        pytest.skip(f"{release} has no {LIMITED}")
    flags = (LIMITED, str(QUEUE), "--shutdown-timeout", str(int(PATIENCE)))
    with Server(engines, release, *flags) as server:
        server.wait()
        below = server.children()
        with ThreadPoolExecutor(2 * QUEUE) as clients:
            asked = [clients.submit(ask, server, SOME) for _ in range(2 * QUEUE)]
            assert eventually(lambda: server.metric(RUNNING) == QUEUE)
            refused = [outcome(future) for future in asked if future.done()]
            assert refused == ["503"] * QUEUE, server.log
            server.process.send_signal(signal.SIGTERM)
            ends = [outcome(future) for future in asked]
        assert sorted(ends) == ["503"] * QUEUE + ["text"] * QUEUE, server.log
        assert server.process.wait(PATIENCE) == 0, server.log
        check_all_gone(server, below)


@pytest.mark.shows("a killed worker of two", "refused")
@pytest.mark.full
@pytest.mark.parametrize("flags", [(), HOST_EXPERTS], ids=["", "host experts"])
def test_a_killed_worker_ends_the_server(
    engines: Engines, release: str, flags: tuple[str, ...]
) -> None:
    """Upstream's CLI ends with 0 even then (vllm#48966): only the log says why. With
    experts in host memory a step reads some of them, and their memory is the
    process's: it goes with it."""
    with Server(engines, release, "--tensor-parallel-size", "2", *flags) as server:
        server.wait()
        assert ask(server, 2)
        below = server.children()
        workers = [p for p in below if "Worker" in p.name()]
        assert len(workers) == 2, below
        with ThreadPoolExecutor(1) as client:
            asked = client.submit(ask, server, NEVER)
            assert eventually(lambda: server.metric(RUNNING) == 1)
            began = time.monotonic()
            os.kill(workers[1].pid, signal.SIGKILL)
            status = server.process.wait(PATIENCE)
            assert outcome(asked) in ("500", "connection")
        assert time.monotonic() - began < PATIENCE
        assert (status, "EngineDeadError" in server.log) == (0, True), server.log
        check_all_gone(server, below)
