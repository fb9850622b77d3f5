# SPDX-License-Identifier: Apache-2.0
"""The repository and the cache that the tests of the emulation use."""

from pathlib import Path

import pytest

from xpustack.core.cache import Cache
from xpustack.core.project import Project


@pytest.fixture(scope="session")
def real_cache() -> Cache:
    """The cache that real archives are downloaded to, shared by all runs."""
    return Cache.default()


@pytest.fixture(scope="session")
def real_project() -> Project:
    """This repository."""
    return Project.find(Path(__file__).parent)
