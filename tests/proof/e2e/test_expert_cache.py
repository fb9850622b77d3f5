# SPDX-License-Identifier: Apache-2.0
"""Experts in host memory: the tokens of experts on the device, with few slots there.

The checkpoint's layers have eight experts, of which a token reads four.
"""

import re
from dataclasses import replace
from typing import Any

import pytest

from proof.e2e.checkpoints import v41
from proof.e2e.checkpoints.checkpoint import CHOSEN, FLASH
from proof.e2e.judging.checks import check_same_tokens
from proof.e2e.judging.drafts import successors
from proof.e2e.running.serving import Engines, EngineStopped, Job, Prompt

pytestmark = pytest.mark.newest

WAVES = (
    (Prompt(24, 3, seed=1), Prompt(5, 5, seed=2)),
    (Prompt(9, 4, seed=3),),
)
"""A step of many tokens needs all experts, a step of one as many as there are slots."""
SIZE = "moe_expert_cache_size"
CHUNKS = ("max_num_batched_tokens", 16)
"""A prompt comes in two."""
RESIDENT = Job(
    "experts on the device",
    WAVES,
    (("moe_backend", "triton"), CHUNKS),
    splits_keys=False,
)


def cached(slots: int, **others: object) -> Job:
    name = " ".join((f"{slots} slots of experts", *others))
    engine = ((SIZE, slots), CHUNKS, *others.items())
    return Job(name, WAVES, engine, splits_keys=False)


FEW, SIX = cached(CHOSEN), cached(CHOSEN + 2)
MTP = {"method": "mtp", "num_speculative_tokens": 1}
DRAFTS = cached(CHOSEN, speculative_config=MTP)
TWO_RANKS = cached(CHOSEN, tensor_parallel_size=2)
TWO_RESIDENT = replace(
    RESIDENT,
    name="two ranks, experts there",
    engine=(*RESIDENT.engine, ("tensor_parallel_size", 2)),
)
REFUSED = {
    "fewer slots than a token's experts": (
        cached(CHOSEN - 1),
        f"--moe-expert-cache-size {CHOSEN - 1} is less than the {CHOSEN} experts of a "
        f"token: {CHOSEN} is the least that works",
    ),
    "sleep": (cached(CHOSEN, enable_sleep_mode=True), "--enable-sleep-mode"),
    "ranks of whole experts": (
        cached(CHOSEN, tensor_parallel_size=2, enable_expert_parallel=True),
        "--enable-expert-parallel",
    ),
    "another backend": (
        cached(CHOSEN, moe_backend="xpu"),
        "only with MXFP4 experts in Triton on XPU",
    ),
    "as many as fit, and a cache of given size": (
        cached(-1),
        "--moe-expert-cache-size auto needs the memory that a step takes",
    ),
    "two places": (
        cached(CHOSEN, cpu_offload_gb=1.0),
        "already keeps the experts in host memory",
    ),
}


@pytest.mark.serves(RESIDENT, FEW, SIX)
@pytest.mark.parametrize("job", [FEW, SIX], ids=lambda job: job.name)
def test_few_slots_give_the_same_tokens(
    job: Job, engines: Engines, release: str
) -> None:
    found = engines.serve(release, job)
    resident = engines.serve(release, RESIDENT)
    check_same_tokens(found, resident)
    assert found.answer["logprobs"] == resident.answer["logprobs"]
    slots = dict(job.engine)[SIZE]
    assert f"Experts on the device: {slots} of {FLASH.experts} a layer" in found.log


@pytest.mark.full
def test_two_ranks_have_slots_for_their_parts(engines: Engines, release: str) -> None:
    found = engines.serve(release, TWO_RANKS)
    resident = engines.serve(release, TWO_RESIDENT)
    check_same_tokens(found, resident)
    assert found.answer["logprobs"] == resident.answer["logprobs"]


@pytest.mark.full
def test_a_draft_has_slots_too(engines: Engines, release: str) -> None:
    found = engines.serve(release, DRAFTS)
    check_same_tokens(found, engines.serve(release, RESIDENT))
    assert found.answer["drafts"]["drafted"]


V41 = Job(
    "v4.1, experts there",
    WAVES,
    (*v41.SERVER, ("moe_backend", "triton")),
    checkpoint="v4.1",
)


V41_FEW = Job("v4.1, slots", WAVES, (*v41.SERVER, (SIZE, CHOSEN)), checkpoint="v4.1")
V41_DRAFTS = Job(
    "v4.1, slots, drafts",
    WAVES,
    (
        *V41_FEW.engine,
        ("speculative_config", {"method": "dspark", "num_speculative_tokens": 3}),
    ),
    checkpoint="v4.1 and a draft",
)


@pytest.mark.full
@pytest.mark.parametrize("job", [V41_FEW, V41_DRAFTS], ids=lambda job: job.name)
def test_v41_has_slots_beside_its_tables(
    job: Job, engines: Engines, release: str
) -> None:
    if not engines.has_v41(release):
        pytest.skip(f"{release} refuses V4.1 on XPU")
    resident = engines.serve(release, V41)
    engines.add_checkpoint(V41_DRAFTS.checkpoint, v41.V41(0, successors(resident)))
    found = engines.serve(release, job)
    check_same_tokens(found, resident)
    assert bool(found.answer["drafts"].get("drafted")) == (job is V41_DRAFTS)
    assert f"Experts on the device: {CHOSEN} of " in found.log


AUTO = (
    ("kv_cache_memory_bytes", None),
    ("enable_prefix_caching", True),
    ("worker_cls", "proof.e2e.inside.recording.ToldMemoryWorker"),
)


@pytest.mark.full
@pytest.mark.parametrize(
    ("others", "resident"),
    [
        ({"tensor_parallel_size": 2}, TWO_RESIDENT),
        ({"speculative_config": MTP}, RESIDENT),
    ],
    ids=["two ranks", "drafts"],
)
def test_auto_gives_every_layer_and_rank_as_many(
    others: dict[str, Any], resident: Job, engines: Engines, release: str
) -> None:
    """Of what a worker has left, the cache of all requests comes first."""
    left = (("E2E_MEMORY_LEFT", str(26 << 20)),)
    auto = cached(-1, **dict(AUTO), **others)
    job = replace(auto, name=f"auto, {', '.join(others)}", environment=left)
    found = engines.serve(release, job)
    check_same_tokens(found, engines.serve(release, resident))
    (said,) = re.findall(r"Experts on the device: (\d) of 8 a layer", found.log)
    assert CHOSEN < int(said) <= FLASH.experts


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=pytest.mark.serves(REFUSED[name][0]))
        for name in REFUSED
    ],
)
def test_what_does_not_work_is_refused(
    name: str, engines: Engines, release: str
) -> None:
    job, reason = REFUSED[name]
    with pytest.raises(EngineStopped) as stopped:
        engines.serve(release, job)
    assert reason in str(stopped.value)
