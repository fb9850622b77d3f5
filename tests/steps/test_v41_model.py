# SPDX-License-Identifier: Apache-2.0
"""DeepSeek-V4.1 on XPU: the model that NVIDIA's is, with XPU's attention."""

from pathlib import Path
from typing import Any

import pytest
import torch
from helpers import layout, v41

NVIDIA = "vllm.models.deepseek_v41.nvidia.model"


def end_of_start(folder: Path, **options: Any) -> Any:
    try:
        return v41.built(v41.configured(folder, **options))
    except Exception as error:
        pytest.fail(f"the start ends with {type(error).__name__}: {error}")


def test_its_layers(tmp_path: Path) -> None:
    model = end_of_start(tmp_path).language_model.model
    assert isinstance(model, layout.module(NVIDIA).DeepseekV4Model)
    found = [
        (
            type(layer.attn).__name__,
            layer.attn.reads_compressed(),
            layer.attn.compressed_cache_prefix,
            layer.attn.indexer is not None,
        )
        for layer in model.layers
    ]
    name, prefix = "DeepseekV41XPUAttention", "language_model.model.layers.{}.attn"
    assert found == [
        (name, False, None, False),
        (name, True, prefix.format(1), True),
        (name, True, prefix.format(2), True),
        (name, True, prefix.format(2), True),
    ]
    attn = model.layers[3].attn
    assert attn.indexer.indexer_op.candidate_blocks is not None
    assert attn.reads_indexer() and not model.layers[0].attn.reads_indexer()
    attn._compressed_kv_cache = lambda: "cache"
    assert attn.compressed_cache() == (prefix.format(2), "cache")
    assert attn.backend_cls.get_name() == "XPU_V41_MLA_SPARSE"
    builder = attn.swa_backend_cls.get_builder_cls()
    assert builder.__name__ == "DeepseekV41SparseSWAMetadataBuilder"


def test_replay_is_off(tmp_path: Path) -> None:
    """Tokens that it computes again would see none before them in the window."""
    model = end_of_start(tmp_path, enable_prefix_caching=True).language_model.model
    assert model.vllm_config.cache_config.swa_bounded_replay, "nobody asks for it"
    for layer in model.layers:
        assert not layer.attn.swa_cache_layer.bounded_replay


