# SPDX-License-Identifier: Apache-2.0
"""The checkpoint in the other formats that are published.

`Pro` has Flash's formats and other sizes. `Base` is what DeepSeek publishes before
training for instructions: experts in FP8 as the linear layers, and fp32 scales
(NVIDIA-NeMo/Automodel issue 2034: w1.scale is F32). `Converted` is what others make of
Flash for devices without FP4: FP8 experts with E8M0 scales (radixark/miles pull request
2717, vllm-project/vllm pull request 51946). `Rescaled` has fp32 scales beside MXFP4
experts that are no powers of two, as a quantizer that divides by 448 leaves them.
`Int4` follows Intel's AutoRound checkpoints (W4A16 of Flash and Pro): symmetric codes,
eight a word along the input, a scale for each 128 of them. Every linear layer has
them, those of compressor and indexer too; router, embedding and head do not.
`Nvfp4Experts` follows NVIDIA's: DeepSeek's FP8, and e2m1 codes for the model's routed
experts alone, an e4m3 scale for each 16 and an fp32 one for the whole. The draft's
experts stay in MXFP4, and the configuration says so twice.
`Fp8Rows` is what compressed-tensors' FP8_DYNAMIC makes of a model: every linear layer
and every expert in e4m3 with an fp32 scale for each row. Compressor, router, embedding
and head stay as they are. `Fp8Blocks` is what its FP8_BLOCK makes: the same layers with
an fp32 scale for each 128 x 128. `Gptq` has the codes of `Int4` as GPTQModel writes
them. `Unquantized` is what is quantized while it is loaded, and `Mxfp4Experts` has its
experts as DeepSeek's own, under the name of the method alone.
"""

from typing import Any

import torch

from proof.e2e.checkpoints import checkpoint

INT4_GROUP = 128
NVFP4_BLOCK = 16
ROUGH = 1.4
"""Between two powers of two."""
PACKED = ("wkv.weight", "wgate.weight", "weights_proj.weight")
"""Ends of the names that DeepSeek's own checkpoints do not quantize."""


class Pro(checkpoint.Writer):
    """Writes Flash's formats in Pro's sizes."""

    size = checkpoint.PRO


class Base(checkpoint.Writer):
    """Writes the routed experts in FP8, and all scales in fp32."""

    def expert(self, name: str, rows: int, columns: int, gain: float) -> None:
        weight = self.random(rows, columns, std=gain * columns**-0.5)
        self._quantized(name, checkpoint.fp8_blocks(weight))

    def _quantized(self, name: str, weight: checkpoint.Quantized) -> None:
        super()._quantized(name, weight)
        self.published[f"{name}.scale"] = weight.scale.float()

    def described(self) -> dict[str, Any]:
        return {"expert_dtype": "fp8"}


class Converted(Base):
    """Writes the routed experts in FP8, and all scales in E8M0."""

    def _quantized(self, name: str, weight: checkpoint.Quantized) -> None:
        checkpoint.Writer._quantized(self, name, weight)


class Rescaled(checkpoint.Writer):
    """Writes fp32 scales of the linear layers that are no powers of two."""

    def _quantized(self, name: str, weight: checkpoint.Quantized) -> None:
        super()._quantized(name, weight)
        if weight.codes.dtype == torch.float8_e4m3fn:
            self.published[f"{name}.scale"] = weight.scale.float() * ROUGH
            self.twin[f"{name}.weight"] = weight.values * ROUGH


