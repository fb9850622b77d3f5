# SPDX-License-Identifier: Apache-2.0
"""The middleware that closes every path but `/health`, over an application that stands
for vLLM's; and `serve.sh`, which gives it to `vllm serve`."""

import asyncio
import os
import shutil
import subprocess
from collections.abc import Mapping, MutableMapping
from pathlib import Path
from typing import Any

import pytest

from stack.release import require_key, ship
from stack.release.require_key import RequireKey

KEY = "secret"
ANSWER = {"type": "http.response.start", "status": 200}


class Routes:
    """What answers everything, below the middleware of `--api-key`."""

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        await send(ANSWER)


class Other:
    """A middleware of vLLM."""

    def __init__(self, app: Any) -> None:
        self.app = app

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        await self.app(scope, receive, send)


class Authentication(Other):
    """The one that `--api-key` adds; here it lets everything through."""

    def verify_token(self, headers: Mapping[str, str]) -> bool:
        return headers.get("Authorization") == f"Bearer {KEY}"


def answers(
    app: RequireKey, path: str, *headers: tuple[str, str], **scope: Any
) -> list[MutableMapping[str, Any]]:
    """What is sent to a connection."""
    sent: list[MutableMapping[str, Any]] = []
    encoded = [(name.lower().encode(), value.encode()) for name, value in headers]
    whole = {"type": "http", "method": "GET", "path": path, "headers": encoded} | scope

    async def receive() -> MutableMapping[str, Any]:
        raise AssertionError

    async def send(message: MutableMapping[str, Any]) -> None:
        sent.append(message)

    asyncio.run(app(whole, receive, send))
    return sent


@pytest.fixture
def guarded() -> RequireKey:
    return RequireKey(Other(Authentication(Routes())))


@pytest.mark.parametrize(
    ("path", "headers", "scope"),
    [
        ("/metrics", [("Authorization", f"Bearer {KEY}")], {}),
        ("/health", [], {}),
        ("/proxied/health", [], {"root_path": "/proxied"}),
        ("", [], {"type": "lifespan"}),
        (
            "/v1/completions",
            [("Origin", "o"), ("Access-Control-Request-Method", "POST")],
            {"method": "OPTIONS"},
        ),
        ("/v1/realtime", [("Authorization", f"Bearer {KEY}")], {"type": "websocket"}),
    ],
)
def test_what_gets_in(
    guarded: RequireKey,
    path: str,
    headers: list[tuple[str, str]],
    scope: dict[str, Any],
) -> None:
    assert answers(guarded, path, *headers, **scope) == [ANSWER]


@pytest.mark.parametrize(
    ("path", "headers", "scope"),
    [
        ("/metrics", [], {}),
        ("/scale_elastic_ep", [], {"method": "POST"}),
        ("/metrics", [("Authorization", "Bearer wrong")], {}),
        ("/metrics", [("Authorization", KEY)], {}),
        # The first of two counts, as it does for vLLM.
        (
            "/metrics",
            [("Authorization", "Bearer wrong"), ("Authorization", f"Bearer {KEY}")],
            {},
        ),
        ("/health/", [], {}),
        ("//health", [], {}),
        ("/v1/health", [], {}),
        ("/healthy", [], {}),
        ("/metrics", [], {"method": "OPTIONS"}),
        ("/metrics", [("Origin", "o")], {"method": "OPTIONS"}),
        (
            "/metrics",
            [("Origin", "o"), ("Access-Control-Request-Method", "GET")],
            {"method": "GET"},
        ),
    ],
)
def test_what_does_not_get_in(
    guarded: RequireKey,
    path: str,
    headers: list[tuple[str, str]],
    scope: dict[str, Any],
) -> None:
    start, body = answers(guarded, path, *headers, **scope)
    assert (start["type"], start["status"]) == ("http.response.start", 401)
    assert body["body"] == b'{"error": "Unauthorized"}'
    assert dict(start["headers"])[b"content-length"] == b"25"


def test_a_websocket_is_refused_in_its_own_words(guarded: RequireKey) -> None:
    for path in ("/v1/realtime", "/health"):
        start, body = answers(guarded, path, type="websocket")
        assert start["type"] == "websocket.http.response.start"
        assert (start["status"], body["type"]) == (401, "websocket.http.response.body")


def test_a_server_without_a_key_answers_nothing(
    caplog: pytest.LogCaptureFixture,
) -> None:
    open_to_all = RequireKey(Routes())
    assert require_key.NONE in caplog.text
    for headers in ([], [("Authorization", "Bearer "), ("Authorization", "")]):
        start, body = answers(open_to_all, "/v1/models", *headers)
        assert start["status"] == 401
        assert b"the server has no key" in body["body"]
    assert answers(open_to_all, "/health") == [ANSWER]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """The files beside a wheel, and a `vllm` that prints how it was called."""
    for name in ship.STARTERS:
        shutil.copy(Path(require_key.__file__).with_name(name), tmp_path)
    stub = tmp_path / "bin/vllm"
    stub.parent.mkdir()
    stub.write_text('#!/bin/sh\necho "$PYTHONPATH"\nprintf "%s\\n" "$@"\n')
    stub.chmod(0o755)
    return tmp_path


def started(
    folder: Path, *words: str, **environment: str
) -> subprocess.CompletedProcess[str]:
    path = f"{folder / 'bin'}:{os.environ['PATH']}"
    return subprocess.run(
        ["sh", "serve.sh", *words],
        cwd=folder,
        env={"PATH": path, **environment},
        capture_output=True,
        text=True,
    )


OURS = ["--middleware", "require_key.RequireKey", "--shutdown-timeout", "20"]


@pytest.mark.parametrize(
    ("words", "called"),
    [
        (("/model",), ["/model", *OURS]),
        (("/a model", "-tp", "2"), ["/a model", *OURS, "-tp", "2"]),
        # vLLM takes the last: the caller's own.
        (
            ("/model", "--shutdown-timeout", "300"),
            ["/model", *OURS, "--shutdown-timeout", "300"],
        ),
        (("--model", "/model"), [*OURS, "--model", "/model"]),
        ((), OURS),
    ],
)
def test_the_model_stays_first_and_the_caller_s_flags_win(
    folder: Path, words: tuple[str, ...], called: list[str]
) -> None:
    done = started(folder, *words, VLLM_API_KEY=KEY, PYTHONPATH="/more")
    path, *arguments = done.stdout.splitlines()
    assert (path, arguments) == (f"{folder}:/more", ["serve", *called]), done
    assert started(folder, "/model", VLLM_API_KEY=KEY).stdout.startswith(f"{folder}\n")


@pytest.mark.parametrize(
    "words",
    [("/model",), ("/model", "--headless-not"), ("/model", "--config-format", "auto")],
)
def test_without_a_key_it_does_not_start(folder: Path, words: tuple[str, ...]) -> None:
    for environment in ({}, {"VLLM_API_KEY": ""}):
        done = started(folder, *words, **environment)
        assert (done.returncode, done.stdout) == (2, ""), done
        assert "set VLLM_API_KEY or give --api-key" in done.stderr


@pytest.mark.parametrize(
    "words",
    [
        ("/model", "--api-key", KEY),
        ("/model", f"--api-key={KEY}"),
        ("/model", "--api_key", KEY),
        ("/model", "--headless"),
        ("--config", "server.yaml"),
        ("--help",),
    ],
)
def test_a_key_may_be_a_flag_or_lie_in_a_file(
    folder: Path, words: tuple[str, ...]
) -> None:
    done = started(folder, *words)
    assert (done.returncode, done.stdout.splitlines()[1]) == (0, "serve"), done
