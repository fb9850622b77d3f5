# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""What differs between the releases of vLLM that have this package."""

from packaging.version import Version

import vllm

RELEASE = Version(vllm.__version__).release[:2]

OFFLOADS = RELEASE >= (0, 26)
"""The release copies pages to the host's memory and back on XPU."""
SERVES_NIXL = RELEASE >= (0, 31)
"""Every byte that NIXL brings is the sender's."""
LISTS_BALANCED_EXPERTS = RELEASE >= (0, 31)
"""The configuration takes EPLB, of which XPU's model does nothing."""
COMPARES_GRAPHS = RELEASE >= (0, 31)
"""XPU captures graphs of this model."""
ALL_QUANTIZATIONS = (
    "experts in MXFP4",
    "FP8 by rows",
    "FP8 in blocks",
    "MXFP8",
    "NVFP4",
    "MXFP4",
    "INT4",
    "AutoRound",
    "GPTQ",
)
QUANTIZATIONS = {
    (0, 22): ("FP8 by rows",),
    (0, 26): ("FP8 by rows", "MXFP4", "INT4"),
}.get(RELEASE, ALL_QUANTIZATIONS)
"""What was run and is right besides DeepSeek's own, as messages name it."""
