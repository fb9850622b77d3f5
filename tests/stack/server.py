# SPDX-License-Identifier: Apache-2.0
"""A package index on this machine that can be slow, cut short and counted."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path


class IndexServer(ThreadingHTTPServer):
    """Serves the archives of a folder as `/simple/vllm/` and `/files/<name>`.

    `cut` bytes at an archive's end are announced and never sent, in the first
    `cut_times` answers. While `gate` is clear, an archive stops at its half.
    """

    daemon_threads = True

    def __init__(self, folder: Path) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.folder = folder
        self.cut = 0
        self.cut_times = 0
        self.gate = threading.Event()
        self.gate.set()
        self.half_sent = threading.Event()
        self.downloads = 0

    @property
    def simple(self) -> str:
        return f"http://127.0.0.1:{self.server_port}/simple/"


class _Handler(BaseHTTPRequestHandler):
    server: IndexServer

    def do_GET(self) -> None:
        name = self.path.rpartition("/")[2]
        if self.path == "/simple/vllm/":
            self._page()
        elif (self.server.folder / name).is_file():
            self._archive((self.server.folder / name).read_bytes())
        else:
            self.send_error(404)

    def log_message(self, *_: object) -> None:
        """Say nothing: the test's own output is what counts."""

    def _page(self) -> None:
        names = sorted(path.name for path in self.server.folder.iterdir())
        body = "".join(f'<a href="/files/{name}">{name}</a>\n' for name in names)
        self._head(len(body), "text/html")
        self.wfile.write(body.encode())

    def _archive(self, data: bytes) -> None:
        server = self.server
        server.downloads += 1
        self._head(len(data), "application/octet-stream")
        half = len(data) // 2
        self.wfile.write(data[:half])
        self.wfile.flush()
        server.half_sent.set()
        server.gate.wait(30)
        cut = server.cut if server.downloads <= server.cut_times else 0
        self.wfile.write(data[half : len(data) - cut])

    def _head(self, length: int, kind: str) -> None:
        self.send_response(200)
        self.send_header("Content-Length", str(length))
        self.send_header("Content-Type", kind)
        self.end_headers()


@contextmanager
def serving(folder: Path) -> Iterator[IndexServer]:
    """An `IndexServer` that runs during the block."""
    server = IndexServer(folder)
    thread = threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True)
    thread.start()
    try:
        yield server
    finally:
        server.gate.set()
        server.shutdown()
        server.server_close()
