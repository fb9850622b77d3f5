# SPDX-License-Identifier: Apache-2.0
"""The stand-ins of FP8 quantization by groups and by rows."""

import pytest
import torch

from standins.emulated_xpu.ops.quant import (
    dynamic_per_token_scaled_fp8_quant,
    per_token_group_fp8_quant,
    static_scaled_fp8_quant,
)
from standins.emulated_xpu.wheel.formats import next_power_of_two

GROUP, LARGEST = 32, 448.0


def run(x: torch.Tensor, ue8m0: bool) -> tuple[torch.Tensor, torch.Tensor]:
    values = torch.empty(x.shape, dtype=torch.float8_e4m3fn)
    scales = torch.full((*x.shape[:-1], x.shape[-1] // GROUP), torch.nan)
    per_token_group_fp8_quant(x, values, scales, GROUP, 1e-10, -LARGEST, LARGEST, ue8m0)
    return values, scales


def test_powers_of_two_are_kept_and_the_next_value_is_rounded_up() -> None:
    power = torch.ldexp(torch.ones(250), torch.arange(-125, 125))
    assert torch.equal(next_power_of_two(power), power)
    above = torch.nextafter(power, torch.tensor(torch.inf))
    assert torch.equal(next_power_of_two(above), 2 * power)


@pytest.mark.parametrize("ue8m0", [False, True])
def test_a_group_fits_its_own_scale(ue8m0: bool) -> None:
    torch.manual_seed(0)
    x = (torch.randn(3, 4, 64) * torch.tensor([1e-3, 1, 50, 7])[:, None]).bfloat16()
    values, scales = run(x, ue8m0)
    restored = values.float() * scales.repeat_interleave(GROUP, -1)
    error = (restored - x.float()).unflatten(-1, (-1, GROUP)).abs().amax(-1)
    amax = x.float().unflatten(-1, (-1, GROUP)).abs().amax(-1)
    assert (error <= amax * (0.07 if ue8m0 else 0.036)).all()
    assert torch.equal(scales, next_power_of_two(scales)) == ue8m0


def test_largest_value_under_a_power_of_two() -> None:
    x = torch.zeros(1, GROUP)
    x[0, 3] = LARGEST * 8
    values, scales = run(x, True)
    assert scales.item() == 8
    assert values[0, 3].float() == LARGEST


def test_zeros_get_the_least_scale() -> None:
    values, scales = run(torch.zeros(2, GROUP), False)
    assert not values.float().any()
    torch.testing.assert_close(scales, torch.full((2, 1), 1e-10 / LARGEST))


def test_a_partial_group_and_a_strided_row_are_refused() -> None:
    with pytest.raises(ValueError, match=r"\(1, 48\) must be contiguous in groups"):
        run(torch.zeros(1, 48), False)
    with pytest.raises(ValueError, match="must be contiguous"):
        run(torch.zeros(64, 32).t(), False)


def by_row(
    x: torch.Tensor, bound: torch.Tensor | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    values = torch.empty(x.shape, dtype=torch.float8_e4m3fn)
    scales = torch.full((len(x), 1), torch.nan)
    dynamic_per_token_scaled_fp8_quant(values, x, scales, bound)
    return values, scales


def test_a_row_fits_its_own_scale() -> None:
    torch.manual_seed(0)
    x = (torch.randn(3, 64) * torch.tensor([1e-3, 1, 50])[:, None]).bfloat16()
    values, scales = by_row(x)
    largest = x.float().abs().amax(-1, keepdim=True)
    torch.testing.assert_close(scales, largest / LARGEST)
    error = (values.float() * scales - x.float()).abs()
    assert (error <= x.float().abs() * 2**-4 + scales * 2**-10).all()


def test_a_row_of_zeros_stays_zero_and_a_bound_saturates() -> None:
    values, scales = by_row(torch.zeros(2, 8))
    assert not values.float().any() and not scales.any()
    values, scales = by_row(torch.tensor([[1.0, -900.0]]), torch.tensor(448.0))
    assert scales.item() == 1
    assert values.float().tolist() == [[1.0, -448.0]]


def test_a_given_scale_saturates_and_gives_codes_back() -> None:
    codes = torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn)
    codes = codes[codes.float().isfinite()]
    scale = torch.tensor(0.003)
    values = torch.empty_like(codes)
    static_scaled_fp8_quant(values, codes.float() * scale, scale)
    assert torch.equal(values.float(), codes.float())
    values = torch.empty(2, dtype=torch.float8_e4m3fn)
    static_scaled_fp8_quant(values, torch.tensor([9e9, -9e9]), scale)
    assert values.float().tolist() == [448.0, -448.0]
    with pytest.raises(NotImplementedError, match="one scale"):
        static_scaled_fp8_quant(values, torch.ones(2), torch.ones(2))
