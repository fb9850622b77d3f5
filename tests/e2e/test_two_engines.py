# SPDX-License-Identifier: Apache-2.0
"""Two engines that read half of the experts each answer as one that has them all.

Each has a process and requests of its own, as in vLLM's example of data parallelism
without a server. In a step they exchange tokens, the one more than the other, and who
has finished computes for nobody.
"""

import socket

import pytest

from e2e.checks import check_attention, check_experts, check_logits, check_same_tokens
from e2e.serving import Engines, Job, Prompt
from e2e.twin import Twin

ENGINES = 2
PROMPTS = (Prompt(9, 5, seed=2), Prompt(11, 3, seed=3))


def open_port() -> int:
    with socket.socket() as opened:
        opened.bind(("127.0.0.1", 0))
        return int(opened.getsockname()[1])


PORT = open_port()
ALONE = Job("one engine", (PROMPTS,))
SHARED = [
    Job(
        f"engine {rank} of {ENGINES}",
        ((PROMPTS[rank],),),
        (("enable_expert_parallel", True), ("enable_ep_weight_filter", True)),
        environment=(
            ("VLLM_DP_MASTER_IP", "127.0.0.1"),
            ("VLLM_DP_MASTER_PORT", str(PORT)),
            ("VLLM_DP_RANK", str(rank)),
            ("VLLM_DP_SIZE", str(ENGINES)),
        ),
    )
    for rank in range(ENGINES)
]


@pytest.mark.newest
@pytest.mark.serves(ALONE, *SHARED)
def test_two_engines_answer_as_one(engines: Engines, twin: Twin, release: str) -> None:
    alone = engines.serve(release, ALONE)
    for job in SHARED:
        result = engines.serve(release, job)
        check_same_tokens(result, alone)
        check_attention(result, twin)
        check_experts(result, twin)
        check_logits(result, twin)
