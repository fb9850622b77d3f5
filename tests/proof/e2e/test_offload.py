# SPDX-License-Identifier: Apache-2.0
"""Pages that the device has no room for go to the host and come back as they were."""

from dataclasses import replace

import pytest

from proof.e2e.checkpoints import dspark
from proof.e2e.judging.checks import (
    TIGHT,
    check_attention,
    check_same_logprobs,
    logprobs_of,
)
from proof.e2e.running.serving import Engines, Job, Prompt, Served
from proof.e2e.twins.comparison import attention_errors
from proof.e2e.twins.twin import Roundings, Twin

pytestmark = [pytest.mark.newest, pytest.mark.full]

LENGTH, PAGE = 290, 256
"""Behind a page from the host there are still enough tokens for a step like that of the
whole prompt: log-probabilities are the same."""
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
OVERWRITTEN = replace(
    OFFLOADED, name="an overwritten row of a page from the host", overwrites=True
)
COMPARED = replace(
    OFFLOADED,
    name="bytes of a page from the host",
    engine=(
        *OFFLOADED.engine,
        ("worker_cls", "proof.e2e.inside.loaded_pages.PagesWorker"),
    ),
)


DRAFTED = 330
"""Tokens of a prompt with drafts, which leave 64 behind a page to be computed again."""
AT_MOST = 4
"""Tokens of a step that checks drafts."""
WITH_DSPARK = "a draft that knows nothing"
DRAFTS = {
    "MTP": ({"method": "mtp", "num_speculative_tokens": 1}, ""),
    "DSpark": ({"method": "dspark", "num_speculative_tokens": 3}, WITH_DSPARK),
}
"""And the checkpoint that has them."""


def jobs(name: str) -> tuple[Job, Job]:
    """With drafts, without the host's memory and with it."""
    method, model = DRAFTS[name]
    engine = dict(SMALL) | {"max_model_len": 350, "max_num_batched_tokens": 350}
    alone = Job(
        f"{name}, a small cache",
        tuple((replace(prompt, length=DRAFTED),) for (prompt,) in WAVES),
        (*engine.items(), ("speculative_config", method)),
        checkpoint=model,
        splits_keys=False,
    )
    told = (*alone.engine, ("kv_transfer_config", TRANSFER))
    return alone, replace(alone, name=f"{name}, the host's cache", engine=told)


def computed(result: Served) -> list[int]:
    """How many tokens of each prompt were computed."""
    return [
        count
        for record in result.answer["records"]
        if (record["layer"], record["part"]) == (0, "attn")
        for _, count in record["rows"]
        if count > 1
    ]


def prompt_rows(result: Served) -> list[int]:
    """`computed`, without steps that only check drafts."""
    return [count for count in computed(result) if count > AT_MOST]


def test_every_byte_comes_back_from_the_host(engines: Engines, release: str) -> None:
    """Every cache is what the prompt's steps wrote, where other prompts were since."""
    served = engines.serve(release, COMPARED)
    assert computed(served) == [LENGTH] * (len(WAVES) - 1) + [LENGTH - PAGE]
    (found,) = served.answer["pages"]
    print(found)
    for layer, entry in found.items():
        assert entry["compared"] and not entry["missing"], (layer, entry)
        assert entry["took"] == entry["compared"], (layer, entry)
        assert not entry["wrong"], (layer, entry)


def test_pages_come_back_from_the_host(
    engines: Engines, twin: Twin, release: str
) -> None:
    alone = engines.serve(release, ALONE)
    assert computed(alone) == [LENGTH] * len(WAVES)
    offloaded = engines.serve(release, OFFLOADED)
    assert computed(offloaded) == [LENGTH] * (len(WAVES) - 1) + [LENGTH - PAGE]
    assert offloaded.new_tokens() == alone.new_tokens()
    check_same_logprobs(logprobs_of(offloaded), logprobs_of(alone))
    check_attention(offloaded, twin)


@pytest.mark.parametrize("name", DRAFTS)
def test_pages_come_back_with_drafts(engines: Engines, release: str, name: str) -> None:
    if name == "DSpark" and not engines.has_dspark(release):
        pytest.skip(f"{release} has no DSpark for DeepSeek-V4 on XPU")
    engines.add_checkpoint(WITH_DSPARK, dspark.DSpark(0, {}))
    alone, offloaded = (engines.serve(release, job) for job in jobs(name))
    assert prompt_rows(alone) == [DRAFTED] * len(WAVES)
    assert prompt_rows(offloaded) == [DRAFTED] * (len(WAVES) - 1) + [DRAFTED - PAGE]
    assert offloaded.new_tokens() == alone.new_tokens()
    check_same_logprobs(logprobs_of(offloaded), logprobs_of(alone))


def test_an_overwritten_row_is_seen(engines: Engines, twin: Twin, release: str) -> None:
    """By log-probabilities, and by what the attention of its layer gives; it may change
    no token."""
    alone = engines.serve(release, ALONE)
    found = engines.serve(release, OVERWRITTEN)
    assert computed(found)[-1] == LENGTH - PAGE
    print("the same tokens:", found.new_tokens() == alone.new_tokens())
    with pytest.raises(AssertionError, match=r"log-probabilities are \S+ apart"):
        check_same_logprobs(logprobs_of(found), logprobs_of(alone))
    errors = attention_errors(found.answer, twin, Roundings.of(found.answer))
    print(*errors, sep="\n")
    *_, last = (error for error in errors if error.layer == 1)
    assert last.core > 2 * TIGHT
    assert all(error.core <= TIGHT for error in errors if error is not last)
