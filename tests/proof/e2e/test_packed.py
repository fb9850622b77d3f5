# SPDX-License-Identifier: Apache-2.0
"""Checkpoints that others packed, through the engine. Runs with --full."""

import re

import pytest

from proof.e2e.checkpoints import mtp
from proof.e2e.judging.checks import (
    TIGHT,
    check_attention,
    check_experts,
    check_logits,
    check_same_tokens,
)
from proof.e2e.judging.drafts import check_drafts, successors
from proof.e2e.running.serving import Engines, EngineStopped, Job, Prompt
from proof.e2e.twins.comparison import attention_errors, feed_forward_errors
from proof.e2e.twins.twin import Roundings, Twin

pytestmark = pytest.mark.full

WAVES = ((Prompt(72, 4, seed=1), Prompt(5, 4, seed=2)),)
INT4 = Job("int4", WAVES, checkpoint="int4")
NVFP4_EXPERTS = Job("nvfp4 experts", WAVES, checkpoint="nvfp4-experts")
NVFP4_DRAFTING = Job(
    "nvfp4 experts and drafts",
    WAVES,
    (("speculative_config", {"method": "mtp", "num_speculative_tokens": 1}),),
    checkpoint="nvfp4 experts and a draft that knows",
)
STOPS = "No NvFp4 MoE backend supports|KeyError: .*_scale"
"""Older releases have no emulation that clamps; the oldest does not know the format."""
WITHOUT_EMULATION = ("v0.22.1", "v0.26.0")
"""Of experts in NVFP4 that clamps as the model."""
ACTIVATIONS_IN_FP4 = 0.25
"""How far e2m1 activations, of at most three significant bits, move the experts."""


def test_int4(engines: Engines, release: str) -> None:
    """Releases without INT4 experts on XPU name the tensor; which those are stands in
    the table that `test_formats.py` holds them to."""
    try:
        result = engines.serve(release, INT4)
    except EngineStopped as stop:
        assert re.search(r"w1\.qweight .* cannot be loaded", str(stop)), stop
        return
    twin = Twin(engines.written("int4")[1])
    check_attention(result, twin)
    check_experts(result, twin)
    check_logits(result, twin)
    ops = result.answer["ops"]
    assert ops["_xpu_C::int4_gemm_w4a16"] > 0, ops


def test_experts_in_nvfp4_are_emulated(engines: Engines, release: str) -> None:
    if release in WITHOUT_EMULATION:
        with pytest.raises(RuntimeError, match=STOPS):
            engines.serve(release, NVFP4_EXPERTS)
        return
    twin = Twin(engines.written("nvfp4-experts")[1])
    result = engines.serve(release, NVFP4_EXPERTS)
    launches = result.answer["launches"]
    assert any("nvfp4_emulation" in name for name in launches), launches
    roundings = Roundings.of(result.answer)
    for error in attention_errors(result.answer, twin, roundings):
        print(error)
        assert error.core <= TIGHT and error.output <= TIGHT, error
    errors = feed_forward_errors(result.answer, twin, roundings)
    print(errors)
    assert max(errors.values()) <= ACTIVATIONS_IN_FP4, errors


def test_a_draft_beside_experts_in_nvfp4(engines: Engines, release: str) -> None:
    """Its own experts are in MXFP4."""
    if release in WITHOUT_EMULATION:
        pytest.skip(f"{release} refuses experts in NVFP4, as the test above shows")
    plain = engines.serve(release, NVFP4_EXPERTS)
    known = successors(plain)
    engines.add_checkpoint(NVFP4_DRAFTING.checkpoint, mtp.Nvfp4Experts(0, known))
    drafted = engines.serve(release, NVFP4_DRAFTING)
    check_same_tokens(drafted, plain)
    check_drafts(drafted, mtp.says_after(known), 1)
