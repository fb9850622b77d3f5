# SPDX-License-Identifier: Apache-2.0
"""What the check of captured graphs says, here and on another rank."""

import logging
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from vllm.config import VllmConfig

from helpers import model_configs

CHECK = "vllm_xpu_dsv4.graph_check"
LOGGER = "vllm.plugins.xpu_dsv4"
NO_CASE = 1 << 30
"""A rank's word that no case differs."""


@pytest.fixture
def said(caplog: pytest.LogCaptureFixture) -> Iterator[pytest.LogCaptureFixture]:
    """What the check logs, in a world of one rank."""
    logger = logging.getLogger(LOGGER)
    logger.addHandler(caplog.handler)
    caplog.set_level(logging.INFO)
    with model_configs.current(VllmConfig()):
        yield caplog
    logger.removeHandler(caplog.handler)


def other_rank(patch: pytest.MonkeyPatch, first: int, same: int = 1) -> None:
    """A second rank, whose first case that differs is `first`, and whose eager step
    after the replays is the one before them (`same`) or not."""
    verdicts = iter([first, same])

    def all_reduce(tensor: torch.Tensor, op: Any, group: Any) -> None:
        assert op == torch.distributed.ReduceOp.MIN
        tensor.clamp_(max=next(verdicts))

    patch.setattr(torch.distributed, "all_reduce", all_reduce)
