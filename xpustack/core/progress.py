# SPDX-License-Identifier: Apache-2.0
"""How long work tells its caller where it stands, without knowing the terminal."""

import time
from collections.abc import Callable
from typing import TypeAlias

Progress: TypeAlias = Callable[[str], None]
"""Receives one short line, without a newline, each time something worth saying
happened. It is called from the thread that does the work and must not block."""


def silent(message: str) -> None:
    """Drop every message: what a caller gets who asked for no progress."""


def at_most_every(seconds: float, progress: Progress) -> Progress:
    """Thin out a fast source: forward a message only if the last forwarded one
    is at least `seconds` old. The first message is held to the same rule, so
    work that is done at once stays quiet."""
    last = time.monotonic()

    def thinned(message: str) -> None:
        nonlocal last
        now = time.monotonic()
        if now - last >= seconds:
            last = now
            progress(message)

    return thinned
