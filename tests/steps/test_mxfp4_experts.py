# SPDX-License-Identifier: Apache-2.0
"""DeepSeek-V4's MXFP4 experts find XPU's kernel, and keep the checkpoint's layout."""

from typing import Any

import pytest
import torch
from helpers import layout

EXPERTS, HIDDEN, INTER = 4, 128, 64


@pytest.fixture
def oracle() -> Any:
    """The module that chooses the kernel of MXFP4 experts."""
    return layout.module(f"{layout.FUSED_MOE}.oracle.mxfp4")


def experts_config() -> Any:
    moe = layout.module(f"{layout.FUSED_MOE}.config")
    activation = layout.module(f"{layout.FUSED_MOE}.activation").MoEActivation.SILU
    return moe.FusedMoEConfig(
        num_experts=EXPERTS,
        experts_per_token=2,
        hidden_dim=HIDDEN,
        intermediate_size_per_partition=INTER,
        num_local_experts=EXPERTS,
        num_logical_experts=EXPERTS,
        activation=activation,
        device=layout.device(),
        routing_method=moe.RoutingMethodType.DeepseekV4,
        moe_parallel_config=moe.FusedMoEParallelConfig.make_no_parallel(),
        in_dtype=torch.bfloat16,
    )


def select(oracle: Any) -> tuple[Any, type]:
    """The backend and the kernel that the release takes for DeepSeek-V4's experts."""
    chosen = getattr(oracle, "select_deepseek_v4_mxfp4_moe_backend", None)
    chosen = chosen or oracle.select_mxfp4_moe_backend
    backend, kernel = chosen(experts_config())
    return backend, kernel


def test_the_kernel_of_xpu_is_chosen(oracle: Any) -> None:
    backend, kernel = select(oracle)
    assert backend == oracle.Mxfp4MoeBackend.XPU
    assert kernel in oracle.backend_to_kernel_cls(backend)


def test_weights_keep_the_layout_of_the_checkpoint(oracle: Any) -> None:
    shapes = {
        "w13_weight": (EXPERTS, 2 * INTER, HIDDEN // 2),
        "w2_weight": (EXPERTS, HIDDEN, INTER // 2),
        "w13_weight_scale": (EXPERTS, 2 * INTER, HIDDEN // 32),
        "w2_weight_scale": (EXPERTS, HIDDEN, INTER // 32),
    }
    given = {
        name: torch.randint(256, shape, dtype=torch.uint8, device=layout.device())
        for name, shape in shapes.items()
    }
    kept = oracle.convert_weight_to_mxfp4_moe_kernel_format(
        mxfp4_backend=oracle.Mxfp4MoeBackend.XPU,
        layer=torch.nn.Module(),
        w13_bias=None,
        w2_bias=None,
        **given,
    )
    for name, value in zip(shapes, kept[:4], strict=True):
        assert torch.equal(value, given[name]), name
    assert kept[4:] == (None, None)


@pytest.mark.unchanged
@pytest.mark.any_platform
def test_cuda_chooses_as_before(oracle: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    cuda = layout.another_platform(oracle.current_platform, (9, 0))
    monkeypatch.setattr(oracle, "current_platform", cuda)
    asked: list[Any] = []

    def no_kernel(backend: Any) -> list[type]:
        asked.append(backend)
        return []

    monkeypatch.setattr(oracle, "backend_to_kernel_cls", no_kernel)
    with pytest.raises(NotImplementedError, match="No MXFP4 MoE backend"):
        select(oracle)
    assert oracle.Mxfp4MoeBackend.XPU not in asked
    assert oracle.Mxfp4MoeBackend.MARLIN in asked
