# SPDX-License-Identifier: Apache-2.0
"""Faults planted in the lowering turn a comparison with float64 red."""

import pytest
import torch
from compare import assert_close
from device_choice import RAN

from kernels.reference.linear import nvfp4_linear as reference
from kernels.xpu_dsv4.linear import nvfp4_linear as kernel
from lab.lowered.opencl import BUILTINS, Cpu
from lab.lowered.run import lowering
from lab.lowered.spirv import without_barriers, without_load_masks
from stack.core.cache import Cache


@pytest.fixture
def cpu(request: pytest.FixtureRequest) -> Cpu:
    """The device of this run."""
    assert RAN in request.config.stash, "run with --device lowered"
    return Cpu(Cache.default().root / "lowered")


def roomy(tensor: torch.Tensor) -> torch.Tensor:
    """A copy with memory behind it: a load without its mask reads that."""
    buffer = torch.zeros(tensor.numel() + 65536, dtype=tensor.dtype)
    return buffer[: tensor.numel()].view(tensor.shape).copy_(tensor)


def product() -> None:
    """One product with NVFP4 weights, held against float64."""
    torch.manual_seed(3)
    given = (
        roomy(torch.randn(3, 144).bfloat16()),
        roomy(torch.randint(0, 256, (111, 72), dtype=torch.uint8)),
        roomy((torch.rand(111, 9) * 300 + 1).to(torch.float8_e4m3fn)),
        torch.tensor(0.0021),
    )
    mine, want = kernel.nvfp4_linear(*given), reference.nvfp4_linear(*given)
    bound = 2**-8 * float(want.abs().max())
    assert_close(mine, want, absolute=bound, relative=3e-3)


def test_the_product_is_right(cpu: Cpu) -> None:
    with lowering(cpu) as ran:
        product()
    assert [launch.kernel for launch in ran] == ["_nvfp4_linear_kernel"]


def test_halves_of_a_dpas_operand_swapped(cpu: Cpu) -> None:
    swapped = BUILTINS.read_text().replace("k % 2 ? pair", "k % 2 == 0 ? pair")
    assert swapped != BUILTINS.read_text()
    with lowering(cpu, builtins=swapped), pytest.raises(AssertionError):
        product()


def test_barriers_removed(cpu: Cpu) -> None:
    with lowering(cpu, edit=without_barriers), pytest.raises(AssertionError):
        product()


def test_masks_dropped(cpu: Cpu) -> None:
    with lowering(cpu, edit=without_load_masks), pytest.raises(AssertionError):
        product()
