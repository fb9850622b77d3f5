# SPDX-License-Identifier: Apache-2.0
"""The command line in a stack of the test's own."""

from stack_fixtures import (  # noqa: F401
    backend,
    cache,
    call,
    cloned,
    links,
    project,
    real_cache,
    real_project,
    release,
    sdist,
    shipped,
    small_disk,
    small_server,
    stack,
    three_steps,
    tiny,
)
