# SPDX-License-Identifier: Apache-2.0
"""Tokens without the hybrid cache manager, which some connectors switch off."""

import pytest

from proof.e2e.judging.checks import check_same_logprobs, logprobs_of
from proof.e2e.running.serving import Engines, Job, Prompt

pytestmark = pytest.mark.full

WAVES = tuple((Prompt(260, 2, seed=seed),) for seed in (1, 2, 1))
"""More than a block of 256 tokens, and the first prompt again."""
SMALL = (("max_model_len", 300), ("max_num_batched_tokens", 300), ("max_num_seqs", 1))
ALONE = Job("no connector", WAVES, SMALL, splits_keys=False)
WITHOUT_HYBRID = Job(
    "no hybrid cache manager",
    WAVES,
    (*SMALL, ("disable_hybrid_kv_cache_manager", True)),
    splits_keys=False,
)


def test_windows_in_full_caches(engines: Engines, release: str) -> None:
    alone = engines.serve(release, ALONE)
    found = engines.serve(release, WITHOUT_HYBRID)
    assert found.new_tokens() == alone.new_tokens()
    check_same_logprobs(logprobs_of(found), logprobs_of(alone))
