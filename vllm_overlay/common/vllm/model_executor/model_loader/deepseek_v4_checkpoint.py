# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""Refuses tensors of a DeepSeek-V4 checkpoint that XPU would load as other values.

A parameter takes whatever is copied into it. Exponent bytes become large numbers,
scales between two powers of two are rounded, and of a tensor that is too large only a
part is read. So each tensor is compared with what DeepSeek publishes before that.
"""

from collections.abc import Iterable, Iterator
from typing import Any

import regex as re
import torch

from vllm.model_executor.layers.quantization.utils.fp8_utils import (
    _upcast_e8m0_to_fp32,
)
from vllm.utils.math_utils import cdiv

_FP8_BLOCK = (128, 128)
_MXFP4_GROUP = (1, 32)
_FLOATS = (torch.bfloat16, torch.float16, torch.float32)
_E8M0 = torch.float8_e8m0fnu
_E8M0_NAN = 0xFF
_MANTISSA_BITS = 23
_QUANTIZED = re.compile(
    r"\.(attn\.w(?:q_a|q_b|kv|o_a|o_b)|attn\.indexer\.wq_b|e_proj|h_proj|main_proj"
    r"|ffn\.(?:shared_experts|experts\.\d+)\.w[123])"
    r"\.(weight|scale|weight_scale|weight_scale_inv)$"
)


Weights = Iterable[tuple[str, torch.Tensor]]


def check_tensors(config: Any, weights: Weights) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the tensors of a checkpoint, each scale as its parameter holds it.

    Those of the draft model, which the model does not load, are not compared.

    In the checkpoint a scale is float8_e8m0fnu or float32. All parameters are float32
    with `expert_dtype` "fp8", else float8_e8m0fnu; the loaders view the scales of MXFP4
    experts as bytes. Only DeepSeek's own FP8 checkpoints are compared.

    Args:
        config: The `config.json` of the checkpoint.
        weights: Its tensors, under their names there.

    Raises:
        ValueError: A tensor has a dtype or a shape that DeepSeek does not publish, or
            a value that its parameter cannot hold. The message names it.

    """
    return _checked(config, weights, of_draft=False)


def check_draft_tensors(
    config: Any, weights: Weights
) -> Iterator[tuple[str, torch.Tensor]]:
    """The same for a draft model, whose tensors begin with `mtp.`."""
    return _checked(config, weights, of_draft=True)


def _checked(
    config: Any, weights: Weights, of_draft: bool
) -> Iterator[tuple[str, torch.Tensor]]:
    quantization = getattr(config, "quantization_config", None) or {}
    if quantization.get("quant_method") not in ("fp8", "deepseek_v4_fp8"):
        yield from weights
        return
    published = _Published(config)
    not_converted = quantization.get("ignored_layers") or quantization.get(
        "modules_to_not_convert"
    )
    for name, tensor in weights:
        if name.startswith("mtp.") != of_draft:
            yield name, tensor
            continue
        quantized = _QUANTIZED.search(name)
        if ".experts." in name and quantization.get("moe_quant_algo"):
            pass
        elif quantized is None:
            published.check_unquantized(name, tensor)
        elif not_converted and tensor.dtype in _FLOATS and quantized[2] == "weight":
            pass
        elif quantized[2] == "weight":
            published.check_weight(name, quantized[1], tensor)
        else:
            tensor = published.convert_scale(name, quantized[1], tensor)
        yield name, tensor


class _Published:
    """What DeepSeek publishes under a config, with FP8 or MXFP4 experts."""

    def __init__(self, config: Any) -> None:
        self.has_fp8_experts = getattr(config, "expert_dtype", "fp4") == "fp8"
        self.num_experts = config.n_routed_experts
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

    def check_unquantized(self, name: str, tensor: torch.Tensor) -> None:
        if name.endswith(".ffn.gate.tid2eid"):
            _check_dtype(name, tensor, torch.int64, torch.int32)
            if ((tensor < 0) | (tensor >= self.num_experts)).any():
                raise ValueError(f"{name} has an expert that the model does not have")
            return
        _check_dtype(name, tensor, *_FLOATS)

    def check_weight(self, name: str, layer: str, weight: torch.Tensor) -> None:
        if self._is_mxfp4(layer):
            _check_dtype(name, weight, torch.int8, torch.uint8)
            self._check_shape(name, layer, weight, (1, 2))
        else:
            _check_dtype(name, weight, torch.float8_e4m3fn)
            self._check_shape(name, layer, weight, (1, 1))

    def convert_scale(self, name: str, layer: str, scale: torch.Tensor) -> torch.Tensor:
        if self._is_mxfp4(layer):
            _check_dtype(name, scale, _E8M0, torch.uint8, torch.float32)
            self._check_shape(name, layer, scale, _MXFP4_GROUP)
            if scale.dtype == torch.uint8:
                scale = scale.view(_E8M0)
        else:
            _check_dtype(name, scale, _E8M0, torch.float32)
            self._check_shape(name, layer, scale, _FP8_BLOCK)
        if scale.dtype == torch.float32:
            if not ((scale >= 0) & scale.isfinite()).all():
                raise ValueError(f"{name} has a scale that is negative or not finite")
            return scale if self.has_fp8_experts else _as_e8m0(name, scale)
        if scale.view(torch.uint8).max() == _E8M0_NAN:
            raise ValueError(f"{name} has the code {_E8M0_NAN:#x}, which is NaN")
        return _upcast_e8m0_to_fp32(scale) if self.has_fp8_experts else scale

    def _is_mxfp4(self, layer: str) -> bool:
        return ".experts." in layer and not self.has_fp8_experts

    def _check_shape(
        self, name: str, layer: str, tensor: torch.Tensor, each: tuple[int, int]
    ) -> None:
        """Compare a tensor that has one value for `each` rows and columns."""
        if ".experts." in layer:
            layer = layer.rpartition(".")[2]
        # The draft's config alone knows how wide main_proj is.
        if layer not in self.shapes:
            return
        wanted = tuple(map(cdiv, self.shapes[layer], each))
        if tensor.shape != wanted:
            raise ValueError(
                f"{name} is {tuple(tensor.shape)}; with one value for {each[0]} x "
                f"{each[1]} elements XPU reads {wanted} there"
            )


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
