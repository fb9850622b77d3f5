# SPDX-License-Identifier: Apache-2.0
"""Prefill and decode apart where something fails: the server that reads dies, its pages
expire, the two are of different revisions, or the one that answers lacks room. Each
test prints after how many seconds the fault shows, and the log's line."""

import importlib.util
import random
import re
import signal
import time
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

import openai
import psutil
import pytest
from test_apart import (
    HITS,
    READ,
    apart,
    ask,
    check_same_tokens,
    release_that_serves_it,
)
from test_faults import eventually

from proof.e2e.checkpoints.chat import SPECIAL
from proof.e2e.running.proxy import server_of
from proof.e2e.running.server import Server
from proof.e2e.running.serving import Engines
from stack.base.releases import load

pytestmark = [
    pytest.mark.newest,
    pytest.mark.full,
    pytest.mark.skipif(
        importlib.util.find_spec("nixl") is None,
        reason="there is no nixl: run this by `tox -e hosts`",
    ),
]
__all__ = ["release_that_serves_it"]  # For pytest.

NEW = 6
PATIENCE = 60.0
"""Seconds within which a fault must show."""
LEASE = 6
"""Seconds that a server keeps pages for who does not ask for them; 30 by default."""
SMALL = ("--max-model-len", "400", "--kv-cache-memory-bytes", str(12 << 20))
"""A cache that holds few prompts with their answers."""
PROMPT, AT_ONCE, ADDED = 250, 4, 40
"""Tokens of a prompt, how many are answered at once, and the new tokens of each, which
need a page more."""
EXPIRED = "vllm:nixl_num_kv_expired_reqs_total"
FAILED = "vllm:nixl_num_failed_transfers_total"
PREEMPTIONS = "vllm:num_preemptions_total"


def prompts(count: int, length: int = 70) -> list[list[int]]:
    chosen = random.Random(length)
    return [
        [chosen.randrange(len(SPECIAL), 900) for _ in range(length)]
        for _ in range(count)
    ]


def kill(server: Server) -> None:
    """As a machine that goes away: no process says goodbye."""
    processes = [psutil.Process(server.process.pid), *server.children()]
    for process in processes:
        process.send_signal(signal.SIGKILL)
    server.process.wait()


def outcome(server: Server, prompt: list[int], where: Any) -> tuple[Any, float]:
    """The answer or the client's error, and the seconds until it came."""
    begun = time.monotonic()
    try:
        given: Any = ask(server, prompt, NEW, **where)
    except openai.APIStatusError as error:
        given = error
    seconds = time.monotonic() - begun
    print(f"{type(given).__name__} after {seconds:.1f} s")
    return given, seconds


def said(server: Server, words: str) -> None:
    lines = [line for line in server.log.splitlines() if re.search(words, line)]
    assert lines, f"no line says {words!r}:\n{server.log}"
    print(lines[0][:400])


@pytest.mark.parametrize("policy", ["fail", "recompute"])
@pytest.mark.shows("the server that reads dies before its pages are fetched", "equal")
def test_the_one_that_reads_dies(engines: Engines, release: str, policy: str) -> None:
    """Before the other has met it, and after. `fail` ends the request with an error,
    `recompute` answers it; the server that answers goes on."""
    start = partial(server_of, engines, release)
    first, second, third = prompts(3)
    with (
        start("kv_consumer", "xpu", kv_load_failure_policy=policy) as answers,
        start("kv_producer", "xpu") as unknown,
        start("kv_producer", "xpu") as known,
    ):
        for one in (answers, unknown, known):
            one.wait()
        apart(known, answers, third, 1)
        for reads, prompt in ((unknown, first), (known, second)):
            where = ask(reads, prompt, 1, **READ).kv_transfer_params
            kill(reads)
            given, seconds = outcome(answers, prompt, where)
            assert seconds < PATIENCE, answers.log
            whole = ask(answers, prompt, NEW)
            if policy == "fail":
                assert isinstance(given, openai.InternalServerError), given
            else:
                check_same_tokens(given, whole)
        said(answers, "handshake_(setup_)?failed")
        said(answers, "transfer_(setup_)?failed|transfer_exception")
        assert answers.metric(FAILED) >= 1
        assert answers.get("/health") == 200


