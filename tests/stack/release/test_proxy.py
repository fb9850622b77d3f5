# SPDX-License-Identifier: Apache-2.0
"""deploy/proxy.conf, by nginx: what it passes on, and what not."""

import shutil
import socket
import ssl
import subprocess
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
PATIENCE = 10.0
PIECES, PAUSE = 3, 0.1
"""Of a stream, and the seconds between them."""
PASSED = ("/v1/chat/completions", "/v1/completions", "/v1/models", "/health")
KEPT = ("/metrics", "/invocations", "/v1/loads", "/scale_elastic_ep", "/v1/models/x")
AROUND = ("//metrics", "/v1/models/../../metrics", "/health%2f..%2fmetrics")


class Behind(BaseHTTPRequestHandler):
    """Says what it was asked with, and streams it."""

    protocol_version = "HTTP/1.1"

    def do_GET(self) -> None:
        told = f"{self.path} {self.headers['Authorization']}\n".encode()
        self.send_response(200)
        self.send_header("Content-Length", str(PIECES * len(told)))
        self.end_headers()
        for _ in range(PIECES):
            self.wfile.write(told)
            self.wfile.flush()
            time.sleep(PAUSE)

    def log_message(self, *_: object) -> None:
        """Say nothing."""


@pytest.fixture(scope="module")
def proxy(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """Its URL; behind it is a server."""
    if not (shutil.which("nginx") and shutil.which("openssl")):
        pytest.skip("there is no nginx or no openssl")
    folder = tmp_path_factory.mktemp("proxy")
    subprocess.run(
        [
            *("openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes"),
            *("-subj", "/CN=localhost", "-keyout", "tls.key", "-out", "tls.crt"),
        ],
        cwd=folder,
        check=True,
        capture_output=True,
    )
    behind = ThreadingHTTPServer(("127.0.0.1", 0), Behind)
    threading.Thread(target=behind.serve_forever, daemon=True).start()
    with socket.socket() as listening:
        listening.bind(("127.0.0.1", 0))
        port = listening.getsockname()[1]
    text = (ROOT / "deploy/proxy.conf").read_text()
    for one, other in (
        ("server vllm:8000", f"server 127.0.0.1:{behind.server_port}"),
        ("listen 8443", f"listen 127.0.0.1:{port}"),
        ("/certificates", str(folder)),
        ("worker_processes auto", f"pid {folder}/pid; worker_processes 1"),
    ):
        assert one in text, f"deploy/proxy.conf has no {one!r}"
        text = text.replace(one, other)
    (folder / "nginx.conf").write_text(text)
    command = ["nginx", "-c", str(folder / "nginx.conf"), "-g", "daemon off;"]
    with subprocess.Popen([*command, "-e", str(folder / "errors")]) as running:
        url = f"https://127.0.0.1:{port}"
        limit = time.monotonic() + PATIENCE
        while status(url, "/health") is None and time.monotonic() < limit:
            time.sleep(0.1)
        yield url
        running.terminate()
    behind.shutdown()
    behind.server_close()


def opened(url: str, path: str) -> urllib.request.Request:
    return urllib.request.Request(url + path, headers={"Authorization": "Bearer k"})


def trusting() -> ssl.SSLContext:
    return ssl._create_unverified_context()


def status(url: str, path: str) -> int | None:
    try:
        with urllib.request.urlopen(opened(url, path), context=trusting()) as answer:
            return int(answer.status)
    except urllib.error.HTTPError as error:
        with error:
            return error.code
    except OSError:
        return None


@pytest.mark.parametrize("path", PASSED)
def test_a_user_path_goes_on_with_the_key(proxy: str, path: str):
    with urllib.request.urlopen(opened(proxy, path), context=trusting()) as answer:
        assert answer.read().decode() == PIECES * f"{path} Bearer k\n"


@pytest.mark.parametrize("path", [*KEPT, *AROUND])
def test_another_path_does_not(proxy: str, path: str):
    assert status(proxy, path) in (400, 404)


def test_a_stream_is_not_held_back(proxy: str):
    path = "/v1/completions"
    begun = time.monotonic()
    with urllib.request.urlopen(opened(proxy, path), context=trusting()) as answer:
        answer.readline()
        assert time.monotonic() - begun < PIECES * PAUSE - PAUSE / 2
        answer.read()
    assert time.monotonic() - begun >= (PIECES - 1) * PAUSE
