# SPDX-License-Identifier: Apache-2.0
"""The repository and the cache that the tests of the emulation use, and where the
kernels run that they hold stand-ins against: what `--device` names."""

from pathlib import Path

import pytest
import torch
from device_choice import take_device

from stack.core.cache import Cache
from stack.core.project import Project

_DEVICE = pytest.StashKey[torch.device]()


def pytest_configure(config: pytest.Config) -> None:
    config.stash[_DEVICE] = take_device(config)


@pytest.fixture(scope="session")
def kernel_device(request: pytest.FixtureRequest) -> torch.device:
    """The device that a kernel's tensors live on; a stand-in's live on the CPU."""
    return request.config.stash[_DEVICE]


@pytest.fixture(scope="session")
def real_cache() -> Cache:
    """The cache that real archives are downloaded to, shared by all runs."""
    return Cache.default()


@pytest.fixture(scope="session")
def real_project() -> Project:
    """This repository."""
    return Project.find(Path(__file__).parent)
