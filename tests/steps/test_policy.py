# SPDX-License-Identifier: Apache-2.0
"""The plugin of the wheel refuses what DeepSeek-V4 cannot do on XPU."""

from helpers import layout
from policy.options import *  # noqa: F403
from policy.plugin import *  # noqa: F403
from policy.quantizations import *  # noqa: F403
from policy.starts import looks_here  # noqa: F401

if layout.RELEASE >= (0, 31):
    from policy.images import *  # noqa: F403
    from policy.nixl import *  # noqa: F403
    from policy.v41 import *  # noqa: F403
