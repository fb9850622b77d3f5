# SPDX-License-Identifier: Apache-2.0
"""The class around the ops of routed experts, with INT4 and FP8 weights, against
float64. Each case runs in a process of its own, since ops cannot be defined anew."""

from typing import Any

import pytest
import torch
from own_process import in_own_process

from standins.emulated_xpu import registry
from standins.emulated_xpu.fused_experts import XpuFusedMoe
from standins.emulated_xpu.wheel.pins import OVERRIDE

EXPERTS, TOPK, DEEP, WIDE = 4, 2, 256, 128
IDS = torch.tensor([[0, 1], [1, 3], [3, 0], [0, 3], [-1, 0], [3, 1]])
"""No token takes expert 2, and one takes an expert of another rank."""
SHAPES = ((EXPERTS, 2 * WIDE, DEEP), (EXPERTS, DEEP, WIDE))
LIMIT = 10.0

Packed = tuple[list[torch.Tensor], list[torch.Tensor], list[torch.Tensor]]
"""Weights, scales, and what they stand for: `[E, N, K]` in float64."""


def int4() -> Packed:
    """Codes with their zero at 8, two in a byte; 128 of them share a scale."""
    packed, scales, dense = [], [], []
    for shape in SHAPES:
        codes = torch.randint(16, shape, dtype=torch.uint8)
        scale = torch.rand(*shape[:2], shape[2] // 128).bfloat16() / 4
        each = scale.double().repeat_interleave(128, -1)
        packed.append(codes[..., ::2] | codes[..., 1::2] << 4)
        scales.append(scale)
        dense.append((codes.double() - 8) * each)
    return packed, scales, dense


def block_fp8() -> Packed:
    """`[E, K, N]` in e4m3, and a scale for each block of 128 x 128."""
    codes, scales, dense = [], [], []
    for experts, rows, columns in SHAPES:
        code = torch.randn(experts, columns, rows).to(torch.float8_e4m3fn)
        scale = torch.rand(experts, columns // 128, rows // 128)
        each = scale.double().repeat_interleave(128, 1).repeat_interleave(128, 2)
        codes.append(code)
        scales.append(scale)
        dense.append((code.double() * each).mT)
    return codes, scales, dense


def reference(
    x: torch.Tensor,
    topk_weights: torch.Tensor,
    dense: list[torch.Tensor],
    limit: float,
    in_fp8: bool,
) -> torch.Tensor:
    """silu(min(gate, limit)) · clamp(up, ±limit) of each token's experts, summed; with
    `in_fp8` both products take their rows in e4m3, 128 values to a scale, and both
    operands in bf16."""
    if in_fp8:
        dense = [weight.bfloat16().double() for weight in dense]

    def seen(row: torch.Tensor) -> torch.Tensor:
        if not in_fp8:
            return row.double()
        blocks = row.double().unflatten(0, (-1, 128))
        scale = (blocks.abs().amax(1, keepdim=True) / 448).float().double()
        codes = (blocks / scale).float().to(torch.float8_e4m3fn)
        return (codes.double() * scale).flatten().bfloat16().double()

    out = torch.zeros(len(x), DEEP, dtype=torch.float64)
    for token, chosen in enumerate(IDS.tolist()):
        for weight, expert in zip(topk_weights[token], chosen, strict=True):
            if expert >= 0:
                gate_up = (dense[0][expert] @ seen(x[token])).bfloat16().double()
                gate, up = gate_up.chunk(2)
                gate, up = gate.clamp(max=limit), up.clamp(-limit, limit)
                each = (torch.nn.functional.silu(gate) * up).bfloat16()
                out[token] += weight.double() * (dense[1][expert] @ seen(each))
    return out


def error_of(version: str, form: str, limit: float | None, wanted: float) -> float:
    """How far the class is from the reference with the limit `wanted`."""
    # A fork has none of the threads that torch may have started before.
    torch.set_num_threads(1)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(OVERRIDE, version)
        registry.define_ops(version)
        torch.manual_seed(0)
        weights, scales, dense = {"int4": int4, "block_fp8": block_fp8}[form]()
        by_flag = tuple(map(int, version.split("."))) < (0, 1, 11)
        options: dict[str, Any] = {f"is_{form}": True} if by_flag else {}
        if limit is not None:
            options["gemm1_clamp_limit"] = limit
        fused = XpuFusedMoe(
            w13=weights[0],
            w13_scales=scales[0],
            w13_bias=None,
            w2=weights[1],
            w2_scales=scales[1],
            w2_bias=None,
            n_experts_per_token=TOPK,
            activation="silu",
            num_experts=EXPERTS,
            **options,
        )
        x, topk_weights = torch.randn(len(IDS), DEEP).bfloat16(), torch.rand(IDS.shape)
        out = torch.full_like(x, torch.nan)
        fused.apply(out, x, topk_weights, IDS)
    expected = reference(x, topk_weights, dense, wanted, form == "block_fp8")
    return float((out.double() - expected).norm() / expected.norm())


@pytest.mark.parametrize("version", ["0.1.8", "0.1.11.1", "0.1.15.4"])
def test_int4(version: str) -> None:
    assert in_own_process(error_of, version, "int4", None, torch.inf) < 5e-3


@pytest.mark.parametrize("version", ["0.1.11.1", "0.1.15.4"])
def test_int4_is_clamped(version: str) -> None:
    assert in_own_process(error_of, version, "int4", LIMIT, LIMIT) < 5e-3
    assert in_own_process(error_of, version, "int4", LIMIT, torch.inf) > 0.1


@pytest.mark.parametrize("version", ["0.1.11.1", "0.1.15.4"])
def test_fp8_by_the_reference_without_the_limit(version: str) -> None:
    for limit in (None, LIMIT):
        assert in_own_process(error_of, version, "block_fp8", limit, torch.inf) < 5e-3
    assert in_own_process(error_of, version, "block_fp8", LIMIT, LIMIT) > 0.1


def test_the_grouped_gemm_refuses_block_scales() -> None:
    with pytest.raises(RuntimeError, match="ptr_scales of fp8 must be 1D"):
        in_own_process(error_of, "0.1.8", "block_fp8", None, torch.inf)
