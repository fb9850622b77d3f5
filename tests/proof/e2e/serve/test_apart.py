# SPDX-License-Identifier: Apache-2.0
"""One server reads prompts and another answers them, over HTTP and NIXL, as a proxy
asks them; and where they listen."""

import importlib.util
import json
import random
import re
import shlex
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import openai
import psutil
import pytest
from fenced import block

from proof.e2e.checkpoints.chat import SPECIAL
from proof.e2e.judging.checks import MARGIN
from proof.e2e.judging.load import Load, bench, check_texts
from proof.e2e.running.prometheus import queries
from proof.e2e.running.proxy import READ, Proxy, server_of
from proof.e2e.running.router import Router, installed
from proof.e2e.running.server import MODEL, Server
from proof.e2e.running.serving import Engines

pytestmark = [
    pytest.mark.newest,
    pytest.mark.full,
    pytest.mark.skipif(
        importlib.util.find_spec("nixl") is None,
        reason="there is no nixl: run this by `tox -e hosts`",
    ),
]

LENGTHS = (20, 191)
"""Tokens of a prompt within a block of the window, and of one that ends one short of
three."""
NEW = 6
HITS = "vllm:external_prefix_cache_hits_total"
HERE = ("127.0.0.1", "::1")


@dataclass(frozen=True)
class Servers:
    """How the two are started."""

    buffers: str
    reads: tuple[str, ...] = ()
    answers: tuple[str, ...] = ()


TWO_RANKS = ("--tensor-parallel-size", "2")
KINDS = {
    "device buffers": Servers("xpu"),
    "host buffers": Servers("cpu"),
    "two ranks a side": Servers("xpu", TWO_RANKS, TWO_RANKS),
    "two ranks read, host buffers": Servers("cpu", TWO_RANKS),
    "two ranks answer": Servers("xpu", answers=TWO_RANKS),
}


@pytest.fixture(autouse=True)
def release_that_serves_it(engines: Engines, release: str) -> None:
    if not engines.has_step(release, "nixl-host-blocks"):
        pytest.skip(f"{release} refuses NIXL at the start")


@pytest.fixture(params=KINDS)
def pair(
    request: pytest.FixtureRequest, engines: Engines, release: str
) -> Iterator[tuple[Server, Server]]:
    """A server that reads and one that answers."""
    kind = KINDS[request.param]
    start = partial(server_of, engines, release)
    with (
        start("kv_producer", kind.buffers, *kind.reads) as reads,
        start("kv_consumer", kind.buffers, *kind.answers) as answers,
    ):
        yield reads.wait(), answers.wait()


def ask(server: Server, prompt: list[int], new: int, **transfer: Any) -> Any:
    return ask_by(server.client, prompt, new, **transfer)


def ask_by(client: openai.OpenAI, prompt: list[int], new: int, **transfer: Any) -> Any:
    more = {"kv_transfer_params": transfer} if transfer else {}
    return client.completions.create(
        model=MODEL,
        prompt=prompt,
        max_tokens=new,
        temperature=0.0,
        logprobs=2,
        extra_body={"ignore_eos": True, "return_token_ids": True, **more},
    )


def apart(reads: Server, answers: Server, prompt: list[int], new: int) -> Any:
    """As a proxy asks: the one for the prompt's pages, then the other with where they
    are."""
    read = ask(reads, prompt, 1, **READ)
    return ask(answers, prompt, new, **read.kv_transfer_params)


def check_same_tokens(answer: Any, whole: Any) -> None:
    """Up to one of which the whole answer was not sure: a prompt's last token, computed
    on its own, rounds in another way."""
    ours, theirs = answer.choices[0], whole.choices[0]
    for place, (token, other) in enumerate(
        zip(ours.token_ids, theirs.token_ids, strict=True)
    ):
        if token != other:
            first, second = sorted(theirs.logprobs.top_logprobs[place].values())[-2:]
            assert abs(first - second) <= MARGIN, (place, token, other)
            return


@pytest.mark.shows("prefill and decode apart, by NIXL", "equal")
def test_the_one_reads_and_the_other_answers(pair: tuple[Server, Server]) -> None:
    reads, answers = pair
    chosen = random.Random(0)
    for length in LENGTHS:
        prompt = [chosen.randrange(len(SPECIAL), 900) for _ in range(length)]
        before = answers.metric(HITS)
        answer = apart(reads, answers, prompt, NEW)
        assert answers.metric(HITS) - before == length
        check_same_tokens(answer, ask(reads, prompt, NEW))
    named = {
        n for text in queries().values() for n in re.findall(r"vllm:nixl\w+", text)
    }
    counted = {name: answers.metric(name) for name in named}
    assert counted["vllm:nixl_bytes_transferred_sum"] > 0, counted
    assert not any(counted[name] for name in named if name.endswith("total")), counted
    for one in pair:
        elsewhere = [
            found.laddr
            for process in [psutil.Process(one.process.pid), *one.children()]
            for found in process.net_connections("inet")
            if found.status == psutil.CONN_LISTEN and found.laddr.ip not in HERE
        ]
        assert not elsewhere, f"a server listens at {elsewhere}"


def words(name: str, program: str) -> list[str]:
    """Of docs/deploying.md, those behind `program` in a block."""
    text = block("docs/deploying.md", name).replace("\\\n", " ")
    return shlex.split(text.partition(f"{program} ")[2])


@pytest.mark.skipif(not installed(), reason="there is no vllm-router")
@pytest.mark.shows("prefill and decode apart, behind vLLM's router", "equal")
def test_the_router_and_the_flags_of_the_page(
    engines: Engines, release: str, tmp_path: Path
) -> None:
    told = words("apart", "vllm serve")
    transfer = json.loads(told[told.index("--kv-transfer-config") + 1])
    assert transfer.pop("kv_connector") == "NixlConnector"
    buffers, role = transfer.pop("kv_buffer_device"), transfer.pop("kv_role")
    start = partial(server_of, engines, release)
    with (
        start(role, buffers, **transfer) as reads,
        start("kv_consumer", buffers, **transfer) as answers,
    ):
        reads.wait()
        answers.wait()
        given = words("router", "vllm-router")
        for side, server in (("--prefill", reads), ("--decode", answers)):
            given[given.index(side) + 1] = server.url
        with Router(given, tmp_path / "router.log") as router:
            client = answers.client.with_options(base_url=f"{router.url}/v1")
            for length in LENGTHS:
                chosen = random.Random(length)
                prompt = [chosen.randrange(len(SPECIAL), 900) for _ in range(length)]
                before = answers.metric(HITS)
                answer = ask_by(client, prompt, NEW)
                assert answers.metric(HITS) - before == length
                check_same_tokens(answer, ask(reads, prompt, NEW))


LOAD = Load(requests=200, different=40, concurrency=16, shared=280)


@pytest.mark.shows("200 requests, 16 at once, prefill and decode apart", "equal")
def test_one_reads_and_two_answer_under_load(
    engines: Engines, release: str, tmp_path: Path
) -> None:
    start = partial(server_of, engines, release)
    with (
        start("kv_producer", "xpu") as reads,
        start("kv_consumer", "xpu") as first,
        start("kv_consumer", "xpu") as second,
    ):
        answer = first.wait(), second.wait()
        with Proxy(reads.wait(), answer) as proxy:
            result = bench(reads, LOAD, tmp_path, proxy.url)
        assert all(server.metric(HITS) > 0 for server in answer)
        check_texts(reads, LOAD, result["generated_texts"])
