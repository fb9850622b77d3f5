# SPDX-License-Identifier: Apache-2.0
"""How long-running work reports its progress, without knowing the terminal."""

import time
from collections.abc import Callable
from typing import TypeAlias

Progress: TypeAlias = Callable[[str], None]
"""Receives one short line, without a newline, each time something worth reporting
happens. It is called from the thread that does the work and must not block."""


def silent(message: str) -> None:
    """Drop every message: for callers that want no progress."""


def at_most_every(seconds: float, progress: Progress) -> Progress:
    """Forward a message only if the last forwarded one is at least `seconds` old.
    The same holds for the first message, so work that ends quickly reports nothing."""
    last = time.monotonic()

    def forward(message: str) -> None:
        nonlocal last
        now = time.monotonic()
        if now - last >= seconds:
            last = now
            progress(message)

    return forward
