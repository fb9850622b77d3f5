# SPDX-License-Identifier: Apache-2.0
"""Comparison with a float64 reference under three tolerances at once."""

import torch

figures: list[tuple[str, float]] = []
"""What was compared and its relative error, or its share of a bound; newest last."""


def assert_close(
    actual: torch.Tensor,
    expected: torch.Tensor,
    *,
    absolute: float,
    relative: float,
    cosine: float = 1e-5,
    name: str = "result",
) -> None:
    """Raise unless `actual` matches `expected` and its infinities and NaNs.

    Args:
        actual: what a kernel gave.
        expected: the reference, of the same shape.
        absolute: bound of the largest difference, in units of `expected`.
        relative: bound of the difference's norm over the norm of `expected`.
        cosine: bound of one minus the cosine of the angle between both.
        name: names the values in the message.
    """
    assert actual.shape == expected.shape, (name, actual.shape, expected.shape)
    a, b = actual.double().cpu(), expected.double().cpu()
    for kind, where in (("NaN", torch.isnan), ("inf", torch.isposinf)):
        assert torch.equal(where(a), where(b)), f"{name}: positions of {kind} differ"
    assert torch.equal(torch.isneginf(a), torch.isneginf(b)), f"{name}: -inf differs"
    finite = torch.isfinite(b)
    a, b = a[finite], b[finite]
    if not a.numel():
        return
    difference = (a - b).abs()
    assert difference.max() <= absolute, f"{name}: off by {difference.max():.3e}"
    norm = b.norm()
    if norm > 0:
        ratio = difference.norm() / norm
        figures.append((f"{name}, relative", float(ratio)))
        assert ratio <= relative, f"{name}: relative error {ratio:.3e}"
        angle = 1 - (a @ b) / (a.norm() * norm)
        assert angle <= cosine, f"{name}: cosine off by {angle:.3e}"


def assert_within(
    actual: torch.Tensor, expected: torch.Tensor, bound: torch.Tensor
) -> None:
    """Raise unless every element of `actual` is within its own bound of `expected`."""
    assert actual.shape == expected.shape == bound.shape
    ratio = (actual.double().cpu() - expected).abs() / bound.clamp(min=1e-30)
    # NaN is within no bound.
    worst = float(ratio.nan_to_num(torch.inf).max()) if ratio.numel() else 0.0
    figures.append(("share of the bound", worst))
    assert worst <= 1, f"off by {worst:.2f} times the bound"
