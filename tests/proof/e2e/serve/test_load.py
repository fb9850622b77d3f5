# SPDX-License-Identifier: Apache-2.0
"""vLLM's own load client: no request fails, and none is answered as it is not alone."""

from pathlib import Path

import pytest

from proof.e2e.judging.load import Load, bench, check_texts
from proof.e2e.running.server import Server

pytestmark = pytest.mark.newest

SHORT = Load(requests=16, different=8, concurrency=8, shared=8)
LONG = Load(requests=200, different=40, concurrency=16, shared=280)


@pytest.mark.parametrize(
    "load",
    [
        pytest.param(SHORT, marks=pytest.mark.shows("16 requests, 8 at once", "equal")),
        pytest.param(
            LONG,
            marks=[
                pytest.mark.full,
                pytest.mark.shows("200 requests, 16 at once, shared prefix", "equal"),
            ],
        ),
    ],
    ids=["16 requests", "200 requests"],
)
def test_each_answer_is_that_of_the_request_alone(
    server: Server, tmp_path: Path, load: Load
) -> None:
    names = ("vllm:prefix_cache_hits_total", "vllm:request_success_total")
    before = [server.metric(name) for name in names]
    result = bench(server, load, tmp_path)
    hits, successes = (
        server.metric(name) - was for name, was in zip(names, before, strict=True)
    )
    # The client asks once more at first, whether the server is there.
    assert successes >= load.requests
    assert (hits > 0) == (load is LONG), hits
    check_texts(server, load, result["generated_texts"])
