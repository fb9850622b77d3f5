# SPDX-License-Identifier: Apache-2.0
"""The repository and the cache that the tests of the emulation use, and where the
kernels run that they hold stand-ins against: a GPU, else the repaired interpreter."""

import os
from pathlib import Path

import pytest
import torch

from xpustack.core.cache import Cache
from xpustack.core.project import Project


def _device() -> torch.device:
    for kind in ("cuda", "xpu"):
        if getattr(torch, kind).is_available():
            return torch.device(kind)
    return torch.device("cpu")


DEVICE = _device()
if DEVICE.type == "cpu":
    os.environ["TRITON_INTERPRET"] = "1"
    from kernels.interpreter import repair
    from kernels.interpreter_speed import speed_up

    repair()
    speed_up()


@pytest.fixture(scope="session")
def kernel_device() -> torch.device:
    """The device that a kernel's tensors live on; a stand-in's live on the CPU."""
    return DEVICE


@pytest.fixture(scope="session")
def real_cache() -> Cache:
    """The cache that real archives are downloaded to, shared by all runs."""
    return Cache.default()


@pytest.fixture(scope="session")
def real_project() -> Project:
    """This repository."""
    return Project.find(Path(__file__).parent)
