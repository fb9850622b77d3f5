# SPDX-License-Identifier: Apache-2.0
"""The router calls its op with the arguments that the pinned version takes."""

from typing import Any

import pytest
import torch
from helpers import layout

TOKENS, EXPERTS, TOPK, SCALE = 5, 8, 2, 1.5


def route(logits: torch.Tensor, **options: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """The weights and the experts that the release's router answers, `[T, k]`."""
    router = layout.module(f"{layout.FUSED_MOE}.router.fused_topk_bias_router")
    weights, experts = router.fused_topk_bias(
        hidden_states=torch.zeros(TOKENS, 16, device=layout.device()),
        gating_output=logits.to(layout.device()),
        scoring_func="sqrtsoftplus",
        topk=TOPK,
        renormalize=True,
        routed_scaling_factor=SCALE,
        **options,
    )
    return weights.cpu(), experts.cpu()


def random_logits() -> torch.Tensor:
    return torch.randn(TOKENS, EXPERTS, generator=torch.Generator().manual_seed(0))


def by_expert(answer: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
    weights, experts = answer
    zeros = torch.zeros(TOKENS, EXPERTS, dtype=torch.double)
    return zeros.scatter(1, experts.long(), weights.double())


def scores_of(logits: torch.Tensor) -> torch.Tensor:
    return torch.nn.functional.softplus(logits.double()).sqrt()


def wanted(logits: torch.Tensor, chosen: torch.Tensor) -> torch.Tensor:
    scores = scores_of(logits)
    weights = torch.zeros_like(scores).scatter(1, chosen, scores.gather(1, chosen))
    return weights * SCALE / weights.sum(1, keepdim=True)


def test_scores_choose_the_experts() -> None:
    bias = torch.randn(EXPERTS, generator=torch.Generator().manual_seed(1))
    logits = random_logits()
    got = by_expert(route(logits, e_score_correction_bias=bias.to(layout.device())))
    chosen = (scores_of(logits) + bias).topk(TOPK).indices
    torch.testing.assert_close(got, wanted(logits, chosen), atol=1e-6, rtol=1e-5)


def test_a_table_chooses_the_experts() -> None:
    generator = torch.Generator().manual_seed(2)
    tokens = torch.tensor([3, 0, 2, 2, 1])
    table = torch.stack(
        [torch.randperm(EXPERTS, generator=generator)[:TOPK] for _ in range(4)]
    )
    logits = random_logits()
    answer = route(
        logits,
        e_score_correction_bias=None,
        input_tokens=tokens.to(layout.device()),
        hash_indices_table=table.int().to(layout.device()),
    )
    torch.testing.assert_close(
        by_expert(answer), wanted(logits, table[tokens]), atol=1e-6, rtol=1e-5
    )


@pytest.mark.unchanged
@pytest.mark.any_platform
def test_images_are_still_handed_over(monkeypatch: pytest.MonkeyPatch) -> None:
    """If a model routes images, the op still gets their routing arguments."""
    given: list[tuple[Any, ...]] = []

    class Ops:
        @staticmethod
        def topk_softplus_sqrt(*arguments: Any) -> None:
            given.append(arguments)

    monkeypatch.setattr(torch.ops, "_moe_C", Ops)
    bias = torch.zeros(EXPERTS)
    route(
        random_logits(),
        e_score_correction_bias=bias,
        input_tokens=torch.zeros(TOKENS, dtype=torch.int32),
        bias_vl=bias,
        image_sentinel_lo=7,
    )
    assert given[0][-2] is bias and given[0][-1] == 7