@pytest.mark.shows("the server that reads does not answer for a while", "equal")
def test_the_one_that_reads_is_slow(engines: Engines, release: str) -> None:
    """Upstream waits five seconds for a server that it meets for the first time, and a
    busy machine may take longer: the request ends with status 500, the next is fine."""
    start = partial(server_of, engines, release)
    first, second = prompts(2)
    with (
        start("kv_producer", "xpu") as reads,
        start("kv_consumer", "xpu") as answers,
    ):
        for one in (reads, answers):
            one.wait()
        where = ask(reads, first, 1, **READ).kv_transfer_params
        paused = [psutil.Process(reads.process.pid), *reads.children()]
        for process in paused:
            process.suspend()
        given, seconds = outcome(answers, first, where)
        for process in paused:
            process.resume()
        assert isinstance(given, openai.InternalServerError), given
        assert seconds < PATIENCE
        said(answers, "handshake_(setup_)?failed")
        check_same_tokens(apart(reads, answers, second, NEW), ask(reads, second, NEW))


def test_pages_that_expired(engines: Engines, release: str) -> None:
    """Upstream's: the server that answers does not ask whether the pages are still
    those of its prompt. Whoever asks it too late gets an answer without an error."""
    told = {"kv_connector_extra_config": {"kv_lease_duration": LEASE}}
    start = partial(server_of, engines, release)
    (prompt,) = prompts(1)
    with (
        start("kv_producer", "xpu", **told) as reads,
        start("kv_consumer", "xpu", **told) as answers,
    ):
        for one in (reads, answers):
            one.wait()
        where = ask(reads, prompt, 1, **READ).kv_transfer_params
        begun = time.monotonic()
        assert eventually(lambda: reads.metric(EXPIRED) == 1, PATIENCE), reads.log
        print(f"expired after {time.monotonic() - begun:.1f} s of {LEASE}")
        said(reads, "Releasing expired KV blocks")
        given, _ = outcome(answers, prompt, where)
        assert given.choices[0].token_ids


@pytest.mark.shows("prefill and decode of different revisions", "refused")
def test_revisions_that_differ(engines: Engines, release: str) -> None:
    """As in a rolling upgrade: the first request that goes from one to the other ends
    with an error, and both serve on alone."""
    names = load(engines.project).names
    older = names[names.index(release) - 1]
    if not engines.has_step(older, "nixl-host-blocks"):
        pytest.skip(f"{older}, the release before, refuses NIXL")
    (prompt,) = prompts(1)
    with (
        server_of(engines, older, "kv_producer", "xpu") as reads,
        server_of(engines, release, "kv_consumer", "xpu") as answers,
    ):
        for one in (reads, answers):
            one.wait()
        where = ask(reads, prompt, 1, **READ).kv_transfer_params
        given, seconds = outcome(answers, prompt, where)
        assert isinstance(given, openai.InternalServerError), given
        assert seconds < PATIENCE
        said(answers, "compatibility hash mismatch")
        for one in (reads, answers):
            assert ask(one, prompt, 1).choices[0].token_ids


@pytest.mark.shows("a preempted answer of pages that were fetched", "equal")
def test_an_answer_that_is_preempted(engines: Engines, release: str) -> None:
    """Its prompt is computed again where it is answered."""
    start = partial(server_of, engines, release)
    asked = prompts(AT_ONCE, PROMPT)
    with (
        start("kv_producer", "xpu") as reads,
        start("kv_consumer", "xpu", *SMALL) as answers,
    ):
        for one in (reads, answers):
            one.wait()
        with ThreadPoolExecutor(AT_ONCE) as pool:
            given = list(
                pool.map(lambda prompt: apart(reads, answers, prompt, ADDED), asked)
            )
        assert answers.metric(HITS) >= PROMPT
        print(f"{answers.metric(PREEMPTIONS):.0f} preemptions")
        assert answers.metric(PREEMPTIONS) > 0, answers.log
        for answer, prompt in zip(given, asked, strict=True):
            check_same_tokens(answer, ask(reads, prompt, ADDED))
