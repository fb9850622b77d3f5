# SPDX-License-Identifier: Apache-2.0
"""FP8 and INT4 experts in Triton serve a device that vllm-xpu-kernels refuses."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from helpers import layout, model_layers
from helpers.experts_by_format import EXPERTS, HIDDEN, LIMIT, TOPK, Fp8, Int4, Layer

REFUSED = "pvc_vg"
"""An architecture that is no Xe2 and no Xe3 to vllm-xpu-kernels."""
ARCHITECTURE = "EMULATED_XPU_ARCHITECTURE"
OURS = {"fp8": "XPUTritonExpertsBlockFp8", "int_wna16": "XPUTritonExpertsWNA16"}
PINS = {"fp8": "XPUExpertsBlockFp8", "int_wna16": "XPUExpertsWNA16"}
CASES = [
    pytest.param(Fp8(128), 128, id="fp8"),
    pytest.param(Fp8(32), 96, id="fp8-cut"),
    pytest.param(Int4(128), 128, id="int4"),
    pytest.param(Int4(64), 128, id="int4-64"),
    pytest.param(Int4(32), 96, id="int4-32"),
]


def config(columns: int, **others: Any) -> Any:
    return model_layers.experts_config(
        activation="SILU",
        num_experts=EXPERTS,
        topk=TOPK,
        hidden=HIDDEN,
        inter=columns,
        model_limit=LIMIT,
        **others,
    )


def off_by(got: torch.Tensor, wanted: torch.Tensor) -> float:
    return float((got.double() - wanted).norm() / wanted.norm())


@pytest.mark.parametrize(("form", "columns"), CASES)
def test_a_refused_device_computes(
    form: Any, columns: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also a slice of 96 columns, whose blocks vLLM makes smaller, and a token without
    an expert."""
    monkeypatch.setenv(ARCHITECTURE, REFUSED)
    layer = Layer(form, columns)
    ids = layer.topk_ids.clone()
    ids[3] = -1
    got = layer.run(config(columns), ids)
    error = off_by(got, layer.reference(ids))
    print(f"figure: {form.oracle} experts that the op refuses are off by {error:.4f}")
    assert error < 5e-3
    assert not got[3].any()


@pytest.mark.parametrize(("form", "columns"), CASES)
def test_triton_is_ours_on_request(form: Any, columns: int) -> None:
    """`moe_backend="triton"` takes them where the op would serve, too."""
    layer, made = Layer(form, columns), config(columns, moe_backend="triton")
    _, kernel = form.select(made)
    assert kernel.__name__ == OURS[form.oracle]
    expert_map = torch.tensor([2, -1, 0, 1], dtype=torch.int32)
    got = layer.run(made, layer.topk_ids, expert_map)
    here = expert_map[layer.topk_ids.long()]
    assert off_by(got, layer.reference(here)) < 5e-3


def test_a_slice_whose_blocks_the_op_lacks_is_ours() -> None:
    _, kernel = Fp8(64).select(config(192))
    assert kernel.__name__ == OURS["fp8"]


