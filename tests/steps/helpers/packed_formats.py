# SPDX-License-Identifier: Apache-2.0
"""Linear layers whose weights are packed, four bits per value, as in checkpoints.

Each format says what a checkpoint stores of a packed weight, what that stands for, and
what XPU's kernel sees of an activation.
"""

from typing import Any

import torch

from . import (
    indexer_batch,
    layer_parts,
    layout,
    model_configs,
    model_layers,
    quantizations,
)


class Nvfp4:
    """As ModelOpt writes it; XPU multiplies activations as they are."""

    block = 16

    def __init__(self, algorithm: str = "NVFP4") -> None:
        self.algorithm = algorithm

    def take(self, config: Any, leave_out: list[str]) -> None:
        model_configs.take_nvfp4(config, leave_out, self.algorithm)

    def stored(self, packed: torch.Tensor) -> dict[str, torch.Tensor]:
        scale = torch.rand(packed.shape[0], packed.shape[1] * 2 // self.block)
        return {
            "weight": packed,
            "weight_scale": (scale * 400 + 1).to(torch.float8_e4m3fn),
            "weight_scale_2": torch.tensor(0.00021),
            "input_scale": torch.tensor(0.01),
        }

    def scales(self, stored: dict[str, torch.Tensor]) -> torch.Tensor:
        return stored["weight_scale"].double() * stored["weight_scale_2"].double()

    def values(self, codes: torch.Tensor) -> torch.Tensor:
        return indexer_batch.e2m1_values(codes)

    def seen(self, x: torch.Tensor) -> torch.Tensor:
        return x.double()


class Nvfp4WeightOnly(Nvfp4):
    """As compressed-tensors writes it, with the inverse of the whole tensor's scale."""

    def take(self, config: Any, leave_out: list[str]) -> None:
        model_configs.take_packed(config, "nvfp4-pack-quantized", leave_out)

    def stored(self, packed: torch.Tensor) -> dict[str, torch.Tensor]:
        made = super().stored(packed)
        return {
            "weight_packed": made["weight"],
            "weight_scale": made["weight_scale"],
            "weight_global_scale": 1 / made["weight_scale_2"],
        }

    def scales(self, stored: dict[str, torch.Tensor]) -> torch.Tensor:
        scale = stored["weight_scale"].double()
        return scale / stored["weight_global_scale"].double()


class Mxfp4:
    """As compressed-tensors writes it; activations take the same format."""

    block = 32

    def take(self, config: Any, leave_out: list[str]) -> None:
        model_configs.take_packed(config, "mxfp4-pack-quantized", leave_out)

    def stored(self, packed: torch.Tensor) -> dict[str, torch.Tensor]:
        shape = packed.shape[0], packed.shape[1] * 2 // self.block
        scale = torch.randint(118, 124, shape, dtype=torch.uint8)
        return {"weight_packed": packed, "weight_scale": scale}

    def scales(self, stored: dict[str, torch.Tensor]) -> torch.Tensor:
        return torch.exp2(stored["weight_scale"].double() - 127)

    def values(self, codes: torch.Tensor) -> torch.Tensor:
        return indexer_batch.e2m1_values(codes)

    def seen(self, x: torch.Tensor) -> torch.Tensor:
        return indexer_batch.quantized(x.double(), fp4=True)


class Int4:
    """As AutoRound writes it: symmetric, eight codes per word along the input."""

    block = 128

    def take(self, config: Any, leave_out: list[str]) -> None:
        model_configs.take_auto_round(config, leave_out)

    def stored(self, packed: torch.Tensor) -> dict[str, torch.Tensor]:
        words = packed.view(torch.int32)
        groups, columns = packed.shape[1] * 2 // self.block, packed.shape[0]
        # Exact in the model's dtype too.
        scales = torch.rand(groups, columns).mul(0.01).bfloat16()
        return {
            "qweight": words.T.contiguous(),
            "scales": scales.half(),
            "qzeros": torch.full((groups, columns // 8), 0x77777777, dtype=torch.int32),
        }

    def scales(self, stored: dict[str, torch.Tensor]) -> torch.Tensor:
        return stored["scales"].T.double()

    def values(self, codes: torch.Tensor) -> torch.Tensor:
        return codes.double() - 8

    def seen(self, x: torch.Tensor) -> torch.Tensor:
        return x.double()


class Int4OfCompressedTensors(Int4):
    """The same codes along the input, each column's words contiguous."""

    def take(self, config: Any, leave_out: list[str]) -> None:
        model_configs.take_packed(config, "pack-quantized", leave_out)

    def stored(self, packed: torch.Tensor) -> dict[str, torch.Tensor]:
        made = super().stored(packed)
        return {
            "weight_packed": made["qweight"].T.contiguous(),
            "weight_scale": made["scales"].T.contiguous().bfloat16(),
            "weight_shape": torch.tensor([packed.shape[0], packed.shape[1] * 2]),
        }

    def scales(self, stored: dict[str, torch.Tensor]) -> torch.Tensor:
        return stored["weight_scale"].double()


# By name: the kind that `config.json` says, and how it is stored.
_KINDS: dict[str, tuple[str, Any]] = {
    "mxfp4": ("MXFP4", Mxfp4()),
    "int4": ("AutoRound", Int4()),
    "int4 of compressed-tensors": ("INT4", Int4OfCompressedTensors()),
}
# What this release serves without step `nvfp4-linear`.
SERVED = {
    name: packing
    for name, (kind, packing) in _KINDS.items()
    if quantizations.KINDS[kind][1]
}
# Before step `packed-wo-a` the other INT4 makes its zero point on a device called xpu.
SERVED_BEFORE = {
    name: packing
    for name, packing in SERVED.items()
    if name != "int4 of compressed-tensors"
}


def random(
    packing: Any, columns: int, size: int
) -> tuple[dict[str, torch.Tensor], torch.Tensor]:
    """A random weight of `columns` rows of `size` values as stored, and what it stands
    for, in float64."""
    packed = torch.randint(0, 256, (columns, size // 2), dtype=torch.uint8)
    stored = packing.stored(packed)
    codes = torch.stack((packed & 15, packed >> 4), -1).flatten(-2)
    scales = packing.scales(stored).repeat_interleave(packing.block, -1)
    return stored, packing.values(codes) * scales


def load(packing: Any, linear: torch.nn.Module, columns: int, size: int) -> Any:
    """Load `linear` with a random packed weight and let vLLM process it; what the
    weight stands for."""
    stored, meaning = random(packing, columns, size)
    parameters = dict(linear.named_parameters())
    for name, tensor in stored.items():
        parameter = parameters[name]
        parameter.weight_loader(parameter, tensor)
    linear.quant_method.process_weights_after_loading(linear)
    return meaning


def projection(packing: Any, part: str) -> tuple[Any, torch.Tensor]:
    """The `part` of a layer's output projection, with a random weight of that format
    and loaded as in BF16; what the weight stands for."""
    torch.manual_seed(0)
    config = model_configs.vllm_config(heads=2)
    packing.take(config, leave_out=[])
    as_loaded = layout.module("vllm.utils.torch_utils").set_default_torch_dtype
    with as_loaded(torch.bfloat16):
        layer = model_layers.attention_layer(config, 0)
    built = getattr(layer_parts.projecting(layer), part)
    columns, size = built.output_size, built.input_size
    with model_configs.current(config):
        return built, load(packing, built, columns, size)


def check_wo_a(packing: Any) -> None:
    """Hold a wo_a of that format to the weight that it stands for, in BF16."""
    built, weight = projection(packing, "wo_a")
    assert built.weight.dtype == torch.bfloat16, "its owner multiplies packed weights"
    error = (built.weight.cpu().double() - weight).abs().max() / weight.abs().max()
    assert error <= 2**-8, f"a weight is off by {error:.4f} of the largest"
    assert set(dict(built.named_parameters())) == {"weight"}, "packed weights remain"
