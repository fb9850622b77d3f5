# SPDX-License-Identifier: Apache-2.0
"""Routed experts of Flash, whole, in decode: MXFP4, FP8 and INT4 weights."""

from collections.abc import Iterator
from functools import cache, partial

import torch

from kernels.reference.moe.experts import routed_experts as reference
from kernels.xpu_dsv4.moe._experts_formats import FP8, INT4, MXFP4
from kernels.xpu_dsv4.moe.experts import (
    arrange_fp8_experts,
    arrange_int4_experts,
    arrange_mxfp4_experts,
    routed_experts,
    workspace_size,
)

from ..workload import OURS, Candidate, Case, Competitors
from . import experts_others as others
from .experts_layer import LIMIT, Experts, Sizes, Step, layer_of, step_of

TOKENS = (1, 16, 64)
ARRANGE = {
    MXFP4: arrange_mxfp4_experts,
    FP8: arrange_fp8_experts,
    INT4: arrange_int4_experts,
}


@cache
def ours(sizes: Sizes, device: torch.device) -> Experts:
    """This repository's kernels."""
    layer = layer_of(sizes, device)
    w13, w13_scale, w2, w2_scale = (
        part.clone() for part in (layer.w13, layer.w13_scale, layer.w2, layer.w2_scale)
    )
    arrange = ARRANGE[sizes.form]
    arrange(w13, w13_scale)
    arrange(w2, w2_scale)

    def run(step: Step) -> torch.Tensor:
        tokens = len(step.x)
        shape = (tokens, sizes.topk, sizes.experts, sizes.hidden, sizes.intermediate)
        size = workspace_size(*shape)
        return routed_experts(
            step.x,
            w13,
            w13_scale,
            w2,
            w2_scale,
            step.weights,
            step.ids,
            swiglu_limit=LIMIT,
            workspace=torch.empty(size, dtype=torch.uint8, device=device),
        )

    return run


def candidates(
    sizes: Sizes, tokens: int, competitors: Competitors, device: torch.device
) -> list[Candidate]:
    """All implementations on the same two steps."""
    layer = layer_of(sizes, device)
    steps = [step_of(sizes, tokens, device) for _ in range(2)]

    @cache
    def expected() -> torch.Tensor:
        first = steps[0]
        parts = (layer.w13, layer.w13_scale, layer.w2, layer.w2_scale)
        return reference(first.x, *parts, first.weights, first.ids, None, LIMIT)

    def candidate(name: str, run: Experts, note: str = "") -> Candidate:
        calls = [partial(run, step) for step in steps]
        return Candidate(name, calls, lambda: run(steps[0]), expected, 6e-3, note=note)

    made = [candidate(OURS, ours(sizes, device))]
    if device.type == "cuda":
        for name, run, note in others.implementations(sizes, layer, competitors):
            made.append(candidate(name, run, note))
    return made


def cases(competitors: Competitors, device: torch.device) -> Iterator[Case]:
    """Decode of a few tokens; traffic is that of the experts that are chosen."""
    small = device.type == "cpu"
    for form in ARRANGE:
        sizes = Sizes(8, 2, 128, 128, form) if small else Sizes(form=form)
        for tokens in TOKENS[: 1 if small else None]:
            distinct = sizes.experts * (1 - (1 - sizes.topk / sizes.experts) ** tokens)
            yield Case(
                "experts" if form is MXFP4 else f"experts {form.name}",
                tokens,
                0,
                0,
                distinct * sizes.expert_bytes,
                6.0 * tokens * sizes.topk * sizes.hidden * sizes.intermediate,
                partial(candidates, sizes, tokens, competitors, device),
            )