@pytest.mark.parametrize("form", [Int4(128, symmetric=False), Int4(48)])
def test_other_codes_are_left_to_others(
    form: Int4, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Upstream's Triton experts take them on request, and nobody takes them else."""
    _, kernel = form.select(config(96, moe_backend="triton"))
    assert kernel.__name__ == "TritonWNA16Experts"
    monkeypatch.setenv(ARCHITECTURE, REFUSED)
    with pytest.raises(NotImplementedError, match="No WNA16 MoE backend"):
        form.select(config(96))


@pytest.mark.unchanged
def test_codes_of_8_bits_are_left_to_others() -> None:
    keys = layout.module(f"{layout.LAYER_QUANTIZATION}.utils.quant_utils")
    oracle = layout.module(f"{layout.FUSED_MOE}.oracle.int_wna16")
    _, kernel = oracle.select_wna16_moe_backend(
        config(96, moe_backend="triton"),
        keys.kInt8Static,
        quant_config=SimpleNamespace(group_size=128),
        may_have_zp=False,
        may_have_bias=False,
    )
    assert kernel.__name__ == "TritonWNA16Experts"


@pytest.mark.unchanged
@pytest.mark.parametrize("form", [Fp8(128), Int4(128)])
def test_another_request_is_not_answered_by_ours(form: Any) -> None:
    with pytest.raises(ValueError, match="MARLIN"):
        form.select(config(128, moe_backend="marlin"))


@pytest.mark.unchanged
def test_scales_of_rows_are_left_to_others() -> None:
    keys = layout.module(f"{layout.LAYER_QUANTIZATION}.utils.quant_utils")
    oracle = layout.module(f"{layout.FUSED_MOE}.oracle.fp8")
    _, kernel = oracle.select_fp8_moe_backend(
        config(96, moe_backend="triton"),
        keys.kFp8StaticChannelSym,
        keys.kFp8DynamicTokenSym,
    )
    assert kernel.__name__ == "TritonExperts"


@pytest.mark.unchanged
@pytest.mark.parametrize("architecture", ["xe2", "pvc", "xe3"])
@pytest.mark.parametrize("form", [Fp8(128), Int4(128)])
def test_the_op_stays_where_it_serves(
    form: Any, architecture: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A Max 1100 or 1550 (`pvc`) is an Xe2 to the op."""
    monkeypatch.setenv(ARCHITECTURE, architecture)
    made, *_ = Layer(form, 128).made(config(128))
    assert type(made).__name__ == PINS[form.oracle]


@pytest.mark.unchanged
@pytest.mark.parametrize("form", [Fp8(128), Int4(128)])
def test_other_platforms_keep_their_triton(
    form: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    oracle = layout.module(f"{layout.FUSED_MOE}.oracle.{form.oracle}")
    real, made = oracle.current_platform, config(128, moe_backend="triton")
    monkeypatch.setattr(oracle, "current_platform", layout.another_platform(real))
    backend, _ = form.select(made)
    assert backend.value == "TRITON"


@pytest.mark.unchanged
def test_the_op_is_asked_for_on_xpu_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    module = layout.module(f"{layout.FUSED_MOE}.experts.xpu_moe")
    other = layout.another_platform(module.current_platform)
    monkeypatch.setattr(module, "current_platform", other)
    assert not module.XPUExperts._supports_current_device()


def test_ours_are_next_to_the_op() -> None:
    """Before all that upstream has for XPU."""
    oracle = layout.module(f"{layout.FUSED_MOE}.oracle.fp8")
    backends = oracle._get_priority_backends(config(128), None, None)
    assert [it.value for it in backends[:2]] == ["XPU", "XPU_TRITON"]


def test_each_takes_its_own_weights_and_activations() -> None:
    keys = layout.module("vllm.model_executor.layers.quantization.utils.quant_utils")
    own = layout.module(f"{layout.FUSED_MOE}.experts.xpu_triton_moe")
    activations = keys.kFp8Dynamic128Sym
    taken = {
        "XPUTritonExpertsMxFp4": (keys.kMxfp4Static, None),
        "XPUTritonExpertsBlockFp8": (keys.kFp8Static128BlockSym, activations),
        "XPUTritonExpertsWNA16": (keys.kInt4Static, None),
    }
    lacking = [name for name in taken if not hasattr(own, name)]
    assert not lacking, f"no experts of XPU take them: {lacking}"
    given = {*taken.values(), (keys.kMxfp4Static, activations)}
    given |= {(keys.kFp8Static128BlockSym, None), (keys.kInt4Static, activations)}
    given |= {(None, activations), (None, None)}
    for name, mine in taken.items():
        supports = getattr(own, name)._supports_quant_scheme
        assert [each for each in given if supports(*each)] == [mine], name