def test_wo_a_is_unpacked_exactly(tmp_path: Path) -> None:
    attn = end_of_start(tmp_path).language_model.model.layers[0].attn
    wo_a = attn.wo_a
    torch.manual_seed(0)
    rows, columns = wo_a.weight.shape
    codes = torch.randn(rows, columns).to(torch.float8_e4m3fn)
    exponents = torch.randint(-9, 9, (rows // 32, columns // 32))
    scales = torch.exp2(exponents.float()).to(torch.float8_e8m0fnu)
    wo_a.weight.weight_loader(wo_a.weight, codes)
    wo_a.weight_scale.weight_loader(wo_a.weight_scale, scales)
    wo_a.quant_method.process_weights_after_loading(wo_a)
    attn.process_weights_after_loading(torch.bfloat16)
    whole = scales.float().repeat_interleave(32, 0).repeat_interleave(32, 1)
    assert wo_a.weight.dtype == torch.bfloat16
    assert torch.equal(wo_a.weight.cpu().float(), codes.float() * whole)


def test_published_tensors_arrive(tmp_path: Path) -> None:
    """Of tower, image parts and routers, beside the text model."""
    model = end_of_start(tmp_path, limit_mm_per_prompt={"image": 1})
    wide, hidden, experts = v41.TOWER["hidden_size"], 256, 4
    published = {
        "vision.patch_embed.proj.weight": (wide, 3 * 14 * 14),
        "vision.blocks.0.attn.wqkv.weight": (3 * wide, wide),
        "vision.norm.weight": (wide,),
        "aligner.w1.weight": (hidden, 9 * wide),
        "image_start": (hidden,),
        "image_newline": (hidden,),
        "image_end": (hidden,),
        "layers.1.ffn.gate.bias_vl": (experts,),
    }
    tensors = {name: torch.randn(*shape) for name, shape in published.items()}
    model.load_weights(tensors.items())
    found = dict(model.named_parameters())
    for name, values in tensors.items():
        inside = f"language_model.model.{name}" if name.startswith("layers.") else name
        got = found[inside]
        torch.testing.assert_close(got.cpu().float(), values.to(got.dtype).float())


@pytest.mark.unchanged
def test_images_need_not_stay_whole(tmp_path: Path) -> None:
    """Unlike V4's, whose tokens see all of their image."""
    config = v41.configured(tmp_path, limit_mm_per_prompt={"image": 1})
    assert not config.model_config.is_mm_prefix_lm


def test_a_server_without_images_has_no_tower(tmp_path: Path) -> None:
    model = end_of_start(tmp_path, limit_mm_per_prompt={"image": 0})
    assert not [name for name, _ in model.named_parameters() if "vision" in name]


def test_prefill_compiles_its_indices_in_the_warm_up(tmp_path: Path) -> None:
    registry = layout.module("vllm.model_executor.warmup.jit_warmup").JitWarmupRegistry
    found = registry(None)
    with found.activate():
        end_of_start(tmp_path)
    ops = layout.module("vllm.models.deepseek_v41.common.ops.cache_utils")
    assert ops._COMBINE_TOPK_SWA_INDICES_KERNEL in found._registrations


def test_the_query_has_no_norm_of_its_heads(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    attn = end_of_start(tmp_path).language_model.model.layers[0].attn
    given: list[Any] = []
    op = "xpu_deepseek_qnorm_rope_kv_insert"
    monkeypatch.setattr(torch.ops.vllm, op, lambda *args: given.append(args))
    metadata = type("Metadata", (), {"slot_mapping": None, "block_size": 32})()
    attn._fused_qnorm_rope_kv_insert(
        None, None, None, {attn.swa_cache_layer.prefix: metadata}
    )
    assert [args[-2:] for args in given] == [(32, False)]


def test_what_no_candidate_fills_stays_unchosen(tmp_path: Path) -> None:
    """A choice of -1 must not become the last row of the request before."""
    attn = end_of_start(tmp_path).language_model.model.layers[3].attn
    lens = torch.tensor([20, 20], dtype=torch.int32, device=layout.device())
    starts = torch.tensor([0, 2, 4], dtype=torch.int32, device=layout.device())
    chosen = torch.tensor([[3, -1, 99, 5]] * 4, dtype=torch.int32).to(lens.device)
    found, _ = attn.combine_topk_swa_indices(
        chosen, starts, lens, lens, 8, attn.compress_ratio, 4, 40, 20
    )
    assert found[:, :4].tolist() == [[3, -1, -1, 5]] * 2 + [[43, -1, -1, 45]] * 2


def test_no_window_begins_before_the_gathered_rows(tmp_path: Path) -> None:
    """As it would after a prefix hit whose window is replayed: of 20 tokens two are
    new, and four are gathered. V4's function names rows of compressed entries there."""
    attn = end_of_start(tmp_path).language_model.model.layers[0].attn
    lens = torch.tensor([20], dtype=torch.int32, device=layout.device())
    starts = torch.tensor([0, 2], dtype=torch.int32, device=layout.device())
    nothing = torch.zeros(2, 4, dtype=torch.int32, device=lens.device)
    gathered = torch.full_like(lens, 4)
    args = (nothing, starts, lens, gathered, 8, 1, 0, 12, 8)
    found, counts = attn.combine_topk_swa_indices(*args)
    rows = [row[:n] for row, n in zip(found.tolist(), counts.tolist(), strict=True)]
    assert rows == [[8, 9, 10], [8, 9, 10, 11]]
    v4 = layout.module("vllm.models.deepseek_v4.xpu.xpu_sparse")
    others, counts = v4.combine_topk_swa_indices(*args)
    assert int(others[0, : int(counts[0])].min()) < 8


def test_its_hyper_connections(tmp_path: Path) -> None:
    """Those of a model are the functions of its module, by the names of CUDA's."""
    end_of_start(tmp_path)
    module = layout.module(NVIDIA)
    own = layout.module("vllm.models.deepseek_v41.xpu.mhc")
    assert module.mhc_pre_delayed_tilelang is own.mhc_pre_delayed
    assert module.mhc_post_tilelang is own.mhc_post
    assert module.mhc_shifted_post_pre is own.mhc_shifted_post_pre


def test_what_a_hyper_connection_gives(monkeypatch: pytest.MonkeyPatch) -> None:
    """The op's outputs, then the mean of the streams if somebody reads it."""
    own = layout.module("vllm.models.deepseek_v41.xpu.mhc")
    streams = torch.arange(24.0).view(2, 4, 3)
    ops = torch.ops.vllm
    name = "mhc_fused_post_pre_delayed_xpu"
    monkeypatch.setattr(ops, name, lambda *given: (streams, *given))
    monkeypatch.setattr(ops, "mhc_pre_delayed_xpu", lambda *given: given)
    monkeypatch.setattr(torch.ops._xpu_C, "mhc_post", lambda *given: given)
    assert own.mhc_pre_delayed("streams", 1) == ("streams", 1)
    assert own.mhc_post("x", "streams", 1, 2) == ("x", "streams", 1, 2)
    residual, *outputs, aux = own.mhc_shifted_post_pre("x", 1)
    assert residual is streams and outputs == ["x", 1] and aux.numel() == 0
    *_, aux = own.mhc_shifted_post_pre("x", capture_aux=True)
    assert torch.equal(aux, streams.mean(1))
    with pytest.raises(AssertionError):
        own.mhc_shifted_post_pre("x", reduce_results=True)


@pytest.mark.unchanged
@pytest.mark.any_platform
def test_cuda_keeps_its_layers() -> None:
    module = layout.module(NVIDIA)
    layer, model = module.DeepseekV4DecoderLayer, module.DeepseekV4Model
    select = module._select_dsv4_attn_cls
    assert getattr(layer, "select_attn_cls", select) is select
    assert getattr(model, "layer_cls", layer) is layer
    if not layout.module("vllm.platforms").current_platform.is_xpu():
        kernels = layout.module("vllm.model_executor.kernels.mhc.tilelang")
        dispatch = layout.module("vllm.models.deepseek_v41.nvidia.ops.mhc")
        for name in ("mhc_pre_delayed_tilelang", "mhc_post_tilelang"):
            assert getattr(module, name) is getattr(kernels, name)
        assert module.mhc_shifted_post_pre is dispatch.mhc_shifted_post_pre
