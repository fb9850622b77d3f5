# SPDX-License-Identifier: Apache-2.0
"""The plugin of the wheel refuses what DeepSeek-V4 cannot do on XPU."""

from pathlib import Path

from helpers import layout
from policy import options
from policy.faults import *  # noqa: F403
from policy.layouts import *  # noqa: F403
from policy.loader import *  # noqa: F403
from policy.options import *  # noqa: F403
from policy.parts import *  # noqa: F403
from policy.plugin import *  # noqa: F403
from policy.quantizations import *  # noqa: F403
from policy.shards import *  # noqa: F403
from policy.starts import looks_here  # noqa: F401
from policy.tensors import *  # noqa: F403

if layout.RELEASE >= (0, 31):
    from helpers.graph_verdicts import said  # noqa: F401
    from policy.graph_cases import *  # noqa: F403
    from policy.graph_drafts import *  # noqa: F403
    from policy.graph_writes import *  # noqa: F403
    from policy.graphs import *  # noqa: F403
    from policy.images import *  # noqa: F403
    from policy.nixl import *  # noqa: F403
    from policy.v41 import *  # noqa: F403
    from policy.v41_tensors import *  # noqa: F403

    def test_experts_that_move(tmp_path: Path) -> None:
        """The model does nothing of it, and says nothing."""
        asked = {"tensor_parallel_size": 2, "enable_expert_parallel": True}
        asked["enable_eplb"] = True
        end = options.end_of_configuration(tmp_path, **asked)
        wanted = "Drop --enable-eplb; --enable-expert-parallel works without it"
        assert wanted in end, f"the start ends with {end}"
