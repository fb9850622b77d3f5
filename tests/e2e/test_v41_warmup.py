# SPDX-License-Identifier: Apache-2.0
"""After vLLM's own warm-up no request of V4.1 compiles a kernel of its layers."""

import pytest

from e2e import v41
from e2e.serving import Engines, Job, Prompt

pytestmark = pytest.mark.newest

OF_LAYERS = (
    "vllm.models.deepseek_v4",
    "vllm.model_executor.kernels.xpu_dsv4.",
    "vllm.model_executor.kernels.attention.dsa.",
    "vllm.model_executor.kernels.mhc.",
)
WARMED = Job(
    "v4.1, warmed up",
    (
        (Prompt(161, 8, seed=1), Prompt(5, 6, seed=2), Prompt(1, 4, seed=3)),
        (Prompt(90, 2, seed=4),),
    ),
    (
        *v41.SERVER,
        ("worker_cls", "e2e.warmed.WarmedWorker"),
        ("enforce_eager", False),
        ("compilation_config", {"mode": 0, "cudagraph_mode": "NONE"}),
        ("max_num_batched_tokens", 128),
    ),
    checkpoint="v4.1",
)


@pytest.mark.serves(WARMED)
def test_a_request_compiles_nothing(engines: Engines, release: str) -> None:
    if not engines.has_v41(release):
        pytest.skip(f"{release} refuses V4.1 on XPU")
    result = engines.serve(release, WARMED)
    print(*result.answer["late"], sep="\n")
    assert len(result.answer["warmed"]) > 50, "nothing was warmed up"
    ours = [text for text in result.answer["late"] if text[2:].startswith(OF_LAYERS)]
    names = sorted({text.split("'")[1] for text in ours})
    assert not names, f"a request compiles {names}"
