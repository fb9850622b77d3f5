# SPDX-License-Identifier: Apache-2.0
"""One server over two hosts that share a network and nothing else, by vLLM's own start
of several nodes: it answers as on one host, and ends in time without the other."""

import subprocess
import time
from collections.abc import Iterator

import pytest

from e2e import hosts
from e2e.hosts import Host
from e2e.server import MODEL, Program, Server
from e2e.serving import Engines

pytestmark = [pytest.mark.newest, pytest.mark.full]

PROMPTS = ([5, 6, 7], list(range(10, 60)), [9] * 20)
PORT = 29555
"""Where the first host waits for the others."""
PATIENCE = 20
"""Seconds that a host waits for the others, given by --distributed-timeout-seconds."""
ENDS = 60.0
"""Seconds within which a server without its other host must end."""
SPLITS = {
    "pipeline": ("--pipeline-parallel-size", "2"),
    "both": ("--pipeline-parallel-size", "2", "--tensor-parallel-size", "2"),
}


@pytest.fixture
def two_hosts(engines: Engines) -> Iterator[list[Host]]:
    if reason := hosts.lacking():
        pytest.skip(f"no network namespaces here: {reason}")
    with hosts.opened_hosts(engines.work, 2) as opened:
        yield opened


def nodes(first: Host, rank: int, split: str = "pipeline") -> tuple[str, ...]:
    return (
        *("--nnodes", "2", "--node-rank", str(rank)),
        *("--master-addr", first.address, "--master-port", str(PORT)),
        *("--distributed-timeout-seconds", str(PATIENCE)),
        *SPLITS[split],
        *(("--headless",) if rank else ()),
    )


def tokens(server: Server, new: int = 8) -> list[list[int]]:
    return [
        server.client.completions.create(
            model=MODEL,
            prompt=prompt,
            max_tokens=new,
            temperature=0.0,
            extra_body={"ignore_eos": True, "return_token_ids": True},
        )
        .choices[0]
        .token_ids
        for prompt in PROMPTS
    ]


def ends(program: Program) -> int:
    """The exit status of a program that must end."""
    try:
        return int(program.process.wait(ENDS))
    except subprocess.TimeoutExpired:
        pytest.fail(f"it has not ended after {ENDS:.0f} s\n{program.log}")


@pytest.mark.parametrize(
    "split",
    [
        pytest.param(
            "pipeline", marks=pytest.mark.shows("two hosts, PP 2 across", "equal")
        ),
        pytest.param(
            "both", marks=pytest.mark.shows("two hosts, PP 2 across, TP 2 in", "equal")
        ),
    ],
)
def test_two_hosts_answer_as_one(
    engines: Engines, two_hosts: list[Host], release: str, split: str
) -> None:
    first, second = two_hosts
    with Server(engines, release, *SPLITS[split], staged=True) as one:
        expected = tokens(one.wait())
    with (
        Program(
            engines, release, *nodes(first, 1, split), host=second, staged=True
        ) as other,
        Server(
            engines, release, *nodes(first, 0, split), host=first, staged=True
        ) as server,
    ):
        assert tokens(server.wait()) == expected
        for _ in range(4 if split == "both" else 1):
            assert tokens(server) == expected
        second.crash()
        began = time.monotonic()
        print("second", other.process.wait(30), "first", ends(server), time.monotonic()-began)
        print(server.log[-3000:])


@pytest.mark.shows("a second host that never comes", "refused")
def test_a_host_that_never_comes(
    engines: Engines, two_hosts: list[Host], release: str
) -> None:
    first, _ = two_hosts
    with Server(engines, release, *nodes(first, 0), host=first, staged=True) as server:
        began = time.monotonic()
        print(ends(server), time.monotonic() - began)
        print(server.log[-3000:])


@pytest.mark.shows("a first host that never comes", "refused")
def test_the_first_host_never_comes(
    engines: Engines, two_hosts: list[Host], release: str
) -> None:
    first, second = two_hosts
    with Program(
        engines, release, *nodes(first, 1), host=second, staged=True
    ) as program:
        began = time.monotonic()
        print(ends(program), time.monotonic() - began)
        print(program.log[-3000:])


@pytest.mark.shows("a second host without its network", "refused")
def test_unplugged(
    engines: Engines, two_hosts: list[Host], release: str
) -> None:
    first, second = two_hosts
    with (
        Program(
            engines, release, *nodes(first, 1), host=second, staged=True
        ) as other,
        Server(
            engines, release, *nodes(first, 0), host=first, staged=True,
            VLLM_EXECUTE_MODEL_TIMEOUT_SECONDS="20",
        ) as server,
    ):
        tokens(server.wait())
        second.unplug()
        began = time.monotonic()
        try:
            tokens(server)
        except Exception as e:
            print(repr(e), time.monotonic()-began)
        print("first", ends(server), time.monotonic()-began)
        print(server.log[-3000:])
        print("second", ends(other), time.monotonic()-began)
        print(other.log[-3000:])
