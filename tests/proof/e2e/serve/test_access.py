# SPDX-License-Identifier: Apache-2.0
"""Who gets in: a server as the images start it answers nothing but `/health` without
its key; and its three probes, which run inside."""

import json
import os
import subprocess
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import openai
import pytest
from fenced import block
from test_faults import NEVER, eventually

from proof.e2e.running import container
from proof.e2e.running.container import Container
from proof.e2e.running.server import MODEL, READY, Server
from proof.e2e.running.serving import Engines

pytestmark = pytest.mark.newest

KEY = "sesame"
ORIGIN = "http://page"
"""Whose scripts may ask."""
SEQUENCES = 16
"""How many requests the servers of these tests run at a time."""
ROUTES: dict[str, tuple[object, int]] = {
    "POST /invocations": ({"model": MODEL, "prompt": [5, 6, 7], "max_tokens": 3}, 200),
    "POST /generative_scoring": (
        {"model": MODEL, "query": "a", "items": ["b"], "label_token_ids": [50, 51]},
        200,
    ),
    "POST /tokenize": ({"model": MODEL, "prompt": "abc"}, 200),
    "POST /detokenize": ({"model": MODEL, "tokens": [50, 60]}, 200),
    "GET /metrics": (None, 200),
    "GET /load": (None, 200),
    "GET /version": (None, 200),
    # Executed, which finds that the number of engines is missing.
    "POST /scale_elastic_ep": ({}, 400),
    "GET /v1/models": (None, 200),
    "GET /openapi.json": (None, 200),
}
"""Body, and status with the key; `/v1` alone wants it of vLLM itself."""
WITH_KEY = {route: status for route, (_, status) in ROUTES.items()}


@pytest.fixture(scope="module")
def guarded(engines: Engines, release: str) -> Iterator[Container]:
    if reason := container.lacking():
        pytest.skip(f"no PID namespaces here: {reason}")
    origins = ("--allowed-origins", json.dumps([ORIGIN]))
    with Container(engines, release, *origins, key=KEY) as started:
        started.wait()
        yield started


def statuses(server: Server, headers: dict[str, str] | None) -> dict[str, int]:
    """The status of each route's answer."""
    return {
        route: server.send(*route.split(), body=body, headers=headers)[0]
        for route, (body, _) in ROUTES.items()
    }


def test_the_readmes_question_is_answered(guarded: Container) -> None:
    """Its block, with this server's address and model, and an answer of few tokens."""
    asked = block("README.md", "ask")
    for its, mine in (
        ("127.0.0.1:8000", guarded.url),
        ('"/model"', f'"{MODEL}"'),
        ('"messages"', '"max_tokens": 4, "messages"'),
    ):
        assert its in asked
        asked = asked.replace(its, mine)
    done = subprocess.run(
        ["sh", "-e", "-c", asked],
        env={"PATH": os.environ["PATH"], "VLLM_API_KEY": KEY},
        capture_output=True,
        text=True,
    )
    (choice,) = json.loads(done.stdout)["choices"]
    assert choice["message"]["role"] == "assistant", done.stderr


@pytest.mark.shows("ten routes without the key", "refused")
@pytest.mark.parametrize(
    "headers",
    [
        {},
        {"Authorization": "Bearer wrong"},
        {"Authorization": KEY},
        {"Authorization": ""},
        {"X-Api-Key": KEY},
    ],
    ids=["no header", "wrong key", "no scheme", "empty header", "another header"],
)
def test_no_route_answers_without_the_key(
    guarded: Container, headers: dict[str, str]
) -> None:
    assert statuses(guarded, headers) == dict.fromkeys(ROUTES, 401)
    assert guarded.send("GET", "/health", headers=headers) == (200, "")


@pytest.mark.shows("ten routes with the key", "equal")
def test_every_route_answers_with_the_key(guarded: Container) -> None:
    assert statuses(guarded, None) == WITH_KEY, guarded.log


