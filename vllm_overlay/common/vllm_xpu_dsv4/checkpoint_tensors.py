# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""Refuses tensors of a checkpoint of DeepSeek-V4 or V4.1 that XPU would load as other
values.

A parameter takes whatever is copied into it. Exponent bytes become large numbers,
scales between two powers of two are rounded, and of a tensor that is too large only a
part is read. So each tensor is compared before that with what DeepSeek publishes, or
with the layout of the quantization that the checkpoint says it has.
"""

from collections.abc import Iterable, Iterator
from typing import Any

import regex as re
import torch

from vllm.model_executor.layers.quantization.utils.fp8_utils import (
    _upcast_e8m0_to_fp32,
)
from vllm.utils.math_utils import cdiv
from vllm_xpu_dsv4.checkpoint_config import (
    NOT_FP8,
    is_kept,
    keeps_draft_experts,
    kept_layers,
    quantization_of,
)
from vllm_xpu_dsv4.checkpoint_layouts import (
    BYTES,
    E4M3,
    FLOATS,
    Layout,
    check_values,
    layouts_of,
    modelopt_nvfp4,
)

_FP8_BLOCK = (128, 128)
_MXFP8_BLOCK = (32, 32)
_MXFP4_GROUP = (1, 32)
_ENGRAM_GROUP = (1, 32)
_E8M0 = torch.float8_e8m0fnu
_E8M0_NAN = 0xFF
_MANTISSA_BITS = 23
_QUANTIZED = re.compile(
    r"\.(attn\.w(?:q_a|q_b|kv|o_a|o_b)|attn\.indexer\.wq_b|e_proj|h_proj|main_proj"
    r"|engram\.(?:wkv|embed)|ffn\.(?:shared_experts|experts\.\d+)\.w[123])"
    r"\.([a-z0-9_]+)$"
)
_COMPRESSOR = re.compile(
    r"layers\.(\d+)\.attn\.(indexer\.)?compressor\.w(?:kv|gate)\.weight$"
)
_TABLE = re.compile(r"^layers\.(\d+)\.engram\.embed\.")
_BLOCK_OF_TOWER = re.compile(r"^vision\.blocks\.\d+\.")
# What FP4 packs besides; FP8 of these is not tested.
_PACKED = re.compile(r"\.(?:compressor\.w(?:kv|gate)|indexer\.weights_proj)\.weight$")

Weights = Iterable[tuple[str, torch.Tensor]]


def check_tensors(
    config: Any, weights: Weights, *, of_draft: bool = False
) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the tensors of a checkpoint, each scale as the loaders take it.

    In the checkpoint a scale is float8_e8m0fnu or float32. All parameters are float32
    with `expert_dtype` "fp8", else float8_e8m0fnu; the loaders view the scales of MXFP4
    experts as bytes, so float32 ones come out as float8_e8m0fnu. Scales of other
    quantizations come out as they are.

    Args:
        config: The `config.json` of the checkpoint.
        weights: Its tensors, under their names there.
        of_draft: Whether those of the draft are compared, which begin with `mtp.`,
            or all others. The rest, which the model does not load, passes.

    Raises:
        ValueError: A tensor has a dtype or a shape that was not tested, or a value
            that its parameter cannot hold. The message names it.

    """
    quantization = quantization_of(config)
    method = quantization.get("quant_method")
    own = method in ("fp8", "deepseek_v4_fp8")
    layouts = layouts_of(quantization)
    published = _Published(config)
    kept = kept_layers(quantization, NOT_FP8)
    converted = bool(quantization.get("moe_quant_algo"))
    for name, tensor in weights:
        if name.startswith("mtp.") != of_draft:
            yield name, tensor
            continue
        quantized = _QUANTIZED.search(name)
        is_expert = ".experts." in name
        in_nvfp4 = is_expert and converted
        if in_nvfp4 and of_draft:
            stage = int(name.split(".")[1])
            in_nvfp4 = not keeps_draft_experts(quantization, stage)
        if in_nvfp4:
            published.check_stored(name, tensor, [modelopt_nvfp4])
        elif quantized is None or not (own or (method == "mxfp4" and is_expert)):
            published.check_stored(name, tensor, layouts)
        elif (
            quantized[2] == "weight"
            and tensor.dtype in FLOATS
            and not is_expert
            and is_kept(name.removesuffix(".weight"), kept)
        ):
            published.check_shape(name, quantized[1], tensor, (1, 1))
        elif quantized[2] == "weight":
            published.check_weight(name, quantized[1], tensor)
        else:
            tensor = published.convert_scale(name, quantized[1], tensor)
        yield name, tensor


