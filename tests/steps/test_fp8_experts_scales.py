# SPDX-License-Identifier: Apache-2.0
"""E8M0 scales of FP8 experts keep their values, those of MXFP4 experts their bytes."""

import pytest
import torch
from helpers.checkpoint_loader import E8M0, EXPERTS, LAYERS, LINEARS, check_held

every_owner = pytest.mark.parametrize("owner", LAYERS)
every_linear = pytest.mark.parametrize("linears", [E8M0, torch.float32])


@every_owner
@every_linear
def test_e8m0_scales_of_fp8_experts(owner: str, linears: torch.dtype) -> None:
    dtypes = dict.fromkeys(EXPERTS, E8M0) | dict.fromkeys(LINEARS, linears)
    check_held(owner, "fp8", dtypes)


@pytest.mark.unchanged
@every_owner
def test_float32_scales_of_fp8_experts(owner: str) -> None:
    check_held(owner, "fp8", dict.fromkeys(EXPERTS, torch.float32))


@pytest.mark.unchanged
@every_owner
def test_e8m0_scales_of_mxfp4_experts(owner: str) -> None:
    check_held(owner, "fp4", dict.fromkeys([*EXPERTS, *LINEARS], E8M0))
