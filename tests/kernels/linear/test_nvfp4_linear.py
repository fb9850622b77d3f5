# SPDX-License-Identifier: Apache-2.0
"""The product with NVFP4 weights against float64."""

import pytest
import torch
from compare import assert_close

from kernels.reference._quant import E2M1_VALUES
from kernels.reference.linear import nvfp4_linear as reference
from kernels.xpu_dsv4.linear.nvfp4_linear import nvfp4_linear


def arguments(rows, columns, size):
    scale = (torch.rand(columns, size // 16) * 300 + 1).to(torch.float8_e4m3fn)
    return (
        torch.randn(rows, size).bfloat16(),
        torch.randint(0, 256, (columns, size // 2), dtype=torch.uint8),
        scale,
        torch.tensor(0.0021),
    )


def compare(given, device):
    moved = [x.to(device) for x in given]
    mine = nvfp4_linear(*moved)
    assert mine.dtype == torch.bfloat16
    want = reference.nvfp4_linear(*given)
    scale = float(want.abs().max())
    assert_close(mine, want, absolute=2**-8 * scale, relative=3e-3, name="product")
    return mine


@pytest.mark.parametrize(
    ("rows", "columns", "size"),
    [(1, 64, 64), (3, 111, 144), (17, 65, 16), (63, 30, 272), (16, 128, 128)],
)
def test_product(rows, columns, size, device):
    torch.manual_seed(rows)
    compare(arguments(rows, columns, size), device)


def test_strided_rows(device):
    torch.manual_seed(2)
    x, weight, scale, whole = arguments(4, 40, 64)
    wide = torch.full((4, 70), 77.0).bfloat16()
    wide[:, 3:67] = x
    packed = torch.full((40, 50), 255, dtype=torch.uint8)
    packed[:, 8:40] = weight
    compare((wide[:, 3:67], packed[:, 8:40], scale, whole), device)


def test_every_code_and_every_scale(device):
    """Each of 16 codes under each finite e4m3 scale enters with its exact value."""
    scales = torch.arange(256, dtype=torch.uint8)
    scales = scales[(scales & 0x7F) != 0x7F].view(torch.float8_e4m3fn)
    weight = torch.zeros(254, 8, dtype=torch.uint8)
    codes = torch.arange(16, dtype=torch.uint8)
    weight[:] = codes[::2] | codes[1::2] << 4
    given = (
        torch.eye(16).bfloat16(),
        weight,
        scales[:, None],
        torch.tensor(1.0),
    )
    mine = compare(given, device).cpu().double()
    grid = torch.tensor(E2M1_VALUES).double()
    assert torch.equal(mine, torch.cat((grid, -grid))[:, None] * scales.double())


@pytest.mark.parametrize(("rows", "columns"), [(0, 8), (3, 0)])
def test_empty(rows, columns, device):
    moved = [x.to(device) for x in arguments(rows, columns, 32)]
    assert nvfp4_linear(*moved).shape == (rows, columns)


@pytest.mark.parametrize(
    ("place", "value", "message"),
    [
        (0, torch.ones(3, 64), "x.dtype"),
        (0, torch.ones(3, 60).bfloat16(), "x.shape"),
        (1, torch.zeros(8, 31, dtype=torch.uint8), "weight.shape"),
        (2, torch.ones(8, 4), "weight_scale.dtype"),
        (3, torch.ones(2), "weight_global_scale.shape"),
    ],
)
def test_bad_input_is_named(place, value, message, device):
    given = list(arguments(3, 8, 64))
    given[place] = value
    moved = [x.to(device) for x in given]
    with pytest.raises(ValueError, match=message):
        nvfp4_linear(*moved)