@pytest.mark.shows("every route that the server names, without the key", "refused")
def test_no_route_of_the_server_s_own_list_answers(guarded: Container) -> None:
    """Whatever a release adds is closed, too."""
    described = json.loads(guarded.send("GET", "/openapi.json")[1])
    routes = [
        (method.upper(), path)
        for path, methods in described["paths"].items()
        for method in methods
    ]
    assert len(routes) > 20, routes
    routes += [("OPTIONS", "/metrics"), ("HEAD", "/metrics"), ("GET", "/docs")]
    routes += [("GET", path) for path in ("//health", "/health/", "/health/../load")]
    answered = [
        (method, path)
        for method, path in routes
        if path != "/health"
        and guarded.send(method, path, {} if method == "POST" else None, {})[0] != 401
    ]
    assert answered == []


def test_a_browser_s_preflight_is_answered_and_nothing_else(guarded: Container) -> None:
    headers = {"Origin": ORIGIN, "Access-Control-Request-Method": "POST"}
    for path in ("/v1/completions", "/metrics"):
        assert guarded.send("OPTIONS", path, None, headers) == (200, "OK")
    assert guarded.send("GET", "/metrics", None, headers)[0] == 401


@pytest.mark.full
def test_vllm_alone_asks_for_no_key_there(engines: Engines, release: str) -> None:
    """Upstream's `--api-key`: where no route answers any more, our middleware goes."""
    with Server(engines, release, "--api-key", KEY, key=KEY) as server:
        found = statuses(server.wait(), {})
        assert found == WITH_KEY | {"GET /v1/models": 401}, server.log


@pytest.mark.shows("three probes with the key as a flag", "equal")
def test_three_probes_of_an_idle_server(guarded: Container) -> None:
    """The key is in no environment: it is that of the command line, as is the port."""
    alive, ready = guarded.probe(), guarded.probe("ready")
    assert (alive.returncode, alive.stdout) == (0, f"alive: {guarded.url}\n")
    assert (ready.returncode, ready.stdout) == (0, "ready: 0 requests wait, 0 run\n")
    # Of its form it is the first, and compiles; its time-out is another test's.
    question = guarded.probe("question", "--twice", "--seconds", f"{READY}")
    assert (question.returncode, question.stdout.startswith(f"{MODEL}: ")) == (0, True)
    # From outside, with neither.
    refused = guarded.probe("question", "--url", guarded.url)
    assert (refused.returncode, "set VLLM_API_KEY" in refused.stdout) == (1, True)


@pytest.mark.shows("three probes of a server with a queue", "equal")
def test_three_probes_of_a_busy_server(guarded: Container) -> None:
    """It is alive and not ready; and what the question finds is no fault."""

    def ask() -> None:
        with pytest.raises(openai.APITimeoutError):
            guarded.client.with_options(timeout=60).completions.create(
                model=MODEL,
                prompt=[5, 6, 7],
                max_tokens=NEVER,
                extra_body={"ignore_eos": True},
            )

    waiting = "vllm:num_requests_waiting"
    with ThreadPoolExecutor(SEQUENCES + 4) as clients:
        asked = [clients.submit(ask) for _ in range(SEQUENCES + 4)]
        assert eventually(lambda: guarded.metric(waiting) == 4), guarded.log
        alive, ready = guarded.probe("alive"), guarded.probe("ready")
        question = guarded.probe("question", "--seconds", "4")
        patient = guarded.probe("ready", "--waiting", "8")
        for future in asked:
            future.result()
    assert alive.returncode == 0, alive
    expected = f"not ready: 4 requests wait, {SEQUENCES} run\n"
    assert (ready.returncode, ready.stdout) == (1, expected)
    assert patient.returncode == 0, patient
    assert question.returncode == 2, question
    assert "no answer in 4 s" in question.stdout
    assert "tokens made for others meanwhile: " in question.stdout
    assert eventually(lambda: guarded.metric(waiting) == 0), guarded.log
