# SPDX-License-Identifier: Apache-2.0
"""A middleware of `vllm serve`: nothing but `/health` answers without the server's key.

`--middleware require_key.RequireKey`, with this file's folder in PYTHONPATH; `serve.sh`
beside it does so. vLLM itself asks for the key below `/v1` and a few other prefixes,
not for `/invocations`, `/metrics` or `/scale_elastic_ep`. What a right key is, vLLM
decides: `--api-key`, or VLLM_API_KEY. A server without one answers nothing. Needs
nothing but Python.
"""

import json
import logging
from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any, Protocol

OPEN = "/health"
"""The one path that needs no key: it says whether the server lives."""
WRONG = "Unauthorized"
NONE = "the server has no key: start it with VLLM_API_KEY or --api-key"

Scope = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]
Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]


class App(Protocol):
    """An ASGI application."""

    def __call__(self, scope: Scope, receive: Receive, send: Send) -> Awaitable[None]:
        """Answer one connection."""


class RequireKey:
    """Lets a connection in that brings the key, asks for `/health`, or is a browser's
    preflight, which vLLM answers itself; any other gets status 401.

    Args:
        app: vLLM's application with the middleware that `--api-key` adds in it.
    """

    def __init__(self, app: App) -> None:
        self.app = app
        found: Any = app
        while found is not None and not hasattr(found, "verify_token"):
            found = getattr(found, "app", None)
        self.verifier = found
        if found is None:
            logging.getLogger("vllm").error("require_key: %s", NONE)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one connection, or refuse it."""
        if self.lets_in(scope):
            await self.app(scope, receive, send)
            return
        # A websocket is refused by the same messages under another name.
        kind = "websocket.http" if scope["type"] == "websocket" else "http"
        body = json.dumps({"error": NONE if self.verifier is None else WRONG}).encode()
        headers = [
            (b"content-type", b"application/json"),
            (b"content-length", str(len(body)).encode()),
        ]
        start = {"type": f"{kind}.response.start", "status": 401, "headers": headers}
        await send(start)
        await send({"type": f"{kind}.response.body", "body": body})

    def lets_in(self, scope: Scope) -> bool:
        """Whether a connection needs no key, or has the right one."""
        if scope["type"] not in ("http", "websocket"):
            return True
        headers: dict[str, str] = {}
        for name, value in scope["headers"]:
            headers.setdefault(name.decode("latin-1").title(), value.decode("latin-1"))
        if self.verifier is not None and self.verifier.verify_token(headers):
            return True
        if scope["type"] == "websocket":
            return False
        path = scope["path"].removeprefix(scope.get("root_path", ""))
        preflight = {"Origin", "Access-Control-Request-Method"} <= headers.keys()
        return path == OPEN or (scope["method"] == "OPTIONS" and preflight)
