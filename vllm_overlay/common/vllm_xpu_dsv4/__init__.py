# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""What this wheel refuses of DeepSeek-V4 on Intel GPUs, as a platform plugin of vLLM.

The wheel names `register` in the group `vllm.platform_plugins`, and `register_loader`
in `vllm.general_plugins`. vLLM then takes a platform that derives from its own for XPU.
No other model and no other platform is asked anything, and with XPU_DSV4_POLICY=0 vLLM
starts as without this package.
"""

import functools
import os
from contextlib import suppress

SWITCH = "XPU_DSV4_POLICY"
"""The environment variable that is 0 where nothing is to be checked."""
PLATFORM = "vllm_xpu_dsv4.platform.DeepSeekV4XPUPlatform"


def is_on() -> bool:
    """Whether the checks are wanted."""
    return os.environ.get(SWITCH, "1") != "0"


def register() -> str | None:
    """Name the platform to vLLM, or None: where it is switched off, where vLLM finds no
    XPU, and beside another platform plugin that is active, because vLLM takes one."""
    # vLLM calls this while it chooses its platform.
    from vllm.platforms import xpu_platform_plugin

    if not is_on() or xpu_platform_plugin() is None or _another_is_active():
        return None
    return PLATFORM


def register_loader() -> None:
    """Tell vLLM of the loader that the platform names, in each of its processes."""
    from vllm.platforms import current_platform

    # An instance answers None to any name.
    if getattr(type(current_platform), "checks_deepseek_v4", False):
        import vllm_xpu_dsv4.loader  # noqa: F401


@functools.cache
def _another_is_active() -> bool:
    """Cached, because vLLM asks twice and logs the plugins each time."""
    from vllm.plugins import PLATFORM_PLUGINS_GROUP, load_plugins_by_group

    for plugin in load_plugins_by_group(PLATFORM_PLUGINS_GROUP).values():
        # One that fails is not active: vLLM says why.
        with suppress(Exception):
            if plugin is not register and plugin() is not None:
                return True
    return False
