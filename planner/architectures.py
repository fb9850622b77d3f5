# SPDX-License-Identifier: Apache-2.0
"""What releases do with this model on an architecture of devices, as far as known: a
line for each."""

from dataclasses import dataclass

from benchmarks.memory import Device
from planner.asked import Asked
from planner.choices import words
from xpustack.base.releases import Release
from xpustack.core.errors import CheckFailed

OF = {
    "Max 1550, one stack": "pvc",
    "Max 1100": "pvc",
    "Arc Pro B70": "xe2",
    "Arc Pro B60": "xe2",
    "Arc Pro B50": "xe2",
}
"""The architecture of each device: `pvc`, `xe2` or `xe3`."""


@dataclass(frozen=True)
class Known:
    """What is known of some releases on an architecture.

    Attributes:
        refuses: whether no engine starts; else it is a warning.
    """

    architecture: str
    releases: tuple[str, ...]
    refuses: bool
    says: str


KNOWN = (
    Known(
        "pvc",
        ("v0.31.0", "v0.32.0", "v0.33.0"),
        True,
        "the release's experts refuse this device, which is neither Xe2 nor Xe3"
        " (vllm/model_executor/layers/fused_moe/experts/xpu_moe.py line 68:"
        " XPUExperts)",
    ),
    Known(
        "pvc",
        ("v0.22.1", "v0.26.0"),
        False,
        "with captured graphs vllm-project/vllm#48946 saw corrupt text on two Max 1100;"
        " eager and compiled mode were right",
    ),
)


def refusal(asked: Asked, release: Release) -> CheckFailed | None:
    """The error if no engine of the release starts on the device."""
    device = asked.device
    known = next((one for one in _of(device, release) if one.refuses), None)
    if known is None:
        return None
    others = [
        name
        for one in KNOWN
        if one.architecture == known.architecture and not one.refuses
        for name in one.releases
    ]
    other = max(others, default="", key=lambda n: [*map(int, n[1:].split("."))])
    return CheckFailed(
        f"no engine of this model starts on {device.name}",
        release=release.name,
        detail=[known.says],
        hint=" ".join(words(asked, other, asked.count))
        if other
        else "an Arc Pro: docs/deploying.md, Devices",
    )


def warnings(device: Device, release: Release) -> list[str]:
    """What is known of the device on this release, beside a refusal."""
    return [one.says for one in _of(device, release) if not one.refuses]


def _of(device: Device, release: Release) -> list[Known]:
    return [
        one
        for one in KNOWN
        if one.architecture == OF[device.name] and release.name in one.releases
    ]
