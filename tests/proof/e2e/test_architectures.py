# SPDX-License-Identifier: Apache-2.0
"""What each kind of Intel GPU does with a release: it serves, or says why not.

The checkpoint's experts are MXFP4 where a test says nothing else, its prompts make the
indexer choose.
"""

from dataclasses import replace

import pytest
from packaging.version import Version

from proof.e2e.judging.checks import check_same_tokens
from proof.e2e.judging.verdicts import FORMATS, Format, verdict
from proof.e2e.running.serving import Engines, EngineStopped, Job, Prompt

pytestmark = pytest.mark.newest

XE2 = Job("on xe2", ((Prompt(72, 3, seed=1), Prompt(5, 4, seed=2)),))
PVC, XE3, PVC_VG = (
    replace(XE2, name=f"on {name}", architecture=name)
    for name in ("pvc", "xe3", "pvc_vg")
)
WRONG = "the device multiplies by 4-bit weights as if they were 16-bit ones"
"""Where the emulation ends because a device would give wrong numbers."""
EXPERTS = "XPUExperts is only supported on Intel Xe2/Xe3 GPUs"
SCORES = "Only XE2 mqa logits kernel is supported currently"


@pytest.mark.serves(XE2, PVC)
def test_a_max_gpu_answers_as_an_xe2(engines: Engines, release: str) -> None:
    check_same_tokens(engines.serve(release, PVC), engines.serve(release, XE2))


def by_triton(name: str) -> Format:
    """A kind of checkpoint on a Max GPU, its experts by our kernels."""
    job = replace(
        FORMATS[name].job,
        name=f"{name} by triton on pvc",
        engine=(("moe_backend", "triton"),),
        architecture="pvc",
    )
    return replace(FORMATS[name], job=job)


QUANTIZED = {name: by_triton(name) for name in ("base", "int4")}


@pytest.mark.full
@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=pytest.mark.serves(form.job))
        for name, form in QUANTIZED.items()
    ],
)
def test_fp8_and_int4_on_a_max_gpu(engines: Engines, release: str, name: str) -> None:
    """Every layer as Hugging Face's model has it, by experts that no op refuses."""
    found = verdict(engines, release, QUANTIZED[name])
    assert found.kind == "serves", found.why


@pytest.mark.serves(XE3)
def test_xe3_lacks_the_indexer_s_scores(engines: Engines, release: str) -> None:
    stopped = trace(engines, release, XE3)
    old = Version(release.removeprefix("v")) < Version("0.26")
    if old:
        assert WRONG in stopped
    else:
        assert f"RuntimeError: {SCORES}" in stopped


@pytest.mark.serves(PVC_VG)
def test_a_device_that_is_neither_lacks_them_too(
    engines: Engines, release: str
) -> None:
    stopped = trace(engines, release, PVC_VG)
    if Version(release.removeprefix("v")) < Version("0.27"):
        assert WRONG in stopped
    else:
        # The pin's experts refuse it, ours take their place.
        assert EXPERTS not in stopped
        assert f"RuntimeError: {SCORES}" in stopped


def trace(engines: Engines, release: str, job: Job) -> str:
    """The end of what an engine printed that ended with an error."""
    with pytest.raises(EngineStopped) as stopped:
        engines.serve(release, job)
    return str(stopped.value)