class Int4(checkpoint.Writer):
    """Writes every linear layer in INT4."""

    def fp8(self, name: str, rows: int, columns: int) -> None:
        self._int4(name, self.random(rows, columns, std=columns**-0.5))

    def mxfp4(self, name: str, rows: int, columns: int, gain: float) -> None:
        self._int4(name, self.random(rows, columns, std=gain * columns**-0.5))

    def plain(
        self, name: str, values: torch.Tensor, dtype: torch.dtype = torch.bfloat16
    ) -> None:
        if name.endswith(PACKED):
            self._int4(name.removesuffix(".weight"), values)
        else:
            super().plain(name, values, dtype)

    def _int4(self, name: str, weight: torch.Tensor) -> None:
        groups = weight.unflatten(1, (-1, INT4_GROUP))
        # Exact in fp16, as it is published, and in the model's bf16.
        scale = (groups.abs().amax(2, keepdim=True) / 7).bfloat16().float()
        codes = (groups / scale).round().clamp(-8, 7)
        self.twin[f"{name}.weight"] = (codes * scale).flatten(1)
        words = (codes.flatten(1) + 8).long().unflatten(1, (-1, 8))
        packed = (words << torch.arange(0, 32, 4)).sum(-1).to(torch.int32)
        self.published[f"{name}.qweight"] = packed.T
        self.published[f"{name}.scales"] = scale[..., 0].T.half()
        zeros = torch.full((scale.shape[1], len(weight) // 8), 0x77777777)
        self.published[f"{name}.qzeros"] = zeros.to(torch.int32)

    def described(self) -> dict[str, Any]:
        whole = {"bits": 16, "data_type": "float"}
        packing = {
            "quant_method": "auto-round",
            "bits": 4,
            "data_type": "int",
            "group_size": INT4_GROUP,
            "sym": True,
            "packing_format": "auto_round:auto_gptq",
            "extra_config": {"head": whole, "embed": whole},
        }
        return {"quantization_config": packing}


class Gptq(Int4):
    """The same codes, with the group of each column, as GPTQ describes them."""

    def _int4(self, name: str, weight: torch.Tensor) -> None:
        super()._int4(name, weight)
        columns = torch.arange(weight.shape[1], dtype=torch.int32)
        self.published[f"{name}.g_idx"] = columns // INT4_GROUP

    def described(self) -> dict[str, Any]:
        packing = {
            "quant_method": "gptq",
            "bits": 4,
            "group_size": INT4_GROUP,
            "desc_act": False,
            "sym": True,
            "checkpoint_format": "gptq",
        }
        return {"quantization_config": packing}


class Nvfp4Experts(checkpoint.Writer):
    """Writes the model's routed experts in NVFP4, the rest as DeepSeek does."""

    def mxfp4(self, name: str, rows: int, columns: int, gain: float) -> None:
        if name.startswith("mtp."):
            super().mxfp4(name, rows, columns, gain)
            return
        weight = self.random(rows, columns, std=gain * columns**-0.5)
        blocks = weight.unflatten(1, (-1, NVFP4_BLOCK))
        largest = blocks.abs().amax(2, keepdim=True)
        whole = largest.max() / (checkpoint.E4M3_MAX * checkpoint.E2M1[-1])
        scale = (largest / checkpoint.E2M1[-1] / whole).to(torch.float8_e4m3fn)
        step = scale.float() * whole
        grid = torch.tensor(checkpoint.E2M1)
        magnitude = ((blocks / step).abs()[..., None] - grid).abs().argmin(-1)
        signs = torch.where(blocks < 0, -1.0, 1.0)
        self.twin[f"{name}.weight"] = (signs * grid[magnitude] * step).flatten(1)
        nibbles = (magnitude + 8 * (blocks < 0)).to(torch.uint8).flatten(1)
        self.published[f"{name}.weight"] = nibbles[:, 0::2] | (nibbles[:, 1::2] << 4)
        self.published[f"{name}.weight_scale"] = scale[..., 0]
        self.published[f"{name}.weight_scale_2"] = whole
        # One for all experts; swiglu_limit bounds what w2 takes by 100.
        self.published[f"{name}.input_scale"] = torch.tensor(128 / (448 * 6.0))

    def described(self) -> dict[str, Any]:
        own = checkpoint.config()["quantization_config"]
        experts = {"quant_algo": "NVFP4", "group_size": NVFP4_BLOCK}
        converted = {
            "quant_algo": "MIXED_PRECISION",
            "moe_quant_algo": "NVFP4",
            "group_size": NVFP4_BLOCK,
            "ignore": ["*.attn.*", "*.ffn.shared_experts.*", "head", "mtp.*"],
            "quantized_layers": {
                f"layers.{layer}.ffn.experts": experts
                for layer in range(len(self.size.ratios))
            },
        }
        return {"quantization_config": own | converted}


class Fp8Rows(checkpoint.Writer):
    """Writes every linear layer and every expert in FP8 with a scale for each row."""

    def fp8(self, name: str, rows: int, columns: int) -> None:
        # Rows differ in scale from their neighbours, so that the order matters.
        gains = torch.exp2(torch.arange(rows).remainder(3).float() - 1)
        self._by_row(name, self.random(rows, columns, std=columns**-0.5), gains)

    def mxfp4(self, name: str, rows: int, columns: int, gain: float) -> None:
        weight = self.random(rows, columns, std=gain * columns**-0.5)
        self._by_row(name, weight, torch.ones(rows))

    def _by_row(self, name: str, weight: torch.Tensor, gains: torch.Tensor) -> None:
        weight = weight * (gains / gains.square().mean().sqrt())[:, None]
        scale = weight.abs().amax(1, keepdim=True) / checkpoint.E4M3_MAX
        codes = (weight / scale).to(torch.float8_e4m3fn)
        self.published[f"{name}.weight"] = codes
        self.published[f"{name}.weight_scale"] = scale
        self.twin[f"{name}.weight"] = codes.float() * scale

    def described(self) -> dict[str, Any]:
        return _compressed({"strategy": "channel"}, {"strategy": "token"})


class Fp8Blocks(checkpoint.Writer):
    """Writes every linear layer and every expert in FP8 with a scale for each block."""

    def expert(self, name: str, rows: int, columns: int, gain: float) -> None:
        weight = self.random(rows, columns, std=gain * columns**-0.5)
        self._quantized(name, checkpoint.fp8_blocks(weight))

    def _quantized(self, name: str, weight: checkpoint.Quantized) -> None:
        # As a quantizer that divides by 448 leaves them.
        self.published[f"{name}.weight"] = weight.codes
        self.published[f"{name}.weight_scale"] = weight.scale.float() * ROUGH
        self.twin[f"{name}.weight"] = weight.values * ROUGH

    def described(self) -> dict[str, Any]:
        block = [checkpoint.BLOCK, checkpoint.BLOCK]
        return _compressed(
            {"strategy": "block", "block_structure": block},
            {"strategy": "group", "group_size": checkpoint.BLOCK},
        )


def _compressed(weights: dict[str, Any], acts: dict[str, Any]) -> dict[str, Any]:
    """What `config.json` says of compressed-tensors in FP8."""
    values = {"num_bits": 8, "type": "float", "symmetric": True}
    group = {
        "targets": ["Linear"],
        "weights": {**values, **weights, "dynamic": False},
        "input_activations": {**values, **acts, "dynamic": True},
    }
    kept = ["re:.*compressor.*", "re:.*weights_proj$", "re:.*gate$", "lm_head"]
    packing = {
        "quant_method": "compressed-tensors",
        "format": "float-quantized",
        "config_groups": {"group_0": group},
        "ignore": kept,
    }
    return {"quantization_config": packing}


class Unquantized(checkpoint.Writer):
    """Writes every layer in BF16."""

    def fp8(self, name: str, rows: int, columns: int) -> None:
        weight = self.random(rows, columns, std=columns**-0.5)
        self.plain(f"{name}.weight", weight)

    def mxfp4(self, name: str, rows: int, columns: int, gain: float) -> None:
        weight = self.random(rows, columns, std=gain * columns**-0.5)
        self.plain(f"{name}.weight", weight)

    def described(self) -> dict[str, Any]:
        return {"quantization_config": None}


class Mxfp4Experts(Unquantized):
    """Writes the routed experts in MXFP4, all else in BF16."""

    def mxfp4(self, name: str, rows: int, columns: int, gain: float) -> None:
        checkpoint.Writer.mxfp4(self, name, rows, columns, gain)

    def described(self) -> dict[str, Any]:
        return {"quantization_config": {"quant_method": "mxfp4"}}


WRITERS: dict[str, type[checkpoint.Writer]] = {
    "pro": Pro,
    "base": Base,
    "fp8-e8m0": Converted,
    "fp32-scales": Rescaled,
    "int4": Int4,
    "gptq": Gptq,
    "nvfp4-experts": Nvfp4Experts,
    "mxfp4-experts": Mxfp4Experts,
    "bf16": Unquantized,
    "fp8-rows": Fp8Rows,
    "fp8-blocks": Fp8Blocks,
}
