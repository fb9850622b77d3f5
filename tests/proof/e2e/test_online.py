# SPDX-License-Identifier: Apache-2.0
"""Quantizing a checkpoint while it is loaded ends with words, by each name for it. Runs
with --full."""

import pytest

from proof.e2e.judging.endings import ended
from proof.e2e.judging.verdicts import WAVES
from proof.e2e.running.serving import Engines, EngineStopped, Job

NAMES = (
    "fp8",
    "fp8_per_tensor",
    "fp8_per_block",
    "fp8_per_channel",
    "int8_per_channel_weight_only",
    "nvfp4_per_token",
    "mxfp8",
    "mxfp4",
    "gpt_oss_mxfp4",
    "moe_wna16",
)
SAYS = (
    "DeepSeek-V4 on XPU does not support",
    "Unknown quantization method",
    "quantization is currently not supported in xpu",
    "Cannot find the config file",
    # A release that takes mxfp4 for a checkpoint's alone.
    "of the checkpoint cannot be loaded",
)
"""Ours, or vLLM's own of a name that it does not know, or takes elsewhere alone."""


def job(name: str) -> Job:
    return Job(f"by {name}", WAVES, (("quantization", name),), checkpoint="bf16")


@pytest.mark.full
@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.serves(job(name))) for name in NAMES]
)
def test_the_start_ends_with_words(engines: Engines, release: str, name: str) -> None:
    with pytest.raises(EngineStopped) as stopped:
        engines.serve(release, job(name))
    found = ended(str(stopped.value))
    print(f"{release} {name}: {found.kind}: {found.why}")
    assert found.kind == "refuses", found.why
    assert any(words in found.why for words in SAYS), found.why
