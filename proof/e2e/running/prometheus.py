# SPDX-License-Identifier: Apache-2.0
"""Prometheus beside a server, and the dashboard's queries asked of it."""

import json
import shutil
import subprocess
import time
import urllib.error
import urllib.parse
import urllib.request
from pathlib import Path
from typing import Any, Self

from proof.e2e.running.server import Server, open_port

DASHBOARD = Path(__file__).parents[3] / "deploy/grafana.json"
SCRAPES = """\
global: {{scrape_interval: 1s, scrape_timeout: 1s}}
scrape_configs:
  - job_name: vllm
    static_configs: [targets: ["127.0.0.1:{port}"]]
"""
PATIENCE = 30.0
"""Seconds until a query must have an answer: a rate takes two samples."""


def installed() -> bool:
    return shutil.which("prometheus") is not None


def queries() -> dict[str, str]:
    """Those of the dashboard, by panel and legend."""
    panels = json.loads(DASHBOARD.read_text())["panels"]
    return {
        f"{panel['title']}: {target['legendFormat']}": target["expr"]
        for panel in panels
        for target in panel["targets"]
    }


class Prometheus:
    """Reads a server's `/metrics` each second while a `with` block runs."""

    def __init__(self, server: Server, folder: Path) -> None:
        port = open_port()
        self._url = f"http://127.0.0.1:{port}/api/v1/query?"
        config = folder / "prometheus.yml"
        config.write_text(SCRAPES.format(port=server.port))
        self._log = (folder / "prometheus.log").open("w")
        self._process = subprocess.Popen(
            [
                "prometheus",
                f"--config.file={config}",
                f"--storage.tsdb.path={folder / 'samples'}",
                f"--web.listen-address=127.0.0.1:{port}",
            ],
            stdout=self._log,
            stderr=subprocess.STDOUT,
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._process.terminate()
        self._process.wait()
        self._log.close()

    def values(self, query: str) -> list[float]:
        """What it answers, as soon as there is anything.

        Raises:
            urllib.error.HTTPError: it does not understand the query.
        """
        limit = time.monotonic() + PATIENCE
        while True:
            found = self._ask(query)
            if found or time.monotonic() > limit:
                return found
            time.sleep(0.5)

    def _ask(self, query: str) -> list[float]:
        asked = self._url + urllib.parse.urlencode({"query": query})
        try:
            with urllib.request.urlopen(asked, timeout=PATIENCE) as answer:
                given: dict[str, Any] = json.load(answer)
        except urllib.error.HTTPError:
            raise
        except OSError:
            return []  # It does not listen yet.
        return [float(one["value"][1]) for one in given["data"]["result"]]
