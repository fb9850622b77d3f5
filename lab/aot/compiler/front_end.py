# SPDX-License-Identifier: Apache-2.0
"""Whether the compiler's front end, triton-xpu, has a wheel for this Python."""

import sys

NEWEST = (3, 12)
"""The newest Python that the pinned triton-xpu has a wheel for."""


def missing(python: tuple[int, int] = sys.version_info[:2]) -> str | None:
    """Why nothing can be compiled with this Python; None if it can."""
    if python <= NEWEST:
        return None
    return "triton-xpu has no wheel for Python {}.{}, only up to {}.{}".format(
        *python, *NEWEST
    )
