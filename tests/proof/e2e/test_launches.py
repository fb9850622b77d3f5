# SPDX-License-Identifier: Apache-2.0
"""The step model counts the launches that layers have in the engine. Runs with --full.

Linear layers are FP8 and MXFP8, as the published models have them, and every op that
the release takes by default is there.
"""

import pytest

from lab.aot.costs import step
from proof.e2e.checkpoints import v41
from proof.e2e.checkpoints.checkpoint import FLASH
from proof.e2e.running.serving import Engines, Job, Prompt

pytestmark = [pytest.mark.full, pytest.mark.newest]

WAVE = (Prompt(170, 3, seed=1),)
"""More entries than an indexer chooses."""
MERGE = "_merge_kernel"
BEFORE_EXPERTS = ("_C::rms_norm", "delayed_kernel")
"""What is launched last before them."""
FIRST = ("project_kernel", "_xpu_C::mhc_pre", "_xpu_C::mhc_fused_post_pre")
"""What is launched first in a layer without Engram."""


def test_layers_launch_what_the_step_model_counts(
    release: str, engines: Engines
) -> None:
    kinds = {
        layer: f"ratio{ratio}" if ratio else "window"
        for layer, ratio in enumerate(FLASH.ratios)
    }
    check(engines, release, Job("launches", (WAVE,), counting=True), "V4", kinds)


def test_layers_of_v41_launch_what_the_step_model_counts(
    release: str, engines: Engines
) -> None:
    job = Job("launches of v4.1", (WAVE,), v41.SERVER, counting=True, checkpoint="v4.1")
    kinds = {layer: kind(layer, ratio) for layer, ratio in enumerate(v41.RATIOS)}
    check(engines, release, job, "V4.1", kinds)


def kind(layer: int, ratio: int) -> str:
    """Of a layer of V4.1, as `lab.memory_v41` names it."""
    if not ratio:
        return "window"
    if layer in v41.KV_SOURCES:
        return f"source{ratio}"
    return f"index{ratio}" if layer in v41.INDEX_SOURCES else f"shared{ratio}"


def check(
    engines: Engines, release: str, job: Job, family: str, kinds: dict[int, str]
) -> None:
    known = step.constants()["launches"]
    found = engines.serve(release, job).answer["layer_launches"]
    last = {layer: launched for layer, tokens, launched in found if tokens == 1}
    assert set(last) == set(kinds)
    for layer, launched in last.items():
        print(f"layer {layer}, {kinds[layer]}: {launched}")
    for layer, launched in last.items():
        first = next(i for i, name in enumerate(launched) if name in FIRST)
        end = max(i for i, name in enumerate(launched) if name in BEFORE_EXPERTS) + 1
        own, experts = launched[first:end], launched[end:]
        assert len(experts) == known[family]["experts"][0], experts
        without = [name for name in own if name != MERGE]
        assert [len(without), len(own)] == known[family][kinds[layer]], own
        if family == "V4.1" and layer in v41.ENGRAM_LAYERS:
            assert first == known[family]["engram"][0], launched[:first]