class _Published:
    """What is published under a config: by DeepSeek, with FP8 or MXFP4 experts, and in
    other layouts."""

    def __init__(self, config: Any) -> None:
        self.has_fp8_experts = getattr(config, "expert_dtype", "fp4") == "fp8"
        # V4.1 has scales of other blocks, and compressors that overlap nowhere.
        self.is_v41 = hasattr(config, "kv_source_layer_ids")
        self.block = _MXFP8_BLOCK if self.is_v41 else _FP8_BLOCK
        self.num_experts = config.n_routed_experts
        # transformers keeps the published ratios as the kinds of layers.
        self.ratios = getattr(config, "compress_ratios", None) or [
            config.compress_rates.get(kind, 0) for kind in config.layer_types
        ]
        self.hidden = config.hidden_size
        self.head_dim, self.index_head_dim = config.head_dim, config.index_head_dim
        hidden, inter = config.hidden_size, config.moe_intermediate_size
        shared = inter * config.n_shared_experts
        q_lora, heads = config.q_lora_rank, config.num_attention_heads
        grouped = config.o_groups * config.o_lora_rank
        index_heads = config.index_n_heads * config.index_head_dim
        self.shapes = {
            "attn.wq_a": (q_lora, hidden),
            "attn.wq_b": (heads * config.head_dim, q_lora),
            "attn.wkv": (config.head_dim, hidden),
            "attn.wo_a": (grouped, heads * config.head_dim // config.o_groups),
            "attn.wo_b": (hidden, grouped),
            "attn.indexer.wq_b": (index_heads, q_lora),
            "ffn.shared_experts.w1": (shared, hidden),
            "ffn.shared_experts.w2": (hidden, shared),
            "ffn.shared_experts.w3": (shared, hidden),
            "w1": (inter, hidden),
            "w2": (hidden, inter),
            "w3": (inter, hidden),
            "e_proj": (hidden, hidden),
            "h_proj": (hidden, hidden),
        }
        self.whole = {"attn_sink": (heads,)} | _shapes_of_images(config)
        self.tables: dict[int, tuple[int, int]] = {}
        if layers := getattr(config, "engram_layer_ids", None):
            width = config.engram_head_dim
            columns = (config.engram_max_ngram_size - 1) * config.engram_n_heads * width
            self.shapes["engram.wkv"] = (hidden * (config.hc_mult + 1), columns)
            rows = config.engram_num_embeddings
            self.tables = {layer: (n, width) for layer, n in zip(layers, rows)}

    def check_stored(
        self, name: str, tensor: torch.Tensor, layouts: list[Layout]
    ) -> None:
        """Compare a tensor with the layouts that its layer may have."""
        quantized, leaf = _QUANTIZED.search(name), name.rpartition(".")[2]
        shape = self._shape_of(quantized[1]) if quantized else None
        wanted = [
            stored
            for layout in layouts
            if (stored := layout(*shape or (1, 1)).get(leaf))
        ]
        if leaf == "weight":
            if tensor.dtype in FLOATS and ".experts." not in name:
                wanted = []
            elif quantized is None:
                packed = _PACKED.search(name)
                wanted = [it for it in wanted if packed and it.dtypes == BYTES]
        if not wanted:
            self.check_unquantized(name, tensor)
            return
        if not any(it.fits(tensor, shape is not None) for it in wanted):
            read = " or ".join(map(_called, wanted[0].dtypes))
            of = f" of {wanted[0].shape}" if shape else ""
            raise ValueError(
                f"{name} is {_called(tensor.dtype)} of {tuple(tensor.shape)}; XPU "
                f"reads {read}{of} there"
            )
        check_values(name, tensor)

    def check_unquantized(self, name: str, tensor: torch.Tensor) -> None:
        leaf = name.rpartition(".")[2]
        key = leaf if leaf == "attn_sink" else _BLOCK_OF_TOWER.sub("blocks.", name)
        if shape := self.whole.get(key):
            _check_shape(name, tensor, shape)
        elif quantized := _QUANTIZED.search(name):
            if quantized[2] == "weight":
                self.check_shape(name, quantized[1], tensor, (1, 1))
        elif compressor := _COMPRESSOR.search(name):
            self._check_compressor(name, tensor, int(compressor[1]), compressor[2])
        if name.endswith(".ffn.gate.tid2eid"):
            _check_dtype(name, tensor, torch.int64, torch.int32)
            if ((tensor < 0) | (tensor >= self.num_experts)).any():
                raise ValueError(f"{name} has an expert that the model does not have")
            return
        _check_dtype(name, tensor, *FLOATS)

    def check_weight(self, name: str, layer: str, weight: torch.Tensor) -> None:
        if self._is_mxfp4(layer):
            _check_dtype(name, weight, torch.int8, torch.uint8)
            self.check_shape(name, layer, weight, (1, 2))
        else:
            _check_dtype(name, weight, E4M3)
            self.check_shape(name, layer, weight, (1, 1))

    def convert_scale(self, name: str, layer: str, scale: torch.Tensor) -> torch.Tensor:
        if self._is_mxfp4(layer):
            _check_dtype(name, scale, _E8M0, torch.uint8, torch.float32)
            self.check_shape(name, layer, scale, _MXFP4_GROUP)
            if scale.dtype == torch.uint8:
                scale = scale.view(_E8M0)
        else:
            _check_dtype(name, scale, _E8M0, torch.float32)
            block = _ENGRAM_GROUP if _TABLE.match(name) else self.block
            self.check_shape(name, layer, scale, block)
        if scale.dtype == torch.float32:
            if not ((scale >= 0) & scale.isfinite()).all():
                raise ValueError(f"{name} has a scale that is negative or not finite")
            return scale if self.has_fp8_experts else _as_e8m0(name, scale)
        if scale.view(torch.uint8).max() == _E8M0_NAN:
            raise ValueError(f"{name} has the code {_E8M0_NAN:#x}, which is NaN")
        return scale

    def _check_compressor(
        self, name: str, weight: torch.Tensor, layer: int, indexer: str
    ) -> None:
        """Entries of ratio 4 are made of two blocks, each by rows of its own."""
        head = self.index_head_dim if indexer else self.head_dim
        overlaps = self.ratios[layer] == 4 and not self.is_v41
        rows = head * (2 if overlaps else 1)
        _check_shape(name, weight, (rows, self.hidden))

    def _is_mxfp4(self, layer: str) -> bool:
        return ".experts." in layer and not self.has_fp8_experts

    def _shape_of(self, layer: str) -> tuple[int, int] | None:
        """Rows and columns; None for main_proj, whose width the draft's config alone
        knows, and for Engram's tables, of which each has its own."""
        if ".experts." in layer:
            layer = layer.rpartition(".")[2]
        return self.shapes.get(layer)

    def check_shape(
        self, name: str, layer: str, tensor: torch.Tensor, each: tuple[int, int]
    ) -> None:
        """Compare a tensor that has one value for `each` rows and columns."""
        table = _TABLE.match(name)
        shape = self.tables.get(int(table[1])) if table else self._shape_of(layer)
        if shape is None:
            return
        wanted = tuple(map(cdiv, shape, each))
        if tensor.shape != wanted:
            raise ValueError(
                f"{name} is {tuple(tensor.shape)}; with one value for {each[0]} x "
                f"{each[1]} elements XPU reads {wanted} there"
            )


def _shapes_of_images(config: Any) -> dict[str, tuple[int, ...]]:
    """Of each tensor of the tower and the aligner, whose blocks are alike, and of the
    vectors of an image's other parts; empty for a model of text."""
    width, hidden = getattr(config, "vision_dim", None), config.hidden_size
    if width is None:
        return {}
    inner, merged = config.vision_inter_dim, config.vision_downsample_ratio**2
    return {
        "vision.patch_embed.proj.weight": (width, 3 * config.vision_patch_size**2),
        "vision.patch_embed.proj.bias": (width,),
        "blocks.norm1.weight": (width,),
        "blocks.attn.wqkv.weight": (3 * width, width),
        "blocks.attn.wqkv.bias": (3 * width,),
        "blocks.attn.wo.weight": (width, width),
        "blocks.attn.wo.bias": (width,),
        "blocks.norm2.weight": (width,),
        "blocks.mlp.w1.weight": (2 * inner, width),
        "blocks.mlp.w2.weight": (width, inner),
        "vision.norm.weight": (width,),
        "aligner.w1.weight": (hidden, merged * width),
        "aligner.w1.bias": (hidden,),
        "aligner.w2.weight": (hidden, hidden),
        "aligner.w2.bias": (hidden,),
        "image_start": (hidden,),
        "image_pad": (hidden,),
        "image_newline": (hidden,),
        "image_end": (hidden,),
    }


def _check_shape(name: str, tensor: torch.Tensor, wanted: tuple[int, ...]) -> None:
    if tensor.shape != wanted:
        raise ValueError(f"{name} is {tuple(tensor.shape)}; XPU reads {wanted} there")


def _as_e8m0(name: str, scale: torch.Tensor) -> torch.Tensor:
    exponents = scale.contiguous().view(torch.int32) >> _MANTISSA_BITS
    converted = exponents.to(torch.uint8).view(_E8M0)
    if not torch.equal(_upcast_e8m0_to_fp32(converted), scale):
        raise ValueError(
            f"{name} is float32 but not all powers of two, as its parameter needs "
            'without "expert_dtype": "fp8"'
        )
    return converted


def _check_dtype(name: str, tensor: torch.Tensor, *wanted: torch.dtype) -> None:
    if tensor.dtype not in wanted:
        read = " or ".join(map(_called, wanted))
        raise ValueError(f"{name} is {_called(tensor.dtype)}; XPU reads {read} there")


def _called(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
