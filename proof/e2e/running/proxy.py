# SPDX-License-Identifier: Apache-2.0
"""Servers that read prompts, servers that answer them, and a proxy before both, as
small as it can be: what an orchestrator's does with one request."""

import itertools
import json
import threading
import urllib.request
from collections.abc import Sequence
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, Self

from proof.e2e.running.pairs import side_channel
from proof.e2e.running.server import READY, Server
from proof.e2e.running.serving import Engines

READ = {"do_remote_decode": True, "do_remote_prefill": False}
"""What the one is asked for whose pages another fetches."""


def server_of(
    engines: Engines, release: str, role: str, buffers: str, *flags: str, **told: Any
) -> Server:
    """A server of one of NIXL's roles, whose pages go by the memory of a device (`xpu`)
    or of the host (`cpu`); `told` are other fields of `--kv-transfer-config`."""
    transfer = {
        "kv_connector": "NixlConnector",
        "kv_role": role,
        "kv_buffer_device": buffers,
        **told,
    }
    return Server(
        engines,
        release,
        *("--kv-transfer-config", json.dumps(transfer)),
        *("--host", "127.0.0.1"),
        *flags,
        environment=side_channel(),
    )


def read(server: Server, asked: dict[str, Any]) -> dict[str, Any]:
    """Where the pages of a prompt are, of which `server` reads all.

    Raises:
        RuntimeError: it answered with an error.
    """
    body = {**asked, "max_tokens": 1, "stream": False, "kv_transfer_params": READ}
    body.pop("stream_options", None)
    status, text = server.send("POST", "/v1/completions", body)
    if status != 200:
        raise RuntimeError(f"the prompt was not read: {status} {text}")
    where: dict[str, Any] = json.loads(text)["kv_transfer_params"]
    return where


class Proxy:
    """Has each prompt read by one server and answered by the next of several."""

    def __init__(self, reads: Server, answer: Sequence[Server]) -> None:
        turns = itertools.cycle(answer)

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                asked = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                where = read(reads, asked)
                request = urllib.request.Request(
                    next(turns).url + self.path,
                    json.dumps({**asked, "kv_transfer_params": where}).encode(),
                    {"Content-Type": "application/json"},
                )
                with urllib.request.urlopen(request, timeout=READY) as given:
                    self.send_response(given.status)
                    self.send_header("Content-Type", given.headers["Content-Type"])
                    self.end_headers()
                    while piece := given.read1():
                        self.wfile.write(piece)

            def log_message(self, *_: object) -> None:
                """Say nothing."""

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self._server.server_port}"

    def __enter__(self) -> Self:
        threading.Thread(target=self._server.serve_forever, daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        self._server.shutdown()
        self._server.server_close()
