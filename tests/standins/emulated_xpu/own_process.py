# SPDX-License-Identifier: Apache-2.0
"""Runs a function in a fork of the tests' process: an op that is defined with torch
cannot be undefined."""

import multiprocessing
from collections.abc import Callable
from typing import Any


def in_own_process(function: Callable[..., Any], *args: Any) -> Any:
    """What `function` returns or raises in a forked process."""
    with multiprocessing.get_context("fork").Pool(1) as pool:
        return pool.apply(function, args)
