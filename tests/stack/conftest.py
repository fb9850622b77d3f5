# SPDX-License-Identifier: Apache-2.0
"""Small archives, projects and stacks that each test makes, and the real cache."""

from stack_fixtures import (  # noqa: F401
    backend,
    cache,
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
