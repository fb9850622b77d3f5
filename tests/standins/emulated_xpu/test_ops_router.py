# SPDX-License-Identifier: Apache-2.0
"""The stand-ins of router and norms against formulas written in another way."""

import pytest
import torch

from standins.emulated_xpu.ops.experts import moe_gather, remap_hidden_states
from standins.emulated_xpu.ops.norms import fused_add_rms_norm, rms_norm
from standins.emulated_xpu.ops.router import topk_softplus_sqrt


def route(
    logits: torch.Tensor, topk: int, **options: object
) -> tuple[torch.Tensor, ...]:
    """Weights and ids of the experts that the op chooses."""
    weights = torch.full((len(logits), topk), torch.nan)
    ids = torch.full((len(logits), topk), -7, dtype=torch.int32)
    topk_softplus_sqrt(weights, ids, ids.clone(), logits, True, 1.5, **options)  # type: ignore[arg-type]
    return weights, ids


def test_a_bias_chooses_experts_and_keeps_their_weights() -> None:
    logits = torch.randn(5, 6)
    bias = torch.tensor([9.0, 0.0, 0.0, 9.0, 0.0, 0.0])
    weights, ids = route(logits, 2, correction_bias=bias)
    assert {tuple(sorted(row)) for row in ids.tolist()} == {(0, 3)}
    scores = torch.log1p(logits.exp()).sqrt()[:, [0, 3]]
    expected = scores / scores.sum(1, keepdim=True) * 1.5
    order = ids.argsort(1)
    torch.testing.assert_close(weights.gather(1, order), expected)


def test_a_table_chooses_experts_and_padding_gets_none() -> None:
    table = torch.tensor([[2, 0], [1, 2]], dtype=torch.int32)
    padding = torch.tensor([False, False, True])
    weights, ids = route(
        torch.randn(3, 3),
        2,
        tid2eid=table,
        input_ids=torch.tensor([1, 0, 0], dtype=torch.int32),
        is_padding=padding,
    )
    assert ids.tolist() == [[1, 2], [2, 0], [-1, -1]]
    assert weights[2].tolist() == [0.0, 0.0]
    torch.testing.assert_close(weights[:2].sum(1), torch.full((2,), 1.5))


@pytest.mark.parametrize(
    "otherwise",
    [
        {"correction_bias": torch.tensor([9.0, 8.0, 0.0, 0.0])},
        {"tid2eid": torch.tensor([[0, 1]] * 13, dtype=torch.int32)},
    ],
    ids=["bias", "table"],
)
def test_the_bias_of_images_chooses_for_their_tokens_alone(
    otherwise: dict[str, torch.Tensor],
) -> None:
    _, ids = route(
        torch.zeros(4, 4),
        2,
        input_ids=torch.tensor([6, 7, 11, 12]),
        bias_vl=torch.tensor([0.0, 0.0, 9.0, 8.0]),
        image_sentinel_lo=7,
        **otherwise,
    )
    assert ids.sort(1).values.tolist() == [[0, 1], [2, 3], [2, 3], [0, 1]]


def test_rows_return_to_their_tokens_and_padded_tokens_give_zeros(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("EMULATED_XPU_KERNELS", "0.1.15.4")
    hidden = torch.randn(3, 4)
    ids = torch.tensor([[1, 0], [-1, -1], [0, 2]], dtype=torch.int32)
    rows = torch.full((6, 4), torch.nan)
    counts = torch.zeros(3, dtype=torch.int32)
    position = torch.zeros(3, 2, dtype=torch.int32)
    remap_hidden_states(hidden, None, rows, None, None, counts, position, ids, 3, 3)
    assert counts.tolist() == [2, 1, 1]
    output = torch.empty(3, 4)
    weights = torch.tensor([[0.25, 0.75], [0.0, 0.0], [0.5, 0.5]])
    moe_gather(output, rows, weights, position, 3)
    torch.testing.assert_close(output[0], hidden[0])
    torch.testing.assert_close(output[2], hidden[2])
    assert output[1].tolist() == [0.0] * 4


def test_norms_scale_to_unit_mean_square() -> None:
    x, residual = torch.randn(4, 64) * 7, torch.randn(4, 64)
    out = torch.empty_like(x)
    rms_norm(out, x, None, 0.0)
    torch.testing.assert_close(out.square().mean(1), torch.ones(4))
    total, weight = x + residual, torch.randn(64)
    fused_add_rms_norm(x, residual, weight, 0.0)
    torch.testing.assert_close(residual, total)
    torch.testing.assert_close(x, total / total.norm(dim=1, keepdim=True) * 8 * weight)
