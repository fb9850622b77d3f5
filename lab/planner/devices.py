# SPDX-License-Identifier: Apache-2.0
"""What people saw of this model's parts on a device, beside what a plan computes."""

from lab.memory import Device

_SEEN = {
    "Max ": "with captured graphs vllm-project/vllm#48946 saw corrupt text on two Max"
    " 1100 (v0.24.0); eager and compiled mode were right",
}
"""By the beginning of a device's name."""


def warnings(device: Device) -> list[str]:
    """What is known of a device."""
    return [says for name, says in _SEEN.items() if device.name.startswith(name)]
