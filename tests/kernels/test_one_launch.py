# SPDX-License-Identifier: Apache-2.0
"""What compute-sanitizer is given launches each kernel, with finite results."""

import pytest
import torch

from lab.benchmarks.cases.one_launch import LAUNCHES


@pytest.mark.parametrize("launch", LAUNCHES, ids=lambda launch: launch.__name__)
def test_results_are_finite(launch, device):
    torch.manual_seed(0)
    assert launch(device).isfinite().all()
