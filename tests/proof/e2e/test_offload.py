# SPDX-License-Identifier: Apache-2.0
"""Pages that the device has no room for go to the host and come back as they were."""

from dataclasses import dataclass, replace
from typing import Any

import pytest

from proof.e2e.checkpoints import dspark
from proof.e2e.checkpoints.v41 import SERVER
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


@dataclass(frozen=True)
class Kind:
    """Of what else pages go to the host."""

    length: int
    """Of a prompt."""
    known: int
    """Its tokens that come back."""
    engine: tuple[tuple[str, Any], ...] = ()
    model: str = ""
    """The checkpoint's name."""


DRAFTED = 330
"""A draft leaves 64 tokens behind a page to be computed again."""
AT_MOST = 4
"""Tokens of a step that checks drafts."""
WITH_DSPARK = "a draft that knows nothing"
KINDS = {
    "MTP": Kind(
        DRAFTED,
        PAGE,
        (("speculative_config", {"method": "mtp", "num_speculative_tokens": 1}),),
    ),
    "DSpark": Kind(
        DRAFTED,
        PAGE,
        (("speculative_config", {"method": "dspark", "num_speculative_tokens": 3}),),
        WITH_DSPARK,
    ),
    "V4.1": Kind(LENGTH, PAGE, SERVER, "v4.1"),
}


def jobs(name: str, kind: Kind) -> tuple[Job, Job]:
    """Without the host's memory and with it."""
    waves = tuple((Prompt(kind.length, 2, seed=seed),) for seed in (1, 2, 3, 4, 1))
    engine = dict((*kind.engine, *SMALL))
    engine |= {"max_model_len": 350, "max_num_batched_tokens": 350}
    alone = Job(
        f"{name}, a small cache",
        waves,
        tuple(engine.items()),
        checkpoint=kind.model,
        splits_keys=False,
        environment=(("XPU_DSV4_POLICY", "0"),) if name == "V4.1" else (),
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


@pytest.mark.parametrize("name", KINDS)
def test_pages_of_drafts_and_of_others_come_back(
    engines: Engines, release: str, name: str
) -> None:
    kind = KINDS[name]
    has = {"DSpark": engines.has_dspark, "V4.1": engines.has_v41}.get(name)
    if has and not has(release):
        pytest.skip(f"{release} has no {name} on XPU")
    engines.add_checkpoint(WITH_DSPARK, dspark.DSpark(0, {}))
    alone, offloaded = (engines.serve(release, job) for job in jobs(name, kind))
    whole = [kind.length] * len(alone.job.waves)
    print(prompt_rows(alone), prompt_rows(offloaded))
    assert prompt_rows(alone) == whole
    assert prompt_rows(offloaded) == [*whole[:-1], kind.length - kind.known]
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
