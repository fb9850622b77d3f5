# SPDX-License-Identifier: Apache-2.0
"""A checkpoint in NVFP4: the projections of compressor and indexer stay packed."""

import inspect
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import layout
import pytest
import torch

HIDDEN, RANK, TOKENS, BLOCK = 256, 128, 5, 16
E2M1 = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6], dtype=torch.float64)
# Of each projection: its columns in the checkpoint and its rows' size.
PROJECTIONS = {
    "compressor.wkv": (1024, HIDDEN),
    "compressor.wgate": (1024, HIDDEN),
    "indexer.compressor.wkv": (256, HIDDEN),
    "indexer.compressor.wgate": (256, HIDDEN),
    "indexer.weights_proj": (64, HIDDEN),
    "indexer.wq_b": (64 * 128, RANK),
    "wq_a": (RANK, HIDDEN),
    "wkv": (512, HIDDEN),
}
# Projections that vLLM's model merges, and their place there.
MERGED = {
    "compressor.wkv": ("compressor.fused_wkv_wgate", 0),
    "compressor.wgate": ("compressor.fused_wkv_wgate", 1),
    "wq_a": ("fused_wqa_wkv", 0),
    "wkv": ("fused_wqa_wkv", 1),
}


def write_checkpoint(path: Path) -> dict[str, torch.Tensor]:
    """Random NVFP4 projections as ModelOpt writes them; what each stands for."""
    from safetensors.torch import save_file

    stored: dict[str, torch.Tensor] = {}
    meaning = {}
    for name, (columns, size) in PROJECTIONS.items():
        packed = torch.randint(0, 256, (columns, size // 2), dtype=torch.uint8)
        scale = torch.rand(columns, size // BLOCK) * 400 + 1
        scale = scale.to(torch.float8_e4m3fn)
        whole = torch.tensor(0.00021)
        stored[f"{name}.weight"] = packed
        stored[f"{name}.weight_scale"] = scale
        stored[f"{name}.weight_scale_2"] = whole
        stored[f"{name}.input_scale"] = torch.tensor(0.01)
        codes = torch.stack((packed & 15, packed >> 4), -1).flatten(-2).long()
        values = torch.cat((E2M1, -E2M1))[codes] * whole.double()
        meaning[name] = values * scale.double().repeat_interleave(BLOCK, -1)
    save_file(stored, path)
    return meaning


def load(layer: Any, path: Path) -> None:
    """Load the checkpoint as the model does, through each parameter's own loader."""
    from vllm.model_executor.model_loader import weight_utils

    owner = layout.projecting(layer)
    parameters = dict(owner.named_parameters())
    for name, tensor in weight_utils.safetensors_weights_iterator([str(path)], False):
        module, _, kind = name.rpartition(".")
        prefix = "indexer." if module.startswith("indexer.") else ""
        merged, *place = MERGED.get(module.removeprefix("indexer."), (module,))
        target = prefix + merged if place else module
        parameter = parameters[f"{target}.{kind}"]
        parameter.weight_loader(parameter, tensor, *place)
    for module in owner.modules():
        method = getattr(module, "quant_method", None)
        if method is not None and getattr(module, "weight", None) is not None:
            method.process_weights_after_loading(module)


def loaded(directory: Path) -> tuple[Any, dict[str, torch.Tensor]]:
    """A ratio-4 layer with a checkpoint of `directory`; what its weights stand for."""
    torch.manual_seed(0)
    meaning = write_checkpoint(directory / "nvfp4.safetensors")
    config = layout.vllm_config()
    # The output projection has kernels of its own, which read FP8.
    layout.take_nvfp4(config, leave_out=["*wo_a*", "*wo_b*", "*attn.wq_b*"])
    layer = layout.attention_layer(config, 4)
    with layout.current(config):
        load(layer, directory / "nvfp4.safetensors")
    return layer, meaning


def off_by(got: torch.Tensor, *wanted: torch.Tensor) -> float:
    whole = torch.cat(wanted, -1)
    return float((got.cpu().double() - whole).norm() / whole.norm())


def test_every_projection_multiplies_what_is_packed(tmp_path: Path) -> None:
    built, meaning = loaded(tmp_path)
    hidden = torch.randn(TOKENS, HIDDEN).bfloat16()
    got = layout.input_projections(built, hidden.to(layout.device()))
    wanted = {
        name: hidden.double() @ weight.T
        for name, weight in meaning.items()
        if weight.shape[1] == HIDDEN
    }
    qr_kv, kv_score, indexer_kv_score, indexer_weights = got
    assert kv_score.dtype == indexer_kv_score.dtype == torch.float32
    errors = {
        "compressor": off_by(
            kv_score, wanted["compressor.wkv"], wanted["compressor.wgate"]
        ),
        "indexer's compressor": off_by(
            indexer_kv_score,
            wanted["indexer.compressor.wkv"],
            wanted["indexer.compressor.wgate"],
        ),
        "indexer's weights": off_by(indexer_weights, wanted["indexer.weights_proj"]),
        "attention": off_by(qr_kv, wanted["wq_a"], wanted["wkv"]),
    }
    qr = torch.randn(TOKENS, RANK).bfloat16()
    query = layout.projecting(built).indexer.wq_b(qr.to(layout.device()))[0]
    errors["indexer's queries"] = off_by(query, qr.double() @ meaning["indexer.wq_b"].T)
    assert max(errors.values()) < 3e-3, f"projections are off by {errors}"


def test_the_weights_stay_packed(tmp_path: Path) -> None:
    compressor = layout.projecting(loaded(tmp_path)[0]).compressor
    assert compressor.fused_wkv_wgate.weight.dtype == torch.uint8


@pytest.mark.parametrize("weight_only", [False, True])
def test_xpu_has_an_nvfp4_kernel(weight_only: bool) -> None:
    select = layout.module(layout.LINEAR_KERNELS).init_nvfp4_linear_kernel
    arguments = {"use_a16": weight_only}
    if "use_a16" not in inspect.signature(select).parameters:
        arguments = {}
    with layout.current(layout.vllm_config()):
        assert type(select(**arguments)).__name__ == "XPUNvFp4LinearKernel"


@pytest.fixture
def bf16() -> Iterator[None]:
    """Parameters are made in the model's dtype, as vLLM's loader does."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.bfloat16)
    yield
    torch.set_default_dtype(before)


@pytest.mark.unchanged
@pytest.mark.usefixtures("bf16")
def test_an_fp8_checkpoint_keeps_them_in_bf16() -> None:
    config = layout.vllm_config(quantized=True)
    with layout.current(config):
        compressor = layout.module(layout.COMPRESSOR).DeepseekCompressor(
            vllm_config=config,
            compress_ratio=4,
            hidden_size=HIDDEN,
            head_dim=128,
            prefix="compressor",
            k_cache_prefix="cache",
        )
    assert compressor.fused_wkv_wgate.weight.dtype == torch.bfloat16


@pytest.mark.unchanged
@pytest.mark.usefixtures("bf16")
def test_projections_in_bf16_keep_fp32_results() -> None:
    torch.manual_seed(1)
    built = layout.attention_layer(layout.vllm_config(), 4)
    linear = layout.projecting(built).compressor.fused_wkv_wgate
    linear.weight.data.normal_()
    hidden = torch.randn(TOKENS, HIDDEN).bfloat16()
    score = layout.input_projections(built, hidden.to(layout.device()))[1]
    assert score.dtype == torch.float32
    assert off_by(score, hidden.double() @ linear.weight.cpu().double().T) < 1e-6


@pytest.mark.unchanged
@pytest.mark.parametrize("platform", ["CUDA", "ROCM"])
def test_other_platforms_keep_their_kernels(platform: str) -> None:
    kernels = layout.module(layout.LINEAR_KERNELS)
    known = layout.module("vllm.platforms.interface").PlatformEnum[platform]
    names = [kind.__name__ for kind in kernels._POSSIBLE_NVFP4_KERNELS[known]]
    assert names[-1] in ("EmulationNvFp4LinearKernel", "HummingNvFp4LinearKernel")
    assert not any(name.startswith("XPU") for name in names)
