# SPDX-License-Identifier: Apache-2.0
"""A server whose experts lie in host memory tells what they read."""

import pytest
from test_faults import HOST_EXPERTS, ask, eventually

from proof.e2e.checkpoints.checkpoint import CHOSEN, FLASH
from proof.e2e.running.server import Server
from proof.e2e.running.serving import Engines

pytestmark = pytest.mark.newest

NAME = "vllm:expert_cache_{}_total"


@pytest.mark.shows("metrics of experts in host memory", "equal")
def test_metrics_are_those_of_the_experts(engines: Engines, release: str) -> None:
    """All tokens of a step, in all layers, need the experts that a token has at least,
    and no more than there are; what has no slot is read whole."""

    def counts() -> tuple[float, ...]:
        names = ("queries", "hits", "bytes_read")
        return tuple(server.metric(NAME.format(name)) for name in names)

    with Server(engines, release, *HOST_EXPERTS) as server:
        server.wait()
        sizes = []
        for _ in range(2):
            before = counts()
            ask(server, 4)
            assert eventually(lambda before=before: counts() > before), server.log
            queries, hits, read = (
                new - old for new, old in zip(counts(), before, strict=True)
            )
            layers = len(FLASH.ratios)
            assert 4 * layers * CHOSEN <= queries <= 4 * layers * FLASH.experts
            assert 0 <= hits < queries
            sizes.append(read / (queries - hits))
        assert sizes[0] == sizes[1]
