# SPDX-License-Identifier: Apache-2.0
"""Calls of routed experts in each format of weights."""

from collections.abc import Callable
from dataclasses import dataclass

import torch

from kernels.xpu_dsv4.moe import experts

Weight = tuple[torch.Tensor, torch.Tensor]
"""Codes and scales."""


@dataclass(frozen=True)
class Form:
    """A format of weights.

    Attributes:
        weight: random ones of so many experts, rows and values, as in a checkpoint.
        arrange: brings them into the kernels' order.
        scale_block: columns and values under a scale; None where the format says it.

    """

    weight: Callable[[int, int, int], Weight]
    arrange: Callable[..., None]
    scale_block: tuple[int, int] | None

    @property
    def blocks(self) -> tuple[tuple[int, int], ...]:
        """The block as an argument, if there is one."""
        return () if self.scale_block is None else (self.scale_block,)


def _mxfp4() -> Form:
    def weight(count: int, rows: int, depth: int) -> Weight:
        return (
            torch.randint(0, 256, (count, rows, depth // 2), dtype=torch.uint8),
            torch.randint(122, 127, (count, rows, depth // 32), dtype=torch.uint8),
        )

    return Form(weight, experts.arrange_mxfp4_experts, None)


def _fp8(columns: int, values: int) -> Form:
    def weight(count: int, rows: int, depth: int) -> Weight:
        codes = torch.randint(0, 255, (count, rows, depth), dtype=torch.uint8)
        # No NaN, and half of them small.
        codes = torch.where(codes % 128 == 127, codes - 1, codes)
        codes = torch.where(codes % 2 == 0, codes & 0xBF, codes)
        scale = torch.rand(count, -(-rows // columns), -(-depth // values))
        return codes.view(torch.float8_e4m3fn), (0.5 + scale) * 2**-7

    return Form(weight, experts.arrange_fp8_experts, (columns, values))


def _int4(values: int) -> Form:
    def weight(count: int, rows: int, depth: int) -> Weight:
        scale = torch.rand(count, rows, -(-depth // values))
        return (
            torch.randint(0, 256, (count, rows, depth // 2), dtype=torch.uint8),
            ((0.5 + scale) * 2**-5).bfloat16(),
        )

    return Form(weight, experts.arrange_int4_experts, (1, values))


FORMS = {
    "mxfp4": _mxfp4(),
    "fp8": _fp8(32, 32),
    "int4": _int4(32),
    "fp8-64": _fp8(64, 64),
    "fp8-16x128": _fp8(16, 128),
    "fp8-128": _fp8(128, 128),
    "int4-128": _int4(128),
}
"""The first three have the smallest blocks of what is served."""


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
    form: Form = FORMS["mxfp4"]


def make(
    tokens: int,
    topk: int = 2,
    count: int = 4,
    hidden: int = 64,
    intermediate: int = 32,
    seed: int = 0,
    form: str = "mxfp4",
) -> Call:
    torch.manual_seed(seed)
    made = FORMS[form]
    ids = torch.stack([torch.randperm(count)[:topk] for _ in range(tokens)])
    return Call(
        torch.randn(tokens, hidden).bfloat16(),
        *made.weight(count, 2 * intermediate, hidden),
        *made.weight(count, hidden, intermediate),
        torch.rand(tokens, topk),
        ids.int(),
        form=made,
    )


def on(call: Call, device: torch.device) -> list[torch.Tensor | None]:
    """The arguments on `device`, up to `expert_map`."""
    w13, w13_scale, w2, w2_scale = (
        tensor.clone().to(device)
        for tensor in (call.w13, call.w13_scale, call.w2, call.w2_scale)
    )
    call.form.arrange(w13, w13_scale, *call.form.blocks)
    call.form.arrange(w2, w2_scale, *call.form.blocks)
    x = torch.empty_strided(call.x.shape, call.x.stride(), dtype=torch.bfloat16)
    x = x.to(device).copy_(call.x)
    rest = (call.weights.to(device), call.ids.to(device))
    expert_map = None if call.expert_map is None else call.expert_map.to(device)
    return [x, w13, w13_scale, w2, w2_scale, *rest, expert_map]
