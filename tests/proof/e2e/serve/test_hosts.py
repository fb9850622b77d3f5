# SPDX-License-Identifier: Apache-2.0
"""One server over two hosts that share a network and nothing else: it answers as on one
host, and ends in time without the other."""

import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import openai
import pytest
from test_faults import RUNNING, eventually

from proof.e2e.running import hosts
from proof.e2e.running.hosts import Host
from proof.e2e.running.server import MODEL, READY, Program, Server
from proof.e2e.running.serving import Engines
from stack.release import served

pytestmark = [pytest.mark.newest, pytest.mark.full]

PROMPTS = ([5, 6, 7], list(range(10, 60)), [9] * 20)
SOME, NEVER = 6, 900
"""New tokens of an answer that comes, and of one that no test waits for."""
PORT = 29555
"""Where the first host waits for the others."""
COMES, PATIENCE = 90, 20
"""Seconds that a host waits for the others, where they come and where they do not."""
STEP = 20
"""Seconds that a step may take, by VLLM_EXECUTE_MODEL_TIMEOUT_SECONDS."""
WAITS = "distributed_init_method="
"""What a rank prints before it waits for the others."""
ENDS = 90.0
"""Seconds within which a server without its other host must end."""
PIPELINE = ("--pipeline-parallel-size", "2")
BOTH = (*PIPELINE, "--tensor-parallel-size", "2")


@pytest.fixture
def two_hosts(engines: Engines) -> Iterator[list[Host]]:
    if reason := hosts.lacking():
        pytest.skip(f"no network namespaces here: {reason}")
    with hosts.opened_hosts(2) as opened:
        yield opened


class Pair:
    """The same server on two hosts, by vLLM's own start of several nodes."""

    def __init__(
        self,
        engines: Engines,
        release: str,
        pair: list[Host],
        *split: str,
        waits: int = COMES,
    ) -> None:
        self._engines, self._release, self._pair = engines, release, pair
        self._flags = (
            *("--nnodes", "2", "--master-addr", pair[0].address),
            *("--master-port", str(PORT), *split),
            *("--distributed-timeout-seconds", str(waits)),
        )
        ranks = 2 if split == BOTH else 1
        # What a host shows is what vLLM takes for its share of the ranks.
        self._environment = {
            "VLLM_EXECUTE_MODEL_TIMEOUT_SECONDS": str(STEP),
            "ZE_AFFINITY_MASK": ",".join(map(str, range(ranks))),
        }

    def first(self) -> Server:
        return Server(
            self._engines,
            self._release,
            *(*self._flags, "--node-rank", "0"),
            host=self._pair[0],
            staged=True,
            environment=self._environment,
        )

    def second(self) -> Program:
        return Program(
            self._engines,
            self._release,
            *(*self._flags, "--node-rank", "1", "--headless"),
            host=self._pair[1],
            staged=True,
            environment=self._environment,
        )


def answer(server: Server, prompt: list[int], new: int = SOME) -> list[int]:
    whole = server.client.completions.create(
        model=MODEL,
        prompt=prompt,
        max_tokens=new,
        temperature=0.0,
        extra_body={"ignore_eos": True, "return_token_ids": True},
    )
    tokens: list[int] = whole.choices[0].token_ids
    return tokens


def answers(server: Server) -> list[list[int]]:
    return [answer(server, prompt) for prompt in PROMPTS]


def probe(host: Host, *words: str) -> tuple[int, str]:
    """What a probe of the images finds inside a host."""
    done = subprocess.run(
        host.inside(sys.executable, "-I", served.__file__, *words),
        env={},
        capture_output=True,
        text=True,
    )
    return done.returncode, done.stdout.strip()


def ends(program: Program) -> int:
    """The exit status of a program that must end."""
    try:
        return int(program.process.wait(ENDS))
    except subprocess.TimeoutExpired:
        pytest.fail(f"it has not ended after {ENDS:.0f} s\n{program.log}")


@pytest.mark.parametrize(
    "split",
    [
        pytest.param(PIPELINE, marks=pytest.mark.shows("two hosts: PP 2", "equal")),
        pytest.param(BOTH, marks=pytest.mark.shows("two hosts: PP 2, TP 2", "equal")),
    ],
    ids=["PP 2", "PP 2, TP 2"],
)
def test_two_hosts_answer_as_one(
    engines: Engines, two_hosts: list[Host], release: str, split: tuple[str, ...]
) -> None:
    with Server(engines, release, *split, staged=True) as one:
        expected = answers(one.wait())
    pair = Pair(engines, release, two_hosts, *split)
    with pair.second(), pair.first() as server:
        assert answers(server.wait()) == expected
        url = f"http://127.0.0.1:{server.port}"
        assert [probe(host) for host in two_hosts] == [
            (0, f"alive: {url}"),
            (0, "alive: a --headless host, which ends with its engine"),
        ]
        assert [probe(host, "ready")[0] for host in two_hosts] == [0, 0]
        assert [probe(host, "question")[0] for host in two_hosts] == [0, 2]


@pytest.mark.shows("two hosts: one never comes", "refused")
@pytest.mark.parametrize("comes", ["first", "second"])
def test_a_host_that_never_comes(
    engines: Engines, two_hosts: list[Host], release: str, comes: str
) -> None:
    """The other says so and ends."""
    pair = Pair(engines, release, two_hosts, *PIPELINE, waits=PATIENCE)
    with getattr(pair, comes)() as program:
        assert eventually(lambda: WAITS in program.log, READY), program.log
        assert ends(program) == 1, program.log
        assert "timed out" in program.log.lower(), program.log


@pytest.mark.shows("two hosts: the second dies as it answers", "refused")
def test_a_second_host_that_dies(
    engines: Engines, two_hosts: list[Host], release: str
) -> None:
    """The first sees no connection close, as if by a pulled cable, and waits for a step
    as long as it may."""
    pair = Pair(engines, release, two_hosts, *PIPELINE)
    with pair.second(), pair.first() as server:
        answer(server.wait(), PROMPTS[0])
        with ThreadPoolExecutor(1) as client:
            asked = client.submit(answer, server, PROMPTS[0], NEVER)
            assert eventually(lambda: server.metric(RUNNING) == 1)
            two_hosts[1].unplug()
            two_hosts[1].crash()
            ends(server)
            with pytest.raises((openai.APIStatusError, openai.APIConnectionError)):
                asked.result()
        assert "EngineDeadError" in server.log, server.log
