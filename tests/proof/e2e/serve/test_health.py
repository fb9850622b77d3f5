# SPDX-License-Identifier: Apache-2.0
"""What monitoring reads: `/health`, `/metrics`, and the three probes."""

import math
import re
import time
from pathlib import Path

import pytest

from proof.e2e.running.prometheus import Prometheus, installed, queries
from proof.e2e.running.server import MODEL, READY, Server
from stack.release import served

pytestmark = pytest.mark.newest

DOCUMENTED = (
    "vllm:num_requests_running",
    "vllm:num_requests_waiting",
    "vllm:kv_cache_usage_perc",
    "vllm:prefix_cache_queries_total",
    "vllm:prefix_cache_hits_total",
    "vllm:prompt_tokens_total",
    "vllm:generation_tokens_total",
    "vllm:request_success_total",
    "vllm:time_to_first_token_seconds_count",
    "vllm:e2e_request_latency_seconds_count",
)
"""What upstream documents of `/metrics` and a dashboard shows first."""
APART = "vllm:nixl"
"""Counted where prefill and decode are apart: test_apart.py."""
SCRAPED = 3.0
"""Seconds within which Prometheus reads `/metrics` at least twice."""


@pytest.mark.shows("/health and /v1/models", "equal")
def test_health_and_models(server: Server) -> None:
    assert server.get("/health") == 200
    (model,) = server.client.models.list().data
    assert model.id == MODEL


@pytest.mark.shows("the health check of the images", "equal")
def test_the_health_check_of_the_images_and_a_canary_find_it_sound(
    server: Server,
) -> None:
    asked = served.Server(server.url)
    assert served.alive(asked) == f"alive: {server.url}"
    assert served.ready(asked) == "ready: 0 requests wait, 0 run"
    # It may compile, which takes a slow machine longer than the probe waits by itself.
    said = served.question(asked, twice=True, seconds=READY)
    assert said.startswith(f"{MODEL}: ")


@pytest.mark.shows("/metrics", "equal")
def test_metrics_count_what_was_asked(server: Server) -> None:
    counted = {name: server.metric(name) for name in DOCUMENTED}
    server.client.completions.create(
        model=MODEL,
        prompt=[5, 6, 7],
        max_tokens=2,
        temperature=0.0,
        extra_body={"ignore_eos": True},
    )
    now = {name: server.metric(name) for name in DOCUMENTED}
    more = {name: now[name] - counted[name] for name in DOCUMENTED}
    assert more["vllm:prompt_tokens_total"] == 3
    assert more["vllm:generation_tokens_total"] == 2
    assert more["vllm:request_success_total"] == 1
    assert more["vllm:time_to_first_token_seconds_count"] == 1
    assert now["vllm:num_requests_running"] == now["vllm:num_requests_waiting"] == 0


def test_the_dashboard_asks_for_what_is_counted(server: Server) -> None:
    server.client.completions.create(model=MODEL, prompt=[5, 6], max_tokens=2)
    texts = [text for text in queries().values() if APART not in text]
    for name in {name for text in texts for name in re.findall(r"vllm:\w+", text)}:
        server.metric(name)
    labels = {name for text in texts for name in re.findall(r"by \((\w+)\)", text)}
    shown = server.metrics()
    assert labels and not [name for name in labels if f'{name}="' not in shown]


@pytest.mark.skipif(not installed(), reason="there is no prometheus")
def test_prometheus_answers_the_dashboard(server: Server, tmp_path: Path) -> None:
    with Prometheus(server, tmp_path) as prometheus:
        assert prometheus.values("up") == [1.0]
        for length in (2, 3):
            prompt = list(range(5, 5 + length))
            server.client.completions.create(model=MODEL, prompt=prompt, max_tokens=4)
        time.sleep(SCRAPED)
        for name, query in queries().items():
            if APART not in query:
                found = prometheus.values(query)
                print(f"{name}: {found}")
                assert found and not any(map(math.isnan, found)), name
