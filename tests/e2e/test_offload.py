# SPDX-License-Identifier: Apache-2.0
"""Pages that the device has no room for go to the host and come back as they were."""

import pytest

from e2e.serving import Engines, Job, Prompt, Served

pytestmark = [pytest.mark.newest, pytest.mark.full]

LENGTH, PAGE = 260, 256
FIRST, *OTHERS = (Prompt(LENGTH, 2, seed=seed) for seed in range(1, 5))
WAVES = tuple((prompt,) for prompt in (FIRST, *OTHERS, FIRST))
SMALL = (
    ("enable_prefix_caching", True),
    ("kv_cache_memory_bytes", 8 << 20),
    ("max_model_len", 300),
    ("max_num_batched_tokens", 300),
    ("max_num_seqs", 1),
)
"""A cache that holds the pages of few prompts."""


TRANSFER = {
    "kv_connector": "OffloadingConnector",
    "kv_role": "kv_both",
    "kv_connector_extra_config": {"cpu_bytes_to_use": 256 << 20},
}
ALONE = Job("a small cache", WAVES, SMALL, splits_keys=False)
OFFLOADED = Job(
    "a small cache and the host's",
    WAVES,
    (*SMALL, ("kv_transfer_config", TRANSFER)),
    splits_keys=False,
)


def computed(result: Served) -> list[int]:
    """How many tokens of each prompt were computed."""
    return [
        count
        for record in result.answer["records"]
        if (record["layer"], record["part"]) == (0, "attn")
        for _, count in record["rows"]
        if count > 1
    ]


def test_pages_come_back_from_the_host(engines: Engines, release: str) -> None:
    alone = engines.serve(release, ALONE)
    assert computed(alone) == [LENGTH] * len(WAVES)
    offloaded = engines.serve(release, OFFLOADED)
    assert computed(offloaded) == [LENGTH] * (len(WAVES) - 1) + [LENGTH - PAGE]
    assert offloaded.new_tokens() == alone.new_tokens()
