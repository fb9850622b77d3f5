# SPDX-License-Identifier: Apache-2.0
"""Calls of routed experts with MXFP4 weights."""

from dataclasses import dataclass

import torch

from kernels.xpu_dsv4 import experts


@dataclass(frozen=True)
class Call:
    """A call of `routed_experts`, its weights as in a checkpoint."""

    x: torch.Tensor
    w13: torch.Tensor
    w13_scale: torch.Tensor
    w2: torch.Tensor
    w2_scale: torch.Tensor
    weights: torch.Tensor
    ids: torch.Tensor
    expert_map: torch.Tensor | None = None
    limit: float | None = 10.0


def make(
    tokens: int,
    topk: int = 2,
    count: int = 4,
    hidden: int = 64,
    intermediate: int = 32,
    seed: int = 0,
) -> Call:
    torch.manual_seed(seed)

    def weight(rows: int, depth: int) -> tuple[torch.Tensor, torch.Tensor]:
        return (
            torch.randint(0, 256, (count, rows, depth // 2), dtype=torch.uint8),
            torch.randint(122, 127, (count, rows, depth // 32), dtype=torch.uint8),
        )

    ids = torch.stack([torch.randperm(count)[:topk] for _ in range(tokens)])
    return Call(
        torch.randn(tokens, hidden).bfloat16(),
        *weight(2 * intermediate, hidden),
        *weight(hidden, intermediate),
        torch.rand(tokens, topk),
        ids.int(),
    )


def on(call: Call, device: torch.device) -> list[torch.Tensor | None]:
    """The arguments on `device`, up to `expert_map`."""
    w13, w13_scale, w2, w2_scale = (
        tensor.clone().to(device)
        for tensor in (call.w13, call.w13_scale, call.w2, call.w2_scale)
    )
    experts.arrange_mxfp4_experts(w13, w13_scale)
    experts.arrange_mxfp4_experts(w2, w2_scale)
    x = torch.empty_strided(call.x.shape, call.x.stride(), dtype=torch.bfloat16)
    x = x.to(device).copy_(call.x)
    rest = (call.weights.to(device), call.ids.to(device))
    expert_map = None if call.expert_map is None else call.expert_map.to(device)
    return [x, w13, w13_scale, w2, w2_scale, *rest, expert_map]
