# SPDX-License-Identifier: Apache-2.0
"""A checkpoint that the owner has, served with its experts in host memory: tokens per
second of one and of four requests, and how many experts had a slot.

Prompts are pages of this project, because a cache's hits depend on text that somebody
wrote. What the answers say is not judged.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from proof.on_device.stages.programs import Programs, StageStopped, without_vllm
from proof.on_device.stages.records import Finding
from proof.on_device.stages.setup import Outcome, Setup

PAGES = ("docs/deploying.md", "docs/kernels.md", "docs/e2e.md", "CONTRIBUTING.md")
CHARACTERS = 4000
NEW = 128
"""Tokens of an answer."""
GIB = 1 << 30
ENGINE: dict[str, Any] = {
    "skip_tokenizer_init": False,
    "kv_cache_memory_bytes": None,
    "gpu_memory_utilization": 0.9,
    "max_model_len": 4096,
    "max_num_batched_tokens": 2048,
    "max_num_seqs": len(PAGES),
    "moe_expert_cache_size": -1,
}
"""Beside what every engine of the report has; -1 is as many slots as fit."""


def serve(setup: Setup) -> Outcome:
    """Run the stage `model`."""
    if left_out := without_vllm(setup):
        return left_out
    if setup.model is None:
        return Outcome("left out", "no --model was named")
    texts = [text_of(setup.project.root / page) for page in PAGES]
    one, every = texts[:1], texts
    waves = [
        [{"text": text, "new": new} for text in asked]
        for asked in (one, every)
        # The first call compiles; the shorter one is the prompt's time.
        for new in (1, 1, NEW)
    ]
    try:
        found = Programs(setup, "model").engine(
            "host experts",
            setup.model,
            waves,
            share=1.0,
            **ENGINE,
            tensor_parallel_size=setup.device["count"],
        )
    except StageStopped as stopped:
        return stopped.outcome
    if lacks := found.get("lacks"):
        return Outcome("left out", f"this vLLM has no {lacks[0]}")
    if found["not_finite"]:
        what = f"{found['not_finite']} log probabilities are NaN or infinite"
        return Outcome("failed", what, (Finding(what),))
    figures = figures_of(found)
    return Outcome("passed", summary(figures), data=figures)


def text_of(page: Path) -> str:
    """The beginning of a page."""
    return page.read_text("utf-8")[:CHARACTERS]


def figures_of(found: Mapping[str, Any]) -> dict[str, float]:
    """What the engine's answers come to.

    Returns:
        Tokens per second of one request and of all, behind their prompts; the share of
        experts that had a slot, and GiB that a token of one request read.
    """
    seconds, counted = found["seconds"], found["expert_cache"]

    def rate(first: int, requests: int) -> float:
        took = seconds[first + 1] - seconds[first]
        return requests * (NEW - 1) / took if took > 0 else 0.0

    decoding = {
        name: counted[2][name] - counted[1][name]
        for name in ("queries", "hits", "bytes_read")
    }
    return {
        "seconds_to_ready": found["seconds_to_ready"],
        "seconds_to_first_token": seconds[1],
        "tokens_per_second_of_one": rate(1, 1),
        "tokens_per_second": rate(4, len(PAGES)),
        "hits": decoding["hits"] / max(decoding["queries"], 1),
        "gib_of_a_token": decoding["bytes_read"] / (NEW - 1) / GIB,
    }


def summary(figures: Mapping[str, float]) -> str:
    """One line for people."""
    return (
        f"{figures['tokens_per_second_of_one']:.1f} tokens/s of one request, "
        f"{figures['tokens_per_second']:.1f} of {len(PAGES)}; "
        f"{figures['hits']:.0%} of experts had a slot, "
        f"{figures['gib_of_a_token']:.2f} GiB a token"
    )
